# SPDX-License-Identifier: Apache-2.0
"""Models and data of which several optima are near each other, and mixtures fitted to them."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss

KEY = random.key(1)


def plain(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    signal = numpyro.deterministic("signal", X @ w)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(signal, 0.5), obs=y)


def hyper(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    ends = numpyro.sample("ends", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    location = ends[0] + ends[1] * jnp.linspace(-1.0, 1.0, len(X)) + X @ w
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(location, sigma), obs=y)


def level(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(b + X @ w, 0.5), obs=y)


def grouped(X, y=None, groups=(0, 1, 1)):
    w = nss.spike_slab("w", 0.25, groups=groups)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def twins():
    """The first and the last column are the same."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 3))
    X[:, 2] = X[:, 0]
    return X, 0.5 * X[:, 0] + 0.5 * rng.normal(size=30)


def twins_away():
    """The same, far from their means beside the noise."""
    X, y = twins()
    return X + 3, y + 3.5


def twin_groups():
    """The first two columns and the last two are the same."""
    rng = np.random.default_rng(0)
    X = np.tile(rng.normal(size=(30, 2)), 2)
    return X, X[:, :2] @ [0.8, 0.6] + 0.5 * rng.normal(size=30)


def correlated(seed=0):
    """Each column is like the one before."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(60, 6))
    for j in range(1, 6):
        X[:, j] = 0.95 * X[:, j - 1] + np.sqrt(1 - 0.95**2) * X[:, j]
    return X, 0.3 * X[:, 1] - 0.3 * X[:, 4] + 0.5 * rng.normal(size=60)


GUIDES = {
    "pairs": nss.PairedGuide,
    "mean field": nss.MeanFieldGuide,
    "blocks": lambda model: nss.PairedGuide(model, blocks=[[0, 1]]),
}


class Fit(NamedTuple):
    model: Any
    guide: Any
    result: nss.CAVIRunResult
    mixture: nss.MixtureGuide
    params: dict[str, Any]
    args: tuple


@lru_cache
def _fitted(model, data, family, x64) -> Fit:
    args = tuple(jnp.asarray(x, float) for x in data())
    guide = GUIDES[family](model)
    svi = nss.CAVI(model, guide, num_restarts=30)
    result = svi.run(KEY, 150, *args, progress_bar=False)
    mixture = nss.MixtureGuide(guide, num_components=10)
    return Fit(model, guide, result, mixture, mixture.combine(result.optima, *args), args)


def fitted(model=plain, data=twins, family="pairs") -> Fit:
    return _fitted(model, data, family, jax.config.jax_enable_x64)


def exact(data) -> truth.Posterior:
    return truth.enumerate_models(truth.regression(*data(), 0.5, 0.25, 1.0))
