# SPDX-License-Identifier: Apache-2.0
"""Coefficients of tasks on covariates that all share, against dense algebra of each task."""

from typing import Any, NamedTuple

import numpy as np
from pair_problems import close
import pytest

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.covariates import Normal, shares_of

Q, M, N, C = 3, 4, 20, 2


class Tasks(NamedTuple):
    """Of each task all that there is, and what the module makes of it."""

    features: np.ndarray
    covariates: np.ndarray
    y: np.ndarray
    Z: np.ndarray
    prior: Normal
    sigma2: np.ndarray
    beside: Any

    def weighs(self, q):
        return np.broadcast_to(self.Z, (N, Q))[:, q]

    def precision(self, q):
        """Of the coefficients, given all else."""
        told = (self.covariates * self.weighs(q)) @ self.covariates.T / self.sigma2[q]
        return told + np.diag(1 / self.prior.scale[q] ** 2)

    def coefficients(self, q, residual):
        """How a residual moves the coefficients' mean from that of the prior."""
        told = (self.covariates * self.weighs(q)) @ residual / self.sigma2[q]
        return np.linalg.solve(self.precision(q), told)

    def deviation(self, q):
        """Of the observations of a task, from what they would be at the prior means."""
        return self.y[:, q] - self.covariates.T @ self.prior.mean[q]


def tasks(kind, mean=0.0, scale=1.0):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(M, N)) + mean
    covariates = np.stack([np.ones(N), rng.normal(size=N)])
    Z = rng.uniform(0.5, 2.0, (N, 1))
    if kind == "masked":
        Z = (rng.uniform(size=(N, Q)) < 0.6) * rng.uniform(0.5, 2.0, (N, Q))
    if kind == "fewer than covariates":
        Z = (np.arange(N)[:, None] < np.arange(Q)) * 1.0
    prior = Normal(rng.normal(size=(Q, C)), scale * rng.uniform(0.5, 3.0, (Q, C)))
    sigma2 = rng.uniform(0.1, 1.0, Q)
    y = covariates.T @ (prior.mean + prior.scale).T + features.T @ rng.normal(size=(M, Q))
    y = np.where(Z > 0, y + rng.normal(size=(N, Q)), 0)
    given = (jnp.asarray(x, float) for x in (y, Z, features, covariates))
    prior_ = Normal(*(jnp.asarray(x, float) for x in prior))
    # what users call asks for it
    with jax.default_matmul_precision("float32"):
        beside = shares_of(*given).beside(prior_, jnp.asarray(sigma2, float))
    return Tasks(features, covariates, y, Z, prior, sigma2, beside)


KINDS = ["complete", "masked", "fewer than covariates"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_what_is_integrated_out_adds_to_the_covariance_of_the_observations(precision, kind, mean):
    """Also where columns are not centred, in single precision."""
    every = tasks(kind, mean)
    more, linear = every.beside.integrated()
    gram = every.beside.G + jnp.matmul(jnp.swapaxes(more, 1, 2), more, precision="float32")
    for q in range(Q):
        z, X, D = every.weighs(q), every.features, every.covariates
        seen = z > 0
        added = (D.T * every.prior.scale[q] ** 2) @ D
        K = np.linalg.inv((np.diag(every.sigma2[q] / np.where(seen, z, 1)) + added)[seen][:, seen])
        expected = every.sigma2[q] * X[:, seen] @ K @ X[:, seen].T
        size = float(max(np.abs(expected).max(), 1e-3))
        close(gram[q] / size, expected / size, precision)
        expected = every.sigma2[q] * X[:, seen] @ K @ every.deviation(q)[seen]
        close(linear[q] / size, expected / size, precision)


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_given_the_weights_are_those_of_a_regression(precision, kind):
    every, rng = tasks(kind, 3.0), np.random.default_rng(1)
    w, noise = rng.normal(size=(Q, M)), rng.normal(size=(50_000, Q, C))
    mean = every.prior.scale * every.beside.mean(jnp.asarray(w, float))
    slopes = every.prior.scale[..., None] * every.beside.slopes
    draw = jax.jit(jax.vmap(lambda noise: every.beside.draw(jnp.asarray(w, float), noise)))
    draws = every.prior.scale * np.asarray(draw(jnp.asarray(noise, float)), float)
    for q in range(Q):
        expected = every.coefficients(q, every.deviation(q) - every.features.T @ w[q])
        close(mean[q], expected, precision)
        close(slopes[q], -every.coefficients(q, every.features.T), precision)
        # 12 comparisons at 4.5 standard errors of a variance: a false alarm in 1 of 10,000 keys
        covariance = np.linalg.inv(every.precision(q))
        sd = np.sqrt(np.diag(covariance))
        found = np.cov(draws[:, q].T) / np.outer(sd, sd)
        bound = 4.5 * np.sqrt(2 / len(noise))
        assert np.all(np.abs(found - covariance / np.outer(sd, sd)) < bound)
        assert np.all(np.abs(draws[:, q].mean(0) - expected) < bound * sd)


@pytest.mark.parametrize("kind", KINDS)
def test_squares_are_those_of_any_coefficients_and_slopes(precision, kind):
    every, rng = tasks(kind, 3.0), np.random.default_rng(2)
    mean, var = rng.normal(size=(Q, M)), rng.uniform(size=(Q, M))
    u, slopes = rng.normal(size=(Q, C)), rng.normal(size=(Q, C, M))
    found = every.beside.squares(
        *jax.tree.map(lambda x: jnp.asarray(x, float), ((mean, var), u, slopes))
    )
    D, X = every.covariates, every.features
    for q in range(Q):
        z, scale = every.weighs(q), every.prior.scale[q]
        left = every.deviation(q) - D.T @ (scale * u[q]) - X.T @ mean[q]
        along = X.T + D.T @ (scale[:, None] * slopes[q])
        close(found[q], z @ (left**2 + along**2 @ var[q]), precision)
