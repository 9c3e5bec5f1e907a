# SPDX-License-Identifier: Apache-2.0
"""The predictor as a linear map of weights or of coefficients, and the rows of that map."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax.extend.core import Literal
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import CHANGING_BLOCK_SIZE, block_design
from numpyro_spikeslab.reading.form import CoefficientSite, Form
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.provenance import called
from numpyro_spikeslab.reading.view import view

Sites = tuple[CoefficientSite, ...]


class Linear(NamedTuple):
    """The derivative of the predictor in some sites, of weights or coefficients.

    - **zero** - zeros in the shapes of the sites.
    - **tangent** - the map from values of the sites to a table with tasks as columns.
    """

    form: Form
    sites: Sites
    zero: dict[str, Any]
    tangent: Callable[[dict[str, Any]], Float[Array, "N Q"]]

    @classmethod
    def of(cls, problem: Problem, values: dict[str, Any], sites: Sites | None = None) -> "Linear":
        """Linearise the predictor at these values of the other sites.

        :param sites: of coefficients; by default the weights.
        """
        form = problem.form
        start = {pair.name: jnp.zeros(pair.shape) for pair in form.pairs}
        if sites is not None:
            start = {each.site: values[each.site] for each in sites}

        def predictor(new):
            weights = new if sites is None else None
            return problem.predictor_of_tasks(values | new, weights)

        # it is affine in them, so they may have any value
        tangent = jax.linearize(predictor, start)[1]
        zero = jax.tree.map(jnp.zeros_like, start)
        return cls(form, form.weight_sites if sites is None else sites, zero, tangent)

    def rows(self) -> Float[Array, "C L"]:
        """Return what each entry of the sites adds to all observations: the transposed Jacobian."""
        matrices, rows = factors(self), []
        for name in (each.site for each in self.sites):
            zero = self.zero[name]

            def row(k, name=name, zero=zero):
                unit = jnp.ravel(zero).at[k].set(1).reshape(zero.shape)
                return jnp.ravel(self.tangent(self.zero | {name: unit}))

            if (matrix := matrices.get(name)) is None:
                # the batch bounds the memory of the intermediates, not of the result
                matrix = jax.lax.map(row, jnp.arange(zero.size), batch_size=256)
            rows.append(matrix)
        joined = jnp.concatenate(rows)
        return joined.astype(jnp.result_type(joined, float))

    def over_shared(self, of: Callable[[Any], Any]) -> dict[str, Any]:
        """Apply ``of`` to the change of the predictor for each feature that tasks share."""
        (N, Q), result = self.form.table, {}
        for each in self.sites:
            zero = each.take(self.zero[each.site])

            def one(k, each=each, zero=zero):
                # without a barrier XLA spends seconds on folding constants
                unit = jax.lax.optimization_barrier(zero.at[:, k].set(1))
                unit = each.put(unit, self.zero[each.site].shape)
                return of(self.tangent(self.zero | {each.site: unit}))

            number = zero.shape[1]
            # the batch bounds the memory of the intermediates
            batch = max(1, min(256, 2**24 // (Q * (N + number))))
            result[each.site] = jax.lax.map(one, jnp.arange(number), batch_size=batch)
        return result


def dense_rows(
    problem: Problem, values: dict[str, Any], sites: Sites | None = None
) -> Float[Array, "C observations"]:
    """Compute the rows of coefficients, by default of the weights, in all observations."""
    return Linear.of(problem, values, sites).rows()


def shared_rows(
    problem: Problem, values: dict[str, Any], sites: Sites | None = None
) -> dict[str, Float[Array, "C N"]]:
    """Compute the features or covariates that all tasks share, by the names of their sites; see
    :func:`where_observed`."""
    rows = Linear.of(problem, values, sites).over_shared(lambda rows: rows[:, 0])
    return {name: where_observed(problem, values, x) for name, x in rows.items()}


def where_observed(
    problem: Problem, values: dict[str, Any], rows: Float[Array, "M N"]
) -> Float[Array, "M N"]:
    """Set rows to 0 where no task has an observation. If other sites can move the mask, set only
    non-finite ones."""
    observed = jnp.any(view(problem, values).relative > 0, axis=1)
    is_safe = observed if problem.form.constant_design else observed | jnp.isfinite(rows)
    return jnp.where(is_safe, rows, 0)


def blocks_at(
    problem: Problem, values: dict[str, Any], rows: Float[Array, "P N"] | None = None
) -> Float[Array, "K B N"]:
    """Cut rows, by default of the weights, into small blocks; see :func:`where_observed`."""
    rows = dense_rows(problem, values) if rows is None else rows
    rows = where_observed(problem, values, rows)
    return block_design(rows, None, CHANGING_BLOCK_SIZE, products=False).rows


def factors(linear: Linear) -> dict[str, Any]:
    """Find the matrices, features as rows, by which a linear map multiplies the values of each
    site, read off its program; `None` if there is another operation.

    In ``X @ w`` it is ``X``, and to copy it costs less than as many products as there are weights.
    """
    tangent, zero = linear.tangent, linear.zero
    jaxpr = jax.make_jaxpr(lambda tangent, x: tangent(x))(tangent, zero).jaxpr
    (result,) = _follow(jaxpr, [*jax.tree.leaves(tangent), *sorted(zero)])
    return result if isinstance(result, dict) else {}


def _follow(jaxpr: Any, inputs: list[Any]) -> list[Any]:
    """Return for each result the name of the site whose values it is, or the matrix by which each
    site is multiplied.

    :param inputs: arrays, and such results.
    """
    results_of = dict(zip(jaxpr.invars, inputs, strict=True))
    for equation in jaxpr.eqns:
        operands = [None if isinstance(x, Literal) else results_of.get(x) for x in equation.invars]
        inner = called(equation)
        results = [_result(equation, operands)] if inner is None else _follow(inner, operands)
        results_of |= dict(zip(equation.outvars, results * len(equation.outvars), strict=False))
    return [None if isinstance(x, Literal) else results_of.get(x) for x in jaxpr.outvars]


def _result(equation: Any, operands: list[Any]) -> Any:
    name, sizes = equation.primitive.name, [x.aval.size for x in equation.invars]
    linear_operands = {k: x for k, x in enumerate(operands) if isinstance(x, str | dict)}
    names = [site for x in linear_operands.values() for site in ([x] if isinstance(x, str) else x)]
    kinds = [type(x) for x in linear_operands.values()]
    in_order = name in _IN_ORDER and (name != "reshape" or equation.params["dimensions"] is None)
    if in_order and sizes == [equation.outvars[0].aval.size]:
        return operands[0]
    if name == "dot_general" and kinds == [str]:
        ((k, weights),) = linear_operands.items()
        matrix, contracted = operands[1 - k], equation.params["dimension_numbers"][0][1 - k]
        # so the weights have no other axes, and there is no batch
        if jnp.ndim(matrix) == 2 and [matrix.shape[axis] for axis in contracted] == [sizes[k]]:
            return {weights: jnp.moveaxis(matrix, contracted[0], 0)}
    if name in ("add", "add_any") and kinds == [dict, dict] and len({*names}) == len(names):
        return operands[0] | operands[1]
    return dict.fromkeys(names)


_IN_ORDER = ("broadcast_in_dim", "copy", "reshape", "squeeze")
"""Primitives that keep the order of entries, where their number stays."""
