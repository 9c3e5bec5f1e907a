# SPDX-License-Identifier: Apache-2.0
"""Predictions of a fit of latent functions, in closed form."""

from functools import partial
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.observations import Grid, Sparse
from numpyro_spikeslab.algebra.sparse_sums import Entries, Side, at_entries, over_blocks, side_of
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.models.functions import checked_inputs
from numpyro_spikeslab.models.sparse import Observations, is_sparse
from numpyro_spikeslab.reading.function_prior import KnownFunctions
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import NoiseRole
from numpyro_spikeslab.support.messages import bad


def refuse_traced(user: str, arguments: Any) -> None:
    """Raise if parameters or data are traced."""
    if not are_concrete(arguments):
        raise bad(user, "traced arguments", "arrays", "Call it outside of jit and vmap.")


def predict(
    reading: Reading, posterior: Posterior, X_new: Any, entries: Any, noise: bool
) -> tuple[Any, Any]:
    """Compute mean and variance of each task, (S, Q), or of entries of the table, (L,)."""
    functions, layout = posterior.functions, reading.layout
    if functions is None:
        raise ValueError(
            "PairedGuide.predict: the weights of the model mix no latent functions. Use "
            "numpyro.infer.Predictive."
        )
    where = layout.where if entries is None else checked_entries(reading, entries)
    if X_new is not None:
        X_new = _checked_points(reading.functions, X_new, where)
    of_entries = isinstance(layout, Sparse)
    is_new = X_new is not None or (of_entries and where is not layout.where)
    offset = offset_of(reading, posterior, is_new)
    columns: Any = np.arange(reading.form.num_tasks)
    at_data = functions.mean, functions.var
    if where is not None:
        columns = where.columns
        offset = offset[:, 0] if of_entries else offset[where.rows, columns]
        moments = _at_entries(where, PairedMeanField.mixed, posterior.weights, *at_data)
    elif X_new is None:
        moments = _mixed(posterior.weights, *at_data)
    else:
        moments = compiled(partial(_at_new, reading.functions, X_new), posterior)
    mean, variance = (x.T for x in moments)
    if noise:
        variance = variance + noise_of(reading, posterior, columns)[columns]
    return mean + offset, variance


_at_entries = jax.jit(at_entries, static_argnums=1)
_mixed = jax.jit(PairedMeanField.mixed)


def _at_new(latent: KnownFunctions, X_new: Any, posterior: Posterior) -> tuple[Any, Any]:
    """Compute mean and variance of the tasks at new inputs, without their offset."""
    functions: Any = posterior.functions
    theta, alpha, prior = functions.theta, functions.alpha, latent.prior({})
    values, mean_new = latent.parameters.scatter(theta), latent.functions.mean_at(X_new)

    def moments(m, template):
        parameters = latent.functions.values(values, m)
        cross = template.cross(parameters, latent.functions.X, X_new).T
        covariance = prior.covariance(m, theta[m])
        q = gp.condition(covariance, alpha[m], functions.h[m], latent.mean[m])
        at_new = cross, template.variance(parameters, X_new), mean_new[m]
        return gp.predict(covariance, alpha[m], q, *at_new)

    each = [moments(m, template) for m, template in enumerate(latent.functions.templates)]
    return posterior.weights.mixed(*map(jnp.stack, zip(*each, strict=True)))


def transform(
    reading: Reading, new: Observations, posterior: Posterior
) -> tuple[Float[Array, "M S"], Float[Array, "M S"]]:
    """Compute mean and variance of functions without order in new rows."""
    sigma2 = noise_of(reading, posterior, np.unique(new.columns))
    offset = offset_of(reading, posterior, is_new=True)
    offset = jnp.broadcast_to(offset[0], reading.form.num_tasks)
    residual = new.values - offset[new.columns]
    side = side_of(new.rows, new.columns, new.shape[0], reading.form.num_features)
    return _of_new_rows(new.shape[0], side, posterior.weights, sigma2, residual)


@partial(jax.jit, static_argnums=0)
def _of_new_rows(number: int, side: Side, weights: Any, sigma2: Any, residual: Any) -> Any:
    features = weights.mean, weights.variance, 1 / sigma2

    def of_row(sums):
        precision = sums.G + jnp.diag(1 + sums.c)
        covariance = cho_solve(cho_factor(precision), jnp.eye(len(sums.b), dtype=sums.b.dtype))
        return covariance @ sums.b, jnp.diagonal(covariance)

    data = residual, jnp.ones_like(residual)
    rows = over_blocks(side, number, features, data, jax.vmap(of_row))
    return jax.tree.map(jnp.transpose, rows)


def offset_of(reading: Reading, posterior: Posterior, is_new: bool) -> Float[Array, "N Q"]:
    """Compute the location without functions, (L, 1) of entries; at new inputs it is one row."""
    offset = compiled(reading.problem.predictor_of_tasks, posterior.values)
    if not is_new:
        return offset
    if np.any(np.asarray(offset) != np.asarray(offset)[0]):
        raise ValueError(
            "predict, transform: the location without functions is not the same at all inputs, so "
            "it is not known at new ones. Use numpyro.infer.Predictive, or subtract it from Y."
        )
    return offset[:1]


def noise_of(reading: Reading, posterior: Posterior, columns: Any) -> Float[Array, " Q"]:
    """Compute the noise variances of the tasks; those of ``columns`` must be known."""
    form, values = reading.form, posterior.values
    if not form.likelihood.is_fixed:
        raise ValueError(
            f"predict, transform: only Normal observations have noise, not {form.response!r}. "
            "Leave `noise` out, or use numpyro.infer.Predictive."
        )
    if form.varying_noise:
        raise ValueError(
            "predict, transform: the noise changes along tasks, so it is not known elsewhere. "
            "Leave `noise` out, or use numpyro.infer.Predictive."
        )

    def of(values):
        # the rest of the view would be as large as the data
        at = reading.view(values)
        return at.sigma2, at.count > 0

    sigma2, observed = compiled(of, values)
    scale = reading.problem.program.shapes.observed[form.response].scale
    has_noise = np.array(observed) | (isinstance(reading.layout, Grid) or scale.size == 1)
    for role in form.roles_of(NoiseRole):
        index = reading.indices[role.site]
        sigma2 = index.take(values[role.site] ** 2, sigma2)
        has_noise |= np.asarray(index.take(jnp.ones(index.size), jnp.zeros(sigma2.shape)) > 0)
    unknown = np.setdiff1d(np.asarray(columns), np.flatnonzero(has_noise))
    if unknown.size:
        raise ValueError(
            f"predict, transform: nothing says which noise the columns {unknown[:10].tolist()} "
            "have, which have no entries. Leave them or `noise` out."
        )
    return sigma2


def _checked_points(latent: KnownFunctions, X_new: Any, where: Entries | None) -> Any:
    """Return new inputs as an array; raise unless they are finite and as wide as the model's."""
    user = "PairedGuide.predict: X_new"
    if where is not None:
        raise bad(user, "new inputs of entries", "entries of the fit, or rows for `transform`")
    shape, new = jnp.shape(latent.functions.X), jnp.shape(X_new)
    if len(new) != len(shape) or new[1:] != shape[1:] or not new[0]:
        expected = f"at least one point of the same width as the model's inputs, of shape {shape}"
        raise bad(user, f"the shape {new}", expected)
    return checked_inputs(user, X_new)


def checked_entries(reading: Reading, entries: Any) -> Entries:
    """Return entries of the table as arrays."""
    arrays = [np.asarray(x) for x in entries]
    fits = len(arrays) == 2 and arrays[0].shape == arrays[1].shape
    for x, size in zip(arrays, reading.form.table, strict=False):
        fits = fits and np.issubdtype(x.dtype, np.integer) and bool(np.all((x >= 0) & (x < size)))
    if not fits:
        expected = "two arrays of one shape, numbers of rows and of columns within the table of "
        raise bad("PairedGuide.predict: entries", arrays, f"{expected}shape {reading.form.table}")
    return Entries(*(jnp.asarray(x.ravel()) for x in arrays))


def checked_rows(reading: Reading, Y_new: Any) -> Observations:
    """Return the observations of new rows, from a table with NaN."""
    number, user = reading.form.num_tasks, "PairedGuide.transform: Y_new"
    if reading.functions is None or not reading.functions.is_white:
        raise ValueError(
            "PairedGuide.transform: new rows need functions without order, kernels 'white' of mean "
            "zero, as in models.factor_analysis. For others use `predict` with X_new."
        )
    shape, dtype = np.shape(Y_new), reading.functions.mean.dtype
    if len(shape) != 2 or shape[1] != number or not shape[0]:
        raise bad(user, f"the shape {shape}", f"(S, {number}), rows with the columns of the fit")
    if np.ma.isMaskedArray(Y_new):
        raise bad(user, "a masked array", "an array", "Give `Y_new.filled(np.nan)`.")
    if is_sparse(Y_new):
        raise bad(user, "a sparse array", "an array", "Make it dense, with NaN for missing ones.")
    table = np.asarray(Y_new, dtype)
    rows, columns = np.nonzero(~np.isnan(table))
    values = table[rows, columns]
    if not np.all(np.isfinite(values)):
        raise bad(user, "entries that are not finite", "numbers, and NaN for missing ones")
    return Observations(rows, columns, values, shape)
