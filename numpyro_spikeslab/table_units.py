# SPDX-License-Identifier: Apache-2.0
"""Standardised tables and responses, and draws in their units."""

from typing import NamedTuple

from jaxtyping import Array, Float
import numpy as np
import xarray as xr

import jax.numpy as jnp

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.table_chains import PROBABILITIES
from numpyro_spikeslab.table_checks import ROUNDING


class Scales(NamedTuple):
    """Means and standard deviations of columns, 1 if a column is not used, and of the response."""

    x_mean: xr.DataArray
    x_sd: xr.DataArray
    used: xr.DataArray
    y_mean: float
    y_sd: float


def standardised(
    table: xr.DataArray, response: np.ndarray
) -> tuple[Scales, tuple[Float[Array, "C P"], Float[Array, " C"]]]:
    """Return contrasts of columns and response of variance 1, constant columns as zeros."""
    mean, sd = table.mean("row", skipna=False), table.std("row", skipna=False)
    used = sd > ROUNDING * abs(table).max("row")
    if not used.any():
        raise bad("X", f"{table.shape[1]} constant columns", "one or more that vary")
    sd = sd.where(used, 1.0)
    columns = ((table - mean) / sd * used).values
    y_mean, y_sd = float(response.mean()), float(response.std())
    X, y = (jnp.asarray(contrasts(x), float) for x in (columns, (response - y_mean) / y_sd))
    return Scales(mean, sd, used, y_mean, y_sd), (X, y)


def contrasts(values: Float[np.ndarray, "N *P"]) -> Float[np.ndarray, "N-1 *P"]:
    """Compute Helmert contrasts: subtract from each row the mean of the rows above, and scale.

    Their likelihood is marginal over a flat intercept. N centred rows would count one observation
    too many, and let the noise vanish once N - 1 columns are included.
    """
    count = np.arange(1.0, len(values)).reshape(-1, *[1] * (values.ndim - 1))
    above = np.cumsum(values, axis=0)[:-1] / count
    return (values[1:] - above) * np.sqrt(count / (count + 1))


def in_units(
    tree: xr.DataTree, scales: Scales, num_rows: int, rng: np.random.Generator
) -> xr.DataTree:
    """Convert draws to the units of the table and the response, and draw an intercept."""
    draws, stats = posterior(tree), tree["sample_stats"].to_dataset()
    draws = draws.astype(float).assign_coords(feature=scales.used["feature"])
    stats = stats.assign_coords(feature=scales.used["feature"])
    unit = scales.used * scales.y_sd / scales.x_sd
    w, sigma = draws["w"] * unit, draws["sigma"] * scales.y_sd
    # the mean of the response is independent of its contrasts
    centre = scales.y_mean + sigma / num_rows**0.5 * rng.normal(size=sigma.shape)
    draws = draws.assign(
        w=w,
        w_slab=draws["w_slab"] * unit,
        w_spike=draws["w_spike"].astype(int) * scales.used,
        sigma=sigma,
        intercept=centre - xr.dot(w, scales.x_mean, dim="feature"),
    )
    stats[PROBABILITIES] = stats[PROBABILITIES].astype(float) * scales.used
    return xr.DataTree.from_dict({"posterior": draws, "sample_stats": stats})
