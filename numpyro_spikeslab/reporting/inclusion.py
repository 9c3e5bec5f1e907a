# SPDX-License-Identifier: Apache-2.0
"""The picture of inclusion probabilities."""

from collections.abc import Iterable

import arviz_base
from arviz_base.labels import BaseLabeller
from arviz_plots import PlotCollection, visuals
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.data import inclusion, pairs, posterior
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    check_pairs,
    comparable,
    reference_values,
)
from numpyro_spikeslab.reporting.pictures import (
    INK,
    LETTER,
    MAX_HEIGHT,
    PANEL,
    ROW,
    Reference,
    add_legend,
    backend,
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
) -> PlotCollection:
    """Plot the inclusion probability of every spike-and-slab weight.

    One row per weight, one panel per variable. A bar reaches two Monte Carlo standard errors to
    either side (``mcse_inclusion`` of :func:`~numpyro_spikeslab.summary`); a weight
    whose indicator never changed has none. A picture grows with the number of weights up to 30
    inches; then the rows get narrower and not every one is labelled.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param var_names: the weights to plot; all pairs of the (first) posterior by default.
    :param reference: marked by black ticks: the name of a method in ``data``, or inclusion
        probabilities by variable, shaped like the weights. None, the default, marks nothing.
    :param top: how many weights of each variable to show, those of the highest inclusion
        probability in any of the methods, in decreasing order; one more row has the largest
        probability of all others. None, the default, shows all in their own order.
    :returns: the picture; ``.savefig("inclusion.png")`` writes it.
    :raises ValueError: if there is no posterior or no pair, if ``var_names`` or ``reference`` is
        unknown, if ``top`` is less than 1, or if shapes or coordinates differ.

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
    methods = as_methods(data)
    default = pairs(posterior(next(iter(methods.values()))))
    names = comparable(methods, var_names, default)
    check_pairs(methods, names, "var_names")
    rows = ["inclusion", "mcse_inclusion"]  # Markov chains have more of them
    parts = {
        name: [inclusion_statistics(tree, name).sel(summary=rows) for tree in methods.values()]
        for name in names
    }
    every = {name: by_method(each, methods) for name, each in parts.items()}
    orders = {name: order_of(table, top) for name, table in every.items()}
    tables = {name: ranked(table, orders[name], top) for name, table in every.items()}
    picture = labelled_rows(tables, len(methods))
    bars = xr.Dataset({name: bars_of(table, name) for name, table in tables.items()})
    picture.map(visuals.grid, axis="y", color="#e5e5e5", ignore_aes="all", store_artist=False)
    picture.map(visuals.line_xy, "mcse", data=bars, width=1)
    picture.map(visuals.scatter_xy, "inclusion", size=14)
    axis = "inclusion probability"
    if reference is not None:
        marks = reference_values(reference, methods, names, inclusion)
        shown = {name: ranked(marks[name], orders[name], top) for name in names}
        ticks = xr.Dataset({name: over_rows(shown[name], name) for name in names})
        style = {"marker": "|", "color": INK, "size": 70}
        picture.map(visuals.scatter_xy, "reference", data=ticks, ignore_aes="all", **style)
        axis += legend_of(reference)
    backend().xlabel(axis, picture.get_target(names[-1], {}))
    add_legend(picture, methods)
    return picture


def order_of(table: xr.DataArray, top: int | None) -> np.ndarray | None:
    """Weights by decreasing inclusion probability, None where all keep their places."""
    highest = table.sel(summary="inclusion").max("model").values.ravel()
    if top is None or highest.size <= top:
        return None
    return np.argsort(-highest, kind="stable")


def ranked(values: xr.DataArray, order: np.ndarray | None, top: int | None) -> xr.DataArray:
    """Values of the first weights in this order, and the largest of all others."""
    if order is None:
        return values
    kinds = [dim for dim in ("model", "summary") if dim in values.dims]
    labels = np.array(element_labels(values.isel(dict.fromkeys(kinds, 0))))[order]
    rows = values.transpose(*kinds, ...)
    rows = rows.stack(element=rows.dims[len(kinds) :]).drop_vars(["element", *rows.coords])
    rows = rows.assign_coords({kind: values[kind] for kind in kinds}).isel(element=order)
    others = rows.isel(element=slice(top, None)).max("element")
    if "summary" in kinds:
        others = others.where(others["summary"] == "inclusion")
    found = xr.concat([rows.isel(element=slice(top)), others], dim="element")
    names = [*labels[:top], f"largest of {len(order[top:])} others"]
    return found.transpose(*kinds, "element").assign_coords(element=names)


def labelled_rows(tables: dict[str, xr.DataArray], count: int) -> PlotCollection:
    """An empty panel for each variable, with a row for each weight."""
    labels = {
        name: element_labels(table.isel(summary=0, model=0)) for name, table in tables.items()
    }
    heights = np.array([len(column) + 1 for column in labels.values()]) * row_height(count)
    heights *= min(1.0, MAX_HEIGHT / heights.sum())
    letters = max(len(label) for column in labels.values() for label in column)
    estimates = {
        name: over_rows(table.sel(summary="inclusion", drop=True), name)
        for name, table in tables.items()
    }
    picture = panels(
        xr.Dataset(estimates),
        cols=["__variable__"],
        col_wrap=1,
        figure={
            "figsize": (PANEL + LETTER * letters, 0.8 + heights.sum()),
            "height_ratios": heights,
        },
        aes={"color": ["model"], "y": ["model"]},
        y=list(np.linspace(-0.25, 0.25, count) if count > 1 else [0.0]),
    )
    for height, (name, column) in zip(heights, labels.items(), strict=True):
        panel = picture.get_target(name, {})
        every = int(np.ceil(0.7 * ROW * len(column) / height))
        backend().yticks(range(0, len(column), every), column[::every], panel, fontsize=8)
        backend().ylim((len(column) - 0.4, -0.6), panel)
        backend().xlim((-0.02, 1.02), panel)
        backend().ylabel(name, panel)
    return picture


def flat(values: xr.DataArray, name: str) -> xr.DataArray:
    """Values by method along one dimension, of which each variable has its own length."""
    leading = [dim for dim in values.dims if dim == "model"]
    array = values.transpose(*leading, ...).values
    sizes = [values.sizes[dim] for dim in leading]
    coords = {dim: values[dim] for dim in leading}
    return xr.DataArray(array.reshape(*sizes, -1), coords, [*leading, f"{name}_point"])


def over_rows(values: xr.DataArray, name: str) -> xr.DataArray:
    """Coordinates of points, one in the row of each weight."""
    points = flat(values, name)
    return xy(points, np.arange(points.shape[-1]))


def bars_of(table: xr.DataArray, name: str) -> xr.DataArray:
    """Coordinates of bars of two Monte Carlo standard errors to either side.

    All bars of a method are one line, which NaN interrupts after each.
    """
    centre, error = (table.sel(summary=row, drop=True) for row in ("inclusion", "mcse_inclusion"))
    ends = [(centre + width * error).clip(0, 1) for width in (-2, 2, np.nan)]
    line = flat(xr.concat(ends, "end").transpose(..., "end"), name)
    return xy(line, np.repeat(np.arange(line.shape[-1] // 3), 3))


def element_labels(values: xr.DataArray) -> list[str]:
    """The coordinates of each element, as ArviZ writes them."""
    elements = arviz_base.xarray_sel_iter(values.to_dataset(name="w"), skip_dims=set())
    return [BaseLabeller().sel_to_str(sel, isel) for _, sel, isel in elements]
