# SPDX-License-Identifier: Apache-2.0
"""What is added to the draws of a variational fit."""

from collections import namedtuple

import arviz_base
from known_draws import coin, pair, with_stats
import numpy as np
import pytest
from scipy import stats

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting.variational import k_hat

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


def test_ratios_of_an_exact_fit_are_the_evidence():
    data = draws(mu=MU)
    found = nss.add_variational_stats(data, svi(guide), RESULT, (Y,))
    evidence = stats.norm.logpdf(Y, scale=2**0.5)
    ratios = found["sample_stats"]["log_ratio"]
    np.testing.assert_allclose(ratios, np.full(50, evidence), rtol=1e-5)
    assert found["sample_stats"].attrs["bound"] == pytest.approx(evidence, rel=1e-5)
    assert list(found["sample_stats"].data_vars) == ["log_ratio"]
    assert found["posterior"].identical(data["posterior"])


def test_a_bound_in_closed_form_is_stored():
    fit = svi(guide, ClosedForm)
    found = nss.add_variational_stats(draws(mu=MU), fit, RESULT, (Y,), {"scale": 1.0})
    assert found["sample_stats"].attrs["bound"] == -2.5


def test_auxiliary_sites_and_inclusion_probabilities():
    found = nss.add_variational_stats(draws(mu=MU), svi(Auxiliary()), RESULT, (Y,))
    evidence = stats.norm.logpdf(Y, scale=2**0.5)
    np.testing.assert_allclose(found["sample_stats"]["log_ratio"], evidence, rtol=1e-5)
    probs = found["sample_stats"]["inclusion_probabilities.mu"]
    np.testing.assert_allclose(probs, np.full(50, Y / 6), rtol=1e-6)


@pytest.mark.parametrize(
    ("data", "guide", "message"),
    [
        (pair(coin([0.5])), guide, "data: got Markov chains, expected variational draws"),
        (draws(sigma=MU), guide, r"data: its posterior lacks \['mu'\], which the guide samples"),
        (draws(mu=MU), Auxiliary().__call__, r"data: its posterior lacks \['mu_auxiliary'\]"),
    ],
)
def test_errors_of_variational_stats(data, guide, message):
    with pytest.raises(ValueError, match=message):
        nss.add_variational_stats(data, svi(guide), RESULT, (Y,))


@pytest.mark.parametrize("ratios", [np.zeros(100), np.arange(100) % 2.0])
def test_k_hat_of_equal_ratios_is_undefined(ratios):
    data = with_stats(pair(coin([0.5], chains=1, draws=100)[0]), log_ratio=ratios)
    assert np.isnan(k_hat(data))
