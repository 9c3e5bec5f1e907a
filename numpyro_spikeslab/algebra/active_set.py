# SPDX-License-Identifier: Apache-2.0
"""The included weights of a regression with all slabs integrated out: what they are to the others.

To include a weight or to exclude one costs :math:`O(K P)` for K slots, and to include one a product
with the design; nothing of shape (P, P) is needed.

Inside, weights are in units of their slabs' standard deviations and the noise in units of its own,
so all prior variances are 1.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import (
    Design,
    Prior,
    coordinates,
    feature_squares,
    predictor,
)

# Weights that are put into slots at once, before a sweep.
CHUNK = 16

# Relative rounding error, times squared signal to noise ratio, above which flips would be decided
# by rounding.
MAX_ROUNDING = 0.05


class Regression(NamedTuple):
    """A whitened regression on P features, and the prior of its weights.

    - **design** - the whitened features.
    - **gram** - their products with each other where they are at hand, else `None`.
    - **target** - whitened observations.
    - **precision** - common noise precision.
    - **prior** - prior of the weights.
    """

    design: Design
    gram: Float[Array, "P P"] | None
    target: Float[Array, " N"]
    precision: Float[Array, ""]
    prior: Prior

    def times(self, x: Float[Array, "N *K"]) -> Float[Array, "P *K"]:
        """Products of all features with some vectors."""
        # of padded rows, since a part of them would be a copy
        return (self.rows @ x)[: self.prior.log_odds.size]

    @property
    def rows(self) -> Float[Array, "R N"]:
        return self.design.rows.reshape(-1, self.target.size)

    @property
    def scale(self) -> Float[Array, " P"]:
        """What takes features to the units in which prior and noise have variance 1."""
        return jnp.sqrt(self.precision * self.prior.variance)

    @property
    def linear(self) -> Float[Array, " P"]:
        """Products of features and observations, in these units."""
        return self.scale * jnp.sqrt(self.precision) * self.times(self.target)

    @property
    def squares(self) -> Float[Array, " P"]:
        """Products of the features with themselves, in these units."""
        return self.scale**2 * feature_squares(self.design, self.scale.size)

    def products(self, index: Int[Array, "*K"]) -> Float[Array, "*K P"]:
        """Products of some features with all, in these units."""
        # a vector times the transposed rows takes ten times as long
        own = self.times(self.rows[index].T).T if self.gram is None else self.gram[index]
        return self.scale[index][..., None] * own * self.scale

    def pair_logits(self, weights: Float[Array, " P"]) -> Float[Array, " P"]:
        """Log odds of each spike given all other weights."""
        squares = feature_squares(self.design, weights.size)
        cross = self.times(self.target - predictor(self.design, weights)) + squares * weights
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
    - **rows** - R H, R and R b side by side, for one product costs as much time as three of small
      matrices; what belongs to empty slots is 0.
    - **linear** - products of all features with what the slots leave unexplained.
    - **squares** - squares of the features less what the slots explain of them.
    """

    slots: Int[Array, " K"]
    spikes: Bool[Array, " P"]
    rows: Float[Array, "K P+K+1"]
    linear: Float[Array, " P"]
    squares: Float[Array, " P"]

    @property
    def filled(self) -> Bool[Array, " K"]:
        return self.slots < self.spikes.size

    @property
    def products(self) -> Float[Array, "K P"]:
        return self.rows[:, : self.spikes.size]

    @property
    def root(self) -> Float[Array, "K K"]:
        return self.rows[:, self.spikes.size : -1]

    @property
    def target(self) -> Float[Array, " K"]:
        return self.rows[:, -1]

    def inside(self, prior: Prior) -> Float[Array, " K"]:
        """Odds of the spike in each slot given all others; 1 where it is empty."""
        variance = jnp.where(self.filled, jnp.sum(self.root**2, axis=0), 1)
        mean = self.target @ self.root
        exponent = take(prior.log_odds, self.slots) + 0.5 * mean**2 / variance
        return jnp.exp(exponent) * jnp.sqrt(variance)

    def outside(self, prior: Prior) -> Float[Array, " P"]:
        """Odds of each spike that is in no slot given all others."""
        exponent, precision = posterior_odds(prior, self.linear, self.squares)
        return jnp.exp(exponent) / jnp.sqrt(precision)

    def odds(self, prior: Prior) -> Float[Array, " P"]:
        """Odds of each spike given all others."""
        # a scatter would keep XLA from making a single kernel of the loop of a sweep
        here = self.slots[:, None] == jnp.arange(self.spikes.size)
        inside = jnp.max(jnp.where(here, self.inside(prior)[:, None], 0), axis=0)
        return jnp.where(self.spikes, inside, self.outside(prior))


def posterior_odds(
    prior: Prior, linear: Float[Array, "... P"], squares: Float[Array, "... P"]
) -> tuple[Float[Array, "... P"], Float[Array, "... P"]]:
    """Prior odds of each weight times the Bayes factor for it.

    :return: x and A, where the odds are exp(x) over the square root of A: to take a logarithm would
        cost more than all else.
    """
    precision = 1 + jnp.maximum(squares, 0)
    return prior.log_odds + 0.5 * linear**2 / precision, precision


def is_precise(linear: Float[Array, " P"], squares: Float[Array, " P"]) -> Bool[Array, ""]:
    """Whether rounding leaves the odds of a flip alone; no spike and no slab decides this.

    :param linear: of a :class:`Regression`, as what follows.
    """
    largest = jnp.maximum(jnp.max(squares), jnp.max(jnp.abs(linear)))
    return largest * jnp.finfo(largest.dtype).eps < MAX_ROUNDING


def include(
    problem: Regression,
    start: tuple[Float[Array, " P"], Float[Array, " P"]],
    spikes: Bool[Array, " P"],
    capacity: int,
) -> Included:
    """Put the included weights into slots: some at a time, up to the last.

    :param start: the regression's linear terms and squares.
    :param capacity: number of slots, no fewer than weights; whole chunks.
    """
    size, chunk, counts = spikes.size, min(CHUNK, capacity), jnp.cumsum(spikes)
    slots = jnp.sum(counts < 1 + jnp.arange(capacity)[:, None], axis=1)
    rows = jnp.zeros((capacity, size + capacity + 1), start[0].dtype)

    def turn(i, now):
        new = lax.dynamic_slice(slots, (i * chunk,), (chunk,))
        return _include_chunk(problem, now, new, i * chunk)

    nothing = Included(slots, spikes, rows, *start)

    return lax.fori_loop(0, -(-counts[-1] // chunk), turn, nothing)


def _include_chunk(
    problem: Regression, now: Included, new: Int[Array, " C"], start: Any
) -> Included:
    """Put some weights into their slots: :func:`entering` of all at once.

    :param new: which; P for none.
    :param start: the first of their slots.
    """
    size, filled = now.spikes.size, new < now.spikes.size
    products = jnp.where(filled[:, None], problem.products(jnp.minimum(new, size - 1)), 0)
    slots = start + jnp.arange(new.size)
    here = filled[:, None] & (slots[:, None] == jnp.arange(now.slots.size))
    explained = take(now.products, new).T @ now.rows
    change = _unexplained(products, here, explained, take(now.linear, new))
    one = jnp.eye(new.size, dtype=change.dtype)
    # its inverse is small and safe, all precisions are at least 1; long triangular solves are slow
    precision = one + take(change[:, :size], new)
    rows = solve_triangular(jnp.linalg.cholesky(precision), one, lower=True) @ change
    return now._replace(
        rows=lax.dynamic_update_slice(now.rows, rows, (start, 0)),
        linear=now.linear - rows[:, -1] @ rows[:, :size],
        squares=now.squares - jnp.sum(rows[:, :size] ** 2, axis=0),
    )


def _unexplained(
    products: Float[Array, "*C P"],
    here: Bool[Array, "*C K"],
    explained: Float[Array, "*C P+K+1"],
    linear: Float[Array, "*C"],
) -> Float[Array, "*C P+K+1"]:
    """What the slots leave of the rows of weights that enter.

    :param products: of their features with all.
    :param here: their slots.
    :param explained: what they explain.
    :param linear: products of their features with what the slots leave of the observations.
    """
    rows = jnp.concatenate([products, here.astype(products.dtype)], axis=-1)
    return jnp.concatenate([rows - explained[..., :-1], linear[..., None]], axis=-1)


def take(x: Float[Array, "... P"], index: Int[Array, "*K"]) -> Float[Array, "..."]:
    """Entries of some weights, 0 where a slot is empty."""
    return jnp.take(x, index, axis=-1, mode="fill", fill_value=0)


class Leaving(NamedTuple):
    """A weight that is included, and how the others come to be without it.

    - **normal** - of the reflection that takes all it adds to the others into the row of its slot.
    - **along** - products of the normal with the rows.
    - **row** - this row.
    """

    normal: Float[Array, " K"]
    along: Float[Array, " P+K+1"]
    row: Float[Array, " P+K+1"]


def leaving(now: Included, slot: Int[Array, ""]) -> Leaving:
    """
    :param slot: of the weight.
    """
    column = now.rows[:, now.spikes.size + slot]
    length, here = jnp.linalg.norm(column), jnp.arange(now.slots.size) == slot
    normal = column + jnp.where(here, jnp.where(column >= 0, length, -length), 0)
    normal *= jnp.sqrt(2 / jnp.maximum(normal @ normal, jnp.finfo(normal.dtype).tiny))
    along = normal @ now.rows
    return Leaving(normal, along, now.rows[slot] - normal[slot] * along)


def none_leaves(now: Included) -> Leaving:
    nothing = jnp.zeros_like(now.rows[0])
    return Leaving(jnp.zeros_like(now.target), nothing, nothing)


def entering(
    now: Included,
    left: Leaving,
    slot: Int[Array, ""],
    m: Int[Array, ""],
    products: Float[Array, " P"],
) -> Float[Array, " R"]:
    """The row of a weight that is not included: what one step of Gram and Schmidt makes of it.

    :param left: what leaves before.
    :param slot: an empty one, or that of the weight that leaves.
    :param m: which weight.
    :param products: of its feature with all.
    """
    here = jnp.arange(now.slots.size) == slot
    own = jnp.where(here, 0, take(now.products, m) - left.normal * left.along[m])
    explained = own @ now.rows - (own @ left.normal) * left.along
    linear = now.linear[m] + explained_by(left.row, now.spikes.size)[0][m]
    row = _unexplained(products, here, explained, linear)
    return row * lax.rsqrt(1 + jnp.maximum(row[m], 0))


def explained_by(
    row: Float[Array, "... R"], size: int
) -> tuple[Float[Array, "... P"], Float[Array, "... P"]]:
    """What a slot explains of the products and of the squares of all features."""
    return row[..., -1:] * row[..., :size], row[..., :size] ** 2


def changed(
    now: Included,
    left: Leaving,
    row: Float[Array, " R"],
    slot: Int[Array, ""],
    leaves: Int[Array, ""],
    enters: Int[Array, ""],
) -> Included:
    """The included weights after a change.

    :param left: of the weight that leaves, or :func:`none_leaves`.
    :param row: of the weight that enters; 0 for none.
    :param slot: from which and into which; K for none.
    :param leaves: which weight leaves; P for none.
    :param enters: which enters; P for none.
    """
    size, num_slots = now.spikes.size, now.slots.size
    here = jnp.arange(num_slots) == slot
    # what would be left of a weight that leaves is rounding
    kept = jnp.concatenate([jnp.full(size, True), ~here, jnp.full(1, True)])
    others = jnp.where(kept, now.rows - left.normal[:, None] * left.along, 0)
    lost, gained = explained_by(left.row, size), explained_by(row, size)
    return Included(
        jnp.where(here, enters, now.slots),
        (now.spikes & (jnp.arange(size) != leaves)) | (jnp.arange(size) == enters),
        jnp.where(here[:, None], row, others),
        now.linear + lost[0] - gained[0],
        now.squares + lost[1] - gained[1],
    )
