# SPDX-License-Identifier: Apache-2.0
"""Small real data sets that come with the package."""

from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
import pandas as pd

__all__ = ["Regression", "boston_housing"]


class Regression(NamedTuple):
    """A labelled regression data set, which unpacks as ``X, y, features``.

    - **X** - inputs, shape (N, P).
    - **y** - response, shape (N,).
    - **features** - names of the P inputs, as ArviZ takes them: ``coords={"feature": features}``.
    """

    X: np.ndarray
    y: np.ndarray
    features: list[str]


def boston_housing() -> Regression:
    """House prices in 456 tracts of Boston against 13 inputs, as in Table 1 of the paper.

    These are the training examples of the paper, the last 456 rows of the 506 of Harrison and
    Rubinfeld (1978), in float64. Each input and the response (``medv``, the median value of a
    home) have mean 0 and standard deviation 1 over these rows.

    :return: ``(X, y, features)``.

    **Example**

    .. doctest::

        >>> from numpyro_spikeslab.datasets import boston_housing
        >>> X, y, features = boston_housing()
        >>> X.shape, y.shape, features[:3]
        ((456, 13), (456,), ['crim', 'zn', 'indus'])
        >>> bool(abs(X.std(0) - 1.0).max() < 1e-12)
        True
    """
    with as_file(files("numpyro_spikeslab") / "data" / "boston.csv") as path:
        frame = pd.read_csv(path, index_col="rownames", dtype=float)
    training = frame.iloc[50:]
    standardised = (training - training.mean()) / training.std(ddof=0)
    inputs = standardised.drop(columns="medv")
    return Regression(
        inputs.to_numpy(), standardised["medv"].to_numpy(), [str(name) for name in inputs]
    )
