# SPDX-License-Identifier: Apache-2.0
"""Sweeps over the pairs of many tasks that share features, many tasks at once."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import Prior, in_parts, pad, parts_of, sweep, visits

# Tasks of a tile, which are visited side by side. On a CPU their arrays stay in the cache, where
# columns of a power of two would be mapped to the same place. An accelerator needs more.
TILE = 640
ACCELERATOR_TILE = 65_536

# Features per block: the visits in a block are elementwise, between blocks are matrix products.
TASK_BLOCK_SIZE = 8


def task_products(
    x: Float[Array, "A N"], y: Float[Array, "B N"], Z: Float[Array, "N #Q"]
) -> Float[Array, "#Q A B"]:
    """Compute sums of products over the points, weighted by the columns of ``Z``."""
    if Z.shape[1] == 1:
        return (x * Z[:, 0] @ y.T)[None]
    products = (x[:, None] * y).reshape(len(x) * len(y), len(Z))
    return (products @ Z).T.reshape(Z.shape[1], len(x), len(y))


class SharedGram(NamedTuple):
    """Products of M features with each other and the observations, in K blocks of B features.

    As the source of a sweep its state is the product of ``extra`` and the weights.

    - **rows** - rows of the Gram matrix, zeros beyond M in both directions.
    - **gram** - Gram matrices of the blocks.
    - **linear** - inner products of the features with the observations.
    - **extra** - D directions in which each task has products of its own in addition, or `None`.
    """

    rows: Float[Array, "K B R"]
    gram: Float[Array, "K B B"]
    linear: Float[Array, "K B T"]
    extra: Float[Array, "K B D T"] | None

    @classmethod
    def cut(cls, gram: Any, linear: Any, extra: Any) -> "SharedGram":
        """Cut the products into blocks."""
        number, size = parts_of(len(gram), TASK_BLOCK_SIZE)
        cut = partial(in_parts, number=number, size=size)
        rows = cut(pad(gram.T, number * size).T)
        blocks = jnp.moveaxis(
            jnp.diagonal(rows.reshape(number, size, number, size), 0, 0, 2), -1, 0
        )
        return cls(rows, blocks, cut(linear), None if extra is None else cut(extra))

    @property
    def blocks(self) -> "SharedGram":
        return self

    def of(self, block: "SharedGram", weights: Any, sums: Any) -> tuple[Any, Any]:
        rows, gram, linear, extra = block
        cross, squares = linear - rows @ weights, jnp.diagonal(gram)[:, None]
        if extra is None:
            return (lambda m, j: gram[m, j], cross, squares), lambda change: None
        cross, squares = cross - jnp.sum(extra * sums, axis=1), squares + jnp.sum(extra**2, axis=1)

        def product(m, j):
            return gram[m, j] + jnp.sum(extra[m] * extra[j], axis=0)

        return (product, cross, squares), lambda change: sums + _sums(extra, change)


def _sums(extra: Float[Array, "B D T"], weights: Float[Array, "B T"]) -> Float[Array, "D T"]:
    return jnp.sum(extra * weights[:, None], axis=0)


class TaskSums(NamedTuple):
    """Sums over the observations of each of Q tasks, weighted by their relative precisions.

    - **G** - products of M features (their means, where they are random) with each other; one
      matrix where all tasks weigh alike.
    - **b** - products of the features with the observations.
    - **yy** - of the observations with themselves.
    - **c** - sums of the features' variances; `None` where features are known.
    - **extra** - D further rows of the features of each task, whose products add to ``G``.
    """

    G: Float[Array, "#Q M M"]
    b: Float[Array, "Q M"]
    yy: Float[Array, " Q"]
    c: Float[Array, "#Q K"] | None = None
    extra: Float[Array, "Q D M"] | None = None

    @classmethod
    def of(
        cls,
        y: Float[Array, "N Q"],
        Z: Float[Array, "N #Q"],
        mean: Float[Array, "M N"],
        var: Float[Array, "M N"] | None = None,
    ) -> "TaskSums":
        """Sum over the N points of a table; ``Z`` are the relative precisions."""
        weighted, c = Z * y, None if var is None else Z.T @ var.T
        yy = jnp.sum(weighted * y, axis=0)
        return cls(task_products(mean, mean, Z), weighted.T @ mean.T, yy, c)

    def squares(self, weights: Any) -> Float[Array, " Q"]:
        """Compute the expected sum of squared residuals of each task, without ``extra``."""
        W, squares = weights.mean, jnp.diagonal(self.G, axis1=1, axis2=2)
        spread = weights.product_variance(squares, 0.0 if self.c is None else self.c)
        return self.yy + jnp.sum(W * (times(self.G, W) - 2 * self.b) + spread, axis=1)

    def sweep(self, weights: Any, *settings: Any) -> tuple[Any, Float[Array, " Q"]]:
        """Visit all weights by :func:`task_sweep`; return the expected squares, too."""
        new = task_sweep(self, weights, *settings)
        return new, self.squares(new)


def times(matrix: Float[Array, "#Q A B"], x: Float[Array, "Q B"]) -> Float[Array, "Q A"]:
    """Multiply the vector of each task by its matrix, or by one for all tasks."""
    if len(matrix) == 1:
        return x @ matrix[0].T
    return jnp.einsum("qab,qb->qa", matrix, x)


def task_sweep(
    sums: TaskSums, weights: Any, precision: Float[Array, " Q"], prior: Prior, update: Any
) -> Any:
    """Visit the M coordinates of Q tasks in turn, many tasks at once.

    :param weights: a family or draws; of it the means are read, and it is written over.
    :param update: see :func:`~numpyro_spikeslab.algebra.pairs.sweep`.
    :return: the outcome of the update.
    """
    gram, linear, _, variances, extra = sums
    means = weights.mean
    if variances is not None:
        diagonal = np.arange(gram.shape[1])
        gram = gram.at[:, diagonal, diagonal].add(variances)
    if extra is not None and gram.shape[0] > 1:
        gram, extra = gram + jnp.swapaxes(extra, 1, 2) @ extra, None

    def visit(gram, linear, weights, precision, prior, noise):
        products = gram, linear - gram @ weights, jnp.diagonal(gram)
        now = update._replace(noise=noise)
        return now.outcome(visits(products, weights, precision, prior, now)[0], prior)

    def visit_tile(tile):
        linear, weights, precision, prior, noise, extra = tile
        now, state = update._replace(noise=noise), None
        if extra is not None:
            extra = jnp.swapaxes(extra, 0, 1)
            state = _sums(extra, weights)
        source = SharedGram.cut(gram[0], linear, extra)
        return now.outcome(sweep(source, state, weights, precision, prior, now)[0], prior)

    if gram.shape[0] == 1:
        tasks = linear, means, precision, prior, update.noise, extra
        return in_tiles(weights, visit_tile, tasks)
    prior = Prior(*(jnp.broadcast_to(x, linear.shape) for x in prior))
    return jax.vmap(visit)(gram, linear, means, precision, prior, update.noise)


class MaskedRows(NamedTuple):
    """Features of tasks that weigh the points each in its own way, in K blocks of B.

    As the source of a sweep its state is the residual times the relative precisions.

    - **squares** - expected products of each feature with itself.
    """

    rows: Float[Array, "K B N"]
    squares: Float[Array, "K B T"]
    relative: Float[Array, "N T"]

    @property
    def blocks(self) -> tuple[Any, Any]:
        return self.rows, self.squares

    def of(self, block: tuple[Any, Any], weights: Any, residual: Float[Array, "N T"]) -> Any:
        rows, squares = block
        first, second, place = triangle(len(rows))
        products = (rows[first] * rows[second]) @ self.relative
        gram, relative = (lambda m, j: products[place[m, j]]), self.relative
        return (gram, rows @ residual, squares), lambda x: residual - relative * (rows.T @ x)


def masked_sweep(
    data: tuple[Float[Array, "N Q"], Float[Array, "N Q"]],
    features: tuple[Float[Array, "M N"], Float[Array, "M N"] | None],
    weights: Any,
    precision: Float[Array, " Q"],
    prior: Prior,
    update: Any,
) -> tuple[Any, Float[Array, " Q"]]:
    r"""Visit the coordinates in turn as :func:`task_sweep`, from the observations.

    Gram matrices of all tasks would be Q M^2 numbers. Here a tile of tasks carries its residual,
    and has the Gram matrices of one block of features at a time.

    :param data: the observations and their relative precisions.
    :param features: means and variances, `None` for variances of zero.
    :return: the outcome of the update, and the expected sum of squared residuals of each task,
        :math:`\sum_n z_n \langle (y_n - w^\top \phi_n)^2 \rangle = \sum_n z_n r_n^2 + \sum_m
        (\langle w_m^2 \rangle \langle \phi_m^2 \rangle - \langle w_m \rangle^2 \langle \phi_m
        \rangle^2)`, with the last two summed over the points.
    """
    mean, var = features

    def visit(tile, y, relative):
        weights, precision, prior, noise = tile
        now, cut = update._replace(noise=noise), parts_of(len(mean), TASK_BLOCK_SIZE)
        squares, spread = mean**2 @ relative, 0.0 if var is None else var @ relative
        source = MaskedRows(in_parts(mean, *cut), in_parts(squares + spread, *cut), relative)
        residual = relative * (y - mean.T @ weights)
        pair, residual = sweep(source, residual, weights, precision, prior, now)
        new = now.outcome(pair, prior)
        total = jnp.sum(residual**2 / jnp.where(relative > 0, relative, 1), axis=0)
        return new, total + jnp.sum(new.product_variance(squares, spread), axis=0)

    tasks = weights.mean, precision, prior, update.noise
    return in_tiles((weights, jnp.zeros_like(precision)), visit, tasks, *data)


def triangle(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows and columns of a matrix's upper triangle, and the place of each entry in it."""
    rows, columns = np.triu_indices(size)
    place = np.zeros((size, size), int)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    return rows, columns, place


def in_tiles(into: Any, visit: Callable, tasks: Any, *points: Any) -> Any:
    """Visit tile after tile of the tasks, and write the results ``into`` arrays. If these are
    spread over devices, a tile takes equally many from each.

    ``tasks`` lead with Q, or with 1 where all have the same, and ``points`` end with it.
    """
    num_tasks = len(jax.tree.leaves(into)[0])
    devices = jax.device_count()
    shards = devices if num_tasks % devices == 0 else 1
    each = num_tasks // shards
    largest = TILE if jax.default_backend() == "cpu" else ACCELERATOR_TILE
    num_tiles, size = parts_of(each, largest)
    points = jax.tree.map(lambda x: x.reshape(*x.shape[:-1], shards, each), points)

    def tile_at(start):
        def cut(x, axis):
            tile = lax.dynamic_slice_in_dim(x, start, size, axis)
            return lax.collapse(tile, axis - 1, axis + 1)

        def tasks_last(x):
            x = x if len(x) < num_tasks else cut(x.reshape(shards, each, *x.shape[1:]), 1)
            return jnp.moveaxis(x, 0, -1)

        tile = jax.tree.map(lambda x: cut(x, x.ndim - 1), points)
        results = visit(jax.tree.map(tasks_last, tasks), *tile)
        results = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), results)
        return jax.tree.map(lambda x: x.reshape(shards, size, *x.shape[1:]), results)

    def write(k, into):
        # the last tile may repeat tasks of the one before, with the same result
        start = jnp.minimum(k * size, each - size)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return jax.tree.map(put, into, tile_at(start))

    into = jax.tree.map(lambda x: x.reshape(shards, each, *x.shape[1:]), into)
    results = lax.fori_loop(0, num_tiles, write, into)
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), results)
