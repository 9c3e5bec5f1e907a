# SPDX-License-Identifier: Apache-2.0
"""Sparse factor analysis with missing entries, beside mofapy2 (https://github.com/bioFAM/mofapy2).

A thousand rows, five thousand tasks, twenty planted sparse factors; a fifth of the entries are
missing, and errors are those of the noise-free tasks there. Both are given twenty factors; JAX
computes in single precision by default, mofapy2 in double precision, or in single if asked for.
Times of a sweep are medians of one run each; the first sweeps, which compile here and are without
sparsity there, are left out, and so is what mofapy2 takes to compute its bound.
Run: ``python tests/benchmarks/bench_mofapy2.py``.
"""

from contextlib import redirect_stdout
from io import StringIO
from time import perf_counter
from typing import Any

import numpy as np

import jax
from jax import random

import numpyro_spikeslab as nss

try:
    from mofapy2.run.entry_point import entry_point
except ImportError:
    entry_point = None

N, Q, M, MISSING = 1000, 5000, 20, 0.2
NUM_STEPS, NUM_TIMED = 300, 20


def planted(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What is seen, NaN where it is missing, and the noise-free tasks."""
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(M, Q)) * (rng.random((M, Q)) < 0.3)
    f = rng.normal(size=(N, M)) @ W
    Y = f + np.std(f) * rng.normal(size=f.shape)
    Y[rng.random(f.shape) < MISSING] = np.nan
    return Y.astype(np.float32), f


def error(found: Any, Y: np.ndarray, f: np.ndarray) -> float:
    """Root mean squared error where entries are missing, relative to the tasks' own size."""
    missing = np.isnan(Y)
    return float(np.sqrt(np.mean((np.asarray(found) - f)[missing] ** 2)) / np.std(f))


def ours(Y: np.ndarray, f: np.ndarray) -> float:
    """Seconds of a sweep."""
    model = nss.models.factor_analysis(M)
    guide = nss.PairedGuide(model)
    began = perf_counter()
    found = nss.CAVI(model, guide).run(random.key(0), NUM_STEPS, Y, progress_bar=False)
    seconds = perf_counter() - began
    mean, _ = guide.predict(found.params, Y)
    print(f"default fit: {seconds:.1f} s with compilation, held-out error {error(mean, Y, f):.4f}")
    svi = nss.CAVI(model, guide, plain=True)
    update = jax.jit(lambda state: svi.update(state, Y)[0])
    state, times = svi.init(random.key(0), Y), []
    for _ in range(NUM_TIMED):
        began = perf_counter()
        state = jax.block_until_ready(update(state))
        times.append(perf_counter() - began)
    return float(np.median(times[2:]))


def theirs(Y: np.ndarray, f: np.ndarray, single: bool) -> float:
    """Seconds of a sweep."""
    fit = entry_point()
    with redirect_stdout(StringIO()):
        fit.set_data_options(use_float32=single)
        fit.set_data_matrix([[Y.copy()]])
        fit.set_model_options(factors=M)
        fit.set_train_options(iter=NUM_STEPS, seed=1, freqELBO=5, startSparsity=10)
        fit.build()
        began = perf_counter()
        fit.run()
    seconds = perf_counter() - began
    expected = fit.model.getExpectations(only_first_moments=True)
    mean = np.nanmean(Y, axis=0) + expected["Z"] @ expected["W"][0].T
    times = fit.model.getTrainingStats()["time"]
    print(f"mofapy2: {seconds:.1f} s, {len(times)} sweeps, held-out error {error(mean, Y, f):.4f}")
    return float(np.nanmedian(times[11:]))


def main() -> None:
    Y, f = planted()
    own = ours(Y, f)
    print(f"a sweep: {own:.3f} s", flush=True)
    for single in (False, True) if entry_point is not None else ():
        other = theirs(Y, f, single)
        precision = "single" if single else "double"
        print(f"{precision} precision: {other:.3f} s a sweep, {other / own:.1f} times that")


if __name__ == "__main__":
    main()
