# SPDX-License-Identifier: Apache-2.0
"""Likelihoods that are not Normal: PairedGibbs and CAVI against the Normal one and their peers.

The cancer data need scikit-learn. sparsevb is optional; it needs a Fortran compiler and LAPACK.
"""

from functools import partial
import sys
from time import perf_counter
import warnings

from bench_cavi import NUM_ACTIVE, simulate
from bench_mixing import autoregressive, compare, equicorrelated
import numpy as np
from scipy.special import expit
from timing import row

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import NUTS, DiscreteHMCGibbs

import numpyro_spikeslab as nss

INTERCEPT_SCALE = 5.0


def logit(f):
    return dist.Bernoulli(logits=f)


def model_of(likelihood, inclusion, intercept=False):
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, INTERCEPT_SCALE)) if intercept else 0.0
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", inclusion)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", likelihood(X @ w + b), obs=y)

    return model


def planted(X, num_active, effect):
    """A predictor of some columns with effects of one size, and a generator for responses."""
    rng = np.random.default_rng(1)
    included = rng.choice(X.shape[1], num_active, replace=False)
    return X[:, included] @ (effect * rng.choice([-1, 1], num_active)), rng


def standardised(X):
    return (X - X.mean(0)) / X.std(0)


def equal():
    X = equicorrelated()[0]
    f, rng = planted(X, 10, 1.5)
    return X, rng.binomial(1, expit(f)), model_of(logit, 0.02)


def counts():
    X = autoregressive(correlation=0.9)[0]
    f, rng = planted(X, 8, 0.4)
    return X, rng.poisson(np.exp(f)), model_of(lambda f: dist.Poisson(jnp.exp(f)), 0.08)


def cancer():
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return standardised(X), y, model_of(logit, 0.2, intercept=True)


def against_hmc(problem, X, y, model, num_ours, num_peer):
    kernels = {
        "`PairedGibbs`": (nss.PairedGibbs(model), num_ours, 1000),
        "`DiscreteHMCGibbs(NUTS)`": (DiscreteHMCGibbs(NUTS(model)), num_peer, num_peer // 2),
    }
    compare(f"{problem}, {X.shape[0]} x {X.shape[1]}", X.astype(float), y, kernels)


def step(num_steps=300, rounds=8):
    """Rounds of some steps, the likelihoods in turn; the shortest of each counts."""
    X, y, model = equal()
    f, rng = planted(X, 10, 1.5)
    cases = {
        "Normal": (model_of(lambda f: dist.Normal(f, 1.0), 0.02), f + rng.normal(size=len(f))),
        "logit": (model, y),
    }
    chains, X = {}, jnp.asarray(X)
    for name, (model, y) in cases.items():
        kernel, y = nss.PairedGibbs(model), jnp.asarray(y)

        def turn(_, state, kernel=kernel, y=y):
            return kernel.sample(state, (X, y), {})

        chain = jax.jit(lambda state, num, turn=turn: jax.lax.fori_loop(0, num, turn, state))
        start = kernel.init(random.key(0), 1000, None, (X, y), {})
        chains[name] = chain, jax.block_until_ready(chain(start, 1000))
    times = dict.fromkeys(chains, np.inf)
    for _ in range(rounds):
        for name, (chain, state) in chains.items():
            start = perf_counter()
            jax.block_until_ready(chain(state, num_steps))
            times[name] = min(times[name], (perf_counter() - start) / num_steps)
    logit_ms, normal_ms = (1e3 * times[name] for name in ("logit", "Normal"))
    problem = "logit, 400 x 500, all columns with correlation 0.7"
    row(problem, "ms a step", logit_ms, "itself: Normal", normal_ms, normal_ms / logit_ms)


def fits(num_rounds=3):
    """CAVI at 1000 x 5000 to convergence, without compilation, both in turn; the least counts."""
    X, y, w = simulate(0)
    classes = np.random.default_rng(1).binomial(1, expit(X @ w))
    runs = {}
    for name, likelihood, response in (
        ("Normal", lambda f: dist.Normal(f, 1.0), y),
        ("logit", logit, classes),
    ):
        model = model_of(likelihood, NUM_ACTIVE / X.shape[1])
        cavi = nss.CAVI(model, nss.PairedGuide(model))
        data = jnp.asarray(X), jnp.asarray(response)
        runs[name] = partial(cavi.run, random.key(0), 300, *data, progress_bar=False)
        runs[name]()
    times = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, one in runs.items():
            start = perf_counter()
            one()
            times[name].append(perf_counter() - start)
    best = {name: min(x) for name, x in times.items()}
    try:
        from sparsevb import svb_fit_logit
    except ImportError:
        print("sparsevb is not installed: no comparison", file=sys.stderr)
    else:
        start = perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            svb_fit_logit(X, classes, slab="gaussian")
        best["sparsevb (C++)"] = perf_counter() - start
    ours = best.pop("logit")
    for name, seconds in best.items():
        name = name.replace("Normal", "itself: Normal")
        problem = f"logit, {X.shape[0]} x {X.shape[1]}, {NUM_ACTIVE} effects"
        row(problem, "seconds of `CAVI` to convergence", ours, name, seconds, seconds / ours)


def main() -> None:
    step()
    against_hmc("Poisson, neighbours with correlation 0.9", *counts(), 10_000, 2000)
    against_hmc("logit, breast cancer", *cancer(), 20_000, 2000)
    fits()


if __name__ == "__main__":
    main()
