# SPDX-License-Identifier: Apache-2.0
r"""Variational EM of the spike-and-slab multi-task multiple-kernel GP model, on arrays.

The model of Titsias and Lazaro-Gredilla (2011), eq. (1):

.. math::

    y_{nq} \sim \mathcal{N}(\textstyle\sum_m w_{qm} \phi_{nm}, \sigma_q^2), \quad
    w_{qm} \sim \pi \mathcal{N}(0, \sigma_w^2) + (1 - \pi) \delta_0, \quad
    \phi_m \sim \mathcal{N}(\mu_m, K_m(\theta_m)),

under :math:`q = \prod_{qm} q(\tilde w_{qm}, s_{qm}) \prod_m q(\phi_m)`, eq. (8).
:func:`sweep_plain` is the algorithm of the paper's supplement; :func:`sweep` adds the scale of a
latent function to its marginalised step; :func:`stages` adds moves between local optima, each
accepted by the exact bound.  Axes: ``N`` inputs, ``Q`` tasks, ``M`` latent functions, ``P``
log-parameters of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
import math
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int
import numpy as np

import jax
import jax.numpy as jnp
from jax.scipy.special import betaln, xlog1py, xlogy
from jax.tree_util import Partial
from jax.typing import ArrayLike

from numpyro_spikeslab import latent
from numpyro_spikeslab.paired import PairedMeanField, Prior, expectation, scale_mode, task_sweep

Kernel = Callable[[Float[Array, " P"]], latent.Covariance | Float[Array, "N N"]]

Roughness = Callable[[Float[Array, "M N"]], Float[Array, "M N"]]

# Inputs beyond which a matrix of their similarities would be too large.
MAX_GRAPH = 4000
# A function that explains less than this (in nats) keeps q(phi_m) or returns it to its prior.
SILENT = 1e-3
LOG_ROOT_2PI = 0.5 * math.log(2 * math.pi)
# A proposal that is this many nats behind after a few sweeps is given up.
HOPELESS = 60.0
# Functions form two groups where the log of their roughness jumps by more than this.
SPLIT = 0.7


class Hyper(NamedTuple):
    r"""Priors of the hyperparameters, each of which is at its maximum a posteriori.

    The defaults are flat: type-II maximum likelihood, as in the paper.

    :param noise: scale of the HalfNormal prior of the noise standard deviations.
    :param slab: scale of the HalfNormal prior of the slab's standard deviation.
    :param included: first concentration of the Beta prior of ``pi``.
    :param excluded: second concentration of that prior.
    :param theta_loc: location of the LogNormal priors of the kernel parameters.
    :param theta_scale: their scale; zero where a parameter is fixed at its start.
    :param fixed_noise: noise standard deviations that are known, NaN where they are not.
    :param fixed_slab: the slab's standard deviation if it is known, else NaN.
    :param fixed_inclusion: ``pi`` if it is known, else NaN.
    :param shared_noise: whether all tasks have the same noise.
    :param shared_inclusion: whether all functions have the same ``pi``.
    """

    noise: ArrayLike = jnp.inf
    slab: ArrayLike = jnp.inf
    included: ArrayLike = 1.0
    excluded: ArrayLike = 1.0
    theta_loc: ArrayLike = 0.0
    theta_scale: ArrayLike = jnp.inf
    fixed_noise: ArrayLike = jnp.nan
    fixed_slab: ArrayLike = jnp.nan
    fixed_inclusion: ArrayLike = jnp.nan
    shared_noise: ArrayLike = False
    shared_inclusion: ArrayLike = True


class Mixed(NamedTuple):
    """Several kernels and which of them each function has; compiled once for each kernel.

    :param kernels: the distinct kernels.
    :param which: ``(M,)``, positions in ``kernels``.
    """

    kernels: tuple[Kernel, ...]
    which: Int[Array, " M"]


class Problem(NamedTuple):
    """Data and prior; build it with :func:`problem`.

    :param Y: ``(N, Q)``, zero where missing.
    :param Z: ``(N, Q)``, 1 where observed; ``(N, 1)`` when all tasks are observed together.
    :param kernel: one kernel shared by all functions, or several.
    :param mu: ``(M, N)``, prior means of the latent functions.
    :param hyper: priors of the hyperparameters.
    :param held: values of other sites, which are already a part of ``Y`` and ``hyper``.
    :param log_density: their log density, a part of the bound.
    """

    Y: Float[Array, "N Q"]
    Z: Float[Array, " N #Q"]
    kernel: Kernel | Mixed
    mu: Float[Array, "M N"]
    hyper: Hyper = Hyper()
    held: Any = ()
    log_density: ArrayLike = 0.0


class State(NamedTuple):
    r"""Variational distribution and hyperparameters.

    :param gamma: ``(Q, M)``, inclusion probabilities :math:`q(s_{qm} = 1)`.
    :param mu: ``(Q, M)``, means of :math:`q(\tilde w_{qm} | s_{qm} = 1)`.
    :param v: ``(Q, M)``, its variances.
    :param alpha: ``(M, N)``, site precisions that define :math:`q(\phi_m)`.
    :param h: ``(M, N)``, site linear terms that define it.
    :param mean: ``(M, N)``, its means.
    :param var: ``(M, N)``, its marginal variances.
    :param kl: ``(M,)``, its divergence from the prior.
    :param theta: ``(M, P)``, log-parameters of the kernels.
    :param step: ``(M, P)``, current step of the search over ``theta``.
    :param sigma2: ``(Q,)``, noise variances.
    :param pi: ``(M,)``, prior inclusion probabilities.
    :param sigma_w2: slab variance.
    """

    gamma: Float[Array, "Q M"]
    mu: Float[Array, "Q M"]
    v: Float[Array, "Q M"]
    alpha: Float[Array, "M N"]
    h: Float[Array, "M N"]
    mean: Float[Array, "M N"]
    var: Float[Array, "M N"]
    kl: Float[Array, " M"]
    theta: Float[Array, "M P"]
    step: Float[Array, "M P"]
    sigma2: Float[Array, " Q"]
    pi: Float[Array, " M"]
    sigma_w2: Float[Array, ""]

    @property
    def W(self) -> Float[Array, "Q M"]:
        return self.gamma * self.mu

    @property
    def W2(self) -> Float[Array, "Q M"]:
        return self.gamma * (self.mu**2 + self.v)


class Gram(NamedTuple):
    r"""Sums over the observed inputs of each task.

    :param G: ``(Q, M, M)``, :math:`\sum_n z_{nq} \langle\phi_{nm}\rangle\langle\phi_{nk}\rangle`;
        the leading axis is 1 when all tasks share their observed inputs.
    :param c: ``(Q, M)``, :math:`\sum_n z_{nq} \mathrm{var}(\phi_{nm})`, likewise.
    :param b: ``(Q, M)``, :math:`\sum_n z_{nq} y_{nq} \langle\phi_{nm}\rangle`.
    """

    G: Float[Array, "#Q M M"]
    c: Float[Array, "#Q M"]
    b: Float[Array, "Q M"]


def problem(
    Y: ArrayLike,
    kernel: Kernel | tuple[Kernel, ...] | Mixed,
    M: int,
    mu: ArrayLike | None = None,
    hyper: Hyper | None = None,
) -> Problem:
    """Data and prior of the model.

    :param Y: ``(N, Q)``, NaN where missing.
    :param kernel: maps ``(P,)`` log-parameters to a covariance of :mod:`latent` or an ``(N, N)``
        matrix; one for all functions, a tuple of ``M`` or :class:`Mixed`. A
        ``jax.tree_util.Partial`` over arrays (inputs, precomputed matrices) compiles once for all
        arrays of the same shapes.
    :param M: number of latent functions.
    :param mu: ``(M, N)``, prior means, zero if not given.
    :param hyper: priors of the hyperparameters, flat if not given.
    """
    Y = jnp.asarray(Y, float)
    observed = ~jnp.isnan(Y)
    complete = bool(jnp.all(observed == observed[:, :1]))
    Z = (observed[:, :1] if complete else observed).astype(Y.dtype)
    mu = jnp.zeros((M, Y.shape[0]), Y.dtype) if mu is None else jnp.asarray(mu, Y.dtype)
    if isinstance(kernel, tuple) and not isinstance(kernel, Mixed):
        kernel = Mixed(kernel, jnp.arange(M))
    if isinstance(kernel, Mixed):
        kernel = kernel._replace(kernels=tuple(map(_as_pytree, kernel.kernels)))
    else:
        kernel = _as_pytree(kernel)
    return Problem(jnp.where(observed, Y, 0), Z, kernel, mu, as_arrays(hyper or Hyper(), Y))


def as_arrays(hyper: Hyper, Y: Float[Array, "N Q"]) -> Hyper:
    """The same priors in arrays of fixed shapes, so that all share one compilation."""
    hyper = Hyper(*(jnp.asarray(x, Y.dtype) for x in hyper))
    noise = jnp.broadcast_to(hyper.fixed_noise, Y.shape[1:])
    return hyper._replace(
        fixed_noise=noise,
        shared_noise=jnp.asarray(hyper.shared_noise) > 0,
        shared_inclusion=jnp.asarray(hyper.shared_inclusion) > 0,
    )


def _as_pytree(kernel: Kernel) -> Partial:
    # Wrapping a Partial again would hide its arrays and compile anew for each of them.
    return kernel if isinstance(kernel, Partial) else Partial(kernel)


def covariance(
    prob: Problem, m: Int[Array, ""] | int, theta: Float[Array, " P"]
) -> latent.Covariance:
    """Prior covariance of function ``m``."""
    if isinstance(prob.kernel, Mixed):
        branches = [lambda x, k=k: latent.as_covariance(k(x)) for k in prob.kernel.kernels]
        return jax.lax.switch(prob.kernel.which[m], branches, theta)
    return latent.as_covariance(prob.kernel(theta))


def _prior_variances(prob: Problem, theta: Float[Array, "M P"]) -> Float[Array, "M N"]:
    numbers = jnp.arange(theta.shape[0])
    return jax.lax.map(lambda m: covariance(prob, m, theta[m]).diagonal(), numbers)


def gram(prob: Problem, state: State) -> Gram:
    """The sufficient statistics of the weights."""
    G = jnp.einsum("nq,mn,kn->qmk", prob.Z, state.mean, state.mean)
    return Gram(G, prob.Z.T @ state.var.T, prob.Y.T @ state.mean.T)


def _refresh_gram(prob: Problem, state: State, stats: Gram, m: Int[Array, ""] | int) -> Gram:
    row = prob.Z.T @ (state.mean * state.mean[m]).T
    return Gram(
        stats.G.at[:, m].set(row).at[:, :, m].set(row),
        stats.c.at[:, m].set(prob.Z.T @ state.var[m]),
        stats.b.at[:, m].set(prob.Y.T @ state.mean[m]),
    )


def _over_tasks(prob: Problem, x: Float[Array, " Q *K"]) -> Float[Array, " N *K"]:
    """``sum_q z_nq x_q``."""
    shared = prob.Z.shape[1] == 1
    return prob.Z @ (jnp.sum(x, axis=0, keepdims=True) if shared else x)


def explained(stats: Gram, state: State) -> Float[Array, " M"]:
    r"""What each function explains, :math:`\sum_{nq} z_{nq} (\langle w_{qm}\rangle
    \langle\phi_{nm}\rangle)^2 / \sigma_q^2`."""
    own = jnp.diagonal(stats.G, axis1=1, axis2=2)
    return jnp.sum(state.W**2 * own / state.sigma2[:, None], axis=0)


# E-step


def pair_prior(state: State) -> Prior:
    """Prior of the pairs."""
    log_odds = jnp.log(state.pi) - jnp.log1p(-state.pi)
    return Prior(*(jnp.broadcast_to(x, state.gamma.shape) for x in (log_odds, state.sigma_w2)))


def update_weights(stats: Gram, state: State) -> State:
    """One pass over the latent functions of ``q(w_qm, s_qm)``, all tasks at once (eq. 7)."""
    squares = stats.G + stats.c[:, None] * jnp.eye(state.gamma.shape[1])[None]
    found = task_sweep(
        squares, stats.b, state.W, 1 / state.sigma2, pair_prior(state), expectation()
    )
    return state._replace(gamma=jax.nn.sigmoid(found.logit), mu=found.loc, v=found.variance)


def _refit_weights(prob: Problem, state: State, num_passes: int) -> State:
    """Passes over the weights, each with its hyperparameters, while the functions stay."""
    stats = gram(prob, state)

    def pass_weights(_, state):
        return update_hyperparameters(prob, stats, update_weights(stats, state))

    return jax.lax.fori_loop(0, num_passes, pass_weights, state)


def sites(
    prob: Problem, state: State, m: Int[Array, ""] | int
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Precision and linear term that the tasks give to function ``m``, both ``(N,)``."""
    W = state.W.at[:, m].set(0)
    w = state.W[:, m] / state.sigma2
    alpha = _over_tasks(prob, state.W2[:, m] / state.sigma2)
    h = prob.Y @ w - jnp.sum(_over_tasks(prob, w[:, None] * W) * state.mean.T, axis=1)
    return alpha, h


def update_function_plain(prob: Problem, state: State, m: Int[Array, ""] | int) -> State:
    """Joint update of ``q(phi_m)`` and ``theta_m`` (supplement 1.3)."""
    alpha, h = sites(prob, state, m)

    def value(theta):
        log_f = latent.log_evidence(covariance(prob, m, theta), alpha, h, prob.mu[m])
        return log_f + _log_prior_theta(prob, state, m, theta)

    theta, step = _search(value, state.theta[m], value(state.theta[m]), _free_step(prob, state, m))
    return _condition(prob, state, m, theta, step, alpha, h)


def update_function(prob: Problem, state: State, m: Int[Array, ""] | int) -> State:
    r"""Joint update of ``q(phi_m)``, ``theta_m``, the scale of ``w_.m`` and ``sigma_w2``.

    With :math:`w_{\cdot m} \to \sqrt t\, w_{\cdot m}` the sites become
    :math:`t \alpha, \sqrt t\, h`, and with :math:`q(\phi_m)` integrated and :math:`\sigma_w^2` at
    its optimum the bound is a function of :math:`(\theta_m, t)` alone.
    """
    alpha, h = sites(prob, state, m)
    B = jnp.sum(state.W2, axis=0)
    share = B[m] / jnp.sum(B)
    G = jnp.sum(state.gamma, axis=0)

    def value(theta, t):
        log_f = latent.log_evidence(
            covariance(prob, m, theta), t * alpha, jnp.sqrt(t) * h, prob.mu[m]
        )
        slab = 0.5 * G[m] * jnp.log(t) + slab_term(t) - slab_term(1.0)
        return log_f + slab + _log_prior_theta(prob, state, m, theta)

    def slab_variance(t):
        total = jnp.sum(B) * (1 + share * (t - 1))
        return _slab_variance(prob, state, jnp.sum(G), total), total

    def slab_term(t):
        variance, total = slab_variance(t)
        log_density = -0.5 * (jnp.sum(G) * jnp.log(variance) + total / variance)
        return log_density - 0.5 * variance / prob.hyper.slab**2

    theta = state.theta[m]
    scale = _stationary_scale(prob, state, m, G[m], jnp.sum(G), share)
    scaled = value(theta, scale)
    current = _expected_sites(alpha, h, state.mean[m], state.var[m]) - state.kl[m]
    # At t = 1 the value cannot be below what the present q(phi_m) gives.
    t, best = jax.lax.cond(
        scaled >= current + _log_prior_theta(prob, state, m, theta),
        lambda: (scale, scaled),
        lambda: (jnp.ones_like(scale), value(theta, 1.0)),
    )
    theta, step = _search(lambda x: value(x, t), theta, best, _free_step(prob, state, m))
    state = state._replace(
        mu=state.mu.at[:, m].multiply(jnp.sqrt(t)),
        v=state.v.at[:, m].multiply(t),
        sigma_w2=slab_variance(t)[0],
    )
    return _condition(prob, state, m, theta, step, t * alpha, jnp.sqrt(t) * h)


def _stationary_scale(
    prob: Problem,
    state: State,
    m: Int[Array, ""] | int,
    G_m: Float[Array, ""],
    G_all: Float[Array, ""],
    share: Float[Array, ""],
) -> Float[Array, ""]:
    """Positive root of ``Qf/t - dof + G_m - G_all t share / (1 - share + t share) = 0``.

    That is the best scale under a flat prior of the slab, and a good proposal under any other.
    """
    deviation = state.mean[m] - prob.mu[m]
    Qf = deviation @ (state.h[m] - state.alpha[m] * state.mean[m])
    excess = G_m - state.alpha[m] @ state.var[m]
    quadratic = share * (excess - G_all)
    linear = Qf * share + excess * (1 - share)
    constant = Qf * (1 - share)
    root = (linear + jnp.sqrt(linear**2 - 4 * quadratic * constant)) / (-2 * quadratic)
    return jnp.clip(jnp.nan_to_num(root, nan=1.0), 1e-2, 1e2)


def _condition(
    prob: Problem,
    state: State,
    m: Int[Array, ""] | int,
    theta: Float[Array, " P"],
    step: Float[Array, " P"],
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
) -> State:
    """Set ``q(phi_m)`` to its optimum under the given kernel parameters and sites."""
    q = latent.condition(covariance(prob, m, theta), alpha, h, prob.mu[m])
    return state._replace(
        alpha=state.alpha.at[m].set(alpha),
        h=state.h.at[m].set(h),
        mean=state.mean.at[m].set(q.mean),
        var=state.var.at[m].set(q.variance),
        kl=state.kl.at[m].set(q.kl),
        theta=state.theta.at[m].set(theta),
        step=state.step.at[m].set(step),
    )


def _free_step(prob: Problem, state: State, m: Int[Array, ""] | int) -> Float[Array, " P"]:
    """Step of the search over ``theta_m``, zero for the parameters that are fixed."""
    scale = jnp.broadcast_to(jnp.asarray(prob.hyper.theta_scale), state.theta.shape)
    return jnp.where(scale[m] > 0, state.step[m], 0)


def _log_prior_theta(
    prob: Problem, state: State, m: Int[Array, ""] | int, theta: Float[Array, " P"]
) -> Float[Array, ""]:
    """Log density of the kernel parameters ``exp(theta)`` of one function."""
    loc = jnp.broadcast_to(jnp.asarray(prob.hyper.theta_loc), state.theta.shape)[m]
    scale = jnp.broadcast_to(jnp.asarray(prob.hyper.theta_scale), state.theta.shape)[m]
    proper = (scale > 0) & jnp.isfinite(scale)
    scale = jnp.where(proper, scale, 1)
    log_density = -theta - 0.5 * ((theta - loc) / scale) ** 2 - jnp.log(scale) - LOG_ROOT_2PI
    return jnp.sum(jnp.where(proper, log_density, 0))


def _search(
    value: Callable[[Float[Array, " P"]], Float[Array, ""]],
    theta: Float[Array, " P"],
    best: Float[Array, ""],
    step: Float[Array, " P"],
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Climb ``value`` by a parabola along each coordinate, never below ``best = value(theta)``."""

    def along(p, carry):
        # a fixed parameter costs nothing
        return jax.lax.cond(carry[2][p] > 0, lambda: free(p, carry), lambda: carry)

    def free(p, carry):
        theta, best, step = carry

        # a loop, so that the value is compiled once
        def trial(k, tried):
            offsets, values = tried
            _, below, above, _ = values
            curvature = below - 2 * best + above
            uphill = 2 * jnp.sign(above - below)
            vertex = jnp.where(curvature < 0, 0.5 * (below - above) / curvature, uphill)
            offset = jnp.where(k == 3, jnp.clip(vertex, -2, 2), offsets[k])
            reached = value(theta.at[p].add(offset * step[p]))
            return offsets.at[k].set(offset), values.at[k].set(reached)

        offsets = jnp.array([0.0, -1.0, 1.0, 0.0], theta.dtype)
        offsets, values = jax.lax.fori_loop(1, 4, trial, (offsets, jnp.full(4, best)))
        winner = jnp.argmax(jnp.nan_to_num(values, nan=-jnp.inf))
        moved = offsets[winner] * step[p]
        wider = jnp.clip(2 * jnp.abs(offsets[winner]), 0.25, 2) * step[p]
        return (
            theta.at[p].add(moved),
            values[winner],
            step.at[p].set(jnp.clip(wider, 1e-3, 2)),
        )

    if not theta.size:
        return theta, step
    theta, _, new = jax.lax.fori_loop(0, theta.size, along, (theta, best, step))
    return theta, new


def _prior_is_better(prob: Problem, state: State, m: Int[Array, ""] | int) -> Bool[Array, ""]:
    """Whether the bound does not fall when ``q(phi_m)`` returns to its prior."""
    alpha, h = sites(prob, state, m)
    prior_var = covariance(prob, m, state.theta[m]).diagonal()
    current = _expected_sites(alpha, h, state.mean[m], state.var[m]) - state.kl[m]
    return _expected_sites(alpha, h, prob.mu[m], prior_var) >= current


def _expected_sites(
    alpha: Float[Array, " N"],
    h: Float[Array, " N"],
    mean: Float[Array, " N"],
    var: Float[Array, " N"],
) -> Float[Array, ""]:
    """Expectation of the log of a function's sites."""
    return h @ mean - 0.5 * alpha @ (mean**2 + var)


def _to_prior(prob: Problem, state: State, m: Int[Array, ""] | int) -> State:
    zero = jnp.zeros_like(prob.mu[m])
    return state._replace(
        alpha=state.alpha.at[m].set(zero),
        h=state.h.at[m].set(zero),
        mean=state.mean.at[m].set(prob.mu[m]),
        var=state.var.at[m].set(covariance(prob, m, state.theta[m]).diagonal()),
        kl=state.kl.at[m].set(0),
    )


# M-step and bound


def _squared_error(prob: Problem, stats: Gram, state: State) -> Float[Array, " Q"]:
    """Expected squared error of each task over its observed entries."""
    W, own = state.W, jnp.diagonal(stats.G, axis1=1, axis2=2)
    fit = jnp.einsum("qm,qmk,qk->q", W, jnp.broadcast_to(stats.G, (*W.shape, W.shape[1])), W)
    spread = jnp.sum(state.W2 * (own + stats.c) - W**2 * own, axis=1)
    return jnp.sum(prob.Y**2, axis=0) - 2 * jnp.sum(W * stats.b, axis=1) + fit + spread


def _num_observed(prob: Problem) -> Float[Array, " Q"]:
    return jnp.broadcast_to(jnp.sum(prob.Z, axis=0), prob.Y.shape[1:])


def _slab_variance(
    prob: Problem, state: State, count: Float[Array, ""], squares: Float[Array, ""]
) -> Float[Array, ""]:
    """Best slab variance given the sums of ``gamma`` and of ``<w^2>``."""
    known = count > SILENT
    best = scale_mode(jnp.where(known, count, 1), squares, prob.hyper.slab)
    best = jnp.where(known, best, state.sigma_w2)
    fixed = jnp.asarray(prob.hyper.fixed_slab)
    return jnp.where(jnp.isnan(fixed), best, fixed**2)


def update_hyperparameters(prob: Problem, stats: Gram, state: State) -> State:
    """Closed-form M-step for the noise variances, ``pi`` and ``sigma_w2`` (supplement 1.2).

    A task without observations keeps its noise.
    """
    hyper = prob.hyper
    eps = jnp.finfo(prob.Y.dtype).eps
    num, squares = _num_observed(prob), _squared_error(prob, stats, state)
    floor = eps * jnp.sum(prob.Y**2) / jnp.maximum(jnp.sum(num), 1) + jnp.finfo(prob.Y.dtype).tiny
    num = jnp.where(hyper.shared_noise, jnp.sum(num), num)
    squares = jnp.where(hyper.shared_noise, jnp.sum(squares), squares)
    sigma2 = jnp.maximum(scale_mode(jnp.maximum(num, 1), squares, hyper.noise), floor)
    sigma2 = jnp.where(num > 0, sigma2, state.sigma2)
    chosen = jnp.sum(state.gamma, axis=0)
    chosen = jnp.where(hyper.shared_inclusion, jnp.sum(chosen), chosen)
    total = jnp.where(hyper.shared_inclusion, state.gamma.size, state.gamma.shape[0])
    pi = (chosen + hyper.included - 1) / (total + hyper.included + hyper.excluded - 2)
    pi = jnp.clip(pi, eps, 1 - eps)
    count, second = jnp.sum(state.gamma), jnp.sum(state.W2)
    state = state._replace(
        sigma2=sigma2, pi=pi, sigma_w2=_slab_variance(prob, state, count, second)
    )
    return hold_fixed(prob, state)


def hold_fixed(prob: Problem, state: State) -> State:
    """Set the hyperparameters that are known."""
    noise, slab, pi = map(
        jnp.asarray, (prob.hyper.fixed_noise, prob.hyper.fixed_slab, prob.hyper.fixed_inclusion)
    )
    return state._replace(
        sigma2=jnp.where(jnp.isnan(noise), state.sigma2, noise**2),
        sigma_w2=jnp.where(jnp.isnan(slab), state.sigma_w2, slab**2),
        pi=jnp.where(jnp.isnan(pi), state.pi, pi),
    )


def _log_half_normal(variance: Float[Array, "*Q"], scale: ArrayLike) -> Float[Array, "*Q"]:
    """Log density of a standard deviation; zero under a flat prior."""
    proper = jnp.isfinite(jnp.asarray(scale))
    log_density = 0.5 * jnp.log(2 / jnp.pi) - jnp.log(scale) - 0.5 * variance / scale**2
    return jnp.where(proper, log_density, 0)


def log_prior(prob: Problem, state: State) -> Float[Array, ""]:
    """Log density of the hyperparameters."""
    hyper, numbers = prob.hyper, jnp.arange(state.kl.size)
    noise = jnp.where(
        jnp.isnan(jnp.asarray(hyper.fixed_noise)), _log_half_normal(state.sigma2, hyper.noise), 0
    )
    noise = jnp.where(hyper.shared_noise, noise[0], jnp.sum(noise))
    slab = _log_half_normal(state.sigma_w2, hyper.slab)
    a, b = hyper.included, hyper.excluded
    pi = xlogy(a - 1, state.pi) + xlog1py(b - 1, -state.pi) - betaln(a, b)
    pi = jnp.where(hyper.shared_inclusion, pi[0], jnp.sum(pi))
    theta = jax.vmap(lambda m: _log_prior_theta(prob, state, m, state.theta[m]))(numbers)
    return (
        noise
        + jnp.where(jnp.isnan(jnp.asarray(hyper.fixed_slab)), slab, 0)
        + jnp.where(jnp.all(jnp.isnan(jnp.asarray(hyper.fixed_inclusion))), pi, 0)
        + jnp.sum(theta)
        + prob.log_density
    )


def bound(prob: Problem, state: State) -> Float[Array, ""]:
    """The variational lower bound on ``log p(Y)``, exact (supplement, eq. 2).

    The log density of the hyperparameters is added, where they have priors.
    """
    stats = gram(prob, state)
    fit = _num_observed(prob) * jnp.log(2 * jnp.pi * state.sigma2)
    fit = -0.5 * jnp.sum(fit + _squared_error(prob, stats, state) / state.sigma2)
    pairs = PairedMeanField(*map(jnp.ravel, (state.gamma, state.mu, jnp.sqrt(state.v))))
    prior = Prior(*(x.ravel() for x in pair_prior(state)))
    return fit - pairs.divergence(prior) - jnp.sum(state.kl) + log_prior(prob, state)


# Sweeps


def sweep_plain(prob: Problem, state: State) -> State:
    """The variational EM iteration of the paper: functions, weights, hyperparameters."""
    M = state.gamma.shape[1]
    state = jax.lax.fori_loop(0, M, lambda m, s: update_function_plain(prob, s, m), state)
    stats = gram(prob, state)
    return update_hyperparameters(prob, stats, update_weights(stats, state))


def sweep(prob: Problem, state: State) -> State:
    """Functions with their scales, all weights after each of them, hyperparameters."""

    def refresh(m, carry):
        state, stats = carry
        state = update_function(prob, state, m)
        stats = _refresh_gram(prob, state, stats, m)
        return update_weights(stats, state), stats

    def rest(m, carry):
        state, stats = carry
        better = _prior_is_better(prob, state, m)
        state = jax.lax.cond(better, lambda: _to_prior(prob, state, m), lambda: state)
        return state, _refresh_gram(prob, state, stats, m)

    def visit(m, carry):
        # Only what explains something is worth a factorisation.
        silent = explained(carry[1], carry[0])[m] < SILENT
        return jax.lax.cond(silent, rest, refresh, m, carry)

    state, stats = jax.lax.fori_loop(0, state.kl.size, visit, (state, gram(prob, state)))
    state = jax.lax.fori_loop(0, 2, lambda _, s: update_weights(stats, s), state)
    return update_hyperparameters(prob, stats, state)


@partial(jax.jit, static_argnames=("sweep", "size"))
def _run(
    prob: Problem,
    state: State,
    num_sweeps: ArrayLike,
    sweep: Callable[[Problem, State], State],
    size: int,
) -> tuple[State, Float[Array, " size"]]:
    def body(k, carry):
        state, bounds = carry
        state = sweep(prob, state)
        return state, bounds.at[k].set(bound(prob, state))

    bounds = jnp.full(size, jnp.nan, prob.Y.dtype)
    return jax.lax.fori_loop(0, num_sweeps, body, (state, bounds))


def run(
    prob: Problem,
    state: State,
    num_sweeps: int,
    sweep: Callable[[Problem, State], State] = sweep,
) -> tuple[State, Float[Array, " num_sweeps"]]:
    """Repeat a sweep; also the bound after each.

    Up to twelve sweeps share one compilation.

    :param num_sweeps: number of sweeps.
    :param sweep: :func:`sweep` or :func:`sweep_plain`.
    """
    state, bounds = _run(prob, state, num_sweeps, sweep, max(num_sweeps, 12))
    return state, bounds[:num_sweeps]


# Starts


def start_prior(
    prob: Problem,
    theta: Float[Array, "M P"],
    W: Float[Array, "Q M"],
    sigma2: Float[Array, " Q"],
) -> State:
    """Given weights and functions at their prior; a zero column of ``W`` is switched off.

    :param theta: ``(M, P)``, log-parameters of the kernels.
    :param W: ``(Q, M)``
    :param sigma2: ``(Q,)``, noise variances.
    """
    gamma = jnp.where(jnp.any(W != 0, axis=0), 0.9, 0.0) * jnp.ones_like(W)
    mu = W / 0.9
    v = jnp.ones_like(W) * (sigma2 / prob.Y.shape[0])[:, None]
    zero = jnp.zeros_like(prob.mu)
    M = theta.shape[0]
    var = _prior_variances(prob, theta)
    state = State(
        gamma=gamma,
        mu=mu,
        v=v,
        alpha=zero,
        h=zero,
        mean=prob.mu,
        var=var,
        kl=jnp.zeros(M),
        theta=theta,
        step=jnp.full_like(theta, 0.3),
        sigma2=sigma2,
        pi=jnp.full(M, jnp.mean(gamma)),
        sigma_w2=jnp.sum(gamma * (mu**2 + v)) / jnp.maximum(jnp.sum(gamma), 1e-10),
    )
    return hold_fixed(prob, state)


@jax.jit
def start(
    prob: Problem,
    theta: Float[Array, "M P"],
    W: Float[Array, "Q M"],
    phi: Float[Array, "M N"],
    sigma2: Float[Array, " Q"],
) -> State:
    """Given weights and functions; a zero column of ``W`` is switched off.

    The kernel of a function is fitted to its row of ``phi``, seen with noise of a hundredth of its
    power.

    :param theta: ``(M, P)``, log-parameters where the search for those of each kernel starts.
    :param W: ``(Q, M)``
    :param phi: ``(M, N)``
    :param sigma2: ``(Q,)``, noise variances.
    """
    power = jnp.mean((phi - prob.mu) ** 2, axis=1)

    def fit_kernel(m, state):
        alpha = jnp.full_like(phi[m], 100 / power[m])
        h = alpha * phi[m]

        def value(theta):
            log_f = latent.log_evidence(covariance(prob, m, theta), alpha, h, prob.mu[m])
            return log_f + _log_prior_theta(prob, state, m, theta)

        def climb(_, search):
            return _search(value, search[0], value(search[0]), search[1])

        search = (state.theta[m], jnp.sign(_free_step(prob, state, m)))
        theta, _ = jax.lax.fori_loop(0, 5, climb, search)
        return _condition(prob, state, m, theta, state.step[m], alpha, h)

    def visit(m, state):
        on = jnp.any(W[:, m] != 0) & (power[m] > 0)
        return jax.lax.cond(on, fit_kernel, lambda m, s: s, m, state)

    return jax.lax.fori_loop(0, theta.shape[0], visit, start_prior(prob, theta, W, sigma2))


def _power(prob: Problem) -> Float[Array, " Q"]:
    """Mean square of each task over its observed entries, never zero.

    That of a task without observations, or with nothing but zeros, is the mean of all.
    """
    num, squares = _num_observed(prob), jnp.sum(prob.Y**2, axis=0)
    mean = jnp.sum(squares) / jnp.maximum(jnp.sum(num), 1)
    return jnp.where(squares > 0, squares / jnp.maximum(num, 1), jnp.where(mean > 0, mean, 1))


@jax.jit
def start_alone(prob: Problem, theta: Float[Array, "M P"]) -> State:
    """All functions switched off."""
    power = _power(prob)
    return start_prior(prob, theta, jnp.zeros((power.size, theta.shape[0])), power)


@jax.jit
def start_random(key: Array, prob: Problem, theta: Float[Array, "M P"]) -> State:
    """Random weights and the functions that follow from them.

    The noise starts small: a large one would switch off most functions at once.
    """
    M, Q = theta.shape[0], prob.Y.shape[1]
    power = _power(prob)
    W = jnp.sqrt(power / M)[:, None] * jax.random.normal(key, (Q, M), power.dtype)
    state = start_prior(prob, theta, W, 0.1 * power)
    return jax.lax.fori_loop(0, M, lambda m, s: update_function_plain(prob, s, m), state)


def start_svd(prob: Problem, theta: Float[Array, "M P"]) -> State:
    """The leading singular vectors of the tasks, scaled to unit power, missing entries zero."""
    W, phi = _singular_vectors(prob)
    return start(prob, theta, W, phi, 0.1 * _power(prob))


@jax.jit
def _singular_vectors(prob: Problem) -> tuple[Float[Array, "Q M"], Float[Array, "M N"]]:
    M, N = prob.mu.shape
    sd = jnp.sqrt(_power(prob))
    U, S, V = jnp.linalg.svd(prob.Y / sd, full_matrices=False)
    rank = min(M, S.size)
    phi = jnp.zeros((M, N)).at[:rank].set(U[:, :rank].T * jnp.sqrt(N))
    W = jnp.zeros((sd.size, M)).at[:, :rank].set(sd[:, None] * V[:rank].T * S[:rank] / jnp.sqrt(N))
    return W, phi + prob.mu


# Moves


def graph_laplacian(similarity: Float[Array, "N N"]) -> Float[Array, "N N"]:
    """``phi^T L phi`` is then half the sum of ``similarity_ij (phi_i - phi_j)^2``."""
    return jnp.diag(jnp.sum(similarity, axis=1)) - similarity


def _apply_matrix(L: Float[Array, "N N"], phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    return phi @ L


def _apply_path(order: Int[Array, " N"], phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Laplacian of the path through the inputs in order."""
    steps = jnp.diff(phi[:, order], axis=1)
    steps = jnp.pad(steps, ((0, 0), (1, 1)))
    return jnp.zeros_like(phi).at[:, order].set(steps[:, :-1] - steps[:, 1:])


def no_roughness(phi: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """For functions without order, such as those of a white process."""
    return jnp.zeros_like(phi)


def roughness_of_inputs(X: Float[Array, " N"] | Float[Array, "N D"]) -> Roughness:
    """Graph Laplacian of inputs, with similarities as wide as the distance of neighbours.

    Beyond :data:`MAX_GRAPH` inputs it is that of the path through inputs of one dimension, and
    for those of more there is no order.
    """
    X = jnp.reshape(X, (X.shape[0], -1))
    if X.shape[0] > MAX_GRAPH:
        return (
            Partial(_apply_path, jnp.argsort(X[:, 0])) if X.shape[1] == 1 else Partial(no_roughness)
        )
    X = X - jnp.mean(X, axis=0)
    norms = jnp.sum(X**2, axis=1)
    # as a product, for the differences of all inputs need D times the memory
    squared = jnp.maximum(norms[:, None] + norms - 2 * X @ X.T, 0)
    apart = squared > 1e-6 * jnp.max(squared) / X.shape[0] ** 2
    nearest = jnp.min(jnp.where(apart, squared, jnp.inf), axis=1)
    similarity = jnp.exp(-0.5 * squared / jnp.median(nearest))
    return Partial(_apply_matrix, graph_laplacian(similarity))


def is_active(prob: Problem, state: State) -> Bool[Array, " M"]:
    """Functions that some task includes and that explain more than a nat."""
    power = explained(gram(prob, state), state)
    return (jnp.max(state.gamma, axis=0) > 0.5) & (power > 1.0)


def varimax(
    A: Float[Array, "Q M"], group: Int[Array, " M"], num_rounds: int = 10
) -> Float[Array, "M M"]:
    """Orthogonal ``T`` that maximises the variances of ``(A T)^2``, rotating only inside groups.

    :param A: ``(Q, M)``, loadings.
    :param group: ``(M,)``, columns are rotated against columns of the same group; negative: never.
    """
    Q, M = A.shape
    first, second = jnp.triu_indices(M, 1)

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
    prob: Problem, state: State, active: Bool[Array, " M"], roughness: Roughness
) -> tuple[Float[Array, "M M"], Int[Array, " M"]]:
    """Uncorrelated combinations of the active functions in order of smoothness, and two groups.

    :param active: ``(M,)``, the others are left out (last, group -1).
    :param roughness: ``phi^T roughness(phi)`` orders the functions.
    :return: ``U`` with ``phi' = U^T phi``, and the group of each ``phi'``: smooth (0) or rough (1),
        split at the largest ratio of roughness.
    """
    phi = jnp.where(active[:, None], state.mean - prob.mu, 0)
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
    log_rough = jnp.log(jnp.maximum(rough, 1e-10 * last))
    gap = jnp.where(rank[1:] < number, jnp.diff(log_rough), -jnp.inf)
    group = jnp.where(rank <= jnp.argmax(gap), 0, 1)
    group = jnp.where(jnp.max(gap) > SPLIT, group, 0)
    return whiten @ V, jnp.where(rank < number, group, -1)


@partial(jax.jit, static_argnames=("num_angles", "num_passes"))
def sharpen(
    prob: Problem,
    state: State,
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
    M = group.size
    first, second = jnp.triu_indices(M, 1)
    angles = (jnp.arange(num_angles) / num_angles - 0.5) * jnp.pi / 2

    def turn(state, i, j, angle):
        c, s = jnp.cos(angle), jnp.sin(angle)
        T = jnp.eye(M).at[i, i].set(c).at[j, j].set(c).at[i, j].set(-s).at[j, i].set(s)
        grouped = group >= 0
        state = state._replace(
            gamma=jnp.where(grouped, 0.9, state.gamma),
            mu=jnp.where(grouped, state.W @ T / 0.9, state.mu),
            mean=prob.mu + T.T @ (state.mean - prob.mu),
            var=(T**2).T @ state.var,
        )
        return _refit_weights(prob, state, 3)

    def visit(k, state):
        i, j = first[k % first.size], second[k % first.size]

        def best_turn():
            reached = jax.lax.map(lambda angle: bound(prob, turn(state, i, j, angle)), angles)
            return turn(state, i, j, angles[jnp.argmax(reached)])

        together = (group[i] == group[j]) & (group[i] >= 0)
        return jax.lax.cond(together, best_turn, lambda: state)

    state = jax.lax.fori_loop(0, num_passes * first.size, visit, state)
    return state.W, state.mean


def rotate(prob: Problem, state: State, roughness: Roughness) -> State:
    """The 'sfaq' proposal: the active functions, smooth and rough ones apart, each group sparse.

    A new start from ``phi' = R phi``, ``W' = W R^-1``; all other functions are switched off.
    Inside a group varimax gives the rotation and :func:`sharpen` improves it.

    :param roughness: see :func:`unmix`.
    """
    W, phi, group = _simplify(prob, state, roughness)
    turned = start(prob, state.theta, W, phi, state.sigma2)
    W, phi = sharpen(prob, turned, group)
    return start(prob, turned.theta, W, phi, state.sigma2)


@jax.jit
def _simplify(
    prob: Problem, state: State, roughness: Roughness
) -> tuple[Float[Array, "Q M"], Float[Array, "M N"], Int[Array, " M"]]:
    """Turned weights and functions, and the group of each."""
    active = is_active(prob, state)
    U, group = unmix(prob, state, active, roughness)
    W = jnp.where(active, state.W, 0) @ jnp.linalg.inv(U).T
    T = varimax(W / jnp.sqrt(state.sigma2)[:, None], group)
    phi = (U @ T).T @ jnp.where(active[:, None], state.mean - prob.mu, 0)
    # The kernel of a function goes to the new one of the same rank in smoothness.
    deviation = state.mean - prob.mu
    own = jnp.sum(roughness(deviation) * deviation, axis=1) / jnp.sum(deviation**2, axis=1)
    slot = jnp.argsort(jnp.where(active, own, jnp.inf))
    W = jnp.zeros_like(W).at[:, slot].set(jnp.where(group >= 0, W @ T, 0))
    phi = prob.mu.at[slot].add(jnp.where(group[:, None] >= 0, phi, 0))
    return W, phi, jnp.full_like(group, -1).at[slot].set(group)


def switch_off(prob: Problem, state: State, keep: Bool[Array, " M"]) -> State:
    """Only the functions in ``keep`` stay; the others return to their prior, with zero weights."""
    var = _prior_variances(prob, state.theta)
    row = keep[:, None]
    return state._replace(
        gamma=jnp.where(keep, state.gamma, 0),
        alpha=jnp.where(row, state.alpha, 0),
        h=jnp.where(row, state.h, 0),
        mean=jnp.where(row, state.mean, prob.mu),
        var=jnp.where(row, state.var, var),
        kl=jnp.where(keep, state.kl, 0),
    )


@jax.jit
def drop(prob: Problem, state: State) -> State:
    """The 'drop' proposal: without the active function that is missed least, and inactive ones.

    It is the one without which the bound is highest after two passes over the weights.
    """
    active = is_active(prob, state)
    numbers = jnp.arange(active.size)

    def without(m):
        return switch_off(prob, state, active & (numbers != m))

    def bound_without(m):
        return bound(prob, _refit_weights(prob, without(m), 2))

    bounds = jax.lax.map(bound_without, numbers)
    return without(jnp.argmax(jnp.where(active, bounds, -jnp.inf)))


# Prediction


def predict(
    prob: Problem,
    state: State,
    K_star: Float[Array, "M S N"],
    k_star: Float[Array, "M S"],
    mu_star: Float[Array, "M S"] | float = 0.0,
) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
    """Mean and variance of the noise-free tasks at new inputs.

    :param K_star: ``(M, S, N)``, prior covariances between new and training inputs.
    :param k_star: ``(M, S)``, prior variances at the new inputs.
    :param mu_star: ``(M, S)``, prior means at the new inputs.
    """

    def function(m):
        prior = covariance(prob, m, state.theta[m])
        q = latent.condition(prior, state.alpha[m], state.h[m], prob.mu[m])
        return latent.predict(prior, state.alpha[m], q, K_star[m], k_star[m])

    deviation, var = jax.lax.map(function, jnp.arange(state.kl.size))
    return mix(state, mu_star + deviation, var)


def mix(
    state: State, mean: Float[Array, "M S"], var: Float[Array, "M S"]
) -> tuple[Float[Array, "S Q"], Float[Array, "S Q"]]:
    """Mean and variance of the tasks from those of the functions, at any inputs.

    :param mean: ``(M, S)``, for the training inputs ``state.mean``.
    :param var: ``(M, S)``, for the training inputs ``state.var``.
    """
    second = state.W2 @ (mean**2 + var) - state.W**2 @ mean**2
    return (state.W @ mean).T, second.T


# Fit


def move(
    prob: Problem, state: State, roughness: Roughness, num_sweeps: int
) -> tuple[State, Float[Array, ""], bool]:
    """One round of moves: the proposals and the state itself, each after as many sweeps.

    Those that are far behind after a third of the sweeps are given up.

    :param roughness: see :func:`unmix`.
    :return: the state with the best bound, that bound, and whether it comes from a proposal.
    """
    fewer = drop(prob, state)
    contenders = [state, rotate(prob, state, roughness), fewer, rotate(prob, fewer, roughness)]
    reached = np.zeros(len(contenders))
    heat = num_sweeps // 3
    for size in (heat, num_sweeps - heat):
        for k in range(len(contenders)):
            if reached[k] > -np.inf:
                contenders[k], bounds = run(prob, contenders[k], size)
                reached[k] = np.nan_to_num(bounds[-1], nan=-np.inf)
        reached[reached < np.max(reached) - HOPELESS] = -np.inf
    best = int(np.argmax(reached))
    return contenders[best], jnp.asarray(reached[best]), best > 0


Improve = Callable[[Problem, State], tuple[Problem, State, Float[Array, ""]]]
"""Finds better values of the sites that a problem holds; also the state and the bound there."""


class Stage(NamedTuple):
    """Some steps of a fit.

    :param problem: the problem after them.
    :param state: the state after them.
    :param bounds: the bound after each; a round of moves is one step.
    :param rejected: whether it is a round of moves without success.
    :param last: whether no moves follow.
    """

    problem: Problem
    state: State
    bounds: Float[Array, " num_steps"]
    rejected: bool = False
    last: bool = False


def advance(
    prob: Problem,
    state: State,
    num_sweeps: int,
    improve: Improve | None = None,
    sweep: Callable[[Problem, State], State] = sweep,
) -> tuple[Problem, State, Float[Array, " num_sweeps"]]:
    """Repeat a sweep, each followed by ``improve`` where there is something to improve."""
    if improve is None:
        return prob, *run(prob, state, num_sweeps, sweep)
    bounds = []
    for _ in range(num_sweeps):
        state, _ = run(prob, state, 1, sweep)
        prob, state, reached = improve(prob, state)
        bounds.append(reached)
    return prob, state, jnp.stack(bounds)


def stages(
    prob: Problem,
    state: State,
    roughness: Roughness,
    num_sweeps: int = 12,
    tolerance: float = 0.2,
    max_rounds: int = 8,
    max_settling: int = 20,
    improve: Improve | None = None,
) -> Iterator[Stage]:
    """A fit: rounds of moves until none from a settled state is accepted. The bound never falls.

    :param state: from :func:`start_random`, :func:`start_svd` or :func:`start`.
    :param roughness: orders functions by smoothness; see :func:`roughness_of_inputs` and
        :func:`no_roughness`.
    :param num_sweeps: sweeps in a stage, and from each proposal before it is judged.
    :param tolerance: gain of the bound in a stage at which a state has settled.
    :param max_rounds: most rounds of moves.
    :param max_settling: most stages of sweeps between two rounds of moves.
    :param improve: see :func:`advance`.
    """
    prob, state, trace = advance(prob, state, num_sweeps, improve)
    yield Stage(prob, state, trace)
    settled = False
    for _ in range(max_rounds):
        state, reached, accepted = move(prob, state, roughness, num_sweeps)
        yield Stage(prob, state, reached[None], rejected=not accepted)
        if accepted:
            settled = False
            continue
        if settled:
            return
        for _ in range(max_settling):
            before = reached
            prob, state, trace = advance(prob, state, num_sweeps, improve)
            yield Stage(prob, state, trace)
            reached = trace[-1]
            if reached - before < tolerance:
                break
        settled = True


def best_of(climbs: Sequence[Iterator[Stage]]) -> Iterator[Stage]:
    """Stages of the climb that is highest where a first round of moves brings nothing.

    Only this one goes on from there.
    """

    def heat(climb):
        found = []
        for stage in climb:
            found.append(stage)
            if stage.rejected:
                break
        return found

    heats = [heat(climb) for climb in climbs]
    reached = np.array([float(found[-1].bounds[-1]) for found in heats])
    best = int(np.argmax(np.nan_to_num(reached, nan=-np.inf)))
    yield from heats[best]
    yield from climbs[best]
