# SPDX-License-Identifier: Apache-2.0
"""Observations of few of the entries of a table: sums over those of each row, or of each column.

What owns entries, rows or columns, is an *owner*; the columns or rows of its entries are the
*others*. Entries are kept in chunks of one owner, which are read in tiles, so every array has the
same shape whatever the lengths of rows are, and memory is bounded by a tile and by the Gram
matrices of a block of owners.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Shaped
import numpy as np

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
    """The entries of each owner, in tiles of chunks.

    Owners are dealt to the devices in turn, and those of a device are in blocks of as many.

    - **entries** - numbers of the observations, L where a chunk has no more.
    - **others** - the column of each in its row, or the row in its column.
    - **owners** - whose a chunk is, as places in the block; beyond the block where it is nobody's.
    - **first** - first tile of each block, and the end.
    """

    entries: Int[Array, "T devices tile chunk"]
    others: Int[Array, "T devices tile chunk"]
    owners: Int[Array, "T devices tile"]
    first: Int[Array, " blocks+1"]


def layout_of(
    where: Entries, shape: tuple[int, int], num_features: int, mesh: Mesh | None = None
) -> Layout:
    """How the entries of a table of N rows and Q columns are laid out.

    :param num_features: M, which tells how many rows or columns a block may have.
    :param mesh: of the devices that share them, `None` for one.
    """
    rows, columns = (np.asarray(x) for x in where)
    N, Q = shape
    devices = 1 if mesh is None else mesh.size
    layout = Layout(
        Entries(jnp.asarray(rows), jnp.asarray(columns)),
        side_of(rows, columns, N, num_features, devices),
        side_of(columns, rows, Q, num_features, devices),
    )
    if mesh is None:
        return layout

    def place(x):
        shared = PartitionSpec(None, mesh.axis_names) if x.ndim > 1 else PartitionSpec()
        return jax.device_put(np.asarray(x), NamedSharding(mesh, shared))

    return jax.tree.map(place, layout)


def side_of(
    owners: Int[np.ndarray, " L"],
    others: Int[np.ndarray, " L"],
    number: int,
    num_features: int,
    devices: int = 1,
) -> Side:
    """Entries by their owners.

    :param number: of owners.
    """
    L, each = len(owners), -(-number // devices)
    size = -(-each // -(-each * num_features**2 // BLOCK_NUMBERS))
    blocks = -(-each // size)
    # parts are the blocks of one device after the other
    position = owners % devices * (blocks * size) + owners // devices
    order = np.argsort(position, kind="stable")
    position, others = position[order], others[order]
    counts = np.unique(position, return_counts=True)[1]
    chunk = min(CHUNK, 2 ** round(np.log2(np.mean(counts)))) if L else 1
    k = np.arange(L) - np.repeat(np.cumsum(counts) - counts, counts)
    begins, part = k % chunk == 0, position // size
    of_part = np.bincount(part[begins], minlength=devices * blocks)
    number_in_part = np.cumsum(begins) - 1 - (np.cumsum(of_part) - of_part)[part]
    tile = min(TILE, max(int(np.max(of_part)), 1))
    # a block begins with a tile, on all devices at once
    tiles = -(-of_part.reshape(devices, blocks) // tile)
    first = np.append(0, np.cumsum(np.max(tiles, axis=0)))
    t, c = np.divmod(number_in_part, tile)
    at = first[part % blocks] + t, part // blocks, c
    shape = first[-1], devices, tile
    entries, found = np.full((*shape, chunk), L, np.int32), np.zeros((*shape, chunk), np.int32)
    entries[*at, k % chunk], found[*at, k % chunk] = order, others
    whose = np.full(shape, size, np.int32)
    whose[at] = position % size
    return Side(*map(jnp.asarray, (entries, found, whose, first.astype(np.int32))))


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
    """The sums of block ``k`` of every device.

    :param block_size: owners of all of them.
    :param features: of the others, their means and variances, and the factors of the weights of
        their entries.
    :param Y: the observations.
    :param relative: their weights.
    """
    mean, var, factor = features
    M, devices = mean.shape[1], side.owners.shape[1]
    Y, relative = jnp.append(Y, 0), jnp.append(relative, 0)

    @jax.vmap
    def added(own, total, x):
        return total.at[own].add(x, mode="drop", indices_are_sorted=True)

    def add(t, sums):
        entries, others = side.entries[t], side.others[t]
        y, z, F = Y[entries], relative[entries] * factor[others], mean[others]
        new = Sums(
            jnp.einsum("dtcm,dtck->dtmk", F * z[..., None], F),
            jnp.einsum("dtcm,dtc->dtm", var[others], z),
            jnp.einsum("dtcm,dtc->dtm", F, z * y),
            jnp.sum(z * y**2, axis=2),
        )
        return jax.tree.map(partial(added, side.owners[t]), sums, new)

    shapes = (M, M), (var.shape[1],), (M,), ()
    zeros = (jnp.zeros((devices, block_size // devices, *shape), Y.dtype) for shape in shapes)
    sums = jax.lax.fori_loop(side.first[k], side.first[k + 1], add, Sums(*zeros))
    return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), sums)


def over_blocks(
    side: Side,
    number: int,
    features: tuple[Float[Array, "O M"], Float[Array, "O K"], Float[Array, " O"]],
    Y: Float[Array, " L"],
    relative: Float[Array, " L"],
    of: Callable[[Sums, Int[Array, " B"]], Any],
) -> Any:
    """``of`` the sums of each block of owners, joined, on every device.

    :param number: of owners.
    :param features: as for :func:`block_sums`, with what follows.
    :param of: takes the sums and the owners of a block, of all devices. Beyond the last owner they
        are the last again, of which nothing is kept.
    """
    blocks, devices = len(side.first) - 1, side.owners.shape[1]
    each = -(-number // devices)
    size = -(-each // blocks)

    def block(k):
        place = k * size + np.arange(size)
        owners = jnp.minimum(place * devices + np.arange(devices)[:, None], number - 1)
        sums = block_sums(side, k, devices * size, features, Y, relative)
        return of(sums, jnp.ravel(owners))

    def joined(x):
        own = jnp.moveaxis(x.reshape(blocks, devices, size, *x.shape[2:]), 1, 0)
        every = jnp.moveaxis(_everywhere(own), 0, 2)
        return jax.lax.collapse(every, 0, 3)[:number]

    return jax.tree.map(joined, jax.lax.map(block, jnp.arange(blocks)))


def _everywhere(own: Shaped[Array, "devices *K"]) -> Shaped[Array, "devices *K"]:
    """What each device has for all of them: a sum over devices, their one exchange."""
    devices = len(own)
    if devices == 1:
        return own
    mine = np.eye(devices, dtype=bool).reshape(devices, devices, *(1,) * (own.ndim - 1))
    return jnp.sum(jnp.where(mine, own[:, None], 0), axis=0)


def weighted_sums(
    side: Side, number: int, x: Float[Array, "O K"], relative: Float[Array, " L"]
) -> Float[Array, "owners K"]:
    """Sums of ``x`` of the others over the entries of each owner, times the weights of these."""
    nothing, one = x[:, :0], jnp.ones_like(x[:, 0])
    features = nothing, x, one
    return over_blocks(side, number, features, relative, relative, lambda sums, _: sums.c)


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
