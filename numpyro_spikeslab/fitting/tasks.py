# SPDX-License-Identifier: Apache-2.0
"""Weights of Q tasks that share M features: updates from Gram matrices and residuals, and from
the entries of a sparse table."""

from typing import Any

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import Expectation, PairedMeanField
from numpyro_spikeslab.algebra.observations import Grid, Sparse
from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.algebra.task_sweeps import TaskSums, masked_sweep, task_sweep
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.view import View

# Gram matrices of all tasks are kept up to this many numbers; above, tiles of tasks recompute them.
GRAM_LIMIT = 2**25

Rows = Float[Array, "M N"]
"""Means or variances of the features."""


def keeps_products(form: Form) -> bool:
    """Whether tasks share a Gram matrix, or have matrices of few numbers."""
    number = 1 if form.complete else form.num_tasks
    return number == 1 or number * form.num_features**2 <= GRAM_LIMIT


def gram(at: View, mean: Rows, var: Rows) -> TaskSums:
    """Compute the sufficient statistics of the weights."""
    return TaskSums.of(at.Y, at.relative, mean, var)


def update_weights(
    at: View, stats: TaskSums, weights: PairedMeanField, temperature: Any = 1.0
) -> PairedMeanField:
    """Make one pass over the features of ``q(w_qm, s_qm)``, all tasks at once (eq. 7)."""
    update = Expectation(temperature)
    return task_sweep(stats, weights.mean, 1 / at.sigma2, at.prior, update)


def squared_errors(stats: TaskSums, weights: Any) -> Float[Array, " Q"]:
    """Compute the expected sum of squared residuals of each task."""
    W, squares = weights.mean, jnp.diagonal(stats.G, axis1=1, axis2=2)
    if stats.G.shape[0] == 1:
        fit = jnp.sum((W @ stats.G[0]) * W, axis=1)
    else:
        fit = jnp.einsum("qm,qmk,qk->q", W, stats.G, W)
    spread = jnp.sum(weights.product_variance(squares, stats.c), axis=1)
    return stats.yy - 2 * jnp.sum(W * stats.b, axis=1) + fit + spread


def sweep_weights(
    at: View,
    mean: Rows,
    var: Rows,
    stats: TaskSums | None,
    weights: PairedMeanField,
    temperature: Any,
) -> tuple[PairedMeanField, Float[Array, " Q"]]:
    """Make one pass over the weights; return expected squared residuals of each task too."""
    if stats is None:
        current = weights.mean, 1 / at.sigma2, at.prior, Expectation(temperature)
        # only the means of the old factors are read, so the new factors take their memory
        return masked_sweep((mean, var, at.Y, at.relative), *current, into=weights)
    weights = update_weights(at, stats, weights, temperature)
    return weights, squared_errors(stats, weights)


def explained(at: View, squares: Float[Array, "#Q M"], weights: Any) -> Float[Array, " M"]:
    """Compute the power of each feature relative to the noise from its sums of squares."""
    return jnp.sum(weights.mean**2 * squares / at.sigma2[:, None], axis=0)


def squares_left(at: View, mean: Rows, var: Rows, weights: Any) -> Float[Array, " Q"]:
    """Compute :func:`squared_errors` in O(NQM), where a Gram matrix takes O(NQM^2)."""
    spread = weights.product_variance(*(at.over_points(x).T for x in (mean**2, var)))
    return at.squares(at.residual(weights.mean, mean)) + jnp.sum(spread, axis=1)


# Entries of a table that is never made dense

# Passes over the features of a row or a column, whose products are computed once.
PASSES = 3


def update_functions(at: View, mean: Rows, weights: Any) -> tuple[Rows, Rows]:
    """Update white functions row by row (supplement, 1.3); return means, likelihood precisions."""
    assert isinstance(at.layout, Sparse)
    M, N = mean.shape
    features = weights.mean, weights.variance, 1 / at.sigma2

    def block(sums, rows):
        squares = jnp.diagonal(sums.G, axis1=1, axis2=2)
        alpha = squares + sums.c

        def visit(j, phi):
            m = j % M
            h = sums.b[:, m] - jnp.sum(sums.G[:, m] * phi, axis=1) + squares[:, m] * phi[:, m]
            return phi.at[:, m].set(h / (1 + alpha[:, m]))

        return jax.lax.fori_loop(0, PASSES * M, visit, mean.T[rows]), alpha

    phi, alpha = over_blocks(at.layout.by_rows, N, features, at.Y, at.relative, block)
    return phi.T, alpha.T


def over_columns(at: View, mean: Rows, var: Rows, of: Any) -> Any:
    """Apply ``of`` to the view, the statistics and the numbers of each block of columns."""
    assert isinstance(at.layout, Sparse)
    features = mean.T, var.T, jnp.ones_like(mean[0])

    def block(sums, columns):
        # all columns may have one row of the prior
        prior = jax.tree.map(lambda x: x[columns % len(x)], at.prior)
        of_block = at._replace(sigma2=at.sigma2[columns], prior=prior)
        return of(of_block, sums, columns)

    side = at.layout.by_columns
    return over_blocks(side, at.sigma2.size, features, at.Y, at.relative, block)


def update_columns(
    at: View, mean: Rows, var: Rows, weights: Any, temperature: Any
) -> tuple[Any, Float[Array, " Q"]]:
    """Update the weights of each column (eq. 7), and return the expected squared residuals, too."""

    def of(block, stats, columns):
        def visit(_, weights):
            return update_weights(block, stats, weights, temperature)

        start = jax.tree.map(lambda x: x[columns], weights)
        new = jax.lax.fori_loop(0, PASSES, visit, start)
        return new, squared_errors(stats, new)

    return over_columns(at, mean, var, of)


def ridge_of_entries(at: View, mean: Rows, var: Rows) -> Float[Array, "M Q"]:
    """Compute ridge estimates of the weights, given functions."""

    def of(block, stats, _):
        extra = stats.c + block.sigma2[:, None] / block.prior.variance
        precision = stats.G + extra[..., None] * jnp.eye(len(mean), dtype=extra.dtype)
        return jnp.linalg.solve(precision, stats.b[..., None])[..., 0]

    return over_columns(at, mean, var, of).T


def left_with(at: View, mean: Rows, weights: Any) -> Float[Array, "M Q"]:
    """Compute products of each function with the weighted residuals of the tasks."""
    if isinstance(at.layout, Grid):
        return mean @ (at.relative * at.residual(weights.mean, mean))

    def of(_, stats, columns):
        return stats.b - jnp.einsum("qmk,qk->qm", stats.G, weights.mean[columns])

    return over_columns(at, mean, jnp.zeros_like(mean), of).T
