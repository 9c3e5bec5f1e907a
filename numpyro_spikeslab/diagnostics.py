# SPDX-License-Identifier: Apache-2.0
"""Tables over ArviZ data of spike-and-slab posteriors.

A *pair* is a weight ``w`` of the ``posterior`` group beside which its indicator ``w_spike``
lies. Markov chains have the dimensions ``(chain, draw)``, variational draws (from
``arviz_base.from_numpyro_svi``) the one dimension ``sample``. A *mixture* is weights ``W`` and
latent functions ``phi`` that share the dimension of the functions, and no other.
"""

from collections.abc import Hashable, Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import arviz_base
import arviz_stats
from jaxtyping import Float, Int
import numpy as np
from numpy.typing import ArrayLike
import pandas as pd
from scipy.optimize import linear_sum_assignment
import xarray as xr

import jax
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.util import log_density

from numpyro_spikeslab.cavi import CAVI

__all__ = ["add_variational_stats", "align", "compare", "invariants", "summary"]

CHAIN_DIAGNOSTICS = ("ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd")
WEIGHTS, FUNCTIONS = "W", "phi"  # as the sites of `models.mtmkl` are called
GROUPS_OF_POSTERIOR = {"/posterior", "/sample_stats", "/posterior_predictive", "/predictions"}


def posterior(data: xr.DataTree) -> xr.Dataset:
    """The posterior draws of ``data``, after a check that there are some."""
    if not isinstance(data, xr.DataTree) or "posterior" not in data.children:
        raise ValueError(
            f"data: got {type(data).__name__} without a `posterior` group, expected an xarray "
            "DataTree with one; make it with arviz_base.from_numpyro or "
            "arviz_base.from_numpyro_svi."
        )
    return data["posterior"].to_dataset()


def sample_dims(draws: xr.Dataset) -> list[str]:
    """``["chain", "draw"]`` of Markov chains, ``["sample"]`` of variational draws."""
    for dims in (["chain", "draw"], ["sample"]):
        if set(dims) <= set(draws.dims):
            return dims
    raise ValueError(
        f"data: its posterior has the dimensions {tuple(map(str, draws.dims))}, expected "
        "('chain', 'draw') or 'sample' among them; make it with arviz_base.from_numpyro or "
        "arviz_base.from_numpyro_svi."
    )


def pairs(draws: xr.Dataset) -> list[str]:
    """Names of the spike-and-slab weights, in the order of ``draws``."""
    return [str(name) for name in draws.data_vars if f"{name}_spike" in draws.data_vars]


def select(
    draws: xr.Dataset, var_names: str | Iterable[str] | None, default: Iterable[str] = ()
) -> list[str]:
    """``var_names``, or ``default`` for None, as a list of variables that ``draws`` has."""
    wanted = default if var_names is None else var_names
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    unknown = [name for name in names if name not in draws.data_vars]
    if unknown or not names:
        raise ValueError(
            f"var_names: got {unknown or var_names}, expected one or more of "
            f"{sorted(map(str, draws.data_vars))}; correct the spelling, or collect the site when "
            "sampling."
        )
    return names


def shaped_like(values: xr.DataArray, weight: xr.DataArray, dims: list[str]) -> xr.DataArray:
    """``values`` as floats with the dimensions and coordinates of ``weight``."""
    weight = weight.transpose(*dims, ...)
    values = values.transpose(*dims, ..., missing_dims="ignore")
    # Their plates may be unnamed where those of the weight are named, so only shapes can match.
    if values.shape != weight.shape:
        raise ValueError(
            f"data: `{values.name}` has the shape {values.shape}, expected {weight.shape}, that "
            f"of `{weight.name}`; store both with the same thinning and the same plates."
        )
    return weight.copy(data=values.values.astype(float))


def spike_draws(data: xr.DataTree, name: str) -> xr.DataArray:
    """Draws of the indicator of the pair ``name``, shaped like it."""
    draws = posterior(data)
    return shaped_like(draws[f"{name}_spike"], draws[name], sample_dims(draws))


def inclusion_draws(data: xr.DataTree, name: str) -> xr.DataArray:
    """Draws whose mean is the inclusion probability of the pair ``name``, shaped like it.

    Rao-Blackwellised probabilities win over the indicator: they have its mean and less noise.
    """
    draws = posterior(data)
    stats = data["sample_stats"].data_vars if "sample_stats" in data.children else {}
    for key, values in stats.items():
        if are_inclusion_probabilities(key, name):
            return shaped_like(values, draws[name], sample_dims(draws))
    return spike_draws(data, name)


def are_inclusion_probabilities(key: Hashable, name: str) -> bool:
    """Whether a sampler, or a block of one, has stored those of the pair ``name`` as ``key``."""
    return f".{key}".endswith(f".inclusion_probabilities.{name}")


def is_constant(draws: xr.DataArray, dims: list[str]) -> xr.DataArray:
    """Where all draws along ``dims`` are equal."""
    return draws.max(dims) == draws.min(dims)


def statistics(draws: xr.Dataset) -> xr.Dataset:
    """``arviz_stats.summary`` along a dimension ``summary``, NaN where a chain tells nothing."""
    dims = sample_dims(draws)
    kind = "all" if "chain" in dims else "stats"
    with np.errstate(divide="ignore", invalid="ignore"):
        table = arviz_stats.summary(
            draws, sample_dims=dims, kind=kind, fmt="xarray", round_to="none"
        )
    # Without variation inside the chains ArviZ reports all draws as effective, or R-hat 1e15.
    within = ["draw"] if "chain" in dims else dims
    for name, values in draws.data_vars.items():
        still = is_constant(values, within).all([dim for dim in dims if dim not in within])
        table[name] = table[name].where(~(still & table["summary"].isin(CHAIN_DIAGNOSTICS)))
    return table


def inclusion_statistics(data: xr.DataTree, name: str) -> xr.DataArray:
    """Inclusion probability of a pair and how well the draws determine it."""
    draws = inclusion_draws(data, name)
    dims = sample_dims(posterior(data))
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse = arviz_stats.mcse(draws, sample_dims=dims, method="mean")
    # Draws that are all 0 or all 1 carry no information on how rare the other value is.
    silent = is_constant(draws, dims) & draws.isin([0, 1]).all(dims)
    rows = {"inclusion": draws.mean(dims), "mcse_inclusion": mcse.where(~silent)}
    if "chain" in dims:
        rows["flips"] = abs(spike_draws(data, name).diff("draw")).sum("draw").mean("chain")
        spread = draws.mean("draw").std("chain", ddof=1) if draws.sizes["chain"] > 1 else np.nan
        rows["between_chain_sd"] = xr.zeros_like(rows["inclusion"]) + spread
    return xr.concat([row.expand_dims(summary=[key]) for key, row in rows.items()], dim="summary")


def function_plate(draws: xr.Dataset, weights: str, functions: str) -> str:
    """The dimension of the latent functions, which is the one that the weights share with them."""
    for argument, name in (("weights", weights), ("functions", functions)):
        if name not in draws.data_vars:
            raise ValueError(
                f"{argument}: got {name!r}, expected one of {sorted(map(str, draws.data_vars))}; "
                f"name the variable of the {argument}, or collect the site when sampling."
            )
    shared = shared_plates(draws, weights, functions)
    if len(shared) != 1:
        raise ValueError(
            f"data: `{weights}` has the dimensions {draws[weights].dims} and `{functions}` "
            f"{draws[functions].dims}, expected one plate in common, that of the functions; make "
            f"the data with dims={{{weights!r}: ['task', 'latent'], "
            f"{functions!r}: ['latent', 'point']}}."
        )
    return shared[0]


def shared_plates(draws: xr.Dataset, *names: str) -> list[str]:
    """Dimensions that all of the variables have, without those of the samples."""
    dims = set.intersection(*(set(draws[name].dims) for name in names))
    return sorted(map(str, dims - set(sample_dims(draws))))


def plates_besides(draws: xr.Dataset, name: str, plate: str) -> list[str]:
    """Plates of a variable except one, in its order."""
    return [str(dim) for dim in draws[name].dims if dim not in (*sample_dims(draws), plate)]


class Mixture(NamedTuple):
    """Weights and latent functions of S draws, in which every function has the length one.

    The data determine products of weights and functions, so the scale of both is in the weights.
    """

    W: Float[np.ndarray, "S M Q"]
    phi: Float[np.ndarray, "S M N"]

    @classmethod
    def of(cls, draws: xr.Dataset, weights: str, functions: str) -> "Mixture":
        """Gather all draws."""
        dims, plate = sample_dims(draws), function_plate(draws, weights, functions)

        def rows(name: str) -> np.ndarray:
            values = draws[name].transpose(*dims, plate, ...).values.astype(float)
            if not np.isfinite(values).all():
                raise ValueError(
                    f"data: `{name}` is not finite in some draws; leave these draws out, and look "
                    "for what went wrong in them."
                )
            shape = values.shape[: len(dims) + 1]
            return values.reshape(prod(shape[:-1]), shape[-1], -1)

        W, phi = rows(weights), rows(functions)
        length = np.linalg.norm(phi, axis=2, keepdims=True)
        return cls(W * length, phi / np.where(length > 0, length, 1))

    def mean(self) -> "Mixture":
        """One draw: the mean of weights and of functions."""
        return Mixture(*(x.mean(axis=0, keepdims=True) for x in self))

    def relabelled(self, labels: "Labels") -> "Mixture":
        """The same draws with their functions in other places."""
        order, sign = labels.order[..., None], labels.sign[..., None]
        return Mixture(*(sign * np.take_along_axis(x, order, axis=1) for x in self))


class Labels(NamedTuple):
    """New places of latent functions.

    - **order** - which function of a draw takes each place.
    - **sign** - by what it is multiplied.
    """

    order: Int[np.ndarray, "S M"]
    sign: Int[np.ndarray, "S M"]


def match(draws: Mixture, reference: Mixture) -> Labels:
    """Labels that bring the products of weights and functions nearest to those of a reference.

    The squared distance of two such products is that of the matrices ``w phi^T``, so scales and
    signs that weights and functions exchange do not matter.
    """
    W, phi = reference.W[0], reference.phi[0]
    products = (draws.W @ W.T) * (draws.phi @ phi.T)  # of function m with the place k, (S, M, K)
    order = np.stack([linear_sum_assignment(x.T, maximize=True)[1] for x in products])
    # Functions without weights fit everywhere equally well; in their old order nothing moves
    # without need.
    is_used = np.take_along_axis(draws.W.any(axis=2), order, axis=1)
    left = [np.sort(row[~used]) for row, used in zip(order, is_used, strict=True)]
    order[~is_used] = np.concatenate(left)
    placed = draws.relabelled(Labels(order, np.ones_like(order)))
    cosines = cosine(placed.W, W) + cosine(placed.phi, phi)
    # Signs of functions without weights are chance, and must not be made to agree.
    return Labels(order, np.where(is_used & (cosines < 0), -1, 1))


def cosine(x: Float[np.ndarray, "S M D"], y: Float[np.ndarray, "M D"]) -> Float[np.ndarray, "S M"]:
    """Cosines of the angles between rows, 0 where one is zero."""
    lengths = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
    return np.einsum("smd,md->sm", x, y) / np.where(lengths > 0, lengths, 1)


def centre(draws: Mixture) -> Mixture:
    """One draw to match all to: twice the mean of draws matched to the one before.

    The first is the draw whose fit, the sum of all products, is nearest to the mean of the fits.
    """
    mean = np.tensordot(draws.W, draws.phi, axes=([0, 1], [0, 1])) / len(draws.W)
    squares = np.sum((draws.W @ draws.W.mT) * (draws.phi @ draws.phi.mT), axis=(1, 2))
    products = np.sum((draws.W @ mean) * draws.phi, axis=(1, 2))
    first = np.argmin(squares - 2 * products)
    reference = Mixture(*(x[first][None] for x in draws))
    for _ in range(2):
        reference = draws.relabelled(match(draws, reference)).mean()
    return reference


def are_one_fit(draws: xr.Dataset) -> bool:
    """Whether all draws are of one variational fit, in which every function has its place."""
    return "chain" not in {*draws.dims, *draws.coords}


def strongest_first(reference: Mixture) -> Mixture:
    """The same functions in the order of what they explain, their largest weights positive."""
    order = np.argsort(-np.linalg.norm(reference.W, axis=2), axis=1, kind="stable")
    largest = np.argmax(np.abs(reference.W), axis=2, keepdims=True)
    negative = np.take_along_axis(reference.W, largest, axis=2)[..., 0] < 0
    sign = np.where(np.take_along_axis(negative, order, axis=1), -1, 1)
    return reference.relabelled(Labels(order, sign))


def as_one_draw(
    reference: xr.DataTree | Mapping[str, ArrayLike],
    draws: xr.Dataset,
    weights: str,
    functions: str,
) -> Mixture:
    """The reference of :func:`align`."""
    names = (weights, functions)
    like = first_draw(draws)
    if isinstance(reference, xr.DataTree):
        found = posterior(reference)
        check_reference_draw(first_draw(found), like, names)
        mixture = Mixture.of(found, weights, functions)
        return mixture.mean() if are_one_fit(found) else centre(mixture)
    check_reference_draw(reference, like, names)
    given = {name: like[name].copy(data=np.asarray(reference[name])) for name in names}
    return Mixture.of(xr.Dataset(given).expand_dims("sample"), weights, functions)


def first_draw(draws: xr.Dataset) -> xr.Dataset:
    """The first of the draws."""
    return draws.isel(dict.fromkeys(sample_dims(draws), 0))


def check_reference_draw(given: Mapping[Any, Any], like: xr.Dataset, names: Iterable[str]) -> None:
    """Raise unless a draw has variables of the same names and shapes as another."""
    for name in names:
        if name not in given:
            raise ValueError(
                f"reference: got values of {sorted(map(str, given))}, expected `{name}` among "
                "them; give weights and functions."
            )
        if np.shape(given[name]) != like[name].shape:
            raise ValueError(
                f"reference: `{name}` has the shape {np.shape(given[name])}, expected "
                f"{like[name].shape}, that of a draw of `data`; give one draw, or ArviZ data of "
                "the same model."
            )


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
    no alignment (:func:`invariants`) first. The functions must have alike priors, of mean zero.

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
    dims, plate = sample_dims(draws), function_plate(draws, weights, functions)
    found = Mixture.of(draws, weights, functions)
    to_place = found.mean() if are_one_fit(draws) else found
    if reference is None:
        target = strongest_first(centre(to_place))
    else:
        target = as_one_draw(reference, draws, weights, functions)
    labels = match(to_place, target)
    shape = (*(draws.sizes[dim] for dim in dims), draws.sizes[plate])
    order, sign = (np.broadcast_to(x, found.W.shape[:2]).reshape(shape) for x in labels)
    flipped = {weights, f"{weights}_slab", functions, f"{functions}_new"}

    def placed(values: xr.DataArray) -> xr.DataArray:
        moved = values.transpose(*dims, plate, ...)
        if moved.shape[: order.ndim] != order.shape:
            raise ValueError(
                f"data: `{values.name}` has the sizes {dict(values.sizes)}, expected those of the "
                f"posterior, {dict(draws.sizes)}, among them; thin all groups alike."
            )
        extra = tuple(range(order.ndim, moved.ndim))
        taken = np.take_along_axis(moved.values, np.expand_dims(order, extra), axis=len(dims))
        if values.name in flipped:
            taken = taken * np.expand_dims(sign, extra).astype(taken.dtype)
        return moved.copy(data=taken).transpose(*values.dims)

    groups = data.to_dict()
    for path in GROUPS_OF_POSTERIOR & set(groups):
        changed = {}
        for name, values in groups[path].data_vars.items():
            if are_inclusion_probabilities(name, weights):
                # their plates may have other names
                values = shaped_like(values, draws[weights], dims).rename(name)
            if plate in values.dims:
                changed[name] = placed(values)
        groups[path] = groups[path].assign(changed)
    groups["/posterior"].attrs["aligned"] = f"{weights}, {functions}"
    return xr.DataTree.from_dict(groups, name=data.name)


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
    dims, plate = sample_dims(draws), function_plate(draws, weights, functions)
    W = draws[weights]
    found = draws.drop_vars([name for name, x in draws.data_vars.items() if plate in x.dims])
    tasks = plates_besides(draws, weights, plate)
    found["num_active"] = (W != 0).any(tasks).sum(plate)
    columns = W.rename({dim: f"{dim}_column" for dim in tasks})
    found[f"{weights}{weights}T"] = xr.dot(W, columns, dim=plate)
    if "f" not in found:
        found["f"] = xr.dot(W, draws[functions], dim=plate).transpose(*dims, ..., *tasks)
    found = found.drop_dims(plate, errors="ignore")
    found.attrs.pop("aligned", None)
    return xr.DataTree.from_dict({"/posterior": found})


def to_frame(table: xr.Dataset) -> pd.DataFrame:
    """One row per element, labelled the way ArviZ does; one column per statistic."""
    # one by one: together, variables whose dimensions are in different orders get wrong labels
    frames = [
        arviz_base.dataset_to_dataframe(values.to_dataset(), sample_dims=["summary"])
        for values in table.data_vars.values()
    ]
    return pd.concat(frames, axis=1).T


def has_functions(draws: xr.Dataset) -> bool:
    """Whether there are weights and latent functions with their usual names."""
    names = {WEIGHTS, FUNCTIONS}
    return names <= set(draws.data_vars) and len(shared_plates(draws, *names)) == 1


def aligned_with_invariants(data: xr.DataTree) -> xr.DataTree:
    """The same data with :func:`invariants`, and chains aligned unless they are."""
    draws = posterior(data)
    if not are_one_fit(draws) and "aligned" not in draws.attrs:
        data = align(data)
    both = posterior(invariants(data))
    both = both.assign({k: x for k, x in posterior(data).data_vars.items() if k not in both})
    return xr.DataTree.from_dict({**data.to_dict(), "/posterior": both})


def chosen(draws: xr.Dataset, coords: Mapping[Hashable, Any]) -> xr.Dataset:
    """The elements with these labels."""
    labels = {dim: np.atleast_1d(labels) for dim, labels in coords.items() if dim in draws.dims}
    try:
        return draws.sel(labels)
    except KeyError as error:
        raise ValueError(
            f"coords: {error.args[0]}; give labels that the data have, of "
            f"{ {dim: draws[dim].values.tolist() for dim in labels}!s:.200}."
        ) from error


def summary(
    data: xr.DataTree,
    var_names: str | Iterable[str] | None = None,
    round_to: int | None = 3,
    coords: Mapping[Hashable, Any] | None = None,
) -> pd.DataFrame:
    """Summarise a posterior, with the inclusion probabilities of its spike-and-slab weights.

    Every row has the columns of :func:`arviz_stats.summary` (whose interval follows
    ``arviz_base.rcParams``). A pair takes one row per weight, in place of ``w``, ``w_spike`` and
    ``w_slab``, and fills these columns, which are NaN in the other rows:

    - ``inclusion``: posterior probability that the weight is not zero, the mean of the
      Rao-Blackwellised probabilities where ``sample_stats`` has them, else of the indicator;
    - ``mcse_inclusion``: its Monte Carlo standard error; NaN where all draws are 0, or all 1,
      for such draws do not tell how far from 0 or 1 the probability is;
    - ``flips``: how often the indicator changed, as a mean over chains;
    - ``between_chain_sd``: standard deviation over chains of the inclusion probability in each.
      Several times ``mcse_inclusion``, or near 0.5, it means that chains are stuck in different
      models; NaN for one chain.

    ``ess_bulk``, ``ess_tail``, ``r_hat``, ``mcse_mean`` and ``mcse_sd`` are NaN where no chain
    ever moves. Variational draws are independent: they have none of these five columns, no
    ``flips`` and no ``between_chain_sd``.

    With weights ``W`` and latent functions ``phi``, as in
    :func:`~numpyro_spikeslab.models.mtmkl`, the variables of :func:`invariants` come first. Chains
    are aligned as :func:`align` does by default, unless they are already; for variables of other
    names call both yourself. Choose points for ``f`` by ``coords``; it has a row for each
    otherwise, and ``phi`` has rows if it is named.

    :param data: ArviZ data with a ``posterior`` group: dimensions ``(chain, draw)``, or
        ``sample`` for variational draws, then the plates.
    :param var_names: variables to summarise. The default is all of them except latent functions,
        with the indicators and slabs of the pairs left to the rows of their weights.
    :param round_to: decimals, 3 by default so that the table can be read; effective sample sizes
        are rounded to whole draws. None keeps the raw numbers.
    :param coords: labels to keep by dimension, as in ArviZ: ``{"point": [0, 100]}``. The default
        is all.
    :returns: a DataFrame with one row per element, labelled by variable and coordinates.
    :raises ValueError: if ``data`` has no posterior, if ``var_names`` or ``coords`` are unknown,
        or if the inclusion probabilities do not have the shape of their weight.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab.diagnostics import summary
        >>> spike = np.tile([[0, 1, 1, 1]], (2, 25))[..., None]  # two chains, 100 draws, one weight
        >>> slab = np.random.default_rng(0).normal(size=spike.shape)
        >>> draws = {"w": spike * slab, "w_spike": spike, "w_slab": slab}
        >>> table = summary(arviz_base.from_dict({"posterior": draws}))
        >>> table.loc["w[0]", ["inclusion", "flips", "between_chain_sd"]].tolist()
        [0.75, 49.0, 0.0]
    """
    left_out = set()
    if has_functions(posterior(data)):
        data = aligned_with_invariants(data)
        left_out = {FUNCTIONS}
    draws = posterior(data)
    weights = pairs(draws)
    left_out |= {f"{name}_{part}" for name in weights for part in ("spike", "slab")}
    everything = [str(name) for name in draws.data_vars if name not in left_out]
    names = select(draws, var_names, default=everything)
    coords = coords or {}
    unknown = set(coords) - set(draws[names].dims)
    if unknown:
        raise ValueError(
            f"coords: got the dimensions {sorted(map(str, unknown))}, expected some of "
            f"{sorted(map(str, draws[names].dims))}; correct the spelling."
        )
    table = statistics(chosen(draws[names], coords))
    inclusion = {name: inclusion_statistics(data, name) for name in names if name in weights}
    if inclusion:
        table = xr.concat([table, chosen(xr.Dataset(inclusion), coords)], dim="summary")
    frame = to_frame(table)
    # A narrow terminal hides the columns in the middle, so these go to the two ends.
    lead = ["mean", "sd", "inclusion", "mcse_inclusion"]
    tail = ["flips", "between_chain_sd", "ess_bulk", "r_hat"]
    middle = [name for name in frame.columns if name not in lead + tail]
    frame = frame[[name for name in lead + middle + tail if name in frame.columns]]
    if round_to is None:
        return frame
    return frame.round(
        {name: 0 if name.startswith("ess") else round_to for name in frame.columns.map(str)}
    )


def check_methods(data: Mapping[str, xr.DataTree], names: Iterable[str], first: str) -> None:
    """Raise unless every method has the variables of ``first``, with its shapes and labels."""
    expected = posterior(data[first])
    for method, tree in data.items():
        draws = posterior(tree)
        for name in names:
            if name not in draws.data_vars:
                raise ValueError(
                    f"var_names: `{name}` is not in the posterior of {method!r}, which has "
                    f"{sorted(map(str, draws.data_vars))}; compare variables that all have."
                )
            for what, of in (("shape", shape), ("coordinates", labels)):
                got, wanted = (of(each[name], sample_dims(each)) for each in (draws, expected))
                if list(got.items()) != list(wanted.items()):
                    raise ValueError(
                        f"data: `{name}` of {method!r} has the {what} {got!s:.200}, expected "
                        f"{wanted!s:.200}, as in {first!r}; fit all methods to the same data and "
                        "give them the same `dims` and `coords`."
                    )


def shape(values: xr.DataArray, dims: Iterable[Hashable]) -> dict[str, int]:
    """Sizes of the plates of a variable."""
    return {str(dim): size for dim, size in values.sizes.items() if dim not in dims}


def labels(values: xr.DataArray, dims: Iterable[Hashable]) -> dict[str, list]:
    """Coordinates of the plates of a variable."""
    return {str(dim): values[dim].values.tolist() for dim in values.dims if dim not in dims}


def check_reference(reference: str, data: Mapping[str, xr.DataTree]) -> None:
    """Raise unless ``reference`` names one of the methods."""
    if reference not in data:
        raise ValueError(
            f"reference: got {reference!r}, expected one of the methods {list(data)}; correct the "
            "name, or add it to `data`."
        )


def bound(data: xr.DataTree) -> float:
    """The evidence lower bound stored with the draws, NaN where there is none."""
    stats = data.children.get("sample_stats", xr.DataTree())
    return float(stats.attrs.get("bound", np.nan))


def k_hat(data: xr.DataTree) -> float:
    """Pareto k-hat of the importance ratios p / q, NaN where there are none to fit."""
    if "sample_stats" not in data.children or "log_ratio" not in data["sample_stats"]:
        return np.nan
    ratios = data["sample_stats"]["log_ratio"].astype(float)
    try:
        # ArviZ takes log-likelihoods, whose negatives are the log-ratios of leave-one-out.
        _, shape_parameter = (-ratios).azstats.psislw(dim=list(ratios.dims))
    except ValueError:
        # Too few draws, or a tail of equal ratios (q is exact, or finitely many models).
        return np.nan
    return float(shape_parameter)


def add_variational_stats(
    data: xr.DataTree,
    svi: SVI,
    svi_result: Any,
    model_args: tuple = (),
    model_kwargs: dict[str, Any] | None = None,
) -> xr.DataTree:
    """Add to variational draws what :func:`compare` needs to judge the approximation by.

    The ``sample_stats`` group of the result has

    - ``log_ratio``: ``log p(y, z) - log q(z)`` of every draw ``z``;
    - ``inclusion_probabilities.w``: for the guides of this package, the exact inclusion
      probabilities of each set of weights, the same for all draws;
    - the attribute ``bound``: the evidence lower bound, exact for
      :class:`~numpyro_spikeslab.CAVI`, else the mean of ``log_ratio``.

    :param data: what ``arviz_base.from_numpyro_svi`` returns for the same fit.
    :param svi: the :class:`~numpyro.infer.SVI` or :class:`~numpyro_spikeslab.CAVI` of the fit.
    :param svi_result: what its ``run`` returned.
    :param model_args: arguments of the model, as for the fit.
    :param model_kwargs: keyword arguments of the model.
    :returns: ArviZ data with the same posterior.
    :raises ValueError: if ``data`` are not variational draws of all latent sites of the guide.
    """
    draws = posterior(data)
    if sample_dims(draws) != ["sample"]:
        raise ValueError(
            "data: got Markov chains, expected variational draws; make them with "
            "arviz_base.from_numpyro_svi."
        )
    kwargs = dict(model_kwargs or {})
    latents = _latent_draws(draws, svi, svi_result.params, model_args, kwargs)

    def log_ratio(latents):
        values = {**svi_result.params, **latents}
        log_p = log_density(svi.model, model_args, kwargs, values)[0]
        return log_p - log_density(svi.guide, model_args, kwargs, values)[0]

    # the batch bounds the memory, which one map over all draws would multiply by their number
    ratios = np.asarray(jax.jit(lambda x: jax.lax.map(log_ratio, x, batch_size=100))(latents))
    stats = xr.Dataset({"log_ratio": ("sample", ratios)}, {"sample": draws["sample"]})
    if hasattr(svi.guide, "inclusion_probabilities"):
        for name, probs in svi.guide.inclusion_probabilities(svi_result.params).items():
            stats[f"inclusion_probabilities.{name}"] = xr.zeros_like(draws[name]) + np.asarray(
                probs
            )
    exact = isinstance(svi, CAVI)
    bound = -svi.evaluate(svi_result.state, *model_args, **kwargs) if exact else ratios.mean()
    stats.attrs["bound"] = float(bound)
    return xr.DataTree.from_dict({**data.to_dict(), "/sample_stats": stats})


def _latent_draws(
    draws: xr.Dataset, svi: SVI, params: dict[str, Any], args: tuple, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Draws of the guide's latent sites, with those of its auxiliary sites."""
    guide = handlers.substitute(handlers.seed(svi.guide, 0), data=params)
    trace = handlers.trace(guide).get_trace(*args, **kwargs)
    sites = {name: site for name, site in trace.items() if site["type"] == "sample"}
    auxiliary = [name for name, site in sites.items() if site["infer"].get("is_auxiliary")]
    missing = [name for name in sites if name not in draws and name not in auxiliary]
    if missing or (auxiliary and not hasattr(svi.guide, "auxiliary_values")):
        raise ValueError(
            f"data: its posterior lacks {missing or auxiliary}, which the guide samples; collect "
            "all latent sites, and use a guide without auxiliary ones."
        )
    values = {name: draws[name].transpose("sample", ...).values for name in sites if name in draws}
    values = {name: jnp.asarray(x, sites[name]["value"].dtype) for name, x in values.items()}
    return values | (svi.guide.auxiliary_values(values) if auxiliary else {})


def errors(
    values: Mapping[str, xr.DataArray], truth: Mapping[str, xr.DataArray]
) -> tuple[float, float]:
    """Sum and maximum of the absolute differences, NaN where there is nothing to compare."""
    if not truth or not truth.keys() <= values.keys():
        return np.nan, np.nan
    gaps = np.concatenate([abs(values[name] - truth[name]).values.ravel() for name in truth])
    return float(gaps.sum()), float(gaps.max())


def compare(
    data: Mapping[str, xr.DataTree], var_names: str | Iterable[str], reference: str
) -> pd.DataFrame:
    """Compare several posteriors of one model with a reference among them.

    - ``sum_abs_error_mean``, ``max_abs_error_mean``: absolute differences of the posterior means
      from those of the reference, over all elements of ``var_names``;
    - ``sum_abs_error_inclusion``, ``max_abs_error_inclusion``: the same for the inclusion
      probabilities of the pairs among ``var_names``, Rao-Blackwellised where they are stored;
      NaN for a method without indicators;
    - ``bound``: the evidence lower bound in ``sample_stats.attrs["bound"]``;
    - ``min_ess``, ``max_r_hat``: the worst bulk effective sample size and R-hat of ``var_names``,
      without the elements that no chain moves (see :func:`summary`); Markov chains only;
    - ``k_hat``: Pareto k-hat of the log importance ratios ``sample_stats["log_ratio"]``. Above
      0.7 the approximation is too far from the posterior for its draws to be reweighted.

    What a method does not have is NaN.

    :param data: ArviZ data by the name of the method, two or more.
    :param var_names: variables to compare; every method has them, with equal shapes and
        coordinates.
    :param reference: the method in ``data`` against which all are measured.
    :returns: a DataFrame with one row per method, the reference first.
    :raises ValueError: if there are fewer than two methods, if ``reference`` or ``var_names`` is
        unknown, or if shapes or coordinates differ.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab.diagnostics import compare
        >>> def draws(mean):
        ...     w = mean + np.random.default_rng(0).normal(size=(4, 100, 3))
        ...     return arviz_base.from_dict({"posterior": {"w": w}})
        >>> table = compare({"long": draws(0.0), "short": draws(0.5)}, "w", reference="long")
        >>> table["sum_abs_error_mean"].round(6).to_dict()
        {'long': 0.0, 'short': 1.5}
    """
    if not isinstance(data, Mapping) or isinstance(data, xr.DataTree) or len(data) < 2:
        got = list(data) if isinstance(data, dict) else type(data).__name__
        raise ValueError(
            f"data: got {got}, expected a mapping from two or more names to ArviZ data; name each "
            "posterior, for example {'Gibbs': a, 'PMF': b}."
        )
    check_reference(reference, data)
    names = select(posterior(data[reference]), var_names)
    check_methods(data, names, reference)
    means: dict[str, dict[str, xr.DataArray]] = {}
    inclusions: dict[str, dict[str, xr.DataArray]] = {}
    rows: dict[str, dict[str, float]] = {}
    for method in [reference, *(other for other in data if other != reference)]:
        draws = posterior(data[method])
        table = statistics(draws[names])
        means[method] = {name: table[name].sel(summary="mean", drop=True) for name in names}
        inclusions[method] = {
            name: inclusion_draws(data[method], name).mean(sample_dims(draws))
            for name in names
            if name in pairs(draws)
        }
        sum_mean, max_mean = errors(means[method], means[reference])
        sum_inclusion, max_inclusion = errors(inclusions[method], inclusions[reference])
        elements = to_frame(table)
        worst = elements.get(["ess_bulk", "r_hat"])
        rows[method] = {
            "sum_abs_error_mean": sum_mean,
            "max_abs_error_mean": max_mean,
            "sum_abs_error_inclusion": sum_inclusion,
            "max_abs_error_inclusion": max_inclusion,
            "bound": bound(data[method]),
            "min_ess": np.nan if worst is None else worst["ess_bulk"].min(),
            "max_r_hat": np.nan if worst is None else worst["r_hat"].max(),
            "k_hat": k_hat(data[method]),
        }
    return pd.DataFrame.from_dict(rows, orient="index")
