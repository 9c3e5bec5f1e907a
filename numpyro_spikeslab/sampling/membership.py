# SPDX-License-Identifier: Apache-2.0
"""Changes of the tasks that use a function, while the function is integrated out."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.stats import norm

from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.sampling.function_state import Evaluation, Fixed, Function, State
from numpyro_spikeslab.sampling.weights_of_function import Integrated

NUM_CHANGES = 3
"""Proposals in each step for a function that at most :data:`MAX_USERS` tasks use."""
MAX_USERS = 3


class Membership(NamedTuple):
    """Which tasks use a function, and how well that explains the data.

    - **w** - weights of the function.
    - **noise** - noise scale of each task.
    - **gain** - log evidence of the tasks' data with the function, less that without it.
    - **factor** - ``L`` of ``I + diag(a) K diag(a)``.
    """

    w: Float[Array, " Q"]
    noise: Float[Array, " Q"]
    gain: Float[Array, ""]
    factor: Any


def change_membership(
    key: Array, fixed: Fixed, state: State, function: Function
) -> tuple[State, Function]:
    """Let tasks join or leave a function that few tasks use."""
    m, covariance = function.m, function.covariance

    def with_members(w, noise):
        return state._replace(weights=state.weights.at[:, m].set(w), noise=noise)

    def evaluate(w, noise, factor=None):
        candidate = with_members(w, noise)
        integrated = Integrated.of(fixed, candidate, m[None])
        y = integrated.observations(fixed, candidate)
        if factor is None:
            factor = covariance.cholesky(integrated.root.diagonal[0])
        evaluation = Evaluation.of(covariance, factor, (y - integrated.mean)[:, None])
        return Membership(w, noise, evaluation.value + 0.5 * y @ y, factor)

    def step(current, key):
        return join_or_leave(key, fixed, (state, m), current, evaluate), None

    w = state.weights[:, m]

    def change():
        start = evaluate(w, state.noise, function.factor)
        end, _ = jax.lax.scan(step, start, random.split(key, NUM_CHANGES))
        return end.w, end.noise, end.factor

    has_few = jnp.sum(w != 0) <= MAX_USERS
    w, noise, factor = jax.lax.cond(has_few, change, lambda: (w, state.noise, function.factor))
    return with_members(w, noise), function._replace(factor=factor)


def join_or_leave(
    key: Array,
    fixed: Fixed,
    target: tuple[State, Any],
    current: Membership,
    evaluate: Callable[..., Membership],
) -> Membership:
    """Propose that a random task joins a function or leaves it (Metropolis-Hastings).

    A new weight comes from its prior or, as often, from the noise: then noise scale and weight are
    on the circle whose radius the noise scale had, at a random angle. That suits functions so rough
    that they are hard to tell from noise. Functions that more tasks use do not move so, since their
    values are known too well.

    :param target: the state, with a residual without the function, and the function's number.
    :param evaluate: evaluates weights and noise scales.
    """
    key_task, key_kind, key_weight, key_accept = random.split(key, 4)
    (state, m), w, moves = target, current.w, fixed.moves
    assert moves is not None
    q = random.categorical(key_task, _log_choice(w))
    slab, noise = jnp.sqrt(state.slab_variance[q, m]), current.noise[q]
    joins = w[q] == 0
    from_noise = random.bernoulli(key_kind) & moves.own_noise[q]
    radius = jnp.hypot(noise, w[q])
    angle = jnp.pi * random.uniform(key_weight, (), w.dtype, -0.5, 0.5)
    from_prior = slab * random.normal(key_weight, (), w.dtype)
    # the weight that the task may get, or has
    weight = jnp.where(joins, jnp.where(from_noise, radius * jnp.sin(angle), from_prior), w[q])
    new_noise = jnp.where(joins, radius * jnp.cos(angle), radius)
    new_noise = jnp.where(from_noise, new_noise, noise)
    proposal = evaluate(
        w.at[q].set(jnp.where(joins, weight, 0)), current.noise.at[q].set(new_noise)
    )

    def log_joint(membership):
        """Log density as a function of the task's noise scale and the members."""
        sigma, relative = membership.noise[q], fixed.relative[:, q]
        value = membership.gain - 0.5 * relative @ (state.residual[:, q] / sigma) ** 2
        value -= jnp.sum(relative) * jnp.log(sigma)
        return value + jnp.where(moves.own_noise[q], moves.log_prior_of_noise(sigma, q), 0)

    # the angle is uniform on half a circle, whose element of area is radius times angle
    log_weight = norm.logpdf(weight, 0, slab)
    log_proposal = jnp.where(from_noise, -jnp.log(jnp.pi * radius), log_weight)
    log_ratio = moves.log_odds[q, m] + log_weight - log_proposal
    log_ratio += _log_choice(w.at[q].set(weight))[q] - _log_choice(w.at[q].set(0))[q]
    gain = log_joint(proposal) - log_joint(current) + jnp.where(joins, log_ratio, -log_ratio)
    is_allowed = jnp.sum(w.at[q].set(0) != 0) < MAX_USERS
    # false where the gain is NaN
    accepted = is_allowed & (gain > -random.exponential(key_accept))
    return choose(accepted, proposal, current)


def _log_choice(w: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """Log probabilities with which tasks are chosen: half the time, one that uses the function."""
    Q, users = w.size, jnp.sum(w != 0)
    among_users = jnp.where(users > 0, (w != 0) / jnp.maximum(users, 1), 1 / Q)
    return jnp.log(0.5 / Q + 0.5 * among_users)
