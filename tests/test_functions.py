# SPDX-License-Identifier: Apache-2.0
"""What defines latent functions: their values at new inputs, and the checks of the arguments."""

import numpy as np
import pytest
from tinygp import kernels
from tinygp.kernels import quasisep

from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import Predictive

import numpyro_spikeslab as nss
from numpyro_spikeslab.functions import define

KEY = random.key(0)


def trace(model, *args):
    return handlers.trace(handlers.seed(model, KEY)).get_trace(*args)


# New inputs


def squared(scale, A, B):
    return np.exp(-0.5 * ((A[:, None] - B) / scale) ** 2)


@pytest.mark.parametrize("scale", [0.05, 1.0, 30.0])
def test_predictions_from_draws_are_finite_and_interpolate(precision, scale):
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0.0, 10.0, 120))
    x_new = np.concatenate([np.linspace(0.1, 9.9, 48), x[:2]])
    model = nss.models.mtmkl([kernels.ExpSquared(scale)] * 2, num_tasks=3)
    held = handlers.condition(model, {"phi_scale": jnp.full(2, scale)})
    prior = Predictive(held, num_samples=100)(KEY, x)
    sites = ("phi", "phi_scale", "W_spike", "W_slab", "noise", "inclusion", "slab_scale")
    draws = {name: prior[name] for name in sites if name in prior}
    found = Predictive(held, draws)(random.key(1), x, X_new=x_new)
    assert all(np.all(np.isfinite(found[name])) for name in ("phi_new", "f_new", "Y_new"))
    # the deviations from the mean given each draw, in units of their standard deviation
    eps = np.finfo(precision).eps
    noise = max(1e-9, 4 * 120 * eps)
    W = np.linalg.solve(squared(scale, x, x) + noise * np.eye(120), squared(scale, x, x_new))
    every = np.concatenate([x, x_new])
    joint = squared(scale, every, every) + max(1e-9, 4 * 170 * eps) * np.eye(170)
    contrast = np.vstack([-W, np.eye(50)])
    sd = np.sqrt(np.diag(contrast.T @ joint @ contrast))
    mean = np.asarray(draws["phi"], float) @ W
    white = (np.asarray(found["phi_new"], float) - mean) / sd
    # 200 draws each: five standard errors
    np.testing.assert_allclose(white.mean(axis=(0, 1)), 0.0, atol=5 / np.sqrt(200) + 0.05)
    np.testing.assert_allclose(white.std(axis=(0, 1)), 1.0, atol=5 / np.sqrt(400) + 0.05)


def test_white_functions_are_independent_and_zero_ones_at_their_mean(precision):
    x, x_new = np.linspace(0.0, 1.0, 6), np.array([0.0, 0.5])
    functions = define("phi", ["white", "zero"], x, lambda x: jnp.stack([x, 3 * x]), None)
    given = functions.conditional({}, jnp.ones((2, 6)), x_new)
    np.testing.assert_allclose(given.mean, [x_new, 3 * x_new], rtol=1e-6)
    np.testing.assert_allclose(given.variance, [[1.0, 1.0], [0.0, 0.0]], atol=1e-7)
    np.testing.assert_allclose(given.sample(KEY)[1], 3 * x_new, rtol=1e-6, atol=1e-12)


def test_functions_of_several_kinds_are_conditioned_each_by_its_own(x64):
    rng = np.random.default_rng(0)
    x, x_new = np.sort(rng.uniform(0, 4, 20)), np.array([0.3, 2.2, 9.0])
    every = [kernels.ExpSquared(0.7), quasisep.Matern32(scale=0.7), "white"]
    functions = define("phi", every, x, None, None)
    sites = {"phi_0_scale": 0.7, "phi_1_scale": 0.7, "phi_1_sigma": 1.0}
    phi = rng.normal(size=(3, 20))
    found = functions.conditional(sites, jnp.asarray(phi), x_new)
    for m, kernel in enumerate(every[:2]):
        K, cross, new = (
            np.asarray(kernel(jnp.asarray(a), jnp.asarray(b)))
            for a, b in ((x, x), (x, x_new), (x_new, x_new))
        )
        W = np.linalg.solve(K + 1e-9 * np.eye(20), cross)
        left = new - cross.T @ W + 1e-9 * np.eye(3)
        np.testing.assert_allclose(found.mean[m], W.T @ phi[m], rtol=1e-4)
        np.testing.assert_allclose(found.covariance_matrix[m], left, rtol=1e-4, atol=1e-8)


def test_a_matrix_says_nothing_about_new_inputs():
    functions = define("phi", [np.eye(3)], np.arange(3.0), None, None)
    with pytest.raises(ValueError, match="says nothing about new inputs"):
        functions.conditional({}, jnp.zeros((1, 3)), np.arange(2.0))


def test_new_inputs_have_the_width_of_the_old_ones():
    functions = define("phi", ["white"], np.ones((3, 2)), None, None)
    with pytest.raises(ValueError, match="same width"):
        functions.conditional({}, jnp.zeros((1, 3)), np.ones((4, 3)))
