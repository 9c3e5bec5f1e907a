# SPDX-License-Identifier: Apache-2.0
"""Times that are seen or known between limits: their densities by scipy, and data."""

import numpy as np
from scipy import stats

TIMES = {
    "weibull": lambda f, sigma: stats.weibull_min(1 / sigma, scale=np.exp(f)),
    "lognormal": lambda f, sigma: stats.lognorm(sigma, scale=np.exp(f)),
    "loglogistic": lambda f, sigma: stats.fisk(1 / sigma, scale=np.exp(f)),
    "exponential": lambda f, sigma: stats.expon(scale=np.exp(f)),
}
"""Times by scipy."""

NUM_ROWS = 24
SEEN, LATER, BEFORE, BETWEEN = (np.arange(NUM_ROWS) % 4 == k for k in range(4))


def log_density(likelihood, ends, f, sigma=1.0):
    """Log density of events, and log probabilities of limits, shapes (2, N) and (..., N)."""
    of, (low, high) = TIMES[likelihood](f, sigma), ends
    # of two differences the one of small numbers has more digits
    is_late = of.cdf(low) > 0.5
    inside = np.where(is_late, of.sf(low) - of.sf(high), of.cdf(high) - of.cdf(low))
    with np.errstate(divide="ignore"):
        return np.where(low == high, of.logpdf(low), np.log(inside))


def data_of(likelihood, sigma=0.7, sort="all"):
    """Two columns, shape (N, 2), offsets, and limits of times, shape (2, N)."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(NUM_ROWS, 2))
    X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
    offset = 0.3 * rng.normal(size=NUM_ROWS)
    time = TIMES[likelihood](1.5 + offset + 0.6 * X[:, 0], sigma).rvs(random_state=rng)
    low, high = time.copy(), time.copy()
    if sort == "right":
        low[LATER], high[LATER] = 0.6 * time[LATER], np.inf
    else:
        low[LATER | BETWEEN] *= 0.6
        low[BEFORE], high[BETWEEN], high[LATER] = 0.0, 1.4 * high[BETWEEN], np.inf
    return X, offset, np.stack([low, high])
