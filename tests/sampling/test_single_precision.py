# SPDX-License-Identifier: Apache-2.0
"""Little noise and columns that are alike, in single precision, which is NumPyro's default."""

from functools import partial
import warnings

import numpy as np
import pytest
from scipy.special import logsumexp
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import split_gelman_rubin
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.flips import Sweeps
from numpyro_spikeslab.support.precision import double_precision

pytestmark = [
    pytest.mark.usefixtures("x32"),
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore:There are not enough devices"),
]

# number of observations, noise, and correlation of neighbours
ROWS = [(1000, 0.03, 0.999), (5000, 0.1, 0.998), (1000, 0.03, 0.9999), (300, 0.003, 0.9999995)]


def model(X, y, intercept=False):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    location = X @ truth.weights(X.shape[1], 0.2, 1.0)
    if intercept:
        location += numpyro.sample("intercept", dist.Normal(0.0, 50.0))
    truth.respond(y, location, sigma)


WITH_INTERCEPT = partial(model, intercept=True)


def alike(num_obs, noise, rho):
    """Eight columns, of which two have an effect, as arrays in single precision."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_obs, 8))
    for j in range(1, 8):
        X[:, j] = rho * X[:, j - 1] + np.sqrt(1 - rho**2) * X[:, j]
    y = X[:, 2] + 0.5 * X[:, 6] + noise * rng.normal(size=num_obs)
    return np.float32(X), np.float32(y)


def exact(X, y, noise, always=0):
    """Inclusion probabilities and means by enumeration, over a grid of the noise.

    The first columns are ``always`` in; their prior is part of their scale.
    """
    X, y = np.asarray(X, float), np.asarray(y, float)
    sigmas = noise * np.exp(np.linspace(-0.5, 0.5, 81))
    inclusion = np.where(np.arange(X.shape[1]) < always, 1 - 1e-15, 0.2)
    # the posterior of all 256 models at each noise
    at = [truth.enumerate_models(truth.regression(X, y, s, inclusion, 1.0)) for s in sigmas]
    log_probs = np.array([x.log_evidence for x in at]) - 0.5 * sigmas**2 + np.log(sigmas)
    probs = np.exp(log_probs - logsumexp(log_probs))
    assert max(probs[0], probs[-1]) < 1e-6
    parts = [[x.inclusion, x.mean] for x in at]
    return np.einsum("s,sip->ip", probs, parts)[:, always:]


def chains(data, key=0, model=model, **options):
    settings = dict(num_warmup=500, num_samples=2000, num_chains=4, progress_bar=False)
    mcmc = MCMC(nss.PairedGibbs(model), **settings | options)
    mcmc.run(random.key(key), *map(jnp.asarray, data))
    samples = mcmc.get_samples(group_by_chain=True)
    return mcmc, np.asarray(samples["w_spike"], float), np.asarray(samples["w_slab"], float)


@pytest.mark.parametrize(
    ("row", "method"),
    [
        (ROWS[0], "sequential"),
        (ROWS[1], "sequential"),
        (ROWS[2], "sequential"),
        (ROWS[3], "sequential"),
        (ROWS[3], "vectorized"),
    ],
)
def test_little_noise_and_columns_that_are_alike(row, method):
    data = alike(*row)
    mcmc, spikes, slabs = chains(data, chain_method=method)
    assert slabs.shape == (4, 2000, 8) and mcmc.last_state.sweeps == Sweeps.DOUBLE
    assert mcmc.last_state.z["w_slab"].dtype == np.float32 and not jax.config.jax_enable_x64
    inclusion, mean = exact(*data, row[1])
    np.testing.assert_allclose(spikes.mean((0, 1)), inclusion, atol=0.02)
    np.testing.assert_allclose((spikes * slabs).mean((0, 1)), mean, atol=0.02)
    moves = (spikes * slabs)[..., (inclusion > 0.01) & (inclusion < 0.99)]
    assert max(map(split_gelman_rubin, np.moveaxis(moves, -1, 0))) < 1.05


def test_both_precisions_have_the_same_posterior(restored_x64):
    data, spikes = alike(*ROWS[3]), []
    for is_double in (False, True):
        jax.config.update("jax_enable_x64", is_double)
        spikes.append(chains([x.astype(float) for x in data])[1].mean((0, 1)))
    np.testing.assert_allclose(*spikes, atol=0.02)


def celsius(noise, gap=1e-3):
    rng = np.random.default_rng(3)
    degrees = rng.uniform(0.0, 40.0, size=300)
    columns = [degrees, degrees + gap * rng.normal(size=300), *rng.normal(size=(2, 300))]
    y = 1.8 * degrees + 32.0 + noise * rng.normal(size=300)
    return np.float32(np.column_stack(columns)), np.float32(y)


@pytest.mark.parametrize("noise", [1e-3, 0.03])
def test_a_near_copy_takes_no_part_with_one_chain(noise):
    data = celsius(noise, gap=noise)
    _, spikes, slabs = chains(data, model=WITH_INTERCEPT, num_chains=1)
    constant = np.full((300, 1), 50.0)
    inclusion, mean = exact(np.hstack([constant, data[0]]), data[1], noise, always=1)
    np.testing.assert_allclose(spikes[0].mean(0), inclusion, atol=0.02)
    np.testing.assert_allclose((spikes * slabs)[0].mean(0), mean, atol=0.02)
    np.testing.assert_allclose(mean, [1.8, 0, 0, 0], atol=0.03)


# What is decided before a chain


def sweeps_of(model, *data):
    return nss.PairedGibbs(model).init(random.key(0), 0, None, data, {}).sweeps


def of_scales(X, y, sigma=None, slab=1.0, intercept=0.0):
    if sigma is None:
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    if slab is None:
        slab = numpyro.sample("slab", dist.HalfNormal(1.0))
    truth.respond(y, intercept + X @ truth.weights(X.shape[1], 0.2, slab), sigma)


def ordinary(num_obs=100, size=8, noise=0.5):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(num_obs, size))
    y = X[:, 1] - X[:, 2] + noise * rng.normal(size=num_obs)
    return jnp.asarray(X, np.float32), jnp.asarray(y, np.float32)


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        (ordinary(), {}, Sweeps.AS_PROGRAM),
        (ordinary(), {"slab": None}, Sweeps.AS_PROGRAM),
        # a fit of all columns would leave no noise
        (ordinary(72, 1000), {}, Sweeps.AS_PROGRAM),
        (ordinary(), {"sigma": 1e-3}, Sweeps.DOUBLE),
        (ordinary(noise=1e-3), {}, Sweeps.DOUBLE),
        (ordinary(noise=1e-3), {"slab": None}, Sweeps.DOUBLE),
        (ordinary(100, 200, noise=1e-3), {}, Sweeps.DOUBLE),
    ],
)
def test_the_precision_is_decided_by_the_data(data, options, expected):
    assert sweeps_of(lambda X, y: of_scales(X, y, **options), *data) == expected


def test_noise_beside_a_difference_of_columns_is_seen():
    """Neither of the two columns explains anything by itself."""
    X, _ = ordinary(1000)
    X = X.at[:, 1].set(X[:, 0] + 0.1 * X[:, 1])
    y = X[:, 0] - X[:, 1] + 1e-3 * random.normal(random.key(2), 1000)
    assert sweeps_of(of_scales, X, y) == Sweeps.DOUBLE


def test_noise_that_is_rounding_is_said_once():
    data, kernel = tuple(map(jnp.asarray, celsius(0.0))), nss.PairedGibbs(WITH_INTERCEPT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # as chains that run one after the other do
        for seed in range(2):
            kernel.init(random.key(seed), 0, None, data, {})
    texts = [str(w.message) for w in caught if "rounding" in str(w.message)]
    assert len(texts) == 1 and "'y'" in texts[0] and "numpyro.enable_x64()" in texts[0]
    with double_precision():
        assert sweeps_of(of_scales, *(x.astype(float) for x in data)) == Sweeps.AS_PROGRAM


def test_data_that_are_traced_are_judged_in_every_step():
    row = ROWS[3]
    X, y = alike(*row)

    @jax.jit
    def drawn(X, y):
        mcmc = MCMC(nss.PairedGibbs(model), num_warmup=500, num_samples=4000, progress_bar=False)
        mcmc.run(random.key(0), X, y)
        assert mcmc.last_state.sweeps == Sweeps.AS_REQUIRED
        return mcmc.get_samples()["w_spike"]

    inclusion, _ = exact(X, y, row[1])
    np.testing.assert_allclose(drawn(X, y).mean(0), inclusion, atol=0.03)


def test_other_data_of_a_compiled_chain_are_judged_anew():
    X, y = alike(*ROWS[3])
    mcmc = MCMC(
        nss.PairedGibbs(model),
        num_warmup=500,
        num_samples=4000,
        progress_bar=False,
        jit_model_args=True,
    )
    for noise, expected in ((0.5, Sweeps.AS_PROGRAM), (0.0, Sweeps.DOUBLE)):
        response = y + noise * random.normal(random.key(5), y.shape)
        mcmc.run(random.key(0), jnp.asarray(X), response)
        assert mcmc.last_state.sweeps == expected
        inclusion, _ = exact(X, response, noise or ROWS[3][1])
        np.testing.assert_allclose(mcmc.get_samples()["w_spike"].mean(0), inclusion, atol=0.03)
