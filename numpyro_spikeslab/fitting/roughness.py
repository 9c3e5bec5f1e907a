# SPDX-License-Identifier: Apache-2.0
"""What orders latent functions by smoothness: ``phi^T roughness(phi)``, a Laplacian of inputs."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Array, Float, Int

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_spikeslab.reading.program import RUN_ONCE

Roughness = Callable[[Float[Array, "M N"]], Float[Array, "M N"]]

# Inputs beyond which a matrix of their similarities would be too large.
MAX_GRAPH = 4000


def apply_matrix(L: Float[Array, "N N"], phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return phi @ L


def apply_path(order: Int[Array, " N"], phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Laplacian of the path through the inputs in order."""
    steps = jnp.diff(phi[:, order], axis=1)
    steps = jnp.pad(steps, ((0, 0), (1, 1)))
    return jnp.zeros_like(phi).at[:, order].set(steps[:, :-1] - steps[:, 1:])


def no_roughness(phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """For functions without order, such as those of a white process."""
    return jnp.zeros_like(phi)


def roughness_of_inputs(X: Float[Array, " N"] | Float[Array, "N D"]) -> Roughness:
    """Graph Laplacian of inputs, with similarities as wide as the distance of neighbours.

    Beyond :data:`MAX_GRAPH` inputs it is that of the path through inputs of one dimension, and
    for those of more there is no order.
    """
    X = jnp.asarray(X, float)
    one_axis = X.ndim == 1 or X.shape[1] == 1
    if X.shape[0] <= MAX_GRAPH:
        return Partial(apply_matrix, _laplacian_of(X))
    return Partial(apply_path, jnp.argsort(X.ravel())) if one_axis else Partial(no_roughness)


@partial(jax.jit, compiler_options=RUN_ONCE)
def _laplacian_of(X: Float[Array, " N"] | Float[Array, "N D"]) -> Float[Array, "N N"]:
    """``phi^T L phi`` is then half the sum of ``similarity_ij (phi_i - phi_j)^2``."""
    X = jnp.reshape(X, (X.shape[0], -1))
    X = X - jnp.mean(X, axis=0)
    norms = jnp.sum(X**2, axis=1)
    # as a product, for the differences of all inputs need D times the memory
    squared = jnp.maximum(norms[:, None] + norms - 2 * X @ X.T, 0)
    apart = squared > 1e-6 * jnp.max(squared) / X.shape[0] ** 2
    nearest = jnp.min(jnp.where(apart, squared, jnp.inf), axis=1)
    similarity = jnp.exp(-0.5 * squared / jnp.median(nearest))
    return jnp.diag(jnp.sum(similarity, axis=1)) - similarity
