# SPDX-License-Identifier: Apache-2.0
"""Tables: a summary of one posterior, and a comparison of several."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import arviz_stats  # noqa: F401, registers the accessor `azstats`
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data, weights
from numpyro_spikeslab.reporting.arviz_data import inclusion, mean, pairs, plates, posterior
from numpyro_spikeslab.reporting.credible_sets import alternatives
from numpyro_spikeslab.support.messages import bad

FIRST = ["mean", "sd", "inclusion", "mcse_inclusion", "bayes_factor"]
LAST = ["alternatives", "flips", "between_chain_sd", "between_tables", "ess_bulk", "r_hat"]
"""Columns at the two ends of a summary; a narrow terminal hides those in the middle."""


def summary(
    data: xr.DataTree,
    var_names: str | Iterable[str] | None = None,
    round_to: int | None = 3,
    coords: Mapping[Hashable, Any] | None = None,
    *,
    top: int | None = None,
    prior_inclusion: Any = None,
    ratios: bool = False,
) -> pd.DataFrame:
    """Summarise a posterior, with the inclusion probabilities of its spike-and-slab weights.

    Every row has the columns of :func:`arviz_stats.summary`, whose interval follows
    ``arviz_base.rcParams``. A pair takes one row per weight, in place of ``w``, ``w_spike`` and
    ``w_slab``, and fills these columns, which are NaN in the other rows:

    - ``inclusion``: posterior probability that the weight is not zero, the mean of the
      Rao-Blackwellised probabilities if ``sample_stats`` has them, else of the indicator;
    - ``mcse_inclusion``: its Monte Carlo standard error; NaN if all draws are 0 or all are 1;
    - ``prior_inclusion``, if it is known: prior probability, 1 for a weight that is always in;
    - ``bayes_factor``, likewise: posterior odds of inclusion divided by prior odds; infinite if
      ``inclusion`` is 1, NaN if the prior is 0 or 1. Factors above 20 are strong evidence, below
      1 / 20 against;
    - ``effect``, ``effect_sd`` and the ends of its interval, ``effect_eti89_lb`` and
      ``effect_eti89_ub``: the weight given inclusion, that is among the draws that include it; NaN
      if none does. ``mean`` and ``sd`` are those of all draws, zeros included;
    - ``flips``: how often the indicator changed, averaged over chains;
    - ``between_chain_sd``: standard deviation over chains of the inclusion probability in each.
      More than 0.2 means that chains are stuck in different models, or too short;
    - ``alternatives``, for draws with the statistics of :func:`add_variational_stats`: labels of
      the weights that could carry the effect instead, the most probable first. CAVI picks one of
      several correlated columns; chains visit all, see :func:`credible_sets`;
    - ``between_tables``, for chains of several completed tables: the share of the variance that is
      due to gaps, by Rubin's rule, ``(1 + 1 / m) B / T`` for m tables. Diagnostics are then within
      tables: the largest ``r_hat``, the sum of effective draws;
    - those of :func:`sparse_regression`: ``credible_set``, the number of the weight's 95% credible
      set, and ``cavi``, the inclusion probability of the fit.

    Weights that share a label in ``data["constant_data"]["group.w"]``, such as the columns of a
    term of a formula, are a group: one row has its inclusion, and the rows of its weights, which
    follow, have their means and effects.

    Diagnostics of chains are NaN if no chain moves, and left out for variational draws, which are
    independent. Call :func:`align` before summarising latent functions or their weights, whose
    order and signs are arbitrary, and :func:`invariants` to judge convergence.

    :param data: ArviZ data of Markov chains or variational draws.
    :param var_names: variables to summarise; by default all except indicators and slabs of pairs.
    :param round_to: decimals, but none for effective sample sizes. None keeps all digits.
    :param coords: labels to keep by dimension, ``{"point": [0, 100]}``; all by default.
    :param top: number of weights of each pair to keep, a group counted once, by decreasing
        inclusion probability; all in their own order by default.
    :param prior_inclusion: prior probability that a weight is not zero, in (0, 1), for Bayes
        factors: a number, or an array in the shape of the pair in ``var_names``; 1 / (1 + b) if the
        probability is a site with the prior Beta(1, b). The default is
        ``data["constant_data"]["prior_inclusion.w"]`` for the pair ``w``, which
        :func:`sparse_regression` stores.
    :param ratios: for :func:`sparse_regression`, whether to exponentiate effects and their
        intervals: columns ``odds_ratio``, ``odds_ratio_eti89_lb`` and so on of logit and Binomial
        likelihoods, ``rate_ratio`` of counts, ``time_ratio`` of times and ``hazard_ratio`` of their
        hazards, in place of ``effect``. The ratio of the mean effect is the geometric mean of the
        ratios.
    :returns: a DataFrame with one row per element, labelled by variable and coordinates.
    :raises ValueError: if ``data`` has no posterior, if names, ``coords`` or ``top`` do not exist
        in it, if its likelihood has no ratios, or if inclusion probabilities, those of the prior
        too, have another shape or other labels than their weight.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import summary
    >>> spike = np.tile([[0, 1, 1, 1]], (2, 25))[..., None]  # two chains, 100 draws, one weight
    >>> slab = np.random.default_rng(0).normal(size=spike.shape)
    >>> draws = {"w": spike * slab, "w_spike": spike, "w_slab": slab}
    >>> table = summary(arviz_base.from_dict({"posterior": draws}))
    >>> table.loc["w[0]", ["inclusion", "flips", "between_chain_sd"]].tolist()
    [0.75, 49.0, 0.0]
    """
    arviz_data.check_top(top)
    draws = posterior(data)
    paired = pairs(draws)
    others = {f"{name}_{part}" for name in paired for part in ("spike", "slab")}
    names = arviz_data.select(draws, var_names, [str(name) for name in draws if name not in others])
    coords = coords or {}
    check_coords(coords, draws[names])
    table = arviz_data.statistics(selected(draws[names], coords))
    ratio = weights.ratio_name(data) if ratios else None
    frames = []
    for name in names:  # one by one: labels are wrong if dimensions are in different orders
        if name not in paired:
            frames.append(arviz_data.to_frame(table[name]).T)
            continue
        effects = weights.effect_statistics(data, name, ratio)
        of_groups = weights.group_statistics(data, name, prior_inclusion)
        parts = [selected(effects, coords), table[name], selected(of_groups, coords)]
        rows = arviz_data.to_frame(xr.concat(parts, "summary").rename(name)).T
        labels = weights.group_labels(data, draws[name])
        labels = None if labels is None else selected(labels, coords).values
        columns = of_groups["summary"].values.tolist()
        frames.append(weights.by_group(rows, name, labels, columns, top))
    frame = pd.concat(frames)
    instead = alternatives(data) if set(names) & set(paired) else None
    if instead is not None:
        frame["alternatives"] = [instead.get(label, "") for label in frame.index]
    middle = [column for column in frame.columns if column not in FIRST + LAST]
    middle.sort(key=lambda column: not column.startswith(ratio or "effect"))
    frame = frame[[column for column in FIRST + middle + LAST if column in frame.columns]]
    if round_to is None:
        return frame
    decimals = {name: 0 if name.startswith("ess") else round_to for name in map(str, frame)}
    return frame.round(decimals)


def check_coords(coords: Mapping[Hashable, Any], draws: xr.Dataset) -> None:
    """Refuse dimensions that the draws do not have."""
    names = {plate for values in draws.values() for plate in plates(values)}
    unknown = sorted(map(str, set(coords) - names))
    if unknown:
        remedy = "Choose chains and draws of the data themselves, with data.sel."
        raise bad("coords", f"the dimensions {unknown}", f"some of {sorted(names)}", remedy)


def selected(draws: Any, coords: Mapping[Hashable, Any]) -> Any:
    """Keep the labels in ``coords``, or refuse those that do not exist."""
    labels = {
        dim: labels if isinstance(labels, slice) else np.atleast_1d(labels)
        for dim, labels in coords.items()
        if dim in draws.dims
    }
    try:
        return draws.sel(labels)
    except (KeyError, pd.errors.InvalidIndexError) as error:
        available = {dim: draws[dim].values.tolist() for dim in labels}
        expected = f"labels of the data, each once, of {available!s:.200}"
        raise bad("coords", error.args[0], expected) from error


def compare(
    data: Mapping[str, xr.DataTree], var_names: str | Iterable[str], reference: str
) -> pd.DataFrame:
    """Compare several posteriors of one model with a reference among them.

    A column is NaN for a method without the data for it:

    - ``sum_abs_error_mean``, ``max_abs_error_mean``: absolute differences between posterior means
      and the reference, over all elements of ``var_names``;
    - ``sum_abs_error_inclusion``, ``max_abs_error_inclusion``: the same for the inclusion
      probabilities of the pairs among ``var_names``, Rao-Blackwellised if they are stored;
    - ``bound``: the evidence lower bound in ``sample_stats.attrs["bound"]``, of the density at the
      values of sites that the fit has at a point;
    - ``min_ess``, ``max_r_hat``: the worst bulk effective sample size and R-hat of ``var_names``,
      without elements that no chain moves; Markov chains with finite draws only;
    - ``k_hat``: Pareto k-hat of the log importance ratios ``sample_stats["log_ratio"]``. Above
      0.7 the approximation is too far from the posterior for its draws to be reweighted. The
      estimate cannot see regions that no draw visits; take 10,000 draws, not ArviZ's thousand.

    :param data: ArviZ data by the name of the method, two or more.
    :param var_names: variables to compare; every method has them, with equal coordinates.
    :param reference: the method in ``data`` against which all are measured.
    :returns: a DataFrame with one row per method, the reference first.
    :raises ValueError: if a method or a variable is missing, or if coordinates differ.

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
        remedy = "Name each posterior, for example {'Gibbs': a, 'PMF': b}."
        raise bad("data", got, "a mapping from two or more names to ArviZ data", remedy)
    arviz_data.check_reference(reference, data)
    methods = {reference: data[reference], **data}
    names = arviz_data.comparable(methods, var_names)
    means, inclusions = {}, {}
    for method, tree in methods.items():
        draws = posterior(tree)
        means[method] = {name: mean(draws[name]) for name in names}
        weights = [name for name in names if name in pairs(draws)]
        inclusions[method] = {name: inclusion(tree, name) for name in weights}
    rows = {
        method: {
            **errors("mean", means[method], means[reference]),
            **errors("inclusion", inclusions[method], inclusions[reference]),
            "bound": float(arviz_data.sample_stats(tree).attrs.get("bound", np.nan)),
            **worst(posterior(tree)[names]),
            "k_hat": k_hat(tree),
        }
        for method, tree in methods.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def worst(draws: xr.Dataset) -> dict[str, float]:
    """Compute the smallest effective sample size and the largest R-hat, or NaN."""
    if "chain" not in draws.dims or any(values.isnull().any() for values in draws.values()):
        return {"min_ess": np.nan, "max_r_hat": np.nan}
    frames = [arviz_data.to_frame(values) for values in arviz_data.statistics(draws).values()]
    frame = pd.concat(frames, axis=1).T
    return {"min_ess": frame["ess_bulk"].min(), "max_r_hat": frame["r_hat"].max()}


def errors(
    of: str, values: Mapping[str, xr.DataArray], truth: Mapping[str, xr.DataArray]
) -> dict[str, float]:
    """Compute sum and maximum of the absolute differences; NaN if a variable is missing."""
    gaps = np.array([np.nan])
    if truth and truth.keys() <= values.keys():
        gaps = np.concatenate([abs(values[name] - truth[name]).values.ravel() for name in truth])
    return {f"sum_abs_error_{of}": float(gaps.sum()), f"max_abs_error_{of}": float(gaps.max())}


def k_hat(data: xr.DataTree) -> float:
    """Compute Pareto k-hat of the importance ratios p / q; NaN if they have no tail to fit."""
    ratios = arviz_data.sample_stats(data).get("log_ratio")
    if ratios is None:
        return np.nan
    try:
        # ArviZ takes log-likelihoods, whose negatives are the log-ratios of leave-one-out;
        # older versions divide by zero if many ratios tie
        with np.errstate(divide="ignore", invalid="ignore"):
            _, tail = (-ratios.astype(float)).azstats.psislw(dim=list(ratios.dims))
    except (ValueError, IndexError):
        # too few draws, or a tail of equal ratios, as of an exact fit
        return np.nan
    return float(tail)
