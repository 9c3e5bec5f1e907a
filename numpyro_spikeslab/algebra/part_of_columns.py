# SPDX-License-Identifier: Apache-2.0
"""Flips and swaps that visit a part of many columns.

Before the chain the data choose hot columns, which make one window wherever they are. All others
are cut into windows of neighbours, which are often alike, from a random start. Flips visit the hot
columns and the first windows. Swaps visit these and all windows with included weights, and a weight
stays in its window. Now and then a sweep visits all columns, since alike ones may be far apart.

**Exactness.** The cut does not depend on the spikes, nor do the hot columns, which stay the same.
No move changes which windows are visited: flips stay in those that always are, and a swap leaves
its window as full as it was. So, given the cut, a sweep is reversible. Which inclusion
probabilities it computes anew does not depend on the spikes either.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.active_set import CollapsedRegression, posterior_odds
from numpyro_spikeslab.algebra.flips import Numbers, Slots, Sweeps, sweep_in
from numpyro_spikeslab.algebra.pairs import Design, Prior, predictor, split_along

# Columns of a window, and windows that flips visit.
WINDOW = 64
NUM_FLIPPED = 16
# Share of sweeps over all columns: with 100,000 columns a quarter of the time of all steps.
SHARE_OF_ALL = 1 / 16
# Hot columns at most, picks that lead to them, and candidates at each.
NUM_HOT, NUM_PICKS, NUM_ALIKE = 1024, 32, 64


def hot_columns(problem: CollapsedRegression, basis: Float[Array, "C N"]) -> Int[Array, " H"]:
    """Choose hot columns by orthogonal matching pursuit: at each pick those with the best odds,
    given the residual of the picks before.

    :param basis: orthonormal rows that no residual contains, such as a basis of covariates.
    :return: their numbers, P for none.
    """
    size, first, squares = problem.scale.size, len(basis), problem.squares
    prior = problem.prior.at(jnp.zeros(size, bool))

    def pick(k, state):
        basis, residual, turns = state
        linear = problem._replace(target=residual).linear
        logits, precision = posterior_odds(prior, linear, squares)
        best = lax.top_k(logits - 0.5 * jnp.log(precision), min(NUM_ALIKE, size))[1]
        _, x = split_along(basis, problem.design.features[best[0]])
        x /= jnp.maximum(jnp.linalg.norm(x), jnp.finfo(x.dtype).tiny)
        new = basis.at[first + k].set(x), residual - (x @ residual) * x
        return *new, turns.at[best].min(k)

    _, residual = split_along(basis, problem.target)
    basis = jnp.pad(basis, ((0, NUM_PICKS), (0, 0)))
    start = basis, residual, jnp.full(size, NUM_PICKS)
    turns, hot = lax.top_k(-lax.fori_loop(0, NUM_PICKS, pick, start)[2], min(NUM_HOT, size))
    return jnp.where(turns > -NUM_PICKS, hot, size)


def visited(
    u: Float[Array, ""], hot: Int[Array, " H"], spikes: Int[Array, " P"], num_slots: int
) -> tuple[Any, Any]:
    """Cut the columns from a random start, and choose windows.

    With more than ``num_slots`` occupied windows the sweep is the identity: for it to see that,
    two more are chosen.

    :return: numbers of the columns, P for none, and of their windows, each of shape (R,): first
        the hot ones, in the window -1.
    """
    size, number = spikes.size, -(-spikes.size // WINDOW)
    is_hot = jnp.zeros(size, bool).at[hot].set(True, mode="drop")
    start = (u * size).astype(int)
    chosen = jnp.arange(number) < NUM_FLIPPED
    chosen = chosen.at[(jnp.arange(size) - start) % size // WINDOW].max((spikes > 0) & ~is_hot)
    windows = jnp.nonzero(chosen, size=NUM_FLIPPED + num_slots + 2, fill_value=number)[0]
    places = jnp.ravel(windows[:, None] * WINDOW + jnp.arange(WINDOW))
    columns = jnp.where(places < size, (places + start) % size, size)
    columns = jnp.where(is_hot.at[columns].get(mode="fill", fill_value=False), size, columns)
    windows = jnp.repeat(windows, WINDOW)
    return jnp.concatenate([hot, columns]), jnp.pad(windows, (hot.size, 0), constant_values=-1)


def sweep_some(
    part: Any, precision: Sweeps, numbers: Numbers, problem: CollapsedRegression, now: Any
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"], Slots]:
    """Make a :func:`~numpyro_spikeslab.algebra.flips.sweep_in`, of a part of the columns or,
    now and then, of all.

    :param part: a key for the choice of columns, and the hot ones; `None` for all columns.
    :param now: spikes, slabs and inclusion probabilities; the latter stay where no flip visits.
    """
    (spikes, slabs, _), prior = now, problem.prior

    def of_all():
        return sweep_in(precision, numbers, problem, spikes, slabs)

    def of_part():
        columns, windows = visited(u, hot, spikes, numbers.order.size)

        def take(x, fill=0):
            return x.at[columns].get(mode="fill", fill_value=fill)

        others = (spikes * slabs).at[columns].set(0, mode="drop")
        part = problem._replace(
            design=Design(problem.design.taken(columns)[None], None),
            gram=None,
            target=problem.target - predictor(problem.design, others),
            prior=Prior(take(prior.log_odds, -jnp.inf), take(prior.variance, 1)),
            windows=windows,
        )
        flipped = windows < NUM_FLIPPED
        some = numbers._replace(flips=take(numbers.flips), slabs=take(numbers.slabs))
        *new, slots = sweep_in(precision, some.flipping(flipped), part, take(spikes), take(slabs))
        places = columns, columns, jnp.where(flipped, columns, spikes.size)
        draws = zip(now, places, new, strict=True)
        slots = slots._replace(slots=jnp.append(columns, spikes.size)[slots.slots])
        return *(x.at[k].set(y, mode="drop") for x, k, y in draws), slots

    if part is None:
        return of_all()
    key, hot = part
    u, coin = random.uniform(key, (2,), problem.target.dtype)
    return lax.cond(coin < SHARE_OF_ALL, of_all, of_part)
