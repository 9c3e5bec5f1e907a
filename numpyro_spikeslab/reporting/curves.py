# SPDX-License-Identifier: Apache-2.0
"""Means and intervals over a line, in a panel for each function or task."""

from arviz_base import rcParams
from arviz_plots import PlotCollection, visuals
from arviz_plots.backend import matplotlib as backend
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.pictures import LITERAL, panels, xy

CURVES = (3.0, 1.8)  # inches of a panel with curves


def grid_of_curves(
    x: np.ndarray, statistics: list[xr.DataArray], name: str, col_wrap: int
) -> PlotCollection:
    """Draw means and intervals over their last dimension, in a panel for each of the one before.

    Each has the dimensions model, panel and point.
    """
    order = np.argsort(x, kind="stable")
    mean, low, high = (values[..., order] for values in statistics)
    lines = xy(x[order], mean)
    bands = xr.concat([lines.sel(plot_axis="x", drop=True), low, high], "kwarg")
    bands = bands.assign_coords(kwarg=["x", "y_bottom", "y_top"])
    plate, count = str(mean.dims[1]), mean.shape[1]
    most = rcParams["plot.max_subplots"]
    if most is not None and count > most:
        raise ValueError(
            f"data: a panel for each {plate} would be {count}, expected at most {most}; draw some "
            "of them (`tasks` of plot_fit, `active_only` of plot_latent_functions), or raise "
            "arviz_base.rcParams['plot.max_subplots']."
        )
    cols = min(count, col_wrap)
    size = (CURVES[0] * cols + 0.4, CURVES[1] * np.ceil(count / cols) + 0.6)
    picture = panels(
        lines.to_dataset(name=name), [plate], cols, {"figsize": size}, aes={"color": ["model"]}
    )
    band = {"alpha": 0.25, "linewidth": 0}
    picture.map(visuals.fill_between_y, "band", data=bands.to_dataset(name=name), **band)
    picture.map(visuals.line_xy, "mean", width=1.3)
    for place, label in enumerate(mean[plate].values):
        panel = picture.get_target(name, {plate: label})
        backend.title(f"{plate} {label}", panel, size=10, **LITERAL)
        # below the last ones there may be no panel that has the labels of the shared axis
        panel.tick_params(labelbottom=place >= count - cols, labelsize=8)
    return picture
