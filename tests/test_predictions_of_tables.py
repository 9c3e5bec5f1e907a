# SPDX-License-Identifier: Apache-2.0
"""Predictions and log likelihoods of rows, from results that may have passed through files."""

import tracemalloc

import arviz_plots
import arviz_stats
import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import special, stats
from truth.small_table import table
import xarray as xr

from jax import random
import jax.numpy as jnp
from jax.scipy.special import ndtr

import numpyro
import numpyro.distributions as dist
from numpyro.infer.util import log_likelihood

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import RESPONSES
from numpyro_spikeslab.support.files import stored_columns
from numpyro_spikeslab.tables import predict
from numpyro_spikeslab.tables.checks import row_coord
from numpyro_spikeslab.tables.formula import formula_table

SHORT = "ignore:sparse_regression. the Monte Carlo", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *SHORT, "ignore:Estimated shape parameter")

KEY = random.key(0)
FEW = dict(num_warmup=20, num_samples=50, num_chains=2)
X, Y = table()
NUM_ROWS = len(X)
rng = np.random.default_rng(0)
OFFSET, COUNTS = rng.normal(size=NUM_ROWS), np.arange(NUM_ROWS) % 3
TOTALS = 1.0 + np.arange(NUM_ROWS) % 4
CUTS = np.array([-0.5, 1.0])
RESPONSE = {"normal": Y, "student": Y, "binomial": TOTALS - 1}
RESPONSE |= dict.fromkeys(("ordered", "ordered_probit"), COUNTS)
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
    own = RESPONSES[likelihood].own_sites.keys() & sites
    posterior = {name: (["chain", "draw"], sites[name]) for name in own}
    posterior["intercept"] = ["chain", "draw"], rng.normal(size=like) - w @ X.mean().to_numpy()
    if RESPONSES[likelihood].along == "level":
        cuts = CUTS - posterior.pop("intercept")[1][..., None]
        posterior["cutpoints"] = ["chain", "draw", "cutpoint"], cuts
    posterior["w"] = ["chain", "draw", "feature"], w
    weights = COUNTS + 1.0 if likelihood == "normal" else COUNTS
    rows = {"offset": ("row", OFFSET), "weights": ("row", weights)}
    if likelihood == "binomial":
        rows["totals"] = "row", TOTALS
    rows["X"] = ["row", "feature"], X.to_numpy()
    coords = {"feature": [*X], "row": np.arange(NUM_ROWS) + 7}
    coords |= {"level": ["low", "middle", "high"]} if RESPONSES[likelihood].along == "level" else {}
    y = RESPONSE.get(likelihood, COUNTS > 0)
    meaning = "precisions" if likelihood == "normal" else "counts"
    attrs = {"likelihood": likelihood, "weights": meaning, "seed": 3}
    groups = {
        "posterior": xr.Dataset(posterior, {"feature": [*X]}),
        "constant_data": xr.Dataset(rows, coords, attrs),
        "observed_data": xr.Dataset({"y": ("row", y * 1)}, {"row": coords["row"]}),
    }
    return xr.DataTree.from_dict(groups)


def sites_of(dt):
    draws = dt["posterior"].to_dataset()
    sites = {name: x.values[..., None] for name, x in draws.drop_vars("w").items()}
    return sites, draws["w"].values


@pytest.mark.parametrize("likelihood", MEANS)
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
    # batches of new rows, of which the last is filled up, with columns in another order
    monkeypatch.setattr(predict, "BATCH", 12 * 400)
    given |= dict(totals=TOTALS) if likelihood == "binomial" else {}
    new = nss.predict(dt, X[X.columns[::-1]].set_axis(X.index + 90), kind="mean", **given)
    np.testing.assert_allclose(new, mean, rtol=1e-7)
    assert new["row"].values.tolist() == [*range(90, 120)]


@pytest.mark.parametrize("likelihood", MEANS)
def test_log_likelihoods_are_those_of_a_model_written_by_hand(likelihood, x64):
    dt = result(likelihood)
    constants = dt["constant_data"].to_dataset()
    weights = jnp.asarray(constants["weights"].values, float)

    def model(y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(5), 1.0).to_event(1))
        site = {
            name: numpyro.sample(name, dist.HalfNormal(1.0))
            for name in RESPONSES[likelihood].own_sites
        }
        f = OFFSET + numpyro.sample("intercept", dist.Normal()) + X.to_numpy() @ w
        of_row = {
            "normal": lambda: dist.Normal(f, site["sigma"] / jnp.sqrt(weights)),
            "student": lambda: dist.StudentT(site["dof"], f, site["sigma"]),
            "logit": lambda: dist.Bernoulli(logits=f),
            "probit": lambda: dist.Bernoulli(probs=ndtr(f)),
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


@pytest.mark.parametrize(
    ("likelihood", "error"), [("ordered", stats.logistic), ("ordered_probit", stats.norm)]
)
def test_levels_have_the_probabilities_between_cut_points(likelihood, error, x64, monkeypatch):
    dt = result(likelihood)
    draws = dt["posterior"]
    f = OFFSET + draws["w"].values @ X.to_numpy().T
    below = error.cdf(draws["cutpoints"].values[:, :, None] - f[..., None])
    truth = np.diff(below, axis=-1, prepend=0.0, append=1.0)
    monkeypatch.setattr(predict, "BATCH", 12 * 400)
    for rows in {}, {"X_new": X.set_axis(X.index + 90), "offset": OFFSET}:
        probs = nss.predict(dt, **rows, kind="mean")
        assert probs.dims == ("chain", "draw", "row", "level")
        assert probs["level"].values.tolist() == ["low", "middle", "high"]
        np.testing.assert_allclose(probs, truth, rtol=1e-9, atol=1e-12)
    y = nss.predict(dt)
    assert y.dims == ("chain", "draw", "row") and y.dtype.kind == "i"
    for level in range(3):
        excess = (y.values == level) - truth[..., level]
        # five standard errors
        assert abs(excess.mean()) < 5 * excess.std() / excess.size**0.5
    logs = COUNTS * np.log(truth[..., np.arange(NUM_ROWS), COUNTS])
    np.testing.assert_allclose(nss.log_likelihood(dt), logs[..., COUNTS > 0], rtol=1e-6)


def test_a_result_has_what_arviz_needs():
    dt = nss.sparse_regression(KEY, X, Y, weights=1.0 + COUNTS, offset=OFFSET, **FEW)
    draws = dt["posterior"].to_dataset()
    assert draws.attrs["inference_library"] == "numpyro_spikeslab"
    f = OFFSET + draws["intercept"].values[..., None] + draws["w"].values @ X.to_numpy().T
    scale = draws["sigma"].values[..., None] / np.sqrt(1 + COUNTS)
    logs = stats.norm.logpdf(Y, f, scale)
    np.testing.assert_allclose(dt["log_likelihood"]["y"], logs, rtol=1e-10)
    other = result("student", 50)
    other["constant_data"] = other["constant_data"].to_dataset().drop_vars("weights")
    other["log_likelihood"] = nss.log_likelihood(other).to_dataset()
    compared = arviz_stats.compare({"normal": dt, "student": other})
    assert compared.index[0] == "normal"
    dt["posterior_predictive"] = nss.predict(dt).to_dataset()
    arviz_plots.plot_ppc_dist(dt, backend="none")


def test_draws_have_a_seed_that_is_stored():
    dt = result("normal", 50)
    again, other = nss.predict(dt), nss.predict(dt, key=random.key(1))
    assert nss.predict(dt).identical(again) and not (again == other).any()


INDEXES = {
    "numbers": pd.Index(np.arange(NUM_ROWS)[::-1]),
    "floats": pd.Index(np.arange(NUM_ROWS) / 2),
    "nullable": pd.Index(np.arange(NUM_ROWS), dtype="Int64"),
    "booleans": pd.Index(np.arange(NUM_ROWS) > 1),
    "strings": pd.Index([f"é{k}" for k in range(NUM_ROWS)]),
    "dates": pd.date_range("2020-01-01", periods=NUM_ROWS),
    "time zone": pd.date_range("2020-01-01", periods=NUM_ROWS, tz="Europe/Berlin"),
    "durations": pd.timedelta_range("1h", periods=NUM_ROWS),
    "days": pd.Index([pd.Timestamp(k, unit="D").date() for k in range(NUM_ROWS)]),
    "periods": pd.period_range("2020-01", periods=NUM_ROWS, freq="M"),
    "categories": pd.CategoricalIndex(list("bca") * 10),
    "intervals": pd.interval_range(0.0, periods=NUM_ROWS),
    "mixed": pd.Index([None, "a", 1, (2, "b"), 0.5, *range(5, NUM_ROWS)], dtype=object),
    "levels": pd.MultiIndex.from_product([list("abc"), range(10)], names=["row", "feature"]),
}
STRINGS = {
    "booleans": "False",
    "strings": "é0",
    "time zone": "2020-01-01 00:00:00+01:00",
    "days": "1970-01-01",
    "periods": "2020-01",
    "categories": "b",
    "intervals": "(0.0, 1.0]",
    "mixed": "None",
    "levels": "a, 0",
}


def through_file(dt, form, path):
    if form == "zarr":
        pytest.importorskip("zarr")
        dt.to_zarr(path, consolidated=False)
        return xr.open_datatree(path, engine="zarr", consolidated=False).load()
    pytest.importorskip("h5py")
    dt.to_netcdf(path)
    with xr.open_datatree(path) as file:
        return file.load()


@pytest.mark.parametrize("form", ["netcdf", "zarr"])
@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.filterwarnings("ignore")
def test_results_are_read_as_they_were_saved_whatever_the_index(form, kind, tmp_path):
    index, dt = INDEXES[kind], result("normal", 10)
    given = formula_table(X.set_axis(index), Y, None, None, ())
    labels = row_coord("row", given.labels)
    for group in "constant_data", "observed_data":
        dt[group] = dt[group].to_dataset().assign_coords(labels)
    saved = through_file(dt, form, tmp_path / "result")
    xr.testing.assert_equal(saved, dt)
    predicted = nss.predict(saved, X.set_axis(index)[::-1], offset=OFFSET[::-1])
    assert predicted["row"].equals(dt["constant_data"]["row"][::-1])
    np.testing.assert_array_equal(nss.predict(saved), nss.predict(dt))
    np.testing.assert_array_equal(nss.log_likelihood(saved), nss.log_likelihood(dt))
    first = dt["constant_data"]["row"].values[0]
    assert first == STRINGS.get(kind, index.to_numpy()[0])


FRAME = X.assign(
    y=Y,
    kind=pd.Categorical(list("cab") * 10, list("cdab")),
    row=["north", "south", "west"] * 10,
    one=pd.Categorical(["x"] * NUM_ROWS, ["x"]),
    half=np.arange(NUM_ROWS) < 15,
)
FORMULA = "y ~ bs(age, 4) + kind + C(row, contr.sum) + scale(dose):one + half + C(lot > 0)"


def formula_result():
    """A result with the groups that a formula adds, and any posterior."""
    pytest.importorskip("formulaic")
    given = formula_table(FORMULA, None, FRAME.set_axis(INDEXES["periods"]), None, ())
    like, names, rng = (2, 10), {"feature": [*given.X]}, np.random.default_rng(0)
    posterior = {name: (["chain", "draw"], 1 + rng.random(like)) for name in ("sigma", "intercept")}
    posterior["w"] = ["chain", "draw", "feature"], rng.normal(size=(*like, given.X.shape[1]))
    coords = names | row_coord("row", given.labels)
    attrs = {"likelihood": "normal", "weights": "precisions", "seed": 0, "formula": FORMULA}
    groups = {
        "posterior": xr.Dataset(posterior, names),
        "constant_data": xr.Dataset({"X": (["row", "feature"], given.X)}, coords, attrs),
        "data": stored_columns(given.variables, "row"),
    }
    return xr.DataTree.from_dict(groups)


@pytest.mark.parametrize("form", [None, "netcdf", "zarr"])
@pytest.mark.filterwarnings("ignore")
def test_new_rows_of_a_formula_have_its_levels_knots_and_means(form, tmp_path):
    dt = formula_result()
    assert set(dt["data"].variables) == {"age", "kind", "row", "one", "dose", "half", "lot"}
    if form is not None:
        saved = through_file(dt, form, tmp_path / "result")
        xr.testing.assert_equal(saved, dt)
        dt = saved
    # of two rows there are neither the knots nor the levels
    new = nss.predict(dt, FRAME.set_axis(INDEXES["periods"]).iloc[[4, 2]], kind="predictor")
    np.testing.assert_allclose(new, nss.predict(dt, kind="predictor")[..., [4, 2]], rtol=1e-12)
    assert new["row"].values.tolist() == ["2020-05", "2020-03"]


def test_memory_is_that_of_the_draws(monkeypatch):
    monkeypatch.setattr(predict, "BATCH", 1 << 16)
    dt, rows = result("normal", 500), np.tile(X.to_numpy(), (200, 1))
    tracemalloc.start()
    size = nss.predict(dt, rows, offset=0).nbytes
    assert size == 8 * 1000 * 6000 and tracemalloc.get_traced_memory()[1] < 1.2 * size
    tracemalloc.stop()


REFUSED = {
    "kind": (lambda: nss.predict(result("normal"), kind="odds"), "kind: got 'odds', expected one"),
    "key": (lambda: nss.predict(result("normal"), key=0), "key: got 0, expected a random key"),
    "no result": (lambda: nss.predict(X), "dt: got a DataFrame without `X` in `constant_data`"),
    "statistics": (
        lambda: nss.log_likelihood(result("normal").drop_nodes("constant_data")),
        "dt: got a DataTree without `X`.* a result of sparse_regression for a table",
    ),
    "columns less": (
        lambda: nss.predict(result("normal"), X.to_numpy()[:, :3], offset=0),
        r"X_new: got the shape \(30, 3\)",
    ),
    "no rows": (
        lambda: nss.predict(result("normal"), X[:0], offset=0),
        r"X_new: got the shape \(0, 5\)",
    ),
    "no offset": (lambda: nss.predict(result("poisson"), X), "offset: got None, .* 0 is an expo"),
    "offset of rows": (
        lambda: nss.predict(result("normal"), offset=1),
        "offset: got numbers, expected None without X_new",
    ),
    "other rows": (
        lambda: nss.predict(result("normal"), X, offset=OFFSET[1:]),
        r"offset: got the shape \(29,\), .* one for each row of X_new",
    ),
    "no totals": (
        lambda: nss.predict(result("binomial"), X, offset=0),
        "totals: got None, expected numbers of trials",
    ),
    "half a trial": (
        lambda: nss.predict(result("binomial"), X, offset=0, totals=0.5),
        "totals: got 0.5 in row 0, expected whole numbers",
    ),
    "totals": (lambda: nss.predict(result("normal"), X, totals=1), "totals: got numbers"),
    "too many": (
        lambda: nss.predict(result("poisson"), X.set_axis(X.index + 7)[3:5], offset=[0, 900]),
        "X_new, offset: got a mean of .* in row 11, expected less",
    ),
    "infinite": (
        lambda: nss.predict(result("poisson"), X[:9], offset=900, kind="mean"),
        "X_new, offset: got a mean of inf in row ",
    ),
    "levels": (
        lambda: nss.predict(formula_result(), FRAME.assign(row=["north", "up", "down"] * 10)[:3]),
        r"X_new: got the levels \['up', 'down'\] of 'row' in rows \[1, 2\], expected one of "
        r"\['north', 'south', 'west'\]",
    ),
    "range": (
        lambda: nss.predict(formula_result(), FRAME.assign(age=1e9)),
        "X_new: got rows out of the range of `bs",
    ),
    "variable": (
        lambda: nss.predict(formula_result(), FRAME.drop(columns="row")),
        "X_new: got no column 'row', expected all that the formula names",
    ),
    "array": (lambda: nss.predict(formula_result(), X.to_numpy()), "X_new: got a ndarray, exp"),
}
test_what_cannot_be_predicted_is_refused = refusals(REFUSED)
