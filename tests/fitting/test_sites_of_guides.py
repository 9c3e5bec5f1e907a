# SPDX-License-Identifier: Apache-2.0
"""The sites of a guide: those of its first call, without those that are to be predicted."""

from functools import partial

import numpy as np
import pytest
import truth
from truth.function_models import first_params

from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import Predictive, TraceGraph_ELBO

import numpyro_spikeslab as nss

pytestmark = pytest.mark.usefixtures("x64")
KEY = random.key(0)
N, P = 30, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P)) + RNG.normal(size=(N, 1))
Y = X @ [1.0, 0.0, 0.3, 0.0] + 0.5 * RNG.normal(size=N)


def of_sites(X, y=None, level=None, sigma=None):
    """Sites that arguments add, give another shape, or give their values."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0), obs=sigma)
    shift = 0.0
    if level is not None:
        with numpyro.plate("level", int(level.max()) + 1):
            shift = numpyro.sample("alpha", dist.Normal(0.0, 2.0))[level]
    truth.respond(y, shift + X @ truth.weights(X.shape[1]), sigma)


LEVELS = np.arange(N) % 3
OTHER_PROGRAMS = {
    "a new site": ((X, Y), {"level": LEVELS}, "site 'alpha' is of shape .3,., .* not there"),
    "another shape": ((X, Y), {"level": LEVELS % 2}, "site 'alpha' is of shape .2,., .* .3,."),
    "a missing site": ((X, Y), {"sigma": 0.5}, "site 'sigma' is not there"),
    "other weights": ((X[:, :3], Y), {}, "site 'w_slab' is of shape .3,., .*of shape .4,."),
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_another_program_is_refused(name):
    args, kwargs, message = OTHER_PROGRAMS[name]
    guide = nss.PairedGuide(of_sites)
    params = first_params(guide, X, Y, **({"level": LEVELS} if name == "another shape" else {}))
    for use in (
        partial(nss.CAVI(of_sites, guide).init, KEY),
        partial(TraceGraph_ELBO().loss, KEY, params, of_sites, guide),
        partial(guide.sample_posterior, KEY, params),
    ):
        with pytest.raises(ValueError, match=message + ".*made for one program"):
            use(*args, **kwargs)


def ahead(X, y=None, X_new=None):
    """With responses to new inputs, and the mean of these."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    w = truth.weights(P)
    if X_new is not None:
        level = numpyro.sample("level", dist.Normal(jnp.mean(X_new @ w), 0.1))
        with numpyro.plate("new", X_new.shape[0]):
            numpyro.sample("y_new", dist.Normal(level + X_new @ w, sigma))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    truth.respond(y, X @ w * scale, sigma)


def test_responses_to_new_inputs_are_predicted():
    """With observations and without."""
    guide = nss.PairedGuide(ahead)
    params = nss.CAVI(ahead, guide).run(KEY, 100, X, Y, progress_bar=False).params
    X_new = X[:3] + 1.0
    for y in (Y, None):
        predictive = Predictive(ahead, guide=guide, params=params, num_samples=1000)
        draws = predictive(KEY, X, y, X_new)
        assert draws.keys() == {"w", "y", "level", "y_new"}
    latent = {"w_spike", "w_slab", "sigma", "scale"}
    assert guide.sample_posterior(KEY, params, X, Y, X_new).keys() == latent | {"w"}
    assert guide.to_init_params(params, X, Y, X_new).keys() == latent
    # 4 standard errors, a false alarm in 1 of 16,000 keys
    residual = draws["y_new"] - draws["level"][:, None] - draws["w"] @ X_new.T
    sigma = params["sigma_auto_loc"]
    assert abs(residual.std() / sigma - 1) < 4 / np.sqrt(2 * residual.size)


OBSERVATIONS_OF = {
    "location": lambda z, y: numpyro.sample("b", dist.Normal(z, 1.0), obs=y),
    "value": lambda z, y: numpyro.sample("b", dist.Normal(0.0, 1.0), obs=y - z),
    "scale": lambda z, y: handlers.scale(numpyro.sample, scale=jnp.exp(z))(
        "b", dist.Normal(0.0, 1.0), obs=y
    ),
    "factor": lambda z, y: numpyro.factor("b", -(z**2)),
    "mask": lambda z, y: numpyro.sample("z_b", dist.Normal(z, 1.0), obs=y, obs_mask=y > 0.0),
}


@pytest.mark.parametrize("kind", OBSERVATIONS_OF)
def test_what_observations_depend_on_stays_latent(kind):
    def model(X, y):
        w = truth.weights(P)
        z = numpyro.sample("z", dist.Normal(jnp.sum(w), 1.0))
        numpyro.sample("ahead", dist.Normal(z, 1.0))
        truth.respond(y, X @ w, 0.5)
        with numpyro.plate("obs", X.shape[0]):
            OBSERVATIONS_OF[kind](z, y)

    unobserved = {"z_b_unobserved"} if kind == "mask" else set()
    sites = handlers.seed(nss.PairedGuide(model), 0)(X, Y)
    assert sites.keys() == {"w_spike", "w_slab", "z"} | unobserved


def test_a_model_may_hold_its_data_and_be_a_method():
    class Study:
        def model(self):
            ahead(X, Y)

    study = Study()
    svi = nss.CAVI(study.model, nss.PairedGuide(study.model))
    params = svi.get_params(svi.init(KEY))
    assert svi.guide.to_init_params(params).keys() == {"w_spike", "w_slab", "sigma", "scale"}
    assert svi.guide.sample_posterior(KEY, params)["w"].shape == (P,)


def test_latent_sites_below_the_weights_are_predicted_with_their_posterior():
    def model(X, y=None):
        w = truth.weights(P)
        with numpyro.plate("obs", X.shape[0]):
            z = numpyro.sample("z", dist.Normal(X @ w, 1.0))
            numpyro.sample("a", dist.Normal(z, 0.01), obs=y)
        if y is None:
            numpyro.deterministic("mean_z", jnp.mean(z))

    guide = nss.PairedGuide(model)
    params = first_params(guide, X, Y) | {"z_auto_loc": jnp.asarray(Y)}
    draws = Predictive(model, guide=guide, params=params, num_samples=20)(KEY, X)
    np.testing.assert_allclose(draws["a"], np.broadcast_to(Y, (20, N)), atol=0.06)
    assert "mean_z" in guide.sample_posterior(KEY, params, X)
    # a guide whose first call had no observations predicts both
    new = Predictive(model, guide=nss.PairedGuide(model), params=params, num_samples=20)
    assert new(KEY, X).keys() >= {"z", "a"}
