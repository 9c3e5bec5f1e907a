# SPDX-License-Identifier: Apache-2.0
"""Predictions of latent functions in closed form, against draws and dense algebra."""

from functools import partial

import numpy as np
import pytest
from refusals import refusals
from tinygp import kernels
import truth
from truth.function_models import first_params
from truth.task_problems import observations

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.features import engine_of
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
N, Q = 24, 4
X, Y = observations(N, Q)
SMOOTH = kernels.ExpSquared(1.0)


class Fit:
    """Fitted once, for the tests that only look."""

    def __init__(self):
        # without moves, which take half a minute
        self.model = nss.models.mtmkl([SMOOTH] * 3)
        self.guide = nss.PairedGuide(self.model)
        svi = nss.CAVI(self.model, self.guide, plain=True)
        self.result = svi.run(KEY, 60, X, Y, progress_bar=False)
        self.params = self.result.params

    def predict(self, **options):
        return self.guide.predict(self.params, X, Y, **options)


@pytest.fixture(scope="module")
def fit():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    fit = Fit()
    jax.config.update("jax_enable_x64", before)
    return fit


def assert_moments(draws, mean, variance):
    sd = np.sqrt(np.asarray(variance))
    assert np.max(np.abs(draws.mean(0) - mean) / (5 * sd / np.sqrt(len(draws)) + 1e-3)) < 1
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.5, atol=5e-4)


@pytest.mark.exhaustive
def test_draws_have_the_moments_of_the_prediction(fit):
    draws = fit.guide.sample_posterior(KEY, fit.params, X, Y, sample_shape=(500,))
    assert draws["phi"].shape == (500, 3, N) and draws["W"].shape == (500, Q, 3)
    assert_moments(draws["f"], *fit.predict())
    X_new = X[:5] + 0.06
    predictive = Predictive(fit.model, guide=fit.guide, params=fit.params, num_samples=500)
    draws = predictive(KEY, X, Y, X_new)
    assert draws["Y_new"].shape == (500, 5, Q)
    assert_moments(draws["f_new"], *fit.predict(X_new=X_new))


@pytest.mark.exhaustive
def test_summaries_of_functions_need_the_arguments_of_the_model(fit):
    means = fit.guide.posterior_mean(fit.params, X, Y)
    np.testing.assert_allclose((means["W"] @ means["phi"]).T, fit.predict()[0], atol=1e-6)
    assert set(fit.guide.posterior_mean(fit.params)) == {"W"}
    medians = fit.guide.median(fit.params, X, Y)
    np.testing.assert_allclose(medians["phi"], means["phi"])
    assert "phi" not in fit.guide.median(fit.params)
    low, middle, high = fit.guide.quantiles(fit.params, [0.025, 0.5, 0.975], X, Y)["phi"]
    np.testing.assert_allclose(middle, means["phi"], atol=1e-12)
    variance = fit.result.state.optim_state[1].functions.var
    np.testing.assert_allclose(high - low, 2 * 1.9599639845 * np.sqrt(variance), rtol=1e-5)
    # a model that holds its data needs none
    guide = nss.PairedGuide(partial(fit.guide.model, X, Y))
    np.testing.assert_array_equal(guide.predict(fit.params)[0], fit.predict()[0])
    np.testing.assert_array_equal(guide.median(fit.params)["phi"], medians["phi"])


def test_predictions_follow_from_the_posterior_of_each_function(fit):
    """Given its values at the inputs a function is Gaussian elsewhere: dense algebra."""
    X_new = X[:5] + 0.06
    mean, variance = fit.predict(X_new=X_new)
    posterior = fit.result.state.optim_state[1]
    functions, weights = posterior.functions, posterior.weights
    W, W2 = np.asarray(weights.mean), np.asarray(weights.slab_moments[1])
    expected, spread = np.zeros((5, Q)), np.zeros((5, Q))
    for m in range(3):
        length = float(fit.params["phi_scale_auto_loc"][m])

        def K(a, b, length=length):
            return np.exp(-0.5 * (a[:, None] - b) ** 2 / length**2)

        prior = K(X, X) + 1e-9 * np.eye(N)
        alpha, h = np.asarray(functions.alpha[m]), np.asarray(functions.h[m])
        B = np.eye(N) + alpha[:, None] * prior
        at_inputs = np.linalg.solve(B, h)
        cross = K(X, X_new)
        phi = cross.T @ at_inputs
        var = np.diag(K(X_new, X_new) - cross.T @ np.linalg.solve(B, alpha[:, None] * cross))
        expected += np.outer(phi, W[:, m])
        spread += np.outer(phi**2 + var, W2[:, m]) - np.outer(phi**2, W[:, m] ** 2)
    np.testing.assert_allclose(mean, expected, atol=1e-6)
    np.testing.assert_allclose(variance, spread, atol=1e-6)


def test_data_that_change_in_place_change_predictions(fit):
    inputs = X.copy()
    predict = partial(fit.guide.predict, fit.params, inputs, Y, X_new=X)
    before = predict()[0]
    # what a function is at the new inputs follows from the old ones, as they are now
    inputs *= 2.0
    assert np.max(np.abs(predict()[0] - before)) > 0.1
    inputs /= 2.0
    np.testing.assert_array_equal(predict()[0], before)


def of_line(x, Y):
    """Tasks whose location without functions changes from input to input."""
    slope = numpyro.sample("slope", dist.Normal())
    phi = nss.latent_functions("phi", [SMOOTH], x)
    location = (truth.task_weights(Q, 1) @ phi).T + slope * x[:, None]
    numpyro.sample("Y", dist.Normal(location, 0.5).to_event(2), obs=Y)


def predict_line(fit):
    guide, args = nss.PairedGuide(of_line), (X, np.nan_to_num(Y))
    params = first_params(guide, *args) | {"slope_auto_loc": jnp.array(1.0)}
    return guide.predict(params, *args, X_new=X[:2])


REFUSALS = {
    "axes": (lambda fit: fit.predict(X_new=np.ones((3, 2))), r"got the shape \(3, 2\)"),
    "no point": (lambda fit: fit.predict(X_new=np.ones(0)), "at least one point"),
    "NaN": (lambda fit: fit.predict(X_new=np.array([np.nan])), "X_new: got nan in row 0"),
    "a line": (predict_line, "is not the same at all inputs"),
    "traced parameters": (
        lambda fit: jax.jit(lambda params: fit.guide.predict(params, X, Y))(fit.params),
        r"predict: got traced arguments.*outside of jit",
    ),
    "traced data": (
        lambda fit: jax.jit(lambda Y: fit.guide.predict(fit.params, X, Y))(Y),
        r"predict: got traced arguments.*outside of jit",
    ),
}


test_what_cannot_be_predicted_is_refused = refusals(REFUSALS, lambda call, fit: call(fit), "fit")


def at_large_means(what, x64):
    """Variances from weights and functions that are large beside their spread."""
    rng, (M, N) = np.random.default_rng(0), (5, 12)
    loc, mean = 5 + 0.1 * rng.normal(size=(Q, M)), 2 + 0.1 * rng.normal(size=(M, N))
    params = {
        "W_auto_probs": np.ones((Q, M)),
        "W_auto_loc": loc,
        "W_auto_scale": np.full((Q, M), 1e-3),
        "phi_auto_precision": np.full((M, N), 1e6 - 1),
        "phi_auto_linear": 1e6 * mean,
        "inclusion_auto_loc": 0.5,
        "noise_auto_loc": np.full(Q, 1e-5),
        "slab_scale_auto_loc": 5.0,
    }
    # the same numbers in both precisions
    params = {name: np.float32(x).astype(float) for name, x in params.items()}
    table = np.float32((loc @ mean).T).astype(float)
    with jax.enable_x64(x64):
        params = {name: jnp.asarray(x, float) for name, x in params.items()}
        Y = jnp.asarray(table, float)
        guide = nss.PairedGuide(nss.models.factor_analysis(M))
        if what == "predict":
            return guide.predict(params, Y)[1]
        if what == "entries":
            return guide.predict(params, Y, entries=(np.arange(3), np.arange(3)))[1]
        reading = Reader(guide.model, "test")((Y,), {})
        first_params(guide, Y)
        engine, q = engine_of(reading, False, None), guide.pack(reading, params)
        at = engine.view(q)
        if what == "moments":
            return engine.features.moments(engine, at, q)[1]
        # what the functions leave is nearly nothing beside their spread
        return engine.features.squares(engine, at, q)


@pytest.mark.parametrize("what", ["predict", "entries", "moments", "squares"])
def test_variances_hold_in_single_precision_where_means_are_large(what):
    single, double = (np.asarray(at_large_means(what, x64), float) for x64 in (False, True))
    assert np.all(double > 0)
    np.testing.assert_allclose(single, double, rtol=1e-4)


@pytest.mark.exhaustive
def test_chains_can_start_from_draws_of_the_fit(fit):
    """test_latent_gibbs has starts at medians."""
    drawn = fit.guide.to_init_params(fit.params, X, Y, rng_key=KEY, num_chains=2)
    assert drawn["phi"].shape == (2, 3, N) and drawn["noise"].shape == (2, Q)
    assert np.any(drawn["phi"][0] != drawn["phi"][1])
