# SPDX-License-Identifier: Apache-2.0
"""Orders and signs of latent functions, and what does not depend on them."""

from itertools import permutations

import arviz_base
import arviz_stats
from known_draws import (
    FUNCTIONS,
    PLATES,
    POINTS,
    TASKS,
    USED,
    as_data,
    coin,
    exchanged,
    pair,
    planted,
    shuffled,
    with_stats,
)
import numpy as np
import pytest
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, matching as factors, stats

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("sample_dims", [("chain", "draw"), ("sample",)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_align_recovers_planted_orders_and_signs(sample_dims, dtype):
    shape = (3, 40)[: len(sample_dims)]
    draws, truth = planted(shape)
    draws = {name: x.astype(x.dtype if x.dtype == int else dtype) for name, x in draws.items()}
    data = as_data(shuffled(draws, shape), sample_dims)
    assert not np.array_equal(data["posterior"]["phi_scale"], draws["phi_scale"])
    found = nss.align(data, reference=truth)["posterior"].to_dataset()
    for name, values in draws.items():
        np.testing.assert_array_equal(found[name], values)
        assert found[name].dtype == values.dtype
        assert found[name].dims == (*sample_dims, *PLATES[name])
    assert found.attrs["aligned"] == "W, phi"


def test_align_mends_r_hat():
    shape = (4, 200)
    draws, _ = planted(shape)
    # the draws of a chain agree with each other, as those of a real one do
    order = np.array([[0, 1, 2, 3, 4], [1, 0, 3, 2, 4], [4, 3, 2, 1, 0], [2, 4, 0, 1, 3]])
    sign = np.array([[1, -1, 1, 1, 1], [-1, 1, -1, 1, 1], [1, 1, -1, -1, 1], [1, 1, -1, 1, -1]])
    chains = exchanged(draws, *(np.repeat(x[:, None], 200, axis=1) for x in (order, sign)))
    raw, found = as_data(chains), nss.align(as_data(chains))
    before, after = (stats.statistics(x["posterior"].to_dataset()) for x in (raw, found))
    for name in ("W", "phi", "phi_scale"):
        assert np.nanmax(before[name].sel(summary="r_hat")) > 2
        assert np.nanmax(after[name].sel(summary="r_hat")) < 1.03


def test_align_without_reference_puts_the_strongest_first():
    shape = (2, 50)
    draws, truth = planted(shape)
    found = nss.align(as_data(shuffled(draws, shape)))
    mean = found["posterior"].to_dataset().mean(["chain", "draw"])
    strength = np.linalg.norm(mean["W"], axis=0) * np.linalg.norm(mean["phi"], axis=1)
    assert (np.diff(strength) < 0).all() and strength[USED] == 0
    W = mean["W"].values[:, :USED]
    assert (np.take_along_axis(W, abs(W).argmax(0)[None], axis=0) > 0).all()
    # the same functions as planted, in another order
    order = abs(truth["W"].T @ W).argmax(axis=0)
    assert sorted(order) == list(range(USED))
    for name in ("W", "phi"):
        expected = nss.align(as_data(draws), reference=mean[["W", "phi"]])["posterior"]
        np.testing.assert_array_equal(found["posterior"][name], expected[name])
    again = nss.align(found)
    for name, values in found["posterior"].data_vars.items():
        np.testing.assert_array_equal(again["posterior"][name], values)


def test_align_to_other_data():
    draws, _ = planted((2, 50))
    first = nss.align(as_data(shuffled(draws, (2, 50))))
    other = shuffled({name: x[0] for name, x in draws.items()}, (50,), seed=2)
    found = nss.align(as_data(other, ("sample",)), reference=first)
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
        found = nss.align(as_data(shuffled(draws, shape)), reference)
        expected = nss.align(as_data(draws), reference)
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
    found = nss.align(as_data(draws, ["sample"]))["posterior"]["phi_scale"]
    assert (found == found[0]).all() and sorted(found[0]) == list(range(FUNCTIONS + 1))


def test_unused_functions_keep_order_and_signs():
    rng = np.random.default_rng(4)
    W, phi = rng.normal(size=(1, 500, 3, 4)), rng.normal(size=(1, 500, 4, 1))
    phi[:, :, 0] = np.abs(phi[:, :, 0])
    W[..., 1:] = 0
    W[..., 0] = [1.0, -2.0, 3.0]
    found = nss.align(as_data({"W": W, "phi": phi}))["posterior"]
    # to make the signs agree would move the mean by 0.8
    assert np.abs(found["phi"].isel(latent=[1, 2, 3]).mean(["chain", "draw"])).max() < 0.2
    np.testing.assert_array_equal(found["phi"], phi)


def test_align_changes_the_groups_of_the_same_draws():
    shape = (2, 30)
    draws, truth = planted(shape)
    stats = {"inclusion_probabilities.W": 0.1 + 0.8 * draws["W_spike"] + 0 * draws["W"]}
    names = {"inclusion_probabilities.W": "W_spike"}
    moved = shuffled(draws | {"W_spike": stats["inclusion_probabilities.W"]}, shape)["W_spike"]
    data = as_data(shuffled(draws, shape))
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
    found = nss.invariants(as_data(draws))
    values = found["posterior"].to_dataset()
    assert list(found.children) == ["posterior"]
    assert set(values.data_vars) == {"noise", "num_active", "WWT", "f"}
    np.testing.assert_array_equal(values["num_active"], np.full(shape, USED))
    np.testing.assert_allclose(values["WWT"], draws["W"] @ draws["W"].swapaxes(-1, -2))
    np.testing.assert_allclose(values["f"], (draws["W"] @ draws["phi"]).swapaxes(-1, -2))
    assert values["f"].dims == ("chain", "draw", "point", "task")
    for other in (as_data(shuffled(draws, shape)), nss.align(as_data(draws))):
        for name, expected in values.data_vars.items():
            np.testing.assert_allclose(nss.invariants(other)["posterior"][name], expected)
    # ArviZ takes them
    assert float(arviz_stats.rhat(found, var_names="noise")["noise"].max()) < 1.2


def test_invariants_keep_the_fit_of_the_model():
    draws, _ = planted((2, 5))
    f = np.ones((2, 5, POINTS, TASKS))
    data = as_data(draws | {"f": f})
    np.testing.assert_array_equal(nss.invariants(data)["posterior"]["f"], f)


def test_weights_of_one_task():
    draws, _ = planted((2, 20))
    one = {"W": draws["W"][..., 0, :], "phi": draws["phi"]}
    dims = {"W": ["latent"], "phi": ["latent", "point"]}
    data = arviz_base.from_dict({"posterior": one}, dims=dims)
    found = nss.invariants(nss.align(data))["posterior"]
    np.testing.assert_allclose(found["WWT"], (one["W"] ** 2).sum(-1))
    np.testing.assert_allclose(found["f"], np.einsum("cdm,cdmn->cdn", one["W"], one["phi"]))


DATA = as_data(planted((2, 10))[0])


REFERENCE = planted((2, 10))[1]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "reference", "names", "message"),
    [
        ({"W": 1}, None, {}, "data: got dict"),
        (pair(coin([0.5])), None, {}, r"weights: got 'W', expected one of \['w'"),
        (DATA, None, {"functions": "phii"}, "functions: got 'phii', expected one of"),
        (DATA, None, {"functions": "W_slab"}, r"'task', 'latent'\), expected one plate"),
        (
            arviz_base.from_dict({"posterior": dict(planted((2, 10))[0])}),
            None,
            {},
            r"expected one plate in common.*dims={'W': \['task', 'latent'\]",
        ),
        (
            DATA,
            {"W": REFERENCE["W"]},
            {},
            r"reference: got values of \['W'\], expected `phi` among",
        ),
        (
            DATA,
            REFERENCE | {"W": np.zeros((2, 2))},
            {},
            r"reference: `W` has the shape \(2, 2\), expected \(6, 5\)",
        ),
        (DATA, DATA.isel(task=[0]), {}, r"reference: `W` has the shape \(1, 5\)"),
        (DATA, pair(coin([0.5])), {}, r"reference: got values of \['w'.*, expected `W` among them"),
        (
            as_data(planted((2, 10))[0] | {"phi": np.full((2, 10, FUNCTIONS, POINTS), np.nan)}),
            None,
            {},
            "data: `phi` is not finite in some draws",
        ),
        (
            with_stats(DATA, **{"inclusion_probabilities.W": np.zeros((2, 10, 1))}),
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
    data = DATA.copy()
    data["predictions"] = DATA["posterior"].to_dataset()[["phi_new"]].isel(draw=slice(3))
    with pytest.raises(ValueError, match=r"`phi_new` has the sizes .*; thin all groups alike"):
        nss.align(data)
