# SPDX-License-Identifier: Apache-2.0
"""Sets of columns that hold an effect where single columns cannot be told apart."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.algebra.correlation import (
    COVERAGE,
    MIN_CORRELATION,
    blocks,
    check_limits,
    purity,
    twins,
    unit_columns,
)
from numpyro_spikeslab.reporting.data import (
    SETS,
    is_grouped,
    pairs,
    posterior,
    sample_dims,
    select,
    spike_draws,
)
from numpyro_spikeslab.reporting.elements import by_element, row_labels
from numpyro_spikeslab.table_checks import as_numbers

# A column stands in for the members of a set if it is this many times as often included in draws
# without them as in draws with one. At 1 the noise of draws admits columns of other effects. At 2
# it refuses columns that share two effects evenly: each is half as often beside another.
MORE_OFTEN = 1.5


def credible_sets(
    data: xr.DataTree,
    var_name: str,
    X: Any,
    coverage: float = COVERAGE,
    min_correlation: float = MIN_CORRELATION,
) -> pd.DataFrame:
    """Find small sets of columns that hold an effect with a given probability.

    Columns that are alike share an effect: each may have a small inclusion probability where it is
    certain that one of them has the effect. A credible set, as in SuSiE (Wang, Sarkar, Carbonetto
    and Stephens, 2020), is a set of columns of which

    - in at least ``coverage`` of the draws one or more are included;
    - all are correlated by at least ``min_correlation`` with each other;
    - none can be left out. Columns that are the same but for their units are in one set or in none,
      for data cannot tell which of them has the effect.

    Sets grow from the column of highest inclusion probability. A column stands in for the members
    of a set if it is included more than half as often again in draws without them as in draws with
    one of them: columns of one effect take turns, one of another effect is as frequent in both. The
    set takes the column with the largest difference of the two frequencies, the second times 1.5.
    What a set has no other set takes, so that two effects among correlated columns make two sets.
    An effect that no set of correlated columns explains makes none, nor do columns that come and go
    independently, though it is all but certain that one of many is included.

    The draws tell which columns stand in for each other: draws of chains that mix do. Chains that
    each stay in one mode cannot tell the columns of one effect from those of another. Draws of a
    factorised fit know too little of it and give sets that are too small; for a fit see
    :meth:`PairedGuide.credible_sets() <numpyro_spikeslab.PairedGuide.credible_sets>`.

    :param data: ArviZ data of Markov chains or variational draws.
    :param var_name: a spike-and-slab weight with one dimension besides those of the draws.
    :param X: the table that the weights multiply, in any units, shape (N, P): numpy array, or
        DataFrame whose columns are the labels of the weight. If the weight has no labels but
        numbers, the columns label the members.
    :param coverage: least probability of a set, in (0, 1].
    :param min_correlation: least absolute correlation, in [0, 1]. The default is SuSiE's.
    :returns: a DataFrame with one row per set: ``members``, a tuple of labels, the most included
        first; ``size``; ``probability`` that the set holds an effect;
        ``purity``, the smallest absolute correlation among its members.
    :raises ValueError: if ``var_name`` is not such a weight, if ``X`` has other columns than it or
        values that are not finite, or if a number is outside its range.

    .. doctest::

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
    check_limits(coverage, min_correlation)
    spikes, labels = flat_spikes(data, var_name)
    table, labels = columns_of(X, labels, var_name)
    unit = unit_columns(table)
    rows = []
    for members in disjoint_sets(spikes, unit, coverage, min_correlation):
        rows.append(
            {
                "members": tuple(labels[member] for member in members),
                "size": len(members),
                "probability": spikes[:, members].any(axis=1).mean(),
                "purity": purity(unit[:, members]),
            }
        )
    columns = ["members", "size", "probability", "purity"]
    return pd.DataFrame(rows, columns=columns).rename_axis("set")


def flat_spikes(data: xr.DataTree, name: str) -> tuple[np.ndarray, list]:
    """Which weights are included in each draw, (D, P), and the labels of the weights."""
    draws = posterior(data)
    select(draws, name)
    if name not in pairs(draws):
        raise ValueError(
            f"var_name: got {name!r}, expected a spike-and-slab weight, one of {pairs(draws)}; "
            f"collect the site `{name}_spike` when sampling."
        )
    if is_grouped(draws, name):
        raise ValueError(
            f"var_name: the weights {name!r} share spikes, expected one for each column; look at "
            f"the draws of `{name}_spike`, of which there is one for each group."
        )
    dims = sample_dims(draws)
    plates = [str(dim) for dim in draws[name].dims if dim not in dims]
    if len(plates) != 1:
        raise ValueError(
            f"var_name: `{name}` has the dimensions {plates}, expected one, that of the columns "
            "of X; choose one task, for example with xarray.DataTree.from_dict({'posterior': "
            "data['posterior'].to_dataset().sel(task=0)})."
        )
    spikes = spike_draws(data, name).stack(all_draws=dims).transpose("all_draws", plates[0])
    return spikes.values > 0, draws[name][plates[0]].to_index().tolist()


def columns_of(X: Any, labels: list, name: str) -> tuple[np.ndarray, list]:
    """The columns of ``X`` as numbers, and the labels of the weights."""
    table = as_numbers("X", X)
    if table.ndim != 2 or table.shape[1] != len(labels) or len(table) < 2:
        raise ValueError(
            f"X: got the shape {table.shape}, expected (N, {len(labels)}), a column for each "
            f"element of `{name}` and two rows or more; give the table that the model was given."
        )
    if not isinstance(X, pd.DataFrame) or list(X.columns) == labels:
        return table, labels
    if labels != list(range(len(labels))) or set(X.columns) == set(labels):
        raise ValueError(
            f"X: got the columns {list(X.columns)!s:.200}, expected {labels!s:.200}, the labels of "
            f"`{name}` in their order; choose them with X[labels]."
        )
    return table, list(X.columns)


def disjoint_sets(
    spikes: np.ndarray, unit: np.ndarray, coverage: float, least: float
) -> Iterator[list[int]]:
    """The members of each set, in decreasing order of inclusion probabilities."""
    inclusion = spikes.mean(axis=0)
    may_start = most_that_sets_hold(inclusion, unit, least) >= coverage - 1e-9
    seeds = [seed for seed in np.argsort(-inclusion, kind="stable").tolist() if may_start[seed]]
    free = np.ones_like(may_start)
    for seed in seeds:
        members = grown(seed, spikes, unit, free, coverage, least) if free[seed] else []
        if members:
            members = pruned(members, spikes, coverage)
            members = np.flatnonzero(twins(unit, members) & free).tolist()
            free[members] = False
            yield sorted(members, key=lambda member: -inclusion[member])


def most_that_sets_hold(inclusion: np.ndarray, unit: np.ndarray, least: float) -> np.ndarray:
    """A bound on the probability of any set that a column can be in."""
    bound = inclusion.copy()
    for block in blocks(len(bound)):
        alike = abs(unit[:, block].T @ unit) >= least
        np.fill_diagonal(alike[:, block], False)
        bound[block] += alike @ inclusion
    return bound


def grown(
    seed: int,
    spikes: np.ndarray,
    unit: np.ndarray,
    free: np.ndarray,
    coverage: float,
    least: float,
) -> list[int]:
    """A set that is credible, from one column; empty where there is none."""
    # draws say nothing about columns that are the same: these may be included together
    members = np.flatnonzero(twins(unit, [seed]) & free).tolist()
    alike = free.copy()
    while (covered := spikes[:, members].any(axis=1)).mean() < coverage:
        alike &= abs(unit[:, members[-1]] @ unit) >= least
        alike[members] = False
        candidates = np.flatnonzero(alike)
        without = spikes[np.ix_(~covered, candidates)].sum(axis=0) * covered.sum()
        beside = spikes[np.ix_(covered, candidates)].sum(axis=0) * (~covered).sum()
        gains = without - MORE_OFTEN * beside
        if gains.max(initial=0) <= 0:
            return []
        best = int(candidates[gains.argmax()])
        members += np.flatnonzero(twins(unit, [best]) & alike).tolist()
    return members


def pruned(members: list[int], spikes: np.ndarray, coverage: float) -> list[int]:
    """Members without those that the others do without, the least included first."""
    for member in sorted(members, key=lambda member: spikes[:, member].mean()):
        rest = [other for other in members if other != member]
        if spikes[:, rest].any(axis=1).mean() >= coverage:
            members = rest
    return members


def alternatives(data: xr.DataTree) -> dict[str, str] | None:
    """Of each member of the sets of a fit the other members, the most probable first.

    :returns: by the labels of a summary; None for draws of which no sets are known.
    """
    stats = data["sample_stats"].data_vars if "sample_stats" in data.children else {}
    tables = {
        name: by_element(stats[f"{SETS}.{name}"].rename(set="summary"), name)
        for name in pairs(posterior(data))
        if f"{SETS}.{name}" in stats
    }
    if not tables:
        return None
    labels = [label for name, x in tables.items() for label in row_labels(name, x)]
    # what is no member comes last; a member may have the probability 0
    shares = np.nan_to_num(np.concatenate(list(tables.values()), axis=1), nan=-1.0)
    found = {}
    for member in np.flatnonzero((shares >= 0).any(axis=0)):
        best = shares[shares[:, member] >= 0].max(axis=0)
        order = np.argsort(-best, kind="stable")[: np.sum(best >= 0)]
        found[labels[member]] = ", ".join(labels[other] for other in order if other != member)
    return found
