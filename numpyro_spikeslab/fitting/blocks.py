# SPDX-License-Identifier: Apache-2.0
"""The argument ``blocks`` of a guide: its check, and the search for correlated columns."""

from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import numpy as np

import jax.numpy as jnp

from numpyro_spikeslab.algebra.correlation import clusters, unit_columns
from numpyro_spikeslab.algebra.partition import MAX_BLOCK, Partition, Sets
from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reading.form import COLUMNS, Form
from numpyro_spikeslab.reading.program import (
    are_concrete,
    compiled,
    outside_transformations,
)
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.sites import Pair, observed_sites
from numpyro_spikeslab.reading.view import design_rows

AUTO = "auto"


def partitions_of(
    pairs: tuple[Pair, ...],
    blocks: Any,
    model: Callable,
    trace: dict[str, Any],
    arguments: tuple[tuple, dict[str, Any]],
) -> dict[str, Partition]:
    """Return the blocks and groups of each site.

    :param blocks: as in :class:`~numpyro_spikeslab.PairedGuide`.
    :param trace: of the model at these arguments.
    :raises ValueError: if the blocks do not fit the model.
    """
    reading = None
    if blocks is not None and observed_sites(trace):
        reading = Reader(model, "PairedGuide")(*arguments)
        check_columns(reading.form)
    if blocks is None:
        sets: dict[str, Sets] = {}
    elif isinstance(blocks, str) and blocks == AUTO:
        sets = found_blocks(reading)
    else:
        sets = checked_blocks(blocks, pairs)
    partitions = {}
    for pair in pairs:
        if pair.groups is not None:
            partitions[pair.name] = Partition.of_spikes(pair.groups)
            continue
        joint = tuple(members for members in sets.get(pair.name, ()) if len(members) > 1)
        partitions[pair.name] = Partition(pair.size, blocks=joint)
    return partitions


def checked_blocks(blocks: Any, pairs: tuple[Pair, ...]) -> dict[str, Sets]:
    """Return the blocks of each site.

    :raises ValueError: if they are not disjoint sets of weights that have spikes of their own.
    """
    sizes = {pair.name: pair.size for pair in pairs if pair.groups is None}
    if not isinstance(blocks, Mapping) and len(pairs) == 1:
        blocks = {pairs[0].name: blocks}
    if not isinstance(blocks, Mapping) or not blocks.keys() <= sizes.keys():
        raise bad(
            "PairedGuide: blocks",
            blocks,
            f"sets by site of {list(sizes)}, the weights with a spike each",
            'Write them as in {"w": [[0, 1, 2]]}; leave out weights with `groups` of spike_slab.',
        )
    return {name: _checked_sets(sets, name, sizes[name]) for name, sets in blocks.items()}


def _checked_sets(sets: Any, name: str, size: int) -> Sets:
    try:
        checked = tuple(tuple(map(index, members)) for members in sets)
        # a mask is not a list of numbers
        is_mask = any(isinstance(m, bool | np.bool_) for members in sets for m in members)
    except TypeError:
        checked, is_mask = (), True
    weights = [m for members in checked for m in members]
    if (
        is_mask
        or len(set(weights)) < len(weights)
        or not all(0 <= m < size for m in weights)
        or not all(1 <= len(members) <= MAX_BLOCK for members in checked)
    ):
        raise bad(
            f"PairedGuide: blocks of {name!r}",
            sets,
            f"disjoint sets of at most {MAX_BLOCK} numbers from 0 to {size - 1}, or {AUTO!r}",
            "Weights are numbered flat, as in [[0, 1, 2], [7, 8]]; those not named stand alone.",
        )
    return checked


def check_columns(form: Form) -> None:
    """Raise if the weights do not multiply the columns of one design."""
    if form.kind != COLUMNS:
        raise bad(
            f"PairedGuide: blocks of {form.pairs[0].name!r}",
            "weights that multiply features of several tasks or latent functions",
            "the columns of one design, as in `X @ w`",
            "Leave `blocks` out.",
        )


def found_blocks(reading: Reading | None) -> dict[str, Sets]:
    """Return clusters of correlated columns of each site.

    :param reading: of the model, `None` without observations.
    :raises ValueError: if the columns are not known.
    """
    if (
        reading is None
        or not are_concrete(reading.problem.constants)
        or not reading.form.constant_rows
    ):
        raise bad(
            f"PairedGuide: blocks={AUTO!r}",
            "columns that are traced, depend on latent sites or have no observations",
            "known ones",
            "Call the guide first with the data of the fit and outside of transformations such as "
            "jit, or list the blocks.",
        )
    rows, is_seen = _columns(reading)
    unit = unit_columns(np.asarray(rows, float)[:, np.asarray(is_seen)].T)
    ends = np.cumsum([pair.size for pair in reading.form.pairs])[:-1]
    parts = zip(reading.form.pairs, np.split(unit, ends, axis=1), strict=True)
    return {pair.name: tuple(map(tuple, clusters(part))) for pair, part in parts}


def _columns(reading: Reading) -> tuple[Any, Any]:
    """Return the design, features as rows, and which observations are not missing."""

    def columns():
        is_seen = reading.view(reading.generic).relative[:, 0] > 0
        rows = design_rows(reading.problem, reading.generic)
        # missing observations may be NaN
        return jnp.where(is_seen, rows, 0), is_seen

    with outside_transformations():
        return compiled(columns, once=True)
