# SPDX-License-Identifier: Apache-2.0
"""The evidence of regressions of one table, against sums over models and a grid of scales."""

import arviz_stats
import numpy as np
import pytest
from refusals import refusals
from scipy import stats
from scipy.special import betaln, logsumexp
from truth.small_table import table
import xarray as xr

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import RESPONSES
from numpyro_spikeslab.tables import chains as table_chains
from numpyro_spikeslab.tables.chains import PROBABILITIES
from numpyro_spikeslab.tables.checks import Rows
from numpyro_spikeslab.tables.columns import checked_columns
from numpyro_spikeslab.tables.evidence import standard_problem
from numpyro_spikeslab.tables.units import convert_to_units, standardise

pytestmark = pytest.mark.filterwarnings("error", "ignore:Estimated shape parameter")

KEY = random.key(0)
X, Y = table()
WEIGHTS = np.random.default_rng(0).uniform(0.3, 3.0, len(Y))


def exact(weights, other):
    """The log evidence of the response in its own units, with the intercept's prior at 0.

    :param other: concentration of the prior Beta(1, other) of inclusion.
    """
    N, v = len(Y), weights / weights.mean()
    x, y = X.to_numpy()[:, X.std() > 0], np.asarray(Y)
    mean, centre = np.average(x, axis=0, weights=v), np.average(y, weights=v)
    x, y = x - mean, y - centre
    sd, unit = np.average(x**2, axis=0, weights=v) ** 0.5, np.average(y**2, weights=v) ** 0.5
    x, y = x / sd * np.sqrt(v)[:, None], y / unit * np.sqrt(v)
    scales = (np.arange(160) + 0.5) * 4 / 160
    half, count, logs = stats.halfnorm.logpdf(scales), x.shape[1], []
    for spikes in np.ndindex((2,) * count):
        values, vectors = np.linalg.eigh(x[:, np.array(spikes) > 0] @ x[:, np.array(spikes) > 0].T)
        variance = scales[:, None, None] ** 2 + scales[:, None] ** 2 * np.maximum(values, 0.0)
        density = -0.5 * (np.log(2 * np.pi * variance) + (vectors.T @ y) ** 2 / variance).sum(-1)
        # the intercept takes a direction, in which the data are 0
        density += 0.5 * np.log(2 * np.pi * scales**2)[:, None] + half[:, None] + half
        inclusion = betaln(1 + sum(spikes), other + count - sum(spikes))
        logs.append(logsumexp(density) + inclusion - betaln(1, other))
    intercept = 0.5 * np.log(v).sum() - 0.5 * np.log(N) - np.log(10 * np.sqrt(2 * np.pi))
    return logsumexp(logs) + 2 * np.log(4 / 160) - N * np.log(unit) + intercept


OPTIONS = {"plain": {}, "weighted": {"weights": WEIGHTS}, "two expected": {"expected_size": 2.0}}


@pytest.fixture(scope="module")
def results():
    """Results of one compiled program."""
    return {k: nss.sparse_regression(KEY, X, Y, **x) for k, x in OPTIONS.items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_evidence_is_that_of_the_response(results, name):
    evidence = nss.log_evidence(KEY, results[name])
    weights = WEIGHTS if name == "weighted" else np.ones(len(Y))
    truth = exact(weights, 1.0 if name == "two expected" else 9.0)
    assert abs(evidence.value - truth) < 4 * evidence.se
    assert evidence.se < 0.05


def test_the_table_of_models(results):
    models = nss.compare_models({name: results[name] for name in ("two expected", "plain")})
    seed = int(results["plain"]["constant_data"].attrs["seed"])
    one = nss.log_evidence(random.key(seed), results["plain"])
    columns = ["log_evidence", "se", "bayes_factor", "overlap", "elpd", "elpd_se"]
    assert list(models.columns) == columns
    assert models.loc["plain", "log_evidence"] == one.value
    assert models["log_evidence"].is_monotonic_decreasing
    factors = np.exp(models["log_evidence"].iloc[0] - models["log_evidence"])
    np.testing.assert_allclose(models["bayes_factor"], factors)
    loo = arviz_stats.loo(results["plain"])
    assert tuple(models.loc["plain", ["elpd", "elpd_se"]]) == (loo.elpd, loo.se)
    own = nss.compare_models({"own": one._replace(value=one.value - 1), "plain": one})
    np.testing.assert_allclose(own["bayes_factor"], [1.0, np.e])
    assert own.index[0] == "plain" and own["elpd"].isna().all()


@pytest.mark.parametrize("likelihood", ["normal", "student", "logit", "ordered", "poisson"])
def test_draws_in_standard_units_are_those_of_the_chains(likelihood):
    """Converted to the units of the table and back."""
    kind, rng, shape = RESPONSES[likelihood], np.random.default_rng(1), (2, 7)
    y = {"logit": Y > 100, "ordered": Y > 100, "poisson": np.round(Y)}.get(likelihood, Y) * 1.0
    none = np.zeros((len(X), 0))
    given = Rows(X.to_numpy(), np.asarray(y), WEIGHTS, 0.1 * WEIGHTS, 0 * WEIGHTS + 1, none)
    names = X.columns
    columns = checked_columns(names, ["age"], [["dose", "lot"]], [0.3, 0.4, 0.2, 0.2, 0.4])
    values = xr.DataArray(X.to_numpy(), {"feature": names}, ["row", "feature"])
    units, data = standardise(values, given, columns.always, kind)
    draws = {name: rng.random(shape) for name in ("slab_scale", *kind.own_sites)}
    if likelihood == "ordered":
        draws["cutpoints"] = rng.random((*shape, 1))
    draws |= {"w_spike": rng.binomial(1, 0.5, (*shape, 3)), "always": rng.normal(size=(*shape, 1))}
    draws["w"] = rng.normal(size=(*shape, 4)) * draws["w_spike"][..., list(columns.groups)]
    draws |= {"intercept": rng.normal(size=shape)} if kind.has_intercept else {}
    sizes = {"w": 4, "w_slab": 4, "w_spike": 3, PROBABILITIES: 4}
    given_draws = {k: x.copy() for k, x in draws.items()} | {PROBABILITIES: 0 * draws["w"]}
    given_draws["w_slab"] = draws["w"].copy()
    tree = table_chains._tree(given_draws, sizes, ["chain", "draw"])
    dt = convert_to_units(tree, units, columns, rng)
    inclusion = columns.prior(units.x["varies"].values, units.num_rows, None)[2]
    of_rows = {name: ("row", getattr(given, name)) for name in ("weights", "offset", "beside")}
    constants = {"X": values, "prior_inclusion.w": ("feature", inclusion), **of_rows}
    constants["group.w"] = "feature", columns.labels
    attrs = {"likelihood": likelihood}
    attrs["weights"] = "precisions" if kind.has_precisions else "counts"
    dt["constant_data"] = xr.Dataset(constants, attrs=attrs)
    dt["observed_data"] = xr.Dataset({"y": ("row", given.y)})
    _, samples, new_data, _ = standard_problem(dt)
    # the constant column has left, and groups are in the order of their labels
    others = [0, 2, 3]
    numbers = columns.numbers[others]
    labels = np.array(columns.labels)[[1, 3, 4]]
    order = [numbers[list(labels).index(label)] for label in sorted(set(labels))]
    expected = draws | {"w_slab": draws["w"][..., others]}
    expected["w_spike"] = draws["w_spike"][..., order]
    assert samples.keys() == expected.keys() - {"w"}
    for name, x in samples.items():
        np.testing.assert_allclose(x, expected[name], err_msg=name)
    np.testing.assert_allclose(new_data["X"], data["X"][:, others])


def rows(y=Y, weights=1.0, likelihood="normal", prior=0.3):
    """The rows of a result."""
    constants = {"X": (["row", "feature"], X.to_numpy()), "weights": ("row", weights + 0 * Y)}
    constants["prior_inclusion.w"] = "feature", np.full(5, prior)
    role = "precisions" if likelihood == "normal" else "counts"
    data = xr.Dataset(constants, attrs={"likelihood": likelihood, "weights": role, "seed": 0})
    groups = {"constant_data": data, "observed_data": xr.Dataset({"y": ("row", np.asarray(y))})}
    groups["posterior"] = xr.Dataset({"w": (["chain", "draw", "feature"], np.zeros((2, 9, 5)))})
    return xr.DataTree.from_dict(groups)


def compare(dt):
    nss.compare_models({"a": rows(), "b": dt})


REFUSED = {
    "one result": (lambda: nss.compare_models({"a": rows()}), "two or more names"),
    "no names": (lambda: nss.compare_models([rows(), rows()]), "got list, expected a mapping"),
    "another response": (lambda: compare(rows(Y + 1)), "'b'.: got another y, expected that of"),
    "classes": (
        lambda: compare(rows(likelihood="logit")),
        "got unit 'probabilities', expected that of the first result, 'densities'",
    ),
    "other weights": (lambda: compare(rows(weights=2.0)), "got another weights"),
    "counts": (
        lambda: nss.compare_models(
            {"a": rows(weights=2.0), "b": rows(weights=2.0, likelihood="student")}
        ),
        "got role of weights 'counts', expected that of the first result, 'precisions'",
    ),
    "arguments": (lambda: nss.log_evidence(KEY, rows(), {}), "the result alone"),
    "heredity": (lambda: nss.log_evidence(KEY, rows(prior=np.nan)), "got heredity"),
    "statistics": (lambda: nss.log_evidence(KEY, xr.DataTree()), "sparse_regression for a table"),
    "a number": (lambda: nss.log_evidence(0, rows()), "key: got 0, expected a random key"),
    "few": (lambda: nss.log_evidence(KEY, rows(), num_proposals=9), "num_proposals: got 9"),
}
test_refusals = refusals(REFUSED)
