# SPDX-License-Identifier: Apache-2.0
r"""Sweeps over latent functions, each with the scale of its weights and its kernel's parameters.

:func:`sweep_plain` is the algorithm of the paper's supplement; :func:`sweep` adds the scale of a
latent function to its marginalised step. Axes: ``N`` inputs, ``Q`` tasks, ``M`` latent functions,
``P`` log-parameters of a kernel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.search import choose, climb_coordinates
from numpyro_spikeslab.algebra.task_sweeps import TASK_BLOCK_SIZE, triangle
from numpyro_spikeslab.fitting.posterior import (
    Data,
    FunctionFactors,
    Posterior,
    Spec,
    function_prior,
    view_at,
    with_roles,
)
from numpyro_spikeslab.fitting.tasks import (
    explained,
    gram,
    left_of,
    over_points,
    over_tasks,
    refresh,
    squared_errors,
    sweep_weights,
    update_weights,
)
from numpyro_spikeslab.reading.function_prior import FunctionPrior, Parameters
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.roles import elementwise, scale_mode

# A function that explains less than this (in nats) keeps q(phi_m) or returns it to its prior.
SILENT = 1e-3
# A search over kernel parameters whose step is smaller has settled; it rests until the step, which
# grows meanwhile, is larger again.
SETTLED = 0.03
REST = 2.0


class Terms(NamedTuple):
    """What the tasks say of one function.

    - **m** - which.
    - **alpha**, **h** - precisions and linear terms, shape (N,).
    """

    m: Int[Array, ""]
    alpha: Float[Array, " N"]
    h: Float[Array, " N"]

    def scaled(self, t: Any) -> "Terms":
        """Those for weights that are ``sqrt(t)`` times as large."""
        return self._replace(alpha=t * self.alpha, h=jnp.sqrt(t) * self.h)

    def expected(self, mean: Any, var: Any) -> Float[Array, ""]:
        """Expectation of the log of what the tasks say, relative to its largest value."""
        return gp.log_sites(self.alpha, self.h, mean, var)


def terms_of(at: View, posterior: Posterior, m: Any) -> Terms:
    """Precision and linear term that the tasks give to function ``m``."""
    functions = _functions(posterior)
    mean, second = posterior.weights.mean, posterior.weights.slab_moments[1]
    w = mean[:, m] / at.sigma2
    others = mean.at[:, m].set(0)
    alpha = over_tasks(at, second[:, m] / at.sigma2)
    taken = jnp.sum(over_tasks(at, w[:, None] * others) * functions.mean.T, axis=1)
    return Terms(m, alpha, (at.relative * at.Y) @ w - taken)


def terms_at(
    at: View, weights: Any, left: Float[Array, "N Q"], functions: Float[Array, "B N"]
) -> Callable[[Any, Any], Terms]:
    """:func:`terms_of` some functions while weights stay, whose products are computed once.

    :param weights: of these functions.
    :param left: what all functions leave of the observations, times ``z_nq``.
    :param functions: means of these functions where they leave that.
    :return: from the means of the functions and the number of one of them.
    """
    mean, second = weights.mean, weights.slab_moments[1]
    size = mean.shape[1]
    precise = mean / at.sigma2[:, None]
    second = second / at.sigma2[:, None]
    linear = left @ precise
    if shared := at.relative.shape[1] == 1:
        alpha, products = over_tasks(at, second), precise.T @ mean
    else:
        # at once, since what has the size of the data is slow to read
        rows, columns, place = triangle(size)
        each = precise[:, rows] * mean[:, columns]
        sums = over_tasks(at, jnp.concatenate([second, each], axis=1))
        alpha, products = sums[:, :size], sums[:, size:][:, place]

    def terms(now, m):
        row = at.relative * products[m] if shared else products[:, m]
        others = jnp.sum(row.at[:, m].set(0) * (now - functions).T, axis=1)
        return Terms(m, alpha[:, m], linear[:, m] + row[:, m] * functions[m] - others)

    return terms


def _functions(posterior: Posterior) -> FunctionFactors:
    assert posterior.functions is not None
    return posterior.functions


def set_function(posterior: Posterior, m: Any, **parts: Any) -> Posterior:
    """Replace what belongs to function ``m``."""
    functions = _functions(posterior)
    changed = {name: getattr(functions, name).at[m].set(x) for name, x in parts.items()}
    return posterior._replace(functions=functions._replace(**changed))


def condition(
    prior: FunctionPrior, posterior: Posterior, terms: Terms, theta: Any, step: Any, known: Any = ()
) -> Posterior:
    """Set ``q(phi_m)`` to its optimum under given kernel parameters and terms.

    :param known: a factorisation of :func:`log_joint`, and whether it is the one of these.
    """
    m, alpha, h = terms
    covariance = prior.covariance(m, theta)
    L = None
    if known:
        L = jax.lax.cond(known[1], lambda: known[0], lambda: covariance.cholesky(jnp.sqrt(alpha)))
    q = gp.condition(covariance, alpha, h, prior.mean[m], L)
    return set_function(
        posterior,
        m,
        alpha=alpha,
        h=h,
        mean=q.mean,
        var=q.variance,
        kl=q.kl,
        prior_var=covariance.diagonal(),
        theta=theta,
        step=step,
    )


def to_prior(prior: FunctionPrior, posterior: Posterior, m: Any) -> Posterior:
    """Return ``q(phi_m)`` to its prior."""
    zero, variance = jnp.zeros_like(prior.mean[m]), _functions(posterior).prior_var[m]
    return set_function(
        posterior, m, alpha=zero, h=zero, mean=prior.mean[m], var=variance, kl=jnp.zeros(())
    )


def log_joint(prior: FunctionPrior, terms: Terms, theta: Any) -> tuple[Float[Array, ""], Any]:
    """``log F(theta_m)`` and the log density of theta (supplement 1.3), and the factorisation with
    which the first was found."""
    m, alpha, h = terms
    log_f, L = gp.log_evidence(prior.covariance(m, theta), alpha, h, prior.mean[m])
    return log_f + prior.log_density(m, theta), L


def update_function_plain(prior: FunctionPrior, posterior: Posterior, terms: Terms) -> Posterior:
    """Joint update of ``q(phi_m)`` and ``theta_m`` (supplement 1.3)."""
    functions, m = _functions(posterior), terms.m
    start = functions.theta[m], functions.step[m]
    end, last = climb_coordinates(lambda x, _: log_joint(prior, terms, x), *start)
    return condition(prior, posterior, terms, end.x, end.step, last.known_at(end))


class SlabScale(NamedTuple):
    r"""How the bound depends on the scale of the weights of one function.

    With :math:`w_{\cdot m} \to \sqrt t\, w_{\cdot m}` the weights of this function count as
    ``slabs`` slabs whose squares, in units of their prior variances, sum to ``share`` times
    ``total``. Where one number is the scale of all slabs it follows ``t`` and is profiled out; else
    the prior is held, and ``total`` is of this function alone.

    - **slabs**, **total_slabs** - expected number of slabs of this function, and of all.
    - **share**, **total** - this function's share of the sum of expected squares, and the sum.
    - **current** - the scale that is profiled out.
    """

    slabs: Float[Array, ""]
    total_slabs: Float[Array, ""]
    share: Float[Array, ""]
    total: Float[Array, ""]
    current: Float[Array, ""] | None

    def sum_at(self, t: Any) -> Any:
        return self.total * (1 + self.share * (t - 1))

    def scale_at(self, t: Any, density: Any) -> Any:
        """The slab scale at its maximum."""
        return scale_mode(self.total_slabs, self.sum_at(t), density, self.current)

    def gain(self, t: Any, density: Any) -> Float[Array, ""]:
        """Gain of the bound over ``t = 1``, but for the function's own evidence."""
        return 0.5 * self.slabs * jnp.log(t) + self._term(t, density) - self._term(1.0, density)

    def _term(self, t: Any, density: Any) -> Any:
        if self.current is None:
            return -0.5 * self.sum_at(t)
        scale = self.scale_at(t, density)
        value = -0.5 * self.sum_at(t) / scale**2 - self.total_slabs * jnp.log(scale)
        return value if density is None else value + elementwise(density, ())(scale)

    def stationary(self, Qf: Any, dof: Any) -> Float[Array, ""]:
        """Where the bound is stationary in ``t``, but for a prior of the scale.

        Positive root of ``Qf/t - dof + G - G_all t share / (1 - share + t share) = 0``, and of
        ``Qf/t - dof + G - t total = 0`` where the prior is held.

        :param Qf: ``<phi>^T K^-1 <phi>``.
        :param dof: ``sum_n alpha_n Sigma_nn``.
        """
        excess = self.slabs - dof
        if self.current is None:
            root = (excess + jnp.sqrt(excess**2 + 4 * self.total * Qf)) / (2 * self.total)
        else:
            quadratic = self.share * (excess - self.total_slabs)
            linear = Qf * self.share + excess * (1 - self.share)
            constant = Qf * (1 - self.share)
            root = linear + jnp.sqrt(linear**2 - 4 * quadratic * constant)
            root = root / (-2 * quadratic)
        return jnp.clip(jnp.nan_to_num(root, nan=1.0), 1e-2, 1e2)


def slab_scale_of(spec: Spec, at: View, posterior: Posterior, m: Any) -> SlabScale:
    """How the scale of the weights of function ``m`` enters."""
    count, second = posterior.weights.slab_moments
    if spec.profiled is None:
        total = jnp.sum(second[:, m] / at.prior.variance[:, m])
        one = jnp.ones(())
        return SlabScale(jnp.sum(count[:, m]), jnp.sum(count[:, m]), one, total, None)
    total = jnp.sum(second)
    share = jnp.sum(second[:, m]) / total
    current = jnp.reshape(posterior.values[spec.profiled], ())
    return SlabScale(jnp.sum(count[:, m]), jnp.sum(count), share, total, current)


def update_function(
    spec: Spec, prior: FunctionPrior, at: View, posterior: Posterior, m: Any
) -> Posterior:
    """:func:`update_given` what the tasks say of function ``m``."""
    return update_given(spec, prior, at, posterior, terms_of(at, posterior, m))


def update_given(
    spec: Spec, prior: FunctionPrior, at: View, posterior: Posterior, terms: Terms
) -> Posterior:
    r"""Joint update of ``q(phi_m)``, ``theta_m``, the scale of ``w_.m`` and that of all slabs.

    With :math:`w_{\cdot m} \to \sqrt t\, w_{\cdot m}` the terms become
    :math:`t \alpha, \sqrt t\, h`, and with :math:`q(\phi_m)` integrated and the slab scale at
    its optimum the bound is a function of :math:`(\theta_m, t)` alone.
    """
    functions, m = _functions(posterior), terms.m
    slab = slab_scale_of(spec, at, posterior, m)
    density = None if spec.profiled is None else at.priors.get(spec.profiled)
    mean, var = functions.mean[m], functions.var[m]
    theta, step = functions.theta[m], functions.step[m]

    def value(theta, t):
        reached, L = log_joint(prior, terms.scaled(t), theta)
        return reached + slab.gain(t, density), L

    deviation = mean - prior.mean[m]
    Qf = deviation @ (functions.h[m] - functions.alpha[m] * mean)
    scale = slab.stationary(Qf, functions.alpha[m] @ var)
    # What the present q(phi_m) gives; at t = 1 its optimum cannot be below it.
    current = terms.expected(mean, var) - functions.kl[m] + prior.log_density(m, theta)
    due = jnp.where(step > SETTLED, step, 0)
    end, last = climb_coordinates(value, theta, due, scale, current)
    t, step = end.t, jnp.where(due > 0, end.step, REST * step)
    weights: Any = posterior.weights
    weights = weights._replace(
        loc=weights.loc.at[:, m].multiply(jnp.sqrt(t)),
        scale=weights.scale.at[:, m].multiply(jnp.sqrt(t)),
    )
    values = dict(posterior.values)
    if spec.profiled is not None:
        old = values[spec.profiled]
        values[spec.profiled] = slab.scale_at(t, density).reshape(old.shape).astype(old.dtype)
    posterior = posterior._replace(weights=weights, values=values)
    return condition(prior, posterior, terms.scaled(t), end.x, step, last.known_at(end))


def prior_is_better(prior: FunctionPrior, posterior: Posterior, terms: Terms) -> Bool[Array, ""]:
    """Whether the bound does not fall when ``q(phi_m)`` returns to its prior."""
    functions, m = _functions(posterior), terms.m
    current = terms.expected(functions.mean[m], functions.var[m]) - functions.kl[m]
    return terms.expected(prior.mean[m], functions.prior_var[m]) >= current


def sweep_plain(
    spec: Spec, data: Data, at: View, posterior: Posterior, temperature: Any, update: Any = None
) -> tuple[Posterior, Float[Array, " Q"]]:
    """The variational EM iteration of the paper: functions, then weights.

    :param update: of a function from its terms; the default is :func:`update_function_plain`.
    :return: the posterior and the expected squares of what each task leaves.
    """
    update = update or partial(update_function_plain, function_prior(spec, data, at))
    if at.relative.shape[1] == 1:
        start = jnp.zeros_like(_functions(posterior).mean)
        posterior = visit_block(update, at, posterior, at.relative * at.Y, start)
        stats = gram(at, _functions(posterior).mean, _functions(posterior).var)
    else:
        posterior, stats = visit_blocks(update, at, posterior), None
    functions = _functions(posterior)
    paired: Any = posterior.weights
    weights, squares = sweep_weights(at, functions.mean, functions.var, stats, paired, temperature)
    return posterior._replace(weights=weights), squares


def visit_blocks(update: Callable, at: View, posterior: Posterior) -> Posterior:
    """All functions in turn where tasks weigh the points each in its own way.

    At each point there are other products of the weights, so they are those of one block.
    """
    M = len(_functions(posterior).mean)
    size = min(TASK_BLOCK_SIZE, M)

    def visit(k, carry):
        posterior, left = carry
        # the last block may begin among functions that have been visited
        start = jnp.minimum(k * size, M - size)
        before = jax.lax.dynamic_slice_in_dim(_functions(posterior).mean, start, size)
        posterior = visit_block(update, at, posterior, left, before, start, k * size - start)
        after = jax.lax.dynamic_slice_in_dim(_functions(posterior).mean, start, size)
        weights = jax.lax.dynamic_slice_in_dim(posterior.weights.mean, start, size, 1)
        return posterior, left - at.relative * ((after - before).T @ weights.T)

    start = posterior, left_of(at, _functions(posterior).mean, posterior.weights)
    return jax.lax.fori_loop(0, -(-M // size), visit, start)[0]


def visit_block(
    update: Callable[[Posterior, Terms], Posterior],
    at: View,
    posterior: Posterior,
    left: Float[Array, "N Q"],
    functions: Float[Array, "B N"],
    start: Any = 0,
    first: Any = 0,
) -> Posterior:
    """Some functions in turn, while the weights stay.

    :param left: what functions leave of the observations, times ``z_nq``.
    :param functions: means of the functions of this block where they leave that.
    :param start: number of the first of them.
    :param first: of these, the first to be visited.
    """
    size = len(functions)

    def cut(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

    weights = jax.tree.map(lambda x: cut(x, 1), posterior.weights)
    terms = terms_at(at, weights, left, functions)

    def visit(j, posterior):
        found = terms(cut(_functions(posterior).mean, 0), j)
        return update(posterior, found._replace(m=start + j))

    return jax.lax.fori_loop(first, size, visit, posterior)


def sweep(
    spec: Spec, data: Data, base: View, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Float[Array, " Q"]]:
    """Functions with their scales, all weights after each of them.

    :return: the posterior and the expected squares of what each task leaves.
    """
    prior = function_prior(spec, data, base)
    M = spec.form.num_features

    def update(m, at, posterior):
        return update_function(spec, prior, at, posterior, m)

    def rest(m, at, posterior):
        better = prior_is_better(prior, posterior, terms_of(at, posterior, m))
        return choose(better, to_prior(prior, posterior, m), posterior)

    def visit(k, carry):
        posterior, stats = carry
        m = jnp.minimum(k, M - 1)
        at = with_roles(spec, data, base, posterior.values)
        # Only what explains something is worth a factorisation.
        silent = explained(at, stats.own, posterior.weights)[m] < SILENT
        # two more passes over the weights follow the last function
        which = jnp.where(k < M, jnp.where(silent, 1, 0), 2)
        keep = lambda m, at, posterior: posterior  # noqa: E731
        posterior = jax.lax.switch(which, (update, rest, keep), m, at, posterior)
        functions = _functions(posterior)
        stats = refresh(base, functions.mean, functions.var, stats, m)
        at = with_roles(spec, data, base, posterior.values)
        weights = update_weights(at, stats, posterior.weights, temperature)
        return posterior._replace(weights=weights), stats

    functions = _functions(posterior)
    start = posterior, gram(base, functions.mean, functions.var)
    posterior, stats = jax.lax.fori_loop(0, M + 2, visit, start)
    return posterior, squared_errors(stats, posterior.weights)


def with_kernels(spec: Spec, posterior: Posterior) -> Posterior:
    """The values of the kernels' sites as the functions have them."""
    assert spec.parameters is not None
    found = spec.parameters.scatter(_functions(posterior).theta)
    known = {name: found[name] for name in spec.form.kernels}
    return posterior._replace(values=posterior.values | known)


def is_active(at: View, posterior: Posterior) -> Bool[Array, " M"]:
    """Functions that some task includes and that explain more than a nat."""
    own = over_points(at, _functions(posterior).mean ** 2).T
    power = explained(at, own, posterior.weights)
    return (jnp.max(posterior.weights.probs, axis=0) > 0.5) & (power > 1.0)


@partial(jax.jit, static_argnums=0)
def in_use(spec: Spec, data: Data, posterior: Posterior) -> Bool[Array, " M"]:
    """:func:`is_active`, compiled."""
    return is_active(view_at(spec, data, posterior), posterior)


@partial(jax.jit, static_argnums=0)
def moments(
    parameters: Parameters, kernel: Any, mean: Any, theta: Any, alpha: Any, h: Any
) -> tuple[Any, Any, Any, Any]:
    """Means, variances, divergences and prior variances of the functions from their terms."""
    prior = FunctionPrior(kernel, mean, parameters, {})

    def of(m):
        covariance = prior.covariance(m, theta[m])
        q = gp.condition(covariance, alpha[m], h[m], mean[m])
        return q.mean, q.variance, q.kl, covariance.diagonal()

    return jax.lax.map(of, jnp.arange(theta.shape[0]))
