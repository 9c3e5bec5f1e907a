# SPDX-License-Identifier: Apache-2.0
"""Moves between local optima of a fit of smooth functions, judged by the bound after sweeps."""

from functools import partial
from itertools import combinations
from typing import Any

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import Expectation
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.fitting.function_sweeps import in_use
from numpyro_spikeslab.fitting.function_updates import switch_off
from numpyro_spikeslab.fitting.posterior import Engine, Posterior, strong
from numpyro_spikeslab.fitting.rotations import floored_eigh, quarter_turn, varimax
from numpyro_spikeslab.fitting.starts import start_at
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reading.view import View

# Functions form two groups where the log of their roughness jumps by more than this.
SPLIT = 0.7
# Angles on a quarter turn that are tried, and cycles over all pairs of functions.
NUM_ANGLES = 32
NUM_TURNS = 3
# Beyond so many inputs a matrix of their similarities is too large.
MAX_GRAPH = 4000

Laplacian = Float[Array, "N N"] | None
"""Orders functions by their roughness, ``phi^T L phi``; `None` for those without order."""


@partial(jax.jit, compiler_options=RUN_ONCE)
def laplacian_of(X: Any) -> Laplacian:
    """Make a graph Laplacian as wide as neighbours are apart; `None` above :data:`MAX_GRAPH`."""
    if len(X) > MAX_GRAPH:
        return None
    X = jnp.reshape(jnp.asarray(X, float), (len(X), -1))
    X = X - jnp.mean(X, axis=0)
    norms = jnp.sum(X**2, axis=1)
    # as a product: the differences of all inputs take D times the memory
    squared = jnp.maximum(norms[:, None] + norms - 2 * X @ X.T, 0)
    distinct = squared > 1e-6 * jnp.max(squared) / X.shape[0] ** 2
    nearest = jnp.min(jnp.where(distinct, squared, jnp.inf), axis=1)
    similarity = jnp.exp(-0.5 * squared / jnp.median(nearest))
    return jnp.diag(jnp.sum(similarity, axis=1)) - similarity


def _roughness(L: Laplacian, phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return jnp.zeros_like(phi) if L is None else phi @ L


def unmix(
    deviation: Float[Array, "M N"], active: Bool[Array, " M"], L: Laplacian
) -> tuple[Float[Array, "M M"], Int[Array, " M"]]:
    """Find uncorrelated ``U^T phi`` of the active functions, by smoothness, in two groups.

    Smooth (0) and rough (1) ones are split at the largest ratio of roughness; -1 is no function.
    """
    phi = jnp.where(active[:, None], deviation, 0)
    E, V = floored_eigh(phi @ phi.T / phi.shape[1], active)
    whiten = V / jnp.sqrt(E)
    D = _roughness(L, phi) @ phi.T / phi.shape[1]
    D = whiten.T @ D @ whiten
    last = 1 + 2 * jnp.trace(D)
    rough, V = jnp.linalg.eigh(D + last * whiten.T @ jnp.diag(jnp.where(active, 0.0, 1.0)) @ whiten)
    rank, number = jnp.arange(active.size), jnp.sum(active)
    log_rough = jnp.log(jnp.maximum(rough, 1e-10 * last))
    gap = jnp.where(rank < number, jnp.diff(log_rough, prepend=log_rough[0]), -jnp.inf)
    group = jnp.where((rank >= jnp.argmax(gap)) & (jnp.max(gap) > SPLIT), 1, 0)
    return whiten @ V, jnp.where(rank < number, group, -1)


def rotate(engine: Engine, posterior: Posterior, L: Laplacian) -> Posterior:
    """Propose rotated active functions, smooth and rough ones separately, with sparse weights.

    All other functions are switched off. In each group varimax gives the rotation, and
    :func:`sharpen` improves it.
    """
    W, phi, group, sigma2 = _simplify(engine, posterior, L)
    rotated = start_at(engine, posterior, W, phi, sigma2)
    W, phi = sharpen(engine, rotated, np.asarray(group))
    return start_at(engine, rotated, W, phi, sigma2)


@partial(jax.jit, compiler_options=RUN_ONCE)
def _simplify(engine: Engine, posterior: Posterior, L: Laplacian) -> tuple[Any, Any, Any, Any]:
    """Return rotated weights and functions, their groups, and the noise variances."""
    at = engine.view(posterior)
    deviation = posterior.functions.mean - engine.functions.mean
    active = in_use(engine, posterior)
    U, group = unmix(deviation, active, L)
    W = jnp.where(active, posterior.weights.mean, 0) @ jnp.linalg.inv(U).T
    T = varimax((W / jnp.sqrt(at.sigma2)[:, None]).T, group)
    phi = T @ U.T @ jnp.where(active[:, None], deviation, 0)
    # the kernel of a function goes to the new function of the same rank in smoothness
    rough = jnp.sum(_roughness(L, deviation) * deviation, axis=1) / jnp.sum(deviation**2, axis=1)
    slot = jnp.argsort(jnp.where(active, rough, jnp.inf))
    W = jnp.zeros_like(W).at[:, slot].set(jnp.where(group >= 0, W @ T.T, 0))
    phi = engine.functions.mean.at[slot].add(jnp.where(group[:, None] >= 0, phi, 0))
    return W, phi, jnp.full_like(group, -1).at[slot].set(group), at.sigma2


def sharpen(
    engine: Engine, posterior: Posterior, group: Int[np.ndarray, " M"]
) -> tuple[Float[Array, "Q M"], Float[Array, "M N"]]:
    """Rotate pairs of functions of a group, negative for none, to the angle of the best bound."""
    M, angles = len(group), quarter_turn(NUM_ANGLES)
    off = np.zeros((NUM_ANGLES, M), bool)
    for _ in range(NUM_TURNS):
        for i, j in combinations(range(M), 2):
            if group[i] == group[j] and group[i] >= 0:
                turn = np.tile(np.eye(M), (NUM_ANGLES, 1, 1))
                turn[:, i, i] = turn[:, j, j] = np.cos(angles)
                turn[:, j, i], turn[:, i, j] = np.sin(angles), -np.sin(angles)
                posterior, _ = best_change(engine, posterior, turn, off, group >= 0, 3)
    return posterior.weights.mean, posterior.functions.mean


def drop(engine: Engine, posterior: Posterior) -> Posterior:
    """Propose to drop all inactive functions and the active one that is missed least."""
    active = np.asarray(in_use(engine, posterior))
    M, used = active.size, np.flatnonzero(active)
    # at least as many changes as angles, so that one compilation serves turns too
    size = max(NUM_ANGLES, len(used))
    off = ~active | np.eye(M, dtype=bool)[np.resize(used, size)]
    turn, reset = np.tile(np.eye(M), (size, 1, 1)), np.zeros(M, bool)
    _, best = best_change(engine, posterior, turn, off, reset, 2)
    return switch_off(posterior, off[int(best)], engine.functions.mean)


@jax.jit
def best_change(
    engine: Engine,
    posterior: Posterior,
    turns: Float[Array | np.ndarray, "K M M"],
    offs: Bool[Array | np.ndarray, "K M"],
    reset: Bool[Array | np.ndarray, " M"],
    num_passes: Any,
) -> tuple[Posterior, Any]:
    """Find the change with the highest bound after some passes over the weights; return both.

    Nothing is factorised: a turn is taken to leave the prior of the functions about the same.
    Weights of functions that are switched off, by ``offs``, begin anew where ``reset`` says.
    """
    base = engine.view(posterior)

    def try_change(best, change):
        k, turn, off = change
        functions, weights = posterior.functions, posterior.weights
        probs = jnp.where(reset, 0.9, weights.probs)
        loc = jnp.where(reset, weights.mean @ turn / 0.9, weights.loc)
        weights = weights._replace(probs=probs, loc=loc)
        mean = engine.functions.mean + turn.T @ (functions.mean - engine.functions.mean)
        functions = functions._replace(mean=mean, var=(turn**2).T @ functions.var)
        changed = posterior._replace(weights=weights, functions=functions)
        changed = switch_off(changed, off, engine.functions.mean)
        changed, reached = refit_weights(engine, base, changed, num_passes)
        return choose(reached > best[1], (changed, reached, k), best), None

    start = posterior, -jnp.inf * jnp.ones(()), jnp.zeros((), int)
    (best, _, which), _ = jax.lax.scan(try_change, start, (jnp.arange(len(turns)), turns, offs))
    return strong(best), which


def refit_weights(
    engine: Engine, base: View, posterior: Posterior, num_passes: Any
) -> tuple[Posterior, Float[Array, ""]]:
    """Update weights and sites with a role several times; return the posterior and its bound."""
    features = posterior.functions.mean, posterior.functions.var
    sums = base.sums(*features)

    def pass_weights(_, posterior):
        at = engine.with_roles(base, posterior.values)
        weights, squares = at.sweep(features, posterior.weights, Expectation(), sums)
        return engine.with_modes(at, posterior._replace(weights=weights), squares)

    posterior = jax.lax.fori_loop(0, num_passes, pass_weights, posterior)
    at = engine.with_roles(base, posterior.values)
    return posterior, engine.bound_given(at, posterior, sums.squares(posterior.weights))
