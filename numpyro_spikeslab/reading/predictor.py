# SPDX-License-Identifier: Apache-2.0
"""The predictor of a likelihood that is not Normal: where its program is cut in two.

The predictor is the last variable, of the shape of the observations, that is affine in the weights
and through which alone the density of the observations depends on them: ``X @ w`` in
``Poisson(jnp.exp(X @ w))``. One program computes it; another takes it and computes the density.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import jax
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr
import jax.numpy as jnp
from jax.scipy.special import ndtr

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.augmentation import (
    Augmentation,
    Laplace,
    Logistic,
    Probit,
    StudentT,
)
from numpyro_spikeslab.reading.form import NORMAL, OTHER
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.program import Program, computed
from numpyro_spikeslab.reading.provenance import Step, called, provenance, union


class Density(NamedTuple):
    """The density of the observations given the predictor.

    - **log_prob** - log density of each observation, in their shape.
    - **fn** - their distribution.
    """

    log_prob: Any
    fn: Any


def cuts(problem: Problem) -> Iterator[Problem]:
    """Yield the model with each variable through which alone the likelihood depends on the weights,
    the last one first, as its predictor."""
    name, program = problem.form.likelihood, problem.program
    places, tree = program.places(lambda run: Density(run.observed[name].predictor, run.fns[name]))
    jaxpr, shape = program.jaxpr, problem.likelihood(program.shapes).value.shape
    results = [jaxpr.outvars[place] for place in places]
    first = len(jaxpr.invars) - len(jax.tree.leaves(program.arguments[1:]))
    for variable in _bottlenecks(jaxpr, results, jaxpr.invars[first:]):
        aval = variable.aval
        if aval.shape == shape and jnp.issubdtype(aval.dtype, jnp.inexact):
            outvars, (place, *_) = list(jaxpr.outvars), places
            outvars[place] = variable
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
    moving = set(inputs)
    for equation in jaxpr.eqns:
        if any(_is_in(moving, x) for x in equation.invars):
            moving.update(equation.outvars)
    front = {x for x in results if _is_in(moving, x)}
    for equation in reversed(jaxpr.eqns):
        if front.isdisjoint(equation.outvars):
            continue
        if len(front) == 1:
            yield next(iter(front))
        front = front.difference(equation.outvars)
        front |= {x for x in equation.invars if _is_in(moving, x)}


def _is_in(variables: set[Any], operand: Any) -> bool:
    return not isinstance(operand, Literal) and operand in variables


_ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "igamma",
        "igammac",
        "igamma_grad_a",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "polygamma",
        "pow",
        "regularized_incomplete_beta",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "zeta",
    ]
)
"""Primitives whose results, entry by entry, depend on the same entry of their operands."""

_ALONG = "arg", "concatenate", "cum", "reduce_", "rev", "sort", "squeeze", "stack"
"""Beginnings of primitives that work along some axes, for each entry of the others on its own."""


def bent_by(density: Program | None) -> str | None:
    """Return the name of a primitive that is not elementwise in the predictor, or `None`."""
    assert density is not None
    needed, _ = dce_jaxpr(density.jaxpr, [k == 0 for k in range(len(density.jaxpr.outvars))], True)
    predictor: Any = needed.invars[-1]
    return _first_bent(needed, [predictor], predictor.aval.shape)


def _first_bent(jaxpr: Any, inputs: list[Any], shape: tuple[int, ...]) -> str | None:
    """Find where what the inputs move has no longer the observations as its leading axes."""
    moving = set(inputs)
    for equation in jaxpr.eqns:
        places = [k for k, x in enumerate(equation.invars) if _is_in(moving, x)]
        if not places:
            continue
        moving.update(equation.outvars)
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


class Link(NamedTuple):
    """How a distribution that has an augmentation depends on the predictor.

    - **parameter** - the name of the parameter that the predictor gives.
    - **families** - that parameter as a function of the predictor, by the name of the augmentation.
    - **total** - number of trials of which the predictor is the log odds, given the distribution
      and the observations.
    - **shift** - what is added to the predictor before.
    """

    parameter: str
    families: dict[str, Callable[[Any], Any]]
    total: Callable[[Any, Any], Any] = lambda fn, y: 1
    shift: Callable[[Any], Any] = lambda fn: jnp.zeros(())


def _trials(fn: Any, y: Any) -> Any:
    return fn.total_count


def _failures(fn: Any, y: Any) -> Any:
    return y + fn.total_count


LINKS = {
    dist.BernoulliLogits: Link("logits", {"bernoulli": jnp.asarray}),
    dist.BernoulliProbs: Link("probs", {"bernoulli": jax.nn.sigmoid, "probit": ndtr}),
    dist.BinomialLogits: Link("logits", {"logistic": jnp.asarray}, _trials),
    dist.BinomialProbs: Link("probs", {"logistic": jax.nn.sigmoid}, _trials),
    dist.NegativeBinomialLogits: Link("logits", {"logistic": jnp.asarray}, _failures),
    dist.NegativeBinomialProbs: Link("probs", {"logistic": jax.nn.sigmoid}, _failures),
    dist.NegativeBinomial2: Link(
        "mean",
        {"logistic": jnp.exp},
        lambda fn, y: y + fn.concentration,
        lambda fn: -jnp.log(fn.concentration),
    ),
    dist.StudentT: Link("loc", {"student_t": jnp.asarray}),
    dist.Laplace: Link("loc", {"laplace": jnp.asarray}),
}
"""The distributions that have an augmentation."""

MIXTURES: dict[str, Callable[[Any, Any, Any], Augmentation]] = {
    # the draws of a single trial are faster
    "bernoulli": lambda fn, y, count: Logistic(y, 1),
    "logistic": lambda fn, y, count: Logistic(count * y, count * LINKS[type(fn)].total(fn, y)),
    "probit": lambda fn, y, count: Probit(y),
    "student_t": lambda fn, y, count: StudentT(y, fn.df, fn.scale),
    "laplace": lambda fn, y, count: Laplace(y, fn.scale),
}
"""The augmentations by their names, given the distribution, the observations and how often each
counts."""

AUGMENTED = (
    "Normal, StudentT or Laplace with the location f, Bernoulli, Binomial or "
    "NegativeBinomialLogits with logits=f, Bernoulli with probs=ndtr(f), or NegativeBinomial2 with "
    "the mean exp(f)"
)
"""What to expect, for errors about a likelihood without an augmentation."""

MULTIPLE = {NORMAL: NORMAL, "bernoulli": "logistic", "logistic": "logistic"}
"""Families of observations that may count any number of times; the others have no augmentation."""

_PARAMETERS = ("total_count", "concentration", "df", "scale")


def family_of(problem: Problem) -> str:
    """Return the name of the augmentation of the likelihood, or :data:`OTHER`.

    Its link has the program of the one that the augmentation needs, or both are analytic, and then
    equal everywhere if they are at generic numbers.
    """
    assert problem.density is not None
    density, fn = problem.density, problem.density.shapes.fn
    if type(fn) not in LINKS:
        return OTHER
    name, links, *_ = LINKS[type(fn)]
    if isinstance(fn, dist.NegativeBinomial2):
        density, name = _with_mean(density), "rate"

    def parameters(f, values, constants=problem.constants):
        case = replace(problem, density=density, constants=constants)
        fn = case.given_predictor(values, f, lambda density: density.fn)
        others = [getattr(fn, k) for k in _PARAMETERS if hasattr(fn, k)]
        return jnp.broadcast_to(getattr(fn, name), f.shape), others

    values = problem.inputs["values"]
    f = problem.density.arguments[-1]
    sources, others = provenance(parameters, f=f, values=values, constants=problem.constants)
    if sources - {Step("f")} != {"f"} or "f" in union(others):
        return OTHER
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), values)
    # as many numbers, however few observations there are
    numbers = np.random.default_rng(0).uniform(-30.0, 30.0, (1 + 40 // f.size, *f.shape))
    numbers = numbers.astype(f.dtype)

    def link(f):
        return parameters(f, ones)[0]

    def slope(f):
        return jax.jvp(link, (f,), (jnp.ones_like(f),))[1]

    def text(link):
        return str(dce_jaxpr(jax.make_jaxpr(link)(f).jaxpr, [True])[0])

    def agree():
        got, rtol = jax.vmap(link)(numbers), 64 * jnp.finfo(f.dtype).eps
        return [jnp.allclose(got, known(numbers), rtol, 0) for known in links.values()]

    # a bend has a step in its slope; functions with steps may have no derivative
    if Step("f") in sources or Step("f") in provenance(slope, f=f):
        agrees = [text(known) == text(link) for known in links.values()]
    else:
        agrees = computed(agree)
    return next((name for name, agree in zip(links, agrees, strict=True) if agree), OTHER)


def _with_mean(density: Program) -> Program:
    """Replace the rate of a negative binomial, its concentration over its mean, by the mean."""
    (place,), _ = density.places(lambda density: density.fn.rate)
    variable, outvars = density.jaxpr.outvars[place], list(density.jaxpr.outvars)
    for equation in density.jaxpr.eqns:
        if variable in equation.outvars and equation.primitive.name == "div":
            outvars[place] = equation.invars[1]
    return density.rewritten(density.jaxpr.replace(outvars=outvars))
