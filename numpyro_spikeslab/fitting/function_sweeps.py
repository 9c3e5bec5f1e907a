# SPDX-License-Identifier: Apache-2.0
r"""Sweeps over latent functions and their weights.

:func:`sweep_plain` is the algorithm of the paper's supplement: all functions, then all weights.
:func:`sweep` also updates the scale of each function's weights, and weights after each function.
Both keep the weighted residual :math:`z_{nq} (y_{nq} - \sum_m \langle w_{qm} \rangle \langle
\phi_{mn} \rangle)`. Axes: ``N`` inputs, ``Q`` tasks, ``M`` functions, ``B`` of a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import Expectation, PairedMeanField
from numpyro_spikeslab.algebra.observations import Sparse
from numpyro_spikeslab.algebra.pairs import Prior, coordinates
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.algebra.task_sweeps import TASK_BLOCK_SIZE, triangle
from numpyro_spikeslab.fitting.function_updates import (
    Terms,
    reset_if_better,
    update_plain,
    update_with_scale,
    white_factors,
)
from numpyro_spikeslab.fitting.posterior import Engine, Posterior
from numpyro_spikeslab.reading.view import View

# A function that explains less than this (in nats) returns to its prior or stays as it is.
SILENT = 1e-3
# Passes over all weights at the end of a sweep of functions with order.
LAST_PASSES = 2
# Passes over a row or a column of a sparse table, whose products are computed once.
PASSES = 3


def block_terms(
    at: View, weights: Any, residual: Float[Array, "N Q"], functions: Float[Array, "B N"]
) -> Callable[[Float[Array, "B N"], Any], Terms]:
    """Prepare the terms of some functions, given their present means, while their weights stay."""
    mean, second = weights.mean, weights.slab_moments[1]
    precise, second = (x / at.sigma2[:, None] for x in (mean, second))
    size, linear = mean.shape[1], residual @ precise
    if shared := at.relative.shape[1] == 1:
        alpha, products = at.over_tasks(second), precise.T @ mean
    else:
        # in one pass over `relative`: products with it are bound by memory
        rows, columns, place = triangle(size)
        each = precise[:, rows] * mean[:, columns]
        sums = at.over_tasks(jnp.concatenate([second, each], axis=1))
        alpha, products = sums[:, :size], sums[:, size:][:, place]

    def terms(now, m):
        row = at.relative * products[m] if shared else products[:, m]
        others = jnp.sum(row.at[:, m].set(0) * (now - functions).T, axis=1)
        return Terms(m, alpha[:, m], linear[:, m] + row[:, m] * functions[m] - others)

    return terms


def sweep_plain(
    engine: Engine, at: View, posterior: Posterior, temperature: Any, update: Any = None
) -> tuple[Posterior, Float[Array, " Q"]]:
    """Take the variational EM iteration of the paper; return expected squares of residuals too."""
    update = update or partial(update_plain, engine.function_prior(at))
    posterior = visit_functions(update, at, posterior)
    features = posterior.functions.mean, posterior.functions.var
    weights, squares = at.sweep(features, posterior.weights, Expectation(temperature))
    return posterior._replace(weights=weights), squares


def visit_functions(
    update: Callable[[Posterior, Terms], Posterior], at: View, posterior: Posterior
) -> Posterior:
    """Update all functions in turn while the weights stay.

    If tasks weigh the points differently, the products of weights differ from point to point;
    then they are made for one block of functions at a time.
    """

    def visit_block(posterior, residual, functions, start=0, first=0):
        # functions `start` and on, which had these means at the time of the residual
        size = len(functions)
        weights = jax.tree.map(lambda x: _cut(x, start, size, 1), posterior.weights)
        terms = block_terms(at, weights, residual, functions)

        def visit(j, posterior):
            mean = _cut(posterior.functions.mean, start, size)
            return update(posterior, terms(mean, j)._replace(m=start + j))

        return jax.lax.fori_loop(first, size, visit, posterior)

    before = posterior.functions.mean
    if at.relative.shape[1] == 1:
        # no product with the functions: none is in the residual
        return visit_block(posterior, at.relative * at.Y, jnp.zeros_like(before))
    M = len(before)
    size = min(TASK_BLOCK_SIZE, M)

    def visit_next(k, carry):
        posterior, residual = carry
        # the last block may begin among functions that have been visited
        start = jnp.minimum(k * size, M - size)
        before = _cut(posterior.functions.mean, start, size)
        posterior = visit_block(posterior, residual, before, start, k * size - start)
        change = _cut(posterior.functions.mean, start, size) - before
        weights = _cut(posterior.weights.mean, start, size, 1)
        return posterior, residual - at.relative * (change.T @ weights.T)

    begin = posterior, at.relative * at.residual(posterior.weights.mean, before)
    return jax.lax.fori_loop(0, -(-M // size), visit_next, begin)[0]


def _cut(x: Any, start: Any, size: int, axis: int = 0) -> Any:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def sweep(
    engine: Engine, base: View, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Float[Array, " Q"]]:
    """Update each function with its scale and kernel, then weights; return expected squares too.

    After a white function, its own weights alone are updated: then a sweep costs O(NQM). White
    functions at rest are not visited. After any other function, all weights are updated.
    """
    prior = engine.function_prior(base)
    at = engine.with_roles(base, posterior.values)
    functions = posterior.functions
    M, changed = len(functions.kl), {engine.profiled}
    # at their prior, with a mean of zero
    resting = ~jnp.any((functions.alpha != 0) | (functions.mean != 0), axis=1)
    order = jnp.argsort(resting, stable=True) if prior.is_white else jnp.arange(M)
    number = jnp.sum(~resting) if prior.is_white else M

    def visit(k, carry):
        m = order[k]
        posterior, residual = carry
        before = _barrier(posterior.weights.mean[:, m], posterior.functions.mean[m])
        posterior = _update_function(engine, prior, at, carry, m)
        here = engine.with_roles(at, posterior.values, changed)
        if prior.is_white:
            return _update_weights(here, (posterior, residual), m, before, temperature)
        residual = residual + _change(here, posterior, m, before)
        return pass_weights(1, here, (posterior, residual))

    def pass_weights(number, at, carry):
        def visit(j, carry):
            m = j % M
            before = carry[0].weights.mean[:, m], carry[0].functions.mean[m]
            return _update_weights(at, carry, m, before, temperature)

        return jax.lax.fori_loop(0, number * M, visit, carry)

    begin = posterior, base.relative * base.residual(posterior.weights.mean, functions.mean)
    posterior, residual = jax.lax.fori_loop(0, number, visit, begin)
    at = engine.with_roles(at, posterior.values, changed)
    if prior.is_white:
        # weights of functions at rest depend on prior variances alone
        squares = at.over_points(posterior.functions.var).T
        zero = jnp.zeros_like(posterior.weights.probs)
        new = _weights_given(at, slice(None), squares, zero, temperature)
        posterior = posterior._replace(weights=choose(resting, new, posterior.weights))
    else:
        posterior, _ = pass_weights(LAST_PASSES, at, (posterior, residual))
    functions = posterior.functions
    # computed anew, since rounding errors of the visits add up
    features = functions.mean, functions.var
    return posterior, base.expected_squares(features, posterior.weights)


def _update_function(engine, prior, at, carry, m) -> Posterior:
    """Update a function, or try to return it to its prior if it explains nothing."""
    posterior, residual = carry
    mean = posterior.functions.mean[m][None]
    weights: Any = jax.tree.map(lambda x: _barrier(x[:, m])[0][:, None], posterior.weights)
    terms = block_terms(at, weights, residual, mean)(mean, 0)._replace(m=m)
    power = explained(at, at.over_points(mean**2).T, weights)[0]
    return jax.lax.cond(
        power < SILENT,
        lambda p: reset_if_better(prior, p, terms),
        lambda p: update_with_scale(engine, prior, at, p, terms),
        posterior,
    )


def _update_weights(at, carry, m, before, temperature) -> tuple[Posterior, Any]:
    """Update the weights (eq. 7) of a function that was ``before`` at the time of the residual."""
    posterior, residual = carry
    functions = posterior.functions
    w, phi = before
    mean, var = _barrier(functions.mean[m], functions.var[m])
    linear = mean @ residual + w * at.over_points(mean * phi)
    new = _weights_given(at, m, at.over_points(mean**2 + var), linear, temperature)
    weights = jax.tree.map(lambda x, y: x.at[:, m].set(y), posterior.weights, new)
    posterior = posterior._replace(weights=weights)
    return posterior, residual + _change(at, posterior, m, before)


def _change(at: View, posterior: Posterior, m: Any, before: tuple[Any, Any]) -> Any:
    """Return the change of the residual with the weights and the mean of a function."""
    w, phi = before
    new, mean = _barrier(posterior.weights.mean[:, m], posterior.functions.mean[m])
    return at.relative * (phi[:, None] * w - mean[:, None] * new)


def _weights_given(at: View, m: Any, squares: Any, linear: Any, temperature: Any) -> Any:
    """Return ``q`` of the weights of one function, or of several if ``m`` is a slice."""
    prior = Prior(at.prior.log_odds[:, m], at.prior.variance[:, m])
    tau = (1 / at.sigma2).reshape((-1,) + (1,) * (prior.log_odds.ndim - 1))
    return PairedMeanField.of(coordinates(squares, tau, prior).given(tau * linear), temperature)


def sweep_entries(
    at: View, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Float[Array, " Q"]]:
    """Update white functions at all rows of a sparse table (supplement, 1.3), then the weights of
    all columns; return expected squares too."""
    assert isinstance(at.layout, Sparse)
    functions, weights = posterior.functions, posterior.weights
    M, N = functions.mean.shape
    features = weights.mean, weights.variance, 1 / at.sigma2

    def block(sums, phi):
        squares = jnp.diagonal(sums.G, axis1=1, axis2=2)
        alpha = squares + sums.c

        def visit(j, phi):
            m = j % M
            h = sums.b[:, m] - jnp.sum(sums.G[:, m] * phi, axis=1) + squares[:, m] * phi[:, m]
            return phi.at[:, m].set(h / (1 + alpha[:, m]))

        return jax.lax.fori_loop(0, PASSES * M, visit, phi), alpha

    data = at.Y, at.relative
    sides = over_blocks(at.layout.by_rows, N, features, data, block, functions.mean.T)
    functions = white_factors(functions, *(x.T for x in sides))
    moments = functions.mean, functions.var
    current = weights, 1 / at.sigma2, at.prior, Expectation(temperature)
    weights, squares = at.layout.sweep(data, moments, *current, passes=PASSES)
    return posterior._replace(functions=functions, weights=weights), squares


def _barrier(*arrays: Any) -> Any:
    """Keep XLA from recomputing these for each entry of their outer product."""
    return jax.lax.optimization_barrier(arrays)


def explained(at: View, squares: Float[Array, "#Q M"], weights: Any) -> Float[Array, " M"]:
    """Compute the power of each feature relative to the noise from its sums of squares."""
    return jnp.sum(weights.mean**2 * squares / at.sigma2[:, None], axis=0)


@jax.jit
def in_use(engine: Engine, posterior: Posterior) -> Bool[Array, " M"]:
    """Return which functions some task includes and explain more than a nat."""
    at = engine.view(posterior)
    squares = at.over_points(posterior.functions.mean**2).T
    power = explained(at, squares, posterior.weights)
    return (jnp.max(posterior.weights.probs, axis=0) > 0.5) & (power > 1.0)


@jax.jit
def gains_without(engine: Engine, posterior: Posterior) -> Float[Array, " M"]:
    """Return the gain of the exact bound when one function is removed and all others stay.

    The residual grows by ``<w> phi``. The divergences of the function and of its weights go, up to
    that of spikes at zero.
    """
    at = engine.view(posterior)
    phi, paired = posterior.functions, posterior.weights
    W = paired.mean
    squares, var = at.over_points(phi.mean**2).T, at.over_points(phi.var).T
    cross = at.layout.over_points(at.relative * at.residual(W, phi.mean), phi.mean).T
    growth = 2 * W * cross + W**2 * squares - paired.product_variance(squares, var)
    cost = jax.vmap(lambda q, *prior: q.divergence(Prior(*prior)), in_axes=1)
    excluded = paired._replace(probs=jnp.zeros_like(W))
    saved = cost(paired, *at.prior) - cost(excluded, *at.prior) + phi.kl
    return saved - 0.5 * jnp.sum(growth / at.sigma2[:, None], axis=0)
