# SPDX-License-Identifier: Apache-2.0
"""Draws for Geweke's test: from the joint density, and where steps from there end."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax import random

from numpyro import handlers

SIZE = 20_000

Draws = dict[str, np.ndarray]


def before_and_after(
    kernel: Any,
    model: Callable,
    args: tuple,
    own: tuple[str, ...],
    weights: str,
    num_steps: int = 5,
    *,
    one_by_one: bool = False,
) -> tuple[Draws, Draws]:
    """Draws of all sites and of the data ``Y``, and what steps of a kernel make of the sites.

    :param args: of the model, but for ``Y``, which is its last.
    :param own: the sites of the kernel.
    :param weights: name of the weights, a deterministic site.
    :param one_by_one: for kernels that :func:`jax.vmap` makes slow.
    :return: both of shape (20,000, ...), flattened, under the names of the sites.
    """

    def draw(key):
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args)
        return {name: trace[name]["value"] for name in (*own, weights, "Y")}

    def steps(key, before):
        every = *args, before["Y"]
        state = kernel.init(key, 0, {name: before[name] for name in own}, every, {})
        state = jax.lax.fori_loop(
            0, num_steps, lambda _, state: kernel.sample(state, every, {}), state
        )
        return kernel.postprocess_fn(every, {})(state.z)

    keys = random.split(random.key(0), (2, SIZE))
    before = jax.jit(jax.vmap(draw))(keys[0])
    mapped = (lambda *x: jax.lax.map(lambda y: steps(*y), x)) if one_by_one else jax.vmap(steps)
    after = jax.jit(mapped)(keys[1], before)
    z, new = (
        {name: np.asarray(x, float).reshape(SIZE, -1) for name, x in found.items()}
        for found in (before, after)
    )
    return z, new | {"Y": z["Y"]}
