# SPDX-License-Identifier: Apache-2.0
"""Columns that are alike, and sets of them, in numpy."""

from collections.abc import Iterable, Iterator

from jaxtyping import Bool, Float
import numpy as np

# Two columns with this correlation are one and the same to the data.
TWINS = 1 - 1e-6
# Columns whose correlations with all others are in memory at once.
BLOCK = 512
# What holds an effect, unless asked otherwise: the probability of a set, and the least absolute
# correlation of its members, which is SuSiE's.
COVERAGE, MIN_CORRELATION = 0.95, 0.5


def check_limits(coverage: float, min_correlation: float) -> None:
    """Refuse what is no probability of a set, or no correlation in it."""
    for name, value in (("coverage", coverage), ("min_correlation", min_correlation)):
        if not 0 <= value <= 1 or (name, value) == ("coverage", 0):
            raise ValueError(f"{name}: got {value}, expected a number between 0 and 1, like 0.95.")


def unit_columns(
    table: Float[np.ndarray, "N P"], weights: Float[np.ndarray, " N"] | None = None
) -> Float[np.ndarray, "N P"]:
    """Centred columns of norm 1, whose products are correlations; constant columns are 0.

    :param weights: of the rows, the same by default.
    """
    centred = table - np.average(table, axis=0, weights=weights)
    if weights is not None:
        centred = centred * np.sqrt(weights / weights.max())[:, None]
    norms = np.linalg.norm(centred, axis=0)
    constant = norms <= 1e-12 * np.linalg.norm(table, axis=0)
    return np.where(constant, 0.0, centred / np.where(constant, 1.0, norms))


def blocks(size: int) -> Iterator[slice]:
    """Slices of at most ``BLOCK`` columns."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def purity(unit: Float[np.ndarray, "N M"]) -> float:
    """The smallest absolute correlation among M columns, from :func:`unit_columns`."""
    smallest = 1.0
    for block in blocks(unit.shape[1]):
        within = abs(unit[:, block].T @ unit)
        # a constant column is like itself
        np.fill_diagonal(within[:, block], 1.0)
        smallest = min(smallest, float(within.min()))
    return smallest


def twins(unit: Float[np.ndarray, "N P"], members: list[int]) -> Bool[np.ndarray, " P"]:
    """Which columns are the same as a member but for sign and units, members included."""
    same = np.zeros(unit.shape[1], bool)
    same[members] = True
    for block in blocks(len(members)):
        same |= (abs(unit[:, members[block]].T @ unit) > TWINS).any(axis=0)
    return same


LEAST, MOST = 0.5, 8
"""Of the clusters that are found: the least absolute correlation that joins two columns, and the
most columns of one, whose 2^8 patterns cost about what the products of 8 columns with the data
do."""


def clusters(unit: Float[np.ndarray, "N P"]) -> list[list[int]]:
    """Columns joined by single linkage, the most correlated first, up to ``MOST``.

    :param unit: from :func:`unit_columns`.
    :return: the clusters of two or more, in the order of their columns.
    """
    owner = {m: [m] for m in range(unit.shape[1])}
    for i, j in _by_correlation(unit):
        first, second = owner[i], owner[j]
        if first is not second and len(first) + len(second) <= MOST:
            first += second
            owner |= dict.fromkeys(second, first)
    every = {tuple(sorted(one)) for one in owner.values() if len(one) > 1}
    return [list(one) for one in sorted(every)]


def _by_correlation(unit: Float[np.ndarray, "N P"]) -> Iterable[tuple[int, int]]:
    """Pairs of columns above ``LEAST`` in correlation, the highest first."""
    found = []
    for part in blocks(unit.shape[1]):
        alike = np.triu(abs(unit[:, part].T @ unit), part.start + 1)
        i, j = np.nonzero(alike > LEAST)
        found.append((alike[i, j], part.start + i, j))
    size, first, second = map(np.concatenate, zip(*found, strict=True))
    # ties, such as copies, must not depend on rounding
    order = np.lexsort((second, first, -np.round(size, 6)))
    return zip(first[order].tolist(), second[order].tolist(), strict=True)
