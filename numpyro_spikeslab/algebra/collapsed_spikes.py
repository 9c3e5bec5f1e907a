# SPDX-License-Identifier: Apache-2.0
"""Evidence of spikes with their slabs integrated out, and the collapsed draw of both."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jax import lax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.variates import logistic_and_normal


class Slabs(NamedTuple):
    """Regression on B features whose slabs are integrated out.

    - **gram** - products of the features with each other, times the noise precision.
    - **linear** - products of the features with the observations, times the noise precision.
    - **prior** - prior of the weights.
    """

    gram: Float[Array, "B B"]
    linear: Float[Array, " B"]
    prior: Prior

    def _factor(self, spikes: Float[Array, " B"]) -> tuple[Any, Any, Any]:
        """Return prior scales, zero where excluded, and ``L`` and ``L^-1 b`` in these units."""
        scale = spikes * jnp.sqrt(self.prior.variance)
        precision = scale[:, None] * self.gram * scale + jnp.eye(scale.size, dtype=scale.dtype)
        L = jnp.linalg.cholesky(precision)
        return scale, L, solve_triangular(L, scale * self.linear, lower=True)

    def log_evidence(self, spikes: Float[Array, " B"]) -> Float[Array, ""]:
        """Compute the log Bayes factor of some spikes against none."""
        _, L, half = self._factor(spikes)
        return 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(L)))

    def mean(self, spikes: Float[Array, " B"], noise: Any = 0.0) -> Float[Array, " B"]:
        """Compute the means of the weights, or a draw with standard normal ``noise``."""
        scale, L, half = self._factor(spikes)
        return scale * solve_triangular(L, half + noise, lower=True, trans=1)


def gibbs_block(
    key: Array, slabs: Slabs, spikes: Float[Array, " B"], may_be_empty: Any = True
) -> Float[Array, " B"]:
    """Draw each of B spikes in turn with all slabs integrated out, then the slabs together.

    :param spikes: current spikes.
    :param may_be_empty: whether all spikes may be 0; if not, the last one stays.
    :return: the weights.
    """
    logistic, normal = logistic_and_normal(key, slabs.prior.log_odds)

    def visit(carry, coordinate):
        spikes, value = carry
        m, log_odds, logistic_m = coordinate
        other = spikes.at[m].set(1 - spikes[m])
        proposed = slabs.log_evidence(other)
        logit = log_odds + jnp.where(spikes[m] > 0, value - proposed, proposed - value)
        moves = (logit > logistic_m) != (spikes[m] > 0)
        # reject proposals whose evidence is NaN
        moves &= (may_be_empty | jnp.any(other > 0)) & ~jnp.isnan(proposed)
        return (jnp.where(moves, other, spikes), jnp.where(moves, proposed, value)), None

    items = (jnp.arange(spikes.size), slabs.prior.log_odds, logistic)
    (spikes, _), _ = lax.scan(visit, (spikes, slabs.log_evidence(spikes)), items)
    return slabs.mean(spikes, normal)
