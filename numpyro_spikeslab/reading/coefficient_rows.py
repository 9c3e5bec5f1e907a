# SPDX-License-Identifier: Apache-2.0
"""Coefficients: Normal sites, beside the weights, in which the location is affine."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import Without, without
from numpyro_spikeslab.algebra.covariates import Beside, Normal, Shares, shares_of
from numpyro_spikeslab.reading.form import Form, OfTasks
from numpyro_spikeslab.reading.problem import Problem
from numpyro_spikeslab.reading.view import View, where_observed


def coefficient_rows(
    problem: Problem, values: dict[str, Any], names: tuple[str, ...]
) -> Float[Array, "B N Q"]:
    """The design that multiplies coefficients, their entries as rows."""
    tangent = _tangent(problem, values, names)
    flat, unflatten = ravel_pytree({name: values[name] for name in names})
    units = jnp.eye(flat.size, dtype=flat.dtype)
    return jax.vmap(lambda unit: tangent(unflatten(unit)))(units)


def _tangent(problem, values, names) -> Callable[[Any], Float[Array, "N Q"]]:
    """The linear map from coefficients to the location."""
    start = {name: values[name] for name in names}
    # the location is affine in them, so they may be anything
    return jax.linearize(lambda new: problem.predictor_of_tasks(values | new), start)[1]


def affine_map(
    problem: Problem, values: dict[str, Any]
) -> tuple[Callable[[Any], Float[Array, "N Q"]], dict[str, tuple[int, ...]]]:
    """The linear map from the coefficients of tasks to the location, and shapes of their sites."""
    names = tuple(own.site for own in problem.form.of_tasks)
    shapes = {name: jnp.shape(values[name]) for name in names}
    return _tangent(problem, values, names), shapes


def over_covariates(
    form: Form,
    tangent: Callable[[Any], Any],
    own: OfTasks,
    shapes: dict[str, tuple[int, ...]],
    of: Callable[[Any], Any],
) -> Any:
    """``of`` what a unit of one coefficient of each task adds to the observations, (N, Q), for each
    of the C coefficients that a task has in a site."""
    Q, C = form.num_tasks, prod(shapes[own.site]) // form.num_tasks
    zero = {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def one(k):
        # XLA would take seconds to fold what is the same for all data
        unit = jax.lax.optimization_barrier(jnp.zeros((Q, C)).at[:, k].set(1))
        return of(tangent(zero | {own.site: own.put(unit, shapes[own.site])}))

    return jax.lax.map(one, jnp.arange(C))


def shared_covariates(problem: Problem, values: dict[str, Any]) -> dict[str, Float[Array, "C N"]]:
    """Covariates of the coefficients of tasks, 0 where no task has an observation."""
    form, (tangent, shapes) = problem.form, affine_map(problem, values)

    def rows(own):
        found = over_covariates(form, tangent, own, shapes, lambda rows: rows[:, 0])
        return where_observed(problem, values, found)

    return {own.site: rows(own) for own in form.of_tasks}


class TaskCoefficients(NamedTuple):
    """Coefficients of tasks.

    - **sites** - of which sites.
    - **beside** - what the observations say of them, and of the weights beside them.
    - **prior** - theirs.
    - **current** - deviations from their prior means in units of the prior's scales.
    - **shapes** - of the sites.
    - **covariates** - theirs.
    """

    sites: tuple[OfTasks, ...]
    beside: Beside
    prior: Normal
    current: Float[Array, "Q C"]
    shapes: dict[str, tuple[int, ...]]
    covariates: Float[Array, "C N"]

    def added(self, u: Float[Array, "Q C"]) -> Float[Array, "N Q"]:
        """What such deviations add to the location."""
        return (self.prior.scale * u @ self.covariates).T

    def back(self, u: Float[Array, "Q C"]) -> dict[str, Any]:
        """Takes such deviations back to values of their sites."""
        return self._split(self.prior.mean + self.prior.scale * u)

    def slopes(self, u: Float[Array, "Q C M"]) -> dict[str, Any]:
        """The same of slopes."""
        return self._split(self.prior.scale[..., None] * u)

    def _split(self, x: Float[Array, "Q C ..."]) -> dict[str, Any]:
        sizes = [prod(self.shapes[own.site]) // len(x) for own in self.sites]
        parts = jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=1)
        return {
            own.site: own.put(part, self.shapes[own.site])
            for own, part in zip(self.sites, parts, strict=True)
        }


def task_coefficients(
    sites: tuple[OfTasks, ...],
    at: View,
    values: dict[str, Any],
    features: Float[Array, "M N"],
    covariates: dict[str, Any],
    shares: Shares | None = None,
) -> TaskCoefficients:
    """
    :param sites: of the coefficients.
    :param at: the model at these values, without what the features add.
    :param values: of the sites beside the weights.
    :param features: what multiplies the weights.
    :param covariates: by the names of the sites.
    :param shares: of the observations, where they are known.
    """
    mean, variance = (
        _taken(sites, {own.site: _of_prior(at, values, part, own.site) for own in sites})
        for part in ("mean", "variance")
    )
    prior = Normal(mean, jnp.sqrt(variance))
    if shares is None:
        shares = shares_at(sites, at, values, features, covariates)
    current = (_taken(sites, values) - mean) / prior.scale
    shapes = {own.site: jnp.shape(values[own.site]) for own in sites}
    rows = jnp.concatenate([covariates[own.site] for own in sites])
    return TaskCoefficients(sites, shares.beside(prior, at.sigma2), prior, current, shapes, rows)


def shares_at(
    sites: tuple[OfTasks, ...],
    at: View,
    values: dict[str, Any],
    features: Float[Array, "M N"],
    covariates: dict[str, Any],
) -> Shares:
    """What the observations say of coefficients and weights; for the arguments see
    :func:`task_coefficients`."""
    rows = jnp.concatenate([covariates[own.site] for own in sites])
    return shares_of(at.Y + (_taken(sites, values) @ rows).T, at.relative, features, rows)


def _taken(sites: tuple[OfTasks, ...], values: dict[str, Any]) -> Float[Array, "Q C"]:
    return jnp.concatenate([own.take(values[own.site]) for own in sites], axis=1)


def _of_prior(at: View, values: dict[str, Any], part: str, name: str) -> Any:
    return jnp.broadcast_to(getattr(at.priors[name], part), jnp.shape(values[name]))


def slopes_of_tasks(sites: tuple[OfTasks, ...], slopes: dict[str, Any]) -> Float[Array, "Q C M"]:
    """Slopes of all coefficients of tasks."""
    return jnp.concatenate([own.take(slopes[own.site], 1) for own in sites], axis=1)


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
    return ravel_pytree({name: _of_prior(at, values, part, name) for name in values})[0]


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


def without_coefficients(
    problem: Problem, values: dict[str, Any], at: View, names: tuple[str, ...]
) -> tuple[Scaled, Without]:
    """Coefficients in units of their priors, and the observations of all tasks without them.

    :param values: of all sites beside the weights.
    :param at: the model at these values.
    :param names: which coefficients.
    """
    own = scaled(coefficient_rows(problem, values, names), values, at, names)
    return own, without(own.features, jnp.ravel(jnp.broadcast_to(at.precision, at.Y.shape)))
