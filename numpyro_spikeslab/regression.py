# SPDX-License-Identifier: Apache-2.0
"""Sparse regression for people who have a table and a response, and no model."""

from functools import partial
from numbers import Real
from typing import Any, NamedTuple
import warnings

import arviz_base
from jaxtyping import Array, Float
import numpy as np
import pandas as pd
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro.infer import MCMC
from numpyro.util import is_prng_key

from numpyro_spikeslab import models
from numpyro_spikeslab.algebra.active_set import MAX_ROUNDING
from numpyro_spikeslab.fitting.cavi import CAVI
from numpyro_spikeslab.fitting.paired_guide import PairedGuide
from numpyro_spikeslab.reporting.arviz_data import SETS, inclusion, posterior
from numpyro_spikeslab.reporting.credible_sets import credible_sets
from numpyro_spikeslab.reporting.stats import inclusion_statistics, statistics
from numpyro_spikeslab.reporting.variational import add_variational_stats, k_hat
from numpyro_spikeslab.sampling.paired_gibbs import PairedGibbs
from numpyro_spikeslab.table_checks import (
    ROUNDING,
    checked_count,
    checked_new,
    checked_response,
    checked_table,
)

NUM_STEPS, TOLERANCE = 1000, 1e-3
"""Of the fit, which is annealed for a hundred steps and soon at its end then."""

OFF = 0.2
"""Inclusion probabilities of the fit that differ by more from those of the chains are flagged."""

PROBABILITIES, SHARES = "inclusion_probabilities.w", f"{SETS}.w"


class Scales(NamedTuple):
    """What takes a table and a response to the units of the model and back.

    - **used** - which columns are not constant.
    - **x_mean**, **x_sd** - of the columns used.
    - **y_mean**, **y_sd** - of the response.
    """

    used: np.ndarray
    x_mean: np.ndarray
    x_sd: np.ndarray
    y_mean: float
    y_sd: float


def sparse_regression(
    key: Array,
    X: Any,
    y: Any,
    *,
    X_new: Any = None,
    expected_size: float | None = None,
    num_warmup: int = 300,
    num_samples: int = 1000,
    num_chains: int = 4,
) -> xr.DataTree:
    """Regress a response on the columns of a table, of which few matter.

    For people who have a table and do not want to write a model. Columns and response are
    standardised; the noise, the inclusion probability and the scale of the slab are learned
    (:func:`numpyro_spikeslab.models.sparse_regression`). Annealed :class:`~numpyro_spikeslab.CAVI`
    gives a first answer, from which chains of :class:`~numpyro_spikeslab.PairedGibbs` start; report
    theirs. Where they agree with each other (``r_hat``) and the fit does not agree with them
    (``cavi_is_off``), it has settled on one of several columns that are alike: look at the credible
    sets.

    The result is ArviZ data, which :func:`~numpyro_spikeslab.summary`,
    :func:`~numpyro_spikeslab.plot_inclusion` and ArviZ's own functions take. Weights, intercept and
    noise are in the units of the table and the response, ``slab_scale`` in standardised ones. Its
    groups are

    - ``posterior``: draws of ``w`` with ``w_spike`` and ``w_slab``, dimension ``feature``, and of
      ``intercept``, ``sigma``, ``slab_scale`` and ``inclusion``;
    - ``sample_stats``: the Rao-Blackwellised inclusion probabilities of all draws;
    - ``summary``: a row for each column, ``dt["summary"].to_dataset().to_dataframe()``, with what
      :func:`~numpyro_spikeslab.summary` says of its weight: posterior ``mean`` and ``sd``, zeros
      included, ``inclusion`` probability, ``ess_bulk``, ``r_hat`` and others; ``cavi``, the
      inclusion probability of the fit, and ``cavi_is_off``, whether it differs by more than 0.2;
      ``credible_set``, the number of its 95% credible set, -1 for none (see
      :func:`~numpyro_spikeslab.credible_sets`). The attribute ``k_hat`` of the group is that of the
      fit, above 0.7 where its draws are far from the posterior given its values of noise, slab
      scale and inclusion probability;
    - ``cavi``: ArviZ data of the fit, with a posterior and sample statistics of its own:
      ``nss.compare({"chains": dt, "CAVI": dt["cavi"]}, "w", "chains")``; the column
      ``alternatives`` of ``nss.summary(dt["cavi"])`` names what could stand in for the columns on
      which it has settled;
    - ``observed_data`` and ``constant_data``: ``y`` and ``X``;
    - ``predictions``: with ``X_new``, draws of new responses ``y``, along ``new_row``.

    A constant column has the weight 0. There may be more columns than rows.

    :param key: random key, ``jax.random.key(0)`` for example.
    :param X: the table, shape (N, P), real numbers: numpy array, or DataFrame, whose column names
        become the labels of ``feature``.
    :param y: the response, shape (N,).
    :param X_new: rows to predict, shape (S, P), with the columns of ``X``.
    :param expected_size: number of columns that are expected to matter: the prior of the inclusion
        probability is Beta(1, P / expected_size - 1), where P counts columns that are not constant.
        The default is Beta(1, 9), a tenth of them.
    :param num_warmup: steps of each chain before its draws. They only have to leave the fit.
    :param num_samples: draws of each chain.
    :param num_chains: number of chains, which run one after the other.
    :returns: an xarray DataTree with these groups.
    :raises ValueError: if ``X`` or ``y`` has another shape, fewer than three rows, or values that
        are missing, masked, strings, categories, not finite or of extreme size, if a Series ``y``
        has another index than the DataFrame ``X``, if all columns or the response are constant, if
        ``X_new`` has other columns, if ``expected_size`` is not between 0 and P, if ``key``
        is no random key, or if a number of draws or chains is none.
        It warns where columns explain the response so well that rounding decides about the others.

    **Example**

    .. doctest::

        >>> import jax
        >>> import numpyro_spikeslab as nss
        >>> from sklearn.datasets import load_diabetes  # doctest: +SKIP
        >>> X, y = load_diabetes(return_X_y=True, as_frame=True)  # doctest: +SKIP
        >>> dt = nss.sparse_regression(jax.random.key(0), X, y)  # doctest: +SKIP
        >>> dt["summary"].to_dataset().to_dataframe()  # doctest: +SKIP
        >>> nss.credible_sets(dt, "w", X)  # doctest: +SKIP
        >>> nss.plot_inclusion({"chains": dt, "CAVI": dt["cavi"]})  # doctest: +SKIP
    """
    if not is_prng_key(key):
        raise ValueError(f"key: got {key!r}, expected a random key; jax.random.key(0) makes one.")
    num_warmup = checked_count("num_warmup", num_warmup, 0)
    num_samples = checked_count("num_samples", num_samples, 1)
    num_chains = checked_count("num_chains", num_chains, 1)
    table, names = checked_table(X)
    response = checked_response(y, X)
    new = None if X_new is None else checked_new(X_new, X, names)
    scales = scales_of(table, response)
    columns, standard = (contrasts(x) for x in standardised(table, response, scales))
    data = jnp.asarray(columns, float), jnp.asarray(standard, float)
    prior = inclusion_prior(expected_size, int(scales.used.sum()))
    key_fit, key_chains, key_rest = random.split(key, 3)
    rng = np.random.default_rng(np.asarray(random.bits(key_rest, (2,))))
    fitted = fit(key_fit, data, prior, num_chains)
    starts = {name: x.values[:num_chains] for name, x in posterior(fitted).items() if name != "w"}
    keys = random.split(key_chains, num_chains)
    draws, probabilities = chains(keys, starts, data, prior, num_warmup, num_samples)
    warn_of_rounding(draws, len(table))
    tree = labelled(in_units(draws, scales, len(table), rng), probabilities, names, scales)
    cavi = fit_in_units(fitted, names, scales, len(table), rng)
    tree["cavi"] = cavi
    # labels of several levels have no place in a file
    is_flat = isinstance(X, pd.DataFrame) and X.index.nlevels == 1
    # xarray takes a name of the index for another dimension
    rows = {"row": X.index.rename(None)} if is_flat else {}
    tree["constant_data"] = xr.Dataset(
        {"X": (("row", "feature"), table)}, {"feature": names, **rows}
    )
    tree["observed_data"] = xr.Dataset({"y": ("row", response)}, rows)
    tree["summary"] = summarised(tree, cavi, table)
    if new is not None:
        tree["predictions"] = predicted(posterior(tree), new, rng)
    return tree


def inclusion_prior(expected_size: float | None, size: int) -> tuple[float, float]:
    """Concentrations of the Beta prior of the inclusion probability."""
    if expected_size is None:
        return 1.0, 9.0
    is_number = isinstance(expected_size, Real | np.ndarray | jax.Array) and (
        np.ndim(expected_size) == 0 and not isinstance(expected_size, bool | np.bool_)
    )
    if not is_number or not 0 < expected_size < size:
        raise ValueError(
            f"expected_size: got {expected_size!r}, expected a number between 0 and {size}, that "
            "of the columns that are not constant; leave it out for a tenth of them."
        )
    return 1.0, size / expected_size - 1.0


# Units


def scales_of(table: np.ndarray, response: np.ndarray) -> Scales:
    """Means and standard deviations, after a check that some column is not constant."""
    mean, sd = table.mean(axis=0), table.std(axis=0)
    used = sd > ROUNDING * abs(table).max(axis=0)
    if not used.any():
        raise ValueError(
            f"X: got {table.shape[1]} constant columns, expected one or more whose values differ; "
            "check what the table was made of."
        )
    return Scales(used, mean[used], sd[used], float(response.mean()), float(response.std()))


def standardised(
    table: np.ndarray, response: np.ndarray, scales: Scales
) -> tuple[np.ndarray, np.ndarray]:
    """Columns and response of mean 0 and variance 1."""
    columns = (table[:, scales.used] - scales.x_mean) / scales.x_sd
    return columns, (response - scales.y_mean) / scales.y_sd


def contrasts(values: Float[np.ndarray, "N *P"]) -> Float[np.ndarray, "N-1 *P"]:
    """Each row but the first less the mean of those above it, scaled to keep lengths (Helmert).

    What data say with an intercept of flat prior integrated out; N centred rows would count once
    too often, and let the noise vanish where as many columns are included.
    """
    count = np.arange(1.0, len(values)).reshape(-1, *[1] * (values.ndim - 1))
    above = np.cumsum(values, axis=0)[:-1] / count
    return (values[1:] - above) * np.sqrt(count / (count + 1))


def in_units(
    draws: dict[str, Any], scales: Scales, num_rows: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Draws in the units of the table and the response, with an intercept."""
    found = {name: np.asarray(x, float) for name, x in draws.items()}
    for name in ("w", "w_slab"):
        found[name] = found[name] * (scales.y_sd / scales.x_sd)
    found["sigma"] = found["sigma"] * scales.y_sd
    # the mean of the response is independent of the contrasts, which the model is of
    centre = scales.y_mean + found["sigma"] / num_rows**0.5 * rng.normal(size=found["sigma"].shape)
    found["intercept"] = centre - found["w"] @ scales.x_mean
    for name in ("w", "w_slab", "w_spike"):
        found[name] = with_constant(found[name], scales)
    found["w_spike"] = found["w_spike"].astype(int)
    return found


def with_constant(values: np.ndarray, scales: Scales) -> np.ndarray:
    """The same with zeros for constant columns, along the last axis."""
    every = np.zeros((*values.shape[:-1], len(scales.used)))
    every[..., scales.used] = values
    return every


# The two answers


def fit(
    key: Array, data: tuple[Array, Array], prior: tuple[float, float], num_chains: int
) -> xr.DataTree:
    """Draws of a fit by CAVI, a thousand or as many as there are chains to start."""
    model = models.sparse_regression(inclusion=prior)
    svi = CAVI(model, PairedGuide(model))
    with warnings.catch_warnings():
        # that a response has no noise is told from the chains
        warnings.filterwarnings("ignore", "CAVI.run: noise of")
        result = svi.run(key, NUM_STEPS, *data, tol=TOLERANCE, progress_bar=False)
    draws = arviz_base.from_numpyro_svi(
        svi, svi_result=result, model_args=data, num_samples=max(1000, num_chains)
    )
    return add_variational_stats(draws, svi, result, data)


@partial(jax.jit, static_argnums=(4, 5))
def chains(
    keys: Array,
    starts: dict[str, Any],
    data: tuple[Array, Array],
    prior: tuple[ArrayLike, ArrayLike],
    num_warmup: int,
    num_samples: int,
) -> tuple[dict[str, Any], Any]:
    """Draws of each chain, and their inclusion probabilities.

    In one compiled function: chain by chain, MCMC would compile its parts one by one, which takes
    longer than all draws.
    """
    model = models.sparse_regression(inclusion=prior)

    def chain(inputs):
        key, start = inputs
        kernel = PairedGibbs(model)
        mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
        mcmc.run(key, *data, init_params=start, extra_fields=(PROBABILITIES,))
        return mcmc.get_samples(), mcmc.get_extra_fields()[PROBABILITIES]

    return jax.lax.map(chain, (keys, starts))


def warn_of_rounding(draws: dict[str, Any], num_rows: int) -> None:
    """Where there is so little noise that rounding would decide which columns explain the rest."""
    noise = float(np.median(draws["sigma"]))
    ratio = num_rows * np.median(draws["slab_scale"]) ** 2 / noise**2
    if ratio * np.finfo(draws["sigma"].dtype).eps > MAX_ROUNDING:
        warnings.warn(
            f"sparse_regression: the columns explain all but {noise**2:.0e} of the variance of y, "
            f"more than {draws['sigma'].dtype} can tell; inclusion probabilities of others mean "
            "nothing. Call numpyro.enable_x64() first, or leave out what determines y.",
            stacklevel=3,
        )


# ArviZ data


def labelled(
    draws: dict[str, Any], probabilities: Any, names: list, scales: Scales, **stats: Any
) -> xr.DataTree:
    """ArviZ data whose weights have the names of the columns."""
    stats = stats | {PROBABILITIES: with_constant(np.asarray(probabilities, float), scales)}
    one_per_column = ("w", "w_spike", "w_slab", PROBABILITIES)
    return arviz_base.from_dict(
        {"posterior": draws, "sample_stats": stats},
        dims={name: ["feature"] for name in one_per_column},
        coords={"feature": names},
        sample_dims=["chain", "draw"] if draws["sigma"].ndim == 2 else ["sample"],
    )


def fit_in_units(
    fitted: xr.DataTree,
    names: list,
    scales: Scales,
    num_rows: int,
    rng: np.random.Generator,
) -> xr.DataTree:
    """The same of a fit, with what it says of itself."""
    draws = {str(name): x.values for name, x in posterior(fitted).items()}
    sample_stats = fitted["sample_stats"].to_dataset()
    stats = {str(name): x.values for name, x in sample_stats.items()}
    probabilities, shares = stats.pop(PROBABILITIES), stats.pop(SHARES)
    tree = labelled(in_units(draws, scales, num_rows, rng), probabilities, names, scales, **stats)
    every = np.full((len(shares), len(names)), np.nan)
    every[:, scales.used] = shares
    tree["sample_stats"][SHARES] = xr.DataArray(every, dims=["set", "feature"])
    tree["sample_stats"].attrs.update(sample_stats.attrs)
    return tree


def summarised(tree: xr.DataTree, cavi: xr.DataTree, table: np.ndarray) -> xr.Dataset:
    """A row for each column: its weight, its inclusion by chains and fit, its credible set."""
    parts = [statistics(posterior(tree)[["w"]])["w"], inclusion_statistics(tree, "w")]
    found = xr.concat(parts, dim="summary").to_dataset("summary")
    found["cavi"] = inclusion(cavi, "w")
    found["cavi_is_off"] = abs(found["cavi"] - found["inclusion"]) > OFF
    found["credible_set"] = xr.full_like(found["inclusion"], -1, dtype=int)
    for number, members in credible_sets(tree, "w", table)["members"].items():
        found["credible_set"].loc[{"feature": list(members)}] = number
    return found.assign_attrs(k_hat=k_hat(cavi))


def predicted(draws: xr.Dataset, table: np.ndarray, rng: np.random.Generator) -> xr.Dataset:
    """Draws of responses at new rows."""
    rows = xr.DataArray(table, dims=["new_row", "feature"], coords={"feature": draws["feature"]})
    mean = draws["intercept"] + xr.dot(draws["w"], rows, dim="feature")
    noise = draws["sigma"] * mean.copy(data=rng.normal(size=mean.shape))
    return (mean + noise).to_dataset(name="y")
