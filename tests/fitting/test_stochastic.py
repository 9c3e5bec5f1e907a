# SPDX-License-Identifier: Apache-2.0
"""Steps on batches of tasks, against steps on all tasks, their bound and planted functions."""

from functools import partial
import logging
import pickle

from fits import KEY, compilations
import numpy as np
import pytest
from refusals import refusals
from scipy.sparse import coo_array
import truth
from truth.task_problems import SMOOTH, model_of, observations, problem

import jax
from jax.experimental.sparse import BCOO
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting import ascent
from numpyro_spikeslab.fitting.run import Call
from numpyro_spikeslab.fitting.schedules import forgetting
from numpyro_spikeslab.fitting.stochastic import Stream, _resized, _settled

pytestmark = pytest.mark.usefixtures("x64")

N, Q, M, B = 12, 60, 3, 20


def planted(num_tasks: int = Q, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Functions and tasks that are sparse mixtures of them; shapes (M, N) and (N, Q)."""
    rng = np.random.default_rng(1)
    phi = rng.normal(size=(M, N))
    W = 2 * rng.normal(size=(num_tasks, M)) * (rng.uniform(size=(num_tasks, M)) < 0.4)
    return phi, (W @ phi).T + noise * rng.normal(size=(N, num_tasks))


def with_gaps(Y: np.ndarray) -> np.ndarray:
    return np.where(np.random.default_rng(2).uniform(size=Y.shape) < 0.2, np.nan, Y)


OF_CLASSES = nss.models.mtmkl(["white"] * 2, likelihood=lambda f: dist.Bernoulli(logits=f))


def cavi(kernel="white", *, number=M, shared_noise=True, plain=True, **kwargs) -> nss.CAVI:
    model = nss.models.mtmkl(
        [kernel] * number, shared_noise=shared_noise, shared_inclusion=not shared_noise
    )
    return nss.CAVI(model, nss.PairedGuide(model), plain=plain, **kwargs)


def batches_of(Y: np.ndarray, size: int = B) -> list[np.ndarray]:
    return [Y[:, k : k + size] for k in range(0, Y.shape[1], size)]


X = np.linspace(0.0, 3.0, N)
TASKS = planted()[1]
BATCHES = batches_of(TASKS)


def close(x, y, **kwargs):
    jax.tree.map(partial(np.testing.assert_allclose, **kwargs), x, y)


def tallies(state):
    """Statistics of all tasks."""
    return state.optim_state[1].batches.tallies


@pytest.mark.exhaustive
def test_planted_functions_are_found_from_a_file(tmp_path):
    number, size = 1000, 50
    phi, Y = planted(number, noise=1.0)
    np.save(tmp_path / "tasks.npy", Y)
    Y = np.load(tmp_path / "tasks.npy", mmap_mode="r")
    assert isinstance(Y, np.memmap)
    svi = cavi(num_tasks=number, plain=False)
    start = svi.run(KEY, 60, X, Y[:, :size], progress_bar=False)
    state, losses = start.state, []
    for batch in 2 * batches_of(Y, size):
        state, loss = svi.update(state, X, batch)
        losses.append(float(loss))

    def error(params):
        """Share of planted functions that those of a fit do not span."""
        functions = svi.guide.posterior_mean(params, X, Y[:, :size])["phi"]
        basis = np.linalg.qr(np.asarray(functions).T)[0]
        return np.sum((phi.T - basis @ (basis.T @ phi.T)) ** 2) / np.sum(phi**2)

    before, after = error(start.params), error(svi.get_params(state))
    assert after < 0.1 * before and after < 0.001
    assert np.mean(losses[-20:]) < np.mean(losses[:20])
    np.testing.assert_allclose(svi.get_params(state)["noise_auto_loc"], 1.0, rtol=0.02)


def test_a_fit_of_a_first_batch_is_a_start():
    first = cavi().run(KEY, 30, X, BATCHES[0], progress_bar=False)
    svi = cavi(num_tasks=Q)
    state, loss = svi.update(first.state, X, BATCHES[1])
    assert int(state.optim_state[0]) == 1
    begun = svi.init(KEY, X, BATCHES[0], init_params=first.params)
    again, same = svi.update(begun, X, BATCHES[1])
    np.testing.assert_allclose(loss, same, rtol=1e-7)
    close(svi.get_params(state), svi.get_params(again), rtol=1e-5, atol=1e-7)
    # a fit stands for all tasks, whatever its number of tasks and that of the batch
    state, _ = svi.update(first.state, X, TASKS[:, :7])
    np.testing.assert_allclose(tallies(state)["inclusion"].count, np.full(M, Q), rtol=1e-9)
    np.testing.assert_allclose(tallies(state)["noise"].count, N * Q, rtol=1e-9)
    # terms of 20 tasks count three times
    name = "phi_auto_precision"
    np.testing.assert_allclose(svi.get_params(begun)[name], 3 * first.params[name], rtol=1e-9)


def test_a_temperature_goes_on_where_a_fit_has_come():
    begun = cavi().init(KEY, X, BATCHES[0])
    # as a fit leaves it after thirty steps
    state, are_other = begun._replace(optim_state=(jnp.array(30), *begun.optim_state[1:])), []
    hot = cavi(num_tasks=Q, temperature=lambda step: jnp.where(step < 32, 20.0, 1.0))
    cold = cavi(num_tasks=Q)
    for batch in BATCHES:
        are_other.append(hot.evaluate(state, X, batch) != cold.evaluate(state, X, batch))
        state, _ = cold.update(state, X, batch)
    assert are_other == [True, True, False]
    # from the beginning, as any fit
    assert hot.evaluate(begun, X, BATCHES[1]) != cold.evaluate(begun, X, BATCHES[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("prior", ["weak", "shared noise", "own noise", "classes"])
def test_all_tasks_at_a_rate_of_one_are_a_step_of_the_paper(prior):
    x, Y = observations()
    model = model_of(prior, [SMOOTH] * 2)
    if prior == "classes":
        model, Y = OF_CLASSES, np.where(np.isnan(Y), Y, Y > 0.0)
    elif prior != "weak":
        # tasks without gaps
        model = nss.models.mtmkl(["white"] * 2, shared_noise=prior == "shared noise")
        Y = np.nan_to_num(Y)
    all_tasks = problem(model, (x, Y), plain=True).run(3)[0]
    engine = all_tasks.engine
    call = Call(all_tasks.reading, engine, all_tasks.posterior)
    stream = Stream(Y.shape[1], lambda step: 1.0)
    step, start = stream.start(call, 3, all_tasks.posterior)
    # the functions do not change, for these tasks are all
    close(start.functions, all_tasks.functions, rtol=1e-7, atol=1e-9)
    _, new, loss = stream.step(call, (step, start))
    local = stream.check(call)
    assert ("noise" in local) == (prior in ("weak", "own noise"))
    start = _resized(call, local, start)
    settled = _settled(engine, local, start, 1.0)
    again = _settled(engine, local, settled, 1.0)
    for site in local:
        # what is local has moved, and another pass would not move it further
        assert np.max(abs(settled.values[site] - start.values[site])) > 0.1
        np.testing.assert_allclose(again.values[site], settled.values[site], atol=1e-6)
    expected, bound = ascent.step(engine, settled, 1.0)
    np.testing.assert_allclose(-loss, bound, rtol=1e-9)
    close(new._replace(batches=None), expected._replace(batches=None), rtol=1e-7, atol=1e-9)
    # it is a step: something has moved
    assert np.max(abs(new.functions.mean - all_tasks.functions.mean)) > 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("shared_noise", [True, False])
def test_what_batches_say_is_on_average_what_all_tasks_say(shared_noise):
    data = TASKS if shared_noise else with_gaps(TASKS)
    state = cavi(shared_noise=shared_noise, num_tasks=Q).init(KEY, X, TASKS)
    precision, linear = "phi_auto_precision", "phi_auto_linear"

    def after(Y, rate=0.3):
        svi = cavi(shared_noise=shared_noise, num_tasks=Q, learning_rate=lambda step: rate)
        return svi.get_params(svi.update(state, X, Y)[0])

    batches = [after(batch) for batch in batches_of(data)]
    of_all, before, alone = after(data), after(data, 0.0), after(data, 1.0)
    mean = {name: np.mean([x[name] for x in batches], axis=0) for name in (precision, linear)}
    np.testing.assert_allclose(mean[precision], of_all[precision], rtol=1e-8)
    # functions after the first know what the same batch says of those before them
    np.testing.assert_allclose(mean[linear][0], of_all[linear][0], rtol=1e-8)
    # what a batch says of the first function is mixed in with the rate
    for name in (precision, linear):
        expected = 0.7 * before[name][0] + 0.3 * alone[name][0]
        np.testing.assert_allclose(of_all[name][0], expected, rtol=1e-8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", ["white", SMOOTH], ids=["white", "smooth"])
def test_losses_of_batches_are_on_average_the_bound_of_all_tasks(kernel):
    """By the recipe of the documentation for the weights of all tasks."""
    shared_noise = kernel is SMOOTH
    data = TASKS if shared_noise else with_gaps(TASKS)
    options = dict(kernel=kernel, number=2, shared_noise=shared_noise)
    svi = cavi(**options, num_tasks=Q)
    parts = batches_of(data)
    state = svi.init(KEY, X, parts[0])
    for part in parts:
        state, _ = svi.update(state, X, part)
    last = cavi(**options, num_tasks=Q, learning_rate=lambda step: 0.0)
    ends = [last.update(state, X, part) for part in parts]
    np.testing.assert_allclose([x for _, x in ends], [svi.evaluate(state, X, p) for p in parts])
    of_batches = [last.get_params(end) for end, _ in ends]
    local = {f"W_auto_{part}" for part in ("probs", "loc", "scale")}
    local |= set() if shared_noise else {"noise_auto_loc"}
    params = of_batches[0] | {name: np.concatenate([x[name] for x in of_batches]) for name in local}
    # what all tasks share has stayed
    for name in set(params) - local:
        np.testing.assert_allclose(params[name], svi.get_params(state)[name], rtol=1e-9, atol=1e-9)
    whole = cavi(**options)
    bound = whole.evaluate(whole.init(KEY, X, data, init_params=params), X, data)
    np.testing.assert_allclose(np.mean([x for _, x in ends]), bound, rtol=1e-9)


def test_batches_of_classes_come_to_the_bound_of_a_fit():
    rng = np.random.default_rng(1)
    W = 2 * rng.normal(size=(Q, 2)) * (rng.uniform(size=(Q, 2)) < 0.4)
    f = rng.normal(size=(40, 2)) @ W.T
    Y = with_gaps(1.0 * (rng.uniform(size=f.shape) < 1 / (1 + np.exp(-f))))
    args = np.arange(40), Y
    whole = nss.CAVI(OF_CLASSES, nss.PairedGuide(OF_CLASSES), plain=True)
    fit = whole.run(KEY, 200, *args, progress_bar=False)
    svi, last = (
        nss.CAVI(OF_CLASSES, nss.PairedGuide(OF_CLASSES), num_tasks=Q, learning_rate=rate)
        for rate in (None, lambda step: 0.0)
    )
    batches = jnp.stack(batches_of(Y))

    def bounds(state):
        """Of the functions of a state, and the weights of all tasks given these."""
        of_batches = [last.evaluate(state, args[0], batch) for batch in batches]
        state, loss = last.update(state, *args)
        # weights of tasks are independent, given the functions
        np.testing.assert_allclose(np.mean(of_batches), loss, rtol=1e-9)
        begun = whole.init(KEY, *args, init_params=last.get_params(state))
        np.testing.assert_allclose(whole.evaluate(begun, *args), loss, rtol=1e-9)
        return float(loss)

    # the weights of a batch settle where they were in the fit
    assert abs(bounds(fit.state) - fit.losses[-1]) < 0.01
    state, update = fit.state, jax.jit(svi.update)
    for _ in range(20):
        for batch in batches:
            state, loss = update(state, args[0], batch)
    assert np.isfinite(loss) and abs(bounds(state) - fit.losses[-1]) < 0.5


def test_batches_of_one_size_compile_nothing_and_those_of_another_are_taken(caplog):
    svi = cavi(num_tasks=Q, shared_noise=False)
    state, _ = svi.update(svi.init(KEY, X, BATCHES[0]), X, BATCHES[0])
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for batch in (*BATCHES, TASKS[:, 1 : B + 1]):
            state, _ = svi.update(pickle.loads(pickle.dumps(state)), X, batch)
        again = cavi(num_tasks=Q, shared_noise=False, learning_rate=lambda step: 0.0)
        again.update(state, X, BATCHES[0])
    assert not compilations(caplog)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, _ = svi.update(state, X, TASKS[:, :7])
    # the counter counts
    assert "advance" in compilations(caplog)
    params = svi.get_params(state)
    assert params["W_auto_probs"].shape == (7, M) and params["noise_auto_loc"].shape == (7,)
    assert svi.guide.predict(params, X, TASKS[:, :7])[0].shape == (N, 7)
    state, loss = svi.update(state, X, BATCHES[1])
    assert np.isfinite(loss) and svi.get_params(state)["W_auto_probs"].shape == (B, M)


def mixed(X, Y, offset, *prior):
    phi = nss.latent_functions("phi", ["white"] * 2, X)
    W = truth.task_weights(Y.shape[1], 2, *prior)
    numpyro.sample("Y", dist.Normal(offset + (W @ phi).T, 0.3), obs=Y)


def shifted(X, Y):
    mixed(X, Y, numpyro.sample("shift", dist.Normal(0.0, 1.0)))


def grouped(X, Y, group):
    """Inclusion probabilities of groups of tasks."""
    pi = numpyro.sample("inclusion", dist.Beta(1.0, 1.0).expand((4, 1)).to_event())
    tau = numpyro.sample("slab_scale", dist.HalfNormal(1.0).expand((Y.shape[1], 1)).to_event())
    mixed(X, Y, 0.0, pi[group], tau)


def test_a_site_is_local_if_each_task_has_entries_of_its_own():
    group = np.arange(B) % 3
    svi = nss.CAVI(grouped, nss.PairedGuide(grouped), num_tasks=Q)
    assert svi.stream.check(svi._call((X, BATCHES[0], group), {})) == ("slab_scale",)
    state = svi.init(KEY, X, BATCHES[0], group)
    pi = svi.get_params(state)["inclusion_auto_loc"]
    state, _ = svi.update(state, X, BATCHES[1], group)
    count = tallies(state)["inclusion"].count
    # in groups of 7, 7 and 6 of 20 tasks, and two weights each, of 60
    np.testing.assert_allclose(np.ravel(count), 3 * 2 * np.array([7.0, 7.0, 6.0, 0.0]))
    assert np.all(svi.get_params(state)["inclusion_auto_loc"][:3] != pi[:3])


def test_shared_sites_follow_from_averages_over_batches():
    start = cavi(shared_noise=False, num_tasks=Q).init(KEY, X, BATCHES[0])
    states = []
    for rate in (0.0, 0.3):
        svi = cavi(shared_noise=False, num_tasks=Q, learning_rate=lambda _, rate=rate: rate)
        states.append(svi.update(start, X, BATCHES[1])[0])
    before, same, averaged = (tallies(state)["inclusion"] for state in (start, *states))
    close(same, before)
    params = svi.get_params(states[1])
    assert abs(averaged.total - before.total) > 0.1
    of_batch = 3 * np.sum(params["W_auto_probs"])
    np.testing.assert_allclose(averaged.total, 0.7 * before.total + 0.3 * of_batch)
    # its prior is uniform
    np.testing.assert_allclose(params["inclusion_auto_loc"], averaged.total / averaged.count)


def test_the_default_rate_sums_to_infinity_and_its_squares_do_not():
    late = forgetting(np.arange(10**5, 10**6))
    assert np.isclose(forgetting(0), 0.2, atol=0.001)
    assert np.sum(late) > 100 and np.sum(late**2) < 0.1


def test_sites_that_are_held_are_taken():
    held = handlers.condition(shifted, {"shift": jnp.zeros(())})
    svi = nss.CAVI(held, nss.PairedGuide(held), num_tasks=Q)
    assert np.isfinite(svi.update(svi.init(KEY, X, BATCHES[0]), X, BATCHES[1])[1])


def test_compiled_loops_carry_a_state():
    svi = cavi(num_tasks=Q, shared_noise=False)
    batches = jnp.stack([with_gaps(Y) for Y in BATCHES[:2]])
    start = state = svi.init(KEY, X, batches[0])
    losses = []
    for Y in batches:
        state, loss = svi.update(state, X, Y)
        losses.append(loss)
    looped, of_loop = jax.lax.scan(lambda state, Y: svi.update(state, X, Y), start, batches)
    np.testing.assert_allclose(of_loop, losses, rtol=1e-9)
    close(looped.optim_state, state.optim_state)
    _, once = jax.jit(svi.update)(start, X, batches[0])
    np.testing.assert_allclose(once, losses[0], rtol=1e-9)


def test_rates_in_a_compiled_loop_stay_in_the_interval():
    high, one = (cavi(num_tasks=Q, learning_rate=lambda _, r=r: r) for r in (3.0, 1.0))
    state = one.init(KEY, X, BATCHES[0])
    expected = one.update(state, X, BATCHES[1])[1]
    loss = jax.jit(high.update)(state, X, jnp.asarray(BATCHES[1]))[1]
    np.testing.assert_allclose(loss, expected, rtol=1e-9)


WHITE, ENTRIES = nss.models.mtmkl(["white"] * 2), BCOO.from_scipy_sparse(coo_array(TASKS))


def begin(model, *args):
    nss.CAVI(model, nss.PairedGuide(model), num_tasks=Q).init(KEY, *args)


def step(*args, **options):
    """Two steps from a first batch, the second with these arguments."""
    svi = cavi(num_tasks=Q, **options)
    state, _ = svi.update(svi.init(KEY, X, BATCHES[0]), X, BATCHES[1])
    svi.update(state, *args)


def step_at(rate):
    step(X, BATCHES[1], learning_rate=lambda step: 0.5 if step == 0 else rate)


REFUSED = [
    (lambda: cavi(learning_rate=forgetting), "num_tasks: got None, .* leave it and learning_rate"),
    (lambda: cavi(num_tasks=1), "num_tasks: got 1, expected the number of all"),
    (lambda: cavi(num_tasks=60.0), r"num_tasks: got 60\.0"),
    (lambda: cavi(num_tasks=Q, learning_rate=0.1), r"got 0\.1, .* the step.*`lambda step: 0\.1`"),
    *(
        (partial(step_at, x), rf"got {x} at step 1, expected a rate in \[0, 1\]")
        for x in (-0.1, 1.5, np.nan)
    ),
    (partial(step, X[:5], BATCHES[0][:5]), r"\(3, 12\), expected functions \(3, 5\)"),
    (
        lambda: cavi(num_tasks=B).update(cavi().init(KEY, X, TASKS[:, :30]), X, BATCHES[0]),
        "got 20 and a fit of 30 tasks, expected the",
    ),
    (lambda: begin(truth.fixed_model, TASKS, X), "known features, .* Leave it out"),
    (lambda: begin(shifted, X, TASKS), r"sites \['shift'\], .* Take them out"),
    (lambda: begin(WHITE, X, ENTRIES), "with entries of a table.*NaN where entries"),
    (lambda: begin(WHITE, X, TASKS[:, :1]), "1 tasks, expected 2 to num_tasks=60"),
    (lambda: begin(WHITE, X, np.hstack([TASKS, TASKS])), "120 tasks, .* num_tasks is the number"),
]


test_what_batches_cannot_do_is_refused = refusals(REFUSED)
