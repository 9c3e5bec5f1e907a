# SPDX-License-Identifier: Apache-2.0
"""Moves between local optima: what they propose, and that they never lower the bound."""

import numpy as np
import pytest
from task_problems import SMOOTH, M, model_of, observations, small, started
from tinygp import kernels

from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import rounds
from numpyro_spikeslab.fitting.ascent import Progress
from numpyro_spikeslab.fitting.function_updates import is_active
from numpyro_spikeslab.fitting.moves import drop, refit_weights, sharpen, switch_off, unmix, varimax
from numpyro_spikeslab.fitting.roughness import roughness_of_inputs
from numpyro_spikeslab.fitting.starts import start_at

pytestmark = pytest.mark.usefixtures("x64")
KEY = random.key(0)
RNG = np.random.default_rng(0)


def sparse_loadings(num_tasks=12, num_functions=4):
    """Each task loads on one column."""
    A = np.zeros((num_tasks, num_functions))
    A[np.arange(num_tasks), np.arange(num_tasks) % num_functions] = 1 + RNG.random(num_tasks)
    return A


def test_varimax_finds_the_rotation_of_sparse_loadings():
    A = sparse_loadings()
    R = np.linalg.qr(RNG.normal(size=(4, 4)))[0]
    T = np.asarray(varimax(jnp.asarray(A @ R), jnp.zeros(4, int)))
    np.testing.assert_allclose(T.T @ T, np.eye(4), atol=1e-12)
    # up to order and signs
    np.testing.assert_allclose(np.sort(np.abs(A @ R @ T), axis=1), np.sort(A, axis=1), atol=1e-6)


def test_varimax_turns_only_inside_of_groups():
    A = RNG.normal(size=(12, 4))
    T = np.asarray(varimax(jnp.asarray(A), jnp.array([0, 1, 0, -1])))
    np.testing.assert_allclose(T.T @ T, np.eye(4), atol=1e-12)
    apart = np.ones((4, 4), bool)
    apart[np.ix_([0, 2], [0, 2])] = False
    np.testing.assert_array_equal(T[apart], np.eye(4)[apart])
    assert abs(T[0, 2]) > 1e-3

    def spread(x):
        return np.sum(np.var(x**2, axis=0))

    assert spread(A @ T) > spread(A) + 1e-3
    np.testing.assert_array_equal(varimax(jnp.asarray(A[:, :1]), jnp.zeros(1, int)), [[1.0]])


def test_unmixing_orders_functions_by_smoothness():
    x = np.linspace(0, 1, 200, endpoint=False)
    waves = np.sqrt(2) * np.sin(2 * np.pi * np.array([[1.0], [2.0], [30.0]]) * x)
    mixed = RNG.normal(size=(3, 3)) @ waves
    deviation = jnp.asarray(np.stack([mixed[0], np.cos(x), mixed[1], mixed[2]]))
    active = jnp.array([True, False, True, True])
    U, group = unmix(deviation, active, roughness_of_inputs(jnp.asarray(x)))
    found = np.asarray(U).T @ np.where(active[:, None], deviation, 0.0)
    np.testing.assert_array_equal(group, [0, 0, 1, -1])
    found = found[:3]
    np.testing.assert_allclose(found @ found.T / 200, np.eye(3), atol=1e-6)
    np.testing.assert_allclose(np.abs(found @ waves.T) / 200, np.eye(3), atol=0.02)


def test_what_is_switched_off_is_at_its_prior():
    found = small()
    mean, variances = found.data.mean, found.prior.variances(found.functions.theta)
    off = switch_off(found.posterior, jnp.array([True, False]), mean)
    assert not np.any(off.weights.probs[:, 1])
    np.testing.assert_array_equal(off.weights.probs[:, 0], found.posterior.weights.probs[:, 0])
    np.testing.assert_array_equal(off.functions.mean[1], mean[1])
    np.testing.assert_allclose(off.functions.var[1], variances[1])
    np.testing.assert_array_equal(off.functions.mean[0], found.functions.mean[0])
    assert off.functions.kl[1] == 0.0 and not np.any(off.functions.alpha[1])


@pytest.mark.slow
def test_the_function_that_is_dropped_is_missed_least():
    found, _ = started("weak", False).run(20)
    assert np.all(is_active(found.at, found.posterior))
    bounds = []
    for m in range(M):
        off = switch_off(found.posterior, jnp.arange(M) != m, found.data.mean)
        refitted, bound = refit_weights(found.spec, found.data, found.at, off, 2)
        np.testing.assert_allclose(found.bound(refitted), bound, rtol=1e-9)
        bounds.append(float(bound))
    dropped = drop(found.spec, found.data, found.posterior)
    gone = ~np.any(dropped.weights.probs > 0, axis=0)
    np.testing.assert_array_equal(np.flatnonzero(gone), [np.argmax(bounds)])


@pytest.mark.slow
def test_sharpening_finds_a_better_turn():
    found, _ = started("weak", False).run(20)
    W, phi = found.posterior.weights.mean, found.functions.mean - found.data.mean
    turn = jnp.array([[np.cos(0.6), -np.sin(0.6)], [np.sin(0.6), np.cos(0.6)]])
    args = W @ turn, found.data.mean + turn.T @ phi, found.at.sigma2
    turned = start_at(found.spec, found.data, found.posterior, *args)
    before = refit_weights(found.spec, found.data, found.at, turned, 3)[1]
    W, phi = sharpen(found.spec, found.data, turned, np.zeros(M, int))
    better = start_at(found.spec, found.data, turned, W, phi, found.at.sigma2)
    assert refit_weights(found.spec, found.data, found.at, better, 3)[1] > before + 0.5


@pytest.mark.exhaustive
def test_moves_among_kernels_of_several_kinds():
    """They never lower the bound, and predictions interpolate."""
    x, Y = observations(30, 5, 3)
    functions = [SMOOTH, kernels.quasisep.Matern32(1.0), kernels.RationalQuadratic(alpha=1.0)]
    model = model_of("weak", functions)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    result = svi.run(KEY, 60, x, Y, progress_bar=False)
    assert np.max(np.diff(result.losses)) < 1e-8
    known = guide.predict(result.params, x, Y)
    there = guide.predict(result.params, x, Y, X_new=x)
    for new, old in zip(there, known, strict=True):
        np.testing.assert_allclose(new, old, atol=1e-6)


@pytest.mark.slow
def test_moves_find_what_sweeps_do_not():
    """Functions that start mixed are found apart."""
    x = np.linspace(0, 6, 40)
    waves = np.stack([np.sin(x), np.sin(5 * x)])
    W = np.zeros((8, 2))
    W[:4, 0], W[4:, 1] = 1.0, 1.0
    Y = (W @ waves).T + 0.1 * RNG.normal(size=(40, 8))
    model = nss.models.mtmkl([SMOOTH] * 2)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    first = svi.init(KEY, x, Y)
    moved = svi.run(KEY, 60, x, Y, init_state=first, progress_bar=False)
    state = first
    for _ in range(60):
        state, loss = svi.update(state, x, Y)
    assert moved.losses[-1] < loss + 0.1
    probs = np.asarray(moved.params["W_auto_probs"])
    order = np.argsort(probs[0])[::-1]
    np.testing.assert_allclose(probs[:, order], W, atol=0.2)


@pytest.mark.usefixtures("unchecked_types")
def test_a_contest_gives_up_proposals_that_cannot_catch_up():
    sweeps = np.arange(1, rounds.STAGE + 1)
    bounds = {
        "state": np.full(sweeps.size, -10.0),
        "late": -300.0 + 40 * sweeps,
        "lame": np.full(sweeps.size, -50.0),
        "slow": -300.0 + sweeps,
        "broken": np.full(sweeps.size, np.nan),
    }
    visits = dict.fromkeys(bounds, 0)

    class Scripted(rounds.Fit):
        def sweeps(self, progress, num_steps, threshold=-1.0):
            name, end = progress.posterior, progress.step + num_steps
            visits[name] += num_steps
            return rounds.Stage(progress._replace(step=end), -bounds[name][progress.step : end])

    fit = Scripted(None, None, -1.0, None)
    names = list(bounds)
    stage = fit.contest(Progress(0, names[0], np.inf, False), names[1:])
    assert stage.progress.posterior == "late"
    assert stage.progress.step == 1
    assert not stage.rejected
    assert list(stage.losses) == [-bounds["late"][-1]]
    assert visits == {"state": 8, "late": 12, "lame": 4, "slow": 4, "broken": 4}
    # 120 nats behind after the first sweeps, and the highest in the end
    assert bounds["late"][rounds.HEAT - 1] < bounds["state"][0] - 120

    bounds["late"][:] = np.nan
    stage = fit.contest(Progress(0, names[0], np.inf, False), names[1:])
    assert stage.rejected
    assert stage.progress.posterior == "state"
