# SPDX-License-Identifier: Apache-2.0
"""Tables and vectors of numbers, of any library; errors name row and column of a wrong entry."""

from collections.abc import Mapping
import datetime
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

import jax

from numpyro_spikeslab.support.messages import bad

# late elsewhere, for the package is imported without it
if TYPE_CHECKING:
    import pandas as pd

DATES = datetime.date, datetime.timedelta, np.datetime64, np.timedelta64
UNIT = (
    "Count them in a unit, years for example: `(x - x.min()) / numpy.timedelta64(1, 'D') / 365.25`."
)
GAPS = "Leave out these rows, or fill the gaps."
DIGITS = (
    "`pandas.to_numeric` makes numbers of digits, `pandas.get_dummies` indicators of categories, "
    "`y == value` those of one class."
)


def is_array(values: Any) -> bool:
    """Whether values are an array of numbers, of numpy or JAX, traced ones included."""
    return isinstance(values, np.ndarray | jax.Array) and values.dtype.kind not in "OSTUMmc"


def is_mapping(values: Any) -> bool:
    """Whether values are a mapping, which some sparse arrays of scipy are, too."""
    return isinstance(values, Mapping) and not hasattr(values, "shape")


def in_pandas(argument: str, values: Any) -> Any:
    """Return tables and series of any library as those of pandas, a mapping as a series.

    All else stays as it is.

    :raises ValueError: if rows are not in memory.
    """
    import narwhals.stable.v2 as nw
    import pandas as pd

    labels = row_labels(values)
    if is_mapping(values):
        return pd.Series([*values.values()], labels)
    if isinstance(values, pd.DataFrame | pd.Series):
        return values
    read = nw.from_native(values, pass_through=True, allow_series=True)
    if isinstance(read, nw.LazyFrame):
        got = f"a {type(values).__name__}, whose rows are not in memory"
        raise bad(argument, got, "a table", f"{argument}.collect() or .compute() reads them.")
    if isinstance(read, nw.Series):
        return pd.Series(_column(read), labels)
    if isinstance(read, nw.DataFrame):
        return pd.DataFrame({x.name: _column(x) for x in read.iter_columns()}, labels)
    return values


def _column(series: Any) -> Any:
    """Return a series of narwhals as an array of pandas, categories in their order."""
    import narwhals.stable.v2 as nw
    import pandas as pd

    dtype: Any = None
    if isinstance(series.dtype, nw.Enum):
        dtype = pd.CategoricalDtype([*series.dtype.categories], ordered=True)
    elif isinstance(series.dtype, nw.Categorical):
        dtype = "category"
    values = series.to_list() if series.dtype.is_nested() else series.to_numpy()
    return pd.Series(values, dtype=dtype).array


def row_labels(values: Any) -> "pd.Index | None":
    """Return the labels of rows or of entries, which pandas and mappings have, else `None`."""
    import pandas as pd

    if is_mapping(values):
        return pd.Index([*values], dtype=object)
    # a list has a method of this name
    index = getattr(values, "index", None)
    return index if isinstance(index, pd.Index) else None


def check_kind(argument: str, values: Any) -> None:
    """Refuse masks, dates and categories, which a conversion to numbers would ignore."""
    values = in_pandas(argument, values)
    if np.ma.is_masked(values):
        raise bad(argument, f"{np.ma.count_masked(values)} masked values", "none", GAPS)
    # a DataFrame has one for each column
    dtypes: Any = getattr(values, "dtypes", getattr(values, "dtype", None))
    columns = zip(getattr(values, "columns", ["all rows"]), np.ravel(dtypes), strict=False)
    if category := [name for name, dtype in columns if str(dtype) == "category"]:
        raise bad(argument, f"categories in {category}", "numbers", DIGITS)
    array = np.asarray(values)
    if array.dtype.kind in "mMO":
        _refuse(argument, values, array, _each(array, lambda x: isinstance(x, DATES)))


def as_numbers(
    argument: str, values: Any, may_miss: bool = False, may_be_infinite: bool = False
) -> np.ndarray:
    """Return an array of finite real numbers.

    :param may_miss: whether entries may be missing, in any of the forms of pandas; they are NaN.
    :param may_be_infinite: whether infinity is a number.
    :raises ValueError: at the first other entry, with its row and column, by their labels if
        ``values`` has labels.
    """
    values = in_pandas(argument, values)
    check_kind(argument, values)
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        import pandas as pd

        # pandas before 3 refuses structured arrays
        is_missing = pd.isna(array.astype(object) if array.dtype.names else array)
        is_number = _each(array, lambda x: isinstance(x, Real | Decimal | np.bool_))
        _refuse(argument, values, array, ~(is_missing | is_number))
        array = np.where(is_missing, np.nan, array)
    array = array.astype(float)
    is_infinite, is_missing = np.isinf(array), np.isnan(array)
    is_wrong = (is_infinite & (not may_be_infinite)) | (is_missing & (not may_miss))
    _refuse(argument, values, array, is_wrong)
    return array


def _each(array: np.ndarray, test: Any) -> np.ndarray:
    return np.reshape([test(x) for x in array.flat], array.shape).astype(bool)


def _refuse(argument: str, values: Any, array: np.ndarray, is_wrong: Any) -> None:
    """Raise if an entry is wrong, with the first one, its place and a remedy for its type."""
    if not np.any(is_wrong):
        return
    index = tuple(np.argwhere(is_wrong)[0].tolist())
    entry = array[index]
    remedy = GAPS if isinstance(entry, float) else ""
    if isinstance(entry, str | bytes):
        remedy = DIGITS
    elif isinstance(entry, np.void):
        remedy = f"`{argument}['name']` takes one field; a second one is an argument, too."
    elif isinstance(entry, DATES):
        remedy = UNIT
    elif hasattr(entry, "to_timestamp"):
        remedy = f"`to_timestamp` makes dates of periods. {UNIT}"
    got = f"{entry}" if isinstance(entry, float) else f"the {type(entry).__name__} '{entry!s:.40}'"
    if not index and isinstance(entry, str):
        remedy = f"A column is `{argument}=data[{str(entry)!r}]`."
    if index:
        got += f" in {_place(values, index)}, the first of {np.sum(is_wrong)}"
    raise bad(argument, got, "finite real numbers", remedy)


def _place(values: Any, index: tuple[Any, ...]) -> str:
    """Name an entry by its labels in pandas, else by its numbers from 0 on."""
    axes = getattr(values, "axes", None)
    if axes is not None:
        index = tuple(x[k : k + 1].tolist()[0] for x, k in zip(axes, index, strict=True))
    return ", ".join(f"{name} {x!r}" for name, x in zip(("row", "column"), index, strict=False))
