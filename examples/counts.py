# SPDX-License-Identifier: Apache-2.0
"""Counts with more spread than Poisson's: visits to doctors, and which covariates matter.

The data are the visits of 4,406 people aged 66 and more in three months of Deb and Trivedi (1997),
with 17 covariates. Without a file the example makes a set of the same shape.

    python examples/counts.py [--file ofp.csv] [--seed 0]

The output is a table of inclusion probabilities, and the comparison of both models by LOO.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs, Predictive

import numpyro_spikeslab as nss

FILE = Path(__file__).parents[2] / "shared" / "data" / "ofp.csv"
YES = {"black": "yes", "maried": "yes", "employed": "yes", "privins": "yes", "medicaid": "yes"}
"""Covariates with two values, and the value that is 1."""

LEVELS = {"region": ["midwest", "noreast", "west"], "hlth": ["excellent", "poor"]}
"""Covariates with several values, and those with a column; the others are the base."""

NUMBERS = ["hosp", "numchron", "adldiff", "age", "school", "faminc"]
NAMES = {
    "hosp": "hospital stays",
    "numchron": "chronic conditions",
    "adldiff": "needs help",
    "faminc": "income",
    "maried": "married",
    "privins": "private insurance",
    "noreast": "north east",
    "excellent": "health excellent",
    "poor": "health poor",
}


class Visits(NamedTuple):
    """Covariates, shape (N, P), each of mean 0 and standard deviation 1, and counts, (N,)."""

    X: pd.DataFrame
    y: np.ndarray


def load(file: Path = FILE, seed: int = 0) -> Visits:
    """Read the data, or make others of this shape if there is no file."""
    if not file.exists():
        return planted(seed)
    frame = pd.read_csv(file)
    columns = {name: frame[name].astype(float) for name in NUMBERS}
    columns |= {name: frame[name] == value for name, value in YES.items()}
    columns["male"] = frame["sex"] == "male"
    columns |= {x: frame[name] == x for name, levels in LEVELS.items() for x in levels}
    return standardised(columns, frame["ofp"].to_numpy())


def standardised(columns: dict[str, Any], y: np.ndarray) -> Visits:
    X = pd.DataFrame(columns).astype(float).rename(columns=NAMES)
    return Visits((X - X.mean()) / X.std(ddof=0), y)


def planted(seed: int, num_people: int = 4406) -> Visits:
    """Make a set in which six covariates matter, and the concentration is 1.2."""
    rng = np.random.default_rng(seed)
    of_numbers = [rng.poisson(mean, num_people) for mean in (0.3, 1.5, 0.2, 8, 10, 2)]
    columns = dict(zip(NUMBERS, of_numbers, strict=True))
    for name in (*YES, "male", *LEVELS["region"], *LEVELS["hlth"]):
        columns[name] = rng.uniform(size=num_people) < 0.25
    X = standardised(columns, np.zeros(0)).X
    effects = {"hospital stays": 0.15, "chronic conditions": 0.2, "school": 0.1}
    effects |= {"private insurance": 0.12, "health poor": 0.1, "health excellent": -0.1}
    mean = np.exp(1.7 + X[list(effects)] @ list(effects.values()))
    return Visits(X, rng.negative_binomial(1.2, 1.2 / (1.2 + mean)))


def log_mean(X: Any) -> Any:
    """Draw the logarithm of the expected number of visits."""
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
    with numpyro.plate("covariate", X.shape[1]):
        # a standard deviation multiplies visits by 1.35, or divides them
        w = nss.spike_slab("w", inclusion, 0.3)
    return level + X @ w


def poisson(X: Any, y: Any = None) -> None:
    mean = jnp.exp(log_mean(X))
    with numpyro.plate("person", len(X)):
        numpyro.sample("y", dist.Poisson(mean), obs=y)


def negative_binomial(X: Any, y: Any = None) -> None:
    """The variance is mean + mean^2 / concentration."""
    concentration = numpyro.sample("concentration", dist.LogNormal(0.0, 1.0))
    mean = jnp.exp(log_mean(X))
    with numpyro.plate("person", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(mean, concentration), obs=y)


def kernel_of(model: Callable) -> Any:
    """Return a kernel: the concentration by NUTS, all else by one block."""
    block = nss.PairedGibbs(model)
    if model is poisson:
        return block
    sites = ["w_spike", "w_slab", "level", "inclusion"]
    return Gibbs([(block, sites), (NUTS(model), ["concentration"])])


def sampled(model: Callable, visits: Visits, num_samples: int = 500, seed: int = 0) -> xr.DataTree:
    """Draw two chains, with the log likelihood of each person and replicated counts."""
    args = jnp.asarray(visits.X), jnp.asarray(visits.y)
    mcmc = MCMC(
        kernel_of(model),
        num_warmup=300,
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
        coords={"covariate": visits.X.columns},
        dims={name: ["covariate"] for name in ("w", "w_spike", "w_slab")},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    visits = load(options.file, options.seed)
    models = {"Poisson": poisson, "negative binomial": negative_binomial}
    chains = {name: sampled(model, visits, seed=options.seed) for name, model in models.items()}
    tables = {name: nss.summary(data, "w")["inclusion"] for name, data in chains.items()}
    print(pd.DataFrame(tables).to_string())
    print(arviz_stats.compare(chains).to_string())


if __name__ == "__main__":
    main()
