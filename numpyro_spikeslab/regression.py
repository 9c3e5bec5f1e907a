# SPDX-License-Identifier: Apache-2.0
"""Sparse regression of a response on a table, without a model written by the user."""

from typing import Any

import arviz_base
from jaxtyping import Array
import numpy as np
import pandas as pd
import xarray as xr

import jax
from jax import random

from numpyro.util import is_prng_key

from numpyro_spikeslab import table_checks
from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.precision import in_double_precision
from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import inclusion, posterior
from numpyro_spikeslab.reporting.credible_sets import credible_sets
from numpyro_spikeslab.reporting.variational import k_hat
from numpyro_spikeslab.table_chains import PROBABILITIES, chains, fit
from numpyro_spikeslab.table_checks import checked_count, checked_size
from numpyro_spikeslab.table_units import in_units, standardised

OFF = 0.2
"""Difference of inclusion probabilities of fit and chains above which the fit is flagged."""


@in_double_precision
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
    """Regress a response on the columns of a table, if few of the columns matter.

    Columns and response are standardised; the noise, the inclusion probability and the scale of the
    slab are learned (:func:`numpyro_spikeslab.models.sparse_regression`). Chains of
    :class:`~numpyro_spikeslab.PairedGibbs` start from a fit by annealed
    :class:`~numpyro_spikeslab.CAVI`. Report the chains. If they agree with each other (``r_hat``)
    but not with the fit (``cavi_is_off``), CAVI has picked one of several correlated columns: look
    at the credible sets. The result is ArviZ data:

    - ``posterior``: draws of ``w`` with ``w_spike`` and ``w_slab``, dimension ``feature``, and of
      ``intercept``, ``sigma``, ``slab_scale`` and ``inclusion``; all but ``slab_scale`` are in the
      units of the table and the response;
    - ``sample_stats``: the Rao-Blackwellised inclusion probabilities of all draws;
    - ``summary``: for ``dt["summary"].to_dataset().to_dataframe()``, which has a row for each
      column and the columns of :func:`~numpyro_spikeslab.summary`, zeros included; ``cavi``, the
      inclusion probability of the fit, and ``cavi_is_off``, whether it differs by more than 0.2;
      ``credible_set``, the number of its 95% credible set, -1 for none (see
      :func:`~numpyro_spikeslab.credible_sets`). The attribute ``k_hat`` is above 0.7 if the draws
      of the fit are far from the posterior given its noise, slab scale and inclusion probability.
      The attribute ``expected_size`` is the number of columns that were expected to matter;
    - ``cavi``: ArviZ data of the fit, for
      ``nss.compare({"chains": dt, "CAVI": dt["cavi"]}, "w", "chains")``, or for ``nss.summary``,
      whose column ``alternatives`` names columns that could replace those that CAVI has picked;
    - ``observed_data`` and ``constant_data``: ``y`` and ``X``, and the prior inclusion
      probabilities for the Bayes factors of the summary;
    - ``predictions``: with ``X_new``, draws of new responses ``y``, along ``new_row``.

    A constant column has the weight 0. There may be more columns than rows. The computation is in
    double precision, also where that of JAX is not enabled, and the result has arrays of numpy.

    :param key: random key, ``jax.random.key(0)`` for example.
    :param X: the table, shape (N, P), real numbers: numpy array, or DataFrame, whose column names
        become the labels of ``feature``.
    :param y: the response, shape (N,).
    :param X_new: rows to predict, shape (S, P), with the columns of ``X``.
    :param expected_size: number of columns that are expected to matter: the prior of the inclusion
        probability is Beta(1, P / expected_size - 1), where P counts columns that vary. The
        default is a tenth of the columns, or of the rows if they are fewer: N rows cannot tell
        which of many more columns matter, if many may.
    :param num_warmup: steps of each chain before its draws, few since it starts at the fit.
    :param num_samples: draws of each chain.
    :param num_chains: number of chains, which run one after the other.
    :raises ValueError: if ``X``, ``y`` or ``X_new`` have other shapes or labels, values that are
        not finite numbers, too few rows or no variation, or if a number is out of its range.

    .. code-block:: python

        X, y = sklearn.datasets.load_diabetes(return_X_y=True, as_frame=True)
        dt = nss.sparse_regression(jax.random.key(0), X, y)
        dt["summary"].to_dataset().to_dataframe()
        nss.credible_sets(dt, "w", X)
        nss.plot_inclusion({"chains": dt, "CAVI": dt["cavi"]})
    """
    if not is_prng_key(key):
        raise bad("key", repr(key), "a random key", "jax.random.key(0) makes one.")
    num_warmup = checked_count("num_warmup", num_warmup, 0)
    num_samples = checked_count("num_samples", num_samples, 1)
    num_chains = checked_count("num_chains", num_chains, 1)
    table = table_checks.checked_table(X)
    response = table_checks.checked_response(y, X)
    new = None if X_new is None else table_checks.checked_new(X_new, X, table)
    scales, data = standardised(table, response)
    size = int(scales.used.sum())
    expected = checked_size(expected_size, size, len(table))
    prior = 1.0, size / expected - 1.0
    key_fit, key_chains, key_rest = random.split(key, 3)
    rng = np.random.default_rng(np.asarray(random.bits(key_rest, (2,))))
    fitted = fit(key_fit, data, prior, num_chains)
    starts = {name: x.values[:num_chains] for name, x in posterior(fitted).items() if name != "w"}
    keys = random.split(key_chains, num_chains)
    draws = jax.device_get(chains(keys, starts, data, prior, num_warmup, num_samples))
    sampled = arviz_base.from_dict(
        dict(zip(("posterior", "sample_stats"), draws, strict=True)),
        dims={name: ["feature"] for name in ("w", "w_spike", "w_slab", PROBABILITIES)},
    )
    tree = in_units(sampled, scales, len(table), rng)
    tree["cavi"] = cavi = in_units(fitted, scales, len(table), rng)
    # labels of several levels cannot be saved, and xarray takes an index name for a dimension
    is_flat = isinstance(X, pd.DataFrame) and X.index.nlevels == 1
    rows = {"row": X.index.rename(None)} if is_flat else {}
    constants = {"X": table, f"{arviz_data.PRIOR}.w": scales.used / sum(prior)}
    tree["constant_data"] = xr.Dataset(constants, rows)
    tree["observed_data"] = xr.Dataset({"y": ("row", response)}, rows)
    summary = summarised(tree, cavi, table.values)
    tree["summary"] = summary.assign_attrs(expected_size=expected)
    if new is not None:
        tree["predictions"] = predicted(posterior(tree), new, rng)
    return tree


def summarised(tree: xr.DataTree, cavi: xr.DataTree, table: np.ndarray) -> xr.Dataset:
    """Make a row for each column: its weight, its inclusion by chains and fit, its credible set."""
    parts = [
        arviz_data.statistics(posterior(tree)[["w"]])["w"],
        arviz_data.inclusion_statistics(tree, "w"),
    ]
    rows = xr.concat(parts, dim="summary").to_dataset("summary")
    rows["cavi"] = inclusion(cavi, "w")
    rows["cavi_is_off"] = abs(rows["cavi"] - rows["inclusion"]) > OFF
    rows["credible_set"] = xr.full_like(rows["inclusion"], -1, dtype=int)
    for number, members in credible_sets(tree, "w", table)["members"].items():
        rows["credible_set"].loc[{"feature": list(members)}] = number
    return rows.assign_attrs(k_hat=k_hat(cavi))


def predicted(draws: xr.Dataset, rows: xr.DataArray, rng: np.random.Generator) -> xr.Dataset:
    mean = draws["intercept"] + xr.dot(draws["w"], rows, dim="feature")
    noise = draws["sigma"] * mean.copy(data=rng.normal(size=mean.shape))
    return (mean + noise).to_dataset(name="y")
