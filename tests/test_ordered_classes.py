# SPDX-License-Identifier: Apache-2.0
"""Regressions of classes in order: their posterior, levels, and what is refused."""

from itertools import product

import arviz_stats
import numpy as np
import pandas as pd
import polars as pl
import pytest
from refusals import refusals
from scipy import optimize, stats
from scipy.special import logsumexp
from truth.known_draws import columns_of
import xarray as xr

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.tables.checks import ordered_levels
from numpyro_spikeslab.tables.formula import formula_table

TOLD = "ignore:sparse_regression. the Monte Carlo", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *TOLD)

KEY, N, P, INCLUSION = random.key(0), 60, 4, 0.4
NAMES = ["low", "middle", "high"]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, P))
X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
Y = ((0.8 * X[:, 0] - 0.4 * X[:, 2] + RNG.logistic(size=N))[:, None] > [-1.0, 1.2]).sum(axis=1)
COUNTS = RNG.uniform(0.3, 2.0, N)
ERRORS = {"ordered": stats.logistic, "ordered_probit": stats.norm}


def log_likelihood(error, f, cuts, counts=1.0):
    """Of predictors (..., N), and cut points (..., 2)."""
    ends = np.concatenate([cuts[..., :1] * 0 - np.inf, cuts, cuts[..., :1] * 0 + np.inf], axis=-1)
    low, high = (ends[..., Y + k] - f for k in (0, 1))
    # in the nearer tail
    low, high = np.where(low > -high, [-high, -low], [low, high])
    log_high = error.logcdf(high)
    return (counts * (log_high + np.log(-np.expm1(error.logcdf(low) - log_high)))).sum(axis=-1)


def log_joint(error, z, X, counts):
    """Of weights, two cut points and the slab scale, the last two unconstrained."""
    w, (low, gap, log_scale) = z[..., :-3], np.moveaxis(z[..., -3:], -1, 0)
    cuts, scale = np.stack([low, low + np.exp(gap)], axis=-1), np.exp(log_scale)[..., None]
    # with the derivatives of the exponentials
    total = log_likelihood(error, w @ X.T, cuts, counts) + gap + log_scale
    total += np.log(2) + error.logpdf(cuts).sum(axis=-1)
    total += stats.norm.logpdf(w, 0, scale).sum(axis=-1)
    return total + stats.halfnorm.logpdf(scale[..., 0])


def truth(error, X, counts):
    """Inclusion, means of the weights and of cut points, and the log evidence, by importance
    sampling of each model."""
    rng, logs, means = np.random.default_rng(0), [], []
    for model in product((0, 1), repeat=P):
        places = np.flatnonzero(model)
        size = len(places) + 3
        start = np.concatenate([0.1 * np.ones(len(places)), [-1.0, 0.7, -0.5]])
        loss = lambda z, x=X[:, places]: -log_joint(error, z, x, counts)  # noqa: E731
        found = optimize.minimize(loss, start)
        root = np.linalg.cholesky(found.hess_inv)
        e = rng.standard_t(5, (20_000, size))
        z = found.x + 1.2 * e @ root.T
        log_proposal = stats.t.logpdf(e, 5).sum(axis=1) - np.log(1.2 * np.diag(root)).sum()
        # of scales that are nearly 0
        with np.errstate(over="ignore"):
            weights = log_joint(error, z, X[:, places], counts) - log_proposal
        probs = np.exp(weights - logsumexp(weights))
        mean = np.zeros(P)
        mean[places] = probs @ z[:, :-3]
        cuts = probs @ np.stack([z[:, -3], z[:, -3] + np.exp(z[:, -2])], axis=1)
        prior = np.log(np.where(model, INCLUSION, 1 - INCLUSION)).sum()
        logs.append(prior + logsumexp(weights) - np.log(len(z)))
        means.append([*model, *mean, *cuts])
    return np.exp(logs - logsumexp(logs)) @ np.array(means), logsumexp(logs)


def levels(y, names=NAMES):
    return pd.Categorical(np.array(names)[y], names, ordered=True)


@pytest.mark.parametrize(
    ("likelihood", "counts"),
    [
        pytest.param("ordered", None, id="once"),
        pytest.param("ordered", COUNTS, id="fractions"),
        pytest.param("ordered_probit", None, id="probit"),
    ],
)
def test_chains_and_evidence_are_those_of_all_models(likelihood, counts):
    mean = np.average(X, axis=0, weights=counts)
    table = (X - mean) / np.average((X - mean) ** 2, axis=0, weights=counts) ** 0.5
    options = {"inclusion": INCLUSION, "num_warmup": 500, "num_samples": 1500}
    tree = nss.sparse_regression(
        KEY, table, levels(Y), likelihood=likelihood, weights=counts, **options
    )
    draws = posterior(tree)
    assert columns_of(tree)["r_hat"].max() < 1.03
    expected, log_evidence = truth(ERRORS[likelihood], table, 1.0 if counts is None else counts)
    got = [(draws["w"] != 0).values, draws["w"].values, draws["cutpoints"].values]
    error = abs(np.concatenate([x.mean(axis=(0, 1)) for x in got]) - expected)
    assert (error[:P] < 0.02).all() and (error[P:] < 0.04).all()
    evidence = nss.log_evidence(KEY, tree)
    assert abs(evidence.value - log_evidence) < 0.05 + 4 * evidence.se


SHORT = {"likelihood": "ordered", "num_warmup": 200, "num_samples": 250, "progress_bar": False}


@pytest.fixture(scope="module", params=ERRORS)
def dt(request):
    """A regression on columns in units of their own, all of them always in."""
    frame = pd.DataFrame(X * [1, 10, 0.1, 2] + [5, 0, -3, 1], columns=list("abcd"))
    options = SHORT | {"likelihood": request.param, "always": list("abc")}
    return frame, nss.sparse_regression(KEY, frame, levels(Y), **options)


def test_without_spikes_weights_are_those_of_maximum_likelihood(dt):
    """Within a quarter of their errors, for the priors are wide; as polr of R and OrderedModel of
    statsmodels."""
    frame, tree = dt
    error = ERRORS[tree["constant_data"].attrs["likelihood"]]
    table = frame.drop(columns="d").to_numpy()
    mean, sd = table.mean(axis=0), table.std(axis=0)

    def loss(z):
        cuts = np.stack([z[-2], z[-2] + np.exp(z[-1])])
        return -log_likelihood(error, z[:3] @ ((table - mean) / sd).T, cuts)

    found = optimize.minimize(loss, [0.1, 0.1, 0.1, -1.0, 0.7])
    draws = posterior(tree)
    w = draws["w"].sel(feature=list("abc"))
    errors = found.hess_inv.diagonal()[:3] ** 0.5 / sd
    assert (abs(w.mean(["chain", "draw"]) - found.x[:3] / sd) < 0.25 * errors).all()
    cuts = found.x[3] + np.array([0, np.exp(found.x[4])]) + found.x[:3] @ (mean / sd)
    spread = draws["cutpoints"].std(["chain", "draw"]).values
    assert (abs(draws["cutpoints"].mean(["chain", "draw"]) - cuts) < 0.25 * spread).all()


def test_levels_are_named_in_results_and_files(dt, tmp_path):
    pytest.importorskip("h5py")
    frame, tree = dt
    tree.to_netcdf(tmp_path / "result.nc")
    with xr.open_datatree(tmp_path / "result.nc") as file:
        saved = file.load()
    for each in tree, saved:
        for group in each, each["cavi"]:
            assert group["posterior"]["cutpoint"].values.tolist() == ["low|middle", "middle|high"]
            assert "intercept" not in group["posterior"]
        probs = nss.predict(each, frame[:5], kind="mean")
        assert probs.dims == ("chain", "draw", "row", "level")
        assert probs["level"].values.tolist() == NAMES
        np.testing.assert_array_equal(each["observed_data"]["y"], Y)
    if tree["constant_data"].attrs["likelihood"] == "ordered":
        assert "odds_ratio" in nss.summary(tree, "w", ratios=True)
    assert {"cutpoints[low|middle]", "w[a]"} <= {*nss.summary(tree).index}
    assert arviz_stats.loo(tree).elpd < 0


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: pd.Series(levels(Y)), NAMES),
        (lambda: pl.Series(np.array(NAMES)[Y], dtype=pl.Enum(NAMES)), NAMES),
        (lambda: [int(x) for x in Y], ["0", "1", "2"]),
        (lambda: np.array([3.0, 4.5, 10.0])[Y], ["3", "4.5", "10"]),
    ],
    ids=["pandas", "polars", "whole numbers", "numbers"],
)
def test_levels_are_categories_in_order_or_sorted_numbers(make, names):
    codes, found = ordered_levels(make())
    np.testing.assert_array_equal(codes, Y)
    assert found == names


def test_formulas_take_categories_in_order():
    pytest.importorskip("formulaic")
    frame = pd.DataFrame(X, columns=list("abcd")).assign(grade=levels(Y))
    given = formula_table("grade ~ a + b", None, frame, None, ())
    np.testing.assert_array_equal(ordered_levels(given.y)[0], Y)


def regress(y, **options):
    nss.sparse_regression(KEY, X, y, **SHORT | options)


REFUSED = {
    "no order": (
        lambda: regress(pd.Categorical(np.array(NAMES)[Y])),
        "y: got categories without an order, expected numbers, or categories with .*ordered=True",
    ),
    "strings": (lambda: regress([NAMES[k] for k in Y]), "y: got strings, expected numbers, or cat"),
    "empty level": (
        lambda: regress(levels(Y, [*NAMES, "top"])),
        r"y: got the levels \['top'\] in no row, .*remove_unused_categories",
    ),
    "missing": (
        lambda: regress(pd.Categorical([None, *levels(Y)[1:]], NAMES, ordered=True)),
        "y: got 1 missing values",
    ),
    "one level": (lambda: regress(0 * Y), "y: got 0.0 in every row, expected numbers that differ"),
    "no number": (lambda: regress(np.where(Y == 1, np.nan, Y)), "y: got nan in row"),
    "no response": (lambda: regress(None), "y: got None, expected the response"),
    "totals": (lambda: regress(Y, totals=3), "totals: got numbers"),
    "fractions": (
        lambda: regress(levels(Y), likelihood="ordered_probit", weights=COUNTS),
        "weights: got .* Fractions need likelihood='logit', 'ordered' or 'weibull'",
    ),
    "other likelihood": (
        lambda: regress(levels(Y), likelihood="logit"),
        "y: got categories .* expected numbers",
    ),
}
test_what_are_no_classes_in_order_is_refused = refusals(REFUSED)
