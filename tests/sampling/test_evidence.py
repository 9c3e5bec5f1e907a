# SPDX-License-Identifier: Apache-2.0
"""The log evidence, against sums over all models and integrals on a grid."""

from collections.abc import Callable
from itertools import product
from typing import Any

import arviz_base
import numpy as np
import pytest
from refusals import refusals
from scipy import optimize, stats
from scipy.special import expit, logsumexp, softmax
import truth
from truth import grouped_models

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.heredity import Heredity

CHAINS, DRAWS = 2, 1000


def check(model: Callable, args: tuple, samples: dict[str, Any], exact: float) -> Any:
    """Compare the evidence from draws, whose first axis is cut into chains, with the exact one."""
    shaped = {k: np.reshape(x, (CHAINS, DRAWS, *x.shape[1:])) for k, x in samples.items()}
    evidence = nss.log_evidence(random.key(1), model, shaped, *args)
    assert abs(evidence.value - exact) < 4 * evidence.se + 1e-3
    assert evidence.se < 0.05
    assert evidence.lower - 0.1 < exact < evidence.upper + 0.1
    return evidence


def samples_of(case: truth.Case, posterior: truth.enumeration.Posterior) -> dict[str, Any]:
    """Independent exact draws of the pairs."""
    draws = posterior.sample(np.random.default_rng(0), CHAINS * DRAWS)
    ends = np.cumsum([np.prod(shape) for shape in case.shapes.values()])[:-1]
    samples = {}
    for part, x in zip(("spike", "slab"), draws, strict=True):
        for (name, shape), each in zip(
            case.shapes.items(), np.split(x, ends.astype(int), axis=1), strict=True
        ):
            samples[f"{name}_{part}"] = each.reshape(-1, *shape)
    return samples


def eight_case() -> truth.Case:
    X = truth.design("correlated", num_obs=30, size=8)
    y = truth.response(X)
    problem = truth.regression(X, y, 0.5, 0.3, 0.8)
    args = jnp.asarray(X), jnp.asarray(y)
    return truth.Case(truth.fixed_model, args, lambda _: problem, lambda _: 0.0, {"w": (8,)}, True)


CASES = {
    "eight columns": eight_case,
    "copies": lambda: truth.fixed_case("duplicated"),
    "weights, a mask and an offset": truth.weighted_case,
    "two sites": truth.two_case,
    "tasks": truth.tasks_case,
}


@pytest.mark.parametrize("name", CASES)
def test_known_scales(name):
    case = CASES[name]()
    posterior = truth.enumerate_models(case.regression({}))
    evidence = check(case.model, case.args, samples_of(case, posterior), posterior.log_evidence)
    # near copies are in one set
    assert evidence.overlap > 0.9


def test_groups():
    case = grouped_models.two_sites_case()
    posterior = truth.enumerate_models(case.regression({}))
    posterior = truth.share_spikes(posterior, (0, 1, 2, 3, 4, 4))
    samples = samples_of(case, posterior)
    samples["v_spike"] = samples["v_spike"][:, :1]
    check(case.model, case.args, samples, posterior.log_evidence)


def always_last(posterior: truth.enumeration.Posterior) -> truth.enumeration.Posterior:
    """The posterior if the last column, whose inclusion is a half, is always in."""
    is_in = posterior.models[:, -1] > 0
    log_evidence, *others = posterior
    models, log_probs, locs, covariances = (x[is_in] for x in others)
    total = logsumexp(log_probs)
    log_evidence = float(log_evidence + total + np.log(2))
    return truth.enumeration.Posterior(log_evidence, models, log_probs - total, locs, covariances)


def test_learnt_scales_and_intercept():
    """Sites that are neither pairs nor coefficients may be drawn by any kernel, NUTS for one."""

    def model(X, y=None):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        pi = numpyro.sample("pi", dist.Beta(1.5, 3.0))
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
        truth.respond(y, intercept + X @ truth.weights(X.shape[1], pi, scale), sigma)

    X, rng = truth.design("correlated", size=3), np.random.default_rng(0)
    y, ones = 1.0 + truth.response(X), np.ones((len(X), 1))
    ends = np.log([0.2, 1.5]), np.log([0.2, 5.0]), (-3.0, 2.5)
    axes = [np.linspace(*each, 11) for each in ends]
    priors = stats.halfnorm, stats.lognorm(0.5), stats.beta(1.5, 3.0)
    logs, posteriors, points = [], [], list(product(*axes))
    for at in points:
        values = *np.exp(at[:2]), expit(at[2])
        sigma, scale, pi = values
        inclusion, scales = [pi] * 3 + [0.5], [scale] * 3 + [3.0]
        problem = truth.regression(np.hstack([X, ones]), y, sigma, inclusion, scales)
        posteriors.append(always_last(truth.enumerate_models(problem)))
        prior = sum(fn.logpdf(x) for fn, x in zip(priors, values, strict=True))
        volume = at[0] + at[1] + np.log(pi * (1 - pi))
        logs.append(posteriors[-1].log_evidence + prior + volume)
    steps = [axis[1] - axis[0] for axis in axes]
    which = rng.choice(len(points), CHAINS * DRAWS, p=softmax(logs))
    x = np.array(points)[which] + np.array(steps) * rng.uniform(-0.5, 0.5, (len(which), 3))
    spikes, slabs = np.zeros((2, len(which), 4))
    for k in set(which):
        spikes[which == k], slabs[which == k] = posteriors[k].sample(rng, np.sum(which == k))
    samples = {"w_spike": spikes[:, :3], "w_slab": slabs[:, :3], "intercept": slabs[:, 3]}
    samples |= {"sigma": np.exp(x[:, 0]), "scale": np.exp(x[:, 1]), "pi": expit(x[:, 2])}
    exact = logsumexp(logs) + np.log(steps).sum()
    check(model, (jnp.asarray(X), jnp.asarray(y)), samples, exact)


LIKELIHOODS = {
    "logit": (
        lambda f: dist.Bernoulli(logits=f),
        lambda y, f: stats.bernoulli.logpmf(y, expit(f)),
    ),
    "poisson": (
        lambda f: dist.Poisson(jnp.exp(f)),
        lambda y, f: stats.poisson.logpmf(y, np.exp(f)),
    ),
    "student": (
        lambda f: dist.StudentT(4.0, f, 0.5),
        lambda y, f: stats.t.logpdf(y, 4, f, 0.5),
    ),
}


def integrate(log_density: Callable, size: int, rng: np.random.Generator) -> tuple[float, Any]:
    """The log integral of a density over so many slabs by Gauss-Hermite quadrature about its mode,
    and draws from it by importance resampling.

    :param log_density: of many slabs, (S, size).
    """
    if not size:
        return float(log_density(np.zeros((1, 0)))[0]), np.zeros((DRAWS, 0))
    mode = optimize.minimize(lambda u: -log_density(u[None])[0], np.zeros(size)).x
    step = 1e-3 * np.eye(size)
    curvature = [
        [
            log_density((mode + a + b)[None])
            - log_density((mode + a - b)[None])
            - log_density((mode - a + b)[None])
            + log_density((mode - a - b)[None])
            for a in step
        ]
        for b in step
    ]
    root = np.linalg.cholesky(np.linalg.inv(-np.array(curvature)[..., 0] / 4e-6))
    nodes, log_weights = np.polynomial.hermite_e.hermegauss(12)
    grid = np.array(list(product(nodes, repeat=size)))
    weights = np.array(list(product(np.log(log_weights), repeat=size))).sum(axis=1)
    logs = log_density(mode + grid @ root.T) + weights + 0.5 * (grid**2).sum(axis=1)
    total = logsumexp(logs) + np.linalg.slogdet(root)[1]
    x = stats.multivariate_t(df=5, shape=np.eye(size)).rvs(10 * DRAWS, random_state=rng)
    x = x.reshape(-1, size)
    ratios = log_density(mode + x @ root.T) - stats.multivariate_t(df=5, shape=np.eye(size)).logpdf(
        x
    )
    return total, mode + x[rng.choice(len(x), DRAWS, p=softmax(ratios))] @ root.T


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_other_likelihoods(name):
    likelihood, log_prob = LIKELIHOODS[name]

    def model(X, y=None):
        w = truth.weights(X.shape[1])
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", likelihood(X @ w), obs=y)

    X, rng = truth.design("correlated", num_obs=40), np.random.default_rng(2)
    f = X @ [1.0, 0.0, 0.0, -0.6]
    draws = {"logit": f + rng.logistic(size=40) > 0, "poisson": rng.poisson(np.exp(f))}
    y = draws.get(name, f + 0.5 * rng.standard_t(4, size=40)).astype(float)
    models = np.array(list(product((0, 1), repeat=4)))
    logs, slabs = [], []
    for spikes in models:
        columns = X[:, spikes > 0]

        def log_density(u, columns=columns):
            return log_prob(y, u @ columns.T).sum(axis=1) + stats.norm.logpdf(u).sum(axis=1)

        log_integral, u = integrate(log_density, columns.shape[1], rng)
        logs.append(log_integral + np.log(np.where(spikes, 0.3, 0.7)).sum())
        slabs.append(rng.normal(size=(DRAWS, 4)))
        slabs[-1][:, spikes > 0] = u
    which = rng.choice(16, CHAINS * DRAWS, p=softmax(logs))
    drawn = np.array([slabs[k][i % DRAWS] for i, k in enumerate(which)])
    samples = {"w_spike": models[which], "w_slab": drawn}
    evidence = check(model, (jnp.asarray(X), jnp.asarray(y)), samples, logsumexp(logs))
    assert evidence.overlap > 0.9


def test_bayes_factors_of_columns_are_those_of_the_table_of_models():
    case = truth.fixed_case()
    posterior = truth.enumerate_models(case.regression({}))
    samples = samples_of(case, posterior)
    whole = check(case.model, case.args, samples, posterior.log_evidence)
    X, y = case.args
    problem = truth.regression(X[:, 1:], y, 0.5, 0.3, 0.8)
    smaller = truth.enumerate_models(problem)
    others = samples_of(case._replace(shapes={"w": (3,)}), smaller)
    without = check(case.model, (X[:, 1:], y), others, smaller.log_evidence)
    draws = {k: x.reshape(CHAINS, DRAWS, 4) for k, x in samples.items()}
    draws["w"] = draws["w_spike"] * draws["w_slab"]
    table = nss.models_table(arviz_base.from_dict({"posterior": draws}), "w", top=16)
    out = table["probability"][[0 not in members for members in table["members"]]].sum()
    se = np.hypot(np.hypot(whole.se, without.se), ((1 - out) / out / CHAINS / DRAWS) ** 0.5)
    assert abs(np.log(0.7) + without.value - whole.value - np.log(out)) < 4 * se


def fixed(X, y=None):
    truth.respond(y, X @ truth.weights(X.shape[1]), 0.5)


def beside(name, make):
    """The model with another site."""

    def model(X, y=None):
        truth.respond(y, make() + X @ truth.weights(X.shape[1]), 0.5)

    return model, {name: np.zeros((2, 20))}


def of_functions(X, y=None):
    with numpyro.plate("latent", 2):
        phi = nss.latent_functions("phi", "white", X[:, :1])
    W = truth.task_weights(2, 2)
    truth.respond_by_task(y, (W @ phi).T, 0.5)


def of_terms(X, y=None):
    w = nss.spike_slab("w", jnp.full(4, 0.3), heredity=Heredity(((), (0,), (), ()), (0, 1, 0, 0)))
    truth.respond(y, X @ w, 0.5)


PAIRS = {f"w_{part}": np.ones((2, 20, 4)) for part in ("spike", "slab")}
IMPROPER = dist.ImproperUniform(dist.constraints.real, (), ())
DATA = truth.design("correlated"), truth.response(truth.design("correlated"))
REFUSED = {
    "functions": (
        of_functions,
        PAIRS,
        "got latent functions, expected known .* `tempered_evidence`",
    ),
    "heredity": (of_terms, PAIRS, "heredity: got parents of weights"),
    "a param": (*beside("b", lambda: numpyro.param("b", 0.0)), "'b': got a param"),
    "improper": (
        *beside("b", lambda: numpyro.sample("b", IMPROPER)),
        "'b': got a param, or an imp",
    ),
    "discrete": (
        *beside("b", lambda: numpyro.sample("b", dist.Poisson(1.0))),
        "'b': got a discrete site",
    ),
    "a missing site": (fixed, {"w_spike": PAIRS["w_spike"]}, r"\['w_slab'\].*shape None"),
    "no chains": (fixed, {k: x[0] for k, x in PAIRS.items()}, "group_by_chain=True"),
    "few draws": (fixed, {k: x[:, :5] for k, x in PAIRS.items()}, "5 draws of 2 chains"),
    "a site that stays": (
        *beside("b", lambda: numpyro.sample("b", dist.Cauchy())),
        "a site that stays, or depends on others, expected draws in which all of .'b'. vary",
    ),
}


def refused(model, samples):
    y = np.stack([DATA[1]] * 2, axis=1) if model is of_functions else DATA[1]
    nss.log_evidence(
        random.key(0), model, PAIRS | samples if "b" in samples else samples, DATA[0], y
    )


test_refusals = refusals(REFUSED, refused)


def test_chains_that_disagree_are_warned_of():
    case = truth.fixed_case()
    samples = samples_of(case, truth.enumerate_models(case.regression({})))
    shaped = {k: x.reshape(CHAINS, DRAWS, 4).copy() for k, x in samples.items()}
    shaped["w_spike"][0, :, 0], shaped["w_spike"][1, :, 0] = 0, 1
    with pytest.warns(UserWarning, match=r"R-hat is .*, so chains may lack modes.*longer chains"):
        nss.log_evidence(random.key(0), case.model, shaped, *case.args)
