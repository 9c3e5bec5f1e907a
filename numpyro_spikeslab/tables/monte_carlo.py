# SPDX-License-Identifier: Apache-2.0
"""Monte Carlo errors of a regression's chains, which stop when all are small."""

from typing import Any

import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

PROBABILITIES = "inclusion_probabilities.w"
"""The field of chains with the conditional inclusion probabilities."""

MAX_ERROR, MAX_RELATIVE_ERROR = 0.02, 0.1
"""Largest error of an inclusion probability, and of another mean in its standard deviations."""

UNCERTAIN = "slab_scale", "inclusion"
"""Sites whose draws do not count, for data say little of them."""

WEIGHTS = "w", "w_spike", PROBABILITIES
"""Sites of weights that may be out."""


def monte_carlo_errors(draws: dict[str, Any], columns: pd.Series) -> pd.Series:
    """Compute errors as multiples of the largest with which chains stop, named by what they are of.

    These are the inclusion and the weight of columns whose inclusion probability is above its
    largest error, the number of included columns, and all sites that are neither of weights nor
    :data:`UNCERTAIN`. All but inclusion go by effective draws, of the bulk or of the tails if these
    are fewer. ArviZ counts few where chains differ, so R-hat, of which the largest of many is above
    1.01 by chance, would tell no more.

    :param draws: draws so far.
    :param columns: names of the columns that vary, by their place.
    """
    mean = draws[PROBABILITIES].mean(axis=(0, 1))
    # of many columns few are ever included, so only these are copied
    included = columns[mean[columns.index] > MAX_ERROR]
    sites = [name for name in draws if name not in UNCERTAIN + WEIGHTS]
    parts = [
        draws["w"][..., included.index],
        (draws["w"] != 0)[..., columns.index].sum(axis=-1, keepdims=True),
        *(draws[name].reshape(*draws[name].shape[:2], -1) for name in sites),
    ]
    probs, others = (
        xr.Dataset({"x": (["chain", "draw", "site"], x)})
        for x in (draws[PROBABILITIES][..., included.index], np.concatenate(parts, axis=-1))
    )
    errors = arviz_stats.mcse(probs)["x"].values / MAX_ERROR
    counts = [arviz_stats.ess(others, method=method)["x"].values for method in ("bulk", "tail")]
    relative = np.min(counts, axis=0) ** -0.5 / MAX_RELATIVE_ERROR
    names = [f"{of}w[{name}]" for of in ("the inclusion of ", "") for name in included]
    names.append("the number of columns")
    names += [name for name, x in zip(sites, parts[2:], strict=True) for _ in range(x.shape[-1])]
    # those of fewer than four draws are unknown
    return pd.Series(np.concatenate([errors, relative]), names).fillna(np.inf)
