# SPDX-License-Identifier: Apache-2.0
"""Tables over ArviZ data of spike-and-slab posteriors.

A *pair* is a weight ``w`` of the ``posterior`` group beside which its indicator ``w_spike``
lies. Markov chains have the dimensions ``(chain, draw)``, variational draws (from
``arviz_base.from_numpyro_svi``) the one dimension ``sample``.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

import jax
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import SVI
from numpyro.infer.util import log_density

from numpyro_spikeslab.cavi import CAVI

__all__ = ["add_variational_stats", "compare", "summary"]

CHAIN_DIAGNOSTICS = ("ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd")


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
    suffix = f"inclusion_probabilities.{name}"
    stats = data["sample_stats"].data_vars if "sample_stats" in data.children else {}
    for key, values in stats.items():
        if f".{key}".endswith(f".{suffix}"):
            return shaped_like(values, draws[name], sample_dims(draws))
    return spike_draws(data, name)


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


def to_frame(table: xr.Dataset) -> pd.DataFrame:
    """One row per element, labelled the way ArviZ does; one column per statistic."""
    return arviz_base.dataset_to_dataframe(table, sample_dims=["summary"]).T


def summary(
    data: xr.DataTree,
    var_names: str | Iterable[str] | None = None,
    round_to: int | None = 3,
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

    :param data: ArviZ data with a ``posterior`` group: dimensions ``(chain, draw)``, or
        ``sample`` for variational draws, then the plates.
    :param var_names: variables to summarise. The default is all of them, with the indicators and
        slabs of the pairs left to the rows of their weights.
    :param round_to: decimals, 3 by default so that the table can be read; effective sample sizes
        are rounded to whole draws. None keeps the raw numbers.
    :returns: a DataFrame with one row per element, labelled by variable and coordinates.
    :raises ValueError: if ``data`` has no posterior, if ``var_names`` is unknown, or if the
        inclusion probabilities do not have the shape of their weight.

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
    draws = posterior(data)
    weights = pairs(draws)
    parts = {f"{name}_{part}" for name in weights for part in ("spike", "slab")}
    everything = [str(name) for name in draws.data_vars if name not in parts]
    names = select(draws, var_names, default=everything)
    table = statistics(draws[names])
    inclusion = {name: inclusion_statistics(data, name) for name in names if name in weights}
    if inclusion:
        table = xr.concat([table, xr.Dataset(inclusion)], dim="summary")
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
