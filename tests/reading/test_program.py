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
from truth.regressions import RNG, N, P, X, Y, observe, rows, weigh

import jax
from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.factors import mtmkl
from numpyro_spikeslab.reading.program import Fingerprint, Program, compiled, trace_program
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

SHAPE = jax.ShapeDtypeStruct((P,), float)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of what is compiled inside of it."""
    names: list[str] = []
    active = [True]

    def listen(name: str, duration: float, **_: Any) -> None:
        if active[0] and name.endswith("backend_compile_duration"):
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        active[0] = False


# Programs


def program(function: Callable) -> Program:
    return trace_program(function, SHAPE)[0]


def closing_over(array: Any) -> Callable:
    return lambda x: x @ jnp.asarray(array)


def within_jit(array: Any) -> Callable:
    inner = jax.jit(lambda x: x @ array)
    return lambda x: inner(x) + 1.0


def test_data_are_constants_and_no_part_of_a_program():
    closure, constants = trace_program(closing_over(X.T), SHAPE)
    x = np.arange(3.0)
    np.testing.assert_allclose(closure(constants, x), x @ X.T)
    np.testing.assert_allclose(closure((2 * X.T,), x), 2 * x @ X.T)
    other = program(closing_over(2 * X.T))
    assert closure == other and hash(closure) == hash(other)


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray])
def test_what_is_hidden_in_a_nested_function_is_part_of_a_program_or_a_constant(wrap):
    """Whichever JAX makes of it."""
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
    assert program(closing_over(X.T)) != program(other)


def test_derivative_rules_are_compared_by_name_and_their_programs_by_content():
    """Their addresses in memory are new in each trace."""
    assert program(jax.nn.softplus) == program(lambda x: jax.nn.softplus(x))

    def slope(scale):
        @jax.custom_jvp
        def rule(x):
            return jnp.sin(x)

        rule.defjvps(lambda dx, _, x: scale * dx)
        return compiled(lambda x: jax.jvp(rule, (x,), (jnp.ones(P),))[1], jnp.ones(P))

    np.testing.assert_allclose(slope(2.0), 2 * slope(1.0))


def test_random_keys_are_constants_like_others():
    def draw(seed):
        key = random.key(seed)
        return compiled(lambda x: x + random.normal(key, (P,)), jnp.zeros(P))

    first = draw(0)
    with compilations() as names:
        assert not np.array_equal(first, draw(1)) and np.array_equal(first, draw(0))
    assert names == []


def test_fingerprints_are_compared_by_content():
    array, device = X.copy(), jnp.asarray(X)
    old = Fingerprint((array, device))
    assert old == Fingerprint((array.copy(), device))
    array[0, 0] += 1.0
    for other in ((array, device), (X, 2 * device), (X,), (X.reshape(P, N), device)):
        assert old != Fingerprint(other)
    holes = np.where(X > 0, X, np.nan)
    assert Fingerprint((holes,)) == Fingerprint((holes.copy(),))


# Readings


def model(X, y=None, scale=1.0):
    observe(scale * (X @ weigh("w", X.shape[1])), 0.5, y)


FACTOR: Any = 1.0
CHANGES: dict[str, tuple[Callable, Callable, np.ndarray]] = {
    "array": (lambda data: data.X, lambda data: np.multiply(data.X, 2.0, out=data.X), 2 * X),
    "table": (
        lambda data: data.table[["a", "b", "c"]].to_numpy(),
        lambda data: data.table.insert(1, "b", data.table.pop("b") * 7.0),
        X * [1.0, 7.0, 1.0],
    ),
    "number": (lambda data: data.scale * X, lambda data: setattr(data, "scale", 2.0), 2 * X),
    "global array": (
        lambda _: X * FACTOR,
        lambda _: globals().update(FACTOR=np.full(P, 3.0)),
        3 * X,
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_read_anew(name, monkeypatch):
    """And what was read before stays what it was."""
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    features, change, expected = CHANGES[name]
    table = pd.DataFrame(X, columns=["a", "b", "c"])
    data = SimpleNamespace(X=X.copy(), table=table, scale=1.0)
    reader = Reader(lambda: model(features(data), Y), "test")
    first = reader((), {})
    assert reader((), {}) is first
    change(data)
    np.testing.assert_allclose(rows(reader((), {}).design), expected.T)
    np.testing.assert_allclose(rows(first.design), X.T)


def test_new_arguments_are_read():
    reader, y = Reader(model, "test"), Y.copy()
    first = reader((X, y), {})
    assert reader((X.copy(), jnp.asarray(Y)), {}) is not first
    np.testing.assert_allclose(rows(reader((X, y), {"scale": 3.0}).design), 3 * X.T)
    assert reader((X[:5], y[:5]), {}).form.num_obs == 5
    y[0] = 9.0
    np.testing.assert_array_equal(reader((X, y), {}).base.Y[:, 0], y)


# Costs


def steps_of_a_fit(model: Callable, *args: Any) -> Iterator[None]:
    svi = nss.CAVI(model, nss.PairedGuide(model))
    state = svi.init(random.key(0), *args)
    yield
    for _ in range(2):
        state, _ = svi.update(state, *args)
        yield


def steps_of_a_chain(kernel: Any, model: Callable, *args: Any) -> Iterator[None]:
    made = kernel(model)
    state = made.init(random.key(0), 0, None, args, {})
    yield
    jax.eval_shape(lambda state: made.sample(state, args, {}), state)
    yield


def reading_of(model: Callable, *args: Any) -> Iterator[None]:
    yield Reader(model, "test")(args, {})


TASKS = mtmkl(["white"] * 2), np.arange(N), np.ones((N, 2))
RUNS: dict[str, tuple[Any, Callable, list[int]]] = {
    "reading": ((model, X, Y), reading_of, [1]),
    # the start of a fit runs it where sites start, that of a chain at a draw from the prior
    "fit": ((model, X, Y), steps_of_a_fit, [2, 1, 1]),
    "fit of functions": (TASKS, steps_of_a_fit, [2, 1, 1]),
    "pairs": ((model, X, Y), partial(steps_of_a_chain, nss.PairedGibbs), [2, 1]),
    "functions": (TASKS, partial(steps_of_a_chain, nss.LatentGibbs), [2, 1]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_reading_runs_the_model_once(name):
    (program, *args), steps, expected = RUNS[name]
    counts = [0]

    def counted(*args):
        counts[-1] += 1
        return program(*args)

    for _ in steps(counted, *args):
        counts.append(0)
    assert counts[:-1] == expected


@pytest.mark.parametrize("wrap", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("draw", [RNG.normal, lambda size: RNG.integers(0, 9, size=size)])
def test_a_new_response_compiles_nothing_nor_does_another_reader(draw, wrap):
    reader, responses = Reader(model, "test"), [wrap(draw(size=N)) for _ in range(3)]
    first = reader((X, responses[0]), {})
    assert first.design is not None and first.base is not None
    with compilations() as names:
        assert reader((X, responses[0]), {}) is first
        new = reader((X, responses[1]), {})
        another = Reader(model, "another")((2 * X, responses[2]), {})
        assert new.design is not None and another.design is not None
        residual = new.base.Y
    assert names == []
    np.testing.assert_array_equal(residual[:, 0], responses[1])


def test_what_is_compiled_keeps_no_data():
    """JAX never forgets what it has compiled for, so that must not hold the arrays of a fit."""
    data = jnp.asarray(X), jnp.asarray(Y)
    references = [weakref.ref(x) for x in data]
    guide = nss.PairedGuide(model)
    params = nss.CAVI(model, guide).run(random.key(0), 1200, *data, progress_bar=False).params
    guide.median(params, *data)
    del guide, params, data
    gc.collect()
    assert [x() for x in references] == [None, None]


def test_a_reader_is_pickled_without_what_it_has_read():
    reader = Reader(model, "test")
    first = reader((X, Y), {})
    copied = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(rows(copied((X, Y), {}).design), rows(first.design))
