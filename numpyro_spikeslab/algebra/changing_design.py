# SPDX-License-Identifier: Apache-2.0
"""A design whose whitening changes in every step; a sweep whitens one block at a time.

A whitened copy of the design would cost more than the sweep, and its memory.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jax import lax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import (
    Conditional,
    Design,
    Prior,
    Put,
    coordinates,
    in_parts,
    pad,
    split_along,
    visits,
)


class ChangingDesign(NamedTuple):
    """A design before whitening, cut into K blocks of B features (zeros pad the last block).

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

    def sweep(
        self,
        residual: Float[Array, " NC"],
        weights: Float[Array, " P"],
        precision: Any,
        prior: Prior,
        put: Put,
    ) -> tuple[Float[Array, " NC"], Conditional]:
        """Visit all features in turn; see :meth:`~numpyro_spikeslab.algebra.pairs.Design.sweep`.

        :param residual: of the N whitened observations outside of the span, then C in it.
        """
        number, size = self.rows.shape[:2]

        def visit(residual, part):
            rows, weights, prior = part
            rows = self._whitened(rows)
            gram = rows @ rows.T
            pairs = coordinates(jnp.diagonal(gram), precision, prior)
            b, new = visits(gram, rows @ residual, weights, precision, pairs, put, None)
            return residual - (new - weights) @ rows, pairs.given(b)

        def parts(x, fill):
            return in_parts(pad(x, number * size, fill), number, size)

        # a variance of 0 has no logarithm
        blocks = self.rows, parts(weights, 0.0), Prior(*(parts(x, 1.0) for x in prior))
        residual, pair = lax.scan(visit, residual, blocks)
        return residual, Conditional(*(x.reshape(-1)[: len(weights)] for x in pair))

    def _whitened(self, rows: Float[Array, "B N"]) -> Float[Array, "B NC"]:
        rows = rows * self.whitening
        if not len(self.basis):
            return rows
        inside, outside = split_along(self.basis, rows)
        return jnp.concatenate([outside, inside @ self.root.T], axis=1)


AnyDesign = Design | ChangingDesign
