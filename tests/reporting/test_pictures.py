# SPDX-License-Identifier: Apache-2.0
"""Values and labels in the pictures."""

import arviz_base
from drawn import artist, chains, edges_of, legend_of, many, of_tasks, tick_labels, variational
from matplotlib.colors import to_rgba
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")


def statistic(data, column):
    return nss.summary(data, "w", round_to=None)[column].to_numpy(float)


def bold(axes):
    return [x.get_text() for x in axes.get_yticklabels() if x.get_fontweight() == "bold"]


def test_rows_have_points_bars_and_labels(tmp_path):
    data = chains(5)
    picture = nss.plot_inclusion(data)
    xy = artist(picture, "inclusion").get_offsets()
    np.testing.assert_allclose(xy, np.stack([statistic(data, "inclusion"), range(5)], 1))
    x, y = (np.reshape(each, (5, 3)) for each in artist(picture, "mcse").get_data())
    half = 2 * statistic(data, "mcse_inclusion")
    np.testing.assert_allclose((x[1:4, 1] - x[1:4, 0]) / 2, half[1:4])
    assert np.isnan(x[[0, 4]]).all() and np.isnan(x[:, 2]).all()
    np.testing.assert_allclose(y[:, 0], range(5))
    axes = picture.get_target("w", {})
    assert tick_labels(axes) == [f"x{i}" for i in range(5)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    assert axes.get_ylabel() == "w" and axes.get_xlabel() == "inclusion probability"
    assert not picture.viz["figure"].item().legends
    picture.savefig(tmp_path / "inclusion.png")
    assert (tmp_path / "inclusion.png").stat().st_size > 1000
    rare = np.zeros((2, 100), int)
    rare[0, 50] = 1
    data = arviz_base.from_dict({"posterior": {"w": 1.0 * rare, "w_spike": rare}})
    assert np.nanmin(artist(nss.plot_inclusion(data), "mcse").get_xdata()) == 0


def test_methods_are_overlaid():
    methods = {"Gibbs": chains(3), "PMF": variational(3)}
    picture = nss.plot_inclusion(methods, "w", reference="Gibbs")
    for method, data in methods.items():
        xy = artist(picture, "inclusion", model=method).get_offsets()
        np.testing.assert_allclose(xy[:, 0], statistic(data, "inclusion"))
    gibbs, pmf = (artist(picture, "inclusion", model=name) for name in methods)
    assert (gibbs.get_offsets()[:, 1] < pmf.get_offsets()[:, 1]).all()
    assert legend_of(picture) == ["Gibbs", "PMF"]
    (legend,) = picture.viz["figure"].item().legends
    for entry, points in zip(legend.legend_handles, (gibbs, pmf), strict=True):
        assert to_rgba(entry.get_color()) == tuple(points.get_facecolor()[0])
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks, np.stack([gibbs.get_offsets()[:, 0], range(3)], 1))
    assert picture.get_target("w", {}).get_xlabel() == "inclusion probability (black ticks: Gibbs)"


def test_references_are_matched_by_their_labels():
    v = np.random.default_rng(2).binomial(1, 0.5, size=(4, 100, 2, 2))
    data = chains(3, v=1.0 * v, v_spike=v)
    given = pd.Series({"x2": 1.0, "x0": 0.0, "x1": 0.5})
    for w in (given, xr.DataArray(given.to_numpy(), {"feature": given.index}), [0.0, 0.5, 1.0]):
        picture = nss.plot_inclusion(data, reference={"w": w, "v": np.full((2, 2), 0.5)})
        marks = artist(picture, "reference").get_offsets()
        np.testing.assert_allclose(marks[:, 0], [0.0, 0.5, 1.0])
    assert tick_labels(picture.get_target("v", {})) == ["0, 0", "0, 1", "1, 0", "1, 1"]
    points = artist(picture, "inclusion", "v").get_offsets()
    np.testing.assert_allclose(points[:, 0], v.mean((0, 1)).ravel())


def test_the_most_included_and_the_largest_of_the_others():
    v = np.random.default_rng(2).binomial(1, [[0.1, 0.9], [0.5, 0.2]], size=(4, 100, 2, 2))
    methods = {
        "Gibbs": chains(6, v=1.0 * v, v_spike=v),
        "low": chains(6, v=0.0 * v, v_spike=0 * v).map_over_datasets(lambda group: 0 * group),
    }
    picture = nss.plot_inclusion(methods, reference="Gibbs", top=3)
    labels = {name: tick_labels(picture.get_target(name, {})) for name in "wv"}
    assert labels["v"] == ["0, 1", "1, 0", "1, 1", "largest of 1 others"]
    assert labels["w"] == ["x5", "x4", "x3", "largest of 3 others"]
    inclusion = statistic(methods["Gibbs"], "inclusion")
    expected = [*inclusion[[5, 4, 3]], inclusion[:3].max()]
    points = artist(picture, "inclusion", model="Gibbs").get_offsets()
    np.testing.assert_allclose(points[:, 0], expected)
    np.testing.assert_allclose(artist(picture, "reference").get_offsets()[:, 0], expected)
    assert not artist(picture, "inclusion", model="low").get_offsets()[:, 0].any()
    bars = np.reshape(artist(picture, "mcse", model="Gibbs").get_xdata(), (4, 3))
    assert np.isnan(bars[3]).all() and np.isfinite(bars[1, :2]).all()


def test_names_above_the_threshold_are_bold():
    methods = {"Gibbs": chains(6), "low": chains(6).map_over_datasets(lambda group: 0 * group)}
    picture = nss.plot_inclusion(methods, threshold=0.75)
    assert set(artist(picture, "threshold").get_xdata()) == {0.75}
    assert bold(picture.get_target("w", {})) == ["x4", "x5"]
    picture = nss.plot_inclusion(methods, top=1)
    assert bold(picture.get_target("w", {})) == ["x5", "largest of 5 others"]


HITS = [5, 700, 704, 720, 1999]
PROBS = np.full(2000, 0.02)
PROBS[HITS] = [0.9, 0.6, 0.8, 0.51, 1.0]
PROBS[1500] = 0.5


def names_in(axes):
    return {text.get_text(): text.get_position()[0] for text in axes.texts}


def test_many_weights_are_drawn_along_the_index():
    data = many(PROBS, v=[0.1, 0.9, 0.2])
    picture = nss.plot_inclusion(data)
    points = artist(picture, "inclusion").get_offsets()
    np.testing.assert_allclose(points, np.stack([np.arange(2000), PROBS], 1))
    axes = picture.get_target("w", {})
    # the names of 700 and 704 would overlap, and the latter is more probable
    assert names_in(axes) == {f"gene {i}": i for i in (5, 704, 720, 1999) if i != 720}
    assert set(artist(picture, "threshold").get_ydata()) == {0.5}
    x, y = (np.reshape(each, (-1, 3)) for each in artist(picture, "mcse").get_data())
    shown = np.isfinite(y[:, 0])
    assert np.flatnonzero(shown).tolist() == HITS[:4]  # the last has no error
    half = 2 * statistic(data, "mcse_inclusion")[HITS[:4]]
    np.testing.assert_allclose((y[shown, 1] - y[shown, 0]) / 2, half)
    np.testing.assert_array_equal(x[:, 0], range(2000))
    assert axes.get_xlabel() == "index of gene"
    assert axes.get_ylabel() == "inclusion probability\nof w"
    other = picture.get_target("v", {})
    np.testing.assert_allclose(
        artist(picture, "inclusion", "v").get_offsets(), [[0, 0.1], [1, 0.9], [2, 0.2]]
    )
    assert axes.get_xlim()[1] > 1999 and other.get_xlim()[1] < 3
    assert other.get_xlabel() == "index of v_dim_0"
    nothing = nss.plot_inclusion(data, "w", threshold=1.0)
    assert not nothing.get_target("w", {}).texts


def test_weights_that_all_methods_miss_are_named():
    methods = {"Gibbs": many(PROBS), "PMF": many(np.roll(PROBS, 300))}
    truth = np.zeros(2000)
    truth[42] = 1
    picture = nss.plot_inclusion(methods, reference={"w": truth})
    assert {5, 42, 299, 704, 1004, 1999} <= set(names_in(picture.get_target("w", {})).values())
    gibbs, pmf = (artist(picture, "inclusion", model=name).get_offsets() for name in methods)
    assert (gibbs[:, 0] < range(2000)).all() and (pmf[:, 0] > range(2000)).all()
    np.testing.assert_allclose(pmf[:, 1], np.roll(PROBS, 300))
    marks = np.ma.filled(artist(picture, "reference").get_offsets(), np.nan)
    marked = np.flatnonzero(np.isfinite(marks[:, 1]))
    assert sorted({*HITS, 42, *((np.array(HITS) + 300) % 2000)}) == marked.tolist()
    assert marks[42, 1] == 1 and marks[5, 1] == 0
    assert picture.get_target("w", {}).get_xlabel() == "index of gene (black ticks: reference)"
    assert legend_of(picture) == ["Gibbs", "PMF"]


@pytest.mark.parametrize("count", [5, 300])
def test_dollars_in_names_are_no_mathematics(count):
    labels = [f"price $ (adj_$) {k}" for k in range(count)]
    data = chains(count).map_over_datasets(lambda group: group.assign_coords(feature=labels))
    name = "price $ (a_$) 1"
    picture = nss.plot_inclusion({name: data, "b": data}, "w", reference=name)
    picture.viz["figure"].item().canvas.draw()  # mathematics with this index would raise
    axes = picture.get_target("w", {})
    texts = [text.get_text() for text in [*axes.get_yticklabels(), *axes.texts]]
    assert any("price $ (adj_$)" in text for text in texts)


def test_a_heat_map_has_tasks_by_functions():
    names = {"latent": ["growth", "b", "c"]}
    methods = {"Gibbs": of_tasks(**names), "PMF": of_tasks(1, ("sample",), **names)}
    picture = nss.plot_weights(methods)
    for method, data in methods.items():
        spike = data["posterior"]["W_spike"]
        mesh = artist(picture, "inclusion", "W", model=method)
        np.testing.assert_allclose(mesh.get_array(), spike.mean(spike.dims[:-2]))
        assert mesh.get_clim() == (0, 1)
        axes = picture.get_target("W", {"model": method})
        assert axes.get_ylim()[0] > axes.get_ylim()[1] and axes.get_title() == method
        assert [text.get_text() for text in axes.get_xticklabels()] == names["latent"]
        assert axes.get_xlabel() == "latent"
    first, _, bar = picture.viz["figure"].item().axes
    assert tick_labels(first) == ["0", "1", "2"] and first.get_ylabel() == "task"
    assert bar.get_ylabel() == "inclusion probability"
    spike = np.random.default_rng(0).binomial(1, 0.5, size=(5, 2000, 3))
    data = {"posterior": {"W": 2.0 * spike, "W_spike": spike}}
    picture = nss.plot_weights(arviz_base.from_dict(data, sample_dims=["sample"]))
    assert picture.viz["figure"].item().get_size_inches()[1] < 33
    assert 50 < len(tick_labels(picture.get_target("W", {"model": "posterior"}))) < 220


X = np.arange(6.0)
Y = np.stack([X, -X], axis=1)
OBSERVED = np.array([[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1]], bool).T


def shaded(picture, task):
    paths = artist(picture, "missing", "fit", task=task).get_paths()
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in paths]


def line(picture, kind="mean", **sel):
    return np.array(artist(picture, kind, "fit", **sel).get_data())


def test_fit_of_means_and_variances():
    order = np.array([3, 0, 5, 1, 4, 2])  # points are sorted
    variance = 0.1 + 0.2 * np.arange(12.0).reshape(6, 2)
    given = (Y + 0.5)[order], variance[order]
    picture = nss.plot_fit(given, X[order], Y[order], OBSERVED[order], reference=(Y - 0.5)[order])
    assert arviz_base.rcParams["stats.ci_prob"] == 0.89
    half = 1.5982 * np.sqrt(variance)  # of the 89% interval of a Gaussian
    for q in (0, 1):
        np.testing.assert_allclose(line(picture, task=q, model="fit"), [X, Y[:, q] + 0.5])
        _, ends = edges_of(artist(picture, "band", "fit", task=q, model="fit"))
        np.testing.assert_allclose(ends, Y[:, q] + 0.5 + [-half[:, q], half[:, q]], atol=1e-3)
        np.testing.assert_allclose(line(picture, "reference", task=q), [X, Y[:, q] - 0.5])
        for kind, which in (("observed", OBSERVED), ("held out", ~OBSERVED)):
            xy = np.ma.filled(artist(picture, kind, "fit", task=q).get_offsets(), np.nan)
            np.testing.assert_allclose(xy[:, 1], np.where(which[:, q], Y[:, q], np.nan))
        assert picture.get_target("fit", {"task": q}).get_title() == f"task {q}"
    assert shaded(picture, 0) == [(1.5, 3.5), (4.5, 5.0)] and shaded(picture, 1) == []
    assert legend_of(picture) == ["fit", "reference", "observed", "missing", "held out"]
    one = nss.plot_fit((Y, variance), X, Y, OBSERVED, tasks=[1])
    assert legend_of(one) == ["fit", "observed"]
    assert nss.plot_fit((X, X**2), X, X).viz["mean"]["fit"].sizes == {"model": 1, "task": 1}


@pytest.mark.parametrize("dims", [["point", "task"], ["task", "point"]])
@pytest.mark.parametrize(
    "names", [["low", "high"], [2000, 2001], [*pd.to_datetime(["2000-01-01", "2001-01-01"])]]
)
def test_tasks_are_found_by_their_names(dims, names):
    values = {names[0]: np.arange(2.0), names[1]: 10 + np.arange(2.0)}
    mean = np.stack([values[name] for name in names], axis=dims.index("task"))
    draws = np.tile(mean, (2, 30, 1, 1))
    data = arviz_base.from_dict(
        {"posterior": {"f": draws}}, dims={"f": dims}, coords={"task": names}
    )
    table, reference = (pd.DataFrame({k: values[k] for k in x}) for x in (names[::-1], names))
    picture = nss.plot_fit(data, np.arange(2.0), table, reference > 9.5, reference=reference)
    for name in names:
        for drawn in (line(picture, task=name, model="fit"), line(picture, "reference", task=name)):
            np.testing.assert_allclose(drawn[1], values[name])
        seen = artist(picture, "observed", "fit", task=name).get_offsets()[:, 1]
        assert np.ma.getmaskarray(seen).tolist() == [name == names[0]] * 2


@pytest.mark.parametrize(
    "coords", [{"task": [1, 2]}, {"point": [0.0, 1.0]}, {"task": ["a", "b"], "point": [1, 0]}]
)
def test_an_array_is_in_the_order_of_the_fit(coords):
    values = np.arange(4.0).reshape(2, 2)
    data = arviz_base.from_dict(
        {"posterior": {"f": np.tile(values, (2, 10, 1, 1))}},
        dims={"f": ["point", "task"]},
        coords=coords,
    )
    picture = nss.plot_fit(data, np.arange(2.0), values)
    for q in range(2):
        np.testing.assert_array_equal(line(picture, task=q, model="fit")[1], values[:, q])


def test_fits_of_several_methods_at_new_inputs():
    Y3 = np.ma.masked_equal(np.concatenate([Y, Y[:, :1]], axis=1)[::-1], 4.0)
    table = pd.DataFrame(Y3.filled(np.nan), columns=["liver", "spleen", "heart"])
    data, X_new = of_tasks(), np.array([[2.5], [0.0], [7.0], [1.0]])
    methods = {"draws": data, "pair": (np.zeros((4, 3)), np.ones((4, 3)))}
    picture = nss.plot_fit(methods, X[::-1], table, X_new=X_new, tasks=["heart", "liver"])
    assert picture.viz["mean"]["fit"]["task"].values.tolist() == ["heart", "liver"]
    order = X_new[:, 0].argsort()
    mean = data["posterior"]["f"].mean(["chain", "draw"]).values[order]
    for task, q in (("heart", 2), ("liver", 0)):
        drawn = line(picture, task=task, model="draws")
        np.testing.assert_allclose(drawn, [X_new[order, 0], mean[:, q]])
        assert not line(picture, task=task, model="pair")[1].any()
        assert shaded(picture, task) == [(3.5, 4.5)]
    assert "held out" not in picture.viz
    observed = nss.plot_fit(data, X[::-1], Y3, X_new=X_new, var_name="Y")
    assert shaded(observed, 2) == [(3.5, 4.5)]  # masked is missing
    _, ends = edges_of(artist(observed, "band", "fit", task=2, model="fit"))
    draws = data["posterior_predictive"]["Y"].values.reshape(100, 4, 3)[:, order, 2]
    np.testing.assert_allclose(ends[1], np.quantile(draws, 0.945, axis=0), rtol=1e-6)


def test_latent_functions_with_bands():
    places = np.array([3.0, 0.0, 1.0, 2.0])
    data = of_tasks(latent=["a", "b", "c"])
    picture = nss.plot_latent_functions(data, places[:, None])
    phi = data["posterior"]["phi"].values.reshape(100, 3, 4)[:, :, places.argsort()]
    tail = (1 - arviz_base.rcParams["stats.ci_prob"]) / 2
    for m, label in enumerate("abc"):
        x, y = artist(picture, "mean", "phi", latent=label, model="posterior").get_data()
        np.testing.assert_allclose([x, y], [range(4), phi[:, m].mean(0)])
        _, ends = edges_of(artist(picture, "band", "phi", latent=label, model="posterior"))
        np.testing.assert_allclose(ends, np.quantile(phi[:, m], [tail, 1 - tail], axis=0))
        assert picture.get_target("phi", {"latent": label}).get_title() == f"latent {label}"


def test_active_functions_of_several_methods():
    points = {"point": [0.5, 1.0, 1.5, 9.0]}
    methods = {"Gibbs": of_tasks(**points), "PMF": of_tasks(1, ("sample",), **points)}
    picture = nss.plot_latent_functions(methods, active_only=True)
    assert picture.viz["mean"]["phi"]["latent"].values.tolist() == [0, 1]
    for method, data in methods.items():
        phi = data["posterior"]["phi"].sel(latent=0)
        drawn = artist(picture, "mean", "phi", latent=0, model=method).get_data()
        np.testing.assert_allclose(drawn, [points["point"], phi.mean(phi.dims[:-1])])
    assert legend_of(picture) == ["Gibbs", "PMF"]
