# SPDX-License-Identifier: Apache-2.0
"""Data and predictions as they are drawn."""

import arviz_base
from drawn import artist, edges_of, of_tasks
import numpy as np
import pandas as pd
import pytest

import numpyro_spikeslab as nss

pytestmark = pytest.mark.filterwarnings("error")


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


def test_a_reference_is_drawn_from_left_to_right():
    X = np.array([0.0, 3.0, 1.0, 2.0])
    Y = X[:, None] ** 2
    picture = nss.plot_fit((Y, 0.1 + 0 * Y), X, Y, reference=Y)
    drawn = artist(picture, "reference", "fit", task=0)
    np.testing.assert_array_equal(drawn.get_xdata(), [0, 1, 2, 3])
    np.testing.assert_array_equal(drawn.get_ydata(), [0, 1, 4, 9])


NAMES_OF_TASKS = {
    "strings": ["low", "high"],
    "years": [2000, 2001],
    "dates": [*pd.to_datetime(["2000-01-01", "2001-01-01"])],
}


@pytest.mark.parametrize("kind", NAMES_OF_TASKS)
@pytest.mark.parametrize("dims", [["point", "task"], ["task", "point"]])
def test_tasks_are_found_by_their_names(dims, kind):
    X = np.arange(2.0)
    names = NAMES_OF_TASKS[kind]
    values = {names[0]: X, names[1]: 10 + X}
    mean = np.stack([values[name] for name in names], axis=dims.index("task"))
    draws = mean + 0.01 * np.random.default_rng(0).normal(size=(2, 30, 2, 2))
    data = arviz_base.from_dict(
        {"posterior": {"f": draws}}, dims={"f": dims}, coords={"task": names}
    )
    Y, reference = (pd.DataFrame({k: values[k] for k in x}) for x in (names[::-1], names))
    observed = reference > 9.5
    picture = nss.plot_fit(data, X, Y, observed, reference=reference)
    for name in names:
        y = artist(picture, "mean", "fit", task=name, model="fit").get_ydata()
        np.testing.assert_allclose(y, values[name], atol=0.02)
        np.testing.assert_array_equal(
            artist(picture, "reference", "fit", task=name).get_ydata(), values[name]
        )
        seen = artist(picture, "observed", "fit", task=name).get_offsets()[:, 1]
        assert np.ma.getmaskarray(seen).tolist() == [name == names[0]] * 2


def test_tasks_of_which_some_have_other_names_are_refused():
    data = arviz_base.from_dict(
        {"posterior": {"f": np.ones((2, 10, 3, 2))}},
        dims={"f": ["point", "task"]},
        coords={"task": ["a", "b"]},
    )
    Y = pd.DataFrame(np.ones((3, 2)), columns=["b", "c"])
    with pytest.raises(
        ValueError, match=r"Y: got the columns \['c'\], expected \['a', 'b'\], the ta"
    ):
        nss.plot_fit(data, np.arange(3.0), Y)


@pytest.mark.parametrize(
    "coords", [{"task": [1, 2]}, {"point": [0.0, 1.0]}, {"task": ["a", "b"], "point": [1, 0]}]
)
def test_an_array_is_in_the_order_of_the_fit(coords):
    """Numbers name no tasks where nothing else does."""
    Y = np.arange(4.0).reshape(2, 2)
    data = arviz_base.from_dict(
        {"posterior": {"f": np.tile(Y, (2, 10, 1, 1))}},
        dims={"f": ["point", "task"]},
        coords=coords,
    )
    picture = nss.plot_fit(data, np.arange(2.0), Y)
    for q in range(2):
        y = artist(picture, "mean", "fit", task=q, model="fit").get_ydata()
        np.testing.assert_array_equal(y, Y[:, q])


def test_masked_responses_are_missing():
    X, Y, _ = fit_data()
    masked = np.ma.masked_array(Y, np.arange(Y.size).reshape(Y.shape) == 0)
    masked.data[0, 0] = 99.0
    picture = nss.plot_fit((Y, 0.1 + 0 * Y), X, masked)
    drawn = artist(picture, "observed", "fit", task=0).get_offsets()
    assert np.ma.is_masked(drawn[0]) and not np.ma.is_masked(drawn[1:])


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
    data = of_tasks()
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


FIT_X, FIT_Y, FIT_OBSERVED = fit_data()
FIT = (FIT_Y, np.ones_like(FIT_Y))


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        ({}, {}, "data: got {}, expected"),
        ({"a": 3}, {}, "data: got int without a `posterior` group"),
        (of_tasks(), {"var_name": "g"}, "var_name: 'fit' has no `g` in the groups"),
        (of_tasks(), {}, r"data: the fit 'fit' has the shape \(4, 3\), expected \(6, 2\).*X_new"),
        ({"a": FIT, "b": (FIT_Y[:2], FIT_Y[:2] ** 2)}, {}, r"the fit 'b' has the shape \(2, 2\)"),
        (FIT, {"X": FIT_Y}, r"X: got inputs of shape \(6, 2\)"),
        (
            FIT,
            {"observed": FIT_OBSERVED[:, 0]},
            r"observed: got the shape \(6,\), expected \(6, 2\)",
        ),
        (FIT, {"observed": FIT_OBSERVED.T}, r"observed: got the shape \(2, 6\)"),
        (FIT, {"tasks": [0, 5]}, r"tasks: got \[0, 5\], expected one or more of \[0, 1\]"),
        (FIT, {"tasks": [1, 1]}, r"tasks: got \[1, 1\] of \[0, 1\], expected each name once"),
        (FIT, {"Y": pd.DataFrame(FIT_Y, columns=["a", "a"])}, "tasks: .* rename the columns of Y"),
        ((FIT_Y, -FIT[1]), {}, "data: the fit 'fit' has a variance of -1, expected at least 0"),
        (
            2 * (np.ones((6, 41)),),
            {"Y": np.ones((6, 41))},
            "a panel for each task would be 41, expected at most 40; draw some",
        ),
        (FIT, {"tasks": []}, r"tasks: got \[\]"),
        (FIT, {"reference": FIT_X}, r"reference: got the shape \(6,\), expected \(6, 2\)"),
    ],
)
def test_fit_errors(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_fit(data, **{"X": FIT_X, "Y": FIT_Y} | arguments)
