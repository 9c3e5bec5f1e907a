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

`python docs/benchmarks/page.py` made this page. The figures of a row come from one run.

"""
OTHERS = """\
## Beside others

A ratio above 1 is in favour of this package. Compilation is left out. Where this package predicts
worse than another is in the last row of the table of [what was measured once](#measured-once).

"""
ITSELF = """\
## Beside itself

What options and likelihoods cost: a ratio below 1 is the price. `collapsed=False` leaves out flips
and swaps, so that pairs are drawn one by one. The first call includes compilation.

"""
SAME = "| itself: "
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


def table(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in (*HEADER.splitlines(), *lines))


def main() -> None:
    facts = f"- {strftime('%B %Y')}; {machine()}\n- {versions()}\n"
    lines = [line for name in PROGRAMS for line in rows(f"bench_{name}.py").splitlines()]
    of_itself = [line for line in lines if SAME in line]
    others = [line for line in lines if SAME not in line]
    once = (HERE / "measured_once.md").read_text()
    tables = f"{OTHERS}{table(others)}\n{ITSELF}{table(of_itself).replace(SAME, '| ')}"
    PAGE.write_text(f"{TOP}{facts}\n{tables}\n{once}")


if __name__ == "__main__":
    main()
