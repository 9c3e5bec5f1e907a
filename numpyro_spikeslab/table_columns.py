# SPDX-License-Identifier: Apache-2.0
"""Columns of a regression that are always in, that come together, or that have priors."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int
import numpy as np
import pandas as pd

from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.responses import ResponseKind
from numpyro_spikeslab.table_checks import as_numbers, checked_size


class TableColumns(NamedTuple):
    """What the prior says of the columns of a table.

    - **always** - whether a column is always in.
    - **groups** - for each of the other columns the number of its group; `None` if all are alone.
    - **probabilities** - prior inclusion probabilities of these columns, or of their groups; `None`
      if they are learned.
    """

    always: Bool[np.ndarray, " P"]
    groups: tuple[int, ...] | None
    probabilities: Float[np.ndarray, " G"] | None

    @property
    def spiked(self) -> Bool[np.ndarray, " P"]:
        return ~self.always

    def prior(
        self, used: Bool[np.ndarray, " P"], num_rows: int, expected_size: float | None
    ) -> "InclusionPrior":
        """Return the prior of inclusion, for columns that vary.

        :raises ValueError: if ``expected_size`` is out of its range, or given beside probabilities.
        """
        index = np.arange(self.spiked.sum()) if self.groups is None else np.array(self.groups)
        size = len(np.unique(index[used[self.spiked]]))
        inclusion = used.astype(float)
        if self.probabilities is None:
            expected = checked_size(expected_size, size, num_rows)
            inclusion[self.spiked] *= expected / size
            return InclusionPrior({"inclusion": (1.0, size / expected - 1.0)}, expected, inclusion)
        if expected_size is not None:
            remedy = "The sum of `inclusion` is the number of columns that are expected."
            raise bad("expected_size", repr(expected_size), "None beside `inclusion`", remedy)
        inclusion[self.spiked] *= self.probabilities[index]
        arguments = {"probabilities": self.probabilities}
        expected = float(self.probabilities[np.unique(index[used[self.spiked]])].sum())
        return InclusionPrior(arguments, expected, inclusion)


class InclusionPrior(NamedTuple):
    """The prior of inclusion.

    - **arguments** - of :func:`~numpyro_spikeslab.models.sparse_regression`.
    - **expected_size** - expected number of columns, or of groups, that are included.
    - **inclusion** - probability of each column, 1 if it is always in, 0 if it is constant.
    """

    arguments: dict[str, Any]
    expected_size: float
    inclusion: Float[np.ndarray, " P"]


def checked_columns(
    names: pd.Index, always: Any, groups: Any, inclusion: Any, kind: ResponseKind
) -> TableColumns:
    """Return the columns that three arguments of a regression speak of."""
    is_always = np.zeros(len(names), bool)
    is_always[places("always", [always] if isinstance(always, str) else always, names)] = True
    if is_always.all():
        raise bad("always", "all columns of X", "some of them", "One is left to be chosen.")
    numbers = np.arange(len(names)) if groups is None else group_numbers(groups, names)
    if shared := set(numbers[is_always]) & set(numbers[~is_always]):
        members = names[np.isin(numbers, [*shared])].tolist()
        remedy = "Leave them out of the groups."
        raise bad("always", f"a part of the group {members!s:.200}", "all of it or none", remedy)
    _, first, index = np.unique(numbers[~is_always], return_index=True, return_inverse=True)
    are_alone = len(first) == len(index)
    if not are_alone and kind.start is not None:
        remedy = "A negative binomial likelihood has groups."
        raise bad("groups", "groups under a Poisson likelihood", "None", remedy)
    probabilities = None
    if inclusion is not None:
        of_columns = prior_probabilities(inclusion, names)[~is_always]
        probabilities = of_columns if are_alone else of_columns[first]
        if not np.array_equal(of_columns, of_columns[first][index]):
            raise bad("inclusion", "several probabilities in a group", "one for each group")
    return TableColumns(is_always, None if are_alone else tuple(index.tolist()), probabilities)


def places(argument: str, labels: Any, names: pd.Index) -> Int[np.ndarray, " K"]:
    """Return the numbers of the columns that have these names."""
    labels = list(labels)
    if unknown := [label for label in labels if label not in names]:
        expected = f"columns of X, some of {names.tolist()!s:.200}"
        raise bad(argument, f"{unknown!s:.200}", expected, "Without names they are numbers.")
    return names.get_indexer(labels) if labels else np.array([], int)


def group_numbers(groups: Any, names: pd.Index) -> Int[np.ndarray, " P"]:
    """Return a number for each column, the same for columns of a group."""
    lists = list(groups.values() if isinstance(groups, Mapping) else groups)
    if all(isinstance(x, list | tuple | set | pd.Index | np.ndarray) for x in lists):
        members = np.concatenate([places("groups", x, names) for x in lists])
        if len(np.unique(members)) < len(members):
            raise bad("groups", "a column that is in two groups", "one group for each column")
        numbers = np.arange(len(names)) + len(lists)
        numbers[members] = np.repeat(np.arange(len(lists)), [len(x) for x in lists])
        return numbers
    numbers = pd.factorize(pd.Series(lists, dtype=object))[0]
    if len(numbers) != len(names) or (numbers < 0).any():
        got, expected = f"{len(lists)} labels", f"{len(names)}, one for each column of X, none NaN"
        raise bad("groups", got, expected, "Or give a list of the columns of each group.")
    return numbers


def prior_probabilities(inclusion: Any, names: pd.Index) -> Float[np.ndarray, " P"]:
    """Return the prior probability of each column."""
    if isinstance(inclusion, pd.Series) and not inclusion.index.equals(names):
        remedy = "Use inclusion[X.columns]."
        raise bad("inclusion", "another index than the columns of X", "the same in order", remedy)
    values = as_numbers("inclusion", inclusion)
    if values.shape not in ((), (len(names),)):
        expected = f"a number or the shape ({len(names)},), one for each column of X"
        raise bad("inclusion", f"the shape {values.shape}", expected)
    if not ((values > 0) & (values < 1)).all():
        remedy = "A column that is always in belongs to `always`; leave out one that never is."
        raise bad("inclusion", f"{values!s:.200}", "numbers strictly between 0 and 1", remedy)
    return np.broadcast_to(values, len(names))
