# SPDX-License-Identifier: Apache-2.0
"""The Gaussian that stands in for a likelihood after the warm-up."""

import numpy as np
import pytest

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.pair_metropolis import LearntMoments
from numpyro_spikeslab.sampling.density_step import AdaptState

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 5)) + 3
y = rng.binomial(1, 0.5, size=40)


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


def model_of_classes(X, y, inclusion=0.5):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion, 2.0)
    with numpyro.plate("obs", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=b + X @ w), obs=y)


@pytest.mark.parametrize("size", [1, 40])
def test_steps_that_cannot_move_the_pairs_are_rejected(size):
    """One pair has no flips; nearly 40 included ones of 40 have too few slots."""
    X = np.random.default_rng(0).normal(size=(100, size))
    y = np.random.default_rng(1).random(100) < 1 / (1 + np.exp(-2 * X[:, 0]))
    mcmc = MCMC(
        nss.PairedGibbs(model_of_classes), num_warmup=300, num_samples=500, progress_bar=False
    )
    mcmc.run(random.key(0), X, y, inclusion=0.5 if size == 1 else 0.999)
    w = np.asarray(mcmc.get_samples()["w"])
    # with such steps 0.88
    assert np.mean(np.diff(w[:, 0]) == 0) < 0.05


def test_every_chain_tries_its_gaussian():
    kernel = nss.PairedGibbs(model_of_classes)
    mcmc = MCMC(
        kernel,
        num_warmup=100,
        num_samples=1,
        num_chains=20,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.warmup(random.key(0), X, y)
    # of the last 25 steps of the warm-up one in eight is local; half of the chains would try none
    assert np.min(mcmc.last_state.adapt_state.num_tried) > 12


def test_an_acceptance_that_is_no_number_counts_as_rejected():
    state = nss.PairedGibbs(model_of_classes).init(random.key(0), 100, None, (X, y), {})
    adapt, tried = state.adapt_state, jnp.array(True)
    for accept_prob in (jnp.nan, 0.5):
        gram = adapt.gram
        adapt = adapt.after(adapt.moments, tried, jnp.asarray(accept_prob), lambda x=gram: x)
    np.testing.assert_allclose(adapt.mean_accept_prob, 0.25)


def test_a_step_under_a_poor_gaussian_keeps_the_posterior(monkeypatch):
    """Independent exact draws of two weights, by quadrature, one step each."""
    rng, size = np.random.default_rng(0), 10_000
    X = rng.normal(size=(12, 2)) @ [[1, 0.8], [0, 0.6]] + 0.5
    y = (rng.random(12) < 1 / (1 + np.exp(-2 * X[:, 0]))) * 1.0

    def model(X, y):
        with numpyro.plate("feature", 2):
            w = nss.spike_slab("w", 0.4, 1.5)
        with numpyro.plate("obs", 12):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    at = np.linspace(-9, 9, 121)
    slabs = np.stack(np.meshgrid(at, at, indexing="ij"), axis=-1).reshape(-1, 2)
    spikes = np.repeat([[0, 0], [0, 1], [1, 0], [1, 1]], len(slabs), axis=0)
    slabs = np.tile(slabs, (4, 1))
    f = (spikes * slabs) @ X.T
    log_prob = np.sum(y * f - np.logaddexp(0, f), axis=1)
    log_prob += np.sum(spikes * np.log(0.4 / 0.6) - 0.5 * (slabs / 1.5) ** 2, axis=1)
    prob = np.exp(log_prob) / np.sum(np.exp(log_prob))
    state = nss.PairedGibbs(model).init(random.key(0), 100, None, (X, y), {})
    one = jnp.ones(12)
    moments = LearntMoments(one[0], 0 * one, jnp.asarray(0.5 * (y - 0.5)), one, -0.35 * one)
    adapt = state.adapt_state._replace(moments=moments, gram=jnp.asarray(0.35 * X.T @ X))
    monkeypatch.setattr(AdaptState, "takes_gaussian", lambda self, key: jnp.array(True))
    kernel = nss.PairedGibbs(model)
    kernel.init(random.key(0), 100, None, (X, y), {})

    @jax.jit
    @jax.vmap
    def step(key, spikes, slabs):
        z = {"w_spike": spikes, "w_slab": slabs}
        z = {k: x.astype(state.z[k].dtype) for k, x in z.items()}
        new = kernel.sample(state._replace(z=z, rng_key=key, adapt_state=adapt), (X, y), {})
        return new.z["w_spike"], new.z["w_slab"]

    start = rng.choice(len(prob), size, p=prob)
    drawn = step(random.split(random.key(1), size), spikes[start], slabs[start])
    assert np.mean(np.any(np.asarray(drawn[0]) != spikes[start], axis=1)) > 0.2

    def moments_of(spikes, slabs):
        patterns = spikes @ [2, 1] == np.arange(4)[:, None]
        products = slabs[:, 0] * slabs[:, 1]
        powers = np.stack([np.ones_like(products), *slabs.T, *slabs.T**2, products])
        return (patterns[:, None] * powers).reshape(-1, len(slabs))

    exact, actual = moments_of(spikes, slabs), moments_of(*map(np.asarray, drawn))
    mean = exact @ prob
    z = (actual.mean(axis=1) - mean) / np.sqrt((exact**2 @ prob - mean**2) / size)
    # 24 comparisons; without the current draw, or one chosen at random, above 15
    assert np.max(np.abs(z)) < 4.5
