# SPDX-License-Identifier: Apache-2.0
"""Sparse arrays of scipy or JAX, whose stored entries are the observations of a table."""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse

from jax.experimental.sparse import BCOO, JAXSparse

from numpyro.util import not_jax_tracer

from numpyro_spikeslab.devices import fetched


class Observations(NamedTuple):
    """The stored entries of a sparse array.

    - **rows**, **columns**, **values** - place and value of each entry, shape (L,).
    - **shape** - shape of the array.
    """

    rows: Any
    columns: Any
    values: Any
    shape: tuple[int, ...]


def is_sparse(Y: Any) -> bool:
    """Whether an array is sparse."""
    return isinstance(Y, JAXSparse) or issparse(Y)


def entries_of(Y: Any, what: str) -> Observations:
    """Read the entries of a sparse array.

    :param what: name of the function and the argument, for error messages.
    :raises ValueError: if an entry is a duplicate or outside of the array, there are no entries, or
        the format does not tell which zeros are stored.
    """
    if len(Y.shape) != 2:
        raise ValueError(
            f"{what} is a sparse array of shape {Y.shape}, expected (N, Q). Make a single task "
            "a column, `Y.reshape((-1, 1))`."
        )
    if isinstance(Y, JAXSparse):
        if not isinstance(Y, BCOO) or Y.n_batch or Y.n_dense:
            raise ValueError(
                f"{what} must be, of JAX's sparse arrays, a BCOO without batch and dense "
                f"dimensions, got {Y}. `BCOO.fromdense`, `Y.to_bcoo()` and "
                "`Y.update_layout(n_batch=0, n_dense=0)` make one."
            )
        # numpy's, since JAX's would be tracers within a trace
        places = fetched(Y.indices) if not_jax_tracer(Y.indices) else Y.indices
        entries = Observations(places[:, 0], places[:, 1], Y.data, Y.shape)
    else:
        _check_format(Y, what)
        coo = Y.tocoo()
        # views, because JAX caches the conversion of an array object, even if its numbers change
        rows, columns, values = (x.view() for x in (*coo.coords, coo.data))
        entries = Observations(rows, columns, values, Y.shape)
    if not_jax_tracer(entries.rows) and not_jax_tracer(entries.columns):
        _check_places(entries, what)
    return entries


def _check_format(Y: Any, what: str) -> None:
    # these store whole blocks and diagonals, with zeros that may not be observations
    if Y.format in ("bsr", "dia"):
        raise ValueError(
            f"{what} is a sparse array in the format {Y.format!r}, which does not tell which zeros "
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
            f"{what} has {twice.size} duplicate entries, the first at "
            f"{divmod(int(twice[0]), shape[1])}. Add or average them before, as "
            "`Y.sum_duplicates()` does."
        )
