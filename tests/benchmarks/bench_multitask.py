# SPDX-License-Identifier: Apache-2.0
"""Time of a sweep of the multi-task model on arrays.

A sweep with dense covariances is bound by its Cholesky decompositions, so it is compared with the
plain decompositions of as many matrices. With quasiseparable covariances its time is linear in N.
Run: ``OPENBLAS_NUM_THREADS=1 python tests/benchmarks/bench_multitask.py``; the matrices are small.
"""

from time import perf_counter, process_time

import numpy as np
from timing import best_time, enable_x64
from tinygp.kernels import quasisep

import jax
from jax import random
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_spikeslab import latent, multitask
from numpyro_spikeslab.datasets import toy_multioutput

CHOLESKYS = 5
"""Of each function in a sweep: one at the scale, three in the search over the
length scale, one for the function itself."""


def squared_exponential(squared_distance, theta):
    return jnp.exp(-0.5 * squared_distance * jnp.exp(-2 * theta[0]))


def matern(x, theta):
    return latent.Quasisep.from_kernel(quasisep.Matern32(jnp.exp(theta[0])), x)


def mixtures(N, Q, M, seed=0):
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 10 * N / 200, N)
    f = np.sin(np.outer(x, 0.5 + np.arange(M)) + rng.uniform(0, 6, M))
    return jnp.asarray(x), f @ rng.normal(size=(M, Q)) + 0.2 * rng.normal(size=(N, Q))


def start(prob, M):
    return multitask.start_random(random.key(0), prob, jnp.zeros((M, 1)))


def sweep_time(prob, state, repeats):
    return best_time(lambda: multitask.run(prob, state, 1), repeats=repeats)


def dense_problem(x, Y, M):
    return multitask.problem(Y, Partial(squared_exponential, (x[:, None] - x) ** 2), M)


def dense(x, Y, M, repeats):
    """Seconds of a sweep and of its Cholesky decompositions."""
    prob = dense_problem(x, Y, M)
    B = jnp.eye(x.size) + squared_exponential((x[:, None] - x) ** 2, jnp.zeros(1))
    cholesky = best_time(jax.jit(jnp.linalg.cholesky), B, repeats=repeats)
    return sweep_time(prob, start(prob, M), repeats), CHOLESKYS * M * cholesky


def main() -> None:
    enable_x64()
    toy = toy_multioutput(0)
    Y = np.where(toy.observed, toy.Y, np.nan)
    for name, case, repeats in (
        ("toy, N=201, Q=12, M=7", (jnp.asarray(toy.X), Y, 7), 10),
        ("N=2000, Q=50, M=5", (*mixtures(2000, 50, 5), 5), 2),
    ):
        sweep, choleskys = dense(*case, repeats)
        print(
            f"{name}: {1e3 * sweep:.1f} ms a sweep, its Choleskys {1e3 * choleskys:.1f} ms, ratio "
            f"{sweep / choleskys:.2f}",
            flush=True,
        )
    prob = dense_problem(jnp.asarray(toy.X), Y, 7)
    roughness = multitask.roughness_of_inputs(jnp.asarray(toy.X))
    for _ in range(2):
        begin = perf_counter(), process_time()
        *_, fit = multitask.stages(prob, start(prob, 7), roughness)
        wall, cpu = perf_counter() - begin[0], process_time() - begin[1]
    print(
        f"toy, one start until no move is accepted: {wall:.1f} s ({cpu:.1f} s of CPU), then "
        f"{int(multitask.is_active(prob, fit.state).sum())} functions are active and a sweep takes "
        f"{1e3 * sweep_time(prob, fit.state, 10):.1f} ms",
        flush=True,
    )
    times, sizes = [], (1_000, 10_000, 100_000)
    for N in sizes:
        x, Y = mixtures(N, 12, 3)
        prob = multitask.problem(Y, Partial(matern, x), 3)
        times.append(sweep_time(prob, start(prob, 3), 2))
        print(f"quasiseparable, N={N}, Q=12, M=3: {1e3 * times[-1]:.1f} ms a sweep", flush=True)
    slope = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    print(f"slope of log time over log N: {slope:.2f} (wanted: about 1)")


if __name__ == "__main__":
    main()
