# SPDX-License-Identifier: Apache-2.0
"""The bound against dense expectations; sites with a role go to their maxima."""

from fits import same
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
        d = mean[block] - np.asarray(tasks.data.mean[m])
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


# each takes a reading and a bound
OTHERS = [
    pytest.param(x, marks=pytest.mark.exhaustive) for x in ("flat", "shared", "own inclusion")
]


@pytest.mark.parametrize("prior", ["weak", *OTHERS])
def test_sites_with_a_role_are_stationary(prior):
    tasks = small(prior)
    squares = tasks.data.features.squares(tasks.spec, tasks.data, tasks.at, tasks.posterior)
    posterior = with_modes(tasks.spec, tasks.data, tasks.at, tasks.posterior, squares)
    sites = {role.site for role in tasks.spec.form.roles}
    assert sites == {"noise", "inclusion", "slab_scale"}
    for site in sites:
        value = posterior.values[site]
        for where in np.ndindex(value.shape):

            def moved(e, site=site, value=value, where=where):
                new = posterior.values | {site: value.at[where].add(e)}
                return tasks.bound(posterior._replace(values=new))

            assert abs(slope(moved, 1e-5)) < 1e-3, (site, where)
            assert moved(0.0) > max(moved(0.05 * value[where]), moved(-0.05 * value[where]))


@pytest.mark.slow
def test_a_view_at_other_values_of_roles_is_that_of_the_model():
    tasks = small()
    values = {k: 0.5 * x for k, x in tasks.posterior.values.items()}
    new = with_roles(tasks.spec, tasks.data, tasks.at, values)
    expected = tasks.reading.view(values)
    # all tasks have the same prior, of which a fit keeps one row
    assert new.prior.log_odds.shape == (1, tasks.spec.form.num_features)
    prior = jax.tree.map(lambda x: np.broadcast_to(x, tasks.spec.form.shape), new.prior)
    same(new._replace(prior=prior, priors={}), expected._replace(priors={}))
