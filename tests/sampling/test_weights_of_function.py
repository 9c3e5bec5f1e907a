# SPDX-License-Identifier: Apache-2.0
"""Weights drawn while functions are integrated out, against dense Gaussians and all models."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import linalg, stats
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.covariance import Dense
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.sampling.function_state import Fixed, Function, Integrated, State
from numpyro_spikeslab.sampling.weights_of_function import gibbs_block, take_column

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
    prior = SimpleNamespace(mean=jnp.asarray(MU))
    now = SimpleNamespace(at=SimpleNamespace(prior=Prior(jnp.full((Q, M), -0.4), None)))
    fixed = Fixed(now, jnp.asarray(SEEN / NOISE**2), prior, True, True, True)
    arrays = map(jnp.asarray, (VARIANCE, residual))
    state = State(jnp.asarray(PHI), jnp.zeros((M, 0)), jnp.asarray(W), {}, *arrays)
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
    observed = SEEN.T.ravel()
    normal = stats.multivariate_normal(mean.T.ravel()[observed], full[np.ix_(observed, observed)])
    return normal.logpdf(Y.T.ravel()[observed])


PATTERNS = list(product([0.0, 1.0], repeat=Q))


def test_one_function_and_the_slabs_are_functions():
    functions, column = integrated([0])
    values, expected = [], []
    # what depends on the observations alone is left out, but not the length
    for length in (0.5, 2.0):
        K, y = Dense(jnp.asarray(covariance(length))), column.stacked(functions.mean)
        function = Function(jnp.array(0), K, K.cholesky(functions.root.diagonal[0]))
        value, half = function.log_density(y)
        for spikes in PATTERNS[::3]:
            values.append(float(value + column.slabs(half).log_evidence(jnp.asarray(spikes))))
            expected.append(log_density([0], [length], spikes, column.tasks))
    np.testing.assert_allclose(np.diff(values), np.diff(expected), rtol=1e-8)


def test_two_functions_are_functions():
    functions, column = integrated([0, 1])
    root, lengths = functions.root, [0.7, 1.6]
    units = jnp.eye(2 * N).reshape(2 * N, 2, N)
    R = np.stack([root.times(unit) for unit in units], axis=1)
    transposed = np.stack([np.ravel(root.transposed(unit)) for unit in jnp.eye(2 * N)], axis=1)
    np.testing.assert_array_equal(transposed, R.T)
    # R^T R is what the tasks say of both functions
    A = np.einsum("nq,qs,qt->nst", SEEN / NOISE**2, W[:, :2], W[:, :2])
    A = np.block([[np.diag(A[:, s, t]) for t in range(2)] for s in range(2)])
    np.testing.assert_allclose(R.T @ R, A, atol=1e-12)
    K = linalg.block_diag(*map(covariance, lengths))
    L = np.linalg.cholesky(np.eye(2 * N) + R @ K @ R.T)
    slabs = column.slabs(jnp.asarray(np.linalg.solve(L, column.stacked(functions.mean))))
    values = [float(slabs.log_evidence(jnp.asarray(spikes))) for spikes in PATTERNS]
    expected = [log_density([0, 1], lengths, spikes, column.tasks) for spikes in PATTERNS]
    np.testing.assert_allclose(np.diff(values), np.diff(expected), rtol=1e-8)


def block():
    """As if the prior of a function resisted a fifth of everything."""
    _, column = integrated([0])
    return column.slabs(0.45 * jnp.column_stack([column.y, column.features]))


@pytest.mark.parametrize("may_be_empty", [True, False])
def test_spikes_from_an_exact_draw_stay_exact(may_be_empty):
    slabs, patterns = block(), jnp.asarray(PATTERNS)
    logs = jax.vmap(slabs.log_evidence)(patterns) + patterns @ slabs.prior.log_odds
    probs = np.asarray(jax.nn.softmax(logs if may_be_empty else logs.at[0].set(-jnp.inf)))
    size = 20_000
    start = np.random.default_rng(1).choice(len(PATTERNS), size, p=probs)

    def step(item):
        key, spikes = item
        return gibbs_block(key, slabs, spikes, may_be_empty) != 0

    args = random.split(KEY, size), patterns[start]
    end = np.asarray(jax.jit(lambda args: jax.lax.map(step, args))(args)) @ [8, 4, 2, 1]
    assert np.mean(end != start) > 0.02
    # rare patterns count together; 2 tests at 1e-4
    expected = size * probs
    cells = np.where(expected < 10, 16, np.arange(16))
    counts, expected = np.bincount(cells[end], minlength=17), np.bincount(cells, expected, 17)
    assert np.all(counts[expected == 0] == 0) and (may_be_empty or np.all(end > 0))
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > LEVEL


def test_slabs_have_their_posterior():
    slabs = block()
    spikes = jnp.array([1.0, 0.0, 1.0, 1.0])
    on = np.array([0, 2, 3])
    precision = np.asarray(slabs.gram)[np.ix_(on, on)] + np.diag(1 / slabs.prior.variance[on])
    mean = np.linalg.solve(precision, np.asarray(slabs.linear)[on])
    zero = slabs.draw(spikes, jnp.zeros(4))
    np.testing.assert_allclose(zero[on], mean)
    # draws are affine in standard normal numbers
    deviations = np.stack([slabs.draw(spikes, x) - zero for x in jnp.eye(4)], 1)
    np.testing.assert_array_equal(deviations[1], 0)
    np.testing.assert_allclose(
        (deviations @ deviations.T)[np.ix_(on, on)], np.linalg.inv(precision)
    )
