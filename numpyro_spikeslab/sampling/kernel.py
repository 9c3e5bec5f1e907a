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

from numpyro_spikeslab.reading.checks import check_start
from numpyro_spikeslab.reading.coefficient_proof import depend_on
from numpyro_spikeslab.reading.model_run import run_model
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.roles import NoiseRole
from numpyro_spikeslab.reading.sites import is_latent
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.sampling.noise_draws import start_noise
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import full_precision
from numpyro_spikeslab.support.priors import base_of


class BlockKernel(MCMCKernel):
    """Kernel that draws some sites of a model exactly, given the values of all others.

    Its values are constrained. Arrays that are changed in place after a chain has been compiled for
    them are not noticed, since MCMC compares arguments by identity.
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
        """The model that the kernel draws the sites of."""
        return self._model

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
        """Start at a draw from the prior, or at ``init_params``; noise scales start near the
        scale of the observations. :meth:`MCMC.run <numpyro.infer.mcmc.MCMC.run>` calls it.

        :param rng_key: random key, or one for each chain.
        :param init_params: values of some of the kernel's sites, one of each per chain.
        :param model_kwargs: keyword arguments of the model, and values of other blocks' sites.
        :raises ValueError: for unknown names, wrong shapes and values in ``init_params`` that are
            non-finite or out of their support, for improper priors, and if the model has latent
            sites that no block holds.
        """
        kwargs, values = split(model_kwargs)
        reading = self._read(model_args, kwargs, values)
        sites = self._own_sites(reading, values)
        self._sample_fn = self.sample
        single = is_prng_key(rng_key)
        batch = () if single else rng_key.shape[:1]
        check_start(self._user, init_params or {}, {k: batch + x for k, x in sites.items()})
        # within a compiled function a part must not have compiler options of its own
        once = are_concrete((rng_key, jnp.zeros(())))

        def prior(key):
            # seeding only the sites without a value compiles faster
            model = handlers.seed(handlers.substitute(self._model, data=values), key)
            with handlers.block():
                trace = handlers.trace(model).get_trace(*model_args, **kwargs)
            return {name: jnp.asarray(trace[name]["value"]) for name in sites}

        def values_at_start(key, init_params):
            key, key_prior, key_noise = random.split(key, 3)
            z = self._from_prior(compiled(prior, key_prior, once=once), num_warmup)
            z |= {name: jnp.asarray(x, z[name].dtype) for name, x in (init_params or {}).items()}
            noise = {role.site for role in reading.form.roles_of(NoiseRole)} & z.keys()
            if free := noise - (init_params or {}).keys():

                def at_noise(key, z):
                    scales = {name: z[name] for name in free}
                    return start_noise(key, Current.of(reading, values | z, scales))

                z |= compiled(at_noise, key_noise, z, once=once)
            return key, z

        def start(key, z):
            return self._start(reading, values | z, z, num_warmup, key)

        def inside(z):
            trace = run_model(self._model, model_args, kwargs, values | z)
            return {name: jnp.all(trace[name]["fn"].support(z[name])) for name in init_params or {}}

        over_chains = (lambda fn: fn) if single else jax.vmap
        rng_key, z = over_chains(values_at_start)(rng_key, init_params)
        if init_params and are_concrete(init_params):
            # compiled, where distributions do not check their parameters
            is_inside = over_chains(partial(compiled, inside, once=once))(z)
            self._refuse_outside(reading, init_params, is_inside)
        state = over_chains(start)(rng_key, z)
        self._check(reading, state)
        return state

    def _refuse_outside(self, reading: Reading, given: dict[str, Any], is_inside: Any) -> None:
        """Refuse start values outside of the support of their site."""
        for name in (name for name, x in is_inside.items() if not np.all(x)):
            support = reading.trace.sites[name]["fn"].support
            what = f"{self._user}: init_params[{name!r}]"
            raise bad(what, np.asarray(given[name]), f"values in {support}")

    def _own_sites(self, reading: Reading, values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the sites that the kernel draws: all that no block holds."""
        trace = reading.trace.sites
        names = [name for name in trace if is_latent(trace, name) and name not in values]
        for name in names:
            if isinstance(base_of(trace[name]["fn"]), dist.ImproperUniform):
                raise ValueError(
                    f"{self._user}: the prior of {name!r} is improper, so no chain can start at a "
                    "draw from it. Give it a proper prior, or leave it to a block of NUTS."
                )
        drawable = self._drawable(reading, values)
        if foreign := [name for name in names if name not in drawable]:
            types = {name: jnp.result_type(trace[name]["value"]) for name in foreign}
            discrete = [k for k, dtype in types.items() if not jnp.issubdtype(dtype, jnp.inexact)]
            ours: Any = [name for name in names if name in drawable]
            coefficients = [name for name in reading.form.coefficients if name in ours]
            if depend_on(reading.problem, coefficients, foreign):
                # given their scale coefficients move little, so whoever draws it draws them
                ours = "paired_sites"
            blocks = [f"({self._user}(model), {ours})"]
            blocks += [f"(DiscreteGibbs(model), {discrete})"] if discrete else []
            blocks += ["(NUTS(model), None)"] if discrete != foreign else []
            raise ValueError(
                f"{self._user} cannot sample the latent sites {foreign}. Leave them to other "
                f"blocks: Gibbs([{', '.join(blocks)}]).{reading.if_traced}"
            )
        return {name: jnp.shape(trace[name]["value"]) for name in names}

    @abstractmethod
    def _drawable(self, reading: Reading, values: dict[str, Any]) -> frozenset[str]:
        """Return names of the sites that the kernel can draw."""

    def _from_prior(self, z: dict[str, Any], num_warmup: int) -> dict[str, Any]:
        """Change the start without ``init_params``, a draw from the prior."""
        return z

    @abstractmethod
    def _start(
        self,
        reading: Reading,
        values: dict[str, Any],
        z: dict[str, Any],
        num_warmup: int,
        rng_key: Array,
    ) -> Any:
        """Make the first state, given the values of all blocks' sites."""

    def _check(self, reading: Reading, state: Any) -> None:
        """Refuse a first state, of one chain or of many."""

    @full_precision
    def sample(
        self,
        state: Any,
        model_args: tuple,
        model_kwargs: dict[str, Any] | None,
    ) -> Any:
        """Make one step.

        :param model_kwargs: keyword arguments of the model, and values of other blocks' sites.
        :raises ValueError: if it depends on traced data whether the kernel can draw its sites.
        """
        kwargs, values = split(model_kwargs)
        reading = self._read(model_args, kwargs, values)
        if unknown := sorted(state.z.keys() - self._drawable(reading, values)):
            raise ValueError(
                f"{self._user}: the data are traced, as with `jit_model_args=True` or within jit "
                f"and vmap, and the roles of the sites {unknown} depend on their values. Leave out "
                "`jit_model_args`, or bind features, indices and masks to the model: "
                "`functools.partial(model, X)`."
            )
        step = partial(self._step, reading, values)
        # in a batch chains wait for the slowest, and both branches of each choice run, which only
        # pays where there are many lanes
        in_turn = jax.default_backend() == "cpu"
        chains = partial(jax.lax.map, step) if in_turn else jax.vmap(step)
        return step(state) if is_prng_key(state.rng_key) else chains(state)

    @abstractmethod
    def _step(self, reading: Reading, values: dict[str, Any], state: Any) -> Any:
        """Make one step of one chain."""

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Make a function that adds the model's deterministic sites to the values."""

        @full_precision
        def postprocess(z):
            kwargs, values = split(model_kwargs)
            trace = run_model(self._model, model_args, kwargs, values | z)
            sites = (site for site in trace.values() if site["type"] == "deterministic")
            return z | {site["name"]: site["value"] for site in sites}

        return postprocess

    def refresh(self, state: Any, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Any:
        """Return the state, in which nothing depends on the other blocks."""
        return state

    def wrap_model(self, wrapper: Callable) -> "BlockKernel":
        """Copy the kernel with another model, of the same sites."""
        kernel = copy(self)
        kernel._bind(wrapper(self._model))
        return kernel

    def get_constrain_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Return the identity, since values are constrained."""
        return identity

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_sample_fn": None}


def split(model_kwargs: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate a model's keyword arguments from the values of the other blocks' sites."""
    kwargs = dict(model_kwargs or {})
    values = kwargs.pop(GIBBS_SITES_KWARG, {})
    return kwargs, values


def start_inclusion(z: dict[str, Any]) -> dict[str, Any]:
    """Make the inclusion probabilities of the first state: the spikes, 0 where these are shared.

    Their type is that of a step's, never weak, or else MCMC compiles its second step anew.
    """
    inclusion = {}
    for name, spike in z.items():
        pair = name.removesuffix("_spike")
        # other sites may have such names, but are no integers
        if f"{pair}_slab" in z and pair != name and jnp.issubdtype(spike.dtype, jnp.integer):
            slab = z[f"{pair}_slab"]
            start = spike if spike.shape == slab.shape else jnp.zeros(slab.shape)
            inclusion[pair] = jnp.asarray(start, float)
    return inclusion
