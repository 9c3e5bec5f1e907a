# SPDX-License-Identifier: Apache-2.0
"""Regressions of a table with columns always in, groups, priors, weights, offsets and formulas."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import stats
from scipy.special import logsumexp
from truth.enumeration import regression, sum_over_scales
from truth.known_draws import columns_of

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import response_kind
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.tables.checks import checked_rows, checked_table
from numpyro_spikeslab.tables.columns import checked_columns
from numpyro_spikeslab.tables.formula import Given, formula_table, new_columns
from numpyro_spikeslab.tables.units import standardise

pytestmark = pytest.mark.filterwarnings("error", "ignore:sparse_regression. the Monte Carlo")

KEY = random.key(0)
NAMES = ["age", "low", "middle", "dose", "lot"]
GROUPS = {"size": ["low", "middle"]}
PRIOR = np.array([0.5, 0.3, 0.3, 0.6, 0.2])


def table():
    rng = np.random.default_rng(8)
    X = pd.DataFrame(rng.normal(size=(24, 5)), columns=NAMES)
    X["dose"] += 0.8 * X["middle"]
    weights, offset = rng.uniform(0.5, 2.0, 24), rng.normal(size=24)
    noise = rng.normal(size=24) / np.sqrt(weights)
    y = offset + 2.0 + 0.6 * X["age"] + 0.45 * X["middle"] + 0.5 * noise
    return X * [1.0, 2.0, 3.0, 4.0, 5.0] + 10.0, 30.0 * y, weights, 30.0 * offset


def exact():
    """Inclusion and means of all columns by sums over models, scales of noise and of slabs."""
    X, y, weights, offset = table()
    y = y - offset
    # weights are relative to their mean where noise has a prior
    relative = weights / weights.mean()
    x_mean, y_mean = (np.average(x, axis=0, weights=weights) for x in (X, y))
    x_sd = np.sqrt(np.average((X - x_mean) ** 2, axis=0, weights=weights))
    y_sd = np.sqrt(np.average((y - y_mean) ** 2, weights=weights))
    Z, t = ((X - x_mean) / x_sd).to_numpy(), ((y - y_mean) / y_sd).to_numpy()
    # the last two are always in
    Z = np.column_stack([Z, np.ones(24)])
    inclusion = np.where(np.arange(6) < 4, [*PRIOR, 0], 1 - 1e-15)
    inclusion[2] = 0.5

    def at(sigma, slab):
        return regression(Z, t, sigma / np.sqrt(relative), inclusion, [slab] * 4 + [10, 1e4])

    def log_prior(models, *scales):
        grouped = np.where(models[:, 1] == models[:, 2], 0, -np.inf)
        return grouped + stats.halfnorm.logpdf(scales).sum()

    sums = sum_over_scales(at, product(np.arange(1, 50) / 16, repeat=2), log_prior)
    means = sums[6:11] * y_sd / x_sd
    return np.concatenate([sums[:5], means, sums[12:13] * y_sd * weights.mean() ** 0.5])


def test_chains_agree_with_sums_over_models():
    X, y, weights, offset = table()
    tree = nss.sparse_regression(
        KEY,
        X,
        y,
        always="lot",
        groups=GROUPS,
        inclusion=PRIOR,
        weights=weights,
        offset=offset,
        num_samples=3000,
    )
    truth, summary = exact(), columns_of(tree)
    assert truth[:5].min() > 0.1 and np.sort(truth[:5])[1:4].max() < 0.99
    error = abs(summary["inclusion"] - truth[:5])
    # five standard errors: one seed in a hundred thousand would fail
    assert (error < 5 * summary["mcse_inclusion"].fillna(0.0) + 2e-3).all()
    assert (abs(summary["mean"] - truth[5:10]) < 5 * summary["mcse_mean"] + 2e-3).all()
    sigma = posterior(tree)["sigma"]
    assert abs(float(sigma.mean()) - truth[10]) < 0.01 * truth[10]
    draws = posterior(tree)
    assert set(draws.sizes) == {"chain", "draw", "feature"}
    assert (draws["w_spike"].sel(feature="lot") == 1).all()
    assert (draws["w_spike"].sel(feature="low") == draws["w_spike"].sel(feature="middle")).all()
    assert summary.attrs["expected_size"] == pytest.approx(0.5 + 0.3 + 0.6)
    np.testing.assert_allclose(tree["constant_data"]["prior_inclusion.w"][:4], PRIOR[:4])


def arguments_of_model(X, y, likelihood="normal", weights=None, offset=None, totals=None):
    kind = response_kind(likelihood)
    of_rows = dict(weights=weights, offset=offset, totals=totals, event=None)
    table = checked_table(X, X.index)
    rows = checked_rows(Given(X, y, None, (), X.index), table.values, kind, of_rows)
    return standardise(table, rows, np.zeros(X.shape[1], bool), kind)


def test_counted_rows_are_repeated_rows():
    X, y, *_ = table()
    y, counts = (y > y.median()).astype(float), np.arange(24) % 3
    index = np.repeat(np.arange(24), counts)
    scales, weighted = arguments_of_model(X, y, "logit", counts)
    _, repeated = arguments_of_model(X.iloc[index], y.iloc[index], "logit")
    assert scales.num_rows == len(index) == len(weighted["X"])
    np.testing.assert_equal(weighted, repeated)


def test_fractions_are_powers_of_the_normal_density():
    """Whose integral over the intercept is that of the contrasts."""
    X, y, *_ = table()
    counts = np.random.default_rng(0).gamma(0.5, 4.0, 24)
    counts[0] = 0.0
    kind = response_kind("normal")._replace(has_precisions=False)
    units, data = arguments_of_model(X, y, kind, counts)
    assert units.num_rows == pytest.approx(counts.sum()) and units.noise == 1.0
    Z, r = (X - units.x["mean"].values) / units.x["sd"].values, (y - units.y_mean) / units.y_sd
    b = np.arange(-9, 9, 0.01)

    def of_contrasts(w, sigma):
        return (data["count"] * stats.norm.logpdf(data["y"], data["X"] @ w, sigma)).sum()

    def of_rows(w, sigma):
        f = b[:, None] + Z.to_numpy() @ w
        return logsumexp((counts * stats.norm.logpdf(r, f, sigma)).sum(-1))

    changes = [of(0.4 * np.arange(5), 1.1) - of(np.zeros(5), 0.7) for of in (of_rows, of_contrasts)]
    assert changes[0] == pytest.approx(changes[1], rel=1e-9)


@pytest.mark.parametrize("likelihood", ["student", "negative_binomial"])
def test_half_a_row_twice_is_a_row(likelihood):
    X, y, *_ = table()
    y = np.round(y - y.min())
    units, data = arguments_of_model(X, y, likelihood)
    twice = pd.concat([X, X]), np.tile(y, 2), likelihood, np.full(48, 0.5)
    others, halves = arguments_of_model(*twice)
    np.testing.assert_allclose(others.x.to_array(), units.x.to_array())
    assert others[1:5] == pytest.approx(units[1:5])
    assert (halves["count"] == 0.5).all() and "count" not in data
    np.testing.assert_allclose(halves["y"], np.tile(data["y"], 2))


def test_rows_without_trials_are_left_out():
    X, *_ = table()
    totals = np.arange(24) % 3
    scales, data = arguments_of_model(X, totals // 2, "binomial", totals=totals)
    some = totals > 0
    _, left = arguments_of_model(X[some], (totals // 2)[some], "binomial", totals=totals[some])
    assert scales.num_rows == 16
    np.testing.assert_equal(data, left)


def test_the_unit_of_weights_is_that_of_the_noise():
    X, y, weights, _ = table()
    one, data = arguments_of_model(X, y, weights=weights)
    two, same = arguments_of_model(X, y, weights=4.0 * weights)
    assert two.noise == pytest.approx(2.0 * one.noise)
    for name in "X", "y":
        np.testing.assert_allclose(same[name], data[name], rtol=1e-5)


@pytest.mark.parametrize("likelihood", ["normal", "student"])
def test_offsets_are_subtracted_from_numbers(likelihood):
    X, y, _, offset = table()
    _, data = arguments_of_model(X, y, likelihood, offset=offset)
    _, shifted = arguments_of_model(X, y - offset, likelihood)
    np.testing.assert_array_equal(data["y"], shifted["y"])
    assert data.keys() == shifted.keys() == {"X", "y"}


def test_groups_are_lists_or_labels():
    names = pd.Index(NAMES)
    same = GROUPS, [["low", "middle"]], ["a", "b", "b", "c", "d"], [5, 1, 1, 2, 7]
    for groups in same:
        columns = checked_columns(names, ["lot"], groups, PRIOR)
        assert columns.labels[1] == columns.labels[2] in ("size", "low + middle", "b", "1")
        assert columns.labels[::3] == [NAMES[0], NAMES[3]]
        index = np.array(columns.groups)
        assert len(index) == 4 and index[1] == index[2] and len(set(index)) == 3
        prior = columns.prior(np.ones(5, bool), 24, None)[2]
        np.testing.assert_array_equal(prior, [*PRIOR[:4], 1.0])
    alone = checked_columns(names, (), list("abcde"), 0.25)
    assert alone.groups is None and alone.prior(np.arange(5) > 0, 24, None)[1] == 1.0
    learned = checked_columns(names, (), GROUPS, None)
    prior, _, inclusions = learned.prior(np.ones(5, bool), 24, 2.0)
    assert prior == {"inclusion": (1.0, 1.0)} and (inclusions == 0.5).all()


X, Y, WEIGHTS, OFFSET = table()
CLASSES = (Y.median() < Y).astype(int)
BINOMIAL = {"likelihood": "binomial", "y": CLASSES, "totals": 3}
TRIALS = np.arange(24) % 3
TIED = np.arange(24) < 10
MESSAGES = {
    "likelihood": ({"likelihood": "gamma"}, "likelihood: got 'gamma', expected one of 'normal'"),
    "likelihoods": ({"likelihood": ["normal"]}, r"likelihood: got \['normal'\], expected one of"),
    "a list in always": ({"always": [["a"]]}, r"always: got \[\['a'\]\], expected columns of X"),
    "groups of text": ({"groups": "abc"}, "groups: got 'abc', expected lists of columns, or"),
    "size of text": ({"expected_size": "3"}, "expected_size: got '3', expected a number between"),
    "classes": ({"likelihood": "logit"}, "y: got values .* expected classes, 0 and 1"),
    "counts": ({"likelihood": "poisson"}, "y: got .* in row 0, expected whole numbers from 0"),
    "trials": ({"likelihood": "binomial"}, "totals: got None, expected numbers of trials"),
    "no trials": ({"totals": 3}, "totals: got numbers, .* else None"),
    "many": (
        {"likelihood": "binomial", "y": 5 * CLASSES, "totals": 4},
        "y: got 5 in row .* from 0 to 4, the row's total",
    ),
    "half a trial": (BINOMIAL | {"totals": 2.5}, "totals: got 2.5 in row 0, expected whole"),
    "negative": (BINOMIAL | {"totals": -1}, "totals: got -1 in row 0, expected whole numbers"),
    "no trial": (BINOMIAL | {"y": 0 * Y, "totals": 0}, "weights, totals: got zeros, expected rows"),
    "not seen": (
        {"y": CLASSES, "likelihood": "logit", "weights": 0},
        "weights, totals: got zeros, expected rows",
    ),
    "successes": (
        BINOMIAL | {"y": TRIALS, "totals": TRIALS, "offset": OFFSET},
        "y: got 1.* in every row",
    ),
    "no counts": (
        {"y": np.zeros(24), "likelihood": "poisson", "offset": OFFSET},
        "y: got 0.* in every row",
    ),
    "a class": (
        {"y": 0 * Y + 1, "likelihood": "probit", "offset": OFFSET},
        "y: got 1.* in every row",
    ),
    "ties": (
        {"y": np.where(TIED, 7.0, Y) + OFFSET, "offset": OFFSET, "weights": 1 + TIED}
        | {"likelihood": "student"},
        "y: got 7 in more than half of the rows, .*likelihood='logit'",
    ),
    "a number": ({"always": 0}, r"always: got \[0\], expected columns of X"),
    "always": ({"always": ["size"]}, r"always: got \['size'\], expected columns of X"),
    "all": ({"always": NAMES}, "always: got all columns"),
    "part": ({"always": "low", "groups": GROUPS}, "always: got a part of the group"),
    "twice": ({"groups": [["age", "lot"], ["lot"]]}, "groups: got a column that is in two"),
    "labels": ({"groups": ["a", "b"]}, "groups: got 2 labels, expected 5"),
    "no labels": ({"groups": [None, 1, 1, 2, 3]}, "groups: got 5 labels, expected 5"),
    "one": ({"inclusion": 1.0}, "inclusion: got 1, .* `always`"),
    "inclusion": ({"inclusion": [0.5, 0.5]}, r"inclusion: got the shape \(2,\), expected a number"),
    "within": ({"groups": GROUPS, "inclusion": PRIOR[::-1]}, "several probabilities in a group"),
    "size": ({"inclusion": 0.5, "expected_size": 2.0}, "expected_size: got 2.0, expected None"),
    "shape": ({"weights": WEIGHTS[1:]}, r"weights: got the shape \(23,\)"),
    "zero": ({"weights": 0.0 * WEIGHTS}, "weights: got 0, expected positive numbers"),
    "halves": (
        {"weights": WEIGHTS, "likelihood": "probit", "y": CLASSES},
        "weights: .* how often .* Fractions need likelihood='logit'",
    ),
    "explained": ({"offset": Y}, "y: got 0.* in every row"),
    "no response": ({"y": None}, "y: got None"),
    "data": ({"data": X}, "data: got a DataFrame, expected None. Write"),
}


def analyse(arguments):
    nss.sparse_regression(**{"key": KEY, "X": X, "y": Y} | arguments)


test_messages_of_options_name_argument_and_remedy = refusals(MESSAGES, analyse)


FORMULA = "y ~ age * kind + bs(dose, 4)"


@pytest.fixture
def frame():
    pytest.importorskip("formulaic")
    kinds = pd.Categorical(list("abc") * 8)
    return X.assign(y=Y, kind=kinds).set_axis(np.arange(24) + 100)


def test_terms_of_a_formula_are_groups(frame):
    always = ["kind", "age"]
    made = formula_table(FORMULA, None, frame, None, always)
    table, y, terms, names, labels, parents, read, _ = made
    assert labels.equals(frame.index)
    assert parents == [*[[]] * 7, *[[0, 1]] * 2]
    assert table.columns[:3].tolist() == ["age", "kind[T.b]", "kind[T.c]"]
    assert terms == ["age", *["kind"] * 2, *["bs(dose, 4)"] * 4, *["age:kind"] * 2]
    assert names == ["kind[T.b]", "kind[T.c]", "age"]
    assert y.equals(frame["y"])
    # categories and knots are those of the first table
    for part in frame, frame.iloc[[7]]:
        assert new_columns(FORMULA, read, part)[[*table]].equals(table.loc[part.index])


@pytest.mark.parametrize(
    ("always", "columns"),
    [
        ("dose", ["bs(dose, 4)[1]", "bs(dose, 4)[2]", "bs(dose, 4)[3]", "bs(dose, 4)[4]"]),
        ("age", ["age"]),
        ("age:kind", ["age:kind[T.b]", "age:kind[T.c]"]),
        ("weight", ["weight"]),
    ],
)
def test_a_variable_stands_for_its_terms_unless_it_is_one(frame, always, columns):
    assert formula_table(FORMULA, None, frame, None, always).always == columns


FORMULAS = {
    "y": ("y ~ age", {"y": Y}, "y, groups: got an arg"),
    "groups": ("y ~ age", {"groups": GROUPS}, "y, groups: got an arg"),
}


def analyse_formula(formula, arguments, frame):
    nss.sparse_regression(**{"key": KEY, "X": formula, "data": frame} | arguments)


test_messages_of_formulas_name_argument_and_reason = refusals(FORMULAS, analyse_formula, "frame")


def test_a_formula_is_its_table(frame):
    options = dict(num_warmup=50, num_samples=100, num_chains=2)
    tree = nss.sparse_regression(KEY, FORMULA, data=frame, **options)
    draws = posterior(tree)
    assert (draws["w_spike"][..., 1] == draws["w_spike"][..., 2]).all()
    new = nss.predict(tree, frame.iloc[[7, 2]], kind="predictor")
    assert new["row"].values.tolist() == [107, 102]
    np.testing.assert_allclose(new, nss.predict(tree, kind="predictor")[..., [7, 2]], rtol=1e-9)
    table, y, groups, *_ = formula_table(FORMULA, None, frame, None, ())
    same = nss.sparse_regression(KEY, table, y, groups=groups, **options)
    assert posterior(same).equals(draws)
