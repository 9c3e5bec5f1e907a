# SPDX-License-Identifier: Apache-2.0
"""Predictions and log likelihoods of rows, from results that may have passed through files."""

import tracemalloc

import arviz_plots
import arviz_stats
import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import special
from truth.small_table import table
import xarray as xr

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_likelihood

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import RESPONSES
from numpyro_spikeslab.support.files import plain_labels
from numpyro_spikeslab.tables import predict
from numpyro_spikeslab.tables.formula import formula_table

SHORT = "ignore:sparse_regression. chains disagree", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *SHORT)

KEY = random.key(0)
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)
X, Y = table()
NUM_ROWS = len(X)
rng = np.random.default_rng(0)
OFFSET, COUNTS = rng.normal(size=NUM_ROWS), np.arange(NUM_ROWS) % 3
TOTALS = 1.0 + np.arange(NUM_ROWS) % 4
RESPONSE = {"normal": Y, "student": Y, "binomial": TOTALS - 1}
MEANS = {
    "normal": lambda f: f,
    "student": lambda f: f,
    "logit": special.expit,
    "probit": special.ndtr,
    "binomial": lambda f: TOTALS * special.expit(f),
    "poisson": np.exp,
    "negative_binomial": np.exp,
}
VARIANCES = {
    "normal": lambda mean, sites: sites["sigma"] ** 2 / (1 + COUNTS),
    "student": lambda mean, sites: sites["sigma"] ** 2 * sites["dof"] / (sites["dof"] - 2),
    "logit": lambda mean, sites: mean * (1 - mean),
    "probit": lambda mean, sites: mean * (1 - mean),
    "binomial": lambda mean, sites: mean * (1 - mean / TOTALS),
    "poisson": lambda mean, sites: mean,
    "negative_binomial": lambda mean, sites: mean + mean**2 / sites["concentration"],
}


def result(likelihood, draws=200):
    """The groups of a result with draws of any posterior."""
    rng = np.random.default_rng(1)
    sd, like = X.std().replace(0.0, 1.0).to_numpy(), (2, draws)
    w = 0.3 * rng.normal(size=(*like, 5)) / sd
    sites = {"sigma": 10 + rng.random(like), "dof": 9 + rng.random(like)}
    sites |= {"concentration": 2 + rng.random(like)}
    posterior = {name: (["chain", "draw"], sites[name]) for name in RESPONSES[likelihood].sites(1)}
    posterior["intercept"] = ["chain", "draw"], rng.normal(size=like) - w @ X.mean().to_numpy()
    posterior["w"] = ["chain", "draw", "feature"], w
    weights = COUNTS + 1.0 if likelihood == "normal" else COUNTS
    rows = {"offset": ("row", OFFSET), "weights": ("row", weights)}
    if likelihood == "binomial":
        rows["totals"] = "row", TOTALS
    rows["X"] = ["row", "feature"], X.to_numpy()
    coords = {"feature": [*X], "row": np.arange(NUM_ROWS) + 7}
    y = RESPONSE.get(likelihood, COUNTS > 0)
    groups = {
        "posterior": xr.Dataset(posterior, {"feature": [*X]}),
        "constant_data": xr.Dataset(rows, coords, {"likelihood": likelihood, "seed": 3}),
        "observed_data": xr.Dataset({"y": ("row", 1.0 * y)}, {"row": coords["row"]}),
    }
    return xr.DataTree.from_dict(groups)


def sites_of(dt):
    draws = dt["posterior"].to_dataset()
    sites = {name: x.values[..., None] for name, x in draws.drop_vars("w").items()}
    return sites, draws["w"].values


@pytest.mark.parametrize("likelihood", RESPONSES)
def test_predictions_are_those_of_the_model(likelihood, monkeypatch):
    dt = result(likelihood)
    sites, w = sites_of(dt)
    f = OFFSET + sites["intercept"] + w @ X.to_numpy().T
    predictor = nss.predict(dt, kind="predictor")
    assert predictor.dims == ("chain", "draw", "row") and predictor.name == "y"
    assert predictor["row"].equals(dt["constant_data"]["row"])
    np.testing.assert_allclose(predictor, f, atol=1e-11)
    mean, given = MEANS[likelihood](f), dict(offset=OFFSET)
    np.testing.assert_allclose(nss.predict(dt, kind="mean"), mean, rtol=1e-7)
    y = nss.predict(dt).values
    variance = np.broadcast_to(VARIANCES[likelihood](mean, sites), y.shape)
    error = (y - mean) / np.sqrt(variance)
    # five standard errors
    assert abs(error.mean()) < 5 / error.size**0.5
    assert abs((error**2).mean() - 1) < 5 * (error**2).std() / error.size**0.5
    # batches of new rows, of which the last is filled up
    monkeypatch.setattr(predict, "BATCH", 12 * 400)
    given |= dict(totals=TOTALS) if likelihood == "binomial" else {}
    new = nss.predict(dt, X.set_axis(X.index + 90), kind="mean", **given)
    np.testing.assert_allclose(new, mean, rtol=1e-7)
    assert new["row"].values.tolist() == [*range(90, 120)]
    assert nss.predict(dt, X.to_numpy()[:1], kind="predictor", offset=0, **given | {"offset": 0})


@pytest.mark.parametrize("likelihood", RESPONSES)
def test_log_likelihoods_are_those_of_a_model_written_by_hand(likelihood, x64):
    dt = result(likelihood)
    constants = dt["constant_data"].to_dataset()
    weights = jnp.asarray(constants["weights"].values, float)

    def model(y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(5), 1.0).to_event(1))
        site = {
            name: numpyro.sample(name, dist.HalfNormal(1.0))
            for name in RESPONSES[likelihood].sites(1.0)
        }
        f = OFFSET + numpyro.sample("intercept", dist.Normal()) + X.to_numpy() @ w
        of_row = {
            "normal": lambda: dist.Normal(f, site["sigma"] / jnp.sqrt(weights)),
            "student": lambda: dist.StudentT(site["dof"], f, site["sigma"]),
            "logit": lambda: dist.Bernoulli(logits=f),
            "probit": lambda: dist.Bernoulli(probs=special_ndtr(f)),
            "binomial": lambda: dist.Binomial(TOTALS.astype(int), logits=f),
            "poisson": lambda: dist.Poisson(jnp.exp(f)),
            "negative_binomial": lambda: dist.NegativeBinomial2(jnp.exp(f), site["concentration"]),
        }
        numpyro.sample("y", of_row[likelihood](), obs=y)

    draws = {name: x.values for name, x in dt["posterior"].items()}
    y = dt["observed_data"]["y"].values
    truth = log_likelihood(model, draws, y, batch_ndims=2)["y"]
    if likelihood != "normal":
        truth = (truth * weights)[..., COUNTS > 0]
    ours = nss.log_likelihood(dt)
    seen = constants["row"].values[constants["weights"].values > 0]
    np.testing.assert_array_equal(ours["row"], seen)
    np.testing.assert_allclose(ours, truth, rtol=1e-10, atol=1e-12)


def special_ndtr(f):
    from jax.scipy.special import ndtr

    return ndtr(f)
