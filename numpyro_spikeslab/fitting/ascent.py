# SPDX-License-Identifier: Apache-2.0
"""The ascent of the bound: one step for all models, repeated in compiled code."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import climb
from numpyro_spikeslab.fitting.posterior import Engine, Posterior, strong
from numpyro_spikeslab.reading.program import are_concrete

# Steps in one call of compiled code. Compiled code does not depend on their number.
CHUNK = 64


class Progress(NamedTuple):
    """State of a run: the next step, the negative bound after the last, whether it has settled."""

    step: Any
    posterior: Posterior
    loss: Any
    converged: Any


def begin(engine: Engine, posterior: Posterior, step: Any = 0) -> Progress:
    """Make the progress before the first step."""
    posterior = engine.features.begin(engine, posterior)
    # a step of weak type would compile everything once more
    step, loss = jnp.asarray(step, int), jnp.array(jnp.inf, jnp.result_type(float))
    return Progress(step, posterior, loss, jnp.array(False))


@partial(jax.jit, static_argnums=4)
def advance(
    engine: Engine,
    progress: Progress,
    num_steps: Any,
    threshold: Any,
    size: int,
) -> tuple[Progress, Float[Array, " size"]]:
    """Take ``num_steps`` steps, at most ``size``, or fewer if the bound settles.

    It settles if a step at temperature 1 changes it by at most ``threshold``, never if negative.

    :return: the progress and the losses after each step, infinity beyond the last.
    """

    def one(carry):
        progress, losses, done = carry
        temperature = 1.0 if engine.temperature is None else engine.temperature(progress.step)
        posterior, reached = step(engine, progress.posterior, temperature)
        settled = (temperature <= 1.0) & (jnp.abs(progress.loss + reached) <= threshold)
        progress = Progress(progress.step + 1, posterior, -reached, settled)
        return progress, losses.at[done].set(-reached), done + 1

    def unfinished(carry):
        progress, _, done = carry
        return (done < num_steps) & ~progress.converged

    losses = jnp.full(size, jnp.inf, jnp.result_type(float))
    start = (strong(progress), losses, jnp.zeros((), int))
    progress, losses, _ = jax.lax.while_loop(unfinished, one, start)
    return progress, losses


def chunks(
    engine: Engine, progress: Progress, num_steps: int, threshold: Any
) -> Iterator[tuple[Progress, Any]]:
    """Take steps in chunks, from one start or several, until all have settled; see :func:`advance`.

    :return: the progress and the losses after each chunk.
    """

    def run(progress):
        return advance(engine, progress, number, threshold, max(CHUNK, number))

    if jnp.ndim(progress.step):
        run = jax.vmap(run)
    # steps on many observations take seconds; Ctrl-C is noticed between chunks
    size = max(1, min(CHUNK, 2**25 // engine.layout.size))
    if not are_concrete((engine, progress)):
        # traced steps are one loop, for each would be compiled
        size = num_steps
    while num_steps > 0:
        number = min(size, num_steps)
        progress, losses = run(progress)
        num_steps -= number
        if not are_concrete(progress):
            yield progress, losses[..., :number]
            continue
        yield progress, trimmed(np.asarray(losses)[..., :number], progress)
        if bool(jnp.all(progress.converged)):
            return


def trimmed(losses: Float[np.ndarray, "*starts steps"], progress: Progress) -> Any:
    """Drop the steps that convergence saved from the losses of one start."""
    if losses.ndim > 1 or not bool(progress.converged):
        return losses
    return losses[~np.isposinf(losses)]


def step(
    engine: Engine, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Float[Array, ""]]:
    """Sweep over the pairs, and functions; then set everything else to its maximum.

    :return: the posterior and its exact bound.
    """
    at = engine.view(posterior)
    at, posterior, squares = engine.features.sweep(engine, at, posterior, temperature)
    before = posterior.values
    posterior = engine.with_modes(at, posterior, squares)
    posterior = posterior._replace(
        values=engine.freeze_shaping(temperature, before, posterior.values)
    )
    if engine.base is not None:
        at = engine.with_roles(at, posterior.values)
    elif set(engine.form.free) <= set(posterior.slopes):
        # the sweep has taken them to their maximum; the next one finds its residual itself
        posterior = engine.features.begin(engine, posterior.moved())
        if not engine.form.likelihood.is_fixed:
            # the squares belong to the old stand-in
            return posterior, engine.bound(posterior)
        at = engine.view(posterior)
    else:
        return _with_free(engine, posterior, temperature)
    return posterior, engine.bound_given(at, posterior, squares)


def _with_free(engine, posterior, temperature) -> tuple[Posterior, Any]:
    """Set coefficients to their maximum; with other free sites, take L-BFGS steps of all."""
    if engine.form.coefficients:
        posterior = engine.features.with_coefficients(engine, posterior)
    if not engine.form.searched:
        posterior = engine.features.begin(engine, posterior)
        return posterior, engine.bound(posterior)
    values = posterior.values
    start = {name: values[name] for name in engine.form.free}

    def reached(free):
        new = engine.freeze_shaping(temperature, values, free)
        return engine.bound(posterior.moved(values=values | new))

    free, value = climb(reached, start, engine.transforms)
    free = engine.freeze_shaping(temperature, values, free)
    # the next sweep finds another residual, so this one is not handed on
    posterior = posterior.moved(values=values | free)
    if posterior.betas:
        # their priors may have moved
        posterior = engine.with_betas(posterior)
    return engine.features.begin(engine, posterior), value


@jax.jit
def improve(engine: Engine, posterior: Posterior, num_times: Any) -> Posterior:
    """Set free sites to their maximum while functions stay."""

    def one(_, posterior):
        return _with_free(engine, posterior, 1.0)[0]

    return strong(jax.lax.fori_loop(0, num_times, one, posterior))
