# SPDX-License-Identifier: Apache-2.0
"""What a formula does not take is named in words of the package, with a remedy."""

from decimal import Decimal

import numpy as np
import pandas as pd
import polars as pl
import pytest

from numpyro_spikeslab.support.formulas import group_terms, model_matrix, sides
from numpyro_spikeslab.tables.formula import formula_table

pytestmark = pytest.mark.filterwarnings("error")
pytest.importorskip("formulaic")

NUMBERS = np.random.default_rng(0).normal(size=(8, 3))
DATA = pd.DataFrame(NUMBERS, [*range(100, 108)], ["y", "age", "dose"]).assign(
    kind=list("abcb") * 2, day=pd.date_range("2020-01-01", periods=8), other=1.0
)
GAPS = DATA.assign(dose=[1, 2, np.nan, 4, 5, 6, np.nan, 8], kind=[*"abcabca", None])
FORMULAS = {
    "age + dose": "X: .* one with one response, 'y ~ a [+] b'. The response stands before",
    "y ~ age | dose": "X: .* without `[|]`",
    "y ~ age * (1 | kind)": "X: .* random effects as terms. Add them in brackets: `y",
    "y + other + dose ~ age": r"X: .* not \['y', 'other', 'dose'\]. Regress each response by",
    "Surv(y, other) ~ age": r"X: got `Surv\(\)` .* give `event=data\['event'\]` beside",
    "cbind(y, other) ~ age": r"X: got `cbind\(\)` .* give `totals=data\['total'\]` beside",
    "kind ~ age": "X: .* not .*'kind.a.'.* Write a class as `{kind == 'yes'} ~ a [+] b`",
    "y ~ .": "X: .* names of columns instead of `.`. `X=data.drop",
    "y ~ 1": "X: .* expected columns beside the intercept",
    "y ~ 0 + age": "X: .* with an intercept. Leave out `0 [+]`",
    "y ~ age +": "X: got the formula 'y ~ age [+]', expected one that can be read",
    "y ~ (age": "X: .* brackets are closed",
    "y ~ {age +}": "X: .* expected one that can be read",
    "y ~ ages": "data: got no column 'ages', .* Is it age[?]",
    "y ~ bs(doze, 4)": "data: got no column 'doze', .* Is it dose[?]",
    "y ~ weight": r"data: got no column 'weight', .* The columns are \['y'",
    "y ~ offset(age)": "X: got `offset\\(\\)` .* give `offset=data",
    "y ~ sqrt(age)": "X: got the unknown function 'sqrt', .* Is it `np.sqrt`[?]",
    "y ~ day": r"data: got dates in \['day'\], .* in a unit",
    "y ~ np.log(kind)": "data: got columns for which `np.log\\(kind\\)` fails",
    "y ~ C(kind, levels=['a'])": "data: got new levels",
    "y ~ np.log(age)": r"data: got gaps in 6 of 8 rows, \[100, .* for all rows. Leave .* imp",
}
TABLES = {
    "gaps": (GAPS, r"data: got gaps in 3 of 8 rows, \[102, 106, 107\], .* in \['dose', 'kind'\]"),
    "nulls": (
        pl.DataFrame(GAPS.astype(object).replace(np.nan, None).to_dict("list")),
        r"got gaps in 3 of 8 rows, \[2, 6, 7\], .* drop_nu",
    ),
    "lazy": (pl.LazyFrame(DATA.to_dict("list")), "data: got a LazyFrame, .*data.collect"),
    "array": (DATA.to_numpy(), "data: got a ndarray, expected a table with names"),
    "nothing": (None, "data: got None, expected a table with names"),
    "mapping": (dict(DATA), "data: got a dict, .* pandas.DataFrame"),
}
NEW = {
    "a level": (
        DATA.assign(kind=[*"abcabc", "z", "q"]),
        r"\['z', 'q'\] of 'kind' in rows \[106, 107\]",
    ),
    "numbers": (DATA.assign(kind=1), r"levels \[1\] of 'kind' in rows .* one of \['a', 'b', 'c'\]"),
    "gaps": (GAPS, r"gaps in 3 of 8 rows, \[102, 106, 107\]"),
    "a gap": (
        DATA.assign(age=[np.nan, *range(7)]),
        r"gaps in 1 of 8 rows, \[100\], .* in \['age'\]",
    ),
    "range": (DATA.assign(dose=1e6), "rows out of the range of `bs.dose, 4.`"),
    "a column less": (DATA.drop(columns="dose"), "no column 'dose'"),
}


def refused(act, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        act()
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_are_refused_in_plain_words(formula):
    refused(lambda: sides(formula, DATA), FORMULAS[formula])


@pytest.mark.parametrize(
    ("formula", "without", "terms"),
    [
        ("y ~ age + (1 | kind)", "y ~ age", [("1", "kind")]),
        ("y ~ (age|kind) + dose", "y ~ 1 + dose", [("1", "kind"), ("age", "kind")]),
        (
            "y ~ a + (0 + `a (|b` + c || `k k`) + (1|d) + bs(a, 4)",
            "y ~ a + bs(a, 4)",
            [("a (|b", "k k"), ("c", "k k"), ("1", "d")],
        ),
        ("y ~ a*(b + C(c)) + `(1 | d)`", "y ~ a*(b + C(c)) + `(1 | d)`", []),
    ],
)
def test_random_effects_are_split_off_a_formula(formula, without, terms):
    assert group_terms(formula) == (without, terms)


GROUPED = DATA.assign(same="a", half=0.5, site=[1, 2] * 4, row=1, hole=[None, *"abcdefg"])
EFFECTS = {
    "(1 | kind)": "X: .* expected columns beside the intercept",
    "age + (1 | clinic)": "data: got no column 'clinic', .* The columns are",
    "age + (age + doze | kind)": "data: got no column 'doze', .* Is it dose",
    "age + (1 | same)": "data: the group 'same': got the level 'a' in all rows, .* two",
    "age + (1 | half)": r"data: the group 'half': got numbers with decimals, \[0.5, .* `pandas.cut",
    "age + (1 | hole)": r"data: got gaps in 1 of 8 rows, \[100\], .* in \['hole'\]",
    "age + (other | kind)": "data: the slope 'other': got the same in all rows",
    "age + (kind | site)": "data: got the str 'a' in row 100",
    "age + (1 | kind) + (1 | kind)": "data: the group 'kind': got two terms alike",
    "age + (1 | row)": "data: the group 'row': got a name that the result needs",
}


@pytest.mark.parametrize("term", EFFECTS)
def test_random_effects_are_refused_in_plain_words(term):
    act = lambda: formula_table(f"y ~ {term}", None, GROUPED, None, ())  # noqa: E731
    refused(act, EFFECTS[term])


def test_levels_of_groups_are_not_too_many():
    data = pd.DataFrame({"y": range(600), "x": range(600), "unit": range(600)})
    with pytest.raises(ValueError, match=r"^data: got 600 levels of groups in 600 rows, .* Join"):
        formula_table("y ~ x + (1 | unit)", None, data, None, ())


@pytest.mark.parametrize("case", TABLES)
def test_tables_are_refused_in_plain_words(case):
    data, message = TABLES[case]
    refused(lambda: sides("y ~ age + kind + bs(dose, 4)", data), f".*{message}")


@pytest.mark.parametrize("case", NEW)
def test_new_rows_are_refused_in_plain_words(case):
    data, message = NEW[case]
    spec = sides("y ~ age + C(kind) + bs(dose, 4)", DATA)[1].model_spec
    refused(lambda: model_matrix("X_new", spec, data), f"X_new: got .*{message}")


COUNTS = np.arange(8) % 3
NUMBERS_OF_ALL_KINDS = {
    "nullable": DATA.assign(age=pd.array(COUNTS, dtype="Int64")),
    "nullable floats": DATA.assign(age=pd.array(COUNTS, dtype="Float64")),
    "objects": DATA.assign(age=COUNTS.astype(object)),
    "decimals": DATA.assign(age=[Decimal(int(x)) for x in COUNTS]),
    "sparse": DATA.assign(age=pd.arrays.SparseArray(COUNTS)),
    "decimals of polars": pl.DataFrame({"y": DATA["y"], "age": [Decimal(int(x)) for x in COUNTS]}),
}


@pytest.mark.parametrize("case", NUMBERS_OF_ALL_KINDS)
def test_numbers_of_all_kinds_are_no_categories(case):
    _, table = sides("y ~ age", NUMBERS_OF_ALL_KINDS[case])
    np.testing.assert_array_equal(table["age"], COUNTS)


DATES = {
    "zone": pd.date_range("2020-01-01", periods=8, tz="Europe/Vienna"),
    "periods": pd.period_range("2020-01-01", periods=8, freq="D"),
    "objects": pd.date_range("2020-01-01", periods=8).date,
}


@pytest.mark.parametrize("case", DATES)
def test_dates_of_all_kinds_are_no_categories(case):
    refused(lambda: sides("y ~ day", DATA.assign(day=DATES[case])), r"data: got dates in \['day'\]")


def test_a_formula_reads_tables_of_polars():
    kinds = pl.Enum(["c", "a", "b"])
    data = pl.DataFrame(DATA.to_dict("list")).with_columns(pl.col("kind").cast(kinds))
    same = DATA.assign(kind=pd.Categorical(DATA["kind"], ["c", "a", "b"]))
    tables = [
        formula_table("y ~ age * kind + bs(dose, 4)", None, x, None, ()) for x in (data, same)
    ]
    assert tables[0].labels is None and tables[1].labels.equals(DATA.index)
    assert "kind[T.a]" in tables[0].X
    pd.testing.assert_frame_equal(tables[0].X, tables[1].X.reset_index(drop=True))
    assert tables[0].groups == tables[1].groups and tables[0].parents == tables[1].parents
