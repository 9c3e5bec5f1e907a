# SPDX-License-Identifier: Apache-2.0
"""The variational posterior of a model, its exact bound, and the M-step of sites with a role."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import Design, Prior
from numpyro_spikeslab.algebra.sparse_sums import Layout
from numpyro_spikeslab.reading.coefficient_rows import standardised
from numpyro_spikeslab.reading.form import COLUMNS, Form
from numpyro_spikeslab.reading.function_prior import FunctionPrior, Parameters
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import Index, SlabRole, Tally
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
    - **values** - of all other sites, each at one point.
    - **residual** - whitened residual of ``<w>``, where a sweep can hand it on to the next.
    - **moments** - mean and variance of the predictor, likewise, where stand-ins need them.
    - **slopes** - of coefficients that follow the weights: given these, coefficients are at
      ``values + slopes (w - <w>)``. Each has the shape of its site, and a last axis of P.
    - **batches** - with steps on batches of tasks, statistics of all tasks; else `None`.
    """

    weights: Any
    functions: FunctionFactors | None
    values: dict[str, Any]
    residual: Float[Array, " N"] | None
    slopes: dict[str, Any] = {}
    batches: "Batches | None" = None
    moments: tuple[Float[Array, "..."], Float[Array, "..."]] | None = None

    def moved(self, **new: Any) -> "Posterior":
        """Replace fields, and forget what followed from the old ones."""
        return self._replace(residual=None, moments=None, **new)


class Batches(NamedTuple):
    """Statistics of all Q tasks, estimated from batches.

    - **tallies** - of the sites that tasks share.
    - **before** - steps of the fit before the batches; the temperature goes on from there.
    """

    tallies: dict[str, Any]
    before: Any


@dataclass(frozen=True)
class Spec:
    """Static arguments of compiled code; hashable.

    - **form** - of the model.
    - **parameters** - of the kernels of its latent functions.
    - **plain** - whether sweeps follow the paper's supplement.
    - **temperature** - maps a step to the temperature of the logits; `None` for 1.
    - **profiled** - the site that is, with one number, the scale of all slabs, or `None`.
    - **white** - whether all functions are white processes with a mean of zero.
    """

    form: Form
    parameters: Parameters | None
    plain: bool
    temperature: Callable[[Any], Any] | None
    profiled: str | None
    white: bool


class Data(NamedTuple):
    """Arrays that compiled code takes.

    - **problem** - the model with its data.
    - **indices** - which entry of each site with a role each weight or task takes.
    - **transforms** - onto the supports of the free sites.
    - **view** - the model, where no free site can change it.
    - **layout** - of the observations, if they are entries of a sparse table.
    - **features** - the factors of the weights, see :mod:`~numpyro_spikeslab.fitting.features`.
    - **kernel**, **mean** - of latent functions.
    """

    problem: Problem
    indices: dict[str, Index]
    transforms: dict[str, Any]
    view: View | None
    layout: Layout | None
    features: Any
    kernel: Any
    mean: Any


def spec_of(reading: Reading, plain: bool, temperature: Any) -> Spec:
    """Make the static arguments of a reading."""
    functions, form = reading.functions, reading.form
    # of traced data it is not known that all weights take the only entry
    roles = (role for role in form.roles_of(SlabRole) if role.has_mode)
    single = (role.site for role in roles if reading.indices[role.site].entries is None)
    return Spec(
        form=form,
        parameters=None if functions is None else functions.parameters,
        plain=plain,
        temperature=temperature,
        profiled=next(single, None),
        white=functions is not None and functions.is_white,
    )


def view_at(spec: Spec, data: Data, posterior: Posterior) -> View:
    """Return the model at a posterior and weights of zero; but at mean weights, with residuals in
    place of observations, if free sites can change the columns."""
    if data.view is not None:
        return with_roles(spec, data, data.view, posterior.values)
    moments = None
    if not spec.form.likelihood.is_fixed:
        moments = posterior.moments or moments_at(spec, data, posterior)
    weights = _weights(spec, posterior)
    return view(data.problem, posterior.values, weights, data.layout, moments)


def moments_at(spec: Spec, data: Data, posterior: Posterior) -> tuple[Any, Any]:
    """Compute mean and variance of the predictor at each observation."""
    problem, values, weights = data.problem, posterior.values, _weights(spec, posterior)
    at = view(problem, values, weights, data.layout)
    mean, variance = map(problem.observed, data.features.moments(spec, data, at, posterior))
    return mean + problem.predictor(values, weights), variance


def _weights(spec: Spec, posterior: Posterior) -> Any:
    """Return the weights at which a model with changing columns is viewed."""
    if spec.form.kind != COLUMNS:
        return None
    return spec.form.split(posterior.weights.mean, "{}")


def with_roles(spec: Spec, data: Data, at: View, values: dict[str, Any]) -> View:
    """Return a view at other values of the sites that have a role; nothing is run for it."""
    for role in spec.form.roles_with_mode:
        at = role.place(at, data.indices[role.site], values[role.site])
    return at


def with_modes(spec: Spec, data: Data, at: View, posterior: Posterior, squares: Any) -> Posterior:
    """Set sites with a role to their maximum a posteriori (supplement 1.2)."""
    tallies = tallies_of(spec, data, at, posterior.weights, squares)
    return posterior._replace(values=modes_of(spec, at, posterior.values, tallies))


def held(
    spec: Spec, temperature: Any, values: dict[str, Any], new: dict[str, Any]
) -> dict[str, Any]:
    """Return new values of sites; those that shape the prior of the weights keep their old ones
    while the temperature is above 1.

    They would follow flattened inclusion probabilities to a prior under which no weight is large.
    """
    if spec.temperature is None:
        return new
    shaping = spec.form.shaping & new.keys()
    return new | {k: jnp.where(temperature > 1, values[k], new[k]) for k in sorted(shaping)}


def tallies_of(
    spec: Spec, data: Data, at: View, weights: Any, squares: Float[Array, " Q"]
) -> dict[str, Tally]:
    """Sum the sufficient statistics of each site with a role."""
    squares = jnp.maximum(squares, data.features.rounding(spec, at))
    statistics = {
        "noise": Tally(at.count, squares),
        "inclusion": Tally(jnp.ones_like(weights.probs), weights.probs),
        "slab": Tally(*weights.slab_moments),
    }
    roles = spec.form.roles_with_mode
    return {role.site: role.tally(data.indices[role.site], statistics) for role in roles}


def modes_of(
    spec: Spec, at: View, values: dict[str, Any], tallies: dict[str, Tally]
) -> dict[str, Any]:
    """Return the values with each site of the tallies at its mode."""
    values = dict(values)
    for role in spec.form.roles_with_mode:
        if role.site in tallies:
            value, prior = values[role.site], at.priors.get(role.site)
            new = role.mode(tallies[role.site], prior, value)
            values[role.site] = jnp.asarray(new, jnp.result_type(value))
    return values


def function_prior(spec: Spec, data: Data, at: View) -> FunctionPrior:
    """Return the prior of the latent functions at a view."""
    assert spec.parameters is not None
    return FunctionPrior(data.kernel, data.mean, spec.parameters, at.priors)


def log_prior(spec: Spec, at: View, values: dict[str, Any], without: Collection[str] = ()) -> Any:
    """Log density of kernels' parameters and of sites with a role, but those in ``without``."""
    total = jnp.zeros(())
    for name in (*spec.form.kernels, *(role.site for role in spec.form.roles_with_mode)):
        if name in at.priors and name not in without:
            total += jnp.sum(at.priors[name].log_prob(values[name]))
    return total


def bound_given(spec: Spec, at: View, posterior: Posterior, squares: Any) -> Float[Array, ""]:
    """Compute the exact evidence lower bound (supplement, eq. 2) from the expected squares."""
    prior = at.prior
    if spec.form.kind == COLUMNS:
        prior = Prior(*(x[0] for x in prior))
    value = at.log_density + log_prior(spec, at, posterior.values)
    value -= at.log_scale + 0.5 * jnp.sum(squares / at.sigma2)
    value -= posterior.weights.divergence(prior)
    if posterior.slopes:
        value -= 0.5 * _cost_of_slopes(spec, at, posterior)
    return value if posterior.functions is None else value - jnp.sum(posterior.functions.kl)


def _cost_of_slopes(spec: Spec, at: View, posterior: Posterior) -> Float[Array, ""]:
    """Expected squared deviations of coefficients that follow the weights, under their prior."""
    sites = spec.form.coefficient_sites(posterior.slopes)
    slopes = standardised(sites, at, posterior.values).unscaled(posterior.slopes)
    if spec.form.kind == COLUMNS:
        return posterior.weights.total_variance(Design(slopes[0].T[None], None))
    return jnp.sum(jnp.sum(slopes**2, axis=1) * posterior.weights.variance)


def bound(spec: Spec, data: Data, posterior: Posterior) -> Float[Array, ""]:
    """Compute the exact evidence lower bound of a posterior."""
    at = view_at(spec, data, posterior)
    return bound_given(spec, at, posterior, data.features.squares(spec, data, at, posterior))


def strong(tree: Any) -> Any:
    """Convert arrays to the current precision and to strong types; weak ones compile twice."""

    def of(x):
        dtype = jnp.result_type(x)
        is_real = jnp.issubdtype(dtype, jnp.floating)
        return jax.lax.convert_element_type(x, jnp.result_type(float) if is_real else dtype)

    return jax.tree.map(of, tree)
