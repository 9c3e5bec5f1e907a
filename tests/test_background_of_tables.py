# SPDX-License-Identifier: Apache-2.0
"""Sparse effects over a background of many small ones, or of related rows."""

import arviz_stats
import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import stats
from scipy.special import logsumexp, softmax
from truth.enumeration import enumerate_models, regression
from truth.small_table import NAMES, table

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import RESPONSES
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.tables.background import RowsGivenDraws
from numpyro_spikeslab.tables.chains import Table, TableModel
from numpyro_spikeslab.tables.evidence import standard_problem
from numpyro_spikeslab.tables.predict import kind_of, stored_rows

SHORT = "ignore:sparse_regression. the Monte Carlo"
pytestmark = pytest.mark.filterwarnings("error", SHORT, "ignore:Estimated shape parameter")

KEY = random.key(0)
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)
X, Y = table()
N = len(Y)
RNG = np.random.default_rng(1)
WEIGHTS = RNG.uniform(0.3, 3.0, N)
RELATED = np.exp(-abs(np.arange(N)[:, None] - np.arange(N)) / 5.0)
OPTIONS = {
    "columns": {"background": True},
    "related": {"background": RELATED},
    "weighted": {"background": True, "weights": WEIGHTS},
    "related and weighted": {"background": RELATED, "weights": WEIGHTS, "always": ["dose"]},
}


@pytest.fixture(scope="module")
def results():
    return {name: nss.sparse_regression(KEY, X, Y, **FEW, **x) for name, x in OPTIONS.items()}


def test_rotated_rows_have_independent_noise_and_background_and_no_intercept():
    parts = nss.background(RELATED, WEIGHTS)
    noise, related = (parts.rotate(parts.rotate(x).T) for x in (np.diag(1 / WEIGHTS), RELATED))
    np.testing.assert_allclose(noise, np.eye(N - 1), atol=1e-9)
    np.testing.assert_allclose(related, parts.unit * np.diag(parts.eigenvalues), atol=1e-9)
    np.testing.assert_allclose(parts.rotate(np.ones(N)), 0, atol=1e-9)
    assert np.mean(parts.eigenvalues) == pytest.approx(1)


def test_chains_start_where_background_and_noise_have_the_variance_of_the_response():
    model = TableModel(RESPONSES["normal"], None, None)
    data = {"X": X.to_numpy(float), "y": Y, "background": np.ones(N)}
    start = Table.of(model, data, {"inclusion": (1.0, 9.0)})[0].start
    assert start["sigma"] ** 2 + start["background_scale"] ** 2 == pytest.approx(1)


def covariances(name, tree):
    """Covariances of the background and of the noise of all rows in units of the response, for each
    draw, from the definition of the model."""
    weights = WEIGHTS if "weighted" in name else np.ones(N)
    K = RELATED
    if "columns" in name or name == "weighted":
        mean = np.average(X, axis=0, weights=weights)
        sd = np.average((X - mean) ** 2, axis=0, weights=weights) ** 0.5
        Z = ((X - mean) / np.where(sd > 0, sd, 1)).to_numpy()
        K = Z @ Z.T
    v = weights / weights.mean()
    centre = np.eye(N) - v / N
    # differences of rows vary by 1 on average, in units of their noise
    K = centre @ K @ centre.T
    K = K / (np.trace(K * v[:, None]) / (N - 1))
    draws = posterior(tree)
    scale, sigma = (draws[k].values.reshape(-1, 1, 1) for k in ("background_scale", "sigma"))
    return scale**2 * K, sigma**2 * np.diag(1 / weights)


def residuals(tree):
    draws = posterior(tree)
    w = draws["w"].values.reshape(-1, X.shape[1])
    return np.asarray(Y) - w @ X.to_numpy().T


@pytest.mark.parametrize("name", OPTIONS)
def test_rows_have_their_density_given_all_others(results, name):
    """With a flat intercept, whose variance is large here."""
    K, noise = covariances(name, results[name])
    total = K + noise + 1e8
    inverse = np.linalg.inv(total[:10])
    error = np.einsum("sij,sj->si", inverse, residuals(results[name])[:10])
    variance = 1 / np.diagonal(inverse, axis1=1, axis2=2)
    expected = stats.norm.logpdf(error * variance, scale=np.sqrt(variance))
    found = results[name]["log_likelihood"]["y"].values.reshape(-1, N)[:10]
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.isfinite(arviz_stats.loo(results[name]).elpd)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_background_of_rows_has_its_mean_and_variance(results, name):
    """Given the draws; the intercept takes its mean over rows."""
    K, noise = (x[:5] for x in covariances(name, results[name]))
    inverse = np.linalg.inv(K + noise + 1e8)
    mean = np.einsum("sij,sjk,sk->si", K, inverse, residuals(results[name])[:5])
    variance = np.diagonal(K - K @ inverse @ K, axis1=1, axis2=2)
    rows = stored_rows(results[name])
    given = RowsGivenDraws.of(results[name], rows, kind_of(rows))
    cross, spread = given.covariances(rows)
    draws = np.stack([given.draw(key, cross, spread)[:5] for key in random.split(KEY, 400)])
    error = np.sqrt(variance / 400)
    assert np.all(abs(draws.mean(0) - mean) < 5 * error + 1e-4)
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.4, atol=1e-6)


def test_new_rows_have_the_background_of_their_columns(results):
    tree = results["columns"]
    new = X[:4] + [2.0, 500.0, 0.0, 1e-3, -4.0]
    Z = (pd.concat([X, new]) - X.mean()) / X.std(ddof=0).where(X.std() > 0, 1)
    K = (Z @ Z.T).to_numpy()
    draws, noise = posterior(tree), covariances("columns", tree)[1][:5]
    scale = draws["background_scale"].values.reshape(-1, 1, 1)[:5]
    K = scale**2 * K / (np.trace(K[:N, :N]) / (N - 1))
    inverse = np.linalg.inv(K[:, :N, :N] + noise + 1e8)
    mean = np.einsum("sij,sjk,sk->si", K[:, N:, :N], inverse, residuals(tree)[:5])
    variance = K[:, N:, N:] - K[:, N:, :N] @ inverse @ K[:, :N, N:]
    found = [nss.predict(tree, new, kind="mean", key=key) for key in random.split(KEY, 200)]
    found = np.stack([x.values.reshape(-1, 4)[:5] for x in found])
    w = draws["w"].values.reshape(-1, X.shape[1])[:5]
    mean += draws["intercept"].values.reshape(-1, 1)[:5] + w @ new.to_numpy().T
    sd = np.sqrt(np.diagonal(variance, axis1=1, axis2=2))
    assert np.all(abs(found.mean(0) - mean) < 5 * sd / np.sqrt(200) + 1e-4)
    np.testing.assert_allclose(found.std(0), sd, rtol=0.25)


def test_shares_and_scales_are_in_the_result(results):
    draws = posterior(results["related"])
    assert [*draws["part"].values] == ["columns", "background", "noise"]
    np.testing.assert_allclose(draws["variance_share"].sum("part"), 1)
    ratio = (draws["background_scale"] / draws["sigma"]) ** 2
    found = draws["variance_share"].sel(part="background") / draws["variance_share"].sel(
        part="noise"
    )
    np.testing.assert_allclose(found, ratio)
    assert "cavi" not in results["related"].children
    assert "variance_share[noise]" in nss.summary(results["related"]).index


def test_a_covariance_goes_by_labels():
    names = [f"r{i}" for i in range(N)]
    order = RNG.permutation(N)
    frame = pd.DataFrame(RELATED, names, names).iloc[order, order[::-1]]
    rows = X.set_axis(names)
    trees = [nss.sparse_regression(KEY, rows, Y, background=x, **FEW) for x in (RELATED, frame)]
    scales = [posterior(tree)["background_scale"] for tree in trees]
    np.testing.assert_array_equal(*scales)


def test_the_posterior_is_that_of_all_models_and_scales():
    """Six columns, of which two matter, on a grid of the scales and the slab's."""
    rng = np.random.default_rng(5)
    Z = rng.normal(size=(40, 6))
    y = Z[:, 0] + 0.5 * Z[:, 1] + Z @ rng.normal(scale=0.3, size=6) + rng.normal(size=40)
    K = np.exp(-abs(np.arange(40)[:, None] - np.arange(40)) / 3.0)
    tree = nss.sparse_regression(
        KEY, Z, y, background=K, inclusion=0.3, num_samples=2000, progress_bar=False
    )
    parts = nss.background(K)
    rotated = parts.rotate(Z / Z.std(0)), parts.rotate(y / y.std())
    step = 1 / 10
    points = (np.arange(20) + 0.5) * step
    grid = [(s, t, v) for s in points[:14] for t in points[:14] for v in points]

    def at(sigma, tau, slab):
        return regression(*rotated, np.sqrt(sigma**2 + tau**2 * parts.eigenvalues), 0.3, slab)

    models = [enumerate_models(at(*point)) for point in grid]
    logs = np.array([model.log_evidence for model in models]) - 0.5 * np.square(grid).sum(axis=1)
    draws = posterior(tree)
    evidence, constant = nss.log_evidence(KEY, tree), standard_problem(tree)[3]
    expected = logsumexp(logs) + 1.5 * np.log(2 / np.pi) + 3 * np.log(step) + constant
    assert abs(evidence.value - expected) < 4 * evidence.se + 0.03
    found = nss.summary(tree, "w", round_to=None)["inclusion"]
    exact = softmax(logs) @ [model.inclusion for model in models]
    np.testing.assert_allclose(found, exact, atol=0.02)
    scales = [float(draws[k].mean()) / y.std() for k in ("sigma", "background_scale")]
    np.testing.assert_allclose(scales, (softmax(logs) @ grid)[:2], atol=0.02)


def test_a_background_takes_what_small_effects_explain():
    rng = np.random.default_rng(2)
    Z = rng.normal(size=(100, 40))
    y = Z[:, 0] + Z @ rng.normal(scale=0.12, size=40) + 0.5 * rng.normal(size=100)
    options = dict(num_samples=250, num_chains=2)
    trees = [nss.sparse_regression(KEY, Z, y, background=x, **options) for x in (None, True)]
    sums = [nss.summary(tree, "w")["inclusion"].sum() for tree in trees]
    assert sums[1] < 4 < 8 < sums[0]


LETTERS = [f"r{i}" for i in range(N)]
REFUSED = {
    "likelihood": (
        dict(y=Y > 100, likelihood="logit", background=True),
        "background: got a background of likelihood='logit', expected None unless",
    ),
    "shape": (dict(background=RELATED[1:]), r"background: got the shape \(29, 30\), expected True"),
    "NaN": (dict(background=RELATED + np.diag([np.nan] * N)), "background: got nan in row 0"),
    "labels": (
        dict(X=X.set_axis(LETTERS), background=pd.DataFrame(RELATED, NAMES * 6)),
        "background: got missing labels",
    ),
    "one side": (
        dict(background=np.tril(RELATED)),
        "covariance: got 0.* in row 0, column 1, and .* in row 1, column 0, expected a symmetric",
    ),
    "negative": (dict(background=-RELATED), "covariance: got the eigenvalue -"),
    "same": (dict(background=np.ones((N, N))), "covariance: got the same for all rows"),
}


def analyse(arguments):
    nss.sparse_regression(**{"key": KEY, "X": X, "y": Y} | arguments)


test_messages_of_backgrounds = refusals(REFUSED, analyse)
test_new_rows_need_a_known_covariance = refusals(
    {"new": (X[:3], "X_new: got new rows, whose covariance with the others is not known")},
    lambda rows, results: nss.predict(results["related"], rows),
    "results",
)
