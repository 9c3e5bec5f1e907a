# SPDX-License-Identifier: Apache-2.0
"""Slice sampling of independent numbers, against distributions that are known."""

import numpy as np
import pytest
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import slice_sample

KEY = random.key(0)


@pytest.mark.parametrize("num_updates", [1, 4])
def test_updates_leave_a_density_invariant(num_updates, precision):
    """Of two peaks, one of them narrow and within reach of the other."""

    def log_density(x):
        return jnp.logaddexp(-0.5 * x**2, -0.5 * (jnp.abs(x - 2) / 0.02) ** 2)

    # both peaks have their heights, so their widths are their probabilities
    size, wide = 20_000, 1 / 1.02
    rng = np.random.default_rng(0)
    is_wide = rng.uniform(size=size) < wide
    before = np.where(is_wide, rng.normal(size=size), 2 + 0.02 * rng.normal(size=size))
    after = np.asarray(slice_sample(KEY, log_density, jnp.asarray(before), num_updates))
    assert after.dtype == np.dtype(precision)

    def cdf(x):
        return wide * stats.norm.cdf(x) + (1 - wide) * stats.norm.cdf(x, 2, 0.02)

    # 8 tests: a false alarm in 1 of 1250 keys
    assert stats.kstest(after, cdf).pvalue > 1e-4
    near = np.abs(after - 2) < 0.04
    expected = cdf(2.04) - cdf(1.96)
    assert stats.binomtest(int(near.sum()), size, expected).pvalue > 1e-4
    assert abs(np.corrcoef(before, after)[0, 1]) < {1: 0.7, 4: 0.2}[num_updates]


def test_an_update_moves_less_than_its_interval_is_wide():
    x = jnp.zeros(1000)
    moved = np.abs(slice_sample(KEY, jnp.zeros_like, x, 1, width=0.5))
    assert 0.4 < moved.max() < 0.5 and moved.min() < 0.01


def test_numbers_outside_of_the_support_come_in_and_none_leaves():
    """Where the density is zero or not a number; the latter is below every level."""

    def log_density(x):
        return jnp.where(x > 0, -x, jnp.where(x > -2, -jnp.inf, jnp.nan))

    @jax.jit
    def step(key, x):
        return slice_sample(key, log_density, x, 1)

    x = jnp.linspace(-2.5, 1.0, 36)
    for key in random.split(KEY, 100):
        x = step(key, x)
    assert np.all((np.asarray(x) > 0) & np.isfinite(x))


def test_what_does_not_move_ends():
    """No number nearby is as likely, as where rounding has made the density a spike."""
    x = jnp.arange(3.0)
    there = slice_sample(KEY, lambda new: jnp.where(new == x, 0.0, -jnp.inf), x, 2)
    np.testing.assert_array_equal(there, x)
