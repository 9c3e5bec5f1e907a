# SPDX-License-Identifier: Apache-2.0
"""Fits of entries of a table that is never made dense, against fits of the table."""

from functools import partial

import numpy as np
import pytest
from refusals import refusals
from scipy.sparse import bsr_array, coo_array, csr_array, dia_array
import truth

import jax
from jax import random
from jax.experimental.sparse import BCOO, BCSR
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.ascent import advance, begin
from numpyro_spikeslab.fitting.function_sweeps import gains_without
from numpyro_spikeslab.fitting.rotations import rotate_white

KEY = random.key(0)
N, Q, M = 60, 20, 3


def sparse(data, rows, columns, shape=(N, Q)):
    return coo_array((data, (rows, columns)), shape=shape)


def planted(seed: int = 0, share: float = 0.5, shape=(N, Q), factors=M):
    """Some entries of a table of sparse factors: sparse, dense with NaN, and the weights."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    W = rng.normal(size=(columns, factors)) * (rng.random((columns, factors)) < 0.5)
    table = rng.normal(size=(rows, factors)) @ W.T + 0.3 * rng.normal(size=shape)
    observed = rng.random(shape) < share
    places = np.nonzero(observed)
    return sparse(table[places], *places, shape), np.where(observed, table, np.nan), W


def fitted(model, *args, num_steps=60, **options):
    svi = nss.CAVI(model, nss.PairedGuide(model), **options)
    return svi.guide, svi, svi.run(KEY, num_steps, *args, progress_bar=False)


def bound_of(model, params, *args):
    """The bound of a model at parameters of another one's fit."""
    svi = nss.CAVI(model, nss.PairedGuide(model))
    return -svi.evaluate(svi.init(KEY, *args, init_params=params), *args)


FACTORS = nss.models.factor_analysis(4)


@pytest.mark.parametrize("shared", [True, False])
def test_the_bound_and_the_predictions_are_those_of_the_table(x64, shared):
    model = nss.models.factor_analysis(4, shared_inclusion=shared, shared_noise=shared)
    Y, table, _ = planted()
    # and two columns without entries, whose noise is known too
    Y = sparse(Y.data, *Y.coords, (N, Q + 2))
    table = np.column_stack([table, np.full((N, 2), np.nan)])
    guide, _, result = fitted(model, Y, plain=True, num_steps=15)
    assert np.all(np.diff(result.losses) <= 1e-9 * abs(result.losses[0]))
    np.testing.assert_allclose(-result.losses[-1], bound_of(model, result.params, table), rtol=1e-9)
    mean, variance = guide.predict(result.params, table, noise=True)
    rows, columns = Y.coords
    for places in (None, Y.coords):
        of_entries = guide.predict(result.params, Y, entries=places, noise=True)
        expected = mean[rows, columns], variance[rows, columns]
        np.testing.assert_allclose(of_entries, expected, atol=1e-9)
    others = np.nonzero(np.isnan(table))
    for data in (Y, table):
        of_others = guide.predict(result.params, data, entries=others, noise=True)
        expected = np.asarray(mean)[others], np.asarray(variance)[others]
        np.testing.assert_allclose(of_others, expected, atol=1e-9)
    new = np.random.default_rng(1).normal(size=(5, Q + 2))
    new[0], new[1, 3:], new[2, 0] = np.nan, np.nan, 0.0
    of_table, of_entries = (guide.transform(result.params, x, Y_new=new) for x in (table, Y))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-9), of_entries, of_table)


@pytest.mark.exhaustive
def test_moves_find_the_planted_factors_and_never_lower_the_bound(x64):
    Y, table, W = planted(3, share=0.4, shape=(200, 40), factors=4)
    model = nss.models.factor_analysis(8)
    guide, _, result = fitted(model, Y, num_steps=300)
    assert np.all(np.diff(result.losses) <= 1e-7 * abs(result.losses[0]))
    included = guide.inclusion_probabilities(result.params)["W"] > 0.5
    used = np.any(included, axis=0)
    assert np.sum(used) == 4
    mean = np.asarray(guide.posterior_mean(result.params)["W"])[:, used]
    correlation = np.abs(np.corrcoef(mean.T, W.T)[:4, 4:])
    assert np.all(np.max(correlation, axis=0) > 0.97)
    plain = fitted(model, Y, num_steps=300, plain=True)[2]
    assert result.losses[-1] < plain.losses[-1] - 50
    np.testing.assert_allclose(-result.losses[-1], bound_of(model, result.params, table), rtol=1e-9)


def test_zeros_that_are_stored_are_observations_whatever_the_order_and_the_array(x64):
    Y, table, _ = planted()
    Y.data[:7] = 0.0
    table[tuple(x[:7] for x in Y.coords)] = 0.0
    result = fitted(FACTORS, Y, plain=True, num_steps=5)[2]
    order = np.random.default_rng(1).permutation(Y.nnz)
    shuffled = sparse(Y.data[order], *(x[order] for x in Y.coords))
    for data in (table, shuffled, csr_array(Y), BCOO.from_scipy_sparse(csr_array(Y))):
        bound = bound_of(FACTORS, result.params, data)
        np.testing.assert_allclose(-result.losses[-1], bound, rtol=1e-9)


def test_rows_and_columns_without_entries_stay_at_their_prior(x64):
    Y, _, _ = planted()
    larger = sparse(Y.data, *Y.coords, (N + 3, Q + 2))
    guide, _, result = fitted(FACTORS, larger, plain=True, num_steps=60)
    mean, variance = guide.predict(result.params, larger, entries=([N + 1, 0], [0, Q]))
    phi = guide.posterior_mean(result.params, larger)["phi"]
    np.testing.assert_allclose(mean, 0, atol=1e-12)
    np.testing.assert_allclose(phi[:, N:], 0, atol=1e-12)
    probs, loc, scale = (result.params[f"W_auto_{x}"] for x in ("probs", "loc", "scale"))
    second = probs * (loc**2 + scale**2)
    np.testing.assert_allclose(variance[0], np.sum(second[0]), rtol=1e-9)
    pi, slab = result.params["inclusion_auto_loc"], result.params["slab_scale_auto_loc"]
    # exact up to the last update of pi and of the slab
    np.testing.assert_allclose(probs[Q], np.full(4, pi), rtol=0.05)
    np.testing.assert_allclose(second[Q], np.full(4, pi * slab**2), rtol=0.1)


def prior(num_functions=3, num_tasks=Q):
    pi = numpyro.sample("pi", dist.Beta(1, 1))
    slab = numpyro.sample("slab", dist.HalfNormal(5.0))
    phi = nss.latent_functions("phi", ["white"] * num_functions, np.arange(N))
    return phi, truth.task_weights(num_tasks, num_functions, pi, slab)


RNG = np.random.default_rng(5)
SCALES, WEIGHTS, OFFSET = RNG.uniform(0.2, 0.5, (3, N, Q))


def sampled(name, size, prior=dist.HalfNormal(1.0)):  # noqa: B008
    with numpyro.plate(f"{name} of", size):
        return numpyro.sample(name, prior)


NOISE = {
    "of groups of columns": lambda n, q: sampled("sigma", 2)[np.arange(Q) % 2][q],
    "of each row": lambda n, q: sampled("sigma", N)[n],
    "of each column, known": lambda n, q: SCALES[0][q],
    "of each entry, known": lambda n, q: SCALES[n, q],
}


def program(data, rows, columns, kind, mask=None):
    """Of entries, or, with a mask, of the table: rows and columns are then open grids."""
    phi, W = prior()
    of_table = mask is not None
    product = (W @ phi).T if of_table else jnp.sum(phi.T[rows] * W[columns], axis=-1)
    if kind == "with intercepts":
        product = product + sampled("b", Q, dist.Normal(0, 2.0))[columns]
    if kind == "with an offset":
        product = product + OFFSET[rows, columns]
    noise = NOISE[kind](rows, columns) if kind in NOISE else 0.3
    noise = jnp.broadcast_to(noise, (N, Q)) if of_table and np.ndim(noise) else noise
    weights = WEIGHTS[rows, columns] if kind == "with weights" else np.ones(np.shape(data))
    with handlers.mask(mask=mask if of_table else True), handlers.scale(scale=jnp.asarray(weights)):
        infer = {} if of_table else {"entries": (rows, columns)}
        numpyro.sample("y", dist.Normal(product, noise), obs=data, infer=infer)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["plain", "with intercepts", "with an offset", "with weights", *NOISE]
)
def test_programs_of_entries_are_read_as_those_of_the_table(x64, kind):
    Y, table, _ = planted(1)
    result = fitted(program, Y.data, *Y.coords, kind, num_steps=30)[2]
    assert np.all(np.diff(result.losses) <= 1e-6 * abs(result.losses[0]))
    grid = *np.ogrid[:N, :Q], kind, np.isfinite(table)
    bound = bound_of(program, result.params, np.nan_to_num(table), *grid)
    np.testing.assert_allclose(-result.losses[-1], bound, rtol=1e-8)


def marked(rows, columns):
    return {"infer": {"entries": (rows, columns)}}


NOT_READ = {
    "coefficients": (lambda f, phi, W: f * np.linspace(0.5, 2, f.size), marked, "expected `offset"),
    "no mark": (lambda f, phi, W: f, lambda *places: {}, r"infer={'entries': \(rows, columns\)}"),
    # which no index can say, in one entry
    "another row": (lambda f, phi, W: f.at[3].add(phi[1, 5] * W[2, 1]), marked, "expected `offset"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_programs_that_are_no_table_are_refused(precision, name):
    change, mark, message = NOT_READ[name]
    Y, _, _ = planted()
    rows, columns = Y.coords

    def model(y):
        phi, W = prior()
        f = change(jnp.sum(phi.T[rows] * W[columns], axis=1), phi, W)
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y, **mark(rows, columns))

    with pytest.raises(ValueError, match=message):
        fitted(model, Y.data)


def test_noise_without_a_mode_in_closed_form_is_known_of_a_column_without_entries(x64):
    Y, _, _ = planted()

    def model(y, rows, columns, each=True):
        phi, W = prior(num_tasks=Q + 1)
        sigma = sampled("sigma", Q + 1 if each else 2, dist.LogNormal(-1.0, 0.5))
        sigma = sigma if each else sigma[np.arange(Q + 1) % 2]
        f = jnp.sum(phi.T[rows] * W[columns], axis=1)
        infer = {"entries": (rows, columns)}
        numpyro.sample("y", dist.Normal(f, sigma[columns]), obs=y, infer=infer)

    def start(model):
        svi = nss.CAVI(model, nss.PairedGuide(model))
        return svi.guide, svi.get_params(svi.init(KEY, *args))

    args = Y.data, *Y.coords
    guide, params = start(model)
    entry = dict(entries=([0], [Q]))
    without, total = (guide.predict(params, *args, **entry, noise=x)[1] for x in (False, True))
    np.testing.assert_allclose(total - without, params["sigma_auto_loc"][Q] ** 2, rtol=1e-9)
    guide, params = start(partial(model, each=False))
    with pytest.raises(ValueError, match=r"which noise the columns \[20\]"):
        guide.predict(params, *args, **entry, noise=True)
    with pytest.raises(ValueError, match=r"which noise the columns \[20\]"):
        guide.transform(params, *args, Y_new=np.ones((1, Q + 1)))


def test_nothing_of_the_size_of_the_table_is_made(x64):
    rng = np.random.default_rng(0)
    shape, number = (3_000, 2_000), 20_000
    places = np.unravel_index(rng.choice(np.prod(shape), number, replace=False), shape)
    Y = sparse(rng.normal(size=number), *places, shape)
    model = nss.models.factor_analysis(2)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    call = svi._call((Y,), {})
    progress = begin(call.engine, svi.init(KEY, Y).optim_state[1])
    engine, true = call.engine, jnp.array(True)
    for of in (
        lambda p: advance(engine, p, 1, -1.0, 1),
        lambda p: rotate_white(engine, p.posterior, true, true),
        lambda p: gains_without(engine, p.posterior),
    ):
        stack = [jax.make_jaxpr(of)(progress).jaxpr]
        while stack:
            for equation in stack.pop().eqns:
                sizes = [np.prod(x.aval.shape) for x in equation.outvars]
                assert max(sizes, default=0) < np.prod(shape) / 2, equation
                for x in equation.params.values():
                    inner = x if isinstance(x, tuple | list) else (x,)
                    stack += [p.jaxpr for p in inner if hasattr(p, "jaxpr")]


NO_BATCH = "BCOO without batch"
BAD = [
    (sparse([1.0, 2.0, 3.0], [0, 1, 1], [0, 2, 2]), r"1 duplicate .* first at \(1, 2\)"),
    (sparse([], np.zeros(0, int), np.zeros(0, int)), "has no entries"),
    (sparse([1.0, np.nan], [0, 1], [0, 2]), "not finite at 1 entries, the first at 1"),
    (
        BCOO((jnp.ones(2), jnp.array([[0, 0], [N, 1]])), shape=(N, Q)),
        f"Y has 1 entries outside of its shape .* first at \\({N}, 1\\)",
    ),
    (BCOO((np.ones((2, 1)), np.zeros((2, 1, 1), int)), shape=(2, 3)), NO_BATCH),
    (BCOO((np.ones((2, 3)), np.arange(2)[:, None]), shape=(2, 3)), NO_BATCH),
    (BCSR.from_scipy_sparse(csr_array(np.ones((2, 3)))), NO_BATCH),
    # the zeros that fill blocks would be observations, those of diagonals would be lost
    (bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2)), "format 'bsr'"),
    (dia_array(np.diag([1.0, 0.0, 3.0])), "format 'dia'"),
]


test_entries_that_are_no_observations_are_refused = refusals(BAD, partial(fitted, FACTORS))


def test_entries_that_are_traced_are_named_as_the_reason(x64):
    Y, _, _ = planted()
    guide, svi, result = fitted(FACTORS, Y, plain=True, num_steps=1)
    entries = BCOO((jnp.asarray(Y.data), jnp.transpose(jnp.stack(Y.coords))), shape=Y.shape)
    for method, options in (("predict", {}), ("transform", {"Y_new": np.ones((2, Q))})):
        with pytest.raises(ValueError, match=r"got traced arguments.*outside of jit and vmap"):
            jax.jit(partial(use(method, **options), guide, result.params))(entries)
    with pytest.raises(ValueError, match=r"data are traced.*functools.partial\(model, X\)"):
        jax.jit(lambda Y: svi.evaluate(result.state, Y))(entries)


def use(name, **options):
    return lambda guide, params, Y: getattr(guide, name)(params, Y, **options)


OUTSIDE = ([0], [Q]), ([-1], [0]), ([0.5], [0]), ([0, 1], [0])
ORDERED, TIMES = nss.models.mtmkl([np.eye(N)] * 2), np.arange(N)
REFUSED = [
    *((use("predict", entries=x), r"entries: got \[.*shape \(60, 20\)") for x in OUTSIDE),
    (use("predict", mask=np.ones((N, Q), bool)), "mask: got a mask of a sparse Y"),
    (use("predict", X_new=np.arange(3)), "got new inputs of entries"),
    (use("transform", Y_new=np.ones((2, Q + 1))), r"\(2, 21\), expected \(S, 20\)"),
    (use("credible_sets"), "expected columns"),
    (lambda *args: fitted(ORDERED, TIMES, args[-1]), "functions that are 'white'"),
    (
        lambda *args: nss.LatentGibbs(ORDERED).init(KEY, 1, None, (TIMES, args[-1]), {}),
        r"LatentGibbs: .* that are 'white'",
    ),
    (lambda *_: fitted(FACTORS, coo_array(np.ones(3))), r"ed \(N, Q\)"),
]


@pytest.fixture(scope="module")
def shortly_fitted():
    Y, _, _ = planted()
    guide, _, result = fitted(FACTORS, Y, plain=True, num_steps=1)
    return guide, result.params, Y


test_what_entries_cannot_do_is_refused = refusals(
    REFUSED, lambda call, fit: call(*fit), "shortly_fitted"
)
