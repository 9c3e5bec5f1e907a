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
from numpyro.distributions import constraints
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO, init_to_value
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoIAFNormal, AutoNormal

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


@EVERY_GUIDE
def test_another_discrete_site_is_refused(family):
    def model(X, y=None):
        shift = numpyro.sample("shift", dist.Poisson(1.0))
        plain(X - shift, y)

    with pytest.raises(ValueError, match=r"discrete latent sites \['shift'\].*DiscreteGibbs"):
        handlers.seed(GUIDES[family](model), 0)(X, Y)


def regression(X, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    numpyro.sample("y", dist.Normal(X @ w, 0.5).to_event(1), obs=y)


@pytest.mark.parametrize(
    ("make", "name"), [(nss.PairedGuide, "w_auto_probs"), (nss.MeanFieldGuide, "w_slab_auto_loc")]
)
def test_parameters_of_other_weights_are_refused(make, name):
    X, y = np.eye(6), np.arange(6.0)
    guide = make(regression)
    svi = nss.CAVI(regression, guide)
    params = svi.get_params(svi.init(random.key(0), X, y))
    message = rf"'{name}' has shape \(6,\).*asks for \(4,\).*as many weights"
    with pytest.raises(ValueError, match=message):
        guide.sample_posterior(random.key(0), params, X[:, :4], y)
    with pytest.raises(ValueError, match=message):
        Predictive(regression, guide=guide, params=params, num_samples=2)(random.key(0), X[:, :4])


def test_a_plate_at_two_dims_is_named():
    """NumPyro's guides take none, of whatever else is latent."""

    def model(X):
        with numpyro.plate("task", 2):
            numpyro.sample("a", dist.Normal())
        with numpyro.plate("task", 2, dim=-2), numpyro.plate("level", 3):
            numpyro.sample("b", dist.Normal())
        regression(X, np.zeros(len(X)))

    message = "AutoDelta .* plate task .* needs two names"
    with pytest.raises(ValueError, match=message):
        nss.PairedGuide(model).set_up((np.eye(3),), {})


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


def test_mean_field_of_several_pairs_is_refused():
    guide = nss.MeanFieldGuide(two_sets)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"several spike_slab sites, \['a', 'b'\].*PairedGuide"
        ):
            handlers.seed(guide, 0)(X, Y)


# Stock SVI


@pytest.mark.slow
@EVERY_GUIDE
def test_stock_svi_climbs_towards_the_bound_of_cavi(family):
    fit = fitted(family, "hyper")
    svi = SVI(hyper, GUIDES[family](hyper), optax.adam(0.02), TraceGraph_ELBO(num_particles=10))
    result = svi.run(KEY, 2000, *fit.args, progress_bar=False)
    gaps = np.asarray(result.losses) - float(fit.result.losses[-1])
    assert set(result.params) == set(fit.params)
    assert -0.5 < gaps[-500:].mean() < 0.2 * gaps[:50].mean()


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
    called = nss.PairedGuide(model, inner_guide=start)
    trace = handlers.trace(handlers.seed(called, 0)).get_trace(*args)
    others = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
    others |= {name: x for name, x in params.items() if name.startswith(("W_", "phi_auto"))}

    def summaries(guide, params):
        new = {"Y_new": Y[:4]} if kernel == "white" else {"X_new": inputs[:4] + 0.1}
        return [
            (guide.transform if kernel == "white" else guide.predict)(params, *args, **new),
            *(f(params, *args) for f in (guide.posterior_mean, guide.median, guide.to_init_params)),
        ]

    expected = summaries(delta, params)
    for guide in (called, nss.PairedGuide(model, inner_guide=start)):
        for x, y in zip(*map(jax.tree.leaves, (summaries(guide, others), expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-12)
    fresh = nss.PairedGuide(model, inner_guide=start)
    middle = fresh.quantiles(others, [0.2, 0.5], *args)["noise"]
    np.testing.assert_allclose(middle[1], known["noise"])
    assert np.all(middle[0] < middle[1])


@pytest.mark.slow
def test_an_inner_guide_that_cannot_tell_is_refused():
    guide = nss.PairedGuide(hyper, inner_guide=AutoNormal)
    for summary in (guide.median, partial(guide.quantiles, quantiles=0.5)):
        with pytest.raises(ValueError, match="has not been called needs the model's arguments"):
            summary({"sigma_auto_loc": jnp.zeros(())})
    flow = nss.PairedGuide(hyper, inner_guide=AutoIAFNormal)
    with pytest.raises(NotImplementedError, match=r"AutoIAFNormal has no `median`. Use draws"):
        flow.median({}, X, Y)


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


@pytest.mark.parametrize("levels", [[[0.5]], 1.5, [-0.1, 0.5]])
def test_levels_are_probabilities(levels):
    fit = fitted("paired", "plain")
    with pytest.raises(ValueError, match="probabilities between 0 and 1"):
        fit.guide.quantiles(fit.params, levels)


@pytest.mark.slow
@EVERY_GUIDE
def test_point_estimates_are_their_own_quantiles(family):
    fit = fitted(family, "hyper")
    found = fit.guide.quantiles(fit.params, [0.1, 0.9])
    for name in ("sigma", "inclusion", "scale"):
        np.testing.assert_array_equal(found[name], np.full(2, fit.params[f"{name}_auto_loc"]))
        assert fit.guide.median(fit.params)[name] == fit.params[f"{name}_auto_loc"]


# A guide keeps no data


@EVERY_GUIDE
def test_a_fresh_guide_says_the_same_of_saved_parameters(family):
    fit = fitted(family, "hyper")
    saved = {name: np.asarray(x) for name, x in fit.params.items()}
    expected = fit.guide.inclusion_probabilities(fit.params)["w"]

    def fresh():
        return GUIDES[family](hyper)

    np.testing.assert_array_equal(fresh().inclusion_probabilities(saved)["w"], expected)
    for summary in ("posterior_mean", "median"):
        found = getattr(fresh(), summary)(saved)
        jax.tree.map(np.testing.assert_array_equal, found, getattr(fit.guide, summary)(saved))
    found, known = (guide.quantiles(saved, [0.1, 0.9]) for guide in (fresh(), fit.guide))
    jax.tree.map(np.testing.assert_array_equal, found, known)
    expected = fit.guide.sample_posterior(KEY, saved, X, Y, sample_shape=(2, 3))
    found = fresh().sample_posterior(KEY, saved, X, Y, sample_shape=(2, 3))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    found, known = (
        Predictive(hyper, guide=guide, params=saved, num_samples=3)(KEY, X)
        for guide in (fresh(), fit.guide)
    )
    jax.tree.map(np.testing.assert_array_equal, found, known)


@pytest.mark.slow
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


def flagged(X, y=None, intercept=False, sigma=None):
    """Sites that an argument adds, or gives their values."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0), obs=sigma)
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    loc = X @ w
    if intercept:
        loc += numpyro.sample("alpha", dist.Normal(0.0, 2.0))
        numpyro.deterministic("twice", 2 * loc)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(loc, sigma), obs=y)


@pytest.mark.slow
def test_an_argument_adds_sites_and_takes_them_away():
    guide = nss.PairedGuide(flagged)
    svi = nss.CAVI(flagged, guide)
    own = {"w", "w_spike", "w_slab"}
    for more, sites in (
        ({}, own | {"sigma"}),
        ({"intercept": True}, own | {"sigma", "alpha", "twice"}),
        ({"sigma": 0.5}, own),
        ({}, own | {"sigma"}),
    ):
        result = svi.run(KEY, 100, X, Y, progress_bar=False, **more)
        fresh = nss.PairedGuide(flagged)
        known = nss.CAVI(flagged, fresh).run(KEY, 100, X, Y, progress_bar=False, **more)
        assert result.params.keys() == known.params.keys()
        np.testing.assert_array_equal(result.losses, known.losses)
        draws = guide.sample_posterior(KEY, result.params, X, Y, sample_shape=(3,), **more)
        assert draws.keys() == sites
        # where nothing tells of the weights, y is to be predicted
        ahead = partial(Predictive, flagged, params=result.params, num_samples=3)
        found, expected = (ahead(guide=x)(KEY, X, **more) for x in (guide, fresh))
        assert found["y"].shape == (3, N)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_summaries_of_other_sites_than_those_of_the_last_call():
    guide = nss.PairedGuide(flagged)
    svi = nss.CAVI(flagged, guide, num_restarts=2)
    with_alpha = svi.run(KEY, 100, X, Y, intercept=True, progress_bar=False).params
    without = svi.run(KEY, 100, X, Y, progress_bar=False).params
    own = {"w", "w_spike", "w_slab", "sigma"}
    # the last call, for the shapes of its sites, is that of the parameters or not
    for params, more, sites in (
        (with_alpha, {"intercept": True}, own | {"alpha"}),
        (without, {}, own),
        (with_alpha, {"intercept": True}, own | {"alpha"}),
    ):
        assert guide.to_init_params(params, X, Y, **more).keys() == sites - {"w"}
        for args in ((), (X, Y)):
            given = more if args else {}
            assert guide.median(params, *args, **given).keys() == sites
            assert guide.quantiles(params, 0.3, *args, **given).keys() == sites
    with pytest.raises(ValueError, match=r"to_init_params: params: got nothing of .*\['alpha'\]"):
        guide.to_init_params(without, X, Y, intercept=True)


def of_sites(X, Z, y=None, second=True):
    with numpyro.plate("feature", X.shape[1]):
        loc = X @ nss.spike_slab("w", 0.3)
    if second:
        with numpyro.plate("other", Z.shape[1]):
            loc += Z @ nss.spike_slab("v", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)


class Study:
    def model(self, *args, **kwargs):
        of_sites(*args, **kwargs)


def test_a_model_may_be_a_method():
    study = Study()
    svi = nss.CAVI(study.model, nss.PairedGuide(study.model))
    for second, sites in ((True, {"w", "v"}), (False, {"w"})):
        params = svi.get_params(svi.init(KEY, X, X**2, Y, second=second))
        assert svi.guide.inclusion_probabilities(params).keys() == sites


@pytest.mark.slow
def test_summaries_refuse_parameters_of_other_weights():
    guide = nss.PairedGuide(of_sites)
    svi = nss.CAVI(of_sites, guide, num_restarts=2)
    both = svi.run(KEY, 100, X, X**2, Y, progress_bar=False)
    one = svi.run(KEY, 100, X, X**2, Y, second=False, progress_bar=False)
    for params, second in ((both.params, False), (one.params, True)):
        names = "'w', 'v'" if second else "'w'"
        with pytest.raises(ValueError, match=rf"params: .*, expected of \[{names}\], which"):
            guide.median(params, X, X**2, Y, second=second)
    assert guide.median(both.params).keys() == {*"wv", "w_spike", "w_slab", "v_spike", "v_slab"}


def test_a_model_that_holds_its_data_has_been_given_them():
    def in_groups(X, y=None):
        w = nss.spike_slab("w", 0.3, groups=[0, 0, 1, 1])
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)

    def of_all():
        in_groups(X, Y)

    guide = nss.PairedGuide(of_all)
    params = nss.CAVI(of_all, guide).run(KEY, 100, progress_bar=False).params
    for model in (of_all, partial(in_groups, X, Y), partial(in_groups, X, y=Y)):
        for asked in (guide, nss.PairedGuide(model)):
            assert asked.median(params)["w_spike"].shape == (2,)
            assert asked.quantiles(params, [0.1, 0.9])["w_spike"].shape == (2, 2)
            assert asked.to_init_params(params).keys() == {"w_spike", "w_slab"}


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
    """Also beside observations, by a guide that has been called and by a fresh one."""
    guide = nss.PairedGuide(ahead)
    svi = nss.CAVI(ahead, guide)
    params = svi.run(KEY, 100, X, Y, progress_bar=False).params
    X_new = X[:3] + 1.0
    draws = {}
    for name, asked in {"called": guide, "fresh": nss.PairedGuide(ahead)}.items():
        for y in (Y, None):
            predictive = Predictive(ahead, guide=asked, params=params, num_samples=1000)
            draws[name] = predictive(KEY, X, y, X_new)
            assert draws[name].keys() == {"w", "y", "level", "y_new"}
        own = {"w", "w_spike", "w_slab", "sigma", "scale"}
        assert asked.sample_posterior(KEY, params, X, Y, X_new).keys() == own
        assert asked.to_init_params(params, X, Y, X_new).keys() == own - {"w"}
    jax.tree.map(np.testing.assert_array_equal, draws["called"], draws["fresh"])
    found = draws["fresh"]
    residual = found["y_new"] - found["level"][:, None] - found["w"] @ X_new.T
    # 4 standard errors, a false alarm in 1 of 16,000 keys
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
    guide.set_up((X, Y), {})
    sites = handlers.trace(handlers.seed(guide, 0)).get_trace(X, Y)
    sampled = {name for name, site in sites.items() if site["type"] == "sample"}
    more = {"z_b_unobserved"} if kind == "mask" else set()
    assert sampled == {"w_spike", "w_slab", "z"} | more


SWITCHES = {
    "a value with a shape": lambda on: (flagged, {"sigma": np.float64(0.5)} if on else {}),
    "a prior": lambda on: (with_prior, {"normal": np.bool_(on)}),
    "groups": lambda on: (with_levels, {"level": np.arange(N) % (4 if on else 3)}),
}


def with_prior(X, y=None, normal=False):
    prior = dist.Normal(0.0, 2.0) if normal else dist.StudentT(3.0, 0.0, 2.0)
    alpha = numpyro.sample("alpha", prior)
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(alpha + X @ w, 0.5), obs=y)


def with_levels(X, y=None, level=None):
    with numpyro.plate("level", int(level.max()) + 1):
        alpha = numpyro.sample("alpha", dist.Normal(0.0, 2.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(alpha[level] + X @ w, 0.5), obs=y)


@pytest.mark.parametrize("name", SWITCHES)
def test_what_changes_sites_without_new_shapes_is_seen(name):
    """Values of arguments decide which sites there are, how many entries they have, or whether they
    follow the weights; shapes of arguments say nothing of it."""
    model, _ = SWITCHES[name](False)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)
    for on in (False, True, False):
        _, kwargs = SWITCHES[name](on)
        result = svi.run(KEY, 100, X, Y, progress_bar=False, **kwargs)
        fresh = nss.PairedGuide(model)
        known = nss.CAVI(model, fresh).run(KEY, 100, X, Y, progress_bar=False, **kwargs)
        jax.tree.map(np.testing.assert_array_equal, result.params, known.params)
        draws, expected = (
            x.sample_posterior(KEY, result.params, X, Y, sample_shape=(3,), **kwargs)
            for x in (guide, fresh)
        )
        jax.tree.map(np.testing.assert_array_equal, draws, expected)


def with_level(X, Y=None, plate="response", predicts=True, total=False):
    """Tasks with a level each, and observations in their plate or in one of another name."""
    with numpyro.plate("task", Q):
        level = numpyro.sample("level", dist.Normal(0.0, 5.0))
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
        W = nss.spike_slab("w", 0.3)
    loc = numpyro.deterministic("loc", level + X @ W.T)
    if total:
        numpyro.sample("total", dist.Normal(jnp.sum(loc), 0.5))
    if predicts:
        with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate(plate, Q, dim=-1):
            numpyro.sample("y", dist.Normal(loc, 0.5), obs=Y)


@pytest.mark.slow
def test_how_sites_follow_the_weights_is_the_same_without_observations():
    Y_tasks = np.stack([Y + 1.0, 2.0 - Y], axis=1)
    reused = nss.PairedGuide(with_level)
    for plate in ("response", "task"):
        guide = nss.PairedGuide(with_level)
        params = (
            nss.CAVI(with_level, guide)
            .run(KEY, 100, X, Y_tasks, plate=plate, progress_bar=False)
            .params
        )
        assert params["level_auto_slope"].shape == (Q, P if plate == "task" else Q * P)
        first_predicts = nss.PairedGuide(with_level)
        found, *others = (
            Predictive(with_level, guide=x, params=params, num_samples=3)(KEY, X, plate=plate)
            for x in (guide, nss.PairedGuide(with_level), first_predicts, reused)
        )
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, other, found)
        # a fit by a guide that has first been called for predictions
        state = nss.CAVI(with_level, first_predicts).init(KEY, X, Y_tasks, plate=plate)
        assert jax.tree.map(jnp.shape, svi.get_params(state)) == jax.tree.map(jnp.shape, params)
        # something else to predict, outside of the plates of tasks
        for asked, observed in (
            (guide, Y_tasks),
            (guide, None),
            (nss.PairedGuide(with_level), Y_tasks),
        ):
            more = Predictive(with_level, guide=asked, params=params, num_samples=3)(
                KEY, X, observed, plate=plate, total=True
            )
            np.testing.assert_array_equal(more["w"], found["w"])
            assert more["total"].shape == (3,)
        # where there is nothing to observe, those of the last call are there
        draws = guide.sample_posterior(KEY, params, X, plate=plate, predicts=False)
        assert draws["loc"].shape == (N, Q)


def test_slopes_of_other_plates_are_refused():
    fresh = nss.PairedGuide(with_level)
    fresh.set_up((X, np.zeros((N, Q))), {})
    params = {name: value for name, (value, _) in fresh.start().items()}
    assert params["level_auto_slope"].shape == (Q, Q * P)
    fresh = nss.PairedGuide(with_level)
    with pytest.raises(ValueError, match=r"'level_auto_slope' has shape \(2, 8\), but .* \(2, 4\)"):
        fresh.sample_posterior(KEY, params, X, predicts=False)


def test_supports_that_arguments_change_are_seen():
    def model(X, y=None, most=1.0):
        sigma = numpyro.sample("sigma", dist.Uniform(0.0, most))
        shift = numpyro.param("shift", most / 2, constraint=constraints.interval(0.0, most))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(shift + X @ w, sigma), obs=y)

    svi = SVI(model, nss.PairedGuide(model), optax.adam(0.1), TraceGraph_ELBO())
    for most in (1.0, 10.0, 0.2):
        fresh = SVI(model, nss.PairedGuide(model), optax.adam(0.1), TraceGraph_ELBO())
        found, expected = (x.init(KEY, X, Y, most=most) for x in (svi, fresh))
        jax.tree.map(np.testing.assert_array_equal, found.optim_state, expected.optim_state)
    inside = svi.get_params(svi.update(found, X, Y, most=most)[0])
    assert 0.0 < inside["sigma_auto_loc"] < most and 0.0 < inside["shift"] < most


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
    with pytest.raises(ValueError, match=r"CAVI: the param 'net' is a list of arrays"):
        nss.CAVI(model, guide).init(KEY, X, Y)


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
    # a guide that has seen no data takes both for what is to be predicted
    fresh = Predictive(model, guide=nss.PairedGuide(model), params=params, num_samples=20)
    assert fresh(KEY, X).keys() >= {"z", "a"}


# Pickles and ArviZ


@EVERY_GUIDE
def test_a_pickled_guide_is_the_same(family):
    fit = fitted(family, "hyper")
    used = pickle.loads(pickle.dumps(fit.guide))
    fresh = pickle.loads(pickle.dumps(GUIDES[family](hyper)))
    handlers.seed(fresh, 0)(X, Y)
    expected = fit.guide.sample_posterior(KEY, fit.params, X, Y, sample_shape=(3,))
    for copy in (used, fresh):
        draws = copy.sample_posterior(KEY, fit.params, X, Y, sample_shape=(3,))
        jax.tree.map(np.testing.assert_array_equal, draws, expected)


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
