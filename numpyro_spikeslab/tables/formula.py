# SPDX-License-Identifier: Apache-2.0
"""Tables made by formulas, whose terms are groups of columns."""

from collections.abc import Sequence
from typing import Any, NamedTuple
import warnings

import pandas as pd

from numpyro_spikeslab.support.files import plain_columns
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import in_pandas, row_labels


class Given(NamedTuple):
    """A table and the arguments of a regression that speak of its columns.

    - **X** - the columns, without the intercept.
    - **labels** - of rows; `None` if they have none.
    - **groups** - with a formula the term of each column.
    - **parents** - for each column the first ones of the parents of its term, which lack one of its
      factors; `None` without a formula.
    - **variables** - columns of ``data`` that the formula reads, see :func:`plain_table`.
    """

    X: Any
    y: Any
    groups: Any
    always: Any
    labels: pd.Index | None
    parents: Sequence[Sequence[int]] | None = None
    variables: pd.DataFrame | None = None


def formula_table(formula: Any, y: Any, data: Any, groups: Any, always: Any) -> Given:
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
        return Given(formula, y, groups, always, row_labels(formula))
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
    read = plain_table("data", data)
    parts = model_matrix("data", parsed, read)
    sides: Any = getattr(parts, "lhs", None), getattr(parts, "rhs", parts)
    if not all(isinstance(side, pd.DataFrame) for side in sides) or sides[0].shape[1] != 1:
        remedy = "Write a class as `{x == 'yes'} ~ a + b`."
        raise bad("X", f"the formula {formula!r}", "one with one response, 'y ~ a + b'", remedy)
    spec, (y, X) = sides[1].model_spec, map(pd.DataFrame, sides)
    terms = {X.columns[i]: str(term) for term, at in spec.term_indices.items() for i in at}
    if terms.pop("Intercept", None) is None:
        remedy = "Leave out `0 +` or `- 1`: the intercept is always in."
        raise bad("X", f"the formula {formula!r}", "one with an intercept", remedy)
    names = always if pd.api.types.is_list_like(always) else [always]
    flat = [x for name in names for x in [k for k in terms if terms[k] == name] or [name]]
    factors = {str(term): frozenset(term.factors) for term in spec.term_indices}
    firsts = {term: [*terms.values()].index(term) for term in terms.values()}
    parents = [
        [k for name, k in firsts.items() if factors[name] < x and len(x - factors[name]) == 1]
        for x in (factors[term] for term in terms.values())
    ]
    table, read = X[[*terms]], read[[x for x in read if x in spec.required_variables]]
    return Given(table, y.iloc[:, 0], [*terms.values()], flat, row_labels(data), parents, read)


def plain_table(argument: str, data: Any) -> pd.DataFrame:
    """Return the columns that a formula may read, in a form that files can keep."""
    frame = in_pandas(argument, data)
    if not isinstance(frame, pd.DataFrame):
        raise bad(argument, f"a {type(data).__name__}", "a table with the columns of the formula")
    return plain_columns(frame)


def new_columns(formula: str, data: pd.DataFrame, X_new: Any) -> pd.DataFrame:
    """Make columns of new rows by the levels, knots and means of the variables of a regression."""
    from formulaic import Formula

    source: Any = Formula(formula).rhs
    spec = model_matrix("dt", source, data).model_spec
    new = plain_table("X_new", X_new)
    try:
        return model_matrix("X_new", spec, new)
    except ValueError:
        states = {factor: state for factor, (_, state) in spec.encoder_state.items()}
        coded = [x for x in spec.factors if "categories" in states.get(str(x), ())]
        for name in {name for x in coded for name in spec.factor_variables[x]}.intersection(new):
            levels = data[name].astype("category").cat.categories
            if len(unknown := new[name][~new[name].isin(levels)]):
                got = f"{[*unknown]!s:.100} of {name!r} in the rows {[*unknown.index]!s:.100}"
                raise bad("X_new", got, f"levels of the regression, {[*levels]!s:.200}") from None
        raise


def model_matrix(argument: str, source: Any, data: pd.DataFrame) -> Any:
    """Make columns of a DataFrame by a formula or by the spec of columns that it has made.

    :raises ValueError: if it lacks values or columns, with the reason.
    """
    from formulaic.errors import DataMismatchWarning, FormulaicError

    try:
        with warnings.catch_warnings():
            # it would take categories that are new for the first one
            warnings.simplefilter("error", DataMismatchWarning)
            return source.get_model_matrix(data, na_action="raise")
    except (FormulaicError, DataMismatchWarning, ValueError) as error:
        raise bad(argument, f"rows that the formula does not take ({error})", "others") from error
