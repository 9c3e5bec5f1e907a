# SPDX-License-Identifier: Apache-2.0
"""The model at the current values of a chain, and draws of its scales and probabilities."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxtyping import Array, Float

from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.search import slice_sample
from numpyro_spikeslab.reading.coefficient_rows import joined, standardised
from numpyro_spikeslab.reading.likelihood import Observed
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import (
    NUM_UPDATES,
    CoefficientRole,
    InclusionRole,
    Index,
    Role,
    SlabRole,
    Tally,
    beta_evidence,
    draw_beta,
    draw_sites,
    elementwise,
)
from numpyro_spikeslab.reading.view import View, observe
from numpyro_spikeslab.support.priors import base_of


@dataclass(frozen=True)
class Current:
    """A model at the current values of its sites.

    - **own_sites** - names of the sites that a kernel draws.
    - **observed** - the observations, and their location at weights of zero.
    - **at** - the view at these values and weights of zero.
    - **covariates** - rows in the location of the coefficients that the kernel draws, joined.
    - **hot** - the hot columns, which every sweep visits; `None` if sweeps visit all columns.
    """

    reading: Reading
    values: dict[str, Any]
    own_sites: frozenset[str]
    observed: Observed
    at: View
    covariates: Any
    hot: Any = None

    @classmethod
    def of(
        cls, reading: Reading, values: dict[str, Any], z: dict[str, Any], hot: Any = None
    ) -> Any:
        """Run the model at values of other blocks' sites, and ``z`` of the kernel's own."""
        values = reading.generic | reading.params | values | z
        observed, other_fields = observe(reading.problem, values)
        fields = observed.in_tasks(reading.form, reading.layout)
        at = View(**fields, **other_fields, layout=reading.layout)
        covariates = reading.covariates_at(values, z)
        return cls(reading, values, frozenset(z), observed, at, covariates, hot)

    def with_stand_in(self, stand_in: StandIn) -> Any:
        """Return the model with a stand-in for the density of the observations."""
        fields = self.observed.in_tasks(self.reading.form, self.reading.layout, stand_in)
        return replace(self, at=self.at._replace(**fields))

    def with_auxiliaries(self, key: Array) -> Any:
        """Draw auxiliary variables; return the model with the Gaussian that they make of it."""
        if self.reading.form.likelihood.is_fixed:
            return self
        f = self.predictor()
        return self.with_stand_in(self.likelihood(f).draw(key, f))

    def predictor(self, sites: Any = None) -> Float[Array, "..."]:
        """Compute the predictor at the current values, or at new ones of some sites."""
        values = self.values | (sites or {})
        spikes, slabs = self.weights(values)
        w = self.reading.form.split(jnp.ravel(spikes * slabs), "{}")
        return self.reading.problem.predictor(values, w)

    def likelihood(self, f: Float[Array, "..."]) -> Any:
        """Return the likelihood at the current values of all else than the predictor."""
        reading = self.reading
        return reading.form.likelihood.at(reading.problem, self.values, self.observed, f)

    def coefficients(
        self, values: dict[str, Any]
    ) -> tuple[Float[Array, "C N"], Float[Array, " C"], Callable[[Any], dict[str, Any]]]:
        """Return the kernel's coefficients as weights that are always included: the rows that they
        multiply in the location, their deviations from the prior, and the way back to values."""
        at, sites = self.at, self.reading.form.coefficient_sites(self.own_sites)
        if not sites:
            none = jnp.zeros((0, len(at.Y)), at.Y.dtype)
            return none, none[:, 0], lambda u: {}
        standard = standardised(sites, at, self.values)
        rows = standard.prior.rows(self.covariates)
        u = standard.prior.unscaled(joined(sites, values) - standard.prior.origin)
        return rows[0], u[0], lambda u: standard.values(u[None])

    def deviations(self, values: dict[str, Any]) -> Float[Array, " C"]:
        """Return how far all coefficients are from their prior means at new values, by site."""
        form = self.reading.form
        sites = form.coefficient_sites(form.coefficients)
        by_site = standardised(sites, self.at, self.values).deviations(values)
        return jnp.concatenate([jnp.ravel(by_site[name]) for name in form.coefficients])

    def roles(self, kind: type[Role] = Role) -> tuple[Role, ...]:
        """Return the roles of one kind that are drawn."""
        return tuple(
            role for role in self.reading.form.roles_of(kind) if role.site in self.own_sites
        )

    def index(self, role: Role) -> Index:
        """Return which entry of the site each weight or task takes."""
        return self.reading.indices[role.site]

    def weights(self, sites: Any = None) -> tuple[Float[Array, "Q M"], Float[Array, "Q M"]]:
        """Return spikes and slabs, at the current or at other values of the sites."""
        form, dtype = self.reading.form, self.at.Y.dtype
        values = self.values if sites is None else sites
        spikes, slabs = form.join_spikes(values), form.join(values, "{}_slab")
        return spikes.astype(dtype).reshape(form.shape), slabs.astype(dtype).reshape(form.shape)

    def draw_roles(
        self,
        key: Array,
        kind: type[Role],
        values: dict[str, Any],
        statistics: dict[str, Tally],
        without: Collection[str] = (),
    ) -> dict[str, Any]:
        """Draw the sites of the roles of one kind, given their current values."""
        targets = {}
        for role in self.roles(kind):
            if role.site in without:
                continue
            tally = role.tally(self.index(role), statistics)
            targets[role.site] = role.target(tally, self.at.priors[role.site], values[role.site])
        return draw_sites(key, targets)

    def draw_concentrations(
        self, key: Array, values: dict[str, Any], statistics: dict[str, Tally]
    ) -> dict[str, Any]:
        """Draw concentrations given the spikes alone, then the probabilities given both: a joint
        draw, for given probabilities near 0 the concentrations would barely move."""
        names = sorted(self.reading.form.concentrations & self.own_sites)
        if not names:
            return {}
        priors_at = partial(self.reading.problem.run, of=lambda run: run.priors)
        tallies = {
            role.site: role.tally(self.index(role), statistics)
            for role in self.roles(InclusionRole)
            if isinstance(base_of(self.at.priors[role.site]), dist.Beta)
        }
        new: dict[str, Any] = {}
        for name in names:

            def log_density(log_x, name=name):
                x = jnp.exp(log_x)
                priors = priors_at(values | new | {name: x})
                evidence = sum(beta_evidence(tally, priors[k]) for k, tally in tallies.items())
                return elementwise(priors[name], ())(x) + log_x + evidence, ()

            key, key_name = random.split(key)
            log_x, _ = slice_sample(key_name, log_density, jnp.log(values[name]), NUM_UPDATES)
            new[name] = jnp.exp(log_x)
        priors, keys = priors_at(values | new), random.split(key, len(tallies))
        each = zip(keys, tallies.items(), strict=True)
        return new | {site: draw_beta(key, tally, priors[site]) for key, (site, tally) in each}

    def slab_variance(self, values: dict[str, Any]) -> Float[Array, "Q M"]:
        """Return the prior variances of all slabs at new values of slab scales."""
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
        """Draw all scales and probabilities, then the excluded slabs from their prior.

        :param values: current values by site, with new ones of coefficients.
        :param now: spikes and slabs.
        :param squares: sum of squared residuals of each task.
        :param counted: 1 for slabs that enter the update of their scale, 0 for those drawn here.
        :return: new values by site, and all slabs.
        """
        spikes, slabs = now
        # if columns determine the response, the scale would fall until its square underflows
        squares = jnp.maximum(squares, self.at.rounding)
        slab_counts = counted * jnp.ones_like(slabs)
        statistics = {
            "noise": Tally(self.at.count, squares),
            "inclusion": Tally(self.reading.form.pairs[0].allowed(spikes), spikes),
            "slab": Tally(slab_counts, counted * slabs**2),
        }
        if self.roles(CoefficientRole):
            deviations = self.deviations(values)
            statistics["coefficient"] = Tally(jnp.ones_like(deviations), deviations**2)
        new = self.draw_concentrations(random.fold_in(keys[0], 1), values, statistics)
        new |= self.draw_roles(keys[0], Role, values, statistics, without=new)
        excluded = jnp.sqrt(self.slab_variance(new))
        excluded *= random.normal(keys[1], slabs.shape, slabs.dtype)
        return new, jnp.where(spikes > 0, slabs, excluded)
