# SPDX-License-Identifier: Apache-2.0
"""Sites beside the weights that PairedGibbs draws itself, against exact posteriors."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from test_exactness import agrees, sampled
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.roles import InclusionRole, Tally, draw_sites

KEY = random.key(0)


def year_model(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 100.0))
    truth.respond(y, level + X @ truth.weights(X.shape[1]), 0.5)


def test_coefficients_are_drawn_exactly():
    """In single precision, in which products of 200 years would not be exact. Coefficients are
    weights that are always included; Geweke's test has several of them, with links."""
    rng = np.random.default_rng(0)
    year = rng.integers(1990, 2021, 200)
    X = np.column_stack([year, year - rng.integers(0, 4, 200), year + rng.integers(-2, 3, 200)])
    y = 0.03 * (X[:, 0] + X[:, 1] - 4008) + 0.5 * rng.normal(size=200)
    columns, probs = np.column_stack([X, np.ones(200)]), [0.3] * 3 + [1 - 1e-15]
    exact = truth.enumerate_models(truth.regression(columns, y, 0.5, probs, [1.0] * 3 + [100.0]))
    mcmc = sampled(nss.PairedGibbs(year_model), tuple(map(jnp.float32, (X, y))), 20_000)
    draws = mcmc.get_samples(group_by_chain=True)
    values = np.concatenate([draws["w"], draws["level"][..., None]], axis=-1).astype(float)
    products = values[..., :, None] * values[..., None, :]
    # 17 comparisons: a false alarm in 1 of 900 keys
    assert agrees(draws["w_spike"], exact.inclusion[:3], within=0.03)
    assert agrees(values, exact.mean)
    first, second = np.triu_indices(4)
    assert agrees(products[..., first, second], exact.second_moments[first, second])


def test_the_mean_of_what_another_block_draws_is_left_to_it():
    """The draws of the other block are its observations."""

    def model(X, y):
        mean = numpyro.sample("mean", dist.Normal(1.0, 3.0))
        with numpyro.plate("group", 3):
            effect = numpyro.sample("effect", dist.Normal(mean, 1.0))
        truth.respond(y, mean + effect[np.arange(20) % 3] + X @ truth.weights(4), 0.5)

    kernel = Gibbs([(nss.PairedGibbs(model), ["w_spike", "w_slab", "mean"]), (NUTS(model), None)])
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"cannot sample the latent sites \['mean'\]"):
        mcmc.run(KEY, *truth.fixed_case().args)


GROUPS = np.arange(18) % 3


def groups_model(X, y=None):
    tau, sigma = (numpyro.sample(name, dist.HalfNormal(1.0)) for name in ("tau", "sigma"))
    with numpyro.plate("group", 3):
        effect = numpyro.sample("effect", dist.Normal(0.0, tau))
    truth.respond(y, effect[GROUPS] + X @ truth.weights(4), sigma)


def test_the_scale_of_effects_has_its_exact_posterior():
    """A sum over all models and a grid of both scales."""
    rng = np.random.default_rng(0)
    X = truth.design("correlated", num_obs=18, size=4)
    y = X[:, 0] + 0.5 * rng.normal(size=18) + np.array([-0.8, 0.1, 0.7])[GROUPS]
    nodes, weights = np.polynomial.legendre.leggauss(40)
    at, weights = 2 * (nodes + 1), np.log(2 * weights) + stats.halfnorm.logpdf(2 * (nodes + 1))
    of_groups = np.equal.outer(GROUPS, GROUPS)
    models = np.array(list(product([0, 1], repeat=4)))
    columns = (models[:, None] * X) @ X.T
    tau, sigma = at[:, None, None, None, None], at[:, None, None, None]
    cov = tau**2 * of_groups + sigma**2 * np.eye(18) + columns
    density = -0.5 * (np.linalg.slogdet(cov)[1] + np.linalg.solve(cov, y[:, None])[..., 0] @ y)
    prior = models.sum(1) * np.log(0.3) + (4 - models.sum(1)) * np.log(0.7)
    terms = density + weights[:, None, None] + weights[:, None] + prior
    probs = np.exp(terms - terms.max())
    probs /= probs.sum()
    draws = sampled(nss.PairedGibbs(groups_model), (X, y), 10_000).get_samples(group_by_chain=True)
    # 8 comparisons: a false alarm in 1 of 2000 keys
    assert agrees(draws["w_spike"], probs.sum((0, 1)) @ models, within=0.02)
    for k, name in enumerate(["tau", "sigma"]):
        of_scale = probs.sum((1 - k, 2))
        moments = np.stack([draws[name], np.asarray(draws[name]) ** 2], axis=-1)
        assert agrees(moments, [of_scale @ at, of_scale @ at**2])


LIKELIHOODS = {"normal": lambda f: dist.Normal(f, 3.0), "logit": lambda f: dist.Bernoulli(logits=f)}


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_scales_of_effects_do_not_wait_for_the_effects(likelihood):
    """Of two observations for each group; given the effects alone, a scale would hardly move."""
    rng = np.random.default_rng(0)
    group, X = np.repeat(np.arange(15), 2), rng.normal(size=(30, 4))

    def model(X, y):
        tau = numpyro.sample("tau", dist.HalfNormal(1.0))
        with numpyro.plate("group", 15):
            effect = numpyro.sample("effect", dist.Normal(0.0, tau))
        f = effect[group] + X @ truth.weights(4)
        numpyro.sample("y", LIKELIHOODS[likelihood](f).to_event(1), obs=y)

    y = (X[:, 0] + rng.normal(size=30) > 0) * 1.0
    mcmc = sampled(nss.PairedGibbs(model), (X, y), 500, chain_method="sequential")
    tau = np.log(mcmc.get_samples(group_by_chain=True)["tau"])
    assert numpyro.diagnostics.effective_sample_size(np.asarray(tau)) > 100


def test_an_inclusion_probability_leaves_one_and_zero():
    """Where single precision has rounded it to them, as a U-shaped prior makes likely."""
    prior, size = dist.Beta(0.5, 0.5), 300
    pi = jnp.linspace(0.0, 1.0, size, dtype=jnp.float32)
    excluded = jnp.arange(size) % 2

    def step(pi, key):
        tally = Tally(jnp.ones(size), 1.0 - excluded)
        target = InclusionRole("pi", True).target(tally, prior, pi)
        return draw_sites(key, {"pi": target})["pi"], None

    pi, _ = jax.lax.scan(step, pi, random.split(KEY, 200))
    assert np.all((np.asarray(pi) > 0) & (np.asarray(pi) < 1))
    for k, exact in enumerate((stats.beta(1.5, 0.5), stats.beta(0.5, 1.5))):
        # a false alarm in 1 of 5000 keys
        assert stats.kstest(pi[k::2], exact.cdf).pvalue > 1e-4


def test_slab_scales_do_not_wait_for_excluded_slabs():
    """Given these, as a sampler of the scale alone has them, it would hardly move."""

    def model(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        truth.respond(y, X @ truth.weights(200, 0.01, scale), 1.0)

    X = random.normal(KEY, (30, 200))
    mcmc = sampled(nss.PairedGibbs(model), (X, 3.0 * X[:, 7]), 1000)
    scale = np.asarray(mcmc.get_samples(group_by_chain=True)["scale"])
    assert numpyro.diagnostics.effective_sample_size(scale) > 500
