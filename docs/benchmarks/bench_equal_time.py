# SPDX-License-Identifier: Apache-2.0
"""Errors of inclusion probabilities after equal times: PairedGibbs against its peers.

The peers are NumPyro's DiscreteHMCGibbs(NUTS) and, where it is installed, millipede's weighted
tempered Gibbs sampler. All sample the same posterior: noise, slab scale and inclusion probability
are given. The truth is a run of PairedGibbs ten times as long. Compilation is left out.
"""

import sys

from bench_mixing import autoregressive, fixed_model
import numpy as np
from timing import Compilations, enable_x64, row

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs

import numpyro_spikeslab as nss

try:
    from millipede import NormalLikelihoodVariableSelector
    import pandas as pd
except ImportError:
    NormalLikelihoodVariableSelector = None

SECONDS, NUM_SEEDS = 5.0, 2
SIZE = (200, 100)
compilations = Compilations()


def paired(model, X, y):
    kernel = nss.PairedGibbs(model)

    def step(_, carry):
        state, total = carry
        state = kernel.sample(state, (X, y), {})
        return state, total + state.inclusion_probabilities["w"]

    @jax.jit
    def chain(state, num_samples):
        nothing = jnp.zeros(X.shape[1])
        state, _ = jax.lax.fori_loop(0, num_samples // 10, step, (state, nothing))
        return jax.lax.fori_loop(0, num_samples, step, (state, nothing))[1] / num_samples

    def run(seed, num_samples):
        state = kernel.init(random.key(seed), num_samples // 10, None, (X, y), {})
        return np.asarray(chain(state, num_samples))

    return run


def mixed(model, X, y):
    def run(seed, num_samples):
        kernel = DiscreteHMCGibbs(NUTS(model))
        mcmc = MCMC(
            kernel, num_warmup=num_samples // 2, num_samples=num_samples, progress_bar=False
        )
        mcmc.run(random.key(seed), X, y)
        return np.asarray(mcmc.get_samples()["w_spike"].mean(0))

    return run


def weighted(fixed, X, y):
    sigma, scale, inclusion = fixed
    table = pd.DataFrame(np.asarray(X)).assign(y=np.asarray(y))
    table.columns = [str(name) for name in table.columns]
    selector = NormalLikelihoodVariableSelector(
        table,
        "y",
        S=inclusion * X.shape[1],
        include_intercept=False,
        tau=(sigma / scale) ** 2,
        # so many observations beforehand that the noise is known
        nu0=1e9,
        lambda0=sigma**2,
        precompute_XX=True,
    )

    def run(seed, num_samples):
        selector.run(T=num_samples, T_burnin=num_samples // 5, verbosity=None, seed=seed)
        return selector.pip.to_numpy()

    return run


def in_time(run, pilot):
    """A run that takes as many samples as there is time for."""
    compilations.left_out(run, 0, pilot)
    _, seconds = compilations.left_out(run, 0, pilot)
    return lambda seed, times=1: run(seed, max(2, int(times * pilot * SECONDS / seconds)))


def main() -> None:
    enable_x64()
    X, y, fixed = autoregressive(*SIZE)
    X, y, model = jnp.asarray(X), jnp.asarray(y), fixed_model(*fixed)
    ours = in_time(paired(model, X, y), 2_000)
    truth = ours(100, times=10)
    peers = {"`DiscreteHMCGibbs(NUTS)`": in_time(mixed(model, X, y), 40)}
    if NormalLikelihoodVariableSelector is None:
        print("millipede is not installed: no comparison", file=sys.stderr)
    else:
        peers["millipede"] = in_time(weighted(fixed, X, y), 500)

    def error(run) -> float:
        results = [run(seed) for seed in range(1, 1 + NUM_SEEDS)]
        return float(np.sqrt(np.mean((np.asarray(results) - truth) ** 2)))

    best, problem = error(ours), "neighbours with correlation 0.97, {} x {}".format(*SIZE)
    for name, run in peers.items():
        what, theirs = f"RMSE of inclusion probabilities after {SECONDS:.0f} s", error(run)
        row(problem, what, best, name, theirs, theirs / best)


if __name__ == "__main__":
    main()
