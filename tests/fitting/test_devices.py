# SPDX-License-Identifier: Apache-2.0
"""Fits of data that are sharded over devices of one process and of two, beside fits on one device.

The test runs this file as a script for each process: with its number, the number of processes, and
the address of the first; two devices each when it is alone, else one. The script prints the largest
difference of each fit, or raises.
"""

import re
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy.sparse import coo_array

import jax
from jax import random
from jax.experimental.sparse import BCOO
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import numpyro
import numpyro.distributions as dist

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.ascent import advance, begin

N, Q, M = 40, 1300, 3


def of_features(X, Y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    with numpyro.plate("task", Q, dim=-2), numpyro.plate("feature", M):
        W = nss.spike_slab("W", 0.3)
    numpyro.sample("Y", dist.Normal(X @ W.T, noise).to_event(2), obs=Y)


def responses(missing: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    W = rng.normal(size=(Q, M)) * (rng.uniform(size=(Q, M)) < 0.4)
    X = rng.normal(size=(N, M))
    Y = X @ W.T + 0.3 * rng.normal(size=(N, Q))
    return X, np.where(rng.uniform(size=Y.shape) < missing, np.nan, Y)


def sharded(x: np.ndarray, axis: int = 1) -> jax.Array:
    """The same array, split over the devices along an axis."""
    part = np.array_split(x, jax.process_count(), axis)[jax.process_index()]
    mesh = jax.make_mesh((2,), ("task",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, "task"))
    return jax.make_array_from_process_local_data(sharding, part, x.shape)


def difference(whole: dict, parts: dict) -> float:
    """Largest difference of the parts in this process, relative to the size of each array."""

    def of(x, y):
        here = [np.asarray(s.data) - np.asarray(x)[s.index] for s in y.addressable_shards]
        return max(np.max(np.abs(d), initial=0) for d in here) / (1 + np.max(np.abs(x)))

    return max(of(whole[name], y) for name, y in parts.items())


def compare(name: str, model, args: tuple, parts: tuple, num_steps: int, **options) -> None:
    params = []
    for data in (args, parts):
        svi = nss.CAVI(model, nss.PairedGuide(model), **options)
        params.append(svi.run(random.key(0), num_steps, *data, progress_bar=False).params)
    off = difference(*params)
    print(f"{name}: {off:.1e}")
    assert off < 1e-8
    if isinstance(parts[-1], jax.Array):
        assert params[1]["W_auto_probs"].sharding.spec[0] == "task", "the weights are on one device"


def exchanged(model, Y) -> list[str]:
    """The collective operations of a step."""
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    call = svi._call((Y,), {})
    progress = begin(call.engine, svi.init(random.key(0), Y).optim_state[1])
    text = advance.lower(call.engine, progress, 1, -1.0).compile().as_text()
    return re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)\(", text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [1, 2])
def test_devices_give_the_fit_of_one(processes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    script = [sys.executable, "-W", "error", __file__]
    arguments = ([str(number), str(processes), address] for number in range(processes))
    for process in [subprocess.Popen(script + x, **pipes) for x in arguments]:
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
        assert output.count("e-") == 6, output


if __name__ == "__main__":
    number, processes, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if processes == 1:
        jax.config.update("jax_num_cpu_devices", 2)
    else:
        jax.distributed.initialize(address, processes, number)
    numpyro.enable_x64()
    warnings.filterwarnings("ignore", "CAVI.run. the bound still moves")
    warnings.filterwarnings("ignore", "CAVI.run. of .* starts the best came to")
    assert jax.device_count() == 2

    X, complete = responses(0.0)
    _, gaps = responses(0.2)
    # a fifth of the entries, an even number, in no order
    _, table = responses(0.8)
    places = np.random.default_rng(1).permutation(np.argwhere(~np.isnan(table)))
    places = places[: len(places) // 2 * 2]
    values = table[tuple(places.T)]
    entries = coo_array((values, tuple(places.T)), shape=(N, Q))
    shared = BCOO((sharded(values, 0), sharded(places, 0)), shape=(N, Q))
    model = nss.models.factor_analysis(M)
    for name, Y, parts in (
        ("complete", complete, sharded(complete)),
        ("gaps", gaps, sharded(gaps)),
        ("ratings", entries, shared),
    ):
        compare(f"{name}, plain", model, (Y,), (parts,), 10, plain=True)
        if name != "complete":
            compare(f"{name}, moves", model, (Y,), (parts,), 10)
        # sums over tasks, never what devices have of each
        exchanges = exchanged(model, parts)
        assert set(exchanges) == {"all-reduce"}, exchanges
    # once for the rows and once for the columns
    assert len(exchanges) == 2, exchanges
    compare("known features", of_features, (X, complete), (X, sharded(complete)), 110)
