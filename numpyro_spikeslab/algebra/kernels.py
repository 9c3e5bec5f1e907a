# SPDX-License-Identifier: Apache-2.0
"""A kernel whose parameters are to be set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
import math
from typing import Any

from jaxtyping import Array, Float
import numpy as np
from tinygp.kernels import Kernel, quasisep

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.covariance import (
    Covariance,
    Dense,
    Diagonal,
    Quasisep,
    add_jitter,
    as_matrix,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Template:
    """A kernel with parameters to be set.

    :param kernel: a tinygp kernel, or an ``(N, N)`` covariance matrix.
    :param free: which of the kernel's leaves are parameters.
    :param kind: ``"kernel"``, ``"quasisep"`` (on inputs of one dimension), ``"matrix"``,
        ``"white"`` or ``"zero"``.
    """

    kernel: Any
    free: tuple[bool, ...] = field(metadata={"static": True})
    kind: str = field(metadata={"static": True})

    @classmethod
    def of(cls, kernel: Any, X: Any) -> Template:
        """The template of a kernel, whose positive floats are its parameters.

        :param kernel: a tinygp kernel, a matrix, ``"white"`` or ``"zero"``.
        :param X: ``(N,)`` or ``(N, D)``, the inputs.
        """
        if isinstance(kernel, str):
            return cls((), (), kernel)
        if not isinstance(kernel, Kernel):
            return cls(jnp.asarray(kernel), (False,), "matrix")
        free = tuple(_is_parameter(leaf) for leaf in jax.tree.leaves(kernel))
        state_space = isinstance(kernel, quasisep.Quasisep) and jnp.size(X) == jnp.shape(X)[0]
        return cls(kernel, free, "quasisep" if state_space else "kernel")

    @property
    def parameters(self) -> dict[str, Any]:
        """Values of the parameters by the path to them."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.kernel)
        return {
            jax.tree_util.keystr(path, simple=True, separator="_"): jnp.asarray(leaf, float)
            for (path, leaf), free in zip(leaves, self.free, strict=True)
            if free
        }

    def at(self, values: Sequence[Any]) -> Any:
        """The kernel with these values of its parameters."""
        leaves, treedef = jax.tree.flatten(self.kernel)
        rest = iter(values)
        leaves = [next(rest) if free else x for x, free in zip(leaves, self.free, strict=True)]
        return jax.tree.unflatten(treedef, leaves)

    def split(self, theta: Float[Array, " P"]) -> list[Float[Array, ...]]:
        """Values of the parameters from their logs, of which there may be more than needed."""
        shapes = [jnp.shape(x) for x in self.parameters.values()]
        ends = list(accumulate(math.prod(shape) for shape in shapes))
        parts = jnp.split(jnp.exp(theta), ends)[: len(shapes)]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def covariance(self, values: Sequence[Any], X: Any) -> Covariance:
        """Prior covariance at the inputs, without jitter."""
        N = jnp.shape(X)[0]
        if self.kind == "white":
            return Diagonal(jnp.ones(N))
        if self.kind == "zero":
            return Diagonal(jnp.zeros(N))
        if self.kind == "matrix":
            return Dense(self.kernel)
        if self.kind == "quasisep":
            return Quasisep.from_kernel(self.at(values), jnp.reshape(jnp.asarray(X), N))
        return Dense(self.cross(values, X, X))

    def prior(self, values: Sequence[Any], X: Any, dense: bool) -> Covariance:
        """Prior covariance at the inputs, with its jitter.

        :param dense: whether it must be a matrix, as where functions of several kinds meet.
        """
        covariance = self.covariance(values, X)
        return add_jitter(Dense(as_matrix(covariance)) if dense else covariance)

    def cross(self, values: Sequence[Any], X: Any, X_new: Any) -> Float[Array, "N S"]:
        """Prior covariance between inputs and others.

        :raises ValueError: if all that is known is a matrix.
        """
        X, X_new = jnp.asarray(X, float), jnp.asarray(X_new, float)
        if self.kind in ("white", "zero"):
            return jnp.zeros((X.shape[0], X_new.shape[0]))
        if self.kind == "matrix":
            raise ValueError("A covariance matrix says nothing about new inputs; give a kernel.")
        if isinstance(self.kernel, quasisep.Quasisep):
            # tinygp evaluates them at single numbers only
            X, X_new = (x.ravel() if x.size == x.shape[0] else x for x in (X, X_new))
        return self.at(values)(X, X_new)

    def variance(self, values: Sequence[Any], X: Any) -> Float[Array, " S"]:
        """Prior variance at inputs."""
        if self.kind in ("white", "zero"):
            return jnp.full(jnp.shape(X)[0], 1.0 if self.kind == "white" else 0.0)
        if self.kind == "matrix":
            return jnp.diagonal(self.kernel)
        x = jnp.asarray(X, float)
        kernel = self.at(values)
        if isinstance(self.kernel, quasisep.Quasisep) and x.size == x.shape[0]:
            x = x.ravel()
        return jax.vmap(kernel.evaluate)(x, x)


def _is_parameter(leaf: Any) -> bool:
    value = np.asarray(leaf)
    return np.issubdtype(value.dtype, np.floating) and value.size > 0 and bool(np.all(value > 0))
