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
from numpyro_spikeslab.reading.coefficient_rows import dense_rows, standardised
from numpyro_spikeslab.reading.form import COLUMNS, ENTRIES, FUNCTIONS, SHARED, Form
from numpyro_spikeslab.reading.program import compiled
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.reading.view import View, design_rows


class Effects(NamedTuple):
    """What the single-effect regressions of a fit share.

    - **rows** - the design, features as rows, 0 where nothing is observed.
    - **weights** - precision ``tau_n`` of each observation.
    - **absorbed** - what coefficients, of which there are B, take over of each column: the product
      of two columns is ``sum_n tau_n x_nj x_nk - absorbed_j . absorbed_k``.
    - **linear** - the product of each column with what the fit leaves of the observations.
    - **mean** - ``<w>``.
    - **included** - whether the fit includes a column.
    - **pairs** - what the pair of each column owes to precisions.
    """

    rows: Float[Array, "P N"]
    weights: Float[Array, " N"]
    absorbed: Float[Array, "B P"]
    linear: Float[Array, " P"]
    mean: Float[Array, " P"]
    included: Bool[Array, " P"]
    pairs: Coordinates


def effects_of(reading: Reading, posterior: Posterior) -> Effects:
    """The effects of a posterior of columns."""
    return compiled(lambda posterior: _effects(reading, posterior), posterior)


def _effects(reading: Reading, posterior: Posterior) -> Effects:
    form, values, mean = reading.form, posterior.values, posterior.weights.mean
    at = reading.view(values, form.split(mean, "{}"))
    weights = at.precision[:, 0]
    # what is not observed may be NaN
    rows = design_rows(reading.problem, values)
    rows = jnp.where(weights > 0, rows, 0)
    absorbed, linear = _without_coefficients(reading, values, at, rows)
    squares = jnp.maximum(rows**2 @ weights - jnp.sum(absorbed**2, axis=0), 0)
    pairs = coordinates(squares, 1.0, Prior(at.prior.log_odds[0], at.prior.variance[0]))
    return Effects(rows, weights, absorbed, linear, mean, posterior.weights.probs > 0.5, pairs)


def _without_coefficients(
    reading: Reading, values: dict[str, Any], at: View, rows: Float[Array, "P N"]
) -> tuple[Float[Array, "B P"], Float[Array, " P"]]:
    """Return what coefficients absorb of each column, and its product with the residual, where they
    are integrated out. An intercept that is held would keep out all columns of another mean."""
    form, precision = reading.form, at.precision[:, 0]
    columns, y = whitened(rows, precision), whitened(at.Y[:, 0], precision)
    if not form.coefficients:
        return jnp.zeros((0, len(rows)), rows.dtype), columns @ y
    sites = form.coefficient_sites(form.coefficients)
    prior = standardised(sites, at, values).prior
    covariates = whitened(dense_rows(reading.problem, values, sites), precision)
    basis, one = jnp.linalg.qr(covariates.T)[0].T, jnp.ones((), y.dtype)
    coefficients, _ = of_columns(basis, columns @ basis.T, covariates, y, prior, one)
    absorbed = coefficients.explained(coefficients.J)[0]
    explained = coefficients.explained(coefficients.e[..., None])[0, :, 0]
    y = y + (prior.value - prior.origin)[0] @ covariates
    return absorbed, columns @ y - explained @ absorbed


@jax.jit
def log_shares(effects: Effects, effect: Any) -> Float[Array, " P"]:
    """Log posterior probability of each column to carry an effect, given all others.

    The single-effect regression of SuSiE (Wang, Sarkar, Carbonetto and Stephens, 2020, section 2)
    on what the other weights of the fit leave. No column carries two effects.

    :param effect: the column on which the fit has settled.
    """
    rows, absorbed, mean = effects.rows, effects.absorbed, effects.mean
    products = rows @ (effects.weights * rows[effect]) - absorbed[:, effect] @ absorbed
    # what the fit gives to a column, by this effect or by itself, is part of what it is to explain
    own = (effects.pairs.squares * mean).at[effect].set(0)
    b = effects.linear + products * mean[effect] + own
    taken = effects.included.at[effect].set(False)
    return jax.nn.log_softmax(jnp.where(taken, -jnp.inf, effects.pairs.given(b).logit))


class CredibleSet(NamedTuple):
    """Columns of which one carries an effect.

    - **effect** - the column on which the fit has settled.
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
    least: float = MIN_CORRELATION,
) -> Iterator[CredibleSet]:
    """The sets of all effects that correlated columns explain, in the order of the columns.

    :param columns: those whose effects are asked for.
    :param coverage: least probability of a set.
    :param least: least absolute correlation in it.
    """
    included = np.asarray(effects.included)
    weights = np.asarray(effects.weights, float)
    unit = unit_columns(np.asarray(effects.rows, float)[:, weights > 0].T, weights[weights > 0])
    known = set()
    for effect in columns:
        if not included[effect]:
            continue
        shares = np.exp(np.asarray(log_shares(effects, effect), float))
        members = smallest(shares, coverage)
        # most of those that are not alike show it at once, where there may be thousands
        first = unit[:, members[0]]
        if abs(first @ unit[:, members[1:]]).min(initial=1.0) < least:
            continue
        pure = purity(unit[:, members])
        every = np.flatnonzero(twins(unit, members))
        key = frozenset(every.tolist())
        if pure >= least and key not in known:
            known.add(key)
            order = every[np.argsort(-shares[every], kind="stable")]
            yield CredibleSet(effect, order.tolist(), shares[order], pure)


def smallest(shares: Float[np.ndarray, " P"], coverage: float) -> list[int]:
    """The fewest columns that have this probability together, the most probable first."""
    order = np.argsort(-shares, kind="stable")
    sums = np.cumsum(shares[order])
    count = 1 + int(np.searchsorted(sums, coverage * sums[-1]))
    return order[:count].tolist()


# What is asked for

OTHERS = {
    SHARED: (
        "features that several tasks share",
        "Sample them with PairedGibbs, and give the draws of one task to "
        "numpyro_spikeslab.credible_sets.",
    ),
    FUNCTIONS: ("latent functions", "Use `inclusion_probabilities`."),
    ENTRIES: ("latent functions", "Use `inclusion_probabilities`."),
}
"""What weights may multiply instead of columns, and what there is for them."""


def columns_of(form: Form, site: str | None) -> range:
    """The columns of a site, or of all.

    :raises ValueError: if the weights multiply no columns, or there is no such site.
    """
    if form.kind != COLUMNS:
        what, remedy = OTHERS[form.kind]
        raise ValueError(
            f"PairedGuide.credible_sets: the weights {form.pairs[0].name!r} multiply {what}, "
            f"expected columns of one design, as in `X @ w`. {remedy}"
        )
    for pair in form.pairs:
        if pair.groups is not None:
            raise ValueError(
                f"PairedGuide.credible_sets: the weights {pair.name!r} share spikes, expected one "
                "for each column. Sample them with PairedGibbs, and look at `w_spike` of the draws."
            )
    end = 0
    for pair in form.pairs:
        start, end = end, end + pair.size
        if pair.name == site:
            return range(start, end)
    if site is not None:
        raise ValueError(
            f"PairedGuide.credible_sets: site: got {site!r}, expected one of "
            f"{[pair.name for pair in form.pairs]}, the spike-and-slab weights of the model."
        )
    return range(end)


def labels_of(form: Form) -> list[Any]:
    """Of each column the index of its weight; with the name of its site, if there are several."""
    labels = []
    for pair in form.pairs:
        name = (pair.name,) if len(form.pairs) > 1 else ()
        labels += [(*name, *index) for index in np.ndindex(*pair.shape)]
    return [label[0] if len(label) == 1 else label for label in labels]


def table_of(sets: Iterator[CredibleSet], labels: list[Any]) -> Any:
    """A DataFrame with one row per set."""
    # takes seconds to import, and most programs make no tables
    import pandas as pd

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
    found = list(sets)
    shares = np.full((len(found), form.size), np.nan)
    for row, each in zip(shares, found, strict=True):
        row[each.members] = each.shares
    parts = np.split(shares, np.cumsum([pair.size for pair in form.pairs])[:-1], axis=1)
    return {
        pair.name: part.reshape(len(found), *pair.shape)
        for pair, part in zip(form.pairs, parts, strict=True)
    }
