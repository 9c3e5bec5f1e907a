# SPDX-License-Identifier: Apache-2.0
"""Statistics of draws, by ArviZ."""

from numbers import Integral

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting.data import (
    check_plates,
    inclusion_draws,
    mean,
    sample_dims,
    spike_draws,
)

# dimensions that ArviZ gives to its tables
DIMS = ("summary", "ci_bound", "variable", "label")
CHAIN_DIAGNOSTICS = ("ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd")


def is_constant(draws: xr.DataArray, dims: list[str]) -> xr.DataArray:
    """Where all draws along ``dims`` are equal."""
    return draws.max(dims) == draws.min(dims)


def statistics(draws: xr.Dataset) -> xr.Dataset:
    """``arviz_stats.summary`` along a dimension ``summary``, NaN where a chain tells nothing."""
    check_plates(draws, DIMS)
    dims = sample_dims(draws)
    kind = "all" if "chain" in dims else "stats"
    with np.errstate(divide="ignore", invalid="ignore"):
        table = arviz_stats.summary(
            draws, sample_dims=dims, kind=kind, fmt="xarray", round_to="none"
        )
    # Without variation inside the chains ArviZ reports all draws as effective, or R-hat 1e15.
    within = ["draw"] if "chain" in dims else dims
    for name, values in draws.data_vars.items():
        still = is_constant(values, within).all([dim for dim in dims if dim not in within])
        table[name] = table[name].where(~(still & table["summary"].isin(CHAIN_DIAGNOSTICS)))
    return table


def inclusion_statistics(data: xr.DataTree, name: str) -> xr.DataArray:
    """Inclusion probability of a pair and how well the draws determine it."""
    draws = inclusion_draws(data, name)
    dims = sample_dims(draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse = arviz_stats.mcse(draws, sample_dims=dims, method="mean")
    # Draws that are all 0 or all 1 carry no information on how rare the other value is.
    silent = is_constant(draws, dims) & draws.isin([0, 1]).all(dims)
    rows = {"inclusion": mean(draws), "mcse_inclusion": mcse.where(~silent)}
    if "chain" in dims:
        rows["flips"] = abs(spike_draws(data, name).diff("draw")).sum("draw").mean("chain")
        spread = draws.mean("draw").std("chain", ddof=1) if draws.sizes["chain"] > 1 else np.nan
        rows["between_chain_sd"] = xr.zeros_like(rows["inclusion"]) + spread
    return xr.concat([row.expand_dims(summary=[key]) for key, row in rows.items()], dim="summary")


def to_frame(table: xr.Dataset) -> pd.DataFrame:
    """One row per element, labelled the way ArviZ does; one column per statistic."""
    # one by one: together, variables whose dimensions are in different orders get wrong labels
    frames = [
        arviz_base.dataset_to_dataframe(values.to_dataset(), sample_dims=["summary"])
        for values in table.data_vars.values()
    ]
    return pd.concat(frames, axis=1).T


def check_top(top: int | None) -> None:
    """Raise unless some weights are to be shown."""
    if top is not None and not (isinstance(top, Integral) and top >= 1):
        raise ValueError(
            f"top: got {top!r}, expected a whole number, at least 1; leave it out to show all."
        )
