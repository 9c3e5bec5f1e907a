# SPDX-License-Identifier: Apache-2.0
"""Statistics that are added to the draws of a variational fit."""

from collections import namedtuple

import arviz_base
import numpy as np
import pytest
from scipy import stats
import truth
from truth.known_draws import coin, pair
import xarray as xr

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, TraceGraph_ELBO
from numpyro.infer.autoguide import AutoDelta

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")

Y = 1.5
Result = namedtuple("Result", ["params", "state"])
RESULT = Result({"loc": np.float32(Y / 2)}, None)
MU = np.random.default_rng(0).normal(Y / 2, 0.5**0.5, size=50).astype(np.float32)


def model(y, scale=1.0):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def guide(y, scale=1.0):
    """The exact posterior at the right location."""
    numpyro.sample("mu", dist.Normal(numpyro.param("loc", 0.0), 0.5**0.5))


class Auxiliary:
    """The same by way of an auxiliary site, as the mean-field guide has."""

    def __call__(self, y, scale=1.0):
        whole = dist.Normal(numpyro.param("loc", 0.0), 0.5**0.5)
        value = numpyro.sample("mu_auxiliary", whole, infer={"is_auxiliary": True})
        numpyro.sample("mu", dist.Delta(value))

    def auxiliary_values(self, draws):
        return {"mu_auxiliary": draws["mu"]}

    def inclusion_probabilities(self, params):
        return {"mu": params["loc"] / 3}


class ClosedForm(SVI):
    """A fit that knows its bound."""

    def evaluate(self, svi_state, *args, **kwargs):
        return 2.5 * kwargs["scale"]


def svi(guide, of=SVI):
    return of(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO())


def draws(**values):
    return arviz_base.from_dict({"posterior": values}, sample_dims=["sample"])


@pytest.mark.parametrize("guide", [guide, Auxiliary()], ids=["guide", "auxiliary"])
def test_ratios_of_an_exact_fit_are_the_evidence(guide):
    data = draws(mu=MU)
    result = nss.add_variational_stats(data, svi(guide), RESULT, (Y,))
    evidence = stats.norm.logpdf(Y, scale=2**0.5)
    ratios = result["sample_stats"]["log_ratio"]
    np.testing.assert_allclose(ratios, np.full(50, evidence), rtol=1e-5)
    assert result["sample_stats"].attrs["bound"] == pytest.approx(evidence, rel=1e-5)
    assert result["posterior"].identical(data["posterior"])
    probs = result["sample_stats"].data_vars.get("inclusion_probabilities.mu")
    assert (probs is None) != isinstance(guide, Auxiliary)
    if probs is not None:
        np.testing.assert_allclose(probs, np.full(50, Y / 6), rtol=1e-6)


def test_bounds_and_keyword_arguments_are_those_of_the_fit():
    fit = svi(guide, ClosedForm)
    stats_of = nss.add_variational_stats(draws(mu=MU), fit, RESULT, (Y,), {"scale": 1.0})
    assert stats_of["sample_stats"].attrs["bound"] == -2.5
    fit = SVI(model, guide, numpyro.optim.Adam(0.1), Trace_ELBO(), scale=2.0)
    stored = nss.add_variational_stats(draws(mu=MU), fit, RESULT, (Y,))["sample_stats"]
    by_call = nss.add_variational_stats(draws(mu=MU), svi(guide), RESULT, (Y,), {"scale": 2.0})
    assert stored.identical(by_call["sample_stats"]) and stored["log_ratio"].std() > 0.1


DELTA = Result({"mu_auto_loc": np.float32(0.7)}, None)
OF_ANOTHER = draws(mu=np.float32([0.7, 0.3, 0.3, 0.3, 0.7]))


@pytest.mark.parametrize(
    ("data", "guide", "result", "message"),
    [
        (pair(coin([0.5])), guide, RESULT, "got Markov chains, expected variational draws"),
        (draws(sigma=MU), guide, RESULT, r"got a posterior that lacks \['mu'\], which the guide"),
        (draws(mu=MU), Auxiliary().__call__, RESULT, r"posterior that lacks \['mu_auxiliary'\]"),
        (OF_ANOTHER, AutoDelta(model), DELTA, "got 3 of 5 draws without density under"),
    ],
)
def test_draws_of_something_else_are_refused(data, guide, result, message):
    with pytest.raises(ValueError, match=f"data: .*{message}"):
        nss.add_variational_stats(data, svi(guide), result, (Y,))


def test_ratios_of_a_fit_with_hyperparameters_are_those_of_the_joint_density():
    """At the fitted values of the other sites, which the guide holds."""
    rng = np.random.default_rng(0)
    X, scale = rng.normal(size=(30, 3)), 1.5
    X[:, 1] = X[:, 0] + 0.3 * X[:, 1]
    y = X[:, 0] + rng.normal(size=30)

    def model(X, y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 3.0))
        truth.respond(y, X @ truth.weights(3, inclusion, scale), sigma)

    arguments = jnp.asarray(X), jnp.asarray(y)
    fit = nss.CAVI(model, nss.PairedGuide(model))
    result = fit.run(random.key(0), 120, *arguments, progress_bar=False)
    data = arviz_base.from_numpyro_svi(fit, svi_result=result, model_args=arguments)
    data = nss.add_variational_stats(data, fit, result, arguments)
    params = {name: np.asarray(x, float) for name, x in result.params.items()}
    sigma, pi = params["sigma_auto_loc"], params["inclusion_auto_loc"]
    gamma, mu, sd = (params[f"w_auto_{part}"] for part in ("probs", "loc", "scale"))
    s, slab = (data["posterior"][f"w_{part}"].values for part in ("spike", "slab"))
    joint = stats.norm.logpdf(y, (s * slab) @ X.T, sigma).sum(-1)
    joint += stats.bernoulli.logpmf(s, pi).sum(-1) + stats.norm.logpdf(slab, 0, scale).sum(-1)
    joint += stats.halfnorm.logpdf(sigma) + stats.beta.logpdf(pi, 2, 3)
    log_q = stats.norm.logpdf(slab, s * mu, np.where(s == 1, sd, scale)).sum(-1)
    log_q += stats.bernoulli.logpmf(s, gamma).sum(-1)
    np.testing.assert_allclose(data["sample_stats"]["log_ratio"], joint - log_q, rtol=1e-3)


def regression(X, y=None):
    truth.respond(y, X @ truth.weights(X.shape[1], 0.1), 1.0)


def tasks(X, Y=None):
    truth.respond_by_task(Y, X @ truth.task_weights(2, X.shape[1], 0.1).T, 1.0)


def with_twins():
    """Four columns, the second and the last equal, and a response to the first two."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 4))
    X[:, 3] = X[:, 1]
    return X, X[:, 0] + X[:, 1] + rng.normal(size=100)


def with_stats_of(model, guide, *args, of=nss.CAVI, **coords):
    """Draws of a fit with their statistics."""
    svi = of(model, guide)
    result = svi.run(random.key(0), 120, *args, progress_bar=False)
    data = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=args, coords=coords)
    turned = type(data).from_dict(
        {"posterior": data["posterior"].to_dataset().transpose(..., "sample")}
    )
    results = [nss.add_variational_stats(x, svi, result, args) for x in (data, turned)]
    # the order of the dimensions does not matter
    xr.testing.assert_allclose(*(x["sample_stats"].to_dataset() for x in results))
    return results[0]


@pytest.mark.parametrize("data_are", ["arguments", "closure"])
def test_identical_columns_are_alternatives_to_each_other(data_are):
    X, y = with_twins()
    args = (X, y) if data_are == "arguments" else ()

    def model(X=X, y=y):
        regression(X, y)

    data = with_stats_of(model, nss.PairedGuide(model), *args, feature=["a", "b", "c", "d"])
    table, shares = nss.summary(data), data["sample_stats"]["credible_sets.w"]
    assert sorted(table["inclusion"].round(1)) == [0, 0, 1, 1]
    expected = {"w[a]": "", "w[b]": "w[d]", "w[c]": "", "w[d]": "w[b]"}
    assert table["alternatives"].to_dict() == expected
    assert table.columns[-1] == "alternatives" and shares.dims == ("set", "feature")
    nan = np.nan
    np.testing.assert_allclose(shares, [[1, nan, nan, nan], [nan, 0.5, nan, 0.5]], atol=0.02)


def test_a_fit_without_effects_has_no_sets():
    X, y = with_twins()
    data = with_stats_of(regression, nss.PairedGuide(regression), X, 0 * y)
    assert data["sample_stats"]["credible_sets.w"].shape == (0, 4)
    assert (nss.summary(data)["alternatives"] == "").all()


def logistic(X, y=None):
    """A model that SVI takes and CAVI does not."""
    w = truth.weights(X.shape[1], 0.1)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def adam(model, guide):
    return SVI(model, guide, numpyro.optim.Adam(0.1), TraceGraph_ELBO())


FACTORS = nss.models.factor_analysis(2)
X, y = with_twins()
OF_A_FACTOR = np.outer(X[:20, 0], [1.0, 2.0, -1.0]) + 0.3 * X[:20, 1:]
WITHOUT_SETS = {
    "tasks": (tasks, nss.PairedGuide(tasks), nss.CAVI, X, np.stack([y, y], axis=1)),
    "standard": (regression, nss.MeanFieldGuide(regression), nss.CAVI, X, y),
    "logistic": (logistic, nss.PairedGuide(logistic), adam, X, (y > 0).astype(int)),
    "functions": (FACTORS, nss.PairedGuide(FACTORS), nss.CAVI, OF_A_FACTOR.astype(np.float32)),
}


@pytest.mark.parametrize("case", WITHOUT_SETS)
def test_other_fits_have_no_sets(case):
    model, guide, of, *args = WITHOUT_SETS[case]
    data = with_stats_of(model, guide, *args, of=of)
    names = [name.partition(".")[0] for name in data["sample_stats"].data_vars]
    assert names == ["log_ratio", "inclusion_probabilities"]
    assert "alternatives" not in nss.summary(data)
