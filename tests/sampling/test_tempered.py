# SPDX-License-Identifier: Apache-2.0
"""The log evidence of latent functions, against sums over spikes and integrals on a grid."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from refusals import refusals
from scipy import stats
from scipy.special import expit, logsumexp
from tinygp import kernels
import truth

import jax
from jax import random
import jax.numpy as jnp
from jax.scipy.special import ndtr

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.kernel_priors import length_scale_prior
from numpyro_spikeslab.sampling import tempered
from numpyro_spikeslab.sampling.tempered import Power

N, Q = 12, 2
INCLUSION, SLAB = 0.4, 1.0
SMOOTH = kernels.ExpSquared(1.0)
X = np.linspace(0.0, 4.0, N)
RNG = np.random.default_rng(0)
Y = np.outer(np.sin(1.5 * X), [1.0, -0.8]) + 0.3 * RNG.normal(size=(N, Q))
GRID = np.linspace(-6.0, 6.0, 81) * SLAB
LOG_SLAB = stats.norm.logpdf(GRID, 0, SLAB) + np.log(GRID[1] - GRID[0])


def model(X, Y=None, likelihood=dist.Normal, noise=None, calls=None):
    """One function of two tasks."""
    if calls is not None:
        calls.append(X)
    if noise is None:
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("latent", 1):
        phi = nss.latent_functions("phi", SMOOTH, X)
    W = truth.task_weights(Q, 1, INCLUSION, SLAB)
    numpyro.sample("Y", likelihood((W @ phi).T, noise), obs=Y)


def covariance(X: np.ndarray, length: float) -> np.ndarray:
    return np.exp(-0.5 * (X[:, None] - X) ** 2 / length**2) + 1e-9 * np.eye(len(X))


def given_scales(length: float, noise: float) -> float:
    """The log density of the tasks: spikes summed, slabs on a grid, and the function integrated
    out, for along the direction of their weights the tasks are one observation of it."""
    values, vectors = np.linalg.eigh(covariance(X, length))
    rows = vectors.T @ Y
    w = np.append(0.0, GRID)
    log_prior = np.append(np.log(1 - INCLUSION), np.log(INCLUSION) + LOG_SLAB)
    weights = np.stack(np.meshgrid(w, w, indexing="ij"), axis=-1).reshape(-1, Q)
    square = (weights**2).sum(axis=1)
    along = weights @ rows.T / np.sqrt(np.where(square > 0, square, 1))[:, None]
    variance = square[:, None] * values + noise**2
    logs = 0.5 * np.sum(along**2 * (1 / noise**2 - 1 / variance) - np.log(variance / noise**2), 1)
    logs += np.add.outer(log_prior, log_prior).ravel()
    return logsumexp(logs) + stats.norm.logpdf(Y, 0, noise).sum()


def with_priors(length: float, noise: float) -> float:
    prior = float(length_scale_prior(X).log_prob(length))
    return given_scales(length, noise) + prior + stats.halfnorm.logpdf(noise)


def integrated() -> float:
    lengths, noises = np.linspace(-4.0, 4.0, 33), np.linspace(-2.5, 0.5, 31)
    logs = [with_priors(np.exp(a), np.exp(b)) + a + b for a in lengths for b in noises]
    return logsumexp(logs) + np.log((lengths[1] - lengths[0]) * (noises[1] - noises[0]))


def test_known_scales(monkeypatch):
    """Sites that are conditioned on count. Nothing is compiled anew from power to power."""
    calls, powers = [], []
    rise = tempered.next_rise
    monkeypatch.setattr(tempered, "next_rise", lambda *args: powers.append(1) or rise(*args))
    monkeypatch.setattr(tempered, "MAX_SE", 0.0)
    held = handlers.condition(
        partial(model, calls=calls), {"phi_scale": jnp.full(1, 0.8), "noise": 0.3}
    )
    options = {"num_particles": 32, "num_islands": 8, "progress_bar": False}
    with pytest.warns(UserWarning, match="standard error is .* more particles"):
        evidence = nss.tempered_evidence(random.key(0), held, X, Y, **options)
    assert abs(evidence.value - with_priors(0.8, 0.3)) < 3 * evidence.se + 0.05
    assert evidence.se < 0.15
    assert len(calls) < len(powers)


def test_learnt_noise_and_length():
    options = {"num_particles": 200, "progress_bar": False}
    evidence = nss.tempered_evidence(random.key(0), model, X, Y, **options)
    assert abs(evidence.value - integrated()) < 3 * evidence.se + 0.05
    assert evidence.se < 0.2
    table = nss.compare_models({"one": evidence, "other": evidence._replace(value=0.0)})
    assert table.index[0] == "other"


def test_the_evidence_of_two_functions_of_six_tasks_is_above_the_bound_of_a_fit():
    x, rng = np.linspace(0.0, 5.0, 20), np.random.default_rng(0)
    waves = np.stack([np.sin(1.5 * x), np.cos(2.5 * x + 1)])
    weights = [[1.0, 0.0], [0.8, 0.0], [0.0, 1.0], [0.0, -1.2], [1.0, 1.0], [0.0, 0.0]]
    data = x, (weights @ waves).T + 0.3 * rng.normal(size=(20, 6))
    scales = {"inclusion": 0.4, "slab_scale": 1.0, "noise": np.full(6, 0.3)}
    scales = {name: jnp.asarray(value) for name, value in scales.items()}
    values = {}
    for M in (1, 2):
        held = scales | {"phi_scale": jnp.full(M, 0.8)}
        model = handlers.condition(nss.models.mtmkl([SMOOTH] * M), held)
        options = {"num_particles": 32, "progress_bar": False}
        values[M] = nss.tempered_evidence(random.key(0), model, *data, **options).value
        fit = nss.CAVI(model, nss.PairedGuide(model)).run(
            random.key(0), 100, *data, progress_bar=False
        )
        assert -fit.losses[-1] < values[M] < 10 - fit.losses[-1]
    assert values[2] > values[1] + 50


LIKELIHOODS = {
    "student": (
        lambda f, noise: dist.StudentT(4.0, f, noise),
        lambda y, f, noise: stats.t.logpdf(y, 4, f, noise),
        [[0.9, -1.1], [1.2, 2.5]],
    ),
    "binomial": (
        lambda f, noise: dist.Binomial(12, logits=f),
        lambda y, f, noise: stats.binom.logpmf(y, 12, expit(f)),
        [[9.0, 3.0], [10.0, 4.0]],
    ),
    "negative binomial": (
        lambda f, noise: dist.NegativeBinomial2(jnp.exp(f), 1 / noise),
        lambda y, f, noise: stats.nbinom.logpmf(y, 1 / noise, 1 / (1 + noise * np.exp(f))),
        [[4.0, 0.0], [5.0, 1.0]],
    ),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_other_likelihoods(name):
    """Of two points, all that is unknown is on a grid: given the function tasks are independent."""
    likelihood, log_prob, Y = LIKELIHOODS[name]
    X, Y, noise = np.array([0.0, 0.5]), np.array(Y), 0.3
    nodes = np.linspace(-5.0, 5.0, 41)
    u = np.stack(np.meshgrid(nodes, nodes), axis=-1).reshape(-1, 2)
    f = GRID[:, None, None] * (u @ np.linalg.cholesky(covariance(X, 0.8)).T)
    log_prior = stats.norm.logpdf(u).sum(axis=1) + 2 * np.log(nodes[1] - nodes[0])
    for q in range(Q):
        within = log_prob(Y[:, q], f, noise).sum(axis=2) + LOG_SLAB[:, None]
        without = log_prob(Y[:, q], 0.0, noise).sum()
        log_prior += np.logaddexp(
            np.log(INCLUSION) + logsumexp(within, axis=0), np.log(1 - INCLUSION) + without
        )
    exact = logsumexp(log_prior) + float(length_scale_prior(X).log_prob(0.8))
    held = handlers.condition(model, {"phi_scale": jnp.full(1, 0.8)})
    options = {"likelihood": likelihood, "noise": noise, "progress_bar": False}
    evidence = nss.tempered_evidence(random.key(0), held, X, Y, **options)
    assert abs(evidence.value - exact) < 3 * evidence.se + 0.03
    assert evidence.se < 0.2


@pytest.mark.usefixtures("x64")
def test_steps_at_a_power_are_those_of_more_noise():
    """A power of a Normal density is one of another noise, but for a constant."""
    power = 0.2

    def step(model):
        kernel, args = nss.LatentGibbs(model), (X, Y)
        state = kernel.init(random.key(0), 0, None, args, {})
        return jax.jit(lambda state: kernel.sample(state, args, {}).z)(state)

    one = step(Power(partial(model, noise=0.3), power))
    other = step(partial(model, noise=0.3 / np.sqrt(power)))
    for name, x in one.items():
        np.testing.assert_allclose(x, other[name], rtol=1e-6, err_msg=name)


def regression(X, Y=None):
    truth.respond(Y, X @ truth.weights(X.shape[1]), 0.5)


def with_level(X, Y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    model(X, Y, likelihood=lambda f, noise: dist.Normal(f + level, noise))


def with_param(X, Y=None):
    model(X, Y, noise=numpyro.param("noise", 0.5, constraint=dist.constraints.positive))


def of_probits(X, Y=None):
    model(X, Y, likelihood=lambda f, noise: dist.Bernoulli(ndtr(f)), noise=1.0)


def of_laplace(X, Y=None):
    model(X, Y, likelihood=dist.Laplace)


DESIGN = truth.design("correlated")
REFUSED: dict[str, tuple[Any, ...]] = {
    "known features": (
        regression,
        (DESIGN, truth.response(DESIGN)),
        {},
        "got known features, expected latent functions. Take `log_evidence`",
    ),
    "another site": (with_level, (X, Y), {}, r"LatentGibbs cannot sample .*\['level'\]"),
    "a param": (with_param, (X, Y), {}, "'noise': got a param, or an improper prior"),
    "probits": (
        of_probits,
        (X, 1.0 * (Y > 0)),
        {},
        "the likelihood of 'Y': got one without closed",
    ),
    "laplace": (of_laplace, (X, Y), {}, "the likelihood of 'Y': got one without closed"),
    "one island": (model, (X, Y), {"num_islands": 1}, "num_islands: got 1, expected a whole"),
    "no particles": (model, (X, Y), {"num_particles": 0}, "num_particles: got 0"),
}


def refused(model, args, options):
    nss.tempered_evidence(random.key(0), model, *args, progress_bar=False, **options)


test_refusals = refusals(REFUSED, refused)
