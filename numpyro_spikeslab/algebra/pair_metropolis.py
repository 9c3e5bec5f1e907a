# SPDX-License-Identifier: Apache-2.0
r"""Pairs under any likelihood of an affine predictor: Metropolis steps, and a learnt Gaussian.

The predictor is :math:`f = o + \sum_m x_m w_m`, and :math:`\ell` the log density of each
observation, as often as it counts. Where observations are missing, both :math:`\ell` and the design
have to be 0.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.algebra.variates import logistic, normal, uniform

LogDensity = Callable[[Any], Any]
"""``f -> log density``, elementwise."""

# The search for the mode of a slab's conditional: the most evaluations; the longest step, in units
# of the slab's prior; the squared length of a step, in units of its posterior, that ends it.
MAX_EVALUATIONS, LONGEST_STEP, SHORT = 16, 3, 0.02

# Share of the prior in the proposal of a slab.
PRIOR_SHARE = 0.05

# Least precision of a learnt stand-in, relative to the mean one.
MIN_PRECISION = 1e-4


# A sweep of single pairs


class PairState(NamedTuple):
    """Spikes, slabs and the predictor that belongs to them."""

    spikes: Int[Array, " P"]
    slabs: Float[Array, " P"]
    predictor: Float[Array, " N"]


class Expansion(NamedTuple):
    """Expansion of a pair's conditional at a slab t, in place of the weight.

    - **at** - the slab t.
    - **log_density** - of each observation.
    - **height** - log density of all and of the slab's prior, relative to its maximum.
    - **slope**, **precision** - first derivative, and minus the second one.
    """

    at: Float[Array, ""]
    log_density: Float[Array, " N"]
    height: Float[Array, ""]
    slope: Float[Array, ""]
    precision: Float[Array, ""]

    @classmethod
    def of(cls, density: LogDensity, x: Any, others: Any, variance: Any, at: Any) -> "Expansion":
        """Expand at a slab.

        :param x: column of the design.
        :param others: predictor without the weight.
        :param variance: of the slab's prior.
        """
        f, one = others + x * at, jnp.ones_like(others)
        (values, slopes), (_, seconds) = jax.jvp(
            lambda f: jax.jvp(density, (f,), (one,)), (f,), (one,)
        )
        height = jnp.sum(values) - 0.5 * at**2 / variance
        precision = jnp.sum(x**2 * jnp.maximum(-seconds, 0)) + 1 / variance
        return cls(at, values, height, jnp.sum(x * slopes) - at / variance, precision)

    @property
    def is_finite(self) -> Any:
        return jnp.isfinite(self.height + self.slope + self.precision)

    def log_integral(self, variance: Any) -> Any:
        """Integrate the Gaussian over the slab, relative to the likelihood at the expansion."""
        square = self.slope**2 / self.precision - self.at**2 / variance
        return 0.5 * (square - jnp.log(self.precision * variance))

    def log_ratio(self, variance: Any, slab: Any, log_density: Any) -> Any:
        """Compute the log ratio of target and proposal, relative to that of an excluded weight."""
        loc = self.at + self.slope / self.precision
        # of the Gaussian and the prior
        log_odds = slab**2 / variance - self.precision * (slab - loc) ** 2
        log_odds = 0.5 * (log_odds + jnp.log(self.precision * variance))
        proposal = jnp.logaddexp(log_odds + math.log1p(-PRIOR_SHARE), math.log(PRIOR_SHARE))
        change = jnp.sum(log_density - self.log_density)
        return change - self.log_integral(variance) - proposal


def expand_near_mode(density: LogDensity, x: Any, others: Any, variance: Any) -> Expansion:
    """Search for the mode of a slab's conditional from 0, by Newton steps that are halved where the
    conditional falls."""

    def newton(now):
        longest = LONGEST_STEP * jnp.sqrt(variance)
        return jnp.clip(now.slope / now.precision, -longest, longest)

    def is_open(state):
        turn, now, step = state
        return (turn < MAX_EVALUATIONS) & (step**2 * now.precision > SHORT)

    def turn(state):
        turn, now, step = state
        new = Expansion.of(density, x, others, variance, now.at + step)
        rises = new.is_finite & (new.height > now.height)
        now = choose(rises, new, now)
        return turn + 1, now, jnp.where(rises, newton(now), 0.5 * step)

    start = Expansion.of(density, x, others, variance, jnp.zeros_like(variance))
    return lax.while_loop(is_open, turn, (jnp.asarray(1), start, newton(start)))[1]


def metropolis_sweep(
    key: Array, rows: Float[Array, "P N"], density: LogDensity, state: PairState, prior: Prior
) -> tuple[PairState, Float[Array, ""]]:
    """Visit all pairs in turn, each by a Metropolis step.

    The proposal of a pair is its conditional with a Gaussian in place of the slab's, of which a
    small part is replaced by the prior. It does not depend on the pair's current value (an
    independence sampler; Tierney, 1994, *Markov chains for exploring posterior distributions*), so
    the ratio of target and proposal decides, which is 1 for excluded weights. With the prior it has
    a bound wherever the likelihood has one, and no chain starts where it hardly ever leaves.

    Weights with log odds of infinity are always included.

    :param rows: the design, features as rows.
    :return: the new state, and the mean probability that a proposal is accepted.
    """

    def visit(f, part):
        x, spike, slab, log_odds, variance, (logistic, normal, mixed, level) = part
        others = f - x * (spike * slab)
        near = expand_near_mode(density, x, others, variance)
        loc, log_ratio = near.at + near.slope / near.precision, partial(near.log_ratio, variance)
        gain = jnp.sum(near.log_density - density(others))
        new_spike = log_odds + gain + near.log_integral(variance) > logistic
        from_prior = ~new_spike | (mixed < PRIOR_SHARE)
        gaussian = loc + normal * lax.rsqrt(near.precision)
        new_slab = jnp.where(from_prior, jnp.sqrt(variance) * normal, gaussian)
        new_f = others + x * jnp.where(new_spike, new_slab, 0)
        ratio = jnp.where(new_spike, log_ratio(new_slab, density(new_f)), 0)
        ratio -= jnp.where(spike > 0, log_ratio(slab, density(f)), 0)
        # a density that is not a number is one of 0
        ratio = jnp.where(jnp.isnan(ratio), -jnp.inf, ratio)
        new = PairState(new_spike.astype(spike.dtype), new_slab, new_f)
        spike, slab, f = choose(level < ratio, new, PairState(spike, slab, f))
        return f, (spike, slab, jnp.exp(jnp.minimum(ratio, 0)))

    first, second, *others = uniform(key, (4, *state.slabs.shape), state.slabs.dtype)
    mixed, levels = (0.5 * (1 + u) for u in others)
    numbers = logistic(first), normal(second), mixed, jnp.log(levels)
    parts = rows, state.spikes, state.slabs, *prior, numbers
    f, (spikes, slabs, accepted) = lax.scan(visit, state.predictor, parts)
    return PairState(spikes, slabs, f), jnp.mean(accepted)


# A Gaussian in place of the likelihood, and what corrects for it


class LearntMoments(NamedTuple):
    r"""Running moments of predictors and slopes of the log density, from draws.

    The Gaussian that fits best has the precision

    .. math:: W = -\mathrm{Cov}(f, \ell'(f)) / \mathrm{Var}(f),

    which is the mean of :math:`-\ell''` if f is normal (Stein, 1981, *Estimation of the mean of a
    multivariate normal distribution*), but also exists where :math:`\ell` has kinks.

    - **count** - number of draws.
    - **f**, **slope** - means.
    - **squares**, **products** - sums of squared deviations of f, and of products of deviations.
    """

    count: Float[Array, ""]  # type: ignore[assignment]
    f: Float[Array, "*N"]
    slope: Float[Array, "*N"]
    squares: Float[Array, "*N"]
    products: Float[Array, "*N"]

    @classmethod
    def zero(cls, like: Float[Array, "*N"]) -> "LearntMoments":
        """Return the moments before the first draw."""
        zero = jnp.zeros_like(like)
        return cls(jnp.zeros((), like.dtype), zero, zero, zero, zero)

    def updated(self, f: Float[Array, "*N"], slope: Float[Array, "*N"]) -> "LearntMoments":
        """Return the moments with another draw (Welford, 1962)."""
        count = self.count + 1
        change = f - self.f
        mean, mean_slope = self.f + change / count, self.slope + (slope - self.slope) / count
        squares = self.squares + change * (f - mean)
        return LearntMoments(
            count, mean, mean_slope, squares, self.products + change * (slope - mean_slope)
        )

    def stand_in(self) -> StandIn:
        """Return the Gaussian with the mean slope at the mean predictor."""
        tiny = jnp.finfo(self.f.dtype).tiny
        precision = jnp.maximum(-self.products / jnp.maximum(self.squares, tiny), 0)
        mean = jnp.mean(precision)
        # where no predictor has moved, any will do
        precision = jnp.maximum(precision, MIN_PRECISION * jnp.where(mean > 0, mean, 1))
        target = self.f + self.slope / precision
        return StandIn(precision, target, jnp.zeros_like(target))


def correction(
    density: LogDensity, stand_in: StandIn, old: Float[Array, "*N"], new: Float[Array, "*N"]
) -> Float[Array, ""]:
    r"""Compute the log ratio that accepts a move which a Gaussian proposes:

    .. math:: \sum_n [\ell_n(f'_n) - q_n(f'_n)] - \sum_n [\ell_n(f_n) - q_n(f_n)],
        \quad q_n(f) = -\tfrac12 W_n (z_n - f)^2.

    The move has to be reversible for the posterior under q (*surrogate transition*; Liu, 2001,
    *Monte Carlo strategies in scientific computing*). The sum is over differences, since each term
    may be large.

    :param stand_in: its precisions count an observation as often as the density does.
    """
    middle = stand_in.target - 0.5 * (old + new)
    return jnp.sum(density(new) - density(old) - stand_in.precision * (new - old) * middle)
