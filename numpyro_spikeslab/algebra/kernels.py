# SPDX-License-Identifier: Apache-2.0
"""Kernels with parameters to be set, and the covariances that they give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import accumulate
import math
import sys
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.covariance import Covariance, Dense, Diagonal


def is_kernel(value: Any) -> bool:
    """Whether this is a tinygp kernel."""
    return _is_instance(value, "tinygp.kernels.base", "Kernel")


def _is_instance(value: Any, module: str, name: str) -> bool:
    # tinygp takes long to import; an instance of its class has imported it
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def _is_state_space(kernel: Any) -> bool:
    return _is_instance(kernel, "tinygp.kernels.quasisep", "Quasisep")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Template:
    """A kernel of tinygp, or a covariance matrix, with parameters to be set.

    - **free** - which of the kernel's leaves are parameters.
    - **kind** - ``"kernel"``, ``"quasisep"`` (on inputs of one dimension), ``"matrix"``,
      ``"white"`` or ``"zero"``.
    """

    kernel: Any
    free: tuple[bool, ...] = field(metadata={"static": True})
    kind: str = field(metadata={"static": True})

    @classmethod
    def of(cls, kernel: Any, X: Any) -> Template:
        """Make the template of a kernel, matrix or kind; positive numbers are its parameters."""
        if isinstance(kernel, str):
            return cls((), (), kernel)
        if not is_kernel(kernel):
            return cls(jnp.asarray(kernel, float), (False,), "matrix")
        leaves = jax.tree.leaves_with_path(kernel)
        free = tuple(_is_positive(x) and not _is_structure(kernel, path) for path, x in leaves)
        state_space = _is_state_space(kernel) and np.size(X) == np.shape(X)[0]
        return cls(kernel, free, "quasisep" if state_space else "kernel")

    @property
    def is_independent(self) -> bool:
        """Whether values at different inputs are independent."""
        return self.kind in ("white", "zero")

    @property
    def parameters(self) -> dict[str, Any]:
        """Values of the parameters by the path to them."""
        leaves = zip(jax.tree.leaves_with_path(self.kernel), self.free, strict=True)
        return {_name(path): jnp.asarray(leaf, float) for (path, leaf), free in leaves if free}

    @property
    def length_scales(self) -> frozenset[str]:
        """Paths to the parameters that are lengths in the unit of the inputs."""
        paths = (path for path, _ in jax.tree.leaves_with_path(self.kernel) if path)
        return frozenset(_name(path) for path in paths if _is_length(self.kernel, path))

    def at(self, values: Sequence[Any]) -> Any:
        """Return the kernel with these values of its parameters."""
        leaves, treedef = jax.tree.flatten(self.kernel)
        new = iter(values)
        leaves = [next(new) if free else x for x, free in zip(leaves, self.free, strict=True)]
        return jax.tree.unflatten(treedef, leaves)

    def split(self, theta: Float[Array, " P"]) -> list[Float[Array, ...]]:
        """Return values of the parameters from their logs, which may be padded."""
        shapes = [jnp.shape(x) for x in self.parameters.values()]
        ends = list(accumulate(math.prod(shape) for shape in shapes))
        parts = jnp.split(jnp.exp(theta), ends)[: len(shapes)]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def covariance(self, values: Sequence[Any], X: Any) -> Covariance:
        """Return the prior covariance at the inputs, without jitter."""
        if self.is_independent:
            return Diagonal(self.variance(values, X))
        if self.kind == "matrix":
            return Dense(self.kernel)
        if self.kind == "quasisep":
            from numpyro_spikeslab.algebra.quasisep import Quasisep

            return Quasisep.from_kernel(self.at(values), jnp.ravel(jnp.asarray(X, float)))
        return Dense(self.cross(values, X, X))

    def prior(self, values: Sequence[Any], X: Any, dense: bool) -> Covariance:
        """Return the prior covariance with jitter, as a matrix for functions of several kinds."""
        covariance = self.covariance(values, X)
        return (Dense(covariance.to_dense()) if dense else covariance).jittered()

    def extend(
        self, values: Sequence[Any], X: Any, X_new: Any, deviation: Float[Array, " N"]
    ) -> tuple[Float[Array, " S"], Float[Array, "S S"]]:
        """Condition the function at new inputs on its values; see :func:`gp.extend`."""
        cross = self.cross(values, X, X_new)
        if self.is_independent:
            variance = self.variance(values, X_new)
            # NumPyro refuses a root with zeros
            root = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
            return jnp.zeros_like(variance), jnp.diag(root)
        old = self.covariance(values, X)
        joint = self.covariance(values, jnp.concatenate([jnp.asarray(X), jnp.asarray(X_new)]))
        return gp.extend(old, joint, deviation, cross)

    def cross(self, values: Sequence[Any], X: Any, X_new: Any) -> Float[Array, "N S"]:
        """Return the prior covariance between old and new inputs."""
        X, X_new = jnp.asarray(X, float), jnp.asarray(X_new, float)
        if self.is_independent:
            return jnp.zeros((X.shape[0], X_new.shape[0]))
        if self.kind == "matrix":
            raise ValueError("A covariance matrix says nothing about new inputs; give a kernel.")
        if _is_state_space(self.kernel):
            # tinygp evaluates them at single numbers only
            X, X_new = (x.ravel() if x.size == x.shape[0] else x for x in (X, X_new))
        # constants that are integers make integers
        return jnp.asarray(self.at(values)(X, X_new), float)

    def variance(self, values: Sequence[Any], X: Any) -> Float[Array, " S"]:
        """Return the prior variance at inputs."""
        x = jnp.asarray(X, float)
        if self.is_independent:
            return jnp.full(len(x), float(self.kind == "white"))
        return jax.vmap(lambda x: self.cross(values, x[None], x[None])[0, 0])(x)


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="_")


def _is_positive(leaf: Any) -> bool:
    value = np.asarray(leaf)
    return value.dtype.kind in "iuf" and value.size > 0 and bool(np.all(value > 0))


def _steps(kernel: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, str]]:
    """Yield each node on the way to a number and the name of its field, empty in a container."""
    node = kernel
    for key in path:
        name = getattr(key, "name", "")
        yield node, name
        if not name:
            return
        node = getattr(node, name)


def _is_structure(kernel: Any, path: tuple[Any, ...]) -> bool:
    """Whether a number of a kernel is part of its definition, as the order of a polynomial and a
    field that is annotated as ``int`` or begins with an underscore.
    """
    for node, name in _steps(kernel, path):
        types = {x.name: x.type for x in fields(node)} if is_dataclass(node) else {}
        is_order = name == "order" and _is_instance(node, "tinygp.kernels.base", "Polynomial")
        if is_order or name.startswith("_") or types.get(name) in (int, "int"):
            return True
    return False


def _is_length(kernel: Any, path: tuple[Any, ...]) -> bool:
    """Whether a number of a kernel is the scale of a stationary kernel of the inputs themselves."""
    *outer, (node, name) = _steps(kernel, path)
    if name != "scale" or any(type(x).__module__ == "tinygp.transforms" for x, _ in outer):
        return False
    stationary = _is_instance(node, "tinygp.kernels.stationary", "Stationary")
    # such as quasisep.Matern32; the scale of a quasisep.Scale is a variance
    return stationary or (_is_state_space(node) and hasattr(node, "sigma"))


ONE_DIMENSION_ONLY = "Cosine", "ExpSineSquared"
"""Kernels of tinygp that are covariances of inputs in one dimension only, by either distance."""


def no_covariances(kernel: Any) -> Iterator[Any]:
    """Yield the stationary parts of a tinygp kernel that are covariances in one dimension only.

    By the sum of distances, tinygp's default, only the exponential kernel is one in several.
    Transforms may change the dimension, so kernels inside transforms are left out.
    """
    module, name = type(kernel).__module__, type(kernel).__name__
    if module == "tinygp.kernels.stationary":
        distance = type(kernel.distance).__name__
        bad = {"L1Distance": name != "Exp", "L2Distance": name in ONE_DIMENSION_ONLY}
        if bad.get(distance, False):
            yield kernel
    elif module != "tinygp.transforms":
        parts = jax.tree.leaves(kernel, is_leaf=lambda part: part is not kernel and is_kernel(part))
        for part in filter(is_kernel, parts):
            yield from no_covariances(part)
