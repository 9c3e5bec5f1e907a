# SPDX-License-Identifier: Apache-2.0
"""A design whose whitening changes in every step; a sweep whitens one block at a time.

A whitened copy of the design would cost more than the sweep, and its memory.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import Design, split_along


class ChangingDesign(NamedTuple):
    """A design before whitening, cut into K blocks of B features (zeros pad the last block).

    As the source of a :func:`~numpyro_spikeslab.algebra.pairs.sweep` its state is the residual of
    the N whitened observations outside of the span, then C in it.

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
