# SPDX-License-Identifier: Apache-2.0
"""The picture of inclusion probabilities."""

from collections.abc import Iterable

from arviz_plots import PlotCollection, visuals
from arviz_plots.backend import matplotlib as backend
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.data import inclusion, pairs, posterior
from numpyro_spikeslab.reporting.elements import (
    Tables,
    are_above,
    bars_of,
    by_element,
    labels_of,
    most_included,
    probabilities,
)
from numpyro_spikeslab.reporting.inclusion_index import draw_index
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    check_pairs,
    comparable,
    reference_values,
)
from numpyro_spikeslab.reporting.pictures import (
    DASHED,
    GRID,
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
from numpyro_spikeslab.reporting.stats import check_top, inclusion_statistics


def plot_inclusion(
    data: xr.DataTree | Methods,
    var_names: str | Iterable[str] | None = None,
    reference: Reference | None = None,
    *,
    top: int | None = None,
    threshold: float = 0.5,
) -> PlotCollection:
    """Plot the inclusion probability of every spike-and-slab weight.

    One row per weight, one panel per variable. A bar reaches two Monte Carlo standard errors to
    either side (``mcse_inclusion`` of :func:`~numpyro_spikeslab.summary`); a weight without one has
    no bar. Where the rows would take more than 30 inches and ``top`` is None, the weights stand
    along the horizontal axis instead, and only those above the threshold, in any of the methods or
    the reference, have bars, ticks and names. Names are left to the highest where there is no room
    for all.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param var_names: the weights to plot; all pairs of the (first) posterior by default.
    :param reference: marked by black ticks: the name of a method in ``data``, or inclusion
        probabilities by variable, shaped like the weights. None, the default, marks nothing.
    :param top: how many weights of each variable to show, those of the highest inclusion
        probability in any of the methods, in decreasing order; one more row has the largest
        probability of all others. None, the default, shows all in their own order.
    :param threshold: a probability, drawn as a dashed line; the names of weights above it in any of
        the methods are bold. Above the default, 0.5, are the weights of the median probability
        model. 1 sets no weight apart.
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
        >>> picture.viz["inclusion"]["w"].dims
        ('model',)
    """
    check_top(top)
    check_threshold(threshold)
    methods = as_methods(data)
    draws = posterior(next(iter(methods.values())))
    default = pairs(draws)
    if var_names is None and not default:
        raise ValueError(
            f"data: its posterior has the variables {sorted(map(str, draws.data_vars))}, expected "
            "a weight `w` beside its indicator `w_spike`; collect both when sampling."
        )
    names = comparable(methods, var_names, default)
    check_pairs(methods, names, "var_names")
    tables = {name: table_of(methods, name) for name in names}
    marks = {}
    if reference is not None:
        known = reference_values(reference, methods, names, inclusion)
        marks = {name: by_element(known[name], name) for name in names}
    if top is None and heights_of(tables).sum() > MAX_HEIGHT:
        picture = draw_index(tables, marks, threshold)
    else:
        choices = {name: most_included(probabilities(x), top) for name, x in tables.items()}
        tables = {name: choices[name].with_others(x) for name, x in tables.items()}
        marks = {name: choices[name].with_others(x) for name, x in marks.items()}
        picture = draw_rows(tables, marks, threshold)
    if reference is not None:
        last = picture.get_target(names[-1], {})
        backend.xlabel(last.get_xlabel() + legend_of(reference), last, **LITERAL)
    add_legend(picture, methods, marker="o", markersize=4, linestyle="none")
    return picture


def check_threshold(threshold: float) -> None:
    """Raise unless the threshold is a probability."""
    if not 0 <= threshold <= 1:
        raise ValueError(
            f"threshold: got {threshold}, expected a probability between 0 and 1; give 1 to set no "
            "weight apart."
        )


def table_of(methods: Methods, name: str) -> xr.DataArray:
    """Inclusion probabilities and their Monte Carlo errors, by method and element."""
    rows = ["inclusion", "mcse_inclusion"]  # Markov chains have more of them
    parts = (inclusion_statistics(tree, name).sel(summary=rows) for tree in methods.values())
    return by_element(by_method(parts, methods), name)


def heights_of(tables: Tables) -> np.ndarray:
    """Inches of panels with a row for each weight."""
    return np.array([(x.shape[-1] + 1) * row_height(x.sizes["model"]) for x in tables.values()])


def draw_rows(tables: Tables, marks: Tables, threshold: float) -> PlotCollection:
    """A panel for each variable, with a row for each weight."""
    picture = labelled_rows(tables, threshold)
    rows = {name: np.arange(x.shape[-1]) for name, x in tables.items()}
    bars = xr.Dataset(
        {name: xy(bars_of(x), np.repeat(rows[name], 3)) for name, x in tables.items()}
    )
    picture.map(visuals.grid, axis="y", color=GRID, ignore_aes="all", store_artist=False)
    picture.map(visuals.line_xy, "mcse", data=bars, width=1)
    picture.map(visuals.scatter_xy, "inclusion", size=14)
    if marks:
        draw_reference(picture, {name: xy(x, rows[name]) for name, x in marks.items()}, "|", 70)
    line = xr.Dataset(dict.fromkeys(tables, threshold))
    picture.map(visuals.vline, "threshold", data=line, ignore_aes="all", **DASHED)
    return picture


def labelled_rows(tables: Tables, threshold: float) -> PlotCollection:
    """An empty panel for each variable, with a labelled row for each weight."""
    heights = heights_of(tables)
    heights *= min(1.0, MAX_HEIGHT / heights.sum())
    letters = max(len(label) for table in tables.values() for label in labels_of(table))
    count = next(iter(tables.values())).sizes["model"]
    points = {name: xy(probabilities(x), np.arange(x.shape[-1])) for name, x in tables.items()}
    picture = panels(
        xr.Dataset(points),
        cols=["__variable__"],
        col_wrap=1,
        figure={
            "figsize": (PANEL + LETTER * letters, 0.8 + heights.sum()),
            "height_ratios": heights,
        },
        aes={"color": ["model"], "y": ["model"]},
        y=lanes(count),
    )
    for height, (name, table) in zip(heights, tables.items(), strict=True):
        panel = picture.get_target(name, {})
        label_rows(panel, labels_of(table), height, bold=are_above(table, threshold))
        backend.xlim((-0.02, 1.02), panel)
        backend.ylabel(name, panel, **LITERAL)
    backend.xlabel("inclusion probability", panel)
    return picture
