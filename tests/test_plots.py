# SPDX-License-Identifier: Apache-2.0
"""What the pictures of plots.py show, read back from their artists."""

from itertools import pairwise

import arviz_base
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from numpyro_spikeslab import diagnostics, plots

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def figures():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def chains(count, seed=0, **others):
    """Four chains of ``count`` weights: the first never in, the last always."""
    rng = np.random.default_rng(seed)
    p = np.linspace(0, 1, count)
    spike = rng.binomial(1, p, size=(4, 100, count))
    slab = rng.normal(1.0, 0.5, size=spike.shape)
    dims = {"w": ["feature"], "w_spike": ["feature"]}
    return arviz_base.from_dict(
        {"posterior": {"w": spike * slab, "w_spike": spike, **others}},
        dims=dims | {name: ["task", "part"][: draws.ndim - 2] for name, draws in others.items()},
        coords={"feature": [f"x{i}" for i in range(count)]},
    )


def variational(count, seed=1):
    draws = diagnostics.posterior(chains(count, seed)).stack(sample=["chain", "draw"])
    draws = draws.drop_vars(["sample", "chain", "draw"]).transpose("sample", ...)
    return xr.DataTree.from_dict({"posterior": draws})


def table(data):
    return diagnostics.summary(data, "w", round_to=None)


def artist(picture, kind, name="w", **sel):
    return picture.get_viz(kind, name, sel)


def panel(picture, name="w"):
    return picture.get_target(name, {})


def tick_labels(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def overlap(texts):
    """Whether any two of the drawn texts, in reading order, overlap."""
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    boxes.sort(key=lambda box: -box.y1)
    return any(above.y0 < below.y1 - 0.5 for above, below in pairwise(boxes))


def test_inclusion_points_bars_and_labels():
    data = chains(5)
    picture = plots.plot_inclusion(data)
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
    x = artist(plots.plot_inclusion(data), "mcse").get_xdata()
    assert np.nanmin(x) == 0


def test_inclusion_methods_are_overlaid():
    methods = {"Gibbs": chains(3), "PMF": variational(3)}
    picture = plots.plot_inclusion(methods, "w", reference="Gibbs")
    for method, data in methods.items():
        xy = artist(picture, "inclusion", model=method).get_offsets()
        np.testing.assert_allclose(xy[:, 0], table(data)["inclusion"].astype(float))
    gibbs, pmf = (artist(picture, "inclusion", model=name) for name in methods)
    assert (gibbs.get_offsets()[:, 1] < pmf.get_offsets()[:, 1]).all()
    assert gibbs.get_facecolor().tolist() != pmf.get_facecolor().tolist()
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gibbs", "PMF"]
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks[:, 0], gibbs.get_offsets()[:, 0])
    np.testing.assert_allclose(marks[:, 1], range(3))
    assert panel(picture).get_xlabel() == "inclusion probability (black ticks: Gibbs)"


def test_inclusion_of_several_variables_against_given_values():
    v = np.random.default_rng(2).binomial(1, 0.5, size=(4, 100, 2, 2))
    data = chains(3, v=1.0 * v, v_spike=v)
    exact = {"w": [0.0, 0.5, 1.0], "v": np.full((2, 2), 0.5)}
    picture = plots.plot_inclusion(data, reference=exact)
    assert tick_labels(panel(picture, "v")) == ["0, 0", "0, 1", "1, 0", "1, 1"]
    np.testing.assert_allclose(
        artist(picture, "inclusion", "v").get_offsets()[:, 0], v.mean((0, 1)).ravel()
    )
    np.testing.assert_allclose(artist(picture, "reference").get_offsets()[:, 0], exact["w"])
    np.testing.assert_allclose(artist(picture, "reference", "v").get_offsets()[:, 0], 0.5)


def test_inclusion_of_a_weight_without_plates():
    spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100))
    data = arviz_base.from_dict({"posterior": {"w": 1.0 * spike, "w_spike": spike}})
    picture = plots.plot_inclusion(data)
    assert artist(picture, "inclusion").get_offsets()[0, 0] == spike.mean()


@pytest.mark.parametrize("count", [100, 400])
def test_labels_of_many_weights_do_not_overlap(count):
    picture = plots.plot_inclusion({"a": chains(count), "b": chains(count, 1)})
    figure = picture.viz["figure"].item()
    figure.canvas.draw()
    labels = panel(picture).get_yticklabels()
    assert not overlap(labels)
    assert len(labels) == count if count == 100 else 100 <= len(labels) < count
    assert figure.get_size_inches()[1] <= plots.MAX_HEIGHT + 1


def test_forest_statistics():
    data = chains(4, sigma=np.random.default_rng(3).normal(size=(4, 100)))
    picture = plots.plot_forest(data, ["w", "sigma"], reference={"w": np.ones(4), "sigma": 2.0})
    draws = diagnostics.posterior(data)
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
    picture = plots.plot_forest(methods, "w", reference="Gibbs")
    for method, data in methods.items():
        point = artist(picture, "point_estimate", model=method, feature="x1").get_offsets()[0]
        assert point[0] == pytest.approx(table(data).loc["w[x1]", "mean"])
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
    picture = plots.plot_forest(data, "w")
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


def test_savefig(tmp_path):
    plots.plot_inclusion(chains(3)).savefig(tmp_path / "inclusion.png")
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
            "var_names: got None",
        ),
        ({"a": PAIR, "b": chains(3)}, None, None, "data: `w` of 'b' has the shape"),
        ({"a": PAIR}, None, "b", r"reference: got 'b', expected one of the methods \['a'\]"),
        (PAIR, "w", {"v": 1.0}, r"reference: got values of \['v'\], expected `w`"),
        (PAIR, "w", {"w": [1.0]}, r"reference: `w` has the shape \(1,\), expected \(2,\)"),
    ],
)
def test_inclusion_errors(data, var_names, reference, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_inclusion(data, var_names, reference)


@pytest.mark.usefixtures("unchecked_types")
def test_inclusion_needs_indicators_everywhere():
    dense = xr.DataTree.from_dict({"posterior": diagnostics.posterior(PAIR)[["w"]]})
    with pytest.raises(ValueError, match="expected spike-and-slab weights, of which 'b' has"):
        plots.plot_inclusion({"a": PAIR, "b": dense})


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
        plots.plot_forest(data, var_names, reference)
