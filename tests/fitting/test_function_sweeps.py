# SPDX-License-Identifier: Apache-2.0
"""Sweeps over latent functions, against dense algebra and finite differences."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats
from task_problems import (
    PRIORS,
    SMOOTH,
    M,
    N,
    dense_moments,
    model_of,
    observations,
    problem,
    small,
    started,
)
from tinygp import kernels
from tinygp.kernels import quasisep

import jax
import jax.numpy as jnp

from numpyro import handlers

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.quasisep import Quasisep
from numpyro_spikeslab.fitting.function_updates import (
    is_active,
    moments,
    terms_at,
    terms_of,
    to_prior,
    update_function_plain,
    visit_blocks,
)
from numpyro_spikeslab.fitting.tasks import left_of

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.slow
def test_a_function_is_the_conditional_of_the_joint_gaussian():
    found = small()
    P, linear = dense_moments(found)
    m = 1
    block = slice(m * N, (m + 1) * N)
    K = found.covariance(m)
    mean = np.asarray(found.functions.mean).ravel().copy()
    mean[block] = 0
    precision = P[block, block] + np.linalg.inv(K)
    mu = found.data.mean[m]
    h = (linear - P @ mean)[block] + np.linalg.solve(K, np.asarray(mu))
    terms = terms_of(found.at, found.posterior, m)
    covariance = found.prior.covariance(m, found.functions.theta[m])
    q = gp.condition(covariance, terms.alpha, terms.h, mu)
    np.testing.assert_allclose(q.mean, np.linalg.solve(precision, h), atol=1e-6)
    np.testing.assert_allclose(q.variance, np.diag(np.linalg.inv(precision)), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("complete", [True, False])
def test_terms_of_all_functions_are_those_of_each(complete):
    found = small()
    at = found.at
    if complete:
        at = at._replace(relative=jnp.linspace(0.5, 2.0, N)[:, None])
    mean, weights = found.functions.mean, found.posterior.weights
    none = jnp.zeros_like(mean)
    apart = terms_at(at, weights, at.relative * at.Y, none)
    left = terms_at(at, weights, left_of(at, 0.5 * mean, weights), 0.5 * mean)
    for m, terms in product(range(M), (apart, left)):
        one = terms(mean, m)
        for x, y in zip(one, terms_of(at, found.posterior, m), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 8])
def test_blocks_of_functions_are_visited_one_after_the_other(size, monkeypatch):
    monkeypatch.setattr("numpyro_spikeslab.fitting.function_updates.TASK_BLOCK_SIZE", size)
    found = small()
    at, expected = found.at, found.posterior
    assert at.relative.shape[1] > 1
    for m in range(M):
        expected = update_function_plain(found.prior, expected, terms_of(at, expected, m))
    update = partial(update_function_plain, found.prior)
    blocks = jax.jit(lambda at, posterior: visit_blocks(update, at, posterior))
    visited = blocks(at, found.posterior)
    for x, y in zip(visited.functions, expected.functions, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
def test_moments_are_those_of_the_factors():
    # while the kernels are searched for, and where the search rests
    found = started("weak", False)
    for num_steps in (1, 1, 1, 20, 1, 1):
        found, _ = found.run(num_steps)
        prior, functions = found.prior, found.functions
        of_terms = functions.theta, functions.alpha, functions.h
        mean, var, kl, prior_var = moments(prior.parameters, prior.kernel, prior.mean, *of_terms)
        np.testing.assert_allclose(mean, functions.mean, atol=1e-9)
        np.testing.assert_allclose(var, functions.var, atol=1e-9)
        np.testing.assert_allclose(kl, functions.kl, atol=1e-8)
        np.testing.assert_allclose(prior_var[1], np.diag(found.covariance(1)))
    back = to_prior(found.prior, found.posterior, 1).functions
    np.testing.assert_allclose(back.var[1], np.diag(found.covariance(1)))
    np.testing.assert_allclose(back.mean[1], found.data.mean[1])
    assert back.kl[1] == 0.0 and np.any(back.kl[0])


# each of the others compiles its own sweep
QUICK = [("weak", True), ("weak", False)]


@pytest.mark.parametrize(
    ("prior", "plain"),
    [
        pytest.param(x, y, marks=() if (x, y) in QUICK else pytest.mark.exhaustive)
        for x in PRIORS
        for y in (True, False)
    ],
)
def test_the_bound_never_falls(prior, plain):
    found, bounds = started(prior, plain).run(150)
    assert np.all(np.isfinite(bounds)) and np.min(np.diff(bounds)) > -1e-8
    assert bounds[-1] > bounds[0] + 1.0
    np.testing.assert_allclose(found.bound(found.posterior), bounds[-1], rtol=1e-9)
    if prior == "fixed":
        np.testing.assert_allclose(found.functions.theta, np.log(0.8))
        np.testing.assert_allclose(found.at.sigma2, 0.09)
        np.testing.assert_allclose(found.at.prior.variance, 1.44)
        np.testing.assert_allclose(found.at.prior.log_odds, np.log(0.4 / 0.6))


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "with scales"])
def test_the_limit_is_stationary(plain):
    found, _ = started("weak", plain).run(3000)
    functions, weights = found.functions, found.posterior.weights

    @jax.jit
    def along(m, theta, log_t):
        t = jnp.exp(log_t)
        scaled = weights._replace(
            loc=weights.loc.at[:, m].multiply(jnp.sqrt(t)),
            scale=weights.scale.at[:, m].multiply(jnp.sqrt(t)),
        )
        alpha, h = t * functions.alpha[m], jnp.sqrt(t) * functions.h[m]
        posterior = found.posterior._replace(weights=scaled)
        return found.bound(found.with_function(m, functions.theta[m] + theta, alpha, h, posterior))

    active = np.flatnonzero(is_active(found.at, found.posterior))
    assert active.size
    for m in active:
        for path in (lambda e, m=m: along(m, e, 0.0), lambda e, m=m: along(m, 0.0, e)):
            below, at, above = (float(path(e)) for e in (-1e-3, 0.0, 1e-3))
            curvature = below - 2 * at + above
            assert curvature < 0.0
            # nats that a Newton step would gain
            assert (above - below) ** 2 / (8 * abs(curvature)) < 1e-4


@pytest.mark.slow
def test_sweeps_with_scales_arrive_sooner():
    """That is what they are for."""
    gaps = {}
    for plain in (True, False):
        bounds = started("weak", plain).run(150)[1]
        gaps[plain] = bounds[-1] - bounds[20]
    assert gaps[False] < 0.5 * gaps[True]


@pytest.mark.exhaustive
def test_state_space_kernels_give_the_fit_of_matrices():
    args, bounds = observations(30, 5, 3), []
    for kernel in (quasisep.Matern32(1.0), kernels.Matern32(1.0)):
        # which the other does not have
        model = handlers.condition(model_of("weak", [kernel] * 3), {"phi_sigma": jnp.ones(3)})
        found = problem(model, args)
        assert isinstance(found.prior.covariance(0, found.functions.theta[0]), Quasisep) == (
            not bounds
        )
        bounds.append(found.run(20)[1])
    held = 3 * stats.lognorm.logpdf(1.0, 2.0)
    np.testing.assert_allclose(bounds[1] + held, bounds[0], atol=1e-5)


@pytest.mark.slow
def test_a_task_and_a_point_without_observations():
    x, Y = observations()
    Y[:, 1] = np.nan
    Y[3] = np.nan
    with (
        pytest.warns(UserWarning, match="1 tasks .* no observation: 1"),
        pytest.warns(UserWarning, match="1 points .* no observation: 3"),
    ):
        found = problem(model_of("weak", [SMOOTH] * M), (x, Y))
    found, bounds = found.run(12)
    assert np.all(np.isfinite(bounds)) and np.all(np.diff(bounds) > -1e-8)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(found.posterior))
    # of such a task the weights have their prior
    _, loc, scale = found.posterior.weights
    np.testing.assert_allclose(loc[1], 0.0, atol=1e-12)
    np.testing.assert_allclose(scale[1] ** 2, found.at.prior.variance[1], rtol=0.05)
