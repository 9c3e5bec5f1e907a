# SPDX-License-Identifier: Apache-2.0
"""Moves among sets of included weights with all slabs integrated out: flips and swaps.

Correlated columns stand in for each other, so a draw of one pair given the slabs of the others
hardly ever trades one for the next. With the slabs integrated out it does: a sweep offers every
spike a flip, and a swap draws a new place for an included weight, its own among them (the moves of
add-delete-swap samplers). A move costs :math:`O(K P)` for K included weights, and an inclusion one
product with the design; nothing of shape (P, P) is needed.

**Exactness.** A flip and a swap are reversible for the collapsed posterior of the spikes restricted
to at most K included, whose bounds they never leave; the slabs are then drawn from their
conditional. Where more than K are included nothing moves at all. A kernel that keeps the posterior
on a set and stays in it, and is the identity outside, keeps the posterior. Alternated with
sweeps of single pairs, which know no bound, the two reach every set of spikes.

Arrays in, arrays out: this module knows no NumPyro. Inside, weights are in units of their slabs'
standard deviations and the noise in units of its own, so all prior variances are 1.
"""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import lax, nn
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Prior, coordinates, pad

MAX_CAPACITY = 64
"""How many weights may be included where spikes move; :func:`default_capacity` of fewer."""


# Weights that are put into slots at once, before a sweep.
CHUNK = 16

# Relative rounding error, times squared signal to noise ratio, above which flips would be decided
# by rounding.
MAX_ROUNDING = 0.05


def default_capacity(size: int) -> int:
    """A quarter of the weights, since slots take time even where they are empty, but some at
    least."""
    return min(MAX_CAPACITY, max(MAX_CAPACITY // 2, size // 4))


def default_swaps(size: int) -> int:
    """Some, and more where a sweep of flips takes so long that they hardly count."""
    return min(32, max(8, size // 128))


class Features(NamedTuple):
    """
    - **rows** - whitened features as rows; more than P where zeros pad them, since a part of them
      would be a copy.
    - **squares** - their products with themselves.
    - **gram** - those with each other where they are at hand, else `None`.
    """

    rows: Float[Array, "R N"]
    squares: Float[Array, " P"]
    gram: Float[Array, "P P"] | None

    def times(self, x: Float[Array, "N *K"]) -> Float[Array, "P *K"]:
        """Products of all features with some vectors."""
        return (self.rows @ x)[: self.squares.size]

    def sum(self, weights: Float[Array, " P"]) -> Float[Array, " N"]:
        """Weighted sum of all features."""
        return pad(weights, len(self.rows)) @ self.rows

    def products(self, index: Int[Array, "*K"]) -> Float[Array, "*K P"]:
        """Products of some features with all."""
        # a vector times the transposed rows takes ten times as long
        return self.times(self.rows[index].T).T if self.gram is None else self.gram[index]


class Regression(NamedTuple):
    """A whitened regression on P features, and the prior of its weights.

    - **features** - the whitened features.
    - **target** - whitened observations.
    - **precision** - common noise precision.
    - **prior** - prior of the weights.
    """

    features: Features
    target: Float[Array, " N"]
    precision: Float[Array, ""]
    prior: Prior

    @property
    def scale(self) -> Float[Array, " P"]:
        """What takes features to the units in which prior and noise have variance 1."""
        return jnp.sqrt(self.precision * self.prior.variance)

    @property
    def linear(self) -> Float[Array, " P"]:
        """Products of features and observations, in these units."""
        return self.scale * jnp.sqrt(self.precision) * self.features.times(self.target)

    @property
    def squares(self) -> Float[Array, " P"]:
        """Products of the features with themselves, in these units."""
        return self.scale**2 * self.features.squares

    def products(self, index: Int[Array, "*K"]) -> Float[Array, "*K P"]:
        """Products of some features with all, in these units."""
        return self.scale[index][..., None] * self.features.products(index) * self.scale

    def is_precise(self) -> Bool[Array, ""]:
        """Whether rounding leaves the odds of a flip alone; no spike and no slab decides this."""
        largest = jnp.maximum(jnp.max(self.squares), jnp.max(jnp.abs(self.linear)))
        return largest * jnp.finfo(largest.dtype).eps < MAX_ROUNDING

    def pair_logits(self, weights: Float[Array, " P"]) -> Float[Array, " P"]:
        """Log odds of each spike given all other weights."""
        squares = self.features.squares
        residual = self.target - self.features.sum(weights)
        cross = self.features.times(residual) + squares * weights
        pairs = coordinates(squares, self.precision, self.prior)
        return pairs.given(self.precision * cross).logit


class Included(NamedTuple):
    """The included weights, in K slots, and what the others add to them.

    With H the products of the slots' features with all, b those with the observations, and R^T R
    the posterior covariance of the slots' weights. In this form adding is a step of Gram and
    Schmidt and removing a reflection, so columns that are nearly the same may take turns: updates
    of the covariance itself lose it to rounding.

    - **slots** - which weight each slot holds; P where it is empty.
    - **spikes** - whether each weight is included.
    - **count** - how many are.
    - **rows** - R H, R and R b side by side, for one product costs as much time as three of small
      matrices; what belongs to empty slots is 0.
    - **linear** - products of all features with what the slots leave unexplained.
    - **squares** - squares of the features less what the slots explain of them.
    """

    slots: Int[Array, " K"]
    spikes: Bool[Array, " P"]
    count: Int[Array, ""]  # type: ignore[assignment]
    rows: Float[Array, "K P+K+1"]
    linear: Float[Array, " P"]
    squares: Float[Array, " P"]

    @property
    def products(self) -> Float[Array, "K P"]:
        return self.rows[:, : self.spikes.size]

    @property
    def root(self) -> Float[Array, "K K"]:
        return self.rows[:, self.spikes.size : -1]

    @property
    def target(self) -> Float[Array, " K"]:
        return self.rows[:, -1]

    def logits(self, prior: Prior) -> Float[Array, " P"]:
        """Log odds of each spike given all others."""
        variance = jnp.where(self.slots < self.spikes.size, jnp.sum(self.root**2, axis=0), 1)
        mean = self.target @ self.root
        inside = _take(prior.log_odds, self.slots) + 0.5 * (mean**2 / variance + jnp.log(variance))
        outside = prior.log_odds + gain(self.linear, self.squares)
        return outside.at[self.slots].set(inside, mode="drop")


def gain(linear: Float[Array, " P"], squares: Float[Array, " P"]) -> Float[Array, " P"]:
    """By how much the log evidence grows with each weight that is included."""
    precision = 1 + jnp.maximum(squares, 0)
    return 0.5 * (linear**2 / precision - jnp.log(precision))


def include(problem: Regression, spikes: Bool[Array, " P"], capacity: int) -> Included:
    """Put the included weights into slots: some at a time, up to the last.

    :param capacity: number of slots, no fewer than weights; whole chunks.
    """
    size, chunk = spikes.shape[0], min(CHUNK, capacity)
    order = jnp.nonzero(spikes, size=capacity, fill_value=size)[0]
    linear, count = problem.linear, jnp.sum(spikes)
    rows = jnp.zeros((capacity, size + capacity + 1), linear.dtype)
    nothing = Included(jnp.full(capacity, size), spikes, count, rows, linear, problem.squares)

    def turn(i, now):
        new = lax.dynamic_slice(order, (i * chunk,), (chunk,))
        return _include_chunk(problem, now, new, i * chunk)

    return lax.fori_loop(0, -(-count // chunk), turn, nothing)


def _include_chunk(
    problem: Regression, now: Included, new: Int[Array, " C"], start: Any
) -> Included:
    """Put some weights into empty slots: :func:`add` of all at once.

    :param new: which; P for none.
    :param start: the first of their slots.
    """
    size, filled = now.spikes.size, new < now.spikes.size
    products = jnp.where(filled[:, None], problem.products(jnp.minimum(new, size - 1)), 0)
    slots = start + jnp.arange(new.size)
    here = filled[:, None] & (slots[:, None] == jnp.arange(now.slots.size))
    change = _joined(products, here, 0) - _take(now.products, new).T @ now.rows
    change = change.at[:, -1].set(_take(now.linear, new))
    one = jnp.eye(new.size, dtype=change.dtype)
    # its inverse is small and safe, all precisions are at least 1; long triangular solves are slow
    precision = one + _take(change[:, :size], new)
    rows = solve_triangular(jnp.linalg.cholesky(precision), one, lower=True) @ change
    return now._replace(
        slots=lax.dynamic_update_slice(now.slots, new, (start,)),
        rows=lax.dynamic_update_slice(now.rows, rows, (start, 0)),
        linear=now.linear - rows[:, -1] @ rows[:, :size],
        squares=now.squares - jnp.sum(rows[:, :size] ** 2, axis=0),
    )


def _joined(products: Any, here: Any, target: Any) -> Any:
    """Rows of :class:`Included`."""
    last = jnp.broadcast_to(target, (*products.shape[:-1], 1))
    return jnp.concatenate([products, here.astype(products.dtype), last], axis=-1)


def _take(x: Float[Array, "... P"], index: Int[Array, " K"]) -> Float[Array, "... K"]:
    """Entries of some weights, 0 where a slot is empty."""
    return jnp.take(x, index, axis=-1, mode="fill", fill_value=0)


def add(now: Included, m: Int[Array, ""], row: Float[Array, " P"]) -> Included:
    """Include a weight that is not.

    :param m: which weight.
    :param row: products of its feature with all.
    """
    size = row.size
    slot = jnp.argmax(now.slots == size)
    here = jnp.arange(now.slots.size) == slot
    change = _joined(row, here, 0) - now.products[:, m] @ now.rows
    change = change.at[-1].set(now.linear[m])
    new = change * lax.rsqrt(1 + jnp.maximum(change[m], 0))
    return Included(
        now.slots.at[slot].set(m),
        now.spikes.at[m].set(True),
        now.count + 1,
        now.rows.at[slot].set(new),
        now.linear - new[-1] * new[:size],
        now.squares - new[:size] ** 2,
    )


class Leaving(NamedTuple):
    """A weight that is included, and the model without it.

    - **slot** - of the weight.
    - **normal** - of the reflection that takes all it adds to the others into the row of its slot.
    - **along** - products of the normal with the rows.
    - **linear**, **squares** - those of :class:`Included`, without it.
    """

    slot: Int[Array, ""]
    normal: Float[Array, " K"]
    along: Float[Array, " P+K+1"]
    linear: Float[Array, " P"]
    squares: Float[Array, " P"]


def leaving(now: Included, m: Int[Array, ""]) -> Leaving:
    """
    :param m: which weight.
    """
    size = now.spikes.size
    slot = jnp.argmax(now.slots == m)
    column = now.rows[:, size + slot]
    length = jnp.linalg.norm(column)
    normal = column.at[slot].add(jnp.where(column[slot] >= 0, length, -length))
    normal *= jnp.sqrt(2 / jnp.maximum(normal @ normal, jnp.finfo(normal.dtype).tiny))
    along = normal @ now.rows
    alone = now.rows[slot] - normal[slot] * along
    linear = now.linear + alone[-1] * alone[:size]
    return Leaving(slot, normal, along, linear, now.squares + alone[:size] ** 2)


def remove(now: Included, m: Int[Array, ""]) -> Included:
    """Exclude a weight that is included.

    :param m: which weight.
    """
    left, size = leaving(now, m), now.spikes.size
    rows = now.rows - left.normal[:, None] * left.along
    return Included(
        now.slots.at[left.slot].set(size),
        now.spikes.at[m].set(False),
        now.count - 1,
        # what would be left of the weight is rounding
        rows.at[left.slot].set(0).at[:, size + left.slot].set(0),
        left.linear,
        left.squares,
    )


class Numbers(NamedTuple):
    """Random numbers of a sweep with S swaps.

    - **bars** - logs of uniform numbers, for the flips.
    - **which** - uniform, for the weights that are to swap.
    - **where** - of Gumbel's distribution, for their new places.
    """

    bars: Float[Array, " P"]
    which: Float[Array, " S"]
    where: Float[Array, "S P"]

    @classmethod
    def draw(cls, key: Array, size: int, num_swaps: int, dtype: Any) -> "Numbers":
        """All in one call, for each takes as long to compile as a step of a sweep."""
        # what a loop without swaps never reads has to be there
        shape, tiny = (1 + max(num_swaps, 1), size + 1), jnp.finfo(dtype).tiny
        uniform = jax.random.uniform(key, shape, dtype, minval=tiny)
        logs = jnp.log(uniform[:, :size])
        return cls(logs[0], uniform[1:, size], -jnp.log(-logs[1:]))


class Move(NamedTuple):
    """What happens next in a sweep.

    - **leaves**, **enters** - which weights are excluded and included; P for none.
    - **start** - the first weight whose flip is still to come.
    - **swaps** - how many swaps are done.
    """

    leaves: Int[Array, ""]
    enters: Int[Array, ""]
    start: Int[Array, ""]
    swaps: Int[Array, ""]


def next_flip(numbers: Numbers, prior: Prior, now: Included, done: Move) -> Move:
    """The next spike that flips (Metropolis), if any does.

    Between two flips nothing changes, so a sweep costs as much as the flips that happen, not as the
    weights that are visited. None is included beyond the number of slots.
    """
    size = now.spikes.size
    logits = now.logits(prior)
    ratio = jnp.where(now.spikes, -logits, logits)
    may = (now.spikes | (now.count < now.slots.size)) & (jnp.arange(size) >= done.start)
    flips = may & (ratio > numbers.bars)
    m = jnp.where(jnp.any(flips), jnp.argmax(flips), size)
    leaves = now.spikes.at[m].get(mode="fill", fill_value=False)
    return Move(jnp.where(leaves, m, size), jnp.where(leaves, size, m), m + 1, done.swaps)


def next_swap(numbers: Numbers, prior: Prior, now: Included, done: Move) -> Move:
    """A new place for one of the included weights, drawn from all that are free and its own."""
    size = now.spikes.size
    rank = jnp.cumsum(now.slots < size)
    old = now.slots[jnp.argmax(rank > numbers.which[done.swaps] * now.count)]
    left = leaving(now, old)
    logits = prior.log_odds + gain(left.linear, left.squares)
    taken = now.spikes & (jnp.arange(size) != old)
    new = jnp.argmax(jnp.where(taken, -jnp.inf, logits) + numbers.where[done.swaps])
    # where no place has any probability, any may be drawn: then it stays
    moves = (now.count > 0) & (new != old) & ~taken[new]
    leaves, enters = (jnp.where(moves, x, size) for x in (old, new))
    return Move(leaves, enters, done.start, done.swaps + 1)


def move(key: Array, problem: Regression, now: Included, num_swaps: int, moves: Any) -> Included:
    """A sweep of flips, then swaps.

    All in one loop over what leaves and what enters, so that both are compiled once.

    :param moves: if not, nothing does.
    """
    size, prior = now.spikes.size, problem.prior
    numbers = Numbers.draw(key, size, num_swaps, now.linear.dtype)

    def is_open(event):
        return (event.start < size) | (event.swaps < num_swaps)

    def is_idle(event):
        return (event.leaves == size) & (event.enters == size)

    def find(now, done):
        flip, swap = partial(next_flip, numbers, prior), partial(next_swap, numbers, prior)
        return lax.cond(done.start < size, flip, swap, now, done)

    def stay(now, event):
        return now, event

    def leave(now, event):
        return remove(now, event.leaves), event._replace(leaves=none)

    def enter(now, event):
        return add(now, event.enters, problem.products(event.enters)), event._replace(enters=none)

    def turn(state):
        now, event = state
        # past all that changes nothing, the state is only read
        event = lax.while_loop(
            lambda event: is_idle(event) & is_open(event), partial(find, now), event
        )
        which = jnp.where(event.leaves < size, 1, jnp.where(event.enters < size, 2, 0))
        return lax.switch(which, (stay, leave, enter), now, event)

    none, zero = jnp.array(size), jnp.zeros((), int)
    return lax.while_loop(
        lambda state: moves & (is_open(state[1]) | ~is_idle(state[1])),
        turn,
        (now, Move(none, none, zero, zero)),
    )[0]


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
    :param num_swaps: how many swaps; by default :func:`default_swaps`.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (P,).
    """
    key_moves, key_slabs = jax.random.split(key)
    capacity = min(capacity or default_capacity(spikes.size), spikes.size)
    capacity += -capacity % min(CHUNK, capacity)
    bound = jnp.where(problem.is_precise(), capacity, -1)
    moves = jnp.sum(spikes) <= bound
    now = include(problem, moves & (spikes > 0), capacity)
    num_swaps = default_swaps(spikes.size) if num_swaps is None else num_swaps
    now = move(key_moves, problem, now, num_swaps, moves)
    spikes = jnp.where(moves, now.spikes, spikes).astype(spikes.dtype)
    slabs = jnp.where(moves, draw_slabs(key_slabs, problem, now), slabs)
    probs = lax.cond(
        moves,
        lambda: _given_spikes(problem, now),
        lambda: _given_weights(problem, spikes, slabs, bound),
    )
    return spikes, slabs, probs


def draw_slabs(key: Array, problem: Regression, now: Included) -> Float[Array, " P"]:
    """Slabs given the spikes: included ones from their posterior, others from their prior."""
    normal = jax.random.normal(key, now.spikes.shape, now.linear.dtype)
    drawn = (now.target + _take(normal, now.slots)) @ now.root
    return jnp.sqrt(problem.prior.variance) * normal.at[now.slots].set(drawn, mode="drop")


# Rao-Blackwellised inclusion is the conditional of a spike in the part of the posterior, at most K
# included or more, that the spikes are in: so the mean over both parts is that of the spikes.


def _given_spikes(problem: Regression, now: Included) -> Float[Array, " P"]:
    probs = nn.sigmoid(now.logits(problem.prior))
    return jnp.where(now.spikes | (now.count < now.slots.size), probs, 0)


def _given_weights(
    problem: Regression, spikes: Int[Array, " P"], slabs: Float[Array, " P"], bound: Any
) -> Float[Array, " P"]:
    probs = nn.sigmoid(problem.pair_logits(spikes * slabs))
    return jnp.where((spikes > 0) & (jnp.sum(spikes) == bound + 1), 1, probs)
