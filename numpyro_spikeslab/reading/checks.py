# SPDX-License-Identifier: Apache-2.0
"""What a reader says of models and data that do not fit."""

from typing import Any, NamedTuple
import warnings

from jaxtyping import Float, Int
import numpy as np

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from numpyro.infer.gibbs import subsample_plate_sizes

from numpyro_spikeslab.devices import mesh_of
from numpyro_spikeslab.priors import base_of
from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.probe import Verdict
from numpyro_spikeslab.reading.subject import Subject


def check_sharding(arguments: Any, user: str) -> None:
    """No arrays on meshes with explicit axes, whose sharding would be a part of their types.

    :raises ValueError: if there are some.
    """
    for x in jax.tree.leaves(arguments):
        mesh = mesh_of(x)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            raise ValueError(
                f"{user}: an array of shape {jnp.shape(x)} is sharded over a mesh with explicit "
                f"axes {mesh.axis_names}. Make it with `jax.make_mesh(..., axis_types="
                "(jax.sharding.AxisType.Auto,) * number_of_axes)`."
            )


def check_trace(trace: dict[str, Any], user: str) -> None:
    """All data, and observations of the shape and type of their distribution.

    :raises ValueError: if not; the message names the site and the remedy.
    """
    subsampled = sorted(subsample_plate_sizes(trace))
    if subsampled:
        raise ValueError(
            f"{user}: the plates {subsampled} are subsampled. Exact updates need all data; remove "
            "`subsample_size`."
        )
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"]:
            _check_shape(name, site, user)


def _check_shape(name: str, site: dict[str, Any], user: str) -> None:
    """Broadcasting observations against another shape would make more of them than there are."""
    shape, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
    # one distribution for all of them is no mistake
    if expected not in (shape, ()):
        raise ValueError(
            f"{user}: the observations of {name!r} have shape {shape} and their distribution has "
            f"shape {expected}. Give both the same shape; a column needs `y[:, 0]`."
        )
    types = {"observations": site["value"], "location": getattr(base_of(site["fn"]), "loc", 0.0)}
    for what, x in types.items():
        if jnp.issubdtype(jnp.result_type(x), jnp.complexfloating):
            raise ValueError(
                f"{user}: the {what} of {name!r} {'is' if what == 'location' else 'are'} complex. "
                "Stack real and imaginary parts."
            )
    batch = shape[: len(shape) - site["fn"].event_dim]
    factor = jnp.shape(site["scale"] if site["scale"] is not None else 1.0)
    pairs = zip(reversed(factor), reversed(batch), strict=False)
    if len(factor) > len(batch) or any(one not in (1, size) for one, size in pairs):
        raise ValueError(
            f"{user}: the scale of {name!r} (of handlers.scale) has shape {factor} and its log "
            f"density has shape {batch}. Give both the same shape."
        )


def check_numbers(subject: Subject, form: Form, shape: tuple[int, int]) -> None:
    """Rows and columns that floats can number.

    :raises ValueError: if there are more.
    """
    most = round(2 / jnp.finfo(jnp.result_type(float)).eps)
    if max(shape) > most:
        raise ValueError(
            f"{subject.user}: the observations {form.likelihood!r} are entries of a table of shape "
            f"{shape}; in this precision it may have {most} rows and columns. Call "
            "`numpyro.enable_x64()` first."
        )


def check_verdict(subject: Subject, form: Form, found: Verdict) -> None:
    """Finite data, at least one observation, proper priors.

    :raises ValueError: if one is missing; the message names the site and the remedy.
    """
    site, user = form.likelihood, subject.user
    names = [pair.name for pair in form.pairs]
    if not found.any_counted:
        size = jnp.size(subject.trace[site]["value"])
        raise ValueError(
            f"{user}: {site!r} has no observations: {size} values, none of them unmasked."
        )
    if not found.finite_design:
        raise ValueError(
            f"{user}: the design that multiplies {names} in {site!r} is not finite. Remove NaN and "
            "infinity from it; impute missing covariates."
        )
    for what, (number, first) in (
        ("observations", found.bad_values),
        ("location at zero weights", found.bad_offsets),
    ):
        if number:
            raise ValueError(
                f"{user}: the {what} of {site!r} are not finite at {number} entries, the first at "
                f"{first}. Remove NaN and infinity from the data; missing observations need "
                "`numpyro.handlers.mask`."
            )
    if not found.proper:
        raise ValueError(
            f"{user}: inclusion probabilities of {names} must lie strictly between 0 and 1, their "
            f"slab scales and the noise scale of {site!r} must be positive and finite."
        )
    if np.any(found.slab_locs):
        raise ValueError(
            f"{user}: the prior mean of the slabs of {names} must be 0, got {found.slab_locs}. "
            "Leave the prior to spike_slab, and put a known mean into an offset."
        )


def _first(numbers: Int[np.ndarray, " K"]) -> str:
    """The first of some numbers, for a message."""
    return ", ".join(map(str, numbers[:10])) + (", ..." if numbers.size > 10 else "")


def name_empty(user: str, form: Form, seen: tuple[Any, Any]) -> None:
    """Warn of tasks and points without observations.

    :param seen: which tasks and which points have some.
    """
    for which, what in zip(seen, ("tasks", "points"), strict=True):
        empty = np.flatnonzero(~which)
        if empty.size:
            warnings.warn(
                f"{user}: {empty.size} {what} of {form.likelihood!r} have no observation: "
                f"{_first(empty)}. "
                "Their predictions are those of the prior or of their neighbours.",
                stacklevel=7,
            )


class Uncentred(NamedTuple):
    """Columns that look like an intercept, and what becomes of them beside one.

    - **least** - of the squares of a column, the part that its mean must leave.
    - **why** - what happens where it leaves less.
    """

    least: float
    why: str


# Visits to one after the other go that part of their way.
SAMPLED = Uncentred(0.01, "they hardly move, and may be left out or kept by chance")
# To include a column takes half the logarithm of that part from the bound, here a nat.
FITTED = Uncentred(0.13, "they are left out too often, for a fit has one value of these")


def name_uncentred(
    user: str, held: list[str], rows: Float[np.ndarray, "P N"], kind: Uncentred
) -> None:
    """Warn of columns whose means are large beside their spread.

    :param held: sites that may be an intercept.
    :param rows: the columns, as rows.
    """
    squares = np.mean(rows**2, axis=1)
    spread = np.var(rows, axis=1)
    # a column that is constant is no better when it is centred
    hidden = np.flatnonzero((spread > 1e-10 * squares) & (spread < kind.least * squares))
    if hidden.size:
        warnings.warn(
            f"{user}: columns {_first(hidden)} have means above {kind.least**-0.5:.2g} times their "
            f"spread. Beside {held} {kind.why}. Subtract their means.",
            stacklevel=5,
        )
