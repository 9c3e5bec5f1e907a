# SPDX-License-Identifier: Apache-2.0
"""Chains of one kernel side by side, in parallel and one after the other, in a process of its own,
for the number of devices is set before anything is computed. Raises where they differ."""

import numpy as np

import jax
from jax import random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss


def model(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3, 1.0)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def draws(kernel, num_chains, method, *args):
    options = dict(num_chains=num_chains, chain_method=method, progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=20, **options)
    mcmc.run(random.key(0), *args)
    return mcmc.get_samples(group_by_chain=True)["w"]


if __name__ == "__main__":
    numpyro.set_host_device_count(3)
    X = random.normal(random.key(1), (30, 4))
    y = X[:, 0] + random.normal(random.key(2), (30,))
    kernel = nss.PairedGibbs(model)
    # one after the other, for a sequential chain between them would be read anew
    for parallel in [draws(kernel, number, "parallel", X, y) for number in (3, 2)]:
        number = len(parallel)
        assert len(parallel.sharding.device_set) == number
        for method in ("sequential", "vectorized", jax.vmap):
            others = draws(kernel, number, method, X, y)
            np.testing.assert_allclose(parallel, others, atol=1e-5)
        print(number, "chains")
