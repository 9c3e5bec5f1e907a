# SPDX-License-Identifier: Apache-2.0
"""Blocks of weights against exact posteriors, and against the paired mean field."""

from functools import partial

import numpy as np
from pair_problems import PRECISION, arrays, close, exact_posterior, problem
import pytest
from scipy import optimize, stats
from scipy.special import expit, logsumexp

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import PairedMeanField, PatternMeanField
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.partition import Partition, every_pattern
from numpyro_spikeslab.algebra.patterns import (
    SetFactors,
    conditional,
    log_prior,
    prior_slabs,
    stack_mixtures,
)
from numpyro_spikeslab.algebra.quantiles import quantiles

SETS = {"all": [range(7)], "two": [(5, 0, 3), (1, 6)], "equal": [(2, 4), (0, 1)]}


def pairs_of(size, seed=1):
    """A member of the paired mean field that is optimal for nothing."""
    rng = np.random.default_rng(seed)
    parts = rng.uniform(0.1, 0.9, size), rng.normal(size=size), rng.uniform(0.2, 1.5, size)
    return PairedMeanField(*map(jnp.asarray, parts))


def family_of(sets, size=7, seed=1):
    """The same of blocks: independent spikes with these probabilities."""
    blocks, pairs = Partition(size, tuple(map(tuple, sets))), pairs_of(size, seed)
    (alone_p, probs), (alone_loc, loc), (alone_scale, scale) = map(blocks.cut, pairs)
    stacks = []
    for (_, patterns), p, mu, sd in zip(blocks.stacks.values(), probs, loc, scale, strict=True):
        c, L = prior_slabs(sd, mu / sd)
        q = jnp.exp(log_prior(patterns, jnp.log(p) - jnp.log1p(-p)))
        stacks.append(SetFactors(q, c, L))
    singles = PairedMeanField(alone_p, alone_loc, alone_scale)
    return PatternMeanField.of(blocks, singles, tuple(stacks))


@partial(jax.jit, static_argnames="count")
def sweeps(q, design, residual, prior, temperature=1.0, count=1):
    def step(carry, _):
        return carry[0].sweep(design, carry[1], PRECISION, prior, temperature), None

    return lax.scan(step, (q, residual), length=count)[0]


def bound(q, design, residual, prior, num_obs):
    """The evidence lower bound of a regression with known noise."""
    squares = jnp.sum(residual**2) + q.total_variance(design)
    constant = -0.5 * num_obs * np.log(2 * np.pi / PRECISION)
    return constant - 0.5 * PRECISION * squares - q.divergence(prior)


def start(given, q, block_size=3):
    """Design and residual at ``<w>`` of a family, and the prior."""
    X, y, _, log_odds, variance = given
    design, _, _, prior = arrays(X, y, np.zeros(len(log_odds)), log_odds, variance, block_size)
    return design, jnp.asarray(y) - jnp.asarray(X) @ q.mean, prior


def covariance_of(q):
    found = np.diag(np.asarray(q.variance))
    for (members, _), moments in zip(q.partition.stacks.values(), q.moments, strict=True):
        for one, root in zip(members, np.asarray(moments.root, float), strict=True):
            found[np.ix_(one, one)] = root.T @ root
    return found


@pytest.mark.parametrize("kind", ["independent", "correlated", "duplicated"])
def test_one_block_of_all_weights_is_the_exact_posterior(precision, kind):
    given = problem(size=6, kind=kind)
    truth, q = exact_posterior(*given), family_of([range(6)], 6)
    design, residual, prior = start(given, q)
    q, residual = sweeps(q, design, residual, prior)
    close(bound(q, design, residual, prior, 15), truth.log_evidence, precision)
    close(q.probs, truth.inclusion, precision)
    close(q.mean, truth.mean, precision)
    close(q.variance, truth.variance, precision)
    covariance = truth.second_moments - np.outer(truth.mean, truth.mean)
    close(covariance_of(q), covariance, precision)
    variance = np.trace(given[0] @ covariance_of(q) @ given[0].T)
    close(q.total_variance(design), variance, precision)


def test_single_precision_knows_the_bound_of_twins_of_a_large_unit():
    """They take turns, and of the squares of their sum their covariance leaves nothing."""
    X, y, *of_weights = problem(size=6, kind="duplicated")
    given, q = (1e4 * X, y, *of_weights), family_of([range(6)], 6)
    parts = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start(given, q))
    q, residual = sweeps(q, *parts[:2], parts[2])
    reached = bound(q, parts[0], residual, parts[2], 15)
    assert abs(reached - exact_posterior(*given).log_evidence) < 0.01


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_block_of_one_weight_is_a_pair(precision, temperature):
    q, pairs = family_of([]), pairs_of(7)
    design, residual, prior = start(problem(), q)
    rows = design.rows.reshape(-1, 15)[:1]
    without = residual + pairs.mean[:1] @ rows
    found = conditional(
        rows, without, PRECISION, prior.log_odds[:1], prior.variance[:1], every_pattern(1)
    )
    probs = jax.nn.softmax(found.logits / temperature)
    expected, after = pairs.sweep(design, residual, PRECISION, prior, temperature)
    close(probs[1], expected.probs[0], precision)
    close(found.slabs.mean[0, 0], expected.loc[0], precision)
    close(found.slabs.root[0, 0, 0], expected.scale[0], precision)
    new, left = q.sweep(design, residual, PRECISION, prior, temperature)
    close(left, after, precision)
    for part in PairedMeanField._fields:
        close(getattr(new, part), getattr(expected, part), precision)
    close(new.divergence(prior), expected.divergence(prior), precision)
    close(new.total_variance(design), expected.total_variance(design), precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sets", SETS.values(), ids=SETS)
def test_the_bound_never_falls_and_the_residual_is_that_of_the_mean(x64, sets):
    given, bounds = problem(kind="correlated"), []
    q = family_of(sets)
    design, residual, prior = start(given, q)
    for _ in range(30):
        bounds.append(bound(q, design, residual, prior, 15))
        q, residual = sweeps(q, design, residual, prior)
    assert np.all(np.diff(bounds) > -1e-10) and bounds[-1] > bounds[0] + 1
    assert bounds[-1] <= exact_posterior(*given).log_evidence + 1e-9
    np.testing.assert_allclose(residual, given[1] - given[0] @ q.mean, atol=1e-12)


@pytest.mark.parametrize("sets", SETS.values(), ids=SETS)
def test_moments_are_those_of_the_mixture(x64, sets):
    """The variance of the predictor and the moments of slabs follow from the covariances."""
    given = problem()
    q = family_of(sets)
    design, residual, prior = start(given, q)
    q, _ = sweeps(q, design, residual, prior, count=2)
    covariance = covariance_of(q)
    X = given[0]
    np.testing.assert_allclose(q.total_variance(design), np.trace(X @ covariance @ X.T))
    np.testing.assert_allclose(q.mean, q.probs * q.loc)
    second = np.diag(covariance) + np.asarray(q.mean) ** 2
    np.testing.assert_allclose(q.slab_moments[1], second, rtol=1e-10)
    np.testing.assert_allclose(np.diag(covariance), q.variance, rtol=1e-10)


def test_the_divergence_is_that_of_patterns_and_slabs(x64):
    given = problem()
    q = family_of([(0, 1, 2)], 3)
    rng = np.random.default_rng(3)
    root = rng.normal(size=(3, 3))
    A, h = root @ root.T + np.eye(3), rng.normal(size=3)
    probs = rng.dirichlet(np.ones(8))
    L = np.linalg.cholesky(A)
    stack = SetFactors(*(jnp.asarray(x)[None] for x in (probs, np.linalg.solve(L, h), L)))
    q = PatternMeanField.of(q.partition, q.singles, (stack,))
    log_odds, variance = given[3][:3], given[4][:3]
    expected = 0.0
    for p, s in zip(probs, every_pattern(3), strict=True):
        own = np.flatnonzero(s)
        log_prior_s = s @ log_odds - np.logaddexp(0, log_odds).sum()
        expected += p * (np.log(p) - log_prior_s)
        if len(own):
            covariance = np.linalg.inv(A[np.ix_(own, own)])
            mean = covariance @ h[own]
            slab, prior = covariance + np.outer(mean, mean), variance[own]
            log_det = np.linalg.slogdet(covariance)[1]
            expected += 0.5 * p * (np.sum(np.diag(slab) / prior - 1 + np.log(prior)) - log_det)
    prior = Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    np.testing.assert_allclose(q.divergence(prior), expected)


def test_the_prior_of_patterns_sums_to_one(x64):
    log_odds = np.random.default_rng(0).normal(size=(2, 4)) * 3
    patterns = every_pattern(4)
    found = log_prior(patterns, jnp.asarray(log_odds))
    np.testing.assert_allclose(logsumexp(found, axis=1), 0, atol=1e-12)
    p = np.prod(np.where(patterns, expit(log_odds[0]), expit(-log_odds[0])), axis=1)
    np.testing.assert_allclose(np.exp(found[0]), p / p.sum())


@pytest.mark.slow
def test_quantiles_are_those_of_the_mixture(precision):
    given = problem(size=4, kind="correlated")
    q = family_of([range(4)], 4)
    design, residual, prior = start(given, q)
    q, _ = sweeps(q, design, residual, prior)
    truth = exact_posterior(*given)
    levels = np.array([0.0, 0.05, 0.3, 0.5, 0.9, 1.0])
    marginals = stack_mixtures(q.stacks[0], every_pattern(4))
    weights, slabs = quantiles(marginals, jnp.asarray(levels, q.mean.dtype))
    sds = np.sqrt(np.diagonal(truth.covariances, axis1=1, axis2=2))

    def solved(j, target):
        return optimize.brentq(lambda x: below(x, j) - target, -20, 20, xtol=1e-14)

    def below(x, j):
        return truth.probs * truth.models[:, j] @ stats.norm.cdf(x, truth.locs[:, j], sds[:, j])

    for j in range(4):
        p, atom = truth.inclusion[j], below(0.0, j)
        for level, weight, slab in zip(levels, weights[:, j], slabs[:, j], strict=True):
            if level in (0, 1):
                assert slab == (-np.inf if level == 0 else np.inf)
                continue
            expected = solved(j, level * p)
            np.testing.assert_allclose(slab, expected, rtol=1e-3, atol=1e-4)
            if atom <= level <= atom + 1 - p:
                assert weight == 0
            else:
                left = level if level < atom else level - 1 + p
                expected = solved(j, left)
                np.testing.assert_allclose(weight, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_copies_of_columns_share_their_effect_in_single_precision():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 1)) + 1e-3 * rng.normal(size=(200, 4))
    y, variance, log_odds = 2 * X[:, 0] + rng.normal(size=200), np.ones(4), np.full(4, -2.0)
    found = {}
    for is_64 in (False, True):
        jax.config.update("jax_enable_x64", is_64)
        q = family_of([range(4)], 4)
        design, residual, prior = start((X, y, None, log_odds, variance), q)
        q, residual = sweeps(q, design, residual, prior)
        value = bound(q, design, residual, prior, 200)
        found[is_64] = [np.asarray(x, float) for x in (q.probs, q.mean, q.scale, value)]
    for x, y in zip(*found.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)


def test_weights_that_are_never_included_have_numbers(precision):
    stack = SetFactors(jnp.array([[1.0, 0.0, 0.0, 0.0]]), jnp.ones((1, 2)), jnp.eye(2)[None])
    q = PatternMeanField.of(Partition(2, ((0, 1),)), pairs_of(0), (stack,))
    for x in (q.mean, q.loc, q.scale, q.variance):
        assert np.all(np.isfinite(x))
    assert np.all(q.mean == 0) and np.all(q.scale > 0)


def test_blocks_are_a_pytree_with_random_starts(x64):
    q = family_of(SETS["two"])
    leaves, tree = jax.tree.flatten(q)
    assert (
        jax.tree.unflatten(tree, leaves).partition == q.partition and hash(q.partition) is not None
    )
    one = q.random_start(random.key(1), jnp.ones(7))
    for patterns in (stack.patterns for stack in one.stacks):
        np.testing.assert_allclose(jnp.sum(patterns, axis=1), 1)
    assert np.std(one.probs) > 0.05 and np.std(one.loc) > 0.3
    # means are in units of the slabs' prior
    other = q.random_start(random.key(1), jnp.full(7, 2.0))
    np.testing.assert_allclose(other.loc, 2 * one.loc, rtol=1e-12)
