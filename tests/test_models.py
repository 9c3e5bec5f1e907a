# SPDX-License-Identifier: Apache-2.0
"""Priors of kernel parameters, in latent functions and in the ready-made model."""

from itertools import product

import numpy as np
import pytest
from refusals import refusals
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
from numpyro.infer import Predictive
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.kernel_priors import length_scale_prior

X = np.linspace(0.0, 1.0, 4)
EQUAL = [kernels.ExpSquared(2.0)] * 3
DIFFERENT = [kernels.ExpSquared(2.0), kernels.RationalQuadratic(3.0, alpha=1.0)]


def trace(functions, priors=None, x=X):
    model = handlers.trace(handlers.seed(nss.latent_functions, random.key(0)))
    return model.get_trace("phi", functions, x, priors=priors)


BOX = np.array([1.0, 2.0, 3.0, 0.0])


@pytest.mark.parametrize(
    ("x", "shortest", "longest"),
    [
        (np.linspace(-3.0, 7.0, 30), 10 / 29, 10.0),
        (365.25 * np.linspace(-3.0, 7.0, 201), 365.25 * 10 / 200, 3652.5),
        (np.linspace(-3.0, 7.0, 5000), 10 / 4999, 10.0),
        (np.stack([BOX * 0, BOX, *BOX * np.random.default_rng(0).random((298, 4))]), None, 14**0.5),
    ],
)
def test_length_scales_lie_between_the_spacing_and_the_extent_of_the_inputs(x, shortest, longest):
    """In several dimensions, between a tenth of the extent and the extent."""
    draws = np.asarray(length_scale_prior(x).sample(random.key(1), (20_000,)))
    error = np.sqrt(0.05 * 0.95 / draws.size)
    assert abs(np.mean(draws < (shortest or longest / 10)) - 0.01) < 4 * error
    assert abs(np.mean(draws > longest) - 0.05) < 4 * error


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
    length, other = length_scale_prior(X).log_prob(0.5), stats.lognorm(2.0, scale=3.0).logpdf(0.5)
    assert {f"phi_{name}" for name in lengths} <= sites.keys()
    for name in sites.keys() - {"phi", "latent"}:
        expected = length if name.removeprefix("phi_") in lengths else other
        np.testing.assert_allclose(sites[name]["fn"].log_prob(0.5), expected, rtol=1e-5)


def test_inputs_without_an_extent_have_a_proper_prior():
    for x in (np.array([0.3]), np.full(4, 0.3)):
        prior = trace([kernels.ExpSquared(2.0)], x=x)["phi_scale"]["fn"]
        assert np.all(np.isfinite(prior.log_prob(jnp.array([0.1, 10.0]))))


def test_fits_start_at_the_kernels_values():
    model = nss.models.mtmkl([k * kernels.ExpSquared(k) for k in (0.5, 2.0)], num_tasks=3)
    Y = np.random.default_rng(0).standard_normal((len(X), 3))
    with handlers.seed(rng_seed=0):
        values = handlers.trace(nss.PairedGuide(model)).get_trace(X, Y)
    values = {name: site["value"] for name, site in values.items()}
    np.testing.assert_allclose(values["phi_kernel2_scale_auto_loc"], [0.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(values["phi_kernel1_value_auto_loc"], [0.5, 2.0], rtol=1e-6)


RATES = np.array([1.0, 2.0, 3.0])
PAIR = [2.0 * kernels.ExpSquared(1.0)] * 2
PRIORS = {
    "by its path": (
        EQUAL,
        {"scale": dist.InverseGamma(3.0, 1.0)},
        {"scale": stats.invgamma(3.0)},
    ),
    "an entry for each function": (
        EQUAL,
        {"scale": dist.Gamma(2.0, RATES)},
        {"scale": stats.gamma(2.0, scale=1 / RATES)},
    ),
    "a transformed distribution": (
        EQUAL,
        {"scale": dist.TransformedDistribution(dist.Normal(), bijections.ExpTransform())},
        {"scale": stats.lognorm(1.0)},
    ),
    "an interval": (EQUAL, {"scale": dist.Uniform(0.1, 2.0)}, {"scale": stats.uniform(0.1, 1.9)}),
    "others have the default": (
        PAIR,
        {"kernel2_scale": dist.HalfNormal(1.0)},
        {"kernel1_value": stats.lognorm(2.0, scale=2.0), "kernel2_scale": stats.halfnorm},
    ),
    "numbered sites": (
        DIFFERENT,
        {"scale": dist.HalfNormal(1.0), "1_scale": dist.Exponential(2.0)},
        {"0_scale": stats.halfnorm, "1_scale": stats.expon(scale=0.5)},
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_a_parameter_has_the_prior_of_its_path(x64, name):
    functions, priors, expected = PRIORS[name]
    model = nss.models.mtmkl(functions, num_tasks=2, priors=priors)
    of_model = handlers.trace(handlers.seed(model, 0)).get_trace(X)
    for sites, (path, prior) in product((trace(functions, priors), of_model), expected.items()):
        density = sites[f"phi_{path}"]["fn"].log_prob(0.7)
        logpdf = np.broadcast_to(prior.logpdf(0.7), density.shape)
        np.testing.assert_allclose(density, logpdf, rtol=1e-5)


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
    density = site["fn"].log_prob(jnp.full((3, 2), 0.7))
    np.testing.assert_allclose(density, np.full(3, 2 * stats.gamma(2.0).logpdf(0.7)), rtol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "priors", "message"),
    [
        (EQUAL, {"length": dist.HalfNormal()}, r"got \['length'\], .* kernels, \['scale'\]"),
        (EQUAL, {"0_scale": dist.HalfNormal()}, r"kernels, \['scale'\]"),
        (["white"] * 2, {"scale": dist.HalfNormal()}, r"kernels, \[\]"),
        (EQUAL, {"scale": dist.Normal()}, "'scale'.*got Normal, .*positive numbers.*LogNormal"),
        (EQUAL, {"scale": dist.Uniform(-1.0, 1.0)}, "positive numbers"),
        (EQUAL, {"scale": dist.Poisson(2.0)}, "positive numbers"),
        (EQUAL, {"scale": dist.Gamma(2.0, np.ones(2))}, r"\(2,\), .*the site's shape \(3,\)"),
        (EQUAL, {"scale": dist.Gamma(2.0, np.ones(3)).to_event(1)}, "the site's shape"),
        (EQUAL, {"scale": 2.0}, "got float, .*distribution of NumPyro.*condition on its"),
    ],
)
def test_priors_that_do_not_fit_are_refused(unchecked_types, kernel, priors, message):
    with pytest.raises(ValueError, match=rf"latent_functions\('phi'\): .*{message}"):
        trace(kernel, priors)


def test_a_prior_may_depend_on_a_latent_site():
    def model():
        rate = numpyro.sample("rate", dist.HalfNormal(1.0))
        nss.latent_functions("phi", EQUAL, X, priors={"scale": dist.Exponential(rate)})

    values = {"rate": 2.0, "phi_scale": np.ones(3), "phi": np.zeros((3, 4))}
    one, _ = log_density(model, (), {}, values)
    other, _ = log_density(model, (), {}, {**values, "rate": 3.0})
    expected = 3 * (np.log(2 / 3) + 1) + stats.halfnorm.logpdf([2.0, 3.0]) @ [1, -1]
    np.testing.assert_allclose(one - other, expected, rtol=1e-3)


# Factor analysis


@pytest.mark.parametrize("shared", [False, True])
def test_factor_analysis_is_the_model_of_white_functions(shared):
    Y = np.random.default_rng(0).standard_normal((6, 3))
    Y[1, 2] = np.nan
    mask = np.ones((6, 3), bool)
    mask[4, 0] = False
    priors = {
        "noise": dist.HalfNormal(0.5),
        "slab_scale": dist.HalfNormal(2.0),
        "inclusion": dist.Beta(1.0, 3.0),
    }
    options = {"priors": priors, "shared_inclusion": False, "shared_noise": shared}
    model = nss.models.factor_analysis(2, **options)
    whole = nss.models.mtmkl(["white"] * 2, **options)
    sites = handlers.trace(handlers.seed(model, random.key(1))).get_trace(Y, mask=mask)
    values = {k: x["value"] for k, x in sites.items() if x["type"] == "sample"}
    for wrong in (mask.T, mask[0], mask.astype(float)):
        message = r"mask: got .* expected boolean of the shape \(6, 3\) of Y"
        with pytest.raises(ValueError, match=message):
            log_density(model, (Y,), {"mask": wrong}, values)
    density, _ = log_density(model, (Y,), {"mask": mask.tolist()}, values)
    expected, _ = log_density(whole, (np.linspace(0, 1, 6), Y), {"mask": mask}, values)
    np.testing.assert_allclose(density, expected, rtol=1e-6)
    # the density of the observed entries, from its definition
    noise = np.broadcast_to(values["noise"], 3)
    W = np.where(values["W_spike"], values["W_slab"], 0)
    logs = stats.norm((W @ values["phi"]).T, noise).logpdf(Y)
    prior, _ = log_density(model, (Y,), {"mask": np.zeros_like(mask)}, values)
    np.testing.assert_allclose(density - prior, np.sum(logs[mask & ~np.isnan(Y)]), rtol=1e-4)


def test_a_buffet_prior_has_the_numbers_of_functions_of_its_process():
    """Exact Binomials, of the functions in use and of those of one task."""
    alpha, M, Q, size = 2.0, 12, 20, 4000
    model = nss.models.factor_analysis(M, buffet=alpha)
    prior = Predictive(model, num_samples=size, return_sites=["W_spike"])
    spikes = np.asarray(prior(random.key(0), np.zeros((1, Q)))["W_spike"])
    a, tasks = alpha / M, np.arange(1, Q + 1)
    in_use = 1 - np.prod(tasks / (tasks + a))
    numbers = (in_use, spikes.any(1).sum(1)), (a / (1 + a), spikes[:, 0].sum(1))
    for probability, draws in numbers:
        law = stats.binom(M, probability)
        low, high = (int(x) for x in law.ppf([0.01, 0.99]))
        counts = np.bincount(np.clip(draws, low, high), minlength=high + 1)[low:]
        expected = size * np.diff([0.0, *law.cdf(np.arange(low, high)), 1.0])
        # a false alarm in 1 of 1000 keys
        assert stats.chisquare(counts, expected).pvalue > 1e-3


def factors(Y):
    handlers.seed(nss.models.factor_analysis(2), 0)(Y)


def tasks(*args):
    handlers.seed(nss.models.mtmkl(["white"]), 0)(*args)


MASKED, SPARSE = np.ma.masked_less(np.ones((5, 3)), 0.0), coo_array(np.ones(3))
REFUSED = {
    "one axis": (lambda: factors(np.ones(5)), r"Y: got shape \(5,\), expected \(N, Q\)"),
    "masked": (lambda: factors(MASKED), r"masked array.*`Y.filled\(np.nan\)`"),
    "no function": (lambda: nss.models.factor_analysis(0), "at least one function"),
    "sparse": (lambda: tasks(np.arange(3.0), SPARSE), r"sparse array of shape \(3,\), .*reshape"),
    "no tasks": (lambda: tasks(np.arange(3.0)), "num_tasks"),
    "shape": (lambda: tasks(np.arange(3.0), np.ones((2, 2))), "shape"),
    "no concentration": (lambda: nss.models.factor_analysis(2, buffet=-1.0), "got -1.0, expected"),
    "two priors": (
        lambda: nss.models.factor_analysis(2, buffet=1.0, priors={"inclusion": dist.Uniform()}),
        "a prior beside buffet, expected none",
    ),
    "kernel": (lambda: nss.models.mtmkl(kernels.ExpSquared(1.0)), r"a list, .*\[kernel\] \* M"),
}
test_what_is_no_table_of_tasks_is_refused = refusals(REFUSED)
