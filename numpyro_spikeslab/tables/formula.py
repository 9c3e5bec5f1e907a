# SPDX-License-Identifier: Apache-2.0
"""Tables made by formulas, whose terms are groups of columns."""

from collections.abc import Sequence
from typing import Any, NamedTuple
import warnings

import pandas as pd

from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import in_pandas, row_labels


class Given(NamedTuple):
    """A table and the arguments of a regression that speak of its columns.

    - **X** - the columns, without the intercept.
    - **labels** - of rows; `None` if they have none.
    - **groups** - with a formula the term of each column.
    - **parents** - for each column the first ones of the parents of its term, which lack one of its
      factors; `None` without a formula.
    """

    X: Any
    y: Any
    groups: Any
    always: Any
    X_new: Any
    labels: pd.Index | None
    parents: Sequence[Sequence[int]] | None = None


def formula_table(formula: Any, y: Any, data: Any, groups: Any, always: Any, X_new: Any) -> Given:
    """Make the table of a formula, such as ``"y ~ age*sex + bs(bmi, 4) + C(region)"``.

    :param formula: this, or a table, which needs none.
    :param always: names of terms or of columns.
    :raises ModuleNotFoundError: if ``formulaic`` is not installed.
    :raises ValueError: if ``data`` is no DataFrame or lacks values or columns, if the formula does
        not have one response and an intercept, or if arguments are beside each other in vain.
    """
    if not isinstance(formula, str):
        if data is not None:
            raise bad("data", f"a {type(data).__name__}", "None", "Write a formula as X.")
        return Given(formula, y, groups, always, X_new, row_labels(formula))
    if y is not None or groups is not None:
        raise bad("y, groups", "an argument beside a formula", "None", "The formula has both.")
    try:
        from formulaic import Formula
        from formulaic.errors import FormulaicError
    except ImportError as error:
        remedy = "pip install 'formulaic>=1.1', or give X and y."
        raise ModuleNotFoundError(f"A formula needs formulaic: {remedy}") from error
    try:
        parsed = Formula(formula)
    except FormulaicError as error:
        raise bad("X", f"the formula {formula!r} ({error})", "one that can be read") from error
    parts = model_matrix("data", parsed, data)
    sides: Any = getattr(parts, "lhs", None), getattr(parts, "rhs", parts)
    if not all(isinstance(side, pd.DataFrame) for side in sides) or sides[0].shape[1] != 1:
        remedy = "Write a class as `{x == 'yes'} ~ a + b`."
        raise bad("X", f"the formula {formula!r}", "one with one response, 'y ~ a + b'", remedy)
    spec, (y, X) = sides[1].model_spec, map(pd.DataFrame, sides)
    terms = {X.columns[i]: str(term) for term, at in spec.term_indices.items() for i in at}
    if terms.pop("Intercept", None) is None:
        remedy = "Leave out `0 +` or `- 1`: the intercept is always in."
        raise bad("X", f"the formula {formula!r}", "one with an intercept", remedy)
    # categories, knots and means of the data
    new = None if X_new is None else model_matrix("X_new", spec, X_new)[[*terms]]
    names = always if pd.api.types.is_list_like(always) else [always]
    flat = [x for name in names for x in [k for k in terms if terms[k] == name] or [name]]
    factors = {str(term): frozenset(term.factors) for term in spec.term_indices}
    firsts = {term: [*terms.values()].index(term) for term in terms.values()}
    parents = [
        [k for name, k in firsts.items() if factors[name] < x and len(x - factors[name]) == 1]
        for x in (factors[term] for term in terms.values())
    ]
    table, labels = X[[*terms]], row_labels(data)
    return Given(table, y.iloc[:, 0], [*terms.values()], flat, new, labels, parents)


def model_matrix(argument: str, source: Any, data: Any) -> Any:
    """Make columns of a DataFrame by a formula or by the spec of columns that it has made.

    :raises ValueError: if it lacks values or columns, with the reason.
    """
    from formulaic.errors import DataMismatchWarning, FormulaicError

    frame = in_pandas(argument, data)
    if not isinstance(frame, pd.DataFrame):
        raise bad(argument, f"a {type(data).__name__}", "a table with the columns of the formula")
    try:
        with warnings.catch_warnings():
            # it would take categories that are new for the first one
            warnings.simplefilter("error", DataMismatchWarning)
            return source.get_model_matrix(frame, na_action="raise")
    except (FormulaicError, DataMismatchWarning, ValueError) as error:
        raise bad(argument, f"rows that the formula does not take ({error})", "others") from error
