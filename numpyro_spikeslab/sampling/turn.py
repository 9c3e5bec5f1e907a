# SPDX-License-Identifier: Apache-2.0
"""A function that is drawn: what stays, what moves with it, and the densities that it takes."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import MAX_SHRINKS, choose
from numpyro_spikeslab.reading.function_prior import FunctionPrior
from numpyro_spikeslab.sampling.weights_of_function import Hidden, Left, Mixing, Root


class Draw(NamedTuple):
    """Functions and what is drawn with them.

    - **phi** - their values.
    - **theta** - logs of their kernels' parameters.
    - **weights** - the weights, zero where the spike is.
    - **slab_scales** - values of the slab scales' sites.
    - **noise** - noise scale of each task.
    """

    phi: Float[Array, "M N"]
    theta: Float[Array, "M P"]
    weights: Float[Array, "Q M"]
    slab_scales: dict[str, Any]
    noise: Float[Array, " Q"]


class Moves(NamedTuple):
    """What may move together with the functions, where the weights may.

    - **log_odds** - prior log odds of the weights.
    - **draw_slabs** - ``(key, slab_scales, weights) -> slab_scales, variances of the slabs``.
    - **own_noise** - which tasks have a noise scale of their own that moves.
    - **log_prior_of_noise** - ``(noise, task) -> log density``, for these.
    - **rescale** - whether the length of each function's weights moves.
    - **flip** - whether their sign does; the prior means must be zero.
    """

    log_odds: Float[Array, "Q M"]
    draw_slabs: Callable[[Array, dict[str, Any], Any], tuple[dict[str, Any], Any]]
    own_noise: Bool[Array, " Q"]
    log_prior_of_noise: Callable[[Any, Any], Any]
    rescale: bool
    flip: bool


class Held(NamedTuple):
    """What stays while functions are drawn.

    - **Y** - observations less their offset.
    - **relative** - their precisions, relative to those of the tasks.
    - **functions** - prior of the functions; only parameters that may move are latent in it.
    - **moves** - what may move with them; `None` leaves all but functions and kernels as it is.
    """

    Y: Float[Array, "N Q"]
    relative: Float[Array, "N Q"]
    functions: FunctionPrior
    moves: Moves | None


class Found(NamedTuple):
    """A density that was evaluated with a function integrated out, and what it took.

    - **value** - its log.
    - **covariance** - prior covariance of the function.
    - **factor** - ``L`` of ``I + diag(a) K diag(a)``.
    - **half** - ``L^-1`` times the deviations of the observations and what stands beside them.
    """

    value: Float[Array, ""]
    covariance: Any
    factor: Any
    half: Float[Array, "N C"]

    @classmethod
    def of(cls, covariance: Any, factor: Any, observed: Float[Array, "N C"]) -> "Found":
        """The log density of the deviations in the first column, up to what depends on them only.

        :param observed: from :meth:`Column.observed`.
        """
        half = covariance.solve_lower(factor, observed)
        value = -0.5 * half[:, 0] @ half[:, 0] - covariance.half_logdet(factor)
        return cls(value, covariance, factor, half)


def slice_found(
    key: Array,
    evaluate: Callable[[Any], Found],
    x: Float[Array, ""],
    found: Found,
    width: float,
) -> tuple[Float[Array, ""], Found]:
    """An update as in :func:`~numpyro_spikeslab.algebra.search.slice_sample`, of one number, which
    hands on what the evaluation of the new one has found.

    :param found: ``evaluate(x)``. Where its value is not a number, everything is better.
    """
    key_level, key_place, key = random.split(key, 3)
    value = jnp.where(jnp.isnan(found.value), -jnp.inf, found.value)
    level = value - random.exponential(key_level, x.shape, x.dtype)
    left = x - width * random.uniform(key_place, x.shape, x.dtype)

    def shrink(state):
        count, key, left, right, *_ = state
        key, key_new = random.split(key)
        new = left + random.uniform(key_new, x.shape, x.dtype) * (right - left)
        reached = evaluate(new)
        # what is not a number is below every level
        accepted = reached.value > level
        left, right = jnp.where(new < x, new, left), jnp.where(new < x, right, new)
        return count + 1, key, left, right, new, reached, accepted

    def is_open(state):
        return (state[0] < MAX_SHRINKS) & ~state[-1]

    start = (0, key, left, left + width, x, found, jnp.zeros((), bool))
    *_, new, reached, done = jax.lax.while_loop(is_open, shrink, start)
    # an interval of the size of a rounding error
    return choose(done, (new, reached), (x, found))


class Turn(NamedTuple):
    """Function m while it is drawn, and what moves in its turn.

    - **theta** - logs of all kernels' parameters.
    - **covariance** - its prior covariance, once its kernel has been drawn.
    - **factor** - ``L`` of ``I + diag(a) K diag(a)``, likewise.
    - **w** - its weights.
    - **noise** - noise scale of each task.
    - **mixing** - all functions and their weights, as they were before for function m.
    - **left** - what is left without function m.
    """

    m: Int[Array, ""]
    theta: Float[Array, "M P"]
    covariance: Any
    factor: Any
    w: Float[Array, " Q"]
    noise: Float[Array, " Q"]
    mixing: Mixing
    left: Left

    def hidden(self, mu: Float[Array, " N"]) -> Hidden:
        """The function as one that is integrated out."""
        root = Root.of(self.left.Z, self.w[:, None])

        def solve_lower(x):
            return self.covariance.solve_lower(self.factor, x)

        return Hidden(self.w[:, None], root, root.times(mu[None]), solve_lower)

    @property
    def is_used(self) -> Bool[Array, ""]:
        return jnp.any(self.w != 0)
