# SPDX-License-Identifier: Apache-2.0
"""Coefficients, proved from a model's program: sites in which the location is affine."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.priors import is_plain
from numpyro_spikeslab.reading.provenance import Names, Step, provenance, union
from numpyro_spikeslab.reading.subject import Subject

MAX_WORK = 1e8
"""Products in a step that coefficients may take, whose design is dense whatever their model."""


DIRECTION = "direction "
"""Before the name of an input, the direction along which its derivative is taken."""


class Coefficients(NamedTuple):
    """
    - **names** - Normal sites in which the location is affine, together with the weights, and on
      which nothing else depends, save the prior means of each other.
    - **few** - as many of them as may have a dense design.
    - **constant** - whether the design of all depends on data alone.
    - **links** - pairs of the few, of which the prior mean of the first depends on the second.
    - **means** - keys of the inputs on which the prior means of any of all depend.
    """

    names: tuple[str, ...]
    few: tuple[str, ...]
    constant: bool
    links: tuple[tuple[str, str], ...]
    means: Names


class Moments(NamedTuple):
    """Of a prior."""

    mean: Any
    variance: Any


def tangent_of(values: Any, inputs: dict[str, Any], along: dict[str, Any]) -> Any:
    """Derivative of a function of the inputs along some of them."""
    names = list(along)

    def of(*new):
        return values(inputs | dict(zip(names, new, strict=True)))

    start = tuple(jnp.asarray(inputs[name]) for name in names)
    return jax.jvp(of, start, tuple(along.values()))[1]


def split(inputs: dict[str, Any]) -> tuple[dict, dict]:
    """Inputs, and directions by the names of the inputs that they belong to."""
    along = {k.removeprefix(DIRECTION): x for k, x in inputs.items() if k.startswith(DIRECTION)}
    return {k: x for k, x in inputs.items() if not k.startswith(DIRECTION)}, along


def sources_along(of: Callable[[dict], Any], inputs: dict[str, Any], keys: list[str]) -> Names:
    """On what the derivative of a function of the inputs along some of them can depend: inputs, and
    directions by :data:`DIRECTION` and the name of the input."""
    along = {DIRECTION + key: inputs[key] for key in keys}
    return union(provenance(lambda **x: tangent_of(of, *split(x)), **inputs, **along))


def is_chain(run: Any, name: str) -> bool:
    """Whether the prior of a site depends on other entries of the site, as in a loop."""
    return f"site {name}" in union(run.priors.get(name, ()))


def find_coefficients(
    subject: Subject, run: Any, likelihood: str, inputs: dict[str, Any]
) -> Coefficients:
    """Normal sites on which nothing depends but the location and prior means of some of them, all
    of which are affine in them jointly.

    :param run: on which inputs each part of a run can depend.
    """
    names = [name for name in subject.others if _is_candidate(subject, run, likelihood, name)]
    if not names:
        return Coefficients((), (), True, (), frozenset())
    moments = provenance(lambda **x: _moments(subject, x, names), **inputs)
    fed = {name: _fed(run, likelihood, name, moments) for name in names}
    names = _closed(names, fed)
    # those whose own coefficients depend on one of them, or on the weights, are left out
    location = partial(subject.location, likelihood)
    while bent := _bent(subject, location, inputs, names):
        names = _closed([name for name in names if name not in bent], fed)
    means = {name: moments[name].mean for name in names}
    few = _closed(_few(subject, names, likelihood), fed)
    links = tuple((k, other) for k in few for other in few if f"site {other}" in means[k])
    keys = [f"site {name}" for name in names]
    rows = sources_along(location, inputs, keys) if names else frozenset[str]()
    constant = all(str(source).startswith(DIRECTION) for source in rows)
    return Coefficients(tuple(names), tuple(few), constant, links, union(means))


def _is_candidate(subject: Subject, run: Any, likelihood: str, name: str) -> bool:
    key, site, seen = f"site {name}", subject.trace[name], run.observed[likelihood]
    if site["type"] != "sample" or FUNCTIONS_MARK in site["infer"] or is_chain(run, name):
        return False
    elsewhere = union([seen.scale, seen.count, run.pairs])
    return is_plain(site, (dist.Normal,)) and Step(key) not in seen.loc and key not in elsewhere


def _moments(subject: Subject, inputs: dict[str, Any], names: list[str]) -> dict[str, Moments]:
    priors = subject.run(inputs, lambda run: {name: run.priors[name] for name in names})
    return {name: Moments(priors[name].mean, priors[name].variance) for name in names}


def _fed(run: Any, likelihood: str, name: str, moments: dict[str, Moments]) -> frozenset[str]:
    """Sites whose prior a site is a part of; among them itself, if it is more than a mean."""
    key = f"site {name}"
    fed = {k for k, sources in run.log_probs.items() if key in sources} - {likelihood, name}
    is_more = any(key in x.variance or Step(key) in x.mean for x in moments.values())
    return frozenset(fed | ({name} if is_more else set()))


def _closed(names: list[str], fed: dict[str, frozenset[str]]) -> list[str]:
    """Those that are a part of the priors of others of them at most."""
    while (kept := [k for k in names if fed[k] <= set(names) - {k}]) != names:
        names = kept
    return names


def _few(subject: Subject, names: list[str], likelihood: str) -> list[str]:
    """As many as may have a dense design."""
    num_obs = int(np.prod(jnp.shape(subject.trace[likelihood]["value"])))
    few, total = [], 0
    for name in names:
        size = int(np.prod(subject.shapes[name].shape))
        if (total + size) ** 2 * max(num_obs, total + size) <= MAX_WORK:
            few.append(name)
            total += size
    return few


def _bent(
    subject: Subject, location: Callable, inputs: dict[str, Any], names: list[str]
) -> list[str]:
    """Those of some sites on whose value, or with which the weights', their design or what they add
    to prior means depends."""
    keys = [f"site {name}" for name in names]
    weights = [key for key in inputs if key.startswith("weight ")]

    def affine(x):
        means = {k: moments.mean for k, moments in _moments(subject, x, names).items()}
        return location(x), means

    found = sources_along(affine, inputs, keys) & {*keys, *weights} if keys else frozenset[str]()
    if not found:
        return []
    bent = [key for key in keys if sources_along(affine, inputs, [key]) & {key, *weights}]
    # of a product the last factor
    last = [key for key in keys if key in found][-1:]
    return [key.removeprefix("site ") for key in bent or last or keys[-1:]]
