# SPDX-License-Identifier: Apache-2.0
"""The M-step: maxima of the bound over what is not a pair, in closed form or by climbing."""

from collections.abc import Callable
from typing import Any

import optax

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.paired import scale_mode
from numpyro_spikeslab.structure import Likelihood, Role, unwrap

NUM_CLIMBING_STEPS = 5
"""L-BFGS steps after each sweep. The next sweep moves the maximum, so going on is wasted."""


def maximum(
    role: Role, site: dict[str, Any], at: Likelihood, squares: Any, posterior: Any, index: Any
) -> Any:
    """Where the bound has its maximum over one noise scale, inclusion or slab scale site.

    :param role: the site and what its values are.
    :param site: the site in a trace, for its prior and its current value.
    :param at: the model at the current values.
    :param squares: expected sum of squared whitened residuals.
    :param posterior: the variational posterior of the weights.
    :param index: which entry of the site each weight takes.
    """
    current = site["value"]
    prior = None if site["type"] == "param" else unwrap(site["fn"])[0]
    size = jnp.size(current)

    def per_entry(x):
        return jax.ops.segment_sum(x, index, size).reshape(jnp.shape(current))

    if role.part == "inclusion":
        total = per_entry(jnp.ones_like(posterior.probs))
        return _inclusion_mode(per_entry(posterior.probs), total, prior)
    if role.part == "noise":
        # undo the whitening, which holds the shared precision apart
        return _scale_mode(jnp.sum(at.weight), squares, prior, current)
    count, square = posterior.slab_moments
    return _scale_mode(per_entry(count), per_entry(square), prior, current)


def _inclusion_mode(included: Any, total: Any, prior: Any) -> Any:
    """Maximises ``included log pi + (total - included) log(1 - pi) + log p(pi)``."""
    if isinstance(prior, dist.Beta):
        included = included + prior.concentration1 - 1.0
        total = total + prior.concentration1 + prior.concentration0 - 2.0
    low, high = (prior.low, prior.high) if isinstance(prior, dist.Uniform) else (0.0, 1.0)
    # a mode at 0 or 1 would never be left again
    eps = jnp.finfo(jnp.result_type(included)).eps
    return jnp.clip(included / total, low + eps, high - eps)


def _scale_mode(count: Any, squares: Any, prior: Any, current: Any) -> Any:
    """Maximises ``-count log sigma - squares / (2 sigma^2) + log p(sigma)``."""
    # slabs that are all excluded say nothing about their scale
    known = count > 1e-3
    count = jnp.where(known, count, 1.0)
    prior_scale = prior.scale if isinstance(prior, dist.HalfNormal) else jnp.inf
    return jnp.where(known, jnp.sqrt(scale_mode(count, squares, prior_scale)), current)


def climb(
    bound: Callable, params: dict[str, Any], transforms: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """A few L-BFGS steps up the bound, in unconstrained space.

    :param bound: the bound as a function of the parameters.
    :param params: where to start.
    :param transforms: for each parameter the bijection onto its support.
    :return: the parameters and the negative bound there, never above that of the start.
    """

    def constrain(free):
        return {name: transforms[name](x) for name, x in free.items()}

    def loss(free):
        return -bound(constrain(free))

    free = {name: transforms[name].inv(x) for name, x in params.items()}
    solver = optax.lbfgs(memory_size=NUM_CLIMBING_STEPS)
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(_, carry):
        free, state = carry
        value, grad = value_and_grad(free, state=state)
        updates, state = solver.update(grad, state, free, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(free, updates), state

    start = loss(free)
    new, _ = jax.lax.fori_loop(0, NUM_CLIMBING_STEPS, step, (free, solver.init(free)))
    end = loss(new)
    # a line search at the limit of the precision may fail; the bound must not fall
    better = end < start
    best = jax.tree.map(lambda x, y: jnp.where(better, x, y), new, free)
    return constrain(best), jnp.where(better, end, start)
