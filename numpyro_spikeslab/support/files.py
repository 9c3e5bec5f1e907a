# SPDX-License-Identifier: Apache-2.0
"""Labels and columns of tables in forms that netCDF and zarr can keep."""

from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

# late elsewhere, for the package is imported without it
if TYPE_CHECKING:
    import pandas as pd

PLAIN = "iufmM"
"""Kinds of entries that files keep: numbers, dates and durations without a time zone."""

NUMBERS = "integer", "floating", "mixed-integer-float", "decimal", "boolean"
"""Kinds of entries that are numbers, in columns of objects or with missing values of their own."""

LEVELS = "levels"
"""Attribute of a column with the levels of its categories in order."""


def plain_labels(index: "pd.Index") -> np.ndarray:
    """Return labels as numbers or dates, or else as strings, those of several levels joined."""
    labels = np.asarray(index)
    if labels.dtype.kind in PLAIN:
        return labels
    parts = [x if isinstance(x, tuple) else [x] for x in labels]
    return np.array([", ".join(map(str, x)) for x in parts], object)


def plain_columns(table: "pd.DataFrame") -> "pd.DataFrame":
    """Return columns as numbers, booleans, dates, durations or categories, all else as strings."""
    return table.apply(_plain_column)


def _plain_column(column: "pd.Series") -> Any:
    import pandas as pd

    if column.dtype == "category":
        return column.cat.rename_categories([str(x) for x in column.cat.categories])
    if isinstance(column.dtype, np.dtype) and column.dtype != object:
        return column
    kind = pd.api.types.infer_dtype(column)
    if kind in NUMBERS:
        return pd.to_numeric(column.astype(object).where(column.notna(), np.nan))
    if kind == "period":
        return column.dt.to_timestamp()
    if kind.startswith("date"):
        return pd.to_datetime(column).dt.tz_localize(None)
    return column.astype(object).map(str, na_action="ignore")


def stored_columns(table: "pd.DataFrame", dim: str) -> xr.Dataset:
    """Return plain columns as data that files can keep."""
    coded = table.select_dtypes("category")
    levels = {x: {LEVELS: [*coded[x].cat.categories]} for x in coded}
    return xr.Dataset({x: (dim, table[x].to_numpy(), levels.get(x)) for x in table})


def read_columns(data: xr.Dataset) -> "pd.DataFrame":
    """Return the plain columns that were stored."""
    import pandas as pd

    columns: dict[Any, Any] = {}
    # a column with the name of the dimension is an index
    for name, x in data.variables.items():
        # a list of one has become its string in a file
        levels = np.atleast_1d(x.attrs.get(LEVELS, []))
        columns[name] = pd.Categorical(x.values, levels) if len(levels) else x.values
    return pd.DataFrame(columns)
