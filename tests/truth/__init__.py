# SPDX-License-Identifier: Apache-2.0
"""Truth to test against: correlated designs, and small models with their data and regressions.

Regressions are numpy in float64, written from the definition of the model and not from the package.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from truth.enumeration import (  # noqa: F401
    Regression,
    check_draws,
    enumerate_models,
    regression,
    share_spikes,
)

# Designs

DESIGNS = ("independent", "correlated", "duplicated", "constant", "wide")


def design(name: str, num_obs: int = 20, size: int = 4, seed: int = 0) -> np.ndarray:
    """A random design of shape (N, P)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_obs, size))
    if name == "correlated":
        X = np.sqrt(0.1) * X + np.sqrt(0.9) * rng.normal(size=(num_obs, 1))
    elif name == "duplicated":
        X[:, 1] = X[:, 0]
    elif name == "constant":
        X[:, 0], X[:, 1] = 1.0, 0.0
    elif name == "wide":
        X[3:] = 0.0  # three observations of substance
    elif name != "independent":
        raise ValueError(name)
    return X


def response(X: np.ndarray, noise: float = 0.5, seed: int = 1) -> np.ndarray:
    """Responses whose first and last weights are not zero, and not too certain."""
    rng = np.random.default_rng(seed)
    w = np.zeros(X.shape[1])
    w[0], w[-1] = 0.4, -0.25
    return X @ w + noise * rng.normal(size=len(X))


# Models with their data


class Case(NamedTuple):
    """A model with its arguments, and its posterior in two parts.

    - **regression** - the regression problem at given values of the model's other sites.
    - **log_prior** - log density of those values.
    - **shapes** - shapes of the sets of weights, in the order of the regression's columns.
    - **linear** - whether there are no other sites.
    - **normal** - location and scale of the priors of coefficients.
    """

    model: Callable
    args: tuple
    regression: Callable[[dict[str, Any]], Regression]
    log_prior: Callable[[dict[str, Any]], float]
    shapes: dict[str, tuple[int, ...]]
    linear: bool
    normal: dict[str, tuple[Any, Any]] = {}

    def joined(self, values: dict[str, Any], key: str = "{}", batch: int = 0) -> np.ndarray:
        """The values of all weights in one array, behind ``batch`` leading axes."""
        arrays = [np.asarray(values[key.format(name)], float) for name in self.shapes]
        return np.concatenate([x.reshape(x.shape[:batch] + (-1,)) for x in arrays], axis=-1)


def _case(model, args, problem, log_prior=None, **shapes) -> Case:
    """A case whose ``problem`` is a function of the other sites if these have a prior."""
    linear = log_prior is None
    args = tuple(jnp.asarray(x, float) if x.dtype.kind == "f" else jnp.asarray(x) for x in args)
    fixed = (lambda _: problem) if linear else problem
    return Case(model, args, fixed, log_prior or log_density(), shapes or {"w": (4,)}, linear)


def log_density(**priors):
    """Log density of sites that are independent, with priors of scipy."""
    return lambda z: sum(np.sum(prior.logpdf(z[name])) for name, prior in priors.items())


def weights(size, inclusion=0.3, scale=1.0, name="w", plate="feature"):
    with numpyro.plate(plate, size):
        return nss.spike_slab(name, inclusion, scale)


def respond(y, location, scale):
    with numpyro.plate("obs", location.shape[0]):
        numpyro.sample("y", dist.Normal(location, scale), obs=y)


def fixed_model(X, y=None):
    respond(y, X @ weights(X.shape[1], scale=0.8), 0.5)


def fixed_case(design_name: str = "correlated") -> Case:
    X = design(design_name)
    y = response(X)
    return _case(fixed_model, (X, y), regression(X, y, 0.5, 0.3, 0.8))


def hyper_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(1.5, 3.0))
    slab_scale = numpyro.sample("slab_scale", dist.LogNormal(0.0, 0.5))
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 3.0))
    respond(y, intercept + X @ weights(X.shape[1], inclusion, slab_scale), sigma)


def hyper_case() -> Case:
    X = design("correlated")
    y = 1.0 + response(X)
    log_prior = log_density(
        sigma=stats.halfnorm,
        inclusion=stats.beta(1.5, 3.0),
        slab_scale=stats.lognorm(0.5),
        intercept=stats.norm(0.0, 3.0),
    )
    case = _case(hyper_model, (X, y), lambda z: at_scales(X, y - z["intercept"], z), log_prior)
    return case._replace(normal={"intercept": (0.0, 3.0)})


def at_scales(X, y, z):
    return regression(X, y, z["sigma"], z["inclusion"], z["slab_scale"])


def param_model(X, y=None):
    positive = dist.constraints.positive
    sigma = numpyro.param("sigma", 1.0, constraint=positive)
    slab_scale = numpyro.param("slab_scale", 1.0, constraint=positive)
    inclusion = numpyro.param("inclusion", 0.5, constraint=dist.constraints.unit_interval)
    respond(y, X @ weights(X.shape[1], inclusion, slab_scale), sigma)


def param_case() -> Case:
    X = design("correlated")
    y = response(X, noise=0.3) + X[:, 0]
    return _case(param_model, (X, y), lambda z: at_scales(X, y, z), log_density())


def weighted_model(X, offset, scale, observed, counts, y=None):
    size = X.shape[1]
    w = weights(size, jnp.linspace(0.1, 0.7, size), jnp.linspace(0.5, 2.0, size))
    handlers = numpyro.handlers.mask(mask=observed), numpyro.handlers.scale(scale=counts)
    with numpyro.plate("obs", X.shape[0]), handlers[0], handlers[1]:
        numpyro.sample("y", dist.Normal(2.0 + 0.5 * (X @ w - offset), scale), obs=y)


def weighted_case() -> Case:
    X = design("correlated")
    rng = np.random.default_rng(3)
    offset = np.linspace(-3.0, 3.0, len(X))
    scale, counts = rng.uniform(0.1, 1.5, len(X)), rng.uniform(0.2, 2.0, len(X))
    observed = np.arange(len(X)) % 5 > 0
    y = response(0.5 * X, noise=scale)
    inclusion, slab_scale = np.linspace(0.1, 0.7, 4), np.linspace(0.5, 2.0, 4)
    problem = regression(0.5 * X, y, scale, inclusion, slab_scale, weight=observed * counts)
    y = np.where(observed, 2.0 + y - 0.5 * offset, np.nan)
    return _case(weighted_model, (X, offset, scale, observed, counts, y), problem)


def latent_scale_model(X, y=None):
    w = weights(X.shape[1])
    with numpyro.plate("obs", X.shape[0]):
        tau = numpyro.sample("tau", dist.LogNormal(1.0, 0.5))
        numpyro.sample("y", dist.Normal(X @ w, tau**-0.5), obs=y)


def latent_scale_case() -> Case:
    X = design("correlated")
    y = response(X, noise=0.5 * np.random.default_rng(4).chisquare(2, size=len(X)))
    log_prior = log_density(tau=stats.lognorm(0.5, scale=np.e))
    at = lambda z: regression(X, y, z["tau"] ** -0.5, 0.3, 1.0)  # noqa: E731
    return _case(latent_scale_model, (X, y), at, log_prior)


def two_model(X, Z, y=None):
    w = weights(X.shape[1], scale=0.5, plate="x")
    v = weights(Z.shape[1], 0.6, 2.0, "v", plate="z")
    respond(y, X @ w + Z @ v, 0.5)


def two_case() -> Case:
    D = design("correlated", size=5)
    y = response(D)
    problem = regression(D, y, 0.5, [0.3] * 3 + [0.6] * 2, [0.5] * 3 + [2.0] * 2)
    return _case(two_model, (D[:, :3], D[:, 3:], y), problem, w=(3,), v=(2,))


def half_latent_model(X, Z, y=None):
    inclusion = numpyro.sample("inclusion", dist.Uniform(0.0, 1.0))
    w = weights(X.shape[1], inclusion, plate="x")
    v = weights(Z.shape[1], name="v", plate="z")
    respond(y, X @ w + Z @ v, 0.5)


def half_latent_case() -> Case:
    D = design("correlated")
    y = response(D, noise=0.3) + 2.0 * D[:, 3]
    inclusion = lambda z: np.stack([z["inclusion"]] * 2 + [0.3] * 2)  # noqa: E731
    at = lambda z: regression(D, y, 0.5, inclusion(z), 1.0)  # noqa: E731
    return _case(half_latent_model, (D[:, :2], D[:, 2:], y), at, log_density(), w=(2,), v=(2,))


def latent_design_model(t, centres, y=None):
    width = numpyro.sample("width", dist.LogNormal(0.0, 0.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    w = weights(centres.shape[0], scale=3.0)
    features = jnp.exp(-0.5 * ((t[:, None] - centres) / width) ** 2)
    respond(y, sigma * (features @ w), sigma)


def latent_design_case() -> Case:
    t, centres = np.linspace(-2.0, 2.0, 20), np.linspace(-2.0, 2.0, 4)

    def features(width):
        return np.exp(-0.5 * ((t[:, None] - centres) / width) ** 2)

    def at(z):
        return regression(z["sigma"] * features(z["width"]), y, z["sigma"], 0.3, 3.0)

    y = response(3.0 * features(0.7), noise=0.3)
    log_prior = log_density(width=stats.lognorm(0.5), sigma=stats.halfnorm)
    return _case(latent_design_model, (t, centres, y), at, log_prior)


def noise_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    respond(y, X @ weights(X.shape[1]), sigma)


def noise_case(seed: int = 1) -> Case:
    X = design("independent", seed=seed)
    y, log_prior = response(X, seed=seed), log_density(sigma=stats.halfnorm)
    return _case(noise_model, (X, y), lambda z: regression(X, y, z["sigma"], 0.3, 1.0), log_prior)


def scaled_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    respond(y, sigma * (X @ weights(X.shape[1])), sigma)


# Several tasks that share their features


def task_weights(num_tasks, size, inclusion=0.3, scale=1.0):
    with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("feature", size, dim=-1):
        return nss.spike_slab("W", inclusion, scale)


def respond_by_task(Y, location, scale, observed=None, plate="column"):
    likelihood = dist.Normal(location, scale)
    likelihood = likelihood if observed is None else likelihood.mask(observed)
    num_obs, num_tasks = location.shape
    with numpyro.plate("obs", num_obs, dim=-2), numpyro.plate(plate, num_tasks, dim=-1):
        numpyro.sample("Y", likelihood, obs=Y)


def of_tasks(phi, Y, scale, inclusion, slab_scale, observed=1.0):
    """The regression with a row for each observation and a column for each weight of each task.

    Scales and the prior have the shape of ``Y`` and of the weights, or broadcast to it.
    """
    X = np.einsum("qk,nm->nqkm", np.eye(Y.shape[1]), phi).reshape(Y.size, -1)
    shape = Y.shape[1], phi.shape[1]
    scale, observed = (np.broadcast_to(x, Y.shape).ravel() for x in (scale, observed))
    prior = (np.broadcast_to(x, shape).ravel() for x in (inclusion, slab_scale))
    return regression(X, Y.ravel(), scale, *prior, observed)


def tasks_of(num_tasks, num_obs, size, seed, weights=None, location=0.0, shift=0.0):
    """Features, observations of tasks that mix them, and whether these are observed."""
    rng = np.random.default_rng(seed)
    phi = design("correlated", num_obs=num_obs, size=size) + shift
    W = rng.normal(size=(num_tasks, size))
    W = W * (rng.uniform(size=W.shape) < 0.5) if weights is None else np.asarray(weights)
    Y = location + phi @ W.T + 0.5 * rng.normal(size=(num_obs, num_tasks))
    return phi, Y, rng.random(size=Y.shape) < 0.8


def tasks_model(phi, observed, Y=None):
    inclusion, scale = jnp.array([0.2, 0.6]), jnp.array([[0.5], [2.0]])
    W = task_weights(observed.shape[1], phi.shape[1], inclusion, scale)
    respond_by_task(Y, phi @ W.T, jnp.array([0.5, 0.8]), observed)


def tasks_case() -> Case:
    phi, Y, observed = tasks_of(2, 12, 2, 6, [[0.4, -0.3], [0.0, 0.8]])
    problem = of_tasks(phi, Y, [0.5, 0.8], [0.2, 0.6], [[0.5], [2.0]], observed)
    return _case(tasks_model, (phi, observed, np.where(observed, Y, np.nan)), problem, W=(2, 2))


def latent_tasks_model(phi, Y=None):
    num_tasks, size = 3, phi.shape[1]
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", size, dim=-1):
        inclusion = numpyro.sample("inclusion", dist.Uniform(0.05, 1.0))
    with numpyro.plate("task", num_tasks, dim=-2):
        scale = numpyro.sample("slab_scale", dist.HalfNormal(2.0))
    respond_by_task(Y, phi @ task_weights(num_tasks, size, inclusion, scale).T, sigma)


def latent_tasks_case() -> Case:
    phi, Y, _ = tasks_of(3, 12, 2, 6, [[0.4, -0.3], [0.0, 0.8], [0.0, 0.6]])
    log_prior = log_density(
        sigma=stats.halfnorm,
        inclusion=stats.uniform(0.05, 0.95),
        slab_scale=stats.halfnorm(scale=2.0),
    )
    at = lambda z: of_tasks(phi, Y, z["sigma"], z["inclusion"], z["slab_scale"])  # noqa: E731
    return _case(latent_tasks_model, (phi, Y), at, log_prior, W=(3, 2))


def shared_features_model(phi, observed, Y=None):
    Q, M = observed.shape[1], phi.shape[1]
    with numpyro.plate("column", Q, dim=-1):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    W = task_weights(Q, M, scale=jnp.linspace(0.5, 1.0, M))
    respond_by_task(Y, phi @ W.T, sigma, observed)


def shared_features_case() -> Case:
    phi, Y, observed = tasks_of(4, 15, 3, 8)
    slab_scale, args = np.linspace(0.5, 1.0, 3), (phi, observed, np.where(observed, Y, np.nan))
    at = lambda z: of_tasks(phi, Y, z["sigma"], 0.3, slab_scale, observed)  # noqa: E731
    return _case(shared_features_model, args, at, log_density(sigma=stats.halfnorm), W=(4, 3))


def covariates_model(phi, trend, observed, Y=None):
    Q, M = observed.shape[1], phi.shape[1]
    with numpyro.plate("task", Q, dim=-1):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        level = numpyro.sample("level", dist.Normal(jnp.arange(Q), 3.0))
        with numpyro.plate("covariate", trend.shape[1], dim=-2):
            slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    location = level + trend @ slope + phi @ task_weights(Q, M, scale=0.8).T
    respond_by_task(Y, location, sigma, observed, plate="task")


def covariates_case() -> Case:
    """Features that are not centred, with an intercept and a slope of each task."""
    trend, W = np.linspace(-1.0, 1.0, 15)[:, None], np.array([[0.8, 0], [0, -0.6], [0, 0]])
    phi, Y, observed = tasks_of(3, 15, 2, 9, W, np.arange(3) + trend, shift=2.0)

    def at(z):
        y = Y - z["level"] - trend @ z["slope"]
        return of_tasks(phi, y, z["sigma"], 0.3, 0.8, observed)

    normal = {"level": (np.arange(3), 3.0), "slope": (0.0, 1.0)}
    priors = {name: stats.norm(*parameters) for name, parameters in normal.items()}
    args = (phi, trend, observed, np.where(observed, Y, np.nan))
    log_prior = log_density(sigma=stats.halfnorm, **priors)
    return _case(covariates_model, args, at, log_prior, W=(3, 2))._replace(normal=normal)


def of_weights_alone(case: Case, values: dict[str, Any], slopes: dict[str, Any], mean: Any):
    """Evidence in which coefficients are at ``values + slopes (w - mean)``: of the weights alone.

    :param values: of all other sites.
    :param slopes: of the coefficients, with a last axis for all weights or for those of a task, of
        which the one before is the number.
    :param mean: of the weights, joined.
    """
    problem, log_prior = case.regression(values), case.log_prior(values)
    X, y, priors = problem.X.copy(), problem.y.copy(), []
    for site, (loc, scale) in case.normal.items():
        value = np.asarray(values[site], float)
        loc, scale = np.broadcast_to(loc, value.shape), np.broadcast_to(scale, value.shape)
        log_prior -= np.sum(stats.norm.logpdf(value, loc, scale))
        for index in np.ndindex(value.shape):
            slope, row, unit = slopes[site][index], np.zeros(mean.size), np.zeros(value.shape)
            first = 0 if len(slope) == len(row) else index[-1] * len(slope)
            row[first : first + len(slope)] = slope
            unit[index] = 1.0
            # the observations less their offset are affine in each coefficient
            change = case.regression(values | {site: value + unit}).y - problem.y
            X -= np.outer(change, row)
            y -= change * (row @ mean)
            # its prior is an observation
            priors.append((row, loc[index] - value[index] + row @ mean, scale[index], 1.0))
    data = zip((X, y, problem.scale, problem.weight), zip(*priors, strict=True), strict=True)
    X, y, scale, weight = (np.concatenate(parts) for parts in data)
    whole = problem._replace(X=X, y=y, scale=scale, weight=weight)
    return enumerate_models(whole).log_evidence + log_prior


CASES: dict[str, Callable[[], Case]] = {
    "fixed hyperparameters": fixed_case,
    "latent hyperparameters": hyper_case,
    "params": param_case,
    "offset, mask, counts and scales": weighted_case,
    "latent scale of each observation": latent_scale_case,
    "two sets of weights": two_case,
    "one latent inclusion of two": half_latent_case,
    "latent design": latent_design_case,
    "tasks": tasks_case,
    "latent hyperparameters of tasks": latent_tasks_case,
    "shared features with a mask": shared_features_case,
    "covariates of tasks": covariates_case,
}
