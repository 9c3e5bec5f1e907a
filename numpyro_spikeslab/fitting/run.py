# SPDX-License-Identifier: Apache-2.0
"""Runs of CAVI: starts, stages, the progress bar, the result and warnings at the end."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float
import numpy as np
from tqdm import tqdm

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer.svi import SVIState

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.fitting.ascent import Progress, begin, chunks, trimmed
from numpyro_spikeslab.fitting.moves import laplacian_of
from numpyro_spikeslab.fitting.posterior import Engine, Posterior
from numpyro_spikeslab.fitting.rounds import (
    Fit,
    Stage,
    Starts,
    best_of,
    factor_moves,
    function_moves,
    include,
)
from numpyro_spikeslab.fitting.starts import start_random, start_svd
from numpyro_spikeslab.reading.program import are_concrete
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.roles import SlabRole
from numpyro_spikeslab.support.devices import fetched
from numpyro_spikeslab.support.messages import bad

# Nats between the best bound of the starts and the next, above which a run warns.
APART = 5.0
# Nats per step, below which the bound counts as settled.
STILL = 0.05
# Share of the prior's standard deviation that a slab keeps if the data do not determine its weight.
UNTOLD = 0.95


class Call(NamedTuple):
    """The model and the data of one call, and the shapes of its posterior; `None` with batches."""

    reading: Reading
    engine: Engine
    like: Posterior | None


class Plan(NamedTuple):
    """The number of starts of a run, of steps from each, and the change of the bound in a step at
    which it stops; negative for never."""

    number: int
    num_steps: int
    threshold: float


class CAVIRunResult(NamedTuple):
    """Result of :meth:`CAVI.run`: the fields of NumPyro's ``SVIRunResult`` and two more.

    - **params** - the fitted parameters.
    - **state** - the last state.
    - **losses** - the exact negative evidence lower bound after each step, as many as were taken.
      Within ``jit`` or ``vmap`` the last one fills the steps that ``tol`` saved.
    - **converged** - whether the run stopped by ``tol``; `None` if there was no ``tol``.
    - **restarts** - the bound of each start, at the end or, with latent functions, where they were
      compared; `None` for a single start, and within ``jit`` or ``vmap``.
    """

    params: dict[str, Any]
    state: SVIState
    losses: Float[Array, " steps"]
    converged: Any
    restarts: Float[np.ndarray, " starts"] | None = None


def run_stages(
    call: Call, key: Array, progress: Progress, plan: Plan, progress_bar: bool
) -> tuple[Progress, Float[np.ndarray, " steps"], Starts | None]:
    """Run a plan until its end or Ctrl-C; return the best end, its losses, and all starts."""
    losses: list[Any] = []
    starts = None
    with tqdm(total=plan.num_steps, disable=not progress_bar) as bar:
        try:
            for stage in _stages(call, key, progress, plan, bar):
                if not losses and np.isnan(np.ravel(stage.losses)[0]):
                    check_slopes(call, progress.posterior)
                progress = stage.progress
                losses.append(stage.losses)
                starts = stage.starts if starts is None else starts
            # also where a run has settled, the bar is full
            bar.total = bar.n
            bar.refresh()
        except KeyboardInterrupt:
            if not losses:
                raise
            text = "its last state is the result. Go on with `init_state=result.state`."
            warnings.warn(f"CAVI.run was interrupted; {text}", stacklevel=4)
    joined = np.concatenate(losses, axis=-1)
    if joined.ndim > 1:
        included = jax.vmap(include)(progress.posterior.weights)
        starts = Starts(-np.asarray(progress.loss), np.asarray(included))
        progress, joined = _best(progress, joined)
    return progress, trimmed(joined, progress), starts


def _stages(call: Call, key: Array, progress: Progress, plan: Plan, bar: tqdm) -> Iterator[Stage]:
    """Yield the stages of a run: of all starts at once, or of the best of several in turn."""
    number, num_steps, threshold = plan
    _, engine, _ = call
    if call.reading.functions is None:
        parts = _parts(call, key, progress, plan)
        yield from _watched((Stage(*part) for part in parts), bar)
        return
    fit = Fit(engine, threshold, None if engine.plain else _moves(call))
    num_first = engine.features.num_starts

    def climb(k):
        begun = progress
        if k >= num_first:
            start_key = random.fold_in(key, k - num_first)
            begun = begin(engine, start_random(engine, progress.posterior, start_key))
        elif k == 1:
            begun = begin(engine, start_svd(engine, progress.posterior))
        return _watched(fit.steps(begun._replace(step=progress.step), num_steps), bar)

    yield from best_of(map(climb, range(number))) if number > 1 else climb(0)


def run_traced(
    call: Call, key: Array, progress: Progress, plan: Plan, begun: Any
) -> tuple[Progress, Any]:
    """Run a plan on traced data; return the best end and its losses, repeating the last."""
    if are_concrete(begun):
        ends_hot(call.engine, int(begun) + plan.num_steps)
    parts = list(_parts(call, key, progress, plan))
    progress, joined = parts[-1][0], jnp.concatenate([losses for _, losses in parts], axis=-1)
    if plan.number > 1:
        progress, joined = _best(progress, joined)
    return progress, jnp.where(jnp.isposinf(joined), progress.loss, joined)


def random_starts(call: Call, key: Array, progress: Progress, plan: Plan) -> Progress:
    """Add random starts to the first, in one batch.

    They begin at temperature 1, if the schedule has it: hot ones forget where they began.
    """
    posterior, number = progress.posterior, plan.number
    at = call.engine.view(posterior)
    scale = jnp.broadcast_to(jnp.sqrt(at.prior.variance), call.engine.form.shape)
    scale = scale.reshape(posterior.weights.probs.shape)

    def start(key):
        weights = posterior.weights.random_start(key, scale)
        return begin(call.engine, posterior._replace(weights=weights)).posterior

    others = jax.vmap(start)(random.split(key, number - 1))
    progress = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *x.shape)), progress)
    posterior = jax.tree.map(lambda x, y: x.at[1:].set(y), progress.posterior, others)
    step = progress.step
    if call.engine.temperature is not None:
        steps = step[0] + jnp.arange(plan.num_steps)
        cold = jax.vmap(call.engine.temperature)(steps) <= 1
        step = step.at[1:].set(steps[jnp.argmax(cold)])
    return progress._replace(posterior=posterior, step=step)


def _parts(call: Call, key: Array, progress: Progress, plan: Plan) -> Iterator[Any]:
    """Yield the progress of all starts of a plan and their losses, after each chunk of steps."""
    if plan.number > 1:
        progress = random_starts(call, key, progress, plan)
    return chunks(call.engine, progress, plan.num_steps, plan.threshold)


def _best(progress: Progress, losses: Any) -> tuple[Progress, Any]:
    """Return the start with the best bound."""
    # a start that went wrong must not win
    best = jnp.argmin(jnp.where(jnp.isnan(progress.loss), jnp.inf, progress.loss))
    return jax.tree.map(lambda x: x[best], progress), losses[best]


def _moves(call: Call) -> Any:
    """Return the moves that suit the functions of a model."""
    if call.engine.functions.is_white:
        return factor_moves
    functions = call.reading.functions.functions
    has_order = not functions.kinds <= {"white", "zero"}
    return partial(function_moves, laplacian_of(functions.X) if has_order else None)


def _watched(stages: Iterator[Stage], bar: tqdm) -> Iterator[Stage]:
    """Move the progress bar with each stage."""
    done = 0
    for stage in stages:
        done += stage.losses.shape[-1]
        # starts that run one after the other count from the beginning
        bar.update(done - bar.n)
        best = np.min(np.asarray(stage.progress.loss))
        bar.set_postfix_str(f"bound: {-best:.4f}", refresh=False)
        yield stage


def ends_hot(engine: Engine, num_steps: int) -> bool:
    """Warn if a run ends before its schedule comes to temperature 1, where that is known."""
    if engine.temperature is None:
        return False
    try:
        # a schedule is known even where data are traced
        with jax.core.eval_context():
            temperature = float(engine.temperature(num_steps - 1))
    except (jax.errors.UnexpectedTracerError, jax.errors.ConcretizationTypeError):
        # unless it depends on traced values
        return False
    if temperature <= 1.0:
        return False
    text = "Inclusion probabilities are flattened. Run more steps, or give CAVI temperature=None."
    hot = f"CAVI.run ended after step {num_steps} at temperature {temperature:.3g}. {text}"
    warnings.warn(hot, stacklevel=5)
    return True


def check_slopes(call: Call, posterior: Posterior) -> None:
    """Raise if the slope of a bound that is finite is not, so that a free site would stay."""
    engine, values = call.engine, posterior.values

    def reached(free):
        return engine.bound(posterior.moved(values=values | free))

    start = {name: values[name] for name in engine.form.free}
    value, slopes = jax.value_and_grad(reached)(start)
    names = [name for name, x in slopes.items() if not bool(jnp.all(jnp.isfinite(x)))]
    if names and bool(jnp.isfinite(value)):
        got, expected = "a slope of the bound at the start that is not finite", "a finite one"
        remedy = "Put 0 in place of NaN where data are masked, or give another start, init_params."
        raise bad(f"CAVI.run: the sites {names}", got, expected, remedy)


def check_end(call: Call, progress: Progress, losses: Any, from_params: bool) -> None:
    """Raise or warn if a run has not ended well."""
    step, posterior, weights = int(progress.step), progress.posterior, progress.posterior.weights
    if np.isnan(losses[-1]):
        raise FloatingPointError(
            f"CAVI.run: the bound is not a number after step {step}. Look for extreme values in "
            "init_params and columns, a kernel that is no covariance, a concentration below 1 and "
            "a noise scale without a prior; give it one, rescale the data, or call "
            "`numpyro.enable_x64()`."
        )
    if ends_hot(call.engine, step):
        return
    reading = call.reading
    reading.form.likelihood.check_fit(reading.problem, posterior.values)
    off = from_params and posterior.functions is not None and not include(weights)
    if off:
        text = "all latent functions are switched off at the end of a run from init_params"
        remedy = "Give a noise scale well below the spread of the tasks, or none."
        warnings.warn(f"CAVI.run: {text}. {remedy}", stacklevel=4)
    # a fit whose functions are all off has its own warning
    for role in () if off else call.engine.form.roles_of(SlabRole):
        scale, places = fetched(
            (posterior.values[role.site], call.engine.indices[role.site].entries)
        )
        # weights that it does not scale take the 0
        prior = scale.ravel()[0] if places is None else np.append(scale, 0)[places]
        if isinstance(weights, PairedMeanField) and np.all(fetched(weights.scale) > UNTOLD * prior):
            text = f"the scale {role.site!r} has fallen to {np.max(scale):.2g}, at which the data"
            rest = "say nothing of any weight or inclusion. Compare with chains, or fix the scale."
            warnings.warn(f"CAVI.run: {text} {rest}", stacklevel=4)
    last = losses[-4:]
    gain = float(last[0] - last[-1]) / max(len(last) - 1, 1)
    rounding = 100 * np.finfo(losses.dtype).eps * abs(losses[-1])
    if not bool(progress.converged) and gain > max(STILL, rounding):
        moves = f"the bound still moves at the end of the run, by {gain:.2g} nats a step"
        text = "Go on with `init_state=result.state`, or start anew with more steps."
        warnings.warn(f"CAVI.run: {moves}. {text}", stacklevel=4)


def check_starts(starts: Starts | None, weights: Any) -> None:
    """Warn if the best of the starts is far above the next, or ends without a weight while others
    include some; bounds of failed ones are infinite."""
    if starts is None:
        return
    number, is_finite = len(starts.bounds), np.isfinite(starts.bounds)
    bounds = np.sort(starts.bounds[is_finite])[::-1]
    if len(bounds) > 1 and bounds[0] - bounds[1] > APART:
        best = f"the best came to a bound of {bounds[0]:.1f} and the next to {bounds[1]:.1f}"
        text = f"Others may come higher still: try CAVI with num_restarts={2 * number}."
        warnings.warn(f"CAVI.run: of {number} starts {best}. {text}", stacklevel=4)
    others = is_finite & starts.include
    others[np.argmax(starts.bounds)] = False
    if np.any(others) and not include(weights):
        best = f"the best of {number} starts, with a bound of {bounds[0]:.1f}, includes no weight,"
        text = f"and another, with {np.max(starts.bounds[others]):.1f}, some. Compare with chains."
        warnings.warn(f"CAVI.run: {best} {text}", stacklevel=4)
