# SPDX-License-Identifier: Apache-2.0
"""The variational family of the weights in a guide: its parameters, draws and marginals."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.quantiles import SlabMixtures, single
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.sites import Pair
from numpyro_spikeslab.support.messages import bad

Start = dict[str, tuple[Any, Any]]
"""Start value and constraint of each parameter, by its name."""

Marginals = list[tuple[Any, SlabMixtures]]
"""The marginals of the P weights of a site, in parts: each an index of weights, and theirs."""


class PairFactors:
    """Independent pairs, and the base class of the other families."""

    blocks: dict[str, list[list[int]]] | None = None

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def names(self, name: str) -> list[str]:
        """Return the names of the parameters of a site, that of ``probs`` first."""
        return [f"{name}_{self.prefix}_{part}" for part in PairedMeanField._fields]

    def values(self, name: str, params: dict[str, Any]) -> list[Any]:
        """Return the parameters of a site."""
        return [params[key] for key in self.names(name)]

    def start(self, pair: Pair, scale: Any) -> Start:
        """Return where the parameters of a site start, given the prior scales of its slabs."""
        probs, loc, deviation = self.names(pair.name)
        return {
            probs: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc: (jnp.zeros_like(scale), constraints.real),
            deviation: (scale, constraints.softplus_positive),
        }

    def sample(
        self, pair: Pair, params: dict[str, Any], prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        """Sample the spikes and slabs of a site ``within`` its plates."""
        probs, loc, scale = self.values(pair.name, params)
        with within(pair.slab):
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            normal = dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
            return {pair.spike: spike, pair.slab: numpyro.sample(pair.slab, normal)}

    def auxiliary_values(self, pairs: Sequence[Pair], draws: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the auxiliary sites for draws of spikes and slabs."""
        return {}

    def marginals(self, pair: Pair, params: dict[str, Any]) -> Marginals:
        """Return the marginals of the weights of a site."""
        return [(slice(None), single(*map(jnp.ravel, self.values(pair.name, params))))]

    def pack(self, form: Form, params: dict[str, Any]) -> Any:
        """Make the family of all weights from the parameters."""
        if form.is_design:
            return PairedMeanField(*(form.join(params, name) for name in self.names("{}")))
        # tasks may have millions of weights, so these are not copied
        values = self.values(form.pairs[0].name, params)
        return PairedMeanField(*(x.reshape(form.shape) for x in values))

    def unpack(self, pairs: Sequence[Pair], family: Any) -> dict[str, Any]:
        """Invert :meth:`pack`."""
        params: dict[str, Any] = {}
        shapes = [self.shape(pair) for pair in pairs]
        ends = np.cumsum([prod(shape) for shape in shapes])[:-1]
        parts = zip(*(jnp.split(jnp.ravel(x), ends) for x in family), strict=True)
        for pair, shape, values in zip(pairs, shapes, parts, strict=True):
            params |= zip(self.names(pair.name), (x.reshape(shape) for x in values), strict=True)
        return params

    def shape(self, pair: Pair) -> tuple[int, ...]:
        """Return the shape of the parameters of the independent pairs of a site."""
        return pair.shape


def in_order(marginals: Marginals, values: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Put numbers of the weights of each part, (..., b), in the shape of the weights."""
    leading = values[0].shape[:-1]
    flat = jnp.zeros((*leading, int(np.prod(shape))), values[0].dtype)
    for (members, _), x in zip(marginals, values, strict=True):
        flat = flat.at[..., members].set(x, mode="drop")
    return flat.reshape(*leading, *shape)


def moments(marginals: Marginals, shape: tuple[int, ...]) -> list[Float[Array, "..."]]:
    """Return inclusion probabilities, and means and standard deviations of the slabs given
    inclusion, each in the shape of the weights."""
    parts = []
    for _, (probs, shares, mean, scale) in marginals:
        loc = jnp.sum(shares * mean, axis=0)
        variance = jnp.sum(shares * (scale**2 + (mean - loc) ** 2), axis=0)
        parts.append((probs, loc, jnp.sqrt(variance)))
    return [in_order(marginals, values, shape) for values in zip(*parts, strict=True)]


def declared(start: Start) -> dict[str, Any]:
    """Declare the parameters of a guide."""
    params = {name: numpyro.param(name, x, constraint=c) for name, (x, c) in start.items()}
    check_params(params, {name: jnp.shape(x) for name, (x, _) in start.items()})
    return params


def check_params(params: dict[str, Any], shapes: dict[str, tuple[int, ...] | None]) -> None:
    """Raise if parameters are not there in these shapes; `None` is any shape."""
    for name, shape in shapes.items():
        if name not in params or shape not in (None, jnp.shape(params[name])):
            got = f"the shape {jnp.shape(params[name])}" if name in params else "nothing"
            expected = "an array" if shape is None else f"the shape {shape}"
            remedy = "Give the parameters of a fit of this model to these arguments."
            raise bad(f"params[{name!r}]", got, expected, remedy)
