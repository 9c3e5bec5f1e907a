# SPDX-License-Identifier: Apache-2.0
"""One block of weights: its patterns of inclusion, and the Gaussian of its slabs under each.

Given everything else, the pattern of a block and its slabs have a conditional in closed form: each
pattern ``s`` has a Gaussian of its slabs and an evidence.
"""

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp

from numpyro_spikeslab.algebra.quantiles import SlabMixtures

MAX_BLOCK = 10
"""Weights of a block with every pattern; one of b weights has 2**b patterns."""


@lru_cache
def every_pattern(size: int) -> Float[np.ndarray, "S b"]:
    """The patterns of b weights, every subset, in the order of binary numbers."""
    # here and below: types that are the same in either precision, since JAX remembers in which it
    # has seen an array
    return np.array(list(product((0, 1), repeat=size)), np.float32)


def log_prior(patterns: Any, log_odds: Float[Array, "*K b"]) -> Float[Array, "*K S"]:
    """Log prior probability of each pattern, from the log odds of its weights.

    The product of independent spikes.
    """
    logits = log_odds @ patterns.T
    return logits - logsumexp(logits, axis=-1, keepdims=True)


class Stack(NamedTuple):
    """The factors of K blocks of b weights.

    - **patterns** - probability of each pattern.
    - **linear**, **precision_tril** - ``c`` and ``L``: with ``A = L L^T`` and ``h = L c``, the
      slabs that a pattern includes are Gaussian with the precision ``A_ss`` and the mean
      ``A_ss^-1 h_s``; the others have their prior. Of columns that are nearly equal ``A`` itself
      would lose in single precision what tells them apart.
    """

    patterns: Float[Array, "K S"]
    linear: Float[Array, "K b"]
    precision_tril: Float[Array, "K b b"]


class Slabs(NamedTuple):
    """The slabs of a block under each pattern, 0 where they are excluded.

    - **mean**, **root** - the mean, and ``R`` with the covariance ``R^T R``.
    - **log_det** - log determinant of ``A_ss``.
    - **left** - what the pattern leaves of ``c^T c``: ``h^T A^-1 h - h_s^T A_ss^-1 h_s``.
    """

    mean: Float[Array, "S b"]
    root: Float[Array, "S b b"]
    log_det: Float[Array, " S"]
    left: Float[Array, " S"]

    @property
    def variance(self) -> Float[Array, "S b"]:
        return jnp.sum(self.root**2, axis=1)


class Moments(NamedTuple):
    """What the bound needs of a block, or of K.

    - **loc**, **scale** - mean and standard deviation of each slab given its inclusion.
    - **root** - upper triangular ``R`` with the covariance ``R^T R`` of ``w``. Of columns that are
      alike, weights take turns, and what this does to their sum is lost in their covariance.
    - **log_det** - expected log determinant of ``A_ss``.
    """

    loc: Float[Array, "*K b"]
    scale: Float[Array, "*K b"]
    root: Float[Array, "*K b b"]
    log_det: Float[Array, "*K"]


def slabs_of(
    linear: Float[Array, " b"], precision_tril: Float[Array, "b b"], patterns: Any
) -> Slabs:
    """The slabs of a block under each pattern: least squares of ``c`` on the rows of ``L`` that it
    includes, by Gram and Schmidt's steps for all patterns at once.

    What a pattern leaves comes from what is left of ``c``. Differences of the squares that patterns
    explain, which grow with the number of observations, would be rounding in single precision.
    """
    size, excluded = patterns.shape[1], 1 - patterns
    columns = jnp.swapaxes(precision_tril, 0, 1) * patterns[:, None, :]
    left = jnp.broadcast_to(linear, patterns.shape)
    upper, half = [], []
    for m in range(size):
        # the identity where a weight is excluded
        length = jnp.sqrt(jnp.sum(columns[:, :, m] ** 2, axis=1) + excluded[:, m])
        q = columns[:, :, m] / length[:, None]
        along = jnp.einsum("sk,skj->sj", q, columns) * (np.arange(size) > m)
        upper.append(along + length[:, None] * (np.arange(size) == m))
        half.append(jnp.sum(q * left, axis=1))
        columns -= q[:, :, None] * along[:, None, :]
        left -= q * half[-1][:, None]
    lower = jnp.stack(upper, axis=2)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    root = solve_triangular(lower, identity, lower=True) * patterns[:, None, :]
    mean = jnp.einsum("sk,skj->sj", jnp.stack(half, axis=1), root)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(lower, axis1=1, axis2=2)), axis=1)
    return Slabs(mean, root, log_det, jnp.sum(left**2, axis=1))


def shares_of(probs: Float[Array, " S"], patterns: Any) -> Float[Array, "S b"]:
    """Probability of each pattern given the inclusion of a weight; of a weight that is never
    included, all patterns with it are alike."""
    total = probs @ patterns
    never = total <= 0
    share = probs[:, None] * patterns / jnp.where(never, 1.0, total)
    return jnp.where(never, patterns / jnp.sum(patterns, axis=0), share)


def moments_of(probs: Float[Array, " S"], slabs: Slabs, patterns: Any) -> Moments:
    """The moments of a block; all variances are sums of what is not negative."""
    shares = shares_of(probs, patterns)
    loc = jnp.sum(shares * slabs.mean, axis=0)
    variance = jnp.sum(shares * (slabs.variance + (slabs.mean - loc) ** 2), axis=0)
    from_mean = slabs.mean - probs @ slabs.mean
    every = jnp.concatenate([slabs.root, from_mean[:, None]], axis=1)
    every = (jnp.sqrt(probs)[:, None, None] * every).reshape(-1, len(loc))
    root = jnp.linalg.qr(every, mode="r")
    return Moments(loc, jnp.sqrt(variance), root, probs @ slabs.log_det)


def stack_moments(stack: Stack, patterns: Any) -> Moments:
    """The moments of a stack, one block after the other, for patterns are many."""

    def of(one: Stack) -> Moments:
        return moments_of(
            one.patterns, slabs_of(one.linear, one.precision_tril, patterns), patterns
        )

    return lax.map(of, stack)


def prior_slabs(scale: Float[Array, "K b"], loc: Any = 0.0) -> tuple[Any, Any]:
    """``c`` and ``L`` of slabs with the precision of their prior.

    :param loc: their means in units of ``scale``.
    """
    return loc + jnp.zeros_like(scale), jnp.eye(scale.shape[1]) / scale[:, :, None]


def excluded_too(
    stack: Stack, spikes: Float[Array, "K b"], scale: Float[Array, "K b"]
) -> tuple[Float[Array, "K b"], Float[Array, "K b b"]]:
    """Mean and Cholesky factor of the covariance of all slabs of each block, where the excluded
    have their prior.

    :param spikes: a pattern of each block.
    :param scale: standard deviation of the prior.
    """

    def of(linear: Any, precision_tril: Any, spikes: Any, scale: Any) -> Any:
        # in reverse order, since the transpose of the root is an upper triangle
        slabs = slabs_of(linear, precision_tril[::-1], spikes[None, ::-1])
        tril = slabs.root[0].T[::-1, ::-1]
        return slabs.mean[0, ::-1], tril + jnp.diag((1 - spikes) * scale)

    return jax.vmap(of)(stack.linear, stack.precision_tril, spikes, scale)


@jax.jit
def stack_mixtures(stack: Stack, patterns: Any) -> SlabMixtures:
    """The marginals of the weights of a stack, one block after the other."""

    def of(one: Stack) -> SlabMixtures:
        slabs = slabs_of(one.linear, one.precision_tril, patterns)
        shares = shares_of(one.patterns, patterns)
        return SlabMixtures(one.patterns @ patterns, shares, slabs.mean, jnp.sqrt(slabs.variance))

    probs, *parts = lax.map(of, stack)
    parts = [jnp.moveaxis(x, 1, 0).reshape(len(patterns), -1) for x in parts]
    return SlabMixtures(jnp.ravel(probs), *parts)
