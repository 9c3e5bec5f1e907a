# SPDX-License-Identifier: Apache-2.0
"""Coefficients that follow the weights in a guide.

The posterior moves an intercept together with a weight. A guide with one value of it for all
weights cannot, and leaves out columns that are not centred. Here it has one for each value of the
weights, ``beta = <beta> + S (w - <w>)``.
"""

from math import prod
from typing import Any

from jaxtyping import Array, Float

import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.distributions.util import sum_rightmost, validate_sample

from numpyro_spikeslab.reading.form import Pair, is_plain

MAX_SLOPES = 2**20
"""Slopes of a guide, above which nothing follows."""


def shapes_of_slopes(
    latents: dict[str, Any], names: tuple[str, ...], pairs: tuple[Pair, ...]
) -> dict[str, tuple[int, ...]]:
    """Sites that follow the weights, those with a Normal prior, and the shapes of their slopes.

    :param latents: the latent sites, by their names.
    :param names: of those beside the pairs.
    """
    num_weights = sum(pair.size for pair in pairs)
    shapes = {
        name: (*jnp.shape(latents[name]["value"]), num_weights)
        for name in names
        if is_plain(latents[name], (dist.Normal,))
    }
    return shapes if sum(map(prod, shapes.values())) <= MAX_SLOPES else {}


class Followed(dist.Delta):
    """The point at which a site is, given the weights.

    Rounding depends on how it has been compiled, so values are the same within that of the sum.

    :param loc: the point at the mean of the weights.
    :param slopes: of the site, with a last axis for the weights.
    :param change: the weights, without their mean.
    :param event_dim: of the site.
    """

    pytree_data_fields = ("rounding",)

    def __init__(
        self,
        loc: Float[Array, "*shape"],
        slopes: Float[Array, "*shape P"],
        change: Float[Array, " P"],
        event_dim: int,
    ) -> None:
        point = loc + slopes @ change
        terms = jnp.abs(loc) + jnp.abs(slopes) @ jnp.abs(change)
        self.rounding = jnp.finfo(point.dtype).eps ** (2 / 3) * terms
        super().__init__(point, event_dim=event_dim)

    @validate_sample
    def log_prob(self, value: Any) -> Any:
        is_here = jnp.abs(value - self.v) <= self.rounding
        return sum_rightmost(jnp.log(is_here), self.event_dim)
