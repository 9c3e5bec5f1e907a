# SPDX-License-Identifier: Apache-2.0
"""The standard mean field as a guide."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.families import MeanField
from numpyro_spikeslab.algebra.quantiles import single
from numpyro_spikeslab.fitting.guide import SpikeSlabGuide
from numpyro_spikeslab.fitting.guide_factors import Marginals, PairFactors, Start
from numpyro_spikeslab.fitting.model_sites import ModelSites
from numpyro_spikeslab.fitting.points import init_to_prior_mean
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.sites import Pair
from numpyro_spikeslab.support.messages import bad


class MeanFieldGuide(SpikeSlabGuide):
    """Standard mean field: slabs jointly Gaussian, independent of the spikes (paper, eq. 4).

    The P weights of ``spike_slab("w", ...)``, flattened, get the parameters

    - ``w_slab_{prefix}_loc``, mean of the slabs, shape (P,);
    - ``w_slab_{prefix}_scale_tril``, Cholesky factor of their covariance, shape (P, P);
    - ``w_spike_{prefix}_probs``, the inclusion probabilities, in the shape of the weights.

    :param model: a model with exactly one :func:`~numpyro_spikeslab.spike_slab`.
    :param prefix: part of the parameters' names.
    :param init_loc_fn: as in :class:`PairedGuide`.
    :raises ValueError: when first called, as :class:`PairedGuide`, and for several pairs, groups
        and latent functions.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_spikeslab as nss
        >>> def model(X):
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.25)
        ...     numpyro.sample("y", dist.Normal(X @ w, 0.1).to_event(1), obs=jnp.ones(len(X)))
        >>> guide = nss.MeanFieldGuide(model)
        >>> with numpyro.handlers.seed(rng_seed=0):
        ...     draw = guide(jnp.ones((4, 2)))
        >>> draw["w_spike"].shape
        (2,)
    """

    # the joint update of the slabs needs the Gram matrix of all features
    joint = True
    # as NumPyro's own guides, with which it is compared
    follows = False

    def __init__(
        self,
        model: Callable,
        *,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] = init_to_prior_mean,
    ) -> None:
        super().__init__(model, MeanFieldFactors(prefix), init_loc_fn)

    def _check_model(self, sites: ModelSites, trace: dict[str, Any], call: Any) -> None:
        if len(sites.pairs) > 1 or sites.pairs[0].groups is not None or sites.functions:
            names, functions = [pair.name for pair in sites.pairs], list(sites.functions)
            got = f"the weights {names} and the latent functions {functions}"
            expected = "one spike_slab without groups, and no latent functions"
            raise bad("MeanFieldGuide: model", got, expected, "Use PairedGuide.")


class MeanFieldFactors(PairFactors):
    """Parameters, draws and summaries of independent spikes beside jointly Gaussian slabs."""

    def names(self, name: str) -> list[str]:
        parts = zip(("spike", "slab", "slab"), MeanField._fields, strict=True)
        return [f"{name}_{site}_{self.prefix}_{part}" for site, part in parts]

    def start(self, pair: Pair, scale: Any) -> Start:
        probs, loc, scale_tril = self.names(pair.name)
        return {
            probs: (jnp.full_like(scale, 0.5), constraints.unit_interval),
            loc: (jnp.zeros(pair.size, scale.dtype), constraints.real),
            scale_tril: (jnp.diag(jnp.ravel(scale)), constraints.lower_cholesky),
        }

    def sample(
        self, pair: Pair, params: dict[str, Any], prior_scale: Any, within: Callable
    ) -> dict[str, Any]:
        probs, loc, scale_tril = self.values(pair.name, params)
        # one event over all weights, so it is sampled outside their plates, as in AutoContinuous
        joint = numpyro.sample(
            self._joint(pair),
            dist.MultivariateNormal(loc, scale_tril=scale_tril),
            infer={"is_auxiliary": True},
        )
        with within(pair.slab):
            spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=probs))
            slab = numpyro.sample(pair.slab, dist.Delta(joint.reshape(pair.shape)))
        return {pair.spike: spike, pair.slab: slab}

    def _joint(self, pair: Pair) -> str:
        return f"_{pair.slab}_{self.prefix}_latent"

    def auxiliary_values(self, pairs: Sequence[Pair], draws: dict[str, Any]) -> dict[str, Any]:
        (pair,) = pairs
        slab = draws[pair.slab]
        batch = slab.shape[: slab.ndim - len(pair.shape)]
        return {self._joint(pair): slab.reshape(*batch, pair.size)}

    def marginals(self, pair: Pair, params: dict[str, Any]) -> Marginals:
        probs, loc, scale_tril = self.values(pair.name, params)
        return [(slice(None), single(jnp.ravel(probs), loc, jnp.linalg.norm(scale_tril, axis=1)))]

    def pack(self, form: Form, params: dict[str, Any]) -> MeanField:
        probs, loc, scale_tril = self.values(form.pairs[0].name, params)
        return MeanField(jnp.ravel(probs), loc, scale_tril)

    def unpack(self, pairs: Sequence[Pair], family: MeanField) -> dict[str, Any]:
        (pair,) = pairs
        probs, loc, scale_tril = family
        values = probs.reshape(pair.shape), loc, scale_tril
        return dict(zip(self.names(pair.name), values, strict=True))
