# SPDX-License-Identifier: Apache-2.0
"""Facts about a model hold at all values of its sites, for these data and for no others.

Models whose behaviour at one value, or in one direction, is not their behaviour. Each is either
read as what NumPyro says it is, at several values of all its sites, or refused by name.
"""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from agreement import assert_agrees
import numpy as np
import pandas as pd
import pytest
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
from numpyro_spikeslab.primitives import MARK, weights
from numpyro_spikeslab.reading.form import COLUMNS, FUNCTIONS, SHARED, Form
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.roles import InclusionRole, NoiseRole, Role, SlabRole

pytestmark = pytest.mark.usefixtures("x64")

N, P = 8, 3
RNG = np.random.default_rng(0)
X, X2 = RNG.normal(size=(2, N, P))
Y = X @ [1.0, 0.0, -0.5] + 0.1 * RNG.normal(size=N)
TIME = np.linspace(-1.0, 1.0, N)


@pytest.fixture(autouse=True)
def unseen_arrays(monkeypatch):
    """JAX remembers in which precision it has first seen an array."""
    for name in ("X", "X2", "Y", "TIME"):
        monkeypatch.setitem(globals(), name, globals()[name].copy())


def weigh(name: str = "w", size: int = P) -> Any:
    with numpyro.plate(f"feature_{name}", size):
        return nss.spike_slab(name, 0.25)


def observe(location: Any, scale: Any = 0.5, y: Any = None, *around: Any) -> None:
    with ExitStack() as stack:
        for handler in (*around, numpyro.plate("obs", N)):
            stack.enter_context(handler)
        numpyro.sample("y", dist.Normal(location, scale), obs=Y if y is None else y)


def refusal(model: Callable, *args: Any) -> str:
    with pytest.raises(ValueError, match=r"^test: ") as caught:
        Reader(model, "test")(args, {})
    return str(caught.value)


def form_of(model: Callable, *args: Any, **kwargs: Any) -> Form:
    return assert_agrees(model, *args, **kwargs).form


# A fact at one value of another site


def gated():
    z = numpyro.sample("z", dist.Bernoulli(0.5))
    observe(z * (X @ weigh()))


def either_design():
    b, w = numpyro.sample("b", dist.Normal()), weigh()
    observe(jnp.where(b > 0, X @ w, X2 @ w))


def steep():
    tau = numpyro.sample("tau", dist.Normal())
    observe(jax.nn.sigmoid(1000.0 * (TIME - tau)) * (X @ weigh()))


def assigned():
    with numpyro.plate("obs", N):
        z = numpyro.sample("z", dist.Bernoulli(0.5))
    observe(jnp.where(z == 1, X @ weigh("w"), X @ weigh("v")))


def masked_by_a_site():
    b = numpyro.sample("b", dist.Normal())
    observe(X @ weigh(), 0.5, Y, handlers.mask(mask=jnp.asarray(TIME) > 0.1 * b))


def scaled_by_a_site():
    b = numpyro.sample("b", dist.LogNormal())
    observe(X @ weigh(), 0.5, Y, handlers.scale(scale=b))


def branched():
    b, w = numpyro.sample("b", dist.Normal()), weigh()
    observe(cond(b > 0, lambda w: X @ w, lambda w: X2 @ w, w))


@pytest.mark.slow
@pytest.mark.parametrize("model", [gated, either_design, steep, assigned, branched])
def test_a_design_that_other_sites_switch_is_not_constant(model):
    form = form_of(model)
    assert not form.constant_rows and not form.constant_design
    assert set(form.sources) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("model", [gated, either_design, steep, assigned])
def test_nor_is_it_in_float32(model):
    jax.config.update("jax_enable_x64", False)
    assert not form_of(model, rtol=1e-4).constant_design


@pytest.mark.slow
@pytest.mark.parametrize("model", [masked_by_a_site, scaled_by_a_site])
def test_counts_that_other_sites_move_leave_no_constant_design(model):
    form = form_of(model)
    assert form.constant_rows and not form.constant_design


def hidden_offset():
    b = numpyro.sample("b", dist.Normal())
    observe(jnp.where(b > 0.3, TIME, 0.0) + X @ weigh())


def test_an_offset_may_do_as_it_likes():
    form = form_of(hidden_offset)
    assert form.constant_design and form.sources != (None,)


def bent(location: Callable) -> Callable:
    def model():
        b = numpyro.sample("b", dist.Normal())
        observe(location(b, X @ weigh()))

    return model


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvps(lambda dx, _, x: dx)


@jax.custom_vjp
def with_own_gradient(x):
    return x


with_own_gradient.defvjp(lambda x: (x, None), lambda _, dx: (jnp.clip(dx, -1.0, 1.0),))


def through_a_reference(x):
    if not hasattr(jax, "new_ref"):
        return jax.lax.stop_gradient(x)
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = jnp.tanh(x)
    return ref[...]


BENT = {
    "own gradient": lambda b, x: b + with_own_gradient(x),
    "callback": lambda b, x: jax.pure_callback(lambda x: x, x, x),
    "square on one side": lambda b, x: jnp.where(b < 0, x, x**2),
    "square far away": lambda b, x: jnp.where(b < 1e6, x, x**2),
    "link inside of cond": lambda b, x: jax.lax.cond(b < 9.0, lambda x: x, jnp.tanh, x),
    "power": lambda b, x: jnp.abs(x) ** (1 + 0 * b),
    "rounded": lambda b, x: x + jnp.floor(1e-9 * x),
    "wrapped": lambda b, x: jax.lax.rem(x, 1e9),
    "integer": lambda b, x: x + b * (x > 1e9),
    "stopped": lambda b, x: b + jax.lax.stop_gradient(x),
    "straight through": lambda b, x: b + straight_through(x),
    "bits": lambda b, x: jax.lax.bitcast_convert_type(x, "float32")[..., 1],
    "fewer bits": lambda b, x: jax.lax.reduce_precision(x, 8, 7),
    "small type": lambda b, x: x.astype("bfloat16").astype(x.dtype),
    "reference": lambda b, x: x + through_a_reference(x),
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
    message = refusal(bent(BENT[name]))
    assert "location of 'y' is not affine in the weights ['w']" in message


# Roles


def with_noise(noise: Callable, prior: Any = None) -> Callable:
    def model():
        s = numpyro.sample("s", dist.HalfNormal() if prior is None else prior)
        observe(X @ weigh(), noise(s))

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
    reading = Reader(nss.models.factor_analysis(2), "test")((Y,), {})
    assert NoiseRole("noise", True) in reading.form.roles
    np.testing.assert_array_equal(
        reading.indices["noise"].take(np.arange(num_tasks), np.ones(num_tasks)),
        np.arange(num_tasks),
    )


NO_ROLE: dict[str, Callable] = {
    "kink": lambda s: jnp.where(s > 1.0, 2 * s, s),
    "step": lambda s: 1.0 + jnp.floor(s),
    "twice": lambda s: 2 * s,
    "sum": lambda s: s + 0.1,
    "root": jnp.sqrt,
    "two numbers": lambda s: jnp.where(s > 1.0, 2.0, 3.0),
    "one beyond": lambda s: jnp.maximum(s, 1e-9),
    "stopped": jax.lax.stop_gradient,
}


@pytest.mark.parametrize("name", NO_ROLE)
def test_a_noise_scale_that_is_a_function_of_a_site_has_none(name):
    form = form_of(with_noise(NO_ROLE[name]))
    assert form.roles == () and form.free == ("s",)


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


def test_a_sum_and_a_difference_of_entries_are_none():
    # of such numbers the result is positive
    prior = dist.Uniform(1.0, 1.5).expand([3]).to_event(1)
    form = form_of(with_noise(lambda s: s[1] + s[2] - s[0], prior))
    assert form.roles == () and form.free == ("s",)


def test_noise_that_changes_at_an_unknown_time_varies():
    form = form_of(with_noise(lambda tau: jnp.where(tau < TIME, 0.3, 3.0), dist.Normal()))
    assert form.varying_noise and form.roles == () and not form.constant_design


def also_in_the_slab(s):
    with numpyro.plate("feature", P):
        return nss.spike_slab("w", 0.25, s)


OTHER_USES: dict[str, Callable] = {
    "slab": also_in_the_slab,
    "prior": lambda s: numpyro.sample("other", dist.Normal(0.0, s)),
    "factor": lambda s: numpyro.factor("other", -s),
    "observed": lambda s: numpyro.sample("other", dist.Normal(s), obs=0.3),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_a_site_that_is_used_elsewhere_too_has_no_role(name):
    def model():
        s = numpyro.sample("s", dist.HalfNormal())
        result = OTHER_USES[name](s)
        observe(X @ (result if name == "slab" else weigh()), s)

    assert form_of(model).roles == ()


@pytest.mark.slow
def test_inclusions_and_slabs_take_entries_of_their_sites():
    group = np.array([1, 0, 1])

    def model():
        pi = numpyro.sample("pi", dist.Beta(1.0, 2.0).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("first", P):
            w = nss.spike_slab("w", pi[group], scale)
        with numpyro.plate("second", 2):
            v = nss.spike_slab("v", 0.25, jnp.array([0.5, 2.0]))
        observe(X @ w + X2[:, :2] @ v)

    reading = assert_agrees(model)
    assert set(reading.form.roles) == {InclusionRole("pi", True), SlabRole("scale", True)}
    np.testing.assert_array_equal(reading.indices["pi"].entries, [[1, 0, 1, 2, 2]])
    np.testing.assert_array_equal(reading.indices["scale"].entries, [[0, 0, 0, 1, 1]])


def test_weights_of_one_site_may_have_a_part_of_their_own():
    """A role whose site feeds a function of itself as well is none."""

    def model():
        pi = numpyro.sample("pi", dist.Uniform(0.1, 0.4))
        with numpyro.plate("feature", P):
            w = nss.spike_slab("w", jnp.array([1.0, 2.0, 1.0]) * pi)
        observe(X @ w)

    assert form_of(model).roles == ()


# Weights where they do not belong


def misused(observations=lambda w, b: Y, handler=None, mask=None, slab=lambda b: 0.0):
    """A regression whose weights, or another site, are where they may not be."""

    def model():
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("feature", P):
            spike = numpyro.sample("w_spike", dist.Bernoulli(0.2), infer={MARK: ("w", "spike")})
            prior = dist.Normal(slab(b), 1.0)
            value = numpyro.sample("w_slab", prior, infer={MARK: ("w", "slab")})
            w = numpyro.deterministic("w", weights(spike, value))
        likelihood = dist.Normal(X @ w, 0.5)
        likelihood = likelihood if mask is None else likelihood.mask(mask(w))
        with handler(w) if handler else nullcontext(), numpyro.plate("obs", N):
            numpyro.sample("y", likelihood, obs=observations(w, b))

    return model


COUNTS = ("the mask or the scale (of handlers.mask, handlers.scale) of 'y'", "['w']")
MISUSED: dict[str, tuple[Callable, tuple[str, ...]]] = {
    **{
        f"observations {name}": (
            misused(x),
            ("observations of 'y' depend on the weights ['w']",),
        )
        for name, x in {
            "wholly": lambda w, b: X @ w,
            "partly": lambda w, b: Y + w[0],
            "in steps": lambda w, b: jnp.where(w[0] > 9.0, 0.0, Y),
        }.items()
    },
    "observations, of a site": (
        misused(lambda w, b: Y + b),
        ("observations of 'y' depend on the latent sites ['b']",),
    ),
    **{
        f"counts, {name}": (misused(handler=x), COUNTS)
        for name, x in {
            "mask": lambda w: handlers.mask(mask=jnp.full(N, w[0] > 0.0)),
            "scalar mask": lambda w: handlers.mask(mask=w[0] > 0.0),
            "scale": lambda w: handlers.scale(scale=1.0 + w[0] ** 2),
        }.items()
    },
    "counts, of a distribution": (misused(mask=lambda w: w[0] > 0.0), COUNTS),
    "mean of slabs": (
        misused(slab=lambda b: jnp.where(b > 0.3, 1.0, 0.0)),
        ("prior mean of the slabs of 'w'", "['b']"),
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_only_the_location_depends_on_weights(name):
    model, parts = MISUSED[name]
    message = refusal(model)
    assert [part for part in parts if part not in message] == [], message


# Masks and scales of several levels


def fraction(size: int) -> np.ndarray:
    return np.linspace(0.5, 2.0, size)


def some(size: int) -> np.ndarray:
    return np.arange(size) % 3 != 1


LEVELS: dict[str, Callable] = {
    "event, mask of rows": lambda fn, A, B: (fn.to_event(1), [handlers.mask(mask=some(A))]),
    "event, own mask of rows": lambda fn, A, B: (fn.to_event(1).mask(some(A)), []),
    "event, scale of rows": lambda fn, A, B: (
        fn.to_event(1),
        [handlers.scale(scale=fraction(A))],
    ),
    "event, mask of columns": lambda fn, A, B: (fn.mask(some(B)).to_event(1), []),
    "all levels": lambda fn, A, B: (
        fn.mask(some(A * B).reshape(A, B)).to_event(1).mask(np.arange(A) != 2),
        [handlers.scale(scale=fraction(A)), handlers.mask(mask=some(A)), handlers.scale(scale=0.5)],
    ),
    "two events": lambda fn, A, B: (
        fn.mask(some(A * B).reshape(A, B)).to_event(2),
        [handlers.scale(scale=0.5)],
    ),
    "no event": lambda fn, A, B: (
        fn.mask(some(B)),
        [handlers.scale(scale=fraction(A * B).reshape(A, B)), handlers.mask(mask=some(A)[:, None])],
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
        location = features @ W.T
        location = location.T if transposed else location
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
        w = weigh()
        with handlers.scale(scale=np.full(scale, 0.5)):
            fn = dist.Normal((X @ w)[:, None], 0.5).to_event(event_dim)
            numpyro.sample("y", fn, obs=Y[:, None])

    if fits:
        np.testing.assert_allclose(np.sum(assert_agrees(model).base.count), 0.5 * N)
    else:
        assert "scale of 'y'" in refusal(model) and str(scale) in refusal(model)


# Sizes


@pytest.mark.parametrize("size", [1e5, 1e-5])
@pytest.mark.usefixtures("precision")
def test_columns_may_have_any_size(size):
    large = X * [size, 1.0, 1.0]

    def model():
        observe(large @ weigh())

    reading = Reader(model, "test")((), {})
    assert reading.form.sources != (None,)
    np.testing.assert_allclose(reading.design.rows[0, :P], large.T, rtol=1e-6)


@pytest.mark.usefixtures("precision")
def test_a_small_column_that_is_another_has_no_source():
    """Beside a column of size 1e5 a wrong one of size 1 is lost in rounding."""
    large = X * [1e5, 1.0, 1.0]

    def model(factor):
        # a constant of the right shape that is not the design
        w = weigh()
        observe(large @ (w * jnp.array([1.0, 1.0, factor])))

    reading = Reader(model, "test")((2.0,), {})
    np.testing.assert_allclose(reading.design.rows[0, :P], (large * [1, 1, 2]).T, rtol=1e-6)


@pytest.mark.usefixtures("precision")
def test_a_bilinear_term_is_refused_beside_a_large_column():
    large = X * [1e5, 1.0, 1.0]

    def model():
        w = weigh()
        observe(large @ w + 1e-3 * w[1] * w[2])

    assert "not affine" in refusal(model)


@pytest.mark.usefixtures("precision")
def test_features_of_tasks_may_differ_in_a_small_column():
    large = X * [1e5, 1.0, 1.0]
    other = large + [0.0, 0.0, 1e-2]

    def model():
        with numpyro.plate("task", 2, dim=-2), numpyro.plate("feature", P):
            W = nss.spike_slab("W", 0.25)
        location = jnp.stack([large @ W[0], other @ W[1]], axis=-1)
        numpyro.sample("y", dist.Normal(location, 0.5), obs=np.stack([Y, -Y], axis=-1))

    reading = Reader(model, "test")((), {})
    assert reading.form.kind == COLUMNS
    expected = np.zeros((2, P, N, 2))
    expected[0, ..., 0], expected[1, ..., 1] = large.T, other.T
    found = np.asarray(reading.design.rows[0, : 2 * P]).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# What NumPyro takes


def indexed_by_booleans():
    kept = X[:, 0] > 0
    w = weigh()
    numpyro.sample("y", dist.Normal(X[kept] @ w, float(np.std(Y))), obs=Y[kept])


def with_a_tree_of_params():
    net = numpyro.param("net", {"slope": jnp.ones(P), "level": jnp.zeros(())})
    observe(X @ net["slope"] + net["level"] + X @ weigh())


def partly_in_a_scope():
    with handlers.scope(prefix="part"):
        w = weigh()
        s = numpyro.sample("s", dist.HalfNormal())
    observe(X @ w, s)


def autoregression():
    w = weigh("w", 2)
    sigma = numpyro.sample("sigma", dist.HalfNormal())

    def step(carry, y):
        last, before = carry
        numpyro.sample("y", dist.Normal(w[0] * last + w[1] * before, sigma), obs=y)
        return (y, last), None

    scan(step, (Y[1], Y[0]), jnp.asarray(Y[2:]))


def conditioned_autoregression():
    w = weigh("w", 2)

    def step(carry, _):
        last, before = carry
        y = numpyro.sample("y", dist.Normal(w[0] * last + w[1] * before, 0.5))
        return (y, last), None

    with handlers.condition(data={"y": jnp.asarray(Y[2:])}):
        scan(step, (jnp.asarray(Y[1]), jnp.asarray(Y[0])), None, length=N - 2)


def random_walk():
    def step(level, _):
        level = numpyro.sample("level", dist.Normal(level, 0.1))
        return level, level

    w = weigh()
    observe(scan(step, 0.0, None, length=N)[1] + X @ w)


def improper():
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), ()))
    s = numpyro.sample("s", dist.ImproperUniform(dist.constraints.positive, (), ()))
    observe(level + X @ weigh(), s)


def missing_offset():
    seen = np.arange(N) != 3
    location = np.where(seen, 1.0, np.nan) + X @ weigh()
    observe(location, 0.5, Y, handlers.mask(mask=seen))


def missing_row():
    seen = np.arange(N) != 3
    location = np.where(seen[:, None], X, np.nan) @ weigh()
    y = np.where(seen, Y, np.nan)
    observe(location, 0.5, y, handlers.mask(mask=seen))


def rows_by_plate():
    w = weigh()
    with numpyro.plate("obs", N) as row:
        numpyro.sample("y", dist.Normal(X[row] @ w, 0.5), obs=Y[row])


def weights_in_a_branch():
    b = numpyro.sample("b", dist.Normal())
    w = cond(b > 0, lambda _: nss.spike_slab("w", 0.3), lambda _: nss.spike_slab("w", 0.3), None)
    observe(X[:, 0] * w)


def functions_and_weights(factor: float = 1.0):
    inputs = np.linspace(0.0, 1.0, 5)
    with numpyro.plate("latent", 2):
        phi = nss.latent_functions("phi", kernels.ExpSquared(0.5), inputs)
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("latent", 2):
        W = nss.spike_slab("W", 0.25)
    level = numpyro.sample("level", dist.Normal().expand([3]).to_event(1))
    y = np.random.default_rng(0).normal(size=(5, 3))
    numpyro.sample("y", dist.Normal(level + factor * (W @ phi).T, 0.5), obs=y)


TAKEN: dict[str, tuple[Callable, tuple[Role, ...]]] = {
    "boolean index and a number of data": (indexed_by_booleans, ()),
    "tree of params": (with_a_tree_of_params, ()),
    "part in a scope": (partly_in_a_scope, (NoiseRole("part/s", True),)),
    "all in a scope": (
        handlers.scope(with_noise(lambda s: s), prefix="all"),
        (NoiseRole("all/s", True),),
    ),
    "scopes in scopes": (
        handlers.scope(partly_in_a_scope, prefix="all"),
        (NoiseRole("all/part/s", True),),
    ),
    "autoregression": (autoregression, ()),
    "conditioned autoregression": (conditioned_autoregression, ()),
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


@pytest.mark.parametrize("model", [missing_offset, missing_row])
def test_what_is_missing_may_be_nan(model):
    reading = Reader(model, "test")((), {})
    assert np.all(np.isfinite(reading.design.rows)) and np.all(np.isfinite(reading.base.Y))
    np.testing.assert_array_equal(reading.base.relative[:, 0], np.arange(N) != 3)
    assert not np.any(reading.design.rows[..., 3])


def test_an_autoregression_has_its_lags_as_design():
    form = form_of(conditioned_autoregression)
    assert form.constant_design
    reading = Reader(conditioned_autoregression, "test")((), {})
    # a loop has a noise scale for each turn, which is then a part of the whitening
    lags = np.stack([Y[1:-1], Y[:-2]]) / 0.5
    np.testing.assert_allclose(reading.design.rows[0, :2], lags, rtol=1e-12)


# Latent functions


@pytest.mark.slow
def test_weights_and_functions_are_mixed():
    form = form_of(functions_and_weights)
    assert form.kind == FUNCTIONS and form.functions == "phi" and form.free == ("level",)
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
    def model():
        b = numpyro.sample("b", dist.Normal())
        with numpyro.plate("latent", 2):
            phi = nss.latent_functions("phi", kernels.ExpSquared(0.5), np.linspace(0.0, 1.0, 5))
        with numpyro.plate("task", 3, dim=-2), numpyro.plate("latent", 2):
            W = nss.spike_slab("W", 0.25)
        y = np.random.default_rng(0).normal(size=(5, 3))
        numpyro.sample("y", dist.Normal(location(W, phi, b), 0.5), obs=y)

    form = form_of(model, draws=2)
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
        (of_arrays, (xr.DataArray(X), Y)),
        (of_arrays, (X.tolist(), Y)),
        (of_arrays, (np.asarray(X, "float32"), Y > 0)),
        (of_tables, (pd.DataFrame(X), pd.Series(Y, index=range(5, 5 + N)))),
        (of_tables, (xr.DataArray(X), xr.DataArray(Y))),
    ],
    ids=["table", "xarray", "lists", "types", "series", "all xarray"],
)
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_arguments_may_be_of_any_kind_that_the_model_takes(model, args):
    reading = assert_agrees(model, *args, draws=1)
    np.testing.assert_allclose(reading.design.rows[0, :P], X.T, rtol=1e-6)


# Traced data


def traced_form(model: Callable, *args: Any) -> Form:
    found = []

    def use(*args):
        found.append(Reader(model, "test")(args, {}).form)
        return 0.0

    jax.jit(use)(*args)
    return found[0]


def switched_noise(flag):
    s = numpyro.sample("s", dist.HalfNormal())
    observe(X @ weigh(), s * jnp.where(flag, 1.0, 2.0))


def test_a_role_stands_alone_or_beside_its_like():
    """What another site adds may be nothing at the values of the probe."""

    def beside(other, add):
        def model():
            s = numpyro.sample("s", dist.HalfNormal())
            u = numpyro.sample("u", other)
            observe(X @ weigh(), s + add(u))

        return model

    for low in (1.9, -1e3):  # generic values of a real site are between -2 and 2
        assert form_of(beside(dist.Normal(), lambda u, low=low: nn.relu(u - low))).roles == ()
    assert form_of(beside(dist.Bernoulli(0.5), lambda z: 1.0 * z)).roles == ()

    def with_param():
        s = numpyro.sample("s", dist.HalfNormal())
        observe(X @ weigh(), s + numpyro.param("t", 0.0))

    assert form_of(with_param).roles == ()

    def two():
        s, t = (numpyro.sample(name, dist.HalfNormal()) for name in "st")
        pi = numpyro.sample("pi", dist.Beta(1.0, 1.0))
        with numpyro.plate("feature", P):
            w = nss.spike_slab("w", pi)
            v = nss.spike_slab("v", nn.sigmoid(jnp.log(s)))
        observe(X @ (w + v), t)

    assert set(form_of(two).roles) == {InclusionRole("pi", True), NoiseRole("t", True)}


def test_features_stay_where_no_observation_counts_at_some_values():
    features = np.where(np.arange(N)[:, None] == 3, np.nan, X)
    table = np.where(np.arange(N)[:, None] == 3, np.nan, np.stack([Y, Y], 1))

    def model():
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([N]).to_event(1))
        with numpyro.plate("task", 2, dim=-2), numpyro.plate("feature", P):
            W = nss.spike_slab("W", 0.25)
        with handlers.mask(mask=(z[:, None] == 0) & ~np.isnan(table)):
            numpyro.sample("Y", dist.Normal(jnp.asarray(features) @ W.T, 0.5), obs=table)

    reading = Reader(model, "test")((), {})
    assert 0 < np.sum(np.asarray(reading.generic["z"]) == 1) < N
    np.testing.assert_allclose(reading.features, np.nan_to_num(features.T), rtol=1e-6)


def test_a_role_that_traced_data_decide_is_none():
    """Neither the values that stand in for them nor those of this call say what others do."""
    assert traced_form(switched_noise, True).roles == ()
    assert form_of(switched_noise, True).roles == (NoiseRole("s", True),)
    assert form_of(switched_noise, False).roles == ()


def test_a_design_that_traced_data_decide_is_not_copied():
    def model(X, count, y):
        observe(X @ weigh() * (1 + count), 0.5, y)

    assert traced_form(model, X, 0, Y).sources == (None,)
    assert form_of(model, X, 0, Y).sources != (None,)


@pytest.mark.parametrize(
    ("design", "copied"),
    [
        (lambda X, shift: X, True),
        (lambda X, shift: jnp.log(X + 10.0) * shift, True),
        (lambda X, shift: jnp.abs(X), False),
        (lambda X, shift: jnp.where(shift > 0.0, X, 2 * X), False),
    ],
    ids=["data", "smooth", "kink", "step"],
)
def test_a_design_that_is_the_same_function_of_all_traced_data_is_copied(design, copied):
    """Where it is not known to be one, so many products are made as there are weights."""

    def model(X, shift, y):
        observe(design(X, shift) @ weigh(), 0.5, y)

    assert (traced_form(model, X, 0.5, Y).sources != (None,)) == copied
    assert form_of(model, X, 0.5, Y).sources != (None,)

    def rows(*args):
        reading = Reader(model, "test")(args, {})
        return reading.design_at(reading.generic).rows

    for shift in (0.5, -0.5):
        np.testing.assert_allclose(jax.jit(rows)(X, shift, Y), rows(X, shift, Y), rtol=1e-6)


def test_traced_data_leave_what_is_known():
    def model(y):
        s = numpyro.sample("s", dist.HalfNormal())
        observe(X @ weigh(), s, y)

    form = traced_form(model, Y)
    assert form == form_of(model, Y)
    functions = traced_form(functions_and_weights, 1.0)
    assert functions.kind == COLUMNS
    assert traced_form(lambda offset: functions_and_weights(), 1.0).kind == FUNCTIONS


def tasks(phi, bend=lambda phi: 0.0, observed=True):
    """Three tasks; the features of the last have what ``bend`` makes of those of all."""
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", P):
        W = nss.spike_slab("W", 0.25)
    with numpyro.plate("column", 3, dim=-1):
        s = numpyro.sample("s", dist.HalfNormal())
    location = phi @ W.T + jnp.array([0.0, 0.0, 1.0]) * (bend(phi) @ W[2])[:, None]
    with numpyro.plate("obs", N, dim=-2), numpyro.plate("column", 3, dim=-1):
        Y = jnp.ones((N, 3))
        numpyro.sample("y", dist.Normal(location, s).mask(observed), obs=Y)


def nothing(phi):
    return jnp.zeros_like(phi)


def test_features_that_are_traced_are_shared_by_tasks():
    form = traced_form(lambda phi: tasks(phi, nothing), X)
    assert (form.kind, form.complete) == (SHARED, True)
    assert form.roles == (NoiseRole("s", True),)
    observed = np.ones((N, 3), bool)
    form = traced_form(lambda phi, observed: tasks(phi, nothing, observed), X, observed)
    assert (form.kind, form.complete) == (SHARED, False)
    form = traced_form(lambda observed: tasks(jnp.asarray(X), nothing, observed), observed)
    assert (form.kind, form.complete) == (SHARED, False)


KINKS = {
    "maximum": lambda phi: jnp.maximum(phi - 100.0, 0.0),
    "absolute value": lambda phi: jnp.abs(phi + 100.0) - (phi + 100.0),
    "comparison": lambda phi: jnp.where(phi > 100.0, phi, 0.0),
    "step": lambda phi: jnp.floor(phi / 100.0),
    "largest": lambda phi: phi * (jnp.max(phi) > 100.0),
    "clip": lambda phi: jnp.clip(phi, 100.0, 200.0) - 100.0,
    "own derivative": lambda phi: jax.nn.relu(phi - 100.0),
    "sorted": lambda phi: jnp.sort(phi, axis=0) * 0.0,
}


@pytest.mark.parametrize("bend", KINKS.values(), ids=KINKS)
def test_what_traced_features_may_do_elsewhere_is_not_taken_for_granted(bend):
    """For small features these are the shared ones, for large ones they are not."""
    assert traced_form(lambda phi: tasks(phi, bend), X).kind == COLUMNS


def test_traced_indices_of_features_say_nothing():
    def model(rows):
        tasks(jnp.asarray(X), lambda phi: phi[rows] * 0.0)

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

    def of_each_task(Y):
        with numpyro.plate("task", 20, dim=-2), numpyro.plate("feature", P, dim=-1):
            W = nss.spike_slab("W", 0.2)
        with numpyro.plate("time", 200, dim=-2), numpyro.plate("task", 20, dim=-1):
            mean = jnp.einsum("nqm,qm->nq", designs, W)
            with handlers.mask(mask=seen):
                numpyro.sample("Y", dist.Normal(mean, 0.5), obs=Y)

    Y = np.float32(rng.normal(size=(200, 20)))
    assert Reader(of_each_task, "test")((Y,), {}).form.kind == COLUMNS
    # the same for all
    designs[:] = designs[:, :1]
    assert Reader(of_each_task, "test")((Y,), {}).form.kind == SHARED

    size = 20_000
    rows, treated = np.float32(rng.normal(size=(size, P))), rng.uniform(size=size) < 0.5
    rows[7], treated[7] = CODE, True

    def of_the_treated(y, are_treated):
        mean = are_treated * (rows @ weigh())
        with handlers.mask(mask=counted):
            numpyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    counted, y = np.arange(size) != 7, np.float32(rng.normal(size=size))
    assert Reader(of_the_treated, "test")((y, treated), {}).form.sources == (None,)
    assert Reader(of_the_treated, "test")((y, 1.0), {}).form.sources != (None,)


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("part", ["inclusion", "slab", "noise"])
def test_a_small_number_beside_a_site_is_seen(part, size):
    """The site is no inclusion probability or scale then, but a free site of one."""

    def model(X, y, floor):
        pi, scale, sigma = 0.2, 1.0, 0.5
        if part == "inclusion":
            pi = floor + (1 - floor) * numpyro.sample("z", dist.Beta(1.0, 9.0))
        elif part == "slab":
            scale = floor + numpyro.sample("z", dist.HalfNormal(1.0))
        else:
            sigma = floor + numpyro.sample("z", dist.HalfNormal(1.0))
        with numpyro.plate("feature", size):
            w = nss.spike_slab("w", pi, scale)
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)

    jax.config.update("jax_enable_x64", False)
    x, y = np.ones((N, size), np.float32), np.float32(Y)
    form = Reader(model, "test")((x, y, 0.0), {}).form
    assert [role.part for role in form.roles] == [part]
    assert Reader(model, "test")((x, y, 5e-5), {}).form.free == ("z",)
