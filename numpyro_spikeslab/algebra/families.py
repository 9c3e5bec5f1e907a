# SPDX-License-Identifier: Apache-2.0
"""Variational families of spike-and-slab weights: pairs, sets of weights, standard mean field."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import lax, nn, random
import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_spikeslab.algebra import pairs, pattern_sweeps
from numpyro_spikeslab.algebra.pairs import AnyDesign, Conditional, Design, Prior, feature_rows
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.patterns import (
    PatternMoments,
    SetFactors,
    log_prior,
    moments_of,
    prior_slabs,
    stack_moments,
)


class PairedMeanField(NamedTuple):
    """``q(w_tilde, s)`` of eq. (5): independent pairs, of any shape.

    - **probs** - ``gamma = q(s = 1)``.
    - **loc**, **scale** - mean and standard deviation of the slab given ``s = 1``.

    Given ``s = 0`` the slab has its prior (Property 2 of the paper).
    """

    probs: Float[Array, "*P"]
    loc: Float[Array, "*P"]
    scale: Float[Array, "*P"]

    @classmethod
    def of(cls, pair: Conditional, temperature: Any) -> "PairedMeanField":
        """Make the factors that are optimal given the conditionals."""
        return cls(nn.sigmoid(pair.logit / temperature), pair.loc, jnp.sqrt(pair.variance))

    @property
    def mean(self) -> Float[Array, "*P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    @property
    def variance(self) -> Float[Array, "*P"]:
        """``<w^2> - <w>^2``, as a sum of squares."""
        return self.probs * (self.scale**2 + (1 - self.probs) * self.loc**2)

    def product_variance(
        self, squares: Any, variance: Any, times: Callable[..., Any] = jnp.multiply
    ) -> Float[Array, "..."]:
        """Compute the variance of weights times independent features, as a sum of squares: a
        difference of second moments and squared means would lose it in single precision.

        :param squares: squared means of the features, or their sums.
        :param variance: variances of the features, likewise.
        :param times: product of weights and features.
        """
        return times(self.variance, squares + variance) + times(self.mean**2, variance)

    def mixed(self, mean: Any, variance: Any) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """Compute mean and variance of ``w @ phi`` from those of independent features ``phi``."""
        return self.mean @ mean, self.product_variance(mean**2, variance, jnp.matmul)

    def sweep(
        self, design: AnyDesign, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["PairedMeanField", Float[Array, " N"]]:
        """Update every pair in turn. The residual passed and returned is that of ``<w>``."""
        update = Expectation(temperature)
        pair, residual = pairs.sweep(design, residual, self.mean, precision, prior, update)
        return update.outcome(pair, prior), residual

    def predictor_variance(self, design: Design) -> Float[Array, " N"]:
        """Compute the variance of ``D w`` at each whitened observation."""

        def add(total, block):
            rows, variance = block
            return total + variance @ rows**2, None

        # block by block, which makes no table of squares
        blocks = design.rows, pairs.in_parts(self.variance, *design.rows.shape[:2])
        return lax.scan(add, jnp.zeros_like(design.rows[0, 0]), blocks)[0]

    def total_variance(self, design: Design) -> Float[Array, ""]:
        """Sum the variances, from the squares of the features."""
        return pairs.feature_squares(design, self.probs.shape[0]) @ self.variance

    @property
    def slab_moments(self) -> tuple[Float[Array, "*P"], Float[Array, "*P"]]:
        """Expected number of slabs in the bound, and their expected squares."""
        return self.probs, self.probs * (self.loc**2 + self.scale**2)

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """Compute ``KL(q || p)``."""
        second_moment = (self.loc**2 + self.scale**2) / prior.variance
        slab = 0.5 * (second_moment - 1.0 - jnp.log(self.scale**2 / prior.variance))
        return spike_divergence(self.probs, prior) + jnp.sum(self.probs * slab)

    def random_start(self, key: Array, scale: Float[Array, "*P"]) -> "PairedMeanField":
        """Draw another start: ``gamma`` uniform, ``mu`` from the slab's prior of this scale."""
        key_probs, key_loc = random.split(key)
        return self._replace(
            probs=random.uniform(key_probs, scale.shape, scale.dtype),
            loc=scale * random.normal(key_loc, scale.shape, scale.dtype),
        )


class Expectation(NamedTuple):
    """The update of weights by expectations; a temperature above 1 flattens the inclusion
    probabilities."""

    temperature: Any = 1.0
    noise: Any = ()

    def put(self, pair: Conditional, _: Any) -> Any:
        """Return ``<w> = gamma mu`` of a single weight."""
        return nn.sigmoid(pair.logit / self.temperature) * pair.loc

    def outcome(self, pair: Conditional, _: Prior) -> PairedMeanField:
        """Return the factors that are optimal given the conditionals."""
        return PairedMeanField.of(pair, self.temperature)

    def put_set(self, conditional: Any, patterns: Any, *_: Any) -> Any:
        """Return the expectations of a set, and its factor with moments."""
        probs = nn.softmax(conditional.logits / self.temperature)
        moments = moments_of(probs, conditional.slabs, patterns)
        factors = SetFactors(probs, conditional.linear, conditional.precision_tril)
        return probs @ patterns * moments.loc, (factors, moments)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PatternMeanField:
    """Sets of weights with a joint factor each, ``stacks``, and independent pairs of all others."""

    partition: Partition = field(metadata={"static": True})
    singles: PairedMeanField
    stacks: tuple[SetFactors, ...]
    moments: tuple[PatternMoments, ...]

    @classmethod
    def of(
        cls, partition: Partition, singles: PairedMeanField, stacks: Sequence[SetFactors]
    ) -> "PatternMeanField":
        """Make the family with the moments of its stacks."""
        layouts = partition.stacks.values()
        moments = (stack_moments(x, one.patterns) for x, one in zip(stacks, layouts, strict=True))
        return cls(partition, singles, tuple(stacks), tuple(moments))

    @property
    def probs(self) -> Float[Array, " P"]:
        """Marginal inclusion probabilities ``gamma``."""
        layouts = self.partition.stacks.values()
        probs = [x.patterns @ one.patterns for x, one in zip(self.stacks, layouts, strict=True)]
        return self.partition.flat(self.singles.probs, probs)

    @property
    def loc(self) -> Float[Array, " P"]:
        """``mu``, mean of each slab given its inclusion."""
        return self.partition.flat(self.singles.loc, [x.loc for x in self.moments])

    @property
    def scale(self) -> Float[Array, " P"]:
        """Standard deviation of each slab given its inclusion."""
        return self.partition.flat(self.singles.scale, [x.scale for x in self.moments])

    @property
    def mean(self) -> Float[Array, " P"]:
        return self.probs * self.loc

    variance = PairedMeanField.variance
    slab_moments = PairedMeanField.slab_moments

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["PatternMeanField", Float[Array, " N"]]:
        """Update every pair outside of the sets, then every set, in turn."""
        arguments = design, residual, self.mean, precision, prior, Expectation(temperature)
        residual, singles, outcomes = pattern_sweeps.sweep(self.partition, *arguments)
        stacks, moments = tuple(x for x, _ in outcomes), tuple(x for _, x in outcomes)
        return PatternMeanField(self.partition, singles, stacks, moments), residual

    def predictor_variance(self, design: Design) -> Float[Array, " N"]:
        rows = feature_rows(design, self.partition.size)[self.partition.singles]
        return self.singles.variance @ rows**2 + self._variance_of_sets(design)

    def total_variance(self, design: Design) -> Float[Array, ""]:
        squares = pairs.feature_squares(design, self.partition.size)[self.partition.singles]
        return squares @ self.singles.variance + jnp.sum(self._variance_of_sets(design))

    def _variance_of_sets(self, design: Design) -> Float[Array, " N"]:
        rows = design.rows.reshape(-1, design.rows.shape[-1])

        def add(total, one):
            members, root = one
            features = rows.at[members].get(mode="fill", fill_value=0)
            return total + jnp.sum((root @ features) ** 2, axis=0), None

        total = jnp.zeros_like(rows[0])
        for stack, moments in zip(self.partition.stacks.values(), self.moments, strict=True):
            total, _ = lax.scan(add, total, (stack.members, moments.root))
        return total

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        single_odds, log_odds = self.partition.cut(prior.log_odds)
        single_variance, variances = self.partition.cut(prior.variance, fill=1.0)
        total = self.singles.divergence(Prior(single_odds, single_variance))
        layouts = self.partition.stacks.values()
        of_stacks = zip(layouts, self.stacks, self.moments, log_odds, variances, strict=True)
        for (_, patterns), (q, *_), moments, odds, variance in of_stacks:
            total += jnp.sum(xlogy(q, q) - q * log_prior(patterns, odds))
            second_moment = (moments.loc**2 + moments.scale**2) / variance
            slabs = (q @ patterns) * (second_moment - 1.0 + jnp.log(variance))
            total += 0.5 * (jnp.sum(slabs) + jnp.sum(moments.log_det))
        return total

    def random_start(self, key: Array, scale: Float[Array, " P"]) -> "PatternMeanField":
        """Draw another start, with independent spikes outside of groups."""
        key_probs, key_loc, key_singles = random.split(key, 3)
        single_scale, scales = self.partition.cut(scale, fill=1.0)
        _, logits = self.partition.cut(random.logistic(key_probs, scale.shape, scale.dtype))
        _, locs = self.partition.cut(random.normal(key_loc, scale.shape, scale.dtype))
        stacks, layouts = [], self.partition.stacks.values()
        for (_, patterns), log_odds, *slabs in zip(layouts, logits, scales, locs, strict=True):
            if len(patterns) == 2:
                # the first weight has the log odds of the spike
                log_odds = log_odds.at[:, 1:].set(0)
            probs = jnp.exp(log_prior(patterns, log_odds))
            stacks.append(SetFactors(probs, *prior_slabs(*slabs)))
        singles = self.singles.random_start(key_singles, single_scale)
        return PatternMeanField.of(self.partition, singles, stacks)


class MeanField(NamedTuple):
    """``q(w_tilde) q(s)`` of eq. (4), the standard mean field.

    - **probs** - ``gamma = q(s = 1)``.
    - **loc**, **scale_tril** - mean of the slabs, and Cholesky factor of their covariance.
    """

    probs: Float[Array, " P"]
    loc: Float[Array, " P"]
    scale_tril: Float[Array, "P P"]

    @property
    def mean(self) -> Float[Array, " P"]:
        return self.probs * self.loc

    @property
    def covariance(self) -> Float[Array, "P P"]:
        """Covariance of ``w = s * w_tilde``."""
        slab = self.scale_tril @ self.scale_tril.T
        spike = jnp.diag(self.probs * (1.0 - self.probs))
        outer = jnp.outer(self.probs, self.probs)
        return (outer + spike) * slab + spike * jnp.outer(self.loc, self.loc)

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["MeanField", Float[Array, " N"]]:
        """Update ``q(w_tilde)`` jointly, then every ``q(s_m)`` in turn."""
        size = self.probs.shape[0]
        rows = feature_rows(design, size)
        gram = precision * rows @ rows.T
        target = precision * rows @ (residual + self.mean @ rows)
        spike = jnp.diag(self.probs * (1.0 - self.probs))
        slab_precision = gram * (jnp.outer(self.probs, self.probs) + spike)
        slab_precision += jnp.diag(1.0 / prior.variance)
        # the inverse's Cholesky factor, from the Cholesky factor of the reversed matrix
        reverse = jnp.linalg.cholesky(slab_precision[::-1, ::-1])[::-1, ::-1].T
        scale_tril = jax.scipy.linalg.solve_triangular(reverse, jnp.eye(size), lower=True)
        covariance = scale_tril @ scale_tril.T
        loc = covariance @ (self.probs * target)
        interaction = gram * (jnp.outer(loc, loc) + covariance)
        squares = jnp.diagonal(interaction)

        def visit(probs, m):
            logit = prior.log_odds[m] + target[m] * loc[m] - 0.5 * squares[m]
            logit -= interaction[m] @ probs - squares[m] * probs[m]
            return probs.at[m].set(nn.sigmoid(logit / temperature)), None

        probs, _ = lax.scan(visit, self.probs, jnp.arange(size))
        new = MeanField(probs, loc, scale_tril)
        return new, residual + (self.mean - new.mean) @ rows

    def predictor_variance(self, design: Design) -> Float[Array, " N"]:
        rows = feature_rows(design, self.probs.shape[0])
        joint = self.scale_tril.T @ (self.probs[:, None] * rows)
        alone = self.probs * (1.0 - self.probs) * self.slab_moments[1]
        return jnp.sum(joint**2, axis=0) + alone @ rows**2

    def total_variance(self, design: Design) -> Float[Array, ""]:
        return jnp.sum(self.predictor_variance(design))

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        squares = self.loc**2 + jnp.sum(self.scale_tril**2, axis=1)
        return jnp.ones_like(squares), squares

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        diagonal = jnp.diagonal(self.scale_tril)
        second_moment = self.slab_moments[1] / prior.variance
        slab = 0.5 * (second_moment - 1.0 + jnp.log(prior.variance)) - jnp.log(jnp.abs(diagonal))
        return spike_divergence(self.probs, prior) + jnp.sum(slab)

    def random_start(self, key: Array, scale: Float[Array, " P"]) -> "MeanField":
        other = PairedMeanField(self.probs, self.loc, scale).random_start(key, scale)
        return self._replace(probs=other.probs, loc=other.loc)


def spike_divergence(probs: Float[Array, "*P"], prior: Prior) -> Float[Array, ""]:
    """Compute ``KL(Bernoulli(gamma) || Bernoulli(pi))``, summed over the spikes."""
    states = (probs, prior.log_odds), (1.0 - probs, -prior.log_odds)
    return jnp.sum(sum(xlogy(p, p) - p * nn.log_sigmoid(log_odds) for p, log_odds in states))
