# SPDX-License-Identifier: Apache-2.0
"""Markov chains of the multi-task model on the paper's toy data, beside the fit.

The variational fit of the twelve tasks is fast, but it neglects how weights and functions depend on
each other. Here the same model is sampled: held-out errors, calibrated intervals, and how sure one
can be of the number of functions and of who uses which. Each function has an inclusion probability
of its own, so that unnecessary functions stay out.

    python examples/toy_sampling.py [FOLDER FOR THE PICTURES] [--data-sets NUMBER]
"""

import argparse
from pathlib import Path
import time
from typing import Any, NamedTuple

import arviz_base
import arviz_plots
import arviz_stats
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy.special import ndtr
import toy_multioutput as example
from toy_multioutput import MultiOutput, toy_multioutput
import xarray as xr

from jax import random

import numpyro
from numpyro.infer import MCMC

import numpyro_spikeslab as nss

NUM_CHAINS = 4
NUM_WARMUP = 500
NUM_DRAWS = 1000


class Chains(NamedTuple):
    """Labelled draws, and the seconds that they took, with compilation."""

    tree: xr.DataTree
    seconds: float


def sample(
    toy: MultiOutput,
    seed: int = 0,
    num_warmup: int = NUM_WARMUP,
    num_draws: int = NUM_DRAWS,
) -> Chains:
    """Chains from starts apart; each finds the functions by itself."""
    begin = time.perf_counter()
    mcmc = MCMC(
        nss.LatentGibbs(example.mtmkl(shared_inclusion=False), accelerate=0.25),
        num_warmup=num_warmup,
        num_samples=num_draws,
        num_chains=NUM_CHAINS,
        chain_method="parallel",
        progress_bar=False,
    )
    data = (toy.X, example.training_data(toy))
    mcmc.run(random.key(seed), *data, extra_fields=("inclusion_probabilities.W",))
    tree = arviz_base.from_numpyro(
        mcmc,
        coords={"task": example.task_names(toy), "point": toy.X},
        log_likelihood=False,
    )
    return Chains(tree, time.perf_counter() - begin)


def draws_of(chains: Chains) -> tuple[np.ndarray, np.ndarray]:
    """Noise-free tasks, shape (S, N, Q), and their noise, (S, Q)."""
    draws = arviz_base.extract(chains.tree, var_names=["f", "noise"])
    f = draws["f"].transpose("sample", "point", "task").values
    return f, draws["noise"].transpose("sample", "task").values


def predictions(toy: MultiOutput, chains: Chains) -> example.Prediction:
    """Moments of the predictive distribution."""
    f, noise = draws_of(chains)
    variance = f.var(axis=0) + np.mean(noise**2, axis=0)
    return example.Prediction(f.mean(axis=0), variance, noise.mean(axis=0), chains.seconds)


def held_out_ranks(toy: MultiOutput, source: example.Prediction | Chains) -> np.ndarray:
    """Compute predictive probabilities below each held-out response; uniform if calibrated."""
    if isinstance(source, example.Prediction):
        ranks = ndtr((toy.Y - source.mean) / np.sqrt(source.variance))
    else:
        f, noise = draws_of(source)
        ranks = np.mean(ndtr((toy.Y - f) / noise[:, None]), axis=0)
    return ranks[~toy.observed]


def calibration(ranks: dict[str, np.ndarray]) -> pd.DataFrame:
    """Shares of the held-out points in the central intervals."""
    rows = {
        name: {
            f"in {share:.0%} intervals": np.mean(np.abs(u - 0.5) < share / 2)
            for share in (0.5, 0.9)
        }
        for name, u in ranks.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def convergence(chains: Chains) -> pd.DataFrame:
    """Worst R-hat and effective sample size of what no permutation of the functions changes."""
    names = ["f", "noise", "slab_scale", "num_active"]
    variables = nss.invariants(chains.tree)["posterior"].to_dataset()[names]
    r_hat, ess = arviz_stats.rhat(variables), arviz_stats.ess(variables)
    rows = {
        name: {"R-hat": float(r_hat[name].max()), "ESS": float(ess[name].min())} for name in names
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def active_functions(chains: Chains) -> pd.Series:
    """Posterior probabilities of the number of functions that more than one task uses.

    A function of a single task is a detail of that task; only shared ones tell tasks' relations.
    """
    users = (chains.tree["posterior"]["W"] != 0).sum("task")
    counts = (users > 1).sum("latent").values.ravel()
    numbers = np.arange(example.NUM_FUNCTIONS + 1)
    shares = pd.Series(np.bincount(counts, minlength=numbers.size) / counts.size, numbers)
    return shares.rename_axis("shared functions").rename("probability")


def plot_calibration(ranks: dict[str, np.ndarray]) -> plt.Figure:
    """Share of the held-out points in central intervals of any probability."""
    figure, axes = plt.subplots(figsize=(4, 4), layout="constrained")
    shares = np.linspace(0, 1, 101)
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":")
    for name, u in ranks.items():
        inside = np.mean(np.abs(u[:, None] - 0.5) < shares / 2, axis=0)
        axes.plot(shares, inside, label=name)
    axes.set(xlabel="probability of the interval", ylabel="held-out points inside")
    axes.legend()
    return figure


def plot_traces(tree: xr.DataTree) -> Any:
    """Plot transparent traces of all chains."""
    visuals = {"trace": {"alpha": 0.5, "width": 0.7}}
    picture = arviz_plots.plot_trace(tree, backend="matplotlib", visuals=visuals)
    picture.add_legend("chain")
    return picture


def plot_ranks(tree: xr.DataTree) -> Any:
    """Ranks of every 25th draw among those of all chains."""
    return arviz_plots.plot_rank(tree.isel(draw=slice(None, None, 25)), backend="matplotlib")


def mixing(chains: Chains) -> xr.DataTree:
    """A point of a task, its noise, and numbers that all tasks share."""
    tree = nss.invariants(chains.tree)
    names = {"f": "f(0), task 1", "noise": "noise, task 1"}
    names |= {"slab_scale": "slab scale", "num_active": "functions in use"}
    posterior = tree["posterior"].to_dataset()[list(names)]
    chosen = posterior.sel({"point": 0.0, "task": 1}, method="nearest", drop=True)
    return xr.DataTree.from_dict({"/posterior": chosen.rename(names)})


def compare(toy: MultiOutput, seed: int = 0) -> tuple[Chains, example.Fit, dict, dict]:
    """The chains, the fit, and predictions and ranks of all methods."""
    chains = sample(toy, seed)
    fit = example.fit_mtmkl(toy, seed, shared_inclusion=False)
    predicted = {
        "independent GPs": example.fit_independent(toy),
        "PMF": fit.prediction,
        "Gibbs": predictions(toy, chains),
    }
    ranks = {name: held_out_ranks(toy, each) for name, each in predicted.items()}
    ranks["Gibbs"] = held_out_ranks(toy, chains)
    return chains, fit, predicted, ranks


def main(folder: Path | None, data_sets: int) -> None:
    numpyro.enable_x64()
    numpyro.set_host_device_count(NUM_CHAINS)
    pd.set_option("display.width", 200, "display.max_columns", 20)
    for seed in range(data_sets):
        toy = toy_multioutput(seed)
        chains, fit, predicted, ranks = compare(toy, seed)
        table = example.table_2(toy, predicted | {"the truth": example.truth(toy)})
        print(f"\nData set {seed}: sums of squared errors over the held-out points\n")
        print(table.iloc[2:].round(2).to_string())
        print("\n" + calibration(ranks).round(3).to_string())
        print("\n" + convergence(chains).round(3).to_string())
        print("\n" + active_functions(chains).round(3).to_frame().T.to_string())
        seconds = {name: round(each.seconds, 1) for name, each in predicted.items()}
        print(f"\nseconds, with compilation: {seconds}", flush=True)
        if seed == 0 and folder is not None:
            save_pictures(folder, toy, chains, fit, predicted, ranks)


def save_pictures(
    folder: Path, toy: MultiOutput, chains: Chains, fit: example.Fit, predicted: dict, ranks: dict
) -> None:
    """Write the five pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "predictions": example.plot_predictions(toy, predicted),
        "weights": nss.plot_weights(aligned(toy, chains, fit)),
        "calibration": plot_calibration(ranks),
        "traces": plot_traces(mixing(chains)),
        "ranks": plot_ranks(mixing(chains)),
    }
    for name, picture in pictures.items():
        picture.savefig(folder / f"sampling_{name}.png", dpi=150)


def aligned(toy: MultiOutput, chains: Chains, fit: example.Fit) -> dict[str, xr.DataTree]:
    """Draws of both methods with their functions in the same order."""
    reference = example.draws(toy, fit)
    return {"PMF": reference, "Gibbs": nss.align(chains.tree, reference)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where the pictures go; none by default"
    )
    parser.add_argument("--data-sets", type=int, default=1, help="how many; 1 by default")
    main(**vars(parser.parse_args()))
