# SPDX-License-Identifier: Apache-2.0
"""Prior covariances of a latent function, each with its own cost.

A covariance is :class:`Dense`, :class:`Diagonal` (white noise, or zero for a deterministic
function) or :class:`Quasisep` (a state-space kernel on one-dimensional inputs, O(N)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
import math
from typing import Any

from jaxtyping import Array, Float, Int
from tinygp.kernels import quasisep
from tinygp.solvers.quasisep.core import (
    DiagQSM,
    LowerTriQSM,
    SquareQSM,
    StrictLowerTriQSM,
    StrictUpperTriQSM,
    SymmQSM,
)

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dense:
    """A covariance matrix.

    :param K: ``(N, N)``, symmetric and positive semidefinite; several may be stacked for ``vmap``.
    """

    K: Float[Array, "*M N N"]

    def diagonal(self) -> Float[Array, " N"]:
        return jnp.diagonal(self.K)

    def matvec(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        return self.K @ x

    def cholesky(self, a: Float[Array, " N"]) -> Float[Array, "N N"]:
        """``L`` of ``B = I + diag(a) K diag(a)``."""
        B = a[:, None] * self.K * a + jnp.eye(a.size, dtype=a.dtype)
        return jax.lax.linalg.cholesky(B, symmetrize_input=False)

    def half_logdet(self, L: Float[Array, "N N"]) -> Float[Array, ""]:
        return jnp.sum(jnp.log(jnp.diagonal(L)))

    def solve_lower(
        self, L: Float[Array, "N N"], x: Float[Array, "N ..."]
    ) -> Float[Array, "N ..."]:
        return solve_triangular(L, x, lower=True)

    def solve_upper(
        self, L: Float[Array, "N N"], x: Float[Array, "N ..."]
    ) -> Float[Array, "N ..."]:
        return solve_triangular(L, x, lower=True, trans=1)

    def explained(self, L: Float[Array, "N N"], a: Float[Array, " N"]) -> Float[Array, " N"]:
        """Diagonal of ``K D^1/2 B^-1 D^1/2 K``."""
        return jnp.sum(self.solve_lower(L, a[:, None] * self.K) ** 2, axis=0)

    def log_density(self, x: Float[Array, " N"]) -> Float[Array, ""]:
        return _log_density(self, jnp.linalg.cholesky(self.K), x)

    def draw(self, key: Array) -> Float[Array, " N"]:
        # Rounding makes a nearly singular K indefinite by at most about N eps.
        N = self.K.shape[0]
        jitter = _jitter(self.diagonal(), N)
        root = jnp.linalg.cholesky(self.K + jitter * jnp.eye(N, dtype=self.K.dtype))
        return root @ jax.random.normal(key, (N,), self.K.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Diagonal:
    """Independent values: ones for a white process, zeros for a deterministic function.

    :param d: ``(N,)``, the variances; several may be stacked for ``vmap``.
    """

    d: Float[Array, "*M N"]

    def diagonal(self) -> Float[Array, " N"]:
        return self.d

    def matvec(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        return self.d * x

    def cholesky(self, a: Float[Array, " N"]) -> Float[Array, " N"]:
        return jnp.sqrt(1 + a * self.d * a)

    def half_logdet(self, L: Float[Array, " N"]) -> Float[Array, ""]:
        return jnp.sum(jnp.log(L))

    def solve_lower(self, L: Float[Array, " N"], x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return (x.T / L).T

    solve_upper = solve_lower

    def explained(self, L: Float[Array, " N"], a: Float[Array, " N"]) -> Float[Array, " N"]:
        return (a * self.d / L) ** 2

    def log_density(self, x: Float[Array, " N"]) -> Float[Array, ""]:
        return _log_density(self, jnp.sqrt(self.d), x)

    def draw(self, key: Array) -> Float[Array, " N"]:
        return jnp.sqrt(self.d) * jax.random.normal(key, self.d.shape, self.d.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quasisep:
    """A quasiseparable covariance, in O(N).

    Roots and what they are multiplied with have sorted inputs; all else has the given order.

    :param matrix: tinygp's symmetric quasiseparable matrix at sorted inputs; see
        :meth:`from_kernel`.
    :param order: ``(N,)``, sorts the inputs.
    :param rank: ``(N,)``, the inverse of ``order``.
    """

    matrix: SymmQSM
    order: Int[Array, "*M N"]
    rank: Int[Array, "*M N"]

    @classmethod
    def from_kernel(cls, kernel: quasisep.Quasisep, x: Float[Array, " N"]) -> Quasisep:
        """The covariance of a ``tinygp.kernels.quasisep`` kernel at inputs ``x``."""
        order = jnp.argsort(x)
        return cls(kernel.to_symm_qsm(x[order]), order, jnp.argsort(order))

    def diagonal(self) -> Float[Array, " N"]:
        return self.matrix.diag.d[self.rank]

    def matvec(self, x: Float[Array, " N"]) -> Float[Array, " N"]:
        return (self.matrix @ x[self.order])[self.rank]

    def cholesky(self, a: Float[Array, " N"]) -> LowerTriQSM:
        a = a[self.order]
        p, q, transition = self.matrix.lower
        lower = StrictLowerTriQSM(p=a[:, None] * p, q=a[:, None] * q, a=transition)
        return SymmQSM(diag=DiagQSM(1 + a * self.matrix.diag.d * a), lower=lower).cholesky()

    def half_logdet(self, L: LowerTriQSM) -> Float[Array, ""]:
        return jnp.sum(jnp.log(L.diag.d))

    def solve_lower(self, L: LowerTriQSM, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return L.solve(x[self.order])

    def solve_upper(self, L: LowerTriQSM, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return L.transpose().solve(x)[self.rank]

    def explained(self, L: LowerTriQSM, a: Float[Array, " N"]) -> Float[Array, " N"]:
        a = a[self.order]
        # tinygp's product of a diagonal and a symmetric matrix comes back as symmetric (0.3.1).
        p, q, transition = self.matrix.lower
        scaled = SquareQSM(
            diag=DiagQSM(a * self.matrix.diag.d),
            lower=StrictLowerTriQSM(p=a[:, None] * p, q=q, a=transition),
            upper=StrictUpperTriQSM(p=p, q=a[:, None] * q, a=transition),
        )
        return (L.inv() @ scaled).gram().diag.d[self.rank]

    def log_density(self, x: Float[Array, " N"]) -> Float[Array, ""]:
        return _log_density(self, self.matrix.cholesky(), x)

    def plus(self, variance: Float[Array, ""]) -> Quasisep:
        """With something added to the diagonal."""
        more = DiagQSM(jnp.full_like(self.matrix.diag.d, variance))
        return replace(self, matrix=self.matrix + more)

    def draw(self, key: Array) -> Float[Array, " N"]:
        d = self.diagonal()
        root = self.plus(_jitter(d, d.size)).matrix.cholesky()
        return (root @ jax.random.normal(key, d.shape, d.dtype))[self.rank]


Covariance = Dense | Diagonal | Quasisep


def as_covariance(K: Covariance | Float[Array, "N N"]) -> Covariance:
    """A matrix becomes :class:`Dense`; a covariance stays what it is."""
    return K if isinstance(K, Dense | Diagonal | Quasisep) else Dense(K)


def as_matrix(covariance: Covariance) -> Float[Array, "N N"]:
    """A covariance as a matrix."""
    if isinstance(covariance, Dense):
        return covariance.K
    if isinstance(covariance, Diagonal):
        return jnp.diag(covariance.d)
    return covariance.matrix.to_dense()[covariance.rank][:, covariance.rank]


def add_jitter(covariance: Covariance) -> Covariance:
    """Add to the diagonal of a matrix what makes its Cholesky decomposition safe.

    That is ``max(1e-9, 4 N eps)`` times its largest entry, or times 1 if it is zero.
    """
    if isinstance(covariance, Diagonal):
        return covariance
    diagonal = covariance.diagonal()
    N, eps = diagonal.size, jnp.finfo(diagonal.dtype).eps
    largest = jnp.max(diagonal)
    jitter = max(1e-9, 4 * N * float(eps)) * jnp.where(largest > 0, largest, 1)
    if isinstance(covariance, Dense):
        return Dense(covariance.K + jitter * jnp.eye(N, dtype=diagonal.dtype))
    return covariance.plus(jitter)


def _log_density(covariance: Any, root: Any, x: Float[Array, " N"]) -> Float[Array, ""]:
    """Log density of the prior at a deviation from its mean, given the covariance's root."""
    half = covariance.solve_lower(root, x)
    size = x.size * math.log(2 * math.pi)
    return -0.5 * (half @ half + size) - covariance.half_logdet(root)


def _jitter(diagonal: Float[Array, " N"], N: int) -> Float[Array, ""]:
    info = jnp.finfo(diagonal.dtype)
    return 4 * N * info.eps * jnp.max(diagonal) + info.tiny
