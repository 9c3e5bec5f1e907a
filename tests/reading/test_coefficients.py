# SPDX-License-Identifier: Apache-2.0
"""Which sites beside the weights have an exact draw, proved from the program."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jax.numpy as jnp

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import SHARED
from numpyro_spikeslab.reading.reader import Reader
from numpyro_spikeslab.roles import InclusionRole, NoiseRole

X = np.random.default_rng(0).normal(size=(12, 3))


def form_of(rest: Callable[[Any], Any], scale: Any = 0.5, inclusion: Any = 0.3) -> Any:
    """:param rest: from ``X @ w`` to the location."""

    def model():
        with numpyro.plate("feature", 3):
            w = nss.spike_slab("w", inclusion() if callable(inclusion) else inclusion)
        location = rest(jnp.asarray(X) @ w)
        sigma = scale() if callable(scale) else scale
        numpyro.sample("y", dist.Normal(location, sigma).to_event(1), obs=jnp.ones(12))

    return Reader(model, "test")((), {}).form


def normal(name: str, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return numpyro.sample(name, dist.Normal(loc, scale))


def sloped(offset: Any) -> Any:
    with numpyro.plate("covariate", 2):
        slope = normal("slope")
    return offset + normal("level") + X[:, :2] @ slope


def grouped(offset: Any) -> Any:
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    mean = normal("mean")
    with numpyro.plate("group", 4):
        effect = normal("effect", mean, spread)
    return offset + effect[np.arange(12) % 4]


def scaled(offset: Any) -> Any:
    return offset + numpyro.sample("factor", dist.HalfNormal(1.0)) * normal("level")


LOCATIONS = {
    "covariates": (sloped, {"slope", "level"}),
    # the mean of others is one itself, their spread is none
    "groups": (grouped, {"effect", "mean"}),
    "a factor": (scaled, {"level"}),
    "a product": (lambda offset: offset + normal("a") * normal("b") + normal("c"), {"a", "c"}),
    "a square": (lambda offset: offset + normal("a") ** 2 + normal("b"), {"b"}),
    "of the weights": (lambda offset: offset * normal("a") + normal("b"), {"b"}),
    "rounded": (lambda offset: offset + jnp.round(normal("a")), set()),
    "a switch": (lambda offset: offset + jnp.where(normal("a") > 0, 1.0, 2.0), set()),
    "another prior": (lambda offset: offset + numpyro.sample("a", dist.StudentT(3.0)), set()),
    "masked": (lambda offset: offset + numpyro.sample("a", dist.Normal().mask(False)), set()),
    "a chain": (lambda offset: offset + normal("c", 2 * normal("b", normal("a"))), {"a", "b", "c"}),
    "a mean that bends": (lambda offset: offset + normal("b", normal("a") ** 2), {"b"}),
    "a mean in steps": (lambda offset: offset + normal("b", jnp.round(normal("a"))), {"b"}),
    "a spread": (lambda offset: offset + normal("b", 0.0, jnp.exp(normal("a"))), {"b"}),
    "the mean of what is none": (
        lambda offset: offset + normal("b", mean := normal("a")) ** 2 + mean,
        set(),
    ),
    "a mean that is a product": (
        lambda offset: offset + normal("c", normal("a") * normal("b")),
        {"a", "c"},
    ),
}


@pytest.mark.parametrize("name", LOCATIONS)
def test_coefficients_are_normal_and_the_location_affine_in_them(name):
    rest, names = LOCATIONS[name]
    assert set(form_of(rest).coefficients) == names


def test_prior_means_that_depend_on_others_are_known():
    assert form_of(grouped).links == (("effect", "mean"),)
    assert form_of(sloped).links == ()


def tasks_form(location: Callable[[Any], Any]) -> Any:
    """:param location: from ``X @ W.T`` of 12 points and 4 tasks to the location."""

    def model():
        with numpyro.plate("task", 4, dim=-2), numpyro.plate("feature", 3, dim=-1):
            W = nss.spike_slab("W", 0.3)
        mean = location(jnp.asarray(X) @ W.T)
        with numpyro.plate("obs", 12, dim=-2), numpyro.plate("task", 4, dim=-1):
            numpyro.sample("Y", dist.Normal(mean, 0.5), obs=jnp.ones((12, 4)))

    return Reader(model, "test")((), {}).form


def of_task(name: str, size: int = 4) -> Any:
    with numpyro.plate("task" if size == 4 else "point", size):
        return normal(name)


def slopes(offset: Any) -> Any:
    with numpyro.plate("covariate", 2, dim=-2), numpyro.plate("task", 4, dim=-1):
        slope = normal("slope")
    return offset + of_task("level") + X[:, :2] @ slope


def without_plate(offset: Any) -> Any:
    return offset + numpyro.sample("level", dist.Normal(jnp.zeros(4), 1.0).to_event(1))


def of_hierarchy(offset: Any) -> Any:
    mean = normal("mean")
    with numpyro.plate("task", 4):
        return offset + normal("level", mean)


OF_TASKS = {
    "covariates": (slopes, {("level", -1), ("slope", -1)}, {"level", "slope"}),
    "without a plate": (without_plate, {("level", -1)}, {"level"}),
    # what follows has one design for all
    "one for all tasks": (lambda offset: offset + normal("level"), set(), {"level"}),
    "one for all tasks, too": (
        lambda offset: offset + of_task("level") + normal("all"),
        set(),
        {"level", "all"},
    ),
    "of another task": (
        lambda offset: offset + of_task("level")[np.array([1, 0, 2, 3])],
        set(),
        {"level"},
    ),
    "of points": (lambda offset: offset + of_task("level", 12)[:, None], set(), {"level"}),
    "covariates that differ": (
        lambda offset: offset + np.arange(1, 5) * of_task("level"),
        set(),
        {"level"},
    ),
    "with a mean of their own": (of_hierarchy, set(), {"level", "mean"}),
    "with a scale of their own": (
        lambda offset: offset + numpyro.sample("s", dist.HalfNormal()) * of_task("level"),
        set(),
        {"level"},
    ),
}


@pytest.mark.parametrize("name", OF_TASKS)
def test_coefficients_of_tasks_are_known(name):
    location, of_tasks, names = OF_TASKS[name]
    form = tasks_form(location)
    assert form.kind == SHARED and set(form.of_tasks) == of_tasks
    assert set(form.coefficients) == names


def test_a_coefficient_of_many_entries_is_left_to_others():
    """Its design is dense, whatever the model does with it."""

    def many(offset):
        with numpyro.plate("group", 4_000):
            effect = normal("effect")
        return offset + normal("first") + effect[:12] + normal("last")

    assert set(form_of(many).coefficients) == {"first", "last"}


def walk(of):
    """Entries whose prior depends on those before them."""

    def step(last, _):
        new = numpyro.sample("z", of(last))
        return new, new

    return scan(step, jnp.ones(()), None, length=12)[1]


def test_entries_that_depend_on_each_other_are_not_drawn_one_by_one():
    form = form_of(lambda offset: offset + walk(lambda last: dist.Normal(0.9 * last, 1.0)))
    assert form.coefficients == () and form.free == ("z",)
    form = form_of(lambda offset: offset, scale=lambda: walk(dist.HalfNormal)[-1])
    assert form.roles == ()

    def model():
        scales = walk(lambda last: dist.LogNormal(jnp.log(last), 0.1))
        with numpyro.plate("feature", 12):
            w = nss.spike_slab("w", 0.3, scales)
        numpyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=jnp.ones(12))

    form = Reader(model, "test")((), {}).form
    assert form.roles == ()


def test_a_coefficient_has_no_other_part():
    def shared():
        return jnp.exp(numpyro.sample("a", dist.Normal()))

    assert form_of(lambda offset: offset, scale=shared).coefficients == ()

    def model_offset(offset):
        level = normal("level")
        numpyro.factor("more", -jnp.square(level))
        return offset + level

    assert form_of(model_offset).coefficients == ()


SCALES = {
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
    form = form_of(lambda offset: offset, scale=lambda: numpyro.sample("sigma", prior))
    assert form.roles == ((NoiseRole("sigma", has_mode=False),) if is_drawn else ())
    assert form.free == ("sigma",)


def test_an_inclusion_probability_with_a_prior_of_probabilities_can_be_drawn():
    prior = dist.Kumaraswamy(2.0, 3.0)
    form = form_of(lambda offset: offset, inclusion=lambda: numpyro.sample("pi", prior))
    assert form.roles == (InclusionRole("pi", has_mode=False),)
