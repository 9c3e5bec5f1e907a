# SPDX-License-Identifier: Apache-2.0
"""Kinds of responses of a regression: their distributions, priors, checks and units."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np
from scipy.special import ndtri

import jax.numpy as jnp
from jax.scipy.special import ndtr

import numpyro.distributions as dist

from numpyro_spikeslab.support.messages import bad

ROUNDING = 1e-12
"""A column or a response that varies less, relative to its largest value, is constant."""

WIDE = 10.0
"""Standard deviation of the prior of intercepts and of columns that are always in."""

Numbers = Float[np.ndarray, " N"]


class ResponseKind(NamedTuple):
    """A distribution of single observations around an affine predictor.

    - **name** - the argument ``likelihood`` of a regression.
    - **distribution** - of observations, given the predictor, the trials, and the sites by name.
    - **sites** - priors of the distribution's own sites, all positive, in standard units, given
      the scale of noise.
    - **free_sites** - the sites that need NUTS.
    - **check** - refuses responses, given with their trials, that the distribution does not allow.
    - **ends** - responses, divided by trials, that are most probable at an infinite predictor.
    - **units** - centre and scale by which responses, less offsets, are standardised; `None` if
      the predictor has a scale of its own.
    - **has_intercept** - whether the model has an intercept; else contrasts of rows do without.
    - **has_precisions** - whether weights of rows are precisions; else they are how often a row
      counts.
    - **has_fractions** - whether a row may count a fraction of a time: whether powers of the
      density have an augmentation, or it needs none.
    - **has_trials** - whether responses are counts of trials.
    - **start** - for a distribution that :class:`~numpyro_spikeslab.CAVI` does not take: an
      intercept near the data, given responses, offsets and how often rows count, at which chains
      start.
    - **warmup** - default number of steps of warm-up, by which chains of all but Normal likelihoods
      learn their proposals.
    """

    name: str
    distribution: Callable[..., dist.Distribution]
    sites: Callable[[Any], dict[str, dist.Distribution]] = lambda noise: {}
    free_sites: tuple[str, ...] = ()
    check: Callable[[Numbers, Numbers], None] = lambda y, totals: None
    ends: tuple[float, ...] = ()
    units: Callable[..., tuple[float, float]] | None = None
    has_intercept: bool = True
    has_precisions: bool = False
    has_fractions: bool = True
    has_trials: bool = False
    start: Callable[..., float] | None = None
    warmup: int = 500


def check_classes(y: Numbers, totals: Numbers) -> None:
    """Refuse responses other than 0 and 1."""
    if not np.isin(y, (0, 1)).all():
        remedy = "A comparison such as y == 'yes' makes classes."
        raise bad("y", f"values from {y.min():g} to {y.max():g}", "classes, 0 and 1", remedy)


def check_counts(y: Numbers, totals: Numbers) -> None:
    """Refuse all but whole numbers from 0 to the number of trials, which may be infinite."""
    for name, x, most in ("totals", totals, np.full(len(y), np.inf)), ("y", y, totals):
        wrong = np.flatnonzero((x < 0) | (x > most) | (x != np.round(x)))
        if wrong.size:
            row = wrong[0]
            to = f" to {most[row]:g}, the row's total" if np.isfinite(most[row]) else ""
            raise bad(name, f"{x[row]:g} in row {row}", f"whole numbers from 0{to}")


def moments(y: Float[np.ndarray, "N *P"], weights: Numbers) -> tuple[Any, Any]:
    """Compute the weighted mean and standard deviation of each column."""
    mean = np.average(y, axis=0, weights=weights)
    return mean, np.sqrt(np.average((y - mean) ** 2, axis=0, weights=weights))


def weighted_median(y: Numbers, weights: Numbers) -> float:
    """Compute the median of numbers that count as often as the weights say."""
    order = np.argsort(y)
    share = np.cumsum(weights[order]) / weights.sum()
    ends = np.searchsorted(share, (0.5 - ROUNDING, 0.5 + ROUNDING))
    return float(y[order][ends].mean())


def median_and_deviation(y: Numbers, weights: Numbers) -> tuple[float, float]:
    """Compute median and median absolute deviation, in units of a Normal's standard deviation.

    Outliers do not move them.

    :raises ValueError: if more than half of the responses are equal. With k equal ones and m others
        the density of ``sigma`` near 0 is that of ``sigma ** (dof * m - k + 1)``, whose integral is
        infinite then even under tails like Cauchy's, with a ``dof`` of 1.
    """
    centre = weighted_median(y, weights)
    deviation = weighted_median(np.abs(y - centre), weights)
    if deviation <= ROUNDING * np.max(np.abs(y)):
        got = f"{centre:g} in more than half of the rows, where noise of a Student-t may vanish"
        remedy = (
            "Regress whether it is this number by likelihood='logit', and the other rows alone; "
            "many zeros among counts suit likelihood='negative_binomial'."
        )
        raise bad("y", got, "numbers that differ in half of the rows or more", remedy)
    return centre, deviation / float(ndtri(0.75))


def log_rate(y: Numbers, offset: Numbers, count: Any) -> float:
    """Compute the logarithm of the mean count for an exposure of 1."""
    # half a count more is finite without counts
    return float(np.log(((count * y).sum() + 0.5) / (count * np.exp(offset)).sum()))


KINDS = (
    ResponseKind(
        "normal",
        lambda f, totals, sigma: dist.Normal(f, sigma),
        lambda noise: {"sigma": dist.HalfNormal(noise)},
        units=moments,
        has_intercept=False,
        has_precisions=True,
        warmup=50,
    ),
    ResponseKind(
        "student",
        lambda f, totals, sigma, dof: dist.StudentT(dof, f, sigma),
        # the prior of Juarez and Steel (2010) allows all tails from heavy to Normal ones
        lambda noise: {"sigma": dist.HalfNormal(noise), "dof": dist.Gamma(2.0, 0.1)},
        ("sigma", "dof"),
        units=median_and_deviation,
    ),
    ResponseKind(
        "logit", lambda f, totals: dist.Bernoulli(logits=f), check=check_classes, ends=(0.0, 1.0)
    ),
    ResponseKind(
        "probit",
        lambda f, totals: dist.Bernoulli(probs=ndtr(f)),
        check=check_classes,
        ends=(0.0, 1.0),
        has_fractions=False,
    ),
    ResponseKind(
        "binomial",
        lambda f, totals: dist.Binomial(totals, logits=f),
        check=check_counts,
        ends=(0.0, 1.0),
        has_trials=True,
    ),
    ResponseKind(
        "poisson",
        lambda f, totals: dist.Poisson(jnp.exp(f)),
        check=check_counts,
        ends=(0.0,),
        start=log_rate,
    ),
    ResponseKind(
        "negative_binomial",
        lambda f, totals, concentration: dist.NegativeBinomial2(jnp.exp(f), concentration),
        lambda noise: {"concentration": dist.LogNormal(0.0, 2.0)},
        ("concentration",),
        check=check_counts,
        ends=(0.0,),
    ),
)
RESPONSES = {kind.name: kind for kind in KINDS}
"""The kinds by name."""


def response_kind(likelihood: Any) -> ResponseKind:
    """Return the kind of that name; a kind is itself.

    :raises ValueError: for other names.
    """
    if isinstance(likelihood, ResponseKind):
        return likelihood
    if likelihood not in RESPONSES:
        raise bad("likelihood", repr(likelihood), f"one of {', '.join(map(repr, RESPONSES))}")
    return RESPONSES[likelihood]
