# SPDX-License-Identifier: Apache-2.0
"""Moves of functions with order: what they propose, and that they never lower the bound."""

import numpy as np
import pytest
from truth.task_problems import SMOOTH, M, started

from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import rounds
from numpyro_spikeslab.fitting.ascent import Progress
from numpyro_spikeslab.fitting.function_sweeps import in_use
from numpyro_spikeslab.fitting.function_updates import switch_off
from numpyro_spikeslab.fitting.moves import (
    MAX_GRAPH,
    drop,
    laplacian_of,
    refit_weights,
    sharpen,
    unmix,
)
from numpyro_spikeslab.fitting.starts import start_at

pytestmark = pytest.mark.usefixtures("x64")
KEY = random.key(0)
RNG = np.random.default_rng(0)


def energy(X, phi):
    """``phi^T L phi`` of each function."""
    return np.einsum("mn,nk,mk->m", phi, laplacian_of(jnp.asarray(X)), phi)


@pytest.mark.parametrize("shape", [(12,), (12, 3)])
def test_roughness_is_a_graph_laplacian(shape):
    X = RNG.normal(size=shape)
    phi = RNG.normal(size=(2, 12))
    points = X.reshape(12, -1)
    squared = np.sum((points[:, None] - points) ** 2, axis=2)
    nearest = np.sort(squared, axis=1)[:, 1]
    similarity = np.exp(-0.5 * squared / np.median(nearest))
    difference = (phi[:, :, None] - phi[:, None, :]) ** 2
    expected = 0.5 * np.sum(similarity * difference, axis=(1, 2))
    np.testing.assert_allclose(energy(X, phi), expected)
    # inputs that are repeated are as far from others as single ones
    x = np.repeat(np.linspace(0, 1, 10), 2)
    line, constant = energy(x, np.stack([x, np.ones_like(x)]))
    assert np.isfinite(line) and line > 1e-3 and abs(constant) < 1e-12
    assert laplacian_of(jnp.zeros(MAX_GRAPH + 1)) is None


def test_unmixing_orders_functions_by_smoothness():
    x = np.linspace(0, 1, 200, endpoint=False)
    waves = np.sqrt(2) * np.sin(2 * np.pi * np.array([[1.0], [2.0], [30.0]]) * x)
    mixed = RNG.normal(size=(3, 3)) @ waves
    deviation = jnp.asarray(np.stack([mixed[0], np.cos(x), mixed[1], mixed[2]]))
    active = jnp.array([True, False, True, True])
    U, group = unmix(deviation, active, laplacian_of(jnp.asarray(x)))
    np.testing.assert_array_equal(group, [0, 0, 1, -1])
    unmixed = (np.asarray(U).T @ np.where(active[:, None], deviation, 0.0))[:3]
    np.testing.assert_allclose(unmixed @ unmixed.T / 200, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(np.abs(unmixed @ waves.T) / 200, np.eye(3), atol=0.02)


def test_the_function_that_is_dropped_is_missed_least():
    problem, _ = started("weak", False).run(20)
    assert np.all(in_use(problem.engine, problem.posterior))
    bounds = []
    for m in range(M):
        off = switch_off(problem.posterior, jnp.arange(M) == m, problem.engine.functions.mean)
        refitted, bound = refit_weights(problem.engine, problem.at, off, 2)
        np.testing.assert_allclose(problem.bound(refitted), bound, rtol=1e-9)
        bounds.append(float(bound))
    dropped = drop(problem.engine, problem.posterior)
    gone = ~np.any(dropped.weights.probs > 0, axis=0)
    np.testing.assert_array_equal(np.flatnonzero(gone), [np.argmax(bounds)])


def test_sharpening_finds_a_better_turn():
    problem, _ = started("weak", False).run(20)
    W, phi = problem.posterior.weights.mean, problem.functions.mean - problem.engine.functions.mean
    turn = jnp.array([[np.cos(0.6), -np.sin(0.6)], [np.sin(0.6), np.cos(0.6)]])
    args = W @ turn, problem.engine.functions.mean + turn.T @ phi, problem.at.sigma2
    turned = start_at(problem.engine, problem.posterior, *args)
    before = refit_weights(problem.engine, problem.at, turned, 3)[1]
    W, phi = sharpen(problem.engine, turned, np.zeros(M, int))
    better = start_at(problem.engine, turned, W, phi, problem.at.sigma2)
    assert refit_weights(problem.engine, problem.at, better, 3)[1] > before + 0.5


def test_moves_find_what_sweeps_do_not():
    """Functions that start mixed are found apart."""
    x = np.linspace(0, 6, 40)
    waves = np.stack([np.sin(x), np.sin(5 * x)])
    W = np.zeros((8, 2))
    W[:4, 0], W[4:, 1] = 1.0, 1.0
    Y = (W @ waves).T + 0.1 * RNG.normal(size=(40, 8))
    model = nss.models.mtmkl([SMOOTH] * 2)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    state = svi.init(KEY, x, Y)
    moved = svi.run(KEY, 60, x, Y, init_state=state, progress_bar=False)
    for _ in range(60):
        state, loss = svi.update(state, x, Y)
    assert moved.losses[-1] < loss + 0.1 and np.max(np.diff(moved.losses)) < 1e-8
    probs = np.asarray(moved.params["W_auto_probs"])
    order = np.argsort(probs[0])[::-1]
    np.testing.assert_allclose(probs[:, order], W, atol=0.2)


@pytest.mark.usefixtures("unchecked_types")
def test_the_highest_bound_wins_a_contest():
    sweeps = np.arange(1, rounds.STAGE + 1)
    bounds = {
        "state": np.full(sweeps.size, -10.0),
        "late": -300.0 + 40 * sweeps,
        "slow": -300.0 + sweeps,
        "broken": np.full(sweeps.size, np.nan),
    }

    class Scripted(rounds.Fit):
        def sweeps(self, progress, num_steps, threshold=-1.0):
            name, end = progress.posterior, progress.step + num_steps
            return rounds.Stage(progress._replace(step=end), -bounds[name][progress.step : end])

    fit = Scripted(None, -1.0, None)
    names = list(bounds)
    stage = fit.contest(Progress(0, names[0], np.inf, False), names[1:])
    assert (stage.progress.posterior, stage.progress.step, stage.rejected) == ("late", 1, False)
    assert list(stage.losses) == [-bounds["late"][-1]]
    # 120 nats behind after the first sweeps, and the highest in the end
    assert bounds["late"][rounds.HEAT - 1] < bounds["state"][0] - 120

    bounds["late"][:] = np.nan
    stage = fit.contest(Progress(0, names[0], np.inf, False), names[1:])
    assert stage.rejected and stage.progress.posterior == "state"
