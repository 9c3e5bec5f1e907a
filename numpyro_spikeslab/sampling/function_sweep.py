# SPDX-License-Identifier: Apache-2.0
r"""Draws of latent functions and of their weights, with as much as possible integrated out.

Data determine functions and weights only together: :math:`\phi_m + c \phi_k` and :math:`w_k - c
w_m` in place of :math:`\phi_m` and :math:`w_k` give the same data, and so do :math:`c \phi_m` and
:math:`w_m / c`. Plain Gibbs draws of one given the other mix slowly. So the spikes of function k
are drawn with its slabs and function m, or two functions, integrated out.

Evaluations of densities return their factor of an N by N matrix for reuse. If rounding makes a
decomposition fail, the old state is kept.
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.covariance import Dense
from numpyro_spikeslab.algebra.search import choose, slice_sample
from numpyro_spikeslab.sampling.function_state import Fixed, Function, Integrated, Root, State
from numpyro_spikeslab.sampling.weights_of_function import (
    Column,
    draw_columns,
    put_column,
    take_column,
)

# Widths of slice sampling: of logs of kernel parameters, and of the log length of weights.
WIDTH_OF_PARAMETER, WIDTH_OF_LENGTH = 4.0, 1.0


def draw_functions(key: Array, fixed: Fixed, state: State) -> State:
    """Draw every function in turn, jointly with its kernel and what may move with it; then, where
    covariances are dense, pairs of functions."""
    key_one, key_two = random.split(key)

    def visit(state, item):
        return draw_function(item[1], fixed, item[0], state)

    M = len(state.phi)
    items = (jnp.arange(M), random.split(key_one, M))
    state, prior_draws = jax.lax.scan(visit, state, items)

    def visit_two(state, item):
        new = draw_two(item[0], fixed, state, item[1])
        return choose(is_finite(new), new, state), None

    num_pairs = prior_draws.shape[1]
    items = (random.split(key_two, num_pairs), jnp.swapaxes(prior_draws, 0, 1))
    return jax.lax.scan(visit_two, state, items)[0] if num_pairs else state


def is_finite(tree: Any) -> Bool[Array, ""]:
    """Whether all arrays of a pytree are finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


# One function


def draw_function(
    key: Array, fixed: Fixed, m: Int[Array, ""], state: State
) -> tuple[State, Float[Array, "R N"]]:
    r"""Draw one function.

    With :math:`\phi_m` integrated out, draw in turn the parameters of its kernel, the weights of
    the other functions (:func:`draw_columns`), and the length and the sign of the vector of its
    weights (:func:`stretch`); the last two if weights may move. Then :math:`\phi_m` comes from its
    Gaussian conditional. A function without weights is drawn from its prior, as is its kernel.

    :return: the state, and draws of the function's prior for :func:`draw_two`.
    """
    old = state
    key_slabs, key_kernel, key_columns, key_stretch, key_phi = random.split(key, 5)
    if fixed.with_weights:
        state = fixed.draw_slabs(key_slabs, state)
    contribution = jnp.outer(state.phi[m], state.weights[:, m])
    state = state._replace(residual=state.residual + contribution)
    state, function = draw_kernel(key_kernel, fixed, state, m)
    if fixed.with_weights:
        others = state.used.at[m].set(False) & state.used[m]
        system = Integrated.of(fixed, state, m[None]), function.solve_lower
        state = draw_columns(key_columns, others, fixed, state, system)
        state, function = stretch(key_stretch, fixed, state, function)
    phi, prior_draws = draw_values(key_phi, fixed, state, function)
    residual = state.residual - jnp.outer(phi, state.weights[:, m])
    new = state._replace(phi=state.phi.at[m].set(phi), residual=residual)
    accepted = is_finite(new)
    # if the update is rejected, these draws have the wrong kernel: NaN makes `draw_two` fail, too
    return choose(accepted, new, old), jnp.where(accepted, prior_draws, jnp.nan)


def draw_kernel(
    key: Array, fixed: Fixed, state: State, m: Int[Array, ""]
) -> tuple[State, Function]:
    """Draw the parameters of a function's kernel with the function integrated out and, if weights
    may move, the slabs of another function, too."""
    functions, integrated = fixed.functions, Integrated.of(fixed, state, m[None])
    a = integrated.root.diagonal[0]

    def with_kernel(theta):
        return state._replace(theta=theta), function_at(fixed, m, theta[m], a)

    def draw_used():
        key_k, key_tasks, key_kernel, key_slabs = random.split(key, 4)
        start, column = state, None
        if not fixed.with_weights or len(state.phi) == 1:
            columns = (integrated.observations(fixed, state) - integrated.mean)[:, None]
        else:
            # if no other function is in use, an idle one is drawn, whose zeros change nothing
            k = random.categorical(key_k, jnp.where(state.used, 0, -1e9).at[m].set(-jnp.inf))
            column, start = take_column(key_tasks, k, fixed, state, integrated)
            columns = column.stacked(integrated.mean)
        target = m, state.theta[m], a
        theta, function, half = draw_parameters(key_kernel, fixed, target, columns, column)
        if column is not None:
            # the slabs that were integrated out, before anything is drawn given them
            noise = random.normal(key_slabs, column.spikes.shape, column.spikes.dtype)
            start = put_column(column, k, column.slabs(half).draw(column.spikes, noise), start)
        return start._replace(theta=start.theta.at[m].set(theta)), function

    def draw_idle():
        return with_kernel(state.theta.at[m].set(functions.draw(key, state.theta)[m]))

    if not functions.parameters.is_free.any():
        return with_kernel(state.theta)
    return jax.lax.cond(state.used[m], draw_used, draw_idle)


def function_at(fixed: Fixed, m: Any, theta: Float[Array, " P"], a: Float[Array, " N"]) -> Function:
    """Decompose the matrix of a function at logs of kernel parameters ``theta``."""
    covariance = fixed.functions.covariance(m, theta)
    return Function(m, covariance, covariance.cholesky(a))


def draw_parameters(
    key: Array, fixed: Fixed, target: Any, columns: Float[Array, "N C"], column: Column | None
) -> tuple[Float[Array, " P"], Function, Float[Array, "N C"]]:
    """Draw logs of kernel parameters by slice sampling; return also the function, and products."""
    m, theta, a = target
    free = jnp.asarray(fixed.functions.parameters.is_free)[m]

    def evaluate(theta):
        function = function_at(fixed, m, theta, a)
        value, half = function.log_density(columns)
        # priors are densities of the parameters, and theta are their logs
        value += fixed.functions.log_density(m, theta) + jnp.sum(jnp.where(free, theta, 0))
        if column is not None:
            value += column.slabs(half).log_evidence(column.spikes)
        return value, (value, function, half)

    def draw_entry(p, carry):
        theta, current = carry

        def move():
            along = lambda x: evaluate(theta.at[p].set(x))  # noqa: E731
            start = current[0], current
            entry_key = random.fold_in(key, p)
            x, new = slice_sample(entry_key, along, theta[p], width=WIDTH_OF_PARAMETER, known=start)
            return theta.at[p].set(x), new

        return jax.lax.cond(free[p], move, lambda: carry)

    carry = theta, evaluate(theta)[1]
    theta, (_, function, half) = jax.lax.fori_loop(0, theta.size, draw_entry, carry)
    return theta, function, half


def stretch(key: Array, fixed: Fixed, state: State, function: Function) -> tuple[State, Function]:
    """Draw the length of a function's weights while their direction stays, and their sign.

    In polar coordinates, the log of the length has the density of the weights times the length to
    the power of the number of nonzero weights. The sign leaves the factor as it is.
    """
    m = function.m
    key_length, key_sign = random.split(key)
    integrated, w = Integrated.of(fixed, state, m[None]), state.weights[:, m]
    y, a = integrated.observations(fixed, state), integrated.root.diagonal[0]
    count = jnp.sum(w != 0)
    square = jnp.sum(w**2 / state.slab_variance[:, m])

    def log_density(log_t, scaled):
        t = jnp.exp(log_t)
        value, _ = scaled.log_density((y - t * integrated.mean)[:, None])
        return value + count * log_t - 0.5 * square * t**2, scaled

    def evaluate(log_t):
        factor = function.covariance.cholesky(jnp.exp(log_t) * a)
        return log_density(log_t, function._replace(factor=factor))

    def draw_length():
        zero = jnp.zeros((), w.dtype)
        start = log_density(zero, function)
        log_t, new = slice_sample(key_length, evaluate, zero, width=WIDTH_OF_LENGTH, known=start)
        return jnp.exp(log_t), new

    t, new = jnp.ones((), w.dtype), function
    if fixed.rescale:
        t, new = jax.lax.cond(state.used[m], draw_length, lambda: (t, function))
    if fixed.flip:
        t *= random.rademacher(key_sign, (), t.dtype)
    return state._replace(weights=state.weights.at[:, m].set(t * w)), new


def draw_values(
    key: Array, fixed: Fixed, state: State, function: Function
) -> tuple[Float[Array, " N"], Float[Array, "R N"]]:
    """Draw a function from its conditional; also draw from its prior, for :func:`draw_two`."""
    key_prior, key_noise = random.split(key)
    mu, covariance = fixed.functions.mean[function.m], function.covariance
    num_pairs = 0
    if fixed.with_weights and isinstance(covariance, Dense):
        Q, M = fixed.log_odds.shape
        # M - 1 pairs in place of two made the effective sample size four times as large
        num_pairs = M - 1 if M > 2 and Q > 1 else 0
    keys = random.split(key_prior, 1 + num_pairs)
    f = mu + jax.vmap(covariance.draw)(keys)
    integrated = Integrated.of(fixed, state, function.m[None])
    y = integrated.observations(fixed, state)
    u = _matheron(key_noise, f[:1], (integrated.root, y), function.solve)
    return f[0] + covariance.matvec(u[0]), f[1:]


def _matheron(key: Array, f: Any, observed: tuple[Root, Any], solve: Any) -> Float[Array, "S N"]:
    """Compute vectors whose products with covariances turn prior draws into conditional ones."""
    root, y = observed
    error = y - root.times(f) - random.normal(key, y.shape, y.dtype)
    return root.transposed(solve(error))


# Pairs of functions


def draw_two(key: Array, fixed: Fixed, state: State, prior_draws: Float[Array, "M N"]) -> State:
    """Draw two of at least three functions in use, chosen at random, after the others' weights.

    With only one integrated out, two exclusions of a weight can block each other.
    """
    functions, used = fixed.functions, state.used
    key_slabs, key_pair, key_columns, key_noise = random.split(key, 4)
    state = fixed.draw_slabs(key_slabs, state)
    pair = jnp.argsort(jnp.where(used, random.uniform(key_pair, used.shape), 2))[:2]

    def move():
        contributions = state.phi[pair].T @ state.weights[:, pair].T
        start = state._replace(residual=state.residual + contributions)
        integrated = Integrated.of(fixed, start, pair)
        K = [functions.covariance(m, state.theta[m]) for m in pair]
        joint = _joint(integrated.root, K[0].K, K[1].K)
        L = jax.lax.linalg.cholesky(joint, symmetrize_input=False)
        solve_lower = partial(solve_triangular, L, lower=True)
        others = used.at[pair].set(False)
        new = draw_columns(key_columns, others, fixed, start, (integrated, solve_lower))
        solve = lambda x: solve_triangular(L, solve_lower(x), lower=True, trans=1)  # noqa: E731
        f, y = prior_draws[pair], integrated.observations(fixed, new)
        u = _matheron(key_noise, f, (integrated.root, y), solve)
        f += jnp.stack([k.matvec(x) for k, x in zip(K, u, strict=True)])
        residual = new.residual - f.T @ new.weights[:, pair].T
        return new._replace(phi=new.phi.at[pair].set(f), residual=residual)

    return jax.lax.cond(jnp.sum(used) > 2, move, lambda: state)


def _joint(
    root: Root, first: Float[Array, "N N"], second: Float[Array, "N N"]
) -> Float[Array, "N2 N2"]:
    """Compute ``I + R K R^T`` of two functions."""
    (a, b), c = root.diagonal, root.upper
    rows = jnp.stack([a, jnp.zeros_like(a)]), jnp.stack([c, b])
    # blocks in the layout of the result, which XLA then computes in one pass
    parts = (
        r[:, :, None, None] * K[None, :, None] * r
        for r, K in zip(rows, (first, second), strict=True)
    )
    size = 2 * len(first)
    return jnp.reshape(sum(parts), (size, size)) + jnp.eye(size, dtype=first.dtype)
