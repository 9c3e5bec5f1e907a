# SPDX-License-Identifier: Apache-2.0
"""ArviZ data of draws with known answers, and the contents of pictures, read from artists."""

import arviz_base
import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.arviz_data import posterior, sample_dims, statistics
from numpyro_spikeslab.reporting.weights import group_statistics

CHAINS, DRAWS = 4, 400
TASKS, USED, POINTS = 6, 4, 9
FUNCTIONS = USED + 1
PLATES = {
    "W": ["task", "latent"],
    "W_spike": ["task", "latent"],
    "W_slab": ["task", "latent"],
    "phi": ["latent", "point"],
    "phi_new": ["latent", "new_point"],
    "phi_scale": ["latent"],
    "noise": ["task"],
}


def columns_of(tree):
    """Statistics of the columns of a regression, in groups or not, by `feature`."""
    of_draws = statistics(posterior(tree)[["w"]])["w"]
    table = xr.concat([of_draws, group_statistics(tree, "w")], "summary").to_dataset("summary")
    return table.assign_attrs(tree["summary"].attrs)


def pair(spike, slab=None, **others):
    """ArviZ data of a pair, of draws shaped (chain, draw, feature) or (sample, feature)."""
    spike = np.asarray(spike)
    if slab is None:
        slab = np.random.default_rng(1).normal(1.0, 0.5, size=spike.shape)
    sample_dims = ["chain", "draw"] if spike.ndim == 3 else ["sample"]
    return arviz_base.from_dict(
        {"posterior": {"w": spike * slab, "w_spike": spike, "w_slab": slab, **others}},
        dims={name: ["feature"] for name in ("w", "w_spike", "w_slab")},
        sample_dims=sample_dims,
    )


def with_stats(data, attrs=None, **stats):
    """The same data with a group of sample statistics."""
    dims = sample_dims(posterior(data))
    group = arviz_base.dict_to_dataset(stats, sample_dims=dims)
    group.attrs.update(attrs or {})
    data = data.copy()
    data["sample_stats"] = group
    return data


def coin(p, seed=0, chains=CHAINS, draws=DRAWS):
    return np.random.default_rng(seed).binomial(1, p, size=(chains, draws, len(p)))


def planted(shape, seed=0):
    """Draws of one mode with four functions in use and an unused one, and the mode itself."""
    rng = np.random.default_rng(seed)
    W = rng.uniform(0.5, 1.5, (TASKS, FUNCTIONS)) * rng.choice([-1, 1], (TASKS, FUNCTIONS))
    phi = rng.normal(size=(FUNCTIONS, POINTS))
    spike = rng.random(W.shape) < 0.7
    spike[0], spike[:, USED] = True, False
    slab = W + 0.1 * rng.normal(size=(*shape, *W.shape))
    draws = {
        "W": spike * slab,
        "W_spike": np.broadcast_to(spike, slab.shape).astype(int),
        "W_slab": slab,
        "phi": phi + 0.1 * rng.normal(size=(*shape, *phi.shape)),
        "phi_new": rng.normal(size=(*shape, FUNCTIONS, 2)),
        "phi_scale": np.arange(FUNCTIONS) + 0.1 * rng.random((*shape, FUNCTIONS)),
        "noise": 0.2 + 0.01 * rng.normal(size=(*shape, TASKS)),
    }
    draws["phi"][..., USED, :] = rng.normal(size=(*shape, POINTS))
    return draws, {"W": spike * W, "phi": phi}


def exchanged(draws, order, sign):
    """The same draws with their functions in another order and with other signs."""
    moved = dict(draws)
    for name, dims in PLATES.items():
        if "latent" in dims:
            # the places of the functions are put on the axis of the functions
            shape = [FUNCTIONS if dim == "latent" else 1 for dim in dims]
            places, signs = (x.reshape(*x.shape[:-1], *shape) for x in (order, sign))
            axis = dims.index("latent") - len(dims)
            moved[name] = np.take_along_axis(draws[name], places, axis)
            if name in ("W", "W_slab", "phi", "phi_new"):
                moved[name] *= signs
    return moved


def shuffled(draws, shape, seed=1):
    """Each draw in another order, with other signs except for the unused function.

    The draws of a variational fit, without chains, all get the same order and signs.
    """
    rng = np.random.default_rng(seed)
    each = shape if len(shape) == 2 else (1,)
    order = rng.permuted(np.broadcast_to(np.arange(FUNCTIONS), (*each, FUNCTIONS)), axis=-1)
    sign = np.where(order == USED, 1, rng.choice([-1, 1], size=order.shape))
    return exchanged(draws, *(np.broadcast_to(x, (*shape, FUNCTIONS)) for x in (order, sign)))


def as_data(draws, sample_dims=("chain", "draw")):
    return arviz_base.from_dict({"posterior": draws}, dims=PLATES, sample_dims=list(sample_dims))


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
