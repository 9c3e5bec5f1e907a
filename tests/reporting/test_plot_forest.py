# SPDX-License-Identifier: Apache-2.0
"""Means and intervals as they are drawn."""

import arviz_base
from drawn import artist, chains, overlap, panel, tick_labels, variational
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, pictures

pytestmark = pytest.mark.filterwarnings("error")


def three_variables(seed=3):
    rng = np.random.default_rng(seed)
    draws = {"v": rng.normal(size=(4, 100, 2, 3)), "sigma": rng.normal(2.0, 0.1, size=(4, 100))}
    return chains(5, **draws)


def line_of(picture, kind, name, place, **sel):
    """Ends and row of the interval of one element."""
    x, y, broken = artist(picture, kind, name, **sel).get_xydata().reshape(-1, 3, 2)[place]
    assert np.isnan(broken[0]) and x[1] == y[1]
    return [x[0], y[0]], x[1]


def test_forest_statistics():
    data = three_variables()
    given = {"w": np.ones(5), "v": np.arange(6.0).reshape(2, 3), "sigma": 2.0}
    picture = nss.plot_forest(data, list(given), reference=given)
    tail = (1 - arviz_base.rcParams["stats.ci_prob"]) / 2
    row = 0
    for name, values in given.items():
        draws = reading.posterior(data)[name].values.reshape(400, -1).T
        points = artist(picture, "point_estimate", name).get_offsets()
        marks = artist(picture, "reference", name).get_offsets()
        np.testing.assert_allclose(marks[:, 0], np.ravel(values))
        for place, each in enumerate(draws):
            np.testing.assert_allclose(points[place], [each.mean(), row])
            trunk = line_of(picture, "trunk", name, place)
            np.testing.assert_allclose(trunk[0], np.quantile(each, [0.25, 0.75]))
            twig = line_of(picture, "twig", name, place)
            np.testing.assert_allclose(twig[0], np.quantile(each, [tail, 1 - tail]))
            assert trunk[1] == twig[1] == marks[place, 1] == row
            row += 1
    assert tick_labels(panel(picture)) == [*nss.summary(data, ["w", "v", "sigma"]).index]
    assert panel(picture).get_ylim()[0] > panel(picture).get_ylim()[1]


def test_every_second_row_is_shaded_whatever_its_variable():
    axes = panel(nss.plot_forest(three_variables(), ["w", "v", "sigma"]))
    bands = sorted((each.get_y(), each.get_height()) for each in axes.patches)
    np.testing.assert_allclose(bands, [[row - 0.5, 1.0] for row in range(1, 12, 2)])
    assert all(each.get_x() == 0 and each.get_width() == 1 for each in axes.patches)


def test_forest_states_its_levels():
    axis = "posterior mean, 50% and {} intervals (black ticks: reference)"
    for prob, written in ((0.89, "89%"), (0.955, "95.5%")):
        with arviz_base.rc_context({"stats.ci_prob": prob}):
            picture = nss.plot_forest(chains(2), "w", reference={"w": [0, 1]})
        assert panel(picture).get_xlabel() == axis.format(written)


def test_forest_has_a_line_at_zero_if_it_is_there():
    data = three_variables()
    zero = [line for line in panel(nss.plot_forest(data, "v")).lines if line.get_xdata()[0] == 0]
    assert len(zero) == 1 and zero[0].get_xdata() == [0, 0]
    axes = panel(nss.plot_forest(data, "sigma"), "sigma")
    assert axes.get_xlim()[0] > 1.5 and len(axes.lines) == 2


def test_forest_of_chains_and_variational_draws():
    methods = {"Gibbs": chains(3), "PMF": variational(3)}
    picture = nss.plot_forest(methods, "w", reference="Gibbs")
    points = {m: artist(picture, "point_estimate", model=m).get_offsets() for m in methods}
    for method, data in methods.items():
        means = nss.summary(data, "w", round_to=None)["mean"].astype(float)
        np.testing.assert_allclose(points[method][:, 0], means)
        row = line_of(picture, "twig", "w", 1, model=method)[1]
        assert row == points[method][1, 1]
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks[:, 0], points["Gibbs"][:, 0])
    np.testing.assert_allclose(marks[:, 1], (points["Gibbs"] + points["PMF"])[:, 1] / 2)
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gibbs", "PMF"]
    for entry, method in zip(legend.legend_handles, methods, strict=True):
        assert entry.get_marker() == "o" and entry.get_markerfacecolor() == "white"
        assert entry.get_color() == artist(picture, "trunk", model=method).get_color()


def test_the_most_included_weights_come_first():
    v = np.random.default_rng(2).binomial(
        1, [[0.1, 0.9, 0.3], [0.5, 0.2, 0.4]], size=(4, 100, 2, 3)
    )
    sigma = np.random.default_rng(3).normal(size=(4, 100, 2))
    data = chains(6, v=1.0 * v, v_spike=v, sigma=sigma)
    none = data.map_over_datasets(lambda group: 0 * group)
    dense = xr.DataTree.from_dict({"posterior": reading.posterior(data)[["w", "v", "sigma"]]})
    methods = {"Gibbs": data, "none": none, "dense": dense}
    given = {"w": np.arange(6), "v": np.arange(6).reshape(2, 3), "sigma": [7, 8]}
    picture = nss.plot_forest(methods, ["w", "v", "sigma"], reference=given, top=2)
    axes = panel(picture)
    labels = ["w[x5]", "w[x4]", "", "v[0, 1]", "v[1, 0]", "", "sigma[0]", "sigma[1]"]
    assert tick_labels(axes) == labels
    table = nss.summary(data, ["w", "v", "sigma"], round_to=None)
    for name, rows in {"w": [0, 1], "v": [3, 4], "sigma": [6, 7]}.items():
        points = artist(picture, "point_estimate", name, model="none").get_offsets()
        np.testing.assert_array_equal(points[:, 0], 0)
        points = artist(picture, "point_estimate", name, model="Gibbs").get_offsets()
        np.testing.assert_allclose(points[:, 0], table.loc[[labels[i] for i in rows], "mean"])
        marks = artist(picture, "reference", name).get_offsets()
        np.testing.assert_allclose(marks[:, 1], rows)
        known = {"w": [5, 4], "v": [1, 3], "sigma": [7, 8]}[name]
        np.testing.assert_allclose(marks[:, 0], known)
    notes = {text.get_position()[1]: text.get_text() for text in axes.texts if text.get_text()}
    most = [table["inclusion"].astype(float)[row] for row in ("w[x3]", "v[1, 2]")]
    assert notes == {
        2: f"4 others of w, inclusion probabilities up to {most[0]:.2g}",
        5: f"4 others of v, inclusion probabilities up to {most[1]:.2g}",
    }


def test_no_weight_is_left_to_be_summarised():
    axes = panel(nss.plot_forest(chains(3), "w", top=3))
    assert tick_labels(axes) == ["w[x2]", "w[x1]", "w[x0]"]
    assert not any(text.get_text() for text in axes.texts)


@pytest.mark.parametrize("count", [40, 400])
def test_forest_labels_do_not_overlap(count):
    w = np.random.default_rng(0).normal(size=(4, 50, 2, count))
    data = arviz_base.from_dict(
        {"posterior": {"w": w}},
        dims={"w": ["organ", "gene"]},
        coords={"organ": ["liver", "spleen"], "gene": [f"a long name {i}" for i in range(count)]},
    )
    picture = nss.plot_forest(data, "w")
    figure = picture.viz["figure"].item()
    figure.canvas.draw()
    texts = panel(picture).get_yticklabels()
    assert not overlap(texts) and texts[0].get_text() == "w[liver, a long name 0]"
    assert len(texts) == 80 if count == 40 else 100 <= len(texts) < 800
    assert figure.get_size_inches()[1] <= pictures.MAX_HEIGHT + 1
    assert min(text.get_window_extent().x0 for text in texts) >= 0
    assert panel(picture).bbox.width > 0.85 * pictures.PANEL * figure.dpi


PAIR = chains(2)


def test_a_series_without_labels_is_in_the_order_of_the_weights():
    draws = reading.posterior(chains(3)).assign_coords(feature=[1, 2, 3])
    data = xr.DataTree.from_dict({"posterior": draws})
    picture = nss.plot_forest(data, "w", {"w": pd.Series([0.1, 0.2, 0.3])})
    marks = artist(picture, "reference", "w").get_offsets()[:, 0]
    np.testing.assert_allclose(marks, [0.1, 0.2, 0.3])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "var_names", "reference", "message"),
    [
        (PAIR, None, None, "var_names: got None"),
        (PAIR, [], None, r"var_names: got \[\]"),
        ({"a": PAIR, "b": chains(3)}, "w", None, "data: `w` of 'b' has the shape"),
        (PAIR, "w", "Gibbs", "reference: got 'Gibbs'"),
        (PAIR, "w", {"w": 1.0}, r"reference: `w` has the shape \(\), expected \(2,\)"),
        (
            PAIR,
            "w",
            {"w": pd.Series([0.9, 0.1], index=["x1", "X0"])},
            r"reference: `w` has the labels \['X0'\] of 'feature', expected \['x0', 'x1'\]",
        ),
    ],
)
def test_forest_errors(data, var_names, reference, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_forest(data, var_names, reference)


@pytest.mark.usefixtures("unchecked_types")
def test_forest_shows_one_weight_or_more():
    with pytest.raises(ValueError, match="top: got 0, expected a whole number, at least 1"):
        nss.plot_forest(PAIR, "w", top=0)
