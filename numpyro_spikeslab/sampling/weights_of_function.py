# SPDX-License-Identifier: Apache-2.0
r"""Draws of weights while functions are integrated out together with the slabs.

Given the weights, the tasks' likelihood of function m is that of N independent observations
:math:`y_n \sim \mathcal{N}(a_n \phi_{nm}, 1)` with :math:`a_n^2 = \sum_q \tau_{nq} w_{qm}^2`. All
densities come from :math:`I + \mathrm{diag}(a) K \mathrm{diag}(a) = L L^\top`.
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
from numpyro_spikeslab.sampling.function_state import Fixed, State

NUM_TASKS = 16
"""Tasks whose weights are drawn together; each draw takes a Cholesky factor of this size."""


class Root(NamedTuple):
    """Upper triangular ``R``, for each input, of the precision ``R^T R`` that S functions get from
    their tasks; S is one or two.

    - **diagonal** - zero where no task has a weight.
    - **upper** - the entry beside it, for two functions.
    """

    diagonal: Float[Array, "S N"]
    upper: Float[Array, " N"]

    @classmethod
    def of(cls, precision: Float[Array, "N Q"], w: Float[Array, "Q S"]) -> "Root":
        """Compute the root.

        :param precision: precisions of the observations.
        :param w: weights of the functions.
        """
        first = jnp.sqrt(precision @ w[:, 0] ** 2)
        if w.shape[1] == 1:
            return cls(first[None], jnp.zeros_like(first))
        square = precision @ w[:, 1] ** 2
        upper = _over(precision @ (w[:, 0] * w[:, 1]), first)
        second = square - upper**2
        # with one task the second direction has no precision; the difference is a rounding error
        second = jnp.where(second > 100 * jnp.finfo(second.dtype).eps * square, second, 0)
        return cls(jnp.stack([first, jnp.sqrt(second)]), upper)

    def times(self, f: Float[Array, "S N"]) -> Float[Array, " SN"]:
        """Return ``R f``."""
        scaled = self.diagonal * f
        return jnp.ravel(scaled.at[0].add(self.upper * f[1]) if len(f) > 1 else scaled)

    def transposed(self, u: Float[Array, " SN"]) -> Float[Array, "S N"]:
        """Return ``R^T u``."""
        u = u.reshape(self.diagonal.shape)
        scaled = self.diagonal * u
        return scaled.at[1].add(self.upper * u[0]) if len(u) > 1 else scaled

    def whiten(self, h: Float[Array, "S N ..."]) -> Float[Array, "SN ..."]:
        """Return ``R^-T h``, the observations of ``R f`` with unit variance."""
        parts = [_over(h[0], self.diagonal[0])]
        if len(h) > 1:
            upper = self.upper.reshape(self.upper.shape + (1,) * (h.ndim - 2))
            parts.append(_over(h[1] - upper * parts[0], self.diagonal[1]))
        return jnp.concatenate(parts)


def _over(x: Float[Array, "N ..."], a: Float[Array, " N"]) -> Float[Array, "N ..."]:
    """Divide ``x`` by ``a``, with 0 where ``a`` is 0."""
    a = a.reshape(a.shape + (1,) * (x.ndim - 1))
    return jnp.where(a > 0, x / jnp.where(a > 0, a, 1), 0)


class Integrated(NamedTuple):
    """S functions that are integrated out.

    - **w** - their weights.
    - **root** - the root of the precisions that they get from their tasks.
    - **mean** - prior mean of their whitened observations.
    """

    w: Float[Array, "Q S"]
    root: Root
    mean: Float[Array, " SN"]

    @classmethod
    def of(cls, fixed: Fixed, state: State, members: Any) -> "Integrated":
        """Integrate out functions, given their numbers.

        :param members: their numbers, shape (S,).
        """
        w = state.weights[:, members]
        root = Root.of(fixed.precision(state.noise), w)
        return cls(w, root, root.times(fixed.functions.mean[members]))

    def observations(self, fixed: Fixed, state: State) -> Float[Array, " SN"]:
        """Whitened observations of the functions; the residual must be without these."""
        return self.root.whiten(fixed.linear_terms(state, self.w))


class Column(NamedTuple):
    """The weights of function k in B tasks, while S other functions are integrated out.

    - **tasks** - numbers of the tasks.
    - **spikes** - the current spikes.
    - **prior** - their prior.
    - **squares** - products ``tau <phi_k, phi_k>`` in each task.
    - **linear** - products of ``phi_k`` with the residual without all these functions.
    - **features** - what each weight adds to the observations of the S functions.
    - **y** - these observations, without function k.
    - **w** - weights of the S functions in these tasks.
    """

    tasks: Int[Array, " B"]
    spikes: Float[Array, " B"]
    prior: Prior
    squares: Float[Array, " B"]
    linear: Float[Array, " B"]
    features: Float[Array, "SN B"]
    y: Float[Array, " SN"]
    w: Float[Array, "B S"]

    def stacked(self, mean: Float[Array, " SN"]) -> Float[Array, "SN C"]:
        """Deviations of the observations from their prior mean, then the features."""
        return jnp.column_stack([self.y - mean, self.features])


def take_column(
    key: Array, k: Any, fixed: Fixed, state: State, integrated: Integrated
) -> tuple[Column, State]:
    """Take function k out of a few tasks, chosen at random.

    :param state: its residual is without the integrated functions.
    :return: the column, and the state whose residual is without function k in these tasks, too.
    """
    phi_k, prior = state.phi[k], fixed.prior(state)
    tasks = random.permutation(key, len(state.weights))[:NUM_TASKS]
    old = state.weights[tasks, k]
    residual = state.residual.at[:, tasks].add(jnp.outer(phi_k, old))
    state = state._replace(residual=residual)
    precision, w = fixed.precision(state.noise)[:, tasks], integrated.w[tasks]
    column = Column(
        tasks=tasks,
        spikes=(old != 0).astype(old.dtype),
        prior=Prior(prior.log_odds[tasks, k], prior.variance[tasks, k]),
        squares=phi_k**2 @ precision,
        linear=phi_k @ (precision * residual[:, tasks]),
        features=integrated.root.whiten(w.T[:, None] * (precision * phi_k[:, None])[None]),
        y=integrated.observations(fixed, state),
        w=w,
    )
    return column, state


def put_column(column: Column, k: Any, new: Float[Array, " B"], state: State) -> State:
    """Put new weights where :func:`take_column` has taken the old ones out.

    :param new: the old weights return if any new one is not finite.
    """
    new = jnp.where(jnp.all(jnp.isfinite(new)), new, state.weights[column.tasks, k])
    residual = state.residual.at[:, column.tasks].add(-jnp.outer(state.phi[k], new))
    return state._replace(weights=state.weights.at[column.tasks, k].set(new), residual=residual)


def slabs_of(column: Column, half: Float[Array, "SN C"]) -> Slabs:
    """Compute the posterior of the column's slabs.

    The S functions could explain a part of the data themselves: that part is subtracted, and what
    their prior keeps them from explaining is added again.

    :param half: ``L^-1`` times :meth:`Column.stacked`.
    """
    y, features = half[:, 0], half[:, 1:]
    # the first two terms cancel where the functions could explain all data of a task
    rounding = 4 * column.spikes.size * jnp.finfo(half.dtype).eps
    gram = jnp.diag((1 + rounding) * column.squares)
    gram += features.T @ features - column.features.T @ column.features
    linear = column.linear - column.features.T @ column.y + features.T @ y
    return Slabs(gram, linear, column.prior)


def draw_columns(
    key: Array,
    others: Bool[Array, " M"],
    fixed: Fixed,
    state: State,
    system: tuple[Integrated, Callable[[Any], Any]],
) -> State:
    """Draw the weights of other functions while S functions, and the slabs, are integrated out.

    A function in use stays in use, so that no idle function need be drawn.

    :param others: which functions' weights to draw.
    :param state: its residual is without the integrated functions.
    :param system: the integrated functions, and the product with ``L^-1``.
    """
    integrated, solve_lower = system

    def draw_column(state, item):
        k, key = item
        key_tasks, key_shear, key_draw = random.split(key, 3)
        column, state = take_column(key_tasks, k, fixed, state, integrated)
        slabs = slabs_of(column, solve_lower(column.stacked(integrated.mean)))
        used_elsewhere = jnp.any(state.weights[:, k].at[column.tasks].set(0) != 0)
        spikes = shear(key_shear, column, slabs, used_elsewhere)
        new = gibbs_block(key_draw, slabs, spikes, used_elsewhere)
        return put_column(column, k, new, state)

    def visit(state, item):
        return jax.lax.cond(others[item[0]], draw_column, lambda s, _: s, state, item), None

    M = len(state.phi)
    key_order, key = random.split(key)
    items = (random.permutation(key_order, M), random.split(key, M))
    return jax.lax.scan(visit, state, items)[0]


class Shears(NamedTuple):
    """The proposals of :func:`shear` from some spikes.

    - **log_density** - of the spikes themselves.
    - **log_weights** - log probabilities of the C shears.
    - **logits** - of each spike after each shear.
    """

    log_density: Float[Array, ""]
    log_weights: Float[Array, " C"]
    logits: Float[Array, "C B"]

    @classmethod
    def of(cls, column: Column, slabs: Slabs, spikes: Float[Array, " B"]) -> "Shears":
        """List the shears from the given spikes."""
        prior = slabs.prior
        B, S = column.w.shape
        choices = np.array(list(combinations(range(B), S)))
        precision = column.squares + 1 / prior.variance
        log_odds = prior.log_odds - 0.5 * jnp.log(prior.variance * precision)
        mean = slabs.mean(spikes)
        c, is_solvable = _solve(column.w[choices], mean[choices])
        is_shear = is_solvable & jnp.any(spikes[choices] > 0, axis=1)
        b = column.squares[None] * (mean[None] - c @ column.w.T)
        return cls(
            slabs.log_evidence(spikes) + spikes @ prior.log_odds,
            jnp.where(is_shear, -jnp.log(jnp.sum(is_shear)), -jnp.inf),
            log_odds[None] + 0.5 * b**2 / precision[None],
        )

    def log_proposal(self, spikes: Float[Array, " B"]) -> Float[Array, ""]:
        """Log probability with which these spikes are proposed."""
        each = jax.nn.log_sigmoid(jnp.where(spikes[None] > 0, self.logits, -self.logits))
        return jax.nn.logsumexp(self.log_weights + jnp.sum(each, axis=1))


def shear(key: Array, column: Column, slabs: Slabs, may_be_empty: Any) -> Float[Array, " B"]:
    """Propose spikes after a shear ``w_k - sum_s c_s w_s`` of the weights.

    The shear is such that the weights of S tasks, chosen at random, become zero; then each spike is
    drawn given the others' sheared slabs. So all zeros of a column can change places at once, which
    they hardly do one by one. This is a Metropolis-Hastings step on the spikes alone.
    """
    key_shear, key_spikes, key_accept = random.split(key, 3)
    old = column.spikes
    forward = Shears.of(column, slabs, old)
    logistic = random.logistic(key_spikes, old.shape, old.dtype)
    logits = forward.logits[random.categorical(key_shear, forward.log_weights)]
    new = (logits > logistic).astype(old.dtype)
    backward = Shears.of(column, slabs, new)
    gain = backward.log_density + backward.log_proposal(old)
    gain -= forward.log_density + forward.log_proposal(new)
    is_possible = jnp.isfinite(jnp.max(forward.log_weights)) & (may_be_empty | jnp.any(new > 0))
    # false where the gain is NaN
    accepted = is_possible & (gain > -random.exponential(key_accept, (), old.dtype))
    return jnp.where(accepted, new, old)


def _solve(
    A: Float[Array, "C S S"], b: Float[Array, "C S"]
) -> tuple[Float[Array, "C S"], Bool[Array, " C"]]:
    """Solve systems of one or two equations by Cramer's rule; also return which are regular."""
    if A.shape[-1] == 1:
        det, cofactors = A[:, 0, 0], b
    else:
        (p, q), (r, s) = A[:, 0].T, A[:, 1].T
        det = p * s - q * r
        cofactors = jnp.stack([s * b[:, 0] - q * b[:, 1], p * b[:, 1] - r * b[:, 0]], axis=1)
    return cofactors / jnp.where(det != 0, det, 1)[:, None], det != 0
