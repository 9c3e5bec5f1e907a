# SPDX-License-Identifier: Apache-2.0
"""Coefficients that follow the weights in a guide.

The posterior moves an intercept together with a weight. A guide with one value of it for all
weights cannot, and leaves out columns that are not centred. Here it has one for each value of the
weights, ``beta = <beta> + S (w - <w>)``.
"""

from math import prod
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions.util import sum_rightmost, validate_sample

from numpyro_spikeslab.priors import is_plain
from numpyro_spikeslab.reading.form import task_axis
from numpyro_spikeslab.reading.sites import Pair

MAX_SLOPES = 2**20
"""Slopes of a guide, above which nothing follows."""


class Slopes(NamedTuple):
    """How a site follows the weights.

    - **shape** - of its slopes: that of the site, and a last axis for the weights that it follows.
    - **axis** - the axis of the site, negative, that are the tasks; `None` if there is none.
    - **own** - whether each task follows its own weights alone.
    """

    shape: tuple[int, ...]
    axis: int | None
    own: bool

    def laid_out(self, slopes: Float[Array, "..."], size: int) -> Float[Array, "..."]:
        """Slopes along ``size`` weights: those of all tasks, or of each task alone."""
        if slopes.shape[-1] == size:
            return slopes
        return (along_own if slopes.shape[-1] > size else along_all)(slopes, self.axis)

    def against(self, change: Float[Array, " P"]) -> Float[Array, "..."]:
        """Changes of the weights, to be multiplied with slopes."""
        if not self.own:
            return change
        return change.reshape(self.shape[self.axis - 1], *(1,) * (-self.axis - 1), self.shape[-1])


def find_slopes(
    trace: dict[str, Any],
    names: tuple[str, ...],
    pairs: tuple[Pair, ...],
    responses: frozenset[str],
) -> dict[str, Slopes]:
    """Sites that follow the weights, those with a Normal prior.

    :param trace: of the model.
    :param names: of its latent sites beside the pairs.
    :param responses: names of its observed sites, or of those that are to be predicted.
    """
    seen = [trace[name] for name in responses]
    found = {}
    for name in names:
        site = trace[name]
        if not is_plain(site, (dist.Normal,)):
            continue
        axis, own = _axis_of_tasks(site, pairs, trace[pairs[0].slab], seen)
        size = pairs[0].shape[1] if own else sum(pair.size for pair in pairs)
        found[name] = Slopes((*jnp.shape(site["value"]), size), axis, own)
    return found if sum(prod(slopes.shape) for slopes in found.values()) <= MAX_SLOPES else {}


def _axis_of_tasks(
    site: dict[str, Any], pairs: tuple[Pair, ...], slab: dict[str, Any], seen: list[Any]
) -> tuple[int | None, bool]:
    """The axis of a site that are the tasks, and whether it is that of their plate."""
    if len(pairs) > 1 or len(pairs[0].shape) != 2:
        return None, False
    axis = task_axis(site, slab, seen)
    shape = jnp.shape(site["value"])
    alike = [k for k in range(-len(shape), 0) if shape[k] == pairs[0].shape[0]]
    return alike[0] if axis is None and len(alike) == 1 else axis, axis is not None


def along_all(slopes: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Slopes along all weights, of those along the weights of each task.

    :param axis: of the site, which are the tasks.
    """
    own = jnp.moveaxis(slopes, axis - 1, 0)
    each, shape = jnp.arange(len(own)), own.shape[:-1]
    every = jnp.zeros((*shape, len(own), own.shape[-1]), own.dtype)
    every = every.at[each, ..., each, :].set(own)
    return jnp.moveaxis(every.reshape(*shape, -1), 0, axis - 1)


def along_own(slopes: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The inverse of :func:`along_all`."""
    every = jnp.moveaxis(slopes, axis - 1, 0)
    each = jnp.arange(len(every))
    own = every.reshape(*every.shape[:-1], len(every), -1)[each, ..., each, :]
    return jnp.moveaxis(own, 0, axis - 1)


class Followed(dist.Delta):
    """The point at which a site is, given the weights.

    Rounding depends on how it has been compiled, so values are the same within that of the sum.

    :param loc: the point at the mean of the weights.
    :param slopes: of the site, with a last axis for the weights.
    :param change: the weights that each entry follows, without their mean.
    :param event_dim: of the site.
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
        is_here = jnp.abs(value - self.v) <= self.rounding
        return sum_rightmost(jnp.log(is_here), self.event_dim)
