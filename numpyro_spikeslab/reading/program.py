# SPDX-License-Identifier: Apache-2.0
"""A user's model as a program: traced with its data, run at values of its sites.

:func:`trace_program` traces a function once. Arrays of the caller become the program's constants,
which compiled functions take as arguments, so data of the same shapes need no second compilation;
whatever else the function has read is part of the program's text. So nothing that a model sees can
change unnoticed: neither an array that is changed in place nor a global that is bound anew.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
import re
from typing import Any, NamedTuple

import numpy as np

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp

from numpyro.util import is_prng_key, not_jax_tracer

RUN_ONCE = {"xla_backend_optimization_level": 0}
"""Compiler options of functions whose compilation takes longer than they do."""

# derivative rules are printed with their address in memory, which is new in each trace
_RULES = re.compile(r"(?:jvp|fwd|bwd)\w*=.*? at 0x[0-9a-f]+>")


class Program:
    """A traced function without its constants, compared by content: a static argument of ``jit``.

    :param closed: the trace.
    :param out_tree: structure of the result.
    """

    def __init__(self, closed: ClosedJaxpr, out_tree: Any) -> None:
        # with constants as inputs: JAX keeps what it has compiled for, so data would never be freed
        inputs = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        self.jaxpr = closed.jaxpr.replace(constvars=[], invars=inputs)
        self.out_tree = out_tree
        self.in_avals, self.out_avals = closed.in_avals, closed.out_avals
        hidden = tuple(map(_content, _hidden_constants(self.jaxpr)))
        shapes = tuple((c.shape, str(c.dtype)) for c in map(jnp.asarray, _plain(closed.consts)))
        # the shapes in a trace belong to the mesh of chains that run in parallel
        mesh = jax.sharding.get_abstract_mesh()
        self._key = (_RULES.sub("", str(self.jaxpr)), hidden, shapes, out_tree, mesh)

    @property
    def shapes(self) -> Any:
        """Shapes and types of the result, in its structure."""
        every = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.out_avals)
        return jax.tree.unflatten(self.out_tree, every)

    def __hash__(self) -> int:
        return hash(self._key[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self._key == other._key

    def __call__(self, constants: tuple, *args: Any) -> Any:
        """Run the program.

        :param constants: in the order of the trace.
        :param args: in the structure with which it was traced.
        """
        return self._evaluate(self.jaxpr, self.out_tree, constants, *args)

    def part(self, of: Callable[[Any], Any]) -> Callable:
        """The program of a part of the result, without what only the rest needs.

        :param of: takes the part, any tree of its leaves, from the result.
        """
        every = jax.tree.unflatten(self.out_tree, range(len(self.out_avals)))
        places, tree = jax.tree.flatten(of(every))
        return partial(self._evaluate, _needed(self.jaxpr, places), tree)

    def inputs_of(self, of: Callable[[Any], Any]) -> list[int]:
        """Positions of the inputs, constants first, that :meth:`part` takes."""
        every = jax.tree.unflatten(self.out_tree, range(len(self.out_avals)))
        part = _needed(self.jaxpr, jax.tree.leaves(of(every)))
        read = (*part.outvars, *(x for equation in part.eqns for x in equation.invars))
        taken = {x for x in read if not isinstance(x, Literal)}
        return [k for k, x in enumerate(part.invars) if x in taken]

    def _evaluate(self, jaxpr: Jaxpr, tree: Any, constants: tuple, *args: Any) -> Any:
        # the trace knows one type only
        leaves = [
            jnp.asarray(leaf, aval.dtype)
            for leaf, aval in zip(jax.tree.leaves(args), self.in_avals, strict=True)
        ]
        return jax.tree.unflatten(tree, jax.core.eval_jaxpr(jaxpr, (), *constants, *leaves))


def _needed(jaxpr: Jaxpr, places: list[int]) -> Jaxpr:
    """What some of the results of a program take."""
    results, kept = [jaxpr.outvars[k] for k in places], []
    needed = {x for x in results if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed |= {x for x in equation.invars if not isinstance(x, Literal)}
    return jaxpr.replace(eqns=kept[::-1], outvars=results)


def trace_program(function: Callable, *args: Any) -> tuple[Program, tuple]:
    """Trace a function.

    :param args: arrays, or their shapes.
    :return: the program and its constants.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return Program(closed, jax.tree.structure(shapes)), tuple(closed.consts)


@partial(jax.jit, static_argnums=0)
def _run(program: Program, constants: tuple, *args: Any) -> Any:
    return program(constants, *args)


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _run_once(program: Program, constants: tuple, *args: Any) -> Any:
    return program(constants, *args)


def compiled(function: Callable, *args: Any, once: bool = False) -> Any:
    """``function(*args)``, compiled once for all calls that trace to the same program.

    :param once: whether it runs so seldom that its compilation matters more.
    """
    program, constants = trace_program(function, *args)
    return (_run_once if once else _run)(program, constants, *args)


def computed(function: Callable[[], Any]) -> Any:
    """``function()`` in one compilation, concrete even where data are traced, for which arbitrary
    arrays stand in."""
    program, constants = trace_program(function)
    with outside_transformations():
        return _run_once(program, stand_ins(constants))


def _plain(constants: Any) -> list[Any]:
    return [
        jax.random.key_data(c) if is_prng_key(c) and not _is_legacy(c) else c for c in constants
    ]


def _is_legacy(key: Any) -> bool:
    return not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def _subprograms(equation: Any) -> Iterator[Any]:
    for parameter in equation.params.values():
        for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(part, Jaxpr | ClosedJaxpr):
                yield part


def _hidden_constants(jaxpr: Any) -> Iterator[Any]:
    """Arrays inside of a program, which its text does not show."""
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            if isinstance(variable, Literal) and np.ndim(variable.val) > 0:
                yield variable.val
        for inner in _subprograms(equation):
            yield from getattr(inner, "consts", ())
            yield from _hidden_constants(getattr(inner, "jaxpr", inner))


def _content(constant: Any) -> Any:
    if not not_jax_tracer(constant):
        return id(constant)
    array = np.asarray(_plain([constant])[0])
    return array.shape, str(array.dtype), array.tobytes()


def are_concrete(tree: Any) -> bool:
    """Whether no leaf is a tracer."""
    return all(not_jax_tracer(leaf) for leaf in jax.tree.leaves(tree))


def outside_transformations(tree: Any = ()) -> AbstractContextManager:
    """A context in which functions of concrete data give concrete results, even where the caller
    is being transformed; for data that are traced themselves it does nothing."""
    return jax.core.eval_context() if are_concrete(tree) else nullcontext()


def same_constants(kept: tuple, new: tuple) -> bool:
    """Whether constants that were kept by :func:`keep_constants` are the new ones."""
    return len(kept) == len(new) and all(map(_same, kept, new))


def _same(kept: "_Kept", new: Any) -> bool:
    if kept.source is new:
        return True
    if isinstance(new, jax.Array) or not not_jax_tracer(new) or kept.copy is None:
        return False
    return np.array_equal(kept.copy, new, equal_nan=np.issubdtype(kept.copy.dtype, np.inexact))


class _Kept(NamedTuple):
    """A constant as it was: JAX's arrays do not change, of numpy's there is a copy."""

    source: Any
    copy: Any


def keep_constants(constants: tuple) -> tuple:
    """What :func:`same_constants` compares with."""
    return tuple(
        _Kept(c, None) if isinstance(c, jax.Array) else _Kept(None, np.array(c)) for c in constants
    )


def on_device(constants: tuple) -> tuple:
    """Copies of numpy's arrays on JAX's device, once for all later calls."""
    # where the caller is being transformed, data that are not stay what they are; JAX may have seen
    # them in another precision, whose type it keeps unless numpy strips it
    with jax.core.eval_context():
        return tuple(c if isinstance(c, jax.Array) else jnp.array(np.array(c)) for c in constants)


def seen_anew(arguments: Any) -> Any:
    """Views of numpy's arrays: JAX remembers in which precision it has seen an array before."""
    return jax.tree.map(lambda x: x.view() if type(x) is np.ndarray else x, arguments)


def stand_ins(constants: tuple) -> tuple:
    """Arbitrary arrays in place of tracers: enough to tell what a program is, which never depends
    on the values of data that are traced."""
    rng = np.random.default_rng(0)

    def of(constant):
        if not_jax_tracer(constant) or is_prng_key(constant):
            return constant
        if jnp.issubdtype(constant.dtype, jnp.inexact):
            # positive, for models that take logarithms
            return rng.uniform(0.1, 1.0, constant.shape).astype(constant.dtype)
        # masks let everything through
        return np.full(constant.shape, constant.dtype == bool, constant.dtype)

    return tuple(map(of, constants))
