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

from numpyro_spikeslab.algebra import gaussian
from numpyro_spikeslab.algebra.search import climb_coordinates
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
    Gram,
    explained,
    gram,
    over_points,
    refresh,
    update_weights,
)
from numpyro_spikeslab.reading.functions import FunctionPrior
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


def terms_of(at: View, posterior: Posterior, m: Any) -> Terms:
    """Precision and linear term that the tasks give to function ``m``."""
    functions = _functions(posterior)
    mean, second = posterior.weights.mean, posterior.weights.slab_moments[1]
    w = mean[:, m] / at.sigma2
    others = mean.at[:, m].set(0)
    alpha = over_tasks(at, second[:, m] / at.sigma2)
    taken = jnp.sum(over_tasks(at, w[:, None] * others) * functions.mean.T, axis=1)
    return Terms(m, alpha, (at.relative * at.Y) @ w - taken)


def terms_at(at: View, weights: Any) -> Callable[[Any, Any], Terms]:
    """:func:`terms_of` while weights stay, whose products are computed once for all functions.

    :return: from the means of the functions and the number of one of them.
    """
    mean, second = weights.mean, weights.slab_moments[1]
    precise = mean / at.sigma2[:, None]
    alpha = over_tasks(at, second / at.sigma2[:, None])
    linear = (at.relative * at.Y) @ precise
    # of all tasks at once where they weigh alike
    products = precise.T @ mean if at.relative.shape[1] == 1 else None

    def terms(functions, m):
        if products is None:
            row = over_tasks(at, precise[:, m, None] * mean)
        else:
            row = at.relative * products[m]
        taken = jnp.sum(row.at[:, m].set(0) * functions.T, axis=1)
        return Terms(m, alpha[:, m], linear[:, m] - taken)

    return terms


def over_tasks(at: View, x: Float[Array, " Q *K"]) -> Float[Array, " N *K"]:
    """``sum_q z_nq x_q``."""
    shared = at.relative.shape[1] == 1
    return at.relative @ (jnp.sum(x, axis=0, keepdims=True) if shared else x)


def _functions(posterior: Posterior) -> FunctionFactors:
    assert posterior.functions is not None
    return posterior.functions


def set_function(posterior: Posterior, m: Any, **parts: Any) -> Posterior:
    """Replace what belongs to function ``m``."""
    functions = _functions(posterior)
    changed = {name: getattr(functions, name).at[m].set(x) for name, x in parts.items()}
    return posterior._replace(functions=functions._replace(**changed))


def condition(
    prior: FunctionPrior, posterior: Posterior, terms: Terms, theta: Any, step: Any
) -> Posterior:
    """Set ``q(phi_m)`` to its optimum under given kernel parameters and terms."""
    m, alpha, h = terms
    covariance = prior.covariance(m, theta)
    q = gaussian.condition(covariance, alpha, h, prior.mean[m])
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


def _expected_terms(terms: Terms, mean: Any, var: Any) -> Float[Array, ""]:
    """Expectation of the log of what the tasks say, relative to its largest value."""
    return gaussian.log_sites(terms.alpha, terms.h, mean, var)


def log_joint(prior: FunctionPrior, terms: Terms, theta: Any) -> Float[Array, ""]:
    """``log F(theta_m)`` and the log density of theta (supplement 1.3)."""
    m, alpha, h = terms
    log_f = gaussian.log_evidence(prior.covariance(m, theta), alpha, h, prior.mean[m])
    return log_f + prior.log_density(m, theta)


def update_function_plain(prior: FunctionPrior, posterior: Posterior, terms: Terms) -> Posterior:
    """Joint update of ``q(phi_m)`` and ``theta_m`` (supplement 1.3)."""
    functions, m = _functions(posterior), terms.m

    def value(theta, _):
        return log_joint(prior, terms, theta)

    end = climb_coordinates(value, functions.theta[m], functions.step[m])
    return condition(prior, posterior, terms, end.x, end.step)


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
        return log_joint(prior, terms.scaled(t), theta) + slab.gain(t, density)

    deviation = mean - prior.mean[m]
    Qf = deviation @ (functions.h[m] - functions.alpha[m] * mean)
    scale = slab.stationary(Qf, functions.alpha[m] @ var)
    # What the present q(phi_m) gives; at t = 1 its optimum cannot be below it.
    current = _expected_terms(terms, mean, var) - functions.kl[m] + prior.log_density(m, theta)
    due = jnp.where(step > SETTLED, step, 0)
    end = climb_coordinates(value, theta, due, scale, current)
    theta, t = end.x, end.t
    step = jnp.where(due > 0, end.step, REST * step)
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
    return condition(prior, posterior, terms.scaled(t), theta, step)


def prior_is_better(prior: FunctionPrior, posterior: Posterior, terms: Terms) -> Bool[Array, ""]:
    """Whether the bound does not fall when ``q(phi_m)`` returns to its prior."""
    functions, m = _functions(posterior), terms.m
    current = _expected_terms(terms, functions.mean[m], functions.var[m]) - functions.kl[m]
    return _expected_terms(terms, prior.mean[m], functions.prior_var[m]) >= current


def sweep_plain(
    spec: Spec, data: Data, at: View, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Gram]:
    """The variational EM iteration of the paper: functions, then weights."""
    prior = function_prior(spec, data, at)
    terms = terms_at(at, posterior.weights)

    def visit(m, posterior):
        return update_function_plain(prior, posterior, terms(_functions(posterior).mean, m))

    posterior = jax.lax.fori_loop(0, spec.form.num_features, visit, posterior)
    functions = _functions(posterior)
    stats = gram(at, functions.mean, functions.var)
    paired: Any = posterior.weights
    weights = update_weights(at, stats, paired, temperature)
    return posterior._replace(weights=weights), stats


def sweep(
    spec: Spec, data: Data, base: View, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Gram]:
    """Functions with their scales, all weights after each of them."""
    prior = function_prior(spec, data, base)

    M = spec.form.num_features

    def update(m, at, posterior):
        return update_function(spec, prior, at, posterior, m)

    def rest(m, at, posterior):
        better = prior_is_better(prior, posterior, terms_of(at, posterior, m))
        return _choose(better, to_prior(prior, posterior, m), posterior)

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
        paired: Any = posterior.weights
        weights = update_weights(at, stats, paired, temperature)
        return posterior._replace(weights=weights), stats

    functions = _functions(posterior)
    start = posterior, gram(base, functions.mean, functions.var)
    return jax.lax.fori_loop(0, M + 2, visit, start)


def _choose(condition: Any, one: Posterior, other: Posterior) -> Posterior:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)


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
    return is_active(view_at(spec, data, posterior.values), posterior)


def moments(prior: FunctionPrior, theta: Any, alpha: Any, h: Any) -> tuple[Any, Any, Any, Any]:
    """Means, variances, divergences and prior variances of the functions from their terms."""

    def of(m):
        covariance = prior.covariance(m, theta[m])
        q = gaussian.condition(covariance, alpha[m], h[m], prior.mean[m])
        return q.mean, q.variance, q.kl, covariance.diagonal()

    return jax.lax.map(of, jnp.arange(theta.shape[0]))
