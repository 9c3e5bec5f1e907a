# SPDX-License-Identifier: Apache-2.0
"""Log densities with short log gamma functions against those of NumPyro."""

import numpy as np
import pytest
from scipy.special import gammaln, psi

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.log_gamma import log_gamma, with_short_gammas

DENSITIES = {
    "beta": (dist.Beta(0.5, 9.0), [0.01, 0.4, 1.0]),
    "inverse gamma": (dist.InverseGamma(2.5, 0.3), [0.01, 1.0, 30.0]),
    "gamma": (dist.Gamma(jnp.array([0.1, 4.0, 50.0]), 2.0), [0.01, 1.0, 30.0]),
    "half t": (dist.TruncatedDistribution(dist.StudentT(3.0), low=0.0), [0.01, 1.0, 30.0]),
    "dirichlet": (dist.Dirichlet(jnp.array([0.3, 2.0, 4.0])), [0.2, 0.5, 0.3]),
    "counts": (dist.NegativeBinomial2(3.0, 0.7), [0, 4, 100]),
    "masked": (dist.Beta(2.0, 3.0).expand([3]).mask(jnp.array([1, 0, 1]) > 0), [0.1, 0.2, 0.3]),
}


def test_log_gamma_and_its_derivative(precision):
    x = jnp.asarray(np.concatenate([np.logspace(-6, 6, 400), [1.0, 2.0, 8.0]]))
    exact = np.asarray(x, float)
    rtol = {"float32": 1e-5, "float64": 1e-13}[precision]
    np.testing.assert_allclose(log_gamma(x), gammaln(exact), rtol=rtol, atol=10 * rtol)
    slope = jax.vmap(jax.grad(log_gamma))(x)
    np.testing.assert_allclose(slope, psi(exact), rtol=rtol, atol=10 * rtol)


@pytest.mark.parametrize("name", DENSITIES)
def test_densities_are_numpyros(precision, name):
    prior, x = DENSITIES[name]
    x = jnp.asarray(x)
    short = with_short_gammas(prior.log_prob)
    assert "lgamma" in str(jax.make_jaxpr(prior.log_prob)(x))
    assert "lgamma" not in str(jax.make_jaxpr(short)(x))
    np.testing.assert_allclose(short(x), prior.log_prob(x), rtol=2e-5, atol=1e-5)
