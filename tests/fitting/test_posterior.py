# SPDX-License-Identifier: Apache-2.0
"""Steps of tasks against dense algebra: the bound, sites with a role, weights in Gram form."""

from dataclasses import replace
from functools import partial

from fits import same
import numpy as np
import pytest
from scipy import stats
from truth.task_problems import M, Q, dense_moments, observations, slope, small

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import Expectation
from numpyro_spikeslab.fitting.function_sweeps import explained
from numpyro_spikeslab.models.kernel_priors import length_scale_prior

pytestmark = pytest.mark.usefixtures("x64")


def test_the_bound_agrees_with_dense_expectations():
    tasks = small()
    at, functions, (g, loc, scale) = tasks.at, tasks.functions, tasks.posterior.weights
    values = {name: np.asarray(x) for name, x in tasks.posterior.values.items()}
    M, N = functions.mean.shape
    P, linear = dense_moments(tasks, at)
    mean = np.asarray(functions.mean).ravel()
    second = np.outer(mean, mean)
    kl = 0.0
    for m in range(M):
        block = slice(m * N, (m + 1) * N)
        K = tasks.covariance(m)
        a = np.sqrt(np.asarray(functions.alpha[m]))
        B = np.eye(N) + a[:, None] * K * a
        S = K - (K * a) @ np.linalg.solve(B, a[:, None] * K)
        second[block, block] += S
        d = mean[block] - np.asarray(tasks.engine.functions.mean[m])
        kl += 0.5 * (np.trace(np.linalg.solve(K, S)) + d @ np.linalg.solve(K, d) - N)
        kl += 0.5 * np.linalg.slogdet(B)[1]
    Y, Z = np.asarray(at.Y), np.broadcast_to(at.relative, at.Y.shape)
    tau = Z / values["noise"] ** 2
    fit = 0.5 * np.sum(np.log(tau[Z > 0] / (2 * np.pi)))
    fit += -0.5 * (np.sum(tau * Y**2) - 2 * linear @ mean + np.sum(P * second))
    pi, variance = values["inclusion"], values["slab_scale"] ** 2
    gauss = (loc**2 + scale**2) / variance - 1 - jnp.log(scale**2 / variance)
    pair = g * np.log(g / pi) + (1 - g) * np.log((1 - g) / (1 - pi)) + 0.5 * g * gauss
    log_prior = (
        np.sum(stats.halfnorm.logpdf(values["noise"], scale=2.0))
        + stats.halfnorm.logpdf(values["slab_scale"], scale=1.5)
        + stats.beta.logpdf(pi, 2.0, 3.0)
        + np.sum(length_scale_prior(observations()[0]).log_prob(values["phi_scale"]))
    )
    expected = fit - kl - np.sum(pair) + log_prior
    np.testing.assert_allclose(tasks.bound(tasks.posterior), expected, rtol=1e-6)


@pytest.mark.parametrize("prior", ["weak", "flat", "shared", "own inclusion"])
def test_sites_with_a_role_are_stationary(prior):
    tasks = small(prior)
    squares = tasks.engine.features.squares(tasks.engine, tasks.at, tasks.posterior)
    posterior = tasks.engine.with_modes(tasks.at, tasks.posterior, squares)
    sites = {role.site for role in tasks.engine.form.roles}
    assert sites == {"noise", "inclusion", "slab_scale"}
    for site in sites:
        value = posterior.values[site]
        for where in np.ndindex(value.shape):

            def moved(e, site=site, value=value, where=where):
                new = posterior.values | {site: value.at[where].add(e)}
                return tasks.bound(posterior._replace(values=new))

            assert abs(slope(moved, 1e-5)) < 1e-3, (site, where)
            assert moved(0.0) > max(moved(0.05 * value[where]), moved(-0.05 * value[where]))


def test_a_view_at_other_values_of_roles_is_that_of_the_model():
    tasks = small()
    values = {k: 0.5 * x for k, x in tasks.posterior.values.items()}
    new = tasks.engine.with_roles(tasks.at, values)
    expected = tasks.reading.view(values)
    # all tasks have the same prior, of which a fit keeps one row
    assert new.prior.log_odds.shape == (1, tasks.engine.form.num_features)
    prior = jax.tree.map(lambda x: np.broadcast_to(x, tasks.engine.form.shape), new.prior)
    same(new._replace(prior=prior, priors={}), expected._replace(priors={}))


def test_each_visit_knows_the_ones_before():
    """A pass is one Gauss-Seidel sweep, so each visit is the optimum given those before it."""
    tasks = small()
    at, weights = tasks.at, tasks.posterior.weights
    features = tasks.functions.mean, tasks.functions.var
    sums, W = at.sums(*features), np.array(weights.mean)
    new, _ = at.sweep(features, weights, Expectation(), sums)
    log_odds, variance = at.prior
    for q, m in np.ndindex(Q, M):
        tau, G = 1 / at.sigma2[q], sums.G[q]
        precision = tau * (G[m, m] + sums.c[q, m]) + 1 / variance[q, m]
        loc = tau * (sums.b[q, m] - G[m] @ W[q] + G[m, m] * W[q, m]) / precision
        logit = log_odds[q, m] + 0.5 * (loc**2 * precision - np.log(variance[q, m] * precision))
        expected = loc, precision**-0.5, 1 / (1 + np.exp(-logit))
        values = new.loc[q, m], new.scale[q, m], new.probs[q, m]
        np.testing.assert_allclose(values, expected, rtol=1e-9)
        W[q, m] = new.mean[q, m]


def test_statistics_are_sums_over_the_observations():
    tasks = small()
    at, weights = tasks.at, tasks.posterior.weights
    sums = at.sums(tasks.functions.mean, tasks.functions.var)
    parts = tasks.functions.mean, tasks.functions.var, weights.mean, weights.slab_moments[1]
    phi, var, W, second, Z, Y = map(np.asarray, (*parts, at.relative, at.Y))
    assert Z.shape == Y.shape
    np.testing.assert_allclose(sums.G, np.einsum("nq,mn,kn->qmk", Z, phi, phi), atol=1e-12)
    np.testing.assert_allclose(sums.c, np.einsum("nq,mn->qm", Z, var), atol=1e-12)
    np.testing.assert_allclose(sums.b, np.einsum("nq,nq,mn->qm", Z, Y, phi), atol=1e-12)
    # the expectation of the square, from the moments of each product of weight and function
    spread = second @ (phi**2 + var) - W**2 @ phi**2
    squares = np.sum(Z * ((Y - (W @ phi).T) ** 2 + spread.T), axis=0)
    np.testing.assert_allclose(sums.squares(weights), squares)
    power = np.einsum("nq,qm,mn->m", Z / np.asarray(at.sigma2), W**2, phi**2)
    np.testing.assert_allclose(
        explained(at, jnp.diagonal(sums.G, axis1=1, axis2=2), weights), power
    )


def test_tasks_that_weigh_alike_share_a_matrix_however_large(monkeypatch):
    tasks, results = small(), []
    for size in (1, Q):
        at = tasks.at._replace(relative=jnp.ones_like(tasks.at.relative[:, :size]))
        features = tasks.functions.mean, tasks.functions.var
        sums = at.sums(*features)
        assert sums.G.shape[0] == size
        results.append(at.sweep(features, tasks.posterior.weights, Expectation(), sums))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), *results)
    monkeypatch.setattr("numpyro_spikeslab.reading.form.GRAM_LIMIT", 0)
    form = tasks.engine.form
    assert not form.keeps_products and replace(form, complete=True).keeps_products
