# SPDX-License-Identifier: Apache-2.0
"""Random numbers of several distributions from one call: each takes long to compile."""

from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import lax
import jax.numpy as jnp


def uniform(key: Array, shape: tuple[int, ...], dtype: Any) -> Float[Array, "..."]:
    """Between -1 and 1, without the ends."""
    low = np.nextafter(np.array(-1, dtype), np.array(0, dtype), dtype=dtype)
    return jax.random.uniform(key, shape, dtype, low, 1)


def logistic(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Standard logistic numbers from those of :func:`uniform`."""
    return 2 * jnp.arctanh(u)


def normal(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """Standard normal numbers from those of :func:`uniform`."""
    return np.sqrt(2).astype(u.dtype) * lax.erf_inv(u)


def logistic_and_normal(key: Array, like: Float[Array, "*P"]) -> tuple[Any, Any]:
    """A logistic and a normal number for each entry: for its spike and for its slab."""
    u = uniform(key, (2, *like.shape), like.dtype)
    return logistic(u[0]), normal(u[1])
