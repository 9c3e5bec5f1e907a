# SPDX-License-Identifier: Apache-2.0
r"""Draws from Polya-Gamma distributions.

:math:`\mathrm{PG}(b, c)` is the distribution of :math:`\sum_k g_k / (2 \pi^2 (k - 1/2)^2 + c^2/2)`
with independent :math:`g_k \sim \mathrm{Gamma}(b, 1)` (Polson, Scott and Windle, 2013, *Bayesian
inference for logistic models using Polya-Gamma latent variables*). With it

.. math::
    \frac{e^{y f}}{(1 + e^f)^b} = 2^{-b} e^{(y - b/2) f}
    \int e^{-\omega f^2 / 2}\, \mathrm{PG}(\omega \mid b, 0)\, d\omega.
"""

import math
from typing import Any

from jaxtyping import Array, Float
import numpy as np
from scipy.special import ndtr

from jax import nn
import jax.numpy as jnp
from jax.scipy.special import ndtri

from numpyro_spikeslab.algebra.rejection import first_accepted, gamma

# Between the envelopes of 4 PG(1, c), and the left one's mass, without its tilt, over 4.
CUT = 0.64
TAIL = float(ndtr(-(CUT**-0.5)))

# Gammas of :func:`draw`.
NUM_GAMMAS = 8


def draw_one(key: Array, c: Float[Array, "*N"]) -> Float[Array, "*N"]:
    r"""Draw from :math:`\mathrm{PG}(1, c)`, exact to rounding.

    With :math:`z = |c| / 2`, :math:`x = 4 \omega` has a density proportional to
    :math:`e^{-z^2 x / 2} \sum_n (-1)^n a_n(x)`, and its envelope is the first term (Devroye, 2009,
    *On exact simulation algorithms for some distributions related to Jacobi theta functions*):
    right of the cut an exponential density, left of it an inverse Gaussian one. Where z is small
    the left one is drawn without its tilt, which is left to rejection, for then none lie beyond the
    cut. Four terms of the series are exact on either side.
    """
    z = 0.5 * jnp.abs(c)
    rate = math.pi**2 / 8 + 0.5 * z**2
    tilted = math.log(2) - z < math.log(4 * TAIL)
    log_left = jnp.where(tilted, math.log(2) - z, math.log(4 * TAIL))
    right = nn.sigmoid(jnp.log(0.5 * math.pi / rate) - rate * CUT - log_left)

    def propose(numbers, z, rate, right, tilted):
        side, place, root, number = numbers
        is_right = side < right
        normal = ndtri(jnp.where(tilted, place, place * TAIL))
        x_left = jnp.where(tilted, inverse_gaussian(normal, root, z), normal**-2)
        x = jnp.where(is_right, CUT - jnp.log(place) / rate, x_left)
        r = jnp.exp(jnp.where(is_right, -(math.pi**2) * x, -4 / x))
        series = 1 - 3 * r + 5 * r**3 - 7 * r**6
        tilt = jnp.where(is_right | tilted, 1, jnp.exp(-0.5 * z**2 * x))
        # accept NaN, which another proposal would not mend
        return 0.25 * x, ~((number >= series * tilt) | (~is_right & (x > CUT)))

    return first_accepted(key, propose, 4, (z, rate, right, tilted))


def inverse_gaussian(
    normal: Float[Array, "*N"], uniform: Float[Array, "*N"], rate: Float[Array, "*N"]
) -> Float[Array, "*N"]:
    """Transform numbers to inverse Gaussian ones of shape 1 (Michael, Schucany and Haas, 1976,
    *Generating random variates using transformations with multiple roots*).

    :param normal: standard normal numbers.
    :param uniform: numbers between 0 and 1.
    :param rate: 1 over the means, not negative.
    """
    info = jnp.finfo(normal.dtype)
    half = jnp.maximum(0.5 * normal**2, info.eps**2)
    # the smaller root, without a difference
    x = 1 / (rate + half + jnp.sqrt(half * (half + 2 * rate)))
    return jnp.where(uniform * (1 + rate * x) > 1, 1 / jnp.maximum(rate**2 * x, info.tiny), x)


def _terms() -> tuple[np.ndarray, np.ndarray]:
    rates = 2 * np.pi**2 * (np.arange(NUM_GAMMAS) + 0.5) ** 2
    mean, variance = 1 / 4 - np.sum(1 / rates), 1 / 24 - np.sum(1 / rates**2)
    return np.append(np.ones(NUM_GAMMAS), mean**2 / variance), np.append(rates, mean / variance)


SHAPES, RATES = _terms()
"""Shapes per unit of b, and rates at c = 0, of the terms of :func:`draw`."""


def draw(key: Array, b: Any, c: Float[Array, "*N"]) -> Float[Array, "*N"]:
    r"""Draw from :math:`\mathrm{PG}(b, c)`, at a cost that does not grow with b.

    Where b is the Python number 1 draws are those of :func:`draw_one`. Otherwise the terms after
    the first eight are replaced by one gamma variate that has their mean and variance at c = 0.
    Such draws are exact for a likelihood whose logarithm is, per unit of b, too large by

    ======= ======= ======= =======
    f = 3   f = 5   f = 10  f = 20
    ======= ======= ======= =======
    1.0e-8  2.2e-7  1.4e-5  8.0e-4
    ======= ======= ======= =======

    :param b: not negative; broadcasts to the shape of c.
    """
    if isinstance(b, int | float) and b == 1:
        return draw_one(key, c)
    shapes, rates = (
        jnp.asarray(x, c.dtype).reshape((-1,) + (1,) * c.ndim) for x in (SHAPES, RATES)
    )
    b = jnp.broadcast_to(jnp.asarray(b, c.dtype), c.shape)
    return jnp.sum(gamma(key, shapes * b) / (rates + 0.5 * c**2), axis=0)
