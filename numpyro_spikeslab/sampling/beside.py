# SPDX-License-Identifier: Apache-2.0
"""Draws of what stands beside the weights: coefficients, and scales of noise, slabs and spikes."""

from typing import Any

from jaxtyping import Array, Float

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from numpyro_spikeslab.primitives import weights
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.roles import draw_sites
from numpyro_spikeslab.sampling.scales import Conditional


def drawable(reading: Reading) -> frozenset[str]:
    """Names of the sites beside the weights that have an exact draw."""
    return frozenset([*reading.form.coefficients, *reading.indices])


def draw_beside(
    key: Array, reading: Reading, values: dict[str, Any], z: dict[str, Any]
) -> dict[str, Any]:
    """Draw all of a kernel's own sites but the spikes and the included slabs, given these.

    :param values: of the sites that other blocks hold.
    :param z: of the kernel's own.
    :return: new values of those of ``z`` that change. Excluded slabs have their prior, so slab
        scales are drawn without them and they after these.
    """
    form = reading.form
    if not z.keys() & drawable(reading):
        return {}
    w = form.split(weights(*(form.join(z, part) for part in ("{}_spike", "{}_slab"))), "{}")
    now = Conditional.of(reading, values, z, w)
    key_coefficients, key_scales, key_excluded = random.split(key, 3)
    new, residual = draw_coefficients(key_coefficients, now, w)
    spikes, slabs = now.weights()
    targets = now.noise(now.values, jnp.sum(now.at.relative * residual**2, axis=0))
    targets |= now.inclusion(spikes) | now.slab_scales(now.values, slabs, spikes)
    new |= draw_sites(key_scales, targets)
    if now.roles("slab"):
        excluded = jnp.sqrt(now.slab_variance(new))
        excluded *= random.normal(key_excluded, slabs.shape, slabs.dtype)
        slabs = jnp.where(spikes > 0, slabs, excluded)
        new |= form.split(jnp.ravel(slabs), "{}_slab")
    return {name: x.astype(z[name].dtype) for name, x in new.items()}


def draw_coefficients(
    key: Array, now: Conditional, w: dict[str, Any]
) -> tuple[dict[str, Any], Float[Array, "N Q"]]:
    """Draw coefficients with Normal priors jointly from their Gaussian conditional.

    :param now: the model at the weights ``w``.
    :return: the coefficients, and what they leave of the observations.
    """
    form, at = now.reading.form, now.at
    current = {name: now.values[name] for name in form.coefficients if name in now.own}
    if not current:
        return {}, at.Y

    def location(new):
        return now.reading.location(now.values | new, w)

    tangent = jax.linearize(location, current)[1]
    flat, unflatten = ravel_pytree(current)
    units = jnp.eye(flat.size, dtype=flat.dtype)
    rows = jax.vmap(lambda unit: tangent(unflatten(unit)))(units)
    rows = jnp.where(at.precision > 0, rows, 0)
    mean, variance = (
        ravel_pytree(
            {k: jnp.broadcast_to(getattr(at.priors[k], part), x.shape) for k, x in current.items()}
        )[0]
        for part in ("mean", "variance")
    )
    sd = jnp.sqrt(variance)
    # deviations from the prior mean in units of its standard deviation
    features = sd[:, None] * rows.reshape(flat.size, -1)
    weighted = features * jnp.ravel(jnp.broadcast_to(at.precision, at.Y.shape))
    before = (flat - mean) / sd
    factor = jnp.linalg.cholesky(units + weighted @ features.T)
    target = weighted @ (jnp.ravel(at.Y) + before @ features)
    noise = random.normal(key, flat.shape, flat.dtype)
    after = cho_solve((factor, True), target) + solve_triangular(factor, noise, lower=True, trans=1)
    residual = at.Y - ((after - before) @ features).reshape(at.Y.shape)
    return unflatten(mean + sd * after), residual
