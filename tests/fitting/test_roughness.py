# SPDX-License-Identifier: Apache-2.0
"""What orders functions by smoothness is a Laplacian of their inputs."""

import numpy as np
import pytest

import jax.numpy as jnp

from numpyro_spikeslab.fitting.roughness import MAX_GRAPH, no_roughness, roughness_of_inputs

pytestmark = pytest.mark.usefixtures("x64")
RNG = np.random.default_rng(0)


def energy(roughness, phi):
    """``phi^T roughness(phi)`` of each function."""
    return np.sum(roughness(jnp.asarray(phi)) * phi, axis=1)


def test_path_of_many_inputs_is_a_laplacian():
    x = RNG.normal(size=MAX_GRAPH + 1)
    phi = np.stack([x, np.ones_like(x)])
    found = energy(roughness_of_inputs(jnp.asarray(x)), phi)
    np.testing.assert_allclose(found, [np.sum(np.diff(np.sort(x)) ** 2), 0.0], atol=1e-9)


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 3)])
def test_graph_of_inputs_is_a_laplacian(shape):
    X = RNG.normal(size=shape)
    phi = RNG.normal(size=(2, 12))
    points = X.reshape(12, -1)
    squared = np.sum((points[:, None] - points) ** 2, axis=2)
    nearest = np.sort(squared, axis=1)[:, 1]
    similarity = np.exp(-0.5 * squared / np.median(nearest))
    difference = (phi[:, :, None] - phi[:, None, :]) ** 2
    expected = 0.5 * np.sum(similarity * difference, axis=(1, 2))
    np.testing.assert_allclose(energy(roughness_of_inputs(jnp.asarray(X)), phi), expected)


@pytest.mark.parametrize("size", [40, MAX_GRAPH + 1])
def test_faster_functions_are_rougher(size):
    x = RNG.permutation(np.linspace(0, 1, size))
    phi = np.sin(2 * np.pi * np.array([[1.0], [3.0], [9.0]]) * x)
    assert np.all(np.diff(energy(roughness_of_inputs(jnp.asarray(x)), phi)) > 0)


def test_repeated_inputs_are_as_far_from_others_as_single_ones():
    x = np.repeat(np.linspace(0, 1, 10), 2)
    found = energy(roughness_of_inputs(jnp.asarray(x)), np.stack([x, np.ones_like(x)]))
    assert np.all(np.isfinite(found)) and found[0] > 1e-3 and abs(found[1]) < 1e-12


def test_many_inputs_of_several_dimensions_have_no_order():
    X = jnp.asarray(RNG.normal(size=(MAX_GRAPH + 1, 2)))
    phi = jnp.asarray(RNG.normal(size=(1, MAX_GRAPH + 1)))
    assert not np.any(roughness_of_inputs(X)(phi)) and not np.any(no_roughness(phi))
