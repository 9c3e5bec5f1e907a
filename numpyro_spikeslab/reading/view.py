# SPDX-License-Identifier: Apache-2.0
"""The model at given values of its other sites."""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.observations import Grid, Observations
from numpyro_spikeslab.algebra.pairs import CHANGING_BLOCK_SIZE, Design, Prior, block_design
from numpyro_spikeslab.algebra.task_sweeps import TaskSums
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.likelihood import Observed
from numpyro_spikeslab.reading.model_run import Problem


class View(NamedTuple):
    """The model at given values of its other sites: Q tasks with N observations each, or L entries.

    An observation has the precision ``relative / sigma2``, 0 where it is missing.

    - **Y** - observations less their location at the given weights, 0 where they are missing.
    - **relative** - precisions relative to the task's, one column where all tasks agree.
    - **sigma2** - noise variance of each task; 1 where noise varies along tasks, which is then a
      part of ``relative``.
    - **count** - how many observations each task has.
    - **rounding** - sum of squared residuals of each task that rounding of its observations makes.
    - **log_scale** - sum of ``log(sigma sqrt(2 pi))`` over all observations.
    - **prior** - prior of the weights, (Q, M), or one row where that of all tasks is the same.
    - **priors** - distributions of the other latent sites.
    - **log_density** - of all sites but the likelihood, the pairs, the functions they mix and those
      that have a role or belong to kernels, whose densities ``priors`` has.
    - **layout** - of the observations: a table, or L entries of one.
    - **links** - derivatives of prior means in coefficients, `None` if all are zero.
    """

    Y: Float[Array, "N Q"] | Float[Array, " L"]
    relative: Float[Array, "N #Q"] | Float[Array, " L"]
    sigma2: Float[Array, " Q"]
    count: Float[Array, " Q"]  # type: ignore[assignment]
    rounding: Float[Array, " Q"]
    log_scale: Float[Array, ""]
    prior: Prior
    priors: dict[str, Any]
    log_density: Float[Array, ""]
    layout: Observations
    links: dict[str, dict[str, Any]] | None = None

    @property
    def precision(self) -> Float[Array, "N Q"]:
        return self.relative / self.sigma2

    def squares(self, residual: Any, variance: Any = 0.0) -> Float[Array, " Q"]:
        """Sum the expected squares of each task's residuals, by their relative precisions."""
        return self.layout.by_task(self.relative * (residual**2 + variance))

    @property
    def whitened(self) -> Float[Array, " N"]:
        """The observations of a design, each times the root of its relative precision."""
        return jnp.sqrt(self.relative[:, 0]) * self.Y[:, 0]

    def over_points(self, x: Float[Array, "*K N"]) -> Float[Array, "*K #Q"]:
        """Compute ``sum_n z_nq x_n``; one column where all tasks weigh alike."""
        return self.layout.over_points(self.relative, x)

    def over_tasks(self, x: Float[Array, " Q *K"]) -> Float[Array, " N *K"]:
        """Compute ``sum_q z_nq x_q``."""
        return self.layout.over_tasks(self.relative, x)

    def sums(self, mean: Float[Array, "M N"], var: Float[Array, "M N"]) -> TaskSums:
        """Sum over the observations of tasks, from means and variances of their features."""
        return TaskSums.of(self.Y, self.relative, mean, var)

    def sweep(
        self, features: tuple[Any, Any], weights: Any, update: Any, sums: TaskSums | None = None
    ) -> tuple[Any, Float[Array, " Q"]]:
        """Visit the weights of all tasks in turn; return the outcome of the update, and expected
        sums of squared residuals of each task.

        :param features: means and variances, `None` for variances of zero.
        :param weights: a family or draws, which are written over.
        :param sums: :meth:`sums` of the features, where they have been computed.
        """
        settings = 1 / self.sigma2, self.prior, update
        if sums is not None:
            return sums.sweep(weights, *settings)
        return self.layout.sweep((self.Y, self.relative), features, weights, *settings)

    def expected_squares(
        self, features: tuple[Float[Array, "M N"], Float[Array, "M N"]], weights: Any
    ) -> Float[Array, " Q"]:
        """Compute the squares of :meth:`sweep` in O(NQM), where :meth:`sums` take O(NQM^2)."""
        mean, var = features
        spread = weights.product_variance(*(self.over_points(x).T for x in (mean**2, var)))
        return self.squares(self.residual(weights.mean, mean)) + jnp.sum(spread, axis=1)

    def residual(self, w: Float[Array, "Q M"], phi: Float[Array, "M N"]) -> Any:
        """Subtract the functions ``phi`` that weights mix from the observations."""
        return self.Y - self.layout.mix(w, phi)


def view(
    problem: Problem,
    values: dict[str, Any],
    weights: dict[str, Any] | None = None,
    layout: Observations | None = None,
    moments: tuple[Any, Any] | None = None,
) -> View:
    """Run the model at given values.

    :param layout: of the observations, by default a whole table.
    :param moments: mean and variance of the predictor at these weights, for which Gaussians stand
        in for the likelihood.
    """
    form, stand_in = problem.form, None
    layout = layout or Grid(form.table)
    observed, other_fields = observe(problem, values, weights)
    if moments is not None:
        stand_in = form.likelihood.at(problem, values, observed, moments[0]).expect(*moments)
        if form.is_design:
            observed = observed._replace(predictor=moments[0])
    return View(**observed.in_tasks(form, layout, stand_in), **other_fields, layout=layout)


def observe(
    problem: Problem, values: dict[str, Any], weights: dict[str, Any] | None = None
) -> tuple[Observed, dict[str, Any]]:
    """Run the model; return its observations, and the other fields of a view."""
    form, run = problem.form, problem.run(values, weights)
    elsewhere = {form.response, form.functions, *form.kernels}
    elsewhere |= {role.site for role in form.roles_with_mode}
    log_probs = [x for name, x in run.log_probs.items() if name not in elsewhere]
    pairs = [run.pairs[pair.name] for pair in form.pairs]
    log_odds = jnp.concatenate([jnp.ravel(prior.log_odds) for prior in pairs])
    scale = jnp.concatenate([jnp.ravel(prior.scale) for prior in pairs])
    return problem.observations(run), {
        "prior": Prior(log_odds.reshape(form.shape), scale.reshape(form.shape) ** 2),
        "priors": run.priors,
        "log_density": sum(log_probs, start=jnp.zeros(())),
        "links": _links(problem, values) if form.links else None,
    }


def _links(problem: Problem, values: dict[str, Any]) -> Any:
    start = {name: values[name] for name in problem.form.coefficients}

    def means(new):
        priors = problem.run(values | new, of=lambda run: run.priors)
        return {name: jnp.broadcast_to(priors[name].mean, x.shape) for name, x in new.items()}

    return jax.jacfwd(means)(start)


def whitened_design(
    form: Form, rows: Float[Array, "P N"], relative: Float[Array, " N"], block_size: int
) -> Design:
    """Whiten the rows of a design and cut them into blocks.

    :param relative: relative precisions of the observations.
    """
    constant = form.fixed_design
    # rows without an observation may be NaN
    rows = jnp.where(relative > 0, rows, 0)
    size = block_size if constant else CHANGING_BLOCK_SIZE
    return block_design(rows, jnp.sqrt(relative), size, constant)
