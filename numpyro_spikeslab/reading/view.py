# SPDX-License-Identifier: Apache-2.0
"""The model at given values of its other sites, and the design that multiplies its weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.pairs import BLOCK_SIZE, Design, Prior, block_design
from numpyro_spikeslab.algebra.sparse_sums import Layout
from numpyro_spikeslab.reading.form import COLUMNS, Form, Source
from numpyro_spikeslab.reading.model_run import Observed, Run
from numpyro_spikeslab.reading.program import Program


class View(NamedTuple):
    """The model at given values of its other sites: Q tasks with N observations each, or L entries.

    An observation has the precision ``relative / sigma2``, 0 where it is missing.

    - **Y** - observations less their location at the given weights, 0 where they are missing.
    - **relative** - precisions relative to those of the task, one column where all tasks agree.
    - **sigma2** - noise variance of each task; 1 where noise varies along tasks, which is then a
      part of ``relative``.
    - **count** - how many observations each task has.
    - **rounding** - sum of squared residuals, of each task, below which they are nothing but
      rounding errors of the observations themselves.
    - **log_scale** - sum of ``log(sigma sqrt(2 pi))`` over all observations.
    - **prior** - prior of the weights, (Q, M), or one row where that of all tasks is the same.
    - **priors** - distributions of the other latent sites.
    - **log_density** - of all sites but the likelihood, the pairs, the functions they mix and those
      that have a role or belong to kernels, whose densities ``priors`` has.
    - **layout** - of L entries of a table, `None` where all of it is observed.
    - **links** - for each coefficient, the derivative of its prior mean in each of them; `None`
      where no prior mean depends on another.
    """

    Y: Float[Array, "N Q"] | Float[Array, " L"]
    relative: Float[Array, "N #Q"] | Float[Array, " L"]
    sigma2: Float[Array, " Q"]
    count: Float[Array, " Q"]  # type: ignore[assignment]
    rounding: Float[Array, " Q"]
    log_scale: Float[Array, ""]
    prior: Prior
    priors: dict[str, Any]
    log_density: Float[Array, ""]
    layout: Layout | None = None
    links: dict[str, dict[str, Any]] | None = None

    @property
    def precision(self) -> Float[Array, "N Q"]:
        """Of each observation."""
        return self.relative / self.sigma2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """A model with its data: what it is, its program, and the inputs of that.

    Of an argument of compiled code the first two are static.
    """

    form: Form = field(metadata={"static": True})
    program: Program = field(metadata={"static": True})
    constants: tuple

    def run(
        self,
        values: dict[str, Any],
        weights: dict[str, Any] | None = None,
        of: Callable[[Run], Any] | None = None,
    ) -> Any:
        """Run the model.

        :param values: of ``form.others``; of the functions where they are not to be zero.
        :param weights: by the names of the pairs; zero if not given.
        :param of: takes a part of the result, and the rest is not computed. The default is all of a
            :class:`~numpyro_spikeslab.reading.model_run.Run`.
        """
        form = self.form
        # spikes and slabs change nothing, but a trace wants values of them
        nothing = {k: jnp.zeros(shape) for p in form.pairs for k, shape in p.shapes.items()}
        zero = {pair.name: jnp.zeros(pair.shape) for pair in form.pairs}
        known = {name: values[name] for name in form.others}
        if form.functions is not None:
            phi = values.get(form.functions)
            shape = (form.num_features, form.num_obs)
            known[form.functions] = jnp.zeros(shape) if phi is None else phi
        program = self.program if of is None else self.program.part(of)
        return program(self.constants, known, zero if weights is None else weights, nothing)

    def location(
        self, values: dict[str, Any], weights: dict[str, Any] | None = None
    ) -> Float[Array, "..."]:
        """Location of the observations, in their shape; see :meth:`run`."""
        name = self.form.likelihood
        loc = self.run(values, weights, lambda run: run.observed[name].loc)
        return jnp.broadcast_to(loc, self.program.shapes.observed[name].value.shape)

    def location_of_tasks(
        self, values: dict[str, Any], weights: dict[str, Any] | None = None
    ) -> Float[Array, "N Q"]:
        """The same with tasks as columns."""
        return self.form.tasks_last(self.location(values, weights))


def view(
    problem: Problem,
    values: dict[str, Any],
    weights: dict[str, Any] | None = None,
    layout: Layout | None = None,
) -> View:
    """The model at given values; see :meth:`Problem.run`.

    :param layout: of the observations, if they are entries of a table.
    """
    form, run = problem.form, problem.run(values, weights)
    seen: Observed = run.observed[form.likelihood]
    shape = (form.num_obs, form.num_tasks) if layout is None else (jnp.size(seen.value), 1)
    counts = jnp.broadcast_to(form.tasks_last(_full(seen.count, seen, form)), shape)
    scales = form.tasks_last(_full(seen.scale, seen, form) if form.varying_noise else seen.scale)
    residual = jnp.where(seen.count > 0, seen.value - seen.loc, 0)
    Y = form.tasks_last(jnp.broadcast_to(residual, jnp.shape(seen.value)))
    relative = counts / scales**2 if form.varying_noise else counts
    one = jnp.ones((), relative.dtype)
    sigma2 = one if form.varying_noise else scales[0] ** 2
    if layout is not None and not form.varying_noise:
        own = jnp.broadcast_to(scales**2, shape)[:, 0]
        # of tasks without entries only a noise that all share is known
        shared = jnp.ones(()) if scales.size > 1 else own[0]
        sigma2 = jnp.full(form.num_tasks, shared).at[layout.where.columns].set(own)
    info = jnp.finfo(relative.dtype)
    # the precision of observations that are all zero stays a number
    smallest = info.tiny**0.75
    known = form.tasks_last(jnp.where(seen.count > 0, seen.value, 0))
    weighted = relative[:, :1] if form.complete else relative
    apart = {
        form.likelihood,
        form.functions,
        *form.kernels,
        *(r.site for r in form.roles_with_mode),
    }
    return View(
        Y=Y if layout is None else Y[:, 0],
        relative=weighted if layout is None else weighted[:, 0],
        sigma2=jnp.broadcast_to(sigma2, form.num_tasks),
        count=by_task(counts, form.num_tasks, layout),
        rounding=by_task(relative * ((info.eps * known) ** 2 + smallest), form.num_tasks, layout),
        log_scale=jnp.sum(counts * (jnp.log(scales) + 0.5 * jnp.log(2 * jnp.pi))),
        prior=prior_of(form, run),
        priors=run.priors,
        log_density=sum(
            (x for name, x in run.log_probs.items() if name not in apart), start=jnp.zeros(())
        ),
        layout=layout,
        links=_links(problem, values) if form.links else None,
    )


def _links(problem: Problem, values: dict[str, Any]) -> Any:
    start = {name: values[name] for name in problem.form.coefficients}

    def means(new):
        priors = problem.run(values | new, of=lambda run: run.priors)
        return {name: jnp.broadcast_to(priors[name].mean, x.shape) for name, x in new.items()}

    return jax.jacfwd(means)(start)


def by_task(x: Array, num_tasks: int, layout: Layout | None) -> Float[Array, " Q"]:
    """Sums over the observations of each task; ``x`` has one column where all tasks agree."""
    if layout is None:
        return jnp.broadcast_to(jnp.sum(x, axis=0), num_tasks)
    return jnp.zeros(num_tasks, x.dtype).at[layout.where.columns].add(jnp.ravel(x))


def _full(x: Array, seen: Observed, form: Form) -> Array:
    """Columns are flattened, so what broadcasts must be made large first."""
    return jnp.broadcast_to(x, jnp.shape(seen.value)) if form.kind == COLUMNS else x


def prior_of(form: Form, run: Run) -> Prior:
    """Prior of all weights, (Q, M)."""
    log_odds, scale = (
        jnp.concatenate([jnp.ravel(getattr(run.pairs[p.name], part)) for p in form.pairs])
        for part in ("log_odds", "scale")
    )
    return Prior(log_odds.reshape(form.shape), scale.reshape(form.shape) ** 2)


# The design


def linear_map(problem: Problem, values: dict[str, Any]) -> Any:
    """The location's derivative with respect to the weights: a linear map of flat weights, by the
    names of their pairs, to flat observations."""
    form = problem.form

    def location(flat):
        weights = {pair.name: flat[pair.name].reshape(pair.shape) for pair in form.pairs}
        return jnp.ravel(problem.location(values, weights))

    return jax.linearize(location, no_weights(form))[1]


def no_weights(form: Form) -> dict[str, Any]:
    """Flat weights of zero, by the names of their pairs."""
    return {pair.name: jnp.zeros(pair.size) for pair in form.pairs}


def candidates(tangent: Any, size: int, num_obs: int) -> dict[Source, Any]:
    """Constants of a linear map that may be the matrix of ``size`` weights, features as rows.

    In ``X @ w`` the matrix is a constant of the linearised map. To copy it costs less than a
    sweep, where ``size`` products of X with unit vectors cost thousands.
    """
    found = {}
    for index, constant in enumerate(jax.tree.leaves(tangent)):
        if jnp.shape(constant) == (size, num_obs):
            found[Source(index, False)] = constant
        if jnp.shape(constant) == (num_obs, size):
            found[Source(index, True)] = constant.T
    return found


def design_rows(problem: Problem, values: dict[str, Any]) -> Float[Array, "P N"]:
    """The design that multiplies the weights, features as rows: the location's Jacobian."""
    form, tangent = problem.form, linear_map(problem, values)
    zero, parts = no_weights(form), {}
    known = dict(zip(form.pairs, form.sources, strict=True))
    unknown = [pair for pair, source in known.items() if source is None]
    for pair, source in known.items():
        if source is not None:
            constant = jax.tree.leaves(tangent)[source.position]
            parts[pair.name] = constant.T if source.transposed else constant
    if unknown:
        ends = np.cumsum([pair.size for pair in unknown])
        size = int(ends[-1])

        def row(k):
            unit = jnp.zeros(size).at[k].set(1)
            given = zip(unknown, jnp.split(unit, ends[:-1]), strict=True)
            return tangent(zero | {pair.name: part for pair, part in given})

        # the batch bounds the memory of the intermediates, not of the result
        rows = jax.lax.map(row, jnp.arange(size), batch_size=256)
        names = (pair.name for pair in unknown)
        parts |= dict(zip(names, jnp.split(rows, ends[:-1]), strict=True))
    joined = jnp.concatenate([parts[pair.name] for pair in form.pairs])
    return joined.astype(jnp.result_type(joined, float))


def over_features(problem: Problem, values: dict[str, Any], of: Callable) -> Any:
    """``of`` what a weight of one in every task adds to the observations, (N, Q), for each of the M
    features."""
    form, tangent = problem.form, linear_map(problem, values)
    (pair,), (Q, M), N = form.pairs, form.shape, form.num_obs

    def one(m):
        rows = tangent({pair.name: jnp.ravel(jnp.zeros((Q, M)).at[:, m].set(1))})
        return of(rows.reshape(Q, N).T if form.tasks_first else rows.reshape(N, Q))

    # the batch bounds the memory of the intermediates
    batch = max(1, min(256, 2**24 // (Q * (N + M))))
    return jax.lax.map(one, jnp.arange(M), batch_size=batch)


def whitened_design(
    problem: Problem, values: dict[str, Any], block_size: int = BLOCK_SIZE
) -> Design:
    """The design of :func:`design_rows`, whitened and cut into blocks.

    :param values: any will do when the design is constant.
    """
    rows, relative = design_rows(problem, values), view(problem, values).relative[:, 0]
    # what is not observed may be NaN
    return block_design(jnp.where(relative > 0, rows, 0), jnp.sqrt(relative), block_size)


def shared_features(problem: Problem, values: dict[str, Any]) -> Float[Array, "M N"]:
    """Features that are the same for all tasks, 0 where no task has an observation."""
    rows = over_features(problem, values, lambda rows: rows[:, 0])
    return where_observed(problem, values, rows)


def where_observed(
    problem: Problem, values: dict[str, Any], rows: Float[Array, "M N"]
) -> Float[Array, "M N"]:
    """What tasks share, 0 where no task has an observation. Where other sites say which are there,
    it is 0 where it is not finite: at other values there may be others."""
    seen = jnp.any(view(problem, values).relative > 0, axis=1)
    kept = seen if problem.form.constant_design else seen | jnp.isfinite(rows)
    return jnp.where(kept, rows, 0)
