# SPDX-License-Identifier: Apache-2.0
"""Inclusion probabilities along the index, where weights are too many for a row each."""

from typing import Any, NamedTuple

from arviz_plots import PlotCollection, visuals
from arviz_plots.backend import matplotlib as backend
from jaxtyping import Float, Int
import numpy as np
from scipy.optimize import isotonic_regression
import xarray as xr

from numpyro_spikeslab.reporting.elements import (
    Tables,
    are_above,
    bars_of,
    labels_of,
    probabilities,
)
from numpyro_spikeslab.reporting.pictures import (
    DASHED,
    GREY,
    GRID,
    LETTER,
    LITERAL,
    draw_reference,
    panels,
    xy,
)

PANEL = (8.0, 2.4)  # inches of width and height
NAME = 0.14  # inches between two names, a line of 8 point type
ROOM = int(PANEL[0] / NAME)  # names that fit above a panel
EDGE, NAMES = 1.03, 1.12  # where a panel ends and where names begin, as probabilities
ABOVE: dict[str, Any] = {"size": 8, "rotation": 90, "vertical_align": "bottom"}
LEADER: dict[str, Any] = {"color": GREY, "width": 0.6, "clip_on": False, "zorder": 1}


class Hits(NamedTuple):
    """Weights of one variable above the threshold, in any method or in the reference."""

    places: Int[np.ndarray, " K"]
    highest: Float[np.ndarray, " K"]
    labels: list[str]

    @property
    def named(self) -> Int[np.ndarray, " J"]:
        """Which of them have names, the highest if there is no room for all."""
        return np.sort(np.argsort(-self.highest, kind="stable")[:ROOM])


def draw_index(tables: Tables, marks: Tables, threshold: float) -> PlotCollection:
    """A panel for each variable, with a point for each weight and names above the threshold."""
    hits = {name: hits_of(table, marks.get(name), threshold) for name, table in tables.items()}
    picture = empty_panels(tables, hits)
    picture.map(visuals.grid, axis="y", color=GRID, ignore_aes="all", store_artist=False)
    picture.map(visuals.scatter_xy, "inclusion", size=5, width=0)
    line = xr.Dataset(dict.fromkeys(tables, threshold))
    picture.map(visuals.hline, "threshold", data=line, ignore_aes="all", **DASHED)
    draw_hits(picture, tables, hits)
    if marks:
        ticks = {name: xy(at.places, marks[name][at.places]) for name, at in hits.items()}
        draw_reference(picture, ticks, "_", 70)
    draw_names(picture, tables, hits)
    return picture


def hits_of(table: xr.DataArray, marks: xr.DataArray | None, threshold: float) -> Hits:
    """Those of one variable."""
    highest = probabilities(table).max("model").values
    above = are_above(table, threshold)
    if marks is not None:
        above |= marks.values > threshold
    places = np.flatnonzero(above)
    return Hits(places, highest[places], labels_of(table[..., places]))


def empty_panels(tables: Tables, hits: dict[str, Hits]) -> PlotCollection:
    """An empty panel for each variable, with room for names above it."""
    points = {name: xy(np.arange(x.shape[-1]), probabilities(x)) for name, x in tables.items()}
    letters = max((len(label) for each in hits.values() for label in each.labels), default=0)
    methods = next(iter(tables.values()))["model"].values
    legend = LETTER * (max(map(len, methods)) + 7) if len(methods) > 1 else 0.0
    size = (PANEL[0] + 0.9 + legend, len(tables) * (PANEL[1] + 0.8 + 0.8 * LETTER * letters))
    figure = {"figsize": size, "sharex": False}
    picture = panels(xr.Dataset(points), ["__variable__"], 1, figure, aes={"color": ["model"]})
    for name, table in tables.items():
        panel, last = picture.get_target(name, {}), table.shape[-1] - 1
        panel.xaxis.get_major_locator().set_params(integer=True)
        margin = 0.5 + 0.01 * last
        backend.xlim((-margin, last + margin), panel)
        backend.ylim((1 - EDGE, EDGE), panel)
        plate = table[table.dims[-1]].attrs["long_name"] or name
        backend.xlabel(f"index of {plate}", panel, **LITERAL)
        backend.ylabel(f"inclusion probability\nof {name}", panel, **LITERAL)
    return picture


def draw_hits(picture: PlotCollection, tables: Tables, hits: dict[str, Hits]) -> None:
    """Draw larger points and bars, those of several methods beside each other."""
    points, bars = {}, {}
    for name, table in tables.items():
        places, count = hits[name].places, table.sizes["model"]
        here = table[..., places]
        beside = width_of_name(table.shape[-1]) / 3 * (np.arange(count) - (count - 1) / 2)
        x = places + beside[:, None]
        points[name] = xy(x, probabilities(here))
        bars[name] = xy(np.repeat(x, 3, axis=1), bars_of(here))
    picture.map(visuals.line_xy, "mcse", data=xr.Dataset(bars), width=1)
    picture.map(visuals.scatter_xy, "hits", data=xr.Dataset(points), size=14)


def draw_names(picture: PlotCollection, tables: Tables, hits: dict[str, Hits]) -> None:
    """Write names above the panels, with lines to the points that they belong to."""
    leaders = {}
    for name, table in tables.items():
        panel, at = picture.get_target(name, {}), hits[name].named
        x, size = hits[name].places[at], table.shape[-1]
        places = spread(x, width_of_name(size), size - 1)
        for place, label in zip(places, np.take(hits[name].labels, at), strict=True):
            backend.text(place, NAMES + 0.02, label, panel, **ABOVE, **LITERAL)
        edge, end, nan = (np.full(at.size, y) for y in (EDGE, NAMES, np.nan))
        y = np.stack([hits[name].highest[at], edge, end, nan], axis=1)
        line = xr.DataArray(y.ravel(), dims=f"{name}_leader")
        leaders[name] = xy(np.stack([x, x, places, nan], axis=1).ravel(), line)
        left = len(hits[name].places) - len(at)
        if left:
            note = f"; {left:,} more above the line have no room for a name"
            backend.xlabel(panel.get_xlabel() + note, panel, **LITERAL)
    picture.map(visuals.line_xy, "leader", data=xr.Dataset(leaders), ignore_aes="all", **LEADER)


def width_of_name(size: int) -> float:
    """How many of these weights take as much of the horizontal axis as a name."""
    return NAME / PANEL[0] * size


def spread(places: Int[np.ndarray, " J"], gap: float, last: int) -> Float[np.ndarray, " J"]:
    """Places between 0 and the last, in order and a gap apart, nearest to those that are given."""
    if not places.size:
        return places.astype(float)
    steps = gap * np.arange(places.size)
    return isotonic_regression(places - steps).x.clip(0, last - steps[-1]) + steps
