# SPDX-License-Identifier: Apache-2.0
"""Draws of noise scales, inclusion probabilities and slab scales, given the weights."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.sparse_sums import at_entries
from numpyro_spikeslab.reading.likelihood import by_task
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import Index, Role, SlabRole, Statistics, Target, draw_sites
from numpyro_spikeslab.sampling.kernel import complete


@dataclass(frozen=True)
class Current:
    """A model at the current values of its sites, some of which are to be drawn.

    - **reading** - the model.
    - **values** - of all sites.
    - **own** - names of those that are drawn.
    - **at** - the model at these values and weights of zero.
    """

    reading: Reading
    values: dict[str, Any]
    own: frozenset[str]
    at: View

    @classmethod
    def of(cls, reading: Reading, values: dict[str, Any], z: dict[str, Any]) -> Any:
        """Run the model, at weights of zero.

        :param values: of the sites that other blocks hold.
        :param z: of the kernel's own.
        """
        values = complete(reading, values | z)
        return cls(reading, values, frozenset(z), reading.view(values))

    def roles(self, kind: type[Role] = Role) -> tuple[Role, ...]:
        """The roles of one kind that are drawn."""
        return tuple(role for role in self.reading.form.roles_of(kind) if role.site in self.own)

    def index(self, role: Role) -> Index:
        """Which entry of its site each weight or task takes."""
        return self.reading.indices[role.site]

    def weights(self) -> tuple[Float[Array, "Q M"], Float[Array, "Q M"]]:
        """Spikes and slabs."""
        form = self.reading.form
        both = form.join_spikes(self.values), form.join(self.values, "{}_slab")
        spikes, slabs = (x.astype(self.at.Y.dtype).reshape(form.shape) for x in both)
        return spikes, slabs

    def targets(
        self, roles: tuple[Role, ...], values: dict[str, Any], statistics: Statistics
    ) -> dict[str, Target]:
        """Conditionals of the sites of some roles.

        :param values: the current ones, by the names of their sites.
        """
        return {
            role.site: role.target(
                role.tally(self.index(role), statistics),
                self.at.priors[role.site],
                values[role.site],
            )
            for role in roles
        }

    def slab_variance(self, values: dict[str, Any]) -> Float[Array, "Q M"]:
        """Prior variances of all slabs, at new values of slab scales."""
        at = self.at
        for role in self.roles(SlabRole):
            at = role.place(at, self.index(role), values[role.site])
        return at.prior.variance

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
        statistics = Statistics(
            spikes, counted * jnp.ones_like(slabs), counted * slabs**2, self.at.count, squares
        )
        new = draw_sites(keys[0], self.targets(self.roles(), values, statistics))
        excluded = jnp.sqrt(self.slab_variance(new))
        excluded *= random.normal(keys[1], slabs.shape, slabs.dtype)
        return new, jnp.where(spikes > 0, slabs, excluded)


def squares_given(at: View, phi: Float[Array, "M N"], w: Float[Array, "Q M"]) -> Float[Array, " Q"]:
    """Compute the weighted sum of squared residuals of each task."""
    if at.layout is None:
        fit = phi.T @ w.T
    else:
        fit = at_entries(at.layout.where, (w, jnp.zeros_like(w)), (phi, jnp.zeros_like(phi)))[0]
    return by_task(at.relative * (at.Y - fit) ** 2, at.sigma2.size, at.layout)
