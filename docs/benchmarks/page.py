# SPDX-License-Identifier: Apache-2.0
"""Make docs/benchmarks.md: the programs' rows of this run, and what was measured once.

Run on an idle machine, some ten minutes: ``python docs/benchmarks/page.py``. Rows of the peers
sparsevb and millipede need these packages.
"""

from importlib.metadata import PackageNotFoundError, version
import os
from pathlib import Path
import platform
import re
import subprocess
import sys
from time import perf_counter, strftime

from timing import HEADER

HERE = Path(__file__).parent
PAGE = HERE.with_suffix(".md")
PROGRAMS = ("boston", "mixing", "equal_time", "cavi", "likelihoods", "one_call")
TOP = """\
# Benchmarks

`python docs/benchmarks/page.py` made this page. The figures of a row come from one run, and a
ratio above 1 is in favour of this package. Compilation is left out, except in the last row.

"""
PACKAGES = ("numpyro_spikeslab", "jax", "numpyro", "numpy", "sparsevb", "millipede-regression")


def versions() -> str:
    texts = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            texts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            texts.append(f"without {name}")
    return ", ".join(texts)


def machine() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start"


def rows(program: str) -> str:
    """Run a program in a process of its own; return the rows that it prints."""
    start = perf_counter()
    output = subprocess.run(
        [sys.executable, HERE / program], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    print(f"{program}: {perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return output


def main() -> None:
    facts = f"- {strftime('%B %Y')}; {machine()}\n- {versions()}\n"
    table = "".join(rows(f"bench_{name}.py") for name in PROGRAMS)
    once = (HERE / "measured_once.md").read_text()
    PAGE.write_text(f"{TOP}{facts}\n{HEADER}\n{table}\n{once}")


if __name__ == "__main__":
    main()
