# SPDX-License-Identifier: Apache-2.0
"""The default ``expected_size`` of ``sparse_regression`` against fixed ones and a tenth of columns.

Columns share ten factors; one, three or ten of them have Normal effects, which explain two thirds
of the variance. For each shape of the table: the share of the effects among the columns of the
largest inclusion probabilities, as many as there are with 10% false ones, over all data sets. Then
the calibration of the default: how often a column has an effect, by its inclusion probability.
Run: ``python docs/benchmarks/bench_expected_size.py``, with shapes such as ``50x1000`` for these
alone, and ``--data-sets 9``.
"""

import argparse
import warnings

import numpy as np
import pandas as pd
from timing import enable_x64

from jax import random

import numpyro_spikeslab as nss

SHAPES = ("50x10", "50x100", "50x1000", "200x10", "200x100", "200x1000", "1000x100", "50x10000")
NUM_EFFECTS = (1, 3, 10)
FIXED = (1.0, 3.0, 10.0)
OPTIONS = {"num_warmup": 100, "num_samples": 300, "num_chains": 2}
FALSE = 0.1


def simulate(seed: int, N: int, P: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The table, the response, and which columns have effects."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, P))
    X += np.sqrt(0.15) * rng.normal(size=(N, 10)) @ rng.normal(size=(10, P))
    number = min(NUM_EFFECTS[seed % len(NUM_EFFECTS)], P // 3)
    has_effect = np.isin(np.arange(P), rng.choice(P, number, replace=False))
    signal = X @ (has_effect * rng.normal(size=P))
    return X, signal / signal.std() + np.sqrt(0.5) * rng.normal(size=N), has_effect


def power(inclusion: np.ndarray, has_effect: np.ndarray) -> float:
    """The largest share of effects in a set of the most probable columns with 10% false ones."""
    order = np.argsort(-inclusion, kind="stable")
    right = np.cumsum(has_effect[order])
    allowed = right >= (1 - FALSE) * np.arange(1, len(order) + 1)
    return float(np.max(right[allowed], initial=0) / has_effect.sum())


def calibration(inclusion: np.ndarray, has_effect: np.ndarray) -> pd.DataFrame:
    """Numbers of columns, mean inclusion probabilities and shares of effects, in ten bins."""
    bins = np.minimum((10 * inclusion).astype(int), 9) / 10
    frame = pd.DataFrame({"bin": bins, "inclusion": inclusion, "share": has_effect})
    return frame.groupby("bin").agg(columns=("share", "size")).join(frame.groupby("bin").mean())


def compare(shape: str, data_sets: int) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Powers of all expected sizes, and the inclusion probabilities and effects of the default."""
    N, P = map(int, shape.split("x"))
    sizes = {"default": None} | {f"{size:g}": size for size in FIXED if size < P / 2}
    sizes["a tenth"] = P / 10
    inclusions: dict[str, list] = {name: [] for name in sizes}
    effects, row = [], {}
    for seed in range(data_sets):
        X, y, has_effect = simulate(seed, N, P)
        effects.append(has_effect)
        for name, size in sizes.items():
            tree = nss.sparse_regression(random.key(seed), X, y, expected_size=size, **OPTIONS)
            inclusions[name].append(nss.summary(tree, "w", None)["inclusion"].to_numpy())
    has_effect = np.concatenate(effects)
    for name, parts in inclusions.items():
        row[name] = power(np.concatenate(parts), has_effect)
    row["columns in, default"] = np.mean([x.sum() for x in inclusions["default"]])
    row["columns in, a tenth"] = np.mean([x.sum() for x in inclusions["a tenth"]])
    return row, np.concatenate(inclusions["default"]), has_effect


def main(shapes: list[str], data_sets: int) -> None:
    enable_x64()
    warnings.simplefilter("ignore")
    inclusions, effects = [], []
    for shape in shapes:
        row, inclusion, has_effect = compare(shape, data_sets)
        print(f"{shape}: " + ", ".join(f"{name} {x:.2f}" for name, x in row.items()), flush=True)
        inclusions.append(inclusion)
        effects.append(has_effect)
    table = calibration(np.concatenate(inclusions), np.concatenate(effects))
    print("\n" + table.round(3).to_string())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=SHAPES, help="of tables, such as 50x1000")
    parser.add_argument("--data-sets", type=int, default=9, help="of each shape; 9 by default")
    arguments = parser.parse_args()
    main(arguments.shapes, arguments.data_sets)
