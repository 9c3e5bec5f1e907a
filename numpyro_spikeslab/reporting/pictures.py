# SPDX-License-Identifier: Apache-2.0
"""What the pictures share. They are drawn by arviz-plots with its matplotlib backend."""

from collections.abc import Mapping, Sized
from typing import Any

from arviz_plots import PlotCollection, visuals
from arviz_plots.backend import matplotlib as backend
import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

PANEL = 5.5  # inches of width, to which the labels add theirs
ROW = 0.2  # inches for one weight, almost two lines of 8 point type
MAX_HEIGHT = 30.0  # inches; beyond it matplotlib pictures get slow and viewers scale them down
LETTER = 0.085  # inches of a letter of 10 point type
INK, GREY, GRID = "black", "#808080", "#e5e5e5"
LITERAL = {"parse_math": False}  # names of users may have dollars
DASHED = {"color": GREY, "linestyle": "--", "width": 1}

Reference = str | Mapping[str, ArrayLike]


def panels(
    data: xr.Dataset, cols: list[str], col_wrap: int, figure: dict[str, Any], **aes: Any
) -> PlotCollection:
    """A picture with a panel for each variable or label of a dimension."""
    return PlotCollection.wrap(
        data,
        cols=cols,
        col_wrap=col_wrap,
        backend="matplotlib",
        figure_kwargs={"sharex": True, "layout": "constrained", **figure},
        **aes,
    )


def row_height(count: int) -> float:
    """Inches for one weight with the marks of several methods."""
    return ROW * (0.8 + 0.2 * count)


def lanes(count: int) -> list[float]:
    """Where in its row the marks of each method are."""
    return list(np.linspace(-0.25, 0.25, count)) if count > 1 else [0.0]


def xy(x: Any, y: Any) -> xr.DataArray:
    """Coordinates as ``line_xy`` and ``scatter_xy`` take them.

    One of the two is an array over the last dimension of the other.
    """
    like = xr.zeros_like(x if isinstance(x, xr.DataArray) else y, dtype=float)
    return xr.concat([like + x, like + y], "plot_axis").assign_coords(plot_axis=["x", "y"])


def label_rows(panel: Any, labels: list[str], height: float, bold: ArrayLike = False) -> None:
    """Write labels beside rows, the first on top, as many as there is room for."""
    every = int(np.ceil(0.7 * ROW * len(labels) / height))
    backend.yticks(range(0, len(labels), every), labels[::every], panel, fontsize=8, **LITERAL)
    backend.ylim((len(labels) - 0.4, -0.6), panel)
    weights = np.where(np.broadcast_to(bold, len(labels)), "bold", "normal")
    for text, weight in zip(panel.get_yticklabels(), weights[::every], strict=True):
        text.set_fontweight(weight)


def draw_reference(
    picture: PlotCollection, ticks: dict[str, xr.DataArray], marker: str, size: int
) -> None:
    """Draw black ticks, of each variable."""
    style = {"marker": marker, "color": INK, "size": size}
    data = xr.Dataset(ticks)
    picture.map(visuals.scatter_xy, "reference", data=data, ignore_aes="all", **style)


def add_legend(picture: PlotCollection, methods: Sized, **mark: Any) -> None:
    """Tell the colours of several methods apart, by the mark that the picture has of each."""
    if len(methods) > 1:
        picture.add_legend("model", title="", visual_kwargs=mark)
        literal(*picture.viz["figure"].item().legends)


def literal(legend: Any) -> None:
    """Draw the names in a legend as they are."""
    for text in legend.get_texts():
        text.set(**LITERAL)


def legend_of(reference: Reference) -> str:
    """How an axis label explains the marks."""
    return f" (black ticks: {reference if isinstance(reference, str) else 'reference'})"


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
