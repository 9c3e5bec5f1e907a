# SPDX-License-Identifier: Apache-2.0
"""Maxima and draws of a density that can be evaluated: parabolas, L-BFGS, slice sampling."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import optax

import jax
from jax import random
import jax.numpy as jnp

NUM_CLIMBING_STEPS = 5
"""L-BFGS steps after each sweep. The next sweep moves the maximum, so going on is wasted."""

MAX_SHRINKS = 100


def choose(condition: Bool[Array, "*P"], one: Any, other: Any) -> Any:
    """Select the arrays of ``one`` where the condition holds, else those of ``other``."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)


class Ascent(NamedTuple):
    """Point and scale of a search, the value there or a lower bound, and steps for the next one."""

    x: Float[Array, " P"]
    scale: Any
    best: Any
    step: Float[Array, " P"]


def climb_coordinates(
    value: Callable[[Float[Array, " P"], Any], tuple[Float[Array, ""], Any]],
    x: Float[Array, " P"],
    step: Float[Array, " P"],
    scale: Any = 1.0,
    known: Any = -jnp.inf,
    rounds: Any = 1,
) -> tuple[Ascent, tuple[Any, Bool[Array, ""]]]:
    """Climb ``value(x, scale)`` by a parabola along each coordinate of ``x``, in some rounds.

    :param value: also returns a by-product, any arrays.
    :param step: first step along each coordinate; a coordinate with step 0 stays.
    :param scale: a proposed one, kept only if its value reaches ``known``; else it is 1.
    :param known: a value that ``(x, 1)`` reaches; the end is never below it.
    :return: the end, the by-product of the last evaluation, and whether that was at the end.
    """
    scale, known = jnp.asarray(scale, x.dtype), jnp.asarray(known, x.dtype)

    # one loop over all trials, the start and then three for each coordinate: compiles `value` once
    def trial(k, carry):
        now, offsets, values, last = carry
        p, j = (k - 1) // 3 % max(x.size, 1), (k + 2) % 3 + 1
        is_first = k == 0
        offset = jnp.where(is_first, 0, _offset(j, offsets, values))
        step = now.step[p] if x.size else jnp.zeros(())
        tried = now.x.at[p].add(offset * step) if x.size else now.x

        def evaluate():
            reached, root = value(tried, now.scale)
            return reached, (tried, now.scale, root)

        # a coordinate that stays costs nothing
        reached, last = jax.lax.cond(is_first | (step > 0), evaluate, lambda: (now.best, last))
        offsets = offsets.at[j].set(offset)
        values = values.at[j].set(jnp.nan_to_num(reached, nan=-jnp.inf))
        # a decomposition that fails at the proposed scale gives NaN
        fits = (reached >= known) | jnp.isnan(known)
        begun = now._replace(
            scale=jnp.where(fits, now.scale, 1), best=jnp.where(fits, reached, known)
        )
        done = (j == 3) & (step > 0)
        now = choose(is_first, begun, choose(done, _end(now, p, offsets, values), now))
        # the centre of the next parabola
        return now, offsets, values.at[0].set(now.best), last

    start = Ascent(x, scale, known, step)
    nothing = jax.tree.map(jnp.zeros_like, jax.eval_shape(value, x, scale)[1])
    offsets, values = jnp.array([0.0, -1.0, 1.0, 0.0], x.dtype), jnp.full(4, -jnp.inf, x.dtype)
    begin = start, offsets, values, (x, scale, nothing)
    end, _, _, last = jax.lax.fori_loop(0, 1 + 3 * x.size * rounds, trial, begin)
    x, scale, root = last
    return end, (root, jnp.all(x == end.x) & (scale == end.scale))


def _offset(j: Any, offsets: Any, values: Any) -> Any:
    """Return the offset of trial ``j`` in steps: below, above, and the vertex of the parabola."""
    centre, below, above, _ = values
    curvature = below - 2 * centre + above
    uphill = 2 * jnp.sign(above - below)
    vertex = jnp.where(curvature < 0, 0.5 * (below - above) / curvature, uphill)
    return jnp.where(j == 3, jnp.clip(vertex, -2, 2), offsets[j])


def _end(now: Ascent, p: Any, offsets: Any, values: Any) -> Ascent:
    """Go to the best trial along a coordinate, and choose the step for the next search."""
    if not now.x.size:
        return now
    winner = jnp.argmax(values)
    wider = jnp.clip(2 * jnp.abs(offsets[winner]), 0.25, 2) * now.step[p]
    return Ascent(
        now.x.at[p].add(offsets[winner] * now.step[p]),
        now.scale,
        values[winner],
        now.step.at[p].set(jnp.clip(wider, 1e-3, 2)),
    )


def on_real_line(transform: Any, x: Any) -> Any:
    """Invert a transformation onto a support; finite on the boundary too."""
    far = -jnp.log(jnp.finfo(x.dtype).eps)
    return jnp.nan_to_num(transform.inv(x), nan=jnp.nan, posinf=far, neginf=-far)


def climb(
    value: Callable[[dict[str, Any]], Any], start: dict[str, Any], transforms: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Take a few L-BFGS steps up, in unconstrained space; return the end and its value, NaN if the
    slope at the start is not finite: then there is no way up.

    Values on the boundary of their support are moved inside; ``transforms`` are onto the supports.
    """

    # a list: optax finds parts of its state by name, and sites may be named "value" and "grad"
    def constrain(free):
        pairs = zip(start, free, strict=True)
        return {name: jax.tree.map(transforms[name], x) for name, x in pairs}

    def loss(free):
        return -value(constrain(free))

    free = [jax.tree.map(partial(on_real_line, transforms[k]), x) for k, x in start.items()]
    solver = optax.lbfgs(memory_size=NUM_CLIMBING_STEPS)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(k, carry):
        free, state, before = carry
        reached, grad = value_and_grad(free, state=state)
        is_finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grad)]))
        reached = jnp.where(is_finite | (k > 0), reached, jnp.nan)
        updates, state = solver.update(grad, state, free, value=reached, grad=grad, value_fn=loss)
        return optax.apply_updates(free, updates), state, jnp.where(k == 0, reached, before)

    state = solver.init(free)
    unknown = jnp.full_like(optax.tree.get(state, "value"), jnp.inf)
    new, state, before = jax.lax.fori_loop(0, NUM_CLIMBING_STEPS, step, (free, state, unknown))
    # the line search, whose value this is, may fail at the limit of the precision
    after = optax.tree.get(state, "value")
    better = after < before
    best = choose(better, new, free)
    return constrain(best), -jnp.where(better, after, before)


class Slices(NamedTuple):
    """Numbers, log heights of their slices, intervals around them, and updates still to make."""

    x: Float[Array, "*P"]
    level: Float[Array, "*P"]
    lower: Float[Array, "*P"]
    upper: Float[Array, "*P"]
    num_left: Int[Array, "*P"]


def slice_sample(
    key: Array,
    evaluate: Callable[[Any], tuple[Any, Any]],
    x: Float[Array, "*P"],
    num_updates: int = 1,
    width: float = 4.0,
    known: tuple[Any, Any] | None = None,
) -> tuple[Float[Array, "*P"], Any]:
    """Update independent numbers by slice sampling with shrinkage (Neal 2003).

    An interval is placed at random and not extended, so an update moves by less than ``width``. One
    loop makes all updates, so that the density is compiled once. ``evaluate`` gives log densities
    and, for a single number, a by-product; ``known`` is its value at ``x``.
    """

    def begin(x, value, noise, num_left):
        # every number is above the level of a density that is NaN
        level = jnp.nan_to_num(value, nan=-jnp.inf) + jnp.log1p(-noise[0])
        lower = x - width * noise[1]
        return Slices(x, level, lower, lower + width, num_left)

    def step(carry):
        count, key, now, _ = carry
        key, key_new = random.split(key)
        u, *noise = random.uniform(key_new, (3, *x.shape), x.dtype)
        new = now.lower + u * (now.upper - now.lower)
        value, product = evaluate(new)
        accepted = value > now.level
        if known is None:
            # the first proposal is the number itself
            accepted |= count == 0
        is_below = new < now.x
        shrunk = now._replace(
            lower=jnp.where(is_below, new, now.lower), upper=jnp.where(is_below, now.upper, new)
        )
        begun = begin(new, value, noise, now.num_left - 1)
        now = choose(now.num_left > 0, choose(accepted, begun, shrunk), now)
        return count + 1, key, now, product

    def is_open(carry):
        # after so many evaluations, an interval is of the size of a rounding error
        return (carry[0] <= MAX_SHRINKS * num_updates) & jnp.any(carry[2].num_left > 0)

    num_left = jnp.full(x.shape, num_updates)
    if known is None:
        begun, product = Slices(x, jnp.full_like(x, -jnp.inf), x, x, num_left + 1), ()
    else:
        key, key_new = random.split(key)
        value, product = known
        begun = begin(x, value, random.uniform(key_new, (2, *x.shape), x.dtype), num_left)
    *_, end, last = jax.lax.while_loop(is_open, step, (0, key, begun, product))
    # the last evaluation was at the new number, unless all were rejected
    return end.x, choose(jnp.all(end.num_left == 0), last, product)
