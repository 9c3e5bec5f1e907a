# SPDX-License-Identifier: Apache-2.0
r"""Draws of weights while functions are integrated out together with the slabs.

Given the weights, the tasks say of function m no more than N independent observations
:math:`y_n \sim \mathcal{N}(a_n \phi_{nm}, 1)` would, :math:`a_n^2 = \sum_q \tau_{nq} w_{qm}^2`. All
that is needed comes from :math:`I + \mathrm{diag}(a) K \mathrm{diag}(a) = L L^\top`.
"""

from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.collapsed_spikes import Slabs, gibbs_block
from numpyro_spikeslab.algebra.pairs import Prior

# Tasks whose weights are drawn together: a Cholesky decomposition of this size for each of them.
BLOCK_SIZE = 16


class Root(NamedTuple):
    """Upper triangular ``R``, for each input, of the precision ``R^T R`` that S functions get from
    their tasks; S is one or two.

    - **diagonal** - zero where the tasks say nothing.
    - **upper** - the entry beside it, of two.
    """

    diagonal: Float[Array, "S N"]
    upper: Float[Array, " N"]

    @classmethod
    def of(cls, Z: Float[Array, "N Q"], w: Float[Array, "Q S"]) -> "Root":
        """
        :param Z: precisions of the observations.
        :param w: weights of the functions.
        """
        first = jnp.sqrt(Z @ w[:, 0] ** 2)
        if w.shape[1] == 1:
            return cls(first[None], jnp.zeros_like(first))
        upper, square = _over(Z @ (w[:, 0] * w[:, 1]), first), Z @ w[:, 1] ** 2
        left = square - upper**2
        # one task alone says nothing of the other direction: what is left is a rounding error
        left = jnp.where(left > 100 * jnp.finfo(left.dtype).eps * square, left, 0)
        return cls(jnp.stack([first, jnp.sqrt(left)]), upper)

    def times(self, f: Float[Array, "S N"]) -> Float[Array, " SN"]:
        """``R f``."""
        scaled = self.diagonal * f
        return jnp.ravel(scaled.at[0].add(self.upper * f[1]) if len(f) > 1 else scaled)

    def transposed(self, u: Float[Array, " SN"]) -> Float[Array, "S N"]:
        """``R^T u``."""
        u = u.reshape(self.diagonal.shape)
        scaled = self.diagonal * u
        return scaled.at[1].add(self.upper * u[0]) if len(u) > 1 else scaled

    def whiten(self, h: Float[Array, "S N ..."]) -> Float[Array, "SN ..."]:
        """``R^-T h``, the observations of ``R f`` with unit variance."""
        parts = [_over(h[0], self.diagonal[0])]
        if len(h) > 1:
            known = self.upper.reshape(self.upper.shape + (1,) * (h.ndim - 2)) * parts[0]
            parts.append(_over(h[1] - known, self.diagonal[1]))
        return jnp.concatenate(parts)


def _over(x: Float[Array, "N ..."], a: Float[Array, " N"]) -> Float[Array, "N ..."]:
    """``x / a``, or 0 where ``a`` is."""
    a = a.reshape(a.shape + (1,) * (x.ndim - 1))
    return jnp.where(a > 0, x / jnp.where(a > 0, a, 1), 0)


class Mixing(NamedTuple):
    """All functions, their weights (zero where the spike is) and, where these move, their prior."""

    phi: Float[Array, "M N"]
    weights: Float[Array, "Q M"]
    prior: Any

    @property
    def location(self) -> Float[Array, "N Q"]:
        return self.phi.T @ self.weights.T


class Left(NamedTuple):
    """What is left of the observations without some functions, and their precisions ``Z``."""

    residual: Float[Array, "N Q"]
    Z: Float[Array, "N Q"]

    def linear_terms(self, w: Float[Array, "Q S"]) -> Float[Array, "S N"]:
        """Products of weights with what is left, at each input."""
        return ((self.Z * self.residual) @ w).T


class Hidden(NamedTuple):
    """S functions that are integrated out.

    - **w** - their weights.
    - **root** - the root of the precisions that they get from their tasks.
    - **mean** - prior mean of their observations.
    - **solve_lower** - multiplies with ``L^-1``.
    """

    w: Float[Array, "Q S"]
    root: Root
    mean: Float[Array, " SN"]
    solve_lower: Callable[[Any], Any]


class Column(NamedTuple):
    """The weights of function k in B tasks, while S other functions are integrated out.

    - **tasks** - which.
    - **spikes** - the current ones.
    - **prior** - theirs.
    - **squares** - products ``tau <phi_k, phi_k>`` in each task.
    - **linear** - those with what is left without all these functions.
    - **seen** - the feature that each weight adds to the observations of the S functions.
    - **y** - these observations, without function k.
    - **mixing** - weights of the S functions in these tasks.
    """

    tasks: Int[Array, " B"]
    spikes: Float[Array, " B"]
    prior: Prior
    squares: Float[Array, " B"]
    linear: Float[Array, " B"]
    seen: Float[Array, "SN B"]
    y: Float[Array, " SN"]
    mixing: Float[Array, "B S"]

    def observed(self, mean: Float[Array, " SN"]) -> Float[Array, "SN C"]:
        """Deviations of the observations from their prior mean, and the features."""
        return jnp.column_stack([self.y - mean, self.seen])


def take_column(
    key: Array, k: Any, mixing: Mixing, left: Left, hidden: Hidden
) -> tuple[Column, Left]:
    """Take function k out of a few tasks, chosen at random.

    :param left: what is left without the hidden functions.
    :return: the column, and what is left without function k.
    """
    phi_k, W, prior = mixing.phi[k], mixing.weights, mixing.prior
    tasks = random.permutation(key, len(W))[:BLOCK_SIZE]
    residual = left.residual.at[:, tasks].add(jnp.outer(phi_k, W[tasks, k]))
    left, Z, w = left._replace(residual=residual), left.Z[:, tasks], hidden.w[tasks]
    column = Column(
        tasks,
        (W[tasks, k] != 0).astype(W.dtype),
        Prior(prior.log_odds[tasks, k], prior.variance[tasks, k]),
        phi_k**2 @ Z,
        phi_k @ (Z * residual[:, tasks]),
        hidden.root.whiten(w.T[:, None] * (Z * phi_k[:, None])[None]),
        hidden.root.whiten(left.linear_terms(hidden.w)),
        w,
    )
    return column, left


def put_column(
    column: Column, k: Any, new: Float[Array, " B"], mixing: Mixing, left: Left
) -> tuple[Mixing, Left]:
    """Put new weights in the place of those that :func:`take_column` has taken out.

    :param new: the old ones are put back where these are not finite.
    :param left: what is left without function k.
    :return: all weights, and what is left with function k again.
    """
    W = mixing.weights
    new = jnp.where(jnp.all(jnp.isfinite(new)), new, W[column.tasks, k])
    residual = left.residual.at[:, column.tasks].add(-jnp.outer(mixing.phi[k], new))
    W = W.at[column.tasks, k].set(new)
    return mixing._replace(weights=W), left._replace(residual=residual)


def slabs_of(column: Column, half: Float[Array, "SN C"]) -> Slabs:
    """The posterior of the column's slabs.

    What the S functions could take over, were they free, is subtracted; what their prior resists
    is added.

    :param half: ``L^-1`` times :meth:`Column.observed`.
    """
    y, seen = half[:, 0], half[:, 1:]
    # the first two cancel where one task's data are all that the functions can take over
    rounding = 4 * column.spikes.size * jnp.finfo(half.dtype).eps
    gram = jnp.diag((1 + rounding) * column.squares) - column.seen.T @ column.seen + seen.T @ seen
    linear = column.linear - column.seen.T @ column.y + seen.T @ y
    return Slabs(gram, linear, column.prior)


def draw_columns(
    key: Array, others: Bool[Array, " M"], mixing: Mixing, left: Left, hidden: Hidden
) -> tuple[Mixing, Left]:
    """Draw the weights of other functions while S functions, and the slabs, are integrated out.

    A function in use stays in use, so that no function need be drawn that is not.

    :param others: which functions.
    :param left: what is left without the hidden functions.
    :return: the weights, and what is left now.
    """

    def draw_column(carry, item):
        mixing, left = carry
        k, key = item
        key_tasks, key_shear, key_draw = random.split(key, 3)
        column, rest = take_column(key_tasks, k, mixing, left, hidden)
        slabs = slabs_of(column, hidden.solve_lower(column.observed(hidden.mean)))
        elsewhere = jnp.any(mixing.weights[:, k].at[column.tasks].set(0) != 0)
        spikes = shear(key_shear, column, slabs, elsewhere)
        new = gibbs_block(key_draw, slabs, spikes, elsewhere)
        return put_column(column, k, new, mixing, rest)

    def visit(carry, item):
        keep = lambda carry, _: carry  # noqa: E731
        return jax.lax.cond(others[item[0]], draw_column, keep, carry, item), None

    M = len(mixing.phi)
    key_order, key = random.split(key)
    items = (random.permutation(key_order, M), random.split(key, M))
    return jax.lax.scan(visit, (mixing, left), items)[0]


class Shears(NamedTuple):
    """What the shears of some spikes propose.

    - **log_density** - of the spikes themselves.
    - **log_weights** - log probabilities of the C shears.
    - **logits** - of each spike after each shear.
    """

    log_density: Float[Array, ""]
    log_weights: Float[Array, " C"]
    logits: Float[Array, "C B"]

    def log_proposal(self, spikes: Float[Array, " B"]) -> Float[Array, ""]:
        """Log probability with which these spikes are proposed."""
        each = jax.nn.log_sigmoid(jnp.where(spikes[None] > 0, self.logits, -self.logits))
        return jax.nn.logsumexp(self.log_weights + jnp.sum(each, axis=1))


def _shears(column: Column, slabs: Slabs, spikes: Float[Array, " B"]) -> Shears:
    prior = slabs.prior
    B, S = column.mixing.shape
    choices = np.array(list(combinations(range(B), S)))
    precision = column.squares + 1 / prior.variance
    log_odds = prior.log_odds - 0.5 * jnp.log(prior.variance * precision)
    mean = slabs.mean(spikes)
    c, is_solvable = _solve(column.mixing[choices], mean[choices])
    is_shear = is_solvable & jnp.any(spikes[choices] > 0, axis=1)
    b = column.squares[None] * (mean[None] - c @ column.mixing.T)
    return Shears(
        slabs.log_evidence(spikes) + spikes @ prior.log_odds,
        jnp.where(is_shear, -jnp.log(jnp.sum(is_shear)), -jnp.inf),
        log_odds[None] + 0.5 * b**2 / precision[None],
    )


def shear(key: Array, column: Column, slabs: Slabs, may_be_empty: Any) -> Float[Array, " B"]:
    """Propose spikes after a shear ``w_k - sum_s c_s w_s`` of the weights.

    The shear is such that the weights of S tasks, chosen at random, become zero; then each spike is
    drawn given the others' sheared slabs. All zeros of a column can so give way to others at once,
    which one by one they do not. A Metropolis-Hastings step on the spikes alone.
    """
    key_shear, key_spikes, key_accept = random.split(key, 3)
    old = column.spikes
    there = _shears(column, slabs, old)
    logistic = random.logistic(key_spikes, old.shape, old.dtype)
    chosen = there.logits[random.categorical(key_shear, there.log_weights)]
    new = (chosen > logistic).astype(old.dtype)
    back = _shears(column, slabs, new)
    gain = back.log_density + back.log_proposal(old)
    gain -= there.log_density + there.log_proposal(new)
    is_possible = jnp.isfinite(jnp.max(there.log_weights)) & (may_be_empty | jnp.any(new > 0))
    # false where the gain is not a number
    accepted = is_possible & (gain > -random.exponential(key_accept, (), old.dtype))
    return jnp.where(accepted, new, old)


def _solve(
    A: Float[Array, "C S S"], b: Float[Array, "C S"]
) -> tuple[Float[Array, "C S"], Bool[Array, " C"]]:
    """Solve systems of one or two equations; also where there is a solution."""
    if A.shape[-1] == 1:
        det, adjugate = A[:, 0, 0], jnp.ones_like(A)
    else:
        det = A[:, 0, 0] * A[:, 1, 1] - A[:, 0, 1] * A[:, 1, 0]
        adjugate = jnp.stack([A[:, 1, 1], -A[:, 0, 1], -A[:, 1, 0], A[:, 0, 0]], axis=1)
        adjugate = adjugate.reshape(A.shape)
    c = jnp.sum(adjugate * b[:, None], axis=2)
    return c / jnp.where(det != 0, det, 1)[:, None], det != 0
