# SPDX-License-Identifier: Apache-2.0
"""Regressions of a table as estimators of scikit-learn."""

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from truth.known_draws import columns_of

from jax import random

import numpyro_spikeslab as nss

checks = pytest.importorskip("sklearn.utils.estimator_checks")
pytestmark = pytest.mark.filterwarnings("error", "ignore:sparse_regression. chains disagree")

NAMES = list("abcde")
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)


def table():
    rng = np.random.default_rng(3)
    X = pd.DataFrame(rng.normal(size=(30, 5)), columns=NAMES)
    return X, 100.0 + 20.0 * (X["a"] - 0.7 * X["d"] + 0.5 * rng.normal(size=30))


def test_the_estimator_is_the_function():
    X, y = table()
    model = nss.SparseRegression(random_state=0, **FEW)
    assert model.fit(X, y) is model
    assert list(model.feature_names_in_) == NAMES and model.n_features_in_ == 5
    summary = columns_of(nss.sparse_regression(random.key(0), X, y, **FEW))
    np.testing.assert_allclose(model.coef_, summary["mean"])
    np.testing.assert_array_equal(model.inclusion_, summary["inclusion"])
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, model.predict(X))
    np.testing.assert_allclose(mean, X.to_numpy() @ model.coef_ + model.intercept_)
    assert 0.6 < np.std((y - mean) / sd) < 1.4 and model.score(X, y) > 0.1
    with pytest.raises(ValueError, match=r"X: got .* masked values"):
        model.predict(np.ma.masked_less(X.to_numpy(), 0.0))


def test_the_classifier_takes_any_two_labels_and_counts_rows():
    X, y = table()
    labels = pd.Series(np.where(y > 100.0, "high", "low"), dtype="category")
    counts = np.arange(30) % 3
    model = nss.SparseClassifier(random_state=0, **FEW).fit(X, labels, sample_weight=counts)
    assert model.classes_.tolist() == ["high", "low"]
    probability = model.predict_proba(X)
    assert probability.shape == (30, 2) and ((probability > 0) & (probability < 1)).all()
    np.testing.assert_allclose(probability.sum(axis=1), 1.0)
    # coefficients are log odds of the second class
    assert model.coef_[0] < 0 and np.corrcoef(probability[:, 1], y)[0, 1] < -0.7
    assert (model.predict(X) == model.classes_[probability.argmax(axis=1)]).all()
    assert model.score(X, labels) > 0.8
    index, weights = counts > 0, counts[counts > 0]
    tree = nss.sparse_regression(
        random.key(0), X[index], labels[index] == "low", likelihood="logit", weights=weights, **FEW
    )
    np.testing.assert_allclose(model.coef_, columns_of(tree)["mean"])
    draws, rows = tree["posterior"], X.to_numpy()
    f = draws["intercept"].values[..., None] + draws["w"].values @ rows.T
    np.testing.assert_allclose(probability[:, 1], (1 / (1 + np.exp(-f))).mean((0, 1)), rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:sparse_regression")  # classes of few rows separate
@pytest.mark.usefixtures("unchecked_types")  # some checks pass anything, to see it kept
@pytest.mark.parametrize("estimator", ["SparseRegression", "SparseClassifier"])
def test_all_checks_of_scikit_learn(estimator):
    options = dict(num_warmup=20, num_samples=30, num_chains=1, random_state=0)
    model = getattr(nss, estimator)(**options)
    # chains of rows in another order are other chains
    failed = {"check_sample_weight_equivalence_on_dense_data": "draws differ"}
    results = checks.check_estimator(model, on_skip=None, expected_failed_checks=failed)
    assert len(results) > 40


def fit(change):
    nss.SparseRegression(random_state=0).fit(*change(*table()))


IGNORED = {
    "masked": (lambda X, y: (np.ma.masked_less(X, 0.0), y), r"X: got .* masked values"),
    "masked y": (lambda X, y: (X, np.ma.masked_less(y, 90.0)), r"y: got .* masked values"),
    "a date": (lambda X, y: (X.assign(a=np.datetime64("2020-01-01")), y), "X: got the "),
    "other rows": (
        lambda X, y: (X, y.set_axis(y.index + 1)),
        r"y: got missing labels \[0\], unknown labels \[30\]",
    ),
}
test_the_estimator_refuses_what_scikit_learn_would_ignore = refusals(IGNORED, fit)


def test_the_classifier_refuses_more_classes():
    X, y = table()
    with pytest.raises(ValueError, match="Unknown label type"):
        nss.SparseClassifier().fit(X, y)
    with pytest.raises(ValueError, match="y: got 3 classes, expected 2"):
        nss.SparseClassifier().fit(X, np.arange(30) % 3)
    with pytest.raises(ValueError, match=r"sample_weight: got the shape \(2,\)"):
        nss.SparseClassifier().fit(X, y > 100.0, sample_weight=[1.0, 2.0])
