# SPDX-License-Identifier: Apache-2.0
"""Sweeps over the pairs of many tasks that share features, many tasks at once."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.pairs import (
    Conditional,
    Coordinates,
    Prior,
    Put,
    coordinates,
    draw,
    drawn,
    expectation,
    gram_sweep,
    in_parts,
    pad,
    parts_of,
)
from numpyro_spikeslab.algebra.variates import logistic_and_normal

# Tasks that share features and are visited at once. On a CPU what so many carry stays in the cache;
# no power of two, whose columns would all take the same place there. An accelerator is the faster
# the more it has at once.
TILE = 640
ACCELERATOR_TILE = 65_536

# Features per block: what blocks do to one another are products of matrices. Where each task weighs
# the points in its own way, a block has the Gram matrices of all tasks, so many numbers as there
# are pairs in it.
TASK_BLOCK_SIZE = 8


def task_products(
    x: Float[Array, "A N"], y: Float[Array, "B N"], Z: Float[Array, "N #Q"]
) -> Float[Array, "#Q A B"]:
    """Products over the points, as each task weighs these; one column where all do alike."""
    if Z.shape[1] == 1:
        return (x * Z[:, 0] @ y.T)[None]
    products = (x[:, None] * y).reshape(len(x) * len(y), len(Z))
    return (products @ Z).T.reshape(Z.shape[1], len(x), len(y))


def task_sweep(
    gram: Float[Array, "#Q M M"],
    linear: Float[Array, "Q M"],
    weights: Float[Array, "Q M"],
    precision: Float[Array, " Q"],
    prior: Prior,
    put: Put,
    *,
    noise: Any = None,
    more: Float[Array, "Q K M"] | None = None,
) -> Conditional:
    """Visit the M coordinates of Q tasks in turn, many tasks at once: a :func:`gram_sweep` each.

    :param gram: inner products of the M features over the observations of each task (their
        expectations, where the features are random), or one for all tasks.
    :param linear: inner products of the features with the observations of each task.
    :param weights: current weights (expectations or draws).
    :param precision: noise precision of each task.
    :param prior: prior of the weights, in their shape, or one row for all tasks.
    :param put: :func:`expectation` or :func:`draw`.
    :param noise: variates of the draw, of shape (Q, M).
    :param more: features in K directions, whose products each task has in addition.
    """
    if more is not None and gram.shape[0] > 1:
        gram, more = gram + jnp.swapaxes(more, 1, 2) @ more, None
    shared = jnp.diagonal(gram, axis1=1, axis2=2)
    squares = shared if more is None else shared + jnp.sum(more**2, axis=1)
    pairs = coordinates(squares, precision[:, None], prior)

    def visit(gram, linear, weights, precision, pairs, noise):
        return gram_sweep(
            gram, linear - gram @ weights, weights, precision, pairs, put, noise=noise
        )

    if gram.shape[0] > 1:
        each = jax.vmap(visit)
        return pairs.given(each(gram, linear, weights, precision, pairs, noise))

    def visit_tile(tile):
        linear, weights, precision, prior, noise, more = tile
        squares = shared.T if more is None else shared.T + jnp.sum(more**2, axis=0)
        pairs = coordinates(squares, precision, prior)
        more = None if more is None else jnp.swapaxes(more, 0, 1)
        given = gram[0], linear, weights, precision, pairs, put
        return blocked_sweep(*given, noise=noise, more=more)

    return pairs.given(in_tiles(visit_tile, (linear, weights, precision, prior, noise, more)))


def blocked_sweep(
    gram: Float[Array, "M M"],
    linear: Float[Array, "M T"],
    weights: Float[Array, "M T"],
    precision: Float[Array, " T"],
    pairs: Coordinates,
    put: Put,
    *,
    noise: Any = None,
    more: Float[Array, "M K T"] | None = None,
) -> Float[Array, "M T"]:
    """:func:`gram_sweep` of tasks that share their products, block after block of features.

    :param more: see :func:`task_sweep`; what the weights add in its directions is carried along.
    """
    num_features = len(gram)
    num_blocks, size = parts_of(num_features, TASK_BLOCK_SIZE)
    added: Any = None if more is None else jnp.sum(more * weights[:, None], axis=0)
    if num_blocks == 1:
        products, cross = gram[..., None], linear - gram @ weights
        if more is not None:
            products = products + jnp.sum(more[:, None] * more, axis=2)
            cross -= jnp.sum(more * added, axis=1)
        return gram_sweep(products, cross, weights, precision, pairs, put, noise=noise)

    cut = partial(in_parts, number=num_blocks, size=size)

    def visit(carry, block):
        weights, added = carry
        k, rows, linear, pairs, noise, more = block
        own = lax.dynamic_slice_in_dim(weights, k * size, size)
        gram = lax.dynamic_slice_in_dim(rows, k * size, size, 1)
        cross = linear - rows @ weights
        if more is not None:
            cross -= jnp.sum(more * added, axis=1)
        b, new = visits_in_turn(gram, cross, own, precision, pairs, put, noise=noise, more=more)
        if more is not None:
            added += jnp.sum(more * (new - own)[:, None], axis=0)
        return (lax.dynamic_update_slice_in_dim(weights, new, k * size, 0), added), b

    rows = cut(pad(gram.T, num_blocks * size).T)
    blocks = jnp.arange(num_blocks), rows, *jax.tree.map(cut, (linear, pairs, noise, more))
    b = lax.scan(visit, (pad(weights, num_blocks * size), added), blocks)[1]
    return b.reshape(-1, b.shape[-1])[:num_features]


def visits_in_turn(
    gram: Float[Array, "B B"],
    cross: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    precision: Float[Array, " T"],
    pairs: Coordinates,
    put: Put,
    *,
    noise: Any = None,
    more: Float[Array, "B K T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """:func:`gram_sweep` of few features that many tasks share, written out visit by visit.

    Products of many tasks are slow to read and to write: a visit asks what the changes before it
    have done to its own, and leaves the others alone.

    :return: the linear terms, and the weights that were put back.
    """
    found: list[Any] = []
    for m, (own, weight) in enumerate(zip(cross, weights, strict=True)):
        pair, noise_m = jax.tree.map(lambda x, m=m: x[m], (pairs, noise))
        residual = own
        for j, (_, _, change) in enumerate(found):
            in_more = 0 if more is None else jnp.sum(more[m] * more[j], axis=0)
            residual += (gram[m, j] + in_more) * change
        b = precision * (residual + pair.squares * weight)
        new = put(pair.given(b), noise_m)
        # without a barrier XLA finds each change anew wherever it is used
        found.append(lax.optimization_barrier((b, new, weight - new)))
    b, new, _ = map(jnp.stack, zip(*found, strict=True))
    return b, new


def masked_task_sweep(
    features: tuple[Float[Array, "M N"], Float[Array, "M N"]],
    observations: tuple[Float[Array, "N Q"], Float[Array, "N Q"]],
    weights: PairedMeanField,
    precision: Float[Array, " Q"],
    prior: Prior,
    temperature: Any,
) -> tuple[PairedMeanField, Float[Array, " Q"]]:
    r""":func:`task_sweep` of expectations where tasks weigh the points each in its own way.

    Gram matrices of all tasks would be Q M^2 numbers; here a tile of tasks carries its residual,
    and has the Gram matrices of one block of features at a time.

    :param features: means and variances of the features.
    :param observations: of the tasks, and the relative precision of each.
    :param weights: the current factors of their weights.
    :param temperature: see :func:`~numpyro_spikeslab.algebra.pairs.expectation`.
    :return: the factors, and the expected squares of what each task leaves then,
        :math:`\sum_n z_n \langle (y_n - w^\top \phi_n)^2 \rangle = \sum_n z_n r_n^2 + \sum_m
        (\langle w_m^2 \rangle \langle \phi_m^2 \rangle - \langle w_m \rangle^2 \langle \phi_m
        \rangle^2)`, with the last two summed over the points.
    """
    num_features = len(features[0])
    num_blocks, size = parts_of(num_features, TASK_BLOCK_SIZE)
    put = expectation(temperature)
    rows, columns, place = triangle(size)

    cut = partial(in_parts, number=num_blocks, size=size)
    by_block = jax.tree.map(cut, features)

    def visit(tile, points):
        weights, precision, prior = tile
        y, relative = points

        def block(carry, part):
            residual, spread = carry
            (mean, var), weights, prior = part
            gram = ((mean[rows] * mean[columns]) @ relative)[place]
            own, more = mean**2 @ relative, var @ relative
            pairs = coordinates(own + more, precision, prior)
            # to the linear terms only the means of the features count
            cross = mean @ residual - more * weights
            found = pairs.given(gram_sweep(gram, cross, weights, precision, pairs, put))
            new = PairedMeanField.of(found, temperature)
            second = new.slab_moments[1]
            spread += jnp.sum(second * (own + more) - new.mean**2 * own, axis=0)
            residual += relative * (mean.T @ (weights - new.mean))
            return (residual, spread), new

        cut_prior = Prior(cut(prior.log_odds), cut(prior.variance, fill=1.0))
        parts = by_block, cut(weights), cut_prior
        start = relative * (y - features[0].T @ weights), jnp.zeros_like(precision)
        (residual, spread), new = lax.scan(block, start, parts)
        new = jax.tree.map(lambda x: x.reshape(num_blocks * size, -1)[:num_features], new)
        seen = relative > 0
        return new, spread + jnp.sum(residual**2 / jnp.where(seen, relative, 1), axis=0)

    # the new factors take the place of the old ones, of which only the means are used
    into = weights, jnp.zeros_like(precision)
    return in_tiles(visit, (weights.mean, precision, prior), observations, into=into)


def triangle(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows and columns of the upper triangle of a symmetric matrix, and where in it each of the
    entries of the matrix is."""
    rows, columns = np.triu_indices(size)
    place = np.zeros((size, size), int)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    return rows, columns, place


def in_tiles(visit: Callable, tasks: Any, *points: Any, into: Any = None) -> Any:
    """Some tasks at a time, as many as suit the processor.

    A tile has as many of the tasks of every device, which visits its own where they are sharded.

    :param visit: takes arrays whose last axis are the tasks, side by side, and returns such.
    :param tasks: arrays of all tasks, leading axis Q, or 1 for what is the same for all.
    :param points: arrays whose last axis is Q.
    :param into: arrays like those that are returned, which are written over; zeros by default.
    :return: what all visits return, leading axis Q.
    """
    num_tasks = max(len(x) for x in jax.tree.leaves(tasks))
    devices = jax.device_count()
    shards = devices if num_tasks % devices == 0 else 1
    each = num_tasks // shards
    largest = TILE if jax.default_backend() == "cpu" else ACCELERATOR_TILE
    num_tiles, size = parts_of(each, largest)
    points = jax.tree.map(lambda x: x.reshape(*x.shape[:-1], shards, each), points)

    def of(start):
        def cut(x, axis):
            tile = lax.dynamic_slice_in_dim(x, start, size, axis)
            return lax.collapse(tile, axis - 1, axis + 1)

        def own(x):
            x = x if len(x) < num_tasks else cut(x.reshape(shards, each, *x.shape[1:]), 1)
            return jnp.moveaxis(x, 0, -1)

        found = visit(jax.tree.map(own, tasks), *jax.tree.map(lambda x: cut(x, x.ndim - 1), points))
        found = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), found)
        return jax.tree.map(lambda x: x.reshape(shards, size, *x.shape[1:]), found)

    def put_in(k, into):
        # the last tile may have some tasks of the one before, with the same result
        start = jnp.minimum(k * size, each - size)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return jax.tree.map(put, into, of(start))

    if into is None:
        shapes = jax.eval_shape(of, 0)
        into = jax.tree.map(lambda x: jnp.zeros((num_tasks, *x.shape[2:]), x.dtype), shapes)
    into = jax.tree.map(lambda x: x.reshape(shards, each, *x.shape[1:]), into)
    found = lax.fori_loop(0, num_tiles, put_in, into)
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), found)


def gibbs_task_sweep(
    key: Array,
    gram: Float[Array, "#Q M M"],
    linear: Float[Array, "Q M"],
    weights: Float[Array, "Q M"],
    precision: Float[Array, " Q"],
    prior: Prior,
    more: Float[Array, "Q K M"] | None = None,
) -> tuple[Int[Array, "Q M"], Float[Array, "Q M"], Float[Array, "Q M"]]:
    """:func:`gibbs_sweep` of all tasks at once; see :func:`task_sweep`.

    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (Q, M).
    """
    noise = logistic_and_normal(key, weights)
    pair = task_sweep(gram, linear, weights, precision, prior, draw, noise=noise, more=more)
    return drawn(pair, noise, prior)
