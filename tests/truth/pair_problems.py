# SPDX-License-Identifier: Apache-2.0
"""Problems of pairs for the tests, and the sweep of the definition."""

import numpy as np
from scipy.special import expit

import jax.numpy as jnp

from numpyro_spikeslab.algebra import pairs
import truth

PRECISION = 1.0 / 0.5**2


def problem(size=7, num_obs=15, seed=0, kind="correlated"):
    """Design (N, P), whitened residual at weights, weights, log odds and slab variances."""
    rng = np.random.default_rng(seed)
    X = truth.design(kind, num_obs, size, seed)
    w = rng.normal(size=size) * (rng.random(size) < 0.5)
    y = rng.normal(size=num_obs) + X[:, 0]
    return X, y, w, rng.normal(size=size) - 1.0, rng.uniform(0.3, 3.0, size)


def arrays(X, y, w, log_odds, variance, block_size=pairs.BLOCK_SIZE):
    """The same as arguments of the sweeps."""
    design = pairs.block_design(jnp.asarray(X.T), None, block_size)
    residual = jnp.asarray(y - X @ w)
    prior = pairs.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    return design, residual, jnp.asarray(w), prior


def exact_posterior(X, y, _, log_odds, variance):
    problem = truth.regression(X, y, PRECISION**-0.5, expit(log_odds), np.sqrt(variance))
    return truth.enumerate_models(problem)


def one_by_one(X, y, w, log_odds, variance, put):
    """The sweep of the definition: one coordinate after the other, from the raw data."""
    w, conditionals = np.array(w), []
    for m in range(len(w)):
        a = PRECISION * X[:, m] @ X[:, m] + 1.0 / variance[m]
        b = PRECISION * X[:, m] @ (y - X @ w + X[:, m] * w[m])
        odds = log_odds[m] - 0.5 * np.log(variance[m] * a) + 0.5 * b**2 / a
        conditionals.append((odds, b / a, 1.0 / a))
        w[m] = put(m, *conditionals[-1])
    return w, np.array(conditionals).T


def close(actual, expected, precision):
    tolerance = {"float32": 2e-4, "float64": 1e-10}[precision]
    assert actual.dtype == precision
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
