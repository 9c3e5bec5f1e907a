# SPDX-License-Identifier: Apache-2.0
"""Bridge sampling from exact draws, and the proposal of spikes."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp
import truth

from numpyro_spikeslab.algebra.bridge import (
    NormalProposal,
    SpikeProposal,
    bridge,
    log_probability,
)


def test_the_normaliser_of_a_gaussian():
    rng = np.random.default_rng(0)
    draws, proposals = 0.5 + rng.normal(size=(2, 5000)), 2.0 * rng.normal(size=20_000)

    def log_ratio(x):
        return 3.0 + stats.norm.logpdf(x, 0.5) - stats.norm.logpdf(x, 0.0, 2.0)

    value, *_ = bridge(log_ratio(draws), log_ratio(proposals))
    assert value == pytest.approx(3.0, abs=0.02)


def test_a_normal_proposal_has_the_density_of_its_draws():
    rng = np.random.default_rng(0)
    proposal = NormalProposal.of(rng.normal(size=(200, 2)) @ [[1.0, 0.5], [0.0, 0.3]])
    x = proposal.draw(rng, 50_000)
    np.testing.assert_allclose(np.cov(x.T), proposal.root @ proposal.root.T, rtol=0.05)
    expected = stats.multivariate_normal(proposal.mean, proposal.root @ proposal.root.T).logpdf(x)
    np.testing.assert_allclose(proposal.log_density(x), expected)


@pytest.fixture(scope="module")
def table():
    """All patterns of eight spikes, two of them of near copies, and their log probabilities."""
    X = truth.design("correlated", num_obs=30, size=8)
    X[:, 1] = X[:, 0] + 0.05 * X[:, 1]
    posterior = truth.enumerate_models(truth.regression(X, truth.response(X), 0.5, 0.3, 0.8))
    return posterior.models > 0, posterior.log_probs


def test_probabilities_of_spikes_sum_to_one(table):
    (models, log_probs), rng = table, np.random.default_rng(0)
    odds = np.full(models.shape, np.log(0.3 / 0.7))
    draws = models[rng.choice(len(models), 1000, p=np.exp(log_probs))]
    proposal = SpikeProposal.of(draws, odds[0] + 0.2)
    assert proposal.sets
    log_density = proposal.log_density(models, odds)
    assert logsumexp(log_density) == pytest.approx(0.0, abs=1e-9)
    spikes = proposal.draw(rng, np.broadcast_to(odds[0], (100_000, 8)))
    frequency = np.bincount(spikes @ (1 << np.arange(8)[::-1]), minlength=256) / len(spikes)
    assert [int("".join(map(str, x))) for x in models[:3].astype(int)] == [0, 1, 10]
    np.testing.assert_allclose(frequency, np.exp(log_density), atol=5e-3)


def test_the_standard_error_is_calibrated(table):
    """300 repetitions without chains: draws are exact."""
    (models, log_probs), rng = table, np.random.default_rng(0)
    odds, errors = np.full(models.shape, np.log(0.3 / 0.7)), []
    for _ in range(300):
        first, second = rng.choice(len(models), (2, 1000), p=np.exp(log_probs))
        proposal = SpikeProposal.of(models[first], odds[0])
        ratios = log_probs - proposal.log_density(models, odds)
        new = proposal.draw(rng, np.broadcast_to(odds[0], (2000, 8)))
        numbers = new @ (1 << np.arange(8)[::-1])
        value, *terms = bridge(ratios[second][None], ratios[numbers])
        se = np.sqrt(sum(x.var() / x.mean() ** 2 / x.size for x in terms))
        errors.append((value, value / se, ratios[numbers].mean(), ratios[second].mean()))
    value, relative, lower, upper = np.array(errors).T
    assert 0.85 < np.sqrt(np.mean(relative**2)) < 1.15
    assert abs(value.mean()) < 4 * value.std() / 300**0.5
    assert lower.mean() < 0 < upper.mean()


def test_log_probability():
    spikes, odds = np.array([[True, False]]), np.array([[1.0, 1.0]])
    expected = stats.bernoulli.logpmf([[1, 0]], 1 / (1 + np.exp(-1.0)))
    np.testing.assert_allclose(log_probability(spikes, odds), expected)
