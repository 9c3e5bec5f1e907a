# SPDX-License-Identifier: Apache-2.0
"""The picture of data and predictions by task."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

import arviz_base
from arviz_plots import PlotCollection, visuals
import numpy as np
from numpy.typing import ArrayLike
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting.curves import grid_of_curves
from numpyro_spikeslab.reporting.data import mean_and_interval, posterior, sample_dims
from numpyro_spikeslab.reporting.methods import by_method
from numpyro_spikeslab.reporting.pictures import INK, ROW, literal, positions, xy

Fit = xr.DataTree | tuple[ArrayLike, ArrayLike]

FITTED = ("posterior_predictive", "predictions", "posterior")
ENTRY = 1.2  # inches of width of an entry of a legend
OBSERVED, MISSING = "#808080", "#ededed"


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
    :raises ValueError: if a posterior or ``var_name`` is missing, if a task is unknown or
        named twice, if a variance is negative, or if shapes differ.

    .. doctest::

        >>> import numpy as np
        >>> from numpyro_spikeslab import plot_fit
        >>> X = np.linspace(0, 1, 20)
        >>> Y = np.stack([np.sin(6 * X), np.cos(6 * X)], axis=1)
        >>> picture = plot_fit((Y, 0.1 + 0 * Y), X, Y, observed=X[:, None] > [0.3, 0.5])
        >>> picture.viz["held out"]["fit"].sizes["task"]
        2
    """
    methods = as_fits(data)
    # what is masked is missing, too
    values = Y if isinstance(Y, pd.DataFrame) else np.ma.filled(np.ma.asarray(Y, float), np.nan)
    table = pd.DataFrame(values)
    x = positions(X, table.index)
    x_new = x if X_new is None else positions(X_new, np.empty(len(np.asarray(X_new))))
    shape = (x_new.size, table.shape[1])
    seen = seen_of(table.to_numpy(float), by_name(observed, table.columns))
    columns = columns_of([*table.columns], tasks)
    tasks = [table.columns[column] for column in columns]

    fits = [fit_of(fit, method, var_name, shape, table.columns) for method, fit in methods.items()]
    statistics = [
        by_method((by_task(values[:, columns], tasks) for values in each), methods)
        for each in zip(*fits, strict=True)
    ]
    panels = Panels(grid_of_curves(x_new, statistics, "fit", col_wrap=3), tasks, {})
    for name in methods:
        sel = {"model": name, "task": tasks[0]}
        panels.legend[name] = panels.picture.get_viz("mean", "fit", sel)
    if reference is not None:
        reference = by_name(reference, table.columns)
        if not fits_into(reference, shape):
            raise ValueError(
                f"reference: got the shape {np.shape(reference)}, expected {shape}, the inputs of "
                "the fits by tasks; give known values at all of them."
            )
        style = {"color": INK, "linestyle": ":", "width": 1.2}
        known = np.reshape(np.asarray(reference, float), shape)[:, columns]
        order = np.argsort(x_new, kind="stable")
        panels.draw(visuals.line_xy, "reference", x_new[order], known[order], **style)
    draw_responses(panels, x, table.to_numpy(float)[:, columns], seen[:, columns])
    panels.add_legend()
    return panels.picture


class Panels(NamedTuple):
    """A picture with a panel for each task, and what its legend explains."""

    picture: PlotCollection
    tasks: list[Hashable]
    legend: dict[str, Any]

    def draw(
        self, visual: Callable, label: str, x: np.ndarray, y: np.ndarray, **style: Any
    ) -> None:
        """Draw values, points by tasks, at the places ``x``."""
        data = xy(x, by_task(y, self.tasks)).to_dataset(name="fit")
        self.picture.map(visual, label, data=data, ignore_aes="all", **style)
        self.legend[label] = self.picture.get_viz(label, "fit", {"task": self.tasks[0]})

    def add_legend(self) -> None:
        """Put the legend above all panels, in rows that are no wider than they are."""
        figure = self.picture.viz["figure"].item()
        ncols = min(len(self.legend), int(figure.get_figwidth() / ENTRY))
        style = {"loc": "outside upper center", "fontsize": 9, "frameon": False}
        literal(figure.legend(self.legend.values(), self.legend.keys(), ncols=ncols, **style))
        figure.set_figheight(figure.get_figheight() + ROW * ((len(self.legend) - 1) // ncols))


def draw_responses(panels: Panels, x: np.ndarray, values: np.ndarray, seen: np.ndarray) -> None:
    """Draw what was observed, where nothing was, and what was held out."""
    style: dict[str, Any] = {"color": OBSERVED, "size": 3, "zorder": 1}
    panels.draw(visuals.scatter_xy, "observed", x, np.where(seen, values, np.nan), **style)
    if not seen.all():
        order = np.argsort(x, kind="stable")
        missing = np.repeat(~seen[order], 2, axis=0).astype(float)
        panels.draw(shade, "missing", edges_between(x[order]), missing, color=MISSING)
    if np.isfinite(values[~seen]).any():
        style = {"facecolor": "none", "edgecolor": INK, "size": 8, "width": 0.5, "zorder": 1}
        held_out = np.where(seen, np.nan, values)
        panels.draw(visuals.scatter_xy, "held out", x, held_out, **style)


def edges_between(x: np.ndarray) -> np.ndarray:
    """Left and right end of the part of the line that is nearest to each point, in order."""
    middles = (x[1:] + x[:-1]) / 2
    return np.repeat(np.concatenate([x[:1], middles, x[-1:]]), 2)[1:-1]


def as_fits(data: Fit | Mapping[str, Fit]) -> Mapping[str, Fit]:
    """One fit, or several by name, as a mapping."""
    fits = {"fit": data} if isinstance(data, xr.DataTree | tuple) else data
    if not isinstance(fits, Mapping) or not fits:
        raise ValueError(
            f"data: got {data!r:.60}, expected ArviZ data, a pair of mean and variance, or a "
            "mapping from names to such fits."
        )
    return fits


def seen_of(values: np.ndarray, observed: ArrayLike | None) -> np.ndarray:
    """Which responses the methods have seen."""
    seen = np.isfinite(values)
    if observed is None:
        return seen
    if not fits_into(observed, values.shape):
        raise ValueError(
            f"observed: got the shape {np.shape(observed)}, expected {values.shape}, that of Y; "
            "say of every response whether it was observed."
        )
    return seen & np.reshape(np.asarray(observed, bool), values.shape)


def by_name(values: Any, tasks: pd.Index) -> Any:
    """Values by tasks in this order, where they have the names of the tasks."""
    has_names = isinstance(values, pd.DataFrame) and values.columns.is_unique
    if has_names and set(values.columns) == set(tasks):
        return values[list(tasks)]
    return values


def columns_of(names: list[Hashable], tasks: Iterable[Hashable] | None) -> list[int]:
    """Places of the tasks to draw."""
    drawn = names if tasks is None else list(tasks)
    if not drawn or not set(drawn) <= set(names):
        raise ValueError(
            f"tasks: got {drawn}, expected one or more of {names}; tasks are numbered, or named by "
            "the columns of Y."
        )
    if len(set(names)) < len(names) or len(set(drawn)) < len(drawn):
        raise ValueError(
            f"tasks: got {drawn} of {names}, expected each name once; rename the columns of Y."
        )
    return [names.index(task) for task in drawn]


def by_task(array: np.ndarray, tasks: list[Hashable]) -> xr.DataArray:
    """Points by tasks as panels by points."""
    return xr.DataArray(array.T, {"task": tasks}, ["task", "point"])


def fit_of(
    fit: Fit, method: str, var_name: str, shape: tuple[int, int], tasks: pd.Index
) -> list[np.ndarray]:
    """Mean and interval of one method, points by tasks."""
    if isinstance(fit, tuple):
        if np.any(np.asarray(fit[1], float) < 0):
            raise ValueError(
                f"data: the fit {method!r} has a variance of {np.asarray(fit[1]).min():.3g}, "
                "expected at least 0; give mean and variance, as guide.predict returns them."
            )
        statistics = gaussian_interval(*fit)
    else:
        posterior(fit)
        groups = [fit[group].data_vars for group in FITTED if group in fit.children]
        found = [variables[var_name] for variables in groups if var_name in variables]
        if not found:
            raise ValueError(
                f"var_name: {method!r} has no `{var_name}` in the groups {FITTED}; name the site "
                "of the fit, or add predictions."
            )
        draws = tasks_in_order(found[0], tasks)
        statistics = [values.values for values in mean_and_interval(draws)]
    for values in statistics:
        if not fits_into(values, shape):
            raise ValueError(
                f"data: the fit {method!r} has the shape {values.shape}, expected {shape}, points "
                "by tasks; give the inputs of the fit as X_new if they are not X."
            )
    return [values.reshape(shape) for values in statistics]


def tasks_in_order(draws: xr.DataArray, tasks: pd.Index) -> xr.DataArray:
    """The draws with the tasks last, in this order, where a dimension has their names.

    :raises ValueError: if it has some of them alone.
    """
    # numbers from 0 are those of places, which every dimension may have
    places = pd.RangeIndex(len(tasks))
    if tasks.equals(places):
        return draws
    for dim, labels in draws.indexes.items():
        if dim in sample_dims(draws) or len(labels) != len(tasks) or labels.equals(places):
            continue
        if set(labels) == set(tasks):
            return draws.sel({dim: list(tasks)}).transpose(..., dim)
        # those of points may be among the numbers of tasks
        if labels.dtype.kind in "OUT" and labels.isin(tasks).any():
            raise ValueError(
                f"Y: got the columns {tasks[~tasks.isin(labels)].tolist()}, expected "
                f"{labels.tolist()!s:.200}, the tasks of `{draws.name}`; rename the columns of Y."
            )
    return draws


def gaussian_interval(mean: ArrayLike, variance: ArrayLike) -> list[np.ndarray]:
    """Mean, and the ends of the central interval."""
    centre, prob = np.asarray(mean, float), arviz_base.rcParams["stats.ci_prob"]
    half = NormalDist().inv_cdf((1 + prob) / 2) * np.sqrt(np.asarray(variance, float))
    return [centre, centre - half, centre + half]


def fits_into(values: ArrayLike, shape: tuple[int, ...]) -> bool:
    """Whether values have this shape, points by tasks; a single task need not have a dimension."""
    return np.shape(values) == shape or (shape[1] == 1 and np.shape(values) == shape[:1])


def shade(da: xr.DataArray, target: Any, **kwargs: Any) -> Any:
    """A visual of arviz-plots: the panel shaded from bottom to top where y is 1."""
    x, y = da.sel(plot_axis="x"), da.sel(plot_axis="y")
    across = {"transform": target.get_xaxis_transform(), "zorder": 0, "linewidth": 0}
    return target.fill_between(x, 0, 1, where=y == 1, **across, **kwargs)
