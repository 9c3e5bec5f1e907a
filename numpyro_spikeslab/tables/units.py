# SPDX-License-Identifier: Apache-2.0
"""Standardised tables and responses, and draws in their units."""

from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np
import xarray as xr

from numpyro_spikeslab.models.responses import ROUNDING, ResponseKind, moments
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.tables.chains import PROBABILITIES
from numpyro_spikeslab.tables.checks import Rows
from numpyro_spikeslab.tables.columns import TableColumns


class Scales(NamedTuple):
    """Means and standard deviations of columns, 1 if a column is not used, and of the response.

    - **noise** - noise of a row of weight 1, relative to a row of average weight.
    """

    x_mean: xr.DataArray
    x_sd: xr.DataArray
    used: xr.DataArray
    y_mean: float
    y_sd: float
    noise: float
    num_rows: int


def standardised(
    table: xr.DataArray, rows: Rows, columns: TableColumns, kind: ResponseKind
) -> tuple[Scales, tuple[Any, ...]]:
    """Return arguments of :func:`~numpyro_spikeslab.models.sparse_regression`: columns of variance
    1, constant ones as zeros, and the response in its unit; contrasts of both without intercept."""
    values = table.values
    if kind.has_intercept:
        index = np.repeat(np.arange(len(values)), (rows.weights * rows.seen).astype(int))
        values, rows = values[index], Rows(*(x[index] for x in rows))
        rows = rows._replace(weights=np.ones(len(index)))
    mean, sd = moments(values, rows.weights)
    used = sd > ROUNDING * np.max(np.abs(values), axis=0)
    if not used[~columns.always].any():
        raise bad("X", f"{table.shape[1]} constant columns", "one or more that vary")
    sd = np.where(used, sd, 1.0)
    X, y = (values - mean) / sd * used, rows.y
    y_mean, y_sd, noise = 0.0, 1.0, 1.0
    if kind.units is not None:
        y = y - rows.offset
        y_mean, y_sd = map(float, kind.units(y, rows.weights))
        y = (y - y_mean) / y_sd
    if not kind.has_intercept:
        noise = rows.weights.mean() ** 0.5
        X, y = (contrasts(x, rows.weights / noise**2) for x in (X, y))
    x_mean, x_sd, x_used = (table[0].copy(data=x) for x in (mean, sd, used))
    always = X[:, columns.always] if columns.always.any() else None
    totals = rows.totals if np.isfinite(rows.totals).all() else None
    offset = rows.offset if kind.units is None else None
    data = X[:, ~columns.always], y, always, offset, totals
    return Scales(x_mean, x_sd, x_used, y_mean, y_sd, noise, len(values)), data


def contrasts(
    values: Float[np.ndarray, "N *P"], weights: Float[np.ndarray, " N"]
) -> Float[np.ndarray, "N-1 *P"]:
    """Compute Helmert contrasts: subtract from each row the mean of the rows above, and scale.

    Their likelihood is marginal over a flat intercept. N centred rows would count one observation
    too many, and let the noise vanish once N - 1 columns are included.
    """
    weights = weights.reshape(-1, *[1] * (values.ndim - 1))
    total = np.cumsum(weights, axis=0)
    above = np.cumsum(weights * values, axis=0)[:-1] / total[:-1]
    return (values[1:] - above) * np.sqrt(weights[1:] * total[:-1] / total[1:])


def in_units(
    tree: xr.DataTree, scales: Scales, columns: TableColumns, rng: np.random.Generator
) -> xr.DataTree:
    """Convert draws to the units of the table and the response, and draw an intercept."""
    draws, stats = of_all_columns(tree, scales.used["feature"], columns)
    unit = scales.used * scales.y_sd / scales.x_sd
    w = draws["w"] * unit
    if "intercept" in draws:
        centre = draws["intercept"] * scales.y_sd
    else:
        # the mean of the response is independent of its contrasts
        sd = draws["sigma"] * scales.y_sd / scales.num_rows**0.5
        centre = sd * rng.normal(size=sd.shape)
    draws = draws.assign(
        w=w,
        w_slab=draws["w_slab"] * unit,
        w_spike=draws["w_spike"].astype(int, copy=False) * scales.used,
        intercept=scales.y_mean + centre - xr.dot(w, scales.x_mean, dim="feature"),
    )
    if "sigma" in draws:
        draws["sigma"] = draws["sigma"] * scales.y_sd * scales.noise
    stats[PROBABILITIES] = stats[PROBABILITIES] * scales.used
    return xr.DataTree.from_dict({"posterior": draws, "sample_stats": stats})


def of_all_columns(
    tree: xr.DataTree, names: xr.DataArray, columns: TableColumns
) -> tuple[xr.Dataset, xr.Dataset]:
    """Return draws and statistics with a spike for each column, 1 where it is always in."""
    draws, stats = posterior(tree), tree["sample_stats"].to_dataset()
    dim = draws["w"].dims[-1]
    if columns.groups is not None:
        of_groups = draws["w_spike"]
        draws = draws.drop_dims(str(of_groups.dims[-1]))
        draws["w_spike"] = draws["w"].dims, of_groups.values[..., list(columns.groups)]
    fill: dict[Any, float] = {"w_spike": 1.0, PROBABILITIES: 1.0}
    draws, stats = (
        x.rename({dim: "feature"})
        .assign_coords(feature=names.values[~columns.always])
        .reindex(feature=names, copy=False, fill_value={name: fill.get(name, np.nan) for name in x})
        for x in (draws, stats)
    )
    if "always" in draws:
        for name in "w", "w_slab":
            draws[name].loc[{"feature": names[columns.always]}] = draws["always"].values
        draws = draws.drop_dims(str(draws["always"].dims[-1]))
    return draws, stats
