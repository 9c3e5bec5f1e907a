# SPDX-License-Identifier: Apache-2.0
"""Steps on batches of blocks of a noisy image, against an ordinary fit of all blocks.

The overlapping blocks of 8 x 8 pixels of a part of a photograph that comes with scikit-learn, their
means subtracted. Batches start at an ordinary fit of a fifth of the blocks; then every block is
seen ten times. Bounds are those of all blocks, with weights settled for the functions as they are.
Run: ``python docs/benchmarks/bench_batches.py``.
"""

from time import perf_counter
from typing import Any

import numpy as np
from sklearn.datasets import load_sample_image

import jax

import numpyro.distributions as dist

import numpyro_spikeslab as nss

SIZE, NUM_FUNCTIONS, NUM_STEPS = 8, 32, 60
START, BATCH, VISITS = 1000, 250, 10


def noisy_blocks(rng: np.random.Generator, noise: float = 25.0) -> np.ndarray:
    """Shape (pixels, blocks), in random order."""
    image = load_sample_image("flower.jpg")[75:155, 170:250].mean(axis=2)
    image = image + noise * rng.normal(size=image.shape)
    windows = np.lib.stride_tricks.sliding_window_view(image, (SIZE, SIZE))
    blocks = windows.reshape(-1, SIZE**2).T
    return rng.permutation(blocks - blocks.mean(axis=0), axis=1).astype(np.float32)


def main() -> None:
    rng = np.random.default_rng(0)
    Y = noisy_blocks(rng)
    X, Q = np.arange(len(Y)), Y.shape[1]
    model = nss.models.mtmkl(
        ["white"] * NUM_FUNCTIONS,
        shared_noise=True,
        priors=dict.fromkeys(("noise", "slab_scale"), dist.HalfNormal(100.0)),
    )
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_tasks=Q)
    whole = nss.CAVI(model, guide, num_tasks=Q, learning_rate=lambda step: 0.0)
    key = jax.random.key(0)
    began = perf_counter()
    best = float(nss.CAVI(model, guide).run(key, NUM_STEPS, X, Y, progress_bar=False).losses[-1])
    print(f"all {Q} blocks: negative bound {best:.0f}, {perf_counter() - began:.1f} s", flush=True)

    def report(what: str, state: Any) -> None:
        loss = float(whole.evaluate(state, X, Y))
        seconds = perf_counter() - began
        print(f"{what}: {loss - best:.0f} nats, {(loss - best) / best:.2%} above; {seconds:.1f} s")

    began = perf_counter()
    state = svi.run(key, NUM_STEPS, X, Y[:, :START], progress_bar=False).state
    report(f"functions of {START} blocks", state)
    update = jax.jit(svi.update)
    for visit in range(1, VISITS + 1):
        order = rng.permutation(Q)
        for first in range(0, Q - BATCH + 1, BATCH):
            state = update(state, X, Y[:, order[first : first + BATCH]])[0]
        if visit in (1, 3, 5, 10):
            report(f"each block seen up to {visit} times", state)


if __name__ == "__main__":
    main()
