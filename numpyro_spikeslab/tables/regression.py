# SPDX-License-Identifier: Apache-2.0
"""Sparse regression of a response on a table, without a model written by the user."""

from typing import Any, NamedTuple
import warnings

from jaxtyping import Array, Float
import numpy as np
import xarray as xr

from jax import random
import jax.numpy as jnp

import numpyro.distributions as dist

from numpyro_spikeslab.models.responses import ResponseKind, response_kind
from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import PRIOR, inclusion, posterior
from numpyro_spikeslab.reporting.credible_sets import credible_sets
from numpyro_spikeslab.reporting.tables import k_hat
from numpyro_spikeslab.support.precision import in_double_precision
from numpyro_spikeslab.tables.chains import Run, TableModel, fit_and_chains
from numpyro_spikeslab.tables.checks import checked_inputs
from numpyro_spikeslab.tables.columns import TableColumns, checked_columns
from numpyro_spikeslab.tables.formula import formula_table
from numpyro_spikeslab.tables.units import Units, convert_to_units, standardise

MAX_DIFFERENCE = 0.2
"""Difference of inclusion probabilities of fit and chains above which the fit is flagged."""
MAX_R_HAT = 1.05
"""R-hat of a weight above which a warning says that chains disagree."""


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
    X_new: Any = None,
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
    :class:`~numpyro_spikeslab.CAVI`. Report the chains. If they agree with each other (``r_hat``)
    but not with the fit (``cavi_is_off``), CAVI has picked one of several correlated columns: look
    at the credible sets. The result is ArviZ data:

    - ``posterior``: draws of ``w`` with ``w_spike`` and ``w_slab``, dimension ``feature``, and of
      ``intercept``, ``slab_scale``, ``inclusion`` and the parameters of the likelihood; all but
      ``slab_scale`` are in the units of the table and the response;
    - ``sample_stats``: the Rao-Blackwellised inclusion probabilities of all draws;
    - ``summary``: for ``dt["summary"].to_dataset().to_dataframe()``, which has a row for each
      column and the columns of :func:`~numpyro_spikeslab.summary`, zeros included; ``cavi``, the
      inclusion probability of the fit, and ``cavi_is_off``, whether it differs by more than 0.2;
      ``credible_set``, the number of its 95% credible set, -1 for none (see
      :func:`~numpyro_spikeslab.credible_sets`); ``is_constant``, whether the column is constant in
      the table. The attribute ``k_hat`` is above 0.7 if the draws of the fit are far from the
      posterior given its noise, slab scale and inclusion probability; NaN where they are all of one
      model, as of one without columns, since their importance ratios are equal then. The attribute
      ``expected_size`` is the number of columns that were expected to matter;
    - ``cavi``: ArviZ data of the fit, for
      ``nss.compare({"chains": dt, "CAVI": dt["cavi"]}, "w", "chains")``, or for ``nss.summary``,
      whose column ``alternatives`` names columns that could replace those that CAVI has picked;
    - ``observed_data`` and ``constant_data``: ``y`` and ``X``, weights, offsets and totals, and the
      prior inclusion probabilities for the Bayes factors of the summary;
    - ``predictions``: with ``X_new``, draws of new responses ``y``, along ``new_row``, of weight
      1, offset 0 and one trial.

    There may be more columns than rows. The computation is in double precision, also where that of
    JAX is not enabled, and the result has arrays of numpy. A warning names the column of the
    largest ``r_hat`` if this is above 1.05. Another warns of a fit without columns beside chains
    that include some.

    ======================== ============================= =====================================
    ``likelihood``           ``y``                         posterior
    ======================== ============================= =====================================
    ``"normal"``             numbers                       ``sigma``
    ``"student"``            numbers with outliers         ``sigma``, ``dof``: degrees of freedom
    ``"logit"``              classes, 0 and 1              log odds
    ``"probit"``             classes, 0 and 1              probits
    ``"binomial"``           counts of ``totals``          log odds
    ``"poisson"``            counts                        logs of means
    ``"negative_binomial"``  counts with more variance     logs of means, ``concentration``
    ======================== ============================= =====================================

    All but the Normal one have an intercept with the prior Normal(0, 10^2), where a Student-t
    response is in units of its median absolute deviation from the median; NUTS draws ``dof``,
    ``concentration`` and their ``sigma``. CAVI does not take Poisson likelihoods: then chains start
    without weights, at the mean of the counts, and the result has no ``cavi`` and no ``k_hat``.

    :param key: random key, ``jax.random.key(0)`` for example.
    :param X: the table, shape (N, P), real numbers: numpy array, or DataFrame, whose column names
        become the labels of ``feature``; or a formula of the columns of ``data``, such as
        ``"progression ~ age*sex + bs(bmi, 4) + C(region)"``, which ``formulaic`` reads. The columns
        of a term are one group, the intercept is always in, and ``X_new`` has columns as ``data``.
    :param y: the response, shape (N,); not with a formula, which names it.
    :param data: a DataFrame, for a formula.
    :param likelihood: the distribution of the response, a name above.
    :param always: names of columns that are always in, or their numbers if they have no names;
        with a formula, names of terms, too.
        Their weights have the prior Normal(0, 10^2) in standard units, which is wide.
    :param groups: columns that come and go together, such as the dummies of a factor: lists of
        their names, by name of the group or not, or a label for each column. Other columns stay
        alone.
    :param heredity: with a formula, whether an interaction needs its parents, the terms without one
        of its factors, such as ``a:c`` of ``a:b:c``: ``"strong"`` if all have to be in,
        ``"weak"`` if one has. Terms that the formula does not have are not counted; those that
        are always in count as in. ``inclusion`` is then the probability of a term
        that its parents allow (Chipman, 1996), and the summary has no Bayes factors. By default
        terms need no others. The result has no ``cavi`` and no ``k_hat``, since the guide's spikes
        are independent. Not for a Poisson likelihood.
    :param inclusion: prior inclusion probabilities, such as annotations: a number, or one for each
        column, shape (P,), the same in each group. By default the probability is learned.
    :param weights: a positive number for each row, shape (N,). Under a Normal likelihood its noise
        has the variance ``sigma**2 / weight``: a weight is a precision. Under others it is how
        often the row counts, and may be a fraction, a power of its density, or 0; under a probit
        likelihood it is a whole number.
    :param offset: a number that is added to the predictor of each row, shape (N,), such as the
        logarithm of exposure in a regression of counts.
    :param totals: number of trials of each row, for the Binomial likelihood, or one number. Rows
        without trials are left out.
    :param X_new: rows to predict, shape (S, P), with the columns of ``X``.
    :param expected_size: number of columns that are expected to matter: the prior of the
        inclusion probability is Beta(1, P / expected_size - 1), where P counts columns that vary
        and are not always in, a group once. The default is a tenth of the columns, or of the rows
        if these are fewer: N rows cannot tell which of many more columns matter, if many may. The
        fit, which needs a density with a maximum, takes Beta(1, 1) if the second concentration is
        below 1.
    :param num_warmup: steps of each chain before its draws. The default is 500, in which chains of
        other likelihoods learn their proposals, and 50 under a Normal one: chains start at the
        fit.
    :param num_samples: draws of each chain. By default chains stop when they agree, at 250, 500,
        750 or at last 1,000 draws: if rank-normalised R-hat is at most 1.01 and the effective
        sample sizes of bulk and tails are 400 at least, for ``sigma``, the intercept and all
        weights of inclusion probability above 0.01. The attribute ``num_samples`` of the summary
        says how many were drawn.
    :param num_chains: number of chains, which run side by side.
    :param progress_bar: whether to show what is going on: compiling, the fit, warm-up, and draws
        with the largest R-hat so far of what has to agree.
    :raises ValueError: if an argument has another shape or other labels, values that are not
        finite or that the likelihood does not allow, too few rows or no variation; if a number is
        out of its range, or a column is in two groups; if a formula cannot be read or does
        not fit the data.
    :raises ModuleNotFoundError: for a formula, if ``formulaic`` is not installed.

    .. code-block:: python

        X, y = sklearn.datasets.load_diabetes(return_X_y=True, as_frame=True)
        dt = nss.sparse_regression(jax.random.key(0), X, y)
        dt["summary"].to_dataset().to_dataframe()
        nss.credible_sets(dt, "w", X)
        nss.plot_inclusion({"chains": dt, "CAVI": dt["cavi"]})
        high = nss.sparse_regression(
            jax.random.key(0), X, y > 200, likelihood="logit", always=["age", "sex"]
        )
    """
    kind = response_kind(likelihood)
    run = Run.checked(kind, key, num_warmup, num_samples, num_chains, progress_bar)
    given = formula_table(X, y, data, groups, always, X_new)
    of_rows = {"offset": offset, "totals": totals, "weights": weights}
    table, rows, new = checked_inputs(given, kind, of_rows)
    columns = checked_columns(table["feature"].to_index(), given.always, given.groups, inclusion)
    model = TableModel(kind, columns.groups, columns.heredity(heredity, given.parents))
    units, arguments = standardise(table, rows, columns.always, kind)
    problem = Problem(model, arguments, columns, units, expected_size, table.values)
    tree, rng = analyse(run, problem)
    constants = {k: ("row", getattr(rows, k)) for k, x in of_rows.items() if x is not None}
    tree["constant_data"] = tree["constant_data"].to_dataset().assign(constants | {"X": table})
    tree["observed_data"] = table.isel(feature=0, drop=True).copy(data=rows.y).to_dataset(name="y")
    if new is not None:
        key_new = random.key(rng.integers(2**31))
        y_new = response_of(posterior(tree), new, kind).sample(key_new)
        values = {"y": (("chain", "draw", "new_row"), np.asarray(y_new))}
        tree["predictions"] = xr.Dataset(values, new.drop_vars("feature").coords)
    return tree


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


def analyse(run: Run, problem: Problem) -> tuple[xr.DataTree, np.random.Generator]:
    """Fit and sample a regression, and return the result with a source of more random numbers."""
    model, data, columns, units, expected_size, table = problem
    varies = units.x["varies"]
    prior = columns.prior(varies.values, units.num_rows, expected_size)
    seed, fitted, draws = fit_and_chains(run, model, data, prior.arguments)
    rng = np.random.default_rng(seed)
    tree = convert_to_units(draws, units, columns, rng)
    if fitted is not None:
        tree["cavi"] = convert_to_units(fitted, units, columns, rng)
    known = {} if model.heredity else {f"{PRIOR}.w": varies.copy(data=prior.inclusion)}
    tree["constant_data"] = xr.Dataset(known)
    tree["summary"] = summarise(tree, table, varies, prior.expected_size)
    return tree, rng


def summarise(
    tree: xr.DataTree, table: np.ndarray, varies: xr.DataArray, expected_size: float
) -> xr.Dataset:
    """Make a row for each column: its weight, its inclusion by chains and fit, its credible set.

    Warn if chains disagree, or include columns where the fit includes none.
    """
    w = posterior(tree)["w"]
    # a statistic takes a millisecond, and columns that never get in, mostly all, have the same
    moves = w.any(["chain", "draw"]).values
    which = np.append(np.flatnonzero(moves), np.flatnonzero(~moves)[:1])
    single = arviz_data.statistics(w.isel(feature=which).to_dataset())["w"]
    place = np.where(moves, np.cumsum(moves) - 1, len(which) - 1)
    repeated = single.isel(feature=place).assign_coords(feature=w["feature"])
    parts = [repeated, arviz_data.inclusion_statistics(tree, "w")]
    rows = xr.concat(parts, dim="summary").to_dataset("summary")
    if (worst := float(rows["r_hat"].max())) > MAX_R_HAT:
        name = rows["r_hat"].idxmax().item()
        text = f"chains disagree after {w.sizes['draw']} draws: r_hat of {name} is {worst:.2f}"
        # of the caller, past the decorator
        warnings.warn(f"sparse_regression: {text}. Raise num_samples.", stacklevel=5)
    if (cavi := tree.children.get("cavi")) is not None:
        rows["cavi"] = inclusion(cavi, "w")
        rows["cavi_is_off"] = abs(rows["cavi"] - rows["inclusion"]) > MAX_DIFFERENCE
        rows.attrs["k_hat"] = k_hat(cavi)
        likely = (rows[["cavi", "inclusion"]] > 0.5) & (tree["constant_data"][f"{PRIOR}.w"] < 1)
        found = int((likely["inclusion"] & rows["cavi_is_off"]).sum())
        if found and not likely["cavi"].any():
            text = f"the fit includes no column, and the chains include {found}"
            warnings.warn(f"sparse_regression: {text}. Report the chains.", stacklevel=5)
    rows["credible_set"] = xr.full_like(rows["inclusion"], -1, dtype=int)
    for number, members in credible_sets(tree, "w", table)["members"].items():
        rows["credible_set"].loc[{"feature": list(members)}] = number
    rows["is_constant"] = "feature", ~varies.values
    return rows.assign_attrs(expected_size=expected_size, num_samples=w.sizes["draw"])


def response_of(draws: xr.Dataset, rows: xr.DataArray, kind: ResponseKind) -> dist.Distribution:
    """Return the distributions of responses of rows, by chain and draw, of one trial."""
    f = draws["intercept"] + xr.dot(draws["w"], rows, dim="feature")
    sites = {name: jnp.asarray(draws[name].values)[..., None] for name in kind.sites(1.0)}
    return kind.distribution(jnp.asarray(f.values), 1, **sites)
