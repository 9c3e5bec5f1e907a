# SPDX-License-Identifier: Apache-2.0
"""Heat maps of weights as they are drawn."""

from itertools import pairwise

import arviz_base
from drawn import artist, chains, of_tasks, overlap, tick_labels, with_nan
import numpy as np
import pytest

import numpyro_spikeslab as nss
from numpyro_spikeslab.reporting import data as reading, pictures

pytestmark = pytest.mark.filterwarnings("error")


def test_weights_are_a_heat_map_with_means():
    methods = {"Gibbs": of_tasks(), "PMF": of_tasks(1, ("sample",))}
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


def test_cells_have_no_zeros_and_no_number_that_is_wider():
    means = np.random.default_rng(0).normal(size=(30, 10))
    special = [0.04, -0.04, 0.0, 0.06, -0.06, -10.5, -123.46, 1234.5, 99999.4, -99999.4]
    means[7] = special
    probs = np.where(np.arange(300).reshape(30, 10) % 3, 0.9, 0.2)
    probs[7] = 0.9
    spike = np.arange(10)[:, None, None] < 10 * probs
    data = arviz_base.from_dict(
        {"posterior": {"W": spike * means / probs, "W_spike": spike.astype(int)}},
        sample_dims=["sample"],
    )
    picture = nss.plot_weights(data)
    picture.viz["figure"].item().canvas.draw()
    axes = picture.get_target("W", {"model": "posterior"})
    written = {text.get_position()[::-1]: text for text in axes.texts if text.get_text()}
    texts = {at: text.get_text() for at, text in written.items()}
    row = [texts.get((7, column)) for column in range(10)]
    assert row == [None, None, None, "0.1", "-0.1", "-10.5", "-123", "1234", "99999", None]
    others = {at: f"{means[at]:.1f}" for at in map(tuple, np.argwhere(probs > 0.5)) if at[0] != 7}
    nonzero = {at: text for at, text in others.items() if float(text)}
    assert {at: text for at, text in texts.items() if at[0] != 7} == nonzero
    assert len(others) > len(nonzero) > 100
    corners = axes.transData.transform([[-0.5, 0], [0.5, 0]])
    width = corners[1, 0] - corners[0, 0]
    assert max(text.get_window_extent().width for text in written.values()) < width


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


PAIR = chains(2)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("data", "weights", "message"),
    [
        ({}, "W", "data: got {}, expected ArviZ data or a mapping"),
        (PAIR, "W", r"var_names: got \['W'\], expected one or more of"),
        (PAIR, "w", r"weights: `w` has the plates \['feature'\], expected two"),
        (of_tasks(), "phi", r"weights: got \['phi'\], expected spike-and-slab weights"),
        ({"a": of_tasks(), "b": of_tasks(latent=[1, 2, 3])}, "W", "`W` of 'b' has the coordinates"),
        (with_nan(of_tasks(), "W"), "W", "data: `W` is not finite in some draws"),
    ],
)
def test_weights_errors(data, weights, message):
    with pytest.raises(ValueError, match=message):
        nss.plot_weights(data, weights)
