# SPDX-License-Identifier: Apache-2.0
"""Chains under likelihoods that are not Normal, against quadrature over all models."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from truth import likelihood_cases
from truth.likelihood_cases import (
    BENT,
    CASES,
    INCLUSION,
    NUM_OBS,
    SLAB,
    Case,
    Truth,
    data_of,
    model_of,
    truth_of,
)

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import ndtr

import numpyro
from numpyro import handlers
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.likelihood import DensityAt
from numpyro_spikeslab.reading.program import Program
from numpyro_spikeslab.reading.reader import Reader

KEY = random.key(0)
RNG = np.random.default_rng(1)
SEEN = RNG.random(NUM_OBS) < 0.75
COUNT = RNG.integers(1, 4, NUM_OBS)


def chain(model: Callable, args: tuple, num_warmup: int, num_samples: int = 20_000) -> MCMC:
    mcmc = MCMC(
        nss.PairedGibbs(model),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    fields = "inclusion_probabilities", "adapt_state.accept_prob"
    mcmc.run(KEY, *args, extra_fields=fields)
    return mcmc


def check(mcmc: MCMC, exact: Truth, names: tuple[str, ...] = ("w",)) -> None:
    """Compare with the truth, with a false alarm in 1 of 1000 keys or fewer."""
    draws = mcmc.get_samples(group_by_chain=True)
    draws = {name: x.reshape(*x.shape[:2], -1) for name, x in draws.items()}
    w = np.concatenate([draws[name] for name in names], axis=-1).astype(float)
    spikes = draws["w_spike"].astype(float)
    np.testing.assert_array_less(np.abs(np.mean(w, axis=(0, 1)) - exact.mean), 4 * error_of(w))
    probs = mcmc.get_extra_fields(group_by_chain=True)["inclusion_probabilities"]["w"]
    # Metropolis steps of single pairs alone mix so slowly that their error may be larger
    within = np.clip(4 * error_of(spikes), 0.02, 0.06)
    for x in (spikes, probs):
        difference = np.ravel(np.mean(x, axis=(0, 1))) - exact.inclusion[: spikes.shape[-1]]
        np.testing.assert_array_less(np.abs(difference), within)


def error_of(draws: Any) -> np.ndarray:
    """Return the Monte Carlo error of means."""
    return np.std(draws, axis=(0, 1)) / np.sqrt(effective_sample_size(draws))


def has_gaussian_steps(mcmc: MCMC) -> bool:
    """Whether the chain has steps under the Gaussian that the warm-up has learnt."""
    return bool(np.any(mcmc.get_extra_fields()["adapt_state.accept_prob"] != 1))


LEARNT = 600
"""Steps of a warm-up that learns a Gaussian; without warm-up all steps are local."""


@pytest.mark.parametrize("name", ["logit", "student", "laplace"])
def test_the_truth_is_the_same_at_a_second_resolution(name, monkeypatch):
    data = data_of(CASES[name])
    whole = truth_of(CASES[name], *data)
    monkeypatch.setattr(likelihood_cases, "NUM_NODES", 31)
    for x, y in zip(truth_of(CASES[name], *data), whole, strict=True):
        np.testing.assert_allclose(x, y, atol=0.005)


CHAINS = [*((name, LEARNT) for name in CASES), ("logit", 0)]


@pytest.mark.parametrize(("name", "num_warmup"), CHAINS)
def test_chains_have_the_posterior_of_all_models(name, num_warmup):
    X, y = data_of(CASES[name])
    mcmc = chain(model_of(CASES[name]), (X, y), num_warmup)
    check(mcmc, truth_of(CASES[name], X, y))
    assert has_gaussian_steps(mcmc) == (num_warmup > 0)


# Links that are those of an augmentation for some predictors, or nearly


def bernoulli(link: Callable) -> Callable:
    return lambda f, a: dist.Bernoulli(probs=link(f))


def count(link: Callable) -> Callable:
    """Negative binomial counts of this mean."""
    return lambda f, a: dist.NegativeBinomial2(link(f), 2.0)


LINKS = {
    "log odds": (lambda f, a: dist.Bernoulli(logits=f), jnp.asarray),
    "sigmoid": (bernoulli(jax.nn.sigmoid), jax.nn.sigmoid),
    "sigmoid by hand": (bernoulli(lambda f: 1 / (1 + jnp.exp(-f))), jax.nn.sigmoid),
    "probit": (bernoulli(dist.Normal(0.0, 1.0).cdf), ndtr),
    "mean": (count(lambda f: jnp.exp(f + 0.5)), jnp.exp),
    "location": (lambda f, a: dist.Laplace(f, 1.0), jnp.asarray),
    "order": (lambda f, a: dist.OrderedLogistic(f + 1, jnp.array([-1.0, 1.0])), jnp.asarray),
    "order, probit": (lambda f, a: nss.OrderedProbit(f + 1, jnp.array([-1.0, 1.0])), jnp.asarray),
    "order of a curve": (lambda f, a: dist.OrderedLogistic(f + f**3, jnp.array([-1.0, 1.0])), None),
    "steeper": (bernoulli(lambda f: jax.nn.sigmoid(f + 1e-3 * jnp.sinh(f))), None),
    "probit from 0": (bernoulli(lambda f: ndtr(jnp.maximum(f, -3.0))), None),
    "errors of labels": (bernoulli(lambda f: 1e-6 + (1 - 2e-6) * jax.nn.sigmoid(f)), None),
    "cubic": (lambda f, a: dist.Bernoulli(logits=f + 1e-6 * f**3), None),
    "smallest mean": (count(lambda f: jnp.exp(f) + 1e-6), None),
    "largest mean": (count(lambda f: jnp.exp(jnp.minimum(f, 40.0))), None),
    "absolute value": (lambda f, a: dist.StudentT(3.0, jnp.abs(f), 1.0), None),
    # ones are data like others
    "exposure": (lambda f, a: dist.NegativeBinomial2(a * jnp.exp(f), 2.0), None),
    **{name: (lambda f, a, case=case: case.likelihood(f), None) for name, case in BENT.items()},
}


@pytest.mark.parametrize("num_obs", [1, 20, 60])
@pytest.mark.parametrize("name", LINKS)
def test_links_are_those_of_an_augmentation_everywhere(name, num_obs):
    likelihood, function = LINKS[name]

    def model(X, y, a):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        with numpyro.plate("obs", len(X)):
            numpyro.sample("y", likelihood(X @ w, a), obs=y)

    X, _ = data_of(CASES["logit"], num_obs)
    form = read(model, X, 1 * (X[:, 0] > 0), np.ones(num_obs)).form
    link = getattr(form.likelihood, "link", None)
    assert (link.function if link else None) is function


# Observations that count otherwise than once


def counted(case: Case) -> Callable:
    """A model with missing observations, and others that count up to three times."""

    def model(X, y):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        with (
            numpyro.plate("obs", len(X)),
            handlers.mask(mask=~jnp.isnan(y)),
            handlers.scale(scale=COUNT),
        ):
            numpyro.sample("y", case.likelihood(X @ w), obs=y)

    return model


def masked(case: Case) -> Callable:
    """A model of whole events, in which the distribution has the mask."""

    def model(X, y):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        numpyro.sample("y", case.likelihood(X @ w).mask(~jnp.isnan(y)).to_event(1), obs=y)

    return model


COUNTED = {"logit": True, "binomial": True, "student": True, "poisson": False}
"""Whether there is an augmentation of observations that count otherwise than once."""


# Coefficients


@pytest.mark.parametrize("name", ["logit", "negative binomial of the mean", "student", "poisson"])
def test_intercepts_are_drawn_with_the_weights(name):
    case, scale = CASES[name], 1.5

    def model(X, y):
        intercept = numpyro.sample("intercept", dist.Normal(0.0, scale))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        with numpyro.plate("obs", len(X)):
            numpyro.sample("y", case.likelihood(intercept + X @ w), obs=y)

    # far from centred
    X, y = data_of(case)
    X = X[:, :2] + 1.0
    wide = np.column_stack([X, np.ones(len(X))])
    exact = truth_of(case, wide, y, (INCLUSION, INCLUSION, 1.0), (SLAB, SLAB, scale))
    check(chain(model, (X, y), LEARNT), exact, ("w", "intercept"))


TASKS = [
    # local steps alone, and columns of one design
    ("logit", 0),
    ("poisson", LEARNT),
]


@pytest.mark.parametrize(("name", "num_warmup"), TASKS)
def test_tasks_that_share_features_have_the_posterior_of_each(name, num_warmup):
    case, scale, Q = CASES[name], 1.5, 2

    def model(X, Y):
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        task = numpyro.plate("task", Q)
        with task:
            level = numpyro.sample("level", dist.Normal(0.0, scale))
        with numpyro.plate("obs", len(X), dim=-2), task:
            numpyro.sample("Y", case.likelihood(level + X @ w.T), obs=Y)

    X, y = data_of(case)
    X, Y = X[:, :2], np.stack([y, y[::-1]], axis=1)
    wide = np.column_stack([X, np.ones(len(X))])
    prior = (INCLUSION, INCLUSION, 1.0), (SLAB, SLAB, scale)
    each = [truth_of(case, wide, y, *prior) for y in Y.T]
    numbers = (np.array([getattr(x, k) for x in each]) for k in ("inclusion", "mean"))
    # first the weights of all tasks, then their levels
    inclusion, mean = (np.concatenate([x[:, :2].ravel(), x[:, 2]]) for x in numbers)
    exact = Truth(inclusion, mean, sum(x.log_evidence for x in each))
    mcmc = chain(model, (X, Y), num_warmup)
    check(mcmc, exact, ("w", "level"))
    assert has_gaussian_steps(mcmc) == (num_warmup > 0)


# Responses of all kinds


@pytest.mark.parametrize("name", ["logit", "probit"])
def test_separation_under_a_wide_slab_stays_finite(name):
    def model(X, y):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.5, 1000.0)
        with numpyro.plate("obs", len(X)):
            numpyro.sample("y", CASES[name].likelihood(X @ w), obs=y)

    X, _ = data_of(CASES[name])
    mcmc = chain(model, (X, X[:, 0] > 0), LEARNT, 500)
    w = mcmc.get_samples()["w"]
    assert np.all(np.isfinite(w)) and np.mean(w[:, 0] > 0) > 0.99


def read(model: Callable, *args: Any) -> Any:
    return Reader(model, "test")(args, {})


def log_likelihood(problem: Any, f: Any) -> Any:
    return DensityAt(problem, {}, problem.run({}, of=problem.observations)).log_density(f)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int32, np.float16, np.float32])
@pytest.mark.parametrize("name", ["logit", "poisson"])
def test_densities_are_those_of_responses_of_any_type(name, dtype):
    X, y = data_of(CASES[name])
    f, y = X @ [0.7, 0.0, -0.4], (np.minimum(y, 1) if dtype is bool else y).astype(dtype)
    problem = read(model_of(CASES[name]), X, y).problem
    got = log_likelihood(problem, jnp.asarray(f))
    np.testing.assert_allclose(got, CASES[name].log_density(y.astype(float), f), rtol=1e-5)


@pytest.mark.parametrize("name", ["log-normal", "proportion", "mixture", "classes in order"])
def test_densities_may_have_more_axes_than_the_observations(name):
    X, y = data_of(CASES[name])
    f = X @ [0.7, 0.0, -0.4]
    got = log_likelihood(read(model_of(CASES[name]), X, y).problem, jnp.asarray(f))
    np.testing.assert_allclose(got, CASES[name].log_density(y, f), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "count"), [(counted, SEEN * COUNT), (masked, SEEN)])
@pytest.mark.parametrize("name", COUNTED)
def test_densities_count_observations_as_often_as_the_model(x64, name, make, count):
    X, y = data_of(CASES[name])
    reading = read(make(CASES[name]), X, np.where(SEEN, y, np.nan))
    assert reading.form.likelihood.is_closed == COUNTED[name] or make is masked
    f = X @ [0.7, 0.0, -0.4]
    got = jax.jit(lambda f: log_likelihood(reading.problem, f))(f)
    # of an event there is one number
    expected = np.where(SEEN, count * CASES[name].log_density(y, f), 0)
    np.testing.assert_allclose(np.sum(got), np.sum(expected), rtol=1e-8)
    assert make is masked or np.allclose(got, expected, rtol=1e-8)


def test_a_step_has_the_program_of_the_model_at_most_five_times(monkeypatch):
    def model(X, y):
        intercept = numpyro.sample("intercept", dist.Normal())
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        with numpyro.plate("obs", len(X)):
            numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)

    args, kernel, part, runs = data_of(CASES["logit"]), nss.PairedGibbs(model), Program.part, []
    state = kernel.init(KEY, LEARNT, None, args, {})
    # computes what depends on data alone
    jax.eval_shape(lambda state: kernel.sample(state, args, {}), state)
    monkeypatch.setattr(Program, "part", lambda *x: runs.append(x) or part(*x))
    jax.eval_shape(lambda state: kernel.sample(state, args, {}), state)
    assert len(runs) <= 5
