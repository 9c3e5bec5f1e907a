# SPDX-License-Identifier: Apache-2.0
"""The part of a regression's summary that its result stores: the fit, and credible sets."""

from typing import Any
import warnings

import numpy as np
import xarray as xr

from numpyro_spikeslab.reporting.arviz_data import GROUP, PRIOR, inclusion, posterior
from numpyro_spikeslab.reporting.credible_sets import credible_sets
from numpyro_spikeslab.reporting.tables import k_hat

MAX_DIFFERENCE = 0.2
"""Difference of inclusion probabilities of fit and chains above which the fit is flagged."""


def stored_summary(tree: xr.DataTree, X: np.ndarray, ratio: str | None) -> xr.Dataset:
    """Return what :func:`summary` needs beside the chains of a regression.

    Warn if chains include columns where the fit includes none.

    :param X: the columns, for credible sets.
    :param ratio: name of the exponential of a weight, if it has one.
    """
    w, cavi = posterior(tree)["w"], tree.children.get("cavi")
    constants: Any = tree["constant_data"].to_dataset()
    labels = [str(x) for x in constants.get(f"{GROUP}.w", w["feature"]).values]
    sets = xr.full_like(w["feature"], np.nan, float)
    for number, members in credible_sets(tree, "w", X)["members"].items():
        sets[np.isin(labels, [str(member) for member in members])] = number
    rows = xr.Dataset({"credible_set": sets})
    if cavi is not None:
        rows["cavi"] = inclusion(cavi, "w")
        rows.attrs["k_hat"] = k_hat(cavi)
        probs = xr.Dataset({"chains": inclusion(tree, "w"), "fit": rows["cavi"]})
        likely = (probs > 0.5) & (constants[f"{PRIOR}.w"] < 1)
        found = int((likely["chains"] & (probs["chains"] - probs["fit"] > MAX_DIFFERENCE)).sum())
        if found and not likely["fit"].any():
            text = f"the fit includes no column, and the chains include {found}"
            # of the caller, past the decorator
            warnings.warn(f"sparse_regression: {text}. Report the chains.", stacklevel=5)
    of_likelihood = {} if ratio is None else {"ratio": ratio}
    return rows.assign_attrs(of_likelihood, num_samples=w.sizes["draw"])
