# SPDX-License-Identifier: Apache-2.0
"""Rotations of functions towards sparse weights, and drops of white functions."""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats
from truth.function_models import white

import jax
import jax.numpy as jnp

from numpyro_spikeslab.fitting.function_sweeps import gains_without
from numpyro_spikeslab.fitting.function_updates import switch_off
from numpyro_spikeslab.fitting.rotations import (
    Rotated,
    Surrogate,
    climb,
    pairs_of_round,
    posterior_of,
    ridge,
    varimax,
)

NUM_POINTS, NUM_TASKS, NUM_FUNCTIONS = 60, 20, 3


pytestmark = pytest.mark.usefixtures("x64")


def surrogate(J, W):
    return float(np.sum(J.evidence(slice(None), W) - J.loss(W**2 @ J.load)))


def random_rotation(rng, size):
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def test_varimax_finds_sparse_loadings_within_groups():
    rng, rows = np.random.default_rng(0), [0, 2, 3, 5]
    A, mixed = np.zeros((4, 12)), rng.normal(size=(7, 12))
    A[np.arange(12) % 4, np.arange(12)] = 1 + rng.random(12)
    mixed[rows] = random_rotation(rng, 4) @ A
    T = np.asarray(varimax(jnp.asarray(mixed), jnp.array([0, 1, 0, 0, -1, 0, -1])))
    np.testing.assert_allclose(T @ T.T, np.eye(7), atol=1e-12)
    # up to order and signs
    rotated = np.abs(T @ mixed)[rows]
    np.testing.assert_allclose(np.sort(rotated, axis=0), np.sort(A, axis=0), atol=1e-6)
    still = np.ones((7, 7), bool)
    still[np.ix_(rows, rows)] = False
    np.testing.assert_array_equal(T[still], np.eye(7)[still])
    np.testing.assert_array_equal(varimax(jnp.asarray(A[:1]), jnp.zeros(1, int)), [[1.0]])


def test_the_gain_without_a_function_is_that_of_the_exact_bound():
    fit = white(10)
    gains = gains_without(fit.engine, fit.posterior)
    now = fit.bound(fit.posterior)
    for m in range(NUM_FUNCTIONS):
        off = switch_off(fit.posterior, jnp.arange(NUM_FUNCTIONS) == m, fit.engine.functions.mean)
        np.testing.assert_allclose(gains[m], fit.bound(off) - now, rtol=1e-9)


@pytest.mark.parametrize("number", [0, 1, 2, 5, 6])
def test_rounds_have_every_pair_once(number):
    order, found = jnp.array([3, 1, 5, 0, 2, 4]), []
    for k in range(max(number + number % 2 - 1, 0)):
        pairs = np.stack(pairs_of_round(order, jnp.array(number), k), 1)
        pairs = pairs[pairs[:, 0] < 6]
        assert len(np.unique(pairs)) == pairs.size
        found += [tuple(sorted(pair)) for pair in pairs.tolist()]
    assert sorted(found) == sorted(combinations(sorted(np.asarray(order)[:number].tolist()), 2))


def test_weights_without_spikes_solve_their_equations():
    fit = white(10)
    at, phi = fit.at, fit.functions
    W = ridge(at, phi.mean, phi.var)
    for q in range(NUM_TASKS):
        Z = np.diag(at.relative[:, q])
        extra = phi.var @ at.relative[:, q] + at.sigma2[q] / at.prior.variance[q]
        H = phi.mean @ Z @ phi.mean.T + np.diag(extra)
        expected = np.linalg.solve(H, phi.mean @ Z @ at.Y[:, q])
        np.testing.assert_allclose(W[:, q], expected, rtol=1e-9)


def test_a_pair_that_is_observed_has_its_evidence_and_its_conditional():
    fit = white(10)
    at = fit.at
    J = Surrogate.of(at, NUM_POINTS)
    W = 0.3 * np.random.default_rng(0).normal(size=(3, NUM_TASKS))
    v = np.asarray(at.sigma2 / at.count)
    slab, odds = np.asarray(at.prior.variance).T, np.exp(np.asarray(at.prior.log_odds)).T
    spike, included = (stats.norm.pdf(W, 0, np.sqrt(x)) for x in (v, v + slab))
    expected = np.log((spike + odds * included) / stats.norm.pdf(0, 0, np.sqrt(v)))
    np.testing.assert_allclose(J.evidence(slice(None), jnp.asarray(W)), expected.sum(axis=1))
    q = J.conditional(jnp.asarray(W))
    probs = odds * included / (spike + odds * included)
    np.testing.assert_allclose(q.probs.T, probs, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(q.loc.T, W * slab / (v + slab))
    np.testing.assert_allclose(q.scale.T**2, v * slab / (v + slab))


def test_a_climb_finds_sparse_weights_and_keeps_the_product():
    rng, num_tasks, size, N = np.random.default_rng(1), 30, 4, 50.0
    W = rng.normal(size=(size, num_tasks))
    W *= np.arange(num_tasks) % size == np.arange(size)[:, None]
    T = random_rotation(rng, size)
    v = np.full(num_tasks, 0.1 / N)
    odds = np.full(W.shape, -1.0) - 0.5 * np.log1p(1 / v)
    slab = np.full(W.shape, 0.5 / (v + 1))
    J = Surrogate(*map(jnp.asarray, (odds, np.ones(W.shape), slab, 0.5 / v, 1 / (N * v), N)))
    mixed = Rotated(jnp.asarray(T @ W), jnp.eye(size))
    end = jax.jit(climb)(J, mixed, jnp.ones(size, bool))
    sparse, reached, begun = (surrogate(J, jnp.asarray(x)) for x in (W, end.W, mixed.W))
    # two cycles over the pairs go most of the way
    assert sparse - reached < 0.1 * (sparse - begun) and reached > begun + 50
    np.testing.assert_allclose(end.T.T @ end.W, mixed.W, atol=1e-10)
    np.testing.assert_allclose(end.T @ end.T.T, np.eye(size), atol=1e-12)
    # functions that are not in use stay
    some = jax.jit(climb)(J, mixed, jnp.array([True, False, True, False]))
    np.testing.assert_array_equal(some.W[1::2], mixed.W[1::2])
    assert np.any(some.W[0] != mixed.W[0])


@pytest.mark.parametrize("pair", [(0, 1), (1, 2)])
def test_the_surrogate_ranks_rotations_as_the_exact_bound_does(pair):
    """The bound after sweeps that settle what a rotation leaves, from known angles."""
    fit = white(10)
    at, phi = fit.at, fit.functions
    start = Rotated(ridge(at, phi.mean, phi.var), jnp.eye(NUM_FUNCTIONS))
    J = Surrogate.of(at, NUM_POINTS)
    one, other = jnp.array(pair)[:, None]
    used, values, bounds = jnp.ones(NUM_FUNCTIONS, bool), [], []
    for angle in np.linspace(-0.7, 0.7, 8):
        rotated = start.turned(one, other, jnp.array([angle]))
        values.append(surrogate(J, rotated.W))
        functions = rotated.T @ phi.mean
        posterior = posterior_of(at, J, fit.posterior, rotated.W, functions, used)
        bounds.append(fit._replace(posterior=posterior).run(3)[1][-1])
    assert np.ptp(values) > 10 and np.ptp(bounds) > 10
    assert np.corrcoef(values, bounds)[0, 1] > 0.9
    assert abs(np.argmax(values) - np.argmax(bounds)) <= 1
