# SPDX-License-Identifier: Apache-2.0
"""Observations of few of the entries of a table: sums over those of each row, or of each column.

What owns entries, rows or columns, is an *owner*; the columns or rows of its entries are the
*others*. Entries are kept in chunks of one owner, which are read in tiles, so every array has the
same shape whatever the lengths of rows are, and memory is bounded by a tile and by the Gram
matrices of a block of owners.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np

import jax
import jax.numpy as jnp

CHUNK = 32
"""Entries of a chunk, at most, and not many more than owners have; the last one is filled up."""

TILE = 2048
"""Chunks that are read at once, at most."""

BLOCK_NUMBERS = 2**22
"""Numbers in the Gram matrices of a block of owners."""


class Entries(NamedTuple):
    """Where the observations are in the table.

    - **rows**, **columns** - of each observation, shape (L,).
    """

    rows: Int[Array, " L"]
    columns: Int[Array, " L"]


class Layout(NamedTuple):
    """The observations of a table of which few entries are observed.

    - **where** - which.
    - **by_rows**, **by_columns** - the entries of each row, and of each column.
    """

    where: Entries
    by_rows: "Side"
    by_columns: "Side"


class Side(NamedTuple):
    """The entries of each owner.

    - **entries** - numbers of the observations, L where a chunk has no more.
    - **others** - the column of each in its row, or the row in its column.
    - **owners** - whose a chunk is; beyond the last owner for the chunks at the end.
    - **first** - first chunk of each block of owners, and the end.
    - **tile** - as many numbers as chunks are read at once.
    """

    entries: Int[Array, "K chunk"]
    others: Int[Array, "K chunk"]
    owners: Int[Array, " K"]
    first: Int[Array, " blocks+1"]
    tile: Int[Array, " tile"]


def layout_of(where: Entries, shape: tuple[int, int], num_features: int) -> Layout:
    """How the entries of a table of N rows and Q columns are laid out.

    :param num_features: M, which tells how many rows or columns a block may have.
    """
    rows, columns = (np.asarray(x) for x in where)
    N, Q = shape
    return Layout(
        Entries(jnp.asarray(rows), jnp.asarray(columns)),
        side_of(rows, columns, N, num_features),
        side_of(columns, rows, Q, num_features),
    )


def side_of(
    owners: Int[np.ndarray, " L"], others: Int[np.ndarray, " L"], number: int, num_features: int
) -> Side:
    """Entries by their owners.

    :param number: of owners.
    """
    size = max(len(owners), 1)
    counts = np.bincount(owners, minlength=number)
    mean = len(owners) / max(int(np.sum(counts > 0)), 1)
    chunk = min(CHUNK, 2 ** round(np.log2(max(mean, 1))))
    chunks = -(-counts // chunk)
    first = np.concatenate([[0], np.cumsum(chunks)])
    # a tile that begins with the last chunk must not end beyond the array
    tile = np.arange(min(TILE, max(first[-1], 1)))
    K = first[-1] + len(tile)
    order = np.argsort(owners, kind="stable")
    mine = owners[order]
    place = np.arange(len(owners)) - (np.cumsum(counts) - counts)[mine]
    entries = np.full((K, chunk), len(owners), np.int32)
    entries[first[mine] + place // chunk, place % chunk] = order
    of_chunk = np.full(K, number, np.int32)
    of_chunk[: first[-1]] = np.repeat(np.arange(number), chunks)
    blocks = -(-number * num_features**2 // BLOCK_NUMBERS)
    block_size = -(-number // blocks)
    starts = np.minimum(np.arange(-(-number // block_size) + 1) * block_size, number)
    at = np.append(others, 0)[np.minimum(entries, size)] if len(owners) else entries
    return Side(
        jnp.asarray(entries),
        jnp.asarray(at.astype(np.int32)),
        jnp.asarray(of_chunk),
        jnp.asarray(first[starts].astype(np.int32)),
        jnp.asarray(tile),
    )


class Sums(NamedTuple):
    """Sums over the entries of each owner of a block, of B owners.

    - **G** - products of the means of the others' features.
    - **c** - sums of their variances, or of what stands in their place.
    - **b** - products of the means with the observations.
    - **yy** - squares of the observations.
    """

    G: Float[Array, "B M M"]
    c: Float[Array, "B K"]
    b: Float[Array, "B M"]
    yy: Float[Array, " B"]


def block_sums(
    side: Side,
    k: Int[Array, ""],
    block_size: int,
    features: tuple[Float[Array, "O M"], Float[Array, "O K"], Float[Array, " O"]],
    Y: Float[Array, " L"],
    relative: Float[Array, " L"],
) -> Sums:
    """The sums of block ``k``.

    :param features: of the others, their means and variances, and the factors of the weights of
        their entries.
    :param Y: the observations.
    :param relative: their weights.
    """
    mean, var, factor = features
    B, M, size = block_size, mean.shape[1], len(side.tile)
    Y, relative = jnp.append(Y, 0), jnp.append(relative, 0)
    first, last = side.first[k], side.first[k + 1]

    def add(t, sums):
        cut = (
            jax.lax.dynamic_slice_in_dim(x, first + t * size, size)
            for x in (side.entries, side.others, side.owners)
        )
        entries, others, owners = cut
        y, z, F = Y[entries], relative[entries] * factor[others], mean[others]
        new = Sums(
            jnp.einsum("tcm,tck->tmk", F * z[..., None], F),
            jnp.einsum("tcm,tc->tm", var[others], z),
            jnp.einsum("tcm,tc->tm", F, z * y),
            jnp.sum(z * y**2, axis=1),
        )
        # chunks of the next block, which the last tile reads, are dropped
        own = owners - k * B
        return jax.tree.map(
            lambda total, x: total.at[own].add(x, mode="drop", indices_are_sorted=True), sums, new
        )

    shapes = (M, M), (var.shape[1],), (M,), ()
    zeros = (jnp.zeros((B, *shape), Y.dtype) for shape in shapes)
    return jax.lax.fori_loop(0, -(-(last - first) // size), add, Sums(*zeros))


def over_blocks(side: Side, number: int, of: Callable[[Any, Any, int], Any]) -> Any:
    """``of`` each block of owners, joined.

    :param of: takes the number of the block, its owners and how many they are. Beyond the last
        owner they are the last again, of which nothing is kept.
    """
    num_blocks = len(side.first) - 1
    size = -(-number // num_blocks)

    def block(k):
        return of(k, jnp.minimum(k * size + np.arange(size), number - 1), size)

    found = jax.lax.map(block, jnp.arange(num_blocks))
    return jax.tree.map(lambda x: x.reshape(num_blocks * size, *x.shape[2:])[:number], found)


def weighted_sums(
    side: Side, number: int, x: Float[Array, "O K"], relative: Float[Array, " L"]
) -> Float[Array, "owners K"]:
    """Sums of ``x`` of the others over the entries of each owner, times the weights of these."""
    nothing, one = x[:, :0], jnp.ones_like(x[:, 0])

    def block(k, _, size):
        return block_sums(side, k, size, (nothing, x, one), relative, relative).c

    return over_blocks(side, number, block)


def at_entries(
    entries: Entries,
    weights: tuple[Float[Array, "Q M"], Float[Array, "Q M"]],
    functions: tuple[Float[Array, "M N"], Float[Array, "M N"]],
) -> tuple[Float[Array, " L"], Float[Array, " L"]]:
    r"""Mean and variance of :math:`\sum_m w_{qm} \phi_m(x_n)` at entries.

    :param weights: their means and variances.
    :param functions: their means and variances.
    """
    (W, W_var), (mean, var) = weights, (x.T for x in functions)

    def one(entry):
        w, phi = W[entry.columns], mean[entry.rows]
        spread = W_var[entry.columns] * (phi**2 + var[entry.rows]) + w**2 * var[entry.rows]
        return jnp.sum(w * phi), jnp.sum(spread)

    return jax.lax.map(one, entries, batch_size=2**15)
