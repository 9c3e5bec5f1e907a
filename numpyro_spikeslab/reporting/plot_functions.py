# SPDX-License-Identifier: Apache-2.0
"""The picture of latent functions."""

from typing import Any

from arviz_plots import PlotCollection
import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

from numpyro_spikeslab.reporting.curves import grid_of_curves
from numpyro_spikeslab.reporting.data import (
    FUNCTIONS,
    WEIGHTS,
    check_finite,
    function_plate,
    mean_and_interval,
    plates_besides,
    posterior,
    sample_dims,
)
from numpyro_spikeslab.reporting.methods import Methods, as_methods, by_method, comparable
from numpyro_spikeslab.reporting.pictures import add_legend, positions


def plot_latent_functions(
    data: xr.DataTree | Methods,
    X: ArrayLike | None = None,
    *,
    functions: str = FUNCTIONS,
    weights: str = WEIGHTS,
    active_only: bool = False,
) -> PlotCollection:
    """Plot the latent functions: posterior means, and bands of their central intervals.

    One panel per function. A band holds ``arviz_base.rcParams["stats.ci_prob"]`` of the draws at
    each point. Markov chains must have been aligned, see :func:`~numpyro_spikeslab.align`.

    :param data: ArviZ data, or several by the name of the method, overlaid with a legend.
    :param X: inputs, of one dimension, shape (N,). The default is the labels of the points, which
        ``coords`` and ``dims`` can make the inputs when the data are made.
    :param functions: variable of the functions.
    :param weights: variable of their weights.
    :param active_only: whether to leave out functions that no task of any method is more likely to
        use than not.
    :returns: the picture; ``.savefig("functions.png")`` writes it.
    :raises ValueError: if there is no posterior, if a variable is missing, if functions are not
        finite or none is active, if ``X`` does not fit, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import plot_latent_functions
        >>> rng = np.random.default_rng(0)
        >>> draws = {"W": rng.normal(size=(4, 50, 3, 2)), "phi": rng.normal(size=(4, 50, 2, 5))}
        >>> dims = {"W": ["task", "latent"], "phi": ["latent", "point"]}
        >>> data = arviz_base.from_dict({"posterior": draws}, dims=dims)
        >>> picture = plot_latent_functions(data, X=np.linspace(0, 1, 5))
        >>> picture.viz["mean"]["phi"].sizes["latent"]
        2
    """
    methods = as_methods(data)
    draws = [posterior(tree) for tree in methods.values()]
    plate = function_plate(draws[0], weights, functions)
    comparable(methods, [weights, functions])
    for each in draws:
        check_finite(each[functions])
    plates = [plate, *plates_besides(draws[0], functions, plate)]
    if len(plates) != 2:
        raise ValueError(
            f"functions: `{functions}` has the dimensions {plates}, expected two, functions and "
            "points."
        )
    keep: Any = slice(None)
    if active_only:
        keep = active([each[weights] for each in draws], plate)
    parts = [mean_and_interval(each[functions].isel({plate: keep})) for each in draws]
    statistics = [
        by_method(each, methods).transpose("model", *plates) for each in zip(*parts, strict=True)
    ]
    x = positions(X, draws[0][plates[1]].values)
    picture = grid_of_curves(x, statistics, functions, col_wrap=4)
    add_legend(picture, methods)
    return picture


def active(weights: list[xr.DataArray], plate: str) -> np.ndarray:
    """Which functions some task of some method is more likely to use than not."""
    shares = [(each != 0).mean(sample_dims(each)) for each in weights]
    most = [share.max([dim for dim in share.dims if dim != plate]) for share in shares]
    found = np.flatnonzero(np.max(most, axis=0) > 0.5)
    if not found.size:
        raise ValueError(
            "active_only: no weight is more often in than out, expected some; draw all functions "
            "with active_only=False."
        )
    return found
