# SPDX-License-Identifier: Apache-2.0
"""Means and intervals as they are drawn."""

import arviz_base
from drawn import artist, chains, overlap, variational
import numpy as np
import pytest

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading

pytestmark = pytest.mark.filterwarnings("error")


def test_forest_statistics():
    data = chains(4, sigma=np.random.default_rng(3).normal(size=(4, 100)))
    picture = nss.plot_forest(data, ["w", "sigma"], reference={"w": np.ones(4), "sigma": 2.0})
    draws = reading.posterior(data)
    for i in range(4):
        w = draws["w"].isel(feature=i).values
        label = f"x{i}"
        assert artist(picture, "point_estimate", feature=label).get_offsets()[0, 0] == (
            pytest.approx(w.mean())
        )
        trunk = artist(picture, "trunk", feature=label).get_xdata()
        np.testing.assert_allclose(trunk, np.quantile(w, [0.25, 0.75]))
        tail = (1 - arviz_base.rcParams["stats.ci_prob"]) / 2
        twig = artist(picture, "twig", feature=label).get_xdata()
        np.testing.assert_allclose(twig, np.quantile(w, [tail, 1 - tail]))
        mark = artist(picture, "reference", feature=label).get_offsets()[0]
        place = artist(picture, "point_estimate", feature=label).get_offsets()[0, 1]
        np.testing.assert_allclose(mark, [1.0, place])
    assert artist(picture, "reference", "sigma").get_offsets()[0, 0] == 2.0


def test_forest_of_chains_and_variational_draws():
    methods = {"Gibbs": chains(3), "PMF": variational(3)}
    picture = nss.plot_forest(methods, "w", reference="Gibbs")
    for method, data in methods.items():
        point = artist(picture, "point_estimate", model=method, feature="x1").get_offsets()[0]
        assert point[0] == pytest.approx(nss.summary(data, "w", round_to=None).loc["w[x1]", "mean"])
    gibbs, pmf = (
        artist(picture, "point_estimate", model=name, feature="x1").get_offsets()[0]
        for name in methods
    )
    mark = artist(picture, "reference", feature="x1").get_offsets()[0]
    np.testing.assert_allclose(mark, [gibbs[0], (gibbs[1] + pmf[1]) / 2])
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gibbs", "PMF"]


def test_forest_labels_do_not_overlap():
    w = np.random.default_rng(0).normal(size=(4, 50, 2, 40))
    data = arviz_base.from_dict(
        {"posterior": {"w": w}},
        dims={"w": ["organ", "gene"]},
        coords={"organ": ["liver", "spleen"], "gene": [f"a long gene name {i}" for i in range(40)]},
    )
    picture = nss.plot_forest(data, "w")
    figure = picture.viz["figure"].item()
    figure.canvas.draw()
    texts = [
        artist(picture, "gene_label", organ=o, gene=g)
        for o in ("liver", "spleen")
        for g in data["posterior"]["gene"].values
    ]
    assert not overlap(texts)
    left = min(text.get_window_extent().x0 for text in texts)
    organs = [artist(picture, "organ_label", organ=o) for o in ("liver", "spleen")]
    assert max(text.get_window_extent().x1 for text in organs) < left


PAIR = chains(2)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "var_names", "reference", "message"),
    [
        (PAIR, None, None, "var_names: got None"),
        (PAIR, [], None, r"var_names: got \[\]"),
        ({"a": PAIR, "b": chains(3)}, "w", None, "data: `w` of 'b' has the shape"),
        (PAIR, "w", "Gibbs", "reference: got 'Gibbs'"),
        (PAIR, "w", {"w": 1.0}, r"reference: `w` has the shape \(\), expected \(2,\)"),
    ],
)
def test_forest_errors(data, var_names, reference, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_forest(data, var_names, reference)
