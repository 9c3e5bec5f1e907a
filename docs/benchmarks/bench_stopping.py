# SPDX-License-Identifier: Apache-2.0
"""Accuracy of chains that stop by Monte Carlo errors: 200 simulated tables with 64 models each.

Inclusion probabilities and means of `sparse_regression` are compared with those of all models by
quadrature, and with the columns that are in the truth, for chains that may stop and for chains of
1,000 draws. Run: ``python docs/benchmarks/bench_stopping.py``.
"""

from itertools import pairwise
from pathlib import Path
import sys

import numpy as np

import jax

import numpyro_spikeslab as nss

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from test_regression import exact

NUM_SETS, N, P = 200, 40, 6


def simulated(rng):
    """A table with correlated neighbours, weights, and a response."""
    X = rng.normal(size=(N, P))
    for k in range(1, P):
        X[:, k] = 0.7 * X[:, k - 1] + 0.51**0.5 * X[:, k]
    included = rng.uniform(size=P) < 0.3
    w = included * rng.normal(size=P) * 0.7
    return X, X @ w + rng.normal(size=N), included


def main() -> None:
    rng, rows = np.random.default_rng(0), []
    for k in range(NUM_SETS):
        X, y, included = simulated(rng)
        probs, means = exact(X, y)
        row = {"exact": probs, "truth": included}
        for name, number in ("stopping", None), ("all draws", 1000):
            options = {"expected_size": 0.6, "num_samples": number, "progress_bar": False}
            tree = nss.sparse_regression(jax.random.key(k), X, y, **options)
            summary = nss.summary(tree, "w", None)
            row[name] = summary["inclusion"].to_numpy()
            gap = summary["mean"] - means * np.std(y) / X.std(axis=0)
            row[f"means, {name}"] = (gap / summary["sd"]).to_numpy()
            if name == "stopping":
                row["drawn"] = np.full(P, tree["summary"].attrs["num_samples"])
        rows.append(row)
    table = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    drawn = table["drawn"][::P]
    counts = {int(n): int((drawn == n).sum()) for n in np.unique(drawn)}
    print(f"draws of each chain, of {NUM_SETS} tables: {counts}")
    for name in "stopping", "all draws":
        error, means = table[name] - table["exact"], table[f"means, {name}"]
        se = error.std() / error.size**0.5
        print(
            f"{name}: mean error {error.mean():.5f} (standard error {se:.5f}), root mean square "
            f"{np.sqrt((error**2).mean()):.4f}, largest {abs(error).max():.3f}; of means in sd: "
            f"root mean square {np.sqrt((means**2).mean()):.3f}, largest {abs(means).max():.3f}"
        )
    edges = [0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0]
    for low, high in pairwise(edges):
        parts = []
        for name in "exact", "stopping", "all draws":
            inside = (table[name] >= low) & (table[name] <= high)
            mean, truth = table[name][inside].mean(), table["truth"][inside].mean()
            parts.append(f"{name} {inside.sum()}: {mean:.3f}, in truth {truth:.3f}")
        print(f"{low:.2f} to {high:.2f}: " + "; ".join(parts))


if __name__ == "__main__":
    main()
