# SPDX-License-Identifier: Apache-2.0
"""The choice of the next measurements, beside the closed form of a conjugate regression."""

import numpy as np
import pytest
from refusals import refusals

from numpyro_spikeslab import next_measurements

pytestmark = pytest.mark.filterwarnings("error")


def draws_with(covariance, num_draws=50):
    """Make draws with exactly this covariance."""
    noise = np.random.default_rng(0).normal(size=(num_draws, len(covariance)))
    unit = np.linalg.qr(noise - noise.mean(axis=0))[0]
    return 3.0 + np.sqrt(num_draws - 1) * unit @ np.linalg.cholesky(covariance).T


def pool_of(shape, seed=1):
    """Rows of a pool, and the covariance of five weights before any is measured."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(5, 5))
    return rng.normal(size=(np.prod(shape), 5)), root @ root.T


def best_by_precision(rows, covariance, noise, number, costs=1.0):
    """Choose rows by the determinant of the posterior precision of the weights."""
    precision, chosen = np.linalg.inv(covariance), []
    for _ in range(number):
        new = precision + rows[:, :, None] * rows[:, None, :] / noise[:, None, None] ** 2
        gains = (np.linalg.slogdet(new)[1] - np.linalg.slogdet(precision)[1]) / 2
        scores = gains / costs
        scores[[row for row, _ in chosen]] = -np.inf
        best = int(scores.argmax())
        chosen.append((best, gains[best]))
        precision = new[best]
    return chosen


@pytest.mark.parametrize("shape", [(12,), (6, 2)], ids=["rows", "tasks"])
@pytest.mark.parametrize("with_costs", [False, True])
def test_choices_are_those_of_a_conjugate_regression(shape, with_costs):
    rows, covariance = pool_of(shape)
    noise = np.array(0.7) if len(shape) == 1 else np.array([0.3, 1.5])
    costs = np.random.default_rng(2).uniform(0.5, 2.0, shape) if with_costs else None
    draws = (draws_with(covariance) @ rows.T).reshape(-1, *shape)
    table = next_measurements(draws, noise, number=8, costs=costs)
    each = np.broadcast_to(noise, shape).ravel()
    prices = 1.0 if costs is None else costs.ravel()
    expected = best_by_precision(rows, covariance, each, 8, prices)
    places = table[["row", "task"][: len(shape)]].to_numpy().T
    flat = np.ravel_multi_index(tuple(places), shape)
    assert flat.tolist() == [row for row, _ in expected]
    np.testing.assert_allclose(table["information"], [gain for _, gain in expected], rtol=1e-9)


def test_only_allowed_entries_are_chosen_and_each_once():
    rows, covariance = pool_of((4, 2))
    draws = (draws_with(covariance) @ rows.T).reshape(-1, 4, 2)
    allowed = np.zeros((4, 2), bool)
    allowed[1:3, 1] = True
    table = next_measurements(draws, 1.0, 2, allowed=allowed)
    assert sorted(table[["row", "task"]].itertuples(index=False, name=None)) == [(1, 1), (2, 1)]
    assert allowed.sum() == 2


def test_rows_that_tell_the_same_are_not_both_chosen():
    draws = draws_with(np.diag([4.0, 1.0]))[:, [0, 0, 1]]
    assert next_measurements(draws, 0.01, 2)["row"].tolist() == [0, 2]


def test_what_is_known_tells_nothing():
    draws = np.column_stack([np.ones(10), np.arange(10.0)])
    table = next_measurements(draws, 1.0, 2)
    assert table["row"].tolist() == [1, 0]
    assert table["information"][1] == 0


DRAWS = np.arange(12.0).reshape(3, 4)
test_refusals = refusals(
    {
        "one draw": (DRAWS[:1], 1.0, {}, r"draws: got the shape \(1, 4\), expected \(S, N\) or"),
        "vector": (DRAWS[0], 1.0, {}, r"draws: got the shape \(4,\)"),
        "gap": (np.where(DRAWS == 5, np.nan, DRAWS), 1.0, {}, "draws: got nan in row 1, column 1"),
        "noise of zero": (DRAWS, 0.0, {}, "noise: got 0.0, expected positive numbers"),
        "noise of other tasks": (DRAWS, [1.0, 1.0], {}, r"noise: got the shape \(2,\), expected"),
        "costs": (DRAWS, 1.0, {"costs": [1, 1, -1, 1]}, "costs: got -1.0, expected positive"),
        "allowed of numbers": (DRAWS, 1.0, {"allowed": [0, 1, 1, 1]}, "allowed: got .*int"),
        "allowed of another shape": (DRAWS, 1.0, {"allowed": [True]}, r"allowed: .*shape \(4,\)"),
        "none": (DRAWS, 1.0, {"number": 0}, "number: got 0, expected a whole number from 1 to 4"),
        "too many": (DRAWS, 1.0, {"number": 5}, "number: got 5, expected a whole .* 1 to 4, as"),
        "a half": (DRAWS, 1.0, {"number": 1.5}, "number: got 1.5, expected a whole number"),
    },
    lambda draws, noise, options: next_measurements(draws, noise, **options),
)
