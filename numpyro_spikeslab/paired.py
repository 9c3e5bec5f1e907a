# SPDX-License-Identifier: Apache-2.0
"""The conditional of one (slab, spike) pair and the sweep over all of them.

A weight is ``w = s * w_tilde`` with ``w_tilde ~ N(0, sigma_w^2)`` and ``s ~ Bernoulli(pi)``. Given
everything else the pair has one conditional. Paired mean field puts its expectation back into the
sweep (:func:`expectation`), the paired Gibbs sampler a draw (:func:`draw`); nothing else differs.

Arrays in, arrays out: this module knows no NumPyro.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

import jax
from jax import lax, nn
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import xlogy

# Features per block of a sweep. One feature at a time is bound by the latency of a sum that XLA
# does not vectorise; beyond about a hundred the Gram matrices outweigh the design itself.
BLOCK_SIZE = 64


class Prior(NamedTuple):
    """Spike-and-slab prior of P weights, or of Q tasks with M weights each.

    - **log_odds** - ``log(pi / (1 - pi))``, shape (P,) or (Q, M).
    - **variance** - ``sigma_w^2`` of the slab, likewise.
    """

    log_odds: Float[Array, "*P"]
    variance: Float[Array, "*P"]


class Design(NamedTuple):
    """A whitened design, cut into K blocks of B features each (zero features pad the last block).

    - **rows** - features as rows, each observation scaled by its relative precision's square root.
    - **gram** - inner products of the features of a block.
    """

    rows: Float[Array, "K B N"]
    gram: Float[Array, "K B B"]


class Coordinates(NamedTuple):
    """What the conditionals of B pairs owe to precisions alone, computed once for a sweep.

    - **squares** - ``<phi_m, phi_m>``.
    - **variance** - ``1 / A``, variance of the slab where it is included.
    - **log_odds** - log odds of inclusion where ``b = 0``.
    """

    squares: Float[Array, "*B"]
    variance: Float[Array, "*B"]
    log_odds: Float[Array, "*B"]

    def given(self, b: Any) -> "Conditional":
        """The conditionals, given their linear terms ``b`` (supplement, eq. 1)."""
        loc = b * self.variance
        return Conditional(self.log_odds + 0.5 * b * loc, loc, self.variance)


class Conditional(NamedTuple):
    """A pair given everything else: the logit of its inclusion, and its slab where included."""

    logit: Float[Array, "*B"]
    loc: Float[Array, "*B"]
    variance: Float[Array, "*B"]


Put = Callable[[Conditional, Any], Any]
"""``(conditional, noise) -> weight put back into the sweep``, elementwise."""


def expectation(temperature: Any = 1.0) -> Put:
    """Put the expectation ``<w> = gamma mu`` back: paired mean field.

    :param temperature: divides the logit; above 1 it flattens the inclusion probabilities.
    """
    return lambda pair, _: nn.sigmoid(pair.logit / temperature) * pair.loc


def draw(pair: Conditional, noise: tuple[Any, Any]) -> Any:
    """Put a draw of the pair back: paired Gibbs.

    :param noise: a standard logistic and a standard normal variate; a logistic variate below the
        logit has probability ``sigmoid(logit)``.
    """
    logistic, normal = noise
    return jnp.where(pair.logit > logistic, pair.loc + jnp.sqrt(pair.variance) * normal, 0.0)


def coordinates(squares: Float[Array, "*B"], precision: Any, prior: Prior) -> Coordinates:
    """``A = tau <phi, phi> + 1/sigma_w^2`` and the logit at ``b = 0`` (supplement, eq. 1).

    :param squares: inner product of each feature with itself.
    :param precision: noise precision ``tau``.
    :param prior: prior of the weights, in the shape of ``squares``.
    """
    variance = 1.0 / (precision * squares + 1.0 / prior.variance)
    log_odds = prior.log_odds + 0.5 * jnp.log(variance / prior.variance)
    return Coordinates(squares, variance, log_odds)


def gram_sweep(
    gram: Float[Array, "B B"],
    cross: Float[Array, " B"],
    weights: Float[Array, " B"],
    precision: Any,
    pairs: Coordinates,
    put: Put,
    noise: Any = None,
) -> Float[Array, " B"]:
    """Visit B coordinates in turn, carrying ``cross = <phi_m, residual>`` of all of them.

    :param gram: inner products of the features.
    :param cross: inner products of the features with the residual of the current weights.
    :param weights: current weights (expectations or draws).
    :param precision: noise precision ``tau``.
    :param pairs: from :func:`coordinates`.
    :param put: :func:`expectation` or :func:`draw`.
    :param noise: variates of the draw, leading axis B.
    :return: the linear terms ``b`` that the visits found; all else follows from them.
    """

    def visit(cross, coordinate):
        m, gram_m, weight, pair, noise_m = coordinate
        b = precision * (cross[m] + pair.squares * weight)
        return cross + gram_m * (weight - put(pair.given(b), noise_m)), b

    return lax.scan(visit, cross, (jnp.arange(cross.shape[0]), gram, weights, pairs, noise))[1]


def task_sweep(
    gram: Float[Array, "#Q M M"],
    linear: Float[Array, "Q M"],
    weights: Float[Array, "Q M"],
    precision: Float[Array, " Q"],
    prior: Prior,
    put: Put,
    noise: Any = None,
) -> Conditional:
    """Visit the M coordinates of Q tasks in turn, all tasks at once: a :func:`gram_sweep` each.

    :param gram: inner products of the M features over the observations of each task (their
        expectations, where the features are random), or one for all tasks.
    :param linear: inner products of the features with the observations of each task.
    :param weights: current weights (expectations or draws).
    :param precision: noise precision of each task.
    :param prior: prior of the weights, in their shape.
    :param put: :func:`expectation` or :func:`draw`.
    :param noise: variates of the draw, of shape (Q, M).
    """
    squares = jnp.broadcast_to(jnp.diagonal(gram, axis1=1, axis2=2), weights.shape)
    pairs = coordinates(squares, precision[:, None], prior)
    cross = linear - jnp.sum(gram * weights[:, None], axis=2)
    shared = gram.shape[0] == 1

    def of_task(gram, cross, weights, precision, pairs, noise):
        return gram_sweep(gram, cross, weights, precision, pairs, put, noise)

    b = jax.vmap(of_task, in_axes=(None if shared else 0, 0, 0, 0, 0, 0))(
        gram[0] if shared else gram, cross, weights, precision, pairs, noise
    )
    return pairs.given(b)


def sweep(
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: Put,
    noise: Any = None,
) -> tuple[Float[Array, " N"], Conditional]:
    """One pass over all coordinates: Gauss-Seidel inside blocks whose Gram matrix is known.

    A block costs two matrix-vector products and a :func:`gram_sweep`; the result is that of
    visiting one coordinate after the other.

    :param design: from :func:`block_design`.
    :param residual: whitened ``y - D w`` of the current weights.
    :param weights: current weights.
    :param precision: common noise precision ``tau``.
    :param prior: prior of the weights.
    :param put: :func:`expectation` or :func:`draw`.
    :param noise: variates of the draw, leading axis P.
    :return: the new residual, and the conditional that each visit found.
    """
    num_blocks, block_size = design.rows.shape[:2]

    def cut(x, fill=0.0):
        padded = pad(x, num_blocks * block_size, fill)
        return padded.reshape((num_blocks, block_size) + x.shape[1:])

    # a positive variance keeps the conditional of the padded features finite
    prior = Prior(cut(prior.log_odds), cut(prior.variance, fill=1.0))
    squares = jnp.diagonal(design.gram, axis1=1, axis2=2)
    pairs = coordinates(squares, precision, prior)

    def visit(residual, block):
        rows, gram, weights, pairs, noise = block
        b = gram_sweep(gram, rows @ residual, weights, precision, pairs, put, noise)
        return residual + (weights - put(pairs.given(b), noise)) @ rows, b

    blocks = (design.rows, design.gram, cut(weights), pairs, jax.tree.map(cut, noise))
    residual, b = lax.scan(visit, residual, blocks)
    found = pairs.given(b)
    return residual, Conditional(*(x.reshape(-1)[: weights.shape[0]] for x in found))


def pad(x: Float[Array, "P ..."], size: int, fill: float = 0.0) -> Float[Array, "P2 ..."]:
    """Append ``fill`` to the leading axis until it has ``size`` entries."""
    width = [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, width, constant_values=fill)


def block_design(
    rows: Float[Array, "P N"], whitening: Float[Array, " N"] | None, block_size: int = BLOCK_SIZE
) -> Design:
    """Whiten a design and cut it into blocks with their Gram matrices.

    :param rows: the design, features as rows.
    :param whitening: square root of each observation's relative precision, 0 where it is missing;
        `None` leaves the rows as they are.
    :param block_size: features per block.
    """
    num_features, num_obs = rows.shape
    # blocks of equal size, so that as few zero features as possible are appended
    num_blocks = -(-num_features // block_size)
    block_size = -(-num_features // num_blocks)
    if whitening is not None:
        rows = rows * whitening[None, :]
    rows = pad(rows, num_blocks * block_size).reshape(num_blocks, block_size, num_obs)
    return Design(rows, jnp.einsum("kbn,kcn->kbc", rows, rows))


def predictor(design: Design, weights: Float[Array, " P"]) -> Float[Array, " N"]:
    """Whitened ``D w``."""
    rows = design.rows.reshape(-1, design.rows.shape[-1])
    return pad(weights, rows.shape[0]) @ rows


class PairedMeanField(NamedTuple):
    """``q(w_tilde, s)`` of eq. (5): P independent pairs, each of shape (P,).

    - **probs** - ``gamma = q(s = 1)``.
    - **loc** - ``mu``, mean of the slab given ``s = 1``.
    - **scale** - square root of ``v``, its variance given ``s = 1``.

    Given ``s = 0`` the slab has its prior (Property 2 of the paper).
    """

    probs: Float[Array, " P"]
    loc: Float[Array, " P"]
    scale: Float[Array, " P"]

    @property
    def mean(self) -> Float[Array, " P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    @property
    def variance(self) -> Float[Array, " P"]:
        """``<w^2> - <w>^2``."""
        return self.probs * (self.loc**2 + self.scale**2) - self.mean**2

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["PairedMeanField", Float[Array, " N"]]:
        """Update every pair in turn. The residual passed and returned is that of ``<w>``."""
        residual, pair = sweep(
            design, residual, self.mean, precision, prior, expectation(temperature)
        )
        probs = nn.sigmoid(pair.logit / temperature)
        return PairedMeanField(probs, pair.loc, jnp.sqrt(pair.variance)), residual

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        return feature_squares(design, self.probs.shape[0]) @ self.variance

    def predictor_variances(self, rows: Float[Array, "P N"]) -> Float[Array, " N"]:
        """Variance of ``D w`` at each observation of an unwhitened design."""
        return self.variance @ rows**2

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        return self.probs, self.probs * (self.loc**2 + self.scale**2)

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde, s) || p)``."""
        second_moment = (self.loc**2 + self.scale**2) / prior.variance
        slab = 0.5 * (second_moment - 1.0 - jnp.log(self.scale**2 / prior.variance))
        return spike_divergence(self.probs, prior) + jnp.sum(self.probs * slab)


def scale_mode(count: Any, squares: Any, prior_scale: Any) -> Any:
    """Square of the ``sigma`` that maximises ``-count log sigma - squares / (2 sigma^2)`` plus the
    log density of a HalfNormal prior; a prior of infinite scale is flat.
    """
    # the positive root of sigma^4 / s^2 + count sigma^2 - squares = 0, without cancellation
    return 2.0 * squares / (count + jnp.sqrt(count**2 + 4.0 * squares / prior_scale**2))


def feature_squares(design: Design, size: int) -> Float[Array, " P"]:
    """Inner product of each whitened feature with itself."""
    return jnp.diagonal(design.gram, axis1=1, axis2=2).reshape(-1)[:size]


def spike_divergence(probs: Float[Array, " P"], prior: Prior) -> Float[Array, ""]:
    """``KL(Bernoulli(gamma) || Bernoulli(pi))``, summed."""
    negative_entropy = xlogy(probs, probs) + xlogy(1.0 - probs, 1.0 - probs)
    cross_entropy = probs * nn.log_sigmoid(prior.log_odds) + (1.0 - probs) * nn.log_sigmoid(
        -prior.log_odds
    )
    return jnp.sum(negative_entropy - cross_entropy)


class MeanField(NamedTuple):
    """``q(w_tilde) q(s)`` of eq. (4), the standard mean field.

    - **probs** - ``gamma = q(s = 1)``, shape (P,).
    - **loc** - mean of the slab, shape (P,).
    - **scale_tril** - Cholesky factor of the slab's covariance, shape (P, P).
    """

    probs: Float[Array, " P"]
    loc: Float[Array, " P"]
    scale_tril: Float[Array, "P P"]

    @property
    def mean(self) -> Float[Array, " P"]:
        """``<w> = gamma mu``."""
        return self.probs * self.loc

    @property
    def covariance(self) -> Float[Array, "P P"]:
        """Covariance of ``w = s * w_tilde``."""
        slab = self.scale_tril @ self.scale_tril.T
        spike = jnp.diag(self.probs * (1.0 - self.probs))
        outer = jnp.outer(self.probs, self.probs)
        return (outer + spike) * slab + spike * jnp.outer(self.loc, self.loc)

    def sweep(
        self, design: Design, residual: Any, precision: Any, prior: Prior, temperature: Any
    ) -> tuple["MeanField", Float[Array, " N"]]:
        """Update ``q(w_tilde)`` jointly, then every ``q(s_m)`` in turn."""
        size = self.probs.shape[0]
        rows = design.rows.reshape(-1, design.rows.shape[-1])[:size]
        gram = precision * rows @ rows.T
        target = precision * rows @ (residual + self.mean @ rows)
        spike = jnp.diag(self.probs * (1.0 - self.probs))
        slab_precision = gram * (jnp.outer(self.probs, self.probs) + spike) + jnp.diag(
            1.0 / prior.variance
        )
        # the inverse's Cholesky factor, from the Cholesky factor of the reversed matrix
        reverse = jnp.linalg.cholesky(slab_precision[::-1, ::-1])[::-1, ::-1].T
        scale_tril = jax.scipy.linalg.solve_triangular(reverse, jnp.eye(size), lower=True)
        covariance = scale_tril @ scale_tril.T
        loc = covariance @ (self.probs * target)
        interaction = gram * (jnp.outer(loc, loc) + covariance)
        squares = jnp.diagonal(interaction)

        def visit(probs, m):
            logit = prior.log_odds[m] + target[m] * loc[m] - 0.5 * squares[m]
            logit -= interaction[m] @ probs - squares[m] * probs[m]
            return probs.at[m].set(nn.sigmoid(logit / temperature)), None

        probs, _ = lax.scan(visit, self.probs, jnp.arange(size))
        new = MeanField(probs, loc, scale_tril)
        return new, residual + (self.mean - new.mean) @ rows

    def predictor_variance(self, design: Design) -> Float[Array, ""]:
        """Variance of ``D w``, summed over the whitened observations."""
        rows = design.rows.reshape(-1, design.rows.shape[-1])[: self.probs.shape[0]]
        return jnp.sum(self.predictor_variances(rows))

    def predictor_variances(self, rows: Float[Array, "P N"]) -> Float[Array, " N"]:
        """Variance of ``D w`` at each observation of an unwhitened design."""
        return jnp.sum(rows * (self.covariance @ rows), axis=0)

    @property
    def slab_moments(self) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
        """Expected number of slabs that the bound knows, and their expected squares."""
        squares = self.loc**2 + jnp.sum(self.scale_tril**2, axis=1)
        return jnp.ones_like(squares), squares

    def divergence(self, prior: Prior) -> Float[Array, ""]:
        """``KL(q(w_tilde) q(s) || p)``."""
        diagonal = jnp.diagonal(self.scale_tril)
        second_moment = self.slab_moments[1] / prior.variance
        slab = 0.5 * (second_moment - 1.0 + jnp.log(prior.variance)) - jnp.log(jnp.abs(diagonal))
        return spike_divergence(self.probs, prior) + jnp.sum(slab)


def gibbs_sweep(
    key: Array,
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """One exact paired Gibbs sweep (supplement, section 2).

    :param key: random key; a sweep's variates are drawn in one call each.
    :param residual: whitened ``y - D w`` of the current draw.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (P,).
    """
    noise = _variates(key, weights)
    _, pair = sweep(design, residual, weights, precision, prior, draw, noise)
    return _drawn(pair, noise, prior)


def gibbs_task_sweep(
    key: Array,
    gram: Float[Array, "#Q M M"],
    linear: Float[Array, "Q M"],
    weights: Float[Array, "Q M"],
    precision: Float[Array, " Q"],
    prior: Prior,
) -> tuple[Int[Array, "Q M"], Float[Array, "Q M"], Float[Array, "Q M"]]:
    """:func:`gibbs_sweep` of all tasks at once; see :func:`task_sweep`.

    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (Q, M).
    """
    noise = _variates(key, weights)
    pair = task_sweep(gram, linear, weights, precision, prior, draw, noise)
    return _drawn(pair, noise, prior)


class Slabs(NamedTuple):
    """B slabs that are integrated out, given which of them are included.

    - **gram** - products of the features, with the precision of the noise.
    - **linear** - products of the features with the observations, likewise.
    - **prior** - prior of the weights.
    """

    gram: Float[Array, "B B"]
    linear: Float[Array, " B"]
    prior: Prior

    def _factor(self, spikes: Float[Array, " B"]) -> tuple[Any, Any, Any]:
        """Prior scales, zero where excluded; ``L`` of the precision in these units; ``L^-1 b``."""
        scale = spikes * jnp.sqrt(self.prior.variance)
        precision = scale[:, None] * self.gram * scale + jnp.eye(scale.size, dtype=scale.dtype)
        L = jnp.linalg.cholesky(precision)
        return scale, L, solve_triangular(L, scale * self.linear, lower=True)

    def log_evidence(self, spikes: Float[Array, " B"]) -> Float[Array, ""]:
        """Log of how much better the included features explain the observations than none does."""
        _, L, half = self._factor(spikes)
        return 0.5 * half @ half - jnp.sum(jnp.log(jnp.diagonal(L)))

    def mean(self, spikes: Float[Array, " B"], noise: Any = 0.0) -> Float[Array, " B"]:
        """Means of the weights; a draw, with standard normal variates as ``noise``."""
        scale, L, half = self._factor(spikes)
        return scale * solve_triangular(L, half + noise, lower=True, trans=1)


def gibbs_block(
    key: Array, slabs: Slabs, spikes: Float[Array, " B"], may_be_empty: Any = True
) -> Float[Array, " B"]:
    """Draw each of B spikes in turn with all slabs integrated out, then the slabs together.

    :param spikes: current ones.
    :param may_be_empty: if not, the last spike stays.
    :return: the weights.
    """
    key_spike, key_slab = jax.random.split(key)
    logistic = jax.random.logistic(key_spike, spikes.shape, spikes.dtype)

    def visit(carry, coordinate):
        spikes, value = carry
        m, log_odds, logistic_m = coordinate
        other = spikes.at[m].set(1 - spikes[m])
        reached = slabs.log_evidence(other)
        logit = log_odds + jnp.where(spikes[m] > 0, value - reached, reached - value)
        moves = (logit > logistic_m) != (spikes[m] > 0)
        moves &= may_be_empty | jnp.any(other > 0)
        return (jnp.where(moves, other, spikes), jnp.where(moves, reached, value)), None

    items = (jnp.arange(spikes.size), slabs.prior.log_odds, logistic)
    (spikes, _), _ = lax.scan(visit, (spikes, slabs.log_evidence(spikes)), items)
    return slabs.mean(spikes, jax.random.normal(key_slab, spikes.shape, spikes.dtype))


def _variates(key: Array, weights: Float[Array, "*P"]) -> tuple[Any, Any]:
    key_spike, key_slab = jax.random.split(key)
    logistic = jax.random.logistic(key_spike, weights.shape, weights.dtype)
    return logistic, jax.random.normal(key_slab, weights.shape, weights.dtype)


def _drawn(pair: Conditional, noise: tuple[Any, Any], prior: Prior) -> tuple[Any, Any, Any]:
    """What :func:`draw` has put back, taken apart."""
    logistic, normal = noise
    spike = pair.logit > logistic
    # given s = 0 the slab is drawn from its prior
    included = pair.loc + jnp.sqrt(pair.variance) * normal
    slab = jnp.where(spike, included, jnp.sqrt(prior.variance) * normal)
    return spike.astype(int), slab, nn.sigmoid(pair.logit)
