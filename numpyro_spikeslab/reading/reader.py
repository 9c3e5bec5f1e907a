# SPDX-License-Identifier: Apache-2.0
"""Reads a user's model once for each data set, or says why it cannot."""

from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple
import warnings

import numpy as np

import jax
import jax.numpy as jnp

from numpyro.infer.gibbs import subsample_plate_sizes

from numpyro_spikeslab.algebra.pairs import BLOCK_SIZE, Design
from numpyro_spikeslab.primitives import FUNCTIONS_MARK, Functions
from numpyro_spikeslab.reading.evaluate import FunctionArrays, checked_generic, program_of
from numpyro_spikeslab.reading.form import (
    COLUMNS,
    FUNCTIONS,
    SHARED,
    Form,
    find_pairs,
    is_latent,
)
from numpyro_spikeslab.reading.functions import FunctionPrior, Kernel, Mixed, Parameters, kernel_of
from numpyro_spikeslab.reading.probe import Verdict, probe
from numpyro_spikeslab.reading.program import (
    Program,
    are_concrete,
    keep_constants,
    on_device,
    outside_transformations,
    same_constants,
    stand_ins,
)
from numpyro_spikeslab.reading.proof import Proof, Subject, prove
from numpyro_spikeslab.reading.view import View, shared_features, view, whitened_design


class Known(NamedTuple):
    """What is known of the latent functions that weights mix.

    - **functions** - what defines them, for predictions at new inputs.
    - **parameters** - which entries of which sites the parameters of their kernels are.
    - **kernel** - their kernels.
    - **mean** - their prior means, (M, N).
    - **fixed** - values of kernel parameters that the model conditions on.
    """

    functions: Functions
    parameters: Parameters
    kernel: Kernel | Mixed
    mean: Any
    fixed: dict[str, Any]

    def prior(self, priors: dict[str, Any]) -> FunctionPrior:
        """Their prior, with the distributions of a view."""
        return FunctionPrior(self.kernel, self.mean, self.parameters, priors)

    def theta(self, values: dict[str, Any]) -> Any:
        """Logs of the kernels' parameters."""
        return self.parameters.gather(values | self.fixed)


class Reading:
    """A model as it was read, and what depends on data alone.

    :param form: what the model is.
    :param program: the model as a program.
    :param constants: its data.
    :param indices: for each site with a role, which of its entries each weight or task takes.
    :param functions: what is known of the latent functions that weights mix, or `None`.
    :param generic: generic values of the other sites.
    """

    def __init__(
        self,
        form: Form,
        program: Program,
        constants: tuple,
        indices: dict[str, Any],
        functions: Known | None,
        generic: dict[str, Any],
    ) -> None:
        self.form, self.program, self.constants = form, program, constants
        self.indices, self.functions, self.generic = indices, functions, generic

    def view(self, values: dict[str, Any], weights: dict[str, Any] | None = None) -> View:
        """The model at given values; see :func:`~numpyro_spikeslab.reading.view.view`."""
        return view(self.form, self.program, self.constants, values, weights)

    @cached_property
    def still(self) -> View | None:
        """The view, where there are no other sites that could change it."""
        if self.form.others or self.form.functions:
            return None
        with outside_transformations(self.constants):
            return _view(self.form, self.program, self.constants, self.generic)

    @cached_property
    def design(self) -> Design | None:
        """The whitened design, `None` if it depends on other sites or features are shared."""
        if self.form.kind != COLUMNS or not self.form.constant_design:
            return None
        with outside_transformations(self.constants):
            return _design(self.form, self.block_size, self.program, self.constants, self.generic)

    @cached_property
    def features(self) -> Any:
        """Features that are known and the same for all tasks, (M, N); else `None`."""
        if self.form.kind != SHARED:
            return None
        with outside_transformations(self.constants):
            return _features(self.form, self.program, self.constants, self.generic)

    block_size: int = BLOCK_SIZE

    def design_at(self, values: dict[str, Any]) -> Design:
        """The whitened design at given values of the other sites."""
        return whitened_design(self.form, self.program, self.constants, values, self.block_size)


_view = jax.jit(view, static_argnums=(0, 1))
_features = jax.jit(shared_features, static_argnums=(0, 1))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _design(form, block_size, program, constants, values):
    return whitened_design(form, program, constants, values, block_size)


class Reader:
    """Reads a model once for each data set: what depends on data alone is computed once.

    :param model: the model.
    :param user: who reads, for the error messages.
    :param joint: whether all features must be columns of one design, in one block.
    """

    def __init__(self, model: Any, user: str, joint: bool = False) -> None:
        self.model, self.user, self.joint = model, user, joint
        self._last: Any = None

    def __call__(self, args: tuple, kwargs: dict, fixed: frozenset[str] = frozenset()) -> Reading:
        """Read the model at these arguments.

        :param fixed: names of sites whose values another kernel holds; they are no pairs here.
        :return: what was read before, if the model is the same program of the same data.
        :raises ValueError: if the model does not fit; the message names the site and the remedy.
        """
        with outside_transformations((args, kwargs)):
            args, kwargs = _seen_anew((args, kwargs))
            trace, generic, more = checked_generic(self.model, args, kwargs, self.user)
            _check_trace(trace, self.user)
            pairs = find_pairs(trace, self.user, fixed)
            shapes = _shapes(generic)
            program, constants = program_of(self.model, args, kwargs, pairs, shapes)
            key = (program, generic, pairs)
            if self._last is not None:
                known, kept, reading = self._last
                if known == key and same_constants(kept, constants):
                    return reading
            kept = keep_constants(constants)
            subject = Subject(trace, shapes, pairs, program, on_device(constants), self.user)
            reading = _read(subject, generic, more, self.joint)
            if are_concrete(constants):
                self._last = key, kept, reading
            return reading

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}


def _seen_anew(arguments: Any) -> Any:
    """Views of numpy's arrays: JAX remembers in which precision it has seen an array before."""
    return jax.tree.map(lambda x: x.view() if type(x) is np.ndarray else x, arguments)


def _shapes(generic: Program) -> dict[str, Any]:
    outputs = jax.tree.unflatten(generic.out_tree, generic.closed.out_avals)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)


def _check_trace(trace: dict[str, Any], user: str) -> None:
    subsampled = sorted(subsample_plate_sizes(trace))
    if subsampled:
        raise ValueError(
            f"{user}: the plates {subsampled} are subsampled. Exact updates need all data; remove "
            "`subsample_size`."
        )
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"]:
            _check_shape(name, site, user)


def _check_shape(name: str, site: dict[str, Any], user: str) -> None:
    """Broadcasting observations against another shape would make more of them than there are."""
    shape, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
    # one distribution for all of them is no mistake
    if expected not in (shape, ()):
        raise ValueError(
            f"{user}: the observations of {name!r} have shape {shape} and their distribution has "
            f"shape {expected}. Give both the same shape; a column needs `y[:, 0]`."
        )
    if jnp.issubdtype(jnp.result_type(site["value"]), jnp.complexfloating):
        raise ValueError(
            f"{user}: the observations of {name!r} are complex. Stack their real and imaginary "
            "parts."
        )


def _read(subject: Subject, generic: Program, more: tuple, joint: bool) -> Reading:
    proof = prove(subject)
    forms = _forms(subject, proof, joint)
    concrete = are_concrete((subject.constants, more))
    with outside_transformations():
        constants, rest = subject.constants, more
        if not concrete:
            constants, rest = stand_ins(constants), stand_ins(rest)
        found: Verdict = jax.device_get(probe(forms, generic, subject.program, constants, rest))
        values = _generic(generic, rest)
    if concrete:
        check(subject, forms[0], found)
    form = _settle(forms, found, concrete)
    plays = zip(forms[0].roles, found.indices, found.plays, strict=True)
    indices = {role.site: index for role, index, played in plays if played}
    functions = None
    if form.functions is not None:
        functions = _functions(subject, form.functions, values)
        if concrete:
            _name_empty(subject.user, form, found.counted)
    reading = Reading(
        form,
        subject.program,
        subject.constants,
        {role.site: jnp.asarray(indices[role.site]) for role in form.roles},
        functions,
        {name: values[name] for name in form.others},
    )
    if joint:
        reading.block_size = form.size
    return reading


_generic = jax.jit(lambda program, constants: program(constants), static_argnums=0)


def _forms(subject: Subject, proof: Proof, joint: bool) -> tuple[Form, ...]:
    """What the model may be, to be confirmed by the probe: a plain design, or tasks."""
    site = subject.trace[proof.likelihood]
    shape = jnp.shape(site["value"])
    others, data = frozenset(subject.others), frozenset[str]()
    spread = subject.program
    scale_shape = _scale_shape(spread, proof.likelihood, len(shape))
    weighs = proof.count | (proof.scale if int(np.prod(scale_shape)) > 1 else data)
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
        complete=True,
        varying_noise=int(np.prod(scale_shape)) > 1,
        constant_rows=not proof.design & others,
        constant_design=not (proof.design | weighs) & others,
        sources=(None,) * len(subject.pairs),
    )
    return form, *_task_forms(subject, proof, form, shape, scale_shape, joint)


def _scale_shape(program: Program, likelihood: str, rank: int) -> tuple[int, ...]:
    """Shape of the noise scale as the program has it: along an axis of size 1 it cannot change."""
    run = jax.tree.unflatten(program.out_tree, program.closed.out_avals)
    return tuple(run.observed[likelihood].scale.shape)


def _task_forms(subject, proof, form, shape, scale_shape, joint) -> tuple[Form, ...]:
    """The forms of Q tasks, with tasks as columns and as rows of the observations."""
    if joint or len(form.pairs) != 1 or len(form.pairs[0].shape) not in (1, 2):
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
    forms = []
    for tasks_first, layout in ((False, (N, Q)), (True, (Q, N))):
        fits = shape == layout or (Q == 1 and shape == (N,) and not tasks_first)
        if fits:
            others = tuple(name for name in form.others if name != proof.mixed)
            new = replace(form, num_tasks=Q, num_features=M, num_obs=N, others=others, **kind)
            new = replace(new, tasks_first=tasks_first)
            along, across = new.tasks_last(jnp.ones(scale_shape)).shape
            known = not proof.count & frozenset(form.others)
            complete = known and (along == 1 or across == 1)
            forms.append(replace(new, varying_noise=along > 1, complete=complete))
    return tuple(forms)


def _settle(forms: tuple[Form, ...], found: Verdict, concrete: bool) -> Form:
    """The form that the probe confirms."""
    plays = dict(zip(forms[0].roles, found.plays, strict=True))
    roles = tuple(role for role, played in plays.items() if played)
    for form, fits, alike in zip(forms[1:], found.layouts, found.alike, strict=True):
        if fits:
            # noise that changes along tasks is no number of a task
            kept = tuple(r for r in roles if r.part != "noise" or not form.varying_noise)
            return replace(form, roles=kept, complete=form.complete and bool(alike) and concrete)
    sources = tuple(
        next((source for source, match in matches.items() if match), None)
        for matches in found.matches
    )
    form = forms[0]
    kept = tuple(r for r in roles if r.part != "noise" or not form.varying_noise)
    return replace(form, roles=kept, sources=sources)


def _functions(subject: Subject, name: str, values: dict[str, Any]) -> Known:
    """What defines the functions, with the arrays that the program has computed."""
    functions: Functions = subject.trace[name]["infer"][FUNCTIONS_MARK]
    inputs = (
        {n: values[n] for n in subject.others},
        {pair.name: jnp.zeros(pair.shape) for pair in subject.pairs},
        {n: jnp.zeros(subject.shapes[n].shape) for n in subject.own},
    )
    found = _function_arrays(subject.program, name, subject.constants, inputs)
    kept = functions.mean if functions.mean is None or callable(functions.mean) else found.mean
    new = functions._replace(X=found.X, templates=tuple(found.templates), mean=kept)
    latent = tuple(n for n in functions.site_names if is_latent(subject.trace, n))
    fixed = {n: x for n, x in found.parameters.items() if n not in latent}
    return Known(new, Parameters.of(functions, latent), kernel_of(new), found.mean, fixed)


@partial(jax.jit, static_argnums=(0, 1))
def _function_arrays(program, name, constants, inputs) -> FunctionArrays:
    return program(constants, *inputs).functions[name]


def check(subject: Subject, form: Form, found: Verdict) -> None:
    """Finite data, at least one observation, proper priors.

    :raises ValueError: if one is missing; the message names the site and the remedy.
    """
    site, user = form.likelihood, subject.user
    names = [pair.name for pair in form.pairs]
    if not np.any(found.counted):
        raise ValueError(
            f"{user}: {site!r} has no observations: {found.counted.size} values, none of them "
            "unmasked."
        )
    if not found.finite_design:
        raise ValueError(
            f"{user}: the design that multiplies {names} in {site!r} is not finite. Remove NaN and "
            "infinity from it; impute missing covariates."
        )
    for what, bad in (
        ("observations", found.bad_values),
        ("location at zero weights", found.bad_offsets),
    ):
        first = np.flatnonzero(bad)
        if first.size:
            raise ValueError(
                f"{user}: the {what} of {site!r} are not finite at {first.size} entries, the first "
                f"at {first[0]}. Remove NaN and infinity from the data; missing observations need "
                "`numpyro.handlers.mask`."
            )
    if not found.proper:
        raise ValueError(
            f"{user}: inclusion probabilities of {names} must lie strictly between 0 and 1, their "
            f"slab scales and the noise scale of {site!r} must be positive and finite."
        )
    if np.any(found.slab_locs):
        raise ValueError(
            f"{user}: the prior mean of the slabs of {names} must be 0, got {found.slab_locs}. "
            "Leave the prior to spike_slab, and put a known mean into an offset."
        )


def _name_empty(user: str, form: Form, counted: Any) -> None:
    """Warn of tasks and points without observations."""
    seen = np.asarray(form.tasks_last(counted))
    for axis, what in ((0, "tasks"), (1, "points")):
        empty = np.flatnonzero(~seen.any(axis=axis))
        if empty.size:
            shown = ", ".join(map(str, empty[:10])) + (", ..." if empty.size > 10 else "")
            warnings.warn(
                f"{user}: {empty.size} {what} of {form.likelihood!r} have no observation: {shown}. "
                "Their predictions are those of the prior or of their neighbours.",
                stacklevel=6,
            )
