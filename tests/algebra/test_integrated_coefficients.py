# SPDX-License-Identifier: Apache-2.0
"""Coefficients integrated out, and given the weights, against dense algebra of each task."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from truth.pair_problems import close

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import (
    Coefficients,
    NormalPrior,
    of_columns,
    split,
    task_statistics,
    times,
    whitened,
)
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.reading.coefficient_rows import TasksWithout

Q, M, N, C = 3, 4, 20, 2


class Case(NamedTuple):
    """Data of tasks, and what the module makes of them: a Gram matrix, and coefficients."""

    features: np.ndarray
    covariates: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    prior: NormalPrior
    sigma2: np.ndarray
    coefficients: Coefficients
    sums: Any

    def precision(self, q):
        """Of the coefficients, given the weights."""
        data = (self.covariates * self.Z[:, q]) @ self.covariates.T / self.sigma2[q]
        return data + np.diag(1 / self.prior.scale[q] ** 2)

    def mean(self, q, residual):
        """Conditional mean of the coefficients less their prior means."""
        linear = (self.covariates * self.Z[:, q]) @ residual / self.sigma2[q]
        return np.linalg.solve(self.precision(q), linear)

    def deviation(self, q):
        """Observations less what they would be at the prior means."""
        return self.y[:, q] - self.covariates.T @ self.prior.mean[q]


def case_of(kind, mean=0.0):
    rng, num_tasks = np.random.default_rng(0), 1 if kind == "columns" else Q
    shape = N, num_tasks
    features = rng.normal(size=(M, N)) + mean
    covariates = np.stack([np.ones(N), rng.normal(size=N)])
    Z = rng.uniform(0.5, 2.0, (N, 1))
    if kind == "masked":
        Z = (rng.uniform(size=shape) < 0.6) * rng.uniform(0.5, 2.0, shape)
    if kind == "fewer than covariates":
        Z = (np.arange(N)[:, None] < np.arange(Q)) * 1.0
    value, prior_mean = rng.normal(size=(2, num_tasks, C))
    prior = NormalPrior(value, prior_mean, rng.uniform(0.5, 3.0, (num_tasks, C)))
    sigma2 = rng.uniform(0.1, 1.0, num_tasks)
    y = covariates.T @ (prior.mean + prior.scale).T
    y += features.T @ rng.normal(size=(M, num_tasks)) + rng.normal(size=shape)
    y = np.where(Z > 0, y, 0)
    arrays = y, Z, features, covariates, sigma2, value, prior.mean, prior.scale
    y_, Z_, X, D, noise, *moments = (jnp.asarray(x, float) for x in arrays)
    # as the calls of users do
    with jax.default_matmul_precision("float32"):
        if kind == "columns":
            X, D = (whitened(x, Z_[:, 0]) for x in (X, D))
            parts = split(X, D)
            residual = jnp.sqrt(Z_[:, 0]) * y_[:, 0] - moments[0][0] @ D
            arguments = parts.basis, parts.inside, D, residual, NormalPrior(*moments), noise[0]
            coefficients, outside = of_columns(*arguments)
            sums = parts.products[None], (parts.outside @ outside)[None]
        else:
            sums = task_statistics(y_, Z_, X, D)
            coefficients = sums.coefficients(NormalPrior(*moments), noise)
    Z = np.broadcast_to(Z, shape)
    return Case(features, covariates, y, Z, prior, sigma2, coefficients, sums)


TASKS = ["complete", "masked", "fewer than covariates"]


@pytest.mark.parametrize("kind", ["columns", *TASKS])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_what_is_integrated_out_adds_to_the_covariance_of_the_observations(precision, kind, mean):
    """Also where columns are not centred, in single precision."""
    case = case_of(kind, mean)
    J, e = case.coefficients.without()
    outside = case.sums if kind == "columns" else case.sums.outside
    G, b = outside[:2]
    gram = G + jnp.einsum("qkm,qkn->qmn", J, J, precision="float32")
    linear = b + jnp.einsum("qkm,qk->qm", J, e, precision="float32")
    for q in range(len(case.sigma2)):
        on = case.Z[:, q] > 0
        X, D, z = case.features[:, on], case.covariates[:, on], case.Z[:, q][on]
        added = (D.T * case.prior.scale[q] ** 2) @ D
        K = case.sigma2[q] * np.linalg.inv(np.diag(case.sigma2[q] / z) + added)
        expected = X @ K @ X.T
        size = float(max(np.abs(expected).max(), 1e-3))
        close(gram[q] / size, expected / size, precision)
        expected = X @ K @ case.deviation(q)[on]
        close(linear[q] / size, expected / size, precision)


@pytest.mark.parametrize("kind", ["columns", *TASKS])
def test_coefficients_given_the_weights_are_those_of_a_regression(precision, kind):
    case, rng = case_of(kind, 3.0), np.random.default_rng(1)
    number = len(case.sigma2)
    w, noise = rng.normal(size=(number, M)), rng.normal(size=(50_000, number, C))
    J, e = case.coefficients.without()
    residual = e - times(J, jnp.asarray(w, float))
    scale = case.prior.scale
    mean, remainder = case.coefficients.given(residual)
    slopes = scale[..., None] * case.coefficients.slopes
    draw = jax.jit(jax.vmap(lambda noise: case.coefficients.given(residual, noise)))
    u, remainders = draw(jnp.asarray(noise, float))
    draws = scale * np.asarray(u, float)
    at_zero = case.coefficients.e - times(case.coefficients.J, jnp.asarray(w, float))
    close(remainder, at_zero - times(case.coefficients.E, mean), precision)
    close(remainders[0], at_zero - times(case.coefficients.E, u[0]), precision)
    for q in range(number):
        expected = case.mean(q, case.deviation(q) - case.features.T @ w[q])
        close(scale[q] * mean[q], expected, precision)
        close(slopes[q], -case.mean(q, case.features.T), precision)
        # 16 comparisons at 4.5 standard errors of a variance: a false alarm in 1 of 9,000 keys
        covariance = np.linalg.inv(case.precision(q))
        sd = np.sqrt(np.diag(covariance))
        difference = (np.cov(draws[:, q].T) - covariance) / np.outer(sd, sd)
        bound = 4.5 * np.sqrt(2 / len(noise))
        assert np.all(np.abs(difference) < bound)
        assert np.all(np.abs(draws[:, q].mean(0) - expected) < bound * sd)


@pytest.mark.parametrize("kind", TASKS)
def test_squares_are_those_of_any_coefficients_and_slopes(precision, kind):
    case, rng = case_of(kind, 3.0), np.random.default_rng(2)
    mean, var = rng.normal(size=(Q, M)), rng.uniform(size=(Q, M))
    u, slopes = rng.normal(size=(Q, C)), rng.normal(size=(Q, C, M))
    weights = PairedMeanField(np.ones((Q, M)), mean, np.sqrt(var))
    arguments = jax.tree.map(lambda x: jnp.asarray(x, float), (weights, u, slopes))
    standard: Any = None
    squares = TasksWithout(standard, case.coefficients, case.sums).squares(*arguments)
    D, X, scale = case.covariates, case.features, case.prior.scale
    for q in range(Q):
        residual = case.deviation(q) - D.T @ (scale[q] * u[q]) - X.T @ mean[q]
        along = X.T + D.T @ (scale[q][:, None] * slopes[q])
        close(squares[q], case.Z[:, q] @ (residual**2 + along**2 @ var[q]), precision)


@pytest.mark.parametrize(("scale", "sigma", "num_obs"), [(10, 0.1, 4000), (30, 0.1, 1000)])
def test_single_precision_tells_a_level_from_effects_of_groups(scale, sigma, num_obs):
    """Which only their priors do; products of the features would lose them to rounding."""
    rng = np.random.default_rng(0)
    rows = np.vstack([np.ones(num_obs), np.eye(4)[:, np.arange(num_obs) % 4]]) / sigma
    y = (3.0 + sigma * rng.normal(size=num_obs)) / sigma
    exact = np.linalg.inv(np.eye(5) + scale**2 * rows @ rows.T)
    mean = exact @ (scale * rows) @ y
    rows, y = (jnp.asarray(x, jnp.float32) for x in (rows, y))
    value, one = rng.normal(size=(1, 5)), jnp.ones((1, 5), jnp.float32)
    prior = NormalPrior(jnp.asarray(value, jnp.float32), 0 * one, scale * one)
    basis, none = split(rows[:0], rows).basis, jnp.zeros((0, 5), jnp.float32)
    residual = y - prior.value[0] @ rows
    coefficients, _ = of_columns(basis, none, rows, residual, prior, one[0, 0])
    residual = coefficients.without()[1]
    # in standard deviations
    sd = np.sqrt(np.diag(exact))
    assert np.max(np.abs(np.asarray(coefficients.given(residual)[0])[0] - mean) / sd) < 0.02
    noise = jnp.asarray(rng.normal(size=(20_000, 1, 5)), jnp.float32)
    draws = np.asarray(jax.vmap(lambda x: coefficients.given(residual, x)[0])(noise))[:, 0]
    np.testing.assert_allclose(draws.astype(float).std(axis=0), sd, rtol=0.03)


def test_missing_observations_say_nothing():
    rows, precision = jnp.array([[1.0, 2.0, jnp.nan]]), jnp.array([1.0, 4.0, 0.0])
    np.testing.assert_array_equal(whitened(rows, precision), [[1.0, 4.0, 0.0]])
