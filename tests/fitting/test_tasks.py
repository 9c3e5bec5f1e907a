# SPDX-License-Identifier: Apache-2.0
"""Weights of many tasks in Gram form, against dense algebra and finite differences."""

from dataclasses import replace

import numpy as np
import pytest
from task_problems import M, Q, small

import jax
import jax.numpy as jnp

import numpyro
from numpyro import handlers
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
    found = small()
    stats = gram(found.at, found.functions.mean, found.functions.var)
    W = np.array(found.posterior.weights.mean)
    new = update_weights(found.at, stats, found.posterior.weights)
    log_odds, variance = found.at.prior
    for q in range(Q):
        for m in range(M):
            tau = 1 / found.at.sigma2[q]
            G, c = stats.G[q], stats.c[q]
            precision = tau * (G[m, m] + c[m]) + 1 / variance[q, m]
            rest = stats.b[q, m] - G[m] @ W[q] + G[m, m] * W[q, m]
            loc = tau * rest / precision
            logit = log_odds[q, m] + 0.5 * (loc**2 * precision - np.log(variance[q, m] * precision))
            np.testing.assert_allclose(new.loc[q, m], loc, rtol=1e-9)
            np.testing.assert_allclose(new.scale[q, m], precision**-0.5, rtol=1e-9)
            np.testing.assert_allclose(new.probs[q, m], 1 / (1 + np.exp(-logit)), rtol=1e-9)
            W[q, m] = loc * new.probs[q, m]


def test_statistics_are_sums_over_the_observations():
    found = small()
    at = found.at
    stats = gram(at, found.functions.mean, found.functions.var)
    phi, var = np.asarray(found.functions.mean), np.asarray(found.functions.var)
    W = np.asarray(found.posterior.weights.mean)
    second = np.asarray(found.posterior.weights.slab_moments[1])
    Z, Y = np.asarray(at.relative), np.asarray(at.Y)
    assert Z.shape == Y.shape
    np.testing.assert_allclose(stats.G, np.einsum("nq,mn,kn->qmk", Z, phi, phi), atol=1e-12)
    np.testing.assert_allclose(stats.c, np.einsum("nq,mn->qm", Z, var), atol=1e-12)
    np.testing.assert_allclose(stats.b, np.einsum("nq,nq,mn->qm", Z, Y, phi), atol=1e-12)
    # the expectation of the square, from the moments of each product of weight and function
    spread = second @ (phi**2 + var) - W**2 @ phi**2
    squares = np.sum(Z * ((Y - (W @ phi).T) ** 2 + spread.T), axis=0)
    np.testing.assert_allclose(squared_errors(stats, found.posterior.weights), squares)
    power = np.einsum("nq,qm,mn->m", Z / np.asarray(at.sigma2), W**2, phi**2)
    np.testing.assert_allclose(explained(at, stats.own, found.posterior.weights), power)


def test_tasks_that_weigh_alike_share_a_matrix():
    found = small()
    alike = found.at._replace(relative=jnp.ones_like(found.at.relative[:, :1]))
    each = found.at._replace(relative=jnp.ones_like(found.at.relative))
    results = []
    for at in (alike, each):
        stats = gram(at, found.functions.mean, found.functions.var)
        weights = update_weights(at, stats, found.posterior.weights)
        results.append((weights, squared_errors(stats, weights)))
    assert gram(alike, found.functions.mean, found.functions.var).G.shape[0] == 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), *results)


@pytest.mark.exhaustive
@pytest.mark.parametrize("hyper", [False, True], ids=["noise", "noise and a free site"])
def test_known_features_need_no_matrix_for_each_task(hyper, monkeypatch):
    rng = np.random.default_rng(4)
    phi, number = rng.normal(size=(5, 20)), 7
    Y = 2 * (phi * (rng.uniform(size=(5, 1)) < 0.5)).T @ rng.normal(size=(5, number))
    Y += 0.3 * rng.normal(size=Y.shape)
    Y[rng.uniform(size=Y.shape) < 0.4] = np.nan

    def model(phi, Y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        shift = numpyro.sample("shift", dist.Cauchy(0.0, 1.0)) if hyper else 0.0
        with numpyro.plate("task", number, dim=-2), numpyro.plate("latent", 5, dim=-1):
            W = nss.spike_slab("W", 0.3, 2.0)
        location, seen = (W @ phi).T + shift, handlers.mask(mask=~jnp.isnan(Y))
        with numpyro.plate("n", 20, dim=-2), numpyro.plate("task", number, dim=-1), seen:
            numpyro.sample("Y", dist.Normal(location, sigma), obs=jnp.nan_to_num(Y))

    results = []
    for limit in (number * 25, number * 25 - 1):
        monkeypatch.setattr("numpyro_spikeslab.fitting.tasks.GRAM_LIMIT", limit)
        # whether there is a matrix for each task is decided when code is traced
        jax.clear_caches()
        svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
        results.append(svi.run(jax.random.key(0), 150, phi, Y, progress_bar=False))
    np.testing.assert_allclose(*(found.losses for found in results), rtol=1e-8)
    for name, value in results[0].params.items():
        np.testing.assert_allclose(results[1].params[name], value, rtol=1e-5, atol=1e-6)


def test_a_start_that_is_given_is_not_made(monkeypatch):
    model = nss.models.mtmkl("white", 2)
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    X, Y = np.arange(6.0), np.random.default_rng(0).normal(size=(6, 3))
    params = svi.get_params(svi.init(jax.random.key(0), X, Y))
    monkeypatch.setattr(svi, "_start_functions", None)
    state = svi.init(jax.random.key(1), X, Y, init_params=params)
    jax.tree.map(np.testing.assert_array_equal, svi.get_params(state), params)
    with pytest.raises(TypeError, match="not callable"):
        svi.init(jax.random.key(1), X, Y, init_params={"noise_auto_loc": params["noise_auto_loc"]})


def test_tasks_that_weigh_alike_share_their_matrix_however_large(monkeypatch):
    monkeypatch.setattr("numpyro_spikeslab.fitting.tasks.GRAM_LIMIT", 0)
    form = small().spec.form
    assert not keeps_products(form) and keeps_products(replace(form, complete=True))
