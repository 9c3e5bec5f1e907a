# SPDX-License-Identifier: Apache-2.0
"""Validation of the table and the response of a regression."""

from numbers import Integral
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
import numpy as np
import pandas as pd
import xarray as xr

from numpyro.util import is_prng_key

from numpyro_spikeslab.models.responses import RESPONSES, ROUNDING, ResponseKind
from numpyro_spikeslab.support.files import plain_labels
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad, some
from numpyro_spikeslab.support.tabular import GAPS, as_numbers, in_pandas, row_labels
from numpyro_spikeslab.tables.formula import Given


class Rows(NamedTuple):
    """Rows of a table with the response, weight and offset of each.

    - **beside** - the number of trials, or the upper limit of a time; infinite where there is none.
    - **effects** - the columns of all random effects.
    """

    X: Float[np.ndarray, "N P"]
    y: Float[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]
    offset: Float[np.ndarray, " N"]
    beside: Float[np.ndarray, " N"]
    effects: Float[np.ndarray, "N C"]

    @classmethod
    def stored(cls, rows: xr.Dataset, y: Float[np.ndarray, " N"]) -> "Rows":
        """Return the rows of a result without random effects."""
        X, names = rows["X"].values, ("weights", "offset", "beside")
        return cls(X, y, **{name: rows[name].values for name in names}, effects=X[:, :0])

    @property
    def seen(self) -> Bool[np.ndarray, " N"]:
        """Return which rows tell something: they count, and have trials."""
        return (self.weights > 0) & (self.beside > 0)


def checked_table(X: Any, labels: pd.Index | None, argument: str = "X") -> xr.DataArray:
    """Return the columns as numbers, with labels of rows and columns."""
    table = as_numbers(argument, X)
    if table.ndim != 2 or len(table) < 3 or table.shape[1] < 1:
        expected = "(N, P), at least three rows and a column"
        remedy = f"One column is {argument}.reshape(-1, 1)."
        raise bad(argument, f"the shape {table.shape}", expected, remedy)
    names = Axis.of_columns(X, table.shape[1]).names
    # booleans would be masks
    if not names.is_unique or names.inferred_type not in ("string", "integer", "floating"):
        expected = "names that differ, all strings or all numbers"
        got = f"the columns {names.tolist()!s:.200}"
        raise bad(argument, got, expected, f"{argument}.columns.map(str) makes strings.")
    coords = {"feature": names.tolist()} | row_coord("row", labels)
    return xr.DataArray(table, coords, ["row", "feature"])


def row_coord(dim: str, labels: pd.Index | None) -> dict[str, np.ndarray]:
    """Return labels of rows as a coordinate."""
    return {} if labels is None else {dim: plain_labels(labels)}


def checked_rows(
    given: Given, X: Float[np.ndarray, "N P"], kind: ResponseKind, of_rows: dict[str, Any]
) -> Rows:
    """Return the rows of a table with what belongs to each.

    :param of_rows: ``weights``, ``offset``, ``totals`` and ``event``, `None` by default.
    """
    check_totals(kind, of_rows["totals"])
    check_event(kind, of_rows["event"])
    y, axis = given.y, Axis("row of X", len(X), given.labels)
    if y is None:
        raise bad("y", "None", "the response, unless X is a formula")
    one = np.ones(axis.size)
    numbers = {"weights": one, "offset": 0.0 * one, "totals": np.inf * one}
    numbers |= {k: axis.aligned(k, x) for k, x in of_rows.items() if x is not None}
    beside, event = numbers.pop("totals"), numbers.pop("event", one)
    if kind.has_limits:
        y, beside = limits(axis, y, event)
    else:
        y = axis.aligned("y", y, may_be_one=False)
    effects = np.hstack([X[:, :0], *(x.columns for x in given.effects.values())])
    rows = Rows(X, y, **numbers, beside=beside, effects=effects)
    kind.check(rows.y, rows.beside)
    wrong = rows.weights <= 0 if kind.has_precisions else rows.weights < 0
    if not kind.has_fractions:
        wrong |= rows.weights != np.round(rows.weights)
    if wrong.any():
        expected = "positive numbers if likelihood='normal', else how often a row counts"
        others = "Fractions need likelihood='logit', 'ordered' or 'weibull'."
        remedy = "" if kind.has_fractions else others
        raise bad("weights", f"{rows.weights[wrong][0]:g}", expected, remedy)
    if not rows.seen.any():
        raise bad("weights, totals", "zeros", "rows that were seen, with trials")
    y, offset, beside = (x[rows.seen] for x in (rows.y, rows.offset, rows.beside))
    y = kind.numbers(y, beside)
    for response in y - offset, *([y] if y[0] in kind.ends else []):
        if np.std(response) <= ROUNDING * np.max(np.abs(response)):
            raise bad("y", f"{response[0]} in every row", "numbers that differ")
    return rows


def ordered_levels(y: Any) -> tuple[Any, list[str]]:
    """Return numbers from 0 on in place of classes in order, and the names of their levels.

    These are the categories of pandas or of an Enum of polars in their order, or sorted numbers.
    """
    values = in_pandas("y", y)
    array = getattr(values, "array", values)
    categories = isinstance(array, pd.Categorical)
    kind = pd.api.types.infer_dtype(array)
    if (categories and not array.ordered) or kind == "string":
        got = "categories without an order" if categories else "strings"
        remedy = "pandas.Categorical(y, ['low', 'middle', 'high'], ordered=True) has one."
        raise bad("y", got, "numbers, or categories with an order", remedy)
    if categories:
        codes, names = array.codes, array.categories.map(str)
        if (codes < 0).any():
            raise bad("y", f"{np.sum(codes < 0)} missing values", "none", GAPS)
        if unused := names[np.bincount(codes, minlength=len(names)) == 0].tolist():
            remedy = "y.cat.remove_unused_categories() leaves them out."
            raise bad("y", f"the levels {some(unused)} in no row", "a row of each", remedy)
    else:
        numbers = as_numbers("y", values)
        distinct = np.unique(numbers)
        codes, names = np.searchsorted(distinct, numbers), pd.Index([f"{x:g}" for x in distinct])
    return pd.Series(codes, values.index) if isinstance(values, pd.Series) else codes, [*names]


def checked_background(background: Any, kind: ResponseKind, given: Given) -> Any:
    """Return the covariance of a background in order, `True` for that of all columns, or `None`."""
    if background is None or background is False:
        return None
    if kind.name != "normal":
        got = f"a background of likelihood={kind.name!r}"
        raise bad("background", got, "None unless likelihood='normal'", "Others have no rotation.")
    if given.effects:
        got = f"a background beside effects of {', '.join(given.effects)}"
        raise bad("background", got, "None where a formula has random effects")
    if background is True:
        return True
    size = len(given.X)
    frame, axis = in_pandas("background", background), Axis("row of X", size, given.labels)
    K = as_numbers("background", frame)
    if K.shape != (size, size):
        raise bad("background", f"the shape {K.shape}", f"True or ({size}, {size}), one row each")
    names = row_labels(frame), getattr(frame, "columns", None)
    return K[np.ix_(*(axis.order("background", each) for each in names))]


def check_totals(kind: ResponseKind, totals: Any) -> None:
    """Refuse totals where there are no trials, and none where there are."""
    if (totals is None) == kind.has_trials:
        got = "None" if totals is None else "numbers"
        raise bad("totals", got, "numbers of trials for likelihood='binomial', else None")


def check_event(kind: ResponseKind, event: Any) -> None:
    """Refuse events of responses that are not times."""
    if event is not None and not kind.has_limits:
        names = ", ".join(repr(name) for name, each in RESPONSES.items() if each.has_limits)
        raise bad("event", "numbers", f"None for likelihood={kind.name!r}", f"{names} have times.")


def limits(
    axis: Axis, y: Any, event: Float[np.ndarray, " N"]
) -> tuple[Float[np.ndarray, " N"], Float[np.ndarray, " N"]]:
    """Return lower and upper limits of times; both are the time of an event that was seen.

    :param y: times, shape (N,), or limits, shape (N, 2).
    :param event: 1 where the event was seen at the time, 0 where it was not yet.
    """
    if np.shape(y) == (axis.size, 2):
        if not event.all():
            raise bad("event", "numbers beside limits", "None", "Limits tell what was seen.")
        ends = as_numbers("y", y, may_be_infinite=True)[axis.order("y", row_labels(y))]
        return np.where(ends[:, 0] == -np.inf, 0.0, ends[:, 0]), ends[:, 1]
    y = axis.aligned("y", y, may_be_one=False)
    if (wrong := ~np.isin(event, (0, 1))).any():
        expected = "1 where the event was seen, 0 where it was not by the time in y"
        raise bad("event", f"{event[wrong][0]:g} in row {wrong.argmax()}", expected)
    return y, np.where(event == 1, y, np.inf)


def check_key(key: Any) -> None:
    """Refuse a key other than a random key of JAX."""
    if not is_prng_key(key):
        raise bad("key", repr(key), "a random key", "jax.random.key(0) makes one.")


def checked_count(argument: str, number: Any, least: int) -> int:
    """Return a whole number that is at least ``least``."""
    if not isinstance(number, Integral) or number < least:
        raise bad(argument, repr(number), f"a whole number, at least {least}")
    return int(number)
