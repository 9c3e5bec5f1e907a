# SPDX-License-Identifier: Apache-2.0
"""The pair's conditional, the sweeps and the variational families against exact posteriors."""

from functools import partial

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.special import expit, logit, xlogy
import truth

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_spikeslab import paired

PRECISION = 1.0 / 0.5**2


def problem(size=7, num_obs=15, seed=0, kind="correlated"):
    """Design (N, P), whitened residual at weights, weights, log odds and slab variances."""
    rng = np.random.default_rng(seed)
    X = truth.design(kind, num_obs, size, seed)
    w = rng.normal(size=size) * (rng.random(size) < 0.5)
    y = rng.normal(size=num_obs) + X[:, 0]
    return X, y, w, rng.normal(size=size) - 1.0, rng.uniform(0.3, 3.0, size)


def arrays(X, y, w, log_odds, variance, block_size=paired.BLOCK_SIZE):
    """The same as arguments of the sweeps."""
    design = paired.block_design(jnp.asarray(X.T), None, block_size)
    residual = jnp.asarray(y - X @ w)
    prior = paired.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    return design, residual, jnp.asarray(w), prior


# compiled once for all tests of the same shapes
run_sweep = jax.jit(paired.sweep, static_argnames="put")


@partial(jax.jit, static_argnames="count")
def sweeps(q, design, residual, prior, temperature=1.0, count=1):
    """``count`` sweeps of a variational family."""

    def step(carry, _):
        return carry[0].sweep(design, carry[1], PRECISION, prior, temperature), None

    return lax.scan(step, (q, residual), length=count)[0]


def exact_posterior(X, y, _, log_odds, variance):
    problem = truth.regression(X, y, PRECISION**-0.5, expit(log_odds), np.sqrt(variance))
    return truth.enumerate_models(problem)


def one_by_one(X, y, w, log_odds, variance, put):
    """The sweep of the definition: one coordinate after the other, from the raw data."""
    w, kept = np.array(w), []
    for m in range(len(w)):
        rest = y - X @ w + X[:, m] * w[m]
        a = PRECISION * X[:, m] @ X[:, m] + 1.0 / variance[m]
        b = PRECISION * X[:, m] @ rest
        odds = log_odds[m] - 0.5 * np.log(variance[m] * a) + 0.5 * b**2 / a
        w[m], outputs = put(m, odds, b / a, 1.0 / a)
        kept.append(outputs)
    return w, np.array(kept).T


def close(actual, expected, precision):
    tolerance = {"float32": 2e-4, "float64": 1e-10}[precision]
    assert actual.dtype == precision
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


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
    _, found = run_sweep(design, residual, w, PRECISION, prior, paired.expectation())
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
    pair = paired.Conditional(logit, jnp.full_like(logit, loc), jnp.full_like(logit, variance))
    w = np.asarray(jax.jit(paired.draw)(pair, noise))
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
        noise, chosen = None, paired.expectation(1.7)

        def weight(m, odds, loc, variance):
            return expit(odds / 1.7) * loc

    else:
        rng = np.random.default_rng(1)
        logistic, normal = rng.logistic(size=size), rng.normal(size=size)
        noise, chosen = (jnp.asarray(logistic), jnp.asarray(normal)), paired.draw

        def weight(m, odds, loc, variance):
            return (odds > logistic[m]) * (loc + np.sqrt(variance) * normal[m])

    residual, found = run_sweep(design, residual, w, PRECISION, prior, chosen, noise)
    expected, conditionals = one_by_one(*given, lambda m, *pair: (weight(m, *pair), pair))
    close(residual, given[1] - given[0] @ expected, precision)
    close(chosen(found, noise), expected, precision)
    for x, y in zip(found, conditionals, strict=True):
        close(x, y, precision)


def test_blocks_cover_the_design_with_few_zero_features():
    for size in (1, 63, 64, 65, 128, 129, 191):
        rows = jnp.ones((size, 3))
        design = paired.block_design(rows, None)
        blocks, features = design.rows.shape[:2]
        assert 0 <= blocks * features - size < blocks and features <= paired.BLOCK_SIZE
        assert paired.feature_squares(design, size).tolist() == [3.0] * size


def test_the_whitening_scales_each_observation(precision):
    X, _, w, *_ = problem(7)
    whitening = np.linspace(0.0, 2.0, len(X))
    design = paired.block_design(jnp.asarray(X.T), jnp.asarray(whitening), 3)
    close(paired.predictor(design, jnp.asarray(w)), whitening * (X @ w), precision)
    close(paired.feature_squares(design, 7), whitening**2 @ X**2, precision)


def mean_field(family, size, seed=1):
    """A member of a family that is optimal for nothing."""
    rng = np.random.default_rng(seed)
    probs, loc = rng.uniform(0.1, 0.9, size), rng.normal(size=size)
    scale = rng.uniform(0.2, 1.5, size)
    if family is paired.MeanField:
        scale = np.tril(rng.normal(size=(size, size)), -1) * 0.3 + np.diag(scale)
    return family(jnp.asarray(probs), jnp.asarray(loc), jnp.asarray(scale))


FAMILIES = pytest.mark.parametrize("family", [paired.PairedMeanField, paired.MeanField])


def block_size_of(family):
    return 3 if family is paired.PairedMeanField else 10**6


def converge(family, given, count=2000):
    """The fixed point of a family's sweeps at temperature 1, from the given weights."""
    design, residual, w, prior = arrays(*given, block_size_of(family))
    scale = jnp.eye(len(w)) if family is paired.MeanField else jnp.ones(len(w))
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
    if isinstance(q, paired.PairedMeanField):
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
    scale = q_padded.scale if family is paired.PairedMeanField else jnp.diag(q_padded.scale_tril)
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
    q = paired.PairedMeanField(w + 0.5, w, w + 1.0)
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
    q = paired.PairedMeanField(w**0, w, w**0)
    q, residual = sweeps(q, design, residual, prior)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (*q, residual, q.divergence(prior)))
    assert q.probs[0] == 1.0 and q.variance.min() >= -1e-6 * size**2


# Variational families


def bound(q, X, y, prior):
    """Written from the definition, with the moments of `q` that other tests check."""
    X = jnp.asarray(X)
    squares = jnp.sum((jnp.asarray(y) - X @ q.mean) ** 2) + jnp.sum(q.predictor_variances(X.T))
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
    if family is paired.PairedMeanField:
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
    q = converge(paired.PairedMeanField, given, count=1)
    prior = paired.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.probs, exact.inclusion, precision)
    close(q.mean, exact.mean, precision)
    close(q.variance, exact.variance, precision)
    close(bound(q, jnp.asarray(X), jnp.asarray(y), prior), exact.log_evidence, precision)


def test_moments_of_the_paired_family_are_those_of_its_mixture(precision):
    q = mean_field(paired.PairedMeanField, 7)
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
    close(q.predictor_variances(jnp.asarray(X.T)), X**2 @ np.asarray(q.variance, float), precision)
    for whitening in (None, jnp.linspace(0.0, 2.0, len(X))):
        design = paired.block_design(jnp.asarray(X.T), whitening, 4)
        squares = 1.0 if whitening is None else np.asarray(whitening) ** 2
        expected = np.sum(squares * (X**2 @ np.asarray(q.variance, float)))
        close(q.predictor_variance(design), expected, precision)


def test_moments_of_the_standard_family_are_those_of_all_its_spikes(precision):
    q = mean_field(paired.MeanField, 4)
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
    expected = np.diag(X @ covariance @ X.T)
    close(q.predictor_variances(jnp.asarray(X.T)), expected, precision)
    close(
        q.predictor_variance(paired.block_design(jnp.asarray(X.T), None, 4)),
        expected.sum(),
        precision,
    )


def bernoulli_divergence(q, p):
    return np.sum(xlogy(q, q / p) + xlogy(1.0 - q, (1.0 - q) / (1.0 - p)))


def test_divergence_of_the_paired_family_is_that_of_numerical_integration(precision):
    *_, log_odds, variance = problem()
    q = mean_field(paired.PairedMeanField, 7)
    expected = bernoulli_divergence(np.asarray(q.probs, float), expit(log_odds))
    for g, m, s, v in zip(*(np.asarray(x, float) for x in q), variance, strict=True):
        # given s = 0 the two slabs are the same

        def integrand(w, m=m, s=s, v=v):
            ratio = stats.norm.logpdf(w, m, s) - stats.norm.logpdf(w, 0.0, v**0.5)
            return stats.norm.pdf(w, m, s) * ratio

        expected += g * integrate.quad(integrand, m - 12 * s, m + 12 * s)[0]
    prior = paired.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    close(q.divergence(prior), expected, precision)


def test_divergence_of_the_standard_family_is_that_of_two_normals_and_its_spikes(precision):
    *_, log_odds, variance = problem(4)
    q = mean_field(paired.MeanField, 4)
    probs, loc, root = (np.asarray(x, float) for x in q)
    covariance = root @ root.T
    slabs = 0.5 * (
        np.sum((np.diag(covariance) + loc**2) / variance)
        - 4
        + np.sum(np.log(variance))
        - np.linalg.slogdet(covariance)[1]
    )
    prior = paired.Prior(jnp.asarray(log_odds), jnp.asarray(variance))
    expected = slabs + bernoulli_divergence(probs, expit(log_odds))
    close(q.divergence(prior), expected, precision)


def test_divergence_of_certain_spikes_is_the_log_of_their_prior(precision):
    log_odds = np.array([-2.0, 0.0, 50.0])
    prior = paired.Prior(jnp.asarray(log_odds), jnp.ones(3))
    for state, expected in ((1.0, np.log(expit(log_odds))), (0.0, np.log(expit(-log_odds)))):
        actual = paired.spike_divergence(jnp.full(3, state), prior)
        close(actual, -np.sum(expected), precision)


# The Gibbs sweep


@jax.jit
def gibbs_sweeps(keys, design, residual, weights, prior):
    """One sweep from each of many weights."""

    def one(key, residual, weights):
        return paired.gibbs_sweep(key, design, residual, weights, PRECISION, prior)

    return jax.vmap(one)(keys, residual, weights)


@jax.jit
def gibbs_chain(keys, design, y, weights, prior):
    """Many sweeps, one after the other."""

    def step(weights, key):
        residual = y - paired.predictor(design, weights)
        out = paired.gibbs_sweep(key, design, residual, weights, PRECISION, prior)
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
