# SPDX-License-Identifier: Apache-2.0
"""Statistics of chains of several completed tables, which differ as the tables do."""

from typing import Any

import arviz_stats
import numpy as np
import xarray as xr

TABLE = "table"
"""The coordinate along ``chain`` that numbers the tables of the chains."""


def tables_of(draws: Any) -> list[Any]:
    """Return the chains of each table; all together if they are of one."""
    number = draws.coords.get(TABLE)
    if number is None or number.dims != ("chain",):
        return [draws]
    return [draws.isel(chain=np.flatnonzero(number == k)) for k in np.unique(number)]


def error_of_mean(errors: list[Any]) -> Any:
    """Return the Monte Carlo error of a mean over tables, from those within each."""
    squares = xr.concat(errors, TABLE) ** 2
    return squares.sum(TABLE, min_count=1) ** 0.5 / len(errors)


def within_tables(statistics: xr.Dataset, draws: xr.Dataset) -> xr.Dataset:
    """Replace the diagnostics among ``arviz_stats.summary`` of all chains by those within tables,
    and add what lies between tables; chains of one table stay as they are."""
    parts = tables_of(draws)
    if len(parts) == 1:
        return statistics
    each = [diagnostics(part) for part in parts]
    joined, rows = xr.concat(each, TABLE), each[0]["summary"]
    new = joined.sum(TABLE).where(rows.str.startswith("ess"), joined.max(TABLE))
    new = new.where(~rows.str.startswith("mcse"), error_of_mean(each))
    share = share_between(parts).expand_dims(summary=["between_tables"])
    return xr.concat([statistics.drop_sel(summary=rows), share, new], "summary")


def diagnostics(part: xr.Dataset) -> xr.Dataset:
    """Compute ArviZ's diagnostics of the chains of a table, NaN where none moves."""
    table = arviz_stats.summary(
        part, sample_dims=["chain", "draw"], kind="diagnostics", fmt="xarray", round_to="none"
    )
    return table.where((part.max("draw") > part.min("draw")).any("chain"))


def share_between(parts: list[xr.Dataset]) -> xr.Dataset:
    """Compute the share of the variance that is between tables, by Rubin's rule."""
    dims = ["chain", "draw"]
    means = xr.concat([part.mean(dims) for part in parts], TABLE)
    within = sum(part.var(dims, ddof=1) for part in parts) / len(parts)
    between = means.var(TABLE, ddof=1) * (1 + 1 / len(parts))
    return between / (between + within)
