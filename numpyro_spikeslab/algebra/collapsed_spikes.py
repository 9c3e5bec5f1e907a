# SPDX-License-Identifier: Apache-2.0
"""Slabs that are integrated out: the evidence of a set of spikes, and their collapsed draw."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.variates import logistic_and_normal


class Slabs(NamedTuple):
    """B slabs that are integrated out, given which of them are included.

    - **gram** - products of the features, with the precision of the noise.
    - **linear** - products of the features with the observations, likewise.
    - **prior** - prior of the weights.
    """

    gram: Float[Array, "B B"]
    linear: Float[Array, " B"]
    prior: Prior

    def _factor(self, spikes: Float[Array, " B"]) -> tuple[Any, Any, Any]:
        """Prior scales, zero where excluded; ``L`` of the precision in these units; ``L^-1 b``."""
        scale = spikes * jnp.sqrt(self.prior.variance)
        precision = scale[:, None] * self.gram * scale + jnp.eye(scale.size, dtype=scale.dtype)
        L = jnp.linalg.cholesky(precision)
        return scale, L, solve_triangular(L, scale * self.linear, lower=True)

    def log_evidence(self, spikes: Float[Array, " B"]) -> Float[Array, ""]:
        """Log of how much better the included features explain the observations than none does."""
        _, L, half = self._factor(spikes)
        return 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(L)))

    def mean(self, spikes: Float[Array, " B"], noise: Any = 0.0) -> Float[Array, " B"]:
        """Means of the weights; a draw, with standard normal variates as ``noise``."""
        scale, L, half = self._factor(spikes)
        return scale * solve_triangular(L, half + noise, lower=True, trans=1)


def gibbs_block(
    key: Array, slabs: Slabs, spikes: Float[Array, " B"], may_be_empty: Any = True
) -> Float[Array, " B"]:
    """Draw each of B spikes in turn with all slabs integrated out, then the slabs together.

    :param spikes: current ones.
    :param may_be_empty: if not, the last spike stays.
    :return: the weights.
    """
    logistic, normal = logistic_and_normal(key, slabs.prior.log_odds)

    def visit(carry, coordinate):
        spikes, value = carry
        m, log_odds, logistic_m = coordinate
        other = spikes.at[m].set(1 - spikes[m])
        reached = slabs.log_evidence(other)
        logit = log_odds + jnp.where(spikes[m] > 0, value - reached, reached - value)
        moves = (logit > logistic_m) != (spikes[m] > 0)
        # what is not a number is no place to go to
        moves &= (may_be_empty | jnp.any(other > 0)) & ~jnp.isnan(reached)
        return (jnp.where(moves, other, spikes), jnp.where(moves, reached, value)), None

    items = (jnp.arange(spikes.size), slabs.prior.log_odds, logistic)
    (spikes, _), _ = lax.scan(visit, (spikes, slabs.log_evidence(spikes)), items)
    return slabs.mean(spikes, normal)
