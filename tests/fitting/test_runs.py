# SPDX-License-Identifier: Apache-2.0
"""Runs of CAVI: restarts, temperatures, convergence, interruptions and warnings."""

from contextlib import nullcontext
import pickle
import re
import weakref

from fits import KEY, cavi, run, same
import numpy as np
import pytest
import truth
from truth import function_models

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab import datasets
from numpyro_spikeslab.fitting import ascent, rounds, run as run_module


@pytest.fixture
def fixed():
    return truth.fixed_case()


def regression(sigma, inclusion):
    return lambda X, y=None: truth.respond(y, X @ truth.weights(X.shape[1], inclusion), sigma)


def test_restarts_find_what_the_worst_of_starts_does_not(x64):
    """On the Boston housing data, of whose annealed starts test_examples has all claims."""
    X, y, _ = datasets.boston_housing()
    model, X, y = regression(np.sqrt(0.1), 0.25), jnp.asarray(X), jnp.asarray(y)
    rng = np.random.default_rng(0)
    starts = {
        "w_auto_probs": jnp.asarray(rng.integers(0, 2, (30, 13)) * 0.98 + 0.01),
        "w_auto_loc": jnp.asarray(rng.normal(size=(30, 13))),
    }

    def fit(start, num_restarts=1):
        svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None, num_restarts=num_restarts)
        result = svi.run(KEY, 200, X, y, init_params=start, progress_bar=False)
        return result.losses[-1], svi.evaluate(result.state, X, y)

    losses, _ = jax.jit(jax.vmap(fit))(starts)
    worst = int(np.argmax(losses))
    best, bound = fit({k: x[worst] for k, x in starts.items()}, 20)
    assert best < losses[worst] - 0.1
    np.testing.assert_allclose(best, bound, atol=1e-8)


def neighbours(sigma):
    """A model with noise of this scale, and data of columns that are like their neighbours."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(100, 30))
    for j in range(1, 30):
        X[:, j] = 0.95 * X[:, j - 1] + np.sqrt(1 - 0.95**2) * X[:, j]
    return regression(sigma, 0.1), X, X[:, 5] + X[:, 12] - X[:, 15] + sigma * rng.normal(size=100)


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
    second = fit(60, init_state=half.state)
    assert second.restarts[0] == pytest.approx(float(-single.losses[-1]), abs=1e-3)
    assert np.ptp(second.restarts) > 0.5


def test_a_best_bound_that_one_start_alone_has_found_is_told(x64):
    model, X, y = neighbours(0.5)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=2)
    with pytest.warns(UserWarning, match="num_restarts=4"):
        result = svi.run(KEY, 150, X, y, progress_bar=False)
    assert np.ptp(result.restarts) > 5


@pytest.mark.filterwarnings("error")
def test_starts_that_say_nothing_of_others_are_not_told():
    for bounds in (None, [1.0], [1.0, np.nan], [1.0, -np.inf], [1.0, -3.9, -90.0]):
        starts = bounds and rounds.Starts(np.array(bounds), np.zeros(len(bounds), bool))
        run_module.check_starts(starts, None)


def learnt(X, y=None):
    """A model that learns everything of its sparsity."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    inclusion = numpyro.sample("inclusion", dist.Beta(1.0, X.shape[1] / 5 - 1))
    truth.respond(y, X @ truth.weights(X.shape[1], inclusion, scale), sigma)


def of_cauchy(X, y=None):
    """Of a scale without a closed mode, in units of the noise, and log odds."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0)) * sigma
    log_odds = numpyro.sample("log_odds", dist.Normal(-5.0, 1.0))
    weights = truth.weights(X.shape[1], jax.nn.sigmoid(log_odds), scale)
    truth.respond(y, X @ weights, sigma)


def more_columns_than_rows(seed):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(100, 1000))
    y = X[:, :4] @ [1.0, -0.9, 0.8, 0.35] + 0.8 * rng.normal(size=100)
    return (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()


def check_that_it_is_not_empty(model, rise):
    """As the best of other starts, though it learns probability and scale."""
    X, y = more_columns_than_rows(3)
    guide = nss.PairedGuide(model)
    # the first start is the annealed one, and here the best
    svi = nss.CAVI(model, guide, num_restarts=2)
    result = svi.run(KEY, 150, jnp.asarray(X), jnp.asarray(y), tol=None, progress_bar=False)
    assert result.restarts[0] > result.restarts[1] - 0.1
    probs = np.asarray(guide.inclusion_probabilities(result.params)["w"])
    np.testing.assert_array_equal(np.flatnonzero(probs > 0.5), [0, 1, 2])
    # the bound is exact and never falls at temperature 1
    assert np.max(np.diff(result.losses[99:])) < rise


def test_an_annealed_fit_of_more_columns_than_rows_is_not_empty(precision):
    check_that_it_is_not_empty(learnt, 1e-9 if precision == "float64" else 1e-2)


def test_nor_is_one_of_other_sites_than_scale_and_probability(x64):
    check_that_it_is_not_empty(of_cauchy, 1e-9)


def test_a_fit_without_weights_tells_of_starts_with_some(x64):
    """Two like columns, which do much together and nothing alone, are less likely than none."""
    rng = np.random.default_rng(0)
    common, own = rng.normal(size=(2, 60))
    X, y = np.stack([common + 0.2 * own, common - 0.2 * own], axis=1), 0.6 * own
    y = y + 0.5 * rng.normal(size=60)
    odds = {14: (2, None), 18: (0, r"of 10 starts, with a bound of -85\.7, includes no weight")}

    def model(X, y):
        truth.respond(y, X @ truth.weights(2, inclusion, 2.0), 0.5)

    for number, (size, message) in odds.items():
        inclusion, guide = 1 / (1 + np.exp(number)), nss.PairedGuide(model)
        svi = nss.CAVI(model, guide, num_restarts=10, temperature=None)
        with pytest.warns(UserWarning, match=message) if message else nullcontext():
            result = svi.run(KEY, 100, jnp.asarray(X), jnp.asarray(y), progress_bar=False)
        assert np.sum(np.asarray(guide.inclusion_probabilities(result.params)["w"]) > 0.5) == size


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("effect", [0.0, 1.0])
def test_a_scale_at_which_the_data_say_nothing_is_told(x64, effect):
    rng = np.random.default_rng(2)
    X = rng.normal(size=(40, 20))
    y = effect * X[:, 0] + rng.normal(size=40)
    svi = nss.CAVI(learnt, nss.PairedGuide(learnt))
    message = "the scale 'scale' has fallen to 0.0"
    with nullcontext() if effect else pytest.warns(UserWarning, match=message):
        svi.run(KEY, 200, jnp.asarray(X), jnp.asarray(y), progress_bar=False)


def test_a_run_goes_on_from_a_state(x64, fixed):
    svi = cavi(fixed, temperature=lambda step: jnp.maximum(5.0 * 0.9**step, 1.0))
    whole = run(svi, fixed, 60, tol=None)
    with pytest.warns(UserWarning, match="temperature"):
        first = run(svi, fixed, 13)
    second = run(svi, fixed, 47, init_state=first.state, tol=None)
    same(second.params, whole.params)
    same(jnp.concatenate([first.losses, second.losses]), whole.losses)
    assert int(second.state.optim_state[0]) == 60


def test_a_run_stops_when_the_bound_has_settled(x64, fixed):
    svi = cavi(fixed)
    whole = run(svi, fixed, 500, tol=None)
    assert whole.converged is None and len(whole.losses) == 500
    for options, tol in (({}, 1e-7), ({"tol": 1e-4}, 1e-4)):
        stopped = run(svi, fixed, 500, **options)
        assert bool(stopped.converged) and 2 < len(stopped.losses) < 500
        changes = np.abs(np.diff(stopped.losses)) / len(fixed.args[1])
        assert changes[-1] <= tol < changes[:-1].min()
        assert int(stopped.state.optim_state[0]) == len(stopped.losses)
        same(stopped.losses, whole.losses[: len(stopped.losses)])
    unfinished = run(svi, fixed, 3, tol=0.0)
    assert not bool(unfinished.converged) and len(unfinished.losses) == 3


def test_a_run_leaves_a_plateau(x64):
    """Its slowest step gains 1e-5 nats per observation, and all after it 0.15."""
    case = truth.CASES["one latent inclusion of two"]()
    svi = cavi(case)
    end = float(run(svi, case, 300).losses[-1])
    assert end == pytest.approx(float(run(svi, case, 300, tol=None).losses[-1]), abs=1e-3)
    assert run(svi, case, 300, tol=1.3e-5).losses[-1] > end + 3.0


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
def test_data_and_schedules_may_be_traced_and_a_hot_run_is_told(x64, fixed, transform):
    X, y = fixed.args

    def last(y, start, num_steps=150, **options):
        svi = cavi(fixed, temperature=lambda step: jnp.maximum(start * 0.97**step, 1.0))
        return svi.run(KEY, num_steps, X, y, progress_bar=False, **options).losses[-1]

    def losses(num_steps, **options):
        return transform(lambda y: last(y, 20.0, num_steps, **options))(args[0])

    args = (y[None], jnp.array([20.0])) if transform is jax.vmap else (y, 20.0)
    expected = run(cavi(fixed, temperature=nss.annealing), fixed, 150).losses[-1]
    np.testing.assert_allclose(transform(last)(*args), expected, rtol=1e-9)
    with pytest.warns(UserWarning, match="ended after step 10 at temperature 15"):
        losses(10)
    with pytest.warns(UserWarning, match="at temperature"):
        half = run(cavi(fixed, temperature=nss.annealing), fixed, 60).state
    with pytest.warns(UserWarning, match="ended after step 70 at"):
        losses(10, init_state=half)
    # warnings are errors
    losses(40, init_state=half)


def test_a_pickle_keeps_the_default_temperature(x64, fixed):
    svi = nss.CAVI(fixed.model, nss.PairedGuide(fixed.model))
    same(run(pickle.loads(pickle.dumps(svi)), fixed, 120).losses, run(svi, fixed, 120).losses)


def test_the_progress_bar_moves_and_changes_nothing(x64, fixed, capsys, monkeypatch):
    svi, places = cavi(fixed, num_restarts=2), []
    silent = run(svi, fixed, 150, tol=None)
    assert capsys.readouterr().err == ""
    same(run(svi, fixed, 150, tol=None, progress_bar=True), silent)
    assert "150/150" in capsys.readouterr().err
    run(svi, fixed, 400, progress_bar=True)
    assert re.search(r"100%.* (\d+)/\1 ", capsys.readouterr().err)
    monkeypatch.setattr(run_module.tqdm, "update", lambda _, n: places.append(n))
    run(svi, fixed, 150, tol=None, progress_bar=True)
    # this bar stays at 0
    assert places == [64, 128, 150]


def interrupted(monkeypatch, calls):
    """Ctrl-C in the middle of the call after so many."""
    real, count = ascent.advance, [0]

    def advance(*args):
        count[0] += 1
        if count[0] > calls:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(ascent, "advance", advance)


@pytest.mark.parametrize("num_restarts", [1, 3])
def test_an_interrupted_run_returns_its_last_state(x64, fixed, monkeypatch, num_restarts):
    svi = cavi(fixed, num_restarts=num_restarts)
    whole = run(svi, fixed, 200, tol=None)
    with monkeypatch.context() as patch:
        interrupted(patch, 0)
        # there is none
        with pytest.raises(KeyboardInterrupt):
            run(svi, fixed, 200, tol=None)
    interrupted(monkeypatch, 2)
    with pytest.warns(UserWarning, match="interrupted; its last state is the result"):
        part = run(svi, fixed, 200, tol=None)
    assert len(part.losses) == 128 and int(part.state.optim_state[0]) == 128
    if num_restarts == 1:
        same(part.losses, whole.losses[:128])
    np.testing.assert_allclose(svi.evaluate(part.state, *fixed.args), part.losses[-1])
    monkeypatch.undo()
    end = run(svi, fixed, 72, init_state=part.state)
    np.testing.assert_allclose(end.losses[-1], whole.losses[-1], atol=1e-9)


def test_an_interrupted_run_of_latent_functions_returns_its_best_state(x64, monkeypatch):
    case = function_models.MODELS["one latent function"]()
    svi = cavi(case)
    whole = run(svi, case, 40)
    # in the first round of moves of the second start
    interrupted(monkeypatch, 2)
    with pytest.warns(UserWarning, match="interrupted"):
        part = run(svi, case, 40)
    np.testing.assert_allclose(svi.evaluate(part.state, *case.args), part.losses[-1])
    assert 0 < len(part.losses) < 40 and part.losses[-1] >= whole.losses[-1] - 1e-6


@pytest.mark.parametrize("num_restarts", [1, 3])
def test_a_run_of_many_stages_holds_few_posteriors(x64, monkeypatch, num_restarts):
    """Those of all stages would be gigabytes."""
    case, posteriors, alive = function_models.MODELS["one latent function"](), [], []

    def steps(fit, progress, num_steps):
        start = len(posteriors) // 50
        for k in range(num_steps):
            residual = jnp.full(1, 1.0 * k)
            posteriors.append(weakref.ref(residual))
            alive.append(sum(x() is not None for x in posteriors))
            posterior = progress.posterior._replace(residual=residual)
            loss = np.array([3.0 * k if start == 1 else 5.0 * k])
            yield rounds.Stage(progress._replace(posterior=posterior), loss, comparable=k == 49)

    monkeypatch.setattr(rounds.Fit, "steps", steps)
    result = run(cavi(case, num_restarts=num_restarts), case, 100)
    # of three starts the second is the best at their fiftieth stages
    slope = 5.0 if num_restarts == 1 else 3.0
    np.testing.assert_allclose(result.losses, slope * np.arange(100))
    if num_restarts > 1:
        np.testing.assert_allclose(result.restarts, [-245.0, -147.0, -245.0])
    assert max(alive) < 8


@pytest.mark.filterwarnings("error")
def test_a_run_that_has_not_settled_says_so(x64):
    rng = np.random.default_rng(0)
    X = np.sqrt(0.05) * rng.normal(size=(200, 10)) + rng.normal(size=(200, 1))
    y = X @ np.linspace(-2.0, 2.0, 10) + 0.5 * rng.normal(size=200)
    svi = cavi(truth.noise_case())
    with pytest.warns(UserWarning, match="the bound still moves at the end of the run, by"):
        part = svi.run(KEY, 10, X, y, progress_bar=False)
    whole = svi.run(KEY, 2000, X, y, init_state=part.state, tol=1e-6, progress_bar=False)
    assert bool(whole.converged) and whole.losses[-1] < part.losses[-1] - 1.0


def test_a_bound_that_is_no_number_is_an_error(x64, fixed):
    svi = cavi(fixed)
    with pytest.raises(FloatingPointError, match="the bound is not a number after step 3"):
        run(svi, fixed, 3, init_params={"w_auto_loc": jnp.full(4, 1e200)})
