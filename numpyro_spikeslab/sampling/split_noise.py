# SPDX-License-Identifier: Apache-2.0
r"""Moves by which white functions give up a task, or take one up, with the task's noise.

A white function that one task alone uses is noise of this task, of the variance
:math:`\sigma_q^2 + w_{qm}^2`. Given the noise scale the weight cannot vanish. So with the function
integrated out both move along :math:`w_{qm} = \rho \sin\theta, \sigma_q = \rho \cos\theta`.
"""

from typing import Any

from jaxtyping import Array

from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import choose
from numpyro_spikeslab.reading.roles import NoiseRole, Tally
from numpyro_spikeslab.sampling.function_state import Fixed, State


def split_noise(key: Array, fixed: Fixed, state: State) -> tuple[State, dict[str, Any]]:
    """Move one weight of each white function to zero, or from there, together with the noise scale
    of its task; return also the scales.

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
        """Integrate the function out; include the density of weight ``q``, if that is not 0."""
        precision = relative / index.take(noise, at.sigma2) ** 2
        total, linear = 1 + precision @ w**2, (precision * residual) @ w
        fit = linear**2 / total - jnp.log(total) - precision[:, q] * residual[:, q] ** 2
        slab = state.slab_variance[q, m]
        weight = fixed.log_odds[q, m] - 0.5 * (w[q] ** 2 / slab + jnp.log(2 * jnp.pi * slab))
        value = 0.5 * jnp.sum(fit) + jnp.sum(log_prior(jnp.log(noise)))
        return value + jnp.where(w[q] == 0, 0, weight), (total, linear)

    def visit(start, item):
        (state, noise), (m, key) = start, item
        key_task, key_numbers, key_phi = random.split(key, 3)
        angle, level, side = random.uniform(key_numbers, (3,), noise.dtype)
        w = state.weights[:, m]
        used, count = w != 0, jnp.sum(w != 0)
        # a task that does not use the function takes it up, or one that does gives it up
        enters = (count == 0) | ((side < 0.5) & (count < Q))
        q = random.categorical(key_task, jnp.where(used == enters, -jnp.inf, 0.0))
        entry = entries[q]
        radius = jnp.hypot(jnp.ravel(noise)[entry], w[q])
        angle = jnp.where(enters, jnp.pi * (angle - 0.5), 0)
        new_w, new_scale = w.at[q].set(radius * jnp.sin(angle)), radius * jnp.cos(angle)
        new_noise = jnp.ravel(noise).at[entry].set(new_scale).reshape(noise.shape)
        residual = state.residual + jnp.outer(state.phi[m], w)
        after, (total, linear) = log_joint(m, q, new_w, new_noise, residual)
        before, _ = log_joint(m, q, w, noise, residual)
        # the ways back over the ways there, of a function that ``size`` tasks use with this one
        size = jnp.where(enters, count + 1, count)
        turns = jnp.where(size == 1, 0.5, 1) / jnp.where(size == Q, 0.5, 1)
        ways = jnp.log(turns * (Q - size + 1) / size * jnp.pi * radius)
        ratio = after - before + jnp.where(enters, ways, -ways)
        is_alone = (jnp.sum(entries == entry) == 1) & (entry < Q)
        accepts = is_alone & (jnp.log1p(-level) < ratio)
        phi = linear / total
        phi += random.normal(key_phi, phi.shape, phi.dtype) / jnp.sqrt(total)
        new = state._replace(
            phi=state.phi.at[m].set(phi),
            weights=state.weights.at[:, m].set(new_w),
            residual=residual - jnp.outer(phi, new_w),
        )
        return choose(accepts, (new, new_noise), start), None

    items = jnp.arange(M), random.split(key, M)
    (state, noise), _ = lax.scan(visit, (state, noise), items)
    return state, {role.site: noise}
