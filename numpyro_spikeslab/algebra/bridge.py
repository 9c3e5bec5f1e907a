# SPDX-License-Identifier: Apache-2.0
r"""Bridge sampling: a ratio of normalisers from draws of both densities, and a proposal of spikes.

With log ratios :math:`l = \log f - \log g` at draws of f and at draws of g, whose normaliser is 1,
the log normaliser r of f solves

.. math:: \sum_{f} \sigma(r - l - c) = \sum_{g} \sigma(l - r + c), \quad c = \log(n_f / n_g),

with the logistic function :math:`\sigma` (Meng and Wong, 1996, *Simulating ratios of normalizing
constants via a simple identity*).
"""

from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, log_expit, logit
from scipy.stats import norm

from numpyro_spikeslab.algebra.correlation import clusters, unit_columns

INFLATION = 1.3
"""Covariance of a Normal proposal, relative to that of the draws."""

LEAST = 1e-4
"""Bound of the probability of either value of a proposed spike."""

UNDECIDED, CORRELATED = (0.02, 0.995), 0.1
"""Probabilities between which a spike may be in a set, and the correlation from which it is."""

SEEN = 0.9
"""Share of proposals of a set that are patterns of the draws; the others are independent spikes, so
all patterns are possible."""


def bridge(at_draws: Float[np.ndarray, "C S"], at_proposals: Float[np.ndarray, " K"]) -> Any:
    """Compute the log normaliser of f from log ratios.

    :param at_draws: at draws of f.
    :param at_proposals: at draws of g; may be minus infinity.
    :return: the log normaliser, and the terms of both sums, whose means are unknown.
    """
    odds = np.log(at_draws.size / at_proposals.size)

    def terms(r):
        return expit(r - at_draws - odds), expit(at_proposals - r + odds)

    def excess(r):
        of_draws, of_proposals = terms(r)
        return of_draws.sum() - of_proposals.sum()

    finite = np.append(at_draws, at_proposals[np.isfinite(at_proposals)])
    r = float(brentq(excess, finite.min() - 50, finite.max() + 50, xtol=1e-10))
    return r, *terms(r)


class NormalProposal(NamedTuple):
    """A Normal distribution that resembles draws, with a larger covariance, whose Cholesky factor
    is ``root``."""

    mean: Float[np.ndarray, " D"]
    root: Float[np.ndarray, "D D"]

    @classmethod
    def of(cls, draws: Float[np.ndarray, "S D"]) -> "NormalProposal":
        """Learn the proposal from draws."""
        mean = draws.mean(axis=0)
        covariance = (draws - mean).T @ (draws - mean) / (len(draws) - 1)
        return cls(mean, np.linalg.cholesky(INFLATION * covariance))

    def draw(self, rng: np.random.Generator, size: int) -> Float[np.ndarray, "S D"]:
        """Draw so many values."""
        return self.mean + rng.standard_normal((size, len(self.mean))) @ self.root.T

    def log_density(self, x: Float[np.ndarray, "S D"]) -> Float[np.ndarray, " S"]:
        """Compute the log density of values."""
        standard = np.linalg.solve(self.root, (x - self.mean).T)
        return norm.logpdf(standard).sum(axis=0) - np.log(np.diagonal(self.root)).sum()


class SpikeProposal(NamedTuple):
    """A distribution of G spikes that resembles draws, given their prior log odds.

    Spikes are independent, but for those in sets.

    - **log_odds** - of each at the prior log odds ``centre``.
    - **slope** - change of the log odds with those of the prior: 1 less the probability, since what
      is certain stays so.
    - **sets** - the spikes of each set, and the frequency of each pattern, whose bits they are.
    """

    log_odds: Float[np.ndarray, " G"]
    slope: Float[np.ndarray, " G"]
    centre: Float[np.ndarray, " G"]
    sets: list[tuple[Int[np.ndarray, " B"], Float[np.ndarray, " patterns"]]]

    @classmethod
    def of(cls, draws: Bool[np.ndarray, "S G"], centre: Float[np.ndarray, " G"]) -> "SpikeProposal":
        """Learn the proposal from draws; the prior counts as one more."""
        mean = (draws.sum(axis=0) + expit(centre)) / (len(draws) + 1)
        probs = np.clip(mean, LEAST, 1 - LEAST)
        active = np.flatnonzero((probs > UNDECIDED[0]) & (probs < UNDECIDED[1]))
        sets = []
        for part in clusters(unit_columns(draws[:, active].astype(float)), CORRELATED):
            counts = np.bincount(patterns(draws[:, active[part]]), minlength=2 ** len(part))
            sets.append((active[part], counts / len(draws)))
        return cls(logit(probs), 1 - probs, centre, sets)

    def at(self, prior_log_odds: Float[np.ndarray, "S G"]) -> Float[np.ndarray, "S G"]:
        """Return the log odds of independent spikes."""
        return self.log_odds + self.slope * (prior_log_odds - self.centre)

    def draw(
        self, rng: np.random.Generator, prior_log_odds: Float[np.ndarray, "S G"]
    ) -> Bool[np.ndarray, "S G"]:
        """Draw as many spikes as there are prior log odds."""
        spikes = rng.random(prior_log_odds.shape) < expit(self.at(prior_log_odds))
        for members, probs in self.sets:
            rows = np.flatnonzero(rng.random(len(spikes)) < SEEN)
            drawn = rng.choice(len(probs), len(rows), p=probs)[:, None]
            spikes[np.ix_(rows, members)] = drawn >> np.arange(len(members)) & 1
        return spikes

    def log_density(
        self, spikes: Bool[np.ndarray, "S G"], prior_log_odds: Float[np.ndarray, "S G"]
    ) -> Float[np.ndarray, " S"]:
        """Compute the log probability of spikes."""
        each = log_probability(spikes, self.at(prior_log_odds))
        total = each.sum(axis=1)
        for members, probs in self.sets:
            alone = each[:, members].sum(axis=1)
            seen = SEEN * probs[patterns(spikes[:, members])]
            total += np.log(seen + (1 - SEEN) * np.exp(alone)) - alone
        return total


def patterns(spikes: Bool[np.ndarray, "S B"]) -> Int[np.ndarray, " S"]:
    """Return the number of each pattern, whose bits are the spikes."""
    return spikes @ (1 << np.arange(spikes.shape[1]))


def log_probability(
    spikes: Bool[np.ndarray, "S G"], log_odds: Float[np.ndarray, "S G"]
) -> Float[np.ndarray, "S G"]:
    """Compute the log probability of each spike."""
    return log_expit(np.where(spikes, log_odds, -log_odds))
