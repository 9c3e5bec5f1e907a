# SPDX-License-Identifier: Apache-2.0
"""A model's arguments as a compiled function takes them: arrays, and constants compared by content.

So data of the same shapes need no second compilation, and what sizes a plate stays concrete.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from numpyro.util import is_prng_key, not_jax_tracer

RUN_ONCE = {"xla_backend_optimization_level": 0}
"""Compiler options of functions whose compilation takes longer than they do."""


class _Constant:
    """A value that a compiled function may depend on, compared by content."""

    def __init__(self, value: Any) -> None:
        self.value = value
        if isinstance(value, np.ndarray | jax.Array):
            self._key: Any = (value.shape, str(value.dtype), np.asarray(value).tobytes())
        elif isinstance(value, Hashable):
            self._key = (type(value), value)
        else:
            self._key = id(value)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and self._key == other._key


def _is_dynamic(leaf: Any) -> bool:
    """Whether a leaf may be traced. Vectors of integers often index groups and so size plates;
    they are kept concrete."""
    if not isinstance(leaf, np.ndarray | jax.Array):
        return False
    if not not_jax_tracer(leaf) or is_prng_key(leaf) or leaf.ndim > 1:
        return True
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def are_concrete(tree: Any) -> bool:
    """Whether no leaf is a tracer."""
    return all(not_jax_tracer(leaf) for leaf in jax.tree.leaves(tree))


def outside_transformations(tree: Any) -> AbstractContextManager:
    """A context in which functions of concrete data give concrete results, even where the caller
    is being transformed; for data that are traced themselves it does nothing."""
    return jax.core.eval_context() if are_concrete(tree) else nullcontext()


def on_device(tree: Any) -> Any:
    """Move numpy's floats to JAX's device, once for all later calls."""
    return jax.tree.map(
        lambda leaf: (
            jnp.array(leaf) if isinstance(leaf, np.ndarray) and _is_dynamic(leaf) else leaf
        ),
        tree,
    )


def partition(tree: Any) -> tuple[Any, list[Any]]:
    """Split a tree into a hashable part and a list of arrays."""
    leaves, treedef = jax.tree.flatten(tree)
    dynamic = [leaf if _is_dynamic(leaf) else None for leaf in leaves]
    static = tuple(None if _is_dynamic(leaf) else _Constant(leaf) for leaf in leaves)
    return (treedef, static), dynamic


def merge(static: Any, dynamic: list[Any]) -> Any:
    """The inverse of :func:`partition`."""
    treedef, constants = static
    leaves = [
        leaf if constant is None else constant.value
        for leaf, constant in zip(dynamic, constants, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


class LastCall:
    """Keeps the result for the arguments of the last call."""

    def __init__(self) -> None:
        self._key: Any = None
        self._result: Any = None

    def __call__(self, compute: Callable[[], Any], *arguments: Any) -> Any:
        """``compute()``, or what it returned before for the same concrete arguments."""
        leaves, treedef = jax.tree.flatten(arguments)
        rest, key = (treedef, jnp.result_type(float)), self._key
        if key is None or key[1:] != rest or not all(map(_same, key[0], leaves)):
            # numpy's arrays may change in place, so the key keeps copies; it keeps others
            # themselves, so that nothing else can take their identity
            copies = [x.copy() if isinstance(x, np.ndarray) else x for x in leaves]
            self._result = compute()
            self._key = (copies, *rest)
        return self._result


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, np.ndarray):
        if not isinstance(a, np.ndarray) or a.dtype != b.dtype:
            return False
        return np.array_equal(a, b, equal_nan=np.issubdtype(a.dtype, np.inexact))
    return a is b or (not hasattr(a, "shape") and type(a) is type(b) and bool(a == b))


def stand_ins(tree: Any) -> Any:
    """The tree with arbitrary arrays in place of tracers: enough to tell what a model looks like,
    which never depends on the values of data that are traced."""
    rng = np.random.default_rng(0)

    def of(leaf):
        if not_jax_tracer(leaf) or is_prng_key(leaf):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            # positive, for models that take logarithms
            return rng.uniform(0.1, 1.0, leaf.shape).astype(leaf.dtype)
        # masks let everything through
        return np.full(leaf.shape, leaf.dtype == bool, leaf.dtype)

    return jax.tree.map(of, tree)
