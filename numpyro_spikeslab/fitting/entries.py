# SPDX-License-Identifier: Apache-2.0
r"""Factor analysis of the observed entries of a table that is never made dense.

Each row of the table has a factor for each of the M functions, which are without order, and each
column its weights. A sweep reads the entries twice: by rows, for the functions, and by columns, for
the weights, in blocks that have the products of the other side's features (``algebra/entries.py``).
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.entries import Entries, Side, at_entries, block_sums, side_of
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.fitting.tasks import Gram, squared_errors, update_weights
from numpyro_spikeslab.reading.program import fetched
from numpyro_spikeslab.reading.view import View

PASSES = 3
"""Over the features of a row or a column, whose products are at hand."""


class Sides(NamedTuple):
    """The entries by rows and by columns."""

    rows: Side
    columns: Side


def sides_of(entries: Entries, shape: tuple[int, int], num_features: int) -> Sides:
    """The entries of a table of N rows and Q columns, on both sides."""
    rows, columns = fetched(entries)
    N, Q = shape
    return Sides(
        side_of(rows, columns, N, num_features),
        side_of(columns, rows, Q, num_features),
    )


class RowFactors(NamedTuple):
    """The functions at all rows: means, and the precisions of what the entries say."""

    mean: Float[Array, "M N"]
    alpha: Float[Array, "M N"]


def update_functions(
    at: View, side: Side, mean: Float[Array, "M N"], weights: Any
) -> RowFactors:
    """``q(phi_m)`` of white functions, given the weights, at each row (supplement, 1.3)."""
    M, N = mean.shape
    B = _block_size(side, N)
    W = weights.mean
    features = W, weights.slab_moments[1] - W**2, 1 / at.sigma2

    def block(k):
        sums = block_sums(side, k, B, features, at.Y, at.relative)
        own = jnp.diagonal(sums.G, axis1=1, axis2=2)
        alpha = own + sums.c

        def visit(j, phi):
            m = j % M
            h = sums.b[:, m] - jnp.sum(sums.G[:, m] * phi, axis=1) + own[:, m] * phi[:, m]
            return phi.at[:, m].set(h / (1 + alpha[:, m]))

        return jax.lax.fori_loop(0, PASSES * M, visit, mean.T[_ids(k, B, N)]), alpha

    found = jax.lax.map(block, jnp.arange(len(side.first) - 1))
    return RowFactors(*(x.reshape(-1, M)[:N].T for x in found))


def update_columns(
    at: View,
    side: Side,
    functions: tuple[Float[Array, "M N"], Float[Array, "M N"]],
    weights: Any,
    temperature: Any,
) -> tuple[Any, Float[Array, " Q"]]:
    """The weights of each column (eq. 7), and the expected squares of what they leave.

    :param functions: their means and variances.
    """
    Q, M = weights.probs.shape
    B = _block_size(side, Q)
    mean, var = (x.T for x in functions)
    features = mean, var, jnp.ones_like(mean[:, 0])

    def block(k):
        ids = _ids(k, B, Q)
        stats = Gram(*block_sums(side, k, B, features, at.Y, at.relative))
        own = at._replace(sigma2=at.sigma2[ids], prior=Prior(*(x[ids] for x in at.prior)))
        new = jax.lax.fori_loop(
            0,
            PASSES,
            lambda _, w: update_weights(own, stats, w, temperature),
            jax.tree.map(lambda x: x[ids], weights),
        )
        return new, squared_errors(own, stats, new)

    found = jax.lax.map(block, jnp.arange(len(side.first) - 1))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:Q], found)


def squares_at(at: View, entries: Entries, functions: Any, weights: Any) -> Float[Array, " Q"]:
    """Expected sum of squares of what each column leaves, entry by entry."""
    second = weights.slab_moments[1]
    known = at_entries(entries, (weights.mean, second), (functions.mean, functions.var))
    fit, spread = jax.lax.stop_gradient(known)
    squares = at.relative * ((at.Y - fit) ** 2 + spread)
    return jnp.zeros_like(at.sigma2).at[entries.columns].add(squares)


def _block_size(side: Side, number: int) -> int:
    return -(-number // (len(side.first) - 1))


def _ids(k: Any, size: int, number: int) -> Any:
    """Owners of block ``k``; beyond the last the last again, of which nothing is kept."""
    return jnp.minimum(k * size + np.arange(size), number - 1)
