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


def test_the_sites_of_spike_slab():
    sites = trace(two_plates)
    spike, slab, w = (sites[name] for name in ("w_spike", "w_slab", "w"))
    assert set(sites) == {"task", "feature", "w_spike", "w_slab", "w"}
    assert [site["type"] for site in (spike, slab, w)] == ["sample", "sample", "deterministic"]
    assert [site["value"].shape for site in (spike, slab, w)] == [(4, 5)] * 3
    np.testing.assert_array_equal(w["value"], spike["value"] * slab["value"])
    np.testing.assert_allclose(spike["fn"].mean, np.full((4, 5), 0.3), rtol=1e-6)
    np.testing.assert_allclose(slab["fn"].variance, np.full((4, 5), 4.0), rtol=1e-6)


def test_the_marks_name_the_weights_and_the_part():
    sites = trace(two_plates)
    assert sites["w_spike"]["infer"][MARK] == ("w", "spike")
    assert sites["w_slab"]["infer"][MARK] == ("w", "slab")
    assert nss.paired_sites(sites) == ("w_spike", "w_slab")


def test_spike_slab_returns_its_deterministic_site():
    def model():
        numpyro.deterministic("copy", two_plates())

    sites = trace(model)
    np.testing.assert_array_equal(sites["copy"]["value"], sites["w"]["value"])


def test_spike_slab_without_plates_is_one_weight():
    assert trace(lambda: nss.spike_slab("w", 0.3))["w"]["value"].shape == ()


def test_spike_slab_takes_an_inclusion_and_a_scale_per_weight():
    inclusion, scale = np.linspace(0.1, 0.9, 5), np.linspace(1.0, 2.0, 5)
    sites = trace(two_plates, inclusion, scale)
    np.testing.assert_allclose(sites["w_spike"]["fn"].mean[2], inclusion, rtol=1e-6)
    np.testing.assert_allclose(sites["w_slab"]["fn"].variance[3], scale**2, rtol=1e-6)


@pytest.mark.parametrize(
    ("inclusion", "scale", "shape"),
    [
        (0.3, np.ones(3), (3,)),
        (np.full(3, 0.3), 2.0, (3,)),
        (np.full((4, 1), 0.3), np.ones(3), (4, 3)),
        (np.full(3, 0.3), np.ones(3), (3,)),
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


def test_arguments_may_have_dimensions_that_no_plate_has():
    def model():
        with numpyro.plate("task", 4, dim=-2):
            return nss.spike_slab("w", np.full(3, 0.3), 2.0)

    sites = trace(model)
    assert [sites[name]["value"].shape for name in ("w_spike", "w_slab", "w")] == [(4, 3)] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.full(3, 0.3),), r"`inclusion` has shape \(3,\).* plates, of shape \(4, 5\)"),
        ((0.3, np.ones((2, 1))), r"`scale` has shape \(2, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_the_plates_are_refused(arguments, message):
    with pytest.raises(ValueError, match=rf"spike_slab\('w'\): {message}"):
        trace(two_plates, *arguments)


def test_shapes_that_do_not_fit_each_other_are_refused():
    with pytest.raises(ValueError, match=r"spike_slab\('w'\): `scale` has shape \(4,\)"):
        trace(lambda: nss.spike_slab("w", np.full(3, 0.3), np.ones(4)))


def test_a_plate_of_one_weight_is_not_expanded():
    def model():
        with numpyro.plate("feature", 1):
            nss.spike_slab("w", np.full(3, 0.3))

    with pytest.raises(ValueError, match="does not fit"):
        trace(model)


def test_expected_size_counts_the_weights_of_the_scale():
    model = lambda: nss.spike_slab("w", scale=np.ones(8), expected_size=2.0)  # noqa: E731
    np.testing.assert_allclose(trace(model)["w_spike"]["fn"].mean, np.full(8, 0.25))


def test_inclusion_and_scale_may_be_latent():
    def model():
        inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 2.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("feature", 3):
            nss.spike_slab("w", inclusion, scale)

    sites = trace(model)
    np.testing.assert_allclose(sites["w_spike"]["fn"].mean, sites["inclusion"]["value"])
    np.testing.assert_allclose(sites["w_slab"]["fn"].variance, sites["scale"]["value"] ** 2)


def test_expected_size_is_a_number_of_weights():
    def model():
        with numpyro.plate("task", 4, dim=-2), numpyro.plate("feature", 5, dim=-1):
            nss.spike_slab("w", expected_size=6.0)

    np.testing.assert_allclose(trace(model)["w_spike"]["fn"].mean.sum(), 6.0, rtol=1e-6)


def test_the_prior_draws_have_the_expected_size():
    def model():
        with numpyro.plate("feature", 50):
            nss.spike_slab("w", expected_size=5)

    w = Predictive(model, num_samples=2000)(random.key(0))["w"]
    sizes = (w != 0).sum(axis=1)
    assert abs(sizes.mean() - 5.0) < 5 * np.sqrt(50 * 0.1 * 0.9 / 2000)


def test_excluded_weights_are_no_negative_zeros():
    w = trace(two_plates, 0.01)["w"]["value"]
    assert (w == 0.0).any()
    assert not np.signbit(w[w == 0.0]).any()


@pytest.mark.parametrize("inclusion", [0.0, 1.0, -0.5, 1.5, np.nan, np.array([[0.5], [1.0]] * 2)])
def test_inclusion_must_lie_between_0_and_1(inclusion):
    with pytest.raises(ValueError, match=r"spike_slab\('w'\): every `inclusion` must lie strictly"):
        trace(two_plates, inclusion)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match=r"spike_slab\('w'\): every `scale` must lie strictly"):
        trace(two_plates, 0.5, scale)


@pytest.mark.parametrize("expected_size", [0, 5, 7.0, -1])
def test_expected_size_must_lie_between_0_and_the_number_of_weights(expected_size):
    def model():
        with numpyro.plate("feature", 5):
            nss.spike_slab("w", expected_size=expected_size)

    with pytest.raises(ValueError, match=r"spike_slab\('w'\): every `expected_size` .* 0.* 5"):
        trace(model)


@pytest.mark.parametrize("arguments", [{}, {"inclusion": 0.5, "expected_size": 2}])
def test_either_inclusion_or_expected_size_is_given(arguments):
    with pytest.raises(ValueError, match=r"spike_slab\('w'\): give either `inclusion` or `expect"):
        trace(lambda: nss.spike_slab("w", **arguments))


def test_a_traced_inclusion_is_not_checked_and_a_constant_one_is():
    def w(inclusion, scale):
        with handlers.seed(rng_seed=0), numpyro.plate("feature", 3):
            return nss.spike_slab("w", inclusion, scale)

    np.testing.assert_array_equal(jax.jit(lambda p: w(p, 1.0))(0.5), w(0.5, 1.0))
    with pytest.raises(ValueError, match="`scale`"):
        jax.jit(lambda p: w(p, -1.0))(0.5)


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
def test_icdf_inverts_the_cdf_outside_the_atom(x64, inclusion, scale, loc):
    prior = nss.SpikeSlab(inclusion, scale, loc)
    x = loc + scale * np.linspace(-4.0, 4.0, 41)
    np.testing.assert_allclose(prior.icdf(prior.cdf(x)), x, rtol=1e-7, atol=1e-9)
    below = float(inclusion * stats.norm(loc, scale).cdf(0.0))
    inside = below + (1.0 - inclusion) * np.linspace(0.001, 0.999, 11)
    np.testing.assert_array_equal(prior.icdf(inside), np.zeros(11))
    np.testing.assert_array_equal(prior.icdf(np.array([0.0, 1.0])), [-np.inf, np.inf])


def test_the_last_quantile_is_infinite_however_rare_the_slab(precision):
    prior = nss.SpikeSlab(jnp.linspace(1e-6, 1.0, 1001), 1.0)
    assert np.all(np.isinf(prior.icdf(1.0)))


@EVERY_PARAMETER
def test_quantiles_are_the_smallest_values_that_reach_them(x64, inclusion, scale, loc):
    prior = nss.SpikeSlab(inclusion, scale, loc)
    q = np.linspace(0.01, 0.99, 99)
    x = np.asarray(prior.icdf(q))
    assert (np.diff(x) >= 0.0).all()
    assert (prior.cdf(x) >= q - 1e-12).all()
    assert (prior.cdf(x - 1e-6) <= q + 1e-12).all()


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


def test_a_distribution_passes_through_jit_and_vmap():
    priors = nss.SpikeSlab(jnp.linspace(0.1, 0.9, 4), 2.0)
    x = jnp.array([0.0, 1.0, -1.0, 0.0])
    expected = priors.log_prob(x)
    np.testing.assert_allclose(jax.jit(lambda p, x: p.log_prob(x))(priors, x), expected, rtol=1e-6)
    one_by_one = jax.vmap(lambda p, x: nss.SpikeSlab(p, 2.0).log_prob(x))(priors.inclusion, x)
    np.testing.assert_allclose(one_by_one, expected, rtol=1e-6)


def test_gradients_of_the_density_are_finite():
    value_and_grad = jax.value_and_grad(
        lambda p, s: jnp.sum(nss.SpikeSlab(p, s).log_prob(jnp.array([0.0, 1.0]))), argnums=(0, 1)
    )
    _, (inclusion, scale) = value_and_grad(0.3, 2.0)
    np.testing.assert_allclose(inclusion, 1 / 0.3 - 1 / 0.7, rtol=1e-5)
    np.testing.assert_allclose(scale, -1 / 2.0 + 1 / 8.0, rtol=1e-5)


def test_a_distribution_pickles():
    prior = nss.SpikeSlab(0.3, 2.0, 0.5)
    again = pickle.loads(pickle.dumps(prior))
    x = jnp.array([0.0, 1.0])
    np.testing.assert_array_equal(again.log_prob(x), prior.log_prob(x))


@pytest.mark.parametrize(("inclusion", "scale"), [(-0.1, 1.0), (1.1, 1.0), (0.5, 0.0), (0.5, -1.0)])
def test_invalid_parameters_are_refused(inclusion, scale):
    with pytest.raises(ValueError, match="SpikeSlab distribution got invalid"):
        nss.SpikeSlab(inclusion, scale, validate_args=True)


def test_values_outside_the_support_warn():
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


# Groups


def test_weights_of_a_group_share_a_spike():
    groups, scale = (1, 0, 1), np.array([1.0, 2.0, 3.0])

    def model():
        return nss.spike_slab("w", np.array([0.2, 0.6]), scale, groups=groups)

    sites = trace(model)
    assert {name: sites[name]["args"][0] for name in ("w_group", "w_weight")} == {
        "w_group": 2,
        "w_weight": 3,
    }
    slabs = np.array([0.5, -1.0, 2.0])
    for spikes, w in (([1, 0], [0.0, -1.0, 0.0]), ([0, 1], [0.5, 0.0, 2.0])):
        values = {"w_spike": np.array(spikes), "w_slab": slabs}
        value, found = log_density(model, (), {}, values)
        np.testing.assert_array_equal(found["w"]["value"], w)
        expected = stats.bernoulli([0.2, 0.6]).logpmf(spikes).sum()
        expected += stats.norm.logpdf(slabs, 0.0, scale).sum()
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_the_expected_size_of_groups_counts_groups():
    sites = trace(lambda: nss.spike_slab("w", expected_size=1.0, groups=[0, 0, 1, 1]))
    np.testing.assert_allclose(sites["w_spike"]["fn"].mean, [0.5, 0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(groups=[0, 2]), r"`groups` must have one number .* got \[0, 2\].*return_inverse"),
        (dict(groups=[1, 2]), "`groups` must have one number"),
        (dict(groups=np.array([[0, 1]])), "`groups` must have one number"),
        (dict(groups=[]), "`groups` must have one number"),
        (dict(groups=np.array([], int)), "`groups` must have one number"),
        (dict(groups=np.array(["a", "b"])), "`groups` must have one number"),
        (dict(groups=np.array([0.0, 1.0])), "`groups` must have one number"),
        (dict(groups=[0, 0, 1], inclusion=np.full(3, 0.2)), r"`inclusion` has .*shape \(2,\)"),
        (dict(groups=[0, 0, 1], scale=np.ones(2)), r"`scale` has shape \(2,\).*shape \(3,\)"),
        (dict(groups=[0, 0, 1], inclusion=1.5), "every `inclusion` must lie strictly between"),
        (dict(groups=[0, 0, 1], scale=-1.0), "every `scale` must lie strictly between"),
    ],
)
def test_groups_that_are_none_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        trace(lambda: nss.spike_slab("w", **{"inclusion": 0.3} | arguments))
    with pytest.raises(ValueError, match=r"expected_size.*the number of groups"):
        trace(lambda: nss.spike_slab("w", expected_size=2.5, groups=[0, 0, 1]))


def test_groups_make_their_own_plates():
    def model():
        with numpyro.plate("feature", 3):
            nss.spike_slab("w", 0.3, groups=[0, 0, 1])

    with pytest.raises(ValueError, match=r"inside of the plate 'feature', expected.*Move it"):
        trace(model)


def test_traced_groups_are_refused():
    def model(groups):
        return nss.spike_slab("w", 0.3, groups=groups)

    with pytest.raises(ValueError, match="`groups` is traced by JAX"):
        jax.jit(lambda groups: trace(model, groups)["w"]["value"])(jnp.array([0, 0, 1]))
