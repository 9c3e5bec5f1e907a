# SPDX-License-Identifier: Apache-2.0
r"""Gaussian conditional and marginal likelihood of one latent function.

The likelihood of a latent function :math:`\phi \sim \mathcal{N}(\mu, K)` of ``N`` values, given the
other factors of a linear model (or their expectations), are the Gaussian sites
:math:`\exp(h^\top \phi - \tfrac12 \phi^\top \mathrm{diag}(\alpha) \phi)`. Neither :math:`K^{-1}`
nor :math:`1/\alpha` is formed, so the covariance may be singular and a site precision zero (a
missing value). All computations use

.. math::

    B = I + D^{1/2} K D^{1/2} = L L^\top, \qquad D = \mathrm{diag}(\alpha), \qquad
    \Sigma = K - K D^{1/2} B^{-1} D^{1/2} K .

Sites may be a million times as precise as the prior, since a precision is a sum over all tasks.
In single precision, that difference and the logarithm of the sites then lose all digits. So
:math:`\Sigma` is computed without it, and sites are relative to their largest value: with
:math:`g = D^{-1/2} h`, and :math:`h_0` the entries of :math:`h` where :math:`\alpha` is zero,

.. math::

    \exp(-\tfrac12 \| D^{1/2} \phi - g \|^2 + h_0^\top \phi) .

In all functions ``covariance`` and ``mu`` belong to the prior; ``alpha``, at least zero, and ``h``
are the sites' precisions and linear terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.covariance import Covariance


class FunctionPosterior(NamedTuple):
    r"""The conditional :math:`q(\phi) = \mathcal{N}(\mathrm{mean}, \Sigma)`.

    :param mean: ``(N,)``
    :param variance: ``(N,)``, the diagonal of :math:`\Sigma`.
    :param weights: ``(N,)``, :math:`K^{-1} (\mathrm{mean} - \mu)`.
    :param cholesky: the factor :math:`L` of :math:`B`, in the covariance's own representation.
    :param kl: :math:`\mathrm{KL}(q(\phi) \| p(\phi))`.
    """

    mean: Float[Array, " N"]
    variance: Float[Array, " N"]
    weights: Float[Array, " N"]
    cholesky: Any
    kl: Float[Array, ""]


def condition(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mu: Float[Array, " N"] | float = 0.0,
    L: Any = None,
) -> FunctionPosterior:
    """Conditional of a latent function given its sites.

    :param L: the factor of ``B``, if it has been computed.
    """
    a = jnp.sqrt(alpha)
    L = covariance.cholesky(a) if L is None else L
    weights, _ = _solve(covariance, L, alpha, h, mu)
    deviation = covariance.matvec(weights)
    variance = covariance.conditional(L, a)
    # tr(B^-1) - N = -tr(D Sigma)
    kl = 0.5 * (deviation @ weights - alpha @ variance) + covariance.half_logdet(L)
    return FunctionPosterior(mu + deviation, variance, weights, L, kl)


def log_evidence(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mu: Float[Array, " N"] | float = 0.0,
) -> tuple[Float[Array, ""], Any]:
    r"""Log of the integral of the sites under the prior (the marginalised step, supplement 1.3).

    .. math::

        \log F = \log \int e^{-\frac12 \| D^{1/2} \phi - g \|^2 + h_0^\top \phi}
            \mathcal{N}(\phi | \mu, K) \, d\phi

    The evidence of the sites as given is larger by :math:`\tfrac12 g^\top g`, which does not depend
    on the prior.

    :return: also the factor :math:`L` of :math:`B`.
    """
    L: Any = covariance.cholesky(jnp.sqrt(alpha))
    return _solve(covariance, L, alpha, h, mu)[1], L


def log_density(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    x: Float[Array, " N"],
    mu: Float[Array, " N"] | float = 0.0,
) -> Float[Array, ""]:
    r"""Log density of the conditional, whose precision is :math:`K^{-1} + D`, at ``x``.

    :param covariance: positive definite to rounding.
    """
    L: Any = covariance.cholesky(jnp.sqrt(alpha))
    mean = mu + covariance.matvec(_solve(covariance, L, alpha, h, mu)[0])
    prior = covariance.log_density(x - mean)
    return prior - 0.5 * alpha @ (x - mean) ** 2 + covariance.half_logdet(L)


def log_sites(
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mean: Float[Array, " N"],
    variance: Float[Array, " N"] | float = 0.0,
) -> Float[Array, ""]:
    """Expectation of the log of the sites, relative to their largest value.

    :param mean: of the function.
    :param variance: of the function; zero if its values are known.
    """
    g, h_0 = _scaled(alpha, h)
    return h_0 @ mean - 0.5 * jnp.sum((jnp.sqrt(alpha) * mean - g) ** 2 + alpha * variance)


def predict(
    covariance: Covariance,
    alpha: Float[Array, " N"],
    posterior: FunctionPosterior,
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


def extend(
    covariance: Covariance,
    joint: Covariance,
    deviation: Float[Array, " N"],
    cross: Float[Array, "N S"],
) -> tuple[Float[Array, " S"], Float[Array, "S S"]]:
    r"""The function at S new inputs given its values at N old ones.

    The values have the prior :math:`K + \epsilon I` with its jitter. With the weights
    :math:`W = (K + \epsilon I)^{-1} K_*^\top` and the root :math:`R` of the joint prior with its
    jitter, the covariance is :math:`Z^\top Z` with

    .. math::

        Z = R^\top \begin{pmatrix} -W \\ I \end{pmatrix} .

    Nothing is subtracted from it, so rounding cannot make it indefinite, and an error of :math:`W`
    changes it by its square only.

    :param covariance: prior covariance at the old inputs, without its jitter.
    :param joint: prior covariance at the old and then the new inputs, without its jitter.
    :param deviation: ``(N,)``, values less their prior mean.
    :param cross: ``(N, S)``, :math:`K_*^\top`, prior covariance between old and new inputs.
    :return: deviation of the means from the prior mean, shape ``(S,)``, and the lower triangular
        root of the covariance, shape ``(S, S)``.
    """
    noisy, noisy_joint = covariance.jittered(), joint.jittered()
    L: Any = noisy.root()
    W = noisy.solve_upper(L, noisy.solve_lower(L, cross))
    contrast = jnp.concatenate([-W, jnp.eye(cross.shape[1], dtype=cross.dtype)])
    Z = noisy_joint.times_upper(noisy_joint.root(), contrast)
    return W.T @ deviation, jnp.linalg.cholesky(Z.T @ Z)


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
    """
    key_prior, key_site = jax.random.split(key)
    a = jnp.sqrt(alpha)
    L = covariance.cholesky(a)
    f = mu + covariance.draw(key_prior)
    noise = a * jax.random.normal(key_site, alpha.shape, alpha.dtype)
    return f + covariance.matvec(_solve(covariance, L, alpha, h - noise, f)[0])


def _solve(covariance: Covariance, L: Any, alpha: Any, h: Any, mu: Any) -> tuple[Any, Any]:
    r"""Solve :math:`(I + D K) x = h - D \mu`; :math:`K x` is the mean less that of the prior.

    Returns x and the value of :func:`log_evidence`.

    With :math:`u = g - D^{1/2} (\mu + K h_0)`,

    .. math::

        x = h_0 + D^{1/2} B^{-1} u, \qquad
        \log F = -\tfrac12 u^\top B^{-1} u - \tfrac12 \log |B|
            + h_0^\top (\mu + \tfrac12 K h_0) .
    """
    a = jnp.sqrt(alpha)
    g, h_0 = _scaled(alpha, h)
    shift = covariance.matvec(h_0)
    half = covariance.solve_lower(L, g - a * (mu + shift))
    log_f = h_0 @ (mu + 0.5 * shift) - 0.5 * jnp.sum(half**2) - covariance.half_logdet(L)
    return h_0 + a * covariance.solve_upper(L, half), log_f


def _scaled(alpha: Float[Array, " N"], h: Float[Array, " N"]) -> tuple[Any, Any]:
    """``g`` and ``h_0``."""
    positive = alpha > 0
    g = jnp.where(positive, h, 0) / jnp.sqrt(jnp.where(positive, alpha, 1))
    return g, jnp.where(positive, 0, h)
