# SPDX-License-Identifier: Apache-2.0
"""The definition of latent functions: values at new inputs, refusals, parameters of kernels."""

import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from tinygp import kernels, transforms
from tinygp.kernels import quasisep

from jax import random
import jax.numpy as jnp

from numpyro import handlers

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.functions import define

KEY = random.key(0)


# New inputs


def test_white_functions_are_independent_and_zero_ones_at_their_mean(precision):
    x, x_new = np.linspace(0.0, 1.0, 6), np.array([0.0, 0.5])
    functions = define("phi", ["white", "zero"], x, lambda x: jnp.stack([x, 3 * x]), None)
    new = functions.conditional({}, jnp.ones((2, 6)), x_new)
    np.testing.assert_allclose(new.mean, [x_new, 3 * x_new], rtol=1e-6)
    np.testing.assert_allclose(new.variance, [[1.0, 1.0], [0.0, 0.0]], atol=1e-7)
    np.testing.assert_allclose(new.sample(KEY)[1], 3 * x_new, rtol=1e-6, atol=1e-12)


def test_functions_of_several_kinds_are_conditioned_each_by_its_own(x64):
    rng = np.random.default_rng(0)
    x, x_new = np.sort(rng.uniform(0, 4, 20)), np.array([0.3, 2.2, 9.0])
    kinds = [kernels.ExpSquared(0.7), quasisep.Matern32(scale=0.7), "white"]
    functions = define("phi", kinds, x, None, None)
    sites = {"phi_0_scale": 0.7, "phi_1_scale": 0.7, "phi_1_sigma": 1.0}
    phi = rng.normal(size=(3, 20))
    conditional = functions.conditional(sites, jnp.asarray(phi), x_new)
    for m, kernel in enumerate(kinds[:2]):
        K, cross, new = (
            np.asarray(kernel(jnp.asarray(a), jnp.asarray(b)))
            for a, b in ((x, x), (x, x_new), (x_new, x_new))
        )
        W = np.linalg.solve(K + 1e-9 * np.eye(20), cross)
        expected = new - cross.T @ W + 1e-9 * np.eye(3)
        np.testing.assert_allclose(conditional.mean[m], W.T @ phi[m], rtol=1e-4)
        np.testing.assert_allclose(conditional.covariance_matrix[m], expected, rtol=1e-4, atol=1e-8)


# Refusals

DAYS = pd.date_range("2020-01-01", periods=4)
DATES = {
    "index": DAYS,
    "column": DAYS.to_numpy()[:, None],
    "series": pd.Series(DAYS),
    "since the first": DAYS - DAYS[0],
    "Python": [day.to_pydatetime() for day in DAYS],
}
SMOOTH, X = kernels.ExpSquared(1.0), np.linspace(0.0, 3.0, 24)


def made(kernel, X, mean=None, size=None):
    return define("phi", kernel, X, mean, size)


def at_new_inputs(kernel, X, X_new, mean=None):
    functions = made([kernel], X, mean)
    zero = jnp.zeros((1, functions.num_inputs))
    return functions.conditional({"phi_scale": jnp.ones(1)}, zero, X_new)


REFUSED = {
    "no plate": (lambda: made(SMOOTH, X), "kernels: got one kernel and no plate"),
    "no kernels": (lambda: made([], X), "kernels: got 0 of them, expected at least one"),
    "number": (lambda: made([SMOOTH], X, size=2), "got 1 of them, expected 2, the size of"),
    "name": (lambda: made(["pink"], X), "kernel 0: got 'pink', expected 'white' or 'zero'"),
    "zero without mean": (lambda: made(["zero"], X), "mean: got None .* all zero"),
    "dimension": (
        lambda: made([transforms.Linear(jnp.ones(3), SMOOTH)], np.ones((24, 2))),
        "kernel 0, Linear, .* expected a kernel of inputs of this dimension",
    ),
    "square": (lambda: made([np.ones((24, 3))], X), r"shape \(24, 3\), expected a tinygp kernel"),
    "symmetric": (lambda: made([np.triu(np.ones((24, 24)))], X), "finite, symmetric"),
    "semidefinite": (lambda: made([-np.eye(24)], X), "another matrix, .* positive semidefinite"),
    "mean": (lambda: made([SMOOTH], X, np.ones(3)).mean_at(X[:]), "mean: got an array, at new"),
    "shape of mean": (
        lambda: handlers.seed(nss.latent_functions, KEY)("phi", [SMOOTH], X, np.ones(3)),
        r"mean: got shape \(3,\), expected \(1, 24\) or \(24,\)",
    ),
    "shape of inputs": (lambda: made([SMOOTH], np.ones((2, 2, 2))), "expected .N,. or .N, D."),
    "not finite": (
        lambda: made([SMOOTH], np.where(X > 2, np.nan, X)),
        "inputs: got nan in row 16, the first of 8, .* Leave out",
    ),
    "masked": (
        lambda: made([SMOOTH], np.ma.masked_less(X, 0.5)),
        "inputs: got 4 masked values, .* Leave out",
    ),
    **{
        name: (lambda x=x: made(["white"], x), "expected finite real numbers")
        for name, x in {"complex": X * 1j, "text": ["1", "2"], "objects": [object()] * 4}.items()
    },
    "new inputs of a matrix": (
        lambda: at_new_inputs(np.eye(3), np.arange(3.0), np.arange(2.0)),
        "says nothing about new inputs",
    ),
    "width of new inputs": (
        lambda: at_new_inputs("white", np.ones((3, 2)), np.ones((4, 3))),
        r"new inputs: got shape \(4, 3\), expected the same width",
    ),
    "dates at new inputs": (
        lambda: at_new_inputs(SMOOTH, np.arange(4.0), DAYS),
        "new inputs: got the datetime64 '",
    ),
} | {
    f"dates, {name}": (lambda dates=dates: made([SMOOTH], dates), "got the .* years for")
    for name, dates in DATES.items()
}


test_mistakes_are_refused = refusals(REFUSED)


def test_inputs_that_rounding_makes_equal_are_refused(precision):
    seconds = 1.7e9 + np.arange(40)
    for inputs in (seconds, np.stack([np.arange(40), seconds], axis=1)):
        if precision == "float64":
            assert made([SMOOTH], inputs).num_inputs == 40
        else:
            with pytest.raises(
                ValueError, match=r"got 40 different inputs, 1 in single.*X - X\[0\]"
            ):
                made([SMOOTH], inputs)
    # days, inputs that differ by rounding alone, and functions that do not look at inputs
    days, twice = 1.7e9 + 86400 * np.arange(40), [0.1 * np.arange(20), np.linspace(0, 1.9, 20)]
    for kernel, inputs in (
        (SMOOTH, days),
        (SMOOTH, np.concatenate(twice)),
        ("white", seconds),
        (np.eye(40), seconds),
    ):
        assert made([kernel], inputs).num_inputs == 40


# Parameters of kernels


class Repeated(kernels.Kernel):
    """A kernel of one's own that counts."""

    times: int
    scale: float

    def evaluate(self, X1, X2):
        return self.times * jnp.exp(-0.5 * ((X1 - X2) / self.scale) ** 2)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (kernels.ExpSquared(1), {"scale": 1.0}),
        (3 * kernels.Matern32(2.5), {"kernel1_value": 3.0, "kernel2_scale": 2.5}),
        (kernels.RationalQuadratic(2, alpha=1), {"scale": 2.0, "alpha": 1.0}),
        (quasisep.Matern52(scale=1, sigma=2), {"scale": 1.0, "sigma": 2.0}),
        (transforms.Subspace(1, kernels.ExpSquared(1)), {"kernel_scale": 1.0}),
        (
            transforms.Linear(jnp.array([1, 2]), kernels.ExpSquared(3)),
            {"scale": [1.0, 2.0], "kernel_scale": 3.0},
        ),
        # the order is no parameter
        (kernels.Polynomial(order=2, scale=2, sigma=jnp.array(1)), {"scale": 2.0, "sigma": 1.0}),
        (kernels.Constant(0), {}),
        (kernels.Constant(-1.0), {}),
        (kernels.Constant(True), {}),
        (Repeated(2, 1), {"scale": 1.0}),
    ],
)
def test_positive_numbers_are_learned_as_floats(kernel, expected):
    plane = isinstance(kernel, transforms.Subspace | transforms.Linear | kernels.Polynomial)
    x = np.ones((4, 2)) if plane else np.linspace(0.0, 1.0, 4)
    parameters = made([kernel], x).templates[0].parameters
    assert all(jnp.issubdtype(value.dtype, jnp.floating) for value in parameters.values())
    assert {name: np.asarray(value).tolist() for name, value in parameters.items()} == expected


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
}


@pytest.mark.parametrize("name", [*PLANE, *NO_COVARIANCES])
def test_kernels_of_several_inputs_are_covariances(x64, name):
    X = np.random.default_rng(0).normal(size=(40, 2))
    kernel = (PLANE | NO_COVARIANCES)[name]
    lowest = np.linalg.eigvalsh(kernel(X, X))[0]
    if name in PLANE:
        assert lowest > -1e-9
        assert made([kernel], X).num_inputs == 40
        return
    assert lowest < -0.01
    message = f"kernel 1.*: got {name}, expected a covariance of inputs in several dimensions"
    with pytest.raises(ValueError, match=rf"'phi'\): {message}.*(L2Distance\(\)|Subspace)"):
        made([kernels.Exp(1.0), kernel], X)


def test_a_line_is_one_dimension():
    x = np.arange(5.0)
    for columns in ([x], [x, np.ones(5)], [x, 2 * x - 1]):
        for kernel in (kernels.Matern32(2.0), kernels.Cosine(2.0)):
            assert made([kernel], np.stack(columns, axis=1)).num_inputs == 5
