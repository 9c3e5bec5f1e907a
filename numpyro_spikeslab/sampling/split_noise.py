# SPDX-License-Identifier: Apache-2.0
r"""Moves that take up an idle white function for one task, or give up a function of one task.

With the function integrated out it is noise of that task, of the variance :math:`\sigma_q^2 +
w_{qm}^2`. Given the noise scale the weight cannot vanish. So both move along :math:`w = \rho
\sin\theta, \sigma = \rho \cos\theta`, where the density of the observations hardly changes.
"""

from typing import Any

from jaxtyping import Array

from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.reading.roles import NoiseRole, Tally
from numpyro_spikeslab.sampling.function_state import Fixed, State


def split_noise(key: Array, fixed: Fixed, state: State) -> tuple[State, dict[str, Any]]:
    """Move each white function together with the noise scale of a task; return also the scales.

    Nothing moves unless the kernel draws the weights, and noise scales that are not shared.
    """
    now, at, (Q, M) = fixed.now, fixed.now.at, state.weights.shape
    roles = [role for role in now.roles(NoiseRole) if now.index(role).size == Q]
    if not (roles and fixed.with_weights and fixed.functions.is_white):
        return state, {}
    (role,), relative = roles, jnp.broadcast_to(at.relative, at.Y.shape)
    index, noise = now.index(role), now.values[role.site]
    entries = jnp.zeros(Q, int) if index.entries is None else jnp.ravel(index.entries)
    # one observation more makes it a density of the scales, not of their logs
    tally = role.tally(index, {"noise": Tally(at.count + 1, jnp.zeros_like(at.count))})
    _, log_prior, _ = role.target(tally, at.priors[role.site], noise)

    def log_joint(m, q, w, noise, residual):
        """The function integrated out, with the density of its only weight if that is not 0."""
        precision, slab = relative[:, q] / jnp.ravel(noise)[entries[q]] ** 2, state.slab_variance[q, m]
        total = 1 + w**2 * precision
        value = jnp.sum(log_prior(jnp.log(noise))) - 0.5 * jnp.sum(jnp.log(total) + precision / total * residual**2)
        weight = fixed.log_odds[q, m] - 0.5 * (w**2 / slab + jnp.log(2 * jnp.pi * slab))
        return value + jnp.where(w == 0, 0, weight)

    def visit(start, item):
        (state, noise), (m, key) = start, item
        key_task, key_numbers, key_phi = random.split(key, 3)
        used, (angle, level) = state.weights[:, m] != 0, random.uniform(key_numbers, (2,), noise.dtype)
        is_idle = ~jnp.any(used)
        q = jnp.where(is_idle, random.randint(key_task, (), 0, Q), jnp.argmax(used))
        old, w = jnp.ravel(noise)[entries[q]], state.weights[q, m]
        radius, angle = jnp.hypot(old, w), jnp.where(is_idle, jnp.pi * (angle - 0.5), 0)
        w_new = radius * jnp.sin(angle)
        noise_new = jnp.ravel(noise).at[entries[q]].set(radius * jnp.cos(angle)).reshape(noise.shape)
        residual = state.residual[:, q] + state.phi[m] * w
        ratio = log_joint(m, q, w_new, noise_new, residual) - log_joint(m, q, w, noise, residual)
        # from the density of a random task and angle to that of a weight and a scale
        ratio += jnp.where(is_idle, 1, -1) * jnp.log(Q * jnp.pi * radius)
        is_alone = (jnp.sum(entries == entries[q]) == 1) & (entries[q] < Q)
        accepts = is_alone & (jnp.sum(used) <= 1) & (jnp.log1p(-level) < ratio)
        precision = relative[:, q] / jnp.ravel(noise_new)[entries[q]] ** 2
        variance = 1 / (1 + w_new**2 * precision)
        phi = variance * precision * w_new * residual
        phi += jnp.sqrt(variance) * random.normal(key_phi, phi.shape, phi.dtype)
        new = state._replace(
            phi=state.phi.at[m].set(phi),
            weights=state.weights.at[q, m].set(w_new),
            residual=state.residual.at[:, q].set(residual - phi * w_new),
        )
        return choose(accepts, (new, noise_new), start), None

    items = jnp.arange(M), random.split(key, M)
    (state, noise), _ = lax.scan(visit, (state, noise), items)
    return state, {role.site: noise}
