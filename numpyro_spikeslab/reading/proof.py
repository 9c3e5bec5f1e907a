# SPDX-License-Identifier: Apache-2.0
"""What is true of a model at all values of its sites, proved from its program.

A result that cannot depend on a site does not change with it. So a location whose derivative in
the weights does not depend on the weights is affine in them, whatever the values of other sites;
and a noise scale whose derivative in a site depends on nothing is an affine function of that site.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.priors import base_of
from numpyro_spikeslab.reading.coefficient_proof import (
    DIRECTION,
    Coefficients,
    find_coefficients,
    is_chain,
    sources_along,
    split,
    tangent_of,
)
from numpyro_spikeslab.reading.form import (
    functions_of,
    is_latent,
)
from numpyro_spikeslab.reading.model_run import part_of
from numpyro_spikeslab.reading.provenance import Names, Step, provenance, union
from numpyro_spikeslab.reading.subject import Subject
from numpyro_spikeslab.roles import ROLES, Role


class Proof(NamedTuple):
    """
    - **likelihood** - the one observed site that depends on the weights, a Normal one.
    - **location**, **design**, **scale**, **count** - names of the other sites that these parts of
      it can depend on.
    - **roles** - sites that can have no part but one, of which that part is an affine function
      whose coefficients are constants.
    - **coefficients** - Normal sites in which the location is affine; names of sites where it has
      keys of inputs.
    - **mixed** - name of the latent functions in which the location may be bilinear with constant
      coefficients, together with the weights.
    - **kernels** - other latent sites on which the prior of these functions alone depends.
    - **strangers** - all other sites on which it depends.
    - **dependents** - what depends on these functions beside the likelihood.
    """

    likelihood: str
    location: Names
    design: Names
    scale: Names
    count: Names  # type: ignore[assignment]
    roles: tuple[Role, ...]
    coefficients: Coefficients
    mixed: str | None
    kernels: tuple[str, ...]
    strangers: tuple[str, ...]
    dependents: tuple[str, ...]


def prove(subject: Subject) -> Proof:
    """What the program says of the model.

    :raises ValueError: if the model does not fit; the message names the site and the remedy.
    """
    inputs = subject.inputs()
    run = provenance(lambda **x: subject.run(x), **inputs)
    _check_pairs(subject, run)
    likelihood = _find_likelihood(subject, run)
    seen = run.observed[likelihood]
    _check_parts(subject, likelihood, seen)
    design = _prove_affine(subject, likelihood, seen.loc, inputs)
    mixed = _find_mixed(subject, run, likelihood)
    if mixed is not None and not _is_bilinear(subject, inputs, likelihood, mixed):
        mixed = None
    kernels, strangers, dependents = _about_functions(subject, run, likelihood, mixed)
    beside = find_coefficients(subject, run, likelihood, inputs)
    return Proof(
        likelihood,
        location=_sites(seen.loc),
        design=_sites(design),
        scale=_sites(seen.scale),
        count=_sites(seen.count),
        roles=_find_roles(subject, run, likelihood, inputs),
        coefficients=beside._replace(means=_sites(beside.means)),
        mixed=mixed,
        kernels=kernels,
        strangers=strangers,
        dependents=dependents,
    )


def _sites(names: Names) -> Names:
    plain = (name for name in names if isinstance(name, str) and name.startswith("site "))
    return frozenset(name.removeprefix("site ") for name in plain)


def _own(names: Names) -> list[str]:
    """Those names that belong to pairs."""
    plain = (name for name in names if isinstance(name, str))
    own = (name.partition(" ") for name in plain if name.startswith(("weight ", "own ")))
    return sorted({name for _, _, name in own})


def _check_pairs(subject: Subject, run: Any) -> None:
    """The prior of a pair must not depend on the weights, nor its mean on any site."""
    user = subject.user
    for pair in subject.pairs:
        if names := _own(union(run.pairs[pair.name])):
            raise ValueError(
                f"{user}: the prior of {pair.name!r} depends on {names}, so the conditional of "
                "the pairs is not the spike-and-slab one. Only an observed Normal site may depend "
                "on the weights."
            )
        if sites := sorted(_sites(run.pairs[pair.name].loc)):
            raise ValueError(
                f"{user}: the prior mean of the slabs of {pair.name!r} must be 0, it depends on "
                f"{sites}. Leave the prior to spike_slab, and put a mean into the location."
            )


def _find_likelihood(subject: Subject, run: Any) -> str:
    """The one observed site that depends on the weights; everything else must not."""
    trace, user = subject.trace, subject.user
    touched = {name: _own(sources) for name, sources in run.log_probs.items()}
    touched = {name: sites for name, sites in touched.items() if sites}
    observed = [name for name in touched if trace[name]["is_observed"]]
    latent = [name for name in touched if name not in observed]
    if latent and (observed or not all(_is_response(trace[name]) for name in latent)):
        remedy = "If it is to be predicted, leave it out here, and its inputs."
        if latent[0].endswith("_unobserved"):
            remedy = "For missing observations use `numpyro.handlers.mask`, not `obs_mask`."
        raise ValueError(
            f"{user}: the prior of the latent site {latent[0]!r} depends on {touched[latent[0]]}, "
            "so the conditional of the pairs is not the spike-and-slab one. Only an observed "
            f"Normal site may depend on the weights. {remedy}"
        )
    if not observed:
        raise ValueError(
            f"{user}: no observed site depends on {sorted(subject.own)}, only the latent ones "
            f"{latent} do. Pass the observations to the model, as in `numpyro.sample('y', "
            "dist.Normal(X @ w, sigma), obs=y)`. If they were passed, the weights are the mean of "
            "a latent site, which is not supported."
        )
    if len(observed) > 1:
        raise ValueError(
            f"{user}: the observed sites {observed} all depend on the weights; one is supported. "
            "Concatenate their observations in one Normal site."
        )
    (name,) = observed
    base = base_of(trace[name]["fn"])
    if type(base) is not dist.Normal:
        raise ValueError(
            f"{user}: the observed site {name!r} has the likelihood {type(base).__name__}; Normal "
            "is supported. Transform the response, or use another method, such as DiscreteHMCGibbs."
        )
    return name


def _is_response(site: dict[str, Any]) -> bool:
    return isinstance(base_of(site["fn"]), dist.Normal)


def _check_parts(subject: Subject, name: str, seen: Any) -> None:
    """Only the location may depend on the weights."""
    user = subject.user
    for part, what in (
        ("value", "observations"),
        ("count", "mask or the scale (of handlers.mask, handlers.scale)"),
        ("scale", "noise scale"),
    ):
        if names := _own(getattr(seen, part)):
            raise ValueError(
                f"{user}: the {what} of {name!r} depend{'' if part != 'scale' else 's'} on the "
                f"weights {names}. Only its location may."
            )
    latent = sorted(x for x in _sites(seen.value) if x in subject.shapes)
    if latent:
        raise ValueError(
            f"{user}: the observations of {name!r} depend on the latent sites {latent}, so they "
            "are no data. Move these sites into the location of the likelihood."
        )
    alone = [x for x in seen.loc if isinstance(x, str) and x.startswith("own ")]
    if alone:
        names = [pair.name for pair in subject.pairs]
        raise ValueError(
            f"{user}: the location of {name!r} depends on a spike or a slab of {names} on its own. "
            "Use the product that spike_slab returns."
        )


def _prove_affine(subject: Subject, likelihood: str, location: Names, inputs: dict) -> Names:
    """What the derivative of the location in the weights can depend on.

    :param location: what the location itself can depend on.
    """
    weights = [key for key in inputs if key.startswith("weight ")]
    bent = _own(frozenset(x.name for x in location if isinstance(x, Step)))
    # what has steps may have no derivative at all
    of = partial(subject.location, likelihood)
    found = frozenset() if bent else sources_along(of, inputs, weights)
    if bent := bent or _own(found):
        raise ValueError(
            f"{subject.user}: the location of {likelihood!r} is not affine in the weights {bent} "
            "at all values of the other sites. Write it as `X @ w + offset`; a nonlinear link "
            "needs another method, such as DiscreteHMCGibbs."
        )
    return found


# Roles


def _find_roles(subject: Subject, run: Any, likelihood: str, inputs: dict) -> tuple[Role, ...]:
    """Sites that are nothing but noise, inclusion or slab scales, of independent entries."""
    seen = run.observed[likelihood]
    priors = {k: x for k, x in run.log_probs.items() if k != likelihood}
    of = partial(part_of, likelihood=likelihood, pairs=subject.pairs)
    parts = {kind: union(of(run, kind.part)) for kind in ROLES}
    roles = []
    for name in subject.others:
        key = f"site {name}"
        if is_chain(run, name):
            continue
        fed = [kind for kind, sources in parts.items() if key in sources]
        elsewhere = [seen.loc, seen.count, *(x for k, x in priors.items() if k != name)]
        if len(fed) != 1 or any(key in sources for sources in elsewhere):
            continue
        (kind,) = fed
        if Step(key) in parts[kind]:
            continue
        role = kind.of(subject.trace[name])
        if role is not None and _is_linear(subject, inputs, key, partial(of, part=kind.part)):
            roles.append(role)
    arrays = [_sites(union(x)) for kind in parts for x in of(run, kind.part)]
    return _without_strangers(roles, arrays)


def _without_strangers(roles: list[Role], arrays: list[Names]) -> tuple[Role, ...]:
    """Roles whose arrays depend on no site that is none. Such a site may add nothing at the values
    of the probe, and something at others.

    :param arrays: the sites on which each array of a part depends.
    """
    known = {role.site for role in roles}
    mixed = {site for sites in arrays if not sites <= known for site in sites}
    kept = [role for role in roles if role.site not in mixed]
    return tuple(kept) if len(kept) == len(roles) else _without_strangers(kept, arrays)


def _is_linear(subject: Subject, inputs: dict[str, Any], key: str, of: Callable) -> bool:
    """Whether a part of a run is an affine function of a site whose coefficients are constants."""
    if not jnp.issubdtype(jnp.result_type(inputs[key]), jnp.inexact):
        return False
    return sources_along(lambda x: subject.run(x, of), inputs, [key]) <= {DIRECTION + key}


# Latent functions


def _find_mixed(subject: Subject, run: Any, likelihood: str) -> str | None:
    """The latent functions that the weights can mix, if shapes allow it."""
    names = [n for n in subject.others if FUNCTIONS_MARK in subject.trace[n].get("infer", {})]
    if len(names) != 1 or len(subject.pairs) != 1:
        return None
    (name,), (pair,) = names, subject.pairs
    functions = functions_of(subject.trace[name])
    M, N = len(functions.templates), functions.num_inputs
    fits = jnp.shape(subject.shapes[name]) == (M, N) and pair.shape[-1:] == (M,)
    seen = run.observed[likelihood]
    moves = f"site {name}" in seen.scale | seen.count or Step(f"site {name}") in seen.loc
    return name if fits and not moves else None


def _is_bilinear(subject: Subject, inputs: dict[str, Any], likelihood: str, mixed: str) -> bool:
    """Whether the location is ``offset + C(W, phi)``, C bilinear with constant coefficients."""
    (pair,) = subject.pairs
    phi, w = f"site {mixed}", f"weight {pair.name}"
    location = partial(subject.location, likelihood)

    def along_both(**x):
        x, along = split(x)

        def along_weights(value):
            return tangent_of(location, x | {phi: value}, {w: along[w]})

        return jax.jvp(along_weights, (x[phi],), (along[phi],))[1]

    def alone(**x):
        x, along = split(x)
        without = {key: x | {key: jnp.zeros_like(x[key])} for key in (w, phi)}
        return [
            tangent_of(location, without[other], {key: along[key]})
            for key, other in ((phi, w), (w, phi))
        ]

    directions = {DIRECTION + name: inputs[name] for name in (phi, w)}
    both = provenance(along_both, **inputs, **directions)
    one = provenance(alone, **inputs, **directions)
    return both | union(one) <= set(directions)


def _about_functions(
    subject: Subject, run: Any, likelihood: str, mixed: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """See the last three of :class:`Proof`."""
    if mixed is None:
        return (), (), ()
    key, functions = f"site {mixed}", functions_of(subject.trace[mixed])
    fed: dict[str, set[str]] = {name: set() for name in subject.others}
    for target, sources in run.log_probs.items():
        for name in _sites(sources) & set(fed):
            fed[name] |= {target} - {name}
    pairs = _sites(union(run.pairs))
    kernels = tuple(
        name
        for name in functions.site_names
        if is_latent(subject.trace, name) and fed[name] == {mixed} and name not in pairs
    )
    strangers = tuple(sorted(_sites(run.log_probs[mixed]) - {mixed, *kernels}))
    dependents = [name for name in run.log_probs if name in fed[mixed] - {likelihood}]
    dependents += [name for name, sources in run.pairs.items() if key in union(sources)]
    return kernels, strangers, tuple(dependents)
