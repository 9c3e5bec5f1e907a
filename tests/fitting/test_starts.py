# SPDX-License-Identifier: Apache-2.0
"""Where fits of latent functions start."""

import numpy as np
import pytest
from truth.task_problems import SMOOTH, M, N, Problem, Q, observations, started

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.starts import power, start_alone, start_at, start_svd
from numpyro_spikeslab.reading.roles import scale_mode

pytestmark = pytest.mark.usefixtures("x64")


def begun(start, *args) -> Problem:
    problem = started("weak", True)
    return problem._replace(posterior=start(problem.engine, problem.posterior, *args))


def assert_noise_is_the_mode(problem, variance):
    """Of as many observations with this variance, as in the M-step."""
    count, prior = problem.at.count, problem.at.priors["noise"]
    expected = scale_mode(count, count * variance, prior, 1.0)
    np.testing.assert_allclose(problem.posterior.values["noise"], expected)


def test_a_start_alone_has_no_functions():
    problem = begun(start_alone)
    assert not np.any(problem.posterior.weights.probs)
    np.testing.assert_array_equal(problem.functions.mean, problem.engine.functions.mean)
    np.testing.assert_allclose(problem.functions.var[0], np.diag(problem.covariance(0)))
    assert not np.any(problem.functions.kl)
    _, Y = observations()
    assert_noise_is_the_mode(problem, np.nanmean(Y**2, axis=0))


def test_the_power_of_a_task_is_never_zero():
    at = started("weak", True).at
    empty = at._replace(
        Y=at.Y.at[:, 0].set(0.0), relative=at.relative.at[:, 1].set(0.0).at[:, 0].set(1.0)
    )
    squares = np.where(np.asarray(empty.relative) > 0, np.asarray(empty.Y) ** 2, np.nan)
    of_all, expected = np.nanmean(squares), np.nanmean(squares[:, 2:], axis=0)
    np.testing.assert_allclose(power(empty), [of_all, of_all, *expected])
    nothing = at._replace(Y=jnp.zeros_like(at.Y))
    np.testing.assert_array_equal(power(nothing), np.ones(Q))


def test_singular_vectors_start_with_the_best_approximation_of_their_rank():
    problem = begun(start_svd)
    sd = np.sqrt(np.asarray(power(problem.at)))
    U, S, V = np.linalg.svd(np.asarray(problem.at.Y) / sd, full_matrices=False)
    expected = (U[:, :M] * S[:M]) @ V[:M] * sd
    W = np.asarray(problem.posterior.weights.mean)
    np.testing.assert_allclose(W @ W.T, (sd[:, None] * V[:M].T * S[:M] ** 2 / N) @ (V[:M] * sd))
    # the functions follow from the vectors, observed with some noise
    deviation = np.asarray(problem.functions.mean - problem.engine.functions.mean)
    assert np.corrcoef((W @ deviation).T.ravel(), expected.ravel())[0, 1] > 0.98


def test_a_zero_column_is_switched_off():
    rng = np.random.default_rng(0)
    W = jnp.asarray(rng.normal(size=(Q, M))).at[:, 0].set(0.0)
    phi = jnp.asarray(rng.normal(size=(M, N)))
    problem = begun(start_at, W, phi, jnp.full(Q, 0.2))
    assert not np.any(problem.posterior.weights.probs[:, 0])
    np.testing.assert_allclose(problem.posterior.weights.mean, W)
    assert not np.any(problem.functions.alpha[0]) and np.any(problem.functions.alpha[1])
    np.testing.assert_array_equal(problem.functions.mean[0], problem.engine.functions.mean[0])
    np.testing.assert_allclose(problem.functions.var[0], np.diag(problem.covariance(0)))
    assert problem.functions.kl[0] == 0.0 and problem.functions.kl[1] > 0.0
    # scales and probabilities follow from what is on
    assert_noise_is_the_mode(problem, 0.2)
    # 5.4 of 12 weights, and the counts of the prior
    np.testing.assert_allclose(problem.posterior.values["inclusion"], (5.4 + 1) / (12 + 3))
    values = problem.posterior.values["phi_scale"]
    np.testing.assert_allclose(np.log(values), problem.functions.theta[:, 0])


def test_intercepts_are_no_part_of_the_first_functions():
    x = np.linspace(0, 3, N)
    Y = np.sin(2 * x)[:, None] * np.ones(3) + 100.0 * np.arange(3)

    def model(X, Y):
        phi = nss.latent_functions("phi", [SMOOTH] * 2, X)
        with numpyro.plate("task", 3, dim=-1):
            intercept = numpyro.sample("intercept", dist.Normal(0.0, 300.0))
        with numpyro.plate("row", 3, dim=-2), numpyro.plate("latent", 2, dim=-1):
            W = nss.spike_slab("W", 0.5)
        numpyro.sample("Y", dist.Normal(intercept + (W @ phi).T, 0.5), obs=Y)

    svi = nss.CAVI(model, nss.PairedGuide(model))
    params = svi.get_params(svi.init(random.key(0), x, Y))
    np.testing.assert_allclose(params["intercept_auto_loc"], Y.mean(axis=0), atol=1.0)
    start = {"intercept_auto_loc": jnp.ones(3)}
    params = svi.get_params(svi.init(random.key(0), x, Y, init_params=start))
    np.testing.assert_array_equal(params["intercept_auto_loc"], 1.0)
