# SPDX-License-Identifier: Apache-2.0
"""Coefficients, proved from a model's program: sites in which the predictor is affine."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.priors import is_plain
from numpyro_spikeslab.reading.problem import Problem
from numpyro_spikeslab.reading.provenance import NONE, Names, Step, names_of, provenance, union

MAX_WORK = 1e8
"""Products in a step that coefficients may take, whose design is dense whatever their model."""

Key = tuple[str, str]
"""An input of a program: the argument of :meth:`Problem.run` and the name in it."""


class CoefficientProof(NamedTuple):
    """
    - **names** - Normal sites in which the predictor is affine, together with the weights, and on
      which nothing else depends, save the prior means of each other.
    - **dense** - as many of them as may have a dense design.
    - **constant** - whether the design of all depends on data alone.
    - **links** - pairs of the dense ones, of which the prior mean of the first depends on the
      second.
    """

    names: tuple[str, ...]
    dense: tuple[str, ...]
    constant: bool
    links: tuple[tuple[str, str], ...]


class Moments(NamedTuple):
    """Mean and variance of a prior."""

    mean: Any
    variance: Any


def derivative(function: Callable, inputs: dict[str, Any], along: dict[Key, Any]) -> Any:
    """Derivative of a function of the inputs along directions of some of them."""

    def moved(new):
        return function(**put(inputs, new))

    start = {(kind, name): jnp.asarray(inputs[kind][name]) for kind, name in along}
    return jax.jvp(moved, (start,), (along,))[1]


def put(inputs: dict[str, Any], new: dict[Key, Any]) -> dict[str, Any]:
    """The inputs with other values of some."""
    result = {kind: dict(named) for kind, named in inputs.items()}
    for (kind, name), value in new.items():
        result[kind][name] = value
    return result


def sources_of_derivative(function: Callable, inputs: dict[str, Any], keys: list[Key]) -> Names:
    """The inputs on which the derivative along some of them can depend, other than directions.

    :param function: of the inputs, by their keywords.
    """

    def slope(along, **inputs):
        return derivative(function, inputs, along)

    along = {(kind, name): inputs[kind][name] for kind, name in keys}
    names = union(provenance(slope, along=along, **inputs))
    return frozenset(x for x in names if isinstance(x, Step) or x[0] != "along")


def is_chain(run: Any, name: str) -> bool:
    """Whether the prior of a site depends on other entries of the site, as in a loop."""
    return ("values", name) in union(run.priors.get(name, ()))


def find_coefficients(problem: Problem, run: Any, trace: dict[str, Any]) -> CoefficientProof:
    """Normal sites on which nothing depends but the predictor and prior means of some of them, all
    of which are affine in them jointly.

    :param run: on which inputs each part of a run can depend.
    :param trace: of the model, without values.
    """
    inputs, likelihood = problem.inputs, problem.form.likelihood
    names = [n for n in problem.form.others if _is_candidate(problem, run, trace[n], n)]
    if not names:
        return CoefficientProof((), (), True, ())
    moments = provenance(lambda **x: _moments(problem, x, names), **inputs)
    users = {name: _users(run, likelihood, name, moments) for name in names}
    names = _closed(names, users)
    # those whose own coefficients depend on one of them, or on the weights, are left out
    while bent := _find_bent(problem, names):
        names = _closed([name for name in names if name not in bent], users)
    means = {name: names_of(moments[name].mean, "values") for name in names}
    dense = _closed(_dense(problem, names), users)
    links = tuple((k, other) for k in dense for other in dense if other in means[k])
    keys = [("values", name) for name in names]
    rows = sources_of_derivative(problem.predictor, inputs, keys) if names else NONE
    return CoefficientProof(tuple(names), tuple(dense), not rows, links)


def _is_candidate(problem: Problem, run: Any, site: dict[str, Any], name: str) -> bool:
    key, parts = ("values", name), problem.likelihood(run)
    if site["type"] != "sample" or FUNCTIONS_MARK in site["infer"] or is_chain(run, name):
        return False
    elsewhere = union([parts.scale, parts.count, run.pairs])
    affine = Step(key) not in parts.predictor and key not in elsewhere
    return affine and is_plain(site, (dist.Normal,))


def _moments(problem: Problem, inputs: dict[str, Any], names: list[str]) -> dict[str, Moments]:
    priors = problem.run(**inputs, of=lambda run: {name: run.priors[name] for name in names})
    return {name: Moments(priors[name].mean, priors[name].variance) for name in names}


def _users(run: Any, likelihood: str, name: str, moments: dict[str, Moments]) -> frozenset[str]:
    """Sites whose prior depends on a site; among them itself, if it is more than a mean there."""
    key = ("values", name)
    users = {k for k, sources in run.log_probs.items() if key in sources} - {likelihood, name}
    is_more = any(key in x.variance or Step(key) in x.mean for x in moments.values())
    return frozenset(users | ({name} if is_more else set()))


def _closed(names: list[str], users: dict[str, frozenset[str]]) -> list[str]:
    """Those on which at most the priors of others of them depend."""
    while (closed := [k for k in names if users[k] <= set(names) - {k}]) != names:
        names = closed
    return names


def _dense(problem: Problem, names: list[str]) -> list[str]:
    """As many as may have a dense design."""
    num_obs = int(np.prod(problem.likelihood(problem.program.shapes).value.shape))
    dense, total = [], 0
    for name in names:
        size = int(np.prod(problem.inputs["values"][name].shape))
        if (total + size) ** 2 * max(num_obs, total + size) <= MAX_WORK:
            dense.append(name)
            total += size
    return dense


def _find_bent(problem: Problem, names: list[str]) -> list[str]:
    """The sites to leave out, because the predictor or a prior mean is not affine jointly in all of
    them and in the weights."""
    inputs = problem.inputs
    keys = [("values", name) for name in names]
    weights = {("weights", name) for name in inputs["weights"]}

    def affine(**x):
        means = {k: moments.mean for k, moments in _moments(problem, x, names).items()}
        return problem.predictor(**x), means

    sources = sources_of_derivative(affine, inputs, keys) & {*keys, *weights} if keys else NONE
    if not sources:
        return []
    bent = [x for x in keys if sources_of_derivative(affine, inputs, [x]) & {x, *weights}]
    # of a product the last factor
    last = [key for key in keys if key in sources][-1:]
    return [name for _, name in bent or last or keys[-1:]]
