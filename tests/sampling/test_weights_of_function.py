# SPDX-License-Identifier: Apache-2.0
"""Weights drawn while functions are integrated out, against dense Gaussians and all models."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.collapsed_spikes import gibbs_block
from numpyro_spikeslab.algebra.covariance import Dense
from numpyro_spikeslab.reading.function_prior import FunctionPrior
from numpyro_spikeslab.sampling.function_state import Evaluation, Fixed, Moves, State
from numpyro_spikeslab.sampling.weights_of_function import (
    Integrated,
    Root,
    shear,
    slabs_of,
    take_column,
)

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
LEVEL = 1e-4
N, Q, M = 6, 4, 3
RNG = np.random.default_rng(5)
X = np.sort(RNG.uniform(0, 3, N))
NOISE = np.array([0.3, 0.5, 0.4, 0.6])
SEEN = np.ones((N, Q), bool)
SEEN[[0, 3], [1, 2]] = False
Y = np.where(SEEN, RNG.normal(size=(N, Q)), 0.0)
PHI = RNG.normal(size=(M, N))
W = np.array([[0.8, 0.0, 0.7], [-0.6, 1.1, 0.0], [0.9, 0.4, -1.2], [0.0, 0.5, 0.6]])
MU = RNG.normal(size=(M, N))
VARIANCE = RNG.uniform(0.5, 1.5, (Q, M))


def covariance(length):
    return np.asarray(kernels.Matern32(length)(X, X))


def integrated(members):
    """The last function's column, with these functions integrated out."""
    residual = jnp.asarray(Y - PHI.T @ W.T + PHI[members].T @ W[:, members].T)
    prior = FunctionPrior(None, jnp.asarray(MU), None, {})
    moves = Moves(jnp.full((Q, M), -0.4), None, None, None, True, True)
    fixed = Fixed(jnp.asarray(Y), jnp.asarray(SEEN.astype(float)), prior, moves)
    arrays = (jnp.asarray(x) for x in (VARIANCE, NOISE))
    state = State(jnp.asarray(PHI), jnp.zeros((M, 0)), jnp.asarray(W), {}, *arrays, residual)
    integrated = Integrated.of(fixed, state, np.array(members))
    return integrated, take_column(KEY, 2, fixed, state, integrated)[0]


def log_density(members, lengths, spikes, tasks):
    """Of all observations, with the functions and the slabs of those spikes integrated out."""
    mean = PHI.T @ W.T - PHI[members].T @ W[:, members].T - np.outer(PHI[2], W[:, 2])
    mean += MU[members].T @ W[:, members].T
    # task by task
    full = np.kron(np.diag(NOISE**2), np.eye(N))
    for m, length in zip(members, lengths, strict=True):
        full += np.kron(np.outer(W[:, m], W[:, m]), covariance(length))
    for q, spike in zip(tasks, spikes, strict=True):
        unit = np.zeros((Q, Q))
        unit[q, q] = spike * VARIANCE[q, 2]
        full += np.kron(unit, np.outer(PHI[2], PHI[2]))
    seen = SEEN.T.ravel()
    normal = stats.multivariate_normal(mean.T.ravel()[seen], full[np.ix_(seen, seen)])
    return normal.logpdf(Y.T.ravel()[seen])


PATTERNS = list(product([0.0, 1.0], repeat=Q))


@pytest.mark.slow
def test_one_function_and_the_slabs_are_functions():
    functions, column = integrated([0])
    found, expected = [], []
    for length in (0.5, 2.0):
        for spikes in PATTERNS[::3]:
            K, observed = (
                Dense(jnp.asarray(covariance(length))),
                column.stacked(functions.mean),
            )
            at = Evaluation.of(K, K.cholesky(functions.root.diagonal[0]), observed)
            slabs = slabs_of(column, at.half)
            found.append(float(at.value + slabs.log_evidence(jnp.asarray(spikes))))
            expected.append(log_density([0], [length], spikes, column.tasks))
    # what depends on the observations alone is left out
    np.testing.assert_allclose(np.diff(found), np.diff(expected), rtol=1e-8)


@pytest.mark.slow
def test_two_functions_are_functions():
    functions, column = integrated([0, 1])
    root = functions.root
    lengths = [0.7, 1.6]
    # R^T R is what the tasks say of both functions
    w = W[:, :2]
    A = np.einsum("nq,qs,qt->nst", SEEN / NOISE**2, w, w)
    units = jnp.eye(2 * N).reshape(2 * N, 2, N)
    R = np.stack([root.times(unit) for unit in units], axis=1)
    transposed = np.stack([np.ravel(root.transposed(unit)) for unit in jnp.eye(2 * N)], axis=1)
    np.testing.assert_array_equal(transposed, R.T)
    K = np.kron(np.diag([1, 0]), covariance(lengths[0])) + np.kron(
        np.diag([0, 1]), covariance(lengths[1])
    )
    L = np.linalg.cholesky(np.eye(2 * N) + R @ K @ R.T)
    A = np.block([[np.diag(A[:, s, t]) for t in range(2)] for s in range(2)])
    np.testing.assert_allclose(R.T @ R, A, atol=1e-12)
    half = np.linalg.solve(L, column.stacked(functions.mean))
    slabs = slabs_of(column, jnp.asarray(half))
    found = [float(slabs.log_evidence(jnp.asarray(spikes))) for spikes in PATTERNS]
    expected = [log_density([0, 1], lengths, spikes, column.tasks) for spikes in PATTERNS]
    np.testing.assert_allclose(np.diff(found), np.diff(expected), rtol=1e-8)


def exact_spikes(slabs):
    """Probabilities of all patterns."""
    logs = [
        float(slabs.log_evidence(jnp.asarray(s)) + jnp.asarray(s) @ slabs.prior.log_odds)
        for s in PATTERNS
    ]
    return np.exp(logs - np.logaddexp.reduce(logs))


def block(members):
    _, column = integrated(members)
    half = jnp.column_stack([column.y, column.features])
    # as if the prior of the functions resisted a fifth of everything
    return column, slabs_of(column, 0.45 * half)


@pytest.mark.slow
@pytest.mark.parametrize("may_be_empty", [True, False])
@pytest.mark.parametrize("move", ["gibbs", "shear of one", "shear of two"])
def test_spikes_from_an_exact_draw_stay_exact(move, may_be_empty):
    column, slabs = block([0, 1] if move == "shear of two" else [0])
    probabilities = exact_spikes(slabs)
    if not may_be_empty:
        probabilities[0] = 0.0
        probabilities /= probabilities.sum()
    size = 20_000
    start = np.random.default_rng(1).choice(len(PATTERNS), size, p=probabilities)

    def step(item):
        key, spikes = item
        if move == "gibbs":
            return gibbs_block(key, slabs, spikes, may_be_empty) != 0
        return shear(key, column._replace(spikes=spikes), slabs, may_be_empty) > 0

    args = random.split(KEY, size), jnp.asarray(PATTERNS)[start]
    found = np.asarray(jax.jit(lambda args: jax.lax.map(step, args))(args))
    end = found @ np.array([8, 4, 2, 1])
    assert np.mean(end != start) > 0.02
    counts, expected = np.bincount(end, minlength=16), size * probabilities
    # rare patterns count together; 6 tests at 1e-4
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    kept = expected > 0
    assert counts[~kept].sum() == 0
    assert stats.chisquare(counts[kept], expected[kept]).pvalue > LEVEL


def test_slabs_have_their_posterior():
    _, slabs = block([0])
    spikes = jnp.array([1.0, 0.0, 1.0, 1.0])
    on = np.array([0, 2, 3])
    precision = np.asarray(slabs.gram)[np.ix_(on, on)] + np.diag(1 / slabs.prior.variance[on])
    mean = np.linalg.solve(precision, np.asarray(slabs.linear)[on])
    np.testing.assert_allclose(slabs.mean(spikes)[on], mean)
    draws = jax.vmap(lambda key: slabs.mean(spikes, random.normal(key, (4,))))(
        random.split(KEY, 4000)
    )
    assert np.all(np.asarray(draws)[:, 1] == 0)
    white = np.linalg.cholesky(precision).T @ (np.asarray(draws)[:, on] - mean).T
    for x in white:
        assert stats.kstest(x, stats.norm().cdf).pvalue > LEVEL
    chi2 = np.sum(white**2, axis=0)
    assert stats.kstest(chi2, stats.chi2(3).cdf).pvalue > LEVEL


def test_one_task_says_nothing_of_the_other_direction():
    Z = jnp.ones((N, 1))
    root = Root.of(Z, jnp.array([[0.3, 0.1]]))
    np.testing.assert_array_equal(root.diagonal[1], np.zeros(N))
    whitened = root.whiten(jnp.stack([0.3 * jnp.ones(N), 0.1 * jnp.ones(N)]))
    np.testing.assert_allclose(whitened, np.append(np.ones(N), np.zeros(N)))
