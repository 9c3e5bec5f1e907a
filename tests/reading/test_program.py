# SPDX-License-Identifier: Apache-2.0
"""Programs are told apart by what they compute, and nothing that a model has read goes stale."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
import gc
import pickle
from types import SimpleNamespace
from typing import Any
import weakref

import numpy as np
import pandas as pd
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.program import (
    Program,
    compiled,
    fingerprint,
    same_fingerprint,
    trace_program,
)
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

N, P = 8, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P))
Y = RNG.normal(size=N)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of what is compiled inside of it."""
    found: list[str] = []
    active = [True]

    def listen(name: str, duration: float, **_: Any) -> None:
        if active[0] and name.endswith("backend_compile_duration"):
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        active[0] = False


# Programs


def program(function: Callable, *args: Any) -> Program:
    return trace_program(function, *args)[0]


def closing_over(array: Any) -> Callable:
    return lambda x: x @ jnp.asarray(array)


def within_jit(array: Any) -> Callable:
    inner = jax.jit(lambda x: x @ array)
    return lambda x: inner(x) + 1.0


SHAPE = jax.ShapeDtypeStruct((P,), float)


def test_a_program_runs_with_its_constants():
    closure, constants = trace_program(closing_over(X.T), SHAPE)
    x = np.arange(3.0)
    np.testing.assert_allclose(closure(constants, x), x @ X.T)
    np.testing.assert_allclose(closure((2 * X.T,), x), 2 * x @ X.T)


def test_data_are_no_part_of_a_program():
    one, two = program(closing_over(X.T), SHAPE), program(closing_over(2 * X.T), SHAPE)
    assert one == two and hash(one) == hash(two)


def test_what_is_hidden_in_a_nested_function_is_part_of_a_program_or_a_constant():
    """Whichever JAX makes of it."""
    for wrap in (np.asarray, jnp.asarray):
        (one, first), (two, second) = (
            trace_program(within_jit(wrap(k * X.T)), SHAPE) for k in (1.0, 2.0)
        )
        x = np.arange(3.0)
        np.testing.assert_allclose(two(second, x), 2 * x @ X.T + 1)
        np.testing.assert_allclose(one(first, x), x @ X.T + 1)
        assert one != two or not np.array_equal(first[0], second[0])


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x @ jnp.asarray(X.T) + 1.0,
        lambda x: x @ jnp.asarray(X[:5].T),
        lambda x: (x @ jnp.asarray(X.T),),
        lambda x: x @ jnp.asarray(X.T.astype("float32")),
    ],
    ids=["text", "shape", "tree", "type"],
)
def test_other_programs_are_others(other):
    assert program(closing_over(X.T), SHAPE) != program(other, SHAPE)


def test_derivative_rules_are_compared_by_name():
    """Their addresses in memory are new in each trace."""
    assert program(lambda x: jax.nn.softplus(x), SHAPE) == program(jax.nn.softplus, SHAPE)
    assert program(jax.nn.relu, SHAPE) == program(lambda x: jax.nn.relu(x), SHAPE)


def test_functions_of_the_same_name_that_differ_are_others():
    def own(scale):
        @jax.custom_jvp
        def rule(x):
            return jnp.sin(x)

        rule.defjvps(lambda dx, _, x: scale * dx)
        return rule

    def slope(rule):
        return compiled(lambda x: jax.jvp(rule, (x,), (jnp.ones(P),))[1], jnp.ones(P))

    slopes = [slope(own(k)) for k in (1.0, 2.0)]
    np.testing.assert_allclose(slopes[1], 2 * slopes[0])


def test_random_keys_are_constants_like_others():
    def drawing(key):
        return lambda x: x + random.normal(key, (P,))

    found = [compiled(drawing(random.key(k)), jnp.zeros(P)) for k in (0, 1, 0)]
    assert np.array_equal(found[0], found[2]) and not np.array_equal(found[0], found[1])


def test_the_same_program_of_other_data_compiles_nothing():
    x = jnp.ones(P)
    first = compiled(closing_over(X.T), x)
    with compilations() as found:
        second = compiled(closing_over(np.ascontiguousarray(3 * X.T)), x)
    assert found == []
    np.testing.assert_allclose(second, 3 * first)
    with compilations() as found:
        compiled(closing_over(X[:5].T), x)
    assert found


def test_fingerprints_are_compared_by_content():
    array, device = X.copy(), jnp.asarray(X)
    old = fingerprint((array, device))
    assert same_fingerprint(old, fingerprint((array.copy(), device)))
    array[0, 0] += 1.0
    assert not same_fingerprint(old, fingerprint((array, device)))
    assert not same_fingerprint(old, fingerprint((X, 2 * device)))
    assert not same_fingerprint(old, fingerprint((X,)))
    assert not same_fingerprint(fingerprint((X,)), fingerprint((X.reshape(P, N),)))
    holes = np.where(X > 0, X, np.nan)
    assert same_fingerprint(fingerprint((holes,)), fingerprint((holes.copy(),)))


# Readings


def model(X, y=None, scale=1.0):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(scale * (X @ w), 0.5), obs=y)


def rows(reading: Any) -> np.ndarray:
    return np.asarray(reading.design.rows).reshape(-1, N)[:P]


FACTOR: Any = 1.0


def in_place():
    inputs = X.copy()
    return lambda: model(inputs, Y), lambda: np.multiply(inputs, 2.0, out=inputs), 2 * X


def in_a_table():
    table = pd.DataFrame(X, columns=["a", "b", "c"])

    def change():
        table.loc[:, "b"] = 7.0

    expected = np.column_stack([X[:, 0], np.full(N, 7.0), X[:, 2]])
    return lambda: model(table[["a", "b", "c"]].to_numpy(), Y), change, expected


def in_a_namespace():
    data = SimpleNamespace(X=X, scale=1.0)
    return lambda: model(data.X, Y, data.scale), lambda: setattr(data, "scale", 2.0), 2 * X


def in_a_flag():
    flags = {"square": False}
    return lambda: model(X**2 if flags["square"] else X, Y), lambda: flags.update(square=True), X**2


def in_a_global(factor):
    return lambda: model(X * FACTOR, Y), lambda: globals().update(FACTOR=factor), X * factor


@pytest.mark.parametrize(
    "make",
    [
        in_place,
        in_a_table,
        in_a_namespace,
        in_a_flag,
        partial(in_a_global, 2.0),
        partial(in_a_global, np.full(P, 3.0)),
    ],
    ids=["array", "table", "namespace", "flag", "global number", "global array"],
)
def test_what_has_changed_is_read_anew(make, monkeypatch):
    """And what was read before stays what it was."""
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    changing, change, expected = make()
    read = Reader(changing, "test")
    first = read((), {})
    assert read((), {}) is first
    change()
    np.testing.assert_allclose(rows(read((), {})), expected.T)
    np.testing.assert_allclose(rows(first), X.T)


def test_new_arguments_are_read():
    read = Reader(model, "test")
    first = read((X, Y), {})
    assert read((X, Y), {}) is first
    assert read((X.copy(), jnp.asarray(Y)), {}) is not first
    np.testing.assert_allclose(rows(read((X, Y), {"scale": 3.0})), 3 * X.T)
    assert read((X[:5], Y[:5]), {}).form.num_obs == 5
    y = Y.copy()
    read((X, y), {})
    y[0] = 9.0
    np.testing.assert_array_equal(read((X, y), {}).base.Y[:, 0], y)


# Costs


@pytest.mark.parametrize(
    "response",
    [
        lambda k: RNG.normal(size=N),
        lambda k: RNG.integers(0, 9, size=N),
        lambda k: jnp.asarray(RNG.integers(0, 9, size=N)),
        lambda k: jnp.asarray(RNG.normal(size=N)),
    ],
    ids=["floats", "integers", "JAX's integers", "JAX's floats"],
)
def test_a_new_response_compiles_nothing(response):
    read = Reader(model, "test")
    used = read((X, response(0)), {})
    assert used.design is not None and used.base is not None
    y = response(1)
    with compilations() as found:
        new = read((X, y), {})
        assert new.design is not None
        residual = new.base.Y
    assert found == []
    np.testing.assert_array_equal(residual[:, 0], y)


def test_another_reader_of_the_same_model_compiles_nothing():
    used = Reader(model, "test")((X, Y), {})
    assert used.design is not None
    with compilations() as found:
        assert Reader(model, "another")((2 * X, Y + 1.0), {}).design is not None
    assert found == []


def test_reading_again_runs_the_model_twice_and_compiles_nothing():
    calls = []

    def counting(X, y):
        calls.append(None)
        model(X, y)

    read = Reader(counting, "test")
    first = read((X, Y), {})
    calls.clear()
    with compilations() as found:
        assert read((X, Y), {}) is first
    assert len(calls) == 2 and found == []


def test_many_features_cost_no_larger_program():
    """What is known of a model is traced, not unrolled."""
    texts = []
    for size in (3, 300):
        wide = RNG.normal(size=(N, size))
        texts.append(str(Reader(model, "test")((wide, Y), {}).problem.program.jaxpr))
    assert len(texts[1]) < 1.1 * len(texts[0])


def test_what_is_compiled_keeps_no_data():
    """JAX never forgets what it has compiled for, so that must not hold the arrays of a fit."""
    data = jnp.asarray(X), jnp.asarray(Y)
    left = [weakref.ref(x) for x in data]
    guide = nss.PairedGuide(model)
    params = nss.CAVI(model, guide).run(random.key(0), 1200, *data, progress_bar=False).params
    guide.median(params, *data)
    del guide, params, data
    gc.collect()
    assert [x() for x in left] == [None, None]


def test_a_reader_is_pickled_without_what_it_has_read():
    read = Reader(model, "test")
    first = read((X, Y), {})
    copied = pickle.loads(pickle.dumps(read))
    np.testing.assert_array_equal(rows(copied((X, Y), {})), rows(first))
