# SPDX-License-Identifier: Apache-2.0
r"""Coefficients with a Normal prior beside the weights: integrated out, or given the weights.

The location of task q is :math:`X^\top w_q + D^\top b_q`: features X times weights, and
covariates D times coefficients, such as an intercept. A design whose columns have one weight each
is one task. Features and observations are split into a part in the span of the covariates and a
part outside, which avoids the cancellation of large numbers where columns are far from centred.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import split_along
from numpyro_spikeslab.algebra.task_sweeps import TaskSums, task_products, times


class NormalPrior(NamedTuple):
    """The current values of C coefficients of each of Q tasks, and moments of their prior.

    ``links`` are derivatives of the means with respect to all coefficients, for Q = 1. Deviations
    are from the prior means, in units of the prior scales.
    """

    value: Float[Array, "Q C"]
    mean: Float[Array, "Q C"]
    scale: Float[Array, "Q C"]
    links: Float[Array, "C C"] | None = None

    @property
    def deviation(self) -> Float[Array, "Q C"]:
        """The current values as deviations."""
        return (self.value - self.mean) / self.scale

    @property
    def origin(self) -> Float[Array, "Q C"]:
        """The values at deviations of zero."""
        return self.mean if self.links is None else self.value - self.scaled(self.deviation)

    def scaled(self, x: Float[Array, "#Q C *X"]) -> Float[Array, "Q C *X"]:
        """Turn changes of deviations into changes of values."""
        x = (self.scale.T * x.T).T
        return x if self.links is None else jnp.linalg.solve(self._unlinked, x[0])[None]

    def unscaled(self, x: Float[Array, "Q C *X"]) -> Float[Array, "Q C *X"]:
        """Turn changes of values into changes of deviations."""
        x = x if self.links is None else (self._unlinked @ x[0])[None]
        return (x.T / self.scale.T).T

    def rows(self, covariates: Float[Array, "C K"]) -> Float[Array, "Q C K"]:
        """Return the rows that deviations multiply in the location."""
        if self.links is not None:
            covariates = jnp.linalg.solve(self._unlinked.T, covariates)
        return self.scale[:, :, None] * covariates

    @property
    def _unlinked(self) -> Float[Array, "C C"]:
        assert self.links is not None
        return jnp.eye(len(self.links), dtype=self.links.dtype) - self.links


class Split(NamedTuple):
    """Features, split into coordinates in an orthonormal basis of the span of covariates and the
    part outside of it, with its products within a block."""

    basis: Float[Array, "K N"]
    inside: Float[Array, "*G P K"]
    outside: Float[Array, "*G P N"]
    products: Float[Array, "*G P P"]


def basis_of(covariates: Float[Array, "C N"]) -> Float[Array, "K N"]:
    """Return an orthonormal basis of the span of covariates."""
    return jnp.linalg.qr(covariates.T)[0].T


def split(features: Float[Array, "*G P N"], covariates: Float[Array, "C N"]) -> Split:
    """Split features, in blocks or not."""
    basis = basis_of(covariates)
    inside, outside = split_along(basis, features)
    return Split(basis, inside, outside, outside @ jnp.swapaxes(outside, -1, -2))


class Coefficients(NamedTuple):
    r"""The conditional of the coefficients u (as deviations) given the weights w.

    The squared residuals in the span of the covariates are :math:`\|e - J w - E u\|^2`.

    - **J**, **E**, **e** - features, covariates and observations in K directions of the span. The
      leading axis of J is 1 where all tasks weigh the observations alike.
    - **sigma2** - noise variance of each task.
    - **whitening** - T with :math:`T^\top T = (I + E E^\top / \sigma^2)^{-1}`. With the
      coefficients integrated out, the squared residuals are :math:`\|T (e - J w)\|^2`.
    """

    J: Float[Array, "#Q K M"]
    E: Float[Array, "Q K C"]
    e: Float[Array, "Q K"]
    sigma2: Float[Array, " Q"]
    whitening: Float[Array, "Q K K"]

    def without(self) -> tuple[Float[Array, "Q K M"], Float[Array, "Q K"]]:
        """Return features and observations with the coefficients integrated out."""
        return self.whitening @ self.J, times(self.whitening, self.e)

    def given(
        self, residual: Float[Array, "Q K"], noise: Float[Array, "Q C"] | None = None
    ) -> tuple[Float[Array, "Q C"], Float[Array, "Q K"]]:
        """Return the mean of u, or a draw by standard normal ``noise``, and ``e - J w - E u``."""
        u, outside = times(self._gain, residual), times(transposed(self.whitening), residual)
        if noise is None:
            return u, outside
        root = root_of_sum(self.E / jnp.sqrt(self.sigma2)[:, None, None])
        change = solve_triangular(root, noise[..., None])[..., 0]
        return u + change, outside - times(self.E, change)

    def draw(self, inside: Float[Array, " K"], noise: Float[Array, " C"]) -> Float[Array, " C"]:
        """Draw u of one task given ``e - J w``: one decomposition gives root and mean."""
        last = jnp.append(self.E[0], inside[:, None], axis=1)
        sums = root_of_sum(last[None] / jnp.sqrt(self.sigma2[0]))[0, :-1]
        return solve_triangular(sums[:, :-1], sums[:, -1] + noise)

    @property
    def slopes(self) -> Float[Array, "Q C M"]:
        """The derivative of the conditional mean with respect to the weights."""
        return -self._gain @ (self.whitening @ self.J)

    @property
    def _gain(self) -> Float[Array, "Q C K"]:
        """Maps a residual of :meth:`without` to the conditional mean."""
        return transposed(self.whitening @ self.E) / self.sigma2[:, None, None]


def coefficients_of(
    J: Float[Array, "#Q K M"],
    E: Float[Array, "Q K C"],
    e: Float[Array, "Q K"],
    sigma2: Float[Array, " Q"],
) -> Coefficients:
    """Make the conditional from arrays of the span."""
    root = root_of_sum(transposed(E) / jnp.sqrt(sigma2)[:, None, None])
    one = jnp.broadcast_to(jnp.eye(root.shape[1], dtype=root.dtype), root.shape)
    return Coefficients(J, E, e, sigma2, solve_triangular(root, one, trans=1))


def root_of_sum(x: Float[Array, "Q A B"]) -> Float[Array, "Q B B"]:
    """Return an upper triangular root of ``I + x^T x``, without the products, which would square
    the condition: in single precision an intercept would be lost beside effects of groups."""
    one = jnp.broadcast_to(jnp.eye(x.shape[2], dtype=x.dtype), (len(x), x.shape[2], x.shape[2]))
    return jnp.linalg.qr(jnp.concatenate([x, one], axis=1), mode="r")


def of_columns(
    basis: Float[Array, "K N"],
    inside: Float[Array, "P K"],
    covariates: Float[Array, "C N"],
    y: Float[Array, " N"],
    prior: NormalPrior,
    sigma2: Float[Array, ""],
) -> tuple[Coefficients, Float[Array, " N"]]:
    """Return the coefficients of a whitened design, and observations outside of the span."""
    coordinates = covariates @ basis.T
    fit, outside = split_along(basis, y)
    e = fit + (prior.value - prior.origin) @ coordinates
    E = transposed(prior.rows(coordinates))
    return coefficients_of(inside.T[None], E, e, sigma2[None]), outside


class TaskStatistics(NamedTuple):
    """Sums over the observations of Q tasks that share M features and C covariates.

    - **coordinates** - of the covariates in a basis of their span.
    - **up** - upper triangular root of the basis' products, as each task weighs observations.
    - **fit** - coordinates of the observations.
    - **J** - as in :class:`Coefficients`.
    - **outside** - sums of features and observations outside of the span.
    """

    coordinates: Float[Array, "K C"]
    up: Float[Array, "#Q K K"]
    fit: Float[Array, "Q K"]
    J: Float[Array, "#Q K M"]
    outside: TaskSums

    def coefficients(self, prior: NormalPrior, sigma2: Float[Array, " Q"]) -> Coefficients:
        """Return the coefficients at a prior and noise."""
        e = times(self.up, self.fit - prior.origin @ self.coordinates.T)
        E = self.up @ transposed(prior.rows(self.coordinates.T))
        return coefficients_of(self.J, E, e, sigma2)


def task_statistics(
    y: Float[Array, "N Q"],
    Z: Float[Array, "N #Q"],
    features: Float[Array, "M N"],
    covariates: Float[Array, "C N"],
) -> TaskStatistics:
    """Sum over the observations of tasks, which are at weights and coefficients of zero."""
    basis, inside, outside, _ = split(features, covariates)
    S = task_products(basis, basis, Z)
    # a task with too few observations for all directions has a singular matrix
    size = jnp.max(jnp.diagonal(S, axis1=1, axis2=2), axis=1)[:, None, None]
    info, one = jnp.finfo(S.dtype), jnp.eye(len(basis), dtype=S.dtype)
    L = jnp.linalg.cholesky(S + (len(basis) * info.eps * size + info.tiny**0.5) * one)
    half = solve_triangular(L, jnp.broadcast_to(one, L.shape), lower=True)
    up = transposed(L)
    across = half @ task_products(basis, outside, Z)
    fit = times(transposed(half), times(half, (Z * y).T @ basis.T))
    sums = TaskSums.of(y - (fit @ basis).T, Z, outside)
    sums = sums._replace(G=sums.G - transposed(across) @ across)
    return TaskStatistics(basis @ covariates.T, up, fit, up @ inside.T + across, sums)


def transposed(x: Float[Array, "#Q A B"]) -> Float[Array, "#Q B A"]:
    """Transpose the matrix of each task."""
    return jnp.swapaxes(x, 1, 2)


def whitened(rows: Float[Array, "*P N"], precision: Float[Array, " N"]) -> Float[Array, "*P N"]:
    """Scale observations by the root of their precision; rows may be NaN where that is 0."""
    return jnp.where(precision > 0, rows, 0) * jnp.sqrt(precision)
