# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests."""

from collections.abc import Iterator
import gc
import os
from pathlib import Path
import tempfile

# Before numpy and scipy read it: the processes of a test run share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Most of the time of small tests is compilation. Empty, for XLA's usual optimisation, suits the
# slow ones.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jaxtyping
import pytest

import jax

# Programs that are traced are many objects, which the default thresholds scan again and again.
gc.set_threshold(100_000, 50, 100)

# read when matplotlib is first imported
os.environ["MPLBACKEND"] = "Agg"

DURATIONS = Path(__file__).with_name("durations.txt")
"""The seconds of one core that tests take, and their names; `pytest --measure` writes them."""

SLOW, EXHAUSTIVE, LONG = 1.0, 2.0, 15.0
"""The seconds from which a test is slow, exhaustive if another case is quicker, and in any case."""

lines = DURATIONS.read_text().splitlines() if DURATIONS.exists() else []
durations = {name: float(seconds) for seconds, name in (line.split(" ", 1) for line in lines)}


def core_seconds() -> float:
    """Return how long this process and those that it started have computed."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option that measures."""
    parser.addoption("--measure", action="store_true", help="store how long the tests take")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long; a test that is not listed is quick. The quickest case of a parametrised
    test may take long, so that nearly all claims are tested without the exhaustive ones."""
    seconds = {item: durations.get(item.nodeid, 0.0) for item in items}
    quickest: dict[str, pytest.Item] = {}
    for item in items:
        first = quickest.setdefault(item.nodeid.partition("[")[0], item)
        if seconds[item] < seconds[first]:
            quickest[item.nodeid.partition("[")[0]] = item
    kept = set(quickest.values())
    for item in items:
        if seconds[item] >= SLOW:
            item.add_marker("slow")
        if seconds[item] >= (LONG if item in kept else EXHAUSTIVE):
            item.add_marker("exhaustive")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Start the clock of a test."""
    item.user_properties.append(("core seconds", -core_seconds()))
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Stop the clock of a test."""
    yield
    item.user_properties.append(("core seconds", core_seconds()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took, also one of another process."""
    if report.when == "teardown":
        seconds = sum(value for key, value in report.user_properties if key == "core seconds")
        durations[report.nodeid] = round(seconds, 1 if seconds < 10 else None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Store how long the tests took, if asked to; those that did not run keep what they have."""
    if session.config.getoption("measure") and not hasattr(session.config, "workerinput"):
        rows = sorted((name, seconds) for name, seconds in durations.items() if seconds >= SLOW)
        DURATIONS.write_text("".join(f"{seconds:g} {name}\n" for name, seconds in rows))


def pytest_configure(config: pytest.Config) -> None:
    """Share compiled code with the other processes, which inherit the folder."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if cache is None:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
    settings = {
        "jax_compilation_cache_dir": cache or folder.name,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def restored_x64() -> Iterator[None]:
    """Put back the precision that a test, or `numpyro.enable_x64`, has changed."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def few_mappings() -> Iterator[None]:
    """Forget compiled code before XLA crashes for want of memory mappings."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64(restored_x64: None) -> None:
    """Compute in float64 during one test."""
    jax.config.update("jax_enable_x64", True)


@pytest.fixture
def x32(restored_x64: None) -> None:
    """Compute in float32 during one test, also where JAX_ENABLE_X64 is set."""
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(params=["float32", "float64"])
def precision(request: pytest.FixtureRequest, restored_x64: None) -> Iterator[str]:
    """Run a test once in each precision, without rounded products; it gets the name."""
    jax.config.update("jax_enable_x64", request.param == "float64")
    with jax.default_matmul_precision("float32"):
        yield request.param


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Leave annotations unchecked during one test, which passes wrong types on purpose."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
