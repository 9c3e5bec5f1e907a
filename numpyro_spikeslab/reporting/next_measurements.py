# SPDX-License-Identifier: Apache-2.0
"""The choice of the next measurements, from draws of the predictor."""

from typing import Any

import numpy as np
import pandas as pd

from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import as_numbers


def next_measurements(
    draws: Any, noise: Any, number: int = 1, *, allowed: Any = None, costs: Any = None
) -> pd.DataFrame:
    r"""Choose the next measurements, one after the other, by their information on the weights.

    A measurement of an entry whose predictor has the posterior variance :math:`v` has

    .. math:: \tfrac{1}{2} \log (1 + v / \sigma^2)

    nats of information on the weights if their posterior is Normal, and at most this if not. After
    each choice the draws are changed so that their covariance is the one given this measurement,
    whatever its result. So only one of two equal entries is chosen. Such a batch has at least
    :math:`1 - 1/e` of the information of the best one (Krause, Singh and Guestrin, 2008,
    *Near-optimal sensor placements in Gaussian processes*).

    Responses have Normal noise. Nothing is fitted, so draws may come from any package.

    :param draws: S draws of the predictor at N candidate rows, shape (S, N), or of Q tasks there,
        (S, N, Q). They are ``w @ X_pool.T`` of a regression, and ``f`` of
        :func:`~numpyro_spikeslab.models.mtmkl`.
    :param noise: standard deviation of the noise, in units of the predictor: one number, or an
        array that broadcasts to the entries, such as (Q,).
    :param number: number of measurements.
    :param allowed: which entries may be measured, of the shape of the entries; by default all. Each
        is chosen once.
    :param costs: positive costs of measurements, which broadcast to the entries. Then each choice
        is by information per cost.
    :returns: a DataFrame with one row per measurement, in the order of the choice: ``row``,
        ``task`` if there are tasks, and ``information`` in nats.
    :raises ValueError: if shapes differ, draws are not finite, or noise or costs not positive.

    >>> import numpy as np
    >>> from numpyro_spikeslab import next_measurements
    >>> w = np.random.default_rng(0).normal([1.0, 0.0], [1.0, 0.1], size=(1000, 2))
    >>> pool = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 3.0]])     # the second repeats the first
    >>> next_measurements(w @ pool.T, noise=0.1, number=2).round(1)
            row  information
    choice
    0         0          2.3
    1         2          1.1
    """
    draws = as_numbers("draws", draws)
    if draws.ndim not in (2, 3) or len(draws) < 2 or not draws.size:
        raise bad("draws", f"the shape {draws.shape}", "(S, N) or (S, N, Q), two draws or more")
    entries = draws.shape[1:]
    variances = _positive("noise", noise, entries) ** 2
    prices = _positive("costs", 1.0 if costs is None else costs, entries)
    free = np.ones(entries, bool) if allowed is None else np.array(allowed)
    if free.shape != entries or free.dtype != bool:
        got = f"an array of {free.dtype} of the shape {free.shape}"
        raise bad("allowed", got, f"booleans of the shape {entries}, one for each entry")
    free = free.ravel()
    if number not in range(1, free.sum() + 1):
        expected = f"a whole number from 1 to {free.sum()}, as many as entries are allowed"
        raise bad("number", number, expected)

    errors = (draws - draws.mean(axis=0)).reshape(len(draws), -1)
    rows = []
    for _ in range(number):
        variance = np.var(errors, axis=0, ddof=1)
        information = np.log1p(variance / variances) / 2
        best = int(np.where(free, information / prices, -np.inf).argmax())
        free[best] = False
        rows.append((*np.unravel_index(best, entries), information[best]))
        if variance[best] > 0:
            covariance = errors[:, best] @ errors / (len(errors) - 1)
            # shrunk by this factor, the draws have the covariance given the measurement
            shrinkage = np.sqrt(variances[best] / (variance[best] + variances[best]))
            errors -= np.outer(errors[:, best], (1 - shrinkage) * covariance / variance[best])
    columns = ["row", "task"][: len(entries)] + ["information"]
    return pd.DataFrame(rows, columns=columns).rename_axis("choice")


def _positive(argument: str, values: Any, entries: tuple[int, ...]) -> np.ndarray:
    """Return positive numbers for all entries, flattened."""
    array = as_numbers(argument, values)
    try:
        array = np.broadcast_to(array, entries).ravel()
    except ValueError as error:
        got = f"the shape {array.shape}"
        raise bad(argument, got, f"one that broadcasts to the entries, {entries}") from error
    if not (array > 0).all():
        raise bad(argument, array[~(array > 0)][0], "positive numbers")
    return array
