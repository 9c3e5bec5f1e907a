# SPDX-License-Identifier: Apache-2.0
"""PairedGibbs where latent sites choose the design, against sums over all their values."""

from itertools import product

import numpy as np
import pytest
import truth

from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, DiscreteGibbs, Gibbs

import numpyro_spikeslab as nss

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
RNG = np.random.default_rng(4)
N = 6
A, B = RNG.normal(size=(N, 2)), RNG.normal(size=(N, 2))
GROUPS = np.array([1, 0, 1, 1, 0, 0])


def pair(name, size=2):
    with numpyro.plate(f"{name}_feature", size):
        return nss.spike_slab(name, 0.4, 1.5)


def observe(loc, y):
    with numpyro.plate("obs", N):
        numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)


def scaled_by_a_spike(A, B, y=None):
    z = numpyro.sample("z", dist.Bernoulli(0.3))
    observe(z * (A @ pair("w")), y)


def mixed(A, B, y=None):
    with numpyro.plate("group", N):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
    observe(jnp.where(z > 0, A @ pair("w"), B @ pair("v")), y)


Y_SPIKE = A @ np.array([0.35, 0.0]) + 0.5 * RNG.normal(size=N)
Y_MIXED = np.where(GROUPS, A @ [1.0, 0.0], B @ [0.0, -1.0]) + 0.5 * RNG.normal(size=N)

MIXTURES = [
    (1.0, np.column_stack([np.where(z, A.T, 0).T, np.where(z, 0, B.T).T]))
    for z in product([False, True], repeat=N)
]
# the model, its data, the designs with their probabilities, and the names of the weights
CASES = {
    "z * (X @ w)": (scaled_by_a_spike, Y_SPIKE, [(0.7, 0 * A), (0.3, A)], ["w"]),
    "where(z_n, X @ w, X @ v)": (mixed, Y_MIXED, MIXTURES, ["w", "v"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_design_that_latent_sites_choose_is_evaluated_in_every_step(name):
    model, y, designs, names = CASES[name]
    exact = [truth.enumerate_models(truth.regression(D, y, 0.5, 0.4, 1.5)) for _, D in designs]
    logs = np.array([p.log_evidence for p in exact]) + np.log([prob for prob, _ in designs])
    probs = np.exp(logs - np.logaddexp.reduce(logs))
    inclusion = probs @ np.array([p.inclusion for p in exact])
    mean = probs @ np.array([p.mean for p in exact])
    # the choice matters: no design is certain
    assert probs.max() < 0.95

    kernel = Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (DiscreteGibbs(model), ["z"])])
    mcmc = MCMC(kernel, num_warmup=200, num_samples=20_000, progress_bar=False)
    mcmc.run(KEY, jnp.asarray(A), jnp.asarray(B), jnp.asarray(y))
    draws = mcmc.get_samples()
    spikes = np.concatenate([draws[f"{x}_spike"] for x in names], axis=1)
    w = np.concatenate([draws[x] for x in names], axis=1)
    # autocorrelated draws: five standard errors of a tenth as many; the errors looked for are
    # of the order of the probabilities themselves
    size = 2000
    error = np.sqrt(inclusion * (1 - inclusion) / size)
    assert np.all(np.abs(spikes.mean(0) - inclusion) < 5 * error), (spikes.mean(0), inclusion)
    assert np.all(np.abs(w.mean(0) - mean) < 5 * w.std(0) / np.sqrt(size))
