# SPDX-License-Identifier: Apache-2.0
"""Computations in full or in double precision, whatever the defaults of JAX are."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.experimental

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
    """Decorate a public function that takes and returns no arrays of JAX, to compute in float64."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with double_precision():
            return call(*args, **kwargs)

    return called
