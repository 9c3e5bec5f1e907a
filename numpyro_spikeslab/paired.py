# SPDX-License-Identifier: Apache-2.0
from typing import Any

import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import *  # noqa
from numpyro_spikeslab.algebra.pairs import *  # noqa
from numpyro_spikeslab.algebra.slabs import *  # noqa


def scale_mode(count: Any, squares: Any, prior_scale: Any) -> Any:
    """Square of the ``sigma`` that maximises ``-count log sigma - squares / (2 sigma^2)`` plus the
    log density of a HalfNormal prior; a prior of infinite scale is flat.
    """
    # the positive root of sigma^4 / s^2 + count sigma^2 - squares = 0, without cancellation
    return 2.0 * squares / (count + jnp.sqrt(count**2 + 4.0 * squares / prior_scale**2))
