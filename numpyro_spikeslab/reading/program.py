# SPDX-License-Identifier: Apache-2.0
"""A user's model as a program: traced with its data, run at values of its sites.

Arrays that the model reads become the program's constants, which compiled functions take as
arguments, so data of the same shapes need no second compilation. All else that it reads is part of
the program's text, so no change of an array in place or of a global goes unnoticed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from hashlib import blake2b
import re
from typing import Any

import numpy as np

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr
import jax.numpy as jnp

from numpyro.util import is_prng_key, not_jax_tracer

RUN_ONCE = {"xla_backend_optimization_level": 0}
"""Compiler options of functions whose compilation takes longer than they do."""

# derivative rules are printed with their address in memory, which is new in each trace
_RULES = re.compile(r"(?:jvp|fwd|bwd)\w*=.*? at 0x[0-9a-f]+>")


class Program:
    """A traced function without its constants, compared by content: a static argument of ``jit``.

    - **arguments**, **shapes** - shapes and types of its arguments and results, as trees.
    """

    def __init__(self, closed: ClosedJaxpr, in_tree: Any, out_tree: Any) -> None:
        # constants are inputs, for JAX never frees the arrays inside of compiled programs
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        self.jaxpr = closed.jaxpr.replace(constvars=[], invars=inputs)
        self._describe(in_tree, out_tree)
        hidden = tuple(map(_content, _hidden_constants(self.jaxpr)))
        plain = map(_plain, closed.consts)
        shapes = tuple((np.shape(c), str(jnp.result_type(c))) for c in plain)
        # the shapes in a trace belong to the mesh of chains that run in parallel
        mesh = jax.sharding.get_abstract_mesh()
        self._key = (_RULES.sub("", str(self.jaxpr)), hidden, shapes, out_tree, mesh)

    def _describe(self, in_tree: Any, out_tree: Any) -> None:
        first = len(self.jaxpr.invars) - in_tree.num_leaves
        self.in_avals = [x.aval for x in self.jaxpr.invars[first:]]
        self.arguments = jax.tree.unflatten(in_tree, map(_shape, self.in_avals))
        self.shapes = jax.tree.unflatten(out_tree, [_shape(x.aval) for x in self.jaxpr.outvars])
        self.out_tree = out_tree

    def rewritten(self, jaxpr: Jaxpr, in_tree: Any = None, out_tree: Any = None) -> "Program":
        """Return a program of the same constants with other equations or results."""
        program = copy(self)
        program.jaxpr = jaxpr
        program._describe(in_tree or jax.tree.structure(self.arguments), out_tree or self.out_tree)
        program._key = (_RULES.sub("", str(jaxpr)), *self._key[1:])
        return program

    def __hash__(self) -> int:
        return hash(self._key[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __call__(self, constants: tuple, *args: Any) -> Any:
        """Run the program with arguments in the structure with which it was traced."""
        return self.part(lambda result: result)(constants, *args)

    def part(self, of: Callable[[Any], Any]) -> Callable:
        """Return the function that computes a part of the result, a tree of its leaves, alone."""
        needed, inputs, places, tree = self._needed(of)
        outputs = {place: k for k, place in enumerate(sorted(set(places)))}

        def run(constants, *args):
            # the trace knows one type only
            leaves = [
                jnp.asarray(leaf, aval.dtype)
                for leaf, aval in zip(jax.tree.leaves(args), self.in_avals, strict=True)
            ]
            operands = (*constants, *leaves)
            results = jax.core.eval_jaxpr(needed, (), *(operands[k] for k in inputs))
            return jax.tree.unflatten(tree, [results[outputs[k]] for k in places])

        return run

    def inputs_of(self, of: Callable[[Any], Any]) -> list[int]:
        """Return positions of the inputs, constants first, that :meth:`part` takes."""
        return self._needed(of)[1]

    def places(self, of: Callable[[Any], Any]) -> tuple[list[int], Any]:
        """Return the places of a part among the results, and its structure."""
        return jax.tree.flatten(
            of(jax.tree.unflatten(self.out_tree, range(len(self.jaxpr.outvars))))
        )

    def _needed(self, of: Callable[[Any], Any]) -> tuple[Jaxpr, list[int], list[int], Any]:
        """Return the program of a part, the inputs that it takes, and the places of its leaves."""
        places, tree = self.places(of)
        needed, used = dce_jaxpr(self.jaxpr, [k in places for k in range(len(self.jaxpr.outvars))])
        return needed, [k for k, is_used in enumerate(used) if is_used], places, tree


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def trace_program(function: Callable, *args: Any) -> tuple[Program, tuple]:
    """Trace a function of arrays, or of their shapes; return the program and its constants."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    program = Program(closed, jax.tree.structure(args), jax.tree.structure(shapes))
    return program, tuple(closed.consts)


def cut_program(
    closed: ClosedJaxpr, inputs: list[Any], results: list[Any], in_tree: Any, out_tree: Any
) -> tuple[Program, tuple]:
    """Return the program from some variables of a trace to others, and its constants."""
    jaxpr, constvars, starts = closed.jaxpr, closed.jaxpr.constvars, set(inputs)
    part = jaxpr.replace(
        constvars=[],
        invars=[*constvars, *inputs],
        outvars=results,
        eqns=[x for x in jaxpr.eqns if starts.isdisjoint(x.outvars)],
    )
    keeps = [False] * len(constvars) + [True] * len(inputs)
    part, used = dce_jaxpr(part, [True] * len(results), keeps)
    constants = [x for x, is_used in zip(closed.consts, used, strict=False) if is_used]
    split = len(constants)
    part = part.replace(constvars=part.invars[:split], invars=part.invars[split:])
    return Program(ClosedJaxpr(part, constants), in_tree, out_tree), tuple(constants)


def _run(program: Program, constants: tuple, *args: Any) -> Any:
    return program(constants, *args)


_often = jax.jit(_run, static_argnums=0)
_once = jax.jit(_run, static_argnums=0, compiler_options=RUN_ONCE)


def compiled(function: Callable, *args: Any, once: bool = False) -> Any:
    """Compute ``function(*args)``, compiled once for all calls that trace to the same program, and
    quickly if it runs ``once``."""
    program, constants = trace_program(function, *args)
    # a function that is traced has no compiler options of its own; in it all new arrays are traced
    run = _once if once and are_concrete(jnp.zeros(())) else _often
    return run(program, constants, *args)


def computed(function: Callable[[], Any]) -> tuple[Any, bool]:
    """Compute ``function()`` in one compilation. The result is concrete even where data are traced,
    for which arbitrary arrays stand in; return also whether none are."""
    program, constants = trace_program(function)
    with outside_transformations():
        return _once(program, stand_ins(constants)), are_concrete(constants)


def _plain(constant: Any) -> Any:
    is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(constant) if is_key else constant


def _subprograms(equation: Any) -> Iterator[Any]:
    for parameter in equation.params.values():
        for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(part, Jaxpr | ClosedJaxpr):
                yield part


def _hidden_constants(jaxpr: Any) -> Iterator[Any]:
    """Yield the arrays inside of a program, which its text does not show."""
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            if isinstance(variable, Literal) and np.ndim(variable.val) > 0:
                yield variable.val
        for inner in _subprograms(equation):
            yield from getattr(inner, "consts", ())
            yield from _hidden_constants(getattr(inner, "jaxpr", inner))


def _content(constant: Any) -> Any:
    return _digest(_plain(constant)) if not_jax_tracer(constant) else id(constant)


def _digest(array: Any) -> bytes:
    """Hash shape, type and content."""
    digest = blake2b(f"{np.shape(array)} {array.dtype}".encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def are_concrete(tree: Any) -> bool:
    """Whether no leaf is a tracer."""
    return all(not_jax_tracer(leaf) for leaf in jax.tree.leaves(tree))


def outside_transformations(tree: Any = ()) -> AbstractContextManager:
    """Return a context in which functions of concrete data give concrete results, even inside of
    the caller's transformations. For traced data it does nothing."""
    return jax.core.eval_context() if are_concrete(tree) else nullcontext()


class Fingerprint:
    """JAX's arrays, which do not change, and digests of numpy's, which may; compared by content."""

    def __init__(self, constants: tuple) -> None:
        # the arrays are held, so that no other gets the address of one
        self.arrays = [c for c in constants if isinstance(c, jax.Array)]
        self.content = [id(c) if isinstance(c, jax.Array) else _digest(c) for c in constants]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.content == other.content


def on_device(constants: tuple) -> tuple:
    """Copy numpy's arrays to JAX's device, once for all later calls."""
    # known data stay known inside of the caller's transformations
    with jax.core.eval_context():
        return tuple(c if isinstance(c, jax.Array) else jnp.array(c) for c in constants)


def stand_ins(constants: tuple) -> tuple:
    """Replace tracers by arbitrary arrays. No program depends on the values of traced data."""
    rng = np.random.default_rng(0)

    def of(constant):
        if not_jax_tracer(constant) or is_prng_key(constant):
            return constant
        if jnp.issubdtype(constant.dtype, jnp.inexact):
            # positive, for models that take logarithms; large ones are not made in double precision
            kind: Any = np.float32 if constant.dtype == np.float32 else np.float64
            numbers = rng.random(constant.shape, kind)
            numbers *= 0.9
            numbers += 0.1
            return numbers.astype(constant.dtype, copy=False)
        # masks let everything through
        return np.full(constant.shape, constant.dtype == bool, constant.dtype)

    return tuple(map(of, constants))
