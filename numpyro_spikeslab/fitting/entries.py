# SPDX-License-Identifier: Apache-2.0
r"""Factor analysis of the observed entries of a table that is never made dense.

Each row of the table has a factor of each of the M functions, which are without order, and each
column its weights. A sweep reads the entries twice: by rows, for the functions, and by columns, for
the weights, in blocks for which it has the products of the other side's features.
"""

from typing import Any

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.fitting.tasks import Gram, left_of, squared_errors, update_weights
from numpyro_spikeslab.reading.view import View

PASSES = 3
"""Over the features of a row or a column, whose products are at hand."""


def update_functions(
    at: View, mean: Float[Array, "M N"], weights: Any
) -> tuple[Float[Array, "M N"], Float[Array, "M N"]]:
    """``q(phi_m)`` of white functions, given the weights, at each row (supplement, 1.3).

    :return: their means, and the precisions of what the entries say of them.
    """
    assert at.layout is not None
    side, (M, N) = at.layout.by_rows, mean.shape
    W = weights.mean
    features = W, weights.slab_moments[1] - W**2, 1 / at.sigma2

    def block(sums, rows):
        own = jnp.diagonal(sums.G, axis1=1, axis2=2)
        alpha = own + sums.c

        def visit(j, phi):
            m = j % M
            h = sums.b[:, m] - jnp.sum(sums.G[:, m] * phi, axis=1) + own[:, m] * phi[:, m]
            return phi.at[:, m].set(h / (1 + alpha[:, m]))

        return jax.lax.fori_loop(0, PASSES * M, visit, mean.T[rows]), alpha

    found, alpha = over_blocks(side, N, features, at.Y, at.relative, block)
    return found.T, alpha.T


def over_columns(at: View, mean: Float[Array, "M N"], var: Float[Array, "M N"], of: Any) -> Any:
    """``of`` the view and the statistics of blocks of columns, and of their numbers."""
    assert at.layout is not None
    features = mean.T, var.T, jnp.ones_like(mean[0])

    def block(sums, columns):
        prior = at.prior
        if len(prior.variance) > 1:
            prior = Prior(*(x[columns] for x in prior))
        own = at._replace(sigma2=at.sigma2[columns], prior=prior)
        return of(own, Gram(*sums), columns)

    side, number = at.layout.by_columns, at.sigma2.size
    return over_blocks(side, number, features, at.Y, at.relative, block)


def update_columns(
    at: View,
    mean: Float[Array, "M N"],
    var: Float[Array, "M N"],
    weights: Any,
    temperature: Any,
) -> tuple[Any, Float[Array, " Q"]]:
    """The weights of each column (eq. 7), and the expected squares of what they leave."""

    def of(own, stats, columns):
        new = jax.lax.fori_loop(
            0,
            PASSES,
            lambda _, w: update_weights(own, stats, w, temperature),
            jax.tree.map(lambda x: x[columns], weights),
        )
        return new, squared_errors(stats, new)

    return over_columns(at, mean, var, of)


def ridge(at: View, mean: Float[Array, "M N"], var: Float[Array, "M N"]) -> Float[Array, "M Q"]:
    """Weights without spikes, given functions."""

    def of(own, stats, _):
        extra = stats.c + own.sigma2[:, None] / own.prior.variance
        precision = stats.G + extra[..., None] * jnp.eye(len(mean), dtype=extra.dtype)
        return jnp.linalg.solve(precision, stats.b[..., None])[..., 0]

    return over_columns(at, mean, var, of).T


def left_with(at: View, mean: Float[Array, "M N"], weights: Any) -> Float[Array, "M Q"]:
    """Products of each function with what all functions leave of the tasks."""
    if at.layout is None:
        return mean @ left_of(at, mean, weights)

    def of(_, stats, columns):
        return stats.b - jnp.einsum("qmk,qk->qm", stats.G, weights.mean[columns])

    return over_columns(at, mean, jnp.zeros_like(mean), of).T
