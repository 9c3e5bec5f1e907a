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
rng = np.random.default_rng(0)
nss.sparse_regression(jax.random.key(0), rng.normal(size=(30, 5)), rng.normal(size=30),
    num_warmup=1, num_samples=4, num_chains=1)
print(*(sum(x.endswith(name) for x in events) for name in ("cache_hits", "cache_misses")))
"""


def test_a_second_process_compiles_no_regression(tmp_path):
    environment = {k: x for k, x in os.environ.items() if not k.startswith("JAX_")}
    environment[compiled.VARIABLE] = str(tmp_path)
    call = [sys.executable, "-c", CALL]
    options = dict(capture_output=True, text=True, check=True, timeout=300)
    # the order of sets of names is another one in each process
    seeds = ({"env": environment | {"PYTHONHASHSEED": seed}} for seed in "12")
    first, second = (subprocess.run(call, **seed, **options).stdout.split() for seed in seeds)
    assert int(first[1]) > 2 and second == [str(sum(map(int, first))), "0"]
