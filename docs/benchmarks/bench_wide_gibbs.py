# SPDX-License-Identifier: Apache-2.0
"""A step of PairedGibbs with 100,000 columns, and four chains that start apart.

500 rows; blocks of twenty columns with a correlation of 0.9; ten effects, with signals that leave
open which column of a block carries them. Prints the processor time of a step, the peak of memory
and the largest difference of inclusion probabilities between chains of so many steps.
Run: ``python docs/benchmarks/bench_wide_gibbs.py`` (``--help`` names its options).
"""

import argparse
import resource
import time

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss

BLOCK, CORRELATION, NUM_ROWS, NUM_EFFECTS = 20, 0.9, 500, 10


def data(size, shuffled):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((NUM_ROWS, size), dtype=np.float32)
    X *= np.float32(np.sqrt(1 - CORRELATION))
    for k in range(BLOCK):
        common = np.random.default_rng(1).standard_normal(
            (NUM_ROWS, size // BLOCK), dtype=np.float32
        )
        X[:, k::BLOCK] += np.float32(np.sqrt(CORRELATION)) * common
    if shuffled:
        X = X[:, rng.permutation(size)]
    which = rng.choice(size, NUM_EFFECTS, replace=False)
    effects = rng.choice([-1, 1], NUM_EFFECTS) * rng.uniform(0.3, 1.0, NUM_EFFECTS)
    y = X[:, which] @ effects + rng.normal(size=NUM_ROWS)
    return jnp.asarray(X), jnp.asarray(y, jnp.float32), which


def model(X, y=None):
    size = X.shape[1]
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    pi = numpyro.sample("pi", dist.Beta(1.0, size / NUM_EFFECTS))
    with numpyro.plate("feature", size):
        w = nss.spike_slab("w", pi)
    with numpyro.plate("obs", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def starts(X, which):
    """No column; a wrong neighbour of each effect; the columns; sixty columns by chance."""
    rng, zero = np.random.default_rng(2), np.zeros(X.shape[1], int)
    alike = np.abs(np.asarray(X)[:, which].T @ np.asarray(X))
    wrong = np.argsort(alike, axis=1)[:, -BLOCK // 2]
    for columns in ([], wrong, which, rng.choice(X.shape[1], 60, replace=False)):
        spikes = zero.copy()
        spikes[columns] = 1
        yield {"w_spike": jnp.asarray(spikes), "sigma": jnp.ones(()), "pi": jnp.array(1e-4)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--columns", type=int, default=100_000)
    parser.add_argument("--shuffled", action="store_true")
    options = parser.parse_args()
    X, y, which = data(options.columns, options.shuffled)
    kernel, args = nss.PairedGibbs(model), (X, y)

    @jax.jit
    def run(state, number, args):
        # arrays that are no arguments would be copied into the compiled code, again and again
        def step(_, carry):
            state, *totals = carry
            state = kernel.sample(state, args, {})
            new = state.inclusion_probabilities["w"], state.z["w_spike"].astype(float)
            return state, *(total + x for total, x in zip(totals, new, strict=True))

        zero = jnp.zeros(X.shape[1])
        return jax.lax.fori_loop(0, number, step, (state, zero, zero))

    means, spikes, seconds = [], [], []
    # the first quarter is the warm-up
    number = options.steps - options.steps // 4
    for k, start in enumerate(list(starts(X, which))[: options.chains]):
        state = kernel.init(random.key(k), 0, start, args, {})
        jax.block_until_ready(run(state, 0, args))
        begin = time.process_time()
        state, *_ = run(state, options.steps // 4, args)
        _, *totals = jax.block_until_ready(run(state, number, args))
        seconds.append(time.process_time() - begin)
        for x, total in zip((means, spikes), totals, strict=True):
            x.append(np.asarray(total) / number)
        print(f"chain {k}: {1e3 * seconds[-1] / options.steps:.1f} ms of processor time a step")
    for name, x in (("inclusion probabilities", means), ("means of spikes", spikes)):
        print(f"{name}: largest difference {np.max(np.ptp(x, axis=0)):.3f} between chains")
    undecided = np.mean(means, axis=0)
    print(f"{np.sum((undecided > 0.05) & (undecided < 0.95))} columns are undecided")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{np.mean(seconds) / options.steps * 1e3:.1f} ms a step, peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
