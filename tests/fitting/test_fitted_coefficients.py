# SPDX-License-Identifier: Apache-2.0
"""Fits of coefficients beside the weights, such as intercepts, and of small noise."""

from functools import partial

from fits import KEY, estimator_of_the_bound
import numpy as np
import optax
import pytest
import truth

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO

import numpyro_spikeslab as nss


def model_of(location, noise=0.8):
    """One of X and y, and a function of X that is added to the location."""

    def model(X, y=None):
        scale = numpyro.sample("sigma", noise) if isinstance(noise, dist.Distribution) else noise
        truth.respond(y, location(X) + X @ truth.weights(X.shape[1]), scale)

    return model


def level(X):
    return numpyro.sample("level", dist.Normal(0.0, 100.0))


def intercepts(X):
    """Of eight groups, whose mean has a prior too: held at one value, it would hold them."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    with numpyro.plate("group", 8):
        return numpyro.sample("effect", dist.Normal(mean, 0.5))[np.arange(len(X)) % 8]


LEVEL, INTERCEPTS = model_of(level), model_of(intercepts)


def fitted(model, *args, blocks=None):
    guide = nss.PairedGuide(model, blocks=blocks)
    svi = nss.CAVI(model, guide, temperature=None)
    args = tuple(map(jnp.asarray, args))
    return guide, svi, svi.run(KEY, 200, *args, tol=None, progress_bar=False), args


def test_a_column_of_years_is_found_beside_an_intercept(precision):
    """And the bound is as high as where a fit begins at the truth."""
    rng = np.random.default_rng(0)
    year = np.repeat(np.arange(1950.0, 2000.0), 4)
    X = np.column_stack([year, rng.normal(size=(200, 4))])
    y = 0.02 * (year - 1975) + X[:, 1] + 3 + 0.5 * rng.normal(size=200)
    args, model = (jnp.asarray(X), jnp.asarray(y)), model_of(level, dist.HalfNormal(1.0))
    guide = nss.PairedGuide(model)
    result = nss.CAVI(model, guide).run(KEY, 200, *args, progress_bar=False)
    start = {
        "w_auto_probs": jnp.array([1.0, 1.0, 0.01, 0.01, 0.01]),
        "w_auto_loc": jnp.array([0.02, 1.0, 0.0, 0.0, 0.0]),
        "level_auto_loc": jnp.array(3 - 0.02 * 1975),
        "sigma_auto_loc": jnp.array(0.5),
    }
    cold = nss.CAVI(model, guide, temperature=None)
    from_truth = cold.run(KEY, 200, *args, init_params=start, progress_bar=False)
    inclusion = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(inclusion[:2], 1.0, atol=0.01)
    assert np.all(inclusion[2:] < 0.2)
    assert result.losses[-1] <= from_truth.losses[-1] + 0.02
    least_squares = np.linalg.lstsq(np.column_stack([X[:, :2], np.ones(200)]), y, rcond=None)[0]
    assert guide.posterior_mean(result.params)["w"][0] == pytest.approx(least_squares[0], abs=2e-3)
    assert precision == "float32" or np.all(np.diff(from_truth.losses) < 1e-8)


def dummies(num_obs=200, seed=2):
    """Zeros and ones, of which few are zeros in the first and the last column."""
    rng = np.random.default_rng(seed)
    X = (rng.random((num_obs, 3)) < [0.95, 0.5, 0.97]) * 1.0
    return X, 0.45 * X[:, 0] + 0.3 * X[:, 1] + 0.8 * rng.normal(size=num_obs)


def tasks_model(X, Y, plate="task"):
    """:param X: features of all tasks, (N, M), or of each, (N, Q, M).
    :param plate: of the intercepts.
    """
    Q, M = Y.shape[1], X.shape[-1]
    with numpyro.plate(plate, Q, dim=-1):
        level = numpyro.sample("level", dist.Normal(1.0, 3.0))
    W = truth.task_weights(Q, M)
    location = level + (jnp.einsum("nqm,qm->nq", X, W) if X.ndim == 3 else X @ W.T)
    truth.respond_by_task(Y, location, 0.5, plate="task")


@pytest.mark.parametrize(
    ("model", "columns", "scales"),
    [
        (LEVEL, np.ones((200, 1)), [100.0]),
        (INTERCEPTS, np.eye(9)[np.arange(200) % 8 + 1] + np.eye(9)[0], [10.0] + [0.5] * 8),
    ],
    ids=["level", "intercepts"],
)
def test_one_block_of_all_columns_is_exact(precision, model, columns, scales):
    """Coefficients are columns of the marginal likelihood, whatever the means of the others."""
    X, y = dummies()
    tolerance = {"float32": 2e-3, "float64": 1e-5}[precision]
    prior = [0.3] * 3 + [1 - 1e-12] * len(scales), [1.0] * 3 + scales
    for shifted in (X, X + 30):
        design = np.column_stack([shifted, columns])
        exact = truth.enumerate_models(truth.regression(design, y, 0.8, *prior))
        guide, _, result, _ = fitted(model, shifted, y, blocks=[[0, 1, 2]])
        inclusion = guide.inclusion_probabilities(result.params)["w"]
        np.testing.assert_allclose(inclusion, exact.inclusion[:3], atol=tolerance)


def test_the_bound_of_what_follows_is_that_of_the_guide(x64):
    """Of coefficients whose mean follows too; test_every_model has single ones."""
    guide, svi, result, args = fitted(INTERCEPTS, *dummies())
    estimate, slopes = estimator_of_the_bound(INTERCEPTS, guide), "mean_auto_slope"
    # at the optimum and away from it, where other slopes count
    for params in (result.params, result.params | {slopes: 0.7 * result.params[slopes]}):
        state = svi.init(KEY, *args, init_params=params)
        mean, error = estimate(params, *args)
        # two comparisons at 4.5 standard errors: a false alarm in 1 of 73000 keys
        assert abs(mean + svi.evaluate(state, *args)) < 4.5 * error < 0.3


def test_draws_follow_their_weights(precision):
    guide, _, result, args = fitted(LEVEL, *dummies())
    fresh = nss.PairedGuide(LEVEL)
    for of in (guide, fresh):
        draws = of.sample_posterior(random.key(3), result.params, *args, sample_shape=(500,))
        params = {name: np.asarray(x, float) for name, x in result.params.items()}
        mean = params["w_auto_probs"] * params["w_auto_loc"]
        expected = params["level_auto_loc"] + (draws["w"] - mean) @ params["level_auto_slope"]
        np.testing.assert_allclose(draws["level"], expected, rtol=1e-4, atol=1e-5)
        assert np.std(draws["level"]) > 0.05
    # new data have other slopes, the guide those of the fit
    new = Predictive(LEVEL, guide=fresh, params=result.params, num_samples=500)
    assert np.all(np.isfinite(new(random.key(3), args[0][:7])["y"]))


@pytest.mark.parametrize(
    ("plate", "apart"),
    [
        ("task", False),
        ("other", True),
        ("other", False),
        ("task", True),
    ],
)
def test_tasks_beside_intercepts_of_their_own_are_regressions(x64, plate, apart):
    """Whatever the plate of the intercepts, on which the shape of their slopes depends."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2)) + [0.0, 4.0]
    Y = X @ rng.normal(size=(2, 3)) * [1.0, 0.3, 0.1] + 0.5 * rng.normal(size=(30, 3))
    model = partial(tasks_model, plate=plate)
    features = np.repeat(X[:, None], 3, axis=1) if apart else X
    guide, _, result, args = fitted(model, features, Y)
    assert result.params["level_auto_slope"].shape == (3, 2 if plate == "task" else 6)

    one_task = model_of(lambda X: numpyro.sample("level", dist.Normal(1.0, 3.0)), 0.5)
    total, slopes = 0.0, np.asarray(result.params["level_auto_slope"])
    if plate != "task":
        slopes = np.stack([slopes[q].reshape(3, 2)[q] for q in range(3)])
    mean, levels = guide.posterior_mean(result.params)["W"], result.params["level_auto_loc"]
    for q in range(3):
        alone, _, one, _ = fitted(one_task, X, Y[:, q])
        total += float(one.losses[-1])
        expected = alone.posterior_mean(one.params)["w"]
        np.testing.assert_allclose(mean[q], expected, atol=1e-6)
        np.testing.assert_allclose(levels[q], one.params["level_auto_loc"], atol=1e-6)
        np.testing.assert_allclose(slopes[q], one.params["level_auto_slope"], atol=1e-6)
    assert float(result.losses[-1]) == pytest.approx(total, abs=1e-7)
    draws = guide.sample_posterior(KEY, result.params, *args, sample_shape=(50,))
    expected = levels + np.einsum("sqm,qm->sq", draws["W"] - mean, slopes)
    np.testing.assert_allclose(draws["level"], expected, atol=1e-8)


def test_slopes_that_a_fit_has_not_are_not_handed_back(x64):
    """A coefficient that tasks share does not follow, so the bound is that of slopes of zero."""
    rng = np.random.default_rng(0)
    X, T = rng.normal(size=(8, 2)) + 1, np.linspace(-1, 1, 8)

    def model(Y):
        location = numpyro.sample("trend", dist.Normal(0.0, 1.0)) * T[:, None]
        W = truth.task_weights(3, 2, 0.4)
        truth.respond_by_task(Y, location + X @ W.T, 0.7, plate="task")

    _, svi, plain, args = fitted(model, X @ rng.normal(size=(2, 3)) + T[:, None])
    slopes = plain.params | {"trend_auto_slope": jnp.full(6, 0.3)}
    state = svi.init(KEY, *args, init_params=slopes)
    np.testing.assert_array_equal(svi.get_params(state)["trend_auto_slope"], np.zeros(6))
    same = svi.init(KEY, *args, init_params=plain.params)
    assert svi.evaluate(state, *args) == svi.evaluate(same, *args)


def test_gradients_find_the_slopes(x64):
    guide, _, result, args = fitted(LEVEL, *dummies())
    slopes = result.params["level_auto_slope"]
    by_gradient = SVI(LEVEL, guide, optax.adam(0.02), TraceGraph_ELBO(num_particles=20))
    start = result.params | {"level_auto_slope": jnp.zeros(3)}
    end = by_gradient.run(KEY, 1000, *args, init_params=start, progress_bar=False)
    np.testing.assert_allclose(end.params["level_auto_slope"], slopes, atol=0.05)
    np.testing.assert_allclose(end.params["w_auto_probs"], result.params["w_auto_probs"], atol=0.1)


# Noise that is small beside the observations


def noise_of(model, X, Y):
    args = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    return nss.CAVI(model, nss.PairedGuide(model)).run(KEY, 150, *args, progress_bar=False)


@pytest.mark.parametrize("units", [1e-5, (1.0, 1e-5)])
def test_single_precision_finds_noise_a_hundred_thousandth_of_the_rest(units):
    """Of a column; of a task, that of another in a smaller unit is as well found."""
    rng = np.random.default_rng(0)
    X, noise = rng.normal(size=(200, 3)), rng.normal(size=(200, np.size(units)))
    if np.size(units) == 1:
        model, Y = truth.noise_model, X[:, 0] + units * noise[:, 0]
    else:
        model = lambda X, Y: truth.shared_features_model(X, np.ones(Y.shape, bool), Y)  # noqa: E731
        Y = np.asarray(units) * (X[:, :1] + noise)
    sigma = noise_of(model, X, Y).params["sigma_auto_loc"]
    np.testing.assert_allclose(sigma, np.squeeze(units * np.std(noise, axis=0)), rtol=0.05)


def test_observations_that_are_all_zero_have_little_noise():
    result = noise_of(truth.noise_model, random.normal(KEY, (20, 3)), np.zeros(20))
    assert 0 < result.params["sigma_auto_loc"] < 1e-6 and np.all(np.isfinite(result.losses))
