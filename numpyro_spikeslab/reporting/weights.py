# SPDX-License-Identifier: Apache-2.0
"""Statistics of spike-and-slab weights: inclusion, effects given inclusion, and groups."""

from typing import Any
import warnings

import arviz_stats
from jaxtyping import Float
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import (
    GROUP,
    PRIOR,
    align_to,
    mean,
    posterior,
    sample_dims,
)
from numpyro_spikeslab.reporting.by_table import error_of_mean, tables_of
from numpyro_spikeslab.support.messages import bad


def prior_inclusion(data: xr.DataTree, prior: Any, like: xr.DataArray) -> xr.DataArray | None:
    """Return prior inclusion probabilities in the shape of others, None if they are not known.

    :param prior: a number or an array; None for the one in the constant data, if any.
    """
    if prior is None:
        stored = arviz_data.constant(data, PRIOR, like)
        return None if stored is None else align_to("data", stored, like)
    prior = align_to(PRIOR, xr.full_like(like, prior) if np.ndim(prior) == 0 else prior, like)
    if not ((prior > 0) & (prior < 1)).all():
        raise bad(PRIOR, f"{prior.values!s:.200}", "probabilities in (0, 1)")
    return prior


def inclusion_statistics(data: xr.DataTree, name: str, prior: Any = None) -> xr.DataArray:
    """Compute the inclusion probability of a pair with its Monte Carlo diagnostics, and Bayes
    factors if that of the prior is known."""
    draws = arviz_data.inclusion_draws(data, name)
    dims, tables = sample_dims(draws), tables_of(draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = [arviz_stats.mcse(x, sample_dims=dims, method="mean") for x in tables]
    # draws that are all 0 or all 1 do not show how rare the other value is
    unknown = arviz_data.is_constant(draws, dims) & draws.isin([0, 1]).all(dims)
    rows = {"inclusion": mean(draws), "mcse_inclusion": error_of_mean(errors).where(~unknown)}
    if (prior := prior_inclusion(data, prior, rows["inclusion"])) is not None:
        rows[PRIOR] = prior
        with np.errstate(divide="ignore", invalid="ignore"):
            odds, prior_odds = (p / (1 - p) for p in (rows["inclusion"], prior))
            rows["bayes_factor"] = odds / prior_odds
    if "chain" in dims:
        changes = abs(arviz_data.spike_draws(data, name).diff("draw"))
        rows["flips"] = changes.sum("draw").mean("chain")
        with warnings.catch_warnings():
            # of single chains
            warnings.simplefilter("ignore", RuntimeWarning)
            variances = [x.mean("draw").var("chain", ddof=1) for x in tables]
        rows["between_chain_sd"] = (sum(variances) / len(tables)) ** 0.5
    return xr.concat(rows.values(), "summary").assign_coords(summary=list(rows))


def effect_statistics(
    data: xr.DataTree, name: str, ratio: str | None = None, prob: float | None = None
) -> xr.DataArray:
    """Compute mean, sd and interval of a weight among the draws that include it.

    :param ratio: a name, if the exponentials of mean and interval are wanted.
    :param prob: probability of the interval, by default that of ``rcParams``.
    """
    draws = posterior(data)[name].where(arviz_data.spike_draws(data, name) > 0)
    with warnings.catch_warnings():
        # of weights that are never in
        warnings.simplefilter("ignore", RuntimeWarning)
        table = arviz_stats.summary(
            draws.to_dataset(),
            sample_dims=sample_dims(draws),
            kind="stats",
            fmt="xarray",
            round_to="none",
            ci_prob=prob,
            skipna=True,
        )[name]
    if ratio is not None:
        table = np.exp(table.drop_sel(summary="sd"))
    names = [f"{ratio or 'effect'}_{row}" for row in table["summary"].values]
    return table.assign_coords(summary=[ratio or "effect", *names[1:]])


def group_statistics(data: xr.DataTree, name: str, prior: Any = None) -> xr.DataArray:
    """Compute what weights of a group have in common: their inclusion, and stored columns."""
    inclusions = inclusion_statistics(data, name, prior)
    like = inclusions.isel(summary=0, drop=True).rename(name)
    stored = [
        align_to("data", values, like).expand_dims(summary=[column])
        for column, values in summary_group(data).items()
        if values.dims == like.dims
    ]
    return xr.concat([inclusions, *stored], "summary")


def summary_group(data: xr.DataTree) -> xr.Dataset:
    """Return the stored part of a summary, empty if there is none."""
    return data.children.get("summary", xr.DataTree()).to_dataset()


def ratio_name(data: xr.DataTree) -> str:
    """Return the name of exponentials of effects, such as ``"odds_ratio"``, or refuse."""
    name = summary_group(data).attrs.get("ratio")
    if name is None:
        got = "True for data that do not name a likelihood with ratios"
        expected = "True for a sparse_regression with likelihood 'logit', 'poisson' or the like"
        raise bad("ratios", got, expected, "Leave it out: the effects are differences.")
    return name


def group_labels(data: xr.DataTree, weights: xr.DataArray) -> xr.DataArray | None:
    """Return the label of each weight's group, None if all are alone."""
    labels = arviz_data.constant(data, GROUP, weights)
    return None if labels is None else arviz_data.reorder_like("data", labels, mean(weights))


def groups_of(labels: Any, probs: Float[np.ndarray, " P"]) -> tuple[Any, Any, Any]:
    """Return for each weight the number of its group, the groups, and for each the weight that is
    most often in, since constant columns of a group are never in.

    :param labels: the group of each weight, None if all are alone.
    """
    numbers, groups = pd.factorize(np.arange(len(probs)) if labels is None else labels)
    order = np.lexsort((-probs, numbers))
    return numbers, groups, order[np.searchsorted(numbers[order], np.arange(len(groups)))]


def by_group(
    frame: pd.DataFrame, name: str, labels: Any, of_groups: list[str], top: int | None
) -> pd.DataFrame:
    """Put a row for each group above the rows of its weights, and keep the most included.

    :param labels: the group of each weight, None if all are alone.
    :param of_groups: columns that belong to the group and not to its weights.
    """
    probs = frame["inclusion"].to_numpy(float)
    numbers, groups, first = groups_of(labels, probs)
    is_shared = np.bincount(numbers)[numbers] > 1
    heads = frame.iloc[first][of_groups].set_axis([f"{name}[{group}]" for group in groups])
    weights = frame.copy()
    weights.loc[is_shared, of_groups] = np.nan
    # heads come first, and stay above in a stable sort
    both = pd.concat([heads[is_shared[first]], weights]).reindex(columns=frame.columns)
    rank = np.full(len(groups), len(groups))
    best = arviz_data.most_included(probs[first], top)
    rank[best] = np.arange(len(best))
    ranks = rank[np.concatenate([numbers[first][is_shared[first]], numbers])]
    return both.iloc[np.argsort(ranks, kind="stable")[: np.sum(ranks < len(groups))]]
