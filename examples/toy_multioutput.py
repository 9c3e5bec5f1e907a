# SPDX-License-Identifier: Apache-2.0
"""The toy multi-output regression of the paper (section 5, Table 2 and Figure 1).

Ten related tasks and two of pure noise, 41 of 201 points held out in each. Prints, for each data
set, the sum of squared errors over a task's held-out points (the mean over the related tasks), the
number of latent functions in use and the noise levels of the two unrelated tasks.

Run: ``python examples/toy_multioutput.py [number of data sets] [folder for the figure]``.
"""

from pathlib import Path
import sys
from time import perf_counter

import numpy as np
from tinygp import kernels

import jax
from jax import random

import numpyro_spikeslab as nss
from numpyro_spikeslab.datasets import toy_multioutput

NUM_FUNCTIONS = 7
NUM_STEPS = 150


def fit(seed, plain=False):
    """Fit one data set: the data, the guide, the result and the seconds it took."""
    toy = toy_multioutput(seed)
    Y = np.where(toy.observed, toy.Y, np.nan)
    model = nss.models.mtmkl([kernels.ExpSquared(1.0)] * NUM_FUNCTIONS)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, num_restarts=1, plain=plain)
    start = perf_counter()
    result = svi.run(random.key(seed), NUM_STEPS, toy.X, Y, progress_bar=False)
    return toy, guide, result, perf_counter() - start


def report(toy, guide, result):
    """Errors of each task, the number of functions in use, all noise levels."""
    mean, _ = guide.predict(result.params, toy.X)
    errors = np.sum(~toy.observed * (toy.Y - np.asarray(mean)) ** 2, axis=0)
    found = guide.posterior_mean(result.params)
    power = np.asarray(found["W"]) ** 2 * np.sum(np.asarray(found["phi"]) ** 2, axis=1)
    noise = np.asarray(result.params["noise_auto_loc"])
    power = np.sum(power / noise[:, None] ** 2, axis=0)
    included = np.max(np.asarray(guide.inclusion_probabilities(result.params)["W"]), axis=0) > 0.5
    return errors, int(np.sum(included & (power > 0.01 * power.sum()))), noise


def draw(toy, guide, result, folder):
    """Figure 1: data, truth and prediction of four tasks."""
    import matplotlib.pyplot as plt

    mean, variance = guide.predict(result.params, toy.X)
    mean, sd = np.asarray(mean), np.sqrt(np.asarray(variance))
    figure, axes = plt.subplots(4, 1, figsize=(7, 9), sharex=True)
    for axis, q in zip(axes, (0, 1, 6, 2), strict=True):
        seen = toy.observed[:, q]
        axis.fill_between(toy.X, mean[:, q] - 2 * sd[:, q], mean[:, q] + 2 * sd[:, q], alpha=0.3)
        axis.plot(toy.X, mean[:, q])
        axis.plot(toy.X, toy.f[:, q], "k:")
        axis.plot(toy.X[seen], toy.Y[seen, q], ".", markersize=3)
        axis.plot(toy.X[~seen], toy.Y[~seen, q], "x", markersize=4)
        axis.set_ylabel(f"task {q + 1}")
    figure.savefig(Path(folder) / "toy_multioutput.png", dpi=150)


def main():
    jax.config.update("jax_enable_x64", True)
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    folder = sys.argv[2] if len(sys.argv) > 2 else None
    errors = []
    for seed in range(number):
        toy, guide, result, seconds = fit(seed)
        task_errors, active, noise = report(toy, guide, result)
        errors.append(task_errors[toy.related].mean())
        print(
            f"data set {seed}: error {errors[-1]:.2f}, task 7 {task_errors[6]:.2f}, task 3 "
            f"{task_errors[2]:.2f}, {active} functions, noise of task 7 {noise[6]:.3f} and of "
            f"task 3 {noise[2]:.3f}, bound {-result.losses[-1]:.2f}, {seconds:.1f} s",
            flush=True,
        )
        if seed == 0 and folder is not None:
            draw(toy, guide, result, folder)
    print(f"median error over {number} data sets: {np.median(errors):.2f}")


if __name__ == "__main__":
    main()
