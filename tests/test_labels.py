# SPDX-License-Identifier: Apache-2.0
"""What speaks of rows or columns is aligned by its labels, whatever library it comes from."""

from typing import NamedTuple

import arviz_base
import numpy as np
import pandas as pd
import polars as pl
import pytest
from refusals import refusals
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import response_kind
from numpyro_spikeslab.support.tabular import in_pandas
from numpyro_spikeslab.tables import statistics
from numpyro_spikeslab.tables.checks import Rows, checked_rows, checked_table
from numpyro_spikeslab.tables.columns import checked_columns
from numpyro_spikeslab.tables.formula import formula_table

NAMES = ["age", "low", "middle", "dose"]
ROWS = [f"row {k}" for k in range(12)]
ORDER, COLUMNS = np.random.default_rng(1).permutation(12), [2, 0, 3, 1]
X = pd.DataFrame(np.random.default_rng(0).normal(size=(12, 4)), ROWS, NAMES)
NUMBERS = pd.Series(np.arange(12.0), ROWS)
OF_ROWS = {"y": NUMBERS % 4, "weights": NUMBERS % 3, "offset": NUMBERS, "totals": NUMBERS % 5 + 4}
NO_TRIALS = {"weights": None, "offset": None, "totals": 2}
LABELS = pd.Series(["a", "b", "b", "c"], NAMES)
PRIOR = pd.Series([0.5, 0.3, 0.3, 0.6], NAMES)
DAYS = pd.date_range("2020-01-01", periods=3)
R = np.corrcoef(X.T)
Z = pd.Series([0.2, -1.0, 0.5, 3.0], NAMES)


class Inputs(NamedTuple):
    """A table and its rows."""

    table: xr.DataArray
    rows: Rows


def inputs(table=X, data=None, **of_rows):
    given = formula_table(table, of_rows.pop("y"), data, None, ())
    made = checked_table(in_pandas("X", given.X), given.labels)
    return Inputs(
        made, checked_rows(given, made.values, response_kind("binomial"), of_rows | {"event": None})
    )


def same(one, two):
    """Whether two tuples of arrays and tables are the same to the last bit, labels included."""
    for a, b in zip(one, two, strict=True):
        if isinstance(a, tuple):
            same(a, b)
        elif hasattr(a, "identical"):
            assert a.identical(b)
        else:
            np.testing.assert_array_equal(a, b)


def in_other_order(values):
    return values.iloc[ORDER if len(values) == 12 else COLUMNS]


@pytest.mark.parametrize("form", [in_other_order, dict, lambda x: dict(in_other_order(x))])
@pytest.mark.parametrize("argument", OF_ROWS)
def test_what_belongs_to_rows_is_aligned(argument, form):
    same(inputs(**OF_ROWS), inputs(**OF_ROWS | {argument: form(OF_ROWS[argument])}))


@pytest.mark.parametrize("form", [in_other_order, dict, lambda x: dict(in_other_order(x))])
def test_what_belongs_to_columns_is_aligned(form):
    columns = pd.Index(NAMES)
    plain = checked_columns(columns, "age", LABELS.to_numpy(), PRIOR.to_numpy())
    same(plain, checked_columns(columns, "age", form(LABELS), PRIOR))
    same(plain, checked_columns(columns, "age", LABELS, form(PRIOR)))
    assert plain.numbers.tolist() == [0, 0, 1]
    statistic = statistics.of_z_scores(Z, pd.DataFrame(R, NAMES, NAMES), 12)
    same(statistic, statistics.of_z_scores(form(Z), pd.DataFrame(R, NAMES, NAMES), 12))
    matrix = pd.DataFrame(12 * R, NAMES, NAMES)
    statistic = statistics.of_products(matrix, Z, 99.0, 12)
    same(statistic, statistics.of_products(matrix, form(Z), 99.0, 12))
    # without names places decide
    np.testing.assert_array_equal(statistic.r, statistics.of_products(12 * R, Z, 99.0, 12).r)


def test_rows_of_a_matrix_are_aligned_with_its_columns():
    square = pd.DataFrame(R, NAMES, NAMES)
    for change in "XtX", "R":
        matrix, columns = statistics.checked_matrix(change, square.iloc[COLUMNS])
        np.testing.assert_array_equal(matrix, R)
        assert columns.labels.tolist() == NAMES


@pytest.mark.parametrize(
    ("of_table", "of_response", "is_aligned"),
    [
        ([3, 1, 2], [1, 2, 3], True),
        ([2, 0, 1], None, True),
        (None, [2, 0, 1], True),
        ([5, 7, 9], [5, 7, 9], False),
        ([5, 5, 7], [5, 5, 7], False),
        (["c", "a", "b"], None, False),
        (DAYS[::-1], DAYS, True),
        (None, ["c", "a", "b"], False),
        ([("a", 2), ("b", 1), ("a", 1)], [("a", 1), ("a", 2), ("b", 1)], True),
    ],
)
def test_a_default_index_is_no_label_but_of_numbered_rows(of_table, of_response, is_aligned):
    index = [pd.RangeIndex(3) if x is None else pd.Index(x) for x in (of_table, of_response)]
    table, y = pd.DataFrame(np.eye(3), index[0]), pd.Series([0.0, 1.0, 2.0], index[1])
    rows = inputs(table, y=y, **NO_TRIALS).rows
    np.testing.assert_array_equal(rows.y, y.loc[table.index] if is_aligned else y)
    # neither arrays nor tables without labels of rows have them
    for unlabelled in table.to_numpy(), pl.DataFrame(table.to_numpy()):
        rows = inputs(unlabelled, y=y, **NO_TRIALS).rows
        np.testing.assert_array_equal(rows.y, y)
        # but keys are meant, and count them
        rows = inputs(unlabelled, y={2: 5.0, 0: 3.0, 1: 4.0}, **NO_TRIALS | {"totals": 9}).rows
        np.testing.assert_array_equal(rows.y, [3.0, 4.0, 5.0])


MISFITS = {
    "missing": (
        lambda: inputs(**OF_ROWS | {"y": OF_ROWS["y"].iloc[:-1]}),
        r"^y: got missing labels \['row 11'\], expected a label for each row of X\. Without",
    ),
    "unknown": (
        lambda: inputs(**OF_ROWS | {"offset": {**NUMBERS, "row x": 1.0}}),
        r"^offset: got unknown labels \['row x'\]",
    ),
    "repeated": (
        lambda: inputs(**OF_ROWS | {"weights": NUMBERS.iloc[[*range(12), 3]]}),
        r"^weights: got repeated labels \['row 3'\]",
    ),
    "numbers": (
        lambda: inputs(X.set_axis(range(12)), y=NUMBERS.set_axis(range(1, 13)), **NO_TRIALS),
        r"^y: got missing labels \[0\], unknown labels \[12\]",
    ),
    "a part of the rows": (
        lambda: inputs(X.set_axis(range(7, 19)), y=NUMBERS.reset_index(drop=True), **NO_TRIALS),
        r"^y: got missing labels \[12, 13, 14, 15, 16\], the first of 7, unknown labels",
    ),
    "names of another table": (
        lambda: checked_columns(pd.Index(NAMES), (), None, PRIOR.rename({"low": "high"})),
        r"^inclusion: got missing labels \['low'\], unknown labels \['high'\]",
    ),
    "labels of groups": (
        lambda: checked_columns(pd.Index(NAMES), (), dict(LABELS.iloc[1:]), None),
        r"^groups: got missing labels \['age'\]",
    ),
    "keys are no places": (
        lambda: checked_columns(pd.Index(NAMES), (), None, dict(enumerate(PRIOR))),
        r"^inclusion: got missing labels \['age', .* unknown labels \[0, 1, 2, 3\]",
    ),
    "names of numbered columns": (
        lambda: checked_columns(pd.RangeIndex(4), (), None, dict(PRIOR)),
        r"^inclusion: got missing labels \[0, 1, 2, 3\], unknown labels \['age'",
    ),
    "keys of an array's rows": (
        lambda: inputs(X.to_numpy(), **OF_ROWS | {"offset": dict(NUMBERS)}),
        r"^offset: got missing labels \[0, 1, 2, 3, 4\], the first of 12, unknown labels",
    ),
    "scores": (
        lambda: statistics.of_z_scores(Z.iloc[1:], pd.DataFrame(R, NAMES, NAMES), 12),
        r"^z: got missing labels \['age'\]",
    ),
    "rows of a matrix": (
        lambda: statistics.checked_matrix("R", pd.DataFrame(R, [*"abcd"], NAMES)),
        r"^R: got missing labels \['age'.*unknown labels \['a'",
    ),
}
test_labels_that_do_not_fit_are_named = refusals(MISFITS)


def test_tables_of_polars_are_those_of_pandas():
    table = X.reset_index(drop=True)
    kinds = pl.Enum(["low", "high", "none"])
    both = [table.assign(sex=table["age"] > 0), pl.DataFrame(dict(table))]
    both[1] = both[1].with_columns(sex=pl.col("age") > 0)
    of_rows = {name: pl.Series(x) for name, x in OF_ROWS.items()}
    tables = [inputs(x, **of_rows) for x in both]
    same(*[x._replace(table=x.table.drop_vars("row", errors="ignore")) for x in tables])
    assert "row" not in tables[1].table.coords
    labels = pl.Series(["high", "low", None] * 4, dtype=kinds)
    read = in_pandas("data", both[1].with_columns(labels.alias("kind")))
    pd.testing.assert_frame_equal(read.drop(columns="kind"), both[0])
    assert read["kind"].cat.categories.tolist() == ["low", "high", "none"]
    assert read["kind"].isna().sum() == 4


def test_credible_sets_name_columns_of_polars():
    table = X.assign(low=X["age"]).reset_index(drop=True)
    first = np.random.default_rng(0).integers(2, size=(1, 50))
    spikes = np.stack([first, 1 - first, 0 * first, 0 * first], axis=-1)
    data = arviz_base.from_dict({"posterior": {"w": 1.0 * spikes, "w_spike": spikes}})
    sets = [nss.credible_sets(data, "w", x) for x in (table, pl.DataFrame(dict(table)))]
    assert set(sets[1]["members"][0]) == {"age", "low"}
    pd.testing.assert_frame_equal(*sets)
