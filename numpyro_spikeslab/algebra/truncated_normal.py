# SPDX-License-Identifier: Apache-2.0
"""Standard normal numbers that are known to be above a bound, or between two.

Far in the tail the proposal of a draw is a Rayleigh distribution (Marsaglia, 1964, *Generating a
variable from the tail of the normal distribution*).
"""

from jaxtyping import Array, Float

import jax.numpy as jnp
from jax.scipy.special import log_ndtr, ndtr, ndtri

from numpyro_spikeslab.algebra.rejection import first_accepted

FAR = 4
"""Lower bounds above which draws are proposed, and not computed by quantiles."""


def draw_above(key: Array, low: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Draw numbers above some bounds."""

    def propose(numbers, low):
        far = low > FAR
        near_draw = -ndtri(numbers[0] * ndtr(-jnp.where(far, 0, low)))
        far_draw = jnp.sqrt(low**2 - 2 * jnp.log(numbers[0]))
        return jnp.where(far, far_draw, near_draw), ~(far & (numbers[1] * far_draw >= low))

    return first_accepted(key, propose, 2, (low,))


def draw_between(
    key: Array, low: Float[Array, "*N"], high: Float[Array, "*N"]
) -> Float[Array, "*N"]:
    """Draw numbers between two bounds, of which one may be infinite."""

    def propose(numbers, low, high):
        u, far = numbers[0], low > FAR
        above, beyond = (ndtr(-jnp.where(far, 0, x)) for x in (low, high))
        near_draw = -ndtri(u * above + (1 - u) * beyond)
        # of the Rayleigh distribution
        beyond = jnp.where(far, jnp.exp(0.5 * (low - high) * (low + high)), 0)
        far_draw = jnp.sqrt(low**2 - 2 * jnp.log(u + (1 - u) * beyond))
        # rounding must not take draws across the bounds
        drawn = jnp.clip(jnp.where(far, far_draw, near_draw), low, high)
        return drawn, ~(far & (numbers[1] * far_draw >= low))

    # where upper tails keep their digits
    mirrored = low + high < 0
    ends = jnp.where(mirrored, -high, low), jnp.where(mirrored, -low, high)
    drawn = first_accepted(key, propose, 2, ends)
    return jnp.where(mirrored, -drawn, drawn)


def log_prob_between(low: Float[Array, "*N"], high: Float[Array, "*N"]) -> Float[Array, "*N"]:
    """Compute the log probability of two bounds, of which one may be infinite."""
    # where lower tails keep their digits
    mirrored = low + high > 0
    low, high = jnp.where(mirrored, -high, low), jnp.where(mirrored, -low, high)
    has_low = low > -jnp.inf
    # where a slope is not a number, no factor of 0 hides it
    ends = jnp.stack([jnp.where(has_low, low, 0), high], axis=-1)
    # in one call, which takes long to compile
    logs = log_ndtr(ends)
    log_below = logs[..., 1]
    log_share = jnp.where(has_low, logs[..., 0] - log_below, -1)
    return log_below + jnp.where(has_low, jnp.log(-jnp.expm1(log_share)), 0)
