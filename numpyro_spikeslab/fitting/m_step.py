# SPDX-License-Identifier: Apache-2.0
"""The M-step: sites beside the weights at their maximum a posteriori."""

from typing import Any

from jaxtyping import Array, Float

import jax.numpy as jnp

from numpyro_spikeslab.fitting.posterior import (
    Data,
    Posterior,
    Spec,
)
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import Statistics, Tally


def with_modes(spec: Spec, data: Data, at: View, posterior: Posterior, squares: Any) -> Posterior:
    """Sites with a role at their maximum a posteriori (supplement 1.2)."""
    tallies = tallies_of(spec, data, at, posterior.weights, squares)
    return posterior._replace(values=modes_of(spec, at, posterior.values, tallies))


def tallies_of(
    spec: Spec, data: Data, at: View, weights: Any, squares: Float[Array, " Q"]
) -> dict[str, Tally]:
    """Sum the sufficient statistics of each site with a role.

    :param weights: the variational family of the weights.
    :param squares: expected sums of squared residuals.
    """
    squares = jnp.maximum(squares, data.features.rounding(spec, at))
    slabs, slab_squares = weights.slab_moments
    statistics = Statistics(weights.probs, slabs, slab_squares, at.count, squares)
    roles = spec.form.roles_with_mode
    return {role.site: role.tally(data.indices[role.site], statistics) for role in roles}


def modes_of(
    spec: Spec, at: View, values: dict[str, Any], tallies: dict[str, Tally]
) -> dict[str, Any]:
    """Return the values with each site of the tallies at its mode."""
    values = dict(values)
    for role in spec.form.roles_with_mode:
        if role.site in tallies:
            value, prior = values[role.site], at.priors.get(role.site)
            new = role.mode(tallies[role.site], prior, value)
            values[role.site] = jnp.asarray(new, jnp.result_type(value))
    return values
