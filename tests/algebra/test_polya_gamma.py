# SPDX-License-Identifier: Apache-2.0
"""Draws by rejection, and of Polya-Gamma variates, against their distributions."""

import numpy as np
import pytest
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra import polya_gamma, rejection, truncated_normal

KEY, SIZE = random.key(0), 40_000
# on both sides of the change of envelopes at 3.1
TILTS = np.array([0.0, 0.5, 3.0, 3.2, 10.0])


def log_cosh(x):
    return np.logaddexp(x, -x) - np.log(2)


def moments(b, c):
    """Mean and variance of PG(b, c)."""
    c = np.maximum(c, 1e-2)
    mean = 0.5 * b / c * np.tanh(0.5 * c)
    return mean, 0.25 * b / c**3 * (np.sinh(c) - c) / np.cosh(0.5 * c) ** 2


@pytest.mark.parametrize("b", [None, 0.3, 1.0, 37.5])
def test_moments_and_laplace_transforms_of_polya_gamma_draws(b):
    """20 comparisons of means at 1e-6 each; `None` is the Python number 1."""
    c = jnp.repeat(jnp.asarray(TILTS)[:, None], SIZE, axis=1)
    if b is None:
        omega, b = jax.jit(lambda c: polya_gamma.draw(KEY, 1, c))(c), 1.0
    else:
        omega = jax.jit(lambda b, c: polya_gamma.draw(KEY, b, c))(jnp.asarray(b), c)
    omega = np.asarray(omega, float)
    mean, variance = moments(b, TILTS)
    checks = [(omega, mean), ((omega - mean[:, None]) ** 2, variance)]
    for t in 0.3 / mean, 2 / mean:
        log_transform = b * (log_cosh(TILTS / 2) - log_cosh(np.sqrt(TILTS**2 / 4 + t / 2)))
        checks.append((np.exp(-t[:, None] * omega), np.exp(log_transform)))
    for x, expected in checks:
        error = x.std(axis=1) / np.sqrt(SIZE)
        np.testing.assert_array_less(np.abs(x.mean(axis=1) - expected), 4.9 * error)


def test_the_remainder_has_the_error_that_the_documentation_states():
    f = np.array([3.0, 5.0, 10.0, 20.0])
    terms = polya_gamma.SHAPES * np.log1p(0.5 * f[:, None] ** 2 / polya_gamma.RATES)
    error = log_cosh(f / 2) - terms.sum(axis=1)
    for x in error:
        assert f"{x:.1e}".replace("e-0", "e-") in polya_gamma.draw.__doc__


def samples(draws, parameters):
    """One row of draws for each parameter."""
    return np.asarray(draws(jnp.repeat(jnp.asarray(parameters)[:, None], SIZE, axis=1)))


@pytest.mark.parametrize(
    ("draws", "parameters", "exact"),
    [
        (lambda a: rejection.gamma(KEY, a), [0.05, 0.9, 1.0, 2.5, 50.0], stats.gamma),
        (
            lambda low: truncated_normal.draw_above(KEY, low),
            [-30.0, -1.0, 2.0, 3.99, 4.01, 10.0],
            lambda low: stats.truncnorm(low, np.inf),
        ),
        (
            lambda low: truncated_normal.draw_between(KEY, low, low + 0.3),
            [-30.0, -4.35, -1.0, -0.1, 3.99, 4.01, 30.0],
            lambda low: stats.truncnorm(low, low + 0.3),
        ),
        (
            lambda rate: polya_gamma.inverse_gaussian(
                random.normal(KEY, rate.shape), random.uniform(random.key(1), rate.shape), rate
            ),
            [0.0, 0.1, 1.0, 10.0],
            lambda rate: stats.invgauss(1 / rate) if rate else stats.levy(),
        ),
    ],
    ids=["gamma", "normal above", "normal between", "inverse Gaussian"],
)
def test_draws_have_their_distribution(x64, draws, parameters, exact):
    """Kolmogorov and Smirnov's test at 1e-5."""
    for x, parameter in zip(samples(jax.jit(draws), parameters), parameters, strict=True):
        assert stats.kstest(x, exact(parameter).cdf).pvalue > 1e-5, parameter


def test_extreme_arguments_have_finite_draws(precision):
    c, b = jnp.array([0.0, 1e-20, 1e3, -1e6, 1e10]), jnp.array([0.0, 1e-3, 1.0, 1e4, 1e6])
    ones, some = jax.jit(lambda b, c: (polya_gamma.draw(KEY, 1, c), polya_gamma.draw(KEY, b, c)))(
        b, c
    )
    for omega in ones, some:
        assert omega.dtype == precision
        assert np.all(np.isfinite(omega) & (omega >= 0))


def test_draws_side_by_side_are_those_of_single_calls():
    keys, c = random.split(KEY, 3), jnp.linspace(-4.0, 4.0, 30).reshape(3, 2, 5)
    single = jax.jit(polya_gamma.draw_one)
    together = jax.jit(jax.vmap(polya_gamma.draw_one))(keys, c)
    for row, key, tilts in zip(together, keys, c, strict=True):
        np.testing.assert_allclose(row, single(key, tilts), rtol=1e-5)
