# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of an affine predictor as users write them, their densities by scipy, and truth."""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy import special, stats
from scipy.special import logsumexp

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss

NUM_OBS, NUM_WEIGHTS, INCLUSION, SLAB = 24, 3, 0.3, 1.2


class Logistic(dist.Distribution):
    """A distribution that the package does not know."""

    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(jnp.shape(loc))

    def log_prob(self, value):
        return -jnp.abs(value - self.loc) - 2 * jnp.log1p(jnp.exp(-jnp.abs(value - self.loc)))


class Case(NamedTuple):
    """
    - **likelihood** - makes the distribution of the observations from the predictor.
    - **draw** - draws observations, given the predictor and a generator.
    - **log_density** - of observations (N,), given predictors (..., N).
    - **dtype** - of the observations.
    """

    likelihood: Callable[[Any], Any]
    draw: Callable[[Any, np.random.Generator], Any]
    log_density: Callable[[Any, Any], Any]
    dtype: Any = float


def _bernoulli(p: Callable) -> tuple[Callable, Callable]:
    return (
        lambda f, rng: rng.binomial(1, p(f)),
        lambda y, f: stats.bernoulli.logpmf(y, p(f)),
    )


def _negative_binomial(r: float) -> tuple[Callable, Callable]:
    """Log odds as the predictor."""
    return (
        lambda f, rng: rng.negative_binomial(r, special.expit(-f)),
        lambda y, f: stats.nbinom.logpmf(y, r, special.expit(-f)),
    )


CASES = {
    "logit": Case(lambda f: dist.Bernoulli(logits=f), *_bernoulli(special.expit)),
    "sigmoid": Case(lambda f: dist.Bernoulli(probs=jax.nn.sigmoid(f)), *_bernoulli(special.expit)),
    "probit": Case(
        lambda f: dist.Bernoulli(probs=jax.scipy.special.ndtr(f)), *_bernoulli(special.ndtr)
    ),
    "binomial": Case(
        lambda f: dist.Binomial(7, logits=f),
        lambda f, rng: rng.binomial(7, special.expit(f)),
        lambda y, f: stats.binom.logpmf(y, 7, special.expit(f)),
    ),
    "negative binomial": Case(
        lambda f: dist.NegativeBinomialLogits(2.5, f), *_negative_binomial(2.5)
    ),
    "negative binomial of the mean": Case(
        lambda f: dist.NegativeBinomial2(jnp.exp(f), 1.7),
        lambda f, rng: rng.negative_binomial(1.7, 1.7 / (1.7 + np.exp(f))),
        lambda y, f: stats.nbinom.logpmf(y, 1.7, 1.7 / (1.7 + np.exp(f))),
    ),
    "student": Case(
        lambda f: dist.StudentT(3.0, f, 0.7),
        lambda f, rng: f + 0.7 * rng.standard_t(3.0, f.shape),
        lambda y, f: stats.t.logpdf(y, 3.0, f, 0.7),
    ),
    "laplace": Case(
        lambda f: dist.Laplace(f, 0.6),
        lambda f, rng: rng.laplace(f, 0.6),
        lambda y, f: stats.laplace.logpdf(y, f, 0.6),
    ),
    "poisson": Case(
        lambda f: dist.Poisson(jnp.exp(f)),
        lambda f, rng: rng.poisson(np.exp(f)),
        lambda y, f: stats.poisson.logpmf(y, np.exp(f)),
    ),
    "gamma": Case(
        lambda f: dist.Gamma(2.0, 2.0 * jnp.exp(-f)),
        lambda f, rng: rng.gamma(2.0, np.exp(f) / 2),
        lambda y, f: stats.gamma.logpdf(y, 2.0, scale=np.exp(f) / 2),
    ),
    "own": Case(
        lambda f: Logistic(f),
        lambda f, rng: rng.logistic(f),
        lambda y, f: stats.logistic.logpdf(y, f),
    ),
}
AUGMENTED = [*CASES][:8]

MIXED = np.array([-1.0, 0.5]), 0.6, np.array([0.3, 0.7])
"""Locations, scale and shares of a mixture."""

CUTS = np.array([-0.5, 0.8])


def _ordered(likelihood: Callable, cdf: Callable) -> Case:
    """Classes in order whose errors have that distribution."""

    def below(f: Any) -> np.ndarray:
        return cdf(CUTS - np.asarray(f)[..., None])

    def log_density(y: Any, f: Any) -> Any:
        probs = np.diff(below(f), axis=-1, prepend=0.0, append=1.0)
        seen = np.take_along_axis(probs, np.broadcast_to(y, f.shape)[..., None], axis=-1)
        return np.log(np.maximum(seen[..., 0], 1e-300))

    return Case(
        lambda f: likelihood(f, CUTS),
        lambda f, rng: (rng.random(f.shape)[:, None] > below(f)).sum(axis=-1),
        log_density,
        int,
    )


# of arrays with more axes than the observations
CASES |= {
    "log-normal": Case(
        lambda f: dist.LogNormal(f, 0.7),
        lambda f, rng: rng.lognormal(f, 0.7),
        lambda y, f: stats.lognorm.logpdf(y, 0.7, scale=np.exp(f)),
    ),
    "proportion": Case(
        lambda f: dist.BetaProportion(jax.nn.sigmoid(f), 4.0),
        lambda f, rng: rng.beta(4 * special.expit(f), 4 * special.expit(-f)),
        lambda y, f: stats.beta.logpdf(y, 4 * special.expit(f), 4 * special.expit(-f)),
    ),
    "mixture": Case(
        lambda f: dist.MixtureSameFamily(
            dist.Categorical(probs=MIXED[2]), dist.Normal(f[..., None] + MIXED[0], MIXED[1])
        ),
        lambda f, rng: rng.normal(f + rng.choice(MIXED[0], f.shape, p=MIXED[2]), MIXED[1]),
        lambda y, f: logsumexp(
            stats.norm.logpdf((y - f)[..., None], *MIXED[:2]), axis=-1, b=MIXED[2]
        ),
    ),
    "classes in order": _ordered(dist.OrderedLogistic, special.expit),
    "classes in order, probit": _ordered(nss.OrderedProbit, special.ndtr),
}

SHAPE, STOPPED = 1.5, np.arange(NUM_OBS) % 3 == 0
"""Shape of times by Weibull, and those that are known to be later than an observation."""

ENDS = np.array([[0.0, 0.6], [0.5, 0.5], [0.4, 1.7], [0.9, np.inf]])[np.arange(NUM_OBS) % 4]
"""Multiples of a time before which it is, which it is, between which and after which it is."""

BEFORE, AFTER = ENDS[:, 0] == 0, np.isinf(ENDS[:, 1])


def _weibull(f: Any) -> Any:
    return stats.weibull_min(SHAPE, scale=np.exp(f))


def _between(y: Any, f: Any) -> Any:
    low, high = y.T
    inside = np.log(np.maximum(_weibull(f).sf(low) - _weibull(f).sf(high), 1e-300))
    return np.where(low == high, _weibull(f).logpdf(low), inside)


CASES |= {
    "censored": Case(
        lambda f: dist.RightCensoredDistribution(dist.Weibull(jnp.exp(f), SHAPE), STOPPED),
        lambda f, rng: np.where(STOPPED, 0.6, 1.0) * _weibull(f).rvs(random_state=rng),
        lambda y, f: np.where(STOPPED, _weibull(f).logsf(y), _weibull(f).logpdf(y)),
    ),
    "between ends": Case(
        lambda f: dist.IntervalCensoredDistribution(dist.Weibull(jnp.exp(f), SHAPE), BEFORE, AFTER),
        lambda f, rng: ENDS * _weibull(f).rvs(random_state=rng)[:, None],
        _between,
    ),
}


def _bent(bend: Callable[[Any, Any], Any]) -> Case:
    return Case(
        lambda f: dist.Bernoulli(logits=bend(jnp, f)),
        *_bernoulli(lambda f: special.expit(bend(np, f))),
    )


BENT = {
    "minimum": _bent(lambda numpy, f: numpy.minimum(f, 0.0)),
    "maximum": _bent(lambda numpy, f: numpy.maximum(f, -1.0)),
    "clip": _bent(lambda numpy, f: numpy.clip(f, -5.0, 5.0)),
}
"""Log odds that are the predictor for some of its values only."""


def data_of(case: Case, num_obs: int = NUM_OBS) -> tuple[np.ndarray, np.ndarray]:
    """Two correlated columns, of which the first has an effect, and one alone."""
    rng = np.random.default_rng(5)
    X = rng.normal(size=(num_obs, NUM_WEIGHTS))
    X[:, 1] = 0.8 * X[:, 0] + 0.6 * X[:, 1]
    return X, np.asarray(case.draw(X @ [0.7, 0.0, -0.4], rng), case.dtype)


def model_of(case: Case) -> Callable:
    """The model of a case as a user writes it."""

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", INCLUSION, SLAB)
        with numpyro.plate("obs", len(X)):
            numpyro.sample("y", case.likelihood(X @ w), obs=y)

    return model


class Truth(NamedTuple):
    """Inclusion probabilities, means of the weights, and the log evidence."""

    inclusion: np.ndarray
    mean: np.ndarray
    log_evidence: float


def truth_of(
    case: Case,
    X: np.ndarray,
    y: np.ndarray,
    inclusion: Any = INCLUSION,
    scale: Any = SLAB,
    count: Any = 1.0,
) -> Truth:
    """Sum over the models of a case, whose observations count as often as that."""
    inclusion, scale = (np.broadcast_to(x, X.shape[1]) for x in (inclusion, scale))
    y = np.where((np.broadcast_to(count, len(y)) > 0).reshape(-1, *[1] * (y.ndim - 1)), y, 0)
    log_density = lambda w: np.sum(count * case.log_density(y, w @ X.T), axis=1)  # noqa: E731
    return sum_over_models(log_density, inclusion, scale)


def sum_over_models(
    log_density: Callable, inclusion: np.ndarray, scale: np.ndarray, groups: Any = None
) -> Truth:
    """Sum over all models, with the slabs integrated out.

    :param log_density: of the observations, given weights (S, P).
    :param inclusion: prior of each column, or of each group of them; 1 for a coefficient.
    :param scale: of each slab.
    """
    P = len(scale)
    log_evidences, means, models = [], [], []
    for spikes in product((0, 1), repeat=len(inclusion)):
        model = np.take(spikes, np.arange(P) if groups is None else groups)
        prior, places = np.prod(np.where(spikes, inclusion, 1 - inclusion)), np.flatnonzero(model)
        if prior == 0:
            continue

        def log_joint(w, places=places):
            every = np.zeros((len(w), P))
            every[:, places] = w
            return log_density(every) + np.sum(stats.norm.logpdf(w, 0, scale[places]), axis=1)

        log_evidence, mean = _integral(log_joint, scale[places])
        log_evidences.append(np.log(prior) + log_evidence)
        models.append(model)
        means.append(np.zeros(P))
        means[-1][places] = mean
    total = logsumexp(log_evidences)
    probs = np.exp(log_evidences - total)
    return Truth(probs @ np.array(models), probs @ np.array(means), float(total))


NUM_NODES = 41
"""Nodes of the integrals, along each axis."""


def _integral(log_joint: Callable, scale: np.ndarray) -> tuple[float, np.ndarray]:
    """Integrate a density by the trapezoidal rule, in units of its standard deviations, which the
    first turns only learn; also return its mean."""
    mean, root, size = np.zeros(len(scale)), np.diag(scale), NUM_NODES
    nodes = np.linspace(-6, 6, size)
    grid = np.array(list(product(nodes, repeat=len(scale)))).reshape(size ** len(scale), -1)
    for _ in range(5):
        w = mean + grid @ root.T
        values = log_joint(w)
        log_total = logsumexp(values)
        probs = np.exp(values - log_total)
        cell = (nodes[1] - nodes[0]) ** len(scale) * np.linalg.det(root)
        mean = probs @ w
        # never below the grid's own resolution
        floor = 0.02 * (nodes[1] - nodes[0]) ** 2 * root @ root.T
        root = np.linalg.cholesky((probs * (w - mean).T) @ (w - mean) + floor)
    return log_total + np.log(cell), mean
