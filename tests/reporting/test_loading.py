# SPDX-License-Identifier: Apache-2.0
"""Tables and pictures are loaded when they are first used."""

import subprocess
import sys

import pytest

import numpyro_spikeslab as nss

LATE = ("arviz_base", "arviz_stats", "arviz_plots", "matplotlib", "pandas", "xarray")


def test_importing_the_package_loads_no_tables():
    code = f"import sys, numpyro_spikeslab; print([m for m in {LATE} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", nss.__all__)
def test_all_names_are_there(name):
    assert name in dir(nss)
    assert getattr(getattr(nss, name), "__name__", "").rpartition(".")[2] == name


def test_unknown_names():
    with pytest.raises(AttributeError, match="has no attribute 'plot_nothing'"):
        _ = nss.plot_nothing
