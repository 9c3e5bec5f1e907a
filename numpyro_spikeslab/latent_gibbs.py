# SPDX-License-Identifier: Apache-2.0
"""Exact draws of latent functions, and of all else in the multi-task model."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.collapsed import Draw, Moves, draw_functions, slice_sample
from numpyro_spikeslab.gibbs import BlockKernel, start_inclusion, sweep_tasks
from numpyro_spikeslab.mixture import Mixture, View, check_functions, view
from numpyro_spikeslab.multitask import Hyper, Problem
from numpyro_spikeslab.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.structure import abstract_trace, find_function_sites, is_latent, unwrap
from numpyro_spikeslab.tasks import gather, kernel_of, scatter


def function_prior(mixture: Mixture, at: View, own: frozenset[str]) -> tuple[Problem, Any]:
    """The arrays of :func:`draw_functions`, and the logs of the kernels' parameters.

    :param own: names of the parameters that are to be drawn.
    """
    functions = at.functions
    current = {name: at.trace[name]["value"] for name in functions.site_names}
    locs, scales = dict(current), {name: jnp.ones_like(x) for name, x in current.items()}
    for name in own & set(current):
        base, _ = unwrap(at.trace[name]["fn"])
        locs[name] = jnp.broadcast_to(jnp.exp(base.loc), current[name].shape)
        scales[name] = jnp.broadcast_to(jnp.exp(base.scale), current[name].shape)
    # a parameter whose prior has the scale log(1) = 0 stays what it is
    hyper = Hyper(theta_loc=gather(functions, locs), theta_scale=gather(functions, scales))
    mu = functions.mean_at(functions.X)
    prob = Problem(at.Y, at.precision, kernel_of(functions), mu, hyper)
    return prob, gather(functions, current)


# Numbers


def draw_noise(
    key: Array,
    site: dict[str, Any],
    residual: Float[Array, "N Q"],
    weight: Float[Array, "N Q"],
) -> Any:
    """Draw the noise scales, one for each task or one for all.

    :param site: that of the scales, with their current values.
    :param weight: how often each observation counts.
    """
    counts, squares = jnp.sum(weight, axis=0), jnp.sum(weight * residual**2, axis=0)
    if jnp.size(site["value"]) == 1:
        counts, squares = jnp.sum(counts, keepdims=True), jnp.sum(squares, keepdims=True)
    return _draw_scales(key, site, counts, squares)


def draw_slab_scales(
    key: Array,
    mixture: Mixture,
    at: View,
    values: dict[str, Any],
    slabs: Float[Array, "Q M"],
    counted: Float[Array, "Q M"],
) -> tuple[dict[str, Any], Float[Array, "Q M"]]:
    """Draw the slab scales.

    :param values: the current ones, by the names of their sites.
    :param counted: 1 for the slabs that are known. The others have their prior, so scales can be
        drawn without them, and they after the scales.
    :return: the new scales, and the prior variances of all slabs.
    """
    new, scale = dict(values), jnp.ravel(jnp.sqrt(at.prior.variance))
    keys = random.split(key, len(values))
    for key_one, (name, value) in zip(keys, values.items(), strict=True):
        site, index = at.trace[name] | {"value": value}, mixture.slabs[name]
        counts, squares = (_tally(site, index, x) for x in (counted, counted * slabs**2))
        new[name] = _draw_scales(key_one, site, counts, squares)
        scale = jnp.where(
            index < value.size, jnp.ravel(new[name]).at[index].get(mode="clip"), scale
        )
    return new, jnp.square(scale).reshape(slabs.shape)


def draw_inclusion(
    key: Array, site: dict[str, Any], index: Any, spikes: Float[Array, "Q M"]
) -> Any:
    """Draw the inclusion probabilities.

    :param index: which probability each spike has.
    """
    included, excluded = (_tally(site, index, x) for x in (spikes, 1 - spikes))
    log_prior = _log_prior(site)

    def log_density(logit):
        # the derivative of the probability is the product of it and its complement
        likelihood = (included + 1) * jax.nn.log_sigmoid(logit)
        likelihood += (excluded + 1) * jax.nn.log_sigmoid(-logit)
        return log_prior(jax.nn.sigmoid(logit)) + likelihood

    x = jnp.ravel(site["value"])
    logit = jnp.log(x) - jnp.log1p(-x)
    found, _ = slice_sample(key, log_density, logit, log_density(logit))
    return jax.nn.sigmoid(found).reshape(jnp.shape(site["value"]))


def _draw_scales(key: Array, site: dict[str, Any], counts: Any, squares: Any) -> Any:
    """Standard deviations of as many centred Normal numbers, with that sum of squares."""
    log_prior = _log_prior(site)

    def log_density(log_x):
        return (
            log_prior(jnp.exp(log_x)) + log_x - counts * log_x - 0.5 * squares * jnp.exp(-2 * log_x)
        )

    log_x = jnp.log(jnp.ravel(site["value"]))
    found, _ = slice_sample(key, log_density, log_x, log_density(log_x))
    return jnp.exp(found).reshape(jnp.shape(site["value"]))


def _tally(site: dict[str, Any], index: Any, x: Any) -> Any:
    """Sums of ``x`` over the weights that take the same entry of a site."""
    return jnp.zeros(jnp.size(site["value"]), x.dtype).at[index].add(jnp.ravel(x), mode="drop")


def _log_prior(site: dict[str, Any]) -> Callable[[Any], Any]:
    """Log density of each entry of a site."""
    base, _ = unwrap(site["fn"])
    shape = jnp.shape(site["value"])

    def log_prior(x):
        x = x.reshape(shape)
        log_density = jnp.where(base.support(x), base.log_prob(x), -jnp.inf)
        return jnp.ravel(jnp.broadcast_to(log_density, shape))

    return log_prior


def recruit(
    key: Array,
    at: View,
    phi: Float[Array, "M N"],
    spikes: Float[Array, "Q M"],
    slabs: Float[Array, "Q M"],
) -> tuple[Float[Array, "Q M"], Float[Array, "Q M"]]:
    """Give a function that no task uses to a task, drawn by the share that is left unexplained.

    The function's next draw then comes from the residual of this task. No step of a Markov chain
    with the right distribution: for warm-up only.
    """
    idle = jnp.sum(spikes, axis=0) == 0
    m = jnp.argmax(idle)
    residual = at.Y - phi.T @ jnp.where(spikes > 0, slabs, 0).T
    total, left = (jnp.sum(at.weight * x**2, axis=0) for x in (at.Y, residual))
    q = random.categorical(key, jnp.log(left / jnp.where(total > 0, total, 1)))
    slab = jnp.where(idle[m], jnp.sqrt(at.prior.variance[q, m]), slabs[q, m])
    spike = jnp.where(idle[m], 1, spikes[q, m])
    return spikes.at[q, m].set(spike), slabs.at[q, m].set(slab)


# The kernel


def latent_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the latent functions of a trace and of the parameters of their kernels.

    A selector for :class:`numpyro.infer.Gibbs`.

    :param trace: a trace of the model.
    :return: names of the sample sites that :func:`~numpyro_spikeslab.latent_functions` made.

    **Example**

    .. doctest::

        >>> from numpyro.infer import NUTS, Gibbs
        >>> import numpyro_spikeslab as nss
        >>> def kernel(model):
        ...     return Gibbs([
        ...         (nss.PairedGibbs(model), nss.paired_sites),
        ...         (nss.LatentGibbs(model), nss.latent_sites),
        ...         (NUTS(model), None),
        ...     ])
    """
    names = [
        site
        for name in find_function_sites(trace)
        for site in (name, *trace[name]["infer"][FUNCTIONS_MARK].site_names)
    ]
    return tuple(name for name in names if is_latent(trace, name))


class LatentGibbsState(NamedTuple):
    """
    - **z** - dict of the current values of the kernel's sites.
    - **inclusion_probabilities** - where the weights are among them, the conditional probability
      with which each spike was drawn at the start of the step, as in
      :class:`~numpyro_spikeslab.PairedGibbsState`; else empty.
    - **num_accelerated** - how many accelerated steps of the warm-up are left.
    - **rng_key** - random key for the next step.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    num_accelerated: Array
    rng_key: Array


class LatentGibbs(BlockKernel):
    """Draws latent functions jointly with the parameters of their kernels.

    Each function in turn: with its values integrated out, the parameters of its kernel are drawn by
    slice sampling; then its values from their Gaussian conditional. Given the values the
    parameters would barely move.

    With the weights among its sites it also draws weights of other functions while a function, or
    two, are integrated out; for weights and functions are known only together, and given the one
    the other barely moves. It lets tasks join or leave a function that few of them use, and moves
    the length of each function's weights. For each function, a step decomposes ten to twenty
    matrices of N by N and, where covariances are dense, one of 2N by 2N.

    As a block of :class:`numpyro.infer.Gibbs` it draws the sites it is given. These are the
    functions and the parameters of their kernels (:func:`~numpyro_spikeslab.latent_sites`), and may
    be more: the weights, the noise scales (HalfNormal prior, one for each task or one for all), the
    inclusion probabilities (Beta) and the slab scales (HalfNormal). Alone it samples models that
    have no other sites, see :func:`~numpyro_spikeslab.mtmkl_kernel`. There is nothing to tune.
    Parameters of kernels that the model conditions on stay what they are.

    :param model: a model whose one observed Normal site has the location ``offset + W phi``, with
        weights of shape (Q, M) from :func:`~numpyro_spikeslab.spike_slab` and M functions from
        :func:`~numpyro_spikeslab.latent_functions`.
    :param rescale: where the weights are among the sites, whether a function and its weights also
        move along ``(c * phi, w / c)``, a change that the data do not see, in turn with the slab
        scales, and change their signs where the prior mean is zero. Both are exact.
    :param accelerate: share of the warm-up, from its start, in each step of which one function that
        no task uses is given to a task that is explained badly, where the exact sampler would wait
        for a draw from the prior to fit one (Zhang and Perez-Cruz, 2017). These steps leave no
        distribution invariant, which is why they are confined to the warm-up. 0 leaves them out.
        It takes the weights among the sites. Chains without ``init_params`` then start with no
        function in use, so that all are given away one after the other; chains that start at a fit
        need no acceleration.
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
        >>> mcmc = MCMC(kernel, num_warmup=20, num_samples=10, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, Y)
        >>> mcmc.get_samples()["phi"].shape
        (10, 2, 20)
    """

    def __init__(self, model: Callable, *, rescale: bool = True, accelerate: float = 0.0) -> None:
        super().__init__(model)
        if not 0 <= accelerate <= 1:
            raise ValueError(
                f"LatentGibbs: `accelerate` is a share of the warm-up, in [0, 1], got {accelerate}."
            )
        self._rescale = rescale
        self._accelerate = accelerate

    def _own_sites(
        self, args: tuple, kwargs: dict, values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        mixture = self._mixture(args, kwargs)
        check_functions(mixture, self._model, args, kwargs, self._user)
        trace = abstract_trace(self._model, args, kwargs)
        own = [name for name in trace if is_latent(trace, name) and name not in values]
        pair = (mixture.pair.spike, mixture.pair.slab)
        known = {mixture.name, *mixture.kernel_sites, *pair, *mixture.scalars}
        unknown = [name for name in own if name not in known]
        if unknown:
            kept = [name for name in own if name in known]
            raise ValueError(
                f"LatentGibbs cannot sample the latent sites {unknown}. Leave them to another "
                f"block: Gibbs([(LatentGibbs(model), {kept}), (NUTS(model), None)])."
            )
        if mixture.name not in own:
            raise ValueError(
                f"LatentGibbs needs the latent functions {mixture.name!r} among its sites, got "
                f"{own}. Give it `latent_sites`."
            )
        if len(set(pair) & set(own)) == 1:
            raise ValueError(
                f"LatentGibbs needs both {pair[0]!r} and {pair[1]!r} among its sites or none, got "
                f"{own}."
            )
        if self._accelerate and pair[0] not in own:
            raise ValueError(
                f"LatentGibbs: `accelerate` is {self._accelerate}, but the weights "
                f"{mixture.pair.name!r} that it changes are not among the kernel's sites. Give it "
                "these too, or set accelerate=0."
            )
        return {name: jnp.shape(trace[name]["value"]) for name in own}

    def _mixture(self, args: tuple, kwargs: dict) -> Mixture:
        mixture = self._read_mixture(args, kwargs)
        if mixture is None:
            raise ValueError(
                "LatentGibbs: the location of the observations is not affine in latent functions, "
                "or their noise depends on these. It must be "
                "`offset + W @ phi` or its transpose with one set of weights W of shape (Q, M) "
                "from spike_slab and one set of M functions phi from latent_functions. For other "
                "models use NUTS."
            )
        return mixture

    def _num_accelerated(self, z: dict[str, Any], num_warmup: int) -> int:
        return round(self._accelerate * num_warmup) if start_inclusion(z) else 0

    def _from_prior(self, z: dict[str, Any], num_warmup: int) -> dict[str, Any]:
        if not self._num_accelerated(z, num_warmup):
            return z
        # all functions are idle: each is to be given to a task
        return {name: jnp.zeros_like(x) if name.endswith("_spike") else x for name, x in z.items()}

    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> LatentGibbsState:
        num_steps = jnp.asarray(self._num_accelerated(z, num_warmup))
        return LatentGibbsState(z, start_inclusion(z), num_steps, rng_key)

    def _moves(self, mixture: Mixture, at: View, noise: dict[str, Any] | None) -> Moves:
        def draw_slabs(key, slab_scales, weights):
            if not self._rescale:
                return slab_scales, at.prior.variance
            included = (weights != 0).astype(weights.dtype)
            return draw_slab_scales(key, mixture, at, slab_scales, weights, included)

        Q = at.Y.shape[1]
        log_prior = None
        if noise is not None and noise["value"].size == Q:
            of_all = _log_prior(noise)
            log_prior = lambda sigma, q: of_all(jnp.full(Q, sigma))[q]  # noqa: E731
        flip = self._rescale and at.functions.mean is None
        return Moves(at.prior.log_odds, draw_slabs, log_prior, self._rescale, flip)

    def _sample_one(self, state, model_args, model_kwargs):
        args, kwargs, values = self._split(model_args, model_kwargs)
        mixture = self._mixture(args, kwargs)
        pair, model = mixture.pair, self._model
        rng_key, *keys = random.split(state.rng_key, 5)
        z, inclusion = dict(state.z), state.inclusion_probabilities
        owns_weights = pair.spike in z
        if owns_weights:
            drawn, inclusion = sweep_tasks(keys[0], mixture, model, args, kwargs, values | z, z)
            z |= drawn
        at = view(mixture, model, args, kwargs, values | z)
        spikes, slabs = (
            jnp.asarray((values | z)[name], at.Y.dtype).reshape(at.prior.variance.shape)
            for name in (pair.spike, pair.slab)
        )
        phi = at.trace[mixture.name]["value"]
        if owns_weights and self._accelerate:
            spikes, slabs = jax.lax.cond(
                state.num_accelerated > 0,
                lambda: recruit(keys[1], at, phi, spikes, slabs),
                lambda: (spikes, slabs),
            )
        prob, theta = function_prior(mixture, at, frozenset(z))
        slab_scales = {name: z[name] for name in mixture.slabs if name in z}
        noise = at.trace[str(mixture.noise)] if mixture.noise in z else None
        sigma = jnp.broadcast_to(1.0 if noise is None else noise["value"].ravel(), at.Y.shape[1:])
        draw = draw_functions(
            keys[2],
            prob,
            Draw(phi, theta, jnp.where(spikes > 0, slabs, 0), slab_scales, sigma),
            self._moves(mixture, at, noise) if owns_weights else None,
        )
        parameters = scatter(at.functions, draw.theta)
        new = {name: parameters[name] for name in mixture.kernel_sites}
        key_slabs, key_excluded, key_noise, *keys = random.split(keys[3], 3 + len(mixture.scalars))
        if owns_weights:
            spikes = (draw.weights != 0).astype(spikes.dtype)
        slabs = jnp.where(spikes > 0, draw.weights, slabs)
        known = spikes if owns_weights else jnp.ones_like(spikes)
        slab_scales, variance = draw_slab_scales(
            key_slabs, mixture, at, draw.slab_scales, slabs, known
        )
        excluded = jnp.sqrt(variance) * random.normal(key_excluded, slabs.shape, slabs.dtype)
        new |= slab_scales
        new |= {
            mixture.name: draw.phi,
            pair.spike: spikes,
            pair.slab: jnp.where(spikes > 0, slabs, excluded),
        }
        if mixture.noise is not None and noise is not None:
            residual = at.Y - draw.phi.T @ draw.weights.T
            current = noise | {"value": draw.noise[: noise["value"].size]}
            new[mixture.noise] = draw_noise(key_noise, current, residual, at.weight)
        for key, (name, index) in zip(keys, mixture.inclusions.items(), strict=False):
            if name in z:
                new[name] = draw_inclusion(key, at.trace[name], index, spikes)
        z = {name: new[name].reshape(x.shape).astype(x.dtype) for name, x in state.z.items()}
        left = jnp.maximum(state.num_accelerated - 1, 0)
        return LatentGibbsState(z, inclusion, left, rng_key)


def mtmkl_kernel(model: Callable, *, rescale: bool = True, accelerate: float = 0.25) -> LatentGibbs:
    """A kernel that samples the whole of :func:`numpyro_spikeslab.models.mtmkl`.

    One :class:`LatentGibbs` for the weights, the functions with the parameters of their kernels,
    the noise, the inclusion probability and the slab scale. Unlike the composite of
    :class:`~numpyro_spikeslab.PairedGibbs`, :class:`LatentGibbs` and NUTS, which serves models with
    other sites too, it can move weights and functions together, and it draws slab scales without
    the slabs that are excluded. Chains start apart from each other and find the functions in the
    accelerated part of the warm-up, or they start at a fit, see :meth:`PairedGuide.to_init_params
    <numpyro_spikeslab.PairedGuide.to_init_params>`.

    :param model: the model.
    :param rescale: see :class:`LatentGibbs`.
    :param accelerate: share of the warm-up that is accelerated, see :class:`LatentGibbs`; 0 leaves
        the acceleration out.
    :return: the kernel, for :class:`~numpyro.infer.MCMC` with any ``chain_method``.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp
        >>> from numpyro.infer import MCMC
        >>> from tinygp import kernels
        >>> import numpyro_spikeslab as nss
        >>> model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2)
        >>> X = jnp.linspace(0, 4, 20)
        >>> Y = jnp.stack([jnp.sin(X), -jnp.sin(X), jnp.cos(X)], axis=1)
        >>> mcmc = MCMC(nss.mtmkl_kernel(model), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), X, Y, extra_fields=("inclusion_probabilities.W",))
        >>> mcmc.get_samples()["W"].shape
        (50, 3, 2)
    """
    return LatentGibbs(model, rescale=rescale, accelerate=accelerate)
