# SPDX-License-Identifier: Apache-2.0
"""Prior covariances of a latent function: matrices and diagonals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

Values = Float[Array, " N"]

# Rows up to which a triangular matrix is inverted without halves.
SOLVED = 128


class Covariance(ABC):
    """Covariance ``K`` of N values, symmetric and positive semidefinite.

    A root ``L`` is lower triangular in an order of the values that the class chooses; inner values
    are values in that order. Here a root is a matrix in the order of the values.
    """

    @abstractmethod
    def diagonal(self) -> Values:
        """Return the variances."""

    @abstractmethod
    def matvec(self, x: Values) -> Values:
        """``K x``."""

    def to_dense(self) -> Float[Array, "N N"]:
        """``K`` as a matrix."""
        d = self.diagonal()
        return jax.vmap(self.matvec)(jnp.eye(d.size, dtype=d.dtype))

    @abstractmethod
    def jittered(self) -> Covariance:
        """``K`` with its :func:`jitter`, or as it is where its root needs none."""

    @abstractmethod
    def root(self) -> Any:
        """``L`` with ``L L^T = K``, which must be positive definite to rounding."""

    @abstractmethod
    def cholesky(self, a: Values) -> Any:
        """``L`` with ``L L^T = B = I + diag(a) K diag(a)``; ``K`` may be singular, ``a`` zero."""

    def half_logdet(self, L: Any) -> Float[Array, ""]:
        """Log determinant of ``L``, half of that of ``L L^T``."""
        return jnp.sum(jnp.log(jnp.diagonal(L)))

    def solve_lower(self, L: Any, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """Inner values ``L^-1 x``, for each column of ``x``."""
        return solve_triangular(L, x, lower=True)

    def solve_upper(self, L: Any, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """``L^-T x`` for each column of inner values ``x``."""
        return solve_triangular(L, x, lower=True, trans=1)

    def times_lower(self, L: Any, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """``L x`` for each column of inner values ``x``."""
        return L @ x

    def times_upper(self, L: Any, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        """Inner values ``L^T x``, for each column of ``x``."""
        return L.T @ x

    @abstractmethod
    def conditional(self, L: Any, a: Values) -> Values:
        """Variances given sites of precisions ``a^2``, whose :meth:`cholesky` is ``L``."""

    def draw(self, key: Array) -> Values:
        """A draw of ``N(0, K)``, with its jitter."""
        noisy, d = self.jittered(), self.diagonal()
        return noisy.times_lower(noisy.root(), jax.random.normal(key, d.shape, d.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense(Covariance):
    """A covariance matrix; several may be stacked for ``vmap``."""

    K: Float[Array, "*M N N"]

    def diagonal(self) -> Values:
        return jnp.diagonal(self.K)

    def matvec(self, x: Values) -> Values:
        return self.K @ x

    def to_dense(self) -> Float[Array, "N N"]:
        return self.K

    def jittered(self) -> Dense:
        return Dense(self.K + jitter(self.diagonal()) * jnp.eye(len(self.K), dtype=self.K.dtype))

    def root(self) -> Float[Array, "N N"]:
        return jnp.linalg.cholesky(self.K)

    def cholesky(self, a: Values) -> Float[Array, "N N"]:
        a = nonzero(a, self.diagonal())
        B = a[:, None] * self.K * a + jnp.eye(a.size, dtype=a.dtype)
        return jax.lax.linalg.cholesky(B, symmetrize_input=False)

    def conditional(self, L: Float[Array, "N N"], a: Values) -> Values:
        # L^-1 diag(a) K diag(a) = L^T - L^-1, which needs no product with K
        diagonal, pivots = self.diagonal(), jnp.diagonal(L)
        alpha = nonzero(a, diagonal) ** 2
        lower = jnp.sum(jnp.tril(inverse(L), -1) ** 2, axis=0)
        upper = jnp.sum(jnp.tril(L, -1) ** 2, axis=1)
        between = (alpha * diagonal - upper) / pivots
        explained = (upper + between**2 + lower) / alpha
        return variances_given(diagonal, a, explained, lower + pivots**-2)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagonal(Covariance):
    """Variances of independent values; several may be stacked for ``vmap``."""

    d: Float[Array, "*M N"]

    def diagonal(self) -> Values:
        return self.d

    def matvec(self, x: Values) -> Values:
        return self.d * x

    def jittered(self) -> Diagonal:
        return self

    def root(self) -> Values:
        return jnp.sqrt(self.d)

    def cholesky(self, a: Values) -> Values:
        return jnp.sqrt(1 + a * self.d * a)

    def half_logdet(self, L: Values) -> Float[Array, ""]:
        return jnp.sum(jnp.log(L))

    def solve_lower(self, L: Values, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return (x.T / L).T

    def times_lower(self, L: Values, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return (x.T * L).T

    solve_upper = solve_lower
    times_upper = times_lower

    def conditional(self, L: Values, a: Values) -> Values:
        return self.d / L**2


def inverse(L: Float[Array, "N N"], halvings: int = 3) -> Float[Array, "N N"]:
    """Invert a lower triangular matrix by halves, with a third of the operations of a solve."""
    N, half = len(L), len(L) // 2
    if halvings == 0 or N <= SOLVED:
        return solve_triangular(L, jnp.eye(N, dtype=L.dtype), lower=True)
    first, last = (inverse(x, halvings - 1) for x in (L[:half, :half], L[half:, half:]))
    zero = jnp.zeros((half, N - half), L.dtype)
    return jnp.block([[first, zero], [-last @ L[half:, :half] @ first, last]])


def nonzero(a: Values, diagonal: Values) -> Values:
    """Replace zeros among roots of precisions by numbers whose information is below rounding."""
    least = jnp.finfo(a.dtype).eps / jnp.sqrt(jnp.where(diagonal > 0, diagonal, 1))
    return jnp.maximum(a, least)


def variances_given(diagonal: Values, a: Values, explained: Values, inverse: Values) -> Values:
    """Compute the diagonal of ``K - K diag(a) B^-1 diag(a) K = diag(a)^-1 (I - B^-1) diag(a)^-1``.

    The first form loses digits at a strong site, and the second at a weak one.
    """
    alpha = a**2
    strong = alpha * diagonal > 1
    variance = jnp.where(strong, (1 - inverse) / jnp.where(strong, alpha, 1), diagonal - explained)
    return jnp.maximum(variance, 0)


def jitter(diagonal: Values) -> Float[Array, ""]:
    """Compute ``max(1e-9, 4 N eps)`` times the largest variance, to make roots of priors safe."""
    largest = jnp.max(diagonal)
    factor = max(1e-9, 4 * diagonal.size * float(jnp.finfo(diagonal.dtype).eps))
    return factor * jnp.where(largest > 0, largest, 1)
