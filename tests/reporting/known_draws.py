# SPDX-License-Identifier: Apache-2.0
"""ArviZ data of draws with known answers."""

import arviz_base
import numpy as np

from numpyro_spikeslab.reporting.arviz_data import posterior, sample_dims

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
