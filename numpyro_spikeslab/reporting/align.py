# SPDX-License-Identifier: Apache-2.0
"""Latent functions in one order, and what does not depend on their order.

The fit ``W phi`` is invariant to permutations of the functions, and to the sign of a function
together with its weights.
"""

from collections.abc import Mapping
from math import prod
import re
from typing import NamedTuple

from jaxtyping import Float, Int
import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import linear_sum_assignment
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import FUNCTIONS, WEIGHTS, posterior, sample_dims
from numpyro_spikeslab.support.messages import bad

GROUPS_OF_POSTERIOR = {"/posterior", "/sample_stats", "/posterior_predictive", "/predictions"}


class Factors(NamedTuple):
    """Weights of M latent functions and the functions, of S draws."""

    W: Float[np.ndarray, "S M Q"]
    phi: Float[np.ndarray, "S M N"]

    def normalised(self) -> "Factors":
        """Scale functions to length one, with the same products."""
        length = np.linalg.norm(self.phi, axis=2, keepdims=True)
        return Factors(self.W * length, self.phi / np.where(length > 0, length, 1))

    def mean(self) -> "Factors":
        """Average weights and functions over the draws, as one draw."""
        return Factors(*(x.mean(axis=0, keepdims=True) for x in self))

    def moved(self, places: "Places") -> "Factors":
        """Put the functions of each draw into other places."""
        order, sign = places.order[..., None], places.sign[..., None]
        return Factors(*(sign * np.take_along_axis(x, order, axis=1) for x in self))


class Places(NamedTuple):
    """The function of the draw that takes each place, and its factor, 1 or -1."""

    order: Int[np.ndarray, "S M"]
    sign: Int[np.ndarray, "S M"]


def match(draws: Factors, reference: Factors, keep_order: bool = False) -> Places:
    """Match the products ``w_m phi_m^T`` of each draw to a reference, by least squares.

    Functions without weights match all places equally well: they keep their order and signs.
    """
    W, phi = reference.W[0], reference.phi[0]
    products = (draws.W @ W.T) * (draws.phi @ phi.T)  # of function m with the place k, (S, M, K)
    if keep_order:
        products = np.broadcast_to(np.eye(len(W)), products.shape)
    order = np.stack([linear_sum_assignment(x.T, maximize=True)[1] for x in products])
    is_used = np.take_along_axis(draws.W.any(axis=2), order, axis=1)
    unused = [np.sort(row[~used]) for row, used in zip(order, is_used, strict=True)]
    order[~is_used] = np.concatenate(unused)
    placed = draws.moved(Places(order, np.ones_like(order)))
    cosines = cosine(placed.W, W) + cosine(placed.phi, phi)
    return Places(order, np.where(is_used & (cosines < 0), -1, 1))


def cosine(x: Float[np.ndarray, "S M D"], y: Float[np.ndarray, "M D"]) -> Float[np.ndarray, "S M"]:
    """Compute the cosines of the angles between rows; 0 if one is zero."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.einsum("smd,md->sm", x, y) / np.where(lengths > 0, lengths, 1)


def centre(draws: Factors, keep_order: bool = False) -> Factors:
    """Compute a reference for all draws: their mean after matching, twice."""
    # first the draw whose fit is nearest to the mean fit
    mean = np.tensordot(draws.W, draws.phi, axes=([0, 1], [0, 1])) / len(draws.W)
    squares = np.sum((draws.W @ draws.W.mT) * (draws.phi @ draws.phi.mT), axis=(1, 2))
    products = np.sum((draws.W @ mean) * draws.phi, axis=(1, 2))
    first = np.argmin(squares - 2 * products)
    reference = Factors(*(x[first][None] for x in draws))
    for _ in range(2):
        reference = draws.moved(match(draws, reference, keep_order)).mean()
    return reference


def strongest_first(reference: Factors, keep_order: bool = False) -> Factors:
    """Sort functions by strength, and make their largest weights positive."""
    strength = np.linalg.norm(reference.W, axis=2)
    order = np.argsort(np.zeros_like(strength) if keep_order else -strength, axis=1, kind="stable")
    largest = np.argmax(np.abs(reference.W), axis=2, keepdims=True)
    negative = np.take_along_axis(reference.W, largest, axis=2)[..., 0] < 0
    sign = np.where(np.take_along_axis(negative, order, axis=1), -1, 1)
    return reference.moved(Places(order, sign))


def align(
    data: xr.DataTree,
    reference: xr.DataTree | Mapping[str, ArrayLike] | None = None,
    *,
    weights: str = WEIGHTS,
    functions: str = FUNCTIONS,
) -> xr.DataTree:
    """Give latent functions the same order and signs in all draws and chains.

    A posterior does not identify the order and the signs of latent functions, so R-hat, means and
    intervals of weights or functions mean nothing until the draws are aligned. Each draw gets the
    permutation and the signs that bring its products ``w_m phi_m`` nearest to the reference; those
    of one variational fit, which share their order, get those of their mean. A function without
    weights in a draw takes a remaining place and keeps its sign.

    Alignment cannot repair chains that have converged to different functions: look first at R-hat
    of :func:`invariants`. The functions must have equal priors, of mean zero. If variables such as
    ``phi_0_scale`` show that their kernels are of different kinds, only signs are matched.

    :param data: ArviZ data with the weights, Q tasks by M functions, and the functions, M by N
        points, of every draw. They share the dimension of the functions.
    :param reference: what to match: one draw, as values of ``weights`` and ``functions`` by name
        (:meth:`PairedGuide.posterior_mean <numpyro_spikeslab.PairedGuide.posterior_mean>`, for
        example); or the centre of ArviZ data that are aligned. The default is the centre of
        ``data``, with the strongest function first and the largest weight of each positive.
    :param weights: variable of the weights; its slab goes with it.
    :param functions: variable of the functions; ``phi_new`` goes with ``phi``.
    :returns: ArviZ data like ``data``, in which all variables with the dimension of the functions
        have their new order; labels stay in their places.
    :raises ValueError: if a variable is missing or not finite, if weights and functions do not
        share exactly one dimension, or if shapes differ.

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
    keep_order = has_numbered_kernels(draws, functions)
    factors = factors_of(draws, weights, functions)
    if reference is None:
        target = strongest_first(centre(factors, keep_order), keep_order)
    else:
        target = as_one_draw(reference, draws, weights, functions)
    plate = arviz_data.function_plate(draws, weights, functions)
    sizes = {dim: draws.sizes[dim] for dim in (*sample_dims(draws), plate)}
    shape = prod(sizes.values()) // sizes[plate], sizes[plate]
    order, sign = (
        xr.DataArray(np.broadcast_to(each, shape).reshape(list(sizes.values())), dims=list(sizes))
        for each in match(factors, target, keep_order)
    )
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
    return xr.DataTree.from_dict(groups, name=data.name)


def has_numbered_kernels(draws: xr.Dataset, functions: str) -> bool:
    """Whether some kernel parameters belong to one numbered function, such as ``phi_0_scale``."""
    return any(re.match(rf"{re.escape(functions)}_\d+_", str(name)) for name in draws.data_vars)


def factors_of(draws: xr.Dataset, weights: str, functions: str) -> Factors:
    """Return weights and functions of all draws, or the mean of a fit, of functions of length 1."""
    plate = arviz_data.function_plate(draws, weights, functions)
    factors = Factors(rows(draws[weights], plate), rows(draws[functions], plate)).normalised()
    return factors if "chain" in {*draws.dims, *draws.coords} else factors.mean()


def rows(values: xr.DataArray, plate: str) -> np.ndarray:
    """Return finite values as an array of draws by functions by all other elements."""
    arviz_data.check_finite(values)
    dims = sample_dims(values)
    array = values.transpose(*dims, plate, ...).values.astype(float)
    return array.reshape(prod(array.shape[: len(dims)]), values.sizes[plate], -1)


def as_one_draw(
    reference: xr.DataTree | Mapping[str, ArrayLike],
    draws: xr.Dataset,
    weights: str,
    functions: str,
) -> Factors:
    """Return the reference of :func:`align` as one draw, after a check of its shapes."""
    like, names = draws.isel(dict.fromkeys(sample_dims(draws), 0)), (weights, functions)
    if isinstance(reference, xr.DataTree):
        others = posterior(reference)
        arviz_data.values_by_name(others.isel(dict.fromkeys(sample_dims(others), 0)), like, names)
    else:
        others = xr.Dataset(arviz_data.values_by_name(reference, like, names)).expand_dims("sample")
    factors = factors_of(others, weights, functions)
    return centre(factors, has_numbered_kernels(others, functions))


def with_plates_of(weight: xr.DataArray, group: xr.Dataset) -> xr.Dataset:
    """Give inclusion probabilities the plates of their weight, whose names a sampler lacks."""
    probs = {
        name: arviz_data.align_to("data", values, weight)
        for name, values in group.data_vars.items()
        if arviz_data.are_inclusion_probabilities(name, str(weight.name))
    }
    return group.assign(probs)


def placed(values: xr.DataArray, order: xr.DataArray, sign: xr.DataArray) -> xr.DataArray:
    """Put the functions of each draw into their new places."""
    if not order.sizes.items() <= values.sizes.items():
        got = f"`{values.name}` of the sizes {dict(values.sizes)}"
        expected = f"the sizes of the posterior, {dict(order.sizes)}, among them"
        raise bad("data", got, expected, "Thin all groups alike.")
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
    """Compute variables that do not depend on the order and signs of latent functions.

    Their R-hat, effective sample sizes and intervals need no :func:`align`:
    ``arviz_stats.rhat(nss.invariants(data))``.

    - every variable without the dimension of the functions: noise, scales, ``f``;
    - ``num_active``: number of functions with a nonzero weight;
    - ``WWT``: the matrix ``W W^T`` of Q by Q tasks (after the name of ``weights``);
    - ``f``: the fit ``(W phi)^T`` at all points, if the posterior has no ``f``. Choose points by
      ``data.sel(point=...)`` before, or by ``coords`` in :func:`summary`.

    :param data: ArviZ data with ``weights`` and ``functions``, see :func:`align`.
    :returns: ArviZ data with a ``posterior`` only.
    :raises ValueError: as :func:`align`.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import invariants
    >>> rng = np.random.default_rng(0)
    >>> draws = {"W": rng.normal(size=(4, 50, 3, 2)), "phi": rng.normal(size=(4, 50, 2, 5))}
    >>> dims = {"W": ["task", "latent"], "phi": ["latent", "point"]}
    >>> table = invariants(arviz_base.from_dict({"posterior": draws}, dims=dims))["posterior"]
    >>> {str(name): values.shape[2:] for name, values in table.data_vars.items()}
    {'num_active': (), 'WWT': (3, 3), 'f': (5, 3)}
    """
    draws = posterior(data)
    plate = arviz_data.function_plate(draws, weights, functions)
    W = draws[weights]
    tasks = arviz_data.plates(W, without=plate)
    invariant = draws.drop_vars([name for name, x in draws.data_vars.items() if plate in x.dims])
    invariant["num_active"] = (W != 0).any(tasks).sum(plate)
    columns = W.rename({dim: f"{dim}_column" for dim in tasks})
    invariant[f"{weights}{weights}T"] = xr.dot(W, columns, dim=plate)
    if "f" not in invariant:
        f = xr.dot(W, draws[functions], dim=plate)
        invariant["f"] = f.transpose(*sample_dims(draws), ..., *tasks)
    return xr.DataTree.from_dict({"/posterior": invariant.drop_dims(plate, errors="ignore")})
