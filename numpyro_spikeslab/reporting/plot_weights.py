# SPDX-License-Identifier: Apache-2.0
"""Heat map of the inclusion probabilities of weights."""

from arviz_plots import PlotCollection
import xarray as xr

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reporting.arviz_data import WEIGHTS, check_finite, inclusion
from numpyro_spikeslab.reporting.methods import (
    Methods,
    as_methods,
    by_method,
    check_pairs,
    comparable,
)
from numpyro_spikeslab.reporting.pictures import LETTER, LITERAL, MAX_HEIGHT, label_ticks, panels

CELL = 0.36
"""Inches of the side of a cell."""


def plot_weights(data: xr.DataTree | Methods, weights: str = WEIGHTS) -> PlotCollection:
    """Plot which task uses which latent function: inclusion probabilities as a heat map.

    There is one row per task, one column per function and one panel per method. Align Markov chains
    first, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method.
    :param weights: a pair with two plates: tasks, then functions.
    :returns: the picture; ``.savefig("weights.png")`` writes it.
    :raises ValueError: if there is no posterior, if ``weights`` is no pair or does not have two
        plates, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_weights
        >>> spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100, 3, 2))
        >>> draws = {"W": 2.0 * spike, "W_spike": spike}
        >>> picture = plot_weights(arviz_base.from_dict({"posterior": draws}))
        >>> picture.get_target("W", {"model": "posterior"}).images[0].get_array().shape
        (3, 2)
    """
    methods = as_methods(data)
    (name,) = comparable(methods, weights)
    check_pairs(methods, [name], "weights")
    probs = by_method((inclusion(tree, name) for tree in methods.values()), methods)
    check_finite(probs.rename(name))
    if probs.ndim != 3:
        got = f"`{name}` with the plates {list(probs.dims[1:])}"
        raise bad("weights", got, "two, tasks and functions", "Draw it with plot_inclusion.")
    tasks, functions = ([str(label) for label in probs[dim].values] for dim in probs.dims[1:])
    height = min(CELL * len(tasks), MAX_HEIGHT)
    letters = [LETTER * max(map(len, each)) for each in (tasks, functions)]
    # labels of functions that are wider than a cell are turned
    is_turned = letters[1] > CELL
    width = len(methods) * max(CELL * len(functions), 1.5) + letters[0] + 1.4
    size = width, height + 0.9 + letters[1] * is_turned
    picture = panels(probs.to_dataset(name=name), "model", len(methods), size, sharey=True)
    axes = [picture.get_target(name, {"model": method}) for method in methods]
    for panel, method, cells in zip(axes, methods, probs.values, strict=True):
        image = panel.imshow(cells, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        label_ticks(panel.xaxis, functions, CELL * len(functions))
        label_ticks(panel.yaxis, tasks, height)
        panel.tick_params(axis="x", rotation=90 * is_turned)
        panel.set_xlabel(probs.dims[2], **LITERAL)
        if len(methods) > 1:
            panel.set_title(method, fontsize=10, **LITERAL)
    axes[0].set_ylabel(probs.dims[1], **LITERAL)
    bar = picture.viz["figure"].item().colorbar(image, ax=axes, shrink=0.8)
    bar.set_label("inclusion probability", size=9)
    return picture
