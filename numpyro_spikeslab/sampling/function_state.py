# SPDX-License-Identifier: Apache-2.0
r"""The state of a sampler of latent functions, and functions that are integrated out.

Given the weights, the tasks' likelihood of function m is that of N independent observations
:math:`y_n \sim \mathcal{N}(a_n \phi_{nm}, 1)` with :math:`a_n^2 = \sum_q \tau_{nq} w_{qm}^2`. All
densities come from :math:`I + \mathrm{diag}(a) K \mathrm{diag}(a) = L L^\top`.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax.numpy as jnp

from numpyro_spikeslab.reading.function_prior import FunctionPrior
from numpyro_spikeslab.reading.roles import SlabRole, Tally
from numpyro_spikeslab.sampling.current import Current


class State(NamedTuple):
    """The current draw of the functions and of everything that moves with them.

    - **phi** - values of the functions.
    - **theta** - logs of their kernels' parameters.
    - **weights** - the weights, zero where the spike is zero.
    - **slab_scales** - values of the slab scales' sites.
    - **slab_variance** - prior variances of the slabs at these scales.
    - **residual** - observations less the functions' contributions, except of a function that
      is being updated.
    """

    phi: Float[Array, "M N"]
    theta: Float[Array, "M P"]
    weights: Float[Array, "Q M"]
    slab_scales: dict[str, Any]
    slab_variance: Float[Array, "Q M"]
    residual: Float[Array, "N Q"]

    @property
    def used(self) -> Bool[Array, " M"]:
        """Which functions have a nonzero weight."""
        return jnp.any(self.weights != 0, axis=0)


class Fixed(NamedTuple):
    """The model while functions are drawn, which stays fixed.

    - **now** - the model at the values of the start.
    - **precision** - precisions of the observations.
    - **functions** - prior of the functions; only parameters that may move are latent in it.
    - **with_weights** - whether weights move with the functions, for a kernel that owns them.
    - **rescale** - whether then the length of each function's weights moves.
    - **flip** - whether then their sign moves; the prior means must be zero.
    """

    now: Current
    precision: Float[Array, "N Q"]
    functions: FunctionPrior
    with_weights: bool
    rescale: bool
    flip: bool

    @property
    def log_odds(self) -> Float[Array, "Q M"]:
        """The prior log odds of the weights."""
        return self.now.at.prior.log_odds

    def draw_slabs(self, key: Array, state: State) -> State:
        """Draw the slab scales, where lengths move, with the excluded slabs integrated out."""
        if not self.rescale:
            return state
        w = state.weights
        statistics = {"slab": Tally((w != 0) * jnp.ones_like(w), w**2)}
        scales = self.now.draw_roles(key, SlabRole, state.slab_scales, statistics)
        variance = self.now.slab_variance(scales)
        return state._replace(slab_scales=scales, slab_variance=variance)


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

    def log_density(
        self, columns: Float[Array, "N C"]
    ) -> tuple[Float[Array, ""], Float[Array, "N C"]]:
        """Integrate the function out, up to a constant; also return ``L^-1`` times the columns."""
        half = self.solve_lower(columns)
        return -0.5 * half[:, 0] @ half[:, 0] - self.covariance.half_logdet(self.factor), half


class Root(NamedTuple):
    """Upper triangular ``R``, for each input, of the precision ``R^T R`` that S functions get from
    their tasks; S is one or two.

    - **diagonal** - zero where no task has a weight.
    - **upper** - the entry beside it, for two functions.
    """

    diagonal: Float[Array, "S N"]
    upper: Float[Array, " N"]

    @classmethod
    def of(cls, precision: Float[Array, "N Q"], w: Float[Array, "Q S"]) -> "Root":
        """Compute the root from the precisions of the observations and the weights."""
        first = jnp.sqrt(precision @ w[:, 0] ** 2)
        if w.shape[1] == 1:
            return cls(first[None], jnp.zeros_like(first))
        square = precision @ w[:, 1] ** 2
        upper = _over(precision @ (w[:, 0] * w[:, 1]), first)
        second = square - upper**2
        # with one task the second direction has no precision; the difference is a rounding error
        second = jnp.where(second > 100 * jnp.finfo(second.dtype).eps * square, second, 0)
        return cls(jnp.stack([first, jnp.sqrt(second)]), upper)

    def times(self, f: Float[Array, "S N"]) -> Float[Array, " SN"]:
        """Return ``R f``."""
        scaled = self.diagonal * f
        return jnp.ravel(scaled.at[0].add(self.upper * f[1]) if len(f) > 1 else scaled)

    def transposed(self, u: Float[Array, " SN"]) -> Float[Array, "S N"]:
        """Return ``R^T u``."""
        u = u.reshape(self.diagonal.shape)
        scaled = self.diagonal * u
        return scaled.at[1].add(self.upper * u[0]) if len(u) > 1 else scaled

    def whiten(self, h: Float[Array, "S N ..."]) -> Float[Array, "SN ..."]:
        """Return ``R^-T h``, the observations of ``R f`` with unit variance."""
        parts = [_over(h[0], self.diagonal[0])]
        if len(h) > 1:
            upper = self.upper.reshape(self.upper.shape + (1,) * (h.ndim - 2))
            parts.append(_over(h[1] - upper * parts[0], self.diagonal[1]))
        return jnp.concatenate(parts)


def _over(x: Float[Array, "N ..."], a: Float[Array, " N"]) -> Float[Array, "N ..."]:
    """Divide, with 0 where ``a`` is 0."""
    a = a.reshape(a.shape + (1,) * (x.ndim - 1))
    return jnp.where(a > 0, x / jnp.where(a > 0, a, 1), 0)


class Integrated(NamedTuple):
    """S functions that are integrated out.

    - **w** - their weights.
    - **root** - the root of the precisions that they get from their tasks.
    - **mean** - prior mean of their whitened observations.
    """

    w: Float[Array, "Q S"]
    root: Root
    mean: Float[Array, " SN"]

    @classmethod
    def of(cls, fixed: Fixed, state: State, members: Any) -> "Integrated":
        """Integrate out functions, given their numbers."""
        w = state.weights[:, members]
        root = Root.of(fixed.precision, w)
        return cls(w, root, root.times(fixed.functions.mean[members]))

    def observations(self, fixed: Fixed, state: State) -> Float[Array, " SN"]:
        """Whiten the observations of the functions, without which the residual must be."""
        return self.root.whiten(((fixed.precision * state.residual) @ self.w).T)
