# SPDX-License-Identifier: Apache-2.0
"""The forms that the proof allows a model, and the choice among them by verdicts of the probe."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_spikeslab.reading.form import CoefficientSite, Form, task_axis
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.probe import Verdict, find_verdict
from numpyro_spikeslab.reading.program import Program, are_concrete, stand_ins
from numpyro_spikeslab.reading.proof import Proof
from numpyro_spikeslab.reading.provenance import Step, provenance, union
from numpyro_spikeslab.reading.roles import CoefficientRole, NoiseRole


def candidates(proof: Proof, trace: dict[str, Any], joint: bool) -> list[Form]:
    """List the forms that the probe is to confirm, a plain design at last; with ``joint`` alone."""
    plain = proof.plain
    parts, pairs = proof.program.shapes.observed[plain.response], plain.pairs
    alone = joint or plain.sets.groups or not plain.likelihood.is_closed
    if alone or len(pairs) != 1 or len(pairs[0].shape) not in (1, 2):
        return [plain]
    form = _of_features(plain, proof, parts.value.shape)
    if form is None:
        return [plain]
    entries = replace(form, sparse=True, complete=False, coefficients=(), links=())
    if sites := _own_coefficients(form, proof, trace):
        names = tuple(each.site for each in sites)
        form = replace(form, of_tasks=sites, coefficients=names, links=())
    forms = _layouts(form, proof, parts)
    if proof.mixed is not None and parts.entries is not None:
        forms.append(entries)
    return [*forms, plain]


def _of_features(plain: Form, proof: Proof, shape: tuple[int, ...]) -> Form | None:
    """Return the form of Q tasks that share known features or latent functions, in any layout."""
    (pair,) = plain.pairs
    M = pair.shape[-1]
    Q = pair.size // M
    form = replace(plain, num_tasks=Q, num_features=M)
    if proof.mixed is not None:
        N = proof.program.arguments[0][proof.mixed].shape[1]
        others = tuple(name for name in form.others if name != proof.mixed)
        form = replace(form, functions=proof.mixed, kernels=proof.kernels, others=others)
        return replace(form, num_obs=N)
    N = plain.num_obs // Q
    # with more features the Gram matrix costs more than the design of all tasks
    if Q == 1 or len(shape) != 2 or plain.num_obs != Q * N or M > Q * Q * N:
        return None
    return replace(form, num_obs=N) if plain.constant_rows else None


def _layouts(form: Form, proof: Proof, parts: Any) -> list[Form]:
    """Return the form with tasks as columns and as rows, as far as the shape allows it."""
    (Q, _), N, shape, forms = form.shape, form.num_obs, parts.value.shape, []
    for tasks_first, layout in ((False, (N, Q)), (True, (Q, N))):
        if shape == layout or (Q == 1 and shape == (N,) and not tasks_first):
            laid_out = replace(form, tasks_first=tasks_first)
            along, across = laid_out.tasks_last(jnp.ones(parts.scale.shape)).shape
            fixed = form.likelihood.is_fixed
            complete = fixed and not proof.count and (along == 1 or across == 1)
            varying = along > 1 or not fixed
            forms.append(replace(laid_out, varying_noise=varying, complete=complete))
    return forms


def _own_coefficients(
    form: Form, proof: Proof, trace: dict[str, Any]
) -> tuple[CoefficientSite, ...]:
    """Return the coefficients that each task may have for itself, if all that move the predictor
    are such. If not, all are treated as dense, if they are few enough."""
    (pair,), (names, dense, constant, _), sites = form.pairs, proof.coefficients, []
    movers = [name for name in names if name in proof.predictor]
    if not constant or (len(movers) < len(names) and dense == names):
        return ()
    for name in movers:
        axis, _ = task_axis(trace[name], trace[pair.slab], [trace[form.response]])
        if axis is None:
            return ()
        sites.append(CoefficientSite(name, axis))
    return tuple(sites)


def settle(form: Form, plain: Form, verdict: Verdict) -> Form:
    """Limit a form that fits to what the probe has confirmed; ``plain`` is a plain design."""
    if form.sparse and verdict.noise_of_tasks:
        form = replace(form, varying_noise=False)
    if form.of_tasks and not verdict.of_tasks:
        form = replace(form, of_tasks=(), coefficients=plain.coefficients, links=plain.links)
    # noise that changes along tasks is no number of a task, and scales are of all coefficients
    no_roles: tuple[type, ...] = (NoiseRole,) if form.varying_noise else ()
    if not {*plain.coefficients} <= {*form.coefficients}:
        no_roles += (CoefficientRole,)
    played = zip(form.roles, verdict.plays, strict=True)
    roles = tuple(role for role, plays in played if plays and not isinstance(role, no_roles))
    return replace(
        form,
        roles=roles,
        scales=tuple(name for name in form.scales if name not in {role.site for role in roles}),
        complete=form.complete and bool(verdict.same_counts),
        likelihood=form.likelihood if verdict.single else form.likelihood.repeated(),
    )


def only_known(
    verdict: Verdict, problem: Problem, generic: Program, generic_data: tuple, along: dict
) -> Verdict:
    """Drop verdicts that may depend on traced data, for which arbitrary arrays stand in."""
    constants = (*problem.constants, *generic_data)
    traced = [k for k, constant in enumerate(constants) if not are_concrete(constant)]
    size = len(problem.constants)

    def judge(data):
        arrays = dict(zip(traced, data, strict=True))
        new = tuple(arrays.get(k, x) for k, x in enumerate(constants))
        with_data = replace(problem, constants=new[:size])
        judged, _, indices, _ = find_verdict(with_data, generic, new[size:], along)
        return judged, tuple(indices)

    unknown, indices = provenance(judge, data=stand_ins(tuple(constants[k] for k in traced)))

    def independent(what, *sources):
        return jax.tree.map(lambda x, *names: x and not any(names), what, *sources)

    names = ["single", "same_counts", "noise_of_tasks"]
    if not _is_analytic(problem):
        names += ["fits", "of_tasks"]
    return verdict._replace(
        plays=independent(verdict.plays, unknown.plays, indices),
        **{name: independent(getattr(verdict, name), getattr(unknown, name)) for name in names},
    )


def _is_analytic(problem: Problem) -> bool:
    """Whether the predictor is an analytic function of the traced data. If so, an identity that
    holds at arbitrary data holds at all data."""
    arbitrary = stand_ins(problem.constants)
    data: dict[str, dict[int, Any]] = {"numbers": {}, "indices": {}}
    for k, (constant, stand_in) in enumerate(zip(problem.constants, arbitrary, strict=True)):
        if not are_concrete(constant):
            inexact = jnp.issubdtype(constant.dtype, jnp.inexact)
            data["numbers" if inexact else "indices"][k] = stand_in

    def predictor(numbers, indices, **inputs):
        new = numbers | indices
        constants = tuple(new.get(k, x) for k, x in enumerate(arbitrary))
        return replace(problem, constants=constants).predictor(**inputs)

    def slope(numbers, **others):
        return jax.jvp(lambda x: predictor(x, **others), (numbers,), (numbers,))[1]

    def is_smooth(names):
        # the derivative of a kink has a step; functions with steps may have no derivative
        steps = {x.name[0] for x in names if isinstance(x, Step)}
        return "numbers" not in steps and all(x[0] != "indices" for x in names)

    inputs = problem.inputs
    return all(is_smooth(union(provenance(of, **data, **inputs))) for of in (predictor, slope))
