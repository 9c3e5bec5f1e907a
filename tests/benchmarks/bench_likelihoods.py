# SPDX-License-Identifier: Apache-2.0
"""Likelihoods that are not Normal: PairedGibbs and CAVI against the Normal one and their peers.

Parts: ``step``, milliseconds of a step beside the Normal likelihood's on the same design;
``equal``, ``counts`` and ``cancer``, least effective sample size per second of the spikes with
inclusion between 0.03 and 0.97, beside NumPyro's DiscreteHMCGibbs(NUTS); ``pima``, errors against
all 128 models; ``millipede``, errors on the cancer data after equal times; ``fits``, CAVI to
convergence beside sparsevb (C++).
Run: ``python tests/benchmarks/bench_likelihoods.py``, with names of parts for these alone. Cancer
data need scikit-learn, Pima data a file whose name follows ``pima``, with seven columns and the
class. The peers of the last two, ``pip install millipede-regression sparsevb``, are optional.
"""

from itertools import product
import sys
from time import perf_counter

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
from numpyro.infer import NUTS, DiscreteHMCGibbs

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


def pima(inclusion=0.2):
    place = sys.argv.index("pima") + 1 if "pima" in sys.argv else len(sys.argv)
    if place == len(sys.argv):
        print("pima: no file is given")
        return
    table = np.genfromtxt(sys.argv[place], delimiter=",", skip_header=1, dtype=str)
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
    except ImportError:
        print("millipede is not installed: no comparison")
    else:
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


def fits():
    """CAVI at 1000 x 5000 to convergence, without compilation."""
    X, y, _ = simulate(0)
    classes = np.random.default_rng(1).binomial(1, expit(X @ simulate(0)[2]))
    inclusion, times = NUM_ACTIVE / X.shape[1], {}
    for name, likelihood, response in (
        ("Normal", lambda f: dist.Normal(f, 1.0), y),
        ("logit", logit, classes),
    ):
        model = model_of(likelihood, inclusion)
        cavi = nss.CAVI(model, nss.PairedGuide(model))
        for _ in range(2):
            start = perf_counter()
            arrays = jnp.asarray(X, float), jnp.asarray(response)
            result = cavi.run(random.key(0), 300, *arrays, tol=1e-3, progress_bar=False)
            times[name] = perf_counter() - start
        print(f"CAVI, {name}: {times[name]:.2f} s, {len(result.losses)} sweeps", flush=True)
    print(f"  ratio {times['logit'] / times['Normal']:.1f} (wanted: at most 5)")
    try:
        from sparsevb import svb_fit_logit
    except ImportError:
        print("sparsevb is not installed: no comparison")
        return
    start = perf_counter()
    svb_fit_logit(X, classes)
    print(f"sparsevb, logit: {perf_counter() - start:.2f} s")


PARTS = {
    "step": step,
    "equal": lambda: against_hmc(equal, 10_000, 1500, 50),
    "counts": lambda: against_hmc(counts, 10_000, 6000, 100),
    "cancer": lambda: against_hmc(cancer, 20_000, 6000, 10),
    "pima": pima,
    "millipede": millipede,
    "fits": fits,
}


def main() -> None:
    names = PARTS.keys() & sys.argv
    for name, part in PARTS.items():
        if name in names or not names:
            part()
            jax.clear_caches()


if __name__ == "__main__":
    main()
