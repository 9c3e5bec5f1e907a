# SPDX-License-Identifier: Apache-2.0
"""The Gaussian conditional of coefficients."""

import numpy as np
import pytest

import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import taken_apart, without
from numpyro_spikeslab.algebra.pairs import Design


@pytest.mark.parametrize(("scale", "sigma", "num_obs"), [(10, 0.1, 4000), (30, 0.1, 1000)])
def test_single_precision_tells_a_level_from_effects_of_groups(scale, sigma, num_obs):
    """Which only their priors do; products of the features would lose them to rounding."""
    rng = np.random.default_rng(0)
    rows = scale * np.vstack([np.ones(num_obs), np.eye(4)[:, np.arange(num_obs) % 4]])
    current = rng.normal(size=5)
    y = 3.0 + sigma * rng.normal(size=num_obs)
    residual = y - current @ rows
    precision = np.full(num_obs, sigma**-2.0)
    exact = np.linalg.inv(np.eye(5) + (rows * precision) @ rows.T)
    mean = exact @ (rows * precision) @ y
    parts = (rows, precision, residual, current)
    rows, precision, residual, current = (jnp.asarray(x, jnp.float32) for x in parts)
    found, given = without(rows, precision), (jnp.sqrt(precision) * residual, current)
    found_mean = np.asarray(found.mean(*given))
    covariance = np.linalg.inv(np.asarray(found.root, float).T @ np.asarray(found.root, float))
    np.testing.assert_allclose(np.diag(covariance), np.diag(exact), rtol=0.02)
    # in standard deviations
    error = (found_mean - mean) / np.sqrt(np.diag(exact))
    assert np.max(np.abs(error)) < 0.02
    moved = np.asarray(found.draw(jnp.ones(5, jnp.float32), *given)) - found_mean
    np.testing.assert_allclose(np.asarray(found.root) @ moved, 1.0, atol=1e-2)


def test_missing_observations_say_nothing():
    rows = jnp.array([[1.0, 2.0, jnp.nan]])
    precision, residual = jnp.array([1.0, 4.0, 0.0]), jnp.array([0.5, 1.0, 0.0])
    found = without(rows, precision)
    mean = found.mean(jnp.sqrt(precision) * residual, jnp.zeros(1))
    np.testing.assert_allclose(mean, (0.5 + 8.0) / (1 + 1 + 16), rtol=1e-6)
    assert found.V[2, 0] == 0


@pytest.mark.parametrize("scales", [(100.0, 1e-3, 1.0), (1e-8, 1.0, 10.0)])
def test_observations_without_coefficients_are_those_of_the_joint_covariance(x64, scales):
    rng = np.random.default_rng(0)
    features = np.array(scales)[:, None] * rng.normal(size=(3, 20))
    precision = rng.uniform(0.1, 2.0, size=20)
    precision[3] = 0
    columns = (features * np.sqrt(precision)).T
    inverse = np.linalg.inv(np.eye(20) + columns @ columns.T)
    found = without(jnp.asarray(features), jnp.asarray(precision))
    whitening = np.asarray(found.whiten(jnp.eye(20)))
    np.testing.assert_allclose(whitening @ whitening.T, inverse, atol=1e-10)
    rows = jnp.asarray(rng.normal(size=(2, 4, 20)))
    products = np.einsum("kan,nm,kbm->kab", rows, inverse, rows)
    # whatever the span without which they are kept
    for directions in (columns.T, rng.normal(size=(2, 20))):
        apart = taken_apart(rows, jnp.asarray(directions))
        white = found.design(Design(rows, products), apart)
        np.testing.assert_allclose(white.rows, found.whiten(rows), atol=1e-9)
        np.testing.assert_allclose(white.gram, products, atol=1e-9)
    np.testing.assert_allclose(found.design(Design(rows, rows), None).gram, products, atol=1e-9)
    residual, current = rng.normal(size=20), rng.normal(size=3)
    target = residual + columns @ current
    mean = np.linalg.solve(np.eye(3) + columns.T @ columns, columns.T @ target)
    np.testing.assert_allclose(
        found.mean(jnp.asarray(residual), jnp.asarray(current)), mean, atol=1e-10
    )


def test_single_precision_knows_columns_whose_means_are_a_thousand_times_their_spread():
    """Beside an intercept with a wide prior they are centred columns."""
    rng = np.random.default_rng(0)
    rows = (2000 + rng.normal(size=(3, 400))).astype(np.float32)
    features, precision = np.full((1, 400), 1e4), np.full(400, 2.0)
    cut = rows.astype(float) - rows.astype(float).mean(axis=1, keepdims=True)
    found = without(jnp.asarray(features, jnp.float32), jnp.asarray(precision, jnp.float32))
    apart = taken_apart(jnp.asarray(rows), jnp.ones((1, 400), jnp.float32))
    white = found.design(Design(jnp.asarray(rows), jnp.zeros((3, 3))), apart)
    # hundredths of the square of a column
    np.testing.assert_allclose(white.gram, cut @ cut.T, atol=4.0)
    np.testing.assert_allclose(white.rows, cut, atol=0.01)
