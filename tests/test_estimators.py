# SPDX-License-Identifier: Apache-2.0
"""Regressions of a table as estimators of scikit-learn."""

import warnings

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import sparse
from truth.known_draws import columns_of
import xarray as xr

import jax
from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.tables import estimators

model_selection = pytest.importorskip("sklearn.model_selection")
checks = pytest.importorskip("sklearn.utils.estimator_checks")
pytestmark = pytest.mark.filterwarnings(
    "error",
    "ignore:sparse_regression. the Monte Carlo",
    "ignore:sparse_regression. columns separate",
)

NAMES = list("abcde")
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)


def table():
    rng = np.random.default_rng(3)
    X = pd.DataFrame(rng.normal(size=(30, 5)), columns=NAMES)
    return X, 100.0 + 20.0 * (X["a"] - 0.7 * X["d"] + 0.5 * rng.normal(size=30))


def sorted_rows(model):
    """The numbers of the rows in the order in which a model has them."""
    return model.data_["constant_data"]["row"].values


def test_the_estimator_is_the_function(capsys):
    X, y = table()
    model = nss.SparseRegressor(random_state=0, **FEW)
    assert model.fit(X, y) is model and not capsys.readouterr().err
    assert list(model.feature_names_in_) == NAMES and model.n_features_in_ == 5
    order = sorted_rows(model)
    tree = nss.sparse_regression(random.key(0), X.loc[order], y.loc[order], **FEW)
    summary = columns_of(tree)
    np.testing.assert_allclose(model.coef_, summary["mean"], rtol=1e-9)
    np.testing.assert_allclose(model.inclusion_, summary["inclusion"], rtol=1e-9)
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, model.predict(X))
    np.testing.assert_allclose(mean, X.to_numpy() @ model.coef_ + model.intercept_)
    assert 0.6 < np.std((y - mean) / sd) < 1.4 and model.score(X, y) > 0.1
    with pytest.raises(ValueError, match=r"X: got .* masked values"):
        model.predict(np.ma.masked_less(X.to_numpy(), 0.0))


def test_the_classifier_takes_any_two_labels():
    X, y = table()
    labels = pd.Series(np.where(y > 100.0, "high", "low"), dtype="category")
    model = nss.SparseClassifier(random_state=0, **FEW).fit(X, labels)
    assert model.classes_.tolist() == ["high", "low"]
    probability = model.predict_proba(X)
    assert probability.shape == (30, 2) and ((probability > 0) & (probability < 1)).all()
    np.testing.assert_allclose(probability.sum(axis=1), 1.0)
    # coefficients are log odds of the second class
    assert model.coef_[0] < 0 and np.corrcoef(probability[:, 1], y)[0, 1] < -0.7
    assert (model.predict(X) == model.classes_[probability.argmax(axis=1)]).all()
    assert model.score(X, labels) > 0.8
    order = sorted_rows(model)
    tree = nss.sparse_regression(
        random.key(0), X.loc[order], labels.loc[order] == "low", likelihood="logit", **FEW
    )
    np.testing.assert_allclose(model.coef_, columns_of(tree)["mean"], rtol=1e-9)
    draws, rows = tree["posterior"], X.to_numpy()
    f = draws["intercept"].values[..., None] + draws["w"].values @ rows.T
    np.testing.assert_allclose(probability[:, 1], (1 / (1 + np.exp(-f))).mean((0, 1)), rtol=1e-9)


@pytest.mark.parametrize("name", ["SparseRegressor", "SparseClassifier"])
def test_a_row_that_counts_often_is_as_many_rows_whatever_their_order(name):
    X, y = table()
    y = y if name == "SparseRegressor" else y > 100.0
    counts = np.arange(30) % 4
    model, index = getattr(nss, name)(random_state=0, **FEW), np.repeat(np.arange(30), counts)[::-1]
    weighted = model.fit(X, y, sample_weight=counts).data_["posterior"].to_dataset()
    repeated = model.fit(X.iloc[index], y.iloc[index]).data_["posterior"].to_dataset()
    xr.testing.assert_equal(weighted, repeated)


def test_balanced_classes_count_the_same_however_often_their_rows_do(monkeypatch):
    X, y = table()
    y, counts, given = y > 120.0, 1.0 + np.arange(30) % 3, {}

    def regression(key, table, response, weights, **_):
        given.update(table=table, response=response, weights=weights)
        raise RuntimeError

    monkeypatch.setattr(estimators, "sparse_regression", regression)
    with pytest.raises(RuntimeError):
        nss.SparseClassifier(class_weight="balanced").fit(X, y, sample_weight=counts)
    order, weights, response = given["table"].index, given["weights"], given["response"]
    assert (response == y[order]).all() and given["table"].equals(X.loc[order])
    np.testing.assert_allclose(np.bincount(response, weights), counts.sum() / 2)
    np.testing.assert_allclose(np.ptp((weights / counts[order])[response == 1]), 0.0, atol=1e-12)


def test_names_of_columns_may_be_numbers_and_spread_may_be_infinite():
    X, y = table()
    X, noise = X.set_axis([1, 2, 3, 4, 0], axis=1), np.random.default_rng(0).standard_cauchy(30)
    model = nss.SparseRegressor(likelihood="student", random_state=0, always=[1], **FEW)
    model.fit(X, y + noise**3)
    assert (model.inclusion_[0] == 1) and (model.inclusion_[1:] < 1).all()
    # some draws have less than a degree of freedom, where numpyro has no variance
    assert (model.data_["posterior"]["dof"] < 1).any()
    assert np.isposinf(model.predict(X, return_std=True)[1]).all()


@pytest.mark.parametrize("name", ["SparseRegressor", "SparseClassifier"])
def test_folds_of_other_sizes_compile_nothing(name):
    X, y = table()
    y = y if name == "SparseRegressor" else y > 100.0
    model, compiled = getattr(nss, name)(random_state=0, **FEW), []

    def listen(event, *_, **__):
        compiled.append(event == "/jax/core/compile/backend_compile_duration")

    model.fit(X[:22], y[:22]).predict(X[22:])
    jax.monitoring.register_event_duration_secs_listener(listen)
    scores = model_selection.cross_val_score(model, X, y, cv=model_selection.KFold(4))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert len(scores) == 4 and np.isfinite(scores).all() and not any(compiled)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unchecked_types")  # some checks pass anything, to see it kept
@pytest.mark.parametrize("estimator", ["SparseRegressor", "SparseClassifier"])
def test_all_checks_of_scikit_learn(estimator):
    options = dict(num_warmup=20, num_samples=30, num_chains=1, random_state=0)
    model = getattr(nss, estimator)(**options)
    with warnings.catch_warnings():
        # classes of few rows separate, and fits of them take long to end
        warnings.filterwarnings("ignore", "sparse_regression")
        results = checks.check_estimator(model, on_skip=None)
    assert len(results) > 40


def fit(change, **options):
    weights = options.pop("sample_weight", None)
    nss.SparseRegressor(random_state=0, **options).fit(*change(*table()), sample_weight=weights)


def as_given(X, y):
    return X, y


IGNORED = {
    "masked": (lambda X, y: (np.ma.masked_less(X, 0.0), y), {}, r"X: got .* masked values"),
    "masked y": (lambda X, y: (X, np.ma.masked_less(y, 90.0)), {}, r"y: got .* masked values"),
    "sparse": (lambda X, y: (sparse.dok_array(X), y), {}, "Sparse data was passed"),
    "a date": (lambda X, y: (X.assign(a=np.datetime64("2020-01-01")), y), {}, "X: got the "),
    "other rows": (
        lambda X, y: (X, y.set_axis(y.index + 1)),
        {},
        r"y: got missing labels \[0\], unknown labels \[30\]",
    ),
    "likelihood": (as_given, {"likelihood": "logit"}, "likelihood: got 'logit', expected one of"),
    "times": (as_given, {"likelihood": "weibull"}, "likelihood: .* sparse_regression has others"),
    "limits": (lambda X, y: (X, np.stack([y, y], axis=1)), {}, "y should be a 1d array"),
    "a negative count": (
        lambda X, y: (X, np.r_[np.arange(29), -1]),
        {"likelihood": "poisson"},
        "y: got -1 in row 29",
    ),
    "always": (as_given, {"always": ["a", "z"]}, r"always: got \['z'\]"),
    "groups": (as_given, {"groups": [["a", "z"]]}, r"groups: got \['z'\]"),
    "negative weights": (as_given, {"sample_weight": np.arange(30) - 1.0}, "got -1 in a row"),
    "shares": (as_given, {"sample_weight": 1 / 30}, "and 1.0 in all, .* Multiply weights"),
}
test_the_estimator_refuses_what_scikit_learn_would_ignore = refusals(
    IGNORED, lambda change, options: fit(change, **options)
)


def test_the_classifier_refuses_more_classes():
    X, y = table()
    with pytest.raises(ValueError, match="Unknown label type"):
        nss.SparseClassifier().fit(X, y)
    with pytest.raises(ValueError, match="y: got 3 classes, expected 2"):
        nss.SparseClassifier().fit(X, np.arange(30) % 3)
    with pytest.raises(ValueError, match=r"sample_weight: got the shape \(2,\)"):
        nss.SparseClassifier().fit(X, y > 100.0, sample_weight=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"weights: got 0.5, .* Fractions need likelihood='logit'"):
        nss.SparseClassifier(likelihood="probit").fit(X, y > 100.0, sample_weight=0.5)
