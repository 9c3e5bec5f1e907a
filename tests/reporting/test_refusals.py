# SPDX-License-Identifier: Apache-2.0
"""Messages of tables and pictures about data and arguments that they do not take."""

import arviz_base
import numpy as np
import pandas as pd
import pytest
from refusals import refusals
from truth.known_draws import (
    FUNCTIONS,
    POINTS,
    as_data,
    chains,
    coin,
    of_tasks,
    pair,
    planted,
    variational,
    with_stats,
)
import xarray as xr

from numpyro_spikeslab import (
    align,
    compare,
    credible_sets,
    models_table,
    plot_effects,
    plot_fit,
    plot_inclusion,
    plot_latent_functions,
    plot_weights,
    summary,
)
from numpyro_spikeslab.reporting.arviz_data import posterior

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("unchecked_types")]

ONE, TWO = pair(coin([0.5])), pair(coin([0.5, 0.5]))
THREE = with_stats(pair(coin([0.2, 0.5, 0.9])), **{"inclusion_probabilities.w": coin([0.5] * 3)})
DRAWS, TRUTH = planted((2, 10))
PLANTED = as_data(DRAWS)
MATRIX = arviz_base.from_dict(
    {"posterior": {name: np.ones((1, 10, 2, 3)) for name in ("w", "w_spike")}},
    dims={name: ["task", "feature"] for name in ("w", "w_spike")},
)
TABLE = np.random.default_rng(0).normal(size=(5, 1))
FIT = (np.ones((6, 2)), np.ones((6, 2)))


def renamed(plate):
    return xr.DataTree.from_dict({"/posterior": posterior(TWO).rename(feature=plate)})


def with_coords(data, **coords):
    return type(data).from_dict({"posterior": posterior(data).assign_coords(**coords)})


def with_nan(data, name):
    data["posterior"][name].values[:1, :1].flat[0] = np.nan
    return data


def with_predictions(data):
    data = data.copy()
    data["predictions"] = posterior(data)[["phi_new"]].isel(draw=slice(3))
    return data


def fit(data=FIT, **arguments):
    return plot_fit(data, **{"X": np.arange(6.0), "Y": np.ones((6, 2))} | arguments)


def sets(X=TABLE, **options):
    return credible_sets(ONE, "w", X, **options)


def functions(data=None, X=None, **coords):
    return plot_latent_functions(data or of_tasks(**coords), X)


TWICE = with_coords(PLANTED, point=[0, 0, *range(2, POINTS)])
BESIDE = {"a": pair(coin([0.5, 0.5]), v=coin([0.5])[..., 0]), "b": TWO}
SIZES = {"a": TWO, "b": ONE}
SMALL = TRUTH | {"W": np.zeros((2, 2))}
SHORT = {"a": FIT, "b": (FIT[0][:2], FIT[1][:2])}
NO_PROBS = {"inclusion_probabilities.W": np.full((2, 50, 3, 3), np.nan)}
NO_CELLS = with_stats(of_tasks(), **NO_PROBS)
NO_VALUES = with_nan(of_tasks(), "phi")
FEW_PROBS = {"inclusion_probabilities.W": np.zeros((2, 10, 1))}
NAMED = pd.DataFrame(np.ones((6, 3)), columns=list("bcd"))
SAME_NAME = pd.DataFrame(np.ones((6, 2)), columns=["a", "a"])

AB = {"a": TWO, "b": TWO}
ONE_WITHOUT = {"a": TWO, "b": xr.DataTree.from_dict({"posterior": posterior(TWO)[["w"]]})}
TURNED = {"a": of_tasks(), "b": of_tasks(latent=[1, 2, 3])}
NO_NUMBER = DRAWS | {"phi": np.full((2, 10, FUNCTIONS, POINTS), np.nan)}
OTHER_NAMES = {"w": pd.Series({"x0": 1.0, "y1": 0.0})}


def of(**variables):
    return arviz_base.from_dict({"posterior": variables})


CASES = {
    # data
    "no tree": (lambda: summary({"w": 1}), "data: got dict without a `posterior` group"),
    "no posterior": (lambda: summary(xr.DataTree()), "data: got DataTree"),
    "no draws": (lambda: summary(ONE.isel(draw=0)), "data: got a posterior with the dimens"),
    "no method": (lambda: plot_inclusion({}), "data: got {}, expected one fit, or several"),
    "a list": (lambda: plot_inclusion([TWO]), "data: got list without a `posterior`"),
    "plate of a table": (lambda: summary(renamed("label")), r"data: got plates called \['label'\]"),
    "plate of a picture": (lambda: plot_inclusion(renamed("model")), r"plates called \['model'\]"),
    # variables, elements and their labels
    "variable": (lambda: summary(ONE, ["w", "v"]), r"var_names: got \['v'\], expected one or"),
    "no variable": (lambda: summary(ONE, []), r"var_names: got \[\]"),
    "shape of a statistic": (
        lambda: summary(with_stats(ONE, **{"inclusion_probabilities.w": coin([0.5, 0.5])})),
        r"`inclusion_probabilities.w` of the shape \(4, 400, 2\), expected \(4, 400, 1\)",
    ),
    "other order of a statistic": (
        lambda: summary(THREE.isel(feature=[2, 1, 0])),
        r"data: got the labels .*, expected \[2, 1, 0\], the labels of `w`.*rename",
    ),
    "dimension": (lambda: summary(PLANTED, coords={"time": [0]}), r"coords: got .* \['time'\]"),
    "label": (lambda: summary(PLANTED, coords={"point": [99]}), "coords: .*expected labels of"),
    "labels twice": (lambda: summary(TWICE, "phi", coords={"point": [2]}), "coords: .*, each once"),
    "chain": (lambda: summary(PLANTED, coords={"chain": [0]}), r"coords: .*data\.sel"),
    "top 0": (lambda: summary(ONE, top=0), "top: got 0, expected a whole"),
    "top 2.5": (lambda: summary(ONE, top=2.5), "top: got 2.5, expected a whole"),
    "ratios": (lambda: summary(ONE, ratios=True), "ratios: got .* expected True for a sparse_reg"),
    # several methods
    "one posterior": (lambda: compare(TWO, "w", "a"), "data: got DataTree, expected a mapping"),
    "one method": (lambda: compare({"a": TWO}, "w", "a"), r"data: got \['a'\], expected a map"),
    "reference": (lambda: compare(AB, "w", "c"), r"reference: got 'c', .* \['a', 'b'\]"),
    "None": (lambda: compare(AB, None, "a"), "var_names: got None"),
    "variable of one": (lambda: compare(BESIDE, "v", "a"), "got `v`, which .* 'b' lacks"),
    "sizes": (lambda: compare(SIZES, "w", "a"), r"`w` of 'b' with .*\[0\]}, expected {"),
    "labels": (lambda: plot_weights(TURNED), "data: got `W` of 'b' with the coordinates"),
    "part of a pair": (lambda: models_table(TWO, "w_slab"), r"var_name: got 'w_slab' .*\['w'\]"),
    # credible sets
    "columns": (lambda: sets(np.ones((5, 2))), r"X: got the shape \(5, 2\), expected \(N, 1\)"),
    "names of columns": (
        lambda: credible_sets(variational(1), "w", pd.DataFrame({"b": [1.0, 2.0]})),
        r"X: got the labels \['b'\] of 'feature', expected \['x0'\]",
    ),
    "table": (lambda: sets(np.nan * TABLE), "X: got nan in row 0, column 0, the first"),
    "coverage": (lambda: sets(coverage=0.0), "coverage: got 0.0"),
    "percent": (lambda: sets(coverage=95), "coverage: got 95"),
    "rate": (lambda: sets(fdr=1.0), "fdr: got 1.0, expected a share between 0 and 1"),
    "correlation": (lambda: sets(min_correlation=-0.5), "min_correlation: got"),
    "tasks": (
        lambda: credible_sets(MATRIX, "w", np.ones((5, 3))),
        r"var_name: got 'w' with the dimensions \['task', 'feature'\]",
    ),
    "no pair": (lambda: credible_sets(ONE, "w_slab", TABLE), "var_name: got 'w_slab'"),
    "no site": (lambda: credible_sets(ONE, "v", TABLE), r"var_names: got \['v'\]"),
    # alignment
    "no weights": (lambda: align(ONE), r"weights: got \['W'\], expected one or more of \['w'"),
    "functions": (lambda: align(PLANTED, functions="phii"), r"functions: got \['phii'\], expected"),
    "two plates": (lambda: align(PLANTED, functions="W_slab"), "expected one plate in common"),
    "no shared plate": (lambda: align(of(**DRAWS)), r"one plate in common.*dims={'W': \["),
    "part of a reference": (lambda: align(PLANTED, {"W": TRUTH["W"]}), "expected `phi`"),
    "shape of a reference": (lambda: align(PLANTED, SMALL), r"reference: got .*\(2, 2\), .* `W`"),
    "labels of a reference": (
        lambda: align(PLANTED, PLANTED.isel(task=[0])),
        r"reference: got .*\(1, 5\)|reference: got the labels",
    ),
    "functions with NaN": (lambda: align(as_data(NO_NUMBER)), "data: got `phi` not finite in"),
    "its statistic": (lambda: align(with_stats(PLANTED, **FEW_PROBS)), "`inclusion_.* shape"),
    "thinned group": (lambda: align(with_predictions(PLANTED)), "`phi_new` .* Thin all groups"),
    # pictures
    "indicator": (lambda: plot_inclusion(TWO, "w_spike"), r"got \['w_spike'\], expected spike"),
    "no weight": (lambda: plot_inclusion(of(mu=np.zeros((2, 10)))), r"\['mu'\], expected a weight"),
    "no effect": (lambda: plot_effects(of(mu=np.zeros((2, 10)))), r"\['mu'\], expected a weight"),
    "no effects": (lambda: plot_effects(TWO, top=0), "top: got 0, expected a whole"),
    "no indicator": (
        lambda: plot_inclusion(ONE_WITHOUT),
        r"spike-and-slab weights, .* \[\] in 'b'",
    ),
    "ticks": (lambda: plot_inclusion(TWO, "w", {"w": [1.0]}), r"shape \(1,\), expected \(2,\)"),
    "labels of ticks": (lambda: plot_inclusion(chains(2), "w", OTHER_NAMES), r"\['x0', 'y1'\]"),
    "percentage": (lambda: plot_inclusion(TWO, threshold=50), "threshold: got 50, expected a"),
    "negative": (lambda: plot_inclusion(TWO, threshold=-0.1), "threshold: got -0.1, expected"),
    "one plate": (lambda: plot_weights(chains(2), "w"), r"`w` with the plates \['feature'\], exp"),
    "no pair of a map": (lambda: plot_weights(of_tasks(), "phi"), r"weights: got \['phi'\]"),
    "cells with NaN": (lambda: plot_weights(NO_CELLS), "data: got `W` not finite"),
    "inputs of functions": (
        lambda: functions(X=np.zeros((4, 2))),
        r"X: got .*\(4, 2\) .*such as X",
    ),
    "labels of points": (lambda: functions(point=list("abcd")), r"X: got .* \(4,\) and <U1"),
    "no active function": (
        lambda: plot_latent_functions(of_tasks().isel(latent=[2]), active_only=True),
        "active_only: got True, expected a weight",
    ),
    "a function with NaN": (lambda: functions(NO_VALUES), "`phi` not finite in some"),
    "variable of a fit": (lambda: fit(of_tasks(), var_name="g"), "var_name: got 'g', expected a"),
    "points of a fit": (
        lambda: fit(of_tasks()),
        r"at the inputs X or X_new: .*\(4, 3\), expected \(6, 2\)",
    ),
    "points of one fit": (lambda: fit(SHORT), r"the fit 'b' .* got the shape \(2, 2\)"),
    "inputs": (lambda: fit(X=np.ones((6, 2))), r"X: got values of shape \(6, 2\)"),
    "observed": (lambda: fit(observed=np.ones((2, 6), bool)), r"observed: .*\(2, 6\), expected"),
    "unknown task": (lambda: fit(tasks=[0, 5]), r"tasks: got \[0, 5\], expected some of \[0, 1\]"),
    "task twice": (lambda: fit(tasks=[1, 1]), r"tasks: got \[1, 1\]"),
    "no task": (lambda: fit(tasks=[]), r"tasks: got \[\]"),
    "columns of one name": (lambda: fit(Y=SAME_NAME), "tasks: got .*The columns of Y"),
    "names of tasks": (
        lambda: fit(of_tasks(task=list("abc")), X_new=range(4), Y=NAMED),
        r"got the labels \['a', 'b', 'c'\] of 'task', expected \['b', 'c', 'd'\]",
    ),
    "variance": (lambda: fit((FIT[0], -FIT[1])), "data: got a variance of -1 in the fit 'fit'"),
}


test_messages_name_argument_and_remedy = refusals(CASES)
