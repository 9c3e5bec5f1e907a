# SPDX-License-Identifier: Apache-2.0
"""Predictions of rows and log likelihoods, from the result of a regression."""

from functools import partial
from typing import Any

from jaxtyping import Array
import numpy as np
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.models.responses import RESPONSES, ResponseKind
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.support.files import read_columns
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.support.tabular import as_numbers, in_pandas, row_labels
from numpyro_spikeslab.tables.chains import padded
from numpyro_spikeslab.tables.checks import check_key, check_totals, row_coord
from numpyro_spikeslab.tables.effects import effects_of_rows, known_effects, with_effects
from numpyro_spikeslab.tables.formula import new_columns

MAX_NUMBERS = 10**7
"""Log likelihoods that are kept in a result."""

BATCH = 2**20
"""Numbers that are computed at once, which bounds the memory."""

MAX_COUNT = 1e18
"""Mean above which no counts are drawn, since they could overflow."""


@in_double_precision
def predict(
    dt: xr.DataTree,
    X_new: Any = None,
    *,
    offset: Any = None,
    totals: Any = None,
    kind: str = "response",
    key: Array | None = None,
) -> xr.DataArray:
    """Predict rows by all draws of a result of :func:`sparse_regression`.

    :param dt: the result, which may have been saved and read again.
    :param X_new: new rows, shape (S, P), with the columns of ``X``, or those of ``data`` that a
        formula reads, whose levels, knots and means stay as they were. By default the
        rows of the regression, each once, with their offsets, totals and precisions.
    :param offset: a number for each new row, shape (S,), or one, such as the logarithm of exposure;
        0 by default if the regression has none.
    :param totals: numbers of trials likewise, for the Binomial likelihood.
    :param kind: ``"response"`` for new responses, of weight 1; ``"mean"`` for their mean given the
        draw, such as a probability (of a Student-t response the location); ``"predictor"`` for the
        predictor, such as log odds.
    :param key: random key of the responses, by default one that is stored in the result.
    :return: ``y`` along ``chain``, ``draw`` and ``row``, with the labels of the rows.
    :raises ValueError: if the result has no rows, as of statistics, if new rows lack columns or
        have other levels, if offsets or totals are missing, or if means of counts are too large.

    .. code-block:: python

        nss.predict(dt, X_new).mean(["chain", "draw"]).to_series()
        dt["posterior_predictive"] = nss.predict(dt).to_dataset()
        arviz_plots.plot_ppc_dist(dt)
    """
    if kind not in ("response", "mean", "predictor"):
        raise bad("kind", repr(kind), "one of 'response', 'mean', 'predictor'")
    of_rows = {"offset": offset, "totals": totals}
    rows = stored_rows(dt) if X_new is None else new_rows(dt, X_new, of_rows)
    given = [name for name, x in of_rows.items() if x is not None]
    if X_new is None and given:
        raise bad(given[0], "numbers", "None without X_new", "Rows of the regression have theirs.")
    if key is None:
        key = random.key(int(rows.attrs["seed"]))
    check_key(key)
    return of_draws(kind, dt, rows, key)


@in_double_precision
def log_likelihood(dt: xr.DataTree) -> xr.DataArray:
    """Compute the log likelihood of each row of :func:`sparse_regression` given each draw.

    It is in the units of ``y``, so ``arviz_stats.compare`` compares likelihoods of one response.
    A row of weight k that counts k times has k times the log likelihood: ``arviz_stats.loo`` leaves
    out all of it. Rows of weight 0 or without trials have none.

    :param dt: the result, which may have been saved and read again.
    :return: ``y`` along ``chain``, ``draw`` and ``row``, with the labels of the rows.
    :raises ValueError: if the result has no rows, as of statistics.

    .. code-block:: python

        dt["log_likelihood"] = nss.log_likelihood(dt).to_dataset()
        arviz_stats.loo(dt)
    """
    rows = stored_rows(dt).assign(y=("row", dt["observed_data"]["y"].values))
    # ArviZ refuses those that are always 0
    seen = np.flatnonzero((rows["weights"] > 0) & (rows["totals"] > 0))
    return of_draws("log likelihood", dt, rows.isel(row=seen), random.key(0))


def stored_rows(dt: xr.DataTree) -> xr.Dataset:
    """Return the rows of a regression with weights, offsets and totals."""
    groups = dt.children if isinstance(dt, xr.DataTree) else {}
    if "X" not in groups.get("constant_data", {}):
        got = f"a {type(dt).__name__} without `X` in `constant_data`"
        raise bad("dt", got, "a result of sparse_regression for a table")
    rows = completed(dt["constant_data"].to_dataset())
    if not known_effects(rows.attrs.get("formula")):
        return rows
    return with_effects("dt", rows, posterior(dt), read_columns(dt["data"].to_dataset()))


def kind_of(rows: xr.Dataset) -> ResponseKind:
    """Return the kind of their responses."""
    kind = RESPONSES[rows.attrs["likelihood"]]
    return kind._replace(has_precisions=rows.attrs["weights"] == "precisions")


def completed(rows: xr.Dataset) -> xr.Dataset:
    """Add weights, offsets and totals where there are none."""
    others = {"weights": 1.0, "offset": 0.0, "totals": 1.0}
    full = {name: ("row", np.full(rows.sizes["row"], x)) for name, x in others.items()}
    return rows.assign({name: x for name, x in full.items() if name not in rows})


def new_rows(dt: xr.DataTree, X_new: Any, of_rows: dict[str, Any]) -> xr.Dataset:
    """Return new rows of a regression, after checks, with weights, offsets and totals."""
    labels, rows = row_labels(X_new), stored_rows(dt)
    feature = rows["feature"].to_index()
    given = frame = in_pandas("X_new", X_new)
    if "formula" in rows.attrs:
        variables = read_columns(dt["data"].to_dataset())
        frame = new_columns(rows.attrs["formula"], variables, X_new)[[*feature]]
    X, columns = as_numbers("X_new", frame), Axis("column of X", len(feature), feature)
    order = columns.order("X_new", getattr(frame, "columns", None))
    if X.ndim != 2 or X.shape[1] != len(feature) or not len(X):
        raise bad("X_new", f"the shape {X.shape}", f"(S, {len(feature)}), the columns of X")
    kind, axis = kind_of(rows), Axis("row of X_new", len(X), labels)
    check_totals(kind, of_rows["totals"])
    if of_rows["offset"] is None and rows["offset"].any():
        raise bad("offset", "None", "numbers, as in the regression", "0 is an exposure of 1.")
    numbers = {name: axis.aligned(name, x) for name, x in of_rows.items() if x is not None}
    of_new: Any = {name: ("row", x) for name, x in numbers.items()}
    of_new["X"] = ["row", "feature"], X[:, order]
    new = completed(xr.Dataset(of_new, row_coord("row", labels), rows.attrs))
    kind.check(np.zeros(len(X)), new["totals"].values)
    return with_effects("X_new", new, posterior(dt), given)


def of_draws(what: str, dt: xr.DataTree, rows: xr.Dataset, key: Array) -> xr.DataArray:
    """Compute numbers of rows given each draw."""
    like = posterior(dt)["intercept"]
    coords = {**like.coords, **rows["X"].isel(feature=0, drop=True).coords}
    numbers = in_batches(what, dt, rows, key).reshape(*like.shape, rows.sizes["row"])
    return xr.DataArray(numbers, coords, ["chain", "draw", "row"], "y")


def in_batches(what: str, dt: xr.DataTree, rows: xr.Dataset, key: Array) -> np.ndarray:
    """Compute numbers of rows, shape (K, S), for all K draws or over them, in batches of rows."""
    kind, draws, count = kind_of(rows), posterior(dt), rows.sizes["row"]
    names, total = ("intercept", *kind.sites(1.0)), draws["intercept"].size
    sites: dict[str, Any] = {name: draws[name].values.reshape(total, -1) for name in names}
    intercept = sites.pop("intercept")
    of_rows = {
        name: x.values for name, x in rows.items() if "row" in x.dims and "." not in str(name)
    }
    effects = effects_of_rows(random.fold_in(key, count), rows, draws)
    # tables of like sizes share a program
    size, out = min(padded(count), max(1, BATCH // total)), np.empty(0)
    for start in range(0, count, size):
        places = np.arange(start, start + size) % count
        at = {name: x[places] for name, x in of_rows.items()}
        columns = at.pop("X").T
        # chain by chain, which bounds the copy in double precision
        f = np.concatenate([w @ columns for w in draws["w"].values]) + intercept + at["offset"]
        for levels, factors, of_levels in effects:
            f += of_levels[:, levels[places]] * factors[places]
        values, largest = _of_batch(what, kind, f, sites, at, random.fold_in(key, start))
        if not start:
            out = np.empty((len(values), count), values.dtype)
        if not largest < (MAX_COUNT if out.dtype.kind == "i" else np.inf):
            row = rows["row"].values[(start + f.max(0).argmax()) % count]
            remedy = "Give rows with means like those of the regression."
            raise bad("X_new, offset", f"a mean of {largest:.3g} in row {row}", "less", remedy)
        out[:, start : start + size] = np.asarray(values)[:, : count - start]
    return out


@partial(jax.jit, static_argnums=(0, 1))
def _of_batch(what: str, kind: ResponseKind, f: Any, sites: Any, at: Any, key: Array) -> Any:
    distribution = kind.of_rows(f, sites, at["totals"], at["weights"])
    mean = kind.mean(distribution)

    def moments() -> Any:
        # a Student-t without a mean has no variance, too, which is NaN in NumPyro
        variance = jnp.nan_to_num(distribution.variance, nan=jnp.inf, posinf=jnp.inf)
        return jnp.stack([mean.mean(0), mean.var(0) + variance.mean(0)])

    compute: dict[str, Any] = {
        "response": lambda: distribution.sample(key),
        "mean": lambda: mean,
        "predictor": lambda: f,
        "moments": moments,
        "log likelihood": lambda: kind.log_likelihood(distribution, at["y"], at["weights"]),
    }
    return compute[what](), abs(mean).max()
