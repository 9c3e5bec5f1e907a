# SPDX-License-Identifier: Apache-2.0
r"""Pairs under any likelihood of an affine predictor: Metropolis steps, and a learnt Gaussian.

Weights that share a spike are a set, which moves as a whole. A pair is a set of one.

The predictor is :math:`f = o + \sum_m x_m w_m`, and :math:`\ell` the log density of each
observation, as often as it counts. Where observations are missing, both :math:`\ell` and the design
have to be 0.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.linalg import solve, solve_triangular

from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.search import choose, slice_sample
from numpyro_spikeslab.algebra.variates import logistic, normal, uniform

LogDensity = Callable[[Any], Any]
"""``f -> log density``, elementwise."""

# The search for the mode of a slab's conditional: the most evaluations; the longest step, in units
# of the slab's prior; the squared length of a step, in units of its posterior, that ends it.
MAX_EVALUATIONS, LONGEST_STEP, SHORT = 16, 3, 0.02

# Width of a slice, in standard deviations of the Gaussian that chooses its direction; the log of
# a scale has a quarter of it.
WIDTH, LOG_UNIT = 10.0, 0.25

# Share of the prior in the proposal of a slab.
PRIOR_SHARE = 0.05

# Largest log odds, of either sign, with which a set is proposed: about one excluded set in 50 costs
# more than a guess.
MAX_LOG_ODDS = 4.0

# Least precision of a learnt stand-in, relative to the mean one.
MIN_PRECISION = 1e-4


# A sweep of sets


class PairState(NamedTuple):
    """Spikes, slabs and the predictor that belongs to them."""

    spikes: Int[Array, " P"]
    slabs: Float[Array, " P"]
    predictor: Float[Array, " N"]


class Slopes(NamedTuple):
    """Log density of each observation at a predictor, with first and second derivatives there."""

    values: Float[Array, " N"]
    firsts: Float[Array, " N"]
    seconds: Float[Array, " N"]

    @classmethod
    def of(cls, density: LogDensity, f: Float[Array, " N"]) -> "Slopes":
        """Compute them elementwise."""
        one = jnp.ones_like(f)
        (values, firsts), (_, seconds) = jax.jvp(
            lambda f: jax.jvp(density, (f,), (one,)), (f,), (one,)
        )
        return cls(values, firsts, seconds)


class Expansion(NamedTuple):
    """Expansion of a set's conditional at slabs t, in place of the weights.

    - **at** - the slabs t.
    - **log_density** - of each observation.
    - **height** - log density of all and of the slabs' prior, relative to its maximum.
    - **slope** - first derivatives.
    - **root** - Cholesky factor of the precision, minus the second derivatives.
    """

    at: Float[Array, " b"]
    log_density: Float[Array, " N"]
    height: Float[Array, ""]
    slope: Float[Array, " b"]
    root: Float[Array, "b b"]

    @classmethod
    def of(cls, slopes: Slopes, x: Any, variance: Any, at: Any) -> "Expansion":
        """Expand at slabs.

        :param slopes: at the predictor with these slabs.
        :param x: columns of the design, as rows.
        :param variance: of the slabs' prior.
        """
        values, firsts, seconds = slopes
        height = jnp.sum(values) - 0.5 * jnp.sum(at**2 / variance)
        precision = x * jnp.maximum(-seconds, 0) @ x.T + jnp.diag(1 / variance)
        return cls(at, values, height, x @ firsts - at / variance, _root_of(precision))

    @property
    def is_finite(self) -> Any:
        return jnp.isfinite(self.height + jnp.sum(self.slope) + jnp.sum(self.root))

    @property
    def step(self) -> Float[Array, " b"]:
        """The step to the mode of the Gaussian."""
        return self.spread(_solve(self.root, self.slope))

    def spread(self, noise: Any) -> Any:
        """Give standard normal numbers the covariance of the Gaussian."""
        return _solve(self.root, noise, trans=1)

    def square(self, change: Any) -> Any:
        """Return the squared length of a change of the slabs, in units of the Gaussian."""
        return jnp.sum((self.root.T @ change) ** 2)

    def _log_volume(self, variance: Any) -> Any:
        return jnp.sum(jnp.log(jnp.diagonal(self.root)) + 0.5 * jnp.log(variance))

    def log_integral(self, variance: Any) -> Any:
        """Integrate the Gaussian over the slabs, relative to the likelihood at the expansion."""
        square = self.slope @ self.step - jnp.sum(self.at**2 / variance)
        return 0.5 * square - self._log_volume(variance)

    def log_ratio(self, variance: Any, slab: Any, log_density: Any) -> Any:
        """Compute the log ratio of target and proposal, relative to an excluded set."""
        # of the Gaussian and the prior
        squares = jnp.sum(slab**2 / variance) - self.square(slab - self.at - self.step)
        log_odds = 0.5 * squares + self._log_volume(variance)
        proposal = jnp.logaddexp(log_odds + math.log1p(-PRIOR_SHARE), math.log(PRIOR_SHARE))
        change = jnp.sum(log_density - self.log_density)
        return change - self.log_integral(variance) - proposal


def _root_of(precision: Float[Array, "b b"]) -> Float[Array, "b b"]:
    # LAPACK would take longer for one number than all else of a visit
    return jnp.sqrt(precision) if len(precision) == 1 else jnp.linalg.cholesky(precision)


def _solve(root: Float[Array, "b b"], x: Any, trans: int = 0) -> Any:
    return x / root[0] if len(root) == 1 else solve_triangular(root, x, trans=trans, lower=True)


def expand_near_mode(
    density: LogDensity, x: Any, others: Any, variance: Any, start: Expansion
) -> Expansion:
    """Search for the mode of the slabs' conditional, by Newton steps that are halved where it
    falls.

    :param others: predictor without the weights.
    """

    def newton(now):
        longest = LONGEST_STEP * jnp.sqrt(variance)
        return jnp.clip(now.step, -longest, longest)

    def is_open(state):
        turn, now, step = state
        return (turn < MAX_EVALUATIONS) & (now.square(step) > SHORT)

    def turn(state):
        turn, now, step = state
        at = now.at + step
        new = Expansion.of(Slopes.of(density, others + at @ x), x, variance, at)
        rises = new.is_finite & (new.height > now.height)
        now = choose(rises, new, now)
        return turn + 1, now, jnp.where(rises, newton(now), 0.5 * step)

    return lax.while_loop(is_open, turn, (jnp.asarray(1), start, newton(start)))[1]


def metropolis_sweep(
    key: Array,
    rows: Float[Array, "P N"],
    density: LogDensity,
    state: PairState,
    prior: Prior,
    sets: Partition | None = None,
) -> tuple[PairState, Float[Array, ""]]:
    """Visit all sets in turn, each by a Metropolis step.

    A set is proposed to be in by its odds under the Gaussian of the slopes without it, which cost
    little: those of an excluded set are the same for the next one. Slabs are proposed by a Gaussian
    at their mode, of which a small part is replaced by the prior. Neither depends on the set's
    current value (an independence sampler; Tierney, 1994, *Markov chains for exploring posterior
    distributions*), so the ratio of target and proposal decides. With the prior it has a bound
    wherever the likelihood has one, and no chain starts where it hardly ever leaves.

    Weights with log odds of infinity have to be included, and stay so.

    :param rows: the design, features as rows.
    :param sets: weights that share a spike, by default none; log odds of a set are summed.
    :return: the new state, and the mean probability that a proposal is accepted.
    """
    sets = Partition(len(rows)) if sets is None else sets
    parts, accepted = [sets.singles[:, None], *(x.members for x in sets.stacks.values())], []
    for part_key, members in zip(random.split(key, len(parts)), parts, strict=True):

        def cut(x, fill=0.0, members=members):
            return x.at[members].get(mode="fill", fill_value=fill)

        G, b = members.shape
        first, mixed, levels, *others = uniform(part_key, (3 + b, G), state.slabs.dtype)
        mixed, levels = (0.5 * (1 + u) for u in (mixed, levels))
        numbers = logistic(first), normal(jnp.stack(others, axis=1)), mixed, jnp.log(levels)
        priors = jnp.sum(cut(prior.log_odds), axis=1), cut(prior.variance, 1.0)
        current = state.spikes[members[:, 0]], cut(state.slabs)
        visit, f = partial(_visit, density), state.predictor
        start: Any = f, Slopes(f, f, f), jnp.array(False)
        (f, *_), new = lax.scan(visit, start, (cut(rows), *current, *priors, numbers))
        spikes = state.spikes.at[members].set(new[0][:, None], mode="drop")
        slabs = state.slabs.at[members].set(new[1], mode="drop")
        state = PairState(spikes, slabs, f)
        accepted.append(new[2])
    return state, jnp.mean(jnp.concatenate(accepted))


def _visit(density: LogDensity, carry: Any, part: Any) -> Any:
    """Draw a set.

    :param carry: the predictor, and slopes of which a flag says whether they are there.
    """
    f, slopes, is_known = carry
    x, spike, slab, log_odds, variance, (logistic, normal, mixed, level) = part
    others = f - spike * (slab @ x)
    is_known &= spike == 0
    slopes = lax.cond(is_known, lambda: slopes, lambda: Slopes.of(density, others))
    start = Expansion.of(slopes, x, variance, jnp.zeros_like(variance))
    guess = jnp.clip(log_odds + start.log_integral(variance), -MAX_LOG_ODDS, MAX_LOG_ODDS)
    guess = jnp.where(log_odds < jnp.inf, guess, log_odds)
    new_spike = guess > logistic
    from_prior = jnp.sqrt(variance) * normal

    def propose():
        near = expand_near_mode(density, x, others, variance, start)
        loc, log_ratio = near.at + near.step, partial(near.log_ratio, variance)
        gain = jnp.sum(near.log_density - slopes.values)
        log_odds_left = log_odds + gain + near.log_integral(variance) - guess
        takes_prior = ~new_spike | (mixed < PRIOR_SHARE)
        new_slab = jnp.where(takes_prior, from_prior, loc + near.spread(normal))
        new_f = others + new_spike * (new_slab @ x)
        ratio = jnp.where(new_spike, log_ratio(new_slab, density(new_f)), 0)
        ratio -= jnp.where(spike > 0, log_ratio(slab, density(f)), 0)
        change = new_spike.astype(spike.dtype) - spike
        ratio += jnp.where(change == 0, 0, change * log_odds_left)
        # a density that is not a number is one of 0
        ratio = jnp.where(jnp.isnan(ratio), -jnp.inf, ratio)
        new = PairState(new_spike.astype(spike.dtype), new_slab, new_f)
        accepted = choose(level < ratio, new, PairState(spike, slab, f))
        return accepted, jnp.exp(jnp.minimum(ratio, 0))

    def stay_out():
        return PairState(spike, from_prior, f), jnp.ones_like(level)

    (spike, slab, f), accept_prob = lax.cond(new_spike | (spike > 0), propose, stay_out)
    return (f, slopes, spike == 0), (spike, slab, accept_prob)


# A slice of all included weights


def slice_along(
    key: Array,
    x: Float[Array, "K N"],
    included: Bool[Array, " K"],
    slabs: Float[Array, " K"],
    variance: Float[Array, " K"],
    predictor: Float[Array, " N"],
    density: LogDensity,
    precision: Float[Array, " N"],
) -> tuple[Float[Array, " K"], Float[Array, " N"]]:
    """Move included weights together, by slice sampling.

    By a fair coin either all are multiplied by a number, or one of them, chosen at random, moves,
    and the others follow as their mean does under a Gaussian in place of the likelihood. Both are
    far where the data say little of a combination of weights, as where classes are separated or
    one of them is rare; given auxiliary variables, or the other weights, none would get away. The
    direction of the latter does not depend on the slabs, so any Gaussian keeps the posterior.

    :param x: columns of the design, as rows.
    :param precision: of the Gaussian.
    :return: the new slabs, and the predictor.
    """
    key_which, key_kind, key_slice = random.split(key, 3)
    which = jnp.argmax(jnp.where(included, random.uniform(key_which, included.shape), -1))
    x = jnp.where(included[:, None], x, 0)
    posterior = x * precision @ x.T + jnp.diag(1 / variance)
    unit = jnp.where(included, jnp.arange(len(x)) == which, 0).astype(x.dtype)
    direction = solve(posterior, unit, assume_a="pos")
    # of a posterior standard deviation; no move if rounding makes the decomposition fail
    length = jnp.sqrt(jnp.maximum(direction[which], jnp.finfo(x.dtype).tiny))
    direction = jnp.nan_to_num(direction / length, posinf=0, neginf=0)
    scales = random.bernoulli(key_kind)
    direction = jnp.where(scales, included * slabs, direction)
    change, start = direction @ x, density(predictor)
    slope, square = (jnp.sum(direction * y / variance) for y in (slabs, direction))

    def step(t):
        return jnp.where(scales, jnp.expm1(LOG_UNIT * t), t)

    def evaluate(t):
        # the volume of all weights that are scaled changes with them
        volume = scales * LOG_UNIT * t * jnp.sum(included)
        gain = jnp.sum(density(predictor + step(t) * change) - start) + volume
        return gain - slope * step(t) - 0.5 * square * step(t) ** 2, ()

    zero = jnp.zeros((), x.dtype)
    t = step(slice_sample(key_slice, evaluate, zero, width=WIDTH, known=(zero, ()))[0])
    return slabs + t * direction, predictor + t * change


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
