# SPDX-License-Identifier: Apache-2.0
r"""Turns of functions without order towards sparse weights, judged by a surrogate of the bound.

Weights and functions are determined up to ``W phi = (W T^-1) (T phi)``, and sweeps hardly move
along ``T``. With the product held, the bound as a function of the weights is about

.. math::

    J = \sum_{qm} s_{qm}(w_{qm}) - \frac N2 \sum_m \log(1 + A_m) - \frac12 \mathrm{tr} S,

where :math:`s_{qm}(w) = \log(e^{-w^2 / 2v_q} + e^{o_{qm} - w^2 / 2(v_q + \sigma_w^2)})` is the log
evidence of a pair that is seen as ``w`` with the variance :math:`v_q = \sigma_q^2 / n_q`,
:math:`A_m = \sum_q n_q w_{qm}^2 / N \sigma_q^2` is the precision that the tasks give to a function
(its log is what mean field loses since the functions are independent in it) and ``S`` the
expected products of the functions. Pairs of functions are turned and sheared one after the other,
disjoint pairs at once. Axes: ``N`` points, ``Q`` tasks, ``M`` functions, ``P`` pairs at once, ``K``
trials.
"""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.sparse_sums import weighted_sums
from numpyro_spikeslab.fitting import entries
from numpyro_spikeslab.fitting.function_updates import in_use
from numpyro_spikeslab.fitting.moves import varimax
from numpyro_spikeslab.fitting.posterior import (
    Data,
    Posterior,
    Spec,
    strong,
    view_at,
)
from numpyro_spikeslab.fitting.tasks import over_points, over_tasks
from numpyro_spikeslab.fitting.white_functions import with_sites
from numpyro_spikeslab.reading.view import View, by_task

# Angles on a quarter turn, and shears on each side of none up to the largest, that are tried.
NUM_ANGLES = 16
NUM_SHEARS = 4
LARGEST_SHEAR = 0.4
# Cycles over all pairs at most, and the gain of J below which a pair stays.
MAX_CYCLES = 2
LEAST = 0.02
# Steps of conjugate gradients, which a full matrix of tasks needs one of.
NUM_SOLVES = 6


class Surrogate(NamedTuple):
    """What ``J`` is made of.

    - **odds** - ``o``, log odds of a slab that is seen as zero.
    - **variance** - ``sigma_w^2``.
    - **slab** - ``1 / 2 (v + sigma_w^2)``.
    - **spike** - ``1 / 2 v``, of each task.
    - **load** - ``n_q / N sigma_q^2``, of each task.
    - **num_points** - ``N``.
    """

    odds: Float[Array, "M Q"]
    variance: Float[Array, "M #Q"]
    slab: Float[Array, "M Q"]
    spike: Float[Array, " Q"]
    load: Float[Array, " Q"]
    num_points: Float[Array, ""]

    def evidence(self, m: Any, w: Float[Array, "*K Q"]) -> Float[Array, "*K"]:
        """``sum_q s`` of functions ``m`` at other weights."""
        without, included = -self.spike * w**2, self.odds[m] - self.slab[m] * w**2
        # logaddexp takes twice the time
        small = jnp.log(1 + jnp.exp(-jnp.abs(without - included)))
        return jnp.sum(jnp.maximum(without, included) + small, axis=-1)

    def loss(self, A: Float[Array, "*K"]) -> Float[Array, "*K"]:
        return 0.5 * self.num_points * jnp.log1p(A)

    def value(self, W: Float[Array, "M Q"], S: Float[Array, "M M"]) -> Float[Array, ""]:
        """``J``."""
        pairs = self.evidence(slice(None), W) - self.loss(W**2 @ self.load)
        return jnp.sum(pairs) - 0.5 * jnp.trace(S)

    def conditional(self, w: Float[Array, "M Q"]) -> PairedMeanField:
        """Of the pairs that are seen as ``w``; tasks first."""
        logit = self.odds + (self.spike - self.slab) * w**2
        variance = 1 / (2 * self.spike + 1 / self.variance)
        loc = 2 * self.spike * variance * w
        return PairedMeanField(jax.nn.sigmoid(logit).T, loc.T, jnp.sqrt(variance).T)


class Turned(NamedTuple):
    """Weights and functions on their way.

    - **W** - the weights.
    - **B** - the functions are ``B phi``.
    - **S** - expected products of the functions with each other.
    """

    W: Float[Array, "M Q"]
    B: Float[Array, "M M"]
    S: Float[Array, "M M"]


def surrogate(at: View, num_points: int) -> Surrogate:
    """The surrogate of the bound of a view."""
    seen = by_task(at.relative, at.sigma2.size, at.layout) / at.sigma2
    v = 1 / jnp.maximum(seen, jnp.finfo(seen.dtype).tiny)
    variance = at.prior.variance.T
    odds = at.prior.log_odds.T - 0.5 * jnp.log1p(variance / v)
    N = jnp.asarray(num_points, at.Y.dtype)
    return Surrogate(odds, variance, 0.5 / (v + variance), 0.5 / v, seen / N, N)


def ridge(
    at: View, phi: Float[Array, "M N"], var: Float[Array, "M N"], W: Float[Array, "M Q"]
) -> Float[Array, "M Q"]:
    r"""Weights without spikes, given functions.

    Solves :math:`(\Phi Z_q \Phi^\top + \mathrm{diag}(V z_q + \sigma_q^2 / \sigma_w^2)) w_q = \Phi
    Z_q y_q` by conjugate gradients from ``W``, preconditioned by the same with
    :math:`\Phi Z_q \Phi^\top` in proportion to the number of observations; of entries, directly.
    """
    if at.layout is not None:
        return entries.ridge(at, phi, var)
    extra = at.sigma2 / at.prior.variance.T
    E, U = jnp.linalg.eigh(phi @ phi.T + jnp.diag(jnp.sum(var, axis=1)))
    share = jnp.mean(at.relative, axis=0)
    scale = E[:, None] * share + jnp.mean(extra, axis=0)

    def times(x):
        return phi @ (at.relative * (phi.T @ x)) + (over_points(at, var) + extra) * x

    def step(_, carry):
        x, r, p, rz = carry
        Hp = times(p)
        length = _ratio(rz, jnp.sum(p * Hp, axis=0))
        x, r = x + length * p, r - length * Hp
        z = U @ ((U.T @ r) / scale)
        new = jnp.sum(r * z, axis=0)
        return x, r, z + _ratio(new, rz) * p, new

    r = phi @ (at.relative * at.Y) - times(W)
    z = U @ ((U.T @ r) / scale)
    return jax.lax.fori_loop(0, NUM_SOLVES, step, (W, r, z, jnp.sum(r * z, axis=0)))[0]


def _ratio(x: Any, y: Any) -> Any:
    return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)


def pairs_of_round(
    order: Int[Array, " M"], number: Int[Array, ""], k: Any
) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
    """Disjoint pairs of the first ``number`` in ``order``, all of them in as many rounds.

    :param k: the round. What is no pair has the number ``M``.
    """
    M = order.size
    # one more if their number is odd, who has nothing to do
    n = number + number % 2
    p = jnp.arange((M + 1) // 2)
    first = jnp.where(p == 0, n - 1, (k + p) % jnp.maximum(n - 1, 1))
    second = (k - p) % jnp.maximum(n - 1, 1)
    valid = (p < n // 2) & (first < number) & (second < number)
    i, j = order[jnp.minimum(first, M - 1)], order[jnp.minimum(second, M - 1)]
    return jnp.where(valid, i, M), jnp.where(valid, j, M)


def _both(x: Float[Array, "M K"], i: Any, j: Any, turn: Any) -> Float[Array, "M K"]:
    """Rows ``i`` and ``j`` become ``a x_i + b x_j`` and ``c x_i + d x_j``."""
    a, b, c, d = (y[:, None] for y in turn)
    one, other = x[i], x[j]
    x = x.at[i].set(a * one + b * other, mode="drop")
    return x.at[j].set(c * one + d * other, mode="drop")


def turn_pairs(found: Turned, i: Any, j: Any, turn: Any) -> Turned:
    """Functions turned by matrices ``(a, b, c, d)`` of determinant 1, weights by their inverses."""
    a, b, c, d = turn
    S = _both(_both(found.S, i, j, turn).T, i, j, turn)
    return Turned(_both(found.W, i, j, (d, -c, -b, a)), _both(found.B, i, j, turn), S)


def _products(J: Surrogate, found: Turned, i: Any, j: Any) -> tuple[Any, Any, Any]:
    """``A`` of both functions of each pair, and the same sum of their products."""
    one, other = found.W[i], found.W[j]
    return one**2 @ J.load, other**2 @ J.load, (one * other) @ J.load


def _narrow(J: Surrogate, x: Any) -> Any:
    """Trials are many and need few digits."""
    return jax.tree.map(lambda y: y.astype(jnp.float32), (J, x))


def _vertex(values: Float[Array, "K P"], best: Int[Array, " P"], around: bool) -> Any:
    """Offset of the maximum of a parabola from the best of K trials, in steps.

    :param around: whether the last trial stands beside the first.
    """
    K, p = values.shape[0], jnp.arange(values.shape[1])
    below, centre, above = (values[(best + step) % K, p] for step in (-1, 0, 1))
    curvature = below - 2 * centre + above
    offset = 0.5 * (below - above) / jnp.where(curvature < 0, curvature, -1)
    inside = around | ((best > 0) & (best < K - 1))
    return jnp.where(inside & (curvature < 0), jnp.clip(offset, -0.5, 0.5), 0)


def _best(value: Any, trials: Float[Array, " K"], at_none: int, around: bool) -> tuple[Any, Any]:
    """The best trial of each pair, or none, and whether it is one.

    :param value: of trials ``(K, P)``, or one for each pair.
    :param at_none: which trial changes nothing.
    """
    values = value(trials[:, None])
    best = jnp.argmax(values, axis=0)
    x = trials[best] + _vertex(values, best, around) * (trials[1] - trials[0])
    highest = jnp.max(values, axis=0)
    refined = value(x[None])[0]
    x = jnp.where(refined > highest, x, trials[best])
    moves = jnp.maximum(refined, highest) > values[at_none] + LEAST
    return jnp.where(moves, x, trials[at_none]), moves


def rotate_pairs(J: Surrogate, found: Turned, i: Any, j: Any) -> tuple[Turned, Any]:
    """The best angle on a quarter turn for each pair; how many moved."""
    load = _products(J, found, i, j)
    few, (one, other, A, D, X) = _narrow(J, (found.W[i], found.W[j], *load))

    def value(angle):
        c, s = jnp.cos(angle), jnp.sin(angle)
        u = c[..., None] * one + s[..., None] * other
        v = c[..., None] * other - s[..., None] * one
        cross = 2 * c * s * X
        losses = few.loss(c**2 * A + s**2 * D + cross) + few.loss(s**2 * A + c**2 * D - cross)
        return few.evidence(i, u) + few.evidence(j, v) - losses

    angles = (jnp.arange(NUM_ANGLES) / NUM_ANGLES - 0.5) * jnp.pi / 2
    angle, moves = _best(value, angles.astype(one.dtype), NUM_ANGLES // 2, True)
    # to all digits, or the product of weights and functions would change
    c, s = (f(angle.astype(found.W.dtype)) for f in (jnp.cos, jnp.sin))
    return turn_pairs(found, i, j, (c, s, -s, c)), jnp.sum(moves & (i < len(found.W)))


def shear_pairs(J: Surrogate, found: Turned, i: Any, j: Any) -> tuple[Turned, Any]:
    """``w_i - a w_j`` and ``phi_j + a phi_i`` with the best ``a``; how many moved."""
    load = _products(J, found, i, j)
    own, both = found.S[i, i], found.S[i, j]
    few, (one, other, A, D, X, own, both) = _narrow(J, (found.W[i], found.W[j], *load, own, both))

    def value(a):
        u = one - a[..., None] * other
        return (
            few.evidence(i, u)
            - few.loss(A - 2 * a * X + a**2 * D)
            - 0.5 * (2 * a * both + a**2 * own)
        )

    shears = LARGEST_SHEAR * jnp.arange(-NUM_SHEARS, NUM_SHEARS + 1) / NUM_SHEARS
    a, moves = _best(value, shears.astype(one.dtype), NUM_SHEARS, False)
    a = a.astype(found.W.dtype)
    turned = turn_pairs(found, i, j, (jnp.ones_like(a), jnp.zeros_like(a), a, jnp.ones_like(a)))
    return turned, jnp.sum(moves & (i < len(found.W)))


def climb(J: Surrogate, found: Turned, used: Bool[Array, " M"]) -> Turned:
    """Cycles over all pairs of used functions until none moves, a few at most."""
    order, number = jnp.argsort(~used, stable=True), jnp.sum(used)

    def visit(k, carry):
        found, count = carry
        i, j = pairs_of_round(order, number, k)
        for move, pair in ((rotate_pairs, (i, j)), (shear_pairs, (i, j)), (shear_pairs, (j, i))):
            found, moved = move(J, found, *pair)
            count += moved
        return found, count

    def cycle(carry):
        found, done, _ = carry
        rounds = jnp.maximum(number + number % 2 - 1, 0)
        none = jnp.zeros((), number.dtype)
        found, count = jax.lax.fori_loop(0, rounds, visit, (found, none))
        return found, done + 1, count

    def unfinished(carry):
        return (carry[1] < MAX_CYCLES) & (carry[2] > 0)

    start = found, jnp.zeros((), number.dtype), jnp.ones((), number.dtype)
    return jax.lax.while_loop(unfinished, cycle, start)[0]


@partial(jax.jit, static_argnums=0)
def turn(
    spec: Spec,
    data: Data,
    posterior: Posterior,
    whiten: Bool[Array, ""],
    simplify: Bool[Array, ""],
) -> Posterior:
    """The functions in use, turned until ``J`` is high, with weights that follow.

    :param whiten: whether to begin with functions that are uncorrelated.
    :param simplify: whether to begin with weights that varimax has turned.
    """
    at = view_at(spec, data, posterior)
    functions: Any = posterior.functions
    used = in_use(spec, data, posterior)
    phi, var = (jnp.where(used[:, None], x, 0) for x in (functions.mean, functions.var))
    W = ridge(at, phi, var, jnp.where(used, posterior.weights.mean, 0).T)
    none = jnp.eye(len(W), dtype=W.dtype)
    start = Turned(W, none, phi @ phi.T + jnp.diag(jnp.sum(var, axis=1)))
    start = jax.lax.cond(whiten, lambda: _whitened(start, spec.form.num_obs, used), lambda: start)
    size, group = (start.W / jnp.sqrt(at.sigma2)).T, jnp.where(used, 0, -1)
    T = jax.lax.cond(simplify, lambda: varimax(size, group).astype(W.dtype), lambda: none)
    found = climb(surrogate(at, spec.form.num_obs), _linear(start, T.T, T.T), used)
    return strong(posterior_of(spec, data, posterior, found._replace(B=found.B @ phi), used))


def _whitened(found: Turned, num_points: int, used: Any) -> Turned:
    C = jnp.where(used[:, None] & used, found.S / num_points, jnp.diag(jnp.where(used, 0.0, 1.0)))
    E, U = jnp.linalg.eigh(C)
    root = jnp.sqrt(jnp.maximum(E, 1e-10 * jnp.max(E)))
    return _linear(found, (U * root) @ U.T, (U / root) @ U.T)


def _linear(found: Turned, of_weights: Any, of_functions: Any) -> Turned:
    S = of_functions @ found.S @ of_functions.T
    return Turned(of_weights @ found.W, of_functions @ found.B, S)


def posterior_of(
    spec: Spec, data: Data, posterior: Posterior, found: Turned, used: Any
) -> Posterior:
    """Weights at what a pair that is seen as ``w`` has; functions around given means."""
    at, functions = view_at(spec, data, posterior), posterior.functions
    assert functions is not None
    seen = surrogate(at, spec.form.num_obs).conditional(found.W)
    seen = seen._replace(probs=jnp.where(used, seen.probs, 0))
    precise = seen.slab_moments[1] / at.sigma2[:, None]
    if at.layout is None:
        alpha = over_tasks(at, precise).T
    else:
        rows, N = at.layout.by_rows, spec.form.num_obs
        alpha = weighted_sums(rows, N, precise, at.relative).T
    alpha = jnp.where(used[:, None], jnp.broadcast_to(alpha, data.mean.shape), 0)
    functions = with_sites(functions, found.B, alpha)
    return posterior._replace(weights=seen, functions=functions)
