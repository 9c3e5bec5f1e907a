# SPDX-License-Identifier: Apache-2.0
"""Elements of variables one after the other, as pictures have them, and the most included."""

from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from jaxtyping import Int
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.data import KINDS

Tables = Mapping[str, xr.DataArray]  # by variable; elements are the last dimension


def by_element(values: xr.DataArray, name: str) -> xr.DataArray:
    """Values with the elements of a variable along its own last dimension, labelled as by ArviZ."""
    kinds = [dim for dim in KINDS if dim in values.dims]
    plates = [dim for dim in values.dims if dim not in kinds]
    labels = [", ".join(map(str, at)) for at in product(*(values[dim].values for dim in plates))]
    array = values.transpose(*kinds, *plates).values
    attrs = {"long_name": ", ".join(map(str, plates))}
    element = xr.Variable(f"{name}_element", labels, attrs)
    coords = {**{dim: values[dim].values for dim in kinds}, f"{name}_element": element}
    shape = (*array.shape[: len(kinds)], len(labels))
    return xr.DataArray(array.reshape(shape), coords, list(coords))


def labels_of(table: xr.DataArray) -> list[str]:
    """What the elements are called."""
    return table[table.dims[-1]].values.tolist()


def row_labels(name: str, table: xr.DataArray) -> list[str]:
    """How ArviZ labels the elements of a variable."""
    return [f"{name}[{label}]" if label else name for label in labels_of(table)]


class Choice(NamedTuple):
    """Places of the elements that are drawn, in order, and of all others."""

    shown: Int[np.ndarray, " K"]
    others: Int[np.ndarray, " L"]

    def with_others(self, table: xr.DataArray) -> xr.DataArray:
        """Values of the elements that are drawn, and the largest of all others."""
        shown, dim = table[..., self.shown], str(table.dims[-1])
        if not self.others.size:
            return shown
        largest = table[..., self.others].max(dim)
        if "summary" in largest.dims:
            largest = largest.where(largest["summary"] == "inclusion")
        largest = largest.expand_dims({dim: [f"largest of {self.others.size:,} others"]})
        return xr.concat([shown, largest], dim).transpose(..., dim)


def most_included(probs: xr.DataArray, top: int | None) -> Choice:
    """The elements of the highest inclusion probability in any method; all in place for None."""
    if top is None:
        return Choice(np.arange(probs.shape[-1]), np.arange(0))
    order = np.argsort(-probs.max("model").values, kind="stable")
    return Choice(order[:top], order[top:])


def probabilities(table: xr.DataArray) -> xr.DataArray:
    """Inclusion probabilities by method."""
    return table.sel(summary="inclusion", drop=True)


def are_above(table: xr.DataArray, threshold: float) -> np.ndarray:
    """Which elements are above the threshold in any method."""
    return (probabilities(table) > threshold).any("model").values


def bars_of(table: xr.DataArray) -> xr.DataArray:
    """Ends of bars of two Monte Carlo standard errors to either side."""
    centre, error = probabilities(table), table.sel(summary="mcse_inclusion", drop=True)
    return segments((centre - 2 * error).clip(0, 1), (centre + 2 * error).clip(0, 1))


def segments(low: xr.DataArray, high: xr.DataArray) -> xr.DataArray:
    """Ends of bars, three for each element: all are one line, which NaN interrupts."""
    dim = str(low.dims[-1])
    ends = xr.concat([low, high, xr.full_like(low, np.nan)], "end").transpose(..., dim, "end")
    coords = {kind: ends[kind].values for kind in low.dims[:-1]}
    return xr.DataArray(ends.values.reshape(*low.shape[:-1], -1), coords, [*coords, f"{dim}_end"])
