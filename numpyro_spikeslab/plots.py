# SPDX-License-Identifier: Apache-2.0
"""Pictures of spike-and-slab posteriors, on arviz-plots with its matplotlib backend."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from importlib import import_module
from statistics import NormalDist
from types import ModuleType
from typing import Any

import arviz_base
from arviz_base.labels import BaseLabeller
import arviz_plots
from arviz_plots import PlotCollection, visuals
import arviz_stats
import numpy as np
from numpy.typing import ArrayLike
import pandas as pd
import xarray as xr

from numpyro_spikeslab import diagnostics
from numpyro_spikeslab.diagnostics import FUNCTIONS, WEIGHTS

__all__ = [
    "plot_fit",
    "plot_forest",
    "plot_inclusion",
    "plot_latent_functions",
    "plot_weights",
]

Methods = Mapping[str, xr.DataTree]
Fit = xr.DataTree | tuple[ArrayLike, ArrayLike]
Reference = str | Mapping[str, ArrayLike]

PANEL = 5.5  # inches of width, to which the labels add theirs
ROW = 0.2  # inches for one weight, almost two lines of 8 point type
MAX_HEIGHT = 30.0  # inches; beyond it matplotlib pictures get slow and viewers scale them down
LETTER = 0.085  # inches of a letter of 10 point type
CELL = 0.36  # inches of the side of a cell, wide enough for "-0.53" in 7 point type
CURVES = (3.0, 1.8)  # inches of a panel with curves
FITTED = ("posterior_predictive", "predictions", "posterior")
ENTRY = 1.2  # inches of width of an entry of a legend
INK = "black"
OBSERVED, MISSING = "#808080", "#ededed"


def backend() -> ModuleType:
    """The arviz-plots backend, imported late because matplotlib is optional there."""
    return import_module("arviz_plots.backend.matplotlib")


def as_methods(data: xr.DataTree | Methods) -> Methods:
    """One posterior, or several by name, as a mapping."""
    methods = {"posterior": data} if isinstance(data, xr.DataTree) else data
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(
            f"data: got {data!r:.60}, expected ArviZ data or a mapping from names to ArviZ data; "
            "make it with arviz_base.from_numpyro or arviz_base.from_numpyro_svi."
        )
    return methods


def by_method(parts: Iterable, methods: Iterable[str]):
    """Concatenate one array or dataset per method along the dimension ``model`` of ArviZ."""
    return xr.concat(list(parts), dim="model").assign_coords(model=list(methods))


def inclusion(data: xr.DataTree, name: str) -> xr.DataArray:
    """Inclusion probabilities of a pair, shaped like its weight."""
    return diagnostics.inclusion_statistics(data, name).sel(summary="inclusion", drop=True)


def posterior_mean(data: xr.DataTree, name: str) -> xr.DataArray:
    """Posterior mean of a variable."""
    draws = diagnostics.posterior(data)
    return draws[name].mean(diagnostics.sample_dims(draws))


def check_pairs(methods: Methods, names: list[str], argument: str) -> None:
    """Raise unless the variables are spike-and-slab weights of every method."""
    for method, tree in methods.items():
        weights = diagnostics.pairs(diagnostics.posterior(tree))
        if not set(names) <= set(weights):
            raise ValueError(
                f"{argument}: got {names}, expected spike-and-slab weights, of which {method!r} "
                f"has {weights}; declare them with spike_slab, or draw them with plot_forest."
            )


def reference_values(
    reference: Reference,
    methods: Methods,
    names: Iterable[str],
    statistic: Callable[[xr.DataTree, str], xr.DataArray],
) -> xr.Dataset:
    """The values to mark: ``statistic`` of one method, or the user's own."""
    first = next(iter(methods))
    if isinstance(reference, str):
        diagnostics.check_reference(reference, methods)
        return xr.Dataset({name: statistic(methods[reference], name) for name in names})
    values = {}
    for name in names:
        if name not in reference:
            raise ValueError(
                f"reference: got values of {list(reference)}, expected `{name}` among them; add "
                "it, or name fewer variables in `var_names`."
            )
        given = np.asarray(reference[name], dtype=float)
        like = statistic(methods[first], name)
        if given.shape != like.shape:
            raise ValueError(
                f"reference: `{name}` has the shape {given.shape}, expected {like.shape}; give "
                f"one value per element, in the order of the dimensions {like.dims}."
            )
        values[name] = like.copy(data=given)
    return xr.Dataset(values)


def legend_of(reference: Reference) -> str:
    """How an axis label explains the marks."""
    return f" (black ticks: {reference if isinstance(reference, str) else 'reference'})"


def curve(x: np.ndarray, y: np.ndarray, name: str) -> xr.DataArray:
    """Coordinates in the layout of ``visuals.scatter_xy``; each variable has its own length."""
    dims = ["model", "plot_axis", f"{name}_point"][-x.ndim - 1 :]
    xy = np.stack([x, np.broadcast_to(y, x.shape)], axis=-2)
    return xr.DataArray(xy, dims=dims, coords={"plot_axis": ["x", "y"]})


def element_labels(values: xr.DataArray) -> list[str]:
    """The coordinates of each element, as ArviZ writes them."""
    elements = arviz_base.xarray_sel_iter(values.to_dataset(name="w"), skip_dims=set())
    return [BaseLabeller().sel_to_str(sel, isel) for _, sel, isel in elements]


def plot_inclusion(
    data: xr.DataTree | Methods,
    var_names: str | Iterable[str] | None = None,
    reference: Reference | None = None,
) -> PlotCollection:
    """Plot the inclusion probability of every spike-and-slab weight.

    One row per weight, one panel per variable. A bar reaches two Monte Carlo standard errors to
    either side (``mcse_inclusion`` of :func:`~numpyro_spikeslab.diagnostics.summary`); a weight
    whose indicator never changed has none. A picture grows with the number of weights up to 30
    inches; then the rows get narrower and not every one is labelled.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param var_names: the weights to plot; all pairs of the (first) posterior by default.
    :param reference: marked by black ticks: the name of a method in ``data``, or inclusion
        probabilities by variable, shaped like the weights. None, the default, marks nothing.
    :returns: the picture; ``.savefig("inclusion.png")`` writes it.
    :raises ValueError: if there is no posterior or no pair, if ``var_names`` or ``reference`` is
        unknown, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab.plots import plot_inclusion
        >>> spike = np.random.default_rng(0).binomial(1, [0.1, 0.9], size=(4, 100, 2))
        >>> draws = {"w": 2.0 * spike, "w_spike": spike}
        >>> picture = plot_inclusion(arviz_base.from_dict({"posterior": draws}))
        >>> picture.viz["inclusion"]["w"].dims
        ('model',)
    """
    methods = as_methods(data)
    first = next(iter(methods))
    draws = diagnostics.posterior(methods[first])
    names = diagnostics.select(draws, var_names, default=diagnostics.pairs(draws))
    diagnostics.check_methods(methods, names, first)
    check_pairs(methods, names, "var_names")

    count = len(methods)
    estimates, bars, labels = {}, {}, {}
    for name in names:
        tables = [diagnostics.inclusion_statistics(tree, name) for tree in methods.values()]
        rows = ["inclusion", "mcse_inclusion"]
        table = by_method((each.sel(summary=rows) for each in tables), methods)
        table = table.transpose("summary", "model", ...)
        centre, error = table.values.reshape(2, count, -1)
        places = np.arange(centre.shape[1])
        estimates[name] = curve(centre, places, name).assign_coords(model=list(methods))
        # All bars of a method are one line, which NaN interrupts after each.
        low, high = np.clip([centre - 2 * error, centre + 2 * error], 0, 1)
        ends = np.stack([low, high, np.full_like(low, np.nan)], axis=-1)
        line = curve(ends.reshape(count, -1), np.repeat(places, 3), name)
        bars[name] = line.assign_coords(model=list(methods))
        labels[name] = element_labels(table[0, 0])

    heights = np.array([len(labels[name]) + 1 for name in names]) * ROW * (0.8 + 0.2 * count)
    letters = max(len(label) for column in labels.values() for label in column)
    heights *= min(1.0, MAX_HEIGHT / heights.sum())
    picture = PlotCollection.wrap(
        xr.Dataset(estimates),
        cols=["__variable__"],
        col_wrap=1,
        backend="matplotlib",
        aes={"color": ["model"], "y": ["model"]},
        y=list(np.linspace(-0.25, 0.25, count) if count > 1 else [0.0]),
        figure_kwargs={
            "figsize": (PANEL + LETTER * letters, 0.8 + heights.sum()),
            "height_ratios": heights,
            "sharex": True,
            "layout": "constrained",
        },
    )
    panels = {name: picture.get_target(name, {}) for name in names}
    for height, (name, panel) in zip(heights, panels.items(), strict=True):
        length = len(labels[name])
        every = int(np.ceil(0.7 * ROW * length / height))
        backend().yticks(range(0, length, every), labels[name][::every], panel, fontsize=8)
        backend().ylim((length - 0.4, -0.6), panel)
        backend().xlim((-0.02, 1.02), panel)
        backend().ylabel(name, panel)
    picture.map(visuals.grid, axis="y", color="#e5e5e5", ignore_aes="all", store_artist=False)
    picture.map(visuals.line_xy, "mcse", data=xr.Dataset(bars), width=1)
    picture.map(visuals.scatter_xy, "inclusion", size=14)
    axis = "inclusion probability"
    if reference is not None:
        marks = reference_values(reference, methods, names, inclusion)
        ticks = {
            name: curve(mark.values.ravel(), np.arange(mark.size), name)
            for name, mark in ((name, marks[name]) for name in names)
        }
        style = {"marker": "|", "color": INK, "size": 70}
        picture.map(
            visuals.scatter_xy, "reference", data=xr.Dataset(ticks), ignore_aes="all", **style
        )
        axis += legend_of(reference)
    backend().xlabel(axis, panels[names[-1]])
    if count > 1:
        picture.add_legend("model", title="")
    return picture


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
        >>> from numpyro_spikeslab.plots import plot_forest
        >>> w = np.random.default_rng(0).normal(size=(4, 100, 2))
        >>> data = arviz_base.from_dict({"posterior": {"w": w}})
        >>> picture = plot_forest(data, "w", reference={"w": [0.0, 0.0]})
        >>> picture.viz["reference"]["w"].sizes["w_dim_0"]
        2
    """
    methods = as_methods(data)
    first = next(iter(methods))
    names = diagnostics.select(diagnostics.posterior(methods[first]), var_names)
    diagnostics.check_methods(methods, names, first)

    count = len(methods)

    def joined(statistic: Callable[[xr.Dataset, list[str]], xr.Dataset]) -> xr.Dataset:
        parts = (
            statistic(draws[names], diagnostics.sample_dims(draws))
            for draws in map(diagnostics.posterior, methods.values())
        )
        table = by_method(parts, methods)
        # A dimension of length one would make arviz-plots shift the rows off their labels.
        return table if count > 1 else table.squeeze("model", drop=True)

    # Chains and variational draws differ in their dimensions, so only their statistics can share
    # a dataset; arviz-plots takes these ready made.
    mean = joined(lambda draws, dims: draws.mean(dims))
    trunk = joined(lambda draws, dims: arviz_stats.eti(draws, prob=0.5, dim=dims))
    outer = arviz_base.rcParams["stats.ci_prob"]
    twig = joined(lambda draws, dims: arviz_stats.eti(draws, prob=outer, dim=dims))
    plates = [str(dim) for dim in mean.dims if dim != "model"]
    elements = sum(mean[name].size // count for name in names)
    # arviz-plots spaces the columns of labels evenly and aligns the first to the left, the last to
    # the right and the others to the centre; the tightest pair of neighbours decides.
    texts = [*names, "variable"], *([dim, *map(str, mean[dim].values)] for dim in plates)
    letters = [max(map(len, column)) for column in texts]
    right = [letters[0], *(length / 2 for length in letters[1:])]
    left = [*(length / 2 for length in letters[1:-1]), letters[-1]]
    gap = 1 + max(map(sum, zip(right, left, strict=False)))
    margin = LETTER * gap * max(1.0, len(letters) - 0.8)
    picture = arviz_plots.plot_forest(
        xr.DataTree.from_dict({"posterior": mean.expand_dims(sample=1)}),
        sample_dims="sample",
        combined=True,
        stats={"point_estimate": mean, "trunk": trunk, "twig": twig},
        shade_label=plates[-1] if plates else None,
        backend="matplotlib",
        visuals={"shade": {"color": "#c0c0c0"}},
        figure_kwargs={
            "figsize": (PANEL + margin, 0.8 + elements * ROW * (0.8 + 0.2 * count)),
            "width_ratios": [margin, PANEL],
            "layout": "constrained",
        },
    )
    panel = picture.get_target(None, {"column": "forest"})
    places = picture.get_aes_as_dataset("y")
    bottom, top = (each.to_array() for each in (places.min(), places.max()))
    backend().ylim((bottom.min() - 0.6, top.max() + 0.6), panel)
    axis = "posterior mean and intervals"
    if reference is not None:
        middle = places.mean("model") if count > 1 else places
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
    if count > 1:
        picture.add_legend("model", title="")
    return picture


def heat_map(da: xr.DataArray, target: Any, **kwargs: Any) -> Any:
    """A visual of arviz-plots: one cell for each element of a matrix."""
    rows, columns = (np.arange(size + 1) - 0.5 for size in da.shape)
    target.set_ylim(rows[-1], rows[0])
    return target.pcolormesh(columns, rows, da.values, **kwargs)


def plot_weights(data: xr.DataTree | Methods, weights: str = WEIGHTS) -> PlotCollection:
    """Plot which task uses which latent function: inclusion probabilities as a heat map.

    One row per task, one column per function, one panel per method. Where a weight is more likely
    in than out, its posterior mean stands in the cell, as long as there is room. Markov chains
    must have been aligned, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method.
    :param weights: a pair with two plates: tasks, then functions.
    :returns: the picture; ``.savefig("weights.png")`` writes it.
    :raises ValueError: if there is no posterior, if ``weights`` is no pair or has not two plates,
        or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab.plots import plot_weights
        >>> spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100, 3, 2))
        >>> draws = {"W": 2.0 * spike, "W_spike": spike}
        >>> picture = plot_weights(arviz_base.from_dict({"posterior": draws}))
        >>> picture.viz["inclusion"]["W"].item().get_array().shape
        (3, 2)
    """
    methods = as_methods(data)
    first = next(iter(methods))
    (name,) = diagnostics.select(diagnostics.posterior(methods[first]), weights)
    diagnostics.check_methods(methods, [name], first)
    check_pairs(methods, [name], "weights")
    probs = by_method((inclusion(tree, name) for tree in methods.values()), methods)
    means = by_method((posterior_mean(tree, name) for tree in methods.values()), methods)
    plates = [str(dim) for dim in probs.dims if dim != "model"]
    if len(plates) != 2:
        raise ValueError(
            f"weights: `{name}` has the plates {plates}, expected two, tasks and functions; draw "
            "it with plot_inclusion."
        )
    columns = {
        axis: [str(x) for x in probs[dim].values] for axis, dim in zip("yx", plates, strict=True)
    }
    sizes = {axis: min(CELL * len(labels), MAX_HEIGHT) for axis, labels in columns.items()}
    every = {axis: int(np.ceil(CELL * len(columns[axis]) / sizes[axis])) for axis in "xy"}
    has_room = every == {"x": 1, "y": 1}
    letters = {axis: max(map(len, labels)) for axis, labels in columns.items()}
    is_wide = letters["x"] * LETTER > CELL
    width = len(methods) * max(sizes["x"], 1.5) + LETTER * letters["y"] + 1.4
    height = sizes["y"] + LETTER * letters["x"] * is_wide + 0.9
    picture = PlotCollection.wrap(
        probs.to_dataset(name=name),
        cols=["model"],
        col_wrap=len(methods),
        backend="matplotlib",
        figure_kwargs={
            "figsize": (width, height),
            "sharex": True,
            "sharey": True,
            "layout": "constrained",
        },
    )
    cells = {"edgecolors": "white", "linewidth": 0.5} if has_room else {}
    picture.map(heat_map, "inclusion", cmap="Blues", vmin=0, vmax=1, **cells)
    panels = [picture.get_target(name, {"model": method}) for method in methods]
    for method, panel in zip(methods, panels, strict=True):
        for axis, ticks in (("x", backend().xticks), ("y", backend().yticks)):
            places = range(0, len(columns[axis]), every[axis])
            ticks(places, columns[axis][:: every[axis]], panel, fontsize=8)
        backend().xlabel(plates[1], panel)
        if is_wide:
            panel.tick_params(axis="x", rotation=90)
        if len(methods) > 1:
            backend().title(method, panel, size=10)
        if has_room:
            write_weights(means.sel(model=method).values, probs.sel(model=method).values, panel)
    backend().ylabel(plates[0], panels[0])
    image = picture.get_viz("inclusion", name, {"model": next(iter(methods))})
    bar = picture.viz["figure"].item().colorbar(image, ax=panels, shrink=0.8)
    bar.set_label("inclusion probability", size=9)
    bar.ax.tick_params(labelsize=8)
    return picture


def write_weights(weights: np.ndarray, probs: np.ndarray, panel: Any) -> None:
    """Write those that are more likely in than out into their cells."""
    for row, column in np.argwhere(probs > 0.5):
        ink = "white" if probs[row, column] > 0.6 else INK
        backend().text(column, row, f"{weights[row, column]:.1f}", panel, color=ink, size=7)


def positions(X: ArrayLike | None, labels: ArrayLike) -> np.ndarray:
    """Where points lie on the horizontal axis: at their inputs, or at their labels."""
    where = np.asarray(labels if X is None else X)
    if where.size != np.size(labels) or not np.issubdtype(where.dtype, np.number):
        raise ValueError(
            f"X: got {'labels' if X is None else 'inputs'} of shape {where.shape} and type "
            f"{where.dtype}, expected a number for each of {np.size(labels)} points; if the inputs "
            "have more dimensions, give one, such as X[:, 0]."
        )
    return where.ravel().astype(float)


def mean_and_interval(draws: xr.DataArray) -> list[xr.DataArray]:
    """Posterior mean, and the ends of the central interval."""
    dims = diagnostics.sample_dims(draws.to_dataset(name="draws"))
    interval = arviz_stats.eti(draws, prob=arviz_base.rcParams["stats.ci_prob"], dim=dims)
    return [
        draws.mean(dims),
        *(interval.sel(ci_bound=end, drop=True) for end in ("lower", "upper")),
    ]


def over(x: np.ndarray, values: xr.DataArray) -> xr.DataArray:
    """Values over the places of their last dimension, as ``line_xy`` and ``scatter_xy`` want."""
    places = xr.zeros_like(values) + x
    return xr.concat([places, values], "plot_axis").assign_coords(plot_axis=["x", "y"])


def grid_of_curves(
    x: np.ndarray, statistics: list[xr.DataArray], name: str, col_wrap: int
) -> PlotCollection:
    """Draw means and intervals over their last dimension, in a panel for each of the one before.

    Each has the dimensions model, panel and point.
    """
    order = np.argsort(x, kind="stable")
    mean, low, high = (values[..., order] for values in statistics)
    lines = over(x[order], mean)
    bands = xr.concat([lines.sel(plot_axis="x", drop=True), low, high], "kwarg")
    bands = bands.assign_coords(kwarg=["x", "y_bottom", "y_top"])
    count = mean.shape[1]
    cols = min(count, col_wrap)
    picture = PlotCollection.wrap(
        lines.to_dataset(name=name),
        cols=[mean.dims[1]],
        col_wrap=cols,
        backend="matplotlib",
        aes={"color": ["model"]},
        figure_kwargs={
            "figsize": (CURVES[0] * cols + 0.4, CURVES[1] * np.ceil(count / cols) + 0.6),
            "sharex": True,
            "layout": "constrained",
        },
    )
    band = {"alpha": 0.25, "linewidth": 0}
    picture.map(visuals.fill_between_y, "band", data=bands.to_dataset(name=name), **band)
    picture.map(visuals.line_xy, "mean", width=1.3)
    for place, label in enumerate(mean[mean.dims[1]].values):
        panel = picture.get_target(name, {mean.dims[1]: label})
        backend().title(f"{mean.dims[1]} {label}", panel, size=10)
        # below the last ones there may be no panel that has the labels of the shared axis
        panel.tick_params(labelbottom=place >= count - cols, labelsize=8)
    return picture


def plot_latent_functions(
    data: xr.DataTree | Methods,
    X: ArrayLike | None = None,
    *,
    functions: str = FUNCTIONS,
    weights: str = WEIGHTS,
    active_only: bool = False,
) -> PlotCollection:
    """Plot the latent functions: posterior means, and bands of their central intervals.

    One panel per function. A band holds ``arviz_base.rcParams["stats.ci_prob"]`` of the draws at
    each point. Markov chains must have been aligned, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param X: inputs, of one dimension, shape (N,). The default is the labels of the points, which
        ``coords`` and ``dims`` can make the inputs when the data are made.
    :param functions: variable of the functions.
    :param weights: variable of their weights.
    :param active_only: whether to leave out functions that no task of any method is more likely to
        use than not.
    :returns: the picture; ``.savefig("functions.png")`` writes it.
    :raises ValueError: if there is no posterior, if a variable is missing, if no function is
        active, if ``X`` does not fit, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab.plots import plot_latent_functions
        >>> rng = np.random.default_rng(0)
        >>> draws = {"W": rng.normal(size=(4, 50, 3, 2)), "phi": rng.normal(size=(4, 50, 2, 5))}
        >>> dims = {"W": ["task", "latent"], "phi": ["latent", "point"]}
        >>> data = arviz_base.from_dict({"posterior": draws}, dims=dims)
        >>> picture = plot_latent_functions(data, X=np.linspace(0, 1, 5))
        >>> picture.viz["mean"]["phi"].sizes["latent"]
        2
    """
    methods = as_methods(data)
    first = next(iter(methods))
    draws = diagnostics.posterior(methods[first])
    plate = diagnostics.function_plate(draws, weights, functions)
    diagnostics.check_methods(methods, [weights, functions], first)
    plates = [plate, *diagnostics.plates_besides(draws, functions, plate)]
    if len(plates) != 2:
        raise ValueError(
            f"functions: `{functions}` has the dimensions {plates}, expected two, functions and "
            "points."
        )
    used = by_method((share_of_use(tree, weights) for tree in methods.values()), methods)
    used = used.max([dim for dim in used.dims if dim != plate])
    keep = np.flatnonzero(used > 0.5 if active_only else used >= 0)
    if not keep.size:
        raise ValueError(
            "active_only: no weight is more often in than out, expected some; draw all functions "
            "with active_only=False."
        )
    trees = map(diagnostics.posterior, methods.values())
    parts = [mean_and_interval(draws[functions].isel({plate: keep})) for draws in trees]
    statistics = [
        by_method(each, methods).transpose("model", *plates) for each in zip(*parts, strict=True)
    ]
    x = positions(X, draws[plates[1]].values)
    picture = grid_of_curves(x, statistics, functions, col_wrap=4)
    if len(methods) > 1:
        picture.add_legend("model", title="")
    return picture


def share_of_use(data: xr.DataTree, weights: str) -> xr.DataArray:
    """How often each weight is not zero."""
    draws = diagnostics.posterior(data)
    return (draws[weights] != 0).mean(diagnostics.sample_dims(draws))


def fit_of(fit: Fit, method: str, var_name: str, shape: tuple[int, int]) -> list[np.ndarray]:
    """Mean and interval of one method, points by tasks."""
    if isinstance(fit, tuple):
        mean, variance = (np.asarray(values, float) for values in fit)
        half = NormalDist().inv_cdf((1 + arviz_base.rcParams["stats.ci_prob"]) / 2) * variance**0.5
        statistics = [mean, mean - half, mean + half]
    else:
        diagnostics.posterior(fit)
        groups = [fit[group].data_vars for group in FITTED if group in fit.children]
        found = [variables[var_name] for variables in groups if var_name in variables]
        if not found:
            raise ValueError(
                f"var_name: {method!r} has no `{var_name}` in the groups {FITTED}; name the site "
                "of the fit, or add predictions."
            )
        statistics = [values.values for values in mean_and_interval(found[0])]
    for values in statistics:
        if not fits_into(values, shape):
            raise ValueError(
                f"data: the fit {method!r} has the shape {values.shape}, expected {shape}, points "
                "by tasks; give the inputs of the fit as X_new if they are not X."
            )
    return [values.reshape(shape) for values in statistics]


def fits_into(values: ArrayLike, shape: tuple[int, ...]) -> bool:
    """Whether values have this shape, points by tasks; a single task need not have a dimension."""
    return np.shape(values) == shape or (shape[1] == 1 and np.shape(values) == shape[:1])


def shade(da: xr.DataArray, target: Any, **kwargs: Any) -> Any:
    """A visual of arviz-plots: the panel shaded from bottom to top where y is 1."""
    x, y = da.sel(plot_axis="x"), da.sel(plot_axis="y")
    across = {"transform": target.get_xaxis_transform(), "zorder": 0, "linewidth": 0}
    return target.fill_between(x, 0, 1, where=y == 1, **across, **kwargs)


def plot_fit(
    data: Fit | Mapping[str, Fit],
    X: ArrayLike,
    Y: ArrayLike | pd.DataFrame,
    observed: ArrayLike | None = None,
    *,
    X_new: ArrayLike | None = None,
    var_name: str = "f",
    tasks: Iterable[Hashable] | None = None,
    reference: ArrayLike | None = None,
) -> PlotCollection:
    """Plot the data of several tasks with what one or several methods predict for them.

    One panel per task: dots for observed and circles for held-out data, grey where they are
    missing; for each method its mean, and a band that holds the truth at each point with the
    probability ``arviz_base.rcParams["stats.ci_prob"]``.

    :param data: a fit, or several by the name of the method, overlaid. Each is ArviZ data, or the
        pair of mean and variance, each (S, Q), that
        :meth:`PairedGuide.predict <numpyro_spikeslab.PairedGuide.predict>` returns.
    :param X: inputs, of one dimension, shape (N,).
    :param Y: responses, shape (N, Q) or (N,); NaN is missing. The columns of a DataFrame name the
        tasks.
    :param observed: which of them the methods have seen, shape of ``Y``; the others are drawn as
        held out. The default is all that are not NaN.
    :param X_new: the S inputs of the fits; ``X`` by default.
    :param var_name: variable of ArviZ data, (S, Q), in the groups ``posterior_predictive``,
        ``predictions`` or ``posterior``. The default ``f`` is the noise-free fit of
        :func:`~numpyro_spikeslab.models.mtmkl`; ``Y`` the observations, if they have been
        predicted.
    :param tasks: names of the tasks to draw, in this order; all by default.
    :param reference: known values at ``X_new``, shape (S, Q), drawn as a dotted line.
    :returns: the picture; ``.savefig("fit.png")`` writes it.
    :raises ValueError: if a posterior or ``var_name`` is missing, if a task is unknown, or if
        shapes differ.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_spikeslab.plots import plot_fit
        >>> X = np.linspace(0, 1, 20)
        >>> Y = np.stack([np.sin(6 * X), np.cos(6 * X)], axis=1)
        >>> picture = plot_fit((Y, 0.1 + 0 * Y), X, Y, observed=X[:, None] > [0.3, 0.5])
        >>> picture.viz["held out"]["fit"].sizes["task"]
        2
    """
    methods = {"fit": data} if isinstance(data, xr.DataTree | tuple) else data
    if not isinstance(methods, Mapping) or not methods:
        raise ValueError(
            f"data: got {data!r:.60}, expected ArviZ data, a pair of mean and variance, or a "
            "mapping from names to such fits."
        )
    table = Y if isinstance(Y, pd.DataFrame) else pd.DataFrame(np.asarray(Y))
    values, names = table.to_numpy(float), [*table.columns]
    seen = np.isfinite(values)
    if observed is not None:
        if not fits_into(observed, values.shape):
            raise ValueError(
                f"observed: got the shape {np.shape(observed)}, expected {np.shape(Y)}, that of Y; "
                "say of every response whether it was observed."
            )
        seen &= np.reshape(np.asarray(observed, bool), values.shape)
    drawn = names if tasks is None else list(tasks)
    if not drawn or not set(drawn) <= set(names):
        raise ValueError(
            f"tasks: got {drawn}, expected one or more of {names}; tasks are numbered, or named by "
            "the columns of Y."
        )
    columns = [names.index(task) for task in drawn]
    values, seen = values[:, columns], seen[:, columns]
    x = positions(X, table.index)
    x_new = x if X_new is None else positions(X_new, np.empty(len(np.asarray(X_new))))
    shape = (x_new.size, len(names))

    def labelled(array: np.ndarray) -> xr.DataArray:
        return xr.DataArray(array.T, {"task": drawn}, ["task", "point"])

    fits = [
        [labelled(array[:, columns]) for array in fit_of(fit, method, var_name, shape)]
        for method, fit in methods.items()
    ]
    statistics = [by_method(each, methods) for each in zip(*fits, strict=True)]
    picture = grid_of_curves(x_new, statistics, "fit", col_wrap=3)

    def draw(visual: Callable, label: str, places: np.ndarray, y: np.ndarray, **style: Any) -> Any:
        data = over(places, labelled(y)).to_dataset(name="fit")
        picture.map(visual, label, data=data, ignore_aes="all", **style)
        return picture.get_viz(label, "fit", {"task": drawn[0]})

    order = np.argsort(x, kind="stable")
    middles = (x[order][1:] + x[order][:-1]) / 2
    edges = np.repeat(np.concatenate([x[order][:1], middles, x[order][-1:]]), 2)[1:-1]
    missing = np.repeat(~seen[order], 2, axis=0)
    legend = {
        name: picture.get_viz("mean", "fit", {"model": name, "task": drawn[0]}) for name in methods
    }
    if reference is not None:
        if not fits_into(reference, shape):
            raise ValueError(
                f"reference: got the shape {np.shape(reference)}, expected {shape}, the inputs of "
                "the fits by tasks; give known values at all of them."
            )
        style = {"color": INK, "linestyle": ":", "width": 1.2}
        known = np.reshape(np.asarray(reference, float), shape)[:, columns]
        legend["reference"] = draw(visuals.line_xy, "reference", x_new, known, **style)
    style = {"color": OBSERVED, "size": 3, "zorder": 1}
    legend["observed"] = draw(
        visuals.scatter_xy, "observed", x, np.where(seen, values, np.nan), **style
    )
    if missing.any():
        legend["missing"] = draw(shade, "missing", edges, missing.astype(float), color=MISSING)
    if np.isfinite(values[~seen]).any():
        style = {"facecolor": "none", "edgecolor": INK, "size": 8, "width": 0.5, "zorder": 1}
        held_out = np.where(seen, np.nan, values)
        legend["held out"] = draw(visuals.scatter_xy, "held out", x, held_out, **style)
    figure = picture.viz["figure"].item()
    ncols = min(len(legend), int(figure.get_figwidth() / ENTRY))
    style = {"loc": "outside upper center", "ncols": ncols, "fontsize": 9, "frameon": False}
    figure.legend(legend.values(), legend.keys(), **style)
    figure.set_figheight(figure.get_figheight() + ROW * ((len(legend) - 1) // ncols))
    return picture
