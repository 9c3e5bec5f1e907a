# SPDX-License-Identifier: Apache-2.0
"""Sites with a role: noise scales, inclusion probabilities, scales of slabs and of coefficients.

A role says where the values of its site go in a view, and, given its sufficient statistics, its
mode (for fits) and its conditional (for chains).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.special import betaln, digamma

import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.search import slice_sample
from numpyro_spikeslab.support.priors import base_of, includes, is_drawable, is_plain, is_unbounded

MIN_COUNT = 1e-3
"""A scale that fewer expected slabs or observations share keeps its value."""

NUM_UPDATES = 4
"""Slice updates for a draw. One alone is too correlated, and all cost less than the weights."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Index:
    """Which entry of a site each weight or task takes.

    - **entries** - positions in the flat site, in the shape of the weights, (Q, M), of the tasks,
      (Q,), or of all coefficients, site by site, (C,); the size of the site where there is none.
      `None` if all take the only entry.
    - **shape** - of the site.
    """

    entries: Int[Array, "..."] | None
    shape: tuple[int, ...] = field(metadata={"static": True})

    @property
    def size(self) -> int:
        return max(prod(self.shape), 1)

    def take(self, value: Any, other: Any) -> Any:
        """Return the entries that weights or tasks take, ``other`` where they take none."""
        flat = jnp.ravel(value)
        if self.entries is None:
            return jnp.broadcast_to(flat[0], jnp.shape(other))
        entries = jnp.reshape(self.entries, jnp.shape(other))
        return jnp.where(entries < self.size, flat.at[entries].get(mode="clip"), other)

    def sum(self, x: Any) -> Any:
        """Sum over the weights or tasks that take the same entry, in the shape of the site."""
        if self.entries is None:
            return jnp.sum(x).reshape(self.shape)
        entries = jnp.ravel(self.entries)
        x = jnp.sum(jnp.reshape(x, (-1, entries.size)), axis=0)
        if self.size == 1:
            # a plain sum takes less than half the time of a scatter
            return jnp.sum(jnp.where(entries < 1, x, 0)).reshape(self.shape)
        total = jnp.zeros(self.size, jnp.result_type(x)).at[entries].add(x, mode="drop")
        return total.reshape(self.shape)

    def is_local(self, num_tasks: int) -> bool:
        """Whether each entry is taken, by weights of one task alone."""
        if self.entries is None or len(self.entries) != num_tasks:
            return False
        entries = np.asarray(self.entries).reshape(num_tasks, -1)
        owner, task = np.full(self.size + 1, -1), np.arange(num_tasks)[:, None]
        owner[entries] = task
        is_own = (owner[entries] == task) | (entries == self.size)
        return bool(np.all(owner[:-1] >= 0) and np.all(is_own))


class Tally(NamedTuple):
    """Sufficient statistics of a role: of each weight or task, or their sums in the site's shape.

    - **count** - number of weights, included slabs, observations or coefficients.
    - **total** - sum of their inclusion probabilities, squared slabs, squared residuals or squared
      deviations from the prior mean.
    """

    count: Any
    total: Any


Target = tuple[Float[Array, "..."], Callable[[Any], Any], Callable[[Any], Any]]
"""The conditional of a site: its entries on the real line, the log density of each, and the map
back to the site."""


@dataclass(frozen=True)
class Role:
    """A site whose values are the noise scales, inclusion probabilities, slab scales or scales of
    coefficients themselves.

    Without a mode in closed form it can be drawn only.
    """

    site: str
    has_mode: bool

    part: ClassVar[str]
    priors_with_mode: ClassVar[tuple[type, ...]] = dist.HalfNormal, dist.ImproperUniform
    upper: ClassVar[float] = np.inf
    """The largest value that the site may have."""

    @classmethod
    def of(cls, site: dict[str, Any]) -> "Role | None":
        """Return the role of a site that is this part, `None` if nothing is known of its prior."""
        if site["type"] == "param":
            constraint = site["kwargs"].get("constraint", constraints.real)
            return cls(site["name"], True) if includes(constraint, cls.upper) else None
        base = base_of(site["fn"])
        # a mode must not lie outside of the support
        is_whole = type(base) is not dist.ImproperUniform or includes(base.support, cls.upper)
        has_mode = is_whole and is_plain(site, cls.priors_with_mode)
        is_drawn = is_drawable(site, cls.upper) and not base.event_shape
        return cls(site["name"], has_mode) if has_mode or is_drawn else None

    def place(self, at: Any, index: Index, value: Any) -> Any:
        """Return a view at another value of the site; the model does not run for it."""
        raise NotImplementedError

    def tally(self, index: Index, statistics: dict[str, Tally]) -> Tally:
        """Sum the statistics of this part over the weights or tasks that take each entry."""
        return Tally(*map(index.sum, statistics[self.part]))

    def expected(self, value: Any) -> Any:
        """Return the expected total of one weight or observation, given the site's value."""
        return value**2

    def mode(self, tally: Tally, prior: Any, current: Any) -> Any:
        """Return the mode given the statistics, and the current value where the count is zero;
        priors without a closed mode are taken as flat."""
        return scale_mode(*tally, prior, current)

    def target(self, tally: Tally, prior: Any, current: Any) -> Target:
        """Return the conditional given the statistics of draws: by default, of the standard
        deviation of Normal numbers with mean zero."""
        log_prior, log_squares = elementwise(prior, jnp.shape(current)), jnp.log(tally.total)

        def log_density(log_x):
            # in logs, since a scale with a count of zero may underflow
            likelihood = -tally.count * log_x - 0.5 * jnp.exp(log_squares - 2 * log_x)
            return log_prior(jnp.exp(log_x)) + log_x + likelihood

        return jnp.log(current), log_density, jnp.exp


class NoiseRole(Role):
    """The noise scales of the tasks."""

    part = "noise"

    def place(self, at: Any, index: Index, value: Any) -> Any:
        sigma2 = index.take(value**2, at.sigma2)
        log_scale = 0.5 * jnp.sum(at.count * jnp.log(2 * jnp.pi * sigma2))
        return at._replace(sigma2=sigma2, log_scale=log_scale)


class SlabRole(Role):
    """The slab scales of the weights."""

    part = "slab"

    def place(self, at: Any, index: Index, value: Any) -> Any:
        variance = index.take(value**2, at.prior.variance)
        return at._replace(prior=at.prior._replace(variance=variance))


class CoefficientRole(Role):
    """The prior scales of coefficients, such as the effects of groups of rows. Coefficients are a
    point in fits, given which a scale has no mode of use."""

    part = "coefficient"
    priors_with_mode = ()

    @classmethod
    def of(cls, site: dict[str, Any]) -> "Role | None":
        return None if site["type"] == "param" else super().of(site)


class InclusionRole(Role):
    """The inclusion probabilities of the weights."""

    part = "inclusion"
    priors_with_mode = dist.Beta, dist.Uniform, dist.ImproperUniform
    upper = 1.0

    def place(self, at: Any, index: Index, value: Any) -> Any:
        log_odds = index.take(jnp.log(value) - jnp.log1p(-value), at.prior.log_odds)
        return at._replace(prior=at.prior._replace(log_odds=log_odds))

    def expected(self, value: Any) -> Any:
        return value

    def mode(self, tally: Tally, prior: Any, current: Any) -> Any:
        """Maximise ``included log pi + excluded log(1 - pi) + log p(pi)``; NaN without a
        maximum."""
        base, (included, excluded) = base_of(prior), _with_pseudo_counts(tally, prior)
        total = included + excluded
        mode = jnp.where(total == 0, current, included / jnp.where(total == 0, 1, total))
        # at 0 or 1 the bound would be infinite
        mode = jnp.where(is_unbounded(prior), jnp.nan, mode)
        low, high = (base.low, base.high) if isinstance(base, dist.Uniform) else (0.0, 1.0)
        # 0 and 1 are absorbing
        high = jnp.minimum(high, 1.0)
        margin = jnp.finfo(jnp.result_type(included)).eps * high
        return jnp.clip(mode, low + margin, high - margin)

    def target(self, tally: Tally, prior: Any, current: Any) -> Target:
        included, excluded = _with_pseudo_counts(tally, prior)
        if isinstance(base_of(prior), dist.Beta):
            # its normaliser would take long to compile
            prior = dist.Uniform()
        log_prior = elementwise(prior, jnp.shape(current))

        def back(logit):
            # a chain could not leave 0 or 1
            return _inside(jax.nn.sigmoid(logit))

        def log_density(logit):
            # the ones are the derivative of the sigmoid
            likelihood = (included + 1) * jax.nn.log_sigmoid(logit)
            likelihood += (excluded + 1) * jax.nn.log_sigmoid(-logit)
            return log_prior(back(logit)) + likelihood

        inside = _inside(current)
        return jnp.log(inside) - jnp.log1p(-inside), log_density, back


def beta_factor(tally: Tally, prior: Any) -> tuple[Any, Any]:
    """Return the concentrations of probabilities given the spikes, under a Beta prior."""
    included, excluded = _with_pseudo_counts(tally, prior)
    return included + 1, excluded + 1


def beta_evidence(tally: Tally, prior: Any) -> Float[Array, ""]:
    """Integrate probabilities out, under a Beta prior."""
    base = base_of(prior)
    before = betaln(base.concentration1, base.concentration0)
    return jnp.sum(betaln(*beta_factor(tally, prior)) - before)


def draw_beta(key: Array, tally: Tally, prior: Any) -> Any:
    """Draw probabilities given the spikes, under a Beta prior; in logs, for some are near 0."""
    logs = map(random.loggamma, random.split(key), beta_factor(tally, prior))
    return _inside(jax.nn.sigmoid(next(logs) - next(logs)))


def _inside(probability: Any) -> Any:
    info = jnp.finfo(jnp.result_type(probability))
    return jnp.clip(probability, info.tiny, 1 - info.eps)


def expected_odds(concentration1: Any, concentration0: Any) -> Any:
    """Return the probability whose log odds are the expected ones of a Beta distribution."""
    return _inside(jax.nn.sigmoid(digamma(concentration1) - digamma(concentration0)))


def _with_pseudo_counts(tally: Tally, prior: Any) -> tuple[Any, Any]:
    """Return the numbers of included and excluded weights, with those that a Beta prior adds."""
    base, included, excluded = base_of(prior), tally.total, tally.count - tally.total
    if isinstance(base, dist.Beta):
        included = included + base.concentration1 - 1.0
        excluded = excluded + base.concentration0 - 1.0
    return included, excluded


ROLES: tuple[type[Role], ...] = NoiseRole, InclusionRole, SlabRole, CoefficientRole


def scale_mode(count: Any, squares: Any, prior: Any, current: Any) -> Any:
    """Maximise ``-count log sigma - squares / (2 sigma^2) + log p(sigma)``, with a HalfNormal or
    else a flat prior; return ``current`` where the count is nearly zero."""
    base = base_of(prior)
    scale = base.scale if isinstance(base, dist.HalfNormal) else jnp.inf
    is_known = count > MIN_COUNT
    count = jnp.where(is_known, count, 1.0)
    # the positive root of sigma^4 / s^2 + count sigma^2 - squares = 0, without cancellation
    variance = 2.0 * squares / (count + jnp.sqrt(count**2 + 4.0 * squares / scale**2))
    return jnp.where(is_known, jnp.sqrt(variance), current)


def draw_sites(key: Array, targets: dict[str, Target]) -> dict[str, Any]:
    """Draw sites that are independent of each other: all at once, which compiles faster."""
    if not targets:
        return {}
    x, unflatten = ravel_pytree({name: target[0] for name, target in targets.items()})

    def log_density(x):
        values = unflatten(x)
        return ravel_pytree({name: of(values[name]) for name, (_, of, _) in targets.items()})[0]

    new = unflatten(slice_sample(key, lambda x: (log_density(x), ()), x, NUM_UPDATES)[0])
    return {name: back(new[name]) for name, (_, _, back) in targets.items()}


def elementwise(prior: Any, shape: tuple[int, ...]) -> Callable[[Any], Float[Array, "..."]]:
    """Return the log density of each entry of a site whose entries are independent."""
    base = base_of(prior)

    def log_density(x):
        inside = jnp.where(base.support(x), base.log_prob(x), -jnp.inf)
        return jnp.broadcast_to(inside, shape)

    return log_density
