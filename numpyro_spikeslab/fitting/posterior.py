# SPDX-License-Identifier: Apache-2.0
"""The variational posterior of a model, and its engine: views, exact bound and M-step."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.observations import Observations
from numpyro_spikeslab.algebra.pairs import Design, Prior
from numpyro_spikeslab.reading.coefficient_rows import covariates_at, standardised
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.function_prior import FunctionPrior
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.roles import Index, Tally, beta_evidence, beta_factor, expected_odds
from numpyro_spikeslab.reading.view import View, view


class FunctionFactors(NamedTuple):
    r"""``q(phi_m)`` of M latent functions, and the logs of their kernels' parameters.

    - **alpha**, **h** - precisions and linear terms of the sites that define it, shape (M, N).
    - **mean**, **var** - its means and variances, shape (M, N).
    - **kl** - its divergence from the prior, shape (M,).
    - **prior_var** - variances of that prior, shape (M, N).
    - **theta** - logs of the kernels' parameters, shape (M, P).
    - **step** - steps of the search over theta, 0 where a parameter is fixed.
    """

    alpha: Float[Array, "M N"]
    h: Float[Array, "M N"]
    mean: Float[Array, "M N"]
    var: Float[Array, "M N"]
    kl: Float[Array, " M"]
    prior_var: Float[Array, "M N"]
    theta: Float[Array, "M P"]
    step: Float[Array, "M P"]


class Posterior(NamedTuple):
    """The variational posterior.

    - **weights** - family of the pairs, see :mod:`~numpyro_spikeslab.algebra.families`; shape (P,)
      for columns of a design, (Q, M) for tasks, which are independent.
    - **functions** - of the latent functions that weights mix, or `None`.
    - **values** - of all other sites.
    - **residual** - whitened residual of ``<w>``, where a sweep hands it on to the next.
    - **slopes** - of coefficients that follow the weights: given these, coefficients are at
      ``values + slopes (w - <w>)``. Each has the shape of its site, and a last axis of P.
    - **batches** - with steps on batches of tasks, statistics of all tasks; else `None`.
    - **moments** - mean and variance of the predictor, where stand-ins need them.
    - **betas** - concentrations of the Beta factors of inclusion probabilities; their ``values``
      have the expected log odds.
    """

    weights: Any
    functions: Any
    values: dict[str, Any]
    residual: Float[Array, " N"] | None
    slopes: dict[str, Any] = {}
    batches: "Batches | None" = None
    moments: tuple[Float[Array, "..."], Float[Array, "..."]] | None = None
    betas: dict[str, Any] = {}

    def moved(self, **new: Any) -> "Posterior":
        """Replace fields, and drop the residual and the moments of the old ones."""
        return self._replace(residual=None, moments=None, **new)


class Batches(NamedTuple):
    """Statistics of all Q tasks, estimated from batches.

    - **tallies** - of the sites that tasks share.
    - **before** - steps of the fit before the batches; the temperature goes on from there.
    """

    tallies: dict[str, Any]
    before: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Engine:
    """A model with its data, and all that a fit computes of it once, as compiled code takes it.

    - **problem** - the model and its data.
    - **indices** - which entry of each site with a role each weight or task takes.
    - **transforms** - onto the supports of the free sites.
    - **base** - the view, where no free site can change it.
    - **layout** - of the observations: a table, or entries of one.
    - **covariates** - rows of coefficients by their names, if they depend on data alone.
    - **features** - the factors of the weights, see :mod:`~numpyro_spikeslab.fitting.features`.
    - **functions** - the prior of the latent functions that weights mix, or `None`.
    - **plain** - whether sweeps follow the paper's supplement.
    - **temperature** - maps a step to the temperature of the logits; `None` for 1.
    - **profiled** - the site of the only slab scale, or `None`.
    """

    problem: Problem
    indices: dict[str, Index]
    transforms: dict[str, Any]
    base: View | None
    layout: Observations
    covariates: dict[str, Any]
    features: Any
    functions: Any
    plain: bool = field(metadata={"static": True})
    temperature: Callable[[Any], Any] | None = field(metadata={"static": True})
    profiled: str | None = field(metadata={"static": True})

    @property
    def form(self) -> Form:
        """The description of the model."""
        return self.problem.form

    def function_prior(self, at: View) -> FunctionPrior:
        """Return the prior of the latent functions at a view."""
        return replace(self.functions, priors=at.priors)

    def covariates_at(self, values: dict[str, Any], names: Collection[str]) -> Any:
        """Return the rows of some coefficients, joined, at given values of the other sites."""
        return covariates_at(self.problem, self.covariates, values, names)

    def view(self, posterior: Posterior) -> View:
        """Return the model at a posterior and weights of zero; for a design whose view is made anew
        at the mean weights, so that its observations are residuals."""
        if self.base is not None:
            return self.with_roles(self.base, posterior.values)
        moments = None
        if not self.form.likelihood.is_fixed:
            moments = posterior.moments or self.moments(posterior)
        weights = self._weights(posterior)
        return view(self.problem, posterior.values, weights, self.layout, moments)

    def moments(self, posterior: Posterior) -> tuple[Any, Any]:
        """Compute mean and variance of the predictor at each observation."""
        problem, values, weights = self.problem, posterior.values, self._weights(posterior)
        at = view(problem, values, weights, self.layout)
        mean, variance = map(problem.observed, self.features.moments(self, at, posterior))
        return mean + problem.predictor(values, weights), variance

    def _weights(self, posterior: Posterior) -> Any:
        """Return the weights at which a model with changing columns is viewed."""
        if not self.form.is_design:
            return None
        return self.form.split(posterior.weights.mean, "{}")

    def with_roles(self, at: View, values: dict[str, Any], changed: Any = None) -> View:
        """Return a view at other values of the sites that have a role, or of the ``changed`` ones;
        nothing is run for it."""
        for role in self.form.roles_with_mode:
            if changed is None or role.site in changed:
                at = role.place(at, self.indices[role.site], values[role.site])
        return at

    def with_modes(self, at: View, posterior: Posterior, squares: Any) -> Posterior:
        """Set sites with a role to their maximum a posteriori (supplement 1.2)."""
        return self.modes(at, posterior, self.tallies(at, posterior.weights, squares))

    def with_betas(self, posterior: Posterior) -> Posterior:
        """Set the factors of inclusion probabilities to the best ones."""
        return self.modes(self.view(posterior), posterior, self._tallies_of_betas(posterior))

    def freeze_shaping(
        self, temperature: Any, values: dict[str, Any], new: dict[str, Any]
    ) -> dict[str, Any]:
        """Return new values of sites; those that shape the prior of the weights keep their old ones
        while the temperature is above 1.

        They would follow flattened inclusion probabilities to a prior without large weights.
        """
        if self.temperature is None:
            return new
        shaping = self.form.shaping & new.keys()
        return new | {k: jnp.where(temperature > 1, values[k], new[k]) for k in sorted(shaping)}

    def tallies(self, at: View, weights: Any, squares: Float[Array, " Q"]) -> dict[str, Tally]:
        """Sum the sufficient statistics of each site with a role."""
        squares = jnp.maximum(squares, self.features.rounding(self, at))
        statistics = {
            "noise": Tally(at.count, squares),
            "slab": Tally(*weights.slab_moments),
        } | self._inclusion(weights)
        roles = self.form.roles_with_mode
        return {role.site: role.tally(self.indices[role.site], statistics) for role in roles}

    def modes(self, at: View, posterior: Posterior, tallies: dict[str, Tally]) -> Posterior:
        """Set each site of the tallies to its mode, or its factor to the best one."""
        values, betas = dict(posterior.values), dict(posterior.betas)
        for role in self.form.roles_with_mode:
            if role.site in tallies:
                tally, prior = tallies[role.site], at.priors.get(role.site)
                value = values[role.site]
                if role.site in betas:
                    betas[role.site] = beta_factor(tally, prior)
                    new = expected_odds(*betas[role.site])
                else:
                    new = role.mode(tally, prior, value)
                values[role.site] = jnp.asarray(new, jnp.result_type(value))
        return posterior._replace(values=values, betas=betas)

    def with_kernels(self, posterior: Posterior) -> Posterior:
        """Copy the kernel parameters of the functions to their sites."""
        values = self.functions.parameters.scatter(posterior.functions.theta)
        kernels = {name: values[name] for name in self.form.kernels}
        return posterior._replace(values=posterior.values | kernels)

    def log_prior(self, at: View, values: dict[str, Any], without: Collection[str] = ()) -> Any:
        """Sum log densities of kernels' parameters and sites with a role, but of ``without``."""
        total = jnp.zeros(())
        for name in (*self.form.kernels, *(role.site for role in self.form.roles_with_mode)):
            if name in at.priors and name not in without:
                total += jnp.sum(at.priors[name].log_prob(values[name]))
        return total

    def bound_given(self, at: View, posterior: Posterior, squares: Any) -> Float[Array, ""]:
        """Compute the exact evidence lower bound (supplement, eq. 2) from the expected squares."""
        prior = at.prior
        if self.form.is_design:
            prior = Prior(*(x[0] for x in prior))
        value = at.log_density + self.log_prior(at, posterior.values, posterior.betas)
        value += self._gain_of_betas(at, posterior)
        value -= at.log_scale + 0.5 * jnp.sum(squares / at.sigma2)
        value -= posterior.weights.divergence(prior)
        if posterior.slopes:
            value -= 0.5 * self._cost_of_slopes(at, posterior)
        return value if posterior.functions is None else value - jnp.sum(posterior.functions.kl)

    def _gain_of_betas(self, at: View, posterior: Posterior) -> Any:
        """Return what the bound gains if inclusion probabilities have their best factors instead of
        values."""
        value = jnp.zeros(())
        for site, tally in self._tallies_of_betas(posterior).items():
            probs, excluded = posterior.values[site], tally.count - tally.total
            value += beta_evidence(tally, at.priors[site])
            value -= jnp.sum(tally.total * jnp.log(probs) + excluded * jnp.log1p(-probs))
        return value

    def _tallies_of_betas(self, posterior: Posterior) -> dict[str, Tally]:
        """Sum the statistics of inclusion probabilities with Beta factors."""
        statistics = self._inclusion(posterior.weights)
        return {
            role.site: role.tally(self.indices[role.site], statistics)
            for role in self.form.roles_with_mode
            if role.site in posterior.betas
        }

    def _inclusion(self, weights: Any) -> dict[str, Tally]:
        return {"inclusion": Tally(jnp.ones_like(weights.probs), weights.probs)}

    def _cost_of_slopes(self, at: View, posterior: Posterior) -> Float[Array, ""]:
        """Sum expected squares of coefficients that follow the weights, under their prior."""
        sites = self.form.coefficient_sites(posterior.slopes)
        slopes = standardised(sites, at, posterior.values).unscaled(posterior.slopes)
        if self.form.is_design:
            return posterior.weights.total_variance(Design(slopes[0].T[None], None))
        return jnp.sum(jnp.sum(slopes**2, axis=1) * posterior.weights.variance)

    def bound(self, posterior: Posterior) -> Float[Array, ""]:
        """Compute the exact evidence lower bound of a posterior."""
        at = self.view(posterior)
        return self.bound_given(at, posterior, self.features.squares(self, at, posterior))


def strong(tree: Any) -> Any:
    """Convert arrays to the current precision and to strong types; weak ones compile twice."""

    def of(x):
        dtype = jnp.result_type(x)
        is_real = jnp.issubdtype(dtype, jnp.floating)
        return jax.lax.convert_element_type(x, jnp.result_type(float) if is_real else dtype)

    return jax.tree.map(of, tree)
