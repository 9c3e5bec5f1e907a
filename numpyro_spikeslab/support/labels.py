# SPDX-License-Identifier: Apache-2.0
"""Labels of rows and columns, and the order of arguments by them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Float, Int
import numpy as np
import pandas as pd

from numpyro_spikeslab.support.messages import bad, some
from numpyro_spikeslab.support.tabular import as_numbers, row_labels


class Axis(NamedTuple):
    """The rows or the columns of a table, and their labels, `None` if they have none."""

    name: str
    size: int
    labels: pd.Index | None

    @property
    def names(self) -> pd.Index:
        """Return the labels, or numbers."""
        return pd.RangeIndex(self.size) if self.labels is None else self.labels

    @classmethod
    def of_columns(cls, frame: Any, size: int) -> "Axis":
        """Return the columns of a table, which are called by numbers if they have no names."""
        return cls("column of X", size, getattr(frame, "columns", pd.RangeIndex(size)))

    def aligned(
        self, argument: str, values: Any, may_be_one: bool = True
    ) -> Float[np.ndarray, " N"]:
        """Return a number for each element, in order, from labelled numbers, an array or one."""
        order = self.order(argument, row_labels(values), isinstance(values, Mapping))
        numbers = as_numbers(argument, values)
        if may_be_one and numbers.ndim == 0:
            return np.broadcast_to(numbers, self.size)
        if numbers.shape != (self.size,):
            expected = f"{'a number, or ' * may_be_one}({self.size},), one for each {self.name}"
            several = f"Use {argument}[:, 0], or {argument}.iloc[:, 0], and others one by one."
            remedy = several if numbers.ndim == 2 else ""
            raise bad(argument, f"the shape {numbers.shape}", expected, remedy)
        return numbers[order]

    def order(
        self, argument: str, labels: pd.Index | None, are_keys: bool = False
    ) -> Int[np.ndarray, " N"]:
        """Return for each element the place of its label, or its own place.

        Places decide if one side has no labels. A default index, 0, 1 and so on, has none beside
        strings or dates; beside numbers it means rows in another order.

        :param are_keys: whether labels are keys of a mapping, which are always meant.
        :raises ValueError: if labels are missing, unknown or repeated.
        """
        mine = self.names if are_keys else self.labels
        if mine is None or labels is None or labels.equals(mine):
            return np.arange(self.size)
        both = mine, labels
        is_default = [index.equals(pd.RangeIndex(len(index))) for index in both]
        is_number = [index.inferred_type in ("integer", "floating") for index in both]
        if any(is_default) and not all(is_number) and not are_keys:
            return np.arange(self.size)
        own, given = mine.unique(), labels.unique()
        place = given.get_indexer(own)
        wrong = {
            "missing": own[place < 0].tolist(),
            "unknown": given[own.get_indexer(given) < 0].tolist(),
            "repeated": [*{k: 0 for index in both for k in index[index.duplicated()]}],
        }
        if any(wrong.values()):
            got = ", ".join(f"{how} labels {some(ones)}" for how, ones in wrong.items() if ones)
            remedy = f"Without labels, as in an array, {argument} goes by place."
            raise bad(argument, got, f"a label for each {self.name}", remedy)
        return place
