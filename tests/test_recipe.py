# SPDX-License-Identifier: Apache-2.0
"""The recipe of the conda package, beside the requirements that pip reads."""

from pathlib import Path
import re
import tomllib

from packaging.requirements import Requirement
from packaging.version import Version
import pytest

ROOT = Path(__file__).parent.parent
# conda-forge's package without the window toolkits, and that for Python
CONDA = {"matplotlib": "matplotlib-base", "flatbuffers": "python-flatbuffers"}


def lower_bounds(requirements: list[str], python: str) -> dict[str, Version]:
    """The names that conda-forge uses, with the highest of a package's lower bounds."""
    bounds: dict[str, Version] = {}
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        (specifier,) = requirement.specifier
        assert specifier.operator == ">=", f"the recipe has no place for {text}"
        name = CONDA.get(requirement.name, requirement.name)
        version = Version(specifier.version)
        bounds[name] = max(version, bounds.get(name, version))
    return bounds


@pytest.mark.parametrize("section", ["host", "run"])
def test_conda_has_the_requirements_of_pip(section):
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = {
        "host": pyproject["build-system"]["requires"],
        "run": pyproject["project"]["dependencies"],
    }
    python = re.search(r'python_min: "(.*)"', recipe)[1]
    assert Version(python) >= Version(pyproject["project"]["requires-python"].removeprefix(">="))
    lines = re.search(rf"^  {section}:\n((?:    - .*\n)+)", recipe, re.MULTILINE)[1]
    listed = re.findall(r"- ([\w-]+) >=([\d.]+)\n", lines)
    assert {k: Version(v) for k, v in listed} == lower_bounds(requirements[section], python)
    # lines without a bound
    assert len(lines.splitlines()) - len(listed) == {"host": 2, "run": 1}[section]
