# SPDX-License-Identifier: Apache-2.0
"""Sweeps over latent functions, against dense algebra and finite differences."""

from functools import partial

import numpy as np
import pytest
from truth.function_models import white
from truth.task_problems import (
    SMOOTH,
    M,
    N,
    Problem,
    dense_moments,
    model_of,
    observations,
    problem,
    small,
    started,
)

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import Expectation
from numpyro_spikeslab.fitting import function_sweeps
from numpyro_spikeslab.fitting.function_sweeps import (
    LAST_PASSES,
    block_terms,
    in_use,
    visit_functions,
)
from numpyro_spikeslab.fitting.function_updates import switch_off, update_plain, update_with_scale

pytestmark = pytest.mark.usefixtures("x64")


def terms_of(at, posterior, m):
    """Terms of one function, from the residual of all."""
    mean, weights = posterior.functions.mean, posterior.weights
    return block_terms(at, weights, at.relative * at.residual(weights.mean, mean), mean)(mean, m)


def test_terms_are_the_conditional_of_the_joint_gaussian():
    fit = small()
    mean, shared = fit.functions.mean, jnp.linspace(0.5, 2.0, N)[:, None]
    for at in (fit.at, fit.at._replace(relative=shared)):
        P, linear = dense_moments(fit, at)
        # functions may have moved since the residual was computed
        for before in (jnp.zeros_like(mean), 0.5 * mean, mean):
            residual = at.relative * at.residual(fit.posterior.weights.mean, before)
            terms = block_terms(at, fit.posterior.weights, residual, before)
            for m in range(M):
                block = slice(m * N, (m + 1) * N)
                _, alpha, h = terms(mean, m)
                np.testing.assert_allclose(np.diag(alpha), P[block, block], atol=1e-9)
                others = np.asarray(mean.at[m].set(0)).ravel()
                np.testing.assert_allclose(h, (linear - P @ others)[block], atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_plain_sweeps_visit_one_function_after_the_other_in_any_blocks(size, monkeypatch):
    monkeypatch.setattr(function_sweeps, "TASK_BLOCK_SIZE", size)
    fit = small()
    at, expected = fit.at, fit.posterior
    assert at.relative.shape[1] > 1
    for m in range(M):
        expected = update_plain(fit.prior, expected, terms_of(at, expected, m))
    update = partial(update_plain, fit.prior)
    visited = jax.jit(partial(visit_functions, update))(at, fit.posterior)
    for x, y in zip(visited.functions, expected.functions, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8)


def one_by_one(fit: Problem):
    """A sweep with products of the functions: each function, then its own weights if functions are
    white, else all."""
    base, order = fit.at, jnp.arange(len(fit.functions.kl))

    def pass_weights(posterior, order):
        at = fit.engine.with_roles(base, posterior.values)
        features = posterior.functions.mean[order], posterior.functions.var[order]
        prior, weights = jax.tree.map(lambda x: x[:, order], (at.prior, posterior.weights))
        at = at._replace(prior=prior)
        return at.sweep(features, weights, Expectation(), at.sums(*features))[0]

    @jax.jit
    def visit(posterior, m):
        at = fit.engine.with_roles(base, posterior.values)
        terms = terms_of(at, posterior, m)
        posterior = update_with_scale(fit.engine, fit.prior, at, posterior, terms)
        if not fit.engine.functions.is_white:
            return posterior._replace(weights=pass_weights(posterior, order))
        # a pass in which this function is the first
        new = pass_weights(posterior, jnp.roll(order, -m))
        new = jax.tree.map(lambda x, y: x.at[:, m].set(y[:, 0]), posterior.weights, new)
        return posterior._replace(weights=new)

    posterior = fit.posterior
    for m in order:
        posterior = visit(posterior, m)
    for _ in range(0 if fit.engine.functions.is_white else LAST_PASSES):
        posterior = posterior._replace(weights=pass_weights(posterior, order))
    return posterior


@pytest.mark.parametrize(
    ("start", "prior"),
    [
        (small, "weak"),
        (small, "flat"),
        (partial(white, 2), "weak"),
        (partial(white, 2), "own inclusion"),
    ],
)
def test_sweeps_with_scales_visit_functions_and_their_weights_in_turn(start, prior):
    fit = start(prior)
    sweep = jax.jit(function_sweeps.sweep)
    swept, squares = sweep(fit.engine, fit.at, fit.posterior, 1.0)
    expected = one_by_one(fit)
    for x, y in zip(jax.tree.leaves(swept), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-7, atol=1e-9)
    at = fit.engine.with_roles(fit.at, swept.values)
    sums = at.sums(swept.functions.mean, swept.functions.var)
    np.testing.assert_allclose(squares, sums.squares(swept.weights), rtol=1e-9)


def test_a_white_function_at_rest_stays_and_its_weights_follow_the_prior():
    fit = white(2)
    off = switch_off(fit.posterior, jnp.array([False, True, False]), fit.engine.functions.mean)
    sweep = jax.jit(function_sweeps.sweep)
    swept, _ = sweep(fit.engine, fit.at, off, 1.0)
    np.testing.assert_array_equal(swept.functions.mean[1], 0)
    np.testing.assert_array_equal(swept.functions.kl[1], 0)
    assert not np.any(swept.weights.loc[:, 1])
    # a pass over all weights leaves these as they are
    at = fit.engine.with_roles(fit.at, swept.values)
    features = swept.functions.mean, swept.functions.var
    passed, _ = at.sweep(features, swept.weights, Expectation())
    for x, y in zip(passed, swept.weights, strict=True):
        np.testing.assert_allclose(x[:, 1], y[:, 1], rtol=1e-10)


def test_a_function_without_weights_has_the_most_probable_length_scale():
    """Else fits that have dropped functions of other length scales would be compared by these."""
    fit = problem(model_of("weak", [SMOOTH] * M), observations())
    off = switch_off(fit.posterior, jnp.array([False, True]), fit.engine.functions.mean)
    fit, bounds = fit._replace(posterior=off).run(30)
    assert not np.any(fit.functions.mean[1]) and np.min(np.diff(bounds)) > -1e-8
    below, at, above = (
        float(fit.prior.log_density(1, fit.functions.theta[1] + e)) for e in (-0.1, 0.0, 0.1)
    )
    assert max(below, above) < at and abs(above - below) < 0.1 * (2 * at - above - below)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "with scales"])
def test_the_bound_never_falls_and_its_limit_is_stationary(plain):
    fit, bounds = started("weak", plain).run(3000)
    assert np.all(np.isfinite(bounds)) and np.min(np.diff(bounds)) > -1e-8
    assert bounds[-1] > bounds[0] + 1.0
    np.testing.assert_allclose(fit.bound(fit.posterior), bounds[-1], rtol=1e-9)
    functions, weights = fit.functions, fit.posterior.weights

    @jax.jit
    def along(m, theta, log_t):
        t = jnp.exp(log_t)
        scaled = weights._replace(
            loc=weights.loc.at[:, m].multiply(jnp.sqrt(t)),
            scale=weights.scale.at[:, m].multiply(jnp.sqrt(t)),
        )
        alpha, h = t * functions.alpha[m], jnp.sqrt(t) * functions.h[m]
        posterior = fit.posterior._replace(weights=scaled)
        return fit.bound(fit.with_function(m, functions.theta[m] + theta, alpha, h, posterior))

    active = np.flatnonzero(in_use(fit.engine, fit.posterior))
    assert active.size
    for m in active:
        for path in (lambda e, m=m: along(m, e, 0.0), lambda e, m=m: along(m, 0.0, e)):
            below, at, above = (float(path(e)) for e in (-1e-3, 0.0, 1e-3))
            curvature = below - 2 * at + above
            assert curvature < 0.0
            # nats that a Newton step would gain
            assert (above - below) ** 2 / (8 * abs(curvature)) < 1e-4


def test_a_task_and_a_point_without_observations():
    x, Y = observations()
    Y[:, 1] = np.nan
    Y[3] = np.nan
    fit, bounds = problem(model_of("weak", [SMOOTH] * M), (x, Y)).run(12)
    assert np.all(np.isfinite(bounds)) and np.all(np.diff(bounds) > -1e-8)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(fit.posterior))
    # of such a task the weights have their prior
    _, loc, scale = fit.posterior.weights
    np.testing.assert_allclose(loc[1], 0.0, atol=1e-12)
    np.testing.assert_allclose(scale[1] ** 2, fit.at.prior.variance[1], rtol=0.05)
