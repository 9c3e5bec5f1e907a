# SPDX-License-Identifier: Apache-2.0
"""Small real data sets that come with the package, and the paper's toy data."""

from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
import pandas as pd

__all__ = ["MultiOutput", "RegressionData", "boston_housing", "toy_multioutput"]


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


class MultiOutput(NamedTuple):
    """Q tasks at the same N inputs.

    - **X** - inputs, shape (N,).
    - **Y** - observations of the tasks, held-out ones included, shape (N, Q).
    - **observed** - which observations are for training, shape (N, Q).
    - **f** - noise-free functions, zero for the tasks that are noise only, shape (N, Q).
    - **related** - which tasks are mixtures of the latent functions, shape (Q,).
    """

    X: np.ndarray
    Y: np.ndarray
    observed: np.ndarray
    f: np.ndarray
    related: np.ndarray


NOISE_ONLY = {6: 0.1, 2: 0.4}
"""Noise standard deviations of the tasks that are noise only, counted from zero."""


def toy_multioutput(seed: int, *, num_missing: int = 41) -> MultiOutput:
    """Simulate twelve tasks; ten are mixtures of the same four functions (paper, section 5).

    Inputs are 201 points on [-10, 10]. The related tasks are draws of a Gaussian process whose
    covariance has rank four, with noise of standard deviation 0.2; tasks 7 and 3, counted from one,
    are noise of standard deviations 0.1 and 0.4. Each task has a gap of ``num_missing`` adjacent
    inputs at a random place.

    :param seed: number of the data set, from 0 on.
    :param num_missing: length of each gap; the paper's by default.
    :return: ``(X, Y, observed, f, related)``; `np.where(observed, Y, np.nan)` is for training.

    >>> from numpyro_spikeslab.datasets import toy_multioutput
    >>> toy = toy_multioutput(0)
    >>> toy.Y.shape, int(toy.related.sum()), int((~toy.observed).sum(0).max())
    ((201, 12), 10, 41)
    """
    rng = np.random.default_rng(seed)
    N, Q = 201, 12
    x = np.linspace(-10, 10, N)
    related = ~np.isin(np.arange(Q), list(NOISE_ONLY))
    lag = x[:, None] - x
    envelope = np.exp(-(x[:, None] ** 2 + x**2) / 20)
    eigenvalues, eigenvectors = np.linalg.eigh(envelope * (4 * np.cos(0.5 * lag) + np.cos(2 * lag)))
    root = eigenvectors * np.sqrt(np.maximum(eigenvalues, 0))
    f = np.where(related, root @ rng.standard_normal((N, Q)), 0.0)
    noise = np.array([NOISE_ONLY.get(q, 0.2) for q in range(Q)])
    Y = f + noise * rng.standard_normal((N, Q))
    first = rng.integers(0, N - num_missing + 1, Q)
    row = np.arange(N)[:, None]
    observed = (row < first) | (row >= first + num_missing)
    return MultiOutput(x, Y, observed, f, related)
