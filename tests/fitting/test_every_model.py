# SPDX-License-Identifier: Apache-2.0
"""The contract of fits: what is true of every family of guides and every kind of model."""

from functools import cache, partial
import pickle
from typing import Any

import arviz_base
from fits import KEY, estimator_of_the_bound, same
import numpy as np
import pytest
import truth
from truth import function_models, joint_noise, likelihood_models
from truth.grouped_models import GROUPED

import jax
import jax.numpy as jnp

from numpyro import handlers
from numpyro.infer import Predictive

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import rounds
from numpyro_spikeslab.fitting.run import CAVIRunResult

OBSERVED = ("y", "Y")
# parameters of sets of two weights
OF_SETS = ("_patterns_2", "_linear_2", "_precision_tril_2")
NUM_DRAWS = 2000

CASES = truth.CASES | joint_noise.CASES | likelihood_models.MODELS
NAMES = [
    *(f"paired: {name}" for name in CASES),
    "blocks: classes with an intercept, missing and repeated",
    "standard: classes with an intercept, missing and repeated",
    *(f"groups: {name}" for name in GROUPED),
    "blocks: latent hyperparameters",
    "blocks: offset, mask, counts and scales",
    "standard: offset, mask, counts and scales",
    "standard: latent hyperparameters of tasks",
    *(f"functions: {name}" for name in function_models.MODELS),
]
NONLINEAR = [name for name in NAMES if name.partition(": ")[2] in likelihood_models.MODELS]
NONLINEAR += ["functions: classes", "functions: entries that are numbers of trials"]
ENUMERATED = [name for name in NAMES if not name.startswith("functions")]
FUNCTIONS = [
    "functions: entries of a table",
    "functions: one function of one task",
    "functions: a parameter that is held",
    "functions: white functions",
]
# claims that the others show: less is in these models, or they are functions like those above
EXHAUSTIVE = [
    "paired: fixed hyperparameters",
    "paired: tasks",
    "paired: generalised least squares",
    "paired: summary statistics",
    "paired: probit of tasks",
    *(name for name in NAMES if name not in ENUMERATED + FUNCTIONS),
]


# the tests of a model share a fit, whose seconds are those of the first one, so these are told here
QUICK = [
    "paired: params",
    "paired: offset, mask, counts and scales",
    "standard: offset, mask, counts and scales",
    "groups: of weights",
    "blocks: latent hyperparameters",
]


def every_model(*names: str) -> pytest.MarkDecorator:
    def marks(name: str) -> Any:
        if name in EXHAUSTIVE:
            return pytest.mark.exhaustive
        return () if name in QUICK else pytest.mark.slow

    params = [pytest.param(name, marks=marks(name)) for name in names or NAMES]
    # one model after the other, for the tests of a model share what is compiled
    return pytest.mark.parametrize("name", params, scope="module")


class Fit:
    """A model with its fit at temperature 1 and without moves, from a start far from optimal."""

    def __init__(self, name: str) -> None:
        family, _, kind = name.partition(": ")
        self.mixes = family == "functions"
        cases: Any = function_models.MODELS if self.mixes else CASES
        make, self.groups, blocks = GROUPED.get(kind) or (cases[kind], None, None)
        self.source = source = make()
        self.model, self.args = source.model, source.args
        self.make_guide = {
            "standard": nss.MeanFieldGuide,
            "blocks": partial(nss.PairedGuide, blocks=[[0, 2]]),
        }.get(family, partial(nss.PairedGuide, blocks=blocks))
        self.guide = self.make_guide(self.model)
        self.svi = nss.CAVI(self.model, self.guide, temperature=None)
        self.first = self.svi.init(KEY, *self.args)
        if not self.mixes:
            start = {k: scramble(k, x) for k, x in self.svi.get_params(self.first).items()}
            self.first = self.svi.init(KEY, *self.args, init_params=start)
        self.start = self.svi.get_params(self.first)
        with pytest.MonkeyPatch.context() as patch:
            # or else a long run would make moves
            patch.setattr(rounds, "STAGE", 10**9)
            self.result = self.run(400, self.first, tol=None)
            self.stopped = self.run(400, self.first)
        self.params = self.result.params

    def run(self, num_steps: int, state: Any, **options: Any) -> CAVIRunResult:
        options |= {"init_state": state, "progress_bar": False}
        return self.svi.run(KEY, num_steps, *self.args, **options)

    def bound(self, params: dict[str, Any]) -> float:
        state = self.svi.init(KEY, *self.args, init_params=params)
        return -float(self.svi.evaluate(state, *self.args))

    def is_supported(self, param: str, value: Any) -> bool:
        if param.endswith("_auto_slope"):
            return True
        trace = handlers.trace(handlers.seed(self.model, 0)).get_trace(*self.args)
        site = trace[param if param in trace else param.removesuffix("_auto_loc")]
        support = site["fn"].support if site["type"] == "sample" else site["kwargs"]["constraint"]
        return bool(np.all(support(value)))

    def latents(self, params: dict[str, Any]) -> dict[str, np.ndarray]:
        """Values of the model's other sites and params, by the names the model gives them."""
        return {k: np.asarray(x, float) for k, x in (params | self.guide.median(params)).items()}

    def best_bound(self, params: dict[str, Any]) -> float | None:
        """What no bound at these hyperparameters can exceed, where it is known."""
        latents = self.latents(params)
        if isinstance(self.source, likelihood_models.Density | likelihood_models.Tasks):
            normal = self.source.normal if self.guide.follows else ()
            slopes = {k: np.asarray(params[f"{k}_auto_slope"], float) for k in normal}
            mean = np.asarray(self.guide.posterior_mean(params)["w"], float)
            return self.source.log_evidence(latents, slopes, mean)
        if self.guide.blocks is not None and self.source.normal:
            return None
        if not self.mixes and self.source.normal and self.guide.follows:
            slopes = {k: np.asarray(params[f"{k}_auto_slope"], float) for k in self.source.normal}
            mean = self.source.joined(self.guide.posterior_mean(params))
            return truth.of_weights_alone(self.source, latents, slopes, mean)
        if not self.mixes:
            exact = truth.enumerate_models(self.source.regression(latents))
            exact = truth.share_spikes(exact, self.groups) if self.groups else exact
            return exact.log_evidence + self.source.log_prior(latents)
        log_evidence = self.source.log_evidence
        return None if log_evidence is None else log_evidence(latents)

    @property
    def new_args(self) -> tuple:
        Y = self.args[-1]
        # classes stay classes
        return *self.args[:-1], 1.0 - 2.0 * Y if self.is_normal else Y[..., ::-1]

    @property
    def is_normal(self) -> bool:
        return self.svi._call(self.args, {}).reading.form.likelihood.is_fixed

    def location(self, values: dict[str, Any], args: tuple) -> np.ndarray:
        model = handlers.substitute(handlers.seed(self.model, 0), values)
        trace = handlers.trace(model).get_trace(*args)
        (site,) = (site for name, site in trace.items() if name in OBSERVED)
        return np.asarray(site["fn"].mean)

    def summaries(self, args: tuple) -> dict[str, Any]:
        numbers = self.guide.quantiles(self.params, [0.1, 0.9], *args)
        means = self.guide.posterior_mean(self.params, *args)
        if self.mixes:
            numbers["tasks"] = jnp.stack(self.guide.predict(self.params, *args))
        return numbers | {f"{k}_mean": x for k, x in means.items()}


def scramble(name: str, x: Any) -> Any:
    rng = np.random.default_rng(len(name))
    if name.endswith("_probs"):
        return jnp.asarray(rng.uniform(0.1, 0.9, x.shape), x.dtype)
    if name.endswith(("w_auto_loc", "W_auto_loc", "v_auto_loc", "slab_auto_loc")):
        return jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype)
    if name.endswith(OF_SETS[0]):
        return jnp.asarray(rng.dirichlet(np.ones(x.shape[1]), len(x)), x.dtype)
    if name.endswith(OF_SETS[1]):
        return jnp.asarray(x + 0.3 * rng.normal(size=x.shape), x.dtype)
    if name.endswith("_scale_tril"):
        return jnp.asarray(np.diag(np.diag(x)) + np.tril(0.2 * rng.normal(size=x.shape), -1))
    return 0.8 * x


@cache
def fitted(name: str) -> Fit:
    """In float64; made once for all tests."""
    assert jax.config.jax_enable_x64
    return Fit(name)


@every_model()
def test_the_bound_is_the_mean_of_its_monte_carlo_estimates(x64, name):
    fit = fitted(name)
    # places of entries may not be traced
    programs = (partial(program, *fit.args) for program in (fit.model, fit.guide))
    estimate = estimator_of_the_bound(*programs, 4_000 if fit.mixes else 20_000)
    for params, accuracy in ((fit.start, 3.0), (fit.params, 0.1)):
        mean, error = estimate(params)
        if not fit.is_normal:
            # a bound on the bound
            assert fit.bound(params) < mean + 4.5 * error
            continue
        # 58 comparisons at 4.5 standard errors: a false alarm in 1 of 2600 keys
        assert abs(mean - fit.bound(params)) < 4.5 * error < 4.5 * accuracy


@every_model()
def test_parameters_say_all_of_a_state(x64, name):
    fit = fitted(name)
    for state in (fit.first, fit.result.state):
        bound, params = -float(fit.svi.evaluate(state, *fit.args)), fit.svi.get_params(state)
        again = fit.svi.init(KEY, *fit.args, init_params=params)
        assert -fit.svi.evaluate(again, *fit.args) == pytest.approx(bound, abs=1e-7)
        same(fit.svi.get_params(again), params, 1e-6)
    assert fit.result.losses[-1] == pytest.approx(-bound, abs=1e-8)


@every_model()
def test_the_bound_never_falls_at_temperature_one(x64, name):
    fit = fitted(name)
    losses = np.asarray(fit.result.losses)
    assert losses.shape == (400,) and np.all(np.isfinite(losses))
    # but for rounding
    assert np.max(np.diff(losses)) < 1e-9
    assert losses[-1] < losses[0] < -fit.bound(fit.start)


@every_model()
def test_steps_after_the_default_stop_change_nothing(x64, name):
    fit = fitted(name)
    number = np.sum(np.isfinite(np.asarray(fit.args[-1], float)))
    gain = fit.stopped.losses[-1] - fit.result.losses[-1]
    assert -1e-9 < gain < 1e-3 * number
    same(fit.stopped.losses, fit.result.losses[: len(fit.stopped.losses)])


@every_model(*ENUMERATED, "functions: one function of one task")
def test_the_bound_never_exceeds_the_log_evidence(x64, name):
    fit = fitted(name)
    if fit.best_bound(fit.params) is None:
        return
    for params in (fit.start, fit.params):
        assert fit.bound(params) < fit.best_bound(params) + 1e-9
    # and a fit comes close
    assert fit.bound(fit.params) > fit.best_bound(fit.params) - 4.0


OF_FACTORS = (
    *OF_SETS,
    "_probs",
    *(f"{name}_auto_{part}" for name in "wWv" for part in ("loc", "scale")),
    "slab_auto_loc",
    "_scale_tril",
    "phi_auto_precision",
    "phi_auto_linear",
)


@every_model()
def test_no_hyperparameter_can_be_improved_at_the_end(x64, name):
    fit = fitted(name)
    params = fit.params
    free = [k for k in params if not k.endswith(OF_FACTORS)]
    assert bool(free) != (not fit.mixes and fit.source.linear)
    for k in free:
        of_kernel = k.startswith("phi_")
        for where in np.ndindex(params[k].shape):
            # a slope may be near zero
            step = 1e-3 if k.endswith("_slope") else 1e-4 * abs(float(params[k][where]))
            below, at, above = (
                fit.bound({**params, k: moved}) if fit.is_supported(k, moved) else -np.inf
                for moved in (params[k].at[where].add(change) for change in (-step, 0.0, step))
            )
            if not np.isfinite([below, above]).all():
                # a maximum at the end of the prior's support
                assert np.nanmax([below, above]) <= at
                continue
            slope, curvature = (above - below) / 2.0, below - 2.0 * at + above
            if max(abs(slope), abs(curvature)) < 1e-12:
                # a probability that has gone to the end of its support: flat to rounding
                assert params[k][where] < 1e-12
                continue
            assert curvature < 0.0, (k, where)
            # nats that a Newton step would gain; the search over kernels' parameters takes rests
            assert slope**2 / (2.0 * abs(curvature)) < (1e-3 if of_kernel else 1e-6), (k, where)


@every_model()
def test_squares_are_those_of_the_moments_of_each_observation(x64, name):
    fit = fitted(name)
    call, state = fit.svi._call(fit.args, {}), fit.result.state
    engine, posterior = call.engine, state.optim_state[1]
    at = engine.view(posterior)
    mean, variance = engine.features.moments(engine, at, posterior)
    each = jnp.broadcast_to(at.relative, at.Y.shape) * ((at.Y - mean) ** 2 + variance)
    expected = engine.features.squares(engine, at, posterior)
    np.testing.assert_allclose(at.layout.by_task(each), expected, rtol=1e-8, atol=1e-8)


# a product may differ in its last bit
ROUNDING = 1e-13


@every_model()
def test_updates_and_runs_in_pieces_are_one_run(x64, name):
    fit = fitted(name)
    whole = fit.run(7, fit.first, tol=None)
    state, loss = fit.svi.update(fit.first, *fit.args)
    same(loss, whole.losses[0], ROUNDING)
    looped, losses = jax.lax.scan(
        lambda state, _: fit.svi.update(state, *fit.args), state, length=6
    )
    same(losses, whole.losses[1:], ROUNDING)
    same(fit.svi.get_params(looped), whole.params, ROUNDING)
    first = fit.run(3, fit.first, tol=None)
    last = fit.run(4, first.state, tol=None)
    same(jnp.concatenate([first.losses, last.losses]), whole.losses, ROUNDING)
    same(last.params, whole.params, ROUNDING)
    assert int(last.state.optim_state[0]) == 7


@every_model()
def test_a_fit_of_other_data_leaves_the_old_one_alone(x64, name):
    fit = fitted(name)
    old = jax.tree.map(np.array, fit.params)
    before = fit.summaries(fit.args)
    bound = fit.svi.evaluate(fit.result.state, *fit.args)
    other = fit.svi.run(KEY, 3, *fit.new_args, init_params=fit.start, progress_bar=False)
    # some have no entries: all weights of a site are in sets
    for k, x in old.items():
        assert not (k.endswith("auto_loc") and x.size and np.all(np.asarray(other.params[k]) == x))
    same(fit.params, old, 0.0)
    same(fit.summaries(fit.args), before, 0.0)
    same(fit.svi.evaluate(fit.result.state, *fit.args), bound, 0.0)


@every_model()
def test_pickles_are_the_same(x64, name):
    fit = fitted(name)
    guide, svi, result = pickle.loads(pickle.dumps((fit.guide, fit.svi, fit.first)))
    assert type(guide) is type(fit.guide)
    expected = fit.guide.posterior_mean(fit.params, *fit.args)
    same(guide.posterior_mean(fit.params, *fit.args), expected, 0.0)
    state, loss = svi.update(result, *fit.args)
    same((state, loss), fit.svi.update(fit.first, *fit.args), 0.0)
    copied = pickle.loads(pickle.dumps(fit.result))
    assert type(copied) is CAVIRunResult
    same(svi.evaluate(copied.state, *fit.args), -fit.bound(fit.params), 1e-8)


@every_model()
def test_single_precision_agrees_with_double(name):
    jax.config.update("jax_enable_x64", True)
    double = fitted(name)
    start = jax.tree.map(lambda x: np.asarray(x, np.float32), double.start)
    results = {}
    for precision in ("float64", "float32"):
        jax.config.update("jax_enable_x64", precision == "float64")
        args = tuple(np.asarray(x) for x in double.args)
        args = tuple(jnp.asarray(x, float) if x.dtype.kind == "f" else x for x in args)
        # a guide is made in one precision
        svi = nss.CAVI(double.model, double.make_guide(double.model), temperature=None)
        begin = jax.tree.map(jnp.asarray, start)
        result = svi.run(KEY, 8, *args, init_params=begin, progress_bar=False)
        assert {x.dtype for x in (*result.params.values(), result.losses)} == {jnp.dtype(precision)}
        results[precision] = result
    single, double = results["float32"], results["float64"]
    np.testing.assert_allclose(single.losses, double.losses, rtol=1e-3, atol=1e-2)
    for k, x in double.params.items():
        np.testing.assert_allclose(
            single.params[k], x, rtol=1e-2, atol=1e-2 * np.max(np.abs(x), initial=0.0)
        )


# ArviZ reads a model with an array of counts once
COUNTED = [x for x in NAMES if "repeated" in x or ("counts and scales" in x and "paired" not in x)]


@every_model(*(name for name in NAMES if name not in COUNTED))
def test_arviz_takes_the_fit(x64, name):
    fit = fitted(name)
    data = arviz_base.from_numpyro_svi(
        fit.svi, svi_result=fit.result, model_args=fit.args, num_samples=NUM_DRAWS
    )["posterior"]
    means = fit.guide.posterior_mean(fit.params, *fit.args)
    assert ("phi" in means) == fit.mixes
    for site, mean in means.items():
        assert data[site].dims[0] == "sample" and data[site].shape[1:] == mean.shape
        error = data[site].values.std(axis=0) / np.sqrt(NUM_DRAWS)
        # some 200 numbers at five standard errors: a false alarm in 1 of 8000 keys
        assert np.all(np.abs(data[site].values.mean(axis=0) - mean) < 5.0 * error + 1e-6)


# of classes and counts the mean is not where the means of all sites are
@every_model(*(name for name in NAMES if name not in NONLINEAR))
def test_predictive_draws_have_the_mean_of_the_fit(x64, name):
    fit = fitted(name)
    args = (*fit.args[:-1], None)
    predictive = Predictive(fit.model, guide=fit.guide, params=fit.params, num_samples=NUM_DRAWS)
    draws = next(x for k, x in predictive(KEY, *args).items() if k in OBSERVED)
    values = fit.params | fit.guide.median(fit.params)
    for site, mean in fit.guide.posterior_mean(fit.params, *fit.args).items():
        values |= {site: mean, f"{site}_slab": mean, f"{site}_spike": jnp.ones(mean.shape, int)}
    error = np.std(draws, axis=0) / np.sqrt(NUM_DRAWS)
    assert np.all(np.abs(np.mean(draws, axis=0) - fit.location(values, args)) < 5.0 * error)
