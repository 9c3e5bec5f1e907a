# SPDX-License-Identifier: Apache-2.0
"""Fits of latent functions with moves between local optima: schedule, judgement of proposals."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import Bool, Float
import numpy as np

import jax.numpy as jnp

from numpyro_spikeslab.fitting.ascent import Progress, chunks
from numpyro_spikeslab.fitting.function_sweeps import gains_without, in_use
from numpyro_spikeslab.fitting.function_updates import switch_off
from numpyro_spikeslab.fitting.moves import Laplacian, drop, rotate
from numpyro_spikeslab.fitting.posterior import Engine, Posterior
from numpyro_spikeslab.fitting.rotations import rotate_white

# Sweeps in a stage, and after a proposal before it is judged; hopeless ones are dropped after HEAT.
STAGE = 12
HEAT = 4
# A fit has settled when the bound gains less than this in a stage.
TOLERANCE = 0.2
MAX_SETTLING = 20
MAX_ROUNDS = 8
# Sweeps after each rotation of a warm-up.
WARM_UP = (10, 15, 20, 30, 40)
# Functions whose removal lowers the bound by at most this much are dropped first.
WEAK = 20.0
MAX_DROPS = 20
MAX_TURNS = 20


class Starts(NamedTuple):
    """The starts of a run where they are compared: their bounds, and which include a weight."""

    bounds: Float[np.ndarray, " starts"]
    include: Bool[np.ndarray, " starts"]


class Stage(NamedTuple):
    """Some steps of a fit: the state after them, and the loss after each.

    - **rejected** - whether it is a round of moves in which no proposal was accepted.
    - **comparable**, **starts** - whether starts are compared here, and then they.
    """

    progress: Progress
    losses: Float[np.ndarray, " steps"]
    rejected: bool = False
    comparable: bool = False
    starts: Starts | None = None


Stages = Generator[Stage, None, Progress]
"""Stages one after the other; in the end, the state after the last."""


class Fit(NamedTuple):
    """A fit of latent functions.

    - **threshold** - change of the bound in a step at which a fit without moves stops.
    - **moves** - rounds of moves from a state, `None` for a fit without moves.
    """

    engine: Engine
    threshold: float
    moves: Callable[["Fit", Progress], Stages] | None

    def sweeps(self, progress: Progress, num_steps: int) -> Stage:
        """Take at most ``num_steps`` steps without moves, and without a test of convergence."""
        ends, losses = zip(*chunks(self.engine, progress, num_steps, -1.0), strict=True)
        return Stage(ends[-1], np.concatenate(losses))

    def steps(self, progress: Progress, num_steps: int) -> Iterator[Stage]:
        """Take at most ``num_steps`` steps: rounds of moves if there are any, then sweeps."""
        if self.moves is not None and num_steps >= STAGE:
            for stage in self.moves(self, progress):
                progress = stage.progress
                num_steps -= len(stage.losses)
                yield stage
                if num_steps < STAGE:
                    break
        for chunk in chunks(self.engine, progress, num_steps, self.threshold):
            yield Stage(*chunk)

    def settle(self, progress: Progress) -> Stages:
        """Sweep until the bound hardly rises."""
        for _ in range(MAX_SETTLING):
            before = float(progress.loss)
            stage = self.sweeps(progress, STAGE)
            yield stage
            progress = stage.progress
            if before - stage.losses[-1] < TOLERANCE:
                break
        return progress

    def contest(self, progress: Progress, proposals: Sequence[Posterior]) -> Stage:
        """Compare the current state with proposals after :data:`STAGE` sweeps each; keep the best.

        A contender is dropped early if its latest gain, extrapolated, cannot reach the best bound.
        """
        contenders = [progress._replace(posterior=x) for x in (progress.posterior, *proposals)]
        bounds, forecasts = np.zeros(len(contenders)), np.full(len(contenders), np.inf)
        for num_left in range(STAGE - HEAT, -1, -HEAT):
            for k in np.flatnonzero(forecasts > -np.inf):
                contenders[k], losses, *_ = self.sweeps(contenders[k], HEAT)
                gain = max(losses[0] - losses[-1], 0) / (HEAT - 1)
                reached = [-losses[-1], num_left * gain - losses[-1]]
                bounds[k], forecasts[k] = np.nan_to_num(reached, nan=-np.inf)
            hopeless = forecasts < np.max(bounds)
            bounds[hopeless] = forecasts[hopeless] = -np.inf
        best = int(np.argmax(bounds))
        end = contenders[best]._replace(step=progress.step + 1)
        return Stage(end, np.asarray([-bounds[best]]), rejected=best == 0)


def best_of(climbs: Iterable[Iterator[Stage]]) -> Iterator[Stage]:
    """Run several starts up to their first comparable stage, then continue the best.

    Only the losses of all other stages are kept, for a posterior may be large.
    """
    heats: dict[int, tuple[Stage, Iterator[Stage]]] = {}
    starts = []
    try:
        for k, climb in enumerate(climbs):
            losses = []
            for stage in climb:
                losses.append(stage.losses)
                heats[k] = stage._replace(losses=np.concatenate(losses)), climb
                if stage.comparable:
                    break
            starts.append((_bound(heats[k]), include(stage.progress.posterior.weights)))
            heats = dict([max(heats.items(), key=lambda item: _bound(item[1]))])
    except KeyboardInterrupt:
        if heats:
            yield max(heats.values(), key=_bound)[0]
        raise
    ((best, leader),) = heats.values()
    yield best._replace(starts=Starts(*map(np.array, zip(*starts, strict=True))))
    del best, heats, stage, climb
    yield from leader


def include(weights: Any) -> Any:
    """Whether any weight is more likely in than out."""
    return jnp.any(weights.probs > 0.5)


def _bound(heat: tuple[Stage, Any]) -> float:
    """Return the last bound of a start, minus infinity in place of NaN."""
    return float(np.nan_to_num(-heat[0].losses[-1], nan=-np.inf, posinf=np.inf, neginf=-np.inf))


def function_moves(L: Laplacian, fit: Fit, progress: Progress) -> Stages:
    """Propose rotations and drops until all are rejected from a settled state."""
    stage = fit.sweeps(progress, STAGE)
    yield stage
    progress, settled = stage.progress, False
    for _ in range(MAX_ROUNDS):
        now = progress.posterior
        fewer = drop(fit.engine, now)
        rotated, rotated_fewer = (rotate(fit.engine, x, L) for x in (now, fewer))
        stage = fit.contest(progress, (rotated, fewer, rotated_fewer))
        yield stage._replace(comparable=stage.rejected)
        progress = stage.progress
        if stage.rejected and settled:
            break
        settled = stage.rejected
        if settled:
            progress = yield from fit.settle(progress)
    return progress


def factor_moves(fit: Fit, progress: Progress) -> Stages:
    """Move functions without order: a warm-up of rotations, then drops, then single rotations."""
    stage = fit.sweeps(progress, STAGE)
    yield stage
    stage = _warm_up(fit, stage.progress)
    yield stage
    progress = stage.progress
    for schedule in (_drops, _rotations, Fit.settle):
        progress = yield from schedule(fit, progress)
    return progress


def _warm_up(fit: Fit, progress: Progress) -> Stage:
    """Rotate and sweep several times; keep the end if its bound is higher than at the start."""
    end = progress
    for k, size in enumerate(WARM_UP):
        rotated = rotate_white(fit.engine, end.posterior, k % 2 == 0, k < 2)
        end = fit.sweeps(end._replace(posterior=rotated), size).progress
    better = bool(end.loss < progress.loss)
    end = (end if better else progress)._replace(step=progress.step + 1)
    return Stage(end, np.asarray([end.loss]), rejected=not better, comparable=True)


def _drops(fit: Fit, progress: Progress) -> Stages:
    """Drop the least useful functions; double their number after a success, else halve it."""
    number = -1
    for _ in range(MAX_DROPS):
        gains = np.asarray(gains_without(fit.engine, progress.posterior))
        used = np.asarray(in_use(fit.engine, progress.posterior))
        gains = np.where(used, gains, np.inf)
        if number < 0:
            number = max(int(np.sum(gains[used] > -WEAK)), 1)
        number = min(number, int(np.sum(used)) - 1)
        if number < 1:
            break
        off = np.argsort(np.argsort(-gains)) < number + np.sum(~used)
        fewer = switch_off(progress.posterior, off, fit.engine.functions.mean)
        stage = fit.contest(progress, [fewer])
        yield stage
        progress = stage.progress
        number = number // 2 if stage.rejected else 2 * number
    return progress


def _rotations(fit: Fit, progress: Progress) -> Stages:
    """Rotate functions, whitened and as they are in turn, until both are rejected."""
    num_rejected = 0
    for k in range(MAX_TURNS):
        rotated = rotate_white(fit.engine, progress.posterior, k % 2 == 0, False)
        stage = fit.contest(progress, [rotated])
        yield stage
        progress = stage.progress
        num_rejected = num_rejected + 1 if stage.rejected else 0
        if num_rejected == 2:
            break
    return progress
