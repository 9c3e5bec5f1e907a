# SPDX-License-Identifier: Apache-2.0
"""Prior covariances of state-space kernels, in O(N); tinygp's take long to import."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Array, Float
from tinygp.kernels import quasisep
from tinygp.solvers.quasisep import core

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.covariance import Covariance, Values, jitter, variances_given


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quasisep(Covariance):
    """A quasiseparable covariance at inputs that ``order`` sorts; ``rank`` is its inverse."""

    matrix: core.SymmQSM
    # (*M, N) each, or their shapes, where a description of a model stands for its arrays
    order: Any
    rank: Any

    @classmethod
    def from_kernel(cls, kernel: quasisep.Quasisep, x: Values) -> Quasisep:
        """Make the covariance of a kernel at inputs."""
        order = jnp.argsort(x)
        return cls(kernel.to_symm_qsm(x[order]), order, jnp.argsort(order))

    def diagonal(self) -> Values:
        return self.matrix.diag.d[self.rank]

    def matvec(self, x: Values) -> Values:
        return (self.matrix @ x[self.order])[self.rank]

    def jittered(self) -> Quasisep:
        noise = core.DiagQSM(jnp.full_like(self.matrix.diag.d, jitter(self.diagonal())))
        return replace(self, matrix=self.matrix + noise)

    def root(self) -> core.LowerTriQSM:
        return self.matrix.cholesky()

    def cholesky(self, a: Values) -> core.LowerTriQSM:
        a = a[self.order]
        p, q, transition = self.matrix.lower
        lower = core.StrictLowerTriQSM(p=a[:, None] * p, q=a[:, None] * q, a=transition)
        return core.SymmQSM(
            diag=core.DiagQSM(1 + a * self.matrix.diag.d * a), lower=lower
        ).cholesky()

    def half_logdet(self, L: core.LowerTriQSM) -> Float[Array, ""]:
        return jnp.sum(jnp.log(L.diag.d))

    def solve_lower(self, L: core.LowerTriQSM, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return L.solve(x[self.order])

    def solve_upper(self, L: core.LowerTriQSM, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return L.transpose().solve(x)[self.rank]

    def times_lower(self, L: core.LowerTriQSM, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return (L @ x)[self.rank]

    def times_upper(self, L: core.LowerTriQSM, x: Float[Array, "N ..."]) -> Float[Array, "N ..."]:
        return L.transpose() @ x[self.order]

    def conditional(self, L: core.LowerTriQSM, a: Values) -> Values:
        a = a[self.order]
        # tinygp's product of a diagonal and a symmetric matrix comes back as symmetric (0.3.1)
        p, q, transition = self.matrix.lower
        scaled = core.SquareQSM(
            diag=core.DiagQSM(a * self.matrix.diag.d),
            lower=core.StrictLowerTriQSM(p=a[:, None] * p, q=q, a=transition),
            upper=core.StrictUpperTriQSM(p=p, q=a[:, None] * q, a=transition),
        )
        inverse = L.inv()
        explained = (inverse @ scaled).gram().diag.d
        inverse_diagonal = (inverse.transpose() @ inverse).diag.d
        variances = variances_given(self.matrix.diag.d, a, explained, inverse_diagonal)
        return variances[self.rank]
