# SPDX-License-Identifier: Apache-2.0
"""What results are said to depend on: never less than they do, and no more where it is known."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jax
from jax import lax
import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_spikeslab.reading.provenance import NONE, STEP, provenance, union

pytestmark = pytest.mark.usefixtures("x64")

SIZE = 3
INPUTS = {name: jnp.linspace(0.2, 0.9, SIZE) + k for k, name in enumerate("abc")}


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvps(lambda dx, _, x: dx)


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, dx: (jnp.clip(dx, -1.0, 1.0),))


def scanned(a, b, c):
    """The carry takes from a and b, the stack from all."""

    def step(carry, x):
        first, second = carry
        return (first + a[0], second * 1.1), first * x

    (first, second), stack = lax.scan(step, (b[0], c[0]), c)
    return first, second, stack


def crossed(a, b, c):
    """What feeds back through a second turn of the loop."""

    def step(carry, _):
        _, y, z = carry
        return (y, z, z), None

    return lax.scan(step, (a, b, c), None, length=1)[0]


def branched(a, b, c):
    return lax.cond(a[0] > 0.0, lambda: (b, 2.0 * b, 5.0), lambda: (c, 3.0 * b, 5.0))


def looped(a, b, c):
    """How often the loop turns decides about all that it makes."""

    def turn(carry):
        k, x, same = carry
        return k + 1.0, x * c, 1.0 * same

    return lax.while_loop(lambda carry: carry[0] < a[0], turn, (0.0, b, b))[1:]


def nested(a, b, c):
    return jax.jit(lambda x, y: (jax.jit(jnp.sin)(x), x + y))(a, b)


CASES: dict[str, tuple[Callable, Any]] = {
    "nothing": (lambda a, b, c: jnp.ones(2), ""),
    "a literal": (lambda a, b, c: 1.0, ""),
    "an input": (lambda a, b, c: b, "b"),
    "jit": (nested, ("a", "ab")),
    "softplus": (lambda a, b, c: jax.nn.softplus(a) + b, "ab"),
    "xlogy": (lambda a, b, c: (xlogy(a, b), c), ("ab", "c")),
    "custom_jvp": (lambda a, b, c: straight_through(a), "a"),
    "custom_vjp": (lambda a, b, c: clipped(a), "a"),
    "scan": (scanned, ("ab", "c", "abc")),
    "scan that crosses": (crossed, ("abc", "bc", "c")),
    "scan without a turn": (
        lambda a, b, c: lax.scan(lambda x, _: (b, None), a, None, length=0)[0],
        "ab",
    ),
    "cond": (branched, ("abc", "ab", "")),
    "while": (looped, ("abc", "ab")),
    "where": (lambda a, b, c: (jnp.where(a > 0, b, 1.0), jnp.where(a > 0, b, c)), ("ab", "abc")),
    "cumsum": (lambda a, b, c: (jnp.cumsum(a), jnp.cumsum(b * c)), ("a", "bc")),
    "sort": (lambda a, b, c: lax.sort((a, b), num_keys=1), ("a", "ab")),
    "sort by two": (lambda a, b, c: lax.sort((a, b, c), num_keys=2), ("ab", "ab", "abc")),
    "rounding": (lambda a, b, c: (jnp.floor(a), jnp.sign(b), jnp.round(c)), ("a", "b", "c")),
    "map": (lambda a, b, c: lax.map(lambda x: x + b, a), "ab"),
    "checkpoint": (lambda a, b, c: (jax.checkpoint(jnp.sin)(a), b), ("a", "b")),
    "vmap": (lambda a, b, c: jax.vmap(lambda x, y: (x, x * y))(a, b), ("a", "ab")),
    "linear solve": (
        lambda a, b, c: (jnp.linalg.solve(jnp.diag(a), b), c),
        ("ab", "c"),
    ),
    "fori": (lambda a, b, c: lax.fori_loop(0, 3, lambda k, x: x + b[k], a), "ab"),
}


def without_steps(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if not name.startswith(STEP))


def as_sets(expected: Any) -> list[frozenset[str]]:
    return [frozenset(x) for x in jax.tree.leaves(expected)]


def found_sets(function: Callable, inputs: Any = INPUTS) -> list[frozenset[str]]:
    found = provenance(function, **inputs)
    return jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, frozenset))


@pytest.mark.parametrize("name", CASES)
def test_results_depend_on_what_they_are_made_of(name):
    function, expected = CASES[name]
    assert [without_steps(x) for x in found_sets(function)] == as_sets(expected)


STEPS: dict[str, tuple[Callable, str]] = {
    "smooth": (lambda a, b, c: jnp.sin(a) * b + c, ""),
    "floor": (lambda a, b, c: jnp.floor(a) + b, "a"),
    "ceil": (lambda a, b, c: jnp.ceil(a) + b, "a"),
    "round": (lambda a, b, c: jnp.round(a) + b, "a"),
    "sign": (lambda a, b, c: jnp.sign(a) + b, "a"),
    "remainder": (lambda a, b, c: lax.rem(a, 1.0 + b) + c, "ab"),
    "modulus": (lambda a, b, c: a % 1.0 + b, "a"),
    "comparison": (lambda a, b, c: (a > b) * c, "ab"),
    "where": (lambda a, b, c: jnp.where(a > 1, b, c), "a"),
    "integers": (lambda a, b, c: a.astype(int) + b, "a"),
    "index": (lambda a, b, c: b[jnp.argmax(a)] + c, "a"),
    "sorted": (lambda a, b, c: jnp.sort(a) + b, ""),
    "sorted along": (lambda a, b, c: lax.sort_key_val(a, b)[1] + c, "a"),
    "stopped": (lambda a, b, c: lax.stop_gradient(a) * b, "a"),
    "straight through": (lambda a, b, c: straight_through(a) + b, "a"),
    "clipped": (lambda a, b, c: clipped(a * b) + c, "ab"),
    "inside jit": (lambda a, b, c: jax.jit(jnp.floor)(a) + b, "a"),
    "inside scan": (lambda a, b, c: lax.map(jnp.floor, a) + b, "a"),
    "number of turns": (lambda a, b, c: looped(a, b, c)[0], "a"),
    "branch": (lambda a, b, c: branched(a, b, c)[0], "a"),
    "unused": (lambda a, b, c: (jnp.floor(a), b)[1], ""),
    "next number": (lambda a, b, c: jnp.nextafter(a, 9.0) + b, "a"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_told_apart(name):
    function, expected = STEPS[name]
    (found,) = found_sets(function)
    assert {x.removeprefix(STEP) for x in found if x.startswith(STEP)} == set(expected)


def functions_of_one_array() -> Iterator[Callable]:
    x = jnp.ones(2)
    for name in sorted(dir(lax)):
        function = getattr(lax, name)
        if name[0].islower() and not name.endswith("_p") and callable(function):
            try:
                shape = jax.eval_shape(function, x)
            except Exception:
                continue
            if isinstance(shape, jax.ShapeDtypeStruct) and shape.dtype == float:
                yield function


@pytest.mark.slow
def test_a_function_without_a_derivative_is_a_step():
    """Whatever JAX has: a result that moves with its input, in a way that its derivative hides."""
    x = jnp.linspace(0.3, 5.1, 7)
    hidden = []
    for function in functions_of_one_array():
        value, slope = jax.jvp(function, (x,), (jnp.ones(7),))
        if jnp.all(slope == 0) and jnp.any(value != function(2.0 * x)):
            assert STEP + "x" in provenance(function, x=x), function
            hidden.append(function)
    assert {lax.floor, lax.ceil, lax.round, lax.stop_gradient} <= set(hidden)


def test_a_union_has_all_names():
    found = provenance(lambda a, b: {"x": a, "y": [b, 1.0]}, a=1.0, b=2.0)
    assert union(found) == {"a", "b"}
    assert union([]) == NONE


def test_a_tree_of_inputs_has_one_name():
    found = provenance(
        lambda tree, b: tree["x"] + tree["y"] + 0 * b, tree={"x": 1.0, "y": 2.0}, b=1
    )
    assert without_steps(found) == {"tree", "b"}


# Random functions

UNARY = [jnp.sin, jnp.cumsum, jnp.sort, jax.nn.softplus, lambda x: x[::-1], jax.jit(jnp.tanh)]
BINARY = [
    jnp.add,
    jnp.multiply,
    lambda x, y: jnp.where(x > 0, y, x),
    lambda x, y: lax.cond(x[0] > 0, jnp.sin, jnp.cos, y),
    lambda x, y: lax.scan(lambda s, z: (s + z, s * y), x[0], x)[1][-1],
    lambda x, y: lax.fori_loop(0, 2, lambda _, s: s + y, x),
    lambda x, y: xlogy(jnp.abs(x) + 0.1, jnp.abs(y) + 0.1),
    lambda x, y: x,
    jax.jit(lambda x, y: jax.nn.relu(x) + y[0]),
]


def random_function(rng: np.random.Generator) -> Callable:
    plan = [(rng.integers(2), rng.integers(99), rng.integers(99, size=2)) for _ in range(6)]

    def function(**inputs):
        known = list(inputs.values())
        for arity, which, operands in plan:
            first, second = (known[k % len(known)] for k in operands)
            unary, binary = UNARY[which % len(UNARY)], BINARY[which % len(BINARY)]
            known.append(binary(first, second) if arity else unary(first))
        return known[-3:]

    return function


@pytest.mark.parametrize("seed", range(40))
def test_no_derivative_is_missed(seed):
    rng = np.random.default_rng(seed)
    function = random_function(rng)
    found = found_sets(function)
    with jax.disable_jit():
        point = {name: jnp.asarray(rng.normal(size=SIZE)) for name in INPUTS}
        jacobians = jax.jacfwd(lambda x: function(**x))(point)
    for names, jacobian in zip(found, jacobians, strict=True):
        for name, block in jacobian.items():
            assert name in names or not np.any(block), (name, names)
