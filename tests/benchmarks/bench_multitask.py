# SPDX-License-Identifier: Apache-2.0
"""Time of a sweep of the multi-task model, and of a whole fit.

A sweep with dense covariances is bound by its Cholesky decompositions, so it is compared with the
plain decompositions of as many matrices. With quasiseparable covariances its time is linear in N.
Run: ``OPENBLAS_NUM_THREADS=1 python tests/benchmarks/bench_multitask.py``; the matrices are small.
"""

from time import perf_counter, process_time

import numpy as np
from timing import before_first_step, best_time, enable_x64
from tinygp.kernels import ExpSquared, quasisep

import jax
from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.datasets import toy_multioutput
from numpyro_spikeslab.fitting.ascent import advance

CHOLESKYS = 5
"""Of each function in a sweep that searches: one at the scale, three in the search over the
length scale, one for the function itself; two where the search rests."""


def mixtures(N, Q, M, seed=0):
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 10 * N / 200, N)
    f = np.sin(np.outer(x, 0.5 + np.arange(M)) + rng.uniform(0, 6, M))
    return jnp.asarray(x), f @ rng.normal(size=(M, Q)) + 0.2 * rng.normal(size=(N, Q))


def sweep_time(kernel, M, x, Y, repeats):
    """Seconds of a sweep at the start of a fit."""
    model = nss.models.mtmkl(kernel, M)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    call, progress = before_first_step(svi, x, Y)
    return best_time(lambda: advance(call.spec, call.data, progress, 1, -1.0), repeats=repeats)


def dense(x, Y, M, repeats):
    """Seconds of a sweep and of its Cholesky decompositions."""
    B = jnp.eye(x.size) + jnp.exp(-0.5 * (x[:, None] - x) ** 2)
    cholesky = best_time(jax.jit(jnp.linalg.cholesky), B, repeats=repeats)
    return sweep_time(ExpSquared(1.0), M, x, Y, repeats), CHOLESKYS * M * cholesky


def whole_fits(X, Y) -> None:
    """The first fit of a process, and one more."""
    model = nss.models.mtmkl(ExpSquared(1.0), 7)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)
    for name in ("first", "second"):
        begin = perf_counter(), process_time()
        result = svi.run(random.key(0), 150, X, Y, progress_bar=False)
        wall, cpu = perf_counter() - begin[0], process_time() - begin[1]
        used = np.max(guide.inclusion_probabilities(result.params)["W"], axis=0) > 0.5
        print(
            f"toy, {name} fit: {wall:.1f} s ({cpu:.1f} s of CPU), {used.sum()} functions in use, "
            f"bound {-float(result.losses[-1]):.2f}",
            flush=True,
        )


def main() -> None:
    enable_x64()
    toy = toy_multioutput(0)
    X, Y = jnp.asarray(toy.X), np.where(toy.observed, toy.Y, np.nan)
    whole_fits(X, Y)
    for name, case, repeats in (
        ("toy, N=201, Q=12, M=7", (X, Y, 7), 10),
        ("N=2000, Q=50, M=5", (*mixtures(2000, 50, 5), 5), 2),
    ):
        sweep, choleskys = dense(*case, repeats)
        print(
            f"{name}: {1e3 * sweep:.1f} ms a sweep, its Choleskys {1e3 * choleskys:.1f} ms, ratio "
            f"{sweep / choleskys:.2f}",
            flush=True,
        )
    times, sizes = [], (1_000, 10_000, 100_000)
    for N in sizes:
        times.append(sweep_time(quasisep.Matern32(1.0), 3, *mixtures(N, 12, 3), 2))
        print(f"quasiseparable, N={N}, Q=12, M=3: {1e3 * times[-1]:.1f} ms a sweep", flush=True)
    slope = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    print(f"slope of log time over log N: {slope:.2f} (wanted: about 1)")


if __name__ == "__main__":
    main()
