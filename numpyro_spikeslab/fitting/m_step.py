# SPDX-License-Identifier: Apache-2.0
"""The M-step: sites beside the weights at their maximum a posteriori."""

from typing import Any, NamedTuple

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
from numpyro_spikeslab.reading.view import View, by_task
from numpyro_spikeslab.roles import inclusion_mode, scale_mode, tally


def with_modes(spec: Spec, data: Data, at: View, posterior: Posterior, squares: Any) -> Posterior:
    """Sites with a role at their maximum a posteriori (supplement 1.2)."""
    tallies = tallies_of(spec, data, at, posterior, squares)
    return posterior._replace(values=modes_of(spec, at, posterior.values, tallies))


class Tally(NamedTuple):
    """All that weights and tasks say of a site with a role.

    - **count** - how many weights, slabs or observations there are for each entry.
    - **total** - sum of their inclusion probabilities, expected squares, or squares left.
    """

    count: Any
    total: Any


def tallies_of(
    spec: Spec, data: Data, at: View, posterior: Posterior, squares: Any
) -> dict[str, Tally]:
    """What the weights and tasks say of each site with a role."""
    slabs, second = posterior.weights.slab_moments
    probs = posterior.weights.probs
    parts = {
        "inclusion": Tally(jnp.ones_like(probs), probs),
        "slab": Tally(slabs, second),
        "noise": Tally(at.count, jnp.maximum(squares, squares_of_rounding(spec, at))),
    }
    found = {}
    for role in spec.form.roles:
        value, index = posterior.values[role.site], data.indices[role.site]
        if role.part == "noise":
            index = jnp.broadcast_to(index, squares.shape)
        found[role.site] = Tally(*(tally(x, index, value) for x in parts[role.part]))
    return found


def modes_of(
    spec: Spec, at: View, values: dict[str, Any], tallies: dict[str, Tally]
) -> dict[str, Any]:
    """The values with each site of the tallies at its maximum."""
    values = dict(values)
    for role in spec.form.roles:
        if role.site not in tallies:
            continue
        value, prior = values[role.site], at.priors.get(role.site)
        count, total = tallies[role.site]
        if role.part == "inclusion":
            new = inclusion_mode(total, count, prior, value)
        else:
            new = scale_mode(count, total, prior, value)
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
