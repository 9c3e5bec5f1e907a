# SPDX-License-Identifier: Apache-2.0
"""Models of tasks that mix latent functions, with their data, one of each kind."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from scipy import integrate, stats
from tinygp import kernels

import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.kernel_priors import length_scale_prior
import truth
from truth.task_problems import Problem, model_of, plant, problem

N, Q, M = 14, 3, 2
X = np.linspace(0.0, 3.0, N)
SMOOTH = kernels.ExpSquared(1.0)
COVARIATE = np.random.default_rng(1).normal(size=N)


def first_params(guide: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Parameters of a guide where they start."""
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args, **kwargs)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def responses(num_tasks: int = Q) -> np.ndarray:
    """Tasks that are mixtures of a slow and a fast wave, with noise; shape (N, Q)."""
    waves = np.stack([np.sin(2 * X), np.cos(4 * X + 1)], 1)
    weights = np.array([[1.0, 0.0], [-0.7, 0.6], [0.0, 1.2]])[:num_tasks]
    return waves @ weights.T + 0.2 * np.random.default_rng(0).normal(size=(N, num_tasks))


def with_gaps(Y: np.ndarray) -> np.ndarray:
    Y = Y.copy()
    Y[[2, 3, 4, 5, 9], [1, 1, 1, 1, 0]] = np.nan
    return Y


class Model(NamedTuple):
    """A model with its arguments, the responses last, and the log density of the responses and of
    values of all sites but weights and functions, where it is known."""

    model: Callable
    args: tuple
    log_evidence: Callable[[dict[str, Any]], float] | None = None


@cache
def white(num_steps: int, prior: str = "weak") -> Problem:
    """Three white functions after some sweeps."""
    args = np.arange(60.0), plant(60, 20, 3, 0).Y
    return problem(model_of(prior, ["white"] * 3), args).run(num_steps)[0]


def hand_written(
    X, Y=None, slab=None, inclusion=None, noise=dist.HalfNormal, varies=False, shifts=False, count=1
):
    """Tasks as rows, which `mtmkl` has as columns.

    Latent slab scales and inclusion probabilities have these shapes; else they are 1 and 0.4.
    """
    scale, pi, shift = 1.0, 0.4, 0.0
    if slab is not None:
        scale = numpyro.sample("slab_scale", dist.HalfNormal(2.0).expand(slab).to_event())
    if inclusion is not None:
        pi = numpyro.sample("inclusion", dist.Beta(2.0, 2.0).expand(inclusion).to_event())
    latent = numpyro.plate("latent", M, dim=-1)
    with latent:
        phi = nss.latent_functions("phi", SMOOTH, X)
    with numpyro.plate("task", Q, dim=-2):
        with latent:
            W = nss.spike_slab("W", pi, scale)
        sigma = numpyro.sample("noise", noise())
        if shifts:
            shift = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
            # a copy, because JAX remembers in which precision it has first seen an array of numpy
            shift += numpyro.sample("slope", dist.Normal(0.0, 10.0)) * np.array(COVARIATE)
        if varies:
            sigma *= jnp.linspace(0.5, 1.5, N)
        with numpyro.plate("point", N, dim=-1), handlers.scale(scale=count):
            numpyro.sample("Y", dist.Normal(shift + W @ phi, sigma), obs=Y)


def single_model(X, y=None):
    sigma = numpyro.sample("noise", dist.HalfNormal(1.0))
    phi = nss.latent_functions("phi", [SMOOTH], X)
    with numpyro.plate("latent", 1):
        w = nss.spike_slab("w", 0.4, 0.8)
    with numpyro.plate("point", N):
        numpyro.sample("y", dist.Normal(w @ phi, sigma), obs=y)


def single_evidence(values: dict[str, Any]) -> float:
    """All that is left of one function of one task is an integral over its weight."""
    y = responses(1)[:, 0]
    length, sigma = float(np.ravel(values["phi_scale"])[0]), float(values["noise"])
    K = np.exp(-0.5 * (X[:, None] - X) ** 2 / length**2) + 1e-9 * np.eye(N)

    def log_density(w):
        return stats.multivariate_normal(cov=w**2 * K + sigma**2 * np.eye(N)).logpdf(y)

    largest = max(log_density(w) for w in np.linspace(0.0, 4.0, 41))

    def integrand(w):
        return np.exp(log_density(w) - largest) * stats.norm.pdf(w, 0.0, 0.8)

    # both signs of the weight are alike
    slab = 2 * integrate.quad(integrand, 0.0, 6.0)[0]
    evidence = np.log(0.4 * slab + 0.6 * np.exp(log_density(0.0) - largest)) + largest
    prior = float(length_scale_prior(X).log_prob(length))
    return evidence + prior + stats.halfnorm.logpdf(sigma)


def columns(functions: list, Y: Any = None, **kwargs: Any) -> Model:
    Y = responses() if Y is None else Y
    model = nss.models.mtmkl(functions, num_tasks=np.size(Y) // N, **kwargs)
    return Model(model, (X, Y))


def rows(shift: Any = 0.0, **kwargs: Any) -> Model:
    return Model(partial(hand_written, **kwargs), (X, (responses() + shift).T))


def entries_model(rows, columns, y=None):
    """White functions, of which some entries of the table of points and tasks are observed."""
    sigma = numpyro.sample("noise", dist.HalfNormal(1.0))
    pi = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
    phi = nss.latent_functions("phi", ["white"] * M, np.arange(N))
    W = truth.task_weights(Q, M, pi, 0.8)
    location = jnp.sum(phi.T[rows] * W[columns], axis=-1)
    numpyro.sample("Y", dist.Normal(location, sigma), obs=y, infer={"entries": (rows, columns)})


def of_classes(X, Y=None):
    latent = numpyro.plate("latent", M, dim=-1)
    with latent:
        phi = nss.latent_functions("phi", SMOOTH, X)
    with numpyro.plate("task", Q, dim=-2):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        with latent:
            W = nss.spike_slab("W", 0.4, 2.0)
        with numpyro.plate("point", N, dim=-1):
            numpyro.sample("Y", dist.Bernoulli(logits=level + W @ phi), obs=Y)


def trials_model(rows, columns, y=None):
    pi = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
    phi = nss.latent_functions("phi", ["white"] * M, np.arange(N))
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", pi, 2.0)
    location = jnp.sum(phi.T[rows] * W[columns], axis=-1)
    mark = {"entries": (rows, columns)}
    numpyro.sample("Y", dist.Binomial(20, logits=location), obs=y, infer=mark)


def trials() -> Model:
    *places, Y = entries().args
    return Model(trials_model, (*places, np.round(20 / (1 + np.exp(-2 * Y)))))


def entries() -> Model:
    Y = with_gaps(responses())
    rows, columns = np.nonzero(np.isfinite(Y))
    return Model(entries_model, (rows, columns, Y[rows, columns]))


COUNTS = np.random.default_rng(2).uniform(0.2, 2.0, (Q, N))
MODELS: dict[str, Callable[[], Model]] = {
    "missing entries": lambda: columns([SMOOTH] * M, Y=with_gaps(responses())),
    "intercepts, a covariate and Exponential noise": lambda: rows(
        np.array([3.0, 0.0, -2.0]), shifts=True, noise=partial(dist.Exponential, 2.0)
    ),
    "noise that varies along tasks": lambda: rows(varies=True),
    "counts of observations": lambda: rows(count=COUNTS),
    "a slab scale of each weight": lambda: rows(slab=(Q, M)),
    "a slab scale of each function": lambda: rows(slab=(M,)),
    "an inclusion of each task": lambda: rows(slab=(), inclusion=(Q, 1)),
    "a parameter that is held": lambda: Model(
        handlers.condition(hand_written, {"phi_scale": np.array([0.5, 0.9])}), (X, responses().T)
    ),
    "one latent function": lambda: columns([SMOOTH]),
    "one task": lambda: columns([SMOOTH] * M, Y=responses(1)[:, 0]),
    "one function of one task": lambda: Model(
        single_model, (X, responses(1)[:, 0]), single_evidence
    ),
    "kernels of two kinds": lambda: columns([SMOOTH, kernels.quasisep.Matern32(0.5)]),
    "state-space kernels": lambda: columns([kernels.quasisep.Matern32(1.0)] * M),
    "classes": lambda: Model(of_classes, (X, 1.0 * (responses().T > 0.3))),
    "entries of a table": entries,
    "entries that are numbers of trials": trials,
    "white functions": lambda: columns(["white"] * M, shared_inclusion=False),
}
