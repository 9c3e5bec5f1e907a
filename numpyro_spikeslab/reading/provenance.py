# SPDX-License-Identifier: Apache-2.0
"""Which inputs of a function each result can depend on, read off its program: a proof, no sample.

Sharper than :func:`numpyro.ops.provenance.eval_provenance` for loops, branches and functions with a
derivative of their own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import jax
from jax.extend.core import Literal
from jax.interpreters import ad
import jax.numpy as jnp

Names = frozenset[Any]
NONE: Names = frozenset()


class Step(NamedTuple):
    """An input on which a result depends in a way that its derivative may not show: by rounding, a
    comparison or a function with a derivative of its own."""

    name: Any


def provenance(function: Callable, **inputs: Any) -> Any:
    """Find the names of the inputs that each result can depend on.

    :param inputs: arrays or their shapes, named by their keywords. Each entry of a dictionary is
        named by ``(keyword, key)``.
    :return: a tree like the results', of sets of names. A :class:`Step` is there in addition to
        the name itself.
    """
    closed, shapes = jax.make_jaxpr(lambda kw: function(**kw), return_shape=True)(inputs)
    sources: list[Names] = []
    for path, _ in jax.tree_util.tree_leaves_with_path(inputs):
        keys = [x.key for x in path[:2] if isinstance(x, jax.tree_util.DictKey)]
        sources.append(frozenset([tuple(keys) if len(keys) > 1 else keys[0]]))
    return jax.tree.unflatten(jax.tree.structure(shapes), _follow(closed.jaxpr, sources))


def union(tree: Any) -> Names:
    """Join all names in a tree of results."""
    return NONE.union(*jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, frozenset)))


def names_of(names: Names, *kinds: str) -> frozenset[str]:
    """Return the keys of inputs that are entries of dictionaries with these keywords."""
    return frozenset(x[1] for x in names if isinstance(x, tuple) and x[0] in kinds)


def _follow(jaxpr: Any, sources: list[Names]) -> list[Names]:
    names = dict(zip(jaxpr.invars, sources, strict=True))

    def read(variable):
        return NONE if isinstance(variable, Literal) else names.get(variable, NONE)

    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        if not any(operands):
            continue
        variables = (*equation.invars, *equation.outvars)
        if refs := [v for v in variables if not isinstance(v.aval, jax.core.ShapedArray)]:
            # it changes in place: whatever meets it may be in it from here on
            result = _with_steps(NONE.union(*operands))
            names |= dict.fromkeys((*refs, *equation.outvars), result)
            continue
        rule = _RULES.get(equation.primitive.name, _follow_primitive)
        results = rule(equation, operands)
        for variable, result in zip(equation.outvars, results, strict=True):
            names[variable] = result if _is_inexact(variable) else _with_steps(result)
    return [read(v) for v in jaxpr.outvars]


def _with_steps(names: Names) -> Names:
    return names | {name if isinstance(name, Step) else Step(name) for name in names}


def _is_inexact(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _follow_primitive(equation: Any, sources: list[Names]) -> list[Names]:
    primitive, names = equation.primitive, NONE.union(*sources)
    smooth = primitive in ad.primitive_jvps and primitive.name not in _STEPS
    return [names if smooth else _with_steps(names)] * len(equation.outvars)


def _follow_conversion(equation: Any, sources: list[Names]) -> list[Names]:
    """Conversion to float16 and smaller types rounds by more than computations in float32 do."""
    new = equation.params["new_dtype"]
    smooth = not _is_inexact(equation.outvars[0]) or jnp.finfo(new).nmant >= 23
    return sources if smooth else [_with_steps(names) for names in sources]


def called(equation: Any) -> Any:
    """Return the program that an equation calls with its own operands, or `None`."""
    params = equation.params
    inner = _open(params.get("jaxpr", params.get("call_jaxpr")))
    is_call = equation.primitive.name in (*_CALLS, *_CUSTOM_CALLS) and inner is not None
    return inner if is_call and len(inner.invars) == len(equation.invars) else None


def _follow_call(equation: Any, sources: list[Names]) -> list[Names]:
    inner = called(equation)
    if inner is None:
        return [_with_steps(NONE.union(*sources))] * len(equation.outvars)
    return _follow(inner, sources)


def _follow_scan(equation: Any, sources: list[Names]) -> list[Names]:
    body = _open(equation.params["jaxpr"])
    # a carry has the same shape inside of the loop; slices and stacks have an axis more outside
    num_carry = _count_same_rank(equation.outvars, body.outvars)
    first = _count_same_rank(equation.invars, body.invars) - num_carry

    def turn(carry):
        return _follow(body, [*sources[:first], *carry, *sources[first + num_carry :]])

    carry = _repeat(lambda x: turn(x)[:num_carry], sources[first : first + num_carry])
    return [*carry, *turn(carry)[num_carry:]]


def _count_same_rank(outer: Any, inner: Any) -> int:
    return sum(x.aval.ndim == y.aval.ndim for x, y in zip(outer, inner, strict=True))


def _follow_while(equation: Any, sources: list[Names]) -> list[Names]:
    params = equation.params
    split, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def turn(carry):
        length = _follow(_open(params["cond_jaxpr"]), [*sources[:split], *carry])
        results = _follow(_open(params["body_jaxpr"]), [*sources[split:end], *carry])
        return [names.union(*length) for names in results]

    return _repeat(turn, sources[end:])


def _repeat(turn: Callable[[list[Names]], list[Names]], carry: list[Names]) -> list[Names]:
    """Add up the names of any number of turns of a loop, none included."""
    while (new := [x | y for x, y in zip(carry, turn(carry), strict=True)]) != carry:
        carry = new
    return carry


def _follow_cond(equation: Any, sources: list[Names]) -> list[Names]:
    branches = [_open(branch) for branch in equation.params["branches"]]
    results = zip(*(_follow(branch, sources[1:]) for branch in branches), strict=True)
    outputs = zip(*(branch.outvars for branch in branches), strict=True)

    def are_one_number(variables):
        values = [x.val if isinstance(x, Literal) else np.nan for x in variables]
        return np.ndim(values[0]) == 0 and all(x == values[0] for x in values)

    return [
        NONE if are_one_number(variables) else sources[0].union(*names)
        for names, variables in zip(results, outputs, strict=True)
    ]


def _follow_sort(equation: Any, sources: list[Names]) -> list[Names]:
    """The order of the other operands comes from the keys; their derivative does not say so."""
    if len(sources) == 1:
        return sources
    keys = NONE.union(*sources[: equation.params["num_keys"]])
    return [operand | _with_steps(keys) for operand in sources]


_BITS = ("bitcast_convert_type", "nextafter", "reduce_precision")
_ROUNDING = ("ceil", "floor", "rem", "round", "sign")
_OPAQUE = ("ffi_call", "io_callback", "pure_callback", "stop_gradient")
_STEPS = frozenset([*_BITS, *_ROUNDING, *_OPAQUE])
"""Primitives whose derivative, as JAX defines it, does not tell how they depend on their inputs.
Those without a derivative count as such, too."""

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "shard_map")
_CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_RULES: dict[str, Callable[[Any, list[Names]], list[Names]]] = {
    **dict.fromkeys(_CALLS, _follow_call),
    **dict.fromkeys(
        _CUSTOM_CALLS,
        lambda equation, sources: [_with_steps(x) for x in _follow_call(equation, sources)],
    ),
    "convert_element_type": _follow_conversion,
    "scan": _follow_scan,
    "while": _follow_while,
    "cond": _follow_cond,
    "sort": _follow_sort,
}
