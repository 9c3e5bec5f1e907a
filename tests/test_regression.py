# SPDX-License-Identifier: Apache-2.0
"""One call for a table and a response."""

import arviz_stats
import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import stats
from scipy.special import betaln, logsumexp
from truth.known_draws import columns_of
from truth.small_table import NAMES, table
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.variational import FitStatistics
from numpyro_spikeslab.reporting import arviz_data as reading
from numpyro_spikeslab.reporting.stored_summary import stored_summary
from numpyro_spikeslab.tables import chains as table_chains, units as table_units
from numpyro_spikeslab.tables.columns import checked_size

SHORT = "ignore:sparse_regression. the Monte Carlo", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *SHORT)

KEY = random.key(0)


@pytest.fixture(scope="module")
def tree():
    X, y = table()
    return nss.sparse_regression(KEY, X, y)


def exact(X, y):
    """Inclusion probabilities and posterior means in standardised units, by quadrature."""
    X, y = (np.asarray((x - x.mean(0)) / x.std(0)) for x in (X, y))
    count = X.shape[1]
    models = np.array(list(np.ndindex((2,) * count)))
    sigmas = slabs = np.arange(1, 80) * 3.0 / 80
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
    log = logsumexp(logs, axis=(1, 2))
    probs = np.exp(log - logsumexp(log))
    return probs @ models, probs @ np.array(means)


def test_near_copies_share_their_effect_as_they_should_whatever_the_precision(x32):
    """In single precision a chain would stay at one of them."""
    rng = np.random.default_rng(5)
    X = pd.DataFrame(rng.uniform(0.0, 40.0, size=(30, 5)), columns=NAMES)
    X["dose"] = X["age"] + 1e-3 * rng.normal(size=30)
    y = 1.8 * X["age"] + 32.0 + 1e-2 * rng.normal(size=30)
    dt = nss.sparse_regression(KEY, X, y, num_samples=2000)
    spikes = dt["posterior"]["w_spike"].values[..., :2]
    alone = spikes[spikes.sum(-1) == 1].mean(0)
    fits = [np.polynomial.Polynomial.fit(X[name], y, 1, full=True)[1] for name in NAMES[:2]]
    # given the weight, the noise has 28 degrees of freedom, and its prior takes one
    odds = np.array([squares.item() for squares, *_ in fits]) ** -13.5
    assert 0.1 < alone[1] < 0.9
    np.testing.assert_allclose(alone, odds / odds.sum(), atol=0.03)
    # nothing of the double precision stays behind
    assert not jax.config.jax_enable_x64 and jnp.ones(1).dtype == np.float32
    assert not any(isinstance(x.data, jax.Array) for t in dt.subtree for x in t.variables.values())


def test_chains_agree_with_quadrature(tree):
    X, y = table()
    used = [name for name in NAMES if name != "batch"]
    inclusion, mean = exact(X[used].to_numpy(), y)
    summary = columns_of(tree).sel(feature=used)
    assert 0.2 < inclusion.max() < 0.95
    # five standard errors: one seed in a hundred thousand would fail
    error = abs(summary["inclusion"] - inclusion)
    assert (error < 5 * summary["mcse_inclusion"] + 1e-3).all()
    in_units = mean * np.std(y) / X[used].std(ddof=0).to_numpy()
    assert (abs(summary["mean"] - in_units) < 5 * summary["mcse_mean"]).all()


def test_chains_have_as_many_draws_as_asked_for_though_they_agree_before(tree, capsys):
    X, y = table()
    longer = nss.sparse_regression(KEY, X, y, num_samples=520)
    progress = capsys.readouterr().err
    assert all(f"{phase}:" in progress for phase in ("compiling", "fit", "warm-up", "draws"))
    assert "570/570" in progress and "error=0." in progress
    assert longer["summary"].attrs["num_samples"] == longer["posterior"].sizes["draw"] == 520
    # which are the same as far as both go
    w, first = longer["posterior"]["w"], tree["posterior"]["w"]
    np.testing.assert_array_equal(w[:, :250], first[:, :250])


def test_a_constant_column_has_the_weight_zero(tree):
    row = columns_of(tree).sel(feature="batch")
    assert row["mean"] == row["sd"] == row["inclusion"] == row["cavi"] == 0
    for data in (tree, tree["cavi"]):
        draws = data["posterior"].sel(feature="batch")
        assert not draws["w"].any() and not draws["w_spike"].any()
        assert data["posterior"]["w"].dtype == data["posterior"]["sigma"].dtype == float
    assert np.isnan(row["credible_set"]) and row["prior_inclusion"] == 0


@pytest.mark.parametrize("part", ["/", "cavi"])
def test_results_pass_through_files(tree, part, tmp_path):
    pytest.importorskip("h5py")
    tree[part].to_netcdf(tmp_path / "result.nc")
    with xr.open_datatree(tmp_path / "result.nc") as file:
        # xarray keeps the names of the groups above; ArviZ's lists of one string become the string
        saved = file.load()[part]
        xr.testing.assert_equal(saved, tree[part])
        pd.testing.assert_frame_equal(nss.summary(saved, "w"), nss.summary(tree[part], "w"))
        if part == "/":
            assert saved["summary"].attrs == tree["summary"].attrs


def test_names_groups_and_diagnostics(tree):
    summary = tree["summary"].to_dataset()
    frame = nss.summary(tree, "w", None).set_axis(NAMES)
    draws = reading.posterior(tree)
    assert draws["w"].dims == ("chain", "draw", "feature")
    np.testing.assert_allclose(frame["mean"], draws["w"].mean(["chain", "draw"]))
    assert ((draws["w"] != 0) == draws["w_spike"]).all()
    assert frame["r_hat"].max() < 1.02 and frame["ess_bulk"].min() > 300
    assert (arviz_stats.rhat(draws[["sigma", "slab_scale", "prior_inclusion"]]) < 1.02).all()
    # NUTS given the slabs of all weights would move it ten times as slowly
    assert arviz_stats.ess(draws[["slab_scale"]])["slab_scale"] > 0.12 * draws["sigma"].size
    assert summary.attrs["num_samples"] == draws.sizes["draw"] < table_chains.MOST
    np.testing.assert_array_equal(frame["cavi"], reading.inclusion(tree["cavi"], "w"))
    compared = nss.compare({"chains": tree, "CAVI": tree["cavi"]}, ["w", "sigma"], "chains")
    assert compared.loc["CAVI", "k_hat"] == summary.attrs["k_hat"] > 0
    assert summary.attrs["expected_size"] == 0.4
    assert list(tree["constant_data"]["X"]["feature"].values) == NAMES
    np.testing.assert_array_equal(tree["observed_data"]["y"], table()[1])
    # a tenth of the columns is expected, and a constant one has no prior
    odds = frame["inclusion"] / (1 - frame["inclusion"])
    np.testing.assert_allclose(frame["bayes_factor"], (9 * odds).where(odds > 0))
    assert set(nss.models_table(tree, "w")["members"]) >= {("age",), ("dose",), ("age", "weight")}


def test_intercept_noise_and_predictions_are_in_the_units_of_the_response(tree):
    X, y = table()
    draws = reading.posterior(tree)
    fit = draws["intercept"].values[..., None] + draws["w"].values @ X.to_numpy().T
    new, sigma = nss.predict(tree, X.iloc[:4]), draws["sigma"].values
    assert new.dims == ("chain", "draw", "row") and new.shape == (4, draws.sizes["draw"], 4)
    ratio = (new.values - fit[..., :4]) / sigma[..., None]
    assert abs(ratio.mean()) < 5 / ratio.size**0.5 and abs(ratio.std() - 1) < 0.06
    assert 10 < sigma.mean() < 30
    centre = fit.mean(-1)
    assert centre.mean() == pytest.approx(y.mean(), abs=1.0)
    assert centre.std() == pytest.approx(np.sqrt((sigma**2).mean() / len(y)), rel=0.12)


def test_contrasts_are_an_orthonormal_basis_without_the_mean():
    basis = table_units.contrasts(np.eye(5), np.ones(5))
    np.testing.assert_allclose(basis @ basis.T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(basis.sum(axis=1), 0.0, atol=1e-12)


# one number of draws, so that each shape is compiled once
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)


@pytest.mark.exhaustive
def test_noise_does_not_vanish_if_columns_are_many():
    """Four rows, six columns: an intercept leaves three degrees of freedom."""
    rng = np.random.default_rng(0)
    tree = nss.sparse_regression(KEY, rng.normal(size=(4, 6)), rng.normal(size=4), num_samples=4000)
    assert float(tree["posterior"]["sigma"].min()) > 1e-4


def test_large_errors_are_told_as_multiples_of_what_is_allowed():
    X, y = table()
    with pytest.warns(UserWarning, match="Monte Carlo error") as told:
        errors = nss.summary(nss.sparse_regression(KEY, X, y, **FEW), "w", None)
    multiples = errors["mcse_inclusion"] / 0.02
    worst = f"of the inclusion of {multiples.idxmax()} is {multiples.max():.2f} times"
    message = str(told[0].message)
    assert worst in message and "after 50 draws. Raise num_samples" in message


def test_most_columns_may_be_expected():
    """Where the density of the inclusion probability has no maximum, the fit takes a flat one."""
    X, y = table()
    tree = nss.sparse_regression(KEY, X.iloc[:, :3], y, expected_size=1.5, **FEW)
    assert np.isfinite(tree["cavi"]["sample_stats"].attrs["bound"])
    assert tree["summary"].attrs["expected_size"] == 1.5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("column", NAMES[:2])
def test_an_empty_fit_beside_chains_with_columns_is_told(tree, column):
    empty = tree.copy(deep=True)
    for data, probability in ((empty, 0.9), (empty["cavi"], 0.0)):
        probs = data["sample_stats"][table_chains.PROBABILITIES]
        probs[:] = xr.where(probs["feature"] == column, probability, 0.0)
    message = "the fit includes no column, and the chains include 1. Report the chains"
    with pytest.warns(UserWarning, match=message):
        stored_summary(empty, table()[0].to_numpy(), None)
    # a column that is always in is no finding
    empty["constant_data"]["prior_inclusion.w"].loc[{"feature": column}] = 1.0
    stored_summary(empty, table()[0].to_numpy(), None)


def test_tails_that_are_not_normal_are_told():
    X, y = table()
    outliers = y + np.where(np.arange(30) % 6 == 0, 3e3, 0.0) * np.cos(np.arange(30))
    message = "sparse_regression: residuals have heavier tails .* try likelihood='student'"
    with pytest.warns(UserWarning, match=message):
        nss.sparse_regression(KEY, X, outliers, **FEW)


@pytest.mark.exhaustive
def test_alternatives_of_the_fit_have_the_names_of_the_columns():
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(size=(40, 1)) * [1.0, 0.0, -10.0] + 3.0, columns=list("abc"))
    y = X["a"] + 0.5 * rng.normal(size=40)
    alternatives = nss.summary(nss.sparse_regression(KEY, X, y, **FEW)["cavi"], "w")["alternatives"]
    assert alternatives.to_dict() == {"w[a]": "w[c]", "w[b]": "", "w[c]": "w[a]"}


def test_many_more_columns_than_rows():
    """If a tenth of the 1,500 columns is expected, 160 are in and inclusion of the right is .19."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 1500))
    X += np.sqrt(0.15) * rng.normal(size=(30, 10)) @ rng.normal(size=(10, 1500))
    y = 1.3 * X[:, 10] / X[:, 10].std() + rng.normal(size=30)
    options = dict(num_warmup=200, num_samples=300, num_chains=2)
    summary = columns_of(nss.sparse_regression(KEY, X, y, **options))
    assert summary.attrs["expected_size"] == 3.0
    assert np.flatnonzero(summary["inclusion"] > 0.2).tolist() == [10]
    assert summary["inclusion"][10] > 0.9 and summary["credible_set"][10] == 0
    assert summary["inclusion"].sum() < 4 and summary["r_hat"].max() < 1.1


def test_draws_of_many_columns_are_rounded_and_as_good():
    size = table_chains.WIDE + 3
    rng = np.random.default_rng(0)
    X = 1e6 + rng.normal(size=(30, size))
    X[:, 3] = 1e6
    y = X[:, 0] - 2 * X[:, 1] + 1e-3 * rng.normal(size=len(X))
    counts = {"num_warmup": 5, "num_samples": 10, "num_chains": 2}
    tree = nss.sparse_regression(KEY, X, y, always=[0, 1], expected_size=0.01, **counts)
    for data in tree, tree["cavi"]:
        draws = reading.posterior(data)
        probs = data["sample_stats"]["inclusion_probabilities.w"]
        assert (draws["w"].dtype, draws["w_spike"].dtype, probs.dtype) == ("f4", "i1", "f4")
        assert ((draws["w"] != 0) == draws["w_spike"]).all()
        assert (draws["w_spike"][..., :2] == 1).all() and (probs[..., :2] == 1).all()
        assert (draws["w_spike"][..., 3] == 0).all() and (probs[..., 3] == 0).all()
        assert ((probs >= 0) & (probs <= 1)).all()
        # seven digits of a weight times a million are a tenth, for which the intercept makes up
        f = draws["intercept"].values[..., None] + draws["w"].values.astype(float) @ X.T
        np.testing.assert_allclose(f, np.broadcast_to(y, f.shape), rtol=0, atol=0.01)
    np.testing.assert_allclose(nss.predict(tree, kind="mean").mean(["chain", "draw"]), y, atol=0.01)


def test_no_more_columns_are_expected_than_rows_can_tell():
    sizes = {(64, 442): 6.4, (7129, 72): 7.2, (4, 30): 0.4, (3, 4): 0.3}
    assert {shape: checked_size(None, *shape) for shape in sizes} == sizes
    assert checked_size(3.0, 7129, 72) == 3.0


@pytest.mark.exhaustive
def test_a_fit_that_is_off_is_flagged():
    """Eight effects among columns whose neighbours are correlated by 0.97."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 100))
    for j in range(1, 100):
        X[:, j] = 0.97 * X[:, j - 1] + np.sqrt(1 - 0.97**2) * X[:, j]
    y = X[:, rng.choice(100, 8, replace=False)] @ rng.choice([-1, 1], 8) + rng.normal(size=200)
    summary = columns_of(nss.sparse_regression(KEY, X, y))
    assert (abs(summary["cavi"] - summary["inclusion"]) > 0.2).any() and summary.attrs[
        "k_hat"
    ] > 0.7
    assert summary["r_hat"].max() < 1.05


def test_tables_of_like_shapes_share_their_programs():
    """Other rows, columns, expected sizes and numbers of draws compile nothing."""
    options = dict(num_warmup=20, num_samples=50, num_chains=4)
    nss.sparse_regression(KEY, X[:29], Y[:29], **options)
    before = [call._cache_size() for call in (table_chains._begin, table_chains._advance_short)]
    trees = [
        nss.sparse_regression(KEY, X[:27], Y[:27], expected_size=size, num_warmup=20)
        for size in (1.0, 3.0)
    ]
    trees.append(nss.sparse_regression(KEY, X[NAMES[1:]][:29], Y[:29], num_warmup=20))
    assert [
        call._cache_size() for call in (table_chains._begin, table_chains._advance_short)
    ] == before
    small, large = (float(tree["posterior"]["prior_inclusion"].mean()) for tree in trees[:2])
    assert small < large - 0.1
    assert list(trees[2]["summary"]["feature"].values) == NAMES[1:]


@pytest.mark.parametrize(("size", "expected"), [(1, 8), (8, 8), (9, 10), (53, 56), (7129, 7168)])
def test_sizes_are_rounded_up_to_four_in_an_octave(size, expected):
    assert table_chains.padded(size) == expected == table_chains.padded(expected)


def test_a_fit_that_has_not_ended_is_named():
    w = np.zeros((4, 2))
    statistics = FitStatistics(w[:, 0], w[:, 0], {"w": w[0]}, None)
    sizes = dict.fromkeys(("w", "w_spike"), 2)

    def made(bound, only_starts=False):
        fit = {"w": w}, statistics, np.array([-9.0, bound])
        return table_chains._tree_of_fit(fit, sizes, only_starts)

    assert made(-9.0)["sample_stats"].attrs["bound"] == -9.0
    with pytest.warns(UserWarning, match="the bound still moves after 1000 steps .* r_hat"):
        made(-8.9)
    with pytest.raises(FloatingPointError, match="the bound of the fit is not a number"):
        made(np.nan)
    # a fit that only starts the chains is not reported
    assert made(-8.9, only_starts=True) is None


@pytest.mark.parametrize("name", ["id", "feature", "row"])
def test_rows_keep_their_labels_whatever_the_index_is_called(name):
    labels = pd.Index(np.arange(30)[::-1] + 1, name=name)
    tree = nss.sparse_regression(KEY, X.set_axis(labels), Y, **FEW)
    constant = tree["constant_data"].to_dataset()
    assert set(constant.sizes) == {"row", "feature"} == {*constant.coords}
    np.testing.assert_array_equal(constant["X"].sel(row=1), X.iloc[-1])
    assert tree["observed_data"]["y"].sel(row=30) == Y[0]


X, Y = table()
DAYS = pd.date_range("2020-01-01", periods=30)
TABLES = {
    "two rows": (X.iloc[:2], r"X: got the shape \(2, 5\), expected \(N, P\), at le"),
    "one column": (X["age"], r"X: got the shape \(30,\)"),
    "NaN": (
        X.replace({"batch": {3.0: np.nan}}),
        "X: got nan in row 0, column 'batch', the",
    ),
    "strings": (X.assign(dose="high"), "X: got the str 'high' in .*get_dummies"),
    "missing": (
        X.assign(dose=pd.array([1, None] * 15)),
        "X: got nan in row 1, column 'dose'",
    ),
    "masked": (np.ma.masked_less(X.to_numpy(), 0.0), "X: got .* masked values"),
    "dates": (pd.DataFrame({"day": DAYS}), "X: got the .* in row 0, column 'day', .* in a unit"),
    "a date": (X.assign(day=DAYS), "X: got the Timestamp '2020"),
    "times": (X.assign(day=DAYS - DAYS[0]), "X: got the Timedelta"),
    "names twice": (X.set_axis([*NAMES[:4], "age"], axis=1), "X: .*names that differ"),
    "booleans": (X.set_axis([False, True, 2, 3, 4], axis=1), "X: got the columns .*map.str"),
    "levels": (X.set_axis([("a", i) for i in range(5)], axis=1), "all strings or all num"),
    "kinds": (X.set_axis([0, "a", "b", "c", "d"], axis=1), "all strings or all numbers"),
    "constant": (X[["batch"]], "X: got 1 constant columns"),
}
RESPONSES = {
    "masked response": (np.ma.masked_less(Y, 90.0), "y: got .* masked values"),
    "a row less": (Y[:-1], r"y: got the shape \(29,\), expected \(30,\)"),
    "infinity": (np.where(Y > 90, Y, np.inf), "y: got inf in row 3, the first of 9"),
    "a column": (pd.DataFrame({"y": Y}), r"y: got the shape .* Use y\[:, 0\], or y\.iloc"),
    "two responses": (np.stack([Y, Y]).T, r"y: got the shape \(30, 2\).* one by one"),
    "constant response": (np.where(Y > 90, 0.1 + 0.2, 0.3), "y: got 0.3.* in every row"),
}
OPTIONS = {
    "always": ({"X": X[["age", "batch"]], "always": "age"}, "1 constant columns of 2"),
    "expected size": ({"expected_size": 4}, "expected_size: got 4, expected a number betw"),
    "no chain": ({"num_chains": 0}, "num_chains: got 0, expected a whole number, at least 1"),
    "half chains": ({"num_chains": 2.0}, "num_chains: got 2.0, expected a whole number"),
    "warmup": ({"num_warmup": -1}, "num_warmup: got -1, expected a whole number"),
    "key": ({"key": 0}, "key: got 0, expected a random key"),
}


def analyse(arguments):
    nss.sparse_regression(**{"key": KEY, "X": X, "y": Y} | arguments)


test_messages_of_tables = refusals(TABLES, lambda table: analyse({"X": table}))
test_messages_of_responses = refusals(RESPONSES, lambda response: analyse({"y": response}))
test_messages_of_options = refusals(OPTIONS, analyse)
