# SPDX-License-Identifier: Apache-2.0
"""Latent functions in models, in PairedGuide and in CAVI."""

import pickle

import arviz_base
import numpy as np
import optax
import pytest
from tinygp import kernels, transforms

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
N, Q = 24, 4
X = np.linspace(0, 3, N)
EXPONENTIAL = kernels.ExpSquared(1.0)


def observations():
    rng = np.random.default_rng(0)
    f = np.stack([np.sin(2 * X), np.cos(3 * X + 1)], 1) @ rng.normal(size=(2, Q))
    Y = f + 0.1 * rng.normal(size=(N, Q))
    Y[3:8, 1] = np.nan
    return Y


Y = observations()


class Fit:
    """The small data fitted once, for the tests that only look."""

    def __init__(self):
        self.model = nss.models.mtmkl([EXPONENTIAL] * 3)
        self.guide = nss.PairedGuide(self.model)
        self.svi = nss.CAVI(self.model, self.guide, num_restarts=1)
        self.result = self.svi.run(KEY, 40, X, Y, progress_bar=False)
        self.params = self.result.params


@pytest.fixture(scope="module")
def fit():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    found = Fit()
    jax.config.update("jax_enable_x64", before)
    return found


def test_fit_explains_the_tasks(fit):
    mean, variance = fit.guide.predict(fit.params, X, Y, X_new=X)
    assert mean.shape == variance.shape == (N, Q)
    assert np.nanmax(np.abs(mean - Y)) < 0.5
    noisy = fit.guide.predict(fit.params, X, Y, X_new=X, noise=True)[1]
    noise = np.broadcast_to(fit.params["noise_auto_loc"] ** 2, (N, Q))
    np.testing.assert_allclose(noisy - variance, noise)
    assert np.all((noise > 0.001) & (noise < 0.03))


def test_losses_never_rise_and_are_those_of_evaluate(fit):
    losses = np.asarray(fit.result.losses)
    assert losses.shape == (40,) and np.max(np.diff(losses)) < 1e-8
    np.testing.assert_allclose(fit.svi.evaluate(fit.result.state, X, Y), losses[-1], rtol=1e-9)
    state, loss = fit.svi.update(fit.result.state, X, Y)
    assert loss <= losses[-1] + 1e-8
    np.testing.assert_allclose(fit.svi.evaluate(state, X, Y), loss, rtol=1e-8)


def test_bound_is_what_draws_of_the_guide_give(fit):
    """Loss = -E[log p(model) - log q(guide)], priors of the hyperparameters included."""
    found = densities(fit.model, fit.guide, fit.params, X, Y)
    error = np.std(found) / np.sqrt(found.size)
    assert abs(np.mean(found) + fit.result.losses[-1]) < 5 * error


def test_draws_have_the_moments_of_the_prediction(fit):
    draws = fit.guide.sample_posterior(KEY, fit.params, X, Y, sample_shape=(500,))
    mean, variance = fit.guide.predict(fit.params, X, Y, X_new=X)
    assert draws["phi"].shape == (500, 3, N) and draws["W"].shape == (500, Q, 3)
    sd = np.sqrt(np.asarray(variance))
    assert np.max(np.abs(draws["f"].mean(0) - mean) / (5 * sd / np.sqrt(500) + 1e-3)) < 1
    np.testing.assert_allclose(draws["f"].var(0), variance, rtol=0.5, atol=1e-4)
    found = fit.guide.posterior_mean(fit.params, X, Y)
    np.testing.assert_allclose((found["W"] @ found["phi"]).T, mean, atol=1e-6)
    medians = fit.guide.median(fit.params, X, Y)
    np.testing.assert_allclose(medians["phi"], found["phi"])


def test_posterior_predictive_at_new_inputs(fit):
    X_new = X[:5] + 0.06
    predictive = Predictive(fit.model, guide=fit.guide, params=fit.params, num_samples=300)
    draws = predictive(KEY, X, Y, X_new)
    mean, variance = fit.guide.predict(fit.params, X, Y, X_new=X_new)
    assert draws["Y_new"].shape == (300, 5, Q)
    sd = np.sqrt(np.asarray(variance))
    assert np.max(np.abs(draws["f_new"].mean(0) - mean) / (5 * sd / np.sqrt(300) + 1e-3)) < 1


def test_arviz_takes_the_fit(fit):
    data = arviz_base.from_numpyro_svi(
        fit.svi, svi_result=fit.result, model_args=(X, Y), num_samples=10
    )
    assert data.posterior["W"].dims[-2:] == ("task", "latent")
    assert data.posterior["phi"].shape[-2:] == (3, N)


def test_a_pickled_guide_predicts_the_same(fit):
    guide = pickle.loads(pickle.dumps(fit.guide))
    for found, expected in zip(
        guide.predict(fit.params, X, Y, X_new=X[:3] + 0.05),
        fit.guide.predict(fit.params, X, Y, X_new=X[:3] + 0.05),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(found, expected)


def test_predictions_at_the_inputs_need_no_new_ones(fit):
    for found, expected in zip(
        fit.guide.predict(fit.params, X, Y),
        fit.guide.predict(fit.params, X, Y, X_new=X),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def densities(model, guide, params, *args):
    """Draws of log p(model) - log q(guide), all sites included."""

    def one(key):
        key_guide, key_model = random.split(key)
        seeded = handlers.substitute(handlers.seed(guide, key_guide), data=params)
        drawn = handlers.trace(seeded).get_trace(*args)
        seeded = handlers.substitute(handlers.seed(model, key_model), data=params)
        trace = handlers.trace(handlers.replay(seeded, drawn)).get_trace(*args)
        return sum(
            sign * jnp.sum(site["fn"].log_prob(site["value"]))
            for sites, sign in ((trace, 1), (drawn, -1))
            for site in sites.values()
            if site["type"] == "sample"
        )

    return np.asarray(jax.jit(jax.vmap(one))(random.split(KEY, 1000)))


def test_plain_updates_and_going_on_from_a_state(fit):
    svi = nss.CAVI(fit.model, fit.guide, plain=True)
    first = svi.run(KEY, 5, X, Y, progress_bar=False)
    more = svi.run(KEY, 3, X, Y, progress_bar=False, init_state=first.state)
    assert more.losses[-1] < more.losses[0] < first.losses[-1]
    assert int(more.state.optim_state[0]) == 8


def test_hand_written_model_with_shared_noise_offset_and_fixed_parameter():
    @handlers.condition(data={"g_scale": jnp.array([0.7, 0.7])})
    def model(X, Y):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("component", 2):
            g = nss.latent_functions("g", EXPONENTIAL, X)
            with numpyro.plate("output", Q, dim=-2):
                v = nss.spike_slab("v", 0.5, 2.0)
        with numpyro.plate("output", Q, dim=-2), numpyro.plate("n", N, dim=-1):
            numpyro.sample("obs", dist.Normal(1.0 + v @ g, sigma), obs=Y)

    full = np.where(np.isnan(Y), 0.0, Y).T + 1.0
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    reading = read(model, X, full)
    assert [tuple(role) for role in reading.form.roles] == [("sigma", "noise")]
    assert reading.form.kind == "functions" and reading.form.tasks_first
    np.testing.assert_allclose(reading.base.Y, (full - 1.0).T)
    state = svi.init(KEY, X, full)
    losses = []
    for _ in range(8):
        state, loss = svi.update(state, X, full)
        losses.append(float(loss))
    assert np.max(np.diff(losses)) < 1e-8
    params = svi.get_params(state)
    assert params["sigma_auto_loc"].shape == () and "g_scale_auto_loc" not in params
    assert np.abs(np.asarray(guide.predict(params, X, full, X_new=X)[0]).T - full).mean() < 0.3


def shifted(slopes):
    """Tasks with intercepts, the covariate ``x`` with ``slopes``, and noise of another prior."""

    def model(X, x, Y=None):
        phi = nss.latent_functions("phi", [EXPONENTIAL] * 2, X)
        sigma = numpyro.sample("sigma", dist.Exponential(2.0))
        with numpyro.plate("task", Q, dim=-1):
            intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
            slope = numpyro.sample("slope", dist.Normal(0.0, 10.0)) if slopes else 0.0
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 2, dim=-1):
            W = nss.spike_slab("W", 0.5)
        with numpyro.plate("point", N, dim=-2), numpyro.plate("task", Q, dim=-1):
            location = intercept + slope * x[:, None] + (W @ phi).T
            numpyro.sample("Y", dist.Normal(location, sigma), obs=Y)

    return model


@pytest.mark.parametrize("slopes", [False, True], ids=["intercepts", "covariate"])
def test_other_sites_of_a_hand_written_model(slopes):
    """Their values climb the same exact bound, and predictions contain them."""
    x = np.random.default_rng(1).normal(size=N)
    full = np.where(np.isnan(Y), 0.0, Y) + np.arange(Q) * (5.0 + slopes * x[:, None])
    model = shifted(slopes)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    result = svi.run(KEY, 40, X, x, full, progress_bar=False)
    losses = np.asarray(result.losses)
    assert np.max(np.diff(losses)) < 1e-6
    np.testing.assert_allclose(svi.evaluate(result.state, X, x, full), losses[-1], rtol=1e-8)
    found = densities(model, guide, result.params, X, x, full)
    assert abs(np.mean(found) + losses[-1]) < 5 * np.std(found) / np.sqrt(found.size)
    mean, _ = guide.predict(result.params, X, x, full)
    assert np.std(np.asarray(mean) - full) < 0.2
    if slopes:
        np.testing.assert_allclose(result.params["slope_auto_loc"], np.arange(Q), atol=0.2)
        with pytest.raises(ValueError, match="not the same at all inputs"):
            guide.predict(result.params, X, x, full, X_new=X[:2])
    else:
        there, _ = guide.predict(result.params, X, x, full, X_new=X)
        np.testing.assert_allclose(there, mean, atol=1e-5)


def test_functions_without_variance_are_features():
    """Zero covariances give the sparse regression on the means, to the last digit."""
    features, y = np.random.default_rng(0).normal(size=(2, N)), Y[:, 0]

    def regression(X, mean, y):
        with numpyro.plate("feature", 2):
            phi = nss.latent_functions("phi", "zero", X, mean) if mean is not None else features
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", N):
            numpyro.sample("y", dist.Normal(w @ phi, 0.5), obs=y)

    found = []
    for mean in (features, None):
        svi = nss.CAVI(regression, nss.PairedGuide(regression))
        found.append(svi.run(KEY, 120, X, mean, y, progress_bar=False).params)
    for name, value in found[1].items():
        np.testing.assert_array_equal(found[0][name], value)


def planted_factors(seed, num_points=200, num_tasks=60, num_factors=4):
    rng = np.random.default_rng(seed)
    included = rng.uniform(size=(num_tasks, num_factors)) < 0.3
    size = np.abs(rng.normal(size=included.shape)) + 0.5
    W = rng.choice([-1, 1], included.shape) * size
    phi = rng.normal(size=(num_factors, num_points))
    noise = 0.3 * rng.normal(size=(num_points, num_tasks))
    return included, phi, (W * included @ phi).T + noise


@pytest.mark.parametrize("seed", [0, 1])
def test_white_functions_are_sparse_factors(seed):
    included, phi, responses = planted_factors(seed)
    model = nss.models.mtmkl("white", 4, shared_noise=True, shared_inclusion=False)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    params = svi.run(KEY, 30, np.arange(200), responses, progress_bar=False).params
    assert params["noise_auto_loc"].shape == () and params["inclusion_auto_loc"].shape == (4,)
    found = np.asarray(guide.posterior_mean(params, np.arange(200), responses)["phi"])
    correlation = np.abs(np.corrcoef(phi, found)[:4, 4:])
    match = np.argmax(correlation, axis=1)
    assert sorted(match) == [0, 1, 2, 3] and np.min(np.max(correlation, axis=1)) > 0.95
    probability = np.asarray(guide.inclusion_probabilities(params)["W"])[:, match]
    # the share of pairs in the right order
    order = probability[included][:, None] > probability[~included]
    assert np.mean(order) > 0.98
    np.testing.assert_allclose(params["noise_auto_loc"], 0.3, rtol=0.05)
    # each probability is that of its own function
    mean = np.mean(probability, axis=0)
    np.testing.assert_allclose(params["inclusion_auto_loc"][match], mean, atol=1e-3)


def test_long_series_need_no_matrices():
    """A state-space kernel at more inputs than a matrix could hold."""
    size = 20_000
    x = random.permutation(KEY, np.linspace(0, 2000, size))
    rng = np.random.default_rng(0)
    f = np.sin(0.5 * x)
    series = np.outer(f, [1.0, -2.0, 0.0]) + 0.3 * rng.normal(size=(size, 3))
    model = nss.models.mtmkl(kernels.quasisep.Matern52(3.0), 2)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    result = svi.run(KEY, 6, x, series, progress_bar=False)
    assert np.max(np.diff(result.losses)) < 1e-6
    error = np.asarray(guide.predict(result.params, x, series)[0]) - np.outer(f, [1.0, -2.0, 0.0])
    assert np.sqrt(np.mean(error**2)) < 0.1
    drawn = guide.sample_posterior(KEY, result.params, x, series)
    assert np.std(drawn["f"] - np.outer(f, [1.0, -2.0, 0.0])) < 0.15


def test_single_precision_agrees_with_double(fit):
    with jax.enable_x64(False):
        model = nss.models.mtmkl([EXPONENTIAL] * 3)
        guide = nss.PairedGuide(model)
        svi = nss.CAVI(model, guide, num_restarts=1)
        result = svi.run(KEY, 30, X, Y, progress_bar=False)
        mean, variance = guide.predict(result.params, X, Y)
    assert mean.dtype == variance.dtype == np.float32
    assert np.all(np.isfinite(result.losses)) and np.all(variance >= 0)
    np.testing.assert_allclose(mean, fit.guide.predict(fit.params, X, Y)[0], atol=0.05)


def test_nearly_singular_covariances_give_no_nan():
    """Repeated inputs, and a length scale beyond all distances."""
    repeated = np.repeat(X[::2], 2)
    model = nss.models.mtmkl([kernels.ExpSquared(1e4), np.ones((N, N)), kernels.Constant(1.0)])
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    result = svi.run(KEY, 15, repeated, Y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert all(np.all(np.isfinite(x)) for x in result.params.values())
    with pytest.raises(ValueError, match="says nothing about new inputs"):
        guide.predict(result.params, repeated, Y, X_new=X)


def test_stock_svi_climbs_towards_the_bound(fit):
    svi = SVI(fit.model, fit.guide, optax.adam(0.02), TraceGraph_ELBO(num_particles=5))
    result = svi.run(KEY, 300, X, Y, progress_bar=False)
    assert set(result.params) == set(fit.params)
    early, late = np.mean(result.losses[:20]), np.mean(result.losses[-20:])
    assert fit.result.losses[-1] - 5 < late < early


def test_missing_entries_by_mask_or_nan(fit):
    model = nss.models.mtmkl([EXPONENTIAL] * 3)
    full = np.where(np.isnan(Y), 7.0, Y)
    found = read(model, X, full, mask=~np.isnan(Y)).base
    expected = read(model, X, Y).base
    np.testing.assert_array_equal(found.Y, expected.Y)
    np.testing.assert_array_equal(found.relative, expected.relative)
    np.testing.assert_array_equal(found.relative > 0, ~np.isnan(Y))
    with pytest.raises(ValueError, match="mask must be boolean"):
        handlers.seed(model, KEY)(X, Y, mask=np.ones(3, bool))


def read(model, *args, **kwargs):
    return Reader(model, "test")(args, kwargs)


def test_one_task_may_be_a_vector():
    reading = read(nss.models.mtmkl([EXPONENTIAL] * 2), X, Y[:, 0])
    assert reading.base.Y.shape == (N, 1)


@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        (["white"] * 2, ()),
        ([1.5 * EXPONENTIAL] * 2, ("phi_kernel1_value", "phi_kernel2_scale")),
        (
            [EXPONENTIAL, kernels.RationalQuadratic(alpha=1.0)],
            ("phi_0_scale", "phi_1_scale", "phi_1_alpha"),
        ),
        ([EXPONENTIAL, "white", "zero"], ("phi_0_scale",)),
        ([np.eye(N), np.ones((N, N))], ()),
        ([kernels.quasisep.Matern32(1.0)] * 2, ("phi_scale", "phi_sigma")),
    ],
    ids=["white", "product", "different", "mixed", "matrices", "quasiseparable"],
)  # fmt: skip
def test_kernels_and_their_sites(kernel, names):
    known = read(nss.models.mtmkl(kernel), X, Y).functions
    assert set(known.functions.site_names) == set(names)
    shape = (len(known.functions.templates),) if known.functions.alike else ()
    sites = {name: jnp.exp(random.normal(KEY, shape)) for name in names}
    back = known.parameters.scatter(known.parameters.gather(sites))
    for name in names:
        np.testing.assert_allclose(back[name], sites[name])


def test_zero_functions_make_a_linear_model():
    features = np.stack([X, X**2])
    model = nss.models.mtmkl(["zero"] * 2, mean=features)
    guide = nss.PairedGuide(model)
    Z = np.where(np.isnan(Y), 0.0, Y)
    state = nss.CAVI(model, guide).init(KEY, X, Z)
    assert not guide.functions and set(state.optim_state[1]) >= {"W_auto_probs"}


ERRORS = {
    "no functions": (lambda: nss.models.mtmkl([]), "at least one"),
    "functions that feed themselves": (
        lambda: fit_of(with_own_scale, X, np.where(np.isnan(Y), 0.0, Y)),
        "depends on .*'scale'",
    ),
    "number": (lambda: nss.models.mtmkl(EXPONENTIAL), "num_functions"),
    "no plate": (lambda: seeded(EXPONENTIAL, X), "enclosing plate"),
    "empty list": (lambda: seeded([], X), "at least one latent function"),
    "NaN in X": (lambda: seeded([EXPONENTIAL], np.where(X > 2, np.nan, X)), "not finite at"),
    "name": (lambda: seeded(["pink"], X), "'white' and 'zero'"),
    "zero without mean": (lambda: seeded(["zero"], X), "need a `mean`"),
    "dimension": (
        lambda: seeded([transforms.Linear(jnp.ones(3), EXPONENTIAL)], np.ones((N, 2))),
        "does not take inputs|dimension",
    ),
    "square": (lambda: seeded([np.ones((N, 3))], X), "matrix of shape"),
    "symmetric": (lambda: seeded([np.triu(np.ones((N, N)))], X), "symmetric"),
    "semidefinite": (lambda: seeded([-np.eye(N)], X), "positive semidefinite"),
    "memory": (
        lambda: jax.eval_shape(lambda: seeded([EXPONENTIAL], np.arange(1e6))),
        "8,000,000,000,000 bytes",
    ),
    "mean": (lambda: seeded([EXPONENTIAL], X, np.ones(3)), "`mean` has shape"),
    "no tasks": (lambda: handlers.seed(nss.models.mtmkl([EXPONENTIAL]), KEY)(X), "num_tasks"),
    "rows": (lambda: handlers.seed(nss.models.mtmkl([EXPONENTIAL]), KEY)(X, Y[:5]), "shape"),
    "X_new": (
        lambda: handlers.seed(nss.models.mtmkl([EXPONENTIAL]), KEY)(X, Y, np.ones((3, 2))),
        "same width",
    ),
}


def fit_of(model, *args):
    return nss.CAVI(model, nss.PairedGuide(model)).run(KEY, 2, *args, progress_bar=False)


def with_own_scale(X, Y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    phi = nss.latent_functions("phi", [EXPONENTIAL] * 2, X, lambda X: scale * X)
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 2, dim=-1):
        W = nss.spike_slab("W", 0.5)
    numpyro.sample("Y", dist.Normal((W @ phi).T, 0.1), obs=Y)


def seeded(kernel, X, mean=None):
    with handlers.seed(rng_seed=0):
        return nss.latent_functions("phi", kernel, X, mean)


@pytest.mark.parametrize("name", ERRORS)
def test_mistakes_have_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_predict_checks_new_inputs(fit):
    with pytest.raises(ValueError, match="same number of axes"):
        fit.guide.predict(fit.params, X, Y, X_new=np.ones((3, 2)))
    with pytest.raises(ValueError, match="not finite"):
        fit.guide.predict(fit.params, X, Y, X_new=np.array([np.nan]))


def test_models_that_do_not_fit():
    def nonlinear(X, Y):
        phi = nss.latent_functions("phi", [EXPONENTIAL] * 2, X)
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 2, dim=-1):
            W = nss.spike_slab("W", 0.5)
        numpyro.sample("Y", dist.Normal((W @ phi**2).T, 0.1), obs=Y)

    full = np.where(np.isnan(Y), 0.0, Y)
    with pytest.raises(ValueError, match="is not `offset"):
        fit_of(nonlinear, X, full)
    with pytest.raises(ValueError, match="Use PairedGuide"):
        nss.MeanFieldGuide(nss.models.mtmkl([EXPONENTIAL]))(X, Y)


def test_empty_tasks_and_points_are_named():
    missing = Y.copy()
    missing[:, 2] = np.nan
    missing[5] = np.nan
    model = nss.models.mtmkl([EXPONENTIAL] * 2)
    with (
        pytest.warns(UserWarning, match="1 tasks .* no observation: 2"),
        pytest.warns(UserWarning, match="1 points .* no observation: 5"),
    ):
        read(model, X, missing)
