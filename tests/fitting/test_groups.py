# SPDX-License-Identifier: Apache-2.0
"""Weights that share a spike in the paired guide and in CAVI, against exact posteriors."""

import pickle

import arviz_base
import numpy as np
import pytest
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO
from numpyro.optim import Adam

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.pairs import block_design

KEY = random.key(0)
GROUPS = (1, 0, 1, 2, 2, 1)
SCALE = np.array([1.0, 0.5, 0.8, 1.5, 0.4, 1.0])


def data(num_obs=30, size=6, seed=0):
    rng = np.random.default_rng(seed)
    X = truth.design("correlated", num_obs, size, seed)
    y = 0.4 * X[:, 0] - 0.3 * X[:, -1] + 0.7 * rng.normal(size=num_obs)
    return jnp.asarray(X), jnp.asarray(y)


def model(X, y=None, groups=GROUPS, inclusion=0.3, scale=SCALE, sigma=0.7):
    w = nss.spike_slab("w", inclusion, scale, groups=groups)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def learned_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("kind", 3):
        inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 3.0))
    with numpyro.plate("other", 2):
        v = nss.spike_slab("v", 0.4)
    w = nss.spike_slab("w", inclusion, scale, groups=GROUPS)
    with numpyro.plate("obs", X.shape[0]):
        location = level + X[:, 2:] @ w + X[:, :2] @ v
        numpyro.sample("y", dist.Normal(location, sigma), obs=y)


def fitted(model, *args, num_steps=300, **options):
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, **options)
    return svi, guide, svi.run(KEY, num_steps, *args, progress_bar=False)


def test_one_group_has_the_exact_posterior(x64):
    """A single factor leaves nothing out."""
    X, y = data()
    groups = (0,) * 6
    problem = truth.regression(X, y, 0.7, [0.3] + [0.5] * 5, SCALE)
    exact = truth.share_spikes(truth.enumerate_models(problem), groups)
    svi, guide, result = fitted(lambda X, y: model(X, y, groups), X, y)
    params = result.params
    np.testing.assert_allclose(-result.losses[-1], exact.log_evidence, rtol=1e-10)
    probs = guide.inclusion_probabilities(params)["w"]
    np.testing.assert_allclose(probs, exact.inclusion, rtol=1e-8)
    np.testing.assert_allclose(guide.posterior_mean(params)["w"], exact.mean, rtol=1e-8)
    factors = guide.factors.pack(svi._read((X, y), {}).form, params)
    variance = factors.total_variance(block_design(jnp.asarray(X).T, None))
    covariance = exact.second_moments - np.outer(exact.mean, exact.mean)
    np.testing.assert_allclose(variance, np.trace(X @ covariance @ X.T), rtol=1e-7)
    draws = guide.sample_posterior(KEY, params, X, y, sample_shape=(40_000,))
    assert draws["w_spike"].shape == (40_000, 1)
    # 27 comparisons at 1e-4 each: a false alarm in 1 of 370 keys
    outer = np.asarray(draws["w"])[:, :, None] * np.asarray(draws["w"])[:, None]
    for found, expected in ((draws["w"], exact.mean), (outer, exact.second_moments)):
        error = np.std(found, axis=0) / 200
        assert np.all(np.abs(np.mean(found, axis=0) - expected) < 3.9 * error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "which", [pytest.param(model, marks=pytest.mark.exhaustive), learned_model]
)
def test_the_bound_is_that_of_numpyro(x64, which):
    """By its own Monte Carlo estimate, with the same model and guide; and it never falls."""
    X, y = data(size=8 if which is learned_model else 6)
    svi, guide, result = fitted(which, X, y, temperature=None)
    assert np.all(np.diff(result.losses) < 1e-9)

    @jax.jit
    def estimate(key):
        bound = TraceGraph_ELBO(num_particles=2000)
        return bound.loss(key, result.params, which, guide, X, y)

    estimates = [estimate(key) for key in random.split(KEY, 5)]
    error = np.std(estimates, ddof=1) / np.sqrt(5)
    # 4 degrees of freedom: a false alarm in 1 of 250 keys
    assert abs(np.mean(estimates) + (-result.losses[-1])) < 5.6 * error + 1e-3
    assert 0 < error < 0.5
    np.testing.assert_allclose(svi.evaluate(result.state, X, y), result.losses[-1], rtol=1e-9)


def test_the_end_is_a_maximum_of_the_bound(x64):
    """No parameter, moved a little, makes it higher."""
    X, y = data()
    svi, _, result = fitted(model, X, y)
    best = -result.losses[-1]
    rng = np.random.default_rng(0)
    for name, value in result.params.items():
        noise = rng.normal(size=(2, *value.shape)) * np.where(value == 0, 0, 1e-3)
        if name.endswith("probs"):
            noise *= np.asarray(value * (1 - value))
        if "patterns" in name:
            noise = (noise - noise[..., ::-1]) * np.prod(value, axis=1, keepdims=True)
        for step in noise:
            params = result.params | {name: value + step}
            moved = svi.init(KEY, X, y, init_params=params)
            assert -svi.evaluate(moved, X, y) < best


@pytest.mark.slow
def test_precisions_agree():
    X, y = (np.asarray(x) for x in data())
    found = {}
    for x64 in (False, True):
        numpyro.enable_x64(x64)
        _, guide, result = fitted(model, jnp.asarray(X), jnp.asarray(y))
        found[x64] = -result.losses[-1], guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found[False][0], found[True][0], rtol=1e-5)
    np.testing.assert_allclose(found[False][1], found[True][1], atol=1e-4)


@pytest.mark.slow
def test_roles_of_groups_are_at_their_maximum(x64):
    """Inclusion counts groups, slab scales count weights."""
    X, y = data(size=8)
    svi, _, result = fitted(learned_model, X, y, num_steps=3000)
    best = -result.losses[-1]
    for name in ("inclusion", "scale", "sigma", "level"):
        value = result.params[f"{name}_auto_loc"]
        for factor in (0.98, 1.02):
            params = result.params | {f"{name}_auto_loc": value * factor}
            moved = svi.init(KEY, X, y, init_params=params)
            assert -svi.evaluate(moved, X, y) < best


@pytest.mark.exhaustive
def test_fits_of_groups_in_numpyro_and_arviz():
    X, y = data(size=8)
    svi, guide, result = fitted(learned_model, X, y)
    params = result.params
    assert params["w_auto_precision_tril_4"].shape == (1, 4, 4)
    assert params["v_auto_scale"].shape == (2,)
    again = pickle.loads(pickle.dumps(nss.PairedGuide(learned_model)))
    np.testing.assert_array_equal(
        again.inclusion_probabilities(params)["w"], guide.inclusion_probabilities(params)["w"]
    )
    assert again.median(params, X, y)["w_spike"].shape == (3,)
    quantiles = guide.quantiles(params, [0.1, 0.9], X, y)
    assert quantiles["w"].shape == (2, 6)
    assert quantiles["w_spike"].shape == (2, 3)
    assert guide.median(params, X, y)["w_spike"].shape == (3,)
    found = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=(X, y), num_samples=2000)
    found = nss.add_variational_stats(found, svi, result, (X, y))
    ratios = found.sample_stats["log_ratio"].values
    bound = found.sample_stats.attrs["bound"]
    assert abs(ratios.mean() - bound) < 4 * ratios.std() / np.sqrt(2000)
    table = nss.summary(found, round_to=None)
    expected = guide.inclusion_probabilities(params)["w"]
    inclusion = table.loc[[f"w[{k}]" for k in range(6)], "inclusion"].to_numpy(float)
    np.testing.assert_allclose(inclusion, expected, atol=1e-6)
    predictive = Predictive(learned_model, guide=guide, params=params, num_samples=10)
    assert predictive(KEY, X)["y"].shape == (10, 30)
    start = guide.to_init_params(params, X, y, rng_key=KEY, num_chains=2)
    assert start["w_spike"].shape == (2, 3)
    mcmc = numpyro.infer.MCMC(
        nss.PairedGibbs(learned_model),
        num_warmup=10,
        num_samples=10,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, X, y, init_params=start)
    with pytest.raises(ValueError, match="'w' share spikes, expected one"):
        guide.credible_sets(params, X, y)


@pytest.mark.slow
def test_restarts_annealing_and_vmap(x64):
    X, y = data()
    _, guide, result = fitted(model, X, y, num_restarts=4)
    probs = np.asarray(guide.inclusion_probabilities(result.params)["w"])
    assert result.restarts.shape == (4,)
    firsts = np.unique(GROUPS, return_index=True)[1]
    np.testing.assert_array_equal(probs, probs[firsts][list(GROUPS)])

    def fit(y):
        svi = nss.CAVI(model, nss.PairedGuide(model))
        return svi.run(KEY, 150, X, y, progress_bar=False).params["w_auto_linear_4"]

    every = jax.vmap(fit)(jnp.stack([y, -y]))
    np.testing.assert_allclose(every[0], -every[1], atol=1e-8)
    np.testing.assert_allclose(every[0], result.params["w_auto_linear_4"], atol=1e-6)


@pytest.mark.slow
def test_gradients_reach_the_same_bound(x64):
    X, y = data()
    groups = (0,) * 6
    of_one = lambda X, y=None: model(X, y, groups)  # noqa: E731
    _, guide, result = fitted(of_one, X, y)
    svi = SVI(of_one, guide, Adam(0.1), TraceGraph_ELBO(num_particles=10))
    found = svi.run(KEY, 400, X, y, progress_bar=False)
    probs = found.params["w_auto_patterns_8"]
    assert probs.shape == (1, 2)
    np.testing.assert_allclose(np.mean(found.losses[-100:]), result.losses[-1], atol=0.3)


def test_the_standard_mean_field_refuses_groups():
    X, y = data()
    svi = nss.CAVI(model, nss.MeanFieldGuide(model))
    with pytest.raises(ValueError, match=r"MeanFieldGuide: model: got weights \['w'\] that share"):
        svi.run(KEY, 1, X, y)
