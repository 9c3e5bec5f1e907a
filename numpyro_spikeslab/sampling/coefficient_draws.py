# SPDX-License-Identifier: Apache-2.0
"""Draws of what stands beside the weights: coefficients, and scales of noise, slabs and spikes."""

from collections.abc import Collection
from typing import Any

from jaxtyping import Array, Float

from jax import random
from jax.lax import optimization_barrier
import jax.numpy as jnp

from numpyro_spikeslab.reading.coefficient_rows import task_coefficients, without_coefficients
from numpyro_spikeslab.reading.likelihood import by_task
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.roles import SlabRole
from numpyro_spikeslab.sampling.scale_draws import Current


def drawable(reading: Reading, values: Collection[str]) -> frozenset[str]:
    """Names of the sites beside the weights that have an exact draw.

    :param values: names of the sites that other blocks hold.
    """
    # means of what is held have observations beside those of the likelihood
    means = {mean for name, mean in reading.form.links if name in values}
    return frozenset([*reading.form.coefficients, *reading.indices]) - means


def draw_beside(key: Array, now: Current) -> dict[str, Any]:
    """Draw all of a kernel's own sites but the spikes and the included slabs, given these.

    :param now: the model at its weights.
    :return: new values of those sites that change. Excluded slabs have their prior, so slab scales
        are drawn without them and they after these.
    """
    form = now.reading.form
    if not now.own & drawable(now.reading, now.values.keys() - now.own):
        return {}
    key_coefficients, *keys = random.split(key, 3)
    new, residual = draw_coefficients(key_coefficients, now)
    spikes, slabs = now.weights()
    squares = by_task(now.at.relative * residual**2, now.at.sigma2.size, now.at.layout)
    scales, slabs = now.draw(keys, now.values, (spikes, slabs), squares, spikes)
    new |= scales
    if now.roles(SlabRole):
        new |= form.split(jnp.ravel(optimization_barrier(slabs)), "{}_slab")
    return {name: x.astype(now.values[name].dtype) for name, x in new.items()}


def draw_coefficients(key: Array, now: Current) -> tuple[dict[str, Any], Float[Array, "N Q"]]:
    """Draw coefficients jointly from their Gaussian conditional.

    :param now: the model at its weights.
    :return: the coefficients, and what they leave of the observations.
    """
    reading, at = now.reading, now.at
    names = tuple(name for name in reading.form.coefficients if name in now.own)
    if not names:
        return {}, at.Y
    if sites := tuple(each for each in reading.form.of_tasks if each.site in names):
        nothing = jnp.zeros((0, reading.form.num_obs), at.Y.dtype)
        own = task_coefficients(sites, at, now.values, nothing, reading.covariates)
        u = own.beside.draw(
            jnp.zeros((reading.form.num_tasks, 0), at.Y.dtype),
            random.normal(key, own.current.shape, own.current.dtype),
        )
        return own.back(u), at.Y - own.added(u - own.current)
    units, beside = without_coefficients(reading.problem, now.values, at, names)
    noise = random.normal(key, units.current.shape, units.current.dtype)
    after = beside.draw(noise, jnp.ravel(jnp.sqrt(at.precision) * at.Y), units.current)
    added = ((after - units.current) @ units.features).reshape(at.Y.shape)
    # what is not observed may be NaN
    return units.back(after), at.Y - jnp.where(at.precision > 0, added, 0)
