# SPDX-License-Identifier: Apache-2.0
"""Ratings from the files of MovieLens, divided into training and test ratings."""

import csv
import io
from pathlib import Path
import re

import numpy as np
import pandas as pd
from scipy.sparse import coo_array

HEADER = b"userId,movieId,rating,timestamp"
HELD_OUT = 10  # ratings of each user, in ra and once more in rb


def read(file: Path) -> coo_array:
    """Ratings of a file of MovieLens, a row for each user that has some, a column for each item.

    :raises ValueError: if a line is no rating, or the second one of a user for an item.
    """
    content = file.read_bytes()
    first = io.BytesIO(content).readline().strip()
    spaced = next((s for s in (b"::", b"\t") if s in first), None)
    separator = b"," if first == HEADER else spaced
    try:
        users, items, values = columns_of(content, separator)
    except (ValueError, OverflowError):
        raise ValueError(f"{file}, {complaint(content, separator)}") from None
    users, rows = np.unique(users, return_inverse=True)
    items, columns = np.unique(items, return_inverse=True)
    entries = rows * items.size + columns
    order = np.argsort(entries, kind="stable")
    again = order[1:][np.diff(entries[order]) == 0]
    if again.size:
        n = again.min()
        raise ValueError(
            f"{file}, line {n + 1 + (separator == b',')}: expected one rating of a user for an "
            f"item, but user {users[rows[n]]} has rated item {items[columns[n]]} before."
        )
    return coo_array((values, (rows, columns)), shape=(users.size, items.size))


def columns_of(content: bytes, separator: bytes | None) -> tuple[np.ndarray, ...]:
    """Read users, items and ratings; raise ValueError if this is no file of MovieLens."""
    if separator is None:
        raise ValueError
    table = pd.read_csv(
        # a separator of one character takes the parser that is written in C
        io.BytesIO(content.replace(b"::", b"\t") if separator == b"::" else content),
        sep="," if separator == b"," else "\t",
        header=None,
        skiprows=int(separator == b","),
        dtype={0: np.int64, 1: np.int64, 2: np.float32, 3: np.int64},
        na_filter=False,
        skip_blank_lines=False,
        quoting=csv.QUOTE_NONE,
    )
    if table.shape[1] != 4 or not np.all(np.isfinite(table[2])):
        raise ValueError
    return tuple(table[k].to_numpy() for k in range(3))


def complaint(content: bytes, separator: bytes | None) -> str:
    """Describe the first line that does not parse as a rating, and the expected format."""
    s = re.escape(separator or b"::")
    rating = re.compile(rb"\d{1,18}%b\d{1,18}%b\d{1,9}(\.\d+)?%b\d{1,18}" % (s, s, s))
    # the line that is missing is an empty one
    lines = enumerate(io.BytesIO(content + b"\n\n"), start=1)
    header = separator == b","
    number, line = next(x for x in lines if x[0] > header and not rating.fullmatch(x[1].rstrip()))
    return (
        f"line {number}: expected `user item rating timestamp`, separated by tabs or `::`, or by "
        f"commas under the header `{HEADER.decode()}`, got {line.rstrip()[:80]}."
    )


def held_out(ratings: coo_array, split: str, seed: int) -> np.ndarray:
    """Choose ten test ratings of each user, or half of the ratings if there are fewer than twenty.

    Half is rounded down. The splits ra and rb with the same seed have no rating in common.
    """
    rows, _ = ratings.coords
    order = np.random.default_rng(seed).permutation(rows.size)
    order = order[np.argsort(rows[order], kind="stable")]
    count = np.bincount(rows, minlength=ratings.shape[0])
    place = np.empty(rows.size, int)
    place[order] = np.arange(rows.size) - np.repeat(np.cumsum(count) - count, count)
    size = np.minimum(HELD_OUT, count // 2)[rows]
    first = {"ra": 0, "rb": size}[split]
    return (first <= place) & (place < first + size)


def part(ratings: coo_array, chosen: np.ndarray) -> coo_array:
    """The table of some of the ratings."""
    rows, columns = ratings.coords
    return coo_array((ratings.data[chosen], (rows[chosen], columns[chosen])), shape=ratings.shape)
