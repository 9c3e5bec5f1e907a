# SPDX-License-Identifier: Apache-2.0
"""Credible sets of correlated columns, from draws."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import LinearConstraint, milp
import xarray as xr

from numpyro_spikeslab.algebra import correlation
from numpyro_spikeslab.algebra.correlation import COVERAGE, MIN_CORRELATION, twins
from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import SETS, pairs, plates, posterior
from numpyro_spikeslab.reporting.weights import group_labels, groups_of, prior_inclusion
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers, in_pandas

MORE_OFTEN = 1.5
"""Least ratio of a column's inclusion in draws without members to that in draws with one.

A ratio of 1 lets in unrelated columns by chance; 2 rejects columns that share two effects."""


RARE = 0.01
"""Inclusion probability up to which no set at a false discovery rate grows from a column."""


def credible_sets(
    data: xr.DataTree,
    var_name: str,
    X: Any,
    coverage: float = COVERAGE,
    min_correlation: float = MIN_CORRELATION,
    *,
    fdr: float | None = None,
) -> pd.DataFrame:
    """Find small sets of columns that hold an effect, each with a given probability or all together
    at a false discovery rate.

    Correlated columns share an effect: each may have a small inclusion probability although it is
    certain that one has the effect. As in SuSiE (Wang, Sarkar, Carbonetto and Stephens,
    2020), a credible set is a set of columns such that

    - in at least ``coverage`` of the draws one or more members are included;
    - all are correlated by at least ``min_correlation`` with each other;
    - none can be left out. Columns that are equal but for their units are all in one set or in
      none, because data cannot distinguish them.

    A set grows from its column of highest inclusion probability. A column may join if it is
    included more than 1.5 times as often in draws without members as in draws with one, since
    columns of one effect take turns. Sets are disjoint. An effect that no correlated columns
    explain has no set.

    With ``fdr`` the sets are those of the largest expected number of effects, each divided by the
    size of its set, of which at most this share is false (BLiP; Spector and Janson, 2023). So clear
    effects pay for unclear ones, and columns that data can tell apart are sets of their own. The
    sets to choose from grow as above, and ``coverage`` has no part in it.

    A group of weights (see :func:`summary`) is one member. Its correlation with others is that of
    its columns' sum, weighted by posterior means. Weights that are always in are left out.

    Chains must mix to distinguish the columns of one effect from those of another. For a factorised
    fit, whose draws give sets that are too small, see :meth:`PairedGuide.credible_sets()
    <numpyro_spikeslab.PairedGuide.credible_sets>`.

    :param data: ArviZ data of Markov chains or variational draws.
    :param var_name: a spike-and-slab weight with one plate.
    :param X: the table that the weights multiply, in any units, shape (N, P): numpy array, or
        DataFrame of any library, whose columns are the labels of the weight, or label it if it is
        merely numbered.
    :param coverage: least probability of a set, in (0, 1].
    :param min_correlation: least absolute correlation, in [0, 1]. The default is SuSiE's.
    :param fdr: largest share of sets without an effect that is to be expected, in (0, 1), such as
        0.1; `None` for sets of probability ``coverage``.
    :returns: a DataFrame with one row per set: ``members``, a tuple of labels, the most included
        first; ``size``; ``probability`` that the set holds an effect; ``purity``, the smallest
        absolute correlation among its members.
    :raises ValueError: if ``var_name`` is not such a weight, if ``X`` has other columns or NaN, or
        if a number is outside its range.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import credible_sets
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(50, 3))
    >>> X[:, 1] = X[:, 0] + 0.1 * X[:, 1]      # hard to tell from the first
    >>> first = rng.binomial(1, 0.5, size=(4, 100))
    >>> spike = np.stack([first, 1 - first, 0 * first], axis=-1)
    >>> data = arviz_base.from_dict({"posterior": {"w": 1.0 * spike, "w_spike": spike}})
    >>> credible_sets(data, "w", X)[["size", "probability"]]
         size  probability
    set
    0       2          1.0
    """
    correlation.check_limits(coverage, min_correlation)
    if fdr is not None and not 0 < fdr < 1:
        raise bad("fdr", fdr, "a share between 0 and 1, like 0.1, or None")
    spikes = flat_spikes(data, var_name)
    table, labels, included = units(data, posterior(data)[var_name], spikes, X)
    unit = correlation.unit_columns(table)
    if fdr is None:
        sets = disjoint_sets(included, unit, coverage, min_correlation)
    else:
        sets = sets_at_rate(included, unit, fdr, min_correlation)
    rows = [
        (
            tuple(labels[member] for member in members),
            len(members),
            included[:, members].any(axis=1).mean(),
            correlation.purity(unit[:, members]),
        )
        for members in sets
    ]
    columns = ["members", "size", "probability", "purity"]
    return pd.DataFrame(rows, columns=columns).rename_axis("set")


def flat_spikes(data: xr.DataTree, name: str) -> xr.DataArray:
    """Return the indicators of P weights in all D draws, (D, P)."""
    draws = posterior(data)
    arviz_data.select(draws, name)
    dims = plates(draws[name])
    if name not in pairs(draws) or arviz_data.is_grouped(draws, name) or len(dims) != 1:
        got = f"{name!r} with the dimensions {dims}"
        expected = f"one of {pairs(draws)} with a spike for each column of X"
        remedy = "Choose one task, with `sel` of xarray, or look at the spikes of groups."
        raise bad("var_name", got, expected, remedy)
    spikes = arviz_data.spike_draws(data, name)
    return spikes.stack(all_draws=arviz_data.sample_dims(draws)).transpose("all_draws", ...)


def units(
    data: xr.DataTree, weights: xr.DataArray, spikes: xr.DataArray, X: Any
) -> tuple[np.ndarray, list, np.ndarray]:
    """Return columns, labels and draws of inclusion of weights and groups that may be out."""
    table, labels = columns_of(X, spikes)
    included, effects = spikes.values > 0, arviz_data.mean(weights)
    titles = group_labels(data, weights)
    groups = None if titles is None else titles.values
    numbers, distinct, first = groups_of(groups, included.mean(axis=0))
    columns, names = table[:, first], [labels[place] for place in first]
    for group in np.flatnonzero(np.bincount(numbers) > 1):
        members = np.flatnonzero(numbers == group)
        columns[:, group] = table[:, members] @ effects.values[members]
        names[group] = distinct[group]
    prior = prior_inclusion(data, None, effects)
    may_be_out = np.ones(len(first), bool) if prior is None else prior.values[first] != 1
    names = [name for name, kept in zip(names, may_be_out, strict=True) if kept]
    return columns[:, may_be_out], names, included[:, first[may_be_out]]


def columns_of(X: Any, spikes: xr.DataArray) -> tuple[np.ndarray, list]:
    """Return the columns of ``X`` in the order of the weights, and the labels of the weights."""
    X = in_pandas("X", X)
    table, plate = as_numbers("X", X), spikes.dims[1]
    labels = spikes.indexes[plate]
    if table.ndim != 2 or table.shape[1] != len(labels) or len(table) < 2:
        expected = f"(N, {len(labels)}), a column for each element of `{spikes.name}` and two rows"
        raise bad("X", f"the shape {table.shape}", expected, "Give the table of the model.")
    if not isinstance(X, pd.DataFrame):
        return table, labels.tolist()
    columns = xr.DataArray(table.T, {plate: X.columns}, [plate, "row"])
    values = arviz_data.reorder_like("X", columns, spikes[0]).values.T
    is_labelled = not arviz_data.is_numbered(labels) or set(X.columns) == set(labels)
    return values, (labels if is_labelled else X.columns).tolist()


def disjoint_sets(
    spikes: np.ndarray, unit: np.ndarray, coverage: float, least: float
) -> Iterator[list[int]]:
    """Find the members of each set, from the most included column on."""
    inclusion = spikes.mean(axis=0)
    free = np.ones(len(inclusion), bool)
    for seed in np.argsort(-inclusion, kind="stable").tolist():
        if inclusion[free].sum() < coverage:
            # no set of these reaches it, and thousands of columns take long to try
            return
        members = grown(seed, spikes, unit, free, coverage, least) if free[seed] else []
        if members:
            members = pruned(members, spikes, coverage)
            members = np.flatnonzero(twins(unit, members) & free).tolist()
            free[members] = False
            yield sorted(members, key=lambda member: -inclusion[member])


def grown(
    seed: int,
    spikes: np.ndarray,
    unit: np.ndarray,
    free: np.ndarray,
    coverage: float,
    least: float,
) -> list[int]:
    """Grow a set from one free column, with its twins; empty if it does not reach the coverage."""
    members = np.flatnonzero(twins(unit, [seed]) & free).tolist()
    correlated = free & (abs(unit[:, seed] @ unit) >= least)
    if spikes[:, members].any(axis=1).mean() + spikes[:, correlated].mean(axis=0).sum() < coverage:
        return []
    sets = growing(seed, spikes, unit, free, least)
    return next((x for x in sets if spikes[:, x].any(axis=1).mean() >= coverage), [])


def growing(
    seed: int, spikes: np.ndarray, unit: np.ndarray, free: np.ndarray, least: float
) -> Iterator[list[int]]:
    """Add the columns of one effect to one free column, with their twins, until none is left."""
    members = np.flatnonzero(twins(unit, [seed]) & free).tolist()
    correlated = free & (abs(unit[:, seed] @ unit) >= least)
    while True:
        yield members
        covered = spikes[:, members].any(axis=1)
        correlated = correlated & (abs(unit[:, members[-1]] @ unit) >= least)
        correlated[members] = False
        candidates = np.flatnonzero(correlated)
        without = spikes[np.ix_(~covered, candidates)].sum(axis=0) * covered.sum()
        together = spikes[np.ix_(covered, candidates)].sum(axis=0) * (~covered).sum()
        gains = without - MORE_OFTEN * together
        if gains.max(initial=0) <= 0:
            return
        best = int(candidates[gains.argmax()])
        members = members + np.flatnonzero(twins(unit, [best]) & correlated).tolist()


def sets_at_rate(
    spikes: np.ndarray, unit: np.ndarray, fdr: float, least: float
) -> Iterator[list[int]]:
    """Choose disjoint sets, of all that grow from a column, by an integer linear programme."""
    inclusion = spikes.mean(axis=0)
    seeds, free = np.flatnonzero(inclusion > RARE), np.ones(len(inclusion), bool)
    grown = (growing(seed, spikes, unit, free, least) for seed in seeds.tolist())
    sets = list({tuple(sorted(members)) for one in grown for members in one})
    if not sets:
        return
    probability = np.array([spikes[:, list(members)].any(axis=1).mean() for members in sets])
    holds = np.array([np.isin(seeds, members) for members in sets], float).T
    once = LinearConstraint(holds, ub=1)
    rate = LinearConstraint((1 - probability - fdr)[None], ub=0)
    value = probability / list(map(len, sets))
    chosen = milp(-value, integrality=np.ones(len(sets)), bounds=(0, 1), constraints=[once, rate])
    found = [list(sets[k]) for k in np.flatnonzero(chosen.x > 0.5)]
    for members in sorted(found, key=lambda members: -inclusion[members].max()):
        yield sorted(members, key=lambda member: -inclusion[member])


def pruned(members: list[int], spikes: np.ndarray, coverage: float) -> list[int]:
    """Drop members that the coverage does not need, the least included first."""
    for member in sorted(members, key=lambda member: spikes[:, member].mean()):
        others = [other for other in members if other != member]
        if spikes[:, others].any(axis=1).mean() >= coverage:
            members = others
    return members


def alternatives(data: xr.DataTree) -> dict[str, str] | None:
    """Return the other members of the sets of a fit for each member, or None without sets."""
    stats = arviz_data.sample_stats(data)
    names = [name for name in pairs(posterior(data)) if f"{SETS}.{name}" in stats]
    if not names or not stats.sizes["set"]:
        return {} if names else None
    frames = [arviz_data.to_frame(stats[f"{SETS}.{name}"].rename(name), "set") for name in names]
    frame = pd.concat(frames, axis=1)
    # NaN marks columns outside of a set; a member may have the probability 0
    shares, labels = frame.to_numpy(), frame.columns.tolist()
    others = {}
    for member in np.flatnonzero(np.isfinite(shares).any(axis=0)):
        best = np.nan_to_num(shares[np.isfinite(shares[:, member])], nan=-1.0).max(axis=0)
        order = np.argsort(-best, kind="stable")[: np.sum(best >= 0)]
        others[labels[member]] = ", ".join(labels[other] for other in order if other != member)
    return others
