# SPDX-License-Identifier: Apache-2.0
"""The interface of CAVI: that of SVI, supports, starts, traced data, what it compiles, refusals."""

from functools import partial
import logging
import time

from fits import KEY, cavi, compilations, run, same
import function_models
import numpy as np
import optax
import pytest
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, TraceGraph_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import SHARED
from numpyro_spikeslab.reading.sites import param_name


@pytest.fixture
def fixed():
    return truth.fixed_case()


# Supports


@pytest.mark.parametrize("kind", ["param", "improper"])
@pytest.mark.parametrize(
    ("part", "low", "high", "expected"),
    [("noise", 1.0, 5.0, 1.0), ("inclusion", 0.05, 0.15, 0.15), ("slab", 2.0, 5.0, 2.0)],
)
def test_sites_with_a_role_keep_their_constraints(x64, fixed, kind, part, low, high, expected):
    support = dist.constraints.interval(low, high)

    def model(X, y):
        if kind == "param":
            value = numpyro.param("value", 0.5 * (low + high), constraint=support)
        else:
            value = numpyro.sample("value", dist.ImproperUniform(support, (), ()))
        known = {"noise": 0.3, "inclusion": 0.5, "slab": 1.0} | {part: value}
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", known["inclusion"], known["slab"])
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, known["noise"]), obs=y)

    X = fixed.args[0]
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    # all columns count, with effects and noise that are less than the constraints leave
    params = svi.run(KEY, 200, X, X @ jnp.full(X.shape[1], 0.5), progress_bar=False).params
    assert params[param_name("value", "auto", params)] == pytest.approx(expected, rel=1e-3)


def test_starts_of_chains_in_unconstrained_space_know_supports_of_the_data(x64, fixed):
    def model(X, y):
        most = 2 * jnp.max(jnp.abs(X))
        scale = numpyro.sample("scale", dist.Uniform(0.0, most))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, jnp.exp(scale)), obs=y)

    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)
    params = svi.get_params(svi.init(KEY, *fixed.args))
    found = guide.to_init_params(params, *fixed.args, unconstrained=["scale"])["scale"]
    most = 2 * np.max(np.abs(fixed.args[0]))
    assert most / (1 + np.exp(-found)) == pytest.approx(float(params["scale_auto_loc"]))

    def starts(X, y, scale):
        own = params | {"scale_auto_loc": scale}
        return guide.to_init_params(own, X, y, unconstrained=["scale"], num_chains=2)["scale"]

    np.testing.assert_allclose(jax.jit(starts)(*fixed.args, 0.3 * most), np.log(0.3 / 0.7))
    assert np.all(np.isfinite(starts(*fixed.args, most)))


def test_a_value_that_rounding_puts_on_the_boundary_stays_a_number():
    """Others climb with it."""
    X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)

    def model(X, y):
        level = numpyro.sample("level", dist.Uniform(1000.0, 1001.0))
        power = numpyro.sample("power", dist.Gamma(2.0, 1.0))
        with numpyro.plate("feature", 2):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", 40):
            numpyro.sample("y", dist.Normal((level - 1000.0) ** power + X @ w, 0.1), obs=y)

    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    result = svi.run(KEY, 30, X, X[:, 0] + 3.0, progress_bar=False)
    assert result.params["level_auto_loc"] == 1001.0
    assert np.all(np.diff(result.losses) <= 1e-2) and np.all(np.isfinite(result.losses))


def uniform_level(most):
    return numpyro.sample("level", dist.Uniform(0.0, most))


def param_level(most):
    return numpyro.param("level", 1.0, constraint=dist.constraints.interval(0.0, most))


@pytest.mark.parametrize(
    "level_below", [uniform_level, pytest.param(param_level, marks=pytest.mark.exhaustive)]
)
def test_supports_are_those_of_the_data(x64, fixed, level_below):
    """A guide notes those of its first call alone."""
    X, y = fixed.args

    def model(X, y, most):
        level = level_below(most)
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + X @ w, 0.3), obs=y + 5.0)

    def fit(svi, most):
        params = svi.run(KEY, 100, X, y, most, progress_bar=False).params
        return params[param_name("level", "auto", params)]

    alone = [fit(nss.CAVI(model, nss.PairedGuide(model)), most) for most in (3.0, 10.0)]
    assert alone[0] == pytest.approx(3.0, abs=1e-3) and 4.0 < alone[1] < 6.0
    svi = nss.CAVI(model, nss.PairedGuide(model))
    np.testing.assert_allclose([fit(svi, most) for most in (10.0, 3.0, 10.0)][1:], alone, atol=1e-6)
    traced = jax.vmap(partial(fit, nss.CAVI(model, nss.PairedGuide(model))))(jnp.array([3.0, 10.0]))
    np.testing.assert_allclose(traced, alone, atol=1e-6)


# States and starts


def test_options_of_svi_change_nothing(x64, fixed):
    svi = cavi(fixed)
    options = dict(stable_update=True, forward_mode_differentiation=True)
    same(run(svi, fixed, 5, **options), run(svi, fixed, 5))
    state = svi.init(KEY, *fixed.args)
    same(svi.stable_update(state, *fixed.args), svi.update(state, *fixed.args))


def test_a_state_may_be_donated(x64, fixed):
    """The guide's own starts are not in it, so the next fit has them."""
    svi = cavi(fixed)
    expected = run(svi, fixed, 2).losses
    update = jax.jit(lambda state: svi.update(state, *fixed.args), donate_argnums=0)
    update(svi.init(KEY, *fixed.args))
    same(run(svi, fixed, 2).losses, expected, 1e-10)


def test_a_state_is_evaluated_at_the_data_of_the_call(x64, fixed):
    """What depends on data alone is not in a state."""
    X, y = fixed.args
    svi = cavi(fixed)
    state = run(svi, fixed).state
    update = jax.jit(lambda state, *args: svi.update(state, *args))
    for args in (fixed.args, (X[::-1, ::-1], 0.5 - 3 * y), (X[:12], y[:12])):
        state, loss = update(state, *args)
        assert loss == pytest.approx(float(svi.evaluate(state, *args)), abs=1e-9)


def test_data_may_be_traced(x64, fixed):
    svi = cavi(fixed)
    X, y = fixed.args
    responses = jnp.stack([y, -y, 2.0 * y])

    @jax.jit
    @jax.vmap
    def fit(y):
        return svi.run(KEY, 20, X, y, progress_bar=False).params

    batch = fit(responses)
    for i, response in enumerate(responses):
        alone = svi.run(KEY, 20, X, response, progress_bar=False).params
        same({k: x[i] for k, x in batch.items()}, alone, 1e-10)


def test_starts_may_be_a_batch(x64, fixed):
    svi = cavi(fixed)
    starts = {"w_auto_loc": random.normal(KEY, (3, 4)), "w_auto_probs": jnp.full((3, 4), 0.9)}
    batch = jax.vmap(lambda start: run(svi, fixed, init_params=start))(starts)
    for i in range(3):
        alone = run(svi, fixed, init_params={k: x[i] for k, x in starts.items()})
        same(batch.losses[i], alone.losses, 1e-10)
        same({k: x[i] for k, x in batch.params.items()}, alone.params, 1e-10)


def test_a_start_is_what_init_params_say(x64, fixed):
    svi = cavi(fixed)
    start = {"w_auto_probs": jnp.array([0.1, 0.2, 0.3, 0.4])}
    params = svi.get_params(svi.init(KEY, *fixed.args, init_params=start))
    assert params["w_auto_probs"].tolist() == [0.1, 0.2, 0.3, 0.4]
    assert params["w_auto_loc"].tolist() == [0.0] * 4


@pytest.mark.slow
def test_other_numbers_of_observations_are_fitted(x64):
    case = truth.param_case()
    X, y = case.args
    svi = cavi(case)
    first = run(svi, case)
    kept = svi.guide.sample_posterior(KEY, first.params, X, y)
    result = svi.run(KEY, 20, X[:15], y[:15], progress_bar=False)
    alone = cavi(case).run(KEY, 20, X[:15], y[:15], progress_bar=False)
    same((result.losses, result.params), (alone.losses, alone.params))
    same(svi.guide.sample_posterior(KEY, first.params, X, y), kept)
    same(run(svi, case).losses, first.losses)


def fresh_run(case, *args):
    return cavi(case).run(KEY, 5, *args, progress_bar=False)


def fresh_updates(case, *args):
    svi = cavi(case)
    state = svi.init(KEY, *args)
    for _ in range(5):
        state, _ = svi.update(state, *args)
    return svi.get_params(state)


@pytest.mark.parametrize(
    ("name", "tolerance"),
    # a search of other sites amplifies rounding
    [("params", 1e-9), pytest.param("latent hyperparameters", 1e-8, marks=pytest.mark.exhaustive)],
)
def test_what_is_fresh_may_be_used_first_under_jit(x64, name, tolerance):
    case = truth.CASES[name]()
    expected = fresh_run(case, *case.args)
    same(jax.jit(lambda *args: fresh_run(case, *args))(*case.args), expected, tolerance)
    same(jax.jit(lambda: fresh_updates(case, *case.args))(), expected.params, tolerance)
    # and nothing of it stays behind
    svi = cavi(case)
    jax.jit(lambda *args: svi.get_params(svi.init(KEY, *args)))(*case.args)
    same(run(svi, case, 5), expected)


@pytest.mark.slow
def test_svi_under_jit_takes_a_fresh_guide(x64):
    case = truth.noise_case()

    def losses(guide, *args):
        svi = SVI(case.model, guide, optax.adam(0.01), TraceGraph_ELBO())
        state = svi.init(KEY, *args)
        state, first = svi.update(state, *args)
        return first, svi.update(state, *args)[1]

    guide = nss.PairedGuide(case.model)
    found = jax.jit(lambda *args: losses(guide, *args))(*case.args)
    same(losses(guide, *case.args), found, 1e-9)


# Compilations


def test_new_data_of_the_same_shapes_compile_nothing(x64, caplog):
    case = truth.param_case()
    svi = cavi(case)

    def use(X, y):
        result = svi.run(KEY, 100, X, y, progress_bar=False)
        svi.evaluate(result.state, X, y)
        return svi.update(result.state, X, y)[1]

    X, y = case.args
    new = jnp.asarray(truth.design("independent")), y + 1.0
    first = use(X, y)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        second = use(*new)
    assert not compilations(caplog)
    assert first != second
    # the counter counts
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.jit(lambda x: x + 2.0)(y)
    assert compilations(caplog)


def test_another_number_of_steps_compiles_nothing(x64, fixed, caplog):
    svi = cavi(fixed)
    run(svi, fixed, 3)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        some, many = run(svi, fixed, 7), run(svi, fixed, 150, tol=-1.0)
    assert (len(some.losses), len(many.losses)) == (7, 150)
    assert not compilations(caplog)


# Other models


@pytest.mark.exhaustive
def test_ten_thousand_tasks_need_no_design_of_all_weights(x64):
    num_tasks, num_features, num_obs = 10_000, 50, 500
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_obs, num_features))
    W = rng.normal(size=(num_tasks, num_features)) * (rng.random((num_tasks, num_features)) < 0.1)
    Y = X @ W.T + 0.5 * rng.normal(size=(num_obs, num_tasks))

    def model(X, Y=None):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
        with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("feature", num_features):
            W = nss.spike_slab("W", inclusion)
        with numpyro.plate("obs", num_obs, dim=-2), numpyro.plate("column", num_tasks):
            numpyro.sample("Y", dist.Normal(X @ W.T, sigma), obs=Y)

    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    reading = svi._read((X, Y), {})
    assert reading.form.kind == SHARED and reading.features.shape == (num_features, num_obs)
    # a column of each weight would be 2 TB
    assert reading.design is None
    began = time.process_time()
    result = svi.run(KEY, 10, X, Y, progress_bar=False)
    assert time.process_time() - began < 60
    probs = np.asarray(result.params["W_auto_probs"])
    assert np.mean((probs > 0.5) == (W != 0)) > 0.97
    np.testing.assert_allclose(result.params["sigma_auto_loc"], 0.5, rtol=0.02)
    np.testing.assert_allclose(result.params["inclusion_auto_loc"], 0.1, rtol=0.2)


def slab_data_model(X, slab_scale, y=None):
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3, slab_scale)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


def test_a_guide_takes_the_slab_scale_from_the_data_it_is_given(x64, fixed):
    X, y = fixed.args
    guide = nss.PairedGuide(slab_data_model)
    svi = nss.CAVI(slab_data_model, guide, temperature=None)

    @jax.jit
    def estimate(params, *args):
        def particle(key):
            return -TraceGraph_ELBO().loss(key, params, slab_data_model, guide, *args)

        particles = jax.vmap(particle)(random.split(KEY, 20_000))
        return jnp.mean(particles), jnp.std(particles) / jnp.sqrt(20_000)

    for scale in (jnp.array(1.0), jnp.array(5.0)):
        result = svi.run(KEY, 50, X, scale, y, progress_bar=False)
        mean, error = estimate(result.params, X, scale, y)
        # two comparisons at 4.5 standard errors: a false alarm in 1 of 73000 keys
        assert abs(mean + result.losses[-1]) < 4.5 * error < 0.5


# Refusals


def with_moving_support(X, y):
    low = numpyro.sample("low", dist.HalfNormal(5.0))
    level = numpyro.sample("level", dist.TruncatedNormal(0.0, 1.0, low=low))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.25)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + X @ w, 0.3), obs=y)


def init(case, model=None, **options):
    model = model or case.model
    nss.CAVI(model, nss.PairedGuide(model)).init(KEY, *case.args, **options)


def of_another_guide(case):
    guide = nss.PairedGuide(truth.two_model)
    handlers.seed(guide, 0)(*truth.two_case().args)
    nss.CAVI(case.model, guide).init(KEY, *case.args)


def of_another_inner_guide(case):
    guide = nss.PairedGuide(case.model, inner_guide=AutoNormal)
    run(nss.CAVI(case.model, guide), case)


def of_other_sizes(case):
    X, y = case.args
    svi = cavi(case)
    svi.update(svi.init(KEY, *case.args), X[:, :3], y)


def of_other_blocks(case):
    states = []
    for blocks in ([[0, 1]], [[0, 2]]):
        svi = nss.CAVI(case.model, nss.PairedGuide(case.model, blocks=blocks))
        states.append(svi.init(KEY, *case.args))
    svi.update(states[0], *case.args)


REFUSED = {
    "guide": (lambda c: nss.CAVI(c.model, AutoDelta(c.model)), r"got AutoDelta.*infer\.SVI"),
    "guide of another model": (of_another_guide, "site 'v_slab' is not there.*for one program"),
    "inner guide": (of_another_inner_guide, r"inner guide: got AutoNormal, expected AutoDelta"),
    "restarts": (lambda c: cavi(c, num_restarts=0), "num_restarts"),
    "temperature": (lambda c: cavi(c, temperature=2.0), r"step to a temperature, got 2\.0"),
    "plain": (lambda c: run(cavi(c, plain=True), c), "plain: got True for a model without latent"),
    "no steps": (lambda c: run(cavi(c), c, 0), "num_steps: got 0, expected a positive integer"),
    "half a step": (lambda c: run(cavi(c), c, 1.5), r"num_steps: got 1\.5"),
    "moving support": (lambda c: init(c, with_moving_support), "'level': got a support that dep"),
    "names": (lambda c: init(c, init_params={"w_loc": 0.0}), r"unknown names \['w_loc'\]"),
    "shape": (
        lambda c: init(c, init_params={"w_auto_loc": jnp.zeros(3)}),
        r"w_auto_loc'\]: got shape \(3,\), expected \(4,\)",
    ),
    "probability": (
        lambda c: init(c, init_params={"w_auto_probs": jnp.full(4, 1.5)}),
        r"probs'\]: got values that are not finite or not in the support",
    ),
    "scale": (lambda c: init(c, init_params={"w_auto_scale": -jnp.ones(4)}), "not in the supp"),
    "NaN": (lambda c: init(c, init_params={"w_auto_loc": jnp.full(4, jnp.nan)}), "not finite"),
    "other sizes": (of_other_sizes, "made for one program"),
    "state of other blocks": (of_other_blocks, r"init_state: got .*other blocks.*`init_params`"),
    "params before a call": (lambda c: cavi(c).get_params(cavi(c).init(KEY, *c.args)), "arguments"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_fit_does_not_take_is_refused(x64, unchecked_types, fixed, name):
    call, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call(fixed if name != "inner guide" else truth.scaled_case())


@pytest.mark.exhaustive
def test_latent_functions_are_refused_under_jit(x64):
    model, args, _ = function_models.MODELS["one latent function"]()
    svi = nss.CAVI(model, nss.PairedGuide(model))
    X, Y = args
    with pytest.raises(ValueError, match="cannot start under a transformation"):
        jax.jit(lambda Y: svi.get_params(svi.init(KEY, X, Y)))(Y)
    state = svi.init(KEY, *args)
    run = partial(svi.run, KEY, 3, *args, progress_bar=False)
    with pytest.raises(ValueError, match="cannot be fitted under a transformation"):
        jax.jit(lambda state: run(init_state=state).params)(state)
    new, loss = svi.update(state, *args)
    found, reached = jax.jit(lambda state: svi.update(state, *args))(state)
    same(svi.get_params(found), svi.get_params(new), 1e-9)
    np.testing.assert_allclose(reached, loss)
