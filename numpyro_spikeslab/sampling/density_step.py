# SPDX-License-Identifier: Apache-2.0
r"""Draws of pairs and coefficients under a likelihood that is not Normal.

A step is one of two. Each keeps the posterior given all other sites.

- The local one needs no warm-up. Auxiliary variables are drawn given the predictor, afresh in each
  step, and the pairs given the Gaussians that they make of the likelihood (Polson, Scott and
  Windle, 2013, *Bayesian inference for logistic models using Polya-Gamma latent variables*). A
  likelihood without auxiliary variables, or counts under which they hardly let the predictor move,
  get Metropolis steps of single pairs, or of weights that share a spike, instead.
- The other one proposes a draw under one fixed Gaussian in place of the likelihood, learnt in the
  warm-up, and accepts it by the ratio of the two (surrogate transition; Liu, 2001, *Monte Carlo
  strategies in scientific computing*). It mixes far better, but where the likelihood has heavier
  tails than the Gaussian it may stay long, so local steps come between at random.

Auxiliary variables live within a step. So a block that draws other sites, such as a dispersion,
uses the density of the user's model, without them; drawn between the auxiliary variables and the
pairs, these sites would have a wrong distribution (van Dyk and Park, 2008, *Partially collapsed
Gibbs samplers*).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pair_metropolis import (
    LearntMoments,
    PairState,
    correction,
    metropolis_sweep,
    slice_along,
)
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.reading.coefficient_rows import dense_rows, standardised
from numpyro_spikeslab.reading.form import COLUMNS, OTHER, Form
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import MAX_GRAM
from numpyro_spikeslab.reading.stand_in import augmented, log_likelihood, per_count
from numpyro_spikeslab.sampling.pair_draws import PairDraws, draw_pairs, gram_at
from numpyro_spikeslab.sampling.scale_draws import Current
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

MIN_WARMUP = 100
"""Fewer steps of warm-up teach no Gaussian: after 60, steps under it may be worse than local."""


class AdaptState(NamedTuple):
    """State of the warm-up under a likelihood that is not Normal.

    From its first to its last quarter it averages predictors and slopes. In its last quarter it
    tries the Gaussian that they give. Both are decided once: nothing changes after the warm-up.

    - **i** - number of steps so far.
    - **num_warmup** - number of steps of the warm-up.
    - **moments** - running moments of the predictor and of the slopes of the log density.
    - **accept_prob** - acceptance probability of the step; 1 for a local one, 0 if the Gaussian
      could not move the pairs. Before the first step it is the log density if this is not finite.
    - **mean_accept_prob**, **num_tried** - mean of those of the warm-up with the Gaussian, and
      their number.
    - **gram** - :func:`~numpyro_spikeslab.sampling.pair_draws.gram_at` under the Gaussian, made
      once; `None` where it may change, or columns are many.
    """

    i: Array
    num_warmup: Array
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
        form, predictor, gram = now.reading.form, predictor_of(now, {}), None
        if form.family == OTHER and form.pairs[0].heredity is not None:
            remedy = "Counts may be negative binomial."
            raise bad(f"{user}: heredity", "a likelihood such as Poisson's", "None", remedy)
        total = jnp.sum(log_likelihood(now.reading.problem, now.values, predictor))
        zero = jnp.zeros((), predictor.dtype)
        covariates_stay = form.constant_covariates or not form.coefficient_sites(now.own)
        stays = form.constant_design and covariates_stay and form.size <= MAX_GRAM
        if has_gaussian_steps(form, moves) and stays:
            gram = jnp.zeros((form.size, form.size), predictor.dtype)
        counts = jnp.array(0), jnp.asarray(num_warmup, int)
        start = jnp.where(jnp.isfinite(total), zero + 1, total)
        return cls(*counts, LearntMoments.zero(predictor), start, zero, zero, gram)

    def check(self, form: Form, user: str) -> None:
        """Check the state of one chain or of many before the first step.

        :raises ValueError: if the density is not finite there.
        """
        if not are_concrete(self.accept_prob) or jnp.all(self.accept_prob == 1):
            return
        raise bad(
            f"{user}: the log density of {form.likelihood!r} at the start",
            self.accept_prob[self.accept_prob != 1].ravel()[0],
            "a finite number",
            "Scale the columns, or give a start near the data as `init_params`.",
        )

    @property
    def may_propose(self) -> Bool[Array, ""]:
        """Whether some of the next steps are under the Gaussian."""
        tries = (self.num_warmup >= MIN_WARMUP) & (4 * self.i >= 3 * self.num_warmup)
        return tries & ((self.i < self.num_warmup) | (self.mean_accept_prob >= MIN_ACCEPT_PROB))

    @property
    def missing(self) -> Float[Array, ""]:
        """What the mean acceptance probability lacks to a good one."""
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
    return form.kind == COLUMNS and bool(form.sets.alone.all()) and moves and form.size > 1


def predictor_of(now: Current, sites: dict[str, Any]) -> Float[Array, "..."]:
    """Compute the predictor at new values of some sites."""
    form = now.reading.form
    spikes, slabs = now.weights(now.values | sites)
    w = form.split(jnp.ravel(spikes * slabs), "{}")
    return now.reading.problem.predictor(now.values | sites, w)


def with_auxiliaries(key: Array, now: Any) -> Any:
    """Return the model with the likelihood that auxiliary variables, drawn here, make Gaussian."""
    f = predictor_of(now, {})
    return now.with_stand_in(augmented(now.reading.problem, now.values, f).draw(key, f))


def draw_with_density(
    key: Array, now: Current, adapt: AdaptState, moves: bool
) -> tuple[PairDraws, AdaptState]:
    """Draw all pairs and the kernel's coefficients.

    :param now: the model, with any stand-in for the likelihood.
    :param moves: see :func:`~numpyro_spikeslab.sampling.pair_draws.draw_pairs`.
    """
    key_kind, key_local, key_accept, *others, key_slice = random.split(key, 6)
    keys, keys_slice = (others[0], others[1]), random.split(key_slice)
    form, problem = now.reading.form, now.reading.problem
    f = predictor_of(now, {})
    learnt, gaussian = adapt.moments.stand_in(), jnp.array(False)
    # before the branches, which may not store them
    rows: Any = now.reading.rows_at(now.values) if form.kind == COLUMNS else None
    density: Any = partial(log_likelihood, problem, now.values)
    if form.family != OTHER:
        mixture = augmented(problem, now.values, f)
        density = mixture.log_density

    def under(learnt):
        return now.with_stand_in(per_count(problem, now.values, learnt))

    def proposed():
        return draw_pairs(keys, under(learnt), moves, False, adapt.gram)

    def pairs():
        def single():
            return metropolis(key_local, now, rows, density, f)

        def given_auxiliaries():
            return draw_pairs(keys, now.with_stand_in(mixture.draw(key_local, f)), moves)

        if form.family == OTHER:
            return single()
        if form.kind != COLUMNS or form.pairs[0].heredity is not None or not mixture.has_counts:
            return given_auxiliaries()
        return lax.cond(mixture.is_rare, single, given_auxiliaries)

    def local():
        drawn, number = pairs(), adapt.num_slices(keys_slice[0])
        if form.kind != COLUMNS:
            return drawn
        at = now, drawn.sites, rows, density, learnt.precision
        return drawn._replace(sites=slice_all(keys_slice[1], number, *at))

    if has_gaussian_steps(form, moves):
        gaussian = adapt.takes_gaussian(key_kind)
        drawn = lax.cond(gaussian, proposed, local)
    else:
        drawn = local()
    new_f = predictor_of(now, drawn.sites)
    log_ratio = jnp.where(gaussian, correction(density, learnt, f, new_f), 0)
    accepts = jnp.log(random.uniform(key_accept, minval=jnp.finfo(f.dtype).tiny)) < log_ratio
    accepts |= ~gaussian
    sites = {k: jnp.where(accepts, x, now.values[k]) for k, x in drawn.sites.items()}
    # the probabilities of a proposal are not those of the posterior
    spikes = jnp.ravel(now.weights(sites)[0]).astype(drawn.inclusion.dtype)
    inclusion = jnp.where(gaussian, spikes, drawn.inclusion)

    def learn():
        drawn_f = jnp.where(accepts, new_f, f)
        slope = jax.jvp(density, (drawn_f,), (jnp.ones_like(f),))[1]
        return adapt.moments.updated(drawn_f, slope)

    moments = lax.cond(adapt.learns, learn, lambda: adapt.moments)
    # the draw is the identity where it has no room for all included weights, or too few digits
    stays = gaussian & jnp.all(now.weights(drawn.sites)[1] == now.weights()[1])
    accept_prob = jnp.where(stays, 0, jnp.exp(jnp.minimum(log_ratio, 0)))
    adapt = adapt.after(moments, gaussian, accept_prob, lambda: gram_at(under(moments.stand_in())))
    return PairDraws(sites, inclusion, drawn.squares), adapt


def slice_all(
    key: Array,
    number: Int[Array, ""],
    now: Current,
    sites: dict[str, Any],
    rows: Float[Array, "P N"],
    density: Any,
    precision: Float[Array, "..."],
) -> dict[str, Any]:
    """Move coefficients and included weights together, by some :func:`slice_along`.

    :param sites: new values of the pairs and coefficients.
    :param precision: of the learnt Gaussian.
    :return: the sites, of which slabs and coefficients have changed.
    """
    (spikes,), (slabs,) = now.weights(sites)
    form, values, f = now.reading.form, now.values | sites, predictor_of(now, sites)
    variance, own, u = now.at.prior.variance[0], form.coefficient_sites(now.own), slabs[:0]
    covariates = rows[:0]
    if own:
        standard = standardised(own, now.at, values)
        u = standard.prior.deviation[0]
        covariates = standard.prior.rows(dense_rows(now.reading.problem, values, own))[0]
    seen, ones = now.at.relative[:, 0] > 0, jnp.ones_like(u)

    def flat(x):
        return jnp.ravel(density(x.reshape(f.shape)))

    def turn(_, carry):
        key, slabs, u, f = carry
        key, key_members, key_slice = random.split(key, 3)
        # included ones first
        order = spikes + random.uniform(key_members, spikes.shape, spikes.dtype)
        members = lax.top_k(order, min(MAX_MOVED, spikes.size))[1]
        parts = rows[members], spikes[members] > 0, slabs[members], variance[members]
        others = covariates, ones > 0, u, ones
        x, included, start, spread = (jnp.concatenate(x) for x in zip(parts, others, strict=True))
        # rows may be NaN where nothing is observed
        x = jnp.where(seen, x, 0)
        learnt = flat, jnp.ravel(precision)
        end, f = slice_along(key_slice, x, included, start, spread, f, *learnt)
        return key, slabs.at[members].set(end[: members.size]), end[members.size :], f

    _, slabs, u, _ = lax.fori_loop(0, number, turn, (key, slabs, u, jnp.ravel(f)))
    moved = form.split(slabs, "{}_slab") | (standard.values(u[None]) if own else {})
    return sites | {k: x.astype(sites[k].dtype) for k, x in moved.items()}


def metropolis(
    key: Array, now: Current, rows: Float[Array, "P N"], density: Any, f: Float[Array, "..."]
) -> PairDraws:
    """Draw pairs, and coefficients as weights that are always included, by Metropolis steps."""
    reading, at, form = now.reading, now.at, now.reading.form
    problem, sites = reading.problem, form.coefficient_sites(now.own)
    (spikes,), (slabs,) = now.weights()
    prior = Prior(*(x[0] for x in at.prior))
    if sites:
        standard = standardised(sites, at, now.values)
        deviation, scales = standard.prior.deviation[0], jnp.ones_like(standard.prior.deviation[0])
        covariates = standard.prior.rows(dense_rows(problem, now.values, sites))[0]
        rows = jnp.concatenate([rows, covariates])
        spikes, slabs = jnp.concatenate([spikes, scales]), jnp.concatenate([slabs, deviation])
        prior = Prior(
            jnp.concatenate([prior.log_odds, scales * jnp.inf]),
            jnp.concatenate([prior.variance, scales]),
        )
    # rows may be NaN where nothing is observed
    rows = jnp.where(at.relative[:, 0] > 0, rows, 0)

    def flat(x):
        return jnp.ravel(density(x.reshape(f.shape)))

    start = PairState(spikes.astype(int), slabs, jnp.ravel(f))
    sets = Partition(len(rows), groups=form.sets.groups)
    new, _ = metropolis_sweep(key, rows, flat, start, prior, sets)
    spikes, slabs = new.spikes[: form.size], new.slabs[: form.size]
    values = form.split_spikes(spikes) | form.split(slabs, "{}_slab")
    if sites:
        values |= standard.values(new.slabs[None, form.size :])
    return PairDraws(values, spikes.astype(slabs.dtype), jnp.zeros_like(at.sigma2))
