# SPDX-License-Identifier: Apache-2.0
"""Fine mapping without people: z-scores of variants and their correlations are enough.

A study of 50,000 people publishes a z-score for each of 400 variants of a region, and their
correlations. Three variants have effects. Twelve are significant, in two places.

    python examples/summary_statistics.py [--seed 0]

The output is a table of the variants with the highest inclusion probabilities.
"""

import argparse
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import norm

from jax import random

import numpyro_spikeslab as nss

EFFECTS = {"rs80": 0.04, "rs200": -0.05, "rs230": 0.035}
"""Standardised effects: each explains one or two thousandths of the variance."""


class Study(NamedTuple):
    """What a study publishes: z-scores, shape (P,), correlations, (P, P), and the number of people.

    ``panel`` are the correlations of 200 other people, as of a public reference.
    """

    z: pd.Series
    R: pd.DataFrame
    n: int
    panel: pd.DataFrame


def genotypes(rng: np.random.Generator, num_people: int, num_variants: int) -> np.ndarray:
    """Draw standardised counts of an allele, correlated along the chromosome."""
    rare = np.linspace(-1.0, 0.5, num_variants)[np.random.default_rng(0).permutation(num_variants)]
    counts = np.zeros((num_people, num_variants), np.int8)
    for _ in range(2):
        x = rng.normal(size=num_people)
        for j in range(num_variants):
            x = 0.97 * x + np.sqrt(1 - 0.97**2) * rng.normal(size=num_people)
            counts[:, j] += x < rare[j]
    return (counts - counts.mean(axis=0)) / counts.std(axis=0)


def made(seed: int = 0, num_people: int = 50_000, num_variants: int = 400) -> Study:
    """Make a study, and forget its people."""
    rng = np.random.default_rng(seed)
    names = [f"rs{j}" for j in range(num_variants)]
    X = pd.DataFrame(genotypes(rng, num_people, num_variants), columns=names)
    y = X[list(EFFECTS)].to_numpy() @ list(EFFECTS.values()) + rng.normal(size=num_people)
    r = X.T @ ((y - y.mean()) / y.std()) / num_people
    z = r * np.sqrt((num_people - 2) / (1 - r**2))
    others = genotypes(rng, 200, num_variants)
    panel = pd.DataFrame(others.T @ others / 200, names, names)
    return Study(z, X.T @ X / num_people, num_people, panel)


def log_p(z: pd.Series) -> np.ndarray:
    """Compute -log10 of the p-values."""
    return -(np.log(2) + norm.logsf(abs(z))) / np.log(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    study = made(options.seed)
    dt = nss.sparse_regression_from_statistics(
        random.key(options.seed), z=study.z, R=study.R, n=study.n, expected_size=3
    )
    table = nss.summary(dt, "w")
    columns = ["effect", "effect_sd", "inclusion", "bayes_factor", "credible_set", "r_hat"]
    print(table.sort_values("inclusion", ascending=False)[columns][:10].to_string())
    print(nss.models_table(dt, "w", top=5).to_string())


if __name__ == "__main__":
    main()
