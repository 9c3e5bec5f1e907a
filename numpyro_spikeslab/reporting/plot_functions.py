# SPDX-License-Identifier: Apache-2.0
"""Pictures of functions: predictions by task, and latent functions."""

from collections.abc import Hashable, Iterable
from statistics import NormalDist
from typing import Any

import arviz_base
from arviz_plots import PlotCollection
import numpy as np
from numpy.typing import ArrayLike
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import FUNCTIONS, WEIGHTS, Methods, plates, posterior
from numpyro_spikeslab.reporting.pictures import GREY, LITERAL, add_legend, panels
from numpyro_spikeslab.support.messages import bad

GROUPS = ("posterior_predictive", "predictions", "posterior")
"""Groups with a fitted variable, the first that has it."""

WIDTH, HEIGHT = 3.0, 1.8
"""Inches of a panel."""


def plot_fit(
    data: Any,
    X: ArrayLike,
    Y: ArrayLike | pd.DataFrame,
    observed: ArrayLike | None = None,
    *,
    X_new: ArrayLike | None = None,
    var_name: str = "f",
    tasks: Iterable[Hashable] | None = None,
) -> PlotCollection:
    """Plot the data of several tasks with the predictions of one or several methods.

    There is one panel per task: dots for observed data, circles for held-out data, and for each
    method its mean with a band that holds the truth at each point with the probability
    ``arviz_base.rcParams["stats.ci_prob"]``.

    :param data: a fit, or several by the name of the method. Each is ArviZ data, or the pair of
        mean and variance, each (S, Q), that
        :meth:`PairedGuide.predict <numpyro_spikeslab.PairedGuide.predict>` returns.
    :param X: inputs, of one dimension, shape (N,).
    :param Y: responses, shape (N, Q); NaN is missing. The columns of a DataFrame name the tasks.
    :param observed: whether the methods have seen a response, shape of ``Y``; the others are drawn
        as held out. By default all numbers are observed.
    :param X_new: the S inputs of the fits; ``X`` by default.
    :param var_name: variable of ArviZ data, (S, Q), in the groups ``posterior_predictive``,
        ``predictions`` or ``posterior``: the noise-free fit by default, ``Y`` for observations.
    :param tasks: names of the tasks to draw, in this order; all by default.
    :returns: the picture; ``.savefig("fit.png")`` writes it.
    :raises ValueError: if ``var_name`` or a task is missing, if a variance is negative, or if
        shapes differ.

    >>> import numpy as np
    >>> from numpyro_spikeslab import plot_fit
    >>> X = np.linspace(0, 1, 20)
    >>> Y = np.stack([np.sin(6 * X), np.cos(6 * X)], axis=1)
    >>> picture = plot_fit((Y, 0.1 + 0 * Y), X, Y, observed=X[:, None] > [0.3, 0.5])
    """
    methods = arviz_data.as_methods(data, "fit")
    if not isinstance(Y, pd.DataFrame):
        Y = pd.DataFrame(np.ma.filled(np.ma.asarray(Y, float), np.nan))
    names = list(Y.columns)
    chosen = names if tasks is None else list(tasks)
    are_distinct = len(set(names)) == len(names) and len(set(chosen)) == len(chosen)
    if not chosen or not set(chosen) <= set(names) or not are_distinct:
        remedy = "The columns of Y name the tasks."
        raise bad("tasks", chosen, f"some of {names}, each once", remedy)
    x = positions(X, len(Y))
    x_new = x if X_new is None else positions(X_new, len(np.asarray(X_new)))
    values = xr.DataArray(Y.to_numpy(float), {"task": names}, ["point", "task"], "Y")
    like = xr.DataArray(np.zeros((len(x_new), len(names))), values.coords, values.dims, "fit")
    in_data = values.notnull()
    if observed is not None:
        in_data &= arviz_data.align_to("observed", observed, values) > 0
    fits = {name: fit_of(fit, name, var_name, like) for name, fit in methods.items()}
    picture = curves(x_new, fits, "fit", "task", chosen, 3)
    for task in chosen:
        axes = picture.get_target("fit", {"task": task})
        y, is_seen = values.sel(task=task).values, in_data.sel(task=task).values
        axes.scatter(x[is_seen], y[is_seen], s=3, color=GREY, label="observed")
        held_out = ~is_seen & np.isfinite(y)
        if held_out.any():
            style = {"facecolor": "none", "edgecolor": "black", "linewidth": 0.5}
            axes.scatter(x[held_out], y[held_out], s=8, label="held out", **style)
    add_legend(picture)
    return picture


def positions(X: ArrayLike, size: int) -> np.ndarray:
    """Return the places of points on the horizontal axis."""
    places = np.asarray(X)
    if places.size != size or not np.issubdtype(places.dtype, np.number):
        got = f"values of shape {places.shape} and {places.dtype}"
        remedy = "If the inputs have more dimensions, give one, such as X[:, 0]."
        raise bad("X", got, f"a number for each of {size} points", remedy)
    return places.ravel().astype(float)


def fit_of(fit: Any, method: str, var_name: str, like: xr.DataArray) -> list[xr.DataArray]:
    """Return mean and interval of one method, points by tasks."""
    if isinstance(fit, tuple):
        centre, variance = (np.asarray(part, float) for part in fit)
        if np.any(variance < 0):
            got = f"a variance of {variance.min():.3g} in the fit {method!r}"
            raise bad("data", got, "at least 0", "Give mean and variance, as guide.predict does.")
        prob = arviz_base.rcParams["stats.ci_prob"]
        half = NormalDist().inv_cdf((1 + prob) / 2) * np.sqrt(variance)
        parts: list[Any] = [centre, centre - half, centre + half]
    else:
        posterior(fit)
        groups = [fit[group] for group in GROUPS if group in fit.children]
        candidates = [group[var_name] for group in groups if var_name in group]
        if not candidates:
            expected = f"a variable of {method!r} in the groups {GROUPS}"
            raise bad("var_name", repr(var_name), expected, "Name the site, or add predictions.")
        draws = candidates[0]
        if "task" in draws.dims:
            draws = draws.transpose(..., "task")
        draws = draws.rename(dict(zip(plates(draws), ("point", "task"), strict=False)))
        parts = arviz_data.mean_and_interval(draws)
    what = f"data, the fit {method!r} at the inputs X or X_new"
    return [arviz_data.align_to(what, part, like) for part in parts]


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
    :raises ValueError: if functions are missing, not finite or not active, if ``X`` does not fit,
        or if coordinates differ.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import plot_latent_functions
    >>> rng = np.random.default_rng(0)
    >>> draws = {"W": rng.normal(size=(4, 50, 3, 2)), "phi": rng.normal(size=(4, 50, 2, 5))}
    >>> dims = {"W": ["task", "latent"], "phi": ["latent", "point"]}
    >>> data = arviz_base.from_dict({"posterior": draws}, dims=dims)
    >>> picture = plot_latent_functions(data, X=np.linspace(0, 1, 5))
    """
    methods = arviz_data.as_methods(data)
    draws = {name: posterior(tree) for name, tree in methods.items()}
    first = next(iter(draws.values()))
    plate = arviz_data.function_plate(first, weights, functions)
    arviz_data.comparable(methods, [weights, functions])
    dims = [plate, *plates(first[functions], without=plate)]
    if len(dims) != 2:
        got = f"`{functions}` with the dimensions {dims}"
        raise bad("functions", got, "two, functions and points")
    fits, labels = {}, first[plate].values
    for name, each in draws.items():
        arviz_data.check_finite(each[functions])
        fits[name] = arviz_data.mean_and_interval(each[functions].transpose(..., *dims))
    if active_only:
        shares = [arviz_data.mean(each[weights] != 0) for each in draws.values()]
        is_active = [share.max(plates(share, without=plate)).values > 0.5 for share in shares]
        labels = labels[np.any(is_active, axis=0)]
        if not labels.size:
            raise bad("active_only", True, "a weight that is more often not zero than zero")
    points = first[dims[1]].values
    x = positions(points if X is None else X, len(points))
    picture = curves(x, fits, functions, plate, list(labels), 4)
    add_legend(picture)
    return picture


def curves(
    x: np.ndarray,
    fits: dict[str, list[xr.DataArray]],
    name: str,
    plate: str,
    labels: list,
    columns: int,
) -> PlotCollection:
    """Draw mean and interval of each method in a panel for each label of a plate."""
    columns = min(len(labels), columns)
    size = WIDTH * columns + 0.4, HEIGHT * np.ceil(len(labels) / columns) + 0.6
    data = xr.DataArray(np.zeros(len(labels)), {plate: labels}, name=name).to_dataset()
    picture, order = panels(data, plate, columns, size, sharex=True), np.argsort(x)
    for place, label in enumerate(labels):
        axes = picture.get_target(name, {plate: label})
        for method, parts in fits.items():
            centre, low, high = (part.sel({plate: label}).values[order] for part in parts)
            (line,) = axes.plot(x[order], centre, linewidth=1.3, label=method)
            axes.fill_between(x[order], low, high, color=line.get_color(), alpha=0.25, linewidth=0)
        axes.set_title(f"{plate} {label}", fontsize=10, **LITERAL)
        # the last row may have fewer panels than columns
        axes.tick_params(labelbottom=place >= len(labels) - columns, labelsize=8)
    return picture
