# SPDX-License-Identifier: Apache-2.0
"""Facts about a model hold at all values of its sites, for these data and for no others.

Models whose behaviour at one value, or in one direction, is not their behaviour. Each is either
read as what NumPyro says it is, at several values of all its sites, or refused by name.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from agreement import assert_agrees
import numpy as np
import pandas as pd
import pytest
from regressions import TIME, X2, N, P, X, Y, normal, observe, of_tasks, read, rows, weigh
from tinygp import kernels
import xarray as xr

import jax
from jax import nn
import jax.numpy as jnp

import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import COLUMNS, FUNCTIONS, SHARED, Form
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.roles import InclusionRole, NoiseRole, Role, SlabRole

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(autouse=True)
def unseen_arrays(monkeypatch):
    """JAX remembers in which precision it has first seen an array."""
    for name in ("X", "X2", "Y", "TIME"):
        monkeypatch.setitem(globals(), name, globals()[name].copy())


def refusal(model: Callable) -> str:
    with pytest.raises(ValueError, match=r"^test: ") as caught:
        read(model)
    return str(caught.value)


def form_of(model: Callable, *args: Any, **kwargs: Any) -> Form:
    return assert_agrees(model, *args, **kwargs).form


def traced_form(model: Callable, *args: Any) -> Form:
    """The form that a reader gives a model whose arguments `jit` traces."""
    forms = []

    def use(*args):
        forms.append(read(model, *args).form)
        return 0.0

    jax.jit(use)(*args)
    return forms[0]


# A fact at one value of another site


def assigned():
    with numpyro.plate("obs", N):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
    observe(jnp.where(z == 1, X @ weigh("w"), X @ weigh("v")))


def branched():
    observe(cond(normal("b") > 0, lambda w: X @ w, lambda w: X2 @ w, weigh()))


def either_design():
    b, w = normal("b"), weigh()
    observe(jnp.where(b > 0, X @ w, X2 @ w))


SWITCHED: dict[str, Callable] = {
    "gated": lambda: observe(numpyro.sample("z", dist.Bernoulli(0.5)) * (X @ weigh())),
    "either design": either_design,
    "steep": lambda: observe(nn.sigmoid(1000.0 * (TIME - normal("tau"))) * (X @ weigh())),
    "assigned": assigned,
    "branched": branched,
    "masked": lambda: observe(
        X @ weigh(), 0.5, Y, handlers.mask(mask=jnp.asarray(TIME) > 0.1 * normal("b"))
    ),
    "scaled": lambda: observe(
        X @ weigh(), 0.5, Y, handlers.scale(scale=numpyro.sample("b", dist.LogNormal()))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHED)
def test_a_design_that_other_sites_switch_is_not_constant(name, precision):
    form = form_of(SWITCHED[name], rtol=1e-9 if precision == "float64" else 1e-4)
    assert not form.constant_design
    assert form.constant_rows == (name in ("masked", "scaled"))
    assert form.constant_rows or set(form.sources) == {None}


def test_an_offset_may_do_as_it_likes():
    form = form_of(lambda: observe(jnp.where(normal("b") > 0.3, TIME, 0.0) + X @ weigh()))
    assert form.constant_design and form.sources != (None,)


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvps(lambda dx, _, x: dx)

BENT: dict[str, Callable] = {
    "callback": lambda b, x: jax.pure_callback(lambda x: x, x, x),
    "square far away": lambda b, x: jnp.where(b < 1e6, x, x**2),
    "link inside of cond": lambda b, x: jax.lax.cond(b < 9.0, lambda x: x, jnp.tanh, x),
    "power": lambda b, x: jnp.abs(x) ** (1 + 0 * b),
    "rounded": lambda b, x: x + jnp.floor(1e-9 * x),
    "integer": lambda b, x: x + b * (x > 1e9),
    "straight through": lambda b, x: b + straight_through(x),
    "small type": lambda b, x: x.astype("bfloat16").astype(x.dtype),
    "number of turns": lambda b, x: jax.lax.while_loop(
        lambda s: s[0] < x[0], lambda s: (s[0] + 1.0, s[1] + b), (0.0, x)
    )[1],
    "tiny": lambda b, x: x + 1e-30 * x**2,
    "clipped": lambda b, x: jnp.clip(x, -1e12, 1e12),
    "sorted": lambda b, x: jnp.sort(x),
    "normalised": lambda b, x: x / (1.0 + 1e-20 * jnp.sum(x**2)),
}


@pytest.mark.parametrize("name", BENT)
def test_what_is_affine_nearly_everywhere_is_refused(name):
    """Of the weights X @ w; which primitives have steps is a claim of test_provenance."""
    message = refusal(lambda: observe(BENT[name](normal("b"), X @ weigh())))
    assert "location of 'y' is not affine in the weights ['w']" in message


# Roles


def with_noise(noise: Callable, prior: Any = None, slab: Callable = lambda s: 1.0) -> Callable:
    def model():
        s = numpyro.sample("s", dist.HalfNormal() if prior is None else prior)
        observe(X @ weigh(scale=slab(s)), noise(s))

    return model


def test_a_noise_scale_that_is_a_site_has_a_role():
    form = form_of(with_noise(lambda s: s))
    assert form.roles == (NoiseRole("s", True),) and not form.varying_noise
    assert form.constant_design


@pytest.mark.slow
@pytest.mark.parametrize("num_tasks", [1, 2, 20_000])
def test_noise_of_many_tasks_has_a_role(precision, num_tasks):
    """So many that random numbers of single precision would not all differ."""
    Y = np.random.default_rng(0).normal(size=(3, num_tasks))
    reading = read(nss.models.factor_analysis(2), Y)
    assert NoiseRole("noise", True) in reading.form.roles
    index = np.arange(num_tasks)
    np.testing.assert_array_equal(reading.indices["noise"].take(index, np.ones(num_tasks)), index)


def own_part():
    pi = numpyro.sample("s", dist.Uniform(0.1, 0.4))
    observe(X @ weigh(inclusion=jnp.array([1.0, 2.0, 1.0]) * pi))


NO_ROLE: dict[str, Callable] = {
    "kink": with_noise(lambda s: jnp.where(s > 1.0, 2 * s, s)),
    "step": with_noise(lambda s: 1.0 + jnp.floor(s)),
    "twice": with_noise(lambda s: 2 * s),
    "sum": with_noise(lambda s: s + 0.1),
    "one beyond": with_noise(lambda s: jnp.maximum(s, 1e-9)),
    "stopped": with_noise(jax.lax.stop_gradient),
    "time of a change": with_noise(lambda tau: jnp.where(tau < TIME, 0.3, 3.0), dist.Normal()),
    # of such numbers the result is positive
    "sum and difference": with_noise(
        lambda s: s[1] + s[2] - s[0], dist.Uniform(1.0, 1.5).expand([3]).to_event(1)
    ),
    "part of its own": own_part,
    # what another site adds may be nothing at the values of the probe, between -2 and 2
    "another beyond 1.9": with_noise(lambda s: s + nn.relu(normal("u") - 1.9)),
    "another beyond 1000": with_noise(lambda s: s + nn.relu(normal("u") + 1e3)),
    "a switch": with_noise(lambda s: s + 1.0 * numpyro.sample("u", dist.Bernoulli(0.5))),
    "a param": with_noise(lambda s: s + numpyro.param("t", 0.0)),
    # sites that are used elsewhere, too
    "slab": with_noise(lambda s: s, slab=lambda s: s),
    "prior": with_noise(lambda s: [s, normal("other", 0.0, s)][0]),
    "factor": with_noise(lambda s: [s, numpyro.factor("other", -s)][0]),
    "observed": with_noise(lambda s: [s, numpyro.sample("other", dist.Normal(s), obs=0.3)][0]),
}


@pytest.mark.parametrize("name", NO_ROLE)
def test_a_site_that_is_more_or_less_than_a_scale_has_no_role(name):
    form = form_of(NO_ROLE[name])
    assert form.roles == () and "s" in form.free
    assert form.varying_noise == (name == "time of a change")


@pytest.mark.slow
@pytest.mark.parametrize("size", range(2, 10))
def test_combinations_of_the_entries_of_a_site_are_none(size):
    """A mean of evenly spaced values is one of them."""
    rng = np.random.default_rng(size)
    prior = dist.HalfNormal(1.0).expand([size]).to_event(1)
    for k in range(6):
        chosen = rng.permutation(size)[: 2 + k % (size - 1)]
        form = form_of(with_noise(lambda s, chosen=chosen: jnp.mean(s[chosen]), prior))
        assert form.roles == () and form.free == ("s",)


def test_a_role_stands_beside_its_like():
    def model():
        s, t = (numpyro.sample(name, dist.HalfNormal()) for name in "st")
        w = weigh("w", P, numpyro.sample("pi", dist.Beta(1.0, 1.0)))
        observe(X @ (w + weigh("v", P, nn.sigmoid(jnp.log(s)))), t)

    assert set(form_of(model).roles) == {InclusionRole("pi", True), NoiseRole("t", True)}


@pytest.mark.slow
def test_inclusions_and_slabs_take_entries_of_their_sites():
    group = np.array([1, 0, 1])

    def model():
        pi = numpyro.sample("pi", dist.Beta(1.0, 2.0).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        v = weigh("v", 2, scale=jnp.array([0.5, 2.0]))
        observe(X @ weigh("w", P, pi[group], scale) + X2[:, :2] @ v)

    reading = assert_agrees(model)
    assert set(reading.form.roles) == {InclusionRole("pi", True), SlabRole("scale", True)}
    of_w = [pair.name == "w" for pair in reading.form.pairs for _ in range(pair.shape[0])]
    for name, entries, constant in (("pi", [1, 0, 1], 2), ("scale", [0, 0, 0], 1)):
        found = np.ravel(reading.indices[name].entries)
        np.testing.assert_array_equal(found[of_w], entries)
        np.testing.assert_array_equal(found[~np.array(of_w)], constant)


# Masks and scales of several levels


def fraction(size: int) -> np.ndarray:
    return np.linspace(0.5, 2.0, size)


def some(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape) % 3 != 1


mask_by = partial(handlers.mask, None)
scale_by = partial(handlers.scale, None)
LEVELS: dict[str, Callable] = {
    "event, mask of rows": lambda fn, A, B: (fn.to_event(1), [mask_by(some(A))]),
    "event, own mask of rows": lambda fn, A, B: (fn.to_event(1).mask(some(A)), []),
    "event, scale of rows": lambda fn, A, B: (fn.to_event(1), [scale_by(fraction(A))]),
    "event, mask of columns": lambda fn, A, B: (fn.mask(some(B)).to_event(1), []),
    "all levels": lambda fn, A, B: (
        fn.mask(some(A, B)).to_event(1).mask(np.arange(A) != 2),
        [scale_by(fraction(A)), mask_by(some(A)), scale_by(0.5)],
    ),
    "two events": lambda fn, A, B: (fn.mask(some(A, B)).to_event(2), [scale_by(0.5)]),
    "no event": lambda fn, A, B: (
        fn.mask(some(B)),
        [scale_by(fraction(A * B).reshape(A, B)), mask_by(some(A)[:, None])],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize(("num_obs", "num_tasks"), [(6, 2), (4, 4)])
@pytest.mark.parametrize("name", LEVELS)
def test_counts_are_those_of_numpyro(name, num_obs, num_tasks, transposed):
    rng = np.random.default_rng(1)
    features = rng.normal(size=(num_obs, 2))
    response = rng.normal(size=(num_obs, num_tasks))
    response = response.T if transposed else response

    def model():
        with numpyro.plate("task", num_tasks, dim=-2), numpyro.plate("feature", 2):
            W = nss.spike_slab("W", 0.25)
        location = W @ features.T if transposed else features @ W.T
        fn, around = LEVELS[name](dist.Normal(location, 0.5), *location.shape)
        with ExitStack() as stack:
            for handler in around:
                stack.enter_context(handler)
            numpyro.sample("y", fn, obs=response)

    reading = assert_agrees(model, draws=1)
    assert reading.form.kind == SHARED and reading.form.tasks_first == transposed
    joint = Reader(model, "test", joint=True)((), {})
    np.testing.assert_allclose(np.sum(joint.base.count), np.sum(reading.base.count))


@pytest.mark.parametrize(
    ("scale", "event_dim", "fits"),
    [((N, 1), 0, True), ((N,), 1, True), ((), 0, True), ((N,), 0, False), ((2, N, 1), 0, False)],
)
def test_a_scale_must_not_multiply_the_observations(scale, event_dim, fits):
    def model():
        fn = dist.Normal((X @ weigh())[:, None], 0.5).to_event(event_dim)
        with scale_by(np.full(scale, 0.5)):
            numpyro.sample("y", fn, obs=Y[:, None])

    if fits:
        np.testing.assert_allclose(np.sum(assert_agrees(model).base.count), 0.5 * N)
    else:
        message = refusal(model)
        assert "scale of 'y'" in message and str(scale) in message


# Sizes: beside a column of size 1e5 another of size 1 is lost in rounding

SIZES = np.array([1e5, 1.0, 1.0])


@pytest.mark.parametrize("size", [1e5, 1e-5])
@pytest.mark.usefixtures("precision")
def test_columns_may_have_any_size(size):
    large, factor = X * [size, 1.0, 1.0], np.array([1.0, 1.0, 2.0])
    reading = read(lambda: observe(large @ weigh()))
    assert reading.form.sources != (None,)
    np.testing.assert_allclose(rows(reading.design), large.T, rtol=1e-6)
    # a constant of the right shape that is not the design
    reading = read(lambda: observe(large @ (weigh() * factor)))
    np.testing.assert_allclose(rows(reading.design), (large * factor).T, rtol=1e-6)


@pytest.mark.usefixtures("precision")
def test_a_bilinear_term_is_refused_beside_a_large_column():
    def model():
        w = weigh()
        observe((X * SIZES) @ w + 1e-3 * w[1] * w[2])

    assert "not affine" in refusal(model)


@pytest.mark.usefixtures("precision")
def test_features_of_tasks_may_differ_in_a_small_column():
    large = X * SIZES
    other = large + [0.0, 0.0, 1e-2]
    model = of_tasks(2, lambda X, W: jnp.stack([large @ W[0], other @ W[1]], axis=-1))
    reading = read(model, X, np.stack([Y, -Y], axis=-1))
    assert reading.form.kind == COLUMNS
    expected = np.zeros((2, P, N, 2))
    expected[0, ..., 0], expected[1, ..., 1] = large.T, other.T
    found = rows(reading.design, 2 * P).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# What NumPyro takes


def indexed_by_booleans():
    chosen = X[:, 0] > 0
    observe(X[chosen] @ weigh(), float(np.std(Y)), Y[chosen])


def with_a_tree_of_params():
    net = numpyro.param("net", {"slope": jnp.ones(P), "level": jnp.zeros(())})
    observe(X @ net["slope"] + net["level"] + X @ weigh())


def partly_in_a_scope():
    with handlers.scope(prefix="part"):
        w, s = weigh(), numpyro.sample("s", dist.HalfNormal())
    observe(X @ w, s)


def autoregression(conditioned: bool = False):
    w = weigh("w", 2)
    sigma = 0.5 if conditioned else numpyro.sample("sigma", dist.HalfNormal())

    def step(carry, y):
        last, before = carry
        fn = dist.Normal(w[0] * last + w[1] * before, sigma)
        y = numpyro.sample("y", fn, obs=None if conditioned else y)
        return (y, last), None

    start, later = (jnp.asarray(Y[1]), jnp.asarray(Y[0])), jnp.asarray(Y[2:])
    with handlers.condition(data={"y": later} if conditioned else {}):
        scan(step, start, None if conditioned else later, length=N - 2)


def random_walk():
    def step(level, _):
        level = normal("level", level, 0.1)
        return level, level

    observe(scan(step, 0.0, None, length=N)[1] + X @ weigh())


def improper():
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    s = numpyro.sample("s", dist.ImproperUniform(dist.constraints.positive, (), ()))
    observe(level + X @ weigh(), s)


def rows_by_plate():
    w = weigh()
    with numpyro.plate("obs", N) as row:
        numpyro.sample("y", dist.Normal(X[row] @ w, 0.5), obs=Y[row])


def weights_in_a_branch():
    branch = [lambda _: nss.spike_slab("w", 0.3)] * 2
    observe(X[:, 0] * cond(normal("b") > 0, *branch, None))


TAKEN: dict[str, tuple[Callable, tuple[Role, ...]]] = {
    "boolean index and a number of data": (indexed_by_booleans, ()),
    "tree of params": (with_a_tree_of_params, ()),
    "scopes in scopes": (
        handlers.scope(partly_in_a_scope, prefix="all"),
        (NoiseRole("all/part/s", True),),
    ),
    "autoregression": (autoregression, ()),
    "conditioned autoregression": (partial(autoregression, True), ()),
    "random walk": (random_walk, ()),
    "improper priors": (improper, (NoiseRole("s", True),)),
    "rows by plate": (rows_by_plate, ()),
    "weights in a branch": (weights_in_a_branch, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TAKEN)
def test_what_numpyro_takes_is_read(name):
    model, roles = TAKEN[name]
    form = form_of(model)
    assert form.roles == roles
    assert form.kind == COLUMNS


@pytest.mark.parametrize("part", ["offset", "features"])
def test_what_is_missing_may_be_nan(part):
    seen = np.arange(N) != 3

    def model():
        offset, features = 1.0, X
        if part == "offset":
            offset = np.where(seen, 1.0, np.nan)
        else:
            features = np.where(seen[:, None], X, np.nan)
        observe(offset + features @ weigh(), 0.5, np.where(seen, Y, np.nan), mask_by(seen))

    reading = read(model)
    assert np.all(np.isfinite(reading.design.rows)) and np.all(np.isfinite(reading.base.Y))
    np.testing.assert_array_equal(reading.base.relative[:, 0], seen)
    assert not np.any(reading.design.rows[..., 3])


def test_an_autoregression_has_its_lags_as_design():
    reading = assert_agrees(partial(autoregression, True))
    assert reading.form.constant_design
    # a loop has a noise scale for each turn, which is then a part of the whitening
    lags = np.stack([Y[1:-1], Y[:-2]]) / 0.5
    np.testing.assert_allclose(reading.design.rows[0, :2], lags, rtol=1e-12)


def test_features_stay_where_no_observation_counts_at_some_values():
    features = np.where(np.arange(N)[:, None] == 3, np.nan, X)
    table = np.where(np.arange(N)[:, None] == 3, np.nan, np.stack([Y, Y], 1))

    def model():
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([N]).to_event(1))
        of_tasks(2)(jnp.asarray(features), table, (z[:, None] == 0) & ~np.isnan(table))

    reading = read(model)
    assert 0 < np.sum(np.asarray(reading.generic["z"]) == 1) < N
    np.testing.assert_allclose(reading.features, np.nan_to_num(features.T), rtol=1e-6)


# Latent functions


def functions_and_weights(location: Callable) -> None:
    """Two functions of 5 inputs, 3 tasks; the location is made of ``W, phi, b``."""
    b = normal("b")
    with numpyro.plate("latent", 2):
        phi = nss.latent_functions("phi", kernels.ExpSquared(0.5), np.linspace(0.0, 1.0, 5))
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("latent", 2):
        W = nss.spike_slab("W", 0.25)
    y = np.random.default_rng(0).normal(size=(5, 3))
    numpyro.sample("y", dist.Normal(location(W, phi, b), 0.5), obs=y)


def mixed(W, phi, b):
    return b + (W @ phi).T


@pytest.mark.slow
def test_weights_and_functions_are_mixed():
    form = form_of(partial(functions_and_weights, mixed))
    assert form.kind == FUNCTIONS and form.functions == "phi" and form.free == ("b",)
    assert form.kernels == ("phi_scale",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "location",
    [
        lambda W, phi, b: 2.0 * (W @ phi).T,
        lambda W, phi, b: (W @ phi).T + phi[0][:, None],
        lambda W, phi, b: (W @ phi).T + W[:, 0],
        lambda W, phi, b: jnp.where(b > 0.3, 2.0, 1.0) * (W @ phi).T,
        lambda W, phi, b: (W @ jnp.where(phi > 9.0, 0.0, phi)).T,
        lambda W, phi, b: (W @ jnp.tanh(1e-9 * phi)).T,
        lambda W, phi, b: (W @ (phi + jnp.floor(1e-9 * phi))).T,
    ],
    ids=["twice", "function alone", "weights alone", "switch", "cut", "bent", "rounded"],
)
def test_what_is_no_mixture_is_a_design_of_functions(location):
    form = form_of(partial(functions_and_weights, location), draws=2)
    assert form.kind == COLUMNS and not form.constant_design
    assert "phi" in form.others


# Arguments


def of_arrays(X, y):
    observe(jnp.asarray(X) @ weigh(), 0.5, y)


def of_tables(X, y):
    observe(X.values @ weigh(), 0.5, y.values)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (of_arrays, (pd.DataFrame(X), Y)),
        (of_arrays, (X.tolist(), Y)),
        (of_arrays, (np.asarray(X, "float32"), Y > 0)),
        (of_tables, (pd.DataFrame(X), pd.Series(Y, index=range(5, 5 + N)))),
        (of_tables, (xr.DataArray(X), xr.DataArray(Y))),
    ],
    ids=["table", "lists", "types", "series", "xarray"],
)
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_arguments_may_be_of_any_kind_that_the_model_takes(model, args):
    reading = assert_agrees(model, *args, draws=1)
    np.testing.assert_allclose(reading.design.rows[0, :P], X.T, rtol=1e-6)


# Traced data


def test_traced_data_leave_what_is_known():
    def model(y):
        observe(X @ weigh(), numpyro.sample("s", dist.HalfNormal()), y)

    assert traced_form(model, Y) == form_of(model, Y)
    scaled = traced_form(lambda k: functions_and_weights(lambda *x: k * mixed(*x)), 1.0)
    assert scaled.kind == COLUMNS
    assert traced_form(lambda offset: functions_and_weights(mixed), 1.0).kind == FUNCTIONS


def test_a_role_that_traced_data_decide_is_none():
    """Neither the values that stand in for them nor those of this call say what others do."""

    def model(flag):
        with_noise(lambda s: s * jnp.where(flag, 1.0, 2.0))()

    assert traced_form(model, True).roles == ()
    assert form_of(model, True).roles == (NoiseRole("s", True),)
    assert form_of(model, False).roles == ()


@pytest.mark.parametrize(
    ("design", "copied", "numbers"),
    [
        (lambda X, k: X, True, (0.5, -0.5)),
        (lambda X, k: jnp.log(X + 10.0) * k, True, (0.5, -0.5)),
        (lambda X, k: jnp.abs(X), False, (0.5, -0.5)),
        (lambda X, k: jnp.where(k > 0.0, X, 2 * X), False, (0.5, -0.5)),
        (lambda X, k: X * (1 + k), False, (0, 1)),
    ],
    ids=["data", "smooth", "kink", "step", "count"],
)
def test_a_design_that_is_the_same_function_of_all_traced_data_is_copied(design, copied, numbers):
    """Where it is not known to be one, so many products are made as there are weights."""

    def model(X, k, y):
        observe(design(X, k) @ weigh(), 0.5, y)

    assert (traced_form(model, X, numbers[0], Y).sources != (None,)) == copied
    assert form_of(model, X, numbers[0], Y).sources != (None,)

    def rows_of(*args):
        reading = read(model, *args)
        return reading.design_at(reading.generic).rows

    traced_rows = jax.jit(rows_of)
    for k in numbers:
        np.testing.assert_allclose(traced_rows(X, k, Y), rows_of(X, k, Y), rtol=1e-6)


def tasks(phi, bend=jnp.zeros_like, observed=True):
    """Three tasks; the features of the last have what ``bend`` makes of those of all."""
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", P):
        W = nss.spike_slab("W", 0.25)
    with numpyro.plate("column", 3, dim=-1):
        s = numpyro.sample("s", dist.HalfNormal())
    location = phi @ W.T + jnp.array([0.0, 0.0, 1.0]) * (bend(phi) @ W[2])[:, None]
    with numpyro.plate("obs", N, dim=-2), numpyro.plate("column", 3, dim=-1):
        numpyro.sample("y", dist.Normal(location, s).mask(observed), obs=jnp.ones((N, 3)))


def test_features_that_are_traced_are_shared_by_tasks():
    observed = np.ones((N, 3), bool)
    form = traced_form(tasks, X)
    assert (form.kind, form.complete) == (SHARED, True)
    assert form.roles == (NoiseRole("s", True),)
    form = traced_form(lambda phi, observed: tasks(phi, observed=observed), X, observed)
    assert (form.kind, form.complete) == (SHARED, False)
    form = traced_form(lambda observed: tasks(jnp.asarray(X), observed=observed), observed)
    assert (form.kind, form.complete) == (SHARED, False)


KINKS = {
    "maximum": lambda phi: jnp.maximum(phi - 100.0, 0.0),
    "absolute value": lambda phi: jnp.abs(phi + 100.0) - (phi + 100.0),
    "comparison": lambda phi: jnp.where(phi > 100.0, phi, 0.0),
    "step": lambda phi: jnp.floor(phi / 100.0),
    "largest": lambda phi: phi * (jnp.max(phi) > 100.0),
    "own derivative": lambda phi: jax.nn.relu(phi - 100.0),
    "sorted": lambda phi: jnp.sort(phi, axis=0) * 0.0,
}


@pytest.mark.parametrize("name", KINKS)
def test_what_traced_features_may_do_elsewhere_is_not_taken_for_granted(name):
    """For small features these are the shared ones, for large ones they are not."""
    assert traced_form(lambda phi: tasks(phi, KINKS[name]), X).kind == COLUMNS


def test_traced_indices_of_features_say_nothing():
    def model(index):
        tasks(jnp.asarray(X), lambda phi: phi[index] * 0.0)

    assert traced_form(model, np.arange(N)).kind == COLUMNS


# Single precision, in which a tolerance may hide what is there

CODE = -9999.0
"""Stands for what is missing, in rows that are masked."""


def test_rows_that_are_masked_hide_nothing_of_the_others():
    jax.config.update("jax_enable_x64", False)
    rng = np.random.default_rng(0)
    designs = np.float32(rng.normal(size=(200, 20, P)))
    designs[:5] = CODE
    seen = np.tile(np.arange(200)[:, None] >= 5, 20)
    model = of_tasks(20, lambda X, W: jnp.einsum("nqm,qm->nq", X, W))
    Y = np.float32(rng.normal(size=(200, 20)))
    assert read(model, designs, Y, seen).form.kind == COLUMNS
    designs[:] = designs[:, :1]
    assert read(model, designs, Y, seen).form.kind == SHARED

    size = 20_000
    features, treated = np.float32(rng.normal(size=(size, P))), rng.uniform(size=size) < 0.5
    features[7], treated[7] = CODE, True

    def of_the_treated(y, are_treated):
        observe(are_treated * (features @ weigh()), 0.5, y, mask_by(np.arange(size) != 7))

    y = np.float32(rng.normal(size=size))
    assert read(of_the_treated, y, treated).form.sources == (None,)
    assert read(of_the_treated, y, 1.0).form.sources != (None,)


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("part", ["inclusion", "slab", "noise"])
def test_a_small_number_beside_a_site_is_seen(part, size):
    """The site is no inclusion probability or scale then, but a free site of one."""

    def model(X, y, floor):
        prior = dist.Beta(1.0, 9.0) if part == "inclusion" else dist.HalfNormal(1.0)
        z = numpyro.sample("z", prior)
        pi = floor + (1 - floor) * z if part == "inclusion" else 0.2
        scale, noise = (floor + z if part == k else 0.5 for k in ("slab", "noise"))
        observe(X @ weigh("w", size, pi, scale), noise, y)

    jax.config.update("jax_enable_x64", False)
    x, y = np.ones((N, size), np.float32), np.float32(Y)
    form = read(model, x, y, 0.0).form
    assert [role.part for role in form.roles] == [part]
    assert read(model, x, y, 5e-5).form.free == ("z",)
