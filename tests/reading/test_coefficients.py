# SPDX-License-Identifier: Apache-2.0
"""Which sites beside the weights have an exact draw, proved from the program."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from regressions import N, P, X, Y, normal, observe, of_tasks, read, weigh

import jax.numpy as jnp

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist

from numpyro_spikeslab.reading.form import SHARED, Form
from numpyro_spikeslab.roles import InclusionRole, NoiseRole


def form_of(
    location: Callable = lambda Xw: Xw,
    scale: Callable = lambda: 0.5,
    inclusion: Callable = lambda: 0.3,
) -> Form:
    """:param location: from ``X @ w`` to the location."""

    def model():
        observe(location(X @ weigh("w", P, inclusion())), scale())

    return read(model).form


def site(name: str, prior: Any) -> Any:
    return numpyro.sample(name, prior)


def in_plate(name: str, size: int, mean: Any = 0.0, scale: Any = 1.0) -> Any:
    with numpyro.plate(f"of_{name}", size):
        return normal(name, mean, scale)


def grouped(Xw: Any) -> Any:
    spread, mean = site("spread", dist.HalfNormal(1.0)), normal("mean")
    return Xw + in_plate("effect", 4, mean, spread)[np.arange(N) % 4]


def spent_mean(Xw: Any) -> Any:
    mean = normal("a")
    return Xw + normal("b", mean) ** 2 + mean


def with_factor(Xw: Any) -> Any:
    level = normal("a")
    numpyro.factor("more", -jnp.square(level))
    return Xw + level


LOCATIONS: dict[str, tuple[Callable, str]] = {
    "covariates": (lambda Xw: Xw + normal("a") + X[:, :2] @ in_plate("b", 2), "a b"),
    # the mean of others is one itself, their spread is none
    "groups": (grouped, "effect mean"),
    # a dense design would be too large, whatever the model does with it
    "many entries": (
        lambda Xw: Xw + normal("a") + in_plate("many", 4_000)[:N] + normal("b"),
        "a b",
    ),
    "a factor": (lambda Xw: Xw + site("s", dist.HalfNormal(1.0)) * normal("a"), "a"),
    "a product": (lambda Xw: Xw + normal("a") * normal("b") + normal("c"), "a c"),
    "a square": (lambda Xw: Xw + normal("a") ** 2 + normal("b"), "b"),
    "of the weights": (lambda Xw: Xw * normal("a") + normal("b"), "b"),
    "rounded": (lambda Xw: Xw + jnp.round(normal("a")), ""),
    "a switch": (lambda Xw: Xw + jnp.where(normal("a") > 0, 1.0, 2.0), ""),
    "another prior": (lambda Xw: Xw + site("a", dist.StudentT(3.0)), ""),
    "masked": (lambda Xw: Xw + site("a", dist.Normal().mask(False)), ""),
    "in a density": (with_factor, ""),
    "a chain": (lambda Xw: Xw + normal("c", 2 * normal("b", normal("a"))), "a b c"),
    "a mean that bends": (lambda Xw: Xw + normal("b", normal("a") ** 2), "b"),
    "a mean in steps": (lambda Xw: Xw + normal("b", jnp.round(normal("a"))), "b"),
    "a spread": (lambda Xw: Xw + normal("b", 0.0, jnp.exp(normal("a"))), "b"),
    "the mean of what is none": (spent_mean, ""),
    "a mean that is a product": (lambda Xw: Xw + normal("c", normal("a") * normal("b")), "a c"),
}


@pytest.mark.parametrize("name", LOCATIONS)
def test_coefficients_are_normal_and_the_location_affine_in_them(name):
    location, names = LOCATIONS[name]
    form = form_of(location)
    assert set(form.coefficients) == set(names.split())
    links = {"groups": {("effect", "mean")}, "covariates": set()}
    assert name not in links or set(form.links) == links[name]


def test_what_is_in_the_noise_is_no_coefficient():
    assert form_of(scale=lambda: jnp.exp(normal("a"))).coefficients == ()


def slopes(XW: Any) -> Any:
    with numpyro.plate("covariate", 2, dim=-2), numpyro.plate("task", 4, dim=-1):
        slope = normal("slope")
    return XW + in_plate("level", 4) + X[:, :2] @ slope


OF_TASKS: dict[str, tuple[Callable, set[tuple[str, int]], str]] = {
    "covariates": (slopes, {("level", -1), ("slope", -1)}, "level slope"),
    "without a plate": (
        lambda XW: XW + site("level", dist.Normal(jnp.zeros(4), 1.0).to_event(1)),
        {("level", -1)},
        "level",
    ),
    # what follows has one design for all
    "one for all tasks": (lambda XW: XW + normal("level"), set(), "level"),
    "and one for all": (lambda XW: XW + in_plate("level", 4) + normal("all"), set(), "level all"),
    "of another task": (lambda XW: XW + in_plate("level", 4)[::-1], set(), "level"),
    "of points": (lambda XW: XW + in_plate("level", N)[:, None], set(), "level"),
    "covariates that differ": (
        lambda XW: XW + np.arange(1, 5) * in_plate("level", 4),
        set(),
        "level",
    ),
    "with a mean": (lambda XW: XW + in_plate("level", 4, normal("mean")), set(), "level mean"),
    "with a scale": (
        lambda XW: XW + site("s", dist.HalfNormal()) * in_plate("level", 4),
        set(),
        "level",
    ),
}


@pytest.mark.parametrize("name", OF_TASKS)
def test_coefficients_of_tasks_are_known(name):
    location, tasks, names = OF_TASKS[name]
    form = read(of_tasks(4, lambda X, W: location(jnp.asarray(X) @ W.T)), X, np.ones((N, 4))).form
    assert form.kind == SHARED and set(form.of_tasks) == tasks
    assert set(form.coefficients) == set(names.split())


def walk(of: Callable) -> Any:
    """Entries whose prior depends on those before them."""

    def step(last, _):
        new = numpyro.sample("z", of(last))
        return new, new

    return scan(step, jnp.ones(()), None, length=N)[1]


def test_entries_that_depend_on_each_other_are_not_drawn_one_by_one():
    form = form_of(lambda Xw: Xw + walk(lambda last: dist.Normal(0.9 * last, 1.0)))
    assert form.coefficients == () and form.free == ("z",)
    assert form_of(scale=lambda: walk(dist.HalfNormal)[-1]).roles == ()

    def model():
        scales = walk(lambda last: dist.LogNormal(jnp.log(last), 0.1))
        observe(weigh("w", N, 0.3, scales), 1.0, Y)

    assert read(model).form.roles == ()


SCALES: dict[str, tuple[Any, bool]] = {
    "LogNormal": (dist.LogNormal(), True),
    "HalfCauchy": (dist.HalfCauchy(1.0), True),
    "InverseGamma": (dist.InverseGamma(2.0), True),
    "bounded": (dist.Uniform(0.1, 3.0), True),
    "negative": (dist.Uniform(-0.001, 3.0), False),
    "masked": (dist.LogNormal().mask(False), False),
    "improper": (dist.ImproperUniform(dist.constraints.greater_than(0.5), (), ()), False),
}


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_with_a_proper_prior_of_positive_numbers_can_be_drawn(name):
    prior, is_drawn = SCALES[name]
    form = form_of(scale=lambda: site("sigma", prior))
    assert form.roles == ((NoiseRole("sigma", has_mode=False),) if is_drawn else ())
    assert form.free == ("sigma",)


def test_an_inclusion_probability_with_a_prior_of_probabilities_can_be_drawn():
    form = form_of(inclusion=lambda: site("pi", dist.Kumaraswamy(2.0, 3.0)))
    assert form.roles == (InclusionRole("pi", has_mode=False),)
