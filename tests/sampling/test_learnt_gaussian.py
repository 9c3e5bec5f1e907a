# SPDX-License-Identifier: Apache-2.0
"""The Gaussian that stands in for a likelihood after the warm-up."""

import numpy as np
import pytest

from jax import random

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

import numpyro_spikeslab as nss

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 5)) + 3
y = rng.binomial(1, 0.5, size=40)


@pytest.mark.slow
def test_gram_matrix_is_that_of_columns_outside_of_the_intercept():
    def model():
        b = numpyro.sample("b", dist.Normal(0.0, 5.0))
        with numpyro.plate("feature", 5):
            w = nss.spike_slab("w", 0.5)
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + b).to_event(1), obs=y)

    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=100, num_samples=1, progress_bar=False)
    mcmc.warmup(random.key(0))
    learnt = mcmc.last_state.adapt_state
    root = np.sqrt(np.asarray(learnt.moments.stand_in().precision, np.float64))
    columns, basis = X * root[:, None], root / np.linalg.norm(root)
    columns -= np.outer(basis, basis @ columns)
    np.testing.assert_allclose(learnt.gram, columns.T @ columns, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("moves", "is_kept"), [("offset", True), ("design", False), ("mask", False)]
)
def test_gram_matrix_is_kept_only_if_no_other_site_changes_it(moves, is_kept):
    def model():
        t = numpyro.sample("t", dist.Normal(0.0, 1.0))
        with numpyro.plate("feature", 5):
            w = nss.spike_slab("w", 0.5)
        f = X @ w * (t if moves == "design" else 1) + (t if moves == "offset" else 0)
        with handlers.mask(mask=(t > 0) | (y >= 0) if moves == "mask" else True):
            numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)

    sites = {GIBBS_SITES_KWARG: {"t": np.float32(0.5)}}
    state = nss.PairedGibbs(model).init(random.key(0), 100, None, (), sites)
    assert (state.adapt_state.gram is not None) == is_kept
