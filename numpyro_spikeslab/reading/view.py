# SPDX-License-Identifier: Apache-2.0
"""The model at given values of its other sites, and the design that multiplies its weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax.extend.core import Literal
import jax.numpy as jnp

from numpyro_spikeslab.algebra.observations import Grid, Observations
from numpyro_spikeslab.algebra.pairs import (
    CHANGING_BLOCK_SIZE,
    Design,
    Prior,
    block_design,
)
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.likelihood import Observed
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.provenance import called


class View(NamedTuple):
    """The model at given values of its other sites: Q tasks with N observations each, or L entries.

    An observation has the precision ``relative / sigma2``, 0 where it is missing.

    - **Y** - observations less their location at the given weights, 0 where they are missing.
    - **relative** - precisions relative to the task's, one column where all tasks agree.
    - **sigma2** - noise variance of each task; 1 where noise varies along tasks, which is then a
      part of ``relative``.
    - **count** - how many observations each task has.
    - **rounding** - sum of squared residuals of each task that rounding of its observations makes.
    - **log_scale** - sum of ``log(sigma sqrt(2 pi))`` over all observations.
    - **prior** - prior of the weights, (Q, M), or one row where that of all tasks is the same.
    - **priors** - distributions of the other latent sites.
    - **log_density** - of all sites but the likelihood, the pairs, the functions they mix and those
      that have a role or belong to kernels, whose densities ``priors`` has.
    - **layout** - of the observations: a table, or L entries of one.
    - **links** - derivatives of prior means in coefficients, `None` if all are zero.
    """

    Y: Float[Array, "N Q"] | Float[Array, " L"]
    relative: Float[Array, "N #Q"] | Float[Array, " L"]
    sigma2: Float[Array, " Q"]
    count: Float[Array, " Q"]  # type: ignore[assignment]
    rounding: Float[Array, " Q"]
    log_scale: Float[Array, ""]
    prior: Prior
    priors: dict[str, Any]
    log_density: Float[Array, ""]
    layout: Observations
    links: dict[str, dict[str, Any]] | None = None

    @property
    def precision(self) -> Float[Array, "N Q"]:
        return self.relative / self.sigma2

    def squares(self, residual: Any, variance: Any = 0.0) -> Float[Array, " Q"]:
        """Sum the expected squares of each task's residuals, by their relative precisions."""
        return self.layout.by_task(self.relative * (residual**2 + variance))

    def over_points(self, x: Float[Array, "*K N"]) -> Float[Array, "*K #Q"]:
        """Compute ``sum_n z_nq x_n``; one column where all tasks weigh alike."""
        return self.layout.over_points(self.relative, x)

    def over_tasks(self, x: Float[Array, " Q *K"]) -> Float[Array, " N *K"]:
        """Compute ``sum_q z_nq x_q``."""
        return self.layout.over_tasks(self.relative, x)

    def residual(self, w: Float[Array, "Q M"], phi: Float[Array, "M N"]) -> Any:
        """Subtract the functions ``phi`` that weights mix from the observations."""
        return self.Y - self.layout.mix(w, phi)


def view(
    problem: Problem,
    values: dict[str, Any],
    weights: dict[str, Any] | None = None,
    layout: Observations | None = None,
    moments: tuple[Any, Any] | None = None,
) -> View:
    """Run the model at given values.

    :param layout: of the observations, by default a whole table.
    :param moments: mean and variance of the predictor at these weights, for which Gaussians stand
        in for the likelihood.
    """
    form, stand_in = problem.form, None
    layout = layout or Grid(form.table)
    observed, rest = observe(problem, values, weights)
    if moments is not None:
        stand_in = form.likelihood.at(problem, values, observed, moments[0]).expect(*moments)
        if form.is_design:
            observed = observed._replace(predictor=moments[0])
    return View(**observed.in_tasks(form, layout, stand_in), **rest, layout=layout)


def observe(
    problem: Problem, values: dict[str, Any], weights: dict[str, Any] | None = None
) -> tuple[Observed, dict[str, Any]]:
    """Run the model; return its observations, and the other fields of a view."""
    form, run = problem.form, problem.run(values, weights)
    elsewhere = {form.response, form.functions, *form.kernels}
    elsewhere |= {role.site for role in form.roles_with_mode}
    log_probs = [x for name, x in run.log_probs.items() if name not in elsewhere]
    pairs = [run.pairs[pair.name] for pair in form.pairs]
    log_odds = jnp.concatenate([jnp.ravel(prior.log_odds) for prior in pairs])
    scale = jnp.concatenate([jnp.ravel(prior.scale) for prior in pairs])
    return problem.likelihood(run), {
        "prior": Prior(log_odds.reshape(form.shape), scale.reshape(form.shape) ** 2),
        "priors": run.priors,
        "log_density": sum(log_probs, start=jnp.zeros(())),
        "links": _links(problem, values) if form.links else None,
    }


def _links(problem: Problem, values: dict[str, Any]) -> Any:
    start = {name: values[name] for name in problem.form.coefficients}

    def means(new):
        priors = problem.run(values | new, of=lambda run: run.priors)
        return {name: jnp.broadcast_to(priors[name].mean, x.shape) for name, x in new.items()}

    return jax.jacfwd(means)(start)


def linear_map(problem: Problem, values: dict[str, Any]) -> Any:
    """Linearise the predictor: return the map from weights, by pair, to flat observations."""
    weights = {pair.name: jnp.zeros(pair.shape) for pair in problem.form.pairs}
    return jax.linearize(lambda w: jnp.ravel(problem.predictor(values, w)), weights)[1]


def factors(form: Form, tangent: Any) -> dict[str, Any]:
    """Find the matrices, features as rows, by which a linear map multiplies the weights of each
    pair, read off its program; `None` if there is another operation.

    In ``X @ w`` it is ``X``, and to copy it costs less than as many products as there are weights.
    """
    weights = {pair.name: jnp.zeros(pair.shape) for pair in form.pairs}
    jaxpr = jax.make_jaxpr(lambda tangent, w: tangent(w))(tangent, weights).jaxpr
    (result,) = _follow(jaxpr, [*jax.tree.leaves(tangent), *sorted(weights)])
    return result if isinstance(result, dict) else {}


def _follow(jaxpr: Any, inputs: list[Any]) -> list[Any]:
    """Return what each result is: the name of the weights that it is, or the matrix of each pair
    that it is the sum of products with.

    :param inputs: arrays, and such results.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        operands = [None if isinstance(x, Literal) else known.get(x) for x in equation.invars]
        inner = called(equation)
        results = [_result(equation, operands)] if inner is None else _follow(inner, operands)
        known |= dict(zip(equation.outvars, results * len(equation.outvars), strict=False))
    return [None if isinstance(x, Literal) else known.get(x) for x in jaxpr.outvars]


def _result(equation: Any, operands: list[Any]) -> Any:
    name, sizes = equation.primitive.name, [x.aval.size for x in equation.invars]
    moving = {k: x for k, x in enumerate(operands) if isinstance(x, str | dict)}
    names = [name for x in moving.values() for name in ([x] if isinstance(x, str) else x)]
    kinds = [type(x) for x in moving.values()]
    in_order = name in _IN_ORDER and (name != "reshape" or equation.params["dimensions"] is None)
    if in_order and sizes == [equation.outvars[0].aval.size]:
        return operands[0]
    if name == "dot_general" and kinds == [str]:
        ((k, weights),) = moving.items()
        matrix, contracted = operands[1 - k], equation.params["dimension_numbers"][0][1 - k]
        # so the weights have no other axes, and there is no batch
        if jnp.ndim(matrix) == 2 and [matrix.shape[axis] for axis in contracted] == [sizes[k]]:
            return {weights: jnp.moveaxis(matrix, contracted[0], 0)}
    if name in ("add", "add_any") and kinds == [dict, dict] and len({*names}) == len(names):
        return operands[0] | operands[1]
    return dict.fromkeys(names)


_IN_ORDER = ("broadcast_in_dim", "copy", "reshape", "squeeze")
"""Primitives that keep the order of entries, where their number stays."""


def design_rows(problem: Problem, values: dict[str, Any]) -> Float[Array, "P N"]:
    """Compute the raw design that multiplies the weights, features as rows: the Jacobian."""
    form, tangent = problem.form, linear_map(problem, values)
    numbers, rows, matrices = form.split(jnp.arange(form.size), "{}"), [], factors(form, tangent)

    def row(k):
        return tangent(form.split(jnp.zeros(form.size).at[k].set(1), "{}"))

    for name in (pair.name for pair in form.pairs):
        if (matrix := matrices.get(name)) is None:
            # the batch bounds the memory of the intermediates, not of the result
            matrix = jax.lax.map(row, jnp.ravel(numbers[name]), batch_size=256)
        rows.append(matrix)
    joined = jnp.concatenate(rows)
    return joined.astype(jnp.result_type(joined, float))


def over_features(problem: Problem, values: dict[str, Any], of: Callable) -> Any:
    """Map ``of`` over the changes of the observations, (N, Q), with one weight of every task."""
    form, tangent = problem.form, linear_map(problem, values)
    (Q, M), N = form.shape, form.num_obs

    def one(m):
        rows = tangent(form.split(jnp.ravel(jnp.zeros((Q, M)).at[:, m].set(1)), "{}"))
        return of(rows.reshape(Q, N).T if form.tasks_first else rows.reshape(N, Q))

    # the batch bounds the memory of the intermediates
    batch = max(1, min(256, 2**24 // (Q * (N + M))))
    return jax.lax.map(one, jnp.arange(M), batch_size=batch)


def shared_features(problem: Problem, values: dict[str, Any]) -> Float[Array, "M N"]:
    """Compute features that all tasks share, 0 where no task has an observation."""
    rows = over_features(problem, values, lambda rows: rows[:, 0])
    return where_observed(problem, values, rows)


def where_observed(
    problem: Problem, values: dict[str, Any], rows: Float[Array, "M N"]
) -> Float[Array, "M N"]:
    """Set shared rows to 0 where no task has an observation, and if other sites may move the mask,
    only where they are not finite, too."""
    observed = jnp.any(view(problem, values).relative > 0, axis=1)
    is_safe = observed if problem.form.constant_design else observed | jnp.isfinite(rows)
    return jnp.where(is_safe, rows, 0)


def whitened_design(
    form: Form, rows: Float[Array, "P N"], relative: Float[Array, " N"], block_size: int
) -> Design:
    """Whiten the rows of :func:`design_rows` and cut them into blocks.

    :param relative: relative precisions of the observations.
    """
    constant = form.fixed_design
    # rows without an observation may be NaN
    rows = jnp.where(relative > 0, rows, 0)
    size = block_size if constant else CHANGING_BLOCK_SIZE
    return block_design(rows, jnp.sqrt(relative), size, constant)


def blocks_at(
    problem: Problem, values: dict[str, Any], rows: Float[Array, "P N"] | None = None
) -> Float[Array, "K B N"]:
    """Cut :func:`design_rows`, or these rows, into small blocks, 0 where nothing is observed."""
    rows = design_rows(problem, values) if rows is None else rows
    rows = where_observed(problem, values, rows)
    return block_design(rows, None, CHANGING_BLOCK_SIZE, products=False).rows
