# SPDX-License-Identifier: Apache-2.0
r"""Coefficients of Q tasks, each with its own, on C covariates that all tasks share.

Beside the weights :math:`w_q` of M features the location of task q has :math:`D^\top b_q`, where
the prior of :math:`b_q` is Normal, as of an intercept for each task. The covariates and the part
of the features in their span have a basis in common; in it no sums of large numbers cancel, where
features are not centred.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.coefficients import taken_apart
from numpyro_spikeslab.algebra.task_sweeps import task_products


class Normal(NamedTuple):
    """Prior of the coefficients of each task."""

    mean: Float[Array, "Q C"]
    scale: Float[Array, "Q C"]


class Shares(NamedTuple):
    """Observations of Q tasks in the K directions of the covariates, and in all others.

    - **coordinates** - of the covariates in these directions.
    - **up** - upper triangular root of what each task weighs there.
    - **fit** - coordinates of the observations.
    - **J**, **G**, **b**, **yy** - as in :class:`Beside`.
    """

    coordinates: Float[Array, "K C"]
    up: Float[Array, "#Q K K"]
    fit: Float[Array, "Q K"]
    J: Float[Array, "#Q K M"]
    G: Float[Array, "#Q M M"]
    b: Float[Array, "Q M"]
    yy: Float[Array, " Q"]

    def beside(self, prior: Normal, sigma2: Float[Array, " Q"]) -> "Beside":
        """
        :param sigma2: noise variance of each task.
        """
        deviation = self.fit - prior.mean @ self.coordinates.T
        return Beside(
            self.J,
            self.up @ (self.coordinates * prior.scale[:, None]),
            _times(self.up, deviation),
            self.G,
            self.b,
            self.yy,
            sigma2,
        )


class Beside(NamedTuple):
    r"""What observations say of weights w, and of coefficients as deviations u from their prior
    means in units of the prior's scales: up to a constant,

    .. math:: \|e - J w - E u\|^2 + w^\top G w - 2 b^\top w + y^\top y

    is the sum of the squares that both leave, weighted by relative precisions.

    - **J**, **E**, **e** - of each task, in the K directions of the covariates.
    - **G**, **b**, **yy** - in all others. Where all tasks weigh alike, the leading axis of J and
      of G is 1.
    - **sigma2** - noise variance of each task.
    """

    J: Float[Array, "#Q K M"]
    E: Float[Array, "Q K C"]
    e: Float[Array, "Q K"]
    G: Float[Array, "#Q M M"]
    b: Float[Array, "Q M"]
    yy: Float[Array, " Q"]
    sigma2: Float[Array, " Q"]

    @property
    def half(self) -> Float[Array, "Q K K"]:
        """Multiplies with ``L^-1``, where ``L L^T = I + E E^T / sigma^2``."""
        return _inverse_root(self.E @ _transposed(self.E) / self.sigma2[:, None, None])

    def integrated(self) -> tuple[Float[Array, "Q K M"], Float[Array, "Q M"]]:
        """What observations say of the weights, with coefficients integrated out: K features whose
        products are to be added to G, and products of all features with the observations."""
        half = self.half
        J = half @ self.J
        return J, self.b + _times(_transposed(J), _times(half, self.e))

    def mean(self, w: Float[Array, "Q M"]) -> Float[Array, "Q C"]:
        """Conditional mean of the coefficients given the weights."""
        return self._regress(self._left(w)[..., None])[..., 0]

    @property
    def slopes(self) -> Float[Array, "Q C M"]:
        """By how much that mean changes with a unit of each weight."""
        return -self._regress(self.J)

    def draw(self, w: Float[Array, "Q M"], noise: Float[Array, "Q C"]) -> Float[Array, "Q C"]:
        """A draw of the coefficients given the weights.

        :param noise: standard normal numbers.
        """
        half = _inverse_root(_transposed(self.E) @ self.E / self.sigma2[:, None, None])
        return self.mean(w) + _times(_transposed(half), noise)

    def squares(
        self,
        moments: tuple[Float[Array, "Q M"], Float[Array, "Q M"]],
        u: Float[Array, "Q C"],
        slopes: Float[Array, "Q C M"],
    ) -> Float[Array, " Q"]:
        """Expected squares that are left.

        :param moments: means and variances of the weights.
        :param u: the coefficients at the means of the weights.
        :param slopes: by how much they change with each weight.
        """
        mean, var = moments
        left = self._left(mean) - _times(self.E, u)
        along = jnp.diagonal(self.G, axis1=1, axis2=2)
        along = along + jnp.sum((self.J + self.E @ slopes) ** 2, axis=1)
        rest = jnp.sum(mean * (_times(self.G, mean) - 2 * self.b), axis=1)
        return self.yy + rest + jnp.sum(left**2, axis=1) + jnp.sum(var * along, axis=1)

    def _left(self, w: Float[Array, "Q M"]) -> Float[Array, "Q K"]:
        """What weights leave in the directions of the covariates."""
        return self.e - _times(self.J, w)

    def _regress(self, x: Float[Array, "#Q K X"]) -> Float[Array, "Q C X"]:
        """``E^T (sigma^2 I + E E^T)^-1 x``."""
        half = self.half
        return _transposed(half @ self.E) @ (half @ x) / self.sigma2[:, None, None]


def shares_of(
    y: Float[Array, "N Q"],
    Z: Float[Array, "N #Q"],
    features: Float[Array, "M N"],
    covariates: Float[Array, "C N"],
) -> Shares:
    """
    :param y: observations without weights and coefficients, 0 where they are missing.
    :param Z: precisions relative to those of the task, one column where all tasks agree.
    :param features: what multiplies the weights.
    :param covariates: what multiplies the coefficients.
    """
    apart = taken_apart(features, covariates)
    basis, rest = apart.basis, apart.rest
    S = task_products(basis, basis, Z)
    # where a task has too few observations for all directions, rounding stands for the others
    size = jnp.max(jnp.diagonal(S, axis1=1, axis2=2), axis=1)[:, None, None]
    info, one = jnp.finfo(S.dtype), jnp.eye(len(basis), dtype=S.dtype)
    L = jnp.linalg.cholesky(S + (len(basis) * info.eps * size + info.tiny**0.5) * one)
    half, up = _inverse(L), _transposed(L)
    T = half @ task_products(basis, rest, Z)
    fit = _times(_transposed(half), _times(half, (Z * y).T @ basis.T))
    # each task without what it has in these directions
    y = y - (fit @ basis).T
    return Shares(
        basis @ covariates.T,
        up,
        fit,
        J=up @ apart.inside.T + T,
        G=task_products(rest, rest, Z) - _transposed(T) @ T,
        b=(Z * y).T @ rest.T,
        yy=jnp.sum(Z * y**2, axis=0),
    )


def _times(matrix: Float[Array, "#Q A B"], x: Float[Array, "Q B"]) -> Float[Array, "Q A"]:
    """One matrix for all tasks, or one for each."""
    if len(matrix) == 1:
        return x @ matrix[0].T
    return jnp.einsum("qab,qb->qa", matrix, x)


def _inverse(L: Float[Array, "#Q K K"]) -> Float[Array, "#Q K K"]:
    one = jnp.broadcast_to(jnp.eye(L.shape[1], dtype=L.dtype), L.shape)
    return solve_triangular(L, one, lower=True)


def _inverse_root(products: Float[Array, "Q K K"]) -> Float[Array, "Q K K"]:
    """Inverse of the Cholesky factor of ``I + products``."""
    one = jnp.eye(products.shape[1], dtype=products.dtype)
    return _inverse(jnp.linalg.cholesky(products + one))


def _transposed(x: Float[Array, "#Q A B"]) -> Float[Array, "#Q B A"]:
    return jnp.swapaxes(x, 1, 2)
