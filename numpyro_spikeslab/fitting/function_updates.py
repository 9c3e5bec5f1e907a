# SPDX-License-Identifier: Apache-2.0
r"""Updates of one latent function: its Gaussian factor, its kernel's parameters and its scale.

:func:`update_plain` is the marginalised step of the paper's supplement (1.3);
:func:`update_with_scale` adds the scale of the function's weights to it. Axes: ``N`` inputs,
``M`` latent functions, ``P`` log-parameters of a kernel.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra import gp
from numpyro_spikeslab.algebra.search import choose, climb_coordinates
from numpyro_spikeslab.fitting.posterior import Engine, FunctionFactors, Posterior, strong
from numpyro_spikeslab.reading.function_prior import FunctionPrior, Parameters
from numpyro_spikeslab.reading.roles import elementwise, scale_mode
from numpyro_spikeslab.reading.view import View

# First step of the search over the logs of kernel parameters.
STEP = 0.3
# A search with steps below this has settled. It pauses while its step grows by REST in each sweep.
SETTLED = 0.03
REST = 2.0


class Terms(NamedTuple):
    """Natural parameters of the likelihood of function ``m``: precisions and linear terms."""

    m: Int[Array, ""]
    alpha: Float[Array, " N"]
    h: Float[Array, " N"]

    def scaled(self, t: Any) -> "Terms":
        """Return the terms for weights that are ``sqrt(t)`` times as large."""
        return self._replace(alpha=t * self.alpha, h=jnp.sqrt(t) * self.h)


def condition(
    prior: FunctionPrior, posterior: Posterior, terms: Terms, theta: Any, step: Any, L: Any = None
) -> Posterior:
    """Set ``q(phi_m)`` to its optimum, with the factorisation ``L`` if it is the one at theta."""
    new = _factor(prior, terms, theta, step, L)
    functions = jax.tree.map(lambda x, y: x.at[terms.m].set(y), posterior.functions, new)
    return posterior._replace(functions=functions)


def _factor(prior, terms, theta, step, L=None) -> FunctionFactors:
    m, alpha, h = terms
    covariance = prior.covariance(m, theta)
    if L is not None:
        root, is_same = L
        L = jax.lax.cond(is_same, lambda: root, lambda: covariance.cholesky(jnp.sqrt(alpha)))
    q = gp.condition(covariance, alpha, h, prior.mean[m], L)
    variances = covariance.diagonal()
    return FunctionFactors(alpha, h, q.mean, q.variance, q.kl, variances, theta, step)


def log_joint(prior: FunctionPrior, terms: Terms, theta: Any) -> tuple[Float[Array, ""], Any]:
    """Add the log density of theta to ``log F(theta_m)``; also return the factorisation."""
    m, alpha, h = terms
    log_f, L = gp.log_evidence(prior.covariance(m, theta), alpha, h, prior.mean[m])
    return log_f + prior.log_density(m, theta), L


def update_plain(
    prior: FunctionPrior, posterior: Posterior, terms: Terms, rounds: Any = 1
) -> Posterior:
    """Update ``q(phi_m)`` and ``theta_m`` jointly (supplement 1.3)."""
    functions, m = posterior.functions, terms.m

    def value(theta, _):
        return log_joint(prior, terms, theta)

    theta, step = functions.theta[m], functions.step[m]
    end, last = climb_coordinates(value, theta, step, rounds=rounds)
    return condition(prior, posterior, terms, end.x, end.step, last)


class SlabScale(NamedTuple):
    r"""Dependence of the bound on the scale of the weights of one function.

    The scale is :math:`\sqrt t`. If one number is the scale of all slabs, it follows ``t`` and is
    profiled out. Else the prior is held, and the totals are of this function alone.

    - **slabs**, **total_slabs** - expected number of slabs of this function, and of all.
    - **share**, **total** - this function's share of the sum of expected squares, and the sum, in
      units of their prior variances if these are held.
    - **current**, **density** - the scale that is profiled out, and its prior.
    """

    slabs: Float[Array, ""]
    total_slabs: Float[Array, ""]
    share: Float[Array, ""]
    total: Float[Array, ""]
    current: Float[Array, ""] | None = None
    density: Any = None

    @classmethod
    def of(cls, engine: Engine, at: View, posterior: Posterior, m: Any) -> "SlabScale":
        """Sum over the weights of function ``m``, and over all weights."""
        count, second = posterior.weights.slab_moments
        slabs = jnp.sum(count[:, m])
        if engine.profiled is None:
            total = jnp.sum(second[:, m] / at.prior.variance[:, m])
            return cls(slabs, slabs, jnp.ones(()), total)
        current, density = posterior.values[engine.profiled], at.priors.get(engine.profiled)
        total, share = jnp.sum(second), jnp.sum(second[:, m]) / jnp.sum(second)
        return cls(slabs, jnp.sum(count), share, total, jnp.reshape(current, ()), density)

    def sum_at(self, t: Any) -> Any:
        return self.total * (1 + self.share * (t - 1))

    def scale_at(self, t: Any) -> Any:
        """Return the slab scale at its maximum a posteriori, in its unit if it is held."""
        if self.current is None:
            return jnp.ones_like(self.total)
        return scale_mode(self.total_slabs, self.sum_at(t), self.density, self.current)

    def gain(self, t: Any) -> Float[Array, ""]:
        """Return the gain of the bound over ``t = 1``, the evidence of the function left out."""
        return 0.5 * self.slabs * jnp.log(t) + self._term(t) - self._term(1.0)

    def _term(self, t: Any) -> Any:
        scale = self.scale_at(t)
        value = -0.5 * self.sum_at(t) / scale**2 - self.total_slabs * jnp.log(scale)
        return value if self.density is None else value + elementwise(self.density, ())(scale)

    def stationary(self, Qf: Any, dof: Any) -> Float[Array, ""]:
        """Return the ``t`` at which the bound is stationary, the prior of the scale left out.

        It solves ``Qf/t - dof + G - G_all t share / (1 - share + t share) = 0``, or
        ``Qf/t - dof + G - t total = 0`` if the prior is held, with ``Qf = <phi>^T K^-1 <phi>``
        and ``dof = sum_n alpha_n Sigma_nn``.
        """
        excess = self.slabs - dof
        if self.current is None:
            root = (excess + jnp.sqrt(excess**2 + 4 * self.total * Qf)) / (2 * self.total)
        else:
            quadratic = self.share * (excess - self.total_slabs)
            linear = Qf * self.share + excess * (1 - self.share)
            square = linear**2 - 4 * quadratic * Qf * (1 - self.share)
            root = (linear + jnp.sqrt(square)) / (-2 * quadratic)
        return jnp.clip(jnp.nan_to_num(root, nan=1.0), 1e-2, 1e2)


def update_with_scale(
    engine: Engine, prior: FunctionPrior, at: View, posterior: Posterior, terms: Terms
) -> Posterior:
    r"""Update ``q(phi_m)``, ``theta_m``, the scale of ``w_.m`` and that of all slabs jointly.

    With :math:`q(\phi_m)` integrated out and the slab scale at its optimum, the bound is a function
    of :math:`(\theta_m, t)` alone.
    """
    functions, m = posterior.functions, terms.m
    slab = SlabScale.of(engine, at, posterior, m)
    mean, var = functions.mean[m], functions.var[m]
    theta, step = functions.theta[m], functions.step[m]

    def value(theta, t):
        reached, L = log_joint(prior, terms.scaled(t), theta)
        return reached + slab.gain(t), L

    Qf = (mean - prior.mean[m]) @ (functions.h[m] - functions.alpha[m] * mean)
    t = slab.stationary(Qf, functions.alpha[m] @ var)
    # the bound at the present q(phi_m), which its optimum at t = 1 reaches at least
    current = gp.log_sites(terms.alpha, terms.h, mean, var) - functions.kl[m]
    current += prior.log_density(m, theta)
    search_step = jnp.where(step > SETTLED, step, 0)
    end, last = climb_coordinates(value, theta, search_step, t, current)
    step = jnp.where(search_step > 0, end.step, REST * step)
    weights = posterior.weights
    loc, scale = (x.at[:, m].multiply(jnp.sqrt(end.scale)) for x in (weights.loc, weights.scale))
    weights, values = weights._replace(loc=loc, scale=scale), dict(posterior.values)
    if engine.profiled is not None:
        old = values[engine.profiled]
        values[engine.profiled] = slab.scale_at(end.scale).reshape(old.shape).astype(old.dtype)
    posterior = posterior._replace(weights=weights, values=values)
    return condition(prior, posterior, terms.scaled(end.scale), end.x, step, last)


def reset_if_better(prior: FunctionPrior, posterior: Posterior, terms: Terms) -> Posterior:
    """Return ``q(phi_m)`` to its prior, at the most probable theta, if the bound does not fall.

    A function without weights would else keep a theta of low density, and fits with functions to
    spare be compared by it.
    """
    functions, (m, alpha, h) = posterior.functions, terms
    now = functions.theta[m], functions.prior_var[m]
    step = functions.step[m]
    search_step = jnp.where(step > SETTLED, step, 0)

    def search():
        # by the density alone, for kernels take long to evaluate
        end, _ = climb_coordinates(lambda x, _: (prior.log_density(m, x), ()), now[0], search_step)
        return (end.x, prior.covariance(m, end.x).diagonal()), end.step

    def value(theta, var):
        return gp.log_sites(alpha, h, prior.mean[m], var) + prior.log_density(m, theta)

    new, next_step = jax.lax.cond(jnp.any(search_step > 0), search, lambda: (now, step))
    new = choose(value(*new) >= value(*now), new, now)
    current = gp.log_sites(alpha, h, functions.mean[m], functions.var[m]) - functions.kl[m]
    better = value(*new) >= current + prior.log_density(m, now[0])
    at_prior = functions._replace(
        theta=functions.theta.at[m].set(new[0]),
        step=functions.step.at[m].set(jnp.where(search_step > 0, next_step, REST * step)),
        prior_var=functions.prior_var.at[m].set(new[1]),
    )
    at_prior = to_prior(at_prior, jnp.arange(len(functions.kl)) == m, prior.mean)
    return posterior._replace(functions=choose(better, at_prior, functions))


def to_prior(functions: FunctionFactors, off: Bool[Array, " M"], mean: Any) -> FunctionFactors:
    """Set the functions in ``off`` to their priors, which have these means."""
    row = off[:, None]
    return functions._replace(
        alpha=jnp.where(row, 0, functions.alpha),
        h=jnp.where(row, 0, functions.h),
        mean=jnp.where(row, mean, functions.mean),
        var=jnp.where(row, functions.prior_var, functions.var),
        kl=jnp.where(off, 0, functions.kl),
    )


@jax.jit
def switch_off(posterior: Posterior, off: Bool[Array, " M"], mean: Any) -> Posterior:
    """Set functions to their priors, which have these means, and exclude their weights."""
    weights = posterior.weights
    weights = weights._replace(probs=jnp.where(off, 0, weights.probs))
    functions = to_prior(posterior.functions, off, mean)
    return strong(posterior._replace(weights=weights, functions=functions))


def white_factors(
    functions: FunctionFactors, mean: Float[Array, "M N"], alpha: Float[Array, "M N"]
) -> FunctionFactors:
    """Set ``q`` of functions with a standard Normal prior, of given means and site precisions."""
    var = 1 / (1 + alpha)
    kl = 0.5 * jnp.sum(mean**2 - alpha * var + jnp.log1p(alpha), axis=1)
    return functions._replace(alpha=alpha, h=(1 + alpha) * mean, mean=mean, var=var, kl=kl)


def first_step(parameters: Parameters, theta: Any) -> Float[Array, "M P"]:
    """Return the first steps of the search over theta."""
    return STEP * jnp.asarray(parameters.is_free, theta.dtype)


@jax.jit
def factors_given(prior: FunctionPrior, theta: Any, alpha: Any, h: Any) -> FunctionFactors:
    """Make the factors of the functions from the terms of their likelihood."""
    step = first_step(prior.parameters, theta)

    def of(m):
        return _factor(prior, Terms(m, alpha[m], h[m]), theta[m], step[m])

    return jax.lax.map(of, jnp.arange(len(theta)))
