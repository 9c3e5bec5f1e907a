# SPDX-License-Identifier: Apache-2.0
"""Labels of elements: values matched by them, and the most included ones."""

from numbers import Integral
from typing import Any

from jaxtyping import Int
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.messages import bad


def matched(what: str, values: Any, like: xr.DataArray) -> xr.DataArray:
    """Return values as floats with the dimensions, labels and order of another array.

    Dimensions of the same name are matched by their labels, others by their place. An axis numbered
    from 0 counts as unlabelled.

    :param what: subject of the messages, an argument for example.
    :param values: a number for each element of ``like``: DataArray, DataFrame, Series or array.
    :raises ValueError: if shapes or labels differ.
    """
    name = getattr(values, "name", None)
    if isinstance(values, pd.Series | pd.DataFrame) and values.ndim == like.ndim:
        axes = dict(zip(like.dims, values.axes, strict=True))
        values = xr.DataArray(values.to_numpy(), axes, like.dims)
    if isinstance(values, xr.DataArray):
        values = ordered(what, values, like)
    if np.shape(values) != like.shape:
        raise bad(
            what,
            f"{f'`{name}` of ' if name else ''}the shape {np.shape(values)}",
            f"{like.shape}, that of `{like.name}` with the dimensions {like.dims}",
            "Give a value for each element, thinned alike.",
        )
    return like.copy(data=np.asarray(values, float))


def ordered(what: str, values: xr.DataArray, like: xr.DataArray) -> xr.DataArray:
    """Put dimensions and labels of an array into the order of another."""
    values = values.transpose(*(dim for dim in like.dims if dim in values.dims), ...)
    for dim, other in zip(values.dims, like.dims, strict=False):
        if dim not in values.indexes or other not in like.indexes:
            continue
        labels, expected = values.indexes[dim], like.indexes[other]
        if labels.equals(expected):
            continue
        contains = labels.is_unique and expected.isin(labels).all()
        are_numbered = is_numbered(labels), is_numbered(expected)
        if dim == other and contains and not all(are_numbered):
            values = values.sel({dim: expected})
        elif not any(are_numbered) if dim == other else contains and len(labels) == len(expected):
            raise bad(
                what,
                f"the labels {labels.tolist()!s:.200} of {dim!r}",
                f"{expected.tolist()!s:.200}, the labels of `{like.name}` along {other!r}",
                "Correct the labels; rename and assign_coords of xarray name a dimension.",
            )
    return values


def is_numbered(labels: pd.Index) -> bool:
    """Whether labels are the numbers from 0, as xarray gives to unlabelled axes."""
    return labels.equals(pd.RangeIndex(len(labels)))


def check_top(top: int | None) -> None:
    """Raise unless ``top`` is a positive integer or None."""
    if top is not None and not (isinstance(top, Integral) and top >= 1):
        raise bad("top", repr(top), "a whole number, at least 1", "Leave it out to show all.")


def most_included(probs: Any, top: int | None) -> Int[np.ndarray, " K"]:
    """Return the places of the ``top`` highest probabilities in order, or all for None."""
    if top is None:
        return np.arange(len(probs))
    return np.argsort(-np.asarray(probs, float), kind="stable")[:top]
