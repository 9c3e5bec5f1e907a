# SPDX-License-Identifier: Apache-2.0
"""The picture of means and intervals."""

from collections.abc import Iterable
from typing import Any

import arviz_plots
from arviz_plots import PlotCollection, visuals
import xarray as xr

from numpyro_spikeslab.reporting.data import (
    central_interval,
    posterior,
    posterior_mean,
    sample_dims,
)
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    comparable,
    reference_values,
)
from numpyro_spikeslab.reporting.pictures import (
    INK,
    LETTER,
    PANEL,
    Reference,
    add_legend,
    backend,
    legend_of,
    row_height,
)


def plot_forest(
    data: xr.DataTree | Methods,
    var_names: str | Iterable[str],
    reference: Reference | None = None,
) -> PlotCollection:
    """Plot posterior means and intervals, of one method or of several beside each other.

    :func:`arviz_plots.plot_forest` draws it: a circle is the mean, the thick line the central
    half of the draws, the thin line their central ``arviz_base.rcParams["stats.ci_prob"]``.
    Unlike there, Markov chains and variational draws can share the picture.

    :param data: ArviZ data, or several by the name of the method, with a legend.
    :param var_names: the variables to plot.
    :param reference: marked by black ticks: the name of a method in ``data``, for its means, or
        values by variable, shaped like it. None, the default, marks nothing.
    :returns: the picture; ``.savefig("forest.png")`` writes it.
    :raises ValueError: if there is no posterior, if ``var_names`` or ``reference`` is unknown, or
        if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_forest
        >>> w = np.random.default_rng(0).normal(size=(4, 100, 2))
        >>> data = arviz_base.from_dict({"posterior": {"w": w}})
        >>> picture = plot_forest(data, "w", reference={"w": [0.0, 0.0]})
        >>> picture.viz["reference"]["w"].sizes["w_dim_0"]
        2
    """
    methods = as_methods(data)
    names = comparable(methods, var_names)
    picture = rows_of(forest_statistics(methods, names), len(methods))
    panel = picture.get_target(None, {"column": "forest"})
    places = picture.get_aes_as_dataset("y")
    bottom, top = (each.to_array() for each in (places.min(), places.max()))
    backend().ylim((bottom.min() - 0.6, top.max() + 0.6), panel)
    axis = "posterior mean and intervals"
    if reference is not None:
        middle = places.mean("model") if len(methods) > 1 else places
        style = {"marker": "|", "color": INK, "size": 150, "y": middle}
        picture.map(
            visuals.scatter_x,
            "reference",
            data=reference_values(reference, methods, names, posterior_mean),
            coords={"column": "forest"},
            ignore_aes=picture.aes_set - {"overlay"},
            **style,
        )
        axis += legend_of(reference)
    backend().xlabel(axis, panel)
    add_legend(picture, methods)
    return picture


def forest_statistics(methods: Methods, names: list[str]) -> dict[Any, xr.Dataset]:
    """What arviz-plots draws, ready made.

    Chains and variational draws differ in their dimensions, so only their statistics can share a
    dataset.
    """
    draws = [posterior(tree)[names] for tree in methods.values()]
    parts = {
        "point_estimate": [each.mean(sample_dims(each)) for each in draws],
        "trunk": [central_interval(each, 0.5) for each in draws],
        "twig": [central_interval(each) for each in draws],
    }
    joined = {kind: by_method(each, methods) for kind, each in parts.items()}
    if len(methods) > 1:
        return joined
    # A dimension of length one would make arviz-plots shift the rows off their labels.
    return {kind: each.squeeze("model", drop=True) for kind, each in joined.items()}


def rows_of(statistics: dict[Any, xr.Dataset], count: int) -> PlotCollection:
    """The picture of :func:`arviz_plots.plot_forest`, in a size that leaves room for all labels."""
    mean = statistics["point_estimate"]
    plates = [str(dim) for dim in mean.dims if dim != "model"]
    elements = sum(values.size // count for values in mean.data_vars.values())
    margin = width_of_labels(mean, plates)
    return arviz_plots.plot_forest(
        xr.DataTree.from_dict({"posterior": mean.expand_dims(sample=1)}),
        sample_dims="sample",
        combined=True,
        stats=statistics,
        shade_label=plates[-1] if plates else None,
        backend="matplotlib",
        visuals={"shade": {"color": "#c0c0c0"}},
        figure_kwargs={
            "figsize": (PANEL + margin, 0.8 + elements * row_height(count)),
            "width_ratios": [margin, PANEL],
            "layout": "constrained",
        },
    )


def width_of_labels(values: xr.Dataset, plates: list[str]) -> float:
    """Inches for the columns of labels, of variables and of plates.

    arviz-plots spaces the columns evenly and aligns the first to the left, the last to the right
    and the others to the centre; the tightest pair of neighbours decides.
    """
    texts: list[Any] = [[*map(str, values.data_vars), "variable"]]
    texts += [[dim, *map(str, values[dim].values)] for dim in plates]
    letters = [max(map(len, column)) for column in texts]
    right = [letters[0], *(length / 2 for length in letters[1:])]
    left = [*(length / 2 for length in letters[1:-1]), letters[-1]]
    gap = 1 + max(map(sum, zip(right, left, strict=False)))
    return LETTER * gap * max(1.0, len(letters) - 0.8)
