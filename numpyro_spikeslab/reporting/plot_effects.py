# SPDX-License-Identifier: Apache-2.0
"""A picture of effects: weights given inclusion, beside their inclusion probabilities."""

from collections.abc import Iterable

from arviz_plots import PlotCollection, plot_forest, visuals
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import Methods, inclusion, plates
from numpyro_spikeslab.reporting.pictures import GREY, LETTER, LITERAL, ROW
from numpyro_spikeslab.reporting.weights import effect_statistics

WIDTH = 6.0
"""Inches of both panels, to which the labels are added."""


def plot_effects(
    data: xr.DataTree | Methods, var_names: str | Iterable[str] | None = None, top: int | None = 20
) -> PlotCollection:
    """Plot the most included weights: their values given inclusion, and how probable that is.

    A forest of ``arviz_plots`` has a row for each weight: mean and intervals among the draws that
    include it, of 50% and of ``rcParams["stats.ci_prob"]``, and its inclusion probability in a
    panel of its own. Weights of draws that never include them have none.

    :param data: ArviZ data, or several by the name of the method.
    :param var_names: the weights to plot; all pairs of the (first) posterior by default.
    :param top: how many weights of each variable to show, by decreasing inclusion probability, the
        highest of all methods. None shows all in their own order.
    :returns: the picture; ``.savefig("effects.png")`` writes it.
    :raises ValueError: if there is no pair, if ``top`` is below 1, or if coordinates differ.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import plot_effects
    >>> spike = np.random.default_rng(0).binomial(1, [0.1, 0.9], size=(4, 100, 2))
    >>> draws = {"w": 2.0 * spike, "w_spike": spike}
    >>> picture = plot_effects(arviz_base.from_dict({"posterior": draws}))
    """
    arviz_data.check_top(top)
    methods = arviz_data.as_methods(data)
    names = arviz_data.comparable_pairs(methods, var_names)
    tables = [table_of(methods, name, top, f"{name}[%s]" if names[1:] else "%s") for name in names]
    table = xr.concat(tables, "weight")
    rows = {str(row): table.sel(row=row, drop=True).to_dataset() for row in table["row"].values}
    twig, trunk = (
        xr.concat([rows[f"{part}_{end}"] for end in ("lower", "upper")], "ci_bound").assign_coords(
            ci_bound=["lower", "upper"]
        )
        for part in ("twig", "trunk")
    )
    # all statistics are given, so the forest looks at the shape of the draws alone
    draws = rows["mean"].expand_dims(chain=1, draw=1, column=["labels", "forest", "inclusion"])
    labels = table["weight"].values
    letters = LETTER * max(map(len, labels))
    height = 1.0 + ROW * len(labels) * (0.8 + 0.2 * len(methods))
    picture = plot_forest(
        xr.DataTree.from_dict({"posterior": draws}),
        combined=True,
        labels=["weight"],
        backend="matplotlib",
        visuals={"labels": LITERAL},
        stats={"point_estimate": rows["mean"], "twig": twig, "trunk": trunk},
        figure_kwargs={
            "figsize": (WIDTH + letters, height),
            "width_ratios": [letters, 4, 2],
            "layout": "constrained",
        },
    )
    picture.map(
        visuals.scatter_x,
        "inclusion",
        data=rows["inclusion"],
        coords={"column": "inclusion"},
        ignore_aes={"overlay"},
    )
    names_of_rows, forest, side = (
        picture.get_target("effect", {"column": column}) for column in draws["column"].values
    )
    names_of_rows.axis("off")
    forest.axvline(0.0, color=GREY, linewidth=0.8, zorder=0)
    forest.set_ylim(-0.6, len(labels) - 0.4)
    forest.set_xlabel(f"{names[0] if len(names) == 1 else 'weight'} given inclusion", **LITERAL)
    side.set(xlim=(-0.03, 1.03), xlabel="inclusion probability")
    if len(methods) > 1:
        picture.add_legend("model")
    return picture


def table_of(methods: Methods, name: str, top: int | None, label: str) -> xr.DataArray:
    """Return statistics of the most included weights, by row, method and weight."""
    parts = []
    for tree in methods.values():
        twig, trunk = (effect_statistics(tree, name, prob=prob) for prob in (None, 0.5))
        rows = [twig[0], *twig[2:], *trunk[2:], inclusion(tree, name)]
        parts.append(np.stack([row.values.ravel() for row in rows]))
    cells = np.stack(parts, axis=1)
    labels = arviz_data.element_labels(twig, plates(twig, "summary"))
    order = arviz_data.most_included(cells[-1].max(axis=0), top)
    names = ["mean", "twig_lower", "twig_upper", "trunk_lower", "trunk_upper", "inclusion"]
    coords = {"row": names, "model": list(methods), "weight": [label % x for x in labels]}
    return xr.DataArray(cells, coords, [*coords], name="effect").isel(weight=order)
