# SPDX-License-Identifier: Apache-2.0
"""Latent functions as they are drawn."""

import arviz_base
from drawn import artist, chains, edges_of, of_tasks, with_nan
import numpy as np
import pytest

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")


def test_latent_functions_are_means_and_bands():
    X = np.array([3.0, 0.0, 1.0, 2.0])
    data = of_tasks(latent=["a", "b", "c"])
    picture = nss.plot_latent_functions(data, X[:, None])
    phi = data["posterior"]["phi"].values.reshape(100, 3, 4)[:, :, X.argsort()]
    tail = (1 - arviz_base.rcParams["stats.ci_prob"]) / 2
    for m, label in enumerate("abc"):
        x, y = artist(picture, "mean", "phi", latent=label, model="posterior").get_data()
        np.testing.assert_array_equal(x, [0, 1, 2, 3])
        np.testing.assert_allclose(y, phi[:, m].mean(0))
        places, ends = edges_of(artist(picture, "band", "phi", latent=label, model="posterior"))
        np.testing.assert_array_equal(places, [0, 1, 2, 3])
        np.testing.assert_allclose(ends, np.quantile(phi[:, m], [tail, 1 - tail], axis=0))
        assert picture.get_target("phi", {"latent": label}).get_title() == f"latent {label}"
    assert not picture.viz["figure"].item().legends


def test_active_functions_of_several_methods():
    points = {"point": [0.5, 1.0, 1.5, 9.0]}
    methods = {"Gibbs": of_tasks(**points), "PMF": of_tasks(1, ("sample",), **points)}
    picture = nss.plot_latent_functions(methods, active_only=True)
    assert picture.viz["mean"]["phi"]["latent"].values.tolist() == [0, 1]
    lines = [artist(picture, "mean", "phi", latent=0, model=name) for name in methods]
    for line, data in zip(lines, methods.values(), strict=True):
        draws = data["posterior"]["phi"]
        mean = draws.sel(latent=0).mean(
            [dim for dim in draws.dims if dim not in ("latent", "point")]
        )
        np.testing.assert_allclose(line.get_data(), [*points.values(), mean])
    assert lines[0].get_color() != lines[1].get_color()
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gibbs", "PMF"]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (chains(2), {}, "weights: got 'W', expected one of"),
        (of_tasks(), {"functions": "W_spike"}, "expected one plate in common"),
        (of_tasks(), {"X": np.zeros((4, 2))}, r"X: got inputs of shape \(4, 2\) .* such as X"),
        (of_tasks(point=list("abcd")), {}, r"X: got labels of shape \(4,\) and type <U1"),
        (
            of_tasks().isel(latent=[2]),
            {"active_only": True},
            "active_only: no weight is more often in than out",
        ),
        (with_nan(of_tasks(), "phi"), {}, "data: `phi` is not finite in some draws"),
        (
            {"a": of_tasks(), "b": of_tasks().isel(point=[0])},
            {},
            "data: `phi` of 'b' has the shape",
        ),
    ],
)
def test_latent_functions_errors(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_latent_functions(data, **arguments)
