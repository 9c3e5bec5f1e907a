# SPDX-License-Identifier: Apache-2.0
"""Inclusion probabilities that depend on what is known of a column beforehand.

Of 400 genes, 60 are in a pathway that is believed to matter for a response, and each has a score
of how it varies between people. The logit of the prior inclusion probability is a regression on
both. NUTS draws its coefficients, and PairedGibbs all else.

    python examples/annotations.py [--seed 0]

The output is a table of the coefficients, and how many effects are found with and without them.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import arviz_base
import numpy as np
import pandas as pd
import xarray as xr

from jax import random
from jax.nn import sigmoid
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs

import numpyro_spikeslab as nss

LEVEL, SLOPES = -4.0, (3.0, 0.0)
"""Logit of the inclusion probability outside of the pathway, and what pathway and score add."""


class Genes(NamedTuple):
    """A table, shape (N, P), a response, (N,), what is known of the columns, (P, 2), and which
    columns have effects, (P,)."""

    X: pd.DataFrame
    y: np.ndarray
    known: pd.DataFrame
    included: np.ndarray


def made(seed: int = 0, num_people: int = 150, num_genes: int = 400) -> Genes:
    """Make genes of which most that matter are in the pathway; the score does not matter."""
    rng = np.random.default_rng(seed)
    names = [f"gene {k}" for k in range(num_genes)]
    pathway = np.arange(num_genes) < 0.15 * num_genes
    score = rng.normal(size=num_genes)
    known = pd.DataFrame({"pathway": pathway.astype(float), "score": score}, names)
    p = 1 / (1 + np.exp(-LEVEL - known.to_numpy() @ SLOPES))
    included = rng.uniform(size=num_genes) < p
    X = rng.normal(size=(num_people, num_genes))
    w = included * rng.normal(0.0, 0.5, num_genes)
    y = X @ w + rng.normal(size=num_people)
    return Genes(pd.DataFrame(X, columns=names), y, known, included)


def observe(X: Any, inclusion: Any, y: Any) -> None:
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    slab = numpyro.sample("slab_scale", dist.HalfNormal(1.0))
    with numpyro.plate("gene", X.shape[1]):
        w = nss.spike_slab("w", inclusion, slab)
    with numpyro.plate("person", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def alike(X: Any, known: Any, y: Any = None) -> None:
    """All columns have one inclusion probability."""
    observe(X, numpyro.sample("inclusion", dist.Beta(1.0, 9.0)), y)


def annotated(X: Any, known: Any, y: Any = None) -> None:
    """The logit of the inclusion probability is affine in what is known of the column."""
    level = numpyro.sample("level", dist.Normal(-3.0, 1.5))
    with numpyro.plate("annotation", known.shape[1]):
        slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    observe(X, sigmoid(level + known @ slope), y)


def kernel_of(model: Callable) -> Any:
    """Return a kernel: the regression of inclusion by NUTS, all else by one block."""
    block = nss.PairedGibbs(model)
    if model is alike:
        return block
    sites = ["w_spike", "w_slab", "sigma", "slab_scale"]
    return Gibbs([(block, sites), (NUTS(model), ["level", "slope"])])


def sampled(model: Callable, genes: Genes, num_samples: int = 1000, seed: int = 0) -> xr.DataTree:
    """Draw two chains."""
    mcmc = MCMC(
        kernel_of(model),
        num_warmup=300,
        num_samples=num_samples,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(
        random.key(seed), *(jnp.asarray(np.asarray(x)) for x in (genes.X, genes.known, genes.y))
    )
    return arviz_base.from_numpyro(
        mcmc,
        coords={"gene": genes.X.columns, "annotation": genes.known.columns},
        dims={name: ["gene"] for name in ("w", "w_spike", "w_slab")} | {"slope": ["annotation"]},
    )


def scores(draws: xr.DataTree, genes: Genes) -> dict[str, float]:
    """Count effects and other columns whose inclusion probability is above a half, and compute the
    log probability of which columns have effects, summed over columns."""
    p = nss.summary(draws, "w", round_to=None)["inclusion"].to_numpy()
    is_in, included = p > 0.5, genes.included
    return {
        "effects": included.sum(),
        "found": (is_in & included).sum(),
        "wrong": (is_in & ~included).sum(),
        "log score": np.log(np.where(included, p, 1 - p)).sum().round(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    genes = made(options.seed)
    chains = {
        model.__name__: sampled(model, genes, seed=options.seed) for model in (alike, annotated)
    }
    print(nss.summary(chains["annotated"], ["level", "slope"]).to_string())
    rows = {name: scores(draws, genes) for name, draws in chains.items()}
    print(pd.DataFrame.from_dict(rows, orient="index").to_string())


if __name__ == "__main__":
    main()
