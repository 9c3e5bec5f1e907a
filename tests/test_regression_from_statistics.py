# SPDX-License-Identifier: Apache-2.0
"""Regressions from statistics against those from rows."""

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from truth.known_draws import columns_of
from truth.small_table import table

import jax
from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.tables import statistics

pytestmark = pytest.mark.filterwarnings("error")

KEY = random.key(0)


def products(X, y):
    X, y = X - X.mean(axis=0), y - y.mean()
    return {"XtX": X.T @ X, "Xty": X.T @ y, "yty": y @ y, "n": len(y)}


def z_scores(X, y):
    """Slopes of single columns divided by their standard errors, and correlations."""
    names = X.columns if isinstance(X, pd.DataFrame) else range(X.shape[1])
    X, y = ((x - x.mean(axis=0)) / x.std(axis=0) for x in map(np.asarray, (X, y)))
    slopes = X.T @ y / len(y)
    errors = (y[:, None] - X * slopes).std(axis=0) / np.sqrt(len(y) - 2)
    R = pd.DataFrame(X.T @ X / len(y), names, names)
    return {"z": pd.Series(slopes / errors, names), "R": R, "n": len(y)}


def test_the_answers_are_those_of_the_rows(x32):
    """Although JAX computes in single precision by default."""
    X, y = table()
    rows = nss.sparse_regression(KEY, X, y)
    tree = nss.sparse_regression_from_statistics(KEY, **products(X, y))
    assert not jax.config.jax_enable_x64
    fits = (data["cavi"]["posterior"].to_dataset() for data in (rows, tree))
    np.testing.assert_array_equal(*(x.feature.values for x in (rows["posterior"], tree["summary"])))
    one, other = fits
    for name in other:
        scale = float(abs(one[name]).max())
        np.testing.assert_allclose(other[name] / scale, one[name] / scale, atol=1e-6)
    assert set(one) - set(other) == {"intercept"}
    one, other = (columns_of(data) for data in (rows, tree))
    np.testing.assert_allclose(one["cavi"], other["cavi"], atol=1e-6)
    # five standard errors: one seed in a hundred thousand would fail
    for name, of in ("mean", "mcse_mean"), ("inclusion", "mcse_inclusion"):
        error = 5 * np.hypot(one[of], other[of]).fillna(0.0)
        assert (abs(one[name] - other[name]) <= error).all()
    assert other.attrs["expected_size"] == one.attrs["expected_size"]
    sigmas = [data["posterior"]["sigma"].values for data in (rows, tree)]
    np.testing.assert_allclose(np.mean(sigmas[0]), np.mean(sigmas[1]), rtol=0.02)
    assert "bayes_factor" in nss.summary(tree, "w")


@pytest.mark.parametrize("num_columns", [4, 60])
def test_few_rows_have_the_products_of_many(num_columns):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, num_columns)) * np.exp(rng.normal(size=num_columns))
    # a copy, and a constant
    X[:, 1], X[:, 2] = -3.0 * X[:, 0], 7.0
    y = X[:, 0] + rng.normal(size=50)
    used = np.arange(num_columns) != 2
    rows = np.column_stack([X, y])
    rows[:, 2] = 0.0
    rows = (rows - rows.mean(axis=0)) / np.where([*used, True], rows.std(axis=0), 1.0)
    given = statistics.of_products(**products(X, y))
    few, short, count = statistics.pseudo_rows(given, 50)
    rank = np.linalg.matrix_rank(X - X.mean(axis=0))
    assert few.shape == (rank + 1, num_columns) and len(short) == rank + 1
    assert count * len(few) == pytest.approx(49)
    np.testing.assert_allclose(few.mean(axis=0), 0.0, atol=1e-12)
    table = np.column_stack([few, short])
    np.testing.assert_allclose(count * table.T @ table, rows.T @ rows, atol=1e-9)


@pytest.mark.parametrize("num_columns", [4, 60])
def test_z_scores_have_the_same_rows(num_columns):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(50, num_columns))
    y = X[:, 0] + rng.normal(size=50)
    parts = [
        statistics.pseudo_rows(of(**given(X, y)), 50)
        for of, given in ((statistics.of_products, products), (statistics.of_z_scores, z_scores))
    ]
    one, other = (np.column_stack(part[:2]) for part in parts)
    assert parts[0][2] == parts[1][2]
    np.testing.assert_allclose(one.T @ one, other.T @ other, atol=1e-9)


def test_a_million_rows_are_as_few():
    given = statistics.of_z_scores(**SCORES | {"n": 10**6})
    rows, y, count = statistics.pseudo_rows(given, 10**6)
    assert rows.shape == (5, 4) and count == pytest.approx((10**6 - 1) / 5)
    assert count * np.sum(y**2) == pytest.approx(10**6)


def correlated(rng, num_rows, num_columns=20, correlation=0.9):
    X = rng.normal(size=(num_rows, num_columns))
    for j in range(1, num_columns):
        X[:, j] = correlation * X[:, j - 1] + np.sqrt(1 - correlation**2) * X[:, j]
    return X


def test_warnings_are_as_rare_as_promised():
    """At most one of a hundred, with and without an effect; so at most 9 of 300 at a level of
    0.001."""
    rng = np.random.default_rng(0)
    false = 0
    for number in range(300):
        X = correlated(rng, 100)
        given = z_scores(X, (number % 2) * X[:, 3] + rng.normal(size=100))
        false += (
            statistics.find_misfits(*np.linalg.eigh(given["R"]), given["z"].to_numpy()).size > 0
        )
    assert false <= 9


def test_a_column_with_the_wrong_sign_is_named():
    X = pd.DataFrame(correlated(np.random.default_rng(1), 500)).add_prefix("snp")
    given = z_scores(X, X["snp3"] + np.random.default_rng(2).normal(size=500))
    statistics.of_z_scores(**given)
    given["z"]["snp5"] *= -1
    with pytest.warns(UserWarning, match="the worst first: .'snp5'"):
        statistics.of_z_scores(**given)


X, Y = table()
GOOD = products(X, Y)
SCORES = z_scores(X.drop(columns="batch"), Y)
R = SCORES["R"]
REFUSED = {
    "nothing": ({}, "XtX, Xty, yty, z, R: got .* expected XtX, Xty and yty, or z and R"),
    "both": (GOOD | SCORES, "XtX, Xty, yty, z, R: got"),
    "few rows": (GOOD | {"n": 2}, "n: got 2, expected a whole number, at least 3"),
    "no matrix": (GOOD | {"XtX": np.ones((4, 3))}, r"XtX: got the shape \(4, 3\)"),
    "length": (GOOD | {"Xty": [1, 2, 3]}, r"Xty: got the shape \(3,\), expected \(5,\)"),
    "negative": (GOOD | {"yty": -1.0}, "yty: got -1.0"),
    "no columns": (GOOD | {"XtX": 0 * GOOD["XtX"]}, "XtX: got the diagonal"),
    "asymmetric": (SCORES | {"R": R + np.triu(0.1 * R, 1)}, "R: got a matrix that differs from"),
    "covariances": (SCORES | {"R": 2 * R}, "R: got a diagonal that differs from 1 by 1"),
    "indefinite": (
        SCORES | {"R": R * 1.2 - 0.2 * np.eye(4)},
        r"a positive semidefinite one. Shrink it: \(1 - s\)",
    ),
    "NaN": (SCORES | {"z": SCORES["z"] * np.nan}, "z: got nan in row 'age'"),
    "too good": (
        GOOD | {"yty": 0.2 * GOOD["yty"]},
        "explain .* of the response.*Subtract the mean",
    ),
    "no response": (
        GOOD | {"XtX": GOOD["XtX"] * 0 + 1, "Xty": GOOD["Xty"] * 1e-9},
        "correlations with the response that no response has",
    ),
}


def analyse(arguments):
    nss.sparse_regression_from_statistics(**{"key": KEY, "n": 30} | arguments)


test_messages_name_the_statistic_and_the_remedy = refusals(REFUSED, analyse)


def test_a_matrix_of_single_precision_is_accepted():
    rng = np.random.default_rng(0)
    X = correlated(rng, 50, 100)
    given = z_scores(X, X[:, 0] + rng.normal(size=50))
    given["R"] = given["R"].astype(np.float32)
    rows = statistics.pseudo_rows(statistics.of_z_scores(**given), 50)[0]
    assert np.linalg.eigvalsh(given["R"])[0] < -1e-9
    assert 40 <= len(rows) <= 50
