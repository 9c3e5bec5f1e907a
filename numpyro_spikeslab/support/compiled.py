# SPDX-License-Identifier: Apache-2.0
"""Programs and compiled code that other processes of the same user need not make again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
import ctypes
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
import os
from pathlib import Path
import pickle
import sys
from typing import Any

import platformdirs

import jax
from jax import export
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

MOST_PROGRAMS = 64
"""Programs in the folder, of a third of a megabyte each; the least recently used goes."""

# the folder while it is in use
_folders: list[Path] = []


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
        _folders.append(folder)
        yield
    finally:
        _folders.remove(folder)
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


def kept_jit(function: Callable[..., Any], static_argnums: Sequence[int], **options: Any) -> Any:
    """Make a ``jax.jit`` whose trace is kept beside the compiled code, for it takes as long.

    :param function: depends on nothing but its arguments, this package, NumPyro and JAX; static
        arguments of equal ``repr`` are the same.
    """

    def called(*args: Any) -> Any:
        # programs of several devices, and of GPUs, are not portable
        if not _folders or jax.default_backend() != "cpu" or jax.device_count() > 1:
            return function(*args)
        places = [k for k in range(len(args)) if k not in static_argnums]
        leaves, tree = jax.tree.flatten([args[k] for k in places])
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        static = [args[k] for k in static_argnums]
        digest = _digest(function.__qualname__, repr((static, tree, shapes)))
        path, structures = _folders[-1] / f"{digest}.program", []

        def run(*leaves: Any) -> Any:
            arrays = dict(zip(places, jax.tree.unflatten(tree, leaves), strict=True))
            results = function(*(arrays.get(k, x) for k, x in enumerate(args)))
            structures.append(jax.tree.structure(results))
            return jax.tree.leaves(results)

        try:
            stored, structure = pickle.loads(path.read_bytes())
            program = export.deserialize(bytearray(stored))
            path.touch()
        except FileNotFoundError:
            program = export.export(jax.jit(run))(*shapes)
            structure = structures[0]
            _store(path, pickle.dumps((bytes(program.serialize()), structure)))
        return jax.tree.unflatten(structure, program.call(*leaves))

    return jax.jit(called, static_argnums=static_argnums, **options)


def _digest(*texts: str) -> str:
    """Hash texts, JAX's configuration, and all sources that a program depends on."""
    settings = sorted((k, getattr(jax.config, k, x)) for k, x in jax.config.values.items())
    return blake2b(repr((texts, settings, _sources())).encode(), digest_size=20).hexdigest()


@cache
def _sources() -> list[str]:
    package = sorted(Path(__file__).parents[1].rglob("*.py"))
    names = "jax", "jaxlib", "numpyro", "tinygp"
    return [*map(version, names), *(blake2b(x.read_bytes()).hexdigest() for x in package)]


def _store(path: Path, content: bytes) -> None:
    """Write a file that other processes see when it is whole, and drop the oldest ones."""
    part = path.with_suffix(f".{os.getpid()}")
    # a full disk, or a file that another process drops, costs time and no result
    with suppress(OSError):
        part.write_bytes(content)
        part.replace(path)
        files = sorted(path.parent.glob("*.program"), key=lambda x: x.stat().st_mtime)
        for old in files[:-MOST_PROGRAMS]:
            old.unlink(missing_ok=True)
