# SPDX-License-Identifier: Apache-2.0
"""Exact block updates for :class:`numpyro.infer.Gibbs`."""

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
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

from numpyro_spikeslab.mixture import Mixture, MixtureReader, gram, view
from numpyro_spikeslab.paired import gibbs_sweep, gibbs_task_sweep
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.structure import Reader, abstract_trace, evaluate


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


class BlockKernel(MCMCKernel):
    """What the kernels of this package share: a block of constrained values, nothing to refresh."""

    sample_field = "z"

    def __init__(self, model: Callable) -> None:
        self._model = model
        self._user = type(self).__name__
        self._read = Reader(model, self._user)
        self._read_mixture = MixtureReader(self._read)
        # MCMC takes this for the sign of an initialised kernel
        self._sample_fn: Callable | None = None

    @property
    def model(self) -> Callable:
        return self._model

    def _split(
        self, model_args: tuple, model_kwargs: dict | None
    ) -> tuple[tuple, dict[str, Any], dict[str, Any]]:
        """Arguments of the model, and the values of the sites that other blocks hold."""
        kwargs = dict(model_kwargs or {})
        values = kwargs.pop(GIBBS_SITES_KWARG, {})
        return model_args, kwargs, values

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: dict[str, Any] | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Start at a draw from the prior, or at ``init_params``.

        :param init_params: values of some of the kernel's sites, for example draws from a fitted
            guide; with several chains, one of each per chain.
        :raises ValueError: for unknown names or other shapes in ``init_params``, and if the model
            has other latent sites that no block holds.
        """
        args, kwargs, values = self._split(model_args, model_kwargs)
        sites = self._own_sites(args, kwargs, values)
        self._sample_fn = self._sample_one
        init_one = partial(self._init_one, sites, num_warmup, values, args, kwargs)
        single = is_prng_key(rng_key)
        _check_init_params(self._user, init_params, sites, () if single else rng_key.shape[:1])
        if single:
            return init_one(rng_key, init_params)
        return jax.vmap(init_one)(rng_key, init_params)

    @abstractmethod
    def _own_sites(
        self, args: tuple, kwargs: dict, values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sites that the kernel draws.

        :param values: those of the sites that other blocks hold.
        """

    def _init_one(self, sites, num_warmup, values, args, kwargs, rng_key, init_params):
        rng_key, key_prior = random.split(rng_key)

        @jax.jit
        def prior(key):
            model = handlers.substitute(handlers.seed(self._model, key), data=values)
            with handlers.block():
                trace = handlers.trace(model).get_trace(*args, **kwargs)
            return {name: jnp.asarray(trace[name]["value"]) for name in sites}

        z = self._from_prior(prior(key_prior), num_warmup)
        z |= {name: jnp.asarray(x, z[name].dtype) for name, x in (init_params or {}).items()}
        return self._start(z, num_warmup, rng_key)

    def _from_prior(self, z: dict[str, Any], num_warmup: int) -> dict[str, Any]:
        """Where to start without ``init_params``, from a draw from the prior."""
        return z

    @abstractmethod
    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> Any:
        """The state at the start."""

    def sample(
        self,
        state: Any,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        """One sweep.

        :param state: the current state.
        :param model_args: arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        """
        if is_prng_key(state.rng_key):
            return self._sample_one(state, model_args, model_kwargs)
        return jax.vmap(lambda one: self._sample_one(one, model_args, model_kwargs))(state)

    @abstractmethod
    def _sample_one(self, state, model_args, model_kwargs):
        """One sweep of one chain."""

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Adds the model's deterministic sites to the values."""

        def postprocess(z):
            args, kwargs, values = self._split(model_args, model_kwargs)
            seeded = handlers.seed(self._model, random.key(0))
            model = handlers.substitute(seeded, data={**values, **z})
            with handlers.block():
                trace = handlers.trace(model).get_trace(*args, **kwargs)
            found = {
                k: site["value"] for k, site in trace.items() if site["type"] == "deterministic"
            }
            return {**z, **found}

        return postprocess

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        """Identity: nothing that depends on the other blocks is kept."""
        return state

    def wrap_model(self, wrapper: Callable) -> "BlockKernel":
        kernel = copy(self)
        BlockKernel.__init__(kernel, wrapper(self._model))
        return kernel

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Identity: the values are already constrained."""
        return identity

    def __getstate__(self) -> dict[str, Any]:
        # a kernel read from a pickle is initialised anew, its bound method would pull in the model
        return self.__dict__ | {"_sample_fn": None}


class PairedGibbs(BlockKernel):
    """Draws every pair (slab, spike) in turn from its exact conditional (supplement, section 2).

    Alone it samples models whose only latent sites are pairs; beside other kernels it is a block
    of :class:`numpyro.infer.Gibbs`. There is nothing to tune and no warm-up to adapt.

    Weights of shape (Q, M) that mix :func:`~numpyro_spikeslab.latent_functions` are drawn for all
    tasks at once, from the functions' Gram matrices; entries may be missing and noise may differ
    from one to the next.

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

    def _own_sites(
        self, args: tuple, kwargs: dict, values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        args, kwargs, structure = self._read(args, kwargs, frozenset(values))[:3]
        missing = [name for name in structure.others if name not in values]
        latent = self._latent_sites(missing, args, kwargs)
        if latent:
            raise ValueError(
                f"PairedGibbs cannot sample the latent sites {latent}. Make it a block: "
                "Gibbs([(PairedGibbs(model), paired_sites), (NUTS(model), None)])."
            )
        return {name: p.shape for p in structure.pairs for name in (p.spike, p.slab)}

    def _latent_sites(self, names: list[str], args: tuple, kwargs: dict) -> list[str]:
        """Those of ``names`` that are sample sites; a model's params keep their start value."""
        if not names:
            return []
        trace = abstract_trace(self._model, args, kwargs)
        return [name for name in names if trace[name]["type"] == "sample"]

    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> PairedGibbsState:
        return PairedGibbsState(z, start_inclusion(z), rng_key)

    def _sample_one(self, state, model_args, model_kwargs):
        args, kwargs, values = self._split(model_args, model_kwargs)
        rng_key, key = random.split(state.rng_key)
        mixture = self._read_mixture(args, kwargs, frozenset(values))
        if mixture is None:
            z, inclusion = self._sweep(key, args, kwargs, values, state.z)
        else:
            z, inclusion = sweep_tasks(key, mixture, self._model, args, kwargs, values, state.z)
        z = {name: z[name].astype(x.dtype) for name, x in state.z.items()}
        return PairedGibbsState(z, inclusion, rng_key)

    def _sweep(self, key, args, kwargs, values, z):
        reading = self._read(args, kwargs, frozenset(values))
        args, kwargs, structure, design = *reading[:3], reading.design
        spikes, slabs = (structure.join(z, key) for key in ("{}_spike", "{}_slab"))
        current = weights(spikes, slabs)
        at = evaluate(structure, self._model, args, kwargs, values, current)
        if design is None:
            design = self._read.design(structure, args, kwargs, values)
        spikes, slabs, inclusion = gibbs_sweep(
            key, design, at.residual, current, at.precision, at.prior
        )
        z = structure.split(spikes, "{}_spike") | structure.split(slabs, "{}_slab")
        return z, structure.split(inclusion, "{}")


def start_inclusion(z: dict[str, Any]) -> dict[str, Any]:
    """The inclusion probabilities that stand in a state before the first sweep."""
    end = "_spike"
    return {name.removesuffix(end): 1.0 * x for name, x in z.items() if name.endswith(end)}


def sweep_tasks(
    key: Array,
    mixture: Mixture,
    model: Callable,
    args: tuple,
    kwargs: dict,
    values: dict[str, Any],
    z: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw the weights of all tasks, in Gram form.

    :param values: those of the sites that other blocks hold.
    :param z: current spikes and slabs.
    :return: the new ones, and the inclusion probabilities.
    """
    pair = mixture.pair
    at = view(mixture, model, args, kwargs, values)
    phi = at.trace[mixture.name]["value"]
    current = weights(z[pair.spike], z[pair.slab]).reshape(at.prior.variance.shape)
    G, b, precision = gram(mixture, at, phi)
    drawn = gibbs_task_sweep(key, G, b, current, precision, at.prior)
    spikes, slabs, inclusion = (x.reshape(pair.shape) for x in drawn)
    return {pair.spike: spikes, pair.slab: slabs}, {pair.name: inclusion}


def _check_init_params(
    user: str,
    init_params: dict[str, Any] | None,
    sites: dict[str, tuple[int, ...]],
    batch: tuple[int, ...],
) -> None:
    unknown = sorted(set(init_params or {}) - set(sites))
    if unknown:
        raise ValueError(
            f"{user}: init_params has unknown names {unknown}; its sites are {sorted(sites)}."
        )
    for name, value in (init_params or {}).items():
        if jnp.shape(value) != batch + sites[name]:
            raise ValueError(
                f"{user}: init_params[{name!r}] has shape {jnp.shape(value)}, expected "
                f"{batch + sites[name]}."
            )
