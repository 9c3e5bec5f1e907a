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


def pytest_configure(config: pytest.Config) -> None:
    """What one process has compiled serves the others, which inherit the folder."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if given is None:
        folder = tempfile.TemporaryDirectory()
        config.add_cleanup(folder.cleanup)
    settings = {
        "jax_compilation_cache_dir": given or folder.name,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def restored_x64() -> Iterator[None]:
    """Puts back the precision that a test, or `numpyro.enable_x64`, has changed."""
    before = jax.config.jax_enable_x64
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """Forgets compiled code before it takes more memory mappings than Linux gives to a process,
    beyond which XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def x64(restored_x64: None) -> None:
    """Computes in float64 during one test."""
    jax.config.update("jax_enable_x64", True)


@pytest.fixture(params=["float32", "float64"])
def precision(request: pytest.FixtureRequest, restored_x64: None) -> Iterator[str]:
    """Runs a test once in each precision, of which it gets the name; products are not rounded."""
    jax.config.update("jax_enable_x64", request.param == "float64")
    with jax.default_matmul_precision("float32"):
        yield request.param


@pytest.fixture
def strict_ranks() -> Iterator[None]:
    """Refuses to broadcast arrays of different ranks during one test.

    Not for every test: NumPyro's distributions count on it when they draw samples and evaluate
    densities.
    """
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Leaves the annotations unchecked during one test, which passes wrong types on purpose."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
