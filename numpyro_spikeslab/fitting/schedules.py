# SPDX-License-Identifier: Apache-2.0
"""Schedules: the temperature of a fit, the learning rate of steps on batches."""

from typing import Any

import jax.numpy as jnp

from numpyro_spikeslab.support.messages import bad


def annealing(step: Any) -> Any:
    """Return the default temperature of a step: ``20 * 0.97**step`` until it is 1, at step 99.

    Until then sites that shape the prior of the weights, such as the inclusion probability, stay at
    their start. Hot steps forget the start: on the Boston housing data plain updates select several
    models, annealed ones always the same.

    :param step: number of steps before this one.
    :return: the temperature, which divides the logits of the inclusion probabilities.

    >>> import numpyro_spikeslab as nss
    >>> [round(float(nss.annealing(step)), 1) for step in (0, 50, 99)]
    [20.0, 4.4, 1.0]
    """
    return jnp.maximum(20.0 * 0.97**step, 1.0)


def forgetting(step: Any) -> Any:
    """Return the default rate of a step on a batch: ``(10 + step) ** -0.7``, 0.2 at the first.

    Its sum is infinite and its sum of squares finite, so steps end at an optimum. It begins small,
    for a rate of 1 would forget the start, a fit of a first batch.

    :param step: number of steps before this one.
    :return: the rate, the weight of the batch among all so far.
    """
    return (10.0 + step) ** -0.7


def check_schedule(name: str, schedule: Any) -> None:
    """Raise if an argument of CAVI is neither a schedule nor `None`."""
    if schedule is not None and not callable(schedule):
        remedy = f"For a constant one write `lambda step: {schedule!r}`."
        raise bad(f"CAVI: {name}", repr(schedule), "a function of the step", remedy)
