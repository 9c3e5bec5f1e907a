# SPDX-License-Identifier: Apache-2.0
"""Conditionals of noise scales, inclusion probabilities and slab scales, given the weights."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float, Int

import jax.numpy as jnp

from numpyro_spikeslab.reading.form import Role
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import Target, inclusion_given, scales_given, spread, tally
from numpyro_spikeslab.sampling.blocks import complete


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
        every = (*self.reading.form.roles, *self.reading.form.drawn)
        return tuple(role for role in every if role.part == part and role.site in self.own)

    def entries(self, role: Role) -> Int[Array, "..."]:
        """Which entry of its site each weight takes, (Q, M), or each task, (Q,)."""
        Q, M = self.reading.form.shape
        index = self.reading.indices[role.site]
        return jnp.broadcast_to(index, Q) if role.part == "noise" else index.reshape(Q, M)

    def weights(self) -> tuple[Float[Array, "Q M"], Float[Array, "Q M"]]:
        """Spikes and slabs."""
        form = self.reading.form
        spikes, slabs = (
            form.join(self.values, part).astype(self.at.Y.dtype).reshape(form.shape)
            for part in ("{}_spike", "{}_slab")
        )
        return spikes, slabs

    def slab_scales(
        self, values: dict[str, Any], slabs: Float[Array, "Q M"], counted: Any
    ) -> dict[str, Target]:
        """Conditionals of the slab scales.

        :param values: the current ones, by the names of their sites.
        :param counted: which slabs are known.
        """
        found = {}
        for role in self.roles("slab"):
            index, value = self.entries(role), values[role.site]
            sums = (tally(counted * x, index, value) for x in (jnp.ones_like(slabs), slabs**2))
            found[role.site] = scales_given(self.at.priors[role.site], value, *sums)
        return found

    def slab_variance(self, values: dict[str, Any]) -> Float[Array, "Q M"]:
        """Prior variances of all slabs, at new values of slab scales."""
        scale = jnp.sqrt(self.at.prior.variance)
        for role in self.roles("slab"):
            scale = spread(values[role.site], self.entries(role), scale)
        return jnp.square(scale)

    def noise(self, values: dict[str, Any], squares: Float[Array, " Q"]) -> dict[str, Target]:
        """Conditionals of the noise scales.

        :param values: the current ones, by the names of their sites.
        :param squares: sums of the squared residuals of each task.
        """
        found = {}
        for role in self.roles("noise"):
            index, value = self.entries(role), values[role.site]
            sums = (tally(x, index, value) for x in (self.at.count, squares))
            found[role.site] = scales_given(self.at.priors[role.site], value, *sums)
        return found

    def inclusion(self, spikes: Float[Array, "Q M"]) -> dict[str, Target]:
        """Conditionals of the inclusion probabilities."""
        found = {}
        for role in self.roles("inclusion"):
            index, value = self.entries(role), self.values[role.site]
            sums = (tally(x, index, value) for x in (spikes, 1 - spikes))
            found[role.site] = inclusion_given(self.at.priors[role.site], value, *sums)
        return found
