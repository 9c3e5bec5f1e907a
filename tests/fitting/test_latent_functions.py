# SPDX-License-Identifier: Apache-2.0
"""Latent functions in models: how they are read, what a fit of them finds."""

from contextlib import nullcontext

import numpy as np
import pytest
from tinygp import kernels

import jax
from jax import nn, random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

import numpyro_spikeslab as nss
from numpyro_spikeslab.primitives import FUNCTIONS_MARK
from numpyro_spikeslab.reading.form import COLUMNS, FUNCTIONS
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
N, Q = 24, 4
X = np.linspace(0, 3, N)
SMOOTH = kernels.ExpSquared(1.0)


def observations():
    rng = np.random.default_rng(0)
    f = np.stack([np.sin(2 * X), np.cos(3 * X + 1)], 1) @ rng.normal(size=(2, Q))
    Y = f + 0.1 * rng.normal(size=(N, Q))
    Y[3:8, 1] = np.nan
    return Y


Y = observations()
FULL = np.where(np.isnan(Y), 0.0, Y)


def read(model, *args, **kwargs):
    return Reader(model, "test")(args, kwargs)


def cavi(model, **options):
    return nss.CAVI(model, nss.PairedGuide(model), num_restarts=1, **options)


# Reading


@pytest.mark.slow
def test_missing_entries_by_mask_or_nan():
    model = nss.models.mtmkl([SMOOTH] * 2)
    full = np.where(np.isnan(Y), 7.0, Y)
    found = read(model, X, full, mask=~np.isnan(Y)).base
    expected = read(model, X, Y).base
    np.testing.assert_array_equal(found.Y, expected.Y)
    np.testing.assert_array_equal(found.relative, expected.relative)
    np.testing.assert_array_equal(np.asarray(found.relative) > 0, ~np.isnan(Y))
    with pytest.raises(ValueError, match="mask: got"):
        handlers.seed(model, KEY)(X, Y, mask=np.ones(3, bool))


def test_one_task_may_be_a_vector():
    reading = read(nss.models.mtmkl([SMOOTH] * 2), X, Y[:, 0])
    assert reading.form.kind == FUNCTIONS and reading.form.shape == (1, 2)
    np.testing.assert_array_equal(reading.base.Y, Y[:, :1])


@pytest.mark.parametrize(
    ("kernel", "names"),
    [
        (["white"] * 2, ()),
        ([1.5 * SMOOTH] * 2, ("phi_kernel1_value", "phi_kernel2_scale")),
        (
            [SMOOTH, kernels.RationalQuadratic(alpha=1.0)],
            ("phi_0_scale", "phi_1_scale", "phi_1_alpha"),
        ),
        ([SMOOTH, "white", "zero"], ("phi_0_scale",)),
        ([np.eye(N), np.ones((N, N))], ()),
        ([kernels.quasisep.Matern32(1.0)] * 2, ("phi_scale", "phi_sigma")),
    ],
    ids=["white", "product", "different", "mixed", "matrices", "state space"],
)
def test_kernels_and_their_sites(kernel, names):
    with handlers.seed(rng_seed=0):
        trace = handlers.trace(nss.models.mtmkl(kernel)).get_trace(X, Y)
    functions = trace["phi"]["infer"][FUNCTIONS_MARK]
    parameters = functions.parameters
    assert set(parameters.sites) == set(names) <= set(trace)

    shape = (len(kernel),) if parameters.are_shared else ()
    keys = random.split(KEY, len(names))
    sites = {
        name: jnp.exp(random.normal(key, shape)) for key, name in zip(keys, names, strict=True)
    }
    back = parameters.scatter(parameters.gather(sites))
    assert set(back) == set(names)
    for name in names:
        np.testing.assert_allclose(back[name], sites[name])


def test_zero_functions_make_a_linear_model():
    model = nss.models.mtmkl(["zero"] * 2, mean=np.stack([X, X**2]))
    svi = cavi(model)
    state = svi.init(KEY, X, FULL)
    assert not svi.guide.sites.functions and read(model, X, FULL).functions is None
    assert set(svi.get_params(state)) >= {"W_auto_probs"}


# Models that do not fit, and mistakes


def test_functions_that_are_not_mixed_linearly_are_refused():
    def model(X, Y):
        phi = nss.latent_functions("phi", [SMOOTH] * 2, X)
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 2, dim=-1):
            W = nss.spike_slab("W", 0.5)
        numpyro.sample("Y", dist.Normal((W @ phi**2).T, 0.1), obs=Y)

    # a sampler takes the functions for one more site
    assert read(model, X, FULL).form.kind == COLUMNS
    svi = cavi(model)
    for use in (svi.init, lambda *args: svi.run(args[0], 3, *args[1:], progress_bar=False)):
        with pytest.raises(ValueError, match="expected `offset \\+ W @ phi`"):
            use(KEY, X, FULL)
    with pytest.raises(ValueError, match="Use PairedGuide"):
        nss.MeanFieldGuide(nss.models.mtmkl([SMOOTH]))(X, Y)


def more_of_functions(place):
    """A model in which more than the location depends on the functions, or their prior is not one
    that they alone have."""

    def model(X, Y):
        around = {"scaled": handlers.scale(scale=5.0), "masked": handlers.mask(mask=False)}
        with around.get(place, nullcontext()):
            phi = nss.latent_functions("phi", [SMOOTH] * 2, X)
        size = jnp.mean(phi**2)
        pi = nn.sigmoid(size) if place == "inclusion" else 0.5
        slab = jnp.exp(size) if place == "slab" else 1.0
        noise = numpyro.sample("noise", dist.LogNormal(size if place == "noise" else 0.0, 1.0))
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 2, dim=-1):
            W = nss.spike_slab("W", pi, slab)
        numpyro.sample("Y", dist.Normal((W @ phi).T, noise), obs=Y)
        if place == "factor":
            numpyro.factor("more", -jnp.sum((phi - 3.0) ** 2))
        if place == "observed":
            numpyro.sample("more", dist.Poisson(jnp.exp(phi[0])), obs=jnp.ones(N, int))
        if place == "latent":
            numpyro.sample("more", dist.Normal(size, 1.0))

    return model


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("factor", r"\['more'\] depend on the latent functions 'phi'"),
        ("observed", r"\['more'\] depend on"),
        ("latent", r"\['more'\] depend on"),
        ("noise", r"\['noise'\] depend on"),
        ("inclusion", r"\['W'\] depend on"),
        ("slab", r"\['W'\] depend on"),
        ("scaled", "neither masked nor scaled"),
        ("masked", "neither masked nor scaled"),
    ],
)
def test_functions_that_do_more_than_mix_are_refused(place, message):
    """Their factor would be what the tasks say of them, and the bound without the rest."""
    model = more_of_functions(place)
    for user in (cavi(model), nss.LatentGibbs(model)):
        args = (X, FULL) if isinstance(user, nss.CAVI) else (0, None, (X, FULL), {})
        with pytest.raises(ValueError, match=message):
            user.init(KEY, *args)


@pytest.mark.parametrize(
    "around",
    [
        lambda model: handlers.do(model, {"phi_scale": jnp.array([3.0, 3.0])}),
        lambda model: handlers.block(model, hide=["phi_scale"]),
    ],
    ids=["do", "block"],
)
def test_kernel_parameters_that_a_handler_cuts_off_are_refused(around):
    model = around(nss.models.mtmkl([SMOOTH] * 2))
    with pytest.raises(ValueError, match=r"\['phi_scale'\] of 'phi' are hidden or set.*condition"):
        cavi(model).init(KEY, X, FULL)


def test_functions_whose_prior_depends_on_other_sites_are_refused():
    def model(X, Y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        phi = nss.latent_functions("phi", [SMOOTH] * 2, X, lambda X: scale * X)
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 2, dim=-1):
            W = nss.spike_slab("W", 0.5)
        numpyro.sample("Y", dist.Normal((W @ phi).T, 0.1), obs=Y)

    guide = nss.PairedGuide(model)
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceGraph_ELBO())
    params = svi.get_params(svi.init(KEY, X, FULL))
    values = {"scale": 1.0}
    for use in (
        lambda: cavi(model).init(KEY, X, FULL),
        lambda: guide.predict(params, X, FULL),
        lambda: guide.posterior_mean(params, X, FULL),
        lambda: nss.LatentGibbs(model).init(KEY, 0, None, (X, FULL), {GIBBS_SITES_KWARG: values}),
    ):
        with pytest.raises(ValueError, match=r"depends on \['scale'\]"):
            use()


MISTAKES = {
    "no functions": (lambda: nss.models.mtmkl([]), "at least one"),
    "number": (lambda: nss.models.mtmkl(SMOOTH), "num_functions"),
    "no tasks": (lambda: handlers.seed(nss.models.mtmkl([SMOOTH]), KEY)(X), "num_tasks"),
    "rows": (lambda: handlers.seed(nss.models.mtmkl([SMOOTH]), KEY)(X, Y[:5]), "shape"),
    "X_new": (
        lambda: handlers.seed(nss.models.mtmkl([SMOOTH]), KEY)(X, Y, np.ones((3, 2))),
        "same width",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_mtmkl_have_errors(name):
    call, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        call()


# Fits


@pytest.mark.slow
def test_plain_updates_and_going_on_from_a_state():
    svi = nss.CAVI(model := nss.models.mtmkl([SMOOTH] * 3), nss.PairedGuide(model), plain=True)
    first = svi.run(KEY, 5, X, Y, progress_bar=False)
    more = svi.run(KEY, 3, X, Y, progress_bar=False, init_state=first.state)
    assert more.losses[-1] < more.losses[0] < first.losses[-1]
    assert int(more.state.optim_state[0]) == 8
    # no moves however long the run
    long = svi.run(KEY, 40, X, Y, progress_bar=False)
    np.testing.assert_array_equal(long.losses[:8], np.concatenate([first.losses, more.losses]))


@pytest.mark.slow
def test_noise_that_varies_is_unknown_at_new_inputs():
    def model(X, Y):
        phi = nss.latent_functions("phi", [SMOOTH], X)
        with numpyro.plate("task", Q, dim=-2), numpyro.plate("latent", 1, dim=-1):
            W = nss.spike_slab("W", 0.5)
        numpyro.sample("Y", dist.Normal((W @ phi).T, jnp.linspace(0.1, 0.3, N)[:, None]), obs=Y)

    svi = cavi(model)
    params = svi.run(KEY, 3, X, FULL, progress_bar=False).params
    assert np.all(np.isfinite(svi.guide.predict(params, X, FULL, X_new=X[:3] + 0.1)))
    with pytest.raises(ValueError, match="noise changes along tasks"):
        svi.guide.predict(params, X, FULL, X_new=X[:3] + 0.1, noise=True)


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


@pytest.mark.exhaustive
def test_long_series_need_no_matrices():
    """A state-space kernel at more inputs than a matrix could hold."""
    size = 20_000
    x = np.asarray(random.permutation(KEY, np.linspace(0, 2000, size)))
    rng = np.random.default_rng(0)
    f = np.sin(0.5 * x)
    series = np.outer(f, [1.0, -2.0, 0.0]) + 0.3 * rng.normal(size=(size, 3))
    svi = cavi(nss.models.mtmkl(kernels.quasisep.Matern52(3.0), 2))
    result = svi.run(KEY, 6, x, series, progress_bar=False)
    assert np.max(np.diff(result.losses)) < 1e-6
    truth = np.outer(f, [1.0, -2.0, 0.0])
    error = np.asarray(svi.guide.predict(result.params, x, series)[0]) - truth
    assert np.sqrt(np.mean(error**2)) < 0.1
    drawn = svi.guide.sample_posterior(KEY, result.params, x, series)
    assert np.std(drawn["f"] - truth) < 0.15


@pytest.mark.slow
def test_nearly_singular_covariances_give_no_nan():
    """Repeated inputs, and a length scale beyond all distances."""
    repeated = np.repeat(X[::2], 2)
    svi = cavi(nss.models.mtmkl([kernels.ExpSquared(1e4), np.ones((N, N)), kernels.Constant(1.0)]))
    result = svi.run(KEY, 15, repeated, Y, progress_bar=False)
    assert np.all(np.isfinite(result.losses))
    assert all(np.all(np.isfinite(x)) for x in result.params.values())
    with pytest.raises(ValueError, match="says nothing about new inputs"):
        svi.guide.predict(result.params, repeated, Y, X_new=X)


def test_parameters_of_other_data_are_refused():
    model = nss.models.mtmkl([SMOOTH] * 2)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, plain=True)
    params = svi.get_params(svi.init(KEY, X, FULL))
    for data, name in (((X, FULL[:, 1:]), "W_auto_probs"), ((X[1:], FULL[1:]), "phi_auto_prec")):
        for use in (guide.predict, guide.posterior_mean):
            with pytest.raises(ValueError, match=rf"'{name}.*parameters of a fit of this model"):
                use(params, *data)


# A model under a scope


@pytest.mark.exhaustive
def test_functions_may_be_in_a_scope():
    model = nss.models.mtmkl([SMOOTH, 2.0 * kernels.Matern32(1.0)])
    found = []
    for prefix, use in (("", model), ("a/", handlers.scope(model, prefix="a"))):
        guide = nss.PairedGuide(use)
        svi = nss.CAVI(use, guide, plain=True)
        result = svi.run(KEY, 3, X, FULL, progress_bar=False)
        state = nss.mtmkl_kernel(use).init(KEY, 1, None, (X, FULL), {})
        found.append(
            (
                guide.predict(result.params, X, FULL, X_new=X + 1.0),
                {name.removeprefix(prefix): x for name, x in result.params.items()},
                {name.removeprefix(prefix): x for name, x in state.z.items()},
            )
        )
    jax.tree.map(np.testing.assert_array_equal, *found)
