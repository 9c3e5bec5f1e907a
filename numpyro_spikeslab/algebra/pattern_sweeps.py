# SPDX-License-Identifier: Apache-2.0
"""One pass over weights in sets and single weights, with expectations or with draws."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_spikeslab.algebra import pairs
from numpyro_spikeslab.algebra.heredity import AnyPrior
from numpyro_spikeslab.algebra.pairs import Conditional, Design, Draw, Draws, Prior
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.patterns import conditional_of


class Singles(NamedTuple):
    """The update of weights outside of sets; the others stay.

    - **noise** - for each weight, whether it is single, its current value, and its variates.
    """

    update: Any
    noise: Any

    def put(self, pair: Conditional, noise: Any) -> Any:
        is_single, weight, noise = noise
        return jnp.where(is_single, self.update.put(pair, noise), weight)


def sweep(
    partition: Partition,
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: AnyPrior,
    update: Any,
) -> tuple[Float[Array, " N"], Any, list[Any]]:
    """Visit singles, then sets; return the residual, the outcome of singles and those of stacks."""
    cut = [partition.cut(x) for x in jax.tree.leaves(update.noise)]
    log_odds, _ = partition.cut(prior.log_odds)
    variance, variances = partition.cut(prior.variance, fill=1.0)
    conditional = Conditional(weights[:0], weights[:0], weights[:0])
    if len(partition.singles):
        chosen = update
        if partition.stacks:
            is_single = jnp.zeros(partition.size, bool).at[partition.singles].set(True)
            chosen = Singles(update, (is_single, weights, update.noise))
        arguments = weights, precision, prior.at(weights != 0), chosen
        conditional, residual = pairs.sweep(design, residual, *arguments)
        conditional = Conditional(*(partition.cut(x)[0] for x in conditional))
    of_singles = update._replace(noise=tuple(x for x, _ in cut))
    singles = of_singles.outcome(conditional, Prior(log_odds, variance))
    outcomes = []
    for k, (members, patterns) in enumerate(partition.stacks.values()):

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
            new, outcome = update.put_set(conditional, patterns, variance, noise)
            weights = weights.at[members].set(new, mode="drop")
            return (residual - new @ features, weights), outcome

        of_stack = members, variances[k], tuple(x[k] for _, x in cut)
        (residual, weights), outcome = lax.scan(visit, (residual, weights), of_stack)
        outcomes.append(outcome)
    return residual, singles, outcomes


def gibbs_sweep(
    partition: Partition,
    noise: tuple[Float[Array, " P"], Float[Array, " P"]],
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: AnyPrior,
) -> Draws:
    """Make one exact paired Gibbs sweep (supplement, section 2): draw single pairs, then patterns
    and slabs of sets."""
    arguments = design, residual, weights, precision, prior, Draw(noise)
    _, singles, sets = sweep(partition, *arguments)
    spikes, *others = (partition.flat(x, [y[k] for y in sets]) for k, x in enumerate(singles))
    return Draws(spikes.astype(int), *others)
