# SPDX-License-Identifier: Apache-2.0
"""The M-step: sites beside the weights at their maximum a posteriori."""

from typing import Any

from jaxtyping import Array, Float

import jax.numpy as jnp

from numpyro_spikeslab.fitting.posterior import (
    Data,
    Posterior,
    Spec,
    coefficients_at,
    problem_of,
    view_at,
)
from numpyro_spikeslab.reading.coefficient_rows import without_coefficients
from numpyro_spikeslab.reading.form import COLUMNS
from numpyro_spikeslab.reading.likelihood import by_task
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
    squares = jnp.maximum(squares, squares_of_rounding(spec, at))
    statistics = Statistics(weights.probs, *weights.slab_moments, at.count, squares)
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


def with_coefficients(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """Coefficients at their joint maximum a posteriori."""
    form, values, functions = spec.form, posterior.values, posterior.functions
    mean = posterior.weights.mean
    at = view_at(spec, data, posterior)
    if form.of_tasks:
        own = coefficients_at(spec, data, at, posterior)
        return posterior._replace(values=values | own.back(own.beside.mean(mean)), residual=None)
    residual = at.Y
    if form.kind != COLUMNS:
        features = data.features if functions is None else functions.mean
        residual = at.Y - features.T @ mean.T
    units, beside = without_coefficients(problem_of(spec, data), values, at, form.coefficients)
    new = beside.mean(jnp.ravel(jnp.sqrt(at.precision) * residual), units.current)
    # the next sweep finds another residual, so this one is not handed on
    return posterior._replace(values=values | units.back(new), residual=None)


def squares_of_rounding(spec: Spec, at: View) -> Float[Array, " Q"]:
    """What rounding alone would leave of each task: of columns as squares of residuals, else as
    sums that are products of matrices."""
    if spec.form.kind == COLUMNS:
        return 16 * at.rounding
    squares = jnp.reshape(at.relative * at.Y**2, (len(at.Y), -1))
    power = by_task(squares, spec.form.num_tasks, at.layout)
    return jnp.finfo(power.dtype).eps * power + at.rounding
