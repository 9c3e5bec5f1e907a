# SPDX-License-Identifier: Apache-2.0
r"""Gaussian conditional and marginal likelihood of one latent function.

A latent function :math:`\phi \sim \mathcal{N}(\mu, K)` of ``N`` values meets the Gaussian sites
:math:`\exp(h^\top \phi - \tfrac12 \phi^\top \mathrm{diag}(\alpha) \phi)`, which is all that the
other factors of a linear model (their expectations in variational inference, their draws in a
Gibbs sampler) ever say about it.  Neither :math:`K^{-1}` nor :math:`1/\alpha` is formed: the
covariance may be singular and a site precision zero (a missing value).  Everything goes through

.. math::

    B = I + D^{1/2} K D^{1/2} = L L^\top, \qquad D = \mathrm{diag}(\alpha), \qquad
    \Sigma = K - K D^{1/2} B^{-1} D^{1/2} K .

A covariance is :class:`Dense`, :class:`Diagonal` (white noise, or zero for a deterministic
function) or :class:`Quasisep` (a state-space kernel on one-dimensional inputs, O(N)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
import math
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np
from tinygp.kernels import Kernel, quasisep
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


class Posterior(NamedTuple):
    r"""The conditional :math:`q(\phi) = \mathcal{N}(\mathrm{mean}, \Sigma)`.

    :param mean: ``(N,)``
    :param variance: ``(N,)``, the diagonal of :math:`\Sigma`.
    :param weights: ``(N,)``, :math:`K^{-1} (\mathrm{mean} - \mu)`.
    :param cholesky: the factor :math:`L` of :math:`B`, in the covariance's own representation.
    :param log_evidence: ``log F`` of :func:`log_evidence`.
    :param kl: :math:`\mathrm{KL}(q(\phi) \| p(\phi))`.
    """

    mean: Float[Array, " N"]
    variance: Float[Array, " N"]
    weights: Float[Array, " N"]
    cholesky: Any
    log_evidence: Float[Array, ""]
    kl: Float[Array, ""]


def as_covariance(K: Covariance | Float[Array, "N N"]) -> Covariance:
    """A matrix becomes :class:`Dense`; a covariance stays what it is."""
    return K if isinstance(K, Dense | Diagonal | Quasisep) else Dense(K)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Template:
    """A kernel with parameters to be set.

    :param kernel: a tinygp kernel, or an ``(N, N)`` covariance matrix.
    :param free: which of the kernel's leaves are parameters.
    :param kind: ``"kernel"``, ``"quasisep"`` (on inputs of one dimension), ``"matrix"``,
        ``"white"`` or ``"zero"``.
    """

    kernel: Any
    free: tuple[bool, ...] = field(metadata={"static": True})
    kind: str = field(metadata={"static": True})

    @classmethod
    def of(cls, kernel: Any, X: Any) -> Template:
        """The template of a kernel, whose positive floats are its parameters.

        :param kernel: a tinygp kernel, a matrix, ``"white"`` or ``"zero"``.
        :param X: ``(N,)`` or ``(N, D)``, the inputs.
        """
        if isinstance(kernel, str):
            return cls((), (), kernel)
        if not isinstance(kernel, Kernel):
            return cls(jnp.asarray(kernel), (False,), "matrix")
        free = tuple(_is_parameter(leaf) for leaf in jax.tree.leaves(kernel))
        state_space = isinstance(kernel, quasisep.Quasisep) and jnp.size(X) == jnp.shape(X)[0]
        return cls(kernel, free, "quasisep" if state_space else "kernel")

    @property
    def parameters(self) -> dict[str, Any]:
        """Values of the parameters by the path to them."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.kernel)
        return {
            jax.tree_util.keystr(path, simple=True, separator="_"): jnp.asarray(leaf, float)
            for (path, leaf), free in zip(leaves, self.free, strict=True)
            if free
        }

    def at(self, values: Sequence[Any]) -> Any:
        """The kernel with these values of its parameters."""
        leaves, treedef = jax.tree.flatten(self.kernel)
        rest = iter(values)
        leaves = [next(rest) if free else x for x, free in zip(leaves, self.free, strict=True)]
        return jax.tree.unflatten(treedef, leaves)

    def split(self, theta: Float[Array, " P"]) -> list[Float[Array, ...]]:
        """Values of the parameters from their logs, of which there may be more than needed."""
        shapes = [jnp.shape(x) for x in self.parameters.values()]
        ends = list(accumulate(math.prod(shape) for shape in shapes))
        parts = jnp.split(jnp.exp(theta), ends)[: len(shapes)]
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def covariance(self, values: Sequence[Any], X: Any) -> Covariance:
        """Prior covariance at the inputs, without jitter."""
        N = jnp.shape(X)[0]
        if self.kind == "white":
            return Diagonal(jnp.ones(N))
        if self.kind == "zero":
            return Diagonal(jnp.zeros(N))
        if self.kind == "matrix":
            return Dense(self.kernel)
        if self.kind == "quasisep":
            return Quasisep.from_kernel(self.at(values), jnp.reshape(jnp.asarray(X), N))
        return Dense(self.cross(values, X, X))

    def prior(self, values: Sequence[Any], X: Any, dense: bool) -> Covariance:
        """Prior covariance at the inputs, with its jitter.

        :param dense: whether it must be a matrix, as where functions of several kinds meet.
        """
        covariance = self.covariance(values, X)
        return add_jitter(Dense(as_matrix(covariance)) if dense else covariance)

    def cross(self, values: Sequence[Any], X: Any, X_new: Any) -> Float[Array, "N S"]:
        """Prior covariance between inputs and others.

        :raises ValueError: if all that is known is a matrix.
        """
        X, X_new = jnp.asarray(X, float), jnp.asarray(X_new, float)
        if self.kind in ("white", "zero"):
            return jnp.zeros((X.shape[0], X_new.shape[0]))
        if self.kind == "matrix":
            raise ValueError("A covariance matrix says nothing about new inputs; give a kernel.")
        if isinstance(self.kernel, quasisep.Quasisep):
            # tinygp evaluates them at single numbers only
            X, X_new = (x.ravel() if x.size == x.shape[0] else x for x in (X, X_new))
        return self.at(values)(X, X_new)

    def variance(self, values: Sequence[Any], X: Any) -> Float[Array, " S"]:
        """Prior variance at inputs."""
        if self.kind in ("white", "zero"):
            return jnp.full(jnp.shape(X)[0], 1.0 if self.kind == "white" else 0.0)
        if self.kind == "matrix":
            return jnp.diagonal(self.kernel)
        x = jnp.asarray(X, float)
        kernel = self.at(values)
        if isinstance(self.kernel, quasisep.Quasisep) and x.size == x.shape[0]:
            x = x.ravel()
        return jax.vmap(kernel.evaluate)(x, x)


def _is_parameter(leaf: Any) -> bool:
    value = np.asarray(leaf)
    return np.issubdtype(value.dtype, np.floating) and value.size > 0 and bool(np.all(value > 0))


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


def as_matrix(covariance: Covariance) -> Float[Array, "N N"]:
    """A covariance as a matrix."""
    if isinstance(covariance, Dense):
        return covariance.K
    if isinstance(covariance, Diagonal):
        return jnp.diag(covariance.d)
    return covariance.matrix.to_dense()[covariance.rank][:, covariance.rank]


def condition(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mu: Float[Array, " N"] | float = 0.0,
) -> Posterior:
    r"""Conditional of a latent function given its sites.

    :param covariance: prior covariance.
    :param alpha: ``(N,)``, site precisions, at least zero.
    :param h: ``(N,)``, site linear terms.
    :param mu: prior mean.
    """
    a = jnp.sqrt(alpha)
    L: Any = covariance.cholesky(a)
    shifted = h - alpha * mu
    weights = _solve(covariance, L, alpha, shifted)
    deviation = covariance.matvec(weights)
    variance = jnp.maximum(covariance.diagonal() - covariance.explained(L, a), 0)
    half_logdet = covariance.half_logdet(L)
    # tr(B^-1) - N = -tr(D Sigma)
    kl = 0.5 * (deviation @ weights - alpha @ variance) + half_logdet
    log_f = 0.5 * shifted @ deviation - half_logdet + _at_prior_mean(alpha, h, mu)
    return Posterior(mu + deviation, variance, weights, L, log_f, kl)


def log_evidence(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mu: Float[Array, " N"] | float = 0.0,
) -> Float[Array, ""]:
    r"""Log of the integral of the sites under the prior (the marginalised step, supplement 1.3).

    .. math::

        \log F = \log \int e^{h^\top\phi - \frac12 \phi^\top D \phi}
            \mathcal{N}(\phi | \mu, K) \, d\phi

    :param covariance: prior covariance.
    :param alpha: ``(N,)``, site precisions, at least zero.
    :param h: ``(N,)``, site linear terms.
    :param mu: prior mean.
    """
    L: Any = covariance.cholesky(jnp.sqrt(alpha))
    shifted = h - alpha * mu
    deviation = covariance.matvec(_solve(covariance, L, alpha, shifted))
    return 0.5 * shifted @ deviation - covariance.half_logdet(L) + _at_prior_mean(alpha, h, mu)


def predict(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    posterior: Posterior,
    K_star: Float[Array, "S N"],
    k_star: Float[Array, " S"],
    mu_star: Float[Array, " S"] | float = 0.0,
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:
    """Mean and variance of the function at new inputs.

    :param covariance: prior covariance at the training inputs.
    :param alpha: ``(N,)``, the site precisions that gave ``posterior``.
    :param posterior: the result of :func:`condition`.
    :param K_star: ``(S, N)``, prior covariance between new and training inputs.
    :param k_star: ``(S,)``, prior variance at the new inputs.
    :param mu_star: prior mean at the new inputs.
    """
    half = covariance.solve_lower(posterior.cholesky, jnp.sqrt(alpha)[:, None] * K_star.T)
    variance = jnp.maximum(k_star - jnp.sum(half**2, axis=0), 0)
    return mu_star + K_star @ posterior.weights, variance


def sample(
    key: Array,
    covariance: Covariance,
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mu: Float[Array, " N"] | float = 0.0,
) -> Float[Array, " N"]:
    r"""A joint draw from the conditional, by Matheron's rule.

    With :math:`f \sim \mathcal{N}(0, K)` and :math:`\epsilon \sim \mathcal{N}(0, I)`, the vector
    :math:`f + \Sigma (h - D (\mu + f) - D^{1/2} \epsilon)` has mean ``mean - mu`` and covariance
    :math:`\Sigma`.

    :param key: random key.
    :param covariance: prior covariance.
    :param alpha: ``(N,)``, site precisions, at least zero.
    :param h: ``(N,)``, site linear terms.
    :param mu: prior mean.
    """
    key_prior, key_site = jax.random.split(key)
    a = jnp.sqrt(alpha)
    L = covariance.cholesky(a)
    f = mu + covariance.draw(key_prior)
    noise = a * jax.random.normal(key_site, alpha.shape, alpha.dtype)
    return f + covariance.matvec(_solve(covariance, L, alpha, h - alpha * f - noise))


def _solve(
    covariance: Covariance, L: Any, alpha: Float[Array, " N"], h: Float[Array, " N"]
) -> Float[Array, " N"]:
    """Solve ``(I + D K) x = h``, so that ``K x = Sigma h``."""
    a = jnp.sqrt(alpha)

    def direct(r):
        half = covariance.solve_lower(L, a * covariance.matvec(r))
        return r - a * covariance.solve_upper(L, half)

    x = direct(h)
    # The subtraction above cancels when D K is large; one step of refinement restores the digits.
    return x + direct(h - x - alpha * covariance.matvec(x))


def _log_density(covariance: Any, root: Any, x: Float[Array, " N"]) -> Float[Array, ""]:
    """Log density of the prior at a deviation from its mean, given the covariance's root."""
    half = covariance.solve_lower(root, x)
    size = x.size * math.log(2 * math.pi)
    return -0.5 * (half @ half + size) - covariance.half_logdet(root)


def _at_prior_mean(
    alpha: Float[Array, " N"], h: Float[Array, " N"], mu: Float[Array, " N"] | float
) -> Float[Array, ""]:
    return jnp.sum(mu * (h - 0.5 * alpha * mu))


def _jitter(diagonal: Float[Array, " N"], N: int) -> Float[Array, ""]:
    info = jnp.finfo(diagonal.dtype)
    return 4 * N * info.eps * jnp.max(diagonal) + info.tiny
