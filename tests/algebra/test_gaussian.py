# SPDX-License-Identifier: Apache-2.0
"""The conditional of a latent function against dense algebra."""

import numpy as np
import pytest
from tinygp.kernels import quasisep

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab import latent

pytestmark = pytest.mark.usefixtures("x64")

N = 12
X = np.sort(np.random.default_rng(0).uniform(0, 4, N))


def squared_exponential(scale=1.0):
    return np.exp(-0.5 * (X[:, None] - X) ** 2 / scale**2)


COVARIANCES = {
    "dense": lambda: latent.Dense(jnp.asarray(squared_exponential(0.5))),
    # condition number beyond 1 / eps
    "nearly singular": lambda: latent.Dense(jnp.asarray(squared_exponential(20.0))),
    "rank one": lambda: latent.Dense(jnp.ones((N, N))),
    "white": lambda: latent.Diagonal(jnp.ones(N)),
    "zero": lambda: latent.Diagonal(jnp.zeros(N)),
    "quasiseparable": lambda: latent.Quasisep.from_kernel(
        quasisep.Matern32(scale=0.7), jnp.asarray(X)
    ),
    "quasiseparable, unsorted": lambda: latent.Quasisep.from_kernel(
        quasisep.Matern32(scale=0.7), jnp.asarray(np.random.default_rng(3).permutation(X))
    ),
}


def dense(covariance):
    return np.stack([np.asarray(covariance.matvec(row)) for row in jnp.eye(N)])


def sites(seed=1):
    """Precisions, two of them zero, and linear terms, zero where nothing is observed."""
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.5, 30, N)
    alpha[[2, 7]] = 0.0
    h = np.where(alpha > 0, 3 * rng.normal(size=N), 0)
    return alpha, h, 0.4 * rng.normal(size=N)


def truth(K, alpha, h, mu):
    """Mean and covariance by the textbook's formula for observations of noise ``1 / alpha``."""
    seen = alpha > 0
    noisy = K[np.ix_(seen, seen)] + np.diag(1 / alpha[seen])
    gain = np.linalg.solve(noisy, K[seen]).T
    y = h[seen] / alpha[seen]
    return mu + gain @ (y - mu[seen]), K - gain @ K[seen], noisy, y


@pytest.mark.parametrize("name", COVARIANCES)
def test_conditional_is_that_of_a_gaussian_process(name):
    covariance = COVARIANCES[name]()
    alpha, h, mu = sites()
    K = dense(covariance)
    q = latent.condition(covariance, jnp.asarray(alpha), jnp.asarray(h), jnp.asarray(mu))
    mean, Sigma, noisy, y = truth(K, alpha, h, mu)
    np.testing.assert_allclose(q.mean, mean, atol=1e-8)
    np.testing.assert_allclose(q.variance, np.diag(Sigma), atol=1e-8)
    np.testing.assert_allclose(mu + K @ np.asarray(q.weights), mean, atol=1e-8)
    # log evidence: the density of y without the factors that make the sites of it
    seen = alpha > 0
    deviation = y - mu[seen]
    log_density = -0.5 * deviation @ np.linalg.solve(noisy, deviation)
    log_density -= 0.5 * np.linalg.slogdet(noisy)[1]
    rest = 0.5 * np.sum(np.log(alpha[seen])) - 0.5 * np.sum(h[seen] ** 2 / alpha[seen])
    np.testing.assert_allclose(q.log_evidence, log_density - rest, rtol=1e-8)
    again = latent.log_evidence(covariance, jnp.asarray(alpha), jnp.asarray(h), jnp.asarray(mu))
    np.testing.assert_allclose(again, q.log_evidence, rtol=1e-12)
    # log evidence = expected sites - KL
    expected = h @ mean - 0.5 * alpha @ (mean**2 + np.diag(Sigma))
    np.testing.assert_allclose(q.kl, expected - q.log_evidence, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["dense", "quasiseparable"])
def test_divergence_is_that_of_two_gaussians(name):
    covariance = COVARIANCES[name]()
    alpha, h, mu = sites()
    K = dense(covariance)
    q = latent.condition(covariance, jnp.asarray(alpha), jnp.asarray(h), jnp.asarray(mu))
    mean, Sigma, *_ = truth(K, alpha, h, mu)
    kl = 0.5 * (
        np.trace(np.linalg.solve(K, Sigma))
        + (mean - mu) @ np.linalg.solve(K, mean - mu)
        - N
        + np.linalg.slogdet(K)[1]
        - np.linalg.slogdet(Sigma)[1]
    )
    np.testing.assert_allclose(q.kl, kl, rtol=1e-6)


@pytest.mark.parametrize("name", COVARIANCES)
def test_without_observations_a_function_stays_at_its_prior(name):
    covariance = COVARIANCES[name]()
    zero, mu = jnp.zeros(N), jnp.linspace(-1, 1, N)
    q = latent.condition(covariance, zero, zero, mu)
    np.testing.assert_allclose(q.mean, mu)
    np.testing.assert_allclose(q.variance, covariance.diagonal())
    assert q.kl == 0 and q.log_evidence == 0


def test_quasiseparable_and_dense_agree():
    kernel, x = quasisep.Matern52(scale=0.9, sigma=1.3), jnp.asarray(X)
    alpha, h, mu = map(jnp.asarray, sites())
    fast = latent.condition(latent.Quasisep.from_kernel(kernel, x), alpha, h, mu)
    slow = latent.condition(latent.Dense(kernel(x, x)), alpha, h, mu)
    for name in ("mean", "variance", "log_evidence", "kl"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=1e-8)


@pytest.mark.parametrize("name", ["dense", "white", "quasiseparable"])
def test_prediction_is_that_of_a_gaussian_process(name):
    covariance = COVARIANCES[name]()
    alpha, h, mu = sites()
    K = dense(covariance)
    rng = np.random.default_rng(3)
    mixing = rng.normal(size=(5, N)) / N
    K_star, k_star = mixing @ K, np.diag(mixing @ K @ mixing.T) + 0.1
    q = latent.condition(covariance, jnp.asarray(alpha), jnp.asarray(h), jnp.asarray(mu))
    mean, variance = latent.predict(
        covariance, jnp.asarray(alpha), q, jnp.asarray(K_star), jnp.asarray(k_star), 0.3
    )
    true_mean, Sigma, *_ = truth(K, alpha, h, mu)
    np.testing.assert_allclose(mean, 0.3 + mixing @ (true_mean - mu), atol=1e-8)
    # new value = mixing @ old values + an independent part
    np.testing.assert_allclose(variance, np.diag(mixing @ Sigma @ mixing.T) + 0.1, atol=1e-8)


@pytest.mark.parametrize("name", ["dense", "nearly singular", "white", "zero", "quasiseparable"])
def test_draws_have_the_moments_of_the_conditional(name):
    covariance = COVARIANCES[name]()
    alpha, h, mu = sites()
    args = (covariance, jnp.asarray(alpha), jnp.asarray(h), jnp.asarray(mu))
    number = 4_000
    keys = random.split(random.key(0), number)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: latent.sample(key, *args)))(keys))
    mean, Sigma, *_ = truth(dense(covariance), alpha, h, mu)
    sd = np.sqrt(np.maximum(np.diag(Sigma), 1e-12))
    assert np.max(np.abs(draws.mean(0) - mean) / (sd / np.sqrt(number) + 1e-4)) < 5
    np.testing.assert_allclose(np.cov(draws.T), Sigma, atol=0.12)


def test_a_matrix_is_a_dense_covariance():
    K = jnp.eye(3)
    assert latent.as_covariance(K).K is K
    white = latent.Diagonal(jnp.ones(3))
    assert latent.as_covariance(white) is white
