# SPDX-License-Identifier: Apache-2.0
"""Sets of weights: their patterns, the slabs under each, and their single precision."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import expit, logsumexp
import truth
from truth.pair_problems import PRECISION, arrays, close, exact_posterior, problem

import jax
from jax import nn
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField, PatternMeanField
from numpyro_spikeslab.algebra.pairs import block_design
from numpyro_spikeslab.algebra.partition import Partition, every_pattern, joined
from numpyro_spikeslab.algebra.patterns import SetFactors, conditional_of, prior_slabs, slabs_given


def one_set(size, *, shared=False):
    """A family of one set of all weights, at its prior."""
    sets = (tuple(range(size)),)
    partition = Partition(size, groups=sets) if shared else Partition(size, blocks=sets)
    ((S, b),) = partition.stacks
    factors = SetFactors(jnp.full((1, S), 1 / S), *prior_slabs(jnp.ones((1, b))))
    return PatternMeanField.of(partition, PairedMeanField(*jnp.zeros((3, 0))), [factors])


@jax.jit
def swept(q, X, y, log_odds, variance, precision=PRECISION):
    """The exact posterior of one set, and the bound."""
    X, y, log_odds, variance = map(jnp.asarray, (X, y, log_odds, variance))
    design, residual, _, prior = arrays(X, y, jnp.zeros(X.shape[1]), log_odds, variance)
    q, residual = q.sweep(design, residual - X @ q.mean, precision, prior, 1.0)
    squares = jnp.sum(residual**2) + q.total_variance(design)
    constant = 0.5 * len(y) * jnp.log(precision / (2 * jnp.pi))
    return q, constant - 0.5 * precision * squares - q.divergence(prior)


def test_groups_of_similar_sizes_are_in_one_stack():
    partition = Partition.of_spikes((1, 0, 1, 2, 2, 1, 3))
    two, four = (stack.members for stack in partition.stacks.values())
    np.testing.assert_array_equal(partition.singles, [1, 6])
    np.testing.assert_array_equal(two, [[3, 4]])
    # padded with the number of weights
    np.testing.assert_array_equal(four, [[0, 2, 5, 7]])
    assert not Partition.of_spikes([0]).stacks
    spikes = np.repeat(np.arange(40), 1 + np.arange(40) % 9).tolist()
    assert len(Partition.of_spikes(spikes).stacks) == 4


def test_weights_are_cut_into_sets_and_put_in_order(x64):
    partition = joined((
        Partition(5, blocks=((3, 0), (1, 2))),
        Partition.of_spikes((1, 0, 1, 1)),
        Partition(2, blocks=((1, 0),)),
    ))  # fmt: skip
    assert partition.blocks == ((3, 0), (1, 2), (10, 9)) and partition.groups == ((5, 7, 8),)
    assert list(partition.stacks) == [(4, 2), (2, 4)]
    x = jnp.arange(11.0)
    singles, (pairs, group) = partition.cut(x, fill=-1.0)
    np.testing.assert_array_equal(singles, [4, 6])
    np.testing.assert_array_equal(pairs, [[3, 0], [1, 2], [10, 9]])
    np.testing.assert_array_equal(group, [[5, 7, 8, -1]])
    np.testing.assert_array_equal(partition.flat(singles, [pairs, group]), x)
    # of draws, too; and patterns have their numbers
    spikes = np.random.default_rng(0).integers(0, 2, (3, 11))
    spikes[:, [7, 8]] = spikes[:, [5]]
    _, cuts = partition.cut(jnp.asarray(spikes))
    for stack, x in zip(partition.stacks.values(), cuts, strict=True):
        real = stack.members < 11
        np.testing.assert_array_equal(stack.patterns[stack.which(x)][:, real], x[:, real])


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_set_of_one_weight_is_a_pair(precision, temperature):
    X, y, _, log_odds, variance = problem(1)
    design, residual, _, prior = arrays(X, y, np.zeros(1), log_odds, variance)
    pair = PairedMeanField(*jnp.zeros((3, 1)))
    expected, _ = pair.sweep(design, residual, PRECISION, prior, temperature)
    conditional = conditional_of(design.rows[0], residual, PRECISION, *prior, every_pattern(1))
    close(nn.softmax(conditional.logits / temperature)[1:], expected.probs, precision)
    close(conditional.slabs.mean[0], expected.loc, precision)
    close(conditional.slabs.root[0, 0], expected.scale, precision)


@pytest.mark.parametrize("shared", [False, True], ids=["block", "group"])
def test_all_slabs_given_a_pattern_have_the_prior_where_excluded(precision, shared):
    rng = np.random.default_rng(0)
    L = np.tril(rng.normal(size=(3, 4, 4)), -1) + np.eye(4) * rng.uniform(0.5, 2, (3, 1, 4))
    c, scale = rng.normal(size=(3, 4)), rng.uniform(0.5, 2, (3, 4))
    patterns = np.eye(2)[[0, 1, 1]] if shared else np.ones((3, 16)) / 16
    spikes = np.repeat([[0], [1], [1]], 4, 1) if shared else np.eye(4)[:3] + np.eye(4)[1]
    spikes = np.minimum(spikes, 1.0)
    factors = SetFactors(*map(jnp.asarray, (patterns, c, L)))
    means, trils = slabs_given(factors, jnp.asarray(spikes), jnp.asarray(scale))
    for k in range(3):
        on = np.flatnonzero(spikes[k])
        A, h = L[k] @ L[k].T, L[k] @ c[k]
        mean, covariance = np.zeros(4), np.diag(scale[k] ** 2)
        covariance[np.ix_(on, on)] = np.linalg.inv(A[np.ix_(on, on)])
        mean[on] = covariance[np.ix_(on, on)] @ h[on]
        close(means[k], mean, precision)
        close(trils[k] @ trils[k].T, covariance, precision)
        np.testing.assert_array_equal(np.triu(trils[k], 1), 0)


def test_weights_that_are_never_included_have_numbers(precision):
    q, zero = one_set(2), jnp.array([[1.0, 0.0, 0.0, 0.0]])
    stack = SetFactors(zero, jnp.ones((1, 2)), jnp.eye(2)[None])
    q = PatternMeanField.of(q.partition, q.singles, [stack])
    for x in (q.mean, q.loc, q.scale, q.variance):
        assert np.all(np.isfinite(x))
    assert np.all(q.mean == 0) and np.all(q.scale > 0)


# Exact posteriors


@pytest.mark.parametrize("kind", ["independent", "correlated", "duplicated"])
@pytest.mark.parametrize("shared", [False, True], ids=["block", "group"])
def test_one_set_of_all_weights_is_the_exact_posterior(precision, shared, kind):
    arguments = X, y, _, log_odds, variance = problem(size=6, kind=kind)
    if shared:
        log_odds[1:] = 0
    exact = exact_posterior(*arguments)
    if shared:
        exact = truth.share_spikes(exact, [0] * 6)
    q, reached = swept(one_set(6, shared=shared), X, y, log_odds, variance)
    close(reached, exact.log_evidence, precision)
    close(q.probs, exact.inclusion, precision)
    close(q.mean, exact.mean, precision)
    covariance = exact.second_moments - np.outer(exact.mean, exact.mean)
    close(q.variance, np.diag(covariance), precision)
    explained = q.predictor_variance(block_design(jnp.asarray(X.T), None))
    close(explained, np.einsum("ni,ij,nj->n", X, covariance, X), precision)


def test_single_precision_knows_the_bound_of_twins_of_a_large_unit(x32):
    """They are negatively correlated, and the variance of their sum is lost in their covariance."""
    X, y, _, log_odds, variance = problem(size=6, kind="duplicated")
    _, reached = swept(one_set(6), 1e4 * X, y, log_odds, variance)
    exact = exact_posterior(1e4 * X, y, None, log_odds, variance)
    assert reached.dtype == np.float32 and abs(reached - exact.log_evidence) < 0.01


def test_a_large_group_is_exact(precision):
    """Of 300 weights; the evidence of either pattern is that of a Gaussian."""
    rng = np.random.default_rng(0)
    X, size = rng.normal(size=(40, 300)), 300
    y = X[:, :5] @ rng.normal(size=5) + rng.normal(size=40)
    log_odds, variance = np.r_[-1.0, np.zeros(size - 1)], np.full(size, 0.01)
    q, reached = swept(one_set(size, shared=True), X, y, log_odds, variance, 1.0)
    covariance = 0.01 * X @ X.T + np.eye(40)
    logs = [
        stats.norm.logpdf(y).sum() + np.log(expit(1.0)),
        stats.multivariate_normal(np.zeros(40), covariance).logpdf(y) + np.log(expit(-1.0)),
    ]
    tolerance = 1e-4 if precision == "float32" else 1e-9
    np.testing.assert_allclose(reached, logsumexp(logs), rtol=tolerance)
    np.testing.assert_allclose(q.probs, expit(logs[1] - logs[0]), atol=10 * tolerance)
    mean = 0.01 * X.T @ np.linalg.solve(covariance, y)
    np.testing.assert_allclose(q.loc, mean, atol=10 * tolerance)
