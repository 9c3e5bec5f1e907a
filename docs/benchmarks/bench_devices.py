# SPDX-License-Identifier: Apache-2.0
"""A sweep on one device and on several of one thread each, which need as many cores.

Run: ``python docs/benchmarks/bench_devices.py --devices 2``.
"""

import argparse
import os
import subprocess
import sys
from typing import Any

import numpy as np
from timing import best_time

import jax
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.ascent import advance, begin

RATINGS = (21_000, 6_000, 3_000_000, 20)
TASKS = {"complete": (30_000, 64, 64, 0.0), "20% missing": (10_000, 64, 64, 0.2)}


def put(x: np.ndarray, *axes: str | None) -> jax.Array:
    """Shared by all devices along one of its axes."""
    mesh = jax.make_mesh((jax.device_count(),), ("part",), axis_types=(AxisType.Auto,))
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))


def step(Y: Any, M: int) -> float:
    """Seconds of a plain step."""
    model = nss.models.factor_analysis(M)
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    call = svi._call((Y,), {})
    progress = begin(call.engine, svi.init(jax.random.key(0), Y).optim_state[1])
    return best_time(advance, call.engine, progress, 3, -1.0, repeats=5) / 3


def tasks(Q: int, N: int, M: int, missing: float) -> float:
    rng = np.random.default_rng(0)
    W = rng.normal(size=(Q, M)) * (rng.uniform(size=(Q, M)) < 0.1)
    Y = rng.normal(size=(N, M)) @ W.T + 0.3 * rng.normal(size=(N, Q))
    Y = np.where(rng.uniform(size=Y.shape) < missing, np.nan, Y).astype(np.float32)
    return step(put(Y, None, "part"), M)


def ratings(N: int, Q: int, number: int, M: int) -> float:
    rng = np.random.default_rng(0)
    places = np.sort(rng.choice(N * Q, number, replace=False))
    indices = np.stack(np.divmod(places, Q), axis=1).astype(np.int32)
    values = put(rng.normal(size=number).astype(np.float32), "part")
    return step(BCOO((values, indices), shape=(N, Q)), M)


def in_own_process(devices: int) -> list[float]:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    found = subprocess.run(
        [sys.executable, __file__, "--here"],
        env=os.environ | {"XLA_FLAGS": flags, "OPENBLAS_NUM_THREADS": "1"},
        # a device of its own has one core
        preexec_fn=lambda: os.sched_setaffinity(0, range(devices)),
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(line) for line in found.stdout.split()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="on the devices there are")
    options = parser.parse_args()
    if options.here:
        for case in TASKS.values():
            print(tasks(*case), flush=True)
        print(ratings(*RATINGS), flush=True)
    else:
        found = map(in_own_process, (1, options.devices))
        for name, one, many in zip((*TASKS, "ratings"), *found, strict=True):
            print(
                f"{name}: {one:.3f} s on one device, {many:.3f} s on {options.devices}, "
                f"{one / many:.2f} times"
            )
