# SPDX-License-Identifier: Apache-2.0
"""Spikes that need others: an interaction whose parents have to be included before it may be.

A spike whose parents allow it is Bernoulli; the others are 0 (Chipman, 1996, *Bayesian variable
selection with related predictors*). So the density of all spikes has no normaliser.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped
import numpy as np

import jax
from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import Prior


@jax.tree_util.register_static
@dataclass(frozen=True)
class Heredity:
    """The parents of G spikes, or of as many weights; hashable.

    - **parents** - of each, their numbers. No spike is its own ancestor.
    - **least** - the number of parents that have to be included.
    """

    parents: tuple[tuple[int, ...], ...]
    least: tuple[int, ...]

    @cached_property
    def numbers(self) -> Int[np.ndarray, "G K"]:
        """The parents, padded by G; of one type in either precision."""
        size, most = len(self.parents), max(1, *map(len, self.parents))
        return np.array([[*x, *[size] * (most - len(x))] for x in self.parents], np.int32)

    def present(self, spikes: Shaped[Array, "*D G"]) -> Int[Array, "*D G K"]:
        """Return which parents are included."""
        return jnp.take(spikes, self.numbers, axis=-1, mode="fill", fill_value=0).astype(int)

    def missing(self, spikes: Shaped[Array, "*D G"]) -> Int[Array, "*D G"]:
        """Return how many more parents each needs; one that is allowed needs none, or fewer."""
        return jnp.array(self.least) - jnp.sum(self.present(spikes), axis=-1)

    def allowed(self, spikes: Shaped[Array, "*D G"]) -> Shaped[Array, "*D G"]:
        """Leave out spikes with too few parents, and their descendants."""

        def turn(_, spikes):
            return spikes * (self.missing(spikes) <= 0)

        return lax.fori_loop(0, len(self.parents), turn, spikes)


class HereditaryPrior(NamedTuple):
    """Spike-and-slab prior of P weights whose spikes need others.

    - **log_odds** - of each weight if its parents allow it.
    - **variance** - of its slab.
    - **firsts** - of each spike the first weight, which stands for it.
    """

    log_odds: Float[Array, " P"]
    variance: Float[Array, " P"]
    heredity: Heredity
    firsts: Int[Array, " G"] | Int[np.ndarray, " G"]

    def at(self, spikes: Shaped[Array, " P"]) -> Prior:
        """Return the conditional prior of each weight given all other spikes.

        If an included spike lacks parents, as after a swap, only flips that repair all
        violations keep their odds, and all others have minus infinity. Infinity is a large number,
        for it is multiplied by zero.
        """
        is_in, log_odds = spikes[self.firsts] > 0, self.log_odds[self.firsts]
        missing, infinity = self.heredity.missing(is_in), jnp.finfo(log_odds.dtype).max / 8
        # whether a child may be included hangs on this parent alone
        decides = missing[:, None] + self.heredity.present(is_in) == 1

        def of_children(x):
            x = jnp.where(decides, x[:, None], 0)
            return jnp.zeros(is_in.size, x.dtype).at[self.heredity.numbers].add(x, mode="drop")

        needed, forbidden = of_children(is_in.astype(int)), jnp.sum(is_in & (missing > 0))
        may = (missing <= 0) & (is_in | (needed == forbidden))
        log_odds = log_odds - of_children(jnp.where(is_in, 0, nn.softplus(log_odds)))
        log_odds = jnp.where(is_in & (needed > 0), infinity, log_odds)
        new = self.log_odds.at[self.firsts].set(jnp.where(may, log_odds, -infinity))
        return Prior(new, self.variance)


AnyPrior = Prior | HereditaryPrior
