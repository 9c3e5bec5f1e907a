# SPDX-License-Identifier: Apache-2.0
"""Which measurements matter for a diagnosis? Two classes, correlated columns and an intercept.

Breast cancer of scikit-learn: 569 tumours and 30 measurements, many of which are nearly the same.
Inclusion probabilities by PairedGibbs and CAVI, by NumPyro's DiscreteHMCGibbs and, where it is
installed, millipede; L1 logistic regression beside them; and the log loss of held-out tumours.

    python examples/classes.py [--draws 4000] [--pima FILE]

FILE has the diabetes data of R's package MASS, ``write.csv(rbind(Pima.tr, Pima.te), FILE,
row.names = FALSE)``: their seven measurements have 128 models, which are summed.
"""

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path
import time
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import expit, logsumexp
from scipy.stats import multivariate_t, norm
import sklearn
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV

import jax
from jax import random
import jax.numpy as jnp

import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs

import numpyro_spikeslab as nss
from numpyro_spikeslab.fitting.run import CAVIRunResult

INCLUSION = 0.2  # pi
SLAB_SCALE = 1.0  # sigma_w, in log odds for each standard deviation of a column
INTERCEPT_SCALE = 5.0
NUM_WARMUP = 1000
NUM_FOLDS = 5


class Table(NamedTuple):
    """Standardised columns, shape (N, P), classes 0 and 1, and names of the columns."""

    X: np.ndarray
    y: np.ndarray
    names: list[str]


def cancer() -> Table:
    """Load the tumours; class 1 is malignant."""
    data = load_breast_cancer()
    X = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    return Table(X.astype(np.float32), 1 - data.target, list(map(str, data.feature_names)))


def pima(path: Path) -> Table:
    """Read the women of MASS; class 1 has diabetes."""
    frame = pd.read_csv(path)
    columns = frame.drop(columns="type")
    X = (columns - columns.mean()) / columns.std(ddof=0)
    y = (frame["type"] == "Yes").to_numpy(int)
    return Table(X.to_numpy(np.float32), y, list(columns))


def model(X: Any, y: Any = None) -> None:
    intercept = numpyro.sample("intercept", dist.Normal(0.0, INTERCEPT_SCALE))
    with numpyro.plate("feature", X.shape[1]):
        w = nss.spike_slab("w", INCLUSION, SLAB_SCALE)
    with numpyro.plate("obs", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


class Chains(NamedTuple):
    """Chains that have run, and the seconds of the draws after the warm-up, without compilation."""

    mcmc: MCMC
    seconds: float

    @property
    def least_ess(self) -> float:
        """Effective sample size of the spike, among undecided ones, that has least."""
        spikes = np.asarray(self.mcmc.get_samples(group_by_chain=True)["w_spike"], float)
        mean = spikes.mean(axis=(0, 1))
        undecided = (mean > 0.03) & (mean < 0.97)
        return float(np.min(effective_sample_size(spikes[..., undecided])))


def sampled(kernel: Any, table: Table, num_draws: int, fields: tuple[str, ...] = ()) -> Chains:
    """Run two chains."""
    mcmc = MCMC(
        kernel,
        num_warmup=NUM_WARMUP,
        num_samples=num_draws,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
    )
    data = jnp.asarray(table.X), jnp.asarray(table.y)
    mcmc.warmup(random.key(0), *data, extra_fields=fields)
    # once for compilation
    for key in random.split(random.key(1)):
        begin = time.perf_counter()
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(key, *data, extra_fields=fields)
        jax.block_until_ready(mcmc.get_samples())
        seconds = time.perf_counter() - begin
    return Chains(mcmc, seconds)


def paired_gibbs(table: Table, num_draws: int) -> Chains:
    fields = "inclusion_probabilities.w", "adapt_state.mean_accept_prob"
    return sampled(nss.PairedGibbs(model), table, num_draws, fields)


def discrete_hmc_gibbs(table: Table, num_draws: int) -> Chains:
    """Run NumPyro's sampler, which changes spikes and slabs in turn."""
    return sampled(DiscreteHMCGibbs(NUTS(model)), table, num_draws)


def cavi(table: Table) -> tuple[nss.CAVI, CAVIRunResult]:
    svi = nss.CAVI(model, nss.PairedGuide(model))
    data = jnp.asarray(table.X), jnp.asarray(table.y)
    return svi, svi.run(random.key(0), 300, *data, progress_bar=False)


def lasso(table: Table) -> LogisticRegression:
    """Fit L1 logistic regression, whose penalty has the best log loss in cross-validation."""
    new = tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 8)
    kind = {"l1_ratio": 1.0} if new else {"penalty": "l1"}
    # its intercept is penalised too, but hardly so in other units
    one = LogisticRegression(
        solver="liblinear", intercept_scaling=10.0, max_iter=1000, random_state=0, **kind
    )
    search = GridSearchCV(one, {"C": np.logspace(-2, 1, 13)}, scoring="neg_log_loss", cv=5)
    return search.fit(table.X, table.y).best_estimator_


def millipede_inclusion(table: Table, num_draws: int) -> np.ndarray | None:
    """Run millipede's weighted tempered Gibbs sampler of the same model, if it is installed."""
    try:
        from millipede import BernoulliLikelihoodVariableSelector
    except ImportError:
        return None
    frame = pd.DataFrame(table.X.astype(float), columns=table.names).assign(response=table.y)
    selector = BernoulliLikelihoodVariableSelector(
        frame,
        "response",
        S=INCLUSION * len(table.names),
        tau=SLAB_SCALE**-2,
        tau_intercept=INTERCEPT_SCALE**-2,
    )
    selector.run(T=num_draws, T_burnin=NUM_WARMUP, verbosity=None, seed=0)
    return selector.pip[table.names].to_numpy()


def predicted(samples: dict[str, Any], X: np.ndarray) -> np.ndarray:
    """Average the probability of class 1 over draws of the weights and the intercept."""
    logits = np.asarray(samples["intercept"])[:, None] + np.asarray(samples["w"]) @ X.T
    return expit(logits).mean(axis=0)


def held_out_losses(table: Table, num_draws: int) -> pd.DataFrame:
    """Compute the mean log loss of each fold by each method, from fits to all other folds."""
    order = np.random.default_rng(0).permutation(len(table.y))
    # folds of one size; few rows are left over
    folds = order[: len(order) // NUM_FOLDS * NUM_FOLDS].reshape(NUM_FOLDS, -1)
    # its data are arguments of what is compiled, which serves all folds
    mcmc = MCMC(
        nss.PairedGibbs(model),
        num_warmup=NUM_WARMUP,
        num_samples=num_draws,
        num_chains=2,
        chain_method="sequential",
        progress_bar=False,
        jit_model_args=True,
    )
    losses = []
    for fold in range(NUM_FOLDS):
        test, train = folds[fold], np.delete(folds, fold, axis=0).ravel()
        part = table._replace(X=table.X[train], y=table.y[train])
        svi, result = cavi(part)
        shape = (num_draws,)
        draws = svi.guide.sample_posterior(random.key(1), result.params, part.X, sample_shape=shape)
        # what to expect of tumours about which nothing is measured
        probs = {"class shares": np.full(len(test), part.y.mean())}
        probs["L1"] = lasso(part).predict_proba(table.X[test])[:, 1]
        probs["CAVI"] = predicted(draws, table.X[test])
        mcmc.run(random.key(0), jnp.asarray(part.X), jnp.asarray(part.y))
        probs["PairedGibbs"] = predicted(mcmc.get_samples(), table.X[test])
        losses.append({k: log_loss(table.y[test], p) for k, p in probs.items()})
    return pd.DataFrame(losses)


def sum_over_models(
    table: Table,
    num_draws: int = 2000,
    inclusion: float = INCLUSION,
    slab_scale: float = SLAB_SCALE,
    intercept_scale: float = INTERCEPT_SCALE,
) -> np.ndarray:
    """Sum over all models: inclusion probabilities with an error of 0.004 or so.

    The coefficients of a model are integrated out by importance sampling about their mode.
    """
    N, P = table.X.shape
    rng, design = np.random.default_rng(0), np.column_stack([np.ones(N), table.X])
    scales = np.array([intercept_scale] + [slab_scale] * P)
    models = np.array(list(product((0, 1), repeat=P)))
    log_probs = models.sum(axis=1) * np.log(inclusion / (1 - inclusion))
    for k, spikes in enumerate(models):
        used = np.flatnonzero([1, *spikes])
        columns, scale = design[:, used], scales[used]
        mode = np.zeros(len(used))
        # Newton's method; the log posterior is concave
        for _ in range(20):
            p = expit(columns @ mode)
            precision = columns.T @ ((p * (1 - p))[:, None] * columns) + np.diag(scale**-2)
            slope = columns.T @ (table.y - p) - mode / scale**2
            mode = mode + np.linalg.solve(precision, slope)
        proposal = multivariate_t(mode, np.linalg.inv(precision), df=8)
        draws = np.reshape(proposal.rvs(num_draws, random_state=rng), (num_draws, -1))
        log_ratios = -np.logaddexp(0, (1 - 2 * table.y) * (draws @ columns.T)).sum(axis=1)
        log_ratios += norm.logpdf(draws, 0, scale).sum(axis=1) - proposal.logpdf(draws)
        log_probs[k] += logsumexp(log_ratios)
    return np.exp(log_probs - logsumexp(log_probs)) @ models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=4000, help="of each of two chains")
    parser.add_argument("--pima", type=Path)
    options = parser.parse_args()
    if options.draws < 100:
        parser.error("--draws must be at least 100")
    table = cancer()
    print(f"{len(table.y)} tumours, {table.y.sum()} of them malignant, {len(table.names)} columns")
    runs: dict[str, Callable] = {
        "PairedGibbs": paired_gibbs,
        "DiscreteHMCGibbs": discrete_hmc_gibbs,
    }
    columns: dict[str, Any] = {}
    for name, run in runs.items():
        chains = run(table, options.draws)
        columns[name] = np.mean(chains.mcmc.get_samples()["w_spike"], axis=0)
        ess = chains.least_ess
        print(f"{name}: {chains.seconds:.1f} s, least ESS {ess:.0f}, {ess / chains.seconds:.0f}/s")
    svi, result = cavi(table)
    columns["CAVI"] = svi.guide.inclusion_probabilities(result.params)["w"]
    if (probs := millipede_inclusion(table, options.draws)) is not None:
        columns["millipede"] = probs
    columns["L1 coefficient"] = lasso(table).coef_[0]
    frame = pd.DataFrame(columns, index=table.names).sort_values("PairedGibbs", ascending=False)
    print(frame.astype(float).round(3).to_string())
    print("mean log loss of held-out tumours")
    print(held_out_losses(table, options.draws).mean().round(4).to_string())
    if options.pima is not None:
        women = pima(options.pima)
        exact = sum_over_models(women)
        chains = paired_gibbs(women, options.draws)
        probs = np.mean(chains.mcmc.get_extra_fields()["inclusion_probabilities.w"], axis=0)
        frame = pd.DataFrame({"128 models": exact, "PairedGibbs": probs}, index=women.names)
        print(frame.round(4).to_string())


if __name__ == "__main__":
    main()
