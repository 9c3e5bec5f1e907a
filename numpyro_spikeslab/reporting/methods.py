# SPDX-License-Identifier: Apache-2.0
"""Several posteriors of one model, by the name of the method that found each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xarray as xr

from numpyro_spikeslab.reporting.data import (
    KINDS,
    check_plates,
    given_values,
    pairs,
    posterior,
    sample_dims,
    select,
)

Methods = Mapping[str, xr.DataTree]


def as_methods(data: xr.DataTree | Methods) -> Methods:
    """One posterior, or several by name, as a mapping."""
    methods = {"posterior": data} if isinstance(data, xr.DataTree) else data
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(
            f"data: got {data!r:.60}, expected ArviZ data or a mapping from names to ArviZ data; "
            "make it with arviz_base.from_numpyro or arviz_base.from_numpyro_svi."
        )
    return methods


def by_method(parts: Iterable, methods: Iterable[str]):
    """Concatenate one array or dataset per method along the dimension ``model`` of ArviZ."""
    return xr.concat(list(parts), dim="model").assign_coords(model=list(methods))


def comparable(
    methods: Methods, var_names: str | Iterable[str] | None, default: Iterable[str] = ()
) -> list[str]:
    """Variables that all methods have with the shapes and labels of the first, as a list."""
    first = next(iter(methods))
    draws = posterior(methods[first])
    names = select(draws, var_names, default)
    check_plates(draws[names], KINDS)
    for method, tree in methods.items():
        others = posterior(tree)
        for name in names:
            if name not in others.data_vars:
                raise ValueError(
                    f"var_names: `{name}` is not in the posterior of {method!r}, which has "
                    f"{sorted(map(str, others.data_vars))}; compare variables that all have."
                )
            check_alike(f"`{name}` of {method!r}", others[name], draws[name], first)
    return names


def check_alike(whose: str, values: xr.DataArray, expected: xr.DataArray, first: str) -> None:
    """Raise unless the plates of two variables have equal names, sizes and labels, in order."""
    for what, of in (("shape", shape), ("coordinates", labels)):
        got, wanted = of(values), of(expected)
        if list(got.items()) != list(wanted.items()):
            raise ValueError(
                f"data: {whose} has the {what} {got!s:.200}, expected {wanted!s:.200}, as in "
                f"{first!r}; fit all methods to the same data and give them the same `dims` and "
                "`coords`."
            )


def shape(values: xr.DataArray) -> dict[str, int]:
    """Sizes of the plates of a variable."""
    dims = sample_dims(values)
    return {str(dim): size for dim, size in values.sizes.items() if dim not in dims}


def labels(values: xr.DataArray) -> dict[str, list]:
    """Coordinates of the plates of a variable."""
    return {dim: values[dim].values.tolist() for dim in shape(values)}


def check_reference(reference: str, data: Mapping[str, xr.DataTree]) -> None:
    """Raise unless ``reference`` names one of the methods."""
    if reference not in data:
        raise ValueError(
            f"reference: got {reference!r}, expected one of the methods {list(data)}; correct the "
            "name, or add it to `data`."
        )


def check_pairs(methods: Methods, names: list[str], argument: str) -> None:
    """Raise unless the variables are spike-and-slab weights of every method."""
    for method, tree in methods.items():
        weights = pairs(posterior(tree))
        if not set(names) <= set(weights):
            raise ValueError(
                f"{argument}: got {names}, expected spike-and-slab weights, of which {method!r} "
                f"has {weights}; declare them with spike_slab."
            )


def reference_values(
    reference: str | Mapping[str, Any],
    methods: Methods,
    names: Iterable[str],
    statistic: Callable[[xr.DataTree, str], xr.DataArray],
) -> xr.Dataset:
    """``statistic`` of the method that ``reference`` names, or the user's own values."""
    if isinstance(reference, str):
        check_reference(reference, methods)
    method = reference if isinstance(reference, str) else next(iter(methods))
    values = xr.Dataset({name: statistic(methods[method], name) for name in names})
    return values if isinstance(reference, str) else given_values(reference, values, names)
