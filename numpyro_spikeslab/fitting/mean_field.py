# SPDX-License-Identifier: Apache-2.0
"""The standard mean field as a guide."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import MeanField
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.pairs import declared
from numpyro_spikeslab.reading.form import Form, Pair


class MeanFieldGuide(SpikeSlabGuide):
    """Standard mean field: slabs jointly Gaussian, independent of the spikes (paper, eq. 4).

    The family that the paired one is compared with; it has one mode and is sensitive to its
    start. The P weights of ``spike_slab("w", ...)``, flattened, get the parameters

    - ``w_slab_{prefix}_loc``, mean of the slabs, shape (P,);
    - ``w_slab_{prefix}_scale_tril``, Cholesky factor of their covariance, shape (P, P);
    - ``w_spike_{prefix}_probs``, the inclusion probabilities, in the shape of the weights.

    :param model: a model with exactly one :func:`~numpyro_spikeslab.spike_slab`.
    :param prefix: part of the parameters' names.
    :param inner_guide: as in :class:`PairedGuide`.
    :raises ValueError: when first called, as :class:`PairedGuide`, and for several pairs.
    """

    # the joint update of the slabs needs the Gram matrix of all features
    joint = True
    # as NumPyro's own guides, with which it is compared
    follows = False

    def _find_pairs(self, trace: dict[str, Any]) -> tuple[Pair, ...]:
        pairs = super()._find_pairs(trace)
        if len(pairs) > 1:
            raise ValueError(
                f"MeanFieldGuide: the model has several spike_slab sites, "
                f"{[pair.name for pair in pairs]}; one is supported. Use PairedGuide."
            )
        if pairs[0].groups is not None:
            raise ValueError(
                f"MeanFieldGuide: the weights {pairs[0].name!r} share spikes, expected one for "
                "each weight. Leave out `groups` of spike_slab, or use PairedGuide."
            )
        return pairs

    def _names(self, name: str) -> tuple[str, str, str]:
        return (
            f"{name}_spike_{self.prefix}_probs",
            f"{name}_slab_{self.prefix}_loc",
            f"{name}_slab_{self.prefix}_scale_tril",
        )

    def _pair_names(self, params: dict[str, Any]) -> list[str]:
        end = f"_spike_{self.prefix}_probs"
        return [name.removesuffix(end) for name in params if name.endswith(end)]

    def _start_pair(self, pair: Pair) -> dict[str, tuple[Any, Any]]:
        scale = self._slab_scale(pair)
        probs_name, loc_name, scale_name = self._names(pair.name)
        return {
            probs_name: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc_name: (jnp.zeros(pair.size, scale.dtype), constraints.real),
            scale_name: (jnp.diag(jnp.ravel(scale)), constraints.lower_cholesky),
        }

    def _sample_pair(self, pair: Pair, prior_scale: Any, within: Callable) -> dict[str, Any]:
        (probs_name, start), *others = self._start_pair(pair).items()
        loc, scale_tril = declared(dict(others))
        # one event over all weights, so it is sampled outside their plates, as in AutoContinuous
        joint = numpyro.sample(
            self._auxiliary_name(pair),
            dist.MultivariateNormal(loc, scale_tril=scale_tril),
            infer={"is_auxiliary": True},
        )
        with within(pair.slab):
            (probs,) = declared({probs_name: start})
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(pair.slab, dist.Delta(joint.reshape(pair.shape)))
        return {pair.spike: spike, pair.slab: slab}

    def _auxiliary_name(self, pair: Pair) -> str:
        return f"_{pair.slab}_{self.prefix}_latent"

    def auxiliary_values(self, draws: dict[str, Any]) -> dict[str, Any]:
        """Values of the guide's auxiliary site that give the slabs of ``draws``."""
        (pair,) = self.pairs
        slab = draws[pair.slab]
        batch = slab.shape[: slab.ndim - len(pair.shape)]
        return {self._auxiliary_name(pair): slab.reshape(*batch, pair.size)}

    def _marginal(self, name: str, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        probs, loc, scale_tril = (params[key] for key in self._names(name))
        scale = jnp.sqrt(jnp.sum(scale_tril**2, axis=1))
        return probs, loc.reshape(probs.shape), scale.reshape(probs.shape)

    def pack_weights(self, form: Form, params: dict[str, Any]) -> MeanField:
        (pair,) = form.pairs
        probs, loc, scale_tril = (params[name] for name in self._names(pair.name))
        return MeanField(jnp.ravel(probs), loc, scale_tril)

    def unpack_weights(self, form: Form, factors: MeanField) -> dict[str, Any]:
        (pair,) = form.pairs
        probs, loc, scale_tril = factors
        values = (probs.reshape(pair.shape), loc, scale_tril)
        return dict(zip(self._names(pair.name), values, strict=True))
