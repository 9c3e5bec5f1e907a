# SPDX-License-Identifier: Apache-2.0
"""Paired Gibbs against NumPyro's DiscreteHMCGibbs(NUTS) on the same model, in one run.

Minimum effective sample size per second of the weights with inclusion probability above 0.02.
Run: ``python tests/benchmarks/bench_gibbs.py``.
"""

import arviz_stats
import numpy as np
from timing import Compilations, enable_x64

from jax import random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs, Gibbs

import numpyro_spikeslab as nss

NUM_ACTIVE, CORRELATION = 10, 0.7
compilations = Compilations()


def simulate(num_obs: int, num_features: int) -> tuple[np.ndarray, np.ndarray]:
    """Design with equally correlated columns, and a response."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(num_obs, 1))
    own = rng.normal(size=(num_obs, num_features))
    X = np.sqrt(CORRELATION) * common + np.sqrt(1.0 - CORRELATION) * own
    w = np.zeros(num_features)
    w[:NUM_ACTIVE] = rng.normal(size=NUM_ACTIVE)
    return X, X @ w + rng.normal(size=num_obs)


def model(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", expected_size=NUM_ACTIVE)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def composite_model(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 9.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def run(kernel, num_samples: int, X, y) -> tuple[MCMC, float]:
    """The run, and seconds of its sampling phase without compilation."""
    mcmc = MCMC(kernel, num_warmup=num_samples, num_samples=num_samples, progress_bar=False)
    mcmc.warmup(random.key(0), X, y)
    _, elapsed = compilations.left_out(lambda: mcmc.run(random.key(1), X, y) or mcmc.get_samples())
    return mcmc, elapsed


def min_ess(mcmc: MCMC, counted: np.ndarray) -> float:
    draws = np.asarray(mcmc.get_samples()["w"], dtype=float)[:, counted]
    return min(float(arviz_stats.ess(column[None], method="bulk")) for column in draws.T)


def main() -> None:
    enable_x64()
    for num_obs, num_features, num_peer in ((200, 100, 10_000), (400, 500, 1000)):
        X, y = simulate(num_obs, num_features)
        ours, elapsed = run(nss.PairedGibbs(model), 20_000, X, y)
        counted = np.flatnonzero(np.asarray(ours.get_samples()["w_spike"]).mean(0) > 0.02)
        rate = min_ess(ours, counted) / elapsed
        print(f"N={num_obs}, P={num_features}, {len(counted)} weights counted", flush=True)
        print(f"  PairedGibbs: {rate:.0f} min ESS/s, {elapsed / 20_000 * 1e3:.3f} ms a step")
        peer, peer_elapsed = run(DiscreteHMCGibbs(NUTS(model)), num_peer, X, y)
        peer_rate = min_ess(peer, counted) / peer_elapsed
        print(
            f"  DiscreteHMCGibbs(NUTS), {num_peer} draws in {peer_elapsed:.0f} s: {peer_rate:.2f} "
            f"min ESS/s; ratio {rate / peer_rate:.0f} (wanted: at least 200)"
        )
    X, y = simulate(400, 500)
    blocks = [
        (nss.PairedGibbs(composite_model), nss.paired_sites),
        (NUTS(composite_model), None),
    ]
    _, elapsed = run(Gibbs(blocks), 2000, X, y)
    print(f"composite with NUTS at (400, 500): {elapsed / 2000 * 1e3:.3f} ms a step (at most 0.6)")


if __name__ == "__main__":
    main()
