# SPDX-License-Identifier: Apache-2.0
"""Searches along coordinates climb; slice sampling against distributions that are known."""

import numpy as np
import pytest
from scipy import stats

import jax
from jax import random
import jax.numpy as jnp

from numpyro_spikeslab.algebra.search import climb_coordinates, slice_sample

KEY = random.key(0)


def bowl(x, t):
    """Highest at (1, -2) and t = 2; also where it was evaluated."""
    value = -((x[0] - 1) ** 2) - 3 * (x[1] + 2) ** 2 - x[0] * x[1] - (t - 2) ** 2
    return value, {"x": x, "t": t}


@pytest.mark.parametrize("t", [1.8, 9.0, jnp.nan])
@pytest.mark.parametrize("step", [[0.7, 0.4], [0.0, 0.4], [0.0, 0.0]])
def test_a_search_climbs_and_says_what_it_found_last(step, t, precision):
    start = jnp.array([3.0, 1.0])
    value = bowl(start, 1.0)[0]
    search = jax.jit(lambda *args: climb_coordinates(bowl, *args))
    end, (root, is_at_end) = search(start, jnp.array(step), t, value)
    # a scale that does not reach the value at the start, or has none, is not taken
    assert end.scale == (np.asarray(t, precision) if t == 1.8 else 1.0)
    np.testing.assert_allclose(end.best, bowl(end.x, end.scale)[0], rtol=1e-5)
    assert end.best > value if any(step) or end.scale != 1 else end.best == value
    np.testing.assert_array_equal(end.x[np.array(step) == 0], start[np.array(step) == 0])
    assert bool(is_at_end) == bool(jnp.all(root["x"] == end.x) & (root["t"] == end.scale))
    # with steps the last trial is the vertex of a parabola; without, the start at the given scale
    assert bool(is_at_end) == (any(step) or t == 1.8)


def test_rounds_of_a_search_are_searches_one_after_the_other(x64):
    start, step = jnp.array([3.0, 1.0]), jnp.array([0.7, 0.4])
    all_rounds, _ = climb_coordinates(bowl, start, step, rounds=jnp.array(4))
    x = start
    for _ in range(4):
        end, _ = climb_coordinates(bowl, x, step)
        x, step = end.x, end.step
    jax.tree.map(np.testing.assert_array_equal, all_rounds, end)


def sampled(key, log_density, x, *args, **kwargs):
    return slice_sample(key, lambda x: (log_density(x), ()), x, *args, **kwargs)[0]


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
    after = np.asarray(sampled(KEY, log_density, jnp.asarray(before), num_updates))
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
    moved = np.abs(sampled(KEY, jnp.zeros_like, x, 1, width=0.5))
    assert 0.4 < moved.max() < 0.5 and moved.min() < 0.01


def test_numbers_outside_of_the_support_come_in_and_none_leaves():
    """Where the density is zero or not a number; the latter is below every level."""

    def log_density(x):
        return jnp.where(x > 0, -x, jnp.where(x > -2, -jnp.inf, jnp.nan))

    @jax.jit
    def step(key, x):
        return sampled(key, log_density, x, 1)

    x = jnp.linspace(-2.5, 1.0, 36)
    for key in random.split(KEY, 100):
        x = step(key, x)
    assert np.all((np.asarray(x) > 0) & np.isfinite(x))


def test_what_does_not_move_ends():
    """No number nearby is as likely, as where rounding has made the density a spike."""
    x = jnp.arange(3.0)
    there = sampled(KEY, lambda new: jnp.where(new == x, 0.0, -jnp.inf), x, 2)
    np.testing.assert_array_equal(there, x)


def test_a_number_is_updated_with_the_by_product_of_its_evaluation(x64):
    def evaluate(x):
        return -0.5 * x**2, {"square": x**2}

    @jax.jit
    @jax.vmap
    def update(key, x):
        return slice_sample(key, evaluate, x, known=evaluate(x))

    size = 20_000
    before = random.normal(KEY, (size,))
    after, product = update(random.split(random.key(1), size), before)
    np.testing.assert_allclose(product["square"], after**2, rtol=1e-9)
    # a false alarm in 1 of 10,000 keys
    assert stats.kstest(after, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(before, after)[0, 1]) < 0.7
    # where no other number is as likely, the known one stays with its by-product
    spike = lambda x: (jnp.where(x == 1.0, 0.0, -jnp.inf), x + 1)  # noqa: E731
    one = jnp.array(1.0)
    assert slice_sample(KEY, spike, one, known=spike(one)) == (1.0, 2.0)
