# SPDX-License-Identifier: Apache-2.0
"""Helpers of the benchmarks: times without compilation, and rows of the page's tables."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax

HEADER = "| problem | measured | numpyro_spikeslab | compared with | ratio |\n" + 5 * "| --- " + "|"


def row(problem: str, measured: str, ours: float, peer: str, theirs: float, ratio: float) -> None:
    """Print a row; above a ratio of 1, ours is better. `itself: ...` is a peer of this package."""
    numbers = (f"{float(f'{x:.3g}'):,.10g}" for x in (ours, theirs, ratio))
    ours, theirs, ratio = numbers
    print(f"| {problem} | {measured} | {ours} | {peer} {theirs} | {ratio} |", flush=True)


def enable_x64() -> None:
    jax.config.update("jax_enable_x64", True)


class Compilations:
    """The seconds that compilations have taken since the start, tracing included."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, name: str, duration: float, **_: Any) -> None:
        if name.startswith("/jax/core/compile/"):
            self.seconds += duration

    def left_out(self, function: Callable, *args: Any) -> tuple[Any, float]:
        """The results of one call, awaited, and its wall time without that of compilation."""
        before, start = self.seconds, perf_counter()
        result = jax.block_until_ready(function(*args))
        return result, perf_counter() - start - (self.seconds - before)


def best_time(function: Callable, *args: Any, repeats: int = 20) -> float:
    """Shortest wall time of several calls, results awaited, after one that compiles."""
    times = []
    for _ in range(1 + repeats):
        start = perf_counter()
        jax.block_until_ready(function(*args))
        times.append(perf_counter() - start)
    return min(times[1:])
