# SPDX-License-Identifier: Apache-2.0
"""Summaries and comparisons of draws with known answers."""

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import pytest
from truth.known_draws import CHAINS, DRAWS, coin, pair, with_stats

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")

DIAGNOSTICS = ["ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd"]


def first_row(data):
    return nss.summary(data, "w", round_to=None).iloc[0]


def test_inclusion_flips_and_spread_are_counted():
    spike = np.zeros((2, 8, 1), int)
    spike[0, :, 0] = [0, 1, 1, 0, 0, 1, 1, 1]  # 5 of 8, 3 changes
    spike[1, :, 0] = [0, 0, 0, 0, 1, 0, 0, 0]  # 1 of 8, 2 changes
    slab = np.arange(16.0).reshape(2, 8, 1)
    for indicator in (spike, spike == 1):
        row = first_row(pair(indicator, slab))
        assert row["inclusion"] == 6 / 16 and row["flips"] == 2.5
        assert row["between_chain_sd"] == pytest.approx(np.std([5 / 8, 1 / 8], ddof=1))
        assert row["mean"] == pytest.approx((spike * slab).mean())


def test_other_columns_are_those_of_arviz():
    data = pair(coin([0.3, 0.8]), sigma=np.random.default_rng(2).normal(size=(CHAINS, DRAWS)))
    table = nss.summary(data, round_to=None)
    expected = arviz_stats.summary(data, var_names=["w", "sigma"], round_to="none")
    assert list(table.index) == ["w[0]", "w[1]", "sigma"]
    np.testing.assert_allclose(table[expected.columns].to_numpy(float), expected.to_numpy(float))
    assert table.loc["sigma", ["inclusion", "mcse_inclusion", "flips"]].isna().all()
    assert set(nss.summary(data, "sigma").columns) == set(expected.columns)
    raw, rounded = table.loc["w[0]"], nss.summary(data).loc["w[0]"]
    assert rounded["mean"] == round(raw["mean"], 3)
    assert rounded["ess_bulk"] == round(raw["ess_bulk"])
    assert nss.summary(data, round_to=1).loc["w[0]", "sd"] == round(raw["sd"], 1)


def test_the_most_included_weights_come_first():
    spike = coin([0.3, 0.0, 0.8, 0.5])
    mu = np.random.default_rng(2).normal(size=(CHAINS, DRAWS, 3))
    data = pair(spike, v=1.0 * spike, v_spike=spike, mu=mu)
    table, some = nss.summary(data, round_to=None), nss.summary(data, round_to=None, top=2)
    assert list(some.index) == ["w[2]", "w[3]", "v[2]", "v[3]", "mu[0]", "mu[1]", "mu[2]"]
    pd.testing.assert_frame_equal(some, table.loc[some.index])
    assert len(nss.summary(data, "w", top=10)) == 4


def test_labels_follow_the_dimensions_of_each_variable():
    values = np.arange(6.0).reshape(2, 3)
    draws = {"a": values, "b": values.T}
    data = arviz_base.from_dict(
        {"posterior": {name: x + np.zeros((2, 10, 1, 1)) for name, x in draws.items()}},
        dims={"a": ["task", "point"], "b": ["point", "task"]},
    )
    expected = {
        f"{name}[{i}, {j}]": x[i, j] for name, x in draws.items() for i, j in np.ndindex(x.shape)
    }
    assert nss.summary(data)["mean"].to_dict() == expected
    some = nss.summary(data, coords={"point": slice(1, 1), "task": 0})
    assert list(some.index) == ["a[0, 1]", "b[1, 0]"]
    spike = coin([0.5])[..., 0]
    data = arviz_base.from_dict({"posterior": {"w": 2.0 * spike, "w_spike": spike}})
    assert nss.summary(data, round_to=None).loc["w", "inclusion"] == spike.mean()


@pytest.mark.parametrize("value", [0, 1])
def test_an_indicator_that_never_changes_has_no_error(value):
    table = nss.summary(pair(np.full((CHAINS, DRAWS, 1), value)), ["w", "w_spike"], round_to=None)
    row = table.loc["w[0]"]
    assert row["inclusion"] == value and row["flips"] == row["between_chain_sd"] == 0
    assert np.isnan(row["mcse_inclusion"]) and table.loc["w_spike[0]", DIAGNOSTICS].isna().all()
    # the slab of a weight that is always included moves
    assert row[DIAGNOSTICS].isna().all() == (value == 0)


def test_a_stuck_chain_shows():
    spike = np.zeros((CHAINS, DRAWS, 1), int)
    spike[0] = 1
    table = nss.summary(pair(spike), ["w", "w_spike"], round_to=None)
    row = table.loc["w[0]"]
    assert (row["inclusion"], row["flips"], row["between_chain_sd"]) == (0.25, 0, 0.5)
    assert row["mcse_inclusion"] > 0.2 and 1.5 < row["r_hat"] < 100
    assert table.loc["w_spike[0]", ["ess_bulk", "r_hat"]].isna().all()


def test_errors_account_for_autocorrelation():
    """A two-state chain that changes with probability c has lag-one correlation 1 - 2 c."""
    change, chains, draws = 0.1, 4, 5000
    rng = np.random.default_rng(3)
    start = rng.integers(0, 2, size=(chains, 1))
    changes = rng.random((chains, draws - 1)) < change
    spike = np.concatenate([start, (start + changes.cumsum(axis=1)) % 2], axis=1)[..., None]
    row = first_row(pair(spike))
    mcse = np.sqrt(0.25 * (1 - change) / change / (chains * draws))
    assert row["mcse_inclusion"] == pytest.approx(mcse, rel=0.2)
    assert abs(row["inclusion"] - 0.5) < 4 * mcse
    assert row["flips"] == pytest.approx(change * draws, rel=0.1)
    assert row["between_chain_sd"] == pytest.approx(2 * mcse, rel=1)


@pytest.mark.parametrize(
    "stat", ["inclusion_probabilities.w", "block_states.0.inclusion_probabilities.w"]
)
def test_stored_probabilities_replace_indicators(stat):
    probs = np.random.default_rng(5).uniform(0.2, 0.4, size=(CHAINS, DRAWS, 3))
    probs[..., 1], probs[..., 2] = 1.0, 0.3
    spike = coin([0.3, 1.0, 0.5])
    others = {f"my_{stat}": 0 * probs, f"{stat}w": 0 * probs}
    table = nss.summary(with_stats(pair(spike), **{stat: probs}, **others), round_to=None)
    np.testing.assert_allclose(table["inclusion"], probs.mean((0, 1)))
    errors = table["mcse_inclusion"].to_numpy(float)
    assert errors[0] == pytest.approx(0.2 / np.sqrt(12 * CHAINS * DRAWS), rel=0.2)
    assert np.isnan(errors[1]) and errors[2] == pytest.approx(0.0, abs=1e-12)
    row = table.iloc[0]
    assert row["flips"] == np.abs(np.diff(spike[..., 0], axis=1)).sum(axis=1).mean()
    assert row["between_chain_sd"] == pytest.approx(probs[..., 0].mean(axis=1).std(ddof=1))


def test_variational_draws_have_no_chain_diagnostics():
    spike = coin([0.3, 0.0], chains=1)[0]
    table = nss.summary(pair(spike), round_to=None)
    assert list(table.columns[:4]) == ["mean", "sd", "inclusion", "mcse_inclusion"]
    assert [x for x in table.columns[4:] if "effect" not in x] == ["eti89_lb", "eti89_ub"]
    p = spike[:, 0].mean()
    assert table.loc["w[0]", "inclusion"] == p and np.isnan(table.loc["w[1]", "mcse_inclusion"])
    error = np.sqrt(p * (1 - p) / DRAWS)
    assert table.loc["w[0]", "mcse_inclusion"] == pytest.approx(error, rel=0.25)
    one_chain = first_row(pair(coin([0.5], chains=1)))
    assert one_chain[["between_chain_sd", "r_hat"]].isna().all() and one_chain["flips"] > 0


def test_weights_and_probabilities_are_matched_by_their_labels():
    probs = [0.05, 0.1, 1.0]
    data = pair(coin(probs))
    names = {"feature": ["age", "bmi", "bp"]}
    data["sample_stats"] = arviz_base.dict_to_dataset(
        {"inclusion_probabilities.w": np.broadcast_to(probs, (CHAINS, DRAWS, 3))},
        dims={"inclusion_probabilities.w": ["feature"]},
    )
    data = data.map_over_datasets(lambda x: x.assign_coords(names) if "feature" in x.dims else x)
    for order in (["bp", "bmi", "age"], ["bp", "age"]):
        draws_alone = data.copy()
        draws_alone["posterior"] = data["posterior"].to_dataset().sel(feature=order)
        for reordered in (data.sel(feature=order), draws_alone):
            inclusion = nss.summary(reordered)["inclusion"].to_dict()
            assert inclusion == {f"w[{x}]": probs[names["feature"].index(x)] for x in order}


def test_spikes_of_groups_are_those_of_their_weights():
    spike = np.random.default_rng(0).binomial(1, [0.1, 0.9], size=(2, 100, 2))
    w = spike[..., [1, 0, 1]] * 1.5
    data = arviz_base.from_dict({"posterior": {"w": w, "w_spike": spike}})
    np.testing.assert_allclose(
        nss.summary(data, "w")["inclusion"], (w != 0).mean((0, 1)), atol=1e-3
    )


def test_errors_of_means_and_inclusion():
    reference = pair(np.tile([[[1, 0]], [[1, 1]]], (1, 50, 1)), np.full((2, 50, 2), 2.0))
    # means 2 and 1, inclusion 1 and 0.5
    other = pair(np.tile([[0, 1], [1, 1]], (50, 1)), np.full((100, 2), 3.0))
    # means 1.5 and 3, inclusion 0.5 and 1
    dense = arviz_base.from_dict({"posterior": {"w": np.ones((2, 50, 2))}}, dims={"w": ["feature"]})
    table = nss.compare({"a": other, "b": reference, "dense": dense}, "w", "b")
    assert list(table.index) == ["b", "a", "dense"]
    assert table.loc["a"].filter(like="error").tolist() == pytest.approx([2.5, 2.0, 1.0, 0.5])
    assert (table.loc["b"].filter(like="error") == 0).all()
    assert table.loc["a", ["bound", "min_ess", "max_r_hat", "k_hat"]].isna().all()
    assert table.loc["dense"].filter(like="inclusion").isna().all()
    assert table.loc["dense", "sum_abs_error_mean"] == 1.0
    better = with_stats(reference, **{"inclusion_probabilities.w": np.full((2, 50, 2), 0.9)})
    table = nss.compare({"a": reference, "b": better}, ["w"], "a")
    assert table.loc["b", "sum_abs_error_inclusion"] == pytest.approx(0.5)


def test_a_chain_that_is_not_finite_has_no_errors():
    whole = coin([0.5, 0.5])
    broken = whole.astype(float)
    broken[1, 3:, 0] = np.nan
    other = with_stats(pair(whole), **{"inclusion_probabilities.w": broken})
    other["posterior"]["w"] = other["posterior"]["w"].copy(data=broken)
    row = nss.compare({"a": pair(whole), "b": other}, ["w"], "a").loc["b"]
    assert row.filter(like="error").isna().all() and row[["min_ess", "max_r_hat"]].isna().all()
    assert nss.summary(other)["inclusion"].isna().tolist() == [True, False]


def test_worst_diagnostics_bound_and_k_hat():
    """Ratios U^-k with U uniform are Pareto of shape k."""
    chains = pair(coin([0.5, 0.0, 0.9]))
    fits = {"chains": chains}
    for k in (0.3, 0.9):
        ratios = -k * np.log(np.random.default_rng(6).random(4000)) - 300.0
        fit = pair(coin([0.5, 0.0, 0.9], chains=1, draws=4000)[0])
        fits[k] = with_stats(fit, {"bound": -12.5}, log_ratio=ratios)
    short = [np.arange(1.0), np.arange(2.0), np.arange(4.0)]
    for k, ratios in enumerate([*short, np.zeros(100), np.arange(100) % 2.0]):
        fit = pair(np.ones((ratios.size, 3)))
        fits[f"no k_hat {k}"] = with_stats(fit, log_ratio=ratios)
    table = nss.compare(fits, ["w"], "chains")
    rows = nss.summary(chains, round_to=None)
    assert table.loc["chains", "min_ess"] == rows["ess_bulk"].min() < 1e5
    assert table.loc["chains", "max_r_hat"] == rows["r_hat"].max()
    for k in (0.3, 0.9):
        assert table.loc[k, "k_hat"] == pytest.approx(k, abs=0.15)
        assert table.loc[k, "bound"] == -12.5
    others = table.drop(index=[0.3, 0.9])
    assert others[["k_hat", "bound"]].isna().all(axis=None)
