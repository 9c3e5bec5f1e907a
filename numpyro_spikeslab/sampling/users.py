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
from numpyro_spikeslab.sampling.turn import Found, Held, Turn
from numpyro_spikeslab.sampling.weights_of_function import Root

# Changes of the users of a function that has at most this many of them, in each step.
NUM_CHANGES = 3
MAX_USERS = 3


class Use(NamedTuple):
    """Which tasks use a function, and how well that explains the data.

    - **w** - its weights.
    - **noise** - noise scale of each task.
    - **gain** - log of how much better the function explains the observations than none does.
    - **factor** - ``L`` of ``I + diag(a) K diag(a)``.
    """

    w: Float[Array, " Q"]
    noise: Float[Array, " Q"]
    gain: Float[Array, ""]
    factor: Any


def change_users(key: Array, held: Held, turn: Turn) -> Turn:
    """Let tasks use a function or cease to, if few of them do."""
    mu = held.functions.mean[turn.m]

    def use(w, noise, factor=None):
        root = Root.of(held.relative / noise**2, w[:, None])
        left = turn.left._replace(Z=held.relative / noise**2)
        y = root.whiten(left.linear_terms(w[:, None]))
        if factor is None:
            factor = turn.covariance.cholesky(root.diagonal[0])
        deviation = y - root.times(mu[None])
        found = Found.of(turn.covariance, factor, deviation[:, None])
        return Use(w, noise, found.value + 0.5 * y @ y, factor)

    def step(now, key):
        return join_or_leave(key, held, turn, now, use), None

    def change():
        keys = random.split(key, NUM_CHANGES)
        new, _ = jax.lax.scan(step, use(turn.w, turn.noise, turn.factor), keys)
        return new.w, new.noise, new.factor

    few = jnp.sum(turn.w != 0) <= MAX_USERS
    w, noise, factor = jax.lax.cond(few, change, lambda: (turn.w, turn.noise, turn.factor))
    left = turn.left._replace(Z=held.relative / noise**2)
    return turn._replace(w=w, noise=noise, factor=factor, left=left)


def join_or_leave(key: Array, held: Held, turn: Turn, now: Use, use: Callable[..., Use]) -> Use:
    """Let a random task use a function or cease to, while the function is integrated out.

    The weight comes from its prior or, as often, from the noise: noise and weight then have the
    length that the noise had and a random angle, as befits a function that changes so fast that it
    is noise itself. Only functions with few users move so, the others' values are too well known.

    :param use: evaluates weights and noise scales.
    """
    key_task, key_kind, key_weight, key_accept = random.split(key, 4)
    w, moves, m = now.w, held.moves, turn.m
    assert moves is not None
    q = random.categorical(key_task, _log_choice(w))
    slab, before = jnp.sqrt(turn.mixing.prior.variance[q, m]), now.noise[q]
    joins = w[q] == 0
    from_noise = random.bernoulli(key_kind) & moves.own_noise[q]
    length = jnp.hypot(before, w[q])
    angle = jnp.pi * random.uniform(key_weight, (), w.dtype, -0.5, 0.5)
    drawn = slab * random.normal(key_weight, (), w.dtype)
    # the weight in question: that which it may get, or has
    weight = jnp.where(joins, jnp.where(from_noise, length * jnp.sin(angle), drawn), w[q])
    noise_after = jnp.where(joins, length * jnp.cos(angle), length)
    noise_after = jnp.where(from_noise, noise_after, before)
    new = use(w.at[q].set(jnp.where(joins, weight, 0)), now.noise.at[q].set(noise_after))

    def log_joint(at):
        """What depends on the task beside the function."""
        sigma, relative = at.noise[q], held.relative[:, q]
        value = at.gain - 0.5 * relative @ (turn.left.residual[:, q] / sigma) ** 2
        value -= jnp.sum(relative) * jnp.log(sigma)
        return value + jnp.where(moves.own_noise[q], moves.log_prior_of_noise(sigma, q), 0)

    # the angle is uniform on half a circle, whose element of area is length times angle
    log_weight = norm.logpdf(weight, 0, slab)
    log_proposal = jnp.where(from_noise, -jnp.log(jnp.pi * length), log_weight)
    user = turn.mixing.prior.log_odds[q, m] + log_weight - log_proposal
    user += _log_choice(w.at[q].set(weight))[q] - _log_choice(w.at[q].set(0))[q]
    gain = log_joint(new) - log_joint(now) + jnp.where(joins, user, -user)
    is_allowed = jnp.sum(w.at[q].set(0) != 0) < MAX_USERS
    # false where the gain is not a number
    accepted = is_allowed & (gain > -random.exponential(key_accept))
    return choose(accepted, new, now)


def _log_choice(w: Float[Array, " Q"]) -> Float[Array, " Q"]:
    """Log probabilities with which tasks are chosen: half the time, one that is a user."""
    Q, users = w.size, jnp.sum(w != 0)
    mine = jnp.where(users > 0, (w != 0) / jnp.maximum(users, 1), 1 / Q)
    return jnp.log(0.5 / Q + 0.5 * mine)
