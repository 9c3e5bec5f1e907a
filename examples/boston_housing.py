# SPDX-License-Identifier: Apache-2.0
"""Table 1 of the paper on the Boston housing data, against the exact posterior and NumPyro's own.

The posterior of 13 spike-and-slab weights is a mixture of 2^13 Gaussians, few enough to sum. So
every method can be measured against the truth: paired mean field (PMF), standard mean field (MF),
the paired Gibbs sampler, and what NumPyro offers for the same model without this package.

    python examples/boston_housing.py [FOLDER FOR THE PICTURES]
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import time
from typing import Any, NamedTuple

import arviz_base
import matplotlib.pyplot as plt
import numpy as np
import optax
import pandas as pd
import xarray as xr

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, SVI, DiscreteHMCGibbs, TraceGraph_ELBO

import numpyro_spikeslab as nss
from numpyro_spikeslab.datasets import RegressionData, boston_housing
from numpyro_spikeslab.fitting.run import CAVIRunResult

NOISE_VARIANCE = 0.1  # sigma^2 = 0.1 var(y), and y is standardised
INCLUSION = 0.25  # pi
SLAB_SCALE = 1.0  # sigma_w

NUM_STARTS = 300
MAX_SWEEPS = 1000
TOLERANCE = 2e-11  # nats per observation
SVI_STEPS = 20_000
PARTICLES = 16
LEARNING_RATE = 0.03  # the best of 0.01, 0.03 and 0.1
SVI_STARTS = 10  # of each kind

FAMILIES = {
    "MF": (nss.MeanFieldGuide, None),
    "PMF": (nss.PairedGuide, None),
    "annealed PMF": (nss.PairedGuide, nss.annealing),
}
PAPER = {
    "MF, paper": {
        "soft error": "0.917 [0.002, 1.930]",
        "soft bound": "-628.9 [-554.6, -793.5]",
        "extreme error": "1.880 [0.965, 2.561]",
        "extreme bound": "-895.0 [-618.9, -1483.3]",
    },
    "PMF, paper": {
        "soft error": "0.208 [0.002, 0.454]",
        "soft bound": "-560.7 [-557.8, -564.1]",
        "extreme error": "0.204 [0.002, 0.454]",
        "extreme bound": "-560.6 [-557.8, -564.0]",
    },
}
METHODS = f"""\
All methods, measured against paired Gibbs; seconds include compilation
  paired Gibbs      4 chains of 5000 draws
  DiscreteHMCGibbs  of NumPyro, with NUTS: 2 chains of 1000 draws
  annealed PMF, MF  by CAVI, from the soft start of median error; seconds for all {NUM_STARTS}
  by SVI            of NumPyro: {SVI_STEPS} steps of Adam, {PARTICLES} particles"""
COLOURS = {"MF": "C1", "PMF": "C0", "annealed PMF": "C2"}


def model(X: Any, y: Any = None) -> None:
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", INCLUSION, SLAB_SCALE)
    with numpyro.plate("tract", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, NOISE_VARIANCE**0.5), obs=y)


class Exact(NamedTuple):
    """The posterior as a sum over all models."""

    log_evidence: float
    mean: np.ndarray
    inclusion: np.ndarray


def exact_posterior(X: np.ndarray, y: np.ndarray) -> Exact:
    """Sum over all 2^P models, each a Bayesian linear regression with P known slabs.

    The excluded slabs stay in each model, at their prior: so all have the same P x P shape.
    """
    num_obs, size = X.shape
    spikes = (np.arange(2**size)[:, None] >> np.arange(size)) & 1
    gram, cross = X.T @ X / NOISE_VARIANCE, X.T @ y / NOISE_VARIANCE
    precision = spikes[:, :, None] * gram * spikes[:, None, :] + np.eye(size) / SLAB_SCALE**2
    slabs = np.linalg.solve(precision, (spikes * cross)[..., None])[..., 0]
    log_joint = (
        -0.5 * num_obs * np.log(2 * np.pi * NOISE_VARIANCE)
        - 0.5 * y @ y / NOISE_VARIANCE
        - 0.5 * np.linalg.slogdet(precision * SLAB_SCALE**2)[1]
        + 0.5 * np.sum(spikes * cross * slabs, axis=1)
        + np.sum(np.where(spikes, np.log(INCLUSION), np.log1p(-INCLUSION)), axis=1)
    )
    log_evidence = np.logaddexp.reduce(log_joint)
    probs = np.exp(log_joint - log_evidence)
    return Exact(float(log_evidence), probs @ (spikes * slabs), probs @ spikes)


class Start(NamedTuple):
    """Starts of the variational parameters, each of shape (starts, P)."""

    gamma: Any
    mu: Any


def soft_starts(key: jax.Array, shape: tuple[int, int]) -> Start:
    """Inclusion probabilities anywhere between 0 and 1."""
    key_gamma, key_mu = random.split(key)
    return Start(random.uniform(key_gamma, shape), random.normal(key_mu, shape))


def extreme_starts(key: jax.Array, shape: tuple[int, int]) -> Start:
    """Inclusion probabilities 0 or 1: a model drawn at random, and great trust in it."""
    key_gamma, key_mu = random.split(key)
    gamma = random.bernoulli(key_gamma, 0.5, shape).astype(float)
    return Start(gamma, random.normal(key_mu, shape))


def starts_of_kinds(shape: tuple[int, int]) -> dict[str, Start]:
    """The two kinds of starts of the paper."""
    return {
        "soft": soft_starts(random.key(1), shape),
        "extreme": extreme_starts(random.key(2), shape),
    }


def init_params(guide: nss.PairedGuide | nss.MeanFieldGuide, start: Start) -> dict[str, Any]:
    """The starts, under the names that the guide's parameters have."""
    if isinstance(guide, nss.PairedGuide):
        return {"w_auto_probs": start.gamma, "w_auto_loc": start.mu}
    return {"w_spike_auto_probs": start.gamma, "w_slab_auto_loc": start.mu}


def timed(function: Callable, *args: Any) -> tuple[Any, float]:
    """Result of a function and the seconds that it took."""
    begin = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return result, time.perf_counter() - begin


class Fits(NamedTuple):
    """Fits of one family from many starts: arrays whose leading axis is the start."""

    svi: nss.CAVI
    result: CAVIRunResult
    error: np.ndarray
    seconds: float

    @property
    def bounds(self) -> np.ndarray:
        """Bound after each sweep; the last one repeats once a run has converged."""
        return -np.asarray(self.result.losses)

    @property
    def sweeps(self) -> np.ndarray:
        """Number of sweeps until convergence."""
        return np.asarray(self.result.state.optim_state[0])

    def at(self, index: int) -> CAVIRunResult:
        """The result of one start."""
        return jax.tree.map(lambda x: x[index], self.result)


def fit_starts(svi: nss.CAVI, start: Start, data: RegressionData, exact: Exact) -> Fits:
    """Fit from every start in one `jax.vmap`."""

    def fit(start):
        return svi.run(
            random.key(0),
            MAX_SWEEPS,
            data.X,
            data.y,
            progress_bar=False,
            init_params=init_params(svi.guide, start),
            tol=TOLERANCE,
        )

    result, seconds = timed(jax.vmap(fit), start)
    mean = jax.vmap(svi.guide.posterior_mean)(result.params)["w"]
    return Fits(svi, result, np.abs(mean - exact.mean).sum(axis=1), seconds)


def fit_families(
    data: RegressionData, exact: Exact, num_starts: int = NUM_STARTS
) -> dict[str, dict[str, Fits]]:
    """Each family from the same soft and the same extreme starts."""
    starts = starts_of_kinds((num_starts, data.X.shape[1]))
    fits = {}
    for name, (guide, temperature) in FAMILIES.items():
        svi = nss.CAVI(model, guide(model), temperature=temperature)
        fits[name] = {kind: fit_starts(svi, start, data, exact) for kind, start in starts.items()}
    return fits


def cells(kind: str, errors: Any, bounds: Any) -> dict[str, str]:
    """Two cells of Table 1; the paper writes the better bound first."""

    def cell(values, digits, percentiles):
        low, high = np.percentile(values, percentiles)
        return f"{np.mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    error, bound = cell(errors, 4, [2.5, 97.5]), cell(bounds, 1, [97.5, 2.5])
    return {f"{kind} error": error, f"{kind} bound": bound}


def table_1(fits: dict[str, dict[str, Fits]]) -> pd.DataFrame:
    """The paper's Table 1 above ours: means and the percentiles at 2.5 and 97.5."""

    rows = dict(PAPER)
    for name, kinds in fits.items():
        rows[name] = {}
        for kind, fit in kinds.items():
            rows[name] |= cells(kind, fit.error, fit.bounds[:, -1])
    return pd.DataFrame.from_dict(rows, orient="index")


def paired_gibbs(data: RegressionData) -> MCMC:
    """Markov chains of this package's sampler."""
    mcmc = MCMC(
        nss.PairedGibbs(model),
        num_warmup=500,
        num_samples=5000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("inclusion_probabilities.w",)
    mcmc.run(random.key(3), data.X, data.y, extra_fields=fields)
    return finished(mcmc)


def discrete_hmc_gibbs(data: RegressionData) -> MCMC:
    """Markov chains of NumPyro's sampler, which changes spikes and slabs in turn."""
    mcmc = MCMC(
        DiscreteHMCGibbs(NUTS(model)),
        num_warmup=500,
        num_samples=1000,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(4), data.X, data.y)
    return finished(mcmc)


def finished(mcmc: MCMC) -> MCMC:
    """The same chains, after they have been computed: `run` does not wait for them."""
    jax.block_until_ready(mcmc.get_samples())
    return mcmc


def mean_field(X: Any, y: Any = None) -> None:
    """The guide that one would write for `model` without this package."""
    size = X.shape[1]
    with numpyro.plate("feature", size):
        gamma = numpyro.param("gamma", jnp.full(size, 0.5), constraint=constraints.unit_interval)
        mu = numpyro.param("mu", jnp.zeros(size))
        scale = numpyro.param("scale", jnp.ones(size), constraint=constraints.softplus_positive)
        spike = numpyro.sample("w_spike", dist.Bernoulli(gamma))
        slab = numpyro.sample("w_slab", dist.Normal(mu, scale))
        numpyro.deterministic("w", spike * slab)


def stochastic_vi(guide: Callable, data: RegressionData) -> tuple[SVI, Any]:
    """NumPyro's own SVI."""
    svi = SVI(model, guide, optax.adam(LEARNING_RATE), TraceGraph_ELBO(num_particles=PARTICLES))
    return svi, svi.run(random.key(5), SVI_STEPS, data.X, data.y, progress_bar=False)


def table_1_by_svi(data: RegressionData, exact: Exact) -> pd.DataFrame:
    """A row of Table 1 for the guide of NumPyro's users, by NumPyro's own SVI."""
    loss = TraceGraph_ELBO(num_particles=PARTICLES)
    svi = SVI(model, mean_field, optax.adam(LEARNING_RATE), loss)

    def fit(key, start):
        # no gradient leads away from a probability of exactly 0 or 1
        params = {"gamma": jnp.clip(start.gamma, 0.01, 0.99), "mu": start.mu}
        result = svi.run(key, SVI_STEPS, data.X, data.y, progress_bar=False, init_params=params)
        error = jnp.abs(result.params["gamma"] * result.params["mu"] - exact.mean).sum()
        return error, -result.losses[-1000:].mean()

    row = {}
    for kind, start in starts_of_kinds((SVI_STARTS, data.X.shape[1])).items():
        row |= cells(kind, *jax.vmap(fit)(random.split(random.key(6), SVI_STARTS), start))
    return pd.DataFrame(row, index=["MF by SVI"])


def chains(mcmc: MCMC, data: RegressionData) -> xr.DataTree:
    """Markov chains, labelled."""
    return arviz_base.from_numpyro(mcmc, coords={"feature": data.features})


def draws(svi: SVI, result: Any, data: RegressionData) -> xr.DataTree:
    """Draws from a fitted guide, labelled, with its bound."""
    arguments = (data.X, data.y)
    tree = arviz_base.from_numpyro_svi(
        svi,
        svi_result=result,
        model_args=arguments,
        coords={"feature": data.features},
        num_samples=4000,
    )
    return nss.add_variational_stats(tree, svi, result, arguments)


def posteriors(
    data: RegressionData, fits: dict[str, dict[str, Fits]]
) -> tuple[dict[str, xr.DataTree], dict[str, float]]:
    """The posterior that each method finds, and the seconds it takes, with compilation.

    The families are shown as they end from the soft start of median error.
    """
    trees, seconds = {}, {}
    samplers = {"paired Gibbs": paired_gibbs, "DiscreteHMCGibbs": discrete_hmc_gibbs}
    for name, sample in samplers.items():
        mcmc, seconds[name] = timed(sample, data)
        trees[name] = chains(mcmc, data)
    for name in ("annealed PMF", "MF"):
        fit = fits[name]["soft"]
        median = int(np.argsort(fit.error)[len(fit.error) // 2])
        trees[name] = draws(fit.svi, fit.at(median), data)
        seconds[name] = fit.seconds
    for name, guide in {"PMF by SVI": nss.PairedGuide(model), "MF by SVI": mean_field}.items():
        (svi, result), seconds[name] = timed(stochastic_vi, guide, data)
        trees[name] = draws(svi, result, data)
    return trees, seconds


def comparison(
    trees: dict[str, xr.DataTree], seconds: dict[str, float], exact: Exact
) -> pd.DataFrame:
    """All methods against the long chains of paired Gibbs, and against the exact means."""
    table = nss.compare(trees, ["w"], reference="paired Gibbs")
    means = {name: nss.summary(tree, "w", round_to=None)["mean"] for name, tree in trees.items()}
    errors = {name: np.abs(mean - exact.mean).sum() for name, mean in means.items()}
    table.insert(0, "error_vs_exact", pd.Series(errors))
    table["seconds"] = pd.Series(seconds)
    return table


def plot_errors(fits: dict[str, dict[str, Fits]]) -> plt.Figure:
    """Distribution of the errors over the starts."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, kinds in fits.items():
        axes.ecdf(kinds["soft"].error, color=COLOURS[name], label=name)
        axes.ecdf(kinds["extreme"].error, color=COLOURS[name], linestyle="--")
    axes.set(
        xscale="log",
        xlabel=r"error of the posterior means, $\sum_m |w_m - w_m^{\mathrm{exact}}|$",
        ylabel="fraction of the starts",
    )
    axes.legend(
        title="solid: soft starts, dashed: extreme", loc="center", bbox_to_anchor=(0.4, 0.35)
    )
    return figure


def plot_bounds(fits: dict[str, dict[str, Fits]], exact: Exact) -> plt.Figure:
    """How far below the log evidence the bound is, sweep by sweep, from the extreme starts."""
    figure, panels = plt.subplots(
        1, len(fits), figsize=(9, 3.2), sharex=True, sharey=True, layout="constrained"
    )
    for (name, kinds), axes in zip(fits.items(), panels, strict=True):
        fit = kinds["extreme"]
        gaps = exact.log_evidence - fit.bounds[:, : fit.sweeps.max()]
        sweeps = np.arange(1, gaps.shape[1] + 1)
        axes.plot(sweeps, gaps.T, color=COLOURS[name], alpha=0.15, linewidth=0.7)
        axes.scatter(fit.sweeps, gaps[:, -1], s=6, color=COLOURS[name], alpha=0.3)
        axes.set(xscale="log", yscale="log", title=name, xlabel="sweep")
    panels[0].set_ylabel("log evidence - bound (nats)")
    return figure


def save_pictures(
    folder: Path, trees: dict[str, xr.DataTree], fits: dict[str, dict[str, Fits]], exact: Exact
) -> None:
    """Write the three pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {name: trees[name] for name in ("paired Gibbs", "annealed PMF", "MF", "PMF by SVI")}
    nss.plot_inclusion(shown, reference={"w": exact.inclusion}).savefig(
        folder / "inclusion.png", dpi=150
    )
    plot_errors(fits).savefig(folder / "errors.png", dpi=150)
    plot_bounds(fits, exact).savefig(folder / "bounds.png", dpi=150)


def main(folder: Path) -> None:
    numpyro.enable_x64()
    pd.set_option("display.width", 200, "display.max_columns", 20)
    data = boston_housing()
    exact, seconds = timed(exact_posterior, data.X, data.y)
    print(
        f"Boston housing: {data.X.shape[0]} examples, {data.X.shape[1]} inputs. All "
        f"{2 ** data.X.shape[1]} models summed in {seconds:.2f} s: "
        f"log evidence {exact.log_evidence:.2f}.\n"
    )

    fits = fit_families(data, exact)
    print(f"Table 1: means and [2.5%, 97.5%] percentiles over {NUM_STARTS} starts of each kind\n")
    print(table_1(fits).to_string())
    print(f"\nSeconds for {NUM_STARTS} starts, with compilation and once compiled")
    for name, kinds in fits.items():
        print(f"{name:>14} {kinds['soft'].seconds:6.2f} {kinds['extreme'].seconds:6.2f}")

    trees, seconds = posteriors(data, fits)
    print("\n" + METHODS + "\n")
    print(comparison(trees, seconds, exact).round(3).T.to_string(na_rep=""))
    save_pictures(folder, trees, fits, exact)
    print(f"\nPictures: {folder}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(__file__).parent / "figures",
        help="where the pictures go; examples/figures by default",
    )
    main(parser.parse_args().folder)
