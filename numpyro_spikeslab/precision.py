# SPDX-License-Identifier: Apache-2.0
"""Products of matrices in the precision of their entries, on all devices."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import jax

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
