# SPDX-License-Identifier: Apache-2.0
"""Draws of spike-and-slab weights and of coefficients given everything else."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import flips
from numpyro_spikeslab.algebra.active_set import CollapsedRegression, entries_of, is_precise
from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.coefficients import basis_of, split, whitened
from numpyro_spikeslab.algebra.pairs import (
    MAX_ALL,
    Draw,
    Draws,
    Prior,
    predictor,
)
from numpyro_spikeslab.algebra.part_of_columns import hot_columns, sweep_some
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.pattern_sweeps import gibbs_sweep
from numpyro_spikeslab.algebra.task_sweeps import task_sweep
from numpyro_spikeslab.algebra.variates import logistic_and_normal
from numpyro_spikeslab.models.primitives import weights
from numpyro_spikeslab.reading.coefficient_rows import (
    ColumnsWithout,
    columns_without,
    given_residual,
    joined,
    tasks_without,
)
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.sampling.coefficient_scales import draw_coefficients
from numpyro_spikeslab.sampling.current import Current

DrawCoefficients = Callable[[Array, Array], tuple[dict[str, Any], Float[Array, " Q"]]]
"""``(key, weights) ->`` draws of the coefficients, and each task's sum of squared residuals."""


LEAST_SHARE, FADING = 1 / 8, 0.98
"""Least share of steps with a sweep of single pairs, and what the share falls by in each step."""


class PairDraws(NamedTuple):
    """Draws of the pairs, and of the coefficients given these.

    - **sites** - values of the sites.
    - **inclusion** - probabilities of the spikes, as many as weights.
    - **squares** - sum of squared residuals of each task.
    """

    sites: dict[str, Any]
    inclusion: Array
    squares: Float[Array, " Q"]


class ShareOfSingles(NamedTuple):
    """The share of steps in which a sweep of single pairs comes before flips and swaps.

    It costs more than these and adds little, except where more weights are included than they have
    slots for: there only single pairs move, so the share is 1. The warm-up learns it. Later it
    stays, since a choice that depends on the spikes would change the posterior.

    - **left** - how many steps of the warm-up are left.
    - **share** - of the next steps; 1 without a warm-up.
    """

    left: Int[Array, ""]
    share: Float[Array, ""]

    @classmethod
    def begin(cls, num_warmup: Any) -> "ShareOfSingles":
        """Return the share before a warm-up."""
        share = jnp.where(jnp.asarray(num_warmup) > 0, LEAST_SHARE, 1.0)
        return cls(jnp.asarray(num_warmup, int), share.astype(float))

    def at(self, spikes: Float[Array, "1 P"]) -> "ShareOfSingles":
        """Return the share for the step from these spikes."""
        is_crowded = jnp.sum(spikes) > flips.num_slots(spikes.size)
        learnt = jnp.where(is_crowded, 1.0, jnp.maximum(LEAST_SHARE, FADING * self.share))
        share = jnp.where(self.left > 0, learnt, self.share)
        return ShareOfSingles(jnp.maximum(self.left - 1, 0), share)


def has_share(form: Form) -> bool:
    """Whether flips and swaps visit all pairs, so that few steps need single pairs, too."""
    visits_all = form.is_design and bool(form.sets.alone.all()) and not visits_part(form)
    return visits_all and form.size > 1


def draw_pairs(
    keys: tuple[Array, Array],
    now: Current,
    moves: bool,
    single: Bool[Array, ""] | None = None,
    sweeps: flips.Sweeps = flips.Sweeps.AS_PROGRAM,
) -> PairDraws:
    """Draw all pairs and the kernel's coefficients.

    :param keys: for the pairs and for the coefficients.
    :param moves: whether columns of a design may trade places, with all slabs integrated out.
    :param single: whether these moves come after a sweep of single pairs, see
        :class:`ShareOfSingles`; by default they do.
    :param sweeps: the precision of these moves.
    """
    form = now.reading.form
    if form.is_design:
        drawn, draw_coefficients = _draw_columns(keys[0], now, moves, single, sweeps)
    else:
        drawn, draw_coefficients = _draw_table(keys[0], now)
    # else XLA compiles the draws of the pairs anew for each site that depends on them
    spikes, slabs, inclusion = jax.lax.optimization_barrier(drawn)
    sites = form.split_spikes(jnp.ravel(spikes)) | form.split(jnp.ravel(slabs), "{}_slab")
    coefficients, squares = draw_coefficients(keys[1], weights(spikes, slabs))
    return PairDraws(sites | coefficients, jnp.ravel(inclusion), squares)


def gram_at(now: Current) -> Float[Array, "P P"]:
    """Compute the products of the whitened columns outside of the span of the covariates."""
    reading, relative = now.reading, now.at.relative[:, 0]
    rows = reading.design_at(now.values, relative).rows
    if now.covariates is not None:
        rows = split(rows, whitened(now.covariates, relative)).outside
    rows = rows.reshape(-1, rows.shape[-1])[: reading.form.size]
    return rows @ rows.T


def visits_part(form: Form) -> bool:
    """Whether flips and swaps visit a part of the columns."""
    return form.is_design and not form.sets.stacks and form.size > MAX_ALL


def hot_at(now: Current) -> Int[Array, " H"]:
    """Choose the hot columns, which every sweep visits."""
    reading, form, values = now.reading, now.reading.form, now.values
    if not form.likelihood.is_fixed:
        # a Gaussian of the same slopes without weights, and of their mean information
        f = reading.problem.predictor(values)
        density = now.likelihood(f).log_density
        slope = jax.jvp(density, (f,), (jnp.ones_like(f),))[1]
        precision = jnp.full_like(f, jnp.mean(slope**2))
        stand_in = StandIn(precision, f + slope / precision, jnp.zeros_like(f))
        now = now.with_stand_in(now.observed.for_one(stand_in))
    relative, y = now.at.relative[:, 0], now.at.whitened
    basis = jnp.zeros((0, y.size), y.dtype)
    if now.covariates is not None:
        basis = basis_of(whitened(now.covariates, relative))
    prior = form.pairs[0].prior(Prior(*(x[0] for x in now.at.prior)))
    design: Any = reading.design_at(values, relative)
    problem = CollapsedRegression(design, None, y, 1 / now.at.sigma2[0], prior)
    return hot_columns(problem, basis)


def _draw_columns(
    key: Array, now: Current, moves: bool, single: Any, sweeps: flips.Sweeps
) -> tuple[Draws, DrawCoefficients]:
    """Draw the pairs of a design with the kernel's coefficients integrated out.

    :return: spikes, slabs and inclusion probabilities; and the draw of the coefficients.
    """
    key, part, problem, columns = _columns(key, now)
    sets, current = now.reading.form.sets, weights(*now.weights())[0]
    design, target = problem.design, problem.target
    numbers, key_singles = None, key
    if moves and sets.alone.sum() > 1:
        key, key_singles = random.split(key)
        numbers = flips.Numbers.draw(key, current)

    def of_singles():
        noise, prior = logistic_and_normal(key_singles, current), problem.prior
        residual = target - predictor(design, current)
        return gibbs_sweep(sets, noise, design, residual, current, problem.precision, prior)

    if single is None:
        drawn = of_singles()
    else:
        # the choice may depend on all but spikes and slabs
        single |= ~is_precise(problem.linear, problem.squares)
        before = Draws.of(*(x[0] for x in now.weights()))
        drawn = jax.lax.cond(single, of_singles, lambda: before)
    if numbers is not None:
        drawn = _moved((part, sets, sweeps), numbers, problem, drawn)

    def draw_others(key, w):
        new: dict[str, Any] = {}
        residual, inside = jnp.split(target - predictor(design, w), [len(now.at.Y)])
        if columns is not None:
            new, inside = draw_coefficients(key, now, columns, inside)
        return new, (jnp.sum(residual**2) + jnp.sum(inside**2))[None]

    return drawn, draw_others


def _columns(
    key: Array, now: Current, gram: Any = None
) -> tuple[Array, Any, CollapsedRegression, ColumnsWithout | None]:
    """Make the regression on columns of a design, with the kernel's coefficients integrated out.

    :param gram: :func:`gram_at` here, by default of a constant design.
    :return: the key of the sweep; the part of the columns, see
        :func:`~numpyro_spikeslab.algebra.part_of_columns.sweep_some`; the regression; and
        :func:`~numpyro_spikeslab.reading.coefficient_rows.columns_without`, if there are any.
    """
    reading, at = now.reading, now.at
    design: Any = reading.design_at(now.values, at.relative[:, 0])
    target, without, part = at.whitened, None, None
    if visits_part(reading.form):
        key, key_part = random.split(key)
        part = key_part, now.hot
        # else XLA copies a design that is a constant into each branch of each choice
        design = jax.lax.optimization_barrier(design)
    sites = reading.form.coefficient_sites(now.own_sites)
    if gram is None:
        gram = reading.gram_outside if sites else reading.gram
    if sites:
        # integrated out, for given them a column that is far from centred hardly ever gets in
        without = columns_without(now.covariates, at, now.values, sites, design, reading.split)
        design, target = without.design, without.residual
    prior = reading.form.pairs[0].prior(Prior(*(x[0] for x in at.prior)))
    problem = CollapsedRegression(design, gram, target, 1 / at.sigma2[0], prior)
    return key, part, problem, without


class Proposal(NamedTuple):
    """Spikes that flips and swaps propose, with slabs and coefficients integrated out.

    - **spikes**, **slabs**, **slots** - see :func:`~numpyro_spikeslab.algebra.flips.sweep`.
    - **problem**, **without** - the regression, with the coefficients integrated out.
    """

    spikes: Int[Array, " P"]
    slabs: Float[Array, " P"]
    slots: flips.Slots
    problem: CollapsedRegression
    without: ColumnsWithout | None

    def draw(self, slots: flips.Slots, noise: Float[Array, " L"]) -> tuple[Any, Any]:
        """Draw the included slabs and the coefficients, as deviations from the prior, by standard
        normal noise."""
        problem, without, size = self.problem, self.without, slots.slots.size
        scale = entries_of(jnp.sqrt(problem.prior.variance), slots.slots)
        slabs, rest = scale * ((slots.target + noise[:size]) @ slots.root), noise[size:]
        if without is None:
            return slabs, rest
        inside = problem.design.parts[1].T
        target = problem.target[-len(inside) :]
        residual = target - entries_of(inside, slots.slots) @ slabs
        return slabs, without.coefficients.given(residual[None], rest[None])[0][0]


def propose_pairs(key: Array, now: Current, gram: Float[Array, "P P"] | None) -> Proposal:
    """Propose spikes, reversibly.

    :param gram: :func:`gram_at` here.
    """
    key, part, problem, without = _columns(key, now, gram)
    drawn = Draws.of(*(x[0] for x in now.weights()))
    numbers = flips.Numbers.draw(key, drawn.slabs)
    sweeps = flips.Sweeps.AS_PROGRAM
    proposed = sweep_some(part, sweeps, numbers, problem, drawn)
    spikes, slabs, _, slots = jax.lax.optimization_barrier(proposed)
    return Proposal(spikes, slabs, slots, problem, without)


def _moved(
    choices: tuple[Any, Partition, flips.Sweeps],
    numbers: flips.Numbers,
    problem: CollapsedRegression,
    drawn: Draws,
) -> Draws:
    """Flip and swap the spikes that no other weight shares.

    :param choices: the part of the columns, see
        :func:`~numpyro_spikeslab.algebra.part_of_columns.sweep_some`; the sets of weights; and the
        precision of the moves.
    """
    part, sets, sweeps = choices
    if not sets.alone.all():
        # a weight that shares its spike stays: it is alone in its window
        windows = jnp.where(sets.alone, sets.size, jnp.arange(sets.size))
        problem, numbers = problem._replace(windows=windows), numbers.flipping(sets.alone)
    spikes, slabs, probs, _ = sweep_some(part, sweeps, numbers, problem, drawn)
    return Draws(spikes, slabs, jnp.where(sets.alone, probs, drawn.probs))


def _draw_table(key: Array, now: Current) -> tuple[Draws, DrawCoefficients]:
    """Draw the pairs of tasks that share or mix features; see :func:`_draw_columns`."""
    reading, at, form = now.reading, now.at, now.reading.form
    phi = now.values[str(form.functions)] if reading.features is None else reading.features
    sites, tasks, current = form.coefficient_sites(now.own_sites), None, Draws.of(*now.weights())
    update = Draw(logistic_and_normal(key, current.slabs))
    if sites and form.of_tasks:
        statistics = reading.task_statistics if sites == form.of_tasks else None
        tasks = tasks_without(sites, at, now.values, phi, now.covariates, statistics)
        drawn = task_sweep(tasks.sums(), current, 1 / at.sigma2, at.prior, update)
    else:
        drawn, _ = at.sweep((phi, None), current, update)

    def draw_coefficients(key, w):
        if not sites:
            return {}, at.squares(at.residual(w, phi))
        value = joined(sites, now.values)
        noise = random.normal(key, value.shape, value.dtype)
        if tasks is None:
            residual = at.residual(w, phi)
            new, residual = given_residual(now.covariates, at, now.values, sites, residual, noise)
            return new, at.squares(residual)
        _, new = tasks.given(w, noise)
        change = ((joined(sites, new) - value) @ now.covariates).T
        without = at._replace(Y=at.Y - change)
        return new, without.squares(without.residual(w, phi))

    return drawn, draw_coefficients
