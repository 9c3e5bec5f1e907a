# SPDX-License-Identifier: Apache-2.0
"""Maxima and draws of a density that can be evaluated: parabolas, L-BFGS, slice sampling."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float
import optax

import jax
from jax import random
import jax.numpy as jnp

NUM_CLIMBING_STEPS = 5
"""L-BFGS steps after each sweep. The next sweep moves the maximum, so going on is wasted."""

MAX_SHRINKS = 100


def climb_coordinates(
    value: Callable[[Float[Array, " P"]], Float[Array, ""]],
    x: Float[Array, " P"],
    best: Float[Array, ""],
    step: Float[Array, " P"],
) -> tuple[Float[Array, " P"], Float[Array, ""], Float[Array, " P"]]:
    """Climb by a parabola along each coordinate, never below ``best = value(x)``.

    :param step: first step along each coordinate; a coordinate with step 0 stays.
    :return: the new point, its value, and steps for the next search.
    """

    def along(p, carry):
        # what stays costs nothing
        return jax.lax.cond(carry[2][p] > 0, lambda: free(p, carry), lambda: carry)

    def free(p, carry):
        x, best, step = carry

        # a loop, so that the value is compiled once
        def trial(k, tried):
            offsets, values = tried
            _, below, above, _ = values
            curvature = below - 2 * best + above
            uphill = 2 * jnp.sign(above - below)
            vertex = jnp.where(curvature < 0, 0.5 * (below - above) / curvature, uphill)
            offset = jnp.where(k == 3, jnp.clip(vertex, -2, 2), offsets[k])
            reached = value(x.at[p].add(offset * step[p]))
            return offsets.at[k].set(offset), values.at[k].set(reached)

        offsets = jnp.array([0.0, -1.0, 1.0, 0.0], x.dtype)
        offsets, values = jax.lax.fori_loop(1, 4, trial, (offsets, jnp.full(4, best)))
        winner = jnp.argmax(jnp.nan_to_num(values, nan=-jnp.inf))
        wider = jnp.clip(2 * jnp.abs(offsets[winner]), 0.25, 2) * step[p]
        return (
            x.at[p].add(offsets[winner] * step[p]),
            values[winner],
            step.at[p].set(jnp.clip(wider, 1e-3, 2)),
        )

    if not x.size:
        return x, best, step
    return jax.lax.fori_loop(0, x.size, along, (x, best, step))


def climb(
    value: Callable[[dict[str, Any]], Any], start: dict[str, Any], transforms: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """A few L-BFGS steps up, in unconstrained space.

    :param value: what is to be maximised.
    :param start: where to start, by names.
    :param transforms: for each name the bijection onto its support.
    :return: the end and its value, never below that of the start.
    """

    def constrain(free):
        return {name: jax.tree.map(transforms[name], x) for name, x in free.items()}

    def loss(free):
        return -value(constrain(free))

    free = {name: jax.tree.map(transforms[name].inv, x) for name, x in start.items()}
    solver = optax.lbfgs(memory_size=NUM_CLIMBING_STEPS)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(_, carry):
        free, state = carry
        reached, grad = value_and_grad(free, state=state)
        updates, state = solver.update(grad, state, free, value=reached, grad=grad, value_fn=loss)
        return optax.apply_updates(free, updates), state

    before = loss(free)
    new, _ = jax.lax.fori_loop(0, NUM_CLIMBING_STEPS, step, (free, solver.init(free)))
    after = loss(new)
    # a line search at the limit of the precision may fail; the value must not fall
    better = after < before
    best = jax.tree.map(lambda x, y: jnp.where(better, x, y), new, free)
    return constrain(best), -jnp.where(better, after, before)


def slice_sample(
    key: Array,
    log_density: Callable[[Any], Any],
    x: Float[Array, "*P"],
    value: Float[Array, "*P"],
    width: Any = 4.0,
) -> tuple[Float[Array, "*P"], Float[Array, "*P"]]:
    """One update of independent numbers by slice sampling with shrinkage (Neal 2003).

    The interval is placed at random around ``x`` and not extended, so a number moves by less than
    ``width``. Too wide costs a little, for an interval shrinks fast; too narrow costs steps.

    :param log_density: elementwise.
    :param value: ``log_density(x)``.
    :return: the new numbers and their log densities.
    """
    key_level, key_place, key = random.split(key, 3)
    level = value - random.exponential(key_level, x.shape, x.dtype)
    left = x - width * random.uniform(key_place, x.shape, x.dtype)

    def shrink(state):
        count, key, left, right, new, reached, done = state
        key, key_new = random.split(key)
        u = random.uniform(key_new, x.shape, x.dtype)
        proposal = jnp.where(done, new, left + u * (right - left))
        reached = jnp.where(done, reached, log_density(proposal))
        # what is not a number is below every level
        accepted = done | (reached > level)
        left = jnp.where(~accepted & (proposal < x), proposal, left)
        right = jnp.where(~accepted & (proposal >= x), proposal, right)
        return count + 1, key, left, right, proposal, reached, accepted

    def is_open(state):
        return (state[0] < MAX_SHRINKS) & ~jnp.all(state[-1])

    start = (0, key, left, left + width, x, value, jnp.zeros(x.shape, bool))
    *_, new, reached, done = jax.lax.while_loop(is_open, shrink, start)
    # an interval of the size of a rounding error
    return jnp.where(done, new, x), jnp.where(done, reached, value)
