# SPDX-License-Identifier: Apache-2.0
"""The inner guide: an autoguide of the sites that are neither pairs nor latent functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoDelta, AutoGuide

from numpyro_spikeslab.kernel_priors import start_values
from numpyro_spikeslab.reading.form import find_function_sites, functions_of
from numpyro_spikeslab.reading.model_run import run_model, site_log_prob
from numpyro_spikeslab.reading.program import outside_transformations
from numpyro_spikeslab.reading.provenance import provenance


def is_among(names: frozenset[str], site: dict[str, Any]) -> bool:
    """Module-level, so that guides pickle."""
    return site.get("name") in names


def _at_mean(site: dict[str, Any] | None = None) -> Any:
    """Start of a site at its prior mean, where there is one; its median takes draws to find."""
    if site is None:
        return partial(_at_mean)
    start = init_to_uniform(site)
    if site["type"] != "sample" or site["is_observed"] or start is None:
        return start
    try:
        mean = 1.0 * site["fn"].mean
    except (NotImplementedError, ValueError):
        return start
    return jnp.where(jnp.isfinite(mean), mean, start)


def kernel_starts(trace: dict[str, Any]) -> dict[str, Any]:
    """The values in the kernels of a model, where their parameters start whatever their priors."""
    starts: dict[str, Any] = {}
    for name in find_function_sites(trace):
        starts |= start_values(functions_of(trace[name]))
    return starts


def run_once(guide: AutoGuide, args: tuple, kwargs: dict[str, Any]) -> None:
    try:
        with handlers.block(), handlers.seed(rng_seed=0):
            guide(*args, **kwargs)
    except AssertionError as error:
        raise ValueError(
            f"{type(guide).__name__} of NumPyro cannot take the model: {error} A plate that stands "
            "at two dims around latent sites needs two names, such as 'task' and 'task_row'."
        ) from error


def make_inner(outer: Any, own: dict[str, Any], hidden: frozenset[str]) -> AutoGuide:
    """The inner guide of a guide.

    :param outer: has the model, the prefix and what makes the inner guide.
    :param own: shapes of the outer guide's own sites.
    :param hidden: names of sites that the inner guide does not see.
    """
    # the inner guide keeps its key, which must not be a tracer
    with outside_transformations():
        key = random.key(0)
    model = handlers.substitute(
        handlers.seed(outer.model, key),
        data={name: np.zeros(shape) for name, shape in own.items()},
    )
    blocked = handlers.block(model, hide_fn=partial(is_among, hidden))
    if outer.inner_guide is AutoDelta:
        return AutoDelta(blocked, prefix=outer.prefix, init_loc_fn=partial(_at_mean))
    return outer.inner_guide(blocked, prefix=outer.prefix)


def refuse_discrete(user: str, names: tuple[str, ...], latents: dict[str, Any]) -> None:
    """Refuse sites of which an inner guide has no factor."""
    discrete = [name for name in names if latents[name]["fn"].support.is_discrete]
    if discrete:
        raise ValueError(
            f"{user}: the discrete latent sites {discrete} are not part of a spike-and-slab pair. "
            "Sample them with `numpyro.infer.DiscreteGibbs` beside `PairedGibbs`."
        )


def inner_summary(inner: AutoGuide, method: str, *args: Any) -> dict[str, Any]:
    """The inner guide's ``method``, which not all of NumPyro's have.

    :raises NotImplementedError: if it has none.
    """
    try:
        return getattr(inner, method)(*args)
    except NotImplementedError:
        raise NotImplementedError(
            f"the inner guide {type(inner).__name__} has no `{method}`. Use draws, from "
            "`sample_posterior`, or another inner guide."
        ) from None


def makes_delta(inner_guide: Any) -> bool:
    """Whether it is AutoDelta, whose parameters are values of the sites, or a partial of it."""
    return getattr(inner_guide, "func", inner_guide) is AutoDelta


def set_delta(inner: AutoGuide, probe: AutoGuide, init_locs: Any, sites: Any) -> None:
    """Set up an AutoDelta with what another one of the same sites has found under a trace.

    :param init_locs: its start values.
    :param sites: distribution and value of each site.
    """
    inner._init_locs = init_locs
    keys = ("name", "type", "is_observed", "cond_indep_stack")
    inner.prototype_trace = {
        name: {key: probe.prototype_trace[name][key] for key in keys} | {"fn": fn, "value": x}
        for name, (fn, x) in sites.items()
    }
    for attribute in ("_event_dims", "_prototype_frames", "_prototype_frame_full_sizes"):
        setattr(inner, attribute, getattr(probe, attribute))


def predicted_sites(
    outer: Any, trace: dict[str, Any], latents: dict[str, Any], call: tuple[tuple, dict[str, Any]]
) -> frozenset[str]:
    """The latent sites that depend on weights or functions, and no observed site on them: what a
    guide is to predict, such as responses to new inputs, must not be taken for latent.

    :param outer: the guide, which has the model, its pairs and functions.
    :param call: arguments of the model.
    """
    own = {*outer.functions, *(name for p in outer.pairs for name in (p.spike, p.slab))}
    order = list(trace)
    first = min(map(order.index, own))
    if not any(name in latents for name in order[first:] if name not in own):
        return frozenset()

    def log_probs(**values):
        run = run_model(outer.model, *call, values)
        return {k: jnp.sum(site_log_prob(x)) for k, x in run.items() if x["type"] == "sample"}

    shapes = {
        name: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), site["value"]
        )
        for name, site in latents.items()
    }
    sources = provenance(log_probs, **shapes)
    parents = {name: found - {name} for name, found in sources.items()}
    below = _closed(own, lambda found: {k for k, x in parents.items() if x & found})
    observed = {name for name in parents if name not in latents}
    above = _closed(observed, lambda found: set().union(*(parents.get(k, ()) for k in found)))
    # those of `obs_mask` are missing responses of a fit
    missing = {name for name in below if name.endswith("_unobserved")}
    return frozenset(below - own - above - missing)


def _closed(names: set[str], more: Callable[[set[str]], set[str]]) -> set[str]:
    """The names, and all that come by them."""
    while not more(names) <= names:
        names = names | more(names)
    return names
