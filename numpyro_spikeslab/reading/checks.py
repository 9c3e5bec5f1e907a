# SPDX-License-Identifier: Apache-2.0
"""Error messages about models and data that do not fit."""

from math import prod
from typing import Any

import numpy as np

import jax.numpy as jnp

from numpyro.infer.gibbs import subsample_plate_sizes

from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.likelihood import AUGMENTED
from numpyro_spikeslab.reading.model_run import Problem
from numpyro_spikeslab.reading.probe import Verdict
from numpyro_spikeslab.support.messages import bad


def check_trace(trace: dict[str, Any], user: str) -> None:
    """Refuse subsampled data, and observations of another shape than their distribution's."""
    if subsampled := sorted(subsample_plate_sizes(trace)):
        got = f"the plates {subsampled}, which are subsampled"
        raise bad(user, got, "all data, for exact updates", "Remove `subsample_size`.")
    for name, site in trace.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        shape, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
        # they would broadcast; but one distribution for all observations is fine
        if expected not in (shape, ()):
            what, got = f"{user}: observations of {name!r}", f"the shape {shape}"
            remedy = "Give both the same shape; a column needs `y[:, 0]`."
            raise bad(what, got, f"{expected}, that of their distribution", remedy)


def check_verdict(user: str, problem: Problem, verdict: Verdict) -> None:
    """Refuse non-finite data, no observations, and improper priors."""
    form = problem.form
    site, names = form.response, [pair.name for pair in form.pairs]
    shape = problem.observations(problem.program.shapes).value.shape
    if not verdict.num_counted:
        got = "no observations that are not masked"
        raise bad(f"{user}: {site!r}", got, "one or more")
    if not verdict.proper:
        raise ValueError(
            f"{user}: inclusion probabilities of {names} must lie strictly between 0 and 1, their "
            f"slab scales and the noise scale of {site!r} must be positive and finite, a "
            "covariance of observations positive definite."
        )
    number, first = verdict.bad_design
    if number:
        what = f"{user}: the design that multiplies {names} in {site!r}"
        got = (
            f"one that at {number} observations is not finite, the first at {_place(first, shape)}"
        )
        if columns := _columns_not_finite(problem.constants, int(first), (prod(shape), form.size)):
            got += f", by columns {columns}"
        remedy = "Remove NaN and infinity from it; impute missing covariates."
        raise bad(what, got, "finite numbers", remedy)
    for what, (number, first) in (
        ("observations", verdict.bad_values),
        ("location at zero weights", verdict.bad_offsets),
    ):
        if number:
            raise ValueError(
                f"{user}: the {what} of {site!r} are not finite at {number} entries, the first at "
                f"{_place(first, shape)}. Remove NaN and infinity from the data; missing "
                "observations need `numpyro.handlers.mask`, and intervals their lower end first."
            )
    number, first = verdict.bad_support
    if number:
        raise bad(
            f"{user}: observations of {site!r}",
            f"{number} outside of the support of their distribution, the first at "
            f"{_place(first, shape)}",
            "classes 0 and 1, counts from 0 up to the total, values that it can have",
        )
    if np.any(verdict.slab_locs):
        what = f"{user}: the prior mean of the slabs of {names}"
        remedy = "Leave the prior to spike_slab, and put a known mean into an offset."
        raise bad(what, verdict.slab_locs, "0", remedy)


def check_updates(user: str, form: Form, functions: Any, remedy: str) -> None:
    """Refuse models whose pairs or functions are not Gaussian given all else."""
    if not form.likelihood.is_closed:
        what = f"{user}: the likelihood of {form.response!r}"
        raise bad(what, "one without closed-form updates", AUGMENTED, remedy)
    if form.sparse and not functions.is_white:
        raise bad(
            f"{user}: {form.response!r}",
            f"entries of a table with the functions {form.functions!r}",
            "functions that are 'white' with a mean of zero, as in models.factor_analysis",
            "For others give the whole table, with NaN where entries are missing.",
        )


def check_start(user: str, given: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Refuse start values of unknown names, or of other shapes."""
    for name, value in given.items():
        what = f"{user}: init_params[{name!r}]"
        if name not in shapes:
            raise bad(what, "an unknown name", f"one of {sorted(shapes)}")
        if jnp.shape(value) != shapes[name]:
            raise bad(what, f"shape {jnp.shape(value)}", f"{shapes[name]}")


def _place(first: Any, shape: tuple[int, ...]) -> str:
    """Name an entry of observations of this shape by its numbers from 0 on, given the flat one."""
    index = [int(k) for k in np.unravel_index(int(first), shape)]
    return "row {}, column {}".format(*index) if len(index) == 2 else ", ".join(map(str, index))


def _columns_not_finite(constants: tuple, row: int, shape: tuple[int, int]) -> list[int]:
    """Find the wrong columns of a row in an array of the design's shape that the model reads."""
    rows = [np.asarray(x[row]) for x in constants if np.shape(x) == shape]
    return [] if not rows else np.flatnonzero(~np.isfinite(rows[0])).tolist()
