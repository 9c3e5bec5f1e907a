# SPDX-License-Identifier: Apache-2.0
"""Parts of pictures, drawn by arviz-plots with its matplotlib backend."""

from collections.abc import Sized
from typing import Any

from arviz_plots import PlotCollection
import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

from numpyro_spikeslab.messages import bad

ROW = 0.2
"""Inches of a row, almost two lines of 8 point type."""

LETTER = 0.085
"""Inches of a letter of 10 point type."""

MAX_HEIGHT = 30.0
"""Inches; taller pictures are slow in matplotlib, and viewers scale them down."""

INK, GREY, GRID = "black", "#808080", "#e5e5e5"
LITERAL = {"parse_math": False}
"""Options of texts with names of users, in which dollars are no mathematics."""


def panels(
    data: xr.Dataset, cols: list[str], col_wrap: int, figure: dict[str, Any], **options: Any
) -> PlotCollection:
    """Make a picture with a panel for each variable or label of a dimension."""
    return PlotCollection.wrap(
        data,
        cols=cols,
        col_wrap=col_wrap,
        backend="matplotlib",
        figure_kwargs={"layout": "constrained", **figure},
        **options,
    )


def xy(x: Any, y: Any) -> xr.DataArray:
    """Stack coordinates, of which one is an array over the last dimension of the other.

    ``line_xy`` and ``scatter_xy`` of arviz-plots take the result.
    """
    like = xr.zeros_like(x if isinstance(x, xr.DataArray) else y, dtype=float)
    return xr.concat([like + x, like + y], "plot_axis").assign_coords(plot_axis=["x", "y"])


def label_ticks(axis: Any, labels: list[str], inches: float) -> list[Any]:
    """Label the places from 0 on, every n-th if there is no room for all; return the texts."""
    step = int(np.ceil(0.7 * ROW * len(labels) / inches))
    axis.set_ticks(range(0, len(labels), step), labels[::step], fontsize=8, **LITERAL)
    return axis.get_ticklabels()


def add_legend(picture: PlotCollection, methods: Sized, **mark: Any) -> None:
    """Explain the colours of several methods, by the mark that the picture has of each."""
    if len(methods) > 1:
        picture.add_legend("model", title="", visual_kwargs=mark)
        for text in picture.viz["figure"].item().legends[0].get_texts():
            text.set(**LITERAL)


def positions(X: ArrayLike | None, labels: ArrayLike) -> np.ndarray:
    """Return the places of points on the horizontal axis, their inputs or else their labels."""
    places = np.asarray(labels if X is None else X)
    if places.size != np.size(labels) or not np.issubdtype(places.dtype, np.number):
        got = f"{'labels' if X is None else 'inputs'} of shape {places.shape} and {places.dtype}"
        remedy = "If the inputs have more dimensions, give one, such as X[:, 0]."
        raise bad("X", got, f"a number for each of {np.size(labels)} points", remedy)
    return places.ravel().astype(float)
