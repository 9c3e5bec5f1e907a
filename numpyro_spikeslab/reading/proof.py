# SPDX-License-Identifier: Apache-2.0
"""Facts about a model that hold at all values of its sites, proved from its program.

A predictor whose derivative in the weights cannot depend on the weights is affine in them, whatever
the values of other sites; so is a noise scale in a site if its derivative depends on nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.models.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.reading.coefficient_proof import (
    CoefficientProof,
    beside_predictor,
    derivative,
    find_coefficients,
    is_chain,
    put,
    sources_of_derivative,
)
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.likelihood import AnyDensity, Normal, has_density
from numpyro_spikeslab.reading.model_run import ModelTrace, Problem
from numpyro_spikeslab.reading.predictor import bent_by, cuts, likelihood_of
from numpyro_spikeslab.reading.program import Program
from numpyro_spikeslab.reading.provenance import NONE, Names, Step, names_of, provenance, union
from numpyro_spikeslab.reading.roles import ROLES, InclusionRole, Role
from numpyro_spikeslab.reading.sites import functions_of, is_latent
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.priors import base_of, bounds, is_drawable, is_plain

MAX_SCALES = 32
"""Most numbers of a site on which scales depend: to draw one takes all observations."""


class Proof(NamedTuple):
    """Facts about a model.

    - **plain** - its form as a regression on columns.
    - **program**, **density** - its program, cut at the predictor of a non-Normal likelihood; see
      :class:`~numpyro_spikeslab.reading.model_run.Problem`.
    - **predictor**, **count** - the sites on which these parts of the likelihood can depend.
    - **coefficients** - Normal sites in which the predictor is affine.
    - **mixed** - the latent functions, if the predictor is an offset and a bilinear map of them and
      the weights.
    - **kernels** - parameters of their kernels: only the prior of the functions depends on them.
    - **parents** - all other sites on which that prior depends.
    - **children** - sites and pairs, other than the likelihood, that depend on the functions.
    """

    plain: Form
    program: Program
    density: Program | None
    predictor: frozenset[str]
    count: frozenset[str]  # type: ignore[assignment]
    coefficients: CoefficientProof
    mixed: str | None
    kernels: tuple[str, ...]
    parents: tuple[str, ...]
    children: tuple[str, ...]


def prove(traced: ModelTrace, user: str) -> Proof:
    """Prove what can be proved.

    :param user: who reads, for the error messages.
    :raises ValueError: if the model does not fit; the message names the site and the remedy.
    """
    trace, form = traced.sites, Form(traced.pairs, tuple(traced.run.arguments[0]))
    problem = Problem(form, traced.run, traced.constants)
    run = provenance(problem.run, **problem.inputs)
    _check_pairs(run, user)
    response = _find_response(problem, run, trace, user)
    problem = replace(problem, form=replace(form, response=response))
    likelihood: AnyDensity = Normal()
    if Normal.fits(trace[response]["fn"]):
        _check_parts(problem, run, user)
        slopes = _prove_affine(problem, run, user)
    else:
        problem, likelihood, slopes = _find_predictor(problem, trace, user)
        run = provenance(problem.run, **problem.inputs)
        _check_parts(problem, run, user)
    design = names_of(slopes, "values")
    beside = beside_predictor(problem)
    mixed = _find_mixed(problem, run, trace, beside)
    coefficients = find_coefficients(problem, run, trace, beside)
    problem = replace(problem, form=replace(problem.form, coefficients=coefficients.dense))
    parts, shapes = problem.observations(run), problem.observations(problem.program.shapes)
    predictor, scale, count = (
        names_of(x, "values") for x in (parts.predictor, parts.scale, parts.count)
    )
    # as the program has it, for along an axis of size 1 the scale cannot change
    varying = not likelihood.is_fixed or shapes.scale.size > 1
    roles = _find_roles(problem, run, trace, beside)
    plain = replace(
        problem.form,
        likelihood=likelihood.repeated() if count else likelihood,
        num_features=problem.form.size,
        num_obs=shapes.value.size,
        roles=roles,
        scales=_find_scales(problem, run, trace) if likelihood.is_fixed else (),
        concentrations=_find_concentrations(problem, run, trace, roles),
        shaping=names_of(union(run.pairs), "values"),
        links=coefficients.links,
        constant_covariates=coefficients.constant,
        varying_noise=varying,
        constant_rows=not design,
        constant_design=not (design or count or (varying and scale)),
    )
    functions = _about_functions(problem, run, trace, mixed)
    cut = problem.program, problem.density
    return Proof(plain, *cut, predictor, count, coefficients, mixed, *functions)


def _weights(names: Names) -> list[str]:
    return sorted(names_of(names, "weights", "parts"))


_ONLY = (
    "so the conditional of the pairs is not the spike-and-slab one. Only an observed site may "
    "depend on the weights."
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


def _find_response(problem: Problem, run: Any, trace: dict[str, Any], user: str) -> str:
    """Return the observed site that depends on the weights; refuse others that do."""
    touched = {k: weights for k, names in run.log_probs.items() if (weights := _weights(names))}
    observed = [name for name in touched if trace[name]["is_observed"]]
    latent = [name for name in touched if name not in observed]
    if latent and (observed or not all(Normal.fits(trace[name]["fn"]) for name in latent)):
        remedy = "If it is to be predicted, leave it out here, and its inputs."
        if latent[0].endswith("_unobserved"):
            remedy = "For missing observations use `numpyro.handlers.mask`, not `obs_mask`."
        raise ValueError(
            f"{user}: the prior of the latent site {latent[0]!r} depends on {touched[latent[0]]}, "
            f"{_ONLY} {remedy}"
        )
    if factors := [k for k in observed if isinstance(base_of(trace[k]["fn"]), dist.Unit)]:
        remedy = "Write it as the distribution of observations, `numpyro.sample(name, fn, obs=y)`."
        got = f"a term that depends on {touched[factors[0]]}"
        raise bad(f"{user}: numpyro.factor({factors[0]!r}, ...)", got, "none", remedy)
    if len(observed) != 1:
        raise bad(
            f"{user}: sites that depend on {sorted(problem.inputs['parts'])}",
            f"the observed sites {observed} and the latent ones {latent}",
            "one observed site",
            "Pass observations to the model, as in `numpyro.sample('y', dist.Normal(X @ w, sigma), "
            "obs=y)`. Concatenate those of several sites.",
        )
    (name,) = observed
    if not has_density(trace[name]["fn"]):
        raise bad(
            f"{user}: the likelihood of {name!r}",
            type(base_of(trace[name]["fn"])).__name__,
            "MultivariateNormal or a distribution of single numbers",
            "Use another method, such as DiscreteHMCGibbs.",
        )
    return name


def _find_predictor(
    problem: Problem, trace: dict[str, Any], user: str
) -> tuple[Problem, AnyDensity, Names]:
    """Cut the likelihood at its predictor, and return its kind, too.

    The last affine variable is the predictor, or an earlier one if that has an augmentation.
    """
    name = problem.form.response
    got = f"{user}: the density {type(base_of(trace[name]['fn'])).__name__} of {name!r}"
    slopes = ((cut, *_slopes(cut, provenance(cut.run, **cut.inputs))) for cut in cuts(problem))
    affine = [(cut, likelihood_of(cut), sources) for cut, bent, sources in slopes if not bent]
    if not affine:
        raise ValueError(
            f"{got} depends on the weights in other ways than through a predictor that is affine "
            "in them and has the shape of the observations, as `X @ w + offset`. Let no other "
            "parameter depend on them, or use another method, such as DiscreteHMCGibbs."
        )
    chosen = next((each for each in affine if each[1].is_closed), affine[0])
    if operation := bent_by(chosen[0].density):
        raise ValueError(
            f"{got} is not elementwise in the predictor, because of {operation!r}. Let each "
            "observation depend on its own entry of the predictor, or use another method, such as "
            "DiscreteHMCGibbs."
        )
    return chosen


def _check_parts(problem: Problem, run: Any, user: str) -> None:
    """Refuse other parts that depend on weights, and a predictor that uses a spike or a slab."""
    name, parts = problem.form.response, problem.observations(run)
    data = {"observations": parts.value, "rows and columns": union(parts.entries)}
    counts = {"mask or the scale (of handlers.mask, handlers.scale)": parts.count}
    remedy = " Let it depend on other sites, or use another method, such as DiscreteHMCGibbs."
    for what, sources in {**data, **counts, "noise scale": parts.scale}.items():
        latent = sorted(names_of(sources, "values")) if what in data else []
        if sites := _weights(sources) or latent:
            kind = "latent sites" if sites == latent else "weights"
            raise ValueError(
                f"{user}: the {what} of {name!r} depend on the {kind} {sites}. Only its location "
                f"may.{remedy if what == 'noise scale' else ''}"
            )
    if names_of(parts.predictor, "parts"):
        raise ValueError(
            f"{user}: the location of {name!r} depends on a spike or a slab of "
            f"{[pair.name for pair in problem.form.pairs]} on its own. Use the product that "
            "spike_slab returns."
        )


def _prove_affine(problem: Problem, run: Any, user: str) -> Names:
    """Return the inputs on which the derivative of the predictor in the weights can depend."""
    bent, sources = _slopes(problem, run)
    if bent:
        raise ValueError(
            f"{user}: the location of {problem.form.response!r} is not affine in the weights "
            f"{bent} at all values of the other sites. Write it as `X @ w + offset`; a nonlinear "
            "link needs another method, such as DiscreteHMCGibbs."
        )
    return sources


def _slopes(problem: Problem, run: Any) -> tuple[list[str], Names]:
    """Return the weights in which the predictor is not affine, and the inputs on which its
    derivative in the weights can depend."""
    sources = frozenset(x.name for x in problem.observations(run).predictor if isinstance(x, Step))
    # a function with steps may have no derivative
    if not _weights(sources):
        keys = [("weights", pair.name) for pair in problem.form.pairs]
        sources = sources_of_derivative(problem.predictor, problem.inputs, keys)
    return _weights(sources), sources


# Roles


def _find_roles(
    problem: Problem, run: Any, trace: dict[str, Any], beside: Names
) -> tuple[Role, ...]:
    """Find the sites that are noise scales, inclusion probabilities, slab scales or scales of
    coefficients alone."""
    arrays = {kind: problem.part(run, kind.part) for kind in ROLES}
    roles = []
    for name in problem.form.others:
        kind = _only_part(problem, run, name, arrays)
        role = None if kind is None else kind.of(trace[name])
        if role is None or ("values", name) in beside:
            continue
        if not jnp.issubdtype(problem.inputs["values"][name].dtype, jnp.inexact):
            continue

        def part(kind=kind, **x):
            return problem.run(**x, of=lambda run: problem.part(run, kind.part))

        # an affine function of the site whose coefficients are constants
        if not sources_of_derivative(part, problem.inputs, [("values", name)]):
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
    key, parts = ("values", name), problem.observations(run)
    coefficients = problem.form.coefficients
    counted = {problem.form.response, name, *coefficients}
    priors = [x for k, x in run.log_probs.items() if k not in counted]
    priors += [base_of(run.priors[k]).loc for k in coefficients]
    kinds = [kind for kind, x in arrays.items() if key in union(x)]
    if is_chain(run, name) or len(kinds) != 1 or Step(key) in union(arrays[kinds[0]]):
        return None
    return None if key in union([parts.predictor, parts.count, *priors]) else kinds[0]


def _find_scales(problem: Problem, run: Any, trace: dict[str, Any]) -> tuple[str, ...]:
    """Find sites of a few real numbers on which noise scales depend, and nothing else."""
    parts, users = problem.observations(run), _users(problem, run)
    elsewhere = names_of(union([*run.pairs.values(), parts.predictor, parts.count]), "values")
    return tuple(
        name
        for name in problem.form.others
        if name in names_of(parts.scale, "values") - elsewhere
        if users[name] == {problem.form.response} and is_latent(trace, name)
        if is_plain(trace[name], (type(base_of(trace[name]["fn"])),))
        if bounds(base_of(trace[name]["fn"]).support) is not None
        if problem.inputs["values"][name].size <= MAX_SCALES
    )


def _find_concentrations(
    problem: Problem, run: Any, trace: dict[str, Any], roles: tuple[Role, ...]
) -> frozenset[str]:
    """Find positive numbers on which only Beta priors of inclusion probabilities depend."""
    betas = {
        role.site
        for role in roles
        if isinstance(role, InclusionRole) and is_plain(trace[role.site], (dist.Beta,))
    }
    elsewhere = names_of(union([*run.pairs.values(), *problem.observations(run)]), "values")
    users = _users(problem, run)
    return frozenset(
        name
        for name in set(problem.form.others) - elsewhere
        if users[name] and users[name] <= betas and is_latent(trace, name)
        if is_drawable(trace[name]) and not jnp.shape(trace[name]["value"])
    )


def _users(problem: Problem, run: Any) -> dict[str, set[str]]:
    """Return the sites whose log density depends on each site, but for itself."""
    users: dict[str, set[str]] = {name: set() for name in problem.form.others}
    for target, sources in run.log_probs.items():
        for name in names_of(sources, "values"):
            users[name] |= {target} - {name}
    return users


def _find_mixed(problem: Problem, run: Any, trace: dict[str, Any], beside: Names) -> str | None:
    """Return the latent functions if the predictor is ``offset + C(W, phi)`` with constant C."""
    names = [n for n in problem.form.others if FUNCTIONS_MARK in trace[n].get("infer", {})]
    if len(names) != 1 or len(problem.form.pairs) != 1:
        return None
    (name,), (pair,), parts = names, problem.form.pairs, problem.observations(run)
    functions, phi = functions_of(trace[name]), ("values", name)
    M, N = len(functions.templates), functions.num_inputs
    fits = problem.inputs["values"][name].shape == (M, N) and pair.shape[-1:] == (M,)
    elsewhere = parts.scale | parts.count | beside
    if not fits or phi in elsewhere or Step(phi) in parts.predictor:
        return None
    w, inputs = ("weights", pair.name), problem.inputs

    def slopes(along, **x):
        def slope(key, other, value):
            return derivative(problem.predictor, put(x, {other: value}), {key: along[key]})

        values = {(kind, name): x[kind][name] for kind, name in (phi, w)}
        mixed = jax.jvp(lambda value: slope(w, phi, value), (values[phi],), (along[phi],))[1]
        # along each where the other is zero
        alone = [slope(*keys, jnp.zeros_like(values[keys[1]])) for keys in ((phi, w), (w, phi))]
        return mixed, alone

    along = {(kind, name): inputs[kind][name] for kind, name in (phi, w)}
    sources = union(provenance(slopes, along=along, **inputs))
    return name if sources <= {("along", phi), ("along", w)} else None


def _about_functions(
    problem: Problem, run: Any, trace: dict[str, Any], mixed: str | None
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the last three fields of :class:`Proof`."""
    if mixed is None:
        return (), (), ()
    users = _users(problem, run)
    of_pairs = names_of(union(run.pairs), "values")
    kernels = tuple(
        name
        for name in functions_of(trace[mixed]).parameters.sites
        if is_latent(trace, name) and users[name] == {mixed} and name not in of_pairs
    )
    parents = sorted(names_of(run.log_probs[mixed], "values") - {mixed, *kernels})
    children = [k for k in run.log_probs if k in users[mixed] - {problem.form.response}]
    children += [k for k, x in run.pairs.items() if mixed in names_of(union(x), "values")]
    return kernels, tuple(parents), tuple(children)
