# SPDX-License-Identifier: Apache-2.0
"""Regressions of times, of which some are known between limits only."""

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import optimize, stats
from scipy.special import logsumexp
from test_likelihoods_of_tables import INCLUSION, exact, log_slabs
from truth.time_cases import (
    BREAKS,
    LOG_HAZARD,
    NUM_ROWS,
    SEEN,
    SITES,
    TIMES,
    Hazards,
    data_of,
    log_density,
    site_of,
)
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist
from numpyro.infer.util import log_likelihood

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import RESPONSES
from numpyro_spikeslab.models.times import PiecewiseTime, concordance
from numpyro_spikeslab.reporting.arviz_data import arviz_stats, mean, posterior
from numpyro_spikeslab.support.precision import double_precision
from numpyro_spikeslab.tables.evidence import standard_problem

pytestmark = pytest.mark.filterwarnings("error", "ignore:sparse_regression. the Monte Carlo")

KEY = random.key(0)


@pytest.mark.parametrize("likelihood", TIMES)
def test_densities_and_their_slopes_are_those_of_limits(likelihood, x64):
    f, ends = data_of(likelihood)[1:]
    sigma = site_of(likelihood)
    sites = SITES.get(likelihood, {"sigma": sigma})

    def ours(f, sites):
        return RESPONSES[likelihood].distribution(f, ends[1], **sites).log_prob(ends[0])

    np.testing.assert_allclose(ours(f, sites), log_density(likelihood, ends, f, sigma), rtol=1e-9)
    for shift in (0.0, 10.0, -10.0):
        slopes = jax.grad(lambda *x: ours(*x).sum(), argnums=(0, 1))(f + shift, sites)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes)), shift
    # beyond what is left of 1, NumPyro's censored distributions are flat
    of = RESPONSES[likelihood].distribution(jnp.array([0.0]), jnp.inf, **sites)
    far = np.exp(3.5)
    np.testing.assert_allclose(
        of.log_prob(far), TIMES[likelihood](0.0, sigma).logsf(far), rtol=1e-9
    )


def result(likelihood):
    """A result of any posterior."""
    rng, like = np.random.default_rng(1), (2, 50)
    X, offset, (low, high) = data_of(likelihood)
    names = ["chain", "draw"]
    draws = {name: (names, 0.5 + rng.random(like)) for name in RESPONSES[likelihood].own_sites}
    coords = {"feature": ["a", "b"], "row": np.arange(NUM_ROWS) + 7}
    if likelihood == "cox":
        draws["log_hazard"] = [*names, "piece"], LOG_HAZARD + rng.random((*like, 1))
        coords["piece"] = [0.0, *BREAKS]
    else:
        draws["intercept"] = names, rng.normal(size=like)
    draws["w"] = [*names, "feature"], 0.3 * rng.normal(size=(*like, 2))
    rows = {"X": (["row", "feature"], X), "offset": ("row", offset), "upper": ("row", high)}
    attrs = {"likelihood": likelihood, "weights": "counts", "seed": 3}
    groups = {
        "posterior": xr.Dataset(draws, {k: x for k, x in coords.items() if k != "row"}),
        "constant_data": xr.Dataset(rows, coords, attrs),
        "observed_data": xr.Dataset({"y": ("row", low)}, {"row": coords["row"]}),
    }
    f = offset + draws["w"][1] @ X.T
    if likelihood == "cox":
        return xr.DataTree.from_dict(groups), f, draws["log_hazard"][1][:, :, None]
    f += draws["intercept"][1][..., None]
    sigma = draws["sigma"][1][..., None] if "sigma" in draws else 1.0
    return xr.DataTree.from_dict(groups), f, sigma


@pytest.mark.parametrize("likelihood", TIMES)
def test_predictions_are_those_of_the_draws(likelihood):
    dt, f, sigma = result(likelihood)
    of, times = TIMES[likelihood](f, sigma), [0.0, 0.5, 3.0]
    curves = nss.predict(dt, times=times)
    assert curves.dims == ("chain", "draw", "row", "time") and curves.name == "survival"
    assert (
        curves["row"].equals(dt["constant_data"]["row"]) and curves["time"].values.tolist() == times
    )
    np.testing.assert_allclose(curves, np.stack([of.sf(t) for t in times], axis=-1), atol=1e-12)
    new = nss.predict(dt, dt["constant_data"]["X"].values, times=3.0, offset=0.0)
    offset = dt["constant_data"]["offset"].values
    np.testing.assert_allclose(
        new[..., 0], TIMES[likelihood](f - offset, sigma).sf(3.0), atol=1e-12
    )
    np.testing.assert_allclose(nss.predict(dt, kind="mean"), of.median(), rtol=1e-9)
    uniform = of.cdf(nss.predict(dt).values).ravel()
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    truth = log_density(likelihood, data_of(likelihood)[2], f, sigma)
    np.testing.assert_allclose(nss.log_likelihood(dt), truth, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("likelihood", "sort"), [("weibull", "right"), ("lognormal", "all")])
def test_chains_agree_with_quadrature(likelihood, sort):
    X, offset, ends = data_of(likelihood, sort=sort)
    event = {"event": np.isfinite(ends[1])} if sort == "right" else {}
    dt = nss.sparse_regression(
        KEY,
        pd.DataFrame(X * [10.0, 0.1] + [5.0, -3.0], columns=["a", "b"]),
        24 * (ends[0] if event else ends.T),
        likelihood=likelihood,
        inclusion=INCLUSION,
        offset=offset,
        num_samples=2000,
        progress_bar=False,
        **event,
    )
    # the units that a scale of hours and the columns hide
    logs = np.log(np.where(ends[0] > 0, *ends)) - offset
    centre, scale = logs.mean(), logs.std()
    draws = posterior(dt)
    w = draws["w"].values * X.std(axis=0) * [10.0, 0.1] / scale
    level = draws["intercept"] + draws["w"].values @ (X.mean(axis=0) * [10.0, 0.1] + [5.0, -3.0])
    b = (level.values - np.log(24) - centre) / scale
    sigma = draws["sigma"].values / scale
    standard = (ends / np.exp(offset + centre)) ** (1 / scale)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    truth = exact(likelihood, X, standard, 0.0, {"w": w, "b": b, "sigma": sigma})
    values = [*np.moveaxis(w != 0, -1, 0), *np.moveaxis(w, -1, 0), b, sigma]
    errors = [float(arviz_stats.mcse(x.astype(float), method="mean")) for x in values]
    means = np.array([x.mean() for x in values])
    assert (abs(means - truth) < 5 * np.array(errors) + 2e-3 * (1 + abs(truth))).all()
    assert (abs(means - truth)[:2] < 0.02).all()
    # the density of times in their own units, for evidences
    model, samples, data, constant = standard_problem(dt)
    with double_precision():
        of_rows = np.asarray(log_likelihood(model, samples, **data, batch_ndims=2)["y"])
    ours = dt["log_likelihood"]["y"].sum("row")
    np.testing.assert_allclose(of_rows.sum(-1) + constant, ours, rtol=1e-6)
    assert dt["summary"].attrs["ratio"] == "time_ratio"


def test_chains_agree_with_quadrature_over_hazards(tmp_path):
    """Given weights, the hazards are independent, so that each has an integral of its own."""
    rng, unit = np.random.default_rng(7), 24.0
    X = rng.normal(size=(60, 2))
    X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
    offset = 0.3 * rng.normal(size=60)
    time = rng.exponential(size=60) ** 0.6 * np.exp(-0.3 * X[:, 0] - offset)
    limit = rng.exponential(2.0, size=60)
    y, event = np.minimum(time, limit), time <= limit
    dt = nss.sparse_regression(
        KEY,
        pd.DataFrame(X * [10.0, 0.1] + [5.0, -3.0], columns=["a", "b"]),
        unit * y,
        event=event,
        likelihood="cox",
        inclusion=INCLUSION,
        offset=offset,
        num_samples=6000,
        progress_bar=False,
    )
    draws, breaks = posterior(dt), dt["posterior"]["piece"].values[1:] / unit
    assert len(breaks) == event.sum() // 5 - 1
    assert np.isclose(breaks[:, None], y[event]).any(axis=1).all()
    # in standard units
    mean, sd = X.mean(axis=0) * [10.0, 0.1] + [5.0, -3.0], X.std(axis=0) * [10.0, 0.1]
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    w = draws["w"].values * sd
    centre = np.log((event.sum() + 0.5) / (y @ np.exp(offset)))
    shift = draws["w"].values @ mean
    hazards = draws["log_hazard"].values + shift[..., None] + np.log(unit) - centre
    starts, ends = np.append(0.0, breaks), np.append(breaks, np.inf)
    exposure = np.clip(y[:, None], starts, ends) - starts
    deaths = ((y[:, None] > starts) & (y[:, None] <= ends) & event[:, None]).sum(axis=0)
    at, logs, sums = np.linspace(-4.0, 3.0, 200), [], []
    for model in np.ndindex(2, 2):
        # the density of slabs is infinite at 0, which is no node
        axes = [np.linspace(-1.2, 1.2, 160) if is_in else np.zeros(1) for is_in in model]
        W = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
        f = offset + W @ X.T
        rate = np.exp(f + centre) @ exposure
        of_pieces = deaths * at[:, None, None] - np.exp(at)[:, None, None] * rate
        of_pieces += stats.norm.logpdf(at, 0.0, 10.0)[:, None, None]
        integrals = logsumexp(of_pieces, axis=0)
        means = np.einsum("agj,a->gj", np.exp(of_pieces - integrals), at)
        log = f[:, event].sum(-1) + integrals.sum(-1)
        included = [W[:, p] for p in range(2) if model[p]]
        log += log_slabs(*included) if included else 0.0
        log += np.log([x[1] - x[0] for x in axes if len(x) > 1]).sum()
        log += np.log(np.where(model, INCLUSION, 1 - INCLUSION)).sum()
        total = logsumexp(log)
        logs.append(total)
        sums.append([*model, *(np.exp(log - total) @ np.column_stack([W, means]))])
    truth = np.exp(logs - logsumexp(logs)) @ np.array(sums)
    values = [*np.moveaxis(w != 0, -1, 0), *np.moveaxis(w, -1, 0), *np.moveaxis(hazards, -1, 0)]
    errors = [float(arviz_stats.mcse(x.astype(float), method="mean")) for x in values]
    means = np.array([x.mean() for x in values])
    assert (abs(means - truth) < 5 * np.array(errors) + 2e-3 * (1 + abs(truth))).all()
    assert (abs(means - truth)[:2] < 0.02).all()
    # what is stored predicts the same
    f = offset + w @ X.T + shift[..., None]
    of_rows = Hazards(f, draws["log_hazard"].values[:, :, None], unit * breaks)
    np.testing.assert_allclose(
        dt["log_likelihood"]["y"],
        np.where(event, of_rows.logpdf(unit * y), of_rows.logsf(unit * y)),
        rtol=1e-6,
    )
    dt.to_netcdf(tmp_path / "result.nc")
    with xr.open_datatree(tmp_path / "result.nc") as stored:
        new = nss.predict(stored, times=[unit])
    np.testing.assert_allclose(new[..., 0], of_rows.sf(unit), rtol=1e-6)
    assert (
        dt["summary"].attrs["ratio"] == "hazard_ratio" and dt["observed_data"]["y"].dtype == float
    )
    model, samples, data, constant = standard_problem(dt)
    with double_precision():
        logs = np.asarray(log_likelihood(model, samples, **data, batch_ndims=2)["y"])
    np.testing.assert_allclose(logs.sum(-1) + constant, dt["log_likelihood"]["y"].sum("row"))


def test_rows_that_do_not_count_make_no_pieces():
    """Pieces that are named are those of the model."""
    time = np.arange(1.0, 25.0)
    options = {"likelihood": "cox", "num_warmup": 20, "num_samples": 20, "num_chains": 1}
    dt = nss.sparse_regression(KEY, X, time, weights=time > 12, progress_bar=False, **options)
    assert dt["posterior"]["piece"].values.tolist() == [0.0, 18.0]


def test_draws_of_hazards_have_the_density_of_limits():
    """Times between limits are drawn with them."""
    low, high = np.array([[0.5, 0.5], [1.5, 1.5], [0.0, 1.2], [0.4, 3.0], [2.0, np.inf]]).T
    f, count, breaks = 0.3 * np.arange(5.0), np.array([3.0, 2.0, 1.0, 1.0, 4.0]), np.array([1.0])
    # a narrow prior, so that it decides
    prior = dist.Normal(0.5, 0.7)

    def of(log_hazard):
        return PiecewiseTime(f, log_hazard, breaks, high)

    def step(x, key):
        x = of(x).draw_log_hazard(key, prior, jnp.asarray(low), count)
        return x, x

    draws = jax.lax.scan(step, jnp.zeros(2), random.split(KEY, 20_000))[1]
    grid = np.linspace(-6.0, 3.0, 120)
    nodes = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 1, 2)
    log = (count * of(nodes).log_prob(low)).sum(-1) + prior.log_prob(nodes).sum((1, 2))
    truth = np.exp(log) @ nodes[:, 0] / np.exp(log).sum()
    errors = np.array([arviz_stats.mcse(np.asarray(x)[None], method="mean") for x in draws.T])
    # five standard errors
    assert (abs(draws.mean(axis=0) - truth) < 5 * errors + 1e-3).all()


def test_hazard_ratios_are_near_those_of_the_partial_likelihood():
    rng = np.random.default_rng(3)
    X = pd.DataFrame(rng.normal(size=(300, 3)), columns=["a", "b", "noise"])
    time = (rng.exponential(size=300) * np.exp(-X["a"] + 0.5 * X["b"])) ** 0.5
    limit = rng.exponential(2.0, size=300)
    y, event = np.minimum(time, limit), time <= limit
    options = {"likelihood": "cox", "always": ["a", "b"], "inclusion": 1e-6}
    dt = nss.sparse_regression(KEY, X, y, event=event, **options)
    at_risk = y.to_numpy() >= y.to_numpy()[:, None]

    def loss(w):
        f = X[["a", "b"]].to_numpy() @ w
        return -(f - np.log(at_risk @ np.exp(f)))[event].sum()

    best = optimize.minimize(loss, [0.0, 0.0])
    errors = np.sqrt(np.diag(best.hess_inv))
    w = mean(dt["posterior"]["w"]).sel(feature=["a", "b"])
    assert (abs(w.values - best.x) < errors / 3).all()
    assert dt["summary"].attrs["concordance"] > 0.7


def test_weights_that_are_always_in_are_near_the_maximum_of_the_likelihood():
    rng = np.random.default_rng(3)
    X = pd.DataFrame(rng.normal(size=(200, 3)), columns=["a", "b", "noise"])
    time = np.exp(1 + X["a"] - 0.5 * X["b"] + 0.6 * np.log(rng.exponential(size=200)))
    limit = rng.exponential(8.0, size=200)
    y, event = np.minimum(time, limit), time <= limit
    # labels, not places
    shuffled = pd.Series(event, X.index).iloc[::-1]
    options = {"likelihood": "weibull", "always": ["a", "b"], "inclusion": 1e-6}
    dt = nss.sparse_regression(KEY, X, y, event=shuffled, **options)

    def loss(at):
        of = TIMES["weibull"](at[0] + X.to_numpy() @ [*at[1:3], 0.0], np.exp(at[3]))
        return -np.where(event, of.logpdf(y), of.logsf(y)).sum()

    best = optimize.minimize(loss, [1.0, 0.0, 0.0, 0.0])
    draws = posterior(dt)
    sites = draws["intercept"], *(draws["w"].sel(feature=k) for k in "ab"), np.log(draws["sigma"])
    # the prior and the skewness move it by 0.3 standard errors, and draws of sigma by 0.05
    errors = np.sqrt(np.diag(best.hess_inv))
    assert (abs(np.array([float(x.mean()) for x in sites]) - best.x) < 0.45 * errors).all()
    assert dt["summary"].attrs["concordance"] > 0.75


def test_concordance_counts_pairs_whose_order_is_known():
    low, high = np.array([[1, 1], [2, np.inf], [2, 2], [0, 3], [4, 5]]).T
    f = np.array([0.0, 1.0, 1.0, 5.0, -1.0])
    # 0 < 1, 0 < 2, 0 < 4, 2 < 1 (a tie), 2 < 4 and 3 < 4 are known
    assert concordance(f, low, high, np.ones(5)) == (2 + 0.5) / 6
    weights = np.array([2.0, 1.0, 1.0, 1.0, 0.0])
    assert concordance(f, low, high, weights) == (4 + 0.5) / 5


X, _, ENDS = data_of("weibull")


def analyse(changes):
    nss.sparse_regression(KEY, X, **{"likelihood": "weibull", "y": ENDS.T} | changes)


def with_row(values, of=ENDS.T):
    return np.where(np.arange(NUM_ROWS)[:, None] == 2, values, of)


def test_limits_are_two_responses_of_a_formula():
    pytest.importorskip("formulaic")
    few = {"likelihood": "weibull", "num_warmup": 20, "num_samples": 20, "num_chains": 2}
    frame = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "low": ENDS[0], "high": ENDS[1]})
    of_names = nss.sparse_regression(KEY, "low + high ~ a + b", data=frame, **few)
    alone = nss.sparse_regression(KEY, frame[["a", "b"]], frame[["low", "high"]], **few)
    xr.testing.assert_equal(of_names["posterior"].to_dataset(), alone["posterior"].to_dataset())


FIELDS = np.array([*zip(SEEN, ENDS[0], strict=True)], dtype=[("event", bool), ("time", float)])

test_refusals = refusals(
    {
        "fields": ({"y": FIELDS}, r"y: got the void .* `y\['name'\]` takes one field"),
        "a name": (
            {"y": np.arange(1.0, 25.0), "event": "died"},
            r"event: got the str_ 'died', .* A column is `event=data\['died'\]`",
        ),
        "zero": ({"y": np.zeros(NUM_ROWS)}, "y: got 0 in row 0, expected positive times"),
        "below zero": ({"y": with_row([-1.0, 2.0])}, "y: got -1 and 2 in row 2, expected positive"),
        "nothing known": ({"y": with_row([0.0, np.inf])}, "y: got 0 and inf in row 2, .* finite"),
        "in disorder": ({"y": with_row([3.0, 2.0])}, "y: got 3 and 2 in row 2, .* not above"),
        "no time": ({"y": with_row([np.nan, np.nan])}, "y: got nan in row 2"),
        "events of limits": ({"event": SEEN}, "event: got numbers beside limits"),
        "an event without a time": ({"y": None, "event": SEEN}, "y: got None"),
        "codes": (
            {"y": np.arange(1.0, 25.0), "event": 2},
            "event: got 2 in row 0, expected 1 where",
        ),
        "none": ({"y": np.arange(1.0, 25.0), "event": 0}, "y, event: got censored times in every"),
        "no variation": ({"y": np.ones(24)}, "y: got 0.* in every row"),
        "fractions": (
            {"likelihood": "cox", "weights": np.full(NUM_ROWS, 0.5)},
            "weights: got 0.5, .* Fractions need .* 'weibull'",
        ),
        "no times": (
            {"likelihood": "logit", "y": SEEN, "event": SEEN},
            "event: got numbers, expected None for likelihood='logit'. 'weibull', .* have times",
        ),
    },
    analyse,
)
test_predictions_are_refused = refusals(
    {
        "negative": ([1.0, -1.0], "weibull", "times: got -1, expected times, 0 or more"),
        "a table": ([[1.0]], "weibull", "times: got 1, expected times"),
    },
    lambda times, likelihood: nss.predict(result(likelihood)[0], times=times),
)
