# SPDX-License-Identifier: Apache-2.0
"""Error messages about models and data that do not fit."""

from typing import Any

import numpy as np

import jax.numpy as jnp

from numpyro.infer.gibbs import subsample_plate_sizes

from numpyro_spikeslab.reading.form import Form
from numpyro_spikeslab.reading.probe import Verdict


def check_trace(trace: dict[str, Any], user: str) -> None:
    """Refuse subsampled data, and observations of another shape than their distribution's.

    :raises ValueError: the message names the site and the remedy.
    """
    if subsampled := sorted(subsample_plate_sizes(trace)):
        raise ValueError(
            f"{user}: the plates {subsampled} are subsampled. Exact updates need all data; remove "
            "`subsample_size`."
        )
    for name, site in trace.items():
        if site["type"] == "sample" and site["is_observed"]:
            _check_shape(name, site, user)


def _check_shape(name: str, site: dict[str, Any], user: str) -> None:
    """Refuse shapes that broadcast: they would multiply the observations."""
    shape, expected = jnp.shape(site["value"]), tuple(site["fn"].shape())
    # one distribution for all observations is fine
    if expected not in (shape, ()):
        raise ValueError(
            f"{user}: the observations of {name!r} have shape {shape} and their distribution has "
            f"shape {expected}. Give both the same shape; a column needs `y[:, 0]`."
        )
    batch = shape[: len(shape) - site["fn"].event_dim]
    factor = jnp.shape(site["scale"] if site["scale"] is not None else 1.0)
    pairs = zip(reversed(factor), reversed(batch), strict=False)
    if len(factor) > len(batch) or any(one not in (1, size) for one, size in pairs):
        raise ValueError(
            f"{user}: the scale of {name!r} (of handlers.scale) has shape {factor} and its log "
            f"density has shape {batch}. Give both the same shape."
        )


def check_verdict(user: str, form: Form, num_obs: int, verdict: Verdict) -> None:
    """Refuse data that are not finite, no observations, and improper priors.

    :raises ValueError: the message names the site and the remedy.
    """
    site, names = form.likelihood, [pair.name for pair in form.pairs]
    if not verdict.any_counted:
        raise ValueError(
            f"{user}: {site!r} has no observations: {num_obs} values, none of them unmasked."
        )
    if not verdict.finite_design:
        raise ValueError(
            f"{user}: the design that multiplies {names} in {site!r} is not finite. Remove NaN and "
            "infinity from it; impute missing covariates."
        )
    for what, (number, first) in (
        ("observations", verdict.bad_values),
        ("location at zero weights", verdict.bad_offsets),
    ):
        if number:
            raise ValueError(
                f"{user}: the {what} of {site!r} are not finite at {number} entries, the first at "
                f"{first}. Remove NaN and infinity from the data; missing observations need "
                "`numpyro.handlers.mask`."
            )
    if not verdict.proper:
        raise ValueError(
            f"{user}: inclusion probabilities of {names} must lie strictly between 0 and 1, their "
            f"slab scales and the noise scale of {site!r} must be positive and finite."
        )
    if np.any(verdict.slab_locs):
        raise ValueError(
            f"{user}: the prior mean of the slabs of {names} must be 0, got {verdict.slab_locs}. "
            "Leave the prior to spike_slab, and put a known mean into an offset."
        )
