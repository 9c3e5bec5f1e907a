# SPDX-License-Identifier: Apache-2.0
"""The example that completes a table of ratings: files of MovieLens, their splits, and the fit."""

import sys

import numpy as np
import pytest
from scipy.sparse import coo_array
from test_examples import imported

import jax

FORMATS = {
    "u.data": ("\t", ""),
    "ratings.dat": ("::", ""),
    "ratings.csv": (",", "userId,movieId,rating,timestamp\n"),
}


@pytest.fixture
def movielens(monkeypatch):
    return imported("movielens", monkeypatch)


@pytest.fixture
def ratings(monkeypatch):
    """In single precision, as users run it."""
    jax.config.update("jax_enable_x64", False)
    return imported("ratings", monkeypatch)


def some_ratings(counts: list[int]) -> coo_array:
    """Users with given numbers of ratings, all of them different, in no order."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(len(counts)), counts)
    columns = np.concatenate([rng.permutation(50)[:count] for count in counts])
    order = rng.permutation(rows.size)
    return coo_array((np.arange(rows.size), (rows[order], columns[order])), shape=(len(counts), 50))


@pytest.mark.parametrize("like", FORMATS)
def test_files_are_told_apart_by_what_is_in_them(movielens, tmp_path, like):
    separator, header = FORMATS[like]
    values = [1.5, 4, 5, 1]
    ratings = zip([7, 196, 7, 22], [242, 242, 51, 1193], values, strict=True)
    lines = (separator.join(map(str, (*rating, 881250949))) for rating in ratings)
    (tmp_path / "file").write_text(header + "\n".join(lines) + "\n")
    table = movielens.read(tmp_path / "file")
    np.testing.assert_array_equal(table.data, values)
    np.testing.assert_array_equal(table.coords, [[0, 2, 0, 1], [1, 1, 0, 2]])
    assert table.shape == (3, 3)


@pytest.mark.parametrize("like", FORMATS)
def test_a_line_that_is_no_rating_is_named(movielens, tmp_path, like):
    separator, header = FORMATS[like]
    file = tmp_path / like
    file.write_text(header + "1 2 3 881250949\n1 3 good 881250949\n".replace(" ", separator))
    with pytest.raises(ValueError, match=f"{like}, line {2 + bool(header)}: expected `user"):
        movielens.read(file)


def test_ten_ratings_of_each_user_are_held_out_or_half_and_none_is_lost(movielens):
    table = some_ratings([1, 2, 7, 19, 20, 30, 45])
    ra, rb = (movielens.held_out(table, split, seed=3) for split in ("ra", "rb"))
    for test in (ra, rb):
        assert np.bincount(table.coords[0][test]).tolist() == [0, 1, 3, 9, 10, 10, 10]
    assert not np.any(ra & rb)
    # by chance: another seed holds out others, the same seed the same
    assert np.any(movielens.held_out(table, "ra", seed=4) != ra)
    np.testing.assert_array_equal(movielens.held_out(table, "ra", seed=3), ra)
    parts = [movielens.part(table, chosen) for chosen in (rb, ~rb)]
    assert all(part.shape == table.shape for part in parts)
    np.testing.assert_array_equal(sum(part.toarray() for part in parts), table.toarray())
    assert sum(part.nnz for part in parts) == table.nnz


def test_biases_are_found_and_those_of_few_ratings_are_small(ratings):
    rng = np.random.default_rng(0)
    user, item = rng.normal(size=200), rng.normal(size=150)
    # the kinder users rate other items than the rest, which makes these no better
    user[:100] += 2
    same = np.equal.outer(np.arange(200) < 100, np.arange(150) < 75)
    observed = rng.uniform(size=(200, 150)) < np.where(same, 0.8, 0.2)
    observed[0], observed[0, :2] = False, True
    user[0] = 4.0
    rows, columns = np.nonzero(observed)
    table = coo_array((3 + user[rows] + item[columns], (rows, columns)), shape=observed.shape)
    error = np.add.outer(*ratings.biases(table)) - (3 + np.add.outer(user, item))
    assert np.sqrt(np.mean(error[1:] ** 2)) < 0.16
    # two ratings that are 3 above the mean of users, among five that say nothing
    assert abs(np.mean(error[0]) + 3 * 5 / 7) < 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize("split", ["ra", "rb"])
def test_factors_are_better_than_biases_alone(ratings, movielens, split):
    table, planted = ratings.generated(seed=1)
    assert set(table.data) == set(np.arange(1, 11) / 2)
    test = movielens.held_out(table, split, seed=1)
    train, truth = movielens.part(table, ~test), movielens.part(table, test)
    fit = ratings.complete(train, truth.coords, num_factors=6, num_steps=100)
    of_biases, error, floor = (
        ratings.rmse(x, truth.data) for x in (fit.of_biases, fit.mean, planted[test])
    )
    assert 0.5 < floor < 0.53 and of_biases > 1.5 * floor
    assert error < 0.8 * of_biases and error < 1.3 * floor
    inside = np.mean(abs(fit.mean - truth.data) < 1.645 * fit.sd)
    assert 0.83 < inside < 0.93
    # of three planted factors, each with 40% of the items
    assert fit.included.any(axis=0).sum() == 3
    assert 0.1 < fit.included.mean() < 0.2


def test_a_file_is_completed(ratings, tmp_path, monkeypatch, capsys):
    table, _ = ratings.generated(seed=0, N=60, Q=50)
    file = tmp_path / "ratings.dat"
    entries = zip(*table.coords, table.data, strict=True)
    file.write_text("".join(f"{n + 1}::{q + 1}::{value:g}::0\n" for n, q, value in entries))
    options = ["--ratings", str(file), "--split", "rb", "--factors", "2", "--steps", "12"]
    monkeypatch.setattr(sys, "argv", ["ratings.py", *options])
    ratings.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"60 users, 50 items, {table.nnz} ratings, ")
    assert lines[-1].startswith("RMSE ") and 0.3 < float(lines[-1].split()[1]) < 2
    file.write_text("1::2::3\n")
    with pytest.raises(SystemExit):
        ratings.main()
    assert "line 1: expected" in capsys.readouterr().err
