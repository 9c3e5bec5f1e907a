# SPDX-License-Identifier: Apache-2.0
"""Credible sets of a paired mean field: which columns could carry an effect of the fit instead."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import of_columns, whitened
from numpyro_spikeslab.algebra.correlation import (
    COVERAGE,
    MIN_CORRELATION,
    purity,
    twins,
    unit_columns,
)
from numpyro_spikeslab.algebra.pairs import Coordinates, Prior, coordinates
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.messages import bad
from numpyro_spikeslab.reading.coefficient_rows import dense_rows, standardised
from numpyro_spikeslab.reading.form import COLUMNS, Form
from numpyro_spikeslab.reading.program import compiled
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View, design_rows


class Effects(NamedTuple):
    """The data of all single-effect regressions of a fit, with B coefficients integrated out.

    - **rows** - the design, features as rows, 0 where nothing is observed.
    - **precision** - ``tau_n`` of each observation.
    - **projection** - what the coefficients take out of products of columns, which are
      ``sum_n tau_n x_nj x_nk - projection_j . projection_k``.
    - **linear** - product of each column with the residual of the fit.
    - **mean** - ``<w>``.
    - **included** - whether the inclusion probability is above 0.5.
    - **pairs** - squares and prior of each column.
    """

    rows: Float[Array, "P N"]
    precision: Float[Array, " N"]
    projection: Float[Array, "B P"]
    linear: Float[Array, " P"]
    mean: Float[Array, " P"]
    included: Bool[Array, " P"]
    pairs: Coordinates


def effects_of(reading: Reading, posterior: Posterior) -> Effects:
    """Compute the data of the single-effect regressions for a posterior of columns."""
    return compiled(lambda posterior: _effects(reading, posterior), posterior)


def _effects(reading: Reading, posterior: Posterior) -> Effects:
    form, values, mean = reading.form, posterior.values, posterior.weights.mean
    at = reading.view(values, form.split(mean, "{}"))
    precision = at.precision[:, 0]
    # missing observations may be NaN
    rows = jnp.where(precision > 0, design_rows(reading.problem, values), 0)
    projection, linear = _without_coefficients(reading, values, at, rows)
    squares = jnp.maximum(rows**2 @ precision - jnp.sum(projection**2, axis=0), 0)
    pairs = coordinates(squares, 1.0, Prior(at.prior.log_odds[0], at.prior.variance[0]))
    included = posterior.weights.probs > 0.5
    return Effects(rows, precision, projection, linear, mean, included, pairs)


def _without_coefficients(
    reading: Reading, values: dict[str, Any], at: View, rows: Float[Array, "P N"]
) -> tuple[Float[Array, "B P"], Float[Array, " P"]]:
    """Integrate the coefficients out: the projection, and products of columns with the residual.

    An intercept that is held would keep out all columns of another mean.
    """
    form, precision = reading.form, at.precision[:, 0]
    columns, y = whitened(rows, precision), whitened(at.Y[:, 0], precision)
    if not form.coefficients:
        return jnp.zeros((0, len(rows)), rows.dtype), columns @ y
    sites = form.coefficient_sites(form.coefficients)
    prior = standardised(sites, at, values).prior
    covariates = whitened(dense_rows(reading.problem, values, sites), precision)
    basis, one = jnp.linalg.qr(covariates.T)[0].T, jnp.ones((), y.dtype)
    coefficients, _ = of_columns(basis, columns @ basis.T, covariates, y, prior, one)
    projection = coefficients.explained(coefficients.J)[0]
    explained = coefficients.explained(coefficients.e[..., None])[0, :, 0]
    y = y + (prior.value - prior.origin)[0] @ covariates
    return projection, columns @ y - explained @ projection


@jax.jit
def log_shares(effects: Effects, effect: Any) -> Float[Array, " P"]:
    """Log posterior probability of each column to carry an effect, given all others.

    The single-effect regression of SuSiE (Wang, Sarkar, Carbonetto and Stephens, 2020, section 2)
    on the residual of the other weights. No column carries two effects.

    :param effect: the column that the fit has included.
    """
    rows, projection, mean = effects.rows, effects.projection, effects.mean
    products = rows @ (effects.precision * rows[effect]) - projection[:, effect] @ projection
    # a column explains again what the fit gives to it, by this effect or by itself
    alone = (effects.pairs.squares * mean).at[effect].set(0)
    linear = effects.linear + products * mean[effect] + alone
    excluded = effects.included.at[effect].set(False)
    return jax.nn.log_softmax(jnp.where(excluded, -jnp.inf, effects.pairs.given(linear).logit))


class CredibleSet(NamedTuple):
    """Columns of which one carries an effect.

    - **effect** - the column that the fit has included.
    - **members** - the columns, the most probable first.
    - **shares** - their probabilities.
    - **purity** - the smallest absolute correlation among them.
    """

    effect: int
    members: list[int]
    shares: Float[np.ndarray, " M"]
    purity: float


def sets_of(
    effects: Effects,
    columns: range,
    coverage: float = COVERAGE,
    min_correlation: float = MIN_CORRELATION,
) -> Iterator[CredibleSet]:
    """Find the sets of all effects that correlated columns explain, in the order of the columns.

    :param columns: those whose effects are asked for.
    :param coverage: least probability of a set.
    :param min_correlation: least absolute correlation in it.
    """
    precision = np.asarray(effects.precision, float)
    table = np.asarray(effects.rows, float)[:, precision > 0].T
    unit = unit_columns(table, precision[precision > 0])
    reported = set()
    for effect in np.flatnonzero(effects.included):
        if effect not in columns:
            continue
        shares = np.exp(np.asarray(log_shares(effects, effect), float))
        members = smallest(shares, coverage)
        # of thousands of columns, most that are uncorrelated are found by the first alone
        first = abs(unit[:, members[0]] @ unit[:, members[1:]])
        if first.min(initial=1.0) < min_correlation:
            continue
        pure = purity(unit[:, members])
        same = np.flatnonzero(twins(unit, members))
        key = frozenset(same.tolist())
        if pure >= min_correlation and key not in reported:
            reported.add(key)
            order = same[np.argsort(-shares[same], kind="stable")]
            yield CredibleSet(int(effect), order.tolist(), shares[order], pure)


def smallest(shares: Float[np.ndarray, " P"], coverage: float) -> list[int]:
    """The fewest columns that have this probability together, the most probable first."""
    order = np.argsort(-shares, kind="stable")
    sums = np.cumsum(shares[order])
    count = 1 + int(np.searchsorted(sums, coverage * sums[-1]))
    return order[:count].tolist()


# Weights and columns


def columns_of(form: Form, site: str | None = None) -> range:
    """The columns of a site, or of all.

    :raises ValueError: if the weights do not multiply columns one by one, or there is no such site.
    """
    user, names = "PairedGuide.credible_sets", [pair.name for pair in form.pairs]
    if form.kind != COLUMNS:
        raise bad(
            user,
            f"the weights {names[0]!r} of features that tasks share, or of latent functions",
            "columns of one design, as in `X @ w`",
            "For draws of one task there is `numpyro_spikeslab.credible_sets`.",
        )
    if form.groups is not None:
        raise bad(
            user,
            f"weights among {names} that share spikes",
            "a spike for each column",
            "Sample them with PairedGibbs, and look at `w_spike` of the draws.",
        )
    if site is not None and site not in names:
        raise bad(f"{user}: site", repr(site), f"one of {names}, the weights of the model")
    ends = np.cumsum([pair.size for pair in form.pairs]).tolist()
    if site is None:
        return range(ends[-1])
    place = names.index(site)
    return range(ends[place] - form.pairs[place].size, ends[place])


def table_of(sets: Iterator[CredibleSet], form: Form) -> Any:
    """Make a DataFrame with one row per set."""
    # takes seconds to import, and most programs make no tables
    import pandas as pd

    labels: list[Any] = []
    for pair in form.pairs:
        name = (pair.name,) if len(form.pairs) > 1 else ()
        labels += [(*name, *index) for index in np.ndindex(*pair.shape)]
    labels = [label[0] if len(label) == 1 else label for label in labels]
    rows = [
        {
            "effect": labels[each.effect],
            "members": tuple(labels[member] for member in each.members),
            "size": len(each.members),
            "probability": each.shares.sum(),
            "purity": each.purity,
            "shares": tuple(each.shares.tolist()),
        }
        for each in sets
    ]
    columns = ["effect", "members", "size", "probability", "purity", "shares"]
    return pd.DataFrame(rows, columns=columns).rename_axis("set")


def shares_of(sets: Iterator[CredibleSet], form: Form) -> dict[str, Float[np.ndarray, "S ..."]]:
    """The shares of members by site, NaN for all other columns."""
    rows = list(sets)
    shares = np.full((len(rows), form.size), np.nan)
    for row, each in zip(shares, rows, strict=True):
        row[each.members] = each.shares
    parts = np.split(shares, np.cumsum([pair.size for pair in form.pairs])[:-1], axis=1)
    return {
        pair.name: part.reshape(len(rows), *pair.shape)
        for pair, part in zip(form.pairs, parts, strict=True)
    }
