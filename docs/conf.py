# SPDX-License-Identifier: Apache-2.0
"""Configuration of Sphinx: `sphinx-build -W docs docs/_build`."""

import base64
from importlib.metadata import version as installed_version
import io
import json
from pathlib import Path

from PIL import Image

project = "numpyro_spikeslab"
project_copyright = "the authors of numpyro_spikeslab"
version = release = installed_version("numpyro_spikeslab")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
]
# the programs that make the page of benchmarks, and a part of it
exclude_patterns = ["_build", "benchmarks"]

html_theme = "furo"
html_title = f"{project} {version.partition('+')[0]}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["amsmath", "dollarmath"]
# notebooks are stored with their outputs
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "none"


def save_thumbnail(notebook: Path, folder: Path) -> None:
    """Save the first picture of a notebook, made smaller, for the gallery."""
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    picture = next(output["image/png"] for output in outputs if "image/png" in output)
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    image.thumbnail((736, 736))  # the width of a page
    image.save(folder / f"{notebook.stem}.png")


thumbnails = Path(__file__).parent / "_thumbnails"
thumbnails.mkdir(exist_ok=True)
for path in Path(__file__).parent.glob("*.ipynb"):
    save_thumbnail(path, thumbnails)
