# SPDX-License-Identifier: Apache-2.0
"""Pictures of inclusion probabilities: of all weights, and of tasks by functions."""

from collections.abc import Iterable, Iterator, Mapping

from arviz_plots import PlotCollection
import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data, pictures
from numpyro_spikeslab.reporting.arviz_data import WEIGHTS, Methods, inclusion, posterior
from numpyro_spikeslab.reporting.pictures import GREY, LETTER, LITERAL, MAX_HEIGHT, ROW, label_ticks
from numpyro_spikeslab.reporting.weights import group_labels, groups_of, inclusion_statistics
from numpyro_spikeslab.support.messages import bad

WIDTH, INDEX_WIDTH, INDEX_HEIGHT = 5.5, 8.0, 3.2
"""Inches of a panel with rows, to which the labels are added, and of one along the index."""

NAME = 0.14
"""Inches between two names above a panel, a line of 8 point type."""

CELL = 0.36
"""Inches of the side of a cell of a heat map."""

THRESHOLD = {"color": GREY, "linestyle": "--", "linewidth": 1}
TICK = {"s": 70, "color": "black", "zorder": 3}


def plot_inclusion(
    data: xr.DataTree | Methods,
    var_names: str | Iterable[str] | None = None,
    reference: str | Mapping[str, ArrayLike] | None = None,
    *,
    top: int | None = None,
    threshold: float = 0.5,
) -> PlotCollection:
    """Plot the inclusion probability of every spike-and-slab weight.

    There is one panel per variable with one row per weight, or per group of weights. A bar reaches
    two Monte Carlo standard errors (``mcse_inclusion`` of :func:`~numpyro_spikeslab.summary`) to
    either side. If the rows would take more than 30 inches and ``top`` is None, points without bars
    are drawn along the horizontal axis instead, with the names of weights above the threshold, in
    any of the methods or the reference, the most included first, as many as there is room for.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param var_names: the weights to plot; all pairs of the (first) posterior by default.
    :param reference: marked by black ticks: the name of a method in ``data``, or inclusion
        probabilities by variable, shaped like the weights.
    :param top: how many weights of each variable to show, by decreasing inclusion probability, the
        highest of all methods; one more row has the largest probability of all others. The default
        shows all in their own order.
    :param threshold: a probability, drawn as a dashed line; the names of weights above it in any of
        the methods are bold. The default gives the median probability model, 1 marks no weight.
    :returns: the picture; ``.savefig("inclusion.png")`` writes it.
    :raises ValueError: if there is no pair, if an argument is outside its range, or if shapes or
        coordinates differ.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import plot_inclusion
    >>> spike = np.random.default_rng(0).binomial(1, [0.1, 0.9], size=(4, 100, 2))
    >>> draws = {"w": 2.0 * spike, "w_spike": spike}
    >>> picture = plot_inclusion(arviz_base.from_dict({"posterior": draws}))
    >>> [label.get_text() for label in picture.get_target("w", {}).get_yticklabels()]
    ['0', '1']
    """
    arviz_data.check_top(top)
    if not 0 <= threshold <= 1:
        remedy = "Give 1 to mark no weight."
        raise bad("threshold", threshold, "a probability between 0 and 1", remedy)
    methods = arviz_data.as_methods(data)
    names = arviz_data.comparable_pairs(methods, var_names)
    ticks, note = {}, ""
    if isinstance(reference, str):
        arviz_data.check_reference(reference, methods)
        ticks = {name: inclusion(methods[reference], name) for name in names}
        note = f" (black ticks: {reference})"
    elif reference is not None:
        draws = posterior(next(iter(methods.values())))
        like = {name: arviz_data.mean(draws[name]) for name in names}
        ticks = arviz_data.values_by_name(reference, like, names)
        note = " (black ticks: reference)"
    tables = {name: table_of(methods, name, ticks.get(name, np.nan)) for name in names}
    row = ROW * (0.8 + 0.2 * len(methods))
    if top is None and sum(x.shape[-1] + 1 for x in tables.values()) * row > MAX_HEIGHT:
        picture = along_index(tables, threshold)
    else:
        tables = {name: top_rows(table, top) for name, table in tables.items()}
        picture = in_rows(tables, threshold, row)
    axes = picture.get_target(names[-1], {})
    axes.set_xlabel(axes.get_xlabel() + note, **LITERAL)
    pictures.add_legend(picture)
    return picture


def table_of(methods: Methods, name: str, reference: xr.DataArray | float) -> xr.DataArray:
    """Return inclusion, its Monte Carlo error and the reference, by method and element."""
    rows = ["inclusion", "mcse_inclusion"]
    parts = (inclusion_statistics(tree, name).sel(summary=rows) for tree in methods.values())
    table = arviz_data.by_method(parts, methods)
    ticks = (xr.zeros_like(table.isel(summary=0)) + reference).assign_coords(summary="reference")
    table = xr.concat([table, ticks], "summary").transpose("summary", "model", ...)
    plates, element = list(map(str, table.dims[2:])), f"{name}_element"
    labels = arviz_data.element_labels(table, plates)
    cells = table.values.reshape(*table.shape[:2], -1)
    first = next(iter(methods.values()))
    groups = group_labels(first, posterior(first)[name])
    if groups is not None:
        _, labels, places = groups_of(groups.values, cells[0].max(axis=0))
        cells = cells[..., places]
    axis = xr.Variable(element, labels, {"long_name": ", ".join(plates) or name})
    return xr.DataArray(
        cells,
        {"summary": table["summary"].values, "model": list(methods), element: axis},
        ["summary", "model", element],
    )


def top_rows(table: xr.DataArray, top: int | None) -> xr.DataArray:
    """Keep the most included elements, and one more that is the largest of all others."""
    order = arviz_data.most_included(table.sel(summary="inclusion").max("model"), top)
    others = np.setdiff1d(np.arange(table.shape[-1]), order)
    if not others.size:
        return table[..., order]
    dim = str(table.dims[-1])
    largest = table[..., others].max(dim).where(table["summary"] != "mcse_inclusion")
    largest = largest.expand_dims({dim: [f"largest of {others.size:,} others"]}, axis=-1)
    return xr.concat([table[..., order], largest], dim)


def points(table: xr.DataArray, gap: float) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield each method with its probabilities and their places, which are beside each other."""
    shifts = gap * np.linspace(-1, 1, table.sizes["model"] + 2)[1:-1]
    for method, probs, shift in zip(table["model"].values, table.values[0], shifts, strict=True):
        yield str(method), probs, np.arange(len(probs)) + shift


def in_rows(tables: Mapping[str, xr.DataArray], threshold: float, row: float) -> PlotCollection:
    """Draw points with bars in a labelled row for each weight, a panel for each variable."""
    heights = np.array([(table.shape[-1] + 1) * row for table in tables.values()])
    heights *= min(1.0, MAX_HEIGHT / heights.sum())
    labels = {name: table[table.dims[-1]].values.tolist() for name, table in tables.items()}
    letters = max(len(label) for each in labels.values() for label in each)
    size = WIDTH + LETTER * letters, 0.8 + heights.sum()
    data, options = xr.Dataset(tables), {"height_ratios": heights, "sharex": True}
    picture = pictures.panels(data, "__variable__", 1, size, **options)
    for height, (name, table) in zip(heights, tables.items(), strict=True):
        axes, places = picture.get_target(name, {}), np.arange(table.shape[-1])
        inclusion, errors, reference = table.values
        bars = np.stack([inclusion.clip(max=2 * errors), (1 - inclusion).clip(max=2 * errors)], 1)
        style = {"fmt": "o", "markersize": 4, "elinewidth": 1}
        for bar, (method, probs, y) in zip(bars, points(table, 0.75), strict=True):
            axes.errorbar(probs, y, xerr=bar, label=method, **style)
        axes.scatter(reference[0], places, marker="|", **TICK)
        axes.axvline(threshold, **THRESHOLD)
        axes.grid(axis="y", color="#e5e5e5")
        axes.set_axisbelow(True)
        high = dict(zip(labels[name], inclusion.max(axis=0) > threshold, strict=True))
        for text in label_ticks(axes.yaxis, labels[name], height):
            text.set_fontweight("bold" if high.get(text.get_text()) else "normal")
        axes.set(xlim=(-0.02, 1.02), ylim=(len(places) - 0.4, -0.6))
        axes.set_ylabel(name, **LITERAL)
    axes.set_xlabel("inclusion probability")
    return picture


def along_index(tables: Mapping[str, xr.DataArray], threshold: float) -> PlotCollection:
    """Draw points along the index of each variable, with names above."""
    names = {name: names_above(table, threshold) for name, table in tables.items()}
    letters = max((len(label) for each in names.values() for label in each.values()), default=0)
    size = INDEX_WIDTH + 0.9, len(tables) * (INDEX_HEIGHT + 0.8 * LETTER * letters)
    picture = pictures.panels(xr.Dataset(tables), "__variable__", 1, size, sharex=False)
    for name, table in tables.items():
        axes, places = picture.get_target(name, {}), np.arange(table.shape[-1])
        for method, probs, x in points(table, NAME / INDEX_WIDTH * len(places)):
            axes.plot(x, probs, "o", markersize=4, label=method)
        reference = table.values[2, 0]
        axes.scatter(places, np.where(reference > threshold, reference, np.nan), marker="_", **TICK)
        axes.axhline(threshold, **THRESHOLD)
        for place, label in names[name].items():
            axes.text(place, 1.06, label, fontsize=8, rotation=90, ha="center", **LITERAL)
        axes.xaxis.get_major_locator().set_params(integer=True)
        margin = 0.5 + 0.01 * len(places)
        axes.set(xlim=(-margin, len(places) - 1 + margin), ylim=(-0.03, 1.03))
        axes.set_xlabel(f"index of {table[table.dims[-1]].attrs['long_name']}", **LITERAL)
        axes.set_ylabel(f"inclusion probability\nof {name}", **LITERAL)
    return picture


def names_above(table: xr.DataArray, threshold: float) -> dict[int, str]:
    """Choose names of elements above the threshold that do not overlap, the highest first."""
    highest = table.sel(summary=["inclusion", "reference"]).max(["summary", "model"]).values
    labels, gap = table[table.dims[-1]].values, NAME / INDEX_WIDTH * len(highest)
    names: dict[int, str] = {}
    for place in arviz_data.most_included(highest, int(np.sum(highest > threshold))):
        if all(abs(place - other) >= gap for other in names):
            names[int(place)] = str(labels[place])
    return names


def plot_weights(data: xr.DataTree | Methods, weights: str = WEIGHTS) -> PlotCollection:
    """Plot which task uses which latent function: inclusion probabilities as a heat map.

    There is one row per task, one column per function and one panel per method. Align Markov chains
    first, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method.
    :param weights: a pair with two plates: tasks, then functions.
    :returns: the picture; ``.savefig("weights.png")`` writes it.
    :raises ValueError: if ``weights`` is no pair with two plates, or if coordinates differ.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import plot_weights
    >>> spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100, 3, 2))
    >>> data = arviz_base.from_dict({"posterior": {"W": 2.0 * spike, "W_spike": spike}})
    >>> picture = plot_weights(data)
    """
    methods = arviz_data.as_methods(data)
    (name,) = arviz_data.comparable(methods, weights)
    arviz_data.check_pairs(methods, [name], "weights")
    probs = arviz_data.by_method((inclusion(tree, name) for tree in methods.values()), methods)
    arviz_data.check_finite(probs.rename(name))
    if probs.ndim != 3:
        got = f"`{name}` with the plates {list(probs.dims[1:])}"
        raise bad("weights", got, "two, tasks and functions", "Draw it with plot_inclusion.")
    tasks, functions = ([str(label) for label in probs[dim].values] for dim in probs.dims[1:])
    height = min(CELL * len(tasks), MAX_HEIGHT)
    letters = [LETTER * max(map(len, each)) for each in (tasks, functions)]
    # labels of functions that are wider than a cell are turned
    is_turned = letters[1] > CELL
    width = len(methods) * max(CELL * len(functions), 1.5) + letters[0] + 1.4
    size = width, height + 0.9 + letters[1] * is_turned
    cells = probs.to_dataset(name=name)
    picture = pictures.panels(cells, "model", len(methods), size, sharey=True)
    axes = [picture.get_target(name, {"model": method}) for method in methods]
    for panel, method, cells in zip(axes, methods, probs.values, strict=True):
        image = panel.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        label_ticks(panel.xaxis, functions, CELL * len(functions))
        label_ticks(panel.yaxis, tasks, height)
        panel.tick_params(axis="x", rotation=90 * is_turned)
        panel.set_xlabel(probs.dims[2], **LITERAL)
        if len(methods) > 1:
            panel.set_title(method, fontsize=10, **LITERAL)
    axes[0].set_ylabel(probs.dims[1], **LITERAL)
    bar = picture.viz["figure"].item().colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("inclusion probability", size=9)
    return picture
