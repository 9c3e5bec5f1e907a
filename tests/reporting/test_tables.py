# SPDX-License-Identifier: Apache-2.0
"""The tables against draws whose answers are known."""

from collections import namedtuple
from itertools import permutations

import arviz_base
import arviz_stats
import numpy as np
import pytest
import xarray as xr

import jax
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, SVI, TraceGraph_ELBO
from numpyro.infer.mcmc import MCMCKernel

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, factors, stats, variational as vi

pytestmark = pytest.mark.filterwarnings("error")

CHAINS, DRAWS = 4, 400


def pair(spike, slab=None, **others):
    """ArviZ data of a pair, of draws shaped (chain, draw, feature) or (sample, feature)."""
    spike = np.asarray(spike)
    if slab is None:
        slab = np.random.default_rng(1).normal(1.0, 0.5, size=spike.shape)
    sample_dims = ["chain", "draw"] if spike.ndim == 3 else ["sample"]
    return arviz_base.from_dict(
        {"posterior": {"w": spike * slab, "w_spike": spike, "w_slab": slab, **others}},
        dims={name: ["feature"] for name in ("w", "w_spike", "w_slab")},
        sample_dims=sample_dims,
    )


def with_stats(data, attrs=None, **stats):
    """The same data with a group of sample statistics."""
    dims = reading.sample_dims(reading.posterior(data))
    group = arviz_base.dict_to_dataset(stats, sample_dims=dims)
    group.attrs.update(attrs or {})
    data = data.copy()
    data["sample_stats"] = group
    return data


def coin(p, seed=0, chains=CHAINS, draws=DRAWS):
    return np.random.default_rng(seed).binomial(1, p, size=(chains, draws, len(p)))


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


def test_numpyro_svi(variational):
    table = nss.summary(variational, "w")
    assert "w[1, bmi]" in table.index and len(table) == 6
    assert "r_hat" not in table.columns and "flips" not in table.columns


def test_numpyro_compare(chains, variational):
    table = nss.compare({"PMF": variational, "Gibbs": chains}, ["w", "sigma"], reference="Gibbs")
    assert list(table.index) == ["Gibbs", "PMF"]
    assert table.loc["PMF", "max_abs_error_inclusion"] < 0.2
    assert table.loc["Gibbs", "sum_abs_error_mean"] == 0


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
        pair(spike), **{"inclusion_probabilities.w": np.full((CHAINS, DRAWS, 1), 0.125)}
    )
    table = nss.compare({"a": pair(spike), "b": better}, ["w"], "a")
    assert table.loc["b", "sum_abs_error_inclusion"] == pytest.approx(spike.mean() - 0.125)


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


@pytest.mark.parametrize("ratios", [np.zeros(100), np.arange(100) % 2.0])
def test_k_hat_of_equal_ratios_is_undefined(ratios):
    data = with_stats(pair(coin([0.5], chains=1, draws=100)[0]), log_ratio=ratios)
    assert np.isnan(vi.k_hat(data))


def relabelled(data, **coords):
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
            {"a": PAIR, "b": relabelled(PAIR, feature=[1, 0])},
            "w",
            "a",
            r"data: `w` of 'b' has the coordinates {'feature': \[1, 0\]}, expected",
        ),
    ],
)
def test_compare_errors(data, var_names, reference, message):
    with pytest.raises(ValueError, match=message):
        nss.compare(data, var_names, reference)


TASKS, USED, POINTS = 6, 4, 9
FUNCTIONS = USED + 1
MIXTURE_DIMS = {
    "W": ["task", "latent"],
    "W_spike": ["task", "latent"],
    "W_slab": ["task", "latent"],
    "phi": ["latent", "point"],
    "phi_new": ["latent", "new_point"],
    "phi_scale": ["latent"],
    "noise": ["task"],
}


def planted(shape, seed=0):
    """Draws of one mode, with four functions in use and one that is not, and that mode."""
    rng = np.random.default_rng(seed)
    W = rng.uniform(0.5, 1.5, (TASKS, FUNCTIONS)) * rng.choice([-1, 1], (TASKS, FUNCTIONS))
    phi = rng.normal(size=(FUNCTIONS, POINTS))
    spike = rng.random(W.shape) < 0.7
    spike[0], spike[:, USED] = True, False
    slab = W + 0.1 * rng.normal(size=(*shape, *W.shape))
    draws = {
        "W": spike * slab,
        "W_spike": np.broadcast_to(spike, slab.shape).astype(int),
        "W_slab": slab,
        "phi": phi + 0.1 * rng.normal(size=(*shape, *phi.shape)),
        "phi_new": rng.normal(size=(*shape, FUNCTIONS, 2)),
        "phi_scale": np.arange(FUNCTIONS) + 0.1 * rng.random((*shape, FUNCTIONS)),
        "noise": 0.2 + 0.01 * rng.normal(size=(*shape, TASKS)),
    }
    draws["phi"][..., USED, :] = rng.normal(size=(*shape, POINTS))
    return draws, {"W": spike * W, "phi": phi}


def exchanged(draws, order, sign):
    """The same draws with their functions in another order and with other signs."""
    found = dict(draws)
    for name, dims in MIXTURE_DIMS.items():
        axis = dims.index("latent") - len(dims) if "latent" in dims else None
        if axis is not None:
            behind = tuple(range(axis + 1, 0))
            ahead = tuple(range(order.ndim - 1, draws[name].ndim + axis))
            places = np.expand_dims(np.expand_dims(order, behind), ahead)
            found[name] = np.take_along_axis(draws[name], places, axis)
            if name in ("W", "W_slab", "phi", "phi_new"):
                found[name] *= np.expand_dims(np.expand_dims(sign, behind), ahead)
    return found


def shuffled(draws, shape, seed=1):
    """Each draw in an order of its own, with signs of its own; the unused function keeps its.

    The draws of a variational fit, without chains, all get the same order and signs.
    """
    rng = np.random.default_rng(seed)
    each = shape if len(shape) == 2 else (1,)
    order = rng.permuted(np.broadcast_to(np.arange(FUNCTIONS), (*each, FUNCTIONS)), axis=-1)
    sign = np.where(order == USED, 1, rng.choice([-1, 1], size=order.shape))
    return exchanged(draws, *(np.broadcast_to(x, (*shape, FUNCTIONS)) for x in (order, sign)))


def mixture(draws, sample_dims=("chain", "draw")):
    return arviz_base.from_dict(
        {"posterior": draws}, dims=MIXTURE_DIMS, sample_dims=list(sample_dims)
    )


@pytest.mark.parametrize("sample_dims", [("chain", "draw"), ("sample",)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_align_recovers_planted_orders_and_signs(sample_dims, dtype):
    shape = (3, 40)[: len(sample_dims)]
    draws, truth = planted(shape)
    draws = {name: x.astype(x.dtype if x.dtype == int else dtype) for name, x in draws.items()}
    data = mixture(shuffled(draws, shape), sample_dims)
    assert not np.array_equal(data["posterior"]["phi_scale"], draws["phi_scale"])
    found = nss.align(data, reference=truth)["posterior"].to_dataset()
    for name, values in draws.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype
        assert found[name].dims == (*sample_dims, *MIXTURE_DIMS[name])
    assert found.attrs["aligned"] == "W, phi"


def test_align_mends_r_hat():
    shape = (4, 200)
    draws, _ = planted(shape)
    # the draws of a chain agree with each other, as those of a real one do
    order = np.array([[0, 1, 2, 3, 4], [1, 0, 3, 2, 4], [4, 3, 2, 1, 0], [2, 4, 0, 1, 3]])
    sign = np.array([[1, -1, 1, 1, 1], [-1, 1, -1, 1, 1], [1, 1, -1, -1, 1], [1, 1, -1, 1, -1]])
    chains = exchanged(draws, *(np.repeat(x[:, None], 200, axis=1) for x in (order, sign)))
    raw, found = mixture(chains), nss.align(mixture(chains))
    before, after = (stats.statistics(x["posterior"].to_dataset()) for x in (raw, found))
    for name in ("W", "phi", "phi_scale"):
        assert np.nanmax(before[name].sel(summary="r_hat")) > 2
        assert np.nanmax(after[name].sel(summary="r_hat")) < 1.03


def test_align_without_reference_puts_the_strongest_first():
    shape = (2, 50)
    draws, truth = planted(shape)
    found = nss.align(mixture(shuffled(draws, shape)))
    mean = found["posterior"].to_dataset().mean(["chain", "draw"])
    strength = np.linalg.norm(mean["W"], axis=0) * np.linalg.norm(mean["phi"], axis=1)
    assert (np.diff(strength) < 0).all() and strength[USED] == 0
    W = mean["W"].values[:, :USED]
    assert (np.take_along_axis(W, abs(W).argmax(0)[None], axis=0) > 0).all()
    # the same functions as planted, in another order
    order = abs(truth["W"].T @ W).argmax(axis=0)
    assert sorted(order) == list(range(USED))
    for name in ("W", "phi"):
        expected = nss.align(mixture(draws), reference=mean[["W", "phi"]])["posterior"]
        np.testing.assert_array_equal(found["posterior"][name], expected[name])
    again = nss.align(found)
    for name, values in found["posterior"].data_vars.items():
        np.testing.assert_array_equal(again["posterior"][name], values)


def test_align_to_other_data():
    draws, _ = planted((2, 50))
    first = nss.align(mixture(shuffled(draws, (2, 50))))
    other = shuffled({name: x[0] for name, x in draws.items()}, (50,), seed=2)
    found = nss.align(mixture(other, ("sample",)), reference=first)
    for name in ("W", "phi", "phi_scale"):
        expected = first["posterior"][name].sel(chain=0)
        np.testing.assert_array_equal(found["posterior"][name], expected)


def test_align_does_not_see_the_scale_of_weights_and_functions():
    shape = (2, 50)
    draws, truth = planted(shape)
    scale = np.exp(np.random.default_rng(2).normal(size=(*shape, FUNCTIONS)))
    draws["W"], draws["W_slab"] = (draws[name] / scale[..., None, :] for name in ("W", "W_slab"))
    draws["phi"] = draws["phi"] * scale[..., None]
    for reference in (None, truth):
        found = nss.align(mixture(shuffled(draws, shape)), reference)
        expected = nss.align(mixture(draws), reference)
        np.testing.assert_array_equal(found["posterior"]["phi"], expected["posterior"]["phi"])


def test_match_is_the_best_of_all_permutations():
    rng = np.random.default_rng(3)
    M = 4
    draws = factors.Factors(rng.normal(size=(30, M, 3)), rng.normal(size=(30, M, 5)))
    draws.W[::3, 1] = draws.W[::5, 3] = 0.0
    reference = factors.Factors(*(x[:1] for x in draws))
    labels = factors.match(draws, reference)
    target = reference.W[0][:, :, None] * reference.phi[0][:, None]
    for W, phi, order, sign in zip(*draws, *labels, strict=True):
        products = W[:, :, None] * phi[:, None]
        costs = [np.sum((products[list(p)] - target) ** 2) for p in permutations(range(M))]
        assert np.sum((products[order] - target) ** 2) == pytest.approx(min(costs))
        used = W[order].any(axis=1)
        agreement = factors.cosine(W[order][None], reference.W[0]) + factors.cosine(
            phi[order][None], reference.phi[0]
        )
        assert (sign == np.where(used & (agreement[0] < 0), -1, 1)).all()


def test_draws_of_a_fit_move_together():
    """A function that few draws use keeps its own kernel parameter."""
    draws, _ = planted((200,))
    used = np.random.default_rng(5).random((200, TASKS, 1)) < 0.1
    for part in ("W", "W_spike"):
        draws[part][..., USED:] = used
    draws = {
        name: np.concatenate([x, x[..., USED:]], -1) if name[0] == "W" else x
        for name, x in draws.items()
    }
    draws["phi"] = np.concatenate([draws["phi"], draws["phi"][::-1, USED:]], axis=-2)
    draws["phi_scale"] = np.tile(np.arange(FUNCTIONS + 1.0), (200, 1))
    del draws["phi_new"]
    found = nss.align(mixture(draws, ["sample"]))["posterior"]["phi_scale"]
    assert (found == found[0]).all() and sorted(found[0]) == list(range(FUNCTIONS + 1))


def test_unused_functions_keep_order_and_signs():
    rng = np.random.default_rng(4)
    W, phi = rng.normal(size=(1, 500, 3, 4)), rng.normal(size=(1, 500, 4, 1))
    phi[:, :, 0] = np.abs(phi[:, :, 0])
    W[..., 1:] = 0
    W[..., 0] = [1.0, -2.0, 3.0]
    found = nss.align(mixture({"W": W, "phi": phi}))["posterior"]
    # to make the signs agree would move the mean by 0.8
    assert np.abs(found["phi"].isel(latent=[1, 2, 3]).mean(["chain", "draw"])).max() < 0.2
    np.testing.assert_array_equal(found["phi"], phi)


def test_align_changes_the_groups_of_the_same_draws():
    shape = (2, 30)
    draws, truth = planted(shape)
    stats = {"inclusion_probabilities.W": 0.1 + 0.8 * draws["W_spike"] + 0 * draws["W"]}
    names = {"inclusion_probabilities.W": "W_spike"}
    moved = shuffled(draws | {"W_spike": stats["inclusion_probabilities.W"]}, shape)["W_spike"]
    data = mixture(shuffled(draws, shape))
    data = with_stats(data, **dict.fromkeys(names, moved), energy=draws["noise"][..., 0])
    data["predictions"] = data["posterior"].to_dataset()[["phi_new", "noise"]]
    data["prior"] = data["posterior"].to_dataset().isel(draw=slice(5))[["phi"]]
    data["observed_data"] = xr.Dataset({"Y": (["point", "task"], np.zeros((POINTS, TASKS)))})
    found = nss.align(data, truth)
    np.testing.assert_allclose(found["sample_stats"]["inclusion_probabilities.W"], *stats.values())
    np.testing.assert_array_equal(found["predictions"]["phi_new"], draws["phi_new"])
    assert found["prior"].identical(data["prior"])
    assert found["observed_data"].identical(data["observed_data"])
    np.testing.assert_allclose(
        reading.inclusion_draws(found, "W"), stats["inclusion_probabilities.W"]
    )


def test_invariants_are_invariant():
    shape = (2, 30)
    draws, _ = planted(shape)
    found = nss.invariants(mixture(draws))
    values = found["posterior"].to_dataset()
    assert list(found.children) == ["posterior"]
    assert set(values.data_vars) == {"noise", "num_active", "WWT", "f"}
    np.testing.assert_array_equal(values["num_active"], np.full(shape, USED))
    np.testing.assert_allclose(values["WWT"], draws["W"] @ draws["W"].swapaxes(-1, -2))
    np.testing.assert_allclose(values["f"], (draws["W"] @ draws["phi"]).swapaxes(-1, -2))
    assert values["f"].dims == ("chain", "draw", "point", "task")
    for other in (mixture(shuffled(draws, shape)), nss.align(mixture(draws))):
        for name, expected in values.data_vars.items():
            np.testing.assert_allclose(nss.invariants(other)["posterior"][name], expected)
    # ArviZ takes them
    assert float(arviz_stats.rhat(found, var_names="noise")["noise"].max()) < 1.2


def test_invariants_keep_the_fit_of_the_model():
    draws, _ = planted((2, 5))
    f = np.ones((2, 5, POINTS, TASKS))
    data = mixture(draws | {"f": f})
    np.testing.assert_array_equal(nss.invariants(data)["posterior"]["f"], f)


def test_weights_of_one_task():
    draws, _ = planted((2, 20))
    one = {"W": draws["W"][..., 0, :], "phi": draws["phi"]}
    dims = {"W": ["latent"], "phi": ["latent", "point"]}
    data = arviz_base.from_dict({"posterior": one}, dims=dims)
    found = nss.invariants(nss.align(data))["posterior"]
    np.testing.assert_allclose(found["WWT"], (one["W"] ** 2).sum(-1))
    np.testing.assert_allclose(found["f"], np.einsum("cdm,cdmn->cdn", one["W"], one["phi"]))


def test_summary_of_latent_functions():
    shape = (2, 200)
    draws, _ = planted(shape)
    data = mixture(shuffled(draws, shape))
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


def test_summary_respects_an_alignment():
    shape = (2, 50)
    draws, truth = planted(shape)
    data = nss.align(mixture(shuffled(draws, shape)), truth)
    table = nss.summary(data, "phi_scale", round_to=None)
    np.testing.assert_allclose(table["mean"].astype(float), draws["phi_scale"].mean((0, 1)))


def test_summary_keeps_the_labels_of_a_variational_fit():
    draws, _ = planted((100,))
    table = nss.summary(mixture(draws, ["sample"]), "phi_scale", round_to=None)
    np.testing.assert_allclose(table["mean"].astype(float), draws["phi_scale"].mean(0))


MIXTURE = mixture(planted((2, 10))[0])
REFERENCE = planted((2, 10))[1]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "reference", "names", "message"),
    [
        ({"W": 1}, None, {}, "data: got dict"),
        (PAIR, None, {}, r"weights: got 'W', expected one of \['w'"),
        (MIXTURE, None, {"functions": "phii"}, "functions: got 'phii', expected one of"),
        (MIXTURE, None, {"functions": "W_slab"}, r"'task', 'latent'\), expected one plate"),
        (
            arviz_base.from_dict({"posterior": dict(planted((2, 10))[0])}),
            None,
            {},
            r"expected one plate in common.*dims={'W': \['task', 'latent'\]",
        ),
        (
            MIXTURE,
            {"W": REFERENCE["W"]},
            {},
            r"reference: got values of \['W'\], expected `phi` among",
        ),
        (
            MIXTURE,
            REFERENCE | {"W": np.zeros((2, 2))},
            {},
            r"reference: `W` has the shape \(2, 2\), expected \(6, 5\)",
        ),
        (MIXTURE, MIXTURE.isel(task=[0]), {}, r"reference: `W` has the shape \(1, 5\)"),
        (MIXTURE, PAIR, {}, r"reference: got values of \['w'.*, expected `W` among them"),
        (
            mixture(planted((2, 10))[0] | {"phi": np.full((2, 10, FUNCTIONS, POINTS), np.nan)}),
            None,
            {},
            "data: `phi` is not finite in some draws",
        ),
        (
            with_stats(MIXTURE, **{"inclusion_probabilities.W": np.zeros((2, 10, 1))}),
            None,
            {},
            "`inclusion_probabilities.W` has the shape",
        ),
    ],
)
def test_align_errors(data, reference, names, message):
    with pytest.raises(ValueError, match=message):
        nss.align(data, reference, **names)


@pytest.mark.usefixtures("unchecked_types")
def test_align_needs_equal_draws_in_all_groups():
    data = MIXTURE.copy()
    data["predictions"] = MIXTURE["posterior"].to_dataset()[["phi_new"]].isel(draw=slice(3))
    with pytest.raises(ValueError, match=r"`phi_new` has the sizes .*; thin all groups alike"):
        nss.align(data)


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        ({"time": [0]}, r"coords: got the dimensions \['time'\], expected some of"),
        ({"point": [100]}, "coords: .*'point'.*give labels that the data have"),
    ],
)
def test_summary_coords_errors(coords, message):
    with pytest.raises(ValueError, match=message):
        nss.summary(MIXTURE, coords=coords)
