# SPDX-License-Identifier: Apache-2.0
"""Errors name the argument, the row and the column of a wrong entry, and a remedy."""

from functools import partial

import numpy as np
import pandas as pd
import polars as pl
import pytest
from tinygp import kernels

from numpyro import handlers

from numpyro_spikeslab.models.factors import UNITS, factor_analysis, mtmkl
from numpyro_spikeslab.reading.model_run import abstract_trace, trace_model
from numpyro_spikeslab.reading.sites import find_pairs
from numpyro_spikeslab.support.tabular import as_numbers

ROWS = ["a", "b", "c", "d"]
X = pd.DataFrame({"age": [1.0, 2.0, 4.0, 3.0], "dose": [0, 5, 5, 1]}, index=ROWS)
HALVES = pd.array([1, None, 2, None], dtype="Int64")
HIGH = pd.Categorical(["high", "low"] * 2)
MONTHS = pd.period_range("2020-01", periods=4, freq="M")
DAYS = pd.date_range("2020-01-01", periods=4)
ENTRIES = {
    "NaN": (X.replace({"dose": {5: np.nan}}), r"got nan in row 'b', column 'dose', the first of 2"),
    "NaN of an array": (X.replace(5, np.nan).to_numpy(), r"got nan in row 1, column 1, the first"),
    "infinity": (X.replace({"age": {4.0: np.inf}}), r"got inf in row 'c', column 'age'"),
    "NaN of a series": (X["age"].replace(4.0, np.nan), r"got nan in row 'c', the first of 1"),
    "NA": (X.assign(dose=HALVES), r"got nan in row 'b', column 'dose'.* fill the gaps"),
    "None": ([[1.0, None], [2.0, 3.0]], r"got nan in row 0, column 1"),
    "strings": (
        X.assign(dose=["1", "2", "high", "4"]),
        r"got the str '1' in row 'a', column 'dose'",
    ),
    "a string": (
        X.assign(dose=[1, 2, "?", 4]),
        r"got the str '\?' in row 'c', .*to_numeric",
    ),
    "bytes": (np.array([b"x"]), r"got the bytes_ .*x.* in row 0"),
    "categories": (X.assign(dose=HIGH), r"got categories in \['dose'\], .*get_dummies"),
    "numbers as categories": (X.astype({"dose": "category"}), r"got categories in \['dose'\]"),
    "a category": (pd.Series(HIGH), r"got categories in \['all rows'\]"),
    "periods": (X.assign(month=MONTHS), r"got the Period '2020-01' in row 'a', .*to_timestamp"),
    "dates": (X.assign(day=DAYS), r"got the Timestamp '2020-01-01 00:00:00' in row 'a', .*years"),
    "times": (DAYS.to_numpy(), r"got the datetime64 '2020-01-01.*' in row 0"),
    "intervals": (
        X.assign(x=pd.interval_range(0, 4)),
        r"got the Interval .* in row 'a'",
    ),
    "complex": (np.ones((2, 2)) * 1j, r"got the complex128 '1j' in row 0, column 0"),
    "objects": ([[1.0, object()]], r"got the object .* in row 0, column 1"),
    "nulls of polars": (
        pl.DataFrame({"age": [1, 2], "dose": [None, 3]}),
        r"got nan in row 0, column 'dose', the first of 1",
    ),
    "text of polars": (
        pl.DataFrame({"age": [1, 2], "dose": ["1", None]}),
        r"got the str '1' in row 0, column 'dose'.*to_numeric",
    ),
    "dates of polars": (
        pl.DataFrame({"age": [1, 2, 3, 4], "day": DAYS}),
        r"got the Timestamp '2020-01-01 00:00:00' in row 0, column 'day'",
    ),
    "categories of polars": (
        pl.DataFrame({"dose": pl.Series(["1", "2"], dtype=pl.Categorical)}),
        r"got categories in \['dose'\]",
    ),
    "lists of polars": (
        pl.DataFrame({"age": [[1], [2]]}),
        r"got the .* in row 0, column 'age'",
    ),
    "structs of polars": (
        pl.Series("s", [{"a": 1}, {"a": 2}]),
        r"got the dict .* in row 0",
    ),
    "lazy": (pl.LazyFrame({"age": [1]}), r"got a LazyFrame, whose rows are not in memory"),
    "masked": (np.ma.masked_less([1.0, 2.0], 2.0), r"got 1 masked values"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_that_is_no_number_is_named(case):
    values, message = ENTRIES[case]
    with pytest.raises(ValueError, match=f"^data: {message}"):
        as_numbers("data", values)


@pytest.mark.parametrize(
    "values",
    [
        X,
        X.astype({"dose": "Int64"}),
        X.astype({"dose": bool}),
        X.astype(object),
        X.to_numpy(np.float32),
        [[1, 2.5], [True, 3]],
        np.zeros((3, 0)),
    ],
)
def test_numbers_of_all_types_are_numbers(values):
    array = as_numbers("data", values)
    assert array.dtype == float and array.shape == np.shape(values)
    np.testing.assert_array_equal(array, np.asarray(values, float))


def test_entries_may_be_missing():
    array = as_numbers("data", X.assign(dose=HALVES), may_miss=True)
    np.testing.assert_array_equal(array[:, 1], [1, np.nan, 2, np.nan])
    with pytest.raises(ValueError, match="got inf in row 'c', column 'age'"):
        as_numbers("data", X.replace(4.0, np.inf), may_miss=True)


FACTORS = factor_analysis(2)
SMOOTH = mtmkl([kernels.ExpSquared(1.0)])
TABLES = {
    "factors": (FACTORS, (X,), (X.to_numpy(float),)),
    "NA": (FACTORS, (X.assign(dose=HALVES),), (np.array([X["age"], [1, np.nan, 2, np.nan]]).T,)),
    "inputs": (SMOOTH, (X, X), (X.to_numpy(float), X.to_numpy(float))),
    "polars": (FACTORS, (pl.DataFrame(dict(X)),), (X.to_numpy(float),)),
    "series of polars": (
        SMOOTH,
        (pl.DataFrame(dict(X)), pl.Series(X["age"])),
        (X.to_numpy(float), X["age"].to_numpy(copy=True)),
    ),
    "series": (SMOOTH, (X["age"], X["age"]), tuple(X["age"].to_numpy(copy=True) for _ in "XY")),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_of_pandas_are_those_of_numpy(case):
    model, tables, arrays = TABLES[case]
    traced = [handlers.trace(handlers.seed(model, 0)).get_trace(*x) for x in (tables, arrays)]
    np.testing.assert_array_equal(*(trace["Y"]["value"] for trace in traced))
    np.testing.assert_array_equal(*(trace["phi"]["value"] for trace in traced))
    pairs_of = partial(find_pairs, user="test")
    programs = [trace_model(model, x, {}, "test", pairs_of).run for x in (tables, arrays)]
    assert programs[0] == programs[1]


def test_entries_of_tasks_are_named():
    with pytest.raises(ValueError, match=r"Y: got the str '\?' in row 'c', column 'dose'"):
        abstract_trace(FACTORS, (X.assign(dose=[1, 2, "?", 4]),), {})
    with pytest.raises(ValueError, match=r"inputs: got nan in row 'b', column 'dose'"):
        abstract_trace(SMOOTH, (X.assign(dose=HALVES), X), {})


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_columns_of_other_units_are_named(factor):
    spread = X["age"].std(ddof=0) / X["dose"].std(ddof=0)
    table = X.assign(dose=X["dose"] * spread * UNITS * factor)
    if factor < 1.0:
        abstract_trace(FACTORS, (table,), {})
        return
    with pytest.warns(UserWarning, match="column 'dose' of Y is 2e[+]03 times that of 'age'"):
        abstract_trace(FACTORS, (table,), {})
