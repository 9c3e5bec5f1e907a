# SPDX-License-Identifier: Apache-2.0
"""The Gaussian conditional of coefficients with Normal priors, of which observations are affine.

Arrays in, arrays out: this module knows no NumPyro.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular


class Conditional(NamedTuple):
    """Of B coefficients, as deviations from their prior means in units of the prior's scales.

    - **features** - what a unit of each adds to the K observations.
    - **root** - upper triangular ``R``, their precision is ``R^T R``.
    - **mean** - their conditional mean.
    """

    features: Float[Array, "B K"]
    root: Float[Array, "B B"]
    mean: Float[Array, " B"]

    def draw(self, noise: Float[Array, " B"]) -> Float[Array, " B"]:
        """
        :param noise: standard normal numbers.
        """
        return self.mean + solve_triangular(self.root, noise)


def conditional(
    features: Float[Array, "B K"],
    precision: Float[Array, " K"],
    residual: Float[Array, " K"],
    current: Float[Array, " B"],
) -> Conditional:
    """
    :param features: what a unit of each coefficient adds to the observations.
    :param precision: of the observations, 0 where they are missing.
    :param residual: what is left of them, with the current coefficients.
    :param current: these, as deviations in units of the prior's scales.
    """
    features = jnp.where(precision > 0, features, 0)
    # the prior counts as observations; products of the features would square their condition,
    # which single precision does not survive where an intercept stands beside effects of groups
    scale = jnp.sqrt(precision)
    rows = jnp.concatenate([jnp.eye(len(features), dtype=features.dtype), (features * scale).T])
    Q, root = jnp.linalg.qr(rows)
    change = solve_triangular(root, Q.T @ jnp.concatenate([-current, scale * residual]))
    return Conditional(features, root, current + change)
