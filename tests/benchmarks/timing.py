# SPDX-License-Identifier: Apache-2.0
"""Helpers of the benchmarks."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
from jax import random

from numpyro_spikeslab.fitting.ascent import begin


def enable_x64() -> None:
    jax.config.update("jax_enable_x64", True)


def seconds(function: Callable, *args: Any) -> float:
    """Wall time of one call, its results awaited."""
    start = perf_counter()
    jax.block_until_ready(function(*args))
    return perf_counter() - start


def before_first_step(svi: Any, *args: Any) -> tuple[Any, Any]:
    """The call of a fit and its progress before the first step, for ``advance``."""
    call = svi._call(args, {})
    return call, begin(call.spec, call.data, svi.init(random.key(0), *args).optim_state[1])


class Compilations:
    """Number of compilations since the start, and the seconds they took, tracing included."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, name: str, duration: float, **_: Any) -> None:
        if name.startswith("/jax/core/compile/"):
            self.seconds += duration
            self.count += "backend_compile" in name

    def left_out(self, function: Callable, *args: Any) -> tuple[Any, float]:
        """The results of one call, awaited, and its wall time without that of compilation."""
        before, start = self.seconds, perf_counter()
        found = jax.block_until_ready(function(*args))
        return found, perf_counter() - start - (self.seconds - before)


def best_time(function: Callable, *args: Any, repeats: int = 20) -> float:
    """Shortest of several calls, after one that compiles."""
    seconds(function, *args)
    return min(seconds(function, *args) for _ in range(repeats))
