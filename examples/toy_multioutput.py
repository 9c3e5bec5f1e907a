# SPDX-License-Identifier: Apache-2.0
"""Table 2 and Figure 1 of the paper: twelve tasks that share four functions, with missing data.

Ten tasks are mixtures of the same four functions, two are nothing but noise, and each lacks 41
adjacent points. The multi-task multiple-kernel model (MTMKL) learns which task uses which function;
independent Gaussian processes treat each task by itself.

    python examples/toy_multioutput.py [FOLDER FOR THE PICTURES] [--data-sets NUMBER]
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
import time
from typing import Any, NamedTuple

import arviz_base
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.optimize import minimize
from tinygp import GaussianProcess, kernels
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

import numpyro

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.run import CAVIRunResult

NUM_FUNCTIONS = 7
NUM_STEPS = 150
NUM_DRAWS = 200
LENGTHS = (0.3, 1.0, 3.0)  # length scales from which an independent GP starts

PAPER = {
    "independent GPs, paper": [6.51, 11.70, 7.52, 2.49, 1.53, 18.25]
    + [0.41, 7.43, 2.73, 1.81, 19.93, 93.80],
    "MTMKL, paper": [1.97, 4.57, 7.71, 1.94, 1.98, 2.09, 0.41, 1.96, 1.90, 1.57, 1.20, 2.83],
}


class MultiOutput(NamedTuple):
    """Q tasks at the same N inputs.

    - **X** - inputs, shape (N,).
    - **Y** - observations of the tasks, held-out ones included, shape (N, Q).
    - **observed** - which observations are for training, shape (N, Q).
    - **f** - noise-free functions, zero for the tasks that are noise only, shape (N, Q).
    - **related** - which tasks are mixtures of the latent functions, shape (Q,).
    """

    X: np.ndarray
    Y: np.ndarray
    observed: np.ndarray
    f: np.ndarray
    related: np.ndarray


NOISE_ONLY = {6: 0.1, 2: 0.4}
"""Noise standard deviations of the tasks that are noise only, counted from zero."""


def toy_multioutput(seed: int, *, num_missing: int = 41) -> MultiOutput:
    """Simulate twelve tasks; ten are mixtures of the same four functions (paper, section 5).

    Inputs are 201 points on [-10, 10]. The related tasks are draws of a Gaussian process whose
    covariance has rank four, with noise of standard deviation 0.2; tasks 7 and 3, counted from one,
    are noise of standard deviations 0.1 and 0.4. Each task has a gap of ``num_missing`` adjacent
    inputs at a random place.

    :param seed: number of the data set, from 0 on.
    :param num_missing: length of each gap; the paper's by default.
    :return: ``(X, Y, observed, f, related)``; `np.where(observed, Y, np.nan)` is for training.
    """
    rng = np.random.default_rng(seed)
    N, Q = 201, 12
    x = np.linspace(-10, 10, N)
    related = ~np.isin(np.arange(Q), list(NOISE_ONLY))
    lag = x[:, None] - x
    envelope = np.exp(-(x[:, None] ** 2 + x**2) / 20)
    eigenvalues, eigenvectors = np.linalg.eigh(envelope * (4 * np.cos(0.5 * lag) + np.cos(2 * lag)))
    root = eigenvectors * np.sqrt(np.maximum(eigenvalues, 0))
    f = np.where(related, root @ rng.standard_normal((N, Q)), 0.0)
    noise = np.array([NOISE_ONLY.get(q, 0.2) for q in range(Q)])
    Y = f + noise * rng.standard_normal((N, Q))
    first = rng.integers(0, N - num_missing + 1, Q)
    row = np.arange(N)[:, None]
    observed = (row < first) | (row >= first + num_missing)
    return MultiOutput(x, Y, observed, f, related)


class Prediction(NamedTuple):
    """Predictions of the observations at all inputs, and the noise that was learned.

    - **mean**, **variance** - of shape (N, Q).
    - **noise** - standard deviations, shape (Q,).
    - **seconds** - time of the fit, with compilation.
    """

    mean: np.ndarray
    variance: np.ndarray
    noise: np.ndarray
    seconds: float


class Fit(NamedTuple):
    """A fitted MTMKL."""

    svi: nss.CAVI
    result: CAVIRunResult
    prediction: Prediction


def task_names(toy: MultiOutput) -> list[int]:
    """The tasks as the paper counts them."""
    return list(range(1, toy.Y.shape[1] + 1))


def training_data(toy: MultiOutput) -> np.ndarray:
    """Replace held-out responses by NaN."""
    return np.where(toy.observed, toy.Y, np.nan)


def mtmkl(shared_inclusion: bool = True) -> Callable[..., Any]:
    """The multi-task model, with one inclusion probability for all functions or one for each."""
    templates = [kernels.ExpSquared(1.0)] * NUM_FUNCTIONS
    return nss.models.mtmkl(templates, shared_inclusion=shared_inclusion)


def fit_mtmkl(
    toy: MultiOutput,
    seed: int = 0,
    shared_inclusion: bool = True,
    **settings: Any,
) -> Fit:
    """The multi-task model by coordinate ascent."""
    begin = time.perf_counter()
    model = mtmkl(shared_inclusion)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, **settings)
    data = (toy.X, training_data(toy))
    result = svi.run(random.key(seed), NUM_STEPS, *data, progress_bar=False)
    mean, variance = guide.predict(result.params, *data, noise=True)
    noise = np.asarray(result.params["noise_auto_loc"])
    seconds = time.perf_counter() - begin
    mean, variance = np.asarray(mean), np.asarray(variance)
    return Fit(svi, result, Prediction(mean, variance, noise, seconds))


def gaussian_process(theta: Any, x: Any) -> GaussianProcess:
    """One task by itself; ``theta`` are the logs of amplitude, length scale and noise."""
    amplitude, length, noise = jnp.exp(theta)
    return GaussianProcess(amplitude**2 * kernels.ExpSquared(length), x, diag=noise**2)


@jax.jit
@jax.value_and_grad
def negative_evidence(theta: Any, x: Any, y: Any) -> Any:
    return -gaussian_process(theta, x).log_probability(y)


@jax.jit
@jax.vmap
def condition(theta: Any, x: Any, y: Any, x_new: Any) -> tuple[Any, Any]:
    conditioned = gaussian_process(theta, x).condition(y, x_new).gp
    return conditioned.loc, conditioned.variance


def fit_independent(toy: MultiOutput) -> Prediction:
    """A Gaussian process for each task, its parameters by maximum marginal likelihood."""
    begin = time.perf_counter()
    places = np.stack([np.flatnonzero(column) for column in toy.observed.T])
    x, y = toy.X[places], np.take_along_axis(toy.Y.T, places, axis=1)
    thetas = []
    for task in zip(x, y, strict=True):
        ends = [
            minimize(
                negative_evidence,
                np.log([task[1].std(), length, 0.3]),
                task,
                jac=True,
                bounds=[(-7.0, 7.0)] * 3,
            )
            for length in LENGTHS
        ]
        thetas.append(min(ends, key=lambda end: end.fun).x)
    theta = np.array(thetas)
    mean, variance = condition(theta, x, y, np.broadcast_to(toy.X, (len(y), toy.X.size)))
    noise = np.exp(theta[:, 2])
    variance = np.asarray(variance).T + noise**2
    return Prediction(np.asarray(mean).T, variance, noise, time.perf_counter() - begin)


def truth(toy: MultiOutput) -> Prediction:
    """Return the best possible prediction: the functions and the noise that made the data."""
    noise = np.array([NOISE_ONLY.get(q, 0.2) for q in range(toy.Y.shape[1])])
    return Prediction(toy.f, np.broadcast_to(noise**2, toy.Y.shape), noise, np.nan)


def table_2(toy: MultiOutput, predictions: dict[str, Prediction]) -> pd.DataFrame:
    """Sums of squared errors over the held-out points of each task, the paper's above ours."""
    rows = {name: np.array(errors) for name, errors in PAPER.items()}
    for name, prediction in predictions.items():
        rows[name] = np.sum(~toy.observed * (toy.Y - prediction.mean) ** 2, axis=0)
    table = pd.DataFrame.from_dict(rows, orient="index", columns=task_names(toy))
    table["mean of related"] = table.loc[:, toy.related].mean(axis=1)
    return table


def calibration(toy: MultiOutput, predictions: dict[str, Prediction]) -> pd.DataFrame:
    """Share of the held-out points in their 90% intervals, and the noise that was learned."""
    rows = {}
    for name, prediction in predictions.items():
        inside = np.abs(toy.Y - prediction.mean) < 1.645 * np.sqrt(prediction.variance)
        rows[name] = {
            "in 90% intervals": inside[~toy.observed].mean(),
            "noise of task 7": prediction.noise[6],
            "noise of task 3": prediction.noise[2],
            "noise of the others": prediction.noise[toy.related].mean(),
            "seconds": prediction.seconds,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def num_active(toy: MultiOutput, fit: Fit) -> int:
    """Number of latent functions that some task uses and that explain more than 1% of the data."""
    guide, params = fit.svi.guide, fit.result.params
    means = guide.posterior_mean(params, toy.X, training_data(toy))
    mean = {name: np.asarray(x) for name, x in means.items()}
    noise = fit.prediction.noise[:, None]
    power = np.sum((mean["W"] / noise) ** 2, axis=0) * np.sum(mean["phi"] ** 2, axis=1)
    included = np.asarray(guide.inclusion_probabilities(params)["W"]).max(axis=0) > 0.5
    return int(np.sum(included & (power > 0.01 * power.sum())))


def draws(toy: MultiOutput, fit: Fit) -> xr.DataTree:
    """Draws from the fit as labelled ArviZ data, the strongest function first."""
    tree = arviz_base.from_numpyro_svi(
        fit.svi,
        svi_result=fit.result,
        model_args=(toy.X, training_data(toy)),
        coords={"task": task_names(toy), "point": toy.X},
        num_samples=NUM_DRAWS,
    )
    return nss.align(tree)


def plot_predictions(toy: MultiOutput, predictions: dict[str, Prediction]) -> Any:
    """Figure 1, with intervals."""
    fits = {name: (each.mean, each.variance) for name, each in predictions.items()}
    fits["noise-free"] = (toy.f, np.zeros_like(toy.f))
    tasks = pd.DataFrame(toy.Y, columns=task_names(toy))
    return nss.plot_fit(fits, toy.X, tasks, toy.observed)


def plot_bounds(fits: dict[str, Fit]) -> plt.Figure:
    """The bound after each step, a sweep or a round of moves, near its best value."""
    bounds = {name: -np.asarray(fit.result.losses) for name, fit in fits.items()}
    best = max(each.max() for each in bounds.values())
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for name, each in bounds.items():
        axes.plot(np.arange(1, each.size + 1), each, label=name)
    axes.set(xlabel="step", ylabel="bound (nats)", ylim=(best - 300, best + 15))
    axes.legend()
    return figure


def save_pictures(
    folder: Path, toy: MultiOutput, fit: Fit, predictions: dict[str, Prediction]
) -> None:
    """Write the four pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    tree = draws(toy, fit)
    pictures = {
        "predictions": plot_predictions(toy, predictions),
        "weights": nss.plot_weights(tree),
        "functions": nss.plot_latent_functions(tree),
        "bound": plot_bounds({"MTMKL": fit}),
    }
    for name, picture in pictures.items():
        picture.savefig(folder / f"toy_{name}.png", dpi=150)


def other_data_sets(seeds: Iterable[int]) -> pd.DataFrame:
    """Compare mean held-out errors of the related tasks and other results on other data."""
    rows = {}
    for seed in seeds:
        toy = toy_multioutput(seed)
        fit = fit_mtmkl(toy, seed)
        predictions = {"independent GPs": fit_independent(toy), "MTMKL": fit.prediction}
        errors = table_2(toy, predictions | {"the truth": truth(toy)})["mean of related"]
        rows[seed] = {name: errors[name] for name in (*predictions, "the truth")} | {
            "functions in use": num_active(toy, fit),
            "noise of task 7": fit.prediction.noise[6],
            "noise of task 3": fit.prediction.noise[2],
            "seconds": fit.prediction.seconds,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("data set")


def main(folder: Path | None, data_sets: int) -> None:
    numpyro.enable_x64()
    pd.set_option("display.width", 200, "display.max_columns", 20)
    toy = toy_multioutput(0)
    fit = fit_mtmkl(toy)
    predictions = {"independent GPs": fit_independent(toy), "MTMKL": fit.prediction}
    shown = predictions | {"the truth": truth(toy)}
    print("Table 2: sums of squared errors over the 41 held-out points of each task\n")
    print(table_2(toy, shown).round(2).to_string())
    print("\n" + calibration(toy, shown).round(2).to_string(na_rep=""))
    bound = -float(fit.result.losses[-1])
    print(f"\n{num_active(toy, fit)} of {NUM_FUNCTIONS} functions in use, bound {bound:.2f}")
    if folder is not None:
        save_pictures(folder, toy, fit, predictions)
        print(f"\nPictures: {folder}")
    if data_sets > 1:
        print("\n" + other_data_sets(range(1, data_sets)).round(2).to_string())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where the pictures go; none by default"
    )
    parser.add_argument("--data-sets", type=int, default=1, help="how many; 1 by default")
    main(**vars(parser.parse_args()))
