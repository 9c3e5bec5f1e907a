# SPDX-License-Identifier: Apache-2.0
"""The sites of a guide that are neither pairs nor latent functions: one value each."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_spikeslab.fitting.guide_factors import Start, check_params
from numpyro_spikeslab.fitting.model_sites import ModelSites
from numpyro_spikeslab.models.kernel_priors import start_values
from numpyro_spikeslab.reading.model_run import run_model
from numpyro_spikeslab.reading.program import computed
from numpyro_spikeslab.reading.sites import find_function_sites, functions_of
from numpyro_spikeslab.support.priors import Distributions, base_of


class Point(NamedTuple):
    """Start value of a site, and support and event dimensions of its prior."""

    value: Any
    support: Any
    event_dim: int


class Points:
    """Sites at one value each, as in NumPyro's AutoDelta."""

    def __init__(self, prefix: str, sites: dict[str, Point]) -> None:
        self.prefix, self.sites = prefix, sites

    def start(self) -> Start:
        """Start value and constraint of each parameter."""
        return {self._name(site): point[:2] for site, point in self.sites.items()}

    def sample(self, within: Callable, followers: Collection[str]) -> dict[str, Any]:
        """Declare the parameters, and sample the sites but for ``followers`` of the weights."""
        values = {}
        for site, (start, support, event_dim) in self.sites.items():
            options = {"constraint": support, "event_dim": event_dim}
            with within(site):
                values[site] = numpyro.param(self._name(site), start, **options)
                if site not in followers:
                    point = dist.Delta(values[site], event_dim=event_dim)
                    values[site] = numpyro.sample(site, point)
        return values

    def median(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the sites."""
        names = {site: self._name(site) for site in self.sites}
        check_params(params, dict.fromkeys(names.values()))
        return {site: params[name] for site, name in names.items()}

    def quantiles(self, params: dict[str, Any], levels: Any) -> dict[str, Any]:
        """Return the values of the sites for each level."""
        values, Q = self.median(params), len(levels)
        return {site: jnp.broadcast_to(x, (Q, *jnp.shape(x))) for site, x in values.items()}

    def _name(self, site: str) -> str:
        return f"{site}_{self.prefix}_loc"


def init_to_prior_mean(site: dict[str, Any]) -> Any:
    """Start a site at its prior mean, unlike ``init_to_mean`` only if that is finite."""
    start = init_to_uniform(site)
    try:
        mean = 1.0 * site["fn"].mean
    except (NotImplementedError, ValueError):
        return start
    return jnp.where(jnp.isfinite(mean), mean, start)


def points_of(
    guide: Any, sites: ModelSites, trace: dict[str, Any], call: Any
) -> tuple[Points, dict[str, Any]]:
    """Find where the other sites start, and the slabs' scales there."""
    zero = {name: np.zeros(sites.shapes[name]) for name in sites.sampled}
    names, init = sites.others, guide.init_loc_fn
    # parameters of kernels start at the values in the kernels, whatever their priors
    kernels: dict[str, Any] = {}
    for name in find_function_sites(trace):
        kernels |= start_values(functions_of(trace[name]))

    def start():
        model = handlers.substitute(
            handlers.seed(guide.model, random.key(0)),
            substitute_fn=lambda site: init(site) if site["name"] in names else None,
        )
        values = zero | {k: x for k, x in kernels.items() if k in names}
        run = run_model(model, call[0], call[1], values)
        scales = {p.name: base_of(run[p.slab]["fn"]).scale * jnp.ones(()) for p in sites.pairs}
        priors = Distributions({name: run[name]["fn"] for name in names})
        return priors, {name: run[name]["value"] for name in names}, scales

    # start values must not be tracers, which outlive no transformation
    priors, found, scales = computed(start)
    points = {k: Point(x, priors[k].support, priors[k].event_dim) for k, x in found.items()}
    return Points(guide.prefix, points), scales
