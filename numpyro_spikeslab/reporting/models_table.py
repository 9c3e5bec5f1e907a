# SPDX-License-Identifier: Apache-2.0
"""Tables of models: the sets of columns that draws include, and how often."""

import arviz_stats
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_spikeslab.reporting import arviz_data
from numpyro_spikeslab.reporting.arviz_data import pairs, plates, posterior
from numpyro_spikeslab.support.messages import bad


def models_table(data: xr.DataTree, var_name: str, top: int = 10) -> pd.DataFrame:
    """Rank the models of a posterior, which are the sets of columns whose weights are not zero.

    The probability of a model is its share of the draws. If there are many columns, each model may
    be drawn a few times at most: read the inclusion probabilities of :func:`summary` then.

    The median probability model has the columns whose inclusion probability is above 1/2 (Barbieri
    and Berger, 2004). If the columns are uncorrelated, it is the one model that predicts best. It
    is the last row if it is not one of the most probable.

    :param data: ArviZ data of Markov chains or variational draws.
    :param var_name: a spike-and-slab weight with one plate.
    :param top: number of models, at most.
    :returns: a DataFrame with one row per model, the most probable first: ``members``, a tuple of
        labels; ``size``, their number; ``probability``; ``mcse_probability``, its Monte Carlo
        standard error by ArviZ, NaN for a model of all draws or of none; ``is_median``.
    :raises ValueError: if ``var_name`` is not such a weight, or ``top`` is below 1.

    >>> import arviz_base, numpy as np
    >>> from numpyro_spikeslab import models_table
    >>> spike = np.random.default_rng(0).binomial(1, [0.9, 0.0, 0.2], size=(4, 500, 3))
    >>> draws = {"w": 2.0 * spike, "w_spike": spike}
    >>> models_table(arviz_base.from_dict({"posterior": draws}), "w").round(2)
          members  size  probability  mcse_probability  is_median
    model
    0        (0,)     1         0.72              0.01       True
    1      (0, 2)     2         0.19              0.01      False
    2          ()     0         0.07              0.01      False
    3        (2,)     1         0.02              0.00      False
    """
    arviz_data.check_top(top)
    draws = posterior(data)
    arviz_data.select(draws, var_name, argument="var_name")
    w = draws[var_name]
    if var_name not in pairs(draws) or len(plates(w)) != 1:
        got = f"{var_name!r} with the dimensions {plates(w)}"
        remedy = "Choose one task, with `sel` of xarray."
        raise bad("var_name", got, f"one of {pairs(draws)} with one plate", remedy)
    arviz_data.check_finite(w)
    dims, labels = arviz_data.sample_dims(draws), w.indexes[plates(w)[0]]
    is_median = arviz_data.inclusion(data, var_name).values > 0.5
    # weights, since a group shares one spike; the median model may be in no draw
    spikes = np.packbits((w.values != 0).reshape(-1, len(labels)), axis=1)
    spikes = np.concatenate([spikes, np.packbits(is_median)[None]])
    rows, numbers, counts = np.unique(spikes, axis=0, return_inverse=True, return_counts=True)
    numbers, median = numbers.ravel()[:-1], numbers.ravel()[-1]
    counts[median] -= 1
    best = np.argsort(-counts, kind="stable")[:top]
    best = best if median in best else np.append(best, median)
    models = np.unpackbits(rows[best], axis=1, count=len(labels)) > 0
    drawn = (numbers.reshape(w.shape[:-1])[..., None] == best).astype(float)
    drawn = xr.DataArray(drawn, {dim: draws[dim] for dim in dims}, [*dims, "model"])
    with np.errstate(divide="ignore", invalid="ignore"):
        mcse = arviz_stats.mcse(drawn, sample_dims=dims, method="mean")
    columns = {
        "members": [tuple(labels[model].tolist()) for model in models],
        "size": models.sum(axis=1),
        "probability": arviz_data.mean(drawn),
        "mcse_probability": mcse.where(~arviz_data.is_constant(drawn, dims)),
        "is_median": best == median,
    }
    return pd.DataFrame(columns).rename_axis("model")
