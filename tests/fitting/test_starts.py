# SPDX-License-Identifier: Apache-2.0
"""Where fits of latent functions start."""

import numpy as np
import pytest
from task_problems import SMOOTH, M, N, Problem, Q, model_of, observations, problem, started

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.starts import power, start_alone, start_at, start_svd
from numpyro_spikeslab.roles import scale_mode

pytestmark = pytest.mark.usefixtures("x64")


def begun(start, *args) -> Problem:
    found = started("weak", True)
    return found._replace(posterior=start(found.spec, found.data, found.posterior, *args))


def assert_noise_is_the_mode(found, variance):
    """Of as many observations with this variance, as in the M-step."""
    count, prior = found.at.count, found.at.priors["noise"]
    expected = scale_mode(count, count * variance, prior, 1.0)
    np.testing.assert_allclose(found.posterior.values["noise"], expected)


@pytest.mark.slow
def test_a_start_alone_has_no_functions():
    found = begun(start_alone)
    assert not np.any(found.posterior.weights.probs)
    np.testing.assert_array_equal(found.functions.mean, found.data.mean)
    np.testing.assert_allclose(found.functions.var[0], np.diag(found.covariance(0)))
    assert not np.any(found.functions.kl)
    _, Y = observations()
    assert_noise_is_the_mode(found, np.nanmean(Y**2, axis=0))


def test_the_power_of_a_task_is_never_zero():
    at = started("weak", True).at
    empty = at._replace(
        Y=at.Y.at[:, 0].set(0.0), relative=at.relative.at[:, 1].set(0.0).at[:, 0].set(1.0)
    )
    seen = np.asarray(empty.relative) > 0
    squares = np.where(seen, np.asarray(empty.Y) ** 2, 0.0)
    everything = squares.sum() / seen.sum()
    expected = squares[:, 2:].sum(axis=0) / seen[:, 2:].sum(axis=0)
    np.testing.assert_allclose(power(empty), [everything, everything, *expected])
    nothing = at._replace(Y=jnp.zeros_like(at.Y))
    np.testing.assert_array_equal(power(nothing), np.ones(Q))


def test_singular_vectors_start_with_the_best_approximation_of_their_rank():
    found = begun(start_svd)
    sd = np.sqrt(np.asarray(power(found.at)))
    U, S, V = np.linalg.svd(np.asarray(found.at.Y) / sd, full_matrices=False)
    expected = (U[:, :M] * S[:M]) @ V[:M] * sd
    W = np.asarray(found.posterior.weights.mean)
    np.testing.assert_allclose(W @ W.T, (sd[:, None] * V[:M].T * S[:M] ** 2 / N) @ (V[:M] * sd))
    # the functions follow from the vectors, seen with some noise
    deviation = np.asarray(found.functions.mean - found.data.mean)
    assert np.corrcoef((W @ deviation).T.ravel(), expected.ravel())[0, 1] > 0.98


@pytest.mark.slow
def test_a_zero_column_is_switched_off():
    rng = np.random.default_rng(0)
    W = jnp.asarray(rng.normal(size=(Q, M))).at[:, 0].set(0.0)
    phi = jnp.asarray(rng.normal(size=(M, N)))
    found = begun(start_at, W, phi, jnp.full(Q, 0.2))
    assert not np.any(found.posterior.weights.probs[:, 0])
    np.testing.assert_allclose(found.posterior.weights.mean, W)
    assert not np.any(found.functions.alpha[0]) and np.any(found.functions.alpha[1])
    np.testing.assert_array_equal(found.functions.mean[0], found.data.mean[0])
    # scales and probabilities follow from what is on
    assert_noise_is_the_mode(found, 0.2)
    # 5.4 of 12 weights, and the counts of the prior
    np.testing.assert_allclose(found.posterior.values["inclusion"], (5.4 + 1) / (12 + 3))
    values = found.posterior.values["phi_scale"]
    np.testing.assert_allclose(np.log(values), found.functions.theta[:, 0])


@pytest.mark.slow
def test_fits_of_white_functions_from_singular_vectors():
    x, Y = observations(30, 5, 2)
    found = problem(model_of("weak", ["white"] * 2), (x, Y), start=start_svd)
    _, bounds = found.run(30)
    assert np.all(np.diff(bounds) > -1e-8)


@pytest.mark.slow
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
    given = {"intercept_auto_loc": jnp.ones(3)}
    params = svi.get_params(svi.init(random.key(0), x, Y, init_params=given))
    np.testing.assert_array_equal(params["intercept_auto_loc"], 1.0)
