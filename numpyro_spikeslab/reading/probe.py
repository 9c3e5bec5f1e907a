# SPDX-License-Identifier: Apache-2.0
"""Numerical tests of whether a model has an assumed form, in one compiled function.

One evaluation at generic values of the sites is enough for coefficients that are proved constant.
Checks of data hold for these data only.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.sparse_sums import Entries, at_entries
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.linear import Linear
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.program import RUN_ONCE, Program
from numpyro_spikeslab.reading.roles import CoefficientRole, NoiseRole, Role


class Verdict(NamedTuple):
    """Verdicts on a form, as numbers on the host.

    - **num_counted** - how many observations count.
    - **bad_values**, **bad_offsets**, **bad_design** - how many observations, locations or rows of
      the design are not finite, and the position of the first.
    - **bad_support** - likewise, of observations outside of the support of their distribution.
    - **single** - whether each observation counts once or not at all.
    - **proper** - whether inclusion probabilities lie between 0 and 1 and scales are positive.
    - **slab_locs** - largest absolute prior mean of the slabs of each pair.
    - **plays** - for each role, whether its part of the model copies entries of its site.
    - **fits** - whether the predictor has the layout of the form.
    - **of_tasks** - whether the candidate coefficients of tasks belong to one task each.
    - **same_counts** - whether observation counts are equal across tasks.
    - **noise_of_tasks** - whether each entry of a table takes the noise of its task from a site.
    """

    num_counted: Any
    bad_values: tuple[Any, Any]
    bad_offsets: tuple[Any, Any]
    bad_design: tuple[Any, Any]
    bad_support: tuple[Any, Any]
    single: Any
    proper: Any
    slab_locs: Any
    plays: tuple[Any, ...]
    fits: Any
    of_tasks: Any
    same_counts: Any
    noise_of_tasks: Any


def directions(form: Form, shapes: dict[str, Any]) -> dict[str, Any]:
    """Draw random numbers along which linear maps are compared, by the names of weights, of
    functions and of coefficients of tasks, given shapes of the latent sites."""
    # arguments of the probe, for XLA would take minutes to fold large constants, and numpy's, for
    # JAX's generator would take most of the time to compile
    rng, dtype = np.random.default_rng(1), jnp.result_type(float)
    sizes: dict[str, Any] = {pair.name: pair.shape for pair in form.pairs}
    if form.functions is not None:
        sizes[form.functions] = form.num_features, form.num_obs
    sizes |= {each.site: shapes[each.site].shape for each in form.of_tasks}
    return {name: rng.standard_normal(size, dtype) for name, size in sizes.items()}


def find_verdict(
    problem: Problem, generic: Program, generic_data: tuple, along: dict[str, Any]
) -> tuple[Verdict, dict[str, Any], list[Any], Entries | None]:
    """Judge the form of a problem at generic values.

    :param along: from :func:`directions`.
    :return: the verdict, the values of the other sites, which entry of the site of each role each
        weight or task takes, and row and column of each observation in a table of entries.
    """
    form, values = problem.form, generic(generic_data)
    run = problem.run(values)
    parts = problem.observations(run)
    shape = jnp.shape(parts.value)
    counted = jnp.broadcast_to(parts.count > 0, shape)
    # masks alone are known to be such, whatever the data
    is_once = (parts.count == 0) | (parts.count == 1)
    single = jnp.array(True) if parts.count.dtype == bool else jnp.all(is_once)
    weights = Linear.of(problem, values)
    change = problem.observed(weights.tangent({name: along[name] for name in weights.zero}))
    # JAX sorts the keys of dicts, so names are looked up in the order of the form
    pairs = [run.pairs[pair.name] for pair in form.pairs]
    scale = jnp.concatenate([jnp.ravel(x) for x in (parts.scale, *(p.scale for p in pairs))])
    log_odds = jnp.concatenate([jnp.ravel(p.log_odds) for p in pairs])
    played = [_play(role, problem, values) for role in form.roles]
    indices, plays = [index for index, _ in played], tuple(plays for _, plays in played)
    where, noise_of_tasks, same_counts = None, jnp.array(False), jnp.array(False)
    if form.sparse:
        where = parts.entries
        indices, noise_of_tasks = _noise_by_column(form, where, values, indices, plays)
    else:
        count = form.tasks_last(jnp.broadcast_to(parts.count, shape))
        same_counts = jnp.all(count == count[:, :1])

    of_tasks = jnp.array(False)
    if form.of_tasks:
        of_tasks = _are_shared(Linear.of(problem, values, form.of_tasks), along)

    def bad(is_good):
        is_bad = jnp.ravel(counted & ~is_good)
        return jnp.sum(is_bad), jnp.argmax(is_bad)

    verdict = Verdict(
        num_counted=jnp.sum(counted),
        bad_values=bad(jnp.isfinite(parts.value)),
        bad_offsets=bad(jnp.isfinite(jnp.broadcast_to(parts.predictor, shape))),
        bad_design=bad(jnp.isfinite(change)),
        bad_support=bad(form.likelihood.allows(problem, values, parts)),
        single=single,
        proper=jnp.all((scale > 0) & (scale < jnp.inf)) & jnp.all(jnp.isfinite(log_odds)),
        slab_locs=jnp.stack([jnp.max(jnp.abs(p.loc)) for p in pairs]),
        plays=plays,
        fits=_fits(problem, values, along, where),
        of_tasks=of_tasks,
        same_counts=same_counts,
        noise_of_tasks=noise_of_tasks,
    )
    return verdict, {name: values[name] for name in form.others}, indices, where


probe = jax.jit(find_verdict, static_argnums=1, compiler_options=RUN_ONCE)


def agree(x: Any, y: Any, size: Any) -> Any:
    """Whether arrays agree to rounding, NaN with NaN, given the absolute terms of each entry."""
    # with one tolerance for all, a code for a missing value would hide differences of others; and
    # of terms with random signs, errors cancel as the terms do, however many there are
    close = jnp.isfinite(size) & (jnp.abs(x - y) <= 32 * jnp.finfo(x.dtype).eps * size)
    return jnp.all(close | (jnp.isnan(x) & jnp.isnan(y)))


def _play(role: Role, problem: Problem, values: dict[str, Any]) -> tuple[Any, Any]:
    """Find which entry of a role's site each weight or task copies, and whether it is a copy.
    Weights that do not use the site get its size as index."""
    # the role's part is affine in the site: its derivative along the numbers of the entries is the
    # number of the copied entry, and a random direction confirms the copy
    site = values[role.site]
    shape, dtype, size = jnp.shape(site), jnp.result_type(site), max(jnp.size(site), 1)
    # not zero, so that a sum with another role's site shows
    others = {x.site: jnp.full_like(values[x.site], 0.37) for x in problem.form.roles if x != role}

    def arrays(flat):
        at = values | others | {role.site: flat.reshape(shape)}
        parts = problem.run(at, of=lambda run: problem.part(run, role.part))
        if isinstance(role, CoefficientRole):
            full = (problem.inputs["values"][k].shape for k in problem.form.coefficients)
            parts = map(jnp.broadcast_to, parts, full)
        # a candidate may have no coefficients
        return jnp.concatenate([jnp.zeros(0, dtype), *map(jnp.ravel, parts)])

    offset, tangent = jax.linearize(arrays, jnp.zeros(size, dtype))
    random = jnp.asarray(np.random.default_rng(11).uniform(1.0, 2.0, size), dtype)
    number = jnp.round(tangent(jnp.arange(1, size + 1, dtype=dtype)))
    index = jnp.clip(number, 1, size).astype(int) - 1
    along, eps = tangent(random), 16 * jnp.finfo(dtype).eps
    # tight, so that a multiple of 1.001 is no entry
    takes = (offset == 0) & (jnp.abs(along - random[index]) <= eps * random[index])
    touched = along != 0
    return jnp.where(touched, index, size), jnp.all(~touched | takes)


def _noise_by_column(
    form: Form, where: Any, values: dict[str, Any], indices: list[Any], plays: tuple[Any, ...]
) -> tuple[list[Any], Any]:
    """Return the indices of noise by columns of a table, and whether these explain all noise."""
    columns, Q = where.columns, form.num_tasks
    touched, agrees, result = jnp.zeros(columns.shape, bool), jnp.array(True), []
    for role, index, played in zip(form.roles, indices, plays, strict=True):
        if isinstance(role, NoiseRole):
            size = jnp.size(values[role.site])
            by_entry = jnp.broadcast_to(index, columns.shape)
            # without entries it gets its own number if all others are in order; else it is unknown
            in_order = (size == Q) & jnp.all(by_entry == columns)
            first = jnp.full(Q, size if size > 1 else 0).at[columns].set(by_entry)
            index = jnp.where(in_order, jnp.arange(Q), first)
            agrees &= played & jnp.all(index[columns] == by_entry)
            touched |= by_entry < size
        result.append(index)
    return result, agrees & jnp.all(touched)


def _fits(problem: Problem, values: dict[str, Any], along: dict[str, Any], where: Any) -> Any:
    """Whether the predictor is ``offset + W phi`` in the form's layout, with its features."""
    form = problem.form
    if form.is_design:
        return jnp.array(True)
    if form.shares_features:
        return _are_shared(Linear.of(problem, values), along)
    (pair,), name = form.pairs, str(form.functions)
    # inside a transformation of the caller, the directions are numpy arrays
    W, phi = (jnp.asarray(along[k], float) for k in (pair.name, name))
    W = W.reshape(form.shape)

    def slope(phi):
        weights = {pair.name: W.reshape(pair.shape)}
        return Linear.of(problem, values | {name: phi}).tangent(weights)

    # the coefficients are constants, so random directions determine them
    def is_mixture():
        if form.sparse:
            return _is_mixture_at(where, slope(phi)[:, 0], W, phi)
        return agree(slope(phi), (W @ phi).T, (abs(W) @ abs(phi)).T)

    def alone(phi):
        return problem.predictor_of_tasks(values | {name: phi})

    # in turn, so that they do not need memory at once
    verdict = jnp.all(jax.jvp(alone, (phi,), (phi,))[1] == 0)
    for test in (lambda: jnp.all(slope(jnp.zeros_like(phi)) == 0), is_mixture):
        verdict = jax.lax.cond(verdict, test, lambda: jnp.array(False))
    return verdict


def _is_mixture_at(where: Entries, slope: Any, W: Any, phi: Any) -> Any:
    """Whether a slope is ``sum_m w_qm phi_mn`` at the entries of the mark."""
    inside = jnp.all((where.rows >= 0) & (where.rows < phi.shape[1]))
    inside &= jnp.all((where.columns >= 0) & (where.columns < len(W)))
    expected = at_entries(where, jnp.dot, W, phi)
    size = at_entries(where, jnp.dot, abs(W), abs(phi))
    return inside & agree(slope, expected, size)


def _are_shared(linear: Linear, along: dict[str, Any]) -> Any:
    """Whether the entries of sites multiply features or covariates that all tasks share."""
    form, verdicts, direction = linear.form, [], {}
    expected, sizes = jnp.zeros(form.table), jnp.zeros(form.table)
    for each, judged in zip(linear.sites, linear.over_shared(_judge_feature).values(), strict=True):
        rows, size, same = judged
        t = each.take(jnp.asarray(along[each.site], float))
        shape = linear.zero[each.site].shape
        direction[each.site] = each.put(t / jnp.where(size > 0, size, 1), shape)
        expected += (t @ rows).T
        sizes += (abs(t) @ abs(rows)).T
        verdicts.append(jnp.all(same))
    return jnp.all(jnp.stack(verdicts)) & agree(linear.tangent(direction), expected, sizes)


def _judge_feature(rows: Float[Array, "N Q"]) -> tuple[Any, Any, Any]:
    """Return a feature in units of its size, its size, and whether all tasks share it."""
    size = jnp.max(jnp.abs(rows), initial=0)
    scaled = rows / jnp.where(size > 0, size, 1)
    largest = jnp.max(jnp.abs(scaled), axis=1, keepdims=True)
    return scaled[:, 0], size, agree(scaled, scaled[:, :1], largest)
