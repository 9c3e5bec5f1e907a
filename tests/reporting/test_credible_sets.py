# SPDX-License-Identifier: Apache-2.0
"""Credible sets of correlated columns."""

import arviz_base
from drawn import variational
from known_draws import DRAWS, coin, pair, with_stats
import numpy as np
import pandas as pd
import pytest
import truth
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")


def alike(count, rho=0.9, num_obs=200, seed=0):
    """Columns whose correlations are about ``rho``."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(num_obs, 1))
    return np.sqrt(rho) * common + np.sqrt(1 - rho) * rng.normal(size=(num_obs, count))


def choices(probs, num_draws=400, seed=0):
    """Spikes of two chains, exactly one of them 1 in each draw."""
    which = np.random.default_rng(seed).choice(len(probs), p=probs, size=(2, num_draws))
    return np.eye(len(probs), dtype=int)[which]


def members(table):
    return table["members"].tolist()


def test_columns_that_share_an_effect_are_a_set():
    spikes = choices([0.5, 0.3, 0.16, 0.04])
    X = alike(4)
    table = nss.credible_sets(pair(spikes), "w", X)
    assert members(table) == [(0, 1, 2)] and table["size"].tolist() == [3]
    assert table["probability"][0] == spikes[..., :3].any(axis=-1).mean()
    r = abs(np.corrcoef(X[:, :3].T))
    assert table["purity"][0] == pytest.approx(r.min())


def test_two_effects_among_alike_columns_are_two_sets():
    spikes = np.concatenate([choices([0.5, 0.5]), choices([0.6, 0.4], seed=1)], axis=-1)
    X = alike(4) * [1.0, -2.0, 1e5, 1e-5] + [0.0, 10.0, 0.0, 1.0]
    table = nss.credible_sets(pair(spikes), "w", X)
    assert sorted(map(set, members(table)), key=min) == [{0, 1}, {2, 3}]
    np.testing.assert_array_equal(table["probability"], 1.0)


def test_members_are_correlated_with_each_other():
    rng = np.random.default_rng(0)
    spikes, X = choices([0.5, 0.5]), rng.normal(size=(500, 2))
    assert nss.credible_sets(pair(spikes), "w", X).empty
    assert members(nss.credible_sets(pair(spikes), "w", X, min_correlation=0.0))
    X = np.stack([X[:, 0], X.sum(axis=1), X[:, 1]], axis=1)
    assert nss.credible_sets(pair(choices([0.45, 0.1, 0.45])), "w", X).empty
    X = np.column_stack([np.ones(50), np.full(50, 0.1), np.arange(50.0)])  # constant columns
    assert nss.credible_sets(pair(choices([0.5, 0.5, 0.0])), "w", X).empty


def test_a_member_that_the_others_do_without_is_left_out():
    spikes = np.zeros((2, 50, 4), int)
    spikes[:, 9:27, 0] = 1  # the first to be chosen
    spikes[:, :17, 1] = spikes[:, 17:34, 2] = spikes[:, 34:, 3] = 1
    table = nss.credible_sets(pair(spikes), "w", alike(4), coverage=1.0)
    assert members(table) == [(1, 2, 3)]


def independent(*effects, num_draws=2500):
    """Spikes of independent effects, given the probabilities of their columns."""
    parts = [
        choices([*shares, max(0.0, 1 - sum(shares))], num_draws, seed)[..., :-1]
        for seed, shares in enumerate(effects)
    ]
    return np.concatenate(parts, axis=-1)


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        # the second has the first seed, and the first two columns fill most of the remaining draws
        (([0.45, 0.40, 0.15], [0.72, 0.10, 0.09, 0.09]), [{0, 1, 2}, {3, 4, 5, 6}]),
        (([0.5, 0.5], [0.55, 0.3, 0.15], [0.8, 0.1, 0.1]), [{0, 1}, {2, 3, 4}, {5, 6, 7}]),
        (([0.6], [0.55, 0.35, 0.1]), [{1, 2, 3}]),
        (([0.9], [0.55, 0.35, 0.1]), [{1, 2, 3}]),
        (([0.5, 0.1], [1.0]), [{2}]),
        (([0.3],) * 10, []),
        (([0.7],) * 4, []),
        # the last five belong to no effect
        (([0.75, 0.15, 0.1], [0.6, 0.4], *[[0.03]] * 5), [{0, 1, 2}, {3, 4}]),
    ],
)
def test_independent_effects_share_no_set(effects, expected):
    spikes = independent(*effects)
    table = nss.credible_sets(pair(spikes), "w", alike(spikes.shape[-1], 0.75))
    assert sorted(map(set, members(table)), key=min) == expected


def test_columns_that_share_two_effects_evenly_are_a_set():
    two_of_four = np.array([[i, j] for i in range(4) for j in range(i)])
    which = np.random.default_rng(0).choice(6, size=(2, 1000))
    spikes = np.eye(4, dtype=int)[two_of_four[which]].sum(axis=-2)
    assert nss.credible_sets(pair(spikes), "w", alike(4))["size"].tolist() == [3]


def test_equal_columns_are_in_one_set_however_often_draws_have_them():
    both = np.array([[1, 1], [1, 0], [0, 1]])[choices([0.8, 0.1, 0.1], 2500).argmax(axis=-1)]
    spikes = np.concatenate([both, choices([0.55, 0.35, 0.1], 2500, seed=1)], axis=-1)
    X = alike(5, 0.75)
    X[:, 1] = 3.0 - 2.0 * X[:, 0]
    table = nss.credible_sets(pair(spikes), "w", X)
    assert sorted(map(set, members(table)), key=min) == [{0, 1}, {2, 3, 4}]
    assert members(nss.credible_sets(pair(coin([1.0, 0.0])), "w", X[:, :2])) == [(0, 1)]


def test_members_have_the_labels_of_the_weight_or_of_the_columns():
    X = pd.DataFrame(alike(4), columns=[f"x{i}" for i in range(4)])
    for table in (X, X.to_numpy(), X.iloc[:, ::-1]):
        assert members(nss.credible_sets(variational(4), "w", table))[0] == ("x3",)
    X = pd.DataFrame(alike(2), columns=["a", "b"])
    assert members(nss.credible_sets(pair(coin([1.0, 0.0])), "w", X)) == [("a",)]
    days = pd.date_range("2020-01-01", periods=2)
    dims = {"w": ["day"], "w_spike": ["day"]}
    draws = {name: np.ones((1, 10, 2)) for name in dims}
    data = arviz_base.from_dict({"posterior": draws}, dims=dims, coords={"day": days})
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(5, 2)), columns=days)
    assert members(nss.credible_sets(data, "w", X)) == [(days[0],), (days[1],)]


def planted(rng, num_obs, size, expected):
    """A walk of correlated columns, and effects drawn from the prior of the model."""
    X = rng.normal(size=(num_obs, size))
    for j in range(1, size):
        X[:, j] = 0.97 * X[:, j - 1] + np.sqrt(1 - 0.97**2) * X[:, j]
    included = rng.random(size) < expected / size
    w = included * rng.normal(size=size)
    return X, X @ w + rng.normal(size=num_obs), included


def shares(draws_of, num_sets, num_obs, size, expected):
    """Count sets over many data sets: all, those with an effect, and the number expected."""
    rng = np.random.default_rng(0)
    count, holding, should = 0, 0, 0.0
    for seed in range(num_sets):
        X, y, included = planted(rng, num_obs, size, expected)
        table = nss.credible_sets(pair(draws_of(seed, X, y)), "w", X)
        count += len(table)
        holding += sum(included[list(each)].any() for each in table["members"])
        should += table["probability"].sum()
    return count, holding, should


def test_sets_of_exact_draws_hold_an_effect():
    def draws(seed, X, y):
        exact = truth.enumerate_models(truth.regression(X, y, 1.0, 0.25, 1.0))
        which = np.random.default_rng(seed).choice(64, p=exact.probs, size=(1, 1000))
        return exact.models[which].astype(int)

    count, holding, should = shares(draws, 200, 40, 6, 1.5)
    assert count > 120
    # the number that holds an effect is a sum of coins, so that 1 of 10,000 seeds would fail
    assert abs(holding - should) < 4 * np.sqrt(should * (1 - should / count))
    assert 0.90 <= holding / count <= 0.99


@pytest.mark.exhaustive
def test_sets_of_chains_hold_an_effect():
    """About 95% of the sets of converged chains hold an effect."""
    num_obs, size, expected = 100, 40, 3

    def model(X, y=None):
        with numpyro.plate("feature", size):
            w = nss.spike_slab("w", expected_size=expected)
        with numpyro.plate("obs", num_obs):
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    @jax.jit
    def chain(key, X, y):
        kernel = nss.PairedGibbs(model)
        mcmc = MCMC(kernel, num_warmup=300, num_samples=2000, progress_bar=False)
        mcmc.run(key, X, y)
        return mcmc.get_samples()["w_spike"]

    def draws(seed, X, y):
        return np.asarray(chain(random.key(seed), jnp.asarray(X), jnp.asarray(y)))[None]

    count, holding, _ = shares(draws, 200, num_obs, size, expected)
    assert count > 250 and 0.90 <= holding / count <= 0.99


def test_two_identical_columns_share_their_inclusion():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 5))
    X[:, 3] = X[:, 1]
    y = X[:, 1] + rng.normal(size=60)

    def model(X, y=None):
        with numpyro.plate("feature", 5):
            w = nss.spike_slab("w", 0.1)
        with numpyro.plate("obs", 60):
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    mcmc = MCMC(nss.PairedGibbs(model), num_warmup=200, num_samples=3000, progress_bar=False)
    mcmc.run(random.key(0), jnp.asarray(X), jnp.asarray(y))
    data = arviz_base.from_numpyro(mcmc, log_likelihood=False)
    inclusion = data["posterior"]["w_spike"].mean(["chain", "draw"]).values
    assert abs(inclusion[1] - inclusion[3]) < 0.05
    first, *others = members(nss.credible_sets(data, "w", X))
    assert set(first) == {1, 3} and not others


def with_sets(data, **shares):
    """The same variational draws with sets, of shares by weight."""
    data = with_stats(data, log_ratio=np.zeros(DRAWS))
    for name, x in shares.items():
        dims = "set", *data["posterior"][name].dims[1:]
        data["sample_stats"][f"credible_sets.{name}"] = xr.DataArray(x, dims=dims)
    return data


def test_alternatives_are_the_other_members_of_the_sets_of_a_fit():
    spike = coin([0.0, 1.0, 0.0, 0.0, 1.0], chains=1)[0]
    v_spike = coin([1.0], chains=1)[0].reshape(DRAWS, 1, 1)
    data = pair(spike, v=2.0 * v_spike, v_spike=v_spike, u=1.0 * spike[:, 1], u_spike=spike[:, 1])
    nan = np.nan
    # of two sets that share a column; of one with another variable; a member may have no share
    shares = {
        "w": [[0.2, 0.7, 0.1, nan, nan], [nan, nan, 0.3, nan, 0.7], [nan] * 5],
        "v": [[[nan]], [[nan]], [[1.0]]],
        "u": [nan, nan, 0.0],
    }
    data = with_sets(data, **shares)
    expected = {
        "w[0]": "w[1], w[2]",
        "w[1]": "w[0], w[2]",
        "w[2]": "w[1], w[4], w[0]",
        "w[3]": "",
        "w[4]": "w[2]",
        "v[0, 0]": "u",
        "u": "v[0, 0]",
    }
    table = nss.summary(data)
    assert table["alternatives"].to_dict() == expected
    # columns outside of the table are named, too
    assert nss.summary(data, "w", coords={"feature": [0]})["alternatives"].tolist() == [
        "w[1], w[2]"
    ]
    assert nss.summary(data, "w", top=1)["alternatives"].tolist() == ["w[0], w[2]"]
    others = table.drop(columns="alternatives")
    pd.testing.assert_frame_equal(others, nss.summary(data.drop_nodes("sample_stats")))
    assert "alternatives" not in nss.summary(data, "w_spike")
    assert "alternatives" not in nss.summary(pair(coin([0.5, 0.5])))
