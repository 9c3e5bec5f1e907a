# SPDX-License-Identifier: Apache-2.0
"""Correlated columns and clusters of columns, in numpy."""

from collections.abc import Iterable, Iterator

from jaxtyping import Bool, Float
import numpy as np

from numpyro_spikeslab.support.messages import bad

# Correlation of columns that the data cannot distinguish.
TWINS = 1 - 1e-6
# Columns whose correlations with all others are in memory at once.
BLOCK = 512
# Defaults of credible sets: probability, and least absolute correlation of the members (SuSiE's).
COVERAGE, MIN_CORRELATION = 0.95, 0.5


def check_limits(coverage: float, min_correlation: float) -> None:
    """Check that both are between 0 and 1, and that the probability is positive."""
    for name, value in (("coverage", coverage), ("min_correlation", min_correlation)):
        if not 0 <= value <= 1 or (name, value) == ("coverage", 0):
            raise bad(name, value, "a number between 0 and 1, like 0.95")


def unit_columns(
    table: Float[np.ndarray, "N P"], weights: Float[np.ndarray, " N"] | None = None
) -> Float[np.ndarray, "N P"]:
    """Centre columns and scale them to norm 1, for correlations; constant ones become 0."""
    centred = table - np.average(table, axis=0, weights=weights)
    if weights is not None:
        centred = centred * np.sqrt(weights / weights.max())[:, None]
    norms = np.linalg.norm(centred, axis=0)
    constant = norms <= 1e-12 * np.linalg.norm(table, axis=0)
    return np.where(constant, 0.0, centred / np.where(constant, 1.0, norms))


def blocks(size: int) -> Iterator[slice]:
    """Cut columns into slices of at most ``BLOCK``."""
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))


def purity(unit: Float[np.ndarray, "N M"]) -> float:
    """Compute the smallest absolute correlation among columns of :func:`unit_columns`."""
    smallest = 1.0
    for block in blocks(unit.shape[1]):
        within = abs(unit[:, block].T @ unit)
        # the correlation of a constant column with itself is 1
        np.fill_diagonal(within[:, block], 1.0)
        smallest = min(smallest, float(within.min()))
    return smallest


def twins(unit: Float[np.ndarray, "N P"], members: list[int]) -> Bool[np.ndarray, " P"]:
    """Find the columns that equal a member up to sign and scale, members included."""
    same = np.zeros(unit.shape[1], bool)
    same[members] = True
    for block in blocks(len(members)):
        same |= (abs(unit[:, members[block]].T @ unit) > TWINS).any(axis=0)
    return same


LEAST, MOST = 0.5, 8
"""Least absolute correlation that joins two columns, and most columns of a cluster. The 2^8
patterns of 8 columns cost about as much as their products with the data."""


def clusters(unit: Float[np.ndarray, "N P"], least: float = LEAST) -> list[list[int]]:
    """Join :func:`unit_columns` by single linkage, closest first, to clusters of 2 to ``MOST``."""
    owner = {m: [m] for m in range(unit.shape[1])}
    for i, j in _by_correlation(unit, least) if owner else ():
        first, second = owner[i], owner[j]
        if first is not second and len(first) + len(second) <= MOST:
            first += second
            owner |= dict.fromkeys(second, first)
    joined = {tuple(sorted(one)) for one in owner.values() if len(one) > 1}
    return [list(one) for one in sorted(joined)]


def _by_correlation(unit: Float[np.ndarray, "N P"], least: float) -> Iterable[tuple[int, int]]:
    """List pairs of columns with a correlation above ``least``, the highest first."""
    pairs = []
    for part in blocks(unit.shape[1]):
        correlation = np.triu(abs(unit[:, part].T @ unit), part.start + 1)
        i, j = np.nonzero(correlation > least)
        pairs.append((correlation[i, j], part.start + i, j))
    size, first, second = map(np.concatenate, zip(*pairs, strict=True))
    # ties, such as copies, must not depend on rounding
    order = np.lexsort((second, first, -np.round(size, 6)))
    return zip(first[order].tolist(), second[order].tolist(), strict=True)
