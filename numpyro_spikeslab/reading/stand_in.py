# SPDX-License-Identifier: Apache-2.0
"""Gaussian stand-ins for the density of observations that are not Normal."""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float

import jax.numpy as jnp

from numpyro_spikeslab.algebra.augmentation import Augmentation, Logistic, StandIn
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.predictor import LINKS, MIXTURES

RARE = 0.02
"""Share of trials with the rarer outcome, below which auxiliary variables are several times too
precise: 6 times here, 19 times at a mean count of 1,000 and a concentration of 5."""


def log_likelihood(
    problem: Problem, values: dict[str, Any], f: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Compute the log density of each observation given the predictor, as often as it counts."""
    count = problem.run(values, of=lambda run: problem.likelihood(run).count)
    f = seen(count, f)
    log_prob = problem.given_predictor(values, f, lambda density: density.log_prob)
    return jnp.where(count > 0, count * log_prob, 0)


def seen(count: Any, f: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replace the predictor of what is missing, which may be NaN: its slope would be NaN, too."""
    return jnp.where(count > 0, f, 0)


def per_count(problem: Problem, values: dict[str, Any], stand_in: StandIn) -> StandIn:
    """Return a stand-in for one observation of each that is there as often as it counts."""
    count = problem.run(values, of=lambda run: problem.likelihood(run).count)
    return stand_in._replace(precision=stand_in.precision / jnp.where(count > 0, count, 1))


class Augmented(NamedTuple):
    """The likelihood of a model as a mixture of Gaussians.

    - **mixture** - in the predictor plus a shift, with all counts of an observation at once.
    - **shift** - the shift.
    - **count** - how often each observation counts.
    - **constant** - log density of an observation less that of the mixture.
    """

    mixture: Augmentation
    shift: Any
    count: Any
    constant: Any

    @property
    def has_counts(self) -> bool:
        """Whether the observations are counts of trials, more than one."""
        return isinstance(self.mixture, Logistic) and not isinstance(self.mixture.total, int)

    @property
    def is_rare(self) -> Bool[Array, ""]:
        """Whether nearly all trials of counts have one outcome, which does not depend on f: then
        auxiliary variables fix the predictor far better than the counts do."""
        counts: Any = self.mixture
        y, total = (jnp.sum(jnp.where(self.count > 0, x, 0)) for x in (counts.y, counts.total))
        return jnp.minimum(y, total - y) < RARE * total

    def log_density(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Compute the log density up to a constant; unlike NumPyro's it has a slope at 0, too."""
        return jnp.where(self.count > 0, self.mixture.log_density(f + self.shift), 0)

    def draw(self, key: Array, f: Float[Array, "..."]) -> StandIn:
        """Draw the auxiliary variables given the predictor."""
        return self._of(self.mixture.draw(key, seen(self.count, f) + self.shift))

    def expect(self, mean: Float[Array, "..."], variance: Float[Array, "..."]) -> StandIn:
        """Return the best stand-in if the predictor has this mean and variance."""
        return self._of(self.mixture.expect(seen(self.count, mean) + self.shift, variance))

    def _of(self, stand_in: StandIn) -> StandIn:
        count, (precision, target, log_norm) = jnp.where(self.count > 0, self.count, 1), stand_in
        log_norm = log_norm / count + self.constant
        return StandIn(precision / count, target - self.shift, log_norm)


def augmented(problem: Problem, values: dict[str, Any], f: Float[Array, "..."]) -> Augmented:
    """Return the mixture at given values of the other sites.

    :param f: the predictor; it matters for rounding alone.
    """
    parts = problem.run(values, of=lambda run: problem.likelihood(run)._replace(predictor=0))
    f = seen(parts.count, f)
    fn = problem.given_predictor(values, f, lambda density: density.fn)
    count = jnp.broadcast_to(jnp.where(parts.count > 0, parts.count, 1), f.shape)
    y = jnp.where(parts.count > 0, parts.value, 0)
    mixture, shift = MIXTURES[problem.form.family](fn, y, count), LINKS[type(fn)].shift(fn)
    constant = (log_likelihood(problem, values, f) - mixture.log_density(f + shift)) / count
    return Augmented(mixture, shift, parts.count, constant)
