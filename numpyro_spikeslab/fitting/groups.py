# SPDX-License-Identifier: Apache-2.0
"""Weights that share a spike, in a paired guide: their parameters, and how they are sampled."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float
import numpy as np

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_spikeslab.algebra.groups import (
    GroupedMeanField,
    Stacks,
    of_members,
    of_weights,
    stacks_of,
    width,
)
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
        key.format("scale_tril"): (diagonal(scale, stacks_of(pair.groups)), constraints.real),
    }


def diagonal(scale: Any, stacks: Stacks) -> Float[Array, "P K"]:
    """The Cholesky factors of independent slabs, by their rows."""
    each = [of_members(scale, x)[..., None] * jnp.eye(x.shape[1]) for x in stacks]
    return of_weights(each, stacks, scale.size)


def sample_groups(
    pair: Pair, params: Sequence[Any], prior_scale: Any, site: str, within: Callable
) -> dict[str, Any]:
    """Sample the spikes of groups, and the slabs of each jointly.

    :param params: in the order of :data:`NAMES`.
    :param site: name of the auxiliary site of all slabs.
    :param within: the plates of a site, by its name.
    """
    assert pair.groups is not None
    probs, loc, scale_tril = params
    stacks = stacks_of(pair.groups)
    with within(pair.spike):
        spike = numpyro.sample(pair.spike, dist.Bernoulli(probs=_by_spike(probs, pair.groups)))
    on = pair.of_weights(spike)
    rows = jnp.where(on[:, None] > 0, scale_tril, diagonal(prior_scale, stacks))
    joint = numpyro.sample(
        site, GroupedNormal(on * loc, rows, stacks), infer={"is_auxiliary": True}
    )
    with within(pair.slab):
        slab = numpyro.sample(pair.slab, dist.Delta(joint))
    return {pair.spike: spike, pair.slab: slab}


def _by_spike(probs: Any, groups: Sequence[int]) -> Float[Array, " G"]:
    """Means of members, whose parameters are equal unless somebody has set them."""
    index = np.asarray(groups)
    count = np.bincount(index)
    return jnp.zeros(len(count), probs.dtype).at[index].add(probs) / count


def pack_groups(form: Form, params: dict[str, Any], key: str) -> GroupedMeanField:
    """The factors of all groups, of which a weight with a spike of its own is one.

    :param key: name of a parameter, with braces for those of the weights and of the part.
    """
    groups = form.groups
    assert groups is not None
    stacks, tril = stacks_of(groups), []
    for pair in form.pairs:
        part = "scale" if pair.groups is None else "scale_tril"
        own = params[key.format(pair.name, part)]
        own = own.reshape(pair.size, -1)
        tril.append(jnp.pad(own, ((0, 0), (0, width(stacks) - own.shape[1]))))
    probs, loc = (form.join(params, key.format("{}", part)) for part in ("probs", "loc"))
    probs = _by_spike(probs, groups)[np.asarray(groups)]
    return GroupedMeanField(probs, loc, jnp.concatenate(tril), stacks)


def unpack_groups(form: Form, factors: GroupedMeanField, key: str) -> dict[str, Any]:
    """The inverse of :func:`pack_groups`."""
    params = form.split(factors.probs, key.format("{}", "probs"))
    params |= form.split(factors.loc, key.format("{}", "loc"))
    ends = np.cumsum([pair.size for pair in form.pairs])[:-1]
    for pair, rows in zip(form.pairs, jnp.split(factors.scale_tril, ends), strict=True):
        if pair.groups is None:
            params[key.format(pair.name, "scale")] = rows[:, 0].reshape(pair.shape)
        else:
            size = width(stacks_of(pair.groups))
            params[key.format(pair.name, "scale_tril")] = rows[:, :size]
    return params
