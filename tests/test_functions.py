# SPDX-License-Identifier: Apache-2.0
"""What defines latent functions: their values at new inputs, and the checks of the arguments."""

import numpy as np
import pandas as pd
import pytest
from tinygp import kernels, transforms
from tinygp.kernels import quasisep

from jax import random
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import Predictive

import numpyro_spikeslab as nss
from numpyro_spikeslab.latent import define

KEY = random.key(0)


def trace(model, *args):
    return handlers.trace(handlers.seed(model, KEY)).get_trace(*args)


# New inputs


def squared(scale, A, B):
    return np.exp(-0.5 * ((A[:, None] - B) / scale) ** 2)


@pytest.mark.exhaustive
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


@pytest.mark.slow
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


# Inputs that are no numbers

DAYS = pd.date_range("2020-01-01", periods=4)
DATES = {
    "index": DAYS,
    "array": DAYS.to_numpy(),
    "column": DAYS.to_numpy()[:, None],
    "series": pd.Series(DAYS),
    "since the first": DAYS - DAYS[0],
    "Python": [day.to_pydatetime() for day in DAYS],
}


@pytest.mark.parametrize("name", DATES)
def test_dates_are_refused(name):
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)], num_tasks=1)
    with pytest.raises(ValueError, match=r"are dates or times. Convert them .* years for example"):
        trace(model, DATES[name])


def test_the_remedy_for_dates_makes_years():
    days = DAYS.to_numpy()
    years = (days - days[0]) / np.timedelta64(1, "D") / 365.25
    functions = define("phi", [kernels.ExpSquared(1.0)], years, None, None)
    np.testing.assert_allclose(functions.X, np.arange(4) / 365.25)
    with pytest.raises(ValueError, match="new inputs are dates"):
        functions.conditional({"phi_scale": jnp.ones(1)}, jnp.zeros((1, 4)), days)


def test_masked_inputs_are_refused():
    inputs = np.ma.masked_less(np.arange(4.0), 2.0)
    with pytest.raises(ValueError, match=r"inputs are masked at 2 places\. Remove these points"):
        define("phi", [kernels.ExpSquared(1.0)], inputs, None, None)


def test_inputs_that_rounding_makes_equal_are_refused(precision):
    seconds = 1.7e9 + np.arange(40)
    kernel, columns = kernels.ExpSquared(1.0), np.stack([np.arange(40), seconds], axis=1)
    for inputs in (seconds, columns):
        if precision == "float64":
            assert define("phi", [kernel], inputs, None, None).num_inputs == 40
        else:
            with pytest.raises(ValueError, match=r"39 of 40 different inputs are.*X - X\[0\]"):
                define("phi", [kernel], inputs, None, None)
    # days, inputs that differ by rounding alone, and functions that do not look at inputs
    days, twice = 1.7e9 + 86400 * np.arange(40), [0.1 * np.arange(20), np.linspace(0, 1.9, 20)]
    for each, inputs in (
        (kernel, days),
        (kernel, np.concatenate(twice)),
        ("white", seconds),
        (np.eye(40), seconds),
    ):
        assert define("phi", [each], inputs, None, None).num_inputs == 40


@pytest.mark.parametrize("inputs", [np.arange(4) * 1j, np.array(list("1234")), [object()] * 4])
def test_inputs_are_real_numbers(inputs):
    with pytest.raises(ValueError, match="must be real numbers"):
        define("phi", ["white"], inputs, None, None)


# Parameters of kernels


class Repeated(kernels.Kernel):
    """A kernel of one's own that counts."""

    times: int
    scale: float

    def evaluate(self, X1, X2):
        return self.times * jnp.exp(-0.5 * ((X1 - X2) / self.scale) ** 2)


def learned(kernel, x):
    return define("phi", [kernel], x, None, None).templates[0].parameters


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (kernels.ExpSquared(1), {"scale": 1.0}),
        (kernels.ExpSquared(np.int32(2)), {"scale": 2.0}),
        (3 * kernels.Matern32(2.5), {"kernel1_value": 3.0, "kernel2_scale": 2.5}),
        (kernels.RationalQuadratic(2, alpha=1), {"scale": 2.0, "alpha": 1.0}),
        (quasisep.Matern52(scale=1, sigma=2), {"scale": 1.0, "sigma": 2.0}),
        (transforms.Subspace(1, kernels.ExpSquared(1)), {"kernel_scale": 1.0}),
        (kernels.Constant(0), {}),
        (kernels.Constant(-1.0), {}),
        (kernels.Constant(True), {}),
        (Repeated(2, 1), {"scale": 1.0}),
    ],
)
def test_positive_numbers_are_learned(kernel, expected):
    x = np.ones((4, 2)) if isinstance(kernel, transforms.Subspace) else np.linspace(0.0, 1.0, 4)
    found = learned(kernel, x)
    assert {name: float(value) for name, value in found.items()} == expected
    assert all(jnp.issubdtype(value.dtype, jnp.floating) for value in found.values())


@pytest.mark.parametrize("order", [2, 2.0])
def test_the_order_of_a_polynomial_is_no_parameter(order):
    kernel = kernels.Polynomial(order=order, scale=2, sigma=jnp.array(1))
    assert set(learned(kernel, np.ones((4, 2)))) == {"scale", "sigma"}


def test_integer_arrays_are_learned_as_floats():
    kernel = transforms.Linear(jnp.array([1, 2]), kernels.ExpSquared())
    found = learned(kernel, np.ones((4, 2)))
    np.testing.assert_array_equal(found["scale"], [1.0, 2.0])
    assert jnp.issubdtype(found["scale"].dtype, jnp.floating)


def test_an_integer_scale_has_the_site_and_the_density_of_a_float():
    x = np.linspace(0.0, 1.0, 4)
    one, other = (
        trace(lambda scale=scale: nss.latent_functions("phi", [kernels.ExpSquared(scale)] * 2, x))
        for scale in (1, 1.0)
    )
    assert set(one) == set(other) and "phi_scale" in one
    for name in ("phi_scale", "phi"):
        np.testing.assert_array_equal(one[name]["value"], other[name]["value"])


L2 = kernels.distance.L2Distance()
PLANE = {
    "exponential": kernels.Exp(1.0),
    "squared exponential": kernels.ExpSquared(1.0),
    "Matern": kernels.Matern32(2.0, distance=L2) + kernels.Matern52(2.0, distance=L2),
    "rational quadratic": 2.0 * kernels.RationalQuadratic(1.0, alpha=0.5, distance=L2),
    "a column": transforms.Subspace(1, kernels.Matern32(2.0)),
    "a projection": transforms.Linear(np.array([[1.0, 2.0]]), kernels.Matern52(2.0)),
    "a product": transforms.Subspace(0, kernels.Cosine(3.0))
    * transforms.Subspace(1, kernels.ExpSineSquared(3.0, gamma=1.0)),
}
NO_COVARIANCES = {
    "Matern32 by L1Distance": kernels.Matern32(2.0),
    "Matern52 by L1Distance": 2.0 * kernels.Matern52(2.0) + kernels.Exp(9.0),
    "RationalQuadratic by L1Distance": kernels.RationalQuadratic(2.0, alpha=1.0),
    "ExpSquared by L1Distance": kernels.ExpSquared(2.0, distance=kernels.distance.L1Distance()),
    "Cosine by L2Distance": kernels.Cosine(3.0, distance=L2),
    "ExpSineSquared by L1Distance": kernels.ExpSineSquared(3.0, gamma=1.0),
    "Matern32 by L1Distance of scaled columns": transforms.Linear(
        np.array([0.5, 1.0]), kernels.Matern32(1.0)
    ),
    "Matern52 by L1Distance of two projections": transforms.Linear(
        np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]), kernels.Matern52(2.0)
    ),
}


@pytest.mark.parametrize("name", [*PLANE, *NO_COVARIANCES])
def test_kernels_of_several_inputs_are_covariances(x64, name):
    X = np.random.default_rng(0).normal(size=(40, 3 if "two projections" in name else 2))
    kernel = (PLANE | NO_COVARIANCES)[name]
    lowest = np.linalg.eigvalsh(kernel(X, X))[0]
    if name in PLANE:
        assert lowest > -1e-9
        assert define("phi", [kernel], X, None, None).num_inputs == 40
        return
    assert lowest < -0.01
    message = name.split(" of")[0] + " is no covariance of inputs in several dimensions"
    with pytest.raises(
        ValueError, match=rf"'phi'\): kernel 1: {message}.*(L2Distance\(\)|Subspace)"
    ):
        define("phi", [kernels.Exp(1.0), kernel], X, None, None)


@pytest.mark.parametrize("kernel", [kernels.Matern32(2.0), kernels.Cosine(2.0)])
def test_a_line_is_one_dimension(kernel):
    x = np.arange(5.0)
    for columns in ([x], [x, np.ones(5)], [x, 2 * x - 1]):
        assert define("phi", [kernel], np.stack(columns, axis=1), None, None).num_inputs == 5
