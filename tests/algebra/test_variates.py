# SPDX-License-Identifier: Apache-2.0
"""Random numbers from uniform ones, against the distributions they should have."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra import variates


@pytest.mark.parametrize("size", [1, 2, 7, 16, 50])
def test_an_index_is_drawn_with_probability_proportional_to_its_weight(size):
    rng = np.random.default_rng(size)
    weights = rng.exponential(size=(3, size)) * (rng.random((3, size)) < 0.6)
    weights[:, size // 2] = 1.0
    weights[1] *= 1e-30
    grid = (np.arange(20_000) + 0.5) / 20_000
    draw = jax.jit(jax.vmap(variates.index, (0, None)))
    drawn = draw(jnp.tile(grid, (3, 1)).T, jnp.asarray(weights))
    for k in range(3):
        share = np.bincount(drawn[:, k], minlength=size) / grid.size
        np.testing.assert_allclose(share, weights[k] / weights[k].sum(), atol=2 / grid.size)
        assert np.all(np.diff(drawn[:, k]) >= 0)


def test_an_index_without_weight_is_not_drawn_at_the_ends():
    weights = jnp.array([0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0])
    tiny = np.nextafter(0, 1, dtype=weights.dtype) + jnp.finfo(weights.dtype).tiny
    last = np.nextafter(1, 0, dtype=weights.dtype)
    assert variates.index(jnp.asarray(tiny), weights) == 2
    assert variates.index(jnp.asarray(last), weights) == 3
