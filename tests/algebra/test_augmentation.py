# SPDX-License-Identifier: Apache-2.0
"""Augmented likelihoods: draws against their densities, bounds against quadrature."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from scipy import stats
from scipy.special import log_expit
from truth.enumeration import agrees

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.augmentation import (
    Laplace,
    Logistic,
    Ordered,
    OrderedProbit,
    Probit,
    StudentT,
)

KEY, SIZE = random.key(0), 20_000


class Case(NamedTuple):
    """A likelihood of three observations or two, and what it should be.

    - **log_density** - of predictors, at the last axis.
    - **bound** - on its mean, of mean and variance of the predictor.
    """

    make: Callable[[], Any]
    log_density: Callable[[Any], Any]
    bound: Callable[[Any, Any], Any]


def logistic(y, total, static=None):
    """A case of the logistic likelihood."""
    y, total = np.broadcast_arrays(np.asarray(y, float), total)

    def bound(mean, variance):
        half = 0.5 * np.sqrt(mean**2 + variance)
        return (y - total / 2) * mean - total * np.logaddexp(half, -half)

    def make():
        return Logistic(jnp.asarray(y), static or jnp.asarray(total))

    return Case(make, lambda f: y * log_expit(f) + (total - y) * log_expit(-f), bound)


def symmetric(make, log_density, y):
    """A case whose bound is the log density at the mean squared residual."""
    return Case(
        lambda: make(jnp.asarray(y)),
        lambda f: log_density(y - f),
        lambda mean, variance: log_density(np.sqrt((y - mean) ** 2 + variance)),
    )


LOW, HIGH = np.array([-np.inf, -0.5, 0.8]), np.array([-0.5, 0.8, np.inf])
"""Cut points below and above three classes in order."""


def bound_of_order(mean, variance):
    """That of both trials, of which the classes at the ends have one."""
    total = 0.0
    for sign, cut in (1, LOW), (-1, HIGH):
        e = sign * (mean - np.where(np.isfinite(cut), cut, 0))
        half = 0.5 * np.sqrt(e**2 + variance)
        total = total + np.isfinite(cut) * (e / 2 - np.logaddexp(half, -half))
    return total


def log_of_intervals(f):
    """Log probability that a normal variate is between cut points, in the nearer tail."""
    low, high = LOW - f, HIGH - f
    low, high = np.where(low > -high, [-high, -low], [low, high])
    below, above = stats.norm.logcdf(low), stats.norm.logcdf(high)
    return above + np.log1p(-np.exp(below - above))


SIGN, POWERS = np.array([-1.0, 1.0]), np.array([0.4, 1.0, 2.5])
CASES = {
    "Bernoulli": logistic([0, 1], 1, static=1),
    "Binomial": logistic([0, 2, 3], 3),
    "negative Binomial": logistic([0, 1, 6], [1.7, 2.7, 7.7]),
    "classes in order": Case(
        lambda: Ordered(jnp.arange(3.0), jnp.array(HIGH[:2])),
        lambda f: log_expit(f - LOW) + log_expit(HIGH - f),
        bound_of_order,
    ),
    "probit": Case(
        lambda: Probit(jnp.array([0.0, 1.0])),
        lambda f: stats.norm.logcdf(SIGN * f),
        lambda mean, variance: stats.norm.logcdf(SIGN * mean) - variance / 2,
    ),
    "classes in order, probit": Case(
        lambda: OrderedProbit(jnp.array(LOW), jnp.array(HIGH)),
        log_of_intervals,
        lambda mean, variance: log_of_intervals(mean) - variance / 2,
    ),
    "Student-t": symmetric(
        lambda y: StudentT(y, 3.0, 0.7),
        lambda e: stats.t.logpdf(e, 3, scale=0.7),
        np.array([-0.4, 0.2, 0.9]),
    ),
    "Student-t, to a power": symmetric(
        lambda y: StudentT(y, 3.0, 0.7, POWERS),
        lambda e: POWERS * stats.t.logpdf(e, 3, scale=0.7),
        np.array([-0.4, 0.2, 0.9]),
    ),
    "Laplace": symmetric(
        lambda y: Laplace(y, 0.6),
        lambda e: stats.laplace.logpdf(e, scale=0.6),
        np.array([-0.4, 0.2, 0.9]),
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def log_of(stand_in, f):
    precision, target, log_norm = (np.asarray(x, float) for x in stand_in)
    return log_norm - 0.5 * precision * (target - f) ** 2


def grid_of(case, low=-40.0, high=40.0):
    """Predictors and the log density of each observation, for the trapezoidal rule."""
    f = np.linspace(low, high, 20_001)
    return f, case.log_density(f[:, None])


@cases
def test_log_densities(precision, case):
    likelihood, tolerance = case.make(), {"float32": 1e-5, "float64": 1e-10}[precision]
    f = np.tile(np.linspace(-20.0, 20.0, 41)[:, None], case.bound(0.0, 1.0).size)
    actual = likelihood.log_density(jnp.asarray(f))
    assert actual.dtype == precision
    np.testing.assert_allclose(actual, case.log_density(f), tolerance, tolerance)


@cases
def test_the_mean_over_draws_is_the_density(case):
    """Relative to its value where the auxiliaries are drawn."""
    likelihood, start = case.make(), 0.5
    f = jnp.full((SIZE, case.bound(0.0, 1.0).size), start)
    stand_in = jax.jit(lambda f: likelihood.draw(KEY, f))(f)
    # the density falls less than that of a normal variate, so that means have a normal error
    for other in (-1.5, 2.5):
        ratio = np.exp(log_of(stand_in, other) - log_of(stand_in, start))
        assert agrees(ratio, np.exp(case.log_density(other) - case.log_density(start)))


@pytest.mark.parametrize("name", ["Bernoulli", "Binomial", "negative Binomial"])
def test_at_predictor_zero_the_auxiliaries_are_those_of_the_mixture(name):
    case = CASES[name]
    likelihood = case.make()
    f = jnp.zeros((SIZE, case.bound(0.0, 1.0).size))
    stand_in = jax.jit(lambda f: likelihood.draw(KEY, f))(f)
    assert agrees(np.exp(log_of(stand_in, -2.0)), np.exp(case.log_density(-2.0)))


@cases
def test_expected_stand_ins_are_the_bound(precision, case):
    """Where they are taken they are what the documentation states, and a bound anywhere."""
    mean, variance = (x.reshape(-1, 1) for x in np.meshgrid([-3.0, 0.0, 1.0], [0.0, 0.3, 4.0]))
    shape = mean.shape[0], case.bound(0.0, 1.0).size
    arguments = (jnp.asarray(np.broadcast_to(x, shape)) for x in (mean, variance))
    stand_in = jax.tree.map(lambda x: np.broadcast_to(x, shape), case.make().expect(*arguments))
    precision_, target, log_norm = (np.asarray(x, float) for x in stand_in)
    assert stand_in.precision.dtype == precision
    # at each mean and variance, of the stand-ins of all
    at = log_norm[:, None] - 0.5 * precision_[:, None] * ((target[:, None] - mean) ** 2 + variance)
    tolerance = {"float32": 1e-4, "float64": 1e-6}[precision]
    own_bound = at[np.arange(len(mean)), np.arange(len(mean))]
    np.testing.assert_allclose(own_bound, case.bound(mean, variance), tolerance, tolerance)
    grid, log_density = grid_of(case)
    probs = stats.norm.pdf(grid, mean, np.sqrt(np.maximum(variance, 1e-4)))
    expected = probs / probs.sum(axis=1, keepdims=True) @ log_density
    assert np.all(at < expected + 1e-3)
    touches = np.ravel(variance) == 0
    np.testing.assert_allclose(own_bound[touches], case.log_density(mean[touches]), atol=tolerance)


def test_extreme_predictors_and_empty_totals_have_finite_stand_ins(precision):
    f = jnp.array([0.0, 1e-30, 60.0, -60.0, 1e4])
    y = jnp.array([0.0, 0.0, 1.0, 1.0, 0.0])
    empty = Logistic(jnp.zeros(5), jnp.zeros(5))
    rare = Logistic(jnp.zeros(5), jnp.full(5, 1e-3))
    order = Ordered(2 * y, jnp.array([-1e4, 1e-3]))
    continuous = StudentT(f, 0.1, 1e-3), Laplace(f, 1e-3)
    intervals = OrderedProbit(y, y + 1e-3)
    likelihoods = Logistic(y, 1), empty, rare, order, Probit(y), intervals, *continuous
    for likelihood in likelihoods:
        drawn = jax.jit(lambda f, likelihood=likelihood: likelihood.draw(KEY, f))(f)
        for stand_in in drawn, likelihood.expect(f, jnp.zeros(5)):
            for x in stand_in:
                assert x.dtype == precision and np.all(np.isfinite(x))
            assert np.all(stand_in.precision > 0)
    assert np.all(empty.expect(f, f).target == 0)
