# SPDX-License-Identifier: Apache-2.0
"""One pass over weights of which some are in sets, with expectations or with draws."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra import variates
from numpyro_spikeslab.algebra.pairs import Conditional, Design, Prior, Put, draw, drawn, sweep
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.patterns import PatternConditional, conditional

PutSet = Callable[[PatternConditional, Any, Any], tuple[Float[Array, " b"], Any]]
"""``(conditional, patterns, noise) -> weights put back into the sweep, and what else to keep``."""


def sweep_singles(
    partition: Partition,
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: Put,
    noise: Any = None,
) -> tuple[Float[Array, " N"], Conditional]:
    """Visit the weights outside of all sets; see :func:`~numpyro_spikeslab.algebra.pairs.sweep`.

    :return: the residual, and the conditionals of these weights.
    """
    singles = partition.singles
    if not len(singles):
        return residual, Conditional(weights[:0], weights[:0], weights[:0])
    is_single = jnp.zeros(partition.size, bool).at[singles].set(True)

    def put_singles(pair: Conditional, given: Any) -> Any:
        is_single, weight, noise = given
        return jnp.where(is_single, put(pair, noise), weight)

    given = is_single, weights, noise
    residual, pair = sweep(design, residual, weights, precision, prior, put_singles, noise=given)
    return residual, Conditional(*(x[singles] for x in pair))


def sweep_sets(
    partition: Partition,
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: PutSet,
    noise: Any = None,
) -> tuple[Float[Array, " N"], list[Any]]:
    """Visit each set in turn.

    :param residual: whitened ``y - D w`` of the current weights.
    :param noise: variates of the draws, for each stack with leading axis G.
    :return: the residual, and for each stack what ``put`` keeps.
    """
    # cutting off the rows that pad the last block would copy the design
    rows = design.rows.reshape(-1, design.rows.shape[-1])
    cut = [partition.cut(x)[1] for x in (weights, prior.log_odds)]
    cut.append(partition.cut(prior.variance, fill=1.0)[1])
    outcomes = []
    for k, (members, patterns) in enumerate(partition.stacks.values()):

        def visit(residual, one, patterns=patterns):
            members, current, log_odds, variance, noise = one
            features = rows.at[members].get(mode="fill", fill_value=0)
            residual = residual + current @ features
            given = conditional(features, residual, precision, log_odds, variance, patterns)
            new, kept = put(given, patterns, noise)
            return residual - new @ features, kept

        stack = members, *(x[k] for x in cut), None if noise is None else noise[k]
        residual, kept = lax.scan(visit, residual, stack)
        outcomes.append(kept)
    return residual, outcomes


def gibbs_set_sweep(
    key: Array,
    partition: Partition,
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """Draw each pair outside of the sets, then each set: its pattern and its slabs.

    :param residual: whitened ``y - D w`` of the current draw.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities of the weights.
    """
    noise = variates.logistic_and_normal(key, weights)
    residual, pair = sweep_singles(
        partition, design, residual, weights, precision, prior, draw, noise
    )
    (logistic, logistics), (normal, normals) = map(partition.cut, noise)
    variance, variances = partition.cut(prior.variance, fill=1.0)
    log_odds = prior.log_odds[partition.singles]
    singles = drawn(pair, (logistic, normal), Prior(log_odds, variance))

    def put(given, patterns, noise):
        uniform, normal, scale = noise
        probs = nn.softmax(given.logits)
        which = variates.index(uniform, probs)
        spikes = jnp.asarray(patterns)[which]
        # slabs are of all patterns but the first, which includes none
        mean, root = (x[jnp.maximum(which - 1, 0)] for x in (given.slabs.mean, given.slabs.root))
        # given s = 0 the slabs are drawn from their prior
        slabs = jnp.where(spikes > 0, mean + normal @ root, scale * normal)
        return spikes * slabs, (spikes, slabs, probs @ patterns)

    # a set has the uniform number of its first weight
    uniforms = [nn.sigmoid(x[:, 0]) for x in logistics]
    noise = list(zip(uniforms, normals, map(jnp.sqrt, variances), strict=True))
    _, sets = sweep_sets(partition, design, residual, weights, precision, prior, put, noise)
    spikes, slabs, inclusion = (
        partition.flat(x, [kept[k] for kept in sets]) for k, x in enumerate(singles)
    )
    return spikes.astype(int), slabs, inclusion
