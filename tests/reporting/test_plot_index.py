# SPDX-License-Identifier: Apache-2.0
"""Inclusion probabilities of many weights, along the index."""

from itertools import pairwise

import arviz_base
from drawn import artist, panel
import numpy as np
import pytest

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import inclusion_index as index

pytestmark = pytest.mark.filterwarnings("error")

DRAWS = 100


def many(probs, seed=0, **others):
    """One chain, in which the inclusion probabilities are these hundredths, shuffled in time."""
    rng = np.random.default_rng(seed)
    draws = {}
    for name, p in {"w": probs, **others}.items():
        spike = np.arange(DRAWS)[:, None] < np.round(DRAWS * np.asarray(p))
        spike = rng.permuted(spike, axis=0)[None].astype(int)
        draws |= {name: 2.0 * spike, f"{name}_spike": spike}
    return arviz_base.from_dict(
        {"posterior": draws},
        dims={"w": ["gene"]},
        coords={"gene": [f"gene {i}" for i in range(len(probs))]},
    )


def few_hits(count=2000):
    probs = np.full(count, 0.02)
    probs[[5, 700, 701, 702, count - 1]] = [0.9, 0.6, 0.8, 0.51, 1.0]
    probs[1500] = 0.5
    return probs


HITS = [5, 700, 701, 702, 1999]


def names_in(axes):
    return {text.get_text(): text for text in axes.texts}


def test_many_weights_stand_along_the_index():
    picture = nss.plot_inclusion(many(few_hits()))
    points = artist(picture, "inclusion").get_offsets()
    np.testing.assert_allclose(points, np.stack([np.arange(2000), few_hits()], 1))
    axes = panel(picture)
    assert list(names_in(axes)) == [f"gene {i}" for i in HITS]
    assert set(artist(picture, "threshold").get_ydata()) == {0.5}
    np.testing.assert_allclose(
        artist(picture, "hits").get_offsets(), np.stack([HITS, few_hits()[HITS]], 1)
    )
    assert axes.get_xlabel() == "index of gene"
    assert axes.get_ylabel() == "inclusion probability\nof w"
    assert len(axes.get_xticks()) < 15 and axes.get_xlim()[0] < 0 and axes.get_xlim()[1] > 1999
    assert not picture.viz["figure"].item().legends
    assert picture.viz["figure"].item().get_size_inches()[1] < 5


def test_names_do_not_overlap_and_lead_to_their_points():
    picture = nss.plot_inclusion(many(few_hits()))
    figure, axes = picture.viz["figure"].item(), panel(picture)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in names_in(axes).values()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert all(figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert all(box.y0 > axes.bbox.y1 for box in boxes)
    inches = axes.bbox.size / figure.dpi
    np.testing.assert_allclose(inches, index.PANEL, rtol=0.1)
    leaders = artist(picture, "leader").get_xydata().reshape(-1, 4, 2)
    for at, leader, box in zip(HITS, leaders, boxes, strict=True):
        np.testing.assert_allclose(leader[0], [at, few_hits()[at]])
        end = axes.transData.transform(leader[2])
        assert box.x0 < end[0] < box.x1 and end[1] < box.y0


def test_bars_of_weights_above_the_threshold():
    data = many(few_hits())
    x, y = artist(nss.plot_inclusion(data), "mcse").get_data()
    x, y = np.reshape(x, (-1, 3)), np.reshape(y, (-1, 3))
    np.testing.assert_array_equal(x, np.repeat(HITS, 3).reshape(-1, 3))
    rows = nss.summary(data, "w", round_to=None).iloc[HITS]
    half = 2 * rows["mcse_inclusion"].to_numpy(float)
    np.testing.assert_allclose((y[1:4, 1] - y[1:4, 0]) / 2, half[1:4])
    assert np.isnan(y[4]).all()


def test_methods_stand_beside_each_other_and_what_they_miss_is_named():
    methods = {"Gibbs": many(few_hits()), "PMF": many(np.roll(few_hits(), 300))}
    truth = np.zeros(2000)
    truth[42] = 1
    picture = nss.plot_inclusion(methods, reference={"w": truth})
    found = sorted([*HITS, 42, *((np.array(HITS) + 300) % 2000)])
    assert list(names_in(panel(picture))) == [f"gene {i}" for i in found]
    gibbs, pmf = (artist(picture, "hits", model=name).get_offsets() for name in methods)
    assert (gibbs[:, 0] < found).all() and (found < pmf[:, 0]).all()
    np.testing.assert_allclose(gibbs[:, 1], few_hits()[found])
    np.testing.assert_allclose(pmf[:, 1], np.roll(few_hits(), 300)[found])
    marks = artist(picture, "reference").get_offsets()
    np.testing.assert_allclose(marks, np.stack([found, truth[found]], 1))
    assert panel(picture).get_xlabel() == "index of gene (black ticks: reference)"
    (legend,) = picture.viz["figure"].item().legends
    assert [text.get_text() for text in legend.get_texts()] == ["Gibbs", "PMF"]


def test_the_highest_are_named_where_there_is_no_room_for_all():
    probs = np.round(np.random.default_rng(1).uniform(size=400), 2)
    picture = nss.plot_inclusion(many(probs), threshold=0.6)
    axes = panel(picture)
    above = (probs > 0.6).sum()
    assert above > index.ROOM == len(names_in(axes))
    named = [int(label.split()[1]) for label in names_in(axes)]
    others = np.setdiff1d(np.arange(400), named)
    assert named == sorted(named) and probs[named].min() >= probs[others].max()
    assert axes.get_xlabel() == (
        f"index of gene; {above - index.ROOM} more above the line have no room for a name"
    )
    picture.viz["figure"].item().canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert axes.bbox.x0 < boxes[0].x1 and boxes[-1].x0 < axes.bbox.x1


def test_each_variable_has_a_panel_of_its_own_length():
    picture = nss.plot_inclusion(many(few_hits(), v=[0.1, 0.9, 0.2]), threshold=0.95)
    assert list(names_in(panel(picture))) == ["gene 1999"] and not panel(picture, "v").texts
    points = artist(picture, "inclusion", "v").get_offsets()
    np.testing.assert_allclose(points, [[0, 0.1], [1, 0.9], [2, 0.2]])
    assert panel(picture).get_xlim()[1] > 1999
    assert panel(picture, "v").get_xlim()[1] < 3 and panel(picture, "v").get_ylim()[0] > -0.1
    assert panel(picture, "v").get_xlabel() == "index of v_dim_0"


def test_a_weight_without_plates_beside_many():
    data = many(few_hits())
    rare = (np.arange(DRAWS) < 30)[None].astype(int)
    draws = {"b": 1.0 * rare, "b_spike": rare}
    data["posterior"] = (
        data["posterior"]
        .to_dataset()
        .assign({name: (("chain", "draw"), each) for name, each in draws.items()})
    )
    picture = nss.plot_inclusion(data)
    np.testing.assert_allclose(artist(picture, "inclusion", "b").get_offsets(), [[0, 0.3]])
    assert panel(picture, "b").get_xlabel() == "index of b"


def test_nothing_above_the_threshold():
    picture = nss.plot_inclusion(many(few_hits()), threshold=1.0)
    assert not panel(picture).texts and artist(picture, "inclusion").get_offsets().shape[0] == 2000


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0, 50, 99], [0, 50, 99]),
        ([50, 50], [45, 55]),
        ([40, 47, 80], [38.5, 48.5, 80]),
        ([0, 0, 1], [0, 10, 20]),
        ([97, 98, 99], [79, 89, 99]),
        ([], []),
    ],
)
def test_names_move_no_farther_than_they_must(places, expected):
    found = index.spread(np.array(places, int), gap=10.0, last=99)
    np.testing.assert_allclose(found, expected)
