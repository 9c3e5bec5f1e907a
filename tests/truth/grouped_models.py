# SPDX-License-Identifier: Apache-2.0
"""Models whose weights share spikes, with their truth.

They are a regression in which all but the first of a group have an inclusion of a half.
"""

from typing import Any

import numpy as np

import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
import truth


def grouped_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("kind", 3):
        inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 3.0))
    w = nss.spike_slab("w", inclusion, scale, groups=(0, 0, 1, 2))
    truth.respond(y, X @ w, sigma)


def grouped_case():
    X = truth.design("correlated")
    y = truth.response(X)
    halfnorm, beta = truth.stats.halfnorm, truth.stats.beta

    def at(z):
        first, *others = z["inclusion"]
        return truth.regression(X, y, z["sigma"], [first, 0.5, *others], z["scale"])

    def log_prior(z):
        of_scales = halfnorm.logpdf(z["sigma"]) + halfnorm.logpdf(z["scale"], scale=2.0)
        return of_scales + np.sum(beta.logpdf(z["inclusion"], 2.0, 3.0))

    args = jnp.asarray(X), jnp.asarray(y)
    return truth.Case(grouped_model, args, at, log_prior, {"w": (4,)}, False)


def two_sites_model(X, y=None):
    with numpyro.plate("row", 2), numpyro.plate("column", 2):
        w = nss.spike_slab("w", 0.3)
    v = nss.spike_slab("v", 0.5, 2.0, groups=[0, 0])
    truth.respond(y, X[:, :4] @ w.reshape(-1) + X[:, 4:] @ v, 0.5)


def two_sites_case():
    X = truth.design("correlated", size=6)
    y = truth.response(X)
    problem = truth.regression(X, y, 0.5, [0.3] * 4 + [0.5] * 2, [1.0] * 4 + [2.0] * 2)
    args, shapes = (jnp.asarray(X), jnp.asarray(y)), {"w": (2, 2), "v": (2,)}
    return truth.Case(two_sites_model, args, lambda _: problem, lambda _: 0.0, shapes, True)


# models, the group of each weight, and blocks
GROUPED: dict[str, Any] = {
    "of weights": (grouped_case, (0, 0, 1, 2), None),
    "beside a block": (two_sites_case, (0, 1, 2, 3, 4, 4), {"w": [[3, 0]]}),
}
