# SPDX-License-Identifier: Apache-2.0
"""The pair's conditional and the sweeps against exact posteriors."""

from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit
import truth
from truth.pair_problems import PRECISION, arrays, close, exact_posterior, one_by_one, problem

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import pairs, task_sweeps
from numpyro_spikeslab.algebra.families import Expectation, PairedMeanField
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.pattern_sweeps import gibbs_sweep
from numpyro_spikeslab.algebra.task_sweeps import TaskSums, masked_sweep, task_sweep
from numpyro_spikeslab.algebra.variates import logistic_and_normal

# compiled once for all tests of the same shapes
run_sweep = jax.jit(pairs.sweep)


# Truth against another truth: the enumeration that the other tests compare with


@pytest.mark.parametrize("kind", truth.DESIGNS)
def test_enumeration_equals_the_marginal_normal_densities(kind):
    X = truth.design(kind)
    y = truth.response(X)
    scale, weight = np.linspace(0.3, 1.0, len(y)), np.arange(len(y)) % 4 > 0
    problem = truth.regression(X, y, scale, np.linspace(0.2, 0.7, 4), [0.5, 1.0, 2.0, 3.0], weight)
    exact = truth.enumerate_models(problem)
    log_joint = []
    for model in exact.models:
        covariance = np.diag(scale**2) + (X * (model * problem.slab_scale) ** 2) @ X.T
        log_prior = np.sum(np.log(np.where(model, problem.inclusion, 1 - problem.inclusion)))
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
    pair, _ = run_sweep(design, residual, w, PRECISION, prior, Expectation())
    mean = moments[1] / moments[0]
    expected = (log_odds + np.log(moments[0] / null), mean, moments[2] / moments[0] - mean**2)
    tolerance = {"float32": 2e-4, "float64": 1e-6}[precision]
    np.testing.assert_allclose(np.ravel(pair), expected, rtol=tolerance, atol=tolerance)


# Blocks, tiles and devices change nothing


def updates(put, shape, seed=1):
    """The update of a sweep, and what it puts back in numpy for single entries."""
    rng = np.random.default_rng(seed)
    logistic, normal = rng.logistic(size=shape), rng.normal(size=shape)
    if put == "expectation":
        return Expectation(1.7), lambda _, odds, loc, var: expit(odds / 1.7) * loc

    def draw(index, odds, loc, variance):
        return (odds > logistic[index]) * (loc + np.sqrt(variance) * normal[index])

    return pairs.Draw((jnp.asarray(logistic), jnp.asarray(normal))), draw


@pytest.mark.parametrize("put", ["expectation", "draw"])
@pytest.mark.parametrize(("size", "block_size"), [(1, 50), (7, 1), (7, 50), (11, 4)])
def test_a_sweep_of_a_design_visits_one_feature_after_the_other(precision, put, size, block_size):
    arguments = X, y, *_ = problem(size, kind="duplicated" if size > 1 else "correlated")
    design, residual, w, prior = arrays(*arguments, block_size)
    update, weight = updates(put, size)
    pair, residual = run_sweep(design, residual, w, PRECISION, prior, update)
    expected, conditionals = one_by_one(*arguments, weight)
    close(residual, y - X @ expected, precision)
    close(update.put(pair, update.noise), expected, precision)
    for x, y in zip(pair, conditionals, strict=True):
        close(x, y, precision)


@pytest.mark.parametrize("with_covariates", [False, True])
def test_a_design_is_whitened_and_split_in_the_sweep(precision, with_covariates):
    X, _, w, *prior = problem(7, kind="duplicated")
    rng, whitening = np.random.default_rng(0), np.linspace(0.0, 2.0, len(X))
    basis = np.linalg.qr(rng.normal(size=(len(X), 2)))[0].T[: 2 * with_covariates]
    root, whitened = rng.normal(size=(len(basis), len(basis))), (X.T * whitening).T
    inside = basis @ whitened
    columns = np.vstack([whitened - basis.T @ inside, root @ inside])
    y = columns[:, 0] + rng.normal(size=len(columns))
    rows = pairs.in_parts(jnp.asarray(X.T), 3, 3)
    design = pairs.ChangingDesign(rows, *(jnp.asarray(x, float) for x in (whitening, basis, root)))
    update, weight = updates("expectation", 7)
    arguments = jnp.asarray(y - columns @ w), jnp.asarray(w), PRECISION
    arguments = *arguments, pairs.Prior(*map(jnp.asarray, prior)), update
    pair, residual = run_sweep(design, *arguments)
    expected, conditionals = one_by_one(columns, y, w, *prior, weight)
    close(residual, y - columns @ expected, precision)
    for x, y in zip(pair, conditionals, strict=True):
        close(x, y, precision)


def test_blocks_cover_the_whitened_design_with_few_zero_features(precision):
    for size, padding in (1, 0), (64, 0), (65, 1), (69, 0), (129, 0):
        X, _, w, *_ = problem(size)
        whitening = np.linspace(0.0, 2.0, len(X))
        design = pairs.block_design(jnp.asarray(X.T), jnp.asarray(whitening), 64)
        blocks, features = design.rows.shape[:2]
        assert blocks * features == size + padding and features <= 64
        close(pairs.predictor(design, jnp.asarray(w)), whitening * (X @ w), precision)
        close(pairs.feature_squares(design, size), whitening**2 @ X**2, precision)


Q, M, N = 8, 5, 15
# Tasks of a tile, devices and features of a block: tiles that are full, not full and larger than
# all; devices with the same number of tasks or not; blocks of one, not full and larger than all.
CUTS = [(3, 1, 1), (3, 1, 3), (4, 1, 16), (512, 4, 3), (3, 2, 3), (3, 5, 3)]
KINDS = "shared", "own", "shared, extra", "own, extra"
# the kind that has everything with all cuts, and all kinds with two cuts
CASES = [(KINDS[-1], cut) for cut in CUTS] + [*product(KINDS[:-1], (CUTS[1], CUTS[-1]))]


@pytest.fixture
def cut(request, monkeypatch):
    tile, devices, block = request.param
    monkeypatch.setattr(task_sweeps, "TASK_BLOCK_SIZE", block)
    monkeypatch.setattr(task_sweeps, "TILE", tile)
    monkeypatch.setattr(jax, "device_count", lambda: devices)


def at_weights(put, w):
    """A family, or draws, of these mean weights."""
    if put == "draw":
        return pairs.Draws.of(jnp.ones(w.shape), jnp.asarray(w))
    return PairedMeanField(jnp.full(w.shape, 0.5), 2 * jnp.asarray(w), jnp.ones(w.shape))


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("put", ["expectation", "draw"])
@pytest.mark.parametrize(("kind", "cut"), CASES, indirect=["cut"])
def test_sweeps_of_tasks_visit_one_feature_after_the_other(precision, kind, cut, put, one_row):
    rng = np.random.default_rng(2)
    features, extra = rng.normal(size=(M, N)), rng.normal(size=(Q, 2, M)) * ("extra" in kind)
    relative = rng.choice([0.0, 0.5, 2.0], (N, Q)) if "own" in kind else np.ones((N, Q))
    y, w = rng.normal(size=(N, Q)), rng.normal(size=(Q, M))
    rows = 1 if one_row else Q
    log_odds, variance = rng.normal(size=(rows, M)), rng.uniform(0.3, 3.0, (rows, M))
    update, weight = updates(put, (Q, M))
    prior, tau = pairs.Prior(*map(jnp.asarray, (log_odds, variance))), jnp.full(Q, PRECISION)
    weighed = relative if "own" in kind else relative[:, :1]
    gram = jnp.asarray(np.einsum("mn,kn,nq->qmk", features, features, weighed))
    linear = jnp.asarray((features @ (relative * y)).T)
    products = TaskSums(
        gram, linear, jnp.zeros(Q), extra=jnp.asarray(extra) if "extra" in kind else None
    )
    result = task_sweep(products, at_weights(put, w), tau, prior, update)
    for q in range(Q):
        root = np.sqrt(relative[:, q])[:, None]
        X = np.concatenate([root * features.T, extra[q]])
        target = np.concatenate([root[:, 0] * y[:, q], np.zeros(2)])
        row = (x[0 if one_row else q] for x in (log_odds, variance))
        put_q = lambda m, *pair, q=q: weight((q, m), *pair)  # noqa: E731
        expected, conditionals = one_by_one(X, target, w[q], *row, put_q)
        mean = result.mean if put == "expectation" else result.spikes * result.slabs
        probs = expit(conditionals[0] / (1.7 if put == "expectation" else 1.0))
        close(mean[q], expected, precision)
        close(result.probs[q], probs, precision)


def masked_tasks(var=0.0):
    rng = np.random.default_rng(3)
    mean, relative = rng.normal(size=(M, N)), rng.choice([0.0, 0.5, 2.0], (N, Q))
    var, y = var * rng.uniform(size=(M, N)), rng.normal(size=(N, Q))
    prior = pairs.Prior(*map(jnp.asarray, (rng.normal(size=(1, M)), rng.uniform(0.3, 3, (Q, M)))))
    tau, w = rng.uniform(0.5, 4.0, Q), rng.normal(size=(Q, M))
    gram = np.einsum("mn,kn,nq->qmk", mean, mean, relative)
    gram[:, range(M), range(M)] += (var @ relative).T
    linear = (mean @ (relative * y)).T
    return *map(jnp.asarray, (mean, var, y, relative, w, tau, gram, linear)), prior


MASKED_CUTS = pytest.mark.parametrize("cut", [(3, 1, 2), (3, 2, 3), (512, 4, 8)], indirect=True)


@MASKED_CUTS
def test_draws_of_tiles_are_those_of_gram_matrices(precision, cut):
    """Chains of many tasks with missing entries have the memory of their observations."""
    features, _, y, relative, w, tau, gram, linear, prior = masked_tasks()
    arguments = at_weights("draw", w), tau, prior, pairs.Draw(logistic_and_normal(random.key(0), w))
    expected = task_sweep(TaskSums(gram, linear, jnp.zeros(Q)), *arguments)
    (spikes, slabs, probs), _ = masked_sweep((y, relative), (features, None), *arguments)
    np.testing.assert_array_equal(spikes, expected[0])
    close(slabs, expected[1], precision)
    close(probs, expected[2], precision)
    memory = jax.jit(masked_sweep).lower((y, relative), (features, None), *arguments)
    assert f"{Q}x{M}x{M}x" not in memory.as_text()


@MASKED_CUTS
def test_expectations_of_tiles_have_the_squares_of_gram_matrices(precision, cut):
    """The variance of a feature comes with the square of a weight, whatever its mean."""
    mean, var, y, relative, w, tau, gram, linear, prior = masked_tasks(0.5)
    arguments = at_weights("expectation", w), tau, prior, Expectation(1.5)
    expected = task_sweep(TaskSums(gram, linear, jnp.zeros(Q)), *arguments)
    new, squares = masked_sweep((y, relative), (mean, var), *arguments)
    for x, e in zip(new, expected, strict=True):
        close(x, e, precision)
    W = np.asarray(new.mean)
    second = np.einsum("qmk,qm,qk->q", gram, W, W) + np.einsum("qmm,qm->q", gram, new.variance)
    expected = np.sum(relative * y**2, axis=0) - 2 * np.sum(W * linear, axis=1) + second
    close(squares, expected, precision)


# The Gibbs sweep


@jax.jit
@partial(jax.vmap, in_axes=(0, None, 0, 0, None))
def gibbs_sweeps(key, design, residual, weights, prior):
    """One sweep from each of many weights."""
    noise = logistic_and_normal(key, weights)
    partition = Partition(len(weights))
    return gibbs_sweep(partition, noise, design, residual, weights, PRECISION, prior)


@pytest.mark.parametrize("kind", truth.DESIGNS)
def test_a_gibbs_sweep_leaves_the_exact_posterior_invariant(x64, kind):
    size = 20_000
    arguments = X, y, _, _, variance = problem(4, kind=kind)
    exact = exact_posterior(*arguments)
    spikes, slabs = exact.sample(np.random.default_rng(0), size)
    w = spikes * slabs
    design, *_, prior = arrays(*arguments, 3)
    keys = random.split(random.key(0), size)
    out = gibbs_sweeps(keys, design, jnp.asarray(y - w @ X.T), jnp.asarray(w), prior)
    spikes, slabs, probs = (np.asarray(x) for x in out)
    # 28 tests of independent draws for each design, at 1e-5 each: a false alarm in 1 of 710 keys
    truth.check_draws(exact, spikes, slabs, probs)
    # where it is excluded a slab has its prior
    excluded = (slabs / np.sqrt(variance))[spikes == 0]
    assert stats.kstest(excluded, "norm").pvalue > 1e-5
