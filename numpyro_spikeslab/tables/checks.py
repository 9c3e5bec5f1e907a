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
from numpyro_spikeslab.support.files import plain_labels
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers
from numpyro_spikeslab.tables.formula import Given


class Rows(NamedTuple):
    """Rows of a table with the response, weight, offset and number of trials of each, which is
    infinite where there are no trials, and the columns of all random effects."""

    X: Float[np.ndarray, "N P"]
    y: Float[np.ndarray, " N"]
    weights: Float[np.ndarray, " N"]
    offset: Float[np.ndarray, " N"]
    totals: Float[np.ndarray, " N"]
    effects: Float[np.ndarray, "N C"]

    @property
    def seen(self) -> Bool[np.ndarray, " N"]:
        """Return which rows tell something: they count, and have trials."""
        return (self.weights > 0) & (self.totals > 0)


def checked_table(X: Any, labels: pd.Index | None) -> xr.DataArray:
    """Return the columns as numbers, with labels of rows and columns."""
    table = as_numbers("X", X)
    if table.ndim != 2 or len(table) < 3 or table.shape[1] < 1:
        expected = "(N, P), at least three rows and a column"
        raise bad("X", f"the shape {table.shape}", expected, "One column is X.reshape(-1, 1).")
    names = Axis.of_columns(X, table.shape[1]).names
    # booleans would be masks
    if not names.is_unique or names.inferred_type not in ("string", "integer", "floating"):
        expected = "names that differ, all strings or all numbers"
        got = f"the columns {names.tolist()!s:.200}"
        raise bad("X", got, expected, "X.columns.map(str) makes strings.")
    coords = {"feature": names.tolist()} | row_coord("row", labels)
    return xr.DataArray(table, coords, ["row", "feature"])


def row_coord(dim: str, labels: pd.Index | None) -> dict[str, np.ndarray]:
    """Return labels of rows as a coordinate."""
    return {} if labels is None else {dim: plain_labels(labels)}


def checked_rows(
    given: Given, X: Float[np.ndarray, "N P"], kind: ResponseKind, of_rows: dict[str, Any]
) -> Rows:
    """Return the rows of a table with what belongs to each.

    :param of_rows: ``weights``, ``offset`` and ``totals``, `None` by default.
    """
    check_totals(kind, of_rows["totals"])
    y, axis = given.y, Axis("row of X", len(X), given.labels)
    if y is None:
        raise bad("y", "None", "the response, unless X is a formula")
    count = np.ones(axis.size)
    numbers = {"weights": count, "offset": 0.0 * count, "totals": np.inf * count}
    numbers |= {k: axis.aligned(k, x) for k, x in of_rows.items() if x is not None}
    effects = np.hstack([X[:, :0], *(x.columns for x in given.effects.values())])
    rows = Rows(X, axis.aligned("y", y, may_be_one=False), **numbers, effects=effects)
    kind.check(rows.y, rows.totals)
    wrong = rows.weights <= 0 if kind.has_precisions else rows.weights < 0
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


def check_totals(kind: ResponseKind, totals: Any) -> None:
    """Refuse totals where there are no trials, and none where there are."""
    if (totals is None) == kind.has_trials:
        got = "None" if totals is None else "numbers"
        raise bad("totals", got, "numbers of trials for likelihood='binomial', else None")


def check_key(key: Any) -> None:
    """Refuse a key other than a random key of JAX."""
    if not is_prng_key(key):
        raise bad("key", repr(key), "a random key", "jax.random.key(0) makes one.")


def checked_count(argument: str, number: Any, least: int) -> int:
    """Return a whole number that is at least ``least``."""
    if not isinstance(number, Integral) or number < least:
        raise bad(argument, repr(number), f"a whole number, at least {least}")
    return int(number)
