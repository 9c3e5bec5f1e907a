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

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import lax, nn
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Prior, coordinates

MAX_CAPACITY = 64
"""How many weights may be included where spikes move; :func:`default_capacity` of fewer."""


# Weights that are put into slots at once, before a sweep.
CHUNK = 16

# Relative rounding error, times squared signal to noise ratio, above which flips would be decided
# by rounding.
MAX_ROUNDING = 0.05


def default_capacity(size: int) -> int:
    """Half of the weights, since slots take time even where they are empty, but some at least."""
    return min(MAX_CAPACITY, max(MAX_CAPACITY // 2, size // 2))


def default_swaps(size: int) -> int:
    """Some, and more where a sweep of flips takes so long that they hardly count."""
    return min(32, max(8, size // 128))


class Features(NamedTuple):
    """
    - **rows** - whitened features as rows.
    - **gram** - their products with each other where they are at hand, else `None`.
    """

    rows: Float[Array, "P N"]
    gram: Float[Array, "P P"] | None

    @property
    def squares(self) -> Float[Array, " P"]:
        return jnp.sum(self.rows**2, axis=1) if self.gram is None else jnp.diagonal(self.gram)

    def products(self, index: Int[Array, "*K"]) -> Float[Array, "*K P"]:
        """Products of some features with all."""
        return self.rows[index] @ self.rows.T if self.gram is None else self.gram[index]


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
        return self.scale * jnp.sqrt(self.precision) * (self.features.rows @ self.target)

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
        rows, squares = self.features.rows, self.features.squares
        cross = rows @ (self.target - weights @ rows) + squares * weights
        pairs = coordinates(squares, self.precision, self.prior)
        return pairs.given(self.precision * cross).logit


class Included(NamedTuple):
    """The included weights, in K slots, and what the others add to them.

    With H the products of the slots' features with all, and R^T R the posterior covariance of the
    slots' weights. In this form adding is a step of Gram and Schmidt and removing a reflection, so
    columns that are nearly the same may take turns: updates of the covariance itself lose it to
    rounding.

    - **slots** - which weight each slot holds; P where it is empty.
    - **spikes** - whether each weight is included.
    - **count** - how many are.
    - **root** - R; rows and columns of empty slots are 0.
    - **products** - R H.
    - **target** - R times the products of the slots' features with the observations.
    - **linear** - products of all features with what the slots leave unexplained.
    - **squares** - squares of the features less what the slots explain of them.
    """

    slots: Int[Array, " K"]
    spikes: Bool[Array, " P"]
    count: Int[Array, ""]  # type: ignore[assignment]
    root: Float[Array, "K K"]
    products: Float[Array, "K P"]
    target: Float[Array, " K"]
    linear: Float[Array, " P"]
    squares: Float[Array, " P"]

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
    dtype, count = problem.linear.dtype, jnp.sum(spikes)
    nothing = Included(
        jnp.full(capacity, size),
        spikes,
        count,
        jnp.zeros((capacity, capacity), dtype),
        jnp.zeros((capacity, size), dtype),
        jnp.zeros(capacity, dtype),
        problem.linear,
        problem.squares,
    )

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
    rows = jnp.where(filled[:, None], problem.products(jnp.minimum(new, size - 1)), 0)
    along = _take(now.products, new).T
    change = rows - along @ now.products
    one = jnp.eye(new.size, dtype=rows.dtype)
    # its inverse is small and safe, all precisions are at least 1; long triangular solves are slow
    root = solve_triangular(jnp.linalg.cholesky(one + _take(change, new)), one, lower=True)
    here = filled[:, None] & (start + jnp.arange(new.size)[:, None] == jnp.arange(now.slots.size))
    products, target = root @ change, root @ _take(now.linear, new)
    return now._replace(
        slots=lax.dynamic_update_slice(now.slots, new, (start,)),
        root=lax.dynamic_update_slice(now.root, root @ (here - along @ now.root), (start, 0)),
        products=lax.dynamic_update_slice(now.products, products, (start, 0)),
        target=lax.dynamic_update_slice(now.target, target, (start,)),
        linear=now.linear - target @ products,
        squares=now.squares - jnp.sum(products**2, axis=0),
    )


def _take(x: Float[Array, "... P"], index: Int[Array, " K"]) -> Float[Array, "... K"]:
    """Entries of some weights, 0 where a slot is empty."""
    return jnp.take(x, index, axis=-1, mode="fill", fill_value=0)


def add(now: Included, m: Int[Array, ""], row: Float[Array, " P"], happens: Any) -> Included:
    """Include a weight that is not.

    :param m: which weight.
    :param row: products of its feature with all.
    :param happens: if not, nothing changes.
    """
    size, capacity = row.size, now.slots.size
    slot = jnp.where(happens, jnp.argmax(now.slots == size), capacity)
    along = now.products[:, m]
    change = row - along @ now.products
    root = lax.rsqrt(1 + jnp.maximum(change[m], 0))
    side = (jnp.arange(capacity) == slot) - along @ now.root
    products, target = root * change, jnp.where(happens, root * now.linear[m], 0)
    return Included(
        now.slots.at[slot].set(m, mode="drop"),
        now.spikes.at[m].set(now.spikes[m] | happens),
        now.count + happens,
        now.root.at[slot].set(root * side, mode="drop"),
        now.products.at[slot].set(products, mode="drop"),
        now.target.at[slot].set(target, mode="drop"),
        now.linear - target * products,
        now.squares - happens * products**2,
    )


def remove(now: Included, m: Int[Array, ""], happens: Any) -> Included:
    """Exclude a weight that is included: a reflection takes what it adds to the others into the
    row of its slot.

    :param m: which weight.
    :param happens: if not, nothing changes.
    """
    here = (now.slots == m) & happens
    column = now.root @ here
    length = jnp.linalg.norm(column)
    normal = column + jnp.where(column >= 0, length, -length) * here
    normal *= jnp.sqrt(2 / jnp.maximum(normal @ normal, jnp.finfo(normal.dtype).tiny))
    root = now.root - normal[:, None] * (normal @ now.root)
    products = now.products - normal[:, None] * (normal @ now.products)
    target = now.target - normal * (normal @ now.target)
    alone = here @ products
    return Included(
        jnp.where(here, now.spikes.size, now.slots),
        now.spikes.at[m].set(now.spikes[m] & jnp.logical_not(happens)),
        now.count - happens,
        # what would be left of the weight is rounding
        jnp.where(here[:, None] | here, 0, root),
        jnp.where(here[:, None], 0, products),
        jnp.where(here, 0, target),
        now.linear + (here @ target) * alone,
        now.squares + alone**2,
    )


def flips(key: Array, problem: Regression, now: Included, moves: Any) -> Included:
    """Offer each spike in turn a flip (Metropolis), refusing to include more than there are slots.

    Between two flips nothing changes, so the next one is found at once: a sweep costs as much as
    the flips that happen, not as the weights that are visited.

    :param moves: if not, nothing does.
    """
    size, capacity = now.spikes.size, now.slots.size
    # exponential variates, since logs of uniform ones may be infinite
    bar = -jax.random.exponential(key, (size,), now.linear.dtype)

    def following(now, start):
        logits = now.logits(problem.prior)
        ratio = jnp.where(now.spikes, -logits, logits)
        may = (now.spikes | (now.count < capacity)) & (jnp.arange(size) >= start)
        happens = may & (ratio > bar) & moves
        return jnp.where(jnp.any(happens), jnp.argmax(happens), size)

    def turn(carry):
        now, m = carry
        row = problem.products(m)
        leave, enter = (lambda: remove(now, m, True)), (lambda: add(now, m, row, True))
        now = lax.cond(now.spikes[m], leave, enter)
        return now, following(now, m + 1)

    return lax.while_loop(lambda carry: carry[1] < size, turn, (now, following(now, 0)))[0]


class Numbers(NamedTuple):
    """Random numbers of a swap.

    - **which** - uniform, for the weight that moves.
    - **where** - of Gumbel's distribution, for its new place.
    """

    which: Float[Array, ""]
    where: Float[Array, " P"]


def swap(numbers: Numbers, problem: Regression, now: Included, moves: Any) -> Included:
    """Draw a new place for one of the included weights, from all that are free and its own.

    :param moves: if not, nothing does.
    """
    rank = jnp.cumsum(now.slots < now.spikes.size)
    old = now.slots[jnp.argmax(rank > numbers.which * now.count)]
    moves &= now.count > 0
    without = remove(now, old, moves)
    logits = problem.prior.log_odds + gain(without.linear, without.squares)
    new = jnp.argmax(jnp.where(without.spikes, -jnp.inf, logits) + numbers.where)
    # where no place has any probability, any may be drawn: then it goes back
    new = jnp.where(without.spikes[new], old, new)
    return add(without, new, problem.products(new), moves)


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
    key_flips, key_swaps, key_slabs = jax.random.split(key, 3)
    capacity = min(capacity or default_capacity(spikes.size), spikes.size)
    capacity += -capacity % min(CHUNK, capacity)
    bound = jnp.where(problem.is_precise(), capacity, -1)
    moves = jnp.sum(spikes) <= bound
    now = include(problem, moves & (spikes > 0), capacity)
    now = flips(key_flips, problem, now, moves)
    num_swaps = default_swaps(spikes.size) if num_swaps is None else num_swaps
    key_which, key_where = jax.random.split(key_swaps)
    dtype = problem.linear.dtype
    numbers = Numbers(
        jax.random.uniform(key_which, (num_swaps,), dtype),
        jax.random.gumbel(key_where, (num_swaps, spikes.size), dtype),
    )
    now = lax.scan(lambda now, one: (swap(one, problem, now, moves), None), now, numbers)[0]
    spikes = jnp.where(moves, now.spikes, spikes).astype(spikes.dtype)
    slabs = jnp.where(moves, draw_slabs(key_slabs, problem, now), slabs)
    # both are computed: a condition would make a copy of the design
    probs = _given_spikes(problem, now), _given_weights(problem, spikes, slabs, bound)
    return spikes, slabs, jnp.where(moves, *probs)


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
