# SPDX-License-Identifier: Apache-2.0
"""Reads a user's model once for each data set, or says why it cannot."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from math import prod
from typing import Any

from jaxtyping import Array, Float

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.algebra.coefficients import Split, TaskStatistics, split, whitened
from numpyro_spikeslab.algebra.flips import Sweeps
from numpyro_spikeslab.algebra.observations import Grid, Observations, Sparse
from numpyro_spikeslab.algebra.pairs import BLOCK_SIZE, Design
from numpyro_spikeslab.models.distributions import GaussianFunctions
from numpyro_spikeslab.reading.candidates import candidates, only_known, settle
from numpyro_spikeslab.reading.checks import check_trace, check_verdict
from numpyro_spikeslab.reading.coefficient_rows import covariate_rows, covariates_at, statistics_at
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.function_prior import KnownFunctions, kernel_of
from numpyro_spikeslab.reading.linear import dense_rows, shared_rows
from numpyro_spikeslab.reading.model_run import ModelTrace, Problem, trace_model
from numpyro_spikeslab.reading.probe import directions, probe
from numpyro_spikeslab.reading.program import (
    Fingerprint,
    are_concrete,
    compiled,
    on_device,
    outside_transformations,
    stand_ins,
)
from numpyro_spikeslab.reading.proof import Proof, prove
from numpyro_spikeslab.reading.provenance import provenance, union
from numpyro_spikeslab.reading.roles import CoefficientRole, Index, NoiseRole, Role
from numpyro_spikeslab.reading.rounding import sweeps_of
from numpyro_spikeslab.reading.sites import find_pairs, functions_of, is_latent
from numpyro_spikeslab.reading.view import View, view, whitened_design
from numpyro_spikeslab.support.devices import fetched, mesh_of_several, on_every_device
from numpyro_spikeslab.support.priors import is_plain, is_unbounded


def from_data(function: Callable[[Any], Any]) -> Any:
    """Make a property of a reading that is computed once, outside of the caller's transformations
    unless they trace the data."""

    @wraps(function)
    def computed(reading):
        with outside_transformations(reading.problem.constants):
            return function(reading)

    return cached_property(computed)


@dataclass(eq=False)
class Reading:
    """A model with its data, the problem, as it was read, and what depends on data alone.

    - **trace** - the run of the model.
    - **indices** - which entry of each site with a role each weight or task takes.
    - **functions** - the latent functions that weights mix, a
      :class:`~numpyro_spikeslab.reading.function_prior.KnownFunctions`, or `None`.
    - **generic** - generic values of the other sites.
    - **params** - start values of the model's params; unlike generic ones they may be traced.
    - **layout** - of the observations: a table, or entries of one.
    - **block_size** - columns per block of the design.
    - **num_counted** - observations that are not masked; all of them where masks are traced.
    """

    problem: Problem
    trace: ModelTrace
    indices: dict[str, Index]
    functions: Any
    generic: dict[str, Any]
    params: dict[str, Any]
    layout: Observations
    block_size: int
    num_counted: int

    @property
    def form(self) -> Form:
        return self.problem.form

    @property
    def if_traced(self) -> str:
        """A sentence for errors, if less is known of the model since its data are traced."""
        if are_concrete(self.problem.constants):
            return ""
        return (
            " The data are traced, as within jit or vmap, so less is known of the model: make the "
            "call outside, or bind indices, entries and masks, `functools.partial(model, X)`."
        )

    def view(self, values: dict[str, Any], weights: Any = None) -> View:
        """Return the model at given values."""
        return view(self.problem, values, weights, self.layout)

    @property
    def base(self) -> View | None:
        """The view, if only sites with a role or of kernels change it; it is too large to keep."""
        if not self.form.is_fixed_by(()):
            return None
        with outside_transformations(self.problem.constants):
            return _view(self.problem, self.generic, None, self.layout)

    @from_data
    def supports(self) -> dict[str, Any]:
        """:meth:`supports_of` the free sites and params."""
        return self.supports_of(self.form.free)

    def supports_of(self, names: Collection[str]) -> dict[str, Any]:
        """Return the supports of sites, `None` for one that depends on other sites."""
        if not names:
            return {}

        def supports(values):
            priors = self.problem.run(values, of=lambda run: run.priors | run.constraints)
            chosen = {k: x for k, x in priors.items() if k in names}
            return {k: getattr(x, "support", x) for k, x in chosen.items()}

        def leaves(values):
            return {k: jax.tree.leaves(x) for k, x in supports(values).items()}

        sources = provenance(leaves, values=self.generic)
        arrays = compiled(supports, self.generic)
        return {name: None if union(sources[name]) else x for name, x in arrays.items()}

    @from_data
    def unbounded(self) -> list[str]:
        """Sites that shape the prior of the weights, if data alone say that their own prior has a
        density without a maximum."""
        if not are_concrete(self.problem.constants):
            return []

        def unbounded(values):
            priors = self.problem.run(values, of=lambda run: run.priors)
            return {k: is_unbounded(priors[k]) for k in sorted(self.form.shaping & priors.keys())}

        sources = provenance(unbounded, values=self.generic)
        flags = compiled(unbounded, self.generic, once=True)
        return [name for name, x in flags.items() if x and not union(sources[name])]

    @from_data
    def design(self) -> Design | None:
        """The whitened design, `None` if it depends on other sites, on a stand-in for the
        likelihood, or features are shared."""
        form = self.form
        if not form.is_design or not form.fixed_design:
            return None
        return _design(self.problem, self.generic, self.block_size)

    @from_data
    def gram(self) -> Any:
        """Products of the columns, (P, P), if the design is constant and they are few."""
        return self._products(self.design)

    @from_data
    def split(self) -> Split | None:
        """A constant design split along constant covariates of coefficients, if there are any."""
        form = self.form
        if self.design is None or not form.coefficients or not form.constant_covariates:
            return None
        return _split(self.problem, self.generic, self.design, self.covariates)

    @from_data
    def gram_outside(self) -> Any:
        """Products of the columns outside of the span of the covariates."""
        return self._products(self.split)

    def _products(self, blocks: Any) -> Any:
        if self.form.size > MAX_GRAM or blocks is None:
            return None
        rows = blocks.outside if isinstance(blocks, Split) else blocks.rows
        return _products(rows)[: self.form.size, : self.form.size]

    @from_data
    def features(self) -> Any:
        """Features that are known and the same for all tasks, (M, N); else `None`."""
        if not self.form.shares_features:
            return None
        return _shared(self.problem, self.generic)[self.form.pairs[0].name]

    @from_data
    def covariates(self) -> dict[str, Any]:
        """Rows of coefficients by their names, if they depend on data alone: (C, N) where all tasks
        share them, else in all observations."""
        constant = self.form.coefficients and self.form.constant_covariates
        return _covariates(self.problem, self.generic) if constant else {}

    @from_data
    def task_statistics(self) -> TaskStatistics | None:
        """Statistics of tasks with coefficients of their own, where no other site changes them."""
        form, sites = self.form, {each.site for each in self.form.of_tasks}
        if not form.shares_features or not sites or not form.is_fixed_by(sites):
            return None
        return _statistics(self.problem, self.generic, self.features, self.covariates)

    @from_data
    def rows(self) -> Any:
        """The design before whitening, `None` if it depends on other sites."""
        columns = self.form.is_design and self.form.constant_rows
        return _rows(self.problem, self.generic) if columns else None

    @from_data
    def sweeps(self) -> Sweeps:
        """The precision that flips and swaps of spikes need, decided with a warning if the other
        draws of a step need more than single precision."""
        return sweeps_of(self)

    def covariates_at(self, values: dict[str, Any], names: Collection[str]) -> Any:
        """The rows of some coefficients, joined, at given values of the other sites."""
        return covariates_at(self.problem, self.covariates, values, names)

    def rows_at(self, values: dict[str, Any]) -> Float[Array, "P N"]:
        """The design before whitening at given values of the other sites."""
        return dense_rows(self.problem, values) if self.rows is None else self.rows

    def design_at(self, values: dict[str, Any], relative: Any) -> Design:
        """The whitened design at given values of the other sites and relative precisions."""
        if self.design is not None:
            return self.design
        return whitened_design(self.form, self.rows_at(values), relative, self.block_size)


MAX_GRAM = 1024
"""Above as many columns, their products take more memory than they save time."""

_view = jax.jit(view)
_shared = jax.jit(shared_rows)
_covariates = jax.jit(covariate_rows)


@jax.jit
def _rows(problem, values):
    # else XLA transposes traced data in each turn of a loop
    return jax.lax.optimization_barrier(dense_rows(problem, values))


@partial(jax.jit, static_argnums=2)
def _design(problem, values, block_size):
    rows, at = _rows(problem, values), view(problem, values)
    return whitened_design(problem.form, rows, at.relative[:, 0], block_size)


@jax.jit
def _statistics(problem, values, features, constant):
    at, form = view(problem, values), problem.form
    rows = covariates_at(problem, constant, values, form.coefficients)
    return statistics_at(form.of_tasks, at, values, features, rows)


@jax.jit
def _products(rows):
    rows = rows.reshape(-1, rows.shape[-1])
    return rows @ rows.T


@jax.jit
def _split(problem, values, design, constant):
    rows = covariates_at(problem, constant, values, problem.form.coefficients)
    return split(design.rows, whitened(rows, view(problem, values).relative[:, 0]))


_NOTHING: tuple[Any, ...] = (None, None, None, None)
"""Program, data, reading and proof of a reader that has read nothing."""


class Reader:
    """Reads a model once for each data set, for ``user``, whom errors name. With ``joint`` all
    features are columns of one design, in one block."""

    def __init__(self, model: Any, user: str, joint: bool = False) -> None:
        self.model, self.user, self.joint = model, user, joint
        self._last = _NOTHING

    def __call__(self, args: tuple, kwargs: dict, fixed: frozenset[str] = frozenset()) -> Reading:
        """Read the model at these arguments.

        :param fixed: names of sites whose values another kernel holds; they are no pairs here.
        :return: the last reading, if the model is the same program of the same data.
        :raises ValueError: if the model does not fit; the message names the site and the remedy.
        """

        def pairs_of(sites):
            check_trace(sites, self.user)
            return find_pairs(sites, self.user, fixed)

        with outside_transformations((args, kwargs)):
            trace = trace_model(self.model, args, kwargs, self.user, pairs_of)
            key = (trace.run, trace.generic, trace.pairs)
            # of the generic run, starts of params alone are used again
            params = [name for name, site in trace.sites.items() if site["type"] == "param"]
            starts = trace.generic.inputs_of(lambda values: [values[name] for name in params])
            data = Fingerprint((*trace.constants, *(trace.generic_constants[k] for k in starts)))
            last_key, last_data, reading, proof = self._last
            if last_key != key:
                proof = None
            elif last_data == data:
                return reading
            # the proof depends on the program only
            proof = proof or prove(trace, self.user)
            reading = self._read(proof, trace)
            if are_concrete((trace.constants, trace.generic_constants)):
                self._last = key, data, reading, proof
            return reading

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": _NOTHING}

    def _read(self, proof: Proof, trace: ModelTrace) -> Reading:
        """Read a model, given the proof."""
        constants, sites = on_device(trace.constants), trace.sites
        forms = [
            Problem(form, proof.program, constants, proof.density)
            for form in candidates(proof, sites, self.joint)
        ]
        problem, num_counted, (values, entries, where) = self._judge(forms, trace)
        form, functions = problem.form, None
        layout: Observations = Grid(form.table)
        if where is not None:
            # a device may read any entry; the layout, which is larger, is split
            mesh = mesh_of_several(constants) if are_concrete(constants) else None
            layout = Sparse.of(fetched(where), form.table, form.num_features, mesh)
            problem = replace(problem, constants=on_every_device(constants, mesh))
        if form.functions is not None:
            functions = _functions(problem, proof, sites, values)
        params = {name: x for name, x in values.items() if sites[name]["type"] == "param"}
        if not are_concrete(trace.generic_constants):
            # the probe has seen stand-ins for traced data
            params = trace.generic.part(lambda x: {k: x[k] for k in params})(
                trace.generic_constants
            )
        by_site = dict(zip((role.site for role in forms[-1].form.roles), entries, strict=True))
        return Reading(
            problem,
            trace.on_device(problem.constants),
            {r.site: _index(problem, r, by_site[r.site]) for r in form.roles},
            functions,
            values,
            jax.tree.map(jnp.asarray, params),
            layout,
            block_size=form.size if self.joint else BLOCK_SIZE,
            num_counted=num_counted,
        )

    def _judge(self, forms: list[Problem], trace: ModelTrace) -> Any:
        """Return the first form that fits, as far as the probe confirms it, how many observations
        count, and the other arrays of the probe."""
        generic, starts = trace.generic, trace.generic_constants
        for problem in forms:
            form, constants = problem.form, problem.constants
            along = directions(form, problem.inputs["values"])
            with outside_transformations():
                concrete = replace(problem, constants=stand_ins(constants))
                verdict, *arrays = probe(concrete, generic, stand_ins(starts), along)
                verdict = fetched(verdict)
            if are_concrete((constants, starts)):
                check_verdict(self.user, problem, verdict)
            else:
                verdict = only_known(verdict, problem, generic, starts, along)
            if verdict.fits:
                form = settle(form, forms[-1].form, verdict)
                return replace(problem, form=form), int(verdict.num_counted), arrays
        raise AssertionError("a plain design fits")


def _functions(
    problem: Problem, proof: Proof, trace: dict[str, Any], values: dict[str, Any]
) -> KnownFunctions:
    """Collect the definition of the functions, with arrays that the program has computed."""
    name = str(problem.form.functions)
    functions = functions_of(trace[name])
    X, templates, means, kernels = _function_arrays(problem, values)
    mean = functions.mean if functions.mean is None or callable(functions.mean) else means
    sites = functions.parameters.sites
    latent = tuple(n for n in sites if is_latent(trace, n))
    parameters = replace(functions.parameters, latent=latent)
    functions = replace(functions, X=X, templates=templates, mean=mean, parameters=parameters)
    return KnownFunctions(
        functions,
        kernel_of(functions),
        means,
        {n: x for n, x in kernels.items() if n not in latent},
        is_plain(trace[name], (dist.Normal, dist.MultivariateNormal, GaussianFunctions)),
        proof.parents,
        proof.children,
        tuple(n for n in sites if n not in trace or "_intervener_id" in trace[n]),
    )


@jax.jit
def _function_arrays(problem: Problem, values: dict[str, Any]) -> tuple:
    return problem.run(values, of=lambda run: run.functions[str(problem.form.functions)])


def _index(problem: Problem, role: Role, entries: Any) -> Index:
    """Make the index of a role; without entries where all of maybe millions take the only one."""
    form, shape = problem.form, problem.inputs["values"][role.site].shape
    with outside_transformations(entries):
        if isinstance(role, CoefficientRole):
            return Index(entries, shape)
        if prod(shape) == 1 and are_concrete(entries) and not jnp.any(entries):
            return Index(None, shape)
        if isinstance(role, NoiseRole):
            return Index(jnp.broadcast_to(entries, form.num_tasks), shape)
        return Index(jnp.reshape(entries, form.shape), shape)
