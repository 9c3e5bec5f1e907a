# SPDX-License-Identifier: Apache-2.0
r"""Gaussian conditional and marginal likelihood of one latent function.

The likelihood of a latent function :math:`\phi \sim \mathcal{N}(\mu, K)` of ``N`` values, given the
other factors of a linear model (or their expectations), are the Gaussian sites
:math:`\exp(h^\top \phi - \tfrac12 \phi^\top \mathrm{diag}(\alpha) \phi)`. Neither :math:`K^{-1}`
nor :math:`1/\alpha` is formed, so the covariance may be singular and a site precision zero (a
missing value). With :math:`D = \mathrm{diag}(\alpha)`, all computations use

.. math::

    B = I + D^{1/2} K D^{1/2} = L L^\top, \qquad \Sigma = K - K D^{1/2} B^{-1} D^{1/2} K .

Sites may be a million times as precise as the prior, since a precision is a sum over all tasks; in
single precision, that difference and the logarithm of the sites then lose all digits. So
:math:`\Sigma` is computed without it, and sites are relative to their largest value: with
:math:`g = D^{-1/2} h`, and :math:`h_0` the entries of :math:`h` where :math:`\alpha` is zero,

.. math::

    \exp(-\tfrac12 \| D^{1/2} \phi - g \|^2 + h_0^\top \phi) .

In all functions ``covariance`` and ``mu`` belong to the prior, and ``alpha`` and ``h`` to the
sites.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.covariance import Covariance, Values


class FunctionPosterior(NamedTuple):
    r"""The conditional :math:`q(\phi) = \mathcal{N}(\mathrm{mean}, \Sigma)`.

    - **variance** - the diagonal of :math:`\Sigma`.
    - **weights** - :math:`K^{-1} (\mathrm{mean} - \mu)`.
    - **cholesky** - the factor :math:`L` of :math:`B`.
    - **kl** - :math:`\mathrm{KL}(q(\phi) \| p(\phi))`.
    """

    mean: Values
    variance: Values
    weights: Values
    cholesky: Any
    kl: Float[Array, ""]


def condition(
    covariance: Covariance, alpha: Values, h: Values, mu: Values | float = 0.0, L: Any = None
) -> FunctionPosterior:
    """Compute the conditional of a latent function, from the factor ``L`` of ``B`` if given."""
    weights, _, L = _solve(covariance, alpha, h, mu, L)
    deviation = covariance.matvec(weights)
    variance = covariance.conditional(L, jnp.sqrt(alpha))
    # tr(B^-1) - N = -tr(D Sigma)
    kl = 0.5 * (deviation @ weights - alpha @ variance) + covariance.half_logdet(L)
    return FunctionPosterior(mu + deviation, variance, weights, L, kl)


def log_evidence(
    covariance: Covariance, alpha: Values, h: Values, mu: Values | float = 0.0
) -> tuple[Float[Array, ""], Any]:
    """Compute the log of the integral of the sites under the prior (supplement 1.3), and ``L``."""
    return _solve(covariance, alpha, h, mu)[1:]


def log_density(
    covariance: Covariance, alpha: Values, h: Values, x: Values, mu: Values | float = 0.0
) -> Float[Array, ""]:
    r"""Compute the log density of the conditional; :math:`K` is positive definite to rounding."""
    weights, _, L = _solve(covariance, alpha, h, mu)
    mean = mu + covariance.matvec(weights)
    root: Any = covariance.root()
    half = covariance.solve_lower(root, x - mean)
    squares = half @ half + alpha @ (x - mean) ** 2 + x.size * math.log(2 * math.pi)
    return covariance.half_logdet(L) - covariance.half_logdet(root) - 0.5 * squares


def log_sites(alpha: Values, h: Values, mean: Values, variance: Values) -> Float[Array, ""]:
    """Compute the expectation of the log of the sites at these moments of the function."""
    g, h_0 = _scaled(alpha, h)
    return h_0 @ mean - 0.5 * jnp.sum((jnp.sqrt(alpha) * mean - g) ** 2 + alpha * variance)


def predict(
    covariance: Covariance,
    alpha: Values,
    posterior: FunctionPosterior,
    K_star: Float[Array, "S N"],
    k_star: Float[Array, " S"],
    mu_star: Float[Array, " S"] | float = 0.0,
) -> tuple[Float[Array, " S"], Float[Array, " S"]]:
    """Compute mean and variance at new inputs of prior variance ``k_star``, mean ``mu_star``."""
    half = covariance.solve_lower(posterior.cholesky, jnp.sqrt(alpha)[:, None] * K_star.T)
    variance = jnp.maximum(k_star - jnp.sum(half**2, axis=0), 0)
    return mu_star + K_star @ posterior.weights, variance


def extend(
    covariance: Covariance, joint: Covariance, deviation: Values, cross: Float[Array, "N S"]
) -> tuple[Float[Array, " S"], Float[Array, "S S"]]:
    r"""Condition the function at new inputs on its values at old ones.

    With the weights :math:`W = (K + \epsilon I)^{-1} K_*^\top` and the root :math:`R` of the joint
    prior, both with jitter, the covariance is :math:`Z^\top Z` with

    .. math::

        Z = R^\top \begin{pmatrix} -W \\ I \end{pmatrix} .

    Rounding cannot make it indefinite, and an error of :math:`W` changes it by its square only.

    :param joint: prior covariance at the old and then the new inputs.
    :param cross: :math:`K_*^\top`, prior covariance between old and new inputs.
    :return: deviation of the means from the prior mean, and the lower root of the covariance.
    """
    noisy, noisy_joint = covariance.jittered(), joint.jittered()
    L: Any = noisy.root()
    W = noisy.solve_upper(L, noisy.solve_lower(L, cross))
    contrast = jnp.concatenate([-W, jnp.eye(cross.shape[1], dtype=cross.dtype)])
    Z = noisy_joint.times_upper(noisy_joint.root(), contrast)
    return W.T @ deviation, jnp.linalg.cholesky(Z.T @ Z)


def sample(
    key: Array, covariance: Covariance, alpha: Values, h: Values, mu: Values | float = 0.0
) -> Values:
    r"""Draw from the conditional by Matheron's rule.

    It is :math:`f + \Sigma (h - D f - D^{1/2} \epsilon)` with :math:`f \sim \mathcal{N}(\mu, K)`
    and :math:`\epsilon \sim \mathcal{N}(0, I)`.
    """
    key_prior, key_site = jax.random.split(key)
    f = mu + covariance.draw(key_prior)
    noise = jnp.sqrt(alpha) * jax.random.normal(key_site, alpha.shape, alpha.dtype)
    return f + covariance.matvec(_solve(covariance, alpha, h - noise, f)[0])


def _solve(
    covariance: Covariance, alpha: Values, h: Values, mu: Any, L: Any = None
) -> tuple[Values, Float[Array, ""], Any]:
    r"""Solve :math:`(I + D K) x = h - D \mu`; also return :math:`\log F` and :math:`L`.

    With :math:`u = g - D^{1/2} (\mu + K h_0)`,

    .. math::

        x = h_0 + D^{1/2} B^{-1} u, \qquad
        \log F = -\tfrac12 u^\top B^{-1} u - \tfrac12 \log |B|
            + h_0^\top (\mu + \tfrac12 K h_0) .
    """
    a = jnp.sqrt(alpha)
    L = covariance.cholesky(a) if L is None else L
    g, h_0 = _scaled(alpha, h)
    shift = covariance.matvec(h_0)
    half = covariance.solve_lower(L, g - a * (mu + shift))
    log_f = h_0 @ (mu + 0.5 * shift) - 0.5 * jnp.sum(half**2) - covariance.half_logdet(L)
    return h_0 + a * covariance.solve_upper(L, half), log_f, L


def _scaled(alpha: Values, h: Values) -> tuple[Values, Values]:
    positive = alpha > 0
    g = jnp.where(positive, h, 0) / jnp.sqrt(jnp.where(positive, alpha, 1))
    return g, jnp.where(positive, 0, h)
