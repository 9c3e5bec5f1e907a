# SPDX-License-Identifier: Apache-2.0
"""Moves among sets of included weights with all slabs integrated out: flips and swaps.

Correlated columns stand in for each other, so a draw of one pair given the slabs of the others
hardly ever trades one for the next. With the slabs integrated out it does: a sweep offers every
spike a flip, and a swap draws a new place for an included weight, its own among them (the moves of
add-delete-swap samplers).

**Exactness.** A flip and a swap are reversible for the collapsed posterior of the spikes restricted
to at most K included, whose bounds they never leave; the slabs are then drawn from their
conditional. Where more than K are included nothing moves at all. A kernel that keeps the posterior
on a set and stays in it, and is the identity outside, keeps the posterior. Alternated with
sweeps of single pairs, which know no bound, the two reach every set of spikes.

Arrays in, arrays out: this module knows no NumPyro. Weights are in the units of
:mod:`~numpyro_spikeslab.algebra.included`.
"""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra.included import (
    CHUNK,
    Included,
    Regression,
    add,
    gain,
    include,
    leaving,
    remove,
    take,
)
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.variates import normal, uniform

MAX_CAPACITY = 64
"""How many weights may be included where spikes move; :func:`default_capacity` of fewer."""


def default_capacity(size: int) -> int:
    """A quarter of the weights, since slots take time even where they are empty, but some at
    least."""
    return min(MAX_CAPACITY, max(MAX_CAPACITY // 2, size // 4))


def default_swaps(size: int) -> int:
    """Some, and more where a sweep of flips takes so long that they hardly count."""
    return min(32, max(8, size // 128))


class Numbers(NamedTuple):
    """Random numbers of a sweep with S swaps: uniform ones, and normal ones for the slabs.

    - **flips** - for the flips, their logs.
    - **order** - what is in the slots swaps in descending order of these.
    - **places** - for the new places.
    - **slabs** - for the slabs.
    """

    flips: Float[Array, " P"]
    order: Float[Array, " K"]
    places: Float[Array, " S"]
    slabs: Float[Array, " P"]

    @classmethod
    def draw(cls, key: Array, now: Included, num_swaps: int) -> "Numbers":
        """All in one call, for each takes as long to compile as a step of a sweep."""
        size, num_slots = now.spikes.size, now.slots.size
        ends = np.cumsum([size, num_slots, num_swaps])
        every = uniform(key, (int(ends[-1]) + size,), now.linear.dtype)
        *others, slabs = jnp.split(every, ends)
        flips, order, places = ((1 + x) / 2 for x in others)
        return cls(jnp.log(flips), order, places, normal(slabs))


class Move(NamedTuple):
    """What happens next in a sweep.

    - **leaves**, **enters** - which weights are excluded and included; P for none.
    - **slot** - from which and into which.
    - **start** - the first weight whose flip is still to come.
    - **swaps** - how many swaps are done.
    - **last** - where in their order the last one was.
    """

    leaves: Int[Array, ""]
    enters: Int[Array, ""]
    slot: Int[Array, ""]
    start: Int[Array, ""]
    swaps: Int[Array, ""]
    last: Float[Array, ""]

    def is_idle(self, size: int) -> Bool[Array, ""]:
        return (self.leaves == size) & (self.enters == size)


def next_flip(numbers: Numbers, prior: Prior, now: Included, done: Move) -> Move:
    """The next spike that flips (Metropolis), if any does.

    Between two flips nothing changes, so a sweep costs as much as the flips that happen, not as the
    weights that are visited. None is included beyond the number of slots.
    """
    size = now.spikes.size
    logits = now.logits(prior)
    ratio = jnp.where(now.spikes, -logits, logits)
    may = (now.spikes | (now.count < now.slots.size)) & (jnp.arange(size) >= done.start)
    flips = may & (ratio > numbers.flips)
    m = jnp.where(jnp.any(flips), jnp.argmax(flips), size)
    is_included = now.spikes.at[m].get(mode="fill", fill_value=False)
    leaves, enters = jnp.where(is_included, m, size), jnp.where(is_included, size, m)
    return done._replace(
        leaves=leaves, enters=enters, slot=jnp.argmax(now.slots == leaves), start=m + 1
    )


def next_swap(numbers: Numbers, prior: Prior, now: Included, done: Move) -> Move:
    """A new place for one of the included weights, drawn from all that are free and its own.

    All that are included have their turn, in an order that knows nothing of them, before one has
    its next.
    """
    size = now.spikes.size
    filled = now.slots < size
    waiting = filled & (numbers.order < done.last)
    order = jnp.where(jnp.where(jnp.any(waiting), waiting, filled), numbers.order, -1)
    slot = jnp.argmax(order)
    old = now.slots[slot]
    left = leaving(now, slot)
    logits = prior.log_odds + gain(left.linear, left.squares)
    taken = now.spikes & (jnp.arange(size) != old)
    # finite, for the odds of a weight that is certain to be included are not
    largest = jnp.finfo(logits.dtype).max
    logits = jnp.clip(jnp.where(taken, -largest, logits), -largest, largest)
    places = jnp.cumsum(jnp.exp(logits - jnp.max(logits)))
    new = jnp.sum(places < numbers.places[done.swaps] * places[-1])
    # where no place has any probability, any may be drawn: then it stays
    moves = (now.count > 0) & (new != old) & ~taken[new]
    leaves, enters = (jnp.where(moves, x, size) for x in (old, new))
    return Move(leaves, enters, slot, done.start, done.swaps + 1, order[slot])


def move(
    numbers: Numbers, problem: Regression, now: Included, moves: Any
) -> tuple[Included, Float[Array, " P"]]:
    """A sweep of flips, then swaps.

    All in one loop over what leaves and what enters, so that both are compiled once.

    :param moves: if not, nothing does.
    :return: the included weights; the sum of their :func:`given_spikes` where a swap began.
    """
    size, num_swaps, prior = now.spikes.size, numbers.places.size, problem.prior

    def is_open(event):
        return (event.start < size) | (event.swaps < num_swaps)

    def find(now, done):
        flip, swap = partial(next_flip, numbers, prior), partial(next_swap, numbers, prior)
        return lax.cond(done.start < size, flip, swap, now, done)

    def stay(now, event):
        return now, event

    def leave(now, event):
        return remove(now, event.slot), event._replace(leaves=none)

    def enter(now, event):
        row = problem.products(event.enters)
        return add(now, event.slot, event.enters, row), event._replace(enters=none)

    def turn(state):
        now, before, total = state
        # past all that changes nothing, the state is only read
        event = lax.while_loop(
            lambda event: event.is_idle(size) & is_open(event), partial(find, now), before
        )
        num_begun = event.swaps - before.swaps
        total += lax.cond(
            num_begun > 0,
            lambda: num_begun * given_spikes(prior, now),
            lambda: jnp.zeros_like(total),
        )
        which = jnp.where(event.leaves < size, 1, jnp.where(event.enters < size, 2, 0))
        return *lax.switch(which, (stay, leave, enter), now, event), total

    none, zero = jnp.array(size), jnp.zeros((), int)
    first = Move(none, none, zero, zero, zero, jnp.full((), jnp.inf, now.linear.dtype))
    return lax.while_loop(
        lambda state: moves & (is_open(state[1]) | ~state[1].is_idle(size)),
        turn,
        (now, first, jnp.zeros(size, now.linear.dtype)),
    )[::2]


def sweep(
    key: Array,
    problem: Regression,
    spikes: Int[Array, " P"],
    slabs: Float[Array, " P"],
    capacity: int | None = None,
    num_swaps: int | None = None,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """A sweep of flips, some swaps, and a draw of all slabs; the identity where more than
    ``capacity`` weights are included, or where precision does not suffice.

    :param key: random key.
    :param problem: the regression.
    :param spikes: current ones.
    :param slabs: current ones.
    :param capacity: how many may be included, K, rounded up to whole chunks; by default
        :func:`default_capacity`.
    :param num_swaps: how many swaps, at least one; by default :func:`default_swaps`.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (P,).
    """
    capacity = min(capacity or default_capacity(spikes.size), spikes.size)
    capacity += -capacity % min(CHUNK, capacity)
    bound = jnp.where(problem.is_precise(), capacity, -1)
    moves = jnp.sum(spikes) <= bound
    now = include(problem, moves & (spikes > 0), capacity)
    num_swaps = num_swaps or default_swaps(spikes.size)
    numbers = Numbers.draw(key, now, num_swaps)
    now, total = move(numbers, problem, now, moves)
    spikes = jnp.where(moves, now.spikes, spikes).astype(spikes.dtype)
    slabs = jnp.where(moves, slabs_given(numbers.slabs, problem, now), slabs)
    probs = lax.cond(
        moves,
        lambda: total / num_swaps,
        lambda: _given_weights(problem, spikes, slabs, bound),
    )
    return spikes, slabs, probs


def slabs_given(
    normal: Float[Array, " P"], problem: Regression, now: Included
) -> Float[Array, " P"]:
    """Slabs given the spikes: included ones from their posterior, others from their prior.

    :param normal: standard normal numbers.
    """
    drawn = (now.target + take(normal, now.slots)) @ now.root
    return jnp.sqrt(problem.prior.variance) * normal.at[now.slots].set(drawn, mode="drop")


# Rao-Blackwellised inclusion is the conditional of a spike in the part of the posterior, at most K
# included or more, that the spikes are in: so the mean over both parts is that of the spikes.


def given_spikes(prior: Prior, now: Included) -> Float[Array, " P"]:
    probs = nn.sigmoid(now.logits(prior))
    return jnp.where(now.spikes | (now.count < now.slots.size), probs, 0)


def _given_weights(
    problem: Regression, spikes: Int[Array, " P"], slabs: Float[Array, " P"], bound: Any
) -> Float[Array, " P"]:
    probs = nn.sigmoid(problem.pair_logits(spikes * slabs))
    return jnp.where((spikes > 0) & (jnp.sum(spikes) == bound + 1), 1, probs)
