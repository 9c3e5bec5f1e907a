# SPDX-License-Identifier: Apache-2.0
"""Regressions of a table under all likelihoods, with weights, offsets, groups and priors."""

from functools import partial, reduce
from itertools import product

import numpy as np
import pandas as pd
import pytest
from scipy import special, stats
from scipy.special import logsumexp
from truth.known_draws import columns_of
from truth.time_cases import TIMES, log_density as log_density_of_times

from jax import random

from numpyro.infer.util import log_density

import numpyro_spikeslab as nss
from numpyro_spikeslab.models.responses import RESPONSES, moments, weighted_median
from numpyro_spikeslab.reporting.arviz_data import posterior
from numpyro_spikeslab.support.precision import double_precision

# of counts of thousands the bound of a fit is so loose that no effect is worth it
TOLD = "ignore:sparse_regression. the Monte Carlo", "ignore:sparse_regression. the fit includes no"
pytestmark = pytest.mark.filterwarnings("error", *TOLD)

KEY, EXHAUSTIVE = random.key(0), pytest.mark.exhaustive
NUM_ROWS, INCLUSION, TOTAL = 23, 0.4, 6
# densities of observations up to constant factors, and priors of sites, by scipy
DENSITIES = {
    "normal": lambda y, f, sigma: stats.norm.logpdf(y, f, sigma),
    "student": lambda y, f, sigma, dof: stats.t.logpdf(y, dof, f, sigma),
    "logit": lambda y, f: y * f - np.logaddexp(0, f),
    "probit": lambda y, f: special.log_ndtr((2 * y - 1) * f),
    "binomial": lambda y, f: y * f - TOTAL * np.logaddexp(0, f) + np.log(special.comb(TOTAL, y)),
    # of two levels
    "ordered": lambda y, f, cut: y * (f - cut) - np.logaddexp(0, f - cut),
    "ordered_probit": lambda y, f, cut: special.log_ndtr((2 * y - 1) * (f - cut)),
    "poisson": lambda y, f: y * f - np.exp(f) - special.gammaln(y + 1),
    "negative_binomial": lambda y, f, r: (
        special.gammaln(y + r)
        - special.gammaln(r)
        - special.gammaln(y + 1)
        + r * np.log(r)
        + y * f
        - (y + r) * np.logaddexp(np.log(r), f)
    ),
}
DENSITIES |= {name: partial(log_density_of_times, name) for name in TIMES if name != "cox"}
DENSITIES["cox"] = lambda y, f, h: f + h - np.exp(f + h) * y[0]
SITES = {
    "normal": {"sigma": stats.halfnorm},
    "student": {"sigma": stats.halfnorm, "dof": stats.gamma(2.0, scale=10.0)},
    "negative_binomial": {"concentration": stats.lognorm(2.0)},
    "ordered": {"cutpoints": stats.logistic},
    "ordered_probit": {"cutpoints": stats.norm},
    **{name: {"sigma": stats.halfnorm} for name in TIMES if name not in ("exponential", "cox")},
    # of one piece
    "cox": {"log_hazard": stats.norm(0.0, 10.0)},
}


def data_of(likelihood):
    """Two columns that are correlated, in units of their own; a response, and offsets."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(NUM_ROWS, 2))
    X[:, 1] = 0.6 * X[:, 0] + 0.8 * X[:, 1]
    offset = 0.3 * rng.normal(size=NUM_ROWS)
    f = 0.4 + offset + 0.5 * X[:, 0]
    draws = {
        "student": lambda: f + 0.5 * rng.standard_t(3.0, NUM_ROWS),
        "logit": lambda: rng.binomial(1, special.expit(f)),
        "probit": lambda: rng.binomial(1, special.ndtr(0.6 * f)),
        "binomial": lambda: rng.binomial(TOTAL, special.expit(f)),
        "poisson": lambda: rng.poisson(np.exp(f)),
        "negative_binomial": lambda: rng.poisson(np.exp(f) * rng.gamma(2.0, 0.5, NUM_ROWS)),
    }
    table = pd.DataFrame(X * [10.0, 0.1] + [5.0, -3.0], columns=["a", "b"])
    return table, draws[likelihood]().astype(float), offset


def log_slabs(*w):
    """Log density of weights whose slabs have one standard deviation, from HalfNormal(1)."""
    scale = np.linspace(0.0, 6.0, 601)[1:]
    squares = sum(x[..., None] ** 2 for x in w)
    logs = -0.5 * squares / scale**2 - len(w) * np.log(scale * np.sqrt(2 * np.pi))
    return logsumexp(logs + stats.halfnorm.logpdf(scale), axis=-1) + np.log(scale[0])


def exact(likelihood, X, y, offset, draws, together=False, counts=1.0):
    """Inclusion and means by sums over models and over grids that cover the draws.

    :param draws: of all sites in standard units, by name.
    :param together: whether the columns are a group.
    :param counts: how often rows count.
    """

    def nodes(values, size):
        low, high = values.min(), values.max()
        return np.linspace(low - 0.3 * (high - low), high + 0.3 * (high - low), size)

    sites = SITES.get(likelihood, {})
    # in logarithms
    of_sites = [nodes(np.log(draws[name]), 16) for name in sites]
    logs, sums = [], []
    for model in ((0, 0), (1, 1)) if together else np.ndindex(2, 2):
        places = np.flatnonzero(model)
        axes = [nodes(draws["b"], 31)]
        axes += [nodes(draws["w"][..., p][draws["w"][..., p] != 0], 31) for p in places]
        b, *w = np.meshgrid(*axes, indexing="ij")
        f = reduce(np.add, [x[..., None] * X[:, p] for x, p in zip(w, places, strict=True)], 0.0)
        f = f + b[..., None] + offset
        prior = stats.norm.logpdf(b, 0.0, 10.0) + (log_slabs(*w) if w else 0.0)
        prior += np.log(np.where(model, INCLUSION, 1 - INCLUSION))[together:].sum()
        prior += np.log([axis[1] - axis[0] for axis in axes]).sum()
        for values in map(np.array, product(*of_sites)):
            log = prior + (counts * DENSITIES[likelihood](y, f, *np.exp(values))).sum(-1)
            log += sum(p.logpdf(np.exp(x)) + x for x, p in zip(values, sites.values(), strict=True))
            total = logsumexp(log)
            probs, mean = np.exp(log - total), np.zeros(2)
            mean[places] = [(probs * x).sum() for x in w]
            logs.append(total)
            sums.append([*model, *mean, (probs * b).sum(), *np.exp(values)])
    return np.exp(logs - logsumexp(logs)) @ np.array(sums)


# rows may count a fraction of a time
COUNTS = np.random.default_rng(2).uniform(0.2, 2.5, NUM_ROWS)


@pytest.mark.parametrize(
    ("likelihood", "together", "counts"),
    [
        pytest.param("logit", False, None, id="logit-False"),
        pytest.param("logit", False, COUNTS, id="fractions of classes", marks=EXHAUSTIVE),
        pytest.param("poisson", True, COUNTS, id="poisson-True"),
        pytest.param("student", False, COUNTS, id="student-False", marks=EXHAUSTIVE),
    ],
)
def test_chains_agree_with_quadrature(likelihood, together, counts):
    table, y, offset = data_of(likelihood)
    unit = 20.0 if likelihood == "student" else 1.0
    options = {"groups": [["a", "b"]]} if together else {}
    tree = nss.sparse_regression(
        KEY,
        table,
        unit * y,
        likelihood=likelihood,
        inclusion=INCLUSION,
        offset=unit * offset,
        weights=counts,
        num_warmup=500,
        num_samples=1500,
        **options,
    )
    assert ("cavi" in tree.children) == (likelihood != "poisson")
    assert tree["observed_data"]["y"].dtype == (float if likelihood == "student" else int)
    summary, draws = columns_of(tree), posterior(tree)
    assert ("k_hat" in summary.attrs) == (likelihood != "poisson")
    assert summary["r_hat"].max() < 1.05 and summary.attrs["expected_size"] == (
        0.4 if together else 0.8
    )
    counts = np.ones(NUM_ROWS) if counts is None else counts
    mean, sd = moments(table.to_numpy(), counts)
    standard = {name: draws[name].values for name in SITES.get(likelihood, {})}
    response = y
    centre, scale = 0.0, 1.0
    if likelihood == "student":
        response, offset = y - offset, 0.0
        centre = weighted_median(response, counts)
        scale = weighted_median(abs(response - centre), counts) / stats.norm.ppf(0.75)
        response = (response - centre) / scale
        standard["sigma"] = standard["sigma"] / (unit * scale)
    w = draws["w"].values * sd / (unit * scale)
    b = (draws["intercept"].values + draws["w"].values @ mean) / (unit * scale) - centre / scale
    standard |= {"w": w, "b": b}
    table = (table.to_numpy() - mean) / sd
    truth = exact(likelihood, table, response, offset, standard, together, counts)
    sites = [standard[name] for name in SITES.get(likelihood, {})]
    values = [*np.moveaxis(w != 0, -1, 0), *np.moveaxis(w, -1, 0), b, *sites]
    means = np.array([x.mean() for x in values])
    errors = [_mcse(x.astype(float)) for x in values]
    # five standard errors: one seed in a hundred thousand would fail
    assert (abs(means - truth) < 5 * np.array(errors) + 2e-3 * (1 + abs(truth))).all()


def _mcse(x):
    return float(nss.reporting.arviz_data.arviz_stats.mcse(x, method="mean"))


def test_noise_that_vanishes_is_an_error():
    """Of ties within the two levels of a column no value has more than half of the rows."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    X[:, 1] = np.arange(40) < 20
    y = np.where(np.arange(40) % 10 < 7, 5.0 * X[:, 1], 3 + rng.normal(size=40))
    with pytest.raises(FloatingPointError, match=r"sigma falls to 0, .*likelihood='logit'"):
        nss.sparse_regression(KEY, X, y, likelihood="student", num_samples=50, num_chains=1)


@pytest.mark.parametrize("likelihood", RESPONSES)
def test_models_have_the_density_that_is_documented(likelihood):
    rng = np.random.default_rng(0)
    X, Z, offset = rng.normal(size=(6, 3)), rng.normal(size=(6, 1)), rng.normal(size=6)
    y = rng.binomial(1, 0.5, 6) + (1.5 if likelihood in TIMES else 0.0)
    values = {"w_spike": np.array([1, 0]), "w_slab": rng.normal(size=3), "slab_scale": 0.7}
    values |= {"always": rng.normal(size=1), "intercept": 0.3, "inclusion": 0.2}
    values |= dict.fromkeys(SITES.get(likelihood, {}), 1.3)
    for vector in {"cutpoints", "log_hazard"} & {*values}:
        values[vector] = np.array([1.3])
    model = nss.models.sparse_regression(likelihood=likelihood, groups=(0, 1, 0))
    with double_precision():
        totals = np.full(6, TOTAL) if likelihood == "binomial" else None
        got = float(log_density(model, (X, y, Z, offset, totals), {}, values)[0])
    f = X @ (values["w_slab"] * [1, 0, 1]) + Z @ values["always"] + offset
    expected = stats.norm.logpdf(values["always"], 0, 10).sum()
    if RESPONSES[likelihood].has_intercept:
        f += 0.3
        expected += stats.norm.logpdf(0.3, 0, 10)
    expected += stats.halfnorm.logpdf(0.7) + stats.beta.logpdf(0.2, 1, 9) + np.log(0.2 * 0.8)
    expected += stats.norm.logpdf(values["w_slab"], 0, 0.7).sum()
    sites = SITES.get(likelihood, {})
    expected += sum(prior.logpdf(1.3) for prior in sites.values())
    y = np.stack([y, y]) if likelihood in TIMES else y
    expected += DENSITIES[likelihood](y, f, *[1.3] * len(sites)).sum()
    assert got == pytest.approx(expected, rel=1e-9)


# Classes that are separated, and large counts


def one_column(likelihood, x, y):
    """Inclusion, mean, sd and 95% quantile of one weight, of inclusion 1/2, by a fine grid."""
    b, w = np.linspace(-45, 35, 801), np.linspace(-12, 36, 601)
    values, counts = np.unique(np.stack([x, y]), axis=1, return_counts=True)
    logs = np.zeros((2, len(b), len(w)))
    for (point, response), count in zip(values.T, counts, strict=True):
        for model in (0, 1):
            f = b[:, None] + model * point * w
            logs[model] += count * DENSITIES[likelihood](response, f)
    logs += stats.norm.logpdf(b, 0.0, 10.0)[:, None]
    logs += np.stack([stats.norm.logpdf(w), log_slabs(w)])[:, None]
    probs = np.exp(logs - logs.max())
    marginal = probs[1].sum(axis=0) / probs[1].sum()
    mean, quantile = marginal @ w, np.interp(0.95, np.cumsum(marginal), w + 0.5 * (w[1] - w[0]))
    sd = np.sqrt(marginal @ (w - mean) ** 2)
    return probs[1].sum() / probs.sum(), mean, sd, quantile


@pytest.mark.parametrize("likelihood", ["logit", "probit"])
def test_weights_of_separated_classes_have_their_tails(likelihood):
    """All rows of one value are in one class."""
    x = (np.arange(40) < 10) * 1.0
    y = np.where(x == 1, 1.0, np.arange(40) % 5 < 2)
    inclusion, *expected = one_column(likelihood, (x - x.mean()) / x.std(), y)
    # chains that stop by themselves do so before they have been in the tails
    options = {"likelihood": likelihood, "inclusion": 0.5, "num_samples": 4000}
    tree = nss.sparse_regression(KEY, x[:, None], y, **options)
    assert columns_of(tree)["r_hat"].max() < 1.05
    w = np.ravel(posterior(tree)["w"]) * x.std()
    included = w[w != 0]
    assert abs(np.mean(w != 0) - inclusion) < 0.03
    actual = np.mean(included), np.std(included), np.quantile(included, 0.95)
    # more than three standard errors: a false alarm in 1 of 200 keys
    np.testing.assert_allclose(actual, expected, rtol=0.1)


@pytest.mark.parametrize("mean", [1e3, 1e6])
def test_large_counts_have_the_posterior_of_quadrature(mean):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(40, 2))
    rate = mean * np.exp(0.5 * X[:, 0] + 0.17 * X[:, 1]) * rng.gamma(5.0, 0.2, 40)
    y = rng.poisson(rate).astype(float)
    tree = nss.sparse_regression(KEY, X, y, likelihood="negative_binomial", inclusion=INCLUSION)
    draws = posterior(tree)
    assert columns_of(tree)["r_hat"].max() < 1.05
    w, r = draws["w"].values * X.std(axis=0), draws["concentration"].values
    b = draws["intercept"].values + draws["w"].values @ X.mean(axis=0)
    standard = {"w": w, "b": b, "concentration": r}
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    truth = exact("negative_binomial", X, y, np.zeros(40), standard)
    means = np.array([*(w != 0).mean(axis=(0, 1)), *w.mean(axis=(0, 1)), b.mean(), r.mean()])
    assert (abs(means - truth) < [0.03, 0.03, 0.03, 0.03, 0.03, 0.15]).all()
