# SPDX-License-Identifier: Apache-2.0
"""Functions without order: sweeps, turns and drops against dense algebra, and planted factors."""

from functools import cache, partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats
from task_problems import Problem, model_of, observations, problem
from tinygp import kernels

import jax
from jax import random
import jax.numpy as jnp

from numpyro import handlers

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import (
    function_updates as functions,
    rotations as turns,
    white_functions as factors,
)
from numpyro_spikeslab.fitting.moves import switch_off
from numpyro_spikeslab.fitting.posterior import with_roles
from numpyro_spikeslab.fitting.tasks import gram, squared_errors, squares_left, update_weights

KEY = random.key(0)
NUM_POINTS, NUM_TASKS, NUM_FUNCTIONS = 60, 20, 3


@cache
def white(prior: str = "weak", num_steps: int = 2) -> Problem:
    """After a few sweeps, which are optimal for nothing."""
    assert jax.config.jax_enable_x64
    args = np.arange(60.0), plant(NUM_POINTS, NUM_TASKS, NUM_FUNCTIONS, 0).Y
    return problem(model_of(prior, ["white"] * NUM_FUNCTIONS), args).run(num_steps)[0]


def one_by_one(found: Problem):
    """A sweep by the general updates: each function, and then what a pass says of its weights."""
    base, prior = found.at, found.prior

    @jax.jit
    def visit(posterior, m):
        at = with_roles(found.spec, found.data, base, posterior.values)
        posterior = functions.update_function(found.spec, prior, at, posterior, m)
        at = with_roles(found.spec, found.data, base, posterior.values)
        # in an order in which this function is the first
        order = jnp.roll(jnp.arange(NUM_FUNCTIONS), -m)
        sums = gram(at, posterior.functions.mean[order], posterior.functions.var[order])
        own, weights = jax.tree.map(lambda x: x[:, order], (at.prior, posterior.weights))
        new = update_weights(at._replace(prior=own), sums, weights)
        put = jax.tree.map(lambda x, y: x.at[:, m].set(y[:, 0]), posterior.weights, new)
        return posterior._replace(weights=put)

    posterior = found.posterior
    for m in range(NUM_FUNCTIONS):
        posterior = visit(posterior, jnp.array(m))
    return posterior


# Sweeps


@pytest.mark.exhaustive
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("prior", ["weak", pytest.param("own inclusion", marks=pytest.mark.slow)])
def test_a_sweep_visits_one_function_and_its_weights_after_the_other(prior):
    found = white(prior)
    assert found.spec.white
    sweep = jax.jit(factors.sweep, static_argnums=0)
    swept, squares = sweep(found.spec, found.data, found.at, found.posterior, 1.0)
    expected = one_by_one(found)
    for x, y in zip(jax.tree.leaves(swept), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10)
    at = with_roles(found.spec, found.data, found.at, swept.values)
    sums = gram(at, swept.functions.mean, swept.functions.var)
    np.testing.assert_allclose(squares, squared_errors(sums, swept.weights), rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_function_at_rest_stays_and_its_weights_follow_the_prior():
    found = white()
    off = switch_off(found.posterior, jnp.array([True, False, True]), found.data.mean)
    np.testing.assert_array_equal(factors.rests(off.functions), [False, True, False])
    sweep = jax.jit(factors.sweep, static_argnums=0)
    swept, _ = sweep(found.spec, found.data, found.at, off, 1.0)
    np.testing.assert_array_equal(swept.functions.mean[1], 0)
    np.testing.assert_array_equal(swept.functions.kl[1], 0)
    assert not np.any(swept.weights.loc[:, 1])
    # a pass over all weights changes those of no other function as much, and these not at all
    at = with_roles(found.spec, found.data, found.at, swept.values)
    passed = update_weights(at, gram(at, swept.functions.mean, swept.functions.var), swept.weights)
    for x, y in zip(passed, swept.weights, strict=True):
        np.testing.assert_allclose(x[:, 1], y[:, 1], rtol=1e-10)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_squares_need_no_products_of_functions():
    found = white()
    at, phi, weights = found.at, found.functions, found.posterior.weights
    for relative in (at.relative, jnp.ones((NUM_POINTS, 1))):
        here = at._replace(relative=relative)
        expected = squared_errors(gram(here, phi.mean, phi.var), weights)
        np.testing.assert_allclose(squares_left(here, phi.mean, phi.var, weights), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_sweeps_never_lower_the_bound_and_short_runs_are_sweeps():
    x, Y = np.arange(100), plant(100, 60, 4, 0).Y
    model = nss.models.mtmkl(["white"] * 8)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    state = svi.init(KEY, x, Y)
    losses = svi.run(KEY, 11, x, Y, init_state=state, progress_bar=False).losses
    one_after_the_other = []
    for _ in range(11):
        state, loss = svi.update(state, x, Y)
        one_after_the_other.append(float(loss))
    np.testing.assert_array_equal(losses, one_after_the_other)
    assert np.max(np.diff(losses)) < 1e-9
    np.testing.assert_allclose(svi.evaluate(state, x, Y), losses[-1], rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_a_mean_or_another_kernel_takes_the_general_sweep():
    args = observations(15, 6, 2)
    for model in (
        model_of("weak", ["white"] * 2, np.ones((2, 15))),
        model_of("weak", ["white", np.eye(15)]),
    ):
        assert not problem(model, args, start=lambda spec, data, blank: blank).spec.white


# Drops


@pytest.mark.usefixtures("x64")
def test_the_gain_without_a_function_is_that_of_the_exact_bound():
    found = white(num_steps=10)
    gains = factors.gains_without(found.spec, found.data, found.posterior)
    now = found.bound(found.posterior)
    for m in range(NUM_FUNCTIONS):
        off = switch_off(found.posterior, jnp.arange(NUM_FUNCTIONS) != m, found.data.mean)
        np.testing.assert_allclose(gains[m], found.bound(off) - now, rtol=1e-9)


# Turns


@pytest.mark.parametrize("number", [0, 1, 2, 5, 6])
def test_rounds_have_every_pair_once(number):
    order, found = jnp.array([3, 1, 5, 0, 2, 4]), []
    for k in range(max(number + number % 2 - 1, 0)):
        pairs = np.stack(turns.pairs_of_round(order, jnp.array(number), k), 1)
        pairs = pairs[pairs[:, 0] < 6]
        assert len(np.unique(pairs)) == pairs.size
        found += [tuple(sorted(pair)) for pair in pairs.tolist()]
    assert sorted(found) == sorted(combinations(sorted(np.asarray(order)[:number].tolist()), 2))


@pytest.mark.usefixtures("x64")
def test_weights_without_spikes_solve_their_equations():
    found = white()
    at, phi = found.at, found.functions
    start = jnp.zeros((NUM_FUNCTIONS, NUM_TASKS))
    W = turns.ridge(at, phi.mean, phi.var, start)
    for q in range(NUM_TASKS):
        Z = np.diag(at.relative[:, q])
        extra = phi.var @ at.relative[:, q] + at.sigma2[q] / at.prior.variance[q]
        H = phi.mean @ Z @ phi.mean.T + np.diag(extra)
        np.testing.assert_allclose(
            W[:, q], np.linalg.solve(H, phi.mean @ Z @ at.Y[:, q]), rtol=1e-6
        )


@pytest.mark.usefixtures("x64")
def test_a_pair_that_is_seen_has_its_evidence_and_its_conditional():
    at = white().at
    J, W = (
        turns.surrogate(at, NUM_POINTS),
        0.3 * np.random.default_rng(0).normal(size=(3, NUM_TASKS)),
    )
    v = np.asarray(at.sigma2 / at.count)
    slab, odds = np.asarray(at.prior.variance).T, np.exp(np.asarray(at.prior.log_odds)).T
    spike, included = (stats.norm.pdf(W, 0, np.sqrt(x)) for x in (v, v + slab))
    expected = np.log((spike + odds * included) / stats.norm.pdf(0, 0, np.sqrt(v)))
    np.testing.assert_allclose(J.evidence(slice(None), jnp.asarray(W)), expected.sum(axis=1))
    q = J.conditional(jnp.asarray(W))
    probs = odds * included / (spike + odds * included)
    np.testing.assert_allclose(q.probs.T, probs, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(q.loc.T, W * slab / (v + slab))
    np.testing.assert_allclose(q.scale.T**2, v * slab / (v + slab))


def mixed(num_tasks=30, num_functions=4):
    """Sparse weights of functions that have been mixed, and the surrogate for them."""
    rng = np.random.default_rng(1)
    W = rng.normal(size=(num_functions, num_tasks))
    W *= np.arange(num_tasks) % num_functions == np.arange(num_functions)[:, None]
    T = np.linalg.qr(rng.normal(size=(num_functions, num_functions)))[0]
    shape, N = W.shape, 50.0
    v = np.full(num_tasks, 0.1 / N)
    odds = np.full(shape, -1.0) - 0.5 * np.log1p(1 / v)
    J = turns.Surrogate(
        *(jnp.asarray(x) for x in (odds, np.ones(shape), np.full(shape, 0.5 / (v + 1)))),
        *(jnp.asarray(x) for x in (0.5 / v, 1 / (N * v), N)),
    )
    S = N * np.eye(num_functions)
    return W, J, turns.Turned(*(jnp.asarray(x) for x in (T @ W, np.eye(num_functions), S)))


@pytest.mark.usefixtures("x64")
def test_a_climb_finds_sparse_weights_and_leaves_the_product():
    W, J, found = mixed()
    end = jax.jit(turns.climb)(J, found, jnp.ones(4, bool))
    sparse, reached, begun = (
        J.value(jnp.asarray(x.W), x.S) for x in (found._replace(W=W), end, found)
    )
    # two cycles over the pairs go most of the way
    assert sparse - reached < 0.1 * (sparse - begun) and reached > begun + 50
    np.testing.assert_allclose(end.B.T @ end.W, found.W, atol=1e-10)
    np.testing.assert_allclose(end.S, end.B @ found.S @ end.B.T, atol=1e-8)
    # what is not in use does not move
    some = jax.jit(turns.climb)(J, found, jnp.array([True, False, True, False]))
    np.testing.assert_array_equal(some.W[1::2], found.W[1::2])
    assert np.any(some.W[0] != found.W[0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("pair", [(0, 1), (1, 2)])
def test_the_surrogate_ranks_turns_as_the_exact_bound_does(pair):
    """The bound after sweeps that settle what a turn leaves, from turns by known angles."""
    found = white(num_steps=10)
    at, phi = found.at, found.functions
    W = turns.ridge(at, phi.mean, phi.var, found.posterior.weights.mean.T)
    S = phi.mean @ phi.mean.T + jnp.diag(jnp.sum(phi.var, axis=1))
    start, J = turns.Turned(W, jnp.eye(NUM_FUNCTIONS), S), turns.surrogate(at, NUM_POINTS)
    one, other = jnp.array(pair)[:, None]
    used, values, bounds = jnp.ones(NUM_FUNCTIONS, bool), [], []
    for angle in np.linspace(-0.7, 0.7, 8):
        c, s = jnp.cos(jnp.array([angle])), jnp.sin(jnp.array([angle]))
        turned = turns.turn_pairs(start, one, other, (c, s, -s, c))
        values.append(float(J.value(turned.W, turned.S)))
        turned = turned._replace(B=turned.B @ phi.mean)
        posterior = turns.posterior_of(found.spec, found.data, found.posterior, turned, used)
        bounds.append(found._replace(posterior=posterior).run(3)[1][-1])
    assert np.ptp(values) > 10 and np.ptp(bounds) > 10
    assert np.corrcoef(values, bounds)[0, 1] > 0.9
    assert abs(np.argmax(values) - np.argmax(bounds)) <= 1


# Whole fits


class Planted(NamedTuple):
    """Sparse mixtures of independent factors with gaps."""

    Y: np.ndarray
    phi: np.ndarray
    included: np.ndarray
    f: np.ndarray


def plant(num_points, num_tasks, num_factors, seed) -> Planted:
    rng = np.random.default_rng(seed)
    included = rng.uniform(size=(num_tasks, num_factors)) < 0.3
    W = included * rng.choice([-1, 1], included.shape) * (rng.uniform(size=included.shape) + 0.5)
    phi = rng.normal(size=(num_factors, num_points))
    f = (W @ phi).T
    Y = f + 0.3 * np.std(f) * rng.normal(size=f.shape)
    Y[rng.uniform(size=Y.shape) < 0.1] = np.nan
    return Planted(Y, phi, included, f)


def fitted(planted: Planted, num_functions: int, num_steps: int = 60, **options):
    """Losses, correlations of the true factors with the best found, and which are in use."""
    x = np.arange(len(planted.Y))
    model = nss.models.mtmkl(["white"] * num_functions)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, **options)
    result = svi.run(KEY, num_steps, x, planted.Y, progress_bar=False)
    found = np.asarray(guide.posterior_mean(result.params, x, planted.Y)["phi"])
    used = np.max(guide.inclusion_probabilities(result.params)["W"], axis=0) > 0.5
    found = found[used]
    correlation = np.corrcoef(planted.phi, found)[: len(planted.phi), len(planted.phi) :]
    return np.asarray(result.losses), np.max(np.abs(correlation), axis=1), used


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_planted_factors_are_found():
    planted = plant(100, 60, 4, 0)
    losses, correlation, used = fitted(planted, 8, num_restarts=1)
    assert np.min(correlation) > 0.95 and np.sum(used) == 4
    assert np.max(np.diff(losses)) < 1e-8


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_result_says_how_far_the_starts_came():
    x, Y = np.arange(100), plant(100, 60, 4, 0).Y
    model = nss.models.mtmkl(["white"] * 8)
    found = []
    for number in (1, 3):
        svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=number)
        found.append(svi.run(KEY, 20, x, Y, progress_bar=False))
    one, three = found
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


@pytest.mark.slow
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
    """By NumPyro's own handler, beside least squares on the same functions."""
    planted = plant(100, 80, 4, 0)
    old, new = np.split(planted.Y, [60], axis=1)
    missing = np.random.default_rng(1).uniform(size=new.shape) < 0.3
    new = np.where(missing, np.nan, new)
    model = nss.models.factor_analysis(5)
    guide = nss.PairedGuide(model)
    params = nss.CAVI(model, guide, plain=True).run(KEY, 200, old, progress_bar=False).params
    known = {"phi": guide.posterior_mean(params, old)["phi"]}
    known |= {name: guide.median(params)[name] for name in ("inclusion", "slab_scale")}
    conditioned = handlers.condition(model, known)
    guide_new = nss.PairedGuide(conditioned)
    result = nss.CAVI(conditioned, guide_new).run(KEY, 150, new, progress_bar=False)
    W = np.asarray(guide_new.posterior_mean(result.params)["W"])
    phi, truth = np.asarray(known["phi"]).T, planted.f[:, 60:]
    dense = np.zeros_like(truth)
    for q, y in enumerate(new.T):
        seen = ~np.isnan(y)
        dense[:, q] = phi @ np.linalg.lstsq(phi[seen], y[seen])[0]
    error, largest = (np.std((f - truth)[missing]) for f in (phi @ W.T, dense))
    assert error < largest < 0.2 * np.std(truth)
    # as sparse as the tasks that the functions were found with
    shares = [np.mean(p["W_auto_probs"]) for p in (params, result.params)]
    assert abs(shares[0] - shares[1]) < 0.1


@pytest.mark.parametrize(
    ("Y_new", "message"),
    [
        (np.ones(12), r"must have shape \(S, 12\).*got \(12,\)"),
        (np.ones((0, 12)), r"must have shape \(S, 12\)"),
        (np.full((2, 12), np.inf), "not finite"),
        (np.ma.masked_less(np.eye(12), 0.0), r"masked array.*`Y_new.filled\(np.nan\)`"),
    ],
)
def test_rows_that_do_not_fit_are_refused(Y_new, message):
    Y = plant(60, 12, 2, 0).Y
    guide = nss.PairedGuide(nss.models.factor_analysis(3))
    with pytest.raises(ValueError, match=message):
        guide.transform({}, Y, Y_new=Y_new)
    smooth = nss.PairedGuide(nss.models.mtmkl([kernels.ExpSquared(1.0)]))
    with pytest.raises(ValueError, match="functions without order"):
        smooth.transform({}, np.arange(60.0), Y, Y_new=Y)


@pytest.mark.exhaustive
def test_planted_factors_are_found_in_single_precision(restored_x64):
    jax.config.update("jax_enable_x64", False)
    planted = plant(100, 60, 4, 0)
    losses, correlation, used = fitted(planted, 8, num_restarts=1)
    assert losses.dtype == np.float32
    assert np.min(correlation) > 0.95 and np.sum(used) == 4
    assert np.max(np.diff(losses)) < 1e-5 * abs(losses[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_sweeps_alone_do_not_find_them():
    planted = plant(100, 60, 4, 0)
    _, correlation, used = fitted(planted, 8, num_restarts=1, num_steps=11)
    assert np.min(correlation) < 0.95 and np.sum(used) > 4


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_order_of_functions_does_not_matter():
    """A fit that goes on from permuted functions ends with the same bound."""
    planted = plant(100, 60, 4, 0)
    x, model = np.arange(100), nss.models.mtmkl(["white"] * 8)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1)
    params = svi.get_params(svi.init(KEY, x, planted.Y))
    order, ends = np.random.default_rng(0).permutation(8), []
    for k in (np.arange(8), order):
        parts = {
            name: value[:, k] if name.startswith("W") else value[k] if "phi" in name else value
            for name, value in params.items()
        }
        result = svi.run(KEY, 60, x, planted.Y, init_params=parts, progress_bar=False)
        ends.append(float(result.losses[-1]))
    np.testing.assert_allclose(*ends, atol=0.1)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", range(5))
def test_planted_factors_are_found_from_other_data(seed):
    planted = plant(200, 100, 6, seed)
    losses, correlation, used = fitted(planted, 12, 100)
    assert np.min(correlation) > 0.95 and np.sum(used) <= 7
    assert np.max(np.diff(losses)) < 1e-8
