# SPDX-License-Identifier: Apache-2.0
"""The errors by which chains of a regression stop."""

import arviz_stats
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from numpyro_spikeslab.tables.monte_carlo import PROBABILITIES, monte_carlo_errors

COLUMNS = pd.Series({0: "undecided", 1: "out", 2: "in"})
RNG = np.random.default_rng(0)
PROBS = np.broadcast_to([0.5, 0.001, 1.0, 0.5], (4, 250, 4))
W = (RNG.uniform(size=PROBS.shape) < PROBS) * RNG.normal(2.0, 1.0, size=PROBS.shape)
SIGMA = RNG.normal(size=(4, 250))
FIRST = np.arange(4)[:, None] == 0
SLOW = np.cumsum(SIGMA, axis=1)
STUCK = np.broadcast_to(FIRST[..., None], (4, 250, 4))

CASES = {
    "chains agree": ({}, None),
    "always out": ({"w": W * [1, 0, 1, 1]}, None),
    "out in one chain": ({"w": W + FIRST[..., None] * [0, 9.0, 0, 0]}, "the number of columns"),
    "a constant site": ({"sigma": np.ones((4, 250))}, None),
    "a site constant in each chain": ({"sigma": FIRST + np.zeros((4, 250))}, "sigma"),
    "a weight off by 1 sd": ({"w": W + FIRST[..., None] * [0, 0, 1.0, 0]}, "w[in]"),
    "padding": ({"w": W + FIRST[..., None] * [0, 0, 0, 9.0]}, None),
    "a site off by 1 sd": ({"sigma": SIGMA + FIRST}, "sigma"),
    "a site of another scale": ({"sigma": SIGMA * (1 + 3 * FIRST)}, "sigma"),
    "a slow site": ({"sigma": SLOW}, "sigma"),
    "a slab scale, of which data say little": ({"slab_scale": SLOW}, None),
    "weights always in": ({"always": np.stack([SIGMA, SIGMA + FIRST], axis=-1)}, "always"),
    "a stuck column": (
        {PROBABILITIES: np.where([1, 0, 0, 0], STUCK, PROBS)},
        "the inclusion of w[undecided]",
    ),
}


@pytest.mark.parametrize(("changes", "worst"), CASES.values(), ids=CASES)
def test_chains_stop_unless_a_quantity_is_off(changes, worst):
    draws = {"w": W, PROBABILITIES: PROBS, "sigma": SIGMA} | changes
    errors = monte_carlo_errors(draws, COLUMNS)
    assert (errors <= 1).all() == (worst is None), errors
    assert worst is None or errors.idxmax() == worst, errors


def test_errors_of_few_draws_are_infinite():
    draws = {"w": W[:, :3], PROBABILITIES: PROBS[:, :3], "sigma": SIGMA[:, :3]}
    assert np.isinf(monte_carlo_errors(draws, COLUMNS)).all()


def test_the_largest_r_hat_of_many_columns_does_not_count():
    w = np.random.default_rng(0).normal(size=(4, 100, 100))
    assert arviz_stats.rhat(xr.Dataset({"w": (["chain", "draw", "x"], w)}))["w"].max() > 1.02
    draws = {"w": w, PROBABILITIES: np.full(w.shape, 0.9)}
    assert (monte_carlo_errors(draws, pd.Series(range(100))) < 0.8).all()
