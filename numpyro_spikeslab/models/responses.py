# SPDX-License-Identifier: Apache-2.0
"""Kinds of responses of a regression: their distributions, priors, checks and units."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from jaxtyping import Float
import numpy as np
from scipy.special import logsumexp, ndtri

import jax.numpy as jnp
from jax.scipy.special import ndtr

import numpyro.distributions as dist

from numpyro_spikeslab.models.distributions import OrderedProbit, Sorted
from numpyro_spikeslab.models.times import (
    LogLogisticTime,
    LogNormalTime,
    PiecewiseTime,
    ScaledTime,
    WeibullTime,
    event_breaks,
)
from numpyro_spikeslab.support.messages import bad

ROUNDING = 1e-12
"""A column or a response that varies less, relative to its largest value, is constant."""

WIDE = 10.0
"""Standard deviation of the prior of intercepts and of columns that are always in."""

Numbers = Float[np.ndarray, " N"]


class ResponseKind(NamedTuple):
    """A distribution of single observations around an affine predictor.

    - **name** - the argument ``likelihood`` of a regression.
    - **distribution** - of observations, given the predictor, what is beside the response, and the
      sites by name.
    - **sites** - priors of the distribution's own sites in standard units, given the scale of noise
      and `size`.
    - **free_sites** - the sites that :class:`~numpyro_spikeslab.PairedGibbs` does not draw.
    - **draw** - draws them given a key, distributions of rows, responses, and how often they count;
      `None` where NUTS does.
    - **check** - refuses responses, given with what is beside them, that the distribution does not
      allow.
    - **ends** - responses, divided by trials, that are most probable at an infinite predictor.
    - **units** - centre and scale of the response, from rows with offsets and weights; `None` if
      the predictor has a scale and a centre of its own.
    - **in_units** - arguments of the model for the response, from rows, centre and scale.
    - **has_intercept** - whether the model has an intercept.
    - **has_contrasts** - whether contrasts of rows take its place.
    - **along** - the dimension of what takes its place: ``"level"`` of classes in order, which have
      cut points, or ``"piece"`` of time, which have hazards.
    - **size** - how many of these there are, else 0.
    - **has_precisions** - whether weights of rows are precisions; else they are how often a row
      counts.
    - **has_fractions** - whether a row may count a fraction of a time: whether powers of the
      density have an augmentation, or it needs none.
    - **beside** - what each response has beside it: ``"totals"``, the trials of a count, or
      ``"upper"``, the upper limit of a time, where the response is the lower one.
    - **numbers** - responses, given what is beside them, as numbers that offsets are added to; of
      trials their share.
    - **start** - for a distribution that :class:`~numpyro_spikeslab.CAVI` does not take: where
      chains start, near the data, given responses, offsets and how often rows count; by site.
    - **mean** - of responses, or their location or median where a distribution may have no mean.
    - **warmup** - default number of steps of warm-up, by which chains of all but Normal likelihoods
      learn their proposals.
    - **ratio** - name of the exponential of a weight, ``"odds_ratio"`` for example.
    - **advice** - what to try instead, given :class:`Fitted` responses that do not look like draws
      of the distribution; else empty.
    """

    name: str
    distribution: Callable[..., dist.Distribution]
    sites: Callable[[Any, int], dict[str, dist.Distribution]] = lambda noise, size: {}
    free_sites: tuple[str, ...] = ()
    draw: Callable[..., dict[str, Any]] | None = None
    check: Callable[[Numbers, Numbers], None] = lambda y, beside: None
    ends: tuple[float, ...] = ()
    units: Callable[[Any], tuple[float, float]] | None = None
    in_units: Callable[[Any, float, float], dict[str, Any]] = lambda rows, centre, scale: {
        "y": rows.y,
        "offset": rows.offset,
    }
    has_intercept: bool = True
    has_contrasts: bool = False
    along: str | None = None
    size: int = 0
    has_precisions: bool = False
    has_fractions: bool = True
    beside: str | None = None
    numbers: Callable[[Numbers, Numbers], Numbers] = lambda y, beside: y
    start: Callable[..., dict[str, float]] | None = None
    mean: Callable[[dist.Distribution], Any] = attrgetter("mean")
    warmup: int = 500
    ratio: str | None = None
    advice: Callable[["Fitted"], str] = lambda fitted: ""

    @property
    def own_sites(self) -> dict[str, dist.Distribution]:
        """Return the priors of the distribution's own sites for a noise of 1."""
        return self.sites(1.0, self.size)

    @property
    def has_trials(self) -> bool:
        """Whether responses are counts of trials."""
        return self.beside == "totals"

    @property
    def has_limits(self) -> bool:
        """Whether responses are times that lie between limits."""
        return self.beside == "upper"

    def of_rows(self, f: Any, sites: dict[str, Any], beside: Any, weights: Any) -> Any:
        """Return the distributions of rows at draws of their predictor, shape (S, N), and of the
        sites, each (S, 1), or (S, 1, D) of vectors."""
        # where weights are precisions, noise is the only site
        scale = weights**-0.5 if self.has_precisions else 1.0
        beside = beside.astype(int) if self.has_trials else beside
        return self.distribution(f, beside, **{k: x * scale for k, x in sites.items()})

    def log_likelihood(self, distribution: dist.Distribution, y: Any, weights: Any) -> Any:
        """Compute the log likelihood of rows, those of weight k counted k times unless weights are
        precisions, which the distributions have."""
        return distribution.log_prob(y) * (1.0 if self.has_precisions else weights)


def in_standard_units(rows: Any, centre: float, scale: float) -> dict[str, Any]:
    """Standardise numbers."""
    return {"y": (rows.y - rows.offset - centre) / scale}


def trials(rows: Any, centre: float, scale: float) -> dict[str, Any]:
    """Return counts with their totals."""
    return {"y": rows.y, "offset": rows.offset, "totals": rows.beside}


def scaled_times(rows: Any, centre: float, scale: float) -> dict[str, Any]:
    """Standardise logarithms of limits of times."""
    unit = np.exp(rows.offset + centre)
    lower, upper = ((x / unit) ** (1 / scale) for x in (rows.y, rows.beside))
    return {"y": lower, "upper": upper}


def times_in_pieces(rows: Any, centre: float, scale: float) -> dict[str, Any]:
    """Return limits of times, whose log hazards are relative to a centre."""
    breaks = event_breaks(rows.beside, rows.weights)
    offset = rows.offset + centre
    return {"y": rows.y, "upper": rows.beside, "offset": offset, "breaks": breaks}


class Fitted(NamedTuple):
    """Responses, predictors at the posterior mean, how often rows count, and their precisions."""

    y: Numbers
    predictor: Numbers
    counts: Numbers
    precisions: Numbers


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


def check_times(y: Numbers, upper: Numbers) -> None:
    """Refuse limits that no time lies between, and times of which none is known from above."""
    rules = (
        ((y < 0) | (upper <= 0), "positive times; 0 as a lower limit where there is none"),
        ((y == 0) & np.isinf(upper), "a lower limit above 0, or a finite upper one"),
        (y > upper, "a lower limit that is not above the upper one"),
    )
    for wrong, expected in rules:
        if wrong.any():
            row = np.flatnonzero(wrong)[0]
            ends = "" if y[row] == upper[row] else f" and {upper[row]:g}"
            raise bad("y", f"{y[row]:g}{ends} in row {row}", expected)
    if np.isinf(upper).all():
        raise bad("y, event", "censored times in every row", "one or more events")


def log_times(y: Numbers, upper: Numbers) -> Numbers:
    """Compute logarithms of times, or of their lower limit, or of the upper one if it is alone."""
    return np.log(np.where(y > 0, y, upper))


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


def median_and_deviation(rows: Any) -> tuple[float, float]:
    """Compute median and median absolute deviation, in units of a Normal's standard deviation.

    Outliers do not move them.

    :raises ValueError: if more than half of the responses are equal. With k equal ones and m others
        the density of ``sigma`` near 0 is that of ``sigma ** (dof * m - k + 1)``, whose integral is
        infinite then even under tails like Cauchy's, with a ``dof`` of 1.
    """
    y = rows.y - rows.offset
    centre = weighted_median(y, rows.weights)
    deviation = weighted_median(np.abs(y - centre), rows.weights)
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


def log_mean_hazard(rows: Any) -> tuple[float, float]:
    """Compute the log of the mean hazard; it has no other unit than that of time."""
    exposure = rows.offset + log_times(rows.y, rows.beside)
    events = 1.0 * np.isfinite(rows.beside)
    return log_rate(events, exposure, rows.weights), 1.0


FALSE_ALARM = 0.01
"""Bound of the probability that responses of the right distribution get an advice."""


def is_better(gains: Float[np.ndarray, "N K"]) -> bool:
    """Whether other densities fit better, given the rise of each row's log density by each.

    The average of their likelihood ratios has the mean 1 if the present density is right, so it
    exceeds ``1 / FALSE_ALARM`` with the probability ``FALSE_ALARM`` at most, for any number of rows
    (Ville's and Markov's inequality). That noise and predictor are fitted makes it rarer.
    """
    mean = logsumexp(gains.sum(axis=0)) - np.log(gains.shape[1])
    return bool(mean > -np.log(FALSE_ALARM))


def advice_on_tails(fitted: Fitted) -> str:
    """Say whether residuals have heavier tails than Normal ones."""
    from scipy import stats  # takes long to import, and ArviZ does later on

    counts = fitted.counts
    residuals = (fitted.y - fitted.predictor) * np.sqrt(fitted.precisions)
    scale = np.sqrt(np.average(residuals**2, weights=counts))
    if scale <= ROUNDING * np.max(np.abs(fitted.y)):
        return ""
    # outliers on one side move the mean, and not the median
    centre = weighted_median(residuals, counts)
    z, centred = (x[:, None] / scale for x in (residuals, residuals - centre))
    dof, unit = (x.ravel() for x in np.meshgrid((1.0, 2.0, 4.0), (0.1, 0.2, 0.4, 0.6, 0.8)))
    gains = stats.t.logpdf(centred, dof, scale=unit) - stats.norm.logpdf(z)
    if not is_better(counts[:, None] * gains):
        return ""
    remedy = "try likelihood='student', or the logarithm of a skewed y"
    return f"residuals have heavier tails than Normal ones: {remedy}"


def advice_on_variance(fitted: Fitted) -> str:
    """Say whether counts vary more than Poisson ones."""
    from scipy import stats

    y, mean = fitted.y[:, None], np.exp(fitted.predictor)[:, None]
    size = 10.0 ** np.arange(-1.0, 3.0)
    gains = stats.nbinom.logpmf(y, size, size / (size + mean)) - stats.poisson.logpmf(y, mean)
    if not is_better(fitted.counts[:, None] * gains):
        return ""
    return "counts vary more than Poisson ones: try likelihood='negative_binomial'"


def advice_on_separation(limit: float, fitted: Fitted) -> str:
    """Say whether predictors are beyond a limit, where probabilities are 0 or 1."""
    if np.max(np.abs(fitted.predictor)) < limit:
        return ""
    return (
        "columns separate the classes, so the prior sets the size of their effects: report their "
        "inclusion, and leave them out of `always`, whose prior is wide"
    )


of_log_odds, of_probits = (partial(advice_on_separation, limit) for limit in (13.0, 7.5))


def _ordered(name: str, of: Any, error: Any, advice: Any, **others: Any) -> ResponseKind:
    """Make a kind of classes in order, which meet at cut points of a predictor with an error.

    Under the prior all probabilities of the levels at the predictor 0 are alike, so the data count
    as if each level had one row more, however many levels there are. They are the distances of
    sorted uniform numbers, and cut points are sorted draws of the error. Betancourt (2019, *Ordinal
    regression*) calls it an induced Dirichlet prior.
    """
    return ResponseKind(
        name,
        lambda f, totals, cutpoints: of(f, cutpoints),
        lambda noise, size: {"cutpoints": Sorted(error().expand((size - 1,)))},
        ("cutpoints",),
        ends=(0.0,),
        has_intercept=False,
        along="level",
        size=2,
        mean=attrgetter("probs"),
        advice=advice,
        **others,
    )


def _times(name: str, of: type[ScaledTime], *sites: str) -> ResponseKind:
    """Make a kind of times whose logarithms have the predictor as their location."""

    def units(rows: Any) -> tuple[float, float]:
        mean, sd = moments(log_times(rows.y, rows.beside) - rows.offset, rows.weights)
        # the scale of logarithms without a site is known
        return mean, sd if sites else 1.0

    return ResponseKind(
        name,
        lambda f, upper, sigma=1.0: of(f, sigma, upper),
        # of logarithms in units of their standard deviation, as the noise of a Normal response
        lambda noise, size: {site: dist.HalfNormal(noise) for site in sites},
        sites,
        check=check_times,
        units=units,
        in_units=scaled_times,
        beside="upper",
        numbers=log_times,
        start=lambda y, offset, count: {"intercept": 0.0},
        mean=attrgetter("median"),
        ratio="time_ratio",
    )


KINDS = (
    ResponseKind(
        "normal",
        lambda f, totals, sigma: dist.Normal(f, sigma),
        lambda noise, size: {"sigma": dist.HalfNormal(noise)},
        units=lambda rows: moments(rows.y - rows.offset, rows.weights),
        in_units=in_standard_units,
        has_intercept=False,
        has_contrasts=True,
        has_precisions=True,
        warmup=50,
        advice=advice_on_tails,
    ),
    ResponseKind(
        "student",
        lambda f, totals, sigma, dof: dist.StudentT(dof, f, sigma),
        # the prior of Juarez and Steel (2010) allows all tails from heavy to Normal ones
        lambda noise, size: {"sigma": dist.HalfNormal(noise), "dof": dist.Gamma(2.0, 0.1)},
        ("sigma", "dof"),
        units=median_and_deviation,
        in_units=in_standard_units,
        mean=attrgetter("loc"),
    ),
    ResponseKind(
        "logit",
        lambda f, totals: dist.Bernoulli(logits=f),
        check=check_classes,
        ends=(0.0, 1.0),
        ratio="odds_ratio",
        advice=of_log_odds,
    ),
    ResponseKind(
        "probit",
        lambda f, totals: dist.Bernoulli(probs=ndtr(f)),
        check=check_classes,
        ends=(0.0, 1.0),
        has_fractions=False,
        advice=of_probits,
    ),
    ResponseKind(
        "binomial",
        lambda f, totals: dist.Binomial(totals, logits=f),
        check=check_counts,
        ends=(0.0, 1.0),
        in_units=trials,
        beside="totals",
        numbers=lambda y, totals: y / totals,
        ratio="odds_ratio",
        advice=of_log_odds,
    ),
    _ordered("ordered", dist.OrderedLogistic, dist.Logistic, of_log_odds, ratio="odds_ratio"),
    _ordered("ordered_probit", OrderedProbit, dist.Normal, of_probits, has_fractions=False),
    ResponseKind(
        "poisson",
        lambda f, totals: dist.Poisson(jnp.exp(f)),
        check=check_counts,
        ends=(0.0,),
        start=lambda y, offset, count: {"intercept": log_rate(y, offset, count)},
        ratio="rate_ratio",
        advice=advice_on_variance,
    ),
    ResponseKind(
        "negative_binomial",
        lambda f, totals, concentration: dist.NegativeBinomial2(jnp.exp(f), concentration),
        lambda noise, size: {"concentration": dist.LogNormal(0.0, 2.0)},
        ("concentration",),
        check=check_counts,
        ends=(0.0,),
        ratio="rate_ratio",
    ),
    _times("weibull", WeibullTime, "sigma"),
    _times("lognormal", LogNormalTime, "sigma"),
    _times("loglogistic", LogLogisticTime, "sigma"),
    _times("exponential", WeibullTime),
    ResponseKind(
        "cox",
        lambda f, upper, log_hazard, breaks: PiecewiseTime(f, log_hazard, breaks, upper),
        lambda noise, size: {"log_hazard": dist.Normal(0.0, WIDE).expand([size]).to_event(1)},
        ("log_hazard",),
        draw=lambda key, times, *data: {
            "log_hazard": times.draw_log_hazard(key, dist.Normal(0.0, WIDE), *data)
        },
        check=check_times,
        units=log_mean_hazard,
        in_units=times_in_pieces,
        has_intercept=False,
        has_fractions=False,
        along="piece",
        size=1,
        beside="upper",
        numbers=log_times,
        start=lambda y, offset, count: {},
        mean=attrgetter("median"),
        ratio="hazard_ratio",
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
    if not isinstance(likelihood, str) or likelihood not in RESPONSES:
        raise bad("likelihood", repr(likelihood), f"one of {', '.join(map(repr, RESPONSES))}")
    return RESPONSES[likelihood]
