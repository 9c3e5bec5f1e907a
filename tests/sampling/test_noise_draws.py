# SPDX-License-Identifier: Apache-2.0
"""Noise scales at which chains start, and draws of one with the slabs integrated out."""

import numpy as np
import pytest
from scipy import stats
import truth
from truth import enumeration

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.flips import Sweeps
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.sampling.noise_draws import draw_noise

KEY = random.key(0)


def wide_model(X, y):
    """Everything but the weights is learnt."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    pi = numpyro.sample("pi", dist.Beta(1.0, X.shape[1] / 5 - 1))
    truth.respond(y, X @ truth.weights(X.shape[1], pi, scale), sigma)


def wide_data(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(100, 2000))
    y = X[:, :4] @ [1.0, -0.9, 0.8, 0.35] + 0.8 * rng.normal(size=100)
    return jnp.float32(X), jnp.float32(y - y.mean())


def test_a_chain_leaves_noise_that_is_far_too_small(x32):
    """Ten chains, of which half would still have more columns than rows."""
    args, kernel = wide_data(3), nss.PairedGibbs(wide_model)
    start = {"sigma": jnp.full(10, 0.01)}
    state = kernel.init(random.split(KEY, 10), 300, start, args, {})

    def step(state, _):
        state = kernel.sample(state, args, {})
        return state, (state.z["sigma"], state.z["w_spike"].sum(-1))

    sigma, size = jax.jit(lambda state: jax.lax.scan(step, state, length=300)[1])(state)
    # of 4000 right draws none has less noise, or more columns
    assert np.all((sigma[200:] > 0.4) & (sigma[200:] < 1.6)) and np.all(size[200:] < 60)


def test_chains_start_at_the_noise_without_columns():
    X, y = truth.fixed_case().args
    kernel, args = nss.PairedGibbs(truth.noise_model), (X, 100.0 * y)
    keys, size = random.split(KEY, 1000), 100.0 * np.sqrt(np.mean(np.square(y)))
    sigma = kernel.init(keys, 0, None, args, {}).z["sigma"]
    # a false alarm in 1 of 10000 keys
    assert stats.kstest(np.log(sigma), stats.norm(np.log(size), 0.5).cdf).pvalue > 1e-4
    start = {"sigma": jnp.full(1000, 0.01)}
    np.testing.assert_array_equal(kernel.init(keys, 0, start, args, {}).z["sigma"], start["sigma"])


def test_noise_outside_of_its_prior_is_no_start():
    def model(X, y):
        sigma = numpyro.sample("sigma", dist.Uniform(0.0, 0.1))
        truth.respond(y, X @ truth.weights(X.shape[1]), sigma)

    state = nss.PairedGibbs(model).init(random.split(KEY, 50), 0, None, truth.fixed_case().args, {})
    assert np.all((state.z["sigma"] > 0) & (state.z["sigma"] < 0.1))


def background_model(X, share, y):
    """Rows whose noise has a part of its own size."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    scale = jnp.sqrt(sigma**2 + tau**2 * share)
    truth.respond(y, X @ truth.weights(X.shape[1], 0.3, 1.0), scale)


def test_scales_of_two_parts_of_noise_have_their_posterior():
    X = truth.design("correlated", num_obs=30, size=6)
    share, rng = np.tile([0.0, 0.3, 1.0, 3.0, 9.0], 6), np.random.default_rng(0)
    y = X[:, 0] + 0.4 * X[:, 3] + np.sqrt(0.5 + 0.3 * share) * rng.normal(size=30)
    grid = [((k + 0.5) / 12, (j + 0.5) / 12) for k in range(30) for j in range(24)]

    def at(sigma, tau):
        return truth.regression(X, y, np.sqrt(sigma**2 + tau**2 * share), 0.3, 1.0)

    log_prior = lambda models, *scales: -0.5 * np.sum(np.square(scales))  # noqa: E731
    exact = enumeration.sum_over_scales(at, grid, log_prior)
    kernel = nss.PairedGibbs(background_model)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=10_000, progress_bar=False)
    mcmc.run(KEY, X, share, y)
    draws = mcmc.get_samples()
    found = np.concatenate([draws["w_spike"].mean(0), draws["w"].mean(0)])
    np.testing.assert_allclose(found, exact[:12], atol=0.02)
    scales = [draws["sigma"].mean(), draws["tau"].mean()]
    np.testing.assert_allclose(scales, exact[12:], atol=0.02)


def level_model(X, seen, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.3, 3.0))
    location = level + X @ truth.weights(X.shape[1], 0.5, 0.7)
    with numpyro.plate("obs", len(X)), numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Normal(location, sigma), obs=y)


@pytest.mark.parametrize("sweeps", [Sweeps.AS_PROGRAM, Sweeps.DOUBLE])
def test_noise_and_slabs_have_their_distribution_given_the_spikes(sweeps, x32):
    """With five columns in, a level and a row that is missing, from noise that is far too small."""
    rng = np.random.default_rng(0)
    X, seen = rng.normal(1.0, size=(5, 6)), np.arange(5) != 2
    y, spikes = X[:, 0] + 0.5 * rng.normal(size=5), np.array([1, 1, 0, 1, 1, 1])
    args = jnp.float32(X), jnp.asarray(seen), jnp.float32(y)
    reading = Reader(level_model, "test")(args, {})
    start = {"sigma": jnp.float32(0.01), "level": jnp.float32(9.0)}
    start |= {"w_spike": jnp.asarray(spikes), "w_slab": jnp.ones(6, jnp.float32)}

    def chain(key):
        def step(z, key):
            values = draw_noise(key, Current.of(reading, {}, z), sweeps).values
            return {name: values[name] for name in z}, None

        return jax.lax.scan(step, start, random.split(key, 100))[0]

    draws = jax.jit(jax.vmap(chain))(random.split(KEY, 4000))
    rows = np.column_stack([X[:, spikes > 0], np.ones(5)])[seen]
    prior = np.array([0.7] * 5 + [3.0]) ** 2
    explained, residual = rows * prior @ rows.T, (y - 0.3)[seen]
    grid = np.exp(np.linspace(np.log(1e-4), np.log(5.0), 2000))
    of_data = [
        stats.multivariate_normal(np.zeros(4), explained + s**2 * np.eye(4)).logpdf(residual)
        for s in grid
    ]
    density = np.exp(of_data + stats.halfnorm.logpdf(grid)) * grid
    cdf = np.cumsum(density) / np.sum(density)
    sigma, slabs = (np.asarray(draws[k], float) for k in ("sigma", "w_slab"))
    # two tests at 1e-4 each: a false alarm in 1 of 5000 keys
    assert stats.kstest(sigma, lambda s: np.interp(s, grid, cdf)).pvalue > 1e-4
    distances = []
    for s, w in zip(sigma, slabs[:, spikes > 0], strict=True):
        gain = prior[:, None] * np.linalg.solve(explained + s**2 * np.eye(4), rows).T
        covariance = (np.diag(prior) - gain @ rows * prior)[:5, :5]
        change = w - (gain @ residual)[:5]
        distances.append(change @ np.linalg.solve(covariance, change))
    assert stats.kstest(distances, stats.chi2(5).cdf).pvalue > 1e-4
    assert np.all(slabs[:, 2] == 1)
