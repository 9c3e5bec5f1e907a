# SPDX-License-Identifier: Apache-2.0
"""The interface of CAVI: that of SVI, its refusals, its warnings, what it compiles."""

from functools import partial
import logging
import pickle
import re
import time
import warnings

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
from numpyro.infer import SVI, Predictive, TraceGraph_ELBO
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_spikeslab as nss
from numpyro_spikeslab import datasets
from numpyro_spikeslab.fitting import ascent, run as run_module, slopes as following
from numpyro_spikeslab.reading.form import SHARED
from numpyro_spikeslab.reading.sites import param_name

KEY = random.key(0)


# The posterior


@pytest.mark.slow
def test_boston_starts_agree_when_annealed_and_restarts_find_the_same(x64):
    X, y, _ = datasets.boston_housing()
    exact = truth.enumerate_models(truth.regression(X, y, np.sqrt(0.1), 0.25, 1.0))
    # all 2^13 models, summed
    assert exact.log_evidence == pytest.approx(-548.9, abs=0.05)

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, jnp.sqrt(0.1)), obs=y)

    X, y = jnp.asarray(X), jnp.asarray(y)
    rng = np.random.default_rng(0)
    starts = {
        "w_auto_probs": jnp.asarray(rng.integers(0, 2, (30, 13)) * 0.98 + 0.01),
        "w_auto_loc": jnp.asarray(rng.normal(size=(30, 13))),
    }
    guide = nss.PairedGuide(model)

    def means(temperature):
        svi = nss.CAVI(model, guide, temperature=temperature)

        def run(start):
            result = svi.run(KEY, 200, X, y, init_params=start, progress_bar=False)
            return guide.posterior_mean(result.params)["w"], result.losses[-1]

        return jax.jit(jax.vmap(run))(starts)

    annealed, losses = means(nss.annealing)
    assert np.max(np.ptp(annealed, axis=0)) < 1e-6
    np.testing.assert_allclose(losses, 552.2, atol=0.05)
    assert np.abs(annealed[0] - exact.mean).sum() < 0.01
    plain, plain_losses = means(None)
    assert np.max(np.ptp(plain, axis=0)) > 0.01
    # neither exceeds the log evidence, and annealing finds the best of all bounds
    assert np.min(plain_losses) > np.max(losses) - 1e-6 > -exact.log_evidence

    # restarts find it from the worst of the starts
    worst = int(np.argmax(plain_losses))
    start = {k: x[worst] for k, x in starts.items()}
    svi = nss.CAVI(model, guide, temperature=None, num_restarts=20)
    result = svi.run(KEY, 200, X, y, init_params=start, progress_bar=False)
    assert plain_losses[worst] > losses[0] + 0.1
    assert result.losses[-1] < plain_losses[worst] - 0.1
    np.testing.assert_allclose(result.losses[-1], svi.evaluate(result.state, X, y), atol=1e-8)


# The interface of SVI


@pytest.fixture
def fixed():
    return truth.fixed_case()


def cavi(case, guide=nss.PairedGuide, **options):
    options = {"temperature": None} | options
    return nss.CAVI(case.model, guide(case.model), **options)


def run(svi, case, num_steps=20, **options):
    return svi.run(KEY, num_steps, *case.args, **{"progress_bar": False} | options)


def same(x, y, tolerance=1e-12):
    def compare(a, b):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = random.key_data(a), random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, x, y)


def test_a_run_goes_on_from_a_state(x64, fixed):
    svi = cavi(fixed, temperature=lambda step: jnp.maximum(5.0 * 0.9**step, 1.0))
    whole = run(svi, fixed, 60)
    with pytest.warns(UserWarning, match="temperature"):
        first = run(svi, fixed, 13)
    second = run(svi, fixed, 47, init_state=first.state)
    same(second.params, whole.params)
    same(jnp.concatenate([first.losses, second.losses]), whole.losses)
    assert int(second.state.optim_state[0]) == 60


def test_a_run_of_a_fresh_engine_goes_on_within_the_supports(x64, fixed):
    X, y = fixed.args

    def model(X, y):
        extra = numpyro.sample("extra", dist.Gamma(0.5, 1.0))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, jnp.sqrt(0.1 + extra)), obs=y)

    svi, fresh = (nss.CAVI(model, nss.PairedGuide(model), temperature=None) for _ in range(2))
    state = svi.run(KEY, 1, X, y, progress_bar=False).state
    whole, rest = (x.run(KEY, 20, X, y, init_state=state, progress_bar=False) for x in (svi, fresh))
    same((rest.params, rest.losses), (whole.params, whole.losses), 0)


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


def test_a_support_that_depends_on_other_sites_is_refused(fixed):
    def model(X, y):
        low = numpyro.sample("low", dist.HalfNormal(5.0))
        level = numpyro.sample("level", dist.TruncatedNormal(0.0, 1.0, low=low))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.25)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(level + X @ w, 0.3), obs=y)

    with pytest.raises(ValueError, match="support of 'level' depends on other sites"):
        nss.CAVI(model, nss.PairedGuide(model)).init(KEY, *fixed.args)


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


@pytest.mark.parametrize("num_obs", [20, 12])
def test_a_state_of_other_data_is_a_start_and_no_more(x64, fixed, num_obs):
    X, y = (x[:num_obs] for x in fixed.args)
    other = X[::-1, ::-1], 0.5 - 3 * y
    svi = cavi(fixed)
    kept = run(svi, fixed)
    expected = svi.run(KEY, 60, *other, progress_bar=False)
    found = svi.run(KEY, 60, *other, init_state=kept.state, progress_bar=False)
    same(found.params, expected.params, 1e-8)
    assert found.losses[-1] == pytest.approx(float(svi.evaluate(found.state, *other)), abs=1e-9)
    # data may be new in every step
    update = jax.jit(lambda state, *args: svi.update(state, *args))
    for args in (fixed.args, other, (other[0], y)):
        state, loss = update(kept.state, *args)
        assert loss == pytest.approx(float(svi.evaluate(state, *args)), abs=1e-9)


def test_updates_under_jit_are_those_of_a_run(x64, fixed):
    svi = cavi(fixed)
    result = run(svi, fixed, 5)
    state = svi.init(KEY, *fixed.args)
    update = jax.jit(lambda state: svi.update(state, *fixed.args))
    losses = []
    for _ in range(5):
        state, loss = update(state)
        losses.append(loss)
    same(jnp.stack(losses), result.losses, 1e-10)
    same(svi.get_params(state), result.params, 1e-10)
    assert loss == pytest.approx(float(svi.evaluate(state, *fixed.args)))


def test_a_state_may_be_donated(x64, fixed):
    """The guide's own starts are not in it, so the next fit has them."""
    svi = cavi(fixed)
    expected = run(svi, fixed, 2).losses
    update = jax.jit(lambda state: svi.update(state, *fixed.args), donate_argnums=0)
    update(svi.init(KEY, *fixed.args))
    same(run(svi, fixed, 2).losses, expected, 1e-10)


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
    with pytest.raises(ValueError, match=r"unknown names \['w_loc'\]"):
        svi.init(KEY, *fixed.args, init_params={"w_loc": jnp.zeros(4)})
    with pytest.raises(ValueError, match=r"w_auto_loc'\]: got shape \(3,\), expected \(4,\)"):
        run(svi, fixed, init_params={"w_auto_loc": jnp.zeros(3)})
    for name, value in (("probs", 1.5), ("scale", -1.0), ("loc", jnp.nan)):
        with pytest.raises(
            ValueError, match=rf"w_auto_{name}'\]: got values that are not finite or"
        ):
            run(svi, fixed, init_params={f"w_auto_{name}": jnp.full(4, value)})


@pytest.mark.slow
def test_restarts_keep_the_best_bound(x64):
    case = truth.param_case()
    single = run(cavi(case), case, 30)
    svi = cavi(case, num_restarts=20)
    best = run(svi, case, 30)
    assert best.losses.shape == (30,)
    assert {k: x.shape for k, x in best.params.items()} == {
        k: x.shape for k, x in single.params.items()
    }
    assert best.losses[-1] <= single.losses[-1] + 1e-9
    assert best.losses[-1] == pytest.approx(float(svi.evaluate(best.state, *case.args)), abs=1e-9)


def neighbours(sigma):
    """A model with noise of this scale, and data of columns that are like their neighbours."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(100, 30))
    for j in range(1, 30):
        X[:, j] = 0.95 * X[:, j - 1] + np.sqrt(1 - 0.95**2) * X[:, j]
    y = X[:, 5] + X[:, 12] - X[:, 15] + sigma * rng.normal(size=100)

    def model(X, y=None):
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.1, 1.0)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)

    return model, X, y


@pytest.mark.slow
def test_restarts_of_an_annealed_fit_begin_cold(x64):
    """Hot ones would all end where the first does."""
    model, X, y = neighbours(2.0)

    def fit(num_steps=150, number=10, **options):
        svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=number)
        return svi.run(KEY, num_steps, X, y, progress_bar=False, **options)

    single, best = fit(number=1), fit()
    assert best.restarts[0] == pytest.approx(float(-single.losses[-1]), abs=1e-8)
    assert np.ptp(best.restarts) > 0.5 and np.max(best.restarts) > best.restarts[0] + 0.1
    assert float(-best.losses[-1]) == pytest.approx(np.max(best.restarts))
    again = fit(5, 1, init_state=best.state)
    assert again.losses[-1] <= best.losses[-1] + 1e-9
    # a run that is too short for the schedule has no cold steps; the next one has
    with pytest.warns(UserWarning, match="at temperature"):
        half = fit(60, 1)
    rest = fit(60, init_state=half.state)
    assert rest.restarts[0] == pytest.approx(float(-single.losses[-1]), abs=1e-3)
    assert np.ptp(rest.restarts) > 0.5


def test_a_best_bound_that_one_start_alone_has_found_is_told(x64):
    model, X, y = neighbours(0.5)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=2)
    with pytest.warns(UserWarning, match="num_restarts=4"):
        result = svi.run(KEY, 150, X, y, progress_bar=False)
    assert np.ptp(result.restarts) > 5


@pytest.mark.parametrize("bounds", [None, [1.0], [1.0, np.nan], [1.0, -np.inf], [1.0, -3.9, -90.0]])
def test_starts_that_say_nothing_of_others_are_not_told(bounds):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_module.check_starts(None if bounds is None else np.array(bounds))


def test_a_run_stops_when_the_bound_has_settled(x64, fixed):
    svi = cavi(fixed)
    assert run(svi, fixed).converged is None
    stopped = run(svi, fixed, 500, tol=1e-6)
    assert bool(stopped.converged) and 2 < len(stopped.losses) < 500
    changes = np.abs(np.diff(stopped.losses))
    assert changes[-1] <= 1e-6 < changes[:-1].min()
    assert int(stopped.state.optim_state[0]) == len(stopped.losses)
    unfinished = run(svi, fixed, 3, tol=0.0)
    assert not bool(unfinished.converged) and len(unfinished.losses) == 3
    # with a bar a run is cut into pieces
    same(run(svi, fixed, 500, tol=1e-6, progress_bar=True).losses, stopped.losses)


def test_a_hot_run_neither_stops_nor_ends_silently(x64, fixed):
    svi = cavi(fixed, temperature=lambda step: jnp.where(step < 30, 2.0, 1.0))
    with pytest.warns(UserWarning, match="ended after step 30 at temperature 2"):
        hot = run(svi, fixed, 30, tol=1e6)
    assert len(hot.losses) == 30 and not bool(hot.converged)
    assert len(run(svi, fixed, 100, tol=1e6).losses) == 31
    # the default cools down in 100 steps
    assert float(nss.annealing(0)) == pytest.approx(20.0)
    assert nss.annealing(98) > 1.0 == nss.annealing(99) == nss.annealing(1000)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_hot_run_is_told_where_data_are_traced(fixed, transform):
    svi = cavi(fixed, temperature=nss.annealing)

    def fit(y, num_steps, **options):
        return svi.run(KEY, num_steps, X, y, progress_bar=False, **options).losses

    X, y = fixed.args
    y = y[None] if transform is jax.vmap else y
    with pytest.warns(UserWarning, match="ended after step 10 at temperature 15"):
        transform(lambda y: fit(y, 10))(y)
    with pytest.warns(UserWarning, match="at temperature"):
        half = run(svi, fixed, 60).state
    with pytest.warns(UserWarning, match="ended after step 70 at"):
        transform(lambda y: fit(y, 10, init_state=half))(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transform(lambda y: fit(y, 40, init_state=half))(y)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_schedule_may_be_made_of_traced_values(x64, fixed, transform):
    X, y = fixed.args

    def last(y, start):
        svi = cavi(fixed, temperature=lambda step: jnp.maximum(start * 0.97**step, 1.0))
        return svi.run(KEY, 150, X, y, progress_bar=False).losses[-1]

    args = (y[None], jnp.array([20.0])) if transform is jax.vmap else (y, 20.0)
    expected = run(cavi(fixed, temperature=nss.annealing), fixed, 150).losses[-1]
    np.testing.assert_allclose(transform(last)(*args), expected, rtol=1e-9)


@pytest.mark.parametrize("double", [True, False], ids=["to float64", "to float32"])
@pytest.mark.parametrize(
    "kind",
    [
        "regression",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("functions", "batches")),
    ],
)
# of an array in double precision that is read in single
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_a_state_goes_on_in_the_other_precision(restored_x64, fixed, kind, double):
    jax.config.update("jax_enable_x64", not double)
    svi, args = cavi(fixed), fixed.args
    if kind != "regression":
        model = nss.models.mtmkl("white", 2)
        num_tasks = 3 if kind == "batches" else None
        svi = nss.CAVI(model, nss.PairedGuide(model), num_tasks=num_tasks)
        args = np.arange(6.0), np.random.default_rng(0).normal(size=(6, 3))
    state = svi.init(KEY, *args)
    for _ in range(2):
        state, _ = svi.update(state, *args)
    expected = float(svi.evaluate(state, *args))
    jax.config.update("jax_enable_x64", double)
    assert float(svi.evaluate(state, *args)) == pytest.approx(expected, rel=1e-4)
    new, loss = svi.update(state, *args)
    assert loss <= expected + 1e-4 * abs(expected)
    dtypes = {x.dtype.name for x in jax.tree.leaves(svi.get_params(new))}
    assert dtypes == {"float64" if double else "float32"}
    if kind == "regression":
        assert run(svi, fixed, 20, init_state=state).losses[-1] <= loss + 1e-4 * abs(expected)


def compilations(caplog):
    """Names of what was compiled, but for the copy of losses, which have the length of the run."""
    names = re.findall(r"Compiling jit\((.*?)\)", "\n".join(caplog.messages))
    return [name for name in names if name != "stage"]


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


@pytest.mark.parametrize("num_steps", [1, 45])
def test_the_progress_bar_changes_nothing(x64, fixed, num_steps, capsys):
    svi = cavi(fixed)
    silent = run(svi, fixed, num_steps)
    assert capsys.readouterr().err == ""
    same(run(svi, fixed, num_steps, progress_bar=True), silent)
    assert f"{num_steps}/{num_steps}" in capsys.readouterr().err


def test_only_the_guides_of_this_package_are_taken(x64, unchecked_types, fixed):
    with pytest.raises(TypeError, match=r"got AutoDelta.*numpyro\.infer\.SVI"):
        nss.CAVI(fixed.model, AutoDelta(fixed.model))
    with pytest.raises(ValueError, match="num_restarts"):
        cavi(fixed, num_restarts=0)
    with pytest.raises(ValueError, match="num_steps"):
        run(cavi(fixed), fixed, 0)
    with pytest.raises(ValueError, match=r"num_steps: got 1\.5, expected a positive integer"):
        run(cavi(fixed), fixed, 1.5)
    with pytest.raises(ValueError, match=r"map a step to a temperature, got 2\.0"):
        cavi(fixed, temperature=2.0)
    with pytest.raises(ValueError, match="`plain` has no effect on a model without latent"):
        run(cavi(fixed, plain=True), fixed)


def test_stable_updates_are_updates(x64, fixed):
    svi = cavi(fixed)
    same(run(svi, fixed, 5, stable_update=True), run(svi, fixed, 5))
    state = svi.init(KEY, *fixed.args)
    same(svi.stable_update(state, *fixed.args), svi.update(state, *fixed.args))


def test_another_number_of_steps_compiles_nothing(x64, fixed, caplog):
    svi = cavi(fixed)
    run(svi, fixed, 3)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        some, many = run(svi, fixed, 7), run(svi, fixed, 150, tol=-1.0)
    assert (len(some.losses), len(many.losses)) == (7, 150)
    assert not compilations(caplog)


# Other data, other models, other precisions


def test_a_guide_of_another_model_is_refused(fixed):
    guide = nss.PairedGuide(truth.two_model)
    svi = nss.CAVI(fixed.model, guide)
    two = truth.two_case()
    handlers.seed(guide, 0)(*two.args)
    for use in (svi.init, svi.run):
        steps = () if use == svi.init else (3,)
        with pytest.raises(ValueError, match=r"site 'v_slab' is not there.*made for one program"):
            use(KEY, *steps, *fixed.args)


@pytest.mark.slow
def test_data_of_other_sizes_are_fitted(x64):
    case = truth.param_case()
    X, y = case.args
    svi = cavi(case)
    first = run(svi, case)
    kept = svi.guide.sample_posterior(KEY, first.params, X, y)
    for args in ((X[:15], y[:15]), (X[:, :3], y)):
        result = svi.run(KEY, 20, *args, progress_bar=False)
        alone = cavi(case).run(KEY, 20, *args, progress_bar=False)
        same(result.losses, alone.losses)
        same(result.params, alone.params)
        assert result.params["w_auto_loc"].shape == args[0].shape[1:]
        draws = svi.guide.sample_posterior(KEY, result.params, *args)
        assert draws["w"].shape == args[0].shape[1:]
    same(svi.guide.sample_posterior(KEY, first.params, X, y), kept)
    same(run(svi, case).losses, first.losses)
    with pytest.raises(ValueError, match=r"init_state: got a state of other data.*`init_params`"):
        svi.update(first.state, X[:, :3], y)


def test_a_pickle_keeps_the_default_temperature(x64, fixed):
    svi = nss.CAVI(fixed.model, nss.PairedGuide(fixed.model))
    copy = pickle.loads(pickle.dumps(svi))
    same(run(copy, fixed, 120).losses, run(svi, fixed, 120).losses)


def test_precision_may_change_between_runs(fixed):
    X, y = (np.asarray(x) for x in fixed.args)
    svi = nss.CAVI(fixed.model, nss.PairedGuide(fixed.model), temperature=None)
    found = []
    for x64 in (False, True, False):
        jax.config.update("jax_enable_x64", x64)
        args = jnp.asarray(X, float), jnp.asarray(y, float)
        found.append(svi.run(KEY, 20, *args, progress_bar=False))
        dtype = jnp.dtype(float if x64 else np.float32)
        assert {x.dtype for x in found[-1].params.values()} == {dtype}
    np.testing.assert_allclose(found[1].losses, found[0].losses, rtol=1e-5)
    np.testing.assert_array_equal(found[2].losses, found[0].losses)


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


def test_known_data_of_tasks_are_read_under_jit_as_outside(x64):
    case = truth.CASES["shared features with a mask"]()
    found = jax.jit(lambda: fresh_updates(case, *case.args))()
    same(found, fresh_run(case, *case.args).params, 1e-9)


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


# Interruptions and warnings


def interrupted(monkeypatch, calls):
    """Ctrl-C in the middle of the call after so many."""
    real, count = ascent.advance, [0]

    def advance(*args):
        count[0] += 1
        if count[0] > calls:
            raise KeyboardInterrupt
        return real(*args)

    for module in (ascent, run_module):
        monkeypatch.setattr(module, "advance", advance)


@pytest.mark.parametrize("num_restarts", [1, 3])
def test_an_interrupted_run_returns_its_last_state(x64, fixed, monkeypatch, num_restarts):
    svi = cavi(fixed, num_restarts=num_restarts)
    whole = run(svi, fixed, 200)
    interrupted(monkeypatch, 2)
    with pytest.warns(UserWarning, match="interrupted; its last state is the result"):
        part = run(svi, fixed, 200)
    assert len(part.losses) == 128 and int(part.state.optim_state[0]) == 128
    if num_restarts == 1:
        same(part.losses, whole.losses[:128])
    np.testing.assert_allclose(svi.evaluate(part.state, *fixed.args), part.losses[-1])
    monkeypatch.undo()
    rest = run(svi, fixed, 72, init_state=part.state)
    np.testing.assert_allclose(rest.losses[-1], whole.losses[-1], atol=1e-9)


def test_a_run_interrupted_before_its_first_steps_has_no_result(x64, fixed, monkeypatch):
    interrupted(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        run(cavi(fixed), fixed)


@pytest.mark.slow
def test_an_interrupted_run_of_latent_functions_returns_its_best_state(x64, monkeypatch):
    model, args, _ = function_models.MODELS["one latent function"]()
    svi = nss.CAVI(model, nss.PairedGuide(model))
    # in the first round of moves of the second start
    whole = svi.run(KEY, 40, *args, progress_bar=False)
    interrupted(monkeypatch, 2)
    with pytest.warns(UserWarning, match="interrupted"):
        part = svi.run(KEY, 40, *args, progress_bar=False)
    np.testing.assert_allclose(svi.evaluate(part.state, *args), part.losses[-1])
    assert 0 < len(part.losses) < 40 and part.losses[-1] >= whole.losses[-1] - 1e-6


def correlated(num_obs=200, size=10):
    rng = np.random.default_rng(0)
    X = np.sqrt(0.05) * rng.normal(size=(num_obs, size)) + rng.normal(size=(num_obs, 1))
    y = X @ np.linspace(-2.0, 2.0, size) + 0.5 * rng.normal(size=num_obs)
    return jnp.asarray(X), jnp.asarray(y)


def test_a_run_that_has_not_settled_says_so(x64):
    X, y = correlated()
    svi = nss.CAVI(truth.noise_model, nss.PairedGuide(truth.noise_model), temperature=None)
    with pytest.warns(UserWarning, match="the bound still moves at the end of the run, by"):
        part = svi.run(KEY, 10, X, y, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest = svi.run(KEY, 2000, X, y, init_state=part.state, tol=1e-6, progress_bar=False)
    assert bool(rest.converged) and rest.losses[-1] < part.losses[-1] - 1.0


def test_a_bound_that_is_no_number_is_an_error(x64, fixed):
    svi = cavi(fixed)
    with pytest.raises(FloatingPointError, match="the bound is not a number after step 3"):
        run(svi, fixed, 3, init_params={"w_auto_loc": jnp.full(4, 1e200)})


# Many tasks


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


def test_a_guide_with_an_inner_autonormal_is_for_svi_alone(x64):
    case = truth.scaled_case()
    guide = nss.PairedGuide(case.model, inner_guide=AutoNormal)
    with pytest.raises(ValueError, match=r"AutoNormal.*AutoDelta"):
        run(nss.CAVI(case.model, guide), case)
    svi = SVI(case.model, guide, optax.adam(0.02), TraceGraph_ELBO())
    result = svi.run(KEY, 1000, *case.args, progress_bar=False)
    losses = np.asarray(result.losses)
    assert losses[-100:].mean() < losses[:20].mean() - 5.0
    assert {"sigma_auto_loc", "sigma_auto_scale", "w_auto_probs"} <= set(result.params)


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


# Columns of a mean that is large beside their spread


def year_model(X, y=None, prior=dist.Normal):
    level = numpyro.sample("level", prior(0.0, 100.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + X @ w, sigma), obs=y)


def test_a_column_of_years_is_found_beside_an_intercept(precision):
    """And the bound is as high as where a fit begins at the truth."""
    rng = np.random.default_rng(0)
    year = np.repeat(np.arange(1950.0, 2000.0), 4)
    X = np.column_stack([year, rng.normal(size=(200, 4))])
    y = 0.02 * (year - 1975) + X[:, 1] + 3 + 0.5 * rng.normal(size=200)
    args = jnp.asarray(X), jnp.asarray(y)
    guide = nss.PairedGuide(year_model)
    svi = nss.CAVI(year_model, guide)
    result = svi.run(KEY, 200, *args, progress_bar=False)
    truth_ = {
        "w_auto_probs": jnp.array([1.0, 1.0, 0.01, 0.01, 0.01]),
        "w_auto_loc": jnp.array([0.02, 1.0, 0.0, 0.0, 0.0]),
        "level_auto_loc": jnp.array(3 - 0.02 * 1975),
        "sigma_auto_loc": jnp.array(0.5),
    }
    cold = nss.CAVI(year_model, guide, temperature=None)
    from_truth = cold.run(KEY, 200, *args, init_params=truth_, progress_bar=False)
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found[:2], 1.0, atol=0.01)
    assert np.all(found[2:] < 0.2)
    assert result.losses[-1] <= from_truth.losses[-1] + 0.02
    least_squares = np.linalg.lstsq(np.column_stack([X[:, :2], np.ones(200)]), y, rcond=None)[0]
    assert guide.posterior_mean(result.params)["w"][0] == pytest.approx(least_squares[0], abs=2e-3)
    if precision == "float64":
        assert np.all(np.diff(from_truth.losses) < 1e-8)
        reached = float(svi.evaluate(result.state, *args))
        assert reached == pytest.approx(float(result.losses[-1]), abs=1e-8)


def tasks_of_years(X, Y=None):
    """With one intercept for all."""
    level = numpyro.sample("level", dist.Normal(0.0, 100.0))
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate("task", 3, dim=-1):
        numpyro.sample("y", dist.Normal(level + X @ w.T, 0.5), obs=Y)


def dummies(num_obs=200, seed=2):
    """Zeros and ones, of which few are zeros in the first and the last column."""
    rng = np.random.default_rng(seed)
    X = (rng.random((num_obs, 3)) < [0.95, 0.5, 0.97]) * 1.0
    return X, 0.45 * X[:, 0] + 0.3 * X[:, 1] + 0.8 * rng.normal(size=num_obs)


def level_model(X, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 100.0))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(level + X @ w, 0.8), obs=y)


def fitted(X, y, model=level_model, blocks=None):
    guide = nss.PairedGuide(model, blocks=blocks)
    svi = nss.CAVI(model, guide, temperature=None)
    args = jnp.asarray(X), jnp.asarray(y)
    return guide, svi, svi.run(KEY, 100, *args, progress_bar=False), args


@pytest.mark.parametrize("shift", [0.0, 1.0, 30.0])
def test_one_block_of_all_columns_is_exact_whatever_their_means(precision, shift):
    """For an intercept with a wide prior is integrated out as it is in the marginal likelihood."""
    X, y = dummies()
    X = X + shift
    # what an intercept with the scale 100 adds to the covariance, as a column of its own
    with_level = np.column_stack([X, 100 * np.ones(len(X))])
    problem = truth.regression(with_level, y, 0.8, np.array([0.3] * 3 + [1 - 1e-12]), 1.0)
    exact = truth.enumerate_models(problem)
    guide, _, result, _ = fitted(X, y, blocks=[[0, 1, 2]])
    tolerance = {"float32": 2e-3, "float64": 1e-5}[precision]
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, exact.inclusion[:3], atol=tolerance)


def groups_model(X, y=None, spread=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    scale = 0.5 if spread is None else numpyro.sample("spread", spread)
    with numpyro.plate("group", 8):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", 0.3)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Normal(effect[np.arange(len(X)) % 8] + X @ w, 0.8), obs=y)


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_one_block_is_exact_where_the_mean_of_intercepts_has_a_prior_too(precision, shift):
    """Held at one value, it would hold the intercepts."""
    X, y = dummies()
    X = X + shift
    columns = np.column_stack([X, np.ones(len(X)), np.eye(8)[np.arange(len(X)) % 8]])
    inclusion, scales = [0.3] * 3 + [1 - 1e-12] * 9, [1.0] * 3 + [10.0] + [0.5] * 8
    exact = truth.enumerate_models(truth.regression(columns, y, 0.8, inclusion, scales))
    guide, _, result, _ = fitted(X, y, model=groups_model, blocks=[[0, 1, 2]])
    tolerance = {"float32": 2e-3, "float64": 1e-5}[precision]
    found = guide.inclusion_probabilities(result.params)["w"]
    np.testing.assert_allclose(found, exact.inclusion[:3], atol=tolerance)


def test_dummies_and_their_complements_have_the_same_fit(precision):
    X, y = dummies()
    every = X, 1 - X, X - np.mean(X, axis=0)
    found = [fitted(x, y)[2].params["w_auto_probs"] for x in every]
    tolerance = {"float32": 2e-3, "float64": 1e-4}[precision]
    np.testing.assert_allclose(found[1], found[0], atol=tolerance)
    np.testing.assert_allclose(found[2], found[0], atol=tolerance)


@pytest.mark.parametrize(
    ("model", "slopes", "blocks"),
    [
        (level_model, "level_auto_slope", None),
        pytest.param(level_model, "level_auto_slope", [[0, 2]], marks=pytest.mark.slow),
        (groups_model, "mean_auto_slope", None),
    ],
)
def test_the_bound_of_what_follows_is_that_of_the_guide(x64, model, slopes, blocks):
    guide, svi, result, args = fitted(*dummies(), model=model, blocks=blocks)

    @jax.jit
    def estimate(params):
        def particle(key):
            return -TraceGraph_ELBO().loss(key, params, model, guide, *args)

        particles = jax.vmap(particle)(random.split(KEY, 20_000))
        return jnp.mean(particles), jnp.std(particles) / jnp.sqrt(20_000)

    # at the optimum and away from it, where other slopes count
    for params in (result.params, result.params | {slopes: 0.7 * result.params[slopes]}):
        state = svi.init(KEY, *args, init_params=params)
        mean, error = estimate(params)
        # six comparisons at 4.5 standard errors: a false alarm in 1 of 24000 keys
        assert abs(mean + svi.evaluate(state, *args)) < 4.5 * error < 0.3


def test_slopes_of_a_fit_are_at_their_maximum(x64):
    _, svi, result, args = fitted(*dummies())

    def loss(slopes):
        params = result.params | {"level_auto_slope": slopes}
        return svi.evaluate(svi.init(KEY, *args, init_params=params), *args)

    slopes = result.params["level_auto_slope"]
    for k in range(3):
        step = 1e-3 * jnp.eye(3)[k]
        assert loss(slopes + step) > loss(slopes) < loss(slopes - step)


def test_draws_follow_their_weights(precision):
    X, y = dummies()
    guide, _, result, args = fitted(X, y)
    fresh = nss.PairedGuide(level_model)
    for of in (guide, fresh):
        draws = of.sample_posterior(random.key(3), result.params, *args, sample_shape=(500,))
        params = {name: np.asarray(x, float) for name, x in result.params.items()}
        mean = params["w_auto_probs"] * params["w_auto_loc"]
        expected = params["level_auto_loc"] + (draws["w"] - mean) @ params["level_auto_slope"]
        np.testing.assert_allclose(draws["level"], expected, rtol=1e-4, atol=1e-5)
        assert np.std(draws["level"]) > 0.05
    # new data have other slopes, the guide those of the fit
    new = Predictive(level_model, guide=fresh, params=result.params, num_samples=500)
    assert np.all(np.isfinite(new(random.key(3), args[0][:7])["y"]))


@pytest.mark.slow
def test_coefficients_in_a_plate_of_their_own_follow_too(x64):
    """No site of the weights is in this plate."""
    rng = np.random.default_rng(0)
    X, Z = jnp.asarray(rng.normal(size=(30, 3)) + 2), jnp.asarray(rng.normal(size=(30, 2)))
    y = X[:, 0] + Z[:, 0] + jnp.asarray(rng.normal(size=30))

    def model(X, Z, y=None):
        with numpyro.plate("covariate", Z.shape[1]):
            c = numpyro.sample("c", dist.Normal(0.0, 1.0))
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", dist.Normal(Z @ c + X @ w, 1.0), obs=y)

    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    result = svi.run(KEY, 50, X, Z, y, progress_bar=False)
    fresh = nss.PairedGuide(model)
    new = Predictive(model, guide=fresh, params=result.params, num_samples=7)(KEY, X, Z)
    assert new["y"].shape == (7, 30)
    estimate = jax.jit(TraceGraph_ELBO(num_particles=4000).loss, static_argnums=(2, 3))
    loss = estimate(KEY, result.params, model, fresh, X, Z, y)
    # its standard error is 0.01 and less
    assert abs(loss - result.losses[-1]) < 0.05


def tasks_model(X, Y, plate="task", apart=False):
    """:param plate: of the intercepts.
    :param apart: whether each task has features of its own, (N, Q, M).
    """
    (N, Q), M = Y.shape, X.shape[-1]
    with numpyro.plate(plate, Q, dim=-1):
        level = numpyro.sample("level", dist.Normal(1.0, 3.0))
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", M, dim=-1):
        W = nss.spike_slab("W", 0.3, 0.8)
    with numpyro.plate("obs", N, dim=-2), numpyro.plate("task", Q, dim=-1):
        location = level + (jnp.einsum("nqm,qm->nq", X, W) if apart else X @ W.T)
        numpyro.sample("Y", dist.Normal(location, 0.5), obs=Y)


@pytest.mark.parametrize(
    ("plate", "apart"),
    [
        ("task", False),
        ("other", True),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in (("other", False), ("task", True))),
    ],
)
def test_tasks_beside_intercepts_of_their_own_are_regressions(x64, plate, apart):
    """Whatever the plate of the intercepts, on which the shape of their slopes depends."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2)) + [0.0, 4.0]
    Y = X @ rng.normal(size=(2, 3)) * [1.0, 0.3, 0.1] + 0.5 * rng.normal(size=(30, 3))
    model = partial(tasks_model, plate=plate, apart=apart)
    given = np.repeat(X[:, None], 3, axis=1) if apart else X
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, temperature=None)
    result = svi.run(KEY, 200, jnp.asarray(given), jnp.asarray(Y), progress_bar=False)
    assert result.params["level_auto_slope"].shape == (3, 2 if plate == "task" else 6)

    def one_task(X, y):
        with numpyro.plate("feature", 2):
            w = nss.spike_slab("w", 0.3, 0.8)
        level = numpyro.sample("level", dist.Normal(1.0, 3.0))
        with numpyro.plate("obs", 30):
            numpyro.sample("y", dist.Normal(level + X @ w, 0.5), obs=y)

    alone = nss.PairedGuide(one_task)
    svi = nss.CAVI(one_task, alone, temperature=None)
    total, slopes = 0.0, np.asarray(result.params["level_auto_slope"])
    if plate != "task":
        slopes = np.stack([slopes[q].reshape(3, 2)[q] for q in range(3)])
    mean, levels = guide.posterior_mean(result.params)["W"], result.params["level_auto_loc"]
    for q in range(3):
        one = svi.run(KEY, 200, jnp.asarray(X), jnp.asarray(Y[:, q]), progress_bar=False)
        total += float(one.losses[-1])
        expected = alone.posterior_mean(one.params)["w"]
        np.testing.assert_allclose(mean[q], expected, atol=1e-6)
        np.testing.assert_allclose(levels[q], one.params["level_auto_loc"], atol=1e-6)
        np.testing.assert_allclose(slopes[q], one.params["level_auto_slope"], atol=1e-6)
    assert float(result.losses[-1]) == pytest.approx(total, abs=1e-7)
    draws = guide.sample_posterior(KEY, result.params, given, Y, sample_shape=(50,))
    expected = levels + np.einsum("sqm,qm->sq", draws["W"] - mean, slopes)
    np.testing.assert_allclose(draws["level"], expected, atol=1e-8)


def test_slopes_that_a_fit_has_not_are_not_handed_back(x64):
    """Beside tasks a coefficient that all of them share does not follow, so the bound is that of
    slopes of zero."""
    rng = np.random.default_rng(0)
    X, T = rng.normal(size=(8, 2)) + 1, np.linspace(-1, 1, 8)
    Y = X @ rng.normal(size=(2, 3)) + T[:, None] + 0.5 * rng.normal(size=(8, 3))

    def model(Y):
        trend = numpyro.sample("trend", dist.Normal(0.0, 1.0))
        with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", 2, dim=-1):
            W = nss.spike_slab("W", 0.4)
        with numpyro.plate("obs", 8, dim=-2), numpyro.plate("task", 3, dim=-1):
            location = X @ W.T + trend * T[:, None]
            numpyro.sample("Y", dist.Normal(location, 0.7), obs=Y)

    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    plain = svi.run(KEY, 60, Y, progress_bar=False)
    slopes = plain.params | {"trend_auto_slope": jnp.full(6, 0.3)}
    state = svi.init(KEY, Y, init_params=slopes)
    np.testing.assert_array_equal(svi.get_params(state)["trend_auto_slope"], np.zeros(6))
    assert svi.evaluate(state, Y) == svi.evaluate(svi.init(KEY, Y, init_params=plain.params), Y)
    result = svi.run(KEY, 10, Y, init_params=slopes, progress_bar=False)
    np.testing.assert_array_equal(result.params["trend_auto_slope"], np.zeros(6))


def test_where_there_are_too_many_slopes_none_follows(x64, monkeypatch):
    monkeypatch.setattr(following, "MAX_SLOPES", 2)
    _, _, result, _ = fitted(*dummies())
    assert set(result.params) == {"level_auto_loc", "w_auto_probs", "w_auto_loc", "w_auto_scale"}


def test_gradients_find_the_slopes(x64):
    guide, _, result, args = fitted(*dummies())
    slopes = result.params["level_auto_slope"]
    by_gradient = SVI(level_model, guide, optax.adam(0.02), TraceGraph_ELBO(num_particles=20))
    start = result.params | {"level_auto_slope": jnp.zeros(3)}
    end = by_gradient.run(KEY, 1000, *args, init_params=start, progress_bar=False)
    np.testing.assert_allclose(end.params["level_auto_slope"], slopes, atol=0.1)
    np.testing.assert_allclose(end.params["w_auto_probs"], result.params["w_auto_probs"], atol=0.1)


# Noise that is small beside the observations


def noise_model(X, Y=None):
    Q = 1 if Y is None or Y.ndim == 1 else Y.shape[1]
    with numpyro.plate("column", Q, dim=-1):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    if Q == 1:
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", 0.3)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("Y", dist.Normal(X @ w, sigma), obs=Y)
        return
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", X.shape[1], dim=-1):
        W = nss.spike_slab("W", 0.3)
    with numpyro.plate("obs", X.shape[0], dim=-2), numpyro.plate("column", Q, dim=-1):
        numpyro.sample("Y", dist.Normal(X @ W.T, sigma), obs=Y)


@pytest.mark.parametrize("units", [1e-5, (1.0, 1e-5)])
def test_single_precision_knows_noise_a_hundred_thousandth_of_the_rest(units):
    """Of a column; of a task, that of another in a smaller unit is as well known."""
    rng = np.random.default_rng(0)
    X, noise = rng.normal(size=(200, 3)), rng.normal(size=(200, np.size(units)))
    if np.size(units) == 1:
        Y, expected = X[:, 0] + units * noise[:, 0], units * np.std(noise)
    else:
        Y, expected = np.asarray(units) * (X[:, :1] + noise), units * np.std(noise, axis=0)
    args = jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32)
    svi = nss.CAVI(noise_model, nss.PairedGuide(noise_model))
    result = svi.run(KEY, 150, *args, progress_bar=False)
    np.testing.assert_allclose(result.params["sigma_auto_loc"], expected, rtol=0.05)


def test_observations_that_are_all_zero_have_little_noise(precision):
    svi = nss.CAVI(noise_model, nss.PairedGuide(noise_model))
    X = random.normal(KEY, (20, 3))
    result = svi.run(KEY, 150, X, jnp.zeros(20), progress_bar=False)
    assert 0 < result.params["sigma_auto_loc"] < 1e-6 and np.all(np.isfinite(result.losses))
