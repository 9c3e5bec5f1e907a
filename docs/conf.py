# SPDX-License-Identifier: Apache-2.0
"""Configuration of Sphinx: `sphinx-build -W docs docs/_build`."""

import base64
from importlib.metadata import version as installed_version
import io
import json
from pathlib import Path
from typing import Any

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
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
# the source of a notebook is no page to read
html_theme_options = {"top_of_page_buttons": []}
html_copy_source = False

myst_enable_extensions = ["amsmath", "dollarmath"]
# notebooks are stored with their outputs
nb_execution_mode = "off"
# equations that are wider than their column continue on the next line
mathjax4_config = {"output": {"displayOverflow": "linebreak"}}

autodoc_member_order = "bysource"
autodoc_typehints = "none"


def picture_of(notebook: Path) -> Image.Image:
    """Return the picture of the cell with the tag `thumbnail`, or else the first one."""
    cells = json.loads(notebook.read_text())["cells"]
    tagged = [cell for cell in cells if "thumbnail" in cell["metadata"].get("tags", ())]
    outputs = [o.get("data", {}) for cell in tagged or cells for o in cell.get("outputs", ())]
    encoded = next(output["image/png"] for output in outputs if "image/png" in output)
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


def save_thumbnails(app: Any, exception: Exception | None) -> None:
    """Save a picture of each notebook, as wide as a page, beside the pages that show it."""
    if exception or app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static" / "thumbnails"
    folder.mkdir(exist_ok=True)
    for path in Path(app.srcdir).glob("*.ipynb"):
        image = picture_of(path)
        image.thumbnail((736, 736))
        image.save(folder / f"{path.stem}.png")


def setup(app: Any) -> None:
    app.connect("build-finished", save_thumbnails)
