# SPDX-License-Identifier: Apache-2.0
"""Likelihoods and their observations that are refused, with the site and the remedy."""

import numpy as np
import pytest
from test_refused_models import assert_says, fit, sample, with_entry
from truth.regressions import N, P, X, Y, read, regression

from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist

import numpyro_spikeslab as nss

pytestmark = pytest.mark.usefixtures("x64")

COUNTS = np.arange(N)
CLASSES = (Y > 0).astype(int)


class Cauchy(dist.Distribution):
    """A distribution whose density a user has got wrong."""

    support = dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(jnp.shape(loc))

    def log_prob(self, value):
        return -jnp.log1p(-((value - self.loc) ** 2))


def sample_two(model, *args):
    """Chains side by side."""
    nss.PairedGibbs(model).init(random.split(random.key(0), 2), 0, None, args, {})


LOGIT = regression(lambda X, w: dist.Bernoulli(logits=X @ w))
POISSON = regression(lambda X, w: dist.Poisson(jnp.exp(X @ w)))
BINOMIAL = regression(lambda X, w: dist.Binomial(COUNTS + 1, logits=X @ w))
NEGATIVE = regression(lambda X, w: dist.NegativeBinomial2(jnp.exp(X @ w), 1.5))
GAMMA = regression(lambda X, w: dist.Gamma(2.0, jnp.exp(X @ w)))
BETWEEN = regression(
    lambda X, w: dist.IntervalCensoredDistribution(
        dist.LogNormal(X @ w, 0.5), np.arange(N) == 0, np.arange(N) == 1
    )
)
ENDS = np.stack([COUNTS, COUNTS + 1.0], axis=1)
OUTSIDE = ("observations of 'y'", "outside of the support", "classes 0 and 1, counts from 0 up to")
NAN = ("observations of 'y' are not finite", "first at 3", "handlers.mask")
BENT = ("'y'", "affine", "Let no other parameter depend on them")
START = ("log density of 'y' at the start", "finite", "init_params")
CASES = {
    "negative counts": (read, POISSON, with_entry(COUNTS, 3, -1), ("first at 3", *OUTSIDE)),
    "fractions": (read, NEGATIVE, COUNTS + 0.5, ("8 outside", *OUTSIDE)),
    "a fraction": (read, BINOMIAL, with_entry(1.0 * COUNTS, 3, 2.5), ("first at 3", *OUTSIDE)),
    "a class 2": (read, LOGIT, with_entry(CLASSES, 3, 2), ("first at 3", *OUTSIDE)),
    "classes 1 and -1": (read, LOGIT, 2 * CLASSES - 1, OUTSIDE),
    "more than the total": (read, BINOMIAL, with_entry(COUNTS, 3, 5), ("first at 3", *OUTSIDE)),
    "zero": (read, GAMMA, COUNTS, ("1 outside", "first at 0", *OUTSIDE)),
    "zero as an end": (read, BETWEEN, with_entry(ENDS, 3, 0.0), ("first at 3", *OUTSIDE)),
    "ends out of order": (
        read,
        BETWEEN,
        with_entry(ENDS, 3, (4.0, 3.0)),
        ("first at 3", "lower end first"),
    ),
    "class NaN": (read, LOGIT, with_entry(1.0 * CLASSES, 3, np.nan), NAN),
    "infinite count": (read, POISSON, with_entry(1.0 * COUNTS, 3, np.inf), NAN),
    "counts of a sampler": (sample, POISSON, COUNTS - 1, ("PairedGibbs", *OUTSIDE)),
    "classes of a fit": (fit, LOGIT, CLASSES + 1, ("CAVI", *OUTSIDE)),
    "predictor": (
        read,
        regression(lambda X, w: dist.Bernoulli(logits=X @ w**2 + X @ w)),
        CLASSES,
        ("Bernoulli", *BENT),
    ),
    "dispersion": (
        read,
        regression(lambda X, w: dist.NegativeBinomial2(jnp.exp(X @ w), jnp.exp(w[0]))),
        COUNTS,
        ("NegativeBinomial2", *BENT),
    ),
    "degrees of freedom": (
        read,
        regression(lambda X, w: dist.StudentT(3.0 + w[0] ** 2, X @ w, 0.5)),
        Y,
        ("StudentT", *BENT),
    ),
    "scale": (
        read,
        regression(lambda X, w: dist.Laplace(X @ w, jnp.exp(w[0]))),
        Y,
        ("Laplace", *BENT),
    ),
    "total": (
        read,
        regression(lambda X, w: dist.Binomial(9 + jnp.sum(w != 0), logits=X @ w)),
        COUNTS,
        ("Binomial", *BENT),
    ),
    "overflow": (
        sample,
        regression(
            lambda X, w: dist.Poisson(jnp.exp(1e6 * (X @ w)), validate_args=False),
            lambda P: nss.spike_slab("w", 0.999),
        ),
        COUNTS,
        START,
    ),
    "overflow of two chains": (
        sample_two,
        regression(
            lambda X, w: dist.Poisson(jnp.exp(1e6 * (X @ w)), validate_args=False),
            lambda P: nss.spike_slab("w", 0.999),
        ),
        COUNTS,
        START,
    ),
    "one's own density": (sample, regression(lambda X, w: Cauchy(X @ w)), 9 * Y, START),
    "degrees of freedom below zero": (
        sample,
        regression(lambda X, w: dist.StudentT(-1.0, X @ w, 0.5, validate_args=False)),
        Y,
        START,
    ),
    **{
        name: (
            read,
            regression(lambda X, w, mix=mix: dist.Poisson(mix(jnp.exp(X @ w)))),
            COUNTS,
            ("Poisson", "'y'", "not elementwise", operation),
        )
        for name, (mix, operation) in {
            "reversed": (lambda x: x[::-1], "rev"),
            "shifted": (lambda x: x + jnp.roll(x, 1), "slice"),
            "sums so far": (jnp.cumsum, "cumsum"),
            "shares": (lambda x: x / jnp.sum(x), "reduce_sum"),
            "of all pairs": (lambda x: jnp.sum(x + x[:, None], axis=1), "broadcast_in_dim"),
            "in another order": (lambda x: x.reshape(2, -1).T.reshape(-1), "reshape"),
            "drawn": (lambda x: x[np.arange(N)[::-1]], "gather"),
            "smoothed": (lambda x: np.eye(N) @ x, "dot_general"),
        }.items()
    },
    "fit without auxiliaries": (fit, POISSON, COUNTS, ("CAVI", "'y'", "SVI", "PairedGibbs")),
}


@pytest.mark.parametrize("name", CASES)
def test_likelihoods_are_refused_with_the_site_and_the_remedy(name):
    use, model, y, parts = CASES[name]
    assert_says(use, model, (X, y), *parts)


def test_missing_observations_may_be_anything():
    y = with_entry(1.0 * CLASSES, 3, np.nan)

    def model(seen):
        return regression(lambda X, w: dist.Bernoulli(logits=X @ w).mask(seen))

    assert read(model(np.arange(N) != 3), X, y).form.size == P
    assert_says(read, model(np.arange(N) != 4), (X, y), *NAN)


def test_the_other_end_of_a_censored_observation_may_be_anything():
    ends = with_entry(with_entry(ENDS, (0, 0), np.nan), (1, 1), -np.inf)
    assert read(BETWEEN, X, ends).form.size == P
