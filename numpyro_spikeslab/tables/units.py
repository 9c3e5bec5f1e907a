# SPDX-License-Identifier: Apache-2.0
"""Standardised tables and responses, and draws in their units."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
import numpy as np
import xarray as xr

from numpyro_spikeslab.models.background import Background, background, contrasts
from numpyro_spikeslab.models.responses import ROUNDING, ResponseKind, moments
from numpyro_spikeslab.reporting.arviz_data import PRIOR, posterior
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.tables.chains import PROBABILITIES
from numpyro_spikeslab.tables.checks import Rows
from numpyro_spikeslab.tables.columns import TableColumns
from numpyro_spikeslab.tables.effects import Effect


class Units(NamedTuple):
    """Units of the columns and of the response.

    - **x** - of each column ``sd``, 1 if it is constant, and whether it ``varies``; ``mean`` where
      that is known, without which there is no intercept.
    - **noise** - noise of a row of weight 1, relative to a row of average weight.
    - **num_rows** - how often all rows count together.
    - **effects** - random effects by name, each with the means of its columns.
    - **background** - of the rows, if there is one.
    """

    x: xr.Dataset
    y_mean: float
    y_sd: float
    noise: float
    num_rows: int | float
    effects: Mapping[str, tuple[Effect, Float[np.ndarray, " G"]]] = MappingProxyType({})
    background: Background | None = None


def of_columns(names: Any, **values: Any) -> xr.Dataset:
    """Make a dataset of numbers of all columns."""
    return xr.Dataset({name: ("feature", x) for name, x in values.items()}, {"feature": names})


def standard_columns(X: Float[np.ndarray, "N P"], x: xr.Dataset) -> Float[np.ndarray, "N P"]:
    """Give columns the mean 0 and the variance 1; constant ones are zeros."""
    return (X - x["mean"].values) / x["sd"].values * x["varies"].values


def standardise(
    table: xr.DataArray,
    rows: Rows,
    always: Bool[np.ndarray, " P"],
    kind: ResponseKind,
    effects: Mapping[str, Effect] = MappingProxyType({}),
    covariance: Any = None,
) -> tuple[Units, dict[str, Any]]:
    """Compute arguments of :func:`~numpyro_spikeslab.models.sparse_regression` by name: columns of
    variance 1, constant ones as zeros, and the response in its unit; contrasts of both where they
    integrate the intercept out.

    :param covariance: of a background, up to a factor; `True` for small effects of all columns.
    """
    total: int | float = len(rows.y)
    if not kind.has_precisions:
        rows = repeat_rows(rows, kind)
        total = float(rows.weights.sum())
    count = rows.weights
    mean, sd = moments(rows.X, rows.weights)
    varies = sd > ROUNDING * np.max(np.abs(rows.X), axis=0)
    if not varies[~always].any():
        expected = "one or more columns that vary and may be out"
        raise bad("X", f"{np.sum(~varies)} constant columns of {len(varies)}", expected)
    sd = np.where(varies, sd, 1.0)
    x = of_columns(table["feature"], mean=mean, sd=sd, varies=varies)
    X = standard_columns(rows.X, x)
    means = np.average(rows.effects, axis=0, weights=rows.weights)
    Z = rows.effects - means
    y_mean, y_sd, noise, parts = 0.0, 1.0, 1.0, None
    if kind.units is not None:
        y_mean, y_sd = map(float, kind.units(rows))
    data = kind.in_units(rows, y_mean, y_sd)
    if kind.has_contrasts:
        # contrasts count as often as all rows less one
        scale = (total - 1) / (len(rows.y) - 1)
        count = np.full(len(rows.y) - 1, scale)
        if kind.has_precisions:
            noise = rows.weights.mean() ** 0.5
            scale = noise**2
        rotate: Any = partial(contrasts, weights=rows.weights / scale)
        if covariance is not None:
            K = X @ X.T if covariance is True else covariance
            parts = background(K, rows.weights / scale)
            rotate = parts.rotate
        X, data["y"], Z = map(rotate, (X, data["y"], Z))
    data["X"] = X[:, ~always]
    if parts is not None:
        data["background"] = parts.eigenvalues
    if (count != 1).any() and not kind.has_precisions:
        data["count"] = count
    if always.any():
        data["always"] = X[:, always]
    ends = np.cumsum([len(x.levels) for x in effects.values()])[:-1]
    of_each = zip(np.split(Z, ends, axis=1), np.split(means, ends), strict=True)
    of_levels, of_effects = {}, {}
    for (name, effect), (columns, centre) in zip(effects.items(), of_each, strict=False):
        of_levels[name], of_effects[name] = columns / effect.unit, (effect, centre)
    if effects:
        data["effects"] = of_levels
    return Units(x, y_mean, y_sd, noise, total, of_effects, parts), data


def repeat_rows(rows: Rows, kind: ResponseKind) -> Rows:
    """Repeat rows that count a whole number of times; if that makes many, return those seen.

    To draw the auxiliary variables of a row that counts often takes as long as those of four.
    """
    rows = Rows(*(x[rows.seen] for x in rows))
    is_few = rows.weights.sum() <= 4 * len(rows.y) or not kind.has_fractions
    if (rows.weights != np.round(rows.weights)).any() or not is_few:
        return rows
    index = np.repeat(np.arange(len(rows.y)), rows.weights.astype(int))
    return Rows(*(x[index] for x in rows))._replace(weights=np.ones(len(index)))


def convert_to_units(
    tree: xr.DataTree, units: Units, columns: TableColumns, rng: np.random.Generator
) -> xr.DataTree:
    """Convert draws to the units of the table and the response, and draw an intercept, but for
    cut points or hazards, which take its place."""
    draws, stats = expand_to_all_columns(tree, units.x["feature"], columns)
    varies = units.x["varies"]
    unit = varies * units.y_sd / units.x["sd"]
    # in place, for there may be many
    for x, factor in (draws["w"], unit), (draws["w_spike"], varies), (stats[PROBABILITIES], varies):
        x.values *= factor.values
    centre = draws.get("intercept", 0.0) * units.y_sd
    if "sigma" in draws and "intercept" not in draws:
        # the mean of the response is independent of its contrasts
        sd = draws["sigma"] * units.y_sd / units.num_rows**0.5
        centre = sd * rng.normal(size=sd.shape)
    # `inclusion` is the posterior probability of a column
    draws = draws.rename(inclusion=PRIOR) if "inclusion" in draws else draws
    if "mean" in units.x:
        # of the rounded weights, for means may be large; not by xarray, which copies all as floats
        shift = np.einsum("...p,p->...", draws["w"].values, units.x["mean"].values)
        for name, (effect, means) in units.effects.items():
            in_unit, b = units.y_sd / effect.unit, draws[f"effect_{name}"]
            named = b.rename({b.dims[-1]: effect.group})
            named = in_unit * named.assign_coords({effect.group: effect.levels})
            shift += named.values @ means
            draws = draws.drop_dims(str(b.dims[-1])).assign({f"effect_{name}": named})
            if f"sd_{name}" in draws:
                draws[f"sd_{name}"] = draws[f"sd_{name}"] * in_unit
        if "cutpoints" in draws:
            draws["cutpoints"] = draws["cutpoints"] + shift[..., None]
        elif "log_hazard" in draws:
            draws["log_hazard"] = draws["log_hazard"] + units.y_mean - shift[..., None]
        else:
            draws["intercept"] = units.y_mean + centre - shift
    if "sigma" in draws:
        draws["sigma"] = draws["sigma"] * units.y_sd * units.noise
    if "background_scale" in draws:
        draws["background_scale"] = draws["background_scale"] * units.y_sd
    return xr.DataTree.from_dict({"posterior": draws, "sample_stats": stats})


def expand_to_all_columns(
    tree: xr.DataTree, names: xr.DataArray, columns: TableColumns
) -> tuple[xr.Dataset, xr.Dataset]:
    """Give draws and statistics a spike for each column, 1 where it is always in."""
    draws, stats = posterior(tree), tree["sample_stats"].to_dataset()
    dim = draws["w"].dims[-1]
    if columns.groups is not None:
        of_groups = draws["w_spike"]
        draws = draws.drop_dims(str(of_groups.dims[-1]))
        draws["w_spike"] = draws["w"].dims, of_groups.values[..., list(columns.groups)]
    fill: dict[Any, float] = {"w_spike": 1, PROBABILITIES: 1}
    draws, stats = (
        x.rename({dim: "feature"})
        .assign_coords(feature=names.values[~columns.always])
        .reindex(feature=names, copy=False, fill_value={name: fill.get(name, np.nan) for name in x})
        for x in (draws, stats)
    )
    if "always" in draws:
        draws["w"].loc[{"feature": names[columns.always]}] = draws["always"].values
        draws = draws.drop_dims(str(draws["always"].dims[-1]))
    return draws, stats
