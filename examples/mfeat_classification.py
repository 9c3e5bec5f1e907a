# SPDX-License-Identifier: Apache-2.0
"""Classification of handwritten digits, as the paper's Table 3.

The data are the "Multiple Features" of the UCI repository: 2000 digits of 10 classes, described by
six sets of features, one file ``mfeat-*.csv`` for each set, with a header and the class in the last
column. Each class is a task, each latent function has the kernel of one set of features, and all
classes share the functions. Tasks are regressions on +1/-1 targets, as in the paper, or have a
Bernoulli likelihood. 20 digits of each class are labelled, the others are to be classified.
With the Bernoulli likelihood a fit includes fewer functions and classifies worse.

    python examples/mfeat_classification.py FOLDER_OF_THE_FILES [FOLDER_FOR_THE_PICTURE]
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

import equinox as eqx
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import SVC
from tinygp.kernels import Kernel

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro import handlers
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.optim import Minimize

import numpyro_spikeslab as nss

FEATURE_SETS = ("fac", "fou", "kar", "mor", "pix", "zer")
NUM_LABELLED = 20  # of each class
NUM_SPLITS = 5
FUNCTIONS_PER_SET = 4
NOISE = 0.2
NUM_STEPS = 50


class Digits(NamedTuple):
    """The standardised features of each set, and the classes."""

    sets: dict[str, np.ndarray]
    classes: np.ndarray

    @property
    def X(self) -> np.ndarray:
        return np.hstack(list(self.sets.values()))


def load(folder: Path) -> Digits:
    """Read and standardise the files; the features of all digits are known, labelled or not."""
    paths = {name: Path(folder) / f"mfeat-{name}.csv" for name in FEATURE_SETS}
    missing = [path.name for path in paths.values() if not path.exists()]
    if missing:
        raise SystemExit(
            f"The folder {folder} does not hold {', '.join(missing)}. The data set is 'Multiple "
            "Features' of the UCI repository, with a header and the class in a last column."
        )
    sets = {}
    for name, path in paths.items():
        table = np.loadtxt(path, delimiter=",", skiprows=1)
        x, classes = table[:, :-1], table[:, -1].astype(int)
        sets[name] = (x - x.mean(axis=0)) / x.std(axis=0)
    return Digits(sets, classes)


def split(classes: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the labelled digits and of the others."""
    rng = np.random.default_rng(seed)
    labelled = np.concatenate(
        [
            rng.choice(np.flatnonzero(classes == c), NUM_LABELLED, replace=False)
            for c in np.unique(classes)
        ]
    )
    return labelled, np.setdiff1d(np.arange(classes.size), labelled)


def labels(classes: np.ndarray) -> np.ndarray:
    """1 for the own class, else 0: shape (N, Q)."""
    return (classes[:, None] == np.unique(classes)).astype(float)


def targets(classes: np.ndarray) -> np.ndarray:
    """+1 for the own class, else -1, less their mean: shape (N, Q)."""
    Y = 2.0 * labels(classes) - 1.0
    return Y - Y.mean()


class FeatureSetKernel(Kernel):
    """Squared exponential kernel on the columns of one set of features.

    The same as ``Subspace(slice(start, stop), ExpSquared(scale, L2Distance()))`` of tinygp, but
    with all distances in one matrix product.
    """

    scale: jax.Array
    start: int = eqx.field(static=True)
    stop: int = eqx.field(static=True)

    def evaluate(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return self(x[None], y[None])[0, 0]

    def __call__(self, X: jax.Array, Y: jax.Array) -> jax.Array:
        x, y = X[:, self.start : self.stop], Y[:, self.start : self.stop]
        squared = jnp.sum(x**2, axis=1)[:, None] + jnp.sum(y**2, axis=1) - 2.0 * x @ y.T
        return jnp.exp(-0.5 * jnp.maximum(squared, 0.0) / self.scale**2)


def feature_set_kernels(digits: Digits) -> list[FeatureSetKernel]:
    """A kernel for each set, as wide as the median distance between digits."""
    ends = np.cumsum([x.shape[1] for x in digits.sets.values()])
    templates = []
    for x, end in zip(digits.sets.values(), ends, strict=True):
        some = x[:: max(len(x) // 500, 1)]
        distances = np.sqrt(np.sum((some[:, None] - some) ** 2, axis=2))
        width = np.median(distances[np.triu_indices(len(some), 1)])
        templates.append(FeatureSetKernel(jnp.array(width), int(end) - x.shape[1], int(end)))
    return templates


def fit_mtmkl(
    digits: Digits,
    labelled: np.ndarray,
    *,
    bernoulli: bool = False,
    functions_per_set: int = FUNCTIONS_PER_SET,
    num_steps: int = NUM_STEPS,
    seed: int = 0,
) -> tuple[nss.PairedGuide, dict[str, Any]]:
    """The guide of the multi-task model of all classes, and its fitted parameters."""
    kernels = [k for k in feature_set_kernels(digits) for _ in range(functions_per_set)]
    classes = digits.classes[labelled]
    Y = labels(classes) if bernoulli else targets(classes)
    fixed = {f"phi_{m}_scale": kernel.scale for m, kernel in enumerate(kernels)}
    if bernoulli:
        log_odds = np.log(Y.mean() / (1.0 - Y.mean()))
        model = nss.models.mtmkl(kernels, likelihood=lambda f: dist.Bernoulli(logits=f + log_odds))
    else:
        model = nss.models.mtmkl(kernels)
        fixed["noise"] = jnp.full(Y.shape[1], NOISE)
    model = handlers.condition(model, fixed)
    guide = nss.PairedGuide(model)
    svi = nss.CAVI(model, guide, plain=True)
    X = digits.X[labelled]
    result = svi.run(random.key(seed), num_steps, X, Y, progress_bar=False)
    return guide, result.params


def mtmkl(
    digits: Digits, labelled: np.ndarray, rest: np.ndarray, bernoulli: bool = False
) -> np.ndarray:
    guide, params = fit_mtmkl(digits, labelled, bernoulli=bernoulli)
    classes = digits.classes[labelled]
    data = digits.X[labelled], labels(classes) if bernoulli else targets(classes)
    return np.asarray(guide.predict(params, *data, X_new=digits.X[rest])[0])


def independent_mkl(digits: Digits, labelled: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """A Gaussian process for each class; the six kernels are summed with weights of the class."""
    kernels = feature_set_kernels(digits)
    X, Y = digits.X[labelled], targets(digits.classes[labelled])
    K = jnp.stack([kernel(X, X) for kernel in kernels])
    num, size = Y.shape[1], len(kernels)

    def prior(weight, noise):
        return jnp.einsum("qs,snk->qnk", weight, K) + noise[:, None, None] * jnp.eye(len(X))

    def model():
        with numpyro.plate("class", num):
            weights = dist.LogNormal(-2.0, 2.0).expand([size]).to_event(1)
            weight = numpyro.sample("weight", weights)
            noise = numpyro.sample("noise", dist.LogNormal(-3.0, 2.0))
            covariance = prior(weight, noise)
            numpyro.sample("Y", dist.MultivariateNormal(0.0, covariance), obs=jnp.asarray(Y.T))

    guide = AutoDelta(model)
    result = SVI(model, guide, Minimize(), Trace_ELBO()).run(random.key(0), 1, progress_bar=False)
    values = guide.median(result.params)
    solved = jnp.linalg.solve(prior(values["weight"], values["noise"]), Y.T[..., None])[..., 0]
    K_new = jnp.stack([kernel(digits.X[rest], X) for kernel in kernels])
    return np.asarray(jnp.einsum("qs,snk,qk->nq", values["weight"], K_new, solved))


# Baselines of scikit-learn: each chooses its settings by the labelled digits alone.


class Baseline(NamedTuple):
    """Scores of the unlabelled digits, and how well the labelled ones speak for the method."""

    scores: np.ndarray
    merit: float


def support_vector_machine(X: np.ndarray, classes: np.ndarray, X_new: np.ndarray) -> Baseline:
    """RBF kernel; its width and the cost by cross-validation."""
    width = 1.0 / (X.shape[1] * X.var())
    search = GridSearchCV(
        SVC(),
        {"C": [1.0, 10.0, 100.0], "gamma": width * np.array([0.03, 0.1, 0.3, 1.0, 3.0])},
        cv=StratifiedKFold(5, shuffle=True, random_state=0),
    ).fit(X, classes)
    return Baseline(search.decision_function(X_new), search.best_score_)


def gaussian_process(X: np.ndarray, classes: np.ndarray, X_new: np.ndarray) -> Baseline:
    """Classification, one against the rest; RBF kernels by their marginal likelihood."""
    width = np.sqrt(2.0 * X.shape[1] * X.var())
    kernel = ConstantKernel(10.0) * RBF(width, (0.1 * width, 10.0 * width))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GaussianProcessClassifier(kernel, random_state=0).fit(X, classes)
    return Baseline(model.predict_proba(X_new), model.log_marginal_likelihood())


def best_single_set(method: Callable[..., Baseline]) -> Callable[..., np.ndarray]:
    def scores(digits: Digits, labelled: np.ndarray, rest: np.ndarray) -> np.ndarray:
        classes = digits.classes[labelled]
        baselines = [method(x[labelled], classes, x[rest]) for x in digits.sets.values()]
        return max(baselines, key=lambda baseline: baseline.merit).scores

    return scores


def concatenation(method: Callable[..., Baseline], equal: bool) -> Callable[..., np.ndarray]:
    """All features; ``equal``: scaled such that each set has the same part in the distances."""

    def scores(digits: Digits, labelled: np.ndarray, rest: np.ndarray) -> np.ndarray:
        sets = digits.sets.values()
        X = np.hstack([x / np.sqrt(x.shape[1]) if equal else x for x in sets])
        return method(X[labelled], digits.classes[labelled], X[rest]).scores

    return scores


METHODS: dict[str, Callable[..., np.ndarray]] = {
    "MTMKL, six sets": mtmkl,
    "MTMKL, Bernoulli": partial(mtmkl, bernoulli=True),
    "independent MKL, six sets": independent_mkl,
    "SVM, best set": best_single_set(support_vector_machine),
    "SVM, features side by side": concatenation(support_vector_machine, equal=False),
    "SVM, sets of equal weight": concatenation(support_vector_machine, equal=True),
    "GP, best set": best_single_set(gaussian_process),
    "GP, features side by side": concatenation(gaussian_process, equal=False),
    "GP, sets of equal weight": concatenation(gaussian_process, equal=True),
}


def break_even_point(member: np.ndarray, scores: np.ndarray) -> float:
    """Precision where it equals recall: as many digits are chosen as the class has."""
    chosen = np.argsort(-scores)[: member.sum()]
    return float(member[chosen].mean())


def measures(classes: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Accuracy, and the means over classes of the area under the ROC curve and the break-even."""
    pairs = [(classes == c, s) for c, s in zip(np.unique(classes), scores.T, strict=True)]
    return {
        "accuracy": float(np.mean(np.argmax(scores, axis=1) == classes)),
        "AUC": float(np.mean([roc_auc_score(member, s) for member, s in pairs])),
        "BEP": float(np.mean([break_even_point(member, s) for member, s in pairs])),
    }


def compare(digits: Digits, num_splits: int = NUM_SPLITS) -> pd.DataFrame:
    """Means over several choices of the labelled digits, in percent, and seconds for each."""
    rows = []
    for seed in range(num_splits):
        labelled, rest = split(digits.classes, seed)
        for name, method in METHODS.items():
            begin = time.perf_counter()
            found = measures(digits.classes[rest], method(digits, labelled, rest))
            seconds = time.perf_counter() - begin
            rows.append({"method": name} | {k: 100 * x for k, x in found.items()} | {"s": seconds})
    return pd.DataFrame(rows).groupby("method", sort=False).mean()


def plot_inclusion(digits: Digits, folder: Path) -> None:
    """Which class uses which function, functions grouped by their set of features."""
    guide, params = fit_mtmkl(digits, split(digits.classes, 0)[0])
    inclusion = np.asarray(guide.inclusion_probabilities(params)["W"])
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    image = axes.imshow(inclusion, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    middles = np.arange(len(digits.sets)) * FUNCTIONS_PER_SET + (FUNCTIONS_PER_SET - 1) / 2
    axes.set_xticks(middles, list(digits.sets))
    axes.set_yticks(range(inclusion.shape[0]))
    for edge in range(1, len(digits.sets)):
        axes.axvline(edge * FUNCTIONS_PER_SET - 0.5, color="0.6", linewidth=0.8)
    axes.set(xlabel="set of features", ylabel="digit")
    figure.colorbar(image, label="inclusion probability")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "mfeat_inclusion.png", dpi=150)


def main(data: Path, folder: Path | None, splits: int) -> None:
    numpyro.enable_x64()
    digits = load(data)
    print(f"{NUM_LABELLED} labelled digits of each class; means over {splits} choices of them, %\n")
    print(compare(digits, splits).round(2).to_string())
    if folder is not None:
        plot_inclusion(digits, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of mfeat-fac.csv and the others")
    parser.add_argument("folder", nargs="?", type=Path, help="where the picture goes")
    parser.add_argument("--splits", type=int, default=NUM_SPLITS, help="choices of labelled digits")
    main(**vars(parser.parse_args()))
