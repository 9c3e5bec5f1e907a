# SPDX-License-Identifier: Apache-2.0
"""What the pictures show, read back from their artists."""

from itertools import pairwise

import arviz_base
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, pictures

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
    draws = reading.posterior(chains(count, seed)).stack(sample=["chain", "draw"])
    draws = draws.drop_vars(["sample", "chain", "draw"]).transpose("sample", ...)
    return xr.DataTree.from_dict({"posterior": draws})


def table(data):
    return nss.summary(data, "w", round_to=None)


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
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks[:, 0], gibbs.get_offsets()[:, 0])
    np.testing.assert_allclose(marks[:, 1], range(3))
    assert panel(picture).get_xlabel() == "inclusion probability (black ticks: Gibbs)"


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


def test_inclusion_of_a_weight_without_plates():
    spike = np.random.default_rng(0).binomial(1, 0.5, size=(4, 100))
    data = arviz_base.from_dict({"posterior": {"w": 1.0 * spike, "w_spike": spike}})
    picture = nss.plot_inclusion(data)
    assert artist(picture, "inclusion").get_offsets()[0, 0] == spike.mean()


@pytest.mark.parametrize("count", [100, 400])
def test_labels_of_many_weights_do_not_overlap(count):
    picture = nss.plot_inclusion({"a": chains(count), "b": chains(count, 1)})
    figure = picture.viz["figure"].item()
    figure.canvas.draw()
    labels = panel(picture).get_yticklabels()
    assert not overlap(labels)
    assert len(labels) == count if count == 100 else 100 <= len(labels) < count
    assert figure.get_size_inches()[1] <= pictures.MAX_HEIGHT + 1


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
        nss.plot_inclusion(data, var_names, reference)


@pytest.mark.usefixtures("unchecked_types")
def test_inclusion_needs_indicators_everywhere():
    dense = xr.DataTree.from_dict({"posterior": reading.posterior(PAIR)[["w"]]})
    with pytest.raises(ValueError, match="expected spike-and-slab weights, of which 'b' has"):
        nss.plot_inclusion({"a": PAIR, "b": dense})


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


def mixture(seed=0, dims=("chain", "draw"), **coords):
    """Draws of three tasks on three functions, of which the last is not used, at four points."""
    rng = np.random.default_rng(seed)
    shape = (2, 50)[: len(dims)]
    p = np.array([[1.0, 0.2, 0.0], [0.9, 0.8, 0.0], [0.0, 0.55, 0.1]])
    spike = rng.binomial(1, p, size=(*shape, 3, 3))
    W = spike * rng.normal(2.0, 0.1, size=spike.shape)
    phi = rng.normal(size=(*shape, 3, 4))
    noise = 0.1 * rng.normal(size=(*shape, 4, 3))
    fit = np.swapaxes(W @ phi, -1, -2)
    draws = {"W": W, "W_spike": spike, "phi": phi, "f": fit}
    names = {
        "W": ["task", "latent"],
        "W_spike": ["task", "latent"],
        "phi": ["latent", "point"],
        "f": ["point", "task"],
        "Y": ["point", "task"],
    }
    return arviz_base.from_dict(
        {"posterior": draws, "posterior_predictive": {"Y": fit + noise}},
        dims=names,
        coords=coords,
        sample_dims=list(dims),
    )


def test_weights_are_a_heat_map_with_means():
    methods = {"Gibbs": mixture(), "PMF": mixture(1, ("sample",))}
    picture = nss.plot_weights(methods)
    for method, data in methods.items():
        draws = data["posterior"].to_dataset()
        dims = reading.sample_dims(draws)
        probs, mean = (draws[name].mean(dims).values for name in ("W_spike", "W"))
        mesh = artist(picture, "inclusion", "W", model=method)
        np.testing.assert_allclose(mesh.get_array(), probs)
        assert mesh.get_clim() == (0, 1)
        axes = picture.get_target("W", {"model": method})
        written = {text.get_position()[::-1]: text.get_text() for text in axes.texts}
        assert written == {(q, m): f"{mean[q, m]:.1f}" for q, m in np.argwhere(probs > 0.5)}
        assert axes.get_ylim()[0] > axes.get_ylim()[1] and axes.get_title() == method
        assert axes.get_xlabel() == "latent"
    first, _, bar = picture.viz["figure"].item().axes
    assert tick_labels(first) == ["0", "1", "2"] and first.get_ylabel() == "task"
    assert bar.get_ylabel() == "inclusion probability"


def test_weights_of_many_tasks():
    spike = np.random.default_rng(0).binomial(1, 0.5, size=(5, 2000, 3))
    data = arviz_base.from_dict(
        {"posterior": {"W": 2.0 * spike, "W_spike": spike}},
        sample_dims=["sample"],
        dims={"W": ["gene", "factor"]},
        coords={"factor": ["growth factor", "other factor", "third factor"]},
    )
    picture = nss.plot_weights(data)
    figure = picture.viz["figure"].item()
    figure.canvas.draw()
    axes = picture.get_target("W", {"model": "posterior"})
    assert figure.get_size_inches()[1] < pictures.MAX_HEIGHT + 3
    assert not axes.texts and not axes.get_title()
    assert 50 < len(axes.get_yticklabels()) < 100 and not overlap(axes.get_yticklabels())
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def edges_of(band):
    """Lower and upper edge of a band between curves, from left to right."""
    vertices = np.unique(band.get_paths()[0].vertices, axis=0)
    places = np.unique(vertices[:, 0])
    ends = [vertices[vertices[:, 0] == place, 1] for place in places]
    return places, np.array([[end.min(), end.max()] for end in ends]).T


def test_latent_functions_are_means_and_bands():
    X = np.array([3.0, 0.0, 1.0, 2.0])
    data = mixture(latent=["a", "b", "c"])
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
    methods = {"Gibbs": mixture(**points), "PMF": mixture(1, ("sample",), **points)}
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


def fit_data():
    """Inputs, two tasks, and which of their responses have been observed."""
    X = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    Y = np.stack([X, -X], axis=1)
    observed = np.array([[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1]], bool).T
    return X, Y, observed


def shaded(picture, task):
    paths = artist(picture, "missing", "fit", task=task).get_paths()
    return [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in paths]


def test_fit_of_means_and_variances():
    X, Y, observed = fit_data()
    variance = 0.1 + 0.2 * np.arange(12.0).reshape(6, 2)
    picture = nss.plot_fit((Y + 0.5, variance), X, Y, observed, reference=Y - 0.5)
    half = 1.5982 * np.sqrt(variance)  # of the 89% interval of a Gaussian
    assert arviz_base.rcParams["stats.ci_prob"] == 0.89
    for q in (0, 1):
        x, y = artist(picture, "mean", "fit", task=q, model="fit").get_data()
        np.testing.assert_allclose([x, y], [X, Y[:, q] + 0.5])
        _, ends = edges_of(artist(picture, "band", "fit", task=q, model="fit"))
        np.testing.assert_allclose(ends, Y[:, q] + 0.5 + [-half[:, q], half[:, q]], atol=1e-3)
        known = artist(picture, "reference", "fit", task=q)
        np.testing.assert_allclose(known.get_ydata(), Y[:, q] - 0.5)
        for kind, which in (("observed", observed), ("held out", ~observed)):
            xy = artist(picture, kind, "fit", task=q).get_offsets()
            drawn = np.where(which[:, q, None], np.stack([X, Y[:, q]], axis=1), np.nan)
            np.testing.assert_allclose(np.ma.filled(xy, np.nan)[:, 1], drawn[:, 1])
        assert picture.get_target("fit", {"task": q}).get_title() == f"task {q}"
    assert shaded(picture, 0) == [(1.5, 3.5), (4.5, 5.0)] and shaded(picture, 1) == []
    one = nss.plot_fit((Y, variance), X, Y, observed, tasks=[1])
    assert set(one.viz.children) >= {"observed"} and "missing" not in one.viz.children
    (legend,) = picture.viz["figure"].item().legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["fit", "reference", "observed", "missing", "held out"]


def test_fit_without_missing_responses():
    X, Y, _ = fit_data()
    picture = nss.plot_fit((Y[:, 0], Y[:, 0] ** 2), X, Y[:, 0])
    assert picture.viz["mean"]["fit"].sizes == {"model": 1, "task": 1}
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["fit", "observed"]


def test_fit_of_several_methods_at_new_inputs():
    X, Y, _ = fit_data()
    X, Y = X[::-1], np.concatenate([Y, Y[:, :1]], axis=1)[::-1].copy()
    Y[1, 0] = np.nan
    table = pd.DataFrame(Y, columns=["liver", "spleen", "heart"])
    data = mixture()
    X_new = np.array([[2.5], [0.0], [7.0], [1.0]])
    pair = (np.zeros((4, 3)), np.ones((4, 3)))
    methods = {"draws": data, "pair": pair}
    picture = nss.plot_fit(methods, X, table, X_new=X_new, tasks=["heart", "liver"])
    assert picture.viz["mean"]["fit"]["task"].values.tolist() == ["heart", "liver"]
    order = X_new[:, 0].argsort()
    fit = data["posterior"]["f"].mean(["chain", "draw"]).values[order]
    for task, q in (("heart", 2), ("liver", 0)):
        line = artist(picture, "mean", "fit", task=task, model="draws")
        np.testing.assert_allclose(line.get_data(), [X_new[order, 0], fit[:, q]])
        assert not artist(picture, "mean", "fit", task=task, model="pair").get_ydata().any()
    assert shaded(picture, "liver") == [(3.5, 4.5)] and shaded(picture, "heart") == []
    assert "held out" not in picture.viz
    observed = nss.plot_fit(data, X, table, X_new=X_new, var_name="Y")
    wide, narrow = (
        edges_of(artist(each, "band", "fit", task="heart", model=model))[1]
        for each, model in ((observed, "fit"), (picture, "draws"))
    )
    expected = np.quantile(
        data["posterior_predictive"]["Y"].values.reshape(100, 4, 3)[:, order, 2], 0.945, axis=0
    )
    np.testing.assert_allclose(wide[1], expected, rtol=1e-6)
    assert not np.allclose(wide, narrow)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "weights", "message"),
    [
        ({}, "W", "data: got {}, expected ArviZ data or a mapping"),
        (PAIR, "W", r"var_names: got \['W'\], expected one or more of"),
        (PAIR, "w", r"weights: `w` has the plates \['feature'\], expected two"),
        (mixture(), "phi", r"weights: got \['phi'\], expected spike-and-slab weights"),
        ({"a": mixture(), "b": mixture(latent=[1, 2, 3])}, "W", "`W` of 'b' has the coordinates"),
    ],
)
def test_weights_errors(data, weights, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_weights(data, weights)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        (PAIR, {}, "weights: got 'W', expected one of"),
        (mixture(), {"functions": "W_spike"}, "expected one plate in common"),
        (mixture(), {"X": np.zeros((4, 2))}, r"X: got inputs of shape \(4, 2\) .* such as X"),
        (mixture(point=list("abcd")), {}, r"X: got labels of shape \(4,\) and type <U1"),
        (
            mixture().isel(latent=[2]),
            {"active_only": True},
            "active_only: no weight is more often in than out",
        ),
        ({"a": mixture(), "b": mixture().isel(point=[0])}, {}, "data: `phi` of 'b' has the shape"),
    ],
)
def test_latent_functions_errors(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_latent_functions(data, **arguments)


FIT_X, FIT_Y, FIT_OBSERVED = fit_data()
FIT = (FIT_Y, np.ones_like(FIT_Y))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        ({}, {}, "data: got {}, expected"),
        ({"a": 3}, {}, "data: got int without a `posterior` group"),
        (mixture(), {"var_name": "g"}, "var_name: 'fit' has no `g` in the groups"),
        (mixture(), {}, r"data: the fit 'fit' has the shape \(4, 3\), expected \(6, 2\).*X_new"),
        ({"a": FIT, "b": (FIT_Y[:2], FIT_Y[:2] ** 2)}, {}, r"the fit 'b' has the shape \(2, 2\)"),
        (FIT, {"X": FIT_Y}, r"X: got inputs of shape \(6, 2\)"),
        (
            FIT,
            {"observed": FIT_OBSERVED[:, 0]},
            r"observed: got the shape \(6,\), expected \(6, 2\)",
        ),
        (FIT, {"observed": FIT_OBSERVED.T}, r"observed: got the shape \(2, 6\)"),
        (FIT, {"tasks": [0, 5]}, r"tasks: got \[0, 5\], expected one or more of \[0, 1\]"),
        (FIT, {"tasks": []}, r"tasks: got \[\]"),
        (FIT, {"reference": FIT_X}, r"reference: got the shape \(6,\), expected \(6, 2\)"),
    ],
)
def test_fit_errors(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_fit(data, **{"X": FIT_X, "Y": FIT_Y} | arguments)
