# SPDX-License-Identifier: Apache-2.0
"""The Gaussian conditional of coefficients with Normal priors, of which observations are affine."""

from typing import NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_spikeslab.algebra.pairs import Design, in_parts


class Apart(NamedTuple):
    """Features in two parts: what lies in the span of B directions, and the rest.

    Coefficients take over the first. Beside an intercept, of columns whose means are a thousand
    times their spread hardly a millionth of the squares counts, which differences of products of
    whole features would lose to rounding.

    - **basis** - of the span, orthonormal.
    - **inside** - coordinates of the features in it.
    - **rest**, **products** - what the features have beyond it, and products of that.
    """

    basis: Float[Array, "B K"]
    inside: Float[Array, "*G P B"]
    rest: Float[Array, "*G P K"]
    products: Float[Array, "*G P P"]


def taken_apart(features: Float[Array, "*G P K"], directions: Float[Array, "B K"]) -> Apart:
    """
    :param features: their leading axes are those of blocks, or none.
    :param directions: any will do; those of the coefficients are of use.
    """
    basis = jnp.linalg.qr(directions.T)[0].T
    inside = features @ basis.T
    rest = features - inside @ basis
    # what rounding has left in the span is large beside the rest
    more = rest @ basis.T
    rest -= more @ basis
    return Apart(basis, inside + more, rest, rest @ jnp.swapaxes(rest, -1, -2))


class Without(NamedTuple):
    """Observations whose B coefficients are integrated out: with what a unit of each adds as the
    columns of C, whitened and in units of the prior's scales, their covariance is ``I + C C^T``.

    The QR decomposition of C below the unit matrix has the upper square U and below it V, and
    ``V V^T`` is what the coefficients take over. ``T^T T = I - V V^T`` with
    ``T = I - V (I + U)^{-1} V^T``. No products of the coefficients' columns are made, which would
    square their condition: single precision would not survive that where an intercept stands beside
    effects of groups.

    - **root** - upper triangular ``R``, the coefficients' precision is ``R^T R``.
    - **U**, **V** - as above.
    """

    root: Float[Array, "B B"]
    U: Float[Array, "B B"]
    V: Float[Array, "K B"]

    def whiten(self, rows: Float[Array, "*P K"]) -> Float[Array, "*P K"]:
        """``T`` times each row."""
        one = jnp.eye(len(self.U), dtype=self.U.dtype)
        # of all signs of its rows, those of a positive diagonal keep I + U away from singular
        upper = jnp.where(jnp.diagonal(self.U) < 0, -1, 1)[:, None] * jnp.triu(self.U)
        return rows - rows @ self.V @ solve_triangular(one + upper, one).T @ self.V.T

    def design(self, design: Design, apart: Apart | None) -> Design:
        """A design, whitened.

        :param apart: its features taken apart once, if it is constant.
        """
        if apart is None:
            white = self.whiten(design.rows)
            return Design(white, white @ jnp.swapaxes(white, -1, -2))
        white = self.whiten(apart.rest) + apart.inside @ self.whiten(apart.basis)
        return Design(white, self.gram(apart, white))

    def gram(self, apart: Apart, white: Float[Array, "*G P K"]) -> Float[Array, "*G P P"]:
        """Products of whitened features.

        :param white: the features, whitened.
        """
        inside, index = apart.inside, jnp.arange(white.shape[-2])
        basis, within = self.whiten(apart.basis), apart.rest @ self.V
        across = within @ (apart.basis @ self.V).T - 0.5 * inside @ (basis @ basis.T)
        mixed = across @ jnp.swapaxes(inside, -1, -2)
        products = apart.products - within @ jnp.swapaxes(within, -1, -2)
        products -= mixed + jnp.swapaxes(mixed, -1, -2)
        # what differences leave must not be negative
        return products.at[..., index, index].set(jnp.sum(white**2, axis=-1))

    def explained(
        self, residual: Float[Array, " K"], current: Float[Array, " B"]
    ) -> Float[Array, " B"]:
        """``R`` times the change that takes the coefficients to their conditional mean.

        :param residual: what the current ones leave of the observations, whitened.
        :param current: these, as deviations in units of the prior's scales.
        """
        return self.V.T @ residual - self.U.T @ current

    def mean(self, residual: Float[Array, " K"], current: Float[Array, " B"]) -> Float[Array, " B"]:
        """Conditional mean of the coefficients; arguments as in :meth:`explained`."""
        return current + solve_triangular(self.root, self.explained(residual, current))

    def draw(
        self, noise: Float[Array, " B"], residual: Float[Array, " K"], current: Float[Array, " B"]
    ) -> Float[Array, " B"]:
        """A draw of the coefficients; other arguments as in :meth:`explained`.

        :param noise: standard normal numbers.
        """
        return self.mean(residual, current) + solve_triangular(self.root, noise)

    def slopes(self, design: Design) -> Float[Array, "B P2"]:
        """By how much the conditional mean changes with a unit of the weight of each feature, those
        included that pad the last block.

        :param design: whitened.
        """
        along = jnp.reshape(design.rows @ self.V, (-1, self.V.shape[1]))
        return -solve_triangular(self.root, along.T)


def without(features: Float[Array, "B K"], precision: Float[Array, " K"]) -> Without:
    """
    :param features: what a unit of each coefficient adds to the observations, in units of the
        prior's scales.
    :param precision: of the observations, 0 where they are missing.
    """
    # the prior counts as observations
    one = jnp.eye(len(features), dtype=features.dtype)
    Q, root = jnp.linalg.qr(jnp.concatenate([one, whitened(features, precision).T]))
    return Without(root, *jnp.split(Q, [len(features)]))


def beside(design: Design, slopes: Float[Array, "B P"], features: Float[Array, "B K"]) -> Design:
    """A design of weights that coefficients follow.

    :param slopes: by how much each coefficient changes with a unit of each weight.
    :param features: what a unit of each coefficient adds to the observations, whitened.
    """
    num_blocks, size = design.rows.shape[:2]
    by_block = in_parts(slopes.T, num_blocks, size)
    return Design(design.rows + by_block @ features, None)


def whitened(rows: Float[Array, "*P K"], precision: Float[Array, " K"]) -> Float[Array, "*P K"]:
    """Rows by the square root of each observation's precision; they may be NaN where that is 0."""
    return jnp.where(precision > 0, rows, 0) * jnp.sqrt(precision)
