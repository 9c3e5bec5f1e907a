# SPDX-License-Identifier: Apache-2.0
"""Pictures of spike-and-slab posteriors, on arviz-plots with its matplotlib backend."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import ModuleType

import arviz_base
from arviz_base.labels import BaseLabeller
import arviz_plots
from arviz_plots import PlotCollection, visuals
import arviz_stats
import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

from numpyro_spikeslab import diagnostics

__all__ = ["plot_forest", "plot_inclusion"]

Methods = Mapping[str, xr.DataTree]
Reference = str | Mapping[str, ArrayLike]

PANEL = 5.5  # inches of width, to which the labels add theirs
ROW = 0.2  # inches for one weight, almost two lines of 8 point type
MAX_HEIGHT = 30.0  # inches; beyond it matplotlib pictures get slow and viewers scale them down
LETTER = 0.085  # inches of a letter of 10 point type
INK = "black"


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


def by_method(parts: Iterable, methods: Methods):
    """Concatenate one array or dataset per method along the dimension ``model`` of ArviZ."""
    return xr.concat(list(parts), dim="model").assign_coords(model=list(methods))


def inclusion(data: xr.DataTree, name: str) -> xr.DataArray:
    """Inclusion probabilities of a pair, shaped like its weight."""
    return diagnostics.inclusion_statistics(data, name).sel(summary="inclusion", drop=True)


def posterior_mean(data: xr.DataTree, name: str) -> xr.DataArray:
    """Posterior mean of a variable."""
    draws = diagnostics.posterior(data)
    return draws[name].mean(diagnostics.sample_dims(draws))


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
    for method, tree in methods.items():
        weights = diagnostics.pairs(diagnostics.posterior(tree))
        if not set(names) <= set(weights):
            raise ValueError(
                f"var_names: got {names}, expected spike-and-slab weights, of which {method!r} "
                f"has {weights}; declare them with spike_slab, or draw them with plot_forest."
            )

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
