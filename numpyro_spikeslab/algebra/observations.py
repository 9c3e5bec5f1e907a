# SPDX-License-Identifier: Apache-2.0
"""Observations of Q tasks at N points, as a whole table or as some of its entries."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_spikeslab.algebra.sparse_sums import (
    Entries,
    Side,
    at_entries,
    over_blocks,
    side_of,
    weighted_sums,
)
from numpyro_spikeslab.algebra.task_sweeps import TaskSums, masked_sweep, task_sweep


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Grid:
    """A dense table, whose missing entries have a precision of 0. Relative precisions ``z`` have
    one column where all tasks agree."""

    shape: tuple[int, int] = field(metadata={"static": True})

    # which entries there are: all
    where = None

    @property
    def size(self) -> int:
        """The number of observations."""
        return self.shape[0] * self.shape[1]

    def stored(self, x: Float[Array, "N #Q"]) -> Array:
        """Return numbers of all observations in the shape that the layout keeps."""
        return x

    def per_task(self, x: Float[Array, "#N #Q"]) -> Float[Array, " Q"]:
        """Return a number for each task, given numbers that are equal at all points."""
        return jnp.broadcast_to(x[0], self.shape[1])

    def by_task(self, x: Float[Array, "N #Q"]) -> Float[Array, " Q"]:
        """Sum over the observations of each task."""
        return jnp.broadcast_to(jnp.sum(x, axis=0), self.shape[1])

    def over_points(self, z: Any, x: Float[Array, "*K N"]) -> Float[Array, "*K #Q"]:
        """Compute ``sum_n z_nq x_n``; one column where all tasks weigh alike."""
        return x @ z

    def over_tasks(self, z: Any, x: Float[Array, " Q *K"]) -> Float[Array, " N *K"]:
        """Compute ``sum_q z_nq x_q``."""
        return z @ (jnp.sum(x, axis=0, keepdims=True) if z.shape[1] == 1 else x)

    def mix(self, w: Float[Array, "Q M"], phi: Float[Array, "M N"]) -> Array:
        """Compute the functions that weights mix, at each observation."""
        return phi.T @ w.T

    def moments(self, weights: Any, *moments: Float[Array, "M N"]) -> tuple[Any, Any]:
        """Compute mean and variance of the predictor, from means and variances of functions."""
        mean, variance = weights.mixed(*moments)
        return mean.T, variance.T

    def sweep(
        self, data: tuple[Any, Any], features: tuple[Any, Any], weights: Any, *settings: Any
    ) -> tuple[Any, Float[Array, " Q"]]:
        """Visit the weights of all tasks in turn, from their products, which are one Gram matrix
        where all tasks weigh alike, or else from the observations of a tile of tasks."""
        if data[1].shape[1] > 1:
            return masked_sweep(data, features, weights, *settings)
        return TaskSums.of(*data, *features).sweep(weights, *settings)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sparse:
    """L observed entries of a table, and the same by row and by column. Its methods are those of
    :class:`Grid`, on arrays of L entries."""

    where: Entries
    by_rows: Side
    by_columns: Side
    shape: tuple[int, int] = field(metadata={"static": True})

    @classmethod
    def of(
        cls, where: Any, shape: tuple[int, int], num_features: int, mesh: Mesh | None = None
    ) -> "Sparse":
        """Group the observed entries of an (N, Q) table by row and by column, over a mesh."""
        rows, columns = (np.asarray(x) for x in where)
        devices = 1 if mesh is None else mesh.size
        by_rows = side_of(rows, columns, shape[0], num_features, devices)
        by_columns = side_of(columns, rows, shape[1], num_features, devices)
        entries = Entries(jnp.asarray(rows), jnp.asarray(columns))
        grouped = cls(entries, by_rows, by_columns, shape)
        if mesh is None:
            return grouped

        def place(x):
            shared = PartitionSpec(None, mesh.axis_names) if x.ndim > 1 else PartitionSpec()
            return jax.device_put(np.asarray(x), NamedSharding(mesh, shared))

        return jax.tree.map(place, grouped)

    @property
    def size(self) -> int:
        return len(self.where.rows)

    def stored(self, x: Float[Array, "L 1"]) -> Array:
        return x[:, 0]

    def per_task(self, x: Float[Array, "#L 1"]) -> Float[Array, " Q"]:
        # the number of a task without entries is known only if all tasks share it
        shared = jnp.ones(()) if x.size > 1 else x[0, 0]
        return jnp.full(self.shape[1], shared).at[self.where.columns].set(x[:, 0])

    def by_task(self, x: Float[Array, " L ..."]) -> Float[Array, " Q"]:
        return jnp.zeros(self.shape[1], x.dtype).at[self.where.columns].add(jnp.ravel(x))

    def over_points(self, z: Any, x: Float[Array, "*K N"]) -> Float[Array, "*K Q"]:
        return weighted_sums(self.by_columns, self.shape[1], x.T, z).T

    def over_tasks(self, z: Any, x: Float[Array, " Q *K"]) -> Float[Array, " N *K"]:
        return weighted_sums(self.by_rows, self.shape[0], x, z)

    def mix(self, w: Float[Array, "Q M"], phi: Float[Array, "M N"]) -> Array:
        return at_entries(self.where, jnp.dot, w, phi)

    def moments(self, weights: Any, *moments: Float[Array, "M N"]) -> tuple[Any, Any]:
        return at_entries(self.where, type(weights).mixed, weights, *moments)

    def over_columns(
        self, data: tuple[Any, Any], features: tuple[Any, Any], of: Any, *own: Any
    ) -> Any:
        """Apply ``of`` to the sums of blocks of columns and to their ``own``; see
        :func:`~numpyro_spikeslab.algebra.sparse_sums.over_blocks`."""
        mean, var = jax.tree.map(jnp.transpose, features)
        others = mean, var, jnp.ones_like(mean[:, 0])
        return over_blocks(self.by_columns, self.shape[1], others, data, of, *own)

    def sweep(
        self,
        data: tuple[Any, Any],
        features: tuple[Any, Any],
        weights: Any,
        *settings: Any,
        passes: int = 1,
    ) -> tuple[Any, Float[Array, " Q"]]:
        precision, prior, update = settings

        def of(sums, weights, precision, prior, noise):
            def visit(_, weights):
                return task_sweep(sums, weights, precision, prior, update._replace(noise=noise))

            weights = jax.lax.fori_loop(0, passes, visit, weights)
            return weights, sums.squares(weights)

        return self.over_columns(data, features, of, weights, precision, prior, update.noise)


Observations = Grid | Sparse
