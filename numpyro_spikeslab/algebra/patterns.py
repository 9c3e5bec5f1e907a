# SPDX-License-Identifier: Apache-2.0
"""One set of weights given all others: its inclusion patterns, and the slabs under each.

A block has all patterns; a group has two, none and all. The first pattern includes no weight, so
arrays of slabs have S - 1 entries for S patterns.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp

from numpyro_spikeslab.algebra.quantiles import SlabMixtures


def log_prior(patterns: Any, log_odds: Float[Array, "*G b"]) -> Float[Array, "*G S"]:
    """Return the log prior probability of each pattern of independent weights; in a group the first
    has the log odds of the spike and the others have 0."""
    logits = log_odds @ patterns.T
    return logits - logsumexp(logits, axis=-1, keepdims=True)


class SetFactors(NamedTuple):
    """The factors of G sets of b weights, or of one set.

    - **patterns** - probability of each pattern.
    - **linear**, **precision_tril** - ``c`` and ``L``. With ``A = L L^T`` and ``h = L c``, the
      slabs that a pattern includes are Gaussian with the precision ``A_ss`` and the mean
      ``A_ss^-1 h_s``; the others have their prior. In single precision ``A`` itself would not tell
      nearly equal columns apart.
    """

    patterns: Float[Array, "*G S"]
    linear: Float[Array, "*G b"]
    precision_tril: Float[Array, "*G b b"]


class PatternSlabs(NamedTuple):
    """The slabs of a set under each pattern but the first, 0 where they are excluded.

    - **mean**, **root** - the mean, and ``R`` with the covariance ``R^T R``.
    - **log_det** - of ``A_ss``.
    - **deviance** - squared residual of ``c``: ``h^T A^-1 h - h_s^T A_ss^-1 h_s``.
    """

    mean: Float[Array, "T b"]
    root: Float[Array, "T b b"]
    log_det: Float[Array, " T"]
    deviance: Float[Array, " T"]

    @property
    def variance(self) -> Float[Array, "T b"]:
        return jnp.sum(self.root**2, axis=1)


class PatternMoments(NamedTuple):
    """The moments of a set that the bound needs.

    - **loc**, **scale** - mean and standard deviation of each slab given its inclusion.
    - **root** - ``R`` with the covariance ``R^T R`` of ``w``; the covariance itself would lose the
      variance of the sum of weights of nearly equal columns.
    - **log_det** - expected log determinant of ``A_ss``.
    """

    loc: Float[Array, "*G b"]
    scale: Float[Array, "*G b"]
    root: Float[Array, "*G R b"]
    log_det: Float[Array, "*G"]


def slabs_of(
    linear: Float[Array, " b"], precision_tril: Float[Array, "b b"], patterns: Any
) -> PatternSlabs:
    """Solve the least squares of ``c`` on the included rows of ``L``, for each pattern."""
    size = patterns.shape[1]
    if len(patterns) == 2:
        # the only other pattern includes all
        lower, half, residual = precision_tril[None], linear[None], jnp.zeros_like(linear)[None]
    else:
        lower, half, residual = _orthogonalised(linear, precision_tril, patterns[1:])
    identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    root = solve_triangular(lower, identity, lower=True) * patterns[1:, None, :]
    mean = jnp.einsum("sk,skj->sj", half, root)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(lower, axis1=1, axis2=2)), axis=1)
    return PatternSlabs(mean, root, log_det, jnp.sum(residual**2, axis=1))


def _orthogonalised(linear: Any, precision_tril: Any, patterns: Any) -> tuple[Any, Any, Any]:
    """Take Gram and Schmidt's steps for all patterns; return roots of ``A_ss``, ``c``, residuals.

    The residual comes from ``c`` itself: explained squares grow with the number of observations, so
    in single precision their differences would be rounding errors.
    """
    size, excluded = patterns.shape[1], 1 - patterns
    columns = jnp.swapaxes(precision_tril, 0, 1) * patterns[:, None, :]
    residual = jnp.broadcast_to(linear, patterns.shape)
    upper, half = [], []
    steps = np.arange(size)
    for m in range(size):
        length = jnp.sqrt(jnp.sum(columns[:, :, m] ** 2, axis=1) + excluded[:, m])
        q = columns[:, :, m] / length[:, None]
        along = jnp.einsum("sk,skj->sj", q, columns) * (steps > m)
        upper.append(along + length[:, None] * (steps == m))
        half.append(jnp.sum(q * residual, axis=1))
        columns -= q[:, :, None] * along[:, None, :]
        residual -= q * half[-1][:, None]
    return jnp.stack(upper, axis=2), jnp.stack(half, axis=1), residual


class PatternConditional(NamedTuple):
    """A set of weights given everything else: its factors, with logits of the patterns."""

    logits: Float[Array, " S"]
    linear: Float[Array, " b"]
    precision_tril: Float[Array, "b b"]
    slabs: PatternSlabs


def conditional_of(
    features: Float[Array, "b N"],
    residual: Float[Array, " N"],
    precision: Any,
    log_odds: Float[Array, " b"],
    variance: Float[Array, " b"],
    patterns: Any,
) -> PatternConditional:
    """Return the conditional of a set (supplement, eq. 1, for several weights)."""
    root = jnp.sqrt(precision)
    # the prior enters as additional observations
    tall = jnp.concatenate([root * features.T, jnp.diag(1.0 / jnp.sqrt(variance))])
    Q, upper = jnp.linalg.qr(tall)
    sign = jnp.where(jnp.diagonal(upper) < 0, -1, 1)
    linear = sign * (root * residual @ Q[: len(residual)])
    tril = upper.T * sign
    slabs = slabs_of(linear, tril, patterns)
    deviance = slabs.deviance + slabs.log_det + patterns[1:] @ jnp.log(variance)
    deviance = jnp.concatenate([jnp.sum(linear**2)[None], deviance])
    return PatternConditional(log_prior(patterns, log_odds) - 0.5 * deviance, linear, tril, slabs)


def shares_of(probs: Float[Array, " S"], patterns: Any) -> Float[Array, "S-1 b"]:
    """Return the probability of each pattern given the inclusion of a weight; if it is never
    included, equal shares."""
    included = patterns[1:]
    total = probs[1:] @ included
    never = total <= 0
    shares = probs[1:, None] * included / jnp.where(never, 1.0, total)
    return jnp.where(never, included / jnp.sum(included, axis=0), shares)


def moments_of(probs: Float[Array, " S"], slabs: PatternSlabs, patterns: Any) -> PatternMoments:
    """Return the moments of a set; all variances are sums of squares."""
    shares = shares_of(probs, patterns)
    loc = jnp.sum(shares * slabs.mean, axis=0)
    variance = jnp.sum(shares * (slabs.variance + (slabs.mean - loc) ** 2), axis=0)
    mean = probs[1:] @ slabs.mean
    from_mean = jnp.concatenate([-mean[None], slabs.mean - mean]) * jnp.sqrt(probs)[:, None]
    within = (slabs.root * jnp.sqrt(probs[1:])[:, None, None]).reshape(-1, len(loc))
    root = jnp.concatenate([within, from_mean])
    # many patterns have as many rows as a design
    if len(root) > 2 * len(loc):
        root = jnp.linalg.qr(root, mode="r")
    return PatternMoments(loc, jnp.sqrt(variance), root, probs[1:] @ slabs.log_det)


@jax.jit
def stack_moments(factors: SetFactors, patterns: Any) -> PatternMoments:
    """Return the moments of G sets, of blocks one after the other, since patterns may be many."""

    def of_one(one: SetFactors) -> PatternMoments:
        return moments_of(one.patterns, slabs_of(*one[1:], patterns), patterns)

    return jax.vmap(of_one)(factors) if len(patterns) == 2 else lax.map(of_one, factors)


@jax.jit
def stack_mixtures(factors: SetFactors, patterns: Any) -> SlabMixtures:
    """Return the marginals of the weights of G sets."""

    def of_one(one: SetFactors) -> SlabMixtures:
        slabs = slabs_of(*one[1:], patterns)
        shares, scale = shares_of(one.patterns, patterns), jnp.sqrt(slabs.variance)
        return SlabMixtures(one.patterns @ patterns, shares, slabs.mean, scale)

    probs, *parts = lax.map(of_one, factors)
    parts = [jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1) for x in parts]
    return SlabMixtures(jnp.ravel(probs), *parts)


def prior_slabs(scale: Float[Array, "G b"], loc: Any = 0.0) -> tuple[Any, Any]:
    """Return ``c`` and ``L`` of slabs with the precision of their prior, and means ``loc`` in units
    of ``scale``."""
    return loc + jnp.zeros_like(scale), jnp.eye(scale.shape[1]) / scale[:, :, None]


def slabs_given(
    factors: SetFactors, spikes: Float[Array, "G b"], scale: Float[Array, "G b"]
) -> tuple[Float[Array, "G b"], Float[Array, "G b b"]]:
    """Return mean and Cholesky factor of slabs, given patterns; excluded ones have their prior."""
    if factors.patterns.shape[1] == 2:
        # decomposed once for all draws
        mean, tril = jax.vmap(_all_slabs)(*factors[1:], jnp.ones_like(scale), scale)
        prior = jnp.eye(scale.shape[1]) * scale[:, None]
        return mean * spikes, jnp.where(spikes[..., None] > 0, tril, prior)
    return jax.vmap(_all_slabs)(*factors[1:], spikes, scale)


def _all_slabs(linear: Any, precision_tril: Any, spikes: Any, scale: Any) -> tuple[Any, Any]:
    tall = jnp.concatenate([precision_tril.T * spikes, jnp.diag((1 - spikes) / scale)])
    # in reverse order, since the factor's inverse is to be lower triangular
    Q, upper = jnp.linalg.qr(tall[:, ::-1])
    size = len(scale)
    tril = solve_triangular(upper[::-1, ::-1], jnp.eye(size, dtype=upper.dtype), lower=True)
    mean = tril @ (linear @ Q[:size])[::-1]
    return mean, tril * jnp.where(jnp.diagonal(tril) < 0, -1, 1)
