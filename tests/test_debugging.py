# SPDX-License-Identifier: Apache-2.0
"""Public calls under the checks of JAX: each key is used once, and no number is NaN."""

import numpy as np
import pytest
from tinygp import kernels

import jax
from jax import random

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.sampling import latent_gibbs
from numpyro_spikeslab.sampling.latent_step import LatentStep

pytestmark = pytest.mark.filterwarnings(
    "error", "ignore:CAVI.run", "ignore:sparse_regression. the Monte Carlo"
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 3))
Y = 2 * X[:, 1] + 0.3 * RNG.normal(size=30)
INPUTS = np.linspace(0, 4, 12)
TASKS = np.stack([np.sin(INPUTS), -np.sin(INPUTS), np.cos(INPUTS)], axis=1)
SHORT = {"num_samples": 250, "num_chains": 2}


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(b + X @ w, sigma), obs=y)


def key(number=0):
    """Make a key, for a call marks its own as used."""
    return random.key(number)


def tasks(likelihood=dist.Normal):
    return nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2, likelihood=likelihood)


def fit(model, *args, num_restarts, num_steps):
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=num_restarts)
    state, _ = svi.update(svi.init(key(), *args), *args)
    svi.evaluate(state, *args)
    result = svi.run(key(), num_steps, *args, tol=1e-6, progress_bar=False)
    again = svi.run(key(), 5, *args, init_state=result.state, progress_bar=False)
    draws = guide.sample_posterior(key(), again.params, *args, sample_shape=(3,))
    assert all(np.isfinite(x).all() for x in draws.values())


def chain(kernel, *args):
    mcmc = MCMC(kernel, num_warmup=4, num_samples=4, progress_bar=False)
    mcmc.run(key(), *args)


def statistics():
    nss.sparse_regression_from_statistics(key(), n=30, z=[5.0, 1.0, 0.0], R=np.eye(3), **SHORT)


def estimator():
    nss.SparseRegressor(random_state=0, **SHORT).fit(X, Y).predict(X, return_std=True)


CALLS = {
    "fit": lambda: fit(model, X, Y, num_restarts=3, num_steps=110),
    "fit of functions": lambda: fit(tasks(), INPUTS, TASKS, num_restarts=3, num_steps=20),
    "pairs": lambda: chain(nss.PairedGibbs(model), X, Y),
    "functions": lambda: chain(nss.LatentGibbs(tasks()), INPUTS, TASKS),
    "table": lambda: nss.predict(nss.sparse_regression(key(), X, Y, **SHORT), X[:4]),
    "classes": lambda: nss.sparse_regression(key(), X, Y > 0, likelihood="logit", **SHORT),
    "statistics": statistics,
    "estimator": estimator,
}


@pytest.mark.parametrize("check", [jax.debug_key_reuse, jax.debug_nans])
@pytest.mark.parametrize("call", CALLS)
def test_calls_pass_the_checks_of_jax(x64, check, call):
    with check(True):
        CALLS[call]()


# JAX does not see that `fold_in` makes one of the keys of `split`


def are_of_one(key, other):
    """Whether a key is one of those that the other is split into."""
    return (random.key_data(random.split(other, 9)) == random.key_data(key)).all(-1).any()


def test_auxiliary_variables_have_a_key_of_their_own(x64, monkeypatch):
    keys = {}

    def auxiliaries(step, key):
        keys["auxiliaries"] = key
        return step

    def weights(step, key, *args):
        keys["weights"] = key
        raise KeyboardInterrupt

    monkeypatch.setattr(LatentStep, "with_auxiliaries", auxiliaries)
    monkeypatch.setattr(LatentStep, "draw_weights", weights)
    kernel, args = latent_gibbs.LatentGibbs(tasks(lambda f: dist.Bernoulli(logits=f))), (INPUTS,)
    args += ((TASKS > 0).astype(int),)
    with pytest.raises(KeyboardInterrupt):
        kernel.sample(kernel.init(key(), 0, None, args, {}), args, {})
    assert not are_of_one(keys["auxiliaries"], keys["weights"])
