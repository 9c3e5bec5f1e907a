# SPDX-License-Identifier: Apache-2.0
"""Weights that share a spike: their conditional, exact draws, and their variational family.

The pair of :mod:`~numpyro_spikeslab.algebra.pairs` with a vector of slabs in place of one: given
everything else, the included slabs of a group are jointly Gaussian, and the logit of its spike
needs the determinant of their precision. Groups have rows of K members; those of a smaller group
are filled up with the number P, of a weight that is not there.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import lax, nn
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.families import spike_divergence
from numpyro_spikeslab.algebra.pairs import Design, Prior, feature_rows


def members_of(groups: Sequence[int]) -> Int[np.ndarray, "G K"]:
    """The weights of each group, of which the largest has K.

    :param groups: the number of its group, of each of the P weights.
    """
    index = np.asarray(groups)
    sizes = np.bincount(index)
    members = np.full((len(sizes), sizes.max()), index.size)
    order = np.argsort(index, kind="stable")
    place = np.arange(index.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    members[index[order], place] = order
    return members


def of_members(x: Any, members: Any, fill: float = 0.0) -> Any:
    """What belongs to weights, by their groups."""
    return x.at[members].get(mode="fill", fill_value=fill)


def of_weights(x: Any, members: Any, size: int) -> Any:
    """The inverse of :func:`of_members`."""
    return jnp.zeros((size, *x.shape[2:]), x.dtype).at[members].set(x, mode="drop")


class Conditional(NamedTuple):
    """A group given everything else, with slabs in units of their prior.

    - **logit** - of its inclusion.
    - **half** - ``R^T b``, with the linear term ``b`` of the slabs.
    - **tril** - lower triangular ``R``, of the covariance ``R R^T`` of the included slabs.
    """

    logit: Float[Array, ""]
    half: Float[Array, " K"]
    tril: Float[Array, "K K"]


def conditional(
    features: Float[Array, "K N"], residual: Float[Array, " N"], precision: Any, log_odds: Any
) -> Conditional:
    """The conditional of a group (supplement, eq. 1, with a vector of slabs).

    :param features: its whitened features, times the scales of their slabs.
    :param residual: what all other weights leave of the whitened observations.
    """
    # with slabs in units of their prior no eigenvalue is below 1
    A = precision * features @ features.T + jnp.eye(len(features))
    # of the reversed matrix, since the inverse of its factor is lower triangular
    upper = jnp.linalg.cholesky(A[::-1, ::-1])[::-1, ::-1]
    tril = solve_triangular(upper, jnp.eye(len(features)), trans=1, lower=False)
    half = tril.T @ (precision * features @ residual)
    logit = log_odds + 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(upper)))
    return Conditional(logit, half, tril)


def group_sweep(
    members: Int[Any, "G K"],
    rows: Float[Array, "P N"],
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: Callable[[Conditional, Any], Float[Array, " K"]],
    noise: Any = None,
) -> tuple[Float[Array, " N"], Conditional]:
    """One pass over all groups.

    :param rows: the whitened features.
    :param residual: whitened ``y - D w`` of the current weights.
    :param precision: common noise precision ``tau``.
    :param prior: of the weights; the log odds of a spike are those of its first member.
    :param put: the weights of a group that are put back, in units of their slabs' prior.
    :param noise: variates of the draws, leading axis G.
    :return: the new residual, and the conditional that each visit found.
    """

    def visit(residual, group):
        index, scale, current, log_odds, noise = group
        features = scale[:, None] * of_members(rows, index)
        residual = residual + (current / scale) @ features
        found = conditional(features, residual, precision, log_odds)
        return residual - put(found, noise) @ features, found

    scale = _scales(members, prior)
    log_odds = prior.log_odds[members[:, 0]]
    groups = (jnp.asarray(members), scale, of_members(weights, members), log_odds, noise)
    return lax.scan(visit, residual, groups)


def _scales(members: Any, prior: Prior) -> Float[Array, "G K"]:
    """Of the slabs; 1 of what is not there."""
    return jnp.sqrt(of_members(prior.variance, members, 1.0))


def gibbs_group_sweep(
    key: Array,
    members: Int[np.ndarray, "G K"],
    rows: Float[Array, "P N"],
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """Draw each spike and its slabs in turn, given all other weights; see :func:`group_sweep`.

    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, of each weight.
    """
    key_spike, key_slab = jax.random.split(key)
    logistic = jax.random.logistic(key_spike, members.shape[:1], weights.dtype)
    normal = jax.random.normal(key_slab, members.shape, weights.dtype)

    def put(found, noise):
        logistic, normal = noise
        return jnp.where(found.logit > logistic, found.tril @ (found.half + normal), 0)

    noise = logistic, normal
    _, found = group_sweep(members, rows, residual, weights, precision, prior, put, noise)
    spike = (found.logit > logistic)[:, None]
    included = jnp.einsum("gij,gj->gi", found.tril, found.half + normal)
    # given s = 0 the slabs are drawn from their prior
    slab = _scales(members, prior) * jnp.where(spike, included, normal)
    every = spike.astype(int), slab, nn.sigmoid(found.logit)[:, None]
    each = (jnp.broadcast_to(x, members.shape) for x in every)
    return tuple(of_weights(x, members, weights.size) for x in each)


class GroupedMeanField(NamedTuple):
    """Independent groups: a spike, and a Gaussian of its slabs given that it is 1.

    The family of :class:`~numpyro_spikeslab.algebra.families.PairedMeanField`, with P weights in G
    groups.

    - **probs** - ``gamma = q(s = 1)``, the same for the members of a group.
    - **loc** - ``mu``, means of the slabs given ``s = 1``.
    - **scale_tril** - for each weight its row of the Cholesky factor of the covariance of its
      group's slabs given ``s = 1``, filled up with zeros.
    - **members** - from :func:`members_of`.
    """

    probs: Float[Array, " P"]
    loc: Float[Array, " P"]
    scale_tril: Float[Array, "P K"]
    members: Int[Any, "G K"]

    @property
    def scale(self) -> Float[Array, " P"]:
        """Standard deviations of the slabs given ``s = 1``."""
        return jnp.linalg.norm(self.scale_tril, axis=1)

    @property
    def mean(self) -> Float[Array, " P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    def started(self, probs: Float[Array, " P"], loc: Float[Array, " P"]) -> "GroupedMeanField":
        """The same from another start."""
        return self._replace(probs=probs[self._firsts()], loc=loc)

    def _firsts(self) -> Int[Array, " P"]:
        """The first member of the group of each weight."""
        firsts = jnp.broadcast_to(self.members[:, :1], self.members.shape)
        return of_weights(firsts, self.members, self.loc.size)

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["GroupedMeanField", Float[Array, " N"]]:
        """Update every group in turn. The residual passed and returned is that of ``<w>``."""

        def put(found, _):
            return nn.sigmoid(found.logit / temperature) * (found.tril @ found.half)

        members, size = self.members, self.loc.size
        rows = feature_rows(design, size)
        residual, found = group_sweep(members, rows, residual, self.mean, precision, prior, put)
        probs = jnp.broadcast_to(nn.sigmoid(found.logit / temperature)[:, None], members.shape)
        scale = _scales(members, prior)
        loc = scale * jnp.einsum("gij,gj->gi", found.tril, found.half)
        each = (of_weights(x, members, size) for x in (probs, loc, scale[..., None] * found.tril))
        # the columns of what is not there have nothing to do with the others
        new = dict(zip(self._fields, each, strict=False))
        return self._replace(**new), residual

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        return jnp.sum(self.predictor_variances(feature_rows(design, self.loc.size)))

    def predictor_variances(self, rows: Float[Array, "P N"]) -> Float[Array, " N"]:
        """Variance of ``D w`` at each observation of an unwhitened design."""

        def add(total, index):
            x = of_members(rows, index)
            probs, loc = self.probs[index[0]], of_members(self.loc, index)
            slabs = jnp.sum((of_members(self.scale_tril, index).T @ x) ** 2, axis=0)
            return total + probs * (slabs + (1 - probs) * (loc @ x) ** 2), None

        zero = jnp.zeros(rows.shape[1], rows.dtype)
        return lax.scan(add, zero, jnp.asarray(self.members))[0]

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        return self.probs, self.probs * (self.loc**2 + self.scale**2)

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde, s) || p)``; the spikes have the log odds of their first members."""
        firsts = self.members[:, 0]
        spikes = spike_divergence(
            self.probs[firsts], Prior(prior.log_odds[firsts], prior.variance[firsts])
        )
        second_moment = (self.loc**2 + self.scale**2) / prior.variance
        slab = 0.5 * (second_moment - 1.0 + jnp.log(prior.variance)) - jnp.log(jnp.abs(self.own))
        return spikes + jnp.sum(self.probs * slab)

    @property
    def own(self) -> Float[Array, " P"]:
        """Diagonal of the Cholesky factors."""
        return own_of(self.scale_tril, self.members)


def own_of(scale_tril: Float[Array, "P K"], members: Any) -> Float[Array, " P"]:
    """Diagonal of the Cholesky factors of groups."""
    place = np.broadcast_to(np.arange(members.shape[1]), members.shape)
    column = of_weights(jnp.asarray(place), members, scale_tril.shape[0])
    return jnp.take_along_axis(scale_tril, column[:, None], axis=1)[:, 0]
