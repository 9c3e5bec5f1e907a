# SPDX-License-Identifier: Apache-2.0
"""CAVI to convergence against sparsevb (C++), the same data and noise level, in one run.

Run: ``pip install sparsevb`` (optional; it needs a Fortran compiler and LAPACK), then
``python tests/benchmarks/bench_cavi.py``.
"""

from time import perf_counter

import numpy as np
from timing import best_time, enable_x64

from jax import random

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss

NUM_OBS, NUM_FEATURES, NUM_ACTIVE = 1000, 5000, 20


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


def main() -> None:
    enable_x64()
    (X, y, w), times = simulate(0), {}

    def report(name: str, seconds: float, means: np.ndarray) -> None:
        ratios = ", ".join(f"{seconds / x:.1f} times {name}" for name, x in times.items())
        print(f"{name}: {seconds:.3f} s, RMSE {np.sqrt(np.mean((means - w) ** 2)):.5f}; {ratios}")

    for name, temperature in (("annealed CAVI", nss.annealing), ("plain CAVI", None)):
        guide = nss.PairedGuide(model)
        svi = nss.CAVI(model, guide, temperature=temperature)

        def fit(svi=svi, guide=guide):
            result = svi.run(random.key(0), 300, X, y, tol=1e-3, progress_bar=False)
            return guide.posterior_mean(result.params)["w"]

        seconds = best_time(fit, repeats=2)
        report(name, seconds, np.asarray(fit()))
        times[name] = seconds
    try:
        from sparsevb import svb_fit_linear
    except ImportError:
        print("sparsevb is not installed: no comparison")
        return
    for slab in ("gaussian", "laplace"):
        start = perf_counter()
        fit = svb_fit_linear(X, y, noise_sd=1.0, slab=slab)
        seconds = perf_counter() - start
        report(f"sparsevb, {slab} slab", seconds, fit["mu"] * fit["gamma"])


if __name__ == "__main__":
    main()
