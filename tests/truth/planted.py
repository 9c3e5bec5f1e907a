# SPDX-License-Identifier: Apache-2.0
"""Tasks that are sparse mixtures of independent factors, with gaps."""

from typing import NamedTuple

import numpy as np


class Planted(NamedTuple):
    """Observations, and what they were made of."""

    Y: np.ndarray
    phi: np.ndarray
    included: np.ndarray
    f: np.ndarray


def plant(num_points: int, num_tasks: int, num_factors: int, seed: int) -> Planted:
    rng = np.random.default_rng(seed)
    included = rng.uniform(size=(num_tasks, num_factors)) < 0.3
    W = included * rng.choice([-1, 1], included.shape) * (rng.uniform(size=included.shape) + 0.5)
    phi = rng.normal(size=(num_factors, num_points))
    f = (W @ phi).T
    Y = f + 0.3 * np.std(f) * rng.normal(size=f.shape)
    Y[rng.uniform(size=Y.shape) < 0.1] = np.nan
    return Planted(Y, phi, included, f)
