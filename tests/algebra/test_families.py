# SPDX-License-Identifier: Apache-2.0
"""The variational families of pairs against their definition and exact posteriors."""

from functools import partial

import numpy as np
from pair_problems import PRECISION, arrays, close, exact_posterior, one_by_one, problem
import pytest
from scipy import integrate, stats
from scipy.special import expit, xlogy
import truth

import jax
from jax import lax
import jax.numpy as jnp

from numpyro_spikeslab.algebra import families, pairs


@partial(jax.jit, static_argnames="count")
def sweeps(q, design, residual, prior, temperature=1.0, count=1):
    """``count`` sweeps of a variational family."""

    def step(carry, _):
        return carry[0].sweep(design, carry[1], PRECISION, prior, temperature), None

    return lax.scan(step, (q, residual), length=count)[0]


def mean_field(family, size, seed=1):
    """A member of a family that is optimal for nothing."""
    rng = np.random.default_rng(seed)
    probs, loc = rng.uniform(0.1, 0.9, size), rng.normal(size=size)
    scale = rng.uniform(0.2, 1.5, size)
    if family is families.MeanField:
        scale = np.tril(rng.normal(size=(size, size)), -1) * 0.3 + np.diag(scale)
    return family(jnp.asarray(probs), jnp.asarray(loc), jnp.asarray(scale))


FAMILIES = pytest.mark.parametrize("family", [families.PairedMeanField, families.MeanField])


def block_size_of(family):
    return 3 if family is families.PairedMeanField else 10**6


def converge(family, given, count=2000):
    """The fixed point of a family's sweeps at temperature 1, from the given weights."""
    design, residual, w, prior = arrays(*given, block_size_of(family))
    scale = jnp.eye(len(w)) if family is families.MeanField else jnp.ones(len(w))
    return sweeps(family(jnp.ones(len(w)), w, scale), design, residual, prior, count=count)[0]


@FAMILIES
def test_a_fixed_point_does_not_depend_on_the_order_of_the_features(x64, family):
    X, y, w, log_odds, variance = given = problem()
    q = converge(family, given)
    order = np.random.default_rng(0).permutation(7)
    design, _, _, prior = arrays(
        X[:, order], y, w, log_odds[order], variance[order], block_size_of(family)
    )
    permuted = family(q.probs[order], q.loc[order], permuted_scale(q, order))
    swept, _ = sweeps(permuted, design, jnp.asarray(y - X @ q.mean), prior)
    np.testing.assert_allclose(swept.probs, q.probs[order], atol=1e-9)
    np.testing.assert_allclose(swept.mean, q.mean[order], atol=1e-9)


def permuted_scale(q, order):
    if isinstance(q, families.PairedMeanField):
        return q.scale[order]
    covariance = (q.scale_tril @ q.scale_tril.T)[order][:, order]
    return jnp.linalg.cholesky(covariance)


@FAMILIES
def test_zero_features_change_nothing_and_keep_their_prior(x64, family):
    X, y, w, log_odds, variance = given = problem()
    where = [0, 3, 7]
    padded = (
        np.insert(X, where, 0.0, axis=1),
        y,
        np.insert(w, where, 2.0),
        np.insert(log_odds, where, 0.7),
        np.insert(variance, where, 1.3),
    )
    old = np.ones(10, bool)
    old[np.array(where) + np.arange(3)] = False
    q, q_padded = converge(family, given), converge(family, padded)
    np.testing.assert_allclose(q_padded.probs[old], q.probs, atol=1e-9)
    np.testing.assert_allclose(q_padded.mean[old], q.mean, atol=1e-9)
    np.testing.assert_allclose(q_padded.probs[~old], expit(0.7), atol=1e-9)
    np.testing.assert_allclose(q_padded.loc[~old], 0.0, atol=1e-9)
    scale = q_padded.scale if family is families.PairedMeanField else jnp.diag(q_padded.scale_tril)
    np.testing.assert_allclose(scale[~old] ** 2, 1.3, atol=1e-9)


@FAMILIES
def test_the_units_of_features_cancel_against_the_slab_scales(x64, family):
    X, y, w, log_odds, variance = given = problem()
    units = np.array([1e-3, 2.0, -1.0, 30.0, -0.5, 1.0, 1e3])
    q = converge(family, given)
    scaled = converge(family, (X * units, y, w / units, log_odds, variance / units**2))
    np.testing.assert_allclose(scaled.probs, q.probs, atol=1e-8)
    np.testing.assert_allclose(scaled.mean * units, q.mean, atol=1e-8)


def test_duplicated_features_share_their_weight_and_constant_ones_stay_finite(precision):
    X, y, w, log_odds, variance = problem()
    X[:, 1], X[:, 2], log_odds[1], variance[1] = X[:, 0], 1.0, log_odds[0], variance[0]
    given = X, y, 0.0 * w, log_odds, variance
    design, residual, w, prior = arrays(*given, 3)
    q = families.PairedMeanField(w + 0.5, w, w + 1.0)
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
    q = families.PairedMeanField(w**0, w, w**0)
    q, residual = sweeps(q, design, residual, prior)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (*q, residual, q.divergence(prior)))
    assert q.probs[0] == 1.0 and q.variance.min() >= -1e-6 * size**2


# Variational families


def bound(q, X, y, prior):
    """Written from the definition, with the moments of `q` that other tests check."""
    X = jnp.asarray(X)
    squares = jnp.sum((jnp.asarray(y) - X @ q.mean) ** 2)
    squares += q.total_variance(pairs.block_design(X.T, None))
    normaliser = 0.5 * X.shape[0] * jnp.log(PRECISION / (2 * jnp.pi))
    return normaliser - 0.5 * PRECISION * squares - q.divergence(prior)


def entropy(probs):
    return -jnp.sum(probs * jnp.log(probs) + (1.0 - probs) * jnp.log(1.0 - probs))


def replace_first(new, old, count):
    return jnp.concatenate([new[:count], old[count:]])


@FAMILIES
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_every_step_of_a_sweep_maximises_the_bound_in_its_coordinate(x64, family, temperature):
    given = X, y, *_ = problem()
    design, _, _, prior = arrays(*given, block_size_of(family))
    start = mean_field(family, 7)
    end, residual = sweeps(start, design, jnp.asarray(y - X @ start.mean), prior, temperature)
    np.testing.assert_allclose(residual, y - X @ end.mean, atol=1e-12)

    @jax.jit
    def objective(q):
        # a temperature weighs the entropy of the spikes
        return bound(q, X, y, prior) + (temperature - 1.0) * entropy(q.probs)

    gradient = jax.jit(jax.grad(objective))
    if family is families.PairedMeanField:
        states = [
            family(*(replace_first(x, z, m) for x, z in zip(end, start, strict=True)))
            for m in range(8)
        ]
        moved = [None] + [[(0, m), (1, m), (2, m)] for m in range(7)]
    else:
        states = [start] + [family(replace_first(end[0], start[0], m), *end[1:]) for m in range(8)]
        slabs = [(1, slice(None)), (2, np.tril_indices(7))]
        moved = [None, slabs] + [[(0, m)] for m in range(7)]
    values = [float(objective(q)) for q in states]
    # it falls by no more than rounding
    assert np.all(np.diff(values) > -1e-10) and values[-1] > values[0] + 1.0
    for q, coordinates in zip(states[1:], moved[1:], strict=True):
        slope = gradient(q)
        for field, where in coordinates:
            np.testing.assert_allclose(slope[field][where], 0.0, atol=1e-8)


@FAMILIES
def test_the_bound_has_no_slope_at_a_fixed_point(x64, family):
    given = X, y, *_ = problem()
    q = converge(family, given)
    *_, prior = arrays(*given)
    # finite differences, in the unconstrained scale of the probabilities
    unconstrained = (jnp.log(q.probs) - jnp.log1p(-q.probs), *q[1:])

    @jax.jit
    def objective(u):
        return bound(family(jax.nn.sigmoid(u[0]), *u[1:]), X, y, prior)

    for field, x in enumerate(unconstrained):
        for where in zip(*np.nonzero(np.tril(x) if x.ndim == 2 else np.ones(7)), strict=True):

            def at(step, field=field, where=where):
                moved = list(unconstrained)
                moved[field] = moved[field].at[where].add(step)
                return objective(tuple(moved))

            assert abs(at(1e-5) - at(-1e-5)) / 2e-5 < 1e-6
            assert max(at(1e-2), at(-1e-2)) <= at(0.0) + 1e-10


@FAMILIES
@pytest.mark.parametrize("kind", truth.DESIGNS)
def test_the_bound_is_below_the_log_evidence(x64, family, kind):
    given = X, y, *_ = problem(kind=kind)
    exact = exact_posterior(*given)
    *_, prior = arrays(*given)
    assert bound(mean_field(family, 7), X, y, prior) < exact.log_evidence
    q = converge(family, given, count=500)
    gap = exact.log_evidence - bound(q, X, y, prior)
    assert 0.0 < gap < 5.0


def test_one_feature_is_exact_in_the_paired_family(precision):
    given = X, y, _, log_odds, variance = problem(1)
    exact = exact_posterior(*given)
    q = converge(families.PairedMeanField, given, count=1)
    prior = pairs.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.probs, exact.inclusion, precision)
    close(q.mean, exact.mean, precision)
    close(q.variance, exact.variance, precision)
    close(bound(q, jnp.asarray(X), jnp.asarray(y), prior), exact.log_evidence, precision)


def test_moments_of_the_paired_family_are_those_of_its_mixture(precision):
    q = mean_field(families.PairedMeanField, 7)
    mixture = [
        integrate.quad(
            lambda w, g=g, m=m, s=s, k=k: g * w**k * stats.norm.pdf(w, m, s), -20, 20, points=[m]
        )[0]
        for k in (1, 2)
        for g, m, s in zip(*(np.asarray(x, float) for x in q), strict=True)
    ]
    close(q.mean, mixture[:7], precision)
    close(q.variance, np.array(mixture[7:]) - np.square(mixture[:7]), precision)
    X = truth.design("correlated", size=7)
    for whitening in (None, jnp.linspace(0.0, 2.0, len(X))):
        design = pairs.block_design(jnp.asarray(X.T), whitening, 4)
        squares = 1.0 if whitening is None else np.asarray(whitening) ** 2
        expected = np.sum(squares * (X**2 @ np.asarray(q.variance, float)))
        close(q.total_variance(design), expected, precision)


def test_moments_of_the_standard_family_are_those_of_all_its_spikes(precision):
    q = mean_field(families.MeanField, 4)
    probs, loc, root = (np.asarray(x, float) for x in q)
    slab = root @ root.T + np.outer(loc, loc)
    models = np.array(np.meshgrid(*[(0.0, 1.0)] * 4)).reshape(4, -1).T
    weights = np.prod(np.where(models, probs, 1.0 - probs), axis=1)
    mean = weights @ (models * loc)
    second = np.einsum("s,si,sj,ij->ij", weights, models, models, slab)
    covariance = second - np.outer(mean, mean)
    close(q.mean, mean, precision)
    close(q.covariance, covariance, precision)
    X = truth.design("correlated")
    design = pairs.block_design(jnp.asarray(X.T), None, 4)
    close(q.total_variance(design), np.trace(X @ covariance @ X.T), precision)


def bernoulli_divergence(q, p):
    return np.sum(xlogy(q, q / p) + xlogy(1.0 - q, (1.0 - q) / (1.0 - p)))


def test_divergence_of_the_paired_family_is_that_of_numerical_integration(precision):
    *_, log_odds, variance = problem()
    q = mean_field(families.PairedMeanField, 7)
    expected = bernoulli_divergence(np.asarray(q.probs, float), expit(log_odds))
    for g, m, s, v in zip(*(np.asarray(x, float) for x in q), variance, strict=True):
        # given s = 0 the two slabs are the same

        def integrand(w, m=m, s=s, v=v):
            ratio = stats.norm.logpdf(w, m, s) - stats.norm.logpdf(w, 0.0, v**0.5)
            return stats.norm.pdf(w, m, s) * ratio

        expected += g * integrate.quad(integrand, m - 12 * s, m + 12 * s)[0]
    prior = pairs.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.divergence(prior), expected, precision)


def test_divergence_of_the_standard_family_is_that_of_two_normals_and_its_spikes(precision):
    *_, log_odds, variance = problem(4)
    q = mean_field(families.MeanField, 4)
    probs, loc, root = (np.asarray(x, float) for x in q)
    covariance = root @ root.T
    slabs = 0.5 * (
        np.sum((np.diag(covariance) + loc**2) / variance)
        - 4
        + np.sum(np.log(variance))
        - np.linalg.slogdet(covariance)[1]
    )
    prior = pairs.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    expected = slabs + bernoulli_divergence(probs, expit(log_odds))
    close(q.divergence(prior), expected, precision)


def test_divergence_of_certain_spikes_is_the_log_of_their_prior(precision):
    log_odds = np.array([-2.0, 0.0, 50.0])
    prior = pairs.Prior(jnp.asarray(log_odds), jnp.ones(3))
    for state, expected in ((1.0, np.log(expit(log_odds))), (0.0, np.log(expit(-log_odds)))):
        actual = families.spike_divergence(jnp.full(3, state), prior)
        close(actual, -np.sum(expected), precision)
