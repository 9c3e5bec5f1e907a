# SPDX-License-Identifier: Apache-2.0
"""Log densities whose log gamma functions compile fast.

XLA expands a log gamma function into some hundred operations. Normalisers of priors have up to
seven, in every compiled function that computes a bound. With XLA's own, the first fit of the toy
data in a process takes about 3 percent more CPU time.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any

from jaxtyping import Array, Float

import jax
from jax.extend.core import Jaxpr, Literal, primitives
import jax.numpy as jnp

# From here on Stirling's series is exact to double precision.
LARGE = 8

# Names of the call of a compiled function, by JAX's version.
JIT = ("jit", "pjit")

# B_2k / (2k (2k - 1)) of the Bernoulli numbers B.
STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)


def log_gamma(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``log Gamma(x)`` of positive numbers, by Stirling's series; of small ones by ``x + 8``."""
    small = x < LARGE
    z = jnp.where(small, x + LARGE, x)
    between = jnp.where(small, x, 1)
    product = math.prod((between + k for k in range(1, LARGE)), start=between)
    series = jnp.polyval(jnp.array(STIRLING[::-1], z.dtype), 1 / z**2, unroll=len(STIRLING)) / z
    stirling = (z - 0.5) * jnp.log(z) - z + 0.5 * math.log(2 * math.pi) + series
    return stirling - jnp.where(small, jnp.log(product), 0)


def with_short_gammas(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replace XLA's log gamma by :func:`log_gamma` in a function of an array.

    :param function: takes log gammas of positive numbers only, as densities do.
    """

    def short(x):
        closed = jax.make_jaxpr(function)(x)
        if not _has_gammas(closed.jaxpr):
            return function(x)
        return _evaluated(closed.jaxpr, closed.consts, (x,))[0]

    return short


def _has_gammas(jaxpr: Jaxpr) -> bool:
    return any(
        equation.primitive is primitives.lgamma_p
        or (equation.primitive.name in JIT and _has_gammas(equation.params["jaxpr"].jaxpr))
        for equation in jaxpr.eqns
    )


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(variable):
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        if equation.primitive is primitives.lgamma_p:
            results = [log_gamma(*map(jnp.asarray, map(value, equation.invars)))]
        elif equation.primitive.name in JIT:
            inner = equation.params["jaxpr"]
            results = _evaluated(inner.jaxpr, inner.consts, [*map(value, equation.invars)])
        else:
            inputs = [x for x in equation.invars if not isinstance(x, Literal)]
            one = jaxpr.replace(
                constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation]
            )
            results = jax.core.eval_jaxpr(one, [], *map(value, inputs))
        values.update(zip(equation.outvars, results, strict=True))
    return [value(variable) for variable in jaxpr.outvars]
