# SPDX-License-Identifier: Apache-2.0
"""Data to draw, and the contents of a picture, read from its artists."""

import arviz_base
from known_draws import pair
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.arviz_data import posterior


def chains(count, seed=0, **others):
    """Four chains of ``count`` weights: the first is never included, the last always."""
    rng = np.random.default_rng(seed)
    spike = rng.binomial(1, np.linspace(0, 1, count), size=(4, 100, count))
    data = pair(spike, rng.normal(1.0, 0.5, size=spike.shape), **others)
    names = [f"x{i}" for i in range(count)]
    return data.map_over_datasets(lambda group: group.assign_coords(feature=names))


def variational(count, seed=1):
    """The draws of chains without their chains."""
    draws = posterior(chains(count, seed)).stack(sample=["chain", "draw"])
    draws = draws.drop_vars(["sample", "chain", "draw"]).transpose("sample", ...)
    return xr.DataTree.from_dict({"posterior": draws})


def many(probs, **others):
    """One chain of a hundred draws with exactly these inclusion probabilities."""
    rng = np.random.default_rng(0)
    draws = {}
    for name, p in {"w": probs, **others}.items():
        spike = np.arange(100)[:, None] < np.round(100 * np.asarray(p))
        spike = rng.permuted(spike, axis=0)[None].astype(int)
        draws |= {name: 2.0 * spike, f"{name}_spike": spike}
    genes = [f"gene {i}" for i in range(len(probs))]
    return arviz_base.from_dict({"posterior": draws}, dims={"w": ["gene"]}, coords={"gene": genes})


def of_tasks(seed=0, dims=("chain", "draw"), **coords):
    """Draws of three tasks on three functions, the last one unused, at four points."""
    rng = np.random.default_rng(seed)
    shape = (2, 50)[: len(dims)]
    p = np.array([[1.0, 0.2, 0.0], [0.9, 0.8, 0.0], [0.0, 0.55, 0.1]])
    spike = rng.binomial(1, p, size=(*shape, 3, 3))
    W = spike * rng.normal(2.0, 0.1, size=spike.shape)
    phi = rng.normal(size=(*shape, 3, 4))
    fit = np.swapaxes(W @ phi, -1, -2)
    noise = 0.1 * rng.normal(size=(*shape, 4, 3))
    names = {key: ["task", "latent"] for key in ("W", "W_spike")} | {"phi": ["latent", "point"]}
    return arviz_base.from_dict(
        {
            "posterior": {"W": W, "W_spike": spike, "phi": phi, "f": fit},
            "posterior_predictive": {"Y": fit + noise},
        },
        dims=names | {key: ["point", "task"] for key in ("f", "Y")},
        coords=coords,
        sample_dims=list(dims),
    )


def points_and_bars(axes, method=0):
    """Coordinates of the points of a method, (P, 2), and the ends of their bars, (P, 2, 2)."""
    line, _, (bars,) = axes.containers[method].lines
    ends = [x if len(x) else np.full((2, 2), np.nan) for x in bars.get_segments()]
    return np.transpose(line.get_data()), np.array(ends)


def ticks(axes):
    """Coordinates of the marks of the reference."""
    return np.ma.filled(axes.collections[-1].get_offsets(), np.nan)


def tick_labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def labelled(axes):
    """The artists in a panel by their labels in the legend."""
    return dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))


def legend_of(picture):
    (legend,) = picture.viz["figure"].item().legends
    return [text.get_text() for text in legend.get_texts()]


def edges_of(band):
    """Places, lower and upper edge of a band between curves, from left to right."""
    vertices = np.unique(band.get_paths()[0].vertices, axis=0)
    places = np.unique(vertices[:, 0])
    ends = [vertices[vertices[:, 0] == place, 1] for place in places]
    return places, np.array([[end.min(), end.max()] for end in ends]).T
