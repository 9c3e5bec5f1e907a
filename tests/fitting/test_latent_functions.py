# SPDX-License-Identifier: Apache-2.0
"""Latent functions in models: how they are read, what a fit of them finds."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
from tinygp import kernels
import truth
from truth.function_models import MODELS, first_params
from truth.task_problems import observations

import jax
from jax import nn, random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer.gibbs import GIBBS_SITES_KWARG

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.reader import Reader

pytestmark = pytest.mark.usefixtures("x64")

KEY = random.key(0)
N, Q = 24, 4
X, Y = observations(N, Q)
FULL = np.nan_to_num(Y)
SMOOTH = kernels.ExpSquared(1.0)


def cavi(model, **options):
    return nss.CAVI(model, nss.PairedGuide(model), num_restarts=1, **options)


def mixing(place):
    """A model in which functions do more than mix linearly, or their prior is not theirs alone."""

    def model(X, Y):
        around = {"scaled": handlers.scale(scale=5.0), "masked": handlers.mask(mask=False)}
        unit = numpyro.sample("unit", dist.HalfNormal(1.0)) if place == "inputs" else 1.0
        with around.get(place, nullcontext()):
            phi = nss.latent_functions("phi", [SMOOTH] * 2, X, lambda X: unit * X)
        size = jnp.mean(phi**2)
        pi = nn.sigmoid(size) if place == "inclusion" else 0.5
        slab = jnp.exp(size) if place == "slab" else 1.0
        noise = numpyro.sample("noise", dist.LogNormal(size if place == "noise" else 0.0, 1.0))
        W = truth.task_weights(Q, 2, pi, slab)
        mixed = W @ phi**2 if place == "square" else W @ phi
        numpyro.sample("Y", dist.Normal(mixed.T, noise), obs=Y)
        if place == "factor":
            numpyro.factor("new", -jnp.sum((phi - 3.0) ** 2))
        if place == "observed":
            numpyro.sample("new", dist.Poisson(jnp.exp(phi[0])), obs=jnp.ones(N, int))
        if place == "latent":
            numpyro.sample("new", dist.Normal(size, 1.0))

    return model


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("factor", r"functions 'phi': got \['new'\], which depend on them"),
        ("observed", r"\['new'\], which depend on"),
        ("latent", r"\['new'\], which depend on"),
        ("noise", r"\['noise'\], which depend on"),
        ("inclusion", r"\['W'\], which depend on"),
        ("slab", r"\['W'\], which depend on"),
        ("scaled", "neither masked nor scaled"),
        ("masked", "neither masked nor scaled"),
        ("inputs", r"depends on \['unit'\]"),
    ],
)
def test_functions_that_do_more_than_mix_are_refused(place, message):
    """Their factor would be what the tasks say of them, and the bound without the rest."""
    model, values = mixing(place), {GIBBS_SITES_KWARG: {"unit": 1.0}}
    uses = [
        lambda: cavi(model).init(KEY, X, FULL),
        lambda: nss.LatentGibbs(model).init(KEY, 0, None, (X, FULL), values),
    ]
    if place == "inputs":
        guide = nss.PairedGuide(model)
        params = first_params(guide, X, FULL)
        uses += [lambda f=f: f(params, X, FULL) for f in (guide.predict, guide.posterior_mean)]
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()


def test_functions_that_are_not_mixed_linearly_are_refused():
    model = mixing("square")
    # a sampler takes the functions like any other site
    assert Reader(model, "test")((X, FULL), {}).form.is_design
    with pytest.raises(ValueError, match="expected `offset \\+ W @ phi`"):
        cavi(model).init(KEY, X, FULL)


def test_kernel_parameters_that_are_set_or_hidden_are_refused():
    model = nss.models.mtmkl([SMOOTH] * 2)
    message = r"\['phi_scale'\] of 'phi': got sites that are hidden or set.*condition"
    for other in (
        handlers.do(model, {"phi_scale": jnp.array([3.0, 3.0])}),
        handlers.block(model, hide=["phi_scale"]),
    ):
        with pytest.raises(ValueError, match=message):
            cavi(other).init(KEY, X, FULL)


def test_plain_updates_make_no_moves_however_long_the_run():
    svi = cavi(nss.models.mtmkl([SMOOTH] * 3), plain=True)
    short, long = (svi.run(KEY, size, X, Y, progress_bar=False).losses for size in (8, 40))
    assert np.all(np.diff(long) < 0.0)
    np.testing.assert_array_equal(long[:8], short)


def test_noise_that_varies_is_unknown_at_new_inputs():
    model, args, _ = MODELS["noise that varies along tasks"]()
    guide = nss.PairedGuide(model)
    predict = partial(guide.predict, first_params(guide, *args), *args, X_new=X[:3] + 0.1)
    assert np.all(np.isfinite(predict()))
    with pytest.raises(ValueError, match="noise changes along tasks"):
        predict(noise=True)


def test_functions_without_variance_are_features():
    """Zero covariances give the sparse regression on the means, to the last digit."""
    features, y = np.random.default_rng(0).normal(size=(2, N)), FULL[:, 0]

    def regression(X, mean, y):
        with numpyro.plate("feature", 2):
            phi = nss.latent_functions("phi", "zero", X, mean) if mean is not None else features
            w = nss.spike_slab("w", 0.3)
        truth.respond(y, w @ phi, 0.5)

    fits = []
    for mean in (features, None):
        svi = nss.CAVI(regression, nss.PairedGuide(regression))
        fits.append(svi.run(KEY, 120, X, mean, y, progress_bar=False).params)
    jax.tree.map(np.testing.assert_array_equal, *fits)


@pytest.mark.exhaustive
def test_long_series_need_no_matrices():
    """A state-space kernel at more inputs than a matrix could hold."""
    size = 20_000
    x = np.asarray(random.permutation(KEY, np.linspace(0, 2000, size)))
    rng = np.random.default_rng(0)
    f = np.sin(0.5 * x)
    series = np.outer(f, [1.0, -2.0, 0.0]) + 0.3 * rng.normal(size=(size, 3))
    svi = cavi(nss.models.mtmkl([kernels.quasisep.Matern52(3.0)] * 2))
    result = svi.run(KEY, 6, x, series, progress_bar=False)
    assert np.max(np.diff(result.losses)) < 1e-6
    planted = np.outer(f, [1.0, -2.0, 0.0])
    error = np.asarray(svi.guide.predict(result.params, x, series)[0]) - planted
    assert np.sqrt(np.mean(error**2)) < 0.1
    drawn = svi.guide.sample_posterior(KEY, result.params, x, series)
    assert np.std(drawn["f"] - planted) < 0.15


def test_parameters_of_other_data_are_refused():
    guide = nss.PairedGuide(nss.models.mtmkl([SMOOTH] * 2))
    params = first_params(guide, X, FULL)
    for data, name in (((X, FULL[:, 1:]), "W_auto_probs"), ((X[1:], FULL[1:]), "phi_auto_prec")):
        for use in (guide.predict, guide.posterior_mean):
            with pytest.raises(ValueError, match=rf"'{name}.*parameters of a fit of this model"):
                use(params, *data)


@pytest.mark.exhaustive
def test_functions_may_be_in_a_scope():
    model = nss.models.mtmkl([SMOOTH, 2.0 * kernels.Matern32(1.0)])

    def results(model, prefix=""):
        svi = cavi(model, plain=True)
        params = svi.run(KEY, 3, X, FULL, progress_bar=False).params
        state = nss.LatentGibbs(model, accelerate=0.25).init(KEY, 1, None, (X, FULL), {})
        named = ({k.removeprefix(prefix): x for k, x in part.items()} for part in (params, state.z))
        return svi.guide.predict(params, X, FULL, X_new=X + 1.0), *named

    scoped = results(handlers.scope(model, prefix="a"), "a/")
    jax.tree.map(np.testing.assert_array_equal, results(model), scoped)
