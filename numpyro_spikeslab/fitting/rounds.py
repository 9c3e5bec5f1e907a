# SPDX-License-Identifier: Apache-2.0
"""Rounds of moves: which are proposed when. The bound never falls over the steps of a fit."""

from collections.abc import Iterator

import numpy as np

import jax.numpy as jnp

from numpyro_spikeslab.fitting.ascent import STAGE, Fit, Progress, Stage
from numpyro_spikeslab.fitting.function_updates import in_use
from numpyro_spikeslab.fitting.moves import drop, keep_only, rotate
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.fitting.rotations import turn
from numpyro_spikeslab.fitting.roughness import Roughness
from numpyro_spikeslab.fitting.white_functions import gains_without

MAX_ROUNDS = 8
# Sweeps after each turn of a warm-up.
WARM_UP = (10, 15, 20, 30, 40)
# Functions without which the bound is at most that much lower are the first that are dropped.
WEAK = 20.0
MAX_DROPS = 20
MAX_TURNS = 20


def function_moves(roughness: Roughness, fit: Fit, progress: Progress) -> Iterator[Stage]:
    """Rotations and drops, until none from a settled state is accepted.

    :param roughness: what orders functions.
    """
    stage = fit.sweeps(progress, STAGE)
    yield stage
    settled = False
    for _ in range(MAX_ROUNDS):
        now = stage.progress.posterior
        fewer = drop(fit.spec, fit.data, now)
        turned, both = (rotate(fit.spec, fit.data, x, roughness) for x in (now, fewer))
        stage = fit.contest(stage.progress, (turned, fewer, both))
        yield stage._replace(comparable=stage.rejected)
        if not stage.rejected:
            settled = False
            continue
        if settled:
            return
        for later in fit.settle(stage.progress):
            yield later
            stage = later
        settled = True


def factor_moves(fit: Fit, progress: Progress) -> Iterator[Stage]:
    """Moves of functions without order: a warm-up, then drops, then turns."""
    stage = fit.sweeps(progress, STAGE)
    yield stage
    stage = warm_up(fit, stage.progress)
    yield stage
    for part in (_drops, _turns, Fit.settle):
        for later in part(fit, stage.progress):
            yield later
            stage = later


def warm_up(fit: Fit, progress: Progress) -> Stage:
    """Turns, each followed by sweeps, as one step: kept if the bound is higher in the end."""
    end = progress
    for k, size in enumerate(WARM_UP):
        turned = _turned(fit, end.posterior, k % 2 == 0, k < 2)
        end = fit.sweeps(end._replace(posterior=turned), size).progress
    better = bool(end.loss < progress.loss)
    end = (end if better else progress)._replace(step=progress.step + 1)
    return Stage(end, np.asarray([end.loss]), rejected=not better, comparable=True)


def _turned(fit: Fit, posterior: Posterior, whiten: bool, simplify: bool = False) -> Posterior:
    return turn(fit.spec, fit.data, posterior, jnp.array(whiten), jnp.array(simplify))


def _drops(fit: Fit, progress: Progress) -> Iterator[Stage]:
    """Without the functions that are missed least: twice as many after a success, or half."""
    number = -1
    for _ in range(MAX_DROPS):
        gains = np.asarray(gains_without(fit.spec, fit.data, progress.posterior))
        used = np.asarray(in_use(fit.spec, fit.data, progress.posterior))
        gains = np.where(used, gains, np.inf)
        if number < 0:
            number = max(int(np.sum(gains[used] > -WEAK)), 1)
        number = min(number, int(np.sum(used)) - 1)
        if number < 1:
            return
        keep = np.argsort(np.argsort(-gains)) >= number + np.sum(~used)
        fewer = keep_only(fit.data, progress.posterior, jnp.asarray(keep))
        stage = fit.contest(progress, [fewer])
        yield stage
        progress = stage.progress
        number = number // 2 if stage.rejected else 2 * number


def _turns(fit: Fit, progress: Progress) -> Iterator[Stage]:
    """Turns with functions made uncorrelated and as they are, until both are rejected."""
    rejected = 0
    for k in range(MAX_TURNS):
        stage = fit.contest(progress, [_turned(fit, progress.posterior, k % 2 == 0)])
        yield stage
        progress = stage.progress
        rejected = rejected + 1 if stage.rejected else 0
        if rejected == 2:
            return
