# SPDX-License-Identifier: Apache-2.0
"""Coefficients of a model: their rows in the location, their priors, and data without them.

Their values are arrays of shape (Q, C): each of Q tasks has its own (``form.of_tasks``), or Q is 1
and all are one dense vector.
"""

from collections.abc import Collection
from math import prod
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import (
    Coefficients,
    NormalPrior,
    Split,
    TaskStatistics,
    basis_of,
    of_columns,
    split,
    task_statistics,
    whitened,
)
from numpyro_spikeslab.algebra.pairs import AnyDesign, ChangingDesign, Design
from numpyro_spikeslab.algebra.task_sweeps import TaskSums, times
from numpyro_spikeslab.reading.linear import Sites, dense_rows, shared_rows
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.view import View


def covariate_rows(problem: Problem, values: dict[str, Any]) -> dict[str, Float[Array, "C ..."]]:
    """Return the rows of all coefficients by name; those that tasks share are 0 where no task has
    an observation."""
    form = problem.form
    if form.of_tasks:
        return shared_rows(problem, values, form.of_tasks)
    sites = form.coefficient_sites(form.coefficients)
    return {each.site: dense_rows(problem, values, (each,)) for each in sites}


def covariates_at(
    problem: Problem, constant: dict[str, Any], values: dict[str, Any], names: Collection[str]
) -> Any:
    """Return the rows of some coefficients, joined, at given values of the other sites; `None` of
    no coefficients.

    :param constant: :func:`covariate_rows`, where these depend on data alone.
    """
    sites = problem.form.coefficient_sites(names)
    if not sites:
        return None
    if not problem.form.constant_covariates:
        return dense_rows(problem, values, sites)
    return jnp.concatenate([constant[each.site] for each in sites])


def joined(sites: Sites, values: dict[str, Any], behind: int = 0) -> Float[Array, "Q C ..."]:
    """Join the values of the sites, which have ``behind`` more axes behind their own."""
    return jnp.concatenate([each.take(values[each.site], behind) for each in sites], axis=1)


def by_site(
    sites: Sites, shapes: dict[str, tuple[int, ...]], x: Float[Array, "Q C ..."]
) -> dict[str, Any]:
    """Split arrays by sites: the inverse of :func:`joined`."""
    sizes = [prod(shapes[each.site]) // len(x) for each in sites]
    parts = jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=1)
    return {
        each.site: each.put(part, shapes[each.site])
        for each, part in zip(sites, parts, strict=True)
    }


class Standardised(NamedTuple):
    """Sites of coefficients, their shapes by name, and their prior and current values."""

    sites: Sites
    shapes: dict[str, tuple[int, ...]]
    prior: NormalPrior

    def values(self, u: Float[Array, "Q C"]) -> dict[str, Any]:
        """Return the values of the sites at deviations from the prior."""
        return by_site(self.sites, self.shapes, self.prior.origin + self.prior.scaled(u))

    def deviations(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return how far new values are from their prior means."""
        change = self.prior.unscaled(joined(self.sites, values) - self.prior.origin)
        return by_site(self.sites, self.shapes, change * self.prior.scale)

    def slopes(self, slopes: Float[Array, "Q C M"]) -> dict[str, Any]:
        """Return the slopes of the values, with a last axis for the weights."""
        return by_site(self.sites, self.shapes, self.prior.scaled(slopes))

    def unscaled(self, slopes: dict[str, Any]) -> Float[Array, "Q C M"]:
        """Return slopes of the deviations: the inverse of :meth:`slopes`."""
        return self.prior.unscaled(joined(self.sites, slopes, 1))


def standardised(sites: Sites, at: View, values: dict[str, Any]) -> Standardised:
    """Read the priors of coefficients in a view at these values."""
    shapes = {each.site: jnp.shape(values[each.site]) for each in sites}

    def moment(part):
        moments = {k: getattr(at.priors[k], part) for k in shapes}
        return joined(sites, {k: jnp.broadcast_to(x, shapes[k]) for k, x in moments.items()})

    links = None
    if at.links is not None:
        sizes = {name: prod(shape) for name, shape in shapes.items()}
        rows = [[at.links[a][b].reshape(sizes[a], sizes[b]) for b in sizes] for a in sizes]
        links = jnp.block(rows)
    prior = NormalPrior(joined(sites, values), moment("mean"), moment("variance") ** 0.5, links)
    return Standardised(sites, shapes, prior)


class ColumnsWithout(NamedTuple):
    """The columns of a design and their residual, with coefficients integrated out.

    The N observations outside of the span of the covariates, then K in it.
    """

    standard: Standardised
    coefficients: Coefficients
    design: AnyDesign
    residual: Float[Array, " NK"]
    basis: Float[Array, "K N"]

    def given(self, residual: Float[Array, " NK"]) -> tuple[dict[str, Any], Float[Array, " N"]]:
        """Return the coefficients at their conditional mean, and the residual, given that at new
        weights."""
        N = self.basis.shape[1]
        u, inside = self.coefficients.given(residual[None, N:])
        return self.standard.values(u), residual[:N] + inside[0] @ self.basis


def columns_without(
    rows: Float[Array, "C N"],
    at: View,
    values: dict[str, Any],
    sites: Sites,
    design: AnyDesign,
    parts: Split | None,
) -> ColumnsWithout:
    """Integrate coefficients out of the columns of a design.

    :param rows: from :func:`covariates_at`.
    :param at: the model at these values; its observations are the residual of some weights.
    :param parts: the whitened design, split along the covariates, where that is constant.
    """
    relative = at.relative[:, 0]
    covariates = whitened(rows, relative)
    standard, y = standardised(sites, at, values), at.whitened

    def conditional(basis, inside):
        inside = inside.reshape(-1, len(basis))[: at.prior.variance.size]
        return of_columns(basis, inside, covariates, y, standard.prior, at.sigma2[0])

    if isinstance(design, ChangingDesign):
        basis = basis_of(covariates)
        coefficients, outside = conditional(basis, design.rows @ (basis * design.whitening).T)
        without: AnyDesign = design._replace(basis=basis, root=coefficients.whitening[0])
    else:
        gram = None if parts is None else parts.products
        parts = split(design.rows, covariates) if parts is None else parts
        basis = parts.basis
        coefficients, outside = conditional(basis, parts.inside)
        span = parts.inside @ coefficients.whitening[0].T
        without = Design(parts.outside, gram, span)
    residual = jnp.concatenate([outside, coefficients.without()[1][0]])
    return ColumnsWithout(standard, coefficients, without, residual, basis)


class TasksWithout(NamedTuple):
    """Weights of tasks, with the coefficients of each task integrated out."""

    standard: Standardised
    coefficients: Coefficients
    statistics: TaskStatistics

    def sums(self) -> TaskSums:
        """Return sums of the features, and features in K directions whose products add."""
        (J, e), outside = self.coefficients.without(), self.statistics.outside
        return outside._replace(b=outside.b + jnp.einsum("qkm,qk->qm", J, e), extra=J)

    def given(
        self, w: Float[Array, "Q M"], noise: Float[Array, "Q C"] | None = None
    ) -> tuple[Float[Array, "Q C"], dict[str, Any]]:
        """Return the coefficients at their conditional mean, or a draw: deviations, and values."""
        J, e = self.coefficients.without()
        u, _ = self.coefficients.given(e - times(J, w), noise)
        return u, self.standard.values(u)

    def squares(
        self,
        weights: Any,
        u: Float[Array, "Q C"],
        slopes: Float[Array, "Q C M"],
    ) -> Float[Array, " Q"]:
        """Return the expected squared residuals.

        :param weights: their family.
        :param u: deviations of the coefficients at the means of the weights, and their slopes.
        """
        J, E, e, *_ = self.coefficients
        inside = e - times(J, weights.mean) - times(E, u)
        spread = weights.variance * jnp.sum((J + E @ slopes) ** 2, axis=1)
        outside = self.statistics.outside.squares(weights)
        return outside + jnp.sum(inside**2, axis=1) + jnp.sum(spread, axis=1)


def tasks_without(
    sites: Sites,
    at: View,
    values: dict[str, Any],
    features: Float[Array, "M N"],
    rows: Float[Array, "C N"],
    statistics: TaskStatistics | None,
) -> TasksWithout:
    """Integrate the coefficients of tasks out.

    :param at: the model at these values and zero weights.
    :param rows: from :func:`covariates_at`.
    :param statistics: of the data, where they are constant.
    """
    statistics = statistics or statistics_at(sites, at, values, features, rows)
    standard = standardised(sites, at, values)
    coefficients = statistics.coefficients(standard.prior, at.sigma2)
    return TasksWithout(standard, coefficients, statistics)


def statistics_at(
    sites: Sites,
    at: View,
    values: dict[str, Any],
    features: Float[Array, "M N"],
    rows: Float[Array, "C N"],
) -> TaskStatistics:
    """Sum over the observations of tasks; see :func:`tasks_without`."""
    return task_statistics(at.Y + (joined(sites, values) @ rows).T, at.relative, features, rows)


def given_residual(
    rows: Float[Array, "C observations"],
    at: View,
    values: dict[str, Any],
    sites: Sites,
    residual: Float[Array, "N Q"],
    noise: Float[Array, "1 C"] | None = None,
) -> tuple[dict[str, Any], Float[Array, "N Q"]]:
    """Return dense coefficients at their conditional mean given the weights, or a draw by standard
    normal ``noise``, and the residual.

    :param rows: from :func:`covariates_at`.
    :param residual: observations less their location at the weights and current coefficients.
    """
    precision = jnp.ravel(jnp.broadcast_to(at.precision, residual.shape))
    standard = standardised(sites, at, values)
    covariates, y = whitened(rows, precision), jnp.sqrt(precision) * jnp.ravel(residual)
    basis = basis_of(covariates)
    none, one = jnp.zeros((0, len(basis)), y.dtype), jnp.ones((), y.dtype)
    coefficients, _ = of_columns(basis, none, covariates, y, standard.prior, one)
    u, _ = coefficients.given(coefficients.without()[1], noise)
    change = (standard.prior.scaled(u - standard.prior.deviation) @ rows).reshape(residual.shape)
    # rows may be NaN where nothing is observed
    change = jnp.where(at.precision > 0, change, 0)
    return standard.values(u), residual - change
