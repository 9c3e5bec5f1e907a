# SPDX-License-Identifier: Apache-2.0
"""The interface between a guide and the variational family of its weights, and that of pairs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float
import numpy as np

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.quantiles import SlabMixtures, single
from numpyro_spikeslab.reading.form import COLUMNS, Form
from numpyro_spikeslab.reading.sites import Pair

Start = dict[str, tuple[Any, Any]]
"""Start value and constraint of each parameter, by its name."""

Marginals = list[tuple[Any, SlabMixtures]]
"""The marginals of the P weights of a site, in parts: each an index of weights, and theirs."""


@runtime_checkable
@runtime_checkable
class GuideFactors(Protocol):
    """The parameters, draws and marginals of a variational family in a guide."""

    @property
    def blocks(self) -> dict[str, list[list[int]]] | None:
        """The blocks of each site; `None` without blocks."""

    def names(self, name: str) -> list[str]:
        """Return the names of the parameters of the pairs of a site, that of ``probs`` first."""

    def start(self, pair: Pair, scale: Any) -> Start:
        """Return where the parameters of a site start.

        :param scale: prior scale of the slabs, in the shape of the weights.
        """

    def sample(
        self, pair: Pair, start: Start, prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        """Declare the parameters of a site and sample its spikes and slabs.

        :param start: from :meth:`start`.
        :param prior_scale: of the slabs, in the shape of the weights.
        :param within: returns the plates of a site, by its name.
        """

    def auxiliary_values(self, pairs: Sequence[Pair], draws: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the auxiliary sites for given ``draws`` of spikes and slabs."""

    def marginals(self, pair: Pair, params: dict[str, Any]) -> Marginals:
        """Return the marginals of the weights of a site."""

    def pack(self, form: Form, params: dict[str, Any]) -> Any:
        """Make the family of all weights from the parameters."""

    def unpack(self, pairs: Sequence[Pair], family: Any) -> dict[str, Any]:
        """Return the parameters: the inverse of :meth:`pack`."""


class PairFactors:
    """The :class:`GuideFactors` of independent pairs.

    :param prefix: part of the parameters' names.
    """

    blocks: dict[str, list[list[int]]] | None = None

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def names(self, name: str) -> list[str]:
        """Return the names of the parameters of a site."""
        return [f"{name}_{self.prefix}_{part}" for part in PairedMeanField._fields]

    def start(self, pair: Pair, scale: Any) -> Start:
        probs, loc, deviation = self.names(pair.name)
        return {
            probs: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc: (jnp.zeros_like(scale), constraints.real),
            deviation: (scale, constraints.softplus_positive),
        }

    def sample(
        self, pair: Pair, start: Start, prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        with within(pair.slab):
            probs, loc, scale = declared(start)
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(
                pair.slab, dist.Normal(spike * loc, jnp.where(spike, scale, prior_scale))
            )
        return {pair.spike: spike, pair.slab: slab}

    def auxiliary_values(self, pairs: Sequence[Pair], draws: dict[str, Any]) -> dict[str, Any]:
        return {}

    def marginals(self, pair: Pair, params: dict[str, Any]) -> Marginals:
        parts = (jnp.ravel(params[name]) for name in self.names(pair.name))
        return [(slice(None), single(*parts))]

    def pack(self, form: Form, params: dict[str, Any]) -> Any:
        if form.kind == COLUMNS:
            return PairedMeanField(*(form.join(params, name) for name in self.names("{}")))
        # tasks may have millions of weights, so these are not copied
        (pair,) = form.pairs
        return PairedMeanField(*(params[x].reshape(form.shape) for x in self.names(pair.name)))

    def unpack(self, pairs: Sequence[Pair], family: Any) -> dict[str, Any]:
        params: dict[str, Any] = {}
        ends = np.cumsum([pair.size for pair in pairs])[:-1]
        parts = zip(*(jnp.split(jnp.ravel(x), ends) for x in family), strict=True)
        for pair, values in zip(pairs, parts, strict=True):
            shaped = (x.reshape(pair.shape) for x in values)
            params |= zip(self.names(pair.name), shaped, strict=True)
        return params


def in_order(marginals: Marginals, values: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Put numbers of the weights of each part in the shape of the weights.

    :param values: for each part, shape (..., b).
    """
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


def declared(start: Start) -> list[Any]:
    """Declare the parameters of a guide, with these start values.

    :raises ValueError: if given parameters have other shapes.
    """
    values = []
    for name, (value, constraint) in start.items():
        param = numpyro.param(name, value, constraint=constraint)
        if jnp.shape(param) != jnp.shape(value):
            raise ValueError(
                f"the guide's parameter {name!r} has shape {jnp.shape(param)}, but with these "
                f"arguments the model asks for {jnp.shape(value)}. Give arguments with as many "
                "weights as those of the fit."
            )
        values.append(param)
    return values
