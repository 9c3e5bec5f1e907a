# SPDX-License-Identifier: Apache-2.0
"""Likelihoods: the one place that knows which are Normal, and what stands in for others.

A likelihood is a class here, or a row of :data:`LINKS` if it is a mixture of Gaussians.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, Bool, Float

from jax import nn
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import ndtr

import numpyro.distributions as dist

from numpyro_spikeslab.algebra import augmentation
from numpyro_spikeslab.algebra.augmentation import (
    Augmentation,
    Laplace,
    Logistic,
    Ordered,
    Probit,
    StandIn,
    StudentT,
)
from numpyro_spikeslab.algebra.observations import Observations
from numpyro_spikeslab.algebra.sparse_sums import Entries
from numpyro_spikeslab.models.distributions import OrderedProbit
from numpyro_spikeslab.models.primitives import ENTRIES_MARK
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.program import compiled
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.priors import WRAPPERS, Distributions, base_of

RARE = 0.02
"""Share of trials with the rarer outcome, below which data augmentation mixes badly. Here the
conditional precision of the predictor is 6 times too high; it is 19 times too high at a mean count
of 1,000 and a concentration of 5."""


# Observations


class Density(NamedTuple):
    """The density of non-Normal observations.

    - **log_prob** - log density of each observation, in their shape.
    - **fns** - their distribution ``fn``.
    """

    log_prob: Any
    fns: Distributions

    @property
    def fn(self) -> Any:
        return self.fns["fn"]


class Observed(NamedTuple):
    """The observations of a site. All arrays broadcast to their shape.

    - **value** - the observations.
    - **predictor**, **scale** - location and standard deviation of their distribution. If it is not
      Normal, the predictor is 0 until it is found, and the scale is 1.
    - **count** - how often each counts: masks times ``handlers.scale``. It is boolean if there are
      only masks: then each counts once or not at all, whatever the data.
    - **entries** - the mark of a sparse table: row and column of each observation.
    - **density** - of non-Normal observations, else `None`.
    """

    value: Array
    predictor: Array
    scale: Array
    count: Array  # type: ignore[assignment]
    entries: Entries | None
    density: Density | None

    @classmethod
    def of(cls, site: dict[str, Any], log_prob: Callable[[Any, Any], Any]) -> "Observed":
        """Read the observations of a site.

        :param log_prob: computes log densities, from a distribution and values.
        """
        fn, density = site["fn"], None
        base, given = base_of(fn), jnp.asarray(site["value"])
        value = _known_end(base, given) if _has_ends(base) else given
        rank, pairs = jnp.ndim(value), jnp.ndim(given) - jnp.ndim(value)

        def aligned(x, event_dim=0, dtype=float):
            # a factor of whole events has no axes for their parts
            x = jnp.asarray(x, dtype)
            x = x.reshape(x.shape + (1,) * event_dim)
            return x.reshape((1,) * (rank - x.ndim) + x.shape)

        factor, kind = (True, bool) if site["scale"] is None else (site["scale"], float)
        count = aligned(factor, fn.event_dim - pairs, kind)
        while isinstance(fn, WRAPPERS):
            if isinstance(fn, dist.MaskedDistribution):
                count = count * aligned(fn._mask, fn.event_dim - pairs, kind)
            fn = fn.base_dist
        if isinstance(base, dist.MultivariateNormal):
            loc, scale = _independent(base, value)
        elif Normal.fits(base):
            loc, scale = base.loc, base.scale
        else:
            # missing observations may be NaN, whose slope in other sites would be NaN, too
            allowed = base.support.feasible_like(given).astype(given.dtype)
            seen = jnp.reshape(count > 0, jnp.shape(count) + (1,) * pairs)
            counted = given if jnp.size(count) == 1 else jnp.where(seen, given, allowed)
            fns = Distributions(fn=base)
            density = Density(jnp.broadcast_to(log_prob(base, counted), value.shape), fns)
            loc, scale = jnp.zeros((), density.log_prob.dtype), 1.0
        entries = site["infer"].get(ENTRIES_MARK)
        if entries is not None:
            entries = Entries(*(jnp.asarray(x, jnp.int32) for x in entries))
        parts, dtype = (value, aligned(loc), aligned(scale)), jnp.result_type(loc, float)
        value, loc, scale = (x.astype(dtype) for x in parts)
        count = count if kind is bool else count.astype(dtype)
        return cls(value, loc, scale, count, entries, density)

    def seen(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Set numbers of missing observations to 0: they may be NaN, and so may their slope."""
        return jnp.where(self.count > 0, x, 0)

    def counted(self, log_prob: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return log densities, each as often as it counts."""
        return self.seen(self.count * log_prob)

    @property
    def times(self) -> Any:
        """How often each observation counts, 1 for missing ones."""
        return jnp.where(self.count > 0, self.count, 1).astype(self.value.dtype)

    def for_one(self, stand_in: StandIn) -> StandIn:
        """Return a stand-in for one observation of each that is there as often as it counts."""
        return stand_in._replace(precision=stand_in.precision / self.times)

    def in_tasks(
        self, form: Form, layout: Observations, stand_in: StandIn | None = None
    ) -> dict[str, Any]:
        """Return the fields of a view that describe the observations.

        :param stand_in: for the density of each observation.
        """
        if stand_in is not None:
            normal = self._replace(value=stand_in.target, scale=stand_in.precision**-0.5)
            log_norm = jnp.sum(self.counted(stand_in.log_norm))
            return normal.in_tasks(form, layout) | {"log_scale": -log_norm}
        full = jnp.shape(self.value)

        def tasks_last(x):
            # broadcast before columns are flattened
            return form.tasks_last(jnp.broadcast_to(x, full) if form.is_design else x)

        residual = self.seen(self.value - self.predictor)
        Y = form.tasks_last(jnp.broadcast_to(residual, full))
        counts = jnp.broadcast_to(tasks_last(self.count), Y.shape).astype(Y.dtype)
        scales = tasks_last(self.scale) if form.varying_noise else form.tasks_last(self.scale)
        relative = counts / scales**2 if form.varying_noise else counts
        info = jnp.finfo(relative.dtype)
        # the precision of observations that are all zero stays a number
        smallest = info.tiny**0.75
        values = form.tasks_last(self.seen(self.value))
        rounding = relative * ((info.eps * values) ** 2 + smallest)
        weights = relative[:, :1] if form.complete else relative
        one = jnp.ones((1, 1), scales.dtype)
        return {
            "Y": layout.stored(Y),
            "relative": layout.stored(weights),
            "sigma2": layout.per_task(one if form.varying_noise else scales**2),
            "count": layout.by_task(counts),
            "rounding": layout.by_task(rounding),
            "log_scale": jnp.sum(counts * (jnp.log(scales) + 0.5 * jnp.log(2 * jnp.pi))),
        }


def _has_ends(fn: dist.Distribution) -> bool:
    """Test whether an observation is a pair of ends, between which a number lies."""
    return isinstance(fn, dist.IntervalCensoredDistribution)


def _known_end(fn: dist.IntervalCensoredDistribution, ends: Any) -> Any:
    """Return one end of each observation that is known; NaN where the ends are not in order."""
    low, high = ends[..., 0], ends[..., 1]
    is_left, is_right = fn.left_censored, fn.right_censored
    known = jnp.where(is_left & ~is_right, high, low)
    return jnp.where((low <= high) | (is_left ^ is_right), known, jnp.nan)


def _independent(fn: dist.MultivariateNormal, value: Any) -> tuple[Any, Any]:
    """Return location and scale of independent observations of the same density.

    The residuals are whitened, not the observations, which no other site may move.
    """
    residual = value - fn.loc
    shape = *residual.shape[:-1], *fn.scale_tril.shape[-2:]
    root = jnp.broadcast_to(fn.scale_tril, shape)
    scale = jnp.diagonal(fn.scale_tril, axis1=-2, axis2=-1)
    return value - scale * solve_triangular(root, residual[..., None], lower=True)[..., 0], scale


# Kinds


@dataclass(frozen=True)
class AnyDensity:
    """The kind of a likelihood, hashable: observations are numbers that have a density. Subclasses
    are more special.

    - **is_fixed** - whether it is Gaussian in the predictor; for others Gaussians stand in, which
      change from step to step.
    - **is_closed** - whether it is Gaussian in the predictor, perhaps given auxiliary variables.
      Fits and draws of latent functions need that.
    """

    is_fixed: ClassVar[bool] = False
    is_closed: ClassVar[bool] = False

    def repeated(self) -> "AnyDensity":
        """Return the kind for observations that may count any number of times."""
        return self

    def allows(self, problem: Any, values: dict[str, Any], observed: Observed) -> Any:
        """Test whether the distribution allows each observation."""
        f = problem.predictor(values)
        fn = problem.given_predictor(values, f, lambda density: density.fn)
        return fn.support(observed.value)

    def check_fit(self, problem: Any, values: dict[str, Any]) -> None:
        """Refuse data that no fit can describe well."""

    def at(self, problem: Any, values: dict[str, Any], observed: Observed, f: Any) -> Any:
        """Return the density at given values of the other sites.

        :param f: the predictor; it matters for rounding alone.
        """
        return DensityAt(problem, values, observed)


class DensityAt(NamedTuple):
    """A density at given values of the other sites.

    - **needs_metropolis** - whether single pairs get Metropolis steps.
    """

    problem: Any
    values: dict[str, Any]
    observed: Observed
    needs_metropolis: bool = True

    def log_density(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Compute the log density of each observation, as often as it counts."""
        f = self.observed.seen(f)
        log_prob = self.problem.given_predictor(self.values, f, lambda density: density.log_prob)
        return self.observed.counted(log_prob)


class Normal(AnyDensity):
    """Normal observations, with independent errors or a joint covariance."""

    is_fixed = is_closed = True

    @staticmethod
    def fits(fn: dist.Distribution) -> bool:
        """Test whether a distribution is Normal."""
        return type(base_of(fn)) in (dist.Normal, dist.MultivariateNormal)

    def allows(self, problem: Any, values: dict[str, Any], observed: Observed) -> Any:
        # XLA would fold constants as large as the data for half a minute
        return jnp.isfinite(observed.value)


def has_density(fn: dist.Distribution) -> bool:
    """Test whether observations are Normal, or each is a number with a density of its own."""
    return Normal.fits(fn) or base_of(fn).event_dim == 0 or _has_ends(base_of(fn))


class Link(NamedTuple):
    """A distribution that is a mixture of Gaussians in the predictor, by one of its parameters.

    - **distribution** - its type.
    - **parameter** - the name of the parameter that the predictor gives.
    - **function** - that parameter as a function of the predictor.
    - **mixture** - makes the augmentation from the distribution, the observations and how often
      each counts, if that is once.
    - **repeated** - likewise otherwise, with all counts of an observation at once; `None` if there
      is no such augmentation.
    """

    distribution: type
    parameter: str
    function: Callable[[Any], Any]
    mixture: Callable[..., Augmentation]
    repeated: Callable[..., Augmentation] | None = None


def _trials(fn: Any, y: Any, count: Any) -> Augmentation:
    return Logistic(count * y, count * fn.total_count)


def _failures(fn: Any, y: Any, count: Any) -> Augmentation:
    # the predictor of others is the log of the mean, not log odds
    shift = -jnp.log(fn.concentration) if isinstance(fn, dist.NegativeBinomial2) else 0.0
    return Logistic(count * y, count * (y + fn.concentration), shift=shift)


# the draws of a single trial are faster
_CLASSES = lambda fn, y, count: Logistic(y, 1), lambda fn, y, count: Logistic(count * y, count)

LINKS = (
    Link(dist.BernoulliLogits, "logits", jnp.asarray, *_CLASSES),
    Link(dist.BernoulliProbs, "probs", nn.sigmoid, *_CLASSES),
    Link(dist.BernoulliProbs, "probs", ndtr, lambda fn, y, count: Probit(y)),
    Link(dist.BinomialLogits, "logits", jnp.asarray, _trials, _trials),
    Link(dist.BinomialProbs, "probs", nn.sigmoid, _trials, _trials),
    Link(dist.NegativeBinomialLogits, "logits", jnp.asarray, _failures, _failures),
    Link(dist.NegativeBinomialProbs, "probs", nn.sigmoid, _failures, _failures),
    Link(dist.NegativeBinomial2, "mean", jnp.exp, _failures, _failures),
    Link(
        dist.StudentT,
        "loc",
        jnp.asarray,
        lambda fn, y, count: StudentT(y, fn.df, fn.scale),
        lambda fn, y, count: StudentT(y, fn.df, fn.scale, count),
    ),
    Link(
        dist.OrderedLogistic,
        "predictor",
        jnp.asarray,
        lambda fn, y, count: Ordered(y, fn.cutpoints),
        lambda fn, y, count: Ordered(y, fn.cutpoints, count[..., None]),
    ),
    Link(
        OrderedProbit,
        "predictor",
        jnp.asarray,
        lambda fn, y, count: augmentation.OrderedProbit(*fn.between(y)),
    ),
    Link(dist.Laplace, "loc", jnp.asarray, lambda fn, y, count: Laplace(y, fn.scale)),
)
"""The distributions that have an augmentation."""

AUGMENTED = (
    "Normal, StudentT or Laplace with the location f, Bernoulli, Binomial or "
    "NegativeBinomialLogits with logits=f, Bernoulli with probs=ndtr(f), NegativeBinomial2 with "
    "the mean exp(f), or OrderedLogistic or OrderedProbit of f"
)
"""What to expect, for errors about a likelihood without an augmentation."""


@dataclass(frozen=True)
class Mixture(AnyDensity):
    """A mixture of Gaussians in the predictor: Polya-Gamma, or of scales.

    - **many** - whether observations may count any number of times.
    """

    link: Link
    many: bool = False

    is_closed = True

    def repeated(self) -> AnyDensity:
        return AnyDensity() if self.link.repeated is None else Mixture(self.link, many=True)

    def check_fit(self, problem: Any, values: dict[str, Any]) -> None:
        """Raise if nearly all trials of counts have one outcome, for then effects are lost."""

        def is_rare(values):
            observed = problem.run(values, of=problem.observations)
            return self.at(
                problem, values, observed, jnp.zeros(observed.value.shape)
            ).needs_metropolis

        has_counts = self.many or self.link.mixture is self.link.repeated
        if has_counts and compiled(is_rare, values, once=True):
            what = f"CAVI.run: the counts {problem.form.response!r}"
            got = f"fewer than {RARE:.0%} of their trials with one of the outcomes"
            expected = "more, or the bound is so loose that no effect is worth it"
            raise bad(what, got, expected, "Draw with PairedGibbs.")

    def at(self, problem: Any, values: dict[str, Any], observed: Observed, f: Any) -> "MixtureAt":
        f = observed.seen(f)
        density = problem.given_predictor(values, f, lambda density: density)
        y = observed.seen(observed.value)
        count = jnp.broadcast_to(observed.times, f.shape)
        make: Any = self.link.repeated if self.many else self.link.mixture
        mixture = make(density.fn, y, count)
        constant = (observed.counted(density.log_prob) - mixture.log_density(f)) / count
        return MixtureAt(mixture, constant, observed)


class MixtureAt(NamedTuple):
    """A mixture of Gaussians at given values of the other sites.

    - **mixture** - in the predictor, with all counts of an observation at once.
    - **constant** - log density of an observation less the log density of the mixture.
    """

    mixture: Any
    constant: Any
    observed: Observed

    @property
    def needs_metropolis(self) -> bool | Bool[Array, ""]:
        """Whether single pairs get Metropolis steps, since nearly all trials of counts have one
        outcome: auxiliary variables fix the predictor far better than the counts do."""
        counts, is_seen = self.mixture, self.observed.count > 0
        if not isinstance(counts, Logistic) or isinstance(counts.total, int):
            return False
        y, total = (jnp.sum(jnp.where(is_seen, x, 0)) for x in (counts.y, counts.total))
        return jnp.minimum(y, total - y) < RARE * total

    def log_density(self, f: Float[Array, "..."]) -> Float[Array, "..."]:
        """Compute the log density up to a constant; unlike NumPyro's it has a slope at 0, too."""
        return self.observed.seen(self.mixture.log_density(f))

    def draw(self, key: Array, f: Float[Array, "..."]) -> StandIn:
        """Draw the auxiliary variables given the predictor."""
        return self._of(self.mixture.draw(key, self.observed.seen(f)))

    def expect(self, mean: Float[Array, "..."], variance: Float[Array, "..."]) -> StandIn:
        """Return the best stand-in if the predictor has this mean and variance."""
        return self._of(self.mixture.expect(self.observed.seen(mean), variance))

    def _of(self, stand_in: StandIn) -> StandIn:
        log_norm = stand_in.log_norm / self.observed.times + self.constant
        return self.observed.for_one(stand_in._replace(log_norm=log_norm))
