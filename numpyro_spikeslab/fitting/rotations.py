# SPDX-License-Identifier: Apache-2.0
r"""Rotations of functions towards sparse weights: varimax, and a search for white functions.

With weights of shape (M, Q), the data identify weights and functions up to an orthogonal ``T``:
``W^T phi = (T W)^T (T phi)``. Sweeps hardly move along ``T``. Functions of independent N(0, 1)
values are called white; their bound depends on rotated weights approximately through

.. math::

    J = \sum_{qm} s_{qm}(w_{qm}) - \frac N2 \sum_m \log(1 + A_m) .

Here :math:`s_{qm}(w) = \log(e^{-w^2 / 2v_q} + e^{o_{qm} - w^2 / 2(v_q + \sigma_w^2)})` is the log
evidence, up to a constant, of a spike-and-slab weight with the noisy observation ``w`` of variance
:math:`v_q = \sigma_q^2 / n_q`; :math:`n_q` is the sum of relative precisions of a task, and
:math:`o_{qm}` the log odds of inclusion if the observation is 0. :math:`A_m = \sum_q n_q w_{qm}^2 /
N \sigma_q^2` is the mean precision of the likelihood of a function; its logarithm is what the mean
field loses, whose functions are independent. Disjoint pairs of functions are rotated at once. Axes:
``N`` points, ``Q`` tasks, ``M`` functions, ``P`` pairs at once, ``K`` trial angles.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.observations import Sparse
from numpyro_spikeslab.fitting.function_sweeps import in_use
from numpyro_spikeslab.fitting.function_updates import white_factors
from numpyro_spikeslab.fitting.posterior import Engine, Posterior, strong
from numpyro_spikeslab.reading.view import View

# Cycles of varimax over all pairs.
NUM_ROUNDS = 10
# Trial angles on a quarter turn, and the most cycles over all pairs.
NUM_ANGLES = 16
MAX_CYCLES = 2
# A pair of functions stays if its best rotation gains less than this in J.
MIN_GAIN = 0.02
# Tasks whose equations are solved at once.
BATCH = 256


def quarter_turn(number: int) -> Float[np.ndarray, " K"]:
    """Return angles evenly spaced on a quarter turn around zero."""
    return (np.arange(number) / number - 0.5) * np.pi / 2


def floored_eigh(
    C: Float[Array, "M M"], used: Bool[Array, " M"]
) -> tuple[Float[Array, " M"], Float[Array, "M M"]]:
    """Return eigenvalues, at least 1e-10 of the largest, and eigenvectors of a covariance of the
    used functions, which is 0 for others; these have the eigenvalue 1."""
    E, U = jnp.linalg.eigh(C + jnp.diag(jnp.where(used, 0.0, 1.0)))
    return jnp.maximum(E, 1e-10 * jnp.max(E)), U


class Rotated(NamedTuple):
    """Weights and functions ``T phi`` that are rotated together."""

    W: Float[Array, "M Q"]
    T: Float[Array, "M M"]

    def turned(self, i: Any, j: Any, angle: Any) -> "Rotated":
        """Rotate P disjoint pairs of rows by their angles; the index ``M`` marks padding."""
        c, s = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]

        def turn(x):
            one, other = x[i], x[j]
            x = x.at[i].set(c * one + s * other, mode="drop")
            return x.at[j].set(c * other - s * one, mode="drop")

        return Rotated(turn(self.W), turn(self.T))


def varimax(A: Float[Array, "M Q"], group: Int[Array, " M"]) -> Float[Array, "M M"]:
    """Find the orthogonal ``T`` with the largest sum of variances of the rows of ``(T A)^2``.

    Rows are rotated with rows of the same group alone; if it is negative, never.
    """
    M, Q = A.shape
    first, second = jnp.triu_indices(M, 1)
    start = Rotated(A, jnp.eye(M, dtype=A.dtype))
    if M == 1:
        return start.T

    def rotate_pair(k, now):
        A = now.W
        i, j = first[k % first.size, None], second[k % first.size, None]
        u, v = A[i] ** 2 - A[j] ** 2, 2 * A[i] * A[j]
        sum_u, sum_v = jnp.sum(u), jnp.sum(v)
        cross = 2 * (jnp.sum(u * v) - sum_u * sum_v / Q)
        angle = 0.25 * jnp.arctan2(cross, jnp.sum(u**2 - v**2) - (sum_u**2 - sum_v**2) / Q)
        angle = jnp.where((group[i] == group[j]) & (group[i] >= 0), angle, 0.0)
        return now.turned(i, j, angle)

    return jax.lax.fori_loop(0, NUM_ROUNDS * first.size, rotate_pair, start).T


class Surrogate(NamedTuple):
    """Coefficients of ``J``.

    - **odds**, **variance** - ``o`` and ``sigma_w^2``.
    - **slab**, **excluded** - ``1 / 2 (v + sigma_w^2)`` and ``1 / 2 v``.
    - **load** - ``n_q / N sigma_q^2``.
    """

    odds: Float[Array, "M Q"]
    variance: Float[Array, "M #Q"]
    slab: Float[Array, "M Q"]
    excluded: Float[Array, " Q"]
    load: Float[Array, " Q"]
    num_points: Float[Array, ""]

    @classmethod
    def of(cls, at: View, num_points: int) -> "Surrogate":
        precision = at.layout.by_task(at.relative) / at.sigma2
        v = 1 / jnp.maximum(precision, jnp.finfo(precision.dtype).tiny)
        variance = at.prior.variance.T
        odds = at.prior.log_odds.T - 0.5 * jnp.log1p(variance / v)
        N = jnp.asarray(num_points, at.Y.dtype)
        return cls(odds, variance, 0.5 / (v + variance), 0.5 / v, precision / N, N)

    def evidence(self, m: Any, w: Float[Array, "*K Q"]) -> Float[Array, "*K"]:
        """Return ``sum_q s`` of functions ``m`` at weights ``w``."""
        excluded, included = -self.excluded * w**2, self.odds[m] - self.slab[m] * w**2
        # logaddexp takes twice the time
        small = jnp.log(1 + jnp.exp(-jnp.abs(excluded - included)))
        return jnp.sum(jnp.maximum(excluded, included) + small, axis=-1)

    def loss(self, A: Float[Array, "*K"]) -> Float[Array, "*K"]:
        return 0.5 * self.num_points * jnp.log1p(A)

    def conditional(self, w: Float[Array, "M Q"]) -> PairedMeanField:
        """Return the posterior of the weights given noisy observations ``w``."""
        logit = self.odds + (self.excluded - self.slab) * w**2
        variance = 1 / (2 * self.excluded + 1 / self.variance)
        loc = 2 * self.excluded * variance * w
        return PairedMeanField(jax.nn.sigmoid(logit).T, loc.T, jnp.sqrt(variance).T)


def rotate_pairs(J: Surrogate, now: Rotated, i: Any, j: Any) -> tuple[Rotated, Any]:
    """Rotate each pair to the angle of the highest ``J``; also return how many pairs moved."""
    one, other = now.W[i], now.W[j]
    products = one**2 @ J.load, other**2 @ J.load, (one * other) @ J.load
    # in single precision: trials are many, and only their order matters
    narrow, one, other, A, D, X = jax.tree.map(
        lambda x: x.astype(jnp.float32), (J, one, other, *products)
    )

    def value(angle):
        c, s = jnp.cos(angle), jnp.sin(angle)
        u = c[..., None] * one + s[..., None] * other
        v = c[..., None] * other - s[..., None] * one
        cross = 2 * c * s * X
        losses = narrow.loss(c**2 * A + s**2 * D + cross) + narrow.loss(s**2 * A + c**2 * D - cross)
        return narrow.evidence(i, u) + narrow.evidence(j, v) - losses

    # periodic, since a turn by 90 degrees swaps two functions
    angles = jnp.asarray(quarter_turn(NUM_ANGLES), one.dtype)
    values = value(angles[:, None])
    best, pair = jnp.argmax(values, axis=0), jnp.arange(len(i))
    below, centre, above = (values[(best + step) % NUM_ANGLES, pair] for step in (-1, 0, 1))
    curvature = below - 2 * centre + above
    offset = 0.5 * (below - above) / jnp.where(curvature < 0, curvature, -1)
    offset = jnp.where(curvature < 0, jnp.clip(offset, -0.5, 0.5), 0)
    vertex = angles[best] + offset * (angles[1] - angles[0])
    refined = value(vertex[None])[0]
    moves = jnp.maximum(refined, centre) > values[NUM_ANGLES // 2] + MIN_GAIN
    angle = jnp.where(moves, jnp.where(refined > centre, vertex, angles[best]), 0)
    # cosine and sine to all digits, or the product of weights and functions would change
    turned = now.turned(i, j, angle.astype(now.W.dtype))
    return turned, jnp.sum(moves & (i < len(now.W)))


def pairs_of_round(
    order: Int[Array, " M"], number: Int[Array, ""], k: Any
) -> tuple[Int[Array, " P"], Int[Array, " P"]]:
    """Return the disjoint pairs of round ``k``; in all rounds every two of the first ``number``
    functions in ``order`` meet once. The index ``M`` marks padding.
    """
    M = order.size
    # rounded up to even: with an odd number one function sits out
    n = number + number % 2
    p = jnp.arange((M + 1) // 2)
    first = jnp.where(p == 0, n - 1, (k + p) % jnp.maximum(n - 1, 1))
    second = (k - p) % jnp.maximum(n - 1, 1)
    valid = (p < n // 2) & (first < number) & (second < number)
    i, j = order[jnp.minimum(first, M - 1)], order[jnp.minimum(second, M - 1)]
    return jnp.where(valid, i, M), jnp.where(valid, j, M)


def climb(J: Surrogate, start: Rotated, used: Bool[Array, " M"]) -> Rotated:
    """Cycle over all pairs of used functions, at most :data:`MAX_CYCLES` times."""
    order, number = jnp.argsort(~used, stable=True), jnp.sum(used)
    rounds = jnp.maximum(number + number % 2 - 1, 0)

    def visit(k, carry):
        now, count = carry
        now, moved = rotate_pairs(J, now, *pairs_of_round(order, number, k))
        return now, count + moved

    def cycle(carry):
        now, num_cycles, _ = carry
        now, count = jax.lax.fori_loop(0, rounds, visit, (now, jnp.zeros_like(number)))
        return now, num_cycles + 1, count

    def unfinished(carry):
        return (carry[1] < MAX_CYCLES) & (carry[2] > 0)

    return jax.lax.while_loop(unfinished, cycle, (start, 0, jnp.ones_like(number)))[0]


@jax.jit
def rotate_white(engine: Engine, posterior: Posterior, whiten: Any, simplify: Any) -> Posterior:
    """Propose functions that are rotated towards a high ``J``, whitened and by varimax before."""
    at, functions = engine.view(posterior), posterior.functions
    used = in_use(engine, posterior)
    phi, var = (jnp.where(used[:, None], x, 0) for x in (functions.mean, functions.var))
    W, identity = ridge(at, phi, var), jnp.eye(len(phi), dtype=phi.dtype)
    root, inverse = (jnp.where(whiten, x, identity) for x in _roots(phi, var, used))
    W, phi = root @ W, inverse @ phi
    scaled, group = W / jnp.sqrt(at.sigma2), jnp.where(used, 0, -1)
    T = jax.lax.cond(simplify, lambda: varimax(scaled, group), lambda: identity)
    J = Surrogate.of(at, engine.form.num_obs)
    end = climb(J, Rotated(T @ W, T), used)
    return strong(posterior_of(at, J, posterior, end.W, end.T @ phi, used))


def _roots(phi: Any, var: Any, used: Any) -> tuple[Any, Any]:
    """Return the symmetric root of the covariance of the used functions, and its inverse."""
    E, U = floored_eigh((phi @ phi.T + jnp.diag(jnp.sum(var, axis=1))) / phi.shape[1], used)
    return (U * jnp.sqrt(E)) @ U.T, (U / jnp.sqrt(E)) @ U.T


def ridge(at: View, phi: Float[Array, "M N"], var: Float[Array, "M N"]) -> Float[Array, "M Q"]:
    r"""Solve :math:`(\Phi Z_q \Phi^\top + \mathrm{diag}(V z_q + \sigma_q^2 / \sigma_w^2)) w_q
    = \Phi Z_q y_q` for the weights of each task; :math:`V` are variances of functions.
    """

    def of_columns(sums, sigma2, variance):
        extra = sums.c + sigma2[:, None] / variance
        precision = sums.G + extra[..., None] * jnp.eye(len(phi), dtype=extra.dtype)
        return jnp.linalg.solve(precision, sums.b[..., None])[..., 0]

    if isinstance(at.layout, Sparse):
        data, own = (at.Y, at.relative), (at.sigma2, at.prior.variance)
        return at.layout.over_columns(data, (phi, var), of_columns, *own).T

    def solve(task):
        z, y, sigma2, variance = task
        H = (phi * z) @ phi.T + jnp.diag(var @ z + sigma2 / variance)
        return jax.scipy.linalg.solve(H, phi @ (z * y), assume_a="pos")

    Z = jnp.broadcast_to(at.relative, at.Y.shape)
    variance = jnp.broadcast_to(at.prior.variance, (len(at.sigma2), len(phi)))
    return jax.lax.map(solve, (Z.T, at.Y.T, at.sigma2, variance), batch_size=BATCH).T


def posterior_of(
    at: View, J: Surrogate, posterior: Posterior, W: Any, phi: Any, used: Bool[Array, " M"]
) -> Posterior:
    """Build a posterior from point estimates of weights and functions."""
    functions, weights = posterior.functions, J.conditional(W)
    weights = weights._replace(probs=jnp.where(used, weights.probs, 0))
    precise = weights.slab_moments[1] / at.sigma2[:, None]
    alpha = jnp.where(used[:, None], at.over_tasks(precise).T, 0)
    return posterior._replace(weights=weights, functions=white_factors(functions, phi, alpha))
