# SPDX-License-Identifier: Apache-2.0
"""Tables and responses of people who have no model, checked."""

from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from numpyro_spikeslab.latent import are_dates

LARGEST = 1e100
"""Of values, so that sums of their squares are numbers."""

ROUNDING = 1e-12
"""Of the largest value: a column or a response that varies less is constant."""


def checked_table(X: Any) -> tuple[np.ndarray, list]:
    """The columns as numbers, and their names."""
    table = as_numbers("X", X)
    if table.ndim != 2 or len(table) < 3 or table.shape[1] < 1:
        raise ValueError(
            f"X: got the shape {table.shape}, expected (N, P), at least three rows and a column; "
            "a single column is X.reshape(-1, 1)."
        )
    names = list(X.columns) if isinstance(X, pd.DataFrame) else list(range(table.shape[1]))
    if not (all(isinstance(name, str) for name in names) or all(map(is_number, names))):
        raise ValueError(
            f"X: got the columns {names!s:.200}, expected names that are all strings or all "
            "numbers; X.columns = X.columns.map(str) makes them so."
        )
    if len(set(names)) < len(names):
        raise ValueError(
            f"X: got the columns {names!s:.200}, expected names that differ; rename some of them."
        )
    return table, names


def checked_response(y: Any, X: Any) -> np.ndarray:
    """The response as numbers."""
    response = as_numbers("y", y)
    if response.shape != (len(X),):
        raise ValueError(
            f"y: got the shape {response.shape}, expected ({len(X)},), a number for each row of X; "
            "for several responses call once for each."
        )
    check_index(y, X)
    if np.std(response) <= ROUNDING * np.max(np.abs(response)):
        raise ValueError(
            f"y: got {response[0]} in every row, but for rounding, expected numbers that differ; "
            "there is nothing to explain."
        )
    return response


def check_index(y: Any, X: Any) -> None:
    """Raise where the labels of the rows contradict their order."""
    both = isinstance(X, pd.DataFrame) and isinstance(y, pd.Series | pd.DataFrame)
    if both and not y.index.equals(X.index):
        raise ValueError(
            "y: got another index than that of X, expected the same rows in the same order; "
            "choose them with y.loc[X.index], or pass y.to_numpy() if only the labels differ."
        )


def checked_new(X_new: Any, X: Any, names: list) -> np.ndarray:
    """The rows to predict as numbers."""
    table = as_numbers("X_new", X_new)
    if table.ndim != 2 or table.shape[1] != len(names):
        raise ValueError(
            f"X_new: got the shape {table.shape}, expected (S, {len(names)}), the columns of X; "
            "give rows that were prepared as those of X were."
        )
    both = isinstance(X, pd.DataFrame) and isinstance(X_new, pd.DataFrame)
    if both and list(X_new.columns) != names:
        raise ValueError(
            f"X_new: got the columns {list(X_new.columns)!s:.200}, expected {names!s:.200}, those "
            "of X in their order; choose them with X_new[X.columns]."
        )
    return table


def checked_count(argument: str, number: Any, least: int) -> int:
    """A number of steps, draws or chains."""
    if not isinstance(number, Integral) or number < least:
        raise ValueError(
            f"{argument}: got {number!r}, expected a whole number, at least {least}; leave "
            "it out for the default."
        )
    return int(number)


def is_number(name: Any) -> bool:
    # a selection takes booleans for a mask
    return isinstance(name, int | float | np.number) and not isinstance(name, bool)


def has_labels(values: Any, raw: np.ndarray) -> bool:
    """Whether there are strings, or categories of pandas."""
    kinds = values.dtypes if isinstance(values, pd.DataFrame) else [getattr(values, "dtype", None)]
    if any(isinstance(kind, pd.CategoricalDtype) for kind in kinds):
        return True
    return raw.dtype.kind in "USOT" and any(isinstance(x, str | bytes) for x in raw.flat)


def count_masked(values: Any) -> int:
    """Number of masked values, in rows of a list, too."""
    rows = values if isinstance(values, list | tuple) else [values]
    return sum(int(np.ma.count_masked(x)) for x in rows if np.ma.is_masked(x))


def as_numbers(argument: str, values: Any) -> np.ndarray:
    """An array of finite real numbers."""
    if hasattr(values, "toarray"):
        raise ValueError(f"{argument}: got a sparse matrix, expected an array; use .toarray().")
    if hasattr(values, "columns") and not isinstance(values, pd.DataFrame):
        # the names of its columns would be lost, and with them their order
        raise ValueError(
            f"{argument}: got a {type(values).__module__.split('.')[0]} DataFrame, expected one of "
            "pandas or an array; use .to_pandas()."
        )
    if np.iscomplexobj(values):
        raise ValueError(
            f"{argument}: Complex data not supported; give real and imaginary parts as columns."
        )
    if masked := count_masked(values):
        raise ValueError(
            f"{argument}: got {masked} masked values, expected none; leave out these rows, or fill "
            "the gaps."
        )
    raw = np.asarray(values)
    if raw.dtype.kind == "O":
        # no number is made of pandas' own NA
        raw = np.where(pd.isna(raw), np.nan, raw)
    if are_dates(raw):
        raise ValueError(
            f"{argument}: got dates, expected numbers; say in which unit, with "
            "(dates - dates.min()) / pandas.Timedelta(days=1) for example."
        )
    try:
        # labels that read like numbers are no quantities
        if has_labels(values, raw):
            raise TypeError("categories or strings")
        array = np.array(raw, dtype=float)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{argument}: got values that are not numbers ({error}), expected numbers alone; make "
            "indicators of categories, with pandas.get_dummies for example."
        ) from error
    if bad := int(np.sum(~np.isfinite(array))):
        raise ValueError(
            f"{argument}: got {bad} values that are NaN or infinity, expected finite numbers; "
            "leave out these rows, or fill the gaps."
        )
    size = np.max(np.abs(array), axis=0, initial=0) if array.ndim else array
    if np.any((size > LARGEST) | ((size > 0) & (size < 1 / LARGEST))):
        raise ValueError(
            f"{argument}: got values beyond {LARGEST:g}, or a column with none above "
            f"{1 / LARGEST:g}, whose squares are no numbers; give them in another unit."
        )
    return array
