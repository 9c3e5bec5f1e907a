# SPDX-License-Identifier: Apache-2.0
"""Credible sets of correlated columns."""

from itertools import combinations

import arviz_base
import numpy as np
import pandas as pd
import pytest
import truth
from truth.known_draws import DRAWS, coin, pair, variational, with_stats
import xarray as xr

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")


def correlated(count, rho=0.9, num_obs=200, seed=0):
    """Columns whose correlations are about ``rho``."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(num_obs, 1))
    return np.sqrt(rho) * common + np.sqrt(1 - rho) * rng.normal(size=(num_obs, count))


def choices(probs, num_draws=400, seed=0):
    """Spikes of two chains, exactly one of them 1 in each draw."""
    which = np.random.default_rng(seed).choice(len(probs), p=probs, size=(2, num_draws))
    return np.eye(len(probs), dtype=int)[which]


def independent(*effects, num_draws=2500):
    """Spikes of independent effects, by the probabilities of their columns."""
    parts = [
        choices([*shares, max(0.0, 1 - sum(shares))], num_draws, seed)[..., :-1]
        for seed, shares in enumerate(effects)
    ]
    return np.concatenate(parts, axis=-1)


def members(table):
    return table["members"].tolist()


def case(spikes, expected, X=None, **options):
    X = correlated(spikes.shape[-1], 0.75) if X is None else X
    return spikes, expected, X, options


NORMAL = np.random.default_rng(0).normal(size=(500, 2))
IN_BETWEEN = np.stack([NORMAL[:, 0], NORMAL.sum(axis=1), NORMAL[:, 1]], axis=1)
CONSTANT = np.column_stack([np.ones(50), np.full(50, 0.1), np.arange(50.0)])
IN_OTHER_UNITS = correlated(4) * [1.0, -2.0, 1e5, 1e-5] + [0.0, 10.0, 0.0, 1.0]
EQUAL = correlated(5, 0.75)
EQUAL[:, 1] = 3.0 - 2.0 * EQUAL[:, 0]
# of the first column, which is the first to be chosen, the others do without
SUPERFLUOUS = np.zeros((2, 50, 4), int)
SUPERFLUOUS[:, 9:27, 0] = SUPERFLUOUS[:, :17, 1] = 1
SUPERFLUOUS[:, 17:34, 2] = SUPERFLUOUS[:, 34:, 3] = 1
OFTEN_BOTH = np.array([[1, 1], [1, 0], [0, 1]])[choices([0.8, 0.1, 0.1], 2500).argmax(axis=-1)]
OFTEN_BOTH = np.concatenate([OFTEN_BOTH, choices([0.55, 0.35, 0.1], 2500, seed=1)], axis=-1)

CASES = {
    "one effect": case(choices([0.5, 0.3, 0.16, 0.04]), [{0, 1, 2}], correlated(4)),
    "two effects": case(independent([0.5, 0.5], [0.6, 0.4]), [{0, 1}, {2, 3}], IN_OTHER_UNITS),
    "not correlated": case(choices([0.5, 0.5]), [], NORMAL),
    "at any correlation": case(choices([0.5, 0.5]), [{0, 1}], NORMAL, min_correlation=0.0),
    "correlated by way of a third": case(choices([0.45, 0.1, 0.45]), [], IN_BETWEEN),
    "constant columns": case(choices([0.5, 0.5, 0.0]), [], CONSTANT),
    "superfluous": case(SUPERFLUOUS, [{1, 2, 3}], correlated(4), coverage=1.0),
    "equal columns": case(OFTEN_BOTH, [{0, 1}, {2, 3, 4}], EQUAL),
    "equal columns, one included": case(coin([1.0, 0.0]), [{0, 1}], EQUAL[:, :2]),
    # the second has the first seed, and the first two columns fill most of the remaining draws
    "sizes 3 and 4": case(
        independent([0.45, 0.40, 0.15], [0.72, 0.10, 0.09, 0.09]), [{0, 1, 2}, {3, 4, 5, 6}]
    ),
    "three effects": case(
        independent([0.5, 0.5], [0.55, 0.3, 0.15], [0.8, 0.1, 0.1]), [{0, 1}, {2, 3, 4}, {5, 6, 7}]
    ),
    "an unsure effect": case(independent([0.6], [0.55, 0.35, 0.1]), [{1, 2, 3}]),
    "a nearly sure effect": case(independent([0.9], [0.55, 0.35, 0.1]), [{1, 2, 3}]),
    "a sure effect": case(independent([0.5, 0.1], [1.0]), [{2}]),
    "ten unsure effects": case(independent(*[[0.3]] * 10), []),
    "four unsure effects": case(independent(*[[0.7]] * 4), []),
    "rare columns of no effect": case(
        independent([0.75, 0.15, 0.1], [0.6, 0.4], *[[0.03]] * 5), [{0, 1, 2}, {3, 4}]
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_columns_that_share_an_effect_are_a_set(name):
    spikes, expected, X, options = CASES[name]
    table = nss.credible_sets(pair(spikes), "w", X, **options)
    assert sorted(map(set, members(table)), key=min) == expected
    for row in table.itertuples():
        columns = list(row.members)
        assert row.size == len(columns)
        assert row.probability == pytest.approx(spikes[..., columns].any(axis=-1).mean())
        correlations = np.atleast_2d(np.corrcoef(X[:, columns].T))
        assert row.purity == pytest.approx(abs(correlations).min())


def test_columns_that_share_two_effects_evenly_are_a_set():
    two_of_four = np.array([[i, j] for i in range(4) for j in range(i)])
    which = np.random.default_rng(0).choice(6, size=(2, 1000))
    spikes = np.eye(4, dtype=int)[two_of_four[which]].sum(axis=-2)
    assert nss.credible_sets(pair(spikes), "w", correlated(4))["size"].tolist() == [3]


def test_members_have_the_labels_of_the_weight_or_of_the_columns():
    X = pd.DataFrame(correlated(4), columns=[f"x{i}" for i in range(4)])
    for table in (X, X.to_numpy(), X.iloc[:, ::-1]):
        assert members(nss.credible_sets(variational(4), "w", table))[0] == ("x3",)
    X = pd.DataFrame(correlated(2), columns=["a", "b"])
    assert members(nss.credible_sets(pair(coin([1.0, 0.0])), "w", X)) == [("a",)]
    days = pd.date_range("2020-01-01", periods=2)
    dims = {"w": ["day"], "w_spike": ["day"]}
    draws = {name: np.ones((1, 10, 2)) for name in dims}
    data = arviz_base.from_dict({"posterior": draws}, dims=dims, coords={"day": days})
    X = pd.DataFrame(np.random.default_rng(0).normal(size=(5, 2)), columns=days)
    assert members(nss.credible_sets(data, "w", X)) == [(days[0],), (days[1],)]


RATES = {
    # columns that data tell apart are sets of their own
    "two clear columns": (independent([1.0], [0.95]), [{0}, {1}]),
    "a clear one pays for an unclear one": (independent([1.0], [0.81, 0.1]), [{0}, {1}]),
    "an unclear one alone": (independent([0.85, 0.1]), [{0, 1}]),
    "too little": (independent([0.4, 0.3]), []),
}


@pytest.mark.parametrize("name", RATES)
def test_clear_effects_pay_for_unclear_ones(name):
    spikes, expected = RATES[name]
    table = nss.credible_sets(pair(spikes), "w", correlated(spikes.shape[-1]), fdr=0.1)
    assert sorted(map(set, members(table)), key=min) == expected
    assert np.sum(1 - table["probability"]) <= 0.1 * len(table) + 1e-9


def test_no_other_choice_of_sets_is_worth_more():
    """All choices among all sets of five correlated columns."""
    rng = np.random.default_rng(3)
    spikes = (rng.random((2, 400, 5)) < [0.5, 0.1, 0.1, 0.3, 0.02]).astype(int)
    spikes[..., 1] = 1 - spikes[..., 0]
    included, best = spikes.reshape(-1, 5) > 0, 0.0
    sets = [x for size in range(1, 6) for x in combinations(range(5), size)]
    chance = {x: included[:, x].any(axis=1).mean() for x in sets}
    for number in range(1, 4):
        for chosen in combinations(sets, number):
            joined = [column for x in chosen for column in x]
            is_allowed = sum(1 - chance[x] for x in chosen) <= 0.1 * number
            if len(joined) == len(set(joined)) and is_allowed:
                best = max(best, sum(chance[x] / len(x) for x in chosen))
    table = nss.credible_sets(pair(spikes), "w", correlated(5), fdr=0.1)
    assert np.sum(table["probability"] / table["size"]) == pytest.approx(best)


@pytest.mark.parametrize(("fdr", "least"), [(None, 0.9), (0.1, 0.85)])
def test_sets_of_exact_draws_hold_an_effect(fdr, least):
    """Neighbours are correlated by 0.97, and effects drawn from the prior of the model."""
    rng = np.random.default_rng(0)
    count, holding, should = 0, 0, 0.0
    for seed in range(200):
        X = rng.normal(size=(40, 6))
        for j in range(1, 6):
            X[:, j] = 0.97 * X[:, j - 1] + np.sqrt(1 - 0.97**2) * X[:, j]
        included = rng.random(6) < 0.25
        y = X @ (included * rng.normal(size=6)) + rng.normal(size=40)
        exact = truth.enumerate_models(truth.regression(X, y, 1.0, 0.25, 1.0))
        which = np.random.default_rng(seed).choice(64, p=exact.probs, size=(1, 1000))
        table = nss.credible_sets(pair(exact.models[which].astype(int)), "w", X, fdr=fdr)
        count += len(table)
        holding += sum(included[list(each)].any() for each in table["members"])
        should += table["probability"].sum()
    assert count > 120
    # the number that holds an effect is a sum of coins, so that 1 of 10,000 seeds would fail
    assert abs(holding - should) < 4 * np.sqrt(should * (1 - should / count))
    assert least <= holding / count <= 0.99


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
