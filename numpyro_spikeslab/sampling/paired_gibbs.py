# SPDX-License-Identifier: Apache-2.0
"""Exact draws of spike-and-slab weights, and of what has an exact conditional beside them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import flips
from numpyro_spikeslab.algebra.active_set import Regression
from numpyro_spikeslab.algebra.coefficients import whitened
from numpyro_spikeslab.algebra.pairs import Prior, feature_rows, gibbs_sweep, predictor
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.pattern_sweeps import gibbs_set_sweep
from numpyro_spikeslab.algebra.sparse_sums import at_entries, over_blocks
from numpyro_spikeslab.algebra.task_sweeps import (
    Draws,
    gibbs_masked_sweep,
    gibbs_task_sweep,
    task_products,
)
from numpyro_spikeslab.algebra.variates import logistic_and_normal
from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.reading.coefficient_rows import task_coefficients, without_coefficients
from numpyro_spikeslab.reading.form import COLUMNS
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.sampling.coefficient_draws import draw_beside, drawable
from numpyro_spikeslab.sampling.kernel import BlockKernel, complete, start_inclusion
from numpyro_spikeslab.sampling.scale_draws import Current


class PairedGibbsState(NamedTuple):
    """
    - **z** - dict of the current values of the kernel's sites, spikes and slabs among them.
    - **inclusion_probabilities** - for each set of weights, the conditional probability of each
      spike, in the mean over what a step passes through: averaged over draws, the
      Rao-Blackwellised inclusion probability. Collect it with
      ``extra_fields=("inclusion_probabilities.w",)``, or as
      ``"block_states.0.inclusion_probabilities.w"`` from a composite.
    - **rng_key** - random key for the next step.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    rng_key: Array


class PairedGibbs(BlockKernel):
    """Draws every pair (slab, spike) in turn from its exact conditional (supplement, section 2).

    It also draws what has an exact conditional beside them: noise scales, slab scales and inclusion
    probabilities that are sites of their own, under any prior of positive numbers or of
    probabilities, and coefficients, Normal sites in which the location is affine. Alone it samples
    models that have no other latent sites; beside other kernels it is a block of
    :class:`numpyro.infer.Gibbs` and draws the sites that it is given, for example the pairs
    (:func:`~numpyro_spikeslab.paired_sites`). There is nothing to tune and no warm-up to adapt. The
    design may depend on the sites of other blocks, discrete ones too: it is evaluated in every step
    then.

    Correlated columns stand in for each other, and pairs drawn one by one hardly ever trade places.
    So each step goes on with moves of the spikes alone, all slabs integrated out: each spike is
    offered a flip, and some included weights another place. This is exact, too; where more than a
    quarter of the weights are included, but 32 at least and 64 at most, or single precision does
    not suffice, the step is that of the pairs alone.

    Coefficients that it draws, such as an intercept, are integrated out of the pairs, whose columns
    need not be centred; of tasks those that each has of its own. Where another block draws them, or
    all tasks have them together, centre columns of a mean that is large beside their spread.

    Weights that share a spike (``groups`` of :func:`~numpyro_spikeslab.spike_slab`) are drawn with
    it, group after group, without these moves.

    Weights of shape (Q, M) of Q tasks that share M features, or that mix
    :func:`~numpyro_spikeslab.latent_functions`, are drawn for all tasks at once, from the features'
    Gram matrices; entries may be missing and noise may differ from one to the next.

    :param model: a model whose one observed Normal site is affine in its spike-and-slab weights.
    :param collapsed: whether steps go on with the moves that integrate the slabs out. They take
        time, which designs without correlations do not pay back.
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
        own = {k: shape for pair in form.pairs for k, shape in pair.shapes.items()}
        if {*form.others, form.functions} - {None} <= values.keys():
            return own
        free, known = self._latent_shapes(args, kwargs, values), self._drawable(reading, values)
        own |= {name: shape for name, shape in free.items() if name in known}
        if unknown := [name for name in free if name not in own]:
            # latent functions, which have no generic values, are continuous
            generic = {name: reading.generic.get(name, 0.0) for name in unknown}
            discrete = [
                k for k, x in generic.items() if not jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            ]
            blocks = [f"(PairedGibbs(model), {list(own)})"]
            blocks += [f"(DiscreteGibbs(model), {discrete})"] if discrete else []
            blocks += ["(NUTS(model), None)"] if discrete != unknown else []
            raise ValueError(
                f"PairedGibbs cannot sample the latent sites {unknown}. Leave them to other "
                f"blocks: Gibbs([{', '.join(blocks)}]).{reading.if_traced}"
            )
        return own

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
        own = {k: jnp.zeros(shape) for p in form.pairs for k, shape in p.shapes.items()}
        rest = {name: shape for name, shape in sites.items() if name not in own}
        draw_rest = super()._prior(rest, args, kwargs, values | own)

        def prior(key):
            key_rest, key_spike, key_slab = random.split(key, 3)
            others = draw_rest(key_rest) if rest else {}
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
        rng_key, key, key_beside = random.split(state.rng_key, 3)
        reading = self._read(args, kwargs, values)
        self._check_drawable(reading, values, state.z)
        now = Current.of(reading, values, state.z)
        pairs, inclusion, residual = draw_pairs(key, now, self._collapsed)
        at = now.at._replace(Y=residual)
        pairs |= draw_beside(key_beside, replace(now, values=now.values | pairs, at=at))
        return PairedGibbsState(state.z | pairs, inclusion, rng_key)


def draw_pairs(
    key: Array, now: Current, collapsed: bool
) -> tuple[dict[str, Any], dict[str, Any], Float[Array, "N Q"] | Float[Array, " L"]]:
    """Draw all pairs of a model. Coefficients that are drawn after them are integrated out.

    :param now: the model at zero weights.
    :param collapsed: whether columns of a design may trade places, with all slabs integrated out.
    :return: spikes and slabs, the inclusion probabilities, and the residual of the observations.
    """
    form, values = now.reading.form, now.values
    current = weights(form.join_spikes(values), form.join(values, "{}_slab"))
    if form.kind == COLUMNS:
        results, fit = _draw_columns(key, now, current, collapsed)
    else:
        results, fit = _draw_tasks(key, now, current.reshape(form.shape))
    residual = now.at.Y - fit(weights(*results[:2]))
    # without a barrier the draws are compiled once more for each site of their own
    spikes, slabs, inclusion = jax.lax.optimization_barrier(tuple(map(jnp.ravel, results)))
    new = form.split_spikes(spikes) | form.split(slabs, "{}_slab")
    new = {name: x.astype(values[name].dtype) for name, x in new.items()}
    return new, form.split(inclusion.astype(float), "{}"), residual


def _draw_columns(
    key: Array, now: Current, current: Float[Array, " P"], collapsed: bool
) -> tuple[Draws, Callable]:
    """Draw the weights of a design.

    :return: the draws, and what a design makes of weights.
    """
    reading, at = now.reading, now.at
    relative, columns = at.relative[:, 0], reading.all_columns
    gram = None if columns is None else columns.gram
    whole = reading.design_at(now.values) if reading.design is None else reading.design
    design, target = whole, jnp.sqrt(relative) * at.Y[:, 0]
    precision, prior = 1 / at.sigma2[0], Prior(*(x[0] for x in at.prior))
    if names := tuple(name for name in reading.form.coefficients if name in now.own):
        units, others = without_coefficients(reading.problem, now.values, at, names)
        target = others.whiten(target + units.current @ whitened(units.features, relative))
        design, gram = others.design(whole, reading.apart), None
        if columns is not None:
            gram = others.gram(columns.apart, feature_rows(design, current.size))
    residual = target - predictor(design, current)

    def fit(new):
        added = predictor(whole, new) / jnp.sqrt(jnp.where(relative > 0, relative, 1))
        return added[:, None]

    if (groups := reading.form.groups) is not None:
        sets = Partition.of_spikes(groups)
        return gibbs_set_sweep(key, sets, design, residual, current, precision, prior), fit
    if not collapsed:
        noise = logistic_and_normal(key, current)
        return gibbs_sweep(noise, design, residual, current, precision, prior), fit
    numbers = flips.Numbers.draw(key, current)
    spikes, slabs, _ = gibbs_sweep(numbers.pairs, design, residual, current, precision, prior)
    problem = Regression(design, gram, target, precision, prior)
    return flips.sweep(numbers, problem, spikes, slabs), fit


def _draw_tasks(key: Array, now: Current, current: Float[Array, "Q M"]) -> tuple[Draws, Callable]:
    """Draw the weights of tasks that share or mix features.

    :return: the draws, and what the features make of weights.
    """
    reading, at = now.reading, now.at
    phi = reading.features
    if phi is None:
        phi = now.values[str(reading.form.functions)]
    sites = tuple(each for each in reading.form.of_tasks if each.site in now.own)
    fit = partial(location_of_tasks, at, phi)
    if not sites:
        return draw_tasks(key, at, phi, current), fit
    shares = reading.shares if sites == reading.form.of_tasks else None
    beside = task_coefficients(sites, at, now.values, phi, reading.covariates, shares).beside
    extra, linear = beside.integrated()
    noise, precision = logistic_and_normal(key, current), 1 / at.sigma2
    return gibbs_task_sweep(noise, beside.G, linear, current, precision, at.prior, extra), fit


def location_of_tasks(at: View, phi: Float[Array, "M N"], w: Float[Array, "Q M"]) -> Any:
    """Compute the sums of features times weights, at the observations of all tasks."""
    if at.layout is None:
        return phi.T @ w.T
    return at_entries(at.layout.where, (w, jnp.zeros_like(w)), (phi, jnp.zeros_like(phi)))[0]


def draw_tasks(
    key: Array, at: View, phi: Float[Array, "M N"], current: Float[Array, "Q M"]
) -> Draws:
    """Draw spikes and slabs of weights that share or mix features, and return the inclusion
    probabilities.

    Memory is that of the observations: Gram matrices are those of all tasks together, of a tile of
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
    return gibbs_task_sweep(noise, gram, linear, current, precision, prior)


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
        return gibbs_task_sweep(normals, sums.G, sums.b, weights, precision, prior)

    side = at.layout.by_columns
    return over_blocks(side, len(current), features, at.Y, at.relative, block)
