# SPDX-License-Identifier: Apache-2.0
"""Exact draws by rejection for many lanes at once, such as observations.

A first round proposes for all lanes. In each later round the first lane of eight that still waits
has another proposal, since most are done by then. Single draws in a loop, as in
:func:`jax.random.gamma`, take ten times as long.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.variates import normal

# Lanes that share the later rounds.
GROUP = 8

# Eight lanes that accept half of their proposals do not all end before with probability 1e-60.
MAX_ROUNDS = 256

Proposal = Callable[..., tuple[Any, Any]]
"""``(uniform numbers, *parameters) -> (draws, whether they are accepted)``, elementwise."""


def first_accepted(
    key: Array, propose: Proposal, num_uniform: int, parameters: tuple[Array, ...]
) -> Float[Array, "*N"]:
    """Draw until a proposal is accepted, in each lane.

    :param propose: takes ``num_uniform`` arrays of numbers between 0 and 1, without the ends.
    :param parameters: of the lanes, in the shape of the result; the first has its type.
    """
    shape, size, dtype = parameters[0].shape, parameters[0].size, parameters[0].dtype

    def in_groups(x):
        return jnp.pad(jnp.ravel(x), (0, -size % GROUP), mode="edge").reshape(GROUP, -1)

    def proposed(turn, lanes):
        numbers, low = (num_uniform, *lanes[0].shape), jnp.finfo(dtype).tiny
        return propose(random.uniform(random.fold_in(key, turn), numbers, dtype, low, 1), *lanes)

    def is_open(state):
        turn, _, accepted = state
        return (turn < MAX_ROUNDS) & ~jnp.all(accepted)

    def again(state):
        turn, draws, accepted = state
        which = jnp.argmin(accepted, axis=0, keepdims=True)
        new, done = proposed(turn, tuple(jnp.take_along_axis(x, which, 0) for x in groups))
        here = (jnp.arange(GROUP)[:, None] == which) & ~accepted
        return turn + 1, jnp.where(here, new, draws), accepted | (here & done)

    groups = tuple(map(in_groups, parameters))
    state = jnp.asarray(1), *proposed(0, groups)
    return jnp.ravel(lax.while_loop(is_open, again, state)[1])[:size].reshape(shape)


def gamma(key: Array, shape: Float[Array, "*N"]) -> Float[Array, "*N"]:
    r"""Draw from :math:`\mathrm{Gamma}(a, 1)` for any shapes :math:`a \ge 0`.

    A proposal is :math:`d (1 + z / \sqrt{9 d})^3` with a standard normal z and
    :math:`d = a - 1/3` (Marsaglia and Tsang, 2000, *A simple method for generating gamma
    variables*). For shapes below 1 a draw of shape :math:`a + 1` is multiplied by
    :math:`u^{1/a}`.
    """
    tiny = jnp.finfo(shape.dtype).tiny

    def propose(numbers, shape):
        z, small = normal(2 * numbers[0] - 1), shape < 1
        d = jnp.where(small, shape + 1, shape) - 1 / 3
        cube = (1 + z * lax.rsqrt(9 * d)) ** 3
        bound = 0.5 * z**2 + d * (1 - cube + jnp.log(jnp.maximum(cube, tiny)))
        factor = jnp.where(small, numbers[2] ** (1 / jnp.maximum(shape, tiny)), 1)
        # accept NaN, which another proposal would not mend
        return d * cube * factor, ~((cube <= 0) | (jnp.log(numbers[1]) >= bound))

    return first_accepted(key, propose, 3, (shape,))
