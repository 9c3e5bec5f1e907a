# SPDX-License-Identifier: Apache-2.0
"""Factor analysis by default fits of functions without order, beside sweeps without moves.

Digits of scikit-learn, and 20 planted sparse factors where 40 and 64 are allowed. Run:
``python tests/benchmarks/bench_factors.py``; ``digits`` or ``planted`` as an argument runs one.
"""

import sys
from time import perf_counter, process_time
from typing import Any, NamedTuple

import numpy as np
from timing import before_first_step, enable_x64

from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.ascent import CHUNK, advance, begin
from numpyro_spikeslab.fitting.starts import start_svd

NUM_STEPS = 300


class Case(NamedTuple):
    """Responses, and which of them are held out; true factors where there are some."""

    name: str
    Y: np.ndarray
    held: np.ndarray
    phi: np.ndarray | None = None

    @property
    def args(self) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(len(self.Y)), np.where(self.held, np.nan, self.Y)


def digits() -> Case:
    from sklearn.datasets import load_digits

    pixels = load_digits().data
    pixels = pixels[:, np.std(pixels, axis=0) > 0.4]
    Y = (pixels - np.mean(pixels, axis=0)) / np.std(pixels, axis=0)
    return Case("digits", Y, np.random.default_rng(0).uniform(size=Y.shape) < 0.1)


def planted(num_points: int = 500, num_tasks: int = 1000, num_factors: int = 20) -> Case:
    rng = np.random.default_rng(0)
    shape = (num_tasks, num_factors)
    W = (rng.uniform(size=shape) < 0.3) * rng.normal(size=shape)
    phi = rng.normal(size=(num_factors, num_points))
    f = (W @ phi).T
    Y = f + 0.3 * np.std(f) * rng.normal(size=f.shape)
    return Case("planted", Y / np.std(Y), rng.uniform(size=Y.shape) < 0.1, phi)


def report(case: Case, what: str, posterior: Any, bound: float, began: tuple) -> None:
    wall, cpu = perf_counter() - began[0], process_time() - began[1]
    phi, weights = posterior.functions, posterior.weights
    error = np.asarray(phi.mean.T @ weights.mean.T) - case.Y
    probs = np.asarray(weights.probs)
    used = np.max(probs, axis=0) > 0.5
    text = (
        f"{case.name}, M = {used.size}, {what}: {wall:.1f} s ({cpu:.1f} s of CPU), bound "
        f"{bound:.1f}, held-out RMSE {np.sqrt(np.mean(error[case.held] ** 2)):.4f}, {used.sum()} "
        f"functions in use, {np.mean(probs > 0.5):.2f} of the weights"
    )
    if case.phi is not None:
        K, found = len(case.phi), np.asarray(phi.mean)[used]
        correlation = np.abs(np.corrcoef(case.phi, found)[:K, K:])
        text += f", {np.sum(np.max(correlation, axis=1) > 0.95)} of {K} factors found"
    print(text, flush=True)


def sweeps_alone(case: Case, M: int) -> None:
    """From the singular vectors."""
    model = nss.models.mtmkl(["white"] * M)
    svi = nss.CAVI(model, nss.PairedGuide(model), num_restarts=1)
    (_, spec, data, *_), first = before_first_step(svi, *case.args)
    progress = begin(spec, data, start_svd(spec, data, first.posterior))
    advance(spec, data, progress, 1, -1.0)
    began = perf_counter(), process_time()
    for done in range(0, NUM_STEPS, CHUNK):
        size = min(CHUNK, NUM_STEPS - done)
        progress, _ = advance(spec, data, progress, size, -1.0)
    report(case, "sweeps alone", progress.posterior, -float(progress.loss), began)


def default_fit(case: Case, M: int, repeats: int = 1, shared: bool = True) -> None:
    """:param shared: whether all functions have one inclusion probability."""
    model = nss.models.mtmkl(["white"] * M, shared_inclusion=shared)
    svi = nss.CAVI(model, nss.PairedGuide(model))
    for name in ("first default fit", "second default fit")[:repeats]:
        began = perf_counter(), process_time()
        result = svi.run(random.key(0), NUM_STEPS, *case.args, progress_bar=False)
        name += "" if shared else ", inclusion of each function"
        report(case, name, result.state.optim_state[1], -float(result.losses[-1]), began)


def main() -> None:
    enable_x64()
    wanted = sys.argv[1:] or ["digits", "planted"]
    if "digits" in wanted:
        sweeps_alone(digits(), 32)
        default_fit(digits(), 10, 2)
        default_fit(digits(), 32, 2)
    if "planted" in wanted:
        sweeps_alone(planted(), 40)
        for shared in (True, False):
            default_fit(planted(), 40, 2, shared)
            default_fit(planted(), 64, shared=shared)


if __name__ == "__main__":
    main()
