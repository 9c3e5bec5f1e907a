# SPDX-License-Identifier: Apache-2.0
"""The design and the form that a Reader reads off a model, and when it reads again."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import COLUMNS, SHARED
from numpyro_spikeslab.reading.reader import Reader, Reading
from numpyro_spikeslab.reading.sites import Pair
from numpyro_spikeslab.roles import NoiseRole

# in one precision: JAX, given a numpy array once in each, may take its buffer from the other
pytestmark = pytest.mark.usefixtures("x64")

N, P = 8, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P))
Y = X @ [1.0, 0.0, -0.5] + 0.1 * RNG.normal(size=N)


def read(model: Any, *args: Any, **kwargs: Any) -> Reading:
    return Reader(model, "test")(args, kwargs)


def regression(likelihood: Callable = lambda X, w: dist.Normal(X @ w, 0.5)) -> Callable:
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", likelihood(X, w), obs=y)

    return model


def located(location: Callable) -> Callable:
    return regression(lambda X, w: dist.Normal(location(X, w), 0.5))


def of_tasks(num_tasks: int, location: Callable = lambda X, W: X @ W.T) -> Callable:
    def model(X, Y, mask=True):
        with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("feature", X.shape[-1]):
            W = nss.spike_slab("W", 0.25)
        plates = numpyro.plate("obs", len(Y), dim=-2), numpyro.plate("column", num_tasks, dim=-1)
        with plates[0], plates[1], handlers.mask(mask=mask):
            numpyro.sample("Y", dist.Normal(location(X, W), 0.5), obs=Y)

    return model


# The design


def noisy(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(numpyro.param("shift", 0.5) + X @ w, sigma), obs=y)


def two_sets(X, y=None):
    with numpyro.plate("first", 1):
        a = nss.spike_slab("a", 0.25)
    with numpyro.plate("rest", X.shape[1] - 1):
        b = nss.spike_slab("b", 0.5)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, :1] @ a + X[:, 1:] @ b, 0.5), obs=y)


def without_plate(X, y=None):
    w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, 0] * w, 0.5), obs=y)


SD = X.std(axis=0)
GROUP = np.arange(N) % P
DESIGNS = {
    "matrix product": (located(lambda X, w: X @ w), X),
    "offset": (located(lambda X, w: 2.0 + X @ w - 1.0), X),
    "standardised": (located(lambda X, w: (X / X.std(0)) @ w), X / SD),
    "rescaled weights": (located(lambda X, w: X @ (w / SD)), X / SD),
    "einsum": (located(lambda X, w: jnp.einsum("nm,m->n", X, w)), X),
    "sum": (located(lambda X, w: jnp.sum(X * w, -1)), X),
    "transposed": (located(lambda X, w: w @ X.T), X),
    "permuted": (located(lambda X, w: X @ w[::-1]), X[:, ::-1]),
    "groups": (located(lambda X, w: w[GROUP]), np.eye(P)[GROUP]),
    "two sets": (two_sets, X),
    "no plate": (without_plate, X[:, :1]),
    "other latent sites": (noisy, X),
    "noise per observation": (
        regression(lambda X, w: dist.Normal(X @ w, jnp.linspace(1.0, 2.0, N))),
        X / np.linspace(1.0, 2.0, N)[:, None],
    ),
    "masked": (
        regression(lambda X, w: dist.Normal(X @ w, 0.5).mask(jnp.arange(N) > 2)),
        X * (np.arange(N) > 2)[:, None],
    ),
}


def rows(design: Any, size: int) -> np.ndarray:
    return np.asarray(design.rows).reshape(-1, design.rows.shape[-1])[:size]


@pytest.mark.parametrize("name", DESIGNS)
def test_the_design_is_what_multiplies_the_weights(name):
    model, expected = DESIGNS[name]
    reading = Reader(model, "test")((X, Y), {})
    assert reading.form.kind == COLUMNS
    assert reading.form.constant_design
    assert reading.form.size == expected.shape[1]
    found = rows(reading.design, reading.form.size)
    np.testing.assert_allclose(found, expected.T, rtol=1e-12, atol=1e-14)


def test_masked_observations_may_be_anything():
    def model(X, y, mask):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]), handlers.mask(mask=mask):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    seen = np.arange(N) != 3
    data = [(X, np.where(seen, Y, value), seen) for value in (0.0, np.nan)]
    finite, missing = (Reader(model, "test")(args, {}) for args in data)
    jax.tree.map(np.testing.assert_array_equal, missing.base, finite.base)
    np.testing.assert_array_equal(missing.base.relative[:, 0], seen)


def test_a_copied_design_is_exact():
    reading = read(regression(), X, Y)
    np.testing.assert_array_equal(rows(reading.design, P), X.T)


@pytest.mark.parametrize("block_size", [1, 2, 3, 50])
def test_blocks_hold_all_features_and_their_gram(block_size):
    reading = read(regression(), X, Y)
    reading.block_size = block_size
    design = reading.design
    np.testing.assert_allclose(rows(design, P), X.T)
    for block, gram in zip(design.rows, design.gram, strict=True):
        np.testing.assert_allclose(gram, block @ block.T, atol=1e-14)


def test_tasks_have_one_design_or_share_features():
    args = X, np.stack([Y, -Y], axis=1)
    reading = Reader(of_tasks(2), "test", joint=True)(args, {})
    found = rows(reading.design, 2 * P).reshape(2, P, N, 2)
    expected = np.einsum("nm,qr->qmnr", X, np.eye(2))
    np.testing.assert_allclose(found, expected, atol=1e-14)
    assert reading.form.pairs == (Pair("W", (2, P)),)
    assert reading.design.rows.shape[0] == 1
    shared = read(of_tasks(2), *args)
    assert shared.form.kind == SHARED and shared.design is None
    np.testing.assert_allclose(shared.features, X.T, atol=1e-14)


def test_one_task_of_many_may_have_a_feature_of_its_own(precision):
    """A random direction of all weights alone would hide it where its own weight is small."""
    rng, (size, tasks, features) = np.random.default_rng(0), (8, 200, 8)
    X, Y = jnp.asarray(rng.normal(size=(size, features))), jnp.zeros((size, tasks))

    def kind(own):
        model = of_tasks(tasks, lambda X, W: X @ W.T + X[:, :1] * W[:, 5] * own)
        return read(model, X, Y).form.kind

    assert kind(jnp.zeros(tasks)) == SHARED
    for task in range(0, tasks, 20):
        assert kind(jnp.zeros(tasks).at[task].set(2e-3)) == COLUMNS


def test_rows_without_observations_may_be_anything_for_tasks_too():
    holes, Y3 = np.array(X), np.stack([Y, -Y, 2 * Y], axis=1)
    holes[3], Y3[3] = np.nan, np.nan
    reading = read(of_tasks(3), holes, Y3, mask=~np.isnan(Y3))
    assert reading.form.kind == SHARED
    np.testing.assert_allclose(reading.features, np.nan_to_num(holes).T)


@pytest.mark.parametrize("tasks", [2, P + 3])
@pytest.mark.parametrize("size", [0.0, 1e-9])
def test_features_of_tasks_are_shared_or_not_however_small(tasks, size):
    """The last task has a column that is zero in all others."""
    designs = np.tile(X, (tasks, 1, 1))
    designs[:, :, 0] = 0.0
    designs[-1, :, 0] = size
    model = of_tasks(tasks, lambda X, W: jnp.einsum("qnm,qm->nq", X, W))
    reading = read(model, jnp.asarray(designs), jnp.zeros((N, tasks)))
    assert (reading.form.kind == SHARED) == (size == 0.0)
    if size == 0.0:
        np.testing.assert_allclose(reading.features, designs[0].T, atol=1e-14)


def test_what_a_form_says():
    form = read(noisy, X, Y).form
    assert form.pairs == (Pair("w", (P,)),)
    assert form.likelihood == "y"
    assert set(form.others) == {"sigma", "shift"}
    assert form.roles == (NoiseRole("sigma", True),) and form.free == ("shift",)
    assert not form.varying_noise


def rescaled(X, y=None):
    gain = numpyro.sample("gain", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal((X * gain) @ w, 0.5), obs=y)


def heteroscedastic(X, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, jnp.exp(slope * X[:, 0])), obs=y)


@pytest.mark.parametrize(
    ("model", "latents", "expected"),
    [
        (rescaled, {"gain": 3.0}, 3.0 * X),
        (heteroscedastic, {"slope": 0.5}, X * np.exp(-0.5 * X[:, :1])),
    ],
    ids=["location", "noise"],
)
def test_a_design_may_depend_on_other_sites(model, latents, expected):
    reading = read(model, X, Y)
    assert not reading.form.constant_design
    assert reading.design is None and reading.base is None
    design = reading.design_at({name: jnp.asarray(value) for name, value in latents.items()})
    np.testing.assert_allclose(rows(design, P), expected.T, rtol=1e-12)


@pytest.mark.parametrize(
    "convert",
    [np.float64, np.float32, np.int32, jnp.float32, jnp.float64, jnp.int32],
    ids=["numpy f64", "numpy f32", "numpy int", "jax f32", "jax f64", "jax int"],
)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_data_may_have_any_type(precision, convert):
    inputs = convert(np.round(4 * X))
    reading = Reader(regression(), "test")((inputs, convert(np.round(Y))), {})
    assert reading.design.rows.dtype == precision
    np.testing.assert_array_equal(rows(reading.design, P), np.round(4 * X).T)


# Transformations of the caller


def test_supports_that_depend_on_other_sites_are_not_those_of_some_values():
    def model(X, y, most):
        sigma = numpyro.sample("sigma", dist.Gamma(2.0, 1.0))
        numpyro.sample("of data", dist.Uniform(0.0, most).expand([2]).to_event(1))
        numpyro.sample("of a site", dist.Uniform(0.0, 4 * sigma))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    X, y = np.ones((5, 2)), np.arange(5.0)
    for most in (1.0, 3.0):
        supports = Reader(model, "CAVI")((X, y, most), {}).supports
        assert supports["of a site"] is None and supports["sigma"] is not None
        np.testing.assert_allclose(supports["of data"].feasible_like(jnp.zeros(2)), most / 2)


def test_reading_works_under_transformations_of_the_caller():
    read = Reader(regression(), "test")
    data = jnp.asarray(X), jnp.asarray(Y)

    def gram(X, y):
        return read((X, y), {}).design.gram

    np.testing.assert_allclose(jax.jit(gram)(*data), gram(*data))
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), data)
    batch = jax.vmap(gram)(*stacked)
    np.testing.assert_allclose(batch, jnp.stack([gram(*data), 4 * gram(*data)]))


def test_constant_data_stay_constant_under_transformations():
    """What a caller's transformation does not touch is read once, outside of it."""
    read = Reader(regression(), "test")
    first = read((X, Y), {})
    same = []

    def use(x):
        same.append(read((X, Y), {}) is first)
        return x * first.design.gram

    np.testing.assert_allclose(jax.jit(use)(2.0), 2 * first.design.gram)
    assert same == [True]


def test_traced_data_are_checked_as_far_as_they_can_be():
    def bent(X, y):
        return read(regression(lambda X, w: dist.StudentT(4.0, X @ w)), X, y).base.Y

    def missing(X, y):
        return read(regression(), X, with_nan(y)).design.gram

    def with_nan(y):
        return y.at[3].set(jnp.nan)

    with pytest.raises(ValueError, match="likelihood StudentT"):
        jax.jit(bent)(X, Y)
    assert np.isfinite(jax.jit(missing)(X, jnp.asarray(Y))).all()
