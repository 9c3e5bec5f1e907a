# SPDX-License-Identifier: Apache-2.0
"""Noise scales, inclusion probabilities, slab scales: their mode in a fit, their draw in a chain.

All that the rest of the model says of them are counts and sums. Which entry of a site each weight
(or, of a noise scale, each task) takes is its *index*; one beyond the last entry takes none. Where
all take the only entry the index is a single zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.log_gamma import with_short_gammas
from numpyro_spikeslab.algebra.search import slice_sample
from numpyro_spikeslab.reading.form import base_of

# Slabs whose expected number is smaller say nothing about their scale.
UNKNOWN = 1e-3

NUM_UPDATES = 4
"""Of slice sampling for a draw: one alone stays too near, and all cost less than the weights."""


def tally(x: Any, index: Any, value: Any) -> Any:
    """Sums of ``x`` over the weights or tasks that take the same entry of a site, in its shape.

    :param index: of the weights of one task, where those of all take the same entries.
    """
    size = max(jnp.size(value), 1)
    if not jnp.ndim(index):
        return jnp.sum(x).reshape(jnp.shape(value))
    x = jnp.sum(jnp.reshape(x, (-1, jnp.size(index))), axis=0)
    if size == 1:
        # a plain sum takes less than half the time of a scatter
        return jnp.sum(jnp.where(jnp.ravel(index) < 1, jnp.ravel(x), 0)).reshape(jnp.shape(value))
    total = jnp.zeros(size, jnp.result_type(x)).at[jnp.ravel(index)].add(jnp.ravel(x), mode="drop")
    return total.reshape(jnp.shape(value))


def spread(value: Any, index: Any, other: Any) -> Any:
    """The entries of a site that weights or tasks take; ``other`` where they take none."""
    if jnp.ndim(index):
        index = jnp.reshape(index, jnp.shape(other))
    taken = jnp.ravel(value).at[index].get(mode="clip")
    return jnp.where(index < jnp.size(value), taken, other)


# Modes


def inclusion_mode(included: Any, total: Any, prior: Any, current: Any) -> Any:
    """Maximises ``included log pi + (total - included) log(1 - pi) + log p(pi)``.

    :param prior: a Beta or Uniform distribution; `None` and others are flat.
    :param current: what is kept where nothing is known, or has the end where both are as high.
    """
    base, excluded = base_of(prior), total - included
    if isinstance(base, dist.Beta):
        included = included + base.concentration1 - 1.0
        excluded = excluded + base.concentration0 - 1.0
    total = included + excluded
    # under a Beta prior with poles there may be a minimum between them
    end = jnp.where(included == excluded, current > 0.5, included > excluded)
    inside = (included >= 0) & (excluded >= 0)
    mode = jnp.where(inside, included / jnp.where(total == 0, 1, total), end)
    mode = jnp.where((included == 0) & (excluded == 0), current, mode)
    low, high = (base.low, base.high) if isinstance(base, dist.Uniform) else (0.0, 1.0)
    # a mode at 0 or 1 would never be left again
    high = jnp.minimum(high, 1.0)
    margin = jnp.finfo(jnp.result_type(included)).eps * high
    return jnp.clip(mode, low + margin, high - margin)


def variance_mode(count: Any, squares: Any, prior: Any) -> Any:
    """Square of the ``sigma`` that maximises ``-count log sigma - squares / (2 sigma^2)`` plus the
    log density of its prior.

    :param prior: a HalfNormal distribution; `None` and others are flat.
    """
    base = base_of(prior)
    scale = base.scale if isinstance(base, dist.HalfNormal) else jnp.inf
    # the positive root of sigma^4 / s^2 + count sigma^2 - squares = 0, without cancellation
    return 2.0 * squares / (count + jnp.sqrt(count**2 + 4.0 * squares / scale**2))


def scale_mode(count: Any, squares: Any, prior: Any, current: Any) -> Any:
    """:func:`variance_mode` as a scale; ``current`` where nothing is known of it."""
    known = count > UNKNOWN
    best = variance_mode(jnp.where(known, count, 1.0), squares, prior)
    return jnp.where(known, jnp.sqrt(best), current)


# Draws


class Target(NamedTuple):
    """The conditional of a site, on the whole real line.

    - **x** - where its entries are there.
    - **log_density** - of each entry.
    - **back** - from there to the site.
    """

    x: Float[Array, "..."]
    log_density: Callable[[Any], Any]
    back: Callable[[Any], Any]


def scales_given(prior: Any, current: Any, count: Any, squares: Any) -> Target:
    """Standard deviations of as many centred Normal numbers, with that sum of squares.

    :param prior: distribution of the site.
    :param current: its value, positive.
    :param count: how many numbers there are for each entry.
    """
    log_prior = elementwise(prior, jnp.shape(current))
    log_squares = jnp.log(squares)

    def log_density(log_x):
        # a scale may come near to zero where there is nothing to be scaled
        likelihood = -count * log_x - 0.5 * jnp.exp(log_squares - 2 * log_x)
        return log_prior(jnp.exp(log_x)) + log_x + likelihood

    return Target(jnp.log(current), log_density, jnp.exp)


def inclusion_given(prior: Any, current: Any, included: Any, excluded: Any) -> Target:
    """Inclusion probabilities, given how many spikes of each entry are 1 and 0."""
    base = base_of(prior)
    if isinstance(base, dist.Beta):
        # it counts as so many spikes; its normaliser would take longer to compile than the rest
        included = included + base.concentration1 - 1.0
        excluded = excluded + base.concentration0 - 1.0
        prior = dist.Uniform()
    log_prior = elementwise(prior, jnp.shape(current))
    info = jnp.finfo(jnp.result_type(current))

    def back(logit):
        # from 0 and 1 no chain would return
        return jnp.clip(jax.nn.sigmoid(logit), info.tiny, 1 - info.eps)

    def log_density(logit):
        # the derivative of the probability is the product of it and its complement
        likelihood = (included + 1) * jax.nn.log_sigmoid(logit)
        likelihood += (excluded + 1) * jax.nn.log_sigmoid(-logit)
        return log_prior(back(logit)) + likelihood

    inside = jnp.clip(current, info.tiny, 1 - info.eps)
    return Target(jnp.log(inside) - jnp.log1p(-inside), log_density, back)


def draw_sites(key: Array, targets: dict[str, Target]) -> dict[str, Any]:
    """Draw sites that are independent of each other: all at once, which compiles faster.

    :param targets: their conditionals, by their names.
    """
    if not targets:
        return {}
    x, unflatten = ravel_pytree({name: target.x for name, target in targets.items()})

    def log_density(x):
        each = unflatten(x)
        return ravel_pytree({k: target.log_density(each[k]) for k, target in targets.items()})[0]

    new = unflatten(slice_sample(key, log_density, x, NUM_UPDATES))
    return {name: target.back(new[name]) for name, target in targets.items()}


def elementwise(prior: Any, shape: tuple[int, ...]) -> Callable[[Any], Float[Array, "..."]]:
    """Log density of each entry of a site whose entries are independent."""
    base = base_of(prior)

    def log_density(x):
        inside = jnp.where(base.support(x), with_short_gammas(base.log_prob)(x), -jnp.inf)
        return jnp.broadcast_to(inside, shape)

    return log_density
