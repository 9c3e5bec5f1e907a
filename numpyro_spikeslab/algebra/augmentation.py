# SPDX-License-Identifier: Apache-2.0
r"""Likelihoods that are mixtures of Gaussians in their predictor.

Given auxiliary variables :math:`\omega`, the density of an observation is a Gaussian in its
predictor f, its *stand-in*:

.. math::
    p(y \mid f) = \int p(\omega)\, e^{c(\omega) - \tau(\omega) (z(\omega) - f)^2 / 2}\, d\omega.

- A sampler that draws the auxiliaries given f afresh in each step, then weights given the
  stand-ins, keeps the posterior of the weights. All else that uses the stand-ins has to be drawn
  before f changes.
- Paired mean field takes the stand-ins of the auxiliaries' optimal factor q. Their expected
  logarithm is :math:`\langle \log p(y, \omega \mid f) - \log q(\omega) \rangle`, a lower bound on
  :math:`\langle \log p(y \mid f) \rangle` at any weights.

Observations that are missing need a value that the likelihood allows, and a predictor.
"""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, log_ndtr
from jax.scipy.stats import norm

from numpyro_spikeslab.algebra import polya_gamma, truncated_normal
from numpyro_spikeslab.algebra.rejection import gamma
from numpyro_spikeslab.algebra.variates import normal, uniform


class StandIn(NamedTuple):
    """Gaussians in the predictors, ``exp(log_norm - precision (target - f)^2 / 2)``.

    Without the density of the auxiliaries, that is; ``expect`` puts its part into ``log_norm``.
    """

    precision: Float[Array, "*N"]
    target: Float[Array, "*N"]
    log_norm: Float[Array, "*N"]


@runtime_checkable
class Augmentation(Protocol):
    """A likelihood with auxiliary variables."""

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        """Compute the log density of each observation."""

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        """Draw the auxiliaries given the predictors, exactly."""

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        """Take the optimal factor of the auxiliaries given moments of the predictors."""


class Logistic(NamedTuple):
    r"""Log odds of y of ``total`` trials: :math:`e^{y f} / (1 + e^f)^b`, up to a constant.

    That is Bernoulli, where the total is the Python number 1, Binomial, and the negative Binomial
    distribution of y successes before r failures, with :math:`b = y + r`. Auxiliaries are
    Polya-Gamma (:mod:`~numpyro_spikeslab.algebra.polya_gamma`). Their expectation is that of
    Jaakkola and Jordan (2000, *Bayesian parameter estimation via variational methods*) and Durante
    and Rigon (2019, *Conditionally conjugate mean-field variational Bayes for logistic models*):
    with :math:`\kappa = y - b/2` and :math:`c^2 = \langle f^2 \rangle`, a bound
    :math:`\kappa \langle f \rangle - b \log(2 \cosh(c/2))`.

    - **y**, **total** - numbers :math:`0 \le y \le b`.
    - **shift** - a number added to the predictor.
    """

    y: Float[Array, "*N"]
    total: Any
    shift: Any = 0.0

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        # one logarithm for both outcomes, and slopes at 0
        f, failures = f + self.shift, self.total - self.y
        falls = f < 0
        down = jnp.where(falls, f, -f)
        return jnp.where(falls, self.y, failures) * down - self.total * jnp.log1p(jnp.exp(down))

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        omega = polya_gamma.draw(key, self.total, f + self.shift)
        return self._stand_in(omega, -math.log(2) * self.total)

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        square = (mean + self.shift) ** 2 + variance
        half = 0.5 * jnp.sqrt(jnp.maximum(square, jnp.finfo(mean.dtype).eps))
        # b E[PG(1, c)], and the log of its normaliser with the tilt
        omega = 0.25 * self.total * jnp.tanh(half) / half
        log_cosh = half + jnp.log1p(jnp.exp(-2 * half))
        return self._stand_in(omega, 2 * omega * half**2 - self.total * log_cosh)

    def _stand_in(self, omega: Float[Array, "*N"], log_norm: Any) -> StandIn:
        # a precision that is not above rounding would make targets that are infinite or NaN
        precision, kappa = jnp.maximum(omega, jnp.finfo(omega.dtype).eps), self.y - 0.5 * self.total
        target = kappa / precision - self.shift
        return StandIn(precision, target, log_norm + 0.5 * kappa**2 / precision)


class Ordered(NamedTuple):
    r"""Classes in order, y from 0 to K - 1, with log odds :math:`c_y - f` of y or less.

    The probability of a class between cut points a and b is :math:`(1 - e^{a - b}) \sigma(f - a)
    \sigma(b - f)`: up to a constant, that of two trials, f above a and f below b. The lowest class
    has no cut point below it, and the highest none above. Both trials are :class:`Logistic`, and so
    are their auxiliaries and their bound.

    - **cutpoints** - shape (..., K - 1), increasing.
    - **count** - how often each observation counts, (..., 1), or the Python number 1.
    """

    y: Float[Array, "*N"]
    cutpoints: Float[Array, "..."]
    count: Any = 1

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        return self._sum(self._trials.log_density(_twice(f)))

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        return self._joined(self._trials.draw(key, _twice(f)))

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        return self._joined(self._trials.expect(_twice(mean), _twice(variance)))

    @property
    def _trials(self) -> Logistic:
        """Return both trials on a last axis, also where there is only one."""
        cuts = jnp.broadcast_to(self.cutpoints, (*self.y.shape, self.cutpoints.shape[-1]))
        ends = jnp.stack([self.y - 1, self.y], axis=-1).astype(int)
        at = jnp.take_along_axis(cuts, ends, axis=-1, mode="clip")
        return Logistic(self.count * jnp.array([1, 0], at.dtype), self.count, shift=-at)

    def _sum(self, x: Float[Array, "*N 2"]) -> Float[Array, "*N"]:
        """Sum over the trials that there are."""
        is_there = jnp.stack([self.y > 0, self.y < self.cutpoints.shape[-1]], axis=-1)
        return jnp.sum(jnp.where(is_there, x, 0), axis=-1)

    def _joined(self, trials: StandIn) -> StandIn:
        """Multiply the Gaussians of the trials."""
        precision, linear = (self._sum(trials.precision * x) for x in (1, trials.target))
        log_norm = self._sum(trials.log_norm - 0.5 * trials.precision * trials.target**2)
        target = linear / precision
        return StandIn(precision, target, log_norm + 0.5 * precision * target**2)


def _twice(x: Float[Array, "*N"]) -> Float[Array, "*N 2"]:
    return jnp.stack([x, x], axis=-1)


class Probit(NamedTuple):
    r"""Classes y, 0 or 1, with probability :math:`\Phi(f)` of 1.

    The auxiliary is a normal variate of mean f that has the sign of the class (Albert and Chib,
    1993, *Bayesian analysis of binary and polychotomous response data*). The bound is
    :math:`\log \Phi(\pm \langle f \rangle) - \mathrm{Var}(f) / 2`.
    """

    y: Float[Array, "*N"]

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        return log_ndtr(self._sign * f)

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        target = f + self._sign * truncated_normal.draw_above(key, -self._sign * f)
        one = jnp.ones_like(f)
        return StandIn(one, target, -0.5 * math.log(2 * math.pi) * one)

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        log_prob = log_ndtr(self._sign * mean)
        pull = self._sign * jnp.exp(norm.logpdf(mean) - log_prob)
        return StandIn(jnp.ones_like(mean), mean + pull, log_prob + 0.5 * pull**2)

    @property
    def _sign(self) -> Float[Array, "*N"]:
        return jnp.where(self.y > 0, 1, -1).astype(self.y.dtype)


class OrderedProbit(NamedTuple):
    r"""Classes in order that are intervals of a normal variate of mean f and variance 1.

    The auxiliary is that variate, between the ends of the class; the bound is like that of
    :class:`Probit`, whose classes meet at 0.

    - **low**, **high** - cut points below and above each class; infinite beside the outer ones.
    """

    low: Float[Array, "*N"]
    high: Float[Array, "*N"]

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        return truncated_normal.log_prob_between(self.low - f, self.high - f)

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        target = f + truncated_normal.draw_between(key, self.low - f, self.high - f)
        one = jnp.ones_like(f)
        return StandIn(one, target, -0.5 * math.log(2 * math.pi) * one)

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        one = jnp.ones_like(mean)
        # the mean of the variate is the slope
        log_prob, pull = jax.jvp(self.log_density, (mean,), (one,))
        return StandIn(one, mean + pull, log_prob + 0.5 * pull**2)


class StudentT(NamedTuple):
    r"""Student-t distribution about f with ``df`` degrees of freedom :math:`\nu`.

    The auxiliary multiplies the precision, :math:`\lambda \sim \mathrm{Gamma}((\nu + 1) / 2,
    (\nu + e^2) / 2)` given the residual e in units of the scale (Lange, Little and Taylor, 1989,
    *Robust statistical modeling using the t distribution*). The bound is the log density at
    :math:`\langle e^2 \rangle`. A density to the power c has the shape :math:`c (\nu + 1) / 2`.
    """

    y: Float[Array, "*N"]
    df: Any
    scale: Any
    count: Any = 1

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        return self._at(self._squares(f))

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        shape = self.count * 0.5 * (self.df + 1)
        shape = jnp.broadcast_to(jnp.asarray(shape, f.dtype), f.shape)
        factor = gamma(key, shape) / (0.5 * (self.df + self._squares(f)))
        precision = factor / self.scale**2
        return StandIn(precision, self.y, 0.5 * jnp.log(precision / (2 * math.pi)))

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        squares = self._squares(mean) + variance / self.scale**2
        factor = self.count * (self.df + 1) / (self.df + squares)
        log_norm = self._at(squares) + 0.5 * factor * squares
        return StandIn(factor / self.scale**2, self.y, log_norm)

    def _squares(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        return ((self.y - f) / self.scale) ** 2

    def _at(self, squares: Float[Array, "*N"]) -> Float[Array, "*N"]:
        df = jnp.asarray(self.df, squares.dtype)
        log_norm = gammaln(0.5 * (df + 1)) - gammaln(0.5 * df)
        log_norm -= 0.5 * jnp.log(math.pi * df) + jnp.log(self.scale)
        return self.count * (log_norm - 0.5 * (df + 1) * jnp.log1p(squares / df))


class Laplace(NamedTuple):
    r"""Laplace distribution about f with scale b.

    The auxiliary is a precision with mean :math:`1 / (b |y - f|)`, inverse Gaussian of shape
    :math:`1 / b^2` (Park and Casella, 2008, *The Bayesian lasso*). The bound is
    :math:`-\log 2 b - c / b` with :math:`c^2 = \langle (y - f)^2 \rangle`.

    Precisions have a heavy tail, beyond x with probability :math:`1 / (2 b^2 x)`. To bound them
    would not be exact, for a mixture of Gaussians of bounded precision has no kink.
    """

    y: Float[Array, "*N"]
    scale: Any

    def log_density(self, f: Float[Array, "*N"]) -> Float[Array, "*N"]:
        return -jnp.log(2 * self.scale) - jnp.abs(self.y - f) / self.scale

    def draw(self, key: Array, f: Float[Array, "*N"]) -> StandIn:
        first, second = uniform(key, (2, *f.shape), f.dtype)
        rate = jnp.abs(self.y - f) / self.scale
        factor = polya_gamma.inverse_gaussian(normal(first), 0.5 * (1 + second), rate)
        precision = factor / self.scale**2
        return StandIn(precision, self.y, 0.5 * jnp.log(precision / (2 * math.pi)))

    def expect(self, mean: Float[Array, "*N"], variance: Float[Array, "*N"]) -> StandIn:
        squares = ((self.y - mean) ** 2 + variance) / self.scale**2
        # any c gives a bound
        c = jnp.sqrt(jnp.maximum(squares, jnp.finfo(squares.dtype).eps))
        return StandIn(1 / (c * self.scale**2), self.y, -jnp.log(2 * self.scale) - 0.5 * c)
