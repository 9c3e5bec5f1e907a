# SPDX-License-Identifier: Apache-2.0
r"""Draws of latent functions and of their weights, with as much as possible integrated out.

Functions and weights are known only together: :math:`\phi_m + c \phi_k` and
:math:`w_k - c w_m` in place of :math:`\phi_m` and :math:`w_k` give the same data, and so do
:math:`c \phi_m` and :math:`w_m / c`. Given the one, the other hardly moves. So the weights of
function k are drawn while function m, or two of them, are integrated out together with the slabs.

Given the weights, the tasks say of function m no more than N independent observations
:math:`y_n \sim \mathcal{N}(a_n \phi_{nm}, 1)` would, :math:`a_n^2 = \sum_q \tau_{nq} w_{qm}^2`. All
that is needed comes from :math:`I + \mathrm{diag}(a) K \mathrm{diag}(a) = L L^\top`.

Arrays in, arrays out: this module knows no NumPyro.
"""

from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.stats import norm

from numpyro_spikeslab import latent, multitask
from numpyro_spikeslab.latent import Covariance
from numpyro_spikeslab.multitask import Problem
from numpyro_spikeslab.paired import Prior, Slabs, gibbs_block

# Widths of the intervals from which slice sampling draws. Too wide costs a little, for an interval
# shrinks fast; too narrow costs steps.
WIDTH = 4.0
WIDTH_OF_LENGTH = 1.0
# in standard deviations of the prior
WIDTH_OF_PARAMETER = 2.0
MAX_SHRINKS = 100

# Tasks whose weights are drawn together: a Cholesky decomposition of this size for each of them.
BLOCK_SIZE = 16
# Changes of the users of a function that has at most this many of them, in each step.
NUM_CHANGES = 3
MAX_USERS = 3


def slice_sample(
    key: Array,
    log_density: Callable[[Any], Any],
    x: Float[Array, "*P"],
    value: Float[Array, "*P"],
    width: Any = WIDTH,
) -> tuple[Float[Array, "*P"], Float[Array, "*P"]]:
    """One update of independent numbers by slice sampling with shrinkage (Neal 2003).

    The interval is placed at random around ``x`` and not extended, so a number moves by less than
    ``width``.

    :param log_density: elementwise.
    :param value: ``log_density(x)``.
    :return: the new numbers and their log densities.
    """
    key_level, key_place, key = random.split(key, 3)
    level = value - random.exponential(key_level, x.shape, x.dtype)
    left = x - width * random.uniform(key_place, x.shape, x.dtype)

    def shrink(state):
        count, key, left, right, new, reached, done = state
        key, key_new = random.split(key)
        u = random.uniform(key_new, x.shape, x.dtype)
        proposal = jnp.where(done, new, left + u * (right - left))
        reached = jnp.where(done, reached, log_density(proposal))
        accepted = done | (reached > level)
        left = jnp.where(~accepted & (proposal < x), proposal, left)
        right = jnp.where(~accepted & (proposal >= x), proposal, right)
        return count + 1, key, left, right, proposal, reached, accepted

    def is_open(state):
        return (state[0] < MAX_SHRINKS) & ~jnp.all(state[-1])

    start = (0, key, left, left + width, x, value, jnp.zeros(x.shape, bool))
    *_, new, reached, done = jax.lax.while_loop(is_open, shrink, start)
    # an interval of the size of a rounding error
    return jnp.where(done, new, x), jnp.where(done, reached, value)


class Draw(NamedTuple):
    """Functions and what is drawn with them.

    - **phi** - their values.
    - **theta** - logs of their kernels' parameters.
    - **weights** - the weights, zero where the spike is.
    - **slab_scales** - values of the slab scales' sites.
    - **noise** - noise scale of each task.
    """

    phi: Float[Array, "M N"]
    theta: Float[Array, "M P"]
    weights: Float[Array, "Q M"]
    slab_scales: dict[str, Any]
    noise: Float[Array, " Q"]


class Moves(NamedTuple):
    """What may move together with the functions, where the weights may.

    - **log_odds** - prior log odds of the weights.
    - **draw_slabs** - ``(key, slab_scales, weights) -> slab_scales, variances of the slabs``.
    - **log_prior_of_noise** - ``(noise, task) -> log density``; `None` where noise does not move or
      is not a number for each task.
    - **rescale** - whether the length of each function's weights moves.
    - **flip** - whether their sign does; the prior means must be zero.
    """

    log_odds: Float[Array, "Q M"]
    draw_slabs: Callable[[Array, dict[str, Any], Any], tuple[dict[str, Any], Any]]
    log_prior_of_noise: Callable[[Any, Any], Any] | None
    rescale: bool
    flip: bool


class Root(NamedTuple):
    """Upper triangular ``R``, for each input, of the precision ``R^T R`` that S functions get from
    their tasks; S is one or two.

    - **diagonal** - zero where the tasks say nothing.
    - **upper** - the entry beside it, of two.
    """

    diagonal: Float[Array, "S N"]
    upper: Float[Array, " N"]

    @classmethod
    def of(cls, Z: Float[Array, "N Q"], w: Float[Array, "Q S"]) -> "Root":
        """
        :param Z: precisions of the observations.
        :param w: weights of the functions.
        """
        first = jnp.sqrt(Z @ w[:, 0] ** 2)
        if w.shape[1] == 1:
            return cls(first[None], jnp.zeros_like(first))
        upper, square = _over(Z @ (w[:, 0] * w[:, 1]), first), Z @ w[:, 1] ** 2
        left = square - upper**2
        # one task alone says nothing of the other direction: what is left is a rounding error
        left = jnp.where(left > 100 * jnp.finfo(left.dtype).eps * square, left, 0)
        return cls(jnp.stack([first, jnp.sqrt(left)]), upper)

    def times(self, f: Float[Array, "S N"]) -> Float[Array, " SN"]:
        """``R f``."""
        scaled = self.diagonal * f
        return jnp.ravel(scaled.at[0].add(self.upper * f[1]) if len(f) > 1 else scaled)

    def transposed(self, u: Float[Array, " SN"]) -> Float[Array, "S N"]:
        """``R^T u``."""
        u = u.reshape(self.diagonal.shape)
        scaled = self.diagonal * u
        return scaled.at[1].add(self.upper * u[0]) if len(u) > 1 else scaled

    def whiten(self, h: Float[Array, "S N ..."]) -> Float[Array, "SN ..."]:
        """``R^-T h``, the observations of ``R f`` with unit variance."""
        parts = [_over(h[0], self.diagonal[0])]
        if len(h) > 1:
            known = self.upper.reshape(self.upper.shape + (1,) * (h.ndim - 2)) * parts[0]
            parts.append(_over(h[1] - known, self.diagonal[1]))
        return jnp.concatenate(parts)


def _over(x: Float[Array, "N ..."], a: Float[Array, " N"]) -> Float[Array, "N ..."]:
    """``x / a``, or 0 where ``a`` is."""
    a = a.reshape(a.shape + (1,) * (x.ndim - 1))
    return jnp.where(a > 0, x / jnp.where(a > 0, a, 1), 0)


# Weights, given less than everything


class Column(NamedTuple):
    """The weights of function k in B tasks, while S other functions are integrated out.

    - **tasks** - which.
    - **spikes** - the current ones.
    - **prior** - theirs.
    - **squares** - products ``tau <phi_k, phi_k>`` in each task.
    - **linear** - those with what is left without all these functions.
    - **seen** - the feature that each weight adds to the observations of the S functions.
    - **y** - these observations, without function k.
    - **mixing** - weights of the S functions in these tasks.
    """

    tasks: Int[Array, " B"]
    spikes: Float[Array, " B"]
    prior: Prior
    squares: Float[Array, " B"]
    linear: Float[Array, " B"]
    seen: Float[Array, "SN B"]
    y: Float[Array, " SN"]
    mixing: Float[Array, "B S"]


def take_column(
    key: Array,
    prob: Problem,
    prior: Prior,
    phi_k: Float[Array, " N"],
    k: Any,
    W: Float[Array, "Q M"],
    w: Float[Array, "Q S"],
    root: Root,
    residual: Float[Array, "N Q"],
) -> tuple[Column, Float[Array, "N Q"]]:
    """Take function k out of a few tasks, chosen at random.

    :param w: weights of the functions that are integrated out.
    :param residual: what is left without these.
    :return: the column, and what is left without function k.
    """
    tasks = random.permutation(key, len(W))[:BLOCK_SIZE]
    residual = residual.at[:, tasks].add(jnp.outer(phi_k, W[tasks, k]))
    Z, mixing = prob.Z[:, tasks], w[tasks]
    column = Column(
        tasks,
        (W[tasks, k] != 0).astype(W.dtype),
        Prior(prior.log_odds[tasks, k], prior.variance[tasks, k]),
        phi_k**2 @ Z,
        phi_k @ (Z * residual[:, tasks]),
        root.whiten(mixing.T[:, None] * (Z * phi_k[:, None])[None]),
        root.whiten(linear_terms(prob, residual, w)),
        mixing,
    )
    return column, residual


def put_column(
    column: Column,
    phi_k: Float[Array, " N"],
    k: Any,
    new: Float[Array, " B"],
    W: Float[Array, "Q M"],
    residual: Float[Array, "N Q"],
) -> tuple[Float[Array, "Q M"], Float[Array, "N Q"]]:
    """Put new weights in the place of those that :func:`take_column` has taken out.

    :return: all weights, and what is left with function k again.
    """
    residual = residual.at[:, column.tasks].add(-jnp.outer(phi_k, new))
    return W.at[column.tasks, k].set(new), residual


def linear_terms(
    prob: Problem, residual: Float[Array, "N Q"], w: Float[Array, "Q S"]
) -> Float[Array, "S N"]:
    """Products of weights with what is left without their functions, at each input."""
    return ((prob.Z * residual) @ w).T


def slabs_of(column: Column, half: Float[Array, "SN C"]) -> Slabs:
    """The posterior of the column's slabs.

    What the S functions could take over, were they free, is subtracted; what their prior resists
    is added.

    :param half: ``L^-1`` times ``y`` less its prior mean, and times ``seen``.
    """
    y, seen = half[:, 0], half[:, 1:]
    # the first two cancel where one task's data are all that the functions can take over
    rounding = 4 * column.spikes.size * jnp.finfo(half.dtype).eps
    gram = jnp.diag((1 + rounding) * column.squares) - column.seen.T @ column.seen + seen.T @ seen
    linear = column.linear - column.seen.T @ column.y + seen.T @ y
    return Slabs(gram, linear, column.prior)


def draw_columns(
    key: Array,
    prob: Problem,
    prior: Prior,
    phi: Float[Array, "M N"],
    W: Float[Array, "Q M"],
    others: Bool[Array, " M"],
    w: Float[Array, "Q S"],
    root: Root,
    mean: Float[Array, " SN"],
    solve_lower: Callable[[Any], Any],
    residual: Float[Array, "N Q"],
) -> tuple[Float[Array, "Q M"], Float[Array, "N Q"]]:
    """Draw the weights of other functions while S functions, and the slabs, are integrated out.

    A function in use stays in use, so that no function need be drawn that is not.

    :param others: which functions.
    :param w: weights of the S functions.
    :param mean: prior mean of their observations.
    :param solve_lower: multiplies with ``L^-1``.
    :param residual: what is left without the S functions.
    :return: the weights, and what is left now.
    """

    def draw_column(carry, item):
        W, residual = carry
        k, key = item
        key_tasks, key_shear, key_draw = random.split(key, 3)
        column, rest = take_column(key_tasks, prob, prior, phi[k], k, W, w, root, residual)
        slabs = slabs_of(column, solve_lower(jnp.column_stack([column.y - mean, column.seen])))
        elsewhere = jnp.any(W[:, k].at[column.tasks].set(0) != 0)
        spikes = shear(key_shear, column, slabs, elsewhere)
        new = gibbs_block(key_draw, slabs, spikes, elsewhere)
        return put_column(column, phi[k], k, new, W, rest)

    def visit(carry, item):
        keep = lambda carry, _: carry  # noqa: E731
        return jax.lax.cond(others[item[0]], draw_column, keep, carry, item), None

    key_order, key = random.split(key)
    items = (random.permutation(key_order, len(phi)), random.split(key, len(phi)))
    return jax.lax.scan(visit, (W, residual), items)[0]


def shear(key: Array, column: Column, slabs: Slabs, may_be_empty: Any) -> Float[Array, " B"]:
    """Propose spikes after a shear ``w_k - sum_s c_s w_s`` of the weights.

    The shear is such that the weights of S tasks, chosen at random, become zero; then each spike is
    drawn given the others' sheared slabs. All zeros of a column can so give way to others at once,
    which one by one they do not. A Metropolis-Hastings step on the spikes alone.
    """
    prior = slabs.prior
    B, S = column.mixing.shape
    choices = np.array(list(combinations(range(B), S)))
    precision = column.squares + 1 / prior.variance
    log_odds = prior.log_odds - 0.5 * jnp.log(prior.variance * precision)

    def proposals(spikes: Any) -> tuple[Any, Any, Any]:
        """Log density of the spikes; log weights of the shears and logits after each."""
        mean = slabs.mean(spikes)
        c, is_solvable = _solve(column.mixing[choices], mean[choices])
        is_shear = is_solvable & jnp.any(spikes[choices] > 0, axis=1)
        b = column.squares[None] * (mean[None] - c @ column.mixing.T)
        log_weights = jnp.where(is_shear, -jnp.log(jnp.sum(is_shear)), -jnp.inf)
        logits = log_odds[None] + 0.5 * b**2 / precision[None]
        return slabs.log_evidence(spikes) + spikes @ prior.log_odds, log_weights, logits

    def log_proposal(log_weights: Any, logits: Any, spikes: Any) -> Any:
        each = jax.nn.log_sigmoid(jnp.where(spikes[None] > 0, logits, -logits))
        return jax.nn.logsumexp(log_weights + jnp.sum(each, axis=1))

    key_shear, key_spikes, key_accept = random.split(key, 3)
    old = column.spikes
    value, log_weights, logits = proposals(old)
    logistic = random.logistic(key_spikes, old.shape, old.dtype)
    new = (logits[random.categorical(key_shear, log_weights)] > logistic).astype(old.dtype)
    reached, log_weights_back, logits_back = proposals(new)
    gain = reached + log_proposal(log_weights_back, logits_back, old)
    gain -= value + log_proposal(log_weights, logits, new)
    is_possible = jnp.isfinite(jnp.max(log_weights)) & (may_be_empty | jnp.any(new > 0))
    accepted = is_possible & (gain > -random.exponential(key_accept, (), old.dtype))
    return jnp.where(accepted, new, old)


def _solve(
    A: Float[Array, "C S S"], b: Float[Array, "C S"]
) -> tuple[Float[Array, "C S"], Bool[Array, " C"]]:
    """Solve systems of one or two equations; also where there is a solution."""
    if A.shape[-1] == 1:
        det, adjugate = A[:, 0, 0], jnp.ones_like(A)
    else:
        det = A[:, 0, 0] * A[:, 1, 1] - A[:, 0, 1] * A[:, 1, 0]
        adjugate = jnp.stack([A[:, 1, 1], -A[:, 0, 1], -A[:, 1, 0], A[:, 0, 0]], axis=1)
        adjugate = adjugate.reshape(A.shape)
    c = jnp.sum(adjugate * b[:, None], axis=2)
    return c / jnp.where(det != 0, det, 1)[:, None], det != 0


# Functions


def draw_functions(key: Array, prob: Problem, draw: Draw, moves: Moves | None = None) -> Draw:
    """Draw every function in turn, jointly with its kernel, and what may move with it.

    Where covariances are dense, pairs of functions follow, of which there are M - 1: on the toy
    data, M - 1 = 6 pairs in place of 2 made the effective sample size four times as large, and
    steps a third longer.

    :param prob: the model's arrays, with the precisions of the observations as ``Z``.
    :param draw: the current one.
    :param moves: what may move; `None` leaves all but functions and kernels as it is.
    """
    M = len(draw.phi)
    key_one, key_two = random.split(key)

    def visit(carry, item):
        draw, residual, Z = carry
        return draw_one(item[1], prob._replace(Z=Z), item[0], draw, residual, moves), None

    start = (draw, prob.Y - draw.phi.T @ draw.weights.T, prob.Z)
    items = (jnp.arange(M), random.split(key_one, M))
    (draw, _, Z), _ = jax.lax.scan(visit, start, items)
    is_dense = isinstance(multitask.covariance(prob, 0, draw.theta[0]), latent.Dense)
    if moves is None or M < 3 or len(draw.weights) < 2 or not is_dense:
        return draw
    visit_two = lambda draw, key: (draw_two(key, prob._replace(Z=Z), draw, moves), None)  # noqa: E731
    return jax.lax.scan(visit_two, draw, random.split(key_two, M - 1))[0]


def draw_one(
    key: Array,
    prob: Problem,
    m: Int[Array, ""],
    draw: Draw,
    residual: Float[Array, "N Q"],
    moves: Moves | None,
) -> tuple[Draw, Float[Array, "N Q"], Float[Array, "N Q"]]:
    r"""Draw one function.

    With :math:`\phi_m` integrated out, slice sampling draws the parameters of its kernel. Then, if
    weights may move, come those of the other functions (:func:`draw_columns`), changes of its users
    if there are few, and the length of the vector of its weights that are not zero while its
    direction stays: in polar coordinates, the log of the length has the density of the weights
    times the length to the power of their number. Last comes :math:`\phi_m` from its Gaussian
    conditional. A function without weights is drawn from its prior, as is its kernel.

    :return: the draw, what all functions leave, and the precisions of the observations.
    """
    phi, theta, W, slab_scales, noise = draw
    key_theta, key_slabs, key_columns, key_users, key_length, key_sign, key_phi = random.split(
        key, 7
    )
    mu, Z, w = prob.mu[m], prob.Z, W[:, m]
    residual = residual + jnp.outer(phi[m], w)
    is_used, others = jnp.any(w != 0), jnp.any(W != 0, axis=0).at[m].set(False)
    root = Root.of(Z, w[:, None])
    prior: Any = None
    if moves is not None:
        slab_scales, variance = moves.draw_slabs(key_slabs, slab_scales, W)
        prior = Prior(moves.log_odds, variance)

    def draw_used():
        if moves is None or len(phi) == 1:
            y = root.whiten(linear_terms(prob, residual, w[:, None]))
            evidence = partial(log_evidence, root, y, mu)
            return draw_parameters(key_theta, prob, m, theta[m], evidence), W, residual
        key_k, key_tasks, key_draw = random.split(random.fold_in(key_theta, theta.shape[1]), 3)
        # one that is not in use has a column of zeros, which changes nothing
        k = random.categorical(key_k, jnp.where(others, 0, -1e9).at[m].set(-jnp.inf))
        column, rest = take_column(key_tasks, prob, prior, phi[k], k, W, w[:, None], root, residual)
        evidence = partial(log_evidence, root, column.y, mu, column=column)
        x = draw_parameters(key_theta, prob, m, theta[m], evidence)
        # the slabs that were integrated out, before anything is drawn given them
        new = draw_column_slabs(key_draw, root, column, mu, multitask.covariance(prob, m, x))
        return x, *put_column(column, phi[k], k, new, W, rest)

    def draw_idle():
        loc, scale = (jnp.asarray(x)[m] for x in (prob.hyper.theta_loc, prob.hyper.theta_scale))
        x = loc + scale * random.normal(key_theta, theta[m].shape, theta.dtype)
        return x, W, residual

    x = theta[m]
    if theta.size:
        x, W, residual = jax.lax.cond(is_used, draw_used, draw_idle)
    covariance = multitask.covariance(prob, m, x)
    t = jnp.ones((), w.dtype)
    if moves is not None:

        def draw_others():
            L: Any = covariance.cholesky(root.diagonal[0])
            solve, mean = partial(covariance.solve_lower, L), root.times(mu[None])
            return draw_columns(
                key_columns, prob, prior, phi, W, others, w[:, None], root, mean, solve, residual
            )

        W, residual = jax.lax.cond(is_used, draw_others, lambda: (W, residual))
        own = Prior(prior.log_odds[:, m], prior.variance[:, m])
        log_prior = moves.log_prior_of_noise
        unit = prob._replace(Z=Z * noise**2)

        def step(carry, key):
            new = join_or_leave(key, unit, covariance, residual, mu, own, log_prior, *carry)
            return new, None

        def change_users():
            return jax.lax.scan(step, (w, noise), random.split(key_users, NUM_CHANGES))[0]

        w, noise = jax.lax.cond(jnp.sum(w != 0) <= MAX_USERS, change_users, lambda: (w, noise))
        Z = unit.Z / noise**2
        prob, root = prob._replace(Z=Z), Root.of(Z, w[:, None])
        if moves.rescale:
            y = root.whiten(linear_terms(prob, residual, w[:, None]))
            length = partial(draw_length, key_length, covariance, root, y, mu, w, own)
            t = jax.lax.cond(jnp.any(w != 0), length, lambda: t)
        if moves.flip:
            t *= random.rademacher(key_sign, (), t.dtype)
    w = t * w
    h = linear_terms(prob, residual, w[:, None])[0]
    new = latent.sample(key_phi, covariance, (t * root.diagonal[0]) ** 2, h, mu)
    draw = Draw(phi.at[m].set(new), theta.at[m].set(x), W.at[:, m].set(w), slab_scales, noise)
    return draw, residual - jnp.outer(new, w), Z


def log_evidence(
    root: Root,
    y: Float[Array, " N"],
    mu: Float[Array, " N"],
    covariance: Covariance,
    column: Column | None = None,
) -> Float[Array, ""]:
    """Log density of ``y`` with the function integrated out, up to what depends on ``y`` alone.

    :param column: if given, the slabs of these weights are integrated out, too.
    """
    L: Any = covariance.cholesky(root.diagonal[0])
    y = (y - root.times(mu[None]))[:, None]
    half = covariance.solve_lower(L, y if column is None else jnp.hstack([y, column.seen]))
    value = -0.5 * half[:, 0] @ half[:, 0] - covariance.half_logdet(L)
    return value if column is None else value + slabs_of(column, half).log_evidence(column.spikes)


def draw_column_slabs(
    key: Array, root: Root, column: Column, mu: Float[Array, " N"], covariance: Covariance
) -> Float[Array, " B"]:
    """Draw a column's weights given their spikes, while the function is integrated out."""
    L: Any = covariance.cholesky(root.diagonal[0])
    half = covariance.solve_lower(
        L, jnp.column_stack([column.y - root.times(mu[None]), column.seen])
    )
    noise = random.normal(key, column.spikes.shape, column.spikes.dtype)
    return slabs_of(column, half).mean(column.spikes, noise)


def draw_parameters(
    key: Array,
    prob: Problem,
    m: Int[Array, ""],
    theta: Float[Array, " P"],
    evidence: Callable[[Covariance], Any],
) -> Float[Array, " P"]:
    """Slice sampling of the logs of a kernel's parameters, one after the other.

    :param evidence: the log evidence, given the prior covariance.
    """
    loc, scale = (jnp.asarray(x)[m] for x in (prob.hyper.theta_loc, prob.hyper.theta_scale))

    def log_joint(x):
        standard = jnp.where(scale > 0, (x - loc) / jnp.where(scale > 0, scale, 1), 0)
        return evidence(multitask.covariance(prob, m, x)) - 0.5 * standard @ standard

    def draw_parameter(p, carry):
        x, value = carry

        def move():
            x_p, reached = slice_sample(
                random.fold_in(key, p),
                lambda x_p: log_joint(x.at[p].set(x_p)),
                x[p],
                value,
                WIDTH_OF_PARAMETER * scale[p],
            )
            return x.at[p].set(x_p), reached

        return jax.lax.cond(scale[p] > 0, move, lambda: carry)

    return jax.lax.fori_loop(0, theta.size, draw_parameter, (theta, log_joint(theta)))[0]


def draw_length(
    key: Array,
    covariance: Covariance,
    root: Root,
    y: Float[Array, " N"],
    mu: Float[Array, " N"],
    w: Float[Array, " Q"],
    prior: Prior,
) -> Float[Array, ""]:
    """Draw the factor by which the length of a function's weights changes."""
    count, square = jnp.sum(w != 0), jnp.sum(w**2 / prior.variance)

    def log_density(log_t):
        t = jnp.exp(log_t)
        scaled = Root(t * root.diagonal, root.upper)
        return log_evidence(scaled, y, mu, covariance) + count * log_t - 0.5 * square * t**2

    zero = jnp.zeros((), w.dtype)
    log_t, _ = slice_sample(key, log_density, zero, log_density(zero), WIDTH_OF_LENGTH)
    return jnp.exp(log_t)


def join_or_leave(
    key: Array,
    prob: Problem,
    covariance: Covariance,
    residual: Float[Array, "N Q"],
    mu: Float[Array, " N"],
    prior: Prior,
    log_prior_of_noise: Callable[[Any, Any], Any] | None,
    w: Float[Array, " Q"],
    noise: Float[Array, " Q"],
) -> tuple[Float[Array, " Q"], Float[Array, " Q"]]:
    """Let a random task use a function or cease to, while the function is integrated out.

    The weight comes from its prior or, as often, from the noise: noise and weight then have the
    length that the noise had and a random angle, as befits a function that changes so fast that it
    is noise itself. Only functions with few users move so, the others' values are too well known.

    :param prob: the arrays; its precisions are those for noise of scale one.
    :param residual: what is left without the function.
    :param prior: prior of its weights.
    :param w: its weights.
    :return: the weights and the noise.
    """
    Q = w.size
    key_task, key_kind, key_weight, key_accept = random.split(key, 4)

    def log_choice(w):
        """Log probabilities with which tasks are chosen: half the time, one that is a user."""
        users = jnp.sum(w != 0)
        mine = jnp.where(users > 0, (w != 0) / jnp.maximum(users, 1), 1 / Q)
        return jnp.log(0.5 / Q + 0.5 * mine)

    q = random.categorical(key_task, log_choice(w))
    slab, before = jnp.sqrt(prior.variance[q]), noise[q]

    def log_joint(w_q, sigma):
        changed = w.at[q].set(w_q)
        at = prob._replace(Z=prob.Z / noise.at[q].set(sigma) ** 2)
        root = Root.of(at.Z, changed[:, None])
        y = root.whiten(linear_terms(at, residual, changed[:, None]))
        value = log_evidence(root, y, mu, covariance) + 0.5 * y @ y
        value -= 0.5 * at.Z[:, q] @ residual[:, q] ** 2 + jnp.sum(prob.Z[:, q]) * jnp.log(sigma)
        return value if log_prior_of_noise is None else value + log_prior_of_noise(sigma, q)

    joins = w[q] == 0
    from_noise = jnp.zeros((), bool)
    if log_prior_of_noise is not None:
        from_noise = random.bernoulli(key_kind)
    length = jnp.hypot(before, w[q])
    angle = jnp.pi * random.uniform(key_weight, (), w.dtype, -0.5, 0.5)
    drawn = slab * random.normal(key_weight, (), w.dtype)
    weight = jnp.where(from_noise, length * jnp.sin(angle), drawn)
    weight = jnp.where(joins, weight, w[q])
    noise_with = jnp.where(joins & from_noise, length * jnp.cos(angle), before)
    noise_without = jnp.where(from_noise, length, before)
    # the angle is uniform on half a circle, whose element of area is length times angle
    log_weight = norm.logpdf(weight, 0, slab)
    log_proposal = jnp.where(from_noise, -jnp.log(jnp.pi * length), log_weight)
    gain = log_joint(weight, noise_with) - log_joint(jnp.zeros_like(weight), noise_without)
    gain += prior.log_odds[q] + log_weight - log_proposal
    gain += log_choice(w.at[q].set(weight))[q] - log_choice(w.at[q].set(0))[q]
    is_allowed = jnp.sum(w.at[q].set(0) != 0) < MAX_USERS
    accepted = is_allowed & (jnp.where(joins, gain, -gain) > -random.exponential(key_accept))
    new = jnp.where(joins, weight, 0), jnp.where(joins, noise_with, noise_without)
    return (
        w.at[q].set(jnp.where(accepted, new[0], w[q])),
        noise.at[q].set(jnp.where(accepted, new[1], before)),
    )


def draw_two(key: Array, prob: Problem, draw: Draw, moves: Moves) -> Draw:
    """Draw two functions in use, chosen at random, after the weights of the others.

    The weights are drawn with both functions integrated out, so that they can move in two
    directions at once: zeros that hold each other in place along one give way.
    """
    phi, W = draw.phi, draw.weights
    key_slabs, key_pair, key_columns, *keys_prior, key_noise = random.split(key, 6)
    slab_scales, variance = moves.draw_slabs(key_slabs, draw.slab_scales, W)
    used = jnp.any(W != 0, axis=0)
    pair = jnp.argsort(jnp.where(used, random.uniform(key_pair, used.shape), 2))[:2]

    def move():
        w, N = W[:, pair], phi.shape[1]
        K: list[Any] = [multitask.covariance(prob, m, draw.theta[m]) for m in pair]
        root = Root.of(prob.Z, w)
        (first, second), upper = root.diagonal, root.upper
        beside = upper[:, None] * K[1].K * second
        above = first[:, None] * K[0].K * first + upper[:, None] * K[1].K * upper
        B = jnp.block([[above, beside], [beside.T, second[:, None] * K[1].K * second]])
        L = jnp.linalg.cholesky(B + jnp.eye(2 * N, dtype=B.dtype))
        # where rounding makes it singular, and that depends on what stays, nothing moves
        is_regular = jnp.isfinite(L[-1, -1])
        solve = partial(solve_triangular, L, lower=True)
        mean, residual = root.times(prob.mu[pair]), prob.Y - phi.T @ W.T + phi[pair].T @ w.T
        W_new, residual = draw_columns(
            key_columns,
            prob,
            Prior(moves.log_odds, variance),
            phi,
            W,
            used.at[pair].set(False),
            w,
            root,
            mean,
            solve,
            residual,
        )
        # Matheron's rule, as in latent.sample
        f = prob.mu[pair] + jnp.stack([K[i].draw(keys_prior[i]) for i in range(2)])
        y = root.whiten(linear_terms(prob, residual, w))
        error = y - root.times(f) - random.normal(key_noise, y.shape, y.dtype)
        u = root.transposed(solve(solve(error), trans=1))
        f += jnp.stack([K[i].matvec(u[i]) for i in range(2)])
        keep = lambda new, old: jnp.where(is_regular, new, old)  # noqa: E731
        return keep(phi.at[pair].set(f), phi), keep(W_new, W)

    phi, W = jax.lax.cond(jnp.sum(used) > 2, move, lambda: (phi, W))
    return draw._replace(phi=phi, weights=W, slab_scales=slab_scales)
