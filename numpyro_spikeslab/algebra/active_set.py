# SPDX-License-Identifier: Apache-2.0
"""Active set of a regression with all slabs integrated out: the weights that are included.

To include or exclude a weight costs :math:`O(K P)` for K slots, and to include one also a product
with the design. Weights are in units of their slabs' standard deviations and the noise in units of
its own, so all prior variances are 1.
"""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, Shaped

from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.heredity import AnyPrior
from numpyro_spikeslab.algebra.pairs import Design, Prior, coordinates, feature_squares, predictor

# Weights that enter the active set at once, before a sweep.
CHUNK = 16

# Slots that are visited at once, so that empty ones cost nothing, and numbers up to which all are.
BLOCK, SMALL = 8, 2**16

# Rounding error times squared signal to noise ratio, above which rounding would decide flips.
MAX_ROUNDING = 0.05


class CollapsedRegression(NamedTuple):
    """Whitened regression on P features.

    - **gram** - products of the rows of their design, without those inside, or `None`.
    - **windows** - numbers of the windows that swaps stay in, or `None` if there is only one.
    """

    design: Design
    gram: Float[Array, "P P"] | None
    target: Float[Array, " N"]
    precision: Float[Array, ""]
    prior: AnyPrior
    windows: Int[Array, " P"] | None = None

    def times(self, x: Float[Array, "N *K"]) -> Float[Array, "P *K"]:
        """Compute the products of all features with some vectors."""
        return self.design.times(x)[: self.prior.log_odds.size]

    @property
    def scale(self) -> Float[Array, " P"]:
        """Factors from the features to the units of prior and noise."""
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
        """Compute the products of some features with all, in these units."""
        if self.gram is None:
            # a vector times the transposed rows takes ten times as long
            products = self.times(self.design.taken(index).T).T
        else:
            products = self.gram[index]
            for x in self.design.parts[1:]:
                products += x[index] @ x[: self.scale.size].T
        return self.scale[index][..., None] * products * self.scale

    def pair_logits(self, weights: Float[Array, " P"]) -> Float[Array, " P"]:
        """Compute the log odds of each spike given all other weights."""
        squares = feature_squares(self.design, weights.size)
        cross = self.times(self.target - predictor(self.design, weights)) + squares * weights
        pairs = coordinates(squares, self.precision, self.prior.at(weights != 0))
        return pairs.given(self.precision * cross).logit


class ActiveSet(NamedTuple):
    """Included weights in K slots, and the regression of all features on theirs.

    H are the products of the slots' features with all features, b those with the observations, and
    R^T R is the posterior covariance of the slots' weights. In this form a weight enters by a
    Gram-Schmidt step and leaves by a reflection, which is stable for nearly equal columns.

    - **slots** - number of the weight in each slot; P where it is empty.
    - **spikes** - whether each weight is included.
    - **rows** - R H, R and R b side by side; 0 for empty slots.
    - **linear** - products of all features with the residual of the slots.
    - **squares** - squared norms of the features after regression on the slots.
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

    def visit(self, turn: Callable[[Any, int, Any], Any], start: Any, here: Any = False) -> Any:
        """Apply ``turn`` to the first slot of each block, their number, and what it returned
        before, up to the last slot that is filled or ``here``."""
        size = self.slots.size
        if self.rows.size <= SMALL:
            return turn(0, size, start)
        block = math.gcd(BLOCK, size)
        last = jnp.max(jnp.where(self.filled | here, 1 + jnp.arange(size), 0))
        return lax.fori_loop(0, -(-last // block), lambda i, x: turn(i * block, block, x), start)

    def combine(self, x: Float[Array, " K"]) -> Float[Array, " R"]:
        """Compute ``x @ rows``."""

        def turn(start, block, total):
            return total + _some(x, start, block) @ _some(self.rows, start, block)

        return self.visit(turn, jnp.zeros_like(self.rows[0]))

    def inside(self, prior: Prior) -> Float[Array, " K"]:
        """Compute the odds of the spike in each slot given all others; 1 where it is empty."""
        variance = jnp.where(self.filled, jnp.sum(self.root**2, axis=0), 1)
        mean = self.target @ self.root
        exponent = entries_of(prior.log_odds, self.slots) + 0.5 * mean**2 / variance
        return jnp.exp(exponent) * jnp.sqrt(variance)

    def outside(self, prior: Prior) -> Float[Array, " P"]:
        """Compute the odds of each excluded spike given all others."""
        exponent, precision = posterior_odds(prior, self.linear, self.squares)
        return jnp.exp(exponent) / jnp.sqrt(precision)

    def odds(self, prior: Prior) -> Float[Array, " P"]:
        """Compute the odds of each spike given all others."""
        inside, columns = self.inside(prior), jnp.arange(self.spikes.size)

        def turn(start, block, odds):
            # a scatter would keep XLA from making a single kernel of the loop of a sweep
            here = _some(self.slots, start, block)[:, None] == columns
            placed = jnp.where(here, _some(inside, start, block)[:, None], 0)
            return jnp.maximum(odds, jnp.max(placed, axis=0))

        return jnp.where(
            self.spikes, self.visit(turn, jnp.zeros_like(self.linear)), self.outside(prior)
        )


def _some(x: Shaped[Array, "K *R"], start: Any, number: int) -> Shaped[Array, "B *R"]:
    """Take some rows."""
    return lax.dynamic_slice_in_dim(x, start, number)


def posterior_odds(
    prior: Prior, linear: Float[Array, "... P"], squares: Float[Array, "... P"]
) -> tuple[Float[Array, "... P"], Float[Array, "... P"]]:
    """Compute x and A of each weight's odds ``exp(x) / sqrt(A)``; a logarithm would cost most."""
    precision = 1 + jnp.maximum(squares, 0)
    return prior.log_odds + 0.5 * linear**2 / precision, precision


def is_precise(linear: Float[Array, " P"], squares: Float[Array, " P"]) -> Bool[Array, ""]:
    """Decide whether rounding errors of the odds are small, whatever spikes and slabs are."""
    largest = jnp.maximum(jnp.max(squares), jnp.max(jnp.abs(linear)))
    return largest * jnp.finfo(largest.dtype).eps < MAX_ROUNDING


def include(
    problem: CollapsedRegression,
    start: tuple[Float[Array, " P"], Float[Array, " P"]],
    spikes: Bool[Array, " P"],
    capacity: int,
) -> ActiveSet:
    """Make the active set of some spikes, chunk by chunk, from linear terms and squares."""
    size, chunk, counts = spikes.size, min(CHUNK, capacity), jnp.cumsum(spikes)
    slots = jnp.searchsorted(counts, 1 + jnp.arange(capacity)).astype(int)
    rows = jnp.zeros((capacity, size + capacity + 1), start[0].dtype)

    def turn(i, active):
        new = lax.dynamic_slice(slots, (i * chunk,), (chunk,))
        return _include_chunk(problem, active, new, i * chunk)

    zero = ActiveSet(slots, spikes, rows, *start)
    return lax.fori_loop(0, -(-counts[-1] // chunk), turn, zero)


def _include_chunk(
    problem: CollapsedRegression, active: ActiveSet, new: Int[Array, " C"], start: Any
) -> ActiveSet:
    """Let weights ``new`` (P for none) enter at once, from slot ``start``; see :func:`row_of`."""
    size, filled = active.spikes.size, new < active.spikes.size
    products = jnp.where(filled[:, None], problem.products(jnp.minimum(new, size - 1)), 0)
    slots = start + jnp.arange(new.size)
    here = filled[:, None] & (slots[:, None] == jnp.arange(active.slots.size))
    # the first are regressed on nothing
    explained = lax.cond(
        start > 0,
        lambda: entries_of(active.products, new).T @ active.rows,
        lambda: jnp.zeros_like(active.rows[: new.size]),
    )
    change = _unexplained(products, here, explained, entries_of(active.linear, new))
    one = jnp.eye(new.size, dtype=change.dtype)
    # long triangular solves are slow, and the inverse is safe, since all precisions are at least 1
    precision = one + entries_of(change[:, :size], new)
    rows = solve_triangular(jnp.linalg.cholesky(precision), one, lower=True) @ change
    return active._replace(
        rows=lax.dynamic_update_slice(active.rows, rows, (start, 0)),
        linear=active.linear - rows[:, -1] @ rows[:, :size],
        squares=active.squares - jnp.sum(rows[:, :size] ** 2, axis=0),
    )


def _unexplained(
    products: Float[Array, "*C P"],
    here: Bool[Array, "*C K"],
    explained: Float[Array, "*C P+K+1"],
    linear: Float[Array, "*C"],
) -> Float[Array, "*C P+K+1"]:
    """Subtract the regression on the slots from the rows of weights that enter."""
    rows = jnp.concatenate([products, here.astype(products.dtype)], axis=-1)
    return jnp.concatenate([rows - explained[..., :-1], linear[..., None]], axis=-1)


def entries_of(x: Float[Array, "... P"], index: Int[Array, "*K"]) -> Float[Array, "..."]:
    """Take the entries of some weights, 0 where a slot is empty."""
    return jnp.take(x, index, axis=-1, mode="fill", fill_value=0)


class Removal(NamedTuple):
    """Reflection that moves the dependence on a weight into the row of its slot.

    - **normal** - normal of the reflection.
    - **along** - products of the normal with the rows.
    - **row** - the reflected row of the slot.
    """

    normal: Float[Array, " K"]
    along: Float[Array, " P+K+1"]
    row: Float[Array, " P+K+1"]


def removal_of(active: ActiveSet, slot: Int[Array, ""]) -> Removal:
    """Compute the reflection that removes the weight in a slot."""
    column = active.rows[:, active.spikes.size + slot]
    length, here = jnp.linalg.norm(column), jnp.arange(active.slots.size) == slot
    normal = column + jnp.where(here, jnp.where(column >= 0, length, -length), 0)
    normal *= jnp.sqrt(2 / jnp.maximum(normal @ normal, jnp.finfo(normal.dtype).tiny))
    along = active.combine(normal)
    return Removal(normal, along, active.rows[slot] - normal[slot] * along)


def no_removal(active: ActiveSet) -> Removal:
    """Return the reflection that changes nothing."""
    zero = jnp.zeros_like(active.rows[0])
    return Removal(jnp.zeros_like(active.target), zero, zero)


def row_of(
    active: ActiveSet,
    removal: Removal,
    slot: Int[Array, ""],
    m: Int[Array, ""],
    products: Float[Array, " P"],
) -> Float[Array, " R"]:
    """Compute the row of excluded weight ``m``, in an empty slot, by a Gram-Schmidt step."""
    here = jnp.arange(active.slots.size) == slot
    column = jnp.where(here, 0, entries_of(active.products, m) - removal.normal * removal.along[m])
    explained = active.combine(column) - (column @ removal.normal) * removal.along
    linear = active.linear[m] + explained_by(removal.row, active.spikes.size)[0][m]
    row = _unexplained(products, here, explained, linear)
    return row * lax.rsqrt(1 + jnp.maximum(row[m], 0))


def explained_by(
    row: Float[Array, "... R"], size: int
) -> tuple[Float[Array, "... P"], Float[Array, "... P"]]:
    """Compute the part of all linear terms and squares that a slot explains."""
    return row[..., -1:] * row[..., :size], row[..., :size] ** 2


def updated(
    active: ActiveSet,
    removal: Removal,
    row: Float[Array, " R"],
    slot: Int[Array, ""],
    leaves: Int[Array, ""],
    enters: Int[Array, ""],
) -> ActiveSet:
    """Return the active set after one slot has changed, or none if the slot has number K.

    Nothing leaves by :func:`no_removal` with number P, and nothing enters by a row of 0 with P.
    """
    size, num_slots = active.spikes.size, active.slots.size
    here = jnp.arange(num_slots) == slot
    # the column of the removed weight is zero but for rounding
    nonzero = jnp.concatenate([jnp.full(size, True), ~here, jnp.full(1, True)])

    def turn(start, block, rows):
        parts = _some(rows, start, block), _some(removal.normal, start, block)
        others = jnp.where(nonzero, parts[0] - parts[1][:, None] * removal.along, 0)
        new = jnp.where(_some(here, start, block)[:, None], row, others)
        return lax.dynamic_update_slice_in_dim(rows, new, start, 0)

    before, after = explained_by(removal.row, size), explained_by(row, size)
    return ActiveSet(
        jnp.where(here, enters, active.slots),
        (active.spikes & (jnp.arange(size) != leaves)) | (jnp.arange(size) == enters),
        active.visit(turn, active.rows, here),
        active.linear + before[0] - after[0],
        active.squares + before[1] - after[1],
    )
