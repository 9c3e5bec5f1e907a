# SPDX-License-Identifier: Apache-2.0
"""Sparse arrays, of scipy or of JAX: observations of some of the entries of a table."""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse

from jax.experimental.sparse import BCOO, JAXSparse

from numpyro.util import not_jax_tracer

from numpyro_spikeslab.devices import fetched


class Observations(NamedTuple):
    """The stored entries of a sparse array.

    - **rows**, **columns**, **values** - of each, shape (L,).
    - **shape** - of the array.
    """

    rows: Any
    columns: Any
    values: Any
    shape: tuple[int, ...]


def is_sparse(Y: Any) -> bool:
    """Whether an array is sparse."""
    return isinstance(Y, JAXSparse) or issparse(Y)


def entries_of(Y: Any, what: str) -> Observations:
    """The entries of a sparse array.

    :param what: who takes it and what it is, for the error messages.
    :raises ValueError: if an entry stands there twice or outside of the array, there is none, or
        the format does not say which zeros are stored.
    """
    if len(Y.shape) != 2:
        raise ValueError(
            f"{what} is a sparse array of shape {Y.shape}, expected (N, Q). Of a single task make "
            "a column, `Y.reshape((-1, 1))`."
        )
    if isinstance(Y, JAXSparse):
        if not isinstance(Y, BCOO) or Y.n_batch or Y.n_dense:
            raise ValueError(
                f"{what} must be, of JAX's sparse arrays, a BCOO without batch and dense "
                f"dimensions, got {Y}. `BCOO.fromdense`, `Y.to_bcoo()` and "
                "`Y.update_layout(n_batch=0, n_dense=0)` make one."
            )
        # numpy's, for within a trace JAX's own would not be known
        places = fetched(Y.indices) if not_jax_tracer(Y.indices) else Y.indices
        entries = Observations(places[:, 0], places[:, 1], Y.data, Y.shape)
    else:
        _check_format(Y, what)
        coo = Y.tocoo()
        # views, for of an array that it has seen JAX does not look at the numbers again
        rows, columns, values = (x.view() for x in (*coo.coords, coo.data))
        entries = Observations(rows, columns, values, Y.shape)
    if not_jax_tracer(entries.rows) and not_jax_tracer(entries.columns):
        _check_places(entries, what)
    return entries


def _check_format(Y: Any, what: str) -> None:
    # blocks and diagonals are stored whole, and zeros of diagonals are dropped from their entries
    if Y.format in ("bsr", "dia"):
        raise ValueError(
            f"{what} is a sparse array in the format {Y.format!r}, which does not say which zeros "
            "are observed, expected 'coo', 'csr' or 'csc'. Make it of what is observed, with "
            "`scipy.sparse.coo_array((values, (rows, columns)), shape)`."
        )


def _check_places(entries: Observations, what: str) -> None:
    rows, columns = (np.asarray(x, np.int64) for x in entries[:2])
    shape = entries.shape
    if not rows.size:
        raise ValueError(f"{what}, a sparse array of shape {shape}, has no entries.")
    outside = (rows < 0) | (rows >= shape[0]) | (columns < 0) | (columns >= shape[1])
    places = np.sort(rows * shape[1] + columns)
    twice = places[1:][places[1:] == places[:-1]]
    if np.any(outside):
        raise ValueError(
            f"{what} has {np.sum(outside)} entries outside of its shape {shape}, the first at "
            f"{(int(rows[outside][0]), int(columns[outside][0]))}."
        )
    if twice.size:
        raise ValueError(
            f"{what} has {twice.size} entries that stand there twice, the first at "
            f"{divmod(int(twice[0]), shape[1])}. Add or average them before, as "
            "`Y.sum_duplicates()` does."
        )
