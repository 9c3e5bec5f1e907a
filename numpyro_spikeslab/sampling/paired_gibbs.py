# SPDX-License-Identifier: Apache-2.0
"""Exact draws of spike-and-slab weights, coefficients, scales and probabilities."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import flips, pattern_sweeps
from numpyro_spikeslab.algebra.active_set import CollapsedRegression
from numpyro_spikeslab.algebra.pairs import Prior, feature_rows, gibbs_sweep, predictor
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
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.reading.coefficient_rows import (
    columns_without,
    given_residual,
    joined,
    tasks_without,
)
from numpyro_spikeslab.reading.form import COLUMNS
from numpyro_spikeslab.reading.likelihood import by_task
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import SlabRole
from numpyro_spikeslab.sampling.kernel import BlockKernel, start_inclusion
from numpyro_spikeslab.sampling.scale_draws import Current, squares_given


class PairedGibbsState(NamedTuple):
    """
    - **z** - current values of the kernel's sites, spikes and slabs among them.
    - **inclusion_probabilities** - for each set of weights, the conditional probability of each
      spike, averaged over the moves of a step; its mean over draws is Rao-Blackwellised. Collect it
      with ``extra_fields=("inclusion_probabilities.w",)``, or as
      ``"block_states.0.inclusion_probabilities.w"`` from a composite.
    - **rng_key** - random key for the next step.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    rng_key: Array


class PairedGibbs(BlockKernel):
    """Draws pairs (slab, spike) from their exact conditionals (supplement, section 2).

    It also draws noise scales, slab scales and inclusion probabilities that are sites of their own,
    under any prior on positive numbers or on probabilities, and coefficients, which are Normal
    sites in which the location is affine. Alone, it samples models without other latent sites. As a
    block of :class:`numpyro.infer.Gibbs` it draws the sites that it is given, for example the pairs
    (:func:`~numpyro_spikeslab.paired_sites`). Nothing is tuned. If the design depends on sites of
    other blocks, continuous or discrete, it is evaluated in every step.

    Pairs drawn one by one rarely exchange correlated columns. So a step continues with flips of
    spikes, and swaps of included columns for others, that integrate all slabs out. They are exact,
    too. They are omitted if more than a quarter of the weights are included, but 32 at least and 64
    at most, if single precision does not suffice, and for weights that share a spike (``groups`` of
    :func:`~numpyro_spikeslab.spike_slab`).

    Coefficients that the kernel draws, such as an intercept, are integrated out of the pairs, so
    columns need not be centred. For tasks this holds if each task has its own coefficients.
    Otherwise, or if another block draws them, centre the columns.

    Weights of shape (Q, M) of Q tasks that share M features, or that mix
    :func:`~numpyro_spikeslab.latent_functions`, are drawn for all tasks at once. Entries may be
    missing, and noise may differ between entries.

    :param model: a model whose one observed Normal site is affine in its spike-and-slab weights.
    :param collapsed: whether steps include the moves that integrate the slabs out. Without
        correlated columns they are not worth their time.
    :raises ValueError: when initialised, if the model does not fit, the data are bad, or there are
        sites that the kernel cannot draw; the message names the site and the remedy.

    **Example**

    .. doctest::

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> import numpyro_spikeslab as nss
        >>> def model(X, y=None):
        ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with numpyro.plate("feature", X.shape[1]):
        ...         w = nss.spike_slab("w", 0.25)
        ...     with numpyro.plate("obs", X.shape[0]):
        ...         numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)
        >>> X = jax.random.normal(jax.random.key(0), (50, 3))
        >>> y = 2 * X[:, 1] + 0.5 * jax.random.normal(jax.random.key(1), (50,))
        >>> mcmc = MCMC(
        ...     nss.PairedGibbs(model), num_warmup=200, num_samples=500, progress_bar=False
        ... )
        >>> mcmc.run(jax.random.key(2), X, y)
        >>> bool(mcmc.get_samples()["w_spike"].mean(0)[1] > 0.99)
        True
    """

    def __init__(self, model: Callable, *, collapsed: bool = True) -> None:
        super().__init__(model)
        self._collapsed = collapsed

    def _drawable(self, reading: Reading, values: dict[str, Any]) -> frozenset[str]:
        form = reading.form
        # the prior mean of a site that another block holds has this site as an observation
        means = {mean for name, mean in form.links if name in values}
        pairs = (name for pair in form.pairs for name in pair.shapes)
        return frozenset([*form.coefficients, *reading.indices]) - means | {*pairs}

    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> PairedGibbsState:
        return PairedGibbsState(z, start_inclusion(z), rng_key)

    def _step(self, reading: Reading, values: dict[str, Any], state: Any) -> PairedGibbsState:
        rng_key, key, key_others = random.split(state.rng_key, 3)
        now, form = Current.of(reading, values, state.z), reading.form
        draw = _draw_columns if form.kind == COLUMNS else _draw_table
        drawn, draw_coefficients = draw(key, now, self._collapsed)
        # else XLA compiles the draws of the pairs anew for each site that depends on them
        spikes, slabs, inclusion = jax.lax.optimization_barrier(drawn)
        new = form.split_spikes(jnp.ravel(spikes)) | form.split(jnp.ravel(slabs), "{}_slab")
        if now.own - new.keys():
            key_coefficients, *keys = random.split(key_others, 3)
            coefficients, squares = draw_coefficients(key_coefficients, weights(spikes, slabs))
            pairs = tuple(x.astype(now.at.Y.dtype).reshape(form.shape) for x in (spikes, slabs))
            # scales are drawn without the excluded slabs, and these after them from their prior
            scales, slabs = now.draw(keys, now.values, pairs, squares, pairs[0])
            new |= coefficients | scales
            if now.roles(SlabRole):
                new |= form.split(jnp.ravel(jax.lax.optimization_barrier(slabs)), "{}_slab")
        z = {name: new.get(name, x).astype(x.dtype) for name, x in state.z.items()}
        inclusion = form.split(jnp.ravel(inclusion).astype(float), "{}")
        return PairedGibbsState(z, inclusion, rng_key)


DrawCoefficients = Callable[[Array, Array], tuple[dict[str, Any], Float[Array, " Q"]]]
"""``(key, weights) ->`` draws of the coefficients, and each task's sum of squared residuals."""


def _draw_columns(
    key: Array, now: Current, moves: bool
) -> tuple[tuple[Array, Array, Array], DrawCoefficients]:
    """Draw the pairs of a design with the kernel's coefficients integrated out.

    :param moves: whether columns may trade places, with all slabs integrated out.
    :return: spikes, slabs and inclusion probabilities; and the draw of the coefficients.
    """
    reading, at, current = now.reading, now.at, weights(*now.weights())[0]
    design = reading.design_at(now.values) if reading.design is None else reading.design
    precision, prior = 1 / at.sigma2[0], Prior(*(x[0] for x in at.prior))
    target, columns = jnp.sqrt(at.relative[:, 0]) * at.Y[:, 0], None
    sites = reading.form.coefficient_sites(now.own)
    gram = reading.gram_outside if sites else reading.gram
    if sites:
        # integrated out, for given them a column that is far from centred hardly ever gets in
        columns = columns_without(reading.problem, at, now.values, sites, design, reading.split)
        design, target = columns.design, columns.residual
        if gram is not None:
            span = feature_rows(design, current.size)[:, at.Y.shape[0] :]
            gram = gram + span @ span.T
    residual = target - predictor(design, current)
    if (groups := reading.form.groups) is not None:
        sets = Partition.of_spikes(groups)
        drawn = pattern_sweeps.gibbs_sweep(key, sets, design, residual, current, precision, prior)
    elif not moves:
        noise = logistic_and_normal(key, current)
        drawn = gibbs_sweep(noise, design, residual, current, precision, prior)
    else:
        numbers = flips.Numbers.draw(key, current)
        drawn = gibbs_sweep(numbers.pairs, design, residual, current, precision, prior)
        problem = CollapsedRegression(design, gram, target, precision, prior)
        drawn = flips.sweep(numbers, problem, *drawn[:2])

    def draw_coefficients(key, w):
        new: dict[str, Any] = {}
        residual = target - predictor(design, w)
        if columns is not None:
            value = columns.standard.prior.value
            noise = random.normal(key, value.shape, value.dtype)
            new, residual = columns.given(residual, noise)
        return new, jnp.sum(residual**2)[None]

    return drawn, draw_coefficients


def _draw_table(key: Array, now: Current, _: bool) -> tuple[Draws, DrawCoefficients]:
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
            new, residual = given_residual(reading.problem, at, now.values, sites, residual, noise)
            return new, by_task(at.relative * residual**2, form.num_tasks, None)
        _, new = tasks.given(w, noise)
        rows = jnp.concatenate([reading.covariates[each.site] for each in sites])
        change = ((joined(sites, new) - value) @ rows).T
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
