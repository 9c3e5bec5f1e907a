# SPDX-License-Identifier: Apache-2.0
"""Ready-made models: plain NumPyro models that use the primitives."""

from numpyro_spikeslab.models.factors import factor_analysis, mtmkl
from numpyro_spikeslab.models.regression import sparse_regression

__all__ = ["factor_analysis", "mtmkl", "sparse_regression"]
