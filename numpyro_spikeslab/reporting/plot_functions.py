# SPDX-License-Identifier: Apache-2.0
"""Pictures of functions: predictions by task, and latent functions."""

from collections.abc import Hashable, Iterable
from statistics import NormalDist
from typing import Any

import arviz_base
from arviz_plots import PlotCollection, visuals
from arviz_plots.backend import matplotlib as backend
import numpy as np
from numpy.typing import ArrayLike
import pandas as pd
import xarray as xr

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reporting.arviz_data import (
    FUNCTIONS,
    WEIGHTS,
    check_finite,
    function_plate,
    mean,
    plates,
    posterior,
)
from numpyro_spikeslab.reporting.labels import is_numbered, matched
from numpyro_spikeslab.reporting.methods import Methods, as_methods, by_method, comparable
from numpyro_spikeslab.reporting.pictures import (
    GREY,
    INK,
    LITERAL,
    add_legend,
    panels,
    positions,
    xy,
)
from numpyro_spikeslab.reporting.stats import central_interval

GROUPS = ("posterior_predictive", "predictions", "posterior")
"""Groups with a fitted variable, the first that has it."""

WIDTH, HEIGHT = 3.0, 1.8
"""Inches of a panel."""

OBSERVED = {"color": GREY, "size": 3}
HELD_OUT = {"facecolor": "none", "edgecolor": INK, "size": 8, "width": 0.5}
REFERENCE = {"color": INK, "linestyle": ":", "width": 1.2}


def plot_fit(
    data: Any,
    X: ArrayLike,
    Y: ArrayLike | pd.DataFrame,
    observed: ArrayLike | None = None,
    *,
    X_new: ArrayLike | None = None,
    var_name: str = "f",
    tasks: Iterable[Hashable] | None = None,
    reference: ArrayLike | None = None,
) -> PlotCollection:
    """Plot the data of several tasks with the predictions of one or several methods.

    There is one panel per task: dots for observed data, circles for held-out data, and for each
    method its mean with a band that holds the truth at each point with the probability
    ``arviz_base.rcParams["stats.ci_prob"]``. Inputs without observed data are shaded.

    :param data: a fit, or several by the name of the method. Each is ArviZ data, or the pair of
        mean and variance, each (S, Q), that
        :meth:`PairedGuide.predict <numpyro_spikeslab.PairedGuide.predict>` returns.
    :param X: inputs, of one dimension, shape (N,).
    :param Y: responses, shape (N, Q) or (N,); NaN is missing. The columns of a DataFrame name the
        tasks.
    :param observed: which of them the methods have seen, shape of ``Y``; the others are drawn as
        held out. The default is all that are not NaN.
    :param X_new: the S inputs of the fits; ``X`` by default.
    :param var_name: variable of ArviZ data, (S, Q), in the groups ``posterior_predictive``,
        ``predictions`` or ``posterior``. The default ``f`` is the noise-free fit of
        :func:`~numpyro_spikeslab.models.mtmkl`; ``Y`` the observations, if they are predicted.
    :param tasks: names of the tasks to draw, in this order; all by default.
    :param reference: known values at ``X_new``, shape (S, Q), drawn as a dotted line.
    :returns: the picture; ``.savefig("fit.png")`` writes it.
    :raises ValueError: if a posterior, ``var_name`` or a task is missing, if a variance is
        negative, or if shapes differ.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_spikeslab import plot_fit
        >>> X = np.linspace(0, 1, 20)
        >>> Y = np.stack([np.sin(6 * X), np.cos(6 * X)], axis=1)
        >>> picture = plot_fit((Y, 0.1 + 0 * Y), X, Y, observed=X[:, None] > [0.3, 0.5])
        >>> picture.viz["held out"]["fit"].sizes["task"]
        2
    """
    methods = as_methods(data, "fit")
    if not isinstance(Y, pd.DataFrame):
        Y = pd.DataFrame(np.ma.filled(np.ma.asarray(Y, float), np.nan))
    names = list(Y.columns)
    chosen = names if tasks is None else list(tasks)
    are_distinct = len(set(names)) == len(names) and len(set(chosen)) == len(chosen)
    if not chosen or not set(chosen) <= set(names) or not are_distinct:
        remedy = "The columns of Y name the tasks."
        raise bad("tasks", chosen, f"some of {names}, each once", remedy)
    x = positions(X, Y.index)
    x_new = x if X_new is None else positions(X_new, np.empty(len(np.asarray(X_new))))
    values = xr.DataArray(Y.to_numpy(float), {"task": names}, ["point", "task"], "Y")
    fitted = xr.DataArray(np.zeros((len(x_new), len(names))), values.coords, values.dims, "fit")
    seen = np.isfinite(values)
    if observed is not None:
        seen &= of_tasks("observed", observed, values) > 0
    layers = {
        "observed": (visuals.scatter_xy, x, values.where(seen), OBSERVED),
        "missing": (shade, x, xr.ones_like(values).where(~seen), {"color": "#ededed"}),
        "held out": (visuals.scatter_xy, x, values.where(~seen), HELD_OUT),
    }
    if reference is not None:
        known = of_tasks("reference", reference, fitted)
        layers = {"reference": (visuals.line_xy, x_new, known, REFERENCE), **layers}
    fits = [fit_of(fit, method, var_name, fitted) for method, fit in methods.items()]
    parts = (by_method(each, methods).sel(task=chosen) for each in zip(*fits, strict=True))
    picture = curves(x_new, [part.transpose("model", "task", "point") for part in parts], "fit", 3)
    first = {"task": chosen[0]}
    legend = {name: picture.get_viz("mean", "fit", {"model": name, **first}) for name in methods}
    for label, (visual, places, layer, style) in layers.items():
        layer = layer.sel(task=chosen).transpose("task", "point")
        if layer.notnull().any():
            order = np.argsort(places, kind="stable")
            points = xy(places[order], layer[:, order]).to_dataset(name="fit")
            picture.map(visual, label, data=points, ignore_aes="all", **style)
            legend[label] = picture.get_viz(label, "fit", first)
    figure = picture.viz["figure"].item()
    num_columns = min(len(legend), int(figure.get_figwidth() / 1.2))
    place = {"loc": "outside upper center", "fontsize": 9, "frameon": False}
    box = figure.legend(legend.values(), legend.keys(), ncols=num_columns, **place)
    for text in box.get_texts():
        text.set(**LITERAL)
    return picture


def of_tasks(what: str, values: Any, like: xr.DataArray) -> xr.DataArray:
    """Return values of points by tasks, labelled like others; one task needs no dimension."""
    if np.ndim(values) == 1 and like.sizes["task"] == 1:
        values = np.reshape(values, (-1, 1))
    return matched(what, values, like)


def fit_of(fit: Any, method: str, var_name: str, like: xr.DataArray) -> list[xr.DataArray]:
    """Return mean and interval of one method, points by tasks."""
    if isinstance(fit, tuple):
        centre, variance = (np.asarray(part, float) for part in fit)
        if np.any(variance < 0):
            got = f"a variance of {variance.min():.3g} in the fit {method!r}"
            raise bad("data", got, "at least 0", "Give mean and variance, as guide.predict does.")
        prob = arviz_base.rcParams["stats.ci_prob"]
        half = NormalDist().inv_cdf((1 + prob) / 2) * np.sqrt(variance)
        parts = [centre, centre - half, centre + half]
    else:
        posterior(fit)
        groups = [fit[group] for group in GROUPS if group in fit.children]
        candidates = [group[var_name] for group in groups if var_name in group]
        if not candidates:
            expected = f"a variable of {method!r} in the groups {GROUPS}"
            raise bad("var_name", repr(var_name), expected, "Name the site, or add predictions.")
        draws, tasks = candidates[0], set(like["task"].values)
        named = [dim for dim in plates(draws) if tasks <= set(draws[dim].values)]
        if named and not is_numbered(like.indexes["task"]):
            draws = draws.transpose(..., named[-1])
        draws = draws.rename(dict(zip(plates(draws), ("point", "task"), strict=False)))
        parts = [mean(draws), *central_interval(draws)]
    what = f"data, the fit {method!r} at the inputs X or X_new"
    return [of_tasks(what, part, like) for part in parts]


def shade(da: xr.DataArray, target: Any, **kwargs: Any) -> Any:
    """Shade a panel around the places where y is a number, as a visual of arviz-plots."""
    x, y = da.sel(plot_axis="x").values, da.sel(plot_axis="y").values
    edges = np.concatenate([x[:1], (x[1:] + x[:-1]) / 2, x[-1:]])
    across = {"transform": target.get_xaxis_transform(), "zorder": 0, "linewidth": 0}
    ends, is_shaded = np.repeat(edges, 2)[1:-1], np.repeat(np.isfinite(y), 2)
    return target.fill_between(ends, 0, 1, where=is_shaded, **across, **kwargs)


def plot_latent_functions(
    data: xr.DataTree | Methods,
    X: ArrayLike | None = None,
    *,
    functions: str = FUNCTIONS,
    weights: str = WEIGHTS,
    active_only: bool = False,
) -> PlotCollection:
    """Plot the latent functions: posterior means, and bands of their central intervals.

    There is one panel per function. A band holds ``arviz_base.rcParams["stats.ci_prob"]`` of the
    draws at each point. Align Markov chains first, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param X: inputs, of one dimension, shape (N,); by default the labels of the points.
    :param functions: variable of the functions.
    :param weights: variable of their weights.
    :param active_only: whether to leave out functions whose weights are all more often zero than
        not, in all methods.
    :returns: the picture; ``.savefig("functions.png")`` writes it.
    :raises ValueError: if there is no posterior, if a variable is missing, if functions are not
        finite or none is active, if ``X`` does not fit, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_latent_functions
        >>> rng = np.random.default_rng(0)
        >>> draws = {"W": rng.normal(size=(4, 50, 3, 2)), "phi": rng.normal(size=(4, 50, 2, 5))}
        >>> dims = {"W": ["task", "latent"], "phi": ["latent", "point"]}
        >>> data = arviz_base.from_dict({"posterior": draws}, dims=dims)
        >>> picture = plot_latent_functions(data, X=np.linspace(0, 1, 5))
        >>> picture.viz["mean"]["phi"].sizes["latent"]
        2
    """
    methods = as_methods(data)
    draws = [posterior(tree) for tree in methods.values()]
    plate = function_plate(draws[0], weights, functions)
    comparable(methods, [weights, functions])
    dims = [plate, *plates(draws[0][functions], without=plate)]
    if len(dims) != 2:
        got = f"`{functions}` with the dimensions {dims}"
        raise bad("functions", got, "two, functions and points")
    fits = []
    for each in draws:
        check_finite(each[functions])
        fits.append([mean(each[functions]), *central_interval(each[functions])])
    parts = [by_method(each, methods).transpose("model", *dims) for each in zip(*fits, strict=True)]
    if active_only:
        shares = by_method((mean(each[weights] != 0) for each in draws), methods)
        active = shares.max([dim for dim in shares.dims if dim != plate]).values > 0.5
        if not active.any():
            raise bad("active_only", True, "a weight that is more often not zero than zero")
        parts = [part[:, active] for part in parts]
    picture = curves(positions(X, draws[0][dims[1]].values), parts, functions, 4)
    add_legend(picture, methods)
    return picture


def curves(x: np.ndarray, parts: list[xr.DataArray], name: str, columns: int) -> PlotCollection:
    """Draw means with bands, in a panel for each label of the second dimension.

    :param parts: mean and ends of the interval, by model, panel and point.
    """
    order = np.argsort(x, kind="stable")
    centre, low, high = (part[..., order] for part in parts)
    plate, labels = str(centre.dims[1]), centre[centre.dims[1]].values
    most = arviz_base.rcParams["plot.max_subplots"]
    if most is not None and len(labels) > most:
        remedy = (
            "Draw some of them (`tasks` of plot_fit, `active_only` of plot_latent_functions), or "
            "raise arviz_base.rcParams['plot.max_subplots']."
        )
        raise bad("data", f"{len(labels)} panels, one for each {plate}", f"at most {most}", remedy)
    columns = min(len(labels), columns)
    size = WIDTH * columns + 0.4, HEIGHT * np.ceil(len(labels) / columns) + 0.8
    lines = xy(x[order], centre)
    figure = {"figsize": size, "sharex": True}
    picture = panels(
        lines.to_dataset(name=name), [plate], columns, figure, aes={"color": ["model"]}
    )
    bands = xr.concat([lines.sel(plot_axis="x", drop=True), low, high], "kwarg")
    bands = bands.assign_coords(kwarg=["x", "y_bottom", "y_top"]).to_dataset(name=name)
    picture.map(visuals.fill_between_y, "band", data=bands, alpha=0.25, linewidth=0)
    picture.map(visuals.line_xy, "mean", width=1.3)
    for place, label in enumerate(labels):
        panel = picture.get_target(name, {plate: label})
        backend.title(f"{plate} {label}", panel, size=10, **LITERAL)
        # the last row may have fewer panels than columns
        panel.tick_params(labelbottom=place >= len(labels) - columns, labelsize=8)
    return picture
