# SPDX-License-Identifier: Apache-2.0
"""What only running a model tells: one compiled function of verdicts and counts, not of data.

It runs at generic values of the sites. A verdict about coefficients that are constants, which
:mod:`~numpyro_spikeslab.reading.proof` has shown, holds at all values; one about data, such as that
they are finite, holds for these data.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.sparse_sums import Entries, at_entries
from numpyro_spikeslab.reading.coefficient_rows import affine_map, over_covariates
from numpyro_spikeslab.reading.form import ENTRIES, FUNCTIONS, Form, Source
from numpyro_spikeslab.reading.model_run import part_of
from numpyro_spikeslab.reading.program import RUN_ONCE, Program
from numpyro_spikeslab.reading.view import (
    Problem,
    candidates,
    linear_map,
    no_weights,
    over_features,
)


class Verdict(NamedTuple):
    """
    - **values** - the generic values of the other sites.
    - **any_counted** - whether any observation counts.
    - **bad_values**, **bad_offsets** - how many of them are not finite, and the first that is not.
    - **finite_design** - whether the design is, where observations count.
    - **proper** - whether inclusion probabilities lie between 0 and 1 and scales are positive.
    - **slab_locs** - largest absolute prior mean of the slabs of each pair.
    - **matches** - for each pair and source, whether that constant is the pair's design.
    - **indices** - for each of ``form.roles``, which entry of its site each weight or task
      takes.
    - **plays** - for each role, whether they are that entry.
    - **layouts** - for tasks as columns and as rows, whether features are known and the same for
      all tasks, or are the latent functions.
    - **of_tasks** - whether coefficients that each task may have of its own are such, in both
      layouts.
    - **alike** - whether all tasks count the same observations equally often, in both layouts.
    - **seen** - which tasks and which points have observations, in both layouts.
    - **noise_of_tasks** - whether the noise of each entry is that of its task, and is all of such
      sites.
    - **entries** - where the observations are, if they may be entries of a table.
    """

    values: dict[str, Any]
    any_counted: Any
    bad_values: tuple[Any, Any]
    bad_offsets: tuple[Any, Any]
    finite_design: Any
    proper: Any
    slab_locs: Any
    matches: tuple[dict[Source, Any], ...]
    indices: tuple[Any, ...]
    plays: tuple[Any, ...]
    layouts: tuple[Any, ...]
    of_tasks: tuple[Any, ...]
    alike: tuple[Any, ...]
    seen: tuple[tuple[Any, Any], ...]
    noise_of_tasks: Any
    entries: "Places | None"


class Places(NamedTuple):
    """
    - **where** - row and column of each observation.
    - **indices** - for each of ``form.roles``, if it is noise, which entry of its site each
      column takes.
    """

    where: Entries
    indices: tuple[Any, ...]


class Directions(NamedTuple):
    """Random numbers along which linear maps are compared.

    Arguments of the probe, for XLA would take minutes to fold large constants.

    - **weights** - by the names of their pairs, flat.
    - **functions** - (M, N), `None` without latent functions.
    - **coefficients** - by the names of those that each task may have of its own, flat.
    """

    weights: dict[str, Any]
    functions: Any
    coefficients: dict[str, Any]


def directions(forms: tuple[Form, ...], shapes: dict[str, Any]) -> Directions:
    """By numpy's generator: JAX's takes longer to compile than all else.

    :param shapes: of the latent sites.
    """
    form, shape = forms[0], (forms[-1].num_features, forms[-1].num_obs)
    rng, dtype = np.random.default_rng(1), jnp.result_type(float)
    weights = {pair.name: rng.standard_normal(pair.size, dtype) for pair in form.pairs}
    phi = rng.standard_normal(shape, dtype) if forms[-1].functions else None
    own = {each.site for form in forms for each in form.of_tasks}
    sizes = {name: int(np.prod(shapes[name].shape)) for name in sorted(own)}
    return Directions(weights, phi, {k: rng.standard_normal(n, dtype) for k, n in sizes.items()})


def find_verdict(
    forms: tuple[Form, ...],
    generic: Program,
    program: Program,
    constants: tuple,
    more: tuple,
    along: Directions,
) -> Verdict:
    """Run the model at generic values.

    :param forms: the form as a plain design, then those with tasks as columns and as rows.
    :param generic: computes the values.
    :param more: its constants.
    :param along: from :func:`directions`.
    """
    form = forms[0]
    values = generic(more)
    problem = Problem(form, program, constants)
    others = [replace(problem, form=other) for other in forms[1:]]
    run = problem.run(values)
    seen = run.observed[form.likelihood]
    shape = jnp.shape(seen.value)
    counted = jnp.broadcast_to(seen.count > 0, shape)
    finite_design, matches = _judge_design(problem, values, counted, along.weights)
    # the trees that JAX hands out sort their names
    pairs = [run.pairs[pair.name] for pair in form.pairs]
    scale = jnp.concatenate([jnp.ravel(x) for x in (seen.scale, *(p.scale for p in pairs))])
    log_odds = jnp.concatenate([jnp.ravel(p.log_odds) for p in pairs])
    indices, plays = _play_all(problem, values)
    entries, noise_of_tasks = None, jnp.array(False)
    if forms[-1].kind == ENTRIES:
        entries, noise_of_tasks = _find_entries(others[-1], values, indices, plays)
    return Verdict(
        values={name: values[name] for name in form.others},
        any_counted=jnp.any(counted),
        bad_values=_bad(counted, seen.value),
        bad_offsets=_bad(counted, jnp.broadcast_to(seen.loc, shape)),
        finite_design=finite_design,
        proper=jnp.all((scale > 0) & (scale < jnp.inf)) & jnp.all(jnp.isfinite(log_odds)),
        slab_locs=jnp.stack([jnp.max(jnp.abs(p.loc)) for p in pairs]),
        matches=matches,
        indices=indices,
        plays=plays,
        layouts=tuple(_has_layout(other, values, along, entries) for other in others),
        of_tasks=tuple(_are_of_tasks(other, values, along) for other in others),
        alike=tuple(_are_alike(other, seen) for other in forms[1:]),
        seen=tuple(_seen(other, counted, entries) for other in forms[1:]),
        noise_of_tasks=noise_of_tasks,
        entries=entries,
    )


probe = jax.jit(find_verdict, static_argnums=(0, 1, 2), compiler_options=RUN_ONCE)


def _bad(counted: Any, x: Any) -> tuple[Any, Any]:
    bad = jnp.ravel(counted & ~jnp.isfinite(x))
    return jnp.sum(bad), jnp.argmax(bad)


def _seen(form: Form, counted: Bool[Array, "..."], entries: Places | None) -> tuple[Any, Any]:
    if form.kind == ENTRIES and entries is not None:
        rows, columns = entries.where
        sizes = (form.num_tasks, columns), (form.num_obs, rows)
        tasks, points = (jnp.zeros(size, bool).at[own].max(counted) for size, own in sizes)
        return tasks, points
    table = form.tasks_last(counted)
    return jnp.any(table, axis=0), jnp.any(table, axis=1)


def _judge_design(problem, values, counted, along) -> tuple[Any, tuple]:
    """Whether the design is finite, and which constants are its parts."""
    form = problem.form
    tangent, zero = linear_map(problem, values), no_weights(form)
    finite = jnp.all(jnp.isfinite(jnp.where(jnp.ravel(counted), tangent(along), 0)))
    matches = []
    for pair in form.pairs:
        found = candidates(tangent, pair.size, counted.size) if form.constant_rows else {}

        def alone(flat, name=pair.name):
            return tangent(zero | {name: flat})

        matches.append({k: _is_design(alone, along[pair.name], x) for k, x in found.items()})
    return finite, tuple(matches)


def _is_design(tangent: Any, along: Any, rows: Any) -> Any:
    """Whether rows are the matrix of a map, every row judged at its own size."""
    size = jnp.max(jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0), axis=1)
    direction = along / jnp.where(size > 0, size, 1)
    # a sum, since a product would want the absolute values of a whole design
    sizes = jnp.sum(jnp.abs(direction[:, None] * rows), axis=0)
    return agree(direction @ rows, tangent(direction), sizes)


def agree(x: Any, y: Any, size: Any) -> Any:
    """Whether two arrays agree to rounding, NaN with NaN.

    :param size: of what each entry is a sum of. Relative to the largest entry of all, one that is
        a code for a missing value would hide what the others differ by.
    """
    tolerance = 100.0 * jnp.finfo(x.dtype).eps * jnp.sqrt(len(x) + 1.0)
    close = jnp.isfinite(size) & (jnp.abs(x - y) <= tolerance * size)
    return jnp.all(close | (jnp.isnan(x) & jnp.isnan(y)))


# Roles


def _play_all(problem, values) -> tuple[tuple, tuple]:
    played = [_play(role, problem, values) for role in problem.form.roles]
    return tuple(index for index, _ in played), tuple(plays for _, plays in played)


def _play(role, problem, values) -> tuple[Any, Any]:
    """Give every entry of the role's site a value of its own and see where it turns up, twice.

    Values are about evenly spaced, in random order, so even a hundred thousand differ in single
    precision. The index of weights that the role has nothing to do with lies beyond the entries.
    """
    shape, dtype = jnp.shape(values[role.site]), jnp.result_type(values[role.site])

    form = problem.form
    of = partial(part_of, part=role.part, likelihood=form.likelihood, pairs=form.pairs)

    # params may start at zero, and what is added to an entry is not seen there
    others = {x.site: jnp.full_like(values[x.site], 0.37) for x in form.roles if x != role}

    def seen(code):
        found = problem.run(values | others | {role.site: code.reshape(shape)}, of=of)
        return jnp.concatenate([jnp.ravel(x) for x in found])

    size = max(jnp.size(values[role.site]), 1)
    rngs = [np.random.default_rng(k) for k in (11, 12)]
    orders = [rng.permutation(size) for rng in rngs]
    # not exactly even, or else means of entries would be entries
    offsets = 0.25, 0.75
    codes = [
        jnp.asarray(0.3 + 0.4 * (order + offset + rng.uniform(-0.1, 0.1, size)) / size, dtype)
        for rng, order, offset in zip(rngs, orders, offsets, strict=True)
    ]
    first, second = map(seen, codes)
    touched = first != second
    place = jnp.round((first - 0.3) / 0.4 * size - offsets[0])
    index = jnp.asarray(np.argsort(orders[0]))[jnp.clip(place, 0, size - 1).astype(int)]
    # all but exactly, or else an entry with a small number added would be the entry
    plays = [
        jnp.all(~touched | (abs(found - code[index]) <= 16 * jnp.finfo(dtype).eps * code[index]))
        for found, code in zip((first, second), codes, strict=True)
    ]
    return jnp.where(touched, index, size), plays[0] & plays[1]


# Tasks


def _location(problem, values, weights) -> Any:
    (pair,) = problem.form.pairs
    return problem.location_of_tasks(values, {pair.name: weights.reshape(pair.shape)})


def _slope(problem, values, weights, phi=None) -> Any:
    """What weights add to the location at given functions."""
    at = values if phi is None else values | {problem.form.functions: phi}
    of = partial(_location, problem, at)
    return jax.jvp(of, (jnp.zeros_like(weights),), (weights,))[1]


def _find_entries(problem, values, indices, plays) -> tuple[Places, Any]:
    """Functions and weights that are the numbers of their rows and columns tell where they meet."""
    form = problem.form
    (Q, M), N = form.shape, form.num_obs
    W, phi = jnp.zeros((Q, M)), jnp.zeros((M, N))
    rows, columns = (
        jnp.nan_to_num(_slope(problem, values, weights, functions)[:, 0])
        for weights, functions in (
            (W.at[:, 0].set(1), phi.at[0].set(jnp.arange(N))),
            (W.at[:, 0].set(jnp.arange(Q)), phi.at[0].set(1)),
        )
    )
    where = Entries(
        *(
            jnp.clip(jnp.round(x), 0, size - 1).astype(jnp.int32)
            for x, size in ((rows, N), (columns, Q))
        )
    )
    touched, agrees, taken = jnp.zeros(where.columns.shape, bool), jnp.array(True), []
    for role, index, played in zip(form.roles, indices, plays, strict=True):
        size = jnp.size(values[role.site])
        of_column = jnp.full(Q, size if size > 1 else 0)
        if role.part == "noise":
            index = jnp.broadcast_to(index, where.columns.shape)
            # a column without entries takes its own number if all others do; else nothing says
            in_order = (size == Q) & jnp.all(index == where.columns)
            known = of_column.at[where.columns].set(index)
            of_column = jnp.where(in_order, jnp.arange(Q), known)
            agrees &= played & jnp.all(of_column[where.columns] == index)
            touched |= index < size
        taken.append(of_column)
    return Places(where, tuple(taken)), agrees & jnp.all(touched)


def _are_entries(problem, values, along, where: Entries) -> Any:
    """Whether the location is ``offset + sum_m w_qm phi_mn`` at the entries that were found."""
    (pair,) = problem.form.pairs
    # under a transformation of the caller directions are still numpy's
    W, phi = jnp.asarray(along.weights[pair.name], float), jnp.asarray(along.functions, float)
    W = W.reshape(problem.form.shape)
    found = _slope(problem, values, W, phi)[:, 0]
    nothing = jnp.zeros_like(W), jnp.zeros_like(phi)
    expected, _ = at_entries(where, (W, nothing[0]), (phi, nothing[1]))
    size, _ = at_entries(where, (abs(W), nothing[0]), (abs(phi), nothing[1]))
    # entry by entry, each to its own rounding
    close = jnp.abs(found - expected) <= 1e3 * jnp.finfo(found.dtype).eps * size
    return jnp.all(close) & _nothing_alone(problem, values, W, phi)


def _nothing_alone(problem, values, W, phi) -> Any:
    """Whether neither weights nor functions add to the location without the others."""
    nothing = jnp.zeros_like(W)

    def location(x):
        return _location(problem, values | {problem.form.functions: x}, nothing)

    alone = jax.jvp(location, (phi,), (phi,))[1]
    return _both(
        jnp.all(alone == 0),
        lambda: jnp.all(_slope(problem, values, W, jnp.zeros_like(phi)) == 0),
    )


def _both(one: Bool[Array, ""], other: Callable[[], Any]) -> Bool[Array, ""]:
    """Whether both hold. The other is asked later, and with the memory that the first took, for
    each needs several arrays of the size of the data."""
    return jax.lax.cond(one, other, lambda: jnp.array(False))


def _has_layout(problem, values, along, entries) -> Any:
    """Whether the location is ``offset + W phi`` in a layout, with the form's kind of features."""
    form = problem.form
    (pair,) = form.pairs
    W = along.weights[pair.name].reshape(form.shape)
    if form.kind == ENTRIES:
        return _are_entries(problem, values, along, entries.where)
    if form.kind == FUNCTIONS:
        phi = along.functions
        # the coefficients are constants, so a few random directions tell all of them
        return _both(
            _nothing_alone(problem, values, W, phi),
            lambda: agree(_slope(problem, values, W, phi), (W @ phi).T, (abs(W) @ abs(phi)).T),
        )
    features, size, same = over_features(problem, values, _judge_feature)
    scaled = W / jnp.where(size > 0, size, 1)
    tangent = _slope(problem, values, scaled)
    return jnp.all(same) & agree(tangent, (W @ features).T, (abs(W) @ abs(features)).T)


def _are_of_tasks(problem, values, along) -> Any:
    """Whether coefficients multiply covariates that are the same for all tasks."""
    form = problem.form
    if not form.of_tasks:
        return jnp.array(False)
    tangent, shapes = affine_map(problem, values)
    found = [jnp.array(True)]
    expected, sizes, direction = jnp.zeros(form.table), jnp.zeros(form.table), {}
    for own in form.of_tasks:
        rows, size, same = over_covariates(form, tangent, own, shapes, _judge_feature)
        t = own.take(jnp.reshape(jnp.asarray(along.coefficients[own.site]), shapes[own.site]))
        direction[own.site] = own.put(t / jnp.where(size > 0, size, 1), shapes[own.site])
        expected += (t @ rows).T
        sizes += (abs(t) @ abs(rows)).T
        found.append(jnp.all(same))
    return jnp.all(jnp.stack(found)) & agree(tangent(direction), expected, sizes)


def _judge_feature(rows: Float[Array, "N Q"]) -> tuple[Any, Any, Any]:
    """A feature in units of its size, its size, and whether it is the same for all tasks."""
    size = jnp.max(jnp.abs(rows), initial=0)
    scaled = rows / jnp.where(size > 0, size, 1)
    largest = jnp.max(jnp.abs(scaled), axis=1, keepdims=True)
    return scaled[:, 0], size, agree(scaled, scaled[:, :1], largest)


def _are_alike(form: Form, seen: Any) -> Any:
    if form.kind == ENTRIES:
        return jnp.array(False)
    count = jnp.broadcast_to(seen.count, jnp.shape(seen.value))
    count = form.tasks_last(count)
    return jnp.all(count == count[:, :1])
