# SPDX-License-Identifier: Apache-2.0
"""The sites of a guide that are neither pairs nor latent functions: values, and Beta factors."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
from scipy.special import betaincinv

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform

from numpyro_spikeslab.fitting.guide_factors import Start, check_params
from numpyro_spikeslab.fitting.model_sites import ModelSites
from numpyro_spikeslab.models.kernel_priors import start_values
from numpyro_spikeslab.reading.model_run import run_model
from numpyro_spikeslab.reading.program import computed
from numpyro_spikeslab.reading.roles import expected_odds
from numpyro_spikeslab.reading.sites import find_function_sites, functions_of
from numpyro_spikeslab.support.priors import Distributions, base_of, is_plain, is_unbounded


class Point(NamedTuple):
    """Start value of a site, and support and event dimensions of its prior."""

    value: Any
    support: Any
    event_dim: int


class Points:
    """Sites at one value each, as in NumPyro's AutoDelta, but for those of ``betas``.

    Inclusion probabilities have Beta factors where their prior has no mode, by a concentration
    below 1.

    - **betas** - where the concentrations of these factors start, 1 and 0.
    """

    def __init__(
        self, prefix: str, sites: dict[str, Point], betas: dict[str, tuple[Any, Any]]
    ) -> None:
        self.prefix, self.sites, self.betas = prefix, sites, betas

    def start(self) -> Start:
        """Start value and constraint of each parameter."""
        starts: Start = {}
        for site, point in self.sites.items():
            values: tuple[Any, ...] = self.betas.get(site, (point.value,))
            support = constraints.positive if site in self.betas else point.support
            starts |= {k: (x, support) for k, x in zip(self.names(site), values, strict=True)}
        return starts

    def sample(self, within: Callable, followers: Collection[str]) -> dict[str, Any]:
        """Declare the parameters, and sample the sites but for ``followers`` of the weights."""
        values = {}
        for site, (start, support, event_dim) in self.sites.items():
            if site in self.betas:
                with within(site):
                    positive = {"constraint": constraints.positive, "event_dim": event_dim}
                    pairs = zip(self.names(site), self.betas[site], strict=True)
                    beta = dist.Beta(*(numpyro.param(*pair, **positive) for pair in pairs))
                    values[site] = numpyro.sample(site, beta.to_event(event_dim))
                continue
            options = {"constraint": support, "event_dim": event_dim}
            with within(site):
                values[site] = numpyro.param(*self.names(site), start, **options)
                if site not in followers:
                    point = dist.Delta(values[site], event_dim=event_dim)
                    values[site] = numpyro.sample(site, point)
        return values

    def values(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the sites that a fit works with."""
        names = {site: self.names(site) for site in self.sites}
        check_params(params, dict.fromkeys(name for both in names.values() for name in both))
        given = {site: [params[name] for name in both] for site, both in names.items()}
        return {k: expected_odds(*x) if k in self.betas else x[0] for k, x in given.items()}

    def quantiles(self, params: dict[str, Any], levels: Any) -> dict[str, Any]:
        """Return the values of the sites for each level."""
        values, Q = self.values(params), len(levels)
        values = {site: jnp.broadcast_to(x, (Q, *jnp.shape(x))) for site, x in values.items()}
        for site in self.betas:
            a, b = (params[name] for name in self.names(site))
            q = jnp.reshape(levels, (-1,) + (1,) * jnp.ndim(a)) * jnp.ones_like(values[site])
            # JAX has no such function
            values[site] = jax.pure_callback(betaincinv, q, a, b, q, vmap_method="expand_dims")
        return values

    def names(self, site: str) -> tuple[str, ...]:
        """Name the parameters of a site."""
        kinds = ("concentration1", "concentration0") if site in self.betas else ("loc",)
        return tuple(f"{site}_{self.prefix}_{kind}" for kind in kinds)


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

    def run_at_start():
        model = handlers.substitute(
            handlers.seed(guide.model, random.key(0)),
            substitute_fn=lambda site: init(site) if site["name"] in names else None,
        )
        values = zero | {k: x for k, x in kernels.items() if k in names}
        return run_model(model, call[0], call[1], values)

    def start():
        run = run_at_start()
        scales = {p.name: base_of(run[p.slab]["fn"]).scale * jnp.ones(()) for p in sites.pairs}
        priors = Distributions({name: run[name]["fn"] for name in names})
        values = {name: run[name]["value"] for name in names}
        betas = {k: is_unbounded(run[k]["fn"]) for k in names if is_plain(run[k], (dist.Beta,))}
        return priors, values, scales, betas

    def probabilities():
        run = run_at_start()
        return [getattr(base_of(run[p.spike]["fn"]), "probs", None) for p in sites.pairs]

    # start values must not be tracers, which outlive no transformation
    (priors, found, scales, betas), is_known = computed(start)
    points = {k: Point(x, priors[k].support, priors[k].event_dim) for k, x in found.items()}
    starts = {}
    # numbers that stand in for traced ones do not tell
    if unbounded := [k for k, x in betas.items() if is_known and np.asarray(x)]:
        probs = [np.asarray(x) for x in computed(probabilities)[0] if x is not None]
        for name in unbounded:
            value = np.asarray(found[name])
            # of weights, not of something else
            if any(np.isin(x, value).all() for x in probs):
                a, b = (np.ones_like(value) * x for x in (1, 1 / priors[name].mean - 1))
                starts[name] = jnp.asarray(a), jnp.asarray(b)
    return Points(guide.prefix, points, starts), scales
