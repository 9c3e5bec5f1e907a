# SPDX-License-Identifier: Apache-2.0
"""The variational families against their definition and exact posteriors."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from pair_problems import PRECISION, arrays, close, exact_posterior, one_by_one, problem
import pytest
from scipy.special import expit
import truth

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.families import (
    MeanField,
    PairedMeanField,
    PatternMeanField,
    spike_divergence,
)
from numpyro_spikeslab.algebra.pairs import Prior, block_design
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.patterns import SetFactors, prior_slabs

P = 7
# a block, a group that is padded, one that is not, and a single weight in between
SETS = Partition(P, blocks=((4, 1),), groups=((0, 2, 6), (5, 3)))
SINGLE = Partition(P, blocks=((5, 0, 3),))
FAMILIES = {"pairs": None, "sets": SETS, "block": SINGLE, "mean field": MeanField}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


def member(name, size=P, seed=1) -> Any:
    """A member of a family that is optimal for nothing."""
    rng = np.random.default_rng(seed)
    kind = FAMILIES[name]
    probs, loc, scale = (
        rng.uniform(0.1, 0.9, size),
        rng.normal(size=size),
        rng.uniform(0.2, 1.5, size),
    )

    def root(b, diagonal):
        return np.tril(0.3 * rng.normal(size=(b, b)), -1) + np.diag(diagonal)

    if kind is MeanField:
        return MeanField(jnp.asarray(probs), jnp.asarray(loc), jnp.asarray(root(size, scale)))
    pairs = PairedMeanField(jnp.asarray(probs), jnp.asarray(loc), jnp.asarray(scale))
    if kind is None:
        return pairs
    stacks = []
    for (S, b), (members, _) in kind.stacks.items():
        patterns = rng.dirichlet(np.ones(S), len(members))
        linear = np.where(members < size, rng.normal(size=members.shape), 0.0)
        tril = np.stack([root(b, rng.uniform(0.5, 2.0, b)) for _ in members])
        # the padding has the identity
        real = members < size
        both = real[:, :, None] & real[:, None, :]
        stacks.append(
            SetFactors(*map(jnp.asarray, (patterns, linear, np.where(both, tril, np.eye(b)))))
        )
    return PatternMeanField.of(kind, PairedMeanField(*(x[kind.singles] for x in pairs)), stacks)


class Component(NamedTuple):
    """Some weights with one pattern: its probability, and the Gaussian of its slabs."""

    members: tuple[int, ...]
    prob: float
    spikes: np.ndarray
    mean: np.ndarray
    covariance: np.ndarray


def components(q) -> list[list[Component]]:
    """The independent factors of pairs or sets, each as its components."""
    factors = []
    partition = q.partition if isinstance(q, PatternMeanField) else Partition(len(q.probs))
    singles = q.singles if isinstance(q, PatternMeanField) else q
    for m, *parts in zip(partition.singles, *singles, strict=True):
        p, loc, scale = map(float, parts)
        zero, one = np.zeros(1), np.ones(1)
        factors.append([
            Component((m,), 1 - p, zero, zero, np.zeros((1, 1))),
            Component((m,), p, one, loc * one, scale**2 * np.ones((1, 1))),
        ])  # fmt: skip
    stacks = q.stacks if isinstance(q, PatternMeanField) else ()
    for stack, layout in zip(stacks, partition.stacks.values(), strict=True):
        for members, probs, c, L in zip(layout.members, *stack, strict=True):
            real = members < partition.size
            factor = []
            for p, pattern in zip(probs, layout.patterns, strict=True):
                L64 = np.asarray(L, float)
                A, h = L64 @ L64.T, L64 @ np.asarray(c, float)
                own = np.flatnonzero(pattern)
                mean, covariance = np.zeros(len(members)), np.zeros(A.shape)
                covariance[np.ix_(own, own)] = np.linalg.inv(A[np.ix_(own, own)])
                mean[own] = covariance[np.ix_(own, own)] @ h[own]
                parts = pattern[real], mean[real], covariance[np.ix_(real, real)]
                factor.append(Component(tuple(members[real]), float(p), *parts))
            factors.append(factor)
    return factors


def moments_of(q) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inclusion probabilities, means and covariances of the weights, from the definition."""
    probs, mean, covariance = np.zeros(P), np.zeros(P), np.zeros((P, P))
    if isinstance(q, MeanField):
        p, loc, root = (np.asarray(x, float) for x in q)
        second = (np.outer(p, p) + np.diag(p - p**2)) * (root @ root.T + np.outer(loc, loc))
        return p, p * loc, second - np.outer(p * loc, p * loc)
    for factor in components(q):
        own = list(factor[0].members)
        probs[own] = sum(x.prob * x.spikes.astype(float) for x in factor)
        mean[own] = sum(x.prob * x.mean for x in factor)
        second = sum(x.prob * (x.covariance + np.outer(x.mean, x.mean)) for x in factor)
        covariance[np.ix_(own, own)] = second - np.outer(mean[own], mean[own])
    return probs, mean, covariance


def normal_divergence(mean, covariance, variance) -> float:
    trace = np.sum((np.diag(covariance) + mean**2) / variance - 1 + np.log(variance))
    return 0.5 * (trace - np.linalg.slogdet(covariance)[1])


def divergence_of(q, log_odds, variance) -> float:
    """``KL(q || p)`` from the definition; slabs that are excluded have their prior."""
    if isinstance(q, MeanField):
        p, loc, root = (np.asarray(x, float) for x in q)
        spikes = p * np.log(p / expit(log_odds)) + (1 - p) * np.log((1 - p) / expit(-log_odds))
        return np.sum(spikes) + normal_divergence(loc, root @ root.T, variance)
    total = 0.0
    for factor in components(q):
        own = list(factor[0].members)
        logits = np.array([x.spikes @ log_odds[own] for x in factor])
        log_prior = logits - np.log(np.sum(np.exp(logits)))
        for part, log_p in zip(factor, log_prior, strict=True):
            on = part.spikes > 0
            slabs = normal_divergence(
                part.mean[on], part.covariance[np.ix_(on, on)], variance[own][on]
            )
            total += part.prob * (np.log(part.prob) - log_p + slabs)
    return total


@EVERY_FAMILY
def test_moments_and_divergence_are_those_of_the_definition(precision, name):
    X, _, _, log_odds, variance = problem()
    q = member(name)
    probs, mean, covariance = moments_of(q)
    close(q.probs, probs, precision)
    close(q.mean, mean, precision)
    if name != "mean field":
        close(q.variance, np.diag(covariance), precision)
        close(q.slab_moments[0], probs, precision)
        close(q.slab_moments[1], np.diag(covariance) + mean**2, precision)
    for whitening in (np.ones(len(X)), np.linspace(0.0, 2.0, len(X))):
        design = block_design(
            jnp.asarray(X.T), jnp.asarray(whitening), 10**6 if name == "mean field" else 4
        )
        rows = whitening[:, None] * X
        expected = np.einsum("ni,ij,nj->n", rows, covariance, rows)
        close(q.predictor_variance(design), expected, precision)
        close(q.total_variance(design), np.sum(expected), precision)
    prior = Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.divergence(prior), divergence_of(q, log_odds, variance), precision)


# Sweeps


@partial(jax.jit, static_argnames="count")
def sweeps(q, design, residual, prior, temperature=1.0, count=1):
    def step(carry, _):
        return carry[0].sweep(design, carry[1], PRECISION, prior, temperature), None

    return lax.scan(step, (q, residual), length=count)[0]


def start(given, q):
    """Design and residual at ``<w>`` of a family, and the prior."""
    X, y, _, log_odds, variance = given
    size = 10**6 if isinstance(q, MeanField) else 3
    design, _, _, prior = arrays(X, y, np.zeros(len(log_odds)), log_odds, variance, size)
    return design, jnp.asarray(y) - jnp.asarray(X) @ q.mean, prior


def converged(given, q, count=2000, temperature=1.0):
    return sweeps(q, *start(given, q), temperature, count)[0]


def bound(q, X, y, prior):
    """The evidence lower bound from its definition, with moments that are tested above."""
    squares = jnp.sum((jnp.asarray(y) - jnp.asarray(X) @ q.mean) ** 2)
    squares += q.total_variance(block_design(jnp.asarray(X).T, None))
    normaliser = 0.5 * X.shape[0] * jnp.log(PRECISION / (2 * jnp.pi))
    return normaliser - 0.5 * PRECISION * squares - q.divergence(prior)


def entropy(q):
    """Entropy of the spikes."""
    stacks = q.stacks if isinstance(q, PatternMeanField) else ()
    probs = q.singles.probs if isinstance(q, PatternMeanField) else q.probs
    pairs = jnp.sum(probs * jnp.log(probs) + (1.0 - probs) * jnp.log(1.0 - probs))
    return -pairs - sum(jnp.sum(x.patterns * jnp.log(x.patterns)) for x in stacks)


def free(q):
    """Unconstrained parameters of a family, and the way back."""
    if not isinstance(q, PatternMeanField):
        logit = jnp.log(q.probs) - jnp.log1p(-q.probs)
        return (logit, *q[1:]), lambda x: type(q)(jax.nn.sigmoid(x[0]), *x[1:])
    singles, of_singles = free(q.singles)
    stacks = tuple((jnp.log(x.patterns), *x[1:]) for x in q.stacks)

    def back(x):
        stacks = [SetFactors(jax.nn.softmax(one[0]), *one[1:]) for one in x[1]]
        return PatternMeanField.of(q.partition, of_singles(x[0]), stacks)

    return (singles, stacks), back


@EVERY_FAMILY
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_sweeps_ascend_to_a_stationary_point_below_the_evidence(x64, name, temperature):
    given = X, y, *_ = problem()
    q = member(name)
    design, residual, prior = start(given, q)

    @jax.jit
    def objective(q):
        # a temperature weighs the entropy of the spikes
        return bound(q, X, y, prior) + (temperature - 1.0) * entropy(q)

    values = [objective(q)]
    for _ in range(30):
        q, residual = sweeps(q, design, residual, prior, temperature)
        values.append(objective(q))
    np.testing.assert_allclose(residual, y - X @ q.mean, atol=1e-12)
    # it falls by no more than rounding
    assert np.all(np.diff(values) > -1e-10) and values[-1] > values[0] + 1.0
    q = converged(given, q, 1000, temperature)
    point, back = free(q)
    slopes = jax.jit(jax.grad(lambda x: objective(back(x))))(point)
    # roots of covariances have zeros above their diagonal
    for slope in jax.tree.leaves(slopes):
        slope = np.tril(slope) if slope.ndim > 1 else np.asarray(slope)
        # the logit of a probability of 1 has none
        np.testing.assert_allclose(slope[np.isfinite(slope)], 0, atol=1e-7)
    if temperature == 1.0 and name != "sets":
        gap = exact_posterior(*given).log_evidence - values[-1]
        assert 0.0 < gap < 5.0


def started(name, w):
    """A member with all weights included, at these means."""
    w, kind = jnp.asarray(w), FAMILIES[name]
    if kind is MeanField:
        return MeanField(w**0, w, jnp.eye(len(w)))
    pairs = PairedMeanField(w**0, w, w**0)
    if kind is None:
        return pairs
    _, means = kind.cut(w)
    stacks = [
        SetFactors(jnp.tile(jnp.eye(S)[-1], (len(x), 1)), *prior_slabs(jnp.ones_like(x), x))
        for (S, _), x in zip(kind.stacks, means, strict=True)
    ]
    return PatternMeanField.of(kind, PairedMeanField(*(x[kind.singles] for x in pairs)), stacks)


@pytest.mark.parametrize("name", ["pairs", "sets", "mean field"])
def test_units_order_and_zero_features_change_nothing(x64, name):
    X, y, w, log_odds, variance = given = problem()
    q = converged(given, started(name, w))
    units = np.array([1e-3, 2.0, -1.0, 30.0, -0.5, 1.0, 1e3])
    scaled = X * units, y, w / units, log_odds, variance / units**2
    found = converged(scaled, started(name, w / units))
    np.testing.assert_allclose(found.probs, q.probs, atol=1e-8)
    np.testing.assert_allclose(found.mean * units, q.mean, atol=1e-8)
    if name == "sets":
        return
    order = np.random.default_rng(0).permutation(P)
    permuted = X[:, order], y, w, log_odds[order], variance[order]
    again = type(q)(q.probs[order], q.loc[order], permuted_scale(q, order))
    swept, _ = sweeps(again, *start(permuted, again))
    np.testing.assert_allclose(swept.probs, q.probs[order], atol=1e-9)
    np.testing.assert_allclose(swept.mean, q.mean[order], atol=1e-9)
    zeros = [0, 3, 7]
    padded = (
        np.insert(X, zeros, 0.0, axis=1),
        y,
        np.insert(w, zeros, 2.0),
        np.insert(log_odds, zeros, 0.7),
        np.insert(variance, zeros, 1.3),
    )
    old = np.ones(10, bool)
    old[np.array(zeros) + np.arange(3)] = False
    found = converged(padded, started(name, padded[2]))
    np.testing.assert_allclose(found.mean[old], q.mean, atol=1e-9)
    np.testing.assert_allclose(found.probs[~old], expit(0.7), atol=1e-9)
    np.testing.assert_allclose(found.loc[~old], 0.0, atol=1e-9)
    scale = found.scale if name == "pairs" else jnp.diag(found.scale_tril)
    np.testing.assert_allclose(scale[~old] ** 2, 1.3, atol=1e-9)


def permuted_scale(q, order):
    if isinstance(q, PairedMeanField):
        return q.scale[order]
    return jnp.linalg.cholesky((q.scale_tril @ q.scale_tril.T)[order][:, order])


# Exact posteriors


@pytest.mark.parametrize("kind", ["independent", "correlated", "duplicated"])
@pytest.mark.parametrize("shared", [False, True], ids=["block", "group"])
def test_one_set_of_all_weights_is_the_exact_posterior(precision, shared, kind):
    given = X, _, _, log_odds, _ = problem(size=6, kind=kind)
    sets = (tuple(range(6)),)
    if shared:
        log_odds[1:] = 0
        exact = truth.share_spikes(exact_posterior(*given), [0] * 6)
        partition = Partition(6, groups=sets)
    else:
        exact, partition = exact_posterior(*given), Partition(6, blocks=sets)
    ((S, b),) = partition.stacks
    factors = SetFactors(jnp.full((1, S), 1 / S), jnp.zeros((1, b)), jnp.eye(b)[None])
    singles = PairedMeanField(*[jnp.zeros(0)] * 3)
    q = PatternMeanField.of(partition, singles, [factors])
    design, residual, prior = start(given, q)
    q, residual = sweeps(q, design, residual, prior)
    reached = 0.5 * 15 * np.log(PRECISION / (2 * np.pi)) - q.divergence(prior)
    reached -= 0.5 * PRECISION * (jnp.sum(residual**2) + q.total_variance(design))
    close(reached, exact.log_evidence, precision)
    close(q.probs, exact.inclusion, precision)
    close(q.mean, exact.mean, precision)
    covariance = exact.second_moments - np.outer(exact.mean, exact.mean)
    close(q.variance, np.diag(covariance), precision)
    close(q.predictor_variance(design), np.einsum("ni,ij,nj->n", X, covariance, X), precision)


def test_one_pair_is_the_exact_posterior(precision):
    given = X, y, _, log_odds, variance = problem(1)
    exact = exact_posterior(*given)
    q = converged(given, PairedMeanField(*jnp.ones((3, 1))), count=1)
    prior = Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.probs, exact.inclusion, precision)
    close(q.mean, exact.mean, precision)
    close(q.variance, exact.variance, precision)
    close(bound(q, jnp.asarray(X), jnp.asarray(y), prior), exact.log_evidence, precision)


# Ends


def test_duplicated_features_share_their_weight_and_constant_ones_stay_finite(precision):
    X, y, w, log_odds, variance = problem()
    X[:, 1], X[:, 2], log_odds[1], variance[1] = X[:, 0], 1.0, log_odds[0], variance[0]
    given = X, y, 0.0 * w, log_odds, variance
    design, residual, w, prior = arrays(*given, 3)
    q = PairedMeanField(w + 0.5, w, w + 1.0)
    for _ in range(5):
        previous = q.mean
        q, residual = sweeps(q, design, residual, prior)
        expected, _ = one_by_one(
            X, y, previous, log_odds, variance, lambda m, odds, loc, _: (expit(odds) * loc, (odds,))
        )
        close(q.mean, expected, precision)


@pytest.mark.parametrize("size", [1.0, 1e6])
def test_certain_pairs_stay_finite(precision, size):
    # the logit overflows the sigmoid on either side
    X, y, w, _, variance = problem()
    log_odds = np.array([1e3, -1e3, 0.0, 90.0, -90.0, 1.0, -1.0])
    design, residual, w, prior = arrays(X, size * y, w, log_odds, variance)
    q = PairedMeanField(w**0, w, w**0)
    q, residual = sweeps(q, design, residual, prior)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (*q, residual, q.divergence(prior)))
    assert q.probs[0] == 1.0 and q.variance.min() >= -1e-6 * size**2


def test_divergence_of_certain_spikes_is_the_log_of_their_prior(precision):
    log_odds = np.array([-2.0, 0.0, 50.0])
    prior = Prior(jnp.asarray(log_odds), jnp.ones(3))
    for state, expected in ((1.0, np.log(expit(log_odds))), (0.0, np.log(expit(-log_odds)))):
        close(spike_divergence(jnp.full(3, state), prior), -np.sum(expected), precision)


@pytest.mark.parametrize("name", ["sets", "block"])
def test_random_starts_differ_and_have_the_units_of_the_slabs(x64, name):
    q = member(name)
    one, other = (q.random_start(random.key(1), jnp.full(P, scale)) for scale in (1.0, 2.0))
    for stack in one.stacks:
        np.testing.assert_allclose(jnp.sum(stack.patterns, axis=1), 1)
    assert np.std(one.probs) > 0.05 and np.std(one.loc) > 0.3
    np.testing.assert_allclose(other.loc, 2 * one.loc, rtol=1e-12)
    # the members of a group have one probability
    for members in q.partition.groups:
        assert np.ptp(one.probs[np.array(members)]) < 1e-12
