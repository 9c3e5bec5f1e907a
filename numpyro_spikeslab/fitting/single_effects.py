# SPDX-License-Identifier: Apache-2.0
"""Credible sets of a fit: the columns that could carry an effect instead of the included one."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float
import numpy as np

import jax
import jax.numpy as jnp

from numpyro_spikeslab.algebra.coefficients import whitened
from numpyro_spikeslab.algebra.correlation import (
    COVERAGE,
    MIN_CORRELATION,
    purity,
    twins,
    unit_columns,
)
from numpyro_spikeslab.algebra.pairs import Coordinates, Design, Prior, coordinates
from numpyro_spikeslab.fitting.features import engine_of
from numpyro_spikeslab.fitting.posterior import Posterior
from numpyro_spikeslab.reading.coefficient_rows import columns_without
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.linear import dense_rows
from numpyro_spikeslab.reading.reader import Reading
from numpyro_spikeslab.support.messages import bad


class Effects(NamedTuple):
    """The data of all single-effect regressions of a fit.

    - **rows** - the design, features as rows, 0 where nothing is observed.
    - **precision** - ``tau_n`` of each observation.
    - **design** - the whitened design, with coefficients integrated out.
    - **linear** - product of each of its columns with the residual of the fit.
    - **mean**, **included** - ``<w>``, and whether its inclusion probability is above 0.5.
    - **pairs** - squares and prior of each column.
    """

    rows: Float[Array, "P N"]
    precision: Float[Array, " N"]
    design: Float[Array, "P K"]
    linear: Float[Array, " P"]
    mean: Float[Array, " P"]
    included: Bool[Array, " P"]
    pairs: Coordinates


def effects_of(reading: Reading, posterior: Posterior) -> Effects:
    """Collect the data of a fit."""
    form, values, mean = reading.form, posterior.values, posterior.weights.mean
    # at the mean weights
    if form.likelihood.is_fixed:
        at = reading.view(values, form.split(mean, "{}"))
    else:
        at = engine_of(reading, False, None).view(posterior)
    relative, noise = at.relative[:, 0], jnp.sqrt(at.sigma2[0])
    # missing observations may be NaN
    rows = jnp.where(relative > 0, dense_rows(reading.problem, values), 0)
    design, residual = whitened(rows, relative), at.whitened
    if form.coefficients:
        # an intercept at a fixed value would keep out all columns of another mean
        sites, block = form.coefficient_sites(form.coefficients), Design(design[None], None)
        covariates = reading.covariates_at(values, form.coefficients)
        without = columns_without(covariates, at, values, sites, block, None)
        assert isinstance(without.design, Design)
        design, residual = without.design.features, without.residual
    design, residual = design / noise, residual / noise
    squares = jnp.sum(design**2, axis=1)
    pairs = coordinates(squares, 1.0, Prior(at.prior.log_odds[0], at.prior.variance[0]))
    included = posterior.weights.probs > 0.5
    return Effects(rows, at.precision[:, 0], design, design @ residual, mean, included, pairs)


@jax.jit
def log_shares(effects: Effects, effect: Any) -> Float[Array, " P"]:
    """Compute log posterior probabilities of the columns to carry an effect, given all others.

    The single-effect regression of SuSiE (Wang, Sarkar, Carbonetto and Stephens, 2020, section 2)
    on the residual of the other weights. No column carries two effects.
    """
    products, mean = effects.design @ effects.design[effect], effects.mean
    # a column explains again what the fit gives to it, by this effect or by itself
    alone = (effects.pairs.squares * mean).at[effect].set(0)
    linear = effects.linear + products * mean[effect] + alone
    excluded = effects.included.at[effect].set(False)
    return jax.nn.log_softmax(jnp.where(excluded, -jnp.inf, effects.pairs.given(linear).logit))


class CredibleSet(NamedTuple):
    """Columns of which one carries the effect of an included column, the most probable first."""

    effect: int
    members: list[int]
    shares: Float[np.ndarray, " M"]
    purity: float


def sets_of(
    effects: Effects,
    columns: Sequence[int],
    coverage: float = COVERAGE,
    min_correlation: float = MIN_CORRELATION,
) -> Iterator[CredibleSet]:
    """Find the sets of all effects among ``columns`` that correlated columns explain, in order."""
    precision = np.asarray(effects.precision, float)
    table = np.asarray(effects.rows, float)[:, precision > 0].T
    unit = unit_columns(table, precision[precision > 0])
    reported = set()
    for effect in np.flatnonzero(effects.included):
        if effect not in columns:
            continue
        shares = np.exp(np.asarray(log_shares(effects, effect), float))
        order = np.argsort(-shares, kind="stable")
        sums = np.cumsum(shares[order])
        # the fewest columns of this probability together
        members = order[: 1 + np.searchsorted(sums, coverage * sums[-1])].tolist()
        # the first alone rules out most sets of uncorrelated columns
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


def misfit(form: Form, blocks: Any) -> str:
    """Describe weights without credible sets, for a guide with these blocks; else ``""``."""
    names = [pair.name for pair in form.pairs]
    if blocks is not None:
        return "a guide with blocks, which share an effect among their columns themselves"
    if not form.is_design:
        return f"the weights {names} of features that tasks share, or of latent functions"
    return "" if form.sets.alone.all() else f"weights among {names} that share spikes"


def columns_of(pairs: Any, site: str | None) -> list[int]:
    """Return the columns of a site, or of all."""
    names = [pair.name for pair in pairs for _ in range(pair.size)]
    if site not in (None, *names):
        user, expected = "PairedGuide.credible_sets: site", [pair.name for pair in pairs]
        raise bad(user, repr(site), f"one of {expected}, the weights of the model")
    return [place for place, name in enumerate(names) if site in (None, name)]


def table_of(sets: Iterator[CredibleSet], pairs: Any) -> Any:
    """Make a DataFrame with one row per set."""
    # takes seconds to import, and most programs make no tables
    import pandas as pd

    labels: list[Any] = []
    for pair in pairs:
        name = (pair.name,) if len(pairs) > 1 else ()
        labels += [(*name, *index) for index in np.ndindex(*pair.shape)]
    labels = [label[0] if len(label) == 1 else label for label in labels]
    rows = []
    for effect, places, shares, pure in sets:
        members = tuple(labels[place] for place in places)
        row = labels[effect], members, len(places), shares.sum(), pure, tuple(shares.tolist())
        rows.append(row)
    columns = ["effect", "members", "size", "probability", "purity", "shares"]
    return pd.DataFrame(rows, columns=columns).rename_axis("set")
