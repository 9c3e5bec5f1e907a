# SPDX-License-Identifier: Apache-2.0
"""Completions of a table with gaps, whose chains are one posterior."""

import arviz_stats
import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from truth.small_table import table
import xarray as xr

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.tables import chains as table_chains

SHORT = "ignore:sparse_regression. the Monte Carlo", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *SHORT)

KEY = random.key(0)
FEW = dict(num_warmup=20, num_samples=50, num_chains=2, progress_bar=False)
X, Y = table()
FREE = ["age", "dose", "weight", "lot"]


def completed(seed):
    """The table, another tenth of whose entries is drawn anew, and no row's label."""
    rng = np.random.default_rng(seed)
    anew = X.iloc[rng.permutation(len(X))].to_numpy()
    return X.mask(rng.random(X.shape) < 0.2, anew).set_axis(np.arange(30) + 7)


TABLES = [completed(seed) for seed in range(3)]
KEYS = random.split(KEY, 3)


@pytest.fixture(scope="module")
def alone():
    return [
        nss.sparse_regression(key, table, Y, **FEW) for key, table in zip(KEYS, TABLES, strict=True)
    ]


@pytest.fixture(scope="module")
def pooled(alone):
    programs = table_chains._begin, table_chains._advance_short
    before = [program._cache_size() for program in programs]
    dt = nss.sparse_regression(KEY, (table for table in TABLES), Y, **FEW)
    # nothing compiles from table to table
    assert [program._cache_size() for program in programs] == before
    return dt


@pytest.mark.parametrize("group", ["posterior", "sample_stats", "log_likelihood"])
def test_chains_are_those_of_calls_for_each_table(alone, pooled, group):
    joined = pooled[group].to_dataset()
    assert joined.sizes["chain"] == 6 and joined.indexes["chain"].is_unique
    for k, tree in enumerate(alone):
        mine = joined.isel(chain=np.flatnonzero(joined["table"] == k)).drop_vars("table")
        xr.testing.assert_equal(mine.assign_coords(chain=range(2)), tree[group].to_dataset())


def test_what_is_not_of_chains_is_that_of_all_tables(alone, pooled):
    summary = pooled["summary"].to_dataset()
    fits = [tree["summary"]["cavi"].values for tree in alone]
    np.testing.assert_allclose(summary["cavi"], np.mean(fits, axis=0))
    assert "cavi" not in pooled.children and "k_hat" not in summary.attrs
    for k, x in enumerate(TABLES):
        np.testing.assert_array_equal(pooled["constant_data"]["X"].isel(table=k), x)


def test_credible_sets_have_the_correlations_of_all_tables():
    """A copy of a column in the first table is none in the others."""
    others = [
        X.assign(dose=rng.permutation(X["dose"])) for rng in map(np.random.default_rng, range(2))
    ]
    tables = [X.assign(dose=1e3 * X["age"]), *others]
    dt = nss.sparse_regression(KEY, tables, 20 * X["age"] + 0.1 * Y, **FEW)
    sets = nss.credible_sets(dt, "w", tables[0])["members"]
    assert set(sets[0]) == {"age", "dose"}
    assert not len(nss.credible_sets(dt, "w", pd.concat(tables)))
    assert dt["summary"]["credible_set"].isnull().all()


def test_each_chain_predicts_rows_of_its_own_table(alone, pooled, tmp_path):
    pooled.to_netcdf(tmp_path / "result.nc")
    again = xr.open_datatree(tmp_path / "result.nc")
    f = nss.predict(pooled, kind="predictor")
    assert list(f["row"].values) == [*TABLES[0].index]
    for k, tree in enumerate(alone):
        mine = nss.predict(tree, kind="predictor").values
        np.testing.assert_allclose(f.isel(chain=f["table"] == k), mine, rtol=1e-12)
    np.testing.assert_allclose(nss.predict(again, kind="predictor"), f, rtol=1e-12)
    new = nss.predict(pooled, X[:3], kind="predictor")
    mine = [nss.predict(tree, X[:3], kind="predictor").values for tree in alone]
    np.testing.assert_allclose(new, np.concatenate(mine), rtol=1e-12)


@pytest.mark.parametrize(("likelihood", "dim"), [("ordered", "cutpoint"), ("cox", "piece")])
def test_levels_and_pieces_are_those_of_each_table(likelihood, dim):
    levels = pd.cut(Y, 3, labels=["low", "middle", "high"])
    y = {"ordered": levels, "cox": np.exp(Y / np.std(Y))}[likelihood]
    options = dict(FEW, likelihood=likelihood)
    dt = nss.sparse_regression(KEY, TABLES[:2], y, **options)
    one = nss.sparse_regression(random.split(KEY, 2)[1], TABLES[1], y, **options)
    site = {"cutpoint": "cutpoints", "piece": "log_hazard"}[dim]
    mine = dt["posterior"][site].isel(chain=slice(2, None))
    np.testing.assert_array_equal(mine, one["posterior"][site])
    assert mine[dim].equals(one["posterior"][dim])
    f, of_one = (nss.predict(x, X[:3], kind="mean") for x in (dt, one))
    np.testing.assert_allclose(f.isel(chain=slice(2, None)), of_one, rtol=1e-9)
    assert f.sizes == {**of_one.sizes, "chain": 4}


def test_diagnostics_are_within_tables_and_rubins_share_is_between(alone, pooled):
    summary, each = (
        nss.summary(pooled, round_to=None),
        [nss.summary(x, round_to=None) for x in alone],
    )
    names = [name for name in summary.index if name != "w[batch]"]
    rows = [x.loc[names] for x in each]
    got = summary.loc[names]
    joined = {column: pd.concat([x[column] for x in rows], axis=1) for column in rows[0]}
    np.testing.assert_allclose(got["r_hat"], joined["r_hat"].max(axis=1))
    for column in ("ess_bulk", "ess_tail"):
        np.testing.assert_allclose(got[column], joined[column].sum(axis=1))
    for column in ("mcse_mean", "mcse_inclusion"):
        errors = np.sqrt((joined[column] ** 2).sum(axis=1, skipna=False)) / 3
        np.testing.assert_allclose(got[column], errors)
    spread = np.sqrt((joined["between_chain_sd"] ** 2).mean(axis=1))
    np.testing.assert_allclose(got["between_chain_sd"], spread)
    for column in ("mean", "inclusion", "flips"):
        np.testing.assert_allclose(got[column], joined[column].mean(axis=1), atol=1e-12)
    between = joined["mean"].var(axis=1) * 4 / 3
    total = between + (joined["sd"] ** 2).mean(axis=1)
    # ArviZ divides squares by the number of draws in older releases, by one less in newer ones
    np.testing.assert_allclose(got["between_tables"], between / total, rtol=0.02)
    over_tables = arviz_stats.rhat(pooled["posterior"].to_dataset()["w"].sel(feature="age"))
    assert over_tables.item() > got["r_hat"]["w[age]"]
    assert np.isnan(summary.loc["w[batch]", ["r_hat", "between_tables"]].astype(float)).all()
    assert "between_tables" not in each[0]


def test_chains_of_all_tables_have_as_many_draws_as_one_of_them_needs():
    options, pair = FEW | {"num_samples": None}, [completed(3), TABLES[1]]
    alone = [
        nss.sparse_regression(key, table, Y, **options)
        for key, table in zip(random.split(KEY), pair, strict=True)
    ]
    sizes = [tree["posterior"].sizes["draw"] for tree in alone]
    draws = nss.sparse_regression(KEY, pair, Y, **options)["posterior"].to_dataset()
    assert draws.sizes["draw"] == max(sizes) and len(set(sizes)) == 2
    for k, tree in enumerate(alone):
        mine = draws["w"].isel(chain=draws["table"] == k, draw=slice(sizes[k]))
        np.testing.assert_array_equal(mine, tree["posterior"]["w"])


TABLE = TABLES[0]
REFUSED = {
    "one": ([TABLE], "X: got 1 completed tables, expected two or more"),
    "none": (iter([]), "X: got 0 completed tables"),
    "rows": (iter(X.to_numpy()), r"X\[0\]: got the shape \(5,\)"),
    "shape": (
        [TABLE, TABLE, TABLE[1:]],
        r"X\[2\]: got the shape \(29, 5\), expected those of X\[0\]",
    ),
    "columns": (
        [TABLE, TABLE[FREE + ["batch"]]],
        r"X\[1\]: got the columns \['age', 'dose', 'w.* of X",
    ),
    "labels": ([TABLE, TABLE.set_axis(TABLE.index + 1)], r"X\[1\]: got the labels of rows \[8, 9"),
    "constant": (
        [TABLE, TABLE.assign(lot=1.0)],
        r"X\[1\]: got the constant columns \[2, 4\], .*\[2\]",
    ),
    "gaps": ([TABLE, TABLE.mask(TABLE < 0)], r"X\[1\]: got nan in row 7, column"),
}
test_messages = refusals(REFUSED, lambda tables: nss.sparse_regression(KEY, tables, Y, **FEW))


def test_an_evidence_is_of_one_table(pooled):
    with pytest.raises(ValueError, match="several completed tables, expected one table"):
        nss.log_evidence(KEY, pooled)
