# SPDX-License-Identifier: Apache-2.0
"""Columns that formulas make of tables, and errors in words of the package."""

import difflib
import re
from typing import Any
import warnings

import numpy as np
import pandas as pd

from numpyro_spikeslab.support.files import plain_columns
from numpyro_spikeslab.support.messages import bad, some
from numpyro_spikeslab.support.tabular import UNIT, in_pandas

ARGUMENTS = {
    "offset": "offset=data['a']",
    "Surv": "event=data['event']",
    "cens": "event=data['event']",
    "cbind": "totals=data['total']",
    "trials": "totals=data['total']",
}
"""Functions in formulas of other packages, and what is an argument instead."""

LEVELS = "Leave these rows out, or let the regression see rows of these levels."


def sides(formula: str, data: Any) -> tuple[pd.DataFrame, Any]:
    """Make the response, a column, and the columns of a formula, which know their terms.

    :raises ModuleNotFoundError: if ``formulaic`` is not installed.
    :raises ValueError: unless it has one response, an intercept and more, which the data can give.
    """
    try:
        from formulaic import Formula, SimpleFormula
        from formulaic.errors import FormulaicError
    except ImportError as error:
        remedy = "pip install 'formulaic>=1.1', or give X and y."
        raise ModuleNotFoundError(f"A formula needs formulaic: {remedy}") from error

    def refused(expected: str, remedy: str) -> ValueError:
        return bad("X", f"the formula {formula!r}", expected, remedy)

    try:
        parsed = Formula(formula)
    except (FormulaicError, SyntaxError):
        if re.search(r"(?<![\w.])\.(?![\w.])", formula):
            remedy = "`X=data.drop(columns='y'), y=data['y']` takes all columns but one."
            raise refused("names of columns instead of `.`", remedy) from None
        if "|" in formula:
            remedy = "Add them in brackets: `y ~ a + (1 | clinic) + (0 + a | clinic)`."
            raise refused("random effects as terms", remedy) from None
        remedy = "Operators stand between names, brackets are closed, a name with blanks is `a b`."
        raise refused("one that can be read, 'y ~ a + b'", remedy) from None
    parts = getattr(parsed, "lhs", None), getattr(parsed, "rhs", None)
    if not all(isinstance(x, SimpleFormula) for x in parts):
        remedy = "The response stands before one `~`, and columns behind it, without `|`."
        raise refused("one with one response, 'y ~ a + b'", remedy)
    X, frame, name = model_matrix("data", parts[1], data), in_pandas("data", data), str(parts[0])
    # categories with an order are one response
    has_order = name in frame and getattr(frame[name].dtype, "ordered", False)
    y = frame[[name]] if has_order else model_matrix("data", parts[0], data)
    num_terms = 1 if has_order else len(y.model_spec.terms)
    # two are limits of times
    if y.shape[1] != num_terms or num_terms > 2:
        remedy = f"Write a class as `{{{formula.split('~')[0].strip()} == 'yes'}} ~ a + b`."
        if num_terms > 1:
            remedy = "Regress each response by itself."
        raise refused(f"one with one response, not {some([*y.columns])}", remedy)
    if "Intercept" not in X:
        remedy = "Leave out `0 +` or `- 1`: the intercept is always in."
        raise refused("one with an intercept", remedy)
    if X.shape[1] == 1:
        raise refused("columns beside the intercept", "Name them: 'y ~ a + b'.")
    return pd.DataFrame(y), X


def group_terms(formula: str) -> tuple[str, list[tuple[str, str]]]:
    """Split terms such as ``(1 + x | clinic)`` off a formula, which may have ``||``, too.

    :return: the formula without them, and for each effect the column of its slope, ``"1"`` for an
        intercept, and that of its groups.
    """
    # signs in quoted names are none
    signs = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", lambda quoted: "_" * len(quoted[0]), formula)
    kept, terms, end, first, depth = "", [], 0, 0, 0
    for at, sign in enumerate(signs):
        depth += (sign == "(") - (sign == ")")
        if sign == "(" and depth == 1:
            first = at
        if sign != ")" or depth or "|" not in signs[first:at]:
            continue
        before, after = formula[end:first].rstrip(), signs[at + 1 :].lstrip()[:1]
        # other operators are left to the errors of `sides`
        if before[-1:] in ("~", "+") and after in ("", "+"):
            bar = signs.index("|", first)
            names = [x.strip("`") for x in re.findall("`[^`]*`|[^+\\s]+", formula[first + 1 : bar])]
            group = formula[bar + 1 : at].strip("| `")
            slopes = [x for x in names if x not in ("0", "1")]
            terms += [(x, group) for x in (slopes if "0" in names else ["1", *slopes])]
            kept += before.removesuffix("+").rstrip() + " 1" * before.endswith("~")
            end = at + 1
    return kept + formula[end:], terms


def model_matrix(argument: str, source: Any, data: Any) -> Any:
    """Make columns of a table by a part of a formula or by the spec of columns that it has made.

    :raises ValueError: if it lacks values, columns or levels, with their names and rows.
    """
    from formulaic.errors import DataMismatchWarning

    frame = in_pandas(argument, data)
    if not isinstance(frame, pd.DataFrame):
        got = "None" if data is None else f"a {type(data).__name__}"
        remedy = "pandas, polars and pyarrow make them; so does pandas.DataFrame of a dict."
        raise bad(argument, got, "a table with names of columns", remedy)
    frame = plain_columns(frame)
    check_levels(argument, source, frame)
    try:
        with warnings.catch_warnings():
            # it would take categories that are new for the first one
            warnings.simplefilter("error", DataMismatchWarning)
            # the gaps that come of it are named
            warnings.simplefilter("ignore", RuntimeWarning)
            numbered = frame.set_axis(range(len(frame)))
            made = source.get_model_matrix(numbered, na_action="drop")
    # the terms may call any function
    except Exception as error:
        raise failure(argument, source, frame, error) from None
    if len(made) < len(frame):
        gaps = np.setdiff1d(numbered.index, made.index).tolist()
        raise gaps_in(argument, named_in(source, frame), gaps)
    made.index = frame.index
    return made


def named_in(source: Any, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that a formula names."""
    words = re.findall(r"\w+|(?<=`)[^`]+(?=`)", str(getattr(source, "formula", source)))
    return frame[[name for name in frame if name in words]]


def gaps_in(argument: str, frame: pd.DataFrame, rows: Any) -> ValueError:
    """Make the error for rows with gaps."""
    names = frame.columns[frame.isna().any()].tolist()
    got = f"gaps in {len(rows)} of {len(frame)} rows, {some(frame.index[rows].tolist())}"
    expected = f"none in {some(names)}" if names else "terms that are numbers for all rows"
    remedy = "Leave these rows out (dropna of pandas, drop_nulls of polars), or impute the values."
    return bad(argument, got, expected, remedy)


def failure(argument: str, source: Any, frame: pd.DataFrame, error: Exception) -> ValueError:
    """Make the error for a table that a formula does not take, from that of formulaic."""
    from formulaic.errors import DataMismatchWarning

    cause, used = error.__cause__, named_in(source, frame)
    if isinstance(cause, NameError):
        return unknown_name(argument, re.split("['`]", str(cause))[1], str(source), frame)
    if isinstance(error, DataMismatchWarning):
        return bad(argument, "new levels", "those of `data`, which the formula names", LEVELS)
    if (gaps := used.isna().any(axis=1)).any():
        return gaps_in(argument, used, np.flatnonzero(gaps).tolist())
    if dates := [name for name, dtype in used.dtypes.items() if dtype.kind in "mM"]:
        return bad(argument, f"dates in {dates}", "numbers or categories", UNIT)
    term = ", ".join(re.findall("`.+?`", str(error))[:1]) or "a term"
    if isinstance(cause, ValueError) and hasattr(source, "encoder_state"):
        remedy = "Leave these rows out, or say what a spline is there: bs(a, extrapolation='clip')."
        return bad(argument, f"rows out of the range of {term}", "the range of `data`", remedy)
    remedy = "Make a column of it in `data` first, which shows what is wrong."
    return bad(argument, f"columns for which {term} fails", "numbers or categories", remedy)


def unknown_name(argument: str, name: str, formula: str, frame: pd.DataFrame) -> ValueError:
    """Make the error for a name that is no column."""
    if name in ARGUMENTS:
        remedy = f"Leave it out, and give `{ARGUMENTS[name]}` beside the formula."
        return bad("X", f"`{name}()` in a formula", "terms with weights, and `y ~`", remedy)
    if f"{name}(" in formula:
        expected = "those of formulaic, as bs, poly and C, or of numpy"
        return bad("X", f"the unknown function {name!r}", expected, f"Is it `np.{name}`?")
    names = [*map(str, frame)]
    near = difflib.get_close_matches(name, names, 3)
    remedy = f"Is it {' or '.join(near)}?" if near else f"The columns are {some(names)}."
    return bad(argument, f"no column {name!r}", "all that the formula names", remedy)


def check_levels(argument: str, source: Any, frame: pd.DataFrame) -> None:
    """Refuse levels of categories that a regression has not seen, and numbers in their place."""
    for factor, (_, state) in getattr(source, "encoder_state", {}).items():
        # of a column itself: functions of it have other levels
        for name in {factor, factor.removeprefix("C(").split(",")[0].rstrip(")")} & {*frame}:
            known = [*state.get("categories", frame[name])]
            new = frame[name][~frame[name].isin(known)].dropna()
            if len(new):
                levels, rows = some(new.unique().tolist()), some(new.index.tolist())
                got = f"the levels {levels} of {name!r} in rows {rows}"
                raise bad(argument, got, f"one of {some(known)}", LEVELS)
