# SPDX-License-Identifier: Apache-2.0
"""Latent functions in one order, and what does not depend on their order."""

from collections.abc import Mapping
from math import prod

import numpy as np
from numpy.typing import ArrayLike
import xarray as xr

from numpyro_spikeslab.reporting.data import (
    FUNCTIONS,
    WEIGHTS,
    are_inclusion_probabilities,
    are_one_fit,
    check_finite,
    first_draw,
    function_plate,
    given_values,
    has_numbered_kernels,
    plates_besides,
    posterior,
    sample_dims,
    shaped_like,
)
from numpyro_spikeslab.reporting.matching import Factors, Labels, centre, match, strongest_first

GROUPS_OF_POSTERIOR = {"/posterior", "/sample_stats", "/posterior_predictive", "/predictions"}


def align(
    data: xr.DataTree,
    reference: xr.DataTree | Mapping[str, ArrayLike] | None = None,
    *,
    weights: str = WEIGHTS,
    functions: str = FUNCTIONS,
) -> xr.DataTree:
    """Give latent functions the same order and signs in all draws and chains.

    Nothing in a model such as :func:`~numpyro_spikeslab.models.mtmkl` tells its latent functions
    apart: exchanging two of them, or the sign of one with that of its weights, changes neither
    likelihood nor prior. So R-hat, means and intervals of weights or functions say nothing until
    the draws are aligned. Each draw gets the permutation and the signs that bring its products
    ``w_m phi_m`` nearest to those of the reference. A function without weights in a draw takes a
    place that is left, and keeps its sign. In the draws of one variational fit every function has
    its place already, so they all get the permutation and the signs of their mean.

    Alignment cannot repair chains that have found different functions: look at R-hat of what needs
    no alignment (:func:`invariants`) first. The functions must have alike priors, of mean zero;
    where variables such as ``phi_0_scale`` say that their kernels are of different kinds, each
    stays in its place, and its sign alone is matched.

    :param data: ArviZ data with the weights, Q tasks by M functions, and the functions, M by N
        points, of every draw. They share one dimension, that of the functions.
    :param reference: what to match: one draw, as values of ``weights`` and ``functions`` by name
        (of :meth:`PairedGuide.posterior_mean <numpyro_spikeslab.PairedGuide.posterior_mean>`, for
        example); or ArviZ data, aligned in themselves, whose centre is matched. None, the default,
        matches the centre of ``data``, with the functions in the order of what they explain, the
        strongest first, and the largest weight of each positive.
    :param weights: variable of the weights; its slab goes with it.
    :param functions: variable of the functions; their values at new points, such as ``phi_new``,
        go with it.
    :returns: ArviZ data like ``data``. All variables with the dimension of the functions have their
        new order, spikes, kernel parameters and inclusion probabilities among them; labels stay in
        their places. The attribute ``aligned`` of the posterior tells :func:`summary` that it is.
    :raises ValueError: if there is no posterior, if a variable is missing or not finite, if weights
        and functions do not share exactly one dimension, or if shapes differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import align
        >>> rng = np.random.default_rng(0)
        >>> W = rng.normal([[0.0, 2.0], [1.0, -3.0]], 0.01, size=(2, 100, 2, 2))
        >>> phi = rng.normal([[1.0, 0.0, 0.0], [0.0, 1.0, -1.0]], 0.01, size=(2, 100, 2, 3))
        >>> W[1], phi[1] = -W[1, :, :, ::-1], -phi[1, :, ::-1]  # the second chain differs
        >>> data = arviz_base.from_dict(
        ...     {"posterior": {"W": W, "phi": phi}},
        ...     dims={"W": ["task", "latent"], "phi": ["latent", "point"]},
        ... )
        >>> align(data)["posterior"]["W"].mean("draw").round(1).values[..., 0].tolist()
        [[-2.0, 3.0], [-2.0, 3.0]]
    """
    draws = posterior(data)
    in_place = has_numbered_kernels(draws, functions)
    found = factors(draws, weights, functions)
    to_place = found.mean() if are_one_fit(draws) else found
    if reference is None:
        target = strongest_first(centre(to_place, in_place), in_place)
    else:
        target = as_one_draw(reference, draws, weights, functions)
    plate = function_plate(draws, weights, functions)
    order, sign = as_arrays(match(to_place, target, in_place), draws, plate)
    flipped = {weights, f"{weights}_slab", functions, f"{functions}_new"}
    groups = data.to_dict()
    for path in GROUPS_OF_POSTERIOR & set(groups):
        group = with_plates_of(draws[weights], groups[path])
        moved = {
            name: placed(values, order, sign if name in flipped else xr.ones_like(sign))
            for name, values in group.data_vars.items()
            if plate in values.dims
        }
        groups[path] = group.assign(moved)
    groups["/posterior"].attrs["aligned"] = f"{weights}, {functions}"
    return xr.DataTree.from_dict(groups, name=data.name)


def factors(draws: xr.Dataset, weights: str, functions: str) -> Factors:
    """Weights and functions of all draws."""
    plate = function_plate(draws, weights, functions)
    return Factors(rows(draws[weights], plate), rows(draws[functions], plate)).normalised()


def rows(values: xr.DataArray, plate: str) -> np.ndarray:
    """Draws by functions by all the rest, after a check that they are finite."""
    check_finite(values)
    dims = sample_dims(values)
    array = values.transpose(*dims, plate, ...).values.astype(float)
    return array.reshape(prod(array.shape[: len(dims)]), values.sizes[plate], -1)


def as_one_draw(
    reference: xr.DataTree | Mapping[str, ArrayLike],
    draws: xr.Dataset,
    weights: str,
    functions: str,
) -> Factors:
    """The reference of :func:`align`."""
    like, names = first_draw(draws), (weights, functions)
    if isinstance(reference, xr.DataTree):
        found = posterior(reference)
        given_values(first_draw(found), like, names)  # for its checks
        all_draws = factors(found, weights, functions)
        in_place = has_numbered_kernels(found, functions)
        return all_draws.mean() if are_one_fit(found) else centre(all_draws, in_place)
    return factors(given_values(reference, like, names).expand_dims("sample"), weights, functions)


def as_arrays(labels: Labels, draws: xr.Dataset, plate: str) -> list[xr.DataArray]:
    """Order and signs with the dimensions of the samples and of the functions."""
    sizes = {dim: draws.sizes[dim] for dim in (*sample_dims(draws), plate)}
    # the draws of one fit share their labels
    shape = (prod(sizes.values()) // sizes[plate], sizes[plate])
    arrays = (np.broadcast_to(x, shape).reshape(list(sizes.values())) for x in labels)
    return [xr.DataArray(x, dims=list(sizes)) for x in arrays]


def with_plates_of(weight: xr.DataArray, group: xr.Dataset) -> xr.Dataset:
    """The group with the inclusion probabilities of a weight shaped like it.

    Their plates may have other names, as a sampler that stores them knows none.
    """
    probs = {
        name: shaped_like(values, weight, sample_dims(weight))
        for name, values in group.data_vars.items()
        if are_inclusion_probabilities(name, str(weight.name))
    }
    return group.assign(probs)


def placed(values: xr.DataArray, order: xr.DataArray, sign: xr.DataArray) -> xr.DataArray:
    """A variable with the functions of each draw in their new places."""
    if not order.sizes.items() <= values.sizes.items():
        raise ValueError(
            f"data: `{values.name}` has the sizes {dict(values.sizes)}, expected those of the "
            f"posterior, {dict(order.sizes)}, among them; thin all groups alike."
        )
    *dims, plate = order.dims
    moved = xr.apply_ufunc(
        lambda x, order, sign: np.take_along_axis(x, order, axis=-1) * sign.astype(x.dtype),
        *(values.transpose(*dims, ...), order, sign),
        input_core_dims=[[plate]] * 3,
        output_core_dims=[[plate]],
        keep_attrs=True,
    )
    return moved.transpose(*values.dims)


def invariants(
    data: xr.DataTree, *, weights: str = WEIGHTS, functions: str = FUNCTIONS
) -> xr.DataTree:
    """What is the same whatever the order and the signs of latent functions are.

    R-hat, effective sample sizes and intervals of these variables need no :func:`align`. All
    functions for ArviZ data take the result: ``arviz_stats.rhat(nss.invariants(data))``.

    - every variable without the dimension of the functions: noise, scales, ``f``;
    - ``num_active``: number of functions with a weight that is not zero;
    - ``WWT``: the matrix ``W W^T`` of Q by Q tasks (after the name of ``weights``);
    - ``f``: the fit ``(W phi)^T`` at all points, if the posterior has no ``f``. For chosen points
      take ``data.sel(point=...)`` first, or ``coords`` in :func:`summary`.

    :param data: ArviZ data with weights and functions, see :func:`align`.
    :param weights: variable of the weights.
    :param functions: variable of the functions.
    :returns: ArviZ data with a ``posterior`` only.
    :raises ValueError: if there is no posterior, if a variable is missing, or if weights and
        functions do not share exactly one dimension.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import invariants
        >>> rng = np.random.default_rng(0)
        >>> draws = {"W": rng.normal(size=(4, 50, 3, 2)), "phi": rng.normal(size=(4, 50, 2, 5))}
        >>> dims = {"W": ["task", "latent"], "phi": ["latent", "point"]}
        >>> found = invariants(arviz_base.from_dict({"posterior": draws}, dims=dims))["posterior"]
        >>> {str(name): values.shape[2:] for name, values in found.data_vars.items()}
        {'num_active': (), 'WWT': (3, 3), 'f': (5, 3)}
    """
    draws = posterior(data)
    plate = function_plate(draws, weights, functions)
    tasks = plates_besides(draws, weights, plate)
    W = draws[weights]
    found = draws.drop_vars([name for name, x in draws.data_vars.items() if plate in x.dims])
    found["num_active"] = (W != 0).any(tasks).sum(plate)
    columns = W.rename({dim: f"{dim}_column" for dim in tasks})
    found[f"{weights}{weights}T"] = xr.dot(W, columns, dim=plate)
    if "f" not in found:
        f = xr.dot(W, draws[functions], dim=plate)
        found["f"] = f.transpose(*sample_dims(draws), ..., *tasks)
    found = found.drop_dims(plate, errors="ignore")
    found.attrs.pop("aligned", None)
    return xr.DataTree.from_dict({"/posterior": found})
