# SPDX-License-Identifier: Apache-2.0
"""Likelihoods that are not Normal: PairedGibbs and CAVI against the Normal one and their peers.

Parts: ``step``, milliseconds of a step beside the Normal likelihood's on the same design;
``equal``, ``counts`` and ``cancer``, least effective sample size per second of the spikes with
inclusion between 0.03 and 0.97, beside NumPyro's DiscreteHMCGibbs(NUTS); ``pima``, errors against
all 128 models; ``millipede``, errors on the cancer data after equal times; ``fits``, CAVI to
convergence beside sparsevb (C++); ``leukemia``, CAVI and PairedGibbs on many more genes than
patients, with held-out log losses beside L1 logistic regression's.
Run: ``python tests/benchmarks/bench_likelihoods.py``, with names of parts for these alone. Cancer
and leukemia data need scikit-learn. Pima data are a file whose name follows ``pima``, with seven
columns and the class, leukemia data one with arrays X and y whose name follows ``leukemia``. The
peers millipede (``pip install --no-deps millipede-regression``, PyTorch and polyagamma) and
sparsevb (``pip install sparsevb``, which needs LAPACK and gfortran) are optional.
"""

from functools import partial
from itertools import product
import sys
from time import perf_counter
import warnings

from bench_cavi import NUM_ACTIVE, simulate
from bench_equal_time import in_time, paired
from bench_mixing import autoregressive, equicorrelated, min_ess, run
import numpy as np
from scipy.special import expit, logsumexp
from timing import Compilations

import jax
from jax import random
import jax.numpy as jnp

import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, DiscreteHMCGibbs

import numpyro_spikeslab as nss

INTERCEPT_SCALE = 5.0
compilations = Compilations()


def logit(f):
    return dist.Bernoulli(logits=f)


def model_of(likelihood, inclusion, intercept=False):
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0.0, INTERCEPT_SCALE)) if intercept else 0.0
        with numpyro.plate("feature", X.shape[1]):
            w = nss.spike_slab("w", inclusion)
        with numpyro.plate("obs", X.shape[0]):
            numpyro.sample("y", likelihood(X @ w + b), obs=y)

    return model


def planted(X, num_active, effect):
    """A predictor of some columns with effects of one size, and a generator for responses."""
    rng = np.random.default_rng(1)
    included = rng.choice(X.shape[1], num_active, replace=False)
    return X[:, included] @ (effect * rng.choice([-1, 1], num_active)), rng


def standardised(X):
    return (X - X.mean(0)) / X.std(0)


def equal():
    X = equicorrelated()[0]
    f, rng = planted(X, 10, 1.5)
    return X, rng.binomial(1, expit(f)), model_of(logit, 0.02)


def counts():
    X = autoregressive(correlation=0.9)[0]
    f, rng = planted(X, 8, 0.4)
    return X, rng.poisson(np.exp(f)), model_of(lambda f: dist.Poisson(jnp.exp(f)), 0.08)


def cancer():
    from sklearn.datasets import load_breast_cancer

    X, y = load_breast_cancer(return_X_y=True)
    return standardised(X), y, model_of(logit, 0.2, intercept=True)


def against_hmc(make, num_ours, num_peer, wanted):
    X, y, model = make()
    X, y = jnp.asarray(X, float), jnp.asarray(y)
    print(f"{make.__name__}, {X.shape[0]} x {X.shape[1]}")
    rates, counted = [], None
    kernels = {
        "PairedGibbs": (nss.PairedGibbs(model), num_ours, 1000),
        "DiscreteHMCGibbs(NUTS)": (DiscreteHMCGibbs(NUTS(model)), num_peer, num_peer // 2),
    }
    for name, (kernel, num_samples, num_warmup) in kernels.items():
        draws, seconds = run(kernel, num_samples, X, y, num_warmup)
        spikes = np.asarray(draws["w_spike"], float)
        if counted is None:
            counted = (spikes.mean(0) > 0.03) & (spikes.mean(0) < 0.97)
        ess = min_ess(spikes[:, counted])
        rates.append(ess / num_samples / seconds)
        print(
            f"  {name}: {rates[-1]:.3g} min ESS/s of {counted.sum()} spikes, ESS {ess:.0f} of "
            f"{num_samples}, {seconds * 1e3:.3f} ms a step",
            flush=True,
        )
    print(f"  ratio {rates[0] / rates[1]:.0f} (wanted: at least {wanted})", flush=True)


def step(num_steps=300, rounds=8):
    """Rounds of some steps, the likelihoods in turn; the shortest of each counts."""
    X, y, model = equal()
    f, rng = planted(X, 10, 1.5)
    cases = {
        "Normal": (model_of(lambda f: dist.Normal(f, 1.0), 0.02), f + rng.normal(size=len(f))),
        "logit": (model, y),
    }
    chains, X = {}, jnp.asarray(X)
    for name, (model, y) in cases.items():
        kernel, y = nss.PairedGibbs(model), jnp.asarray(y)

        def turn(_, state, kernel=kernel, y=y):
            return kernel.sample(state, (X, y), {})

        chain = jax.jit(lambda state, num, turn=turn: jax.lax.fori_loop(0, num, turn, state))
        start = kernel.init(random.key(0), 1000, None, (X, y), {})
        chains[name] = chain, jax.block_until_ready(chain(start, 1000))
    times = dict.fromkeys(chains, np.inf)
    for _ in range(rounds):
        for name, (chain, state) in chains.items():
            start = perf_counter()
            jax.block_until_ready(chain(state, num_steps))
            times[name] = min(times[name], (perf_counter() - start) / num_steps)
    ratio = times["logit"] / times["Normal"]
    report = ", ".join(f"{name} {seconds * 1e3:.3f} ms" for name, seconds in times.items())
    print(f"a step at (400, 500): {report}; ratio {ratio:.2f} (wanted: at most 3)", flush=True)


def all_models(X, y, inclusion, num_draws=16_000):
    """Inclusion probabilities of the logit model with an intercept, by importance sampling of the
    coefficients about the mode of each model; their Monte Carlo error is 0.001 here."""
    rng, (N, P) = np.random.default_rng(0), X.shape
    X, patterns = np.column_stack([np.ones(N), X]), np.array(list(product((0, 1), repeat=P)))
    log_evidence = []
    for pattern in patterns:
        columns = X[:, np.append(True, pattern > 0)]
        precision = np.append(INTERCEPT_SCALE**-2.0, np.ones(pattern.sum()))
        mode = np.zeros(len(precision))
        for _ in range(20):
            p = expit(columns @ mode)
            hessian = columns.T @ ((p * (1 - p))[:, None] * columns) + np.diag(precision)
            mode += np.linalg.solve(hessian, columns.T @ (y - p) - precision * mode)
        # the density of the proposal and that of the coefficients, both without (2 pi)^(-k/2)
        root = 1.1 * np.linalg.cholesky(np.linalg.inv(hessian))
        normal = rng.normal(size=(num_draws, len(mode)))
        w = mode + normal @ root.T
        f = w @ columns.T
        log_weights = f @ y - np.logaddexp(0, f).sum(1) - 0.5 * w**2 @ precision
        log_weights += 0.5 * (normal**2).sum(1) + np.log(np.diag(root)).sum()
        log_weights += 0.5 * np.log(precision).sum() - np.log(num_draws)
        log_prior = np.where(pattern, np.log(inclusion), np.log1p(-inclusion)).sum()
        log_evidence.append(log_prior + logsumexp(log_weights))
    return np.exp(log_evidence - logsumexp(log_evidence)) @ patterns


def file_of(part):
    place = sys.argv.index(part) + 1 if part in sys.argv else len(sys.argv)
    if place == len(sys.argv):
        print(f"{part}: no file is given")
        return None
    return sys.argv[place]


def pima(inclusion=0.2):
    if (path := file_of("pima")) is None:
        return
    table = np.genfromtxt(path, delimiter=",", skip_header=1, dtype=str)
    X, y = standardised(table[:, :-1].astype(float)), table[:, -1] == "Yes"
    truth = all_models(X, y, inclusion)
    X, y = jnp.asarray(X), jnp.asarray(y, int)
    chain = in_time(paired(model_of(logit, inclusion, True), X, y), 20_000)
    inclusion_probs, seconds = compilations.left_out(chain, 1)
    error = np.abs(inclusion_probs - truth).max()
    print(f"pima: largest error {error:.4f} after {seconds:.1f} s (wanted: at most 0.01)")


def millipede(num_seeds=3):
    """Root mean square errors of inclusion probabilities, whose truth is a run of a minute."""
    X, y, model = cancer()
    ours = in_time(paired(model, jnp.asarray(X), jnp.asarray(y)), 2000)
    truth = ours(100, 12)
    runs = {"PairedGibbs": ours}
    try:
        from millipede import BernoulliLikelihoodVariableSelector
        import pandas as pd
        import torch
    except ImportError:
        print("millipede is not installed: no comparison")
    else:
        # its arrays are small: several threads would wait for each other
        torch.set_num_threads(1)
        table = pd.DataFrame(X, columns=[f"x{m}" for m in range(X.shape[1])]).assign(y=y)
        selector = BernoulliLikelihoodVariableSelector(
            table, "y", S=0.2 * X.shape[1], tau=1.0, tau_intercept=INTERCEPT_SCALE**-2.0
        )

        def weighted(seed, num_samples):
            selector.run(T=num_samples, T_burnin=num_samples // 5, verbosity=None, seed=seed)
            return selector.pip.to_numpy()

        runs["millipede"] = in_time(weighted, 200)
    for name, one in runs.items():
        results = np.asarray([one(seed) for seed in range(1, 1 + num_seeds)])
        error = np.sqrt(np.mean((results - truth) ** 2))
        print(f"cancer, 5 s of {name}: root mean square error {error:.4f}", flush=True)


def fits(num_rounds=3):
    """CAVI at 1000 x 5000 to convergence, without compilation, both in turn; the least counts."""
    X, y, w = simulate(0)
    classes = np.random.default_rng(1).binomial(1, expit(X @ w))
    runs = {}
    for name, likelihood, response in (
        ("Normal", lambda f: dist.Normal(f, 1.0), y),
        ("logit", logit, classes),
    ):
        model = model_of(likelihood, NUM_ACTIVE / X.shape[1])
        cavi = nss.CAVI(model, nss.PairedGuide(model))
        data = jnp.asarray(X), jnp.asarray(response)
        runs[name] = partial(cavi.run, random.key(0), 300, *data, tol=1e-3, progress_bar=False)
        runs[name]()
    times = {name: [] for name in runs}
    for _ in range(num_rounds):
        for name, one in runs.items():
            start = perf_counter()
            result = one()
            times[name].append(perf_counter() - start)
            if len(times[name]) == num_rounds:
                seconds, sweeps = min(times[name]), len(result.losses)
                print(f"CAVI, {name}: {seconds:.2f} s, {sweeps} sweeps", flush=True)
    ratio = np.median(np.divide(times["logit"], times["Normal"]))
    print(f"  median ratio {ratio:.1f} (wanted: at most 5)", flush=True)
    try:
        from sparsevb import svb_fit_logit
    except ImportError:
        print("sparsevb is not installed: no comparison")
        return
    for slab in ("gaussian", "laplace"):
        start = perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            svb_fit_logit(X, classes, slab=slab)
        print(f"sparsevb, logit, {slab} slab: {perf_counter() - start:.2f} s")


def lasso(X, y):
    """L1 logistic regression, whose penalty has the best log loss in cross-validation."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    # its intercept is penalised too, but hardly so in other units
    one = LogisticRegression(
        l1_ratio=1.0, solver="liblinear", intercept_scaling=10.0, max_iter=1000, random_state=0
    )
    search = GridSearchCV(one, {"C": np.logspace(-2, 1, 13)}, scoring="neg_log_loss", cv=5)
    return search.fit(X, y)


def leukemia(num_folds=6):
    if (path := file_of("leukemia")) is None:
        return
    from sklearn.metrics import log_loss
    from sklearn.model_selection import StratifiedKFold

    with np.load(path) as data:
        X, y = standardised(data["X"].astype(float)), data["y"].astype(int)
    few, many = (model_of(logit, size / X.shape[1], intercept=True) for size in (5, 100))

    def fit(model, *data):
        guide = nss.PairedGuide(model)
        cavi = nss.CAVI(model, guide)
        result = cavi.run(random.key(0), 300, *data, tol=1e-3, progress_bar=False)
        return guide.sample_posterior(random.key(1), result.params, *data, sample_shape=(1000,))

    def chain(*data):
        mcmc = MCMC(nss.PairedGibbs(few), num_warmup=500, num_samples=500, progress_bar=False)
        mcmc.run(random.key(0), *data)
        return mcmc.get_samples()

    def arrays(*rows):
        return jnp.asarray(X[rows]), jnp.asarray(y[rows])

    print(f"leukemia, {X.shape[0]} x {X.shape[1]} (wanted: CAVI in less than 5 s)")
    methods = {
        "CAVI, 5 genes expected": partial(fit, few),
        "CAVI, 100 genes expected": partial(fit, many),
        "PairedGibbs, 5 genes expected, 1000 steps": chain,
    }
    for name, method in methods.items():
        draws, seconds = compilations.left_out(method, *arrays(...))
        probs = np.asarray(draws["w_spike"], float).mean(0)
        genes = ", ".join(f"{m}: {probs[m]:.2f}" for m in np.argsort(-probs)[:5])
        print(f"  {name}: {seconds:.2f} s, {probs.sum():.1f} genes, {genes}", flush=True)
    losses = {name: [] for name in [*methods, "L1", "shares of the classes"]}
    folds = StratifiedKFold(num_folds, shuffle=True, random_state=0)
    for train, test in folds.split(X, y):
        all_probs = [lasso(X[train], y[train]).predict_proba(X[test])[:, 1]]
        all_probs.append(np.full(len(test), y[train].mean()))
        for method in methods.values():
            draws = method(*arrays(train))
            f = np.asarray(draws["b"])[:, None] + np.asarray(draws["w"]) @ X[test].T
            all_probs.insert(-2, expit(f).mean(0))
        for name, probs in zip(losses, all_probs, strict=True):
            losses[name].append(log_loss(y[test], probs, labels=[0, 1]))
    for name, x in losses.items():
        print(f"  log loss of {num_folds} folds, {name}: {np.mean(x):.3f}", flush=True)


PARTS = {
    "step": step,
    "equal": lambda: against_hmc(equal, 10_000, 1500, 50),
    "counts": lambda: against_hmc(counts, 10_000, 6000, 100),
    "cancer": lambda: against_hmc(cancer, 20_000, 6000, 10),
    "pima": pima,
    "millipede": millipede,
    "fits": fits,
    "leukemia": leukemia,
}


def main() -> None:
    names = PARTS.keys() & sys.argv
    for name, part in PARTS.items():
        if name in names or not names:
            part()
            jax.clear_caches()


if __name__ == "__main__":
    main()
