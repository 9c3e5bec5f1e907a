# SPDX-License-Identifier: Apache-2.0
"""The conditional of a (slab, spike) pair, and the sweep over all pairs of a design or of tasks.

A weight is ``w = s * w_tilde`` with ``w_tilde ~ N(0, sigma_w^2)`` and ``s ~ Bernoulli(pi)``. A
sweep visits each pair given all others and puts its expectation back (paired mean field) or a draw
(paired Gibbs); nothing else differs. An update has the methods ``put``, what a visit puts back;
``put_set``, the same for a set of weights; and ``outcome``, the new weights given all conditionals.
"""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, Shaped

import jax
from jax import lax, nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra import variates

# Features per block of a design. A sum for each single feature is bound by latency; with some
# hundreds of features the Gram matrices of the blocks outweigh the design itself.
BLOCK_SIZE = 128
# Features per block where Gram matrices change in every step, so that they cost less than a sweep.
CHANGING_BLOCK_SIZE = 16
# Above as many features products take only those whose weights are not 0, if these are few enough.
MAX_ALL = 10_000
MAX_NONZERO = 128


class Prior(NamedTuple):
    """Spike-and-slab prior of P weights, or of Q tasks with M weights each.

    - **log_odds** - ``log(pi / (1 - pi))``; shape (1, M) where all tasks agree.
    - **variance** - ``sigma_w^2`` of the slab, of the same shape.
    """

    log_odds: Float[Array, "*P"]
    variance: Float[Array, "*P"]

    def at(self, spikes: Any) -> "Prior":
        """Return the prior of each weight given all other spikes, on which it does not depend."""
        return self


class Coordinates(NamedTuple):
    """Terms of the conditionals of B pairs that the residual does not change.

    - **squares** - ``<phi_m, phi_m>``.
    - **variance** - ``1 / A``, variance of the slab where it is included.
    - **log_odds** - log odds of inclusion where ``b = 0``.
    """

    squares: Float[Array, "*B"]
    variance: Float[Array, "*B"]
    log_odds: Float[Array, "*B"]

    def given(self, b: Any) -> "Conditional":
        """Return the conditionals, given their linear terms ``b`` (supplement, eq. 1)."""
        loc = b * self.variance
        return Conditional(self.log_odds + 0.5 * b * loc, loc, self.variance)


class Conditional(NamedTuple):
    """A pair given everything else: the logit of its inclusion, and its slab where included."""

    logit: Float[Array, "*B"]
    loc: Float[Array, "*B"]
    variance: Float[Array, "*B"]


def coordinates(squares: Float[Array, "*B"], precision: Any, prior: Prior) -> Coordinates:
    """Compute the terms of ``A = tau <phi, phi> + 1/sigma_w^2`` (supplement, eq. 1).

    :param squares: ``<phi, phi>`` of each feature. The shapes of all three arguments broadcast.
    :param precision: noise precision ``tau``.
    """
    variance = 1.0 / (precision * squares + 1.0 / prior.variance)
    log_odds = prior.log_odds + 0.5 * jnp.log(variance / prior.variance)
    return Coordinates(squares, variance, log_odds)


class Draws(NamedTuple):
    """Draws of pairs; excluded slabs have their prior.

    - **spikes**, **slabs** - of any shape.
    - **probs** - Rao-Blackwellised inclusion probabilities.
    """

    spikes: Shaped[Array, "*B"]
    slabs: Float[Array, "*B"]
    probs: Float[Array, "*B"]

    @classmethod
    def of(cls, spikes: Float[Array, "*B"], slabs: Float[Array, "*B"]) -> "Draws":
        """Make the draws with these spikes and slabs."""
        return cls(spikes.astype(int), slabs, spikes)

    @property
    def mean(self) -> Float[Array, "*B"]:
        """The weights."""
        return jnp.where(self.spikes > 0, self.slabs, 0.0)

    def product_variance(self, _: Any, variance: Any) -> Any:
        """Return the variance of weights times features with these variances."""
        return self.mean**2 * variance


class Draw(NamedTuple):
    """The update of weights by draws: ``noise`` are a standard logistic and a standard normal
    number of each weight, in the shape of the weights."""

    noise: tuple[Any, Any]

    def put(self, pair: Conditional, noise: Any) -> Any:
        """Return the draw of a single weight."""
        logistic, normal = noise
        return jnp.where(pair.logit > logistic, pair.loc + jnp.sqrt(pair.variance) * normal, 0.0)

    def outcome(self, pair: Conditional, prior: Prior) -> Draws:
        """Return the draws of single weights whose conditionals these are."""
        logistic, normal = self.noise
        spike = pair.logit > logistic
        included = pair.loc + jnp.sqrt(pair.variance) * normal
        slab = jnp.where(spike, included, jnp.sqrt(prior.variance) * normal)
        return Draws(spike.astype(int), slab, nn.sigmoid(pair.logit))

    def put_set(self, conditional: Any, patterns: Any, variance: Any, noise: Any) -> Any:
        """Draw a set of weights, from the uniform number of its first weight."""
        (logistic, normal), probs = noise, nn.softmax(conditional.logits)
        number = variates.index(nn.sigmoid(logistic[0]), probs)
        spikes = jnp.asarray(patterns)[number]
        # the first pattern includes no slabs
        mean, root = (x[jnp.maximum(number - 1, 0)] for x in conditional.slabs[:2])
        # given s = 0 the slabs are drawn from their prior
        slabs = jnp.where(spikes > 0, mean + normal @ root, jnp.sqrt(variance) * normal)
        return spikes * slabs, Draws(spikes, slabs, probs @ patterns)


# The sweep


def sweep(
    source: Any,
    state: Any,
    weights: Float[Array, "P *T"],
    precision: Any,
    prior: Prior,
    update: Any,
) -> tuple[Conditional, Any]:
    """Visit all coordinates in turn, of one task or of many tasks side by side.

    Inside a block the visits are Gauss-Seidel on its Gram matrix. Between blocks the residual is
    updated by matrix products. The result does not depend on the blocks.

    :param source: of inner products. ``blocks`` are arrays of K blocks of B features, and
        ``of(block, weights, state)`` returns the products of a block, see :func:`visits`, and the
        state after its weights have changed, as a function of their change.
    :param state: of the source, at these weights, such as the residual.
    :param weights: current weights (expectations or draws); tasks are the last axis.
    :param update: :class:`Draw` or :class:`~numpyro_spikeslab.algebra.families.Expectation`.
    :return: the conditional of each visit, and the state at the new weights.
    """
    size = len(weights)
    number, block_size = source.blocks[0].shape[:2]

    cut = partial(in_parts, number=number, size=block_size)

    def visit(carry, part):
        weights, state = carry
        start, block, prior, noise = part
        products, after = source.of(block, weights, state)
        old = lax.dynamic_slice_in_dim(weights, start, block_size)
        pair, new = visits(products, old, precision, prior, update._replace(noise=noise))
        weights = lax.dynamic_update_slice_in_dim(weights, new, start, 0)
        return (weights, after(new - old)), pair

    starts = block_size * jnp.arange(number)
    # a variance of 0 has no logarithm
    prior, noise = Prior(*(cut(x, fill=1.0) for x in prior)), jax.tree.map(cut, update.noise)
    carry = pad(weights, number * block_size), state
    (_, state), pair = lax.scan(visit, carry, (starts, source.blocks, prior, noise))
    return Conditional(*(x.reshape(-1, *weights.shape[1:])[:size] for x in pair)), state


def visits(
    products: tuple[Any, Float[Array, "B *T"], Any],
    weights: Float[Array, "B *T"],
    precision: Any,
    prior: Prior,
    update: Any,
) -> tuple[Conditional, Float[Array, "B *T"]]:
    """Visit B coordinates in turn; see :func:`sweep`.

    :param products: inner products of the features with each other, an array (B, B), or, of tasks
        side by side, a function of two features; with the residual of the current weights; and of
        each feature with itself.
    :return: the conditionals of the visits, and the new weights.
    """
    gram, cross, squares = products
    pairs = coordinates(squares, precision, prior)

    def visit(cross, square, old, pair, noise):
        b = precision * (cross + square * old)
        new = update.put(pair.given(b), noise)
        # without a barrier XLA computes the change anew wherever it is used
        return lax.optimization_barrier((b, new, old - new))

    def step(cross, coordinate):
        m, row, *part = coordinate
        b, new, change = visit(cross[m], row[m], *part)
        return cross + row * change, (b, new)

    if cross.ndim == 1:
        coordinates_of = jnp.arange(len(cross)), gram, weights, pairs, update.noise
        b, new = lax.scan(step, cross, coordinates_of)[1]
        return pairs.given(b), new
    # with many tasks, to sum up the earlier changes costs less than to update all products
    results: list[Any] = []
    for m in range(len(cross)):
        before = (gram(m, j) * change for j, (_, _, change) in enumerate(results))
        part = jax.tree.map(lambda x, m=m: x[m], (weights, pairs, update.noise))
        results.append(visit(sum(before, cross[m]), gram(m, m), *part))
    b, new, _ = map(jnp.stack, zip(*results, strict=True))
    return pairs.given(b), new


def pad(x: Shaped[Array, "P ..."], size: int, fill: float = 0.0) -> Shaped[Array, "P2 ..."]:
    """Append ``fill`` to the leading axis until it has ``size`` entries."""
    width = [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, width, constant_values=fill)


def parts_of(total: int, largest: int) -> tuple[int, int]:
    """Return number and size of parts of at most ``largest``, as equal as possible."""
    number = -(-total // largest)
    return number, -(-total // number)


def in_parts(
    x: Shaped[Array, "P ..."], number: int, size: int, fill: float = 0.0
) -> Shaped[Array, "K B ..."]:
    """Cut the leading axis into parts; ``fill`` fills up the last one."""
    return pad(x, number * size, fill).reshape(number, size, *x.shape[1:])


# Designs of one task


class Design(NamedTuple):
    """A whitened design, cut into K blocks of B features each (zero features pad the last block).

    As the source of a :func:`sweep` its state is the whitened residual ``y - D w``.

    - **rows** - features as rows, each observation scaled by its relative precision's square root.
    - **gram** - inner products of the rows of a block; `None` if a sweep is to make them.
    - **inside** - C more observations behind those of the rows, which change alone, or `None`.
    """

    rows: Float[Array, "*K B N"]
    gram: Float[Array, "*K B B"] | None
    inside: Float[Array, "*K B C"] | None = None

    @property
    def parts(self) -> list[Float[Array, "R _"]]:
        """The rows, and those inside, with rows that pad the last block; without would be copies.
        To join both is a copy, too."""
        parts = [self.rows] if self.inside is None else [self.rows, self.inside]
        return [x.reshape(-1, x.shape[-1]) for x in parts]

    @property
    def features(self) -> Float[Array, "R NC"]:
        """All rows, joined with those inside."""
        return jnp.concatenate(self.parts, axis=-1)

    def taken(self, index: Int[Array, "*I"]) -> Float[Array, "*I NC"]:
        """Take some features, zeros where there are none."""
        return jnp.concatenate(
            [x.at[index].get(mode="fill", fill_value=0) for x in self.parts], axis=-1
        )

    def times(self, x: Float[Array, "NC *X"]) -> Float[Array, "R *X"]:
        """Compute the products of all features with some vectors."""
        N, (rows, *inside) = self.rows.shape[-1], self.parts
        return rows @ x[:N] + inside[0] @ x[N:] if inside else rows @ x

    def combined(self, weights: Float[Array, " R"]) -> Float[Array, " NC"]:
        """Compute the sum of all features times weights."""
        return jnp.concatenate([weights @ x for x in self.parts])

    @property
    def blocks(self) -> "Design":
        return self

    def of(self, block: "Design", weights: Any, residual: Float[Array, " NC"]) -> Any:
        if block.gram is None:
            rows = block.features
            products = rows @ rows.T, rows @ residual, jnp.sum(rows**2, axis=1)
        else:
            gram = block.gram
            if block.inside is not None:
                gram += block.inside @ block.inside.T
            products = gram, block.times(residual), jnp.diagonal(gram)
        return products, lambda change: residual - block.combined(change)


class ChangingDesign(NamedTuple):
    """A design before whitening, cut into K blocks of B features (zeros pad the last block).

    A whitened copy would cost more than a sweep, and its memory; so a sweep whitens one block at a
    time. As the source of a :func:`sweep` its state is the residual of the N whitened observations
    outside of the span, then C in it.

    - **rows** - features as rows, 0 where nothing is observed.
    - **whitening** - square root of each observation's relative precision.
    - **basis** - orthonormal basis of the span of whitened covariates, whose coefficients are
      integrated out; without rows if there are none.
    - **root** - what this multiplies the coordinates of the features in the span by.
    """

    rows: Float[Array, "K B N"]
    whitening: Float[Array, " N"]
    basis: Float[Array, "C N"]
    root: Float[Array, "C C"]

    @property
    def blocks(self) -> tuple[Any]:
        return (self.rows,)

    def of(self, block: tuple[Any], weights: Any, residual: Float[Array, " NC"]) -> Any:
        rows = self._whitened(*block)
        gram = rows @ rows.T
        return (gram, rows @ residual, jnp.diagonal(gram)), lambda change: residual - change @ rows

    def _whitened(self, rows: Float[Array, "B N"]) -> Float[Array, "B NC"]:
        rows = rows * self.whitening
        if not len(self.basis):
            return rows
        inside, outside = split_along(self.basis, rows)
        return jnp.concatenate([outside, inside @ self.root.T], axis=1)


AnyDesign = Design | ChangingDesign


def block_design(
    rows: Float[Array, "P N"],
    whitening: Float[Array, " N"] | None,
    block_size: int = BLOCK_SIZE,
    products: bool = True,
) -> Design:
    """Whiten a design and cut it into blocks.

    :param rows: the design, features as rows.
    :param whitening: square root of each observation's relative precision, 0 where it is missing.
    :param products: whether to make the Gram matrices of the blocks, for more than one sweep.
    """
    if whitening is not None:
        rows = rows * whitening[None, :]
    size = parts_of(len(rows), block_size)[1]
    # nothing is copied if no block has to be filled up
    size = next((x for x in range(size, size // 2, -1) if len(rows) % x == 0), size)
    rows = in_parts(rows, -(-len(rows) // size), size)
    return Design(rows, jnp.einsum("kbn,kcn->kbc", rows, rows) if products else None)


def feature_rows(design: Design, size: int) -> Float[Array, "P N"]:
    """Return the whitened features as rows, without those that pad the last block."""
    return design.features[:size]


def predictor(design: Design, weights: Float[Array, " P"]) -> Float[Array, " N"]:
    """Compute the whitened ``D w``; of many weights from those that are not zero, if few are."""
    size = design.rows.shape[0] * design.rows.shape[1]
    everything = pad(weights, size)
    if len(weights) <= MAX_ALL:
        return design.combined(everything)
    places = jnp.nonzero(weights, size=MAX_NONZERO, fill_value=size)[0]
    some = weights.at[places].get(mode="fill", fill_value=0), design.taken(places)
    is_sparse = jnp.count_nonzero(weights) <= MAX_NONZERO
    return lax.cond(is_sparse, lambda: some[0] @ some[1], lambda: design.combined(everything))


def feature_squares(design: Design, size: int) -> Float[Array, " P"]:
    """Compute the inner product of each whitened feature with itself."""
    squares = [jnp.sum(x[:size] ** 2, axis=1) for x in design.parts]
    if design.gram is not None:
        squares[0] = jnp.diagonal(design.gram, axis1=1, axis2=2).reshape(-1)[:size]
    return jnp.sum(jnp.stack(squares), axis=0)


def split_along(
    basis: Float[Array, "K N"], x: Float[Array, "*P N"]
) -> tuple[Float[Array, "*P K"], Float[Array, "*P N"]]:
    """Return the coordinates of rows in an orthonormal basis, and the rows outside of its span."""
    inside = x @ basis.T
    outside = x - inside @ basis
    # rounding errors in the span may be large beside the part outside of it
    correction = outside @ basis.T
    return inside + correction, outside - correction @ basis
