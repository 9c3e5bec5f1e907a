# SPDX-License-Identifier: Apache-2.0
"""Configuration of Sphinx: `sphinx-build -W docs docs/_build`."""

from importlib.metadata import version as installed_version

project = "numpyro_spikeslab"
project_copyright = "the authors of numpyro_spikeslab"
version = release = installed_version("numpyro_spikeslab")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"{project} {version}"

myst_enable_extensions = ["amsmath", "dollarmath"]
# notebooks are stored with their outputs
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "none"
