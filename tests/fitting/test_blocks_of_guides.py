# SPDX-License-Identifier: Apache-2.0
"""Guides whose correlated weights stand in blocks, against exact posteriors."""

from functools import lru_cache
import pickle

import arviz_base
import numpy as np
import optax
import pytest
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.correlation import clusters, unit_columns
from numpyro_spikeslab.reading.reader import Reader

KEY = random.key(0)


def model(X, y=None, mask=True):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.1, 1.5)
    with numpyro.plate("obs", X.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def hyper(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 5.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion, scale)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(b + X @ w, sigma), obs=y)


def two_sets(X, y=None):
    with numpyro.plate("row", 2), numpyro.plate("column", 2):
        a = nss.spike_slab("a", 0.3)
    with numpyro.plate("rest", X.shape[1] - 4):
        b = nss.spike_slab("b", 0.5, 2.0)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, :4] @ a.reshape(-1) + X[:, 4:] @ b, 0.5), obs=y)


def chain(size, rho, num_obs=200, seed=0):
    """Columns whose neighbours are correlated by rho, and a response with three effects."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_obs, size))
    for j in range(1, size):
        X[:, j] = rho * X[:, j - 1] + np.sqrt(1 - rho**2) * X[:, j]
    w = np.zeros(size)
    w[[1, size // 2, size - 2]] = 0.6, -0.4, 0.4
    return X, X @ w + rng.normal(size=num_obs)


DATA = chain(6, 0.9, 40)
ALL, SOME = [list(range(6))], [[0, 1, 2], [5, 4]]
EVERY = {"model": (model, SOME), "hyper": (hyper, SOME), "two_sets": (two_sets, {"a": [[3, 0, 1]]})}
EVERY_MODEL = pytest.mark.parametrize("name", EVERY)


def fit(model, blocks, *args, steps=200, **kwargs):
    guide = nss.PairedGuide(model, blocks=blocks)
    svi = nss.CAVI(model, guide)
    return guide, svi, svi.run(KEY, steps, *args, progress_bar=False, **kwargs)


@pytest.mark.slow
def test_probabilities_whose_sum_is_rounded_are_drawn_from():
    guide = nss.PairedGuide(model, blocks=SOME)
    svi = nss.CAVI(model, guide)
    params = svi.get_params(svi.init(KEY, *DATA))
    name = "w_auto_patterns_3"
    params[name] *= 1 + 3e-6
    draws = guide.sample_posterior(KEY, params, *DATA, sample_shape=(2000,))
    # all patterns of the start are equally probable; 5 standard errors
    np.testing.assert_allclose(draws["w_spike"][:, :3].mean(0), 0.5, atol=5 * 0.5 / 2000**0.5)


@lru_cache
def fitted(name):
    jax.config.update("jax_enable_x64", True)
    return fit(*EVERY[name], *DATA)


def exact(X, y, weight=1.0):
    return truth.enumerate_models(truth.regression(X, y, 1.0, 0.1, 1.5, weight))


@pytest.mark.slow
def test_one_block_of_all_weights_is_the_exact_posterior(precision):
    guide, _, result = fit(model, ALL, *DATA)
    expected, tolerance = exact(*DATA), {"float32": 2e-3, "float64": 1e-9}[precision]
    close = np.testing.assert_allclose
    close(-result.losses[-1], expected.log_evidence, rtol=1e-5)
    close(guide.inclusion_probabilities(result.params)["w"], expected.inclusion, atol=tolerance)
    close(guide.posterior_mean(result.params)["w"], expected.mean, atol=tolerance)
    draws = guide.sample_posterior(KEY, result.params, *DATA, sample_shape=(20_000,))
    rng = np.random.default_rng(1)
    spikes, slabs = expected.sample(rng, 100_000)
    levels = [0.02, 0.4, 0.7, 0.98]
    found = guide.quantiles(result.params, levels)
    close(found["w"], np.quantile(spikes * slabs, levels, axis=0), atol=0.06)
    close(np.cov(draws["w"].T), np.cov((spikes * slabs).T), atol=0.02)
    close(np.cov(draws["w_slab"].T), np.cov(slabs.T), atol=0.08)
    close(guide.median(result.params)["w"], guide.quantiles(result.params, 0.5)["w"])
    assert found["w_spike"].shape == found["w_slab"].shape == (4, 6)


@pytest.mark.exhaustive
@EVERY_MODEL
def test_the_bound_never_falls_and_is_that_of_numpyro(x64, name):
    guide, svi, result = fitted(name)
    assert np.diff(result.losses[100:]).max() < 1e-6
    elbo = TraceGraph_ELBO(num_particles=20_000)
    found = [
        float(elbo.loss(random.key(k), result.params, svi.model, guide, *DATA)) for k in range(4)
    ]
    assert abs(np.mean(found) - float(result.losses[-1])) < 0.03
    np.testing.assert_allclose(svi.evaluate(result.state, *DATA), result.losses[-1], rtol=1e-9)


@pytest.mark.exhaustive
@EVERY_MODEL
def test_draws_summaries_and_pickles(x64, name):
    guide, svi, result = fitted(name)
    params = result.params
    draws = guide.sample_posterior(KEY, params, *DATA, sample_shape=(20_000,))
    for site, probs in guide.inclusion_probabilities(params).items():
        np.testing.assert_allclose(np.mean(draws[f"{site}_spike"], 0), probs, atol=0.02)
        mean = guide.posterior_mean(params)[site]
        np.testing.assert_allclose(np.mean(draws[site], 0), mean, atol=0.03)
        low, high = guide.quantiles(params, [0.1, 0.9])[site]
        np.testing.assert_array_less(np.mean(draws[site] < low, 0), 0.11)
        np.testing.assert_array_less(np.mean(draws[site] > high, 0), 0.11)
    again = pickle.loads(pickle.dumps(guide))
    fresh = nss.PairedGuide(svi.model, blocks=guide.blocks)
    if name != "two_sets":
        for other in (again, fresh):
            jax.tree.map(
                np.testing.assert_array_equal, other.posterior_mean(params),
                guide.posterior_mean(params),
            )  # fmt: skip
    start = guide.to_init_params(params, *DATA, rng_key=KEY, num_chains=2)
    assert all(x.shape[0] == 2 for x in start.values())
    new = Predictive(svi.model, guide=guide, params=params, num_samples=3)(KEY, DATA[0])
    assert new["y"].shape == (3, 40)


@pytest.mark.exhaustive
def test_importance_ratios_of_an_exact_guide_are_the_evidence(x64):
    guide, svi, result = fit(model, ALL, *DATA)
    data = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=DATA, num_samples=300)
    data = nss.add_variational_stats(data, svi, result, DATA)
    ratios = data["sample_stats"]["log_ratio"].values
    np.testing.assert_allclose(ratios, exact(*DATA).log_evidence, rtol=1e-8)
    assert "w[1]" in nss.summary(data).index
    with pytest.raises(ValueError, match=r"the guide has blocks, .* Give draws from it"):
        guide.credible_sets(result.params, *DATA)
    assert guide.set_shares(result.params, *DATA) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("rho", "most"), [(0.5, 0.7), (0.97, 0.2)])
def test_blocks_are_much_nearer_to_the_truth_than_pairs(x64, rho, most):
    """The largest errors of inclusion probabilities, of three designs."""
    halves, errors = [list(range(5)), list(range(5, 10))], {"pairs": 0.0, "blocks": 0.0}
    guides = {"pairs": nss.PairedGuide(model), "blocks": nss.PairedGuide(model, blocks=halves)}
    for seed in range(3):
        data = chain(10, rho, seed=seed)
        for name, guide in guides.items():
            result = nss.CAVI(model, guide).run(KEY, 200, *data, progress_bar=False)
            found = guide.inclusion_probabilities(result.params)["w"]
            errors[name] += np.abs(found - exact(*data).inclusion).max()
    assert errors["blocks"] < most * errors["pairs"]


@pytest.mark.slow
def test_masks_and_missing_values(x64):
    X, y = DATA
    seen = np.arange(40) % 3 > 0
    guide, _, result = fit(model, ALL, X, np.where(seen, y, np.nan), mask=seen)
    expected = exact(X, y, seen.astype(float))
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, expected.inclusion, atol=1e-8)


@pytest.mark.exhaustive
def test_restarts_states_and_maps(x64):
    guide = nss.PairedGuide(hyper, blocks=SOME)
    svi = nss.CAVI(hyper, guide, num_restarts=3)
    result = svi.run(KEY, 150, *DATA, progress_bar=False)
    assert result.restarts.shape == (3,)
    one = nss.CAVI(hyper, guide)
    half = one.run(KEY, 110, *DATA, progress_bar=False)
    rest = one.run(KEY, 40, *DATA, progress_bar=False, init_state=half.state)
    whole = one.run(KEY, 150, *DATA, progress_bar=False)
    np.testing.assert_allclose(rest.losses[-1], whole.losses[-1], rtol=1e-12)
    X, y = DATA
    mapped = jax.vmap(lambda y: one.run(KEY, 150, X, y, progress_bar=False).params)
    found = mapped(jnp.stack([jnp.asarray(y), 2 * jnp.asarray(y)]))
    assert found["w_auto_patterns_3"].shape == (2, 1, 8)
    np.testing.assert_allclose(
        found["w_auto_patterns_3"][0], whole.params["w_auto_patterns_3"], atol=1e-6
    )


@pytest.mark.exhaustive
def test_stock_svi_climbs_towards_the_bound_of_cavi(x64):
    _, _, result = fitted("model")
    svi = SVI(
        model,
        nss.PairedGuide(model, blocks=SOME),
        optax.adam(0.02),
        TraceGraph_ELBO(num_particles=20),
    )
    found = svi.run(KEY, 1500, *DATA, progress_bar=False)
    gaps = np.asarray(found.losses) - float(result.losses[-1])
    assert set(found.params) == set(result.params)
    assert -0.5 < gaps[-300:].mean() < 0.2 * gaps[:50].mean()


# The search for blocks


def test_clusters_are_capped_and_deterministic():
    X, _ = chain(20, 0.9)
    unit = unit_columns(X)
    found = clusters(unit)
    assert max(map(len, found)) <= 8 and found == clusters(unit.copy())
    assert clusters(np.eye(4)) == []
    copies = unit_columns(np.repeat(X[:, :1], 11, axis=1) * np.arange(1, 12))
    assert sorted(map(len, clusters(copies))) == [3, 8]


@pytest.mark.parametrize(
    "blocks",
    [
        [[0, 1], [1, 2]],
        [[0, 6]],
        [[-1, 0]],
        [[]],
        [list(range(11))],
        [[0, 0]],
        [0, 1],
        [[0.5, 1]],
        [[True, False]],
        "all",
        3,
        {"v": [[0, 1]]},
    ],
)
def test_wrong_blocks_are_refused(blocks):
    with pytest.raises(ValueError, match=r"PairedGuide: blocks.* expected (disjoint )?sets "):
        nss.PairedGuide(model, blocks=blocks).set_up(DATA, {})


@pytest.mark.slow
def test_models_without_columns_are_refused():
    Y = np.random.default_rng(0).normal(size=(20, 3))
    factors = nss.models.factor_analysis(2)
    with pytest.raises(
        ValueError, match=r"blocks of 'W': got weights that multiply .*expected the columns.*out"
    ):
        fit(factors, [[0, 1]], Y, steps=1)
    with pytest.raises(ValueError, match=r"sets by site of \['a', 'b'\]"):
        fit(two_sets, [[0, 1]], *DATA, steps=1)


def test_what_is_found_among_columns_needs_them():
    X, y = (jnp.asarray(x) for x in DATA)
    guide = nss.PairedGuide(model, blocks="auto")
    with pytest.raises(ValueError, match=r"blocks='auto': got columns .*list the blocks"):
        handlers.seed(guide, 0)(X)
    svi = nss.CAVI(model, guide)
    with pytest.raises(ValueError, match="outside of transformations"):
        jax.vmap(lambda X: svi.run(KEY, 1, X, y, progress_bar=False).losses)(jnp.stack([X, X]))


# Found by a hostile reader


def loud(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.01), obs=y)


@pytest.mark.parametrize("eps", [0.0, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_near_copies_with_a_strong_signal_are_told_apart_in_single_precision(precision, eps):
    """Squares that the patterns explain, of which they are differences, are of the order 1e7."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 1)) + eps * rng.normal(size=(2000, 3))
    y = X[:, 0] + 0.01 * rng.normal(size=2000)
    X, y = X.astype(np.float32), y.astype(np.float32)
    every = truth.regression(X.astype(float), y.astype(float), 0.01, 0.3, 1.0)
    guide, _, result = fit(loud, [[0, 1, 2]], jnp.asarray(X), jnp.asarray(y), steps=120)
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, truth.enumerate_models(every).inclusion, atol=2e-3)


@pytest.mark.slow
def test_states_know_their_blocks(x64):
    guide, svi, result = fit(model, [[0, 1, 2]], *DATA)
    same = nss.CAVI(model, nss.PairedGuide(model, blocks=guide.blocks))
    state, loss = same.update(result.state, *DATA)
    expected, own_loss = svi.update(result.state, *DATA)
    np.testing.assert_allclose(loss, own_loss, rtol=1e-12)
    for key, x in same.get_params(state).items():
        np.testing.assert_allclose(x, svi.get_params(expected)[key], rtol=1e-9, atol=1e-12)
    other = nss.CAVI(model, nss.PairedGuide(model, blocks=[[3, 4, 5]]))
    for use in (other.update, other.evaluate):
        with pytest.raises(ValueError, match=r"with other blocks or groups\. Make the guide"):
            use(result.state, *DATA)


def test_parameters_of_sites_with_blocks_of_equal_sizes_come_back(x64):
    guide = nss.PairedGuide(two_sets, blocks={"a": [[3, 0], [1, 2]], "b": [[1, 0]]})
    guide.set_up(DATA, {})
    form = Reader(two_sets, "test")(DATA, {}).form
    rng = np.random.default_rng(0)
    params = {
        # a root of a precision stays one
        k: np.tril(rng.uniform(0.5, 1.0, np.shape(x))) if "tril" in k else rng.uniform(size=x.shape)
        for k, (x, _) in guide.start().items()
    }
    params = {k: jnp.asarray(x) for k, x in params.items()}
    assert params["a_auto_patterns_2"].shape == (2, 4)
    back = guide.factors.unpack(form.pairs, guide.factors.pack(form, params))
    assert back.keys() == params.keys()
    for key, x in params.items():
        np.testing.assert_array_equal(back[key], x)


def test_rows_that_are_not_seen_say_nothing_of_blocks(x64):
    X, y = chain(4, 0.2, 60)
    # zeros in the place of what is not seen would be a common effect
    X += 5
    seen = np.arange(60) < 40
    X[~seen] = 100 * np.random.default_rng(0).normal(size=(20, 1)) * np.array([1, -1, 0, 1])
    found = {}
    for name, args in {"all": (X, y, seen), "seen": (X[seen], y[seen], np.ones(40, bool))}.items():
        guide = nss.PairedGuide(model, blocks="auto")
        guide.set_up(args, {})
        found[name] = guide.blocks
    assert found["all"] == found["seen"]
    X[~seen] = np.nan
    guide = nss.PairedGuide(model, blocks="auto")
    guide.set_up((X, y, seen), {})
    assert guide.blocks == found["seen"]
