# SPDX-License-Identifier: Apache-2.0
"""PairedGibbs on correlated columns, against its sweep of single pairs and NumPyro's own sampler.

The least effective sample size per second of a weight with inclusion above 0.02, without
compilation. The diabetes data need scikit-learn.
"""

import warnings

import numpy as np
from timing import Compilations, row

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs

import numpyro_spikeslab as nss

compilations = Compilations()


def diabetes():
    """Diabetes with squares and interactions."""
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    first, second = np.triu_indices(X.shape[1])
    X = np.column_stack([X, X[:, first] * X[:, second]])
    X, y = ((x - x.mean(0)) / x.std(0) for x in (X, y))
    twice = np.triu(np.abs(X.T @ X) / len(X) > 1 - 1e-8, 1).any(0)
    return X[:, ~twice], y, (0.7, 0.5, 0.1)


def autoregressive(num_obs=200, num_features=100, correlation=0.97):
    """Neighbours with correlation 0.97."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_obs, num_features))
    for j in range(1, num_features):
        X[:, j] = correlation * X[:, j - 1] + np.sqrt(1 - correlation**2) * X[:, j]
    return respond(rng, X, rng.choice(num_features, 8, replace=False), rng.choice([-1, 1], 8))


def equicorrelated(num_obs=400, num_features=500):
    """All columns with correlation 0.7."""
    rng = np.random.default_rng(0)
    X = np.sqrt(0.7) * rng.normal(size=(num_obs, 1))
    X = X + np.sqrt(0.3) * rng.normal(size=(num_obs, num_features))
    return respond(rng, X, np.arange(10), rng.normal(size=10))


def blocks():
    """Blocks of ten columns with correlation 0.9."""
    rng = np.random.default_rng(0)
    common = np.repeat(rng.normal(size=(1000, 500)), 10, axis=1)
    X = np.sqrt(0.9) * common + np.sqrt(0.1) * rng.normal(size=(1000, 5000))
    return respond(rng, X, rng.choice(5000, 20, replace=False), rng.normal(size=20))


def respond(rng, X, included, effects):
    y = X[:, included] @ effects + rng.normal(size=len(X))
    return X, y, (1.0, 1.0, len(included) / X.shape[1])


def fixed_model(sigma, scale, inclusion):
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", inclusion, scale)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)

    return model


def run(kernel, num_samples, X, y, num_warmup=500):
    """The draws, and seconds of a step, compilation out."""
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
    mcmc.warmup(random.key(0), X, y)
    draws, elapsed = compilations.left_out(
        lambda: mcmc.run(random.key(1), X, y) or mcmc.get_samples()
    )
    return draws, elapsed / num_samples


def min_ess(x):
    """The least effective sample size of some sites; one that never moves counts as one draw."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nan_to_num(effective_sample_size(x[None]), nan=1).min()


def compare(problem, X, y, kernels):
    """:param kernels: by name, each with its numbers of draws and of warm-up steps; ours first."""
    X, y, ours = jnp.asarray(X), jnp.asarray(y), None
    for name, (kernel, num_samples, num_warmup) in kernels.items():
        draws, seconds = run(kernel, num_samples, X, y, num_warmup)
        if ours is None:
            counted = np.asarray(draws["w_spike"]).mean(0) > 0.02
        rate = min_ess(np.asarray(draws["w"], float)[:, counted]) / num_samples / seconds
        if ours is None:
            ours = rate
        else:
            row(problem, "least ESS per second of a weight", ours, name, rate, ours / rate)


def design(make, *numbers):
    """:param numbers: of draws with collapsed moves, of single pairs, and of NumPyro's sampler."""
    X, y, fixed = make()
    model = fixed_model(*fixed)
    kernels = {
        "`PairedGibbs`": nss.PairedGibbs(model),
        "itself: `collapsed=False`": nss.PairedGibbs(model, collapsed=False),
        "`DiscreteHMCGibbs(NUTS)`": DiscreteHMCGibbs(NUTS(model)),
    }
    runs = {
        name: (kernel, number, min(500, number // 2))
        for (name, kernel), number in zip(kernels.items(), numbers, strict=False)
    }
    compare(f"{make.__doc__.rstrip('.')}, {X.shape[0]} x {X.shape[1]}", X, y, runs)


def main() -> None:
    design(diabetes, 20_000, 40_000)
    design(autoregressive, 10_000, 40_000)
    design(equicorrelated, 20_000, 20_000, 800)
    design(blocks, 500, 2_000)


if __name__ == "__main__":
    main()
