# SPDX-License-Identifier: Apache-2.0
"""Runs of an ascent: several starts, chunks of compiled steps, progress."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float
import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer.svi import SVIState

from numpyro_spikeslab.fitting.ascent import CHUNK, Progress, advance, begin
from numpyro_spikeslab.fitting.posterior import Data, Spec, view_at
from numpyro_spikeslab.fitting.roughness import no_roughness, roughness_of_inputs
from numpyro_spikeslab.fitting.rounds import Fit, Stage, best_of, factor_moves, function_moves
from numpyro_spikeslab.fitting.starts import start_random, start_svd
from numpyro_spikeslab.reading.form import FUNCTIONS
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reading

# Matrices of this size are decomposed faster by one thread than by several that wait for each
# other, and much faster where the cores are taken.
SMALL = 1000


class Task(NamedTuple):
    """What a call works with.

    - **reading** - the model as read.
    - **spec**, **data** - what compiled code is compiled for, and takes.
    """

    reading: Reading
    spec: Spec
    data: Data


class Plan(NamedTuple):
    """What a run is asked for.

    - **number** - of starts.
    - **num_steps** - at most as many steps from each.
    - **threshold** - change of the bound in a step at which it has settled; negative for never.
    """

    number: int
    num_steps: int
    threshold: float


class CAVIRunResult(NamedTuple):
    """What :meth:`CAVI.run` returns: the fields of NumPyro's ``SVIRunResult`` and two more.

    - **params** - the fitted parameters.
    - **state** - the last state.
    - **losses** - the exact negative evidence lower bound after every step. Under a transformation
      of the caller their number is fixed, and the last one fills the steps that ``tol`` saved.
    - **converged** - whether the run stopped by ``tol``; `None` if there was no ``tol``.
    - **restarts** - the bound of each start, at the end or, with latent functions, where they were
      compared; `None` for a single start, and under a transformation.
    """

    params: dict[str, Any]
    state: SVIState
    losses: Float[Array, " steps"]
    converged: Any
    restarts: Float[np.ndarray, " starts"] | None = None


def one_blas_thread(task: Task) -> AbstractContextManager:
    """A context for a run whose matrices are small."""
    known = task.reading.functions
    size = task.reading.block_size if known is None else known.mean.shape[1]
    return threadpool_limits(1, user_api="blas") if size <= SMALL else nullcontext()


def stages(task: Task, key: Array, progress: Progress, plan: Plan, bar: tqdm) -> Iterator[Stage]:
    """The stages of a run, of the best of its starts."""
    number, num_steps, threshold = plan
    spec, data = task.spec, task.data
    if task.reading.functions is None:
        if number > 1:
            progress = random_starts(task, key, progress, plan)
        yield from _watched(_chunks(task, progress, plan), bar)
        return
    fit = Fit(spec, data, threshold, None if spec.plain else _moves(task))
    starts = [progress]
    if number > 1 and data.layout is None:
        starts.append(begin(spec, data, start_svd(spec, data, progress.posterior)))
    for k in range(number - len(starts)):
        own = random.fold_in(key, k)
        starts.append(begin(spec, data, start_random(spec, data, progress.posterior, own)))
    starts = [one._replace(step=progress.step) for one in starts]
    climbs = [_watched(fit.steps(one, num_steps), bar) for one in starts]
    yield from best_of(climbs)


def run_traced(
    task: Task, key: Array, progress: Progress, plan: Plan, begun: Any
) -> tuple[Progress, Any]:
    """A run under a transformation of the caller.

    :param begun: number of steps before the first; a tracer where the caller's state is one.
    :return: the end and the loss after each step; the last one fills steps that were saved.
    """
    number, num_steps, threshold = plan
    if task.reading.functions is not None:
        raise ValueError(
            "CAVI.run: models with latent functions cannot be fitted under a transformation "
            "such as jit or vmap; the moves between optima are decided outside of compiled "
            "code."
        )
    if are_concrete(begun):
        ends_hot(task.spec, int(begun) + num_steps)
    if number > 1:
        progress = random_starts(task, key, progress, plan)
    run = _steps(task, number, threshold)
    losses = []
    for first in range(0, num_steps, CHUNK):
        size = min(CHUNK, num_steps - first)
        progress, found = run(progress, size)
        losses.append(found[..., :size])
    progress, joined = _best(progress, jnp.concatenate(losses, axis=-1), number)
    return progress, jnp.where(jnp.isnan(joined), progress.loss, joined)


def random_starts(task: Task, key: Array, progress: Progress, plan: Plan) -> Progress:
    """A batch of starts, the first the given one.

    The others begin at temperature 1, if the schedule has it: hot ones forget where they began.
    """
    posterior, number = progress.posterior, plan.number
    at = view_at(task.spec, task.data, posterior)
    scale = jnp.broadcast_to(jnp.sqrt(at.prior.variance), task.spec.form.shape)
    scale = scale.reshape(posterior.weights.probs.shape)

    def start(key):
        weights = posterior.weights.random_start(key, scale)
        return begin(
            task.spec, task.data, posterior._replace(weights=weights, residual=None)
        ).posterior

    others = jax.vmap(start)(random.split(key, number - 1))
    progress = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), progress)
    posterior = jax.tree.map(lambda x, y: x.at[1:].set(y), progress.posterior, others)
    step = progress.step.at[1:].set(first_cold(task.spec, progress.step[0], plan.num_steps))
    return progress._replace(posterior=posterior, step=step)


def first_cold(spec: Spec, step: Any, num_steps: int) -> Any:
    """The first step at temperature 1 of a run from ``step``; ``step`` where it has none."""
    if spec.temperature is None:
        return step
    steps = step + jnp.arange(num_steps)
    return steps[jnp.argmax(jax.vmap(spec.temperature)(steps) <= 1)]


def _steps(task: Task, number: int, threshold: float) -> Callable:
    def run(progress, num_steps):
        return advance(task.spec, task.data, progress, num_steps, threshold)

    return run if number == 1 else jax.vmap(run, in_axes=(0, None))


def _best(progress: Progress, losses: Any, number: int) -> tuple[Progress, Any]:
    """The start with the best bound."""
    if number == 1:
        return progress, losses
    # a start that went wrong must not win
    best = jnp.argmin(jnp.where(jnp.isnan(progress.loss), jnp.inf, progress.loss))
    return jax.tree.map(lambda x: x[best], progress), losses[best]


def _chunks(task: Task, progress: Progress, plan: Plan) -> Iterator[Stage]:
    """A run of one start, or of several at once of which the last stage keeps the best."""
    number, left, threshold = plan
    run, every = _steps(task, number, threshold), []
    interrupt: KeyboardInterrupt | None = None
    while left > 0 and interrupt is None and not bool(jnp.all(progress.converged)):
        size = min(CHUNK, left)
        try:
            progress, found = run(progress, size)
        except KeyboardInterrupt as error:
            interrupt = error
            continue
        every.append(np.asarray(found)[..., :size])
        left -= size
        if number == 1:
            yield Stage(progress, _done(every.pop(), bool(progress.converged)))
    if every:
        restarts = -np.atleast_1d(progress.loss)
        progress, losses = _best(progress, np.concatenate(every, axis=-1), number)
        losses = _done(losses, bool(progress.converged))
        yield Stage(progress, losses, restarts=restarts)
    if interrupt is not None:
        raise interrupt


def _done(losses: Any, converged: bool) -> Any:
    """Without the steps that convergence saved."""
    return losses[: np.flatnonzero(~np.isnan(losses))[-1] + 1] if converged else losses


def _moves(task: Task) -> Any:
    """The moves that suit the functions of a model."""
    if task.spec.white:
        return factor_moves
    known = task.reading.functions
    assert known is not None and task.reading.form.kind == FUNCTIONS
    kinds = {template.kind for template in known.functions.templates}
    if kinds <= {"white", "zero"}:
        return partial(function_moves, jax.tree_util.Partial(no_roughness))
    return partial(function_moves, roughness_of_inputs(known.functions.X))


def _watched(climb: Iterator[Stage], bar: tqdm) -> Iterator[Stage]:
    done = 0
    for stage in climb:
        done += len(stage.losses)
        # starts that run one after the other count from the beginning
        bar.update(done - bar.n)
        bar.set_postfix_str(f"bound: {-float(stage.losses[-1]):.4f}", refresh=False)
        yield stage


STILL = 0.05
"""Nats a step below which a bound counts as still."""


def _mean_gain(losses: Any) -> float:
    """Gain of the bound in each of the last steps, three at most."""
    last = losses[-4:]
    return float(last[0] - last[-1]) / max(len(last) - 1, 1)


def ends_hot(spec: Spec, num_steps: int) -> bool:
    """Whether a run is known to end before its schedule comes to temperature 1; then it warns.

    :param num_steps: that it has done, with those of the state from which it began.
    """
    if spec.temperature is None:
        return False
    try:
        # a schedule is known even where data are traced
        with jax.core.eval_context():
            temperature = float(spec.temperature(num_steps - 1))
    except (jax.errors.UnexpectedTracerError, jax.errors.ConcretizationTypeError):
        # unless it is made of what is traced
        return False
    if temperature <= 1.0:
        return False
    warnings.warn(
        f"CAVI.run ended after step {num_steps} at temperature {temperature:.3g}, where "
        "inclusion probabilities are still flattened. Run more steps, or pass "
        "`temperature=None` to CAVI.",
        stacklevel=5,
    )
    return True


def check_end(task: Task, progress: Progress, losses: Any, given: bool) -> None:
    """Raise or warn where a run has not ended well.

    :param given: whether it began at parameters of the user's.
    """
    spec, step, posterior = task.spec, int(progress.step), progress.posterior
    if np.isnan(losses[-1]):
        raise FloatingPointError(
            f"CAVI.run: the bound is not a number after step {step}. Look for values that are "
            "not finite in init_params, for columns of extreme size, and for a kernel of your own "
            "that is no covariance; a noise scale without a prior may have collapsed to zero: give "
            "it one, or rescale the data. In single precision, `numpyro.enable_x64()` may be "
            "enough."
        )
    if ends_hot(spec, step):
        return
    fitted = given and posterior.functions is not None
    if fitted and not bool(jnp.any(posterior.weights.probs > 0.5)):
        warnings.warn(
            "CAVI.run: all latent functions are switched off at the end of a run from init_params. "
            "Unless the data are nothing but noise, there was too much noise in the start: give "
            "one well below the spread of the tasks, or none.",
            stacklevel=4,
        )
    gain = _mean_gain(losses)
    if not bool(progress.converged) and gain > max(
        STILL, 100 * np.finfo(losses.dtype).eps * abs(losses[-1])
    ):
        warnings.warn(
            f"CAVI.run: the bound still moves at the end of the run, by {gain:.2g} nats a "
            "step. Go on with `svi.run(key, num_steps, ..., init_state=result.state)`, or "
            "start anew with more steps.",
            stacklevel=4,
        )


APART = 5.0
"""Nats by which the best start is above the next where it may not be the best there is."""


def check_starts(restarts: Float[np.ndarray, " starts"] | None) -> None:
    """Warn where no other start has come near the best bound.

    :param restarts: bounds of the starts, `None` for a single one; of those that went wrong they
        are not finite.
    """
    if restarts is None:
        return
    bounds = np.sort(restarts[np.isfinite(restarts)])[::-1]
    if len(bounds) < 2 or bounds[0] - bounds[1] <= APART:
        return
    warnings.warn(
        f"CAVI.run: of {len(restarts)} starts the best came to a bound of {bounds[0]:.1f} and the "
        f"next to {bounds[1]:.1f}, so that others may come higher still. Try more, "
        f"`CAVI(model, guide, num_restarts={2 * len(restarts)})`; `result.restarts` has all "
        "bounds.",
        stacklevel=4,
    )


def checked_params(
    init_params: dict[str, Any], start: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    """Start values of a user in the types of the parameters, which they must be among."""
    unknown = sorted(set(init_params) - set(start))
    if unknown:
        raise ValueError(
            f"CAVI: init_params has unknown names {unknown}; the parameters are {sorted(start)}."
        )
    found = {}
    for name, value in init_params.items():
        own, support = start[name]
        if jnp.shape(value) != jnp.shape(own):
            raise ValueError(
                f"CAVI: init_params[{name!r}] has shape {jnp.shape(value)}, expected "
                f"{jnp.shape(own)}."
            )
        found[name] = jnp.asarray(value, float)
        if are_concrete(value) and not np.all(support(found[name])):
            raise ValueError(
                f"CAVI: init_params[{name!r}] has values that are not finite or not in the support "
                f"of the parameter, {support}."
            )
    return found


def within(support: Any, value: Any) -> Any:
    """A start value, or another where it is not in the support."""
    inside = jnp.all(support(value))
    if are_concrete(inside) and inside:
        return value
    return jnp.where(inside, value, support.feasible_like(jnp.asarray(value)))
