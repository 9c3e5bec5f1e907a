# SPDX-License-Identifier: Apache-2.0
"""Where fits of latent functions start, and where proposals do."""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.search import choose, climb_coordinates
from numpyro_spikeslab.fitting.function_updates import (
    Terms,
    condition,
    log_joint,
    terms_of,
    with_kernels,
)
from numpyro_spikeslab.fitting.m_step import modes_of, tallies_of
from numpyro_spikeslab.fitting.posterior import (
    Data,
    FunctionFactors,
    Posterior,
    Spec,
    function_prior,
    strong,
    view_at,
    with_roles,
)
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reading.view import View, by_task

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

    Sites with a role are at their modes given these.

    :param posterior: has the kernels' parameters and the values of all other sites.
    :param sigma2: noise variances.
    """
    at = view_at(spec, data, posterior)
    assert posterior.functions is not None and spec.parameters is not None
    prior, theta = function_prior(spec, data, at), posterior.functions.theta
    probs = jnp.where(jnp.any(W != 0, axis=0), 0.9, 0.0) * jnp.ones_like(W)
    scale = jnp.sqrt(sigma2 / spec.form.num_obs)[:, None] * jnp.ones_like(W)
    weights = PairedMeanField(probs, W / 0.9, scale)
    zero = jnp.zeros_like(prior.mean)
    variances = prior.variances(theta)
    functions = FunctionFactors(
        alpha=zero,
        h=zero,
        mean=prior.mean,
        var=variances,
        kl=jnp.zeros(len(theta)),
        prior_var=variances,
        theta=theta,
        step=STEP * jnp.asarray(spec.parameters.is_free, theta.dtype),
    )
    tallies = tallies_of(spec, data, at, weights, at.count * sigma2)
    values = modes_of(spec, at, posterior.values, tallies)
    posterior = Posterior(weights, functions, values, None)
    return with_roles(spec, data, at, values), posterior


class Sight(NamedTuple):
    """What the functions of a start are fitted to.

    - **from_tasks** - whether that is the tasks; else ``phi``, seen with noise of a hundredth of
      its power.
    - **phi** - values of the functions.
    """

    from_tasks: Any
    phi: Float[Array, "M N"]


@partial(jax.jit, static_argnums=0)
def start(
    spec: Spec,
    data: Data,
    posterior: Posterior,
    W: Float[Array, "Q M"],
    sigma2: Float[Array, " Q"],
    sight: Sight,
) -> Posterior:
    """Given weights, and functions with kernels that fit what is seen; a zero column of ``W`` is
    switched off.

    :param sigma2: noise variances.
    """
    at, posterior = start_at_prior(spec, data, posterior, W, sigma2)
    prior = function_prior(spec, data, at)
    from_tasks, phi = sight
    power = jnp.mean((phi - prior.mean) ** 2, axis=1)
    used = jnp.any(posterior.weights.probs > 0, axis=0) & (from_tasks | (power > 0))

    def fit_kernel(m, posterior):
        functions = posterior.functions
        alpha = jnp.full_like(phi[m], 100 / jnp.where(power[m] > 0, power[m], 1))
        seen, told = Terms(m, alpha, alpha * phi[m]), terms_of(at, posterior, m)
        terms = choose(from_tasks, told, seen)

        step = functions.step[m]
        end, last = climb_coordinates(
            lambda x, _: log_joint(prior, terms, x),
            functions.theta[m],
            jnp.where(from_tasks, step, jnp.sign(step)),
            rounds=jnp.where(from_tasks, 1, 5),
        )
        step = jnp.where(from_tasks, end.step, step)
        return condition(prior, posterior, terms, end.x, step, last.known_at(end))

    def visit(m, posterior):
        return jax.lax.cond(used[m], fit_kernel, lambda m, p: p, m, posterior)

    return strong(with_kernels(spec, jax.lax.fori_loop(0, len(phi), visit, posterior)))


def power(at: View) -> Float[Array, " Q"]:
    """Mean square of each task over its observed entries, never zero.

    That of a task without observations, or with nothing but zeros, is the mean of all.
    """
    Q = at.sigma2.size
    num = by_task(at.relative, Q, at.layout)
    squares = by_task(at.relative * at.Y**2, Q, at.layout)
    mean = jnp.sum(squares) / jnp.maximum(jnp.sum(num), 1)
    own = squares / jnp.where(num > 0, num, 1)
    return jnp.where(squares > 0, own, jnp.where(mean > 0, mean, 1))


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def start_alone(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """All functions switched off."""
    variances = power(view_at(spec, data, posterior))
    W = jnp.zeros_like(posterior.weights.probs)
    return strong(start_at_prior(spec, data, posterior, W, variances)[1])


def start_random(spec: Spec, data: Data, posterior: Posterior, key: Array) -> Posterior:
    """Random weights and the functions that follow from them.

    The noise starts small: a large one would switch off most functions at once.
    """
    W, sigma2 = _random_weights(spec, data, posterior, key)
    if data.layout is not None:
        return _started_at_prior(spec, data, posterior, W, sigma2)
    sight = Sight(jnp.array(True), jnp.zeros_like(data.mean))
    return start(spec, data, posterior, W, sigma2, sight)


@partial(jax.jit, static_argnums=0)
def _started_at_prior(spec: Spec, data: Data, posterior: Posterior, W: Any, sigma2: Any) -> Any:
    return strong(start_at_prior(spec, data, posterior, W, sigma2)[1])


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _random_weights(spec: Spec, data: Data, posterior: Posterior, key: Array) -> tuple[Any, Any]:
    variances = power(view_at(spec, data, posterior))
    Q, M = spec.form.shape
    W = jnp.sqrt(variances / M)[:, None] * random.normal(key, (Q, M), variances.dtype)
    return W, 0.1 * variances


def start_at(
    spec: Spec, data: Data, posterior: Posterior, W: Any, phi: Any, sigma2: Any
) -> Posterior:
    """Given weights and functions; see :func:`start`."""
    return start(spec, data, posterior, W, sigma2, Sight(jnp.array(False), phi))


def start_svd(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """The leading singular vectors of the tasks, scaled to unit power, missing entries zero."""
    W, phi, sigma2 = _singular_vectors(spec, data, posterior)
    return start_at(spec, data, posterior, W, phi, sigma2)


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _singular_vectors(spec: Spec, data: Data, posterior: Posterior) -> tuple[Any, Any, Any]:
    at = view_at(spec, data, posterior)
    M, N = data.mean.shape
    variances = power(at)
    sd = jnp.sqrt(variances)
    seen = jnp.where(at.relative > 0, at.Y, 0)
    U, S, V = jnp.linalg.svd(seen / sd, full_matrices=False)
    rank = min(M, S.size)
    phi = jnp.zeros((M, N)).at[:rank].set(U[:, :rank].T * jnp.sqrt(N))
    W = jnp.zeros((sd.size, M)).at[:, :rank].set(sd[:, None] * V[:rank].T * S[:rank] / jnp.sqrt(N))
    return W, phi + data.mean, 0.1 * variances
