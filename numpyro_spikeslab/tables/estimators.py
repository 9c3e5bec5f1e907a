# SPDX-License-Identifier: Apache-2.0
"""Sparse regression as estimators of scikit-learn."""

from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from jax import random

from numpyro_spikeslab.reporting.arviz_data import inclusion, mean, posterior
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import check_kind, row_labels
from numpyro_spikeslab.tables.predict import predict
from numpyro_spikeslab.tables.regression import sparse_regression

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # the classes raise when they are made
    names = "BaseEstimator", "ClassifierMixin", "RegressorMixin"
    BaseEstimator, ClassifierMixin, RegressorMixin = (type(name, (), {}) for name in names)

BATCH = 1000
"""Rows that are predicted at once, which bounds the memory."""


class TableEstimator(BaseEstimator):
    """Parameters and fits of the estimators."""

    _likelihood = "normal"

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
            raise ModuleNotFoundError(f"{type(self).__name__} needs scikit-learn 1.6: {remedy}")
        self.expected_size = expected_size
        self.num_warmup = num_warmup
        self.num_samples = num_samples
        self.num_chains = num_chains
        self.random_state = random_state

    def _numbers(self, y: np.ndarray) -> np.ndarray:
        """Return responses as numbers."""
        return y

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit the model to a table, shape (N, P), and a response, shape (N,); return itself.

        :param sample_weight: weights of the rows, shape (N,), see
            :func:`~numpyro_spikeslab.sparse_regression`. Rows of weight 0 are left out.
        :raises ValueError: as :func:`~numpyro_spikeslab.sparse_regression` and scikit-learn.
        """
        check_kind("X", X)
        if is_classifier(self) and getattr(y, "dtype", None) == "category":
            y = y.astype(object)
        check_kind("y", y)
        of_numbers = {} if is_classifier(self) else {"y_numeric": True}
        table, response = validate_data(self, X, y, dtype=float, ensure_min_samples=3, **of_numbers)
        rows = Axis("row of X", len(table), row_labels(X))
        response = response[rows.order("y", row_labels(y))]
        options = self.get_params() | {"likelihood": self._likelihood}
        if sample_weight is not None:
            weights = rows.aligned("sample_weight", sample_weight)
            if not weights.any():
                raise bad("sample_weight", "zero for all rows", "positive numbers")
            table, response = table[weights != 0], response[weights != 0]
            options["weights"] = weights[weights != 0]
        if hasattr(self, "feature_names_in_"):
            table = pd.DataFrame(table, columns=self.feature_names_in_)
        seed = options.pop("random_state")
        state = check_random_state(seed)
        seed = int(seed) if isinstance(seed, Integral) else state.randint(2**31 - 1)
        numbers = self._numbers(response)
        self.data_ = sparse_regression(random.key(seed), table, numbers, **options)
        self.coef_ = mean(posterior(self.data_)["w"]).values
        self.intercept_ = float(self.data_["posterior"]["intercept"].mean())
        self.inclusion_ = inclusion(self.data_, "w").values
        return self

    def _rows(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        check_kind("X", X)
        return validate_data(self, X, dtype=float, reset=False)


class SparseRegression(RegressorMixin, TableEstimator):
    """Estimator by :func:`~numpyro_spikeslab.sparse_regression` for pipelines and cross-validation.

    It follows the conventions of scikit-learn, which must be installed. A fit has the attributes

    - ``coef_``, posterior means of the weights, shape (P,), zeros included, and ``intercept_``;
    - ``inclusion_``, posterior probabilities that the weights are not zero, shape (P,);
    - ``data_``, the result of :func:`~numpyro_spikeslab.sparse_regression`.

    The parameters of the function, and

    :param random_state: seed from 0 to 2^32 - 1, or numpy's RandomState; by default a new one.
    :raises ModuleNotFoundError: if scikit-learn is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_diabetes(return_X_y=True, as_frame=True)
        model = nss.SparseRegression(random_state=0).fit(X, y)
        mean, sd = model.predict(X, return_std=True)
    """

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Compute posterior means of responses.

        :param X: rows, shape (S, P).
        :param return_std: whether to return the standard deviations of new responses, too.
        :return: means, shape (S,), or the pair of means and standard deviations.
        :raises NotFittedError: before :meth:`fit`.
        :raises ValueError: if values are dates, masked or not numbers.
        """
        table = self._rows(X)
        mean = table @ self.coef_ + self.intercept_
        if not return_std:
            return mean
        draws = posterior(self.data_)
        fit = draws["w"].values @ table.T + draws["intercept"].values[..., None]
        variance = fit.var(axis=(0, 1)) + (draws["sigma"].values ** 2).mean()
        return mean, np.sqrt(variance)


class SparseClassifier(ClassifierMixin, TableEstimator):
    """Classifier by :func:`~numpyro_spikeslab.sparse_regression`, of two classes with any labels.

    A fit has the attributes

    - ``classes_``, the two labels in order;
    - ``coef_``, posterior means of the weights, shape (P,), zeros included, and ``intercept_``, in
      log odds of the second class;
    - ``inclusion_`` and ``data_``, as of :class:`SparseRegression`.

    The parameters are those of :class:`SparseRegression`.

    :raises ModuleNotFoundError: if scikit-learn is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_breast_cancer(return_X_y=True, as_frame=True)
        model = nss.SparseClassifier(random_state=0).fit(X, y)
        probability = model.predict_proba(X)[:, 1]
    """

    _likelihood = "logit"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _numbers(self, y: np.ndarray) -> np.ndarray:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) != 2:
            # scikit-learn's checks look for these words
            remedy = f"The type of the target is {type_of_target(y)}."
            expected = "2 classes. Only binary classification is supported"
            raise bad("y", f"{len(self.classes_)} classes", expected, remedy)
        return numbers

    def predict_proba(self, X: Any) -> np.ndarray:
        """Compute posterior means of the probabilities of both classes.

        :param X: rows, shape (S, P).
        :return: probabilities, shape (S, 2), in the order of ``classes_``.
        :raises NotFittedError: before :meth:`fit`.
        :raises ValueError: if values are dates, masked or not numbers.
        """
        table = self._rows(X)
        batches = np.array_split(table, len(table) // BATCH + 1)
        draws = (predict(self.data_, x, kind="mean") for x in batches)
        second = np.concatenate([x.mean(["chain", "draw"]).values for x in draws])
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Return the more probable class of each row, shape (S,); see :meth:`predict_proba`."""
        is_second = self.predict_proba(X)[:, 1] > 0.5
        return self.classes_[is_second.astype(int)]
