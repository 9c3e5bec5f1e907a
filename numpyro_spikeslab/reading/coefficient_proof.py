# SPDX-License-Identifier: Apache-2.0
"""Which sites are coefficients, Normal sites in which the predictor is affine: a proof."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.models.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.provenance import NONE, Names, Step, names_of, provenance, union
from numpyro_spikeslab.support.priors import is_plain

MAX_WORK = 1e8
"""Largest number of products in a step for the dense design of the coefficients."""

Key = tuple[str, str]
"""An input of a program: the argument of :meth:`Problem.run` and the name in it."""


class CoefficientProof(NamedTuple):
    """
    - **names** - Normal sites in which, jointly with the weights, the predictor is affine. Nothing
      else depends on them except the prior means of each other.
    - **dense** - those that are few enough for a dense design.
    - **constant** - whether their design depends on data alone.
    - **links** - pairs (name, other) of dense ones: the prior mean of a site depends on another.
    """

    names: tuple[str, ...]
    dense: tuple[str, ...]
    constant: bool
    links: tuple[tuple[str, str], ...]


def derivative(function: Callable, inputs: dict[str, Any], along: dict[Key, Any]) -> Any:
    """Differentiate a function along directions of some inputs."""
    start = {(kind, name): jnp.asarray(inputs[kind][name]) for kind, name in along}
    return jax.jvp(lambda new: function(**put(inputs, new)), (start,), (along,))[1]


def put(inputs: dict[str, Any], new: dict[Key, Any]) -> dict[str, Any]:
    """Return the inputs with new values of some."""
    result = {kind: dict(named) for kind, named in inputs.items()}
    for (kind, name), value in new.items():
        result[kind][name] = value
    return result


def sources_of_derivative(function: Callable, inputs: dict[str, Any], keys: list[Key]) -> Names:
    """Find the inputs on which the derivative of a function along some inputs can depend."""

    def slope(along, **inputs):
        return derivative(function, inputs, along)

    along = {(kind, name): inputs[kind][name] for kind, name in keys}
    names = union(provenance(slope, along=along, **inputs))
    return frozenset(x for x in names if not (isinstance(x, tuple) and x[0] == "along"))


def is_chain(run: Any, name: str) -> bool:
    """Whether the prior of a site depends on other entries of the site, as in a loop."""
    return ("values", name) in union(run.priors.get(name, ()))


def find_coefficients(
    problem: Problem, run: Any, trace: dict[str, Any], beside: Names
) -> CoefficientProof:
    """Find the coefficients of a model, by the inputs on which each part of a run can depend.

    :param beside: from :func:`beside_predictor`.
    """
    inputs, likelihood = problem.inputs, problem.form.response
    parts = problem.observations(run)
    elsewhere = union([parts.scale, parts.count, run.pairs, beside])
    plain = [n for n in problem.form.others if _is_normal(run, trace[n], n)]
    bent = elsewhere | {x.name for x in parts.predictor if isinstance(x, Step)}
    names = [name for name in plain if ("values", name) not in bent]
    if not names:
        return CoefficientProof((), (), True, ())
    moments = provenance(lambda **x: _moments(problem, x, names), **inputs)
    users = {name: _users(run, likelihood, name, moments) for name in names}
    names = _closed(names, users)
    while nonlinear := _find_nonlinear(problem, names):
        names = _closed([name for name in names if name not in nonlinear], users)
    means = {name: names_of(moments[name][0], "values") for name in names}
    dense = _closed(_dense(problem, names), users)
    links = tuple((k, other) for k in dense for other in dense if other in means[k])
    keys = [("values", name) for name in names]
    rows = sources_of_derivative(problem.predictor, inputs, keys) if names else NONE
    return CoefficientProof(tuple(names), tuple(dense), not rows, links)


def depend_on(problem: Problem, names: list[str], sites: list[str]) -> bool:
    """Whether priors or rows of coefficients depend on other sites, such as an unknown scale."""
    inputs, keys = problem.inputs, [("values", name) for name in names]
    moments = provenance(lambda **x: _moments(problem, x, names), **inputs)
    rows = sources_of_derivative(problem.predictor, inputs, keys) if names else NONE
    return not names_of(union(moments) | rows, "values").isdisjoint(sites)


def _is_normal(run: Any, site: dict[str, Any], name: str) -> bool:
    if site["type"] != "sample" or FUNCTIONS_MARK in site["infer"] or is_chain(run, name):
        return False
    return is_plain(site, (dist.Normal,))


def beside_predictor(problem: Problem) -> Names:
    """Find the inputs on which the density of observations depends, given their predictor.

    A Normal one is told by its location and scale.
    """
    if problem.density is None:
        return NONE

    def log_prob(f, values):
        return problem.given_predictor(values, f, lambda density: density.log_prob)

    f = problem.density.arguments[-1]
    return union(provenance(log_prob, f=f, values=problem.inputs["values"]))


def _moments(problem: Problem, inputs: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return mean and variance of the priors."""
    priors = problem.run(**inputs, of=lambda run: {name: run.priors[name] for name in names})
    return {name: (priors[name].mean, priors[name].variance) for name in names}


def _users(run: Any, likelihood: str, name: str, moments: dict[str, Any]) -> frozenset[str]:
    """Find the sites whose prior depends on a site; itself, if this is not by a mean alone."""
    key = ("values", name)
    users = {k for k, sources in run.log_probs.items() if key in sources} - {likelihood, name}
    is_no_mean = any(key in variance or Step(key) in mean for mean, variance in moments.values())
    return frozenset(users | ({name} if is_no_mean else set()))


def _closed(names: list[str], users: dict[str, frozenset[str]]) -> list[str]:
    """Keep the sites on which only priors of other kept sites depend."""
    while (closed := [k for k in names if users[k] <= set(names) - {k}]) != names:
        names = closed
    return names


def _dense(problem: Problem, names: list[str]) -> list[str]:
    """Keep as many sites as may have a dense design."""
    num_obs = int(np.prod(problem.observations(problem.program.shapes).value.shape))
    dense, total = [], 0
    for name in names:
        size = int(np.prod(problem.inputs["values"][name].shape))
        if (total + size) ** 2 * max(num_obs, total + size) <= MAX_WORK:
            dense.append(name)
            total += size
    return dense


def _find_nonlinear(problem: Problem, names: list[str]) -> list[str]:
    """Find sites to leave out, for the predictor or a prior mean is not affine in all jointly."""
    inputs = problem.inputs
    keys = [("values", name) for name in names]
    weights = {("weights", name) for name in inputs["weights"]}

    def affine(**x):
        return problem.predictor(**x), [mean for mean, _ in _moments(problem, x, names).values()]

    sources = sources_of_derivative(affine, inputs, keys) & {*keys, *weights} if keys else NONE
    if not sources:
        return []
    alone = [x for x in keys if sources_of_derivative(affine, inputs, [x]) & {x, *weights}]
    # in a product of sites, leave out the last factor
    last = [key for key in keys if key in sources][-1:]
    return [name for _, name in alone or last or keys[-1:]]
