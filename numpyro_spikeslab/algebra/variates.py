# SPDX-License-Identifier: Apache-2.0
"""Random numbers of several distributions from one call, since each call takes long to compile."""

import math
from typing import Any

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import lax
import jax.numpy as jnp


def uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    """Draw numbers between -1 and 1, without the ends."""
    low = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
    return jax.random.uniform(key, shape, dtype, low, 1)


def logistic(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Transform numbers of :func:`uniform` to standard logistic ones."""
    return 2 * jnp.arctanh(u)


def normal(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Transform numbers of :func:`uniform` to standard normal ones."""
    return np.sqrt(2).astype(u.dtype) * lax.erf_inv(u)


def logistic_and_normal(key: Array, like: Float[Array, "*P"]) -> tuple[Any, Any]:
    """Draw a logistic number for each spike and a normal number for each slab."""
    u = uniform(key, (2, *like.shape), like.dtype)
    return logistic(u[0]), normal(u[1])


def index(u: Float[Array, "*B"], weights: Float[Array, "*B P"]) -> Int[Array, "*B"]:
    """Draw one of P numbers with probabilities proportional to ``weights``.

    Unlike :func:`jax.random.categorical` it needs a single number between 0 and 1. The weights are
    laid out as a square: a row is drawn and then a column, since cumulative sums of all take long.
    """
    size = weights.shape[-1]
    width = math.isqrt(size - 1) + 1
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -size % width)]
    rows = jnp.pad(weights, padding).reshape(*u.shape, -1, width)
    sums = jnp.cumsum(jnp.sum(rows, axis=-1), axis=-1)
    target = u * sums[..., -1]
    row = jnp.minimum(jnp.sum(sums < target[..., None], axis=-1), sums.shape[-1] - 1)
    sums = jnp.take_along_axis(jnp.pad(sums, [(0, 0)] * u.ndim + [(1, 0)]), row[..., None], axis=-1)
    within = jnp.take_along_axis(rows, row[..., None, None], axis=-2)[..., 0, :]
    column = jnp.sum(sums + jnp.cumsum(within, axis=-1) < target[..., None], axis=-1)
    return jnp.minimum(row * width + column, size - 1)
