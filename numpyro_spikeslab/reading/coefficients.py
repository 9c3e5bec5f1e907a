# SPDX-License-Identifier: Apache-2.0
"""Coefficients: Normal sites, beside the weights, in which the location is affine."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import Conditional, conditional
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.program import Program
from numpyro_spikeslab.reading.view import View, run_at


def coefficient_rows(
    form: Form, program: Program, constants: tuple, values: dict[str, Any], names: tuple[str, ...]
) -> Float[Array, "B N Q"]:
    """The design that multiplies coefficients, their entries as rows."""
    start = {name: values[name] for name in names}

    def location(new):
        seen = run_at(form, program, constants, values | new).observed[form.likelihood]
        return form.tasks_last(jnp.broadcast_to(seen.loc, jnp.shape(seen.value)))

    # the location is affine in them, so they may be anything
    flat, unflatten = ravel_pytree(start)
    tangent = jax.linearize(location, start)[1]
    units = jnp.eye(flat.size, dtype=flat.dtype)
    return jax.vmap(lambda unit: tangent(unflatten(unit)))(units)


def coefficients_given(
    rows: Float[Array, "B N Q"],
    values: dict[str, Any],
    at: View,
    residual: Float[Array, "N Q"],
    names: tuple[str, ...],
) -> tuple[Conditional, Float[Array, " B"], Callable[[Any], dict[str, Any]]]:
    """The conditional of coefficients, given all else.

    :param rows: their design.
    :param values: of all other sites.
    :param at: the model at these values.
    :param residual: what is left of the observations.
    :param names: which coefficients.
    :return: the conditional; the current coefficients as it has them; and what takes it back.
    """
    current = {name: values[name] for name in names}
    flat, unflatten = ravel_pytree(current)
    mean, variance = (
        ravel_pytree(
            {k: jnp.broadcast_to(getattr(at.priors[k], part), x.shape) for k, x in current.items()}
        )[0]
        for part in ("mean", "variance")
    )
    scale = jnp.sqrt(variance)
    features = scale[:, None] * rows.reshape(flat.size, -1)
    precision = jnp.ravel(jnp.broadcast_to(at.precision, residual.shape))
    before = (flat - mean) / scale
    given = conditional(features, precision, jnp.ravel(residual), before)
    return given, before, lambda new: unflatten(mean + scale * new)
