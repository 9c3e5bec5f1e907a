# SPDX-License-Identifier: Apache-2.0
r"""Draws of latent functions and of their weights, with as much as possible integrated out.

Functions and weights are known only together: :math:`\phi_m + c \phi_k` and
:math:`w_k - c w_m` in place of :math:`\phi_m` and :math:`w_k` give the same data, and so do
:math:`c \phi_m` and :math:`w_m / c`. Given the one, the other hardly moves. So the weights of
function k are drawn while function m, or two of them, are integrated out together with the slabs.

A decomposition of N by N is what a step spends its time on. Whoever evaluates a density hands the
factor on, so that none is computed twice. Where rounding makes one fail, nothing moves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.covariance import Dense
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.reading.function_prior import FunctionPrior
from numpyro_spikeslab.sampling.turn import Draw, Found, Held, Turn, slice_found
from numpyro_spikeslab.sampling.users import change_users
from numpyro_spikeslab.sampling.weights_of_function import (
    Column,
    Hidden,
    Left,
    Mixing,
    Root,
    draw_columns,
    put_column,
    slabs_of,
    take_column,
)

# Widths of the intervals from which slice sampling draws logs.
WIDTH_OF_PARAMETER = 4.0
WIDTH_OF_LENGTH = 1.0


# One function


def draw_one(
    key: Array, held: Held, m: Int[Array, ""], draw: Draw, residual: Float[Array, "N Q"]
) -> tuple[Draw, Float[Array, "N Q"], Float[Array, "R N"]]:
    r"""Draw one function.

    With :math:`\phi_m` integrated out, slice sampling draws the parameters of its kernel. Then, if
    weights may move, come those of the other functions (:func:`draw_columns`), changes of its users
    if there are few, and the length of the vector of its weights that are not zero while its
    direction stays: in polar coordinates, the log of the length has the density of the weights
    times the length to the power of their number. Last comes :math:`\phi_m` from its Gaussian
    conditional. A function without weights is drawn from its prior, as is its kernel.

    :return: the draw; what all functions leave; and draws of the function's prior, which
        :func:`draw_two` needs.
    """
    moves, w = held.moves, draw.weights[:, m]
    key_slabs, key_kernel, key_columns, key_users, key_stretch, key_phi = random.split(key, 6)
    slab_scales, prior = draw.slab_scales, None
    if moves is not None:
        slab_scales, variance = moves.draw_slabs(key_slabs, slab_scales, draw.weights)
        prior = Prior(moves.log_odds, variance)
    left = Left(residual + jnp.outer(draw.phi[m], w), held.relative / draw.noise**2)
    mixing = Mixing(draw.phi, draw.weights, prior)
    turn = Turn(m, draw.theta, None, None, w, draw.noise, mixing, left)
    turn = draw_kernel(key_kernel, held, turn)
    if moves is not None:
        turn = draw_others(key_columns, held, turn)
        turn = change_users(key_users, held, turn)
        turn = stretch(key_stretch, held, turn)
    phi, prior_draws = draw_values(key_phi, held, turn)
    mixing, w = turn.mixing, turn.w
    new = Draw(
        draw.phi.at[m].set(phi),
        turn.theta,
        mixing.weights.at[:, m].set(w),
        slab_scales,
        turn.noise,
    )
    now = new, turn.left.residual - jnp.outer(phi, w)
    # draws of the prior that belong to another kernel are of no use to anybody
    prior_draws = jnp.where(is_finite(now), prior_draws, jnp.nan)
    return *keep_finite(now, (draw, residual)), prior_draws


def keep_finite(new: Any, old: Any) -> Any:
    """The new state, or the old one if anything in the new one is not finite."""
    return choose(is_finite(new), new, old)


def is_finite(tree: Any) -> Bool[Array, ""]:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def draw_kernel(key: Array, held: Held, turn: Turn) -> Turn:
    """Draw the parameters of a function's kernel, with the weights of another one integrated out
    where these may move.
    """
    functions, m = held.functions, turn.m
    hidden = turn.hidden(functions.mean[m])
    a = hidden.root.diagonal[0]

    def found(theta):
        covariance = functions.covariance(m, theta[m])
        return theta, covariance, covariance.cholesky(a), turn.mixing, turn.left

    def draw_used():
        if held.moves is None or len(turn.mixing.phi) == 1:
            y = hidden.root.whiten(turn.left.linear_terms(hidden.w)) - hidden.mean
            x, new = draw_parameters(key, functions, turn, a, (y[:, None], None))
            return turn.theta.at[m].set(x), new.covariance, new.factor, turn.mixing, turn.left
        return _draw_with_column(key, held, turn, hidden)

    def draw_idle():
        return found(turn.theta.at[m].set(functions.draw(key, turn.theta)[m]))

    if functions.parameters.is_free.any():
        parts = jax.lax.cond(turn.is_used, draw_used, draw_idle)
    else:
        parts = found(turn.theta)
    theta, covariance, factor, mixing, left = parts
    return turn._replace(
        theta=theta, covariance=covariance, factor=factor, mixing=mixing, left=left
    )


def _draw_with_column(key: Array, held: Held, turn: Turn, hidden: Hidden) -> tuple:
    key_k, key_tasks, key_kernel, key_slabs = random.split(key, 4)
    m, mixing = turn.m, turn.mixing
    used = jnp.any(mixing.weights != 0, axis=0)
    # one that is not in use has a column of zeros, which changes nothing
    k = random.categorical(key_k, jnp.where(used, 0, -1e9).at[m].set(-jnp.inf))
    column, rest = take_column(key_tasks, k, mixing, turn.left, hidden)
    observed = column.observed(hidden.mean)
    a = hidden.root.diagonal[0]
    x, found = draw_parameters(key_kernel, held.functions, turn, a, (observed, column))
    # the slabs that were integrated out, before anything is drawn given them
    noise = random.normal(key_slabs, column.spikes.shape, column.spikes.dtype)
    new = slabs_of(column, found.half).mean(column.spikes, noise)
    put = put_column(column, k, new, mixing, rest)
    return turn.theta.at[m].set(x), found.covariance, found.factor, *put


def draw_parameters(
    key: Array,
    functions: FunctionPrior,
    turn: Turn,
    a: Float[Array, " N"],
    data: tuple[Float[Array, "N C"], Column | None],
) -> tuple[Float[Array, " P"], Found]:
    """Slice sampling of the logs of a kernel's parameters, one after the other.

    :param a: square root of the precision that the function gets from its tasks.
    :param data: deviations of its observations and what stands beside them; the column whose
        slabs are integrated out, too.
    """
    m, (observed, column) = turn.m, data
    free = jnp.asarray(functions.parameters.is_free)[m]

    def evaluate(theta):
        covariance = functions.covariance(m, theta)
        found = Found.of(covariance, covariance.cholesky(a), observed)
        # the densities are those of the parameters, of which theta are the logs
        value = found.value + functions.log_density(m, theta) + jnp.sum(jnp.where(free, theta, 0))
        if column is not None:
            value += slabs_of(column, found.half).log_evidence(column.spikes)
        return found._replace(value=value)

    def draw_entry(p, carry):
        theta, found = carry

        def move():
            along = lambda x: evaluate(theta.at[p].set(x))  # noqa: E731
            x, new = slice_found(random.fold_in(key, p), along, theta[p], found, WIDTH_OF_PARAMETER)
            return theta.at[p].set(x), new

        return jax.lax.cond(free[p], move, lambda: carry)

    theta = turn.theta[m]
    return jax.lax.fori_loop(0, theta.size, draw_entry, (theta, evaluate(theta)))


def draw_others(key: Array, held: Held, turn: Turn) -> Turn:
    """Draw the weights of the other functions in use, if this one is in use."""
    mixing, left = turn.mixing, turn.left
    others = jnp.any(mixing.weights != 0, axis=0).at[turn.m].set(False)
    hidden = turn.hidden(held.functions.mean[turn.m])
    mixing, left = jax.lax.cond(
        turn.is_used,
        lambda: draw_columns(key, others, mixing, left, hidden),
        lambda: (mixing, left),
    )
    return turn._replace(mixing=mixing, left=left)


def stretch(key: Array, held: Held, turn: Turn) -> Turn:
    """Draw the length of a function's weights, and their sign."""
    moves, m, w = held.moves, turn.m, turn.w
    assert moves is not None
    key_length, key_sign = random.split(key)
    hidden, mu = turn.hidden(held.functions.mean[m]), held.functions.mean[m]
    y = hidden.root.whiten(turn.left.linear_terms(hidden.w))
    count = jnp.sum(w != 0)
    square = jnp.sum(w**2 / turn.mixing.prior.variance[:, m])

    def evaluate(log_t, factor=None):
        t = jnp.exp(log_t)
        a = t * hidden.root.diagonal[0]
        if factor is None:
            factor = turn.covariance.cholesky(a)
        found = Found.of(turn.covariance, factor, (y - a * mu)[:, None])
        return found._replace(value=found.value + count * log_t - 0.5 * square * t**2)

    def draw_length():
        zero = jnp.zeros((), w.dtype)
        found = evaluate(zero, turn.factor)
        log_t, found = slice_found(key_length, evaluate, zero, found, WIDTH_OF_LENGTH)
        return jnp.exp(log_t), found.factor

    t, factor = jnp.ones((), w.dtype), turn.factor
    if moves.rescale:
        t, factor = jax.lax.cond(turn.is_used, draw_length, lambda: (t, factor))
    if moves.flip:
        t *= random.rademacher(key_sign, (), t.dtype)
    return turn._replace(w=t * w, factor=factor)


def draw_values(
    key: Array, held: Held, turn: Turn
) -> tuple[Float[Array, " N"], Float[Array, "R N"]]:
    """Draw a function from its conditional; also draws from its prior, for :func:`draw_two`."""
    key_prior, key_noise = random.split(key)
    mu, covariance = held.functions.mean[turn.m], turn.covariance
    num_draws = 1 + num_pairs(held, covariance)
    # one decomposition for all of them
    f = mu + jax.vmap(covariance.draw)(random.split(key_prior, num_draws))

    def solve(x):
        return covariance.solve_upper(turn.factor, covariance.solve_lower(turn.factor, x))

    (phi,) = condition_draw(key_noise, f[:1], turn.left, turn.hidden(mu), (solve, [covariance]))
    return phi, f[1:]


def condition_draw(
    key: Array,
    f: Float[Array, "S N"],
    left: Left,
    hidden: Hidden,
    system: tuple[Callable[[Any], Any], list[Any]],
) -> Float[Array, "S N"]:
    """Matheron's rule: turns draws of the prior of S functions into draws of their conditional.

    :param system: solves with ``I + R K R^T``; the functions' covariances.
    """
    solve, covariances = system
    root = hidden.root
    y = root.whiten(left.linear_terms(hidden.w))
    error = y - root.times(f) - random.normal(key, y.shape, y.dtype)
    u = root.transposed(solve(error))
    return f + jnp.stack([K.matvec(x) for K, x in zip(covariances, u, strict=True)])


# Several functions


def num_pairs(held: Held, covariance: Any) -> int:
    """How many pairs of functions are drawn after the single ones.

    On the toy data, M - 1 = 6 pairs in place of 2 made the effective sample size four times as
    large, and steps a third longer.
    """
    if held.moves is None or not isinstance(covariance, Dense):
        return 0
    Q, M = held.moves.log_odds.shape
    return M - 1 if M > 2 and Q > 1 else 0


def draw_functions(key: Array, held: Held, draw: Draw) -> Draw:
    """Draw every function in turn, jointly with its kernel, and what may move with it; then, where
    covariances are dense, pairs of functions.

    :param draw: the current one.
    """
    key_one, key_two = random.split(key)

    def visit(carry, item):
        draw, residual, prior_draws = draw_one(item[1], held, item[0], *carry)
        return (draw, residual), prior_draws

    M = len(draw.phi)
    start = (draw, held.Y - draw.phi.T @ draw.weights.T)
    items = (jnp.arange(M), random.split(key_one, M))
    (draw, _), prior_draws = jax.lax.scan(visit, start, items)

    def visit_two(draw, item):
        return keep_finite(draw_two(item[0], held, draw, item[1]), draw), None

    pairs = prior_draws.shape[1]
    items = (random.split(key_two, pairs), jnp.swapaxes(prior_draws, 0, 1))
    return jax.lax.scan(visit_two, draw, items)[0] if pairs else draw


def draw_two(key: Array, held: Held, draw: Draw, prior_draws: Float[Array, "M N"]) -> Draw:
    """Draw two functions in use, chosen at random, after the weights of the others.

    The weights are drawn with both functions integrated out, so that they can move in two
    directions at once: zeros that hold each other in place along one give way.

    :param prior_draws: a draw of each function from its prior.
    """
    moves, functions, W = held.moves, held.functions, draw.weights
    assert moves is not None
    key_slabs, key_pair, key_columns, key_noise = random.split(key, 4)
    slab_scales, variance = moves.draw_slabs(key_slabs, draw.slab_scales, W)
    used = jnp.any(W != 0, axis=0)
    pair = jnp.argsort(jnp.where(used, random.uniform(key_pair, used.shape), 2))[:2]
    mixing = Mixing(draw.phi, W, Prior(moves.log_odds, variance))

    def move():
        w, phi = W[:, pair], draw.phi
        residual = held.Y - mixing.location + phi[pair].T @ w.T
        left = Left(residual, held.relative / draw.noise**2)
        root = Root.of(left.Z, w)
        K = [functions.covariance(m, draw.theta[m]) for m in pair]
        L = jax.lax.linalg.cholesky(_joint(root, K[0].K, K[1].K), symmetrize_input=False)
        solve_lower = partial(solve_triangular, L, lower=True)
        hidden = Hidden(w, root, root.times(functions.mean[pair]), solve_lower)
        others = used.at[pair].set(False)
        new, left = draw_columns(key_columns, others, mixing, left, hidden)
        solve = lambda x: solve_triangular(L, solve_lower(x), lower=True, trans=1)  # noqa: E731
        f = condition_draw(key_noise, prior_draws[pair], left, hidden, (solve, K))
        return phi.at[pair].set(f), new.weights

    phi, W = jax.lax.cond(jnp.sum(used) > 2, move, lambda: (draw.phi, W))
    return draw._replace(phi=phi, weights=W, slab_scales=slab_scales)


def _joint(
    root: Root, first: Float[Array, "N N"], second: Float[Array, "N N"]
) -> Float[Array, "N2 N2"]:
    """``I + R K R^T`` of two functions, given their covariances."""
    (a, b), c = root.diagonal, root.upper
    rows = jnp.stack([a, jnp.zeros_like(a)]), jnp.stack([c, b])
    # in the order of the result, which XLA computes in one pass
    parts = (
        r[:, :, None, None] * K[None, :, None] * r
        for r, K in zip(rows, (first, second), strict=True)
    )
    size = 2 * len(first)
    return jnp.reshape(sum(parts), (size, size)) + jnp.eye(size, dtype=first.dtype)
