# SPDX-License-Identifier: Apache-2.0
"""Orders and signs of latent functions, and what does not depend on them."""

from itertools import permutations

import arviz_base
import arviz_stats
import numpy as np
import pytest
from truth.known_draws import (
    FUNCTIONS,
    PLATES,
    POINTS,
    TASKS,
    USED,
    as_data,
    exchanged,
    planted,
    shuffled,
    with_stats,
)
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import align as matching
from numpyro_spikeslab.reporting.arviz_data import inclusion_draws, posterior, statistics

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("sample_dims", [("chain", "draw"), ("sample",)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_planted_orders_and_signs_are_recovered(sample_dims, dtype):
    shape = (3, 40)[: len(sample_dims)]
    draws, truth = planted(shape)
    draws = {name: x.astype(x.dtype if x.dtype == int else dtype) for name, x in draws.items()}
    data = as_data(shuffled(draws, shape), sample_dims)
    assert not np.array_equal(data["posterior"]["phi_scale"], draws["phi_scale"])
    aligned = nss.align(data, reference=truth)["posterior"]
    for name, values in draws.items():
        np.testing.assert_array_equal(aligned[name], values)
        assert aligned[name].dtype == values.dtype
        assert aligned[name].dims == (*sample_dims, *PLATES[name])


def test_alignment_mends_r_hat():
    draws, _ = planted((4, 200))
    # each chain has an order and signs of its own
    order = np.array([[0, 1, 2, 3, 4], [1, 0, 3, 2, 4], [4, 3, 2, 1, 0], [2, 4, 0, 1, 3]])
    sign = np.array([[1, -1, 1, 1, 1], [-1, 1, -1, 1, 1], [1, 1, -1, -1, 1], [1, 1, -1, 1, -1]])
    chains = as_data(exchanged(draws, *(np.repeat(x[:, None], 200, axis=1) for x in (order, sign))))
    before, after = (statistics(posterior(x)) for x in (chains, nss.align(chains)))
    for name in ("W", "phi", "phi_scale"):
        assert np.nanmax(before[name].sel(summary="r_hat")) > 2
        assert np.nanmax(after[name].sel(summary="r_hat")) < 1.03


def test_without_reference_the_strongest_come_first():
    draws, truth = planted((2, 50))
    aligned = posterior(nss.align(as_data(shuffled(draws, (2, 50)))))
    mean = aligned.mean(["chain", "draw"])
    strength = np.linalg.norm(mean["W"], axis=0) * np.linalg.norm(mean["phi"], axis=1)
    assert (np.diff(strength) < 0).all() and strength[USED] == 0
    W = mean["W"].values[:, :USED]
    assert (np.take_along_axis(W, abs(W).argmax(0)[None], axis=0) > 0).all()
    assert sorted(abs(truth["W"].T @ W).argmax(axis=0)) == list(range(USED))
    expected = posterior(nss.align(as_data(draws), reference=mean[["W", "phi"]]))
    again = posterior(nss.align(xr.DataTree.from_dict({"posterior": aligned})))
    xr.testing.assert_equal(aligned[["W", "phi"]], expected[["W", "phi"]])
    xr.testing.assert_equal(aligned, again)


def test_the_reference_may_be_other_data():
    draws, _ = planted((2, 50))
    first = nss.align(as_data(shuffled(draws, (2, 50))))
    other = shuffled({name: x[0] for name, x in draws.items()}, (50,), seed=2)
    aligned = nss.align(as_data(other, ("sample",)), reference=first)["posterior"]
    for name in ("W", "phi", "phi_scale"):
        np.testing.assert_array_equal(aligned[name], first["posterior"][name].sel(chain=0))


def test_scales_of_weights_and_functions_do_not_matter():
    draws, truth = planted((2, 50))
    scale = np.exp(np.random.default_rng(2).normal(size=(2, 50, FUNCTIONS)))
    draws["W"], draws["W_slab"] = (draws[name] / scale[..., None, :] for name in ("W", "W_slab"))
    draws["phi"] = draws["phi"] * scale[..., None]
    for reference in (None, truth):
        aligned = nss.align(as_data(shuffled(draws, (2, 50))), reference)["posterior"]
        expected = nss.align(as_data(draws), reference)["posterior"]
        np.testing.assert_array_equal(aligned["phi"], expected["phi"])


def test_the_match_is_the_best_of_all_permutations():
    rng = np.random.default_rng(3)
    M = 4
    draws = matching.Factors(rng.normal(size=(30, M, 3)), rng.normal(size=(30, M, 5)))
    draws.W[::3, 1] = draws.W[::5, 3] = 0.0
    reference = matching.Factors(*(x[:1] for x in draws))
    target = reference.W[0][:, :, None] * reference.phi[0][:, None]
    for W, phi, order, sign in zip(*draws, *matching.match(draws, reference), strict=True):
        products = W[:, :, None] * phi[:, None]
        costs = [np.sum((products[list(p)] - target) ** 2) for p in permutations(range(M))]
        assert np.sum((products[order] - target) ** 2) == pytest.approx(min(costs))
        agreement = matching.cosine(W[order][None], reference.W[0])[0]
        agreement = agreement + matching.cosine(phi[order][None], reference.phi[0])[0]
        assert (sign == np.where(W[order].any(axis=1) & (agreement < 0), -1, 1)).all()


def test_draws_of_a_fit_move_together():
    """Functions that few draws use keep their own kernel parameters."""
    draws, _ = planted((200,))
    rare = np.random.default_rng(5).random((200, TASKS, 1)) < 0.1
    W = np.concatenate([draws["W"][..., :USED], rare, rare], axis=-1)
    phi = np.concatenate([draws["phi"], draws["phi"][::-1, USED:]], axis=-2)
    scale = np.tile(np.arange(FUNCTIONS + 1.0), (200, 1))
    data = as_data({"W": W, "phi": phi, "phi_scale": scale}, ["sample"])
    scale = nss.align(data)["posterior"]["phi_scale"]
    assert (scale == scale[0]).all() and sorted(scale[0]) == list(range(FUNCTIONS + 1))


def test_unused_functions_keep_order_and_signs():
    rng = np.random.default_rng(4)
    W, phi = rng.normal(size=(1, 500, 3, 4)), rng.normal(size=(1, 500, 4, 1))
    phi[:, :, 0] = np.abs(phi[:, :, 0])
    W[..., 1:], W[..., 0] = 0, [1.0, -2.0, 3.0]
    # to make the signs agree would move the mean of the others
    np.testing.assert_array_equal(nss.align(as_data({"W": W, "phi": phi}))["posterior"]["phi"], phi)


def test_functions_of_different_kernels_keep_their_places():
    """In every draw the second explains more, which would put it first; chains differ in signs."""
    W = np.tile([[0.5, 3.0], [0.5, 3.0]], (2, 50, 1, 1))
    phi = np.tile(np.random.default_rng(0).normal(size=(2, 4)), (2, 50, 1, 1))
    W[1, ..., 0], phi[1, :, 0] = -W[1, ..., 0], -phi[1, :, 0]
    scale = np.full((2, 50), 0.7)
    data = as_data({"W": W, "phi": phi, "phi_0_scale": scale, "phi_1_period": 5 * scale})
    once = nss.align(data)
    for aligned in (once, nss.align(data, once)):
        aligned = posterior(aligned)
        np.testing.assert_array_equal(aligned["phi"][1], aligned["phi"][0])
        np.testing.assert_array_equal(aligned["W"], np.abs(W))


def test_all_groups_of_the_same_draws_are_aligned():
    shape = (2, 30)
    draws, truth = planted(shape)
    probs = 0.1 + 0.8 * draws["W_spike"]
    moved = shuffled(draws | {"W_spike": probs}, shape)["W_spike"]
    data = as_data(shuffled(draws, shape))
    data = with_stats(data, **{"inclusion_probabilities.W": moved}, energy=draws["noise"][..., 0])
    data["predictions"] = posterior(data)[["phi_new", "noise"]]
    data["prior"] = posterior(data).isel(draw=slice(5))[["phi"]]
    data["observed_data"] = xr.Dataset({"Y": (["point", "task"], np.zeros((POINTS, TASKS)))})
    aligned = nss.align(data, truth)
    np.testing.assert_allclose(aligned["sample_stats"]["inclusion_probabilities.W"], probs)
    np.testing.assert_allclose(inclusion_draws(aligned, "W"), probs)
    np.testing.assert_array_equal(aligned["predictions"]["phi_new"], draws["phi_new"])
    for group in ("prior", "observed_data"):
        assert aligned[group].identical(data[group])


def test_invariants_are_invariant():
    shape = (2, 30)
    draws, _ = planted(shape)
    tree = nss.invariants(as_data(draws))
    values = tree["posterior"].to_dataset()
    assert list(tree.children) == ["posterior"]
    assert set(values.data_vars) == {"noise", "num_active", "WWT", "f"}
    np.testing.assert_array_equal(values["num_active"], np.full(shape, USED))
    np.testing.assert_allclose(values["WWT"], draws["W"] @ draws["W"].swapaxes(-1, -2))
    np.testing.assert_allclose(values["f"], (draws["W"] @ draws["phi"]).swapaxes(-1, -2))
    assert values["f"].dims == ("chain", "draw", "point", "task")
    for other in (as_data(shuffled(draws, shape)), nss.align(as_data(draws))):
        xr.testing.assert_allclose(nss.invariants(other)["posterior"].to_dataset(), values)
    assert float(arviz_stats.rhat(tree, var_names="noise")["noise"].max()) < 1.2
    f = np.ones((*shape, POINTS, TASKS))
    np.testing.assert_array_equal(nss.invariants(as_data(draws | {"f": f}))["posterior"]["f"], f)


def test_weights_of_one_task():
    draws, _ = planted((2, 20))
    one = {"W": draws["W"][..., 0, :], "phi": draws["phi"]}
    dims = {"W": ["latent"], "phi": ["latent", "point"]}
    data = arviz_base.from_dict({"posterior": one}, dims=dims)
    values = nss.invariants(nss.align(data))["posterior"]
    np.testing.assert_allclose(values["WWT"], (one["W"] ** 2).sum(-1))
    np.testing.assert_allclose(values["f"], np.einsum("cdm,cdmn->cdn", one["W"], one["phi"]))
