# SPDX-License-Identifier: Apache-2.0
"""Variational families of spike-and-slab weights: paired and standard mean field.

Each brings its sweep, its divergence from the prior and the moments that the bound needs.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import lax, nn, random
import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_spikeslab.algebra.pairs import (
    Conditional,
    Design,
    Prior,
    expectation,
    feature_squares,
    sweep,
)


class PairedMeanField(NamedTuple):
    """``q(w_tilde, s)`` of eq. (5): independent pairs, of any shape.

    - **probs** - ``gamma = q(s = 1)``.
    - **loc** - ``mu``, mean of the slab given ``s = 1``.
    - **scale** - square root of ``v``, its variance given ``s = 1``.

    Given ``s = 0`` the slab has its prior (Property 2 of the paper).
    """

    probs: Float[Array, "*P"]
    loc: Float[Array, "*P"]
    scale: Float[Array, "*P"]

    @classmethod
    def of(cls, pair: Conditional, temperature: Any) -> "PairedMeanField":
        """The factors that conditionals ask for; see :func:`expectation`."""
        return cls(nn.sigmoid(pair.logit / temperature), pair.loc, jnp.sqrt(pair.variance))

    @property
    def mean(self) -> Float[Array, "*P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    @property
    def variance(self) -> Float[Array, "*P"]:
        """``<w^2> - <w>^2``, which is a sum of what is not negative."""
        return self.probs * (self.scale**2 + (1 - self.probs) * self.loc**2)

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["PairedMeanField", Float[Array, " N"]]:
        """Update every pair in turn. The residual passed and returned is that of ``<w>``."""
        residual, pair = sweep(
            design, residual, self.mean, precision, prior, expectation(temperature)
        )
        return PairedMeanField.of(pair, temperature), residual

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        return feature_squares(design, self.probs.shape[0]) @ self.variance

    @property
    def slab_moments(self) -> tuple[Float[Array, "*P"], Float[Array, "*P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        return self.probs, self.probs * (self.loc**2 + self.scale**2)

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde, s) || p)``."""
        second_moment = (self.loc**2 + self.scale**2) / prior.variance
        slab = 0.5 * (second_moment - 1.0 - jnp.log(self.scale**2 / prior.variance))
        return spike_divergence(self.probs, prior) + jnp.sum(self.probs * slab)

    def random_start(self, key: Array, scale: Float[Array, "*P"]) -> "PairedMeanField":
        """Another start: ``gamma`` uniform, ``mu`` from the slab's prior of this scale."""
        key_probs, key_loc = random.split(key)
        return self._replace(
            probs=random.uniform(key_probs, scale.shape, scale.dtype),
            loc=scale * random.normal(key_loc, scale.shape, scale.dtype),
        )


class MeanField(NamedTuple):
    """``q(w_tilde) q(s)`` of eq. (4), the standard mean field.

    - **probs** - ``gamma = q(s = 1)``, shape (P,).
    - **loc** - mean of the slab, shape (P,).
    - **scale_tril** - Cholesky factor of the slab's covariance, shape (P, P).
    """

    probs: Float[Array, " P"]
    loc: Float[Array, " P"]
    scale_tril: Float[Array, "P P"]

    @property
    def mean(self) -> Float[Array, " P"]:
        """``<w> = gamma mu``."""
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
        rows = design.rows.reshape(-1, design.rows.shape[-1])[:size]
        gram = precision * rows @ rows.T
        target = precision * rows @ (residual + self.mean @ rows)
        spike = jnp.diag(self.probs * (1.0 - self.probs))
        slab_precision = gram * (jnp.outer(self.probs, self.probs) + spike) + jnp.diag(
            1.0 / prior.variance
        )
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

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        rows = design.rows.reshape(-1, design.rows.shape[-1])[: self.probs.shape[0]]
        return jnp.sum(rows * (self.covariance @ rows))

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        squares = self.loc**2 + jnp.sum(self.scale_tril**2, axis=1)
        return jnp.ones_like(squares), squares

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde) q(s) || p)``."""
        diagonal = jnp.diagonal(self.scale_tril)
        second_moment = self.slab_moments[1] / prior.variance
        slab = 0.5 * (second_moment - 1.0 + jnp.log(prior.variance)) - jnp.log(jnp.abs(diagonal))
        return spike_divergence(self.probs, prior) + jnp.sum(slab)

    def random_start(self, key: Array, scale: Float[Array, " P"]) -> "MeanField":
        """Another start, as :meth:`PairedMeanField.random_start`."""
        pairs = PairedMeanField(self.probs, self.loc, scale).random_start(key, scale)
        return self._replace(probs=pairs.probs, loc=pairs.loc)


def spike_divergence(probs: Float[Array, "*P"], prior: Prior) -> Float[Array, ""]:
    """``KL(Bernoulli(gamma) || Bernoulli(pi))``, summed."""
    negative_entropy = xlogy(probs, probs) + xlogy(1.0 - probs, 1.0 - probs)
    cross_entropy = probs * nn.log_sigmoid(prior.log_odds) + (1.0 - probs) * nn.log_sigmoid(
        -prior.log_odds
    )
    return jnp.sum(negative_entropy - cross_entropy)
