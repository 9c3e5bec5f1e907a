# SPDX-License-Identifier: Apache-2.0
"""Time of `sparse_regression`, first call and second, as a ratio to another version.

Each case and version runs in a process of its own, without a cache of compiled programs; the last
column is the first call of a second process, whose cache is filled. Processor time is less noisy
than wall time where machines are busy. The ratios are to the other version's first call, and to its
second one. Run, with a checkout of the other version:
``python tests/benchmarks/bench_front_door.py /path/to/checkout [CASES]``.
"""

import os
from pathlib import Path
import subprocess
import sys
import tempfile
from time import perf_counter, process_time

import numpy as np
from sklearn.datasets import load_diabetes

HERE = Path(__file__).resolve().parents[2]


def diabetes():
    X, y = load_diabetes(return_X_y=True)
    pairs = [(i, j) for i in range(10) for j in range(i, 10) if i != 1 or j != 1]
    return [(np.hstack([X, *(X[:, [i]] * X[:, [j]] for i, j in pairs)]), y)]


def thousand():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 1000))
    return [(X, X[:, :4] @ [1.0, -1.0, 0.5, 0.5] + rng.normal(size=1000))]


def folds():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 6))
    y = X[:, 0] + 0.5 * X[:, 1] + rng.normal(size=80)
    fold = np.arange(80) % 3
    return [(X[fold != k], y[fold != k]) for k in range(3)]


def genes():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(72, 40)) @ rng.normal(size=(40, 7129)) / 40**0.5
    X += 0.8 * rng.normal(size=X.shape)
    X[:, 10] *= 1.3 / X[:, 10].std()
    return [(X, 1.5 * X[:, 10] + rng.normal(size=72))]


CASES = {"diabetes": diabetes, "thousand": thousand, "folds": folds, "genes": genes}


def worker(name: str) -> None:
    """Print processor and wall time of two calls on all tables of a case."""
    import jax

    import numpyro_spikeslab as nss

    tables = CASES[name]()
    for seed in range(2):
        wall, cpu = perf_counter(), process_time()
        trees = [nss.sparse_regression(jax.random.key(seed), X, y) for X, y in tables]
        print(process_time() - cpu, perf_counter() - wall)
    sizes = [float(tree["summary"]["inclusion"].sum()) for tree in trees]
    print("included:", np.round(sizes, 2), file=sys.stderr)


def times(checkout: Path, name: str, cache: str | None = None) -> np.ndarray:
    """Run a case with a version; return processor and wall time of the first and second call."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if cache is not None:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    command = [sys.executable, __file__, "--worker", name]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return np.array([line.split() for line in output.stdout.splitlines()], float)


def main(checkout: Path, cases: list[str]) -> None:
    for name in cases:
        other, ours = times(checkout, name), times(HERE, name)
        with tempfile.TemporaryDirectory() as cache:
            times(HERE, name, cache)
            cached = times(HERE, name, cache)
        for kind, column in ("cpu", 0), ("wall", 1):
            first, again = (other[:, column], ours[:, column])
            ratios = ours[:, column] / other[:, column]
            second = cached[0, column]
            print(
                f"{name} {kind}: first {again[0]:.1f} s ({ratios[0]:.2f} of {first[0]:.1f}), "
                f"again {again[1]:.2f} s ({ratios[1]:.2f} of {first[1]:.2f}), "
                f"second process {second:.1f} s ({second / first[0]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
