# SPDX-License-Identifier: Apache-2.0
"""CAVI to convergence against sparsevb (C++), the same data and noise level, in one run.

sparsevb is optional; it needs a Fortran compiler and LAPACK.
"""

import sys
from time import perf_counter

import numpy as np
from timing import best_time, enable_x64, row

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
    (X, y, w), times, errors = simulate(0), {}, {}

    def report(name: str, seconds: float, means: np.ndarray) -> None:
        times[name], errors[name] = seconds, np.sqrt(np.mean((means - w) ** 2))

    for name, temperature in (("`CAVI`", None), ("itself: annealed", nss.annealing)):
        guide = nss.PairedGuide(model)
        svi = nss.CAVI(model, guide, temperature=temperature)

        def fit(svi=svi, guide=guide):
            result = svi.run(random.key(0), 300, X, y, progress_bar=False)
            return guide.posterior_mean(result.params)["w"]

        report(name, best_time(fit, repeats=2), np.asarray(fit()))
    try:
        from sparsevb import svb_fit_linear
    except ImportError:
        print("sparsevb is not installed: no comparison", file=sys.stderr)
    else:
        start = perf_counter()
        fit = svb_fit_linear(X, y, noise_sd=1.0, slab="gaussian")
        report("sparsevb (C++)", perf_counter() - start, fit["mu"] * fit["gamma"])
    problem, (ours, *others) = f"{NUM_OBS} x {NUM_FEATURES}, {NUM_ACTIVE} effects", times
    for name in others:
        for what, x in (("seconds to convergence", times), ("RMSE of the means", errors)):
            row(problem, what, x[ours], name, x[name], x[name] / x[ours])


if __name__ == "__main__":
    main()
