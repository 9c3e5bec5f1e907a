# SPDX-License-Identifier: Apache-2.0
"""The guides keep the contract of NumPyro's autoguides, and their summaries are true."""

from functools import lru_cache
import logging
import pickle
from types import SimpleNamespace
from typing import Any

import arviz_base
from fits import compilations
import numpy as np
import optax
import pytest
from refusals import refusals
from scipy import stats
import truth
from truth.function_models import first_params

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO, init_to_value
from numpyro.infer.autoguide import AutoGuide

import numpyro_spikeslab as nss

# one precision throughout, for the fits are shared
pytestmark = pytest.mark.usefixtures("x64")
KEY = random.key(0)
N, P, Q = 30, 4, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, P)) + RNG.normal(size=(N, 1))
Y = X @ [1.0, 0.0, 0.3, 0.0] + 0.5 * RNG.normal(size=N)
NUM_DRAWS = 20_000


def regression(X, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(2.0, 2.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
    signal = numpyro.deterministic("signal", X @ truth.weights(P, inclusion, scale))
    truth.respond(y, signal, sigma)


def tasks(X, Y=None):
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
        W = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate("response", Q, dim=-1):
        numpyro.sample("y", dist.Normal(X @ W.T, 0.5), obs=Y)


GUIDES = {"paired": nss.PairedGuide, "mean field": nss.MeanFieldGuide}
MODELS = {"regression": (regression, Y), "tasks": (tasks, np.stack([Y, -Y], 1))}
EVERY_GUIDE = pytest.mark.parametrize("family", GUIDES)
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
SHAPES = {"regression": (P,), "tasks": (Q, P)}
POINTS = {"regression": ("sigma", "inclusion", "scale"), "tasks": ()}


@lru_cache
def fitted(family: str, name: str) -> SimpleNamespace:
    model, y = MODELS[name]
    guide = GUIDES[family](model)
    svi = nss.CAVI(model, guide, temperature=None)
    result = svi.run(KEY, 50, X, y, progress_bar=False)
    return SimpleNamespace(guide=guide, svi=svi, result=result, params=result.params, args=(X, y))


@lru_cache
def drawn(family: str, name: str) -> dict[str, np.ndarray]:
    fit = fitted(family, name)
    draws = fit.guide.sample_posterior(KEY, fit.params, *fit.args, sample_shape=(NUM_DRAWS,))
    return {name: np.asarray(x) for name, x in draws.items()}


def marginal(family: str, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inclusion probabilities of the weights, and means and variances of included slabs."""
    params = {key: np.asarray(x) for key, x in fitted(family, name).params.items()}
    if family == "paired":
        probs, loc, scale = (params[f"w_auto_{part}"] for part in ("probs", "loc", "scale"))
        return probs, loc, scale**2
    variance = np.sum(params["w_slab_auto_scale_tril"] ** 2, axis=1)
    parts = params["w_spike_auto_probs"], params["w_slab_auto_loc"], variance
    probs, loc, variance = (part.reshape(SHAPES[name]) for part in parts)
    return probs, loc, variance


def assert_mean(draws: np.ndarray, mean: Any, second_moment: Any) -> None:
    """At most six standard errors: a false alarm in one of 10^8 comparisons."""
    error = 6 * np.sqrt(second_moment / len(draws))
    np.testing.assert_array_less(np.abs(draws.mean(axis=0) - mean), error + 1e-12)


def called(guide, *args, **kwargs):
    """The guide after its first call."""
    handlers.seed(guide, 0)(*args, **kwargs)
    return guide


def pickled(x):
    return pickle.loads(pickle.dumps(x))


@EVERY_GUIDE
@EVERY_MODEL
def test_a_guide_samples_the_latent_sites_of_its_model_and_names_its_parameters(family, name):
    fit, shape, size = fitted(family, name), SHAPES[name], int(np.prod(SHAPES[name]))
    guide = handlers.substitute(fit.guide, fit.params)
    assert set(handlers.seed(guide, 0)(*fit.args)) == {"w_spike", "w_slab", *POINTS[name]}
    if family == "paired":
        expected = {f"w_auto_{part}": shape for part in ("probs", "loc", "scale")}
    else:
        expected = {"w_spike_auto_probs": shape, "w_slab_auto_loc": (size,)}
        expected["w_slab_auto_scale_tril"] = (size, size)
    expected |= {f"{site}_auto_loc": () for site in POINTS[name]}
    assert {name: x.shape for name, x in fit.params.items()} == expected


@EVERY_GUIDE
def test_a_guide_is_an_autoguide_with_a_prefix(family):
    guide = GUIDES[family](regression, prefix="q")
    assert isinstance(guide, AutoGuide)
    params = first_params(guide, X, Y)
    assert all("_q_" in name for name in params) and "sigma_q_loc" in params
    assert guide.posterior_mean(params)["w"].shape == (P,)


@EVERY_GUIDE
def test_another_guide_says_the_same_of_saved_parameters(family):
    """After a call with other responses or without, after a summary, or a pickle of the first."""
    fit, make = fitted(family, "regression"), GUIDES[family]
    saved = {name: np.asarray(x) for name, x in fit.params.items()}

    def summaries(guide):
        predictive = Predictive(regression, guide=guide, params=saved, num_samples=3)
        return (
            guide.inclusion_probabilities(saved),
            guide.median(saved),
            guide.quantiles(saved, [0.1, 0.9]),
            guide.sample_posterior(KEY, saved, X, Y, sample_shape=(2, 3)),
            predictive(KEY, X[:5]),
        )

    by_summary, expected = make(regression), summaries(fit.guide)
    assert expected[-1]["y"].shape == (3, 5)
    by_summary.posterior_mean(saved, X, Y)
    others = called(pickled(make(regression)), X, -2.0 * Y), called(make(regression), X)
    for guide in (*others, by_summary, pickled(fit.guide)):
        jax.tree.map(np.testing.assert_array_equal, summaries(guide), expected)


@EVERY_GUIDE
def test_stock_svi_climbs_towards_the_bound_of_cavi(family):
    fit = fitted(family, "regression")
    svi = SVI(
        regression, GUIDES[family](regression), optax.adam(0.02), TraceGraph_ELBO(num_particles=10)
    )
    result = svi.run(KEY, 2000, *fit.args, progress_bar=False)
    gaps = np.asarray(result.losses) - float(fit.result.losses[-1])
    assert set(result.params) == set(fit.params)
    assert -0.5 < gaps[-500:].mean() < 0.2 * gaps[:50].mean()


def test_params_may_be_trees_of_arrays_except_in_fits_in_closed_form():
    def model(X, y=None):
        net = numpyro.param("net", [(jnp.ones(P), jnp.zeros(())), ()])
        truth.respond(y, X @ (truth.weights(P) + net[0][0]) + net[0][1], 0.5)

    guide = nss.PairedGuide(model)
    svi = SVI(model, guide, optax.adam(0.1), TraceGraph_ELBO())
    state, _ = svi.update(svi.init(KEY, X, Y), X, Y)
    params = svi.get_params(state)
    assert np.all(params["net"][0][0] != 1.0) and params["net"][0][1] != 0.0
    assert guide.sample_posterior(KEY, params, X, Y)["w"].shape == (P,)
    assert guide.median(params, X, Y).keys() == {"w", "w_spike", "w_slab"}
    with pytest.raises(ValueError, match="param 'net': got a list of arrays"):
        nss.CAVI(model, guide).init(KEY, X, Y)


def test_a_guide_starts_where_its_init_loc_fn_says():
    guide = nss.PairedGuide(regression, init_loc_fn=init_to_value(values={"sigma": 0.7}))
    svi = nss.CAVI(regression, guide)
    assert guide.median(svi.get_params(svi.init(KEY, X, Y)))["sigma"] == 0.7


def assert_draws(draws, name, sample_shape):
    """Of all sites in their shapes, the weights the product of their parts."""
    shapes = dict.fromkeys(("w", "w_spike", "w_slab"), SHAPES[name])
    shapes |= dict.fromkeys(POINTS[name], ())
    if name == "regression":
        shapes["signal"] = (N,)
        np.testing.assert_allclose(draws["signal"], draws["w"] @ X.T, atol=1e-12)
    assert {site: x.shape for site, x in draws.items()} == {
        site: sample_shape + shape for site, shape in shapes.items()
    }
    np.testing.assert_array_equal(draws["w"], draws["w_spike"] * draws["w_slab"])


def test_draws_are_one_program_for_every_key_and_all_data_of_the_same_shapes(caplog):
    fit = fitted("paired", "regression")
    for key, y, expected in ((KEY, Y, ["_run"]), (random.key(1), 2 * Y, [])):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            draws = fit.guide.sample_posterior(key, fit.params, X, y, sample_shape=(4, 7))
        assert compilations(caplog) == expected
        assert_draws(draws, "regression", (4, 7))
    assert_draws(fit.guide.sample_posterior(KEY, fit.params, *fit.args), "regression", ())


@EVERY_GUIDE
@EVERY_MODEL
def test_moments_of_draws_are_the_summaries(family, name):
    fit, draws = fitted(family, name), drawn(family, name)
    assert_draws(draws, name, (NUM_DRAWS,))
    probs, loc, variance = marginal(family, name)
    mean, second = probs * loc, probs * (loc**2 + variance)
    fourth = probs * (loc**4 + 6 * loc**2 * variance + 3 * variance**2)
    np.testing.assert_allclose(fit.guide.posterior_mean(fit.params)["w"], mean, atol=1e-15)
    np.testing.assert_array_equal(fit.guide.inclusion_probabilities(fit.params)["w"], probs)
    assert_mean(draws["w"], mean, second)
    assert_mean(draws["w"] ** 2, second, fourth)
    assert_mean(draws["w_spike"], probs, probs)


@EVERY_MODEL
def test_an_excluded_slab_has_its_prior_in_the_paired_family(name):
    draws, params = drawn("paired", name), fitted("paired", name).params
    excluded = draws["w_slab"][draws["w_spike"] == 0] / params.get("scale_auto_loc", 1.0)
    assert abs(excluded.mean()) < 6 / np.sqrt(excluded.size)
    assert abs(excluded.std() - 1.0) < 6 / np.sqrt(2 * excluded.size)


def test_slabs_are_jointly_normal_in_the_mean_field_family():
    draws, params = drawn("mean field", "regression"), fitted("mean field", "regression").params
    centred = draws["w_slab"] - params["w_slab_auto_loc"]
    white = np.linalg.solve(params["w_slab_auto_scale_tril"], centred.T)
    np.testing.assert_allclose(white @ white.T / NUM_DRAWS, np.eye(P), atol=9 / NUM_DRAWS**0.5)


def test_arviz_labels_the_draws():
    fit = fitted("paired", "tasks")
    coords = {"feature": [f"x{i}" for i in range(P)]}
    data = arviz_base.from_numpyro_svi(
        fit.svi, svi_result=fit.result, model_args=fit.args, coords=coords, num_samples=10
    )
    for name in ("w", "w_spike", "w_slab"):
        assert data["posterior"][name].dims == ("sample", "task", "feature")
    assert data["posterior"]["w"]["feature"].values.tolist() == coords["feature"]
    assert data["observed_data"]["y"].shape == (N, Q)


@EVERY_GUIDE
@EVERY_MODEL
def test_quantiles_are_those_of_the_draws(family, name):
    guide, params = fitted(family, name).guide, fitted(family, name).params
    probs = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    quantiles = jax.jit(lambda x: guide.quantiles(x, probs))(params)
    assert quantiles["w"].shape == quantiles["w_spike"].shape == (5, *SHAPES[name])
    w = drawn(family, name)["w"]
    # a quantile is the value that the draws reach with its probability, at the atom or elsewhere
    error = 6 * np.sqrt(probs * (1 - probs) / NUM_DRAWS)
    for q, value, tolerance in zip(probs, np.asarray(quantiles["w"]), error, strict=True):
        assert ((w < value).mean(axis=0) <= q + tolerance).all()
        assert ((w <= value).mean(axis=0) >= q - tolerance).all()
    medians, middle = guide.median(params), guide.quantiles(params, 0.5)
    assert set(medians) == set(middle) == set(quantiles)
    for site in ("w", "w_spike", "w_slab"):
        np.testing.assert_allclose(quantiles[site][2], medians[site], rtol=1e-12)
        np.testing.assert_array_equal(middle[site], medians[site])
    _, loc, variance = marginal(family, name)
    slab = np.multiply.outer(stats.norm.ppf(probs), np.sqrt(variance)) + loc
    np.testing.assert_allclose(quantiles["w_slab"], slab, rtol=1e-6, atol=1e-12)
    for site in POINTS[name]:
        value = params[f"{site}_auto_loc"]
        np.testing.assert_array_equal(quantiles[site], np.full(5, value))
        assert medians[site] == value


def test_quantiles_inside_the_atom_are_exactly_zero():
    fit = fitted("paired", "regression")
    guide, params = fit.guide, dict(fit.params)
    params["w_auto_probs"] = jnp.array([1.0, 0.4, 0.4, 0.0])
    params["w_auto_loc"] = jnp.array([2.0, 2.0, -2.0, 2.0])
    params["w_auto_scale"] = jnp.full(4, 0.1)
    quantiles = guide.quantiles(params, [0.1, 0.5, 0.9])
    np.testing.assert_array_equal(quantiles["w_spike"], [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]])
    assert (np.asarray(quantiles["w"][1:, 3]) == 0.0).all()
    np.testing.assert_array_equal(quantiles["w"][1], [2.0, 0.0, 0.0, 0.0])
    # 0.4 of the mass is about 2, above the atom: the quantile at 0.9 leaves a quarter of it above
    np.testing.assert_allclose(quantiles["w"][2, 1], 2.0 + 0.1 * 0.6744897502, rtol=1e-6)
    np.testing.assert_allclose(quantiles["w"][0, 2], -2.0 - 0.1 * 0.6744897502, rtol=1e-6)
    np.testing.assert_allclose(quantiles["w_slab"][1], [2.0, 2.0, -2.0, 2.0])


def with_shift(X, y=None):
    regression(X - numpyro.sample("shift", dist.Poisson(1.0)), y)


def fitted_guide():
    return fitted("paired", "regression").guide


REFUSALS = {
    "discrete site": (
        lambda: called(nss.PairedGuide(with_shift), X, Y),
        r"PairedGuide: the discrete latent sites \['shift'\].*DiscreteGibbs",
    ),
    "several pairs of a mean field": (
        lambda: called(nss.MeanFieldGuide(truth.two_model), X, X, Y),
        r"got the weights \['w', 'v'\].*expected one.*PairedGuide",
    ),
    "functions of a mean field": (
        lambda: called(nss.MeanFieldGuide(nss.models.factor_analysis(2)), np.eye(4)),
        r"MeanFieldGuide: model: got .*latent functions \['phi'\].*PairedGuide",
    ),
    "levels of quantiles": (
        lambda: fitted_guide().quantiles({}, [[0.5]]),
        r"PairedGuide.quantiles: got \[\[0.5\]\], expected probabilities between 0 and 1",
    ),
    "a level above one": (
        lambda: fitted_guide().quantiles({}, 1.5),
        "got 1.5, expected probabilities between 0 and 1",
    ),
    "draws of other parameters": (
        lambda: fitted_guide().sample_posterior(KEY, {"w_auto_probs": jnp.zeros(6)}, X, Y),
        r"params\['w_auto_probs'\]: got the shape \(6,\), expected the shape \(4,\)",
    ),
    "medians of other parameters": (
        lambda: fitted("paired", "tasks").guide.median({"v_auto_probs": jnp.zeros((Q, P))}),
        r"params\['w_auto_probs'\]: got nothing",
    ),
    "medians without a site": (
        lambda: fitted_guide().median({"w_auto_probs": jnp.zeros(P)}),
        r"params\['inclusion_auto_loc'\]: got nothing.*Give the parameters of a fit",
    ),
} | {
    f"{summary} before the first call": (
        lambda summary=summary: getattr(nss.MeanFieldGuide(regression), summary)({}),
        r"never been called.*seed\(guide, 0\)\(X, y\)",
    )
    for summary in ("inclusion_probabilities", "posterior_mean", "median")
}


test_what_a_guide_does_not_take_is_refused = refusals(REFUSALS)
