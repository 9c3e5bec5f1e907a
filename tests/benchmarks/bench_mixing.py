# SPDX-License-Identifier: Apache-2.0
"""PairedGibbs with collapsed moves against the sweep of single pairs, on correlated columns.

And, on equal correlations, against NumPyro's DiscreteHMCGibbs(NUTS). Minimum effective sample sizes
per second, of spikes with inclusion between 0.03 and 0.97 and of weights with inclusion above 0.02,
and milliseconds of a step that samples the noise too.
Run: ``python tests/benchmarks/bench_mixing.py``, with names of designs for these alone. The
diabetes data need scikit-learn.
"""

import sys
from typing import Any
import warnings

import numpy as np
from timing import Compilations

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Gibbs

import numpyro_spikeslab as nss

compilations = Compilations()


def diabetes():
    """With squares and interactions, and without columns that are there twice: 442 x 64."""
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    first, second = np.triu_indices(X.shape[1])
    X = np.column_stack([X, X[:, first] * X[:, second]])
    X, y = ((x - x.mean(0)) / x.std(0) for x in (X, y))
    twice = np.triu(np.abs(X.T @ X) / len(X) > 1 - 1e-8, 1).any(0)
    return X[:, ~twice], y, (0.7, 0.5, 0.1)


def autoregressive(num_obs=200, num_features=100, correlation=0.97):
    """Correlated neighbours."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_obs, num_features))
    for j in range(1, num_features):
        X[:, j] = correlation * X[:, j - 1] + np.sqrt(1 - correlation**2) * X[:, j]
    return respond(rng, X, rng.choice(num_features, 8, replace=False), rng.choice([-1, 1], 8))


def equicorrelated(num_obs=400, num_features=500):
    """All columns with a correlation of 0.7."""
    rng = np.random.default_rng(0)
    X = np.sqrt(0.7) * rng.normal(size=(num_obs, 1))
    X = X + np.sqrt(0.3) * rng.normal(size=(num_obs, num_features))
    return respond(rng, X, np.arange(10), rng.normal(size=10))


def blocks():
    """Blocks of ten columns with a correlation of 0.9."""
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


def composite_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 9.0))
    fixed_model(sigma, 1.0, inclusion)(X, y)


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


def compare(make, size, *numbers):
    """:param numbers: of draws with collapsed moves, of single pairs, and of NumPyro's sampler."""
    X, y, fixed = make(*size)
    X, y, model = jnp.asarray(X), jnp.asarray(y), fixed_model(*fixed)
    print(f"{make.__name__}, {X.shape[0]} x {X.shape[1]}")
    kernels: dict[str, Any] = {
        "collapsed moves": nss.PairedGibbs(model),
        "single pairs": nss.PairedGibbs(model, collapsed=False),
        "DiscreteHMCGibbs(NUTS)": DiscreteHMCGibbs(NUTS(model)),
    }
    best = mean = None
    for (name, kernel), number in zip(kernels.items(), numbers, strict=False):
        draws, seconds = run(kernel, number, X, y, min(500, number // 2))
        spikes, w = (np.asarray(draws[key], float) for key in ("w_spike", "w"))
        mean = spikes.mean(0) if mean is None else mean
        counted = spikes[:, (mean > 0.03) & (mean < 0.97)], w[:, mean > 0.02]
        rates = np.array([min_ess(x) for x in counted]) / number / seconds
        best = rates if best is None else best
        print(
            f"  {name}: {rates[0]:.3g} min ESS/s of spikes, {rates[1]:.3g} of weights, "
            f"{seconds * 1e3:.3f} ms a step; {best[0] / rates[0]:.0f} and "
            f"{best[1] / rates[1]:.0f} times as slow as the first",
            flush=True,
        )


def with_noise(make):
    """The noise and the inclusion probability sampled too, by NUTS or without another block."""
    X, y, _ = make()
    for collapsed in (False, True):
        alone = nss.PairedGibbs(composite_model, collapsed=collapsed)
        beside = Gibbs([(alone, nss.paired_sites), (NUTS(composite_model), None)])
        for name, kernel in (("alone", alone), ("beside NUTS", beside)):
            _, seconds = run(kernel, 1500, jnp.asarray(X), jnp.asarray(y))
            print(f"  {name}, collapsed={collapsed}: {seconds * 1e3:.3f} ms a step", flush=True)


CASES = (
    (diabetes, (), 20_000, 80_000),
    (autoregressive, (), 10_000, 80_000),
    (equicorrelated, (200, 100), 20_000, 20_000, 10_000),
    (equicorrelated, (), 20_000, 20_000, 1000),
    (blocks, (), 800, 4_000),
)


def main() -> None:
    for make, size, *numbers in CASES:
        if len(sys.argv) < 2 or make.__name__ in sys.argv:
            compare(make, size, *numbers)
            if make in (autoregressive, equicorrelated) and not size:
                with_noise(make)


if __name__ == "__main__":
    main()
