# SPDX-License-Identifier: Apache-2.0
"""Effects given inclusion, groups of weights in one row, and their picture."""

import arviz_base
import arviz_stats
import numpy as np
import pandas as pd
import pytest
from truth.known_draws import coin, pair, tick_labels
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting.arviz_data import posterior, statistics

pytestmark = pytest.mark.filterwarnings("error")

PROBS = [0.3, 0.0, 1.0, 0.6, 0.6]
LABELS = ["a", "pair", "c", "pair", "pair"]


def grouped(probs=(0.3, 0.6, 0.9, 0.6, 0.6), labels=LABELS, **constants):
    """Weights of which three share a spike, one of them constant."""
    spike = coin(list(probs))
    spike[..., 3] = spike[..., 4]
    spike[..., 1] = 0
    data = pair(spike)
    stored = {"group.w": xr.DataArray(labels, dims=data["posterior"]["w"].dims[2:])}
    data["constant_data"] = xr.Dataset(stored | constants, data["posterior"]["w"][0, 0].coords)
    return data


@pytest.mark.parametrize("chains", [True, False])
def test_effects_are_those_of_the_draws_with_the_weight(chains):
    spike = coin(PROBS)
    data = pair(spike if chains else spike[0])
    table = nss.summary(data, "w", None)
    w = posterior(data)["w"].values.reshape(-1, 5)
    assert table.loc["w[1]"].filter(like="effect").isna().all() and table.loc["w[1]", "mean"] == 0
    for k in (0, 2, 3, 4):
        draws = w[w[:, k] != 0, k]
        expected = [draws.mean(), draws.std(ddof=1), *np.quantile(draws, [0.055, 0.945])]
        # versions of ArviZ interpolate quantiles in two ways
        np.testing.assert_allclose(
            table.iloc[k].filter(like="effect").astype(float), expected, 0.01
        )
    always = table.loc["w[2]", ["mean", "sd", "eti89_lb"]].astype(float)
    np.testing.assert_allclose(table.loc["w[2]"].filter(like="effect")[:3].astype(float), always)


def test_ratios_are_exponentials_of_effects():
    data = pair(coin(PROBS))
    data["summary"] = xr.Dataset(attrs={"ratio": "odds_ratio"})
    effects, ratios = nss.summary(data, None, None), nss.summary(data, None, None, ratios=True)
    names = ["", "_eti89_lb", "_eti89_ub"]
    expected = np.exp(effects[[f"effect{name}" for name in names]].astype(float))
    np.testing.assert_allclose(ratios[[f"odds_ratio{name}" for name in names]], expected)
    assert not any(name.startswith("effect") for name in ratios)


def test_weights_that_are_never_in_have_the_statistics_of_arviz():
    w = np.random.default_rng(0).normal(size=(4, 100, 2, 3)) * [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]
    coords = {"task": ["x", "y"], "feature": [3, 1, 2]}
    data = arviz_base.from_dict(
        {"posterior": {"w": w}}, dims={"w": ["task", "feature"]}, coords=coords
    )
    with np.errstate(invalid="ignore"):
        expected = arviz_stats.summary(data, fmt="xarray", round_to="none")["w"]
    actual = statistics(posterior(data))["w"].transpose(*expected.dims)
    xr.testing.assert_allclose(actual.sel(feature=2), expected.sel(feature=2))
    np.testing.assert_array_equal(actual.sel(summary="mean") == 0, w[0, 0] == 0)
    assert actual.sel(summary="r_hat").isnull().sum() == 3


def test_a_group_is_one_row_above_its_weights():
    table = nss.summary(grouped(), "w", None, prior_inclusion=0.2)
    assert list(table.index) == ["w[0]", "w[pair]", "w[1]", "w[3]", "w[4]", "w[2]"]
    alone = nss.summary(
        pair(posterior(grouped())["w_spike"].values), "w", None, prior_inclusion=0.2
    )
    shared = ["inclusion", "mcse_inclusion", "bayes_factor", "flips", "between_chain_sd"]
    pd.testing.assert_series_equal(
        table.loc["w[pair]", shared], alone.loc["w[3]", shared], check_names=False
    )
    assert table.loc["w[pair]"].drop([*shared, "prior_inclusion"]).isna().all()
    members = table.loc[["w[1]", "w[3]", "w[4]"]]
    assert members[shared].isna().all(axis=None)
    np.testing.assert_allclose(members["mean"], alone.loc[members.index, "mean"])
    # a group counts once
    best = nss.summary(grouped(), "w", None, top=2)
    assert list(best.index) == ["w[2]", "w[pair]", "w[1]", "w[3]", "w[4]"]
    some = nss.summary(grouped(), "w", None, {"feature": [0, 3]})
    assert list(some.index) == ["w[0]", "w[3]"] and some["inclusion"].notna().all()


def test_a_group_is_one_row_of_a_picture():
    axes = nss.plot_inclusion(grouped()).get_target("w", {})
    assert tick_labels(axes) == ["a", "pair", "c"]


def test_stored_columns_are_matched_by_their_labels():
    data = pair(coin([0.3, 0.8]))
    data["summary"] = xr.Dataset({"cavi": ("feature", [1.0, 0.0])}, {"feature": [1, 0]})
    assert nss.summary(data, "w")["cavi"].tolist() == [0.0, 1.0]


def test_credible_sets_count_a_group_once_and_no_weight_that_is_always_in():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 5))
    data = grouped([0.3, 0.0, 1.0, 1.0, 1.0])
    assert nss.credible_sets(data, "w", X)["members"].tolist() == [("pair",), (2,)]
    prior = xr.DataArray([0.2, 0.2, 1.0, 0.2, 0.2], dims="feature")
    always = grouped([0.3, 0.0, 1.0, 1.0, 1.0], **{"prior_inclusion.w": prior})
    assert nss.credible_sets(always, "w", X)["members"].tolist() == [("pair",)]
    # the sum of a group may be what another column has
    either = grouped([0.3, 0.0, 0.0, 0.7, 0.7])
    spike = either["posterior"]["w_spike"].values
    for name, other in ("w_spike", 1 - spike[..., 3]), ("w", 1.0 - spike[..., 3]):
        either["posterior"][name].values[..., 2] = other
    effects = posterior(either)["w"].mean(["chain", "draw"]).values
    X[:, 2] = X[:, 3:] @ effects[3:] + 0.1 * X[:, 2]
    (members,) = nss.credible_sets(either, "w", X)["members"]
    assert members == ("pair", 2)


def test_a_forest_has_the_effects_of_the_summary():
    data = pair(coin(PROBS))
    picture = nss.plot_effects({"chains": data, "fit": pair(coin(PROBS)[0])}, top=4)
    forest, side = (picture.get_target("effect", {"column": x}) for x in ("forest", "inclusion"))
    table = nss.summary(data, "w", None).iloc[[2, 3, 4, 0]]
    table = table.sort_values("inclusion", ascending=False, kind="stable")
    rows = {"model": "chains"}

    def drawn(part):
        return picture.viz[part]["effect"].sel(rows).values

    points, probs = (
        np.array([x.get_offsets()[0] for x in drawn(part)])
        for part in ("point_estimate", "inclusion")
    )
    np.testing.assert_allclose(points[:, 0], table["effect"].astype(float))
    np.testing.assert_allclose(probs[:, 0], table["inclusion"].astype(float))
    np.testing.assert_allclose(points[:, 1], probs[:, 1])
    assert (np.diff(points[:, 1]) < 0).all()  # the first on top
    ends = np.array([line.get_xdata() for line in drawn("twig")])
    np.testing.assert_allclose(ends, table[["effect_eti89_lb", "effect_eti89_ub"]].astype(float))
    labels = picture.viz["weight_label"]["effect"].values
    assert [x.get_text() for x in labels] == [name[2:-1] for name in table.index]
    assert forest.get_xlabel() == "w given inclusion"
    assert side.get_xlabel() == "inclusion probability" and side.get_xlim() == (-0.03, 1.03)
    assert [x.get_text() for x in picture.viz["figure"].item().legends[0].texts] == [
        "chains",
        "fit",
    ]
