# SPDX-License-Identifier: Apache-2.0
"""Times until an event, seen or known between limits: their logarithms have a location."""

import math
from typing import Any, ClassVar

from jaxtyping import Float
import numpy as np

from jax import lax, random
from jax.nn import softplus
import jax.numpy as jnp
from jax.scipy.special import log_ndtr, logit, ndtri
from jax.scipy.stats import norm

import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import promote_shapes, validate_sample


class Time(dist.Distribution):
    """Times whose logarithm is ``loc + scale * z``.

    Subclasses have the distribution of z:

    - **log_density** - of z.
    - **log_survival** - log probability that z is larger.
    - **exceeded** - the z that is exceeded with a probability.

    A value is the limit below which a time does not lie, 0 if there is none, and ``upper`` the one
    above which it does not lie; an event is seen where they are equal. NumPyro's censored
    distributions round survival below the smallest difference from 1 up to it.

    :param upper: upper limits; infinite where a time is later than its value.
    """

    arg_constraints: ClassVar = {"loc": constraints.real, "scale": constraints.positive}
    support = constraints.nonnegative
    pytree_data_fields = ("loc", "scale", "upper")
    log_density: ClassVar[Any]
    log_survival: ClassVar[Any]
    exceeded: ClassVar[Any]

    def __init__(self, loc: Any, scale: Any, upper: Any, *, validate_args: bool | None = None):
        shape = lax.broadcast_shapes(*map(jnp.shape, (loc, scale, upper)))
        self.loc, self.scale, self.upper = promote_shapes(loc, scale, upper, shape=shape)
        super().__init__(shape, validate_args=validate_args)

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> Any:
        """Draw times, without a look at limits."""
        tiny = jnp.finfo(jnp.result_type(float)).tiny
        u = random.uniform(key, self.shape(sample_shape), minval=tiny)
        return jnp.exp(self.loc + self.scale * self.exceeded(u))

    @property
    def median(self) -> Any:
        """Return the time that half of the events precede."""
        return jnp.exp(self.loc + self.scale * self.exceeded(0.5))

    @validate_sample
    def log_prob(self, value: Any) -> Any:
        """Compute the log density of events, and log probabilities of limits."""

        def standard(time: Any) -> tuple[Any, Any]:
            # where a slope is not a number, no term of 0 hides it
            inside = (time > 0) & (time < jnp.inf)
            log_time = jnp.log(jnp.where(inside, time, 1.0))
            return inside, (log_time - self.loc) / self.scale

        has_lower, low = standard(value)
        has_upper, high = standard(self.upper)
        log_later = jnp.where(has_lower, self.log_survival(low), 0.0)
        is_seen = value == self.upper
        is_between = has_upper & ~is_seen
        # relative to the probability above the lower limit
        log_beyond = jnp.where(is_between, self.log_survival(high) - log_later, -1.0)
        log_between = jnp.where(is_between, jnp.log(-jnp.expm1(log_beyond)), 0.0)
        # of the time, not of its logarithm
        log_unit = jnp.log(jnp.where(has_lower, value, 1.0)) + jnp.log(self.scale)
        return jnp.where(is_seen, self.log_density(low) - log_unit, log_later + log_between)


class WeibullTime(Time):
    """Times by Weibull with the scale ``exp(loc)`` and the shape ``1 / scale``."""

    log_density = staticmethod(lambda z: z - jnp.exp(z))
    log_survival = staticmethod(lambda z: -jnp.exp(z))
    exceeded = staticmethod(lambda probability: jnp.log(-jnp.log(probability)))


class LogNormalTime(Time):
    """Times whose logarithm is Normal."""

    log_density = staticmethod(norm.logpdf)
    log_survival = staticmethod(lambda z: log_ndtr(-z))
    exceeded = staticmethod(lambda probability: -ndtri(probability))


class LogLogisticTime(Time):
    """Times whose logarithm is logistic."""

    log_density = staticmethod(lambda z: -softplus(z) - softplus(-z))
    log_survival = staticmethod(lambda z: -softplus(z))
    exceeded = staticmethod(lambda probability: -logit(probability))


def concordance(
    predictor: Float[np.ndarray, " N"],
    lower: Float[np.ndarray, " N"],
    upper: Float[np.ndarray, " N"],
    weights: Float[np.ndarray, " N"],
) -> float:
    """Compute the share of pairs of rows whose predictors are in the order of their times.

    Pairs whose order the limits do not tell are left out, and equal predictors count half (Harrell,
    Lee and Mark, 1996, *Multivariable prognostic models*).
    """
    right = total = 0.0
    is_open = lower < upper
    for f, high, weight in zip(predictor, upper, weights, strict=True):
        later = weight * weights * ((high < lower) | ((high == lower) & is_open))
        total += later.sum()
        right += later @ (0.5 * (predictor > f) + 0.5 * (predictor >= f))
    return float(right / total) if total > 0 else math.nan
