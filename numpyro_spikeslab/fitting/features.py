# SPDX-License-Identifier: Apache-2.0
"""Features, the regressors or latent functions that weights multiply: a class for each layout.

:func:`_features_of` chooses the class for a model and its data; steps and the bound call methods.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float

import jax
import jax.numpy as jnp

from numpyro.distributions import biject_to

from numpyro_spikeslab.algebra.coefficients import Split, TaskStatistics, whitened
from numpyro_spikeslab.algebra.families import Expectation, PairedMeanField
from numpyro_spikeslab.algebra.pairs import (
    ChangingDesign,
    Design,
    Prior,
    in_parts,
    predictor,
)
from numpyro_spikeslab.algebra.task_sweeps import TaskSums, task_sweep
from numpyro_spikeslab.fitting.function_sweeps import sweep, sweep_entries, sweep_plain
from numpyro_spikeslab.fitting.posterior import Engine, Posterior, strong
from numpyro_spikeslab.reading.coefficient_rows import (
    TasksWithout,
    columns_without,
    given_residual,
    joined,
    tasks_without,
)
from numpyro_spikeslab.reading.linear import blocks_at
from numpyro_spikeslab.reading.program import RUN_ONCE, are_concrete, outside_transformations
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import Index, NoiseRole, SlabRole
from numpyro_spikeslab.reading.view import View

Swept = tuple[View, Posterior, Float[Array, " Q"]]
"""The view after a sweep, the posterior, and the expected squares of the residual of each task."""


class Features:
    """The features of a model. ``at`` is the view at the posterior ``q``. Subclasses define:

    - **sweep** - update the weights, and functions, one after the other.
    - **moments** - mean and variance, for each observation, of the weights' part of the predictor
      that ``at`` does not contain.
    - **squares** - expected sum of squared residuals of each task, weighted by relative precisions.
    - **rounding** - size of the rounding errors in these sums.
    - **with_coefficients** - set coefficients to their joint mode given the mean weights.
    """

    num_starts: ClassVar[int] = 1
    """How many starts a run has by default."""

    def begin(self, engine: Engine, q: Posterior) -> Posterior:
        """Compute the residual or the moments, if sweeps hand them on."""
        return q


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Columns(Features):
    """Columns of a design, each with one weight; a sweep carries the whitened residual.

    - **design** - the whitened design; `None` if other sites change it.
    - **split** - its parts in and off the span of the covariates; `None` without coefficients.
    - **rows** - the design before whitening in blocks, if that alone changes; else `None`.
    """

    design: Design | None
    split: Split | None
    rows: Float[Array, "K B N"] | None

    def begin(self, engine: Engine, q: Posterior) -> Posterior:
        if engine.base is None and engine.form.likelihood.is_fixed:
            return q
        return _begun(engine, q)

    def sweep(self, engine: Engine, at: View, q: Posterior, temperature: Any) -> Swept:
        design = self.design_at(engine, at, q)
        setting = 1 / at.sigma2[0], Prior(*(x[0] for x in at.prior)), temperature
        if not q.slopes:
            residual = at.whitened if engine.base is None else q.residual
            weights, residual = q.weights.sweep(design, residual, *setting)
            q = q._replace(weights=weights, residual=residual)
            return at, q, self._squares(engine, at, q, design)
        # coefficients are integrated out, then set given the weights
        sites = engine.form.coefficient_sites(q.slopes)
        rows = engine.covariates_at(q.values, q.slopes)
        without = columns_without(rows, at, q.values, sites, design, self.split)
        weights, residual = q.weights.sweep(without.design, without.residual, *setting)
        values, residual = without.given(residual)
        slopes = without.standard.slopes(without.coefficients.slopes)
        q = q._replace(weights=weights, values=q.values | values, residual=residual, slopes=slopes)
        return at, q, self._squares(engine, at, q, design)

    def moments(self, engine: Engine, at: View, q: Posterior) -> tuple[Array, Array]:
        observed = (at.relative[:, 0] > 0).astype(at.relative.dtype)
        design = Design(self._blocks(engine, q), None)
        variance = q.weights.predictor_variance(self._moving(engine, q, design, observed))
        mean = jnp.zeros_like(variance)
        if engine.base is not None:
            mean = predictor(design, q.weights.mean)
        return mean[:, None], variance[:, None]

    def squares(self, engine: Engine, at: View, q: Posterior) -> Float[Array, " Q"]:
        if not engine.form.likelihood.is_fixed:
            _, variance = q.moments or engine.moments(q)
            return at.squares(at.Y, engine.form.tasks_last(variance))
        q = q._replace(residual=self.whitened_residual(engine, at, q))
        return self._squares(engine, at, q, self.design_at(engine, at, q))

    def _blocks(self, engine, q) -> Float[Array, "K B N"]:
        """Return the design before whitening."""
        return blocks_at(engine.problem, q.values) if self.rows is None else self.rows

    def _squares(self, engine, at, q, design) -> Float[Array, " Q"]:
        if not engine.form.likelihood.is_fixed:
            # the next stand-in has others
            return jnp.full(1, jnp.nan)
        moving = self._moving(engine, q, design, at.relative[:, 0])
        variance = q.weights.total_variance(moving)
        return (jnp.sum(q.residual**2) + variance)[None]

    def _moving(self, engine, q, design, relative) -> Design:
        """Return the design plus its effect through the coefficients."""
        if not q.slopes:
            return design
        sites = engine.form.coefficient_sites(q.slopes)
        rows = whitened(engine.covariates_at(q.values, q.slopes), relative)
        slopes = in_parts(joined(sites, q.slopes, 1)[0].T, *design.rows.shape[:2])
        return Design(design.rows + slopes @ rows, None)

    def rounding(self, engine: Engine, at: View) -> Float[Array, " Q"]:
        return 16 * at.rounding

    def with_coefficients(self, engine: Engine, q: Posterior) -> Posterior:
        at = engine.view(q)
        # the view is at the mean weights, so Y is the residual
        return _with_coefficients(engine, at, q, at.Y)

    def design_at(self, engine: Engine, at: View, q: Posterior) -> Any:
        """Return the whitened design."""
        if self.design is not None:
            return self.design
        rows, whitening = self._blocks(engine, q), jnp.sqrt(at.relative[:, 0])
        if engine.form.likelihood.is_fixed or not isinstance(q.weights, PairedMeanField):
            return Design(rows * whitening, None)
        return ChangingDesign(rows, whitening, jnp.zeros((0, len(whitening))), jnp.zeros((0, 0)))

    def whitened_residual(self, engine: Engine, at: View, q: Posterior) -> Array:
        """Compute the whitened residual at the mean weights."""
        if engine.base is None:
            return at.whitened
        return at.whitened - predictor(self.design_at(engine, at, q), q.weights.mean)


@jax.jit
def _begun(engine: Engine, q: Posterior) -> Posterior:
    if not engine.form.likelihood.is_fixed:
        return strong(q._replace(moments=engine.moments(q)))
    residual = engine.features.whitened_residual(engine, engine.view(q), q)
    return strong(q._replace(residual=residual))


def _with_coefficients(engine, at, q, residual) -> Posterior:
    """Set coefficients that are one dense vector to their mode."""
    sites = engine.form.coefficient_sites(engine.form.coefficients)
    rows = engine.covariates_at(q.values, engine.form.coefficients)
    new, _ = given_residual(rows, at, q.values, sites, residual)
    return q.moved(values=q.values | new)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tasks(Features):
    """Features that Q tasks share, each task with weights of its own; base of the classes below.

    - **statistics** - precomputed sums for tasks with covariates; `None` if other sites change
      them.
    """

    statistics: TaskStatistics | None

    def of(self, q: Posterior) -> tuple[Float[Array, "M N"], Float[Array, "M N"]]:
        """Means and variances of the features."""
        raise NotImplementedError

    def moments(self, engine: Engine, at: View, q: Posterior) -> tuple[Array, Array]:
        return at.layout.moments(q.weights, *self.of(q))

    def squares(self, engine: Engine, at: View, q: Posterior) -> Float[Array, " Q"]:
        return at.expected_squares(self.of(q), q.weights)

    def rounding(self, engine: Engine, at: View) -> Float[Array, " Q"]:
        # squares come from sums by subtraction, so rounding grows with the power of the data
        power = at.squares(at.Y)
        return jnp.finfo(power.dtype).eps * power + at.rounding

    def with_coefficients(self, engine: Engine, q: Posterior) -> Posterior:
        at = engine.view(q)
        if engine.form.of_tasks:
            tasks = self.without_coefficients(engine, at, q)
            return q.moved(values=q.values | tasks.given(q.weights.mean)[1])
        return _with_coefficients(engine, at, q, at.residual(q.weights.mean, self.of(q)[0]))

    def without_coefficients(self, engine: Engine, at: View, q: Posterior) -> TasksWithout:
        """Integrate the coefficients of tasks out."""
        form, features = engine.form, self.of(q)[0]
        rows = engine.covariates_at(q.values, form.coefficients)
        return tasks_without(form.of_tasks, at, q.values, features, rows, self.statistics)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared(Tasks):
    """Known features, with the given values.

    - **sums** - products with each other and the data; `None` if free sites change them, or if all
      tasks have products of their own that are too many numbers: then tiles of tasks are visited.
    """

    values: Float[Array, "M N"]
    sums: TaskSums | None

    def of(self, q: Posterior) -> tuple[Float[Array, "M N"], Float[Array, "M N"]]:
        return self.values, jnp.zeros_like(self.values)

    def sweep(self, engine: Engine, at: View, q: Posterior, temperature: Any) -> Swept:
        update, sums = Expectation(temperature), self.sums
        if not q.slopes:
            if sums is None and engine.form.keeps_products:
                sums = at.sums(*self.of(q))
            weights, squares = at.sweep(self.of(q), q.weights, update, sums)
            return at, q._replace(weights=weights), squares
        # the coefficients of each task are integrated out, then set given the weights
        tasks = self.without_coefficients(engine, at, q)
        weights = task_sweep(tasks.sums(), q.weights, 1 / at.sigma2, at.prior, update)
        (u, values), slopes = tasks.given(weights.mean), tasks.coefficients.slopes
        squares = tasks.squares(weights, u, slopes)
        q = q._replace(weights=weights, values=q.values | values)
        return at, q._replace(slopes=tasks.standard.slopes(slopes)), squares

    def moments(self, engine: Engine, at: View, q: Posterior) -> tuple[Array, Array]:
        mean, variance = super().moments(engine, at, q)
        if not q.slopes:
            return mean, variance
        slopes = joined(engine.form.of_tasks, q.slopes, 1)
        rows = engine.covariates_at(q.values, engine.form.coefficients)
        features = self.values + jnp.einsum("qcm,cn->qmn", slopes, rows)
        return mean, jnp.einsum("qm,qmn->nq", q.weights.variance, features**2)

    def squares(self, engine: Engine, at: View, q: Posterior) -> Float[Array, " Q"]:
        if not q.slopes:
            return super().squares(engine, at, q)
        tasks = self.without_coefficients(engine, at, q)
        slopes = tasks.standard.unscaled(q.slopes)
        return tasks.squares(q.weights, tasks.standard.prior.deviation, slopes)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentFunctions(Tasks):
    """Latent functions with a dense table of observations and an optional mask."""

    # a random one, and the singular vectors of the table
    num_starts = 2

    def of(self, q: Posterior) -> tuple[Float[Array, "M N"], Float[Array, "M N"]]:
        functions = q.functions
        return functions.mean, functions.var

    def sweep(self, engine: Engine, at: View, q: Posterior, temperature: Any) -> Swept:
        visit = sweep_plain if engine.plain else sweep
        q, squares = visit(engine, at, q, temperature)
        q = engine.with_kernels(q)
        return engine.with_roles(at, q.values), q, squares


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ObservedEntries(LatentFunctions):
    """White latent functions with the entries of a sparse table as observations."""

    num_starts = 1

    def sweep(self, engine: Engine, at: View, q: Posterior, temperature: Any) -> Swept:
        return at, *sweep_entries(at, q, temperature)

    def squares(self, engine: Engine, at: View, q: Posterior) -> Float[Array, " Q"]:
        # the moments are optimal already, so gradients need not pass through them
        mean, variance = jax.lax.stop_gradient(self.moments(engine, at, q))
        return at.squares(at.Y - mean, variance)


_compiled_blocks = jax.jit(blocks_at)


def engine_of(reading: Reading, plain: bool, temperature: Any) -> Engine:
    """Make the engine of a reading, with all arrays that depend on the data alone."""
    functions, (at, indices) = reading.functions, with_shared_prior(reading)
    # of traced data it is not known that all weights take the only entry
    roles = (role for role in reading.form.roles_of(SlabRole) if role.has_mode)
    single = (role.site for role in roles if reading.indices[role.site].entries is None)
    return Engine(
        problem=reading.problem,
        indices=indices,
        transforms={name: biject_to(support) for name, support in reading.supports.items()},
        base=at,
        layout=reading.layout,
        covariates=reading.covariates,
        features=_features_of(reading, at),
        functions=None if functions is None else functions.prior({}),
        plain=plain,
        temperature=temperature,
        profiled=next(single, None),
    )


def _features_of(reading: Reading, at: View | None) -> Features:
    """Choose the class of the features; ``at`` is `None` if a free site can change the view."""
    form, values = reading.form, reading.features
    if form.is_design:
        rows = reading.rows if reading.design is None else None
        rows = None if rows is None else _compiled_blocks(reading.problem, reading.generic, rows)
        return Columns(reading.design, reading.split, rows)
    if not form.shares_features:
        return (ObservedEntries if form.sparse else LatentFunctions)(None)
    if not form.keeps_products:
        return Shared(None, values, None)
    sums = None if at is None else jax.jit(View.sums)(at, values, jnp.zeros_like(values))
    return Shared(reading.task_statistics, values, sums)


def with_shared_prior(reading: Reading) -> tuple[View | None, dict[str, Index]]:
    """Return the view, if no free site can change it, and the indices of the sites with a role.

    If all tasks share the prior, keep one row of it and of the indices, to save memory.
    """
    at, indices, form = reading.base, reading.indices, reading.form
    if at is None or form.is_design:
        return at, indices
    of_weights = [role.site for role in form.roles if not isinstance(role, NoiseRole)]
    tables = at.prior, {site: indices[site] for site in of_weights}
    if not are_concrete(tables):
        return at, indices
    with outside_transformations():
        if not _are_alike(tables):
            return at, indices
        prior, single_rows = jax.tree.map(lambda x: x[:1], tables)
    return at._replace(prior=prior), indices | single_rows


@partial(jax.jit, compiler_options=RUN_ONCE)
def _are_alike(tables: Any) -> Bool[Array, ""]:
    """Test whether all rows of each table are equal."""
    return jnp.all(jnp.stack([jnp.all(x == x[:1]) for x in jax.tree.leaves(tables)]))
