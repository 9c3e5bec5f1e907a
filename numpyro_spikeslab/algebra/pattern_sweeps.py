# SPDX-License-Identifier: Apache-2.0
"""One pass over weights in sets and single weights, with expectations or with draws."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra import pairs, variates
from numpyro_spikeslab.algebra.heredity import AnyPrior
from numpyro_spikeslab.algebra.pairs import Conditional, Design, Prior, Put
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.patterns import conditional_of


class Update(NamedTuple):
    """The values that a sweep puts back: expectations or draws.

    - **put** - ``(conditional, noise) -> weight`` of a single weight.
    - **put_set** - ``(conditional, patterns, noise) -> (weights, outcome)`` of a set.
    - **noise** - variates of all weights, leading axis P.
    - **noise_of_sets** - for each stack variates, leading axis G.
    """

    put: Put
    put_set: Callable
    noise: Any = None
    noise_of_sets: Any = None


def sweep(
    partition: Partition,
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: AnyPrior,
    update: Update,
) -> tuple[Float[Array, " N"], Conditional, list[Any]]:
    """Visit singles, then sets; return residual, conditionals of singles, and outcomes by stack."""
    singles = partition.singles
    conditional = Conditional(weights[:0], weights[:0], weights[:0])
    if len(singles):
        is_single = jnp.zeros(partition.size, bool).at[singles].set(True)

        def put(conditional: Conditional, at: Any) -> Any:
            is_single, weight, noise = at
            return jnp.where(is_single, update.put(conditional, noise), weight)

        at = is_single, weights, update.noise
        fixed = prior.at(weights != 0)
        residual, conditional = design.sweep(residual, weights, precision, fixed, put, noise=at)
        conditional = Conditional(*(x[singles] for x in conditional))
    _, variances = partition.cut(prior.variance, fill=1.0)
    noise = update.noise_of_sets or [None] * len(variances)
    outcomes = []
    for (members, patterns), *of_stack in zip(
        partition.stacks.values(), variances, noise, strict=True
    ):

        def visit(state, at, patterns=patterns):
            (residual, weights), (members, variance, noise) = state, at
            features, log_odds, old = (
                x.at[members].get(mode="fill", fill_value=0)
                for x in (design.features, prior.at(weights != 0).log_odds, weights)
            )
            residual = residual + old @ features
            conditional = conditional_of(
                features, residual, precision, log_odds, variance, patterns
            )
            new, outcome = update.put_set(conditional, patterns, noise)
            weights = weights.at[members].set(new, mode="drop")
            return (residual - new @ features, weights), outcome

        (residual, weights), outcome = lax.scan(visit, (residual, weights), (members, *of_stack))
        outcomes.append(outcome)
    return residual, conditional, outcomes


def gibbs_sweep(
    partition: Partition,
    noise: tuple[Float[Array, " P"], Float[Array, " P"]],
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: AnyPrior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """Draw single pairs, then patterns and slabs of sets; return spikes, slabs, probabilities."""
    (logistic, logistics), (normal, normals) = map(partition.cut, noise)
    variance, variances = partition.cut(prior.variance, fill=1.0)

    def draw_set(conditional, patterns, noise):
        uniform, normal, scale = noise
        probs = nn.softmax(conditional.logits)
        number = variates.index(uniform, probs)
        spikes = jnp.asarray(patterns)[number]
        # the first pattern includes no slabs
        mean, root = (x[jnp.maximum(number - 1, 0)] for x in conditional.slabs[:2])
        # given s = 0 the slabs are drawn from their prior
        slabs = jnp.where(spikes > 0, mean + normal @ root, scale * normal)
        return spikes * slabs, (spikes, slabs, probs @ patterns)

    # a set takes the uniform number of its first weight
    uniforms = [nn.sigmoid(x[:, 0]) for x in logistics]
    noise_of_sets = list(zip(uniforms, normals, map(jnp.sqrt, variances), strict=True))
    update = Update(pairs.draw, draw_set, noise, noise_of_sets)
    _, conditional, sets = sweep(partition, design, residual, weights, precision, prior, update)
    prior_of_singles = Prior(prior.log_odds[partition.singles], variance)
    singles = pairs.drawn(conditional, (logistic, normal), prior_of_singles)
    spikes, slabs, inclusion = (
        partition.flat(x, [outcome[k] for outcome in sets]) for k, x in enumerate(singles)
    )
    return spikes.astype(int), slabs, inclusion
