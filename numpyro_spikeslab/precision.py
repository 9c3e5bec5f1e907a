# SPDX-License-Identifier: Apache-2.0
"""Products of matrices in the precision of their entries, on all devices."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")


def full_precision(call: Callable[P, R]) -> Callable[P, R]:
    """A decorator of what users call; what NumPyro compiles stays as it is.

    GPUs since Ampere and TPUs round the float32 entries of a product to some ten bits unless it
    asks for more. Products of features, so rounded, are those of other features: bounds rise and
    fall by hundreds of nats.
    """

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        # a new context for each call: JAX 0.10.0 forgets what was before one that is entered twice
        with jax.default_matmul_precision("float32"):
            return call(*args, **kwargs)

    return called
