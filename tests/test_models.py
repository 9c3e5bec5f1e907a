# SPDX-License-Identifier: Apache-2.0
"""Priors of kernel parameters, in latent functions and in the ready-made model."""

import numpy as np
import pytest
from scipy import stats
from tinygp import kernels, transforms

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import transforms as bijections
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss

X = np.linspace(0.0, 1.0, 4)
ALIKE = [kernels.ExpSquared(2.0)] * 3
DIFFERENT = [kernels.ExpSquared(2.0), kernels.RationalQuadratic(3.0, alpha=1.0)]


def trace(every, priors=None, x=X):
    model = lambda: nss.latent_functions("phi", every, x, priors=priors)  # noqa: E731
    return handlers.trace(handlers.seed(model, random.key(0))).get_trace()


def test_the_default_prior_has_the_kernels_value_as_its_median():
    site = trace(ALIKE)["phi_scale"]
    values = np.array([0.5, 2.0, 7.0])
    np.testing.assert_allclose(
        site["fn"].log_prob(values), stats.lognorm(2.0, scale=2.0).logpdf(values), rtol=1e-5
    )


def test_a_prior_by_the_path_of_its_parameter():
    sites = trace(ALIKE, {"scale": dist.InverseGamma(3.0, 1.0)})
    values = np.array([0.5, 1.0, 2.0])
    np.testing.assert_allclose(
        sites["phi_scale"]["fn"].log_prob(values), stats.invgamma(3.0).logpdf(values), rtol=1e-5
    )
    assert sites["phi_scale"]["value"].shape == (3,)


def test_a_prior_may_have_an_entry_for_each_function():
    rates = np.array([1.0, 2.0, 3.0])
    site = trace(ALIKE, {"scale": dist.Gamma(2.0, rates)})["phi_scale"]
    expected = stats.gamma(2.0, scale=1 / rates).logpdf(0.7)
    np.testing.assert_allclose(site["fn"].log_prob(jnp.full(3, 0.7)), expected, rtol=1e-5)


def test_parameters_without_a_prior_keep_the_default():
    sites = trace([2.0 * kernels.ExpSquared(1.0)] * 2, {"kernel2_scale": dist.HalfNormal(1.0)})
    value, scale = (
        sites[f"phi_{path}"]["fn"].log_prob(0.5) for path in ("kernel1_value", "kernel2_scale")
    )
    np.testing.assert_allclose(value, stats.lognorm(2.0, scale=2.0).logpdf(0.5), rtol=1e-5)
    np.testing.assert_allclose(scale, stats.halfnorm.logpdf(0.5), rtol=1e-5)


def test_numbered_sites_take_the_prior_of_the_path_or_their_own():
    priors = {"scale": dist.HalfNormal(1.0), "1_scale": dist.Exponential(2.0)}
    sites = trace(DIFFERENT, priors)
    assert {"phi_0_scale", "phi_1_scale", "phi_1_alpha"} <= set(sites)
    first, second = (sites[f"phi_{m}_scale"]["fn"].log_prob(0.5) for m in (0, 1))
    np.testing.assert_allclose(first, stats.halfnorm.logpdf(0.5), rtol=1e-5)
    np.testing.assert_allclose(second, stats.expon(scale=0.5).logpdf(0.5), rtol=1e-5)


@pytest.mark.parametrize(
    "prior",
    [
        dist.Gamma(2.0, 1.0),
        dist.Gamma(2.0, np.ones(2)),
        dist.Gamma(2.0, np.ones((3, 1))),
        dist.Gamma(2.0, np.ones(2)).to_event(1),
    ],
)
def test_arrays_of_parameters_are_events(prior):
    kernel = transforms.Linear(jnp.array([1.0, 2.0]), kernels.ExpSquared())
    site = trace([kernel] * 3, {"scale": prior}, np.ones((4, 2)))["phi_scale"]
    assert site["value"].shape == (3, 2)
    assert (site["fn"].batch_shape, site["fn"].event_shape) == ((3,), (2,))
    expected = 2 * stats.gamma(2.0).logpdf(0.7)
    np.testing.assert_allclose(
        site["fn"].log_prob(jnp.full((3, 2), 0.7)), np.full(3, expected), rtol=1e-5
    )


@pytest.mark.parametrize(
    "prior",
    [
        dist.Uniform(0.1, 2.0),
        dist.TruncatedNormal(0.0, 1.0, low=0.0),
        dist.TransformedDistribution(dist.Normal(), bijections.ExpTransform()),
        dist.LogNormal(0.0, jnp.ones(3)),
    ],
)
def test_priors_of_positive_numbers_are_taken(prior):
    assert np.all(trace(ALIKE, {"scale": prior})["phi_scale"]["value"] > 0)


@pytest.mark.parametrize(
    ("priors", "message"),
    [
        ({"length": dist.HalfNormal()}, r"has \['length'\], .*Known are \['scale'\]"),
        ({"0_scale": dist.HalfNormal()}, r"Known are \['scale'\]"),
        ({"scale": dist.Normal()}, "'scale', Normal, is not on the positive numbers.*LogNormal"),
        ({"scale": dist.Uniform(-1.0, 1.0)}, "not on the positive numbers"),
        ({"scale": dist.Poisson(2.0)}, "not on the positive numbers"),
        ({"scale": dist.Gamma(2.0, np.ones(2))}, r"shape \(2,\), .*the site's shape \(3,\)"),
        ({"scale": dist.Gamma(2.0, np.ones(3)).to_event(1)}, "does not fit"),
    ],
)
def test_priors_that_do_not_fit_are_refused(priors, message):
    with pytest.raises(ValueError, match=rf"latent_functions\('phi'\): .*{message}"):
        trace(ALIKE, priors)


def test_values_are_no_priors(unchecked_types):
    with pytest.raises(ValueError, match=r"distribution of NumPyro, got float.*condition on its"):
        trace(ALIKE, {"scale": 2.0})


def test_functions_without_parameters_take_no_priors():
    with pytest.raises(ValueError, match=r"Known are \[\]"):
        trace(["white"] * 2, {"scale": dist.HalfNormal()})


def test_a_prior_may_depend_on_a_latent_site():
    def model():
        rate = numpyro.sample("rate", dist.HalfNormal(1.0))
        nss.latent_functions("phi", ALIKE, X, priors={"scale": dist.Exponential(rate)})

    values = {"rate": 2.0, "phi_scale": np.ones(3), "phi": np.zeros((3, 4))}
    held = handlers.condition(model, {"phi": values["phi"]})
    one, _ = log_density(held, (), {}, values)
    other, _ = log_density(held, (), {}, {**values, "rate": 3.0})
    expected = 3 * (np.log(2 / 3) + 1) + stats.halfnorm.logpdf([2.0, 3.0]) @ [1, -1]
    np.testing.assert_allclose(one - other, expected, rtol=1e-3)


def test_mtmkl_hands_priors_on():
    model = nss.models.mtmkl(ALIKE, num_tasks=2, priors={"scale": dist.InverseGamma(3.0, 1.0)})
    site = handlers.trace(handlers.seed(model, 0)).get_trace(X)["phi_scale"]
    np.testing.assert_allclose(
        site["fn"].log_prob(np.ones(3)), stats.invgamma(3.0).logpdf(np.ones(3)), rtol=1e-5
    )
