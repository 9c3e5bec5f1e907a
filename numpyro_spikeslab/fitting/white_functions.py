# SPDX-License-Identifier: Apache-2.0
r"""Sweeps over functions without order (white processes), which are ordinary factor analysis.

Nothing couples the points, so a visit of a function needs a few products with what all functions
leave of the tasks, and a sweep costs O(NQM) where the products of functions cost O(NQM^2). Axes:
``N`` points, ``Q`` tasks, ``M`` functions.
"""

from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float, Int

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.pairs import Conditional, Prior, coordinates
from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.fitting import function_updates
from numpyro_spikeslab.fitting.entries import left_with
from numpyro_spikeslab.fitting.function_updates import SILENT, Terms, to_prior, update_given
from numpyro_spikeslab.fitting.posterior import (
    Data,
    FunctionFactors,
    Posterior,
    Spec,
    function_prior,
    view_at,
    with_roles,
)
from numpyro_spikeslab.fitting.tasks import left_of, over_points, over_tasks, squares_left
from numpyro_spikeslab.reading.function_prior import FunctionPrior
from numpyro_spikeslab.reading.view import View


def rests(phi: FunctionFactors) -> Bool[Array, " M"]:
    """Functions at their prior, of which the tasks say nothing."""
    return ~jnp.any(phi.alpha != 0, axis=1) & ~jnp.any(phi.mean != 0, axis=1)


def with_sites(phi: FunctionFactors, mean: Any, alpha: Any) -> FunctionFactors:
    """Functions with these means and precisions of their sites, whose prior is standard Normal."""
    var = 1 / (1 + alpha)
    kl = 0.5 * jnp.sum(mean**2 - alpha * var + jnp.log1p(alpha), axis=1)
    return phi._replace(alpha=alpha, h=(1 + alpha) * mean, mean=mean, var=var, kl=kl)


def sweep(
    spec: Spec, data: Data, base: View, posterior: Posterior, temperature: Any
) -> tuple[Posterior, Float[Array, " Q"]]:
    """Each function with the scale of its weights, and then its weights.

    Functions at rest are not visited: with a mean of zero they leave nothing to their weights.

    :return: the posterior and the expected squares of what each task leaves.
    """
    prior = function_prior(spec, data, base)
    at = with_roles(spec, data, base, posterior.values)
    phi: Any = posterior.functions
    rest = rests(phi)
    order = jnp.argsort(rest, stable=True)

    def one(k, carry):
        return _visit(spec, prior, at, carry, order[k], temperature)

    start = posterior, left_of(base, phi.mean, posterior.weights)
    posterior, _ = jax.lax.fori_loop(0, jnp.sum(~rest), one, start)
    posterior = _rest_weights(_at_slab(spec, at, posterior.values), posterior, rest, temperature)
    # anew, since rounding errors of the visits add up
    phi = posterior.functions
    return posterior, squares_left(base, phi.mean, phi.var, posterior.weights)


def _visit(
    spec: Spec, prior: FunctionPrior, at: View, carry: tuple, m: Int[Array, ""], temperature: Any
) -> tuple[Posterior, Float[Array, "N Q"]]:
    """One function and its weights, with what all functions leave."""
    posterior, left = carry
    at = _at_slab(spec, at, posterior.values)
    w_old, phi_old = _at_hand(posterior.weights.mean[:, m], posterior.functions.mean[m])
    terms, power = _terms(at, posterior, left, m)
    posterior = jax.lax.cond(
        power < SILENT,
        lambda p: _fade(prior, p, terms),
        lambda p: update_given(spec, prior, at, p, terms),
        posterior,
    )
    at = _at_slab(spec, at, posterior.values)
    mean, var = _at_hand(posterior.functions.mean[m], posterior.functions.var[m])
    linear = mean @ left + w_old * over_points(at, mean * phi_old)
    squares = over_points(at, mean**2 + var)
    posterior = _set_weights(at, posterior, m, squares, linear, temperature)
    new, mean = _at_hand(posterior.weights.mean[:, m], mean)
    left = left + at.relative * (phi_old[:, None] * w_old - mean[:, None] * new)
    return posterior, left


def _at_hand(*arrays: Any) -> Any:
    """What else XLA would find anew for each entry of the matrix that it is a part of."""
    return jax.lax.optimization_barrier(arrays)


def _terms(at: View, posterior: Posterior, left: Any, m: Any) -> tuple[Terms, Float[Array, ""]]:
    """What the tasks say of a function, from what all functions leave; what it explains."""
    w, second = _at_hand(posterior.weights.mean[:, m], posterior.weights.slab_moments[1][:, m])
    phi: Any = posterior.functions
    own = over_tasks(at, w**2 / at.sigma2) * phi.mean[m]
    alpha = over_tasks(at, second / at.sigma2)
    return Terms(m, alpha, left @ (w / at.sigma2) + own), own @ phi.mean[m]


def _fade(prior: FunctionPrior, posterior: Posterior, terms: Terms) -> Posterior:
    """A function that explains nothing returns to its prior if the bound does not fall."""
    better = function_updates.prior_is_better(prior, posterior, terms)
    return choose(better, to_prior(prior, posterior, terms.m), posterior)


def _at_slab(spec: Spec, at: View, values: dict[str, Any]) -> View:
    """The view at the present scale of all slabs, which visits change."""
    if spec.profiled is None:
        return at
    variance = jnp.reshape(values[spec.profiled] ** 2, ())
    return at._replace(
        prior=at.prior._replace(variance=variance * jnp.ones_like(at.prior.variance))
    )


def _conditional(at: View, m: Any, squares: Any, linear: Any) -> Conditional:
    """Of the pairs of function ``m`` (eq. 7); of all functions if that is a slice."""
    own = Prior(at.prior.log_odds[:, m], at.prior.variance[:, m])
    tau = (1 / at.sigma2).reshape((-1,) + (1,) * (own.log_odds.ndim - 1))
    return coordinates(squares, tau, own).given(tau * linear)


def _set_weights(
    at: View, posterior: Posterior, m: Any, squares: Any, linear: Any, temperature: Any
) -> Posterior:
    new = PairedMeanField.of(_conditional(at, m, squares, linear), temperature)
    weights = jax.tree.map(lambda x, y: x.at[:, m].set(y), posterior.weights, new)
    return posterior._replace(weights=weights)


def _rest_weights(at: View, posterior: Posterior, rest: Any, temperature: Any) -> Posterior:
    """Weights of the functions at rest, of which their prior variance alone is known."""
    phi: Any = posterior.functions
    squares = over_points(at, phi.var).T
    found = _conditional(at, slice(None), squares, jnp.zeros_like(posterior.weights.probs))
    new = PairedMeanField.of(found, temperature)
    weights = choose(rest, new, posterior.weights)
    return posterior._replace(weights=weights)


@partial(jax.jit, static_argnums=0)
def gains_without(spec: Spec, data: Data, posterior: Posterior) -> Float[Array, " M"]:
    r"""Gain of the exact bound when one function is left out, and all others stay.

    What is left of a task grows by :math:`\langle w \rangle \phi`, so its expected squares by
    :math:`2 \langle w \rangle \langle \phi \rangle^\top r + 2 \langle w \rangle^2 \langle \phi
    \rangle^2 - \langle w^2 \rangle \langle \phi^2 \rangle`; the divergences of the function and
    of its weights go, up to that of spikes that are zero.
    """
    at = view_at(spec, data, posterior)
    phi: Any = posterior.functions
    paired: Any = posterior.weights
    W, W2 = paired.mean, paired.slab_moments[1]
    own, var = over_points(at, phi.mean**2).T, over_points(at, phi.var).T
    left = left_with(at, phi.mean, paired)
    more = 2 * W * left.T + 2 * W**2 * own - W2 * (own + var)
    cost = jax.vmap(lambda q, *prior: q.divergence(Prior(*prior)), in_axes=1)
    none = paired._replace(probs=jnp.zeros_like(W))
    saved = cost(paired, *at.prior) - cost(none, *at.prior) + phi.kl
    return saved - 0.5 * jnp.sum(more / at.sigma2[:, None], axis=0)
