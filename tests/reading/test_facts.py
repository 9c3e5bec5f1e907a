# SPDX-License-Identifier: Apache-2.0
"""Facts about a model hold at all values of its sites, for these data and for no others.

Models whose behaviour at one value, or in one direction, is not their behaviour. Each is either
read as what NumPyro says it is, at several values of all its sites, or refused by name.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from truth.agreement import assert_agrees
from truth.regressions import (
    RNG,
    TIME,
    N,
    P,
    X,
    Y,
    copied,
    functions_and_weights,
    located,
    mixed,
    normal,
    observe,
    of_tasks,
    read,
    rows,
    weigh,
)

import jax
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.reading.roles import NoiseRole, Role

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(autouse=True)
def unseen_arrays(monkeypatch):
    """JAX remembers in which precision it has first seen an array."""
    for name in ("X", "Y", "TIME"):
        monkeypatch.setitem(globals(), name, globals()[name].copy())


def refusal(model: Callable) -> str:
    with pytest.raises(ValueError, match=r"^test: ") as caught:
        read(model)
    return str(caught.value)


def form_of(model: Callable, *args: Any, **kwargs: Any) -> Form:
    return assert_agrees(model, *args, **kwargs).form


# A fact at one value of another site; test_no_wrong_answers has designs that switch


def test_an_offset_may_do_as_it_likes():
    reading = assert_agrees(lambda: observe(jnp.where(normal("b") > 0.3, TIME, 0.0) + X @ weigh()))
    assert reading.form.constant_design and copied(reading)


BENT: dict[str, Callable] = {
    "callback": lambda b, x: jax.pure_callback(lambda x: x, x, x),
    "square far away": lambda b, x: jnp.where(b < 1e6, x, x**2),
    "link inside of cond": lambda b, x: jax.lax.cond(b < 9.0, lambda x: x, jnp.tanh, x),
    "integer": lambda b, x: x + b * (x > 1e9),
    "straight through": lambda b, x: x + jax.lax.stop_gradient(jnp.round(x) - x),
    "small type": lambda b, x: x.astype("bfloat16").astype(x.dtype),
    "sorted": lambda b, x: jnp.sort(x),
    "normalised": lambda b, x: x / (1.0 + 1e-20 * jnp.sum(x**2)),
}


@pytest.mark.parametrize("name", BENT)
def test_what_is_affine_nearly_everywhere_is_refused(name):
    """Of the weights X @ w; which primitives have steps is a claim of test_provenance."""
    message = refusal(lambda: observe(BENT[name](normal("b"), X @ weigh())))
    assert "location of 'y' is not affine in the weights ['w']" in message


# Masks and scales of several levels


def some(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape) % 3 != 1


A = 4
mask_by, scale_by = partial(handlers.mask, None), partial(handlers.scale, None)
TABLE = np.linspace(0.5, 2.0, A * A).reshape(A, A)
LEVELS: dict[str, tuple[Callable, list[Any]]] = {
    "all levels": (
        lambda fn: fn.mask(some(A, A)).to_event(1).mask(np.arange(A) != 2),
        [scale_by(TABLE[0]), mask_by(some(A)), scale_by(0.5)],
    ),
    "no event": (lambda fn: fn.mask(some(A)), [scale_by(TABLE), mask_by(some(A)[:, None])]),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("name", LEVELS)
def test_counts_are_those_of_numpyro(name, transposed):
    """In tables with as many rows as tasks; test_no_wrong_answers has other shapes."""
    rng = np.random.default_rng(1)
    features, response = rng.normal(size=(A, 2)), rng.normal(size=(A, A))
    of, around = LEVELS[name]

    def model():
        with numpyro.plate("task", A, dim=-2), numpyro.plate("feature", 2):
            W = nss.spike_slab("W", 0.25)
        location = W @ features.T if transposed else features @ W.T
        with ExitStack() as stack:
            for handler in around:
                stack.enter_context(handler)
            numpyro.sample("y", of(dist.Normal(location, 0.5)), obs=response)

    reading = assert_agrees(model, draws=1)
    assert reading.form.shares_features and reading.form.tasks_first == transposed
    joint = Reader(model, "test", joint=True)((), {})
    np.testing.assert_allclose(np.sum(joint.base.count), np.sum(reading.base.count))


@pytest.mark.parametrize(("scale", "event_dim"), [((N, 1), 0), ((N,), 1), ((), 0)])
def test_a_scale_counts_each_observation_once(scale, event_dim):
    def model():
        fn = dist.Normal((X @ weigh())[:, None], 0.5).to_event(event_dim)
        with scale_by(np.full(scale, 0.5)):
            numpyro.sample("y", fn, obs=Y[:, None])

    np.testing.assert_allclose(np.sum(assert_agrees(model).base.count), 0.5 * N)


@pytest.mark.parametrize("size", [1e5, 1e-5])
@pytest.mark.usefixtures("precision")
def test_columns_may_have_any_size(size):
    large, factor = X * [size, 1.0, 1.0], np.array([1.0, 1.0, 2.0])
    reading = read(lambda: observe(large @ weigh()))
    np.testing.assert_array_equal(rows(reading.design), large.T.astype(reading.design.rows.dtype))
    # an array of the right shape that is not the design
    reading = read(lambda: observe(large @ (weigh() * factor)))
    np.testing.assert_allclose(rows(reading.design), (large * factor).T, rtol=1e-6)


NEARLY_ONE = [1.001, 1.00001]


@pytest.mark.parametrize("shape", [(20, 3), (1_000_000, 5), (50, 20_000)])
def test_a_design_is_copied_if_nothing_else_is_done_to_the_weights(shape, precision):
    """Whatever the number of rows and columns, their sizes, and a code for what is missing."""
    features = RNG.normal(size=shape)
    features[:, 0] *= 1e6
    features[3, 1] = -9999.0
    features, y = jnp.asarray(features, precision), jnp.zeros(len(features))
    np.testing.assert_array_equal(read(located(jnp.dot), features, y).rows, features.T)
    for factor in NEARLY_ONE if shape[1] < 10 else ():
        of_all = read(located(lambda X, w, factor=factor: factor * (X @ w)), features, y)
        np.testing.assert_allclose(of_all.rows, factor * features.T, rtol=1e-6)
        factors = jnp.ones(shape[1]).at[1].set(factor)
        of_one = read(located(lambda X, w, factors=factors: X @ (factors * w)), features, y)
        np.testing.assert_allclose(of_one.rows, (features * factors).T, rtol=1e-6)


@pytest.mark.parametrize("factor", [1.0, *NEARLY_ONE])
@pytest.mark.parametrize("size", [20, 100_000])
def test_features_of_tasks_that_differ_a_little_are_not_shared(size, factor, precision):
    features = RNG.normal(size=(size, P))
    features[3] = -9999.0
    gains = jnp.asarray([1.0, factor, 1.0])
    model = of_tasks(3, lambda X, W: gains * (X @ W.T))
    form = read(model, jnp.asarray(features, precision), jnp.zeros((size, 3))).form
    assert (form.shares_features) == (factor == 1.0)


@pytest.mark.parametrize("factor", [1.0, *NEARLY_ONE])
def test_functions_are_mixed_by_nothing_but_the_weights(factor, precision):
    form = read(functions_and_weights, lambda *x: factor * mixed(*x)).form
    assert (form.functions is not None) == (factor == 1.0)


# What NumPyro takes


def indexed_by_booleans():
    chosen = X[:, 0] > 0
    observe(X[chosen] @ weigh(), float(np.std(Y)), Y[chosen])


def with_a_tree_of_params():
    net = numpyro.param("net", {"slope": jnp.ones(P), "level": jnp.zeros(())})
    observe(X @ net["slope"] + net["level"] + X @ weigh())


def partly_in_a_scope():
    with handlers.scope(prefix="part"):
        w, s = weigh(), numpyro.sample("s", dist.HalfNormal())
    observe(X @ w, s)


def autoregression(conditioned: bool = False):
    w = weigh("w", 2)
    sigma = 0.5 if conditioned else numpyro.sample("sigma", dist.HalfNormal())

    def step(carry, y):
        last, before = carry
        fn = dist.Normal(w[0] * last + w[1] * before, sigma)
        y = numpyro.sample("y", fn, obs=None if conditioned else y)
        return (y, last), None

    start, later = (jnp.asarray(Y[1]), jnp.asarray(Y[0])), jnp.asarray(Y[2:])
    with handlers.condition(data={"y": later} if conditioned else {}):
        scan(step, start, None if conditioned else later, length=N - 2)


def random_walk():
    def step(level, _):
        level = normal("level", level, 0.1)
        return level, level

    observe(scan(step, 0.0, None, length=N)[1] + X @ weigh())


def improper():
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    s = numpyro.sample("s", dist.ImproperUniform(dist.constraints.positive, (), ()))
    observe(level + X @ weigh(), s)


def rows_by_plate():
    w = weigh()
    with numpyro.plate("obs", N) as row:
        numpyro.sample("y", dist.Normal(X[row] @ w, 0.5), obs=Y[row])


def weights_in_a_branch():
    branch = [lambda _: nss.spike_slab("w", 0.3)] * 2
    observe(X[:, 0] * cond(normal("b") > 0, *branch, None))


TAKEN: dict[str, tuple[Callable, tuple[Role, ...]]] = {
    "boolean index and a number of data": (indexed_by_booleans, ()),
    "tree of params": (with_a_tree_of_params, ()),
    "scopes in scopes": (
        handlers.scope(partly_in_a_scope, prefix="all"),
        (NoiseRole("all/part/s", True),),
    ),
    "autoregression": (autoregression, ()),
    "conditioned autoregression": (partial(autoregression, True), ()),
    "random walk": (random_walk, ()),
    "improper priors": (improper, (NoiseRole("s", True),)),
    "rows by plate": (rows_by_plate, ()),
    "weights in a branch": (weights_in_a_branch, ()),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_numpyro_takes_is_read(name):
    model, roles = TAKEN[name]
    form = form_of(model)
    assert form.roles == roles
    assert form.is_design


@pytest.mark.parametrize("part", ["observations", "offset", "features"])
def test_what_is_masked_may_be_anything(part):
    observed = np.arange(N) != 3

    def reading_with(value):
        def holes(name):
            return np.where(observed, 1.0, value if name == part else 1.0)

        def model():
            location = 2.0 * holes("offset") + (X * holes("features")[:, None]) @ weigh()
            observe(location, 0.5, Y * holes("observations"), mask_by(observed))

        return read(model)

    missing, finite = reading_with(np.nan), reading_with(7.0)
    arrays = ((x.base, x.design) for x in (missing, finite))
    jax.tree.map(np.testing.assert_array_equal, *arrays)
    np.testing.assert_array_equal(missing.base.relative[:, 0], observed)
    assert not np.any(missing.design.rows[..., 3])


def test_an_autoregression_has_its_lags_as_design():
    reading = assert_agrees(partial(autoregression, True))
    assert reading.form.constant_design
    # a loop has a noise scale for each turn, which is then a part of the whitening
    lags = np.stack([Y[1:-1], Y[:-2]]) / 0.5
    np.testing.assert_allclose(reading.design.rows[0, :2], lags, rtol=1e-12)


def test_features_stay_where_no_observation_counts_at_some_values():
    features = np.where(np.arange(N)[:, None] == 3, np.nan, X)
    table = np.where(np.arange(N)[:, None] == 3, np.nan, np.stack([Y, Y], 1))

    def model():
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([N]).to_event(1))
        of_tasks(2)(jnp.asarray(features), table, (z[:, None] == 0) & ~np.isnan(table))

    reading = read(model)
    assert 0 < np.sum(np.asarray(reading.generic["z"]) == 1) < N
    np.testing.assert_allclose(reading.features, np.nan_to_num(features.T), rtol=1e-6)


# Latent functions


MIXED: dict[str, tuple[Callable, str]] = {
    "mixture": (mixed, "functions"),
    "twice": (lambda W, phi, b: 2.0 * (W @ phi).T, "is_design"),
    "function alone": (lambda W, phi, b: (W @ phi).T + phi[0][:, None], "is_design"),
    "weights alone": (lambda W, phi, b: (W @ phi).T + W[:, 0], "is_design"),
    "switch": (lambda W, phi, b: jnp.where(b > 0.3, 2.0, 1.0) * (W @ phi).T, "is_design"),
    "bent": (lambda W, phi, b: (W @ jnp.tanh(1e-9 * phi)).T, "is_design"),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_is_no_mixture_is_a_design_of_functions(name):
    location, kind = MIXED[name]
    form = form_of(partial(functions_and_weights, location), draws=2)
    assert getattr(form, kind)
    if kind == "functions":
        assert (form.functions, form.free, form.kernels) == ("phi", ("b",), ("phi_scale",))
    else:
        assert not form.constant_design and "phi" in form.others


# Single precision, in which a tolerance may hide what is there


def test_rows_that_are_masked_hide_nothing_of_the_others():
    jax.config.update("jax_enable_x64", False)
    rng = np.random.default_rng(0)
    designs = np.float32(rng.normal(size=(200, 20, P)))
    code = -9999.0  # stands for what is missing
    designs[:5] = code
    observed = np.tile(np.arange(200)[:, None] >= 5, 20)
    model = of_tasks(20, lambda X, W: jnp.einsum("nqm,qm->nq", X, W))
    Y = np.float32(rng.normal(size=(200, 20)))
    assert read(model, designs, Y, observed).form.is_design
    designs[:] = designs[:, :1]
    assert read(model, designs, Y, observed).form.shares_features

    size = 20_000
    features, treated = np.float32(rng.normal(size=(size, P))), rng.uniform(size=size) < 0.5
    features[7], treated[7] = code, True

    def of_the_treated(y, are_treated):
        observe(are_treated * (features @ weigh()), 0.5, y, mask_by(np.arange(size) != 7))

    y = np.float32(rng.normal(size=size))
    assert not copied(read(of_the_treated, y, treated))
