# SPDX-License-Identifier: Apache-2.0
"""Blocks of weights with one joint factor: a mixture over patterns of inclusion of Gaussians.

Given everything else, the pattern of a block and its slabs have a conditional in closed form: each
pattern ``s`` has a Gaussian of its slabs and an evidence. Beside it all other weights are
independent pairs, the paired mean field. Arrays in, arrays out: this module knows no NumPyro.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import lax, nn, random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp, ndtr, ndtri, xlogy

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.pairs import (
    Conditional,
    Design,
    Prior,
    expectation,
    feature_squares,
    sweep,
)

MAX_BLOCK = 10
"""Weights of a block with every pattern; one of b weights has 2**b patterns."""


@lru_cache
def every_pattern(size: int) -> Float[np.ndarray, "S b"]:
    """The patterns of b weights, every subset, in the order of binary numbers."""
    # here and below: types that are the same in either precision, since JAX remembers in which it
    # has seen an array
    return np.array(list(product((0, 1), repeat=size)), np.float32)


@dataclass(frozen=True)
class Blocks:
    """A partition of P weights; hashable.

    - **members** - the weights of each block, numbers from 0 to P - 1, each in one block.

    Blocks of one weight are its *singles*, those of equal size a *stack*: one array operation
    serves a stack, and a thousand singles beside one block of 8 cost nothing more.
    """

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def completed(cls, sets: Any, size: int) -> "Blocks":
        """These sets, and each other of P weights alone."""
        members = tuple(tuple(int(m) for m in one) for one in sets)
        alone = sorted(set(range(size)) - {m for one in members for m in one})
        return cls(members + tuple((m,) for m in alone))

    @cached_property
    def size(self) -> int:
        """P."""
        return sum(map(len, self.members))

    @cached_property
    def singles(self) -> np.ndarray:
        """The weights without a block."""
        return np.array([one[0] for one in self.members if len(one) == 1], np.int32)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of stacks, in order."""
        return tuple(sorted({len(one) for one in self.members} - {1}))

    @cached_property
    def stacks(self) -> tuple[np.ndarray, ...]:
        """The weights of each stack, (K, b)."""
        return tuple(
            np.array([x for x in self.members if len(x) == b], np.int32) for b in self.sizes
        )

    @cached_property
    def patterns(self) -> tuple[np.ndarray, ...]:
        """The patterns of a block of each stack, (S, b)."""
        return tuple(every_pattern(size) for size in self.sizes)

    @cached_property
    def _places(self) -> np.ndarray:
        order = np.concatenate([self.singles, *(stack.ravel() for stack in self.stacks)])
        return np.argsort(order).astype(np.int32)

    def flat(self, singles: Any, stacks: Any) -> Float[Array, " P"]:
        """Numbers of the singles, and of each stack, in the order of the weights."""
        return jnp.concatenate([singles, *map(jnp.ravel, stacks)])[self._places]

    def cut(self, x: Float[Array, " P"]) -> tuple[Any, list[Any]]:
        """The inverse of :meth:`flat`."""
        return x[self.singles], [x[stack] for stack in self.stacks]


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
    - **covariance** - of ``w``.
    - **log_det** - expected log determinant of ``A_ss``.
    """

    loc: Float[Array, "*K b"]
    scale: Float[Array, "*K b"]
    covariance: Float[Array, "*K b b"]
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
    root = jnp.sqrt(probs)[:, None, None] * slabs.root
    within = jnp.einsum("ski,skj->ij", root, root)
    covariance = within + jnp.einsum("s,si,sj->ij", probs, from_mean, from_mean)
    return Moments(loc, jnp.sqrt(variance), covariance, probs @ slabs.log_det)


def stack_moments(stack: Stack, patterns: Any) -> Moments:
    """The moments of a stack, one block after the other, for patterns are many."""

    def of(one: Stack) -> Moments:
        return moments_of(
            one.patterns, slabs_of(one.linear, one.precision_tril, patterns), patterns
        )

    return lax.map(of, stack)


@jax.tree_util.register_pytree_node_class
class BlockMeanField:
    """``q(w_tilde, s)`` of blocks, of which those of one weight are independent pairs.

    - **blocks** - which weights stand together.
    - **singles** - the pairs without a block.
    - **stacks** - the other factors, by size. They tell all but the prior of excluded slabs.
    - **moments** - of the stacks, from :meth:`of`; they follow from them.
    """

    def __init__(self, blocks: Blocks, singles: Any, stacks: Any, moments: Any) -> None:
        self.blocks, self.singles = blocks, singles
        self.stacks, self.moments = stacks, moments

    @classmethod
    def of(
        cls, blocks: Blocks, singles: PairedMeanField, stacks: tuple[Stack, ...]
    ) -> "BlockMeanField":
        """With the moments of its stacks."""
        each = zip(stacks, blocks.patterns, strict=True)
        return cls(blocks, singles, stacks, tuple(stack_moments(*one) for one in each))

    def tree_flatten(self):
        return (self.singles, self.stacks, self.moments), self.blocks

    @classmethod
    def tree_unflatten(cls, blocks, parts):
        return cls(blocks, *parts)

    def _flat(self, singles: Any, stacks: Any) -> Float[Array, " P"]:
        return self.blocks.flat(singles, tuple(stacks))

    @property
    def _inclusion(self) -> list[Any]:
        each = zip(self.stacks, self.blocks.patterns, strict=True)
        return [stack.patterns @ patterns for stack, patterns in each]

    @property
    def probs(self) -> Float[Array, " P"]:
        """Marginal inclusion probabilities ``gamma``."""
        return self._flat(self.singles.probs, self._inclusion)

    @property
    def loc(self) -> Float[Array, " P"]:
        """``mu``, mean of each slab given its inclusion."""
        return self._flat(self.singles.loc, (one.loc for one in self.moments))

    @property
    def scale(self) -> Float[Array, " P"]:
        """Standard deviation of each slab given its inclusion."""
        return self._flat(self.singles.scale, (one.scale for one in self.moments))

    @property
    def mean(self) -> Float[Array, " P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    @property
    def variance(self) -> Float[Array, " P"]:
        """``<w^2> - <w>^2``."""
        diagonals = (jnp.diagonal(x.covariance, axis1=1, axis2=2) for x in self.moments)
        return self._flat(self.singles.variance, diagonals)

    # The sweep

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["BlockMeanField", Float[Array, " N"]]:
        """Update every pair without a block, then every block, in turn. The residual passed and
        returned is that of ``<w>``."""
        singles = self.singles
        if len(self.blocks.singles):
            residual, singles = self._sweep_singles(design, residual, precision, prior, temperature)
        # without a copy that leaves out what pads the last block of the design
        rows = design.rows.reshape(-1, design.rows.shape[-1])
        found = []
        means, log_odds, variances = (
            self.blocks.cut(x)[1] for x in (self.mean, prior.log_odds, prior.variance)
        )
        for members, patterns, *of_blocks in zip(
            self.blocks.stacks, self.blocks.patterns, means, log_odds, variances, strict=True
        ):
            visit = partial(_visit, rows, patterns, precision, temperature)
            residual, new = lax.scan(visit, residual, (members, *of_blocks))
            found.append(new)
        stacks, moments = tuple(x for x, _ in found), tuple(x for _, x in found)
        return BlockMeanField(self.blocks, singles, stacks, moments), residual

    def _sweep_singles(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple[Any, PairedMeanField]:
        """The sweep of the paired mean field, in which members of blocks stay what they are."""
        alone, put = self.blocks.singles, expectation(temperature)
        mean = self.mean
        is_alone = jnp.zeros_like(mean).at[alone].set(1.0)

        def put_alone(pair: Conditional, known: Any) -> Any:
            return jnp.where(known[0] > 0, put(pair, None), known[1])

        known = (is_alone, mean)
        residual, pair = sweep(design, residual, mean, precision, prior, put_alone, noise=known)
        probs = nn.sigmoid(pair.logit / temperature)
        every = PairedMeanField(probs, pair.loc, jnp.sqrt(pair.variance))
        return residual, jax.tree.map(lambda x: x[alone], every)

    # The bound

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        squares = feature_squares(design, self.blocks.size)[self.blocks.singles]
        rows = design.rows.reshape(-1, design.rows.shape[-1])
        total = squares @ self.singles.variance
        for members, moments in zip(self.blocks.stacks, self.moments, strict=True):
            own = rows[members]
            total += jnp.sum(jnp.einsum("kbn,kcn->kbc", own, own) * moments.covariance)
        return total

    def predictor_variances(self, rows: Float[Array, "P N"]) -> Float[Array, " N"]:
        """Variance of ``D w`` at each observation of an unwhitened design."""
        total = self.singles.variance @ rows[self.blocks.singles] ** 2
        for members, moments in zip(self.blocks.stacks, self.moments, strict=True):
            own = rows[members]
            total += jnp.einsum("kbn,kbc,kcn->n", own, moments.covariance, own)
        return total

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        return self.probs, self.probs * (self.loc**2 + self.scale**2)

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde, s) || p)``."""
        blocks = self.blocks
        (alone_odds, log_odds), (alone_variance, variances) = map(blocks.cut, prior)
        total = self.singles.divergence(Prior(alone_odds, alone_variance))
        every = zip(
            self.stacks, self.moments, blocks.patterns, self._inclusion, log_odds, variances,
            strict=True,
        )  # fmt: skip
        for stack, moments, patterns, probs, odds, variance in every:
            q = stack.patterns
            total += jnp.sum(xlogy(q, q) - q * log_prior(patterns, odds))
            second = (moments.loc**2 + moments.scale**2) / variance
            slabs = jnp.sum(probs * (second - 1.0 + jnp.log(variance)), axis=1)
            total += 0.5 * jnp.sum(slabs + moments.log_det)
        return total

    # Starts

    def random_start(self, key: Array, scale: Float[Array, " P"]) -> "BlockMeanField":
        """Another start, as :meth:`PairedMeanField.random_start`: independent spikes."""
        key_probs, key_loc, key_singles = random.split(key, 3)
        blocks = self.blocks
        alone, scales = blocks.cut(scale)
        logits = blocks.cut(random.logistic(key_probs, scale.shape, scale.dtype))[1]
        locs = blocks.cut(random.normal(key_loc, scale.shape, scale.dtype))[1]
        stacks = tuple(
            Stack(jnp.exp(log_prior(patterns, logit)), *prior_slabs(own, loc))
            for patterns, logit, loc, own in zip(blocks.patterns, logits, locs, scales, strict=True)
        )
        return BlockMeanField.of(blocks, self.singles.random_start(key_singles, alone), stacks)


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


def _visit(
    rows: Float[Array, "P N"],
    patterns: Any,
    precision: Any,
    temperature: Any,
    residual: Float[Array, " N"],
    block: tuple[Any, Any, Any, Any],
) -> tuple[Float[Array, " N"], tuple[Stack, Moments]]:
    """Update one block; carries the residual of ``<w>``."""
    members, mean, log_odds, variance = block
    own = rows[members]
    # the prior counts as observations
    tall = jnp.concatenate([jnp.sqrt(precision) * own.T, jnp.diag(1.0 / jnp.sqrt(variance))])
    Q, upper = jnp.linalg.qr(tall)
    sign = jnp.where(jnp.diagonal(upper) < 0, -1, 1)
    linear = sign * (jnp.sqrt(precision) * (residual + mean @ own) @ Q[: len(residual)])
    tril = upper.T * sign
    slabs = slabs_of(linear, tril, patterns)
    evidence = -0.5 * (slabs.left + slabs.log_det + patterns @ jnp.log(variance))
    probs = nn.softmax((log_prior(patterns, log_odds) + evidence) / temperature)
    moments = moments_of(probs, slabs, patterns)
    residual += (mean - probs @ patterns * moments.loc) @ own
    return residual, (Stack(probs, linear, tril), moments)


# Quantiles


def quantiles(
    stack: Stack, patterns: Any, levels: Float[Array, " Q"]
) -> tuple[Float[Array, "Q K b"], Float[Array, "Q K b"]]:
    """Quantiles of the weights of a stack, and of their slabs given inclusion."""

    def of(one: Stack) -> Any:
        slabs = slabs_of(one.linear, one.precision_tril, patterns)
        scale = jnp.sqrt(slabs.variance)
        probs = one.patterns @ patterns
        at = jnp.where(patterns > 0, -slabs.mean / jnp.where(patterns > 0, scale, 1.0), 0.0)
        shares = shares_of(one.patterns, patterns)
        below = probs * jnp.sum(shares * ndtr(at), axis=0)
        q = levels[:, None]
        in_slab = jnp.where(q < below, q, q - (1 - probs)) / jnp.where(probs > 0, probs, 1.0)
        zero = (q >= below) & (q <= below + 1 - probs)
        components = shares, slabs.mean, scale
        weight = _mixture_icdf(*components, jnp.clip(jnp.where(zero, 0.5, in_slab), 0.0, 1.0))
        slab = _mixture_icdf(*components, jnp.broadcast_to(q, weight.shape))
        return jnp.where(zero, 0.0, weight), slab

    weight, slab = lax.map(of, stack)
    return jnp.moveaxis(weight, 0, 1), jnp.moveaxis(slab, 0, 1)


def _mixture_icdf(
    shares: Float[Array, "S b"],
    mean: Float[Array, "S b"],
    scale: Float[Array, "S b"],
    q: Float[Array, "Q b"],
) -> Float[Array, "Q b"]:
    """Quantiles of b mixtures of S Gaussians, by bisection between those of the components."""
    part = shares > 0
    safe = jnp.where(part, scale, 1.0)

    def at_level(q):
        ends = mean + safe * ndtri(q)
        low = jnp.min(jnp.where(part, ends, jnp.inf), axis=0)
        high = jnp.max(jnp.where(part, ends, -jnp.inf), axis=0)

        def halve(_, ends):
            low, high = ends
            middle = 0.5 * (low + high)
            is_below = jnp.sum(shares * ndtr((middle - mean) / safe), axis=0) < q
            return jnp.where(is_below, middle, low), jnp.where(is_below, high, middle)

        low, high = lax.fori_loop(0, jnp.finfo(q.dtype).nmant + 8, halve, (low, high))
        return 0.5 * (low + high)

    return lax.map(at_level, q)
