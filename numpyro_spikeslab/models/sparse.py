# SPDX-License-Identifier: Apache-2.0
"""Sparse arrays of scipy or JAX, whose stored entries are the observations of a table."""

from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import issparse

from jax.experimental.sparse import BCOO, JAXSparse

from numpyro.util import not_jax_tracer

from numpyro_spikeslab.support.devices import fetched
from numpyro_spikeslab.support.messages import bad


class Observations(NamedTuple):
    """The L stored entries of a sparse array: places, values, and the shape of the array."""

    rows: Any
    columns: Any
    values: Any
    shape: tuple[int, ...]


def is_sparse(Y: Any) -> bool:
    """Whether a table is a sparse array of scipy or JAX."""
    return isinstance(Y, JAXSparse) or issparse(Y)


def entries_of(Y: Any, what: str) -> Observations:
    """Read the entries of a sparse array.

    :param what: name of the function and the argument, for error messages.
    :raises ValueError: if an entry is a duplicate or outside of the array, there are no entries, or
        the format does not tell which zeros are stored.
    """
    if len(Y.shape) != 2:
        remedy = "Make a single task a column, `Y.reshape((-1, 1))`."
        raise bad(what, f"a sparse array of shape {Y.shape}", "(N, Q)", remedy)
    if isinstance(Y, JAXSparse):
        if not isinstance(Y, BCOO) or Y.n_batch or Y.n_dense:
            remedy = "`Y.to_bcoo()` or `Y.update_layout(n_batch=0, n_dense=0)` makes one."
            raise bad(what, Y, "a BCOO without batch and dense dimensions, or scipy's", remedy)
        # numpy's, since JAX's would be tracers within a trace
        places = fetched(Y.indices) if not_jax_tracer(Y.indices) else Y.indices
        entries = Observations(places[:, 0], places[:, 1], Y.data, Y.shape)
    elif Y.format in ("bsr", "dia"):
        # they store whole blocks and diagonals
        got = f"the format {Y.format!r}, which does not tell which zeros are observed"
        remedy = "Use `scipy.sparse.coo_array((values, (rows, columns)), shape)`."
        raise bad(what, got, "'coo', 'csr' or 'csc'", remedy)
    else:
        coo = Y.tocoo()
        # views, because JAX caches the conversion of an array object, even if its numbers change
        rows, columns, values = (x.view() for x in (*coo.coords, coo.data))
        entries = Observations(rows, columns, values, Y.shape)
    if not_jax_tracer(entries.rows) and not_jax_tracer(entries.columns):
        check_places(entries, what)
    return entries


def check_places(entries: Observations, what: str) -> None:
    """Refuse no entries, entries outside of the array, and duplicates."""
    rows, columns = (np.asarray(x, np.int64) for x in entries[:2])
    shape = entries.shape
    if not rows.size:
        raise ValueError(f"{what}, a sparse array of shape {shape}, has no entries.")
    outside = (rows < 0) | (rows >= shape[0]) | (columns < 0) | (columns >= shape[1])
    if np.any(outside):
        first = int(rows[outside][0]), int(columns[outside][0])
        got = f"{outside.sum()} entries outside of its shape {shape}"
        raise ValueError(f"{what} has {got}, the first at {first}.")
    places = np.sort(rows * shape[1] + columns)
    twice = places[1:][places[1:] == places[:-1]]
    if twice.size:
        first = divmod(int(twice[0]), shape[1])
        raise ValueError(
            f"{what} has {twice.size} duplicate entries, the first at {first}. Add or average them "
            "before, as `Y.sum_duplicates()` does."
        )
