# SPDX-License-Identifier: Apache-2.0
"""Outliers: which variables matter, by a Student-t and by a Normal likelihood.

    python examples/outliers.py [--seed 0]

The data are the prices of houses that come with the package. The output is a table of inclusion
probabilities, and the comparison of both models by LOO.
"""

import argparse
from collections.abc import Callable
from typing import Any

import arviz_base
import arviz_stats
import pandas as pd
import xarray as xr

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs, Predictive

import numpyro_spikeslab as nss
from numpyro_spikeslab.datasets import RegressionData, boston_housing


def location(X: Any) -> Any:
    """Draw the expected response, without outliers."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
    with numpyro.plate("input", X.shape[1]):
        w = nss.spike_slab("w", inclusion, 0.5)
    return level + X @ w


def normal(X: Any, y: Any = None) -> None:
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    mean = location(X)
    with numpyro.plate("row", len(X)):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def student(X: Any, y: Any = None) -> None:
    """The fewer degrees of freedom, the heavier the tails; beyond 30 they are like Normal ones."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    # the prior of Juarez and Steel (2010)
    df = numpyro.sample("df", dist.Gamma(2.0, 0.1))
    mean = location(X)
    with numpyro.plate("row", len(X)):
        numpyro.sample("y", dist.StudentT(df, mean, sigma), obs=y)


def kernel_of(model: Callable) -> Any:
    """Return a kernel: scale and degrees of freedom of a Student-t by NUTS."""
    block = nss.PairedGibbs(model)
    if model is normal:
        return block
    sites = ["w_spike", "w_slab", "level", "inclusion"]
    return Gibbs([(block, sites), (NUTS(model), ["sigma", "df"])])


def sampled(
    model: Callable, data: RegressionData, num_samples: int = 1000, seed: int = 0
) -> xr.DataTree:
    """Draw two chains, with the log likelihood of each row and replicated responses."""
    args = jnp.asarray(data.X), jnp.asarray(data.y)
    mcmc = MCMC(
        kernel_of(model),
        num_warmup=500,
        num_samples=num_samples,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(seed), *args)
    replicate = Predictive(model, mcmc.get_samples(), return_sites=["y"])
    return arviz_base.from_numpyro(
        mcmc,
        posterior_predictive=replicate(random.key(seed + 1), args[0]),
        log_likelihood=True,
        coords={"input": data.features},
        dims={name: ["input"] for name in ("w", "w_spike", "w_slab")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    models = {"Normal": normal, "Student-t": student}
    chains = {name: sampled(model, boston_housing(), seed=seed) for name, model in models.items()}
    tables = {name: nss.summary(draws, "w")["inclusion"] for name, draws in chains.items()}
    print(pd.DataFrame(tables).to_string())
    print(nss.summary(chains["Student-t"], ["df", "sigma"]).to_string())
    print(arviz_stats.compare(chains).to_string())


if __name__ == "__main__":
    main()
