# SPDX-License-Identifier: Apache-2.0
"""Parts of pictures: arviz-plots arranges the panels, matplotlib draws in them."""

from typing import Any

from arviz_plots import PlotCollection
import numpy as np
import xarray as xr

ROW = 0.2
"""Inches of a row, almost two lines of 8 point type."""

LETTER = 0.085
"""Inches of a letter of 10 point type."""

MAX_HEIGHT = 30.0
"""Inches; taller pictures are slow in matplotlib, and viewers scale them down."""

GREY = "#808080"
LITERAL = {"parse_math": False}
"""Option of texts with names of users, in which dollars are no mathematics."""


def panels(
    data: xr.Dataset, by: str, columns: int, size: tuple[float, float], **figure: Any
) -> PlotCollection:
    """Make empty panels, one for each variable (``"__variable__"``) or label of a dimension."""
    return PlotCollection.wrap(
        data,
        cols=[by],
        col_wrap=columns,
        backend="matplotlib",
        figure_kwargs={"layout": "constrained", "figsize": size, **figure},
    )


def label_ticks(axis: Any, labels: list[str], inches: float) -> list[Any]:
    """Label the places from 0 on, every n-th if there is no room for all; return the texts."""
    step = int(np.ceil(0.7 * ROW * len(labels) / inches))
    axis.set_ticks(range(0, len(labels), step), labels[::step], fontsize=8, **LITERAL)
    return axis.get_ticklabels()


def add_legend(picture: PlotCollection) -> None:
    """Explain the labelled parts of all panels above them, if there are several."""
    figure = picture.viz["figure"].item()
    parts: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        parts = dict(zip(labels, handles, strict=True)) | parts
    if len(parts) > 1:
        columns = min(len(parts), max(1, int(figure.get_figwidth() / 1.2)))
        place = {"loc": "outside upper center", "fontsize": 9, "frameon": False}
        for text in figure.legend(parts.values(), parts, ncols=columns, **place).get_texts():
            text.set(**LITERAL)
        figure.set_figheight(figure.get_figheight() + ROW * -(-len(parts) // columns))
