# SPDX-License-Identifier: Apache-2.0
"""Variables of a spike-and-slab posterior in ArviZ data and their statistics, by ArviZ.

A *pair* is a weight ``w`` of the ``posterior`` group with its indicator ``w_spike``. Markov chains
have the dimensions ``(chain, draw)``, variational draws (from ``arviz_base.from_numpyro_svi``) the
dimension ``sample``. All other dimensions are *plates*.
"""

from collections.abc import Hashable, Iterable, Mapping
from itertools import product
from numbers import Integral
from typing import Any

import arviz_base
import arviz_stats
from jaxtyping import Int
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting.by_table import TABLE, within_tables
from numpyro_spikeslab.support.messages import bad

WEIGHTS, FUNCTIONS = "W", "phi"
"""Names of the weights and latent functions of `models.mtmkl`."""

PROBABILITIES = "inclusion_probabilities"
"""Prefix of the sample statistics with Rao-Blackwellised inclusion probabilities."""

SETS = "credible_sets"
"""Prefix of the sample statistics with the credible sets of a fit."""

RESERVED = ("summary", "ci_bound", "variable", "label")
"""Dimensions of ArviZ's tables."""

PRIOR = "prior_inclusion"
"""Prefix of the constant data with the prior inclusion probabilities of weights."""

GROUP = "group"
"""Prefix of the constant data with the label of each weight's group."""

CHAIN_DIAGNOSTICS = ("ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd")

Methods = Mapping[str, Any]


def posterior(data: xr.DataTree) -> xr.Dataset:
    """Return the posterior draws of ``data``, with the sample dimensions first."""
    remedy = "Make it with arviz_base.from_numpyro or arviz_base.from_numpyro_svi."
    if not isinstance(data, xr.DataTree) or "posterior" not in data.children:
        got = f"{type(data).__name__} without a `posterior` group"
        raise bad("data", got, "an xarray DataTree with one", remedy)
    draws = data["posterior"].to_dataset()
    for dims in (["chain", "draw"], ["sample"]):
        if set(dims) <= set(draws.dims):
            return draws.transpose(*dims, ..., missing_dims="ignore")
    got = f"a posterior with the dimensions {tuple(map(str, draws.dims))}"
    raise bad("data", got, "('chain', 'draw') or 'sample' among them", remedy)


def sample_dims(draws: xr.Dataset | xr.DataArray) -> list[str]:
    """Return ``["chain", "draw"]`` for Markov chains, ``["sample"]`` for variational draws."""
    return ["chain", "draw"] if "chain" in draws.dims else ["sample"]


def plates(draws: xr.DataArray, without: str = "") -> list[str]:
    """Return the plates of a variable in their order, except ``without``."""
    return [str(dim) for dim in draws.dims if dim not in (*sample_dims(draws), without)]


def sample_stats(data: xr.DataTree) -> xr.Dataset:
    """Return the statistics of the draws, without variables if there are none."""
    return data.children.get("sample_stats", xr.DataTree()).to_dataset()


def constant(data: xr.DataTree, prefix: str, like: xr.DataArray) -> xr.DataArray | None:
    """Return the constant data of a variable with this prefix, None if there are none."""
    constants = data.children.get("constant_data", xr.DataTree()).to_dataset()
    return constants.get(f"{prefix}.{like.name}")


def pairs(draws: xr.Dataset) -> list[str]:
    """Name the spike-and-slab weights: variables with a variable of spikes."""
    return [str(name) for name in draws.data_vars if f"{name}_spike" in draws.data_vars]


def select(
    draws: xr.Dataset,
    var_names: str | Iterable[str] | None,
    default: Iterable[str] = (),
    argument: str = "var_names",
) -> list[str]:
    """Return ``var_names``, or ``default`` for None, as a list of variables of ``draws``."""
    chosen = default if var_names is None else var_names
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    unknown = [name for name in names if name not in draws.data_vars]
    if unknown or not names:
        expected = f"one or more of {sorted(map(str, draws.data_vars))}"
        remedy = "Correct the spelling, or collect the site when sampling."
        raise bad(argument, unknown or var_names, expected, remedy)
    return names


def check_plates(draws: xr.Dataset, reserved: Iterable[str]) -> None:
    """Raise if a plate has the name of a dimension of tables and pictures."""
    clash = sorted(set(map(str, draws.dims)) & set(reserved))
    if clash:
        expected = "names that tables and pictures do not use themselves"
        remedy = "Rename them by `dims` of arviz_base.from_numpyro."
        raise bad("data", f"plates called {clash}", expected, remedy)


def check_finite(draws: xr.DataArray) -> None:
    """Refuse non-finite draws."""
    if not np.isfinite(draws.values).all():
        remedy = "Leave those draws out, and find out why they are not finite."
        raise bad("data", f"`{draws.name}` not finite in some draws", "finite numbers", remedy)


def is_grouped(draws: xr.Dataset, name: str) -> bool:
    """Whether weights of the pair ``name`` share spikes."""
    spike = draws[f"{name}_spike"]
    return f"{name}_group" in spike.dims or spike.size < draws[name].size


def spike_draws(data: xr.DataTree, name: str) -> xr.DataArray:
    """Return the draws of the indicator of a pair, shaped like its weight."""
    draws = posterior(data)
    if is_grouped(draws, name):
        return (draws[name] != 0).astype(float)
    return align_to("data", draws[f"{name}_spike"], draws[name])


def inclusion_draws(data: xr.DataTree, name: str) -> xr.DataArray:
    """Return draws with the mean of the indicator, Rao-Blackwellised if they are stored."""
    for key, values in sample_stats(data).items():
        if are_inclusion_probabilities(key, name):
            return align_to("data", values, posterior(data)[name])
    return spike_draws(data, name)


def are_inclusion_probabilities(key: Hashable, name: str) -> bool:
    """Whether a variable of the statistics has the inclusion probabilities of weights."""
    # kernels that are blocks of another put a path before the name
    return f".{key}".endswith(f".{PROBABILITIES}.{name}")


def mean(draws: xr.DataArray) -> xr.DataArray:
    """Average over draws; NaN if a draw is NaN."""
    return draws.mean(sample_dims(draws), skipna=False, dtype=float)


def inclusion(data: xr.DataTree, name: str) -> xr.DataArray:
    """Return posterior inclusion probabilities, Rao-Blackwellised where they are stored."""
    return mean(inclusion_draws(data, name))


def function_plate(draws: xr.Dataset, weights: str, functions: str) -> str:
    """Return the dimension of the latent functions, the one plate shared with their weights."""
    select(draws, weights, argument="weights")
    select(draws, functions, argument="functions")
    W, phi = draws[weights], draws[functions]
    shared = [dim for dim in plates(W) if dim in phi.dims]
    if len(shared) != 1:
        got = f"`{weights}` with the dimensions {W.dims} and `{functions}` with {phi.dims}"
        dims = f"{{{weights!r}: ['task', 'latent'], {functions!r}: ['latent', 'point']}}"
        expected = "one plate in common, that of the functions"
        raise bad("data", got, expected, f"Make the data with dims={dims}.")
    return shared[0]


def as_methods(data: Any, name: str = "posterior") -> Methods:
    """Return posteriors by the name of the method; a single one is called ``name``."""
    if isinstance(data, xr.DataTree) or not isinstance(data, Mapping):
        return {name: data}
    if not data:
        raise bad("data", data, "one fit, or several by name", "Name one at least.")
    return data


def by_method(parts: Iterable, methods: Iterable[str]):
    """Concatenate an array or dataset per method along the dimension ``model`` of ArviZ."""
    return xr.concat(list(parts), dim="model").assign_coords(model=list(methods))


def comparable(
    methods: Methods, var_names: str | Iterable[str] | None, default: Iterable[str] = ()
) -> list[str]:
    """Return variables, after a check that all methods have them with the same labels."""
    first = next(iter(methods))
    draws = posterior(methods[first])
    names = select(draws, var_names, default)
    # pictures add these dimensions
    check_plates(draws[names], ("model", "summary", "ci_bound"))
    for method, tree in methods.items():
        others = posterior(tree)
        for name in names:
            if name not in others.data_vars:
                got = f"`{name}`, which the posterior of {method!r} lacks"
                expected = f"variables of all methods, some of {sorted(map(str, others))}"
                raise bad("var_names", got, expected)
            labels, expected_labels = (
                {dim: x[name][dim].values.tolist() for dim in plates(x[name])}
                for x in (others, draws)
            )
            if list(labels.items()) != list(expected_labels.items()):
                got = f"`{name}` of {method!r} with the coordinates {labels!s:.200}"
                remedy = "Fit all methods to the same data, with the same `dims` and `coords`."
                raise bad("data", got, f"{expected_labels!s:.200}, as in {first!r}", remedy)
    return names


def check_reference(reference: str, methods: Methods) -> None:
    """Refuse a reference that is none of the methods."""
    if reference not in methods:
        raise bad("reference", repr(reference), f"one of the methods {list(methods)}")


def check_pairs(methods: Methods, names: list[str], argument: str) -> None:
    """Refuse names that are not spike-and-slab weights of each method."""
    for method, tree in methods.items():
        weights = pairs(posterior(tree))
        if not set(names) <= set(weights):
            expected = f"spike-and-slab weights, which are {weights} in {method!r}"
            raise bad(argument, names, expected, "Declare them with spike_slab.")


def comparable_pairs(methods: Methods, var_names: str | Iterable[str] | None) -> list[str]:
    """Return weights, by default all pairs of the first method, that all methods have."""
    draws = posterior(next(iter(methods.values())))
    found = pairs(draws)
    if var_names is None and not found:
        got, remedy = f"the variables {sorted(map(str, draws))}", "Collect both when sampling."
        raise bad("data", got, "a weight `w` with its indicator `w_spike`", remedy)
    names = comparable(methods, var_names, found)
    check_pairs(methods, names, "var_names")
    return names


def element_labels(values: xr.DataArray, dims: Iterable[str]) -> list[str]:
    """Return a label for each element along these plates."""
    return [", ".join(map(str, at)) for at in product(*(values[dim].values for dim in dims))]


def values_by_name(
    reference: Mapping[Any, Any], like: Mapping[Any, xr.DataArray], names: Iterable[str]
) -> dict[str, xr.DataArray]:
    """Return the user's values of some variables, each matched to its own array."""
    missing = [name for name in names if name not in reference]
    if missing:
        got, expected = f"values of {sorted(map(str, reference))}", f"`{missing[0]}` among them"
        raise bad("reference", got, expected)
    return {name: align_to("reference", reference[name], like[name]) for name in names}


def align_to(what: str, values: Any, like: xr.DataArray) -> xr.DataArray:
    """Return numbers with the dimensions, labels and order of another array.

    Dimensions of the same name are matched by their labels, others by their place. An axis numbered
    from 0 counts as unlabelled.
    """
    name = getattr(values, "name", None)
    if isinstance(values, pd.Series | pd.DataFrame) and values.ndim == like.ndim:
        axes = dict(zip(like.dims, values.axes, strict=True))
        values = xr.DataArray(values.to_numpy(), axes, like.dims)
    if isinstance(values, xr.DataArray):
        values = reorder_like(what, values, like)
    if np.shape(values) != like.shape:
        raise bad(
            what,
            f"{f'`{name}` of ' if name else ''}the shape {np.shape(values)}",
            f"{like.shape}, that of `{like.name}` with the dimensions {like.dims}",
            "Give a value for each element, thinned alike.",
        )
    numbers = np.asarray(values)
    # draws of thousands of columns are not copied
    return like.copy(data=numbers if numbers.dtype.kind in "if" else numbers.astype(float))


def reorder_like(what: str, values: xr.DataArray, like: xr.DataArray) -> xr.DataArray:
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
    """Whether labels are the numbers from 0 on."""
    return labels.equals(pd.RangeIndex(len(labels)))


def check_top(top: int | None) -> None:
    """Refuse a number of rows that is none."""
    if top is not None and not (isinstance(top, Integral) and top >= 1):
        raise bad("top", repr(top), "a whole number, at least 1", "Leave it out to show all.")


def most_included(probs: Any, top: int | None) -> Int[np.ndarray, " K"]:
    """Return the places of the ``top`` highest probabilities in order, or all for None."""
    if top is None:
        return np.arange(len(probs))
    return np.argsort(-np.asarray(probs, float), kind="stable")[:top]


def is_constant(draws: xr.DataArray, dims: list[str]) -> xr.DataArray:
    """Whether all draws are equal, for each element."""
    return draws.max(dims) == draws.min(dims)


def statistics(draws: xr.Dataset) -> xr.Dataset:
    """Compute ``arviz_stats.summary`` along a dimension ``summary``, NaN where no chain moves."""
    check_plates(draws, RESERVED)
    dims = sample_dims(draws)
    kept, places = {}, {}
    for name, values in draws.data_vars.items():
        flat = values.transpose(*dims, ...).values
        flat = flat.reshape(*flat.shape[: len(dims)], -1)
        # an element takes a millisecond, and weights that are never in, mostly all, have the same
        moves = flat.any(axis=tuple(range(len(dims))))
        which = np.append(np.flatnonzero(moves), np.flatnonzero(~moves)[:1])
        kept[name] = [*dims, f"{name}_element"], flat[..., which]
        places[name] = np.where(moves, np.cumsum(moves) - 1, len(which) - 1)
    kind = "all" if "chain" in dims else "stats"
    elements = xr.Dataset(kept, {k: x for k, x in draws.coords.items() if k == TABLE})
    with np.errstate(divide="ignore", invalid="ignore"):
        table = arviz_stats.summary(
            elements, sample_dims=dims, kind=kind, fmt="xarray", round_to="none"
        )
        table = within_tables(table, elements)
    rows = xr.Dataset()
    for name, values in draws.data_vars.items():
        like = values.isel(dict.fromkeys(dims, 0), drop=True)
        cells = table[name].transpose("summary", ...).values[:, places[name]]
        like = like.expand_dims(summary=table["summary"].values)
        rows[name] = like.copy(data=cells.reshape(like.shape))
        if "chain" in dims:
            # ArviZ reports all draws as effective there, or an R-hat of 1e15
            still = is_constant(values, ["draw"]).all("chain")
            rows[name] = rows[name].where(~(still & rows["summary"].isin(CHAIN_DIAGNOSTICS)))
    return rows


def to_frame(values: xr.DataArray, dim: str = "summary") -> pd.DataFrame:
    """Return a column per element, labelled as in ArviZ, and a row per label of ``dim``."""
    return arviz_base.dataset_to_dataframe(values.to_dataset(), sample_dims=[dim])


def mean_and_interval(draws: xr.DataArray) -> list[xr.DataArray]:
    """Compute the mean and the ends of the interval with ``rcParams["stats.ci_prob"]``."""
    prob: Any = arviz_base.rcParams["stats.ci_prob"]
    ends = arviz_stats.eti(draws, prob=prob, dim=sample_dims(draws))
    return [mean(draws), *(ends.sel(ci_bound=end, drop=True) for end in ("lower", "upper"))]
