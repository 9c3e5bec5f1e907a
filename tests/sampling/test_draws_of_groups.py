# SPDX-License-Identifier: Apache-2.0
"""Weights that share a spike: draws of sets, ArviZ data, predictions."""

import pickle

import arviz_base
import numpy as np
import pytest
from scipy import stats
import truth

import jax
from jax import random
import jax.numpy as jnp

from numpyro.infer import MCMC, Predictive

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.pairs import Prior, block_design
from numpyro_spikeslab.algebra.partition import Partition
from numpyro_spikeslab.algebra.pattern_sweeps import gibbs_sweep
from numpyro_spikeslab.algebra.variates import logistic_and_normal

KEY = random.key(0)
GROUPS = (1, 0, 1, 2, 2, 1)
INCLUSION = np.array([0.3, 0.6, 0.15])
SCALE = np.array([1.0, 0.5, 0.8, 1.5, 0.4, 1.0])


def grouped_model(X, y=None):
    w = nss.spike_slab("w", jnp.asarray(INCLUSION), jnp.asarray(SCALE), groups=GROUPS)
    truth.respond(y, X @ w, jnp.linspace(0.5, 1.5, X.shape[0]))


def data():
    X = truth.design("correlated", 20, 6)
    rng = np.random.default_rng(1)
    return X, 0.4 * X[:, 0] - 0.3 * X[:, 2] + 0.2 * X[:, 3] + rng.normal(size=20)


@pytest.fixture(scope="module")
def mcmc():
    """Chains of a kernel from a pickle."""
    kernel = pickle.loads(pickle.dumps(nss.PairedGibbs(grouped_model)))
    options = dict(num_warmup=100, num_samples=2000, progress_bar=False)
    mcmc = MCMC(kernel, num_chains=2, chain_method="vectorized", **options)
    mcmc.run(KEY, *map(jnp.asarray, data()), extra_fields=("inclusion_probabilities.w",))
    return mcmc


@pytest.mark.parametrize("shared", [False, True], ids=["block", "group"])
def test_a_draw_of_one_set_of_all_weights_is_one_of_the_exact_posterior(precision, shared):
    """Pattern and slabs at once, so draws of different keys are independent."""
    X, y = data()
    alone = np.array([0.3, *([0.5] * 5)]) if shared else np.linspace(0.2, 0.7, 6)
    posterior = truth.enumerate_models(truth.regression(X, y, 0.7, alone, SCALE))
    sets = (tuple(range(6)),)
    partition = Partition(6, groups=sets) if shared else Partition(6, blocks=sets)
    if shared:
        posterior = truth.share_spikes(posterior, (0,) * 6)
    prior = Prior(jnp.asarray(np.log(alone / (1 - alone))), jnp.asarray(SCALE**2))
    design, residual = block_design(jnp.asarray(X.T), None), jnp.asarray(y)

    @jax.jit
    @jax.vmap
    def draw(key):
        noise = logistic_and_normal(key, jnp.zeros(6))
        return gibbs_sweep(partition, noise, design, residual, jnp.zeros(6), 0.7**-2, prior)

    spikes, slabs, inclusion = map(np.asarray, draw(random.split(KEY, 40_000)))
    np.testing.assert_allclose(inclusion[0], posterior.inclusion, atol=1e-4)
    # 70 comparisons at 1e-5 each: a false alarm in 1 of 1,400 keys
    truth.check_draws(posterior, spikes, slabs)
    # where it is excluded a slab has its prior
    out = slabs[:, 4][spikes[:, 4] == 0]
    assert stats.kstest(out / SCALE[4], "norm").pvalue > 1e-4


def test_groups_in_arviz_and_predictions(mcmc):
    draws = arviz_base.from_numpyro(mcmc)
    assert draws.posterior["w"].dims == ("chain", "draw", "w_weight")
    assert draws.posterior["w_spike"].dims == ("chain", "draw", "w_group")
    expected = draws.posterior["w_spike"].mean(("chain", "draw")).values[np.asarray(GROUPS)]
    # from the probabilities of the sweeps, and without them from the spikes
    for tolerance in (0.02, 1e-6):
        table = nss.summary(draws, round_to=None)
        inclusion = table.loc[[f"w[{k}]" for k in range(6)], "inclusion"].to_numpy(float)
        np.testing.assert_allclose(inclusion, expected, atol=tolerance)
        assert table.loc["w[0]", "flips"] == table.loc["w[5]", "flips"] > 0
        if "sample_stats" in draws:
            del draws["sample_stats"]
    new = Predictive(grouped_model, mcmc.get_samples())(KEY, jnp.asarray(data()[0]))
    np.testing.assert_allclose(new["w"], mcmc.get_samples()["w"], rtol=1e-6)


def test_groups_of_one_in_another_order():
    """As many spikes as weights, in the order of the groups and not of the weights."""
    X = truth.design("independent", 40, 3)
    y = X[:, 0] + 0.3 * np.random.default_rng(0).normal(size=40)

    def model(X, y):
        truth.respond(y, X @ nss.spike_slab("w", 0.2, groups=[2, 0, 1]), 0.3)

    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=50, num_samples=200, progress_bar=False)
    mcmc.run(KEY, jnp.asarray(X), jnp.asarray(y))
    draws = arviz_base.from_numpyro(mcmc)
    inclusion = nss.summary(draws, round_to=None)["inclusion"].astype(float)
    assert inclusion["w[0]"] > 0.99
    assert max(inclusion["w[1]"], inclusion["w[2]"]) < 0.5
    with pytest.raises(ValueError, match=r"expected one of .* with a spike for each column"):
        nss.credible_sets(draws, "w", X)


def test_near_copies_beside_a_group_change_places():
    """Weights alone have flips and swaps beside those that share a spike."""
    groups, alone = (0, 1, 2, 2, 3, 4), np.array([0.2, 0.2, 0.2, 0.5, 0.2, 0.2])
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 6))
    X[:, 1] = X[:, 0] + 0.02 * rng.normal(size=60)
    y = X[:, 0] + 0.5 * X[:, 2] + 0.5 * rng.normal(size=60)

    def model(X, y):
        truth.respond(y, X @ nss.spike_slab("w", 0.2, groups=groups), 0.5)

    options = dict(num_warmup=100, num_samples=1000, num_chains=4, progress_bar=False)
    mcmc = MCMC(nss.PairedGibbs(model), chain_method="vectorized", **options)
    mcmc.run(KEY, jnp.asarray(X), jnp.asarray(y), extra_fields=("inclusion_probabilities.w",))
    posterior = truth.enumerate_models(truth.regression(X, y, 0.5, alone, 1.0))
    exact = truth.share_spikes(posterior, groups).inclusion
    probs = mcmc.get_extra_fields()["inclusion_probabilities.w"].mean(axis=0)
    spikes = mcmc.get_samples()["w_spike"][:, np.asarray(groups)].mean(axis=0)
    # least effective size of 2,000, so four standard errors are 0.045
    np.testing.assert_allclose(spikes, exact, atol=0.045)
    np.testing.assert_allclose(probs, exact, atol=0.03)
    table = nss.summary(arviz_base.from_numpyro(mcmc), round_to=None).astype(float)
    assert table["ess_bulk"].min() > 1000
