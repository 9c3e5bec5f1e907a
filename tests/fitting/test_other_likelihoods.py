# SPDX-License-Identifier: Apache-2.0
"""What guides do under likelihoods that are not Normal, beside the contract of all fits."""

from functools import partial

from fits import KEY
from function_models import MODELS, first_params
from likelihood_cases import CASES, data_of, model_of
import numpy as np
import pytest
from scipy import special, stats
from tinygp import kernels

import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.optim import Adam

import numpyro_spikeslab as nss

MODEL = model_of(CASES["logit"])


def classes(num_obs=200):
    """With two columns that no data tell apart."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(num_obs, 4))
    X[:, 3] = -2.0 * X[:, 1]
    y = rng.uniform(size=num_obs) < special.expit(1.5 * X[:, 1])
    return X.astype(np.float32), y


@pytest.mark.slow
def test_a_fit_of_classes_has_all_summaries():
    """In single precision, of booleans."""
    X, y = classes()
    guide = nss.PairedGuide(MODEL)
    svi = nss.CAVI(MODEL, guide, num_restarts=2)
    result = svi.run(KEY, 120, X, y, progress_bar=False)
    assert np.max(np.diff(result.losses[100:])) < 1e-3
    sets = guide.credible_sets(result.params, X, y)
    assert sets["members"].map(sorted).tolist() == [[1, 3]]
    assert guide.set_shares(result.params, X, y)["w"].shape == (1, 4)
    low, high = guide.quantiles(result.params, [0.05, 0.95])["w"]
    assert np.all(low <= high)
    start = guide.to_init_params(result.params, X, y, rng_key=KEY, num_chains=2)
    assert start["w_spike"].shape == (2, 4)
    state, loss = svi.update(result.state, X, y)
    assert float(loss) == pytest.approx(float(svi.evaluate(state, X, y)), abs=1e-3)


@pytest.mark.parametrize("name", ["poisson", "own"])
def test_likelihoods_without_closed_forms_are_for_svi(name):
    model, data = model_of(CASES[name]), data_of(CASES[name])
    guide = nss.PairedGuide(model)
    message = "'y': got one without closed-form updates.*with PairedGibbs, .*numpyro.infer.SVI"
    with pytest.raises(ValueError, match=message):
        nss.CAVI(model, guide).init(KEY, *data)
    svi = SVI(model, guide, Adam(0.01), TraceGraph_ELBO())
    result = svi.run(KEY, 2, *data, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert guide.sample_posterior(KEY, result.params, *data)["w"].shape == (3,)


SPREADS = {
    "negative binomial": lambda f, s: dist.NegativeBinomial2(jnp.exp(f), 4.0 * s),
    "student": lambda f, s: dist.StudentT(4.0, f, s),
}
HIDDEN = np.arange(30) < 3


def hidden(X, y, z, likelihood):
    """With sites of no closed form, and observations that are masked."""
    spread = numpyro.sample("spread", dist.Gamma(2.0, 1.0))
    shift = numpyro.sample("shift", dist.Gamma(2.0, 1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", len(X)), handlers.mask(mask=~HIDDEN):
        numpyro.sample("y", likelihood(X @ w + jnp.sqrt(shift) * z, spread), obs=y)


def with_gaps(value, *arrays):
    return [np.where(HIDDEN.reshape(-1, *[1] * (x.ndim - 1)), value, x) for x in arrays]


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREADS)
def test_what_is_masked_does_not_matter(name):
    """Not even for the slope of sites that L-BFGS moves."""
    rng = np.random.default_rng(3)
    X, z = rng.normal(size=(30, 2)), np.ones(30)
    y = rng.poisson(np.exp(0.5 + X[:, 0])).astype(float)
    model = partial(hidden, likelihood=SPREADS[name])
    guide = nss.PairedGuide(model)

    def fit(*data):
        return nss.CAVI(model, guide).run(KEY, 100, *data, progress_bar=False).params

    with_zero, with_nan = (fit(*with_gaps(value, X, y), z) for value in (0.0, np.nan))
    # the sites have left their start
    assert abs(with_zero["spread_auto_loc"] - guide.start()["spread_auto_loc"][0]) > 0.05
    for key, value in with_zero.items():
        np.testing.assert_allclose(with_nan[key], value, rtol=1e-5)
    with pytest.raises(ValueError, match=r"the sites \['shift'\]: got a slope .*Put 0 in place"):
        fit(X, y, *with_gaps(np.nan, z))


@pytest.mark.slow
def test_moves_of_functions_never_lower_the_bound(x64):
    model, args, _ = MODELS["classes"]()
    svi = nss.CAVI(model, nss.PairedGuide(model))
    result = svi.run(KEY, 120, *args, progress_bar=False)
    assert np.all(np.isfinite(result.losses)) and np.max(np.diff(result.losses)) < 1e-8
    assert float(svi.evaluate(result.state, *args)) == pytest.approx(float(result.losses[-1]))


def tasks(X, Y=None, link="classes", totals=5):
    """Two tasks of latent functions."""
    phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)], X)
    with numpyro.plate("task", 2, dim=-2), numpyro.plate("latent", 1):
        W = nss.spike_slab("W", 0.5, 2.0)
    f = 0.3 + (W @ phi).T
    fn = dist.Bernoulli(logits=f) if link == "classes" else dist.Binomial(totals, logits=f)
    numpyro.sample("Y", fn.to_event(2), obs=Y)


X = np.linspace(0.0, 2.0, 6)
Y = np.random.default_rng(0).integers(0, 2, (6, 2)).astype(float)


def guide_of_tasks(**options):
    model = partial(tasks, **options)
    guide = nss.PairedGuide(model)
    params = first_params(guide, X, Y)
    changes = {
        "W_auto_probs": jnp.array([[0.9], [0.7]]),
        "W_auto_loc": jnp.array([[2.0], [-1.0]]),
        "W_auto_scale": jnp.array([[0.3], [0.5]]),
        "phi_auto_precision": jnp.full((1, 6), 4.0),
        "phi_auto_linear": jnp.array([[3.0, 2.0, 0.0, -1.0, -4.0, 1.0]]),
    }
    return guide, params | changes


@pytest.mark.slow
@pytest.mark.parametrize("X_new", [None, np.linspace(0.5, 3.0, 8)])
def test_responses_have_the_predictor_integrated_out(x64, X_new):
    guide, params = guide_of_tasks(link="counts")
    predict = partial(guide.predict, params, X, Y, X_new=X_new)
    mean, variance = (np.asarray(x)[..., None] for x in predict())
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    shares, probs = shares / shares.sum(), special.expit(mean + np.sqrt(variance) * nodes)
    expected, quantiles = predict(scale="response", quantiles=[0.1, 0.5])
    np.testing.assert_allclose(expected, 5 * probs @ shares, atol=1e-3)
    assert quantiles.shape == (2, *expected.shape)
    for level, quantile in zip((0.1, 0.5), np.asarray(quantiles), strict=True):
        # of 1000 draws, 5 standard errors: a false alarm in 1 of 50,000 keys
        error = 5 * np.sqrt(level * (1 - level) / 1000)
        above = stats.binom.cdf(quantile[..., None], 5, probs) @ shares
        below = stats.binom.cdf(quantile[..., None] - 1, 5, probs) @ shares
        assert np.all((above > level - error) & (below < level + error))


@pytest.mark.slow
def test_normal_responses_have_the_noise(x64):
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)], num_tasks=2)
    guide = nss.PairedGuide(model)
    params = first_params(guide, X, Y) | {"noise_auto_loc": jnp.array([0.5, 2.0])}
    mean, variance = guide.predict(params, X, Y, noise=True)
    expected, (low, high) = guide.predict(
        params, X, Y, scale="response", quantiles=stats.norm.cdf([-1, 1])
    )
    np.testing.assert_allclose(expected, mean, atol=1e-8)
    # the error of a quantile is 5% of the width
    np.testing.assert_allclose((high - low) / 2, np.sqrt(variance), rtol=0.25)


@pytest.mark.slow
def test_responses_at_entries_of_a_table(x64):
    model, args, _ = MODELS["entries that are numbers of trials"]()
    guide = nss.PairedGuide(model)
    params = first_params(guide, *args)
    mean, quantiles = guide.predict(params, *args, scale="response")
    assert mean.shape == args[0].shape and quantiles.shape == (3, *mean.shape)
    others = np.arange(3), np.array([0, 1, 2])
    mean, _ = guide.predict(params, *args, entries=others, scale="response")
    assert np.all((mean > 0) & (mean < 20)) and mean.shape == (3,)


def test_responses_at_entries_of_a_dense_table_are_those_of_their_places(x64):
    """Each with a total of its own."""
    guide, params = guide_of_tasks(link="counts", totals=3 + np.arange(12).reshape(6, 2))
    mean, quantiles = guide.predict(params, X, Y, scale="response")
    rows, columns = np.array([5, 0, 5]), np.array([0, 1, 1])
    of_entries = guide.predict(params, X, Y, entries=(rows, columns), scale="response")
    np.testing.assert_array_equal(of_entries[0], mean[rows, columns])
    np.testing.assert_array_equal(of_entries[1], quantiles[:, rows, columns])
    with pytest.raises(ValueError, match="X_new: got new inputs of entries"):
        guide.predict(params, X, Y, entries=(rows, columns), scale="response", X_new=X)


def totals_that_change():
    guide, params = guide_of_tasks(link="counts", totals=3 + np.arange(6)[:, None])
    guide.predict(params, X, Y, X_new=X[:2], scale="response")


def predict(**options):
    guide, params = guide_of_tasks()
    guide.predict(params, X, Y, **options)


def joint(covariance):
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        numpyro.sample("y", dist.MultivariateNormal(X @ w, covariance(w)), obs=y)

    nss.CAVI(model, nss.PairedGuide(model)).init(KEY, np.ones((4, 2)), np.ones(4))


REFUSALS = {
    "covariance of weights": (
        partial(joint, lambda w: jnp.exp(w[0]) * jnp.eye(4)),
        "noise scale of 'y' depend on the weights .'w'.. Only its location may",
    ),
    "no covariance": (partial(joint, lambda w: -jnp.eye(4)), "covariance of .* positive definite"),
    "noise": (
        partial(predict, noise=True),
        "only Normal .* noise.*scale='response'",
    ),
    "noise of responses": (partial(predict, noise=True, scale="response"), "'response' and noise"),
    "another scale": (partial(predict, scale="odds"), "scale: got 'odds'"),
    "levels": (partial(predict, scale="response", quantiles=[2]), "quantiles: got .2., expected"),
    "unknown totals": (totals_that_change, "'Y' at new inputs: got .*other parameters change"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_has_no_answer_is_refused(name):
    call, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        call()
