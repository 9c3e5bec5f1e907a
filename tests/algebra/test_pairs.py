# SPDX-License-Identifier: Apache-2.0
"""The pair's conditional and the sweeps against exact posteriors."""

import numpy as np
from pair_problems import PRECISION, arrays, close, exact_posterior, one_by_one, problem
import pytest
from scipy import stats
from scipy.special import expit, logit
import truth

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import pairs, task_sweeps
from numpyro_spikeslab.algebra.families import PairedMeanField
from numpyro_spikeslab.algebra.task_sweeps import masked_task_sweep, task_sweep
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
    _, found = run_sweep(design, residual, w, PRECISION, prior, pairs.expectation())
    mean = moments[1] / moments[0]
    expected = (log_odds + np.log(moments[0] / null), mean, moments[2] / moments[0] - mean**2)
    tolerance = {"float32": 2e-4, "float64": 1e-6}[precision]
    np.testing.assert_allclose(np.ravel(found), expected, rtol=tolerance, atol=tolerance)


def test_draws_are_distributed_as_the_conditional(x64):
    size = 20_000
    log_odds = jnp.array([-3.0, -0.5, 0.0, 2.0])
    loc, variance = 1.5, 0.3
    key_spike, key_slab = random.split(random.key(0))
    noise = random.logistic(key_spike, (4, size)), random.normal(key_slab, (4, size))
    logit = jnp.broadcast_to(log_odds[:, None], (4, size))
    pair = pairs.Conditional(logit, jnp.full_like(logit, loc), jnp.full_like(logit, variance))
    w = np.asarray(jax.jit(pairs.draw)(pair, noise))
    # eight tests at 1e-4 each: a false alarm in 1 of 1250 keys
    for draws, p in zip(w, expit(log_odds), strict=True):
        included = draws[draws != 0.0]
        assert stats.binomtest(len(included), size, float(p)).pvalue > 1e-4
        assert stats.kstest(included, stats.norm(loc, variance**0.5).cdf).pvalue > 1e-4


# The sweep


@pytest.mark.parametrize("put", ["expectation", "draw"])
@pytest.mark.parametrize(("size", "block_size"), [(1, 50), (7, 1), (7, 50), (11, 4)])
def test_blocks_do_not_change_the_sweep(precision, put, size, block_size):
    given = problem(size)
    design, residual, w, prior = arrays(*given, block_size)
    if put == "expectation":
        noise, chosen = None, pairs.expectation(1.7)

        def weight(m, odds, loc, variance):
            return expit(odds / 1.7) * loc

    else:
        rng = np.random.default_rng(1)
        logistic, normal = rng.logistic(size=size), rng.normal(size=size)
        noise, chosen = (jnp.asarray(logistic), jnp.asarray(normal)), pairs.draw

        def weight(m, odds, loc, variance):
            return (odds > logistic[m]) * (loc + np.sqrt(variance) * normal[m])

    residual, found = run_sweep(design, residual, w, PRECISION, prior, chosen, noise=noise)
    expected, conditionals = one_by_one(*given, lambda m, *pair: (weight(m, *pair), pair))
    close(residual, given[1] - given[0] @ expected, precision)
    close(chosen(found, noise), expected, precision)
    for x, y in zip(found, conditionals, strict=True):
        close(x, y, precision)


def test_blocks_cover_the_design_with_few_zero_features():
    for size in (1, 63, 64, 65, 128, 129, 191):
        rows = jnp.ones((size, 3))
        design = pairs.block_design(rows, None)
        blocks, features = design.rows.shape[:2]
        assert 0 <= blocks * features - size < blocks and features <= pairs.BLOCK_SIZE
        assert pairs.feature_squares(design, size).tolist() == [3.0] * size


def test_the_whitening_scales_each_observation(precision):
    X, _, w, *_ = problem(7)
    whitening = np.linspace(0.0, 2.0, len(X))
    design = pairs.block_design(jnp.asarray(X.T), jnp.asarray(whitening), 3)
    close(pairs.predictor(design, jnp.asarray(w)), whitening * (X @ w), precision)
    close(pairs.feature_squares(design, 7), whitening**2 @ X**2, precision)


# Eight tasks: a tile that is not full, full ones, and one that is larger than all; devices that
# have the same number of tasks, and such that have not. Five features: blocks of one each, one that
# is not full, and one that is larger than all. Products of a task's own have neither.
TILES = [(3, 1), (4, 1), (512, 1), (3, 2), (512, 4), (3, 5)]
CUTS = [(False, 16, 512, 1), *((True, block, *tile) for block in (1, 3, 16) for tile in TILES)]


@pytest.mark.slow
@pytest.mark.parametrize("put", ["expectation", "draw"])
@pytest.mark.parametrize(("shared", "block", "tile", "devices"), CUTS)
def test_tiles_of_tasks_and_blocks_of_features_do_not_change_their_sweeps(
    precision, put, shared, block, tile, devices, monkeypatch
):
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", block)
    monkeypatch.setattr(task_sweeps, "TILE", tile)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    Q, M = 8, 5
    tasks = [problem(M, seed=0 if shared else q) for q in range(Q)]
    rng = np.random.default_rng(2)
    y, w = rng.normal(size=(Q, 15)), rng.normal(size=(Q, M))
    log_odds, variance = rng.normal(size=(Q, M)), rng.uniform(0.3, 3.0, (Q, M))
    logistic, normal = rng.logistic(size=(Q, M)), rng.normal(size=(Q, M))
    designs = np.stack([task[0] for task in tasks])
    linear = np.einsum("qnm,qn->qm", designs, y)
    gram = np.einsum("qnm,qnk->qmk", designs, designs)[: 1 if shared else Q]
    noise, chosen = (None, pairs.expectation())
    if put == "draw":
        noise, chosen = (jnp.asarray(logistic), jnp.asarray(normal)), pairs.draw
    found = task_sweep(
        *map(jnp.asarray, (gram, linear, w, np.full(Q, PRECISION))),
        pairs.Prior(jnp.asarray(log_odds), jnp.asarray(variance)),
        chosen,
        noise=noise,
    )

    def weight(q, m, odds, loc, variance):
        if put == "draw":
            return (odds > logistic[q, m]) * (loc + np.sqrt(variance) * normal[q, m])
        return expit(odds) * loc

    for q in range(Q):
        given = designs[q], y[q], w[q], log_odds[q], variance[q]
        _, expected = one_by_one(*given, lambda m, *pair, q=q: (weight(q, m, *pair), pair))
        for x, e in zip(found, expected, strict=True):
            close(x[q], e, precision)


@pytest.mark.parametrize(("block", "shared"), [(2, True), (8, True), (2, False)])
def test_products_that_each_task_has_in_addition_are_those_of_a_matrix_of_its_own(
    precision, block, shared, monkeypatch
):
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", block)
    monkeypatch.setattr(task_sweeps, "TILE", 3)
    Q, M, K = 8, 5, 2
    rng = np.random.default_rng(2)
    features, more = rng.normal(size=(1 if shared else Q, 15, M)), rng.normal(size=(Q, K, M))
    gram = np.einsum("qnm,qnk->qmk", features, features)
    given = rng.normal(size=(Q, M)), rng.normal(size=(Q, M)), rng.uniform(0.5, 4.0, Q)
    prior = rng.normal(size=(Q, M)), rng.uniform(0.3, 3.0, (Q, M))
    gram, more, given = jax.tree.map(jnp.asarray, (gram, more, given))
    rest = *given, pairs.Prior(*map(jnp.asarray, prior)), pairs.expectation()
    found = task_sweep(gram, *rest, more=more)
    expected = task_sweep(gram + jnp.swapaxes(more, 1, 2) @ more, *rest)
    for x, e in zip(found, expected, strict=True):
        close(x, e, precision)


@pytest.mark.parametrize(("backend", "size"), [("cpu", 3), ("gpu", 8), ("tpu", 8)])
def test_an_accelerator_has_more_tasks_at_once(backend, size, monkeypatch):
    monkeypatch.setattr(task_sweeps, "TILE", 3)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    seen = set()

    def visit(tile):
        seen.add(tile.shape)
        return 2 * tile

    x = jnp.arange(40.0).reshape(8, 5)
    np.testing.assert_array_equal(task_sweeps.in_tiles(visit, x), 2 * x)
    assert seen == {(5, size)}


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 2, 8])
@pytest.mark.parametrize(("tile", "devices"), [(3, 1), (512, 1), (3, 2)])
def test_masked_tasks_have_the_sweep_of_their_gram_matrices(
    precision, block, tile, devices, monkeypatch
):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", block)
    monkeypatch.setattr(task_sweeps, "TILE", tile)
    N, Q, M = 15, 8, 5
    rng = np.random.default_rng(3)
    mean, var = rng.normal(size=(M, N)), rng.uniform(0.0, 0.5, (M, N))
    relative = rng.choice([0.0, 0.5, 2.0], (N, Q))
    y, w = rng.normal(size=(N, Q)), rng.normal(size=(Q, M))
    prior = pairs.Prior(*map(jnp.asarray, (rng.normal(size=(Q, M)), rng.uniform(0.3, 3, (Q, M)))))
    tau = jnp.asarray(rng.uniform(0.5, 4.0, Q))
    gram = np.einsum("mn,kn,nq->qmk", mean, mean, relative)
    gram[:, range(M), range(M)] += (var @ relative).T
    linear = (mean @ (relative * y)).T
    put = pairs.expectation(1.5)
    odds, loc, variance = task_sweep(*map(jnp.asarray, (gram, linear, w)), tau, prior, put)
    features, observations = jax.tree.map(jnp.asarray, ((mean, var), (y, relative)))
    weights = PairedMeanField(jnp.full((Q, M), 0.5), jnp.asarray(2 * w), jnp.ones((Q, M)))
    found, squares = masked_task_sweep(features, observations, weights, tau, prior, 1.5)
    expected = expit(np.asarray(odds) / 1.5), loc, np.sqrt(variance)
    for x, e in zip(found, expected, strict=True):
        close(x, e, precision)
    W = np.asarray(found.mean)
    second = np.einsum("qmk,qm,qk->q", gram, W, W) + np.einsum("qmm,qm->q", gram, found.variance)
    # the variance of a feature comes with the square of a weight, whatever its mean
    expected = np.sum(relative * y**2, axis=0) - 2 * np.sum(W * linear, axis=1) + second
    close(squares, expected, precision)


@pytest.mark.parametrize("kind", ["shared", "own", "masked"])
def test_one_row_of_a_prior_serves_all_tasks(precision, kind, monkeypatch):
    monkeypatch.setattr(task_sweeps, "TILE", 3)
    N, Q, M = 15, 8, 5
    rng = np.random.default_rng(4)
    draws = rng.normal(size=(M, N)), rng.normal(size=(N, Q)), rng.normal(size=(Q, M))
    mean, y, w = map(jnp.asarray, draws)
    row = pairs.Prior(*map(jnp.asarray, (rng.normal(size=(1, M)), rng.uniform(0.3, 3, (1, M)))))
    relative = jnp.asarray(rng.choice([0.0, 1.0], (N, Q)))
    tau = jnp.asarray(rng.uniform(0.5, 4.0, Q))

    def swept(prior):
        if kind == "masked":
            weights = PairedMeanField(jnp.ones_like(w), w, jnp.ones_like(w))
            return masked_task_sweep((mean, 0 * mean), (y, relative), weights, tau, prior, 1.0)
        weighed = relative if kind == "own" else relative[:, :1]
        gram = jnp.einsum("mn,kn,nq->qmk", mean, mean, weighed)
        return task_sweep(gram, (mean @ y).T, w, tau, prior, pairs.expectation())

    every = jax.tree.map(lambda x: jnp.tile(x, (Q, 1)), row)
    for x, e in zip(*map(jax.tree.leaves, (swept(row), swept(every))), strict=True):
        assert x.shape == e.shape
        close(x, e, precision)


# The Gibbs sweep


@jax.jit
def gibbs_sweeps(keys, design, residual, weights, prior):
    """One sweep from each of many weights."""

    def one(key, residual, weights):
        return pairs.gibbs_sweep(
            logistic_and_normal(key, weights), design, residual, weights, PRECISION, prior
        )

    return jax.vmap(one)(keys, residual, weights)


@jax.jit
def gibbs_chain(keys, design, y, weights, prior):
    """Many sweeps, one after the other."""

    def step(weights, key):
        residual = y - pairs.predictor(design, weights)
        out = pairs.gibbs_sweep(
            logistic_and_normal(key, weights), design, residual, weights, PRECISION, prior
        )
        return out[0] * out[1], (*out, out[0] * out[1])

    return lax.scan(step, weights, keys)[1]


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


@pytest.mark.parametrize("kind", ["correlated", "duplicated"])
def test_one_long_chain_of_gibbs_sweeps_visits_the_exact_posterior(precision, kind):
    num_sweeps, num_batches = 40_000, 50
    given = _, y, *_ = problem(4, kind=kind)
    exact = exact_posterior(*given)

    # a start far away; its influence is forgotten in the first sweeps
    design, *_, prior = arrays(*given, 3)
    keys = random.split(random.key(1), num_sweeps)
    spikes, _, probs, w = gibbs_chain(keys, design, jnp.asarray(y), jnp.full(4, 100.0), prior)
    # twelve tests by batch means, at 4.5 standard errors of 50 batches (t, 49 degrees of freedom:
    # 4e-5 each): a false alarm in 1 of 2000 keys
    for found, expected in (
        (spikes, exact.inclusion),
        (probs, exact.inclusion),
        (w, exact.mean),
    ):
        batches = np.asarray(found, float)[1000:].reshape(num_batches, -1, 4).mean(axis=1)
        error = batches.std(axis=0, ddof=1) / np.sqrt(num_batches)
        assert np.all(np.abs(batches.mean(axis=0) - expected) < 4.5 * error)
        assert np.all(error < 0.05)


def test_a_gibbs_sweep_draws_excluded_slabs_from_their_prior(x64):
    size = 20_000
    X, y, w, log_odds, variance = given = problem(4, kind="independent")
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
    # the first feature's probability is that of its conditional at the given weights
    odds = one_by_one(*given[:2], np.zeros(4), *given[3:], lambda m, odds, *_: (0.0, (odds,)))[1]
    np.testing.assert_allclose(logit(probs[:, 0]), odds[0, 0], atol=1e-8)
    for m in range(4):
        assert stats.ttest_1samp(spikes[:, m] - probs[:, m], 0.0).pvalue > 1e-4
