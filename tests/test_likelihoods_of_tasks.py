# SPDX-License-Identifier: Apache-2.0
"""The multi-task model with observations that are not Normal."""

from functools import partial

import numpy as np
import pytest
from refusals import refusals
from scipy import special, stats
from scipy.sparse import coo_array
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss

KEY = random.key(0)
N, Q = 30, 8
X = np.linspace(0.0, 4.0, N)
SMOOTH = kernels.ExpSquared(1.0)


def bernoulli(f):
    return dist.Bernoulli(logits=f)


def counts(f):
    return dist.NegativeBinomial2(jnp.exp(f), 2.0)


def poisson(f):
    return dist.Poisson(jnp.exp(f))


LOG_DENSITIES = {
    bernoulli: lambda y, f: stats.bernoulli.logpmf(y, special.expit(f)),
    counts: lambda y, f: stats.nbinom.logpmf(y, 2.0, 2.0 / (2.0 + np.exp(f))),
}


def planted(likelihood, num_points=N, num_tasks=Q):
    """Two functions, or factors where there are more tasks than points, of which each task has one
    or both; one entry in five is hidden out."""
    rng = np.random.default_rng(3)
    x = np.linspace(0.0, 4.0, num_points)
    phi = np.stack([np.sin(2 * x), np.cos(3 * x)])
    W = rng.choice([-2.5, 2.5], (num_tasks, 2)) * (rng.random((num_tasks, 2)) < 0.6)
    f = (W @ phi).T
    with handlers.seed(rng_seed=1):
        Y = np.asarray(numpyro.sample("Y", likelihood(f)), float)
    return f, Y, rng.random(f.shape) < 0.2


def held_out(likelihood, Y, hidden, f):
    """Mean log density of the hidden-out entries at a predictor, beyond that of a constant one."""
    constant = np.mean(Y[~hidden])
    base = special.logit(constant) if likelihood is bernoulli else np.log(constant)
    log_density = LOG_DENSITIES[likelihood]
    return np.mean(log_density(Y[hidden], f[hidden]) - log_density(Y[hidden], base))


# The model


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_density_is_that_of_the_likelihood_of_f_and_noise(sparse, shared):
    def laplace(f, scale):
        return dist.Laplace(f, 2.0 * scale)

    Y = np.random.default_rng(0).standard_normal((6, 3))
    Y[1, 2] = np.nan
    observed = ~np.isnan(Y)
    data = coo_array((Y[observed], np.nonzero(observed)), shape=Y.shape) if sparse else Y
    model = nss.models.factor_analysis(2, likelihood=laplace, shared_noise=shared)
    sites = handlers.trace(handlers.seed(model, KEY)).get_trace(data)
    values = {k: x["value"] for k, x in sites.items() if x["type"] == "sample" and k != "Y"}
    density, _ = log_density(model, (data,), {}, values)
    prior, _ = log_density(handlers.block(model, hide=["Y"]), (data,), {}, values)
    W = np.where(values["W_spike"], values["W_slab"], 0)
    logs = stats.laplace((W @ values["phi"]).T, 2 * np.broadcast_to(values["noise"], 3)).logpdf(Y)
    np.testing.assert_allclose(density - prior, np.sum(logs[observed]), rtol=1e-5)


@pytest.mark.parametrize("dtype", [bool, np.int32, np.uint8, float])
def test_a_likelihood_of_f_alone_has_no_noise(dtype):
    model = nss.models.factor_analysis(1, likelihood=bernoulli)
    Y = np.array([[1, 0, 0], [0, 1, 1]], dtype)
    sites = handlers.trace(handlers.seed(model, KEY)).get_trace(Y)
    assert "noise" not in sites
    f = np.asarray((sites["W"]["value"] @ sites["phi"]["value"]).T)
    log_prob = sites["Y"]["fn"].log_prob(sites["Y"]["value"])
    np.testing.assert_allclose(log_prob, Y * f - np.logaddexp(0, f), rtol=1e-4, atol=1e-5)


def test_new_points_have_the_likelihood():
    model = nss.models.mtmkl([SMOOTH], likelihood=counts, num_tasks=2)
    fixed = {"phi_scale": np.ones(1), "phi": np.zeros((1, 3)), "slab_scale": 1.0}
    model = handlers.seed(handlers.condition(model, fixed), KEY)
    sites = handlers.trace(model).get_trace(np.arange(3.0), X_new=np.arange(2.0) + 0.5)
    new = sites["Y_new"]
    assert isinstance(new["fn"], dist.NegativeBinomial2) and new["value"].shape == (2, 2)
    np.testing.assert_allclose(new["fn"].mean, np.exp(sites["f_new"]["value"]), rtol=1e-5)


def test_a_missing_entry_needs_no_value_that_the_likelihood_allows():
    """A Gamma density has no gradient at zero."""
    model = nss.models.factor_analysis(1, likelihood=lambda f, a: dist.Gamma(a, a * jnp.exp(-f)))
    Y = np.array([[1.0, 2.0], [np.nan, 0.5], [3.0, np.nan]])
    sites = handlers.trace(handlers.seed(model, KEY)).get_trace(Y)
    values = {k: x["value"] for k, x in sites.items() if x["type"] == "sample" and k != "Y"}
    slope = jax.grad(lambda a: log_density(model, (Y,), {}, values | {"noise": a})[0])
    assert np.all(np.isfinite(slope(values["noise"])))


WRONG = r"likelihood: got a function of \[{}\], .*`f` and `noise`.*`lambda f: "
OTHERS = {
    "classes": (dist.Bernoulli, WRONG.format("'probs', 'logits'")),
    "counts": (dist.Poisson, WRONG.format("'rate'")),
    "heavy tails": (dist.StudentT, WRONG.format("'df', 'loc', 'scale'")),
    "no argument": (lambda: dist.Normal(), WRONG.format("")),
}
test_a_likelihood_of_other_arguments_is_refused = refusals(
    OTHERS, lambda likelihood: nss.models.mtmkl([SMOOTH], likelihood=likelihood)
)


def test_arguments_with_defaults_are_the_users_own():
    def with_default(f, concentration=2.0):
        return dist.NegativeBinomial2(jnp.exp(f), concentration)

    for likelihood, has_noise in (
        (with_default, False),
        (partial(dist.StudentT, 4.0), True),
        (dist.Laplace, True),
    ):
        model = nss.models.factor_analysis(1, likelihood=likelihood)
        sites = handlers.trace(handlers.seed(model, KEY)).get_trace(np.ones((4, 2)))
        assert ("noise" in sites) == has_noise
    model = nss.models.factor_analysis(1, likelihood=bernoulli, priors={"noise": dist.HalfNormal()})
    with pytest.raises(ValueError, match=r"got \['noise'\]"):
        handlers.seed(model, KEY)(np.ones((4, 2)))


# Fits


def fitted(model, *args, num_steps, **options):
    svi = nss.CAVI(model, nss.PairedGuide(model), **options)
    result = svi.run(KEY, num_steps, *args, progress_bar=False)
    assert np.max(np.diff(result.losses)) < 1e-8 * abs(result.losses[-1])
    return svi.guide, result


def rows_of_tasks(Y, mask):
    """The model of two factors of a table with tasks as rows, as a user writes it."""
    (num_tasks, N), M = Y.shape, 2
    pi = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
    slab = numpyro.sample("slab_scale", dist.HalfNormal(10.0))
    with numpyro.plate("latent", M):
        phi = nss.latent_functions("phi", "white", np.arange(N))
    with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", pi, slab)
    with handlers.mask(mask=mask):
        numpyro.sample("Y", bernoulli(W @ phi), obs=jnp.where(mask, Y, 0))


@pytest.mark.parametrize("likelihood", [bernoulli, counts])
def test_planted_factors_are_found(x64, likelihood):
    """In a table with gaps, of which a constant predictor knows the mean."""
    f, Y, hidden = planted(likelihood, 40, 40)
    model = nss.models.factor_analysis(2, likelihood=likelihood)
    data = np.where(hidden, np.nan, Y)
    guide, result = fitted(model, data, num_steps=60, plain=True)
    mean, variance = guide.predict(result.params, data)
    assert mean.shape == variance.shape == f.shape and np.all(variance > 0)
    best, reached = (held_out(likelihood, Y, hidden, np.asarray(x)) for x in (f, mean))
    assert reached > 0.5 * best
    with pytest.raises(ValueError, match="only Normal observations have noise, not 'Y'"):
        guide.predict(result.params, data, noise=True)


@pytest.mark.parametrize("layout", ["entries", "rows"])
def test_the_bound_is_that_of_the_table(x64, layout):
    _, Y, hidden = planted(bernoulli, 12, 10)
    data = np.where(hidden, np.nan, Y)
    model, args = nss.models.factor_analysis(2, likelihood=bernoulli), (data,)
    _, result = fitted(model, *args, num_steps=6, plain=True)
    if layout == "entries":
        args = (coo_array((Y[~hidden], np.nonzero(~hidden)), shape=Y.shape),)
    else:
        model, args = rows_of_tasks, (Y.T, ~hidden.T)
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    state = svi.init(KEY, *args, init_params=result.params)
    np.testing.assert_allclose(svi.evaluate(state, *args), result.losses[-1], rtol=1e-9)
    losses = svi.run(KEY, 6, *args, init_state=state, progress_bar=False).losses
    assert np.max(np.diff(losses)) < 1e-9 * losses[-1] and losses[0] < result.losses[-1]


@pytest.mark.parametrize("likelihood", [bernoulli, counts])
def test_moves_find_planted_functions(x64, likelihood):
    f, Y, hidden = planted(likelihood)
    model = nss.models.mtmkl([SMOOTH] * 3, likelihood=likelihood, shared_inclusion=False)
    data = X, np.where(hidden, np.nan, Y)
    guide, result = fitted(model, *data, num_steps=80)
    mean, _ = guide.predict(result.params, *data)
    best, reached = (held_out(likelihood, Y, hidden, np.asarray(x)) for x in (f, mean))
    assert reached > 0.3 * best
    new, variance = guide.predict(result.params, *data, X_new=X[3:5])
    np.testing.assert_allclose(new, mean[3:5], atol=1e-3)
    assert np.all(variance > 0)


# Chains


@pytest.mark.parametrize(
    "likelihood",
    [
        bernoulli,
        pytest.param(counts, marks=pytest.mark.exhaustive),
    ],
)
def test_chains_agree_with_a_fit(x64, likelihood):
    _, Y, hidden = planted(likelihood)
    priors = {"slab_scale": dist.HalfNormal(2.0)}
    model = nss.models.mtmkl([SMOOTH] * 2, likelihood=likelihood, priors=priors)
    data = X, np.where(hidden, np.nan, Y)
    guide, result = fitted(model, *data, num_steps=60)
    start = guide.to_init_params(result.params, *data)
    kernel = nss.LatentGibbs(model, accelerate=0.0)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=400, progress_bar=False)
    mcmc.run(KEY, *data, init_params=start)
    draws = np.asarray(mcmc.get_samples()["f"])
    mean, variance = map(np.asarray, guide.predict(result.params, *data))
    error = (np.mean(draws, axis=0) - mean) / np.std(draws, axis=0)
    assert np.sqrt(np.mean(error**2)) < 0.6
    # a fit takes weights and functions for independent
    ratio = np.sqrt(np.mean(variance) / np.mean(np.var(draws, axis=0)))
    assert 0.4 < ratio < 1.1


def test_scales_of_heavy_tails_are_drawn_by_another_block(x64):
    rng = np.random.default_rng(0)
    Y = 2 * np.outer(np.sin(2 * X), rng.choice([-1, 1], Q)) + 0.3 * rng.standard_t(4.0, (N, Q))
    model = nss.models.mtmkl([SMOOTH], likelihood=partial(dist.StudentT, 4.0), shared_noise=True)

    def of_latent(trace):
        return *nss.paired_sites(trace), *nss.latent_sites(trace), "inclusion", "slab_scale"

    kernel = Gibbs([(nss.LatentGibbs(model, accelerate=0.3), of_latent), (NUTS(model), None)])
    mcmc = MCMC(kernel, num_warmup=200, num_samples=200, progress_bar=False)
    mcmc.run(KEY, X, Y)
    noise = np.asarray(mcmc.get_samples()["noise"])
    assert abs(np.mean(noise) - 0.3) < 4 * np.std(noise) and np.std(noise) < 0.05


def begin(likelihood, **options):
    model = nss.models.factor_analysis(2, likelihood=likelihood)
    nss.CAVI(model, nss.PairedGuide(model), **options).init(KEY, np.eye(4))


def begin_chain(likelihood):
    model = nss.models.factor_analysis(2, likelihood=likelihood)
    nss.LatentGibbs(model, accelerate=0.25).init(KEY, 10, None, (np.eye(4),), {})


NO_AUXILIARIES = "likelihood of 'Y': got one without .*NegativeBinomial2.*PairedGibbs"
REFUSED = {
    "fit": (partial(begin, poisson), NO_AUXILIARIES),
    "chain": (partial(begin_chain, poisson), NO_AUXILIARIES),
    "batches": (
        partial(begin, poisson, num_tasks=10),
        "CAVI: the likelihood of 'Y': got one without closed-form updates",
    ),
    "batches with a scale": (
        partial(begin, partial(dist.StudentT, 4.0), num_tasks=10),
        r"num_tasks: got a model with the sites \['noise'\]",
    ),
}
test_what_has_no_closed_forms_is_refused = refusals(REFUSED)


def test_other_likelihoods_have_a_sampler(x64):
    """The one that the error message names."""
    model = nss.models.factor_analysis(2, likelihood=poisson)
    kernel = Gibbs([(nss.PairedGibbs(model), nss.paired_sites), (NUTS(model), None)])
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(KEY, planted(poisson, 6, 4)[1])
    assert np.all(np.isfinite(mcmc.get_samples()["f"]))
