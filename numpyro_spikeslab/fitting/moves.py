# SPDX-License-Identifier: Apache-2.0
"""Moves between local optima of a fit of latent functions: rotations of them, dropping one.

Each proposal is a start that is judged by the exact bound after some sweeps.
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

import jax
import jax.numpy as jnp

from numpyro_spikeslab.fitting.functions import is_active
from numpyro_spikeslab.fitting.posterior import (
    Data,
    Posterior,
    Spec,
    bound_given,
    strong,
    view_at,
    with_modes,
    with_roles,
)
from numpyro_spikeslab.fitting.roughness import Roughness
from numpyro_spikeslab.fitting.starts import start_at
from numpyro_spikeslab.fitting.tasks import gram, squared_errors, update_weights
from numpyro_spikeslab.reading.program import RUN_ONCE
from numpyro_spikeslab.reading.view import View

# Functions form two groups where the log of their roughness jumps by more than this.
SPLIT = 0.7


def refit_weights(
    spec: Spec, data: Data, base: View, posterior: Posterior, num_passes: int
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
        return with_modes(spec, data, at, posterior, squared_errors(at, stats, weights))

    posterior = jax.lax.fori_loop(0, num_passes, pass_weights, posterior)
    at = with_roles(spec, data, base, posterior.values)
    squares = squared_errors(at, stats, posterior.weights)
    return posterior, bound_given(spec, at, posterior, squares)


def varimax(
    A: Float[Array, "Q M"], group: Int[Array, " M"], num_rounds: int = 10
) -> Float[Array, "M M"]:
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

    return jax.lax.fori_loop(0, num_rounds * first.size, rotate_pair, (A, jnp.eye(M)))[1]


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


@partial(jax.jit, static_argnums=0, static_argnames=("num_angles", "num_passes"))
def sharpen(
    spec: Spec,
    data: Data,
    posterior: Posterior,
    group: Int[Array, " M"],
    num_angles: int = 32,
    num_passes: int = 3,
) -> tuple[Float[Array, "Q M"], Float[Array, "M N"]]:
    """Weights and functions with each pair of a group turned to the angle of the highest bound.

    The bound is the one after three passes over the weights. Nothing is factorised: the two
    functions of a pair are taken to have about the same prior, which a turn does not change.

    :param group: ``(M,)``, as in :func:`varimax`.
    :param num_angles: size of the grid on a quarter turn.
    :param num_passes: how often all pairs are visited.
    """
    base = view_at(spec, data, posterior.values)
    M = group.size
    first, second = jnp.triu_indices(M, 1)
    angles = (jnp.arange(num_angles) / num_angles - 0.5) * jnp.pi / 2

    def turn(posterior, i, j, angle):
        c, s = jnp.cos(angle), jnp.sin(angle)
        T = jnp.eye(M).at[i, i].set(c).at[j, j].set(c).at[i, j].set(-s).at[j, i].set(s)
        weights, functions = posterior.weights, posterior.functions
        grouped = group >= 0
        weights = weights._replace(
            probs=jnp.where(grouped, 0.9, weights.probs),
            loc=jnp.where(grouped, weights.mean @ T / 0.9, weights.loc),
        )
        functions = functions._replace(
            mean=data.mean + T.T @ (functions.mean - data.mean), var=(T**2).T @ functions.var
        )
        turned = posterior._replace(weights=weights, functions=functions)
        return refit_weights(spec, data, base, turned, 3)

    def visit(k, posterior):
        i, j = first[k % first.size], second[k % first.size]

        # one loop that keeps the best, so that a turn is compiled once
        def try_turn(best, angle):
            turned, reached = turn(posterior, i, j, angle)
            better = reached > best[1]
            return jax.tree.map(lambda x, y: jnp.where(better, x, y), (turned, reached), best), None

        def best_turn():
            return jax.lax.scan(try_turn, (posterior, -jnp.inf * jnp.ones(())), angles)[0][0]

        together = (group[i] == group[j]) & (group[i] >= 0)
        return jax.lax.cond(together, best_turn, lambda: posterior)

    if first.size:
        posterior = jax.lax.fori_loop(0, num_passes * first.size, visit, posterior)
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
    W, phi = sharpen(spec, data, turned, group)
    return start_at(spec, data, turned, W, phi, sigma2)


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _simplify(
    spec: Spec, data: Data, posterior: Posterior, roughness: Roughness
) -> tuple[Any, Any, Any, Any]:
    """Turned weights and functions, the group of each, and noise variances."""
    at = view_at(spec, data, posterior.values)
    functions: Any = posterior.functions
    deviation = functions.mean - data.mean
    active = is_active(at, gram(at, functions.mean, functions.var), posterior)
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
    row = keep[:, None]
    weights = posterior.weights._replace(probs=jnp.where(keep, posterior.weights.probs, 0))
    functions = functions._replace(
        alpha=jnp.where(row, functions.alpha, 0),
        h=jnp.where(row, functions.h, 0),
        mean=jnp.where(row, functions.mean, mean),
        var=jnp.where(row, functions.var, functions.prior_var),
        kl=jnp.where(keep, functions.kl, 0),
    )
    return posterior._replace(weights=weights, functions=functions)


@partial(jax.jit, static_argnums=0)
def drop(spec: Spec, data: Data, posterior: Posterior) -> Posterior:
    """The proposal without the active function that is missed least, and inactive ones.

    It is the one without which the bound is highest after two passes over the weights.
    """
    base = view_at(spec, data, posterior.values)
    functions: Any = posterior.functions
    active = is_active(base, gram(base, functions.mean, functions.var), posterior)
    numbers = jnp.arange(active.size)

    def without(m):
        return switch_off(posterior, active & (numbers != m), data.mean)

    bounds = jax.lax.map(lambda m: refit_weights(spec, data, base, without(m), 2)[1], numbers)
    return strong(without(jnp.argmax(jnp.where(active, bounds, -jnp.inf))))
