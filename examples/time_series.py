# SPDX-License-Identifier: Apache-2.0
"""Which other series explain a series, beside a level that drifts and a season?

A structural time series, as in the R package bsts: a local level and monthly effects are Gaussian
processes, so they are a part of the covariance of the observations, and are integrated out while
PairedGibbs draws the weights of 20 other series. NUTS draws the scales.

    python examples/time_series.py [--seed 0]

The output is a table of inclusion probabilities, with the level and without.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import arviz_base
import numpy as np
import pandas as pd
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs

import numpyro_spikeslab as nss

START = 10.0
"""Standard deviation of the level at the start, which is wide."""


class Series(NamedTuple):
    """Standardised series, shape (N, P), a response, (N,), its level, (N,), and the names of the
    two series that it depends on."""

    X: pd.DataFrame
    y: pd.Series
    level: np.ndarray
    used: list[str]


def made(seed: int = 0, num_months: int = 120, num_series: int = 20) -> Series:
    """Make series that drift, and a response with a level and a season that depends on two."""
    rng = np.random.default_rng(seed)
    months = pd.period_range("2015-01", periods=num_months, freq="M").astype(str)
    names = [f"series {k}" for k in range(num_series)]
    X = np.cumsum(rng.normal(size=(num_months, num_series)), axis=0)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    level = np.cumsum(0.15 * rng.normal(size=num_months))
    season = 0.4 * rng.normal(size=12)[np.arange(num_months) % 12]
    y = 0.6 * X[:, 3] - 0.5 * X[:, 11] + level + season + 0.2 * rng.normal(size=num_months)
    return Series(
        pd.DataFrame(X, months, names), pd.Series(y, months), level, [names[3], names[11]]
    )


def parts_of(num_months: int, step: Any, season: Any) -> tuple[Any, Any]:
    """Return the prior covariances of the level, a random walk, and of the months."""
    t = jnp.arange(1, num_months + 1)
    level = START**2 + step**2 * jnp.minimum(t, t[:, None])
    return level, season**2 * (t % 12 == t[:, None] % 12)


def observe(X: Any, y: Any, covariance: Any) -> None:
    with numpyro.plate("series", X.shape[1]):
        w = nss.spike_slab("w", expected_size=2)
    numpyro.sample("y", dist.MultivariateNormal(X @ w, covariance), obs=y)


def structural(X: Any, y: Any = None) -> None:
    """Level, season and noise."""
    names = "step", "season", "sigma"
    scales = [numpyro.sample(name, dist.HalfNormal(0.5)) for name in names]
    level, season = parts_of(len(X), *scales[:2])
    observe(X, y, level + season + scales[2] ** 2 * jnp.eye(len(X)))


def plain(X: Any, y: Any = None) -> None:
    """An intercept and noise, as in a regression of observations without an order."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    observe(X, y, START**2 + sigma**2 * jnp.eye(len(X)))


def sampled(
    model: Callable,
    series: Series,
    num_samples: int = 1000,
    seed: int = 0,
) -> xr.DataTree:
    """Draw two chains: weights by PairedGibbs, the scales of the covariance by NUTS."""
    kernel = Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])
    mcmc = MCMC(
        kernel,
        num_warmup=300,
        num_samples=num_samples,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    X, y = (jnp.asarray(x.to_numpy()) for x in series[:2])
    mcmc.run(random.key(seed), X, y)
    dims = {name: ["series"] for name in ("w", "w_spike", "w_slab")}
    return arviz_base.from_numpyro(mcmc, coords={"series": series.X.columns}, dims=dims)


def level_of(draws: xr.DataTree, series: Series) -> np.ndarray:
    """Compute the mean of the level given each draw of weights and scales, shape (draws, N)."""
    table, X, y = draws["posterior"].to_dataset(), *(jnp.asarray(x.to_numpy()) for x in series[:2])

    @jax.vmap
    def mean(w, step, season, sigma):
        level, seasonal = parts_of(len(y), step, season)
        total = level + seasonal + sigma**2 * jnp.eye(len(y))
        return level @ jnp.linalg.solve(total, y - X @ w)

    stacked = table.stack(draws=("chain", "draw")).transpose("draws", ...)
    return np.asarray(mean(*(stacked[k].values for k in ("w", "step", "season", "sigma"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    series = made(options.seed)
    chains = {model.__name__: sampled(model, series) for model in (structural, plain)}
    columns = {
        name: nss.summary(draws, "w", round_to=None)["inclusion"].to_numpy()
        for name, draws in chains.items()
    }
    table = pd.DataFrame(columns, series.X.columns).round(2)
    print(table.assign(used=table.index.isin(series.used)).to_string())
    print(nss.summary(chains["structural"], ["step", "season", "sigma"]).to_string())


if __name__ == "__main__":
    main()
