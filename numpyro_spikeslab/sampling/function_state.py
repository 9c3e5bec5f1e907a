# SPDX-License-Identifier: Apache-2.0
"""The state of a sampler of latent functions, and what stays fixed while it moves."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.reading.function_prior import FunctionPrior


class State(NamedTuple):
    """The current draw of the functions and of everything that moves with them.

    - **phi** - values of the functions.
    - **theta** - logs of their kernels' parameters.
    - **weights** - the weights, zero where the spike is zero.
    - **slab_scales** - values of the slab scales' sites.
    - **slab_variance** - prior variances of the slabs at these scales.
    - **noise** - noise scale of each task.
    - **residual** - observations less the functions' contributions. While function m is updated,
      its own contribution is not subtracted.
    """

    phi: Float[Array, "M N"]
    theta: Float[Array, "M P"]
    weights: Float[Array, "Q M"]
    slab_scales: dict[str, Any]
    slab_variance: Float[Array, "Q M"]
    noise: Float[Array, " Q"]
    residual: Float[Array, "N Q"]

    @property
    def used(self) -> Bool[Array, " M"]:
        """Which functions have a nonzero weight."""
        return jnp.any(self.weights != 0, axis=0)


class Moves(NamedTuple):
    """Moves along with the functions, for a kernel that owns the weights.

    - **log_odds** - prior log odds of the weights.
    - **draw_slabs** - ``(key, slab_scales, weights) -> slab_scales, variances of the slabs``.
    - **own_noise** - which tasks have a noise scale of their own that moves.
    - **log_prior_of_noise** - ``(noise, task) -> log density``, for these tasks.
    - **rescale** - whether the length of each function's weights moves.
    - **flip** - whether their sign moves; the prior means must be zero.
    """

    log_odds: Float[Array, "Q M"]
    draw_slabs: Callable[[Array, dict[str, Any], Any], tuple[dict[str, Any], Any]]
    own_noise: Bool[Array, " Q"]
    log_prior_of_noise: Callable[[Any, Any], Any]
    rescale: bool
    flip: bool


class Fixed(NamedTuple):
    """Data and priors that stay fixed while functions are drawn.

    - **Y** - observations less their offset.
    - **relative** - precisions, relative to the tasks' noise precisions.
    - **functions** - prior of the functions; only parameters that may move are latent in it.
    - **moves** - what may move with the functions; `None` if only functions and kernels do.
    """

    Y: Float[Array, "N Q"]
    relative: Float[Array, "N Q"]
    functions: FunctionPrior
    moves: Moves | None

    def precision(self, noise: Float[Array, " Q"]) -> Float[Array, "N Q"]:
        """Precisions of the observations."""
        return self.relative / noise**2

    def linear_terms(self, state: State, w: Float[Array, "Q S"]) -> Float[Array, "S N"]:
        """Sums over tasks of weights times precision times residual, at each input."""
        return ((self.precision(state.noise) * state.residual) @ w).T

    def prior(self, state: State) -> Prior:
        """Prior of the weights, where these may move."""
        assert self.moves is not None
        return Prior(self.moves.log_odds, state.slab_variance)


class Function(NamedTuple):
    """The function that is updated.

    - **m** - its number.
    - **covariance** - its prior covariance.
    - **factor** - ``L`` of ``I + diag(a) K diag(a)``, with ``a**2`` its precisions from the tasks.
    """

    m: Int[Array, ""]
    covariance: Any
    factor: Any

    def solve_lower(self, x: Any) -> Any:
        """Multiply by ``L^-1``."""
        return self.covariance.solve_lower(self.factor, x)

    def solve(self, x: Any) -> Any:
        """Multiply by ``(L L^T)^-1``."""
        return self.covariance.solve_upper(self.factor, self.solve_lower(x))


class Evaluation(NamedTuple):
    """A log density with a function integrated out, and the matrices that it took.

    - **value** - the log density.
    - **covariance** - prior covariance of the function.
    - **factor** - ``L`` of ``I + diag(a) K diag(a)``.
    - **half** - ``L^-1`` times the columns that were passed in.
    """

    value: Float[Array, ""]
    covariance: Any
    factor: Any
    half: Float[Array, "N C"]

    @classmethod
    def of(cls, covariance: Any, factor: Any, columns: Float[Array, "N C"]) -> "Evaluation":
        """Evaluate the density of the deviations in the first column, without the constant.

        :param columns: deviations of the whitened observations from their prior mean, then any
            other columns to multiply by ``L^-1``.
        """
        half = covariance.solve_lower(factor, columns)
        value = -0.5 * half[:, 0] @ half[:, 0] - covariance.half_logdet(factor)
        return cls(value, covariance, factor, half)
