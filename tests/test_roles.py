# SPDX-License-Identifier: Apache-2.0
"""Sites with a role: their index, and their modes against grids."""

from itertools import product

import numpy as np
import pytest
from scipy import stats
from scipy.special import betaln, logsumexp
import truth

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import Trace_ELBO

import numpyro_spikeslab as nss
from numpyro_spikeslab.reading.roles import InclusionRole, Index, Tally

ROLE = InclusionRole("pi", True)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 3))
Y = 2 * X[:, 0] + RNG.normal(size=20)


@pytest.mark.parametrize(
    ("entries", "shape"),
    [
        ([[1, 0, 1, 3], [0, 0, 3, 2]], (3,)),
        # one row for all tasks; a weight that takes no entry
        ([[1, 0, 2, 1]], (2,)),
        ([[0, 1, 0, 0]], ()),
        (None, ()),
    ],
)
def test_an_index_sums_what_takes_an_entry(entries, shape):
    index = Index(None if entries is None else jnp.array(entries), shape)
    x, other = jnp.arange(8.0).reshape(2, 4), -jnp.ones((2, 4))
    table = np.broadcast_to(0 if entries is None else entries, (2, 4))
    size = max(int(np.prod(shape)), 1)
    sums = [np.sum(np.asarray(x)[table == k]) for k in range(size)]
    np.testing.assert_array_equal(index.sum(x), np.reshape(sums, shape))
    value = jnp.arange(10.0, 10 + size)
    expected = np.append(value, -1.0)[table]
    rows = slice(0, 2 if entries is None else len(entries))
    np.testing.assert_array_equal(index.take(value.reshape(shape), other[rows]), expected[rows])


def test_an_index_of_tasks():
    local, shared = Index(jnp.array([2, 0, 1]), (3,)), Index(jnp.array([0, 0, 1]), (2,))
    assert local.is_local(3) and not shared.is_local(3) and not Index(None, ()).is_local(3)


@pytest.mark.parametrize(("one", "zero"), [*product((1.0, 1.5, 3.0), repeat=2)])
def test_inclusion_has_its_largest_density(one, zero, precision):
    sums = [(x, t) for x, t in product((0.0, 0.1, 0.5, 0.9, 1.0, 2.5), (0.0, 1.0, 3.0)) if x <= t]
    included, total = (jnp.array(x) for x in zip(*sums, strict=True))
    prior, current = dist.Beta(one, zero), jnp.full(len(sums), 0.3)
    modes = np.asarray(ROLE.mode(Tally(total, included), prior, current))
    eps = np.finfo(precision).eps
    assert np.all((modes >= eps) & (modes <= 1 - eps))
    grid = np.linspace(1e-3, 1 - 1e-3, 999)

    def objective(x, pi):
        a, b = x[0] + one - 1, x[1] - x[0] + zero - 1
        return a * np.log(pi) + b * np.log1p(-pi)

    for x, pi in zip(sums, modes.astype(float), strict=True):
        pi = np.clip(pi, 1e-3, 1 - 1e-3)
        assert objective(x, pi) >= objective(x, grid).max() - 1e-4
        # a fit goes on from there, so it must not fall either
        assert objective(x, pi) >= objective(x, 0.3) - 1e-6


@pytest.mark.parametrize("bounds", [(0.0, 1e-7), (0.8, 1.0), (0.75, 1.0), (0.0, 1.5)])
@pytest.mark.parametrize("included", [0.0, 1.0, 3.0])
def test_inclusion_stays_within_bounds(included, bounds, precision):
    prior, current = dist.Uniform(*bounds), np.mean(bounds)
    low, high = bounds[0], min(bounds[1], 1.0)
    mode = ROLE.mode(Tally(jnp.array(3.0), jnp.array(included)), prior, current)
    assert np.asarray(low, precision) < mode < np.asarray(high, precision)
    np.testing.assert_allclose(mode, np.clip(included / 3, low, high), rtol=1e-6, atol=2e-7)


def test_the_inclusion_of_no_weight_stays(precision):
    current = jnp.full(1, 0.4)
    for prior in (dist.Beta(1.0, 1.0), dist.Uniform(0.1, 0.6), None):
        mode = ROLE.mode(Tally(jnp.zeros(1), jnp.zeros(1)), prior, current)
        np.testing.assert_array_equal(mode, current)


def test_the_bound_never_falls_where_each_column_has_its_own_inclusion(x64):
    """And nothing becomes NaN by a column of zeros, or by an entry that no column takes."""

    def model(X, y):
        with numpyro.plate("level", 4):
            inclusion = numpyro.sample("inclusion", dist.Beta(1.0, 1.0))
        truth.respond(y, X @ truth.weights(3, inclusion[:3]), 1.0)

    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, temperature=None)
    for design in (X, X * [1.0, 0.0, 1.0]):
        result = svi.run(random.key(0), 30, design, Y, progress_bar=False)
        assert np.max(np.diff(result.losses)) < 1e-9
        probs = np.asarray(guide.inclusion_probabilities(result.params)["w"])
        inclusion = np.asarray(result.params["inclusion_auto_loc"])
        assert probs[0] > 0.99 and np.all(np.isfinite(inclusion))


def with_prior(prior):
    """A regression whose inclusion probability has a prior that may depend on data or sites."""

    def model(X, y):
        truth.respond(y, X @ truth.weights(3, numpyro.sample("inclusion", prior(X))), 1.0)

    return model


def of_concentration(least):
    return dist.Beta(least + numpyro.sample("a", dist.HalfNormal(1.0)), 1.0)


WITHOUT_MODE = {
    "constants": lambda X: dist.Beta(0.3, 1.0),
    "the size of the data": lambda X: dist.Beta(1.0, X.shape[1] / 2 - 1),
    "data": lambda X: dist.Beta(1.0, 0.5 + 0 * X[0, 0]),
    "another site": lambda X: of_concentration(0.0),
}


@pytest.mark.parametrize("name", WITHOUT_MODE)
def test_inclusion_has_a_beta_factor_where_it_has_no_mode(x64, name):
    model = with_prior(WITHOUT_MODE[name])
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, temperature=None)
    result = svi.run(random.key(0), 60, X, Y, progress_bar=False)
    assert np.max(np.diff(result.losses)) < 1e-9
    size, kinds = 20_000, ("concentration1", "concentration0")
    a, b = (np.asarray(result.params[f"inclusion_auto_{kind}"]) for kind in kinds)
    included = float(np.sum(guide.inclusion_probabilities(result.params)["w"]))
    if name == "constants":
        np.testing.assert_allclose((a, b), (0.3 + included, 1 + 3 - included), rtol=1e-6)
        assert -result.losses[-1] < log_evidence(0.3, 1.0) < -result.losses[-1] + 0.5
    terms = jax.jit(jax.vmap(lambda k: -Trace_ELBO().loss(k, result.params, model, guide, X, Y)))
    draws = np.asarray(terms(random.split(random.key(1), size)))
    # a false alarm in 1 of 16000 keys
    assert abs(draws.mean() + result.losses[-1]) < 4 * draws.std() / size**0.5
    again = svi.init(random.key(0), X, Y, init_params=result.params)
    np.testing.assert_allclose(svi.evaluate(again, X, Y), result.losses[-1], rtol=1e-9)
    median = guide.median(result.params)["inclusion"]
    np.testing.assert_allclose(stats.beta(a, b).cdf(median), 0.5, atol=1e-6)


def test_a_learnt_concentration_does_not_depend_on_the_precision(restored_x64):
    """At a point, probabilities near 0 would have densities that grow with it."""

    def model(X, y):
        a = numpyro.sample("a", dist.Gamma(2.0, 1.0))
        with numpyro.plate("level", 3):
            inclusion = numpyro.sample("inclusion", dist.Beta(a / 3, 1.0))
        truth.respond(y, X @ truth.weights(3, inclusion), 1.0)

    found = []
    for precision in ("float64", "float32"):
        jax.config.update("jax_enable_x64", precision == "float64")
        svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
        result = svi.run(random.key(0), 100, X, Y, progress_bar=False)
        found.append(float(result.params["a_auto_loc"]))
    np.testing.assert_allclose(*found, rtol=0.01)
    # the best value given the expected spikes, by a grid
    included = np.asarray(svi.guide.inclusion_probabilities(result.params)["w"])[:, None]
    a = np.linspace(0.01, 5, 5000)
    terms = betaln(a / 3 + included, 2 - included) - betaln(a / 3, 1.0)
    best = a[np.argmax(np.log(a) - a + terms.sum(0))]
    np.testing.assert_allclose(found[0], best, atol=2e-3)


def log_evidence(a, b):
    """Sum over all sets of columns, with their probability integrated out."""
    terms = []
    for spikes in product([0, 1], repeat=3):
        cov = np.eye(len(Y)) + (X * spikes) @ (X * spikes).T
        prior = betaln(a + sum(spikes), b + 3 - sum(spikes)) - betaln(a, b)
        terms.append(prior + stats.multivariate_normal(cov=cov).logpdf(Y))
    return logsumexp(terms)


UNBOUNDED = {
    "no closed mode": lambda X: dist.Kumaraswamy(0.5, 1.0),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_density_without_a_maximum_is_refused_by_fits_alone(x64, name):
    model = with_prior(UNBOUNDED[name])
    with pytest.raises(ValueError, match="the prior of 'inclusion': got a density without a max"):
        nss.CAVI(model, nss.PairedGuide(model)).init(random.key(0), X, Y)
    nss.PairedGibbs(model).init(random.key(0), 1, None, (X, Y), {})


def test_nor_does_a_density_without_a_maximum_pass_where_it_is_known_late(x64):
    def last(concentration):
        model = with_prior(lambda X: dist.Beta(concentration, 1.0))
        svi = nss.CAVI(model, nss.PairedGuide(model), temperature=None)
        return svi.run(random.key(0), 5, X, Y, progress_bar=False).losses[-1]

    assert np.isnan(jax.jit(last)(0.5)) and np.isfinite(jax.jit(last)(1.0))
