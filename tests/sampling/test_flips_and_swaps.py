# SPDX-License-Identifier: Apache-2.0
"""Moves of spikes with all slabs integrated out, against exact posteriors."""

from functools import partial

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit
from test_exactness import sampled
import truth

import jax
from jax import lax, random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra import active_set, flips, pairs

KEY = random.key(0)
SIZE, PRECISION = 5, 4.0
# they differ from weight to weight, also between columns that are the same
LOG_ODDS = np.array([-1.0, 0.3, -2.0, 0.0, -0.5])
VARIANCE = np.array([0.5, 2.0, 0.3, 1.0, 3.0])


def data(kind):
    X = truth.design(kind, num_obs=12, size=SIZE)
    return X, np.random.default_rng(1).normal(size=12) + X[:, 0]


def exact_of(X, y):
    arguments = PRECISION**-0.5, expit(LOG_ODDS), np.sqrt(VARIANCE)
    return truth.enumerate_models(truth.regression(X, y, *arguments))


def problem_of(X, y, with_gram):
    rows = jnp.asarray(X.T)
    prior = pairs.Prior(jnp.asarray(LOG_ODDS), jnp.asarray(VARIANCE))
    # its last block is filled up
    design = pairs.block_design(rows, None, block_size=3)
    gram = rows @ rows.T if with_gram else None
    return active_set.CollapsedRegression(
        design, gram, jnp.asarray(y), jnp.asarray(PRECISION), prior
    )


def visit_blocks(monkeypatch):
    """Visit slots in blocks, and let the number of swaps depend on the weights, as with many."""
    monkeypatch.setattr(active_set, "SMALL", 0)
    monkeypatch.setattr(active_set, "BLOCK", 2)
    monkeypatch.setattr(flips, "LEAST_SWAPS", 1)


# The arrays


def flip(problem, active, m):
    size, leaves = active.spikes.size, active.spikes[m]
    slot = jnp.argmax(active.slots == jnp.where(leaves, m, size))
    none = active_set.no_removal(active)
    removal = lax.cond(leaves, lambda: active_set.removal_of(active, slot), lambda: none)
    row = lax.cond(
        leaves,
        lambda: none.row,
        lambda: active_set.row_of(active, none, slot, m, problem.products(m)),
    )
    which = jnp.where(leaves, jnp.array([m, size]), jnp.array([size, m]))
    return active_set.updated(active, removal, row, slot, *which)


def included_in(problem, spikes, capacity):
    return active_set.include(problem, (problem.linear, problem.squares), spikes, capacity)


def log_odds_of(exact, spikes):
    """Of each spike given the others, from the evidences of all models."""
    log_probs = dict(zip(map(tuple, exact.models), exact.log_probs, strict=True))
    ends = [np.where(np.arange(SIZE) == k, end, spikes) for end in (1, 0) for k in range(SIZE)]
    with_it, without = np.reshape([log_probs[tuple(x)] for x in ends], (2, SIZE))
    return with_it - without


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_log_odds_after_any_flips_are_those_of_the_evidences(precision, in_blocks, monkeypatch):
    if in_blocks:
        visit_blocks(monkeypatch)
    X, y = data("correlated")
    X[:, 1] = X[:, 0]
    problem, exact = problem_of(X, y, precision == "float32"), exact_of(X, y)
    tolerance = {"float32": 5e-3, "float64": 1e-9}[precision]
    spikes = np.array([1.0, 0.0, 1.0, 1.0, 0.0])
    # a function that is traced anew, for the constants
    include, change = jax.jit(partial(included_in, capacity=4)), jax.jit(partial(flip))
    active = include(problem, jnp.asarray(spikes > 0))
    for m in (1, 0, 3, 2, 1, 4, 0, 2):
        active = change(problem, active, m)
        spikes[m] = 1 - spikes[m]
        inside = np.flatnonzero(spikes)
        np.testing.assert_array_equal(active.spikes, spikes)
        np.testing.assert_array_equal(np.sort(active.slots[active.filled]), inside)
        odds = np.log(active.odds(problem.prior))
        np.testing.assert_allclose(odds, log_odds_of(exact, spikes), tolerance, tolerance)
        which = np.flatnonzero(np.all(exact.models == spikes, axis=1))[0]
        mean = active.linear * np.sqrt(VARIANCE)
        np.testing.assert_allclose(mean[inside], exact.locs[which][inside], atol=tolerance)


@pytest.mark.parametrize(("signal", "tolerance"), [(1e2, 1e-4), (1e4, 5e-3), (1e5, 0.05)])
def test_columns_that_are_the_same_may_take_turns_in_single_precision(signal, tolerance):
    """Up to signals at which the sweep stops; each removal leaves a cancellation."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, SIZE))
    X[:, 1], X[:, 3], X[:, 4] = X[:, 0], X[:, 2] + 0.02 * X[:, 3], 0.7 * (X[:, 0] + X[:, 4])
    X *= np.sqrt(signal / np.sum(X**2, axis=0))
    y = 0.5 * X[:, 0] + 0.1 * X[:, 2] + rng.normal(size=30)
    exact = truth.enumerate_models(truth.regression(X, y, 1.0, np.full(SIZE, 0.5), 1.0))
    prior = pairs.Prior(jnp.zeros(SIZE), jnp.ones(SIZE))
    design, one = pairs.block_design(jnp.asarray(X.T), None), jnp.ones(())
    problem = active_set.CollapsedRegression(design, None, jnp.asarray(y), one, prior)
    assert active_set.is_precise(problem.linear, problem.squares)
    spikes = np.zeros(SIZE)
    active, change = included_in(problem, jnp.asarray(spikes > 0), SIZE), jax.jit(flip)
    assert active.root.dtype == np.float32
    for m in rng.integers(SIZE, size=60):
        active = change(problem, active, m)
        spikes[m] = 1 - spikes[m]
        expected = expit(log_odds_of(exact, spikes))
        np.testing.assert_allclose(1 / (1 + 1 / active.odds(prior)), expected, atol=tolerance)


@pytest.mark.parametrize(
    ("kind", "capacity", "with_gram", "num_swaps", "dtype", "in_blocks"),
    [
        ("correlated", 2, True, 3, np.float64, False),
        ("duplicated", SIZE, False, 2, np.float32, False),
        ("constant", 3, False, 1, np.float64, False),
        ("correlated", SIZE, True, 6, np.float64, True),
    ],
)
def test_a_sweep_leaves_the_exact_posterior_invariant(
    x64, kind, capacity, with_gram, num_swaps, dtype, in_blocks, monkeypatch
):
    """Independent exact draws, one sweep each: in one batch, as chains are vectorized."""
    if in_blocks:
        visit_blocks(monkeypatch)
    size = 20_000
    X, y = data(kind)
    exact = exact_of(X, y)
    before, slabs = exact.sample(np.random.default_rng(0), size)
    problem = jax.tree.map(lambda x: x.astype(dtype), problem_of(X, y, with_gram))

    @jax.jit
    @jax.vmap
    def steps(key, spikes, slabs):
        numbers = flips.Numbers.draw(key, slabs, capacity, num_swaps)
        return flips.sweep(numbers, problem, spikes, slabs)[:3]

    keys = random.split(KEY, size)
    out = steps(keys, jnp.asarray(before), jnp.asarray(slabs, dtype))
    spikes, slabs, probs = (np.asarray(x) for x in out)
    assert slabs.dtype == probs.dtype == dtype
    moved = np.any(spikes != before, axis=1)
    assert moved.mean() > 0.1 and not np.any(moved[before.sum(1) > capacity])
    # none leaves the two parts of the posterior
    assert np.array_equal(spikes.sum(1) > capacity, before.sum(1) > capacity)
    # 53 comparisons at 1e-5 each: a false alarm in 1 of 1900 keys
    truth.check_draws(exact, spikes, slabs, probs)
    # some places are certain, and then the probability says so
    assert np.all(probs.var(axis=0) <= spikes.var(axis=0) + 1e-12)


@pytest.mark.parametrize(("capacity", "num_swaps", "in_blocks"), [(2, 2, False), (SIZE, 6, True)])
def test_a_sweep_is_reversible(capacity, num_swaps, in_blocks, monkeypatch):
    """Between all pairs of models there are as many moves forth as back: with flips that always go
    up, then swaps, the statistic is above 1,800."""
    if in_blocks:
        visit_blocks(monkeypatch)
    size, (X, y) = 20_000, data("correlated")
    before, slabs = exact_of(X, y).sample(np.random.default_rng(0), size)
    problem = problem_of(X, y, True)

    @jax.jit
    @jax.vmap
    def step(key, spikes, slabs):
        return flips.sweep(
            flips.Numbers.draw(key, slabs, capacity, num_swaps), problem, spikes, slabs
        )[0]

    after = step(random.split(KEY, size), jnp.asarray(before), jnp.asarray(slabs))
    count, places = np.zeros((32, 32)), 2 ** np.arange(SIZE)
    np.add.at(count, (before @ places, np.asarray(after) @ places), 1)
    both = count + count.T
    often = np.triu(both >= 10, 1)
    statistic = np.sum((count - count.T)[often] ** 2 / both[often])
    assert stats.chi2.sf(statistic, often.sum()) > 1e-5


def test_where_precision_does_not_suffice_nothing_moves():
    X, y = data("correlated")
    problem = problem_of(X, y, True)
    spikes, slabs = jnp.array([1, 0, 1, 0, 0]), jnp.linspace(0.5, 1.0, SIZE)
    sharp = problem._replace(precision=jnp.asarray(1e7))
    numbers, sweep = flips.Numbers.draw(KEY, slabs), jax.jit(flips.sweep)
    for inexact in (sharp, sharp._replace(precision=jnp.asarray(np.nan))):
        out = sweep(numbers, inexact, spikes, slabs)
        np.testing.assert_array_equal(out[0], spikes)
        np.testing.assert_array_equal(out[1], slabs)
    probs = sweep(numbers, sharp, spikes, slabs)[2]
    expected = expit(sharp.pair_logits(spikes * slabs))
    np.testing.assert_allclose(probs, expected, atol=1e-6)


def test_inclusion_that_is_certain_stays_so():
    problem = problem_of(*data("correlated"), False)
    log_odds = jnp.array([-jnp.inf, jnp.inf, 0.0, -jnp.inf, jnp.inf])
    problem = problem._replace(prior=problem.prior._replace(log_odds=log_odds))
    slabs = jnp.ones(SIZE)
    draw = jax.vmap(lambda key: flips.Numbers.draw(key, slabs))
    sweep = jax.jit(jax.vmap(lambda numbers, s: flips.sweep(numbers, problem, s, slabs)))
    starts = jnp.array([[0, 1, 0, 0, 1], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]] * 50)
    spikes, slabs, probs, _ = sweep(draw(random.split(KEY, 200)), starts)
    for x in (spikes, probs):
        assert np.all(x[:, [0, 3]] == 0) and np.all(x[:, [1, 4]] == 1)
    assert np.all(np.isfinite(slabs)) and 0 < np.mean(spikes[:, 2]) < 1


# The kernel


def test_columns_that_are_nearly_the_same_take_turns():
    """Two pairs of such columns, a column of zeros, and fewer observations than weights."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(6, 9))
    X[:, 1], X[:, 3], X[:, 4] = X[:, 0], X[:, 2] + 0.05 * X[:, 3], 0.0
    y = X[:, 0] - X[:, 2] + 0.1 * rng.normal(size=6)
    prior = np.linspace(0.2, 0.4, 9), np.linspace(0.5, 1.5, 9)
    exact = truth.enumerate_models(truth.regression(X, y, 0.1, *prior))

    def sharp(X, y):
        truth.respond(y, X @ truth.weights(9, *prior), 0.1)

    mcmc = sampled(nss.PairedGibbs(sharp), (jnp.asarray(X), jnp.asarray(y)), 4000)
    spikes = np.asarray(mcmc.get_samples(group_by_chain=True)["w_spike"], float)
    probs = mcmc.get_extra_fields(group_by_chain=True)["inclusion_probabilities"]["w"]
    for x in (spikes, np.asarray(probs)):
        np.testing.assert_allclose(x.mean((0, 1)), exact.inclusion, atol=0.03)
    # each chain by itself, so they mix
    np.testing.assert_allclose(probs.mean(1), np.tile(exact.inclusion, (2, 1)), atol=0.05)
