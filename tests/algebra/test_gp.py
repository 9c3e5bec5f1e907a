# SPDX-License-Identifier: Apache-2.0
"""The conditional of a latent function against dense algebra."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from tinygp.kernels import quasisep

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.covariance import Dense, Diagonal
from numpyro_spikeslab.algebra.quasisep import Quasisep

pytestmark = pytest.mark.usefixtures("x64")

N = 12
X = np.sort(np.random.default_rng(0).uniform(0, 4, N))


def stationary(kind, scale, A, B):
    distance = np.abs(A[:, None] - B) / scale
    if kind == "smooth":
        return np.exp(-0.5 * distance**2)
    return (1 + np.sqrt(3) * distance) * np.exp(-np.sqrt(3) * distance)


def state_space(x, scale=0.7):
    return Quasisep.from_kernel(quasisep.Matern32(scale=scale), jnp.asarray(x))


COVARIANCES = {
    "dense": lambda: Dense(jnp.asarray(stationary("smooth", 0.5, X, X))),
    # condition number beyond 1 / eps
    "nearly singular": lambda: Dense(jnp.asarray(stationary("smooth", 20.0, X, X))),
    "rank one": lambda: Dense(jnp.ones((N, N))),
    "white": lambda: Diagonal(jnp.ones(N)),
    "zero": lambda: Diagonal(jnp.zeros(N)),
    "state space": lambda: state_space(X),
    "state space, unsorted": lambda: state_space(np.random.default_rng(3).permutation(X)),
}


def dense(covariance):
    return np.stack([np.asarray(covariance.matvec(row)) for row in jnp.eye(N)])


def in_precision(x):
    """The numbers that the current precision can tell, in float64."""
    return np.asarray(jnp.asarray(x), np.float64)


def sites(level=1.0):
    """Precisions, linear terms and prior means; of two sites without precision one has a term."""
    rng = np.random.default_rng(1)
    alpha = level * rng.uniform(0.5, 30, N)
    alpha[[2, 7]] = 0.0
    h = np.where(alpha > 0, 3 * np.sqrt(level) * rng.normal(size=N), 0)
    h[7] = -0.7
    return [in_precision(x) for x in (alpha, h, 0.4 * rng.normal(size=N))]


def truth(K, alpha, h, mu):
    """Mean, covariance, log evidence and KL divergence, without the inverse of ``K``."""
    precision, g = np.eye(len(K)) + K * alpha, h - alpha * mu
    Sigma = np.linalg.solve(precision, K)
    log_f = 0.5 * (mu @ (alpha * mu) + 2 * mu @ g + g @ Sigma @ g)
    log_f -= 0.5 * np.linalg.slogdet(precision)[1]
    mean, variance = mu + Sigma @ g, np.diag(Sigma)
    kl = h @ mean - 0.5 * alpha @ (mean**2 + variance) - log_f
    # sites are 1 at their largest
    on = alpha > 0
    return mean, Sigma, log_f - 0.5 * np.sum(h[on] ** 2 / alpha[on]), kl


@pytest.mark.parametrize("name", COVARIANCES)
def test_conditional_is_that_of_a_gaussian_process(name):
    covariance = COVARIANCES[name]()
    alpha, h, mu = sites()
    K, arrays = dense(covariance), [*map(jnp.asarray, (alpha, h, mu))]
    q = gp.condition(covariance, *arrays)
    mean, Sigma, log_f, kl = truth(K, alpha, h, mu)
    np.testing.assert_allclose(q.mean, mean, atol=1e-8)
    np.testing.assert_allclose(q.variance, np.diag(Sigma), atol=1e-8)
    np.testing.assert_allclose(mu + K @ np.asarray(q.weights), mean, atol=1e-8)
    evidence, L = gp.log_evidence(covariance, *arrays)
    np.testing.assert_allclose(evidence, log_f, rtol=1e-8)
    again = gp.condition(covariance, *arrays, L)
    jax.tree.map(np.testing.assert_array_equal, again, q)
    log_sites = gp.log_sites(*arrays[:2], jnp.asarray(mean), jnp.asarray(np.diag(Sigma)))
    np.testing.assert_allclose(log_sites, log_f + kl, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(q.kl, kl, rtol=1e-6, atol=1e-7)
    # new values = mixing @ old values + an independent part
    mixing = np.random.default_rng(3).normal(size=(5, N)) / N
    star = mixing @ K, np.diag(mixing @ K @ mixing.T) + 0.1
    new, variance = gp.predict(covariance, arrays[0], q, *map(jnp.asarray, star), 0.3)
    np.testing.assert_allclose(new, 0.3 + mixing @ (mean - mu), atol=1e-8)
    np.testing.assert_allclose(variance, np.diag(mixing @ Sigma @ mixing.T) + 0.1, atol=1e-8)


def test_the_evidence_is_the_density_of_the_observations():
    """Of ``h / alpha`` with noise ``1 / alpha``, where there are any."""
    covariance = COVARIANCES["dense"]()
    alpha, h, mu = sites()
    on = alpha > 0
    h = np.where(on, h, 0)
    noisy = dense(covariance)[np.ix_(on, on)] + np.diag(1 / alpha[on])
    density = stats.multivariate_normal(mu[on], noisy).logpdf(h[on] / alpha[on])
    expected = density - 0.5 * np.sum(np.log(alpha[on] / (2 * np.pi)))
    evidence, _ = gp.log_evidence(covariance, *map(jnp.asarray, (alpha, h, mu)))
    np.testing.assert_allclose(evidence, expected, rtol=1e-8)


@pytest.mark.parametrize("level", [1e2, 1e6])
@pytest.mark.parametrize("name", ["smooth", "rough", "white", "state space"])
def test_sites_of_many_tasks_are_right_in_both_precisions(precision, name, level):
    """Precisions of sites are sums over tasks; ``level`` times that of the prior, and weak ones."""
    size, rng = 60, np.random.default_rng(0)
    x, eps = in_precision(np.sort(rng.uniform(0, 4, size))), np.finfo(precision).eps
    jitter = in_precision(max(1e-9, 4 * size * eps))
    if name == "white":
        covariance, K = Diagonal(jnp.ones(size)), np.eye(size)
    else:
        kind, scale = ("smooth", 1.0) if name == "smooth" else (name, 0.7)
        covariance, _, K = priors(kind, scale, x, x[:0])
        K = in_precision(K) + jitter * np.eye(size)
        covariance = covariance.jittered()
    alpha = level * rng.uniform(0.3, 3.0, size)
    alpha[[3, 5, 9]] = 0.0, 1e-3, 1.0
    alpha = in_precision(alpha)
    phi = np.linalg.cholesky(K) @ rng.normal(size=size)
    h = in_precision(alpha * phi + np.sqrt(alpha) * rng.normal(size=size))
    q = gp.condition(covariance, jnp.asarray(alpha), jnp.asarray(h))
    evidence, _ = gp.log_evidence(covariance, jnp.asarray(alpha), jnp.asarray(h))
    mean, Sigma, log_f, kl = truth(K, alpha, h, np.zeros(size))
    variance = np.diag(Sigma)
    # in single precision a mean has seven digits, of which the posterior leaves few open
    digits = {"float32": {1e2: 0.01, 1e4: 0.15, 1e6: 0.4}[level], "float64": 1e-4}[precision]
    np.testing.assert_allclose((q.mean - mean) / np.sqrt(variance), 0, atol=digits)
    # where there is next to no site, the variance is what its neighbours leave of the prior's
    strong = alpha > 1
    np.testing.assert_allclose(q.variance[strong], variance[strong], rtol=digits)
    np.testing.assert_allclose(q.variance[~strong], variance[~strong], atol=digits / 1e3)
    np.testing.assert_allclose([evidence, q.kl], [log_f, kl], atol=digits)


@pytest.mark.parametrize("name", COVARIANCES)
def test_without_observations_a_function_stays_at_its_prior(name):
    covariance, zero, mu = COVARIANCES[name](), jnp.zeros(N), jnp.linspace(-1, 1, N)
    q = gp.condition(covariance, zero, zero, mu)
    np.testing.assert_allclose([q.mean, q.variance], [mu, covariance.diagonal()])
    assert q.kl == 0 and gp.log_evidence(covariance, zero, zero, mu)[0] == 0


@pytest.mark.parametrize(
    ("name", "level", "dtype"),
    [
        *((name, 1.0, "float64") for name in COVARIANCES),
        *(("white", level, dtype) for level in (1e2, 1e6) for dtype in ("float32", "float64")),
    ],
)
def test_draws_have_the_moments_of_the_conditional(name, level, dtype):
    jax.config.update("jax_enable_x64", dtype == "float64")
    covariance, number = COVARIANCES[name](), 4_000
    arrays = sites(level)
    args = covariance, *map(jnp.asarray, arrays)
    keys = random.split(random.key(0), number)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: gp.sample(key, *args)))(keys), float)
    mean, Sigma, *_ = truth(dense(covariance), *arrays)
    sd = np.sqrt(np.maximum(np.diag(Sigma), 1e-12))
    # five standard errors of each
    assert np.max(np.abs(draws.mean(0) - mean) / (sd / np.sqrt(number) + 1e-4 * (level == 1))) < 5
    np.testing.assert_allclose(np.cov(draws.T), Sigma, atol=0.12)
    if level > 1:
        np.testing.assert_allclose(draws.std(axis=0) / sd, 1, atol=5 / np.sqrt(2 * number))


@pytest.mark.parametrize("alpha", [0.0, 1e-8, 1e-3, 1e6])
def test_the_density_of_the_conditional_is_right_whatever_its_sites(precision, alpha):
    """Linear terms of one beside precisions that are zero, small and large."""
    size, rng = 20, np.random.default_rng(0)
    x = np.linspace(0, 4, size)
    K = stationary("rough", 0.7, x, x) + 1e-3 * np.eye(size)
    K, alpha = in_precision(K), in_precision(np.full(size, alpha))
    mu, h = in_precision(rng.normal(size=size)), in_precision(rng.normal(size=size))
    P = np.linalg.inv(K) + np.diag(alpha)
    mean = np.linalg.solve(P, h + np.linalg.solve(K, mu))
    at = in_precision(mean + np.linalg.solve(np.linalg.cholesky(P).T, rng.normal(size=size)))
    expected = 0.5 * np.linalg.slogdet(P / (2 * np.pi))[1] - 0.5 * (at - mean) @ P @ (at - mean)
    arrays = map(jnp.asarray, (alpha, h, at, mu))
    density = gp.log_density(Dense(jnp.asarray(K)), *arrays)
    tolerance = {"float32": 0.05, "float64": 1e-8}[precision]
    np.testing.assert_allclose(density, expected, atol=tolerance)


# New inputs


def priors(kind, scale, old, new):
    """Covariances of the package at old and at all inputs, and the matrices they stand for."""
    inputs = np.concatenate([old, new])
    if kind == "state space":
        of = lambda x: state_space(x, scale)  # noqa: E731
    else:
        of = lambda x: Dense(jnp.asarray(stationary(kind, scale, x, x)))  # noqa: E731
    return of(old), of(inputs), stationary(kind, scale, inputs, inputs)


KINDS, MANY, FEW = ("smooth", "rough", "state space"), (120, 50), (3, 40)
CASES = *product(KINDS, (1e-2, 1.0, 20.0, 1e3), [MANY]), *product(KINDS, [1.0], [FEW])


@pytest.mark.parametrize(("kind", "scale", "sizes"), CASES)
def test_functions_at_new_inputs_have_the_dense_formula(precision, kind, scale, sizes):
    rng, (old_size, new_size) = np.random.default_rng(0), sizes
    old = in_precision(rng.uniform(0.0, 10.0, old_size))
    # in the range, outside of it, and equal to old ones
    new = in_precision(np.concatenate([rng.uniform(-2.0, 12.0, new_size - 2), old[:2]]))
    covariance, joint, K = priors(kind, scale, old, new)
    n, eps = old_size, np.finfo(precision).eps
    noise, noise_joint = (max(1e-9, 4 * size * eps) for size in (n, n + new_size))
    root = np.linalg.cholesky(K[:n, :n] + noise * np.eye(n))
    phi = in_precision(root @ rng.normal(size=n))
    mean, tril = gp.extend(covariance, joint, jnp.asarray(phi), jnp.asarray(K[:n, n:]))
    W = np.linalg.solve(K[:n, :n] + noise * np.eye(n), K[:n, n:])
    contrast = np.vstack([-W, np.eye(new_size)])
    expected = contrast.T @ (K + noise_joint * np.eye(n + new_size)) @ contrast
    sd = np.sqrt(np.diag(expected))
    tolerance = {"float32": 0.1, "float64": 0.05}[precision]
    np.testing.assert_allclose(mean / sd, W.T @ phi / sd, atol=tolerance)
    tril = np.asarray(tril, float) / sd[:, None]
    np.testing.assert_allclose(tril @ tril.T, expected / np.outer(sd, sd), atol=0.05)
    assert np.all(np.diagonal(tril) > 0)
