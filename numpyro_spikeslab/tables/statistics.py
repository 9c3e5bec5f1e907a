# SPDX-License-Identifier: Apache-2.0
"""Sparse regression from products of columns, or from correlations and marginal z-scores."""

from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float, Int
import numpy as np
from scipy.special import ndtri
import xarray as xr

from numpyro_spikeslab.models.background import contrasts
from numpyro_spikeslab.models.responses import response_kind
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.support.tabular import as_numbers, in_pandas, row_labels
from numpyro_spikeslab.tables.chains import Run, TableModel
from numpyro_spikeslab.tables.checks import checked_count
from numpyro_spikeslab.tables.columns import checked_columns
from numpyro_spikeslab.tables.regression import Problem, analyse
from numpyro_spikeslab.tables.units import Units, of_columns

ROUNDED = 1e-6
"""Largest differences between a correlation matrix and its transpose, of its diagonal from 1, and
of negative eigenvalues from 0 relative to the largest, that count as rounding."""

UNEXPLAINED = 1e-3
"""Largest share of the squared correlations with the response that no columns could have."""

RIDGE, ERROR_RATE = 1e-3, 0.01
"""Ridge of the conditional means of z-scores, and probability of a false warning."""


@in_double_precision
def sparse_regression_from_statistics(
    key: Array,
    *,
    n: int,
    XtX: Any = None,
    Xty: Any = None,
    yty: float | None = None,
    z: Any = None,
    R: Any = None,
    inclusion: Any = None,
    expected_size: float | None = None,
    num_warmup: int | None = None,
    num_samples: int | None = None,
    num_chains: int = 4,
    progress_bar: bool = True,
) -> xr.DataTree:
    r"""Regress a response on columns from statistics, without their rows.

    The model, the prior and the answers are those of :func:`sparse_regression` for the rows that
    the statistics were computed from, for the likelihood of the contrasts of n rows is

    .. math:: \sigma^{1 - n} \exp\left(-\frac{y^\top y - 2 w^\top X^\top y + w^\top X^\top X w}
       {2 \sigma^2}\right).

    The time does not depend on n. Give either of

    - ``XtX``, ``Xty`` and ``yty``, as to ``susie_ss`` of susieR: ``X.T @ X``, ``X.T @ y`` and
      ``y @ y`` of columns and a response **whose means are subtracted**. The weights are in their
      units;
    - ``z`` and ``R``, as to ``susie_rss``: the z-score of each column alone, which is its slope
      divided by the standard error of the slope, and the correlations of the columns. The weights
      are in standard deviations of columns and response.

    ``R`` of other people than those of ``z`` gives columns effects that they do not have. A warning
    names columns for whose z-scores all others predict the other sign, as in ``kriging_rss`` of
    susieR: the alleles were exchanged, the rows are others, or correlated columns have opposite
    effects. Without these causes it comes for at most one in a hundred tables.

    :param key: random key, ``jax.random.key(0)`` for example.
    :param n: number of rows, at least 3.
    :param XtX: products of columns, shape (P, P): numpy array, or DataFrame, whose column names
        become the labels of ``feature``. Its rows, ``Xty`` and ``z`` are aligned by their labels.
    :param Xty: products of columns with the response, shape (P,).
    :param yty: sum of squares of the response.
    :param z: z-scores, or t statistics, shape (P,).
    :param R: correlations, shape (P, P), as ``XtX``. Only the last digits may keep it from being
        positive semidefinite; all others need a ridge, ``(1 - s) * R + s * np.eye(P)``.
    :param inclusion: as in :func:`sparse_regression`, like all other arguments.
    :return: ArviZ data with the groups ``posterior``, without an intercept, ``sample_stats``,
        ``summary``, ``cavi`` and ``constant_data``, as in :func:`sparse_regression`.
    :raises ValueError: if neither set of statistics is complete, if they have other shapes or
        labels, or non-finite values, if ``XtX`` or ``R`` is no matrix of products or
        correlations, or if there are no rows with these statistics.

    .. code-block:: python

        Z, r = X - X.mean(0), y - y.mean()
        dt = nss.sparse_regression_from_statistics(
            jax.random.key(0), XtX=Z.T @ Z, Xty=Z.T @ r, yty=r @ r, n=len(y)
        )
        nss.summary(dt, top=5)
    """
    kind = response_kind("normal")
    run = Run.checked(kind, key, num_warmup, num_samples, num_chains, progress_bar)
    n = checked_count("n", n, 3)
    arguments = {"XtX": XtX, "Xty": Xty, "yty": yty, "z": z, "R": R}
    names = [name for name, x in arguments.items() if x is not None]
    if names == ["XtX", "Xty", "yty"]:
        statistics = of_products(XtX, Xty, yty, n)
    elif names == ["z", "R"]:
        statistics = of_z_scores(z, R, n)
    else:
        raise bad("XtX, Xty, yty, z, R", names, "XtX, Xty and yty, or z and R")
    units = statistics.units
    columns = checked_columns(units.x["feature"].to_index(), (), None, inclusion)
    X, y, count = pseudo_rows(statistics, n)
    data = {"X": X, "y": y, "count": np.full(len(y), count)}
    model = TableModel(kind, None, None)
    return analyse(run, Problem(model, data, columns, units, expected_size, X))


class Statistics(NamedTuple):
    """Statistics of standardised columns and a standardised response.

    - **eigenvalues**, **vectors** - of the correlations of the columns, which are 0 with constant
      ones.
    - **r** - correlations of the columns with the response.
    - **remedy** - a sentence for statistics that no rows could have.
    """

    eigenvalues: Float[np.ndarray, " P"]
    vectors: Float[np.ndarray, "P P"]
    r: Float[np.ndarray, " P"]
    units: Units
    remedy: str


def of_products(XtX: Any, Xty: Any, yty: Any, n: int) -> Statistics:
    """Make statistics of products of columns, after checks."""
    products, columns = checked_matrix("XtX", XtX)
    squares = as_numbers("yty", yty)
    if squares.shape != () or squares <= 0:
        raise bad("yty", repr(yty), "a positive number, the sum of squares of the response")
    diagonal = products.diagonal()
    if (diagonal < 0).any() or not (used := diagonal > 0).any():
        raise bad("XtX", f"the diagonal {diagonal!s:.200}", "sums of squares, some positive")
    norms = np.sqrt(np.where(used, diagonal, 1.0))
    r = columns.aligned("Xty", Xty, may_be_one=False) / norms / np.sqrt(squares)
    x = of_columns(columns.names.tolist(), sd=norms / n**0.5, varies=used)
    units = Units(x, 0.0, float(squares / n) ** 0.5, 1.0, n)
    parts = decompose("XtX", products / norms / norms[:, None])
    return Statistics(*parts, r, units, "Subtract the means of X and y before you multiply.")


def of_z_scores(z: Any, R: Any, n: int) -> Statistics:
    """Make statistics of z-scores and correlations, after checks."""
    matrix, columns = checked_matrix("R", R)
    scores = columns.aligned("z", z, may_be_one=False)
    if (error := abs(matrix.diagonal() - 1).max()) > ROUNDED:
        remedy = "Divide by the standard deviations of the columns, as np.corrcoef does."
        raise bad("R", f"a diagonal that differs from 1 by {error:.2g}", "correlations", remedy)
    parts = decompose("R", matrix)
    r = scores / np.sqrt(scores**2 + n - 2)
    if wrong := columns.names[find_misfits(*parts, r * n**0.5)].tolist():
        message = (
            "sparse_regression_from_statistics: `z` and `R` do not fit for these columns, the "
            f"worst first: {wrong!s:.200}. The other columns predict the other sign. Exchange the "
            "alleles, take `R` of the same people, or leave the columns out, unless correlated "
            "columns may have opposite effects."
        )
        # of the caller, past the decorator
        warnings.warn(message, stacklevel=4)
    x = of_columns(columns.names.tolist(), sd=np.ones(len(r)), varies=np.ones(len(r), bool))
    remedy = (
        "z and R are of other rows, or rounded: take R of the same rows, or "
        "(1 - s) * R + s * np.eye(P), with s = 0.1 for example."
    )
    return Statistics(*parts, r, Units(x, 0.0, 1.0, 1.0, n), remedy)


def checked_matrix(argument: str, values: Any) -> tuple[Float[np.ndarray, "P P"], Axis]:
    """Return a square matrix and its columns."""
    frame = in_pandas(argument, values)
    matrix = as_numbers(argument, frame)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise bad(argument, f"the shape {matrix.shape}", "(P, P)")
    columns = Axis.of_columns(frame, len(matrix))
    if not columns.names.is_unique:
        raise bad(argument, f"the columns {columns.names.tolist()!s:.200}", "names that differ")
    return matrix[columns.order(argument, row_labels(values))], columns


def decompose(
    argument: str, R: Float[np.ndarray, "P P"]
) -> tuple[Float[np.ndarray, " P"], Float[np.ndarray, "P P"]]:
    """Return eigenvalues and vectors of a matrix of correlations."""
    if (error := abs(R - R.T).max()) > ROUNDED:
        got = f"a matrix that differs from its transpose by {error:.2g} as correlations"
        raise bad(argument, got, "a symmetric one")
    eigenvalues, vectors = np.linalg.eigh((R + R.T) / 2)
    smallest, largest = eigenvalues[0], eigenvalues[-1]
    if smallest < -ROUNDED * largest:
        s = smallest / (smallest - 1)
        remedy = f"Shrink it: (1 - s) * R + s * np.eye(P), with s = {s:.2g} or more."
        got = f"a matrix with the eigenvalue {smallest:.2g} as correlations"
        raise bad(argument, got, "a positive semidefinite one", remedy)
    return eigenvalues, vectors


def pseudo_rows(
    statistics: Statistics, n: int
) -> tuple[Float[np.ndarray, "C P"], Float[np.ndarray, " C"], float]:
    """Return few rows with the products of n standardised rows, and how often to count each.

    The response along the columns, and its part beside them, are in one direction more than the
    rank. All directions are rotated so that the columns have mean zero.
    """
    eigenvalues, vectors, r, _, remedy = statistics
    # smaller ones are rounding, which shows in negative ones
    least = max(len(r) * np.finfo(float).eps * eigenvalues[-1], -2 * eigenvalues[0])
    is_sound = eigenvalues > least
    roots, vectors = np.sqrt(eigenvalues[is_sound]), vectors[:, is_sound]
    along = vectors.T @ r
    residual = 1 - np.sum((along / roots) ** 2)
    outside = np.sum(r**2) - np.sum(along**2)
    if residual < -ROUNDED or outside > UNEXPLAINED * np.sum(r**2):
        got = f"columns that explain {1 - residual:.3g} of the response"
        if outside > UNEXPLAINED * np.sum(r**2):
            got = "correlations with the response that no response has"
        raise bad("Xty, z", got, "the statistics of some rows", remedy)
    size = len(roots) + 1
    basis = contrasts(np.eye(size), np.ones(size)).T
    count = (n - 1) / size
    y = basis @ (along / roots) + np.sqrt(max(residual, 0.0) / size)
    rescale = np.sqrt(n / count)
    return rescale * (basis @ (roots[:, None] * vectors.T)), rescale * y, count


def find_misfits(
    eigenvalues: Float[np.ndarray, " P"],
    vectors: Float[np.ndarray, "P P"],
    z: Float[np.ndarray, " P"],
) -> Int[np.ndarray, " K"]:
    """Return the places of z-scores whose sign the others contradict, the worst first."""
    precision = (vectors / ((1 - RIDGE) * eigenvalues + RIDGE)) @ vectors.T
    variance = 1 / precision.diagonal()
    error = variance * (precision @ z)
    # the variance with a ridge is an upper bound of the variance without
    relative = abs(error) / np.sqrt(variance / (1 - RIDGE))
    wrong = (relative > -ndtri(ERROR_RATE / (2 * len(z)))) & (z * (z - error) < 0)
    return np.flatnonzero(wrong)[np.argsort(-relative[wrong])]
