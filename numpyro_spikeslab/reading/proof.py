# SPDX-License-Identifier: Apache-2.0
"""Facts about a model that hold at all values of its sites, proved from its program.

A predictor whose derivative in the weights cannot depend on the weights is affine in them, whatever
the values of other sites; so is a noise scale in a site if its derivative depends on nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_spikeslab.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.priors import base_of
from numpyro_spikeslab.reading.coefficient_proof import (
    CoefficientProof,
    derivative,
    find_coefficients,
    is_chain,
    put,
    sources_of_derivative,
)
from numpyro_spikeslab.reading.likelihood import Gaussian
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.provenance import NONE, Names, Step, names_of, provenance, union
from numpyro_spikeslab.reading.sites import functions_of, is_latent
from numpyro_spikeslab.roles import ROLES, Role


class Proof(NamedTuple):
    """Facts about a model.

    - **likelihood** - the one observed site that depends on the weights, a Normal one.
    - **predictor**, **design**, **scale**, **count** - the other sites on which these parts of the
      likelihood can depend.
    - **roles** - sites on which one part alone depends: affinely, with constant coefficients.
    - **coefficients** - Normal sites in which the predictor is affine.
    - **mixed** - the latent functions, if the predictor is an offset and a bilinear map of them and
      the weights.
    - **kernels** - parameters of their kernels: only the prior of the functions depends on them.
    - **parents** - all other sites on which that prior depends.
    - **children** - sites and pairs, other than the likelihood, that depend on the functions.
    """

    likelihood: str
    predictor: Names
    design: Names
    scale: Names
    count: Names  # type: ignore[assignment]
    roles: tuple[Role, ...]
    coefficients: CoefficientProof
    mixed: str | None
    kernels: tuple[str, ...]
    parents: tuple[str, ...]
    children: tuple[str, ...]


def prove(problem: Problem, trace: dict[str, Any], user: str) -> Proof:
    """Prove what can be proved.

    :param trace: of the model, without values.
    :param user: who reads, for the error messages.
    :raises ValueError: if the model does not fit; the message names the site and the remedy.
    """
    run = provenance(problem.run, **problem.inputs)
    _check_pairs(run, user)
    name = _find_likelihood(problem, run, trace, user)
    problem = replace(problem, form=replace(problem.form, likelihood=name))
    _check_parts(problem, run, user)
    design = _prove_affine(problem, run, user)
    mixed = _find_mixed(problem, run, trace)
    parts = problem.likelihood(run)
    return Proof(
        name,
        *(names_of(x, "values") for x in (parts.predictor, design, parts.scale, parts.count)),
        _find_roles(problem, run, trace),
        find_coefficients(problem, run, trace),
        mixed,
        *_about_functions(problem, run, trace, mixed),
    )


def _weights(names: Names) -> list[str]:
    return sorted(names_of(names, "weights", "parts"))


_ONLY = (
    "so the conditional of the pairs is not the spike-and-slab one. Only an observed Normal site "
    "may depend on the weights."
)


def _check_pairs(run: Any, user: str) -> None:
    """Refuse priors of pairs that depend on weights, and means that depend on any site."""
    for name, prior in run.pairs.items():
        if weights := _weights(union(prior)):
            raise ValueError(f"{user}: the prior of {name!r} depends on {weights}, {_ONLY}")
        if sites := sorted(names_of(prior.loc, "values")):
            raise ValueError(
                f"{user}: the prior mean of the slabs of {name!r} must be 0, it depends on "
                f"{sites}. Leave the prior to spike_slab, and put a mean into the location."
            )


def _find_likelihood(problem: Problem, run: Any, trace: dict[str, Any], user: str) -> str:
    """Return the observed site that depends on the weights; refuse others that do."""
    touched = {k: weights for k, names in run.log_probs.items() if (weights := _weights(names))}
    observed = [name for name in touched if trace[name]["is_observed"]]
    latent = [name for name in touched if name not in observed]
    if latent and (observed or not all(Gaussian.matches(trace[name]) for name in latent)):
        remedy = "If it is to be predicted, leave it out here, and its inputs."
        if latent[0].endswith("_unobserved"):
            remedy = "For missing observations use `numpyro.handlers.mask`, not `obs_mask`."
        raise ValueError(
            f"{user}: the prior of the latent site {latent[0]!r} depends on {touched[latent[0]]}, "
            f"{_ONLY} {remedy}"
        )
    if not observed:
        raise ValueError(
            f"{user}: no observed site depends on {sorted(problem.inputs['parts'])}, only the "
            f"latent ones {latent} do. Pass the observations to the model, as in "
            "`numpyro.sample('y', dist.Normal(X @ w, sigma), obs=y)`. If they were passed, the "
            "weights are the mean of a latent site, which is not supported."
        )
    if len(observed) > 1:
        raise ValueError(
            f"{user}: the observed sites {observed} all depend on the weights; one is supported. "
            "Concatenate their observations in one Normal site."
        )
    (name,) = observed
    if not Gaussian.matches(trace[name]):
        got = type(base_of(trace[name]["fn"])).__name__
        raise ValueError(
            f"{user}: the observed site {name!r} has the likelihood {got}; Normal is supported. "
            "Transform the response, or use another method, such as DiscreteHMCGibbs."
        )
    return name


def _check_parts(problem: Problem, run: Any, user: str) -> None:
    """Refuse other parts that depend on weights, and a predictor that uses a spike or a slab."""
    name, parts = problem.form.likelihood, problem.likelihood(run)
    for what, sources in (
        ("observations", parts.value),
        ("mask or the scale (of handlers.mask, handlers.scale)", parts.count),
        ("noise scale", parts.scale),
        ("rows and columns", union(parts.entries)),
    ):
        if weights := _weights(sources):
            raise ValueError(
                f"{user}: the {what} of {name!r} depend on the weights {weights}. Only its "
                "location may."
            )
    if latent := sorted(names_of(parts.value | union(parts.entries), "values")):
        raise ValueError(
            f"{user}: the observations of {name!r} depend on the latent sites {latent}, so they "
            "are no data. Move these sites into the location of the likelihood."
        )
    if names_of(parts.predictor, "parts"):
        raise ValueError(
            f"{user}: the location of {name!r} depends on a spike or a slab of "
            f"{[pair.name for pair in problem.form.pairs]} on its own. Use the product that "
            "spike_slab returns."
        )


def _prove_affine(problem: Problem, run: Any, user: str) -> Names:
    """Return the inputs on which the derivative of the predictor in the weights can depend."""
    sources = frozenset(x.name for x in problem.likelihood(run).predictor if isinstance(x, Step))
    # a function with steps may have no derivative
    if not _weights(sources):
        keys = [("weights", pair.name) for pair in problem.form.pairs]
        sources = sources_of_derivative(problem.predictor, problem.inputs, keys)
    if bent := _weights(sources):
        raise ValueError(
            f"{user}: the location of {problem.form.likelihood!r} is not affine in the weights "
            f"{bent} at all values of the other sites. Write it as `X @ w + offset`; a nonlinear "
            "link needs another method, such as DiscreteHMCGibbs."
        )
    return sources


# Roles


def _find_roles(problem: Problem, run: Any, trace: dict[str, Any]) -> tuple[Role, ...]:
    """Find the sites that are noise scales, inclusion probabilities or slab scales alone."""
    arrays = {kind: problem.part(run, kind.part) for kind in ROLES}
    roles = []
    for name in problem.form.others:
        kind = _only_part(problem, run, name, arrays)
        role = None if kind is None else kind.of(trace[name])
        if role is not None and _is_linear(problem, role):
            roles.append(role)
    # the probe could not see what a site without a role contributes to the array of one with a role
    sites = [names_of(x, "values") for parts in arrays.values() for x in parts]
    while mixed := NONE.union(*(x for x in sites if not x <= {role.site for role in roles})):
        unmixed = [role for role in roles if role.site not in mixed]
        if len(unmixed) == len(roles):
            break
        roles = unmixed
    return tuple(roles)


def _only_part(problem: Problem, run: Any, name: str, arrays: Any) -> type[Role] | None:
    """Return the kind of role whose part alone depends on a site, without steps."""
    key, parts = ("values", name), problem.likelihood(run)
    priors = [x for k, x in run.log_probs.items() if k not in (problem.form.likelihood, name)]
    kinds = [kind for kind, x in arrays.items() if key in union(x)]
    if is_chain(run, name) or len(kinds) != 1 or Step(key) in union(arrays[kinds[0]]):
        return None
    return None if key in union([parts.predictor, parts.count, *priors]) else kinds[0]


def _is_linear(problem: Problem, role: Role) -> bool:
    """Whether a part is an affine function of a site whose coefficients are constants."""
    if not jnp.issubdtype(problem.inputs["values"][role.site].dtype, jnp.inexact):
        return False

    def arrays(**x):
        return problem.run(**x, of=lambda run: problem.part(run, role.part))

    return not sources_of_derivative(arrays, problem.inputs, [("values", role.site)])


# Latent functions


def _find_mixed(problem: Problem, run: Any, trace: dict[str, Any]) -> str | None:
    """Return the latent functions such that the predictor is bilinear in them and the weights."""
    names = [n for n in problem.form.others if FUNCTIONS_MARK in trace[n].get("infer", {})]
    if len(names) != 1 or len(problem.form.pairs) != 1:
        return None
    (name,), (pair,), parts = names, problem.form.pairs, problem.likelihood(run)
    functions, key = functions_of(trace[name]), ("values", name)
    M, N = len(functions.templates), functions.num_inputs
    fits = problem.inputs["values"][name].shape == (M, N) and pair.shape[-1:] == (M,)
    if not fits or key in parts.scale | parts.count or Step(key) in parts.predictor:
        return None
    return name if _is_bilinear(problem, key, ("weights", pair.name)) else None


def _is_bilinear(problem: Problem, phi: tuple[str, str], w: tuple[str, str]) -> bool:
    """Whether the predictor is ``offset + C(W, phi)``, C bilinear with constant coefficients."""
    inputs = problem.inputs

    def slopes(along, **x):
        def slope(key, other, value):
            return derivative(problem.predictor, put(x, {other: value}), {key: along[key]})

        values = {(kind, name): x[kind][name] for kind, name in (phi, w)}
        mixed = jax.jvp(lambda value: slope(w, phi, value), (values[phi],), (along[phi],))[1]
        # along each where the other is zero
        alone = [slope(*keys, jnp.zeros_like(values[keys[1]])) for keys in ((phi, w), (w, phi))]
        return mixed, alone

    along = {(kind, name): inputs[kind][name] for kind, name in (phi, w)}
    names = union(provenance(slopes, along=along, **inputs))
    return names <= {("along", phi), ("along", w)}


def _about_functions(
    problem: Problem, run: Any, trace: dict[str, Any], mixed: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the last three fields of :class:`Proof`."""
    if mixed is None:
        return (), (), ()
    users: dict[str, set[str]] = {name: set() for name in problem.form.others}
    for target, sources in run.log_probs.items():
        for name in names_of(sources, "values"):
            users[name] |= {target} - {name}
    of_pairs = names_of(union(run.pairs), "values")
    kernels = tuple(
        name
        for name in functions_of(trace[mixed]).parameters.sites
        if is_latent(trace, name) and users[name] == {mixed} and name not in of_pairs
    )
    parents = sorted(names_of(run.log_probs[mixed], "values") - {mixed, *kernels})
    children = [k for k in run.log_probs if k in users[mixed] - {problem.form.likelihood}]
    children += [k for k, x in run.pairs.items() if mixed in names_of(union(x), "values")]
    return kernels, tuple(parents), tuple(children)
