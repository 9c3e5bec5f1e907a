# SPDX-License-Identifier: Apache-2.0
r"""Draws of pairs and coefficients under a non-Normal likelihood.

A step is one of two. Each keeps the posterior given all other sites.

- The local one needs no warm-up. Auxiliary variables are drawn given the predictor, afresh in each
  step, and the pairs given the Gaussians that they make of the likelihood (Polson, Scott and
  Windle, 2013, *Bayesian inference for logistic models using Polya-Gamma latent variables*). A
  likelihood without auxiliary variables, or counts under which they hardly let the predictor move,
  get Metropolis steps of single pairs, or of weights that share a spike, instead.
- The other one proposes spikes under one fixed Gaussian in place of the likelihood, learnt in the
  warm-up, and accepts them by the ratio of the two (surrogate transition; Liu, 2001, *Monte Carlo
  strategies in scientific computing*), averaged over draws of their slabs. It mixes far better, but
  where the likelihood has heavier tails than the Gaussian it may stay long, so local steps come
  between at random.

Auxiliary variables live within a step. So a block that draws other sites, such as a dispersion,
uses the density of the user's model, without them; drawn between the auxiliary variables and the
pairs, these sites would have a wrong distribution (van Dyk and Park, 2008, *Partially collapsed
Gibbs samplers*).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import lax, random
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.pair_metropolis import (
    LearntMoments,
    PairState,
    correction,
    metropolis_sweep,
    slice_along,
)
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.likelihood import DensityAt
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import MAX_GRAM
from numpyro_spikeslab.sampling.coefficient_scales import move_scales
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.sampling.pair_draws import (
    PairDraws,
    Proposal,
    draw_pairs,
    gram_at,
    propose_pairs,
)
from numpyro_spikeslab.support.messages import bad

LOCAL_SHARE = 0.125
"""Share of local steps among those after the warm-up. A quarter gives fewer effective draws per
second, by 20 to 65 % on four correlated designs; less than an eighth hardly gives more."""

MIN_ACCEPT_PROB = 0.2
"""Mean acceptance probability below which all steps are local. On breast cancer, 0.3 still pays."""

GOOD, NUM_SLICES = 0.85, 8.0
"""Mean acceptance probability above which local steps have no slices. What is missing to it is
added to the share of local steps; times the second number it is the number of slices in one. It is
0.9 on ordinary tables, where slices do not pay, and 0.5 to 0.8 where classes are separated or rare.
Where all steps are local, each has one slice."""

MAX_MOVED = 16
"""Most included weights that move together; each step chooses them anew."""

NUM_TRIED = 8
"""Draws of the slabs given the old and given the new spikes. With 1 the acceptance probability is
0.4 where the likelihood is far from Gaussian, with 8 it is 0.57, with 16 it is 0.59."""

MIN_WARMUP = 100
"""Fewer steps of warm-up teach no Gaussian: after 60, steps under it may be worse than local."""


class AdaptState(NamedTuple):
    """State of the warm-up under a non-Normal likelihood.

    From its first to its last quarter it averages predictors and slopes. In its last quarter it
    tries the Gaussian that they give. Both are decided once: nothing changes after the warm-up.

    - **i** - number of steps so far.
    - **num_warmup** - number of steps of the warm-up.
    - **log_density** - of the observations at the start of the chain.
    - **moments** - running moments of the predictor and of the slopes of the log density.
    - **accept_prob** - acceptance probability of the step; 1 for a local one, 0 if the Gaussian
      could not move the pairs.
    - **mean_accept_prob**, **num_tried** - mean of such steps in the warm-up with the Gaussian, 1
      before the first and 0 if there are none, and their number.
    - **gram** - :func:`~numpyro_spikeslab.sampling.pair_draws.gram_at` under the Gaussian, made
      once; `None` where it may change, or columns are many.
    """

    i: Array
    num_warmup: Array
    log_density: Float[Array, ""]
    moments: LearntMoments
    accept_prob: Float[Array, ""]
    mean_accept_prob: Float[Array, ""]
    num_tried: Float[Array, ""]
    gram: Float[Array, "P P"] | None

    @classmethod
    def begin(cls, num_warmup: int, now: Current, user: str, moves: bool) -> "AdaptState":
        """Make the state before the first step; :meth:`check` looks at it.

        :raises ValueError: if weights that need others lack auxiliary variables.
        """
        form, predictor, gram = now.reading.form, now.predictor(), None
        if form.pairs[0].heredity is not None and not form.likelihood.is_closed:
            remedy = "Counts may be negative binomial."
            raise bad(f"{user}: heredity", "a likelihood such as Poisson's", "None", remedy)
        density = DensityAt(now.reading.problem, now.values, now.observed)
        total, zero = jnp.sum(density.log_density(predictor)), jnp.zeros((), predictor.dtype)
        covariates_stay = form.constant_covariates or not form.coefficient_sites(now.own_sites)
        stays = form.constant_design and covariates_stay and form.size <= MAX_GRAM
        has_gaussian = has_gaussian_steps(form, moves)
        if has_gaussian and stays:
            gram = jnp.zeros((form.size, form.size), predictor.dtype)
        counts = jnp.array(0), jnp.asarray(num_warmup, int)
        # taken for a good one until it is tried, for bad ones are rarely tried
        mean = zero + has_gaussian
        return cls(*counts, total, LearntMoments.zero(predictor), zero + 1, mean, zero, gram)

    def check(self, form: Form, user: str) -> None:
        """Check the state of one chain or of many before the first step.

        :raises ValueError: if the density is not finite there.
        """
        starts = self.log_density
        if are_concrete(starts) and not jnp.all(jnp.isfinite(starts)):
            what = f"{user}: the log density of {form.response!r} at the start"
            got, remedy = starts[~jnp.isfinite(starts)].ravel()[0], "Scale the columns, or give "
            remedy += "a start near the data as `init_params`."
            raise bad(what, got, "a finite number", remedy)

    @property
    def may_propose(self) -> Bool[Array, ""]:
        """Whether some of the next steps are under the Gaussian."""
        tries = (self.num_warmup >= MIN_WARMUP) & (4 * self.i >= 3 * self.num_warmup)
        return tries & ((self.i < self.num_warmup) | (self.mean_accept_prob >= MIN_ACCEPT_PROB))

    @property
    def missing(self) -> Float[Array, ""]:
        """The part that the mean acceptance probability lacks to a good one."""
        return jnp.maximum(GOOD - self.mean_accept_prob, 0)

    def takes_gaussian(self, key: Array) -> Bool[Array, ""]:
        """Decide whether the next step is under the Gaussian, without a look at the draws."""
        return self.may_propose & (random.uniform(key) >= LOCAL_SHARE + self.missing)

    def num_slices(self, key: Array) -> Int[Array, ""]:
        """Draw the number of slices of a local step, without a look at the draws."""
        number = jnp.where(self.may_propose, NUM_SLICES * self.missing, 1)
        return jnp.floor(number + random.uniform(key, dtype=number.dtype)).astype(int)

    @property
    def learns(self) -> Bool[Array, ""]:
        """Whether the next step is in the middle half of the warm-up."""
        return (4 * self.i >= self.num_warmup) & (4 * self.i < 3 * self.num_warmup)

    def after(
        self,
        moments: LearntMoments,
        gaussian: Bool[Array, ""],
        accept_prob: Float[Array, ""],
        gram: Callable[[], Any],
    ) -> "AdaptState":
        """Return the state after a step.

        :param gram: makes the Gram matrix.
        """
        counts = gaussian & (self.i < self.num_warmup)
        num_tried = self.num_tried + counts
        # a density that is not a number is one of 0
        accept_prob = jnp.nan_to_num(accept_prob)
        change = jnp.where(counts, accept_prob - self.mean_accept_prob, 0)
        new = self._replace(
            i=self.i + 1,
            moments=moments,
            accept_prob=accept_prob,
            mean_accept_prob=self.mean_accept_prob + change / jnp.maximum(num_tried, 1),
            num_tried=num_tried,
        )
        if self.gram is None:
            return new
        ends = self.learns & ~new.learns
        return new._replace(gram=lax.cond(ends, gram, lambda: self.gram))


def has_gaussian_steps(form: Form, moves: bool) -> bool:
    """Whether the pairs have a reversible draw under a Gaussian; one pair alone has none."""
    return form.is_design and bool(form.sets.alone.all()) and moves and form.size > 1


class Start(NamedTuple):
    """The model at the start of a step.

    - **now** - the model, with any stand-in for the likelihood.
    - **rows** - the columns of the design, as rows; `None` where tasks share features.
    - **density** - the likelihood at the values of the other sites.
    - **f** - the predictor.
    """

    now: Current
    rows: Float[Array, "P N"] | None
    density: Any
    f: Float[Array, "..."]

    @classmethod
    def of(cls, now: Current) -> "Start":
        """Compute what the branches of a step share, for they may not store it."""
        reading, f = now.reading, now.predictor()
        rows = reading.rows_at(now.values) if reading.form.is_design else None
        return cls(now, rows, now.likelihood(f), f)

    def flat_density(self, f: Float[Array, " N"]) -> Float[Array, " N"]:
        """Compute the log density of each observation, flattened."""
        return jnp.ravel(self.density.log_density(f.reshape(self.f.shape)))

    def where_seen(self, rows: Float[Array, "*K N"]) -> Float[Array, "*K N"]:
        """Set to 0 what may be NaN where nothing is observed."""
        return jnp.where(self.now.at.relative[:, 0] > 0, rows, 0)


def draw_with_density(
    key: Array, now: Current, adapt: AdaptState, moves: bool
) -> tuple[PairDraws, AdaptState]:
    """Draw all pairs and the kernel's coefficients.

    :param now: the model, with any stand-in for the likelihood.
    :param moves: see :func:`~numpyro_spikeslab.sampling.pair_draws.draw_pairs`.
    """
    key_kind, key_local, *others, key_slice = random.split(key, 5)
    keys, keys_slice = (others[0], others[1]), random.split(key_slice)
    start, form, one = Start.of(now), now.reading.form, jnp.ones_like(adapt.accept_prob)
    learnt, gaussian = adapt.moments.stand_in(), jnp.array(False)

    def under(learnt):
        return now.with_stand_in(now.observed.for_one(learnt))

    def proposed():
        proposal = propose_pairs(keys[0], under(learnt), adapt.gram)
        return accepted(keys[1], start, proposal, learnt)

    def local():
        drawn, number = draw_locally(key_local, keys, start, moves), adapt.num_slices(keys_slice[0])
        if not form.is_design:
            return drawn, one
        sites = slice_all(keys_slice[1], number, start, drawn.sites, learnt.precision)
        return drawn._replace(sites=sites), one

    if has_gaussian_steps(form, moves):
        gaussian = adapt.takes_gaussian(key_kind)
        drawn, accept_prob = lax.cond(gaussian, proposed, local)
    else:
        drawn, accept_prob = local()
    moved = move_scales(random.fold_in(key, 1), now, drawn.sites, start.density.log_density)
    drawn = drawn._replace(sites=moved)

    def learn():
        f = now.predictor(drawn.sites)
        slope = jax.jvp(start.density.log_density, (f,), (jnp.ones_like(f),))[1]
        return adapt.moments.updated(f, slope)

    moments = lax.cond(adapt.learns, learn, lambda: adapt.moments)
    adapt = adapt.after(moments, gaussian, accept_prob, lambda: gram_at(under(moments.stand_in())))
    return drawn, adapt


def accepted(
    key: Array, start: Start, proposal: Proposal, learnt: StandIn
) -> tuple[PairDraws, Float[Array, ""]]:
    """Accept or reject spikes that the learnt Gaussian proposes.

    Slabs and coefficients are drawn several times given the old spikes, where the current ones are
    one of the draws, and given the new spikes. The ratio of the means of each draw's
    :func:`correction` accepts, which then chooses one draw (Andrieu, Doucet and Holenstein, 2010,
    *Particle Markov chain Monte Carlo methods*).

    :return: the draws, and the acceptance probability.
    """
    now, form, slots = start.now, start.now.reading.form, proposal.slots.slots
    (spikes,), (slabs,) = now.weights()
    covariates, u, values_at = now.coefficients(now.values)
    key_noise, key_accept, key_which = random.split(key, 3)
    size = slots.shape[1]
    noise = random.normal(key_noise, (2, NUM_TRIED, size + u.size), slabs.dtype)
    w, new_u = jax.vmap(jax.vmap(proposal.draw, (None, 0)))(proposal.slots, noise)
    w = w.at[0, 0].set(slabs.at[slots[0]].get(mode="fill", fill_value=0))
    new_u = new_u.at[0, 0].set(u)
    assert start.rows is not None
    rows, places = start.rows, jnp.minimum(slots, spikes.size - 1)
    f = jnp.ravel(start.f) + (new_u - u) @ covariates

    def add(k, f):
        # in place of the current weight
        return f + w[:, :, k, None] * rows[places[:, k], None] - w[0, 0, k] * rows[places[0, k]]

    last = jnp.max(jnp.where(slots < spikes.size, 1 + jnp.arange(size), 0))
    f = lax.fori_loop(0, last, add, f)

    def gain(f):
        return correction(start.density.log_density, learnt, start.f, f.reshape(start.f.shape))

    gains = jax.vmap(jax.vmap(gain))(start.where_seen(f))
    # a density that is not a number is one of 0
    gains = jnp.where(jnp.isnan(gains), -jnp.inf, gains)
    means = logsumexp(gains, axis=1)
    log_ratio = means[1] - means[0]
    # the proposal is the identity where it has no room for all included weights, or too few digits
    moves = jnp.sum(slots[0] < spikes.size) == jnp.sum(spikes)
    accepts = jnp.log(random.uniform(key_accept, minval=jnp.finfo(w.dtype).tiny)) < log_ratio
    end = accepts.astype(int)
    which = random.categorical(key_which, gains[end])
    new_slabs = (
        jnp.where(accepts, proposal.slabs, slabs).at[slots[end]].set(w[end, which], mode="drop")
    )
    new_spikes = jnp.where(accepts, proposal.spikes, spikes.astype(int))
    sites = form.split_spikes(new_spikes) | form.split(new_slabs, "{}_slab")
    sites |= values_at(new_u[end, which])
    sites = {k: jnp.where(moves, x, now.values[k]) for k, x in sites.items()}
    # the probabilities of a proposal differ from the posterior ones
    inclusion = jnp.ravel(now.weights(sites)[0])
    accept_prob = jnp.where(moves, jnp.exp(jnp.minimum(log_ratio, 0)), 0)
    return PairDraws(sites, inclusion, jnp.zeros_like(now.at.sigma2)), accept_prob


def draw_locally(key: Array, keys: tuple[Array, Array], start: Start, moves: bool) -> PairDraws:
    """Draw pairs and coefficients given auxiliary variables, or by Metropolis steps."""
    now, form, alone = start.now, start.now.reading.form, start.density.needs_metropolis

    def single():
        return metropolis(key, start)

    def given_auxiliaries():
        return draw_pairs(keys, now.with_stand_in(start.density.draw(key, start.f)), moves)

    if isinstance(alone, bool):
        return single() if alone else given_auxiliaries()
    if not form.is_design or form.pairs[0].heredity is not None:
        return given_auxiliaries()
    return lax.cond(alone, single, given_auxiliaries)


def slice_all(
    key: Array,
    number: Int[Array, ""],
    start: Start,
    sites: dict[str, Any],
    precision: Float[Array, "..."],
) -> dict[str, Any]:
    """Move coefficients and included weights together, by some :func:`slice_along`.

    :param sites: new values of the pairs and coefficients.
    :param precision: of the learnt Gaussian.
    :return: the sites, of which slabs and coefficients have changed.
    """
    now, rows = start.now, start.rows
    assert rows is not None
    (spikes,), (slabs,) = now.weights(sites)
    variance, f = now.at.prior.variance[0], now.predictor(sites)
    covariates, u, values_at = now.coefficients(now.values | sites)
    ones = jnp.ones_like(u)

    def turn(_, carry):
        key, slabs, u, f = carry
        key, key_members, key_slice = random.split(key, 3)
        # included ones first
        order = spikes + random.uniform(key_members, spikes.shape, spikes.dtype)
        members = lax.top_k(order, min(MAX_MOVED, spikes.size))[1]
        parts = rows[members], spikes[members] > 0, slabs[members], variance[members]
        others = covariates, ones > 0, u, ones
        x, included, at, spread = (jnp.concatenate(x) for x in zip(parts, others, strict=True))
        learnt = start.flat_density, jnp.ravel(precision)
        end, f = slice_along(key_slice, start.where_seen(x), included, at, spread, f, *learnt)
        return key, slabs.at[members].set(end[: members.size]), end[members.size :], f

    _, slabs, u, _ = lax.fori_loop(0, number, turn, (key, slabs, u, jnp.ravel(f)))
    moved = now.reading.form.split(slabs, "{}_slab") | values_at(u)
    return sites | {k: x.astype(sites[k].dtype) for k, x in moved.items()}


def metropolis(key: Array, start: Start) -> PairDraws:
    """Draw pairs, and coefficients as weights that are always included, by Metropolis steps."""
    now, form = start.now, start.now.reading.form
    (spikes,), (slabs,) = now.weights()
    covariates, u, values_at = now.coefficients(now.values)
    ones = jnp.ones_like(u)
    log_odds, variance = (x[0] for x in now.at.prior)
    prior = Prior(jnp.concatenate([log_odds, ones * jnp.inf]), jnp.concatenate([variance, ones]))
    assert start.rows is not None
    rows = start.where_seen(jnp.concatenate([start.rows, covariates]))
    state = PairState(
        jnp.concatenate([spikes, ones]).astype(int),
        jnp.concatenate([slabs, u]),
        jnp.ravel(start.f),
    )
    sets = Partition(len(rows), groups=form.sets.groups)
    new, _ = metropolis_sweep(key, rows, start.flat_density, state, prior, sets)
    spikes, slabs = new.spikes[: form.size], new.slabs[: form.size]
    values = form.split_spikes(spikes) | form.split(slabs, "{}_slab")
    values |= values_at(new.slabs[form.size :])
    return PairDraws(values, spikes.astype(slabs.dtype), jnp.zeros_like(now.at.sigma2))
