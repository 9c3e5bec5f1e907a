# SPDX-License-Identifier: Apache-2.0
"""Starts of fits of latent functions, and of their moves."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.observations import Sparse
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.fitting.function_sweeps import visit_functions
from numpyro_spikeslab.fitting.function_updates import Terms, first_step, update_plain
from numpyro_spikeslab.fitting.posterior import Engine, FunctionFactors, Posterior, strong
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reading.view import View


def start_at_prior(
    engine: Engine, posterior: Posterior, W: Float[Array, "Q M"], sigma2: Float[Array, " Q"]
) -> tuple[View, Posterior]:
    """Start from weights, with functions at their prior and sites with a role at their modes.

    A zero column of ``W`` is switched off; all else is that of ``posterior``.
    """
    at = engine.view(posterior)
    prior, theta = engine.function_prior(at), posterior.functions.theta
    probs = jnp.where(jnp.any(W != 0, axis=0), 0.9, 0.0) * jnp.ones_like(W)
    scale = jnp.sqrt(sigma2 / engine.form.num_obs)[:, None] * jnp.ones_like(W)
    weights = PairedMeanField(probs, W / 0.9, scale)
    zero, var = jnp.zeros_like(prior.mean), prior.variances(theta)
    step = first_step(prior.parameters, theta)
    functions = FunctionFactors(zero, zero, prior.mean, var, zero[:, 0], var, theta, step)
    tallies = engine.tallies(at, weights, at.count * sigma2)
    new = engine.modes(at, posterior, tallies)
    values, betas = new.values, new.betas
    return engine.with_roles(at, values), Posterior(weights, functions, values, None, betas=betas)


@jax.jit
def _start(
    engine: Engine, posterior: Posterior, W: Any, sigma2: Any, phi: Any, from_tasks: Any
) -> Posterior:
    """Start with functions that fit the tasks, or ``phi`` with noise of 1/100 of its power."""
    at, posterior = start_at_prior(engine, posterior, W, sigma2)
    if isinstance(engine.layout, Sparse):
        return strong(posterior)
    prior, step = engine.function_prior(at), posterior.functions.step
    power = jnp.mean((phi - prior.mean) ** 2, axis=1)
    used = jnp.any(posterior.weights.probs > 0, axis=0) & (from_tasks | (power > 0))
    alpha = (100 / jnp.where(power > 0, power, 1))[:, None] * jnp.ones_like(phi)

    def with_step(posterior, step):
        return posterior._replace(functions=posterior.functions._replace(step=step))

    def update(posterior, terms):
        m = terms.m
        terms = choose(from_tasks, terms, Terms(m, alpha[m], alpha[m] * phi[m]))
        updated = partial(update_plain, prior, terms=terms, rounds=jnp.where(from_tasks, 1, 5))
        return jax.lax.cond(used[m], updated, lambda p: p, posterior)

    # values determine a kernel better than tasks with random weights: longer and more steps
    posterior = with_step(posterior, jnp.where(from_tasks, step, jnp.sign(step)))
    posterior = visit_functions(update, at, posterior)
    step = jnp.where(from_tasks, posterior.functions.step, step)
    return strong(engine.with_kernels(with_step(posterior, step)))


def start_at(engine: Engine, posterior: Posterior, W: Any, phi: Any, sigma2: Any) -> Posterior:
    """Start from weights, and values of the functions to which the kernels are fitted."""
    return _start(engine, posterior, W, sigma2, phi, jnp.array(False))


def power(at: View) -> Float[Array, " Q"]:
    """Return the mean square of each task; without observations or with zeros alone, of all."""
    num, squares = at.layout.by_task(at.relative), at.squares(at.Y)
    mean = jnp.sum(squares) / jnp.maximum(jnp.sum(num), 1)
    means = squares / jnp.where(num > 0, num, 1)
    return jnp.where(squares > 0, means, jnp.where(mean > 0, mean, 1))


@partial(jax.jit, compiler_options=RUN_ONCE)
def start_alone(engine: Engine, posterior: Posterior) -> Posterior:
    """Start with all functions switched off."""
    variances = power(engine.view(posterior))
    W = jnp.zeros_like(posterior.weights.probs)
    return strong(start_at_prior(engine, posterior, W, variances)[1])


def start_random(engine: Engine, posterior: Posterior, key: Array) -> Posterior:
    """Start from random weights, with the functions that fit the tasks; of entries, at the prior.

    The noise starts small, since a large one would switch off most functions at once.
    """
    W, sigma2 = _random_weights(engine, posterior, key)
    phi = jnp.zeros_like(engine.functions.mean)
    return _start(engine, posterior, W, sigma2, phi, jnp.array(True))


@partial(jax.jit, compiler_options=RUN_ONCE)
def _random_weights(engine: Engine, posterior: Posterior, key: Array) -> tuple[Any, Any]:
    variances = power(engine.view(posterior))
    Q, M = engine.form.shape
    W = jnp.sqrt(variances / M)[:, None] * random.normal(key, (Q, M), variances.dtype)
    return W, 0.1 * variances


def start_svd(engine: Engine, posterior: Posterior) -> Posterior:
    """Start from the leading singular vectors of the tasks, scaled to unit power."""
    W, phi, sigma2 = _singular_vectors(engine, posterior)
    return start_at(engine, posterior, W, phi, sigma2)


@partial(jax.jit, compiler_options=RUN_ONCE)
def _singular_vectors(engine: Engine, posterior: Posterior) -> tuple[Any, Any, Any]:
    """Return weights, functions and noise variances; missing entries count as zero."""
    at = engine.view(posterior)
    M, N = engine.functions.mean.shape
    variances = power(at)
    sd = jnp.sqrt(variances)
    observed = jnp.where(at.relative > 0, at.Y, 0)
    U, S, V = jnp.linalg.svd(observed / sd, full_matrices=False)
    rank = min(M, S.size)
    phi = jnp.zeros((M, N)).at[:rank].set(U[:, :rank].T * jnp.sqrt(N))
    W = jnp.zeros((sd.size, M)).at[:, :rank].set(sd[:, None] * V[:rank].T * S[:rank] / jnp.sqrt(N))
    return W, phi + engine.functions.mean, 0.1 * variances
