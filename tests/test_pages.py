# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation and the README: each page's blocks are one script, which runs in
NumPyro's default precision and without warnings; names and modules are where readers look."""

import ast
from contextlib import chdir
from pathlib import Path
import re
from typing import Any

import numpy as np
import pytest

import jax

import numpyro_spikeslab as nss

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# a page that repeats lines of another one
EXCERPTS = {"docs/index.md": "docs/start.md"}
# stricter than the other tests, which may end a fit while its bound still moves
pytestmark = pytest.mark.filterwarnings("error")


def blocks(page: str) -> list[str]:
    """The Python blocks, in order, each at its line of the file for error messages."""
    text = (ROOT / page).read_text()
    matches = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in matches]


def run_script(page: str, folder: Path) -> dict[str, Any]:
    """Return the variables of the script."""
    names: dict[str, Any] = {"__name__": "page"}
    with chdir(folder):
        for block in blocks(page):
            exec(compile(block, str(ROOT / page), "exec"), names)
    return names


PATHS = [
    ROOT / "README.md",
    *sorted(p for p in DOCS.rglob("*.md") if p.parent.name != "benchmarks"),
]
ALL_PAGES = [path.relative_to(ROOT).as_posix() for path in PATHS]
SCRIPTS = [page for page in ALL_PAGES if page not in EXCERPTS and blocks(page)]


@pytest.fixture
def restored_config():
    """Put back what a page changes in JAX."""
    before = dict(jax.config.values)
    yield
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.mark.usefixtures("restored_config")
@pytest.mark.parametrize("page", SCRIPTS)
def test_the_blocks_of_a_page_run_and_find_what_is_there(page, tmp_path):
    assert not jax.config.jax_enable_x64
    names = run_script(page, tmp_path)
    if page in CHECKS:
        CHECKS[page](names, tmp_path)


@pytest.mark.parametrize("page", EXCERPTS)
def test_excerpts_are_lines_of_the_script(page):
    script = [line.strip() for block in blocks(EXCERPTS[page]) for line in block.splitlines()]
    for line in "".join(blocks(page)).split("\n"):
        assert line.partition("  #")[0].strip() in script


def test_blocks_that_do_not_run_say_why():
    for page in ALL_PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```\{code-block\} python\n(.*)$", text, re.MULTILINE):
            assert match[1].startswith(":caption: Needs"), (page, match[1])


def test_each_public_name_has_a_place_in_the_reference():
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^\.\. auto\w+:: numpyro_spikeslab\.([\w.]+)", pages, re.MULTILINE))
    names = set(nss.__all__) - {"datasets", "models"}
    names |= {f"datasets.{name}" for name in nss.datasets.__all__}
    names |= {f"models.{name}" for name in nss.models.__all__}
    assert not sorted(names - listed)


def test_the_table_of_modules_is_complete_and_says_what_they_say():
    table = (DOCS / "architecture.md").read_text().replace("`", "")
    for path in (ROOT / "numpyro_spikeslab").rglob("[!_]*.py"):
        summary = str(ast.get_docstring(ast.parse(path.read_text()))).split(".\n")[0].rstrip(".")
        row = f"| {path.name} | {' '.join(summary.split())} |".replace("`", "")
        assert row in table


FLOORS = {"support": 1, "algebra": 2, "models": 3, "reporting": 3, "reading": 4}
FLOORS |= {"fitting": 5, "sampling": 5, "tables": 6}


def imported(path):
    """The folders of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(nss.__name__):
            yield (node.module.split(".") + [node.names[0].name])[1]


@pytest.mark.parametrize("folder", FLOORS)
def test_a_file_imports_from_its_folder_and_from_lower_floors(folder):
    page = (DOCS / "architecture.md").read_text()
    assert f"| {FLOORS[folder]} | **{folder}/** |" in page
    lower = {name for name, floor in FLOORS.items() if floor < FLOORS[folder]}
    files = list((ROOT / "numpyro_spikeslab" / folder).glob("*.py"))
    assert len(files) > 3
    for path in files:
        assert set(imported(path)) <= lower | {folder}, path


def the_readme_finds_what_is_there(names, folder):
    assert (folder / "inclusion.png").stat().st_size > 10_000
    used = np.isin(np.arange(20), [3, 7])
    spikes = names["chains"]["posterior"]["w_spike"].mean(["chain", "draw"]).values
    for inclusion in (spikes, names["guide"].inclusion_probabilities(names["result"].params)["w"]):
        assert np.all(inclusion[used] > 0.99) and np.all(inclusion[~used] < 0.1)
    means = names["guide"].posterior_mean(names["result"].params)["w"]
    np.testing.assert_allclose(means[used], [2.0, -0.5], atol=0.06)
    # new observations: the intercept, and the two weights' and the noise's part of the variance
    assert names["y_new"].shape == (1000, 200)
    np.testing.assert_allclose(names["y_new"].mean(), 1.0, atol=0.3)


def the_first_page_finds_two_columns_and_a_pair_of_copies(names, folder):
    probs = names["table"]["inclusion"].to_numpy()
    assert min(probs[[17, 22]]) > 0.99 and 0.95 < probs[4] + probs[11] < 1.1
    # as on the page, to the noise of 4,000 draws
    np.testing.assert_allclose(probs[[4, 11]], [0.69, 0.36], atol=0.05)
    assert {*names["sets"]["members"]} == {(17,), (22,), (4, 11)}
    assert names["mean"].shape == (5,) and names["interval"].shape == (2, 5)
    assert (folder / "start.png").stat().st_size > 10_000


def a_regression_finds_two_of_four_columns(names, folder):
    assert np.all((names["table"]["inclusion"] > 0.9) == [False, True, True, False])
    assert names["new"].shape == (5,) and (folder / "result.nc").exists()


def the_page_of_wide_tables_shows_an_empty_fit_beside_chains(names, folder):
    assert names["found"].max() < 0.5 and 0.0 < names["scale"] < 0.05
    assert any("has fallen to 0.019" in str(warning.message) for warning in names["told"])
    np.testing.assert_allclose(names["found_fixed"][0], 0.84, atol=0.01)
    # to the noise of 2,000 draws
    np.testing.assert_allclose(names["table"]["inclusion"]["w[0]"], 0.42, atol=0.08)
    assert 2.0 < names["sizes"].mean() < 4.0


def the_hierarchical_page_finds_effects_and_the_spread_of_groups(names, folder):
    for name, copies, last in ("sd_clinic", "x0 x1", "x5"), ("tau", "0 1", "5"):
        table = names["effects" if name == "sd_clinic" else "own"]
        either = table["inclusion"][[f"w[{k}]" for k in copies.split()]].sum()
        assert table["inclusion"][f"w[{last}]"] > 0.99 and either > 0.95
        assert table["r_hat"].max() < 1.03
        assert abs(table["mean"][name] - names["level"].std()) < 3 * table["sd"][name]


def the_page_of_tables_reports_what_made_the_data(names, folder):
    inclusion = names["effects"]["inclusion"]
    assert inclusion["w[bmi]"] > 0.9 and inclusion["w[C(region)]"] > 0.9
    assert abs(names["effects"]["effect"]["w[bmi]"] - 1.2) < 0.6
    assert names["with_gaps"]["inclusion"]["w[bmi]"] > 0.9
    middle, visits = names["middle"].values, names["a_year"].mean(["chain", "draw"])
    assert np.all(np.diff(middle) > 0) and names["patients"].isin([0, 1]).all()
    np.testing.assert_allclose(visits, np.exp([-0.5, 0.0, 0.5]), rtol=0.3)
    np.testing.assert_allclose(names["two_years"], 2 * names["a_year"], rtol=1e-6)


CHECKS = {
    "README.md": the_readme_finds_what_is_there,
    "docs/start.md": the_first_page_finds_two_columns_and_a_pair_of_copies,
    "docs/hierarchical.md": the_hierarchical_page_finds_effects_and_the_spread_of_groups,
    "docs/tables.md": the_page_of_tables_reports_what_made_the_data,
    "docs/wide.md": the_page_of_wide_tables_shows_an_empty_fit_beside_chains,
    "docs/reference/regression.md": a_regression_finds_two_of_four_columns,
}
