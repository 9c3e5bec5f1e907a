# SPDX-License-Identifier: Apache-2.0
"""Reads weights that mix latent functions, for the samplers, or says why it cannot.

One observed Normal site must have the location ``offset + W phi``, with weights ``W`` from
:func:`~numpyro_spikeslab.spike_slab` and functions ``phi`` from
:func:`~numpyro_spikeslab.latent_functions`. Noise, priors and offset may be whatever they like:
samplers take them at the current values of all other sites.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import init_to_uniform

from numpyro_spikeslab.distributions import GaussianFunctions
from numpyro_spikeslab.paired import Prior
from numpyro_spikeslab.primitives import FUNCTIONS_MARK, Functions
from numpyro_spikeslab.reading.call import (
    are_concrete,
    merge,
    outside_transformations,
    partition,
    stand_ins,
)
from numpyro_spikeslab.structure import (
    Pair,
    Reader,
    Reading,
    _dependents,
    _is_tractable,
    _normal,
    abstract_trace,
    agree,
    find_function_sites,
    slab_prior,
    trace_at,
    unwrap,
)


class Mixture(NamedTuple):
    """Facts about a model that do not change with the values of its sites.

    - **pair** - its weights, Q tasks by M functions.
    - **name** - name of its latent functions.
    - **kernel_sites** - names of the kernels' parameters that are latent.
    - **likelihood** - name of the observed site.
    - **num_tasks**, **num_functions**, **num_inputs** - Q, M, N.
    - **tasks_first** - whether the observations are (Q, N), not (N, Q).
    - **noise** - name of the site that is the noise scale itself, one for each task or for all.
    - **inclusions**, **slabs** - for each site that is the inclusion probabilities or the slab
      scales themselves, which of its entries each weight takes; beyond the last if it takes none.
    - **complete** - whether all tasks miss the same observations and noise and counts do not change
      along a task, so that all tasks have one Gram matrix up to a factor.
    """

    pair: Pair
    name: str
    kernel_sites: tuple[str, ...]
    likelihood: str
    num_tasks: int
    num_functions: int
    num_inputs: int
    tasks_first: bool
    noise: str | None
    inclusions: dict[str, Any]
    slabs: dict[str, Any]
    complete: bool

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the sites that are noise, inclusion probabilities or slab scales."""
        noise = () if self.noise is None else (self.noise,)
        return (*noise, *self.inclusions, *self.slabs)

    def tasks_last(self, x: Any) -> Any:
        """The observations as (N, Q)."""
        Q, N = self.num_tasks, self.num_inputs
        return x.reshape(Q, N).T if self.tasks_first else x.reshape(N, Q)


class View(NamedTuple):
    """The model at given values of its sites.

    - **Y** - observations less the offset, zero where they are masked.
    - **weight** - how often each counts.
    - **scale** - their noise.
    - **prior** - prior of the weights, (Q, M).
    - **functions** - what defines the prior of the functions.
    - **trace** - the rest.
    """

    Y: Float[Array, "N Q"]
    weight: Float[Array, "N Q"]
    scale: Float[Array, "N Q"]
    prior: Prior
    functions: Functions
    trace: dict[str, Any]

    @property
    def precision(self) -> Float[Array, "N Q"]:
        return self.weight / self.scale**2


def view(mixture: Mixture, model: Any, args: tuple, kwargs: dict, values: dict[str, Any]) -> View:
    """Run the model once, at the given values and without its functions."""
    pair = mixture.pair
    nothing = {pair.spike: jnp.zeros(pair.shape, int), pair.slab: jnp.zeros(pair.shape)}
    trace = trace_at(model, args, kwargs, values | nothing)
    value, loc, scale, weight = map(
        mixture.tasks_last, _normal(trace[mixture.likelihood], shared_scale=False)
    )
    log_odds, slab_scale = (
        x.reshape(mixture.num_tasks, mixture.num_functions) for x in slab_prior(trace, pair)
    )
    Y = jnp.where(weight > 0, value - loc, 0)
    functions = trace[mixture.name]["infer"][FUNCTIONS_MARK]
    return View(Y, weight, scale, Prior(log_odds, slab_scale**2), functions, trace)


def gram(
    mixture: Mixture, at: View, phi: Float[Array, "M N"]
) -> tuple[Float[Array, "#Q M M"], Float[Array, "Q M"], Float[Array, " Q"]]:
    """What :func:`~numpyro_spikeslab.paired.task_sweep` needs: products and noise precisions."""
    if mixture.complete:
        z = at.weight[:, 0]
        return (phi * z @ phi.T)[None], (at.Y.T * z) @ phi.T, at.scale[0] ** -2.0
    M, N = phi.shape
    products = (phi[:, None] * phi).reshape(M * M, N)
    G = (products @ at.precision).T.reshape(-1, M, M)
    return G, (at.precision * at.Y).T @ phi.T, jnp.ones(at.Y.shape[1])


def read_mixture(model: Any, reading: Reading) -> Mixture | None:
    """Read a model, or return `None` if its weights do something else than mix functions.

    :param reading: of the model, with concrete arguments.
    """
    args, kwargs, structure = reading[:3]
    trace = abstract_trace(model, args, kwargs)
    names = find_function_sites(trace)
    if len(names) != 1 or len(structure.pairs) != 1:
        return None
    (name,), (pair,) = names, structure.pairs
    functions = trace[name]["infer"][FUNCTIONS_MARK]
    M, N = len(functions.templates), functions.num_inputs
    if jnp.shape(trace[name]["value"]) != (M, N) or pair.shape[-1:] != (M,):
        return None
    Q = pair.size // M
    shape = jnp.shape(trace[structure.likelihood]["value"])
    layouts = [first for first, x in ((False, (N, Q)), (True, (Q, N))) if shape == x]
    if Q == 1 and shape == (N,):
        layouts = [False]
    own = {pair.spike, pair.slab}
    shapes = {
        site: jax.ShapeDtypeStruct(jnp.shape(x["value"]), jnp.result_type(x["value"]))
        for site, x in trace.items()
        if site in own or site in structure.others
    }
    fed: dict[str, set[str]] = {site: set() for site in shapes}
    for target, sources in _dependents(model, args, kwargs, shapes).items():
        for site in sources & set(shapes):
            fed[site] |= {target} - {site}
    kernel_sites = tuple(
        site for site in functions.site_names if site in structure.others and fed[site] == {name}
    )
    noises = [
        site
        for site in structure.others
        if fed[site] == {structure.likelihood}
        and jnp.size(trace[site]["value"]) in (1, Q)
        and _is_tractable(trace[site], "noise")
        and trace[site]["type"] == "sample"
    ]
    parts: dict[str, dict[str, Any]] = {"inclusion": {}, "slab": {}, "noise": {}}
    for role in structure.roles:
        if trace[role.site]["type"] == "sample":
            parts[role.part][role.site] = reading.indices[role.site]
    mixture = Mixture(
        pair=pair,
        name=name,
        kernel_sites=kernel_sites,
        likelihood=structure.likelihood,
        num_tasks=Q,
        num_functions=M,
        num_inputs=N,
        tasks_first=False,
        noise=None,
        inclusions=parts["inclusion"],
        slabs=parts["slab"],
        complete=False,
    )
    static, dynamic = partition((args, kwargs))

    def run(dynamic):
        args, kwargs = merge(static, dynamic)
        return _find_facts(mixture, model, args, kwargs, structure, layouts, noises)

    facts = jax.device_get(jax.jit(run)(dynamic))
    found = [first for first, mixes in zip(layouts, facts.mixes, strict=True) if mixes]
    if not found:
        return None
    mixture = mixture._replace(tasks_first=found[0])
    scale, weight = mixture.tasks_last(facts.scale), mixture.tasks_last(facts.weight)
    noise = next((k for k in noises if _plays(mixture, *facts.plays[k])), None)
    complete = bool(np.all(scale == scale[0]) and np.all(weight == weight[:, :1]))
    return mixture._replace(noise=noise, complete=complete)


class Facts(NamedTuple):
    """What only running a model tells, at generic values of its sites.

    - **mixes** - for each layout, whether the location is ``offset + W phi`` and the noise does not
      depend on ``phi``.
    - **scale**, **weight** - noise and weight of each observation.
    - **plays** - for each site that may be the noise, the values it was given, the noise that
      there was then, and whether nothing else has changed.
    """

    mixes: list[Any]
    scale: Any
    weight: Any
    plays: dict[str, Any]


def _find_facts(mixture, model, args, kwargs, structure, layouts, noises) -> Facts:
    pair, Q, M, N = mixture.pair, mixture.num_tasks, mixture.num_functions, mixture.num_inputs
    with handlers.block():
        seeded = handlers.seed(model, random.key(0))
        seeded = handlers.substitute(seeded, substitute_fn=init_to_uniform)
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    latents = {site: trace[site]["value"] for site in structure.others}
    fixed = trace[mixture.name]["value"] if trace[mixture.name]["is_observed"] else None

    def at(W, phi, **changed):
        values = {
            pair.spike: jnp.ones(pair.shape, int),
            pair.slab: W.reshape(pair.shape),
            mixture.name: phi,
        }
        found = trace_at(model, args, kwargs, latents | values | changed)
        return _normal(found[mixture.likelihood], shared_scale=False)

    keys = random.split(random.key(1), 4)
    zero = jnp.zeros((Q, M))
    phis = [random.normal(key, (M, N)) if fixed is None else fixed for key in keys[:2]]
    _, offset, scale, weight = at(zero, phis[0])
    moves, fixed_noise = [], jnp.ones((), bool)
    for factor, phi, key in zip((1.0, -3.0), phis, keys[2:], strict=True):
        W = factor * random.normal(key, (Q, M))
        _, moved, *given = at(W, phi)
        moves.append((moved - offset, W @ phi))
        fixed_noise &= agree(given[0], scale) & jnp.all(given[1] == weight)
    mixes = [
        fixed_noise
        & jnp.all(jnp.stack([agree(x, jnp.ravel(p if first else p.T)) for x, p in moves]))
        for first in layouts
    ]
    plays = {}
    for site in noises:
        shape, dtype = jnp.shape(latents[site]), jnp.result_type(latents[site])
        # values that no model has by chance
        code = jnp.linspace(0.31830988, 0.70710678, max(jnp.size(latents[site]), 1), dtype=dtype)
        _, moved, seen, counts = at(zero, phis[0], **{site: code.reshape(shape)})
        plays[site] = (code, seen, agree(moved, offset) & jnp.all(counts == weight))
    return Facts(mixes, scale, weight, plays)


def _plays(mixture: Mixture, code: Any, seen: Any, alone: Any) -> bool:
    """Whether the noise of each task is its entry of the site, or the only one there is."""
    return bool(alone) and np.allclose(mixture.tasks_last(seen), np.ravel(code), rtol=1e-5)


def check_functions(mixture: Mixture, model: Any, args: tuple, kwargs: dict, user: str) -> None:
    """Whether the functions and their kernels can be drawn.

    :raises ValueError: if not; the message names the site and the remedy.
    """
    trace = abstract_trace(model, args, kwargs)
    site = trace[mixture.name]
    base, mask = unwrap(site["fn"])
    if (
        type(base) not in (dist.Normal, dist.MultivariateNormal, GaussianFunctions)
        or mask is not None
        or site["scale"] is not None
    ):
        raise ValueError(
            f"{user}: the prior of the latent functions {mixture.name!r} must be Gaussian, neither "
            f"masked nor scaled, got {type(site['fn']).__name__}. Leave it to latent_functions."
        )
    value = jax.ShapeDtypeStruct(jnp.shape(site["value"]), jnp.result_type(site["value"]))
    fed = _dependents(model, args, kwargs, {mixture.name: value})
    more = [x for x, sources in fed.items() if mixture.name in sources]
    more = [x for x in more if x not in (mixture.name, mixture.likelihood)]
    if more:
        raise ValueError(
            f"{user}: besides {mixture.likelihood!r}, {more} depend on the latent functions "
            f"{mixture.name!r}, which would be drawn as if they did not. Use NUTS."
        )
    functions = site["infer"][FUNCTIONS_MARK]
    for name in functions.site_names:
        if name not in trace or trace[name]["type"] != "sample":
            raise ValueError(
                f"{user}: the kernel parameter {name!r} of {mixture.name!r} is not a sample site; "
                "it has been reparameterised or set. Leave it latent, or condition on it."
            )
        if trace[name]["is_observed"]:
            continue
        base, mask = unwrap(trace[name]["fn"])
        if type(base) is not dist.LogNormal or mask is not None or trace[name]["scale"] is not None:
            raise ValueError(
                f"{user}: the prior of the kernel parameter {name!r} must be LogNormal, neither "
                f"masked nor scaled, got {type(trace[name]['fn']).__name__}."
            )
        if name not in mixture.kernel_sites:
            raise ValueError(
                f"{user}: the kernel parameter {name!r} is shared with something else than the "
                f"functions {mixture.name!r}, so it cannot be drawn with them. Condition on it."
            )


class MixtureReader:
    """Reads a model once for each data set.

    :param read: what reads the model's structure.
    """

    def __init__(self, read: Reader) -> None:
        self.read = read
        self._last: Any = None

    def __call__(
        self, args: tuple, kwargs: dict, fixed: frozenset[str] = frozenset()
    ) -> Mixture | None:
        """The mixture that the model is, or `None`.

        :param fixed: names of sites whose values another kernel holds.
        """
        model = self.read.model
        known = are_concrete((args, kwargs))
        with outside_transformations(()):
            args, kwargs = stand_ins((args, kwargs))
            trace = abstract_trace(model, args, kwargs)
            if not find_function_sites(trace):
                return None
            reading = self.read(args, kwargs, fixed)
            # the same arguments give the same reading
            if self._last is None or self._last[0] is not reading:
                self._last = (reading, read_mixture(model, reading))
        mixture = self._last[1]
        # of data that are traced nobody knows what is missing
        return mixture if known or mixture is None else mixture._replace(complete=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}
