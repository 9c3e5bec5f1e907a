# SPDX-License-Identifier: Apache-2.0
"""Several optima as one posterior, against the sum over all models."""

from functools import partial
import pickle
from typing import Any

import arviz_base
import function_models
from mixtures import (
    GUIDES,
    KEY,
    Fit,
    correlated,
    exact,
    fitted,
    grouped,
    hyper,
    level,
    plain,
    twin_groups,
    twins,
    twins_away,
)
import numpy as np
import pytest
import truth

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceGraph_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from numpyro.infer.svi import SVIRunResult
from numpyro.infer.util import log_density

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import ascent, run as run_module
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.fitting.run import Optima, optima_of

PROBS = "auto_component_probs"


def two_of(params: dict[str, Any], *changes: dict[str, Any], probs=(0.3, 0.7)) -> dict[str, Any]:
    """Parameters of a mixture whose components differ in these."""
    stacked = {k: jnp.stack([c.get(k, x) for c in changes]) for k, x in params.items()}
    return stacked | {PROBS: jnp.asarray(probs, float)}


def log_ratios(fit: Fit, size: int) -> np.ndarray:
    """``log p - log q`` of draws of the mixture."""
    draws = fit.mixture.sample_posterior(KEY, fit.params, *fit.args, sample_shape=(size,))
    draws |= fit.mixture.auxiliary_values(draws)

    def ratio(values):
        log_p = log_density(fit.model, fit.args, {}, values)[0]
        return log_p - log_density(fit.mixture, fit.args, {}, fit.params | values)[0]

    return np.asarray(jax.jit(jax.vmap(ratio))(draws))


def test_weights_of_bounds_that_rounding_has_made_are_told(precision):
    guide = nss.PairedGuide(plain)
    guide.set_up(twins(), {})
    params = {name: jnp.stack([x, x]) for name, (x, _) in guide.start().items()}
    params["w_auto_probs"] = params["w_auto_probs"].at[1].set(0.9)
    mixture = nss.MixtureGuide(guide)

    def combine(bounds):
        return mixture.combine(Optima(params, np.array(bounds)), *twins())

    combine([-1e4, -1e4])
    if precision == "float64":
        combine([-2e8, -2e8])
        return
    with pytest.warns(UserWarning, match=r"bounds of 2e\+08 nats are known to 2e\+01 nats only"):
        combine([-2e8, -2e8])


# Truth


@pytest.mark.slow
def test_of_two_identical_columns_each_may_carry_the_effect(precision):
    fit, posterior = fitted(), exact(twins)
    found = fit.mixture.inclusion_probabilities(fit.params)["w"]
    alone = fit.guide.inclusion_probabilities(fit.result.params)["w"]
    assert found.dtype == precision and found[0] == pytest.approx(float(found[2]), abs=1e-3)
    assert np.max(np.abs(found - posterior.inclusion)) < 0.05
    assert np.max(np.abs(alone - posterior.inclusion)) > 0.4
    mean = fit.mixture.posterior_mean(fit.params, *fit.args)["w"]
    np.testing.assert_allclose(mean, posterior.mean, atol=0.02)
    np.testing.assert_allclose(fit.params[PROBS], [0.5, 0.5], atol=1e-3)


@pytest.mark.slow
def test_on_average_the_mixture_is_nearer_to_the_sum_over_all_models(x64):
    """Thirty designs: the mean of the largest errors."""
    guide = nss.PairedGuide(plain)
    svi = nss.CAVI(plain, guide, num_restarts=30)
    mixture = nss.MixtureGuide(guide, num_components=30)
    errors = []
    for seed in range(30):
        X, y = correlated(seed)
        result = svi.run(KEY, 300, X, y, progress_bar=False)
        params = mixture.combine(result.optima, X, y)
        inclusion = truth.enumerate_models(truth.regression(X, y, 0.5, 0.25, 1.0)).inclusion
        found = (
            guide.inclusion_probabilities(result.params),
            mixture.inclusion_probabilities(params),
        )
        errors.append([np.max(np.abs(x["w"] - inclusion)) for x in found])
    alone, mixed = np.mean(errors, axis=0)
    assert mixed < 0.7 * alone, (alone, mixed)


def check_truth(fit: Fit, exact: truth.Posterior) -> None:
    size = fit.args[0].shape[1]
    found = fit.mixture.inclusion_probabilities(fit.params)["w"]
    alone = fit.guide.inclusion_probabilities(fit.result.params)["w"]
    assert np.max(np.abs(found - exact.inclusion[:size])) < 0.06
    assert np.max(np.abs(alone - exact.inclusion[:size])) > 0.4
    mean = fit.mixture.posterior_mean(fit.params)["w"]
    np.testing.assert_allclose(mean, exact.mean[:size], atol=0.02)
    draws = fit.mixture.sample_posterior(KEY, fit.params, *fit.args, sample_shape=(4000,))
    np.testing.assert_allclose(draws["w"].mean(0), mean, atol=0.03)
    # beside the two there may be one with both, of little weight
    np.testing.assert_allclose(fit.params[PROBS][:2], [0.5, 0.5], atol=0.02)


@pytest.mark.exhaustive
def test_blocks_that_could_each_carry_the_effect(precision):
    """One of the two copies stands in a block, the other alone."""
    check_truth(fitted(family="blocks"), exact(twins))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["pairs", "blocks"])
def test_columns_beside_an_intercept(x64, family):
    X, y = twins_away()
    one = np.ones((len(X), 1))
    inclusion, scale = [0.25] * 3 + [1 - 1e-12], [1.0] * 3 + [5.0]
    problem = truth.regression(np.hstack([X, one]), y, 0.5, inclusion, scale)
    fit = fitted(level, twins_away, family)
    np.testing.assert_allclose(fit.params["b_auto_loc"], 2.0, atol=0.6)
    check_truth(fit, truth.enumerate_models(problem))


@pytest.mark.exhaustive
def test_groups_that_could_each_carry_the_effect(precision):
    groups = (0, 0, 1, 1)
    problem = truth.regression(*twin_groups(), 0.5, [0.25, 0.5] * 2, 1.0)
    fit = fitted(partial(grouped, groups=groups), twin_groups)
    check_truth(fit, truth.share_spikes(truth.enumerate_models(problem), groups))


# Bounds


@pytest.mark.slow
@pytest.mark.parametrize("model", [plain, hyper])
def test_the_bound_of_optima_apart_is_the_sum_of_their_evidences(x64, model):
    fit = fitted(model)
    ratios = log_ratios(fit, 4000)
    error = 5 * ratios.std() / np.sqrt(len(ratios))
    assert error < 0.1
    expected = fit.result.optima.bounds[0] - np.log(float(fit.params[PROBS][0]))
    assert len(fit.params[PROBS]) == 2
    assert ratios.mean() == pytest.approx(expected, abs=error + 0.005)
    assert ratios.mean() - error > fit.result.optima.bounds[0]
    if model is plain:
        assert ratios.mean() < exact(twins).log_evidence + error


@pytest.mark.slow
def test_the_bound_of_numpyro_is_that_of_the_mixture(x64):
    fit = fitted(data=correlated)
    estimate = jax.jit(Trace_ELBO(num_particles=4000).loss, static_argnums=(2, 3))
    found = -estimate(KEY, fit.params, fit.model, fit.mixture, *fit.args)
    ratios = log_ratios(fit, 4000)
    assert found == pytest.approx(ratios.mean(), abs=7 * ratios.std() / np.sqrt(len(ratios)))
    assert fit.result.optima.bounds[0] < found < exact(correlated).log_evidence


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", GUIDES)
def test_the_density_of_a_mixture_is_the_mean_of_its_components(x64, family):
    fit = fitted(family=family)
    end = "_probs" if family != "mean field" else "_slab_auto_loc"
    name = next(name for name in fit.result.params if name.endswith(end))
    own = fit.result.params
    params = two_of(own, {}, {name: own[name] * 0.7})
    draws = fit.mixture.sample_posterior(KEY, params, *fit.args, sample_shape=(5,))

    def density(guide, params):
        values = draws | guide.auxiliary_values(draws)
        return jax.vmap(lambda x: log_density(guide, fit.args, {}, params | x)[0])(values)

    each = [density(fit.guide, {k: x[j] for k, x in params.items() if k != PROBS}) for j in (0, 1)]
    expected = np.logaddexp(np.log(0.3) + each[0], np.log(0.7) + each[1])
    np.testing.assert_allclose(density(fit.mixture, params), expected, rtol=1e-10)


@pytest.mark.slow
def test_points_that_differ_do_not_overlap(x64):
    fit = fitted(hyper)
    params = two_of(fit.result.params, {}, {"sigma_auto_loc": jnp.asarray(3.0)})
    draws = fit.mixture.sample_posterior(KEY, params, *fit.args, sample_shape=(40,))
    assert set(np.unique(draws["sigma"])) == {3.0, float(fit.result.params["sigma_auto_loc"])}
    assert draws["ends"].shape == (40, 2)
    draws |= fit.mixture.auxiliary_values(draws)
    first = draws["sigma"] != 3.0

    def densities(guide, params, values):
        return jax.vmap(lambda x: log_density(guide, fit.args, {}, params | x)[0])(values)

    found = densities(fit.mixture, params, draws)
    own = densities(fit.guide, fit.result.params, draws)
    np.testing.assert_allclose(found[first], np.log(0.3) + own[first], rtol=1e-10)
    assert np.all(np.isfinite(found)) and np.all(np.isinf(own[~first]))


# Which optima


def test_copies_of_an_optimum_are_one_component(x64):
    fit = fitted()
    copies = {name: jnp.stack([x] * 4) for name, x in fit.result.params.items()}
    copies["w_auto_probs"] = copies["w_auto_probs"].at[3, 1].add(0.09)
    params = fit.mixture.combine(Optima(copies, np.zeros(4)), *fit.args)
    assert params[PROBS].tolist() == [1.0]
    np.testing.assert_array_equal(params["w_auto_probs"][0], fit.result.params["w_auto_probs"])


def test_the_best_of_distinct_optima_are_kept(x64):
    fit = fitted()
    base = {name: jnp.stack([x] * 4) for name, x in fit.result.params.items()}
    base["w_auto_probs"] = jnp.asarray([[0.5] * 3, [0.9] * 3, [0.95] * 3, [0.1] * 3])
    optima = Optima(base, np.asarray([-3.0, -1.0, -2.0, -3.25]))
    two = nss.MixtureGuide(fit.guide, num_components=2)
    with pytest.warns(UserWarning, match=r"1 optima of 3 .* 0.08 of the weight.*num_components=3"):
        params = two.combine(optima, *fit.args)
    np.testing.assert_allclose(params["w_auto_probs"][:, 0], [0.9, 0.5])
    np.testing.assert_allclose(params[PROBS], np.exp([2.0, 0.0]) / np.sum(np.exp([2.0, 0.0])))


def test_a_run_has_the_optima_of_its_starts(x64):
    fit = fitted()
    params, bounds, blocks = fit.result.optima
    assert blocks is None and set(params) == set(fit.result.params) and len(bounds) == 30
    assert np.all(np.diff(bounds) <= 0)
    np.testing.assert_array_equal(bounds, np.sort(fit.result.restarts)[::-1])
    for name, x in fit.result.params.items():
        np.testing.assert_array_equal(params[name][0], x)
    # each is where its bound says
    svi = nss.CAVI(plain, fit.guide)
    own = {name: x[-1] for name, x in params.items()}
    state = svi.init(KEY, *fit.args, init_params=own)
    assert -svi.evaluate(state, *fit.args) == pytest.approx(bounds[-1], abs=1e-8)


def test_starts_that_went_wrong_are_no_optima():
    losses = jnp.asarray([2.0, jnp.nan, 1.0])
    values = {"x": jnp.asarray([20.0, 0.0, 10.0])}
    ends = ascent.Progress(0, Posterior(None, None, values, None), losses, False)
    params, bounds, _ = optima_of(ends, lambda posterior: posterior.values, None)
    assert params["x"].tolist() == [10.0, 20.0] and bounds.tolist() == [-1.0, -2.0]


@pytest.mark.slow
def test_runs_without_optima(x64, monkeypatch):
    guide, args = fitted().guide, fitted().args
    single = nss.CAVI(plain, guide).run(KEY, 110, *args, progress_bar=False)
    svi = nss.CAVI(plain, guide, num_restarts=2)
    traced = jax.jit(lambda y: svi.run(KEY, 110, args[0], y, progress_bar=False).params)
    assert single.optima is None and set(traced(args[1])) == set(single.params)
    real, count = ascent.advance, [0]

    def advance(*args):
        count[0] += 1
        if count[0] > 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(run_module, "advance", advance)
    with pytest.warns(UserWarning, match="interrupted"):
        assert svi.run(KEY, 150, *args, progress_bar=False).optima is None


@pytest.mark.slow
def test_runs_of_latent_functions_have_no_optima(x64):
    model, args, _ = function_models.MODELS["one latent function"]()
    guide = nss.PairedGuide(model)
    result = nss.CAVI(model, guide, num_restarts=2).run(KEY, 40, *args, progress_bar=False)
    assert result.restarts is not None and result.optima is None
    mixture = nss.MixtureGuide(guide)
    with pytest.raises(ValueError, match=r"has the latent functions .*, expected none"):
        numpyro.handlers.seed(mixture, 0)(*args)


# Summaries


@pytest.mark.slow
@pytest.mark.parametrize("family", GUIDES)
def test_quantiles_of_one_component_are_its_own(x64, family):
    fit = fitted(family=family)
    params = {name: x[None] for name, x in fit.result.params.items()} | {PROBS: jnp.ones(1)}
    found = fit.mixture.quantiles(params, [0.1, 0.6])
    own = fit.guide.quantiles(fit.result.params, [0.1, 0.6])
    assert set(found) == set(own)
    for name, x in own.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-9, err_msg=name)


@pytest.mark.slow
def test_quantiles_are_where_the_distribution_function_has_reached_them(x64):
    guide = nss.PairedGuide(plain)
    params = {
        "w_auto_probs": jnp.asarray([[0.9, 0.3, 0.0], [0.2, 0.8, 0.0]]),
        "w_auto_loc": jnp.asarray([[1.0, -1.0, 0.0], [-2.0, 3.0, 0.0]]),
        "w_auto_scale": jnp.asarray([[0.3, 0.5, 1.0], [1.0, 0.2, 1.0]]),
        "sigma_auto_loc": jnp.asarray([2.0, 1.0]),
        PROBS: jnp.asarray([0.4, 0.6]),
    }
    mixture, levels = nss.MixtureGuide(guide), np.linspace(0.0, 1.0, 41)
    found = {k: np.asarray(x) for k, x in mixture.quantiles(params, levels).items()}
    parts = [
        nss.SpikeSlab(*(params[f"w_auto_{x}"][k] for x in ("probs", "scale", "loc")))
        for k in (0, 1)
    ]
    cdf = sum(p * part.cdf(found["w"]) for p, part in zip((0.4, 0.6), parts, strict=True))
    at_zero = found["w"] == 0
    np.testing.assert_allclose(
        cdf[~at_zero], np.broadcast_to(levels[:, None], cdf.shape)[~at_zero], atol=1e-9
    )
    inside = at_zero[:, :2].sum(axis=0) / 40
    np.testing.assert_allclose(inside, 1 - np.asarray([0.48, 0.6]), atol=0.03)
    assert np.all(at_zero[:, 2])
    assert found["w"][0, 0] == -np.inf and found["w"][-1, 0] == np.inf
    assert np.all(np.diff(found["w"][1:-1], axis=0) >= 0)
    np.testing.assert_array_equal(found["sigma"], np.where(levels <= 0.6, 1.0, 2.0))
    np.testing.assert_array_equal(found["w_spike"][:, 1], levels > 1 - 0.6)
    medians = mixture.median(params)
    for name, x in medians.items():
        np.testing.assert_array_equal(x, found[name][20])


@pytest.mark.slow
def test_quantiles_where_one_block_has_all_weights(x64):
    guide = nss.PairedGuide(plain, blocks=[[0, 1, 2]])
    args = tuple(map(jnp.asarray, twins()))
    svi = nss.CAVI(plain, guide, temperature=None, num_restarts=2)
    result = svi.run(KEY, 30, *args, progress_bar=False)
    mixture = nss.MixtureGuide(guide)
    params = mixture.combine(result.optima, *args)
    for of in ("w", "w_slab", "w_spike"):
        expected = guide.quantiles(result.params, [0.1, 0.9])[of]
        np.testing.assert_allclose(mixture.quantiles(params, [0.1, 0.9])[of], expected, rtol=1e-6)


@pytest.mark.slow
def test_quantiles_of_blocks_are_those_of_their_draws(x64):
    fit = fitted(family="blocks")
    mirrored = {"w_auto_linear_2": -fit.result.params["w_auto_linear_2"]}
    params = two_of(fit.result.params, {}, mirrored)
    draws = fit.mixture.sample_posterior(KEY, params, *fit.args, sample_shape=(40_000,))
    levels = np.array([0.02, 0.1, 0.25, 0.6, 0.9, 0.99])
    found = fit.mixture.quantiles(params, levels)
    for site in ("w", "w_slab"):
        for j in range(3):
            own = draws[site][:, j]
            own = own if site == "w" else own[draws["w_spike"][:, j] == 1]
            if len(own) < 500:
                continue
            low, high = (
                np.mean(compare(own[:, None], found[site][:, j]), axis=0)
                for compare in (np.less, np.less_equal)
            )
            # five standard errors
            error = 5 * np.sqrt(levels * (1 - levels) / len(own))
            assert np.all(low < levels + error) and np.all(high > levels - error), (site, j)
    on = np.asarray(draws["w_spike"]).mean(0)
    np.testing.assert_allclose(found["w_spike"].mean(0), np.mean(levels[:, None] > 1 - on, 0))
    for name, x in fit.mixture.median(params).items():
        np.testing.assert_array_equal(x, fit.mixture.quantiles(params, 0.5)[name])


@pytest.mark.slow
def test_draws_are_those_of_the_mixture(x64):
    fit = fitted()
    draws = fit.mixture.sample_posterior(KEY, fit.params, *fit.args, sample_shape=(50, 80))
    assert {k: x.shape for k, x in draws.items()} == {
        "w": (50, 80, 3),
        "w_spike": (50, 80, 3),
        "w_slab": (50, 80, 3),
        "signal": (50, 80, 30),
    }
    np.testing.assert_array_equal(draws["w"], draws["w_spike"] * draws["w_slab"])
    np.testing.assert_allclose(draws["signal"], draws["w"] @ fit.args[0].T, rtol=1e-6, atol=1e-9)
    probs = fit.mixture.inclusion_probabilities(fit.params)["w"]
    np.testing.assert_allclose(draws["w_spike"].mean((0, 1)), probs, atol=0.05)
    # of either, and hardly ever of both
    assert np.mean(draws["w_spike"][..., 0] * draws["w_spike"][..., 2]) < 0.06
    single = fit.mixture.sample_posterior(KEY, fit.params, *fit.args)
    assert single["w"].shape == (3,)


@pytest.mark.slow
def test_weights_that_share_a_spike():
    X, y = (jnp.asarray(x, float) for x in twins())
    guide = nss.PairedGuide(grouped)
    start = nss.CAVI(grouped, guide).init(KEY, X, y).optim_state[1]
    other = {"w_auto_probs": jnp.asarray([0.9, 0.1, 0.1])}
    mixture, params = nss.MixtureGuide(guide), two_of(start, other, {})
    draws = mixture.sample_posterior(KEY, params, X, y, sample_shape=(3,))
    assert draws["w_spike"].shape == (3, 2) and draws["w"].shape == (3, 3)
    assert "w_spike" not in mixture.quantiles(params, [0.2, 0.9])
    found = mixture.quantiles(params, [0.2, 0.9], X, y)
    assert found["w_spike"].tolist() == [[0, 0], [1, 1]] and found["w"].shape == (2, 3)


# In NumPyro and ArviZ


@pytest.mark.slow
def test_statistics_of_draws(precision):
    fit = fitted()
    svi = SVI(fit.model, fit.mixture, numpyro.optim.Adam(0.1), TraceGraph_ELBO())
    result = SVIRunResult(fit.params, None, None)
    data = arviz_base.from_numpyro_svi(svi, svi_result=result, model_args=fit.args)
    data = nss.add_variational_stats(data, svi, result, fit.args)
    table = nss.summary(data)
    inclusion = fit.mixture.inclusion_probabilities(fit.params)["w"]
    np.testing.assert_allclose(table["inclusion"].dropna(), inclusion, atol=1e-3)
    expected = fit.result.optima.bounds[0] + np.log(2)
    assert data["sample_stats"].attrs["bound"] == pytest.approx(expected, abs=0.1)
    compared = nss.compare({"mixture": data, "again": data}, ["w"], "again")
    assert compared.loc["mixture", "bound"] == data["sample_stats"].attrs["bound"]


def test_predictions_and_a_start_of_its_own(x64):
    fit = fitted()
    predictive = Predictive(plain, guide=fit.mixture, params=fit.params, num_samples=5)
    assert predictive(KEY, fit.args[0][:4])["y"].shape == (5, 4)
    fresh = nss.MixtureGuide(nss.PairedGuide(plain), num_components=2)
    svi = SVI(plain, fresh, numpyro.optim.Adam(0.1), TraceGraph_ELBO())
    params = svi.get_params(svi.init(KEY, *fit.args))
    assert {k: x.shape for k, x in params.items()} == {
        "w_auto_probs": (2, 3),
        "w_auto_loc": (2, 3),
        "w_auto_scale": (2, 3),
        PROBS: (2,),
    }


@pytest.mark.slow
def test_a_mixture_survives_pickling(x64):
    fit = fitted(hyper)
    found = pickle.loads(pickle.dumps(fit.mixture))
    optima = pickle.loads(pickle.dumps(fit.result)).optima
    params = found.combine(optima, *fit.args)
    for name, x in fit.params.items():
        np.testing.assert_array_equal(params[name], x)
    draws = (x.sample_posterior(KEY, params, *fit.args)["w"] for x in (found, fit.mixture))
    np.testing.assert_array_equal(*draws)


# Errors


def with_param(X, y=None):
    scale = numpyro.param("noise", 1.0)
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


def test_errors_of_the_constructor(unchecked_types):
    with pytest.raises(TypeError, match="must be a PairedGuide or a MeanFieldGuide, got AutoDelta"):
        nss.MixtureGuide(AutoDelta(plain))
    with pytest.raises(ValueError, match=r"must be AutoDelta, got AutoNormal\. Fit a guide"):
        nss.MixtureGuide(nss.PairedGuide(plain, inner_guide=AutoNormal))
    for number in (0, 2.0, None, True):
        with pytest.raises(ValueError, match=f"num_components is {number}, expected an integer"):
            nss.MixtureGuide(nss.PairedGuide(plain), num_components=number)


def test_errors_of_combine(x64, unchecked_types):
    fit = fitted()
    with pytest.raises(ValueError, match=r"optima are missing.*num_restarts=20"):
        fit.mixture.combine(None, *fit.args)
    optima = fit.result.optima
    renamed = {name.replace("w_", "v_"): x for name, x in optima.params.items()}
    with pytest.raises(ValueError, match=r"of the shapes \{'v_auto_loc': .*expected \{'w_"):
        fit.mixture.combine(optima._replace(params=renamed), *fit.args)
    X, y = fit.args
    with pytest.raises(ValueError, match=r"\(3,\).*expected .*\(2,\).*to the same data"):
        nss.MixtureGuide(nss.PairedGuide(plain)).combine(optima, X[:, :2], y)
    for other in (fit.result, fit.result.params):
        with pytest.raises(TypeError, match=r"expected Optima. Give `result.optima`"):
            fit.mixture.combine(other, *fit.args)
    with pytest.raises(ValueError, match=r"has the params \['noise'\], expected none"):
        nss.MixtureGuide(nss.PairedGuide(with_param)).combine(optima, *fit.args)


@pytest.mark.slow
def test_optima_of_other_blocks_are_refused(x64):
    X, y = twins()
    guide, other = (nss.PairedGuide(plain, blocks=blocks) for blocks in ([[0, 1]], [[0, 2]]))
    svi = nss.CAVI(plain, guide, num_restarts=2, temperature=None)
    optima = svi.run(KEY, 5, X, y, progress_bar=False).optima
    nss.MixtureGuide(guide).combine(optima, X, y)
    with pytest.raises(ValueError, match=r"blocks \{'w': \[\[0, 1\]\]\}, expected \{.*0, 2"):
        nss.MixtureGuide(other).combine(optima, X, y)


def test_errors_of_summaries(x64):
    fit = fitted()
    with pytest.raises(ValueError, match="params has no 'auto_component_probs', got"):
        fit.mixture.inclusion_probabilities(fit.result.params)
    with pytest.raises(
        ValueError, match="expected probabilities between 0 and 1, one or a list, got"
    ):
        fit.mixture.quantiles(fit.params, [0.5, 1.5])
    with pytest.raises(ValueError, match=r"MixtureGuide.quantiles: .*one or a list, got \[\["):
        fit.mixture.quantiles(fit.params, [[0.5], [0.9]])
