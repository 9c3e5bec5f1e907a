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


def links_between(values: dict[str, Any], at: View) -> Float[Array, "B B"] | None:
    """By how much prior means of coefficients change with a unit of each.

    :param values: of these coefficients, or anything of their shapes.
    """
    if at.links is None:
        return None
    sizes = {name: jnp.size(values[name]) for name in sorted(values)}
    return jnp.block(
        [
            [jnp.reshape(at.links[name][other], (size, sizes[other])) for other in sizes]
            for name, size in sizes.items()
        ]
    )


def scaled_slopes(slopes: dict[str, Any], at: View) -> Float[Array, "B P"]:
    """Slopes of the deviations of coefficients from their prior means, in units of the prior's
    scales.

    :param slopes: by how much the coefficients change with each weight.
    """
    values = {name: x[..., 0] for name, x in slopes.items()}
    scale = _prior(values, at, "variance") ** 0.5
    flat, links = joined(slopes), links_between(values, at)
    return (flat if links is None else flat - links @ flat) / scale[:, None]


def joined(slopes: dict[str, Any]) -> Float[Array, "B P"]:
    """Slopes of all coefficients, in the order of their rows."""
    return jnp.concatenate([slopes[k].reshape(-1, slopes[k].shape[-1]) for k in sorted(slopes)])


def _prior(values: dict[str, Any], at: View, part: str) -> Float[Array, " B"]:
    """The mean or the variance of the prior of each coefficient."""
    every = {k: jnp.broadcast_to(getattr(at.priors[k], part), x.shape) for k, x in values.items()}
    return ravel_pytree(every)[0]


class Scaled(NamedTuple):
    """Coefficients as deviations from their prior means, in units of the prior's scales.

    Where a mean depends on other coefficients it is the one that goes with these.

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
    mean, scale = _prior(current, at, "mean"), jnp.sqrt(_prior(current, at, "variance"))
    now, rows, links = (
        (flat - mean) / scale,
        rows.reshape(flat.size, -1),
        links_between(current, at),
    )
    if links is None:
        features, times = scale[:, None] * rows, lambda x: (scale * x.T).T
    else:
        # a deviation of one moves the means of others, and these move on
        root = jnp.linalg.solve(jnp.eye(flat.size, dtype=flat.dtype) - links, jnp.diag(scale))
        features, times = root.T @ rows, lambda x: root @ x
    of_slopes = jax.vmap(lambda slope: unflatten(times(slope)), in_axes=1, out_axes=-1)
    return Scaled(features, now, lambda new: unflatten(flat + times(new - now)), of_slopes)


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
