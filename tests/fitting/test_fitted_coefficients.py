# SPDX-License-Identifier: Apache-2.0
"""Fits of coefficients beside the weights, such as intercepts, and of small noise."""

from functools import partial

from fits import KEY
import numpy as np
import optax
import pytest
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import slopes as following


def year_model(X, y=None, prior=dist.Normal):
    level = numpyro.sample("level", prior(0.0, 100.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + X @ w, sigma), obs=y)


def test_a_column_of_years_is_found_beside_an_intercept(precision):
    """And the bound is as high as where a fit begins at the truth."""
    rng = np.random.default_rng(0)
    year = np.repeat(np.arange(1950.0, 2000.0), 4)
    X = np.column_stack([year, rng.normal(size=(200, 4))])
    y = 0.02 * (year - 1975) + X[:, 1] + 3 + 0.5 * rng.normal(size=200)
    args = jnp.asarray(X), jnp.asarray(y)
    guide = nss.PairedGuide(year_model)
    svi = nss.CAVI(year_model, guide)
    result = svi.run(KEY, 200, *args, progress_bar=False)
    truth_ = {
        "w_auto_probs": jnp.array([1.0, 1.0, 0.01, 0.01, 0.01]),
        "w_auto_loc": jnp.array([0.02, 1.0, 0.0, 0.0, 0.0]),
        "level_auto_loc": jnp.array(3 - 0.02 * 1975),
        "sigma_auto_loc": jnp.array(0.5),
    }
    cold = nss.CAVI(year_model, guide, temperature=None)
    from_truth = cold.run(KEY, 200, *args, init_params=truth_, progress_bar=False)
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found[:2], 1.0, atol=0.01)
    assert np.all(found[2:] < 0.2)
    assert result.losses[-1] <= from_truth.losses[-1] + 0.02
    least_squares = np.linalg.lstsq(np.column_stack([X[:, :2], np.ones(200)]), y, rcond=None)[0]
    assert guide.posterior_mean(result.params)["w"][0] == pytest.approx(least_squares[0], abs=2e-3)
    if precision == "float64":
        assert np.all(np.diff(from_truth.losses) < 1e-8)
        reached = float(svi.evaluate(result.state, *args))
        assert reached == pytest.approx(float(result.losses[-1]), abs=1e-8)


def dummies(num_obs=200, seed=2):
    """Zeros and ones, of which few are zeros in the first and the last column."""
    rng = np.random.default_rng(seed)
    X = (rng.random((num_obs, 3)) < [0.95, 0.5, 0.97]) * 1.0
    return X, 0.45 * X[:, 0] + 0.3 * X[:, 1] + 0.8 * rng.normal(size=num_obs)


def level_model(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 100.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + X @ w, 0.8), obs=y)


def fitted(X, y, model=level_model, blocks=None):
    guide = nss.PairedGuide(model, blocks=blocks)
    svi = nss.CAVI(model, guide, temperature=None)
    args = jnp.asarray(X), jnp.asarray(y)
    return guide, svi, svi.run(KEY, 100, *args, progress_bar=False), args


@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0])
def test_one_block_of_all_columns_is_exact_whatever_their_means(precision, shift):
    """For an intercept with a wide prior is integrated out as it is in the marginal likelihood."""
    X, y = dummies()
    X = X + shift
    # what an intercept with the scale 100 adds to the covariance, as a column of its own
    with_level = np.column_stack([X, 100 * np.ones(len(X))])
    problem = truth.regression(with_level, y, 0.8, np.array([0.3] * 3 + [1 - 1e-12]), 1.0)
    exact = truth.enumerate_models(problem)
    guide, _, result, _ = fitted(X, y, blocks=[[0, 1, 2]])
    tolerance = {"float32": 2e-3, "float64": 1e-5}[precision]
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, exact.inclusion[:3], atol=tolerance)


def groups_model(X, y=None, spread=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    scale = 0.5 if spread is None else numpyro.sample("spread", spread)
    with numpyro.plate("group", 8):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(effect[np.arange(len(X)) % 8] + X @ w, 0.8), obs=y)


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_one_block_is_exact_where_the_mean_of_intercepts_has_a_prior_too(precision, shift):
    """Held at one value, it would hold the intercepts."""
    X, y = dummies()
    X = X + shift
    columns = np.column_stack([X, np.ones(len(X)), np.eye(8)[np.arange(len(X)) % 8]])
    inclusion, scales = [0.3] * 3 + [1 - 1e-12] * 9, [1.0] * 3 + [10.0] + [0.5] * 8
    exact = truth.enumerate_models(truth.regression(columns, y, 0.8, inclusion, scales))
    guide, _, result, _ = fitted(X, y, model=groups_model, blocks=[[0, 1, 2]])
    tolerance = {"float32": 2e-3, "float64": 1e-5}[precision]
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, exact.inclusion[:3], atol=tolerance)


def test_dummies_and_their_complements_have_the_same_fit(precision):
    X, y = dummies()
    every = X, 1 - X, X - np.mean(X, axis=0)
    found = [fitted(x, y)[2].params["w_auto_probs"] for x in every]
    tolerance = {"float32": 2e-3, "float64": 1e-4}[precision]
    np.testing.assert_allclose(found[1], found[0], atol=tolerance)
    np.testing.assert_allclose(found[2], found[0], atol=tolerance)


@pytest.mark.parametrize(
    ("model", "slopes", "blocks"),
    [
        (level_model, "level_auto_slope", None),
        pytest.param(level_model, "level_auto_slope", [[0, 2]], marks=pytest.mark.slow),
        (groups_model, "mean_auto_slope", None),
    ],
)
def test_the_bound_of_what_follows_is_that_of_the_guide(x64, model, slopes, blocks):
    guide, svi, result, args = fitted(*dummies(), model=model, blocks=blocks)

    @jax.jit
    def estimate(params):
        def particle(key):
            return -TraceGraph_ELBO().loss(key, params, model, guide, *args)

        particles = jax.vmap(particle)(random.split(KEY, 20_000))
        return jnp.mean(particles), jnp.std(particles) / jnp.sqrt(20_000)

    # at the optimum and away from it, where other slopes count
    for params in (result.params, result.params | {slopes: 0.7 * result.params[slopes]}):
        state = svi.init(KEY, *args, init_params=params)
        mean, error = estimate(params)
        # six comparisons at 4.5 standard errors: a false alarm in 1 of 24000 keys
        assert abs(mean + svi.evaluate(state, *args)) < 4.5 * error < 0.3


def test_draws_follow_their_weights(precision):
    X, y = dummies()
    guide, _, result, args = fitted(X, y)
    fresh = nss.PairedGuide(level_model)
    for of in (guide, fresh):
        draws = of.sample_posterior(random.key(3), result.params, *args, sample_shape=(500,))
        params = {name: np.asarray(x, float) for name, x in result.params.items()}
        mean = params["w_auto_probs"] * params["w_auto_loc"]
        expected = params["level_auto_loc"] + (draws["w"] - mean) @ params["level_auto_slope"]
        np.testing.assert_allclose(draws["level"], expected, rtol=1e-4, atol=1e-5)
        assert np.std(draws["level"]) > 0.05
    # new data have other slopes, the guide those of the fit
    new = Predictive(level_model, guide=fresh, params=result.params, num_samples=500)
    assert np.all(np.isfinite(new(random.key(3), args[0][:7])["y"]))


@pytest.mark.slow
def test_coefficients_in_a_plate_of_their_own_follow_too(x64):
    """No site of the weights is in this plate."""
    rng = np.random.default_rng(0)
    X, Z = jnp.asarray(rng.normal(size=(30, 3)) + 2), jnp.asarray(rng.normal(size=(30, 2)))
    y = X[:, 0] + Z[:, 0] + jnp.asarray(rng.normal(size=30))

    def model(X, Z, y=None):
        with numpyro.plate("covariate", Z.shape[1]):
            c = numpyro.sample("c", dist.Normal(0.0, 1.0))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(Z @ c + X @ w, 1.0), obs=y)

    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    result = svi.run(KEY, 50, X, Z, y, progress_bar=False)
    fresh = nss.PairedGuide(model)
    new = Predictive(model, guide=fresh, params=result.params, num_samples=7)(KEY, X, Z)
    assert new["y"].shape == (7, 30)
    estimate = jax.jit(TraceGraph_ELBO(num_particles=4000).loss, static_argnums=(2, 3))
    loss = estimate(KEY, result.params, model, fresh, X, Z, y)
    # its standard error is 0.01 and less
    assert abs(loss - result.losses[-1]) < 0.05


def tasks_model(X, Y, plate="task", apart=False):
    """:param plate: of the intercepts.
    :param apart: whether each task has features of its own, (N, Q, M).
    """
    (N, Q), M = Y.shape, X.shape[-1]
    with numpyro.plate(plate, Q, dim=-1):
        level = numpyro.sample("level", dist.Normal(1.0, 3.0))
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", M, dim=-1):
        W = nss.spike_slab("W", 0.3, 0.8)
    with numpyro.plate("obs", N, dim=-2), numpyro.plate("task", Q, dim=-1):
        location = level + (jnp.einsum("nqm,qm->nq", X, W) if apart else X @ W.T)
        numpyro.sample("Y", dist.Normal(location, 0.5), obs=Y)


@pytest.mark.parametrize(
    ("plate", "apart"),
    [
        ("task", False),
        ("other", True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("other", False), ("task", True))),
    ],
)
def test_tasks_beside_intercepts_of_their_own_are_regressions(x64, plate, apart):
    """Whatever the plate of the intercepts, on which the shape of their slopes depends."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2)) + [0.0, 4.0]
    Y = X @ rng.normal(size=(2, 3)) * [1.0, 0.3, 0.1] + 0.5 * rng.normal(size=(30, 3))
    model = partial(tasks_model, plate=plate, apart=apart)
    given = np.repeat(X[:, None], 3, axis=1) if apart else X
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, temperature=None)
    result = svi.run(KEY, 200, jnp.asarray(given), jnp.asarray(Y), progress_bar=False)
    assert result.params["level_auto_slope"].shape == (3, 2 if plate == "task" else 6)

    def one_task(X, y):
        with numpyro.plate("feature", 2):
            w = nss.spike_slab("w", 0.3, 0.8)
        level = numpyro.sample("level", dist.Normal(1.0, 3.0))
        with numpyro.plate("obs", 30):
            numpyro.sample("y", dist.Normal(level + X @ w, 0.5), obs=y)

    alone = nss.PairedGuide(one_task)
    svi = nss.CAVI(one_task, alone, temperature=None)
    total, slopes = 0.0, np.asarray(result.params["level_auto_slope"])
    if plate != "task":
        slopes = np.stack([slopes[q].reshape(3, 2)[q] for q in range(3)])
    mean, levels = guide.posterior_mean(result.params)["W"], result.params["level_auto_loc"]
    for q in range(3):
        one = svi.run(KEY, 200, jnp.asarray(X), jnp.asarray(Y[:, q]), progress_bar=False)
        total += float(one.losses[-1])
        expected = alone.posterior_mean(one.params)["w"]
        np.testing.assert_allclose(mean[q], expected, atol=1e-6)
        np.testing.assert_allclose(levels[q], one.params["level_auto_loc"], atol=1e-6)
        np.testing.assert_allclose(slopes[q], one.params["level_auto_slope"], atol=1e-6)
    assert float(result.losses[-1]) == pytest.approx(total, abs=1e-7)
    draws = guide.sample_posterior(KEY, result.params, given, Y, sample_shape=(50,))
    expected = levels + np.einsum("sqm,qm->sq", draws["W"] - mean, slopes)
    np.testing.assert_allclose(draws["level"], expected, atol=1e-8)


def test_slopes_that_a_fit_has_not_are_not_handed_back(x64):
    """Beside tasks a coefficient that all of them share does not follow, so the bound is that of
    slopes of zero."""
    rng = np.random.default_rng(0)
    X, T = rng.normal(size=(8, 2)) + 1, np.linspace(-1, 1, 8)
    Y = X @ rng.normal(size=(2, 3)) + T[:, None] + 0.5 * rng.normal(size=(8, 3))

    def model(Y):
        trend = numpyro.sample("trend", dist.Normal(0.0, 1.0))
        with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", 2, dim=-1):
            W = nss.spike_slab("W", 0.4)
        with numpyro.plate("obs", 8, dim=-2), numpyro.plate("task", 3, dim=-1):
            location = X @ W.T + trend * T[:, None]
            numpyro.sample("Y", dist.Normal(location, 0.7), obs=Y)

    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    plain = svi.run(KEY, 60, Y, progress_bar=False)
    slopes = plain.params | {"trend_auto_slope": jnp.full(6, 0.3)}
    state = svi.init(KEY, Y, init_params=slopes)
    np.testing.assert_array_equal(svi.get_params(state)["trend_auto_slope"], np.zeros(6))
    assert svi.evaluate(state, Y) == svi.evaluate(svi.init(KEY, Y, init_params=plain.params), Y)
    result = svi.run(KEY, 10, Y, init_params=slopes, progress_bar=False)
    np.testing.assert_array_equal(result.params["trend_auto_slope"], np.zeros(6))


def test_where_there_are_too_many_slopes_none_follows(x64, monkeypatch):
    monkeypatch.setattr(following, "MAX_SLOPES", 2)
    _, _, result, _ = fitted(*dummies())
    assert set(result.params) == {"level_auto_loc", "w_auto_probs", "w_auto_loc", "w_auto_scale"}


def test_gradients_find_the_slopes(x64):
    guide, _, result, args = fitted(*dummies())
    slopes = result.params["level_auto_slope"]
    by_gradient = SVI(level_model, guide, optax.adam(0.02), TraceGraph_ELBO(num_particles=20))
    start = result.params | {"level_auto_slope": jnp.zeros(3)}
    end = by_gradient.run(KEY, 1000, *args, init_params=start, progress_bar=False)
    np.testing.assert_allclose(end.params["level_auto_slope"], slopes, atol=0.1)
    np.testing.assert_allclose(end.params["w_auto_probs"], result.params["w_auto_probs"], atol=0.1)


# Noise that is small beside the observations


def noise_model(X, Y=None):
    Q = 1 if Y is None or Y.ndim == 1 else Y.shape[1]
    with numpyro.plate("column", Q, dim=-1):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    if Q == 1:
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("Y", dist.Normal(X @ w, sigma), obs=Y)
        return
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
        W = nss.spike_slab("W", 0.3)
    with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate("column", Q, dim=-1):
        numpyro.sample("Y", dist.Normal(X @ W.T, sigma), obs=Y)


@pytest.mark.parametrize("units", [1e-5, (1.0, 1e-5)])
def test_single_precision_knows_noise_a_hundred_thousandth_of_the_rest(units):
    """Of a column; of a task, that of another in a smaller unit is as well known."""
    rng = np.random.default_rng(0)
    X, noise = rng.normal(size=(200, 3)), rng.normal(size=(200, np.size(units)))
    if np.size(units) == 1:
        Y, expected = X[:, 0] + units * noise[:, 0], units * np.std(noise)
    else:
        Y, expected = np.asarray(units) * (X[:, :1] + noise), units * np.std(noise, axis=0)
    args = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    svi = nss.CAVI(noise_model, nss.PairedGuide(noise_model))
    result = svi.run(KEY, 150, *args, progress_bar=False)
    np.testing.assert_allclose(result.params["sigma_auto_loc"], expected, rtol=0.05)


def test_observations_that_are_all_zero_have_little_noise(precision):
    svi = nss.CAVI(noise_model, nss.PairedGuide(noise_model))
    X = random.normal(KEY, (20, 3))
    result = svi.run(KEY, 150, X, jnp.zeros(20), progress_bar=False)
    assert 0 < result.params["sigma_auto_loc"] < 1e-6 and np.all(np.isfinite(result.losses))
