# SPDX-License-Identifier: Apache-2.0
"""Draws of spike-and-slab weights and of coefficients given everything else."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import flips, pattern_sweeps
from numpyro_spikeslab.algebra.active_set import CollapsedRegression
from numpyro_spikeslab.algebra.coefficients import split, whitened
from numpyro_spikeslab.algebra.heredity import HereditaryPrior
from numpyro_spikeslab.algebra.pairs import (
    MAX_ALL,
    Design,
    Prior,
    feature_rows,
    gibbs_sweep,
    predictor,
)
from numpyro_spikeslab.algebra.part_of_columns import sweep_some
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.sparse_sums import over_blocks
from numpyro_spikeslab.algebra.task_sweeps import (
    Draws,
    TaskProducts,
    gibbs_masked_sweep,
    gibbs_task_sweep,
    task_products,
)
from numpyro_spikeslab.algebra.variates import logistic_and_normal
from numpyro_spikeslab.models.primitives import weights
from numpyro_spikeslab.reading.coefficient_rows import (
    columns_without,
    given_residual,
    joined,
    tasks_without,
)
from numpyro_spikeslab.reading.form import COLUMNS
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.sampling.scale_draws import Current, squares_given

DrawCoefficients = Callable[[Array, Array], tuple[dict[str, Any], Float[Array, " Q"]]]
"""``(key, weights) ->`` draws of the coefficients, and each task's sum of squared residuals."""


class PairDraws(NamedTuple):
    """Draws of the pairs, and of the coefficients given these.

    - **sites** - values of the sites.
    - **inclusion** - probabilities of the spikes, as many as weights.
    - **squares** - sum of squared residuals of each task.
    """

    sites: dict[str, Any]
    inclusion: Array
    squares: Float[Array, " Q"]


def draw_pairs(
    keys: tuple[Array, Array],
    now: Current,
    moves: bool,
    single: bool = True,
    gram: Float[Array, "P P"] | None = None,
    sweeps: flips.Sweeps = flips.Sweeps.AS_PROGRAM,
) -> PairDraws:
    """Draw all pairs and the kernel's coefficients.

    :param keys: for the pairs and for the coefficients.
    :param moves: whether columns of a design may trade places, with all slabs integrated out.
    :param single: whether these moves come after a sweep of single pairs. Without it the draw is
        reversible.
    :param gram: :func:`gram_at` here, by default that of a constant design.
    :param sweeps: the precision of these moves.
    """
    form = now.reading.form
    if form.kind == COLUMNS:
        drawn, draw_coefficients = _draw_columns(keys[0], now, moves, single, gram, sweeps)
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


def _draw_columns(
    key: Array, now: Current, moves: bool, single: bool, gram: Any, sweeps: flips.Sweeps
) -> tuple[tuple[Array, Array, Array], DrawCoefficients]:
    """Draw the pairs of a design with the kernel's coefficients integrated out.

    :return: spikes, slabs and inclusion probabilities; and the draw of the coefficients.
    """
    reading, at, current = now.reading, now.at, weights(*now.weights())[0]
    design, groups, pair = reading.design, reading.form.groups, reading.form.pairs[0]
    if design is None:
        design = reading.design_at(now.values, at.relative[:, 0])
    precision = 1 / at.sigma2[0]
    prior: Any = Prior(*(x[0] for x in at.prior))
    if pair.heredity is not None:
        prior = HereditaryPrior(prior.log_odds, prior.variance, pair.heredity, pair.firsts)
    key_part, alone = None, np.ones(current.size, bool)
    if groups is not None:
        alone = np.bincount(groups)[np.asarray(groups)] == 1
    elif current.size > MAX_ALL and pair.heredity is None:
        key, key_part = random.split(key)
        # else XLA copies a design that is a constant into each branch of each choice
        design = jax.lax.optimization_barrier(design)
    target, columns = jnp.sqrt(at.relative[:, 0]) * at.Y[:, 0], None
    sites = reading.form.coefficient_sites(now.own)
    if gram is None:
        gram = reading.gram_outside if sites else reading.gram
    if sites:
        # integrated out, for given them a column that is far from centred hardly ever gets in
        columns = columns_without(now.covariates, at, now.values, sites, design, reading.split)
        design, target = columns.design, columns.residual
        assert isinstance(design, Design)
        if gram is not None:
            span = feature_rows(design, current.size)[:, at.Y.shape[0] :]
            gram = gram + span @ span.T

    numbers = flips.Numbers.draw(key, current) if moves and alone.sum() > 1 else None
    noise = logistic_and_normal(key, current) if numbers is None else numbers.pairs
    spikes, slabs = (x[0] for x in now.weights())
    drawn, sweep = (spikes.astype(int), slabs, spikes), gibbs_sweep
    if groups is not None or pair.heredity is not None:
        # what needs others is visited one after the other, too
        sets = Partition.of_spikes(groups or range(current.size), 2 if pair.heredity is None else 1)
        sweep = partial(pattern_sweeps.gibbs_sweep, sets)
    if single:
        residual = target - predictor(design, current)
        drawn = sweep(noise, design, residual, current, precision, prior)
    if numbers is not None:
        problem = CollapsedRegression(design, gram, target, precision, prior)
        if not alone.all():
            # a weight that shares its spike stays: it is alone in its window
            windows = jnp.where(alone, current.size, jnp.arange(current.size))
            problem, numbers = problem._replace(windows=windows), numbers.flipping(alone)
        new = sweep_some(key_part, sweeps, numbers, problem, drawn)
        drawn = new[0], new[1], jnp.where(alone, new[2], drawn[2])

    def draw_coefficients(key, w):
        new: dict[str, Any] = {}
        residual = target - predictor(design, w)
        if columns is not None:
            value = columns.standard.prior.value
            noise = random.normal(key, value.shape, value.dtype)
            new, residual = columns.given(residual, noise)
        return new, jnp.sum(residual**2)[None]

    return drawn, draw_coefficients


def _draw_table(key: Array, now: Current) -> tuple[Draws, DrawCoefficients]:
    """Draw the pairs of tasks that share or mix features; see :func:`_draw_columns`."""
    reading, at, form = now.reading, now.at, now.reading.form
    phi = now.values[str(form.functions)] if reading.features is None else reading.features
    sites, tasks, current = form.coefficient_sites(now.own), None, weights(*now.weights())
    if sites and form.of_tasks:
        statistics = reading.task_statistics if sites == form.of_tasks else None
        tasks = tasks_without(sites, at, now.values, phi, reading.covariates, statistics)
        noise = logistic_and_normal(key, current)
        drawn = gibbs_task_sweep(noise, tasks.gram_form(), current, 1 / at.sigma2, at.prior)
    else:
        drawn = draw_tasks(key, at, phi, current)

    def draw_coefficients(key, w):
        if not sites:
            return {}, squares_given(at, phi, w)
        value = joined(sites, now.values)
        noise = random.normal(key, value.shape, value.dtype)
        if tasks is None:
            residual = at.Y - phi.T @ w.T
            new, residual = given_residual(now.covariates, at, now.values, sites, residual, noise)
            return new, at.squares(residual)
        _, new = tasks.given(w, noise)
        change = ((joined(sites, new) - value) @ now.covariates).T
        return new, squares_given(at._replace(Y=at.Y - change), phi, w)

    return drawn, draw_coefficients


def draw_tasks(
    key: Array, at: View, phi: Float[Array, "M N"], current: Float[Array, "Q M"]
) -> Draws:
    """Draw the weights of tasks that share or mix the features ``phi``.

    Memory grows with the observations: Gram matrices belong to all tasks together, to a tile of
    tasks, or to a block of the columns of a sparse table.
    """
    noise, precision, prior = logistic_and_normal(key, current), 1 / at.sigma2, at.prior
    if at.layout is None and at.relative.shape[1] > 1:
        return gibbs_masked_sweep(noise, phi, (at.Y, at.relative), current, precision, prior)
    if at.layout is None:
        gram, linear = task_products(phi, phi, at.relative), (at.relative * at.Y).T @ phi.T
        return gibbs_task_sweep(noise, TaskProducts(gram, linear), current, precision, prior)

    def draw(sums, columns):
        parts = (current, precision, noise)
        weights, tau, normals = jax.tree.map(lambda x: x[columns], parts)
        shared = len(prior.variance) == 1
        of_columns = prior if shared else Prior(*(x[columns] for x in prior))
        return gibbs_task_sweep(normals, TaskProducts(sums.G, sums.b), weights, tau, of_columns)

    features = phi.T, jnp.zeros((phi.shape[1], 0), phi.dtype), jnp.ones_like(phi[0])
    return over_blocks(at.layout.by_columns, len(current), features, at.Y, at.relative, draw)
