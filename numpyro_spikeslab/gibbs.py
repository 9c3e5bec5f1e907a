# SPDX-License-Identifier: Apache-2.0
"""Exact block updates for :class:`numpyro.infer.Gibbs`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_spikeslab.paired import gibbs_sweep
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.structure import Reader, Reading, Structure, evaluate


class PairedGibbsState(NamedTuple):
    """
    - **z** - dict of the current spikes and slabs.
    - **inclusion_probabilities** - for each set of weights, the conditional probability with which
      each spike was drawn: averaged over draws, the Rao-Blackwellised inclusion probability.
      Collect it with ``extra_fields=("inclusion_probabilities.w",)``, or as
      ``"block_states.0.inclusion_probabilities.w"`` from a composite.
    - **rng_key** - random key for the next step.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    rng_key: Array


class PairedGibbs(MCMCKernel):
    """Draws every pair (slab, spike) in turn from its exact conditional (supplement, section 2).

    Alone it samples models whose only latent sites are pairs; beside other kernels it is a block
    of :class:`numpyro.infer.Gibbs`. There is nothing to tune and no warm-up to adapt.

    :param model: a model whose one observed Normal site is affine in its spike-and-slab weights.
    :raises ValueError: when initialised, if the model does not fit or the data are bad; the
        message names the site and the remedy.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC, NUTS, Gibbs
        >>> import numpyro_spikeslab as nss
        >>> def model(X, y=None):
        ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.25)
        ...     with numpyro.plate("obs", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)
        >>> X = jax.random.normal(jax.random.key(0), (50, 3))
        >>> y = 2 * X[:, 1] + 0.5 * jax.random.normal(jax.random.key(1), (50,))
        >>> kernel = Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])
        >>> mcmc = MCMC(kernel, num_warmup=200, num_samples=500, progress_bar=False)
        >>> mcmc.run(jax.random.key(2), X, y)
        >>> bool(mcmc.get_samples()["w_spike"].mean(0)[1] > 0.99)
        True
    """

    sample_field = "z"

    def __init__(self, model: Callable) -> None:
        self._model = model
        self._read = Reader(model, "PairedGibbs")
        # MCMC takes this for the sign of an initialised kernel
        self._sample_fn: Callable | None = None

    @property
    def model(self) -> Callable:
        return self._model

    def _reading(self, model_args: tuple, model_kwargs: dict | None) -> tuple[Reading, dict]:
        """The model as read, and the values of the sites that other blocks hold."""
        kwargs = dict(model_kwargs or {})
        values = kwargs.pop(GIBBS_SITES_KWARG, {})
        return self._read(model_args, kwargs, frozenset(values)), values

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: dict[str, Any] | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> PairedGibbsState:
        """Start at a draw from the prior, or at ``init_params``.

        :param init_params: values of some spikes and slabs, for example draws from a fitted
            guide; with several chains, one of each per chain.
        :raises ValueError: for unknown names or other shapes in ``init_params``, and if the model
            has other latent sites that no block holds.
        """
        reading, values = self._reading(model_args, model_kwargs)
        args, kwargs, structure = reading[:3]
        missing = [name for name in structure.others if name not in values]
        latent = self._latent_sites(missing, args, kwargs)
        if latent:
            raise ValueError(
                f"PairedGibbs cannot sample the latent sites {latent}. Make it a block: "
                "Gibbs([(PairedGibbs(model), paired_sites), (NUTS(model), None)])."
            )
        self._sample_fn = self._sample_one
        init_one = partial(self._init_one, structure, values, args, kwargs)
        if is_prng_key(rng_key):
            _check_init_params(init_params, structure, ())
            return init_one(rng_key, init_params)
        _check_init_params(init_params, structure, rng_key.shape[:1])
        return jax.vmap(init_one)(rng_key, init_params)

    def _latent_sites(self, names: list[str], args: tuple, kwargs: dict) -> list[str]:
        """Those of ``names`` that are sample sites; a model's params keep their start value."""
        if not names:
            return []
        seeded = handlers.seed(self._model, random.key(0))
        with handlers.block():
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        return [name for name in names if trace[name]["type"] == "sample"]

    def _init_one(self, structure, values, args, kwargs, rng_key, init_params):
        rng_key, key_prior = random.split(rng_key)
        model = handlers.substitute(handlers.seed(self._model, key_prior), data=values)
        with handlers.block():
            trace = handlers.trace(model).get_trace(*args, **kwargs)
        sites = [name for pair in structure.pairs for name in (pair.spike, pair.slab)]
        z = {name: jnp.asarray(trace[name]["value"]) for name in sites}
        z |= {name: jnp.asarray(x, z[name].dtype) for name, x in (init_params or {}).items()}
        inclusion = {pair.name: 1.0 * z[pair.spike] for pair in structure.pairs}
        return PairedGibbsState(z, inclusion, rng_key)

    def sample(
        self,
        state: PairedGibbsState,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> PairedGibbsState:
        """One sweep over all pairs.

        :param state: the current state.
        :param model_args: arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        """
        if is_prng_key(state.rng_key):
            return self._sample_one(state, model_args, model_kwargs)
        return jax.vmap(lambda one: self._sample_one(one, model_args, model_kwargs))(state)

    def _sample_one(self, state, model_args, model_kwargs):
        reading, values = self._reading(model_args, model_kwargs)
        args, kwargs, structure, design = *reading[:3], reading.design
        spikes, slabs = (structure.join(state.z, key) for key in ("{}_spike", "{}_slab"))
        current = weights(spikes, slabs)
        at = evaluate(structure, self._model, args, kwargs, values, current)
        if design is None:
            design = self._read.design(structure, args, kwargs, values)
        rng_key, key_sweep = random.split(state.rng_key)
        spikes, slabs, inclusion = gibbs_sweep(
            key_sweep, design, at.residual, current, at.precision, at.prior
        )
        z = structure.split(spikes, "{}_spike") | structure.split(slabs, "{}_slab")
        z = {name: z[name].astype(x.dtype) for name, x in state.z.items()}
        return PairedGibbsState(z, structure.split(inclusion, "{}"), rng_key)

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Adds the model's deterministic sites to the spikes and slabs."""

        def postprocess(z):
            kwargs = dict(model_kwargs or {})
            values = kwargs.pop(GIBBS_SITES_KWARG, {})
            seeded = handlers.seed(self._model, random.key(0))
            model = handlers.substitute(seeded, data={**values, **z})
            with handlers.block():
                trace = handlers.trace(model).get_trace(*model_args, **kwargs)
            found = {
                k: site["value"] for k, site in trace.items() if site["type"] == "deterministic"
            }
            return {**z, **found}

        return postprocess

    def refresh(
        self, state: PairedGibbsState, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> PairedGibbsState:
        """Identity: nothing that depends on the other blocks is kept."""
        return state

    def wrap_model(self, wrapper: Callable) -> "PairedGibbs":
        return type(self)(wrapper(self._model))

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Identity: spikes and slabs are already constrained."""
        return identity

    def __getstate__(self) -> dict[str, Any]:
        # a kernel read from a pickle is initialised anew, its bound method would pull in the model
        return self.__dict__ | {"_sample_fn": None}


def _check_init_params(
    init_params: dict[str, Any] | None, structure: Structure, batch: tuple[int, ...]
) -> None:
    shapes = {name: pair.shape for pair in structure.pairs for name in (pair.spike, pair.slab)}
    unknown = sorted(set(init_params or {}) - set(shapes))
    if unknown:
        raise ValueError(
            f"PairedGibbs: init_params has unknown names {unknown}; its sites are {sorted(shapes)}."
        )
    for name, value in (init_params or {}).items():
        if jnp.shape(value) != batch + shapes[name]:
            raise ValueError(
                f"PairedGibbs: init_params[{name!r}] has shape {jnp.shape(value)}, expected "
                f"{batch + shapes[name]}."
            )
