# SPDX-License-Identifier: Apache-2.0
"""The forms that a model may have by its proof, and which of them a verdict confirms."""

from dataclasses import replace
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.reading.checks import check_numbers
from numpyro_spikeslab.reading.form import (
    COLUMNS,
    ENTRIES,
    FUNCTIONS,
    SHARED,
    Form,
    OfTasks,
    task_axis,
)
from numpyro_spikeslab.reading.probe import Directions, Verdict, find_verdict
from numpyro_spikeslab.reading.program import Program, are_concrete, stand_ins
from numpyro_spikeslab.reading.proof import Proof
from numpyro_spikeslab.reading.provenance import Step, provenance, union
from numpyro_spikeslab.reading.subject import Subject
from numpyro_spikeslab.roles import NoiseRole


def possible_forms(subject: Subject, proof: Proof, joint: bool) -> tuple[Form, ...]:
    """What the model may be, to be confirmed by the probe: a plain design, or tasks."""
    site = subject.trace[proof.likelihood]
    shape = jnp.shape(site["value"])
    others = frozenset(subject.others)
    # as the program has it, for along an axis of size 1 the scale cannot change
    scale_shape = subject.program.shapes.observed[proof.likelihood].scale.shape
    varying = int(np.prod(scale_shape)) > 1
    weighs = proof.count | (proof.scale if varying else frozenset())
    form = Form(
        pairs=subject.pairs,
        likelihood=proof.likelihood,
        others=subject.others,
        kind=COLUMNS,
        functions=None,
        kernels=(),
        num_tasks=1,
        num_features=sum(pair.size for pair in subject.pairs),
        num_obs=int(np.prod(shape)),
        tasks_first=False,
        roles=proof.roles,
        coefficients=proof.coefficients.few,
        of_tasks=(),
        links=proof.coefficients.links,
        complete=True,
        varying_noise=varying,
        constant_rows=not proof.design & others,
        constant_design=not (proof.design | weighs) & others,
        sources=(None,) * len(subject.pairs),
    )
    return form, *_task_forms(subject, proof, form, shape, scale_shape, joint)


def _task_forms(subject, proof, form, shape, scale_shape, joint) -> tuple[Form, ...]:
    """The forms of Q tasks, with tasks as columns and as rows of the observations."""
    if joint or form.groups or len(form.pairs) != 1 or len(form.pairs[0].shape) not in (1, 2):
        return ()
    (pair,) = form.pairs
    M = pair.shape[-1]
    Q = pair.size // M
    if proof.mixed is not None:
        N = subject.shapes[proof.mixed].shape[1]
        kind: dict[str, Any] = dict(kind=FUNCTIONS, functions=proof.mixed, kernels=proof.kernels)
    elif Q > 1 and form.constant_rows and len(shape) == 2:
        N, kind = form.num_obs // Q, dict(kind=SHARED)
        # beyond this the Gram matrix costs more than the design of all tasks
        if form.num_obs != Q * N or M > Q * Q * N:
            return ()
    else:
        return ()
    own = _of_tasks(subject, proof)
    if own:
        kind |= dict(of_tasks=own, coefficients=tuple(each.site for each in own), links=())
    others = tuple(name for name in form.others if name != proof.mixed)
    form = replace(form, num_tasks=Q, num_features=M, num_obs=N, others=others, **kind)
    forms = []
    for tasks_first, layout in ((False, (N, Q)), (True, (Q, N))):
        fits = shape == layout or (Q == 1 and shape == (N,) and not tasks_first)
        if fits:
            new = replace(form, tasks_first=tasks_first)
            along, across = new.tasks_last(jnp.ones(scale_shape)).shape
            known = not proof.count & frozenset(form.others)
            complete = known and (along == 1 or across == 1)
            forms.append(replace(new, varying_noise=along > 1, complete=complete))
    if proof.mixed is not None and len(shape) == 1:
        check_numbers(subject, form, (N, Q))
        # the design of coefficients would be dense
        none: dict[str, Any] = dict(of_tasks=(), links=(), coefficients=())
        forms.append(replace(form, kind=ENTRIES, complete=False, **none))
    return tuple(forms)


def _of_tasks(subject: Subject, proof: Proof) -> tuple[OfTasks, ...]:
    """Coefficients of which each task may have its own, if that is so of all that move the
    location. Where others go with them, all are left to a dense design if it is not too large."""
    beside = proof.coefficients
    moving = [name for name in beside.names if name in proof.location]
    if not beside.constant or (len(moving) < len(beside.names) and beside.few == beside.names):
        return ()
    axes = [_axis(subject, proof, name) for name in moving]
    own = (OfTasks(name, axis) for name, axis in zip(moving, axes, strict=True) if axis is not None)
    return () if None in axes else tuple(own)


def _axis(subject: Subject, proof: Proof, name: str) -> int | None:
    """The axis of a site that may be the tasks: that of their plate, or else the only one as
    long."""
    (pair,), site = subject.pairs, subject.trace[name]
    axis = task_axis(site, subject.trace[pair.slab], [subject.trace[proof.likelihood]])
    shape = jnp.shape(site["value"])
    alike = [k for k in range(-len(shape), 0) if shape[k] == pair.shape[0] and len(pair.shape) == 2]
    return alike[0] if axis is None and len(alike) == 1 else axis


def settle(forms: tuple[Form, ...], found: Verdict) -> Form:
    """The form that the probe confirms."""
    roles = zip(forms[0].roles, found.plays, strict=True)
    played = [role for role, plays in roles if plays]

    def with_roles(form):
        if form.kind == ENTRIES and found.noise_of_tasks:
            form = replace(form, varying_noise=False)
        # noise that changes along tasks is no number of a task
        varying = NoiseRole if form.varying_noise else ()
        return replace(form, roles=tuple(r for r in played if not isinstance(r, varying)))

    every = zip(forms[1:], found.layouts, found.alike, found.of_tasks, strict=True)
    for form, fits, alike, own in every:
        if fits:
            if form.of_tasks and not own:
                first = forms[0]
                form = replace(
                    form, of_tasks=(), coefficients=first.coefficients, links=first.links
                )
            return replace(with_roles(form), complete=form.complete and bool(alike))
    sources = tuple(
        next((source for source, match in matches.items() if match), None)
        for matches in found.matches
    )
    return replace(with_roles(forms[0]), sources=sources)


def only_known(
    found: Verdict,
    forms: tuple[Form, ...],
    generic: Program,
    subject: Subject,
    more: tuple,
    along: Directions,
) -> Verdict:
    """What was found with stand-ins for traced data, as far as it cannot depend on such data.

    :param more: constants of ``generic``.
    :param along: those of the probe.
    """
    given = (*subject.constants, *more)
    traced = [k for k, constant in enumerate(given) if not are_concrete(constant)]

    def verdict(data):
        every = list(given)
        for k, x in zip(traced, data, strict=True):
            every[k] = x
        size = len(subject.constants)
        return find_verdict(
            forms, generic, subject.program, tuple(every[:size]), tuple(every[size:]), along
        )

    unknown = provenance(verdict, data=stand_ins(tuple(given[k] for k in traced)))

    def known(what, *sources):
        return jax.tree.map(lambda x, *names: x and not any(names), what, *sources)

    if not _is_analytic(subject, forms[0].likelihood):
        found = found._replace(
            layouts=known(found.layouts, unknown.layouts),
            of_tasks=known(found.of_tasks, unknown.of_tasks),
            matches=known(found.matches, unknown.matches),
        )
    return found._replace(
        plays=known(found.plays, unknown.plays, unknown.indices),
        alike=known(found.alike, unknown.alike),
        noise_of_tasks=known(found.noise_of_tasks, unknown.noise_of_tasks),
    )


def _is_analytic(subject: Subject, likelihood: str) -> bool:
    """Whether the location is an analytic function of the traced data: then an identity that holds
    at arbitrary values of them holds at all."""
    given = stand_ins(subject.constants)
    parts: dict[str, dict[int, Any]] = {"numbers": {}, "indices": {}}
    for k, (constant, stand_in) in enumerate(zip(subject.constants, given, strict=True)):
        if not are_concrete(constant):
            inexact = jnp.issubdtype(constant.dtype, jnp.inexact)
            parts["numbers" if inexact else "indices"][k] = stand_in

    def location(numbers, indices, **inputs):
        data = numbers | indices
        constants = tuple(data.get(k, x) for k, x in enumerate(given))
        of = subject._replace(constants=constants)
        return of.run(inputs, lambda run: run.observed[likelihood].loc)

    def slope(numbers, **others):
        return jax.jvp(lambda x: location(x, **others), (numbers,), (numbers,))[1]

    def is_smooth(names):
        steps = {x.name[0] for x in names if isinstance(x, Step)}
        plain = {x[0] for x in names if not isinstance(x, Step)}
        return "indices" not in plain and "numbers" not in steps

    # of a kink the derivative has a step; what has steps may have no derivative at all
    return all(
        is_smooth(union(provenance(of, **parts, **subject.inputs()))) for of in (location, slope)
    )
