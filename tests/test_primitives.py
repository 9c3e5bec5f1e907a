# SPDX-License-Identifier: Apache-2.0
"""The prior as a primitive, and as a distribution."""

import pickle
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss
from numpyro_spikeslab.primitives import MARK

# spike_slab


def trace(model: Any, *args: Any) -> dict[str, Any]:
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args)


def two_plates(inclusion: Any = 0.3, scale: Any = 2.0) -> Any:
    with numpyro.plate("task", 4, dim=-2), numpyro.plate("feature", 5, dim=-1):
        return nss.spike_slab("w", inclusion, scale)


def test_sites_and_marks():
    def model():
        numpyro.deterministic("copy", two_plates())

    sites = trace(model)
    spike, slab, w = (sites[name] for name in ("w_spike", "w_slab", "w"))
    assert set(sites) == {"task", "feature", "w_spike", "w_slab", "w", "copy"}
    assert [site["type"] for site in (spike, slab, w)] == ["sample", "sample", "deterministic"]
    assert [site["value"].shape for site in (spike, slab, w)] == [(4, 5)] * 3
    np.testing.assert_array_equal(w["value"], spike["value"] * slab["value"])
    np.testing.assert_array_equal(w["value"], sites["copy"]["value"])
    np.testing.assert_allclose(spike["fn"].mean, np.full((4, 5), 0.3), rtol=1e-6)
    np.testing.assert_allclose(slab["fn"].variance, np.full((4, 5), 4.0), rtol=1e-6)
    assert (spike["infer"][MARK], slab["infer"][MARK]) == (("w", "spike"), ("w", "slab"))
    assert nss.paired_sites(sites) == ("w_spike", "w_slab")
    assert not np.signbit(w["value"][w["value"] == 0.0]).any()


@pytest.mark.parametrize(
    ("inclusion", "scale", "shape"),
    [
        (0.3, 2.0, ()),
        (0.3, np.ones(3), (3,)),
        (np.full((4, 1), 0.3), np.linspace(1.0, 2.0, 3), (4, 3)),
    ],
)
def test_without_plates_there_is_one_pair_for_each_entry(inclusion, scale, shape):
    def model():
        return nss.spike_slab("w", inclusion, scale)

    sites = trace(model)
    assert [sites[name]["value"].shape for name in ("w_spike", "w_slab", "w")] == [shape] * 3
    rng = np.random.default_rng(0)
    spikes, slabs = rng.integers(0, 2, shape), rng.normal(size=shape)
    value, _ = log_density(model, (), {}, {"w_spike": spikes, "w_slab": slabs})
    p, s = np.broadcast_to(inclusion, shape), np.broadcast_to(scale, shape)
    expected = np.where(spikes, np.log(p), np.log1p(-p)) + stats.norm.logpdf(slabs, 0.0, s)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)


def test_arguments_add_dimensions_to_plates_and_may_be_latent():
    def model():
        inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 2.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([3]))
        with numpyro.plate("task", 4, dim=-2):
            nss.spike_slab("w", inclusion, scale)

    sites = trace(model)
    assert [sites[name]["value"].shape for name in ("w_spike", "w_slab", "w")] == [(4, 3)] * 3
    np.testing.assert_allclose(sites["w_spike"]["fn"].mean, sites["inclusion"]["value"])
    np.testing.assert_allclose(sites["w_slab"]["fn"].variance[2], sites["scale"]["value"] ** 2)


def test_expected_size_is_a_number_of_weights_or_groups():
    def model():
        with numpyro.plate("task", 4, dim=-2), numpyro.plate("feature", 5, dim=-1):
            nss.spike_slab("w", expected_size=6.0)

    np.testing.assert_allclose(trace(model)["w_spike"]["fn"].mean.sum(), 6.0, rtol=1e-6)
    for options, mean in (
        ({"scale": np.ones(8)}, [0.125] * 8),
        ({"groups": [0, 0, 1, 1]}, [0.5] * 2),
    ):
        sites = trace(lambda options=options: nss.spike_slab("w", expected_size=1.0, **options))
        np.testing.assert_allclose(sites["w_spike"]["fn"].mean, mean)


def test_prior_draws_have_the_expected_size():
    def model():
        with numpyro.plate("feature", 50):
            nss.spike_slab("w", expected_size=5)

    w = Predictive(model, num_samples=2000)(random.key(0))["w"]
    assert abs((w != 0).sum(axis=1).mean() - 5.0) < 5 * np.sqrt(50 * 0.1 * 0.9 / 2000)


BETWEEN = "must lie strictly"
GROUPS = "`groups` must have one number"
REFUSED = [
    *((dict(inclusion=x), rf"every `inclusion` {BETWEEN}") for x in (0.0, 1.5, np.nan)),
    (dict(inclusion=np.array([[0.5], [1.0]] * 2)), rf"every `inclusion` {BETWEEN}"),
    *((dict(scale=x), rf"every `scale` {BETWEEN}") for x in (0.0, -1.0, np.nan, np.inf)),
    *(
        (dict(inclusion=None, expected_size=x), r"every `expected_size` .* 0.* 5")
        for x in (0, 5, -1)
    ),
    (dict(inclusion=None), "give either `inclusion` or `expect"),
    (dict(expected_size=2), "give either `inclusion` or `expect"),
    (dict(inclusion=np.full(3, 0.3)), r"`inclusion` has shape \(3,\).* plates, of shape \(5,\)"),
    (dict(scale=np.ones((2, 4))), r"`scale` has shape \(2, 4\)"),
    (dict(size=1, inclusion=np.full(3, 0.3)), "does not fit"),
    (dict(size=None, inclusion=np.full(3, 0.3), scale=np.ones(4)), r"`scale` has shape \(4,\)"),
    (dict(groups=[0, 0, 1]), "inside of the plate 'feature', expected.*Move it"),
    (dict(size=None, groups=[0, 2]), rf"{GROUPS} .* got \[0, 2\].*return_inverse"),
    *(
        (dict(size=None, groups=groups), GROUPS)
        for groups in ([1, 2], [], np.array([[0, 1]]), np.array(["a", "b"]), np.array([0.0, 1.0]))
    ),
    (
        dict(size=None, groups=[0, 0, 1], inclusion=np.full(3, 0.2)),
        r"`inclusion` has .*shape \(2,\)",
    ),
    (
        dict(size=None, groups=[0, 0, 1], scale=np.ones(2)),
        r"`scale` has shape \(2,\).*shape \(3,\)",
    ),
    (
        dict(size=None, groups=[0, 0, 1], inclusion=None, expected_size=2.5),
        "expected_size.*the number of groups",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_messages_name_the_weights_and_the_argument(arguments, message):
    arguments = {"inclusion": 0.3, "size": 5} | arguments
    size = arguments.pop("size")

    def model():
        if size is None:
            return nss.spike_slab("w", **arguments)
        with numpyro.plate("feature", size):
            return nss.spike_slab("w", **arguments)

    with pytest.raises(ValueError, match=rf"spike_slab\('w'\): .*{message}"):
        trace(model)


def test_traced_arguments_are_not_checked_and_constants_are():
    def w(inclusion, scale, groups=None):
        with handlers.seed(rng_seed=0):
            return nss.spike_slab("w", inclusion, jnp.full(3, scale), groups=groups)

    np.testing.assert_array_equal(jax.jit(lambda p: w(p, 1.0))(0.5), w(0.5, 1.0))
    with pytest.raises(ValueError, match="`inclusion`"):
        jax.jit(lambda s: w(-1.0, s))(0.5)
    with pytest.raises(ValueError, match="`groups` is traced by JAX"):
        jax.jit(lambda groups: w(0.3, 1.0, groups))(jnp.array([0, 0, 1]))


def test_weights_of_a_group_share_a_spike():
    groups, scale = (1, 0, 1), np.array([1.0, 2.0, 3.0])

    def model():
        return nss.spike_slab("w", np.array([0.2, 0.6]), scale, groups=groups)

    sites = trace(model)
    assert (sites["w_group"]["args"][0], sites["w_weight"]["args"][0]) == (2, 3)
    slabs = np.array([0.5, -1.0, 2.0])
    for spikes, w in (([1, 0], [0.0, -1.0, 0.0]), ([0, 1], [0.5, 0.0, 2.0])):
        values = {"w_spike": np.array(spikes), "w_slab": slabs}
        value, traced = log_density(model, (), {}, values)
        np.testing.assert_array_equal(traced["w"]["value"], w)
        expected = stats.bernoulli([0.2, 0.6]).logpmf(spikes).sum()
        expected += stats.norm.logpdf(slabs, 0.0, scale).sum()
        np.testing.assert_allclose(value, expected, rtol=1e-5)


# SpikeSlab

PARAMETERS = [(0.3, 1.0, 0.0), (0.8, 2.0, 0.7), (0.05, 0.4, -1.5)]
EVERY_PARAMETER = pytest.mark.parametrize(("inclusion", "scale", "loc"), PARAMETERS)


@EVERY_PARAMETER
def test_moments_agree_with_draws(x64, inclusion, scale, loc):
    prior = nss.SpikeSlab(inclusion, scale, loc)
    draws = np.asarray(prior.sample(random.key(0), (200_000,)))
    error = 5 * draws.std() / np.sqrt(draws.size)
    assert abs(draws.mean() - prior.mean) < error
    squares = (draws - prior.mean) ** 2
    assert abs(squares.mean() - prior.variance) < 5 * squares.std() / np.sqrt(draws.size)
    assert abs((draws != 0).mean() - inclusion) < 5 * np.sqrt(inclusion / draws.size)


@EVERY_PARAMETER
def test_the_density_integrates_to_one_with_the_atom(x64, inclusion, scale, loc):
    prior = nss.SpikeSlab(inclusion, scale, loc)
    slab, _ = integrate.quad(
        lambda x: np.exp(prior.log_prob(x)), loc - 12 * scale, loc + 12 * scale, points=[loc]
    )
    np.testing.assert_allclose(slab + np.exp(prior.log_prob(0.0)), 1.0, rtol=1e-8)
    np.testing.assert_allclose(np.exp(prior.log_prob(0.0)), 1.0 - inclusion, rtol=1e-12)
    x = np.array([-1.0, 0.2, 3.0])
    expected = np.log(inclusion) + stats.norm(loc, scale).logpdf(x)
    np.testing.assert_allclose(prior.log_prob(x), expected, rtol=1e-12)


@EVERY_PARAMETER
def test_the_cdf_is_that_of_the_mixed_measure(x64, inclusion, scale, loc):
    prior = nss.SpikeSlab(inclusion, scale, loc)
    x = np.array([-3.0, -1e-9, 0.0, 1e-9, 2.0])
    expected = inclusion * stats.norm(loc, scale).cdf(x) + (1.0 - inclusion) * (x >= 0.0)
    np.testing.assert_allclose(prior.cdf(x), expected, rtol=1e-10)
    draws = np.asarray(prior.sample(random.key(0), (50_000,)))
    empirical = (draws[:, None] <= x).mean(axis=0)
    np.testing.assert_allclose(empirical, expected, atol=5 * 0.5 / np.sqrt(50_000))


@EVERY_PARAMETER
def test_quantiles_invert_the_cdf_outside_the_atom(x64, inclusion, scale, loc):
    prior = nss.SpikeSlab(inclusion, scale, loc)
    x = loc + scale * np.linspace(-4.0, 4.0, 41)
    np.testing.assert_allclose(prior.icdf(prior.cdf(x)), x, rtol=1e-7, atol=1e-9)
    below = float(inclusion * stats.norm(loc, scale).cdf(0.0))
    inside = below + (1.0 - inclusion) * np.linspace(0.001, 0.999, 11)
    np.testing.assert_array_equal(prior.icdf(inside), np.zeros(11))
    np.testing.assert_array_equal(prior.icdf(np.array([0.0, 1.0])), [-np.inf, np.inf])
    q = np.linspace(0.01, 0.99, 99)
    x = np.asarray(prior.icdf(q))
    assert (np.diff(x) >= 0.0).all()
    assert (prior.cdf(x) >= q - 1e-12).all() and (prior.cdf(x - 1e-6) <= q + 1e-12).all()


def test_the_last_quantile_is_infinite_however_rare_the_slab(precision):
    prior = nss.SpikeSlab(jnp.linspace(1e-6, 1.0, 1001), 1.0)
    assert np.all(np.isinf(prior.icdf(1.0)))


@pytest.mark.parametrize(
    ("inclusion", "scale", "loc", "shape"),
    [
        (0.5, 1.0, 0.0, ()),
        (np.full(3, 0.5), 1.0, 0.0, (3,)),
        (0.5, np.ones((2, 1)), np.zeros(3), (2, 3)),
        (np.full((4, 1, 1), 0.5), np.ones((2, 1)), np.zeros(3), (4, 2, 3)),
    ],
)
def test_batch_shapes(inclusion, scale, loc, shape):
    def summaries(key):
        prior = nss.SpikeSlab(inclusion, scale, loc)
        draws = prior.sample(key, (5, 2))
        expanded = prior.expand((7, *shape)).sample(key)
        return draws, prior.log_prob(draws), prior.cdf(draws), prior.mean, prior.variance, expanded

    assert nss.SpikeSlab(inclusion, scale, loc).batch_shape == shape
    *of_draws, mean, variance, expanded = jax.eval_shape(summaries, random.key(0))
    assert {x.shape for x in of_draws} == {(5, 2, *shape)}
    assert mean.shape == variance.shape == shape
    assert expanded.shape == (7, *shape)


def test_a_distribution_passes_through_transformations_and_pickles():
    priors = nss.SpikeSlab(jnp.linspace(0.1, 0.9, 4), 2.0)
    x = jnp.array([0.0, 1.0, -1.0, 0.0])
    expected = priors.log_prob(x)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(priors)).log_prob(x), expected)
    np.testing.assert_allclose(jax.jit(lambda p, x: p.log_prob(x))(priors, x), expected, rtol=1e-6)
    one_by_one = jax.vmap(lambda p, x: nss.SpikeSlab(p, 2.0).log_prob(x))(priors.inclusion, x)
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-6)
    gradients = jax.grad(
        lambda p, s: jnp.sum(nss.SpikeSlab(p, s).log_prob(jnp.array([0.0, 1.0]))), argnums=(0, 1)
    )(0.3, 2.0)
    np.testing.assert_allclose(gradients, [1 / 0.3 - 1 / 0.7, -1 / 2.0 + 1 / 8.0], rtol=1e-5)


def test_invalid_parameters_and_values():
    for inclusion, scale in ((-0.1, 1.0), (1.1, 1.0), (0.5, 0.0), (0.5, -1.0)):
        with pytest.raises(ValueError, match="SpikeSlab distribution got invalid"):
            nss.SpikeSlab(inclusion, scale, validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        nss.SpikeSlab(0.5, validate_args=True).log_prob(jnp.array(np.nan))


def test_the_edges_of_inclusion_are_an_atom_and_a_normal():
    np.testing.assert_array_equal(nss.SpikeSlab(0.0).sample(random.key(0), (9,)), np.zeros(9))
    x = jnp.array([-1.0, 2.0])
    np.testing.assert_allclose(nss.SpikeSlab(1.0).log_prob(x), dist.Normal().log_prob(x))


def test_gradient_based_inference_of_a_spike_slab_site_is_refused():
    def model(y):
        w = numpyro.sample("w", nss.SpikeSlab(0.5))
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(NotImplementedError, match=r"Write `numpyro_spikeslab.spike_slab\(name"):
        mcmc.run(random.key(0), 1.0)
