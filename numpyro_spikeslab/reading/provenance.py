# SPDX-License-Identifier: Apache-2.0
"""What the results of a function can depend on, read off its program: a proof, not a sample.

Like :func:`numpyro.ops.provenance.eval_provenance`, and sharper where a result of a loop, a branch
or a function with its own derivative depends on some of the inputs only.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import jax
from jax.extend.core import Literal

Names = frozenset[str]
NONE: Names = frozenset()

STEP = "step "
"""Prefix of the name of an input on which a result depends in steps, which no derivative shows."""


def provenance(function: Callable, **inputs: Any) -> Any:
    """Names of the inputs that each result can depend on.

    A result that may depend on an input other than its derivative says, such as through rounding, a
    comparison or a function with a derivative of its own, has also the name with :data:`STEP`.

    :param inputs: arrays or their shapes, in trees.
    :return: a tree like that of the results, with sets of names.
    """
    closed, shapes = jax.make_jaxpr(lambda kw: function(**kw), return_shape=True)(inputs)
    names = {name: jax.tree.map(lambda _, n=name: n, tree) for name, tree in inputs.items()}
    sources = [frozenset([name]) for name in jax.tree.leaves(names)]
    return jax.tree.unflatten(jax.tree.structure(shapes), _follow(closed.jaxpr, sources))


def union(tree: Any) -> Names:
    """All names in a tree of results."""
    return NONE.union(*jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, frozenset)))


def _follow(jaxpr: Any, sources: list[Names]) -> list[Names]:
    known = dict(zip(jaxpr.invars, sources, strict=True))

    def read(variable):
        return NONE if isinstance(variable, Literal) else known.get(variable, NONE)

    for equation in jaxpr.eqns:
        given = [read(v) for v in equation.invars]
        if not any(given):
            continue
        rule = _RULES.get(equation.primitive.name, _follow_all)
        found = rule(equation, given)
        smooth = equation.primitive.name not in _STEPS
        for variable, names in zip(equation.outvars, found, strict=True):
            known[variable] = names if smooth and _is_inexact(variable) else names | in_steps(names)
    return [read(v) for v in jaxpr.outvars]


def in_steps(names: Names) -> Names:
    """The same names with :data:`STEP`."""
    return frozenset(name if name.startswith(STEP) else STEP + name for name in names)


def _is_inexact(variable: Any) -> bool:
    return jax.numpy.issubdtype(variable.aval.dtype, jax.numpy.inexact)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _follow_all(equation: Any, sources: list[Names]) -> list[Names]:
    return [NONE.union(*sources)] * len(equation.outvars)


def _follow_call(equation: Any, sources: list[Names]) -> list[Names]:
    params = equation.params
    inner = _open(params.get("jaxpr", params.get("call_jaxpr")))
    if inner is None or len(inner.invars) != len(sources):
        return _follow_all(equation, sources)
    return _follow(inner, sources)


def _follow_scan(equation: Any, sources: list[Names]) -> list[Names]:
    body = _open(equation.params["jaxpr"])
    # what is carried has the same shape inside of the loop; slices and stacks have an axis more
    carried = _count_alike(equation.outvars, body.outvars)
    first = _count_alike(equation.invars, body.invars) - carried
    carry = sources[first : first + carried]
    while True:
        found = _follow(body, [*sources[:first], *carry, *sources[first + carried :]])
        new = [old | more for old, more in zip(carry, found[:carried], strict=True)]
        if new == carry:
            # a loop of no turns returns what it began with
            return [*carry, *found[carried:]]
        carry = new


def _count_alike(outer: Any, inner: Any) -> int:
    pairs = zip(outer, inner, strict=True)
    return sum(x.aval.ndim == y.aval.ndim for x, y in pairs)


def _follow_while(equation: Any, sources: list[Names]) -> list[Names]:
    params = equation.params
    condition, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
    split, end = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = sources[end:]
    while True:
        steers = NONE.union(*_follow(condition, [*sources[:split], *carry]))
        found = _follow(body, [*sources[split:end], *carry])
        new = [old | more | steers for old, more in zip(carry, found, strict=True)]
        if new == carry:
            return carry
        carry = new


def _follow_cond(equation: Any, sources: list[Names]) -> list[Names]:
    branches = [_follow(_open(branch), sources[1:]) for branch in equation.params["branches"]]
    results = zip(*(_open(branch).outvars for branch in equation.params["branches"]), strict=True)
    return [
        NONE if _are_one_number(variables) else sources[0].union(*found)
        for found, variables in zip(zip(*branches, strict=True), results, strict=True)
    ]


def _follow_sort(equation: Any, sources: list[Names]) -> list[Names]:
    """What is carried along has its order from the keys, and the derivative does not say so."""
    if len(sources) == 1:
        return sources
    keys = NONE.union(*sources[: equation.params["num_keys"]])
    return [own | keys | in_steps(keys) for own in sources]


def _are_one_number(variables: tuple) -> bool:
    """Whether all branches return the same number."""
    if not all(isinstance(variable, Literal) for variable in variables):
        return False
    first, *others = (variable.val for variable in variables)
    return np.ndim(first) == 0 and all(other == first for other in others)


_OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_ROUNDING = ("ceil", "floor", "nextafter", "rem", "round", "sign")
_STEPS = frozenset((*_ROUNDING, "io_callback", "pure_callback", "stop_gradient", *_OWN_DERIVATIVE))
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", *_OWN_DERIVATIVE)
_RULES = dict.fromkeys(_CALLS, _follow_call) | {
    "scan": _follow_scan,
    "while": _follow_while,
    "cond": _follow_cond,
    "sort": _follow_sort,
}
