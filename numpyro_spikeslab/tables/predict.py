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
from numpyro_spikeslab.reporting.by_table import TABLE
from numpyro_spikeslab.support.files import read_columns
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.support.tabular import as_numbers, in_pandas, row_labels
from numpyro_spikeslab.tables.background import COVARIANCE, RowsGivenDraws
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
    times: Any = None,
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
    :param times: for a likelihood of times, those for which to compute the probability that no
        event comes before, shape (T,): survival curves, instead of responses.
    :param kind: ``"response"`` for new responses, of weight 1; ``"mean"`` for their mean given the
        draw, such as a probability (of a Student-t response the location, of a time the median, of
        classes in order the probabilities of all levels, along ``level``); ``"predictor"`` for the
        predictor, such as log odds.
    :param key: random key of the responses, by default one that is stored in the result.
    :return: ``y`` along ``chain``, ``draw`` and ``row``, with the labels of the rows; with
        ``times`` it is ``survival``, also along ``time``.
    :raises ValueError: if the result has no rows, as of statistics, if new rows lack columns or
        have other levels, if offsets or totals are missing, or if means of counts are too large; if
        times are negative, or the response is no time.

    .. code-block:: python

        nss.predict(dt, X_new).mean(["chain", "draw"]).to_series()
        nss.predict(dt, X_new, times=[1.0, 2.0]).quantile([0.05, 0.95], ["chain", "draw"])
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
    return of_draws(kind, dt, rows, key) if times is None else survival(dt, rows, times)


def survival(dt: xr.DataTree, rows: xr.Dataset, times: Any) -> xr.DataArray:
    """Compute the probabilities that events of rows come after some times."""
    times = np.atleast_1d(as_numbers("times", times))
    if not kind_of(rows).has_limits:
        got = f"numbers beside likelihood={kind_of(rows).name!r}"
        raise bad("times", got, "None, unless responses are times")
    if (times < 0).any() or times.ndim > 1:
        raise bad("times", f"{times.ravel()[times.argmin()]:g}", "times, 0 or more, shape (T,)")
    # events that are not seen by then
    later = rows.assign(beside=("row", np.full(rows.sizes["row"], np.inf)))
    later["weights"] = xr.ones_like(rows["beside"])
    at = [later.assign(y=xr.full_like(later["beside"], time)) for time in times]
    logs = [of_draws("log likelihood", dt, each, random.key(0)) for each in at]
    dim = xr.DataArray(times, dims="time", name="time")
    joined = xr.concat(logs, dim).rename("survival").transpose("chain", "draw", "row", "time")
    return joined.copy(data=np.exp(joined.values))


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
    seen = np.flatnonzero((rows["weights"] > 0) & (rows["beside"] > 0))
    return of_draws("log likelihood", dt, rows.isel(row=seen), random.key(0))


def stored_rows(dt: xr.DataTree) -> xr.Dataset:
    """Return the rows of a regression with weights, offsets and what is beside responses."""
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
    has_precisions = rows.attrs["weights"] == "precisions"
    return kind._replace(has_precisions=has_precisions, size=rows.sizes.get(kind.along, 0))


def completed(rows: xr.Dataset) -> xr.Dataset:
    """Add weights, offsets and what is beside responses where there are none."""
    rows = rows.rename({x: "beside" for x in [kind_of(rows).beside] if x in rows})
    others = {"weights": 1.0, "offset": 0.0, "beside": 1.0}
    full = {name: ("row", np.full(rows.sizes["row"], x)) for name, x in others.items()}
    return rows.assign({name: x for name, x in full.items() if name not in rows})


def new_rows(dt: xr.DataTree, X_new: Any, of_rows: dict[str, Any]) -> xr.Dataset:
    """Return new rows of a regression, after checks, with all that belongs to each."""
    labels, rows = row_labels(X_new), stored_rows(dt)
    if COVARIANCE in rows:
        got = "new rows, whose covariance with the others is not known"
        raise bad("X_new", got, "None, of a result with a background of a given covariance")
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
    coords: Any = row_coord("row", labels)
    coords |= {name: x for name, x in rows.coords.items() if name == kind.along}
    new = completed(xr.Dataset(of_new, coords, rows.attrs))
    kind.check(np.zeros(len(X)), new["beside"].values)
    return with_effects("X_new", new, posterior(dt), given)


def of_draws(what: str, dt: xr.DataTree, rows: xr.Dataset, key: Array) -> xr.DataArray:
    """Compute numbers of rows given each draw."""
    like, numbers = posterior(dt)["w"].isel(feature=0, drop=True), in_batches(what, dt, rows, key)
    dims = ["chain", "draw", "row", "level"][: 1 + numbers.ndim]
    coords: dict[Any, Any] = {**like.coords, **rows["row"].coords}
    coords |= {name: x for name, x in rows.coords.items() if name in dims}
    return xr.DataArray(numbers.reshape(*like.shape, *numbers.shape[1:]), coords, dims, "y")


def in_batches(what: str, dt: xr.DataTree, rows: xr.Dataset, key: Array) -> np.ndarray:
    """Compute numbers of rows, shape (K, S), for all K draws or over them, in batches of rows; or
    of all levels, shape (K, S, L)."""
    kind, draws, count = kind_of(rows), posterior(dt), rows.sizes["row"]
    total = draws.sizes["chain"] * draws.sizes["draw"]
    given = RowsGivenDraws.of(dt, stored_rows(dt), kind) if "background_scale" in draws else None
    if given is not None and what == "log likelihood":
        return given.log_likelihood()
    # of each chain; new rows are one table for all
    tables = draws.coords.get(TABLE, xr.zeros_like(draws["chain"])) * (TABLE in rows.dims)
    each = {name: draws[name].values for name in draws if name in ("intercept", *kind.own_sites)}
    sites: dict[str, Any] = {k: x.reshape(total, 1, *x.shape[2:]) for k, x in each.items()}
    intercept = sites.pop("intercept", 0.0)
    if "piece" in rows.coords:
        sites["breaks"] = rows["piece"].values[1:]
    of_rows = {
        name: x.values for name, x in rows.items() if "row" in x.dims and "." not in str(name)
    }
    shared = () if given is None else given.covariances(rows)
    effects = effects_of_rows(random.fold_in(key, count), rows, draws)
    # tables of like sizes share a program
    size, out = min(padded(count), max(1, BATCH // total)), np.empty(0)
    for start in range(0, count, size):
        places = np.arange(start, start + size) % count
        at = {name: x[places] for name, x in of_rows.items()}
        columns = np.atleast_3d(at.pop("X")).T
        # chain by chain, which bounds the copy in double precision
        f = [w @ columns[k] for w, k in zip(draws["w"].values, tables.values, strict=True)]
        f = np.concatenate(f) + intercept + at["offset"]
        if given is not None:
            f += given.draw(random.fold_in(key, start + count), *(x[places] for x in shared))
        for levels, factors, of_levels in effects:
            f += of_levels[:, levels[places]] * factors[places]
        values, largest = _of_batch(what, kind, f, sites, at, random.fold_in(key, start))
        if not start:
            out = np.empty((len(values), count, *values.shape[2:]), values.dtype)
        if not largest < (MAX_COUNT if out.dtype.kind == "i" else np.inf):
            row = rows["row"].values[(start + f.max(0).argmax()) % count]
            remedy = "Give rows with means like those of the regression."
            raise bad("X_new, offset", f"a mean of {largest:.3g} in row {row}", "less", remedy)
        out[:, start : start + size] = np.asarray(values)[:, : count - start]
    return out


@partial(jax.jit, static_argnums=(0, 1))
def _of_batch(what: str, kind: ResponseKind, f: Any, sites: Any, at: Any, key: Array) -> Any:
    distribution = kind.of_rows(f, sites, at["beside"], at["weights"])
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
