# SPDX-License-Identifier: Apache-2.0
"""A small table with a response."""

import numpy as np
import pandas as pd

NAMES = ["age", "dose", "batch", "weight", "lot"]


def table(num_rows=30):
    """Two correlated columns, a constant one, units and offsets of all sizes, and a response."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(num_rows, 5))
    X[:, 1] = 0.9 * X[:, 0] + 0.3 * X[:, 1]
    y = 0.5 * X[:, 0] - 0.4 * X[:, 3] + rng.normal(size=num_rows)
    X = X * [1.0, 1e3, 0.0, 1e-3, 7.0] + [50.0, 0.0, 3.0, 1.0, -1e3]
    return pd.DataFrame(X, columns=NAMES), 100.0 + 20.0 * y
