# SPDX-License-Identifier: Apache-2.0
"""Metropolis steps of pairs, and the learnt Gaussian, against quadrature."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln, log_expit
from truth.enumeration import agrees

import jax
from jax import lax, nn, random
import jax.numpy as jnp
from jax.scipy.special import gammaln as log_gamma

from numpyro_spikeslab.algebra import pair_metropolis
from numpyro_spikeslab.algebra.augmentation import StandIn
from numpyro_spikeslab.algebra.pair_metropolis import LearntMoments, PairState
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.algebra.partition import Partition

KEY, CHAINS, SIZE = random.key(0), 4000, 12
LOG_ODDS, VARIANCE = np.array([-0.5, 0.4]), np.array([0.6, 1.5])
rng = np.random.default_rng(3)
X = rng.normal(size=(2, SIZE))
X[1] = 0.6 * X[0] + 0.8 * X[1]
X *= 0.5
OFFSET = 0.3 * rng.normal(size=SIZE)
F = OFFSET + 0.7 * X[0]
COUNTS, CLASSES = rng.poisson(np.exp(F)).astype(float), (F + rng.logistic(size=SIZE) > 0) * 1.0
OTHERS = F + 0.5 * rng.standard_t(3, size=SIZE)

# elementwise log densities, in JAX and in numpy
DENSITIES = {
    "Poisson": (
        lambda f: COUNTS * f - jnp.exp(f) - log_gamma(COUNTS + 1),
        lambda f: COUNTS * f - np.exp(f) - gammaln(COUNTS + 1),
    ),
    "logit": (
        lambda f: CLASSES * f - nn.softplus(f),
        lambda f: CLASSES * log_expit(f) + (1 - CLASSES) * log_expit(-f),
    ),
    # neither concave nor smooth
    "made up": (
        lambda f: -jnp.log1p(2 * jnp.abs(OTHERS - f) ** 1.5),
        lambda f: -np.log1p(2 * np.abs(OTHERS - f) ** 1.5),
    ),
}


def exact_posterior(density, log_odds, models=(0, 1, 2, 3)):
    """Probabilities of all four models, of which some are possible, means and second moments of the
    weights by quadrature."""
    grids = [np.linspace(-6, 6, 301) * np.sqrt(v) for v in VARIANCE]
    slabs = [stats.norm.pdf(g, scale=np.sqrt(v)) for g, v in zip(grids, VARIANCE, strict=True)]
    steps = [g[1] - g[0] for g in grids]
    probs, moments = [], []
    for model in product((0, 1), repeat=2):
        points = [g if s else np.zeros(1) for g, s in zip(grids, model, strict=True)]
        weights = [p * d if s else np.ones(1) for p, d, s in zip(slabs, steps, model, strict=True)]
        w = np.stack(np.meshgrid(*points, indexing="ij"), axis=-1).reshape(-1, 2)
        mass = np.outer(*weights).ravel() * np.exp(density(OFFSET + w @ X).sum(axis=1))
        probs.append(mass.sum() * np.exp(np.dot(model, log_odds)))
        moments.append(mass @ np.hstack([w, w**2]) / mass.sum())
    probs = np.where(np.isin(range(4), models), probs, 0)
    probs /= np.sum(probs)
    return probs, probs @ np.array(moments)


def chains(density, log_odds, num_sweeps=30, spikes=0, sets=None):
    """Last states of independent chains."""
    rows, prior = jnp.asarray(X), Prior(jnp.asarray(log_odds), jnp.asarray(VARIANCE))

    def chain(key):
        def step(state, key):
            return pair_metropolis.metropolis_sweep(key, rows, density, state, prior, sets)

        start = PairState(jnp.full(2, spikes), jnp.zeros(2), jnp.asarray(OFFSET))
        state, accepted = lax.scan(step, start, random.split(key, num_sweeps))
        return state, jnp.mean(accepted)

    return jax.jit(jax.vmap(chain))(random.split(KEY, CHAINS))


@pytest.mark.parametrize("name", DENSITIES)
def test_chains_have_the_posterior_of_quadrature(name):
    density, exact_density = DENSITIES[name]
    probs, moments = exact_posterior(exact_density, LOG_ODDS)
    state, accepted = chains(density, LOG_ODDS)
    spikes, slabs, f = (np.asarray(x) for x in state)
    counts = np.bincount(spikes @ [2, 1], minlength=4)
    assert stats.chisquare(counts, CHAINS * probs).pvalue > 1e-6
    w = spikes * slabs
    assert agrees(np.hstack([w, w**2]), moments)
    # excluded slabs have their prior
    for m in range(2):
        excluded = slabs[spikes[:, m] == 0, m] / np.sqrt(VARIANCE[m])
        assert stats.kstest(excluded, "norm").pvalue > 1e-6
    np.testing.assert_allclose(f, OFFSET + w @ X, atol=1e-4)
    assert np.mean(accepted) > 0.8


def test_weights_that_share_a_spike_are_in_together():
    density, exact_density = DENSITIES["Poisson"]
    probs, moments = exact_posterior(exact_density, LOG_ODDS, (0, 3))
    # a set of three is padded, here by a column without an effect
    state, accepted = chains(density, LOG_ODDS, sets=Partition(2, groups=((0, 1, 2, 2),)))
    spikes, slabs, f = (np.asarray(x) for x in state)
    assert np.all(spikes[:, 0] == spikes[:, 1])
    counts = np.bincount(spikes[:, 0], minlength=2)
    assert stats.chisquare(counts, CHAINS * probs[[0, 3]]).pvalue > 1e-6
    w = spikes * slabs
    assert agrees(np.hstack([w, w**2]), moments)
    excluded = slabs[spikes[:, 0] == 0] / np.sqrt(VARIANCE)
    assert stats.kstest(excluded.ravel(), "norm").pvalue > 1e-6
    np.testing.assert_allclose(f, OFFSET + w @ X, atol=1e-4)
    assert np.mean(accepted) > 0.75


def test_weights_that_are_certain_are_always_included():
    """As coefficients with a Normal prior are; the other weight never is."""
    density, exact_density = DENSITIES["Poisson"]
    state, accepted = chains(density, np.array([np.inf, -np.inf]), spikes=jnp.array([1, 0]))
    assert np.all(state.spikes == jnp.array([1, 0]))
    _, moments = exact_posterior(exact_density, np.array([40.0, -40.0]))
    first = np.asarray(state.slabs[:, 0])
    assert agrees(np.stack([first, first**2], axis=1), moments[[0, 2]])
    assert np.mean(accepted) > 0.9


def test_a_mode_far_away_and_predictors_that_overflow_are_no_obstacle(precision):
    """An intercept of counts around 3,000, from its prior's mean on."""
    y, zero, x, one = jnp.full(50, 3000.0), jnp.zeros(50), 40 * jnp.ones((1, 50)), jnp.ones(1)

    def density(f):
        return y * f - jnp.exp(f)

    slopes = pair_metropolis.Slopes.of(density, zero)
    start = pair_metropolis.Expansion.of(slopes, x, one, jnp.zeros(1))
    expansion = pair_metropolis.expand_near_mode(density, x, zero, one, start)
    assert abs(40 * expansion.at[0] - np.log(3000)) < 0.01
    assert expansion.root.dtype == precision
    assert expansion.square(expansion.step) < 0.2**2


# The learnt Gaussian


def test_the_learnt_gaussian_has_the_mean_curvature_also_where_there_are_kinks():
    """Of a Laplace density the mean curvature under a normal predictor is twice a normal density;
    of a Gaussian one all is learnt from two draws."""
    mean, sd, y = np.array([0.0, 0.4, 2.0]), np.array([0.5, 0.3, 1.0]), jnp.array([0.2, 0.5, 1.0])
    f = jnp.asarray(mean + sd * np.random.default_rng(0).normal(size=(20_000, 3)))
    slope = jnp.sign(y - f)
    start = LearntMoments.zero(y)
    learnt = lax.scan(lambda m, x: (m.updated(*x), None), start, (f, slope))[0].stand_in()
    np.testing.assert_allclose(learnt.precision, 2 * stats.norm.pdf(y, mean, sd), rtol=0.06)
    expected = np.mean(f, axis=0) + np.mean(slope, axis=0) / learnt.precision
    np.testing.assert_allclose(learnt.target, expected, rtol=1e-4)
    precision = jnp.array([0.1, 2.0, 30.0])
    moments = start
    for row in f[:2]:
        moments = moments.updated(row, precision * (y - row))
    np.testing.assert_allclose(moments.stand_in().precision, precision, rtol=1e-4)
    np.testing.assert_allclose(moments.stand_in().target, y, rtol=1e-3)


@pytest.mark.parametrize("slope", [0.0, 2.0])
def test_predictors_that_have_not_moved_have_a_finite_gaussian(slope):
    moments = LearntMoments.zero(jnp.zeros(2))
    for f in (0.0, 1.0):
        moments = moments.updated(jnp.array([3.0, f]), jnp.array([slope, -f * slope]))
    stand_in = moments.stand_in()
    assert all(np.all(np.isfinite(x)) for x in stand_in)
    assert np.all(stand_in.precision > 0)


def test_the_correction_is_the_ratio_of_target_and_proposal(precision):
    density, exact_density = DENSITIES["logit"]
    old, new = rng.normal(size=(2, SIZE))
    # the first is nearly flat, as where the target is far away
    W, z = rng.uniform(0.1, 0.3, SIZE), rng.normal(size=SIZE)
    W[0], z[0] = 1e-5, 1e5
    stand_in = StandIn(*map(jnp.asarray, (W, z, np.zeros(SIZE))))

    def gap(f):
        return np.sum(exact_density(f) + 0.5 * W * (z - f) ** 2)

    actual = pair_metropolis.correction(density, stand_in, jnp.asarray(old), jnp.asarray(new))
    tolerance = {"float32": 1e-5, "float64": 1e-9}[precision]
    np.testing.assert_allclose(actual, gap(new) - gap(old), tolerance, tolerance)


def test_corrected_gaussian_moves_have_the_posterior_of_quadrature():
    """Moves that draw the weight of a column anew from its posterior under a poor Gaussian."""
    density, exact_density = DENSITIES["logit"]
    x, prior_variance = X[0], 4.0
    W, z = np.full(SIZE, 0.1), 4 * CLASSES - 2
    precision = W @ x**2 + 1 / prior_variance
    loc = W @ (x * (z - OFFSET)) / precision
    stand_in = StandIn(*map(jnp.asarray, (W, z, np.zeros(SIZE))))

    def step(_, state):
        key, w = state
        key, key_w, key_accept = random.split(key, 3)
        new = loc + random.normal(key_w, w.shape) / np.sqrt(precision)
        old_f, new_f = (OFFSET + v[:, None] * x for v in (w, new))
        ratio = jax.vmap(lambda a, b: pair_metropolis.correction(density, stand_in, a, b))(
            old_f, new_f
        )
        return key, jnp.where(jnp.log(random.uniform(key_accept, w.shape)) < ratio, new, w)

    w = jax.jit(lambda w: lax.fori_loop(0, 60, step, (KEY, w))[1])(jnp.zeros(CHAINS))
    grid = np.linspace(-12, 12, 2001)
    log_density = exact_density(OFFSET + grid[:, None] * x).sum(axis=1)
    probs = np.exp(log_density + stats.norm.logpdf(grid, scale=np.sqrt(prior_variance)))
    probs /= probs.sum()
    w = np.asarray(w, float)
    assert agrees(np.stack([w, w**2], axis=1), [grid @ probs, grid**2 @ probs])
