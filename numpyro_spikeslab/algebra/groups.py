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

from numpyro_spikeslab.algebra.families import PairedMeanField, spike_divergence
from numpyro_spikeslab.algebra.pairs import Design, Prior, feature_rows
from numpyro_spikeslab.algebra.variates import logistic_and_normal

Stacks = tuple[Any, ...]
"""Groups by their size: of each an array (G, K) of members."""


def stacks_of(groups: Sequence[int]) -> Stacks:
    """The weights of each group. One large group does not make the others dear: K is a power of
    two, and groups whose sizes round up to the same are in one stack.

    :param groups: the number of its group, of each of the P weights.
    """
    index = np.asarray(groups)
    order = np.argsort(index, kind="stable")
    each = np.split(order, np.cumsum(np.bincount(index))[:-1])
    sizes = np.array([2 ** int(np.ceil(np.log2(len(own)))) for own in each])
    return tuple(
        np.stack([np.pad(own, (0, size - len(own)), constant_values=index.size) for own in members])
        for size in np.unique(sizes)
        for members in [[own for own, k in zip(each, sizes, strict=True) if k == size]]
    )


def width(stacks: Stacks) -> int:
    """K of the largest group."""
    return max(members.shape[1] for members in stacks)


def of_members(x: Any, members: Any, fill: float = 0.0) -> Any:
    """What belongs to weights, by their groups."""
    return x.at[members].get(mode="fill", fill_value=fill)


def of_weights(each: Sequence[Any], stacks: Stacks, size: int) -> Any:
    """The inverse of :func:`of_members`, from all stacks; rows are filled up with zeros."""
    found = jnp.zeros((size, *each[-1].shape[2:]), each[-1].dtype)
    for x, members in zip(each, stacks, strict=True):
        rows = tuple(slice(n) for n in x.shape[2:])
        found = found.at[(members, *rows)].set(x, mode="drop")
    return found


def roots_of(scale_tril: Float[Array, "P K"], stacks: Stacks) -> list[Any]:
    """The Cholesky factors of the groups, (G, K, K); of what is not there 1."""

    def of(members):
        size = members.shape[1]
        missing = jnp.asarray(members == len(scale_tril))[..., None]
        rows = of_members(scale_tril[:, :size], members)
        return jnp.tril(rows) + jnp.eye(size) * missing

    return [of(members) for members in stacks]


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
    root = jnp.sqrt(precision)
    upper, half = _factor(root * features, root * residual)
    tril = solve_triangular(upper, jnp.eye(len(features)), trans=1, lower=False)
    logit = log_odds + 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(upper)))
    return Conditional(logit, half, tril)


def _factor(
    features: Float[Array, "K N"], residual: Float[Array, " N"]
) -> tuple[Float[Array, "K K"], Float[Array, " K"]]:
    """Upper triangular ``U`` with ``U U^T = I + F F^T``, and ``U^-1 F r``.

    From the features themselves: products of nearly equal ones would lose in single precision what
    tells them apart.
    """
    size = len(features)
    if size == 1:
        upper = jnp.sqrt(1 + features @ features.T)
        return upper, (features @ residual) / upper[0]
    # of the reversed rows, since the inverse of its factor is to be lower triangular
    tall = jnp.concatenate([features[::-1], jnp.eye(size)], axis=1).T
    orthogonal, R = jnp.linalg.qr(tall)
    # with a positive diagonal, as a Cholesky factor has it
    sign = jnp.where(jnp.diagonal(R) < 0, -1, 1)[::-1]
    return R[::-1, ::-1].T * sign, sign * (residual @ orthogonal[: len(residual)])[::-1]


def group_sweep(
    stacks: Stacks,
    rows: Float[Array, "P N"],
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: Callable[[Conditional, Any], Float[Array, " K"]],
    noise: Sequence[Any],
) -> tuple[Float[Array, " N"], list[Conditional]]:
    """One pass over all groups.

    :param stacks: from :func:`stacks_of`.
    :param rows: the whitened features.
    :param residual: whitened ``y - D w`` of the current weights.
    :param precision: common noise precision ``tau``.
    :param prior: of the weights; the log odds of a spike are those of its first member.
    :param put: the weights of a group that are put back, in units of their slabs' prior.
    :param noise: variates of the draws, of each stack with leading axis G.
    :return: the new residual, and the conditionals that the visits found, of each stack.
    """

    def visit(residual, group):
        index, scale, current, log_odds, noise = group
        features = scale[:, None] * of_members(rows, index)
        residual = residual + (current / scale) @ features
        found = conditional(features, residual, precision, log_odds)
        return residual - put(found, noise) @ features, found

    every = []
    for members, own in zip(stacks, noise, strict=True):
        current, log_odds = of_members(weights, members), prior.log_odds[members[:, 0]]
        groups = (jnp.asarray(members), _scales(members, prior), current, log_odds, own)
        residual, found = lax.scan(visit, residual, groups)
        every.append(found)
    return residual, every


def _scales(members: Any, prior: Prior) -> Float[Array, "G K"]:
    """Of the slabs; 1 of what is not there."""
    return jnp.sqrt(of_members(prior.variance, members, 1.0))


def gibbs_group_sweep(
    key: Array,
    stacks: Stacks,
    rows: Float[Array, "P N"],
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """Draw each spike and its slabs in turn, given all other weights; see :func:`group_sweep`.

    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, of each weight.
    """
    # a group has the logistic variate of its first weight
    logistic, normal = logistic_and_normal(key, weights)
    noise = [(logistic[members[:, 0]], of_members(normal, members)) for members in stacks]

    def included(found, noise):
        return found.logit > noise[0], found.tril @ (found.half + noise[1])

    def put(found, noise):
        spike, slab = included(found, noise)
        return jnp.where(spike, slab, 0)

    _, every = group_sweep(stacks, rows, residual, weights, precision, prior, put, noise)
    drawn = []
    for members, found, own in zip(stacks, every, noise, strict=True):
        spike, slab = jax.vmap(included)(found, own)
        # given s = 0 the slabs are drawn from their prior
        slab = _scales(members, prior) * jnp.where(spike[:, None], slab, own[1])
        each = spike.astype(int)[:, None], slab, nn.sigmoid(found.logit)[:, None]
        drawn.append([jnp.broadcast_to(x, members.shape) for x in each])
    spikes, slabs, inclusion = (
        of_weights([own[k] for own in drawn], stacks, weights.size) for k in range(3)
    )
    return spikes, slabs, inclusion


class GroupedMeanField(NamedTuple):
    """Independent groups: a spike, and a Gaussian of its slabs given that it is 1.

    The family of :class:`~numpyro_spikeslab.algebra.families.PairedMeanField`, with P weights in G
    groups.

    - **probs** - ``gamma = q(s = 1)``, the same for the members of a group.
    - **loc** - ``mu``, means of the slabs given ``s = 1``.
    - **scale_tril** - for each weight its row of the Cholesky factor of the covariance of its
      group's slabs given ``s = 1``, filled up with zeros.
    - **stacks** - from :func:`stacks_of`.
    """

    probs: Float[Array, " P"]
    loc: Float[Array, " P"]
    scale_tril: Float[Array, "P K"]
    stacks: Stacks

    @property
    def scale(self) -> Float[Array, " P"]:
        """Standard deviations of the slabs given ``s = 1``."""
        return jnp.linalg.norm(self.scale_tril, axis=1)

    @property
    def mean(self) -> Float[Array, " P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    def random_start(self, key: Array, scale: Float[Array, " P"]) -> "GroupedMeanField":
        """Another start, as that of pairs, with one ``gamma`` for each group."""
        pairs = PairedMeanField(self.probs, self.loc, scale).random_start(key, scale)
        first = [jnp.broadcast_to(pairs.probs[x[:, :1]], x.shape) for x in self.stacks]
        return self._replace(probs=of_weights(first, self.stacks, self.loc.size), loc=pairs.loc)

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["GroupedMeanField", Float[Array, " N"]]:
        """Update every group in turn. The residual passed and returned is that of ``<w>``."""

        def put(found, _):
            return nn.sigmoid(found.logit / temperature) * (found.tril @ found.half)

        stacks, size = self.stacks, self.loc.size
        rows, noise = feature_rows(design, size), [None] * len(stacks)
        residual, every = group_sweep(
            stacks, rows, residual, self.mean, precision, prior, put, noise
        )
        probs, loc, tril = [], [], []
        for members, found in zip(stacks, every, strict=True):
            scale = _scales(members, prior)
            gamma = nn.sigmoid(found.logit / temperature)[:, None]
            probs.append(jnp.broadcast_to(gamma, members.shape))
            loc.append(scale * jnp.einsum("gij,gj->gi", found.tril, found.half))
            tril.append(scale[..., None] * found.tril)
        new = (of_weights(x, stacks, size) for x in (probs, loc, tril))
        return self._replace(**dict(zip(self._fields, new, strict=False))), residual

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        rows = feature_rows(design, self.loc.size)

        def add(total, group):
            index, root = group
            x, loc = of_members(rows, index), of_members(self.loc, index)
            probs = self.probs[index[0]]
            slabs, means = jnp.sum((root.T @ x) ** 2), jnp.sum((loc @ x) ** 2)
            return total + probs * (slabs + (1 - probs) * means), None

        total = jnp.zeros((), rows.dtype)
        for members, roots in zip(self.stacks, self.roots, strict=True):
            total, _ = lax.scan(add, total, (jnp.asarray(members), roots))
        return total

    @property
    def roots(self) -> list[Float[Array, "G K K"]]:
        """Cholesky factors of the groups; of what is not there 1."""
        return roots_of(self.scale_tril, self.stacks)

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        return self.probs, self.probs * (self.loc**2 + self.scale**2)

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde, s) || p)``; the spikes have the log odds of their first members."""
        firsts = jnp.concatenate([members[:, 0] for members in self.stacks])
        spikes = spike_divergence(
            self.probs[firsts], Prior(prior.log_odds[firsts], prior.variance[firsts])
        )
        diagonals = [jnp.diagonal(roots, axis1=1, axis2=2) for roots in self.roots]
        own = of_weights(diagonals, self.stacks, self.loc.size)
        second_moment = (self.loc**2 + self.scale**2) / prior.variance
        slab = 0.5 * (second_moment - 1.0 + jnp.log(prior.variance)) - jnp.log(jnp.abs(own))
        return spikes + jnp.sum(self.probs * slab)
