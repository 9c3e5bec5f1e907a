# SPDX-License-Identifier: Apache-2.0
"""The factors of a paired guide where each slab and its spike are a pair of their own."""

from typing import Any

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.reading.form import COLUMNS, Form, Pair

PARTS = PairedMeanField._fields


class PairFactors:
    """Parameters, draws and summaries of independent pairs; those of blocks have more to tell.

    :param prefix: part of the parameters' names.
    """

    blocks: dict[str, list[list[int]]] | None = None
    """The blocks of each site; `None` for pairs alone."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def names(self, name: str) -> list[str]:
        """The names of the parameters of pairs."""
        return [f"{name}_{self.prefix}_{part}" for part in PARTS]

    def start(self, pair: Pair, scale: Any) -> dict[str, tuple[Any, Any]]:
        """Start value and constraint of each parameter, at slabs of this prior scale."""
        probs, loc, deviation = self.names(pair.name)
        return {
            probs: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc: (jnp.zeros_like(scale), constraints.real),
            deviation: (scale, constraints.softplus_positive),
        }

    def sample(self, pair: Pair, start: dict[str, tuple[Any, Any]], prior_scale: Any, within: Any):
        """Declare the parameters and sample the two sites ``within`` their plates."""
        with within:
            probs, loc, scale = declared(start)
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(
                pair.slab, dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
            )
        return {pair.spike: spike, pair.slab: slab}

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Values of auxiliary sites that give these ``draws`` of spikes and slabs."""
        return {}

    def marginal(self, name: str, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Inclusion probability, and mean and standard deviation of the slab where included."""
        probs, loc, scale = (params[key] for key in self.names(name))
        return probs, loc, scale

    def quantiles(self, name: str, params: dict[str, Any], levels: Any) -> dict[str, Any]:
        """Quantiles of weights and slabs that do not follow from their marginals."""
        return {}

    def pack(self, form: Form, params: dict[str, Any]) -> Any:
        """The factors of all pairs."""
        joined = (form.join(params, f"{{}}_{self.prefix}_{part}") for part in PARTS)
        shape = (-1,) if form.kind == COLUMNS else form.shape
        return PairedMeanField(*(x.reshape(shape) for x in joined))

    def unpack(self, form: Form, factors: Any) -> dict[str, Any]:
        """The inverse of :meth:`pack`."""
        params: dict[str, Any] = {}
        for part, values in zip(PARTS, factors, strict=True):
            params |= form.split(jnp.ravel(values), f"{{}}_{self.prefix}_{part}")
        return params

    def shapes(self, pair: Pair) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        return dict.fromkeys(self.names(pair.name), pair.shape)


def declared(start: dict[str, tuple[Any, Any]]) -> list[Any]:
    """The parameters of a guide, with these start values."""
    return [
        numpyro.param(name, value, constraint=constraint)
        for name, (value, constraint) in start.items()
    ]
