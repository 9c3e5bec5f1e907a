# SPDX-License-Identifier: Apache-2.0
"""Base class of the kernels, which are blocks of :class:`numpyro.infer.Gibbs`."""

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from jaxtyping import Array
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.precision import full_precision
from numpyro_spikeslab.priors import base_of
from numpyro_spikeslab.reading.model_run import abstract_trace, run_model
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.sites import is_latent


class BlockKernel(MCMCKernel):
    """Kernel that draws some sites of a model exactly, given the values of all others.

    Its values are constrained. It keeps nothing that depends on the other blocks. Arrays that are
    changed in place after a chain has been compiled for them are not noticed, since MCMC compares
    arguments by identity.
    """

    sample_field = "z"

    def __init__(self, model: Callable) -> None:
        self._bind(model)

    def _bind(self, model: Callable) -> None:
        self._model = model
        self._user = type(self).__name__
        self._reader = Reader(model, self._user)
        # MCMC initialises a kernel where this is None
        self._sample_fn: Callable | None = None

    @property
    def model(self) -> Callable:
        return self._model

    def _split(
        self, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> tuple[tuple, dict[str, Any], dict[str, Any]]:
        """Separate the model's arguments from the values of the other blocks' sites."""
        kwargs = dict(model_kwargs or {})
        values = kwargs.pop(GIBBS_SITES_KWARG, {})
        return model_args, kwargs, values

    def _read(self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]) -> Reading:
        return self._reader(args, kwargs, frozenset(values))

    @full_precision
    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: dict[str, Any] | None,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Start at a draw from the prior, or at ``init_params``; :meth:`MCMC.run
        <numpyro.infer.mcmc.MCMC.run>` calls it.

        :param rng_key: random key, or one for each chain.
        :param num_warmup: number of steps that are dropped.
        :param init_params: values of some of the kernel's sites, for example draws from a fitted
            guide; with several chains, one of each per chain.
        :param model_args: arguments of the model.
        :param model_kwargs: keyword arguments of the model, and values of other blocks' sites.
        :raises ValueError: for unknown names, wrong shapes and values in ``init_params`` that are
            not finite, for improper priors, and if the model has latent sites that no block holds.
        """
        args, kwargs, values = self._split(model_args, model_kwargs)
        sites = self._own_sites(args, kwargs, values)
        self._sample_fn = self._sample_one
        # within a compiled function a part must not have compiler options of its own
        once = are_concrete((rng_key, jnp.zeros(())))
        prior = partial(compiled, self._prior(sites, args, kwargs, values), once=once)
        init_one = partial(self._init_one, prior, num_warmup)
        single = is_prng_key(rng_key)
        _check_init_params(self._user, init_params, sites, () if single else rng_key.shape[:1])
        if single:
            return init_one(rng_key, init_params)
        return jax.vmap(init_one)(rng_key, init_params)

    @abstractmethod
    def _own_sites(
        self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the sites that the kernel draws.

        :param values: values of the other blocks' sites.
        """

    @abstractmethod
    def _drawable(self, reading: Reading, values: dict[str, Any]) -> frozenset[str]:
        """Return names of the sites that the kernel can draw."""

    def _check_drawable(self, reading: Reading, values: dict[str, Any], z: dict[str, Any]) -> None:
        """Refuse traced data on which it depends whether the kernel can draw its sites."""
        if unknown := sorted(z.keys() - self._drawable(reading, values)):
            raise ValueError(
                f"{self._user}: the data are traced, as with `jit_model_args=True` or within jit "
                f"and vmap, and the roles of the sites {unknown} depend on their values. Leave out "
                "`jit_model_args`, or bind features, indices and masks to the model: "
                "`functools.partial(model, X)`."
            )

    def _latent_shapes(
        self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the latent sites that no other block holds."""
        trace = abstract_trace(self._model, args, kwargs)
        names = [name for name in trace if is_latent(trace, name) and name not in values]
        for name in names:
            if isinstance(base_of(trace[name]["fn"]), dist.ImproperUniform):
                raise ValueError(
                    f"{self._user}: the prior of {name!r} is improper, so no chain can start at a "
                    "draw from it. Give it a proper prior, or leave it to a block of NUTS."
                )
        return {name: jnp.shape(trace[name]["value"]) for name in names}

    def _prior(
        self,
        sites: dict[str, tuple[int, ...]],
        args: tuple,
        kwargs: dict[str, Any],
        values: dict[str, Any],
    ) -> Callable[[Array], dict[str, Any]]:
        """Make a function that draws the sites from their prior, given a key."""

        def prior(key):
            # seeding only the sites without a value compiles faster
            model = handlers.seed(handlers.substitute(self._model, data=values), key)
            with handlers.block():
                trace = handlers.trace(model).get_trace(*args, **kwargs)
            return {name: jnp.asarray(trace[name]["value"]) for name in sites}

        return prior

    def _init_one(self, prior, num_warmup, rng_key, init_params):
        rng_key, key_prior = random.split(rng_key)
        z = self._from_prior(prior(key_prior), num_warmup)
        z |= {name: jnp.asarray(x, z[name].dtype) for name, x in (init_params or {}).items()}
        return self._start(z, num_warmup, rng_key)

    def _from_prior(self, z: dict[str, Any], num_warmup: int) -> dict[str, Any]:
        """Change the start without ``init_params``, a draw from the prior."""
        return z

    @abstractmethod
    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> Any:
        """Make the first state."""

    @full_precision
    def sample(
        self,
        state: Any,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Make one step.

        :param state: the current state.
        :param model_args: arguments of the model.
        :param model_kwargs: keyword arguments of the model.
        """
        if is_prng_key(state.rng_key):
            return self._sample_one(state, model_args, model_kwargs)
        return jax.vmap(lambda one: self._sample_one(one, model_args, model_kwargs))(state)

    @abstractmethod
    def _sample_one(self, state, model_args, model_kwargs):
        """Make one step of one chain."""

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Make a function that adds the model's deterministic sites to the values."""

        @full_precision
        def postprocess(z):
            args, kwargs, values = self._split(model_args, model_kwargs)
            trace = run_model(self._model, args, kwargs, {**values, **z})
            sites = (site for site in trace.values() if site["type"] == "deterministic")
            return {**z, **{site["name"]: site["value"] for site in sites}}

        return postprocess

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        """Identity: the state has nothing that depends on the other blocks."""
        return state

    def wrap_model(self, wrapper: Callable) -> "BlockKernel":
        """Copy the kernel with another model, of the same sites."""
        kernel = copy(self)
        kernel._bind(wrapper(self._model))
        return kernel

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Identity: the values are already constrained."""
        return identity

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sample_fn": None}


def start_inclusion(z: dict[str, Any]) -> dict[str, Any]:
    """Make the inclusion probabilities of the first state: the spikes.

    Their type is that of a step's, never weak, or else MCMC compiles its second step anew.
    """
    names = [name.removesuffix("_spike") for name in z if name.endswith("_spike")]
    pairs = {k: (z[f"{k}_spike"], z[f"{k}_slab"]) for k in names if f"{k}_slab" in z}
    # other sites may have such names, but are no integers
    pairs = {k: x for k, x in pairs.items() if jnp.issubdtype(x[0].dtype, jnp.integer)}
    # weights that share a spike start at 0
    return {
        name: jnp.asarray(spike if spike.shape == slab.shape else jnp.zeros(slab.shape), float)
        for name, (spike, slab) in pairs.items()
    }


def complete(reading: Reading, values: dict[str, Any]) -> dict[str, Any]:
    """Add the start values of the model's params to the values of its sites."""
    return reading.generic | reading.params | values


def _check_init_params(
    user: str,
    init_params: dict[str, Any] | None,
    sites: dict[str, tuple[int, ...]],
    batch: tuple[int, ...],
) -> None:
    for name, value in (init_params or {}).items():
        what = f"{user}: init_params[{name!r}]"
        if name not in sites:
            raise bad(what, "a name that is not a site of the kernel", f"one of {sorted(sites)}")
        if jnp.shape(value) != (shape := batch + sites[name]):
            raise bad(what, f"shape {jnp.shape(value)}", f"{shape}")
        if are_concrete(value) and not np.all(np.isfinite(value)):
            remedy = "Leave the site out to start it at a draw from its prior."
            raise bad(what, "values that are not finite", "finite ones", remedy)
