# SPDX-License-Identifier: Apache-2.0
"""Tables of models and Bayes factors, against enumeration and counts."""

import arviz_base
import numpy as np
import pandas as pd
import pytest
from truth import enumeration
from truth.known_draws import chains, pair, variational

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")

NAMES = ["age", "dose", "lot"]
INCLUSION = 0.3


@pytest.fixture(scope="module")
def exact():
    rng = np.random.default_rng(2)
    X = rng.normal(size=(20, 3))
    X[:, 1] += X[:, 0]
    y = 0.5 * X[:, 0] + rng.normal(size=20)
    return enumeration.enumerate_models(enumeration.regression(X, y, 1.0, INCLUSION, 1.0))


@pytest.fixture(scope="module", params=["chains", "fit"])
def drawn(request, exact):
    """Independent draws of the exact posterior."""
    spikes, slabs = exact.sample(np.random.default_rng(0), 8000)
    shape = (4, 2000, 3) if request.param == "chains" else (8000, 3)
    data = pair(spikes.reshape(shape), slabs.reshape(shape))
    return data.map_over_datasets(lambda group: group.assign_coords(feature=NAMES))


def test_models_have_the_probabilities_of_enumeration(exact, drawn):
    table = nss.models_table(drawn, "w")
    assert table["probability"].sum() == pytest.approx(1.0)
    assert table["probability"].is_monotonic_decreasing and table.index.name == "model"
    models = [tuple(np.array(NAMES)[spikes > 0]) for spikes in exact.models]
    expected = pd.Series(exact.probs, models)[table["members"]].to_numpy()
    assert 0.1 < expected.max() < 0.8
    # eight models at 4.5 standard errors: one seed in ten thousand would fail
    assert (abs(table["probability"] - expected) < 4.5 * table["mcse_probability"]).all()
    independent = np.sqrt(expected * (1 - expected) / 8000)
    np.testing.assert_allclose(table["mcse_probability"][:3], independent[:3], rtol=0.1)
    median = tuple(np.array(NAMES)[exact.inclusion > 0.5])
    assert table["members"][table["is_median"]].tolist() == [median]
    assert (table["size"] == table["members"].map(len)).all()
    pd.testing.assert_frame_equal(nss.models_table(drawn, "w", top=3), table[:3])


def test_bayes_factors_are_those_of_the_evidences(exact, drawn):
    table = nss.summary(drawn, "w", None, prior_inclusion=INCLUSION)
    # of all models with a column to all without it
    included = exact.models.T @ exact.probs
    expected = included / (1 - included) * (1 - INCLUSION) / INCLUSION
    # seven times the standard error of a log odds
    np.testing.assert_allclose(table["bayes_factor"], expected, rtol=0.2)
    assert list(table)[:5] == ["mean", "sd", "inclusion", "mcse_inclusion", "bayes_factor"]
    assert "bayes_factor" not in nss.summary(drawn, "w")


def test_priors_are_those_of_the_data_or_of_the_caller(drawn):
    prior = pd.Series([0.1, 0.5, 0.2], index=NAMES)
    tree = drawn.copy()
    stored = prior.rename_axis("feature").to_xarray()
    tree["constant_data"] = stored.to_dataset(name="prior_inclusion.w")
    p = nss.summary(tree, "w", None)["inclusion"].to_numpy()
    expected = p / (1 - p) * (1 - prior.to_numpy()) / prior.to_numpy()
    for table in (
        nss.summary(tree, "w", None),
        nss.summary(drawn, "w", None, prior_inclusion=prior[::-1]),
        nss.summary(tree, "w", None, prior_inclusion=prior.to_numpy()),
    ):
        np.testing.assert_allclose(table["bayes_factor"], expected)
    some = nss.summary(tree, "w", None, {"feature": ["lot"]}, top=1)
    np.testing.assert_allclose(some["bayes_factor"], expected[2:])
    for value in (0.0, 1.0, [0.1, 0.2, 1.5]):
        with pytest.raises(ValueError, match=r"prior_inclusion: got .* expected probabilities in"):
            nss.summary(drawn, "w", prior_inclusion=value)
    with pytest.raises(ValueError, match=r"prior_inclusion: got the shape \(2,\)"):
        nss.summary(drawn, "w", prior_inclusion=[0.1, 0.2])


def test_a_column_of_all_draws_has_an_infinite_factor():
    table = nss.summary(pair(np.ones((2, 50, 1), int)), "w", prior_inclusion=0.5)
    assert table["bayes_factor"].tolist() == [np.inf]


def test_the_median_model_is_a_row_even_if_no_draw_has_it():
    spikes = np.repeat([[0, 1, 1], [1, 0, 1], [1, 1, 0]], 20, axis=0).reshape(2, 30, 3)
    table = nss.models_table(pair(spikes), "w", top=2)
    assert table["members"].tolist()[-1] == (0, 1, 2) and len(table) == 3
    assert table["probability"].tolist() == [1 / 3, 1 / 3, 0]
    assert table["is_median"].tolist() == [False, False, True]
    assert np.isnan(table["mcse_probability"][2]) and (table["mcse_probability"][:2] > 0).all()


def test_errors_account_for_autocorrelation():
    spikes = np.repeat(np.random.default_rng(0).integers(0, 2, (4, 200, 1)), 10, axis=1)
    table = nss.models_table(pair(spikes), "w")
    # 800 independent numbers
    assert table["mcse_probability"][0] == pytest.approx(0.5 / 800**0.5, rel=0.25)


def test_columns_that_share_a_spike_are_in_together():
    spike = np.random.default_rng(0).integers(0, 2, (2, 50, 2))
    draws = {"w": 2.0 * spike[..., [0, 1, 1]], "w_spike": spike, "w_slab": np.ones((2, 50, 3))}
    tree = arviz_base.from_dict(
        {"posterior": draws}, dims={"w": ["w_weight"], "w_spike": ["w_group"]}
    )
    table = nss.models_table(tree, "w")
    assert set(table["members"]) == {(), (0,), (1, 2), (0, 1, 2)}


def test_thousands_of_columns():
    spike = np.zeros((2, 100, 3000), int)
    spike[:, ::4, [7, 2999]] = 1
    spike[:, 1:81:4, 2999] = 1
    rows = nss.models_table(pair(spike), "w")
    assert rows["members"].tolist() == [(), (7, 2999), (2999,)]
    assert rows["probability"].tolist() == [0.55, 0.25, 0.2]


def test_chains_and_fits_of_the_same_draws_agree():
    one, other = (nss.models_table(data, "w") for data in (chains(4), variational(4, 0)))
    pd.testing.assert_frame_equal(
        one.drop(columns="mcse_probability"), other.drop(columns="mcse_probability")
    )
