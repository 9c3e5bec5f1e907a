# SPDX-License-Identifier: Apache-2.0
"""Which sites beside the weights have an exact draw or an optimum, proved from the program."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from truth.agreement import assert_agrees
from truth.regressions import TIME, X2, N, P, X, Y, normal, observe, of_tasks, read, weigh

import jax
from jax import nn
import jax.numpy as jnp

import numpyro
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.roles import CoefficientRole, InclusionRole, NoiseRole, SlabRole

# in one precision: JAX, given a numpy array once in each, may take its buffer from the other
pytestmark = pytest.mark.usefixtures("x64")


def form_of(location: Callable = lambda Xw: Xw, scale: Any = lambda: 0.5, pi: Any = None) -> Form:
    """:param location: from ``X @ w`` to the location."""

    def model():
        observe(location(X @ weigh("w", P, pi() if pi else 0.3)), scale())

    return read(model).form


site = numpyro.sample


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


BESIDE: dict[str, tuple[Callable, str]] = {
    "a cut point": (lambda f, a, b: dist.OrderedLogistic(f + b, a[None]), "b"),
    "a cut point of probits": (lambda f, a, b: nss.OrderedProbit(f + b, a[None]), "b"),
    "degrees of freedom": (lambda f, a, b: dist.StudentT(1.0 + a**2, f + a + b, 0.5), "b"),
    "a scale": (lambda f, a, b: dist.Laplace(f + b, jnp.exp(a)), "b"),
    "a factor of the mean": (lambda f, a, b: dist.Poisson(jnp.exp(f + b) * (1 + a**2)), "b"),
    "nothing else": (lambda f, a, b: dist.Poisson(jnp.exp(f + a - b)), "a b"),
}
"""Likelihoods of a predictor and two Normal sites, and which of these are coefficients."""


@pytest.mark.parametrize("name", BESIDE)
def test_what_moves_the_density_beside_its_predictor_is_no_coefficient(name):
    """It would be drawn as if the observations were not there."""
    likelihood, expected = BESIDE[name]

    def model():
        f, (a, b) = X @ weigh("w", P), map(normal, "ab")
        with numpyro.plate("obs", N):
            site("y", likelihood(f, a, b), obs=(Y > 0).astype(int))

    assert read(model).form.coefficients == tuple(expected.split())


@pytest.mark.parametrize("part", ["inclusion", "slab", "coefficient"])
def test_what_moves_the_density_beside_its_predictor_has_no_role(part):
    """As a scale of weights that is one of heavy tails, too."""

    def model(own):
        s = site("s", dist.Uniform(0.1, 0.9))
        w = weigh("w", P, s if part == "inclusion" else 0.3, s if part == "slab" else 1.0)
        f = X @ w + in_plate("e", 4, 0.0, s if part == "coefficient" else 1.0)[np.arange(N) % 4]
        observed = dist.StudentT(3.0, f, s if own else 0.5)
        with numpyro.plate("obs", N):
            site("y", observed, obs=Y)

    assert [role.site for role in read(lambda: model(False)).form.roles] == ["s"]
    form = read(lambda: model(True)).form
    assert form.roles == () and "s" in form.free


def slopes(XW: Any) -> Any:
    with numpyro.plate("covariate", 2, dim=-2), numpyro.plate("task", 4, dim=-1):
        slope = normal("slope")
    return XW + in_plate("level", 4) + X[:, :2] @ slope


def of_entries(Xw: Any) -> Any:
    scales = site("spread", dist.HalfCauchy(jnp.ones(2)).to_event(1))
    return Xw + in_plate("effect", 4, 0.0, scales[np.array([0, 1, 1, 0])])[np.arange(N) % 4]


def with_spread(of: Callable) -> Callable:
    """:param of: from the spread to the priors of two sites, the second not Normal."""

    def location(Xw):
        first, second = of(site("spread", dist.HalfNormal(1.0)))
        return Xw + site("a", dist.Normal(*first)) + site("b", second)

    return location


def in_predictor(Xw: Any) -> Any:
    spread = site("spread", dist.HalfNormal(1.0))
    return Xw + spread * X[:, 0] + normal("a", 0.0, spread)


OTHER = dist.StudentT(3.0)
SPREADS: dict[str, tuple[Callable, list[int] | None]] = {
    "groups with a mean": (grouped, [0, 0, 0, 0, 1]),
    "entries": (of_entries, [0, 1, 1, 0]),
    "beside another prior": (with_spread(lambda s: ((0.0, s), OTHER)), [0]),
    "a multiple": (with_spread(lambda s: ((0.0, 2 * s), OTHER)), None),
    "a sum": (with_spread(lambda s: ((0.0, 1 + s), OTHER)), None),
    "in a mean, too": (with_spread(lambda s: ((s, s), OTHER)), None),
    "in another prior, too": (with_spread(lambda s: ((0.0, s), dist.StudentT(3.0, 0.0, s))), None),
    "in the predictor, too": (in_predictor, None),
    "a param": (lambda Xw: Xw + normal("a", 0.0, numpyro.param("spread", 1.0)), None),
}


@pytest.mark.parametrize("name", SPREADS)
def test_the_scales_of_coefficients_are_known(name):
    location, entries = SPREADS[name]

    def model():
        observe(location(X @ weigh("w", P, 0.3)), 0.5)

    reading = read(model)
    assert "spread" in reading.form.free
    assert [role.site for role in reading.form.roles] == ([] if entries is None else ["spread"])
    if entries is not None:
        assert isinstance(reading.form.roles[0], CoefficientRole)
        np.testing.assert_array_equal(reading.indices["spread"].entries, entries)


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
    assert form.shares_features and set(form.of_tasks) == tasks
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


def test_other_parts_with_a_normal_or_a_bounded_prior():
    assert form_of(scale=lambda: jnp.exp(normal("a"))).coefficients == ()
    form = form_of(pi=lambda: site("pi", dist.Kumaraswamy(2.0, 3.0)))
    assert form.roles == (InclusionRole("pi", has_mode=False),)


# Scales and inclusion probabilities


def with_noise(noise: Callable, prior: Any = None, slab: Callable = lambda s: 1.0) -> Callable:
    def model():
        s = numpyro.sample("s", dist.HalfNormal() if prior is None else prior)
        observe(X @ weigh(scale=slab(s)), noise(s))

    return model


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
    "nearly": with_noise(lambda s: 1.001 * s),
    "sum": with_noise(lambda s: s + 0.1),
    "one beyond": with_noise(lambda s: jnp.maximum(s, 1e-9)),
    "stopped": with_noise(jax.lax.stop_gradient),
    "time of a change": with_noise(lambda tau: jnp.where(tau < TIME, 0.3, 3.0), dist.Normal()),
    # of such numbers the result is positive
    "sum and difference": with_noise(
        lambda s: s[1] + s[2] - s[0], dist.Uniform(1.0, 1.5).expand([3]).to_event(1)
    ),
    # a mean of two or of evenly spaced values is one of the values, or nearly
    "mean": with_noise(jnp.mean, dist.HalfNormal(1.0).expand([3]).to_event(1)),
    "mean of two": with_noise(
        lambda s: jnp.mean(s[np.array([3, 1])]), dist.HalfNormal(1.0).expand([5]).to_event(1)
    ),
    "part of its own": own_part,
    # what another site adds may be nothing at the values of the probe, between -2 and 2
    "another beyond 1.9": with_noise(lambda s: s + nn.relu(normal("u") - 1.9)),
    "another beyond 1000": with_noise(lambda s: s + nn.relu(normal("u") + 1e3)),
    "another in steps": with_noise(lambda s: s + 1.0 * numpyro.sample("u", dist.Bernoulli(0.5))),
    "another scale": with_noise(lambda s: s + numpyro.sample("u", dist.HalfNormal())),
    "a param": with_noise(lambda s: s + numpyro.param("t", 0.0)),
    # sites that are used elsewhere, too
    "slab": with_noise(lambda s: s, slab=lambda s: s),
    "prior": with_noise(lambda s: [s, normal("other", 0.0, s)][0]),
    "factor": with_noise(lambda s: [s, numpyro.factor("other", -s)][0]),
    "observed": with_noise(lambda s: [s, numpyro.sample("other", dist.Normal(s), obs=0.3)][0]),
}


@pytest.mark.parametrize("name", NO_ROLE)
def test_a_site_that_is_more_or_less_than_a_scale_has_no_role(name):
    form = assert_agrees(NO_ROLE[name]).form
    assert form.roles == () and "s" in form.free
    assert form.varying_noise == (name == "time of a change")


def test_roles_stand_side_by_side_and_weights_take_entries_of_them():
    group = np.array([1, 0, 1])

    def model():
        pi = numpyro.sample("pi", dist.Beta(1.0, 2.0).expand([2]).to_event(1))
        scale, s, t = (numpyro.sample(name, dist.HalfNormal()) for name in ("scale", "s", "t"))
        w = weigh("w", P, pi[group], scale)
        v = weigh("v", 2, nn.sigmoid(jnp.log(s)), jnp.array([0.5, 2.0]))
        observe(X @ w + X2[:, :2] @ v, t)

    reading = assert_agrees(model)
    roles = {InclusionRole("pi", True), SlabRole("scale", True), NoiseRole("t", True)}
    assert set(reading.form.roles) == roles and [x.name for x in reading.form.pairs] == ["w", "v"]
    np.testing.assert_array_equal(reading.indices["pi"].entries, [[1, 0, 1, 2, 2]])
    np.testing.assert_array_equal(reading.indices["scale"].entries, [[0, 0, 0, 1, 1]])


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
