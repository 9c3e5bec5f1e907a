# SPDX-License-Identifier: Apache-2.0
"""What results are said to depend on: never less than they do, and no more where it is known."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
import jax.numpy as jnp
from jax.scipy.special import xlogy

from numpyro_spikeslab.reading.provenance import NONE, Step, provenance, union

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


def through_a_reference(x):
    if not hasattr(jax, "new_ref"):
        return jax.lax.stop_gradient(x)
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jnp.tanh(x)
    return ref[...]


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
    "jit": (nested, ("a", "ab")),
    "softplus": (lambda a, b, c: (jax.nn.softplus(a) + b, c), ("ab", "c")),
    "xlogy": (lambda a, b, c: (xlogy(a, b), c), ("ab", "c")),
    "custom rules": (lambda a, b, c: (straight_through(a), clipped(b)), ("a", "b")),
    "scan": (scanned, ("ab", "c", "abc")),
    "scan that crosses": (crossed, ("abc", "bc", "c")),
    "scan without a turn": (
        lambda a, b, c: lax.scan(lambda x, _: (b, None), a, None, length=0)[0],
        "ab",
    ),
    "cond": (branched, ("abc", "ab", "")),
    "while": (looped, ("abc", "ab")),
    "where": (lambda a, b, c: (jnp.where(a > 0, b, 1.0), jnp.where(a > 0, b, c)), ("ab", "abc")),
    "sort by two": (lambda a, b, c: lax.sort((a, b, c), num_keys=2), ("ab", "ab", "abc")),
    "checkpoint": (lambda a, b, c: (jax.checkpoint(jnp.sin)(a), b), ("a", "b")),
}


def names_in(names: frozenset[Any], steps: bool = False) -> set[Any]:
    """What a result depends on, or what it depends on in steps."""
    return {x.name if steps else x for x in names if isinstance(x, Step) == steps}


def sources(function: Callable) -> list[frozenset[Any]]:
    tree = provenance(function, **INPUTS)
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, frozenset))


@pytest.mark.parametrize("name", CASES)
def test_results_depend_on_what_they_are_made_of(name):
    function, expected = CASES[name]
    assert list(map(names_in, sources(function))) == list(map(set, jax.tree.leaves(expected)))


STEPS: dict[str, tuple[Callable, str]] = {
    "smooth": (lambda a, b, c: jnp.sin(a) * b + c, ""),
    "remainder": (lambda a, b, c: lax.rem(a, 1.0 + b) + c, "ab"),
    "comparison": (lambda a, b, c: (a > b) * c, "ab"),
    "where": (lambda a, b, c: jnp.where(a > 1, b, c), "a"),
    "index": (lambda a, b, c: b[jnp.argmax(a)] + c, "a"),
    "sorted": (lambda a, b, c: jnp.sort(a) + b, ""),
    "sorted along": (lambda a, b, c: lax.sort_key_val(a, b)[1] + c, "a"),
    "stopped": (lambda a, b, c: lax.stop_gradient(a) * b, "a"),
    "clipped": (lambda a, b, c: clipped(a * b) + c, "ab"),
    "inside scan": (lambda a, b, c: lax.map(jnp.floor, a) + b, "a"),
    "number of turns": (lambda a, b, c: looped(a, b, c)[0], "a"),
    "branch": (lambda a, b, c: branched(a, b, c)[0], "a"),
    "unused": (lambda a, b, c: (jnp.floor(a), b)[1], ""),
    "next number": (lambda a, b, c: jnp.nextafter(a, 9.0) + b, "a"),
    "few bits": (lambda a, b, c: a.astype("bfloat16") * b.astype("float32"), "a"),
    "fewer bits": (lambda a, b, c: lax.reduce_precision(a, 8, 7) + b, "a"),
    "bits": (lambda a, b, c: lax.bitcast_convert_type(a, "bfloat16")[:, 1] * b, "a"),
    "a reference": (lambda a, b, c: through_a_reference(a * b) + c, "ab"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_told_apart(name):
    function, expected = STEPS[name]
    (names,) = sources(function)
    assert names_in(names, steps=True) == set(expected)


def test_entries_of_a_dictionary_have_names_and_other_trees_have_one():
    def total(sites, pair, b):
        return {"x": sites["x"]["y"] + pair[1] + 0 * b, "y": [b, 1.0]}

    names = provenance(total, sites={"x": {"y": 1.0}, "z": 2.0}, pair=[1.0, 2.0], b=1)
    assert names_in(names["x"]) == names_in(union(names)) == {("sites", "x"), "pair", "b"}
    assert union([]) == NONE


# Every primitive that JAX differentiates

MODULES = (jnp, jnp.fft, jnp.linalg, lax, lax.linalg, jax.nn, jax.scipy.special)
VECTOR, MATRIX = jnp.array([0.3, 0.7, 1.9]), jnp.array([[2.1, 0.4], [0.2, 1.7]])
ARGUMENTS: list[tuple[Any, ...]] = [
    (VECTOR,),
    (MATRIX,),
    (VECTOR, VECTOR + 0.1),
    (MATRIX, MATRIX + 0.1),
    (VECTOR, VECTOR + 0.1, VECTOR + 0.2),
    (VECTOR, 1),
    (MATRIX, (1, 0)),
    (VECTOR, "float32"),
    (VECTOR, 8, 2),
    ([VECTOR, VECTOR],),
    (1, VECTOR),
]


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of those inside of it that make floats of floats."""
    for equation in jaxpr.eqns:
        are_arrays = all(isinstance(x.aval, jax.core.ShapedArray) for x in equation.invars)
        have_floats = (any(map(is_float, x)) for x in (equation.invars, equation.outvars))
        if are_arrays and all(have_floats):
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def is_program(x: Any) -> bool:
    return isinstance(x, ClosedJaxpr | Jaxpr)


def is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def with_arrays(function: Callable, leaves: list[Any], which: list[int]) -> Callable:
    """A function of these of its arguments; the others stay."""

    def call(*arrays):
        new = dict(zip(which, arrays, strict=True))
        return function(*(new.get(k, leaf) for k, leaf in enumerate(leaves)))

    return call


def equations_by_primitive() -> dict[str, list[Any]]:
    """Equations of all functions of JAX that take some of the arguments."""
    result: dict[str, list[Any]] = {}
    names = [(m, n) for m in MODULES for n in sorted(dir(m)) if n[0].islower() and n[-2:] != "_p"]
    for (module, name), arguments in product(names, ARGUMENTS):
        leaves, tree = jax.tree.flatten(arguments)
        arrays = {k: x for k, x in enumerate(leaves) if isinstance(x, jax.Array)}

        def function(*x, module=module, name=name, tree=tree):
            return getattr(module, name)(*jax.tree.unflatten(tree, x))

        with suppress(Exception):
            closed = jax.make_jaxpr(with_arrays(function, leaves, list(arrays)))(*arrays.values())
            for equation in equations(closed.jaxpr):
                result.setdefault(equation.primitive.name, []).append(equation)
    return result


def slope_of(function: Callable, x: list[Any], dx: list[Any]) -> Any:
    return jax.jvp(function, x, dx)[1]


def is_affine(function: Callable, start: list[Any], way: list[Any]) -> bool:
    """Whether the results are affine along a way, where they are numbers."""

    def at(t):
        return function(*(x + t * dx for x, dx in zip(start, way, strict=True)))

    def agrees(t):
        expected = [(1 - t) * a + t * b for a, b in zip(at(0.0), at(1.0), strict=True)]
        same = partial(np.allclose, rtol=1e-5, atol=1e-5, equal_nan=True)
        return all(map(same, at(t), expected))

    return all(map(agrees, (0.2, 0.3, 0.45, 0.8)))


@pytest.mark.filterwarnings("ignore")
def test_what_has_a_constant_derivative_and_no_steps_is_affine():
    """Of every primitive with a derivative rule: this is what all proofs rest on."""
    judged, steps = set(), set()
    rng = np.random.default_rng(0)
    for name, same in equations_by_primitive().items():
        for equation in same[:: max(1, len(same) // 4)]:
            avals = [x.aval for x in equation.invars]
            floats = [k for k, x in enumerate(avals) if jnp.issubdtype(x.dtype, jnp.floating)]

            def bind(*x, equation=equation):
                out = equation.primitive.bind(*x, **equation.params)
                out = out if isinstance(out, list | tuple) else [out]
                return [y for y in out if jnp.issubdtype(y.dtype, jnp.inexact)]

            call = with_arrays(bind, [jnp.zeros(x.shape, x.dtype) for x in avals], floats)

            start = [
                jnp.asarray(rng.uniform(-1, 1, avals[k].shape), avals[k].dtype) for k in floats
            ]
            way = [jnp.asarray(rng.uniform(1, 3, x.shape), x.dtype) for x in start]
            try:
                value = provenance(lambda x, call=call: call(*x), x=start)
                slope = provenance(partial(slope_of, call), x=start, dx=way)
            except Exception:
                continue
            judged.add(name)
            if Step("x") in union(value):
                steps.add(name)
            elif union(slope).isdisjoint(["x", Step("x")]):
                assert is_affine(call, start, way), equation
    assert {"reduce_precision", "bitcast_convert_type", "floor", "round", "rem", "sign"} <= steps
    assert len(judged) > 90, sorted(judged)


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
        results = list(inputs.values())
        for arity, which, operands in plan:
            first, second = (results[k % len(results)] for k in operands)
            unary, binary = UNARY[which % len(UNARY)], BINARY[which % len(BINARY)]
            results.append(binary(first, second) if arity else unary(first))
        return results[-3:]

    return function


@pytest.mark.parametrize("seed", range(40))
def test_no_derivative_is_missed(seed):
    rng = np.random.default_rng(seed)
    function = random_function(rng)
    with jax.disable_jit():
        point = {name: jnp.asarray(rng.normal(size=SIZE)) for name in INPUTS}
        jacobians = jax.jacfwd(lambda x: function(**x))(point)
    for names, jacobian in zip(sources(function), jacobians, strict=True):
        for name, block in jacobian.items():
            assert name in names or not np.any(block), (name, names)
