# SPDX-License-Identifier: Apache-2.0
"""Reads a model of latent functions into :mod:`numpyro_spikeslab.multitask`, or says why it cannot.

A model fits when one observed Normal site has the location ``offset + W phi``, with weights ``W``
from :func:`~numpyro_spikeslab.spike_slab` and functions ``phi`` from
:func:`~numpyro_spikeslab.latent_functions`, and when its other sites are noise scales, an inclusion
probability, a slab scale or parameters of kernels.
"""

from collections.abc import Iterator
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
from numpyro_spikeslab.arguments import (
    are_concrete,
    merge,
    on_device,
    outside_transformations,
    partition,
)
from numpyro_spikeslab.latent import Template
from numpyro_spikeslab.multitask import Hyper, Problem, State
from numpyro_spikeslab.primitives import FUNCTIONS_MARK, Functions
from numpyro_spikeslab.structure import (
    Pair,
    _dependents,
    _find_likelihood,
    _is_tractable,
    _normal,
    _same,
    abstract_trace,
    agree,
    find_pairs,
    slab_prior,
    trace_at,
    unwrap,
)


class Tasks(NamedTuple):
    """What reading a model gives.

    - **pair** - its weights.
    - **functions** - its latent functions.
    - **roles** - names of the sites that are ``"noise"``, ``"inclusion"`` and ``"slab"``.
    - **fixed** - values of the kernel parameters that are observed.
    - **problem** - the arrays.
    - **roughness** - what orders the functions in moves.
    - **offset** - location of the observations without functions, shape (N, Q).
    """

    pair: Pair
    functions: Functions
    roles: dict[str, str]
    fixed: dict[str, Any]
    problem: Problem
    roughness: Any
    offset: Float[Array, "N Q"]

    @property
    def free_sites(self) -> tuple[str, ...]:
        return tuple(name for name in self.functions.site_names if name not in self.fixed)

    def theta(self, sites: dict[str, Any]) -> Float[Array, "M P"]:
        """Logs of the kernels' parameters, padded with zeros where there are fewer."""
        return gather(self.functions, sites)

    def sites(self, theta: Float[Array, "M P"]) -> dict[str, Any]:
        """The inverse of :meth:`theta`."""
        return scatter(self.functions, theta)

    def pack(self, params: dict[str, Any], prefix: str) -> State:
        """The state that a guide's parameters stand for."""
        pair, name = self.pair, self.functions.name
        M, hyper = len(self.functions.templates), self.problem.hyper
        probs, loc, scale = (
            jnp.reshape(params[f"{pair.name}_{prefix}_{part}"], (-1, M))
            for part in ("probs", "loc", "scale")
        )

        def value(part, default):
            site = self.roles.get(part)
            return default if site is None else params[f"{site}_{prefix}_loc"]

        noise = value("noise", hyper.fixed_noise)
        theta = self.theta(
            self.fixed | {site: params[f"{site}_{prefix}_loc"] for site in self.free_sites}
        )
        alpha, h = params[f"{name}_{prefix}_precision"], params[f"{name}_{prefix}_linear"]
        mean, var, kl = moments(self.problem, theta, alpha, h)
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
            sigma2=jnp.broadcast_to(noise, probs.shape[:1]) ** 2,
            pi=jnp.asarray(value("inclusion", hyper.fixed_inclusion), probs.dtype),
            sigma_w2=jnp.asarray(value("slab", hyper.fixed_slab), probs.dtype) ** 2,
        )

    def unpack(self, state: State, params: dict[str, Any], prefix: str) -> dict[str, Any]:
        """A guide's parameters for a state; ``params`` tells their shapes."""
        pair, name = self.pair, self.functions.name
        new = {
            f"{pair.name}_{prefix}_probs": state.gamma,
            f"{pair.name}_{prefix}_loc": state.mu,
            f"{pair.name}_{prefix}_scale": jnp.sqrt(state.v),
            f"{name}_{prefix}_precision": state.alpha,
            f"{name}_{prefix}_linear": state.h,
        }
        sites = self.sites(state.theta)
        new |= {f"{site}_{prefix}_loc": sites[site] for site in self.free_sites}
        values = {
            "noise": jnp.sqrt(state.sigma2),
            "inclusion": state.pi,
            "slab": jnp.sqrt(state.sigma_w2),
        }
        for part, site in self.roles.items():
            known = f"{site}_{prefix}_loc"
            # noise that all tasks share
            single = jnp.size(params[known]) == 1 and jnp.size(values[part]) > 1
            new[known] = values[part][:1] if single else values[part]
        return {k: jnp.reshape(x, params[k].shape).astype(params[k].dtype) for k, x in new.items()}

    def predict(self, params: dict[str, Any], prefix: str, X_new: Any) -> tuple[Any, Any, Any]:
        """Mean and variance of the noise-free tasks at new inputs, and the noise variances."""
        X, user = self.functions.X, "predict"
        if jnp.ndim(X_new) != jnp.ndim(X) or jnp.shape(X_new)[1:] != jnp.shape(X)[1:]:
            raise ValueError(
                f"{user}: X_new has shape {jnp.shape(X_new)} and the model's inputs have shape "
                f"{jnp.shape(X)}; they must have the same width."
            )
        if not np.all(np.isfinite(np.asarray(X_new, float))):
            raise ValueError(f"{user}: X_new is not finite.")
        offset = np.asarray(self.offset)
        if np.any(offset != offset[0]):
            raise ValueError(
                f"{user}: the location of the tasks without functions is not the same at all "
                "inputs, so it is not known at new ones. Subtract it from the responses."
            )
        state = self.pack(params, prefix)
        sites = self.sites(state.theta)
        K_star, k_star = [], []
        for m, template in enumerate(self.functions.templates):
            values = self.functions.values(sites, m)
            K_star.append(template.cross(values, X, X_new).T)
            k_star.append(template.variance(values, X_new))
        mean, variance = multitask.predict(
            self.problem,
            state,
            jnp.stack(K_star),
            jnp.stack(k_star),
            self.functions.mean_at(X_new),
        )
        return mean + self.offset[0], variance, state.sigma2


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


def _covariance(template: Any, X: Any, uniform: bool, theta: Any) -> Any:
    covariance = template.covariance(template.split(theta), X)
    covariance = covariance if uniform else latent.Dense(latent.as_matrix(covariance))
    # else XLA evaluates the kernel again in each product with the matrix
    return jax.lax.optimization_barrier(latent.add_jitter(covariance))


def _covariance_uniform(template: Any, X: Any, theta: Any) -> Any:
    return _covariance(template, X, True, theta)


def _covariance_dense(template: Any, X: Any, theta: Any) -> Any:
    return _covariance(template, X, False, theta)


def kernel_of(functions: Functions) -> Any:
    """The kernels as :func:`multitask.problem` takes them."""
    X = jnp.asarray(functions.X, float)
    function = _covariance_uniform if functions.is_uniform else _covariance_dense
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


def has_functions(trace: dict[str, Any]) -> bool:
    """Whether a trace has latent functions that are not observed."""
    return bool(find_functions(trace))


def find_functions(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the sites of latent functions."""
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and FUNCTIONS_MARK in site["infer"] and not site["is_observed"]
    )


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

    value: Any
    offset: Any
    scale: Any
    weight: Any
    log_odds: Any
    slab: Any
    mixes: Any
    plays: dict[str, Any]
    priors: dict[str, Any]
    kernels: dict[str, Any]


DIRECT, TRANSPOSED = "Q N", "N Q"


def _flat_location(site: dict[str, Any]) -> Any:
    return _normal(site, False)


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
    trace = abstract_trace(model, args, kwargs)
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
    M, N = len(functions.templates), functions.num_inputs
    if pair.shape[-1:] != (M,) or len(pair.shape) > 2:
        raise ValueError(
            f"{user}: the weights {pair.name!r} have shape {pair.shape}, expected (Q, {M}) for Q "
            f"tasks and the {M} functions of {name!r}."
        )
    Q = pair.size // M
    own = {pair.spike, pair.slab, name}
    shapes = {
        site: jax.ShapeDtypeStruct(jnp.shape(x["value"]), jnp.result_type(x["value"]))
        for site, x in trace.items()
        if site in own or x["type"] == "param" or (x["type"] == "sample" and not x["is_observed"])
    }
    dependents = _dependents(model, args, kwargs, shapes)
    likelihood = _find_likelihood(dependents, trace, own, user)
    others = [site for site in shapes if site not in own]
    kernel_sites = functions.site_names
    roles = _find_roles(
        [site for site in others if site not in kernel_sites],
        trace, dependents, likelihood, pair, name, user,
    )  # fmt: skip
    shape = jnp.shape(trace[likelihood]["value"])
    layouts = {DIRECT: (Q, N), TRANSPOSED: (N, Q)}
    fits = [k for k, x in layouts.items() if shape == x or (Q == 1 and shape == (N,))]
    static, dynamic = partition((args, kwargs))

    def run(dynamic):
        args, kwargs = merge(static, dynamic)
        return _find_facts(
            model, args, kwargs, trace, pair, functions, likelihood, others, roles, fits
        )

    facts = jax.device_get(jax.jit(run)(dynamic))
    layout = next((k for k, mixes in zip(fits, facts.mixes, strict=True) if mixes), None)
    if layout is None:
        raise ValueError(
            f"{user}: the location of {likelihood!r}, of shape {shape}, is not `offset + "
            f"{pair.name} @ {name}` (or its transpose) with {pair.name!r} of shape {(Q, M)} and "
            f"{name!r} of shape {(M, N)}."
        )

    def tasks_last(x):
        return np.asarray(x).reshape((Q, N)).T if layout == DIRECT else np.reshape(x, (N, Q))

    return _assemble(
        pair, functions, roles, facts, tasks_last, likelihood, kernel_sites, others, user
    )


def _find_roles(sites, trace, dependents, likelihood, pair, name, user) -> dict[str, str]:
    targets = {"noise": {likelihood}, "inclusion": {pair.spike}, "slab": {pair.slab}}
    roles: dict[str, str] = {}
    for site in sites:
        fed = {other for other, sources in dependents.items() if site in sources} - {site}
        part = next((part for part, target in targets.items() if fed == target), None)
        if part is None or part in roles or not _is_tractable(trace[site], part):
            raise ValueError(
                f"{user}: beside latent functions, a latent site must be the noise scale "
                "(HalfNormal prior), the inclusion probability (Beta prior), the slab scale "
                f"(HalfNormal prior) or a kernel's parameter; {site!r} is none of them. Condition "
                "it on a value."
            )
        roles[part] = site
    return roles


def _find_facts(
    model, args, kwargs, trace, pair, functions, likelihood, others, roles, fits
) -> Facts:
    """Run the model at generic values."""
    M, N = len(functions.templates), functions.num_inputs
    Q = pair.size // M
    with handlers.block():
        seeded = handlers.seed(model, random.key(0))
        seeded = handlers.substitute(seeded, substitute_fn=init_to_uniform)
        found = handlers.trace(seeded).get_trace(*args, **kwargs)
    latents = {name: found[name]["value"] for name in others}
    keys = random.split(random.key(1), 4)

    def at(W, phi, **changed):
        values = {
            pair.spike: jnp.ones(pair.shape, int),
            pair.slab: W.reshape(pair.shape),
            functions.name: phi,
        }
        return trace_at(model, args, kwargs, latents | values | changed)

    def flat(trace):
        return _normal(trace[likelihood], False)

    zero, phi = jnp.zeros((Q, M)), random.normal(keys[0], (M, N))
    base = at(zero, phi)
    value, offset, scale, weight = flat(base)
    mixes = []
    moves = []
    for factor, key_w, key_phi in ((1.0, keys[1], keys[0]), (-3.0, keys[2], keys[3])):
        W, moved = factor * random.normal(key_w, (Q, M)), random.normal(key_phi, (M, N))
        moves.append((flat(at(W, moved))[1] - offset, W @ moved))
    for layout in fits:
        good = [
            agree(moved, jnp.ravel(product if layout == DIRECT else product.T))
            for moved, product in moves
        ]
        mixes.append(jnp.all(jnp.stack(good)))
    plays, priors = {}, {}
    for part, site in roles.items():
        shape, dtype = jnp.shape(latents[site]), jnp.result_type(latents[site])
        code = jnp.linspace(0.3, 0.7, max(jnp.size(latents[site]), 1)).reshape(shape).astype(dtype)
        played = at(zero, phi, **{site: code})
        log_odds, slab = slab_prior(played, pair)
        seen = {"noise": flat(played)[2], "inclusion": jax.nn.sigmoid(log_odds), "slab": slab}
        # what is also a part of the location has no closed form
        plays[part] = (code, seen[part], agree(flat(played)[1], offset))
        priors[part] = _prior(base[site])
    kernels = {site: _kernel_prior(base[site]) for site in functions.site_names}
    log_odds, slab = slab_prior(base, pair)
    return Facts(value, offset, scale, weight, log_odds, slab, mixes, plays, priors, kernels)


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


def _assemble(
    pair, functions, roles, facts, tasks_last, likelihood, kernel_sites, others, user
) -> Tasks:
    Y, weight, scale = map(tasks_last, (facts.value, facts.weight, facts.scale))
    offset = tasks_last(facts.offset)
    if not np.all((weight == 0) | (weight == 1)):
        raise ValueError(
            f"{user}: {likelihood!r} is scaled. Beside latent functions an observation counts once "
            "or, masked, not at all."
        )
    seen = weight > 0
    if not seen.any():
        raise ValueError(f"{user}: {likelihood!r} has no observations: all of them are masked.")
    if not np.all(np.isfinite(np.where(seen, Y - offset, 0))):
        raise ValueError(
            f"{user}: the observations of {likelihood!r} are not finite. Missing ones need "
            "`numpyro.handlers.mask`."
        )
    for axis, what in ((0, "tasks"), (1, "points")):
        empty = np.flatnonzero(~seen.any(axis=axis))
        if empty.size:
            shown = ", ".join(map(str, empty[:10])) + (", ..." if empty.size > 10 else "")
            warnings.warn(
                f"{user}: {empty.size} {what} of {likelihood!r} have no observation: {shown}.",
                stacklevel=4,
            )
    hyper = _hyper(pair, functions, roles, facts, tasks_last, scale, kernel_sites, others, user)
    fixed = {k: jnp.asarray(facts.kernels[k][0]) for k in kernel_sites if k not in others}
    mu = functions.mean_at(functions.X)
    kinds = {template.kind for template in functions.templates}
    problem = multitask.problem(
        np.where(seen, Y - offset, np.nan), kernel_of(functions), mu.shape[0], mu, hyper
    )
    if kinds <= {"white", "zero"}:
        roughness: Any = Partial(multitask.no_roughness)
    else:
        roughness = multitask.roughness_of_inputs(jnp.asarray(functions.X, float))
    return Tasks(pair, functions, roles, fixed, problem, roughness, jnp.asarray(offset))


def _hyper(pair, functions, roles, facts, tasks_last, scale, kernel_sites, others, user) -> Hyper:
    def refuse(what):
        raise ValueError(f"{user}: beside latent functions, {what}.")

    if np.any(scale != scale[0]):
        refuse("the noise scale must be the same at all points of a task")
    for name, x in (("inclusion probability", facts.log_odds), ("slab scale", facts.slab)):
        if not np.allclose(x, np.ravel(x)[0], rtol=1e-5):
            refuse(f"all weights of {pair.name!r} must have the same {name}")
    shared = False
    for part, (code, found, alone) in facts.plays.items():
        if not alone:
            refuse(f"{roles[part]!r} must not be a part of the location")
        found = tasks_last(found)[0] if part == "noise" else np.ravel(found)[0]
        shared = shared or (part == "noise" and np.size(code) == 1 and np.size(found) > 1)
        if not np.allclose(np.ravel(code), np.unique(found) if shared else found, rtol=1e-4):
            refuse(f"{roles[part]!r} must be the {part} scale or probability itself")
    noise, slab = (facts.priors.get(part, (np.inf, 0.0))[0] for part in ("noise", "slab"))
    included, excluded = facts.priors.get("inclusion", (1.0, 1.0))
    if np.isinf(included):
        included = excluded = 1.0
    locs, scales = {}, {}
    for name in kernel_sites:
        value, loc, spread = facts.kernels[name]
        if name in others and np.any(np.isnan(spread)):
            refuse(f"the prior of {name!r} must be LogNormal")
        free = name in others
        locs[name] = np.exp(loc) if free else value
        scales[name] = np.exp(spread) if free else np.ones_like(value)
    return Hyper(
        noise=jnp.asarray(np.max(noise)),
        slab=jnp.asarray(slab),
        included=jnp.asarray(included, float),
        excluded=jnp.asarray(excluded, float),
        theta_loc=gather(functions, locs),
        # padded entries get scale log(1) = 0: they are fixed
        theta_scale=gather(functions, scales),
        fixed_noise=jnp.asarray(np.full(scale.shape[1], np.nan) if "noise" in roles else scale[0]),
        fixed_slab=jnp.asarray(np.nan if "slab" in roles else np.ravel(facts.slab)[0]),
        fixed_inclusion=jnp.asarray(
            np.nan if "inclusion" in roles else 1 / (1 + np.exp(-np.ravel(facts.log_odds)[0]))
        ),
        shared_noise=jnp.asarray(shared),
    )


class TaskReader:
    """Reads a model once for each data set.

    :param model: the model.
    :param user: who reads, for the error messages.
    """

    def __init__(self, model: Any, user: str) -> None:
        self.model = model
        self.user = user
        self._key: Any = None
        self._last: Any = None

    def __call__(self, args: tuple, kwargs: dict) -> Tasks:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        key = (leaves, treedef, jnp.result_type(float))
        if self._key is None or not _same(self._key, key):
            args, kwargs = on_device((args, kwargs))
            self._key, self._last = key, read_tasks(self.model, args, kwargs, self.user)
        return self._last

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "user": self.user}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]


# Fits


def starts(tasks: Tasks, key: Any, state: State, number: int) -> Iterator[State]:
    """The given state, the singular vectors of the tasks, then random ones."""
    theta = state.theta
    yield state
    if number > 1:
        yield multitask.start_svd(tasks.problem, theta)
    for one in random.split(key, max(number - 2, 0)):
        yield multitask.start_random(one, tasks.problem, theta)


def steps(tasks: Tasks, state: State, num_steps: int, plain: bool) -> Iterator[multitask.Stage]:
    """At most ``num_steps`` steps: sweeps, and rounds of moves unless ``plain``."""
    left, size = num_steps, 12
    if not plain and left >= size:
        for stage in multitask.stages(tasks.problem, state, tasks.roughness, size):
            state = stage.state
            left -= stage.bounds.size
            yield stage
            if left < size:
                break
    sweep = multitask.sweep_plain if plain else multitask.sweep
    while left > 0:
        state, bounds = multitask.run(tasks.problem, state, min(size, left), sweep)
        left -= bounds.size
        yield multitask.Stage(state, bounds, last=True)
