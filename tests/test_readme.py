# SPDX-License-Identifier: Apache-2.0
"""The blocks of the README as one script, in NumPyro's default precision and without warnings."""

from contextlib import chdir
from pathlib import Path
import re
from typing import Any

import numpy as np
import pytest

import jax

README = Path(__file__).parent.parent / "README.md"
# stricter than the other tests, which may end a fit while its bound still moves
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error")]


def blocks() -> list[str]:
    """The Python blocks, in order, each at its line of the file for error messages."""
    text = README.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script knows after each block."""
    if not README.exists():
        pytest.skip("the README is not installed with the package")
    assert not jax.config.jax_enable_x64
    names: dict[str, Any] = {"__name__": "readme"}
    known = []
    folder = tmp_path_factory.mktemp("readme")
    with chdir(folder):
        for block in blocks():
            exec(compile(block, str(README), "exec"), names)
            known.append(dict(names) | {"folder": folder})
    return known


def test_chains_and_fit_find_the_two_weights(after):
    _, chains, fit, gradients, *_ = after
    used = np.isin(np.arange(20), [3, 7])
    spikes = chains["dt_gibbs"]["posterior"]["w_spike"].mean(["chain", "draw"]).values
    for inclusion in (spikes, fit["guide"].inclusion_probabilities(fit["result"].params)["w"]):
        assert np.all(inclusion[used] > 0.99) and np.all(inclusion[~used] < 0.1)
    means = fit["guide"].posterior_mean(fit["result"].params)["w"]
    np.testing.assert_allclose(means[used], [2.0, -0.5], atol=0.06)
    assert (fit["folder"] / "inclusion.png").stat().st_size > 10_000
    # new observations: the intercept, and the two weights' and the noise's part of the variance
    assert gradients["y_new"].shape == (1000, 200)
    np.testing.assert_allclose(gradients["y_new"].mean(), 1.0, atol=0.3)


def test_gradients_reach_almost_the_same_bound(after):
    names = after[3]
    inclusion = names["guide"].inclusion_probabilities(names["result_adam"].params)["w"]
    assert np.all((inclusion < 0.05) | (inclusion > 0.95))
    loss = names["result_adam"].losses[-100:].mean()
    best = names["result"].losses[-1]
    assert best < loss < best + 1.5


def test_tasks_share_two_functions_and_fill_the_gap(after):
    names = after[4]
    inclusion = np.asarray(names["guide"].inclusion_probabilities(names["result"].params)["W"])
    assert sorted(np.sum(inclusion > 0.5, axis=0)) == [0, 0, 2, 2]
    np.testing.assert_array_equal(np.sum(inclusion > 0.5, axis=1), [1, 1, 2, 0])
    assert names["mean"].shape == names["variance"].shape == (121, 4)
    # the inside of the third task's gap
    x = np.asarray(names["X_new"])
    gap = (x > 3.4) & (x < 5.9)
    expected = np.sin(x) - np.cos(2 * x)
    assert np.sqrt(np.mean((names["mean"][gap, 2] - expected[gap]) ** 2)) < 0.2


def test_chains_of_tasks_agree_with_their_fit(after):
    names = after[5]
    assert names["new"]["f_new"].shape == (2000, 121, 4)
    inside = np.asarray(names["X_new"]) < 10
    mean = names["new"]["f_new"].mean(axis=0)
    np.testing.assert_allclose(mean[inside], names["mean"][inside], atol=0.25)
