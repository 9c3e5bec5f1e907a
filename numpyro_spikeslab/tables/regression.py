# SPDX-License-Identifier: Apache-2.0
"""Sparse regression of a response on a table, without a model written by the user."""

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float
import numpy as np
import pandas as pd
import xarray as xr

import numpyro_spikeslab
from numpyro_spikeslab.models.responses import Fitted, response_kind
from numpyro_spikeslab.models.times import concordance
from numpyro_spikeslab.reporting.arviz_data import GROUP, PRIOR, mean, posterior
from numpyro_spikeslab.reporting.stored_summary import stored_summary
from numpyro_spikeslab.support.files import stored_columns
from numpyro_spikeslab.support.messages import bad
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.support.tabular import in_pandas
from numpyro_spikeslab.tables.background import COVARIANCE, rotated_fit
from numpyro_spikeslab.tables.chains import Run, TableModel, fit_and_chains
from numpyro_spikeslab.tables.checks import (
    checked_background,
    checked_rows,
    checked_table,
    ordered_levels,
)
from numpyro_spikeslab.tables.columns import TableColumns, checked_columns
from numpyro_spikeslab.tables.completed import completions, regress_each
from numpyro_spikeslab.tables.formula import formula_table
from numpyro_spikeslab.tables.predict import MAX_NUMBERS, log_likelihood
from numpyro_spikeslab.tables.units import Units, convert_to_units, standardise


@in_double_precision
def sparse_regression(
    key: Array,
    X: Any,
    y: Any = None,
    *,
    data: Any = None,
    likelihood: Any = "normal",
    always: Any = (),
    groups: Any = None,
    heredity: str | None = None,
    inclusion: Any = None,
    weights: Any = None,
    offset: Any = None,
    totals: Any = None,
    event: Any = None,
    background: Any = None,
    expected_size: float | None = None,
    num_warmup: int | None = None,
    num_samples: int | None = None,
    num_chains: int = 4,
    progress_bar: bool = True,
) -> xr.DataTree:
    """Regress a response on the columns of a table, if few of the columns matter.

    Columns are standardised, and so are responses other than classes and counts; the noise, the
    inclusion probability and the scale of the slab are learned
    (:func:`numpyro_spikeslab.models.sparse_regression`). Chains of
    :class:`~numpyro_spikeslab.PairedGibbs` start from a fit by annealed
    :class:`~numpyro_spikeslab.CAVI`. The table of the result is ``nss.summary(dt)``. Report the
    chains. If they agree with each other (``r_hat``) but their ``inclusion`` is far from that of
    the fit (``cavi``), CAVI has picked one of several correlated columns: look at the credible
    sets. The result is ArviZ data:

    - ``posterior``: draws of ``w`` with ``w_spike``, dimension ``feature``, and of ``intercept``,
      ``slab_scale``, ``prior_inclusion`` (the probability that a column is in, where it is learned)
      and the parameters of the likelihood; all but ``slab_scale`` are in the units of the table and
      the response. With more than 4,096 columns ``w`` and the probabilities below are in single
      precision, and a spike is a byte;
    - ``sample_stats``: the Rao-Blackwellised inclusion probabilities of all draws;
    - ``summary``: what :func:`~numpyro_spikeslab.summary` cannot compute again, by ``feature``:
      ``cavi``, the inclusion probability of the fit; ``credible_set``, the number of its 95%
      credible set, NaN for none (see :func:`~numpyro_spikeslab.credible_sets`). Its attributes are
      ``k_hat``, above 0.7 if the draws of the fit are far from the posterior given its noise, slab
      scale and inclusion probability, NaN if they are all of one model; ``expected_size``, the
      number of columns that were expected to matter; ``num_samples``, the draws of each chain;
    - ``cavi``: ArviZ data of the fit. Their ``nss.summary`` names ``alternatives``, columns that
      could replace those that CAVI has picked;
    - ``observed_data`` and ``constant_data``: ``y`` and ``X``, weights, offsets, totals, upper
      limits of times (``upper``, where ``y`` has the lower ones), the groups of columns, and their
      prior inclusion probabilities: 1 if a column is always in, 0 if it is constant; ``data``, the
      columns that a formula reads. Labels of rows that files do not keep are strings.
      :func:`predict` predicts these rows and others, after ``dt.to_netcdf("result.nc")`` and
      ``xarray.open_datatree("result.nc")``, too;
    - ``log_likelihood``: that of each row for ``arviz_stats.loo(dt)``, if these are at most 10^7
      numbers; else :func:`log_likelihood` makes it.

    What speaks of rows or of columns (``y``, ``weights``, ``offset``, ``totals``, ``event``;
    ``groups``, ``inclusion``) is aligned by its labels if it is a Series of pandas or a dict of
    label to value, and refused if labels are missing, unknown or repeated. What has no labels goes
    by place: arrays and Series of other libraries, and Series with the default index unless ``X``
    has numbers, too.

    ``X`` may be several tables, completions of one with gaps: a list, or a generator. Then the
    chains of all are joined as draws of one posterior, in which each table counts the same.
    ``posterior`` has the coordinate ``table`` along ``chain``; table k is regressed by
    ``jax.random.split(key, len(X))[k]``, and chains of all have as many draws as the table that
    needs most. In the summary ``r_hat`` is the largest within a table, and ``between_tables`` the
    share of the variance that is due to gaps. ``credible_set`` has the correlations of all rows of
    all tables, as ``nss.credible_sets(dt, "w", pd.concat(X))``; the column ``cavi`` is the mean
    over fits, whose draws and ``k_hat`` are left out. ``X`` in ``constant_data`` has a dimension
    ``table``, and each chain predicts these rows from its own; new rows are one table. Complete
    with the response among the columns, else effects are too small.

    There may be more columns than rows. The computation is in double precision, whatever JAX's
    default, and the result has arrays of numpy. Warnings name the largest Monte Carlo error if it
    is larger than where chains stop, and tell of a fit without columns beside chains that include
    some.
    Another advises another likelihood or prior, where a Student-t fits the residuals of a Normal
    likelihood better, a negative binomial those of counts, or predictors beyond 13 in log odds (7.5
    in probits) show that columns separate the classes. Responses of the right distribution get it
    in at most 1 of 100 tables, if predictors of classes have a standard deviation of at most 2.5.

    ======================== ============================= =====================================
    ``likelihood``           ``y``                         posterior
    ======================== ============================= =====================================
    ``"normal"``             numbers                       ``sigma``
    ``"student"``            numbers with outliers         ``sigma``, ``dof``: degrees of freedom
    ``"logit"``              classes, 0 and 1              log odds
    ``"probit"``             classes, 0 and 1              probits
    ``"binomial"``           counts of ``totals``          log odds
    ``"ordered"``            classes in order              log odds, ``cutpoints``
    ``"ordered_probit"``     classes in order              probits, ``cutpoints``
    ``"poisson"``            counts                        logs of means
    ``"negative_binomial"``  counts with more variance     logs of means, ``concentration``
    ``"weibull"``            times, or limits of them      logs of times, ``sigma``: 1 / shape
    ``"lognormal"``          the same                      logs of times, ``sigma``
    ``"loglogistic"``        the same                      logs of times, ``sigma``: 1 / shape
    ``"exponential"``        the same                      logs of times
    ``"cox"``                the same                      log hazards; ``log_hazard`` of pieces
    ======================== ============================= =====================================

    Others than the Normal one have an intercept with the prior Normal(0, 10^2), where a Student-t
    response is in units of its median absolute deviation from the median; NUTS draws ``dof``,
    ``concentration`` and their ``sigma``. CAVI does not take Poisson likelihoods and times: then
    chains start without weights, at the mean of the counts or of the logs of times, and the result
    has no ``cavi`` and no ``k_hat``.

    Classes in order are categories of pandas or polars that have an order, or numbers, whose sorted
    values are the levels. The levels below a cut point have the log odds, or the probit,
    ``cutpoint - X w``; ``cutpoints``, dimension ``cutpoint`` with labels such as ``"low|middle"``,
    take the place of an intercept, and NUTS draws them. Where all columns are at their means the
    prior of the probabilities of the levels is uniform: data count as if each level had one row
    more, however many levels there are. ``y`` in ``observed_data`` has numbers from 0 on, whose
    labels are ``level`` in ``constant_data``.

    Times T until an event have ``log T = offset + intercept + X w + sigma z``, where z is the log
    of an exponential number (Weibull), Normal or logistic: a weight of 0.7 doubles the time, and
    ``nss.summary(dt, ratios=True)`` shows that as ``time_ratio``. Logarithms are standardised as a
    Normal response is, limits counted as times, so ``sigma`` has the same HalfNormal(1) prior,
    which no unit of time changes; of exponential times the scale of logarithms is known. Events
    that are seen have densities, limits have probabilities. Under ``"cox"`` the hazard is
    ``exp(log_hazard + offset + X w)`` instead, with one ``log_hazard`` for each piece of time,
    dimension ``piece`` with the starts of pieces as labels: a weight of 0.7 doubles the hazard
    (``hazard_ratio``). Pieces end at quantiles of the times of events, five events or more in each
    and 40 pieces at most, and the last has no end. Relative to that of the mean hazard the prior is
    Normal(0, 10^2), so wide that the evidence of :func:`compare_models` falls with each piece;
    compare by its ``elpd``. The attribute ``concordance`` of
    ``summary`` is the share of pairs of rows whose order the posterior mean of the predictor tells,
    of those whose order is known: 0.5 by chance. :func:`predict` has survival curves.

    :param key: random key, ``jax.random.key(0)`` for example.
    :param X: the table, shape (N, P), real numbers: numpy array, or DataFrame of pandas, polars,
        pyarrow or modin, whose column names label ``feature``; two or more such tables with the
        same labels; or a formula of the columns of ``data``, such as
        ``"progression ~ age*sex + bs(bmi, 4) + C(region)"``, which ``formulaic`` reads. The columns
        of a term are one group, the intercept is always in. Random effects are
        terms in brackets, as in lme4: ``"y ~ x + z + (1 | clinic)"`` for an intercept of each
        clinic, ``(0 + x | clinic)`` for a slope, ``(x | clinic)`` for both, with independent
        scales. The posterior has ``sd_clinic`` and ``sd_clinic_x``, and by label of the clinic
        ``effect_clinic`` and ``effect_clinic_x``, in the units of the response and the table; the
        prior of ``sd_clinic`` is HalfNormal(1) in standard units.
    :param y: the response, shape (N,); not with a formula, which names it.
    :param data: a DataFrame of any of these libraries, for a formula.
    :param likelihood: the distribution of the response, a name above.
    :param always: names of columns that are always in, or their numbers if they have no names;
        with a formula, names of terms, or of variables, too. The prior of their weights is wide:
        Normal(0, 10^2) in standard units.
    :param groups: columns that come and go together, such as the dummies of a factor: lists of
        their names, or a dict of these by name of the group, which is ``"a + b"`` by default; or a
        label for each column: Series, dict or list. Other columns stay alone.
    :param heredity: with a formula, whether an interaction needs its parents, the terms without one
        of its factors, such as ``a:c`` of ``a:b:c``: ``"strong"`` if all have to be in, ``"weak"``
        if one has; by default none. Terms that the formula does not have are not counted; those
        that are always in count as in. ``inclusion`` is then the probability of a term that its
        parents allow (Chipman, 1996), Bayes factors are NaN, and there is no ``cavi``, for its
        spikes are independent. Not for a Poisson likelihood.
    :param inclusion: prior inclusion probabilities, such as annotations: a number, or one for each
        column, shape (P,), the same in each group: array, Series or dict. By default the
        probability is learned.
    :param weights: a positive number for each row, shape (N,). Under a Normal likelihood its noise
        has the variance ``sigma**2 / weight``: a weight is a precision. Under others it is how
        often the row counts, and may be a fraction, a power of its density, or 0; under probit
        likelihoods and ``"cox"`` it is a whole number.
    :param offset: a number that is added to the predictor of each row, shape (N,), such as the
        logarithm of exposure in a regression of counts.
    :param totals: number of trials of each row, for the Binomial likelihood, or one number. Rows
        without trials are left out.
    :param event: for times, 1 or true where the event was seen at the time in ``y``, 0 where it was
        not yet, shape (N,); by default all were seen. Or ``y`` has two columns, shape (N, 2), the
        limits between which a time lies: equal if it was seen, 0 as the lower one or infinity as
        the upper one where there is none; in a formula, ``"low + high ~ x"``.
    :param background: under a Normal likelihood, what few columns with large effects stand before:
        `True` for a small effect of each column (Zhou, Carbonetto and Stephens, 2013, *Polygenic
        modeling with Bayesian sparse linear mixed models*), or the covariance of rows up to a
        factor, such as a relationship matrix, shape (N, N). With it come ``background_scale``, its
        standard deviation, whose prior is that of ``sigma``, as either may be all of the
        response, and ``variance_share``, of columns, background and noise. There is no ``cavi``:
        chains start without weights. :func:`predict` adds the background of each row, of new ones
        if it is that of the columns. The log likelihood of a row is that given all others, with the
        background integrated out (Bürkner, Gabry and Vehtari, 2021). It takes the time of N^3
        operations once. Not with several completed tables.
    :param expected_size: number of columns that are expected to matter: the prior of the
        inclusion probability is Beta(1, P / expected_size - 1), where P counts columns that vary
        and are not always in, a group once. The default is a tenth of the columns, or of the rows
        if these are fewer: N rows cannot tell which of many more columns matter, if many may. The
        fit takes a second concentration of 1 at least, for the density to have a maximum.
    :param num_warmup: steps of each chain before its draws, by default 50 under a Normal likelihood
        and 500 under others, whose proposals are learned.
    :param num_samples: draws of each chain. By default chains stop when Monte Carlo errors are
        small, at 250, 500, 750 or at last 1,000 draws: at most 0.02 of each inclusion probability,
        and a tenth of its standard deviation of each other mean, which takes 100 effective draws of
        bulk and tails. These are of weights whose inclusion probability is above 0.02, the number
        of columns, the intercept and the sites of the likelihood. Effective draws are few where
        chains differ: if one is a standard deviation off, all go on.
    :param num_chains: number of chains, which run side by side.
    :param progress_bar: whether to show what is going on: compiling, the fit, warm-up, and draws
        with the largest Monte Carlo error so far, as a multiple of that at which chains stop.
    :raises ValueError: if an argument has another shape or other labels, values that are not
        finite or that the likelihood does not allow, too few rows or no variation; if completed
        tables differ in shape, labels or constant columns; if a number is out of its range, or a
        column is in two groups; if a formula cannot be read or does not fit the data.
    :raises FloatingPointError: if extreme values have no finite fit, or Student-t noise vanishes.
    :raises ModuleNotFoundError: for a formula, if ``formulaic`` is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_diabetes(return_X_y=True, as_frame=True)
        dt = nss.sparse_regression(jax.random.key(0), X, y)
        nss.summary(dt, top=5)
        nss.credible_sets(dt, "w", X)
        nss.plot_inclusion({"chains": dt, "CAVI": dt["cavi"]})
        high = nss.sparse_regression(
            jax.random.key(0), X, y > 200, likelihood="logit", always=["age", "sex"]
        )
    """
    # all arguments but these two, before there are other names
    options = {name: x for name, x in locals().items() if name not in ("key", "X")}
    if (tables := completions(X)) is not None:
        if background is not None:
            raise bad("background", "several completed tables", "None, or one table as X")
        return regress_each(key, tables, partial(sparse_regression, **options))
    kind = response_kind(likelihood)
    run = Run.checked(kind, key, num_warmup, num_samples, num_chains, progress_bar)
    given = formula_table(X, y, data, groups, always)
    labels: list[Any] = []
    if kind.along == "level" and np.ndim(given.y) == 1:
        y, labels = ordered_levels(given.y)
        given = given._replace(y=y)
    of_rows = {"offset": offset, "totals": totals, "weights": weights, "event": event}
    table = checked_table(in_pandas("X", given.X), given.labels)
    rows = checked_rows(given, table.values, kind, of_rows)
    columns = checked_columns(table["feature"].to_index(), given.always, given.groups, inclusion)
    rule = columns.heredity(heredity, given.parents)
    covariance = checked_background(background, kind, given)
    units, arguments = standardise(table, rows, columns.always, kind, given.effects, covariance)
    if "breaks" in arguments:
        labels = [0.0, *arguments["breaks"]]
    kind = kind._replace(size=len(labels))
    model = TableModel(kind, columns.groups, rule)
    problem = Problem(model, arguments, columns, units, expected_size, table.values)
    tree = analyse(run, problem)
    draws = posterior(tree)
    w = mean(draws["w"]).values
    # cut points and hazards are about the middle of predictors
    intercept = mean(draws["intercept"]).values if "intercept" in draws else -w @ rows.X.mean(0)
    of_effects = [mean(draws[f"effect_{name}"]).values for name in given.effects]
    predictor = rows.offset + intercept + rows.X @ w
    predictor += rows.effects @ np.concatenate([w[:0], *of_effects])
    ones = np.ones(len(rows.y))
    weights = (ones, rows.weights) if kind.has_precisions else (rows.weights, ones)
    fitted = Fitted(*(x[rows.seen] for x in (rows.y, predictor, *weights)))
    if advice := kind.advice(rotated_fit(tree, units, fitted)):
        # of the caller, past the decorator
        warnings.warn(f"sparse_regression: {advice}.", stacklevel=3)
    given_ones = [name for name in ("offset", "weights") if of_rows[name] is not None]
    constants: dict[str, Any] = {name: ("row", getattr(rows, name)) for name in given_ones}
    constants |= {name: ("row", rows.beside) for name in [kind.beside] if name is not None}
    if np.ndim(covariance):
        constants[COVARIANCE] = ["covariance_row", "covariance_column"], covariance
    if kind.has_limits:
        later = -predictor if kind.along == "piece" else predictor
        order = concordance(later, rows.y, rows.beside, rows.weights)
        tree["summary"].attrs["concordance"] = order
    tree["constant_data"] = tree["constant_data"].to_dataset().assign(constants | {"X": table})
    # counts and classes are whole numbers to ArviZ, too
    whole, like = kind.units is None, table.isel(feature=0, drop=True)
    observed = like.copy(data=rows.y.astype(int) if whole else rows.y)
    tree["observed_data"] = observed.to_dataset(name="y")
    if given.variables is not None:
        tree["constant_data"].attrs["formula"] = X
        tree["data"] = stored_columns(given.variables, "row")
    if labels:
        label(tree, kind.along, labels)
    if draws["slab_scale"].size * len(table) <= MAX_NUMBERS:
        tree["log_likelihood"] = log_likelihood(tree).to_dataset()
    return tree


def label(tree: xr.DataTree, along: Any, labels: list[Any]) -> None:
    """Label the levels of classes in order, and the cut points between them; or pieces of time by
    their start."""
    of_sites: dict[Any, Any] = {along: labels}
    if along == "level":
        of_sites = {"cutpoint": [f"{low}|{high}" for low, high in pairwise(labels)]}
    for path in {"/posterior", "/cavi/posterior"} & {*tree.groups}:
        tree[path] = tree[path].to_dataset().assign_coords(of_sites)
    tree["constant_data"] = tree["constant_data"].to_dataset().assign_coords({along: labels})


class Problem(NamedTuple):
    """A regression in standard units.

    - **data** - arguments of the model by name.
    - **expected_size** - `None` for its default.
    - **table** - all columns in any units, for correlations.
    """

    model: TableModel
    data: dict[str, Any]
    columns: TableColumns
    units: Units
    expected_size: float | None
    table: Float[np.ndarray, "N P"]


def analyse(run: Run, problem: Problem) -> xr.DataTree:
    """Fit and sample a regression, and return the result."""
    model, data, columns, units, expected_size, table = problem
    varies = units.x["varies"]
    prior, size, inclusion = columns.prior(varies.values, units.num_rows, expected_size)
    is_free = ~columns.always
    names = pd.Series(varies["feature"].values[is_free])[varies.values[is_free]]
    seed, fitted, draws = fit_and_chains(run, model, data, prior, names)
    rng = np.random.default_rng(seed)
    tree = convert_to_units(draws, units, columns, rng)
    if fitted is not None:
        tree["cavi"] = convert_to_units(fitted, units, columns, rng)
    tree["posterior"].attrs |= {
        "inference_library": "numpyro_spikeslab",
        "inference_library_version": numpyro_spikeslab.__version__,
    }
    # under heredity they are known given the parents
    is_unknown = (model.heredity is not None) & varies.values & ~columns.always
    constants = {f"{PRIOR}.w": varies.copy(data=np.where(is_unknown, np.nan, inclusion))}
    if len(set(columns.labels)) < len(columns.labels):
        constants[f"{GROUP}.w"] = varies.copy(data=columns.labels)
    for each in (tree, *([] if fitted is None else [tree["cavi"]])):
        each["constant_data"] = xr.Dataset(constants)
    tree["constant_data"].attrs |= {
        "likelihood": model.kind.name,
        "weights": "precisions" if model.kind.has_precisions else "counts",
        "seed": int(rng.integers(2**31)),
    }
    tree["summary"] = stored_summary(tree, table, model.kind.ratio)
    tree["summary"].attrs["expected_size"] = size
    return tree
