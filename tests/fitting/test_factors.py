# SPDX-License-Identifier: Apache-2.0
"""Whole fits of functions without order: planted factors, new rows and new tasks."""

from functools import partial

import numpy as np
import pytest
from refusals import refusals
from scipy.sparse import coo_array
from tinygp import kernels
from truth.task_problems import model_of, observations, plant, problem

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers

import numpyro_spikeslab as nss

KEY = random.key(0)


def test_a_mean_or_another_kernel_takes_the_sweep_of_functions_with_order():
    args = observations(15, 6, 2)
    for model in (
        model_of("weak", ["white"] * 2, np.ones((2, 15))),
        model_of("weak", ["white", np.eye(15)]),
    ):
        assert not problem(model, args, start=lambda engine, blank: blank).engine.functions.is_white


PLANTED = {
    "once": ("float64", (100, 60, 4, 0), 4, 60, 1),
    "in single precision": ("float32", (100, 60, 4, 0), 4, 60, 1),
    "many": ("float64", (200, 100, 6, 0), 7, 100, None),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_factors_are_found(restored_x64, name):
    precision, sizes, most, num_steps, num_restarts = PLANTED[name]
    jax.config.update("jax_enable_x64", precision == "float64")
    planted = plant(*sizes)
    x, num_factors = np.arange(sizes[0]), sizes[2]
    model = nss.models.mtmkl(["white"] * (2 * num_factors))
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=num_restarts)
    result = svi.run(KEY, num_steps, x, planted.Y, progress_bar=False)
    losses, single = np.asarray(result.losses), precision == "float32"
    assert losses.dtype == precision
    assert np.max(np.diff(losses)) < (1e-5 * abs(losses[-1]) if single else 1e-8)
    used = np.max(guide.inclusion_probabilities(result.params)["W"], axis=0) > 0.5
    assert num_factors <= np.sum(used) <= most
    phi = np.asarray(guide.posterior_mean(result.params, x, planted.Y)["phi"])[used]
    correlation = np.corrcoef(planted.phi, phi)[:num_factors, num_factors:]
    assert np.min(np.max(np.abs(correlation), axis=1)) > 0.95


@pytest.mark.usefixtures("x64")
def test_a_result_says_how_far_the_starts_came():
    x, Y = np.arange(100), plant(100, 60, 4, 0).Y
    model = nss.models.mtmkl(["white"] * 8)
    fits = (nss.CAVI(model, nss.PairedGuide(model), num_restarts=number) for number in (1, 3))
    one, three = (svi.run(KEY, 20, x, Y, progress_bar=False) for svi in fits)
    assert one.restarts is None and three.restarts.shape == (3,)
    # the first start is that of a single run, and the best is the one that goes on
    assert any(np.isclose(three.restarts[0], -one.losses))
    assert any(np.isclose(np.max(three.restarts), -three.losses))


@pytest.mark.exhaustive
def test_new_rows_are_conditioned_on_the_weights(precision):
    planted = plant(60, 12, 2, 0)
    model = nss.models.factor_analysis(3)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, plain=True)
    params = svi.run(KEY, 200, planted.Y, progress_bar=False).params
    new = np.array(planted.Y[:5])
    new[0], new[1, :4] = np.nan, np.nan
    mean, variance = guide.transform(params, planted.Y, Y_new=new)

    g, mu, sd = (np.asarray(params[f"W_auto_{part}"], float) for part in ("probs", "loc", "scale"))
    W, W2 = g * mu, g * (mu**2 + sd**2)
    for s, y in enumerate(new):
        tau = np.where(np.isnan(y), 0, 1 / np.asarray(params["noise_auto_loc"], float) ** 2)
        covariance = np.linalg.inv(
            np.eye(3) + np.einsum("q,qm,qk->mk", tau, W, W) + np.diag(tau @ (W2 - W**2))
        )
        expected = covariance @ W.T @ (tau * np.nan_to_num(y))
        np.testing.assert_allclose(mean[:, s], expected, atol=2e-4)
        np.testing.assert_allclose(variance[:, s], np.diag(covariance), rtol=1e-3)
    np.testing.assert_array_equal(mean[:, 0], 0)
    # the fit's own functions, but for the variances, of which those of mean field are smaller
    phi = guide.posterior_mean(params, planted.Y)["phi"][:, 2:5]
    np.testing.assert_allclose(mean[:, 2:], phi, atol=1e-2)


def test_a_start_with_too_much_noise_is_not_passed_over():
    """At a noise of the data's own spread no function explains more than it costs."""
    Y = plant(60, 12, 2, 0).Y
    model = nss.models.factor_analysis(3)
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    fit = partial(svi.run, KEY, 40, Y, progress_bar=False)
    spread = jnp.full(12, 10.0)
    with pytest.warns(UserWarning, match="all latent functions are switched off"):
        off = fit(init_params={"noise_auto_loc": spread})
    on = fit(init_params={"noise_auto_loc": spread / 100})
    assert np.all(off.params["W_auto_probs"] < 0.5) and np.any(on.params["W_auto_probs"] > 0.5)
    assert off.losses[-1] > on.losses[-1] + 100


@pytest.mark.exhaustive
def test_new_tasks_are_fitted_with_the_functions_held():
    """By NumPyro's handler, compared with least squares on the same functions."""
    planted = plant(100, 80, 4, 0)
    old, new = np.split(planted.Y, [60], axis=1)
    missing = np.random.default_rng(1).uniform(size=new.shape) < 0.3
    new = np.where(missing, np.nan, new)
    model = nss.models.factor_analysis(5)
    guide = nss.PairedGuide(model)
    params = nss.CAVI(model, guide, plain=True).run(KEY, 200, old, progress_bar=False).params
    values = {"phi": guide.posterior_mean(params, old)["phi"]}
    values |= {name: guide.median(params)[name] for name in ("inclusion", "slab_scale")}
    conditioned = handlers.condition(model, values)
    guide_new = nss.PairedGuide(conditioned)
    result = nss.CAVI(conditioned, guide_new).run(KEY, 150, new, progress_bar=False)
    W = np.asarray(guide_new.posterior_mean(result.params)["W"])
    phi, truth = np.asarray(values["phi"]).T, planted.f[:, 60:]
    dense = np.zeros_like(truth)
    for q, y in enumerate(new.T):
        observed = ~np.isnan(y)
        dense[:, q] = phi @ np.linalg.lstsq(phi[observed], y[observed])[0]
    error, largest = (np.std((f - truth)[missing]) for f in (phi @ W.T, dense))
    assert error < largest < 0.2 * np.std(truth)
    # as sparse as the tasks that the functions were found with
    shares = [np.mean(p["W_auto_probs"]) for p in (params, result.params)]
    assert abs(shares[0] - shares[1]) < 0.1


ROWS = [
    (np.ones(12), r"got the shape \(12,\), expected \(S, 12\)"),
    (np.ones((0, 12)), r"expected \(S, 12\)"),
    (np.full((2, 12), np.inf), "not finite"),
    (np.ma.masked_less(np.eye(12), 0.0), r"masked array.*`Y_new.filled\(np.nan\)`"),
    (coo_array(np.eye(12)), "a sparse array, expected an array. Make it dense"),
    (np.ones((60, 12)), kernels.ExpSquared(1.0), "functions without order"),
]


def transform(Y_new, kernel="white"):
    guide = nss.PairedGuide(nss.models.mtmkl([kernel] * 3))
    guide.transform({}, np.arange(60.0), plant(60, 12, 2, 0).Y, Y_new=Y_new)


test_rows_that_do_not_fit_are_refused = refusals(ROWS, transform)
