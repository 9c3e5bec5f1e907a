# SPDX-License-Identifier: Apache-2.0
"""The predictor of a non-Normal likelihood: where its program is cut in two.

The predictor is the last variable, of the shape of the observations, that is affine in the weights
and through which alone the density of the observations depends on them: ``X @ w`` in
``Poisson(jnp.exp(X @ w))``. One program computes it; another takes it and computes the density.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.reading.likelihood import LINKS, AnyDensity, Mixture
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.program import Program, computed
from numpyro_spikeslab.reading.provenance import Step, called, provenance, union


def cuts(problem: Problem) -> Iterator[Problem]:
    """Yield the model with each variable through which alone the likelihood depends on the weights,
    the last one first, as its predictor."""
    program = problem.program
    places, tree = program.places(lambda run: problem.observations(run).density)
    (start,), _ = program.places(lambda run: problem.observations(run).predictor)
    jaxpr, shape = program.jaxpr, problem.observations(program.shapes).value.shape
    results = [jaxpr.outvars[place] for place in places]
    first = len(jaxpr.invars) - len(jax.tree.leaves(program.arguments[1:]))
    for variable in _bottlenecks(jaxpr, results, jaxpr.invars[first:]):
        aval = variable.aval
        if aval.shape == shape and jnp.issubdtype(aval.dtype, jnp.inexact):
            outvars = list(jaxpr.outvars)
            outvars[start] = variable
            located = program.rewritten(jaxpr.replace(outvars=outvars))
            after = [x for x in jaxpr.eqns if variable not in x.outvars]
            density = program.rewritten(
                jaxpr.replace(invars=[*jaxpr.invars, variable], outvars=results, eqns=after),
                in_tree=jax.tree.structure((*program.arguments, 0.0)),
                out_tree=tree,
            )
            yield replace(problem, program=located, density=density)


def _bottlenecks(jaxpr: Any, results: list[Any], inputs: list[Any]) -> Iterator[Any]:
    """Yield the variables through which alone results depend on some inputs, the last one first."""
    dependent = set(inputs)
    for equation in jaxpr.eqns:
        if any(_is_in(dependent, x) for x in equation.invars):
            dependent.update(equation.outvars)
    front = {x for x in results if _is_in(dependent, x)}
    for equation in reversed(jaxpr.eqns):
        if front.isdisjoint(equation.outvars):
            continue
        if len(front) == 1:
            yield next(iter(front))
        front = front.difference(equation.outvars)
        front |= {x for x in equation.invars if _is_in(dependent, x)}


def _is_in(variables: set[Any], operand: Any) -> bool:
    return not isinstance(operand, Literal) and operand in variables


# fmt: off
_ELEMENTWISE = frozenset([
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh",
    "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "igamma", "igammac", "igamma_grad_a", "integer_pow", "is_finite", "le", "lgamma", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "polygamma", "pow", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
])
# fmt: on
"""Primitives whose results, entry by entry, depend on the same entry of their operands."""

_ALONG = "arg", "concatenate", "cum", "reduce_", "rev", "sort", "squeeze", "stack"
"""Beginnings of primitives that work along some axes, for each entry of the others on its own."""


def bent_by(density: Program | None) -> str | None:
    """Return the name of a primitive other than elementwise ones in the predictor, or `None`."""
    assert density is not None
    needed, _ = dce_jaxpr(density.jaxpr, [k == 0 for k in range(len(density.jaxpr.outvars))], True)
    predictor: Any = needed.invars[-1]
    if predictor.aval.size == 1:
        # a single observation has no other
        return None
    return _first_bent(needed, [predictor], predictor.aval.shape)


def _first_bent(jaxpr: Any, inputs: list[Any], shape: tuple[int, ...]) -> str | None:
    """Find where what the inputs move has no longer the observations as its leading axes."""
    dependent = set(inputs)
    for equation in jaxpr.eqns:
        places = [k for k, x in enumerate(equation.invars) if _is_in(dependent, x)]
        if not places:
            continue
        dependent.update(equation.outvars)
        name, inner = equation.primitive.name, called(equation)
        if inner is not None:
            bent = _first_bent(inner, [inner.invars[k] for k in places], shape)
        else:
            moved: list[Any] = [*(equation.invars[k] for k in places), *equation.outvars]
            leads = all(x.aval.shape[: len(shape)] == shape for x in moved)
            bent = None if leads and _keeps_leading(equation, len(shape)) else name
        if bent is not None:
            return bent
    return None


def _keeps_leading(equation: Any, number: int) -> bool:
    """Whether each entry of the leading axes, which have their old sizes, depends on itself."""
    name, params = equation.primitive.name, equation.params
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][:number] == (*range(number),)
    if name == "gather":
        numbers = params["dimension_numbers"]
        batches = numbers.operand_batching_dims, numbers.start_indices_batching_dims
        return not numbers.offset_dims and all(x[:number] == (*range(number),) for x in batches)
    axes = [params[k] for k in ("axes", "axis", "dimension", "dimensions") if k in params]
    if name.startswith(_ALONG) and axes:
        return bool(np.all(np.asarray(axes[0]) >= number))
    is_reshape = name == "reshape" and params["dimensions"] is None
    return name in _ELEMENTWISE or name == "slice" or is_reshape


def likelihood_of(problem: Problem) -> AnyDensity:
    """Return the kind of the likelihood: a mixture, if its link is one of a row of :data:`LINKS`.

    It has the program of the one that the augmentation needs, or both are analytic, and then equal
    everywhere if they are at generic numbers.
    """
    assert problem.density is not None
    density, fn = problem.density, problem.density.shapes.fn
    links = [link for link in LINKS if link.distribution is type(fn)]
    if not links:
        return AnyDensity()
    linked = name = links[0].parameter
    if isinstance(fn, dist.NegativeBinomial2):
        density, name = _with_mean(density), "rate"

    def parameters(f, values, constants=problem.constants):
        case = replace(problem, density=density, constants=constants)
        fn = case.given_predictor(values, f, lambda density: density.fn)
        others = [getattr(fn, k) for k in fn.arg_constraints if k != linked]
        return jnp.broadcast_to(getattr(fn, name), f.shape), others

    values = problem.inputs["values"]
    f = problem.density.arguments[-1]
    sources, others = provenance(parameters, f=f, values=values, constants=problem.constants)
    if sources - {Step("f")} != {"f"} or "f" in union(others):
        return AnyDensity()
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), values)
    # as many numbers, however few observations there are
    numbers = np.random.default_rng(0).uniform(-30.0, 30.0, (1 + 40 // f.size, *f.shape))
    numbers = numbers.astype(f.dtype)

    def function(f):
        return parameters(f, ones)[0]

    def slope(f):
        return jax.jvp(function, (f,), (jnp.ones_like(f),))[1]

    def text(function):
        return str(dce_jaxpr(jax.make_jaxpr(function)(f).jaxpr, [True])[0])

    def agree():
        got, rtol = jax.vmap(function)(numbers), 64 * jnp.finfo(f.dtype).eps
        return [jnp.allclose(got, link.function(numbers), rtol, 0) for link in links]

    # a bend has a step in its slope; functions with steps may have no derivative
    if Step("f") in sources or Step("f") in provenance(slope, f=f):
        agrees = [text(link.function) == text(function) for link in links]
    else:
        agrees, _ = computed(agree)
    matching = (link for link, agree in zip(links, agrees, strict=True) if agree)
    return next(map(Mixture, matching), AnyDensity())


def _with_mean(density: Program) -> Program:
    """Replace the rate of a negative binomial, its concentration over its mean, by the mean."""
    (place,), _ = density.places(lambda density: density.fn.rate)
    variable, outvars = density.jaxpr.outvars[place], list(density.jaxpr.outvars)
    for equation in density.jaxpr.eqns:
        if variable in equation.outvars and equation.primitive.name == "div":
            outvars[place] = equation.invars[1]
    return density.rewritten(density.jaxpr.replace(outvars=outvars))
