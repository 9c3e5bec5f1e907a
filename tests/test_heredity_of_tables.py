# SPDX-License-Identifier: Apache-2.0
"""Formulas whose interactions need their parents."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from scipy import stats
from truth.enumeration import regression, sum_over_scales
from truth.known_draws import columns_of

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.tables.columns import checked_columns
from numpyro_spikeslab.tables.formula import formula_table

pytestmark = pytest.mark.filterwarnings("error", "ignore:sparse_regression. the Monte Carlo")
pytest.importorskip("formulaic")

KEY = random.key(0)
PI = 0.3


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(6)
    data = pd.DataFrame(rng.normal(size=(24, 3)) + 1.0, columns=["age", "dose", "lot"])
    data["kind"] = list("abc") * 8
    y = 0.5 * data["age"] * data["dose"] + rng.normal(size=24)
    return data.assign(y=y, count=np.arange(24) % 5)


def heredity(frame, kind, always=()):
    made = formula_table("y ~ age * kind * dose + lot:age", None, frame, None, always)
    columns = checked_columns(made.X.columns, made.always, made.groups, None)
    return columns.heredity(kind, made.parents)


def test_parents_are_the_terms_without_one_factor(frame):
    """The terms are age, kind, dose, age:kind, age:dose, kind:dose, lot:age, age:kind:dose."""
    rule = heredity(frame, "strong")
    assert rule.parents == ((), (), (), (0, 1), (0, 2), (1, 2), (0,), (3, 4, 5))
    assert rule.least == (0, 0, 0, 2, 2, 2, 1, 3)
    weak = heredity(frame, "weak")
    assert weak.parents == rule.parents and weak.least == (0, 0, 0, 1, 1, 1, 1, 1)
    assert heredity(frame, None) is None


def test_terms_that_are_always_in_count_as_in(frame):
    # numbered without kind
    strong = heredity(frame, "strong", ["kind"])
    assert strong.parents == ((), (), (0,), (0, 1), (1,), (0,), (2, 3, 4))
    assert strong.least == (0, 0, 1, 2, 1, 1, 3)
    weak = heredity(frame, "weak", ["kind"])
    assert weak.parents == strong.parents and weak.least == (0, 0, 0, 1, 0, 1, 1)


REFUSED = {
    "kind": ({"heredity": "both"}, "heredity: got 'both', expected 'weak' or 'strong'"),
    "table": ({"X": np.eye(4), "y": np.arange(4), "data": None}, "beside a formula, or None"),
    "poisson": ({"X": "count ~ age * dose", "likelihood": "poisson"}, "heredity: got a likelihood"),
}


def analyse(more, frame):
    arguments = {"X": "y ~ age * dose", "data": frame, "heredity": "weak"} | more
    nss.sparse_regression(KEY, **arguments)


test_heredity_is_refused_with_a_remedy = refusals(REFUSED, analyse, "frame")


def exact(frame, kind):
    """Inclusion of age, dose and their product, by sums over models and scales."""
    Z = frame[["age", "dose"]].assign(both=frame["age"] * frame["dose"]).to_numpy()
    Z, t = ((x - x.mean(0)) / x.std(0) for x in (Z, frame["y"].to_numpy()))
    Z = np.column_stack([Z, np.ones(24)])

    def at(sigma, slab):
        return regression(Z, t, sigma, [0.5] * 3 + [1 - 1e-15], [slab] * 3 + [1e4])

    def log_prior(models, *scales):
        first, second, both, _ = models.T
        may = first + second >= {"weak": 1, "strong": 2}[kind]
        number, places = first + second + both, 2 + may
        log_spikes = number * np.log(PI) + (places - number) * np.log(1 - PI)
        return np.where(both <= may, log_spikes, -np.inf) + stats.halfnorm.logpdf(scales).sum()

    return sum_over_scales(at, product(np.arange(1, 50) / 16, repeat=2), log_prior)[:3]


@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_inclusion_is_that_of_sums_over_models(kind, frame):
    options = dict(inclusion=PI, heredity=kind, num_samples=4000)
    tree = nss.sparse_regression(KEY, "y ~ age * dose", data=frame, **options)
    assert "cavi" not in tree and nss.summary(tree)["bayes_factor"].isna().all()
    summary, truth = columns_of(tree), exact(frame, kind)
    assert truth.min() > 0.05 and np.sort(truth)[1] < 0.95
    # five standard errors: one seed in a hundred thousand would fail
    error = abs(summary["inclusion"].values - truth)
    assert np.all(error < 5 * summary["mcse_inclusion"].fillna(0.0).values + 3e-3)


def test_draws_of_groups_have_their_parents(frame):
    options = dict(heredity="strong", inclusion=0.6, num_warmup=50, num_samples=100, num_chains=2)
    tree = nss.sparse_regression(KEY, "y ~ age * kind + dose", data=frame, **options)
    # the columns are below their term
    rows = [f"w[{x}]" for x in ("age", "kind", "kind[T.b]", "kind[T.c]", "dose", "age:kind")]
    table = nss.summary(tree, "w", None)
    assert list(table.index[:6]) == rows
    assert table["inclusion"].notna().tolist() == [True, True, False, False, True, True] + 2 * [
        False
    ]
    spikes = posterior(tree)["w_spike"].transpose(..., "feature").values
    age, kind, _, _, both, same = np.moveaxis(spikes, -1, 0)
    assert np.all(both == same) and np.all(both <= age * kind) and both.any()
