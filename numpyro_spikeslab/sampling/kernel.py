# SPDX-License-Identifier: Apache-2.0
"""What the kernels of this package share, as blocks of :class:`numpyro.infer.Gibbs`."""

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any
import weakref
import zlib

from jaxtyping import Array, Bool
import numpy as np

import jax
from jax import random
from jax.custom_batching import custom_vmap
import jax.numpy as jnp

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity, is_prng_key

from numpyro_spikeslab.precision import full_precision
from numpyro_spikeslab.reading.form import base_of, is_latent
from numpyro_spikeslab.reading.model_run import abstract_trace, run_model
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.reader import Reader, Reading


class BlockKernel(MCMCKernel):
    """A kernel that draws some sites of a model exactly, given the values of all others.

    Its values are constrained, and nothing that depends on the other blocks is kept.
    """

    sample_field = "z"

    def __init__(self, model: Callable) -> None:
        self._model = model
        self._user = type(self).__name__
        self._reader = Reader(model, self._user)
        # MCMC takes this for the sign of an initialised kernel
        self._sample_fn: Callable | None = None
        self._compiled_in: list[tuple[weakref.ref, int]] = []

    @property
    def model(self) -> Callable:
        return self._model

    def _split(
        self, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> tuple[tuple, dict[str, Any], dict[str, Any]]:
        """Arguments of the model, and the values of the sites that other blocks hold."""
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
        :raises ValueError: for unknown names, other shapes, values that are not finite or not in
            the support of their site in ``init_params``, if a prior without ``init_params`` cannot
            be drawn from, if the model has other latent sites that no block holds, and for arrays
            that were changed in place after a chain had been compiled for them.
        """
        args, kwargs, values = self._split(model_args, model_kwargs)
        self._refuse_changed(args, kwargs)
        sites = self._own_sites(args, kwargs, values)
        self._sample_fn = self._sample_one
        # within a compiled function nothing is concrete, and options of a part are refused
        once = are_concrete((rng_key, jnp.zeros(())))
        prior = partial(compiled, self._prior(sites, args, kwargs, values), once=once)
        init_one = partial(self._init_one, prior, num_warmup)
        single = is_prng_key(rng_key)
        _check_init_params(self._user, init_params, sites, () if single else rng_key.shape[:1])
        if init_params and once:
            self._refuse_outside(init_params, single, args, kwargs, values)
        if single:
            return init_one(rng_key, init_params)
        return jax.vmap(init_one)(rng_key, init_params)

    @abstractmethod
    def _own_sites(
        self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sites that the kernel draws.

        :param values: those of the sites that other blocks hold.
        """

    @abstractmethod
    def _drawable(self, reading: Reading, values: dict[str, Any]) -> frozenset[str]:
        """Names of the sites that the kernel can draw, of a model as it was read."""

    def _check_drawable(self, reading: Reading, values: dict[str, Any], z: dict[str, Any]) -> None:
        """What :meth:`init` has found in data that it saw must be known of data that are traced."""
        if unknown := sorted(z.keys() - self._drawable(reading, values)):
            raise ValueError(
                f"{self._user}: the data are traced, as with `jit_model_args=True` or within jit "
                f"and vmap, and without their values it is not known what the sites {unknown} do. "
                "Leave out `jit_model_args`, or bind the arrays that say so, such as features, "
                "indices and masks, to the model: `functools.partial(model, X)`."
            )

    def _latent_shapes(
        self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the latent sites that no other block holds."""
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
        """Draws the sites from their prior, given a key."""

        def prior(key):
            # sites with a value take no keys, which would cost time to compile
            model = handlers.seed(handlers.substitute(self._model, data=values), key)
            with handlers.block():
                trace = handlers.trace(model).get_trace(*args, **kwargs)
            return {name: jnp.asarray(trace[name]["value"]) for name in sites}

        return prior

    def _refuse_changed(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Refuse arrays that were changed in place: MCMC knows arguments by identity, and goes
        on with what it has compiled for them, data included. A chain that goes on from the state
        of another does not come here."""
        known = {id(ref()): content for ref, content in self._compiled_in if ref() is not None}
        for x in jax.tree.leaves((args, kwargs)):
            if id(x) in known and _check_sum(x) != known[id(x)]:
                raise ValueError(
                    f"{self._user}: an array of shape {np.shape(x)} was changed in place after a "
                    "chain had been compiled for it, expected data that stay as they are. Give "
                    "`run` a copy, `X.copy()`, which is an array of its own."
                )

    def _refuse_outside(self, init_params, single, args, kwargs, values) -> None:
        """Refuse starts that are not in the supports of their sites."""

        def inside(start):
            run = run_model(self._model, args, kwargs, {**values, **start})
            return {k: jnp.all(run[k]["fn"].support(run[k]["value"])) for k in start}

        found = compiled(inside if single else jax.vmap(inside), init_params, once=True)
        if not are_concrete(found):
            return
        outside = [name for name, is_inside in found.items() if not np.all(is_inside)]
        if outside:
            raise ValueError(
                f"{self._user}: init_params has values of {outside} that are not in the supports "
                "of these sites. Start at a draw from a fitted guide, or leave them out to start "
                "at one from their prior."
            )

    def _init_one(self, prior, num_warmup, rng_key, init_params):
        rng_key, key_prior = random.split(rng_key)
        z = self._from_prior(prior(key_prior), num_warmup)
        z |= {name: jnp.asarray(x, z[name].dtype) for name, x in (init_params or {}).items()}
        return self._start(z, num_warmup, rng_key)

    def _from_prior(self, z: dict[str, Any], num_warmup: int) -> dict[str, Any]:
        """Where to start without ``init_params``, from a draw from the prior."""
        return z

    @abstractmethod
    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> Any:
        """The state at the start."""

    @full_precision
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
        :raises FloatingPointError: when the chain's values, or those of another block, are not
            finite; the message names the sites. Compiled code raises it while it runs, as JAX's own
            ``JaxRuntimeError`` or, under a progress bar, ``ValueError``.
        """
        if not are_concrete(state.rng_key):
            new = _arrays(*self._split(model_args, model_kwargs)[:2])
            known = {id(ref()) for ref, _ in new} | {id(None)}
            self._compiled_in = new + [x for x in self._compiled_in if id(x[0]()) not in known]
        if is_prng_key(state.rng_key):
            return self._sample_one(state, model_args, model_kwargs)
        return jax.vmap(lambda one: self._sample_one(one, model_args, model_kwargs))(state)

    @abstractmethod
    def _sample_one(self, state, model_args, model_kwargs):
        """One sweep of one chain."""

    def postprocess_fn(self, model_args: tuple, model_kwargs: dict[str, Any] | None) -> Callable:
        """Adds the model's deterministic sites to the values."""

        @full_precision
        def postprocess(z):
            args, kwargs, values = self._split(model_args, model_kwargs)
            trace = run_model(self._model, args, kwargs, {**values, **z})
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
        return self.__dict__ | {"_sample_fn": None, "_compiled_in": []}


def _arrays(args: tuple, kwargs: dict[str, Any]) -> list[tuple[weakref.ref, int]]:
    """The arrays that may be changed in place, and check sums of what they hold."""
    names = jax.tree.map(id, (args, tuple(kwargs.items())))
    try:
        hash(names)
    except TypeError:
        # MCMC compiles anew for lists and dicts
        return []
    every = (x for x in jax.tree.leaves((args, kwargs)) if isinstance(x, np.ndarray))
    known = (x for x in every if x.dtype != object)
    return [(weakref.ref(x), _check_sum(x)) for x in known]


def _check_sum(x: np.ndarray) -> int:
    # in the order in which it is stored, so that it need not be copied
    return zlib.crc32(np.asarray(x).ravel(order="K").view(np.uint8))


def start_inclusion(z: dict[str, Any]) -> dict[str, Any]:
    """The inclusion probabilities that stand in a state before the first sweep.

    Of the type that ``draw_pairs`` gives them, without the
    weak type of a Python number: or else MCMC compiles its second step anew.
    """
    names = [name.removesuffix("_spike") for name in z if name.endswith("_spike")]
    pairs = {k: (z[f"{k}_spike"], z[f"{k}_slab"]) for k in names if f"{k}_slab" in z}
    # a user's own sites may have such names, but spikes are whole numbers
    pairs = {k: x for k, x in pairs.items() if jnp.issubdtype(x[0].dtype, jnp.integer)}
    # a group of weights has a single spike, and they are not known here
    return {
        name: jnp.asarray(spike if spike.shape == slab.shape else jnp.zeros(slab.shape), float)
        for name, (spike, slab) in pairs.items()
    }


def complete(reading: Reading, values: dict[str, Any]) -> dict[str, Any]:
    """Values of all other sites: a model's params, which no block holds, stay where they start."""
    return reading.generic | reading.params | values


def require_finite(user: str, values: dict[str, Any]) -> Bool[Array, ""]:
    """Raise where a chain has reached values that are not finite, at the time when it does.

    Nothing but a disjunction of flags is computed in each step; a callback runs only where they are
    up, also under ``vmap``, which would else run both branches of a condition. It is a pure one: an
    effect of a step would take each call of it, as with a progress bar, through Python.

    :param values: by what they are called in the message.
    :return: whether a chain is lost; never true, for it raises then. What the next step needs has
        to depend on it, or else compiled code leaves the look at the values out.
    """
    known = {k: x for k, x in values.items() if jnp.issubdtype(jnp.result_type(x), jnp.inexact)}
    ends = np.cumsum([jnp.size(x) for x in known.values()]).tolist()
    tell = partial(_tell, user, tuple(known), tuple(ends[:-1]))
    told = jax.ShapeDtypeStruct((), bool)

    @custom_vmap
    def is_lost(bad):
        return jax.lax.cond(
            jnp.any(bad), lambda: jax.pure_callback(tell, told, bad), lambda: jnp.array(False)
        )

    @is_lost.def_vmap
    def _(axis_size, in_batched, bad):
        return is_lost(jnp.any(bad, axis=0)), False

    if not known:
        return jnp.array(False)
    # joined first: an operation for each site takes long to compile where they are many
    return is_lost(~jnp.isfinite(jnp.concatenate([jnp.ravel(x) for x in known.values()])))


def _tell(user: str, names: tuple[str, ...], ends: tuple[int, ...], bad: Bool[Array, " K"]) -> None:
    # by numpy, because computations of JAX in a callback may wait for each other
    parts = np.split(np.asarray(bad), ends)
    found = [name for name, part in zip(names, parts, strict=True) if part.any()]
    raise FloatingPointError(
        f"{user}: the chain has reached values of {found} that are not finite. Computations in "
        "double precision (numpyro.enable_x64()), centred columns, data of unit scale and tighter "
        "priors help."
    )


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
        if are_concrete(value) and not np.all(np.isfinite(value)):
            raise ValueError(
                f"{user}: init_params[{name!r}] has values that are not finite. Start at a draw "
                "from a fitted guide, or leave the site out to start at one from its prior."
            )
