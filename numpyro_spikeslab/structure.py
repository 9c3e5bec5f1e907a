# SPDX-License-Identifier: Apache-2.0
"""Reads a model into the arrays of :mod:`numpyro_spikeslab.paired`, or says why it cannot.

A model fits when, given its other latent sites, one observed Normal site has a location that is
affine in the spike-and-slab weights. The weights are found by the marks that
:func:`~numpyro_spikeslab.spike_slab` leaves in the ``infer`` dictionaries of its sites; the design
that multiplies them is found by linearising the location.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Num
import numpy as np

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.gibbs import subsample_plate_sizes
from numpyro.ops.provenance import eval_provenance
from numpyro.util import not_jax_tracer

from numpyro_spikeslab.paired import BLOCK_SIZE, Design, Prior, block_design
from numpyro_spikeslab.primitives import FUNCTIONS_MARK, MARK
from numpyro_spikeslab.reading.call import (
    LastCall,
    are_concrete,
    merge,
    on_device,
    outside_transformations,
    partition,
)


class Pair(NamedTuple):
    """Name and shape of the weights of one :func:`~numpyro_spikeslab.spike_slab`."""

    name: str
    shape: tuple[int, ...]

    @property
    def spike(self) -> str:
        return f"{self.name}_spike"

    @property
    def slab(self) -> str:
        return f"{self.name}_slab"

    @property
    def size(self) -> int:
        return prod(self.shape)


class Role(NamedTuple):
    """A site whose values are the noise scale, inclusion probabilities or slab scales themselves.

    - **site** - its name.
    - **part** - ``"noise"``, ``"inclusion"`` or ``"slab"``.
    - **pairs** - names of the pairs whose inclusion or slab it is.
    """

    site: str
    part: str
    pairs: tuple[str, ...]


class Source(NamedTuple):
    """Which constant of a linearised map is its matrix, and whether features are its columns."""

    position: int
    transposed: bool


@dataclass(frozen=True)
class Structure:
    """Facts about a model that do not change with the values of its latent sites.

    - **pairs** - its spike-and-slab weights; flattened and joined they are the P coordinates.
    - **likelihood** - name of the observed Normal site.
    - **others** - names of the other latent sample sites and of the model's params.
    - **shared_scale** - whether all observations share one noise scale.
    - **constant_design** - whether the whitened design depends on data alone.
    - **sources** - for each pair, where its columns of the design are among the constants of the
      linearised location, `None` where they are not known to be there.
    - **roles** - those of the other sites whose maximum may have a closed form.
    """

    pairs: tuple[Pair, ...]
    likelihood: str
    others: tuple[str, ...]
    shared_scale: bool
    constant_design: bool
    sources: tuple["Source | None", ...]
    roles: tuple["Role", ...]

    @property
    def size(self) -> int:
        """P, the number of weights."""
        return sum(pair.size for pair in self.pairs)

    def join(self, values: dict[str, Any], key: str) -> Num[Array, " P"]:
        """Flatten and join ``values[key.format(pair.name)]`` over the pairs."""
        return jnp.concatenate([jnp.ravel(values[key.format(p.name)]) for p in self.pairs])

    def split(self, flat: Num[Array, " P"], key: str) -> dict[str, Any]:
        """The inverse of :meth:`join`."""
        ends = np.cumsum([pair.size for pair in self.pairs])[:-1]
        return {
            key.format(pair.name): part.reshape(pair.shape)
            for pair, part in zip(self.pairs, jnp.split(flat, ends), strict=True)
        }


class Likelihood(NamedTuple):
    """The model at given values of its latent sites; observations flattened to (N,).

    - **value** - the observations, 0 where they are masked.
    - **loc**, **scale** - of their Normal distribution; `scale` has shape () where it is shared.
    - **weight** - how often each counts: ``handlers.mask`` times ``handlers.scale``.
    - **prior** - prior of the P weights.
    - **log_density** - of the model's other sample sites.
    """

    value: Float[Array, " N"]
    loc: Float[Array, " N"]
    scale: Float[Array, " N"] | Float[Array, ""]
    weight: Float[Array, " N"]
    prior: Prior
    log_density: Float[Array, ""]

    @property
    def precision(self) -> Any:
        """Precision that the whitening leaves over: the shared one, or 1."""
        return 1.0 / self.scale**2 if self.scale.ndim == 0 else 1.0

    @property
    def whitening(self) -> Float[Array, " N"]:
        root = jnp.sqrt(self.weight)
        return root if self.scale.ndim == 0 else root / self.scale

    @property
    def residual(self) -> Float[Array, " N"]:
        """Whitened residual."""
        return self.whitening * (self.value - self.loc)


def paired_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the spikes and slabs of a trace: a selector for :class:`numpyro.infer.Gibbs`.

    :param trace: a trace of the model.
    :return: names of the sample sites that :func:`~numpyro_spikeslab.spike_slab` made.

    **Example**

    .. doctest::

        >>> from numpyro.infer import NUTS, Gibbs
        >>> import numpyro_spikeslab as nss
        >>> def kernel(model):
        ...     return Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])
    """
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and MARK in site["infer"] and not site["is_observed"]
    )


def find_pairs(
    trace: dict[str, Any], user: str, fixed: frozenset[str] = frozenset()
) -> tuple[Pair, ...]:
    """The pairs of a trace, in order.

    :param user: who needs them, for the error message.
    :param fixed: names of sites whose values another kernel holds.
    :raises ValueError: if there is none or one is broken.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name in paired_sites(trace):
        # in an abstract trace, only what somebody has set has a value
        if name in fixed or not_jax_tracer(trace[name]["value"]):
            continue
        owner, part = trace[name]["infer"][MARK]
        parts.setdefault(owner, {})[part] = trace[name]
    if not parts:
        raise ValueError(
            f"{user}: the model has no spike-and-slab weights. Write "
            "`numpyro_spikeslab.spike_slab(name, inclusion, scale)` in it."
        )
    for owner, sites in parts.items():
        for part, other in (("spike", "slab"), ("slab", "spike")):
            if part not in sites:
                raise ValueError(
                    f"{user}: the pair {owner!r} is broken: '{owner}_{other}' has lost its "
                    f"'{owner}_{part}', which is set, observed, reparameterised or hidden. Leave "
                    f"both sites of spike_slab({owner!r}, ...) latent."
                )
        _check_prior(owner, sites, user)
    return tuple(Pair(owner, jnp.shape(sites["slab"]["value"])) for owner, sites in parts.items())


def _check_prior(owner: str, sites: dict[str, Any], user: str) -> None:
    for part, families in (
        ("spike", (dist.BernoulliProbs, dist.BernoulliLogits)),
        ("slab", (dist.Normal,)),
    ):
        site = sites[part]
        base, mask = unwrap(site["fn"])
        if type(base) not in families or mask is not None or site["scale"] is not None:
            wanted = " or ".join(family.__name__ for family in families)
            raise ValueError(
                f"{user}: the pair {owner!r} is broken: the prior of '{owner}_{part}' must be "
                f"{wanted}, neither masked nor scaled, got {type(site['fn']).__name__}. Leave the "
                f"prior to spike_slab({owner!r}, ...)."
            )


def unwrap(fn: Any) -> tuple[Any, Any]:
    """The distribution under expansion, independence and masks, and the product of the masks."""
    mask = None
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent | dist.MaskedDistribution):
        if isinstance(fn, dist.MaskedDistribution):
            mask = fn._mask if mask is None else mask & fn._mask
        fn = fn.base_dist
    return fn, mask


def find_function_sites(trace: dict[str, Any]) -> tuple[str, ...]:
    """Names of the sites of latent functions, observed ones included."""
    return tuple(
        name
        for name, site in trace.items()
        if site["type"] == "sample" and FUNCTIONS_MARK in site["infer"]
    )


def is_latent(trace: dict[str, Any], name: str) -> bool:
    """Whether a site is there, is sampled and has not been observed."""
    return name in trace and trace[name]["type"] == "sample" and not trace[name]["is_observed"]


def abstract_trace(model: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """A trace without values: only types, shapes, names and plates may be read off it.

    Nothing is computed, so nothing is compiled.
    """
    found = {}

    def run():
        seeded = handlers.substitute(
            handlers.seed(model, random.key(0)), substitute_fn=_sample_if_unset
        )
        with handlers.block():
            found.update(handlers.trace(seeded).get_trace(*args, **kwargs))

    jax.eval_shape(run)
    return found


def checked_trace(model: Any, args: tuple, kwargs: dict, user: str) -> dict[str, Any]:
    """:func:`abstract_trace`, with a hint where the model does not run."""
    hint = "Do the sizes of its plates match its data?"
    try:
        return abstract_trace(model, args, kwargs)
    except AssertionError as error:
        # such as that of a plate without data
        raise ValueError(f"{user} could not run the model: {error}. {hint}") from error
    except (TypeError, ValueError) as error:
        error.add_note(f"{user} could not run the model. {hint}")
        raise


def _sample_if_unset(site: dict[str, Any]) -> Any:
    """As ``init_to_sample``, but a value that somebody has substituted stays to be seen."""
    return init_to_sample(site) if site["type"] == "sample" and site["value"] is None else None


def trace_at(model: Any, args: tuple, kwargs: dict, values: dict[str, Any]) -> dict[str, Any]:
    """Trace of the model with its sites set to ``values``."""
    seeded = handlers.seed(model, random.key(0))
    with handlers.block():
        return handlers.trace(handlers.substitute(seeded, data=values)).get_trace(*args, **kwargs)


def param_name(site: str, prefix: str, params: dict[str, Any]) -> str:
    """Name of the parameter that holds the value of a latent site or a model's param."""
    name = f"{site}_{prefix}_loc"
    return name if name in params else site


def pair_values(pairs: Sequence[Pair], weights: dict[str, Any]) -> dict[str, Any]:
    """Values of the spikes and slabs that make the given weights."""
    ones = {pair.spike: jnp.ones(pair.shape, int) for pair in pairs}
    return ones | {pair.slab: weights[pair.name] for pair in pairs}


def slab_prior(trace: dict[str, Any], pair: Pair) -> tuple[Any, Any]:
    """Log odds of inclusion and slab scale of one pair, in the pair's shape."""
    spike, _ = unwrap(trace[pair.spike]["fn"])
    slab, _ = unwrap(trace[pair.slab]["fn"])
    if isinstance(spike, dist.BernoulliLogits):
        log_odds = spike.logits
    else:
        log_odds = jnp.log(spike.probs) - jnp.log1p(-spike.probs)
    return jnp.broadcast_to(log_odds, pair.shape), jnp.broadcast_to(slab.scale, pair.shape)


def evaluate(
    structure: Structure,
    model: Any,
    args: tuple,
    kwargs: dict,
    latents: dict[str, Any],
    weights: Float[Array, " P"],
) -> Likelihood:
    """Run the model once at given latent values and weights.

    :param latents: values of ``structure.others``.
    :param weights: the joined weights.
    """
    values = pair_values(structure.pairs, structure.split(weights, "{}"))
    trace = trace_at(model, args, kwargs, latents | values)
    value, loc, scale, weight = _normal(trace[structure.likelihood], structure.shared_scale)
    log_odds, slab_scale = zip(*(slab_prior(trace, p) for p in structure.pairs), strict=True)
    prior = Prior(
        jnp.concatenate([jnp.ravel(x) for x in log_odds]),
        jnp.concatenate([jnp.ravel(x) for x in slab_scale]) ** 2,
    )
    log_density = sum(
        (
            jnp.sum(_log_prob(site))
            for name, site in trace.items()
            if site["type"] == "sample" and name not in values and name != structure.likelihood
        ),
        start=jnp.zeros((), loc.dtype),
    )
    return Likelihood(value, loc, scale, weight, prior, log_density)


def _normal(site: dict[str, Any], shared_scale: bool) -> tuple[Any, Any, Any, Any]:
    """Value, location, scale and weight of each observation of a Normal site."""
    base, mask = unwrap(site["fn"])
    shape = jnp.shape(site["value"])
    dtype = jnp.result_type(base.loc, float)
    weight = jnp.ones(shape, dtype)
    if mask is not None:
        weight = weight * mask
    if site["scale"] is not None:
        weight = weight * site["scale"]
    value = jnp.where(weight > 0.0, jnp.asarray(site["value"], dtype), 0.0)
    loc = jnp.broadcast_to(jnp.asarray(base.loc, dtype), shape)
    scale = jnp.asarray(base.scale, dtype)
    scale = scale.reshape(()) if shared_scale else jnp.ravel(jnp.broadcast_to(scale, shape))
    return jnp.ravel(value), jnp.ravel(loc), scale, jnp.ravel(weight)


def _log_prob(site: dict[str, Any]) -> Any:
    log_prob = site["fn"].log_prob(site["value"])
    return log_prob if site["scale"] is None else log_prob * site["scale"]


def _locations(structure, model, args, kwargs, latents) -> Any:
    """The location as a function of the joined weights."""

    def location(weights):
        return evaluate(structure, model, args, kwargs, latents, weights).loc

    return location


def _linearised(structure, model, args, kwargs, latents) -> list[Any]:
    """The location's derivative with respect to the weights of each pair: linear maps."""
    location = _locations(structure, model, args, kwargs, latents)
    maps = []
    for index, pair in enumerate(structure.pairs):

        def of_pair(weights, index=index):
            joined = [
                weights if i == index else jnp.zeros(other.size, weights.dtype)
                for i, other in enumerate(structure.pairs)
            ]
            return location(jnp.concatenate(joined))

        maps.append(jax.linearize(of_pair, jnp.zeros(pair.size))[1])
    return maps


def design_rows(
    structure: Structure, model: Any, args: tuple, kwargs: dict, latents: dict[str, Any]
) -> Float[Array, "P N"]:
    """The design that multiplies the weights, features as rows: the location's Jacobian.

    :param latents: values of ``structure.others``.
    """
    maps = _linearised(structure, model, args, kwargs, latents)
    rows = []
    for pair, source, tangent in zip(structure.pairs, structure.sources, maps, strict=True):
        if source is None:
            # the batch bounds the memory of the intermediates, not of the result
            rows.append(jax.lax.map(tangent, jnp.eye(pair.size), batch_size=256))
        else:
            constant = jax.tree.leaves(tangent)[source.position]
            rows.append(constant.T if source.transposed else constant)
    joined = jnp.concatenate(rows) if len(rows) > 1 else jnp.asarray(rows[0])
    return joined.astype(jnp.result_type(joined, float))


def _candidates(tangent: Any, size: int, num_obs: int) -> dict[Source, Any]:
    """Constants of a linear map that may be its matrix.

    In ``X @ w`` the matrix is a constant of the linearised map. To copy it costs less than a
    sweep, where ``size`` products of X with unit vectors cost thousands.
    """
    found = {}
    for index, constant in enumerate(jax.tree.leaves(tangent)):
        if constant.shape == (size, num_obs):
            found[Source(index, False)] = constant
        if constant.shape == (num_obs, size):
            found[Source(index, True)] = constant.T
    return found


def whitened_design(
    structure: Structure,
    model: Any,
    args: tuple,
    kwargs: dict,
    latents: dict[str, Any],
    block_size: int = BLOCK_SIZE,
) -> Design:
    """The design of :func:`design_rows`, whitened and cut into blocks.

    :param latents: values of ``structure.others``; any will do when the design is constant.
    :param block_size: features per block.
    """
    rows = design_rows(structure, model, args, kwargs, latents)
    zeros = jnp.zeros(structure.size)
    whitening = evaluate(structure, model, args, kwargs, latents, zeros).whitening
    return block_design(rows, whitening, block_size)


def read(
    model: Any, args: tuple, kwargs: dict, user: str, fixed: frozenset[str] = frozenset()
) -> Structure:
    """Read a model's structure, without computing anything.

    :param user: who reads, for the error messages.
    :param fixed: names of sites whose values another kernel holds; they are no pairs here.
    :raises ValueError: if the model does not fit; the message names the site and the remedy.
    """
    trace = checked_trace(model, args, kwargs, user)
    subsampled = sorted(subsample_plate_sizes(trace))
    if subsampled:
        raise ValueError(
            f"{user}: the plates {subsampled} are subsampled. Exact updates need all data; remove "
            "`subsample_size`."
        )
    pairs = find_pairs(trace, user, fixed)
    own = {name for pair in pairs for name in (pair.spike, pair.slab)}
    shapes = {
        name: jax.ShapeDtypeStruct(jnp.shape(site["value"]), jnp.result_type(site["value"]))
        for name, site in trace.items()
        if name in own
        or site["type"] == "param"
        or (site["type"] == "sample" and not site["is_observed"])
    }
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"]:
            _check_shape(name, site, user)
    dependents = _dependents(model, args, kwargs, shapes)
    likelihood = _find_likelihood(dependents, trace, own, user)
    shared_scale = jnp.size(unwrap(trace[likelihood]["fn"])[0].scale) == 1
    others = tuple(name for name in shapes if name not in own)
    unknown = (None,) * len(pairs)
    structure = Structure(pairs, likelihood, others, shared_scale, False, unknown, ())
    sources = _location_sources(structure, model, args, kwargs, shapes, user)
    roles = _candidate_roles(structure, trace, dependents, sources.location)
    constant = not sources.design & set(others)
    return replace(structure, constant_design=constant, roles=roles)


def _dependents(model, args, kwargs, shapes) -> dict[str, frozenset[str]]:
    """For each sample site, the sites that its log density depends on."""

    def log_probs(**values):
        trace = trace_at(model, args, kwargs, values)
        return {name: _log_prob(site) for name, site in trace.items() if site["type"] == "sample"}

    return eval_provenance(log_probs, **shapes)


def _candidate_roles(structure: Structure, trace, dependents, location) -> tuple[Role, ...]:
    """Sites that feed nothing but the noise, the spikes or the slabs, with a tractable prior."""
    spikes = {pair.spike: pair.name for pair in structure.pairs}
    slabs = {pair.slab: pair.name for pair in structure.pairs}
    roles = []
    for name in structure.others:
        fed = {site for site, sources in dependents.items() if name in sources} - {name}
        if fed == {structure.likelihood} and structure.shared_scale and name not in location:
            candidate = Role(name, "noise", ())
        elif fed and fed <= set(spikes):
            candidate = Role(name, "inclusion", tuple(spikes[site] for site in sorted(fed)))
        elif fed and fed <= set(slabs):
            candidate = Role(name, "slab", tuple(slabs[site] for site in sorted(fed)))
        else:
            continue
        if _is_tractable(trace[name], candidate.part):
            roles.append(candidate)
    return tuple(roles)


TRACTABLE = {
    "noise": (dist.HalfNormal, dist.ImproperUniform),
    "slab": (dist.HalfNormal, dist.ImproperUniform),
    "inclusion": (dist.Beta, dist.Uniform, dist.ImproperUniform),
}
"""Priors of each part whose maximum a posteriori has a closed form."""


def _is_tractable(site: dict[str, Any], part: str) -> bool:
    if site["type"] == "param":
        return True
    base, mask = unwrap(site["fn"])
    return type(base) in TRACTABLE[part] and mask is None and site["scale"] is None


def _find_likelihood(dependents, trace, own, user: str) -> str:
    """The one observed site that depends on the weights; everything else must not."""
    touched = {name: sorted((sources & own) - {name}) for name, sources in dependents.items()}
    touched = {name: sites for name, sites in touched.items() if sites}
    observed = [name for name in touched if trace[name]["is_observed"]]
    latent = [name for name in touched if name not in observed]
    if not observed:
        raise ValueError(
            f"{user}: no observed site depends on {sorted(own)}, only the latent ones {latent} do. "
            "Pass the observations to the model, as in `numpyro.sample('y', dist.Normal(X @ w, "
            "sigma), obs=y)`."
        )
    for name in latent:
        raise ValueError(
            f"{user}: the prior of the latent site {name!r} depends on {touched[name]}, so the "
            "conditional of the pairs is not the spike-and-slab one. Only an observed Normal site "
            "may depend on the weights."
        )
    if len(observed) > 1:
        raise ValueError(
            f"{user}: the observed sites {observed} all depend on the weights; one is supported. "
            "Concatenate their observations in one Normal site."
        )
    (name,) = observed
    base, _ = unwrap(trace[name]["fn"])
    if type(base) is not dist.Normal:
        raise ValueError(
            f"{user}: the observed site {name!r} has the likelihood {type(base).__name__}; Normal "
            "is supported. Transform the response, or use another method, such as DiscreteHMCGibbs."
        )
    return name


def _check_shape(name: str, site: dict[str, Any], user: str) -> None:
    """Broadcasting observations against another shape would make more of them than there are."""
    shape, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
    # one distribution for all of them is no mistake
    if expected not in (shape, ()):
        raise ValueError(
            f"{user}: the observations of {name!r} have shape {shape} and their distribution has "
            f"shape {expected}. Give both the same shape; a column needs `y[:, 0]`."
        )


class LocationSources(NamedTuple):
    """Names of the other sites that the whitened design and the location depend on."""

    design: frozenset[str]
    location: frozenset[str]


def _location_sources(structure, model, args, kwargs, shapes, user: str) -> LocationSources:
    # a site may be called anything, so its name gets a prefix that the weights have not
    def parts(weights, **values):
        latents = {name.removeprefix("site "): value for name, value in values.items()}
        location = _locations(structure, model, args, kwargs, latents)
        at = evaluate(structure, model, args, kwargs, latents, weights)
        design = jax.jvp(location, (weights,), (jnp.ones(structure.size),))[1]
        return (design, at.whitening), (at.loc, at.weight), at.scale

    weights = jax.ShapeDtypeStruct((structure.size,), jnp.result_type(float))
    values = {f"site {name}": shapes[name] for name in structure.others}
    *found, noise = eval_provenance(parts, weights=weights, **values)
    if "weights" in noise:
        raise ValueError(
            f"{user}: the noise scale of {structure.likelihood!r} depends on the weights. Only its "
            "location may."
        )
    return LocationSources(
        *(frozenset(name.removeprefix("site ") for name in a | b) for a, b in found)
    )


class Facts(NamedTuple):
    """What only running a model tells, at prototype values of its other sites.

    - **latents** - those values.
    - **at** - the model at zero weights.
    - **slope** - derivative of the location along a direction in the space of the weights.
    - **moved** - change of the location after each of the moves along it, see :data:`MOVES`.
    - **alone** - change of the location when all pairs have a slab and no spike, or the reverse.
    - **slab_loc** - largest absolute prior mean of the slabs of each pair.
    - **matches** - for each pair and source, whether that constant is the pair's design.
    - **roles** - for each candidate role, which entry of the site each weight (or the noise) takes,
      and whether it is that entry.
    """

    latents: dict[str, Any]
    at: Likelihood
    slope: Any
    moved: Any
    alone: Any
    slab_loc: Any
    matches: tuple[dict[Source, Any], ...]
    roles: tuple[tuple[Any, Any], ...]


MOVES = (1.0, -100.0)


def find_facts(structure: Structure, model: Any, args: tuple, kwargs: dict) -> Facts:
    """Run the model at points that tell whether it fits; see :func:`check`."""
    # generic values, cheaper to compile than draws from the priors
    seeded = handlers.substitute(handlers.seed(model, random.key(0)), substitute_fn=init_to_uniform)
    with handlers.block():
        trace = handlers.trace(seeded).get_trace(*args, **kwargs)
    latents = {name: jnp.asarray(trace[name]["value"]) for name in structure.others}
    location = _locations(structure, model, args, kwargs, latents)
    at = evaluate(structure, model, args, kwargs, latents, jnp.zeros(structure.size))
    variates = random.normal(random.key(1), (structure.size,), at.loc.dtype)
    direction = jnp.sqrt(at.prior.variance) * variates
    slopes, matches = [], []
    probes = structure.split(direction, "{}").values()
    maps = _linearised(structure, model, args, kwargs, latents)
    for pair, tangent, probe in zip(structure.pairs, maps, probes, strict=True):
        probe = jnp.ravel(probe)
        slopes.append(tangent(probe))
        candidates = _candidates(tangent, pair.size, at.loc.shape[0])
        matches.append({k: agree(probe @ rows, slopes[-1]) for k, rows in candidates.items()})
    moved = jnp.stack([location(factor * direction) - at.loc for factor in MOVES])
    # the likelihood may see a pair only through its product
    nothing, ones = jnp.zeros(structure.size, int), jnp.ones(structure.size, int)
    alone = []
    for spikes, slabs in ((nothing, direction), (ones, 0.0 * direction)):
        values = structure.split(spikes, "{}_spike") | structure.split(slabs, "{}_slab")
        site = trace_at(model, args, kwargs, latents | values)[structure.likelihood]
        alone.append(_normal(site, structure.shared_scale)[1] - at.loc)
    slab_loc = jnp.stack(
        [jnp.max(jnp.abs(unwrap(trace[p.slab]["fn"])[0].loc)) for p in structure.pairs]
    )
    roles = tuple(_play(role, structure, model, args, kwargs, latents) for role in structure.roles)
    return Facts(latents, at, sum(slopes), moved, jnp.stack(alone), slab_loc, tuple(matches), roles)


def _play(role: Role, structure, model, args, kwargs, latents) -> tuple[Any, Any]:
    """Give every entry of the role's site a value of its own and see where it turns up.

    The index of weights that the role has nothing to do with lies beyond the entries.
    """
    shape, dtype = latents[role.site].shape, latents[role.site].dtype
    # values that no model has by chance
    code = jnp.linspace(0.31830988, 0.70710678, prod(shape), dtype=dtype)
    latents = latents | {role.site: code.reshape(shape)}
    at = evaluate(structure, model, args, kwargs, latents, jnp.zeros(structure.size))
    if role.part == "noise":
        return jnp.zeros(1, int), agree(at.scale[None], code)
    inclusion = role.part == "inclusion"
    seen = jax.nn.sigmoid(at.prior.log_odds) if inclusion else jnp.sqrt(at.prior.variance)
    index = jnp.argmin(jnp.abs(seen[:, None] - code), axis=1)
    own = np.repeat(
        [pair.name in role.pairs for pair in structure.pairs],
        [pair.size for pair in structure.pairs],
    )
    plays = agree(jnp.where(own, seen, 0.0), jnp.where(own, code[index], 0.0))
    return jnp.where(own, index, code.size), plays


def agree(x: Any, y: Any) -> Any:
    """Whether two arrays are finite and agree to rounding, relative to the larger one's size."""
    tolerance = 100.0 * jnp.finfo(x.dtype).eps * jnp.sqrt(x.size + 1.0)
    size = jnp.maximum(jnp.max(jnp.abs(x)), jnp.max(jnp.abs(y)))
    return jnp.isfinite(size) & (jnp.max(jnp.abs(x - y)) <= tolerance * size)


def check(structure: Structure, facts: Facts, user: str) -> Structure:
    """Finite data, at least one observation, proper priors, an affine location.

    :return: the structure, with the sources of the design that the facts confirm.
    :raises ValueError: if one is missing; the message names the site and the remedy.
    """
    site, at = structure.likelihood, jax.device_get(facts.at)
    names = [pair.name for pair in structure.pairs]
    if not np.any(at.weight > 0.0):
        raise ValueError(
            f"{user}: {site!r} has no observations: {at.value.size} values, none of them unmasked."
        )
    slope, moved = np.asarray(facts.slope), np.asarray(facts.moved)
    if not np.all(np.isfinite(slope)):
        raise ValueError(
            f"{user}: the design that multiplies {names} in {site!r} is not finite. Remove NaN and "
            "infinity from it; impute missing covariates."
        )
    for what, values in (("observations", at.value), ("location at zero weights", at.loc)):
        bad = np.flatnonzero(~np.isfinite(values) & (at.weight > 0.0))
        if bad.size:
            raise ValueError(
                f"{user}: the {what} of {site!r} are not finite at {bad.size} entries, the first "
                f"at {bad[0]}. Remove NaN and infinity from the data; missing observations need "
                "`numpyro.handlers.mask`."
            )
    log_odds, variance = at.prior
    scales = np.append(np.ravel(at.scale), variance)
    if not (np.all((scales > 0.0) & (scales < np.inf)) and np.all(np.isfinite(log_odds))):
        raise ValueError(
            f"{user}: inclusion probabilities of {names} must lie strictly between 0 and 1, their "
            f"slab scales and the noise scale of {site!r} must be positive and finite."
        )
    if np.any(facts.slab_loc):
        raise ValueError(
            f"{user}: the prior mean of the slabs of {names} must be 0, got {facts.slab_loc}. "
            "Leave the prior to spike_slab, and put a known mean into an offset."
        )
    eps = np.finfo(slope.dtype).eps
    # differences of locations cancel digits that the offset has more than they
    slack = 100.0 * eps * np.max(np.abs(at.loc))
    for factor, move in zip(MOVES, moved, strict=True):
        tolerance = 1e4 * eps * np.max(np.abs(factor * slope)) + slack
        if not np.max(np.abs(move - factor * slope)) <= tolerance:
            raise ValueError(
                f"{user}: the location of {site!r} is not affine in the weights {names}. Write it "
                "as `X @ w + offset`; a nonlinear link needs another method, such as "
                "DiscreteHMCGibbs."
            )
    if not np.max(np.abs(facts.alone)) <= slack:
        raise ValueError(
            f"{user}: the location of {site!r} depends on a spike or a slab of {names} on its own. "
            "Use the product that spike_slab returns."
        )
    sources = tuple(
        next((source for source, match in matches.items() if match), None)
        for matches in facts.matches
    )
    roles = tuple(
        role for role, (_, plays) in zip(structure.roles, facts.roles, strict=True) if plays
    )
    return replace(structure, sources=sources, roles=roles)


class Reading(NamedTuple):
    """What a :class:`Reader` finds.

    - **args**, **kwargs** - arguments of the model, numpy's floats moved to JAX's device.
    - **structure** - the model's structure.
    - **at** - the model at zero weights and prototype values of its other sites.
    - **design** - the whitened design, `None` if it depends on other sites.
    - **indices** - for each site with a role, which of its entries each weight takes.
    """

    args: tuple
    kwargs: dict[str, Any]
    structure: Structure
    at: Likelihood
    design: Design | None
    indices: dict[str, Any]


class Reader:
    """Reads a model once for each data set: what depends on data alone is computed once.

    :param model: the model.
    :param user: who reads, for the error messages.
    :param block_size: features per block of the design, `None` for all in one.
    """

    def __init__(self, model: Any, user: str, block_size: int | None = BLOCK_SIZE) -> None:
        self.model = model
        self.user = user
        self.block_size = block_size
        self._reset()

    def _reset(self) -> None:
        self._last = LastCall()
        # two compilations for all checks and the design, where op by op there would be hundreds
        self._jit_facts = jax.jit(self._facts, static_argnames=("structure", "static"))
        self._jit_design = jax.jit(self._design, static_argnames=("structure", "static"))

    def __call__(self, args: tuple, kwargs: dict, fixed: frozenset[str] = frozenset()) -> Reading:
        """Read the model at these arguments, or return what was read before."""
        if not are_concrete((args, kwargs)):
            return self._read(args, kwargs, fixed)

        def compute():
            with outside_transformations((args, kwargs)):
                moved_args, moved_kwargs = on_device((args, kwargs))
                return self._read(moved_args, moved_kwargs, fixed)

        return self._last(compute, args, kwargs, fixed)

    def _read(self, args, kwargs, fixed):
        structure = read(self.model, args, kwargs, self.user, fixed)
        static, dynamic = partition((args, kwargs))
        facts = self._jit_facts(structure, static, dynamic)
        indices = {
            role.site: index for role, (index, _) in zip(structure.roles, facts.roles, strict=True)
        }
        if are_concrete(facts):
            structure = check(structure, facts, self.user)
        else:
            structure = replace(structure, roles=())
        design = None
        if structure.constant_design:
            design = self._jit_design(structure, static, dynamic, facts.latents)
        return Reading(args, kwargs, structure, facts.at, design, indices)

    def _facts(self, structure, static, dynamic):
        args, kwargs = merge(static, dynamic)
        return find_facts(structure, self.model, args, kwargs)

    def _design(self, structure, static, dynamic, latents):
        args, kwargs = merge(static, dynamic)
        return self.design(structure, args, kwargs, latents)

    def design(
        self, structure: Structure, args: tuple, kwargs: dict, latents: dict[str, Any]
    ) -> Design:
        """The whitened design at the given values of the other sites."""
        block_size = self.block_size or structure.size
        return whitened_design(structure, self.model, args, kwargs, latents, block_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("model", "user", "block_size")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()
