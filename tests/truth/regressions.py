# SPDX-License-Identifier: Apache-2.0
"""Data and parts of small regressions, which the tests of reading share."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from tinygp import kernels

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.linear import Linear, factors
from numpyro_spikeslab.reading.reader import Reader, Reading

N, P = 8, 3
RNG = np.random.default_rng(0)
X, X2 = RNG.normal(size=(2, N, P))
Y = X @ [1.0, 0.0, -0.5] + 0.1 * RNG.normal(size=N)
TIME = np.linspace(-1.0, 1.0, N)


def read(model: Callable, *args: Any, **kwargs: Any) -> Reading:
    return Reader(model, "test")(args, kwargs)


def rows(design: Any, size: int = P) -> np.ndarray:
    """The first rows of a design without its blocks."""
    return np.asarray(design.rows).reshape(-1, design.rows.shape[-1])[:size]


def copied(reading: Reading) -> set[str]:
    """The pairs whose design is an array of the model, without a product."""
    matrices = factors(Linear.of(reading.problem, reading.generic))
    return {name for name, matrix in matrices.items() if matrix is not None}


def normal(name: str, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return numpyro.sample(name, dist.Normal(loc, scale))


def weigh(name: str = "w", size: int = P, inclusion: Any = 0.25, scale: Any = 1.0) -> Any:
    """Spike-and-slab weights in a plate of their own."""
    with numpyro.plate(f"feature_{name}", size):
        return nss.spike_slab(name, inclusion, scale)


def observe(location: Any, scale: Any = 0.5, y: Any = None, *around: Any) -> None:
    """The observed site, within handlers."""
    # a copy, since JAX remembers in which precision it has first seen an array
    y = Y.copy() if y is None else y
    with ExitStack() as stack:
        for handler in (*around, numpyro.plate("obs", len(y))):
            stack.enter_context(handler)
        numpyro.sample("y", dist.Normal(location, scale), obs=y)


def regression(
    likelihood: Callable = lambda X, w: dist.Normal(X @ w, 0.5),
    weights: Callable = lambda size: nss.spike_slab("w", 0.25),
    extra: int = 0,
    **plate: Any,
) -> Callable:
    """A regression on arguments.

    :param likelihood: distribution of the observed site, from ``X, w``.
    :param weights: from their number to the weights.
    :param extra: by how many features the plate is too large.
    :param plate: options of the plate of observations.
    """

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1] + extra):
            w = weights(X.shape[1])
        with numpyro.plate("obs", X.shape[0], **plate) as index:
            batch, response = (X[index], y[index]) if plate else (X, y)
            numpyro.sample("y", likelihood(batch, w), obs=response)

    return model


def located(location: Callable) -> Callable:
    """A regression with this location, from ``X, w``."""
    return regression(lambda X, w: dist.Normal(location(X, w), 0.5))


def of_tasks(num_tasks: int, location: Callable = lambda X, W: X @ W.T) -> Callable:
    """A regression of several tasks on shared plates."""

    def model(X, Y, mask=True):
        with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("feature", X.shape[-1]):
            W = nss.spike_slab("W", 0.25)
        mean = location(X, W)
        plates = numpyro.plate("obs", len(Y), dim=-2), numpyro.plate("column", num_tasks, dim=-1)
        with plates[0], plates[1], numpyro.handlers.mask(mask=mask):
            numpyro.sample("Y", dist.Normal(mean, 0.5), obs=Y)

    return model


def functions_and_weights(location: Callable) -> None:
    """Two functions of 5 inputs, 3 tasks; the location is made of ``W, phi, b``."""
    b = normal("b")
    with numpyro.plate("latent", 2):
        phi = nss.latent_functions("phi", kernels.ExpSquared(0.5), np.linspace(0.0, 1.0, 5))
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("latent", 2):
        W = nss.spike_slab("W", 0.25)
    y = np.random.default_rng(0).normal(size=(5, 3))
    numpyro.sample("y", dist.Normal(location(W, phi, b), 0.5), obs=y)


def mixed(W, phi, b):
    return b + (W @ phi).T
