# SPDX-License-Identifier: Apache-2.0
"""Coefficients that follow the weights in a guide: ``beta = <beta> + S (w - <w>)``.

With a single value of an intercept, a guide would exclude columns that are not centred.
"""

from math import prod
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions.util import sum_rightmost, validate_sample

from numpyro_spikeslab.reading.form import Pair, task_axis
from numpyro_spikeslab.support.priors import is_plain

MAX_SLOPES = 2**20
"""If a guide had more slopes, no coefficient follows the weights."""


class Slopes(NamedTuple):
    """The shape of the slopes of a site, with a last axis for the weights; the negative axis of the
    site that is the tasks; and whether each task follows its own weights only."""

    shape: tuple[int, ...]
    axis: int | None
    own: bool

    def laid_out(self, slopes: Any, size: int) -> Any:
        """Return slopes along ``size`` weights: those of all tasks, or of each task alone."""
        if slopes.shape[-1] == size:
            return slopes
        assert self.axis is not None
        slopes = jnp.moveaxis(slopes, self.axis - 1, 0)
        Q, *rows, number = slopes.shape
        if number < size:
            own = jnp.eye(Q, dtype=bool).reshape(Q, *(1 for _ in rows), Q, 1)
            slopes = jnp.where(own, slopes[..., None, :], 0).reshape(Q, *rows, size)
        else:
            slopes = jnp.einsum("q...qm->q...m", slopes.reshape(Q, *rows, Q, size))
        return jnp.moveaxis(slopes, 0, self.axis - 1)

    def factors(self, change: Float[Array, " P"]) -> Float[Array, "..."]:
        """Arrange changes of the weights as factors of the slopes."""
        if not self.own or self.axis is None:
            return change
        return change.reshape(self.shape[self.axis - 1], *(1,) * (-self.axis - 1), self.shape[-1])


def find_slopes(
    trace: dict[str, Any],
    names: tuple[str, ...],
    pairs: tuple[Pair, ...],
    responses: frozenset[str],
) -> dict[str, Slopes]:
    """Find the sites that follow the weights: those with a Normal prior."""
    sites = [trace[name] for name in responses]
    slopes = {}
    for name in names:
        site = trace[name]
        if not is_plain(site, (dist.Normal,)):
            continue
        axis, own = None, False
        if len(pairs) == 1:
            axis, own = task_axis(site, trace[pairs[0].slab], sites)
        size = pairs[0].shape[1] if own else sum(pair.size for pair in pairs)
        slopes[name] = Slopes((*jnp.shape(site["value"]), size), axis, own)
    return slopes if sum(prod(each.shape) for each in slopes.values()) <= MAX_SLOPES else {}


class Followed(dist.Delta):
    """The point at which a site is, given the weights, at ``change`` from their mean.

    Compiled code may round the point differently, so values are accepted within the rounding of its
    terms.
    """

    pytree_data_fields = ("rounding",)

    def __init__(
        self,
        loc: Float[Array, "*shape"],
        slopes: Float[Array, "*shape P"],
        change: Float[Array, "*#shape P"],
        event_dim: int,
    ) -> None:
        point = loc + jnp.vecdot(slopes, change)
        terms = jnp.abs(loc) + jnp.vecdot(jnp.abs(slopes), jnp.abs(change))
        self.rounding = jnp.finfo(point.dtype).eps ** (2 / 3) * terms
        super().__init__(point, event_dim=event_dim)

    @validate_sample
    def log_prob(self, value: Any) -> Any:
        is_point = jnp.abs(value - self.v) <= self.rounding
        return sum_rightmost(jnp.log(is_point), self.event_dim)
