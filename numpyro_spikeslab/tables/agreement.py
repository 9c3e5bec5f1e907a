# SPDX-License-Identifier: Apache-2.0
"""Whether the chains of a regression agree."""

from typing import Any

import arviz_stats
import numpy as np
import xarray as xr

PROBABILITIES = "inclusion_probabilities.w"
"""The field of chains with the conditional inclusion probabilities."""

MAX_R_HAT, MIN_ESS = 1.01, 400
"""Chains agree if all R-hats are below, and all effective sample sizes above."""

UNCERTAIN = "slab_scale", "inclusion"
"""Sites whose draws need not agree, for data say little of them."""

WEIGHTS = "w", "w_spike", "w_slab", PROBABILITIES
"""Sites of weights that may be out."""

UNDECIDED = 0.01
"""Mean inclusion probability up to which chains need not agree on a weight."""


def included_draws(rounds: list[dict[str, Any]]) -> xr.Dataset:
    """Join the draws of the included weights, those always in, the noise and the intercept."""
    # of many columns few are ever included, so only these are copied
    mean = np.mean([x[PROBABILITIES].mean(axis=(0, 1)) for x in rounds], axis=0)
    included = mean > UNDECIDED
    names = [name for name in rounds[0] if name not in UNCERTAIN + WEIGHTS]
    sites = [
        [x["w"][..., included], *(x[name].reshape(*x[name].shape[:2], -1) for name in names)]
        for x in rounds
    ]
    draws = np.concatenate([np.concatenate(x, axis=-1) for x in sites], axis=1)
    return xr.Dataset({"x": (["chain", "draw", "site"], draws)})


def r_hat(data: xr.Dataset) -> xr.DataArray:
    """Compute the rank-normalised R-hat of each site, NaN where all draws are equal."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return arviz_stats.rhat(data)["x"]


def agree(data: xr.Dataset, r_hats: xr.DataArray | None) -> bool:
    """Test whether draws determine the included weights, the noise and the intercept.

    Measured by rank-normalised R-hat and effective sample sizes, of the bulk and of the tails, with
    :data:`MAX_R_HAT` and :data:`MIN_ESS`. The bulk alone does not see tails that chains seldom
    visit, as where classes are separated.

    :param data: :func:`included_draws` so far.
    :param r_hats: their :func:`r_hat`, `None` of a single chain.
    """
    if r_hats is not None and not (r_hats <= MAX_R_HAT).all():
        return False
    return all(
        bool((arviz_stats.ess(data, method=method)["x"] >= MIN_ESS).all())
        for method in ("bulk", "tail")
    )
