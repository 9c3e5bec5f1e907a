# SPDX-License-Identifier: Apache-2.0
"""The conditional of one (slab, spike) pair and the sweep over all of them.

A weight is ``w = s * w_tilde`` with ``w_tilde ~ N(0, sigma_w^2)`` and ``s ~ Bernoulli(pi)``. Given
everything else the pair has one conditional. Paired mean field puts its expectation back into the
sweep (:func:`expectation`), the paired Gibbs sampler a draw (:func:`draw`); nothing else differs.

Arrays in, arrays out: this module knows no NumPyro.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int
import numpy as np

import jax
from jax import lax, nn
import jax.numpy as jnp
from jax.scipy.special import xlogy

# Features per block of a sweep. One feature at a time is bound by the latency of a sum that XLA
# does not vectorise; beyond about a hundred the Gram matrices outweigh the design itself.
BLOCK_SIZE = 64

# Tasks that share features and are visited at once: what so many carry stays in the cache.
TILE = 512

# Features per block where each task weighs the points in its own way: a block needs the residual
# twice, and its Gram matrices of all tasks as many numbers as there are pairs in it.
TASK_BLOCK_SIZE = 8


# Steps towards the optimum of a pair in a visit; the next sweep goes on where they end.
NUM_CLIMBS = 2


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


def expectation_beside(temperature: Any = 1.0) -> Put:
    """:func:`expectation` where coefficients follow each weight at once: see :func:`settled`."""

    def put(pair, known):
        probs, kept = known
        probs, loc = settled(pair, probs, kept, temperature)
        return probs * loc

    return put


def settled(
    pair: Conditional, probs: Float[Array, "*B"], kept: Float[Array, "*B"], temperature: Any = 1.0
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    r"""The factor of a pair that is best while coefficients are at their maximum given its mean.

    They follow ``<w> = gamma mu`` and not ``w``, so of the precision ``A`` of the slab only the
    part ``kept`` resists the mean, and all of it the variance. The bound is
    :math:`\gamma \omega + b^2 \gamma / (2 A (1 - \gamma + \gamma k)) + T H(\gamma)` at its maximum
    over ``mu``. It has up to two maxima, and ``gamma = sigmoid`` of its first derivative climbs to
    one: from the current value, from 0 and from 1, of which the best is kept.

    :param pair: from the whole precision, and from linear terms without the coefficients.
    :param probs: the current inclusion probability.
    :return: ``gamma`` and ``mu``.
    """
    explained = 0.5 * pair.loc**2 / pair.variance
    log_odds = pair.logit - explained

    def resists(probs):
        return 1 - probs + probs * kept

    def climbed(probs):
        for _ in range(NUM_CLIMBS):
            probs = nn.sigmoid((log_odds + explained / resists(probs) ** 2) / temperature)
        entropy = -xlogy(probs, probs) - xlogy(1 - probs, 1 - probs)
        reached = probs * (log_odds + explained / resists(probs)) + temperature * entropy
        return probs, reached

    probs, best = climbed(probs)
    for end in (0.0, 1.0):
        other, reached = climbed(jnp.full_like(probs, end))
        probs, best = jnp.where(reached > best, other, probs), jnp.maximum(reached, best)
    return probs, pair.loc / resists(probs)


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
    gram: Float[Array, "B B *#T"],
    cross: Float[Array, "B *T"],
    weights: Float[Array, "B *T"],
    precision: Any,
    pairs: Coordinates,
    put: Put,
    *,
    noise: Any = None,
) -> Float[Array, "B *T"]:
    """Visit B coordinates in turn, carrying ``cross = <phi_m, residual>`` of all of them.

    :param gram: inner products of the features. Tasks that are visited at once are the last axis of
        all arrays, here of size 1 where they share the products.
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
        # without a barrier XLA finds the change anew for each entry of cross
        change = lax.optimization_barrier(weight - put(pair.given(b), noise_m))
        return cross + gram_m * change, b

    return lax.scan(visit, cross, (jnp.arange(cross.shape[0]), gram, weights, pairs, noise))[1]


def task_sweep(
    gram: Float[Array, "#Q M M"],
    linear: Float[Array, "Q M"],
    weights: Float[Array, "Q M"],
    precision: Float[Array, " Q"],
    prior: Prior,
    put: Put,
    *,
    noise: Any = None,
) -> Conditional:
    """Visit the M coordinates of Q tasks in turn, many tasks at once: a :func:`gram_sweep` each.

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

    def of(gram, cross, weights, precision, pairs, noise):
        return gram_sweep(gram, cross, weights, precision, pairs, put, noise=noise)

    if gram.shape[0] > 1:
        cross = linear - jnp.sum(gram * weights[:, None], axis=2)
        return pairs.given(jax.vmap(of)(gram, cross, weights, precision, pairs, noise))

    def visit(tile):
        linear, weights, precision, pairs, noise = tile
        cross = linear - gram[0] @ weights
        return pairs.given(of(gram[0, ..., None], cross, weights, precision, pairs, noise))

    return in_tiles(visit, (linear, weights, precision, pairs, noise))


def masked_task_sweep(
    features: tuple[Float[Array, "M N"], Float[Array, "M N"]],
    observations: tuple[Float[Array, "N Q"], Float[Array, "N Q"]],
    weights: Float[Array, "Q M"],
    precision: Float[Array, " Q"],
    prior: Prior,
    put: Put,
) -> Conditional:
    """:func:`task_sweep` where tasks weigh the points each in its own way.

    Gram matrices of all tasks would be Q M^2 numbers; here a tile of tasks carries its residual,
    and has the Gram matrices of one block of features at a time.

    :param features: means and variances of the features.
    :param observations: of the tasks, and the relative precision of each.
    """
    num_features = len(features[0])
    num_blocks = -(-num_features // TASK_BLOCK_SIZE)
    size = -(-num_features // num_blocks)

    def cut(x, fill=0.0):
        return pad(x, num_blocks * size, fill).reshape((num_blocks, size) + x.shape[1:])

    rows = jax.tree.map(cut, features)

    def visit(tile, points):
        weights, precision, prior = tile
        y, relative = points

        def block(residual, part):
            (mean, var), weights, prior = part
            gram = symmetric(lambda i, j: (mean[i] * mean[j]) @ relative, size)
            own, spread = mean**2 @ relative, var @ relative
            pairs = coordinates(own + spread, precision, prior)
            # to the linear terms only the means of the features count
            cross = mean @ residual - spread * weights
            b = gram_sweep(gram, cross, weights, precision, pairs, put)
            found = pairs.given(b)
            change = weights - put(found, None)
            return residual + relative * (mean.T @ change), found

        parts = rows, cut(weights), Prior(cut(prior.log_odds), cut(prior.variance, fill=1.0))
        residual = relative * (y - features[0].T @ weights)
        found = lax.scan(block, residual, parts)[1]
        return jax.tree.map(lambda x: x.reshape(num_blocks * size, -1)[:num_features], found)

    return in_tiles(visit, (weights, precision, prior), observations)


def symmetric(products: Callable[[Any, Any], Any], size: int) -> Float[Array, "B B ..."]:
    """A matrix whose upper triangle is computed, and its lower one copied.

    :param products: from rows and columns of the triangle to its entries.
    """
    rows, columns = np.triu_indices(size)
    place = np.zeros((size, size), int)
    place[rows, columns] = place[columns, rows] = np.arange(len(rows))
    return products(rows, columns)[place]


def in_tiles(visit: Callable, tasks: Any, *points: Any) -> Any:
    """Some tasks at a time, so many that what they carry stays in the cache.

    A tile has as many of the tasks of every device, which visits its own where they are sharded.

    :param visit: takes arrays whose last axis are the tasks, side by side, and returns such.
    :param tasks: arrays of all tasks, leading axis Q.
    :param points: arrays whose last axis is Q.
    :return: what all visits return, leading axis Q.
    """
    num_tasks, devices = len(jax.tree.leaves(tasks)[0]), jax.device_count()
    shards = devices if num_tasks % devices == 0 else 1
    each = num_tasks // shards
    num_tiles = -(-each // TILE)
    size = -(-each // num_tiles)
    tasks = jax.tree.map(lambda x: x.reshape(shards, each, *x.shape[1:]), tasks)
    points = jax.tree.map(lambda x: x.reshape(*x.shape[:-1], shards, each), points)

    def of(start):
        def cut(x, axis):
            tile = lax.dynamic_slice_in_dim(x, start, size, axis)
            return lax.collapse(tile, axis - 1, axis + 1)

        tile = jax.tree.map(lambda x: jnp.moveaxis(cut(x, 1), 0, -1), tasks)
        found = visit(tile, *jax.tree.map(lambda x: cut(x, x.ndim - 1), points))
        found = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), found)
        return jax.tree.map(lambda x: x.reshape(shards, size, *x.shape[1:]), found)

    def put_in(k, found):
        # the last tile may have some tasks of the one before, with the same result
        start = jnp.minimum(k * size, each - size)
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
        return jax.tree.map(put, found, of(start))

    shapes = jax.eval_shape(of, 0)
    nothing = jax.tree.map(lambda x: jnp.zeros((shards, each, *x.shape[2:]), x.dtype), shapes)
    found = lax.fori_loop(0, num_tiles, put_in, nothing)
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), found)


def sweep(
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: Put,
    *,
    noise: Any = None,
    spread: Float[Array, " P"] | None = None,
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
    :param spread: what counts for the precision of a weight beside the squares of the design, and
        not for its linear term.
    :return: the new residual, and the conditional that each visit found.
    """
    num_blocks, block_size = design.rows.shape[:2]

    def cut(x, fill=0.0):
        padded = pad(x, num_blocks * block_size, fill)
        return padded.reshape((num_blocks, block_size) + x.shape[1:])

    # a positive variance keeps the conditional of the padded features finite
    prior = Prior(cut(prior.log_odds), cut(prior.variance, fill=1.0))
    squares = jnp.diagonal(design.gram, axis1=1, axis2=2)
    more = 0.0 if spread is None else cut(spread)
    pairs = coordinates(squares + more, precision, prior)._replace(squares=squares)

    def visit(residual, block):
        rows, gram, weights, pairs, noise = block
        b = gram_sweep(gram, rows @ residual, weights, precision, pairs, put, noise=noise)
        return residual + (weights - put(pairs.given(b), noise)) @ rows, b

    # the kept part of a padded precision is divided by
    known = jax.tree.map(partial(cut, fill=1.0), noise)
    blocks = (design.rows, design.gram, cut(weights), pairs, known)
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


def feature_rows(design: Design, size: int) -> Float[Array, "P N"]:
    """The whitened features as rows, without those that pad the last block."""
    return design.rows.reshape(-1, design.rows.shape[-1])[:size]


def predictor(design: Design, weights: Float[Array, " P"]) -> Float[Array, " N"]:
    """Whitened ``D w``."""
    rows = design.rows.reshape(-1, design.rows.shape[-1])
    return pad(weights, rows.shape[0]) @ rows


def feature_squares(design: Design, size: int) -> Float[Array, " P"]:
    """Inner product of each whitened feature with itself."""
    return jnp.diagonal(design.gram, axis1=1, axis2=2).reshape(-1)[:size]


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
    _, pair = sweep(design, residual, weights, precision, prior, draw, noise=noise)
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
    pair = task_sweep(gram, linear, weights, precision, prior, draw, noise=noise)
    return _drawn(pair, noise, prior)


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
