# SPDX-License-Identifier: Apache-2.0
"""Data to draw, and what a picture shows, read back from its artists."""

from itertools import pairwise

import arviz_base
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.data import posterior


def chains(count, seed=0, **others):
    """Four chains of ``count`` weights: the first never in, the last always."""
    rng = np.random.default_rng(seed)
    p = np.linspace(0, 1, count)
    spike = rng.binomial(1, p, size=(4, 100, count))
    slab = rng.normal(1.0, 0.5, size=spike.shape)
    dims = {"w": ["feature"], "w_spike": ["feature"]}
    return arviz_base.from_dict(
        {"posterior": {"w": spike * slab, "w_spike": spike, **others}},
        dims=dims | {name: ["task", "part"][: draws.ndim - 2] for name, draws in others.items()},
        coords={"feature": [f"x{i}" for i in range(count)]},
    )


def variational(count, seed=1):
    draws = posterior(chains(count, seed)).stack(sample=["chain", "draw"])
    draws = draws.drop_vars(["sample", "chain", "draw"]).transpose("sample", ...)
    return xr.DataTree.from_dict({"posterior": draws})


def of_tasks(seed=0, dims=("chain", "draw"), **coords):
    """Draws of three tasks on three functions, of which the last is not used, at four points."""
    rng = np.random.default_rng(seed)
    shape = (2, 50)[: len(dims)]
    p = np.array([[1.0, 0.2, 0.0], [0.9, 0.8, 0.0], [0.0, 0.55, 0.1]])
    spike = rng.binomial(1, p, size=(*shape, 3, 3))
    W = spike * rng.normal(2.0, 0.1, size=spike.shape)
    phi = rng.normal(size=(*shape, 3, 4))
    noise = 0.1 * rng.normal(size=(*shape, 4, 3))
    fit = np.swapaxes(W @ phi, -1, -2)
    draws = {"W": W, "W_spike": spike, "phi": phi, "f": fit}
    names = {
        "W": ["task", "latent"],
        "W_spike": ["task", "latent"],
        "phi": ["latent", "point"],
        "f": ["point", "task"],
        "Y": ["point", "task"],
    }
    return arviz_base.from_dict(
        {"posterior": draws, "posterior_predictive": {"Y": fit + noise}},
        dims=names,
        coords=coords,
        sample_dims=list(dims),
    )


def artist(picture, kind, name="w", **sel):
    return picture.get_viz(kind, name, sel)


def panel(picture, name="w"):
    return picture.get_target(name, {})


def tick_labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def overlap(texts):
    """Whether any two of the drawn texts, in reading order, overlap."""
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    boxes.sort(key=lambda box: -box.y1)
    return any(above.y0 < below.y1 - 0.5 for above, below in pairwise(boxes))


def edges_of(band):
    """Lower and upper edge of a band between curves, from left to right."""
    vertices = np.unique(band.get_paths()[0].vertices, axis=0)
    places = np.unique(vertices[:, 0])
    ends = [vertices[vertices[:, 0] == place, 1] for place in places]
    return places, np.array([[end.min(), end.max()] for end in ends]).T


def with_nan(data, name):
    """The same data with a first number of a variable that is none."""
    data["posterior"][name].values[:1, :1].flat[0] = np.nan
    return data
