# SPDX-License-Identifier: Apache-2.0
"""Computations in full or in double precision, whatever the defaults of JAX are."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax import export
from jax.custom_batching import custom_vmap
import jax.experimental
import jax.numpy as jnp

from numpyro_spikeslab.support.compiled import kept_code

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that its matrix products use full float32 precision.

    GPUs since Ampere and TPUs round entries to ten bits: bounds are wrong by hundreds of nats.
    """

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        # a new context for each call, since JAX 0.10.0 cannot enter one context twice
        with jax.default_matmul_precision("float32"):
            return call(*args, **kwargs)

    return called


def double_precision() -> Any:
    """Return a context in which this thread computes in float64; the user's setting is put back."""
    # JAX 0.7 has it elsewhere
    place: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    return place.enable_x64(True)


def in_double_precision(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function that takes and returns no arrays of JAX, to compute in float64 by
    code that is compiled once for all processes."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with double_precision(), kept_code():
            return call(*args, **kwargs)

    return called


def within_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of arrays compute in float64 within a program in float32.

    A program of JAX has one precision. So the function is a program of its own, an export, which
    the other calls.
    """
    wide, single = {"float32": float}, {"float64": jnp.float32, "int64": jnp.int32}

    def widened(*args: Any) -> Any:
        out = function(*jax.tree.map(lambda x: x.astype(wide.get(x.dtype.name, x.dtype)), args))
        return jax.tree.map(lambda x: x.astype(single.get(x.dtype.name, x.dtype)), out)

    @custom_vmap
    def called(*args: Any) -> Any:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        platforms = sorted({"cpu", export.default_export_platform()})
        with double_precision():
            exported = export.export(jax.jit(widened), platforms=platforms)(*shapes)
        return exported.call(*args)

    @called.def_vmap
    def batched(size: int, in_batched: Any, *args: Any) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(in_batched))
        out = within_single(jax.vmap(function, axes, axis_size=size))(*args)
        return out, jax.tree.map(lambda _: True, out)

    return called
