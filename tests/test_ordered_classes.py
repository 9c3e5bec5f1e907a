# SPDX-License-Identifier: Apache-2.0
"""Regressions of classes in order: their posterior, levels, and what is refused."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats
from scipy.special import expit, logsumexp
from truth.known_draws import columns_of

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting.arviz_data import posterior

TOLD = "ignore:sparse_regression. the Monte Carlo", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *TOLD)

KEY, N, P, INCLUSION = random.key(0), 60, 4, 0.4
NAMES = ["low", "middle", "high"]
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, P))
X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
Y = ((0.8 * X[:, 0] - 0.4 * X[:, 2] + RNG.logistic(size=N))[:, None] > [-1.0, 1.2]).sum(axis=1)
COUNTS = RNG.uniform(0.3, 2.0, N)


def log_likelihood(w, cuts, counts=1.0):
    """Of weights (..., p) of columns (N, p), and cut points (..., 2)."""
    ends = np.concatenate([cuts[..., :1] * 0 - np.inf, cuts, cuts[..., :1] * 0 + np.inf], axis=-1)
    above, below = (ends[..., Y + k] - w for k in (0, 1))
    return (counts * np.log(expit(below) - expit(above))).sum(axis=-1)


def log_joint(z, X, counts):
    """Of weights, two cut points and the slab scale, the last two unconstrained."""
    w, (low, gap, log_scale) = z[..., :-3], np.moveaxis(z[..., -3:], -1, 0)
    cuts, scale = np.stack([low, low + np.exp(gap)], axis=-1), np.exp(log_scale)[..., None]
    # with the derivatives of the exponentials
    total = log_likelihood(w @ X.T, cuts, counts) + gap + log_scale
    total += np.log(2) + stats.logistic.logpdf(cuts).sum(axis=-1)
    total += stats.norm.logpdf(w, 0, scale).sum(axis=-1)
    return total + stats.halfnorm.logpdf(scale[..., 0])


def truth(X, counts):
    """Inclusion, means of the weights and of cut points, and the log evidence, by importance
    sampling of each model."""
    rng, logs, means = np.random.default_rng(0), [], []
    for model in product((0, 1), repeat=P):
        places = np.flatnonzero(model)
        size = len(places) + 3
        start = np.concatenate([0.1 * np.ones(len(places)), [-1.0, 0.7, -0.5]])
        found = optimize.minimize(lambda z, x=X[:, places]: -log_joint(z, x, counts), start)
        root = np.linalg.cholesky(found.hess_inv)
        e = rng.standard_t(5, (20_000, size))
        z = found.x + 1.2 * e @ root.T
        log_proposal = stats.t.logpdf(e, 5).sum(axis=1) - np.log(1.2 * np.diag(root)).sum()
        weights = log_joint(z, X[:, places], counts) - log_proposal
        probs = np.exp(weights - logsumexp(weights))
        mean = np.zeros(P)
        mean[places] = probs @ z[:, :-3]
        cuts = probs @ np.stack([z[:, -3], z[:, -3] + np.exp(z[:, -2])], axis=1)
        prior = np.log(np.where(model, INCLUSION, 1 - INCLUSION)).sum()
        logs.append(prior + logsumexp(weights) - np.log(len(z)))
        means.append([*model, *mean, *cuts])
    return np.exp(logs - logsumexp(logs)) @ np.array(means), logsumexp(logs)


def levels(y, names=NAMES):
    return pd.Categorical(np.array(names)[y], names, ordered=True)


@pytest.mark.parametrize("counts", [None, COUNTS], ids=["once", "fractions"])
def test_chains_and_evidence_are_those_of_all_models(counts):
    mean = np.average(X, axis=0, weights=counts)
    table = (X - mean) / np.average((X - mean) ** 2, axis=0, weights=counts) ** 0.5
    options = {"inclusion": INCLUSION, "num_warmup": 500, "num_samples": 1500}
    tree = nss.sparse_regression(
        KEY, table, levels(Y), likelihood="ordered", weights=counts, **options
    )
    draws = posterior(tree)
    assert columns_of(tree)["r_hat"].max() < 1.03
    expected, log_evidence = truth(table, 1.0 if counts is None else counts)
    got = [(draws["w"] != 0).values, draws["w"].values, draws["cutpoints"].values]
    error = abs(np.concatenate([x.mean(axis=(0, 1)) for x in got]) - expected)
    assert (error[:P] < 0.02).all() and (error[P:] < 0.04).all()
    evidence = nss.log_evidence(KEY, tree)
    assert abs(evidence.value - log_evidence) < 0.05 + 4 * evidence.se
