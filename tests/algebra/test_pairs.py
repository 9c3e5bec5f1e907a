# SPDX-License-Identifier: Apache-2.0
"""The pair's conditional and the sweeps against exact posteriors."""

import numpy as np
from pair_problems import PRECISION, arrays, close, exact_posterior, one_by_one, problem
import pytest
from scipy import stats
from scipy.special import expit, logit
import truth

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import pairs, task_sweeps
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.task_sweeps import (
    TaskProducts,
    gibbs_masked_sweep,
    gibbs_task_sweep,
    masked_task_sweep,
    task_sweep,
)
from numpyro_spikeslab.algebra.variates import logistic_and_normal

# compiled once for all tests of the same shapes
run_sweep = jax.jit(pairs.sweep, static_argnames="put")


# Truth against another truth: the enumeration that the other tests compare with


@pytest.mark.parametrize("kind", truth.DESIGNS)
def test_enumeration_equals_the_marginal_normal_densities(kind):
    X = truth.design(kind)
    y = truth.response(X)
    scale, weight = np.linspace(0.3, 1.0, len(y)), np.arange(len(y)) % 4 > 0
    given = truth.regression(X, y, scale, np.linspace(0.2, 0.7, 4), [0.5, 1.0, 2.0, 3.0], weight)
    exact = truth.enumerate_models(given)
    log_joint = []
    for model in exact.models:
        covariance = np.diag(scale**2) + (X * (model * given.slab_scale) ** 2) @ X.T
        log_prior = np.sum(np.where(model, np.log(given.inclusion), np.log1p(-given.inclusion)))
        marginal = stats.multivariate_normal(cov=covariance[weight][:, weight])
        log_joint.append(log_prior + marginal.logpdf(y[weight]))
    assert exact.log_evidence == pytest.approx(np.logaddexp.reduce(log_joint), abs=1e-9)
    probs = np.exp(np.array(log_joint) - exact.log_evidence)
    np.testing.assert_allclose(exact.probs, probs, atol=1e-9)


# The conditional of a pair


@pytest.mark.parametrize("strength", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("log_odds", [-4.0, 2.0])
def test_the_conditional_is_that_of_numerical_integration(precision, strength, log_odds):
    rng = np.random.default_rng(0)
    feature = strength * rng.normal(size=12)
    y, variance = rng.normal(size=12), 1.7
    # the trapezoidal rule is exact to rounding for what falls off as fast as a Normal
    grid = np.linspace(-15.0, 15.0, 20_001)
    likelihood = stats.norm.logpdf(y[:, None] - feature[:, None] * grid, scale=PRECISION**-0.5)
    joint = np.exp(likelihood.sum(axis=0) + stats.norm.logpdf(grid, scale=variance**0.5))
    moments = [np.trapezoid(grid**power * joint, grid) for power in range(3)]
    null = np.exp(stats.norm.logpdf(y, scale=PRECISION**-0.5).sum())
    design, residual, w, prior = arrays(feature[:, None], y, np.zeros(1), [log_odds], [variance])
    _, pair = run_sweep(design, residual, w, PRECISION, prior, pairs.expectation())
    mean = moments[1] / moments[0]
    expected = (log_odds + np.log(moments[0] / null), mean, moments[2] / moments[0] - mean**2)
    tolerance = {"float32": 2e-4, "float64": 1e-6}[precision]
    np.testing.assert_allclose(np.ravel(pair), expected, rtol=tolerance, atol=tolerance)


# Blocks, tiles and devices change nothing


def puts(put, shape, seed=1):
    """What a sweep puts back, its noise, and the same in numpy for single entries."""
    rng = np.random.default_rng(seed)
    logistic, normal = rng.logistic(size=shape), rng.normal(size=shape)
    if put == "expectation":
        return pairs.expectation(1.7), None, lambda _, odds, loc, var: expit(odds / 1.7) * loc

    def draw(index, odds, loc, variance):
        return (odds > logistic[index]) * (loc + np.sqrt(variance) * normal[index])

    return pairs.draw, (jnp.asarray(logistic), jnp.asarray(normal)), draw


@pytest.mark.parametrize("put", ["expectation", "draw"])
@pytest.mark.parametrize(("size", "block_size"), [(1, 50), (7, 1), (7, 50), (11, 4)])
def test_a_sweep_of_a_design_visits_one_feature_after_the_other(precision, put, size, block_size):
    given = X, y, *_ = problem(size)
    design, residual, w, prior = arrays(*given, block_size)
    chosen, noise, weight = puts(put, size)
    residual, pair = run_sweep(design, residual, w, PRECISION, prior, chosen, noise=noise)
    expected, conditionals = one_by_one(*given, lambda m, *pair: (weight(m, *pair), pair))
    close(residual, y - X @ expected, precision)
    close(chosen(pair, noise), expected, precision)
    for x, y in zip(pair, conditionals, strict=True):
        close(x, y, precision)


def test_blocks_cover_the_whitened_design_with_few_zero_features(precision):
    for size in (1, 63, 64, 65, 128, 129, 191):
        X, _, w, *_ = problem(size)
        whitening = np.linspace(0.0, 2.0, len(X))
        design = pairs.block_design(jnp.asarray(X.T), jnp.asarray(whitening), 64)
        blocks, features = design.rows.shape[:2]
        assert 0 <= blocks * features - size < blocks and features <= 64
        close(pairs.predictor(design, jnp.asarray(w)), whitening * (X @ w), precision)
        close(pairs.feature_squares(design, size), whitening**2 @ X**2, precision)


Q, M, N = 8, 5, 15
# Tasks of a tile, devices and features of a block: tiles that are full, not full and larger than
# all; devices with the same number of tasks or not; blocks of one, not full and larger than all.
CUTS = [(3, 1, 1), (3, 1, 3), (4, 1, 16), (512, 4, 3), (3, 2, 3), (3, 5, 3)]
KINDS = "shared", "own", "shared, extra", "own, extra", "masked"


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("put", ["expectation", "draw"])
@pytest.mark.parametrize(
    ("kind", "tile", "devices", "block"),
    [
        *((kind, 3, 1, 3) for kind in KINDS),
        *(pytest.param(k, *cut, marks=pytest.mark.slow) for k in KINDS for cut in CUTS),
    ],
)
def test_sweeps_of_tasks_visit_one_feature_after_the_other(
    precision, kind, tile, devices, block, put, one_row, monkeypatch
):
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", block)
    monkeypatch.setattr(task_sweeps, "TILE", tile)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    rng = np.random.default_rng(2)
    features, extra = rng.normal(size=(M, N)), rng.normal(size=(Q, 2, M)) * ("extra" in kind)
    relative = rng.choice([0.0, 0.5, 2.0], (N, Q)) if kind[0] in "om" else np.ones((N, Q))
    y, w = rng.normal(size=(N, Q)), rng.normal(size=(Q, M))
    rows = 1 if one_row else Q
    log_odds, variance = rng.normal(size=(rows, M)), rng.uniform(0.3, 3.0, (rows, M))
    chosen, noise, weight = puts(put, (Q, M))
    prior, tau = pairs.Prior(*map(jnp.asarray, (log_odds, variance))), jnp.full(Q, PRECISION)

    def swept():
        if kind != "masked":
            weighed = relative[:, : 1 if kind.startswith("shared") else Q]
            gram = np.einsum("mn,kn,nq->qmk", features, features, weighed)
            more = jnp.asarray(extra) if "extra" in kind else None
            linear = (features @ (relative * y)).T
            products = TaskProducts(jnp.asarray(gram), jnp.asarray(linear), more)
            return task_sweep(products, jnp.asarray(w), tau, prior, chosen, noise)
        given = map(jnp.asarray, (y, relative, w))

        def visit(tile, observations):
            weights, tau, prior, noise = tile
            squares = jnp.asarray(features) ** 2 @ observations[1]
            at = pairs.coordinates(squares, tau, prior)
            args = jnp.asarray(features), observations, weights, tau, at, chosen, noise
            return task_sweeps.masked_sweep(*args)[0]

        y_, z, w_ = given
        found = task_sweeps.in_tiles(visit, (w_, tau, prior, noise), (y_, z))
        return found

    result = swept()
    for q in range(Q):
        root = np.sqrt(relative[:, q])[:, None]
        X = np.concatenate([root * features.T, extra[q]])
        target = np.concatenate([root[:, 0] * y[:, q], np.zeros(2)])
        own = (x[0 if one_row else q] for x in (log_odds, variance))
        put_q = lambda m, *pair, q=q: (weight((q, m), *pair), pair)  # noqa: E731
        _, expected = one_by_one(X, target, w[q], *own, put_q)
        for x, e in zip(result, expected, strict=True):
            close(x[q], e, precision)


def masked_tasks(var=0.0):
    rng = np.random.default_rng(3)
    mean, relative = rng.normal(size=(M, N)), rng.choice([0.0, 0.5, 2.0], (N, Q))
    var, y = var * rng.uniform(size=(M, N)), rng.normal(size=(N, Q))
    prior = pairs.Prior(*map(jnp.asarray, (rng.normal(size=(Q, M)), rng.uniform(0.3, 3, (Q, M)))))
    tau, w = rng.uniform(0.5, 4.0, Q), rng.normal(size=(Q, M))
    gram = np.einsum("mn,kn,nq->qmk", mean, mean, relative)
    gram[:, range(M), range(M)] += (var @ relative).T
    linear = (mean @ (relative * y)).T
    given = map(jnp.asarray, (mean, var, y, relative, w, tau, gram, linear))
    return *given, prior


@pytest.mark.parametrize(("tile", "block"), [(3, 2), (512, 8)])
def test_draws_of_tiles_are_those_of_gram_matrices(precision, tile, block, monkeypatch):
    """Chains of many tasks with missing entries have the memory of their observations."""
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", block)
    monkeypatch.setattr(task_sweeps, "TILE", tile)
    features, _, y, relative, w, tau, gram, linear, prior = masked_tasks()
    noise = logistic_and_normal(random.key(0), w)
    expected = gibbs_task_sweep(noise, TaskProducts(gram, linear), w, tau, prior)
    spikes, slabs, probs = gibbs_masked_sweep(noise, features, (y, relative), w, tau, prior)
    np.testing.assert_array_equal(spikes, expected[0])
    close(slabs, expected[1], precision)
    close(probs, expected[2], precision)
    memory = jax.jit(gibbs_masked_sweep).lower(noise, features, (y, relative), w, tau, prior)
    assert f"{Q}x{M}x{M}x" not in memory.as_text()


@pytest.mark.parametrize("tile", [3, 512])
def test_expectations_of_tiles_have_the_squares_of_gram_matrices(precision, tile, monkeypatch):
    """The variance of a feature comes with the square of a weight, whatever its mean."""
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", 2)
    monkeypatch.setattr(task_sweeps, "TILE", tile)
    mean, var, y, relative, w, tau, gram, linear, prior = masked_tasks(0.5)
    odds, loc, variance = task_sweep(
        TaskProducts(gram, linear), w, tau, prior, pairs.expectation(1.5)
    )
    weights = PairedMeanField(jnp.full((Q, M), 0.5), 2 * w, jnp.ones((Q, M)))
    new, squares = masked_task_sweep((mean, var), (y, relative), weights, tau, prior, 1.5)
    for x, e in zip(new, (expit(np.asarray(odds) / 1.5), loc, np.sqrt(variance)), strict=True):
        close(x, e, precision)
    W = np.asarray(new.mean)
    second = np.einsum("qmk,qm,qk->q", gram, W, W) + np.einsum("qmm,qm->q", gram, new.variance)
    expected = np.sum(relative * y**2, axis=0) - 2 * np.sum(W * linear, axis=1) + second
    close(squares, expected, precision)


# The Gibbs sweep


@jax.jit
def gibbs_sweeps(keys, design, residual, weights, prior):
    """One sweep from each of many weights."""

    def one(key, residual, weights):
        noise = logistic_and_normal(key, weights)
        return pairs.gibbs_sweep(noise, design, residual, weights, PRECISION, prior)

    return jax.vmap(one)(keys, residual, weights)


@pytest.mark.parametrize("kind", truth.DESIGNS)
def test_a_gibbs_sweep_leaves_the_exact_posterior_invariant(x64, kind):
    size = 20_000
    given = X, y, *_ = problem(4, kind=kind)
    exact = exact_posterior(*given)
    spikes, slabs = exact.sample(np.random.default_rng(0), size)
    w = spikes * slabs
    keys = random.split(random.key(0), size)
    design, *_, prior = arrays(*given, 3)
    out = gibbs_sweeps(keys, design, jnp.asarray(y - w @ X.T), jnp.asarray(w), prior)
    spikes, slabs, probs = (np.asarray(x) for x in out)
    w = spikes * slabs
    # 27 tests of independent draws for each design, at 1e-5 each: a false alarm in 1 of 740 keys
    counts = np.bincount(spikes @ [8, 4, 2, 1], minlength=16)
    # rare models count with the most probable one
    expected = size * exact.probs
    cells = np.where(expected > 5, np.arange(16), expected.argmax())
    counts, expected = np.bincount(cells, counts), np.bincount(cells, expected)
    assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-5
    z = stats.norm.isf(1e-5 / 2)

    def agrees(draws, mean):
        error = draws.std(axis=0) / np.sqrt(size)
        assert np.all(np.abs(draws.mean(axis=0) - mean) < z * error + 1e-12)

    agrees(w, exact.mean)
    agrees(
        np.einsum("ni,nj->nij", w, w)[:, *np.triu_indices(4)],
        exact.second_moments[np.triu_indices(4)],
    )
    agrees(slabs, exact.probs @ exact.locs)
    agrees(probs, exact.inclusion)
    agrees(slabs**2, exact.probs @ (exact.locs**2 + np.diagonal(exact.covariances, 0, 1, 2)))


def test_a_gibbs_sweep_draws_excluded_slabs_from_their_prior(x64):
    size = 20_000
    X, y, w, log_odds, variance = problem(4, kind="independent")
    given = X, 0.3 * y, w, log_odds, variance
    design, *_, prior = arrays(*given, 3)
    keys = random.split(random.key(2), size)
    residual, start = jnp.tile(given[1], (size, 1)), jnp.zeros((size, 4))
    out = gibbs_sweeps(keys, design, residual, start, prior)
    spikes, slabs, probs = (np.asarray(x) for x in out)
    # eight tests at 1e-4 each: a false alarm in 1 of 1250 keys
    for m in range(4):
        excluded = slabs[:, m][spikes[:, m] == 0]
        assert stats.kstest(excluded, stats.norm(0.0, variance[m] ** 0.5).cdf).pvalue > 1e-4
        assert stats.ttest_1samp(spikes[:, m] - probs[:, m], 0.0).pvalue > 1e-4
    # the first feature's probability is that of its conditional at the given weights
    odds = one_by_one(*given[:2], np.zeros(4), *given[3:], lambda m, odds, *_: (0.0, (odds,)))[1]
    np.testing.assert_allclose(logit(probs[:, 0]), odds[0, 0], atol=1e-8)
