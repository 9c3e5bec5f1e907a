# SPDX-License-Identifier: Apache-2.0
"""Draws of the spread of the effects of groups, against sums over spikes and a grid of spreads."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
import truth

from jax import random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.sampling import coefficient_scales

GROUP = np.repeat(np.arange(5), 4)


def model(X, y):
    spreads = [numpyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "slope_tau")]
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("group", 5):
        effect = numpyro.sample("effect", dist.Normal(0.0, spreads[0]))
        slope = numpyro.sample("slope", dist.Normal(0.0, spreads[1]))
    location = level + effect[GROUP] + slope[GROUP] * X[:, 0] + X @ truth.weights(2, 0.5, 1.0)
    truth.respond(y, location, 0.8)


@pytest.mark.parametrize("largest", [24, 0], ids=["integrated", "moved"])
def test_spreads_have_their_posterior(largest, monkeypatch):
    monkeypatch.setattr(coefficient_scales, "MAX_SIZE", largest)
    rng, one = np.random.default_rng(0), np.equal.outer(GROUP, np.arange(5)).astype(float)
    X = rng.normal(size=(20, 2))
    y = 0.6 * X[:, 0] + one @ rng.normal(size=5) + 0.8 * rng.normal(size=20)
    slopes, grid = one * X[:, :1], (np.arange(30) + 0.5) / 8
    spikes, (tau, slope_tau) = np.array([*product([0, 1], repeat=2)]), np.ix_(grid, grid)
    base = 0.64 * np.eye(20) + 4.0 + np.einsum("np,mp,kp->mnk", X, spikes, X)
    of_groups = [s[..., None, None] ** 2 * (z @ z.T) for s, z in ((tau, one), (slope_tau, slopes))]
    covariance = base[:, None, None] + of_groups[0] + of_groups[1]
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, np.broadcast_to(y[:, None], (*root.shape[:-1], 1)))
    logs = -0.5 * np.sum(white**2, axis=(-2, -1))
    logs -= np.sum(np.log(np.diagonal(root, axis1=-2, axis2=-1)), axis=-1)
    logs += stats.halfnorm.logpdf(grid)[:, None] + stats.halfnorm.logpdf(grid)
    probs = np.exp(logs - logs.max())
    probs /= probs.sum()
    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=200, num_samples=6_000, progress_bar=False)
    mcmc.run(random.key(0), X, y)
    draws = mcmc.get_samples()
    for axis, name in ((1, "tau"), (2, "slope_tau")):
        of_spread = probs.sum(axis=tuple({0, 1, 2} - {axis}))
        np.testing.assert_allclose(draws[name].mean(), of_spread @ grid, atol=0.03)
        np.testing.assert_allclose((draws[name] ** 2).mean(), of_spread @ grid**2, atol=0.06)
    found = draws["w_spike"].mean(0)
    np.testing.assert_allclose(found, [probs[2:].sum(), probs[1::2].sum()], atol=0.02)
