# SPDX-License-Identifier: Apache-2.0
"""The multi-task model on arrays, against dense algebra and finite differences."""

import numpy as np
import pytest
from tinygp.kernels import quasisep

import jax
from jax import random
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro_spikeslab import latent, multitask

pytestmark = pytest.mark.usefixtures("x64")

PRIORS = {
    "flat": multitask.Hyper(),
    "weak": multitask.Hyper(
        noise=2.0, slab=1.5, included=2.0, excluded=3.0, theta_loc=0.1, theta_scale=0.8
    ),
    "shared noise": multitask.Hyper(noise=2.0, shared_noise=True),
    "own inclusion": multitask.Hyper(included=2.0, excluded=3.0, shared_inclusion=False),
    "fixed": multitask.Hyper(
        fixed_noise=np.full(6, 0.3), fixed_slab=1.2, fixed_inclusion=0.4, theta_scale=0.0
    ),
}


def squared_exponential(squared_distance, theta):
    return jnp.exp(-0.5 * squared_distance * jnp.exp(-2 * theta[0]))


def matern(x, theta):
    return latent.Quasisep.from_kernel(quasisep.Matern32(jnp.exp(theta[0])), x)


def dense_matern(x, theta):
    return quasisep.Matern32(jnp.exp(theta[0]))(x, x)


def white(ones, theta):
    return latent.Diagonal(ones)


def observations(N, Q, M, seed):
    rng = np.random.default_rng(seed)
    x = np.linspace(0, 3, N)
    f = np.stack([np.sin(2 * x), np.cos(3 * x + 1), x - 1.5][:M], 1)
    W = rng.normal(size=(Q, M)) * (rng.uniform(size=(Q, M)) < 0.7)
    Y = f @ W.T + 0.2 * rng.normal(size=(N, Q))
    Y[rng.uniform(size=Y.shape) < 0.2] = np.nan
    return jnp.asarray(x), Y, 0.3 * rng.normal(size=(M, N))


def make_problem(N=7, Q=6, M=2, seed=0, hyper=None, kernel=None):
    x, Y, mu = observations(N, Q, M, seed)
    if kernel is None:
        kernel = Partial(squared_exponential, (x[:, None] - x) ** 2)
    prob = multitask.problem(Y, kernel, M, mu, hyper)
    return prob, multitask.start_random(random.key(seed), prob, jnp.zeros((M, 1)))


@pytest.fixture(scope="module")
def small():
    """A problem and its state after two sweeps, which is optimal for nothing."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    prob, state = make_problem()
    state, _ = multitask.run(prob, state, 2, multitask.sweep_plain)
    jax.config.update("jax_enable_x64", before)
    return prob, state


def dense_moments(prob, state):
    """Precision and linear term of all function values together, from the N Q observations."""
    N, Q = prob.Y.shape
    M = state.kl.size
    W, spread = np.array(state.W), np.array(state.W2 - state.W**2)
    tau = (np.array(prob.Z) / np.array(state.sigma2)).ravel()
    design = np.zeros((N, Q, M, N))
    for n in range(N):
        design[n, :, :, n] = W
    design = design.reshape(N * Q, M * N)
    P = design.T @ (tau[:, None] * design)
    P += np.diag(np.einsum("nq,qm->mn", tau.reshape(N, Q), spread).ravel())
    return P, design.T @ (tau * np.array(prob.Y).ravel())


def test_function_is_the_conditional_of_the_joint_gaussian(small):
    prob, state = small
    N = prob.Y.shape[0]
    P, linear = dense_moments(prob, state)
    block = slice(N, 2 * N)
    K = np.array(multitask.covariance(prob, 1, state.theta[1]).K) + 1e-9 * np.eye(N)
    mean = np.array(state.mean).ravel().copy()
    mean[block] = 0
    precision = P[block, block] + np.linalg.inv(K)
    h = (linear - P @ mean)[block] + np.linalg.solve(K, np.array(prob.mu[1]))
    alpha, site = multitask.sites(prob, state, 1)
    q = latent.condition(latent.Dense(jnp.asarray(K)), alpha, site, prob.mu[1])
    np.testing.assert_allclose(q.mean, np.linalg.solve(precision, h), atol=1e-6)
    np.testing.assert_allclose(q.variance, np.diag(np.linalg.inv(precision)), atol=1e-6)


def test_bound_agrees_with_dense_expectations(small):
    prob, state = small
    M, N = state.mean.shape
    P, linear = dense_moments(prob, state)
    mean = np.array(state.mean).ravel()
    second = np.outer(mean, mean)
    kl = 0.0
    for m in range(M):
        block = slice(m * N, (m + 1) * N)
        K = np.array(multitask.covariance(prob, m, state.theta[m]).K)
        a = np.sqrt(np.array(state.alpha[m]))
        B = np.eye(N) + a[:, None] * K * a
        S = K - (K * a) @ np.linalg.solve(B, a[:, None] * K)
        second[block, block] += S
        K = K + 1e-9 * np.eye(N)
        d = mean[block] - np.array(prob.mu[m])
        kl += 0.5 * (np.trace(np.linalg.solve(K, S)) + d @ np.linalg.solve(K, d) - N)
        kl += 0.5 * np.linalg.slogdet(B)[1]
    tau = np.array(prob.Z) / np.array(state.sigma2)
    fit = 0.5 * np.sum(np.array(prob.Z) * np.log(tau / (2 * np.pi) + 1e-300))
    fit += -0.5 * (np.sum(tau * np.array(prob.Y) ** 2) - 2 * linear @ mean + np.sum(P * second))
    g, pi = np.array(state.gamma), np.array(state.pi)
    gauss = (state.mu**2 + state.v) / state.sigma_w2 - 1 - jnp.log(state.v / state.sigma_w2)
    pair = g * np.log(g / pi) + (1 - g) * np.log((1 - g) / (1 - pi)) + 0.5 * g * np.array(gauss)
    np.testing.assert_allclose(multitask.bound(prob, state), fit - kl - pair.sum(), rtol=1e-6)


def slope(f, eps=1e-4):
    return float((f(eps) - f(-eps)) / (2 * eps))


def test_weights_are_stationary(small):
    prob, state = small
    state = multitask.update_weights(multitask.gram(prob, state), state)
    bound = jax.jit(lambda s: multitask.bound(prob, s))
    for q in range(prob.Y.shape[1]):
        at = (q, state.kl.size - 1)
        logit = jax.scipy.special.logit(state.gamma[at])
        paths = [
            lambda e, at=at, u=logit: dict(gamma=state.gamma.at[at].set(jax.nn.sigmoid(u + e))),
            lambda e, at=at: dict(mu=state.mu.at[at].add(e)),
            lambda e, at=at: dict(v=state.v.at[at].multiply(jnp.exp(e))),
        ]
        for path in paths:
            assert abs(slope(lambda e, path=path: bound(state._replace(**path(e))))) < 1e-4


@pytest.mark.parametrize("name", ["flat", "weak", "shared noise", "own inclusion"])
def test_hyperparameters_are_stationary(small, name):
    prob, state = small
    prob = prob._replace(hyper=multitask.as_arrays(PRIORS[name], prob.Y))
    state = multitask.update_hyperparameters(prob, multitask.gram(prob, state), state)
    bound = jax.jit(lambda s: multitask.bound(prob, s))
    logit = jax.scipy.special.logit(state.pi)

    # HalfNormal priors are densities of standard deviations, so sigma moves, not its log
    def moved(e):
        return dict(sigma2=(jnp.sqrt(state.sigma2) + e) ** 2)

    paths = [
        moved,
        lambda e: dict(sigma_w2=(jnp.sqrt(state.sigma_w2) + e) ** 2),
        lambda e: dict(pi=jax.nn.sigmoid(logit + e)),
    ]
    for path in paths:
        assert abs(slope(lambda e, path=path: bound(state._replace(**path(e))))) < 1e-3


@pytest.mark.parametrize("sweep", [multitask.sweep_plain, multitask.sweep])
@pytest.mark.parametrize("name", PRIORS)
def test_the_bound_never_falls(sweep, name):
    prob, state = make_problem(N=20, M=3, seed=1, hyper=PRIORS[name])
    state, bounds = multitask.run(prob, state, 150, sweep)
    assert np.min(np.diff(bounds)) > -1e-8
    if name == "fixed":
        np.testing.assert_allclose(state.theta, 0.0)
        np.testing.assert_allclose(state.sigma2, 0.09)
        np.testing.assert_allclose(state.sigma_w2, 1.44)
        np.testing.assert_allclose(state.pi, 0.4)


@pytest.mark.parametrize("sweep", [multitask.sweep_plain, multitask.sweep])
def test_the_limit_is_stationary(sweep):
    prob, state = make_problem(N=20, M=3, seed=1, hyper=PRIORS["weak"])
    for _ in range(20):
        # as long a run as in the test above, which has compiled it
        state, _ = multitask.run(prob, state, 150, sweep)
    bound = jax.jit(lambda s: multitask.bound(prob, s))

    def function(m, theta=0.0, log_t=0.0):
        t = jnp.exp(log_t)
        alpha, h = t * state.alpha[m], jnp.sqrt(t) * state.h[m]
        theta = state.theta[m] + theta
        new = multitask._condition(prob, state, m, theta, state.step[m], alpha, h)
        return new._replace(
            mu=state.mu.at[:, m].multiply(jnp.sqrt(t)), v=state.v.at[:, m].multiply(t)
        )

    along = jax.jit(lambda m, theta, log_t: bound(function(m, theta, log_t)))
    for m in np.flatnonzero(multitask.is_active(prob, state)):
        assert abs(slope(lambda e, m=m: along(m, e, 0.0))) < 1e-2
        assert abs(slope(lambda e, m=m: along(m, 0.0, e))) < 1e-2


def test_quasiseparable_covariances_give_the_same_fit():
    N, M = 30, 3
    x, Y, _ = observations(N, 5, M, 0)
    found = []
    for kernel in (dense_matern, matern):
        prob = multitask.problem(Y, Partial(kernel, x), M)
        state = multitask.start_random(random.key(0), prob, jnp.zeros((M, 1)))
        found.append(multitask.run(prob, state, 20)[1])
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


def test_moves_among_kernels_of_several_kinds():
    """They never lower the bound, and predictions interpolate."""
    N, M = 30, 3
    x, Y, _ = observations(N, 5, M, 0)
    squared = (x[:, None] - x) ** 2
    fixed = Partial(lambda K, theta: K, jnp.exp(-0.5 * squared))
    kernels = (Partial(squared_exponential, squared), Partial(dense_matern, x), fixed)
    prob = multitask.problem(Y, kernels, M)
    state = multitask.start_random(random.key(0), prob, jnp.zeros((M, 1)))
    roughness = multitask.roughness_of_inputs(x)
    *_, last = fit = list(multitask.stages(prob, state, roughness, max_rounds=2))
    assert np.all(np.diff(jnp.concatenate([stage.bounds for stage in fit])) > -1e-8)
    K = jnp.stack([multitask.covariance(prob, m, last.state.theta[m]).K for m in range(M)])
    there = multitask.predict(prob, last.state, K, jnp.ones((M, N)))
    known = multitask.mix(last.state, last.state.mean, last.state.var)
    for new, old in zip(there, known, strict=True):
        np.testing.assert_allclose(new, old, atol=1e-7)


def test_white_functions_and_singular_vectors():
    _, Y, _ = observations(30, 5, 2, 0)
    prob = multitask.problem(Y, Partial(white, jnp.ones(30)), 2)
    state = multitask.start_svd(prob, jnp.zeros((2, 0)))
    _, bounds = multitask.run(prob, state, 30)
    assert np.all(np.diff(bounds) > -1e-8)


def test_a_task_and_a_point_without_observations():
    x, Y, _ = observations(12, 4, 2, 0)
    Y[:, 1] = np.nan
    Y[3] = np.nan
    prob = multitask.problem(Y, Partial(squared_exponential, (x[:, None] - x) ** 2), 2)
    state = multitask.start_random(random.key(0), prob, jnp.zeros((2, 1)))
    state, bounds = multitask.run(prob, state, 12)
    assert np.all(np.isfinite(bounds)) and np.all(np.diff(bounds) > -1e-8)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(state))


def test_path_of_many_inputs_is_a_laplacian():
    x = random.normal(random.key(0), (multitask.MAX_GRAPH + 1,))
    phi = jnp.stack([x, jnp.ones_like(x)])
    found = jnp.sum(multitask.roughness_of_inputs(x)(phi) * phi, axis=1)
    np.testing.assert_allclose(found, [np.sum(np.diff(np.sort(x)) ** 2), 0.0], atol=1e-9)
