# SPDX-License-Identifier: Apache-2.0
"""Random effects in formulas: their posterior by quadrature, and predictions of rows."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import stats
import xarray as xr

from jax import random

from numpyro.diagnostics import effective_sample_size

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("ignore:sparse_regression. the")
KEY, SIZE = random.key(0), 48
rng = np.random.default_rng(0)
SITE = np.arange(SIZE) % 6
DATA = pd.DataFrame({"x": rng.normal(3.0, 2.0, SIZE), "z": rng.normal(size=SIZE)})
DATA["site"] = np.array([*"abcdef"])[SITE]
DATA["y"] = 20 + DATA["x"] + 5 * rng.normal(size=6)[SITE] + 3 * rng.normal(size=SIZE)
DATA["ill"] = (DATA["y"] > DATA["y"].median()) * 1


@pytest.fixture(scope="module")
def dt():
    """The column z is as good as out, so the model is linear and mixed."""
    options = dict(always="x", inclusion={"x": 0.5, "z": 1e-9}, progress_bar=False)
    return nss.sparse_regression(KEY, "y ~ x + z + (1 | site)", data=DATA, **options)


def test_scales_and_effects_agree_with_quadrature(dt):
    y, x = (DATA[name].to_numpy() - DATA[name].mean() for name in "yx")
    X = np.column_stack([np.ones(SIZE), x, np.eye(6)[SITE]])
    nodes, weights = np.polynomial.legendre.leggauss(24)
    # both scales have a HalfNormal prior in units of the response
    taus, sigmas = 1.25 * (nodes + 1), 0.7 + 0.5 * nodes
    found, logs = [], []
    for tau, sigma in product(taus * y.std(), sigmas * y.std()):
        wide = 10 * y.std() * np.array([10, 1 / x.std()])
        prior = np.diag(np.concatenate([wide, np.full(6, tau)])) ** 2
        cov = X @ prior @ X.T + sigma**2 * np.eye(SIZE)
        log_prior = -0.5 * (tau**2 + sigma**2) / y.var()
        logs.append(stats.multivariate_normal(cov=cov).logpdf(y) + log_prior)
        found.append([tau, sigma, *(prior @ X.T @ np.linalg.solve(cov, y))[1:]])
    probs, found = np.exp(np.array(logs) - max(logs)), np.array(found)
    probs *= np.outer(weights, weights).ravel()
    mean = probs @ found / probs.sum()
    draws = dt["posterior"]
    assert draws["effect_site"].dims == ("chain", "draw", "site")
    names = [draws["sd_site"], draws["sigma"], draws["w"].sel(feature="x")]
    each = [*names, *(draws["effect_site"].sel(site=k) for k in "abcdef")]
    # 9 comparisons: a false alarm in 1 of 1700 keys
    error = [x.std() / effective_sample_size(x.values) ** 0.5 for x in each]
    assert np.all(np.abs(np.mean(each, axis=(1, 2)) - mean) < 4 * np.array(error))
    assert max(error) < 0.02 * y.std()


def test_predictions_have_the_effects_of_known_groups_and_draw_others(dt, tmp_path):
    draws = dt["posterior"].to_dataset()
    fixed = draws["intercept"] + draws["w"] @ dt["constant_data"]["X"]
    labels = xr.DataArray(DATA["site"].to_numpy(), dims="row")
    by_hand = fixed + draws["effect_site"].sel(site=labels)
    np.testing.assert_allclose(nss.predict(dt, kind="predictor"), by_hand, atol=1e-9)
    new = DATA.iloc[:4].assign(site=["b", "new", "new", "newer"])
    dt.to_netcdf(tmp_path / "result.nc")
    with xr.open_datatree(tmp_path / "result.nc") as read:
        predicted = nss.predict(read, new, kind="predictor")
    effects = (predicted - fixed[..., :4].values).values
    np.testing.assert_allclose(effects[..., 0], draws["effect_site"].sel(site="b"), atol=1e-9)
    np.testing.assert_allclose(effects[..., 1], effects[..., 2], atol=1e-9)
    z = (effects[..., 1::2] / draws["sd_site"].values[..., None]).reshape(-1, 2)
    # a false alarm in 1 of 5000 keys
    assert (
        stats.kstest(z.ravel(), stats.norm.cdf).pvalue > 2e-4 and abs(np.corrcoef(z.T)[0, 1]) < 0.2
    )
    with pytest.raises(ValueError, match=r"X_new: got gaps in 1 of 4 rows, .* in \['site'\]"):
        nss.predict(dt, new.assign(site=[None, *"abc"]))
    with pytest.raises(
        ValueError, match=r"X_new: the group 'site': got \[0, 1, 2, 3\], expected l"
    ):
        nss.predict(dt, new.assign(site=range(4)))
    with pytest.raises(ValueError, match="log_evidence: the result: got random effects"):
        nss.log_evidence(KEY, dt)


def test_slopes_of_groups_under_another_likelihood():
    """They are not centred, as in lme4: the effect on the predictor is that of x itself."""
    options = dict(likelihood="logit", num_warmup=20, num_samples=20, num_chains=2)
    formula = "ill ~ x + z + (x | site)"
    dt = nss.sparse_regression(KEY, formula, data=DATA, progress_bar=False, **options)
    draws = dt["posterior"].to_dataset()
    assert {"sd_site", "sd_site_x"} < {*draws} and "sd_site" not in dt["cavi"]["posterior"]
    labels = xr.DataArray(DATA["site"].to_numpy(), dims="row")
    slopes = draws["effect_site_x"].sel(site=labels) * DATA["x"].to_numpy()
    by_hand = draws["intercept"] + draws["w"] @ dt["constant_data"]["X"] + slopes
    by_hand += draws["effect_site"].sel(site=labels)
    np.testing.assert_allclose(nss.predict(dt, kind="predictor"), by_hand, atol=1e-9)
    assert nss.summary(dt).loc["effect_site_x[a]"].notna()["mean"]


RESPONSES = {
    "student": "y",
    "negative_binomial": "count",
    "ordered_probit": "grade",
}


@pytest.mark.parametrize("likelihood", RESPONSES)
def test_effects_of_groups_under_other_likelihoods_are_those_of_the_data(likelihood):
    """In the order of the sites' means, of known groups and of new ones."""
    data = DATA.assign(count=np.round(np.exp(DATA["y"] / 10)))
    data["grade"] = pd.cut(DATA["y"], [-np.inf, 20, 25, np.inf], labels=[*"lmh"])
    few = dict(likelihood=likelihood, num_warmup=150, num_samples=150, progress_bar=False)
    formula = f"{RESPONSES[likelihood]} ~ x + z + (1 | site)"
    dt = nss.sparse_regression(KEY, formula, data=data, always="x", **few)
    draws = dt["posterior"].to_dataset()
    assert all(np.isfinite(x).all() for x in draws.values())
    truth = (DATA["y"] - DATA["x"]).groupby(DATA["site"]).mean()
    effects = draws["effect_site"].mean(["chain", "draw"]).to_series()
    assert truth.corr(effects) > 0.9 and (draws["sd_site"] > 0).all()
    new = data.iloc[:3].assign(site=["b", "new", "newer"])
    f = nss.predict(dt, new, kind="predictor")
    spread = f.std(["chain", "draw"]).values
    assert np.isfinite(f).all() and (spread[1:] > spread[0]).all()
    assert np.isfinite(nss.predict(dt, new, kind="mean")).all()
