# SPDX-License-Identifier: Apache-2.0
"""Weights of Q tasks that share M features: updates from Gram matrices and residuals, and from
the entries of a sparse table."""

from typing import Any

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.observations import Grid, Sparse
from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.reading.view import View

Rows = Float[Array, "M N"]
"""Means or variances of the features."""


def explained(at: View, squares: Float[Array, "#Q M"], weights: Any) -> Float[Array, " M"]:
    """Compute the power of each feature relative to the noise from its sums of squares."""
    return jnp.sum(weights.mean**2 * squares / at.sigma2[:, None], axis=0)


def squares_left(at: View, mean: Rows, var: Rows, weights: Any) -> Float[Array, " Q"]:
    """Compute :meth:`TaskSums.squares` in O(NQM), where a Gram matrix takes O(NQM^2)."""
    spread = weights.product_variance(*(at.over_points(x).T for x in (mean**2, var)))
    return at.squares(at.residual(weights.mean, mean)) + jnp.sum(spread, axis=1)


# Entries of a table that is never made dense

# Passes over the features of a row, whose products are computed once.
PASSES = 3


def update_functions(at: View, mean: Rows, weights: Any) -> tuple[Rows, Rows]:
    """Update white functions row by row (supplement, 1.3); return means, likelihood precisions."""
    assert isinstance(at.layout, Sparse)
    M, N = mean.shape
    features = weights.mean, weights.variance, 1 / at.sigma2

    def block(sums, phi):
        squares = jnp.diagonal(sums.G, axis1=1, axis2=2)
        alpha = squares + sums.c

        def visit(j, phi):
            m = j % M
            h = sums.b[:, m] - jnp.sum(sums.G[:, m] * phi, axis=1) + squares[:, m] * phi[:, m]
            return phi.at[:, m].set(h / (1 + alpha[:, m]))

        return jax.lax.fori_loop(0, PASSES * M, visit, phi), alpha

    data = at.Y, at.relative
    phi, alpha = over_blocks(at.layout.by_rows, N, features, data, block, mean.T)
    return phi.T, alpha.T


def ridge_of_entries(at: View, mean: Rows, var: Rows) -> Float[Array, "M Q"]:
    """Compute ridge estimates of the weights, given functions."""
    assert isinstance(at.layout, Sparse)

    def of(sums, sigma2, variance):
        extra = sums.c + sigma2[:, None] / variance
        precision = sums.G + extra[..., None] * jnp.eye(len(mean), dtype=extra.dtype)
        return jnp.linalg.solve(precision, sums.b[..., None])[..., 0]

    data, own = (at.Y, at.relative), (at.sigma2, at.prior.variance)
    return at.layout.over_columns(data, (mean, var), of, *own).T


def left_with(at: View, mean: Rows, weights: Any) -> Float[Array, "M Q"]:
    """Compute products of each function with the weighted residuals of the tasks."""
    if isinstance(at.layout, Grid):
        return mean @ (at.relative * at.residual(weights.mean, mean))

    def of(sums, W):
        return sums.b - jnp.einsum("qmk,qk->qm", sums.G, W)

    return at.layout.over_columns((at.Y, at.relative), (mean, None), of, weights.mean).T
