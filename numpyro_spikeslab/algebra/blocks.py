# SPDX-License-Identifier: Apache-2.0
"""Blocks of weights with one joint factor: a mixture over patterns of inclusion of Gaussians.

Beside the blocks, of which :mod:`~numpyro_spikeslab.algebra.patterns` knows one, all other weights
are independent pairs, the paired mean field.
"""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import lax, nn, random
import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.pairs import (
    Conditional,
    Design,
    Prior,
    expectation,
    feature_squares,
    sweep,
)
from numpyro_spikeslab.algebra.patterns import (
    Moments,
    Stack,
    every_pattern,
    log_prior,
    moments_of,
    prior_slabs,
    slabs_of,
    stack_moments,
)


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockMeanField:
    """``q(w_tilde, s)`` of blocks, of which those of one weight are independent pairs.

    - **blocks** - which weights stand together.
    - **singles** - the pairs without a block.
    - **stacks** - the other factors, by size. They tell all but the prior of excluded slabs.
    - **moments** - of the stacks, from :meth:`of`; they follow from them.
    """

    blocks: Blocks = field(metadata={"static": True})
    singles: Any
    stacks: Any
    moments: Any

    @classmethod
    def of(
        cls, blocks: Blocks, singles: PairedMeanField, stacks: tuple[Stack, ...]
    ) -> "BlockMeanField":
        """With the moments of its stacks."""
        each = zip(stacks, blocks.patterns, strict=True)
        return cls(blocks, singles, stacks, tuple(stack_moments(*one) for one in each))

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
        diagonals = (jnp.sum(x.root**2, axis=1) for x in self.moments)
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
            visit = partial(visit_block, rows, patterns, precision, temperature)
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
        every = PairedMeanField.of(pair, temperature)
        return residual, jax.tree.map(lambda x: x[alone], every)

    # The bound

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        squares = feature_squares(design, self.blocks.size)[self.blocks.singles]
        rows = design.rows.reshape(-1, design.rows.shape[-1])
        total = squares @ self.singles.variance
        for members, moments in zip(self.blocks.stacks, self.moments, strict=True):
            total += jnp.sum((moments.root @ rows[members]) ** 2)
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


def visit_block(
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
