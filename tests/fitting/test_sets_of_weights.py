# SPDX-License-Identifier: Apache-2.0
"""Guides with blocks and groups of weights, against exact posteriors and in NumPyro and ArviZ."""

from functools import cache, partial
import pickle

import arviz_base
import numpy as np
import pytest
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, Predictive, TraceGraph_ELBO
from numpyro.optim import Adam

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.correlation import clusters, unit_columns
from numpyro_spikeslab.reading.reader import Reader

KEY = random.key(0)
GROUPS = (1, 0, 1, 2, 2, 1)
BLOCKS = [[0, 1, 2], [5, 4]]


def model(X, y=None, groups=None, mask=True, sigma=1.0):
    if groups is not None:
        w = nss.spike_slab("w", 0.1, 1.5, groups=groups)
    else:
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.1, 1.5)
    with numpyro.plate("obs", X.shape[0]), handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def hyper(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 5.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion, scale)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(b + X @ w, sigma), obs=y)


def grouped(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("kind", 3):
        inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 3.0))
    w = nss.spike_slab("w", inclusion, scale, groups=GROUPS)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def two_sites(X, y=None):
    with numpyro.plate("row", 2), numpyro.plate("column", 2):
        a = nss.spike_slab("a", 0.3)
    b = nss.spike_slab("b", 0.5, 2.0, groups=[0, 0])
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
MODELS = {
    "blocks": (hyper, BLOCKS),
    "groups": (grouped, None),
    "blocks beside a group": (two_sites, {"a": [[3, 0, 1]]}),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS, scope="module")


def fit(model, blocks, *args, steps=200, **kwargs):
    guide = nss.PairedGuide(model, blocks=blocks)
    svi = nss.CAVI(model, guide)
    return guide, svi, svi.run(KEY, steps, *args, progress_bar=False, **kwargs)


@cache
def fitted(name):
    assert jax.config.jax_enable_x64
    return fit(*MODELS[name], *DATA)


def exact(X, y, groups=None, weight=1.0):
    if groups is None:
        return truth.enumerate_models(truth.regression(X, y, 1.0, 0.1, 1.5, weight))
    problem = truth.regression(X, y, 1.0, [0.1] + [0.5] * 5, 1.5, weight)
    return truth.share_spikes(truth.enumerate_models(problem), groups)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, (0,) * 6], ids=["block", "group"])
def test_one_set_of_all_weights_is_the_exact_posterior(precision, groups):
    blocks = [list(range(6))] if groups is None else None
    guide, svi, result = fit(partial(model, groups=groups), blocks, *DATA)
    expected, tolerance = exact(*DATA, groups), {"float32": 2e-3, "float64": 1e-9}[precision]
    close = np.testing.assert_allclose
    close(-result.losses[-1], expected.log_evidence, rtol=1e-5)
    close(guide.inclusion_probabilities(result.params)["w"], expected.inclusion, atol=tolerance)
    close(guide.posterior_mean(result.params)["w"], expected.mean, atol=tolerance)
    draws = guide.sample_posterior(KEY, result.params, *DATA, sample_shape=(20_000,))
    spikes, slabs = expected.sample(np.random.default_rng(1), 100_000)
    levels = [0.02, 0.4, 0.7, 0.98]
    found = guide.quantiles(result.params, levels, *DATA)
    close(found["w"], np.quantile(spikes * slabs, levels, axis=0), atol=0.06)
    close(np.cov(draws["w"].T), np.cov((spikes * slabs).T), atol=0.02)
    close(np.cov(draws["w_slab"].T), np.cov(slabs.T), atol=0.08)
    assert found["w_spike"].shape == (4, 6 if groups is None else 1)
    # the importance ratios of an exact guide are the evidence
    data = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=DATA, num_samples=300)
    ratios = nss.add_variational_stats(data, svi, result, DATA).sample_stats["log_ratio"].values
    close(ratios, expected.log_evidence, rtol=1e-4 if precision == "float32" else 1e-8)


@pytest.mark.slow
@EVERY_MODEL
def test_the_bound_never_falls_and_is_that_of_numpyro(x64, name):
    guide, svi, result = fitted(name)
    assert np.diff(result.losses[100:]).max() < 1e-6
    np.testing.assert_allclose(svi.evaluate(result.state, *DATA), result.losses[-1], rtol=1e-9)

    @jax.jit
    def estimate(key):
        elbo = TraceGraph_ELBO(num_particles=20_000)
        return elbo.loss(key, result.params, svi.model, guide, *DATA)

    estimates = [float(estimate(key)) for key in random.split(KEY, 4)]
    assert abs(np.mean(estimates) - float(result.losses[-1])) < 0.03


@pytest.mark.exhaustive
@EVERY_MODEL
def test_draws_summaries_and_pickles(x64, name):
    guide, svi, result = fitted(name)
    params = result.params
    draws = guide.sample_posterior(KEY, params, *DATA, sample_shape=(20_000,))
    medians = guide.median(params, *DATA)
    for site, probs in guide.inclusion_probabilities(params).items():
        included = np.mean(draws[site] != 0, 0)
        np.testing.assert_allclose(included, probs, atol=0.02)
        mean = guide.posterior_mean(params)[site]
        np.testing.assert_allclose(np.mean(draws[site], 0), mean, atol=0.03)
        low, high = guide.quantiles(params, [0.1, 0.9], *DATA)[site]
        np.testing.assert_array_less(np.mean(draws[site] < low, 0), 0.11)
        np.testing.assert_array_less(np.mean(draws[site] > high, 0), 0.11)
        assert medians[f"{site}_spike"].shape == draws[f"{site}_spike"].shape[1:]
    again = pickle.loads(pickle.dumps(guide))
    jax.tree.map(
        np.testing.assert_array_equal, again.posterior_mean(params), guide.posterior_mean(params)
    )
    new = Predictive(svi.model, guide=guide, params=params, num_samples=3)(KEY, DATA[0])
    assert new["y"].shape == (3, 40)
    start = guide.to_init_params(params, *DATA, rng_key=KEY, num_chains=2)
    mcmc = MCMC(
        nss.PairedGibbs(svi.model), num_warmup=5, num_samples=5, num_chains=2,
        chain_method="vectorized", progress_bar=False,
    )  # fmt: skip
    mcmc.run(KEY, *DATA, init_params=start)
    if name == "groups":
        # scales count weights, inclusion counts groups
        for site in ("inclusion", "scale", "sigma"):
            for factor in (0.98, 1.02):
                moved = params | {f"{site}_auto_loc": params[f"{site}_auto_loc"] * factor}
                state = svi.init(KEY, *DATA, init_params=moved)
                assert svi.evaluate(state, *DATA) > result.losses[-1]
    with pytest.raises(ValueError, match=r"spike|blocks"):
        guide.credible_sets(params, *DATA)


@pytest.mark.exhaustive
@EVERY_MODEL
def test_restarts_states_and_maps(x64, name):
    guide, one, _ = fitted(name)
    svi = nss.CAVI(one.model, guide, num_restarts=3)
    assert svi.run(KEY, 150, *DATA, progress_bar=False).restarts.shape == (3,)
    half = one.run(KEY, 110, *DATA, progress_bar=False)
    end = one.run(KEY, 40, *DATA, progress_bar=False, init_state=half.state)
    whole = one.run(KEY, 150, *DATA, progress_bar=False)
    np.testing.assert_allclose(end.losses[-1], whole.losses[-1], rtol=1e-12)
    X, y = DATA
    mapped = jax.vmap(lambda y: one.run(KEY, 150, X, y, progress_bar=False).params)
    params = mapped(jnp.stack([jnp.asarray(y), 2 * jnp.asarray(y)]))
    for key, x in whole.params.items():
        np.testing.assert_allclose(params[key][0], x, atol=1e-6)


@pytest.mark.slow
def test_stock_svi_climbs_to_the_bound_of_cavi(x64):
    """Of a padded group, whose padding counts nothing."""
    of_one = partial(model, groups=(0,) * 6)
    guide, _, result = fit(of_one, None, *DATA)
    svi = SVI(of_one, guide, Adam(0.1), TraceGraph_ELBO(num_particles=10))
    found = svi.run(KEY, 400, *DATA, progress_bar=False)
    assert found.params["w_auto_linear_8"].shape == (1, 8)
    # whatever the parameters of the padding, also in the bound
    moved = found.params | {"w_auto_linear_8": found.params["w_auto_linear_8"].at[:, 6:].set(3.0)}
    bounds = []
    for params in (found.params, moved):
        cavi = nss.CAVI(of_one, guide)
        bounds.append(cavi.evaluate(cavi.init(KEY, *DATA, init_params=params), *DATA))
    assert bounds[0] == bounds[1]
    np.testing.assert_allclose(np.mean(found.losses[-100:]), result.losses[-1], atol=0.3)


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
@pytest.mark.parametrize("groups", [None, (0,) * 6], ids=["block", "group"])
def test_masks_and_missing_values(x64, groups):
    X, y = DATA
    is_seen = np.arange(40) % 3 > 0
    blocks = [list(range(6))] if groups is None else None
    responses = np.where(is_seen, y, np.nan)
    guide, _, result = fit(partial(model, groups=groups), blocks, X, responses, mask=is_seen)
    expected = exact(X, y, groups, is_seen.astype(float))
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, expected.inclusion, atol=1e-8)


@pytest.mark.parametrize("eps", [0.0, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_near_copies_with_a_strong_signal_are_told_apart_in_single_precision(precision, eps):
    """Squares that the patterns explain, of which they are differences, are of the order 1e7."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 1)) + eps * rng.normal(size=(2000, 3))
    y = X[:, 0] + 0.01 * rng.normal(size=2000)
    X, y = X.astype(np.float32), y.astype(np.float32)
    problem = truth.regression(X.astype(float), y.astype(float), 0.01, 0.1, 1.5)
    loud = partial(model, sigma=0.01)
    guide, _, result = fit(loud, [[0, 1, 2]], jnp.asarray(X), jnp.asarray(y), steps=120)
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, truth.enumerate_models(problem).inclusion, atol=2e-3)


@pytest.mark.slow
def test_probabilities_whose_sum_is_rounded_are_drawn_from():
    # a program of its own, for others are traced in double precision
    (X, y), of_noise = map(jnp.asarray, DATA), partial(model, sigma=0.5)
    guide = nss.PairedGuide(of_noise, blocks=BLOCKS)
    svi = nss.CAVI(of_noise, guide)
    params = svi.get_params(svi.init(KEY, X, y))
    params["w_auto_patterns_3"] *= 1 + 3e-6
    draws = guide.sample_posterior(KEY, params, X, y, sample_shape=(2000,))
    # all patterns of the start are equally probable; 5 standard errors
    np.testing.assert_allclose(draws["w_spike"][:, :3].mean(0), 0.5, atol=5 * 0.5 / 2000**0.5)


@pytest.mark.slow
def test_states_know_their_sets(x64):
    guide, svi, result = fit(model, [[0, 1, 2]], *DATA)
    same = nss.CAVI(model, nss.PairedGuide(model, blocks=guide.blocks))
    _, loss = same.update(result.state, *DATA)
    np.testing.assert_allclose(loss, svi.update(result.state, *DATA)[1], rtol=1e-12)
    for others in ([[3, 4, 5]], None):
        other = nss.CAVI(model, nss.PairedGuide(model, blocks=others))
        for use in (other.update, other.evaluate):
            with pytest.raises(ValueError, match=r"init_state: got .* other blocks or groups"):
                use(result.state, *DATA)


@pytest.mark.parametrize("blocks", [{"a": [[3, 0]]}, None], ids=str)
def test_parameters_come_back_from_the_family(x64, blocks):
    guide = nss.PairedGuide(two_sites, blocks=blocks)
    guide.set_up(DATA, {})
    form = Reader(two_sites, "test")(DATA, {}).form
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.uniform(0.5, 1.0, x.shape)) for k, (x, _) in guide.start().items()}
    params = {k: jnp.tril(x) if "tril" in k else x for k, x in params.items()}
    # blocks and groups of equal sizes; without sets parameters have the shape of the weights
    assert params["b_auto_patterns_2"].shape == (1, 2)
    if blocks is None:
        assert params["a_auto_probs"].shape == (2, 2)
    else:
        assert params["a_auto_patterns_2"].shape == (1, 4)
    back = guide.factors.unpack(form.pairs, guide.factors.pack(form, params))
    assert back.keys() == params.keys()
    jax.tree.map(np.testing.assert_array_equal, back, params)


# The argument and the search


def test_clusters_are_capped_and_deterministic():
    X, _ = chain(20, 0.9)
    unit = unit_columns(X)
    found = clusters(unit)
    assert max(map(len, found)) <= 8 and found == clusters(unit.copy())
    assert clusters(np.eye(4)) == []
    copies = unit_columns(np.repeat(X[:, :1], 11, axis=1) * np.arange(1, 12))
    assert sorted(map(len, clusters(copies))) == [3, 8]


def test_missing_rows_do_not_count_in_the_search(x64):
    X, y = chain(4, 0.2, 60)
    # zeros in the place of missing rows would be a common effect
    X += 5
    is_seen = np.arange(60) < 40
    X[~is_seen] = 100 * np.random.default_rng(0).normal(size=(20, 1)) * np.array([1, -1, 0, 1])
    missing = np.where(is_seen[:, None], X, np.nan)
    found = []
    for args in (
        (X, y, None, is_seen),
        (missing, y, None, is_seen),
        (X[is_seen], y[is_seen], None, np.ones(40, bool)),
    ):
        guide = nss.PairedGuide(model, blocks="auto")
        guide.set_up(args, {})
        found.append(guide.blocks)
    assert found[0] == found[1] == found[2]


REFUSED = [
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
]


@pytest.mark.parametrize("blocks", REFUSED, ids=str)
def test_wrong_blocks_are_refused(x64, blocks):
    with pytest.raises(ValueError, match=r"PairedGuide: blocks.* expected (disjoint )?sets "):
        nss.PairedGuide(model, blocks=blocks).set_up(DATA, {})


def test_models_that_do_not_fit_are_refused(x64):
    factors = nss.models.factor_analysis(2)
    Y = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(ValueError, match=r"blocks of 'W': got .*expected the columns.*out"):
        fit(factors, [[0, 1]], Y, steps=1)
    for blocks in ([[0, 1]], {"b": [[0, 1]]}):
        with pytest.raises(ValueError, match=r"expected sets by site of \['a'\]"):
            nss.PairedGuide(two_sites, blocks=blocks).set_up(DATA, {})
    mean_field = nss.MeanFieldGuide(grouped)
    with pytest.raises(ValueError, match=r"MeanFieldGuide.* share spikes"):
        mean_field.set_up(DATA, {})


def test_the_search_needs_known_columns(x64):
    X, y = (jnp.asarray(x) for x in DATA)
    guide = nss.PairedGuide(model, blocks="auto")
    with pytest.raises(ValueError, match=r"blocks='auto': got columns .*list the blocks"):
        handlers.seed(guide, 0)(X)
    svi = nss.CAVI(model, guide)
    with pytest.raises(ValueError, match="outside of transformations"):
        jax.vmap(lambda X: svi.run(KEY, 1, X, y, progress_bar=False).losses)(jnp.stack([X, X]))
