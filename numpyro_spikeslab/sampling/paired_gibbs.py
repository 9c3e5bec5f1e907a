# SPDX-License-Identifier: Apache-2.0
"""Exact draws of spike-and-slab weights, coefficients, scales and probabilities."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.flips import Sweeps
from numpyro_spikeslab.reading.program import are_concrete, compiled
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import SlabRole
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.sampling.density_step import AdaptState, draw_with_density
from numpyro_spikeslab.sampling.kernel import BlockKernel, start_inclusion
from numpyro_spikeslab.sampling.noise_draws import draw_noise, draw_noise_sites
from numpyro_spikeslab.sampling.pair_draws import (
    ShareOfSingles,
    draw_pairs,
    has_share,
    hot_at,
    visits_part,
)


class PairedGibbsState(NamedTuple):
    """State of a :class:`PairedGibbs`.

    - **z** - current values of the kernel's sites, spikes and slabs among them.
    - **inclusion_probabilities** - for each set of weights, the conditional probability of each
      spike, averaged over the moves of a step; its mean over draws is Rao-Blackwellised. Collect it
      with ``extra_fields=("inclusion_probabilities.w",)``, or as
      ``"block_states.0.inclusion_probabilities.w"`` from a composite.
    - **rng_key** - random key for the next step.
    - **adapt_state** - what the warm-up learns of a non-Normal likelihood; `None` for a
      Normal one. ``extra_fields=("adapt_state.mean_accept_prob",)`` collects the mean acceptance
      probability of steps with the learnt Gaussian, in the warm-up; below 0.2 it is not used.
      ``"adapt_state.accept_prob"`` is that of each step, and 1 without the Gaussian.
    - **sweeps** - the precision of moves that integrate the slabs out. It has no arrays.
    - **hot** - with more than 10,000 columns, the numbers of those that all steps try, chosen from
      the data before the chain; `None` if steps try all.
    - **singles** - the share of steps in which single pairs come before flips and swaps, under a
      Normal likelihood; `None` if they come in all.
    """

    z: dict[str, Any]
    inclusion_probabilities: dict[str, Any]
    rng_key: Array
    adapt_state: AdaptState | None = None
    sweeps: Sweeps = Sweeps.AS_PROGRAM
    hot: Array | None = None
    singles: ShareOfSingles | None = None


class PairedGibbs(BlockKernel):
    """Draws pairs (slab, spike) from their exact conditionals (supplement, section 2).

    It also draws noise scales, slab scales and inclusion probabilities that are sites of their own,
    under any prior on positive numbers or on probabilities; sites on which only the noise scales of
    a Normal likelihood depend, as ``sqrt(sigma**2 + tau**2 * z)`` does; coefficients, which are
    Normal sites in which the location is affine; and the scales of their priors, such as ``tau`` of
    the effects ``numpyro.sample("b", dist.Normal(mean, tau))`` of groups of rows. A scale is the
    site itself or an entry of it, not a multiple. Alone, it samples models without other latent
    sites. As a block of :class:`numpyro.infer.Gibbs` it draws the sites that it is given, for
    example the pairs (:func:`~numpyro_spikeslab.paired_sites`). If the design depends on sites of
    other blocks, continuous or discrete, it is evaluated in every step.

    The observations may have any distribution of single numbers whose density depends on the
    weights through a predictor that is affine in them, such as ``Poisson(exp(X @ w))``, or a
    MultivariateNormal one. Under a Normal likelihood the warm-up learns only how often
    pairs are drawn one by one. For all others it learns a Gaussian that proposes the draws; without
    100 steps of warm-up or more, steps are the slower ones that need no Gaussian. All are exact.
    See the page on other likelihoods.

    Pairs drawn one by one rarely exchange correlated columns. So a step continues with flips of
    spikes, and swaps of included columns for others, that integrate all slabs out. Most steps have
    these alone. They are exact,
    too. They are omitted if more than a quarter of the weights are included, but 32 at least and 64
    at most. Weights that share a spike (``groups`` of :func:`~numpyro_spikeslab.spike_slab`) are
    flipped together, given all other weights, and have no swaps. With more than 10,000 columns most
    steps visit a part of these: the columns that the data suggest before the chain, and some
    others, for which columns that are alike should be side by side. Under a Normal likelihood with
    little noise flips and swaps are in double precision, whatever that of the program is. A warning
    says if the noise is too small for the rest of a step, which is in the program's precision.

    With no fewer columns than observations, and at most 1,024 of these, the noise scale is drawn
    with the slabs integrated out, too, so long as more weights are included than half as many.

    Coefficients that the kernel draws, such as an intercept, are integrated out of the pairs, so
    columns need not be centred. For tasks this holds if each task has its own coefficients.
    Otherwise, or if another block draws them, centre the columns. Scales of coefficients of a
    design are drawn with these integrated out under a Normal likelihood with at most 24
    coefficients, and move together with them under others or with more, so neither has to be
    written without its centre.

    Weights of shape (Q, M) of Q tasks that share M features, or that mix
    :func:`~numpyro_spikeslab.latent_functions`, are drawn for all tasks at once. Entries may be
    missing, and noise may differ between entries.

    :param model: a model with one observed site, whose density depends on the spike-and-slab
        weights through a predictor that is affine in them.
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
        return frozenset([*form.coefficients, *form.scales, *reading.indices]) - means | {*pairs}

    def _start(self, reading, values, z, num_warmup, rng_key) -> PairedGibbsState:
        form, adapt_state, hot = reading.form, None, None
        has_hot = self._collapsed and visits_part(form)

        def begin(values, z):
            now, adapt_state = Current.of(reading, values, z), None
            if not form.likelihood.is_fixed:
                adapt_state = AdaptState.begin(num_warmup, now, self._user, self._collapsed)
            return adapt_state, hot_at(now) if has_hot else None

        if has_hot or not form.likelihood.is_fixed:
            # op by op it would take longer, and make non-finite numbers on the way
            is_known = are_concrete(reading.problem.constants)
            start = partial(compiled, begin, once=not has_hot) if is_known else begin
            adapt_state, hot = start(values, z)
        sweeps = reading.sweeps if self._collapsed else Sweeps.AS_PROGRAM
        learns_share = self._collapsed and adapt_state is None and has_share(form)
        singles = ShareOfSingles.begin(num_warmup) if learns_share else None
        return PairedGibbsState(z, start_inclusion(z), rng_key, adapt_state, sweeps, hot, singles)

    def _check(self, reading: Reading, state: Any) -> None:
        if state.adapt_state is not None:
            state.adapt_state.check(reading.form, self._user)

    def _step(self, reading: Reading, values: dict[str, Any], state: Any) -> PairedGibbsState:
        rng_key, key, key_others, key_noise, key_singles = random.split(state.rng_key, 5)
        key_coefficients, *keys = random.split(key_others, 3)
        key_scales = random.fold_in(key_others, 3)
        form, adapt_state, singles, single = reading.form, state.adapt_state, state.singles, None
        now = Current.of(reading, values, state.z, state.hot)
        if adapt_state is None:
            if self._collapsed:
                now = draw_noise(key_noise, now, state.sweeps)
            if singles is not None:
                singles = singles.at(now.weights()[0])
                single = random.uniform(key_singles) < singles.share
            keys_of_pairs = key, key_coefficients
            drawn = draw_pairs(keys_of_pairs, now, self._collapsed, single, sweeps=state.sweeps)
        else:
            drawn, adapt_state = draw_with_density(key, now, adapt_state, self._collapsed)
        new, pairs = drawn.sites, now.weights(drawn.sites)
        new |= draw_noise_sites(key_scales, now, new)
        if now.roles():
            # scales are drawn without the excluded slabs, and these after them from their prior
            scales, slabs = now.draw(keys, now.values | new, pairs, drawn.squares, pairs[0])
            new |= scales
            if now.roles(SlabRole):
                new |= form.split(jnp.ravel(jax.lax.optimization_barrier(slabs)), "{}_slab")
        z = {name: new.get(name, x).astype(x.dtype) for name, x in state.z.items()}
        inclusion = form.split(drawn.inclusion.astype(float), "{}")
        new_state = state._replace(z=z, inclusion_probabilities=inclusion, rng_key=rng_key)
        return new_state._replace(adapt_state=adapt_state, singles=singles)
