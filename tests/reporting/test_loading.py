# SPDX-License-Identifier: Apache-2.0
"""Names of the package, and when modules are loaded."""

import subprocess
import sys

import pytest

import numpyro_spikeslab as nss

LATE = ("arviz_base", "arviz_stats", "arviz_plots", "matplotlib", "pandas", "xarray")


def test_importing_the_package_loads_no_tables_and_needs_no_scikit_learn():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "import numpyro_spikeslab\n"
        f"print([m for m in {LATE} if m in sys.modules])\n"
        "from numpyro_spikeslab import *\n"
        "try:\n    SparseRegressor()\n"
        "except ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, _, error = done.stdout.partition("\n")
    assert loaded == "[]"
    assert "pip install -U scikit-learn" in error


@pytest.mark.parametrize("name", nss.__all__)
def test_all_names_exist(name):
    assert name in dir(nss)
    assert getattr(getattr(nss, name), "__name__", "").rpartition(".")[2] == name


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'plot_nothing'"):
        _ = nss.plot_nothing
