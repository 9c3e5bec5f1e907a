# SPDX-License-Identifier: Apache-2.0
"""Predictions of a fit of latent functions, in closed form."""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.sparse_sums import (
    Entries,
    Side,
    at_entries,
    over_blocks,
    side_of,
)
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.primitives import check_finite
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.function_prior import KnownFunctions
from numpyro_spikeslab.reading.program import are_concrete, compiled, outside_transformations
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.roles import NoiseRole, Role
from numpyro_spikeslab.sparse import Observations, entries_of, is_sparse


class Noise(NamedTuple):
    """What the model says of the noise.

    - **sigma2** - its variance in each task; 1 where it varies along tasks, or is not known.
    - **observed** - whether the task has observations.
    """

    sigma2: Float[Array, " Q"]
    observed: Bool[Array, " Q"]


@jax.jit
def mix(
    posterior: Posterior, mean: Float[Array, "M S"], var: Float[Array, "M S"]
) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
    """Mean and variance of the tasks from those of the functions, at any inputs."""
    W, W2 = posterior.weights.mean, posterior.weights.slab_moments[1]
    return (W @ mean).T, (W2 @ (mean**2 + var) - W**2 @ mean**2).T


def predict_tasks(
    reading: Reading, posterior: Posterior, X_new: Any, noise: bool
) -> tuple[Any, Any]:
    """Mean and variance of each task.

    :param X_new: `None` for the inputs of the model.
    :param noise: whether to add the noise.
    """
    known, functions, form = reading.functions, posterior.functions, reading.form
    assert known is not None and functions is not None
    at, seen = _without_functions(reading, posterior.values)
    if X_new is None:
        mean, variance = mix(posterior, functions.mean, functions.var)
    else:
        _check_new_inputs(known.functions.X, X_new)
        if _changes(reading, seen):
            raise ValueError(
                "predict: the location of the tasks without functions is not the same at all "
                "inputs, so it is not known at new ones. Use numpyro.infer.Predictive with a model "
                "that knows it."
            )
        seen = seen[:1]
        mean, variance = compiled(lambda p: _at_new(known, p, X_new), posterior)
    if noise:
        _check_noise(form)
        variance = variance + at.sigma2
    return mean + seen, variance


def predict_entries(
    reading: Reading, posterior: Posterior, where: Entries | None, noise: bool
) -> tuple[Float[Array, " L"], Float[Array, " L"]]:
    """Mean and variance of entries of the table.

    :param where: which; `None` for those that the model observes.
    :param noise: whether to add the noise.
    """
    functions, form = posterior.functions, reading.form
    weights: Any = posterior.weights
    assert functions is not None
    at, offset = _without_functions(reading, posterior.values)
    own = offset[:, 0]
    if where is None:
        where = None if reading.layout is None else reading.layout.where
    elif reading.layout is None:
        own = offset[where.rows, where.columns]
    elif _changes(reading, own):
        raise ValueError(
            "predict: the location without functions is not the same at all entries, so it is not "
            "known at others. Subtract what is known of the entries from the data."
        )
    else:
        own = own[0]
    assert where is not None
    moments = weights.mean, weights.variance
    mean, variance = _at_entries(where, moments, (functions.mean, functions.var))
    if noise:
        _check_noise(form)
        variance = variance + _noise_of(reading, posterior.values, at, where.columns)[where.columns]
    return mean + own, variance


_at_entries = jax.jit(at_entries)


def _noise_of(reading: Reading, values: dict[str, Any], at: Noise, columns: Any) -> Any:
    """Noise variances of the tasks.

    :param columns: those whose variance must be known.
    """
    sigma2 = at.sigma2
    roles = reading.form.roles_of(NoiseRole)
    for role in roles:
        sigma2 = reading.indices[role.site].take(values[role.site] ** 2, sigma2)
    scale = reading.problem.program.shapes.observed[reading.form.likelihood].scale
    if reading.layout is not None and scale.size > 1:
        _check_known(reading, roles, at.observed, columns)
    return sigma2


def _check_known(reading: Reading, roles: tuple[Role, ...], observed: Any, columns: Any) -> None:
    """A column without entries says nothing of a noise of its own."""
    if not are_concrete(observed):
        with outside_transformations(reading.problem.constants):
            observed = _without_functions(reading, reading.generic)[0].observed
    if not are_concrete(observed):
        raise ValueError(
            "predict, transform: the model's arguments are traced, as within jit or vmap, so it is "
            "not known which columns have entries, and a noise. Close over them."
        )
    known = np.array(observed)
    for role in roles:
        known |= reading.indices[role.site].takes_any()
    unknown = np.setdiff1d(np.asarray(columns), np.flatnonzero(known))
    if unknown.size:
        raise ValueError(
            f"predict, transform: nothing says which noise the columns {unknown[:10].tolist()} "
            "have, which have no entries. Leave them or `noise` out."
        )


def checked_entries(reading: Reading, entries: Any, X_new: Any) -> Entries | None:
    """Numbers of rows and columns of the table.

    :raises ValueError: if they are not.
    """
    N, Q = reading.form.table
    if X_new is not None:
        raise ValueError(
            "predict: entries are those of the table of the fit, and have no new inputs. Give "
            "`X_new` of a whole table, or new rows to `transform`."
        )
    if entries is None:
        return None
    if len(entries) != 2 or np.shape(entries[0]) != np.shape(entries[1]):
        raise ValueError(
            "predict: `entries` must be the numbers of rows and of columns, two arrays of one "
            f"shape, got {[np.shape(x) for x in entries]}."
        )
    if not are_concrete(entries):
        raise ValueError(
            "predict: `entries` are traced, as within jit or vmap, so it is not known whether they "
            "are in the table. Close over them; parameters may be traced."
        )
    rows, columns = (np.ravel(np.asarray(x)) for x in entries)
    for what, x, size in (("row", rows, N), ("column", columns, Q)):
        if not np.issubdtype(x.dtype, np.integer) or np.any((x < 0) | (x >= size)):
            raise ValueError(
                f"predict: every {what} of `entries` must be an integer from 0 to {size - 1}, got "
                f"{x.dtype} from {np.min(x, initial=0)} to {np.max(x, initial=0)}."
            )
    with outside_transformations():
        return Entries(jnp.asarray(rows), jnp.asarray(columns))


def transform_rows(
    reading: Reading, posterior: Posterior, Y_new: Any
) -> tuple[Float[Array, "M S"], Float[Array, "M S"]]:
    """Mean and variance of the factor that functions without order would have for new rows.

    :param Y_new: from :func:`checked_rows`.
    """
    at, offset = _without_functions(reading, posterior.values)
    if reading.form.varying_noise or _changes(reading, offset):
        raise ValueError(
            "transform: the noise or the location without functions changes from row to row, so it "
            "is not known in new ones."
        )
    offset = jnp.broadcast_to(offset[0], reading.form.num_tasks)
    sparse = isinstance(Y_new, Observations)
    seen = Y_new.columns if sparse else _columns_seen(Y_new)
    sigma2 = _noise_of(reading, posterior.values, at, seen)
    if not sparse:
        return _of_new_rows(posterior.weights, sigma2, Y_new - offset)
    number, own = Y_new.shape[0], Y_new.values - offset[Y_new.columns]
    side = side_of(Y_new.rows, Y_new.columns, number, reading.form.num_features)
    return _of_new_entries(number, side, posterior.weights, sigma2, own)


def _columns_seen(Y: Float[Array, "S Q"]) -> Int[np.ndarray, " K"]:
    """Columns of a table that have an observation; all of one that is traced might."""
    seen = np.any(~np.isnan(np.asarray(Y)), axis=0) if are_concrete(Y) else np.ones(Y.shape[1])
    return np.flatnonzero(seen)


def _factor(G: Float[Array, "M M"], c: Float[Array, " M"], b: Float[Array, " M"]) -> Any:
    """Mean and variance of the functions in a row, from products of the weights' means with each
    other and with the row, and from the sums of their variances."""
    covariance = cho_solve(cho_factor(G + jnp.diag(1 + c)), jnp.eye(len(b), dtype=b.dtype))
    return covariance @ b, jnp.diagonal(covariance)


@jax.jit
def _of_new_rows(weights: Any, sigma2: Any, Y: Any) -> Any:
    W, variance = weights.mean, weights.variance

    def row(y):
        tau = jnp.where(jnp.isnan(y), 0, 1 / sigma2)
        return _factor((W.T * tau) @ W, tau @ variance, W.T @ (tau * jnp.nan_to_num(y)))

    return jax.tree.map(jnp.transpose, jax.lax.map(row, Y))


@partial(jax.jit, static_argnums=0)
def _of_new_entries(number: int, side: Side, weights: Any, sigma2: Any, Y: Any) -> Any:
    features = weights.mean, weights.variance, 1 / sigma2

    def block(sums, _):
        return jax.vmap(_factor)(sums.G, sums.c, sums.b)

    found = over_blocks(side, number, features, Y, jnp.ones_like(Y), block)
    return jax.tree.map(jnp.transpose, found)


def checked_rows(reading: Reading, Y_new: Any) -> Any:
    """New rows, where the model can have any: a table, or the entries of a sparse array."""
    form, known = reading.form, reading.functions
    if known is None or not known.is_white:
        raise ValueError(
            "PairedGuide.transform: new rows need functions without order, kernels 'white' of mean "
            "zero, as in models.factor_analysis. For others use `predict` with X_new."
            f"{reading.if_traced}"
        )
    shape = np.shape(Y_new)
    if len(shape) != 2 or shape[1] != form.num_tasks or not shape[0]:
        raise ValueError(
            f"PairedGuide.transform: Y_new must have shape (S, {form.num_tasks}), rows with as "
            f"many columns as the data of the fit, got {shape}."
        )
    with outside_transformations(Y_new):
        new, bad = _rows_of(Y_new, known.mean.dtype)
    if are_concrete(bad) and np.any(np.asarray(bad)):
        raise ValueError(
            "PairedGuide.transform: Y_new has entries that are not finite. Give missing ones as "
            "NaN, of a sparse array leave them out."
        )
    return new


def _rows_of(Y_new: Any, dtype: Any) -> tuple[Any, Any]:
    """The rows, and which of their entries are not finite."""
    if is_sparse(Y_new):
        entries = entries_of(Y_new, "PairedGuide.transform: Y_new")
        if not are_concrete((entries.rows, entries.columns)):
            raise ValueError(
                "PairedGuide.transform: Y_new is a sparse array whose indices are traced, as "
                "within jit or vmap. Close over its indices; its values may be traced."
            )
        values = jnp.asarray(entries.values, dtype)
        return entries._replace(values=values), ~jnp.isfinite(values)
    if np.ma.isMaskedArray(Y_new):
        raise ValueError(
            "PairedGuide.transform: Y_new is a masked array, which JAX does not have. Give "
            "`Y_new.filled(np.nan)`."
        )
    new = jnp.asarray(Y_new, dtype)
    return new, jnp.isinf(new)


def _without_functions(reading: Reading, values: dict[str, Any]) -> tuple[Noise, Any]:
    """The noise of the model, and the location of its observations where functions are zero."""

    def of(values):
        # the rest of the view would be as large as the data
        at = reading.view(values)
        return Noise(at.sigma2, at.count > 0), reading.problem.predictor_of_tasks(values)

    with outside_transformations((reading.problem.constants, values)):
        return compiled(of, values)


def _changes(reading: Reading, offset: Any) -> bool:
    """Whether a location is another one at some inputs, so that it is not known at new ones.

    :raises ValueError: if that depends on data that are traced.
    """
    if not are_concrete(offset):
        # parameters that are traced could have any values
        with outside_transformations(reading.problem.constants):
            offset = reading.problem.predictor_of_tasks(reading.generic)
    if not are_concrete(offset):
        raise ValueError(
            "predict, transform: the model's arguments are traced, as within jit or vmap, so it is "
            "not known whether its location without functions is the same at new inputs. Close "
            "over them, `jax.jit(lambda params: guide.predict(params, X, Y, X_new=X_new))`."
        )
    return bool(np.any(np.asarray(offset) != np.asarray(offset)[0]))


def _at_new(known: KnownFunctions, posterior: Posterior, X_new: Any) -> tuple[Any, Any]:
    """Mean and variance of the tasks at new inputs, without their offset."""
    functions: Any = posterior.functions
    theta = functions.theta
    prior = known.prior({})
    values = known.parameters.scatter(theta)
    mean_new = known.functions.mean_at(X_new)
    means, variances = [], []
    for m, template in enumerate(known.functions.templates):
        own = known.functions.values(values, m)
        cross = template.cross(own, known.functions.X, X_new).T
        covariance = prior.covariance(m, theta[m])
        q = gp.condition(covariance, functions.alpha[m], functions.h[m], known.mean[m])
        mean, variance = gp.predict(
            covariance, functions.alpha[m], q, cross, template.variance(own, X_new), mean_new[m]
        )
        means.append(mean)
        variances.append(variance)
    return mix(posterior, jnp.stack(means), jnp.stack(variances))


def _check_new_inputs(X: Any, X_new: Any) -> None:
    shape, new = jnp.shape(X), jnp.shape(X_new)
    if len(new) != len(shape) or new[1:] != shape[1:] or not new[0]:
        raise ValueError(
            f"predict: X_new has shape {new} and the model's inputs have shape {shape}; they must "
            "have the same number of axes and the same width, and X_new at least one point."
        )
    check_finite("predict", "X_new is", X_new)


def _check_noise(form: Form) -> None:
    if form.varying_noise:
        raise ValueError(
            "predict: the noise changes along tasks, so it is not known elsewhere. Leave "
            "`noise` out, or use numpyro.infer.Predictive."
        )
