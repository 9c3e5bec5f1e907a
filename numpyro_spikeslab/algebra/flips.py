# SPDX-License-Identifier: Apache-2.0
"""Flips and swaps of spikes with all slabs integrated out.

Given the slabs of the others, correlated columns hardly ever trade places; with the slabs
integrated out they do (add-delete-swap samplers).

**Exactness.** Flips and swaps are reversible for the collapsed posterior restricted to at most K
included weights, and never leave this set; the slabs are then drawn from their conditional. Outside
of the set the kernel is the identity. Such a kernel keeps the posterior. Alternated with sweeps of
single pairs, which are not bounded, it reaches every set of spikes.

By a fair coin either flips go up, then come swaps, or swaps come first, then flips go down. Each is
the other in reverse, so a sweep is reversible too, as the proposal of a Metropolis step has to be.

Weights are in the units of :mod:`~numpyro_spikeslab.algebra.active_set`.
"""

from enum import Enum
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra.active_set import (
    CHUNK,
    ActiveSet,
    CollapsedRegression,
    Removal,
    entries_of,
    explained_by,
    include,
    is_precise,
    no_removal,
    posterior_odds,
    removal_of,
    row_of,
    updated,
)
from numpyro_spikeslab.algebra.heredity import AnyPrior
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.algebra.variates import index, normal, uniform
from numpyro_spikeslab.support.precision import within_single

# Most included weights for flips and swaps.
MAX_CAPACITY = 64

# Swaps that are made in any case; beyond, a sweep makes at most two for each included weight.
LEAST_SWAPS = 8


def num_slots(size: int, capacity: int | None = None) -> int:
    """Return the number of slots, which whole chunks fill: by default for a quarter of the weights
    within bounds, since empty slots cost time."""
    capacity = min(capacity or min(MAX_CAPACITY, max(MAX_CAPACITY // 2, size // 4)), size)
    return capacity + -capacity % min(CHUNK, capacity)


class Numbers(NamedTuple):
    """Random numbers of flips and S swaps among K slots.

    - **flips** - uniform numbers of the flips.
    - **down** - whether swaps come first, and flips go down.
    - **order** - uniform numbers in the order of the swaps.
    - **places** - uniform numbers of the new places.
    - **slabs** - normal numbers.
    """

    flips: Float[Array, " P"]
    down: Bool[Array, ""]
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
        """Draw all numbers in one call, since each call takes as long as a dozen flips.

        :param capacity: number of slots K, by default that of :func:`num_slots`.
        :param num_swaps: number of swaps S; by default more where a sweep of flips takes long.
        """
        size = weights.size
        capacity = num_slots(size, capacity)
        num_swaps = num_swaps or min(32, max(LEAST_SWAPS, size // 128))
        ends = np.cumsum([size, 1, size, capacity])
        numbers = uniform(key, (int(ends[-1]) + num_swaps,), weights.dtype)
        slabs, coin, *others = jnp.split(numbers, ends)
        flips, order, places = ((1 + x) / 2 for x in others)
        return cls(flips, coin[0] > 0, order, places, normal(slabs))

    def flipping(self, which: Bool[Array, " P"] | Bool[np.ndarray, " P"]) -> "Numbers":
        """Let flips visit only some weights: no odds reach the numbers of the others."""
        return self._replace(flips=jnp.where(which, self.flips, jnp.inf))

    def num_swaps(self, active: ActiveSet) -> Int[Array, ""]:
        """Return how many swaps are made, which no swap changes."""
        enough = jnp.maximum(2 * jnp.sum(active.filled), LEAST_SWAPS)
        return jnp.minimum(enough, self.places.size)


class Move(NamedTuple):
    """Next change in a sweep.

    - **slot** - the slot that changes; K for none.
    - **leaves**, **enters** - numbers of the weights that leave and enter; P for none.
    """

    slot: Int[Array, ""]
    leaves: Int[Array, ""]
    enters: Int[Array, ""]


class Slots(NamedTuple):
    """The slabs of included weights given all spikes, in K slots and in units of their prior,
    before and after a sweep: with standard normal numbers n, ``(target + n) @ root`` is a draw.

    - **slots** - number of the weight in each slot; P where it is empty.
    """

    slots: Int[Array, "2 K"]
    target: Float[Array, "2 K"]
    root: Float[Array, "2 K K"]


def next_flip(
    numbers: Numbers, prior: Prior, active: ActiveSet, start: Any
) -> tuple[Move, Int[Array, ""]]:
    """Find the next spike whose flip is accepted (Metropolis), if there is one.

    Between two accepted flips the odds stay the same, so only these cost time. A weight enters only
    if a slot is empty.

    :param start: position in the order of the visits to go on from; also returned for the flip
        after it.
    """
    size, num_slots = active.spikes.size, active.slots.size

    def mirrored(x):
        """Turn weights into their turns, and back."""
        return jnp.where(numbers.down & (x < size), size - 1 - x, x)

    turns, may_enter = mirrored(jnp.arange(size)), ~active.spikes & ~jnp.all(active.filled)
    flips = may_enter & (turns >= start) & (active.outside(prior) > numbers.flips)
    first_in = jnp.min(jnp.where(flips, turns, size))
    turns = mirrored(active.slots)
    flips = active.filled & (turns >= start)
    flips &= entries_of(numbers.flips, active.slots) * active.inside(prior) < 1
    first_out = jnp.min(jnp.where(flips, turns, size))
    turn, leaves = jnp.minimum(first_in, first_out), first_out < first_in
    m = mirrored(turn)
    slot = jnp.argmax(active.slots == jnp.where(leaves, m, size))
    slot = jnp.where(m < size, slot, num_slots)
    return Move(slot, jnp.where(leaves, m, size), jnp.where(leaves, size, m)), turn + 1


def next_swap(
    numbers: Numbers, problem: CollapsedRegression, active: ActiveSet, is_turn: Any, turn: Any
) -> tuple[Move, Int[Array, ""], Removal]:
    """Find the next swap that changes the place of an included weight, if there is one.

    A swap draws the place anew from all free places and the weight's own, or those of its window.
    The weights take turns, in an order that is independent of them.

    :param is_turn: of swaps; under vmap both branches run, also where it is the turn of flips.
    :param turn: number of swaps that are done, which is also returned.
    """
    size, num_slots, num_swaps = active.spikes.size, active.slots.size, numbers.num_swaps(active)
    rank = jnp.sum(active.filled & (numbers.order < numbers.order[:, None]), axis=1)
    count = jnp.sum(active.filled)
    none = Move(*map(jnp.asarray, (num_slots, size, size)))

    def look(state):
        _, turn, _ = state
        slot = jnp.argmax(active.filled & (rank == turn % jnp.maximum(count, 1)))
        old, removal = active.slots[slot], removal_of(active, slot)
        new, is_free = _new_place(numbers.places[turn], problem, active, removal, old)
        moves = (count > 0) & (new != old) & is_free
        return choose(moves, Move(slot, old, new), none), turn + 1, removal

    def is_open(state):
        move, turn, _ = state
        return (move.slot == num_slots) & (turn < num_swaps) & is_turn

    move, turn, removal = lax.while_loop(is_open, look, (none, turn, no_removal(active)))
    return move, turn, jax.tree.map(lambda x: jnp.where(move.slot < num_slots, x, 0), removal)


def _new_place(
    u: Float[Array, ""],
    problem: CollapsedRegression,
    active: ActiveSet,
    removal: Removal,
    old: Int[Array, ""],
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Draw where a weight, removed from its ``old`` place, returns; and whether this is free."""
    linear, squares = explained_by(removal.row, active.spikes.size)
    occupied = active.spikes & (jnp.arange(active.spikes.size) != old)
    linear, squares = active.linear + linear, active.squares + squares
    logits, precision = posterior_odds(problem.prior.at(occupied), linear, squares)
    if (windows := problem.windows) is not None:
        occupied |= windows != windows[old]
    # the log odds of a weight that is certain to be included are infinite
    largest = jnp.finfo(logits.dtype).max
    logits = jnp.clip(jnp.where(occupied, -largest, logits), -largest, largest)
    new = index(u, jnp.exp(logits - jnp.max(logits)) / jnp.sqrt(precision))
    # if no place has any probability, the draw may be an occupied one
    return new, ~occupied[new]


def move(
    numbers: Numbers, problem: CollapsedRegression, active: ActiveSet
) -> tuple[ActiveSet, Float[Array, " P"]]:
    """Make a sweep of flips, then swaps, or both in reverse.

    Both are in one loop, so that removal and entry are compiled once. XLA makes the loop a single
    kernel for small arrays, as long as it has no scatter, sort or library call.

    :return: the active set, and the mean of :func:`given_spikes` over the starts of the swaps.
    """
    size, prior, last = active.spikes.size, problem.prior, numbers.places.size

    def is_open(state):
        _, start, swaps, _ = state
        return (start < size) | (swaps < last)

    def flip(active, start, swaps):
        new, start = next_flip(numbers, prior.at(active.spikes), active, start)
        removal = lax.cond(
            new.leaves < size, lambda: removal_of(active, new.slot), lambda: no_removal(active)
        )
        return new, start, swaps, removal, jnp.zeros(size, active.linear.dtype)

    def is_flip(start, swaps):
        return jnp.where(numbers.down, swaps >= last, start < size)

    def swap(active, start, swaps):
        is_turn = ~is_flip(start, swaps)
        new, turn, removal = next_swap(numbers, problem, active, is_turn, swaps)
        number = numbers.num_swaps(active)
        probs = given_spikes(prior, active) * (turn - swaps) / number.astype(active.linear.dtype)
        # flips that follow change the number
        return new, start, jnp.where(turn < number, turn, last), removal, probs

    def turn(state):
        active, start, swaps, total = state
        new, start, swaps, removal, probs = lax.cond(
            is_flip(start, swaps), flip, swap, active, start, swaps
        )
        row = lax.cond(
            new.enters < size,
            lambda: row_of(active, removal, new.slot, new.enters, problem.products(new.enters)),
            lambda: jnp.zeros_like(removal.row),
        )
        return updated(active, removal, row, *new), start, swaps, total + probs

    state = active, jnp.asarray(0), jnp.asarray(0), jnp.zeros(size, active.linear.dtype)
    return lax.while_loop(is_open, turn, state)[::3]


def sweep(
    numbers: Numbers,
    problem: CollapsedRegression,
    spikes: Int[Array, " P"],
    slabs: Float[Array, " P"],
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"], Slots]:
    """Make a sweep of flips, some swaps, and a draw of all slabs, which is reversible.

    It is the identity where more weights are included than there are slots, or where rounding would
    decide the flips.

    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (P,);
        and the slots, all empty where it is the identity.
    """
    capacity, start = numbers.order.size, (problem.linear, problem.squares)
    bound = jnp.where(is_precise(*start), capacity, -1)
    moves = jnp.sum(spikes) <= bound

    def moved():
        # under vmap both branches run, also for chains that must not move
        old = include(problem, start, moves & (spikes > 0), capacity)
        active, probs = move(numbers, problem, old)
        slabs = slabs_given(numbers.slabs, problem, active)
        ends = ((x.slots, x.target, x.root) for x in (old, active))
        slots = Slots(*map(jnp.stack, zip(*ends, strict=True)))
        return active.spikes.astype(spikes.dtype), slabs, probs, slots

    def stayed():
        zero = jnp.zeros((2, capacity, capacity), start[0].dtype)
        slots = Slots(jnp.full(zero.shape[:2], spikes.size), zero[:, 0], zero)
        return spikes, slabs, _given_weights(problem, spikes, slabs, bound), slots

    return lax.cond(moves, moved, stayed)


@jax.tree_util.register_static
class Sweeps(Enum):
    """The precision of sweeps: as the program, double, or as the numbers require."""

    AS_PROGRAM = 0
    DOUBLE = 1
    AS_REQUIRED = 2


def sweep_in(
    precision: Sweeps,
    numbers: Numbers,
    problem: CollapsedRegression,
    spikes: Int[Array, " P"],
    slabs: Float[Array, " P"],
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"], Slots]:
    """Make a :func:`sweep`; in double precision the program's must be single."""

    def double():
        # products of features in single precision have lost their differences
        design = problem.design._replace(gram=None)
        exact = problem._replace(design=design, gram=None)
        return within_single(sweep)(numbers, exact, spikes, slabs)

    def single():
        return sweep(numbers, problem, spikes, slabs)

    if precision == Sweeps.AS_REQUIRED:
        return lax.cond(is_precise(problem.linear, problem.squares), single, double)
    return double() if precision == Sweeps.DOUBLE else single()


def slabs_given(
    normal: Float[Array, " P"], problem: CollapsedRegression, active: ActiveSet
) -> Float[Array, " P"]:
    """Draw included slabs from their posterior, and excluded ones from their prior."""
    drawn = (active.target + entries_of(normal, active.slots)) @ active.root
    return jnp.sqrt(problem.prior.variance) * normal.at[active.slots].set(drawn, mode="drop")


# A Rao-Blackwellised inclusion probability is the conditional of a spike given the others and
# whether at most K weights are included, or more. Its mean over the draws stays the spike's mean.


def given_spikes(prior: AnyPrior, active: ActiveSet) -> Float[Array, " P"]:
    """Compute the inclusion probability of each weight given all other spikes."""
    probs = 1 / (1 + 1 / active.odds(prior.at(active.spikes)))
    return jnp.where(active.spikes | ~jnp.all(active.filled), probs, 0)


def _given_weights(
    problem: CollapsedRegression, spikes: Int[Array, " P"], slabs: Float[Array, " P"], bound: Any
) -> Float[Array, " P"]:
    probs = nn.sigmoid(problem.pair_logits(spikes * slabs))
    return jnp.where((spikes > 0) & (jnp.sum(spikes) == bound + 1), 1, probs)
