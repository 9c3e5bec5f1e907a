# SPDX-License-Identifier: Apache-2.0
"""Schedules: the temperature of a fit, the learning rate of steps on batches."""

from typing import Any

import jax.numpy as jnp

from numpyro_spikeslab.messages import bad


def annealing(step: Any) -> Any:
    """Default temperature of a step: ``20 * 0.97**step`` until it reaches 1, at step 99.

    Starting hot takes away the dependence on the start: on the Boston housing data the plain
    updates select several different models, the annealed ones always the same.

    :param step: number of steps before this one.
    :return: what divides the logits of the inclusion probabilities, at least 1.
    """
    return jnp.maximum(20.0 * 0.97**step, 1.0)


def forgetting(step: Any) -> Any:
    """Default learning rate of a step on a batch: ``(10 + step) ** -0.7``, 0.2 at the first.

    Its sum is infinite and that of its squares is finite, so that steps end at an optimum. It is
    small from the beginning, for a rate of 1 would forget the start, a fit of a first batch.

    :param step: number of steps before this one.
    """
    return (10.0 + step) ** -0.7


def check_schedule(name: str, schedule: Any) -> None:
    """Raise if an argument of CAVI is neither a schedule nor `None`."""
    if schedule is not None and not callable(schedule):
        remedy = f"For a constant one write `lambda step: {schedule!r}`."
        raise bad(f"CAVI: {name}", repr(schedule), "a function of the step", remedy)
