# SPDX-License-Identifier: Apache-2.0
"""Weights that need others, against sums over all models that are allowed."""

from contextlib import nullcontext

import numpy as np
import pytest
from scipy.special import betaln, expit, logsumexp
import truth

import jax
from jax import nn, random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.heredity import HereditaryPrior, Heredity
from numpyro_spikeslab.models.distributions import HereditarySpikes
from numpyro_spikeslab.support.precision import within_single

KEY = random.key(0)
# a, b, c, a:b, a:c, and a:b:c, whose parent b:c is not there
PARENTS = ((), (), (), (0, 1), (0, 2), (3, 4))
RULES = {
    "weak": Heredity(PARENTS, (0, 0, 0, 1, 1, 1)),
    "strong": Heredity(PARENTS, (0, 0, 0, 2, 2, 2)),
}
GROUPS = (0, 1, 2, 3, 4, 5, 3, 0)
SLAB, BETA = 0.7, (1.0, 2.0)
PI = np.array([0.2, 0.5, 0.7, 0.4, 0.6, 0.3])
SETS = np.array(list(np.ndindex(*[2] * 6)))


def allowed(rule, spikes):
    """Whether the parents of each spike allow it."""
    counts = [spikes[..., list(x)].sum(-1) for x in PARENTS]
    return np.stack([count >= least for count, least in zip(counts, rule.least, strict=True)], -1)


def log_prior(rule, spikes):
    may = allowed(rule, spikes)
    logs = np.where(spikes > 0, np.log(PI), may * np.log1p(-PI)).sum(-1)
    return np.where(np.all(spikes <= may, axis=-1), logs, -np.inf)


@pytest.mark.parametrize("kind", RULES)
def test_the_prior_is_that_of_its_definition(kind):
    probs = np.exp(log_prior(RULES[kind], SETS))
    assert probs.sum() == pytest.approx(1.0)
    prior = HereditarySpikes(jnp.asarray(PI), RULES[kind])
    logs = np.asarray(prior.log_prob(jnp.asarray(SETS))).sum(-1)
    np.testing.assert_allclose(np.exp(logs), probs, atol=1e-6)
    size = 40_000
    draws = np.asarray(prior.sample(KEY, (size,))) @ 2 ** np.arange(6)[::-1]
    error = np.sqrt(probs * (1 - probs) / size)
    # 64 comparisons at five standard errors
    assert np.all(abs(np.bincount(draws, minlength=64) / size - probs) <= 5 * error)


@pytest.mark.parametrize("kind", RULES)
def test_log_odds_of_one_spike_given_the_others(kind):
    """From allowed sets each spike, and from forbidden ones those that make all allowed."""
    prior = HereditaryPrior(
        jnp.asarray(np.log(PI / (1 - PI))), jnp.ones(6), RULES[kind], jnp.arange(6)
    )
    num_ways = set()
    for spikes in SETS:
        log_odds = np.asarray(prior.at(jnp.asarray(spikes)).log_odds, float)
        ends = [np.where(np.eye(6, dtype=bool), end, spikes) for end in (1, 0)]
        with_it, without = (log_prior(RULES[kind], x) for x in ends)
        if np.isfinite(log_prior(RULES[kind], spikes)):
            expected = expit(with_it - without)
            np.testing.assert_allclose(expit(log_odds), expected, atol=1e-6)
            continue
        out = (spikes == 0) & np.isfinite(with_it)
        assert np.all(log_odds[(spikes == 0) & ~out] < -1e30)
        shares = with_it[out] - logsumexp(with_it[out]) if out.any() else []
        scaled = log_odds[out] - logsumexp(log_odds[out]) if out.any() else []
        np.testing.assert_allclose(scaled, shares, atol=1e-5)
        num_ways.add(int(out.sum()))
    assert num_ways >= ({0, 1, 2} if kind == "weak" else {0, 1})


def test_log_odds_in_double_precision_within_single():
    logits = jnp.asarray(np.log(PI / (1 - PI)))
    prior = HereditaryPrior(logits, jnp.ones(6), RULES["strong"], np.arange(6))
    spikes = jnp.array([1, 1, 0, 1, 0, 0])

    def probabilities(prior, spikes):
        return nn.sigmoid(prior.at(spikes).log_odds)

    expected = probabilities(prior, spikes)
    got = jax.jit(within_single(probabilities))(prior, spikes)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def data(groups):
    """Interactions of columns that are far from centred look like their parents."""
    a, b, c, x, z = np.random.default_rng(2).normal(size=(5, 25)) + 1.0
    X = np.stack([a, b, c, a * b, a * c, a * b * c, x, z], axis=1)
    X = (X - X.mean(0)) / X.std(0)
    y = 0.5 * X[:, 3] + 0.2 * X[:, 5] + 0.5 * X[:, 6] * (groups is not None)
    return X[:, : 6 if groups is None else 8], y + np.random.default_rng(3).normal(size=25)


def exact(rule, groups, X, y, sigma):
    """Inclusion, means of the weights and of pi, which is integrated out."""
    posterior = truth.enumerate_models(truth.regression(X, y, sigma, 0.5, SLAB))
    if groups is not None:
        posterior = truth.share_spikes(posterior, groups)
    spikes = posterior.models[:, :6]
    may = allowed(rule, spikes)
    included, count = spikes.sum(1), may.sum(1)
    prior = betaln(BETA[0] + included, BETA[1] + count - included)
    logs = posterior.log_probs + np.where(np.all(spikes <= may, axis=1), prior, -np.inf)
    probs = np.exp(logs - logsumexp(logs))
    pi = (BETA[0] + included) / (sum(BETA) + count)
    return probs @ spikes, probs @ (posterior.models * posterior.locs), probs @ pi[:, None]


def model(X, y, rule, groups, sigma):
    pi = numpyro.sample("pi", dist.Beta(*BETA))
    with numpyro.plate("columns", 6) if groups is None else nullcontext():
        w = nss.spike_slab("w", pi, SLAB, groups=groups, heredity=rule)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


# the last two are the prior, of which the data tell nothing
CASES = {
    "weak": ("weak", None, 0.8),
    "strong-groups": ("strong", GROUPS, 0.8),
    "weak-groups-prior": ("weak", GROUPS, 1e4),
    "strong-prior": ("strong", None, 1e4),
}


@pytest.mark.parametrize(("kind", "groups", "sigma"), CASES.values(), ids=CASES)
def test_chains_agree_with_sums_over_allowed_sets(kind, groups, sigma):
    X, y = data(groups)
    kernel = nss.PairedGibbs(lambda X, y: model(X, y, RULES[kind], groups, sigma))
    options = dict(num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc = MCMC(kernel, num_warmup=200, num_samples=4000, **options)
    name = "inclusion_probabilities.w"
    mcmc.run(KEY, jnp.asarray(X), jnp.asarray(y), extra_fields=(name,))
    draws = mcmc.get_samples(group_by_chain=True)
    spikes = np.asarray(draws["w_spike"])
    assert np.all(spikes <= allowed(RULES[kind], spikes))
    inclusion, mean, pi = exact(RULES[kind], groups, X, y, sigma)
    compared = [
        (spikes, inclusion),
        (mcmc.get_extra_fields(True)[name][..., :6], inclusion),
        (draws["w"], mean),
        (draws["pi"][..., None], pi),
    ]
    for values, expected in compared:
        values = np.asarray(values, float)
        error = values.std((0, 1)) / np.sqrt(np.minimum(effective_sample_size(values), 16_000))
        # 120 comparisons in all at 1e-5 each
        assert np.all(abs(values.mean((0, 1)) - expected) < 4.4 * error + 1e-3)


@pytest.mark.exhaustive
def test_a_logit_likelihood_agrees_with_weighted_draws_of_all_sets():
    """Draws under independent spikes of probability 0.5, with the ratio of the priors."""
    X, _ = data(None)
    X = X[:, [0, 1, 3]]
    y = np.random.default_rng(4).uniform(size=25) < expit(1.5 * X[:, 2])
    rule = Heredity(((), (), (0, 1)), (0, 0, 2))
    draws = []
    for heredity in rule, None:
        program = nss.models.sparse_regression(
            probabilities=0.5, likelihood="logit", heredity=heredity
        )
        mcmc = MCMC(nss.PairedGibbs(program), num_warmup=300, num_samples=4000, progress_bar=False)
        mcmc.run(KEY, jnp.asarray(X), jnp.asarray(y, float))
        draws.append(np.asarray(mcmc.get_samples()["w_spike"], float))
    ours, free = draws
    assert np.all(ours[:, 2] <= ours[:, 0] * ours[:, 1])
    may = free[:, 0] * free[:, 1]
    weight = np.where(may > 0, 1.0, 2.0) * (free[:, 2] <= may)
    expected = weight @ free / weight.sum()
    assert expected.min() > 0.05
    # about 1,000 effective draws each, so this is five standard errors
    np.testing.assert_allclose(ours.mean(0), expected, atol=0.1)


def test_who_cannot_draw_such_weights_says_so():
    X, y = map(jnp.asarray, data(None))
    arguments = X, y, RULES["weak"], None, 1.0
    guide = nss.PairedGuide(model)
    with pytest.raises(ValueError, match=r"CAVI: heredity: .* PairedGibbs draws such"):
        nss.CAVI(model, guide).init(KEY, *arguments)

    def poisson(X, y):
        with numpyro.plate("columns", 6):
            w = nss.spike_slab("w", 0.5, heredity=RULES["weak"])
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=jnp.ones(25))

    def two(X, y):
        with numpyro.plate("columns", 6):
            w = nss.spike_slab("w", 0.5, heredity=RULES["weak"])
            other = nss.spike_slab("other", 0.5)
        numpyro.sample("y", dist.Normal(X @ (w + other), 1.0), obs=y)

    for program, message in (poisson, "heredity: got a likelihood"), (two, "heredity: .* all wei"):
        with pytest.raises(ValueError, match=f"PairedGibbs: {message}"):
            MCMC(nss.PairedGibbs(program), num_warmup=1, num_samples=1).run(KEY, X, y)
