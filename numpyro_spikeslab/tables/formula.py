# SPDX-License-Identifier: Apache-2.0
"""Tables made by formulas, whose terms are groups of columns."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from numpyro_spikeslab.support.files import plain_columns
from numpyro_spikeslab.support.formulas import group_terms, model_matrix, sides
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.tabular import in_pandas, row_labels
from numpyro_spikeslab.tables.effects import Effect, effects_of


class Given(NamedTuple):
    """A table and the arguments of a regression that speak of its columns.

    - **X** - the columns, without the intercept.
    - **labels** - of rows; `None` if they have none.
    - **groups** - with a formula the term of each column.
    - **parents** - for each column the first ones of the parents of its term, which lack one of its
      factors; `None` without a formula.
    - **variables** - columns of ``data`` that the formula reads, in a form that files can keep.
    - **effects** - random effects of the formula by name.
    """

    X: Any
    y: Any
    groups: Any
    always: Any
    labels: pd.Index | None
    parents: Sequence[Sequence[int]] | None = None
    variables: pd.DataFrame | None = None
    effects: Mapping[str, Effect] = MappingProxyType({})


def formula_table(formula: Any, y: Any, data: Any, groups: Any, always: Any) -> Given:
    """Make the table of a formula, such as ``"y ~ age*sex + bs(bmi, 4) + C(region)"``.

    :param formula: this, or a table, which needs none.
    :param always: names of terms, such as ``"C(region)"``, of variables, or of columns.
    :raises ValueError: if arguments are beside each other in vain, and as :func:`sides`.
    """
    if not isinstance(formula, str):
        if data is not None:
            raise bad("data", f"a {type(data).__name__}", "None", "Write a formula as X.")
        return Given(formula, y, groups, always, row_labels(formula))
    if y is not None or groups is not None:
        raise bad("y, groups", "an argument beside a formula", "None", "The formula has both.")
    without, of_groups = group_terms(formula)
    y, X = sides(without, data)
    spec = X.model_spec
    terms = {X.columns[i]: str(term) for term, at in spec.term_indices.items() for i in at}
    del terms["Intercept"]
    names = always if pd.api.types.is_list_like(always) else [always]
    flat = [x for name in names for x in columns_named(name, terms, spec) or [name]]
    factors = {str(term): frozenset(term.factors) for term in spec.term_indices}
    firsts = {term: [*terms.values()].index(term) for term in terms.values()}
    parents = [
        [k for name, k in firsts.items() if factors[name] < x and len(x - factors[name]) == 1]
        for x in (factors[term] for term in terms.values())
    ]
    table, frame = X[[*terms]], in_pandas("data", data)
    used = spec.required_variables.union(*of_groups)
    read = plain_columns(frame[[x for x in frame if x in used]])
    others = flat, row_labels(data), parents, read, effects_of(of_groups, frame)
    return Given(table, y.squeeze(axis=1), [*terms.values()], *others)


def columns_named(name: Any, terms: dict[str, str], spec: Any) -> list[str]:
    """Return the columns of a term, or of all terms of one variable."""
    read = {
        str(term): {x for x in names if "callable" not in x.roles}
        for term, names in spec.term_variables.items()
    }
    of_term = [column for column, term in terms.items() if term == name]
    return of_term or [column for column, term in terms.items() if read[term] == {name}]


def new_columns(formula: str, variables: pd.DataFrame, X_new: Any) -> pd.DataFrame:
    """Make columns of new rows by the levels, knots and means of the variables of a regression."""
    from formulaic import Formula

    source: Any = Formula(group_terms(formula)[0])
    spec = model_matrix("dt", source.rhs, variables).model_spec
    return model_matrix("X_new", spec, X_new)
