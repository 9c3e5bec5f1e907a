# SPDX-License-Identifier: Apache-2.0
"""Kernels keep the joint density of models whose observations are not Normal."""

from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_exactness import DESIGN, Joint, beside_nuts, changes_of_the_joint, parameters
from test_latent_gibbs import MATERN, SEEN, M, Q, X as INPUTS, composite

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.pair_metropolis import LearntMoments
from numpyro_spikeslab.models.times import WeibullTime
from numpyro_spikeslab.sampling.current import Current
from numpyro_spikeslab.sampling.pair_draws import draw_pairs, gram_at


class Recorded(WeibullTime):
    """Times that are seen, or known to be below 0.3, between 1 and 1.6, or above."""

    @property
    def mean(self):
        return self.median

    @property
    def variance(self):
        return self.scale**2

    def sample(self, key, sample_shape=()):
        time = super().sample(key, sample_shape)
        return jnp.where(time < 0.3, 0.0, jnp.where(time < 1.0, time, 1.0 + 0.6 * (time > 1.6)))

    def log_prob(self, value):
        later = jnp.where(value > 1.0, jnp.inf, jnp.where(value < 1.0, value, 1.6))
        upper = jnp.where(value == 0, 0.3, later)
        return WeibullTime(self.loc, self.scale, upper).log_prob(value)


LIKELIHOODS = {
    "logit": lambda f: dist.Bernoulli(logits=f),
    "poisson": lambda f: dist.Poisson(jnp.exp(f)),
    "laplace": lambda f: dist.Laplace(f, 0.5),
}
DISPERSED = {
    "negative binomial": lambda f, theta: dist.NegativeBinomial2(jnp.exp(f), theta),
    "negative binomial of log odds": lambda f, theta: dist.NegativeBinomialLogits(theta, f),
    "classes in order": lambda f, theta: dist.OrderedLogistic(f, jnp.stack([-theta, theta])),
    # the classes at the ends are not impossible
    "classes in order, probit": lambda f, theta: nss.OrderedProbit(
        f, jnp.stack([-jnp.log1p(theta), jnp.log1p(theta)])
    ),
    "times": lambda f, theta: Recorded(f, theta, jnp.inf),
    # moments of fourth order exist
    "student": lambda f, theta: dist.StudentT(4 + 4 * theta, f, 0.3 + 0.3 * theta),
}


def density_model(name, X, Y=None, groups=None):
    """Weights, of which two share a column, an intercept, which is the mean of effects, and unknown
    scales."""
    inclusion = numpyro.sample("inclusion", dist.Uniform(0.05, 0.95))
    scale = numpyro.sample("scale", dist.LogNormal(-0.3, 0.3))
    level = numpyro.sample("level", dist.Normal(0.3, 0.7))
    spread = numpyro.sample("spread", dist.LogNormal(-0.4, 0.5))
    with numpyro.plate("half", 2):
        effect = numpyro.sample("effect", dist.Normal(0.5 * level, spread))
    with nullcontext() if groups else numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion, scale, groups=groups)
    if name in DISPERSED:
        theta = numpyro.sample("theta", dist.LogNormal(0.0, 0.8))
        likelihood = partial(DISPERSED[name], theta=theta)
    else:
        likelihood = LIKELIHOODS[name]
    if name.startswith("classes in order") and Y is not None:
        # NumPyro takes no other numbers
        Y = jnp.asarray(Y, int)
    with numpyro.plate("obs", len(X)):
        numpyro.sample("Y", likelihood(level + effect[np.arange(len(X)) % 2] + X @ w), obs=Y)


def labels_model(X, Y=None, likelihood=LIKELIHOODS["logit"], largest=1.5, kernel=MATERN):
    """Tasks that mix functions."""
    inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 2.0))
    slab = numpyro.sample("slab_scale", dist.HalfNormal(largest))
    priors = {"scale": dist.LogNormal(0.0, 1.0)} if kernel is MATERN else None
    phi = nss.latent_functions("phi", [kernel] * M, X, priors=priors)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", inclusion, slab)
    observed = True if Y is None else ~jnp.isnan(Y)
    Y = Y if Y is None else jnp.where(observed, Y, 0)
    point, task = numpyro.plate("point", len(X), dim=-2), numpyro.plate("task", Q, dim=-1)
    with point, task, handlers.mask(mask=observed):
        numpyro.sample("Y", likelihood((W @ phi).T), obs=Y)


PAIRS = "W_spike", "W_slab"
GAUSSIANS = {
    "logit": lambda y: (0.0 * y, y - 0.5, 0.5 + 0.0 * y),
    "poisson": lambda y: (jnp.log(y + 0.5), 0.0 * y, 0.5 * y + 0.5),
    "student": lambda y: (y, 0.0 * y, 2.0 + 0.0 * y),
    "laplace": lambda y: (y, 0.0 * y, 2.0 + 0.0 * y),
}
"""Predictor, slope and precision of Gaussians in place of likelihoods; not the best, so that the
correction matters."""


class AfterWarmup(nss.PairedGibbs):
    """Chains that begin as if a warm-up had learnt a Gaussian."""

    def __init__(self, name, model):
        super().__init__(model)
        self._name = name

    def _start(self, reading, values, z, num_warmup, rng_key):
        state = super()._start(reading, values, z, num_warmup, rng_key)
        y = reading.problem.run(values, of=lambda run: reading.problem.observations(run).value)
        f, slope, precision = GAUSSIANS[self._name](y)
        steps, one = jnp.asarray(1000), jnp.ones(())
        moments = LearntMoments(one, f, slope, jnp.ones_like(f), -precision)
        now = Current.of(reading, values, z).with_stand_in(moments.stand_in())
        # some steps have a slice under it, too
        learnt = state.adapt_state._replace(i=steps, num_warmup=steps, mean_accept_prob=0.7 * one)
        return state._replace(adapt_state=learnt._replace(moments=moments, gram=gram_at(now)))


def density(name, kernel=nss.PairedGibbs, free=(), groups=None):
    """Return a kernel, of all sites but those that are free and are left to NUTS."""
    model = partial(density_model, name, groups=groups)
    of_effects = "level", "effect", "spread"
    kernel, sites = kernel(model), ["w_spike", "w_slab", "inclusion", "scale", *of_effects]
    if name in DISPERSED:
        free = "theta", *free
        kernel = beside_nuts(model, (kernel, [site for site in sites if site not in free]))
    return Joint(model, (jnp.asarray(DESIGN),), kernel, unconstrained=free)


def labels(num_blocks):
    kernel, free = nss.LatentGibbs(labels_model, accelerate=0.25), ()
    if num_blocks == 3:
        fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
        kernel = composite(labels_model, step_size=0.4, max_tree_depth=3, **fixed)
        free = "slab_scale", "inclusion"
    return Joint(labels_model, (jnp.asarray(INPUTS),), kernel, SEEN, free, 5000, 4)


def counts():
    """Of a likelihood without auxiliary variables, the weights alone have a kernel."""
    options = {"likelihood": LIKELIHOODS["poisson"], "largest": 0.5, "kernel": "white"}
    model = partial(labels_model, **options)
    kernel = beside_nuts(model, (nss.PairedGibbs(model), [*PAIRS, "inclusion", "slab_scale"]))
    return Joint(model, (jnp.asarray(INPUTS),), kernel, SEEN, ("phi",), 5000, 4)


LEARNT = {f"{k} after a warm-up": partial(density, k, partial(AfterWarmup, k)) for k in GAUSSIANS}
JOINTS = {
    "logit": partial(density, "logit"),
    "logit after a warm-up": LEARNT.pop("logit after a warm-up"),
    "labels in three blocks": partial(labels, 3),
}
MINUTES = {
    **{name: partial(density, name) for name in [*LIKELIHOODS, *DISPERSED] if name != "logit"},
    **LEARNT,
    "labels": partial(labels, 1),
    "counts of tasks": counts,
    "poisson in groups": partial(density, "poisson", groups=(0, 1, 0, 1)),
}


@pytest.mark.parametrize("make", parameters(JOINTS, MINUTES))
def test_steps_keep_the_joint(make, x64):
    z, bound = changes_of_the_joint(make())
    assert np.all(np.isfinite(z)) and np.max(z) < bound


class StaleState(NamedTuple):
    """The state of :class:`Stale`."""

    z: dict[str, Any]
    rng_key: Any
    stand_in: StandIn


class Stale(nss.PairedGibbs):
    """A kernel that is wrong: auxiliary variables outlive a step of another block."""

    def _start(self, reading, values, z, num_warmup, rng_key):
        stand_in = self._auxiliaries(rng_key, Current.of(reading, values, z))
        return StaleState(z, rng_key, stand_in)

    def _check(self, reading, state):
        pass

    def _step(self, reading, values, state):
        rng_key, key, *keys = random.split(state.rng_key, 4)
        now = Current.of(reading, values, state.z)
        z = state.z | draw_pairs(tuple(keys), now.with_stand_in(state.stand_in), True).sites
        return StaleState(z, rng_key, self._auxiliaries(key, Current.of(reading, values, z)))

    def _auxiliaries(self, key, now):
        f = now.predictor()
        return now.likelihood(f).draw(key, f)


def test_auxiliaries_that_outlive_a_draw_of_the_dispersion_are_noticed(x64):
    wrong = density("negative binomial of log odds", Stale, ("inclusion", "scale", "spread"))
    z, bound = changes_of_the_joint(wrong)
    # 7.1 and 4.8; the other likelihoods notice it less
    assert np.max(z) > bound
