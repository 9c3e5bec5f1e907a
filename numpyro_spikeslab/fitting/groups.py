# SPDX-License-Identifier: Apache-2.0
"""Weights that share a spike, in a paired guide: their parameters, and how they are sampled."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.groups import GroupedMeanField, members_of, of_members, of_weights
from numpyro_spikeslab.distributions import GroupedNormal
from numpyro_spikeslab.reading.form import Form, Pair

NAMES = "probs", "loc", "scale_tril"


def start_groups(pair: Pair, key: str, scale: Any) -> dict[str, tuple[Any, Any]]:
    """Start value and constraint of each parameter.

    :param key: name of a parameter, with braces for that of its part.
    :param scale: of the slabs in their prior.
    """
    assert pair.groups is not None
    return {
        key.format("probs"): (jnp.full_like(scale, 0.5), constraints.unit_interval),
        key.format("loc"): (jnp.zeros_like(scale), constraints.real),
        key.format("scale_tril"): (diagonal(scale, members_of(pair.groups)), constraints.real),
    }


def diagonal(scale: Any, members: Any) -> Float[Array, "P K"]:
    """The Cholesky factors of independent slabs, by their rows."""
    one = jnp.eye(members.shape[1])
    return of_weights(of_members(scale, members)[..., None] * one, members, scale.size)


def lower(scale_tril: Any, members: Any) -> Float[Array, "P K"]:
    """Without what is above the diagonal, where a gradient or a user may have put something."""
    return of_weights(jnp.tril(of_members(scale_tril, members)), members, len(scale_tril))


def sample_groups(
    pair: Pair, params: tuple[Any, Any, Any], prior_scale: Any, site: str, within: Callable
) -> dict[str, Any]:
    """Sample the spikes of groups, and the slabs of each jointly.

    :param params: in the order of :data:`NAMES`.
    :param site: name of the auxiliary site of all slabs.
    :param within: the plates of a site, by its name.
    """
    assert pair.groups is not None
    probs, loc, scale_tril = params
    members = members_of(pair.groups)
    with within(pair.spike):
        spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=_by_group(probs, members)))
    on = pair.of_weights(spike)
    root = jnp.where(on[:, None] > 0, lower(scale_tril, members), diagonal(prior_scale, members))
    joint = numpyro.sample(
        site, GroupedNormal(on * loc, root, members), infer={"is_auxiliary": True}
    )
    with within(pair.slab):
        slab = numpyro.sample(pair.slab, dist.Delta(joint))
    return {pair.spike: spike, pair.slab: slab}


def _by_group(probs: Any, members: Any) -> Float[Array, " G"]:
    """Of members, whose parameters are equal unless somebody has set them."""
    count = np.sum(members < probs.size, axis=1)
    return jnp.sum(of_members(probs, members), axis=1) / count


def pack_groups(form: Form, params: dict[str, Any], key: str) -> GroupedMeanField:
    """The factors of all groups, of which a weight with a spike of its own is one.

    :param key: name of a parameter, with braces for those of the weights and of the part.
    """
    assert form.groups is not None
    members = members_of(form.groups)
    tril = []
    for pair in form.pairs:
        part = "scale" if pair.groups is None else "scale_tril"
        own = params[key.format(pair.name, part)]
        own = own.reshape(pair.size, -1)
        tril.append(jnp.pad(own, ((0, 0), (0, members.shape[1] - own.shape[1]))))
    probs, loc = (form.join(params, key.format("{}", part)) for part in ("probs", "loc"))
    probs = _by_group(probs, members)[np.asarray(form.groups)]
    rows = lower(jnp.concatenate(tril), members)
    return GroupedMeanField(probs, loc, rows, jnp.asarray(members))


def unpack_groups(form: Form, factors: GroupedMeanField, key: str) -> dict[str, Any]:
    """The inverse of :func:`pack_groups`."""
    params = form.split(factors.probs, key.format("{}", "probs"))
    params |= form.split(factors.loc, key.format("{}", "loc"))
    ends = np.cumsum([pair.size for pair in form.pairs])[:-1]
    for pair, rows in zip(form.pairs, jnp.split(factors.scale_tril, ends), strict=True):
        if pair.groups is None:
            params[key.format(pair.name, "scale")] = rows[:, 0].reshape(pair.shape)
        else:
            size = members_of(pair.groups).shape[1]
            params[key.format(pair.name, "scale_tril")] = rows[:, :size]
    return params
