# SPDX-License-Identifier: Apache-2.0
"""Tables of one posterior, and of several against one of them."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting.align import align, invariants
from numpyro_spikeslab.reporting.credible_sets import alternatives
from numpyro_spikeslab.reporting.data import (
    FUNCTIONS,
    are_one_fit,
    has_functions,
    inclusion,
    pairs,
    posterior,
    posterior_mean,
    sample_dims,
    select,
)
from numpyro_spikeslab.reporting.methods import check_reference, comparable
from numpyro_spikeslab.reporting.stats import check_top, inclusion_statistics, statistics, to_frame
from numpyro_spikeslab.reporting.variational import bound, k_hat

# A narrow terminal hides the columns in the middle, so these go to the two ends.
LEFT = ["mean", "sd", "inclusion", "mcse_inclusion"]
RIGHT = ["alternatives", "flips", "between_chain_sd", "ess_bulk", "r_hat"]


def summary(
    data: xr.DataTree,
    var_names: str | Iterable[str] | None = None,
    round_to: int | None = 3,
    coords: Mapping[Hashable, Any] | None = None,
    *,
    top: int | None = None,
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

    Of columns that are alike a fit settles on one and excludes the others, however little the data
    tell them apart. Draws with the statistics of :func:`add_variational_stats` have one column for
    that, ``alternatives``: the labels of the weights that could have the effect instead, the most
    probable first. It is filled for the weight on which the fit has settled and for those that it
    has excluded, and empty elsewhere. Chains visit all of them, so their ``inclusion`` is divided
    among them; :func:`credible_sets` has the sets of their draws.

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
    :param top: how many weights of each pair to keep, those of the highest inclusion probability,
        in decreasing order. None, the default, keeps all in their own order.
    :returns: a DataFrame with one row per element, labelled by variable and coordinates.
    :raises ValueError: if ``data`` has no posterior, if ``var_names`` or ``coords`` are unknown or
        ``coords`` are of chains or draws, which ``data.sel`` chooses, if
        ``top`` is less than 1, or if the inclusion probabilities do not have the shape of their
        weight.

    .. doctest::

        >>> import arviz_base, numpy as np
        >>> from numpyro_spikeslab import summary
        >>> spike = np.tile([[0, 1, 1, 1]], (2, 25))[..., None]  # two chains, 100 draws, one weight
        >>> slab = np.random.default_rng(0).normal(size=spike.shape)
        >>> draws = {"w": spike * slab, "w_spike": spike, "w_slab": slab}
        >>> table = summary(arviz_base.from_dict({"posterior": draws}))
        >>> table.loc["w[0]", ["inclusion", "flips", "between_chain_sd"]].tolist()
        [0.75, 49.0, 0.0]
    """
    check_top(top)
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
    check_coords(coords, draws[names])
    table = statistics(chosen(draws[names], coords))
    inclusions = {name: inclusion_statistics(data, name) for name in names if name in weights}
    if inclusions:
        table = xr.concat([table, chosen(xr.Dataset(inclusions), coords)], dim="summary")
    frame = to_frame(table)
    others = alternatives(data)
    if others is not None and inclusions:
        frame["alternatives"] = [others.get(label, "") for label in frame.index]
    if top is not None and inclusions:
        frame = most_included(frame, top)
    middle = [name for name in frame.columns if name not in LEFT + RIGHT]
    frame = frame[[name for name in LEFT + middle + RIGHT if name in frame.columns]]
    if round_to is None:
        return frame
    decimals = {name: 0 if name.startswith("ess") else round_to for name in map(str, frame)}
    return frame.round(decimals)


def most_included(frame: pd.DataFrame, top: int) -> pd.DataFrame:
    """The rows of the highest inclusion probabilities of each pair, and those of all else."""
    variables = frame.index.str.split("[").str[0]
    parts = []
    for _, rows in frame.groupby(variables, sort=False):
        pair = rows["inclusion"].notna().any()
        ranked = rows.sort_values("inclusion", ascending=False, kind="stable")
        parts.append(ranked.head(top) if pair else rows)
    return pd.concat(parts)


def aligned_with_invariants(data: xr.DataTree) -> xr.DataTree:
    """The same data with :func:`invariants`, and chains aligned unless they are."""
    draws = posterior(data)
    if not are_one_fit(draws) and "aligned" not in draws.attrs:
        data = align(data)
    both = posterior(invariants(data))
    both = both.assign({k: x for k, x in posterior(data).data_vars.items() if k not in both})
    return xr.DataTree.from_dict({**data.to_dict(), "/posterior": both})


def check_coords(coords: Mapping[Hashable, Any], draws: xr.Dataset) -> None:
    """Raise unless the draws have plates of these names."""
    plates = set(draws.dims) - set(sample_dims(draws))
    unknown = set(coords) - plates
    if unknown:
        raise ValueError(
            f"coords: got the dimensions {sorted(map(str, unknown))}, expected some of "
            f"{sorted(map(str, plates))}; correct the spelling, and choose chains and draws of the "
            "data themselves, with data.sel."
        )


def chosen(draws: xr.Dataset, coords: Mapping[Hashable, Any]) -> xr.Dataset:
    """The elements with these labels."""
    labels = {
        dim: labels if isinstance(labels, slice) else np.atleast_1d(labels)
        for dim, labels in coords.items()
        if dim in draws.dims
    }
    try:
        return draws.sel(labels)
    except (KeyError, pd.errors.InvalidIndexError) as error:
        raise ValueError(
            f"coords: {error.args[0]}; give labels that the data have, each once, of "
            f"{ {dim: draws[dim].values.tolist() for dim in labels}!s:.200}."
        ) from error


def compare(
    data: Mapping[str, xr.DataTree], var_names: str | Iterable[str], reference: str
) -> pd.DataFrame:
    """Compare several posteriors of one model with a reference among them.

    - ``sum_abs_error_mean``, ``max_abs_error_mean``: absolute differences of the posterior means
      from those of the reference, over all elements of ``var_names``;
    - ``sum_abs_error_inclusion``, ``max_abs_error_inclusion``: the same for the inclusion
      probabilities of the pairs among ``var_names``, Rao-Blackwellised where they are stored;
      NaN for a method without indicators;
    - ``bound``: the evidence lower bound in ``sample_stats.attrs["bound"]``; of a fit with sites at
      a point, such as an intercept, it bounds the density there, not the evidence;
    - ``min_ess``, ``max_r_hat``: the worst bulk effective sample size and R-hat of ``var_names``,
      without the elements that no chain moves (see :func:`summary`); Markov chains only, and only
      if all their draws are numbers;
    - ``k_hat``: Pareto k-hat of the log importance ratios ``sample_stats["log_ratio"]``. Above
      0.7 the approximation is too far from the posterior for its draws to be reweighted. It is an
      estimate from the draws, of which 10,000 are better than ArviZ's thousand, and cannot see
      what they never visit: of regressions on correlated columns that had an inclusion
      probability wrong by more than 0.2, it stayed below for 1 in 30 sets of a thousand draws, and
      for 1 in 150 of ten thousand.

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
        >>> from numpyro_spikeslab import compare
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
    ordered = {reference: data[reference], **data}
    names = comparable(ordered, var_names)
    estimates = {method: means_and_inclusions(tree, names) for method, tree in ordered.items()}
    rows = {
        method: {
            **errors("mean", estimates[method][0], estimates[reference][0]),
            **errors("inclusion", estimates[method][1], estimates[reference][1]),
            "bound": bound(tree),
            **worst(posterior(tree)[names]),
            "k_hat": k_hat(tree),
        }
        for method, tree in ordered.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


Values = Mapping[str, xr.DataArray]


def means_and_inclusions(data: xr.DataTree, names: Iterable[str]) -> tuple[Values, Values]:
    """Posterior means, and inclusion probabilities of the pairs, by the name of the variable."""
    weights = pairs(posterior(data))
    means = {name: posterior_mean(data, name) for name in names}
    return means, {name: inclusion(data, name) for name in names if name in weights}


def worst(draws: xr.Dataset) -> dict[str, float]:
    """The smallest effective sample size and the largest R-hat, NaN without chains and with draws
    that are not numbers."""
    elements = to_frame(statistics(draws))
    if "r_hat" not in elements or any(x.isnull().any() for x in draws.values()):
        return {"min_ess": np.nan, "max_r_hat": np.nan}
    return {"min_ess": elements["ess_bulk"].min(), "max_r_hat": elements["r_hat"].max()}


def errors(of: str, values: Values, truth: Values) -> dict[str, float]:
    """Sum and maximum of the absolute differences, NaN where there is nothing to compare."""
    gaps = np.array([np.nan])
    if truth and truth.keys() <= values.keys():
        gaps = np.concatenate([abs(values[name] - truth[name]).values.ravel() for name in truth])
    return {f"sum_abs_error_{of}": float(gaps.sum()), f"max_abs_error_{of}": float(gaps.max())}
