# SPDX-License-Identifier: Apache-2.0
"""Compiled code that other processes of the same user need not compile again."""

from collections.abc import Iterator
from contextlib import contextmanager
import ctypes
import os
from pathlib import Path
import sys

import platformdirs

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

VARIABLE = "NUMPYRO_SPIKESLAB_CACHE"
"""The environment variable that names the folder; 0 for none."""

SETTINGS = {
    "jax_compilation_cache_dir": None,
    # the least recently used code goes; JAX locks the folder then, so processes may share it
    "jax_compilation_cache_max_size": 1 << 28,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # files that JAX would not count
    "jax_persistent_cache_enable_xla_caches": "none",
}
"""JAX's settings, with the folder still to be set. JAX looks code up by the program, the versions
of JAX and XLA, and the machine."""


def folder_of_code() -> Path | None:
    """Return the folder; `None` if the user has one for JAX, wants none, or cannot write."""
    choice = os.environ.get(VARIABLE)
    is_users = jax.config.jax_compilation_cache_dir is not None
    if choice == "0" or is_users or not jax.config.jax_enable_compilation_cache:
        return None
    folder = Path(choice or platformdirs.user_cache_path("numpyro_spikeslab", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@contextmanager
def kept_code() -> Iterator[None]:
    """Keep compiled code in the user's cache folder, and take known code from there.

    JAX's own settings are put back, so models of the user's are compiled as if this never was.
    """
    if (folder := folder_of_code()) is None:
        yield
        return
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    try:
        set_cache(SETTINGS | {"jax_compilation_cache_dir": str(folder)})
        yield
    finally:
        set_cache(before)


def set_cache(settings: dict) -> None:
    """Set JAX's settings of its cache, which it reads once unless the cache is reset."""
    for name, value in settings.items():
        jax.config.update(name, value)
    reset_cache()


def give_back() -> None:
    """Return to the system what XLA's compiler has freed: 0.3 GB, which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
