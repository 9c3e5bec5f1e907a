# SPDX-License-Identifier: Apache-2.0
"""The bound against dense expectations; sites with a role go to their maxima."""

import numpy as np
import pytest
from scipy import stats
from task_problems import dense_moments, observations, slope, small

import jax
import jax.numpy as jnp

from numpyro_spikeslab.fitting.posterior import with_modes, with_roles
from numpyro_spikeslab.kernel_priors import length_scale_prior

pytestmark = pytest.mark.usefixtures("x64")


def test_the_bound_agrees_with_dense_expectations():
    found = small()
    at, functions, (g, loc, scale) = found.at, found.functions, found.posterior.weights
    values = {name: np.asarray(x) for name, x in found.posterior.values.items()}
    M, N = functions.mean.shape
    P, linear = dense_moments(found, at)
    mean = np.asarray(functions.mean).ravel()
    second = np.outer(mean, mean)
    kl = 0.0
    for m in range(M):
        block = slice(m * N, (m + 1) * N)
        K = found.covariance(m)
        a = np.sqrt(np.asarray(functions.alpha[m]))
        B = np.eye(N) + a[:, None] * K * a
        S = K - (K * a) @ np.linalg.solve(B, a[:, None] * K)
        second[block, block] += S
        d = mean[block] - np.asarray(found.data.mean[m])
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
    np.testing.assert_allclose(found.bound(found.posterior), expected, rtol=1e-6)


# the others take a reading and a bound each
@pytest.mark.parametrize(
    "prior",
    [
        "weak",
        *(
            pytest.param(x, marks=pytest.mark.exhaustive)
            for x in ("flat", "shared", "own inclusion")
        ),
    ],
)
def test_sites_with_a_role_are_stationary(prior):
    found = small(prior)
    squares = found.data.features.squares(found.spec, found.data, found.at, found.posterior)
    posterior = with_modes(found.spec, found.data, found.at, found.posterior, squares)
    sites = {role.site for role in found.spec.form.roles}
    assert sites == {"noise", "inclusion", "slab_scale"}
    for site in sites:
        value = posterior.values[site]
        for where in np.ndindex(value.shape):

            def moved(e, site=site, value=value, where=where):
                new = posterior.values | {site: value.at[where].add(e)}
                return found.bound(posterior._replace(values=new))

            assert abs(slope(moved, 1e-5)) < 1e-3, (site, where)
            assert moved(0.0) > max(moved(0.05 * value[where]), moved(-0.05 * value[where]))


@pytest.mark.slow
def test_a_view_at_other_values_of_roles_is_that_of_the_model():
    found = small()
    values = {k: 0.5 * x for k, x in found.posterior.values.items()}
    new = with_roles(found.spec, found.data, found.at, values)
    expected = found.reading.view(values)
    # all tasks have the same prior, of which a fit keeps one row
    assert new.prior.log_odds.shape == (1, found.spec.form.num_features)
    every = jax.tree.map(lambda x: np.broadcast_to(x, found.spec.form.shape), new.prior)
    new = new._replace(prior=every)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12),
        new._replace(priors={}),
        expected._replace(priors={}),
    )
