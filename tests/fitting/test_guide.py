# SPDX-License-Identifier: Apache-2.0
"""The guides keep the contract of NumPyro's autoguides, and their summaries are true."""

from functools import lru_cache, partial
import logging
import pickle
import re
from typing import Any, NamedTuple

import arviz_base
import numpy as np
import optax
import pytest
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO, init_to_value
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoIAFNormal,
    AutoNormal,
)

import numpyro_spikeslab as nss

# one precision throughout, for the fits are shared
pytestmark = pytest.mark.usefixtures("x64")
KEY = random.key(0)
N, P, Q = 30, 4, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P)) + RNG.normal(size=(N, 1))
Y = X @ [1.0, 0.0, 0.3, 0.0] + 0.5 * RNG.normal(size=N)
NUM_DRAWS = 20_000


def plain(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3, 1.5)
    signal = numpyro.deterministic("signal", X @ w)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(signal, 0.5), obs=y)


def hyper(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", inclusion, scale)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def tasks(X, Y=None):
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
        W = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate("response", Q, dim=-1):
        numpyro.sample("y", dist.Normal(X @ W.T, 0.5), obs=Y)


def two_sets(X, y=None):
    with numpyro.plate("first", 1):
        a = nss.spike_slab("a", 0.3)
    with numpyro.plate("rest", X.shape[1] - 1):
        b = nss.spike_slab("b", 0.5, 2.0)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X[:, :1] @ a + X[:, 1:] @ b, 0.5), obs=y)


GUIDES = {"paired": nss.PairedGuide, "mean field": nss.MeanFieldGuide}
MODELS = {"plain": (plain, Y), "hyper": (hyper, Y), "tasks": (tasks, np.stack([Y, -Y], 1))}
EVERY_GUIDE = pytest.mark.parametrize("family", GUIDES)
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
SHAPES = {"plain": (P,), "hyper": (P,), "tasks": (Q, P)}


class Fit(NamedTuple):
    guide: Any
    svi: nss.CAVI
    result: nss.CAVIRunResult
    args: tuple

    @property
    def params(self) -> dict[str, Any]:
        return self.result.params


@lru_cache
def fitted(family: str, name: str) -> Fit:
    model, y = MODELS[name]
    guide = GUIDES[family](model)
    svi = nss.CAVI(model, guide, temperature=None)
    return Fit(guide, svi, svi.run(KEY, 50, X, y, progress_bar=False), (X, y))


@lru_cache
def drawn(family: str, name: str) -> dict[str, np.ndarray]:
    fit = fitted(family, name)
    draws = fit.guide.sample_posterior(KEY, fit.params, *fit.args, sample_shape=(NUM_DRAWS,))
    return {name: np.asarray(x) for name, x in draws.items()}


class Marginal(NamedTuple):
    """A weight's distribution: its inclusion probability, and its slab given inclusion."""

    probs: np.ndarray
    loc: np.ndarray
    variance: np.ndarray

    @property
    def moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``<w>``, ``<w^2>`` and ``<w^4>``."""
        probs, loc, variance = self
        fourth = loc**4 + 6 * loc**2 * variance + 3 * variance**2
        return probs * loc, probs * (loc**2 + variance), probs * fourth


def marginal(family: str, name: str) -> Marginal:
    params = {key: np.asarray(x) for key, x in fitted(family, name).params.items()}
    if family == "paired":
        return Marginal(
            *(params[f"w_auto_{x}"] for x in ("probs", "loc")), params["w_auto_scale"] ** 2
        )
    variance = np.sum(params["w_slab_auto_scale_tril"] ** 2, axis=1)
    parts = params["w_spike_auto_probs"], params["w_slab_auto_loc"], variance
    return Marginal(*(part.reshape(SHAPES[name]) for part in parts))


def assert_mean(draws: np.ndarray, mean: Any, second_moment: Any) -> None:
    """At most six standard errors: a false alarm in one of 10^8 comparisons."""
    error = 6 * np.sqrt(second_moment / len(draws))
    np.testing.assert_array_less(np.abs(draws.mean(axis=0) - mean), error + 1e-12)


def called(guide, *args, **kwargs):
    """The guide after its first call."""
    handlers.seed(guide, 0)(*args, **kwargs)
    return guide


# Sites and parameters


@pytest.mark.slow
@EVERY_GUIDE
@EVERY_MODEL
def test_parameters_have_their_names_and_shapes(family, name):
    shape, size = SHAPES[name], int(np.prod(SHAPES[name]))
    if family == "paired":
        expected = {f"w_auto_{part}": shape for part in ("probs", "loc", "scale")}
    else:
        expected = {"w_spike_auto_probs": shape, "w_slab_auto_loc": (size,)}
        expected["w_slab_auto_scale_tril"] = (size, size)
    if name == "hyper":
        expected |= {f"{site}_auto_loc": () for site in ("sigma", "inclusion", "scale")}
    assert {name: x.shape for name, x in fitted(family, name).params.items()} == expected


@EVERY_GUIDE
@EVERY_MODEL
def test_a_guide_samples_the_latent_sites_of_its_model(family, name):
    fit = fitted(family, name)
    guide = handlers.substitute(handlers.seed(fit.guide, 0), fit.params)
    trace = handlers.trace(guide).get_trace(*fit.args)
    latent = {
        site
        for site, value in trace.items()
        if value["type"] == "sample" and not value["infer"].get("is_auxiliary")
    }
    hypers = {"sigma", "inclusion", "scale"} if name == "hyper" else set()
    assert latent == {"w_spike", "w_slab"} | hypers
    assert set(guide(*fit.args)) == latent


@EVERY_GUIDE
def test_a_guide_is_an_autoguide_with_a_prefix(family):
    guide = GUIDES[family](hyper, prefix="q")
    assert isinstance(guide, AutoGuide)
    svi = nss.CAVI(hyper, guide)
    params = svi.get_params(svi.init(KEY, X, Y))
    assert all("_q_" in name for name in params) and "sigma_q_loc" in params
    assert guide.posterior_mean(params)["w"].shape == (P,)


def test_several_pairs():
    guide = nss.PairedGuide(two_sets)
    svi = nss.CAVI(two_sets, guide)
    params = svi.get_params(svi.init(KEY, X, Y))
    assert {name: x.shape for name, x in guide.posterior_mean(params).items()} == {
        "a": (1,),
        "b": (P - 1,),
    }
    draws = guide.sample_posterior(KEY, params, X, Y, sample_shape=(3,))
    np.testing.assert_array_equal(draws["a"], draws["a_spike"] * draws["a_slab"])
    assert draws["b"].shape == (3, P - 1)


# A guide is made for one program


def of_sites(X, y=None, level=None, sigma=None):
    """Sites that arguments add, give another shape, or give their values."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0), obs=sigma)
    shift = 0.0
    if level is not None:
        with numpyro.plate("level", int(level.max()) + 1):
            shift = numpyro.sample("alpha", dist.Normal(0.0, 2.0))[level]
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(shift + X @ w, sigma), obs=y)


LEVELS = np.arange(N) % 3
OTHER_PROGRAMS = {
    "a site more": ((X, Y), {"level": LEVELS}, "site 'alpha' is of shape .3,., .* not there"),
    "another shape": ((X, Y), {"level": LEVELS % 2}, "site 'alpha' is of shape .2,., .* .3,."),
    "a site less": ((X, Y), {"sigma": 0.5}, "site 'sigma' is not there"),
    "other weights": ((X[:, :3], Y), {}, "site 'w_slab' is of shape .3,., .*of shape .4,."),
}


@pytest.mark.parametrize("name", OTHER_PROGRAMS)
def test_another_program_is_refused(name):
    args, kwargs, message = OTHER_PROGRAMS[name]
    first = {"level": LEVELS} if name == "another shape" else {}
    guide = nss.PairedGuide(of_sites)
    svi = nss.CAVI(of_sites, guide)
    params = svi.get_params(svi.init(KEY, X, Y, **first))
    for use in (
        lambda: svi.init(KEY, *args, **kwargs),
        lambda: TraceGraph_ELBO().loss(KEY, params, of_sites, guide, *args, **kwargs),
        lambda: guide.sample_posterior(KEY, params, *args, **kwargs),
    ):
        with pytest.raises(ValueError, match=message + ".*made for one program"):
            use()


def test_parameters_of_other_weights_are_refused():
    guide = called(nss.PairedGuide(plain), X, Y)
    with pytest.raises(ValueError, match=r"'w_auto_probs' has shape \(6,\)"):
        guide.sample_posterior(KEY, {"w_auto_probs": jnp.zeros(6)}, X, Y)
    with pytest.raises(ValueError, match=r"params\['w_auto_probs'\]: got nothing"):
        guide.median({"v_auto_probs": jnp.zeros(4)})


@EVERY_GUIDE
def test_summaries_of_a_guide_that_was_never_called_are_refused(family):
    params, guide = fitted(family, "hyper").params, GUIDES[family](hyper)
    for summary in ("inclusion_probabilities", "posterior_mean", "median"):
        with pytest.raises(ValueError, match=r"never been called.*seed\(guide, 0\)\(X, y\)"):
            getattr(guide, summary)(params)


@EVERY_GUIDE
def test_a_new_guide_says_the_same_of_saved_parameters_after_one_call(family):
    """Whether it was called with observations, as for predictions, or by a summary."""
    fit = fitted(family, "hyper")
    saved = {name: np.asarray(x) for name, x in fit.params.items()}
    summaries = {
        "inclusion_probabilities": lambda guide: guide.inclusion_probabilities(saved),
        "median": lambda guide: guide.median(saved),
        "quantiles": lambda guide: guide.quantiles(saved, [0.1, 0.9]),
        "draws": lambda guide: guide.sample_posterior(KEY, saved, X, Y, sample_shape=(2, 3)),
        "predictions": lambda guide: Predictive(hyper, guide=guide, params=saved, num_samples=3)(
            KEY, X
        ),
    }
    by_summary = GUIDES[family](hyper)
    by_summary.posterior_mean(saved, X, Y)
    new = called(GUIDES[family](hyper), X, Y), called(GUIDES[family](hyper), X), by_summary
    for summary in summaries.values():
        for guide in new:
            jax.tree.map(np.testing.assert_array_equal, summary(guide), summary(fit.guide))


@EVERY_GUIDE
def test_another_run_leaves_what_was_said_alone(family):
    fit = fitted(family, "hyper")
    before = fit.guide.quantiles(fit.params, [0.1, 0.9])
    draws = fit.guide.sample_posterior(KEY, fit.params, X, Y, sample_shape=(2, 3))
    other = fit.svi.run(KEY, 50, X, -2.0 * Y, progress_bar=False)
    assert np.all(other.losses != fit.result.losses)
    jax.tree.map(np.testing.assert_array_equal, fit.guide.quantiles(fit.params, [0.1, 0.9]), before)
    again = fit.guide.sample_posterior(KEY, fit.params, X, Y, sample_shape=(2, 3))
    jax.tree.map(np.testing.assert_array_equal, again, draws)


def test_a_model_may_hold_its_data_and_be_a_method():
    class Study:
        def model(self):
            plain(X, Y)

    study = Study()
    svi = nss.CAVI(study.model, nss.PairedGuide(study.model))
    params = svi.get_params(svi.init(KEY))
    assert svi.guide.to_init_params(params).keys() == {"w_spike", "w_slab"}
    assert svi.guide.sample_posterior(KEY, params)["signal"].shape == (N,)


@EVERY_GUIDE
def test_a_pickled_guide_is_the_same(family):
    fit = fitted(family, "hyper")
    used = pickle.loads(pickle.dumps(fit.guide))
    new = called(pickle.loads(pickle.dumps(GUIDES[family](hyper))), X, Y)
    expected = fit.guide.sample_posterior(KEY, fit.params, X, Y, sample_shape=(3,))
    for copy in (used, new):
        draws = copy.sample_posterior(KEY, fit.params, X, Y, sample_shape=(3,))
        jax.tree.map(np.testing.assert_array_equal, draws, expected)


# Sites to be predicted


def ahead(X, y=None, X_new=None):
    """With responses to new inputs, and the mean of these."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    if X_new is not None:
        level = numpyro.sample("level", dist.Normal(jnp.mean(X_new @ w), 0.1))
        with numpyro.plate("new", X_new.shape[0]):
            numpyro.sample("y_new", dist.Normal(level + X_new @ w, sigma))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w * scale, sigma), obs=y)


def test_responses_to_new_inputs_are_predicted():
    """With observations and without."""
    guide = nss.PairedGuide(ahead)
    params = nss.CAVI(ahead, guide).run(KEY, 100, X, Y, progress_bar=False).params
    X_new = X[:3] + 1.0
    for y in (Y, None):
        predictive = Predictive(ahead, guide=guide, params=params, num_samples=1000)
        draws = predictive(KEY, X, y, X_new)
        assert draws.keys() == {"w", "y", "level", "y_new"}
    own = {"w", "w_spike", "w_slab", "sigma", "scale"}
    assert guide.sample_posterior(KEY, params, X, Y, X_new).keys() == own
    assert guide.to_init_params(params, X, Y, X_new).keys() == own - {"w"}
    # 4 standard errors, a false alarm in 1 of 16,000 keys
    residual = draws["y_new"] - draws["level"][:, None] - draws["w"] @ X_new.T
    sigma = params["sigma_auto_loc"]
    assert abs(residual.std() / sigma - 1) < 4 / np.sqrt(2 * residual.size)


def of_latent(kind, z, y):
    """Observations of a latent site ``z`` that depends on the weights."""
    if kind == "location":
        numpyro.sample("b", dist.Normal(z, 1.0), obs=y)
    elif kind == "value":
        numpyro.sample("b", dist.Normal(0.0, 1.0), obs=y - z)
    elif kind == "scale":
        with handlers.scale(scale=jnp.exp(z)):
            numpyro.sample("b", dist.Normal(0.0, 1.0), obs=y)
    elif kind == "factor":
        numpyro.factor("b", -(z**2))
    else:
        numpyro.sample("z_b", dist.Normal(z, 1.0), obs=y, obs_mask=y > 0.0)


@pytest.mark.parametrize("kind", ["location", "value", "scale", "factor", "mask"])
def test_what_observations_depend_on_stays_latent(kind):
    def model(X, y):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        z = numpyro.sample("z", dist.Normal(jnp.sum(w), 1.0))
        numpyro.sample("ahead", dist.Normal(z, 1.0))
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)
            of_latent(kind, z, y)

    guide = nss.PairedGuide(model)
    sites = handlers.trace(handlers.seed(guide, 0)).get_trace(X, Y)
    sampled = {name for name, site in sites.items() if site["type"] == "sample"}
    more = {"z_b_unobserved"} if kind == "mask" else set()
    assert sampled == {"w_spike", "w_slab", "z"} | more


@pytest.mark.slow
def test_latent_sites_below_the_weights_are_predicted_with_their_posterior():
    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            z = numpyro.sample("z", dist.Normal(X @ w, 1.0))
            numpyro.sample("a", dist.Normal(z, 0.01), obs=y)
        if y is None:
            numpyro.deterministic("mean_z", jnp.mean(z))

    guide = nss.PairedGuide(model)
    svi = SVI(model, guide, optax.adam(0.05), TraceGraph_ELBO())
    params = svi.get_params(svi.init(KEY, X, Y)) | {"z_auto_loc": jnp.asarray(Y)}
    found = Predictive(model, guide=guide, params=params, num_samples=20)(KEY, X)
    np.testing.assert_allclose(found["a"], np.broadcast_to(Y, (20, N)), atol=0.06)
    assert "mean_z" in guide.sample_posterior(KEY, params, X)
    # a guide whose first call had no observations predicts both
    new = Predictive(model, guide=nss.PairedGuide(model), params=params, num_samples=20)
    assert new(KEY, X).keys() >= {"z", "a"}


# Stock SVI, and other inner guides


@pytest.mark.slow
@EVERY_GUIDE
def test_stock_svi_climbs_towards_the_bound_of_cavi(family):
    fit = fitted(family, "hyper")
    svi = SVI(hyper, GUIDES[family](hyper), optax.adam(0.02), TraceGraph_ELBO(num_particles=10))
    result = svi.run(KEY, 2000, *fit.args, progress_bar=False)
    gaps = np.asarray(result.losses) - float(fit.result.losses[-1])
    assert set(result.params) == set(fit.params)
    assert -0.5 < gaps[-500:].mean() < 0.2 * gaps[:50].mean()


def test_params_may_be_trees_of_arrays_except_in_fits_in_closed_form():
    def model(X, y=None):
        net = numpyro.param("net", [(jnp.ones(P), jnp.zeros(())), ()])
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            loc = X @ (w + net[0][0]) + net[0][1]
            numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)

    guide = nss.PairedGuide(model)
    svi = SVI(model, guide, optax.adam(0.1), TraceGraph_ELBO())
    state, _ = svi.update(svi.init(KEY, X, Y), X, Y)
    params = svi.get_params(state)
    assert np.all(params["net"][0][0] != 1.0) and params["net"][0][1] != 0.0
    assert guide.sample_posterior(KEY, params, X, Y)["w"].shape == (P,)
    assert guide.median(params, X, Y).keys() == {"w", "w_spike", "w_slab"}
    with pytest.raises(ValueError, match="param 'net': got a list of arrays"):
        nss.CAVI(model, guide).init(KEY, X, Y)


@pytest.mark.slow
def test_summaries_with_another_inner_guide():
    guide = nss.PairedGuide(hyper, inner_guide=AutoNormal)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(X, Y)
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    draws = guide.sample_posterior(KEY, params, X, Y, sample_shape=(1000,))
    assert {name: x.shape for name, x in draws.items()} == {
        **dict.fromkeys(("w", "w_spike", "w_slab"), (1000, P)),
        **dict.fromkeys(("sigma", "inclusion", "scale"), (1000,)),
    }
    assert (draws["sigma"] > 0).all() and draws["sigma"].std() > 0
    # the prior scale of an excluded slab is that of the same draw
    excluded = np.asarray(draws["w_slab"] / draws["scale"][:, None])[draws["w_spike"] == 0]
    assert abs(excluded.std() - 1.0) < 6 / np.sqrt(2 * excluded.size)
    quantiles = jax.jit(lambda x: guide.quantiles(x, [0.25, 0.5, 0.75]))(params)
    medians = jax.jit(guide.median)(params)
    for name in ("sigma", "inclusion", "scale", "w"):
        np.testing.assert_allclose(quantiles[name][1], medians[name], rtol=1e-6)
        assert (np.diff(quantiles[name], axis=0) >= 0).all()


OTHER_VALUES = {"noise": [0.3, 0.9, 2.0], "inclusion": 0.2, "slab_scale": 0.7}
INNER_GUIDES = {guide.__name__: guide for guide in (AutoNormal, AutoDiagonalNormal)}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("inner", "kernel"), [("AutoNormal", "ExpSquared"), ("AutoDiagonalNormal", "white")]
)
def test_the_values_of_another_inner_guide_are_its_medians(inner, kernel):
    """Its parameters are those of unconstrained values, so that of a small scale is negative."""
    rng = np.random.default_rng(0)
    inputs, Y = np.linspace(0.0, 5.0, 12), rng.normal(size=(12, 3))
    known = {name: jnp.array(x) for name, x in OTHER_VALUES.items()}
    if kernel == "white":
        model, args = nss.models.factor_analysis(2), (Y,)
    else:
        model, args = nss.models.mtmkl([kernels.ExpSquared(1.0)] * 2), (inputs, Y)
        known["phi_scale"] = jnp.array([0.4, 1.6])
    delta = nss.PairedGuide(model)
    trace = handlers.trace(handlers.seed(delta, 0)).get_trace(*args)
    params = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    params |= {f"{name}_auto_loc": x for name, x in known.items()}

    start = partial(INNER_GUIDES[inner], init_loc_fn=init_to_value(values=known))
    guide = nss.PairedGuide(model, inner_guide=start)
    trace = handlers.trace(handlers.seed(guide, 0)).get_trace(*args)
    others = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    others |= {name: x for name, x in params.items() if name.startswith(("W_", "phi_auto"))}

    def summaries(guide, params):
        new = {"Y_new": Y[:4]} if kernel == "white" else {"X_new": inputs[:4] + 0.1}
        return [
            (guide.transform if kernel == "white" else guide.predict)(params, *args, **new),
            *(f(params, *args) for f in (guide.posterior_mean, guide.median, guide.to_init_params)),
        ]

    leaves = map(jax.tree.leaves, (summaries(guide, others), summaries(delta, params)))
    for x, y in zip(*leaves, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-12)
    middle = guide.quantiles(others, [0.2, 0.5], *args)["noise"]
    np.testing.assert_allclose(middle[1], known["noise"])
    assert np.all(middle[0] < middle[1])


def test_an_inner_guide_starts_where_its_init_loc_fn_says():
    start = init_to_value(values={"sigma": 0.7})
    guide = nss.PairedGuide(hyper, inner_guide=partial(AutoDelta, init_loc_fn=start))
    params = nss.CAVI(hyper, guide).init(KEY, X, Y)
    assert guide.median(nss.CAVI(hyper, guide).get_params(params))["sigma"] == 0.7


# Draws


@EVERY_GUIDE
@pytest.mark.parametrize(
    ("name", "sample_shape"),
    [("plain", ()), ("plain", (2, 3)), ("hyper", (2, 3)), ("tasks", (5,))],
)
def test_posterior_draws_have_their_shapes_and_all_sites(family, name, sample_shape):
    fit = fitted(family, name)
    draws = fit.guide.sample_posterior(KEY, fit.params, *fit.args, sample_shape=sample_shape)
    shapes = dict.fromkeys(("w", "w_spike", "w_slab"), SHAPES[name])
    if name == "plain":
        shapes["signal"] = (N,)
        np.testing.assert_allclose(draws["signal"], draws["w"] @ X.T, atol=1e-12)
    if name == "hyper":
        shapes |= dict.fromkeys(("sigma", "inclusion", "scale"), ())
    assert {site: x.shape for site, x in draws.items()} == {
        site: sample_shape + shape for site, shape in shapes.items()
    }
    np.testing.assert_array_equal(draws["w"], draws["w_spike"] * draws["w_slab"])


def test_draws_are_one_program_for_every_key_and_all_data_of_the_same_shapes(caplog):
    fit = fitted("paired", "plain")
    for key, y, expected in ((KEY, Y, ["_run"]), (random.key(1), 2 * Y, [])):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            fit.guide.sample_posterior(key, fit.params, X, y, sample_shape=(4, 7))
        names = re.findall(r"Compiling jit\((.*?)\)", "\n".join(caplog.messages))
        assert [name for name in names if name != "stage"] == expected


@EVERY_GUIDE
@EVERY_MODEL
def test_moments_of_draws_are_the_summaries(family, name):
    fit, draws, expected = fitted(family, name), drawn(family, name), marginal(family, name)
    first, second, fourth = expected.moments
    np.testing.assert_allclose(fit.guide.posterior_mean(fit.params)["w"], first, atol=1e-15)
    probs = fit.guide.inclusion_probabilities(fit.params)["w"]
    np.testing.assert_array_equal(probs, expected.probs)
    assert_mean(draws["w"], first, second)
    assert_mean(draws["w"] ** 2, second, fourth)
    assert_mean(draws["w_spike"], expected.probs, expected.probs)


@pytest.mark.parametrize("name", MODELS)
def test_an_excluded_slab_has_its_prior_in_the_paired_family(name):
    fit = fitted("paired", name)
    draws = drawn("paired", name)
    scale = {"plain": 1.5, "hyper": fit.params.get("scale_auto_loc"), "tasks": 1.0}[name]
    excluded = draws["w_slab"][draws["w_spike"] == 0] / scale
    assert abs(excluded.mean()) < 6 / np.sqrt(excluded.size)
    assert abs(excluded.std() - 1.0) < 6 / np.sqrt(2 * excluded.size)


def test_slabs_are_jointly_normal_in_the_mean_field_family():
    params = fitted("mean field", "plain").params
    draws = drawn("mean field", "plain")
    centred = draws["w_slab"] - params["w_slab_auto_loc"]
    white = np.linalg.solve(params["w_slab_auto_scale_tril"], centred.T)
    np.testing.assert_allclose(white @ white.T / NUM_DRAWS, np.eye(P), atol=9 / NUM_DRAWS**0.5)


@EVERY_GUIDE
def test_predictive_takes_the_guide(family):
    fit = fitted(family, "plain")
    predictive = Predictive(plain, guide=fit.guide, params=fit.params, num_samples=NUM_DRAWS)
    inputs = X[:5] + 1.0
    draws = np.asarray(predictive(KEY, inputs)["y"])
    assert draws.shape == (NUM_DRAWS, 5)
    mean = inputs @ fit.guide.posterior_mean(fit.params)["w"]
    assert_mean(draws, mean, draws.var(axis=0))
    assert (draws.std(axis=0) > 0.5 * 0.95).all()


@EVERY_GUIDE
def test_arviz_labels_the_draws(family):
    fit = fitted(family, "tasks")
    features = [f"x{i}" for i in range(P)]
    data = arviz_base.from_numpyro_svi(
        fit.svi,
        svi_result=fit.result,
        model_args=fit.args,
        coords={"feature": features},
        num_samples=500,
    )
    for name in ("w", "w_spike", "w_slab"):
        assert data["posterior"][name].dims == ("sample", "task", "feature")
    assert data["posterior"]["w"]["feature"].values.tolist() == features
    assert data["observed_data"]["y"].shape == (N, Q)
    table = nss.summary(data, "w", round_to=None)
    expected = np.ravel(fit.guide.posterior_mean(fit.params)["w"])
    np.testing.assert_allclose(table["mean"].astype(float), expected, atol=0.15)


# Medians and quantiles


@pytest.mark.slow
@EVERY_GUIDE
@EVERY_MODEL
def test_quantiles_are_those_of_the_draws(family, name):
    guide, params = fitted(family, name).guide, fitted(family, name).params
    probs = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    found = jax.jit(lambda x: guide.quantiles(x, probs))(params)
    assert found["w"].shape == found["w_spike"].shape == (5, *SHAPES[name])
    w = drawn(family, name)["w"]
    # a quantile is the value that the draws reach with its probability, at the atom and beside it
    error = 6 * np.sqrt(probs * (1 - probs) / NUM_DRAWS)
    for q, value, tolerance in zip(probs, np.asarray(found["w"]), error, strict=True):
        assert ((w < value).mean(axis=0) <= q + tolerance).all()
        assert ((w <= value).mean(axis=0) >= q - tolerance).all()
    medians, middle = guide.median(params), guide.quantiles(params, 0.5)
    assert set(medians) == set(middle) == set(found)
    for site in ("w", "w_spike", "w_slab"):
        np.testing.assert_allclose(found[site][2], medians[site], rtol=1e-12)
        np.testing.assert_array_equal(middle[site], medians[site])
    expected = marginal(family, name)
    z = np.array([-1.6448536270, -0.6744897502, 0.0, 0.6744897502, 1.6448536270])
    slab = np.multiply.outer(z, np.sqrt(expected.variance)) + expected.loc
    np.testing.assert_allclose(found["w_slab"], slab, rtol=1e-6, atol=1e-12)


def test_quantiles_inside_the_atom_are_exactly_zero():
    guide, params = fitted("paired", "plain").guide, dict(fitted("paired", "plain").params)
    params["w_auto_probs"] = jnp.array([1.0, 0.4, 0.4, 0.0])
    params["w_auto_loc"] = jnp.array([2.0, 2.0, -2.0, 2.0])
    params["w_auto_scale"] = jnp.full(4, 0.1)
    found = guide.quantiles(params, [0.1, 0.5, 0.9])
    np.testing.assert_array_equal(found["w_spike"], [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    assert (np.asarray(found["w"][1:, 3]) == 0.0).all()
    np.testing.assert_array_equal(found["w"][1], [2.0, 0.0, 0.0, 0.0])
    # 0.4 of the mass is about 2, above the atom: the quantile at 0.9 leaves a quarter of it above
    np.testing.assert_allclose(found["w"][2, 1], 2.0 + 0.1 * 0.6744897502, rtol=1e-6)
    np.testing.assert_allclose(found["w"][0, 2], -2.0 - 0.1 * 0.6744897502, rtol=1e-6)
    np.testing.assert_allclose(found["w_slab"][1], [2.0, 2.0, -2.0, 2.0])


@pytest.mark.slow
@EVERY_GUIDE
def test_point_estimates_are_their_own_quantiles(family):
    fit = fitted(family, "hyper")
    found = fit.guide.quantiles(fit.params, [0.1, 0.9])
    for name in ("sigma", "inclusion", "scale"):
        np.testing.assert_array_equal(found[name], np.full(2, fit.params[f"{name}_auto_loc"]))
        assert fit.guide.median(fit.params)[name] == fit.params[f"{name}_auto_loc"]


# What is refused


def with_shift(X, y=None):
    plain(X - numpyro.sample("shift", dist.Poisson(1.0)), y)


def first_call(model, make=nss.PairedGuide, **options):
    return lambda: called(make(model, **options), X, Y)


REFUSALS = {
    "discrete site": (
        first_call(with_shift),
        r"PairedGuide: the discrete latent sites \['shift'\].*DiscreteGibbs",
    ),
    "discrete site of a mean field": (
        first_call(with_shift, nss.MeanFieldGuide),
        r"MeanFieldGuide: the discrete latent sites \['shift'\]",
    ),
    "several pairs of a mean field": (
        first_call(two_sets, nss.MeanFieldGuide),
        r"several spike_slab sites, \['a', 'b'\].*PairedGuide",
    ),
    "functions of a mean field": (
        lambda: called(nss.MeanFieldGuide(nss.models.factor_analysis(2)), np.eye(4)),
        r"MeanFieldGuide: model: got the latent functions \['phi'\].*PairedGuide",
    ),
    "levels of quantiles": (
        lambda: fitted("paired", "plain").guide.quantiles({}, [[0.5]]),
        r"PairedGuide.quantiles: got \[\[0.5\]\], expected probabilities between 0 and 1",
    ),
    "a level above one": (
        lambda: fitted("paired", "plain").guide.quantiles({}, 1.5),
        "probabilities between 0 and 1",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_guide_does_not_take_is_refused(name):
    call, message = REFUSALS[name]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call()


def test_an_inner_guide_without_medians_is_named():
    flow = nss.PairedGuide(hyper, inner_guide=AutoIAFNormal)
    with pytest.raises(NotImplementedError, match=r"AutoIAFNormal has no `quantiles`. Use draws"):
        called(flow, X, Y).median(fitted("paired", "plain").params)
