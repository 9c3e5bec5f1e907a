# SPDX-License-Identifier: Apache-2.0
"""The variational families against their definition and exact posteriors."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy.special import expit
from truth.pair_problems import PRECISION, arrays, close, exact_posterior, problem

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab import SpikeSlab
from numpyro_spikeslab.algebra.families import (
    MeanField,
    PairedMeanField,
    PatternMeanField,
    spike_divergence,
)
from numpyro_spikeslab.algebra.pairs import Prior, block_design
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.patterns import SetFactors

P = 7
# a block, a group that is padded, one that is not, and a single weight in between
SETS = Partition(P, blocks=((4, 1),), groups=((0, 2, 6), (5, 3)))
SINGLE = Partition(P, blocks=((5, 0, 3),))
FAMILIES = {"pairs": None, "sets": SETS, "block": SINGLE, "mean field": MeanField}
EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)


def member(name, seed=1) -> Any:
    """A member of a family that is optimal for nothing."""
    rng = np.random.default_rng(seed)
    kind = FAMILIES[name]
    probs, loc, scale = rng.uniform(0.1, 0.9, P), rng.normal(size=P), rng.uniform(0.2, 1.5, P)

    def root(b, diagonal):
        return np.tril(0.3 * rng.normal(size=(b, b)), -1) + np.diag(diagonal)

    if kind is MeanField:
        return MeanField(jnp.asarray(probs), jnp.asarray(loc), jnp.asarray(root(P, scale)))
    pairs = PairedMeanField(jnp.asarray(probs), jnp.asarray(loc), jnp.asarray(scale))
    if kind is None:
        return pairs
    stacks = []
    for (S, b), (members, _) in kind.stacks.items():
        patterns = rng.dirichlet(np.ones(S), len(members))
        linear = np.where(members < P, rng.normal(size=members.shape), 0.0)
        tril = np.stack([root(b, rng.uniform(0.5, 2.0, b)) for _ in members])
        # the padding has the identity
        real = (members < P)[:, :, None] & (members < P)[:, None, :]
        arrays = patterns, linear, np.where(real, tril, np.eye(b))
        stacks.append(SetFactors(*map(jnp.asarray, arrays)))
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
                on = np.flatnonzero(pattern)
                covariance = np.zeros(A.shape)
                covariance[np.ix_(on, on)] = np.linalg.inv(A[np.ix_(on, on)])
                mean = covariance @ h
                parts = pattern[real], mean[real], covariance[np.ix_(real, real)]
                factor.append(Component(tuple(members[real]), float(p), *parts))
            factors.append(factor)
    return factors


def moments_of(q) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inclusion probabilities, means and covariances of the weights, from the definition."""
    if isinstance(q, MeanField):
        p, loc, root = (np.asarray(x, float) for x in q)
        second = (np.outer(p, p) + np.diag(p - p**2)) * (root @ root.T + np.outer(loc, loc))
        return p, p * loc, second - np.outer(p * loc, p * loc)
    probs, mean, covariance = np.zeros(P), np.zeros(P), np.zeros((P, P))
    for factor in components(q):
        members = list(factor[0].members)
        probs[members] = sum(x.prob * x.spikes.astype(float) for x in factor)
        mean[members] = sum(x.prob * x.mean for x in factor)
        second = sum(x.prob * (x.covariance + np.outer(x.mean, x.mean)) for x in factor)
        covariance[np.ix_(members, members)] = second - np.outer(mean[members], mean[members])
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
        members = list(factor[0].members)
        logits = np.array([x.spikes @ log_odds[members] for x in factor])
        log_prior = logits - np.log(np.sum(np.exp(logits)))
        for part, log_p in zip(factor, log_prior, strict=True):
            on = part.spikes > 0
            included = part.mean[on], part.covariance[np.ix_(on, on)], variance[members][on]
            slabs = normal_divergence(*included)
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
        size = 10**6 if name == "mean field" else 4
        design = block_design(jnp.asarray(X.T), jnp.asarray(whitening), size)
        rows = whitening[:, None] * X
        expected = np.einsum("ni,ij,nj->n", rows, covariance, rows)
        close(q.predictor_variance(design), expected, precision)
        close(q.total_variance(design), np.sum(expected), precision)
    prior = Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.divergence(prior), divergence_of(q, log_odds, variance), precision)


@partial(jax.jit, static_argnames="count")
def sweeps(q, design, residual, prior, temperature=1.0, count=1):
    def step(carry, _):
        return carry[0].sweep(design, carry[1], PRECISION, prior, temperature), None

    return lax.scan(step, (q, residual), length=count)[0]


def start(arguments, q):
    """Design and residual at ``<w>`` of a family, and the prior."""
    X, y, _, log_odds, variance = arguments
    size = 10**6 if isinstance(q, MeanField) else 3
    design, _, _, prior = arrays(X, y, np.zeros(len(log_odds)), log_odds, variance, size)
    return design, jnp.asarray(y) - jnp.asarray(X) @ q.mean, prior


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
    arguments = X, y, *_ = problem()
    X[:, 3] = 0.0
    q = member(name)
    design, residual, prior = start(arguments, q)

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
    q, _ = sweeps(q, design, residual, prior, temperature, 1000)
    point, back = free(q)
    slopes = jax.jit(jax.grad(lambda x: objective(back(x))))(point)
    # roots of covariances have zeros above their diagonal
    for slope in jax.tree.leaves(slopes):
        slope = np.tril(slope) if slope.ndim > 1 else np.asarray(slope)
        # the logit of a probability of 1 has none
        np.testing.assert_allclose(slope[np.isfinite(slope)], 0, atol=1e-7)
    if temperature == 1.0 and name != "sets":
        gap = exact_posterior(*arguments).log_evidence - values[-1]
        assert 0.0 < gap < 5.0


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


VARIANCES = {
    # a spike that is almost certain, of a large slab
    "spike and slab": (lambda: SpikeSlab(1 - 2.0**-20, 1e-2, 1e3).variance, 1e-4 + 1e6 * 2.0**-20),
    # two columns of mean 1e4, of which the data know the sum of weights
    "mean field": (
        lambda: MeanField(
            jnp.ones(2), jnp.ones(2), jnp.array([[1.0, 0.0], [-1.0, 1e-4]])
        ).predictor_variance(block_design(jnp.array([[1e4], [1e4 + 1]]), None))[0],
        1 + (1 + 1e-4) ** 2,
    ),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_variances_are_sums_of_squares(name, precision):
    variance, expected = VARIANCES[name]
    np.testing.assert_allclose(variance(), expected, rtol=1e-5)


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
