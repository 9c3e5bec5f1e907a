# SPDX-License-Identifier: Apache-2.0
"""Weights whose slabs, given inclusion, are mixtures of Gaussians: their quantiles."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import ndtr, ndtri


class SlabMixtures(NamedTuple):
    """Marginals of b weights whose slabs given inclusion are mixtures of S Gaussians.

    - **probs** - inclusion probabilities.
    - **shares** - share of each Gaussian given inclusion; **mean** and **scale** are its moments.
    """

    probs: Float[Array, " b"]
    shares: Float[Array, "S b"]
    mean: Float[Array, "S b"]
    scale: Float[Array, "S b"]


def single(probs: Any, loc: Any, scale: Any) -> SlabMixtures:
    """Return the marginals of b weights with one Gaussian each."""
    return SlabMixtures(probs, jnp.ones_like(loc)[None], loc[None], scale[None])


@jax.jit
def quantiles(
    weights: SlabMixtures, levels: Float[Array, " Q"]
) -> tuple[Float[Array, "Q b"], Float[Array, "Q b"]]:
    """Return quantiles of the weights, exactly 0 inside of their atoms, and of their slabs given
    inclusion."""
    probs, shares, mean, scale = weights
    part = shares > 0
    at = jnp.where(part, -mean / jnp.where(part, scale, 1.0), 0.0)
    below = probs * jnp.sum(shares * ndtr(at), axis=0)
    q, of_slabs = levels[:, None], partial(_icdf, weights)
    return across_atom(q, probs, below, of_slabs), of_slabs(q)


def across_atom(q: Any, probs: Any, below: Any, of_slab: Callable[[Any], Any]) -> Any:
    """Return quantiles of weights, 0 in their atoms, which begin at the probability ``below``."""
    zero = (q >= below) & (q <= below + 1 - probs)
    safe = jnp.where(probs > 0, probs, 1.0)
    # from above, so that level 1 stays 1
    in_slab = jnp.where(q < below, q / safe, 1 - (1 - q) / safe)
    slab = of_slab(jnp.clip(jnp.where(zero, 0.5, in_slab), 0.0, 1.0))
    # rounding must not take quantiles across the atom
    slab = jnp.where(q < below, jnp.minimum(slab, 0.0), jnp.maximum(slab, 0.0))
    return jnp.where(zero, 0.0, slab)


def _icdf(weights: SlabMixtures, q: Float[Array, "Q #b"]) -> Float[Array, "Q b"]:
    """Return quantiles of the slabs, by bisection between quantiles of the Gaussians."""
    _, shares, mean, scale = weights
    if len(shares) == 1:
        return mean + scale * ndtri(q)
    part = shares > 0
    safe = jnp.where(part, scale, 1.0)

    def at_level(q: Any) -> Any:
        ends = mean + safe * ndtri(q)
        low = jnp.min(jnp.where(part, ends, jnp.inf), axis=0)
        high = jnp.max(jnp.where(part, ends, -jnp.inf), axis=0)

        def halve(_, ends):
            low, high = ends
            middle = 0.5 * (low + high)
            is_below = jnp.sum(shares * ndtr((middle - mean) / safe), axis=0) < q
            return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

        low, high = lax.fori_loop(0, jnp.finfo(q.dtype).nmant + 8, halve, (low, high))
        return 0.5 * (low + high)

    return lax.map(at_level, q)
