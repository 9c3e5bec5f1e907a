# SPDX-License-Identifier: Apache-2.0
"""Draws of weights while functions are integrated out together with the slabs."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.variates import logistic_and_normal
from numpyro_spikeslab.sampling.function_state import Fixed, Integrated, State

NUM_TASKS = 16
"""Tasks whose weights are drawn together; each draw takes a Cholesky factor of this size."""


class Slabs(NamedTuple):
    """Regression on B features whose slabs are integrated out.

    - **gram**, **linear** - products of the features with each other and with the observations,
      times the noise precision.
    """

    gram: Float[Array, "B B"]
    linear: Float[Array, " B"]
    prior: Prior

    def _factor(self, spikes: Float[Array, " B"]) -> tuple[Any, Any, Any]:
        """Return prior scales, zero where excluded, and ``L`` and ``L^-1 b`` in these units."""
        scale = spikes * jnp.sqrt(self.prior.variance)
        precision = scale[:, None] * self.gram * scale + jnp.eye(scale.size, dtype=scale.dtype)
        L = jnp.linalg.cholesky(precision)
        return scale, L, solve_triangular(L, scale * self.linear, lower=True)

    def log_evidence(self, spikes: Float[Array, " B"]) -> Float[Array, ""]:
        """Compute the log Bayes factor of some spikes against none."""
        _, L, half = self._factor(spikes)
        return 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(L)))

    def draw(self, spikes: Float[Array, " B"], noise: Float[Array, " B"]) -> Float[Array, " B"]:
        """Draw the weights from standard normal numbers; from zeros, return their means."""
        scale, L, half = self._factor(spikes)
        return scale * solve_triangular(L, half + noise, lower=True, trans=1)


def gibbs_block(
    key: Array, slabs: Slabs, spikes: Float[Array, " B"], may_be_empty: Any = True
) -> Float[Array, " B"]:
    """Draw each of B spikes in turn with all slabs integrated out, then the slabs together."""
    logistic, normal = logistic_and_normal(key, slabs.prior.log_odds)

    def visit(carry, coordinate):
        spikes, value = carry
        m, log_odds, logistic_m = coordinate
        other = spikes.at[m].set(1 - spikes[m])
        proposed = slabs.log_evidence(other)
        logit = log_odds + jnp.where(spikes[m] > 0, value - proposed, proposed - value)
        moves = (logit > logistic_m) != (spikes[m] > 0)
        # reject proposals whose evidence is NaN
        moves &= (may_be_empty | jnp.any(other > 0)) & ~jnp.isnan(proposed)
        return (jnp.where(moves, other, spikes), jnp.where(moves, proposed, value)), None

    items = (jnp.arange(spikes.size), slabs.prior.log_odds, logistic)
    (spikes, _), _ = jax.lax.scan(visit, (spikes, slabs.log_evidence(spikes)), items)
    return slabs.draw(spikes, normal)


class Column(NamedTuple):
    """The weights of function k in B tasks, while S other functions are integrated out.

    - **tasks** - numbers of the tasks.
    - **spikes** - the current spikes.
    - **prior** - their prior.
    - **squares** - products ``tau <phi_k, phi_k>`` in each task.
    - **linear** - products of ``phi_k`` with the residual without all these functions.
    - **features** - what each weight adds to the observations of the S functions.
    - **y** - these observations, without function k.
    """

    tasks: Int[Array, " B"]
    spikes: Float[Array, " B"]
    prior: Prior
    squares: Float[Array, " B"]
    linear: Float[Array, " B"]
    features: Float[Array, "SN B"]
    y: Float[Array, " SN"]

    def stacked(self, mean: Float[Array, " SN"]) -> Float[Array, "SN C"]:
        """Return deviations of the observations from their prior mean, then the features."""
        return jnp.column_stack([self.y - mean, self.features])

    def slabs(self, half: Float[Array, "SN C"]) -> Slabs:
        """Compute the posterior of the slabs.

        The S functions could explain a part of the data themselves: that part is subtracted, and
        what their prior keeps them from explaining is added again.

        :param half: ``L^-1`` times :meth:`stacked`.
        """
        y, features = half[:, 0], half[:, 1:]
        # the first two terms cancel where the functions could explain all data of a task
        rounding = 4 * self.spikes.size * jnp.finfo(half.dtype).eps
        gram = jnp.diag((1 + rounding) * self.squares)
        gram += features.T @ features - self.features.T @ self.features
        linear = self.linear - self.features.T @ self.y + features.T @ y
        return Slabs(gram, linear, self.prior)


def take_column(
    key: Array, k: Any, fixed: Fixed, state: State, integrated: Integrated
) -> tuple[Column, State]:
    """Take function k out of a few tasks, chosen at random; return its column and that state."""
    phi_k = state.phi[k]
    tasks = random.permutation(key, len(state.weights))[:NUM_TASKS]
    old = state.weights[tasks, k]
    residual = state.residual.at[:, tasks].add(jnp.outer(phi_k, old))
    state = state._replace(residual=residual)
    precision, w = fixed.precision[:, tasks], integrated.w[tasks]
    column = Column(
        tasks=tasks,
        spikes=(old != 0).astype(old.dtype),
        prior=Prior(fixed.log_odds[tasks, k], state.slab_variance[tasks, k]),
        squares=phi_k**2 @ precision,
        linear=phi_k @ (precision * residual[:, tasks]),
        features=integrated.root.whiten(w.T[:, None] * (precision * phi_k[:, None])[None]),
        y=integrated.observations(fixed, state),
    )
    return column, state


def put_column(column: Column, k: Any, new: Float[Array, " B"], state: State) -> State:
    """Put finite new weights, or else the old ones, where :func:`take_column` was."""
    new = jnp.where(jnp.all(jnp.isfinite(new)), new, state.weights[column.tasks, k])
    residual = state.residual.at[:, column.tasks].add(-jnp.outer(state.phi[k], new))
    return state._replace(weights=state.weights.at[column.tasks, k].set(new), residual=residual)


def draw_columns(
    key: Array,
    others: Bool[Array, " M"],
    fixed: Fixed,
    state: State,
    system: tuple[Integrated, Callable[[Any], Any]],
) -> State:
    """Draw weights of ``others`` while S functions, and the slabs, are integrated out.

    A function in use stays in use, so that no idle function need be drawn.
    """
    integrated, solve_lower = system

    def draw_column(state, item):
        k, key = item
        key_tasks, key_draw = random.split(key)
        column, state = take_column(key_tasks, k, fixed, state, integrated)
        slabs = column.slabs(solve_lower(column.stacked(integrated.mean)))
        used_elsewhere = jnp.any(state.weights[:, k].at[column.tasks].set(0) != 0)
        new = gibbs_block(key_draw, slabs, column.spikes, used_elsewhere)
        return put_column(column, k, new, state)

    def visit(state, item):
        return jax.lax.cond(others[item[0]], draw_column, lambda s, _: s, state, item), None

    M = len(state.phi)
    key_order, key = random.split(key)
    items = (random.permutation(key_order, M), random.split(key, M))
    return jax.lax.scan(visit, state, items)[0]
