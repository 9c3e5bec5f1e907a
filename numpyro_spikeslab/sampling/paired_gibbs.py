# SPDX-License-Identifier: Apache-2.0
"""Exact draws of spike-and-slab weights, coefficients, scales and probabilities."""

from collections.abc import Callable, Collection
from functools import partial
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
from numpyro_spikeslab.reading.form import COLUMNS, Form
from numpyro_spikeslab.reading.likelihood import by_task
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import SlabRole
from numpyro_spikeslab.sampling.kernel import (
    BlockKernel,
    complete,
    start_inclusion,
)
from numpyro_spikeslab.sampling.scale_draws import Current, squares_given


class PairedGibbsState(NamedTuple):
    """
    - **z** - current values of the kernel's sites, spikes and slabs among them.
    - **inclusion_probabilities** - for each set of weights, the conditional probability of each
      spike, averaged over the moves of a step. The mean over draws is the Rao-Blackwellised
      inclusion probability. Collect it with ``extra_fields=("inclusion_probabilities.w",)``, or as
      ``"block_states.0.inclusion_probabilities.w"`` from a composite.
    - **rng_key** - random key for the next step.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    rng_key: Array


class PairedGibbs(BlockKernel):
    """Draws pairs (slab, spike) from their exact conditionals (supplement, section 2).

    It also draws other sites with an exact conditional: noise scales, slab scales and inclusion
    probabilities that are sites of their own, under any prior on positive numbers or on
    probabilities, and coefficients, which are Normal sites in which the location is affine. Alone,
    it samples models without other latent sites. As a block of :class:`numpyro.infer.Gibbs` it
    draws the sites that it is given, for example the pairs
    (:func:`~numpyro_spikeslab.paired_sites`). Nothing is tuned or adapted. If the design depends on
    sites of other blocks, continuous or discrete, it is evaluated in every step.

    Pairs drawn one by one rarely exchange correlated columns. Therefore a step continues with moves
    of the spikes that integrate all slabs out: each spike is offered a flip, and some included
    weights another column. These moves are exact, too. They are omitted if more than a quarter of
    the weights are included, but 32 at least and 64 at most, or if single precision does not
    suffice.

    Coefficients that the kernel draws, such as an intercept, are integrated out of the pairs, so
    columns need not be centred. For tasks this holds if each task has its own coefficients.
    Otherwise, or if another block draws them, centre the columns.

    Weights that share a spike (``groups`` of :func:`~numpyro_spikeslab.spike_slab`) are drawn with
    it, group after group, without these moves.

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

    def _own_sites(
        self, args: tuple, kwargs: dict[str, Any], values: dict[str, Any]
    ) -> dict[str, tuple[int, ...]]:
        reading = self._read(args, kwargs, values)
        form = reading.form
        shapes = {k: shape for pair in form.pairs for k, shape in pair.shapes.items()}
        if {*form.others, form.functions} - {None} <= values.keys():
            return shapes
        free, drawn = self._latent_shapes(args, kwargs, values), self._drawable(reading, values)
        shapes |= {name: shape for name, shape in free.items() if name in drawn}
        if unknown := [name for name in free if name not in shapes]:
            # latent functions, which have no generic values, are continuous
            generic = {name: reading.generic.get(name, 0.0) for name in unknown}
            discrete = [
                k for k, x in generic.items() if not jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            ]
            blocks = [f"(PairedGibbs(model), {list(shapes)})"]
            blocks += [f"(DiscreteGibbs(model), {discrete})"] if discrete else []
            blocks += ["(NUTS(model), None)"] if discrete != unknown else []
            raise ValueError(
                f"PairedGibbs cannot sample the latent sites {unknown}. Leave them to other "
                f"blocks: Gibbs([{', '.join(blocks)}]).{reading.if_traced}"
            )
        return shapes

    def _drawable(self, reading: Reading, values: dict[str, Any]) -> frozenset[str]:
        pairs = (name for pair in reading.form.pairs for name in pair.shapes)
        return drawable(reading, values) | {*pairs}

    def _prior(
        self,
        sites: dict[str, tuple[int, ...]],
        args: tuple,
        kwargs: dict[str, Any],
        values: dict[str, Any],
    ) -> Callable[[Array], dict[str, Any]]:
        # all pairs at once, for the program of each alone takes long to compile
        reading = self._read(args, kwargs, values)
        form = reading.form
        zeros = {k: jnp.zeros(shape) for p in form.pairs for k, shape in p.shapes.items()}
        remaining = {name: shape for name, shape in sites.items() if name not in zeros}
        draw_rest = super()._prior(remaining, args, kwargs, values | zeros)

        def prior(key):
            key_rest, key_spike, key_slab = random.split(key, 3)
            others = draw_rest(key_rest) if remaining else {}
            log_odds, variance = reading.view(complete(reading, values | others)).prior
            spikes = random.bernoulli(key_spike, jax.nn.sigmoid(log_odds)).astype(int)
            slabs = jnp.sqrt(variance) * random.normal(key_slab, variance.shape)
            spikes, slabs = jax.lax.optimization_barrier((spikes, slabs))
            pairs = form.split_spikes(spikes.ravel()) | form.split(slabs.ravel(), "{}_slab")
            return others | pairs

        return prior

    def _start(self, z: dict[str, Any], num_warmup: int, rng_key: Array) -> PairedGibbsState:
        return PairedGibbsState(z, start_inclusion(z), rng_key)

    def _sample_one(self, state, model_args, model_kwargs):
        args, kwargs, values = self._split(model_args, model_kwargs)
        rng_key, key, key_others = random.split(state.rng_key, 3)
        reading = self._read(args, kwargs, values)
        self._check_drawable(reading, values, state.z)
        now = Current.of(reading, values, state.z)
        pairs = draw_pairs(key, now, self._collapsed)
        new = pairs.sites(reading.form)
        if now.own - new.keys():
            new |= draw_others(key_others, now, pairs)
        z = {name: new.get(name, x).astype(x.dtype) for name, x in state.z.items()}
        inclusion = reading.form.split(jnp.ravel(pairs.inclusion).astype(float), "{}")
        return PairedGibbsState(z, inclusion, rng_key)


def drawable(reading: Reading, values: Collection[str]) -> frozenset[str]:
    """Return names of the sites beside the pairs that have an exact draw.

    :param values: names of the sites that other blocks hold.
    """
    # the prior mean of a site that is held has this site as an observation
    means = {mean for name, mean in reading.form.links if name in values}
    return frozenset([*reading.form.coefficients, *reading.indices]) - means


class PairDraws(NamedTuple):
    """Draws of all pairs, with the kernel's coefficients integrated out.

    - **spikes**, **slabs**, **inclusion** - flat or as (Q, M); the last are the probabilities of
      the spikes.
    - **draw_coefficients** - draws the coefficients given the pairs. It also returns the sum of
      squared residuals of each task.
    """

    spikes: Array
    slabs: Array
    inclusion: Array
    draw_coefficients: Callable[[Array], tuple[dict[str, Any], Float[Array, " Q"]]]

    def sites(self, form: Form) -> dict[str, Any]:
        """Return the values of the sites."""
        spikes = form.split_spikes(jnp.ravel(self.spikes))
        return spikes | form.split(jnp.ravel(self.slabs), "{}_slab")


def draw_pairs(key: Array, now: Current, moves: bool) -> PairDraws:
    """Draw all pairs of a model.

    :param moves: whether columns of a design may trade places, with all slabs integrated out.
    """
    draw = partial(_draw_columns, moves=moves) if now.reading.form.kind == COLUMNS else _draw_table
    current = weights(*(x.reshape(now.reading.form.shape) for x in now.weights()))
    return draw(key, now, current)


def draw_others(key: Array, now: Current, pairs: PairDraws) -> dict[str, Any]:
    """Draw coefficients, scales and probabilities given the pairs, then the excluded slabs.

    Excluded slabs have their prior. Slab scales are drawn without them, and they after these.
    """
    form, (key_coefficients, *keys) = now.reading.form, random.split(key, 3)
    new, squares = pairs.draw_coefficients(key_coefficients)
    spikes, slabs = (x.astype(now.at.Y.dtype).reshape(form.shape) for x in pairs[:2])
    scales, slabs = now.draw(keys, now.values, (spikes, slabs), squares, spikes)
    if now.roles(SlabRole):
        scales |= form.split(jnp.ravel(jax.lax.optimization_barrier(slabs)), "{}_slab")
    return new | scales


def _once(drawn: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
    """Keep XLA from compiling the draws of the pairs anew for each site that depends on them."""
    return jax.lax.optimization_barrier(drawn)


def _draw_columns(key: Array, now: Current, current: Float[Array, "1 P"], moves: bool) -> PairDraws:
    reading, at, current = now.reading, now.at, current[0]
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
    spikes, slabs, inclusion = _once(drawn)

    def draw_coefficients(key):
        residual = target - predictor(design, weights(spikes, slabs))
        if columns is None:
            return {}, jnp.sum(residual**2)[None]
        value = columns.standard.prior.value
        new, residual = columns.given(residual, random.normal(key, value.shape, value.dtype))
        return new, jnp.sum(residual**2)[None]

    return PairDraws(spikes, slabs, inclusion, draw_coefficients)


def _draw_table(key: Array, now: Current, current: Float[Array, "Q M"]) -> PairDraws:
    """Draw the pairs of tasks that share or mix features."""
    reading, at, form = now.reading, now.at, now.reading.form
    phi = now.values[str(form.functions)] if reading.features is None else reading.features
    sites, tasks = form.coefficient_sites(now.own), None
    if sites and form.of_tasks:
        statistics = reading.task_statistics if sites == form.of_tasks else None
        tasks = tasks_without(sites, at, now.values, phi, reading.covariates, statistics)
        products = tasks.gram_form()
        noise = logistic_and_normal(key, current)
        drawn = gibbs_task_sweep(noise, products, current, 1 / at.sigma2, at.prior)
    else:
        drawn = draw_tasks(key, at, phi, current)
    spikes, slabs, inclusion = _once(drawn)

    def draw_coefficients(key):
        w = weights(spikes, slabs)
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

    return PairDraws(spikes, slabs, inclusion, draw_coefficients)


def draw_tasks(
    key: Array, at: View, phi: Float[Array, "M N"], current: Float[Array, "Q M"]
) -> Draws:
    """Draw spikes and slabs of weights that share or mix features, and return the inclusion
    probabilities.

    Memory grows with the observations: Gram matrices belong to all tasks together, to a tile of
    tasks, or of a block of the columns of a sparse table.

    :param at: the model at zero weights.
    :param phi: the features.
    :param current: current weights.
    """
    noise, precision, prior = logistic_and_normal(key, current), 1 / at.sigma2, at.prior
    if at.layout is not None:
        return _draw_columns_of_entries(noise, at, phi, current)
    if at.relative.shape[1] > 1:
        return gibbs_masked_sweep(noise, phi, (at.Y, at.relative), current, precision, prior)
    gram, linear = task_products(phi, phi, at.relative), (at.relative * at.Y).T @ phi.T
    return gibbs_task_sweep(noise, TaskProducts(gram, linear), current, precision, prior)


def _draw_columns_of_entries(
    noise: tuple[Array, Array], at: View, phi: Float[Array, "M N"], current: Float[Array, "Q M"]
) -> Draws:
    """Draw the weights of each column of a table of which some entries are observed."""
    assert at.layout is not None
    features = phi.T, jnp.zeros((phi.shape[1], 0), phi.dtype), jnp.ones_like(phi[0])
    shared = len(at.prior.variance) == 1

    def block(sums, columns):
        weights, precision, normals = jax.tree.map(
            lambda x: x[columns], (current, 1 / at.sigma2, noise)
        )
        prior = at.prior if shared else Prior(*(x[columns] for x in at.prior))
        return gibbs_task_sweep(normals, TaskProducts(sums.G, sums.b), weights, precision, prior)

    side = at.layout.by_columns
    return over_blocks(side, len(current), features, at.Y, at.relative, block)
