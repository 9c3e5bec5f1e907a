# SPDX-License-Identifier: Apache-2.0
"""Flips and swaps that visit a part of the columns, against the exact posterior of few columns."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import betaln
from test_exactness import agrees, sampled
import truth
from truth.enumeration import sum_over_scales

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra import active_set, flips, pairs, part_of_columns
from numpyro_spikeslab.sampling import pair_draws, paired_gibbs

SIZE, SIGMA = 7, 0.7
X = truth.design("correlated", num_obs=14, size=SIZE)
Y = 0.6 * X[:, 1] - 0.3 * X[:, 4] + SIGMA * np.random.default_rng(1).normal(size=14)
PRIOR = np.array([0.3, 0.5, 0.2, 0.6, 0.4, 0.3, 0.5]), np.linspace(0.6, 1.4, SIZE)


def make_small(monkeypatch, window):
    for module in (pairs, pair_draws):
        monkeypatch.setattr(module, "MAX_ALL", SIZE - 1)
    monkeypatch.setattr(pairs, "MAX_NONZERO", 3)
    monkeypatch.setattr(part_of_columns, "WINDOW", window)
    monkeypatch.setattr(part_of_columns, "NUM_FLIPPED", 1)
    for name, number in (("NUM_HOT", 4), ("NUM_PICKS", 2), ("NUM_ALIKE", 2)):
        monkeypatch.setattr(part_of_columns, name, number)


@pytest.mark.parametrize(
    ("window", "hot", "capacity"),
    # the last window is shorter; more weights, or windows with some, than a sweep takes; padded hot
    # columns
    [(2, [], 3), (2, [], 1), (1, [], 2), (2, [1, 4, 5, SIZE], 3)],
)
def test_a_sweep_of_a_part_is_reversible_and_keeps_the_posterior(
    window, hot, capacity, x64, monkeypatch
):
    make_small(monkeypatch, window)
    monkeypatch.setattr(part_of_columns, "SHARE_OF_ALL", 0.1)
    exact = truth.enumerate_models(truth.regression(X, Y, SIGMA, *PRIOR))
    size = 40_000
    before, slabs = exact.sample(np.random.default_rng(0), size)
    prior = pairs.Prior(*map(jnp.asarray, (np.log(PRIOR[0] / (1 - PRIOR[0])), PRIOR[1] ** 2)))
    design = pairs.block_design(jnp.asarray(X.T), None, block_size=3)
    problem = active_set.CollapsedRegression(
        design, None, jnp.asarray(Y), jnp.asarray(SIGMA**-2), prior
    )

    @jax.jit
    @jax.vmap
    def step(key, spikes, slabs):
        key, key_part = random.split(key)
        numbers = flips.Numbers.draw(key, slabs, capacity, 2)
        now, as_program = (spikes, slabs, spikes.astype(float)), flips.Sweeps.AS_PROGRAM
        part = key_part, jnp.array(hot, int)
        return part_of_columns.sweep_some(part, as_program, numbers, problem, now)[:3]

    out = step(random.split(random.key(0), size), jnp.asarray(before), jnp.asarray(slabs))
    spikes, slabs, probs = (np.asarray(x) for x in out)
    moved = np.any(spikes != before, axis=1)
    assert moved.mean() > 0.03 and not np.any(moved[before.sum(1) > capacity])
    # 85 comparisons at 1e-5 each: a false alarm in 1 of 1200 keys
    truth.check_draws(exact, spikes, slabs, probs)
    # as many moves forth as back: a false alarm in 1 of 1000 keys
    count, places = np.zeros((2**SIZE, 2**SIZE)), 2 ** np.arange(SIZE)
    np.add.at(count, (before @ places, spikes @ places), 1)
    both = count + count.T
    often = np.triu(both >= 10, 1)
    statistic = np.sum((count - count.T)[often] ** 2 / both[often])
    assert stats.chi2.sf(statistic, often.sum()) > 1e-3


def pursued(X, covariates, y):
    """The columns of the best two odds at each of two picks, by least squares."""
    residual, hot = y - covariates @ np.linalg.lstsq(covariates, y, rcond=None)[0], set()
    for _ in range(2):
        best = np.argsort(-np.abs(residual @ X))[:2]
        hot |= {*best.tolist()}
        covariates = np.column_stack([covariates, X[:, best[0]]])
        residual = y - covariates @ np.linalg.lstsq(covariates, y, rcond=None)[0]
    return hot


@pytest.mark.parametrize("kind", ["weighted", "classes"])
@pytest.mark.parametrize("traced", [False, True])
def test_hot_columns_are_those_that_the_data_suggest_beside_the_covariates(
    kind, traced, x64, monkeypatch
):
    make_small(monkeypatch, 2)
    rng = np.random.default_rng(3)
    # far from centred, so without the covariates the choice would be another
    x = rng.normal(size=(40, SIZE)) + rng.normal(size=SIZE)
    spread = np.exp(rng.normal(size=40)) if kind == "weighted" else np.ones(40)
    x /= np.sqrt(np.average(x**2, axis=0, weights=spread**-2))
    y = 7 + 2 * x[:, 2] - x[:, 5] + 0.5 * spread * rng.normal(size=40)
    if kind == "classes":
        y = (y > 7) * 1.0

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 10.0))
        w = truth.weights(SIZE, 0.3, 1.0)
        likelihood = dist.Normal(b + x @ w, spread)
        if kind == "classes":
            likelihood = dist.Bernoulli(logits=b + x @ w)
        numpyro.sample("y", likelihood, obs=y)

    kernel, keys = nss.PairedGibbs(model), random.split(random.key(0), 2)

    def chosen(x, y):
        return kernel.init(keys, 0, None, (x, y), {}).hot

    hot = np.asarray((jax.jit(chosen) if traced else chosen)(jnp.asarray(x), jnp.asarray(y)))
    expected = pursued(x / spread[:, None], 1 / spread[:, None], y / spread)
    for chain in hot:
        assert {*chain.tolist()} - {SIZE} == expected and len(chain) == 4


def model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    pi = numpyro.sample("pi", dist.Beta(1.0, 2.0))
    w = truth.weights(SIZE, pi, 0.8)
    truth.respond(y, X @ w, sigma)


def exact_inclusion():
    """The sum over all models, inclusion integrated out and noise on a grid."""

    def log_prior(models, sigma):
        count = models.sum(1)
        spikes = betaln(1 + count, 2 + SIZE - count)
        return spikes + stats.halfnorm.logpdf(sigma) + np.log(sigma)

    sigmas = np.exp(np.linspace(np.log(0.1), np.log(4.0), 150))
    at = lambda sigma: truth.regression(X, Y, sigma, 0.5, 0.8)  # noqa: E731
    sums = sum_over_scales(at, sigmas[:, None], log_prior)
    return sums[:SIZE], sums[-1]


@pytest.mark.parametrize("misses", [False, True])
def test_chains_with_learned_scales_have_the_posterior(misses, monkeypatch):
    """Also if the hot columns are all but those with effects, which then wait for their windows."""
    make_small(monkeypatch, 2)
    if misses:
        monkeypatch.setattr(paired_gibbs, "hot_at", lambda now: jnp.array([0, 3, 5, 6]))
    inclusion, sigma = exact_inclusion()
    args = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    mcmc = sampled(nss.PairedGibbs(model), args, 10_000, chain_method="sequential")
    draws = mcmc.get_samples(group_by_chain=True)
    probs = mcmc.get_extra_fields(group_by_chain=True)["inclusion_probabilities"]["w"]
    # 15 comparisons: a false alarm in 1 of 1000 keys
    assert agrees(draws["w_spike"], inclusion, 0.02)
    assert agrees(probs, inclusion, 0.02)
    assert agrees(draws["sigma"], sigma)
