# SPDX-License-Identifier: Apache-2.0
"""Sparse regression as an estimator of scikit-learn."""

from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from jax import random

from numpyro_spikeslab.regression import sparse_regression
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.table_checks import check_index
from numpyro_spikeslab.tabular import check_kind

try:
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # the class raises when it is made
    BaseEstimator, RegressorMixin = type("BaseEstimator", (), {}), type("RegressorMixin", (), {})


class SparseRegression(RegressorMixin, BaseEstimator):
    """Estimator by :func:`~numpyro_spikeslab.sparse_regression` for pipelines and cross-validation.

    It follows the conventions of scikit-learn, which must be installed. A fit has the attributes

    - ``coef_``, posterior means of the weights, shape (P,), zeros included, and ``intercept_``;
    - ``inclusion_``, posterior probabilities that the weights are not zero, shape (P,);
    - ``data_``, the result of :func:`~numpyro_spikeslab.sparse_regression`.

    The parameters are those of the function, and

    :param random_state: seed from 0 to 2^32 - 1, or numpy's RandomState; by default a new one.
    :raises ModuleNotFoundError: if scikit-learn is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_diabetes(return_X_y=True, as_frame=True)
        model = nss.SparseRegression(random_state=0).fit(X, y)
        mean, sd = model.predict(X, return_std=True)
    """

    def __init__(
        self,
        *,
        expected_size: float | None = None,
        num_warmup: int | None = None,
        num_samples: int = 1000,
        num_chains: int = 4,
        random_state: Any = None,
    ) -> None:
        if not hasattr(BaseEstimator, "get_params"):
            remedy = "pip install -U scikit-learn, or call sparse_regression, which does not."
            raise ModuleNotFoundError(f"SparseRegression needs scikit-learn 1.6: {remedy}")
        self.expected_size = expected_size
        self.num_warmup = num_warmup
        self.num_samples = num_samples
        self.num_chains = num_chains
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "SparseRegression":
        """Fit the model to a table, shape (N, P), and a response, shape (N,); return itself.

        :raises ValueError: as :func:`~numpyro_spikeslab.sparse_regression` and scikit-learn.
        """
        check_kind("X", X)
        check_kind("y", y)
        check_index(y, X)
        table, response = validate_data(
            self, X, y, dtype=float, y_numeric=True, ensure_min_samples=3
        )
        if hasattr(self, "feature_names_in_"):
            table = pd.DataFrame(table, columns=self.feature_names_in_)
        options = self.get_params()
        seed = options.pop("random_state")
        state = check_random_state(seed)
        seed = int(seed) if isinstance(seed, Integral) else state.randint(2**31 - 1)
        self.data_ = sparse_regression(random.key(seed), table, response, **options)
        self.coef_ = self.data_["summary"]["mean"].values
        self.intercept_ = float(self.data_["posterior"]["intercept"].mean())
        self.inclusion_ = self.data_["summary"]["inclusion"].values
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Compute posterior means of responses.

        :param X: rows, shape (S, P).
        :param return_std: whether to return the standard deviations of new responses, too.
        :return: means, shape (S,), or the pair of means and standard deviations.
        :raises NotFittedError: before :meth:`fit`.
        :raises ValueError: if values are dates, masked or not numbers.
        """
        check_is_fitted(self)
        check_kind("X", X)
        table = validate_data(self, X, dtype=float, reset=False)
        mean = table @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        draws = posterior(self.data_)
        fit = draws["w"].values @ table.T + draws["intercept"].values[..., None]
        variance = fit.var(axis=(0, 1)) + (draws["sigma"].values ** 2).mean()
        return mean, np.sqrt(variance)
