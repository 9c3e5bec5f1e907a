# SPDX-License-Identifier: Apache-2.0
"""Statistics of draws, by ArviZ."""

from typing import Any

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting.arviz_data import (
    check_plates,
    inclusion_draws,
    mean,
    sample_dims,
    spike_draws,
)

RESERVED = ("summary", "ci_bound", "variable", "label")
"""Dimensions of ArviZ's tables."""

CHAIN_DIAGNOSTICS = ("ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd")


def is_constant(draws: xr.DataArray, dims: list[str]) -> xr.DataArray:
    return draws.max(dims) == draws.min(dims)


def statistics(draws: xr.Dataset) -> xr.Dataset:
    """Compute ``arviz_stats.summary`` along a dimension ``summary``, NaN where no chain moves."""
    check_plates(draws, RESERVED)
    dims = sample_dims(draws)
    kind = "all" if "chain" in dims else "stats"
    with np.errstate(divide="ignore", invalid="ignore"):
        table = arviz_stats.summary(
            draws, sample_dims=dims, kind=kind, fmt="xarray", round_to="none"
        )
    if "chain" in dims:
        # ArviZ reports all draws as effective there, or an R-hat of 1e15
        for name, values in draws.data_vars.items():
            still = is_constant(values, ["draw"]).all("chain")
            table[name] = table[name].where(~(still & table["summary"].isin(CHAIN_DIAGNOSTICS)))
    return table


def inclusion_statistics(data: xr.DataTree, name: str) -> xr.DataArray:
    """Compute the inclusion probability of a pair with its Monte Carlo diagnostics."""
    draws = inclusion_draws(data, name)
    dims = sample_dims(draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse = arviz_stats.mcse(draws, sample_dims=dims, method="mean")
    # draws that are all 0 or all 1 do not show how rare the other value is
    unknown = is_constant(draws, dims) & draws.isin([0, 1]).all(dims)
    rows = {"inclusion": mean(draws), "mcse_inclusion": mcse.where(~unknown)}
    if "chain" in dims:
        rows["flips"] = abs(spike_draws(data, name).diff("draw")).sum("draw").mean("chain")
        spread = draws.mean("draw").std("chain", ddof=1) if draws.sizes["chain"] > 1 else np.nan
        rows["between_chain_sd"] = xr.zeros_like(rows["inclusion"]) + spread
    return xr.concat(rows.values(), "summary").assign_coords(summary=list(rows))


def to_frame(values: xr.DataArray, dim: str = "summary") -> pd.DataFrame:
    """Return a column per element, labelled as in ArviZ, and a row per label of ``dim``."""
    return arviz_base.dataset_to_dataframe(values.to_dataset(), sample_dims=[dim])


def mean_and_interval(draws: xr.DataArray) -> list[xr.DataArray]:
    """Compute the mean and the ends of the interval with ``rcParams["stats.ci_prob"]``."""
    prob: Any = arviz_base.rcParams["stats.ci_prob"]
    ends = arviz_stats.eti(draws, prob=prob, dim=sample_dims(draws))
    return [mean(draws), *(ends.sel(ci_bound=end, drop=True) for end in ("lower", "upper"))]
