# SPDX-License-Identifier: Apache-2.0
"""What a guide asks of its factors, and those of independent pairs of a slab and its spike."""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.groups import GroupedMeanField, stacks_of
from numpyro_spikeslab.algebra.quantiles import SlabMixtures, single
from numpyro_spikeslab.fitting.groups import (
    pack_groups,
    sample_groups,
    start_groups,
    unpack_groups,
)
from numpyro_spikeslab.reading.form import COLUMNS, Form, Pair
from numpyro_spikeslab.reading.program import are_concrete

PARTS = PairedMeanField._fields


class PairFactors:
    """Parameters, draws and summaries of independent pairs; other families say what differs.

    :param prefix: part of the parameters' names.
    """

    blocks: dict[str, list[list[int]]] | None = None
    """The blocks of each site; `None` for pairs alone."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @property
    def _key(self) -> str:
        """Name of a parameter, with braces for those of the weights and of the part."""
        return f"{{}}_{self.prefix}_{{}}"

    def names(self, name: str) -> list[str]:
        """The names of the parameters of pairs."""
        return [self._key.format(name, part) for part in PARTS]

    def sites(self, params: dict[str, Any]) -> list[str]:
        """Names of the weights, from those of the parameters."""
        end = self.names("")[0]
        return [name.removesuffix(end) for name in params if name.endswith(end)]

    def start(self, pair: Pair, scale: Any) -> dict[str, tuple[Any, Any]]:
        """Start value and constraint of each parameter, at slabs of this prior scale."""
        if pair.groups is not None:
            return start_groups(pair, self._key.format(pair.name, "{}"), scale)
        probs, loc, deviation = self.names(pair.name)
        return {
            probs: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc: (jnp.zeros_like(scale), constraints.real),
            deviation: (scale, constraints.softplus_positive),
        }

    def sample(
        self, pair: Pair, start: dict[str, tuple[Any, Any]], prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        """Declare the parameters and sample the two sites ``within`` their plates.

        :param start: see :meth:`start`.
        :param prior_scale: of the slabs, in the shape of the weights.
        :param within: the plates of a site, by its name.
        """
        if pair.groups is not None:
            # their rows are of no plate
            return sample_groups(pair, declared(start), prior_scale, self._joint(pair), within)
        with within(pair.slab):
            probs, loc, scale = declared(start)
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(
                pair.slab, dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
            )
        return {pair.spike: spike, pair.slab: slab}

    def _joint(self, pair: Pair) -> str:
        return f"_{pair.slab}_{self.prefix}_latent"

    def auxiliary_values(self, pairs: tuple[Pair, ...], draws: dict[str, Any]) -> dict[str, Any]:
        """Values of auxiliary sites that give these ``draws`` of spikes and slabs."""
        return {self._joint(pair): draws[pair.slab] for pair in pairs if pair.groups is not None}

    def marginal(self, name: str, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Inclusion probability, and mean and standard deviation of the slab where included."""
        probs, loc, scale = (params.get(key) for key in self.names(name))
        if scale is None:
            scale = jnp.linalg.norm(params[self._key.format(name, "scale_tril")], axis=1)
        return probs, loc, scale

    def slab_mixtures(self, name: str, params: dict[str, Any]) -> list[SlabMixtures]:
        """The marginals of the weights, in parts of as many Gaussians each."""
        return [single(*map(jnp.ravel, self.marginal(name, params)))]

    def in_order(self, name: str, params: dict[str, Any], parts: list[Any]) -> Any:
        """Numbers of the weights in these parts, each (Q, b), in the order of the weights."""
        return parts[0]

    def pack(self, form: Form, params: dict[str, Any]) -> Any:
        """The factors of all pairs."""
        if form.groups is not None:
            return pack_groups(form, params, self._key)
        if form.kind == COLUMNS:
            return PairedMeanField(*(form.join(params, name) for name in self.names("{}")))
        # of tasks there may be millions of weights, so these are not copied
        (pair,) = form.pairs
        return PairedMeanField(*(params[x].reshape(form.shape) for x in self.names(pair.name)))

    def unpack(self, form: Form, factors: Any) -> dict[str, Any]:
        """The inverse of :meth:`pack`."""
        if isinstance(factors, GroupedMeanField):
            return unpack_groups(form, factors, self._key)
        params: dict[str, Any] = {}
        for name, values in zip(self.names("{}"), factors, strict=True):
            params |= form.split(jnp.ravel(values), name)
        return params

    def are_own(self, form: Form, factors: Any) -> bool:
        """Whether factors of these sizes are those of the guide."""
        if form.groups is None or not isinstance(factors, GroupedMeanField):
            return (form.groups is None) != isinstance(factors, GroupedMeanField)
        own = stacks_of(form.groups)
        alike = [x.shape for x in own] == [x.shape for x in factors.stacks]
        if not alike or not are_concrete(factors.stacks):
            return alike
        return all(map(np.array_equal, own, factors.stacks))


def declared(start: dict[str, tuple[Any, Any]]) -> list[Any]:
    """The parameters of a guide, with these start values.

    :raises ValueError: if those that are given are of other weights.
    """
    values = []
    for name, (value, constraint) in start.items():
        found = numpyro.param(name, value, constraint=constraint)
        if jnp.shape(found) != jnp.shape(value):
            raise ValueError(
                f"the guide's parameter {name!r} has shape {jnp.shape(found)}, but with these "
                f"arguments the model asks for {jnp.shape(value)}. Give arguments with as many "
                "weights as those of the fit."
            )
        values.append(found)
    return values
