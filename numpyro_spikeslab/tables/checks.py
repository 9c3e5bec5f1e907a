# SPDX-License-Identifier: Apache-2.0
"""Validation of the table and the response of a regression."""

from numbers import Integral
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
import numpy as np
import pandas as pd
import xarray as xr

from numpyro.util import is_prng_key

from numpyro_spikeslab.models.responses import ROUNDING, ResponseKind
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers
from numpyro_spikeslab.tables.formula import Given


class Axis(NamedTuple):
    """The rows or the columns of a table, and their labels, `None` if any will do."""

    name: str
    size: int
    labels: pd.Index | None

    @classmethod
    def of_rows(cls, X: Any) -> "Axis":
        """Return the rows of a table, labelled if it is a DataFrame."""
        return cls("row of X", len(X), X.index if isinstance(X, pd.DataFrame) else None)

    @property
    def names(self) -> pd.Index:
        """Return the labels, or numbers."""
        return pd.RangeIndex(self.size) if self.labels is None else self.labels

    def aligned(
        self, argument: str, values: Any, may_be_one: bool = True
    ) -> Float[np.ndarray, " N"]:
        """Return a number for each element, from an array or one number."""
        numbers = as_numbers(argument, values)
        if numbers.shape != (self.size,) and not (may_be_one and numbers.ndim == 0):
            expected = f"{'a number, or ' * may_be_one}({self.size},), one for each {self.name}"
            several = f"Use {argument}[:, 0], or {argument}.iloc[:, 0], and others one by one."
            remedy = several if numbers.ndim == 2 else ""
            raise bad(argument, f"the shape {numbers.shape}", expected, remedy)
        self.check_labels(argument, getattr(values, "index", None))
        return np.broadcast_to(numbers, self.size)

    def check_labels(self, argument: str, labels: Any) -> None:
        """Refuse other labels, or another order, if there are any."""
        if self.labels is None or not isinstance(labels, pd.Index) or labels.equals(self.labels):
            return
        got = f"the labels {labels.tolist()!s:.200}"
        expected = f"one for each {self.name} in order, {self.labels.tolist()!s:.200}"
        remedy = f"Use {argument}.loc[labels], or {argument}.to_numpy() if only the labels differ."
        raise bad(argument, got, expected, remedy)


class Rows(NamedTuple):
    """Rows of a table with the response, weight, offset and number of trials of each, which is
    infinite where there are no trials."""

    X: Float[np.ndarray, "N P"]
    y: Float[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]
    offset: Float[np.ndarray, " N"]
    totals: Float[np.ndarray, " N"]

    @property
    def seen(self) -> Bool[np.ndarray, " N"]:
        """Return which rows tell something: they count, and have trials."""
        return (self.weights > 0) & (self.totals > 0)


class Inputs(NamedTuple):
    """The table along ``row`` and ``feature``, with names, its rows as numbers, and the rows to
    predict, along ``new_row`` and ``feature``."""

    table: xr.DataArray
    rows: Rows
    new: xr.DataArray | None


def checked_inputs(given: Given, kind: ResponseKind, of_rows: dict[str, Any]) -> Inputs:
    """Check the data of a regression.

    :param of_rows: ``weights``, ``offset`` and ``totals``, `None` by default.
    """
    table = checked_table(given.X)
    new = None if given.X_new is None else checked_new(given.X_new, given.X, table)
    return Inputs(table, checked_rows(given, table.values, kind, of_rows), new)


def checked_table(X: Any) -> xr.DataArray:
    """Return the columns as numbers, with labels of rows and columns."""
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
    coords = {"feature": names.tolist()} | labels_of("row", X)
    return xr.DataArray(table, coords, ["row", "feature"])


def checked_new(X_new: Any, X: Any, table: xr.DataArray) -> xr.DataArray:
    """Return the rows to predict as numbers, with their labels."""
    new = as_numbers("X_new", X_new)
    if new.ndim != 2 or new.shape[1] != table.shape[1]:
        raise bad("X_new", f"the shape {new.shape}", f"(S, {table.shape[1]}), the columns of X")
    columns = Axis("column of X", new.shape[1], X.columns if isinstance(X, pd.DataFrame) else None)
    columns.check_labels("X_new", getattr(X_new, "columns", None))
    coords = {"feature": table["feature"].values} | labels_of("new_row", X_new)
    return xr.DataArray(new, coords, ["new_row", "feature"])


def labels_of(dim: str, X: Any) -> dict[str, pd.Index]:
    """Return the labels of the rows of a DataFrame as a coordinate."""
    # labels of several levels cannot be saved, and xarray takes an index name for a dimension
    is_flat = isinstance(X, pd.DataFrame) and X.index.nlevels == 1
    return {dim: X.index.rename(None)} if is_flat else {}


def checked_rows(
    given: Given, X: Float[np.ndarray, "N P"], kind: ResponseKind, of_rows: dict[str, Any]
) -> Rows:
    """Return the rows of a table with what belongs to each."""
    if (of_rows["totals"] is None) == kind.has_trials:
        got = "None" if of_rows["totals"] is None else "numbers"
        raise bad("totals", got, "numbers of trials for likelihood='binomial', else None")
    y, axis = given.y, Axis.of_rows(given.X)
    if y is None:
        raise bad("y", "None", "the response, unless X is a formula")
    count = np.ones(axis.size)
    numbers = {"weights": count, "offset": 0.0 * count, "totals": np.inf * count}
    numbers |= {k: axis.aligned(k, x) for k, x in of_rows.items() if x is not None}
    rows = Rows(X, axis.aligned("y", y, may_be_one=False), **numbers)
    kind.check(rows.y, rows.totals)
    wrong = rows.weights <= 0
    if not kind.has_precisions:
        wrong = rows.weights < 0
    if not kind.has_fractions:
        wrong |= rows.weights != np.round(rows.weights)
    if wrong.any():
        expected = "positive numbers if likelihood='normal', else how often a row counts"
        remedy = "" if kind.has_fractions else "Fractions need likelihood='logit'."
        raise bad("weights", f"{rows.weights[wrong][0]:g}", expected, remedy)
    if not rows.seen.any():
        raise bad("weights, totals", "zeros", "rows that were seen, with trials")
    y, offset, trials = (x[rows.seen] for x in (rows.y, rows.offset, rows.totals))
    y = np.where(np.isfinite(trials), y / trials, y)
    for response in y - offset, *([y] if y[0] in kind.ends else []):
        if np.std(response) <= ROUNDING * np.max(np.abs(response)):
            raise bad("y", f"{response[0]} in every row", "numbers that differ")
    return rows


def check_key(key: Any) -> None:
    """Refuse a key other than a random key of JAX."""
    if not is_prng_key(key):
        raise bad("key", repr(key), "a random key", "jax.random.key(0) makes one.")


def checked_count(argument: str, number: Any, least: int) -> int:
    """Return a whole number that is at least ``least``."""
    if not isinstance(number, Integral) or number < least:
        raise bad(argument, repr(number), f"a whole number, at least {least}")
    return int(number)
