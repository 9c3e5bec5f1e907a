# SPDX-License-Identifier: Apache-2.0
"""Times that are seen or known between limits: their densities, and data."""

import numpy as np
from scipy import stats

BREAKS, LOG_HAZARD = np.array([2.0, 5.0]), np.array([-2.0, -1.0, -1.6])


class Hazards:
    """Times whose hazard is ``exp(f + log_hazard[j])`` in a piece, with the methods of scipy."""

    def __init__(self, f, log_hazard, breaks=BREAKS):
        self.f, self.log_hazard, self.breaks = f, log_hazard, breaks

    def logsf(self, time):
        starts, ends = np.append(0.0, self.breaks), np.append(self.breaks, np.inf)
        total = 0.0
        for j, (start, end) in enumerate(zip(starts, ends, strict=True)):
            spent = np.maximum(np.minimum(time, end) - start, 0.0)
            total = total - np.exp(self.f + self.log_hazard[..., j]) * spent
        return total

    def logpdf(self, time):
        piece = np.searchsorted(self.breaks, time)
        each = [(piece == j) * self.log_hazard[..., j] for j in range(len(self.breaks) + 1)]
        return self.f + sum(each) + self.logsf(time)

    def sf(self, time):
        return np.exp(self.logsf(time))

    def cdf(self, time):
        return -np.expm1(self.logsf(time))

    def median(self):
        low, high = np.full(self.sf(1.0).shape, 0.0), np.full(self.sf(1.0).shape, 1e6)
        for _ in range(100):
            middle = (low + high) / 2
            is_later = self.sf(middle) > 0.5
            low, high = np.where(is_later, middle, low), np.where(is_later, high, middle)
        return low


TIMES = {
    "weibull": lambda f, sigma: stats.weibull_min(1 / sigma, scale=np.exp(f)),
    "lognormal": lambda f, sigma: stats.lognorm(sigma, scale=np.exp(f)),
    "loglogistic": lambda f, sigma: stats.fisk(1 / sigma, scale=np.exp(f)),
    "exponential": lambda f, sigma: stats.expon(scale=np.exp(f)),
    "cox": Hazards,
}
"""Times given the predictor and the site of the likelihood."""
SITES = {"exponential": {}, "cox": {"log_hazard": LOG_HAZARD, "breaks": BREAKS}}
"""Arguments of our distributions beside it."""

NUM_ROWS = 24
SEEN, LATER, BEFORE, BETWEEN = (np.arange(NUM_ROWS) % 4 == k for k in range(4))


def site_of(likelihood):
    """The value of the site in data, 1 if there is none."""
    return {"exponential": 1.0, "cox": LOG_HAZARD}.get(likelihood, 0.7)


def log_density(likelihood, ends, f, sigma=1.0):
    """Log density of events, and log probabilities of limits, shapes (2, N) and (..., N)."""
    of, (low, high) = TIMES[likelihood](f, sigma), ends
    # of two differences the one of small numbers has more digits
    is_late = of.cdf(low) > 0.5
    inside = np.where(is_late, of.sf(low) - of.sf(high), of.cdf(high) - of.cdf(low))
    with np.errstate(divide="ignore"):
        return np.where(low == high, of.logpdf(low), np.log(inside))


def data_of(likelihood, sort="all"):
    """Two columns, shape (N, 2), offsets, and limits of times, shape (2, N)."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(NUM_ROWS, 2))
    X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
    offset = 0.3 * rng.normal(size=NUM_ROWS)
    of = "weibull" if likelihood == "cox" else likelihood
    time = TIMES[of](1.5 + offset + 0.6 * X[:, 0], 0.7).rvs(random_state=rng)
    low, high = time.copy(), time.copy()
    if sort == "right":
        low[LATER], high[LATER] = 0.6 * time[LATER], np.inf
    else:
        low[LATER | BETWEEN] *= 0.6
        low[BEFORE], high[BETWEEN], high[LATER] = 0.0, 1.4 * high[BETWEEN], np.inf
    return X, offset, np.stack([low, high])
