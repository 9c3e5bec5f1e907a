# SPDX-License-Identifier: Apache-2.0
"""Guides with blocks and groups of weights, against exact posteriors.

That their bounds, runs and draws agree is a claim of ``test_every_model.py``.
"""

from functools import partial

import arviz_base
import numpy as np
import pytest
from refusals import refusals
from scipy import stats
import truth
from truth.grouped_models import two_sites_model

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import MCMC, SVI, TraceGraph_ELBO
from numpyro.optim import Adam

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.correlation import clusters, unit_columns

KEY = random.key(0)


def model(X, y=None, groups=None, mask=True, sigma=1.0):
    if groups is None:
        w = truth.weights(X.shape[1], 0.1, 1.5)
    else:
        w = nss.spike_slab("w", 0.1, 1.5, groups=groups)
    with handlers.mask(mask=mask):
        truth.respond(y, X @ w, sigma)


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


def fit(model, blocks, *args, steps=200, **kwargs):
    guide = nss.PairedGuide(model, blocks=blocks)
    svi = nss.CAVI(model, guide)
    return guide, svi, svi.run(KEY, steps, *args, progress_bar=False, **kwargs)


def exact(X, y, groups=None, weight=1.0):
    if groups is None:
        return truth.enumerate_models(truth.regression(X, y, 1.0, 0.1, 1.5, weight))
    problem = truth.regression(X, y, 1.0, [0.1] + [0.5] * 5, 1.5, weight)
    return truth.share_spikes(truth.enumerate_models(problem), groups)


@pytest.mark.parametrize("groups", [None, (0,) * 6], ids=["block", "group"])
def test_one_set_of_all_weights_is_the_exact_posterior(precision, groups):
    """Also where responses are missing."""
    X, y = DATA
    observed = np.arange(40) % 3 > 0
    args = X, np.where(observed, y, np.nan)
    blocks = [list(range(6))] if groups is None else None
    guide, svi, result = fit(partial(model, groups=groups, mask=observed), blocks, *args)
    expected = exact(X, y, groups, observed.astype(float))
    tolerance = {"float32": 2e-3, "float64": 1e-8}[precision]
    close = np.testing.assert_allclose
    close(-result.losses[-1], expected.log_evidence, rtol=1e-5)
    close(guide.inclusion_probabilities(result.params)["w"], expected.inclusion, atol=tolerance)
    close(guide.posterior_mean(result.params)["w"], expected.mean, atol=tolerance)
    draws = guide.sample_posterior(KEY, result.params, *args, sample_shape=(20_000,))
    spikes, slabs = expected.sample(np.random.default_rng(1), 100_000)
    close(np.cov(draws["w"].T), np.cov((spikes * slabs).T), atol=0.02)
    close(np.cov(draws["w_slab"].T), np.cov(slabs.T), atol=0.08)
    levels = np.array([0.0, 0.02, 0.3, 0.5, 0.7, 0.98, 1.0])
    quantiles = guide.quantiles(result.params, levels, *args)
    assert quantiles["w_spike"].shape == (7, 6 if groups is None else 1)
    sds = np.sqrt(np.diagonal(expected.covariances, axis1=1, axis2=2))
    w, below_slab = np.asarray(quantiles["w"], float), []
    for x in (w, np.asarray(quantiles["w_slab"], float)):
        reached = stats.norm.cdf(x[:, None], expected.locs, sds)
        below_slab.append(np.einsum("s,sp,lsp->lp", expected.probs, expected.models, reached))
    # at zero a level may be anywhere in the atom
    low, high = (below_slab[0] + (1 - expected.inclusion) * y for y in (w > 0, w >= 0))
    levels = levels[:, None]
    assert np.all((low < levels + tolerance) & (high > levels - tolerance))
    expected_levels = np.broadcast_to(levels, w.shape)
    close(below_slab[1] / expected.inclusion, expected_levels, atol=tolerance)
    # the importance ratios of an exact guide are the evidence
    data = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=args, num_samples=300)
    ratios = nss.add_variational_stats(data, svi, result, args).sample_stats["log_ratio"].values
    close(ratios, expected.log_evidence, rtol=1e-4 if precision == "float32" else 1e-7)


@pytest.mark.exhaustive
def test_restarts_maps_and_chains_take_sets(x64):
    guide, svi, result = fit(two_sites_model, {"w": [[3, 0, 1]]}, *DATA)
    assert result.params["w_auto_patterns_3"].shape == (1, 8)
    assert result.params["v_auto_patterns_2"].shape == (1, 2)
    many = nss.CAVI(two_sites_model, guide, num_restarts=3).run(KEY, 200, *DATA, progress_bar=False)
    assert many.restarts.shape == (3,) and many.losses[-1] <= result.losses[-1] + 1e-6
    X, y = map(jnp.asarray, DATA)
    mapped = jax.vmap(lambda y: svi.run(KEY, 200, X, y, progress_bar=False).params)
    params = mapped(jnp.stack([2 * y, y]))
    for name, x in result.params.items():
        np.testing.assert_allclose(params[name][1], x, atol=1e-6)
    start = guide.to_init_params(result.params, *DATA, rng_key=KEY, num_chains=2)
    options = dict(num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc = MCMC(nss.PairedGibbs(two_sites_model), num_warmup=5, num_samples=5, **options)
    mcmc.run(KEY, *DATA, init_params=start)
    with pytest.raises(ValueError, match=r"spike|blocks"):
        guide.credible_sets(result.params, *DATA)


def test_stock_svi_climbs_to_the_bound_of_cavi(x64):
    """Of a padded group, whose padding counts nothing."""
    of_one = partial(model, groups=(0,) * 6)
    guide, cavi, result = fit(of_one, None, *DATA)
    svi = SVI(of_one, guide, Adam(0.1), TraceGraph_ELBO(num_particles=10))
    end = svi.run(KEY, 400, *DATA, progress_bar=False)
    np.testing.assert_allclose(np.mean(end.losses[-100:]), result.losses[-1], atol=0.3)
    # whatever the parameters of the padding
    linear = end.params["w_auto_linear_8"]
    assert linear.shape == (1, 8)
    bounds = [
        cavi.evaluate(cavi.init(KEY, *DATA, init_params=params), *DATA)
        for params in (end.params, end.params | {"w_auto_linear_8": linear.at[:, 6:].set(3.0)})
    ]
    assert bounds[0] == bounds[1]


@pytest.mark.parametrize(("rho", "most"), [(0.5, 0.7), (0.97, 0.2)])
def test_blocks_are_much_nearer_to_the_truth_than_pairs(x64, rho, most):
    """The largest errors of inclusion probabilities, of three designs."""
    halves, errors = [list(range(5)), list(range(5, 10))], {"pairs": 0.0, "blocks": 0.0}
    guides = {"pairs": nss.PairedGuide(model), "blocks": nss.PairedGuide(model, blocks=halves)}
    for seed in range(3):
        data = chain(10, rho, seed=seed)
        for name, guide in guides.items():
            result = nss.CAVI(model, guide).run(KEY, 200, *data, progress_bar=False)
            inclusion = guide.inclusion_probabilities(result.params)["w"]
            errors[name] += np.abs(inclusion - exact(*data).inclusion).max()
    assert errors["blocks"] < most * errors["pairs"]


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_near_copies_with_a_strong_signal_are_told_apart_in_single_precision(precision, eps):
    """Squares that the patterns explain, of which they are differences, are of the order 1e7."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 1)) + eps * rng.normal(size=(2000, 3))
    y = X[:, 0] + 0.01 * rng.normal(size=2000)
    X, y = X.astype(np.float32), y.astype(np.float32)
    problem = truth.regression(X.astype(float), y.astype(float), 0.01, 0.1, 1.5)
    loud = partial(model, sigma=0.01)
    guide, _, result = fit(loud, [[0, 1, 2]], jnp.asarray(X), jnp.asarray(y), steps=120)
    inclusion = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(inclusion, truth.enumerate_models(problem).inclusion, atol=2e-3)


def test_probabilities_whose_sum_is_rounded_are_drawn_from():
    # a program of its own, for others are traced in double precision
    (X, y), of_noise = map(jnp.asarray, DATA), partial(model, sigma=0.5)
    guide = nss.PairedGuide(of_noise, blocks=[[0, 1, 2], [5, 4]])
    svi = nss.CAVI(of_noise, guide)
    params = svi.get_params(svi.init(KEY, X, y))
    params["w_auto_patterns_3"] *= 1 + 3e-6
    draws = guide.sample_posterior(KEY, params, X, y, sample_shape=(2000,))
    # all patterns of the start are equally probable; 5 standard errors
    np.testing.assert_allclose(draws["w_spike"][:, :3].mean(0), 0.5, atol=5 * 0.5 / 2000**0.5)


# The argument and the search


def test_clusters_are_capped_and_deterministic():
    X, _ = chain(20, 0.9)
    unit = unit_columns(X)
    sets = clusters(unit)
    assert max(map(len, sets)) <= 8 and sets == clusters(unit.copy())
    assert clusters(np.eye(4)) == []
    copies = unit_columns(np.repeat(X[:, :1], 11, axis=1) * np.arange(1, 12))
    assert sorted(map(len, clusters(copies))) == [3, 8]


def set_up(model, blocks, *args):
    guide = nss.PairedGuide(model, blocks=blocks)
    guide.set_up(args, {})
    return guide


def test_missing_rows_do_not_count_in_the_search(x64):
    X, y = chain(4, 0.2, 60)
    # zeros in the place of missing rows would be a common effect
    X += 5
    observed = np.arange(60) < 40
    X[~observed] = 100 * np.random.default_rng(0).normal(size=(20, 1)) * np.array([1, -1, 0, 1])
    missing = np.where(observed[:, None], X, np.nan)
    first, *others = (
        set_up(model, "auto", *args).blocks
        for args in (
            (X, y, None, observed),
            (missing, y, None, observed),
            (X[observed], y[observed], None, np.ones(40, bool)),
        )
    )
    assert others == [first, first]


def searched_under_vmap():
    X, y = map(jnp.asarray, DATA)
    svi = nss.CAVI(model, nss.PairedGuide(model, blocks="auto"))
    jax.vmap(lambda X: svi.run(KEY, 1, X, y, progress_bar=False).losses)(jnp.stack([X, X]))


FACTORS = nss.models.factor_analysis(2)
SETS = r"PairedGuide: blocks.* expected (disjoint )?sets "
OF_SITE = r"expected sets by site of \['w'\]"
WRONG = [
    *([[0, 1], [1, 2]], [[0, 6]], [[-1, 0]], [[]], [list(range(11))], [[0, 0]], [0, 1]),
    *([[0.5, 1]], [[True, False]], "all", 3, {"v": [[0, 1]]}),
]
REFUSED = {
    **{str(blocks): (partial(set_up, model, blocks, *DATA), SETS) for blocks in WRONG},
    "factors": (
        lambda: fit(FACTORS, [[0, 1]], np.eye(5, 3), steps=1),
        r"blocks of 'W': got .*expected the columns.*out",
    ),
    "two sites": (lambda: set_up(two_sites_model, [[0, 1]], *DATA), OF_SITE),
    "blocks of groups": (lambda: set_up(two_sites_model, {"v": [[0, 1]]}, *DATA), OF_SITE),
    "mean field": (
        lambda: nss.MeanFieldGuide(partial(model, groups=(0,) * 6)).set_up(DATA, {}),
        r"MeanFieldGuide.* expected one spike_slab without groups",
    ),
    "search without responses": (
        lambda: handlers.seed(nss.PairedGuide(model, blocks="auto"), 0)(jnp.asarray(DATA[0])),
        r"blocks='auto': got columns .*list the blocks",
    ),
    "search under vmap": (searched_under_vmap, "outside of jit and vmap"),
}


test_sets_that_cannot_be_made_are_refused = pytest.mark.usefixtures("x64")(refusals(REFUSED))
