# SPDX-License-Identifier: Apache-2.0
"""Noise and weights of a regression, estimated by least squares in numpy before any inference."""

from typing import NamedTuple

from jaxtyping import Float
import numpy as np

# Most observations and most columns for an estimate.
MAX_ROWS, MAX_COLUMNS = 4096, 256
# Times that columns are chosen: what hides behind large effects appears once these are explained.
ROUNDS = 4


class Signal(NamedTuple):
    """Estimates from the columns that explain most, so that the noise is rather too small.

    - **noise** - standard deviation of the noise.
    - **weight** - the largest of the weights.
    - **length** - norm of the observations after regression on the covariates.
    """

    noise: float
    weight: float
    length: float


def signal_of(
    rows: Float[np.ndarray, "P N"],
    target: Float[np.ndarray, " N"],
    covariates: Float[np.ndarray, "C N"],
) -> Signal:
    """Estimate noise and weights of a regression on some of P columns and on all covariates."""
    step = -(-target.size // MAX_ROWS)
    rows, target, covariates = rows[:, ::step], target[::step].astype(float), covariates[:, ::step]
    count = max(target.size - len(covariates), 1)
    most = min(len(rows), MAX_COLUMNS, count // 2)
    norms = np.sqrt(np.einsum("pn,pn->p", rows, rows)) + np.finfo(rows.dtype).tiny
    chosen, residual, lengths = np.zeros(len(rows), bool), target, []
    for part in range(ROUNDS + 1):
        score = np.where(chosen, np.inf, abs(rows @ residual.astype(rows.dtype)) / norms)
        chosen[np.argsort(-score)[: most * part // ROUNDS]] = True
        columns = np.concatenate([covariates, rows[chosen] / norms[chosen, None]]).astype(float)
        weights = np.linalg.lstsq(columns.T, target, rcond=None)[0]
        residual = target - weights @ columns
        lengths.append(np.linalg.norm(residual))
    weight = np.max(abs(weights[len(covariates) :] / norms[chosen]), initial=0.0)
    return Signal(lengths[-1] / np.sqrt(count - most), weight, lengths[0] * np.sqrt(step))
