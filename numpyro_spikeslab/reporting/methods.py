# SPDX-License-Identifier: Apache-2.0
"""Several posteriors of one model, by the name of the method."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xarray as xr

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reporting.arviz_data import check_plates, pairs, plates, posterior, select
from numpyro_spikeslab.reporting.labels import matched

Methods = Mapping[str, Any]

RESERVED = ("model", "summary", "ci_bound")
"""Dimensions that pictures add to the plates."""


def as_methods(data: Any, name: str = "posterior") -> Methods:
    """Return posteriors by the name of the method; a single one is called ``name``."""
    is_one = isinstance(data, xr.DataTree) or not isinstance(data, Mapping)
    if not is_one and not data:
        raise bad("data", data, "one fit, or several by name", "Name one at least.")
    return {name: data} if is_one else data


def by_method(parts: Iterable, methods: Iterable[str]):
    """Concatenate an array or dataset per method along the dimension ``model`` of ArviZ."""
    return xr.concat(list(parts), dim="model").assign_coords(model=list(methods))


def comparable(
    methods: Methods, var_names: str | Iterable[str] | None, default: Iterable[str] = ()
) -> list[str]:
    """Return variables that all methods have with the same plates and labels.

    :raises ValueError: if a method lacks one or has other plates or labels than the first.
    """
    first = next(iter(methods))
    draws = posterior(methods[first])
    names = select(draws, var_names, default)
    check_plates(draws[names], RESERVED)
    for method, tree in methods.items():
        others = posterior(tree)
        for name in names:
            if name not in others.data_vars:
                got = f"`{name}`, which the posterior of {method!r} lacks"
                expected = f"variables of all methods, some of {sorted(map(str, others))}"
                raise bad("var_names", got, expected)
            labels, first_labels = labels_of(others[name]), labels_of(draws[name])
            if list(labels.items()) != list(first_labels.items()):
                raise bad(
                    "data",
                    f"`{name}` of {method!r} with the coordinates {labels!s:.200}",
                    f"{first_labels!s:.200}, as in {first!r}",
                    "Fit all methods to the same data, with the same `dims` and `coords`.",
                )
    return names


def labels_of(draws: xr.DataArray) -> dict[str, list]:
    """Return the labels of each plate of a variable."""
    return {dim: draws[dim].values.tolist() for dim in plates(draws)}


def check_reference(reference: str, methods: Methods) -> None:
    """Raise unless ``reference`` names one of the methods."""
    if reference not in methods:
        raise bad("reference", repr(reference), f"one of the methods {list(methods)}")


def check_pairs(methods: Methods, names: list[str], argument: str) -> None:
    """Raise unless the variables are spike-and-slab weights of every method."""
    for method, tree in methods.items():
        weights = pairs(posterior(tree))
        if not set(names) <= set(weights):
            expected = f"spike-and-slab weights, which are {weights} in {method!r}"
            raise bad(argument, names, expected, "Declare them with spike_slab.")


def values_by_name(
    reference: Mapping[Any, Any], like: Mapping[Any, xr.DataArray], names: Iterable[str]
) -> dict[str, xr.DataArray]:
    """Return the user's values of some variables, each matched to its own array."""
    missing = [name for name in names if name not in reference]
    if missing:
        got, expected = f"values of {sorted(map(str, reference))}", f"`{missing[0]}` among them"
        raise bad("reference", got, expected)
    return {name: matched("reference", reference[name], like[name]) for name in names}


def reference_values(
    reference: str | Mapping[str, Any],
    methods: Methods,
    names: Iterable[str],
    statistic: Callable[[xr.DataTree, str], xr.DataArray],
) -> dict[str, xr.DataArray]:
    """Return ``statistic`` of the method named ``reference``, or the user's own values."""
    if isinstance(reference, str):
        check_reference(reference, methods)
    method = reference if isinstance(reference, str) else next(iter(methods))
    values = {name: statistic(methods[method], name) for name in names}
    return values if isinstance(reference, str) else values_by_name(reference, values, names)
