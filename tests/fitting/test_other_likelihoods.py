# SPDX-License-Identifier: Apache-2.0
"""What guides do under likelihoods that are not Normal, beside the contract of all fits."""

from functools import partial

from fits import KEY
import numpy as np
import pytest
from refusals import refusals
from scipy import special
from truth.function_models import MODELS, first_params
from truth.likelihood_cases import CASES, data_of, model_of

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


def test_a_fit_of_classes_has_all_summaries():
    """In single precision, of booleans."""
    X, y = classes()
    guide = nss.PairedGuide(MODEL)
    svi = nss.CAVI(MODEL, guide, num_restarts=2)
    result = svi.run(KEY, 120, X, y, tol=None, progress_bar=False)
    assert np.max(np.diff(result.losses[100:])) < 1e-3
    sets = guide.credible_sets(result.params, X, y)
    assert sets["members"].map(sorted).tolist() == [[1, 3]]
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


def test_moves_of_functions_never_lower_the_bound(x64):
    model, args, _ = MODELS["classes"]()
    svi = nss.CAVI(model, nss.PairedGuide(model))
    result = svi.run(KEY, 120, *args, progress_bar=False)
    assert np.all(np.isfinite(result.losses)) and np.max(np.diff(result.losses)) < 1e-8
    assert float(svi.evaluate(result.state, *args)) == pytest.approx(float(result.losses[-1]))


def noise_of_classes():
    model, args, _ = MODELS["classes"]()
    guide = nss.PairedGuide(model)
    guide.predict(first_params(guide, *args), *args, noise=True)


def counts_of_thousands():
    """Of two clear effects the fit would have a probability of 0."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    y = rng.poisson(rng.gamma(5, np.exp(7 + X @ [0.5, 0.5]) / 5))

    def model(X, y):
        with numpyro.plate("feature", 2):
            w = nss.spike_slab("w", 0.5, 1.0)
        b = numpyro.sample("b", dist.Normal(0.0, 10.0))
        with numpyro.plate("row", len(X)):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(b + X @ w), 5.0), obs=y)

    nss.CAVI(model, nss.PairedGuide(model)).run(KEY, 150, X, y, progress_bar=False)


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
    "large counts": (counts_of_thousands, "counts 'y': got fewer than 2%.*with PairedGibbs"),
    "noise": (noise_of_classes, "only Normal .* noise.*Predictive"),
}


test_what_has_no_answer_is_refused = refusals(REFUSALS)
