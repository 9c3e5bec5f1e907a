# SPDX-License-Identifier: Apache-2.0
"""Fits of entries of a table that is never made dense, against fits of the table."""

from functools import partial

import numpy as np
import pytest
from scipy.sparse import bsr_array, coo_array, csr_array, dia_array

import jax
from jax import random
from jax.experimental.sparse import BCOO, BCSR
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
import numpyro.optim

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.ascent import advance, begin
from numpyro_spikeslab.fitting.function_sweeps import gains_without
from numpyro_spikeslab.fitting.rotations import rotate_white

KEY = random.key(0)
N, Q, M = 60, 20, 3


def planted(seed: int = 0, share: float = 0.5, noise: float = 0.3, shape=(N, Q), factors=M):
    """Some entries of a table of sparse factors: sparse, dense with NaN, and the weights."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    W = rng.normal(size=(columns, factors)) * (rng.random((columns, factors)) < 0.5)
    table = rng.normal(size=(rows, factors)) @ W.T + noise * rng.normal(size=shape)
    seen = rng.random(shape) < share
    places = np.nonzero(seen)
    return coo_array((table[places], places), shape=shape), np.where(seen, table, np.nan), W


def fitted(model, *args, num_steps=60, key=KEY, **options):
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, **options)
    return guide, svi, svi.run(key, num_steps, *args, progress_bar=False)


def begun(model, *args):
    """Parameters at the start of a fit."""
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide)
    return guide, svi.get_params(svi.init(KEY, *args))


def bound_of(model, params, *args):
    """The bound of a model at parameters of another one's fit."""
    svi = nss.CAVI(model, nss.PairedGuide(model))
    return -svi.evaluate(svi.init(KEY, *args, init_params=params), *args)


# Against the table

MODELS = {
    "factor_analysis": nss.models.factor_analysis(4),
    "inclusion of each factor": nss.models.factor_analysis(4, shared_inclusion=False),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
@pytest.mark.parametrize(
    "name",
    ["factor_analysis", *(pytest.param(k, marks=pytest.mark.exhaustive) for k in [*MODELS][1:])],
)
def test_the_bound_and_the_predictions_are_those_of_the_table(x64, name):
    model = MODELS[name]
    Y, table, _ = planted()
    guide, _, result = fitted(model, Y, plain=True, num_steps=15)
    assert np.all(np.diff(result.losses) <= 1e-9 * abs(result.losses[0]))
    np.testing.assert_allclose(-result.losses[-1], bound_of(model, result.params, table), rtol=1e-9)
    mean, variance = guide.predict(result.params, table, noise=True)
    rows, columns = Y.coords
    for places in (None, Y.coords):
        found = guide.predict(result.params, Y, entries=places, noise=True)
        np.testing.assert_allclose(found[0], mean[rows, columns], atol=1e-9)
        np.testing.assert_allclose(found[1], variance[rows, columns], atol=1e-9)
    others = np.nonzero(np.isnan(table))
    for data in (Y, table):
        found = guide.predict(result.params, data, entries=others)
        np.testing.assert_allclose(found[0], np.asarray(mean)[others], atol=1e-9)
    new = np.random.default_rng(1).normal(size=(5, Q))
    new[0], new[1, 3:], new[2, 0] = np.nan, np.nan, 0.0
    # zeros that are stored are observations
    rows, columns = np.nonzero(~np.isnan(new))
    some = coo_array((new[rows, columns], (rows, columns)), shape=new.shape)
    of_rows = [
        guide.transform(result.params, data, Y_new=x)
        for data, x in ((table, new), (Y, new), (Y, some), (table, BCOO.from_scipy_sparse(some)))
    ]
    for found in of_rows[1:]:
        for a, b in zip(found, of_rows[0], strict=True):
            np.testing.assert_allclose(a, b, atol=1e-9)


@pytest.mark.exhaustive
def test_moves_find_the_planted_factors_and_never_lower_the_bound(x64):
    Y, table, W = planted(3, share=0.4, shape=(200, 40), factors=4)
    model = nss.models.factor_analysis(8)
    guide, _, result = fitted(model, Y, num_steps=300)
    assert np.all(np.diff(result.losses) <= 1e-7 * abs(result.losses[0]))
    included = guide.inclusion_probabilities(result.params)["W"] > 0.5
    used = np.flatnonzero(np.any(included, axis=0))
    assert len(used) == 4
    found = np.asarray(guide.posterior_mean(result.params)["W"])[:, used]
    alike = np.abs(np.corrcoef(found.T, W.T)[:4, 4:])
    assert np.all(np.max(alike, axis=0) > 0.97)
    # weights of the size of the noise's share in them cannot be told
    large = np.abs(W) > 0.3
    order = np.argmax(alike, axis=0)
    missed = large & ~np.asarray(included)[:, used][:, order]
    assert np.sum(missed) <= 0.05 * np.sum(large)
    plain = fitted(model, Y, num_steps=300, plain=True)[2]
    assert result.losses[-1] < plain.losses[-1] - 50
    np.testing.assert_allclose(-result.losses[-1], bound_of(model, result.params, table), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
def test_the_order_of_entries_and_the_kind_of_array_do_not_matter(x64):
    Y, _, _ = planted()
    order = np.random.default_rng(1).permutation(Y.nnz)
    shuffled = coo_array((Y.data[order], tuple(x[order] for x in Y.coords)), shape=Y.shape)
    every = Y, shuffled, csr_array(Y), BCOO.from_scipy_sparse(csr_array(Y))
    results = [fitted(MODELS["factor_analysis"], x, plain=True, num_steps=5)[2] for x in every]
    for result in results[1:]:
        np.testing.assert_allclose(result.losses, results[0].losses, rtol=1e-10)


@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
def test_zeros_that_are_stored_are_observations(x64):
    Y, table, _ = planted()
    Y.data[:7] = 0.0
    table[tuple(x[:7] for x in Y.coords)] = 0.0
    _, _, result = fitted(MODELS["factor_analysis"], Y, plain=True, num_steps=5)
    bound = bound_of(MODELS["factor_analysis"], result.params, table)
    np.testing.assert_allclose(-result.losses[-1], bound, rtol=1e-9)


@pytest.mark.slow
def test_rows_and_columns_without_entries_stay_at_their_prior(x64):
    Y, _, _ = planted()
    larger = coo_array((Y.data, Y.coords), shape=(N + 3, Q + 2))
    model = MODELS["factor_analysis"]
    guide, _, result = fitted(model, larger, plain=True, num_steps=60)
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


# Programs of a user's own


def prior(num_functions=3, num_tasks=Q):
    pi = numpyro.sample("pi", dist.Beta(1, 1))
    slab = numpyro.sample("slab", dist.HalfNormal(5.0))
    phi = nss.latent_functions("phi", ["white"] * num_functions, np.arange(N))
    with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("latent", num_functions, dim=-1):
        return phi, nss.spike_slab("W", pi, slab)


def in_numbers(name, size):
    with numpyro.plate(f"{name}_plate", size):
        return numpyro.sample(name, dist.HalfNormal(1.0))


RNG = np.random.default_rng(5)
SCALES, WEIGHTS, OFFSET = RNG.uniform(0.2, 0.5, (3, N, Q))


def noise_of(kind, rows, columns):
    if kind == "of groups of columns":
        return in_numbers("sigma", 2)[np.arange(Q) % 2][columns]
    if kind == "of each row":
        return in_numbers("sigma", N)[rows]
    if kind == "of each column, known":
        return SCALES[0][columns]
    if kind == "of each entry, known":
        return SCALES[rows, columns]
    return 0.3


def own_model(data, rows, columns, kind, seen=None):
    """Of entries, or, with ``seen``, of the table: rows and columns are then open grids."""
    phi, W = prior()
    product = jnp.sum(phi.T[rows] * W[columns], axis=-1)
    if kind == "with intercepts":
        with numpyro.plate("column", Q):
            product = product + numpyro.sample("b", dist.Normal(0, 2.0))[columns]
    if kind == "with an offset":
        product = product + OFFSET[rows, columns]
    weights = WEIGHTS[rows, columns] if kind == "with weights" else np.ones(np.shape(data))
    if seen is not None:
        product, data = product.reshape(N, Q), jnp.where(seen, data, 0.0)
    noise = noise_of(kind, rows, columns)
    mask = True if seen is None else seen
    with handlers.mask(mask=mask), handlers.scale(scale=jnp.asarray(weights)):
        infer = {} if seen is not None else {"entries": (rows, columns)}
        numpyro.sample("y", dist.Normal(product, noise), obs=data, infer=infer)


KINDS = {
    "plain": (),
    "with intercepts": ("b",),
    "with an offset": (),
    "with weights": (),
    "of groups of columns": (),
    "of each row": ("sigma",),
    "of each column, known": (),
    "of each entry, known": (),
}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
@pytest.mark.parametrize("kind", KINDS)
def test_programs_of_entries_are_read_as_those_of_the_table(x64, kind):
    Y, table, _ = planted(1)
    rows, columns = Y.coords
    args = Y.data, rows, columns, kind
    _, svi, result = fitted(own_model, *args, num_steps=30)
    form = svi._read(args, {}).form
    assert form.kind == "entries" and form.free == KINDS[kind]
    assert np.all(np.diff(result.losses) <= 1e-6 * abs(result.losses[0]))
    grid = *np.ogrid[:N, :Q], kind, np.isfinite(table)

    def of_table(data, rows, columns, kind, seen):
        phi, W = prior()
        product = (W @ phi).T
        if kind == "with intercepts":
            with numpyro.plate("column", Q):
                product = product + numpyro.sample("b", dist.Normal(0, 2.0))
        if kind == "with an offset":
            product = product + OFFSET
        noise = noise_of(kind, rows, columns)
        noise = noise if np.ndim(noise) == 0 else jnp.broadcast_to(noise, (N, Q))
        weights = WEIGHTS if kind == "with weights" else np.ones((N, Q))
        with handlers.mask(mask=seen), handlers.scale(scale=jnp.asarray(weights)):
            numpyro.sample("y", dist.Normal(product, noise), obs=jnp.where(seen, data, 0.0))

    bound = bound_of(of_table, result.params, table, *grid)
    np.testing.assert_allclose(-result.losses[-1], bound, rtol=1e-8)


def test_coefficients_that_are_not_one_are_refused(x64):
    Y, _, _ = planted()
    rows, columns = Y.coords
    size = np.linspace(0.5, 2, Y.nnz)

    def model(y):
        phi, W = prior()
        f = size * jnp.sum(phi.T[rows] * W[columns], axis=1)
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y, infer={"entries": (rows, columns)})

    with pytest.raises(ValueError, match="expected `offset"):
        fitted(model, Y.data)


def test_entries_need_the_mark_of_their_places():
    Y, _, _ = planted()
    rows, columns = Y.coords

    def model(y):
        phi, W = prior()
        numpyro.sample("y", dist.Normal(jnp.sum(phi.T[rows] * W[columns], axis=1), 0.3), obs=y)

    with pytest.raises(ValueError, match=r"infer={'entries': \(rows, columns\)}"):
        fitted(model, Y.data)


def test_a_wrong_column_in_one_entry_is_seen(precision):
    """The function of another row in one entry of the location, which no index can say."""
    Y, _, _ = planted()
    rows, columns = Y.coords

    def model(y):
        phi, W = prior()
        f = jnp.sum(phi.T[rows] * W[columns], axis=1)
        f = f.at[3].add(phi[1, 5] * W[2, 1])
        numpyro.sample("y", dist.Normal(f, 0.3), obs=y, infer={"entries": (rows, columns)})

    with pytest.raises(ValueError, match="expected `offset"):
        fitted(model, Y.data)


def test_noise_without_a_mode_in_closed_form_is_known_of_a_column_without_entries(x64):
    Y, _, _ = planted()

    def model(y, rows, columns, each=True):
        phi, W = prior(num_tasks=Q + 1)
        with numpyro.plate("column", Q + 1 if each else 2):
            sigma = numpyro.sample("sigma", dist.LogNormal(-1.0, 0.5))
        sigma = sigma if each else sigma[np.arange(Q + 1) % 2]
        f = jnp.sum(phi.T[rows] * W[columns], axis=1)
        infer = {"entries": (rows, columns)}
        numpyro.sample("y", dist.Normal(f, sigma[columns]), obs=y, infer=infer)

    args = Y.data, *Y.coords
    guide, params = begun(model, *args)
    entry = dict(entries=([0], [Q]))
    without, total = (guide.predict(params, *args, **entry, noise=x)[1] for x in (False, True))
    added = total - without
    np.testing.assert_allclose(added, params["sigma_auto_loc"][Q] ** 2, rtol=1e-9)
    guide, params = begun(partial(model, each=False), *args)
    with pytest.raises(ValueError, match=r"which noise the columns \[20\]"):
        guide.predict(params, *args, **entry, noise=True)
    with pytest.raises(ValueError, match=r"which noise the columns \[20\]"):
        guide.transform(params, *args, Y_new=np.ones((1, Q + 1)))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
def test_the_noise_of_a_column_without_entries_is_known_or_asked_for(x64):
    Y, table, _ = planted()
    larger = coo_array((Y.data, Y.coords), shape=(N, Q + 2))
    wide = np.column_stack([table, np.full((N, 2), np.nan)])
    new = np.random.default_rng(1).normal(size=(5, Q + 2))
    for model in (nss.models.probabilistic_pca(3), nss.models.factor_analysis(3)):
        guide, _, result = fitted(model, larger, plain=True, num_steps=5)
        every = guide.predict(result.params, wide, noise=True)
        found = guide.predict(result.params, larger, entries=([3, 4], [Q, Q + 1]), noise=True)
        for x, y in zip(found, every, strict=True):
            np.testing.assert_allclose(x, np.asarray(y)[[3, 4], [Q, Q + 1]], atol=1e-9)
        pairs = [guide.transform(result.params, x, Y_new=new) for x in (larger, wide)]
        for x, y in zip(*pairs, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-9)


@pytest.mark.slow
def test_nothing_of_the_size_of_the_table_is_made(x64):
    rng = np.random.default_rng(0)
    shape, number = (3_000, 2_000), 20_000
    places = np.unravel_index(rng.choice(np.prod(shape), number, replace=False), shape)
    Y = coo_array((rng.normal(size=number), places), shape=shape)
    model = nss.models.factor_analysis(2)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    call = svi._call((Y,), {})
    progress = begin(call.spec, call.data, svi.init(KEY, Y).optim_state[1])
    true = jnp.array(True)
    for of in (
        lambda p: advance(call.spec, call.data, p, 1, -1.0),
        lambda p: rotate_white(call.spec, call.data, p.posterior, true, true),
        lambda p: gains_without(call.spec, call.data, p.posterior),
    ):
        stack = [jax.make_jaxpr(of)(progress).jaxpr]
        while stack:
            for equation in stack.pop().eqns:
                sizes = [np.prod(x.aval.shape) for x in equation.outvars]
                assert max(sizes, default=0) < np.prod(shape) / 2, equation
                for x in equation.params.values():
                    inner = x if isinstance(x, tuple | list) else (x,)
                    stack += [p.jaxpr for p in inner if hasattr(p, "jaxpr")]


# Bad input


def sparse(data, rows, columns, shape=(N, Q)):
    return coo_array((data, (rows, columns)), shape=shape)


BAD = {
    "twice": (
        sparse([1.0, 2.0, 3.0], [0, 1, 1], [0, 2, 2]),
        "1 duplicate entries, the first at \\(1, 2\\)",
    ),
    "none": (sparse([], np.zeros(0, int), np.zeros(0, int)), "has no entries"),
    "outside": (
        BCOO((jnp.ones(2), jnp.array([[0, 0], [N, 1]])), shape=(N, Q)),
        f"Y has 1 entries outside of its shape .* first at \\({N}, 1\\)",
    ),
    "batch": (
        BCOO((np.ones((2, 1)), np.zeros((2, 1, 1), int)), shape=(2, 3)),
        "BCOO without batch",
    ),
    "dense": (BCOO((np.ones((2, 3)), np.arange(2)[:, None]), shape=(2, 3)), "BCOO without batch"),
    # the zeros that fill blocks would be observations, those of diagonals would be lost
    "blocks": (bsr_array(np.diag([1.0, 2.0, 3.0, 4.0]), blocksize=(2, 2)), "format 'bsr'"),
    "diagonals": (dia_array(np.diag([1.0, 0.0, 3.0])), "format 'dia'"),
    "BCSR": (BCSR.from_scipy_sparse(csr_array(np.ones((2, 3)))), "BCOO without batch"),
    "NaN": (sparse([1.0, np.nan], [0, 1], [0, 2]), "not finite at 1 entries, the first at 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_entries_that_are_no_observations_are_refused(kind):
    Y, message = BAD[kind]
    with pytest.raises(ValueError, match=message):
        fitted(MODELS["factor_analysis"], Y)


@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
def test_entries_that_are_traced_are_named_as_the_reason(x64):
    Y, _, _ = planted()
    guide, svi, result = fitted(MODELS["factor_analysis"], Y, plain=True, num_steps=1)
    entries = BCOO((jnp.asarray(Y.data), jnp.transpose(jnp.stack(Y.coords))), shape=Y.shape)
    for use in (
        lambda Y: guide.predict(result.params, Y),
        lambda Y: guide.transform(result.params, Y, Y_new=np.ones((2, Q))),
    ):
        with pytest.raises(ValueError, match=r"got traced arguments.*outside of jit and vmap"):
            jax.jit(use)(entries)
    with pytest.raises(ValueError, match=r"data are traced.*functools.partial\(model, X\)"):
        jax.jit(lambda Y: svi.evaluate(result.state, Y))(entries)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CAVI.run. the bound still moves")
def test_what_entries_cannot_do_is_said(x64):
    Y, table, _ = planted()
    model = MODELS["factor_analysis"]
    guide, _, result = fitted(model, Y, plain=True, num_steps=1)
    for entries in (([0], [Q]), ([-1], [0]), ([0.5], [0]), ([0, 1], [0])):
        with pytest.raises(ValueError, match=r"entries: got \[.*shape \(60, 20\)"):
            guide.predict(result.params, Y, entries=entries)
    with pytest.raises(ValueError, match="takes no mask"):
        guide.predict(result.params, Y, mask=np.isfinite(table))
    with pytest.raises(ValueError, match="got new inputs of entries"):
        guide.predict(result.params, Y, X_new=np.arange(3))
    twice = coo_array((np.ones(2), ([0, 0], [1, 1])), shape=(1, Q))
    with pytest.raises(ValueError, match="transform: Y_new has 1 duplicate"):
        guide.transform(result.params, Y, Y_new=twice)
    with pytest.raises(ValueError, match=r"got the shape \(2, 21\), expected \(S, 20\)"):
        guide.transform(result.params, Y, Y_new=csr_array(np.ones((2, Q + 1))))
    with pytest.raises(ValueError, match="entries that are not finite"):
        guide.transform(result.params, Y, Y_new=csr_array(np.full((1, Q), np.nan)))
    with pytest.raises(ValueError, match="expected columns"):
        guide.credible_sets(result.params, Y)
    ordered = nss.models.mtmkl([np.eye(N)] * 2)
    with pytest.raises(ValueError, match="functions that are 'white'"):
        fitted(ordered, np.arange(N), Y)
    with pytest.raises(ValueError, match=r"LatentGibbs: .* must be 'white'"):
        nss.mtmkl_kernel(ordered).init(KEY, 1, None, (np.arange(N), Y), {})
    with pytest.raises(ValueError, match=r"expected \(N, Q\)"):
        fitted(model, coo_array(np.ones(3)))
