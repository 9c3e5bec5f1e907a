# SPDX-License-Identifier: Apache-2.0
"""Exact draws of latent functions, and of all else in the multi-task model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Array

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.observations import Sparse
from numpyro_spikeslab.models.primitives import weights
from numpyro_spikeslab.reading.checks import check_updates
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import InclusionRole
from numpyro_spikeslab.reading.sites import find_function_sites, functions_of, is_latent
from numpyro_spikeslab.sampling.function_sweep import draw_functions
from numpyro_spikeslab.sampling.kernel import BlockKernel, start_inclusion
from numpyro_spikeslab.sampling.latent_step import LatentStep, draw_rows, recruit
from numpyro_spikeslab.sampling.split_noise import split_noise
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.priors import is_drawable


def latent_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Name the latent functions of a trace and the parameters of their kernels.

    A selector for :class:`numpyro.infer.Gibbs`, as in the example of :class:`LatentGibbs`.

    :param trace: a trace of the model.
    :return: names of the latent sites that :func:`~numpyro_spikeslab.latent_functions` made; none
        without such functions.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp
        >>> from numpyro import handlers
        >>> from tinygp import kernels
        >>> import numpyro_spikeslab as nss
        >>> with handlers.trace() as trace, handlers.seed(rng_seed=0):
        ...     phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)] * 2, jnp.arange(5.0))
        >>> nss.latent_sites(trace)
        ('phi', 'phi_scale')
    """
    names = [
        site
        for name in find_function_sites(trace)
        for site in (name, *functions_of(trace[name]).parameters.sites)
    ]
    return tuple(name for name in names if is_latent(trace, name))


class LatentGibbsState(NamedTuple):
    """State of a :class:`LatentGibbs`.

    - **z** - dict of the current values of the kernel's sites.
    - **inclusion_probabilities** - where the weights are among them, the conditional probability
      with which each spike was drawn at the start of the step; else empty.
    - **num_accelerated** - how many accelerated steps of the warm-up are left.
    - **rng_key** - random key for the next step.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    num_accelerated: Array
    rng_key: Array


class LatentGibbs(BlockKernel):
    """Draws latent functions jointly with the parameters of their kernels.

    Each function is drawn in turn. First slice sampling draws the parameters of its kernel with its
    values integrated out; given the values, the parameters would barely move. Then its values are
    drawn from their Gaussian conditional. The parameters may have any prior with positive support.
    Those that the model conditions on keep their values.

    With the weights among its sites it also draws weights of other functions while one or two
    functions are integrated out, because data determine weights and functions only together. For
    each function, a step decomposes ten to fifteen matrices of N by N and, where covariances are
    dense, one of 2N by 2N. If rounding makes a decomposition fail, as may happen in single
    precision, that update is rejected.

    As a block of :class:`numpyro.infer.Gibbs` it draws the sites it is given: the functions and the
    parameters of their kernels (:func:`~numpyro_spikeslab.latent_sites`) and, optionally, the
    weights, the noise scales (one for each task or one for all), the slab scales, both under any
    prior of positive numbers, and the inclusion probabilities under any prior on [0, 1]. With the
    probabilities it draws the concentration of their Beta prior, such as ``alpha`` of a buffet
    prior, if that is a site. Alone, ``LatentGibbs(model, accelerate=0.25)``, it samples models
    without other sites, such as :func:`numpyro_spikeslab.models.mtmkl`; it then moves weights and
    functions together, and draws slab scales with the excluded slabs integrated out. White
    functions also give up tasks, or take them up, together with the noise scale of the task, if
    each task has its own.

    For observations given as a sparse array, functions must be ``"white"``. Then a step draws the
    functions jointly at each row, without the moves of weights, lengths and signs; begin such
    chains at a fit.

    :param model: a model whose one observed site is Normal, or has another likelihood with
        auxiliary variables (:doc:`/likelihoods`), of the predictor ``offset + W phi``, with weights
        of shape (Q, M) from :func:`~numpyro_spikeslab.spike_slab` and M functions from
        :func:`~numpyro_spikeslab.latent_functions`.
    :param rescale: whether a function and its weights also move along ``(c * phi, w / c)``, which
        leaves the data unchanged, in turn with the slab scales, and change their signs where the
        prior mean is zero. Both moves are exact. They need the weights among the sites.
    :param accelerate: share of the warm-up, from its start, whose steps give an idle function to a
        badly explained task; the exact sampler would wait until a draw from the prior fits a task
        (Zhang and Perez-Cruz, 2017). These steps do not leave the posterior invariant. They need
        the weights among the sites. Chains without ``init_params`` then start with all functions
        idle. Chains that start at a fit need no acceleration.
    :raises ValueError: if ``accelerate`` is not in [0, 1]. When initialised, if the model does not
        fit, the data are bad, or there are sites that the kernel cannot draw; the message names the
        site and the remedy.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC, NUTS, Gibbs
        >>> from tinygp import kernels
        >>> import numpyro_spikeslab as nss
        >>> model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2)
        >>> X = jnp.linspace(0, 4, 20)
        >>> Y = jnp.stack([jnp.sin(X), -jnp.sin(X), jnp.cos(X)], axis=1)
        >>> kernel = Gibbs([
        ...     (nss.PairedGibbs(model), nss.paired_sites),
        ...     (nss.LatentGibbs(model), nss.latent_sites),
        ...     (NUTS(model), None),
        ... ])
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=500)
        >>> mcmc.run(jax.random.key(0), X, Y)               # doctest: +SKIP
    """

    def __init__(self, model: Callable, *, rescale: bool = True, accelerate: float = 0.0) -> None:
        super().__init__(model)
        if not 0 <= accelerate <= 1:
            raise bad("LatentGibbs: accelerate", accelerate, "a share of the warm-up, in [0, 1]")
        self._rescale = rescale
        self._accelerate = accelerate

    def _own_sites(self, reading: Reading, values: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        check_functions(reading, self._user)
        sites = super()._own_sites(reading, values)
        form, who, names = reading.form, "LatentGibbs: sites", list(sites)
        (pair,) = form.pairs
        if form.functions not in sites:
            functions = f"the latent functions {form.functions!r} among them"
            raise bad(who, names, functions, "Give it `latent_sites`.")
        if (pair.spike in sites) != (pair.slab in sites):
            raise bad(who, names, f"{pair.spike!r} and {pair.slab!r} both or neither")
        if self._accelerate and pair.spike not in sites:
            weights_too = f"the weights {pair.name!r} among them, which acceleration changes"
            raise bad(who, names, weights_too, "Give it these too, or set accelerate=0.")
        return sites

    def _drawable(self, reading: Reading, values: dict[str, Any]) -> frozenset[str]:
        form = reading.form
        sites = form.functions, *form.kernels, *form.pairs[0].shapes, *reading.indices
        inclusion = {role.site for role in form.roles_of(InclusionRole)}
        return frozenset(map(str, sites)).union(
            () if inclusion & {*values} else form.concentrations
        )

    def _read(self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]) -> Reading:
        # as latent sites, whichever block draws the weights
        reading = super()._read(args, kwargs, {})
        form = reading.form
        remedy = (
            "Counts may be NegativeBinomial2. Or draw with "
            "Gibbs([(PairedGibbs(model), paired_sites), (NUTS(model), None)]), which mixes slowly."
        )
        check_updates("LatentGibbs", form, reading.functions, remedy)
        if form.functions is None:
            raise ValueError(
                "LatentGibbs: the location of the observations is not affine in latent functions, "
                "or their noise depends on these. It must be `offset + W @ phi` or its transpose "
                "with one set of weights W of shape (Q, M) from spike_slab, without `groups`, and "
                "one set of M functions phi from latent_functions. For other models use NUTS."
                f"{reading.if_traced}"
            )
        return reading

    def _num_accelerated(self, num_warmup: int) -> int:
        return round(self._accelerate * num_warmup)

    def _from_prior(self, z: dict[str, Any], num_warmup: int) -> dict[str, Any]:
        if not self._num_accelerated(num_warmup):
            return z
        # all functions are idle: each is to be given to a task
        return z | {f"{k}_spike": jnp.zeros_like(z[f"{k}_spike"]) for k in start_inclusion(z)}

    def _start(self, reading, values, z, num_warmup, rng_key) -> LatentGibbsState:
        num_steps = jnp.asarray(self._num_accelerated(num_warmup))
        return LatentGibbsState(z, start_inclusion(z), num_steps, rng_key)

    def _step(self, reading: Reading, values: dict[str, Any], state: Any) -> LatentGibbsState:
        rng_key, key_weights, key_recruit, *keys = random.split(state.rng_key, 7)
        key_functions, key_split, key_numbers, key_auxiliaries = keys
        # auxiliary variables are drawn afresh in each step, and not seen by other blocks
        step = LatentStep.of(reading, values, state.z).with_auxiliaries(key_auxiliaries)
        (spikes, slabs), inclusion = step.weights(), state.inclusion_probabilities
        if step.owns_weights:
            spikes, slabs, inclusion = step.draw_weights(key_weights, (spikes, slabs))
            if self._accelerate:
                spikes, slabs = jax.lax.cond(
                    state.num_accelerated > 0,
                    lambda: recruit(key_recruit, step.at, step.phi, spikes, slabs),
                    lambda: (spikes, slabs),
                )
        draw = step.start(weights(spikes, slabs))
        if isinstance(step.at.layout, Sparse):
            draw = draw._replace(phi=draw_rows(key_functions, step.at, draw.phi, draw.weights))
        else:
            fixed = step.fixed(self._rescale)
            draw = draw_functions(key_functions, fixed, draw)
            draw, noise = split_noise(key_split, fixed, draw)
            step = replace(step, values=step.values | noise)
        new = step.finish(key_numbers, (spikes, slabs), draw)
        z = {name: new[name].reshape(x.shape).astype(x.dtype) for name, x in state.z.items()}
        num_accelerated = jnp.maximum(state.num_accelerated - 1, 0)
        return LatentGibbsState(z, inclusion, num_accelerated, rng_key)


def check_functions(reading: Reading, user: str) -> None:
    """Check that the functions and the parameters of their kernels can be drawn."""
    functions, form, trace = reading.functions, reading.form, reading.trace.sites
    functions.check_parameters(user)
    for name in functions.parameters.sites:
        if name not in trace or trace[name]["type"] != "sample":
            raise ValueError(
                f"{user}: the kernel parameter {name!r} of {form.functions!r} is not a sample "
                "site; it has been reparameterised or set. Leave it latent, or condition on it."
            )
        site = trace[name]
        if not (site["is_observed"] or is_drawable(site)):
            raise ValueError(
                f"{user}: the prior of the kernel parameter {name!r} must be a distribution of "
                f"positive numbers, neither masked nor scaled, got {type(site['fn']).__name__}."
            )
        if not site["is_observed"] and name not in form.kernels:
            raise ValueError(
                f"{user}: the kernel parameter {name!r} is shared with something else than the "
                f"functions {form.functions!r}, so it cannot be drawn with them. Condition on it."
            )
    functions.check(user)
