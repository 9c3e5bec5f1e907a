# SPDX-License-Identifier: Apache-2.0
"""Which experiment next? Rows of a pool, entries of a table of tasks, and the best input.

    python examples/next_experiment.py [--seed 0]

The output is the log loss of the spikes of a regression after batches of chosen rows, and after as
many random ones.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from tinygp import kernels

from jax import random

import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss

BATCH, NUM_BATCHES, NUM_FIRST = 10, 4, 20


def pool_of_rows(rng: np.random.Generator, size: int = 240, num_columns: int = 60) -> Any:
    """Make rows of a pool, and the results that their measurement would have.

    Neighbouring columns have the correlation 0.9, except in a tenth of the rows: experiments that
    change two columns and leave the others alone.

    :return: rows, results, and which columns have an effect.
    """
    X = rng.normal(size=(size, num_columns))
    for column in range(1, num_columns):
        X[:, column] = 0.9 * X[:, column - 1] + np.sqrt(1 - 0.9**2) * X[:, column]
    for row in rng.choice(size, size // 10, replace=False):
        X[row] = 0.0
        X[row, rng.choice(num_columns, 2, replace=False)] = rng.choice([-2, 2], 2)
    w = np.zeros(num_columns)
    w[rng.choice(num_columns, 6, replace=False)] = rng.normal(size=6)
    return X, X @ w + 0.7 * rng.normal(size=size), w != 0


def chains(num_columns: int = 60) -> MCMC:
    """Make chains that compile once for all batches: the shapes are those of the whole pool."""
    model = nss.models.sparse_regression(inclusion=(1.0, num_columns / 5 - 1))
    kernel = nss.PairedGibbs(model)
    options: dict[str, Any] = {"progress_bar": False, "jit_model_args": True}
    return MCMC(kernel, num_warmup=300, num_samples=600, **options)


def choose_rows(mcmc: MCMC, X: Any, measured: Any, rng: Any = None) -> Any:
    """Choose a batch of rows after a run of chains, or draw it with the generator ``rng``."""
    if rng is not None:
        return rng.choice(np.flatnonzero(~measured), BATCH, replace=False)
    draws = mcmc.get_samples()
    noise = float(np.sqrt(np.mean(draws["sigma"] ** 2)))
    table = nss.next_measurements(draws["w"] @ X.T, noise, BATCH, allowed=~measured)
    return table["row"].to_numpy()


def log_losses(mcmc: MCMC, seed: int, by_chance: bool) -> list[float]:
    """Measure batches, and return the log loss of all spikes before each and after the last."""
    rng = np.random.default_rng(seed)
    X, y, matters = pool_of_rows(rng)
    measured = np.arange(len(y)) < NUM_FIRST
    losses = []
    for _ in range(NUM_BATCHES + 1):
        # what is not measured is masked; its value is never read
        seen = np.where(measured, y, 0.0)
        fields = ("inclusion_probabilities",)
        mcmc.run(random.key(seed), X, seen, mask=measured, extra_fields=fields)
        probs = np.mean(mcmc.get_extra_fields()["inclusion_probabilities"]["w"], axis=0)
        probs = np.clip(probs, 1e-3, 1 - 1e-3)
        losses.append(-float(np.log(np.where(matters, probs, 1 - probs)).sum()))
        measured[choose_rows(mcmc, X, measured, rng if by_chance else None)] = True
    return losses


def compare_rules(seeds: range) -> pd.DataFrame:
    """Return mean log losses of chosen and of random rows, by the number of measured rows."""
    mcmc = chains()
    losses = {
        name: np.mean([log_losses(mcmc, seed, by_chance) for seed in seeds], axis=0)
        for name, by_chance in (("chosen", False), ("random", True))
    }
    sizes = NUM_FIRST + BATCH * np.arange(NUM_BATCHES + 1)
    return pd.DataFrame(losses, index=pd.Index(sizes, name="rows"))


NOISE = 0.05
INPUTS = np.linspace(0.0, 1.0, 81)


def tasks(rng: np.random.Generator, num_tasks: int = 4) -> Any:
    """Draw tasks that mix two smooth functions, at all inputs, shape (N, Q)."""
    kernel = np.exp(-0.5 * (INPUTS[:, None] - INPUTS) ** 2 / 0.08**2)
    root = np.linalg.cholesky(kernel + 1e-8 * np.eye(len(INPUTS)))
    return root @ rng.normal(size=(len(INPUTS), 2)) @ rng.normal(size=(2, num_tasks))


def fit_of_tasks() -> Callable[..., Any]:
    """Make a function from a table with gaps to joint draws of all its entries, (S, N, Q)."""
    priors = {"noise": dist.HalfNormal(0.1), "scale": dist.LogNormal(np.log(0.1), 0.5)}
    functions = [kernels.ExpSquared(0.1)] * 4
    model = nss.models.mtmkl(functions, shared_noise=True, priors=priors)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)

    def draws(key: Any, Y: Any) -> Any:
        key_fit, key_draws = random.split(key)
        params = svi.run(key_fit, 30, INPUTS, Y, progress_bar=False).params
        return guide.sample_posterior(key_draws, params, INPUTS, Y, sample_shape=(500,))["f"]

    return draws


def measured_at(F: Any, rng: np.random.Generator, counts: list[int]) -> Any:
    """Measure so many random entries of each task; all others are NaN."""
    Y = np.full(F.shape, np.nan)
    for task, count in enumerate(counts):
        rows = rng.choice(len(F), count, replace=False)
        Y[rows, task] = F[rows, task] + NOISE * rng.normal(size=count)
    return Y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    print(compare_rules(range(seed, seed + 4)).round(1))


if __name__ == "__main__":
    main()
