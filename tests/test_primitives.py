# SPDX-License-Identifier: Apache-2.0
"""The prior as a primitive, and as a distribution."""

from contextlib import nullcontext
import pickle
from typing import Any

import numpy as np
import pytest
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.distributions import Sorted
from numpyro_spikeslab.models.primitives import MARK

# spike_slab


def trace(model: Any, *args: Any) -> dict[str, Any]:
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args)


def test_sites_and_marks():
    def model():
        with numpyro.plate("task", 4, dim=-2), numpyro.plate("feature", 5, dim=-1):
            numpyro.deterministic("copy", nss.spike_slab("w", 0.3, 2.0))

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
    ("plate", "inclusion", "scale", "shape"),
    [
        (None, 0.3, 2.0, ()),
        (None, 0.3, np.ones(3), (3,)),
        (None, np.full((4, 1), 0.3), np.linspace(1.0, 2.0, 3), (4, 3)),
        (4, 0.3, np.linspace(1.0, 2.0, 3), (4, 3)),
    ],
)
def test_there_is_one_pair_for_each_entry_of_plates_and_arguments(plate, inclusion, scale, shape):
    def model():
        with numpyro.plate("task", plate, dim=-2) if plate else nullcontext():
            return nss.spike_slab("w", inclusion, scale)

    sites = trace(model)
    assert [sites[name]["value"].shape for name in ("w_spike", "w_slab", "w")] == [shape] * 3
    rng = np.random.default_rng(0)
    spikes, slabs = rng.integers(0, 2, shape), rng.normal(size=shape)
    value, _ = log_density(model, (), {}, {"w_spike": spikes, "w_slab": slabs})
    p, s = np.broadcast_to(inclusion, shape), np.broadcast_to(scale, shape)
    expected = np.where(spikes, np.log(p), np.log1p(-p)) + stats.norm.logpdf(slabs, 0.0, s)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("plate", "size", "options", "mean"),
    [
        (5, 2.0, {"scale": np.ones((4, 1))}, 0.1),
        (None, 1.0, {"scale": np.ones(8)}, 0.125),
        (None, 1.0, {"groups": [0, 0, 1, 1]}, 0.5),
    ],
)
def test_expected_size_is_a_number_of_weights_or_groups(plate, size, options, mean):
    def model():
        with numpyro.plate("feature", plate) if plate else nullcontext():
            nss.spike_slab("w", expected_size=size, **options)

    prior = trace(model)["w_spike"]["fn"].mean
    np.testing.assert_allclose(prior, np.full(prior.shape, mean), rtol=1e-6)
    np.testing.assert_allclose(prior.sum(), size, rtol=1e-6)


BETWEEN = "got .*, expected numbers strictly between 0 and"
SMALL, LONG = np.full(3, 0.3), [0, 0, 1]
REFUSED = [
    *((dict(inclusion=x), f"inclusion: {BETWEEN} 1") for x in (0.0, 1.5, np.nan)),
    (dict(inclusion=1.0), "inclusion: got 1.0.* always in is a Normal site; leave out a column"),
    (dict(inclusion=np.array([[0.5], [1.0]] * 2)), f"inclusion: {BETWEEN} 1"),
    *((dict(scale=x), f"scale: {BETWEEN} inf") for x in (0.0, -1.0, np.nan, np.inf)),
    *((dict(expected_size=x, inclusion=None), f"expected_size: {BETWEEN} 5") for x in (0, 5, -1)),
    (
        dict(size=None, expected_size=3, inclusion=None),
        r"expected_size: got 3, .* Sample it in `numpyro.plate\('feature', X.shape\[1\]\)`",
    ),
    (dict(inclusion=None), "inclusion, expected_size: got neither"),
    (dict(expected_size=2), "inclusion, expected_size: got both"),
    (dict(inclusion=SMALL), r"inclusion, scale: got shapes \[\(3,\), \(\)\].* plates, \(5,\)"),
    (dict(scale=np.ones((2, 4))), r"inclusion, scale: got shapes \[\(\), \(2, 4\)\]"),
    (dict(size=1, inclusion=SMALL), "inclusion, scale: .* expected shapes that fit"),
    (dict(size=None, inclusion=SMALL, scale=np.ones(4)), r"inclusion, scale: got .*, \(4,\)"),
    (dict(groups=LONG), "groups: got the enclosing plate 'feature', .*Move it"),
    *(
        (dict(size=None, groups=groups), "groups: got .* a number from 0 .*return_inverse")
        for groups in ([0, 2], [1, 2], [], np.array([[0, 1]]), np.array(["a"]), np.array([0.0]))
    ),
    (dict(size=None, groups=LONG, inclusion=SMALL), r"inclusion: got .*shape \(2,\)"),
    (dict(size=None, groups=LONG, scale=np.ones(2)), r"scale: got .*\(2,\).*shape \(3,\)"),
    (
        dict(size=None, groups=LONG, inclusion=None, expected_size=2.5),
        f"expected_size: {BETWEEN} 2, the number of groups",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_messages_name_the_weights_and_the_argument(arguments, message):
    arguments = {"inclusion": 0.3, "size": 5} | arguments
    size = arguments.pop("size")

    def model():
        with numpyro.plate("feature", size) if size else nullcontext():
            nss.spike_slab("w", **arguments)

    with pytest.raises(ValueError, match=rf"(?s)spike_slab\('w'\): {message}"):
        trace(model)


def test_traced_arguments_are_not_checked_and_constants_are():
    def w(inclusion, scale, groups=None):
        with handlers.seed(rng_seed=0):
            return nss.spike_slab("w", inclusion, jnp.full(3, scale), groups=groups)

    np.testing.assert_array_equal(jax.jit(lambda p: w(p, 1.0))(0.5), w(0.5, 1.0))
    with pytest.raises(ValueError, match="inclusion: got"):
        jax.jit(lambda s: w(-1.0, s))(0.5)
    with pytest.raises(ValueError, match="groups: got numbers traced"):
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


@pytest.mark.parametrize(
    ("inclusion", "scale", "loc"), [(0.3, 1.0, 0.0), (0.8, 2.0, 0.7), (0.05, 0.4, -1.5)]
)
def test_the_distribution_is_an_atom_and_a_normal(x64, inclusion, scale, loc):
    prior, slab = nss.SpikeSlab(inclusion, scale, loc), stats.norm(loc, scale)
    x = np.array([-3.0, -1e-9, 1e-9, 2.0])
    np.testing.assert_allclose(prior.log_prob(x), np.log(inclusion) + slab.logpdf(x), rtol=1e-12)
    np.testing.assert_allclose(np.exp(prior.log_prob(0.0)), 1.0 - inclusion, rtol=1e-12)
    x = np.append(x, 0.0)
    expected = inclusion * slab.cdf(x) + (1.0 - inclusion) * (x >= 0.0)
    np.testing.assert_allclose(prior.cdf(x), expected, rtol=1e-10)
    draws = np.asarray(prior.sample(random.key(0), (200_000,)))
    moments = {
        "mean": (draws, prior.mean),
        "variance": ((draws - prior.mean) ** 2, prior.variance),
        "inclusion": (draws != 0, inclusion),
        **{f"below {at}": (draws <= at, prior.cdf(at)) for at in x},
    }
    for name, (values, mean) in moments.items():
        # what has never happened in N draws is rarer than 14 / N, but for one key in a million
        error = 5 * values.std() / np.sqrt(draws.size) + 14 / draws.size
        assert abs(values.mean() - mean) < error, name
    # quantiles invert the cdf outside of the atom
    x = loc + scale * np.linspace(-4.0, 4.0, 41)
    np.testing.assert_allclose(prior.icdf(prior.cdf(x)), x, rtol=1e-7, atol=1e-9)
    inside = float(inclusion * slab.cdf(0.0)) + (1.0 - inclusion) * np.linspace(0.001, 0.999, 11)
    np.testing.assert_array_equal(prior.icdf(inside), np.zeros(11))
    np.testing.assert_array_equal(prior.icdf(np.array([0.0, 1.0])), [-np.inf, np.inf])


def test_batch_shapes():
    def summaries(key):
        prior = nss.SpikeSlab(np.full((4, 1, 1), 0.5), np.ones((2, 1)), np.zeros(3))
        draws = prior.sample(key, (5, 2))
        expanded = prior.expand((7, *prior.batch_shape)).sample(key)
        return draws, prior.log_prob(draws), prior.cdf(draws), prior.mean, prior.variance, expanded

    *of_draws, mean, variance, expanded = jax.eval_shape(summaries, random.key(0))
    assert {x.shape for x in of_draws} == {(5, 2, 4, 2, 3)}
    assert mean.shape == variance.shape == (4, 2, 3)
    assert expanded.shape == (7, 4, 2, 3)


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


def test_values_at_and_beyond_the_edges():
    for inclusion, scale in ((-0.1, 1.0), (1.1, 1.0), (0.5, 0.0), (0.5, -1.0)):
        with pytest.raises(ValueError, match="SpikeSlab distribution got invalid"):
            nss.SpikeSlab(inclusion, scale, validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        nss.SpikeSlab(0.5, validate_args=True).log_prob(jnp.array(np.nan))
    np.testing.assert_array_equal(nss.SpikeSlab(0.0).sample(random.key(0), (9,)), np.zeros(9))
    x = jnp.array([-1.0, 2.0])
    np.testing.assert_allclose(nss.SpikeSlab(1.0).log_prob(x), dist.Normal().log_prob(x))
    prior = nss.SpikeSlab(jnp.linspace(1e-6, 1.0, 1001), 1.0)
    assert np.all(np.isinf(prior.icdf(1.0)))


def test_gradient_based_inference_of_a_spike_slab_site_is_refused():
    def model(y):
        w = numpyro.sample("w", nss.SpikeSlab(0.5))
        numpyro.sample("y", dist.Normal(w, 1.0), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(NotImplementedError, match=r"Write `numpyro_spikeslab.spike_slab\(name"):
        mcmc.run(random.key(0), 1.0)


# Classes in order


CUTS = np.array([-0.5, -0.4, 1.5])
FAR = np.array([-30.0, -6.0, 0.0, 0.7, 6.0, 30.0])


def log_probs(f, cuts):
    """Log probabilities of all classes, shape (4, len(f)), each in its nearer tail."""
    low, high = (x[:, None] - f for x in (np.r_[-np.inf, cuts], np.r_[cuts, np.inf]))
    low, high = np.where(low > -high, [-high, -low], [low, high])
    below, above = stats.norm.logcdf(low), stats.norm.logcdf(high)
    return above + np.log(-np.expm1(below - above))


def test_classes_in_order_are_intervals_of_a_normal_variate(precision):
    """Densities and slopes keep their digits in both tails."""
    tolerance = {"float32": 2e-4, "float64": 1e-9}[precision]
    y = np.arange(4)[:, None]

    def total(f, cuts):
        logs = nss.OrderedProbit(f, cuts).log_prob(y)
        assert logs.dtype == precision
        return jnp.sum(logs), logs

    slopes, logs = jax.grad(total, argnums=(0, 1), has_aux=True)(jnp.array(FAR), jnp.array(CUTS))
    expected = log_probs(FAR, CUTS)
    np.testing.assert_allclose(logs, expected, rtol=tolerance, atol=1e-30)
    # densities at the cut points, over probabilities
    ratio = stats.norm.logpdf(CUTS[:, None] - FAR)
    of_cuts = np.exp(ratio - expected[:-1]) - np.exp(ratio - expected[1:])
    np.testing.assert_allclose(slopes[1], of_cuts.sum(axis=1), rtol=tolerance)
    np.testing.assert_allclose(slopes[0], -of_cuts.sum(axis=0), rtol=tolerance, atol=tolerance)
    extreme = jax.grad(total, argnums=(0, 1), has_aux=True)(jnp.array([-1e4, 1e4]), jnp.array(CUTS))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(extreme))


def test_classes_in_order_are_drawn_and_refused_as_those_of_numpyro():
    like = dist.OrderedLogistic(jnp.array(FAR), jnp.array(CUTS))
    ours = nss.OrderedProbit(FAR, CUTS, validate_args=True)
    np.testing.assert_allclose(ours.probs, np.exp(log_probs(FAR, CUTS)).T, atol=1e-5)
    assert ours.batch_shape == like.batch_shape and ours.probs.shape == like.probs.shape
    draws = np.asarray(ours.sample(random.key(0), (20_000,)))
    for k in range(4):
        expected = np.asarray(ours.probs[:, k])
        error = 5 * np.sqrt(expected * (1 - expected) / len(draws))
        assert (abs((draws == k).mean(axis=0) - expected) <= error + 1e-4).all()
    # cut points of each row, and of each draw
    many = nss.OrderedProbit(FAR, CUTS + np.arange(3)[:, None, None])
    assert many.batch_shape == (3, 6) and many.log_prob(draws[0]).shape == (3, 6)
    np.testing.assert_allclose(many.log_prob(draws[0])[0], ours.log_prob(draws[0]), rtol=1e-6)
    again = jax.jit(lambda x: x.log_prob(draws[0]))(pickle.loads(pickle.dumps(ours)))
    np.testing.assert_allclose(again, ours.log_prob(draws[0]), rtol=1e-6)
    whole = nss.OrderedProbit(0, jnp.array([-1, 1]))
    np.testing.assert_allclose(whole.probs, [0.158655, 0.682689, 0.158655], rtol=1e-5)
    for predictor, cuts in ((0.0, CUTS[::-1]), (np.nan, CUTS)):
        with pytest.raises(ValueError, match="OrderedProbit distribution got invalid"):
            nss.OrderedProbit(predictor, cuts, validate_args=True)
    with pytest.warns(UserWarning, match="Out-of-support"):
        ours.log_prob(np.full(6, 4))


def test_sorted_draws_of_the_error_make_probabilities_of_classes_uniform(x64):
    prior = Sorted(dist.Logistic().expand((3,)))
    uniform = dist.TransformedDistribution(
        dist.Dirichlet(jnp.ones(4)), dist.transforms.SimplexToOrderedTransform()
    )
    draws = prior.sample(random.key(0), (2000,))
    np.testing.assert_allclose(prior.log_prob(draws), uniform.log_prob(draws), rtol=1e-9)
    probs = np.diff(stats.logistic.cdf(draws), prepend=0.0, append=1.0)
    assert all(stats.kstest(x, stats.beta(1, 3).cdf).pvalue > 1e-5 for x in probs.T)
