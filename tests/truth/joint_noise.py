# SPDX-License-Identifier: Apache-2.0
"""Regressions with a joint covariance of all errors, as users write them, and their truth."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import truth
from truth import Case, log_density, regression, weights

N = 20
X = truth.design("correlated")
RNG = np.random.default_rng(7)
LAGS = np.abs(np.subtract.outer(np.arange(N), np.arange(N)))
ROOT = RNG.normal(size=(N, 6))
KINSHIP = ROOT @ ROOT.T / 6


def response(covariance: np.ndarray) -> np.ndarray:
    return X @ [0.9, 0.0, 0.0, -0.5] + np.linalg.cholesky(covariance) @ RNG.normal(size=N)


def whitened(covariance: np.ndarray, X: np.ndarray, y: np.ndarray) -> truth.Regression:
    """The regression with independent errors, but for the log determinant."""
    root = np.linalg.cholesky(covariance)
    return regression(np.linalg.solve(root, X), np.linalg.solve(root, y), 1.0, 0.3, 1.0)


def case(model: Callable, X: Any, y: Any, args: tuple, at: Callable, **priors: Any) -> Case:
    """A case whose covariance is ``at(values)``."""

    def log_prior(values):
        return log_density(**priors)(values) - 0.5 * np.linalg.slogdet(at(values))[1]

    args = tuple(jnp.asarray(x, float) for x in (*args, y))
    shapes = {"w": (X.shape[1],)}
    return Case(model, args, lambda z: whitened(at(z), X, y), log_prior, shapes, not priors)


def least_squares_model(X, covariance, y=None):
    location = X @ weights(X.shape[1])
    numpyro.sample("y", dist.MultivariateNormal(location, covariance), obs=y)


def least_squares_case() -> Case:
    covariance = 0.3 * np.exp(-LAGS / 4.0)
    y = response(covariance)
    return case(least_squares_model, X, y, (X, covariance), lambda _: covariance)


def kinship_model(X, kinship, y=None):
    relatives = numpyro.sample("relatives", dist.HalfNormal(1.0))
    alone = numpyro.sample("alone", dist.HalfNormal(1.0))
    covariance = relatives * kinship + alone * jnp.eye(len(X))
    location = X @ weights(X.shape[1])
    numpyro.sample("y", dist.MultivariateNormal(location, covariance), obs=y)


def kinship_case() -> Case:
    y = response(0.5 * KINSHIP + 0.2 * np.eye(N))
    prior = stats.halfnorm()
    at = lambda z: z["relatives"] * KINSHIP + z["alone"] * np.eye(N)  # noqa: E731
    return case(kinship_model, X, y, (X, KINSHIP), at, relatives=prior, alone=prior)


def autoregressive_model(X, y=None):
    """Errors that forget each other, given by their precision."""
    rho = numpyro.sample("rho", dist.Uniform(-1.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inside = jnp.ones(len(X)).at[jnp.array([0, -1])].set(0.0)
    beside = jnp.eye(len(X), k=1) + jnp.eye(len(X), k=-1)
    precision = jnp.eye(len(X)) + rho**2 * jnp.diag(inside) - rho * beside
    location = X @ weights(X.shape[1])
    likelihood = dist.MultivariateNormal(location, precision_matrix=precision / sigma**2)
    numpyro.sample("y", likelihood, obs=y)


def autoregressive_case() -> Case:
    y = response(0.3 * 0.7**LAGS)
    at = lambda z: z["sigma"] ** 2 / (1 - z["rho"] ** 2) * z["rho"] ** LAGS  # noqa: E731
    priors = {"rho": stats.uniform(-1.0, 2.0), "sigma": stats.halfnorm()}
    return case(autoregressive_model, X, y, (X,), at, **priors)


def summary_model(R, root, z=None):
    location = R @ weights(len(R))
    numpyro.sample("y", dist.MultivariateNormal(location, scale_tril=root), obs=z)


def summary_case() -> Case:
    """Statistics of columns, one by one, with the correlations of the columns."""
    R = 0.5 * np.corrcoef(X.T) + 0.5 * np.eye(4)
    z = R @ [4.0, 0.0, 0.0, -3.0] + np.linalg.cholesky(R) @ RNG.normal(size=4)
    return case(summary_model, R, z, (R, np.linalg.cholesky(R)), lambda _: R)


CASES: dict[str, Callable[[], Case]] = {
    "generalised least squares": least_squares_case,
    "kinship": kinship_case,
    "autoregressive errors": autoregressive_case,
    "summary statistics": summary_case,
}
