# SPDX-License-Identifier: Apache-2.0
"""Schedules: the temperature of a fit, the learning rate of steps on batches."""

from typing import Any

import jax.numpy as jnp


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
    small from the beginning, for the start is a fit of a first batch, which a rate of 1 would
    forget.

    :param step: number of steps before this one.

    **Example**

    .. doctest::

        >>> import jax, numpyro_spikeslab as nss
        >>> phi, W, noise = (jax.random.normal(jax.random.key(k), s) for k, s in
        ...                  enumerate([(12, 2), (2, 90), (12, 90)]))
        >>> X, Y = jax.numpy.arange(12.0), phi @ W + 0.1 * noise
        >>> model = nss.models.mtmkl("white", 2, shared_noise=True)
        >>> guide = nss.PairedGuide(model)
        >>> svi = nss.CAVI(model, guide, plain=True, num_tasks=90)   # learning_rate=forgetting
        >>> state = svi.run(jax.random.key(3), 40, X, Y[:, :30], progress_bar=False).state
        >>> for first in (0, 30, 60):
        ...     state, loss = svi.update(state, X, Y[:, first : first + 30])
        >>> svi.get_params(state)["W_auto_loc"].shape          # of the last batch
        (30, 2)
    """
    return (10.0 + step) ** -0.7
