# SPDX-License-Identifier: Apache-2.0
"""Values and labels in the pictures."""

import arviz_base
import numpy as np
import pandas as pd
import pytest
from truth.known_draws import (
    chains,
    edges_of,
    labelled,
    legend_of,
    many,
    of_tasks,
    pair,
    points_and_bars,
    tick_labels,
    ticks,
    variational,
)
import xarray as xr

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")


def statistic(data, column):
    return nss.summary(data, "w", round_to=None)[column].to_numpy(float)


def bold(axes):
    return [x.get_text() for x in axes.get_yticklabels() if x.get_fontweight() == "bold"]


def test_rows_have_points_bars_and_labels():
    data = chains(5)
    picture = nss.plot_inclusion(data)
    axes = picture.get_target("w", {})
    points, bars = points_and_bars(axes)
    np.testing.assert_allclose(points, np.stack([statistic(data, "inclusion"), range(5)], 1))
    half = 2 * statistic(data, "mcse_inclusion")[1:4]
    np.testing.assert_allclose(np.diff(bars[1:4, :, 0])[:, 0] / 2, half)
    assert np.isnan(bars[[0, 4], :, 0]).all()
    assert tick_labels(axes) == [f"x{i}" for i in range(5)]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first on top
    assert axes.get_ylabel() == "w" and axes.get_xlabel() == "inclusion probability"
    assert not picture.viz["figure"].item().legends
    rare = np.zeros((2, 100, 1), int)
    rare[0, 50] = 1
    _, bars = points_and_bars(nss.plot_inclusion(pair(rare)).get_target("w", {}))
    assert bars.min() == 0


def test_methods_are_overlaid():
    methods = {"Gibbs": chains(3), "PMF": variational(3)}
    picture = nss.plot_inclusion(methods, "w", reference="Gibbs")
    axes = picture.get_target("w", {})
    (gibbs, _), (pmf, _) = points_and_bars(axes, 0), points_and_bars(axes, 1)
    for points, data in zip((gibbs, pmf), methods.values(), strict=True):
        np.testing.assert_allclose(points[:, 0], statistic(data, "inclusion"))
    assert (gibbs[:, 1] < pmf[:, 1]).all()
    assert legend_of(picture) == list(labelled(axes)) == ["Gibbs", "PMF"]
    np.testing.assert_allclose(ticks(axes), np.stack([gibbs[:, 0], range(3)], 1))
    assert axes.get_xlabel() == "inclusion probability (black ticks: Gibbs)"


def test_references_are_matched_by_their_labels():
    series = pd.Series({"x2": 1.0, "x0": 0.0, "x1": 0.5})
    for w in (series, xr.DataArray(series.to_numpy(), {"feature": series.index}), [0.0, 0.5, 1.0]):
        picture = nss.plot_inclusion(chains(3), reference={"w": w})
        np.testing.assert_allclose(ticks(picture.get_target("w", {}))[:, 0], [0.0, 0.5, 1.0])


def test_the_most_included_and_the_largest_of_the_others():
    v = np.random.default_rng(2).binomial(1, [[0.1, 0.9], [0.5, 0.2]], size=(4, 100, 2, 2))
    data = chains(6, v=1.0 * v, v_spike=v)
    methods = {"Gibbs": data, "low": data.map_over_datasets(lambda group: 0 * group)}
    picture = nss.plot_inclusion(methods, reference="Gibbs", top=3)
    p = v.mean((0, 1)).ravel()
    w, v = (picture.get_target(name, {}) for name in "wv")
    assert tick_labels(v) == ["0, 1", "1, 0", "1, 1", "largest of 1 others"]
    assert tick_labels(w) == ["x5", "x4", "x3", "largest of 3 others"]
    inclusion = statistic(data, "inclusion")
    expected = [*inclusion[[5, 4, 3]], inclusion[:3].max()]
    points, bars = points_and_bars(w)
    np.testing.assert_allclose(points[:, 0], expected)
    np.testing.assert_allclose(ticks(w)[:, 0], expected)
    np.testing.assert_allclose(points_and_bars(v)[0][:, 0], [*p[[1, 2, 3]], p[0]])
    assert np.isnan(bars[3, :, 0]).all() and np.isfinite(bars[1]).all()
    assert not points_and_bars(w, 1)[0][:, 0].any()


def test_names_above_the_threshold_are_bold():
    methods = {"Gibbs": chains(6), "low": chains(6).map_over_datasets(lambda group: 0 * group)}
    axes = nss.plot_inclusion(methods, threshold=0.75).get_target("w", {})
    assert set(axes.lines[-1].get_xdata()) == {0.75}
    assert bold(axes) == ["x4", "x5"]
    picture = nss.plot_inclusion(methods, top=1)
    assert bold(picture.get_target("w", {})) == ["x5", "largest of 5 others"]


HITS = [5, 700, 704, 730, 1999]
PROBS = np.full(2000, 0.02)
PROBS[HITS] = [0.9, 0.6, 0.8, 0.51, 1.0]
PROBS[1500] = 0.5


def names_in(axes):
    return {int(text.get_position()[0]): text.get_text() for text in axes.texts}


def test_many_weights_are_drawn_along_the_index():
    data = many(PROBS, v=[0.1, 0.9, 0.2])
    picture = nss.plot_inclusion(data)
    axes, other = (picture.get_target(name, {}) for name in "wv")
    np.testing.assert_allclose(axes.lines[0].get_data(), [np.arange(2000), PROBS])
    # 700 and 730 are so near to 704, which is more probable, that their names would overlap
    assert names_in(axes) == {i: f"gene {i}" for i in (5, 704, 1999)}
    assert set(axes.lines[-1].get_ydata()) == {0.5}
    assert axes.get_xlabel() == "index of gene"
    assert axes.get_ylabel() == "inclusion probability\nof w"
    np.testing.assert_allclose(other.lines[0].get_data(), [[0, 1, 2], [0.1, 0.9, 0.2]])
    assert axes.get_xlim()[1] > 1999 and other.get_xlim()[1] < 3
    assert other.get_xlabel() == "index of v_dim_0"
    assert not nss.plot_inclusion(data, "w", threshold=1.0).get_target("w", {}).texts


def test_weights_that_all_methods_miss_are_named():
    methods = {"Gibbs": many(PROBS), "PMF": many(np.roll(PROBS, 300))}
    truth = np.zeros(2000)
    truth[42] = 1
    picture = nss.plot_inclusion(methods, reference={"w": truth})
    axes = picture.get_target("w", {})
    assert {5, 42, 299, 704, 1004, 1999} <= set(names_in(axes))
    gibbs, pmf = (line.get_xdata() for line in axes.lines[:2])
    assert (gibbs < range(2000)).all() and (pmf > range(2000)).all()
    np.testing.assert_allclose(axes.lines[1].get_ydata(), np.roll(PROBS, 300))
    marks = ticks(axes)[:, 1]
    assert marks[42] == 1 and np.flatnonzero(np.isfinite(marks)).tolist() == [42]
    assert axes.get_xlabel() == "index of gene (black ticks: reference)"
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
        axes = picture.get_target("W", {"model": method})
        np.testing.assert_allclose(axes.images[0].get_array(), spike.mean(spike.dims[:-2]))
        assert axes.images[0].get_clim() == (0, 1)
        assert axes.get_ylim()[0] > axes.get_ylim()[1] and axes.get_title() == method
        assert [text.get_text() for text in axes.get_xticklabels()] == names["latent"]
        assert axes.get_xlabel() == "latent"
    first, _, bar = picture.viz["figure"].item().axes
    assert tick_labels(first) == ["0", "1", "2"] and first.get_ylabel() == "task"
    assert bar.get_ylabel() == "inclusion probability"


def test_a_heat_map_of_many_tasks_is_not_too_high():
    spike = np.random.default_rng(0).binomial(1, 0.5, size=(5, 2000, 3))
    data = {"posterior": {"W": 2.0 * spike, "W_spike": spike}}
    picture = nss.plot_weights(arviz_base.from_dict(data, sample_dims=["sample"]))
    assert picture.viz["figure"].item().get_size_inches()[1] < 33
    assert 50 < len(tick_labels(picture.get_target("W", {"model": "posterior"}))) < 220


X = np.arange(6.0)
Y = np.stack([X, -X], axis=1)
OBSERVED = np.array([[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1]], bool).T


def line(axes, label):
    return np.array(labelled(axes)[label].get_data())


def test_fit_of_means_and_variances():
    order = np.array([3, 0, 5, 1, 4, 2])  # points are sorted
    variance = 0.1 + 0.2 * np.arange(12.0).reshape(6, 2)
    fits = {"fit": ((Y + 0.5)[order], variance[order]), "true": ((Y - 0.5)[order], 0 * Y)}
    picture = nss.plot_fit(fits, X[order], Y[order], OBSERVED[order])
    assert arviz_base.rcParams["stats.ci_prob"] == 0.89
    half = 1.5982 * np.sqrt(variance)  # of the 89% interval of a Gaussian
    for q in (0, 1):
        axes = picture.get_target("fit", {"task": q})
        np.testing.assert_allclose(line(axes, "fit"), [X, Y[:, q] + 0.5])
        _, ends = edges_of(axes.collections[0])
        np.testing.assert_allclose(ends, Y[:, q] + 0.5 + [-half[:, q], half[:, q]], atol=1e-3)
        np.testing.assert_allclose(line(axes, "true"), [X, Y[:, q] - 0.5])
        for kind, rows in (("observed", OBSERVED[:, q]), ("held out", ~OBSERVED[:, q])):
            if rows.any():
                xy = labelled(axes)[kind].get_offsets()
                assert sorted(map(tuple, xy)) == [*zip(X[rows], Y[rows, q], strict=True)]
        assert axes.get_title() == f"task {q}"
    assert legend_of(picture) == ["fit", "true", "observed", "held out"]
    one = nss.plot_fit((Y, variance), X, Y, OBSERVED, tasks=[1])
    assert legend_of(one) == ["fit", "observed"]


def fit_of(mean, *dims, **coords):
    """Draws of a fit, all of them equal."""
    draws = {"posterior": {"f": np.tile(mean, (2, 30, 1, 1))}}
    return arviz_base.from_dict(draws, dims={"f": list(dims)}, coords=coords)


@pytest.mark.parametrize("dims", [["point", "task"], ["task", "point"]])
@pytest.mark.parametrize(
    "names", [["low", "high"], [2000, 2001], [*pd.to_datetime(["2000-01-01", "2001-01-01"])]]
)
def test_tasks_are_matched_by_their_names(dims, names):
    values = {names[0]: np.arange(2.0), names[1]: 10 + np.arange(2.0)}
    mean = np.stack([values[name] for name in names], axis=dims.index("task"))
    data = fit_of(mean, *dims, task=names)
    table, other = (pd.DataFrame({k: values[k] for k in x}) for x in (names[::-1], names))
    picture = nss.plot_fit(data, np.arange(2.0), table, other > 9.5)
    for name in names:
        axes = picture.get_target("fit", {"task": name})
        np.testing.assert_allclose(line(axes, "fit")[1], values[name])
        assert len(labelled(axes)["observed"].get_offsets()) == (2 if name == names[1] else 0)


@pytest.mark.parametrize(
    "coords", [{"task": [1, 2]}, {"point": [0.0, 1.0]}, {"task": ["a", "b"], "point": [1, 0]}]
)
def test_an_array_is_in_the_order_of_the_fit(coords):
    values = np.arange(4.0).reshape(2, 2)
    picture = nss.plot_fit(fit_of(values, "point", "task", **coords), np.arange(2.0), values)
    for q in range(2):
        axes = picture.get_target("fit", {"task": q})
        np.testing.assert_array_equal(line(axes, "fit")[1], values[:, q])


def test_fits_of_several_methods_at_new_inputs():
    Y3 = np.ma.masked_equal(np.concatenate([Y, Y[:, :1]], axis=1)[::-1], 4.0)
    table = pd.DataFrame(Y3.filled(np.nan), columns=["liver", "spleen", "heart"])
    data, X_new = of_tasks(), np.array([[2.5], [0.0], [7.0], [1.0]])
    methods = {"draws": data, "pair": (np.zeros((4, 3)), np.ones((4, 3)))}
    picture = nss.plot_fit(methods, X[::-1], table, X_new=X_new, tasks=["heart", "liver"])
    order = X_new[:, 0].argsort()
    mean = data["posterior"]["f"].mean(["chain", "draw"]).values[order]
    for task, q in (("heart", 2), ("liver", 0)):
        axes = picture.get_target("fit", {"task": task})
        np.testing.assert_allclose(line(axes, "draws"), [X_new[order, 0], mean[:, q]])
        assert not line(axes, "pair")[1].any()
    titles = [axes.get_title() for axes in picture.viz["figure"].item().axes]
    assert titles == ["task heart", "task liver"] and "held out" not in legend_of(picture)
    observed = nss.plot_fit(data, X[::-1], Y3, X_new=X_new, var_name="Y")
    axes = observed.get_target("fit", {"task": 2})
    assert len(labelled(axes)["observed"].get_offsets()) == 5  # masked is missing
    draws = data["posterior_predictive"]["Y"].values.reshape(100, 4, 3)[:, order, 2]
    expected = np.quantile(draws, 0.945, axis=0)
    np.testing.assert_allclose(edges_of(axes.collections[0])[1][1], expected, rtol=1e-6)


def test_latent_functions_with_bands():
    places = np.array([3.0, 0.0, 1.0, 2.0])
    data = of_tasks(latent=["a", "b", "c"])
    picture = nss.plot_latent_functions(data, places[:, None])
    phi = data["posterior"]["phi"].values.reshape(100, 3, 4)[:, :, places.argsort()]
    tail = (1 - arviz_base.rcParams["stats.ci_prob"]) / 2
    for m, label in enumerate("abc"):
        axes = picture.get_target("phi", {"latent": label})
        np.testing.assert_allclose(line(axes, "posterior"), [range(4), phi[:, m].mean(0)])
        _, ends = edges_of(axes.collections[0])
        np.testing.assert_allclose(ends, np.quantile(phi[:, m], [tail, 1 - tail], axis=0))
        assert axes.get_title() == f"latent {label}"
    assert not picture.viz["figure"].item().legends


def test_active_functions_of_several_methods():
    points = {"point": [0.5, 1.0, 1.5, 9.0]}
    methods = {"Gibbs": of_tasks(**points), "PMF": of_tasks(1, ("sample",), **points)}
    picture = nss.plot_latent_functions(methods, active_only=True)
    titles = [axes.get_title() for axes in picture.viz["figure"].item().axes]
    assert titles == ["latent 0", "latent 1"] and legend_of(picture) == ["Gibbs", "PMF"]
    axes = picture.get_target("phi", {"latent": 0})
    for method, data in methods.items():
        phi = data["posterior"]["phi"].sel(latent=0)
        expected = [points["point"], phi.mean(phi.dims[:-1])]
        np.testing.assert_allclose(line(axes, method), expected)
