# SPDX-License-Identifier: Apache-2.0
"""Where fits of latent functions start, and where proposals do."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.search import climb_coordinates
from numpyro_spikeslab.fitting.functions import (
    Terms,
    condition,
    log_joint,
    update_function_plain,
    with_kernels,
)
from numpyro_spikeslab.fitting.posterior import (
    Data,
    FunctionFactors,
    Posterior,
    Spec,
    function_prior,
    view_at,
    with_roles,
)
from numpyro_spikeslab.reading.functions import FunctionPrior
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import tally

STEP = 0.3
"""First step of the search over the logs of kernel parameters."""


def start_at_prior(
    spec: Spec,
    data: Data,
    posterior: Posterior,
    W: Float[Array, "Q M"],
    sigma2: Float[Array, " Q"],
) -> tuple[View, Posterior]:
    """Given weights and functions at their prior; a zero column of ``W`` is switched off.

    Noise, inclusion and slab scales that are not known follow from the weights.

    :param posterior: has the kernels' parameters and the values of all other sites.
    :param sigma2: noise variances.
    """
    at = view_at(spec, data, posterior.values)
    assert posterior.functions is not None and spec.parameters is not None
    prior, theta = function_prior(spec, data, at), posterior.functions.theta
    probs = jnp.where(jnp.any(W != 0, axis=0), 0.9, 0.0) * jnp.ones_like(W)
    scale = jnp.sqrt(sigma2 / at.Y.shape[0])[:, None] * jnp.ones_like(W)
    weights = PairedMeanField(probs, W / 0.9, scale)
    zero = jnp.zeros_like(prior.mean)
    functions = FunctionFactors(
        alpha=zero,
        h=zero,
        mean=prior.mean,
        var=prior.variances(theta),
        kl=jnp.zeros(len(theta)),
        theta=theta,
        step=STEP * spec.parameters.is_free.astype(theta.dtype),
    )
    values = _values_of_start(spec, data, posterior.values, weights, sigma2)
    posterior = Posterior(weights, functions, values, None)
    return with_roles(spec, data, at, values), posterior


def _values_of_start(spec, data, values, weights, sigma2) -> dict[str, Any]:
    """Values of the sites with a role, without their priors."""
    values, second = dict(values), weights.slab_moments[1]
    for role in spec.form.roles:
        value, index = values[role.site], data.indices[role.site]
        if role.part == "noise":
            index = jnp.broadcast_to(index, sigma2.shape)
            sums, count = tally(sigma2, index, value), tally(jnp.ones_like(sigma2), index, value)
            new = jnp.sqrt(sums / jnp.maximum(count, 1))
        elif role.part == "inclusion":
            count = tally(jnp.ones_like(second), index, value)
            new = tally(weights.probs, index, value) / jnp.maximum(count, 1)
            # probabilities of 0 and 1 would stay
            new = jnp.clip(new, 1e-3, 1 - 1e-3)
        else:
            count = jnp.maximum(tally(weights.probs, index, value), 1e-10)
            new = jnp.sqrt(tally(second, index, value) / count)
            new = jnp.where(new > 0, new, value)
        values[role.site] = jnp.asarray(new, jnp.result_type(value))
    return values


def fit_kernels(prior: FunctionPrior, posterior: Posterior, phi: Float[Array, "M N"]) -> Posterior:
    """Fit the kernel of each function that is in use to its row of ``phi``, seen with noise of a
    hundredth of its power."""
    power = jnp.mean((phi - prior.mean) ** 2, axis=1)
    used = jnp.any(posterior.weights.probs > 0, axis=0) & (power > 0)

    def fit_kernel(m, posterior):
        functions = posterior.functions
        alpha = jnp.full_like(phi[m], 100 / power[m])
        terms = Terms(m, alpha, alpha * phi[m])

        def value(theta):
            return log_joint(prior, terms, theta)

        def climb(_, search):
            theta, step = search
            theta, _, step = climb_coordinates(value, theta, value(theta), step)
            return theta, step

        search = (functions.theta[m], jnp.sign(functions.step[m]))
        theta, _ = jax.lax.fori_loop(0, 5, climb, search)
        return condition(prior, posterior, terms, theta, functions.step[m])

    def visit(m, posterior):
        return jax.lax.cond(used[m], fit_kernel, lambda m, p: p, m, posterior)

    return jax.lax.fori_loop(0, len(phi), visit, posterior)


@partial(jax.jit, static_argnums=0)
def start(
    spec: Spec,
    data: Data,
    posterior: Posterior,
    W: Float[Array, "Q M"],
    phi: Float[Array, "M N"],
    sigma2: Float[Array, " Q"],
) -> Posterior:
    """Given weights and functions; a zero column of ``W`` is switched off."""
    at, posterior = start_at_prior(spec, data, posterior, W, sigma2)
    return with_kernels(spec, fit_kernels(function_prior(spec, data, at), posterior, phi))


def power(at: View) -> Float[Array, " Q"]:
    """Mean square of each task over its observed entries, never zero.

    That of a task without observations, or with nothing but zeros, is the mean of all.
    """
    num = jnp.broadcast_to(jnp.sum(at.relative, axis=0), at.sigma2.shape)
    squares = jnp.sum(at.relative * at.Y**2, axis=0)
    mean = jnp.sum(squares) / jnp.maximum(jnp.sum(num), 1)
    own = squares / jnp.where(num > 0, num, 1)
    return jnp.where(squares > 0, own, jnp.where(mean > 0, mean, 1))


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def start_alone(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """All functions switched off."""
    variances = power(view_at(spec, data, posterior.values))
    W = jnp.zeros_like(posterior.weights.probs)
    return start_at_prior(spec, data, posterior, W, variances)[1]


@partial(jax.jit, static_argnums=0)
def start_random(spec: Spec, data: Data, posterior: Posterior, key: Array) -> Posterior:
    """Random weights and the functions that follow from them.

    The noise starts small: a large one would switch off most functions at once.
    """
    variances = power(view_at(spec, data, posterior.values))
    Q, M = spec.form.shape
    W = jnp.sqrt(variances / M)[:, None] * random.normal(key, (Q, M), variances.dtype)
    at, posterior = start_at_prior(spec, data, posterior, W, 0.1 * variances)
    prior = function_prior(spec, data, at)
    posterior = jax.lax.fori_loop(
        0, M, lambda m, p: update_function_plain(prior, at, p, m), posterior
    )
    return with_kernels(spec, posterior)


def start_svd(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """The leading singular vectors of the tasks, scaled to unit power, missing entries zero."""
    W, phi, sigma2 = _singular_vectors(spec, data, posterior)
    return start(spec, data, posterior, W, phi, sigma2)


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _singular_vectors(spec: Spec, data: Data, posterior: Posterior) -> tuple[Any, Any, Any]:
    at = view_at(spec, data, posterior.values)
    M, N = data.mean.shape
    variances = power(at)
    sd = jnp.sqrt(variances)
    seen = jnp.where(at.relative > 0, at.Y, 0)
    U, S, V = jnp.linalg.svd(seen / sd, full_matrices=False)
    rank = min(M, S.size)
    phi = jnp.zeros((M, N)).at[:rank].set(U[:, :rank].T * jnp.sqrt(N))
    W = jnp.zeros((sd.size, M)).at[:, :rank].set(sd[:, None] * V[:rank].T * S[:rank] / jnp.sqrt(N))
    return W, phi + data.mean, 0.1 * variances
