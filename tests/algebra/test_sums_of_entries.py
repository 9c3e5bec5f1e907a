# SPDX-License-Identifier: Apache-2.0
"""Sums over entries of a table against the table itself."""

import numpy as np
import pytest

import jax.numpy as jnp

from numpyro_spikeslab.algebra import sparse_sums
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.sparse_sums import (
    Entries,
    at_entries,
    over_blocks,
    side_of,
    weighted_sums,
)

N, Q, M = 23, 11, 3
CUTS = {"usual": {}, "many blocks": dict(CHUNK=3, TILE=2, BLOCK_NUMBERS=40)}


@pytest.fixture(params=CUTS)
def cut(request, monkeypatch, x64):
    """Also with chunks, tiles and blocks that are smaller than rows, columns and the table."""
    for name, size in CUTS[request.param].items():
        monkeypatch.setattr(sparse_sums, name, size)


def table(seed: int = 0):
    """A table with an empty row and column, a full column and the last of both without entries."""
    rng = np.random.default_rng(seed)
    filled = rng.random((N, Q)) < 0.4
    filled[:, 2] = True
    filled[4], filled[:, 5], filled[-1], filled[:, -1] = False, False, False, False
    rows, columns = rng.permutation(np.argwhere(filled)).T
    return rows, columns, rng


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("side", ["by_rows", "by_columns"])
def test_sums_over_the_entries_of_rows_and_columns_are_those_of_the_table(cut, side, devices):
    rows, columns, rng = table()
    number, others = (N, Q) if side == "by_rows" else (Q, N)
    Y, z = rng.normal(size=len(rows)), rng.uniform(0.5, 2, len(rows))
    mean, var = rng.normal(size=(others, M)), rng.uniform(0, 1, (others, M))
    factor = rng.uniform(0.5, 2, others)
    full, weighed = np.zeros((N, Q)), np.zeros((N, Q))
    full[rows, columns], weighed[rows, columns] = Y, z
    if side == "by_columns":
        full, weighed = full.T, weighed.T
    weighed = weighed * factor

    places = (rows, columns) if side == "by_rows" else (columns, rows)
    entries = side_of(*places, number, M, devices)
    features = tuple(map(jnp.asarray, (mean, var, factor)))
    data = jnp.asarray(Y), jnp.asarray(z)
    sums = over_blocks(entries, number, features, data, lambda sums: sums)
    np.testing.assert_allclose(sums.G, np.einsum("ao,om,ok->amk", weighed, mean, mean), atol=1e-12)
    np.testing.assert_allclose(sums.c, weighed @ var, atol=1e-12)
    np.testing.assert_allclose(sums.b, (weighed * full) @ mean, atol=1e-12)
    np.testing.assert_allclose(sums.yy, np.sum(weighed * full**2, axis=1), atol=1e-12)
    sums = weighted_sums(entries, number, jnp.asarray(var), jnp.asarray(z))
    np.testing.assert_allclose(sums, (weighed / factor) @ var, atol=1e-12)


def test_moments_at_entries_are_those_of_products_of_independent_numbers(x64):
    rows, columns, rng = table(1)
    weights = PairedMeanField(*map(jnp.asarray, rng.uniform(size=(3, Q, M))))
    phi, var = map(jnp.asarray, (rng.normal(size=(M, N)), rng.uniform(size=(M, N))))
    places = Entries(jnp.asarray(rows), jnp.asarray(columns))
    mean, variance = at_entries(places, PairedMeanField.mixed, weights, phi, var)
    W, W_var = weights.mean, weights.variance
    table_variance = (W_var + W**2) @ (phi**2 + var) - W**2 @ phi**2
    np.testing.assert_allclose(mean, (W @ phi)[columns, rows], atol=1e-12)
    np.testing.assert_allclose(variance, table_variance[columns, rows], atol=1e-12)


def test_blocks_hold_all_owners_whatever_their_number(monkeypatch):
    monkeypatch.setattr(sparse_sums, "BLOCK_NUMBERS", 50)
    features, one = (jnp.ones((1, 3)), None, jnp.ones(1)), jnp.ones(1)
    for number in range(1, 60, 4):
        for devices in (1, 2, 3):
            side = side_of(np.zeros(1, int), np.zeros(1, int), number, 3, devices)
            numbers = jnp.arange(number)
            owners = over_blocks(side, number, features, (one, one), lambda _, own: own, numbers)
            np.testing.assert_array_equal(owners, np.arange(number))
