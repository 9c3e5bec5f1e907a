# SPDX-License-Identifier: Apache-2.0
"""Sparse regression as estimators of scikit-learn."""

from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from jax import random

from numpyro_spikeslab.models.responses import RESPONSES
from numpyro_spikeslab.reporting.arviz_data import inclusion, mean, posterior
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.support.tabular import check_kind, in_pandas, row_labels
from numpyro_spikeslab.tables.predict import in_batches, new_rows
from numpyro_spikeslab.tables.regression import sparse_regression

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, is_classifier
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets, type_of_target
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError:  # the classes raise when they are made
    names = "BaseEstimator", "ClassifierMixin", "RegressorMixin"
    BaseEstimator, ClassifierMixin, RegressorMixin = (type(name, (), {}) for name in names)


class TableEstimator(BaseEstimator):
    """Parameters and fits of the estimators."""

    _likelihoods: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        likelihood: str = "normal",
        groups: Any = None,
        always: Any = (),
        expected_size: float | None = None,
        num_warmup: int | None = None,
        num_samples: int | None = None,
        num_chains: int = 4,
        random_state: Any = None,
    ) -> None:
        self._keep(locals())

    def _keep(self, values: dict[str, Any]) -> None:
        """Make attributes of the arguments of ``__init__``."""
        if not hasattr(BaseEstimator, "get_params"):
            remedy = "pip install -U scikit-learn, or call sparse_regression, which does not."
            raise ModuleNotFoundError(f"{type(self).__name__} needs scikit-learn 1.6: {remedy}")
        self.__dict__.update({name: x for name, x in values.items() if name != "self"})

    def _numbers(self, y: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return responses as numbers, and how often rows count, which is more than never."""
        return y, counts

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit the model to a table, shape (N, P), and a response, shape (N,); return itself.

        :param sample_weight: how often each row counts, shape (N,), or one number: a weight of 4 is
            four equal rows, and a fraction is a power of the density; under a Normal likelihood,
            too, where ``weights`` of the function are precisions.
        :raises ValueError: as :func:`~numpyro_spikeslab.sparse_regression` and scikit-learn; if
            weights are negative, or rows count less than three times together.
        """
        if self.likelihood not in self._likelihoods:
            remedy = "The function sparse_regression has others, such as times and their limits."
            raise bad("likelihood", repr(self.likelihood), f"one of {self._likelihoods}", remedy)
        check_kind("X", X)
        labels, y = row_labels(y), in_pandas("y", y)
        if is_classifier(self) and getattr(y, "dtype", None) == "category":
            y = y.astype(object)
        check_kind("y", y)
        of_numbers = {} if is_classifier(self) else {"y_numeric": True}
        table, response = validate_data(self, X, y, dtype=float, ensure_min_samples=3, **of_numbers)
        rows = Axis("row of X", len(table), row_labels(X))
        response = response[rows.order("y", labels)]
        kind = RESPONSES[self.likelihood]._replace(has_precisions=False)
        if not is_classifier(self):
            # before rows are sorted, so the error names the right one
            kind.check(response, np.full(len(response), np.inf))
        weights = 1.0 if sample_weight is None else sample_weight
        counts = rows.aligned("sample_weight", weights)
        if (counts < 0).any() or counts.sum() < 3:
            got = f"{counts.min():g} in a row, and {counts.sum() or 'zero':.4} in all"
            remedy = "Multiply weights that sum to 1 by the number of rows."
            raise bad("sample_weight", got, "how often rows count, 3 times in all or more", remedy)
        kept = np.flatnonzero(counts > 0)
        numbers, counts = self._numbers(response[kept], counts[kept])
        # as rows may come in any order, draws are the same in each
        order = np.lexsort((*table[kept].T, numbers))
        names = Axis.of_columns(in_pandas("X", X), table.shape[1]).names
        frame = pd.DataFrame(table[kept][order], kept[order], names)
        options = self.get_params() | {"likelihood": kind, "weights": counts[order]}
        options["progress_bar"] = False
        options.pop("class_weight", None)
        seed = options.pop("random_state")
        state = check_random_state(seed)
        seed = int(seed) if isinstance(seed, Integral) else state.randint(2**31 - 1)
        self.data_ = sparse_regression(random.key(seed), frame, numbers[order], **options)
        self.coef_ = mean(posterior(self.data_)["w"]).values
        self.intercept_ = float(self.data_["posterior"]["intercept"].mean())
        self.inclusion_ = inclusion(self.data_, "w").values
        return self

    def _rows(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        check_kind("X", X)
        return validate_data(self, X, dtype=float, reset=False)

    @in_double_precision
    def _moments(self, rows: np.ndarray) -> np.ndarray:
        """Compute means and variances of new responses, shape (2, S)."""
        new = new_rows(self.data_, rows, {"offset": None, "totals": None})
        return in_batches("moments", self.data_, new, random.key(0))


class SparseRegressor(RegressorMixin, TableEstimator):
    """Estimator by :func:`~numpyro_spikeslab.sparse_regression` for pipelines and cross-validation.

    Rows may come in any order, and a row of ``sample_weight`` 4 is four rows: the draws are the
    same. Folds of like sizes share compiled code. A fit has the attributes

    - ``coef_``, posterior means of the weights, shape (P,), zeros included, and ``intercept_``;
    - ``inclusion_``, posterior probabilities that the weights are not zero, shape (P,);
    - ``data_``, the result of :func:`~numpyro_spikeslab.sparse_regression`, whose rows are sorted
      and have their numbers in the table as labels.

    The parameters ``groups``, ``always``, ``expected_size``, ``num_warmup``, ``num_samples`` and
    ``num_chains`` are those of the function, and

    :param likelihood: ``"normal"``, ``"student"``, ``"poisson"`` or ``"negative_binomial"``.
    :param random_state: seed from 0 to 2^32 - 1, or numpy's RandomState; by default a new one.
    :raises ModuleNotFoundError: if scikit-learn is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_diabetes(return_X_y=True, as_frame=True)
        model = nss.SparseRegressor(random_state=0).fit(X, y)
        mean, sd = model.predict(X, return_std=True)
    """

    _likelihoods = "normal", "student", "poisson", "negative_binomial"

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Compute posterior means of responses; of a Student-t likelihood, of its centres.

        :param X: rows, shape (S, P).
        :param return_std: whether to return the standard deviations of new responses, too. Those of
            a Student-t likelihood may be infinite.
        :return: means, shape (S,), or the pair of means and standard deviations.
        :raises NotFittedError: before :meth:`fit`.
        :raises ValueError: if values are dates, masked or not numbers.
        """
        table = self._rows(X)
        if not return_std and RESPONSES[self.likelihood].units is not None:
            return table @ self.coef_ + self.intercept_
        means, variances = self._moments(table)
        return (means, np.sqrt(variances)) if return_std else means


class SparseClassifier(ClassifierMixin, TableEstimator):
    """Classifier by :func:`~numpyro_spikeslab.sparse_regression`, of two classes with any labels.

    A fit has the attribute ``classes_``, the two labels in order, and those of
    :class:`SparseRegressor`: ``coef_`` and ``intercept_`` are in log odds, or probits, of the
    second class. The parameters are those of :class:`SparseRegressor`, and

    :param likelihood: ``"logit"``, or ``"probit"``, under which weights are whole numbers.
    :param class_weight: how often rows of each class count, a dict, beside ``sample_weight``;
        ``"balanced"`` for N / 2 in each class; ``None`` for once.
    :raises ModuleNotFoundError: if scikit-learn is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_breast_cancer(return_X_y=True, as_frame=True)
        model = nss.SparseClassifier(class_weight="balanced", random_state=0).fit(X, y)
        probability = model.predict_proba(X)[:, 1]
        scores = sklearn.model_selection.cross_val_score(model, X, y, scoring="neg_log_loss")
    """

    _likelihoods = "logit", "probit"

    def __init__(
        self,
        *,
        likelihood: str = "logit",
        groups: Any = None,
        always: Any = (),
        class_weight: Any = None,
        expected_size: float | None = None,
        num_warmup: int | None = None,
        num_samples: int | None = None,
        num_chains: int = 4,
        random_state: Any = None,
    ) -> None:
        self._keep(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _numbers(self, y: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) != 2:
            # scikit-learn's checks look for these words
            remedy = f"The type of the target is {type_of_target(y)}."
            expected = "2 classes. Only binary classification is supported"
            raise bad("y", f"{len(self.classes_)} classes", expected, remedy)
        if self.class_weight == "balanced":
            # scikit-learn's does not see how often rows count
            return numbers, counts * (counts.sum() / 2 / np.bincount(numbers, counts))[numbers]
        return numbers, counts * compute_sample_weight(self.class_weight, y)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Compute posterior means of the probabilities of both classes.

        :param X: rows, shape (S, P), refused as by :meth:`SparseRegressor.predict`.
        :return: probabilities, shape (S, 2), in the order of ``classes_``.
        """
        second = self._moments(self._rows(X))[0]
        return np.stack([1 - second, second], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Return the more probable class of each row, shape (S,); see :meth:`predict_proba`."""
        is_second = self.predict_proba(X)[:, 1] > 0.5
        return self.classes_[is_second.astype(int)]
