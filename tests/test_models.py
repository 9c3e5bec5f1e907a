# SPDX-License-Identifier: Apache-2.0
"""Priors of kernel parameters, in latent functions and in the ready-made model."""

import numpy as np
import pytest
from scipy import stats
from scipy.sparse import coo_array
from tinygp import kernels, transforms
from tinygp.kernels import quasisep

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.distributions import transforms as bijections
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss
from numpyro_spikeslab.kernel_priors import length_scale_prior

X = np.linspace(0.0, 1.0, 4)
ALIKE = [kernels.ExpSquared(2.0)] * 3
DIFFERENT = [kernels.ExpSquared(2.0), kernels.RationalQuadratic(3.0, alpha=1.0)]


def trace(every, priors=None, x=X):
    model = lambda: nss.latent_functions("phi", every, x, priors=priors)  # noqa: E731
    return handlers.trace(handlers.seed(model, random.key(0))).get_trace()


def tails(prior, low, high):
    """Shares of the draws below and above, and their standard error where they are 5%."""
    draws = np.asarray(prior.sample(random.key(1), (20_000,)))
    return np.mean(draws < low), np.mean(draws > high), np.sqrt(0.05 * 0.95 / draws.size)


@pytest.mark.parametrize("num", [30, 201, 5000])
@pytest.mark.parametrize("unit", [1.0, 365.25])
def test_length_scales_lie_between_the_spacing_and_the_extent_of_the_inputs(num, unit):
    x = unit * np.linspace(-3.0, 7.0, num)
    prior = length_scale_prior(x)
    below, above, error = tails(prior, unit * 10 / (num - 1), unit * 10)
    assert abs(below - 0.01) < 4 * error and abs(above - 0.05) < 4 * error


def test_inputs_of_several_dimensions_have_one_extent():
    x = np.random.default_rng(0).uniform(0.0, 2.0, (300, 4)) * np.array([1.0, 2.0, 3.0, 0.0])
    prior = length_scale_prior(x)
    extent = np.linalg.norm(np.ptp(x, axis=0))
    below, above, error = tails(prior, extent / 10, extent)
    assert abs(below - 0.01) < 4 * error and abs(above - 0.05) < 4 * error


def lognormal(median):
    return stats.lognorm(2.0, scale=median).logpdf(0.5)


@pytest.mark.parametrize(
    ("kernel", "lengths"),
    [
        (
            kernels.ExpSquared(3.0) + 3.0 * kernels.Matern52(3.0),
            {"kernel1_scale", "kernel2_kernel2_scale"},
        ),
        (kernels.RationalQuadratic(3.0, alpha=3.0), {"scale"}),
        (quasisep.Matern32(3.0, 3.0), {"scale"}),
        (3.0 * quasisep.Exp(3.0, 3.0), {"kernel_scale"}),
        (kernels.Polynomial(2, 3.0, 3.0), set()),
        (transforms.Linear(3.0, kernels.ExpSquared(3.0)), set()),
        (kernels.DotProduct() * 3.0, set()),
    ],
)
def test_other_parameters_have_the_kernels_value_as_their_median(kernel, lengths):
    sites = trace([kernel], x=X[:, None])
    found = {
        name.removeprefix("phi_")
        for name, site in sites.items()
        if name.startswith("phi_") and isinstance(site["fn"].base_dist, dist.InverseGamma)
    }
    assert found == lengths
    expected = length_scale_prior(X)
    for name in found:
        prior = sites[f"phi_{name}"]["fn"]
        np.testing.assert_allclose(prior.log_prob(0.5), expected.log_prob(0.5), rtol=1e-6)
    for name in set(sites) - {f"phi_{x}" for x in lengths} - {"phi", "latent"}:
        np.testing.assert_allclose(sites[name]["fn"].log_prob(0.5), lognormal(3.0), rtol=1e-5)


@pytest.mark.parametrize("x", [np.array([0.3]), np.full(4, 0.3)], ids=["one input", "no extent"])
def test_inputs_without_an_extent_have_a_proper_prior(x):
    prior = trace([kernels.ExpSquared(2.0)], x=x)["phi_scale"]["fn"]
    assert np.all(np.isfinite(prior.log_prob(jnp.array([0.1, 10.0]))))


@pytest.mark.slow
def test_fits_start_at_the_kernels_values():
    model = nss.models.mtmkl([k * kernels.ExpSquared(k) for k in (0.5, 2.0)], num_tasks=3)
    Y = np.random.default_rng(0).standard_normal((len(X), 3))
    with handlers.seed(rng_seed=0):
        values = handlers.trace(nss.PairedGuide(model)).get_trace(X, Y)
    values = {name: site["value"] for name, site in values.items()}
    np.testing.assert_allclose(values["phi_kernel2_scale_auto_loc"], [0.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(values["phi_kernel1_value_auto_loc"], [0.5, 2.0], rtol=1e-6)


def test_a_prior_by_the_path_of_its_parameter(x64):
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
    np.testing.assert_allclose(value, lognormal(2.0), rtol=1e-5)
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
    ("kernel", "priors", "message"),
    [
        (ALIKE, {"length": dist.HalfNormal()}, r"got \['length'\], .* kernels, \['scale'\]"),
        (ALIKE, {"0_scale": dist.HalfNormal()}, r"kernels, \['scale'\]"),
        (["white"] * 2, {"scale": dist.HalfNormal()}, r"kernels, \[\]"),
        (ALIKE, {"scale": dist.Normal()}, "'scale'.*got Normal, .*positive numbers.*LogNormal"),
        (ALIKE, {"scale": dist.Uniform(-1.0, 1.0)}, "positive numbers"),
        (ALIKE, {"scale": dist.Poisson(2.0)}, "positive numbers"),
        (ALIKE, {"scale": dist.Gamma(2.0, np.ones(2))}, r"\(2,\), .*the site's shape \(3,\)"),
        (ALIKE, {"scale": dist.Gamma(2.0, np.ones(3)).to_event(1)}, "the site's shape"),
        (ALIKE, {"scale": 2.0}, "got float, .*distribution of NumPyro.*condition on its"),
    ],
)
def test_priors_that_do_not_fit_are_refused(unchecked_types, kernel, priors, message):
    with pytest.raises(ValueError, match=rf"latent_functions\('phi'\): .*{message}"):
        trace(kernel, priors)


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


# Factor analysis


@pytest.mark.parametrize(
    ("make", "shared"), [(nss.models.factor_analysis, False), (nss.models.probabilistic_pca, True)]
)
def test_factor_analysis_is_the_model_of_white_functions(make, shared):
    Y = np.random.default_rng(0).standard_normal((6, 3))
    Y[1, 2] = np.nan
    seen = np.ones((6, 3), bool)
    seen[4, 0] = False
    priors = {
        "noise": dist.HalfNormal(0.5),
        "slab_scale": dist.HalfNormal(2.0),
        "inclusion": dist.Beta(1.0, 3.0),
    }
    options = {"priors": priors, "shared_inclusion": False}
    model = make(2, **options)
    whole = nss.models.mtmkl(["white"] * 2, shared_noise=shared, **options)
    sites = handlers.trace(handlers.seed(model, random.key(1))).get_trace(Y, mask=seen)
    values = {k: x["value"] for k, x in sites.items() if x["type"] == "sample"}
    for wrong in (seen.T, seen[0], seen.astype(float)):
        with pytest.raises(
            ValueError, match=r"mask: got .* expected boolean of the shape \(6, 3\) of Y"
        ):
            log_density(model, (Y,), {"mask": wrong}, values)
    of_list, _ = log_density(model, (Y,), {"mask": seen.tolist()}, values)
    found, _ = log_density(model, (Y,), {"mask": seen}, values)
    assert of_list == found
    expected, _ = log_density(whole, (np.linspace(0, 1, 6), Y), {"mask": seen}, values)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # the density of what is seen, from its definition
    noise = np.broadcast_to(values["noise"], 3)
    W = np.where(values["W_spike"], values["W_slab"], 0)
    logs = stats.norm((W @ values["phi"]).T, noise).logpdf(Y)
    masked, _ = log_density(model, (Y,), {"mask": np.zeros_like(seen)}, values)
    kept = seen & ~np.isnan(Y)
    np.testing.assert_allclose(found - masked, np.sum(logs[kept]), rtol=1e-4)


@pytest.mark.parametrize("make", [nss.models.factor_analysis, nss.models.probabilistic_pca])
def test_factor_analysis_refuses_what_is_no_table(make):
    with pytest.raises(ValueError, match=r"Y: got shape \(5,\), expected \(N, Q\)"):
        handlers.seed(make(2), 0)(np.ones(5))
    with pytest.raises(ValueError, match=r"masked array.*`Y.filled\(np.nan\)`"):
        handlers.seed(make(2), 0)(np.ma.masked_less(np.ones((5, 3)), 0.0))
    with pytest.raises(ValueError, match="at least one function"):
        make(0)


def test_a_sparse_array_of_one_axis_is_refused():
    model = handlers.seed(nss.models.mtmkl(["white"]), 0)
    with pytest.raises(
        ValueError, match=r"sparse array of shape \(3,\), expected \(N, Q\).*reshape"
    ):
        model(np.arange(3.0), coo_array(np.ones(3)))
