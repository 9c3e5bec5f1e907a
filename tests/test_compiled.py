# SPDX-License-Identifier: Apache-2.0
"""Compiled code that other processes need not compile again."""

from collections import Counter
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.support import compiled
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.support.priors import Distributions

FOLDER = "jax_compilation_cache_dir"
HIT, MISS = ("/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder for compiled code, while JAX has none."""
    before = getattr(jax.config, FOLDER)
    jax.config.update(FOLDER, None)
    reset_cache()
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path / "code"))
    yield tmp_path / "code"
    jax.config.update(FOLDER, before)
    reset_cache()


def compute():
    """Compile something new to this process, and count what JAX looked up."""
    events, is_open = Counter(), [True]

    def listen(event, **_):
        events[event] += len(is_open)

    jax.monitoring.register_event_listener(listen)
    result = jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones(3))
    # JAX 0.7 keeps listeners
    is_open.clear()
    return float(result), events[HIT], events[MISS]


kept = in_double_precision(compute)


def files(folder: Path):
    return [x.name for x in folder.glob("*-cache")] if folder.exists() else []


def test_code_is_compiled_once(folder):
    # else parts are known that the folder does not have
    jax.clear_caches()
    first, *counts = kept()
    assert counts[0] == 0 and counts[1] > 0 and files(folder)
    jax.clear_caches()
    assert kept() == (first, counts[1], 0)


def test_models_of_ones_own_keep_the_defaults_of_jax(folder):
    before = {name: getattr(jax.config, name) for name in compiled.SETTINGS}
    kept()
    assert before == {name: getattr(jax.config, name) for name in compiled.SETTINGS}
    stored = files(folder)
    jax.clear_caches()
    # which the first call in double precision has stored under another key, in any case
    assert compute()[1:] == (0, 0) and files(folder) == stored


def test_the_folder_of_the_user_comes_first(folder, tmp_path):
    jax.config.update(FOLDER, str(tmp_path / "users"))
    reset_cache()
    kept()
    assert getattr(jax.config, FOLDER) == str(tmp_path / "users") and not folder.exists()


@pytest.mark.parametrize("place", ["0", "/proc/none"])
def test_nothing_is_kept_where_it_cannot_or_must_not(folder, monkeypatch, place):
    monkeypatch.setenv(compiled.VARIABLE, place)
    monkeypatch.setattr(compiled.platformdirs, "user_cache_path", lambda *_, **__: folder)
    assert kept()[1:] == (0, 0) and not folder.exists()


def test_the_folder_does_not_grow_without_bound(folder, monkeypatch):
    kept()
    size = 1000 + sum(x.stat().st_size for x in folder.glob("*-cache"))
    monkeypatch.setitem(compiled.SETTINGS, "jax_compilation_cache_max_size", size)
    for k in range(4):
        in_double_precision(lambda k=k: jax.jit(lambda x: x @ jnp.cos(x + k))(jnp.ones(3)))()
    assert 0 < sum(x.stat().st_size for x in folder.glob("*-cache")) <= size


@pytest.fixture
def traced(folder):
    """A function of numbers that counts how often it has been traced, each time by a new ``jit``
    as in a new process."""
    traces = []

    def function(power, pair):
        traces.append(power)
        return {"sum": pair["x"] + pair["y"], "power": pair["x"] ** power}

    def call(x, y, power=2):
        pair = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
        result = compiled.kept_jit(function, (0,))(power, pair)
        return {name: np.asarray(x) for name, x in result.items()}

    return in_double_precision(call), traces


def test_a_program_is_traced_once(traced, monkeypatch):
    call, traces = traced
    for k, (x, y) in enumerate([(1.5, 2.0), (-3.0, 4.0)]):
        np.testing.assert_equal(call(x, y), {"sum": x + y, "power": x**2})
        assert len(traces) == 1, k
    # whatever else a program depends on makes another one
    np.testing.assert_equal(call(2.0, 1.0, power=3), {"sum": 3.0, "power": 8.0})
    np.testing.assert_equal(call(np.ones(2), 1), {"sum": np.full(2, 2.0), "power": np.ones(2)})
    assert len(traces) == 3
    with jax.default_matmul_precision("float32"):
        call(1.5, 2.0)
    assert len(traces) == 4
    monkeypatch.setattr(compiled, "_sources", lambda: ["another version"])
    call(1.5, 2.0)
    assert len(traces) == 5


@pytest.mark.parametrize("change", [{"default_backend": "gpu"}, {"device_count": 2}])
def test_programs_that_cannot_be_written_are_traced(traced, folder, monkeypatch, change):
    call, traces = traced
    for name, value in change.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    for _ in range(2):
        assert call(1.0, 2.0)["sum"] == 3.0
    assert len(traces) == 2 and not list(folder.glob("*.program"))


def test_few_programs_are_kept(traced, folder, monkeypatch):
    call, traces = traced
    monkeypatch.setattr(compiled, "MOST_PROGRAMS", 2)
    for power in (1, 2, 1, 3):
        call(1.0, 2.0, power)
        for file in folder.glob("*.program"):
            # as if each call were a second after the last
            age = file.stat().st_mtime - 1
            os.utime(file, (age, age))
    # the second is the oldest, for the first has been read since
    call(1.0, 2.0, 1)
    call(1.0, 2.0, 3)
    assert traces == [1, 2, 3] and len(list(folder.glob("*.program"))) == 2


def test_arrays_of_distributions_have_the_order_of_their_names():
    fns = Distributions(x=dist.Normal(3.0, 4.0), g=dist.Gamma(1.0, 2.0))
    assert jax.tree.leaves(fns) == [1.0, 2.0, 3.0, 4.0]
    fns = Distributions(b=dist.Beta(1.0, 2.0), t=dist.StudentT(3.0, 1.0, jnp.ones(2)).to_event(1))
    for name, fn in jax.jit(lambda x: x)(fns).items():
        assert type(fn) is type(fns[name])
        np.testing.assert_allclose(fn.log_prob(0.3), fns[name].log_prob(0.3))


CALL = """
import jax, numpy as np, numpyro_spikeslab as nss
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from numpyro_spikeslab.tables import chains
make, models = chains.models.sparse_regression, []
chains.models.sparse_regression = lambda **options: models.append(options) or make(**options)
rng = np.random.default_rng(0)
nss.sparse_regression(jax.random.key(0), rng.normal(size=(30, 5)), rng.normal(size=30),
    num_warmup=1, num_samples=4, num_chains=1)
counts = [sum(x.endswith(name) for x in events) for name in ("cache_hits", "cache_misses")]
print(*counts, len(models))
"""


def test_a_second_process_traces_and_compiles_no_regression(tmp_path):
    environment = {k: x for k, x in os.environ.items() if not k.startswith("JAX_")}
    environment[compiled.VARIABLE] = str(tmp_path)
    call = [sys.executable, "-c", CALL]
    options = dict(capture_output=True, text=True, check=True, timeout=300)
    # the order of sets of names is another one in each process
    seeds = ({"env": environment | {"PYTHONHASHSEED": seed}} for seed in "12")
    first, second = (subprocess.run(call, **seed, **options).stdout.split() for seed in seeds)
    assert int(first[1]) > 2 and first[2] != "0" and second[1:] == ["0", "0"]
