# SPDX-License-Identifier: Apache-2.0
"""Chains whose sweeps of single pairs come by chance, and which cross the bound of flips."""

import numpy as np
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra import flips
from numpyro_spikeslab.sampling.pair_draws import LEAST_SHARE, ShareOfSingles

CHAINS, BURN_IN, STEPS = 64, 100, 400


def test_the_share_after_the_warm_up_keeps_the_posterior(x64, monkeypatch):
    monkeypatch.setattr(flips, "num_slots", lambda size, capacity=None: 1)
    case = truth.fixed_case()
    exact = truth.enumerate_models(case.regression({}))
    kernel = nss.PairedGibbs(case.model)
    state = kernel.init(random.split(random.key(0), CHAINS), 1, None, case.args, {})
    assert np.all(state.singles.share == LEAST_SHARE)
    state = state._replace(singles=state.singles._replace(left=jnp.zeros(CHAINS, int)))

    @jax.jit
    def draw(state):
        def step(state, _):
            state = kernel.sample(state, case.args, {})
            return state, (state.z["w_spike"], state.inclusion_probabilities["w"])

        return jax.lax.scan(step, state, length=BURN_IN + STEPS)

    end, draws = draw(state)
    np.testing.assert_array_equal(end.singles.share, LEAST_SHARE)
    for x in draws:
        means = np.asarray(x, float)[BURN_IN:].mean(0)
        error = means.std(0, ddof=1) / np.sqrt(CHAINS)
        assert np.all(np.abs(means.mean(0) - exact.inclusion) < 4 * error)


def test_only_the_warm_up_learns_the_share():
    few, many = jnp.zeros((1, 100)), jnp.ones((1, 100))
    assert ShareOfSingles.begin(0).at(few).share == 1
    share = ShareOfSingles.begin(200)
    assert share.share == LEAST_SHARE
    share = share.at(many)
    assert share.share == 1
    for _ in range(199):
        share = share.at(few)
    assert share.share == LEAST_SHARE and share.left == 0
    assert share.at(many).share == LEAST_SHARE
