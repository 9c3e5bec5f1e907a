# SPDX-License-Identifier: Apache-2.0
"""Weights of many tasks in Gram form, against dense algebra and finite differences."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from task_problems import M, Q, small
import truth

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.tasks import (
    explained,
    gram,
    keeps_products,
    squared_errors,
    update_weights,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_each_visit_knows_the_ones_before():
    """A pass is one Gauss-Seidel sweep, so each visit is the optimum given those before it."""
    tasks = small()
    at, weights = tasks.at, tasks.posterior.weights
    stats = gram(at, tasks.functions.mean, tasks.functions.var)
    W, new = np.array(weights.mean), update_weights(at, stats, weights)
    log_odds, variance = at.prior
    for q, m in np.ndindex(Q, M):
        tau, G = 1 / at.sigma2[q], stats.G[q]
        precision = tau * (G[m, m] + stats.c[q, m]) + 1 / variance[q, m]
        loc = tau * (stats.b[q, m] - G[m] @ W[q] + G[m, m] * W[q, m]) / precision
        logit = log_odds[q, m] + 0.5 * (loc**2 * precision - np.log(variance[q, m] * precision))
        expected = loc, precision**-0.5, 1 / (1 + np.exp(-logit))
        values = new.loc[q, m], new.scale[q, m], new.probs[q, m]
        np.testing.assert_allclose(values, expected, rtol=1e-9)
        W[q, m] = new.mean[q, m]


def test_statistics_are_sums_over_the_observations():
    tasks = small()
    at, weights = tasks.at, tasks.posterior.weights
    stats = gram(at, tasks.functions.mean, tasks.functions.var)
    parts = tasks.functions.mean, tasks.functions.var, weights.mean, weights.slab_moments[1]
    phi, var, W, second, Z, Y = map(np.asarray, (*parts, at.relative, at.Y))
    assert Z.shape == Y.shape
    np.testing.assert_allclose(stats.G, np.einsum("nq,mn,kn->qmk", Z, phi, phi), atol=1e-12)
    np.testing.assert_allclose(stats.c, np.einsum("nq,mn->qm", Z, var), atol=1e-12)
    np.testing.assert_allclose(stats.b, np.einsum("nq,nq,mn->qm", Z, Y, phi), atol=1e-12)
    # the expectation of the square, from the moments of each product of weight and function
    spread = second @ (phi**2 + var) - W**2 @ phi**2
    squares = np.sum(Z * ((Y - (W @ phi).T) ** 2 + spread.T), axis=0)
    np.testing.assert_allclose(squared_errors(stats, weights), squares)
    power = np.einsum("nq,qm,mn->m", Z / np.asarray(at.sigma2), W**2, phi**2)
    np.testing.assert_allclose(
        explained(at, jnp.diagonal(stats.G, axis1=1, axis2=2), weights), power
    )


def test_tasks_that_weigh_alike_share_a_matrix_however_large(monkeypatch):
    tasks, results = small(), []
    for size in (1, Q):
        at = tasks.at._replace(relative=jnp.ones_like(tasks.at.relative[:, :size]))
        stats = gram(at, tasks.functions.mean, tasks.functions.var)
        assert stats.G.shape[0] == size
        weights = update_weights(at, stats, tasks.posterior.weights)
        results.append((weights, squared_errors(stats, weights)))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), *results)
    monkeypatch.setattr("numpyro_spikeslab.fitting.tasks.GRAM_LIMIT", 0)
    form = tasks.spec.form
    assert not keeps_products(form) and keeps_products(replace(form, complete=True))


@pytest.mark.exhaustive
def test_known_features_need_no_matrix_for_each_task(monkeypatch):
    rng, number = np.random.default_rng(4), 7
    phi = rng.normal(size=(5, 20))
    Y = 2 * (phi * (rng.uniform(size=(5, 1)) < 0.5)).T @ rng.normal(size=(5, number))
    Y += 0.3 * rng.normal(size=Y.shape)
    observed = rng.uniform(size=Y.shape) > 0.4

    def model(phi, Y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        shift = numpyro.sample("shift", dist.Cauchy(0.0, 1.0))
        W = truth.task_weights(number, 5, 0.3, 2.0)
        truth.respond_by_task(Y, (W @ phi).T + shift, sigma, observed)

    results = []
    for limit in (number * 25, number * 25 - 1):
        monkeypatch.setattr("numpyro_spikeslab.fitting.tasks.GRAM_LIMIT", limit)
        # whether there is a matrix for each task is decided when code is traced
        jax.clear_caches()
        svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
        results.append(svi.run(jax.random.key(0), 150, phi, Y, progress_bar=False))
    np.testing.assert_allclose(*(result.losses for result in results), rtol=1e-8)
    params = (result.params for result in results)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *params)
