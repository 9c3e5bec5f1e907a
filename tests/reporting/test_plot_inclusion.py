# SPDX-License-Identifier: Apache-2.0
"""Inclusion probabilities as they are drawn."""

import arviz_base
from drawn import artist, chains, overlap, panel, tick_labels, variational
from matplotlib.colors import to_rgba
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, pictures

pytestmark = pytest.mark.filterwarnings("error")


def table(data):
    return nss.summary(data, "w", round_to=None)


def test_inclusion_points_bars_and_labels():
    data = chains(5)
    picture = nss.plot_inclusion(data)
    rows = table(data)
    xy = artist(picture, "inclusion").get_offsets()
    np.testing.assert_allclose(xy[:, 0], rows["inclusion"].astype(float))
    np.testing.assert_allclose(xy[:, 1], range(5))
    x, y = artist(picture, "mcse").get_data()
    x = np.reshape(x, (5, 3))
    half = 2 * rows["mcse_inclusion"].astype(float).to_numpy()
    np.testing.assert_allclose((x[1:4, 1] - x[1:4, 0]) / 2, half[1:4])
    assert np.isnan(x[[0, 4]]).all() and np.isnan(x[:, 2]).all()
    np.testing.assert_allclose(np.reshape(y, (5, 3))[:, 0], range(5))
    axes = panel(picture)
    assert tick_labels(axes) == [f"x{i}" for i in range(5)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
    assert axes.get_ylabel() == "w" and axes.get_xlabel() == "inclusion probability"
    assert not picture.viz["figure"].item().legends


def test_inclusion_bars_stay_inside_the_unit_interval():
    spike = np.zeros((2, 100, 1), int)
    spike[0, 50] = 1
    data = arviz_base.from_dict({"posterior": {"w": 1.0 * spike, "w_spike": spike}})
    x = artist(nss.plot_inclusion(data), "mcse").get_xdata()
    assert np.nanmin(x) == 0


def test_inclusion_methods_are_overlaid():
    methods = {"Gibbs": chains(3), "PMF": variational(3)}
    picture = nss.plot_inclusion(methods, "w", reference="Gibbs")
    for method, data in methods.items():
        xy = artist(picture, "inclusion", model=method).get_offsets()
        np.testing.assert_allclose(xy[:, 0], table(data)["inclusion"].astype(float))
    gibbs, pmf = (artist(picture, "inclusion", model=name) for name in methods)
    assert (gibbs.get_offsets()[:, 1] < pmf.get_offsets()[:, 1]).all()
    assert gibbs.get_facecolor().tolist() != pmf.get_facecolor().tolist()
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gibbs", "PMF"]
    for entry, points in zip(legend.legend_handles, (gibbs, pmf), strict=True):
        assert entry.get_marker() == "o" and entry.get_linestyle() == "None"
        assert to_rgba(entry.get_color()) == tuple(points.get_facecolor()[0])
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks[:, 0], gibbs.get_offsets()[:, 0])
    np.testing.assert_allclose(marks[:, 1], range(3))
    assert panel(picture).get_xlabel() == "inclusion probability (black ticks: Gibbs)"


def test_references_with_labels_are_matched_by_them():
    data = chains(3).map_over_datasets(
        lambda x: x.assign_coords(feature=["a", "b", "c"]) if "feature" in x.dims else x
    )
    given = pd.Series({"c": 1.0, "a": 0.0, "b": 0.5})
    for reference in (given, xr.DataArray(given.to_numpy(), {"feature": given.index})):
        picture = nss.plot_inclusion(data, "w", reference={"w": reference})
        drawn = artist(picture, "reference").get_offsets()[:, 0]
        np.testing.assert_allclose(drawn, [0.0, 0.5, 1.0])


def test_inclusion_of_several_variables_against_given_values():
    v = np.random.default_rng(2).binomial(1, 0.5, size=(4, 100, 2, 2))
    data = chains(3, v=1.0 * v, v_spike=v)
    exact = {"w": [0.0, 0.5, 1.0], "v": np.full((2, 2), 0.5)}
    picture = nss.plot_inclusion(data, reference=exact)
    assert tick_labels(panel(picture, "v")) == ["0, 0", "0, 1", "1, 0", "1, 1"]
    np.testing.assert_allclose(
        artist(picture, "inclusion", "v").get_offsets()[:, 0], v.mean((0, 1)).ravel()
    )
    np.testing.assert_allclose(artist(picture, "reference").get_offsets()[:, 0], exact["w"])
    np.testing.assert_allclose(artist(picture, "reference", "v").get_offsets()[:, 0], 0.5)


def test_the_most_included_weights_come_first():
    methods = {"Gibbs": chains(6), "PMF": variational(6)}
    picture = nss.plot_inclusion(methods, reference="Gibbs", top=2)
    assert tick_labels(panel(picture)) == ["x5", "x4", "largest of 4 others"]
    for method, data in methods.items():
        inclusion = table(data)["inclusion"].astype(float).to_numpy()
        xy = artist(picture, "inclusion", model=method).get_offsets()
        np.testing.assert_allclose(xy[:, 0], [inclusion[5], inclusion[4], inclusion[:4].max()])
        bars = np.reshape(artist(picture, "mcse", model=method).get_xdata(), (3, 3))
        assert np.isnan(bars[2]).all() and not np.isnan(bars[1, :2]).any()
    gibbs = table(methods["Gibbs"])["inclusion"].astype(float).to_numpy()
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks[:, 0], [gibbs[5], gibbs[4], gibbs[:4].max()])


def test_the_most_included_of_two_dimensions():
    v = np.random.default_rng(2).binomial(1, [[0.1, 0.9], [0.5, 0.2]], size=(4, 100, 2, 2))
    data = chains(3, v=1.0 * v, v_spike=v)
    picture = nss.plot_inclusion(data, top=3)
    assert tick_labels(panel(picture, "v")) == ["0, 1", "1, 0", "1, 1", "largest of 1 others"]
    assert tick_labels(panel(picture)) == ["x2", "x1", "x0"]


def test_weights_above_the_threshold_have_bold_names():
    v = np.random.default_rng(2).binomial(1, [0.2, 0.7], size=(4, 100, 2))
    data = chains(6, v=1.0 * v, v_spike=v)
    methods = {"Gibbs": data, "low": data.map_over_datasets(lambda group: 0 * group)}
    picture = nss.plot_inclusion(methods, threshold=0.75)
    inclusion = table(data)["inclusion"].astype(float).to_numpy()
    assert inclusion[3] < 0.75 < inclusion[4]
    assert bold(panel(picture)) == ["x4", "x5"] and bold(panel(picture, "v")) == []
    for name in ("w", "v"):
        assert set(artist(picture, "threshold", name).get_xdata()) == {0.75}
    assert bold(panel(nss.plot_inclusion(methods), "v")) == ["1"]
    ranked = nss.plot_inclusion(methods, "w", top=1, threshold=0.5)
    assert bold(panel(ranked)) == ["x5", "largest of 5 others"]


def bold(axes):
    return [x.get_text() for x in axes.get_yticklabels() if x.get_fontweight() == "bold"]


def test_inclusion_of_a_weight_without_plates():
    spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100))
    data = arviz_base.from_dict({"posterior": {"w": 1.0 * spike, "w_spike": spike}})
    picture = nss.plot_inclusion(data)
    assert artist(picture, "inclusion").get_offsets()[0, 0] == spike.mean()


@pytest.mark.parametrize("count", [5, 300])
@pytest.mark.parametrize("draw", [nss.plot_inclusion])
def test_dollars_in_names_are_no_mathematics(draw, count):
    data = chains(count)
    labels = [f"price $ (adj_$) {k}" for k in range(count)]
    data = data.map_over_datasets(lambda group: group.assign_coords(feature=labels))
    picture = draw({"price $ (a_$) 1": data, "b": data}, "w", reference="price $ (a_$) 1")
    # mathematics with this index would not be understood
    picture.viz["figure"].item().canvas.draw()
    texts = [*panel(picture).get_yticklabels(), *panel(picture).texts]
    found = [text.get_text() for text in texts if "adj" in text.get_text()]
    assert found and all("price $ (adj_$)" in text for text in found)


@pytest.mark.parametrize("count", [100, 400])
def test_labels_of_many_weights_do_not_overlap(count):
    picture = nss.plot_inclusion({"a": chains(count), "b": chains(count, 1)}, top=count)
    figure = picture.viz["figure"].item()
    figure.canvas.draw()
    labels = panel(picture).get_yticklabels()
    assert not overlap(labels)
    assert len(labels) == count if count == 100 else 100 <= len(labels) < count
    assert figure.get_size_inches()[1] <= pictures.MAX_HEIGHT + 1


def test_savefig(tmp_path):
    nss.plot_inclusion(chains(3)).savefig(tmp_path / "inclusion.png")
    assert (tmp_path / "inclusion.png").stat().st_size > 1000


PAIR = chains(2)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "var_names", "reference", "message"),
    [
        ({}, None, None, "data: got {}, expected ArviZ data or a mapping"),
        ([PAIR], None, None, "data: got "),
        ({"a": 1}, None, None, "data: got int without a `posterior` group"),
        (PAIR, "v", None, r"var_names: got \['v'\], expected one or more of"),
        (PAIR, "w_spike", None, r"var_names: got \['w_spike'\], expected spike-and-slab weights"),
        (
            arviz_base.from_dict({"posterior": {"mu": np.zeros((2, 10))}}),
            None,
            None,
            r"data: its posterior has the variables \['mu'\], expected a weight `w` beside",
        ),
        ({"a": PAIR, "b": chains(3)}, None, None, "data: `w` of 'b' has the shape"),
        ({"a": PAIR}, None, "b", r"reference: got 'b', expected one of the methods \['a'\]"),
        (PAIR, "w", {"v": 1.0}, r"reference: got values of \['v'\], expected `w`"),
        (PAIR, "w", {"w": [1.0]}, r"reference: `w` has the shape \(1,\), expected \(2,\)"),
    ],
)
def test_inclusion_errors(data, var_names, reference, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_inclusion(data, var_names, reference)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top": 0}, "top: got 0, expected a whole number, at least 1"),
        ({"threshold": 50}, "threshold: got 50, expected a probability between 0 and 1"),
        ({"threshold": -0.1}, "threshold: got -0.1, expected a probability"),
    ],
)
def test_what_stands_out_must_make_sense(given, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_inclusion(PAIR, **given)


@pytest.mark.usefixtures("unchecked_types")
def test_inclusion_needs_indicators_everywhere():
    dense = xr.DataTree.from_dict({"posterior": reading.posterior(PAIR)[["w"]]})
    with pytest.raises(ValueError, match="expected spike-and-slab weights, of which 'b' has"):
        nss.plot_inclusion({"a": PAIR, "b": dense})
