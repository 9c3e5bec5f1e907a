# SPDX-License-Identifier: Apache-2.0
"""What ArviZ data of a spike-and-slab posterior hold.

A *pair* is a weight ``w`` of the ``posterior`` group beside which its indicator ``w_spike``
lies. Markov chains have the dimensions ``(chain, draw)``, variational draws (from
``arviz_base.from_numpyro_svi``) the one dimension ``sample``. All other dimensions are *plates*.
"""

from collections.abc import Hashable, Iterable, Mapping
import re
from typing import Any

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

WEIGHTS, FUNCTIONS = "W", "phi"  # as the sites of `models.mtmkl` are called
KINDS = ("model", "summary", "ci_bound")  # dimensions of tables, which are no plates
SETS = "credible_sets"  # of a fit, among its sample statistics, with the name of the weight behind


def posterior(data: xr.DataTree) -> xr.Dataset:
    """The posterior draws of ``data``, after a check that there are some."""
    if not isinstance(data, xr.DataTree) or "posterior" not in data.children:
        raise ValueError(
            f"data: got {type(data).__name__} without a `posterior` group, expected an xarray "
            "DataTree with one; make it with arviz_base.from_numpyro or "
            "arviz_base.from_numpyro_svi."
        )
    return data["posterior"].to_dataset()


def sample_dims(draws: xr.Dataset | xr.DataArray) -> list[str]:
    """``["chain", "draw"]`` of Markov chains, ``["sample"]`` of variational draws."""
    for dims in (["chain", "draw"], ["sample"]):
        if set(dims) <= set(draws.dims):
            return dims
    raise ValueError(
        f"data: its posterior has the dimensions {tuple(map(str, draws.dims))}, expected "
        "('chain', 'draw') or 'sample' among them; make it with arviz_base.from_numpyro or "
        "arviz_base.from_numpyro_svi."
    )


def pairs(draws: xr.Dataset) -> list[str]:
    """Names of the spike-and-slab weights, in the order of ``draws``."""
    return [str(name) for name in draws.data_vars if f"{name}_spike" in draws.data_vars]


def select(
    draws: xr.Dataset, var_names: str | Iterable[str] | None, default: Iterable[str] = ()
) -> list[str]:
    """``var_names``, or ``default`` for None, as a list of variables that ``draws`` has."""
    wanted = default if var_names is None else var_names
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in draws.data_vars]
    if unknown or not names:
        raise ValueError(
            f"var_names: got {unknown or var_names}, expected one or more of "
            f"{sorted(map(str, draws.data_vars))}; correct the spelling, or collect the site when "
            "sampling."
        )
    return names


def check_plates(draws: xr.Dataset, taken: Iterable[str]) -> None:
    """Raise where plates have names that what is made of the draws has for itself."""
    clash = sorted(set(map(str, draws.dims)) & set(taken))
    if clash:
        raise ValueError(
            f"data: plates of its posterior are called {clash}, names that tables and pictures "
            "have for themselves; give them others by `dims` of arviz_base.from_numpyro."
        )


def shaped_like(values: xr.DataArray, weight: xr.DataArray, dims: list[str]) -> xr.DataArray:
    """``values`` as floats with the dimensions and coordinates of ``weight``."""
    weight = weight.transpose(*dims, ...)
    if set(values.dims) == set(weight.dims):
        values = labelled_like(values.transpose(*weight.dims), weight)
    values = values.transpose(*dims, ..., missing_dims="ignore")
    for own, wanted in zip(values.dims, weight.dims, strict=False):
        if own != wanted and are_permuted(values.indexes.get(own), weight.indexes.get(wanted)):
            raise ValueError(
                f"data: by its numbers `{values.name}` has the elements of `{weight.name}` in "
                f"another order. {_naming(values, weight, dims)}"
            )
    # Their plates may be unnamed where those of the weight are named, so only shapes can match.
    if values.shape != weight.shape:
        raise ValueError(
            f"data: `{values.name}` has the shape {values.shape}, expected {weight.shape}, that "
            f"of `{weight.name}`; store both with the same thinning and the same plates. "
            f"{_naming(values, weight, dims)}"
        )
    return weight.copy(data=values.values.astype(float))


def are_permuted(one: pd.Index | None, other: pd.Index | None) -> bool:
    """Whether two dimensions have the same labels in another order."""
    if one is None or other is None or len(one) != len(other) or one.equals(other):
        return False
    return one.is_unique and bool(other.isin(one).all()) and other.is_unique


def labelled_like(values: xr.DataArray, like: xr.DataArray) -> xr.DataArray:
    """The same values in the order of the labels of another array, where both have the same."""
    for dim in like.dims:
        if dim in values.indexes and dim in like.indexes:
            own, wanted = values.indexes[dim], like.indexes[dim]
            if own.is_unique and not own.equals(wanted) and wanted.isin(own).all():
                values = values.sel({dim: wanted})
    return values


def spike_draws(data: xr.DataTree, name: str) -> xr.DataArray:
    """Draws of the indicator of the pair ``name``, shaped like it."""
    draws = posterior(data)
    spike, weight = draws[f"{name}_spike"], draws[name]
    if is_grouped(draws, name):
        # of a group of weights, which are zero without it
        return (weight != 0).astype(float)
    return shaped_like(spike, weight, sample_dims(draws))


def is_grouped(draws: xr.Dataset, name: str) -> bool:
    """Whether weights of the pair ``name`` share spikes, which then have a plate of their own."""
    spike, weight = draws[f"{name}_spike"], draws[name]
    if f"{name}_group" in spike.dims:
        return True
    dims = sample_dims(draws)
    sizes = [[size for dim, size in x.sizes.items() if dim not in dims] for x in (spike, weight)]
    if len(sizes[0]) != 1 or len(sizes[1]) != 1 or sizes[0] > sizes[1]:
        return False
    if sizes[0] < sizes[1]:
        return True
    # as many groups as weights may be in another order; a slab is 0 by rounding once in millions
    own, of_weights = (x.transpose(*dims, ...).values for x in (spike, weight))
    if own.shape != of_weights.shape or not np.isin(own, (0, 1)).all():
        return False
    differ = ((of_weights != 0) != (own > 0)) & np.isfinite(of_weights)
    return bool(np.mean(differ) > 1e-3)


def inclusion_draws(data: xr.DataTree, name: str) -> xr.DataArray:
    """Draws whose mean is the inclusion probability of the pair ``name``, shaped like it.

    Rao-Blackwellised probabilities win over the indicator: they have its mean and less noise.
    """
    draws = posterior(data)
    stats = data["sample_stats"].data_vars if "sample_stats" in data.children else {}
    for key, values in stats.items():
        if are_inclusion_probabilities(key, name):
            found = shaped_like(values, draws[name], sample_dims(draws))
            check_probabilities(found, spike_draws(data, name), values)
            return found
    return spike_draws(data, name)


def _naming(values: xr.DataArray, like: xr.DataArray, dims: list[str]) -> str:
    """How selections find the plates of what ArviZ does not name."""
    own, wanted = ([dim for dim in x.dims if dim not in dims] for x in (values, like))
    return (
        f"Before some are selected or reordered, give the plates {own} the names and labels of "
        f"{wanted}, by xarray's rename and assign_coords."
    )


def check_probabilities(probs: xr.DataArray, spikes: xr.DataArray, stored: xr.DataArray) -> None:
    """Raise if probabilities cannot be those with which the indicators were drawn.

    :param stored: the probabilities as they were stored, for the message.
    """
    dims = sample_dims(spikes)
    number = np.prod([spikes.sizes[dim] for dim in dims])
    gap = abs(probs.mean(dims) - spikes.mean(dims)).max()
    # six standard errors of a coin, and room for chains that mix slowly
    if gap > 0.2 + 3 / np.sqrt(number):
        raise ValueError(
            f"data: the means of `{stored.name}` differ by {float(gap):.2f} from those of the "
            f"indicators, as of other elements. {_naming(stored, spikes, dims)}"
        )


def are_inclusion_probabilities(key: Hashable, name: str) -> bool:
    """Whether a sampler, or a block of one, has stored those of the pair ``name`` as ``key``."""
    return f".{key}".endswith(f".inclusion_probabilities.{name}")


def mean(draws: xr.DataArray) -> xr.DataArray:
    """Mean of draws, not a number where one of them is not."""
    return draws.mean(sample_dims(draws), skipna=False)


def inclusion(data: xr.DataTree, name: str) -> xr.DataArray:
    """Inclusion probabilities of a pair, shaped like its weight."""
    return mean(inclusion_draws(data, name))


def check_finite(draws: xr.DataArray) -> None:
    """Raise where draws are not numbers, of which a picture would show nothing."""
    if not np.isfinite(draws.values).all():
        raise ValueError(
            f"data: `{draws.name}` is not finite in some draws; leave these draws out, and look "
            "for what went wrong in them."
        )


def posterior_mean(data: xr.DataTree, name: str) -> xr.DataArray:
    """Posterior mean of a variable."""
    return mean(posterior(data)[name])


def central_interval(draws: xr.Dataset | xr.DataArray, prob: float | None = None) -> Any:
    """Lower and upper end, ``arviz_base.rcParams["stats.ci_prob"]`` of the draws apart."""
    prob = arviz_base.rcParams["stats.ci_prob"] if prob is None else prob
    return arviz_stats.eti(draws, prob=prob, dim=sample_dims(draws))


def mean_and_interval(draws: xr.DataArray) -> list[xr.DataArray]:
    """Posterior mean, and the ends of the central interval."""
    interval = central_interval(draws)
    ends = [interval.sel(ci_bound=end, drop=True) for end in ("lower", "upper")]
    return [mean(draws), *ends]


def function_plate(draws: xr.Dataset, weights: str, functions: str) -> str:
    """The dimension of the latent functions, which is the one that the weights share with them."""
    for argument, name in (("weights", weights), ("functions", functions)):
        if name not in draws.data_vars:
            raise ValueError(
                f"{argument}: got {name!r}, expected one of {sorted(map(str, draws.data_vars))}; "
                f"name the variable of the {argument}, or collect the site when sampling."
            )
    shared = shared_plates(draws, weights, functions)
    if len(shared) != 1:
        raise ValueError(
            f"data: `{weights}` has the dimensions {draws[weights].dims} and `{functions}` "
            f"{draws[functions].dims}, expected one plate in common, that of the functions; make "
            f"the data with dims={{{weights!r}: ['task', 'latent'], "
            f"{functions!r}: ['latent', 'point']}}."
        )
    return shared[0]


def shared_plates(draws: xr.Dataset, *names: str) -> list[str]:
    """Dimensions that all of the variables have, without those of the samples."""
    dims = set.intersection(*(set(draws[name].dims) for name in names))
    return sorted(map(str, dims - set(sample_dims(draws))))


def plates_besides(draws: xr.Dataset, name: str, plate: str) -> list[str]:
    """Plates of a variable except one, in its order."""
    return [str(dim) for dim in draws[name].dims if dim not in (*sample_dims(draws), plate)]


def are_one_fit(draws: xr.Dataset) -> bool:
    """Whether all draws are of one variational fit, in which every function has its place."""
    return "chain" not in {*draws.dims, *draws.coords}


def has_numbered_kernels(draws: xr.Dataset, functions: str) -> bool:
    """Whether there are parameters of the kernel of one function alone, which others have not."""
    named = re.compile(rf"{re.escape(functions)}_\d+_")
    return any(named.match(str(name)) for name in draws.data_vars)


def has_functions(draws: xr.Dataset) -> bool:
    """Whether there are weights and latent functions with their usual names."""
    names = {WEIGHTS, FUNCTIONS}
    return names <= set(draws.data_vars) and len(shared_plates(draws, *names)) == 1


def check_labels(given: xr.DataArray, like: xr.DataArray) -> None:
    """Raise where some labels are those of another array and others are not."""
    for dim in like.dims:
        if dim in given.indexes and dim in like.indexes:
            own, wanted = given.indexes[dim], like.indexes[dim]
            known = own.isin(wanted) | own.equals(pd.RangeIndex(len(own)))
            if known.any() and not known.all():
                raise ValueError(
                    f"reference: `{like.name}` has the labels {own[~known].tolist()!s:.200} of "
                    f"{dim!r}, expected {wanted.tolist()!s:.200}; correct the spelling."
                )


def first_draw(draws: xr.Dataset) -> xr.Dataset:
    """The first of the draws."""
    return draws.isel(dict.fromkeys(sample_dims(draws), 0))


def given_values(
    reference: Mapping[Any, Any], like: Mapping[Any, xr.DataArray], names: Iterable[str]
) -> xr.Dataset:
    """The user's values of some variables, after a check that each is shaped like its own."""
    values = {}
    for name in names:
        if name not in reference:
            raise ValueError(
                f"reference: got values of {sorted(map(str, reference))}, expected `{name}` among "
                "them; give values of all variables that are drawn or matched."
            )
        given, dims = reference[name], like[name].dims
        if isinstance(given, pd.Series | pd.DataFrame) and given.ndim == len(dims):
            given = xr.DataArray(given.to_numpy(), dict(zip(dims, given.axes, strict=True)))
        if isinstance(given, xr.DataArray) and set(given.dims) == set(dims):
            given = labelled_like(given.transpose(*dims), like[name])
            check_labels(given, like[name])
        if np.shape(given) != like[name].shape:
            raise ValueError(
                f"reference: `{name}` has the shape {np.shape(given)}, expected "
                f"{like[name].shape}; give one value per element of the same model, in the order "
                f"of the dimensions {like[name].dims}."
            )
        values[name] = like[name].copy(data=np.asarray(given, dtype=float))
    return xr.Dataset(values)
