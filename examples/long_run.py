# SPDX-License-Identifier: Apache-2.0
"""A long fit that is killed and goes on: its state is stored by orbax every few minutes.

The same command goes on where the last checkpoint is, with the same numbers as if nothing had
happened. Run: ``python examples/long_run.py --folder checkpoints``.
"""

import argparse
from pathlib import Path
import time
from typing import Any
import warnings

import numpy as np
import orbax.checkpoint as ocp
from tqdm import tqdm

import jax
from jax import random
import jax.numpy as jnp

import numpyro_spikeslab as nss

CHUNK = 10  # steps of a call of `run`


def responses(num_tasks: int) -> np.ndarray:
    """Tasks that mix ten sparse factors at 60 points, a tenth of the entries missing."""
    rng = np.random.default_rng(0)
    W = rng.normal(size=(num_tasks, 10)) * (rng.uniform(size=(num_tasks, 10)) < 0.2)
    Y = rng.normal(size=(60, 10)) @ W.T + 0.3 * rng.normal(size=(60, num_tasks))
    return np.where(rng.uniform(size=Y.shape) < 0.1, np.nan, Y).astype(np.float32)


def arrays(state: Any) -> Any:
    """Replace empty arrays, which orbax does not store, by None."""
    return jax.tree.map(lambda x: x if jnp.size(x) else None, state)


def fit(svi: nss.CAVI, num_steps: int, folder: Path, minutes: float, *args: Any) -> Any:
    """Return the last state of `svi.run(random.key(0), num_steps, *args)`.

    The run continues from the last checkpoint; Ctrl-C stores one and returns.

    :param folder: folder of the checkpoints.
    :param minutes: between two of them.
    """
    key = random.key(0)
    state = svi.init(key, *args)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    # orbax writes a checkpoint under another name and renames it when it is whole
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            stored = manager.restore(done, args=ocp.args.StandardRestore(arrays(state)))
            state = jax.tree.map(lambda x, y: y if jnp.size(x) else x, state, stored)
        last, saved, interrupted = done, time.monotonic(), False
        with tqdm(total=num_steps, initial=done) as bar:
            while done < num_steps and not interrupted:
                size = min(CHUNK, num_steps - done)
                try:
                    result = svi.run(key, size, *args, init_state=state, progress_bar=False)
                    state, done = result.state, done + len(result.losses)
                    bar.update(len(result.losses))
                    bar.set_postfix_str(f"bound: {-result.losses[-1]:.1f}")
                    # `run` returns what it has, if it has some steps, and stops if it has settled
                    interrupted = len(result.losses) < size
                except KeyboardInterrupt:
                    interrupted = True
                end = interrupted or done == num_steps
                if done > last and (end or time.monotonic() - saved >= 60 * minutes):
                    manager.save(done, args=ocp.args.StandardSave(arrays(state)))
                    last, saved = done, time.monotonic()
    return state


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="between checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=20_000)
    options = parser.parse_args()
    # the end of a chunk is not the end of the run
    warnings.filterwarnings("ignore", "CAVI.run. the bound still moves")
    model = nss.models.factor_analysis(20)
    svi = nss.CAVI(model, nss.PairedGuide(model), plain=True)
    Y = responses(options.tasks)
    state = fit(svi, options.steps, options.folder, options.minutes, Y)
    used = np.max(svi.get_params(state)["W_auto_probs"], axis=0) > 0.5
    print(f"bound {-svi.evaluate(state, Y):.1f}, {used.sum()} functions in use")
