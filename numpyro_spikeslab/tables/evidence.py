# SPDX-License-Identifier: Apache-2.0
"""The evidence of a model or of a regression, and tables of models of one response."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import arviz_stats
from jaxtyping import Array
import numpy as np
import pandas as pd
import xarray as xr

import jax
from jax import random

from numpyro_spikeslab.models.responses import WIDE, ResponseKind
from numpyro_spikeslab.reporting.arviz_data import GROUP, PRIOR, posterior
from numpyro_spikeslab.sampling.evidence import Evidence, evidence_of
from numpyro_spikeslab.sampling.tempered import evidence_of_functions
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.tables.background import COVARIANCE
from numpyro_spikeslab.tables.chains import TableModel
from numpyro_spikeslab.tables.checks import Rows, check_key, checked_count
from numpyro_spikeslab.tables.effects import known_effects
from numpyro_spikeslab.tables.predict import kind_of, stored_rows
from numpyro_spikeslab.tables.units import Units, standardise


def log_evidence(
    rng_key: Array,
    model: Any,
    posterior_samples: Any = None,
    *args: Any,
    num_proposals: int = 2000,
    **kwargs: Any,
) -> Evidence:
    """Compute the log evidence of a model by bridge sampling, from finished chains.

    The evidence is the density of all observed sites, with the latent ones integrated out. The
    ratio of two is a Bayes factor. It depends on the priors: a wider slab, which changes weights
    little, lowers it.

    The first halves of the chains teach a proposal, in which correlated spikes come in sets, and
    slabs and coefficients are integrated out under a Normal likelihood. Their second halves are
    compared with draws of the proposal (Meng and Wong, 1996, *Simulating ratios of normalizing
    constants via a simple identity*). It takes seconds beyond the chains; any kernel may have drawn
    them. A mode that no chain has visited is missing in the evidence, and no standard error shows
    it: look at R-hat.

    A site is taken out of the evidence by ``handlers.do``, for a site that ``handlers.condition``
    sets is an observed one. ``handlers.scale`` takes powers of densities, and masked observations
    have none.

    :param rng_key: random key.
    :param model: a NumPyro model with known features; or a result of :func:`sparse_regression`,
        without any other arguments, whose evidence is that of ``y`` in its own units. There the
        flat intercept of a Normal likelihood counts as one with the prior Normal(0, 10^2) in
        standard units, as those of other likelihoods. Nothing but the key is random.
    :param posterior_samples: draws of all latent sites,
        ``mcmc.get_samples(group_by_chain=True)``.
    :param args: arguments of the model.
    :param num_proposals: draws of the proposal.
    :param kwargs: keyword arguments of the model.
    :return: a named tuple: ``value``, the log evidence in nats, and ``se``, its standard error;
        ``lower`` and ``upper``, which enclose it in expectation; ``overlap`` of proposal and
        posterior, 1 if they are the same, 0 if they are disjoint.
    :raises ValueError: if a site has no proper prior or is discrete; if draws are missing; of
        latent functions (:func:`tempered_evidence` has theirs), sparse tables and spikes that need
        others.

    It warns if R-hat is above 1.05, the overlap below 0.05, or the standard error above 0.5.

    .. code-block:: python

        mcmc.run(jax.random.key(0), X, y)
        samples = mcmc.get_samples(group_by_chain=True)
        evidence = nss.log_evidence(jax.random.key(1), model, samples, X, y)
    """
    check_key(rng_key)
    checked_count("num_proposals", num_proposals, 100)
    if not isinstance(model, xr.DataTree):
        return evidence_of(rng_key, model, posterior_samples, args, kwargs, num_proposals)
    if posterior_samples is not None or args or kwargs:
        got = "arguments beside a result of sparse_regression"
        raise bad("log_evidence: model", got, "the result alone, which has its draws and data")
    table, samples, data, constant = standard_problem(model)
    evidence = evidence_of(rng_key, table, samples, (), data, num_proposals)
    shifted = {name: getattr(evidence, name) + constant for name in ("value", "lower", "upper")}
    return evidence._replace(**shifted)


def tempered_evidence(
    rng_key: Array,
    model: Any,
    *args: Any,
    num_particles: int = 64,
    num_islands: int = 4,
    progress_bar: bool = True,
    **kwargs: Any,
) -> Evidence:
    """Compute the log evidence of a model of latent functions, without chains.

    The evidence is that of :func:`log_evidence`. Chains visit one of the orders and signs of the
    functions, so a bridge from them to a proposal would lack all others. Here particles go from the
    prior to the posterior, through powers of the density of the observations from 0 to 1. At each
    power they are drawn anew by their weights, and make a step of :class:`LatentGibbs` (Del Moral,
    Doucet and Jasra, 2006, *Sequential Monte Carlo samplers*). The next power is the largest
    at which the effective sample size of the weights is 0.9 of the number of particles; there
    are 20 to 100 of them. It takes about as long as ``num_islands * num_particles`` steps of
    a chain at each.

    :param rng_key: random key.
    :param model: a NumPyro model of :func:`latent_functions` that ``LatentGibbs`` can sample alone,
        such as :func:`numpyro_spikeslab.models.mtmkl`. Observations are Normal, Student-t, or
        have logits: Bernoulli, binomial or negative binomial.
    :param args: arguments of the model.
    :param num_particles: particles of each island. Four times as many at best halve the standard
        error.
    :param num_islands: independent populations of particles, whose spread gives the standard error.
    :param progress_bar: whether to show the power that particles have reached.
    :param kwargs: keyword arguments of the model.
    :return: a named tuple: ``value``, the log evidence in nats, the log of the mean evidence of the
        islands, and ``se``, its standard error. The other fields are NaN.
    :raises ValueError: if a site has no proper prior, or is one that ``LatentGibbs`` does not draw;
        of models without latent functions and of likelihoods whose powers are no mixtures of
        Gaussians, such as a probit one.

    It warns if the standard error is above 0.5. Where particles get stuck, the evidence is too low
    and islands differ by nats; see :ref:`how many functions <how-many-functions>`. All computations
    are in double precision.

    .. code-block:: python

        evidence = {
            f"{M} functions": nss.tempered_evidence(
                jax.random.key(0), nss.models.mtmkl([kernels.ExpSquared(1.0)] * M), X, Y
            )
            for M in (1, 2, 3)
        }
        nss.compare_models(evidence)
    """
    check_key(rng_key)
    checked_count("num_particles", num_particles, 2)
    sizes = checked_count("num_islands", num_islands, 2), num_particles
    # JAX remembers in which precision it has first seen an array of numpy
    own = lambda x: x.copy() if isinstance(x, np.ndarray) else x  # noqa: E731
    args, kwargs = jax.tree.map(own, (args, kwargs))
    return evidence_of_functions(rng_key, partial(model, *args, **kwargs), sizes, progress_bar)


def standard_problem(dt: xr.DataTree) -> tuple[Any, dict[str, Any], dict[str, Any], float]:
    """Return the model of a result in standard units, its draws and its data, and the log of the
    density of ``y`` relative to that of the data."""
    rows, draws = stored_rows(dt), posterior(dt)
    kind, inclusion = kind_of(rows), rows[f"{PRIOR}.w"].values
    if np.isnan(inclusion).any():
        raise bad("log_evidence: the result", "heredity", "spikes that need no others")
    if rows["X"].ndim > 2:
        raise bad("log_evidence: the result", "several completed tables", "one table")
    if known_effects(rows.attrs.get("formula")):
        raise bad("log_evidence: the result", "random effects", "a formula without them")
    # constant columns and their weights change nothing
    varies = inclusion > 0
    rows, draws, inclusion = (
        rows.isel(feature=varies),
        draws.isel(feature=varies),
        inclusion[varies],
    )
    is_always = inclusion == 1
    given = Rows.stored(rows, response_of(dt))
    covariance: Any = rows[COVARIANCE].values if COVARIANCE in rows else None
    if "background_scale" in draws and covariance is None:
        covariance = True
    units, data = standardise(rows["X"], given, is_always, kind, covariance=covariance)
    labels = rows.get(f"{GROUP}.w", rows["feature"]).values[~is_always]
    _, first, numbers = np.unique(labels, return_index=True, return_inverse=True)
    prior: dict[str, Any] = {"probabilities": inclusion[~is_always][first]}
    if PRIOR in draws:
        size = dt["summary"].attrs["expected_size"]
        prior = {"inclusion": (1.0, len(first) / size - 1.0)}
    samples = standard_draws(draws, units, kind)
    # slabs of excluded weights do not matter
    w, spikes = samples.pop("w"), samples["w_spike"][..., ~is_always]
    samples |= {"w_spike": spikes[..., first], "w_slab": w[..., ~is_always]}
    if is_always.any():
        samples["always"] = w[..., is_always]
    model = TableModel(kind, tuple(numbers.tolist()), None).at(prior)
    return lambda X, **data: model(X.T, **data), samples, data, log_unit(units, kind, given)


def response_of(dt: xr.DataTree) -> Any:
    """Return the response of a result."""
    return dt["observed_data"].to_dataset()["y"].values.astype(float)


def standard_draws(draws: xr.Dataset, units: Units, kind: ResponseKind) -> dict[str, Any]:
    """Invert :func:`~numpyro_spikeslab.tables.units.convert_to_units`."""
    new = {"w_spike": draws["w_spike"], "w": draws["w"] * units.x["sd"] / units.y_sd}
    new |= {name: draws[name] for name in ("slab_scale", *kind.own_sites)}
    if "background_scale" in draws:
        new["background_scale"] = draws["background_scale"] / units.y_sd
    if PRIOR in draws:
        new["inclusion"] = draws[PRIOR]
    if "sigma" in new:
        new["sigma"] = new["sigma"] / (units.y_sd * units.noise)
    shift = xr.dot(draws["w"], units.x["mean"], dim="feature")
    if kind.has_intercept:
        new["intercept"] = (draws["intercept"] + shift - units.y_mean) / units.y_sd
    if "cutpoints" in new:
        new["cutpoints"] = new["cutpoints"] - shift
    if "log_hazard" in new:
        new["log_hazard"] = new["log_hazard"] + shift - units.y_mean
    return {name: x.transpose("chain", "draw", ...).values for name, x in new.items()}


def log_unit(units: Units, kind: ResponseKind, rows: Rows) -> float:
    """Return the log of the density of ``y`` relative to that of the standardised data."""
    total = -units.num_rows * np.log(units.y_sd)
    if kind.has_contrasts:
        # contrasts have the density of rows with the flat intercept integrated out, but for this
        total -= 0.5 * np.log(units.num_rows) + np.log(WIDE * np.sqrt(2 * np.pi))
        if kind.has_precisions:
            total += 0.5 * np.log(rows.weights / rows.weights.mean()).sum()
    if kind.has_limits:
        # of events, whose times have the density; limits have probabilities
        seen = rows.y == rows.beside
        y = kind.in_units(rows, units.y_mean, units.y_sd)["y"][seen]
        slopes = np.log(y / rows.y[seen]) - np.log(units.y_sd)
        total = (rows.weights[seen] * slopes).sum()
    return float(total)


def compare_models(results: Mapping[str, Any], *, key: Array | None = None) -> pd.DataFrame:
    """Compare models of one response: likelihoods, priors, columns or formulas.

    :param results: by name, two or more results of :func:`sparse_regression` for one response, or
        what :func:`log_evidence` or :func:`tempered_evidence` has returned for models of one's own.
    :param key: random key, by default one that is stored in each result.
    :returns: a DataFrame with one row per model, the most probable first: ``log_evidence`` and its
        standard error ``se``; ``bayes_factor``, how many times as probable the response is under
        the first model; ``overlap`` of :func:`log_evidence`; ``elpd`` and ``elpd_se`` of
        ``arviz_stats.loo``, for results with a log likelihood. The two answer different questions:
        leave-one-out asks which model predicts further rows, after it has learnt from these.
    :raises ValueError: if results have different responses or weights, or one has densities of
        numbers and another probabilities of classes or counts.

    .. code-block:: python

        nss.compare_models({"normal": dt, "student": robust})
    """
    if not isinstance(results, Mapping) or isinstance(results, xr.DataTree) or len(results) < 2:
        got = type(results).__name__
        raise bad("results", got, "a mapping from two or more names to results, or to evidences")
    check_one_response({k: x for k, x in results.items() if not isinstance(x, Evidence)})
    rows = {}
    for name, result in results.items():
        elpd: Any = (np.nan, np.nan)
        if not isinstance(result, Evidence):
            if "log_likelihood" in result.children:
                loo = arviz_stats.loo(result)
                elpd = loo.elpd, loo.se
            seed = random.key(int(result["constant_data"].attrs["seed"]))
            result = log_evidence(seed if key is None else key, result)
        rows[name] = result.value, result.se, np.nan, result.overlap, *elpd
    columns = ["log_evidence", "se", "bayes_factor", "overlap", "elpd", "elpd_se"]
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    table = table.sort_values("log_evidence", ascending=False, kind="stable")
    with np.errstate(over="ignore"):
        table["bayes_factor"] = np.exp(table["log_evidence"].iloc[0] - table["log_evidence"])
    return table


def check_one_response(results: dict[str, xr.DataTree]) -> None:
    """Refuse results whose evidences are of different data."""
    first: dict[str, Any] = {}
    for name, dt in results.items():
        rows = stored_rows(dt)
        kind, weights = kind_of(rows), rows["weights"].values
        role = "precisions" if kind.has_precisions else "counts"
        facts = {
            "y": response_of(dt),
            "unit": "probabilities" if kind.units is None else "densities",
            "weights": weights,
            "role of weights": role if (weights != 1).any() else "none",
        }
        first = first or facts
        for fact, x in facts.items():
            if not np.array_equal(x, first[fact]):
                got = f"another {fact}" if isinstance(x, np.ndarray) else f"{fact} {x!r}"
                expected = "that of the first result"
                expected += "" if isinstance(x, np.ndarray) else f", {first[fact]!r}"
                raise bad(f"results[{name!r}]", got, expected)
