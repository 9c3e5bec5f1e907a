# SPDX-License-Identifier: Apache-2.0
"""Flips and swaps that visit a part of many columns.

Columns are cut into windows of neighbours, which are often alike, from a random start. Flips visit
the first windows. Swaps visit these and all windows with included weights, and a weight stays in
its window. Now and then a sweep visits all columns, since columns that are alike may be far apart.

**Exactness.** The cut does not depend on the spikes. No move changes which windows are visited:
flips stay in the first ones, and a swap leaves its window as full as it was. So, given the cut, a
sweep is reversible. Which inclusion probabilities it computes anew does not depend on the spikes
either.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.active_set import CollapsedRegression
from numpyro_spikeslab.algebra.flips import Numbers, Sweeps, sweep_in
from numpyro_spikeslab.algebra.pairs import Prior, predictor

# Columns of a window, and windows that flips visit.
WINDOW = 64
NUM_FLIPPED = 16
# Share of sweeps over all columns: with 100,000 columns a quarter of the time of all steps.
SHARE_OF_ALL = 1 / 16


def visited(u: Float[Array, ""], spikes: Int[Array, " P"], num_slots: int) -> tuple[Any, Any]:
    """Cut the columns from a random start, and choose windows.

    With more than ``num_slots`` occupied windows the sweep is the identity: for it to see that,
    two more are chosen.

    :return: numbers of the columns, P for none, and of their windows, each of shape (R,).
    """
    size, number = spikes.size, -(-spikes.size // WINDOW)
    start = (u * size).astype(int)
    chosen = jnp.arange(number) < NUM_FLIPPED
    chosen = chosen.at[(jnp.arange(size) - start) % size // WINDOW].max(spikes > 0)
    windows = jnp.nonzero(chosen, size=NUM_FLIPPED + num_slots + 2, fill_value=number)[0]
    places = jnp.ravel(windows[:, None] * WINDOW + jnp.arange(WINDOW))
    return jnp.where(places < size, (places + start) % size, size), jnp.repeat(windows, WINDOW)


def sweep_some(
    key: Any, precision: Sweeps, numbers: Numbers, problem: CollapsedRegression, now: Any
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """Make a :func:`~numpyro_spikeslab.algebra.flips.sweep_in`, of a part of the columns or,
    now and then, of all.

    :param key: for the choice of columns; `None` for all columns.
    :param now: spikes, slabs and inclusion probabilities; the latter stay where no flip visits.
    """
    (spikes, slabs, _), prior = now, problem.prior

    def of_all():
        return sweep_in(precision, numbers, problem, spikes, slabs)

    def of_part():
        columns, windows = visited(u, spikes, numbers.order.size)

        def take(x, fill=0):
            return x.at[columns].get(mode="fill", fill_value=fill)

        others = (spikes * slabs).at[columns].set(0, mode="drop")
        part = problem._replace(
            design=problem.design._replace(rows=take(problem.design.features)[None], gram=None),
            gram=None,
            target=problem.target - predictor(problem.design, others),
            prior=Prior(take(prior.log_odds, -jnp.inf), take(prior.variance, 1)),
            windows=windows,
        )
        flipped = windows < NUM_FLIPPED
        some = numbers._replace(flips=take(numbers.flips), slabs=take(numbers.slabs))
        new = sweep_in(precision, some.flipping(flipped), part, take(spikes), take(slabs))
        places = columns, columns, jnp.where(flipped, columns, spikes.size)
        return tuple(x.at[k].set(y, mode="drop") for x, k, y in zip(now, places, new, strict=True))

    if key is None:
        return of_all()
    u, coin = random.uniform(key, (2,), problem.target.dtype)
    return lax.cond(coin < SHARE_OF_ALL, of_all, of_part)
