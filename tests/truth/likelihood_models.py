# SPDX-License-Identifier: Apache-2.0
"""Regressions under other likelihoods, with their data, and bounds on the bounds of their fits."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.special import expit, ndtr

import jax
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from truth import likelihood_cases as cases
from truth.likelihood_cases import data_of

N, P = cases.NUM_OBS, cases.NUM_WEIGHTS
# symmetric, so that it masks the same observations in reverse order
OBSERVED = np.arange(N) % (N - 1) > 0
COUNTS, TOTALS = 1.0 + np.arange(N) % 2, np.full(N, 7)
OFFSET = np.linspace(-1.0, 1.0, N)


class Kind(NamedTuple):
    """
    - **case** - the name of the likelihood case that gives the observations.
    - **priors** - of the other sites, by NumPyro and by scipy.
    - **likelihood** - distribution of the observations given predictor and other sites.
    - **log_density** - their log density, likewise, by scipy.
    - **groups** - of the weights.
    - **count** - how often each observation counts, 0 where it is missing.
    """

    case: str
    priors: dict[str, tuple[Callable[[], Any], Any]]
    likelihood: Callable[[Any, dict[str, Any]], Any]
    log_density: Callable[[Any, Any, dict[str, Any]], Any]
    groups: tuple[int, ...] | None = None
    count: Any = 1.0


class Density(NamedTuple):
    """A model with its arguments, as :class:`truth.Case`, and the kind of its likelihood."""

    kind: Kind
    model: Callable
    args: tuple
    linear: bool
    normal: tuple[str, ...]

    def log_evidence(self, values: dict[str, Any], slopes: dict[str, Any], mean: Any) -> float:
        """What no bound exceeds, with other sites at ``values + slopes (w - mean)``."""
        inclusion = values.get("inclusion", cases.INCLUSION)
        X, y = (np.asarray(x) for x in (self.args[0], self.args[-1]))
        num_spikes = P if self.kind.groups is None else max(self.kind.groups) + 1

        def log_joint(w):
            at = values | {k: values[k] + (w - mean) @ x for k, x in slopes.items()}
            each = {k: np.asarray(x)[..., None] for k, x in at.items()}
            log_density = self.kind.log_density(y, w @ X.T, each)
            total = np.sum(np.where(self.kind.count > 0, self.kind.count * log_density, 0), axis=-1)
            return total + sum(prior.logpdf(at[k]) for k, (_, prior) in self.kind.priors.items())

        slab = np.full(P, values.get("slab_scale", cases.SLAB))
        inclusion = np.full(num_spikes, inclusion)
        return cases.sum_over_models(log_joint, inclusion, slab, self.kind.groups).log_evidence


class Tasks(NamedTuple):
    """Tasks that share columns, each a model on its own, and the model of all, as arguments of
    which all tasks make one table."""

    each: list[Density]
    model: Callable
    args: tuple
    linear: bool
    normal: tuple[str, ...]

    def log_evidence(self, values: dict[str, Any], slopes: dict[str, Any], mean: Any) -> float:
        """What no bound exceeds: tasks are independent."""
        return sum(
            task.log_evidence(*({k: x[q] for k, x in part.items()} for part in (values, slopes)), w)
            for q, (task, w) in enumerate(zip(self.each, mean, strict=True))
        )


def regression(name: str, X: Any, y: Any = None) -> None:
    kind = KINDS[name]
    z = {name: numpyro.sample(name, make()) for name, (make, _) in kind.priors.items()}
    prior = z.get("inclusion", cases.INCLUSION), z.get("slab_scale", cases.SLAB)
    if kind.groups is None:
        with numpyro.plate("feature", P):
            w = nss.spike_slab("w", *prior)
    else:
        w = nss.spike_slab("w", *prior, groups=kind.groups)
    with numpyro.plate("obs", N):
        observe(kind, X @ w, z, y)


def observe(kind: Kind, f: Any, z: dict[str, Any], y: Any) -> None:
    count = np.asarray(kind.count)
    if count.ndim == 1 and np.ndim(f) == 2:
        # all tasks alike
        count = count[:, None]
    observed = count > 0
    scale = jnp.asarray(np.where(observed, count, 1.0), float)
    with handlers.mask(mask=observed), handlers.scale(scale=scale):
        numpyro.sample("y", kind.likelihood(f, z), obs=y)


def tasks_model(name: str, X: Any, Y: Any = None) -> None:
    """Two tasks, each with coefficients of its own."""
    kind, Q = KINDS[name], 2
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", P, dim=-1):
        w = nss.spike_slab("w", cases.INCLUSION, cases.SLAB)
    column = numpyro.plate("task", Q, dim=-1)
    with column:
        z = {name: numpyro.sample(name, make()) for name, (make, _) in kind.priors.items()}
    with numpyro.plate("obs", N, dim=-2), column:
        observe(kind, X @ w.T, z, Y)


def make_tasks(name: str) -> Tasks:
    task = make(name)
    X, y = task.args
    other = task._replace(args=(X, jnp.where(jnp.isnan(y), y, 1 - y)[::-1]))
    model, args = partial(tasks_model, name), (X, jnp.stack([y, other.args[1]], axis=1))
    return Tasks([task, other], model, args, task.linear, task.normal)


def make(name: str) -> Density:
    kind = KINDS[name]
    X, y = data_of(cases.CASES[kind.case])
    # NumPyro takes classes in order as integers alone
    missing = np.nan if cases.CASES[kind.case].dtype is float else 0
    args = jnp.asarray(X), jnp.asarray(np.where(kind.count > 0, y, missing))
    normal = tuple(k for k in ("b",) if k in kind.priors)
    return Density(kind, partial(regression, name), args, not kind.priors, normal)


INTERCEPT = {"b": (lambda: dist.Normal(0.3, 2.0), stats.norm(0.3, 2.0))}
SCALE = {"sigma": (lambda: dist.HalfNormal(1.0), stats.halfnorm())}


def log_odds(y: Any, f: Any) -> Any:
    return y * f - np.logaddexp(0, f)


def classes_in_order(case: str, distribution: Any, cdf: Callable, count: Any = 1.0) -> Kind:
    """Three of them, with two cut points."""

    def log_density(y: Any, f: Any, z: Any) -> Any:
        low = np.where(y > 0, z["low"] + z["gap"] * (y > 1), -np.inf)
        high = np.where(y < 2, z["low"] + z["gap"] * (y > 0), np.inf)
        return np.log(np.maximum(cdf(high - f) - cdf(low - f), 1e-300))

    return Kind(
        case,
        {
            "low": (lambda: dist.Normal(-0.5, 1.0), stats.norm(-0.5, 1.0)),
            "gap": (lambda: dist.LogNormal(0.0, 0.5), stats.lognorm(0.5)),
        },
        lambda f, z: distribution(f, z["low"] + jnp.stack([0.0 * z["gap"], z["gap"]])),
        log_density,
        count=count,
    )


KINDS = {
    "classes with an intercept, missing and repeated": Kind(
        "logit",
        INTERCEPT,
        lambda f, z: dist.Bernoulli(logits=0.5 + f + z["b"]),
        lambda y, f, z: log_odds(y, 0.5 + f + z["b"]),
        count=OBSERVED * COUNTS,
    ),
    "counts with an intercept and a concentration": Kind(
        "negative binomial of the mean",
        INTERCEPT
        | {"r": (lambda: dist.LogNormal(0.5, 0.5), stats.lognorm(0.5, scale=np.exp(0.5)))},
        lambda f, z: dist.NegativeBinomial2(jnp.exp(f + z["b"]), z["r"]),
        lambda y, f, z: stats.nbinom.logpmf(y, z["r"], expit(np.log(z["r"]) - f - z["b"])),
    ),
    "heavy tails of two parameters": Kind(
        "student",
        SCALE | {"nu": (lambda: dist.Gamma(4.0, 1.0), stats.gamma(4.0))},
        lambda f, z: dist.StudentT(z["nu"], f, z["sigma"]),
        lambda y, f, z: stats.t.logpdf(y, z["nu"], f, z["sigma"]),
    ),
    "absolute errors about an offset": Kind(
        "laplace",
        SCALE,
        lambda f, z: dist.Laplace(OFFSET + f, z["sigma"]),
        lambda y, f, z: stats.laplace.logpdf(y, OFFSET + f, z["sigma"]),
    ),
    "trials with a latent prior": Kind(
        "binomial",
        {
            "inclusion": (lambda: dist.Beta(2.0, 3.0), stats.beta(2.0, 3.0)),
            "slab_scale": (lambda: dist.HalfNormal(2.0), stats.halfnorm(scale=2.0)),
        },
        lambda f, z: dist.Binomial(TOTALS, logits=f),
        lambda y, f, z: stats.binom.logpmf(y, TOTALS, expit(f)),
    ),
    "classes in order with cut points, missing and repeated": classes_in_order(
        "classes in order", dist.OrderedLogistic, expit, OBSERVED * COUNTS
    ),
    "classes in order with cut points, probit": classes_in_order(
        "classes in order, probit", nss.OrderedProbit, ndtr
    ),
    "probit": Kind(
        "probit",
        {},
        lambda f, z: dist.Bernoulli(probs=jax.scipy.special.ndtr(f)),
        lambda y, f, z: stats.norm.logcdf((2 * y - 1) * f),
    ),
    "classes and weights that share spikes": Kind(
        "logit",
        {},
        lambda f, z: dist.Bernoulli(logits=f),
        lambda y, f, z: log_odds(y, f),
        groups=(0, 0, 1),
    ),
}
MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(make, name) for name in KINDS},
    "classes of tasks, missing and repeated": partial(
        make_tasks, "classes with an intercept, missing and repeated"
    ),
    "probit of tasks": partial(make_tasks, "probit"),
}
