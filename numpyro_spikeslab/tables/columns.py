# SPDX-License-Identifier: Apache-2.0
"""Columns of a regression that are always in, that come together, or that have priors."""

from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np
import pandas as pd

from numpyro_spikeslab.algebra.heredity import Heredity
from numpyro_spikeslab.support.labels import Axis
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import row_labels

PER_EXPECTED = 10
"""Columns, and rows, for each column that is expected to matter by default."""


class TableColumns(NamedTuple):
    """How each column of a table enters.

    - **always** - whether a column is always in.
    - **labels** - the group of each column, which is its own name if it is alone.
    - **numbers** - for each of the other columns the number of its group, of one column or more.
    - **probabilities** - prior inclusion probabilities of groups; `None` if they are learned.
    """

    always: Bool[np.ndarray, " P"]
    labels: list[str]
    numbers: Int[np.ndarray, " S"]
    probabilities: Float[np.ndarray, " G"] | None

    @property
    def groups(self) -> tuple[int, ...] | None:
        """Return the number of each column's group, `None` if all columns are alone."""
        return None if len(set(self.numbers)) == len(self.numbers) else tuple(self.numbers.tolist())

    def heredity(self, rule: Any, parents: Sequence[Sequence[int]] | None) -> Heredity | None:
        """Return which groups need which others.

        :param parents: of each column, one column of each term; `None` without a formula.
        :raises ValueError: if there is no such rule, or no formula.
        """
        if rule is None:
            return None
        if rule not in ("weak", "strong") or parents is None:
            raise bad("heredity", repr(rule), "'weak' or 'strong' beside a formula, or None")
        at = np.flatnonzero(~self.always)
        numbers = dict(zip(at.tolist(), self.numbers.tolist(), strict=True))
        of_groups = [parents[k] for k in at[np.unique(self.numbers, return_index=True)[1]]]
        counted = [tuple(numbers[k] for k in each if k in numbers) for each in of_groups]
        most, pairs = 1 if rule == "weak" else len(parents), zip(counted, of_groups, strict=True)
        least = [min(len(each), most) - (len(each) - len(x)) for x, each in pairs]
        return Heredity(tuple(counted), tuple(least))

    def prior(
        self, varies: Bool[np.ndarray, " P"], num_rows: int | float, expected_size: float | None
    ) -> tuple[dict[str, Any], float, Float[np.ndarray, " P"]]:
        """Return the prior of inclusion, for columns that vary.

        :return: arguments of the model; how many columns or groups are expected to be in; the
            probability of each column, 1 if it is always in, 0 if it is constant.
        :raises ValueError: if ``expected_size`` is out of its range, or given beside probabilities.
        """
        groups = np.unique(self.numbers[varies[~self.always]])
        if self.probabilities is None:
            expected = checked_size(expected_size, len(groups), num_rows)
            probabilities = np.full(self.numbers.max() + 1, expected / len(groups))
            arguments: dict[str, Any] = {"inclusion": (1.0, len(groups) / expected - 1.0)}
        elif expected_size is None:
            probabilities, expected = self.probabilities, self.probabilities[groups].sum()
            arguments = {"probabilities": probabilities}
        else:
            raise bad("expected_size", repr(expected_size), "None beside `inclusion`")
        inclusion = varies.astype(float)
        inclusion[~self.always] *= probabilities[self.numbers]
        return arguments, float(expected), inclusion


def checked_columns(names: pd.Index, always: Any, groups: Any, inclusion: Any) -> TableColumns:
    """Check ``always``, ``groups`` and ``inclusion``, and return their meaning for each column."""
    is_always = np.zeros(len(names), bool)
    labels = always if pd.api.types.is_list_like(always) else [always]
    is_always[find_columns("always", labels, names)] = True
    if is_always.all():
        raise bad("always", "all columns of X", "some of them")
    numbers, titles = group_numbers([] if groups is None else groups, names)
    if (shared := np.intersect1d(numbers[is_always], numbers[~is_always])).size:
        members = names[np.isin(numbers, shared)].tolist()
        raise bad("always", f"a part of the group {members!s:.200}", "all of it or none")
    labels = group_labels(numbers, titles, names)
    _, first, index = np.unique(numbers[~is_always], return_index=True, return_inverse=True)
    if inclusion is None:
        return TableColumns(is_always, labels, index, None)
    probs = Axis("column of X", len(names), names).aligned("inclusion", inclusion)
    if (wrong := (probs <= 0) | (probs >= 1)).any():
        remedy = "A column that is always in belongs to `always`; leave out one that never is."
        expected = "probabilities strictly between 0 and 1"
        raise bad("inclusion", f"{probs[wrong][0]:g}", expected, remedy)
    probabilities = probs[~is_always]
    if (probabilities != probabilities[first][index]).any():
        raise bad("inclusion", "several probabilities in a group", "one for each group")
    return TableColumns(is_always, labels, index, probabilities[first])


def find_columns(argument: str, labels: Any, names: pd.Index) -> Int[np.ndarray, " K"]:
    """Return the numbers of the columns that have these names."""
    if unknown := [x for x in labels if not isinstance(x, Hashable) or x not in names]:
        expected = f"columns of X, some of {names.tolist()!s:.200}"
        raise bad(argument, f"{unknown!s:.200}", expected, "Without names they are numbers.")
    return np.array([names.get_loc(label) for label in labels], int)


def group_numbers(groups: Any, names: pd.Index) -> tuple[Int[np.ndarray, " P"], np.ndarray]:
    """Return for each column a number and a title, the same for columns of a group."""
    if not pd.api.types.is_list_like(groups):
        raise bad("groups", repr(groups), "lists of columns, or a label for each column")
    lists = list(groups.values() if isinstance(groups, Mapping) else groups)
    if not all(isinstance(x, list | tuple | set | pd.Index | np.ndarray) for x in lists):
        axis, are_keys = Axis("column of X", len(names), names), isinstance(groups, Mapping)
        order = axis.order("groups", row_labels(groups), are_keys)
        numbers = pd.factorize(pd.Series(lists, dtype=object))[0]
        if len(numbers) != len(names) or (numbers < 0).any():
            expected = f"{len(names)}, one for each column of X, none missing"
            remedy = "Or give lists of the columns of each group."
            raise bad("groups", f"{len(lists)} labels", expected, remedy)
        return numbers[order], np.array([str(label) for label in lists])[order]
    numbers, titles = np.arange(len(names)) + len(lists), names.to_numpy(object, copy=True)
    of_lists = groups if isinstance(groups, Mapping) else [" + ".join(map(str, x)) for x in lists]
    for number, (title, members) in enumerate(zip(of_lists, lists, strict=True)):
        at = find_columns("groups", members, names)
        if (numbers[at] < len(lists)).any():
            raise bad("groups", "a column that is in two groups", "one group for each column")
        numbers[at], titles[at] = number, title
    return numbers, titles


def group_labels(numbers: Int[np.ndarray, " P"], titles: Any, names: pd.Index) -> list[str]:
    """Return the title of each column's group, or its own name if it is alone."""
    alone = np.bincount(numbers)[numbers] == 1
    taken = {str(name) for name in names[alone]}
    together = [f"group {title}" if str(title) in taken else str(title) for title in titles]
    return [str(name) if x else y for x, y, name in zip(alone, together, names, strict=True)]


def checked_size(expected_size: float | None, num_columns: int, num_rows: int | float) -> float:
    """Return how many columns are expected to matter, by default as :data:`PER_EXPECTED` says."""
    if expected_size is None:
        return min(num_columns, num_rows) / PER_EXPECTED
    if not isinstance(expected_size, Real) or not 0 < expected_size < num_columns:
        expected = f"a number between 0 and {num_columns}, the columns that vary"
        raise bad("expected_size", repr(expected_size), expected)
    return float(expected_size)
