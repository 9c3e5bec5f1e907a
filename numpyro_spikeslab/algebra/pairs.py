# SPDX-License-Identifier: Apache-2.0
"""The conditional of one (slab, spike) pair and the sweep over all of them.

A weight is ``w = s * w_tilde`` with ``w_tilde ~ N(0, sigma_w^2)`` and ``s ~ Bernoulli(pi)``. Given
everything else the pair has one conditional. Paired mean field puts its expectation back into the
sweep (:func:`expectation`), the paired Gibbs sampler a draw (:func:`draw`); nothing else differs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

import jax
from jax import lax, nn
import jax.numpy as jnp

# Features per block of a sweep. One feature at a time is bound by the latency of a sum that XLA
# does not vectorise; with some hundreds the Gram matrices outweigh the design itself.
BLOCK_SIZE = 128


class Prior(NamedTuple):
    """Spike-and-slab prior of P weights, or of Q tasks with M weights each.

    - **log_odds** - ``log(pi / (1 - pi))``, shape (P,) or (Q, M), or one row where all tasks agree.
    - **variance** - ``sigma_w^2`` of the slab, likewise.
    """

    log_odds: Float[Array, "*P"]
    variance: Float[Array, "*P"]


class Design(NamedTuple):
    """A whitened design, cut into K blocks of B features each (zero features pad the last block).

    - **rows** - features as rows, each observation scaled by its relative precision's square root.
    - **gram** - inner products of the features of a block; `None` of a design for sums alone.
    """

    rows: Float[Array, "K B N"]
    gram: Float[Array, "K B B"] | None


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
    :param prior: prior of the weights. The shapes of all three broadcast.
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


def sweep(
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
    put: Put,
    *,
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

    cut = partial(in_parts, number=num_blocks, size=block_size)
    # a positive variance keeps the conditional of the padded features finite
    prior = Prior(cut(prior.log_odds), cut(prior.variance, fill=1.0))
    squares = feature_squares(design, num_blocks * block_size)
    pairs = coordinates(squares.reshape(num_blocks, block_size), precision, prior)

    def visit(residual, block):
        rows, gram, weights, pairs, noise = block
        b = gram_sweep(gram, rows @ residual, weights, precision, pairs, put, noise=noise)
        return residual + (weights - put(pairs.given(b), noise)) @ rows, b

    blocks = (design.rows, design.gram, cut(weights), pairs, jax.tree.map(cut, noise))
    residual, b = lax.scan(visit, residual, blocks)
    found = pairs.given(b)
    return residual, Conditional(*(x.reshape(-1)[: weights.shape[0]] for x in found))


def pad(x: Float[Array, "P ..."], size: int, fill: float = 0.0) -> Float[Array, "P2 ..."]:
    """Append ``fill`` to the leading axis until it has ``size`` entries."""
    width = [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, width, constant_values=fill)


def parts_of(total: int, largest: int) -> tuple[int, int]:
    """How many parts of at most ``largest`` there are, and the size of each: as equal as can be, so
    that as little as possible is appended."""
    number = -(-total // largest)
    return number, -(-total // number)


def in_parts(
    x: Float[Array, "P ..."], number: int, size: int, fill: float = 0.0
) -> Float[Array, "K B ..."]:
    """The leading axis cut into parts, the last of them with ``fill`` appended."""
    return pad(x, number * size, fill).reshape(number, size, *x.shape[1:])


def block_design(
    rows: Float[Array, "P N"], whitening: Float[Array, " N"] | None, block_size: int = BLOCK_SIZE
) -> Design:
    """Whiten a design and cut it into blocks with their Gram matrices.

    :param rows: the design, features as rows.
    :param whitening: square root of each observation's relative precision, 0 where it is missing;
        `None` leaves the rows as they are.
    :param block_size: features per block.
    """
    if whitening is not None:
        rows = rows * whitening[None, :]
    rows = in_parts(rows, *parts_of(len(rows), block_size))
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
    if design.gram is None:
        return jnp.sum(design.rows**2, axis=2).reshape(-1)[:size]
    return jnp.diagonal(design.gram, axis1=1, axis2=2).reshape(-1)[:size]


def gibbs_sweep(
    noise: tuple[Float[Array, " P"], Float[Array, " P"]],
    design: Design,
    residual: Float[Array, " N"],
    weights: Float[Array, " P"],
    precision: Any,
    prior: Prior,
) -> tuple[Int[Array, " P"], Float[Array, " P"], Float[Array, " P"]]:
    """One exact paired Gibbs sweep (supplement, section 2).

    :param noise: logistic and normal random numbers.
    :param residual: whitened ``y - D w`` of the current draw.
    :return: spikes, slabs and the Rao-Blackwellised inclusion probabilities, each of shape (P,).
    """
    _, pair = sweep(design, residual, weights, precision, prior, draw, noise=noise)
    return drawn(pair, noise, prior)


def drawn(pair: Conditional, noise: tuple[Any, Any], prior: Prior) -> tuple[Any, Any, Any]:
    """What :func:`draw` has put back, taken apart."""
    logistic, normal = noise
    spike = pair.logit > logistic
    # given s = 0 the slab is drawn from its prior
    included = pair.loc + jnp.sqrt(pair.variance) * normal
    slab = jnp.where(spike, included, jnp.sqrt(prior.variance) * normal)
    return spike.astype(int), slab, nn.sigmoid(pair.logit)
