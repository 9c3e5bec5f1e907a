# SPDX-License-Identifier: Apache-2.0
"""The argument ``blocks`` of a guide: its check, and the search for correlated columns."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import jax.numpy as jnp

from numpyro_spikeslab.algebra.correlation import clusters, unit_columns
from numpyro_spikeslab.algebra.partition import MAX_BLOCK, Partition, Sets
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.linear import dense_rows
from numpyro_spikeslab.reading.program import are_concrete, compiled, outside_transformations
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.sites import Pair, observed_sites
from numpyro_spikeslab.support.messages import bad

AUTO = "auto"


def partitions_of(
    pairs: tuple[Pair, ...], blocks: Any, model: Callable, trace: dict[str, Any], call: Any
) -> dict[str, Partition]:
    """Return the blocks, as in :class:`~numpyro_spikeslab.PairedGuide`, and groups of each site."""
    reading, sets = None, {}
    if blocks is not None and observed_sites(trace):
        reading = Reader(model, "PairedGuide")(*call)
        check_columns(reading.form)
    if isinstance(blocks, str) and blocks == AUTO:
        sets = _correlated_sets(reading)
    elif blocks is not None:
        sets = _checked_blocks(blocks, pairs)
    partitions = {}
    for pair in pairs:
        joint = tuple(members for members in sets.get(pair.name, ()) if len(members) > 1)
        alone = Partition(pair.size, blocks=joint)
        partitions[pair.name] = Partition.of_spikes(pair.groups) if pair.groups else alone
    return partitions


def _checked_blocks(blocks: Any, pairs: tuple[Pair, ...]) -> dict[str, Sets]:
    """Return the blocks of each site, if they are disjoint sets of weights with a spike each."""
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
        arrays = [np.array(list(members)) for members in sets]
    except TypeError:
        arrays = [np.zeros(0)]
    # a mask is not a list of numbers
    are_numbers = all(x.ndim == 1 and np.issubdtype(x.dtype, np.integer) for x in arrays)
    checked = tuple(tuple(x.tolist()) for x in arrays)
    weights = [m for members in checked for m in members]
    if (
        not are_numbers
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
    if not form.is_design:
        got = "weights that multiply features of several tasks or latent functions"
        expected = "the columns of one design, as in `X @ w`"
        remedy = "Leave `blocks` out."
        raise bad(f"PairedGuide: blocks of {form.pairs[0].name!r}", got, expected, remedy)


def _correlated_sets(reading: Reading | None) -> dict[str, Sets]:
    """Return clusters of correlated columns of each site; of a reading, if there are responses."""
    if (
        reading is None
        or not are_concrete(reading.problem.constants)
        or not reading.form.constant_rows
    ):
        got = "columns that are traced, depend on latent sites or have no observations"
        remedy = "Call the guide first with data, outside of jit and vmap, or list the blocks."
        raise bad(f"PairedGuide: blocks={AUTO!r}", got, "columns of data", remedy)

    def columns():
        is_seen = reading.view(reading.generic).relative[:, 0] > 0
        rows = dense_rows(reading.problem, reading.generic)
        # missing observations may be NaN
        return jnp.where(is_seen, rows, 0), is_seen

    with outside_transformations():
        rows, is_seen = compiled(columns, once=True)
    unit = unit_columns(np.asarray(rows, float)[:, np.asarray(is_seen)].T)
    ends = np.cumsum([pair.size for pair in reading.form.pairs])[:-1]
    parts = zip(reading.form.pairs, np.split(unit, ends, axis=1), strict=True)
    return {pair.name: tuple(map(tuple, clusters(part))) for pair, part in parts}
