# SPDX-License-Identifier: Apache-2.0
"""The picture of means and intervals."""

from collections.abc import Iterable
from typing import NamedTuple

import arviz_base
from arviz_plots import PlotCollection, visuals
from arviz_plots.backend import matplotlib as backend
from jaxtyping import Int
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.data import (
    central_interval,
    inclusion,
    pairs,
    posterior,
    posterior_mean,
)
from numpyro_spikeslab.reporting.elements import (
    by_element,
    most_included,
    row_labels,
    segments,
)
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    comparable,
    reference_values,
)
from numpyro_spikeslab.reporting.pictures import (
    LETTER,
    LITERAL,
    MAX_HEIGHT,
    PANEL,
    Reference,
    add_legend,
    draw_reference,
    label_rows,
    lanes,
    legend_of,
    panels,
    row_height,
    xy,
)
from numpyro_spikeslab.reporting.stats import check_top

HALF = 0.5  # share of the draws in the thick line
SHADE, ZERO = "#f0f0f0", "#b0b0b0"


def plot_forest(
    data: xr.DataTree | Methods,
    var_names: str | Iterable[str],
    reference: Reference | None = None,
    *,
    top: int | None = None,
) -> PlotCollection:
    """Plot posterior means and intervals, of one method or of several beside each other.

    One row per element, labelled as in :func:`~numpyro_spikeslab.summary`: a circle is the mean,
    the thick line the central half of the draws, the thin line their central
    ``arviz_base.rcParams["stats.ci_prob"]``, and the grey line zero. Where the rows would take more
    than 30 inches they get narrower, and not every one is labelled. Unlike in
    :func:`arviz_plots.plot_forest`, Markov chains and variational draws can share the picture.

    :param data: ArviZ data, or several by the name of the method, with a legend.
    :param var_names: the variables to plot.
    :param reference: marked by black ticks: the name of a method in ``data``, for its means, or
        values by variable, shaped like it. None, the default, marks nothing.
    :param top: how many weights of each pair to show, those of the highest inclusion probability
        in any of the methods, in decreasing order; a line of text says how many others there are
        and how probable they are at most. Other variables keep all elements. None, the default,
        shows all in their own order.
    :returns: the picture; ``.savefig("forest.png")`` writes it.
    :raises ValueError: if there is no posterior, if ``var_names`` or ``reference`` is unknown, if
        ``top`` is less than 1, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_forest
        >>> w = np.random.default_rng(0).normal(size=(4, 100, 2))
        >>> data = arviz_base.from_dict({"posterior": {"w": w}})
        >>> picture = plot_forest(data, "w", reference={"w": [0.0, 0.0]})
        >>> [label.get_text() for label in picture.get_target("w", {}).get_yticklabels()]
        ['w[0]', 'w[1]']
    """
    check_top(top)
    methods = as_methods(data)
    names = comparable(methods, var_names)
    blocks = {name: block_of(methods, name, top) for name in names}
    labels: list[str] = []
    rows = {}
    for name, block in blocks.items():
        rows[name] = len(labels) + np.arange(block.shown.size)
        labels += block.labels(name)
    picture = empty_rows(labels, blocks, rows)
    for line, width in (("twig", 0.7), ("trunk", 2.0)):
        ends = {name: block.segments(line) for name, block in blocks.items()}
        bars = {name: xy(each, np.repeat(rows[name], 3)) for name, each in ends.items()}
        picture.map(visuals.line_xy, line, data=xr.Dataset(bars), width=width)
    picture.map(visuals.scatter_xy, "point_estimate", facecolor="white", size=28, width=1)
    axis = f"posterior mean, {percent(HALF)} and {percent(level())} intervals"
    if reference is not None:
        known = reference_values(reference, methods, names, posterior_mean)
        marks = {name: by_element(known[name], name)[blocks[name].shown] for name in names}
        ticks = {name: xy(each, rows[name]) for name, each in marks.items()}
        draw_reference(picture, ticks, "|", 150)
        axis += legend_of(reference)
    backend.xlabel(axis, picture.get_target(names[0], {}), **LITERAL)
    add_legend(picture, methods, marker="o", markersize=5, markerfacecolor="white", linewidth=2)
    return picture


class Block(NamedTuple):
    """The rows of one variable: statistics of the elements that are shown, and their places.

    - **note** - what a row of text says of the others, empty if there are none.
    """

    table: xr.DataArray
    shown: Int[np.ndarray, " K"]
    note: str

    def labels(self, name: str) -> list[str]:
        """Labels of the rows, as in the tables of ArviZ."""
        names = row_labels(name, self.table)
        return [*names, ""] if self.note else names

    def row(self, summary: str) -> xr.DataArray:
        """One of the statistics, by method and element."""
        return self.table.sel(summary=summary, drop=True)

    def segments(self, line: str) -> xr.DataArray:
        """Ends of the intervals of one kind."""
        return segments(self.row(f"{line} lower"), self.row(f"{line} upper"))


def block_of(methods: Methods, name: str, top: int | None) -> Block:
    """The rows of one variable."""
    table = statistics_of(methods, name)
    sparse = {key: tree for key, tree in methods.items() if name in pairs(posterior(tree))}
    if top is None or not sparse:
        return Block(table, np.arange(table.shape[-1]), "")
    probs = by_element(by_method((inclusion(tree, name) for tree in sparse.values()), sparse), name)
    shown, others = most_included(probs, top)
    note = ""
    if others.size:
        most = float(probs[..., others].max())
        note = f"{others.size:,} others of {name}, inclusion probabilities up to {most:.2g}"
    return Block(table[..., shown], shown, note)


def statistics_of(methods: Methods, name: str) -> xr.DataArray:
    """Means and ends of intervals of one variable, by method and element.

    Chains and variational draws differ in their dimensions, so only their statistics can share an
    array.
    """
    parts = []
    for tree in methods.values():
        rows = {"mean": posterior_mean(tree, name)}
        for line, prob in (("trunk", HALF), ("twig", level())):
            interval = central_interval(posterior(tree)[name], prob)
            for end in ("lower", "upper"):
                rows[f"{line} {end}"] = interval.sel(ci_bound=end, drop=True)
        parts.append(xr.concat(rows.values(), "summary").assign_coords(summary=list(rows)))
    return by_element(by_method(parts, methods), name)


def empty_rows(
    labels: list[str], blocks: dict[str, Block], rows: dict[str, np.ndarray]
) -> PlotCollection:
    """A panel with shaded and labelled rows, and with the notes."""
    points = {name: xy(block.row("mean"), rows[name]) for name, block in blocks.items()}
    count = next(iter(blocks.values())).table.sizes["model"]
    height = min(len(labels) * row_height(count), MAX_HEIGHT)
    picture = panels(
        xr.Dataset(points),
        cols=[],
        col_wrap=1,
        figure={"figsize": (PANEL + LETTER * max(map(len, labels)), 0.8 + height)},
        aes={"color": ["model"], "y": ["model"]},
        y=lanes(count),
    )
    panel = picture.get_target(next(iter(blocks)), {})
    label_rows(panel, labels, height)
    panel.tick_params(axis="y", length=0)  # rows of text have none
    values = np.concatenate([block.table.values.ravel() for block in blocks.values()])
    if np.nanmin(values) <= 0 <= np.nanmax(values):
        backend.vline(0, panel, color=ZERO, width=0.8, zorder=1)
    for row in range(1, len(labels), 2):
        panel.axhspan(row - 0.5, row + 0.5, color=SHADE, linewidth=0, zorder=0)
    for name, block in blocks.items():
        style = {"size": 8, "horizontal_align": "left", "transform": panel.get_yaxis_transform()}
        backend.text(0.02, rows[name][-1] + 1, block.note, panel, **style)
    return picture


def level() -> float:
    """The share of the draws in the thin line."""
    return arviz_base.rcParams["stats.ci_prob"]


def percent(share: float) -> str:
    """A share as it is written, without decimals that it does not have."""
    return f"{100 * share:g}%"
