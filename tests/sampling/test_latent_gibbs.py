# SPDX-License-Identifier: Apache-2.0
"""Samplers of weights that mix latent functions, against closed forms and joint distributions."""

from functools import partial
import pickle

import numpy as np
import pytest
from refusals import refusals
from scipy import stats
from tinygp import kernels
from tinygp.kernels import quasisep
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.reparam import TransformReparam

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.observations import Grid
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.sampling.latent_step import recruit

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
LEVEL = 1e-4
N, Q, M = 8, 3, 2
SMOOTH, MATERN = kernels.ExpSquared(1.0), kernels.Matern32(1.0)
SCALES = {"noise": dist.HalfNormal(1.0), "slab_scale": dist.HalfNormal(2.0)}
X = np.sort(np.random.default_rng(0).uniform(0, 4, N))
SEEN = np.ones((N, Q), bool)
SEEN[[1, 2, 5], [0, 0, 2]] = False


def simulate(seen=SEEN):
    """Values of functions, and data of them with missing entries."""
    rng = np.random.default_rng(1)
    phi = rng.normal(size=(M, N))
    Y = phi.T @ rng.normal(size=(M, Q)) + 0.4 * rng.normal(size=(N, Q))
    return jnp.asarray(phi), np.where(seen, Y, np.nan)


FULL = simulate(seen=np.ones((N, Q), bool))[1]


def mixed(X, kernel=SMOOTH, priors=None):
    """Functions and their weights."""
    phi = nss.latent_functions("phi", [kernel] * M, X, priors=priors)
    return phi, truth.task_weights(Q, M, 0.4)


def observe(location, Y, scale=0.3):
    observed = ~jnp.isnan(Y)
    with handlers.mask(mask=observed):
        numpyro.sample("Y", dist.Normal(location, scale), obs=jnp.where(observed, Y, 0.0))


def plain_model(X, Y=None, *, kernel=MATERN, priors=None):
    phi, W = mixed(X, kernel, priors)
    observe((W @ phi).T, Y)


def one_by_one(function, *args):
    """Like `jax.vmap`, which computes both branches of each condition; and batches of small
    decompositions deadlock now and then with jax 0.10 on two cores."""
    return jax.jit(lambda args: jax.lax.map(lambda item: function(*item), args))(args)


def final_states(kernel, args, values, num_steps, size):
    """Values of independent chains from the prior, after some steps."""
    kwargs = {GIBBS_SITES_KWARG: values}

    def run(key):
        state = kernel.init(key, 0, None, args, kwargs)
        step = lambda state, _: (kernel.sample(state, args, kwargs), None)  # noqa: E731
        return jax.lax.scan(step, state, length=num_steps)[0]

    return jax.tree.map(np.asarray, one_by_one(run, random.split(KEY, size)).z)


def chain(kernel, args, length, num_warmup=0, start=None):
    """Draws of one chain, from its first step on."""
    state = kernel.init(KEY, num_warmup, start, args, {})
    step = lambda state, _: ((state := kernel.sample(state, args, {})), state.z)  # noqa: E731
    return jax.jit(lambda state: jax.lax.scan(step, state, length=length)[1])(state)


# Weights


def bent_model(X, Y=None):
    phi, W = mixed(X)
    observe((W @ jnp.exp(phi)).T, Y)


def test_weights_are_drawn_where_functions_are_not_affine():
    values = {"phi": jnp.ones((M, N)), "phi_scale": jnp.ones(M)}
    kernel, kwargs = nss.PairedGibbs(bent_model), {GIBBS_SITES_KWARG: values}
    state = kernel.init(KEY, 0, None, (X, FULL), kwargs)
    state = jax.eval_shape(lambda state: kernel.sample(state, (X, FULL), kwargs), state)
    assert state.z["W_slab"].shape == (Q, M)


# Functions


def conditional(W, Y, K, scale=0.3):
    """Mean and covariance of both functions, joined, given the weights."""
    observed = ~np.isnan(Y)
    A = np.kron(W, np.eye(N))[observed.T.ravel()]
    precision = np.linalg.inv(np.kron(np.eye(M), K)) + A.T @ A / scale**2
    covariance = np.linalg.inv(precision)
    return covariance @ A.T @ Y.T[observed.T] / scale**2, covariance


WEIGHTS = {
    "W_spike": jnp.array([[1, 0], [1, 1], [0, 1]]),
    "W_slab": jnp.array([[0.8, 0.3], [-0.6, 1.0], [2.0, 0.5]]),
}
W = np.where(WEIGHTS["W_spike"], WEIGHTS["W_slab"], 0.0)


@pytest.mark.parametrize("kernel", [quasisep.Matern32(1.0), "white"], ids=["state space", "white"])
def test_functions_given_weights_have_the_closed_form(kernel):
    _, Y = simulate()
    model, K = partial(plain_model, kernel=kernel), np.eye(N)
    if kernel != "white":
        model = handlers.condition(model, {"phi_scale": jnp.ones(M), "phi_sigma": jnp.ones(M)})
        K = np.asarray(MATERN(X, X))
    mean, covariance = conditional(W, np.asarray(Y), K)
    z = final_states(nss.LatentGibbs(model), (X, Y), WEIGHTS, 20, 5000)
    assert set(z) == {"phi"}
    white = np.linalg.solve(np.linalg.cholesky(covariance), (z["phi"].reshape(-1, M * N) - mean).T)
    # M N tests at 1e-4 and one test of all second moments: a false alarm in 1 of 580 keys
    assert all(stats.kstest(x, "norm").pvalue > LEVEL for x in white)
    assert stats.kstest(np.sum(white**2, axis=0), stats.chi2(M * N).cdf).pvalue > LEVEL


def test_kernel_parameters_are_drawn_with_the_functions_integrated_out():
    """One function in use, and one that is not, which keeps the prior."""
    prior = stats.uniform(0.4, 2.1)
    model = partial(plain_model, priors={"scale": dist.Uniform(0.4, 2.5)})
    _, Y = simulate()
    values = WEIGHTS | {"W_spike": jnp.array([[1, 0], [1, 0], [0, 0]])}
    z = final_states(nss.LatentGibbs(model), (X, Y), values, 20, 2000)
    w, observed = np.array([0.8, -0.6, 0.0]), ~np.isnan(Y).T.ravel()
    grid = np.linspace(0.4, 2.5, 400)
    logs = []
    for scale in grid:
        K = np.asarray(kernels.Matern32(scale)(X, X))
        full = np.kron(np.outer(w, w), K) + 0.09 * np.eye(Q * N)
        normal = stats.multivariate_normal(cov=full[np.ix_(observed, observed)])
        logs.append(normal.logpdf(Y.T.ravel()[observed]))
    cdf = np.cumsum(np.exp(logs - np.max(logs)))
    reached = np.interp(z["phi_scale"][:, 0], grid, cdf / cdf[-1])
    for uniform in (reached, prior.cdf(z["phi_scale"][:, 1])):
        assert stats.kstest(uniform, "uniform").pvalue > LEVEL


# The whole model


def whole_model(num_functions, noise_scale=1.0):
    priors = {
        "scale": dist.LogNormal(0.0, 2.0),
        "noise": dist.HalfNormal(noise_scale),
        "slab_scale": dist.HalfNormal(1.5),
        "inclusion": dist.Beta(2.0, 2.0),
    }
    model = nss.models.mtmkl([MATERN] * num_functions, num_tasks=Q, priors=priors)
    # Matern32 has an amplitude too; one of the two is enough to tell the functions' scale
    return handlers.condition(model, {"phi_sigma": jnp.ones(num_functions)})


MODEL = whole_model(M)


def composite(model, **options):
    """Three blocks."""
    return Gibbs(
        [
            (nss.PairedGibbs(model), nss.paired_sites),
            (nss.LatentGibbs(model), nss.latent_sites),
            (NUTS(model, **options), None),
        ]
    )


# Starts, warm-up, predictions


def waves():
    """Two functions in four tasks, one of which has a gap and one of which is noise."""
    x = np.linspace(0, 6, 30)
    rng = np.random.default_rng(3)
    f = np.stack([np.sin(2 * x), np.cos(3 * x), np.sin(2 * x) - np.cos(3 * x), 0 * x], 1)
    Y = f + 0.1 * rng.normal(size=f.shape)
    Y[5:9, 1] = np.nan
    return jnp.asarray(x), jnp.asarray(Y), f


@pytest.mark.exhaustive
def test_accelerated_chains_from_the_prior_find_the_functions(precision):
    x, Y, f = waves()
    model = nss.models.mtmkl([SMOOTH] * 3, priors=SCALES)
    mcmc = MCMC(
        nss.LatentGibbs(model, accelerate=0.25), num_warmup=150, num_samples=100, progress_bar=False
    )
    mcmc.run(KEY, x, Y, extra_fields=("num_accelerated", "inclusion_probabilities.W"))
    draws, extra = mcmc.get_samples(), mcmc.get_extra_fields()
    assert draws["f"].dtype == precision and np.max(np.abs(draws["f"].mean(0) - f)) < 0.3
    assert np.all(np.abs(np.mean(draws["noise"], axis=0) - 0.1) < 0.1)
    assert np.all(extra["num_accelerated"] == 0)
    probs = np.mean(extra["inclusion_probabilities.W"], axis=0)
    np.testing.assert_allclose(probs, np.mean(draws["W_spike"], axis=0), atol=0.2)


def test_acceleration_gives_an_idle_function_to_a_badly_explained_task():
    phi = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)))
    ones, slabs = jnp.ones((5, 3)), jnp.full((3, 2), 2.0)
    spikes = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    # the first task is explained, a quarter of the second's power is left, all of the third's
    Y = jnp.stack([2 * phi[0], 4 * phi[0], phi[1]], axis=1)
    prior = Prior(jnp.zeros((3, 2)), jnp.full((3, 2), 9.0))
    zero, table = jnp.zeros(()), Grid((5, 3))
    count = jnp.full(3, 5.0)
    at = View(Y, ones, jnp.ones(3), count, jnp.zeros(3), zero, prior, {}, zero, table)
    keys = random.split(KEY, 1000)
    new, slabs_now = jax.vmap(lambda key: recruit(key, at, phi, spikes, slabs))(keys)
    np.testing.assert_array_equal(new[:, :, 0], np.broadcast_to(spikes[:, 0], (1000, 3)))
    counts = np.sum(new[:, :, 1], axis=0)
    assert counts[0] == 0 and counts.sum() == 1000
    assert stats.binomtest(int(counts[1]), 1000, 0.2).pvalue > LEVEL
    np.testing.assert_array_equal(slabs_now[:, :, 1], np.where(new[:, :, 1], 3.0, 2.0))
    # without an idle function nothing changes
    busy = spikes.at[2, 1].set(1.0)
    jax.tree.map(np.testing.assert_array_equal, recruit(KEY, at, phi, busy, slabs), (busy, slabs))


ACCELERATED = nss.LatentGibbs(MODEL, accelerate=0.5)


@jax.jit
def masked_step(state, Y, mask):
    return ACCELERATED.sample(state, (jnp.asarray(X), Y), {"mask": mask})


def test_acceleration_starts_with_idle_functions_and_ends():
    """With a mask that is traced."""
    args, keys = (jnp.asarray(X), FULL), random.split(KEY, 8)
    plain = nss.LatentGibbs(MODEL, accelerate=0.0).init(keys, 4, None, args, {})
    assert np.any(plain.z["W_spike"]) and np.all(plain.num_accelerated == 0)
    start = ACCELERATED.init(KEY, 4, None, args, {"mask": jnp.asarray(SEEN)})
    assert start.num_accelerated == 2 and not np.any(start.z["W_spike"])
    state, other = start, start
    for remaining in (1, 0, 0):
        state = masked_step(state, FULL, jnp.asarray(SEEN))
        other = masked_step(other, jnp.where(SEEN, FULL, 1e3), jnp.asarray(SEEN))
        assert state.num_accelerated == remaining
    jax.tree.map(np.testing.assert_array_equal, other.z, state.z)


@pytest.mark.exhaustive
def test_chains_start_at_a_fit():
    x, Y, _ = waves()
    model = nss.models.mtmkl([SMOOTH] * 2)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    params = svi.run(KEY, 30, x, Y, progress_bar=False).params
    start = guide.to_init_params(params, x, Y)
    state = nss.LatentGibbs(model, accelerate=0.25).init(KEY, 0, start, (x, Y), {})
    jax.tree.map(np.testing.assert_array_equal, state.z, start)
    # NUTS has unconstrained numbers
    names = ("noise", "slab_scale", "inclusion")
    free = start | {k: jnp.log(start[k]) for k in names[:2]}
    free["inclusion"] = jax.scipy.special.logit(start["inclusion"])
    kernel = composite(model)
    state = kernel.init(KEY, 0, free, (x, Y), {})
    constrained = kernel.get_constrain_fn((x, Y), {})(state.z)
    for name, value in start.items():
        np.testing.assert_allclose(constrained[name], value, rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_functions", [1, 3])
def test_a_single_task_is_a_task(num_functions):
    kernel = nss.LatentGibbs(nss.models.mtmkl([MATERN] * num_functions), accelerate=0.25)
    draws = chain(kernel, (X, np.sin(X) + 0.1), 8, num_warmup=4)
    assert draws["phi"].shape == (8, num_functions, N)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    assert np.all(np.diff(draws["noise"][:, 0]) != 0)


@pytest.mark.exhaustive
def test_single_precision_recovers_where_decompositions_fail(restored_x64):
    """Functions so much stronger than the noise that no step's matrix is positive definite."""
    jax.config.update("jax_enable_x64", False)
    x, Y, _ = waves()
    x = jnp.where(x > 3, x + 2, x)
    model = nss.models.mtmkl([kernels.ExpSquared(3.0)] * 3, priors=SCALES)
    start = {
        "noise": jnp.full(4, 1e-6),
        "W_spike": jnp.ones((4, 3), int),
        "W_slab": 100 * random.normal(KEY, (4, 3)),
        "phi_scale": jnp.full(3, 3.0),
    }
    draws = chain(nss.LatentGibbs(model, accelerate=0.0), (x, Y), 40, start=start)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    assert np.all(np.diff(draws["noise"][:, 0]) != 0)
    assert np.all(np.any(np.diff(draws["phi"][20:], axis=0) != 0, axis=(0, 2)))
    # a length scale may have nowhere to go, not for ever
    assert np.any(np.diff(draws["phi_scale"], axis=0) != 0)


# What does not fit


def extended_model(X, Y=None):
    """With an intercept for each task."""
    phi, W = mixed(X)
    with numpyro.plate("task", Q):
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
    observe((W @ phi).T + b, Y)


@pytest.mark.exhaustive
def test_other_sites_are_left_to_other_blocks():
    sites = ["phi", "phi_scale", "W_spike", "W_slab"]
    kernel = Gibbs(
        [(nss.LatentGibbs(extended_model, accelerate=0.25), sites), (NUTS(extended_model), None)]
    )
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(KEY, jnp.asarray(X), FULL)
    assert mcmc.get_samples()["b"].shape == (10, Q)


def noisy_model(X, Y=None):
    phi, W = mixed(X)
    observe((W @ phi).T, Y, 0.3 * jnp.exp(phi[0])[:, None])


def sharing_model(X, Y=None):
    with handlers.trace() as trace:
        phi, W = mixed(X)
    numpyro.sample("b", dist.Normal(trace["phi_scale"]["value"].sum(), 1.0), obs=0.0)
    observe((W @ phi).T, Y)


def grouped_model(X, Y=None):
    phi = nss.latent_functions("phi", ["white"] * 2, X)
    w = nss.spike_slab("w", 0.4, groups=[0, 0])
    observe(w @ phi, Y[:, 0])


HELD = WEIGHTS | {"noise": jnp.ones(Q), "slab_scale": 1.0, "inclusion": 0.5}
IMPROPER = dist.ImproperUniform(dist.constraints.positive, (M,), ())
REFUSALS = {
    # the model, the sites that other blocks hold, the acceleration, the message
    "not affine": (bent_model, {}, "not affine in latent functions"),
    "noise": (noisy_model, {}, "or their noise depends on these"),
    "improper prior": (
        partial(plain_model, priors={"scale": IMPROPER}),
        {},
        "'phi_scale' must be a distribution of positive numbers",
    ),
    "shared parameter": (sharing_model, {}, "'phi_scale' is shared with something else"),
    "no parameter": (
        handlers.reparam(MODEL, {"phi_scale": TransformReparam()}),
        {},
        r"'phi_scale'.*reparameterised",
    ),
    "no functions": (
        MODEL,
        HELD | {"phi": jnp.ones((M, N))},
        "expected the latent functions 'phi' among them",
    ),
    "no spikes": (MODEL, {"W_spike": WEIGHTS["W_spike"]}, "'W_spike' and 'W_slab' both or neither"),
    "groups": (grouped_model, {}, "without `groups`"),
    "other sites": (
        extended_model,
        {},
        r"sites \['b'\].*Gibbs\(\[\(LatentGibbs\(model\), \['phi",
    ),
    "a share": (MODEL, {}, 1.5, r"accelerate: got 1\.5, expected a share"),
    "accelerated": (MODEL, HELD, "the weights 'W' among them, which acceleration changes"),
}


def begin(model, values, accelerate=0.25):
    kwargs = {GIBBS_SITES_KWARG: values}
    nss.LatentGibbs(model, accelerate=accelerate).init(KEY, 0, None, (X, FULL), kwargs)


test_what_cannot_be_drawn_is_refused = refusals(REFUSALS, begin)


def test_kernels_pickle_and_keep_their_options():
    kernel = nss.LatentGibbs(bent_model, rescale=False, accelerate=0.1)
    for copy in (pickle.loads(pickle.dumps(kernel)), kernel.wrap_model(lambda model: model)):
        assert (copy._rescale, copy._accelerate) == (False, 0.1)
        assert copy.model is bent_model
