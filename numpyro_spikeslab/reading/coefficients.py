# SPDX-License-Identifier: Apache-2.0
"""Coefficients: Normal sites, beside the weights, in which the location is affine."""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Scaled(NamedTuple):
    """Coefficients as deviations from their prior means, in units of the prior's scales.

    - **features** - what a unit of each adds to the K observations.
    - **current** - their values.
    - **back** - takes such values back to those of their sites.
    - **slopes** - takes their slopes back, of shape (B, P), to those of their sites.
    """

    features: Float[Array, "B K"]
    current: Float[Array, " B"]
    back: Callable[[Any], dict[str, Any]]
    slopes: Callable[[Any], dict[str, Any]]


def scaled(
    rows: Float[Array, "B N Q"], values: dict[str, Any], at: View, names: tuple[str, ...]
) -> Scaled:
    """
    :param rows: their design.
    :param values: of all sites beside the weights.
    :param at: the model at these values.
    :param names: which coefficients.
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
    of_slopes = jax.vmap(lambda slope: unflatten(scale * slope), in_axes=1, out_axes=-1)
    return Scaled(
        features, (flat - mean) / scale, lambda new: unflatten(mean + scale * new), of_slopes
    )


def coefficients_given(
    rows: Float[Array, "B N Q"],
    values: dict[str, Any],
    at: View,
    residual: Float[Array, "N Q"],
    names: tuple[str, ...],
) -> tuple[Conditional, Float[Array, " B"], Callable[[Any], dict[str, Any]]]:
    """The conditional of coefficients, given all else.

    :param residual: what is left of the observations.
    :return: the conditional; the current coefficients as it has them; and what takes it back.
    """
    own = scaled(rows, values, at, names)
    precision = jnp.ravel(jnp.broadcast_to(at.precision, residual.shape))
    given = conditional(own.features, precision, jnp.ravel(residual), own.current)
    return given, own.current, own.back
