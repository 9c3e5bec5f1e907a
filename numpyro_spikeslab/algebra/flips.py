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

Weights are in the units of :mod:`~numpyro_spikeslab.algebra.active_set`.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra.active_set import (
    CHUNK,
    Included,
    Leaving,
    Regression,
    changed,
    entering,
    explained_by,
    include,
    is_precise,
    leaving,
    none_leaves,
    posterior_odds,
    take,
)
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.algebra.variates import index, logistic, normal, uniform

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
    """Random numbers of a sweep of single pairs, then of flips and S swaps among K slots: uniform
    ones unless said.

    - **pairs** - logistic and normal ones for the pairs.
    - **flips** - for the flips.
    - **order** - what is in the slots swaps in the order of these.
    - **places** - for the new places.
    - **slabs** - normal ones for the slabs.
    """

    pairs: tuple[Float[Array, " P"], Float[Array, " P"]]
    flips: Float[Array, " P"]
    order: Float[Array, " K"]
    places: Float[Array, " S"]
    slabs: Float[Array, " P"]

    @classmethod
    def draw(
        cls,
        key: Array,
        weights: Float[Array, " P"],
        capacity: int | None = None,
        num_swaps: int | None = None,
    ) -> "Numbers":
        """All in one call, for each takes as long as a dozen flips.

        :param key: random key.
        :param weights: for their number and their type.
        :param capacity: how many may be included, K, rounded up to whole chunks; by default
            :func:`default_capacity`.
        :param num_swaps: how many swaps, S, at least one; by default :func:`default_swaps`.
        """
        size = weights.size
        capacity = min(capacity or default_capacity(size), size)
        capacity += -capacity % min(CHUNK, capacity)
        num_swaps = num_swaps or default_swaps(size)
        ends = np.cumsum([size, 2 * size, size, capacity])
        every = uniform(key, (int(ends[-1]) + num_swaps,), weights.dtype)
        spikes, slabs, *others = jnp.split(every, ends)
        pair_slabs, slabs = normal(slabs.reshape(2, size))
        flips, order, places = ((1 + x) / 2 for x in others)
        return cls((logistic(spikes), pair_slabs), flips, order, places, slabs)


class Move(NamedTuple):
    """What happens next in a sweep.

    - **slot** - which slot changes; K for none.
    - **leaves**, **enters** - which weights are excluded and included; P for none.
    - **start** - the first weight whose flip is still to come.
    - **swaps** - how many swaps are done.
    """

    slot: Int[Array, ""]
    leaves: Int[Array, ""]
    enters: Int[Array, ""]
    start: Int[Array, ""]
    swaps: Int[Array, ""]


def next_flip(numbers: Numbers, prior: Prior, now: Included, start: Any, swaps: Any) -> Move:
    """The next spike that flips (Metropolis), if any does.

    Between two flips nothing changes, so a sweep costs as much as the flips that happen, not as the
    weights that are visited. None is included beyond the number of slots.
    """
    size, num_slots = now.spikes.size, now.slots.size
    every, may_enter = jnp.arange(size), ~now.spikes & ~jnp.all(now.filled)
    flips = may_enter & (every >= start) & (now.outside(prior) > numbers.flips)
    first_in = jnp.min(jnp.where(flips, every, size))
    flips = now.filled & (now.slots >= start)
    flips &= take(numbers.flips, now.slots) * now.inside(prior) < 1
    first_out = jnp.min(jnp.where(flips, now.slots, size))
    m, leaves = jnp.minimum(first_in, first_out), first_out < first_in
    slot = jnp.argmax(now.slots == jnp.where(leaves, m, size))
    return Move(
        jnp.where(m < size, slot, num_slots),
        jnp.where(leaves, m, size),
        jnp.where(leaves, size, m),
        m + 1,
        swaps,
    )


def next_swap(
    numbers: Numbers, prior: Prior, now: Included, start: Any, swaps: Any
) -> tuple[Move, Leaving]:
    """A new place for one of the included weights, drawn from all that are free and its own: the
    next that is not its own, if there is one among the swaps still to come.

    All that are included have their turn, in an order that knows nothing of them, before one has
    its next. Between two that move nothing changes.
    """
    size, num_slots, num_swaps = now.spikes.size, now.slots.size, numbers.places.size
    rank = jnp.sum(now.filled & (numbers.order < numbers.order[:, None]), axis=1)
    count = jnp.sum(now.filled)
    none = Move(*map(jnp.asarray, (num_slots, size, size, start, swaps)))

    def look(state):
        turn = state[0].swaps
        slot = jnp.argmax(now.filled & (rank == turn % jnp.maximum(count, 1)))
        old, left = now.slots[slot], leaving(now, slot)
        new, is_free = _new_place(numbers.places[turn], prior, now, left, old)
        moves = (count > 0) & (new != old) & is_free
        found = Move(slot, old, new, start, turn)
        found = choose(moves, found, none)
        return found._replace(swaps=turn + 1), left

    def is_open(state):
        move, _ = state
        # where chains run side by side, those come here as well that have flips to come
        return (move.slot == num_slots) & (move.swaps < num_swaps) & (start >= size)

    move, left = lax.while_loop(is_open, look, (none, none_leaves(now)))
    return move, jax.tree.map(lambda x: jnp.where(move.slot < num_slots, x, 0), left)


def _new_place(
    u: Float[Array, ""], prior: Prior, now: Included, left: Leaving, old: Int[Array, ""]
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Where a weight that leaves comes back.

    :param u: a uniform number.
    :param left: what leaves.
    :param old: its place.
    :return: the place; whether it is free.
    """
    linear, squares = explained_by(left.row, now.spikes.size)
    logits, precision = posterior_odds(prior, now.linear + linear, now.squares + squares)
    taken = now.spikes & (jnp.arange(now.spikes.size) != old)
    # finite, for the odds of a weight that is certain to be included are not
    largest = jnp.finfo(logits.dtype).max
    logits = jnp.clip(jnp.where(taken, -largest, logits), -largest, largest)
    new = index(u, jnp.exp(logits - jnp.max(logits)) / jnp.sqrt(precision))
    # where no place has any probability, any may be drawn: then it stays
    return new, ~taken[new]


def move(
    numbers: Numbers, problem: Regression, now: Included
) -> tuple[Included, Float[Array, " P"]]:
    """A sweep of flips, then swaps.

    All in one loop over what leaves and what enters, so that both are compiled once. XLA makes it a
    single kernel where its arrays are small, as long as nothing in it scatters, sorts or calls a
    library; otherwise what each operation costs to start is most of a step.

    :return: the included weights; the sum of their :func:`given_spikes` where a swap began.
    """
    size, num_swaps, prior = now.spikes.size, numbers.places.size, problem.prior

    def is_open(state):
        _, start, swaps, _ = state
        return (start < size) | (swaps < num_swaps)

    def flip(now, start, swaps):
        new = next_flip(numbers, prior, now, start, swaps)
        left = lax.cond(new.leaves < size, lambda: leaving(now, new.slot), lambda: none_leaves(now))
        return new, left, jnp.zeros(size, now.linear.dtype)

    def swap(now, start, swaps):
        new, left = next_swap(numbers, prior, now, start, swaps)
        return new, left, (new.swaps - swaps) * given_spikes(prior, now)

    def turn(state):
        now, start, swaps, total = state
        new, left, probs = lax.cond(start < size, flip, swap, now, start, swaps)
        row = lax.cond(
            new.enters < size,
            lambda: entering(now, left, new.slot, new.enters, problem.products(new.enters)),
            lambda: jnp.zeros_like(left.row),
        )
        return changed(now, left, row, *new[:3]), new.start, new.swaps, total + probs

    state = now, jnp.asarray(0), jnp.asarray(0), jnp.zeros(size, now.linear.dtype)
    return lax.while_loop(is_open, turn, state)[::3]


def sweep(
    numbers: Numbers,
    problem: Regression,
    spikes: Int[Array, " P"],
    slabs: Float[Array, " P"],
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """A sweep of flips, some swaps, and a draw of all slabs; the identity where more weights are
    included than there are slots, or where precision does not suffice.

    :param numbers: random ones.
    :param problem: the regression.
    :param spikes: current ones.
    :param slabs: current ones.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (P,).
    """
    capacity, start = numbers.order.size, (problem.linear, problem.squares)
    bound = jnp.where(is_precise(*start), capacity, -1)
    moves = jnp.sum(spikes) <= bound

    def moved():
        # where chains run side by side, those come here as well in which nothing moves
        now = include(problem, start, moves & (spikes > 0), capacity)
        now, total = move(numbers, problem, now)
        slabs = slabs_given(numbers.slabs, problem, now)
        return now.spikes.astype(spikes.dtype), slabs, total / numbers.places.size

    def stayed():
        return spikes, slabs, _given_weights(problem, spikes, slabs, bound)

    return lax.cond(moves, moved, stayed)


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
    probs = 1 / (1 + 1 / now.odds(prior))
    return jnp.where(now.spikes | ~jnp.all(now.filled), probs, 0)


def _given_weights(
    problem: Regression, spikes: Int[Array, " P"], slabs: Float[Array, " P"], bound: Any
) -> Float[Array, " P"]:
    probs = nn.sigmoid(problem.pair_logits(spikes * slabs))
    return jnp.where((spikes > 0) & (jnp.sum(spikes) == bound + 1), 1, probs)
