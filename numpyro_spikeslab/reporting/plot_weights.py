# SPDX-License-Identifier: Apache-2.0
"""The picture of weights as a heat map."""

from typing import Any, NamedTuple

from arviz_plots import PlotCollection
from arviz_plots.backend import matplotlib as backend
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.data import (
    WEIGHTS,
    check_finite,
    inclusion,
    posterior,
    posterior_mean,
)
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    check_pairs,
    comparable,
)
from numpyro_spikeslab.reporting.pictures import INK, LETTER, LITERAL, MAX_HEIGHT, panels

CELL = 0.36  # inches of the side of a cell
LONGEST = len("-10.5")  # what fits into a cell in 7 point type


def plot_weights(data: xr.DataTree | Methods, weights: str = WEIGHTS) -> PlotCollection:
    """Plot which task uses which latent function: inclusion probabilities as a heat map.

    One row per task, one column per function, one panel per method. Where a weight is more likely
    in than out, its posterior mean stands in the cell, with one decimal, or none where that is too
    long; a cell is empty if its mean would read as zero, and all are where cells get small. Markov
    chains must have been aligned, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method.
    :param weights: a pair with two plates: tasks, then functions.
    :returns: the picture; ``.savefig("weights.png")`` writes it.
    :raises ValueError: if there is no posterior, if ``weights`` is no pair, has not two plates or
        draws that are not finite, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_weights
        >>> spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100, 3, 2))
        >>> draws = {"W": 2.0 * spike, "W_spike": spike}
        >>> picture = plot_weights(arviz_base.from_dict({"posterior": draws}))
        >>> picture.viz["inclusion"]["W"].item().get_array().shape
        (3, 2)
    """
    methods = as_methods(data)
    (name,) = comparable(methods, weights)
    check_pairs(methods, [name], "weights")
    for tree in methods.values():
        check_finite(posterior(tree)[name])
    probs = by_method((inclusion(tree, name) for tree in methods.values()), methods)
    means = by_method((posterior_mean(tree, name) for tree in methods.values()), methods)
    rows, columns = axes_of(probs)
    has_room = rows.every == columns.every == 1
    figure = {"figsize": figure_size(rows, columns, len(methods)), "sharey": True}
    picture = panels(probs.to_dataset(name=name), ["model"], len(methods), figure)
    cells = {"edgecolors": "white", "linewidth": 0.5} if has_room else {}
    picture.map(heat_map, "inclusion", cmap="Blues", vmin=0, vmax=1, **cells)
    for method in methods:
        panel = picture.get_target(name, {"model": method})
        label_cells(panel, rows, columns)
        if len(methods) > 1:
            backend.title(method, panel, size=10, **LITERAL)
        if has_room:
            write_weights(means.sel(model=method).values, probs.sel(model=method).values, panel)
    add_colour_bar(picture, name, list(methods))
    first = picture.get_target(name, {"model": next(iter(methods))})
    backend.ylabel(rows.plate, first, **LITERAL)
    return picture


class Axis(NamedTuple):
    """One axis of a heat map."""

    plate: str
    labels: list[str]

    @property
    def size(self) -> float:
        """Inches of the cells."""
        return min(CELL * len(self.labels), MAX_HEIGHT)

    @property
    def every(self) -> int:
        """How many cells share a label."""
        return int(np.ceil(CELL * len(self.labels) / self.size))

    @property
    def letters(self) -> float:
        """Inches of the longest label."""
        return LETTER * max(map(len, self.labels))


def axes_of(probs: xr.DataArray) -> list[Axis]:
    """Tasks and functions."""
    plates = [str(dim) for dim in probs.dims if dim != "model"]
    if len(plates) != 2:
        raise ValueError(
            f"weights: `{probs.name}` has the plates {plates}, expected two, tasks and functions; "
            "draw it with plot_inclusion."
        )
    return [Axis(dim, [str(x) for x in probs[dim].values]) for dim in plates]


def figure_size(rows: Axis, columns: Axis, count: int) -> tuple[float, float]:
    """Inches of width and height of several heat maps."""
    height = columns.letters if columns.letters > CELL else 0.0
    return count * max(columns.size, 1.5) + rows.letters + 1.4, rows.size + height + 0.9


def label_cells(panel: Any, rows: Axis, columns: Axis) -> None:
    """Write the labels of tasks and functions, as many as there is room for."""
    for axis, ticks in ((columns, backend.xticks), (rows, backend.yticks)):
        places = range(0, len(axis.labels), axis.every)
        ticks(places, axis.labels[:: axis.every], panel, fontsize=8, **LITERAL)
    backend.xlabel(columns.plate, panel, **LITERAL)
    if columns.letters > CELL:
        panel.tick_params(axis="x", rotation=90)


def add_colour_bar(picture: PlotCollection, name: str, methods: list[str]) -> None:
    """Explain the colours, beside all panels."""
    image = picture.get_viz("inclusion", name, {"model": methods[0]})
    axes = [picture.get_target(name, {"model": method}) for method in methods]
    bar = picture.viz["figure"].item().colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("inclusion probability", size=9)
    bar.ax.tick_params(labelsize=8)


def heat_map(da: xr.DataArray, target: Any, **kwargs: Any) -> Any:
    """A visual of arviz-plots: one cell for each element of a matrix."""
    rows, columns = (np.arange(size + 1) - 0.5 for size in da.shape)
    target.set_ylim(rows[-1], rows[0])
    return target.pcolormesh(columns, rows, da.values, **kwargs)


def write_weights(weights: np.ndarray, probs: np.ndarray, panel: Any) -> None:
    """Write those that are more likely in than out into their cells."""
    for row, column in np.argwhere(probs > 0.5):
        ink = "white" if probs[row, column] > 0.6 else INK
        backend.text(column, row, short(weights[row, column]), panel, color=ink, size=7)


def short(weight: float) -> str:
    """A number as it fits into a cell, empty if it is too long or would read as zero."""
    texts = [f"{weight:.1f}", f"{weight:.0f}"]
    fitting = [text for text in texts if len(text) <= LONGEST and float(text) != 0]
    return fitting[0] if fitting else ""
