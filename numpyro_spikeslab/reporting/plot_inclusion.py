# SPDX-License-Identifier: Apache-2.0
"""Picture of inclusion probabilities."""

from collections.abc import Iterable, Mapping
from typing import Any

from arviz_plots import PlotCollection
import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reporting.arviz_data import inclusion, pairs, posterior
from numpyro_spikeslab.reporting.labels import by_element, check_top, most_included
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    check_pairs,
    comparable,
    reference_values,
)
from numpyro_spikeslab.reporting.pictures import (
    GREY,
    LETTER,
    LITERAL,
    MAX_HEIGHT,
    ROW,
    add_legend,
    label_ticks,
    panels,
)
from numpyro_spikeslab.reporting.stats import inclusion_statistics

WIDTH, INDEX_WIDTH, INDEX_HEIGHT = 5.5, 8.0, 3.2
"""Inches of a panel with rows, to which the labels are added, and of one along the index."""

NAME = 0.14
"""Inches between two names above a panel, a line of 8 point type."""


def plot_inclusion(
    data: xr.DataTree | Methods,
    var_names: str | Iterable[str] | None = None,
    reference: str | Mapping[str, ArrayLike] | None = None,
    *,
    top: int | None = None,
    threshold: float = 0.5,
) -> PlotCollection:
    """Plot the inclusion probability of every spike-and-slab weight.

    There is one panel per variable with one row per weight. A bar reaches two Monte Carlo standard
    errors to either side (``mcse_inclusion`` of :func:`~numpyro_spikeslab.summary`); a weight
    without one has no bar. If the rows would take more than 30 inches and ``top`` is None, the
    weights are drawn along the horizontal axis instead. Then only weights above the threshold, in
    any of the methods or the reference, have bars and ticks, and their names are written above the
    panel, the most included first, as many as there is room for.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param var_names: the weights to plot; all pairs of the (first) posterior by default.
    :param reference: marked by black ticks: the name of a method in ``data``, or inclusion
        probabilities by variable, shaped like the weights. None, the default, marks nothing.
    :param top: how many weights of each variable to show, by decreasing inclusion probability, the
        highest of all methods; one more row has the largest probability of all others. None, the
        default, shows all in their own order.
    :param threshold: a probability, drawn as a dashed line; the names of weights above it in any of
        the methods are bold. Above the default, 0.5, are the weights of the median probability
        model. 1 marks no weight.
    :returns: the picture; ``.savefig("inclusion.png")`` writes it.
    :raises ValueError: if there is no posterior or no pair, if ``var_names`` or ``reference`` is
        unknown, if ``top`` is less than 1, if ``threshold`` is no probability, or if shapes or
        coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_inclusion
        >>> spike = np.random.default_rng(0).binomial(1, [0.1, 0.9], size=(4, 100, 2))
        >>> draws = {"w": 2.0 * spike, "w_spike": spike}
        >>> picture = plot_inclusion(arviz_base.from_dict({"posterior": draws}))
        >>> [label.get_text() for label in picture.get_target("w", {}).get_yticklabels()]
        ['0', '1']
    """
    check_top(top)
    if not 0 <= threshold <= 1:
        remedy = "Give 1 to mark no weight."
        raise bad("threshold", threshold, "a probability between 0 and 1", remedy)
    methods = as_methods(data)
    draws = posterior(next(iter(methods.values())))
    if var_names is None and not pairs(draws):
        got, remedy = f"the variables {sorted(map(str, draws))}", "Collect both when sampling."
        raise bad("data", got, "a weight `w` with its indicator `w_spike`", remedy)
    names = comparable(methods, var_names, pairs(draws))
    check_pairs(methods, names, "var_names")
    ticks = {}
    if reference is not None:
        ticks = reference_values(reference, methods, names, inclusion)
    tables = {name: table_of(methods, name, ticks.get(name)) for name in names}
    row = ROW * (0.8 + 0.2 * len(methods))
    along_index = top is None and sum(x.shape[-1] + 1 for x in tables.values()) * row > MAX_HEIGHT
    if along_index:
        picture = index_panels(tables, threshold)
    else:
        tables = {name: top_rows(table, top) for name, table in tables.items()}
        picture = row_panels(tables, threshold, row)
    for name, table in tables.items():
        draw(picture.get_target(name, {}), table, threshold, along_index)
    if reference is not None:
        axes = picture.get_target(names[-1], {})
        note = f" (black ticks: {reference if isinstance(reference, str) else 'reference'})"
        axes.set_xlabel(axes.get_xlabel() + note, **LITERAL)
    add_legend(picture)
    return picture


def table_of(methods: Methods, name: str, reference: xr.DataArray | None) -> xr.DataArray:
    """Return inclusion, its Monte Carlo error and the reference, by method and element."""
    rows = ["inclusion", "mcse_inclusion"]
    parts = (inclusion_statistics(tree, name).sel(summary=rows) for tree in methods.values())
    table = by_method(parts, methods)
    ticks = xr.full_like(table.isel(summary=0), np.nan) if reference is None else reference
    ticks = xr.zeros_like(table.isel(summary=0)) + ticks
    table = xr.concat([table, ticks.assign_coords(summary="reference")], "summary")
    return by_element(table, name, ("summary", "model"))


def is_above(table: xr.DataArray, threshold: float, rows: tuple = ("inclusion",)) -> xr.DataArray:
    """Whether elements are above the threshold in one of the rows of any method."""
    return (table.sel(summary=list(rows)) > threshold).any(["summary", "model"])


def top_rows(table: xr.DataArray, top: int | None) -> xr.DataArray:
    """Keep the most included elements, and one more that is the largest of all others."""
    order = most_included(table.sel(summary="inclusion").max("model"), top)
    others = np.setdiff1d(np.arange(table.shape[-1]), order)
    if not others.size:
        return table[..., order]
    dim = str(table.dims[-1])
    largest = table[..., others].max(dim).where(table["summary"] != "mcse_inclusion")
    largest = largest.expand_dims({dim: [f"largest of {others.size:,} others"]}, axis=-1)
    return xr.concat([table[..., order], largest], dim)


def draw(axes: Any, table: xr.DataArray, threshold: float, along_index: bool) -> None:
    """Draw points, bars, reference and threshold in rows, or upright along the index."""
    size, count = table.shape[-1], table.sizes["model"]
    inclusion, errors, reference = table.transpose("summary", "model", ...).values
    if along_index:
        high = is_above(table, threshold, ("inclusion", "reference")).values
        errors, reference = (np.where(high, values, np.nan) for values in (errors, reference))
    bars = np.stack([inclusion.clip(max=2 * errors), (1 - inclusion).clip(max=2 * errors)], axis=1)
    # marks of several methods are beside each other
    spread = NAME / INDEX_WIDTH * size / 4 if along_index else 0.25
    for k, shift in enumerate(np.linspace(-spread, spread, count) if count > 1 else [0.0]):
        place = np.arange(size) + shift
        label = str(table["model"].values[k]) if count > 1 else None
        style = {"fmt": "o", "markersize": 4, "elinewidth": 1, "label": label}
        if along_index:
            axes.errorbar(place, inclusion[k], yerr=bars[k], **style)
        else:
            axes.errorbar(inclusion[k], place, xerr=bars[k], **style)
    tick = {"s": 70, "color": "black", "zorder": 3}
    line = {"color": GREY, "linestyle": "--", "linewidth": 1}
    if along_index:
        axes.scatter(np.arange(size), reference[0], marker="_", **tick)
        axes.axhline(threshold, **line)
    else:
        axes.scatter(reference[0], np.arange(size), marker="|", **tick)
        axes.axvline(threshold, **line)
    axes.grid(axis="y", color="#e5e5e5")
    axes.set_axisbelow(True)


def row_panels(tables: Mapping[str, xr.DataArray], threshold: float, row: float) -> PlotCollection:
    """Make an empty panel for each variable, with a labelled row for each weight."""
    heights = np.array([(table.shape[-1] + 1) * row for table in tables.values()])
    heights *= min(1.0, MAX_HEIGHT / heights.sum())
    labels = {name: table[table.dims[-1]].values.tolist() for name, table in tables.items()}
    letters = max(len(label) for each in labels.values() for label in each)
    size = WIDTH + LETTER * letters, 0.8 + heights.sum()
    picture = panels(
        xr.Dataset(tables), "__variable__", 1, size, height_ratios=heights, sharex=True
    )
    for height, (name, table) in zip(heights, tables.items(), strict=True):
        axes = picture.get_target(name, {})
        high = dict(zip(labels[name], is_above(table, threshold).values, strict=True))
        for text in label_ticks(axes.yaxis, labels[name], height):
            text.set_fontweight("bold" if high.get(text.get_text()) else "normal")
        axes.set(xlim=(-0.02, 1.02), ylim=(len(high) - 0.4, -0.6))
        axes.set_ylabel(name, **LITERAL)
    axes.set_xlabel("inclusion probability")
    return picture


def index_panels(tables: Mapping[str, xr.DataArray], threshold: float) -> PlotCollection:
    """Make an empty panel for each variable along its index, with names above it."""
    names = {name: names_above(table, threshold) for name, table in tables.items()}
    letters = max((len(label) for each in names.values() for label in each.values()), default=0)
    size = INDEX_WIDTH + 0.9, len(tables) * (INDEX_HEIGHT + 0.8 * LETTER * letters)
    picture = panels(xr.Dataset(tables), "__variable__", 1, size, sharex=False)
    for name, table in tables.items():
        axes, last = picture.get_target(name, {}), table.shape[-1] - 1
        for place, label in names[name].items():
            axes.text(place, 1.06, label, fontsize=8, rotation=90, ha="center", **LITERAL)
        axes.xaxis.get_major_locator().set_params(integer=True)
        margin = 0.5 + 0.01 * last
        axes.set(xlim=(-margin, last + margin), ylim=(-0.03, 1.03))
        axes.set_xlabel(f"index of {table[table.dims[-1]].attrs['long_name']}", **LITERAL)
        axes.set_ylabel(f"inclusion probability\nof {name}", **LITERAL)
    return picture


def names_above(table: xr.DataArray, threshold: float) -> dict[int, str]:
    """Choose names of elements above the threshold that do not overlap, the highest first."""
    highest = table.sel(summary=["inclusion", "reference"]).max(["summary", "model"]).values
    labels, gap = table[table.dims[-1]].values, NAME / INDEX_WIDTH * len(highest)
    names: dict[int, str] = {}
    for place in most_included(highest, max(1, int(np.sum(highest > threshold)))):
        if highest[place] > threshold and all(abs(place - other) >= gap for other in names):
            names[int(place)] = str(labels[place])
    return names
