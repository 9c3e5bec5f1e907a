# SPDX-License-Identifier: Apache-2.0
"""The design and the form that a Reader reads off a model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from truth.agreement import assert_agrees
from truth.regressions import (
    N,
    P,
    X,
    Y,
    copied,
    functions_and_weights,
    located,
    mixed,
    normal,
    observe,
    of_tasks,
    read,
    regression,
    rows,
    weigh,
)
import xarray as xr

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.reading.roles import NoiseRole
from numpyro_spikeslab.reading.sites import Pair

# in one precision: JAX, given a numpy array once in each, may take its buffer from the other
pytestmark = pytest.mark.usefixtures("x64")


# The design


def noisy(X, y):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    observe(numpyro.param("shift", 0.5) + X @ weigh(), sigma, y)


def scaled(scale: Any, mask: Any = True) -> Callable:
    return regression(lambda X, w: dist.Normal(X @ w, scale).mask(mask))


def by_columns(X, y):
    """Weights (2, P), taken column by column."""
    with numpyro.plate("row", 2, dim=-2), numpyro.plate("feature", P):
        W = nss.spike_slab("w", 0.25)
    observe((np.repeat(X, 2, axis=1) * ([1, 2] * P)) @ jnp.ravel(W, order="F"), 0.5, y)


SD = X.std(axis=0)
GROUP = np.arange(N) % P
SPREAD = np.linspace(1.0, 2.0, N)
SEEN = np.arange(N) > 2
DESIGNS: dict[str, tuple[Callable, np.ndarray]] = {
    "matrix product": (located(lambda X, w: X @ w), X),
    "offset": (located(lambda X, w: 2.0 + X @ w - 1.0), X),
    "rescaled weights": (located(lambda X, w: X @ (w / SD)), X / SD),
    "sum": (located(lambda X, w: jnp.sum(X * w, -1)), X),
    "groups": (located(lambda X, w: w[GROUP]), np.eye(P)[GROUP]),
    "two sets": (
        lambda X, y: observe(X[:, :1] @ weigh("a", 1) + X[:, 1:] @ weigh("b", 2), 0.5, y),
        X,
    ),
    "no plate": (lambda X, y: observe(X[:, 0] * nss.spike_slab("w", 0.25), 0.5, y), X[:, :1]),
    "other latent sites": (noisy, X),
    "weights in another order": (by_columns, np.hstack([X, 2 * X])),
    "noise per observation": (scaled(SPREAD), X / SPREAD[:, None]),
    "masked": (scaled(0.5, SEEN), X * SEEN[:, None]),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_the_design_is_what_multiplies_the_weights(name):
    model, expected = DESIGNS[name]
    reading = read(model, X, Y)
    assert reading.form.is_design and reading.form.constant_design
    assert reading.form.response == "y" and reading.form.size == expected.shape[1]
    design = rows(reading.design, reading.form.size)
    # a design that is an argument is copied, without rounding
    rtol, atol = (0.0, 0.0) if name == "matrix product" else (1e-12, 1e-14)
    np.testing.assert_allclose(design, expected.T, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda X, y: observe((X * normal("b")) @ weigh(), 0.5, y), 3.0 * X),
        (
            lambda X, y: observe(X @ weigh(), jnp.exp(normal("b") * X[:, 0]), y),
            X * np.exp(-3.0 * X[:, :1]),
        ),
    ],
    ids=["location", "noise"],
)
def test_a_design_may_depend_on_other_sites(model, expected):
    reading = read(model, X, Y)
    assert not reading.form.constant_design
    assert reading.design is None and reading.base is None
    values = {"b": jnp.asarray(3.0)}
    design = reading.design_at(values, reading.view(values).relative[:, 0])
    np.testing.assert_allclose(rows(design), expected.T, rtol=1e-12)


KINDS: dict[str, Callable] = {
    "int32": lambda X, y: (np.int32(X), np.int32(y)),
    "JAX": lambda X, y: (jnp.asarray(X, "float32"), jnp.asarray(y, int)),
    "lists and booleans": lambda X, y: (X.tolist(), y > 0),
    "pandas": lambda X, y: (pd.DataFrame(X), pd.Series(y, index=range(5, 5 + N))),
    "xarray": lambda X, y: (xr.DataArray(X), xr.DataArray(y)),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Out-of-support")
def test_data_may_be_of_any_kind_that_the_model_takes(name, precision):
    def model(X, y):
        observe(jnp.asarray(X) @ weigh(), 1.0, getattr(y, "values", y))

    features, y = np.round(4 * X), np.round(3 * Y)
    reading = read(model, *KINDS[name](features, y))
    assert reading.design.rows.dtype == precision
    np.testing.assert_array_equal(rows(reading.design), features.T)
    expected = y > 0 if name.endswith("booleans") else y
    np.testing.assert_array_equal(reading.base.Y[:, 0], expected)


def test_supports_that_depend_on_other_sites_are_not_those_of_some_values():
    def model(X, y, most):
        sigma = numpyro.sample("sigma", dist.Gamma(2.0, 1.0))
        numpyro.sample("of data", dist.Uniform(0.0, most).expand([2]).to_event(1))
        numpyro.sample("of a site", dist.Uniform(0.0, 4 * sigma))
        observe(X @ weigh(), 1.0, y)

    for most in (1.0, 3.0):
        supports = read(model, X, Y, most).supports
        assert supports["of a site"] is None and supports["sigma"] is not None
        np.testing.assert_allclose(supports["of data"].feasible_like(jnp.zeros(2)), most / 2)


# Tasks


def test_tasks_have_one_design_or_share_features():
    args = X, np.stack([Y, -Y], axis=1)
    joint = Reader(of_tasks(2), "test", joint=True)(args, {})
    design = rows(joint.design, 2 * P).reshape(2, P, N, 2)
    np.testing.assert_allclose(design, np.einsum("nm,qr->qmnr", X, np.eye(2)), atol=1e-14)
    shared = read(of_tasks(2), *args)
    assert shared.form.pairs == joint.form.pairs == (Pair("W", (2, P)),)
    assert shared.form.shares_features and shared.design is None
    np.testing.assert_allclose(shared.features, X.T, atol=1e-14)


@pytest.mark.parametrize("tasks", [2, P + 3])
@pytest.mark.parametrize(
    ("others", "last", "large"), [(0.0, 0.0, 1.0), (0.0, 1e-9, 1.0), (1.0, 1.01, 1e5)]
)
@pytest.mark.usefixtures("precision")
def test_features_of_tasks_are_shared_or_not_however_small(tasks, others, last, large):
    """The last task has a column that is another in all others, beside a large one."""
    designs = np.tile(X * [1.0, large, 1.0], (tasks, 1, 1))
    designs[:, :, 0], designs[-1, :, 0] = others, last
    model = of_tasks(tasks, lambda X, W: jnp.einsum("qnm,qm->nq", X, W))
    reading = read(model, jnp.asarray(designs), jnp.zeros((N, tasks)))
    assert (reading.form.shares_features) == (last == others)
    if last == others:
        np.testing.assert_allclose(reading.features, designs[0].T, rtol=1e-6)


# Transformations of the caller


def test_reading_works_under_transformations_of_the_caller():
    """Data that they do not touch are read once, outside of them."""
    reader = Reader(regression(), "test")
    data = jnp.asarray(X), jnp.asarray(Y)
    first = reader(data, {})

    def gram(X, y):
        assert reader(data, {}) is first
        return reader((X, y), {}).design.gram

    expected = first.design.gram
    np.testing.assert_allclose(jax.jit(gram)(*data), expected)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), data)
    np.testing.assert_allclose(jax.vmap(gram)(*stacked), jnp.stack([expected, 4 * expected]))


def one_of_a_spread(X, y):
    """A prior that is made of another site."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    observe(numpyro.sample("level", dist.Uniform(0.0, sigma)) + X @ weigh(), sigma, y)


@pytest.mark.parametrize(
    "model",
    [
        one_of_a_spread,
        regression(lambda X, w: dist.Bernoulli(logits=X @ w)),
        lambda X, y: functions_and_weights(mixed),
    ],
    ids=["other sites", "classes", "functions"],
)
def test_a_reading_keeps_no_tracers(model):
    with jax.checking_leaks():
        read(model, X, 1.0 * (Y > 0))
        jax.jit(lambda X, y: len(read(model, X, y).form.pairs))(X, Y)


def test_traced_data_are_checked_as_far_as_they_can_be():
    model = regression(lambda X, w: dist.StudentT(4.0, X @ w, jnp.exp(X @ w)))
    with pytest.raises(ValueError, match="density StudentT"):
        jax.jit(lambda X, y: read(model, X, y).base.Y)(X, Y)


def traced_form(model: Callable, *args: Any) -> Form:
    """The form that a reader gives a model whose arguments `jit` traces."""
    forms = []

    def use(*args):
        forms.append(read(model, *args).form)
        return 0.0

    jax.jit(use)(*args)
    return forms[0]


def test_traced_data_leave_what_is_known():
    def model(y):
        observe(X @ weigh(), numpyro.sample("s", dist.HalfNormal()), y)

    assert traced_form(model, Y) == assert_agrees(model, Y).form
    scaled = traced_form(lambda k: functions_and_weights(lambda *x: k * mixed(*x)), 1.0)
    assert scaled.is_design
    assert traced_form(lambda offset: functions_and_weights(mixed), 1.0).functions


def test_a_role_that_traced_data_decide_is_none():
    """Neither the values that stand in for them nor those of this call say what others do."""

    def model(flag):
        noise = numpyro.sample("s", dist.HalfNormal()) * jnp.where(flag, 1.0, 2.0)
        observe(X @ weigh(), noise)

    assert traced_form(model, True).roles == ()
    assert assert_agrees(model, True).form.roles == (NoiseRole("s", True),)
    assert assert_agrees(model, False).form.roles == ()


@pytest.mark.parametrize(
    ("design", "numbers"),
    [
        (lambda X, k: jnp.log(X + 10.0) * k, (0.5, -0.5)),
        (lambda X, k: jnp.abs(X), (0.5, -0.5)),
        (lambda X, k: jnp.where(k > 0.0, X, 2 * X), (0.5, -0.5)),
        (lambda X, k: X * (1 + k), (0, 1)),
    ],
    ids=["smooth", "kink", "step", "count"],
)
def test_a_design_of_traced_data_is_copied(design, numbers):
    def model(X, k, y):
        observe(design(X, k) @ weigh(), 0.5, y)

    assert_agrees(model, X, numbers[0], Y)

    def rows_of(*args):
        reading = read(model, *args)
        assert copied(reading)
        relative = reading.view(reading.generic).relative[:, 0]
        return reading.design_at(reading.generic, relative).rows

    traced_rows = jax.jit(rows_of)
    for k in numbers:
        np.testing.assert_allclose(traced_rows(X, k, Y), rows_of(X, k, Y), rtol=1e-6)


def tasks(phi, observed=True, bend=jnp.zeros_like):
    """Three tasks; the features of the last have what ``bend`` makes of those of all."""
    with numpyro.plate("task", 3, dim=-2), numpyro.plate("feature", P):
        W = nss.spike_slab("W", 0.25)
    with numpyro.plate("column", 3, dim=-1):
        s = numpyro.sample("s", dist.HalfNormal())
    location = phi @ W.T + jnp.array([0.0, 0.0, 1.0]) * (bend(phi) @ W[2])[:, None]
    with numpyro.plate("obs", N, dim=-2), numpyro.plate("column", 3, dim=-1):
        numpyro.sample("y", dist.Normal(location, s).mask(observed), obs=jnp.ones((N, 3)))


TRACED: dict[str, tuple[Callable, tuple, str, bool]] = {
    "features": (tasks, (X,), "shares_features", True),
    "features and mask": (tasks, (X, np.ones((N, 3), bool)), "shares_features", False),
    "indices": (
        lambda k: tasks(jnp.asarray(X), True, lambda x: x[k] * 0),
        (np.arange(N),),
        "is_design",
        True,
    ),
    **{
        name: (partial(tasks, bend=bend), (X,), "is_design", True)
        for name, bend in {
            "absolute value": lambda phi: jnp.abs(phi + 100.0) - (phi + 100.0),
            "step": lambda phi: jnp.floor(phi / 100.0),
            "own derivative": lambda phi: jax.nn.relu(phi - 100.0),
        }.items()
    },
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_features_are_shared_where_they_are_at_all_values(name):
    """What bends makes nothing of small features, but something of large ones."""
    model, args, kind, complete = TRACED[name]
    form = traced_form(model, *args)
    assert getattr(form, kind)
    if kind == "shares_features":
        assert form.complete == complete and form.roles == (NoiseRole("s", True),)
