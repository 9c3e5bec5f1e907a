# SPDX-License-Identifier: Apache-2.0
"""Validation of the table and the response of a regression."""

from numbers import Integral
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
import numpy as np
import pandas as pd
import xarray as xr

from numpyro.util import is_prng_key

from numpyro_spikeslab.models.responses import ROUNDING, response_kind
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers

PER_EXPECTED = 10
"""Columns, and rows, for each column that is expected to matter by default. Few rows tell of few
columns: where a tenth of many more columns than rows is expected, all of them together explain the
response as well as the few that matter."""


def checked_table(X: Any) -> xr.DataArray:
    """Return the columns as numbers, along ``row`` and ``feature``, with their names."""
    table = as_numbers("X", X)
    if table.ndim != 2 or len(table) < 3 or table.shape[1] < 1:
        expected = "(N, P), at least three rows and a column"
        raise bad("X", f"the shape {table.shape}", expected, "One column is X.reshape(-1, 1).")
    names = X.columns if isinstance(X, pd.DataFrame) else pd.RangeIndex(table.shape[1])
    # booleans would be masks
    if not names.is_unique or names.inferred_type not in ("string", "integer", "floating"):
        expected = "names that differ, all strings or all numbers"
        got = f"the columns {names.tolist()!s:.200}"
        raise bad("X", got, expected, "X.columns.map(str) makes strings.")
    return xr.DataArray(table, {"feature": names.tolist()}, ["row", "feature"])


def checked_response(y: Any, X: Any) -> np.ndarray:
    """Return the response as numbers, one for each row of the table."""
    if y is None:
        raise bad("y", "None", "the response, unless X is a formula")
    response = as_numbers("y", y)
    if response.shape != (len(X),):
        expected, remedy = f"({len(X)},), one for each row of X", "Regress several one by one."
        if response.shape == (len(X), 1):
            remedy = "Use y[:, 0], or y.iloc[:, 0] of a DataFrame."
        raise bad("y", f"the shape {response.shape}", expected, remedy)
    check_index(y, X)
    return response


class Rows(NamedTuple):
    """The response of each row, with its weight, offset and number of trials, which is infinite
    where there are no trials."""

    y: Float[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]
    offset: Float[np.ndarray, " N"]
    totals: Float[np.ndarray, " N"]

    @property
    def seen(self) -> Bool[np.ndarray, " N"]:
        """Return which rows tell something: they count, and have trials."""
        return (self.weights > 0) & (self.totals > 0)


def checked_rows(X: Any, y: Any, weights: Any, offset: Any, totals: Any, likelihood: str) -> Rows:
    """Return the rows of a regression."""
    kind = response_kind(likelihood)
    if (totals is None) == (likelihood == "binomial"):
        got = "None" if totals is None else "numbers"
        raise bad("totals", got, "numbers of trials for likelihood='binomial', else None")
    rows = Rows(
        checked_response(y, X),
        of_rows("weights", weights, X, 1.0),
        of_rows("offset", offset, X, 0.0),
        of_rows("totals", totals, X, np.inf),
    )
    kind.check(rows.y, rows.totals)
    wrong = rows.weights < 0 if kind.has_intercept else rows.weights <= 0
    wrong |= kind.has_intercept & (rows.weights != np.round(rows.weights))
    if wrong.any():
        expected = "positive numbers if likelihood='normal', else how many times a row was seen"
        raise bad("weights", f"{rows.weights[wrong][0]:g}", expected)
    if not rows.seen.any():
        raise bad("weights, totals", "zeros", "rows that were seen, with trials")
    y, offset, trials = (x[rows.seen] for x in (rows.y, rows.offset, rows.totals))
    y = np.where(np.isfinite(trials), y / trials, y)
    for response in y - offset, *([y] if y[0] in kind.ends else []):
        if np.std(response) <= ROUNDING * np.max(np.abs(response)):
            raise bad("y", f"{response[0]} in every row", "numbers that differ")
    return rows


def of_rows(argument: str, values: Any, X: Any, default: float) -> Float[np.ndarray, " N"]:
    """Return a number for each row: a number for all, or an array."""
    numbers = default if values is None else as_numbers(argument, values)
    if np.shape(numbers) not in ((), (len(X),)):
        expected = f"a number or the shape ({len(X)},), one for each row of X"
        raise bad(argument, f"the shape {np.shape(numbers)}", expected)
    check_index(values, X, argument)
    return np.broadcast_to(numbers, len(X))


def check_index(y: Any, X: Any, argument: str = "y") -> None:
    """Raise if the rows of two pandas objects have different labels, or another order."""
    have_index = isinstance(X, pd.DataFrame) and isinstance(y, pd.Series | pd.DataFrame)
    if have_index and not y.index.equals(X.index):
        remedy = f"Use {argument}.loc[X.index], or {argument}.to_numpy() if only the labels differ."
        raise bad(argument, "another index than that of X", "the same rows in order", remedy)


def checked_new(X_new: Any, X: Any, table: xr.DataArray) -> xr.DataArray:
    """Return the rows to predict as numbers, along ``new_row`` and ``feature``."""
    new = as_numbers("X_new", X_new)
    if new.ndim != 2 or new.shape[1] != table.shape[1]:
        raise bad("X_new", f"the shape {new.shape}", f"(S, {table.shape[1]}), the columns of X")
    have_names = isinstance(X, pd.DataFrame) and isinstance(X_new, pd.DataFrame)
    if have_names and list(X_new.columns) != list(X.columns):
        got, expected = f"the columns {list(X_new.columns)!s:.200}", f"{list(X.columns)!s:.200}"
        raise bad("X_new", got, expected, "Use X_new[X.columns].")
    return xr.DataArray(new, {"feature": table["feature"].values}, ["new_row", "feature"])


def check_key(key: Any) -> None:
    """Refuse a key that is no random key of JAX."""
    if not is_prng_key(key):
        raise bad("key", repr(key), "a random key", "jax.random.key(0) makes one.")


def checked_count(argument: str, number: Any, least: int) -> int:
    """Return a whole number that is at least ``least``."""
    if not isinstance(number, Integral) or number < least:
        raise bad(argument, repr(number), f"a whole number, at least {least}")
    return int(number)


def checked_size(expected_size: float | None, num_columns: int, num_rows: int) -> float:
    """Return how many columns are expected to matter, by default as :data:`PER_EXPECTED` says."""
    if expected_size is None:
        return min(num_columns, num_rows) / PER_EXPECTED
    if not 0 < expected_size < num_columns:
        expected = f"a number between 0 and {num_columns}, the columns that vary"
        raise bad("expected_size", repr(expected_size), expected)
    return float(expected_size)
