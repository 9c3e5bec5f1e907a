# SPDX-License-Identifier: Apache-2.0
"""Random effects of a regression: levels of groups, their columns, and effects of new rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np
import pandas as pd
import xarray as xr

from jax import random

from numpyro_spikeslab.models.responses import ROUNDING
from numpyro_spikeslab.reading.coefficient_proof import MAX_WORK
from numpyro_spikeslab.support.files import plain_columns
from numpyro_spikeslab.support.formulas import gaps_in, group_terms, unknown_name
from numpyro_spikeslab.support.messages import bad, some
from numpyro_spikeslab.support.tabular import as_numbers

RESERVED = "chain", "draw", "feature", "row"
"""Dimensions of a result."""


class Effect(NamedTuple):
    """The effects of the levels of a group, on the response or on the slope of a column.

    - **group** - the name of the group.
    - **levels** - its labels.
    - **columns** - one for each level: the values of the slope's column, or 1, in its rows.
    - **unit** - the standard deviation of these values; 1 of an intercept.
    """

    group: str
    levels: np.ndarray
    columns: Float[np.ndarray, "N G"]
    unit: float


def effects_of(terms: Sequence[tuple[str, str]], frame: pd.DataFrame) -> dict[str, Effect]:
    """Return the effects of terms of a formula by name: that of the group, and of the slope.

    :param terms: from :func:`~numpyro_spikeslab.support.formulas.group_terms`.
    :raises ValueError: if columns are missing or have gaps, if labels have decimals or are all the
        same, if a slope's column does not vary, or if levels are too many.
    """
    effects: dict[str, Effect] = {}
    for slope, group in terms:
        name, what = name_of(slope, group), f"data: the group {group!r}"
        if name in effects or group in RESERVED:
            got = "a name that the result needs" if group in RESERVED else "two terms alike"
            raise bad(what, got, "one term, of another name", "Rename the column, or leave it out.")
        labels, values = labels_and_values("data", slope, group, frame)
        codes, levels = pd.factorize(labels, sort=True)
        if len(levels) < 2:
            remedy = "Its effect would be the intercept: leave the term out."
            raise bad(what, f"the level {levels[0]!r} in all rows", "two levels or more", remedy)
        unit = 1.0 if slope == "1" else float(np.std(values))
        if unit <= ROUNDING * np.max(np.abs(values)):
            remedy = f"`(1 | {group})` has its effects on the response itself."
            raise bad(f"data: the slope {slope!r}", "the same in all rows", "numbers", remedy)
        columns = np.equal.outer(codes, np.arange(len(levels))) * values[:, None]
        effects[name] = Effect(group, np.asarray(levels), columns, unit)
    size = sum(len(x.levels) for x in effects.values())
    if size**2 * max(len(frame), size) > MAX_WORK:
        got = f"{size} levels of groups in {len(frame)} rows"
        remedy = "Join rare levels, or write a model of NumPyro with NUTS beside PairedGibbs."
        raise bad("data", got, f"levels whose square times rows is {MAX_WORK:g} or less", remedy)
    return effects


def name_of(slope: str, group: str) -> str:
    """Return the name of an effect."""
    return group if slope == "1" else f"{group}_{slope}"


def labels_and_values(
    argument: str, slope: str, group: str, frame: pd.DataFrame
) -> tuple[np.ndarray, Float[np.ndarray, " N"]]:
    """Return the group of each row, and what its effect is multiplied with."""
    used = [group] if slope == "1" else [group, slope]
    if missing := [name for name in used if name not in frame]:
        raise unknown_name(argument, missing[0], f"{slope} | {group}", frame)
    frame = plain_columns(frame[used])
    if (gaps := frame.isna().any(axis=1)).any():
        raise gaps_in(argument, frame, np.flatnonzero(gaps))
    labels = np.asarray(frame[group])
    if labels.dtype.kind == "f":
        if (decimals := labels[labels != np.round(labels)]).size:
            got = f"numbers with decimals, {some(decimals.tolist())}"
            remedy = "`pandas.cut` makes groups of numbers; a column of the formula has one slope."
            raise bad(f"{argument}: the group {group!r}", got, "labels of groups", remedy)
        labels = labels.astype(int)
    values = np.ones(len(frame)) if slope == "1" else as_numbers(argument, frame[slope])
    return labels, values


def known_effects(formula: str | None) -> dict[str, tuple[str, str]]:
    """Return slope and group of each effect of a formula by its name."""
    terms = group_terms(formula)[1] if formula else []
    return {name_of(*term): term for term in terms}


def with_effects(argument: str, rows: xr.Dataset, draws: xr.Dataset, frame: Any) -> xr.Dataset:
    """Add for each effect the level of each row, as a number, and what its effect multiplies.

    Levels that the regression has not seen have the numbers behind those of the others.
    """
    for name, (slope, group) in known_effects(rows.attrs.get("formula")).items():
        labels, values = labels_and_values(argument, slope, group, frame)
        levels = draws[group].to_index()
        if (labels.dtype.kind in "iu") != (levels.dtype.kind in "iu"):
            expected = f"labels as {some(levels.tolist())}"
            raise bad(f"{argument}: the group {group!r}", some(labels.tolist()), expected)
        codes = levels.get_indexer(pd.Index(labels))
        codes[codes < 0] = len(levels) + pd.factorize(labels[codes < 0])[0]
        rows = rows.assign({f"level.{name}": ("row", codes), f"value.{name}": ("row", values)})
    return rows


def effects_of_rows(key: Array, rows: xr.Dataset, draws: xr.Dataset) -> list[Any]:
    """Return for each effect the numbers and values of the rows, and the draws of all levels, shape
    (S, G), of which those of new levels are drawn from their prior."""
    tables = []
    for number, name in enumerate(known_effects(rows.attrs.get("formula"))):
        levels, values = (rows[f"{part}.{name}"].values for part in ("level", "value"))
        scale = draws[f"sd_{name}"].values.reshape(-1, 1)
        known = draws[f"effect_{name}"].values.reshape(len(scale), -1)
        shape = len(scale), max(0, int(levels.max()) + 1 - known.shape[1])
        new = scale * np.asarray(random.normal(random.fold_in(key, number), shape))
        tables.append((levels, values, np.concatenate([known, new], axis=1)))
    return tables
