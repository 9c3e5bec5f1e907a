# SPDX-License-Identifier: Apache-2.0
"""Reads a model of latent functions into :mod:`numpyro_spikeslab.multitask`, or says why it cannot.

A model fits when one observed Normal site has the location ``offset + W phi``, with weights ``W``
from :func:`~numpyro_spikeslab.spike_slab` and functions ``phi`` from
:func:`~numpyro_spikeslab.latent_functions`. All other latent sites may be a part of the offset, of
the noise of a task or of the prior of the weights.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import random
import jax.numpy as jnp
from jax.tree_util import Partial

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform
from numpyro.infer.gibbs import subsample_plate_sizes

from numpyro_spikeslab import latent, multitask
from numpyro_spikeslab.latent import Template
from numpyro_spikeslab.multitask import Hyper, Problem, State
from numpyro_spikeslab.primitives import FUNCTIONS_MARK, Functions, check_finite
from numpyro_spikeslab.reading.call import (
    RUN_ONCE,
    LastCall,
    are_concrete,
    merge,
    on_device,
    outside_transformations,
    partition,
)
from numpyro_spikeslab.structure import (
    Pair,
    _dependents,
    _find_likelihood,
    _is_tractable,
    _log_prob,
    _normal,
    agree,
    checked_trace,
    find_function_sites,
    find_pairs,
    is_latent,
    param_name,
    slab_prior,
    trace_at,
    unwrap,
)


class Form(NamedTuple):
    """What about a model does not depend on the values of its arrays; hashable.

    - **pair** - its weights.
    - **functions** - name of its latent functions.
    - **num_inputs** - N.
    - **likelihood** - the observed site.
    - **layout** - whether tasks are rows or columns of the observations.
    - **roles** - pairs of ``"noise"``, ``"inclusion"`` or ``"slab"`` and the name of a site.
    - **kernels** - names of the latent sites that are parameters of kernels.
    - **others** - names of all other latent sites and of the model's params.
    """

    pair: Pair
    functions: str
    num_inputs: int
    likelihood: str
    layout: str
    roles: tuple[tuple[str, str], ...]
    kernels: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def num_functions(self) -> int:
        return self.pair.shape[-1]

    @property
    def num_tasks(self) -> int:
        return self.pair.size // self.num_functions

    def tasks_last(self, x: Any) -> Any:
        """Observations in the shape (N, Q)."""
        N, Q = self.num_inputs, self.num_tasks
        return jnp.reshape(x, (Q, N)).T if self.layout == DIRECT else jnp.reshape(x, (N, Q))


class Tasks(NamedTuple):
    """What reading a model gives.

    - **form** - names and shapes.
    - **functions** - its latent functions.
    - **fixed** - values of the kernel parameters that are observed.
    - **problem** - the arrays, where the other sites have generic values.
    - **offset** - location of the observations without functions there, shape (N, Q).
    - **roughness** - what orders the functions in moves.
    """

    form: Form
    functions: Functions
    fixed: dict[str, Any]
    problem: Problem
    offset: Any
    roughness: Any

    def hold(
        self, model: Any, call: Any, params: dict[str, Any], prefix: str
    ) -> tuple[Problem, Any]:
        """The problem and the offset at the values of the other sites in ``params``.

        :param call: positional and keyword arguments of the model.
        """
        held = {site: params[param_name(site, prefix, params)] for site in self.form.others}
        if not held:
            return self.problem, self.offset
        return _hold(model, self.form, *partition(call), self.problem, held)

    def theta(self, sites: dict[str, Any]) -> Float[Array, "M P"]:
        """Logs of the kernels' parameters, padded with zeros where there are fewer."""
        return gather(self.functions, sites)

    def sites(self, theta: Float[Array, "M P"]) -> dict[str, Any]:
        """The inverse of :meth:`theta`."""
        return scatter(self.functions, theta)

    def pack(self, params: dict[str, Any], prefix: str, problem: Problem) -> State:
        """The state that a guide's parameters stand for.

        :param problem: at the values of the other sites in ``params``.
        """
        name, hyper, roles = self.form.functions, problem.hyper, dict(self.form.roles)
        M, Q = self.form.num_functions, self.form.num_tasks
        probs, loc, scale = (
            jnp.reshape(params[f"{self.form.pair.name}_{prefix}_{part}"], (Q, M))
            for part in ("probs", "loc", "scale")
        )

        def value(part, default, shape):
            site = roles.get(part)
            found = default if site is None else jnp.ravel(params[f"{site}_{prefix}_loc"])
            return jnp.broadcast_to(jnp.asarray(found, probs.dtype), shape)

        theta = self.theta(
            self.fixed | {site: params[f"{site}_{prefix}_loc"] for site in self.form.kernels}
        )
        alpha, h = params[f"{name}_{prefix}_precision"], params[f"{name}_{prefix}_linear"]
        mean, var, kl = moments(problem, theta, alpha, h)
        return State(
            gamma=probs,
            mu=loc,
            v=scale**2,
            alpha=alpha,
            h=h,
            mean=mean,
            var=var,
            kl=kl,
            theta=theta,
            step=jnp.full_like(theta, 0.3),
            sigma2=value("noise", hyper.fixed_noise, (Q,)) ** 2,
            pi=value("inclusion", hyper.fixed_inclusion, (M,)),
            sigma_w2=jnp.ravel(value("slab", hyper.fixed_slab, (1,)))[0] ** 2,
        )

    def unpack(self, state: State, params: dict[str, Any], prefix: str) -> dict[str, Any]:
        """A guide's parameters for a state; ``params`` tells their shapes."""
        pair, name = self.form.pair, self.form.functions
        new = {
            f"{pair.name}_{prefix}_probs": state.gamma,
            f"{pair.name}_{prefix}_loc": state.mu,
            f"{pair.name}_{prefix}_scale": jnp.sqrt(state.v),
            f"{name}_{prefix}_precision": state.alpha,
            f"{name}_{prefix}_linear": state.h,
        }
        sites = self.sites(state.theta)
        new |= {f"{site}_{prefix}_loc": sites[site] for site in self.form.kernels}
        values = {
            "noise": jnp.sqrt(state.sigma2),
            "inclusion": state.pi,
            "slab": jnp.sqrt(state.sigma_w2),
        }
        for part, site in self.form.roles:
            known = f"{site}_{prefix}_loc"
            # one value that all tasks or functions share
            single = jnp.size(params[known]) == 1
            new[known] = jnp.ravel(values[part])[0] if single else values[part]
        return {k: jnp.reshape(x, params[k].shape).astype(params[k].dtype) for k, x in new.items()}

    def predict(
        self, params: dict[str, Any], prefix: str, problem: Problem, offset: Any, X_new: Any
    ) -> tuple[Any, Any, Any]:
        """Mean and variance of the noise-free tasks at new inputs, and the noise variances.

        :param problem: at the values of the other sites in ``params``.
        :param offset: location of the observations without functions, shape (N, Q).
        :param X_new: `None` for the inputs of the model.
        """
        state = self.pack(params, prefix, problem)
        if X_new is None:
            mean, variance = multitask.mix(state, state.mean, state.var)
            return mean + offset, variance, state.sigma2
        _check_new_inputs(self.functions.X, X_new)
        offset = np.asarray(offset)
        if np.any(offset != offset[0]):
            raise ValueError(
                "predict: the location of the tasks without functions is not the same at all "
                "inputs, so it is not known at new ones. Use numpyro.infer.Predictive with a model "
                "that knows it."
            )
        sites = self.sites(state.theta) | self.fixed
        K_star, k_star = [], []
        for m, template in enumerate(self.functions.templates):
            values = self.functions.values(sites, m)
            K_star.append(template.cross(values, self.functions.X, X_new).T)
            k_star.append(template.variance(values, X_new))
        mean, variance = _predict(
            problem, state, jnp.stack(K_star), jnp.stack(k_star), self.functions.mean_at(X_new)
        )
        return mean + offset[0], variance, state.sigma2


_predict = jax.jit(multitask.predict)


def _check_new_inputs(X: Any, X_new: Any) -> None:
    if jnp.ndim(X_new) != jnp.ndim(X) or jnp.shape(X_new)[1:] != jnp.shape(X)[1:]:
        raise ValueError(
            f"predict: X_new has shape {jnp.shape(X_new)} and the model's inputs have shape "
            f"{jnp.shape(X)}; they must have the same width."
        )
    check_finite("predict", "X_new is", X_new)


@jax.jit
def moments(prob: Problem, theta: Any, alpha: Any, h: Any) -> tuple[Any, Any, Any]:
    """Means, variances and divergences of the functions from their sites."""

    def of(m):
        q = latent.condition(multitask.covariance(prob, m, theta[m]), alpha[m], h[m], prob.mu[m])
        return q.mean, q.variance, q.kl

    return jax.lax.map(of, jnp.arange(theta.shape[0]))


def gather(functions: Functions, sites: dict[str, Any]) -> Float[Array, "M P"]:
    """Logs of the parameters of each kernel, from those of their sites."""
    rows = []
    for m in range(len(functions.templates)):
        parts = [jnp.ravel(jnp.log(x)) for x in functions.values(sites, m)]
        rows.append(jnp.concatenate([jnp.zeros(0), *parts]))
    size = max(row.size for row in rows)
    return jnp.stack([jnp.pad(row, (0, size - row.size)) for row in rows])


def scatter(functions: Functions, theta: Float[Array, "M P"]) -> dict[str, Any]:
    """The inverse of :func:`gather`."""
    found: dict[str, list[Any]] = {}
    for m, template in enumerate(functions.templates):
        for name, value in zip(functions.sites[m], template.split(theta[m]), strict=True):
            found.setdefault(name, []).append(value)
    return {k: jnp.stack(x) if functions.alike else x[0] for k, x in found.items()}


def _covariance(template: Any, X: Any, theta: Any, dense: bool = False) -> Any:
    covariance = template.prior(template.split(theta), X, dense)
    # else XLA evaluates the kernel again in each product with the matrix
    return jax.lax.optimization_barrier(covariance)


def _covariance_dense(template: Any, X: Any, theta: Any) -> Any:
    return _covariance(template, X, theta, dense=True)


def kernel_of(functions: Functions) -> Any:
    """The kernels as :func:`multitask.problem` takes them."""
    X = jnp.asarray(functions.X, float)
    function = _covariance if functions.is_uniform else _covariance_dense
    kernels: list[Template] = []
    which = []
    for template in functions.templates:
        same = (k for k, other in enumerate(kernels) if _differ_in_parameters(template, other))
        which.append(next(same, len(kernels)))
        if which[-1] == len(kernels):
            kernels.append(template)
    every = tuple(Partial(function, template, X) for template in kernels)
    return every[0] if len(every) == 1 else multitask.Mixed(every, jnp.array(which))


def _differ_in_parameters(one: Template, other: Template) -> bool:
    """Whether two kernels are the same but for the values of their parameters."""
    if one is other:
        return True
    if str(jax.tree.structure(one)) != str(jax.tree.structure(other)):
        return False
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), one.free, strict=True)
    return all(
        a is b or (np.shape(a) == np.shape(b) and (free or np.array_equal(a, b)))
        for a, b, free in leaves
    )


def find_functions(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the sites of latent functions that are not observed."""
    return tuple(name for name in find_function_sites(trace) if is_latent(trace, name))


def concrete_functions(model: Any, trace: dict, name: str, args: tuple, kwargs: dict) -> Functions:
    """What defines the functions, with concrete inputs."""
    functions = trace[name]["infer"][FUNCTIONS_MARK]
    parts = (functions.X, [t.kernel for t in functions.templates], functions.mean)
    if not are_concrete(parts):
        # the model computes its inputs
        with outside_transformations((args, kwargs)), handlers.block():
            seeded = handlers.seed(model, random.key(0))
            trace = handlers.trace(seeded).get_trace(*args, **kwargs)
        functions = trace[name]["infer"][FUNCTIONS_MARK]
    return functions


class Facts(NamedTuple):
    """What only running a model tells; see :func:`_find_facts`."""

    at: "Values"
    mixes: Any
    plays: dict[str, Any]
    priors: dict[str, Any]
    kernels: dict[str, Any]


class Values(NamedTuple):
    """A model without functions, at values of its other sites; observations have shape (N, Q).

    - **value**, **offset**, **scale**, **weight** - of the observations.
    - **log_odds**, **slab** - prior of the weights, shape (Q, M).
    - **log_density** - of the sites that are neither pairs nor functions, nor have a role.
    """

    value: Any
    offset: Any
    scale: Any
    weight: Any
    log_odds: Any
    slab: Any
    log_density: Any


DIRECT, TRANSPOSED = "Q N", "N Q"


def read_tasks(model: Any, args: tuple, kwargs: dict, user: str) -> Tasks:
    """Read a model of latent functions.

    :param user: who reads, for the error messages.
    :raises ValueError: if the model does not fit or the data are bad; the message names the site
        and the remedy.
    """
    if not are_concrete((args, kwargs)):
        raise ValueError(
            f"{user}: models with latent functions cannot be fitted under a transformation such "
            "as jit or vmap; the moves between optima are decided outside of compiled code."
        )
    trace = checked_trace(model, args, kwargs, user)
    subsampled = sorted(subsample_plate_sizes(trace))
    if subsampled:
        raise ValueError(
            f"{user}: the plates {subsampled} are subsampled. Exact updates need all data; remove "
            "`subsample_size`."
        )
    pairs, names = find_pairs(trace, user), find_functions(trace)
    if len(pairs) > 1 or len(names) > 1:
        raise ValueError(
            f"{user}: the model has the weights {[p.name for p in pairs]} and the latent functions "
            f"{list(names)}; one site of each is supported beside each other."
        )
    (pair,), (name,) = pairs, names
    functions = concrete_functions(model, trace, name, args, kwargs)
    form = _find_form(model, args, kwargs, trace, pair, functions, user)
    static, dynamic = partition((args, kwargs))
    shape = jnp.shape(trace[form.likelihood]["value"])
    N, Q = form.num_inputs, form.num_tasks
    layouts = {DIRECT: (Q, N), TRANSPOSED: (N, Q)}
    fits = [k for k, x in layouts.items() if shape == x or (Q == 1 and shape == (N,))]
    for layout in fits:
        form = form._replace(layout=layout)
        found = _jit_facts(model, form, functions.site_names, static, dynamic)
        facts = jax.device_get(found)
        if facts.mixes:
            return _assemble(functions, form, facts, user)
    raise ValueError(
        f"{user}: the location of {form.likelihood!r}, of shape {shape}, is not `offset + "
        f"{pair.name} @ {name}` (or its transpose) with {pair.name!r} of shape "
        f"{(Q, form.num_functions)} and {name!r} of shape {(form.num_functions, N)}."
    )


def _find_form(model, args, kwargs, trace, pair, functions, user) -> Form:
    """The form of a model, with a preliminary layout."""
    name, M = functions.name, len(functions.templates)
    if pair.shape[-1:] != (M,) or len(pair.shape) > 2:
        raise ValueError(
            f"{user}: the weights {pair.name!r} have shape {pair.shape}, expected (Q, {M}) for Q "
            f"tasks and the {M} functions of {name!r}."
        )
    own = {pair.spike, pair.slab, name}
    shapes = {
        site: jax.ShapeDtypeStruct(jnp.shape(x["value"]), jnp.result_type(x["value"]))
        for site, x in trace.items()
        if site in own or x["type"] == "param" or (x["type"] == "sample" and not x["is_observed"])
    }
    dependents = _dependents(model, args, kwargs, shapes)
    likelihood = _find_likelihood(dependents, trace, own, user)
    latents = [site for site in shapes if site not in own]
    kernels = tuple(site for site in latents if site in functions.site_names)
    strangers = sorted(dependents[name] - {name, *kernels})
    if strangers:
        raise ValueError(
            f"{user}: the prior of the latent functions {name!r} depends on {strangers}. Only the "
            "kernel parameters that `latent_functions` makes itself are supported."
        )
    targets = {"noise": {likelihood}, "inclusion": {pair.spike}, "slab": {pair.slab}}
    roles: dict[str, str] = {}
    for site in latents:
        fed = {other for other, sources in dependents.items() if site in sources} - {site}
        part = next((part for part, target in targets.items() if fed == target), None)
        alone = site not in kernels and not dependents.get(site, frozenset()) - {site}
        if part and part not in roles and alone and _is_tractable(trace[site], part):
            roles[part] = site
    return Form(
        pair=pair,
        functions=name,
        num_inputs=functions.num_inputs,
        likelihood=likelihood,
        layout=DIRECT,
        roles=tuple(sorted(roles.items())),
        kernels=kernels,
        others=tuple(site for site in latents if site not in {*kernels, *roles.values()}),
    )


def evaluate_tasks(model: Any, call: Any, form: Form, latents: dict[str, Any]) -> Values:
    """Run a model with functions and weights at zero.

    :param call: positional and keyword arguments.
    :param latents: values of all other sites that are to be set.
    """
    trace = _trace_at(model, call, form, latents, None, None)
    value, offset, scale, weight = map(form.tasks_last, _normal(trace[form.likelihood], False))
    log_odds, slab = slab_prior(trace, form.pair)
    matrix = (form.num_tasks, form.num_functions)
    counted = {form.pair.spike, form.pair.slab, form.functions, form.likelihood, *form.kernels}
    counted |= {site for _, site in form.roles}
    log_density = sum(
        (
            jnp.sum(_log_prob(site))
            for name, site in trace.items()
            if site["type"] == "sample" and name not in counted
        ),
        start=jnp.zeros(()),
    )
    return Values(
        value,
        offset,
        scale,
        weight,
        log_odds=log_odds.reshape(matrix),
        slab=slab.reshape(matrix),
        log_density=log_density,
    )


def _trace_at(model, call, form, latents, W, phi) -> dict[str, Any]:
    args, kwargs = call
    own = {
        form.pair.spike: jnp.ones(form.pair.shape, int),
        form.pair.slab: jnp.zeros(form.pair.shape) if W is None else W.reshape(form.pair.shape),
        form.functions: (jnp.zeros((form.num_functions, form.num_inputs)) if phi is None else phi),
    }
    return trace_at(model, args, kwargs, own | latents)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), compiler_options=RUN_ONCE)
def _jit_facts(model, form, kernel_sites, static, dynamic) -> Facts:
    return _find_facts(model, merge(static, dynamic), form, kernel_sites)


def _find_facts(model, call, form, kernel_sites) -> Facts:
    """Run the model at generic values."""
    M, N, Q = form.num_functions, form.num_inputs, form.num_tasks
    with handlers.block():
        seeded = handlers.seed(model, random.key(0))
        seeded = handlers.substitute(seeded, substitute_fn=init_to_uniform)
        found = handlers.trace(seeded).get_trace(*call[0], **call[1])
    roles = dict(form.roles)
    latents = {
        name: found[name]["value"] for name in (*form.others, *form.kernels, *roles.values())
    }
    keys = random.split(random.key(1), 4)
    base = evaluate_tasks(model, call, form, latents)
    mixes = []
    for factor, key_w, key_phi in ((1.0, keys[1], keys[0]), (-3.0, keys[2], keys[3])):
        W, phi = factor * random.normal(key_w, (Q, M)), random.normal(key_phi, (M, N))
        moved = _trace_at(model, call, form, latents, W, phi)[form.likelihood]
        location = form.tasks_last(_normal(moved, False)[1])
        mixes.append(agree(location - base.offset, (W @ phi).T))
    plays, priors = {}, {}
    for part, site in roles.items():
        shape, dtype = jnp.shape(latents[site]), jnp.result_type(latents[site])
        code = jnp.linspace(0.3, 0.7, max(jnp.size(latents[site]), 1)).reshape(shape).astype(dtype)
        played = evaluate_tasks(model, call, form, latents | {site: code})
        seen = {
            "noise": played.scale[0],
            "inclusion": jax.nn.sigmoid(played.log_odds[0]),
            "slab": played.slab[0],
        }
        # what is also a part of the location has no closed form
        plays[part] = (code, seen[part], agree(played.offset, base.offset))
        priors[part] = _prior(found[site])
    kernels = {site: _kernel_prior(found[site]) for site in kernel_sites}
    return Facts(base, jnp.all(jnp.stack(mixes)), plays, priors, kernels)


def _prior(site: dict[str, Any]) -> tuple[Any, Any]:
    """Scale of a HalfNormal prior, or concentrations of a Beta one."""
    base = None if site["type"] == "param" else unwrap(site["fn"])[0]
    if isinstance(base, dist.HalfNormal):
        return base.scale, 0.0
    if isinstance(base, dist.Beta):
        return base.concentration1, base.concentration0
    return jnp.inf, jnp.nan


def _kernel_prior(site: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Value, and location and scale of a LogNormal prior; NaN for another prior."""
    base, mask = unwrap(site["fn"])
    if type(base) is not dist.LogNormal or mask is not None or site["scale"] is not None:
        return site["value"], jnp.nan, jnp.nan
    shape = jnp.shape(site["value"])
    return site["value"], jnp.broadcast_to(base.loc, shape), jnp.broadcast_to(base.scale, shape)


def _assemble(functions: Functions, form: Form, facts: Facts, user: str) -> Tasks:
    value, offset, _, weight, *_ = facts.at
    if not np.all((weight == 0) | (weight == 1)):
        raise ValueError(
            f"{user}: {form.likelihood!r} is scaled. Beside latent functions an observation counts "
            "once or, masked, not at all."
        )
    seen = weight > 0
    if not seen.any():
        raise ValueError(
            f"{user}: {form.likelihood!r} has no observations: all of them are masked."
        )
    if not np.all(np.isfinite(np.where(seen, value - offset, 0))):
        raise ValueError(
            f"{user}: the observations of {form.likelihood!r} are not finite. Missing ones need "
            "`numpyro.handlers.mask`."
        )
    for axis, what in ((0, "tasks"), (1, "points")):
        empty = np.flatnonzero(~seen.any(axis=axis))
        if empty.size:
            shown = ", ".join(map(str, empty[:10])) + (", ..." if empty.size > 10 else "")
            warnings.warn(
                f"{user}: {empty.size} {what} of {form.likelihood!r} have no observation: {shown}. "
                "Their predictions are those of the prior or of their neighbours.",
                stacklevel=4,
            )
    form, hyper = _hyper(functions, form, facts, user)
    kernels = set(form.kernels)
    fixed = {k: jnp.asarray(x[0]) for k, x in facts.kernels.items() if k not in kernels}
    mu = functions.mean_at(functions.X)
    problem = multitask.problem(
        np.where(seen, value - offset, np.nan), kernel_of(functions), mu.shape[0], mu, hyper
    )._replace(held={}, log_density=jnp.asarray(facts.at.log_density, float))
    kinds = {template.kind for template in functions.templates}
    if kinds <= {"white", "zero"}:
        roughness: Any = Partial(multitask.no_roughness)
    else:
        roughness = multitask.roughness_of_inputs(jnp.asarray(functions.X, float))
    return Tasks(form, functions, fixed, problem, jnp.asarray(offset), roughness)


def _hyper(functions: Functions, form: Form, facts: Facts, user: str) -> tuple[Form, Hyper]:
    """Priors of the hyperparameters; a site that does not play its role alone loses it."""

    def refuse(what):
        raise ValueError(f"{user}: beside latent functions, {what}.")

    at, shared = facts.at, {"noise": False, "inclusion": True}
    if np.any(at.scale != at.scale[0]):
        refuse("the noise scale must be the same at all points of a task")
    if not np.allclose(at.slab, at.slab[0, 0], rtol=1e-5):
        refuse(f"all weights of {form.pair.name!r} must have the same slab scale")
    if not np.allclose(at.log_odds, at.log_odds[0], rtol=1e-5):
        refuse(f"all tasks in {form.pair.name!r} must have the same inclusion probabilities")
    played = []
    for part, site in form.roles:
        code, found, alone = facts.plays[part]
        single = np.size(code) == 1
        if alone and np.allclose(np.ravel(code), found[0] if single else found, rtol=1e-4):
            played.append((part, site))
            shared[part] = single and np.allclose(found, found[0])
    form = form._replace(
        roles=tuple(played),
        others=form.others + tuple(site for part, site in form.roles if (part, site) not in played),
    )
    roles = dict(played)
    noise, slab = (facts.priors[x][0] if x in roles else np.inf for x in ("noise", "slab"))
    included, excluded = facts.priors["inclusion"] if "inclusion" in roles else (1.0, 1.0)
    if np.any(np.isinf(included)):
        included = excluded = 1.0
    locs, scales = {}, {}
    for name, (value, loc, spread) in facts.kernels.items():
        free = name in form.kernels
        if free and np.any(np.isnan(spread)):
            refuse(f"the prior of {name!r} must be LogNormal")
        locs[name] = np.exp(loc) if free else value
        scales[name] = np.exp(spread) if free else np.ones_like(value)
    hyper = Hyper(
        noise=jnp.asarray(noise, float),
        slab=jnp.asarray(slab, float),
        included=jnp.asarray(included, float),
        excluded=jnp.asarray(excluded, float),
        theta_loc=gather(functions, locs),
        # padded entries get scale log(1) = 0: they are fixed
        theta_scale=gather(functions, scales),
        shared_noise=jnp.asarray(shared["noise"]),
        shared_inclusion=jnp.asarray(shared["inclusion"]),
    )
    return form, hold(hyper, form, at)


def hold(hyper: Hyper, form: Form, at: Values) -> Hyper:
    """Fix what no site with a role tells."""
    roles = dict(form.roles)
    return hyper._replace(
        fixed_noise=jnp.where("noise" in roles, jnp.nan, at.scale[0]),
        fixed_slab=jnp.where("slab" in roles, jnp.nan, at.slab[0, 0]),
        fixed_inclusion=jnp.where("inclusion" in roles, jnp.nan, jax.nn.sigmoid(at.log_odds[0])),
    )


@partial(jax.jit, static_argnums=(0, 1, 2))
def _hold(model, form, static, dynamic, problem, held) -> tuple[Problem, Any]:
    return problem_at(model, merge(static, dynamic), form, problem, held)


def problem_at(
    model: Any, call: Any, form: Form, problem: Problem, held: dict[str, Any]
) -> tuple[Problem, Any]:
    """The problem and the offset where the other sites have the values ``held``."""
    at = evaluate_tasks(model, call, form, held)
    seen = at.weight > 0
    hyper = multitask.as_arrays(hold(problem.hyper, form, at), problem.Y)
    moved = problem._replace(
        Y=jnp.where(seen, at.value - at.offset, 0).astype(problem.Y.dtype),
        hyper=hyper,
        held=held,
        log_density=at.log_density.astype(problem.Y.dtype),
    )
    return moved, at.offset


class TaskReader:
    """Reads a model once for each data set.

    :param model: the model.
    :param user: who reads, for the error messages.
    """

    def __init__(self, model: Any, user: str) -> None:
        self.model = model
        self.user = user
        self._last = LastCall()

    def __call__(self, args: tuple, kwargs: dict) -> Tasks:
        """Read the model at these arguments, or return what was read before."""

        def compute():
            moved_args, moved_kwargs = on_device((args, kwargs))
            return read_tasks(self.model, moved_args, moved_kwargs, self.user)

        return self._last(compute, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "user": self.user}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


# Fits


def starts(tasks: Tasks, key: Any, problem: Problem, state: State, number: int) -> list[State]:
    """The given state, the singular vectors of the tasks, then random ones."""
    found = [state]
    if number > 1:
        found.append(multitask.start_svd(problem, state.theta))
    for one in random.split(key, max(number - 2, 0)):
        found.append(multitask.start_random(one, problem, state.theta))
    return found


def steps(
    tasks: Tasks,
    problem: Problem,
    state: State,
    num_steps: int,
    plain: bool,
    improve: multitask.Improve | None,
) -> Iterator[multitask.Stage]:
    """At most ``num_steps`` steps: sweeps, and rounds of moves unless ``plain``."""
    left, size = num_steps, 12
    if not plain and left >= size:
        for stage in multitask.stages(problem, state, tasks.roughness, size, improve=improve):
            problem, state = stage.problem, stage.state
            left -= stage.bounds.size
            yield stage
            if left < size:
                break
    sweep = multitask.sweep_plain if plain else multitask.sweep
    while left > 0:
        problem, state, bounds = multitask.advance(problem, state, min(size, left), improve, sweep)
        left -= bounds.size
        yield multitask.Stage(problem, state, bounds, last=True)
