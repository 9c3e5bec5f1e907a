# SPDX-License-Identifier: Apache-2.0
"""The sites of a model at the first call of its guide, and the check of later calls."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro.distributions import constraints

from numpyro_spikeslab.reading.model_run import ModelTrace, abstract_trace, trace_model
from numpyro_spikeslab.reading.provenance import Step, provenance, union
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.sites import (
    Pair,
    find_function_sites,
    find_pairs,
    is_latent,
    observed_sites,
)
from numpyro_spikeslab.support.messages import bad


class ModelSites(NamedTuple):
    """The latent sites and params of a model.

    - **functions**, **others** - names of the latent functions, and of the other latent sites.
    - **params** - constraints of the model's params.
    - **shapes** - of all these sites.
    - **predicted** - names of latent sites on which no observation depends; not in the guide.
    - **plates** - the plates of each site of the guide.
    - **plate_sizes** - sizes of all plates.
    """

    pairs: tuple[Pair, ...]
    functions: tuple[str, ...]
    others: tuple[str, ...]
    params: dict[str, Any]
    shapes: dict[str, Any]
    predicted: frozenset[str]
    plates: dict[str, tuple[Any, ...]]
    plate_sizes: dict[str, int]

    @property
    def sampled(self) -> list[str]:
        """Names of spikes, slabs and functions."""
        return [*(name for pair in self.pairs for name in pair.shapes), *self.functions]

    def _check(self, user: str, shapes: dict[str, Any], pairs: tuple[Pair, ...]) -> None:
        """Raise if a model has other latent sites or params, or others of another shape."""
        remedy = "A guide is made for one program: make another for other sites or shapes."
        for name in sorted(shapes.keys() | self.shapes.keys()):
            now, first = (
                f"of shape {sites[name]}" if name in sites else "not there"
                for sites in (shapes, self.shapes)
            )
            if now != first:
                got = f"a model whose latent site {name!r} is {now}"
                raise bad(user, got, f"it to be {first}, as at the first call", remedy)
        if [pair.groups for pair in pairs] != [pair.groups for pair in self.pairs]:
            raise bad(user, "weights with other groups", "those of the first call", remedy)

    def check_reading(self, user: str, reading: Reading) -> None:
        """Raise if a model that was read has other sites or shapes."""
        shapes = {name: jax.tree.map(jnp.shape, x) for name, x in reading.generic.items()}
        for pair in reading.form.pairs:
            shapes |= pair.shapes
        if reading.functions is not None:
            shapes[reading.functions.functions.name] = jnp.shape(reading.functions.mean)
        self._check(user, shapes, reading.form.pairs)

    def check_call(self, user: str, model: Callable, call: Any) -> None:
        """Raise if a call has other sites, but for those that are to be predicted."""
        trace = abstract_trace(model, *call)
        shapes = {name: x for name, x in shapes_of(trace).items() if name not in self.predicted}
        if not observed_sites(trace):
            shapes = {name: shapes.get(name, shape) for name, shape in self.shapes.items()}
        elif shapes.keys() - self.shapes.keys():
            traced = trace_model(model, call[0], call[1], user, partial(find_pairs, user=user))
            predicted = predicted_sites(traced, self.sampled)
            shapes = {name: shape for name, shape in shapes.items() if name not in predicted}
        self._check(user, shapes, find_pairs(trace, user))


def sites_of(user: str, traced: ModelTrace) -> ModelSites:
    """Find the sites of a model; refuse other discrete sites."""
    trace, pairs = traced.sites, traced.pairs
    functions = tuple(name for name in find_function_sites(trace) if is_latent(trace, name))
    sampled = [*(name for pair in pairs for name in pair.shapes), *functions]
    predicted = predicted_sites(traced, sampled)
    shapes = {name: shape for name, shape in shapes_of(trace).items() if name not in predicted}
    params = {
        name: trace[name]["kwargs"].get("constraint", constraints.real)
        for name in shapes
        if trace[name]["type"] == "param"
    }
    others = tuple(name for name in shapes if name not in params and name not in sampled)
    discrete = [name for name in others if trace[name]["fn"].support.is_discrete]
    if discrete:
        raise ValueError(
            f"{user}: the discrete latent sites {discrete} are not part of a spike-and-slab pair. "
            "Sample them with `numpyro.infer.DiscreteGibbs` beside `PairedGibbs`."
        )
    plates = {name: tuple(trace[name]["cond_indep_stack"]) for name in (*sampled, *others)}
    sizes = {name: site["args"][0] for name, site in trace.items() if site["type"] == "plate"}
    return ModelSites(pairs, functions, others, params, shapes, predicted, plates, sizes)


def shapes_of(trace: dict[str, Any]) -> dict[str, Any]:
    """Shapes of the latent sample sites and the params of a trace."""
    return {
        name: jax.tree.map(jnp.shape, site["value"])
        for name, site in trace.items()
        if site["type"] == "param" or is_latent(trace, name)
    }


def deterministics(trace: dict[str, Any]) -> list[str]:
    """Names of the deterministic sites of a trace."""
    return [name for name, site in trace.items() if site["type"] == "deterministic"]


def predicted_sites(traced: ModelTrace, sampled: Collection[str]) -> frozenset[str]:
    """Find latent sites that depend on weights or functions (``sampled``), and no observed site on
    them, such as responses to new inputs."""
    latent, order = shapes_of(traced.sites), list(traced.sites)
    first = min(map(order.index, sampled))
    if not any(name in latent for name in order[first:] if name not in sampled):
        return frozenset()

    def densities(values, weights, parts):
        of = traced.run.part(lambda run: (run.log_probs, run.pairs))
        return of(traced.constants, values, weights, parts)

    names = ("values", "weights", "parts")
    arguments = dict(zip(names, traced.run.arguments, strict=True))
    log_probs, pairs = provenance(densities, **arguments)
    parents = {
        name: {x[1] for x in union(sources) if not isinstance(x, Step)} - {name}
        for name, sources in (log_probs | pairs).items()
    }
    # a trace has parents before their children
    weights = {pair.name for pair in traced.pairs}
    below, above = {*sampled, *weights}, {name for name in log_probs if name not in latent}
    for name in order:
        if parents.get(name, set()) & below:
            below.add(name)
    for name in reversed(order):
        if name in above:
            above |= parents.get(name, set())
    # those of `obs_mask` are missing responses of a fit
    missing = {name for name in below if name.endswith("_unobserved")}
    return frozenset(below - weights - set(sampled) - above - missing)
