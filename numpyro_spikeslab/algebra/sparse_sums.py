# SPDX-License-Identifier: Apache-2.0
"""Sums over the observed entries of each row, or of each column, of a sparse table.

For sums over rows the row of an entry is its *owner* and the column its *other*, and the reverse
for sums over columns. Entries are stored in chunks of one owner, which are read in tiles. Memory is
bounded by a tile and by the Gram matrices of a block of owners.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Shaped
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.task_sweeps import TaskSums

CHUNK = 32
"""Most entries of a chunk; smaller where owners have few entries."""
TILE = 2048
"""Most chunks that are read at once."""
BLOCK_NUMBERS = 2**22
"""Numbers in the Gram matrices of a block of owners."""

Features = tuple[Float[Array, "O M"], Float[Array, "O K"] | None, Float[Array, " O"]]
"""Means and variances of the others' features, and what multiplies the precisions of each other."""


class Entries(NamedTuple):
    """Row and column of each observation."""

    rows: Int[Array, " L"]
    columns: Int[Array, " L"]


class Side(NamedTuple):
    """Entries of each owner, in tiles of chunks.

    Owners are dealt to the devices in turn, and each device has them in blocks of one size.

    - **entries** - numbers of the observations; L pads a chunk.
    - **others** - the column of each entry of a row, or the row of each entry of a column.
    - **owners** - owner of each chunk, as its row in the sums of the block; the row after the last
      is for padding.
    - **first** - first tile of each block, and the end.
    """

    entries: Int[Array, "T devices tile chunk"]
    others: Int[Array, "T devices tile chunk"]
    owners: Int[Array, "T devices tile"]
    first: Int[Array, " blocks+1"]


def side_of(
    owners: Int[np.ndarray, " L"],
    others: Int[np.ndarray, " L"],
    number: int,
    num_features: int,
    devices: int = 1,
) -> Side:
    """Group entries by their ``number`` owners."""
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
    entries = np.full((*shape, chunk), L, np.int32)
    places = np.zeros((*shape, chunk), np.int32)
    entries[*at, k % chunk], places[*at, k % chunk] = order, others
    chunk_owners = np.full(shape, size, np.int32)
    chunk_owners[at] = position % size
    return Side(*map(jnp.asarray, (entries, places, chunk_owners, first.astype(np.int32))))


def block_sums(
    side: Side,
    k: Int[Array, ""],
    block_size: int,
    features: Features,
    data: tuple[Float[Array, " L"], Float[Array, " L"]],
) -> TaskSums:
    """Sum over block ``k`` of owners of all devices, from moments of the others' features."""
    mean, var, factor = features
    M, devices = mean.shape[1], side.owners.shape[1]
    Y, relative = (jnp.append(x, 0) for x in data)

    @jax.vmap
    def added(own, total, x):
        return total.at[own].add(x, mode="drop", indices_are_sorted=True)

    def add(t, sums):
        entries, others = side.entries[t], side.others[t]
        y, z, F = Y[entries], relative[entries] * factor[others], mean[others]
        new = TaskSums(
            jnp.einsum("dtcm,dtck->dtmk", F * z[..., None], F),
            jnp.einsum("dtcm,dtc->dtm", F, z * y),
            jnp.sum(z * y**2, axis=2),
            None if var is None else jnp.einsum("dtcm,dtc->dtm", var[others], z),
        )
        return jax.tree.map(partial(added, side.owners[t]), sums, new)

    shapes = ((M, M), (M,), (), *(() if var is None else [var.shape[1:]]))
    zeros = (jnp.zeros((devices, block_size // devices, *shape), Y.dtype) for shape in shapes)
    sums = jax.lax.fori_loop(side.first[k], side.first[k + 1], add, TaskSums(*zeros))
    return jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), sums)


def over_blocks(
    side: Side,
    number: int,
    features: Features,
    data: tuple[Float[Array, " L"], Float[Array, " L"]],
    of: Callable[..., Any],
    *own: Any,
) -> Any:
    """Apply ``of`` to the sums of each block and to what is its ``own``; join the results on every
    device.

    Repeats of the last owner pad the last block, and are dropped.

    :param data: observations and their relative precisions.
    :param own: trees of arrays with a row for each owner, or one row for all.
    """
    blocks, devices = len(side.first) - 1, side.owners.shape[1]
    each = -(-number // devices)
    size = -(-each // blocks)

    def block(k):
        place = k * size + np.arange(size)
        owners = jnp.minimum(place * devices + np.arange(devices)[:, None], number - 1)
        sums, owners = block_sums(side, k, devices * size, features, data), jnp.ravel(owners)
        return of(sums, *jax.tree.map(lambda x: x[owners % len(x)], own))

    def joined(x):
        by_device = jnp.moveaxis(x.reshape(blocks, devices, size, *x.shape[2:]), 1, 0)
        in_order = jnp.moveaxis(_everywhere(by_device), 0, 2)
        return jax.lax.collapse(in_order, 0, 3)[:number]

    return jax.tree.map(joined, jax.lax.map(block, jnp.arange(blocks)))


def _everywhere(own: Shaped[Array, "devices *K"]) -> Shaped[Array, "devices *K"]:
    """Give each device the arrays of all devices, by one sum over devices."""
    devices = len(own)
    if devices == 1:
        return own
    mine = np.eye(devices, dtype=bool).reshape(devices, devices, *(1,) * (own.ndim - 1))
    return jnp.sum(jnp.where(mine, own[:, None], 0), axis=0)


def weighted_sums(
    side: Side, number: int, x: Float[Array, "O K"], relative: Float[Array, " L"]
) -> Float[Array, "owners K"]:
    """Sum ``x`` of the others over the entries of each owner, weighted by ``relative``."""
    features = x[:, :0], x, jnp.ones_like(x[:, 0])
    return over_blocks(side, number, features, (relative, relative), lambda sums: sums.c)


def at_entries(entries: Entries, of: Callable[..., Any], weights: Any, *functions: Any) -> Any:
    """Apply ``of`` to the weights of an entry's column and the functions at its row.

    :param weights: arrays of shape (Q, M).
    :param functions: arrays of shape (M, N).
    """
    by_row = [x.T for x in functions]

    def one(entry):
        w = jax.tree.map(lambda x: x[entry.columns], weights)
        return of(w, *(x[entry.rows] for x in by_row))

    return jax.lax.map(one, entries, batch_size=2**15)
