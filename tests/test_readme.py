# SPDX-License-Identifier: Apache-2.0
"""The blocks of the README and of pages of the documentation, each page as one script, in NumPyro's
default precision and without warnings."""

from contextlib import chdir
from pathlib import Path
import re
from typing import Any

import numpy as np
import pytest

import jax

README = Path(__file__).parent.parent / "README.md"
START = README.parent / "docs" / "start.md"
HOW_TO = README.parent / "docs" / "how_to.md"
LIKELIHOODS = README.parent / "docs" / "likelihoods.md"
# stricter than the other tests, which may end a fit while its bound still moves
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error")]


def blocks(page: Path) -> list[str]:
    """The Python blocks, in order, each at its line of the file for error messages."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def run_script(page: Path, folder: Path) -> dict[str, Any]:
    """Return the variables of the script."""
    names: dict[str, Any] = {"__name__": "readme"}
    with chdir(folder):
        for block in blocks(page):
            exec(compile(block, str(page), "exec"), names)
    return names


# one test: processes that share tests would each run the script
def test_the_script_finds_what_is_there(tmp_path):
    assert not jax.config.jax_enable_x64
    names = run_script(README, tmp_path)
    assert (tmp_path / "inclusion.png").stat().st_size > 10_000
    used = np.isin(np.arange(20), [3, 7])
    spikes = names["chains"]["posterior"]["w_spike"].mean(["chain", "draw"]).values
    for inclusion in (spikes, names["guide"].inclusion_probabilities(names["result"].params)["w"]):
        assert np.all(inclusion[used] > 0.99) and np.all(inclusion[~used] < 0.1)
    means = names["guide"].posterior_mean(names["result"].params)["w"]
    np.testing.assert_allclose(means[used], [2.0, -0.5], atol=0.06)
    # new observations: the intercept, and the two weights' and the noise's part of the variance
    assert names["y_new"].shape == (1000, 200)
    np.testing.assert_allclose(names["y_new"].mean(), 1.0, atol=0.3)


def test_the_first_page_finds_two_columns_and_a_pair_of_copies(tmp_path):
    names = run_script(START, tmp_path)
    probs = names["table"]["inclusion"].to_numpy()
    assert min(probs[[17, 22]]) > 0.99 and 0.95 < probs[4] + probs[11] < 1.1
    # as on the page, to the noise of 4,000 draws
    np.testing.assert_allclose(probs[[4, 11]], [0.69, 0.36], atol=0.05)
    assert {*names["sets"]["members"]} == {(17,), (22,), (4, 11)}
    assert names["mean"].shape == (5,) and names["interval"].shape == (2, 5)
    assert (tmp_path / "start.png").stat().st_size > 10_000


def test_the_ways_to_do_things_find_the_same_two_columns(tmp_path):
    names = run_script(HOW_TO, tmp_path)
    used = np.isin(np.arange(12), [3, 7])
    spikes = names["masked"].get_samples()["w_spike"].mean(axis=0)
    for inclusion in map(np.asarray, [*names["by_size"].values(), spikes, names["probabilities"]]):
        assert np.all(inclusion[used] > 0.99) and np.all(inclusion[~used] < 0.3)
    # more are included where more are expected
    assert names["by_size"][1.0].sum() < names["by_size"][4.0].sum()
    assert names["worst"] < 1.01
    errors = names["table"]["sum_abs_error_inclusion"]
    assert errors["paired"] < 0.2 < errors["standard"]
    tasks_share_two_functions_and_fill_the_gap(names)


def tasks_share_two_functions_and_fill_the_gap(names):
    used = np.asarray(names["used"])
    assert sorted(used.sum(axis=0)) == [0, 0, 2, 2]
    np.testing.assert_array_equal(used.sum(axis=1), [1, 1, 2, 0])
    assert names["mean"].shape == names["variance"].shape == (121, 4)
    # the inside of the third task's gap
    x = np.asarray(names["x_new"])
    gap = (x > 3.4) & (x < 5.9)
    expected = np.sin(x) - np.cos(2 * x)
    assert np.sqrt(np.mean((names["mean"][gap, 2] - expected[gap]) ** 2)) < 0.2


def test_other_likelihoods_find_two_columns_and_the_intercept(tmp_path):
    names = run_script(LIKELIHOODS, tmp_path)
    used = np.isin(np.arange(10), [2, 5])
    spikes = {
        k: names[k].get_samples()["w_spike"].mean(axis=0)
        for k in ("mcmc", "composite", "repeated", "of_scores")
    }
    inclusions = [*spikes.values(), names["inclusion"], names["probabilities"]]
    for inclusion in map(np.asarray, inclusions):
        assert inclusion[used].min() > 0.9 and inclusion[~used].max() < 0.5
    draws = names["composite"].get_samples()
    np.testing.assert_allclose(np.mean(draws["intercept"]), 0.5, atol=0.3)
    assert 1 < np.mean(draws["r"]) < 3.5
    assert names["mean_accept_prob"] > 0.5
