# SPDX-License-Identifier: Apache-2.0
"""Memory throughput of a paired mean field sweep against that of a plain sum, in one run.

A sweep must read the design once; a plain sum over an array larger than the caches shows how fast
this machine reads. Run: ``python tests/benchmarks/bench_sweep.py``.
"""

from timing import best_time, enable_x64

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.pairs import Prior, block_design

SHAPES = ((1000, 5000), (2000, 20000))


def sum_throughput(size: int = 50_000_000) -> float:
    """Bytes per second of a plain sum."""
    x = random.normal(random.key(0), (size,))
    return x.nbytes / best_time(jax.jit(jnp.sum), x)


def sweep_throughput(num_obs: int, num_features: int) -> float:
    """Bytes of the design per second of a sweep."""
    rows = random.normal(random.key(1), (num_features, num_obs))
    residual = random.normal(random.key(2), (num_obs,))
    design = jax.jit(block_design)(rows, jnp.ones(num_obs))
    prior = Prior(jnp.full(num_features, -5.0), jnp.ones(num_features))
    zeros = jnp.zeros(num_features)
    posterior = PairedMeanField(zeros, zeros, zeros + 1.0)

    @jax.jit
    def sweep(posterior, design, residual):
        return posterior.sweep(design, residual, 1.0, prior, 1.0)

    return rows.nbytes / best_time(sweep, posterior, design, residual)


def main() -> None:
    enable_x64()
    read = sum_throughput()
    print(f"plain sum: {read / 1e9:.1f} GB/s")
    for num_obs, num_features in SHAPES:
        swept = sweep_throughput(num_obs, num_features)
        print(
            f"sweep at (N, P) = ({num_obs}, {num_features}): {swept / 1e9:.1f} GB/s, "
            f"ratio {swept / read:.2f} (wanted: at least 0.60)"
        )


if __name__ == "__main__":
    main()
