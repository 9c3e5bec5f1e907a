# SPDX-License-Identifier: Apache-2.0
"""Moves between local optima of a fit of latent functions: rotations of them, dropping one.

Each proposal is a start that is judged by the exact bound after some sweeps.
"""

from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.fitting.function_updates import in_use, is_active
from numpyro_spikeslab.fitting.m_step import with_modes
from numpyro_spikeslab.fitting.posterior import (
    Data,
    Posterior,
    Spec,
    bound_given,
    strong,
    view_at,
    with_roles,
)
from numpyro_spikeslab.fitting.roughness import Roughness
from numpyro_spikeslab.fitting.starts import start_at
from numpyro_spikeslab.fitting.tasks import gram, squared_errors, update_weights
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reading.view import View

# Functions form two groups where the log of their roughness jumps by more than this.
SPLIT = 0.7
# Angles on a quarter turn that are tried, and how often all pairs of functions are turned.
NUM_ANGLES = 32
NUM_TURNS = 3
# The same of varimax, which knows the best angle.
NUM_ROUNDS = 10


def refit_weights(
    spec: Spec, data: Data, base: View, posterior: Posterior, num_passes: Any
) -> tuple[Posterior, Float[Array, ""]]:
    """Passes over the weights, each with the sites that have a role, while the functions stay.

    :return: the posterior and its bound.
    """
    functions: Any = posterior.functions
    stats = gram(base, functions.mean, functions.var)

    def pass_weights(_, posterior):
        at = with_roles(spec, data, base, posterior.values)
        weights = update_weights(at, stats, posterior.weights)
        posterior = posterior._replace(weights=weights)
        return with_modes(spec, data, at, posterior, squared_errors(stats, weights))

    posterior = jax.lax.fori_loop(0, num_passes, pass_weights, posterior)
    at = with_roles(spec, data, base, posterior.values)
    squares = squared_errors(stats, posterior.weights)
    return posterior, bound_given(spec, at, posterior, squares)


def varimax(A: Float[Array, "Q M"], group: Int[Array, " M"]) -> Float[Array, "M M"]:
    """Orthogonal ``T`` that maximises the variances of ``(A T)^2``, rotating only inside groups.

    :param A: ``(Q, M)``, loadings.
    :param group: ``(M,)``, columns are rotated against columns of the same group; negative: never.
    """
    Q, M = A.shape
    first, second = jnp.triu_indices(M, 1)
    if not first.size:
        return jnp.eye(M)

    def rotate_pair(k, carry):
        A, T = carry
        i, j = first[k % first.size], second[k % first.size]
        u, v = A[:, i] ** 2 - A[:, j] ** 2, 2 * A[:, i] * A[:, j]
        sum_u, sum_v = jnp.sum(u), jnp.sum(v)
        cross = 2 * (u @ v - sum_u * sum_v / Q)
        angle = 0.25 * jnp.arctan2(cross, u @ u - v @ v - (sum_u**2 - sum_v**2) / Q)
        angle = jnp.where((group[i] == group[j]) & (group[i] >= 0), angle, 0.0)
        c, s = jnp.cos(angle), jnp.sin(angle)

        def turn(X):
            return X.at[:, i].set(c * X[:, i] + s * X[:, j]).at[:, j].set(c * X[:, j] - s * X[:, i])

        return turn(A), turn(T)

    return jax.lax.fori_loop(0, NUM_ROUNDS * first.size, rotate_pair, (A, jnp.eye(M)))[1]


def unmix(
    deviation: Float[Array, "M N"], active: Bool[Array, " M"], roughness: Roughness
) -> tuple[Float[Array, "M M"], Int[Array, " M"]]:
    """Uncorrelated combinations of the active functions in order of smoothness, and two groups.

    :param deviation: functions less their prior means.
    :param active: ``(M,)``, the others are left out (last, group -1).
    :param roughness: ``phi^T roughness(phi)`` orders the functions.
    :return: ``U`` with ``phi' = U^T phi``, and the group of each ``phi'``: smooth (0) or rough (1),
        split at the largest ratio of roughness.
    """
    phi = jnp.where(active[:, None], deviation, 0)
    off = jnp.diag(jnp.where(active, 0.0, 1.0))
    C = phi @ phi.T / phi.shape[1]
    scale, E = jnp.linalg.eigh(C + off)
    whiten = E / jnp.sqrt(jnp.maximum(scale, 1e-10 * jnp.max(scale)))
    D = roughness(phi) @ phi.T / phi.shape[1]
    D = whiten.T @ D @ whiten
    last = 1 + 2 * jnp.trace(D)
    rough, V = jnp.linalg.eigh(D + last * whiten.T @ off @ whiten)
    rank = jnp.arange(active.size)
    number = jnp.sum(active)
    if active.size > 1:
        log_rough = jnp.log(jnp.maximum(rough, 1e-10 * last))
        gap = jnp.where(rank[1:] < number, jnp.diff(log_rough), -jnp.inf)
        group = jnp.where((rank > jnp.argmax(gap)) & (jnp.max(gap) > SPLIT), 1, 0)
    else:
        group = jnp.zeros_like(rank)
    return whiten @ V, jnp.where(rank < number, group, -1)


class Change(NamedTuple):
    """Changes of weights and functions that leave their product about the same; K of them.

    - **turn** - what multiplies the columns of the weights, and functions, shape (K, M, M).
    - **keep** - functions that are not switched off, shape (K, M).
    - **reset** - functions whose weights begin anew, shape (M,).
    """

    turn: Float[Array | np.ndarray, "K M M"]
    keep: Bool[Array | np.ndarray, "K M"]
    reset: Bool[Array | np.ndarray, " M"]


@partial(jax.jit, static_argnums=0)
def best_change(
    spec: Spec, data: Data, posterior: Posterior, changes: Change, num_passes: Any
) -> tuple[Posterior, Any]:
    """The change after which the bound is highest.

    The bound is the one after some passes over the weights. Nothing is factorised: the functions
    of a turn are taken to have about the same prior, which a turn does not change.

    :return: the posterior after these passes, and which change it was.
    """
    base = view_at(spec, data, posterior)

    def try_change(best, change):
        turn, keep = change
        changed = _change(posterior, turn, keep, changes.reset, data.mean)
        changed, reached = refit_weights(spec, data, base, changed, num_passes)
        better = reached > best[1]
        found = (changed, reached, best[2] + 1, jnp.where(better, best[2], best[3]))
        kept = choose(better, found[:2], best[:2])
        return (*kept, *found[2:]), None

    none = jnp.zeros((), int)
    start = (posterior, -jnp.inf * jnp.ones(()), none, none)
    (best, _, _, which), _ = jax.lax.scan(try_change, start, (changes.turn, changes.keep))
    return strong(best), which


def _change(posterior: Posterior, turn: Any, keep: Any, reset: Any, mean: Any) -> Posterior:
    weights: Any = posterior.weights
    functions = posterior.functions
    assert functions is not None
    weights = weights._replace(
        probs=jnp.where(reset, 0.9, weights.probs),
        loc=jnp.where(reset, weights.mean @ turn / 0.9, weights.loc),
    )
    functions = functions._replace(
        mean=mean + turn.T @ (functions.mean - mean), var=(turn**2).T @ functions.var
    )
    return switch_off(posterior._replace(weights=weights, functions=functions), keep, mean)


def sharpen(
    spec: Spec, data: Data, posterior: Posterior, group: Int[np.ndarray, " M"]
) -> tuple[Float[Array, "Q M"], Float[Array, "M N"]]:
    """Weights and functions with each pair of a group turned to the angle of the highest bound.

    :param group: ``(M,)``, as in :func:`varimax`.
    """
    M = len(group)
    angles = (np.arange(NUM_ANGLES) / NUM_ANGLES - 0.5) * np.pi / 2
    keep = np.ones((NUM_ANGLES, M), bool)
    for _ in range(NUM_TURNS):
        for i, j in combinations(range(M), 2):
            if group[i] == group[j] and group[i] >= 0:
                turn = np.tile(np.eye(M), (NUM_ANGLES, 1, 1))
                turn[:, i, i] = turn[:, j, j] = np.cos(angles)
                turn[:, j, i], turn[:, i, j] = np.sin(angles), -np.sin(angles)
                changes = Change(turn, keep, group >= 0)
                posterior, _ = best_change(spec, data, posterior, changes, 3)
    functions: Any = posterior.functions
    return posterior.weights.mean, functions.mean


def rotate(spec: Spec, data: Data, posterior: Posterior, roughness: Roughness) -> Posterior:
    """The proposal of the active functions, smooth and rough ones apart, each group sparse.

    A new start from ``phi' = R phi``, ``W' = W R^-1``; all other functions are switched off.
    Inside a group varimax gives the rotation and :func:`sharpen` improves it.

    :param roughness: see :func:`unmix`.
    """
    W, phi, group, sigma2 = _simplify(spec, data, posterior, roughness)
    turned = start_at(spec, data, posterior, W, phi, sigma2)
    W, phi = sharpen(spec, data, turned, np.asarray(group))
    return start_at(spec, data, turned, W, phi, sigma2)


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _simplify(
    spec: Spec, data: Data, posterior: Posterior, roughness: Roughness
) -> tuple[Any, Any, Any, Any]:
    """Turned weights and functions, the group of each, and noise variances."""
    at = view_at(spec, data, posterior)
    functions: Any = posterior.functions
    deviation = functions.mean - data.mean
    active = is_active(at, posterior)
    U, group = unmix(deviation, active, roughness)
    W = jnp.where(active, posterior.weights.mean, 0) @ jnp.linalg.inv(U).T
    T = varimax(W / jnp.sqrt(at.sigma2)[:, None], group)
    phi = (U @ T).T @ jnp.where(active[:, None], deviation, 0)
    # The kernel of a function goes to the new one of the same rank in smoothness.
    own = jnp.sum(roughness(deviation) * deviation, axis=1) / jnp.sum(deviation**2, axis=1)
    slot = jnp.argsort(jnp.where(active, own, jnp.inf))
    W = jnp.zeros_like(W).at[:, slot].set(jnp.where(group >= 0, W @ T, 0))
    phi = data.mean.at[slot].add(jnp.where(group[:, None] >= 0, phi, 0))
    return W, phi, jnp.full_like(group, -1).at[slot].set(group), at.sigma2


def switch_off(posterior: Posterior, keep: Bool[Array, " M"], mean: Any) -> Posterior:
    """Only the functions in ``keep`` stay; the others return to their prior, with zero weights.

    :param mean: prior means of the functions.
    """
    functions: Any = posterior.functions
    paired: Any = posterior.weights
    row = keep[:, None]
    weights = paired._replace(probs=jnp.where(keep, paired.probs, 0))
    functions = functions._replace(
        alpha=jnp.where(row, functions.alpha, 0),
        h=jnp.where(row, functions.h, 0),
        mean=jnp.where(row, functions.mean, mean),
        var=jnp.where(row, functions.var, functions.prior_var),
        kl=jnp.where(keep, functions.kl, 0),
    )
    return posterior._replace(weights=weights, functions=functions)


def drop(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """The proposal without the active function that is missed least, and inactive ones.

    It is the one without which the bound is highest after two passes over the weights.
    """
    active = np.asarray(in_use(spec, data, posterior))
    M = active.size
    used = np.flatnonzero(active)
    # as many changes as a turn has, so that both share one compilation
    size = max(NUM_ANGLES, len(used))
    keep = np.tile(active, (size, 1))
    keep[np.arange(len(used)), used] = False
    keep[len(used) :] = keep[0]
    changes = Change(np.tile(np.eye(M), (size, 1, 1)), keep, np.zeros(M, bool))
    _, which = best_change(spec, data, posterior, changes, 2)
    return keep_only(data, posterior, keep[int(which)])


@partial(jax.jit, compiler_options=RUN_ONCE)
def keep_only(data: Data, posterior: Posterior, keep: Any) -> Posterior:
    """:func:`switch_off`, compiled."""
    return strong(switch_off(posterior, keep, data.mean))
