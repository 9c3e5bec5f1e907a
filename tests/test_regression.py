# SPDX-License-Identifier: Apache-2.0
"""One call for a table and a response."""

import subprocess
import sys

import arviz_stats
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import betaln, logsumexp

from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab import regression
from numpyro_spikeslab.reporting import arviz_data as reading

pytestmark = pytest.mark.filterwarnings("error")

NAMES = ["age", "dose", "batch", "weight", "lot"]
KEY = random.key(0)


def table(num_rows=30):
    """Two alike columns, a constant one, units and offsets of all sizes, and a response."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(num_rows, 5))
    X[:, 1] = 0.9 * X[:, 0] + 0.3 * X[:, 1]
    y = 0.5 * X[:, 0] - 0.4 * X[:, 3] + rng.normal(size=num_rows)
    X = X * [1.0, 1e3, 0.0, 1e-3, 7.0] + [50.0, 0.0, 3.0, 1.0, -1e3]
    return pd.DataFrame(X, columns=NAMES), 100.0 + 20.0 * y


@pytest.fixture(scope="module")
def found():
    X, y = table()
    return nss.sparse_regression(KEY, X, y, X_new=X.iloc[:4], num_samples=2000)


def exact(X, y, size=80):
    """Inclusion probabilities and posterior means in standardised units, by quadrature."""
    X, y = (np.asarray((x - x.mean(0)) / x.std(0)) for x in (X, y))
    count = X.shape[1]
    models = np.array(list(np.ndindex((2,) * count)))
    sigmas, slabs = (np.arange(1, size) * 3.0 / size for _ in range(2))
    half = stats.halfnorm.logpdf
    logs, means = [], []
    for s in models:
        Z, k = X[:, s > 0], s.sum()
        values, vectors = np.linalg.eigh(Z @ Z.T)
        squares = (vectors.T @ y) ** 2
        var = sigmas[:, None, None] ** 2 + slabs[:, None] ** 2 * np.maximum(values, 0.0)
        log = -0.5 * (np.log(var) + squares / var).sum(-1)
        # the intercept takes a direction, in which centred data are 0
        log += np.log(sigmas)[:, None]
        log += half(sigmas)[:, None] + half(slabs) + betaln(1 + k, 9 + count - k)
        logs.append(log)
        weight = np.exp(log - logsumexp(log))
        inner = (weight[..., None] * slabs[:, None] ** 2 / var).sum((0, 1))
        mean = np.zeros(count)
        mean[s > 0] = Z.T @ vectors @ (inner * (vectors.T @ y))
        means.append(mean)
    log = np.array([logsumexp(each) for each in logs])
    probs = np.exp(log - logsumexp(log))
    return probs @ models, probs @ np.array(means)


@pytest.mark.slow
def test_chains_agree_with_quadrature(found):
    X, y = table()
    used = [name for name in NAMES if name != "batch"]
    inclusion, mean = exact(X[used].to_numpy(), y)
    summary = found["summary"].to_dataset().sel(feature=used)
    assert 0.2 < inclusion.max() < 0.95
    # five standard errors: one seed in a hundred thousand would fail
    error = abs(summary["inclusion"] - inclusion)
    assert (error < 5 * summary["mcse_inclusion"] + 1e-3).all()
    in_units = mean * np.std(y) / X[used].std(ddof=0).to_numpy()
    assert (abs(summary["mean"] - in_units) < 5 * summary["mcse_mean"]).all()


def test_a_constant_column_has_the_weight_zero(found):
    row = found["summary"].to_dataset().sel(feature="batch")
    assert row["mean"] == row["sd"] == row["inclusion"] == row["cavi"] == 0
    assert (found["posterior"]["w"].sel(feature="batch") == 0).all()


@pytest.mark.exhaustive
def test_alternatives_of_the_fit_have_the_names_of_the_columns():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 1)) * [1.0, 0.0, -10.0] + 3.0
    y = X[:, 0] + 0.5 * rng.normal(size=40)
    scales = regression.scales_of(X, y)
    data = [regression.contrasts(x) for x in regression.standardised(X, y, scales)]
    fitted = regression.fit(KEY, tuple(map(jnp.asarray, data)), (1.0, 9.0), 1)
    table = nss.summary(regression.fit_in_units(fitted, list("abc"), scales, 40, rng), "w")
    assert table["alternatives"].to_dict() == {"w[a]": "w[c]", "w[b]": "", "w[c]": "w[a]"}


def test_names_groups_and_diagnostics(found):
    summary = found["summary"].to_dataset()
    frame = summary.to_dataframe()
    assert list(frame.index) == NAMES and found["posterior"]["w"].dims == (
        "chain",
        "draw",
        "feature",
    )
    draws = reading.posterior(found)
    np.testing.assert_allclose(frame["mean"], draws["w"].mean(["chain", "draw"]))
    assert (draws["w"] == draws["w_spike"] * draws["w_slab"]).all()
    assert frame["r_hat"].max() < 1.01 and frame["ess_bulk"].min() > 400
    assert (arviz_stats.rhat(draws[["sigma", "slab_scale", "inclusion"]]) < 1.02).all()
    off = abs(frame["cavi"] - frame["inclusion"]) > 0.2
    assert (frame["cavi_is_off"] == off).all()
    assert np.isfinite(summary.attrs["k_hat"])
    both = nss.compare({"chains": found, "CAVI": found["cavi"]}, ["w", "sigma"], "chains")
    assert both.loc["CAVI", "k_hat"] == summary.attrs["k_hat"]
    assert list(found["constant_data"]["X"]["feature"].values) == NAMES
    np.testing.assert_array_equal(found["observed_data"]["y"], table()[1])


def test_intercept_noise_and_predictions_are_in_the_units_of_the_response(found):
    X, y = table()
    draws = reading.posterior(found)
    rows = X.to_numpy()[:4]
    fit = draws["intercept"].values[..., None] + draws["w"].values @ rows.T
    new = found["predictions"]["y"]
    assert new.dims == ("chain", "draw", "new_row") and new.shape == (4, 2000, 4)
    sigma = draws["sigma"].values
    ratio = (new.values - fit) / sigma[..., None]
    assert abs(ratio.mean()) < 5 / ratio.size**0.5 and abs(ratio.std() - 1) < 0.02
    assert 10 < sigma.mean() < 30
    centre = (draws["intercept"].values[..., None] + draws["w"].values @ X.to_numpy().T).mean(-1)
    assert centre.mean() == pytest.approx(y.mean(), abs=1.0)
    spread = np.sqrt((sigma**2).mean() / len(y))
    assert centre.std() == pytest.approx(spread, rel=0.05)


@pytest.mark.exhaustive
def test_noise_does_not_vanish_where_columns_are_many(found):
    """Four rows, six columns: as many degrees of freedom as an intercept leaves, and no more."""
    rng = np.random.default_rng(0)
    tree = nss.sparse_regression(KEY, rng.normal(size=(4, 6)), rng.normal(size=4), num_samples=4000)
    assert float(tree["posterior"]["sigma"].min()) > 1e-4


def test_contrasts_are_an_orthonormal_basis_without_the_mean():
    basis = regression.contrasts(np.eye(5))
    np.testing.assert_allclose(basis @ basis.T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(basis.sum(axis=1), 0.0, atol=1e-12)


# one shape and one number of draws, which are compiled once
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)


@pytest.mark.exhaustive
def test_other_units_are_another_name_for_the_same():
    X, y = table()
    first = nss.sparse_regression(KEY, X.to_numpy(), y, **FEW)
    again = nss.sparse_regression(KEY, X.to_numpy() * 1024.0, 0.5 * y, **FEW)
    assert list(first["posterior"]["w"]["feature"].values) == [0, 1, 2, 3, 4]
    w = first["posterior"]["w"].values
    np.testing.assert_allclose(again["posterior"]["w"].values, w / 2048.0, rtol=1e-3, atol=1e-9)


@pytest.mark.slow
def test_the_estimator_hands_on_what_the_function_finds():
    pytest.importorskip("sklearn")
    X, y = table()
    model = nss.SparseRegression(random_state=0, **FEW)
    assert model.fit(X, y) is model
    assert list(model.feature_names_in_) == NAMES and model.n_features_in_ == 5
    summary = nss.sparse_regression(KEY, X, y, **FEW)["summary"]
    np.testing.assert_array_equal(model.coef_, summary["mean"])
    np.testing.assert_array_equal(model.inclusion_, summary["inclusion"])
    mean, sd = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, model.predict(X))
    np.testing.assert_allclose(mean, X.to_numpy() @ model.coef_ + model.intercept_)
    assert 0.6 < np.std((y - mean) / sd) < 1.4 and model.score(X, y) > 0.1


def test_without_scikit_learn_the_estimator_says_what_it_needs():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from numpyro_spikeslab import *\n"
        "try:\n    SparseRegression()\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install -U scikit-learn" in done.stdout


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (pd.MultiIndex.from_product([["a"], [1, 2, 3]]), "all strings or all numbers"),
        ([0, "a", "b"], "all strings or all numbers"),
    ],
)
def test_names_that_cannot_label_are_refused(columns, message):
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(5, 3)), columns=columns)
    with pytest.raises(ValueError, match=message):
        nss.sparse_regression(KEY, X, np.arange(5.0))


@pytest.mark.slow
def test_a_response_without_noise_is_not_passed_over():
    X, _ = table()
    with pytest.warns(UserWarning, match="explain all but .* float32 can tell"):
        nss.sparse_regression(KEY, X, 2.0 + X["age"] - 300.0 * X["weight"], **FEW)


def test_dates_are_refused():
    dates = pd.DataFrame({"day": pd.date_range("2020-01-01", periods=5)})
    with pytest.raises(ValueError, match="X: got dates"):
        nss.sparse_regression(KEY, dates, np.arange(5.0))


@pytest.mark.parametrize(
    "column", [pd.date_range("2020-01-01", periods=30), pd.timedelta_range("1D", periods=30)]
)
def test_dates_beside_other_columns_are_no_categories(column):
    with pytest.raises(ValueError, match=r"X: got dates.* in which unit"):
        nss.sparse_regression(KEY, X.assign(day=column), Y)


def test_what_is_missing_in_nullable_columns_is_counted_as_missing():
    flag = pd.array([True, None, False] * 10, dtype="boolean")
    with pytest.raises(ValueError, match=r"X: got 10 values that are NaN"):
        nss.sparse_regression(KEY, X.assign(flag=flag), Y)


def test_a_response_that_varies_by_rounding_alone_is_constant():
    y = np.where(X["age"] > X["age"].mean(), 0.1 + 0.2, 0.3)
    assert len(set(y)) == 2
    with pytest.raises(ValueError, match=r"y: got 0.3.* in every row, but for rounding"):
        nss.sparse_regression(KEY, X, y)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("unchecked_types")  # some checks pass anything, to see it kept
def test_all_checks_of_scikit_learn():
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    model = nss.SparseRegression(num_warmup=20, num_samples=30, num_chains=1, random_state=0)
    found = checks.check_estimator(model, on_skip=None)
    assert len(found) > 40


def test_the_scale_of_the_slab_moves(found):
    """Given the slabs of all weights NUTS would have moved it ten times as slowly."""
    assert arviz_stats.ess(reading.posterior(found)[["slab_scale"]])["slab_scale"] > 1000


@pytest.mark.exhaustive
def test_more_columns_than_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 60))
    y = 3.0 * X[:, 7] + rng.normal(size=30)
    found = nss.sparse_regression(KEY, X, y, expected_size=2.0)
    inclusion = found["summary"]["inclusion"].values
    assert inclusion.argmax() == 7 and inclusion[7] > 0.99 and np.delete(inclusion, 7).max() < 0.5
    assert found["summary"]["credible_set"].values[7] == 0


@pytest.mark.exhaustive
def test_a_fit_that_is_off_is_flagged():
    """Eight effects among columns of which neighbours are correlated by 0.97."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 100))
    for j in range(1, 100):
        X[:, j] = 0.97 * X[:, j - 1] + np.sqrt(1 - 0.97**2) * X[:, j]
    y = X[:, rng.choice(100, 8, replace=False)] @ rng.choice([-1, 1], 8) + rng.normal(size=200)
    summary = nss.sparse_regression(KEY, X, y)["summary"].to_dataset()
    assert summary["cavi_is_off"].any() and summary.attrs["k_hat"] > 0.7
    assert summary["r_hat"].max() < 1.05


def diabetes():
    """With squares and interactions, 442 x 64, in names."""
    X, y = pytest.importorskip("sklearn.datasets").load_diabetes(return_X_y=True, as_frame=True)
    columns = dict(X.items())
    for i, first in enumerate(X.columns):
        for second in X.columns[i:]:
            if not first == second == "sex":
                columns[f"{first}*{second}"] = X[first] * X[second]
    return pd.DataFrame(columns), y


@pytest.mark.exhaustive
def test_diabetes_against_a_long_run():
    X, y = diabetes()
    assert X.shape == (442, 64)
    once = nss.sparse_regression(KEY, X, y)["summary"].to_dataset()
    assert once["r_hat"].max() < 1.02 and once["ess_bulk"].min() > 400
    long = nss.sparse_regression(random.key(1), X, y, num_samples=30_000)["summary"]
    assert abs(once["inclusion"] - long["inclusion"]).max() < 0.03


X, Y = table()


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("X", "y", "options", "message"),
    [
        (X.iloc[:2], Y[:2], {}, r"X: got the shape \(2, 5\), expected \(N, P\), at least three"),
        (X["age"], Y, {}, r"X: got the shape \(30,\)"),
        (X.replace({"batch": {3.0: np.nan}}), Y, {}, "X: got 30 values that are NaN"),
        (X.assign(dose="high"), Y, {}, "X: got values that are not numbers"),
        (X.assign(dose="12"), Y, {}, r"X: got values that are not numbers .*get_dummies"),
        (X.assign(dose=pd.Categorical([3, 4] * 15)), Y, {}, "X: got values that are not numbers"),
        (X.astype("category"), Y, {}, "X: got values that are not numbers .categories"),
        (X, pd.Categorical([3, 4] * 15), {}, "y: got values that are not numbers"),
        (np.ma.masked_less(X.to_numpy(), 0.0), Y, {}, "X: got .* masked values"),
        (X, np.ma.masked_less(Y, 90.0), {}, "y: got .* masked values"),
        ([np.ma.masked_less(x, 0.0) for x in X.to_numpy()], Y, {}, "X: got .* masked values"),
        (X * [1, 1e-150, 1, 1, 1], Y, {}, "X: got values beyond .* in another unit"),
        (X, 1e150 * Y, {}, "y: got values beyond .* in another unit"),
        (X, pd.Series(Y)[::-1], {}, r"y: got another index .* y\.loc\[X\.index\]"),
        (X.set_axis([*NAMES[:4], "age"], axis=1), Y, {}, "X: got the columns .*names that differ"),
        (X[["batch"]], Y, {}, "X: got 1 constant columns"),
        (X, Y[:-1], {}, r"y: got the shape \(29,\), expected \(30,\)"),
        (X, np.where(Y > 90, Y, np.inf), {}, "y: got .* values that are NaN or infinity"),
        (X, np.ones(30), {}, "y: got 1.0 in every row"),
        (X, Y, {"X_new": X.to_numpy()[:, :3]}, r"X_new: got the shape \(30, 3\), expected \(S, 5"),
        (X, Y, {"X_new": X[NAMES[::-1]]}, r"X_new: got the columns \['lot'"),
        (X, Y, {"expected_size": "2"}, "expected_size: got '2', expected a number between 0"),
        (
            X,
            Y,
            {"expected_size": np.ones(2)},
            r"expected_size: got array\(\[1., 1.\]\), expected a",
        ),
        (X, Y, {"expected_size": True}, "expected_size: got True, expected a number between 0"),
        (X.set_axis([False, True, 2, 3, 4], axis=1), Y, {}, "X: got the columns .*map.str"),
        (X, pd.DataFrame({"y": Y})[::-1]["y"].to_frame(), {}, "y: got the shape"),
        (X, Y, {"expected_size": 4}, "expected_size: got 4, expected a number between 0 and 4"),
        (X, Y, {"num_chains": 0}, "num_chains: got 0, expected a whole number, at least 1"),
        (X, Y, {"num_chains": 2.0}, "num_chains: got 2.0, expected a whole number"),
        (X, Y, {"num_warmup": -1}, "num_warmup: got -1, expected a whole number, at least 0"),
        (X, Y, {"key": 0}, "key: got 0, expected a random key"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_errors(X, y, options, message):
    with pytest.raises(ValueError, match=message):
        nss.sparse_regression(**{"key": KEY, "X": X, "y": y} | options)


@pytest.mark.exhaustive
def test_another_expected_size_compiles_no_chains_anew():
    X, y = table()
    options = dict(num_warmup=50, num_samples=60, num_chains=2)
    before = regression.chains._cache_size()
    sizes = []
    for expected in (1.0, 3.0):
        tree = nss.sparse_regression(KEY, X, y, expected_size=expected, **options)
        sizes.append(float(tree["posterior"]["inclusion"].mean()))
    assert regression.chains._cache_size() == before + 1
    assert sizes[0] < sizes[1] - 0.1


class OtherFrame:
    """A table of another library than pandas."""

    columns = NAMES

    def __array__(self, dtype=None, copy=None):
        return X.to_numpy()


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("table", "new"), [(OtherFrame(), None), (X, OtherFrame())])
def test_tables_of_other_libraries_are_not_read_by_position(table, new):
    with pytest.raises(ValueError, match=r"got a .* DataFrame, .*to_pandas"):
        nss.sparse_regression(KEY, table, Y, X_new=new)


@pytest.mark.parametrize(
    ("X", "y", "message"),
    [
        (np.ma.masked_less(X.to_numpy(), 0.0), Y, "X: got .* masked values"),
        (X, np.ma.masked_less(Y, 90.0), "y: got .* masked values"),
        (X.assign(dose=pd.Categorical(["3", "4"] * 15)), Y, "X: got values that are not numbers"),
        (X.assign(day=pd.date_range("2020-01-01", periods=30)), Y, "X: got dates"),
        (X, pd.Series(Y)[::-1], r"y: got another index .* y\.loc\[X\.index\]"),
        (X, pd.DataFrame({"y": Y})[::-1], r"y: got another index .* y\.loc\[X\.index\]"),
        (X.to_numpy().astype(str), Y, "X: got values that are not numbers"),
        (X.to_numpy().astype(str).tolist(), Y, "X: got values that are not numbers"),
        (np.arange("2020-01-01", "2020-01-31", dtype="M8[D]")[:, None], Y, "X: got dates"),
        ([np.ma.masked_less(x, 0.0) for x in X.to_numpy()], Y, "X: got .* masked values"),
        (X, pd.Categorical(["3", "4"] * 15), "y: got values that are not numbers"),
    ],
)
def test_the_estimator_refuses_what_the_function_refuses(X, y, message):
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match=message):
        nss.SparseRegression(random_state=0).fit(X, y)


def test_predictions_are_refused_of_what_the_fit_refuses():
    pytest.importorskip("sklearn")
    estimator = nss.SparseRegression(num_warmup=5, num_samples=20, num_chains=1, random_state=0)
    estimator.fit(X, Y)
    with pytest.raises(ValueError, match="X: got values that are not numbers"):
        estimator.predict(X.assign(dose=pd.Categorical(["3", "4"] * 15)))
    estimator.fit(X.to_numpy(), Y)
    with pytest.raises(ValueError, match=r"X: got .* masked values"):
        estimator.predict(np.ma.masked_less(X.to_numpy(), 0.0))
    with pytest.raises(ValueError, match="X: got values that are not numbers"):
        estimator.predict(X.to_numpy().astype(str))


@pytest.mark.parametrize("name", ["id", "feature", "row"])
def test_rows_keep_their_labels_whatever_the_index_is_called(name):
    labels = pd.Index(np.arange(30)[::-1] + 1, name=name)
    tree = nss.sparse_regression(
        KEY, X.set_axis(labels), Y, num_warmup=5, num_samples=20, num_chains=1
    )
    known = tree["constant_data"].to_dataset()
    assert set(known.sizes) == {"row", "feature"} == {*known.coords}
    np.testing.assert_array_equal(known["X"].sel(row=1), X.iloc[-1])
    assert tree["observed_data"]["y"].sel(row=30) == Y[0]
