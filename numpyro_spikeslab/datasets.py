# SPDX-License-Identifier: Apache-2.0
"""Small real data sets that come with the package."""

from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
import pandas as pd

__all__ = ["RegressionData", "boston_housing"]


class RegressionData(NamedTuple):
    """Inputs ``X``, shape (N, P), a response ``y``, shape (N,), and the names of the P inputs."""

    X: np.ndarray
    y: np.ndarray
    features: list[str]


def boston_housing() -> RegressionData:
    """Load house prices in 456 tracts of Boston against 13 inputs, as in Table 1 of the paper.

    These are the last 456 rows of the 506 of Harrison and Rubinfeld (1978), in float64. Each input
    and the response, ``medv``, the median value of a home, have mean 0 and standard deviation 1.

    >>> from numpyro_spikeslab.datasets import boston_housing
    >>> X, y, features = boston_housing()
    >>> X.shape, y.shape, features[:3]
    ((456, 13), (456,), ['crim', 'zn', 'indus'])
    """
    with as_file(files("numpyro_spikeslab") / "data" / "boston.csv") as path:
        frame = pd.read_csv(path, index_col="rownames", dtype=float)
    training = frame.iloc[50:]
    standardised = (training - training.mean()) / training.std(ddof=0)
    y = standardised.pop("medv")
    return RegressionData(standardised.to_numpy(), y.to_numpy(), standardised.columns.tolist())
