# SPDX-License-Identifier: Apache-2.0
"""Samplers of weights that mix latent functions, against closed forms and joint distributions."""

from functools import partial
from itertools import product
import pickle

import arviz_base
import numpy as np
import pytest
from scipy import stats
from tinygp import kernels
from tinygp.kernels import quasisep

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, Gibbs, Predictive
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.primitives import Messenger

import numpyro_spikeslab as nss
from numpyro_spikeslab.algebra.pairs import Prior
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.reading.view import View
from numpyro_spikeslab.sampling.latent_step import recruit

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
LEVEL = 1e-4
N, Q, M = 8, 3, 2
WIDE = {"scale": dist.LogNormal(0.0, 2.0)}
SCALES = {"noise": dist.HalfNormal(1.0), "slab_scale": dist.HalfNormal(2.0)}
X = np.sort(np.random.default_rng(0).uniform(0, 4, N))
SEEN = np.ones((N, Q), bool)
SEEN[[1, 2, 5], [0, 0, 2]] = False


def simulate(seed=1, seen=SEEN):
    """Values of functions, and data of them with missing entries."""
    rng = np.random.default_rng(seed)
    phi = rng.normal(size=(M, N))
    Y = phi.T @ rng.normal(size=(M, Q)) + 0.4 * rng.normal(size=(N, Q))
    return phi, np.where(seen, Y, np.nan)


FULL = simulate(seen=np.ones((N, Q), bool))[1]


def square_model(X, Y=None, *, transposed=False, varying=True):
    """Known noise that varies along a task or not, an offset, and (N, Q) or (Q, N) data."""
    phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)] * M, X)
    slab = numpyro.sample("slab_scale", dist.HalfNormal(1.0))
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", 0.4, slab)
    scale = 0.3 + (0.1 * X[:, None] if varying else 0.0) + 0.1 * jnp.arange(Q)
    loc = 0.5 + (W @ phi).T
    seen = ~jnp.isnan(Y)
    value = jnp.where(seen, Y, 0.0)
    if transposed:
        loc, scale, value, seen = (x.T for x in (loc, scale, value, seen))
    with handlers.mask(mask=seen):
        numpyro.sample("Y", dist.Normal(loc, scale), obs=value)


def one_by_one(function, *args):
    """Like `jax.vmap`, which computes both branches of each condition; and batches of small
    decompositions deadlock now and then with jax 0.10 on two cores."""
    return jax.jit(lambda args: jax.lax.map(lambda item: function(*item), args))(args)


def final_states(kernel, args, values, num_steps, size):
    """Values and inclusion probabilities of independent chains from the prior, after some steps."""
    kwargs = {GIBBS_SITES_KWARG: values}

    def run(key):
        state = kernel.init(key, 0, None, args, kwargs)
        step = lambda state, _: (kernel.sample(state, args, kwargs), None)  # noqa: E731
        return jax.lax.scan(step, state, length=num_steps)[0]

    state = one_by_one(run, random.split(KEY, size))
    return jax.tree.map(np.asarray, (state.z, state.inclusion_probabilities))


def enumerate_task(phi, y, scale, slab):
    """Exact inclusion probabilities and means of the weights of one task."""
    seen = ~np.isnan(y)
    D, r, s = phi[:, seen].T, y[seen] - 0.5, scale[seen]
    models = np.array(list(product([0, 1], repeat=M)))
    logs, means = [], []
    for spikes in models:
        K = slab**2 * (D * spikes) @ (D * spikes).T + np.diag(s**2)
        logs.append(stats.multivariate_normal(np.zeros(r.size), K).logpdf(r))
        logs[-1] += np.sum(np.log(np.where(spikes, 0.4, 0.6)))
        means.append(slab**2 * (D * spikes).T @ np.linalg.solve(K, r))
    probs = np.exp(logs - np.logaddexp.reduce(logs))
    return probs @ models, probs @ np.array(means)


CASES = [(False, True), (True, True), (False, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("transposed", "varying"), CASES)
def test_weights_given_functions_are_those_of_all_models(transposed, varying):
    phi, Y = simulate(seen=SEEN if varying else SEEN[:, :1])
    model = partial(square_model, transposed=transposed, varying=varying)
    kernel = nss.PairedGibbs(model)
    values = {"phi": phi, "phi_scale": jnp.ones(M), "slab_scale": jnp.asarray(0.8)}
    assert kernel._read((X, Y), {}, values).form.complete is not varying

    size = 4000
    z, probs = final_states(kernel, (X, Y), values, 30, size)
    w = np.where(z["W_spike"], z["W_slab"], 0)
    scale = np.broadcast_to(0.3 + (0.1 * X[:, None] if varying else 0) + 0.1 * np.arange(Q), (N, Q))
    for q in range(Q):
        inclusion, mean = enumerate_task(np.asarray(phi), np.asarray(Y)[:, q], scale[:, q], 0.8)
        # 18 tests: a false alarm in 1 of 550 keys
        for m in range(M):
            count = int(np.sum(z["W_spike"][:, q, m]))
            assert stats.binomtest(count, size, inclusion[m]).pvalue > LEVEL
            assert stats.ttest_1samp(w[:, q, m], mean[m]).pvalue > LEVEL
            assert stats.ttest_1samp(probs["W"][:, q, m], inclusion[m]).pvalue > LEVEL


@pytest.mark.slow
def test_gram_form_and_dense_design_draw_the_same_weights(monkeypatch):
    phi, Y = simulate()
    kernel = nss.PairedGibbs(square_model, collapsed=False)
    kwargs = {GIBBS_SITES_KWARG: {"phi": phi, "phi_scale": jnp.ones(M), "slab_scale": 0.8}}
    start = kernel.init(KEY, 0, None, (X, Y), kwargs)
    found = jax.jit(lambda state: kernel.sample(state, (X, Y), kwargs))(start)
    # as one design with a column for each weight
    monkeypatch.setattr(kernel, "_reader", Reader(square_model, "PairedGibbs", joint=True))
    expected = jax.jit(lambda state: kernel.sample(state, (X, Y), kwargs))(start)
    np.testing.assert_array_equal(found.z["W_spike"], expected.z["W_spike"])
    np.testing.assert_allclose(found.z["W_slab"], expected.z["W_slab"], rtol=1e-10)
    found, expected = found.inclusion_probabilities, expected.inclusion_probabilities
    np.testing.assert_allclose(found["W"], expected["W"], rtol=1e-9)


# Functions


def conditional(W, Y, K, scale=0.3):
    """Mean and covariance of both functions, joined, given the weights."""
    seen = ~np.isnan(Y)
    A = np.kron(W, np.eye(N))[seen.T.ravel()]
    precision = np.linalg.inv(np.kron(np.eye(M), K)) + A.T @ A / scale**2
    covariance = np.linalg.inv(precision)
    return covariance @ A.T @ Y.T[seen.T] / scale**2, covariance


def plain_model(X, Y=None, *, kernel=kernels.Matern32(1.0)):  # noqa: B008
    phi = nss.latent_functions("phi", [kernel] * M, X)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", 0.4)
    seen = ~jnp.isnan(Y)
    with handlers.mask(mask=seen):
        numpyro.sample("Y", dist.Normal((W @ phi).T, 0.3), obs=jnp.where(seen, Y, 0.0))


WEIGHTS = {
    "W_spike": jnp.array([[1, 0], [1, 1], [0, 1]]),
    "W_slab": jnp.array([[0.8, 0.3], [-0.6, 1.0], [2.0, 0.5]]),
}
W = np.where(WEIGHTS["W_spike"], WEIGHTS["W_slab"], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    [kernels.Matern32(1.0), quasisep.Matern32(1.0), "white"],
    ids=["dense", "qsm", "white"],
)
def test_functions_given_weights_have_the_closed_form(kernel):
    """In three directions that mix both functions, and their second moments."""
    _, Y = simulate()
    model = partial(plain_model, kernel=kernel)
    values = dict(WEIGHTS)
    if kernel != "white":
        model = handlers.condition(model, {"phi_scale": jnp.ones(M), "phi_sigma": jnp.ones(M)})
    K = np.eye(N) if kernel == "white" else np.asarray(kernels.Matern32(1.0)(X, X))
    mean, covariance = conditional(W, np.asarray(Y), K)
    size = 5000
    z, _ = final_states(nss.LatentGibbs(model), (X, Y), values, 20, size)
    assert set(z) == {"phi"}
    phi = z["phi"].reshape(size, M * N)
    # 2 M N tests at 1e-4 and one test of all covariances: a false alarm in 1 of 300 keys
    sd = np.sqrt(np.diag(covariance))
    for k in range(M * N):
        assert stats.kstest(phi[:, k], stats.norm(mean[k], sd[k]).cdf).pvalue > LEVEL
    white = np.linalg.solve(np.linalg.cholesky(covariance), (phi - mean).T)
    chi2 = np.sum(white**2, axis=0)
    assert stats.kstest(chi2, stats.chi2(M * N).cdf).pvalue > LEVEL


class Replaced(Messenger):
    """Gives a site another distribution."""

    def __init__(self, fn, name, prior):
        super().__init__(fn)
        self.name, self.prior = name, prior

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] == self.name:
            msg["fn"] = self.prior


PRIORS = {
    "LogNormal": (dist.LogNormal(0.0, 2.0), stats.lognorm(2.0)),
    "Gamma": (dist.Gamma(2.0, 1.5), stats.gamma(2.0, scale=1 / 1.5)),
    "Uniform": (dist.Uniform(0.4, 2.5), stats.uniform(0.4, 2.1)),
    "InverseGamma": (dist.InverseGamma(3.0, 2.0), stats.invgamma(3.0, scale=2.0)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.slow if name == "LogNormal" else pytest.mark.exhaustive
        )
        for name in PRIORS
    ],
)
def test_kernel_parameters_are_drawn_with_the_functions_integrated_out(name):
    """One function in use, and one that is not, which keeps the prior."""
    prior, truth = PRIORS[name]
    model = Replaced(plain_model, "phi_scale", prior.expand([M]))
    _, Y = simulate()
    values = WEIGHTS | {"W_spike": jnp.array([[1, 0], [1, 0], [0, 0]])}
    z, _ = final_states(nss.LatentGibbs(model), (X, Y), values, 20, 2000)
    w, seen = np.array([0.8, -0.6, 0.0]), ~np.isnan(Y).T.ravel()
    grid = np.exp(np.linspace(-8, 8, 2001))
    logs = []
    for scale in grid:
        K = np.asarray(kernels.Matern32(scale)(X, X))
        full = np.kron(np.outer(w, w), K) + 0.09 * np.eye(Q * N)
        normal = stats.multivariate_normal(np.zeros(seen.sum()), full[np.ix_(seen, seen)])
        # the grid is one of logs
        logs.append(normal.logpdf(Y.T.ravel()[seen]) + np.log(scale))
    density = np.exp(logs - np.max(logs)) * truth.pdf(grid)
    cdf = np.cumsum(density)
    reached = np.interp(z["phi_scale"][:, 0], grid, cdf / cdf[-1])
    for uniform in (reached, truth.cdf(z["phi_scale"][:, 1])):
        assert stats.kstest(uniform, stats.uniform().cdf).pvalue > LEVEL


# The whole model


def whole_model(num_functions, noise_scale=1.0):
    model = nss.models.mtmkl(
        [kernels.Matern32(1.0)] * num_functions,
        num_tasks=Q,
        priors=WIDE
        | {
            "noise": dist.HalfNormal(noise_scale),
            "slab_scale": dist.HalfNormal(1.5),
            "inclusion": dist.Beta(2.0, 2.0),
        },
    )
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
def test_accelerated_chains_from_the_prior_find_the_functions():
    x, Y, f = waves()
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 3, priors=SCALES)
    mcmc = MCMC(nss.mtmkl_kernel(model), num_warmup=150, num_samples=100, progress_bar=False)
    mcmc.run(KEY, x, Y, extra_fields=("num_accelerated", "inclusion_probabilities.W"))
    draws = mcmc.get_samples()
    assert np.max(np.abs(draws["f"].mean(0) - f)) < 0.3
    assert np.all(np.abs(np.mean(draws["noise"], axis=0) - 0.1) < 0.1)
    extra = mcmc.get_extra_fields()
    assert np.all(extra["num_accelerated"] == 0)
    probs = np.mean(extra["inclusion_probabilities.W"], axis=0)
    np.testing.assert_allclose(probs, np.mean(draws["W_spike"], axis=0), atol=0.2)


@pytest.mark.slow
def test_acceleration_gives_an_idle_function_to_a_badly_explained_task():
    phi = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)))
    ones, slabs = jnp.ones((5, 3)), jnp.full((3, 2), 2.0)
    spikes = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    # the first task is explained, a quarter of the second's power is left, all of the third's
    Y = jnp.stack([2 * phi[0], 4 * phi[0], phi[1]], axis=1)
    prior = Prior(jnp.zeros((3, 2)), jnp.full((3, 2), 9.0))
    zero = jnp.zeros(())
    at = View(Y, ones, jnp.ones(3), jnp.full(3, 5.0), jnp.zeros(3), zero, prior, {}, zero)
    keys = random.split(KEY, 1000)
    new, slabs_now = jax.vmap(lambda key: recruit(key, at, phi, spikes, slabs))(keys)
    np.testing.assert_array_equal(new[:, :, 0], np.broadcast_to(spikes[:, 0], (1000, 3)))
    counts = np.sum(new[:, :, 1], axis=0)
    assert counts[0] == 0 and counts.sum() == 1000
    assert stats.binomtest(int(counts[1]), 1000, 0.2).pvalue > LEVEL
    np.testing.assert_array_equal(slabs_now[:, :, 1], np.where(new[:, :, 1], 3.0, 2.0))
    # without an idle function nothing changes
    busy = spikes.at[2, 1].set(1.0)
    for found, expected in zip(recruit(KEY, at, phi, busy, slabs), (busy, slabs), strict=True):
        np.testing.assert_array_equal(found, expected)


ACCELERATED = nss.mtmkl_kernel(MODEL, accelerate=0.5)


@jax.jit
def masked_step(state, Y, mask):
    return ACCELERATED.sample(state, (jnp.asarray(X), Y), {"mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "steps"), [(ACCELERATED, 2), (nss.mtmkl_kernel(MODEL, accelerate=0.0), 0)]
)
def test_acceleration_starts_with_idle_functions_and_ends(kernel, steps):
    args = (jnp.asarray(X), simulate()[1])
    start = kernel.init(random.split(KEY, 8), 4, None, args, {})
    assert bool(np.any(start.z["W_spike"])) == (steps == 0)
    assert np.all(start.num_accelerated == steps)


@pytest.mark.slow
def test_a_mask_may_be_traced_and_the_acceleration_ends():
    Y, args = FULL, (jnp.asarray(X), FULL)
    start = ACCELERATED.init(KEY, 4, None, args, {"mask": jnp.asarray(SEEN)})
    state, other, left = start, start, []
    for _ in range(4):
        state = masked_step(state, Y, jnp.asarray(SEEN))
        other = masked_step(other, jnp.where(SEEN, Y, 1e3), jnp.asarray(SEEN))
        left.append(int(state.num_accelerated))
    assert left == [1, 0, 0, 0]
    for name, value in other.z.items():
        np.testing.assert_array_equal(state.z[name], value)


@pytest.mark.exhaustive
def test_draws_become_arviz_data():
    """Of two data sets, for JAX compares what NumPyro remembers of the models."""
    for seed, method in ((1, "sequential"), (2, "vectorized")):
        model = nss.models.mtmkl([kernels.Matern32(1.0)] * M)
        mcmc = MCMC(
            nss.mtmkl_kernel(model),
            num_warmup=5,
            num_samples=6,
            num_chains=2,
            chain_method=method,
            progress_bar=False,
        )
        mcmc.run(
            KEY, jnp.asarray(X), simulate(seed)[1], extra_fields=("inclusion_probabilities.W",)
        )
        tree = arviz_base.from_numpyro(mcmc, log_likelihood=False)
        assert tree["posterior"]["W"].dims == ("chain", "draw", "task", "latent")
        assert dict(tree["posterior"]["f"].sizes) == {"chain": 2, "draw": 6, "point": N, "task": Q}
        rows = nss.summary(tree, ["num_active", "WWT", "W"]).index
        assert {"num_active", "WWT[0, 1]", "W[0, 1]"} <= set(rows)


@pytest.fixture(scope="module")
def fit():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    x, Y, _ = waves()
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    params = svi.run(KEY, 30, x, Y, progress_bar=False).params
    jax.config.update("jax_enable_x64", before)
    return x, Y, model, guide, params


@pytest.mark.exhaustive
def test_chains_start_at_a_fit(fit):
    x, Y, model, guide, params = fit
    start = guide.to_init_params(params, x, Y)
    state = nss.mtmkl_kernel(model).init(KEY, 0, start, (x, Y), {})
    assert set(state.z) == set(start)
    for name, value in start.items():
        np.testing.assert_array_equal(state.z[name], value)
    np.testing.assert_allclose(start["phi"], guide.posterior_mean(params, x, Y)["phi"])
    with pytest.raises(ValueError, match=r"init_params\['nois'\]: got a name"):
        guide.to_init_params(params, x, Y, unconstrained=["nois"])
    many = guide.to_init_params(params, x, Y, num_chains=2)
    np.testing.assert_array_equal(many["phi"][1], start["phi"])
    drawn = guide.to_init_params(params, x, Y, rng_key=KEY, num_chains=2)
    assert np.any(drawn["phi"][0] != drawn["phi"][1])
    kernel = nss.mtmkl_kernel(model)
    state = kernel.init(random.split(KEY), 0, drawn, (x, Y), {})
    state = jax.jit(lambda state: kernel.sample(state, (x, Y), {}))(state)
    assert state.z["phi"].shape == (2, 2, 30)


@pytest.mark.exhaustive
def test_a_composite_with_nuts_starts_at_a_fit(fit):
    x, Y, model, guide, params = fit
    names = ("noise", "slab_scale", "inclusion")
    start = guide.to_init_params(params, x, Y, unconstrained=names)
    kernel = composite(model)
    state = kernel.init(KEY, 0, start, (x, Y), {})
    constrained = kernel.get_constrain_fn((x, Y), {})(state.z)
    for name, value in guide.to_init_params(params, x, Y).items():
        np.testing.assert_allclose(constrained[name], value, rtol=1e-9)


@pytest.mark.slow
def test_functions_at_new_inputs_are_conditioned_draw_by_draw(fit):
    x, Y, model, guide, params = fit
    start = guide.to_init_params(params, x, Y)
    size = 4000
    draws = {k: np.broadcast_to(v, (size, *v.shape)) for k, v in start.items()}
    x_new = np.array([0.33, 2.21, 7.0])
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2, num_tasks=4)
    found = Predictive(model, draws)(KEY, x, X_new=x_new)
    w = np.where(start["W_spike"], start["W_slab"], 0)
    np.testing.assert_allclose(
        found["f_new"], np.swapaxes(w @ found["phi_new"], 1, 2), rtol=1e-6, atol=1e-9
    )
    for m in range(2):
        kernel = kernels.ExpSquared(start["phi_scale"][m])
        K = np.asarray(kernel(x, x)) + 1e-9 * np.eye(x.size)
        cross = np.asarray(kernel(x, x_new))
        mean = cross.T @ np.linalg.solve(K, start["phi"][m])
        left = np.asarray(kernel(x_new, x_new)) - cross.T @ np.linalg.solve(K, cross)
        sd = np.sqrt(np.diag(left))
        # the last is far from the data: the others' deviations are of the size of the jitter
        assert (
            stats.kstest(found["phi_new"][:, m, 2], stats.norm(mean[2], sd[2]).cdf).pvalue > LEVEL
        )
        np.testing.assert_allclose(found["phi_new"][:, m, :2].mean(0), mean[:2], atol=0.01)


# What does not fit


def bent_model(X, Y=None):
    phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)] * M, X)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", 0.4)
    numpyro.sample("Y", dist.Normal((W @ jnp.exp(phi)).T, 0.3), obs=Y)


@pytest.mark.slow
def test_weights_are_drawn_where_functions_are_not_affine():
    values = {"phi": jnp.ones((M, N)), "phi_scale": jnp.ones(M)}
    kernel, kwargs = nss.PairedGibbs(bent_model), {GIBBS_SITES_KWARG: values}
    state = kernel.init(KEY, 0, None, (X, FULL), kwargs)
    state = jax.jit(lambda state: kernel.sample(state, (X, FULL), kwargs))(state)
    assert state.z["W_slab"].shape == (Q, M)


def with_extra():
    """A model with an intercept for each task."""

    def extended(X, Y=None):
        phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)] * M, X)
        with numpyro.plate("task", Q):
            b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
            W = nss.spike_slab("W", 0.4)
        numpyro.sample("Y", dist.Normal((W @ phi).T + b, 0.3), obs=Y)

    return extended


@pytest.mark.exhaustive
def test_other_sites_are_left_to_other_blocks():
    Y, model = FULL, with_extra()
    with pytest.raises(ValueError, match=r"sites \['b'\].*Gibbs\(\[\(LatentGibbs\(model\), \['phi"):
        nss.mtmkl_kernel(model).init(KEY, 0, None, (X, Y), {})
    sites = ["phi", "phi_scale", "W_spike", "W_slab"]
    kernel = Gibbs([(nss.mtmkl_kernel(model), sites), (NUTS(model), None)])
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(KEY, jnp.asarray(X), Y)
    assert mcmc.get_samples()["b"].shape == (10, Q)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_functions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_single_task_is_a_task(num_functions):
    y = np.sin(X) + 0.1
    model = nss.models.mtmkl([kernels.Matern32(1.0)] * num_functions)
    kernel = nss.mtmkl_kernel(model)
    state = kernel.init(KEY, 4, None, (X, y), {})
    step = lambda state, _: ((state := kernel.sample(state, (X, y), {})), state.z)  # noqa: E731
    draws = jax.jit(lambda state: jax.lax.scan(step, state, length=8)[1])(state)
    assert draws["phi"].shape == (8, num_functions, N)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    assert np.all(np.diff(draws["noise"][:, 0]) != 0)


def noisy_model(X, Y=None):
    phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)] * M, X)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", 0.4)
    numpyro.sample("Y", dist.Normal((W @ phi).T, 0.3 * jnp.exp(phi[0])[:, None]), obs=Y)


def sharing_model(X, Y=None):
    with handlers.trace() as trace:
        phi = nss.latent_functions("phi", [kernels.ExpSquared(1.0)] * M, X)
    numpyro.sample("b", dist.Normal(trace["phi_scale"]["value"].sum(), 1.0), obs=0.0)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", M, dim=-1):
        W = nss.spike_slab("W", 0.4)
    numpyro.sample("Y", dist.Normal((W @ phi).T, 0.3), obs=Y)


def with_scale_prior(prior):
    return Replaced(plain_model, "phi_scale", prior.expand([M]))


def transformed(model):
    return handlers.reparam(model, {"phi_scale": numpyro.infer.reparam.TransformReparam()})


HELD = WEIGHTS | {"noise": jnp.ones(Q), "slab_scale": 1.0, "inclusion": 0.5}
PHI = {"phi": jnp.ones((M, N))}
IMPROPER = dist.ImproperUniform(dist.constraints.positive, (), ())
REFUSALS = {
    # the model, the sites that other blocks hold, the message
    "not affine": (bent_model, {}, "not affine in latent functions"),
    "noise": (noisy_model, {}, "or their noise depends on these"),
    "prior of a parameter": (with_scale_prior(dist.Normal(1.0, 1.0)), {}, "of positive numbers"),
    "improper prior": (with_scale_prior(IMPROPER), {}, "'phi_scale' must be a distribution"),
    "shared parameter": (sharing_model, {}, "'phi_scale' is shared with something else"),
    "no parameter": (transformed(MODEL), {}, r"'phi_scale'.*reparameterised"),
    "no functions": (MODEL, HELD | PHI, "expected the latent functions 'phi' among them"),
    "no spikes": (MODEL, {"W_spike": WEIGHTS["W_spike"]}, "'W_spike' and 'W_slab' both or neither"),
    "accelerated": (MODEL, HELD, "the weights 'W' among them, which acceleration changes"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_drawn_is_refused(name):
    model, values, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        nss.mtmkl_kernel(model).init(KEY, 0, None, (X, FULL), {GIBBS_SITES_KWARG: values})


def test_acceleration_is_a_share_of_the_warm_up():
    with pytest.raises(ValueError, match=r"accelerate: got 1\.5, expected a share"):
        nss.mtmkl_kernel(MODEL, accelerate=1.5)


def test_kernels_pickle_and_keep_their_options():
    kernel = nss.mtmkl_kernel(bent_model, rescale=False, accelerate=0.1)
    for copy in (pickle.loads(pickle.dumps(kernel)), kernel.wrap_model(lambda model: model)):
        assert (copy._rescale, copy._accelerate) == (False, 0.1)
        assert copy.model is bent_model


@pytest.mark.exhaustive
def test_single_precision_draws_are_finite_and_fit(restored_x64):
    jax.config.update("jax_enable_x64", False)
    x, Y, f = waves()
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 3, priors=SCALES)
    kernel = nss.mtmkl_kernel(model)
    state = kernel.init(KEY, 40, None, (x, Y), {})
    step = lambda state, _: ((state := kernel.sample(state, (x, Y), {})), state.z)  # noqa: E731
    draws = jax.jit(lambda state: jax.lax.scan(step, state, length=100)[1])(state)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    w = np.where(draws["W_spike"], draws["W_slab"], 0)[60:]
    found = np.mean(w @ draws["phi"][60:], axis=0).T
    assert found.dtype == np.float32 and np.max(np.abs(found - f)) < 0.4


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
    kernel = nss.mtmkl_kernel(model, accelerate=0.0)
    state = kernel.init(KEY, 0, start, (x, Y), {})
    step = lambda state, _: ((state := kernel.sample(state, (x, Y), {})), state.z)  # noqa: E731
    draws = jax.jit(lambda state: jax.lax.scan(step, state, length=40)[1])(state)
    assert all(np.all(np.isfinite(x)) for x in draws.values())
    assert np.all(np.diff(draws["noise"][:, 0]) != 0)
    assert np.all(np.any(np.diff(draws["phi"][20:], axis=0) != 0, axis=(0, 2)))
    # a length scale may have nowhere to go, not for ever
    assert np.any(np.diff(draws["phi_scale"], axis=0) != 0)
