# SPDX-License-Identifier: Apache-2.0
"""Every covariance keeps the contract of its base class, against dense algebra."""

import numpy as np
import pytest
from scipy import stats
from tinygp.kernels import quasisep

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.covariance import Covariance, Dense, Diagonal, jitter
from numpyro_spikeslab.algebra.quasisep import Quasisep

N = 9
RNG = np.random.default_rng(0)
X = RNG.permutation(np.linspace(0.0, 4.0, N))
SQUARED = np.exp(-0.5 * (X[:, None] - X) ** 2)
DISTANCE = np.sqrt(3.0) * np.abs(X[:, None] - X) / 0.7
MATERN = (1.0 + DISTANCE) * np.exp(-DISTANCE)
VARIANCES = RNG.uniform(0.5, 2.0, N)


def state_space():
    return Quasisep.from_kernel(quasisep.Matern32(scale=0.7), jnp.asarray(X))


CASES = {
    "dense": (lambda: Dense(jnp.asarray(SQUARED)), SQUARED),
    "diagonal": (lambda: Diagonal(jnp.asarray(VARIANCES)), np.diag(VARIANCES)),
    "quasiseparable": (state_space, MATERN),
}


@pytest.fixture(params=CASES)
def case(request, x64):
    """A covariance and the matrix it stands for."""
    make, K = CASES[request.param]
    return make(), K


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10)


def test_entries_and_products(case):
    covariance, K = case
    assert isinstance(covariance, Covariance)
    x = RNG.normal(size=N)
    close(covariance.diagonal(), np.diag(K))
    close(covariance.matvec(jnp.asarray(x)), K @ x)
    close(covariance.to_dense(), K)


@pytest.mark.parametrize("which", ["root", "cholesky"])
@pytest.mark.parametrize("columns", [(), (2,)])
def test_roots_solve_and_multiply(case, which, columns):
    covariance, K = case
    a = RNG.uniform(0.0, 3.0, N)
    if which == "root":
        L, target = covariance.root(), K
    else:
        L, target = covariance.cholesky(jnp.asarray(a)), np.eye(N) + a[:, None] * K * a
    x = RNG.normal(size=(N, *columns))
    inner = covariance.solve_lower(L, jnp.asarray(x))
    close(np.sum(inner * inner), np.sum(x * np.linalg.solve(target, x)))
    close(covariance.solve_upper(L, inner), np.linalg.solve(target, x))
    close(covariance.times_lower(L, inner), x)
    close(covariance.times_lower(L, covariance.times_upper(L, jnp.asarray(x))), target @ x)
    close(covariance.half_logdet(L), 0.5 * np.linalg.slogdet(target)[1])


def test_the_density_and_the_draws_are_those_of_a_normal(case):
    covariance, K = case
    x = np.linalg.cholesky(K) @ RNG.normal(size=N)
    expected = stats.multivariate_normal(np.zeros(N), K).logpdf(x)
    zero = jnp.zeros(N)
    density = gp.log_density(covariance, zero, zero, jnp.asarray(x))
    np.testing.assert_allclose(density, expected, rtol=1e-7)
    size = 20_000
    draws = jax.jit(jax.vmap(covariance.draw))(random.split(random.key(0), size))
    white = np.linalg.solve(np.linalg.cholesky(K), np.asarray(draws).T)
    # nine tests of marginals at 1e-4 each: a false alarm in 1 of 1100 keys
    assert all(stats.kstest(row, "norm").pvalue > 1e-4 for row in white)
    np.testing.assert_allclose(white @ white.T / size, np.eye(N), atol=6 / np.sqrt(size))


def test_the_jitter_fits_the_precision_and_the_prior(precision):
    eps = np.finfo(precision).eps
    for size in (3, 1000):
        expected = max(1e-9, 4 * size * eps)
        assert jitter(jnp.full(size, 5.0)) == pytest.approx(5.0 * expected, rel=1e-6)
        assert jitter(jnp.zeros(size)) == pytest.approx(expected, rel=1e-6)
    assert jitter(jnp.array([1.0, 3.0])) == pytest.approx(3 * max(1e-9, 8 * eps), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_jitter_makes_singular_covariances_safe(precision, scale):
    x = jnp.linspace(0.0, 1.0, 300)
    K = 1e6 * jnp.exp(-0.5 * ((x[:, None] - x) / scale) ** 2)
    kernel = quasisep.Matern52(scale=scale, sigma=1e3)
    for covariance in (Dense(K), Quasisep.from_kernel(kernel, x)):
        noisy = covariance.jittered()
        added = noisy.diagonal() - covariance.diagonal()
        np.testing.assert_allclose(added, jitter(covariance.diagonal()), rtol=0.1)
        assert jnp.isfinite(noisy.half_logdet(noisy.root()))
        assert jnp.all(jnp.isfinite(covariance.draw(random.key(0))))


def test_variances_that_sites_leave_whether_missing_weak_or_strong(precision):
    x = np.linspace(0, 10, 40)
    K = 3.0 * np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-3 * np.eye(x.size)
    alpha = np.resize([0.0, 1e-12, 1e-3, 1.0, 1e4], x.size)
    a = jnp.sqrt(jnp.asarray(alpha))
    dense = Dense(jnp.asarray(K))
    truth = np.diag(np.linalg.inv(np.linalg.inv(K) + np.diag(alpha)))
    rtol = 3e-4 if precision == "float32" else 1e-10
    np.testing.assert_allclose(dense.conditional(dense.cholesky(a), a), truth, rtol=rtol)
