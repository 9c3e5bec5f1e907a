# SPDX-License-Identifier: Apache-2.0
"""Weights that share a spike: the conditional of the spike and its slabs, and exact draws of them.

The pair of :mod:`~numpyro_spikeslab.algebra.pairs` with a vector of slabs in place of one: given
everything else, the included slabs of a group are jointly Gaussian, and the logit of its spike
needs the determinant of their precision.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import lax, nn
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Prior


def members_of(groups: Sequence[int]) -> Int[np.ndarray, "G K"]:
    """The weights of each group, of which the largest has K; others are filled up with P.

    :param groups: the number of its group, of each of the P weights.
    """
    index = np.asarray(groups)
    sizes = np.bincount(index)
    members = np.full((len(sizes), sizes.max()), index.size)
    order = np.argsort(index, kind="stable")
    place = np.arange(index.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members[index[order], place] = order
    return members


def gibbs_group_sweep(
    key: Array,
    members: Int[np.ndarray, "G K"],
    rows: Float[Array, "P N"],
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """Draw each spike and its slabs in turn, given all other weights.

    :param members: from :func:`members_of`.
    :param rows: the whitened features.
    :param residual: whitened ``y - D w`` of the current draw.
    :param precision: common noise precision ``tau``.
    :param prior: of the weights; the log odds of a spike are those of its first member.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, of each weight.
    """
    size = weights.shape[0]
    key_spike, key_slab = jax.random.split(key)
    logistic = jax.random.logistic(key_spike, members.shape[:1], weights.dtype)
    normal = jax.random.normal(key_slab, members.shape, weights.dtype)

    def of_group(x, fill=0.0):
        return x.at[members].get(mode="fill", fill_value=fill)

    # the slabs in units of their prior, so that what fills up a group has the precision 1
    scale = jnp.sqrt(of_group(prior.variance, 1.0))
    log_odds = prior.log_odds[members[:, 0]]

    def visit(residual, group):
        index, scale, log_odds, current, logistic, normal = group
        features = scale[:, None] * rows.at[index].get(mode="fill", fill_value=0.0)
        residual = residual + (current / scale) @ features
        A = precision * features @ features.T + jnp.eye(len(index))
        L = jnp.linalg.cholesky(A)
        half = solve_triangular(L, precision * features @ residual, lower=True)
        logit = log_odds + 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(L)))
        spike = logit > logistic
        included = solve_triangular(L, half + normal, lower=True, trans=1)
        # given s = 0 the slabs are drawn from their prior
        slab = jnp.where(spike, included, normal)
        return residual - jnp.where(spike, included, 0) @ features, (spike, scale * slab, logit)

    groups = (jnp.asarray(members), scale, log_odds, of_group(weights), logistic, normal)
    _, (spikes, slabs, logits) = lax.scan(visit, residual, groups)
    each = spikes[:, None], slabs, nn.sigmoid(logits)[:, None]

    def of_weights(x):
        x = jnp.broadcast_to(x, members.shape)
        return jnp.zeros(size, x.dtype).at[members].set(x, mode="drop")

    spike, slab, inclusion = map(of_weights, each)
    return spike.astype(int), slab, inclusion
