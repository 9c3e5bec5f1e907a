# SPDX-License-Identifier: Apache-2.0
"""A sweep over tasks on one device and on two of one thread each, which need two cores.

Run: ``python tests/benchmarks/bench_devices.py``.
"""

import os
import subprocess
import sys

import numpy as np
from timing import best_time

import jax
from jax import random
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.ascent import advance

CASES = {"complete": (30_000, 64, 64, 0.0), "20% missing": (10_000, 64, 64, 0.2)}


def step(Q: int, N: int, M: int, missing: float) -> float:
    """Seconds of a plain step."""
    rng = np.random.default_rng(0)
    W = rng.normal(size=(Q, M)) * (rng.uniform(size=(Q, M)) < 0.1)
    Y = rng.normal(size=(N, M)) @ W.T + 0.3 * rng.normal(size=(N, Q))
    Y = np.where(rng.uniform(size=Y.shape) < missing, np.nan, Y).astype(np.float32)
    mesh = jax.make_mesh((jax.device_count(),), ("task",), axis_types=(AxisType.Auto,))
    args = (jax.device_put(Y, NamedSharding(mesh, PartitionSpec(None, "task"))),)
    model = nss.models.factor_analysis(M)
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    task = svi._task(args, {})
    progress = svi._progress(task, svi.init(random.key(0), *args))
    return best_time(advance, task.spec, task.data, progress, 3, -1.0, repeats=5) / 3


def in_own_process(devices: int) -> list[float]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    found = subprocess.run(
        [sys.executable, __file__, "step"],
        env=os.environ | {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"},
        # a device of its own has one core
        preexec_fn=lambda: os.sched_setaffinity(0, range(devices)),
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(line) for line in found.stdout.split()]


if __name__ == "__main__":
    if sys.argv[1:] == ["step"]:
        for case in CASES.values():
            print(step(*case), flush=True)
    else:
        times = zip(CASES, in_own_process(1), in_own_process(2), strict=True)
        for name, one, two in times:
            print(f"{name}: {one:.3f} s on one device, {two:.3f} s on two, {one / two:.2f} times")
