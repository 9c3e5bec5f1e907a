# SPDX-License-Identifier: Apache-2.0
"""Draws of noise scales, inclusion probabilities and slab scales, given the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int

from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.reading.form import Role
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import (
    Target,
    draw_sites,
    inclusion_given,
    scales_given,
    spread,
    tally,
)
from numpyro_spikeslab.sampling.kernel import complete


@dataclass(frozen=True)
class Current:
    """A model at the current values of its sites, some of which are to be drawn.

    - **reading** - the model.
    - **values** - of all sites.
    - **own** - names of those that are drawn.
    - **at** - the model at these values.
    """

    reading: Reading
    values: dict[str, Any]
    own: frozenset[str]
    at: View

    @classmethod
    def of(
        cls,
        reading: Reading,
        values: dict[str, Any],
        z: dict[str, Any],
        w: dict[str, Any] | None = None,
    ) -> Any:
        """
        :param values: of the sites that other blocks hold.
        :param z: of the kernel's own.
        :param w: weights that the view is to be at; zero if not given.
        """
        every = complete(reading, values | z)
        return cls(reading, every, frozenset(z), reading.view(every, w))

    def roles(self, part: str) -> tuple[Role, ...]:
        """The roles of one part that are drawn."""
        every = self.reading.form.every_role
        return tuple(role for role in every if role.part == part and role.site in self.own)

    def entries(self, role: Role) -> Int[Array, "..."]:
        """Which entry of its site each weight takes, (Q, M), or each task, (Q,)."""
        Q, M = self.reading.form.shape
        index = self.reading.indices[role.site]
        if role.part == "noise":
            return jnp.broadcast_to(index, Q)
        return index.reshape(Q, M) if index.ndim else jnp.zeros((Q, M), int)

    def weights(self) -> tuple[Float[Array, "Q M"], Float[Array, "Q M"]]:
        """Spikes and slabs."""
        form = self.reading.form
        both = form.join_spikes(self.values), form.join(self.values, "{}_slab")
        spikes, slabs = (x.astype(self.at.Y.dtype).reshape(form.shape) for x in both)
        return spikes, slabs

    def targets(
        self, part: str, given: Callable[..., Target], values: dict[str, Any], *sums: Any
    ) -> dict[str, Target]:
        """Conditionals of the sites of one part.

        :param given: the conditional of a site, from its prior, its value and what sums up to its
            entries.
        :param values: the current ones, by the names of their sites.
        :param sums: of each weight, (Q, M), or each task, (Q,).
        """
        found = {}
        for role in self.roles(part):
            index, value = self.entries(role), values[role.site]
            each = (tally(x, index, value) for x in sums)
            found[role.site] = given(self.at.priors[role.site], value, *each)
        return found

    def slab_scales(
        self, values: dict[str, Any], slabs: Float[Array, "Q M"], counted: Any
    ) -> dict[str, Target]:
        """Conditionals of the slab scales.

        :param counted: which slabs are known.
        """
        squares = counted * slabs**2
        return self.targets("slab", scales_given, values, counted * jnp.ones_like(slabs), squares)

    def slab_variance(self, values: dict[str, Any]) -> Float[Array, "Q M"]:
        """Prior variances of all slabs, at new values of slab scales."""
        scale = jnp.sqrt(self.at.prior.variance)
        for role in self.roles("slab"):
            scale = spread(values[role.site], self.entries(role), scale)
        return jnp.square(scale)

    def draw(
        self,
        keys: Any,
        values: dict[str, Any],
        now: tuple[Any, Any],
        squares: Float[Array, " Q"],
        counted: Any,
    ) -> tuple[dict[str, Any], Float[Array, "Q M"]]:
        """Draw all scales and probabilities, then excluded slabs, which have their prior.

        :param keys: two random keys.
        :param values: the current ones, by the names of their sites.
        :param now: spikes and slabs.
        :param squares: sums of the squared residuals of each task.
        :param counted: which slabs are known: those that are not drawn anew.
        :return: the new ones, and all slabs.
        """
        spikes, slabs = now
        # without noise, as of simulations, the scale would fall until its square is zero
        squares = jnp.maximum(squares, self.at.rounding)
        targets = self.targets("noise", scales_given, values, self.at.count, squares)
        targets |= self.targets("inclusion", inclusion_given, values, spikes, 1 - spikes)
        targets |= self.slab_scales(values, slabs, counted)
        new = draw_sites(keys[0], targets)
        excluded = jnp.sqrt(self.slab_variance(new))
        excluded *= random.normal(keys[1], slabs.shape, slabs.dtype)
        return new, jnp.where(spikes > 0, slabs, excluded)
