# SPDX-License-Identifier: Apache-2.0
"""CAVI to convergence against sparsevb (C++), the same data and noise level, in one run.

Run: ``pip install sparsevb`` (optional; it needs a Fortran compiler and LAPACK), then
``python tests/benchmarks/bench_cavi.py``.
"""

from time import perf_counter

import numpy as np
from timing import Compilations, enable_x64

from jax import random

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss

NUM_OBS, NUM_FEATURES, NUM_ACTIVE = 1000, 5000, 20
compilations = Compilations()


def simulate(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Design, response and true weights."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(NUM_OBS, NUM_FEATURES))
    w = np.zeros(NUM_FEATURES)
    w[rng.choice(NUM_FEATURES, NUM_ACTIVE, replace=False)] = rng.normal(size=NUM_ACTIVE)
    return X, X @ w + rng.normal(size=NUM_OBS), w


def model(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", expected_size=NUM_ACTIVE)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def time_cavi(temperature) -> tuple[float, float, int, np.ndarray]:
    """Seconds of the first run and of one on new data, compilations in the latter, its means."""
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, temperature=temperature)
    times, counts = [], []
    for seed in (1, 0, 0):
        X, y, w = simulate(seed)
        before = compilations.count
        start = perf_counter()
        result = svi.run(random.key(0), 300, X, y, tol=1e-3, progress_bar=False)
        means = np.asarray(guide.posterior_mean(result.params)["w"])
        times.append(perf_counter() - start)
        counts.append(compilations.count - before)
        print(
            f"  {len(result.losses)} sweeps, converged {bool(result.converged)}, "
            f"{times[-1]:.3f} s, {counts[-1]} compilations, "
            f"RMSE {np.sqrt(np.mean((means - w) ** 2)):.5f}"
        )
    return times[0], min(times[1:]), counts[-1], means


def main() -> None:
    enable_x64()
    figures = {}
    for name, temperature in (("annealed", nss.annealing), ("plain", None)):
        print(f"CAVI, {name}:")
        first, warm, recompiled, _ = time_cavi(temperature)
        figures[name] = warm
        print(f"  compile {first - warm:.2f} s (wanted: below 2), recompiled {recompiled} (0)")
    try:
        from sparsevb import svb_fit_linear
    except ImportError:
        print("sparsevb is not installed: no comparison")
        return
    X, y, w = simulate(0)
    for slab in ("gaussian", "laplace"):
        start = perf_counter()
        fit = svb_fit_linear(X, y, noise_sd=1.0, slab=slab)
        elapsed = perf_counter() - start
        error = np.sqrt(np.mean((fit["mu"] * fit["gamma"] - w) ** 2))
        print(
            f"sparsevb, {slab} slab: {elapsed:.2f} s, RMSE {error:.5f}; ratio to annealed CAVI "
            f"{elapsed / figures['annealed']:.1f} (wanted: 10), to plain "
            f"{elapsed / figures['plain']:.1f} (25)"
        )


if __name__ == "__main__":
    main()
