# SPDX-License-Identifier: Apache-2.0
"""The interface of CAVI: that of SVI, supports, starts, traced data, what it compiles, refusals."""

from functools import partial
import logging

from fits import KEY, cavi, compilations, estimator_of_the_bound, run, same
import numpy as np
import pytest
from refusals import refusals
import truth
from truth import function_models

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoDelta

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.sites import param_name


@pytest.fixture
def fixed():
    return truth.fixed_case()


def regression(location=0.0, noise=0.3, inclusion=0.25, slab=1.0):
    """A model of X and y, and a function of them and more arguments for each part of it."""

    def model(X, y, *args):
        parts = [x(X, *args) if callable(x) else x for x in (location, noise, inclusion, slab)]
        truth.respond(y, parts[0] + X @ truth.weights(X.shape[1], *parts[2:]), parts[1])

    return model


BOUNDS = {"noise": (1.0, 5.0), "inclusion": (0.05, 0.15), "slab": (2.0, 5.0)}


@pytest.mark.parametrize("kind", ["param", "improper"])
def test_sites_with_a_role_keep_their_constraints(x64, fixed, kind):
    def value(name, _):
        support = dist.constraints.interval(*BOUNDS[name])
        if kind == "param":
            return numpyro.param(name, np.mean(BOUNDS[name]), constraint=support)
        return numpyro.sample(name, dist.ImproperUniform(support, (), ()))

    X = fixed.args[0]
    model = regression(**{name: partial(value, name) for name in BOUNDS})
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    # effects and noise are smaller than the constraints allow
    params = svi.run(KEY, 200, X, X @ jnp.full(X.shape[1], 0.5), progress_bar=False).params
    ends = [params[param_name(name, "auto", params)] for name in BOUNDS]
    np.testing.assert_allclose(ends, [1.0, 0.15, 2.0], rtol=1e-3)


def test_a_value_that_rounding_puts_on_the_boundary_stays_a_number(x32):
    """Others climb with it."""
    X = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)

    def location(X):
        level = numpyro.sample("level", dist.Uniform(1000.0, 1001.0))
        return (level - 1000.0) ** numpyro.sample("power", dist.Gamma(2.0, 1.0))

    model = regression(location, noise=0.1)
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    result = svi.run(KEY, 30, X, X[:, 0] + 3.0, progress_bar=False)
    assert result.params["level_auto_loc"] == 1001.0
    assert np.all(np.diff(result.losses) <= 1e-2) and np.all(np.isfinite(result.losses))


def test_supports_are_those_of_the_data(x64, fixed):
    """A guide has those of its first call."""
    X, y = fixed.args
    model = regression(lambda X, most: numpyro.sample("level", dist.Uniform(0.0, most)))

    def fit(svi, most):
        params = svi.run(KEY, 100, X, y + 5.0, most, progress_bar=False).params
        return params["level_auto_loc"]

    alone = [fit(nss.CAVI(model, nss.PairedGuide(model)), most) for most in (3.0, 10.0)]
    assert alone[0] == pytest.approx(3.0, abs=1e-3) and 4.0 < alone[1] < 6.0
    svi = nss.CAVI(model, nss.PairedGuide(model))
    np.testing.assert_allclose([fit(svi, most) for most in (10.0, 3.0, 10.0)][1:], alone, atol=1e-6)
    traced = jax.vmap(partial(fit, nss.CAVI(model, nss.PairedGuide(model))))(jnp.array([3.0, 10.0]))
    np.testing.assert_allclose(traced, alone, atol=1e-6)


def test_a_guide_takes_the_slab_scale_from_the_data(x64, fixed):
    X, y = fixed.args
    model = regression(noise=0.5, inclusion=0.3, slab=lambda X, scale: scale)
    svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
    estimate = estimator_of_the_bound(model, svi.guide)
    for scale in (jnp.array(1.0), jnp.array(5.0)):
        result = svi.run(KEY, 50, X, y, scale, progress_bar=False)
        mean, error = estimate(result.params, X, y, scale)
        # two comparisons at 4.5 standard errors: a false alarm in 1 of 73000 keys
        assert abs(mean + result.losses[-1]) < 4.5 * error < 0.5


def test_options_of_svi_change_nothing(x64, fixed):
    svi, forward = cavi(fixed), dict(forward_mode_differentiation=True)
    same(run(svi, fixed, 5, stable_update=True, **forward), run(svi, fixed, 5))
    state = svi.init(KEY, *fixed.args)
    same(svi.stable_update(state, *fixed.args, **forward), svi.update(state, *fixed.args))


def test_states_hold_no_data_and_may_be_donated(x64, fixed):
    """Neither data nor the guide's own starts are in a state."""
    (X, y), svi = fixed.args, cavi(fixed)
    expected, state = run(svi, fixed, 2).losses, svi.init(KEY, *fixed.args)
    update = jax.jit(lambda state, *args: svi.update(state, *args), donate_argnums=0)
    for args in (fixed.args, (X[::-1, ::-1], 0.5 - 3 * y), (X[:12], y[:12])):
        state, loss = update(state, *args)
        assert loss == pytest.approx(float(svi.evaluate(state, *args)), abs=1e-9)
    same(run(svi, fixed, 2).losses, expected, 1e-10)


def test_fits_may_be_mapped_over_data_and_starts(x64, fixed):
    svi, (X, y) = cavi(fixed), fixed.args
    responses = jnp.stack([y, -y, 2.0 * y])
    # other parameters have their usual start
    starts = {"w_auto_probs": jnp.array([[0.9] * 4, [0.1, 0.2, 0.3, 0.4], [0.5] * 4])}
    params = svi.get_params(svi.init(KEY, X, y, init_params={k: x[1] for k, x in starts.items()}))
    assert params["w_auto_probs"].tolist() == [0.1, 0.2, 0.3, 0.4]
    assert params["w_auto_loc"].tolist() == [0.0] * 4

    def fit(y, start):
        result = svi.run(KEY, 20, X, y, init_params=start, tol=None, progress_bar=False)
        return result.losses, result.params

    batch = jax.jit(jax.vmap(fit))(responses, starts)
    for i in range(3):
        alone = fit(responses[i], {k: x[i] for k, x in starts.items()})
        same(jax.tree.map(lambda x, i=i: x[i], batch), alone, 1e-10)


def test_what_is_fresh_may_be_used_first_under_jit(x64):
    case = truth.param_case()

    def losses(*args):
        svi = cavi(case)
        _, loss = svi.update(svi.init(KEY, *args), *args)
        return loss, svi.run(KEY, 5, *args, progress_bar=False).losses

    expected = losses(*case.args)
    same(jax.jit(losses)(*case.args), expected, 1e-9)
    same(jax.jit(lambda: losses(*case.args))(), expected, 1e-9)
    # and nothing of it stays behind
    svi = cavi(case)
    jax.jit(lambda *args: svi.get_params(svi.init(KEY, *args)))(*case.args)
    same(run(svi, case, 5).losses, expected[1])


@pytest.mark.exhaustive
def test_steps_of_latent_functions_may_be_jitted_but_no_start_and_no_run(x64):
    model, (X, Y), _ = function_models.MODELS["one latent function"]()
    svi = nss.CAVI(model, nss.PairedGuide(model))
    with pytest.raises(ValueError, match="start or a run of latent functions within jit"):
        jax.jit(lambda Y: svi.get_params(svi.init(KEY, X, Y)))(Y)
    state = svi.init(KEY, X, Y)
    run = partial(svi.run, KEY, 3, X, Y, progress_bar=False)
    with pytest.raises(ValueError, match="start or a run of latent functions within jit"):
        jax.jit(lambda state: run(init_state=state).params)(state)
    new, loss = svi.update(state, X, Y)
    jitted, loss_under_jit = jax.jit(lambda state: svi.update(state, X, Y))(state)
    same(svi.get_params(jitted), svi.get_params(new), 1e-9)
    np.testing.assert_allclose(loss_under_jit, loss)


def test_new_data_and_another_number_of_steps_compile_nothing(x64, caplog):
    case = truth.param_case()
    svi = cavi(case)

    def use(num_steps, *args, **options):
        result = svi.run(KEY, num_steps, *args, progress_bar=False, **options)
        svi.evaluate(result.state, *args)
        return result.losses, svi.update(result.state, *args)[1]

    X, y = case.args
    new = jnp.asarray(truth.design("independent")), y + 1.0
    first = use(3, X, y)[1]
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        losses, second = use(150, *new, tol=-1.0)
    assert not compilations(caplog)
    assert first != second and len(losses) == 150
    # the counter counts
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        jax.jit(lambda x: x + 2.0)(y)
    assert compilations(caplog)


def init(model=truth.fixed_model, **init_params):
    args, svi = truth.fixed_case().args, nss.CAVI(model, nss.PairedGuide(model))
    svi.init(KEY, *args, init_params=init_params)


def moving_level(X):
    low = numpyro.sample("low", dist.HalfNormal(5.0))
    return numpyro.sample("level", dist.TruncatedNormal(0.0, 1.0, low=low))


def of_other_blocks(blocks, use, case):
    def fit(blocks):
        return nss.CAVI(case.model, nss.PairedGuide(case.model, blocks=blocks))

    getattr(fit(blocks), use)(fit([[0, 1]]).init(KEY, *case.args), *case.args)


OF_BLOCKS = r"init_state: got .*other blocks.*`init_params`"
REFUSED = [
    (lambda c: nss.CAVI(c.model, AutoDelta(c.model)), r"got AutoDelta.*infer\.SVI"),
    (lambda c: cavi(c, num_restarts=0), "num_restarts"),
    (lambda c: cavi(c, temperature=2.0), r"got 2\.0, expected a function of the step"),
    (lambda c: run(cavi(c, plain=True), c), "plain: got True for a model without latent"),
    (lambda c: run(cavi(c), c, 0), "num_steps: got 0, expected a positive integer"),
    (lambda c: run(cavi(c), c, 1.5), r"num_steps: got 1\.5"),
    (lambda _: init(regression(moving_level)), "'level': got a support"),
    (lambda _: init(w_loc=0.0), r"\['w_loc'\]: got an unknown name"),
    (lambda _: init(w_auto_loc=np.zeros(3)), r"shape \(3,\), expected \(4,\)"),
    (lambda _: init(w_auto_probs=np.full(4, 1.5)), r"w_auto_probs'\]: got .* not in the support"),
    (lambda _: init(w_auto_scale=-np.ones(4)), "not in the support"),
    (lambda _: init(w_auto_loc=np.full(4, np.nan)), "not finite"),
    (partial(of_other_blocks, [[0, 2]], "update"), OF_BLOCKS),
    (partial(of_other_blocks, None, "evaluate"), OF_BLOCKS),
    # before a call
    (lambda c: cavi(c).get_params(cavi(c).init(KEY, *c.args)), "arguments"),
]


test_what_a_fit_does_not_take_is_refused = pytest.mark.usefixtures("x64")(
    refusals(REFUSED, lambda call, fixed: call(fixed), "fixed")
)
