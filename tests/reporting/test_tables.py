# SPDX-License-Identifier: Apache-2.0
"""The tables against draws whose answers are known."""

from collections import namedtuple

import arviz_base
import arviz_stats
from known_draws import (
    CHAINS,
    DRAWS,
    FUNCTIONS,
    POINTS,
    TASKS,
    USED,
    as_data,
    coin,
    pair,
    planted,
    shuffled,
    with_stats,
)
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, TraceGraph_ELBO
from numpyro.infer.mcmc import MCMCKernel

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, stats

pytestmark = pytest.mark.filterwarnings("error")


def test_summary_counts():
    spike = np.zeros((2, 8, 1), int)
    spike[0, :, 0] = [0, 1, 1, 0, 0, 1, 1, 1]  # 5 of 8, 3 changes
    spike[1, :, 0] = [0, 0, 0, 0, 1, 0, 0, 0]  # 1 of 8, 2 changes
    slab = np.arange(16.0).reshape(2, 8, 1)
    row = nss.summary(pair(spike, slab), round_to=None).loc["w[0]"]
    w = (spike * slab).ravel()
    assert row["inclusion"] == 6 / 16
    assert row["flips"] == 2.5
    assert row["between_chain_sd"] == pytest.approx(np.std([5 / 8, 1 / 8], ddof=1))
    assert row["mean"] == pytest.approx(w.mean())
    assert row["sd"] == pytest.approx(w.std(), rel=0.05)


def test_summary_agrees_with_arviz():
    data = pair(coin([0.3, 0.8]), sigma=np.random.default_rng(2).normal(size=(CHAINS, DRAWS)))
    table = nss.summary(data, round_to=None)
    expected = arviz_stats.summary(data, var_names=["w", "sigma"], round_to="none")
    assert list(table.index) == ["w[0]", "w[1]", "sigma"]
    for column in expected.columns:
        np.testing.assert_allclose(table[column].astype(float), expected[column].astype(float))
    assert table.loc["sigma", ["inclusion", "mcse_inclusion", "flips"]].isna().all()


def test_the_most_included_weights_come_first():
    spike = coin([0.3, 0.0, 0.8, 0.5])
    mu = np.random.default_rng(2).normal(size=(CHAINS, DRAWS, 3))
    data = pair(spike, v=1.0 * spike, v_spike=spike, mu=mu)
    every, some = nss.summary(data, round_to=None), nss.summary(data, round_to=None, top=2)
    firsts = [f"{name}[{i}]" for name in "wv" for i in (2, 3)]
    assert sorted(some.index) == sorted([*firsts, "mu[0]", "mu[1]", "mu[2]"])
    for name in "wv":
        assert [label for label in some.index if label[0] == name] == [f"{name}[2]", f"{name}[3]"]
    pd.testing.assert_frame_equal(some, every.loc[some.index])
    assert len(nss.summary(data, "w", top=10)) == 4
    with pytest.raises(ValueError, match="top: got 0, expected a whole number, at least 1"):
        nss.summary(data, top=0)


def test_summary_without_pairs():
    data = arviz_base.from_dict(
        {"posterior": {"mu": np.random.default_rng(0).normal(size=(2, 50))}}
    )
    table = nss.summary(data, round_to=None)
    expected = arviz_stats.summary(data, round_to="none")
    assert set(table.columns) == set(expected.columns)
    np.testing.assert_allclose(table[expected.columns].to_numpy(float), expected.to_numpy(float))


def test_labels_of_variables_with_dimensions_in_different_orders():
    values = np.arange(6.0).reshape(2, 3)
    draws = {"a": values, "b": values.T}
    data = arviz_base.from_dict(
        {"posterior": {name: x + np.zeros((2, 10, 1, 1)) for name, x in draws.items()}},
        dims={"a": ["task", "point"], "b": ["point", "task"]},
    )
    table = nss.summary(data)
    expected = {
        f"{name}[{i}, {j}]": x[i, j] for name, x in draws.items() for i, j in np.ndindex(x.shape)
    }
    assert table["mean"].to_dict() == expected


@pytest.mark.parametrize("value", [0, 1])
def test_constant_indicator(value):
    spike = np.full((CHAINS, DRAWS, 1), value)
    table = nss.summary(pair(spike), ["w", "w_spike"], round_to=None)
    row = table.loc["w[0]"]
    assert row["inclusion"] == value and row["flips"] == 0 and row["between_chain_sd"] == 0
    assert np.isnan(row["mcse_inclusion"])
    chain_columns = ["ess_bulk", "ess_tail", "r_hat", "mcse_mean", "mcse_sd"]
    assert table.loc["w_spike[0]", chain_columns].isna().all()
    # A weight that is always in still has a slab that moves.
    assert row[chain_columns].isna().all() == (value == 0)


def test_stuck_chain():
    spike = np.zeros((CHAINS, DRAWS, 1), int)
    spike[0] = 1
    table = nss.summary(pair(spike), ["w", "w_spike"], round_to=None)
    row = table.loc["w[0]"]
    assert row["inclusion"] == 0.25 and row["flips"] == 0
    assert row["between_chain_sd"] == 0.5
    assert row["mcse_inclusion"] > 0.2
    assert 1.5 < row["r_hat"] < 100
    assert table.loc["w_spike[0]", ["ess_bulk", "r_hat"]].isna().all()


def test_correlated_indicator():
    """A two-state chain that changes with probability c has lag-one correlation 1 - 2 c."""
    change, chains, draws = 0.1, 4, 5000
    rng = np.random.default_rng(3)
    start = rng.integers(0, 2, size=(chains, 1))
    changes = rng.random((chains, draws - 1)) < change
    spike = np.concatenate([start, (start + changes.cumsum(axis=1)) % 2], axis=1)[..., None]
    row = nss.summary(pair(spike), round_to=None).loc["w[0]"]
    rho = 1 - 2 * change
    mcse = np.sqrt(0.25 * (1 + rho) / (1 - rho) / (chains * draws))
    assert row["mcse_inclusion"] == pytest.approx(mcse, rel=0.2)
    assert abs(row["inclusion"] - 0.5) < 4 * mcse
    assert row["flips"] == pytest.approx(change * draws, rel=0.1)
    assert row["between_chain_sd"] == pytest.approx(2 * mcse, rel=1)


def test_autoregressive_weight():
    rho, chains, draws = 0.8, 4, 4000
    rng = np.random.default_rng(4)
    slab = np.zeros((chains, draws, 1))
    slab[:, 0] = rng.normal(size=(chains, 1)) / np.sqrt(1 - rho**2)
    for t in range(1, draws):
        slab[:, t] = rho * slab[:, t - 1] + rng.normal(size=(chains, 1))
    data = pair(np.ones_like(slab, dtype=int), slab)
    row = nss.summary(data, round_to=None).loc["w[0]"]
    assert row["ess_bulk"] == pytest.approx(chains * draws * (1 - rho) / (1 + rho), rel=0.2)
    assert row["r_hat"] < 1.01


@pytest.mark.parametrize(
    "stat", ["inclusion_probabilities.w", "block_states.0.inclusion_probabilities.w"]
)
def test_rao_blackwell(stat):
    probability = np.random.default_rng(5).uniform(0.2, 0.4, size=(CHAINS, DRAWS, 2))
    probability[..., 1] = 1.0
    spike = coin([0.3, 1.0])
    data = with_stats(pair(spike), **{stat: probability})
    table = nss.summary(data, round_to=None)
    row = table.loc["w[0]"]
    assert row["inclusion"] == pytest.approx(probability[..., 0].mean())
    mcse = 0.2 / np.sqrt(12 * CHAINS * DRAWS)
    assert row["mcse_inclusion"] == pytest.approx(mcse, rel=0.2)
    assert row["flips"] == np.abs(np.diff(spike[..., 0], axis=1)).sum(axis=1).mean()
    chain_means = probability[..., 0].mean(axis=1)
    assert row["between_chain_sd"] == pytest.approx(chain_means.std(ddof=1))
    assert np.isnan(table.loc["w[1]", "mcse_inclusion"])


def test_rao_blackwell_constant_probability_is_exact():
    probability = np.full((CHAINS, DRAWS, 1), 0.3)
    data = with_stats(pair(coin([0.5])), **{"inclusion_probabilities.w": probability})
    row = nss.summary(data, round_to=None).loc["w[0]"]
    assert row["inclusion"] == pytest.approx(0.3)
    assert row["mcse_inclusion"] == pytest.approx(0.0, abs=1e-12)


def test_other_statistics_are_not_inclusion_probabilities():
    spike = coin([0.5])
    stats = dict.fromkeys(["inclusion_probabilities.ww", "my_inclusion_probabilities.w"], spike * 0)
    row = nss.summary(with_stats(pair(spike), **stats), round_to=None).loc["w[0]"]
    assert row["inclusion"] == spike.mean()


def test_variational():
    spike = coin([0.3, 0.0], chains=1)[0]
    data = pair(spike, sigma=np.random.default_rng(0).normal(size=DRAWS))
    table = nss.summary(data, round_to=None)
    columns = ["mean", "sd", "inclusion", "mcse_inclusion"]
    assert list(table.columns[:4]) == columns
    assert len(table.columns) == 6 and all(c.startswith("eti") for c in table.columns[4:])
    p = spike[:, 0].mean()
    assert table.loc["w[0]", "inclusion"] == p
    error = np.sqrt(p * (1 - p) / DRAWS)
    assert table.loc["w[0]", "mcse_inclusion"] == pytest.approx(error, rel=0.25)
    assert np.isnan(table.loc["w[1]", "mcse_inclusion"])


def test_one_chain():
    row = nss.summary(pair(coin([0.5], chains=1)), round_to=None).loc["w[0]"]
    assert row[["between_chain_sd", "r_hat"]].isna().all()
    assert row["mcse_inclusion"] > 0


def test_weight_without_plates():
    spike = coin([0.5])[..., 0]
    data = arviz_base.from_dict({"posterior": {"w": 2.0 * spike, "w_spike": spike}})
    assert nss.summary(data, round_to=None).loc["w", "inclusion"] == spike.mean()


def test_boolean_indicator():
    spike = coin([0.5])
    table = nss.summary(pair(spike == 1, spike * 1.0), round_to=None)
    assert table.loc["w[0]", "flips"] == np.abs(np.diff(spike[..., 0])).sum() / CHAINS


def test_rounding():
    data = pair(coin([0.3]))
    raw = nss.summary(data, round_to=None).loc["w[0]"]
    rounded = nss.summary(data).loc["w[0]"]
    assert rounded["mean"] == round(raw["mean"], 3)
    assert rounded["ess_bulk"] == round(raw["ess_bulk"])
    assert nss.summary(data, round_to=1).loc["w[0]", "sd"] == round(raw["sd"], 1)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "var_names", "message"),
    [
        ({"w": 1}, None, "data: got dict"),
        (arviz_base.from_dict({"prior": {"w": np.zeros((1, 5))}}), None, "data: got DataTree"),
        (pair(coin([0.5])).isel(draw=0), None, "data: its posterior has the dimensions"),
        (pair(coin([0.5])), ["w", "v"], r"var_names: got \['v'\], expected one or more of \['w'"),
        (pair(coin([0.5])), [], r"var_names: got \[\]"),
        (
            with_stats(pair(coin([0.5])), **{"inclusion_probabilities.w": coin([0.5, 0.5])}),
            None,
            r"`inclusion_probabilities.w` has the shape \(4, 400, 2\), expected \(4, 400, 1\)",
        ),
    ],
)
def test_summary_errors(data, var_names, message):
    with pytest.raises(ValueError, match=message):
        nss.summary(data, var_names)


@pytest.mark.parametrize(
    ("made", "plate"),
    [
        *((nss.summary, plate) for plate in ("summary", "ci_bound", "variable", "label")),
        *((nss.plot_inclusion, plate) for plate in ("model", "summary", "ci_bound")),
    ],
)
def test_plates_have_no_names_that_tables_and_pictures_need(made, plate):
    draws = reading.posterior(pair(coin([0.3, 0.8]))).rename(feature=plate)
    clash = xr.DataTree.from_dict({"/posterior": draws})
    with pytest.raises(ValueError, match=rf"are called \['{plate}'\], names that tables"):
        made(clash)


@pytest.mark.usefixtures("unchecked_types")
def test_the_number_of_rows_is_a_whole_one():
    with pytest.raises(ValueError, match=r"top: got 2.5, expected a whole number"):
        nss.summary(pair(coin([0.3, 0.8])), top=2.5)


def test_summary_of_latent_functions():
    shape = (2, 200)
    draws, _ = planted(shape)
    data = as_data(shuffled(draws, shape))
    found = nss.align(data)
    points = [0, POINTS - 1]
    table = nss.summary(data, coords={"point": points}, round_to=None)
    fits = [f"f[{n}, {q}]" for n in points for q in range(TASKS)]
    assert [row for row in table.index if row.startswith("f")] == fits
    assert not any(row.startswith(("phi[", "W_")) for row in table.index)
    assert table.loc["num_active", "mean"] == USED
    expected = stats.to_frame(stats.statistics(nss.invariants(data)["posterior"].to_dataset()))
    rows = ["noise[0]", "WWT[0, 0]", *fits]
    for column in ("mean", "sd", "r_hat"):
        # rounding of W W^T can exchange the ranks of two draws
        np.testing.assert_allclose(
            *(frame.loc[rows, column].astype(float) for frame in (table, expected)), rtol=1e-3
        )
    # weights are those of the aligned draws, with their inclusion
    raw = stats.statistics(data["posterior"].to_dataset()[["W"]])
    assert raw["W"].sel(summary="sd").max() > 5 * table.loc["W[0, 0]", "sd"]
    W = found["posterior"]["W"]
    assert table.loc["W[3, 1]", "mean"] == pytest.approx(float(W.mean(["chain", "draw"])[3, 1]))
    assert table.loc["W[0, 0]", "inclusion"] == 1 and table.loc[f"W[0, {USED}]", "inclusion"] == 0
    assert len(nss.summary(data, "phi")) == FUNCTIONS * POINTS
    assert len(nss.summary(data)) == len(table) + TASKS * (POINTS - len(points))


def test_summary_takes_slices_and_labels_that_differ():
    draws, _ = planted((2, 10))
    data = as_data(draws)
    rows = nss.summary(data, "phi", coords={"point": slice(1, 2)}).index
    assert list(rows) == [f"phi[{m}, {n}]" for m in range(FUNCTIONS) for n in (1, 2)]
    twice = reading.posterior(data).assign_coords(point=[0, 0, *range(2, POINTS)])
    with pytest.raises(ValueError, match=r"coords: .*give labels that the data have, each once"):
        nss.summary(type(data).from_dict({"posterior": twice}), "phi", coords={"point": [2]})


def test_as_many_groups_as_weights_may_be_in_another_order():
    spike = np.random.default_rng(0).binomial(1, [0.1, 0.9, 0.5], size=(2, 100, 3))
    w = spike[..., [2, 0, 1]] * 1.5
    data = arviz_base.from_dict({"posterior": {"w": w, "w_spike": spike}})
    table = nss.summary(data, "w", round_to=None)
    np.testing.assert_allclose(table["mean"].astype(float), 1.5 * table["inclusion"].astype(float))
    # probabilities in the place of spikes are of weights, in whatever draws these are zero
    probs = np.full(w.shape, 0.4)
    data = arviz_base.from_dict({"posterior": {"w": w, "w_spike": probs}})
    assert nss.summary(data, "w")["inclusion"].tolist() == [0.4] * 3


def test_functions_of_different_kernels_keep_their_places():
    """In every draw the second explains more, which would put it first; chains differ in signs."""
    W = np.tile([[0.5, 3.0], [0.5, 3.0]], (2, 50, 1, 1))
    phi = np.tile(np.random.default_rng(0).normal(size=(2, 4)), (2, 50, 1, 1))
    W[1, ..., 0], phi[1, :, 0] = -W[1, ..., 0], -phi[1, :, 0]
    scale = np.full((2, 50), 0.7)
    data = as_data({"W": W, "phi": phi, "phi_0_scale": scale, "phi_1_period": 5 * scale})
    table = nss.summary(data, ["W", "phi_0_scale"])
    assert table.loc[["W[0, 0]", "W[0, 1]", "phi_0_scale"], "mean"].tolist() == [0.5, 3.0, 0.7]
    found = reading.posterior(nss.align(data))
    np.testing.assert_array_equal(found["phi"][1], found["phi"][0])
    np.testing.assert_array_equal(np.abs(found["W"]), np.abs(W))
    # also after draws whose centre would put the second first
    again = reading.posterior(nss.align(data, nss.align(data)))
    np.testing.assert_array_equal(again["W"], found["W"])


def test_summary_respects_an_alignment():
    shape = (2, 50)
    draws, truth = planted(shape)
    data = nss.align(as_data(shuffled(draws, shape)), truth)
    table = nss.summary(data, "phi_scale", round_to=None)
    np.testing.assert_allclose(table["mean"].astype(float), draws["phi_scale"].mean((0, 1)))


def test_summary_keeps_the_labels_of_a_variational_fit():
    draws, _ = planted((100,))
    table = nss.summary(as_data(draws, ["sample"]), "phi_scale", round_to=None)
    np.testing.assert_allclose(table["mean"].astype(float), draws["phi_scale"].mean(0))


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        ({"time": [0]}, r"coords: got the dimensions \['time'\], expected some of"),
        ({"point": [100]}, "coords: .*'point'.*give labels that the data have"),
        ({"chain": [0]}, r"coords: got the dimensions \['chain'\].*data\.sel"),
    ],
)
def test_summary_coords_errors(coords, message):
    with pytest.raises(ValueError, match=message):
        nss.summary(as_data(planted((2, 10))[0]), coords=coords)


State = namedtuple("State", ["z", "inclusion_probabilities", "rng_key"])


class Exact(MCMCKernel):
    """Draws from a known spike-and-slab posterior, with probabilities as a paired kernel has."""

    sample_field = "z"

    def __init__(self, model):
        self.model = model

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        return self.sample(State(None, None, rng_key), model_args, model_kwargs)

    def sample(self, state, model_args, model_kwargs):
        key, *keys = jax.random.split(state.rng_key, 4)
        probability = jnp.full((2, 3), 0.4) + jax.random.uniform(keys[0], (2, 3), maxval=0.2)
        spike = jax.random.bernoulli(keys[1], probability).astype(int)
        slab = jax.random.normal(keys[2], (2, 3))
        z = {"w": spike * slab, "w_spike": spike, "w_slab": slab, "sigma": jnp.exp(slab[0, 0])}
        return State(z, {"w": probability}, key)


def model():
    numpyro.sample("sigma", dist.LogNormal())
    with numpyro.plate("task", 2, dim=-2), numpyro.plate("feature", 3, dim=-1):
        spike = numpyro.sample("w_spike", dist.Bernoulli(0.5))
        slab = numpyro.sample("w_slab", dist.Normal())
        numpyro.deterministic("w", spike * slab)


def guide():
    numpyro.sample("sigma", dist.LogNormal(numpyro.param("loc", 0.0)))
    with numpyro.plate("task", 2, dim=-2), numpyro.plate("feature", 3, dim=-1):
        spike = numpyro.sample("w_spike", dist.Bernoulli(0.5))
        slab = numpyro.sample("w_slab", dist.Normal())
        numpyro.deterministic("w", spike * slab)


@pytest.fixture(scope="module")
def chains():
    mcmc = MCMC(
        Exact(model),
        num_warmup=1,
        num_samples=100,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), extra_fields=("inclusion_probabilities.w",))
    return arviz_base.from_numpyro(mcmc, coords={"feature": ["age", "sex", "bmi"]})


@pytest.fixture(scope="module")
def variational():
    svi = SVI(model, guide, numpyro.optim.Adam(0.01), TraceGraph_ELBO())
    result = svi.run(jax.random.key(0), 2, progress_bar=False)
    return arviz_base.from_numpyro_svi(
        svi, svi_result=result, num_samples=200, coords={"feature": ["age", "sex", "bmi"]}
    )


def test_numpyro_mcmc(chains):
    table = nss.summary(chains, round_to=None)
    assert table.index[0] == "sigma" or table.index[-1] == "sigma"
    assert [f"w[{q}, {m}]" in table.index for q in (0, 1) for m in ("age", "sex", "bmi")] == [1] * 6
    assert len(table) == 7
    probability = chains["sample_stats"]["inclusion_probabilities.w"].mean(["chain", "draw"])
    weights = table.drop("sigma")
    np.testing.assert_allclose(
        weights["inclusion"].astype(float), probability.values.ravel(), rtol=1e-5
    )
    assert (weights["mcse_inclusion"] < 0.01).all()


@pytest.mark.slow
def test_numpyro_svi(variational):
    table = nss.summary(variational, "w")
    assert "w[1, bmi]" in table.index and len(table) == 6
    assert "r_hat" not in table.columns and "flips" not in table.columns


def test_numpyro_compare(chains, variational):
    table = nss.compare({"PMF": variational, "Gibbs": chains}, ["w", "sigma"], reference="Gibbs")
    assert list(table.index) == ["Gibbs", "PMF"]
    assert table.loc["PMF", "max_abs_error_inclusion"] < 0.2
    assert table.loc["Gibbs", "sum_abs_error_mean"] == 0


def test_compare_errors_of_means_and_inclusion():
    reference = pair(np.tile([[[1, 0]], [[1, 1]]], (1, 50, 1)), np.full((2, 50, 2), 2.0))
    # means 2 and 1, inclusion 1 and 0.5
    other = pair(np.tile([[0, 1], [1, 1]], (50, 1)), np.full((100, 2), 3.0))
    # means 1.5 and 3, inclusion 0.5 and 1
    table = nss.compare({"a": other, "b": reference}, "w", "b")
    assert list(table.index) == ["b", "a"]
    assert table.loc["a", "sum_abs_error_mean"] == pytest.approx(2.5)
    assert table.loc["a", "max_abs_error_mean"] == pytest.approx(2.0)
    assert table.loc["a", "sum_abs_error_inclusion"] == pytest.approx(1.0)
    assert table.loc["a", "max_abs_error_inclusion"] == pytest.approx(0.5)
    assert (table.loc["b"].filter(like="error") == 0).all()
    assert table.loc["a", ["bound", "min_ess", "max_r_hat", "k_hat"]].isna().all()


def test_compare_uses_rao_blackwell():
    spike = coin([0.5])
    better = with_stats(
        pair(spike), **{"inclusion_probabilities.w": np.full((CHAINS, DRAWS, 1), 0.4375)}
    )
    table = nss.compare({"a": pair(spike), "b": better}, ["w"], "a")
    assert table.loc["b", "sum_abs_error_inclusion"] == pytest.approx(spike.mean() - 0.4375)


def labelled(dims=None):
    """Three weights of which the last has an effect, with their probabilities."""
    spike = coin([0.05, 0.1, 1.0])
    probs = np.broadcast_to([0.05, 0.1, 1.0], spike.shape)
    data = pair(spike)
    stats_ = arviz_base.dict_to_dataset(
        {"inclusion_probabilities.w": probs}, dims={"inclusion_probabilities.w": dims}
    )
    data["sample_stats"] = stats_
    return data.map_over_datasets(
        lambda x: x.assign_coords(feature=["age", "bmi", "bp"]) if "feature" in x.dims else x
    )


def test_reordered_weights_keep_their_probabilities_where_the_plates_have_names():
    data = labelled(["feature"])
    order = ["bp", "bmi", "age"]
    expected = nss.summary(data).loc[[f"w[{name}]" for name in order], "inclusion"]
    assert expected.tolist() == [1.0, 0.1, 0.05]
    for found in (data.sel(feature=order), data.copy()):
        if found["posterior"]["feature"].values[0] == "age":
            # of the draws alone
            found["posterior"] = data["posterior"].to_dataset().sel(feature=order)
        pd.testing.assert_series_equal(nss.summary(found)["inclusion"], expected)


def test_weights_reordered_by_their_numbers_are_not_given_the_probabilities_of_others():
    """Of probabilities that differ so little the means of the indicators would not tell."""
    spike = coin([0.05, 0.1, 0.15])
    data = pair(spike)
    data["sample_stats"] = arviz_base.dict_to_dataset(
        {"inclusion_probabilities.w": np.broadcast_to([0.05, 0.1, 0.15], spike.shape)}
    )
    assert nss.summary(data)["inclusion"].tolist() == [0.05, 0.1, 0.15]
    with pytest.raises(ValueError, match=r"the elements of `w` in another order.* by xarray's re"):
        nss.summary(data.isel(feature=[2, 1, 0]))
    # labels without an order
    mixed = np.array([1, "a", 2], dtype=object)
    found = data.map_over_datasets(
        lambda x: x.assign_coords(feature=mixed) if "feature" in x.dims else x
    )
    assert nss.summary(found)["inclusion"].tolist() == [0.05, 0.1, 0.15]


def test_reordered_weights_are_not_given_the_probabilities_of_others():
    data = labelled()
    remedy = r"give the plates \['inclusion_probabilities.w_dim_0'\] .* of \['feature'\], by xarray"
    with pytest.raises(ValueError, match=rf"differ by 0.9.*{remedy}"):
        nss.summary(data.sel(feature=["bp", "bmi", "age"]))
    with pytest.raises(ValueError, match=rf"has the shape .*{remedy}"):
        nss.summary(data.sel(feature=["bp"]))
    named = data["sample_stats"].to_dataset().rename({"inclusion_probabilities.w_dim_0": "feature"})
    data["sample_stats"] = named.assign_coords(feature=data["posterior"]["feature"].values)
    found = nss.summary(data.sel(feature=["bp", "age"]))["inclusion"]
    assert found.to_dict() == {"w[bp]": 1.0, "w[age]": 0.05}


@pytest.mark.parametrize("number", [1, 2, 4])
def test_few_draws_have_no_k_hat(number):
    data = with_stats(pair(np.ones((number, 1))), log_ratio=np.arange(1.0 * number))
    table = nss.compare({"a": data, "b": data}, "w", "a")
    assert table["k_hat"].isna().all()


def test_a_broken_chain_has_no_error_to_show():
    whole = coin([0.5, 0.5])
    broken = whole.astype(float)
    broken[1, 3:, 0] = np.nan
    other = with_stats(pair(whole), **{"inclusion_probabilities.w": broken})
    other["posterior"]["w"] = other["posterior"]["w"].copy(data=broken)
    row = nss.compare({"a": pair(whole), "b": other}, ["w"], "a").loc["b"]
    assert row.filter(like="error").isna().all() and row[["min_ess", "max_r_hat"]].isna().all()
    assert nss.summary(other)["inclusion"].isna().tolist() == [True, False]


def test_compare_without_indicators():
    spike = coin([0.5])
    dense = arviz_base.from_dict({"posterior": {"w": spike * 1.0}}, dims={"w": ["feature"]})
    table = nss.compare({"a": pair(spike), "b": dense}, ["w"], "a")
    assert table.loc["b"].filter(like="inclusion").isna().all()
    assert table.loc["b", "sum_abs_error_mean"] > 0


def test_compare_worst_chain_diagnostics():
    data = pair(coin([0.5, 0.0, 0.9]))
    table = nss.compare({"a": data, "b": data}, ["w"], "a")
    elements = nss.summary(data, round_to=None)
    assert table.loc["a", "min_ess"] == elements["ess_bulk"].min() < 1e5
    assert table.loc["a", "max_r_hat"] == elements["r_hat"].max()


@pytest.mark.parametrize("k", [0.3, 0.9])
def test_compare_k_hat(k):
    """Ratios U^-k with U uniform are Pareto of shape k."""
    ratios = -k * np.log(np.random.default_rng(6).random(4000)) - 300.0
    data = pair(coin([0.5], chains=1, draws=4000)[0])
    data = with_stats(data, {"bound": -12.5}, log_ratio=ratios)
    table = nss.compare({"a": data, "b": pair(coin([0.5]))}, ["w"], "b")
    assert table.loc["a", "k_hat"] == pytest.approx(k, abs=0.15)
    assert table.loc["a", "bound"] == -12.5
    assert np.isnan(table.loc["b", "k_hat"])


def with_coords(data, **coords):
    """The same data with other coordinates."""
    return type(data).from_dict({"posterior": reading.posterior(data).assign_coords(**coords)})


PAIR = pair(coin([0.5, 0.5]))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "var_names", "reference", "message"),
    [
        ({"a": PAIR}, "w", "a", r"data: got \['a'\], expected a mapping from two or more names"),
        (PAIR, "w", "a", "data: got DataTree, expected a mapping"),
        ([PAIR, PAIR], "w", "a", "data: got list"),
        ({"a": PAIR, "b": PAIR}, "w", "c", r"reference: got 'c', expected one of .*\['a', 'b'\]"),
        ({"a": PAIR, "b": PAIR}, "v", "a", r"var_names: got \['v'\]"),
        ({"a": PAIR, "b": PAIR}, [], "a", r"var_names: got \[\]"),
        ({"a": PAIR, "b": PAIR}, None, "a", "var_names: got None"),
        (
            {"a": pair(coin([0.5, 0.5]), v=coin([0.5])[..., 0]), "b": PAIR},
            "v",
            "a",
            "var_names: `v` is not in the posterior of 'b'",
        ),
        (
            {"a": PAIR, "b": pair(coin([0.5]))},
            "w",
            "a",
            r"data: `w` of 'b' has the shape {'feature': 1}, expected {'feature': 2}",
        ),
        (
            {"a": PAIR, "b": with_coords(PAIR, feature=[1, 0])},
            "w",
            "a",
            r"data: `w` of 'b' has the coordinates {'feature': \[1, 0\]}, expected",
        ),
    ],
)
def test_compare_errors(data, var_names, reference, message):
    with pytest.raises(ValueError, match=message):
        nss.compare(data, var_names, reference)
